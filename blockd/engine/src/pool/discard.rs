//! The thread that discards freed extents on the media of a pool.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockd_mapper::io::{IoCommand, IoError, IoOp};
use blockd_media::Device;
use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};

use super::handle::Shared;

/// Bytes that are discarded at a time. The gate of a claim is looked at before each piece, so a
/// piece has to end within the bound on IO, which is a second: 64 MiB are milliseconds on most
/// devices, and a fraction of a second where a device writes zeroes instead.
const PIECE_BYTES: u64 = 64 << 20;

/// Discards that may wait for the media: the engine sends fewer.
const MAX_DISCARDS: usize = 1024;
/// How long the thread stays when there is nothing to discard: pools that are idle have none.
const STAY: Duration = Duration::from_secs(5);

type Ended = (IoCommand, Result<(), IoError>);

/// Discards what the pool's thread sends, one command after the other: a device may take long. A
/// thread does it as long as there is something to do.
#[derive(Debug)]
pub(super) struct Discarder {
    work: Arc<Work>,
    commands: Sender<IoCommand>,
    /// Commands that have ended.
    pub(super) ended: Receiver<Ended>,
}

#[derive(Debug)]
struct Work {
    shared: Arc<Shared>,
    /// Set to skip the discards that have not begun.
    skips: AtomicBool,
    /// There is a thread, which looks for commands once more after it has cleared this.
    runs: AtomicBool,
    commands: Receiver<IoCommand>,
    ended: Sender<Ended>,
}

impl Discarder {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let (send, commands) = bounded(MAX_DISCARDS);
        let (ended, receive) = bounded(MAX_DISCARDS);
        let (skips, runs) = (AtomicBool::new(false), AtomicBool::new(false));
        let work = Arc::new(Work { shared, skips, runs, commands, ended });
        Self { work, commands: send, ended: receive }
    }

    /// Has a command done, or gives it back if too many wait.
    pub(super) fn send(&self, command: IoCommand) -> Result<(), IoCommand> {
        self.commands.try_send(command).map_err(TrySendError::into_inner)?;
        if !self.work.runs.swap(true, Ordering::AcqRel) {
            let work = Arc::clone(&self.work);
            let thread = std::thread::Builder::new().name("discard".to_owned());
            if let Err(error) = thread.spawn(move || work.run()) {
                tracing::warn!(%error, "no thread for discards: they are left out");
                self.work.runs.store(false, Ordering::Release);
                self.work.refuse();
            }
        }
        Ok(())
    }

    /// Skips the discards that have not begun.
    pub(super) fn skip(&self) {
        self.work.skips.store(true, Ordering::Relaxed);
    }
}

impl Work {
    fn run(&self) {
        loop {
            while let Ok(command) = self.commands.recv_timeout(STAY) {
                let result = self.discard(&command);
                if self.ended.send((command, result)).is_err() {
                    return;
                }
                self.shared.doorbell.ring();
            }
            self.runs.store(false, Ordering::Release);
            // A command that was sent before that has started no thread.
            if self.commands.is_empty() || self.runs.swap(true, Ordering::AcqRel) {
                return;
            }
        }
    }

    /// Ends what waits: a discard that is left out does no harm.
    fn refuse(&self) {
        while let Ok(command) = self.commands.try_recv() {
            if self.ended.try_send((command, Err(IoError::Gone))).is_err() {
                return;
            }
        }
        self.shared.doorbell.ring();
    }

    fn discard(&self, command: &IoCommand) -> Result<(), IoError> {
        let IoOp::Discard { offset, len } = command.op else { return Ok(()) };
        let device = self.shared.device(command.device);
        let Some(device) = device.filter(|device| device.takes_discards()) else { return Ok(()) };
        let skips = || self.skips.load(Ordering::Relaxed) || !device.may_write();
        // A mapping has no gate, and persistent memory is erased as a whole.
        let piece = if device.memory().is_some() { len } else { PIECE_BYTES };
        in_pieces(offset, len, piece, skips, |offset, len| Device::discard(device, offset, len))
    }
}

/// Discards a range in pieces, until one fails. Those that may be skipped are: a discard that is
/// left out does no harm.
fn in_pieces(
    mut offset: u64,
    mut len: u64,
    piece: u64,
    skips: impl Fn() -> bool,
    mut discard: impl FnMut(u64, u64) -> Result<(), IoError>,
) -> Result<(), IoError> {
    while len > 0 && !skips() {
        let bytes = len.min(piece);
        discard(offset, bytes)?;
        offset += bytes;
        len -= bytes;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn a_long_discard_is_cut_into_pieces_and_ends_where_the_claim_lapses() {
        let pieces = RefCell::new(Vec::new());
        let discard = |offset, len| {
            pieces.borrow_mut().push((offset, len));
            Ok(())
        };
        in_pieces(1 << 30, (128 << 20) + 4096, PIECE_BYTES, || false, discard).unwrap();
        let wanted = [(1 << 30, 64 << 20), ((1 << 30) + (64 << 20), 64 << 20)];
        assert_eq!(pieces.borrow()[..2], wanted);
        assert_eq!(pieces.borrow()[2..], [((1 << 30) + (128 << 20), 4096)]);
        pieces.borrow_mut().clear();
        let lapsed = || pieces.borrow().len() == 2;
        in_pieces(0, 1 << 30, PIECE_BYTES, lapsed, discard).unwrap();
        assert_eq!(pieces.borrow().len(), 2);
    }
}
