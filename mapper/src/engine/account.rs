//! Space accounting: the space of volumes and snapshots, and the space that their deletion would
//! free. The figures are counted on request, not maintained. Maintaining them would require the
//! drop of the last but one reference to an extent to find the owner of the last one, in the middle
//! of a write; and requests are rare compared with writes. So it is a walk over the leaves of the
//! volumes in question, in pieces of bounded work: 1 TiB of 256 KiB extents is 16,384 leaves, some
//! 20 calls. Figures counted while the volumes are written are marked as outdated.

use std::sync::Arc;

use crate::directory::Directory;
use crate::error::MapperError;
use crate::leaf::LEAF_ENTRIES;
use crate::mutation::{Mutation, active};
use crate::sync::Ordering;
use crate::units::{LeafId, Lsn, PhysicalExtent, SlotIndex, VolumeId};
use crate::volume::Volume;

use super::Engine;

/// Work of one call, counted in slots: about a millisecond.
const WORK_PER_CALL: u64 = 65_536;
/// The cost of examining a leaf's entries, in slots.
const LEAF_WORK: u64 = 64;
/// Volumes counted together at the most: at each slot each leaf is compared with each, entry by
/// entry, which is a million comparisons for the maximum, about a millisecond.
pub const MAX_ACCOUNTED: usize = 64;

/// The space of some volumes and snapshots, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Figures {
    /// Extents that they refer to; one that two of them share is counted once.
    pub mapped: u64,
    /// Valid sub-blocks, each volume counted for itself.
    pub valid: u64,
    /// Extents that only they refer to.
    pub exclusive: u64,
    /// Extents that others refer to as well.
    pub shared: u64,
    /// Extents granted to them and not used yet.
    pub reserved: u64,
    /// Whether the pool did not change during the count, and no extent was about to become free.
    /// Otherwise the figures mix several moments.
    pub exact: bool,
}

impl Figures {
    /// The space that becomes free, for data or for pages of the map, once all of them are deleted
    /// and reclaimed.
    #[must_use]
    pub const fn gives_back(&self) -> u64 {
        self.exclusive + self.reserved
    }
}

/// A count under way: made by [`Engine::begin_account`], taken on by [`Engine::account`].
#[derive(Debug)]
pub struct Accounting {
    volumes: Vec<VolumeId>,
    next: u32,
    since: Lsn,
    /// Extents, and valid sub-blocks.
    exclusive: u64,
    shared: u64,
    valid: u64,
    disturbed: bool,
}

impl Engine {
    /// Begins to count the space of some volumes together. Of one: the space of that volume alone.
    ///
    /// # Errors
    /// If there are none or too many, or one of them doesn't exist.
    pub fn begin_account(&self, volumes: &[VolumeId]) -> Result<Accounting, MapperError> {
        let mut volumes = volumes.to_vec();
        volumes.sort_unstable();
        volumes.dedup();
        if !(1..=MAX_ACCOUNTED).contains(&volumes.len()) {
            return Err(MapperError::Invalid {
                field: "volumes",
                value: volumes.len() as u64,
                allowed: "from 1 to 64 volumes to be counted together",
            });
        }
        for volume in &volumes {
            self.pool.volume(*volume)?;
        }
        Ok(Accounting {
            volumes,
            next: 0,
            since: self.pool.gate.last_assigned(),
            exclusive: 0,
            shared: 0,
            valid: 0,
            disturbed: self.is_letting_go(),
        })
    }

