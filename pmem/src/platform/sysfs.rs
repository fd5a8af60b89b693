//! Reading sysfs: a value, or an error that names the file.

use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::error::PlatformError;

/// A value of sysfs is at most a page; lists of bad blocks are cut to one by the kernel as well.
const MAX_BYTES: u64 = 64 << 10;

/// Most characters of a malformed value that an error shows.
const MAX_SHOWN: usize = 80;

/// A folder of sysfs.
#[derive(Clone, Debug)]
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new(path: PathBuf) -> Self {
        Self(path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn at(&self, name: &str) -> Self {
        Self(self.0.join(name))
    }

    fn failed(path: PathBuf) -> impl FnOnce(std::io::Error) -> PlatformError {
        |source| PlatformError::Read { path, source }
    }

    /// Names of its entries, in order.
    pub(super) fn list(&self) -> Result<Vec<String>, PlatformError> {
        let failed = || Self::failed(self.0.clone());
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.0).map_err(failed())? {
            let entry = entry.map_err(failed())?;
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }

    /// The same; nothing if there is no such folder.
    pub(super) fn list_if_there(&self) -> Result<Option<Vec<String>>, PlatformError> {
        match self.list() {
            Ok(names) => Ok(Some(names)),
            Err(PlatformError::Read { source, .. }) if source.kind() == ErrorKind::NotFound => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// A file's text, without the line's end.
    pub(super) fn text(&self, name: &str) -> Result<String, PlatformError> {
        let path = self.0.join(name);
        let mut text = String::new();
        let file = fs::File::open(&path).map_err(Self::failed(path.clone()))?;
        file.take(MAX_BYTES).read_to_string(&mut text).map_err(Self::failed(path))?;
        text.truncate(text.trim_end().len());
        Ok(text)
    }

    /// The same; nothing where there is no such file.
    pub(super) fn text_if_there(&self, name: &str) -> Result<Option<String>, PlatformError> {
        match self.text(name) {
            Ok(text) => Ok(Some(text)),
            Err(PlatformError::Read { source, .. }) if source.kind() == ErrorKind::NotFound => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The same; nothing where the kernel says that it does not apply now.
    pub(super) fn text_if_set(&self, name: &str) -> Result<Option<String>, PlatformError> {
        match self.text_if_there(name) {
            Err(error) if error.os_error() == Some(rustix::io::Errno::NXIO.raw_os_error()) => {
                Ok(None)
            }
            other => other,
        }
    }

    /// Whether there is a link of that name.
    pub(super) fn has_link(&self, name: &str) -> Result<bool, PlatformError> {
        let path = self.0.join(name);
        match fs::read_link(&path) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(source) => Err(PlatformError::Read { path, source }),
        }
    }

    /// A whole number, decimal or with `0x`.
    pub(super) fn number(&self, name: &str) -> Result<u64, PlatformError> {
        let text = self.text(name)?;
        self.as_number(name, &text)
    }

    pub(super) fn number_if_there(&self, name: &str) -> Result<Option<u64>, PlatformError> {
        self.text_if_there(name)?.map(|text| self.as_number(name, &text)).transpose()
    }

    pub(super) fn number_if_set(&self, name: &str) -> Result<Option<u64>, PlatformError> {
        self.text_if_set(name)?.map(|text| self.as_number(name, &text)).transpose()
    }

    /// The address in memory of a region or namespace; nothing for users without permission.
    pub(super) fn address(&self) -> Result<Option<u64>, PlatformError> {
        match self.number_if_set("resource") {
            Err(PlatformError::Read { source, .. })
                if source.kind() == ErrorKind::PermissionDenied =>
            {
                Ok(None)
            }
            other => other,
        }
    }

    fn as_number(&self, name: &str, text: &str) -> Result<u64, PlatformError> {
        let number = match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok(),
            None => text.parse().ok(),
        };
        number.ok_or_else(|| self.malformed(name, text, "a whole number"))
    }

    /// A value of a type that is read from text.
    pub(super) fn value<T: FromStr<Err = &'static str>>(
        &self,
        name: &str,
        text: &str,
    ) -> Result<T, PlatformError> {
        text.parse().map_err(|expected| self.malformed(name, text, expected))
    }

    /// Bytes that are known to be bad, of lines of a first sector and a count. A region that is not
    /// enabled has no list.
    pub(super) fn bad_blocks(&self) -> Result<Vec<std::ops::Range<u64>>, PlatformError> {
        let name = "badblocks";
        let Some(text) = self.text_if_set(name)? else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        for line in text.lines() {
            let parsed = line.split_once(' ').and_then(|(first, count)| {
                let first = first.parse::<u64>().ok()?.checked_mul(SECTOR)?;
                let length = count.trim().parse::<u64>().ok()?.checked_mul(SECTOR)?;
                Some(first..first.checked_add(length)?)
            });
            let expected = "lines of a first sector and a count";
            found.push(parsed.ok_or_else(|| self.malformed(name, line, expected))?);
        }
        Ok(found)
    }

    pub(super) fn malformed(
        &self,
        name: &str,
        text: &str,
        expected: &'static str,
    ) -> PlatformError {
        let text = text.chars().take(MAX_SHOWN).collect();
        PlatformError::Malformed { path: self.0.join(name), text, expected }
    }
}

/// The unit in which the kernel counts bad blocks and sizes of block devices.
pub(super) const SECTOR: u64 = 512;
