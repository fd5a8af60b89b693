//! Reads through a pool's cache of blocks that several volumes share.

use blockd_mapper::error::MapperError;
use blockd_mapper::plan::{Plan, Step};
use blockd_mapper::worker::Attachment;

use super::executor::Executor;
use super::pools::PoolPart;
use crate::backing::Ring;
use crate::block::Request;

/// Plans the rest of a read, and serves from the cache what is there. Memory that this process
/// can't reach, as that of a zero-copy queue, is read into without the cache. With `hurry` it does
/// not wait for another read.
#[inline(never)]
pub(super) fn read_cached(
    part: &mut PoolPart,
    volume: &Attachment,
    (request, done): (&Request, u64),
    (plan, hurry): (&mut Plan, bool),
    ring: &mut Ring,
) -> Result<Step, MapperError> {
    let (offset, len) = (request.offset + done, request.len - done.min(request.len));
    let buffer = request.buffer().filter(|buffer| ring.is_reachable(buffer));
    let bytes = buffer.and_then(|buffer| rest(ring.bytes_mut(buffer), done, request.len));
    plan.hurry(hurry);
    match bytes {
        Some(bytes) => part.worker.read_cached(volume, offset, bytes, plan),
        None => part.worker.read(volume, offset, len, plan),
    }
}

/// The bytes of a request's memory behind those that are done.
fn rest(bytes: &mut [u8], done: u64, len: u64) -> Option<&mut [u8]> {
    bytes.get_mut(usize::try_from(done).ok()?..usize::try_from(len).ok()?)
}

impl Executor {
    /// Gives the cache what a read has brought from the media, if that went well.
    #[inline(never)]
    pub(super) fn keep_read(&mut self, at: usize, ring: &mut Ring) {
        let slot = &mut self.slots[at];
        let (Some(request), Some(attached)) = (&slot.request, &self.volumes[slot.volume]) else {
            return;
        };
        let Some(buffer) = request.buffer().filter(|_| slot.error.is_none()) else { return };
        if let Some(bytes) = rest(ring.bytes_mut(buffer), slot.done, request.len) {
            self.pools[attached.pool].worker.keep(&mut slot.plan, bytes);
        }
    }
}