    /// Continues for a bounded amount of work. Returns the figures once all is counted.
    ///
    /// # Errors
    /// If one of the volumes is gone by now.
    pub fn account(&self, walk: &mut Accounting) -> Result<Option<Figures>, MapperError> {
        let volumes: Vec<Arc<Volume>> =
            walk.volumes.iter().map(|id| self.pool.volume(*id)).collect::<Result<_, _>>()?;
        let directories: Vec<_> = volumes.iter().map(|v| v.directory.load_full()).collect();
        let slots = directories.iter().map(|d| d.slot_count()).max().unwrap_or(0);
        let mut work = 0;
        while walk.next < slots && work < WORK_PER_CALL {
            work += self.count_slot(walk, &directories, SlotIndex(walk.next));
            walk.next += 1;
        }
        walk.disturbed |= self.pool.gate.last_assigned() != walk.since || self.is_letting_go();
        if walk.next < slots {
            return Ok(None);
        }
        let extent = self.pool.geometry.extent_size();
        let reserved: u64 = volumes.iter().map(|volume| volume.reserved()).sum();
        // Of one volume that is kept, and was not counted as shared.
        let valid = match volumes.as_slice() {
            [volume] => volume.valid.load(Ordering::Relaxed),
            _ => walk.valid,
        };
        Ok(Some(Figures {
            mapped: (walk.exclusive + walk.shared) * extent,
            valid: valid * self.pool.geometry.sub_block_size(),
            exclusive: walk.exclusive * extent,
            shared: walk.shared * extent,
            reserved: reserved * extent,
            exact: !walk.disturbed,
        }))
    }

    /// Whether unreferenced extents may not be free yet: a dropped reference counts until its
    /// change is durable, and for a short time after it.
    fn is_letting_go(&self) -> bool {
        self.durable() < self.pool.gate.last_assigned()
            || !self.pool.leaf_drops.lock().is_empty()
            || !self.releases.is_idle()
    }

    /// Counts without stopping; for tests and tools, where blocking the thread is allowed.
    pub fn figures(&self, volumes: &[VolumeId]) -> Result<Figures, MapperError> {
        let mut walk = self.begin_account(volumes)?;
        loop {
            if let Some(figures) = self.account(&mut walk)? {
                return Ok(figures);
            }
        }
    }

    /// Counts one slot of all the volumes; gives the work that it was. Volumes share extents only
    /// at the same slot and entry, so each slot can be counted by itself.
    fn count_slot(
        &self,
        walk: &mut Accounting,
        directories: &[Arc<Directory>],
        slot: SlotIndex,
    ) -> u64 {
        // Each leaf once, with the number of these volumes that hold it.
        let mut leaves: Vec<(LeafId, u64)> = Vec::new();
        for leaf in directories.iter().filter_map(|directory| directory.load(slot)) {
            match leaves.iter_mut().find(|(other, _)| *other == leaf) {
                Some((_, held)) => *held += 1,
                None => leaves.push((leaf, 1)),
            }
        }
        if let ([_], [(leaf, _)]) = (directories, leaves.as_slice()) {
            // A leaf that other volumes share keeps all of its extents: for a volume that is mostly
            // shared, such as a snapshot, few leaves have to be examined.
            let meta = self.pool.arena.meta(*leaf);
            if meta.references.load(Ordering::Acquire) > 1 {
                walk.shared += u64::from(meta.mapped.load(Ordering::Relaxed))
                    + u64::from(self.pool.arena.composites(*leaf));
                return 1;
            }
        }
        let mut seen: Vec<(PhysicalExtent, u64)> = Vec::with_capacity(leaves.len());
        for entry in 0..LEAF_ENTRIES {
            if leaves.is_empty() {
                break;
            }
            seen.clear();
            for &(leaf, held) in &leaves {
                let entry = self.pool.arena.entry(leaf, entry);
                walk.valid += u64::from(entry.valid().count_ones()) * held;
                // A leaf that other volumes share keeps its extents.
                let held_by = self.pool.arena.meta(leaf).references.load(Ordering::Acquire);
                let gone = u64::from(u64::from(held_by) == held);
                for physical in entry.extents() {
                    match seen.iter_mut().find(|(other, _)| *other == physical) {
                        Some((_, dropped)) => *dropped += gone,
                        None => seen.push((physical, gone)),
                    }
                }
            }
            for &(physical, dropped) in &seen {
                let references = u64::from(self.pool.extra(physical)) + 1;
                let free =
                    dropped == references || (active(Mutation::AccountByLeaf) && dropped > 0);
                if free {
                    walk.exclusive += 1;
                } else {
                    walk.shared += 1;
                }
            }
        }
        // Each leaf's extents are looked for among those of the others.
        let held = leaves.len() as u64;
        1 + LEAF_WORK * held * (1 + held / 8) + directories.len() as u64 / 16
    }
}
