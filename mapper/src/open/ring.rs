//! Whether the delta ring belongs to the state on the media (R8, R14).

use std::sync::Arc;

use super::{OpenMode, Opening};
use crate::error::MapperError;
use crate::format::record::MAX_SINGLE_UNITS;
use crate::format::superblock::Superblock;
use crate::mutation::{Mutation, active};
use crate::ring::{DeltaRing, RingMemory, RingProblem, VecRingMemory, is_ignored};

/// Records per worker of a ring in private memory, for pools whose caller keeps none.
const PRIVATE_RING: u64 = 4096;

/// Why a ring is not used.
#[derive(Debug, thiserror::Error)]
enum RingUse {
    #[error("delta ring is poisoned by a failed flush")]
    Poisoned,
    #[error("delta ring belongs to another open of the pool")]
    Stale,
    #[error("delta ring has {0} slots, {1} are needed")]
    Slots(usize, usize),
    #[error(transparent)]
    Problem(RingProblem),
}

const NO_RING: &str = "no delta ring was given";

fn adopt(
    memory: &Arc<dyn RingMemory>,
    superblock: &Superblock,
    boot_id: &[u8; 16],
    slots: usize,
) -> Result<DeltaRing, RingUse> {
    let ring = find_ring(memory, superblock, boot_id, slots)?;
    let id = superblock.open_id;
    if ring.current() != id && ring.next() == id && !active(Mutation::NoRestamp) {
        // Restamped before a new next is written: two kills in a row must not lose the ring.
        ring.set_current(id);
    }
    Ok(ring)
}

/// The ring of the pool's last open, as it is.
fn find_ring(
    memory: &Arc<dyn RingMemory>,
    superblock: &Superblock,
    boot_id: &[u8; 16],
    slots: usize,
) -> Result<DeltaRing, RingUse> {
    let ring = match DeltaRing::adopt(Arc::clone(memory), &superblock.pool_id, boot_id) {
        Ok(ring) => ring,
        Err(RingProblem::Poisoned) => return Err(RingUse::Poisoned),
        // A process died while it emptied one that is ignored.
        Err(RingProblem::Missing) if is_ignored(&**memory, superblock.open_id) => {
            return Err(RingUse::Poisoned);
        }
        Err(problem) => return Err(RingUse::Problem(problem)),
    };
    let id = superblock.open_id;
    if ring.current() != id && ring.next() != id && !active(Mutation::NoStamp) {
        return Err(RingUse::Stale);
    }
    if ring.slots() < slots {
        return Err(RingUse::Slots(ring.slots(), slots));
    }
    Ok(ring)
}

/// Records per slot that fit into the memory.
fn largest_capacity(words: usize, slots: usize) -> u64 {
    let fixed = crate::ring::words_needed(slots, 0);
    (words.saturating_sub(fixed) / (8 * slots.max(1))) as u64
}

impl Opening {
    /// Refuses a ring that isn't the one of the pool's last open, before anything is flushed: a
    /// flush that fails may drop data that that ring calls valid, and only a ring that is present
    /// can be marked so (R8). Otherwise it would be trusted when it comes back.
    pub(super) fn refuse_other_ring(&mut self) -> Result<(), MapperError> {
        let found = self.copies.choose(&self.options.devices)?;
        let superblock = &found.superblock;
        let says_nothing = superblock.clean || superblock.boot_id != self.options.boot_id;
        if says_nothing || self.options.accept_loss || active(Mutation::NoStamp) {
            return Ok(());
        }
        let Some(memory) = &self.options.ring else {
            return self.lost(NO_RING.to_owned());
        };
        let reported = is_ignored(&**memory, superblock.open_id);
        let slots = self.options.tuning.workers + 1;
        match find_ring(memory, superblock, &self.options.boot_id, slots) {
            Ok(_) => Ok(()),
            Err(RingUse::Poisoned) if reported => Ok(()),
            Err(problem) => self.lost(problem.to_string()),
        }
    }

    /// Decides whether the ring belongs to the state on the media (R14, R8). The engine's slot, the
    /// last, has its memory; those of workers get it with them.
    pub(super) fn take_ring(&mut self, superblock: &Superblock) -> Result<DeltaRing, MapperError> {
        let ring = self.chosen_ring(superblock)?;
        if ring.prepare(self.options.tuning.workers) {
            Ok(ring)
        } else {
            Err(MapperError::NoRingMemory)
        }
    }

    fn chosen_ring(&mut self, superblock: &Superblock) -> Result<DeltaRing, MapperError> {
        let slots = self.options.tuning.workers + 1;
        let boot_id = self.options.boot_id;
        let format = |memory: Arc<dyn RingMemory>, ignored: Option<u64>| {
            let capacity = largest_capacity(memory.words().len(), slots);
            // A group of snapshots that is longer is refused when it is asked for.
            if capacity < MAX_SINGLE_UNITS as u64 {
                return Err(MapperError::Invalid {
                    field: "ring records per slot",
                    value: capacity,
                    allowed: "enough for the longest change but a group's, 7",
                });
            }
            let (pool_id, own) = (&superblock.pool_id, Some(slots - 1));
            DeltaRing::format_for(memory, pool_id, &boot_id, (slots, capacity), own, ignored)
        };
        let fresh = |memory| format(memory, None);
        let private =
            || -> Arc<dyn RingMemory> { Arc::new(VecRingMemory::new(slots, PRIVATE_RING)) };
        let same_boot = superblock.boot_id == self.options.boot_id;
        let memory = match (&self.options.ring, self.options.mode) {
            (Some(memory), OpenMode::ReadOnly) => {
                let copy: Arc<dyn RingMemory> = Arc::new(VecRingMemory::copy_of(&**memory));
                Some(copy)
            }
            (memory, _) => memory.clone(),
        };
        let Some(memory) = memory else {
            if !superblock.clean && same_boot {
                self.lost(NO_RING.to_owned())?;
            }
            return fresh(private());
        };
        if superblock.clean || (!same_boot && !active(Mutation::NoStamp)) {
            return fresh(memory);
        }
        match adopt(&memory, superblock, &self.options.boot_id, slots) {
            Ok(ring) => Ok(ring),
            // R8: the device may have dropped data that the ring calls valid. Clients received
            // errors.
            Err(problem @ RingUse::Poisoned) if is_ignored(&*memory, superblock.open_id) => {
                self.report.ring_problem = Some(problem.to_string());
                // Ignored like the one before until the pool serves: nothing is answered before
                // that, so an opening that fails loses nothing.
                format(memory, Some(superblock.open_id))
            }
            Err(problem) => {
                self.lost(problem.to_string())?;
                fresh(memory)
            }
        }
    }

    fn lost(&mut self, problem: String) -> Result<(), MapperError> {
        if !self.options.accept_loss {
            return Err(MapperError::RingLost { problem });
        }
        self.report.ring_problem = Some(problem);
        Ok(())
    }
}
