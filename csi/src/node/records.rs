//! Records of this node's volumes, with the state that neither the mount table nor the daemon has:
//! one small file for each volume, written before the step that it describes. So every started step
//! is found again.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::modes::{Access, Target, named};
use super::world::Unfinished;
use crate::capability::Mode;

/// Version of the file format. A file of a later version is refused, so that its state is not lost.
const VERSION: u32 = 1;

/// Beyond it a file is none of ours: the longest of paths, a hundred times.
const LONGEST_BYTES: u64 = 1 << 20;

/// How a volume is staged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    pub path: PathBuf,
    #[serde(with = "named")]
    pub mode: Mode,
    pub access: Access,
    /// The file system; empty for a device, and while none was requested.
    pub file_system: String,
    /// A hash of the mount options: they may hold secrets, and are only compared.
    pub options: u64,
    /// Its folder was made here, and so goes with it.
    pub made_folder: bool,
    /// Whether it was mounted read-only. Unknown for volumes that an older version staged.
    #[serde(default)]
    pub read_only: Option<bool>,
}

/// Where the volume is, as the daemon calls it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    pub pool: String,
    pub name: String,
}

/// The state of an encrypted volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Encryption {
    /// Whether a header is being written to a device that was empty: its content is no data.
    pub formatting: bool,
    /// Whether the key of the last call opened no slot.
    pub key_refused: bool,
}

/// The record of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub version: u32,
    /// The CSI id of the volume.
    pub volume: String,
    pub place: Place,
    /// Whether this is an inline volume, which lives as long as it is published.
    pub ephemeral: bool,
    /// An ephemeral volume was published at least once: it may hold data.
    #[serde(default)]
    pub complete: bool,
    /// Whether mkfs is in progress on a device that was empty: its content is not user data.
    pub formatting: bool,
    /// Whether it holds an image for virtual machines, which has the published file system.
    #[serde(default)]
    pub kata: bool,
    /// Whether mkfs of the file system around the image is in progress on a device that was empty.
    #[serde(default)]
    pub kata_formatting: bool,
    /// `None`: it is not encrypted.
    #[serde(default)]
    pub encryption: Option<Encryption>,
    #[serde(default)]
    pub stage: Option<Stage>,
    #[serde(default)]
    pub targets: Vec<Target>,
}

impl Record {
    /// Creates the record of a new volume.
    #[must_use]
    pub fn new(volume: &str, place: &Place) -> Self {
        Self {
            version: VERSION,
            volume: volume.to_owned(),
            place: place.clone(),
            ephemeral: false,
            complete: false,
            formatting: false,
            kata: false,
            kata_formatting: false,
            encryption: None,
            stage: None,
            targets: Vec::new(),
        }
    }

    /// Whether the record holds no state, so that it can be removed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.stage.is_none()
            && self.targets.is_empty()
            && !self.is_unfinished()
            && !self.kata_formatting
    }

    /// Whether its content is the rest of an interrupted call, and no data.
    #[must_use]
    pub fn is_unfinished(&self) -> bool {
        self.formatting || self.encryption.is_some_and(|encryption| encryption.formatting)
    }

    /// Replaces its marks with that of a volume that moves between nodes: other nodes may have
    /// formatted and used the volume since this record was written, or left a mark without one.
    pub fn follow(&mut self, mark: Option<Unfinished>) {
        let Some(mark) = mark else { return };
        self.formatting = mark == Unfinished::FileSystem;
        let formatting = mark == Unfinished::Header;
        if formatting || self.encryption.is_some() {
            let encryption = self.encryption.unwrap_or_default();
            self.encryption = Some(Encryption { formatting, ..encryption });
        }
    }
}

/// The folder with the files. They are read once and kept: a conflict is answered without IO.
#[derive(Debug)]
pub struct Records {
    folder: PathBuf,
    known: Mutex<HashMap<String, Record>>,
}

