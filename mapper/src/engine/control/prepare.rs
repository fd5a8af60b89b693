//! Checks of a command before anything changes.

use std::sync::Arc;

use super::super::Engine;
use super::super::space::Planned;
use super::{Control, Outcome, Prepared};
use crate::error::MapperError;
use crate::format::VolumeName;
use crate::format::catalogue::VolumeKind;
use crate::format::record::Change;
use crate::geometry::{MAX_VOLUME_SIZE, MIN_BLOCK_SIZE};
use crate::sync::Ordering;
use crate::units::VolumeId;
use crate::volume::{Totals, Volume};

/// The same name means the same volume, or an error that says where it differs.
pub(in super::super) fn same(
    name: &VolumeName,
    field: &'static str,
    existing: u64,
    asked: u64,
) -> Result<(), MapperError> {
    if existing == asked {
        return Ok(());
    }
    Err(MapperError::Exists { name: name.as_str().to_owned(), field, existing, asked })
}

fn check_block_size(block_size: u32) -> Result<(), MapperError> {
    if block_size.is_power_of_two() && (MIN_BLOCK_SIZE..=4096).contains(&block_size) {
        return Ok(());
    }
    Err(MapperError::Invalid {
        field: "block_size",
        value: u64::from(block_size),
        allowed: "512, 1024, 2048 or 4096 bytes",
    })
}

fn check_size(size: u64, block: u64) -> Result<(), MapperError> {
    if size > 0 && size <= MAX_VOLUME_SIZE && size.is_multiple_of(block) {
        return Ok(());
    }
    Err(MapperError::Invalid {
        field: "size",
        value: size,
        allowed: "a multiple of the block size, from one block to 2^50 bytes",
    })
}

impl Engine {
    pub(super) fn prepare(&self, control: &Control) -> Result<Prepared, MapperError> {
        match control {
            Control::Create { name, size, block_size } => {
                self.prepare_create(name, *size, *block_size)
            }
            Control::Delete { volume } => self.prepare_delete(*volume),
            Control::Resize { volume, size } => self.prepare_resize(*volume, *size),
            Control::Snapshot { source, name } => self.prepare_share(*source, name, None),
            Control::SnapshotGroup { members } => self.prepare_group(members),
            Control::Clone { source, name, size } => {
                let from = self.pool.volume(*source)?;
                let size = size.unwrap_or_else(|| from.size.load(Ordering::Acquire));
                self.prepare_share(*source, name, Some(size))
            }
            Control::Rollback { volume, snapshot } => {
                self.prepare_rollback(*volume, *snapshot, None)
            }
            Control::Reset { volume, snapshot, size } => {
                self.prepare_rollback(*volume, *snapshot, Some(*size))
            }
            Control::Rename { volume, name } => self.prepare_rename(*volume, name),
            _ => Err(MapperError::Internal("not a structure command")),
        }
    }

    pub(in super::super) fn by_name(&self, name: &VolumeName) -> Option<Arc<Volume>> {
        self.pool.volumes.read().named(name).cloned()
    }

    /// Returns the first of `count` consecutive ids that were never used.
    pub(in super::super) fn next_ids(&self, count: u32) -> Result<VolumeId, MapperError> {
        let limit = crate::engine::structure::MAX_VOLUMES;
        let next = self.controls.next_volume_id.max(1);
        if self.trees.len() + count as usize > limit || next > u32::MAX - count {
            return Err(MapperError::Limit { what: "volumes", limit: limit as u64 });
        }
        Ok(VolumeId(next))
    }

