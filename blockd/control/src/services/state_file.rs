//! Small files that are remembered from one start to the next: replaced as a whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use blockd_media::error::Error;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The only version there is. A daemon refuses a file of another.
const VERSION: u32 = 1;

/// Largest file that is read: far above what the most volumes need, far below what would hurt.
const MAX_BYTES: u64 = 64 << 20;

#[derive(Serialize, Deserialize)]
struct Content<T> {
    version: u32,
    entries: Vec<T>,
}

/// A list in a JSON file.
#[derive(Clone, Debug)]
pub(super) struct StateFile {
    path: PathBuf,
    /// The advice for a damaged file.
    advice: &'static str,
}

impl StateFile {
    pub(super) fn new(folder: &Path, name: &str) -> Self {
        let advice = "mend it, or remove it to begin without what it lists";
        Self { path: folder.join(name), advice }
    }

    /// With another advice for when it is damaged.
    pub(super) fn with_advice(self, advice: &'static str) -> Self {
        Self { advice, ..self }
    }

    /// Reads the entries; none if there is no file. A file that cannot be parsed is an error, as
    /// its entries would be lost otherwise.
    pub(super) fn read<T: DeserializeOwned>(&self) -> Result<Vec<T>, Error> {
        let path = &self.path;
        let length = match fs::metadata(path) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(Error::file("read", path, error)),
        };
        if length > MAX_BYTES {
            return Err(self.corrupt(&format!("{length} bytes, {MAX_BYTES} at most")));
        }
        let text = fs::read(path).map_err(|error| Error::file("read", path, error))?;
        let content: Content<T> =
            serde_json::from_slice(&text).map_err(|error| self.corrupt(&error.to_string()))?;
        if content.version != VERSION {
            let problem = format!("version {}, {VERSION} expected", content.version);
            return Err(self.corrupt(&problem));
        }
        Ok(content.entries)
    }

    fn corrupt(&self, problem: &str) -> Error {
        let problem = format!("{problem}; {}", self.advice);
        Error::Corrupt { what: self.path.display().to_string(), problem }
    }

    /// Replaces the file, durably: a reader sees the former list or this one.
    pub(super) fn write<T: Serialize>(&self, entries: Vec<T>) -> Result<(), Error> {
        let path = &self.path;
        let next = path.with_extension("json.next");
        let failed = |error| Error::file("write", path, error);
        let text = serde_json::to_vec_pretty(&Content { version: VERSION, entries })
            .map_err(|error| failed(error.into()))?;
        let written = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&next)
            .and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_all()))
            .and_then(|()| fs::rename(&next, path));
        if let Err(error) = written {
            let _ = fs::remove_file(&next);
            return Err(failed(error));
        }
        let folder = path.parent().unwrap_or_else(|| Path::new("/"));
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use blockd_media::error::ErrorKind as Kind;

    use super::*;
    use crate::services::testing::folder;

    #[test]
    fn written_entries_are_read_again() {
        let folder = folder();
        let file = StateFile::new(folder.path(), "list.json");
        assert!(file.read::<u32>().unwrap().is_empty());
        file.write(vec![1, 2]).unwrap();
        file.write(vec![3]).unwrap();
        assert_eq!(file.read::<u32>().unwrap(), [3]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_damaged_file_is_named() {
        let folder = folder();
        let file = StateFile::new(folder.path(), "list.json");
        for text in ["", "{", "[]", r#"{"version":2,"entries":[]}"#, "\u{0}"] {
            fs::write(folder.path().join("list.json"), text).unwrap();
            let error = file.read::<u32>().unwrap_err();
            assert_eq!(error.kind(), Kind::Corrupt, "{text:?}");
            assert!(error.to_string().contains("list.json"), "{error}");
        }
    }

    #[test]
    fn a_folder_that_is_gone_changes_nothing() {
        let folder = folder();
        let file = StateFile::new(&folder.path().join("gone"), "list.json");
        assert_eq!(file.write(vec![1]).unwrap_err().kind(), Kind::NotFound);
        assert!(file.read::<u32>().unwrap().is_empty());
    }
}
