//! The lock that a daemon has in a folder of cells while its process lives. The kernel frees it at
//! the end of the process, whose writes have ended then: the end is the fence.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::cell::HostNumber;
use crate::error::HostsError;
use crate::fence::Key;

/// Goes before a host's number in the name of its lock.
const BEFORE: &str = "host-";
/// And after it.
const AFTER: &str = ".lock";
/// Stands behind the key of a process whose end another host has noted.
const FENCED: &str = "fenced";
/// Largest content that is read: a key of 16 characters and the mark.
const MAX_BYTES: u64 = 64;
/// How often a lock is tried for: another daemon has it for a moment while it takes a cell from
/// this number's last process, and a process that was killed for as long as its end takes.
const TRIES: u32 = 20;
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(100);

/// The lock of one daemon's number, which this process has.
#[derive(Debug)]
pub(crate) struct HostLock {
    file: File,
    path: PathBuf,
}

/// The content of a lock's file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Noted {
    /// Of the last process that had the lock.
    pub(crate) key: Key,
    /// Another host has seen that it had ended.
    pub(crate) is_fenced: bool,
}

fn path_of(folder: &Path, host: HostNumber) -> PathBuf {
    folder.join(format!("{BEFORE}{host}{AFTER}"))
}

/// The number in the name of a lock.
pub(crate) fn number(name: &str) -> Option<HostNumber> {
    name.strip_prefix(BEFORE)?.strip_suffix(AFTER)?.parse().ok().map(HostNumber)
}

/// The content of a lock; `None` where no process has had it, or its host was forgotten.
pub(crate) fn noted(folder: &Path, host: HostNumber) -> Result<Option<Noted>, HostsError> {
    let path = path_of(folder, host);
    match File::open(&path) {
        Ok(file) => read(&file).map_err(failed("read", &path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("open", &path)(error)),
    }
}

fn read(mut file: &File) -> io::Result<Option<Noted>> {
    let mut text = String::new();
    (&mut file).take(MAX_BYTES).read_to_string(&mut text)?;
    let mut lines = text.lines();
    let key = lines.next().and_then(Key::parse);
    Ok(key.map(|key| Noted { key, is_fenced: lines.next() == Some(FENCED) }))
}

impl HostLock {
    /// Takes the lock of a number; `None` while a process has it. Blocks for some seconds then.
    pub(crate) fn take(folder: &Path, host: HostNumber) -> Result<Option<Self>, HostsError> {
        for _ in 1..TRIES {
            if let Some(lock) = Self::try_take(folder, host)? {
                return Ok(Some(lock));
            }
            std::thread::sleep(PAUSE);
        }
        Self::try_take(folder, host)
    }

    /// The same without a wait.
    pub(crate) fn try_take(folder: &Path, host: HostNumber) -> Result<Option<Self>, HostsError> {
        let path = path_of(folder, host);
        // It is never removed: a lock of a file that has no name any more would be one for nothing.
        let opened =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let file = opened.map_err(failed("open", &path))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self { file, path })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(failed("lock", &path)(error)),
        }
    }

    /// Whether the folder still has its file: not while its file system is not mounted.
    pub(crate) fn is_in_place(&self) -> Result<bool, HostsError> {
        let held = self.file.metadata().map_err(failed("examine", &self.path))?;
        match std::fs::metadata(&self.path) {
            Ok(found) => Ok((found.dev(), found.ino()) == (held.dev(), held.ino())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(failed("examine", &self.path)(error)),
        }
    }

    /// The process that had it last.
    pub(crate) fn noted(&self) -> Result<Option<Noted>, HostsError> {
        let file = File::open(&self.path).and_then(|file| read(&file));
        file.map_err(failed("read", &self.path))
    }

    /// Notes a process, or that there is none: its host was forgotten.
    pub(crate) fn note(&self, noted: Option<Noted>) -> Result<(), HostsError> {
        let mark =
            |noted: Noted| if noted.is_fenced { format!("{FENCED}\n") } else { String::new() };
        let text =
            noted.map_or_else(String::new, |noted| format!("{}\n{}", noted.key, mark(noted)));
        // The key stays whole for readers, as all keys have the same length.
        let write = || {
            self.file.write_all_at(text.as_bytes(), 0)?;
            self.file.set_len(text.len() as u64)?;
            (&self.file).flush()?;
            self.file.sync_all()
        };
        write().map_err(failed("write", &self.path))
    }
}

pub(crate) fn failed(
    what: &'static str,
    path: &Path,
) -> impl FnOnce(io::Error) -> HostsError + use<> {
    let what = format!("{what} {}", path.display());
    move |source| HostsError::Io { what, source }
}