    fn prepare_create(
        &self,
        name: &str,
        size: u64,
        block_size: u32,
    ) -> Result<Prepared, MapperError> {
        let name = VolumeName::new(name)?;
        check_block_size(block_size)?;
        check_size(size, u64::from(block_size))?;
        let device_block = self.superblock.devices.present().map(|(_, d)| d.block_size).max();
        if device_block.is_some_and(|block| block > block_size) {
            return Err(MapperError::Invalid {
                field: "block_size",
                value: u64::from(block_size),
                allowed: "no smaller than the logical block of the pool's devices",
            });
        }
        if let Some(existing) = self.by_name(&name) {
            same(&name, "size in bytes", existing.size.load(Ordering::Acquire), size)?;
            let block = u64::from(existing.identity.block_size);
            same(&name, "block size in bytes", block, u64::from(block_size))?;
            same(&name, "origin", u64::from(existing.identity.origin.0), 0)?;
            return Ok(Prepared::Already(Outcome::Existing(existing.identity.id)));
        }
        let volume = self.next_ids(1)?;
        self.check_room_for_records(1)?;
        let (name, made) = (Box::new(name), self.controls.now);
        let change = Change::Create { volume, size, block_size, made, name };
        Ok(Prepared::Change(change, Vec::new(), Outcome::Created(volume)))
    }

    fn prepare_delete(&self, id: VolumeId) -> Result<Prepared, MapperError> {
        let Ok(volume) = self.pool.volume(id) else {
            if id.0 == 0 || id.0 >= self.controls.next_volume_id {
                return Err(MapperError::NoVolume(id.to_string()));
            }
            return Ok(Prepared::Already(Outcome::AlreadyDeleted));
        };
        Ok(Prepared::Change(Change::Delete { volume: id }, vec![volume], Outcome::Deleted))
    }

    fn prepare_resize(&self, id: VolumeId, size: u64) -> Result<Prepared, MapperError> {
        let volume = self.writable(id)?;
        check_size(size, u64::from(volume.identity.block_size))?;
        let from = volume.size.load(Ordering::Acquire);
        if size == from {
            return Ok(Prepared::Already(Outcome::Unchanged));
        }
        if size < from && !size.is_multiple_of(self.pool.geometry.sub_block_size()) {
            return Err(MapperError::Invalid {
                field: "size",
                value: size,
                allowed: "a multiple of the pool's sub-block (4 KiB or extent / 64) to shrink to",
            });
        }
        if size > from {
            self.check_set_aside(Some(Planned { id, size, places: None, freed: 0 }))?;
        }
        let change = Change::Resize { volume: id, size };
        Ok(Prepared::Change(change, vec![volume], Outcome::Resized { from }))
    }

    fn prepare_share(
        &self,
        source: VolumeId,
        name: &str,
        size: Option<u64>,
    ) -> Result<Prepared, MapperError> {
        let name = VolumeName::new(name)?;
        let from = self.pool.volume(source)?;
        let is_snapshot = from.identity.kind == VolumeKind::Snapshot;
        if is_snapshot != size.is_some() {
            let problem = if is_snapshot { "is a snapshot already" } else { "is not a snapshot" };
            return Err(MapperError::Unsuitable { volume: source.0, problem });
        }
        let source_size = from.size.load(Ordering::Acquire);
        if let Some(size) = size {
            check_size(size, u64::from(from.identity.block_size))?;
            if size < source_size {
                return Err(MapperError::Invalid {
                    field: "size",
                    value: size,
                    allowed: "no smaller than the snapshot's size",
                });
            }
        }
        if let Some(existing) = self.by_name(&name) {
            let origin = u64::from(existing.identity.origin.0);
            same(&name, "origin", origin, u64::from(source.0))?;
            if let Some(size) = size {
                same(&name, "size in bytes", existing.size.load(Ordering::Acquire), size)?;
            }
            return Ok(Prepared::Already(Outcome::Existing(existing.identity.id)));
        }
        self.check_room_for_trees(&[source])?;
        self.check_room_for_records(1)?;
        let volume = self.next_ids(1)?;
        let (outcome, made) = (Outcome::Created(volume), self.controls.now);
        let name = Box::new(name);
        Ok(match size {
            None => {
                let change = Change::Snapshot { volume, source, made, name };
                Prepared::Change(change, vec![from], outcome)
            }
            Some(size) => {
                let change = Change::Clone { volume, source, size, made, name };
                Prepared::Change(change, Vec::new(), outcome)
            }
        })
    }

