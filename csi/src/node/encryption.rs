//! Encrypted volumes: LUKS2 on the device, and above it the mapping that workloads have.
//!
//! For all that stages, publishes and looks, such a volume is one whose device is the mapping: it
//! is opened when the volume is attached, and closed when it is detached. The device below is
//! attached so that it can be written, also where the mapping can't be: headers are made and keys
//! are changed there.

use std::collections::HashMap;
use std::path::PathBuf;

use blockd_luks::{BadKey, HEADER_BYTES, KIND, Key, MAX_KEY_BYTES, Mapping};

use super::content::Content;
use super::mountinfo::Device;
use super::records::{Encryption, Place, Record};
use super::steps;
use super::world::{Result, Unfinished, Volume, Volumes, Wanted, World};
use crate::capability::Mode;
use crate::error::Error;
use crate::limits;
use crate::sizes::Range;

/// The secrets of a call.
const KEY: &str = "key";
const PREVIOUS_KEY: &str = "previousKey";

/// Key slots of a header of LUKS2.
const MAX_SLOTS: usize = 32;

/// A header of LUKS, as `blkid` calls it.
const SIGNATURE: &str = "crypto_LUKS";

/// The keys of a call.
#[derive(Debug)]
pub struct Keys {
    key: Key,
    /// The key that `key` takes the place of.
    previous: Option<Key>,
}

impl Keys {
    /// Takes the keys from the secrets of a call; `None` if it has no key.
    ///
    /// # Errors
    /// One is no key, or both are the same.
    pub fn take(secrets: &mut HashMap<String, String>) -> Result<Option<Self>> {
        limits::map("secrets", secrets)?;
        let mut take = |name: &str| {
            let bytes = secrets.remove(name).map(String::into_bytes);
            bytes.map(|bytes| Key::new(bytes).map_err(|problem| bad(name, problem))).transpose()
        };
        let (key, previous) = (take(KEY)?, take(PREVIOUS_KEY)?);
        if previous.is_some() && key == previous {
            let allowed = format!("left out, or another one than secrets.{KEY}");
            return Err(Error::invalid(format!("secrets.{PREVIOUS_KEY}"), "the same", allowed));
        }
        Ok(key.map(|key| Self { key, previous }))
    }
}

/// A key is not shown, nor is its length.
fn bad(name: &str, problem: BadKey) -> Error {
    let allowed = format!("a key of 1 to {MAX_KEY_BYTES} bytes");
    Error::invalid(format!("secrets.{name}"), problem, allowed)
}

/// The part of a call that concerns an encrypted volume.
#[derive(Clone, Copy, Debug, Default)]
pub struct Request<'a> {
    pub keys: Option<&'a Keys>,
    /// The volume is to be mounted, so that a file system follows a new header.
    pub mount: bool,
}

/// Volumes of which one is encrypted.
struct Encrypted<'a> {
    world: World<'a>,
    /// The CSI id of the volume.
    id: &'a str,
    request: Request<'a>,
}

