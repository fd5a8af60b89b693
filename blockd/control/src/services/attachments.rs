//! Which volumes clients can reach, remembered from one start to the next.

mod log;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use blockd_engine::pool::{PoolHandle, VolumeId};
use blockd_media::error::Error;
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::hex;
use log::{Change, Log};

/// A pool's and a volume's name.
pub(super) type Place = (String, String);

/// The stored record of an attached volume.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) pool: String,
    pub(super) volume: String,
    /// The volume's identity: another one of the same name was not attached.
    pub(super) id: u32,
    /// The identity of its pool in hexadecimal digits: another pool of the same name has other
    /// volumes. Older versions wrote no such field.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) pool_id: String,
    pub(super) read_only: bool,
    /// Its block device; without one it is exported over NBD. Older versions wrote no such field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) ublk: Option<UblkRecord>,
    /// Of a volume in a cell that may be open on another host. Older versions wrote no such field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) standby: Option<StandbyRecord>,
}

/// The part of a volume that clients have to know before its pool is open here.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct StandbyRecord {
    /// The group of its cell, which has the pool's name.
    pub(super) group: String,
    /// Bytes of the volume.
    pub(super) size: u64,
    pub(super) block_size: u32,
    pub(super) extent_size: u64,
    pub(super) write_cache: bool,
}

impl Record {
    /// Whether it is about this volume of this pool.
    pub(super) fn is_of(&self, pool: &PoolHandle, volume: VolumeId) -> bool {
        let is_of_pool = self.pool_id.is_empty() || self.pool_id == hex(&pool.id());
        is_of_pool && self.id == volume.0
    }

    /// The present name of its volume, if that is in the pool for certain.
    pub(super) fn name_now(&self, pool: &PoolHandle) -> Option<String> {
        let is_certain = self.pool_id == hex(&pool.id());
        is_certain.then(|| pool.mapper().name_of(VolumeId(self.id))).flatten()
    }
}

/// The stored record of a block device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct UblkRecord {
    /// N of `/dev/ublkbN`. Not there yet while the device is only requested: the record is written
    /// before the kernel adds it, so that after a crash in between its mark identifies it.
    pub(super) device: Option<u32>,
    /// Queues, as they were asked for.
    pub(super) queues: u16,
    /// Requests that each can have in flight, as asked for.
    pub(super) depth: u16,
    /// The mark of a device that was added before it was known for which volume; others have a
    /// mark that is made from the volume's identity. Older versions wrote no such field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) mark: Option<u16>,
}

/// A volume that clients can reach.
#[derive(Debug)]
pub(super) struct Attachment {
    pub(super) record: Record,
    /// Connections are handed to workers under this lock, and no more once this says so: a detach
    /// knows that a connection was handed over before, or never will be.
    clients: Arc<Mutex<Clients>>,
}

/// The clients of a volume that come now.
#[derive(Debug)]
enum Clients {
    Connect,
    /// The pool is not open here. The channel's end says that it is, or that all is over.
    Wait(watch::Sender<()>),
    /// The volume was detached.
    Leave,
}

/// A client of a volume comes.
pub(super) enum Coming {
    Connected,
    /// The client has to wait until this has changed.
    Waits(watch::Receiver<()>),
    Refused,
}

impl Attachment {
    /// As it is before its pool was opened.
    fn new(record: Record) -> Arc<Self> {
        let waits = record.standby.is_some();
        Self::of(record, waits)
    }

    fn of(record: Record, waits: bool) -> Arc<Self> {
        let clients = if waits { Clients::Wait(watch::channel(()).0) } else { Clients::Connect };
        Arc::new(Self { record, clients: Arc::new(Mutex::new(clients)) })
    }

    /// Another record of the same attachment: clients that wait go on to.
    fn with_record(&self, record: Record) -> Arc<Self> {
        if matches!(*self.clients.lock(), Clients::Leave) {
            return Self::new(record);
        }
        Arc::new(Self { record, clients: Arc::clone(&self.clients) })
    }

    /// Lets no more clients connect. The record stays.
    pub(super) fn end(&self) {
        *self.clients.lock() = Clients::Leave;
    }