    /// New trees' pages must be found before they are promised.
    pub(in super::super) fn check_room_for_trees(
        &self,
        like: &[VolumeId],
    ) -> Result<(), MapperError> {
        // A clone that is larger may have a level or two more above.
        let tree = |id: &VolumeId| self.trees.get(*id).map_or(0, |t| t.tree.present_pages() + 2);
        let needed = like.iter().map(tree).sum::<u64>() + self.new_tree_pages;
        self.check_room_for_pages(needed)
    }

    /// Refuses new volumes and snapshots whose records need new pages that only the reserve has. A
    /// checkpoint writes the catalogue beside the former one, and the reserve is for changes that
    /// free space.
    pub(in super::super) fn check_room_for_records(&self, count: usize) -> Result<(), MapperError> {
        if self.catalogue.has_places(count) {
            return Ok(());
        }
        // Those of a group need two pages at most, and the index may have two more for them.
        self.check_room_for_pages(self.fixed_pages() + 4)
    }

    /// With a size: a reset, which leaves the volume this size.
    fn prepare_rollback(
        &self,
        id: VolumeId,
        snapshot: VolumeId,
        size: Option<u64>,
    ) -> Result<Prepared, MapperError> {
        let volume = self.writable(id)?;
        let from = self.pool.volume(snapshot)?;
        if from.identity.kind != VolumeKind::Snapshot {
            let problem = "is not a snapshot";
            return Err(MapperError::Unsuitable { volume: snapshot.0, problem });
        }
        if from.identity.lineage != volume.identity.lineage {
            let problem = "is of another family than the volume";
            return Err(MapperError::Unsuitable { volume: snapshot.0, problem });
        }
        let least = from.size.load(Ordering::Acquire);
        let size = size.filter(|size| *size != least);
        if let Some(size) = size {
            check_size(size, u64::from(volume.identity.block_size))?;
            if size < least {
                return Err(MapperError::Invalid {
                    field: "size",
                    value: size,
                    allowed: "no smaller than the snapshot's size",
                });
            }
        }
        self.check_room_for_trees(&[snapshot])?;
        self.check_rolled_back(&volume, &from, size.unwrap_or(least))?;
        let change = Change::Rollback { volume: id, snapshot, size };
        let outcome = size.map_or(Outcome::RolledBack, |size| Outcome::Reset { size });
        Ok(Prepared::Change(change, vec![volume], outcome))
    }

    /// Refuses to set more aside than there is, for a volume that a rollback makes larger or that
    /// maps less afterwards. The extents that it drops serve, but for those that others share.
    fn check_rolled_back(
        &self,
        volume: &Volume,
        from: &Volume,
        size: u64,
    ) -> Result<(), MapperError> {
        let Totals { mapped, composite, .. } = from.totals();
        let places = volume.reserved() + mapped.saturating_sub(composite);
        let unmet = volume.set_aside_at(size, self.pool.geometry).saturating_sub(places);
        if unmet <= volume.unmet() {
            return Ok(());
        }
        let id = volume.identity.id;
        let planned = |freed| Some(Planned { id, size, places: Some(places), freed });
        // Counted only where it matters: that takes time in proportion to the mapped extents.
        self.check_set_aside(planned(0))
            .or_else(|_| self.check_set_aside(planned(self.exclusive_extents(volume))))
    }

    /// Nothing is gated: the data path knows volumes by id.
    fn prepare_rename(&self, id: VolumeId, name: &str) -> Result<Prepared, MapperError> {
        let name = VolumeName::new(name)?;
        self.pool.volume(id)?;
        if let Some(existing) = self.by_name(&name) {
            same(&name, "id", existing.identity.id.0.into(), id.0.into())?;
            return Ok(Prepared::Already(Outcome::Unchanged));
        }
        let change = Change::Rename { volume: id, name: Box::new(name) };
        Ok(Prepared::Change(change, Vec::new(), Outcome::Renamed))
    }

    pub(in super::super) fn writable(&self, id: VolumeId) -> Result<Arc<Volume>, MapperError> {
        let volume = self.pool.volume(id)?;
        if volume.identity.kind == VolumeKind::Snapshot {
            return Err(MapperError::Unsuitable { volume: id.0, problem: "is a snapshot" });
        }
        Ok(volume)
    }
}
