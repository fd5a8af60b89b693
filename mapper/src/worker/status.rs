//! Ranges of a volume that hold data, for sparse copies.

use super::read::lookup;
use super::{Attachment, Worker};
use crate::error::MapperError;
use crate::sync::Ordering;
use crate::volume::DELETED;

/// The content of a stretch of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// No extent is mapped: it reads as zeroes, and takes no space.
    Hole,
    /// Its extents are mapped, and nothing valid is in them: it reads as zeroes.
    Zeroes,
    /// Written, and not discarded since.
    Data,
}

/// A stretch of a volume with one kind of content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stretch {
    /// Bytes.
    pub len: u64,
    /// The content of the range.
    pub content: Content,
}

impl Worker {
    /// Describes a range from its start on, in at most `limit` stretches, each of other content
    /// than the one before. Where more would be needed, the description ends before the range
    /// does. At least one stretch is pushed for a range that is not empty.
    pub fn stretches(
        &mut self,
        attachment: &Attachment,
        offset: u64,
        len: u64,
        limit: usize,
        out: &mut Vec<Stretch>,
    ) -> Result<(), MapperError> {
        let volume = &*attachment.volume;
        // In an epoch, so that the examined leaves stay the volume's own.
        let parity = self.pool.epochs.enter(self.slot);
        let usable =
            self.pool.check_alive().and_then(|()| match volume.state.load(Ordering::SeqCst) {
                DELETED => Err(MapperError::NoVolume(volume.identity.id.to_string())),
                _ => volume.check_range(offset, len),
            });
        if usable.is_ok() {
            self.look(attachment, offset, len, limit, out);
        }
        self.pool.epochs.leave(self.slot, parity);
        if self.pool.has_stopped() {
            self.pool.want_engine();
        }
        usable
    }

    fn look(
        &self,
        attachment: &Attachment,
        offset: u64,
        len: u64,
        limit: usize,
        out: &mut Vec<Stretch>,
    ) {
        let geometry = self.pool.geometry;
        let directory = attachment.directory();
        let (mut at, end) = (offset, offset + len);
        let sub_block = geometry.sub_block_size();
        while at < end {
            let slot = geometry.slot_of(at);
            let (content, to) = if directory.load(slot).is_none() {
                // Nothing under this leaf: the walk takes big steps over empty ranges.
                (Content::Hole, (at / geometry.leaf_span() + 1) * geometry.leaf_span())
            } else {
                let entry = lookup(&self.pool, &directory, geometry.extent_of(at));
                let empty = if entry.is_mapped() { Content::Zeroes } else { Content::Hole };
                let valid = entry.valid();
                let bit = geometry.within(at) / sub_block;
                let rest = valid >> bit;
                let (content, bits) = match rest.trailing_ones() {
                    0 => (empty, rest.trailing_zeros()),
                    ones => (Content::Data, ones),
                };
                let start = at - geometry.within(at);
                let to = start + ((bit + u64::from(bits)) * sub_block).min(geometry.extent_size());
                (content, to)
            };
            let len = to.min(end) - at;
            let full = out.len() >= limit.max(1);
            match out.last_mut() {
                Some(last) if last.content == content => last.len += len,
                _ if full => return,
                _ => out.push(Stretch { len, content }),
            }
            at += len;
        }
    }
}
