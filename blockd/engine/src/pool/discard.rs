//! The thread that discards freed extents on the media of a pool.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockd_mapper::io::{IoCommand, IoError, IoOp};
use blockd_media::Device;
use blockd_media::pool::PoolError;
use crossbeam_channel::{Receiver, Sender};

use super::handle::Shared;

/// Bytes that are discarded at a time. The gate of a claim is looked at before each piece, so a
/// piece has to end within the bound on IO, which is a second: 64 MiB are milliseconds on most
/// devices, and a fraction of a second where a device writes zeroes instead.
const PIECE_BYTES: u64 = 64 << 20;

/// Discards what the pool's thread sends, one command after the other: a device may take long.
#[derive(Debug)]
pub(super) struct Discarder {
    shared: Arc<Shared>,
    /// Set to skip the discards that have not begun.
    skips: Arc<AtomicBool>,
    /// Set once something was left out: what was to be erased is there still.
    left_out: Arc<AtomicBool>,
}

impl Discarder {
    pub(super) const fn new(
        shared: Arc<Shared>,
        skips: Arc<AtomicBool>,
        left_out: Arc<AtomicBool>,
    ) -> Self {
        Self { shared, skips, left_out }
    }

    /// Starts the thread. It ends with the sender of commands.
    pub(super) fn start(
        self,
        commands: Receiver<IoCommand>,
        ended: Sender<(IoCommand, Result<(), IoError>)>,
    ) -> Result<(), PoolError> {
        let run = move || {
            for command in commands {
                let result = self.discard(&command);
                if ended.send((command, result)).is_err() {
                    return;
                }
                self.shared.doorbell.ring();
            }
        };
        let thread = std::thread::Builder::new().name("discard".to_owned()).spawn(run);
        thread.map(drop).map_err(PoolError::io("start a thread for", "discards"))
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