    /// Has clients wait from now on.
    pub(super) fn wait(&self) {
        let mut clients = self.clients.lock();
        if matches!(*clients, Clients::Connect) {
            *clients = Clients::Wait(watch::channel(()).0);
        }
    }

    /// Lets clients connect that wait, and those that come.
    pub(super) fn open(&self) {
        let mut clients = self.clients.lock();
        if matches!(*clients, Clients::Wait(_)) {
            *clients = Clients::Connect;
        }
    }

    /// Whether no client comes any more.
    pub(super) fn has_ended(&self) -> bool {
        matches!(*self.clients.lock(), Clients::Leave)
    }

    /// Whether clients wait.
    pub(super) fn waits(&self) -> bool {
        matches!(*self.clients.lock(), Clients::Wait(_))
    }

    /// Runs `connect` unless the volume has been detached meanwhile, or clients have to wait.
    pub(super) fn if_attached(&self, connect: impl FnOnce()) -> Coming {
        match &*self.clients.lock() {
            Clients::Connect => connect(),
            Clients::Wait(changed) => return Coming::Waits(changed.subscribe()),
            Clients::Leave => return Coming::Refused,
        }
        Coming::Connected
    }
}

/// All attached volumes.
#[derive(Clone, Debug)]
pub(super) struct Attachments(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Changes are written one after the other.
    log: Mutex<Log>,
    present: RwLock<BTreeMap<Place, Arc<Attachment>>>,
    /// Changed since the last look of the health checks.
    changed: Mutex<Changed>,
}

/// Places of attachments that have changed.
#[derive(Debug, Default)]
struct Changed {
    places: BTreeSet<Place>,
    /// More than are kept.
    too_many: bool,
}

/// Changed places that are kept: with more, a health check compares all attachments instead, which
/// takes some ten milliseconds with ten thousand.
const MAX_CHANGED: usize = 4096;

impl Attachments {
    /// Reads the attachments that the state directory remembers.
    pub(super) fn read(state_dir: &Path) -> Result<Self, Error> {
        let log = Log::new(state_dir);
        let mut present = BTreeMap::new();
        for change in log.read()? {
            change.apply(&mut present);
        }
        let (log, present) = (Mutex::new(log), RwLock::new(present));
        Ok(Self(Arc::new(Shared { log, present, changed: Mutex::default() })))
    }

    pub(super) fn get(&self, pool: &str, volume: &str) -> Option<Arc<Attachment>> {
        self.0.present.read().get(&(pool.to_owned(), volume.to_owned())).map(Arc::clone)
    }

    /// Has some of the next changes fail.
    #[cfg(test)]
    pub(super) fn fail<const N: usize>(&self, changes: [bool; N]) {
        self.0.log.lock().failing = changes.into();
    }

