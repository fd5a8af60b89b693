//! Volumes grow. Where others may have left something, their new ends are overwritten first.
//!
//! The new end is overwritten while the namespace is bare: neither a mount that waits for the
//! volume nor a user takes it for the volume then, so that no written data is lost and no data of
//! another volume is read. Its label has the new size already. A host that reboots meanwhile
//! enables it with the new size: from then on its end may be in use, and is left as it is.

use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

use blockd_media::error::{Error, shown};
use blockd_pmem::platform::clear::Zeroing;
use blockd_pmem::platform::{Inventory, Mode, Namespace, PlatformError};

use super::busy::{Busy, Held};
use super::config::SizeRule;
use super::describe::VolumeView;
use super::journal::{Intent, Record};
use super::pool::{CreateWish, uuid_of};
use super::scrub::PIECE;
use super::{DirectPool, Usage};

/// Said of a volume that has no device while its new end is overwritten.
pub(super) const GROWS: &str = "it grows, and its new end is overwritten first";

/// A growth to be finished.
struct Begun<'a> {
    record: Record,
    /// Overwrites the part that may hold another volume's data.
    zeroing: Option<Zeroing>,
    held: Held<'a>,
}

/// Whether the namespace of a volume was made bare for its growth.
pub(super) fn is_bare(record: &Record, namespace: &Namespace) -> bool {
    record.intent == Intent::Ready
        && record.usage == Usage::AppDirect
        && namespace.mode == Mode::Raw
        && namespace.device.is_some()
}

impl DirectPool {
    /// Makes a volume larger, where its kind can be: true if it is now.
    pub fn resize(&self, name: &str, size: u64) -> Result<(bool, u64, VolumeView), Error> {
        // An earlier change is completed first.
        self.finish_growth(&self.ready(name)?.uuid)?;
        let changing = self.changing_idle(name, Busy::wait);
        let record = self.ready(name)?;
        if record.grows() {
            return Err(Error::in_use(format!("volume {}", shown(name)), GROWS.to_owned()));
        }
        let uuid = uuid_of(&record)?;
        let mut inventory = self.0.platform.read()?;
        if inventory.namespace(uuid).is_some_and(|(_, one)| one.device.is_none()) {
            self.0.platform.ensure_enabled(uuid)?;
            inventory = self.0.platform.read()?;
        }
        let region = self.region(&inventory)?;
        self.note_growth(&record, &inventory)?;
        let record = self.ready(name)?;
        let before = self.view(&record, Some(&inventory));
        let has = match self.0.config.size_rule {
            SizeRule::Usable => before.usable,
            SizeRule::Charged => before.charged,
        };
        if size == has || size == record.requested_bytes {
            return Ok((false, before.usable, before));
        }
        let wish = CreateWish {
            name: name.to_owned(),
            size,
            limit: 0,
            usage: record.usage,
            erase_after: record.erase_after,
            size_rule: None,
        };
        let step = self.step(region, self.0.config.alignment)?;
        let raw = self.raw_size(&wish, step)?;
        if size > record.requested_bytes && size <= has {
            // A growth was cut short after the volume had it.
            let was = record.usable_bytes;
            self.edit(&record, |one| one.requested_bytes = size)?;
            return Ok((true, was, self.view_of(&record)?));
        }
        if size < has {
            let problem =
                format!("has {has} bytes, and size_bytes is {size}: namespaces do not shrink");
            return Err(Error::in_use(format!("volume {}", shown(name)), problem));
        }
        self.grow(&record, raw, changing)?;
        self.edit(&record, |one| one.requested_bytes = size)?;
        Ok((true, before.usable, self.view_of(&record)?))
    }

    fn ready(&self, name: &str) -> Result<Record, Error> {
        let record = self.named(name, &[Intent::Ready]);
        record.ok_or_else(|| Error::not_found("volume", name))
    }

