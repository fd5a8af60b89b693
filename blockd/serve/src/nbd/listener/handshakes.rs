//! Which of the accepted connections negotiate, and in which order.
//!
//! Clients that connect and then say nothing take places among the handshakes. They must not keep
//! other clients out, so places are shared out by peer: the peer with the most handshakes gives one
//! up first, and a peer with fewer is served first. Within a peer the newest is served first: a
//! crowd that connected before and says nothing is not in its way, and waits until its time is
//! over.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockd_media::clock::Clock;
use tokio::task::AbortHandle;

use super::ListenerStats;
use crate::nbd::Peer;
use crate::nbd::handshake::Accepted;

/// How long a handshake is left alone before it may have to make room for another of the same
/// peer. Clients that are not stuck are done in milliseconds.
const GRACE: Duration = Duration::from_millis(500);

/// The same, for a client of a peer that has fewer handshakes.
const SHORT_GRACE: Duration = Duration::from_millis(100);

/// One peer leaves this part of all places to others, so that they wait for nothing.
const KEPT_FOR_OTHERS: usize = 8;

struct Running {
    peer: Peer,
    started: Duration,
    task: AbortHandle,
}

struct Waiting {
    accepted: Accepted,
    since: Duration,
}

/// Handshakes under way, the oldest first, and connections that wait for a place among them. Ends
/// them when it is dropped.
pub(super) struct Handshakes {
    clock: Clock,
    limit: usize,
    /// How many connections may wait, and how long.
    max_waiting: usize,
    max_wait: Duration,
    running: VecDeque<Running>,
    waiting: VecDeque<Waiting>,
}

impl Handshakes {
    pub(super) fn new(limit: usize, max_waiting: usize, max_wait: Duration) -> Self {
        let (running, waiting) = Default::default();
        let limit = limit.max(1);
        Self { clock: Clock::start(), limit, max_waiting, max_wait, running, waiting }
    }

    /// Whether something may have to be done when time has passed.
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Takes a connection that was accepted. With too many, the one that has waited for longest is
    /// closed.
    pub(super) fn accept(&mut self, accepted: Accepted, stats: &ListenerStats) {
        if self.waiting.len() >= self.max_waiting && self.waiting.pop_front().is_some() {
            stats.displaced.fetch_add(1, Ordering::Relaxed);
        }
        self.waiting.push_back(Waiting { accepted, since: self.clock.elapsed() });
    }

    /// The next connection to negotiate with. It is given to [`Self::started`].
    pub(super) fn next(&mut self, stats: &ListenerStats) -> Option<Accepted> {
        let now = self.clock.elapsed();
        self.running.retain(|one| !one.task.is_finished());
        while self.waiting.front().is_some_and(|one| now - one.since > self.max_wait) {
            self.waiting.pop_front();
            stats.timed_out.fetch_add(1, Ordering::Relaxed);
        }
        let mut counts: HashMap<Peer, usize> = HashMap::new();
        for one in &self.running {
            *counts.entry(one.peer).or_default() += 1;
        }
        let count = |peer: Peer| counts.get(&peer).copied().unwrap_or(0);
        let (at, next) = self
            .waiting
            .iter()
            .map(|one| one.accepted.origin.peer)
            .enumerate()
            .rev()
            .min_by_key(|&(_, peer)| count(peer))?;
        let is_full = self.running.len() >= self.limit;
        if is_full || count(next) >= self.limit - self.limit / KEPT_FOR_OTHERS {
            let most = counts.values().copied().max().unwrap_or(0);
            let gives_way = |one: &Running| match is_full {
                true => count(one.peer) == most,
                false => one.peer == next,
            };
            let oldest = self.running.iter().position(gives_way)?;
            let grace = if count(next) < most { SHORT_GRACE } else { GRACE };
            if now - self.running[oldest].started < grace {
                return None;
            }
            if let Some(oldest) = self.running.remove(oldest) {
                oldest.task.abort();
                stats.displaced.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.waiting.remove(at).map(|one| one.accepted)
    }

    /// A handshake has begun.
    pub(super) fn started(&mut self, peer: Peer, task: AbortHandle) {
        self.running.push_back(Running { peer, started: self.clock.elapsed(), task });
    }
}

impl Drop for Handshakes {
    fn drop(&mut self) {
        for one in &self.running {
            one.task.abort();
        }
    }
}
