//! Log lines about connections: a client that opens several of them has one line.

use std::time::Duration;

use blockd_media::clock::Clock;
use parking_lot::Mutex;

use super::super::Peer;

/// Connections of one client to one export within this time are logged as one.
const TOGETHER: Duration = Duration::from_secs(10);
/// Remembered clients. With more at once, some have several lines.
const MAX_CLIENTS: usize = 64;

/// The clients that connected within [`TOGETHER`].
pub(super) struct Greetings {
    clock: Clock,
    /// Peer, export and time of the last connection; the oldest first.
    known: Mutex<Vec<(Peer, String, Duration)>>,
}

impl Default for Greetings {
    fn default() -> Self {
        Self { clock: Clock::start(), known: Mutex::default() }
    }
}

impl Greetings {
    /// Logs a connection: the first of a client at level info, further ones at level debug.
    pub(super) fn connected(&self, name: &str, peer: Peer, export: &str) {
        if self.is_first(peer, export, self.clock.elapsed()) {
            tracing::info!(peer = name, export, "connected");
        } else {
            tracing::debug!(peer = name, export, "connected again");
        }
    }

    fn is_first(&self, peer: Peer, export: &str, now: Duration) -> bool {
        let mut known = self.known.lock();
        known.retain(|(.., last)| now.saturating_sub(*last) < TOGETHER);
        let found = known.iter().position(|(of, to, _)| *of == peer && to == export);
        let is_first = match found {
            // Peers that are not known are not one client.
            Some(at) => {
                known.remove(at);
                peer == Peer::Unknown
            }
            None => true,
        };
        if known.len() == MAX_CLIENTS {
            known.remove(0);
        }
        known.push((peer, export.to_owned(), now));
        is_first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_announced_once_for_each_export() {
        let greetings = Greetings::default();
        let at = Duration::from_secs;
        let (one, other) = (Peer::Process(7), Peer::Process(8));
        assert!(greetings.is_first(one, "a", at(0)));
        assert!(!greetings.is_first(one, "a", at(0)));
        assert!(!greetings.is_first(one, "a", at(9)));
        assert!(greetings.is_first(one, "b", at(9)));
        assert!(greetings.is_first(other, "a", at(9)));
        assert!(!greetings.is_first(one, "a", at(18)), "the time is counted from the last one");
        assert!(greetings.is_first(one, "a", at(28)));
        assert!(greetings.is_first(Peer::Unknown, "a", at(28)));
        assert!(greetings.is_first(Peer::Unknown, "a", at(28)));
    }

    #[test]
    fn a_crowd_takes_bounded_memory() {
        let greetings = Greetings::default();
        for pid in 0..1000 {
            assert!(greetings.is_first(Peer::Process(pid), "a", Duration::ZERO));
        }
        assert_eq!(greetings.known.lock().len(), MAX_CLIENTS);
        assert!(!greetings.is_first(Peer::Process(999), "a", Duration::ZERO));
    }
}