    /// Holds back changes until the guard is gone; the first one fails then.
    #[cfg(test)]
    pub(super) fn hold_and_fail(&self) -> parking_lot::MutexGuard<'_, impl Sized> {
        let mut log = self.0.log.lock();
        log.failing = [true].into();
        log
    }

    /// Numbers of all block devices that are remembered.
    pub(super) fn devices(&self) -> Vec<u32> {
        self.list().iter().filter_map(|one| one.record.ublk?.device).collect()
    }

    /// All of them, by pool and volume.
    pub(super) fn list(&self) -> Vec<Arc<Attachment>> {
        self.0.present.read().values().map(Arc::clone).collect()
    }

    /// The attachments of one pool, by volume.
    pub(super) fn of_pool(&self, pool: &str) -> Vec<Arc<Attachment>> {
        let present = self.0.present.read();
        let from = present.range((pool.to_owned(), String::new())..);
        let mine = from.take_while(|(place, _)| place.0 == pool);
        mine.map(|(_, attachment)| Arc::clone(attachment)).collect()
    }

    /// How many of them are block devices.
    pub(super) fn device_count(&self) -> usize {
        self.0.present.read().values().filter(|one| one.record.ublk.is_some()).count()
    }

    /// The places that have changed since the last call; `None` if these are too many.
    pub(super) fn take_changed(&self) -> Option<BTreeSet<Place>> {
        let Changed { places, too_many } = std::mem::take(&mut *self.0.changed.lock());
        (!too_many).then_some(places)
    }

    /// Remembers one, or what has changed of it, then lets clients come.
    pub(super) async fn add(&self, record: Record) -> Result<(), Error> {
        let this = Arc::clone(&self.0);
        super::blocking(move || this.change(&mut this.log.lock(), vec![Change::Attached(record)]))
            .await
    }

    /// Forgets some, then lets no more clients come. Says how many there were.
    pub(super) async fn remove(&self, places: Vec<Place>) -> Result<usize, Error> {
        let this = Arc::clone(&self.0);
        super::blocking(move || {
            let mut log = this.log.lock();
            let is_there = |place: &Place| this.present.read().contains_key(place);
            let gone: Vec<_> = places.into_iter().filter(is_there).collect();
            let count = gone.len();
            let changes = gone.into_iter().map(|(pool, volume)| Change::Detached(pool, volume));
            this.change(&mut log, changes.collect())?;
            Ok(count)
        })
        .await
    }

    /// Has the attachment of a volume follow it to another name; new clients connect by that. False
    /// where the volume has none by its former name.
    pub(super) async fn rename(
        &self,
        (pool, former): Place,
        id: VolumeId,
        name: String,
    ) -> Result<bool, Error> {
        let this = Arc::clone(&self.0);
        super::blocking(move || {
            let mut log = this.log.lock();
            let place = (pool, former);
            let is_there = |one: &Arc<Attachment>| one.record.id == id.0;
            if !this.present.read().get(&place).is_some_and(is_there) {
                return Ok(false);
            }
            let (pool, former) = place;
            this.change(&mut log, vec![Change::Renamed(pool, former, name)])?;
            Ok(true)
        })
        .await
    }

    /// Has the attachments of the pool with this identity follow it to another name, all of them or
    /// none. Returns how many there were.
    pub(super) async fn rename_pool(
        &self,
        former: String,
        id: String,
        name: String,
    ) -> Result<usize, Error> {
        let this = Arc::clone(&self.0);
        let attached = self.clone();
        super::blocking(move || {
            let mut log = this.log.lock();
            let (mut changes, mut gone) = (Vec::new(), Vec::new());
            for one in attached.of_pool(&former) {
                let record = one.record.clone();
                if !record.pool_id.is_empty() && record.pool_id != id {
                    continue;
                }
                gone.push(Change::Detached(former.clone(), record.volume.clone()));
                // A volume of the pool that has one by the new name was attached since. That of
                // another pool is of one that had the name before.
                let since = attached.get(&name, &record.volume);
                if since.is_none_or(|other| other.record.pool_id != id) {
                    let (pool, pool_id) = (name.clone(), id.clone());
                    changes.push(Change::Attached(Record { pool, pool_id, ..record }));
                }
            }
            let count = gone.len();
            changes.extend(gone);
            // As lines, a crash could leave some of them.
            log.replace_next();
            this.change(&mut log, changes)?;
            Ok(count)
        })
        .await
    }

    /// Lets clients connect again to the volumes of a pool that was closed.
    pub(super) fn renew(&self, pool: &str) {
        for (place, attachment) in self.0.present.write().iter_mut() {
            if place.0 == pool && attachment.has_ended() {
                *attachment = Attachment::new(attachment.record.clone());
            }
        }
    }
}

impl Shared {
    /// Blocks until the changes are durable.
    fn change(&self, log: &mut Log, changes: Vec<Change>) -> Result<(), Error> {
        if changes.is_empty() {
            return Ok(());
        }
        let count = self.present.read().len();
        log.write(&changes, count, || {
            let mut next = self.present.read().clone();
            changes.iter().for_each(|change| drop(change.clone().apply(&mut next)));
            next.into_values().map(|one| one.record.clone()).collect()
        })?;
        let places: Vec<Place> = changes.iter().flat_map(Change::places).collect();
        let mut present = self.present.write();
        for change in changes {
            let is_attached = matches!(change, Change::Attached(_));
            // Connections of a volume whose record has changed stay.
            if let Some(former) = change.apply(&mut present)
                && !is_attached
            {
                former.end();
            }
        }
        drop(present);
        let mut changed = self.changed.lock();
        changed.places.extend(places);
        if changed.places.len() > MAX_CHANGED {
            *changed = Changed { places: BTreeSet::new(), too_many: true };
        }
        Ok(())
    }
}