impl Records {
    /// Opens the folder, which is made if it is not there.
    ///
    /// # Errors
    /// When it can't be made or read, or a file in it is none of ours: steps of a mounted volume
    /// without a record might be done twice.
    pub fn open(folder: &Path) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let mut known = HashMap::new();
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            match path.extension().and_then(|name| name.to_str()) {
                Some("json") => {
                    let record = read(&path).map_err(|error| of(&path, &error))?;
                    known.insert(record.volume.clone(), record);
                }
                // Left by a death in the middle of writing it; the act was not begun.
                Some("new") => fs::remove_file(&path)?,
                _ => {}
            }
        }
        Ok(Self { folder: folder.to_path_buf(), known: Mutex::new(known) })
    }

    /// The record of a volume.
    #[must_use]
    pub fn get(&self, volume: &str) -> Option<Record> {
        self.known().get(volume).cloned()
    }

    /// All that is known.
    #[must_use]
    pub fn all(&self) -> Vec<Record> {
        self.known().values().cloned().collect()
    }

    /// Writes it down; it is durable when this returns.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn put(&self, record: &Record) -> io::Result<()> {
        let path = self.path(&record.volume);
        let new = path.with_extension("new");
        self.replace(record, &path, &new).map_err(|error| of(&path, &error))?;
        self.known().insert(record.volume.clone(), record.clone());
        Ok(())
    }

    /// Forgets it, durably.
    ///
    /// # Errors
    /// When its file can't be removed.
    pub fn remove(&self, volume: &str) -> io::Result<()> {
        let path = self.path(volume);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(of(&path, &error)),
            _ => {}
        }
        File::open(&self.folder)?.sync_all()?;
        self.known().remove(volume);
        Ok(())
    }

    fn replace(&self, record: &Record, path: &Path, new: &Path) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(new)?;
        file.write_all(&serde_json::to_vec_pretty(record)?)?;
        file.sync_all()?;
        fs::rename(new, path)?;
        File::open(&self.folder)?.sync_all()
    }

    /// Volume ids may hold anything, and be longer than a file's name: the file has a hash of it.
    fn path(&self, volume: &str) -> PathBuf {
        let hash = xxhash_rust::xxh3::xxh3_128(volume.as_bytes());
        self.folder.join(format!("{hash:032x}.json"))
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, Record>> {
        // A thread that panicked with the lock left a complete map.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read(path: &Path) -> io::Result<Record> {
    let bad = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
    let length = fs::metadata(path)?.len();
    if length > LONGEST_BYTES {
        return Err(bad(format!("{length} bytes, at most {LONGEST_BYTES} are ours")));
    }
    let record: Record = serde_json::from_slice(&fs::read(path)?)?;
    if record.version != VERSION {
        return Err(bad(format!("version {}, this program knows {VERSION}", record.version)));
    }
    Ok(record)
}

fn of(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("csi-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    fn record(volume: &str) -> Record {
        let place = Place { pool: "default".to_owned(), name: "csi.a".to_owned() };
        let mut record = Record::new(volume, &place);
        record.targets.push(Target {
            path: "/t".into(),
            mode: Mode::SingleWriter,
            read_only: true,
            access: Access::Block,
        });
        record.stage = Some(Stage {
            path: "/s".into(),
            mode: Mode::SingleWriter,
            access: Access::Block,
            file_system: String::new(),
            options: u64::MAX,
            made_folder: true,
            read_only: Some(true),
        });
        record
    }

    #[test]
    fn records_survive_a_restart() {
        let folder = folder("records");
        let records = Records::open(&folder).unwrap();
        let (one, two) = (record("default/csi.a"), record(&"x/".repeat(300)));
        records.put(&one).unwrap();
        records.put(&two).unwrap();
        records.put(&Record { formatting: true, ..one.clone() }).unwrap();
        drop(records);
        let records = Records::open(&folder).unwrap();
        assert_eq!(records.get(&one.volume), Some(Record { formatting: true, ..one.clone() }));
        assert_eq!(records.get(&two.volume), Some(two.clone()));
        records.remove(&one.volume).unwrap();
        records.remove(&one.volume).unwrap();
        assert_eq!(records.all(), std::slice::from_ref(&two));
        assert_eq!(Records::open(&folder).unwrap().all(), [two]);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_file_that_was_not_finished_is_removed() {
        let folder = folder("unfinished");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("0.new"), "{\"versi").unwrap();
        assert!(Records::open(&folder).unwrap().all().is_empty());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_file_that_is_not_understood_is_named() {
        let folder = folder("strange");
        let records = Records::open(&folder).unwrap();
        records.put(&Record { version: VERSION + 1, ..record("a") }).unwrap();
        let said = Records::open(&folder).unwrap_err().to_string();
        assert!(said.contains(".json: version 2"), "{said}");
        fs::write(folder.join("0.json"), "{").unwrap();
        assert!(Records::open(&folder).is_err());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn only_its_owner_reads_it() {
        use std::os::unix::fs::PermissionsExt;
        let folder = folder("private");
        let records = Records::open(&folder).unwrap();
        records.put(&record("a")).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&folder), 0o700);
        assert_eq!(mode(&records.path("a")), 0o600);
        fs::remove_dir_all(folder).unwrap();
    }
}
