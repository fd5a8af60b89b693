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
        let advice = "correct it, or remove it to begin without its entries";
        Self { path: folder.join(name), advice }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// With another advice for when it is damaged.
    pub(super) fn with_advice(self, advice: &'static str) -> Self {
        Self { advice, ..self }
    }

    /// Reads the entries; none if there is no file. A file that cannot be parsed is an error, as
    /// its entries would be lost otherwise.
    pub(super) fn read<T: DeserializeOwned>(&self) -> Result<Vec<T>, Error> {
        self.read_bytes()?.map_or_else(|| Ok(Vec::new()), |text| self.parse(&text))
    }

    /// Reads the file, if there is one.
    pub(super) fn read_bytes(&self) -> Result<Option<Vec<u8>>, Error> {
        let path = &self.path;
        let length = match fs::metadata(path) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::file("read", path, error)),
        };
        if length > MAX_BYTES {
            return Err(self.corrupt(&format!("{length} bytes, {MAX_BYTES} at most")));
        }
        fs::read(path).map(Some).map_err(|error| Error::file("read", path, error))
    }

    /// The entries in this content of the file.
    pub(super) fn parse<T: DeserializeOwned>(&self, text: &[u8]) -> Result<Vec<T>, Error> {
        let content: Content<T> =
            serde_json::from_slice(text).map_err(|error| self.corrupt(&error.to_string()))?;
        if content.version != VERSION {
            let problem = format!("version {}, {VERSION} expected", content.version);
            return Err(self.corrupt(&problem));
        }
        Ok(content.entries)
    }

    /// An error of this file, with what helps.
    pub(super) fn corrupt(&self, problem: &str) -> Error {
        let problem = format!("{problem}; {}", self.advice);
        Error::Corrupt { what: self.path.display().to_string(), problem }
    }

    /// Removes the entries that are not to be kept, durably. Writes nothing where all are.
    pub(super) fn retain<T: Serialize + DeserializeOwned>(
        &self,
        keep: impl FnMut(&T) -> bool,
    ) -> Result<(), Error> {
        let mut all: Vec<T> = self.read()?;
        let before = all.len();
        all.retain(keep);
        if all.len() == before { Ok(()) } else { self.write(all) }
    }

    /// Replaces the file, durably: a reader sees the former list or this one.
    pub(super) fn write<T: Serialize>(&self, entries: Vec<T>) -> Result<(), Error> {
        let failed = |error| Error::file("write", &self.path, error);
        let text = serde_json::to_vec_pretty(&Content { version: VERSION, entries })
            .map_err(|error| failed(error.into()))?;
        replace(&self.path, &text).map(drop).map_err(failed)
    }
}

/// Replaces a file durably by one with this content, which is returned open at its end.
pub(super) fn replace(path: &Path, text: &[u8]) -> std::io::Result<File> {
    let next = path.with_extension("json.next");
    let written = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&next)
        .and_then(|mut file| {
            file.write_all(text)?;
            file.sync_all()?;
            Ok(file)
        })
        .and_then(|file| fs::rename(&next, path).map(|()| file));
    if written.is_err() {
        let _ = fs::remove_file(&next);
    }
    let file = written?;
    let folder = path.parent().unwrap_or_else(|| Path::new("/"));
    File::open(folder)?.sync_all()?;
    Ok(file)
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
