//! Moving a volume's bytes: a few connections with several requests in flight on each, a thread for
//! each connection that reads or writes the file too, and all of it able to wait for a daemon that
//! is started anew.

pub(super) mod awaited;
#[expect(unsafe_code, reason = "calls of Landlock")]
mod confine;
pub(super) mod export;
pub(super) mod format;
pub(super) mod image;
pub(super) mod import;
pub(super) mod increment;
pub(super) mod link;
pub(super) mod nbd;
pub(super) mod port;
pub(super) mod progress;
pub(super) mod qemu;
mod zeroes;

#[cfg(test)]
mod memory;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockd_media::error::Error;

/// Bytes of one request: those of an extent, unless a pool has others. Large enough that its cost
/// is in the bytes, small enough that they stay in a processor's cache between file and socket.
const REQUEST_BYTES: usize = 256 << 10;

/// Connections. The daemon spreads them over its workers.
const CONNECTION_COUNT: usize = 4;

/// Requests in flight on each connection. On all of them together that is half of the IO memory
/// that a worker of the daemon has by default.
const DEPTH: usize = 8;

/// Between two looks at whether a transfer was stopped.
const STOP_WAIT: Duration = Duration::from_millis(100);

/// Set to end a transfer early.
#[derive(Debug, Default)]
pub(super) struct Stop(AtomicBool);

impl Stop {
    /// Requests the end.
    pub(super) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// An error once the end was asked for.
    pub(super) fn check(&self) -> Result<(), Error> {
        if self.0.load(Ordering::Relaxed) { Err(interrupted()) } else { Ok(()) }
    }
}

/// The error of a transfer that was stopped.
pub(super) fn interrupted() -> Error {
    Error::Interrupted { what: "transfer" }
}

/// The first of several failures that has a cause: a stopped thread only reports that another one
/// failed.
fn first_error(results: Vec<Result<(), Failure>>) -> Result<(), Error> {
    let mut peers = false;
    for result in results {
        match result {
            Ok(()) => {}
            Err(Failure::Own(error)) => return Err(error),
            Err(Failure::Peer) => peers = true,
        }
    }
    if peers { Err(interrupted()) } else { Ok(()) }
}

/// Why a thread of a transfer ended early.
#[derive(Debug)]
enum Failure {
    /// The thread's own failure.
    Own(Error),
    /// The thread at the other end of its channel is gone, or another one has failed.
    Peer,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Own(error)
    }
}

/// The result of a thread; a panic goes on in the caller.
fn joined<T>(handle: std::thread::ScopedJoinHandle<'_, T>) -> T {
    handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
