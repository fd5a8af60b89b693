//! Ranges of a volume that changed since a snapshot, for incremental copies.

use super::{Attachment, Worker};
use crate::diff::{Comparison, DiffRange, Ranges, check_family};
use crate::error::MapperError;
use crate::sync::Ordering;
use crate::units::VolumeId;
use crate::volume::DELETED;

/// A range to be compared, and how much of it at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Look {
    /// First byte; a multiple of the volume's block, as is the length.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Ranges at the most, at least one.
    pub max_ranges: usize,
    /// Slots to examine, where one with an examined leaf counts as 64; at least one is. 65,536 take
    /// some milliseconds.
    pub max_work: u64,
}

impl Worker {
    /// Describes a range beside a snapshot of the same family, or by itself, from its start on; see
    /// [`Engine::diff`](crate::engine::Engine::diff) for the meaning of the states. Replaces the
    /// content of `out`, with at least one range if the described range is not empty. Returns
    /// `false`, with `out` empty, if the snapshot no longer exists.
    ///
    /// # Errors
    /// If the volume is gone, the range is not within it, or the two are of different families.
    pub fn changes(
        &mut self,
        attachment: &Attachment,
        since: Option<VolumeId>,
        look: &Look,
        out: &mut Vec<DiffRange>,
    ) -> Result<bool, MapperError> {
        // In an epoch, so that the volume found stays valid: leaves, and extents that both refer
        // to.
        out.clear();
        let parity = self.pool.epochs.enter(self.slot);
        let is_found = self.compare(attachment, since, look, out);
        self.pool.epochs.leave(self.slot, parity);
        if self.pool.has_stopped() {
            self.pool.want_engine();
        }
        is_found
    }

    fn compare(
        &self,
        attachment: &Attachment,
        since: Option<VolumeId>,
        look: &Look,
        out: &mut Vec<DiffRange>,
    ) -> Result<bool, MapperError> {
        let volume = &*attachment.volume;
        self.pool.check_alive()?;
        if volume.state.load(Ordering::SeqCst) == DELETED {
            return Err(MapperError::NoVolume(volume.identity.id.to_string()));
        }
        volume.check_range(look.offset, look.len)?;
        // A volume found here was not deleted when the epoch was entered.
        let base = match since {
            None => None,
            Some(id) => match self.pool.volumes.read().get(&id) {
                Some(base) => Some(std::sync::Arc::clone(base)),
                None => return Ok(false),
            },
        };
        if let Some(base) = &base {
            check_family(volume, base)?;
        }
        let new = attachment.directory();
        let old = base.as_ref().map(|base| base.directory.load());
        let comparison =
            Comparison { pool: &self.pool, new: &new, old: old.as_ref().map(|old| &***old) };
        let mut ranges = Ranges {
            ranges: out,
            at: look.offset,
            end: look.offset + look.len,
            max: look.max_ranges.max(1),
        };
        comparison.walk(&mut ranges, look.max_work.max(1));
        Ok(true)
    }
}