impl Change {
    fn places(&self) -> Vec<Place> {
        match self {
            Self::Attached(record) => vec![(record.pool.clone(), record.volume.clone())],
            Self::Detached(pool, volume) => vec![(pool.clone(), volume.clone())],
            Self::Renamed(pool, former, name) => {
                [former, name].map(|volume| (pool.clone(), volume.clone())).into()
            }
        }
    }

    /// Returns the attachment that was there.
    fn apply(self, present: &mut BTreeMap<Place, Arc<Attachment>>) -> Option<Arc<Attachment>> {
        match self {
            Self::Attached(record) => {
                let place = (record.pool.clone(), record.volume.clone());
                let former = present.get(&place);
                let attachment = match former {
                    Some(former) if former.record.id == record.id => former.with_record(record),
                    former => {
                        // It was of another volume.
                        former.into_iter().for_each(|former| former.end());
                        Attachment::new(record)
                    }
                };
                present.insert(place, attachment)
            }
            Self::Detached(pool, volume) => present.remove(&(pool, volume)),
            Self::Renamed(pool, former, name) => {
                let attachment = present.remove(&(pool.clone(), former))?;
                let record = Record { volume: name.clone(), ..attachment.record.clone() };
                let waits = attachment.waits();
                let replaced = present.insert((pool, name), Attachment::of(record, waits));
                replaced.into_iter().for_each(|replaced| replaced.end());
                Some(attachment)
            }
        }
    }
}

/// The records in the state directory.
pub(super) fn remembered(state_dir: &Path) -> Result<Vec<Record>, Error> {
    let list = Attachments::read(state_dir)?.list();
    Ok(list.iter().map(|one| one.record.clone()).collect())
}

