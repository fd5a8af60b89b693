//! Clones of one snapshot that are made, labelled and attached by one call: all of them, or none.

use std::collections::BTreeSet;

use blockd_api::v1;
use blockd_engine::pool::{Control as Command, Outcome, PoolHandle};
use blockd_mapper::engine::VolumeSummary;
use blockd_mapper::format::Labels;
use blockd_media::error::{Error, shown};
use blockd_media::units::from_wire;

use super::devices::AttachWish;
use super::messages::{count, wish};
use super::snapshots::existing_snapshot;
use super::volumes::{checked_new_name, checked_size, existing, of};
use super::{Control, EventKind, labels};

/// Clones of a call: it holds the locks of all of them, and is answered within half a minute.
const MOST: usize = 1000;
/// Commands on their way to a pool at a time: its queue has room for 1,024, of all callers.
const AT_ONCE: usize = 256;

/// The parts of a call that are done.
#[derive(Debug, Default)]
struct Done {
    created: Vec<VolumeSummary>,
    attached: Vec<VolumeSummary>,
    /// Volumes that were there, with the labels that they had.
    labelled: Vec<VolumeSummary>,
}

impl Control {
    /// Makes volumes that begin as a snapshot's content. After an error everything is as it was.
    pub(super) async fn clone_volumes(
        &self,
        asked: &v1::CloneVolumesRequest,
    ) -> Result<v1::CloneVolumesResponse, Error> {
        let v1::CloneVolumesRequest { pool, snapshot, names, labels: set, .. } = asked;
        checked_names(names)?;
        labels::changed(&Labels::default(), set, &[])?;
        let wish = asked.attach.as_ref().map(wish);
        if let Some(wish) = &wish {
            self.front_end(wish)?;
        }
        let handle = self.pool(pool)?;
        let _guards = self.lock_all(&handle, names.iter().chain([snapshot])).await;
        let source = existing_snapshot(&handle, snapshot)?;
        let size = Some(from_wire(asked.each_bytes, 0)?).filter(|size| *size > 0);
        if let Some(size) = size {
            checked_size(size, source.block_size)?;
        }
        let mut done = Done::default();
        let made = match self.make_clones(&handle, &source, names, size, &mut done).await {
            Ok(()) => self.finish_clones(&handle, names, set, wish, &mut done).await,
            Err(error) => Err(error),
        };
        if let Err(error) = made {
            return Err(match self.undo_clones(&handle, done).await {
                Ok(()) => error.with_note("nothing was changed"),
                Err(problem) => error.with_note(&format!("a part of it is left: {problem}")),
            });
        }
        let mut volumes = Vec::with_capacity(names.len());
        for name in names {
            volumes.push(self.describe(&handle, name).await?);
        }
        Ok(v1::CloneVolumesResponse {
            changed: !(done.created.is_empty()
                && done.attached.is_empty()
                && done.labelled.is_empty()),
            created: count(done.created.len()),
            attached: count(done.attached.len()),
            volumes,
        })
    }

    async fn make_clones(
        &self,
        pool: &PoolHandle,
        source: &VolumeSummary,
        names: &[String],
        size: Option<u64>,
        done: &mut Done,
    ) -> Result<(), Error> {
        for some in names.chunks(AT_ONCE) {
            let command =
                |name: &String| Command::Clone { source: source.id, name: name.clone(), size };
            let outcomes = pool.control_all(some.iter().map(command).collect()).await;
            let mut failed = None;
            for (name, outcome) in some.iter().zip(outcomes) {
                match outcome {
                    Ok(Outcome::Created(_)) => {
                        // All that were made are noted before an error ends this.
                        match existing(pool, name) {
                            Ok(volume) => done.created.push(volume),
                            Err(error) => failed = failed.or(Some(error)),
                        }
                        let (name_of, from) = (shown(name), shown(&source.name));
                        let text = format!("volume {name_of} was cloned from {from}");
                        self.events().publish(EventKind::VolumeCloned, pool.name(), name, text);
                    }
                    Ok(_) => {}
                    Err(error) => failed = failed.or_else(|| Some(of(pool, error))),
                }
            }
            if let Some(error) = failed {
                return Err(error);
            }
        }
        Ok(())
    }

    async fn finish_clones(
        &self,
        pool: &PoolHandle,
        names: &[String],
        set: &labels::Pairs,
        wish: Option<AttachWish>,
        done: &mut Done,
    ) -> Result<(), Error> {
        for name in names {
            let volume = existing(pool, name)?;
            if !set.is_empty() {
                let wanted = labels::changed(&volume.labels, set, &[])?;
                let is_new = done.created.iter().any(|one| one.id == volume.id);
                if self.label_locked(pool, &volume, wanted).await? && !is_new {
                    done.labelled.push(volume.clone());
                }
            }
            if let Some(wish) = wish
                && self.attach_locked(pool, &volume, wish).await?
            {
                done.attached.push(volume);
            }
        }
        Ok(())
    }

    /// Takes back what is done, as far as that is possible.
    async fn undo_clones(&self, pool: &PoolHandle, done: Done) -> Result<(), Error> {
        let mut undone = Ok(());
        for volume in done.attached {
            undone = undone.and(self.disconnect(pool, &volume, true).await.map(drop));
        }
        for volume in done.labelled {
            let before = volume.labels.clone();
            undone = undone.and(self.label_locked(pool, &volume, before).await.map(drop));
        }
        for volume in done.created {
            // Without its volume, a device would serve errors.
            let deleted = if self.is_attached(pool.name(), &volume.name) {
                let what = format!("volume {}", shown(&volume.name));
                Err(Error::in_use(what, "is attached, and is not deleted"))
            } else {
                self.delete_locked(pool, &volume, &v1::Volume::default()).await
            };
            undone = undone.and(deleted);
        }
        undone
    }
}

fn checked_names(names: &[String]) -> Result<(), Error> {
    if !(1..=MOST).contains(&names.len()) {
        return Err(Error::invalid("names", names.len(), format!("from 1 to {MOST}")));
    }
    let mut seen = BTreeSet::new();
    for name in names {
        checked_new_name(name)?;
        if !seen.insert(name) {
            return Err(Error::invalid("names", shown(name), "each once"));
        }
    }
    Ok(())
}
