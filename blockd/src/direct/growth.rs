//! Volumes grow, and their new ends are clean before anybody is told of them.
//!
//! A volume has its device again before its new end can be overwritten, and a crash may come in
//! between. Later somebody may have written there already, who is not to lose that: an end is
//! overwritten only if nobody can have used it, and is left as it is otherwise.

use blockd_pmem::platform::{Inventory, Namespace};

use super::DirectPool;
use super::config::SizeRule;
use super::describe::VolumeView;
use super::journal::{Intent, Record};
use super::pool::{CreateWish, uuid_of};
use crate::clock::boot_id;
use crate::error::{Error, shown};

impl DirectPool {
    /// Makes a volume larger, where its kind can be: true if it is now.
    pub fn resize(&self, name: &str, size: u64) -> Result<(bool, u64, VolumeView), Error> {
        let _changing = self.changing();
        let inventory = self.0.platform.read()?;
        let region = self.region(&inventory)?;
        let existing = || {
            let record = self.named(name, &[Intent::Ready]);
            record.ok_or_else(|| Error::not_found("volume", name))
        };
        self.clean_tail(&existing()?, &inventory, false)?;
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
        if size > record.requested_bytes && raw == record.charged_bytes {
            // A growth to just that was cut short after the volume had it.
            self.edit(&record, |one| one.requested_bytes = size)?;
            return Ok((true, before.usable, self.get(name)?));
        }
        if size < has {
            let problem = format!("has {has} bytes: namespaces do not shrink");
            return Err(Error::in_use(format!("volume {}", shown(name)), problem));
        }
        let usable = self.grow(&record, &before, raw)?;
        self.edit(&record, |one| (one.requested_bytes, one.usable_bytes) = (size, usable))?;
        Ok((true, before.usable, self.get(name)?))
    }

    /// Gives its namespace so many bytes, and bytes that are usable of it.
    fn grow(&self, record: &Record, before: &VolumeView, raw: u64) -> Result<u64, Error> {
        let boot = boot_id().map_err(|source| Error::io("reading the boot's id", source))?;
        // Its device is larger before its new end is clean, and may be so when the daemon dies.
        if self.content().has_remains {
            let dirty = (Some(before.usable), boot);
            self.edit(record, |one| (one.dirty_from, one.dirty_boot) = dirty.clone())?;
        }
        let grown = self.0.platform.grow(uuid_of(record)?, raw)?;
        let cleared = match self.clear_remains(&grown, before.usable) {
            // The next start goes on with it.
            Err(error) if self.0.scrubber.stops() => return Err(error),
            other => other,
        };
        self.clean(record, &grown)?;
        cleared.map_err(|error| {
            let what = format!("volume {}", shown(&record.name));
            let problem = format!("is larger, and its new end may hold what others left: {error}");
            Error::in_use(what, problem)
        })?;
        Ok(grown.usable.unwrap_or(0))
    }

    /// Overwrites the ends of volumes whose growth was cut short.
    pub(super) fn clean_tails(&self) -> Result<(), Error> {
        let _changing = self.changing();
        let dirty = self.records(&[Intent::Ready]).into_iter();
        let dirty: Vec<Record> = dirty.filter(|one| one.dirty_from.is_some()).collect();
        if dirty.is_empty() {
            return Ok(());
        }
        let inventory = self.0.platform.read()?;
        for record in dirty {
            if let Err(error) = self.clean_tail(&record, &inventory, true) {
                let (pool, volume) = (self.name(), &record.name);
                tracing::warn!(pool, volume, %error, "its new end is not overwritten yet");
            }
        }
        Ok(())
    }

    /// Overwrites what a growth that was cut short has left at the end of a volume, unless somebody
    /// may have used that end since.
    fn clean_tail(
        &self,
        record: &Record,
        inventory: &Inventory,
        is_start: bool,
    ) -> Result<(), Error> {
        let Some(from) = record.dirty_from else { return Ok(()) };
        let Some((_, namespace)) = inventory.namespace(uuid_of(record)?) else { return Ok(()) };
        // Without a device nothing can be told, nor done.
        let Some(usable) = namespace.usable.filter(|_| namespace.device.is_some()) else {
            return Ok(());
        };
        if usable > from {
            // Of the daemon's own death in between nobody has had time to make use.
            let is_fresh = is_start && boot_id().is_ok_and(|boot| boot == record.dirty_boot);
            let cleared = match is_fresh || self.0.platform.is_unwritten(namespace)? {
                true => self.clear_remains(namespace, from),
                false => Err(Error::in_use("its device", "may have been written to")),
            };
            match cleared {
                Ok(()) => {}
                Err(error) if self.0.scrubber.stops() => return Err(error),
                Err(error) => {
                    let (pool, volume) = (self.name(), &record.name);
                    tracing::error!(
                        pool, volume, from, %error,
                        "the end of a volume is left as it is, and may hold what others left"
                    );
                }
            }
        }
        self.clean(record, namespace)
    }

    /// Notes that nothing is to be overwritten any more, and how large the volume is.
    fn clean(&self, record: &Record, namespace: &Namespace) -> Result<(), Error> {
        self.edit(record, |one| {
            (one.dirty_from, one.dirty_boot) = (None, String::new());
            one.charged_bytes = namespace.size;
            one.usable_bytes = namespace.usable.unwrap_or(one.usable_bytes);
        })
    }

    /// Notes how large a volume is that grew when nobody came to note it.
    fn note_growth(&self, record: &Record, inventory: &Inventory) -> Result<(), Error> {
        let namespace = inventory.namespace(uuid_of(record)?).map(|(_, namespace)| namespace);
        match namespace {
            Some(one) if one.size > record.charged_bytes && record.dirty_from.is_none() => {
                self.clean(record, one)
            }
            _ => Ok(()),
        }
    }

    fn edit(&self, record: &Record, edit: impl Fn(&mut Record)) -> Result<(), Error> {
        self.change(|content| {
            content.records.iter_mut().filter(|one| one.uuid == record.uuid).for_each(edit);
        })
    }
}
