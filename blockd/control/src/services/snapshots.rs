//! Snapshots of volumes, volumes that begin as one, and volumes that return to one.

use std::collections::BTreeSet;

use blockd_api::v1::{self, SnapshotMember};
use blockd_engine::pool::{Control as Command, Outcome, PoolHandle};
use blockd_mapper::engine::VolumeSummary;
use blockd_mapper::format::Labels;
use blockd_mapper::format::catalogue::VolumeKind;
use blockd_mapper::geometry::MAX_GROUP;
use blockd_mapper::units::VolumeId;
use blockd_media::error::{Error, shown};
use blockd_media::units::{human, to_wire};

use super::volumes::{checked_name, checked_new_name, checked_size, existing, find, of};
use super::{Control, EventKind, labels};

impl Control {
    /// Takes snapshots at one moment. True if they are new.
    pub(super) async fn create_snapshots(
        &self,
        pool: &str,
        members: &[SnapshotMember],
        set: &labels::Pairs,
    ) -> Result<(bool, Vec<v1::Volume>), Error> {
        checked_members(members)?;
        labels::changed(&Labels::default(), set, &[])?;
        let handle = self.pool(pool)?;
        let names = members.iter().flat_map(|member| [&member.volume, &member.name]);
        let _guards = self.lock_all(&handle, names).await;
        let mut wanted = Vec::new();
        for member in members {
            wanted.push((existing(&handle, &member.volume)?.id, member.name.clone()));
        }
        let command = Command::SnapshotGroup { members: wanted };
        let outcome = handle.control(command).await.map_err(|error| of(&handle, error))?;
        let changed = matches!(outcome, Outcome::CreatedGroup(_));
        if changed {
            let together = match members.len() {
                1 => String::new(),
                count => format!(", one of {count} taken together"),
            };
            for SnapshotMember { volume, name } in members {
                let text =
                    format!("snapshot {} of {} was taken{together}", shown(name), shown(volume));
                self.events().publish(EventKind::SnapshotCreated, handle.name(), name, text);
            }
        }
        let names: Vec<_> = members.iter().map(|member| member.name.as_str()).collect();
        if !changed {
            refuse_other_labels(&handle, &names, set)?;
        }
        let is_labelled = self.label_new(&handle, &names, set, changed).await?;
        let mut made = Vec::new();
        for member in members {
            made.push(self.describe(&handle, &member.name).await?);
        }
        Ok((changed || is_labelled, made))
    }

    /// Makes a volume that begins as a snapshot's content. True if it is new.
    pub(super) async fn clone_volume(
        &self,
        pool: &str,
        snapshot: &str,
        name: &str,
        size: Option<u64>,
        set: &labels::Pairs,
    ) -> Result<(bool, v1::Volume), Error> {
        checked_new_name(name)?;
        labels::changed(&Labels::default(), set, &[])?;
        let handle = self.pool(pool)?;
        let _guards = self.lock_all(&handle, [snapshot, name]).await;
        let source = existing_snapshot(&handle, snapshot)?;
        if let Some(size) = size {
            checked_size(size, source.block_size)?;
        }
        let command = Command::Clone { source: source.id, name: name.to_owned(), size };
        let outcome = handle.control(command).await.map_err(|error| of(&handle, error))?;
        let changed = matches!(outcome, Outcome::Created(_));
        if changed {
            let text = format!("volume {} was cloned from {}", shown(name), shown(snapshot));
            self.events().publish(EventKind::VolumeCloned, handle.name(), name, text);
        }
        let is_labelled = self.label_new(&handle, &[name], set, changed).await?;
        Ok((changed || is_labelled, self.describe(&handle, name).await?))
    }

    /// Makes a volume what a snapshot of its family holds.
    pub(super) async fn rollback_volume(
        &self,
        pool: &str,
        name: &str,
        snapshot: &str,
        force: bool,
    ) -> Result<v1::RollbackVolumeResponse, Error> {
        let handle = self.pool(pool)?;
        let _guards = self.lock_all(&handle, [snapshot, name]).await;
        let volume = existing(&handle, name)?;
        let source = existing_snapshot(&handle, snapshot)?;
        let before = self.describe(&handle, name).await?;
        if before.attached && !force {
            let problem = "is attached: detach it first, or use force, and its clients find other \
                           data below them";
            return Err(Error::in_use(format!("volume {}", shown(name)), problem));
        }
        let command = Command::Rollback { volume: volume.id, snapshot: source.id };
        let cache = self.roll_back(&handle, volume.id, command, None).await?;
        let to = human(source.size);
        let text = format!("volume {} was rolled back to {}, {to}", shown(name), shown(snapshot));
        self.events().publish(EventKind::VolumeRolledBack, handle.name(), name, text);
        self.watch_release(&handle, volume.id, name);
        if source.size != volume.size {
            self.resize_device(&handle, volume.id, source.size).await?;
        }
        cache.map_err(|error| error.with_note("the volume was rolled back"))?;
        Ok(v1::RollbackVolumeResponse {
            volume: Some(self.describe(&handle, name).await?),
            previous_size_bytes: to_wire(volume.size),
        })
    }