/// Does something where an encrypted volume is as workloads see it. `is_encrypted`: the request
/// says so; else records and mappings show whether it is.
///
/// # Errors
/// The errors of the steps.
pub fn through<T>(
    world: &World<'_>,
    id: &str,
    place: &Place,
    (is_encrypted, request): (bool, Request<'_>),
    act: impl FnOnce(&World<'_>) -> Result<T>,
) -> Result<T> {
    let is_encrypted = match world.volumes.record(id) {
        _ if is_encrypted => true,
        Some(record) => record.encryption.is_some(),
        // A mapping without a record is still there.
        None => world.machine.mapping(&world.volumes.mapping_name(place))?.is_some(),
    };
    if !is_encrypted {
        return act(world);
    }
    act(&World { volumes: &Encrypted { world: *world, id, request }, machine: world.machine })
}

impl<'a> Encrypted<'a> {
    fn mapping(&self, place: &Place) -> Result<Option<Mapping>> {
        self.world.machine.mapping(&self.world.volumes.mapping_name(place))
    }

    fn keys(&self) -> Result<&'a Keys> {
        self.request.keys.ok_or_else(|| Error::missing(format!("secrets.{KEY}")))
    }

    fn stored(&self, place: &Place) -> Record {
        self.world.volumes.record(self.id).unwrap_or_else(|| Record::new(self.id, place))
    }

    fn set(&self, record: &Record) -> Result<()> {
        let same = self.world.volumes.record(self.id).as_ref() == Some(record);
        if same { Ok(()) } else { self.world.volumes.keep(record) }
    }

    /// The device below the mapping, which can be written.
    fn below(&self, place: &Place) -> Result<Volume> {
        let volume = steps::existing(&self.world, self.id, place)?;
        steps::attach(&self.world, place, &volume, false)
    }

    fn close(&self, place: &Place) -> Result<()> {
        if self.mapping(place)?.is_none() {
            return Ok(());
        }
        let name = self.world.volumes.mapping_name(place);
        match self.world.machine.close(&name)? {
            true => Ok(()),
            false => Err(Error::in_use(format_args!("volume {}", self.id), "is in use")),
        }
    }

    /// Writes a header to a device that was never written. A device with any other content is left
    /// alone: so is a clone, which begins with the header of its source.
    fn prepare(
        &self,
        place: &Place,
        volume: &mut Volume,
        device: &Device,
        keys: &Keys,
    ) -> Result<()> {
        let mut record = self.stored(place);
        record.follow(volume.unfinished);
        let is_rest = record.encryption.is_some_and(|encryption| encryption.formatting);
        let content = self.world.machine.content(device)?;
        match &content {
            _ if is_rest => {}
            Content::Other(there) if there == SIGNATURE => return Ok(()),
            Content::Nothing if steps::is_empty(&self.world, volume, device)? => {}
            other => return Err(steps::refused(&record, KIND, other.described())),
        }
        steps::free(&self.world, &record, device)?;
        let of = |formatting| Some(Encryption { formatting, key_refused: false });
        steps::mark(&self.world, place, volume, Unfinished::Header)?;
        self.set(&Record { encryption: of(true), formatting: false, ..record.clone() })?;
        self.world.machine.encrypt(device, &keys.key)?;
        // From now on the content of the mapping is no data, until a file system was made there. A
        // device that is not mounted is the workload's as soon as it is open.
        let mark = if self.request.mount { Unfinished::FileSystem } else { Unfinished::Nothing };
        steps::mark(&self.world, place, volume, mark)?;
        volume.unfinished = volume.unfinished.map(|_| mark);
        self.set(&Record { encryption: of(false), formatting: self.request.mount, ..record })
    }

    /// Makes `key` the key of the volume, where it was `previousKey`: the slot of the new one is
    /// there before that of the old one goes, so that a repeat continues wherever it ended. False:
    /// neither opens it.
    fn rotate(&self, device: &Device, keys: &Keys) -> Result<bool> {
        let Some(previous) = &keys.previous else { return Ok(true) };
        let machine = self.world.machine;
        if !machine.is_key(device, &keys.key)? && !machine.add_key(device, previous, &keys.key)? {
            return Ok(false);
        }
        // A call that was interrupted may have left a second slot of it.
        for _ in 0..MAX_SLOTS {
            if !machine.remove_key(device, previous)? {
                break;
            }
        }
        Ok(true)
    }

    fn note_refusal(&self, place: &Place, key_refused: bool) -> Result<()> {
        let mut record = self.stored(place);
        let encryption = record.encryption.unwrap_or_default();
        record.encryption = Some(Encryption { key_refused, ..encryption });
        self.set(&record)
    }

    /// No key of the call opens the volume.
    fn wrong_key(&self, keys: &Keys) -> Error {
        let previous = keys.previous.as_ref().map(|_| format!(" and secrets.{PREVIOUS_KEY}"));
        let fields = format!("secrets.{KEY}{}", previous.unwrap_or_default());
        Error::WrongKey { what: format!("volume {}", self.id), fields }
    }

    /// Makes the mapping as large as its device allows.
    fn resize(&self, place: &Place, device: &Device, mapping: &Mapping) -> Result<()> {
        let bytes = self.world.machine.device_bytes(device)?;
        if bytes.saturating_sub(HEADER_BYTES) <= mapping.size_bytes {
            return Ok(());
        }
        let keys = self.keys()?;
        let name = self.world.volumes.mapping_name(place);
        // The volume has a new key only once it is staged with that.
        for key in std::iter::once(&keys.key).chain(&keys.previous) {
            if self.world.machine.resize(&name, &mapping.path, key)? {
                return Ok(());
            }
        }
        Err(self.wrong_key(keys))
    }

    /// The mapping over that device, if it is open.
    fn open_over(&self, place: &Place, device: &Device) -> Result<Option<Mapping>> {
        let is_over = |mapping: &Mapping| mapping.is_over(device.major, device.minor);
        Ok(self.mapping(place)?.filter(is_over))
    }

    fn show(&self, place: &Place, volume: Volume) -> Result<Volume> {
        let mapping = match &volume.device {
            Some(device) => self.open_over(place, device)?,
            None => None,
        };
        let refused = self.stored(place).encryption.is_some_and(|it| it.key_refused);
        let why = if refused { "the key was refused" } else { "" };
        Ok(inside(volume, mapping, why))
    }
}

/// The bytes behind a header.
#[must_use]
pub fn behind_header(bytes: i64) -> i64 {
    bytes.saturating_sub(crate::sizes::LUKS_HEADER.get()).max(0)
}

/// A volume as its mapping.
fn inside(volume: Volume, mapping: Option<Mapping>, why: &'static str) -> Volume {
    let locked = mapping.is_none().then_some(why);
    let read_only = mapping.as_ref().is_some_and(|mapping| mapping.read_only);
    let device = mapping.map(|Mapping { path, major, minor, .. }| Device { path, major, minor });
    Volume {
        size_bytes: behind_header(volume.size_bytes),
        charged_bytes: behind_header(volume.charged_bytes),
        // It has a header at the least.
        empty: false,
        device,
        read_only,
        encrypted: false,
        locked,
        ..volume
    }
}

impl Volumes for Encrypted<'_> {
    fn inside(&self, place: &Place, volume: Volume) -> Result<Volume> {
        self.show(place, volume)
    }

    fn get(&self, place: &Place) -> Result<Option<Volume>> {
        self.world.volumes.get(place)?.map(|volume| self.show(place, volume)).transpose()
    }

    fn attach(&self, place: &Place, read_only: bool) -> Result<Volume> {
        let keys = self.keys()?;
        let mut volume = self.below(place)?;
        let device = steps::device_of(self.id, &volume)?.clone();
        let open = self.open_over(place, &device)?.filter(|it| it.read_only == read_only);
        if let Some(mapping) = open {
            // It goes on to be open with any key, and may not be reported as if it had this one.
            if !self.rotate(&device, keys)? {
                return Err(self.wrong_key(keys));
            }
            self.resize(place, &device, &mapping)?;
            return self.show(place, volume);
        }
        // One of the other mode, or over a device that is gone.
        self.close(place)?;
        self.prepare(place, &mut volume, &device, keys)?;
        // Where neither key fits, the opening says so.
        let _ = self.rotate(&device, keys)?;
        let name = self.world.volumes.mapping_name(place);
        let is_open = self.world.machine.open(&device, &name, &keys.key, read_only)?;
        self.note_refusal(place, !is_open)?;
        if !is_open {
            return Err(self.wrong_key(keys));
        }
        self.show(place, volume)
    }

    fn bare(&self, place: &Place) -> Result<Volume> {
        self.close(place)?;
        self.below(place)
    }

    fn detach(&self, place: &Place) -> Result<()> {
        self.close(place)?;
        self.world.volumes.detach(place)
    }

    fn stretch(&self, place: &Place) -> Result<()> {
        let volume = steps::existing(&self.world, self.id, place)?;
        let Some(device) = &volume.device else { return Ok(()) };
        match self.open_over(place, device)? {
            Some(mapping) => self.resize(place, device, &mapping),
            None => Ok(()),
        }
    }

    fn enlarge(&self, place: &Place, range: &Range) -> Result<Option<Volume>> {
        let larger = self.world.volumes.enlarge(place, range)?;
        larger.map(|volume| self.show(place, volume)).transpose()
    }

    fn mark(&self, place: &Place, unfinished: Unfinished) -> Result<()> {
        self.world.volumes.mark(place, unfinished)
    }

    fn create(&self, place: &Place, wanted: &Wanted) -> Result<()> {
        self.world.volumes.create(place, wanted)
    }

    fn delete(&self, place: &Place) -> Result<()> {
        self.world.volumes.delete(place)
    }

    fn record(&self, volume: &str) -> Option<Record> {
        self.world.volumes.record(volume)
    }

    /// Notes in each record that the volume is encrypted.
    fn keep(&self, record: &Record) -> Result<()> {
        let encryption = Some(record.encryption.unwrap_or_default());
        self.world.volumes.keep(&Record { encryption, ..record.clone() })
    }

    fn forget(&self, volume: &str) -> Result<()> {
        self.world.volumes.forget(volume)
    }

    fn vm_folder(&self, place: &Place) -> Result<PathBuf> {
        self.world.volumes.vm_folder(place)
    }

    fn mapping_name(&self, place: &Place) -> String {
        self.world.volumes.mapping_name(place)
    }

    fn count_conflict(&self, mode: Mode) {
        self.world.volumes.count_conflict(mode);
    }
}
