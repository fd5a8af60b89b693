//! The numbers that a guest prints, whichever qemu it runs in, and the time between them.

use std::io::{BufRead, BufReader};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use blockd_testkit::clock::Clock;

use super::records::KEPT;

/// Records that the guest has noted as durable. Each qemu has a connection.
#[derive(Debug)]
pub(super) struct Journal(Arc<Mutex<Noted>>);

#[derive(Debug)]
struct Noted {
    /// Records answered: all below this number.
    count: u64,
    clock: Clock,
    last: Duration,
    longest: Duration,
}

impl Journal {
    /// Listens at this socket until the process ends.
    pub(super) fn listen(socket: &Path) -> Result<Self> {
        let listener = UnixListener::bind(socket)
            .with_context(|| format!("listening at {}", socket.display()))?;
        let (last, longest) = (Duration::ZERO, Duration::ZERO);
        let noted = Arc::new(Mutex::new(Noted { count: 0, clock: Clock::start(), last, longest }));
        let all = Arc::clone(&noted);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let noted = Arc::clone(&all);
                std::thread::spawn(move || note(stream, &noted));
            }
        });
        Ok(Self(noted))
    }

    /// How many records were answered.
    pub(super) fn count(&self) -> u64 {
        lock(&self.0).count
    }

    /// The longest time between two answers since the last call.
    pub(super) fn longest_gap(&self) -> Duration {
        std::mem::take(&mut lock(&self.0).longest)
    }
}

/// Notes the lines of one qemu. A line that the migration has cut in two is no number, or a smaller
/// one, and the next one counts.
fn note(stream: UnixStream, noted: &Mutex<Noted>) {
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        let number = line.strip_prefix(KEPT).and_then(|number| number.trim().parse::<u64>().ok());
        let mut noted = lock(noted);
        let Some(number) = number.filter(|number| *number >= noted.count) else { continue };
        let now = noted.clock.elapsed();
        let gap = now.saturating_sub(noted.last);
        if noted.count > 0 {
            noted.longest = noted.longest.max(gap);
        }
        (noted.count, noted.last) = (number + 1, now);
    }
}

fn lock(noted: &Mutex<Noted>) -> MutexGuard<'_, Noted> {
    noted.lock().unwrap_or_else(PoisonError::into_inner)
}