/// Numbers of the block devices that the last daemon had, for callers that need them before
/// anything else is read. Empty where the list cannot be read, which is reported later.
#[must_use]
pub fn remembered_devices(state_dir: &Path) -> Vec<u32> {
    let list = Attachments::read(state_dir);
    list.map(|attachments| attachments.devices()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::io::Write;

    use blockd_media::error::ErrorKind;

    use super::*;
    use crate::services::testing::folder;

    /// As the version before ublk wrote it.
    const OLD: &str = r#"{"version":1,"entries":[
        {"pool":"p","volume":"a","id":3,"read_only":true}]}"#;

    fn record(volume: &str) -> Record {
        let (pool, volume) = ("p".to_owned(), volume.to_owned());
        Record { pool, volume, id: 4, ..Record::default() }
    }

    fn place(volume: &str) -> Place {
        ("p".to_owned(), volume.to_owned())
    }

    fn names(state_dir: &Path) -> Vec<String> {
        remembered(state_dir).unwrap().into_iter().map(|one| one.volume).collect()
    }

    #[tokio::test]
    async fn files_of_older_versions_are_read_and_devices_remembered() {
        let folder = folder();
        std::fs::write(folder.path().join("attachments.json"), OLD).unwrap();
        let list = Attachments::read(folder.path()).unwrap();
        let old = list.get("p", "a").unwrap().record.clone();
        assert_eq!((old.id, old.read_only, old.ublk), (3, true, None));
        assert!(old.pool_id.is_empty());
        let ublk = Some(UblkRecord { device: Some(7), queues: 2, ..UblkRecord::default() });
        let record = Record { volume: "b".to_owned(), id: 4, ublk, ..old };
        list.add(record.clone()).await.unwrap();
        let read = Attachments::read(folder.path()).unwrap();
        assert_eq!(read.get("p", "b").unwrap().record, record);
        assert_eq!(names(folder.path()), ["a", "b"]);
        assert_eq!(remembered_devices(folder.path()), [7]);
        assert!(remembered_devices(Path::new("/nowhere")).is_empty());
    }

    #[tokio::test]
    async fn a_change_costs_the_same_however_many_are_attached() {
        let folder = folder();
        let path = folder.path().join("attachments.json");
        let list = Attachments::read(folder.path()).unwrap();
        let mut sizes = Vec::new();
        for number in 0..600 {
            list.add(record(&format!("v{number:03}"))).await.unwrap();
            sizes.push(std::fs::metadata(&path).unwrap().len());
        }
        let added: Vec<u64> = sizes.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(added.iter().all(|bytes| *bytes == added[0]), "{added:?}");
        // It does not grow without limit.
        let before = sizes.last().unwrap();
        for _ in 0..2500 {
            list.remove(vec![place("v007")]).await.unwrap();
            list.add(record("v007")).await.unwrap();
        }
        let after = std::fs::metadata(&path).unwrap().len();
        assert!(after < before * 5, "{before} bytes became {after}");
        assert_eq!(names(folder.path()).len(), 600);
        assert_eq!(list.remove(vec![place("v007"), place("none")]).await.unwrap(), 1);
        assert_eq!(names(folder.path()).len(), 599);
    }

    #[tokio::test]
    async fn a_change_that_a_crash_cut_off_is_left_out() {
        let folder = folder();
        let path = folder.path().join("attachments.json");
        let list = Attachments::read(folder.path()).unwrap();
        list.add(record("a")).await.unwrap();
        let whole = std::fs::read(&path).unwrap();
        list.add(record("b")).await.unwrap();
        let both = std::fs::read(&path).unwrap();
        for length in whole.len()..both.len() {
            std::fs::write(&path, &both[..length]).unwrap();
            assert_eq!(names(folder.path()), ["a"], "{length} bytes");
        }
        // What is added after such a line does not become a part of it.
        let list = Attachments::read(folder.path()).unwrap();
        list.add(record("c")).await.unwrap();
        assert_eq!(names(folder.path()), ["a", "c"]);
    }

    #[tokio::test]
    async fn a_renamed_attachment_is_remembered_by_its_new_name_alone() {
        let folder = folder();
        let list = Attachments::read(folder.path()).unwrap();
        list.add(record("a")).await.unwrap();
        list.add(record("b")).await.unwrap();
        let former = list.get("p", "a").unwrap();
        let other = list.rename(place("a"), VolumeId(5), "c".to_owned()).await.unwrap();
        assert!(!other, "another volume has the name");
        assert!(list.rename(place("a"), VolumeId(4), "c".to_owned()).await.unwrap());
        assert!(!list.rename(place("a"), VolumeId(4), "c".to_owned()).await.unwrap());
        assert_eq!(names(folder.path()), ["b", "c"]);
        let renamed = list.get("p", "c").unwrap();
        assert_eq!(renamed.record, record("c"));
        // A client that had looked it up by the former name does not get in by that any more.
        former.if_attached(|| panic!("connected by the former name"));
        let mut is_connected = false;
        renamed.if_attached(|| is_connected = true);
        assert!(is_connected);
        assert_eq!(list.take_changed().unwrap().len(), 3);
    }

    #[tokio::test]
    async fn damage_before_the_end_is_an_error() {
        let folder = folder();
        let path = folder.path().join("attachments.json");
        let list = Attachments::read(folder.path()).unwrap();
        list.add(record("a")).await.unwrap();
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{}\n").unwrap();
        let error = Attachments::read(folder.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("attachments.json: line 3"), "{error}");
    }

    #[tokio::test]
    async fn a_change_that_fails_is_neither_there_nor_remembered() {
        let folder = folder();
        let list = Attachments::read(&folder.path().join("gone")).unwrap();
        assert_eq!(list.add(record("a")).await.unwrap_err().kind(), ErrorKind::NotFound);
        assert!(list.get("p", "a").is_none());
        assert_eq!(list.remove(vec![place("a")]).await.unwrap(), 0);
    }
}