    /// Grows its namespace to `raw` bytes. A growth that fails is undone, or is completed in the
    /// background.
    fn grow(&self, record: &Record, raw: u64, changing: MutexGuard<'_, ()>) -> Result<(), Error> {
        let uuid = uuid_of(record)?;
        // Until it is finished: a call in between would answer for another one.
        let Some(held) = self.0.busy.hold(&record.uuid) else {
            return Err(Error::in_use(format!("volume {}", shown(&record.name)), GROWS.to_owned()));
        };
        let inventory = self.0.platform.read_with_users()?;
        let namespace = inventory.namespace(uuid).map(|(_, namespace)| namespace);
        if let Some(user) = namespace.and_then(|namespace| namespace.users.first()) {
            let problem = format!("is in use: {user}");
            return Err(Error::in_use(format!("volume {}", shown(&record.name)), problem));
        }
        let start = namespace.and_then(|namespace| namespace.start);
        let has_remains = self.content().has_remains;
        self.edit(record, |one| {
            (one.grows_to, one.grows_at) = (Some(raw), start);
            one.dirty_from = has_remains.then_some(one.charged_bytes);
        })?;
        let grown = self.0.platform.grow_bare(uuid, raw);
        let is_as_it_was =
            |error: &PlatformError| !matches!(error, PlatformError::NotTakenBack { .. });
        if grown.as_ref().is_err_and(is_as_it_was)
            && let Err(error) = self.0.platform.ensure_enabled(uuid)
        {
            let (pool, volume, error) = (self.name(), &record.name, error.text());
            tracing::warn!(pool, volume, error, "its namespace can't be enabled");
        }
        let finished = self.finish_held(&record.uuid, changing, held);
        grown?;
        finished
    }

    /// Finishes growths that were cut short; whether all of them are.
    pub(super) fn finish_growths(&self) -> Result<bool, Error> {
        let inventory = self.0.platform.read()?;
        let has_begun = |record: &Record| {
            let namespace = uuid_of(record).ok().and_then(|uuid| inventory.namespace(uuid));
            record.grows() || namespace.is_some_and(|(_, one)| is_bare(record, one))
        };
        let mut are_all = true;
        for record in self.records(&[Intent::Ready]).into_iter().filter(has_begun) {
            if self.0.busy.is_held(&record.uuid) {
                // The thread that works on it reports a failure.
                are_all = false;
            } else if let Err(error) = self.finish_growth(&record.uuid) {
                let (pool, volume) = (self.name(), &record.name);
                tracing::warn!(pool, volume, %error, "its growth is not finished yet");
                are_all = false;
            }
        }
        Ok(are_all)
    }

    /// Overwrites the new end of a volume that is bare, and gives it back. One that is not bare has
    /// been used, maybe, and is left as it is.
    fn finish_growth(&self, uuid: &str) -> Result<(), Error> {
        // Before the first check: another thread may work on it, and may have finished it by then.
        let (changing, held) = self.changing_with(uuid);
        self.finish_held(uuid, changing, held)
    }

    fn finish_held(
        &self,
        uuid: &str,
        changing: MutexGuard<'_, ()>,
        held: Held<'_>,
    ) -> Result<(), Error> {
        let begun = self.begun(uuid, held);
        drop(changing);
        let finished = begun.and_then(|begun| match begun {
            Some(begun) => self.finish(begun),
            None => Ok(()),
        });
        if finished.is_err() {
            // It may be as it was before.
            let (_changing, held) = self.changing_with(uuid);
            drop(self.begun(uuid, held));
            self.0.has_unfinished.store(true, Ordering::Relaxed);
        }
        finished
    }

