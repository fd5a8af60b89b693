//! Volumes grow. Where others may have left something, their new ends are overwritten first.
//!
//! That is done while the namespace is bare: nothing takes it for the volume then, neither a mount
//! that waits for it nor a user, so that nobody can have written what would be lost, or read what
//! is another's. Its label has the new size already. A host that starts anew meanwhile makes it
//! what it was, larger: from then on somebody may have used its end, which is left as it is.

use blockd_pmem::platform::{Inventory, Mode, Namespace};

use super::config::SizeRule;
use super::describe::VolumeView;
use super::journal::{Intent, Record};
use super::pool::{CreateWish, uuid_of};
use super::scrub::PIECE;
use super::{DirectPool, Usage};
use crate::error::{Error, shown};

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
        let _changing = self.changing();
        let existing = || {
            let record = self.named(name, &[Intent::Ready]);
            record.ok_or_else(|| Error::not_found("volume", name))
        };
        let inventory = self.0.platform.read()?;
        self.region(&inventory)?;
        self.finish_growth(&existing()?, &inventory)?;
        let inventory = self.0.platform.read()?;
        let region = self.region(&inventory)?;
        self.note_growth(&existing()?, &inventory)?;
        let record = existing()?;
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
        if size > record.requested_bytes && size <= has && raw == record.charged_bytes {
            // A growth to just that was cut short after the volume had it.
            self.edit(&record, |one| one.requested_bytes = size)?;
            return Ok((true, before.usable, self.get(name)?));
        }
        if size < has {
            let problem = format!("has {has} bytes: namespaces do not shrink");
            return Err(Error::in_use(format!("volume {}", shown(name)), problem));
        }
        self.grow(&record, raw)?;
        self.edit(&record, |one| one.requested_bytes = size)?;
        Ok((true, before.usable, self.get(name)?))
    }

    /// Gives its namespace so many bytes. Where that fails it has its device all the same.
    fn grow(&self, record: &Record, raw: u64) -> Result<(), Error> {
        let uuid = uuid_of(record)?;
        let has_remains = self.content().has_remains;
        let grown = if has_remains {
            self.edit(record, |one| one.dirty_from = Some(one.charged_bytes))?;
            self.0.platform.grow_bare(uuid, raw)
        } else {
            self.0.platform.grow(uuid, raw)
        };
        if grown.is_err()
            && let Err(error) = self.0.platform.ensure_enabled(uuid)
        {
            let (pool, volume, error) = (self.name(), &record.name, error.text());
            tracing::warn!(pool, volume, error, "its namespace can't be enabled");
        }
        let inventory = self.0.platform.read()?;
        let finished = match self.named(&record.name, &[Intent::Ready]) {
            Some(record) => self.finish_growth(&record, &inventory),
            None => Ok(()),
        };
        let grown = grown?;
        finished?;
        if has_remains { Ok(()) } else { self.note_size(record, &grown) }
    }

    /// Finishes growths that were cut short.
    pub(super) fn finish_growths(&self) -> Result<(), Error> {
        let _changing = self.changing();
        let inventory = self.0.platform.read()?;
        for record in self.records(&[Intent::Ready]) {
            if let Err(error) = self.finish_growth(&record, &inventory) {
                let (pool, volume) = (self.name(), &record.name);
                tracing::warn!(pool, volume, %error, "its growth is not finished yet");
            }
        }
        Ok(())
    }

    /// Overwrites the new end of a volume that is bare, and gives it back. One that is not bare has
    /// been used, maybe, and is left as it is.
    fn finish_growth(&self, record: &Record, inventory: &Inventory) -> Result<(), Error> {
        let uuid = uuid_of(record)?;
        // Without a device nothing can be told, nor done.
        let namespace = inventory.namespace(uuid).map(|(_, namespace)| namespace);
        let Some(namespace) = namespace.filter(|one| one.device.is_some()) else { return Ok(()) };
        if is_bare(record, namespace) {
            if let Some(from) = record.dirty_from {
                self.overwrite(namespace, from)?;
                // From here on it is clean, whatever happens.
                self.edit(record, |one| one.dirty_from = None)?;
            }
            let restored = self.0.platform.restore(uuid)?;
            return self.note_size(record, &restored);
        }
        let Some(from) = record.dirty_from else { return Ok(()) };
        if namespace.size > from {
            let (pool, volume) = (self.name(), &record.name);
            tracing::error!(
                pool,
                volume,
                from,
                "the host was started anew while the volume grew: its new end may have been used, \
                 is left as it is, and may hold what others left"
            );
        }
        self.note_size(record, namespace)?;
        self.edit(record, |one| one.dirty_from = None)
    }

    /// Overwrites a namespace from a byte of its device on.
    pub(super) fn overwrite(&self, namespace: &Namespace, from: u64) -> Result<(), Error> {
        let failed = |source| Error::io(format!("overwriting {namespace}"), source);
        let mut zeroing = self.0.platform.zeroing(namespace, from)?;
        while !zeroing.go_on(PIECE).map_err(failed)? {
            if self.0.scrubber.stops() {
                return Err(Error::in_use(format!("pool {}", self.name()), "is being closed"));
            }
        }
        Ok(())
    }

    /// Notes how large a volume is that grew when nobody came to note it.
    fn note_growth(&self, record: &Record, inventory: &Inventory) -> Result<(), Error> {
        let namespace = inventory.namespace(uuid_of(record)?).map(|(_, namespace)| namespace);
        match namespace {
            Some(one) if one.size > record.charged_bytes && !is_bare(record, one) => {
                self.note_size(record, one)
            }
            _ => Ok(()),
        }
    }

    fn note_size(&self, record: &Record, namespace: &Namespace) -> Result<(), Error> {
        self.edit(record, |one| {
            one.charged_bytes = namespace.size;
            one.usable_bytes = namespace.usable.unwrap_or(one.usable_bytes);
        })
    }

    fn edit(&self, record: &Record, edit: impl Fn(&mut Record)) -> Result<(), Error> {
        self.change(|content| {
            content.records.iter_mut().filter(|one| one.uuid == record.uuid).for_each(edit);
        })
    }
}