    /// Makes a clone what the snapshot holds that it was made of. Its attachment stays, and its
    /// size, unless that is smaller than the snapshot's.
    pub(super) async fn reset_volume(
        &self,
        asked: &v1::ResetVolumeRequest,
    ) -> Result<v1::ResetVolumeResponse, Error> {
        let v1::ResetVolumeRequest { name, pool, force } = asked;
        let handle = self.pool(pool)?;
        let _guard = self.lock(&handle, name).await;
        let volume = existing(&handle, name)?;
        let refuse = |problem: &str| Err(Error::in_use(format!("volume {}", shown(name)), problem));
        if volume.kind == VolumeKind::Snapshot {
            return refuse("is a snapshot, which never changes");
        }
        let volumes = handle.mapper().summaries();
        let source = volumes.iter().find(|one| one.id == volume.origin);
        let Some(source) = source.filter(|one| one.kind == VolumeKind::Snapshot) else {
            return refuse(if volume.origin == VolumeId(0) {
                "was not made of a snapshot: `blockd rollback` takes it back to one of its own"
            } else {
                "was made of a snapshot that is deleted: `blockd rollback` takes it back to another"
            });
        };
        let size = volume.size.max(source.size);
        let idle = (!force).then_some(&volume);
        if let Some(volume) = idle {
            self.check_idle(&handle, volume).await?;
        }
        let command = Command::Reset { volume: volume.id, snapshot: source.id, size };
        let cache = self.roll_back(&handle, volume.id, command, idle).await?;
        let text = format!("volume {} was reset to {}", shown(name), shown(&source.name));
        self.events().publish(EventKind::VolumeRolledBack, handle.name(), name, text);
        self.watch_release(&handle, volume.id, name);
        if size != volume.size {
            self.resize_device(&handle, volume.id, size).await?;
        }
        cache.map_err(|error| error.with_note("the volume was reset"))?;
        let volume = Some(self.describe(&handle, name).await?);
        Ok(v1::ResetVolumeResponse { volume, snapshot: source.name.clone() })
    }

    /// Rolls a volume back, if need be only while nothing uses it. Returns how dropping the
    /// kernel's cache of the former content went.
    async fn roll_back(
        &self,
        handle: &PoolHandle,
        volume: VolumeId,
        command: Command,
        idle: Option<&VolumeSummary>,
    ) -> Result<Result<(), Error>, Error> {
        // The kernel's cache of a block device would be written on top otherwise.
        self.forget_cache(handle, volume).await?;
        if let Some(idle) = idle {
            // It takes a while to write a cache out.
            self.check_idle(handle, idle).await?;
        }
        handle.control(command).await.map_err(|error| of(handle, error))?;
        Ok(self.forget_cache(handle, volume).await)
    }
}

/// Snapshots that are there and have labels, but not all of these, were taken by another call.
/// Those of a call that was interrupted have none, as all labels of a snapshot are set at once.
fn refuse_other_labels(
    pool: &PoolHandle,
    names: &[&str],
    set: &labels::Pairs,
) -> Result<(), Error> {
    for name in names {
        let present = labels::to_message(&existing(pool, name)?.labels);
        let other = set.iter().find(|(key, asked)| present.get(*key) != Some(*asked));
        let Some((key, asked)) = other.filter(|_| !present.is_empty()) else { continue };
        let (field, existing, asked) = match present.get(key) {
            Some(value) => (format!("label {key}"), value.clone(), asked),
            None => {
                let keys: Vec<_> = present.keys().map(String::as_str).collect();
                ("labels".to_owned(), keys.join(", "), key)
            }
        };
        let (what, name, asked) = ("snapshot", shown(name), asked.clone());
        return Err(Error::Exists { what, name, field, existing, asked });
    }
    Ok(())
}

fn checked_members(members: &[SnapshotMember]) -> Result<(), Error> {
    if !(1..=MAX_GROUP).contains(&members.len()) {
        let allowed = format!("from 1 to {MAX_GROUP} volumes");
        return Err(Error::invalid("members", members.len(), allowed));
    }
    let (mut volumes, mut names) = (BTreeSet::new(), BTreeSet::new());
    for SnapshotMember { volume, name } in members {
        checked_name(volume)?;
        checked_new_name(name)?;
        for (field, value, is_new) in [
            ("volume", volume, volumes.insert(volume.as_str())),
            ("name", name, names.insert(name.as_str())),
        ] {
            if !is_new {
                return Err(Error::invalid(field, value, "each once"));
            }
        }
    }
    Ok(())
}

/// The snapshot of that name.
pub(super) fn existing_snapshot(pool: &PoolHandle, name: &str) -> Result<VolumeSummary, Error> {
    checked_name(name)?;
    let found = find(pool, name).ok_or_else(|| Error::not_found("snapshot", name))?;
    if found.kind == VolumeKind::Snapshot {
        return Ok(found);
    }
    let problem = "is no snapshot: take one with `blockd snapshot`";
    Err(Error::in_use(format!("volume {}", shown(name)), problem))
}