    /// The unfinished growth of a volume, for a caller that holds it and the pool's lock.
    fn begun<'a>(&self, uuid: &str, held: Held<'a>) -> Result<Option<Begun<'a>>, Error> {
        let mut records = self.records(&[Intent::Ready]).into_iter();
        let Some(record) = records.find(|one| one.uuid == uuid) else { return Ok(None) };
        let id = uuid_of(&record)?;
        let inventory = self.0.platform.read()?;
        // A missing namespace may still appear.
        self.region(&inventory)?;
        let Some((_, namespace)) = inventory.namespace(id) else { return Ok(None) };
        let mut namespace = namespace.clone();
        if namespace.device.is_none() {
            if !record.grows() {
                return Ok(None);
            }
            namespace = self.0.platform.ensure_enabled(id)?;
        }
        if !is_bare(&record, &namespace) {
            return self.note_used(&record, &namespace).map(|()| None);
        }
        if record.grows_at.is_some() && record.grows_at != namespace.start {
            let (was, is) = (record.grows_at, namespace.start);
            let problem =
                format!("its namespace began at {was:?} of its region, and now at {is:?}");
            let what = format!("volume {}", shown(&record.name));
            return Err(Error::Unexpected { what, problem });
        }
        let zeroing = record.dirty_from.map(|from| self.0.platform.zeroing(&namespace, from));
        Ok(Some(Begun { zeroing: zeroing.transpose()?, record, held }))
    }

    fn finish(&self, begun: Begun<'_>) -> Result<(), Error> {
        let Begun { record, zeroing, held } = begun;
        if let Some(zeroing) = zeroing {
            self.overwrite(&record, zeroing, &held)?;
            // From here on it is clean, whatever happens.
            self.edit(&record, |one| one.dirty_from = None)?;
        }
        let at_most = record.grows_to.unwrap_or(u64::MAX);
        // One that does not grow has nothing that it could be cut back to.
        let before = record.grows().then_some(record.charged_bytes);
        let restored = self.0.platform.restore(uuid_of(&record)?, at_most, before)?;
        self.note_grown(&record, &restored)
    }

    /// Notes that the volume may have been used since its growth began.
    fn note_used(&self, record: &Record, namespace: &Namespace) -> Result<(), Error> {
        if !record.grows() {
            return Ok(());
        }
        if let Some(from) = record.dirty_from.filter(|from| namespace.size > *from) {
            let (pool, volume) = (self.name(), &record.name);
            tracing::error!(
                pool,
                volume,
                from,
                "the host was started anew while the volume grew: its new end may have been used, \
                 is left as it is, and may hold what others left"
            );
        }
        self.note_grown(record, namespace)
    }

    /// Overwrites what is left to be, unless it is given up.
    pub(super) fn overwrite(
        &self,
        record: &Record,
        mut zeroing: Zeroing,
        held: &Held<'_>,
    ) -> Result<(), Error> {
        let failed = |source| Error::io(format!("overwriting volume {}", record.name), source);
        while !zeroing.go_on(PIECE).map_err(failed)? {
            let what = if self.0.scrubber.stops() {
                format!("pool {}", self.name())
            } else if held.gives_up() {
                format!("volume {}", shown(&record.name))
            } else {
                continue;
            };
            return Err(Error::in_use(what, "is being closed or deleted".to_owned()));
        }
        Ok(())
    }

    /// Notes the size of a volume whose growth was not noted.
    fn note_growth(&self, record: &Record, inventory: &Inventory) -> Result<(), Error> {
        let namespace = inventory.namespace(uuid_of(record)?).map(|(_, namespace)| namespace);
        match namespace {
            Some(one)
                if one.size > record.charged_bytes
                    && one.device.is_some()
                    && !is_bare(record, one) =>
            {
                self.note_grown(record, one)
            }
            _ => Ok(()),
        }
    }

    /// Notes how large it is now, and that nothing is left to be done.
    fn note_grown(&self, record: &Record, namespace: &Namespace) -> Result<(), Error> {
        self.edit(record, |one| {
            one.charged_bytes = namespace.size;
            one.usable_bytes = namespace.usable.unwrap_or(one.usable_bytes);
            (one.grows_to, one.grows_at, one.dirty_from) = (None, None, None);
        })
    }

    fn edit(&self, record: &Record, edit: impl Fn(&mut Record)) -> Result<(), Error> {
        self.change(|content| {
            content.records.iter_mut().filter(|one| one.uuid == record.uuid).for_each(edit);
        })
    }
}
