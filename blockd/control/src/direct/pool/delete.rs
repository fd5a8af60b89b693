//! Removing a volume, and overwriting its space first where that is asked for.

use std::sync::atomic::Ordering;

use blockd_media::error::{Error, shown};
use blockd_pmem::platform::Mode;

use super::super::busy::Busy;
use super::super::describe::{State, VolumeView};
use super::super::journal::{Intent, Record};
use super::{DirectPool, Usage, uuid_of};

impl DirectPool {
    /// Removes the namespace of a record; false if there is none.
    pub(super) fn destroy(&self, record: &Record) -> Result<bool, Error> {
        Ok(self.0.platform.destroy(&self.0.config.region, uuid_of(record)?)?)
    }

    /// Removes a volume; nothing if there is none of that name. With `erase_after` its space is
    /// free when it has been overwritten, which goes on in the background: the state that is
    /// answered says which it is.
    pub fn delete(&self, name: &str) -> Result<Option<VolumeView>, Error> {
        let _changing = self.changing_idle(name, Busy::give_up);
        let Some(record) = self.named(name, &[Intent::Ready, Intent::Creating]) else {
            return Ok(None);
        };
        let mut inventory = self.0.platform.read_with_users()?;
        self.region(&inventory)?;
        let mut before = self.view(&record, Some(&inventory));
        let uuid = uuid_of(&record)?;
        let scrubs = record.erase_after && record.intent == Intent::Ready;
        let is_off = inventory.namespace(uuid).is_some_and(|(_, one)| one.device.is_none());
        if scrubs && is_off {
            // Without a device it can't be overwritten, and the next owner of the space could read
            // it.
            self.enable_to_clear(&record).map_err(|error| {
                let problem = format!("is not enabled, so that it can't be overwritten: {error}");
                Error::in_use(format!("volume {}", shown(name)), problem)
            })?;
            inventory = self.0.platform.read_once_looked_at(uuid)?;
            self.region(&inventory)?;
        }
        let Some((_, namespace)) = inventory.namespace(uuid) else {
            // It was removed by other means, and not overwritten.
            self.change(|content| {
                content.has_remains |= record.intent == Intent::Ready;
                content.records.retain(|one| one.uuid != record.uuid);
            })?;
            before.state = State::Deleting;
            return Ok(Some(before));
        };
        if !namespace.users.is_empty() {
            let users: Vec<String> = namespace.users.iter().map(ToString::to_string).collect();
            let problem = format!("is in use: {}", users.join(", "));
            return Err(Error::in_use(format!("volume {}", shown(name)), problem));
        }
        // From here on no user can open the volume that is about to be deleted.
        let held = match namespace.device {
            None if !scrubs => None,
            _ => Some(self.0.platform.zeroing(namespace, 0)?),
        };
        let is_sector = namespace.mode == Mode::Sector;
        let intent = if scrubs { Intent::Scrubbing } else { Intent::Deleting };
        before.state = if scrubs { State::Scrubbing } else { State::Deleting };
        self.change(|content| {
            content.has_remains |= record.intent == Intent::Ready && !scrubs;
            for one in content.records.iter_mut().filter(|one| one.uuid == record.uuid) {
                (one.intent, one.scrubbed_bytes) = (intent, 0);
            }
        })?;
        match held {
            // A sector namespace is made bare first, which needs it closed.
            held if scrubs => self.0.scrubber.take(record.uuid, held.filter(|_| !is_sector)),
            held => {
                drop(held);
                self.destroy(&record)?;
                self.forget(&record.uuid)?;
            }
        }
        Ok(Some(before))
    }

    /// Gives a namespace a device that it can be overwritten by. Bare, it needs no memory for its
    /// pages; true if that is what it became.
    pub(in super::super) fn enable_to_clear(&self, record: &Record) -> Result<bool, Error> {
        let uuid = uuid_of(record)?;
        let error = match self.0.platform.ensure_enabled(uuid) {
            Ok(_) => return Ok(false),
            Err(error) if record.usage == Usage::FileIo => return Err(error.into()),
            Err(error) => error,
        };
        if record.scrubbed_bytes > 0 {
            // Those were others: bare, it begins with what the kernel keeps about it.
            self.note_scrubbed(record, 0)?;
        }
        // If it is not deleted then, it is restored.
        self.0.has_unfinished.store(true, Ordering::Relaxed);
        self.0.platform.make_bare(uuid).map_err(|_| error)?;
        Ok(true)
    }

    /// Notes how much of what is deleted has been overwritten.
    pub(in super::super) fn note_scrubbed(&self, record: &Record, done: u64) -> Result<(), Error> {
        self.change(|content| {
            for one in content.records.iter_mut().filter(|one| one.uuid == record.uuid) {
                one.scrubbed_bytes = done;
            }
        })
    }

    /// Removes what has been overwritten.
    pub(in super::super) fn scrubbed(&self, record: &Record) -> Result<(), Error> {
        let _changing = self.changing();
        self.change(|content| {
            for one in content.records.iter_mut().filter(|one| one.uuid == record.uuid) {
                one.intent = Intent::Deleting;
            }
        })?;
        self.destroy(record)?;
        self.forget(&record.uuid)
    }
}
