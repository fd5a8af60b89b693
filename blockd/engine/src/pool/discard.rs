//! The thread that discards freed extents on the media of a pool.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockd_mapper::io::{IoCommand, IoError, IoOp};
use blockd_media::Device;
use blockd_media::pool::PoolError;
use crossbeam_channel::{Receiver, Sender, bounded};

use super::handle::Shared;

/// Bytes that are discarded at a time. The gate of a claim is looked at before each piece, so a
/// piece has to end within the bound on IO, which is a second: 64 MiB are milliseconds on most
/// devices, and a fraction of a second where a device writes zeroes instead.
const PIECE_BYTES: u64 = 64 << 20;

/// Discards that may wait for the media: the engine sends fewer.
const MAX_DISCARDS: usize = 1024;

/// A command that has come back.
type Discarded = (IoCommand, Result<(), IoError>);

/// The pool's side of the thread that discards, which is started with the first discard: most pools
/// of a host may have none for long.
#[derive(Debug)]
pub(super) struct Discarder {
    worker: Worker,
    channels: Option<(Sender<IoCommand>, Receiver<Discarded>)>,
}

impl Discarder {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let (skips, left_out) = (Arc::default(), Arc::default());
        Self { worker: Worker { shared, skips, left_out }, channels: None }
    }

    /// Begins a discard; gives it back, to be left out, where there is no thread or no room for it.
    pub(super) fn begin(&mut self, command: IoCommand) -> Result<(), IoCommand> {
        if self.channels.is_none() {
            match self.worker.start() {
                Ok(channels) => self.channels = Some(channels),
                Err(error) => tracing::warn!(%error, "a discard is left out"),
            }
        }
        let sent = match &self.channels {
            Some((send, _)) => {
                send.try_send(command).map_err(crossbeam_channel::TrySendError::into_inner)
            }
            None => Err(command),
        };
        if sent.is_err() {
            self.worker.left_out.store(true, Ordering::Relaxed);
        }
        sent
    }

    /// The next command that has come back, if one has.
    pub(super) fn ended(&self) -> Option<Discarded> {
        self.channels.as_ref()?.1.try_recv().ok()
    }

    /// The same, after a wait for it; `None` when the time is over.
    pub(super) fn ended_within(&self, time: Duration) -> Option<Discarded> {
        self.channels.as_ref()?.1.recv_timeout(time).ok()
    }

    /// Skips the discards that have not begun.
    pub(super) fn skip(&self) {
        self.worker.skips.store(true, Ordering::Relaxed);
    }

    /// Whether something was left out: what was to be erased is there still.
    pub(super) fn has_left_out(&self) -> bool {
        self.worker.left_out.load(Ordering::Relaxed)
    }
}

/// Discards what the pool's thread sends, one command after the other: a device may take long.
#[derive(Clone, Debug)]
struct Worker {
    shared: Arc<Shared>,
    skips: Arc<AtomicBool>,
    left_out: Arc<AtomicBool>,
}

impl Worker {
    /// Starts the thread. It ends with the sender of commands.
    fn start(&self) -> Result<(Sender<IoCommand>, Receiver<Discarded>), PoolError> {
        let (send, commands) = bounded::<IoCommand>(MAX_DISCARDS);
        let (ended, receive) = bounded(MAX_DISCARDS);
        let worker = self.clone();
        let run = move || {
            for command in commands {
                let result = worker.discard(&command);
                if ended.send((command, result)).is_err() {
                    return;
                }
                worker.shared.doorbell.ring();
            }
        };
        let thread = std::thread::Builder::new().name("discard".to_owned()).spawn(run);
        thread.map_err(PoolError::io("start a thread for", "discards"))?;
        Ok((send, receive))
    }

    fn discard(&self, command: &IoCommand) -> Result<(), IoError> {
        let IoOp::Discard { offset, len } = command.op else { return Ok(()) };
        let device = self.shared.device(command.device);
        let Some(device) = device.filter(|device| device.takes_discards()) else { return Ok(()) };
        let skips = || self.skips.load(Ordering::Relaxed) || !device.may_write();
        // A mapping has no gate, and persistent memory is erased as a whole.
        let piece = if device.memory().is_some() { len } else { PIECE_BYTES };
        let discard = |offset, len| Device::discard(device, offset, len);
        let done = in_pieces(offset, len, piece, skips, discard);
        if !matches!(done, Ok(0)) {
            self.left_out.store(true, Ordering::Relaxed);
        }
        done.map(drop)
    }
}

/// Discards a range in pieces, until one fails. Those that may be skipped are: a discard that is
/// left out does no harm, unless it was to erase something. Returns the bytes that were left out.
fn in_pieces(
    mut offset: u64,
    mut len: u64,
    piece: u64,
    skips: impl Fn() -> bool,
    mut discard: impl FnMut(u64, u64) -> Result<(), IoError>,
) -> Result<u64, IoError> {
    while len > 0 && !skips() {
        let bytes = len.min(piece);
        discard(offset, bytes)?;
        offset += bytes;
        len -= bytes;
    }
    Ok(len)
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
        let left = in_pieces(1 << 30, (128 << 20) + 4096, PIECE_BYTES, || false, discard);
        assert_eq!(left, Ok(0));
        let wanted = [(1 << 30, 64 << 20), ((1 << 30) + (64 << 20), 64 << 20)];
        assert_eq!(pieces.borrow()[..2], wanted);
        assert_eq!(pieces.borrow()[2..], [((1 << 30) + (128 << 20), 4096)]);
        pieces.borrow_mut().clear();
        let lapsed = || pieces.borrow().len() == 2;
        let left = in_pieces(0, 1 << 30, PIECE_BYTES, lapsed, discard);
        assert_eq!(left, Ok((1 << 30) - (128 << 20)));
        assert_eq!(pieces.borrow().len(), 2);
    }
}
