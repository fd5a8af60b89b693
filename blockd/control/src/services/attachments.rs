//! Which volumes clients can reach, remembered from one start to the next.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use blockd_engine::pool::{PoolHandle, VolumeId};
use blockd_media::error::Error;
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};

use super::hex;
use super::state_file::StateFile;

/// A pool's and a volume's name.
pub(super) type Place = (String, String);

/// The stored record of an attached volume.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
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
}

impl Record {
    /// Whether it is about this volume of this pool.
    pub(super) fn is_of(&self, pool: &PoolHandle, volume: VolumeId) -> bool {
        let is_of_pool = self.pool_id.is_empty() || self.pool_id == hex(&pool.id());
        is_of_pool && self.id == volume.0
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
}

/// A volume that clients can reach.
#[derive(Debug)]
pub(super) struct Attachment {
    pub(super) record: Record,
    /// Connections are handed to workers under this lock, and no more once this is set: so a detach
    /// knows that a connection was handed over before, or never will be.
    detached: Mutex<bool>,
}

impl Attachment {
    fn new(record: Record) -> Arc<Self> {
        Arc::new(Self { record, detached: Mutex::new(false) })
    }

    /// Lets no more clients connect. The record stays.
    pub(super) fn end(&self) {
        *self.detached.lock() = true;
    }

    /// Runs `connect` unless the volume has been detached meanwhile.
    pub(super) fn if_attached(&self, connect: impl FnOnce()) {
        let detached = self.detached.lock();
        if !*detached {
            connect();
        }
    }
}

/// All attached volumes.
#[derive(Debug)]
pub(super) struct Attachments {
    file: StateFile,
    present: RwLock<BTreeMap<Place, Arc<Attachment>>>,
    /// Changes are written one after the other.
    writing: tokio::sync::Mutex<()>,
}

impl Attachments {
    /// Reads the attachments that the state directory remembers.
    pub(super) fn read(state_dir: &Path) -> Result<Self, Error> {
        let file = StateFile::new(state_dir, "attachments.json");
        let records: Vec<Record> = file.read()?;
        let place = |record: &Record| (record.pool.clone(), record.volume.clone());
        let present =
            records.into_iter().map(|record| (place(&record), Attachment::new(record))).collect();
        Ok(Self { file, present: RwLock::new(present), writing: tokio::sync::Mutex::default() })
    }

    pub(super) fn get(&self, pool: &str, volume: &str) -> Option<Arc<Attachment>> {
        self.present.read().get(&(pool.to_owned(), volume.to_owned())).map(Arc::clone)
    }

    /// Numbers of all block devices that are remembered.
    pub(super) fn devices(&self) -> Vec<u32> {
        self.list().iter().filter_map(|one| one.record.ublk?.device).collect()
    }

    /// All of them, by pool and volume.
    pub(super) fn list(&self) -> Vec<Arc<Attachment>> {
        self.present.read().values().map(Arc::clone).collect()
    }

    /// Remembers one, or what has changed of it, then lets clients come.
    pub(super) async fn add(&self, record: Record) -> Result<(), Error> {
        let _order = self.writing.lock().await;
        let place = (record.pool.clone(), record.volume.clone());
        let mut next = self.present.read().clone();
        next.insert(place, Attachment::new(record));
        self.write(&next).await?;
        *self.present.write() = next;
        Ok(())
    }

    /// Forgets some, then lets no more clients come. Says how many there were.
    pub(super) async fn remove(&self, places: &[Place]) -> Result<usize, Error> {
        let _order = self.writing.lock().await;
        let mut next = self.present.read().clone();
        let gone: Vec<_> = places.iter().filter_map(|place| next.remove(place)).collect();
        if gone.is_empty() {
            return Ok(0);
        }
        self.write(&next).await?;
        *self.present.write() = next;
        for attachment in &gone {
            attachment.end();
        }
        Ok(gone.len())
    }

    /// Lets clients connect again to the volumes of a pool that was closed.
    pub(super) async fn renew(&self, pool: &str) {
        let _order = self.writing.lock().await;
        for (place, attachment) in self.present.write().iter_mut() {
            if place.0 == pool {
                *attachment = Attachment::new(attachment.record.clone());
            }
        }
    }

    async fn write(&self, next: &BTreeMap<Place, Arc<Attachment>>) -> Result<(), Error> {
        let records: Vec<Record> = next.values().map(|one| one.record.clone()).collect();
        let file = self.file.clone();
        super::blocking(move || file.write(records)).await
    }
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
    use super::*;
    use crate::services::testing::folder;

    /// As the version before ublk wrote it.
    const OLD: &str = r#"{"version":1,"entries":[
        {"pool":"p","volume":"a","id":3,"read_only":true}]}"#;

    #[tokio::test]
    async fn files_of_older_versions_are_read_and_devices_remembered() {
        let folder = folder();
        std::fs::write(folder.path().join("attachments.json"), OLD).unwrap();
        let list = Attachments::read(folder.path()).unwrap();
        let old = list.get("p", "a").unwrap().record.clone();
        assert_eq!((old.id, old.read_only, old.ublk), (3, true, None));
        assert!(old.pool_id.is_empty());
        let ublk = Some(UblkRecord { device: Some(7), queues: 2, depth: 0 });
        let record = Record { volume: "b".to_owned(), id: 4, ublk, ..old };
        list.add(record.clone()).await.unwrap();
        let read = Attachments::read(folder.path()).unwrap();
        assert_eq!(read.get("p", "b").unwrap().record, record);
        assert_eq!(remembered_devices(folder.path()), [7]);
        assert!(remembered_devices(Path::new("/nowhere")).is_empty());
    }
}
