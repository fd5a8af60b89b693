//! Which volumes clients can reach, remembered from one start to the next.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};

use crate::error::Error;

use super::state_file::StateFile;

/// A pool's and a volume's name.
pub(super) type Place = (String, String);

/// What is remembered of an attached volume.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) pool: String,
    pub(super) volume: String,
    /// The volume's identity: another one of the same name was not attached.
    pub(super) id: u32,
    pub(super) read_only: bool,
}

/// A volume that clients can reach.
#[derive(Debug)]
pub(super) struct Attachment {
    pub(super) record: Record,
    /// Connections are handed to workers under this lock, and no more once it says so: who
    /// detaches knows that a connection was handed over before, or never will be.
    detached: Mutex<bool>,
}

impl Attachment {
    fn new(record: Record) -> Arc<Self> {
        Arc::new(Self { record, detached: Mutex::new(false) })
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
    /// Those that are remembered.
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

    /// All of them, by pool and volume.
    pub(super) fn list(&self) -> Vec<Arc<Attachment>> {
        self.present.read().values().map(Arc::clone).collect()
    }

    /// Remembers one, then lets clients come.
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
            *attachment.detached.lock() = true;
        }
        Ok(gone.len())
    }

    async fn write(&self, next: &BTreeMap<Place, Arc<Attachment>>) -> Result<(), Error> {
        let records: Vec<Record> = next.values().map(|one| one.record.clone()).collect();
        let file = self.file.clone();
        super::blocking(move || file.write(records)).await
    }
}
