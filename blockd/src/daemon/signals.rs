//! Signals to the daemon.

use std::time::Duration;

use blockd_media::error::Error;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// A signal within this time of the first is the same one.
const SECOND_SIGNAL: Duration = Duration::from_secs(1);

/// Signals that are handled. A second one to stop ends the process at once.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

impl Signals {
    pub(super) fn new() -> Result<Self, Error> {
        let handle = |kind| signal(kind).map_err(|error| Error::io("handle signals", error));
        Ok(Self {
            terminate: handle(SignalKind::terminate())?,
            interrupt: handle(SignalKind::interrupt())?,
            hang_up: handle(SignalKind::hangup())?,
        })
    }

    /// Waits for the next, or for a request that says the same.
    pub(super) async fn next(&mut self, stop_requested: impl Future<Output = ()>) -> SignalAction {
        tokio::select! {
            () = stop_requested => SignalAction::Stop,
            _ = self.terminate.recv() => SignalAction::Stop,
            _ = self.interrupt.recv() => SignalAction::Stop,
            _ = self.hang_up.recv() => SignalAction::ReadAgain,
        }
    }

    /// From now on.
    pub(super) fn end_at_the_next(self) {
        tokio::spawn(async move {
            // Some senders signal twice: to the process, and to its group.
            tokio::time::sleep(SECOND_SIGNAL).await;
            let flags = [SignalKind::terminate(), SignalKind::interrupt()].map(signal);
            let [Ok(mut terminate), Ok(mut interrupt)] = flags else { return };
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            tracing::error!("second stop signal: ending at once, as after a crash");
            std::process::exit(1);
        });
    }
}

/// The action that a signal requests.
pub(super) enum SignalAction {
    Stop,
    /// To read the configuration again.
    ReadAgain,
}
