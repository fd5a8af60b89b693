//! The delta ring's memory: a file on tmpfs, which outlives this process and not the host.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use blockd_mapper::ring::{RingMemory, words_needed};
use memmap2::MmapRaw;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};

use super::PoolError;
use crate::units::hex;

/// The file of a pool's delta ring.
#[must_use]
pub fn ring_path(ring_dir: &Path, pool_id: &[u8; 16]) -> PathBuf {
    ring_dir.join(format!("ring-{}", hex(pool_id)))
}

/// The content of a ring file when it was read.
#[derive(Debug)]
pub struct RingCopy(Box<[AtomicU64]>);

impl RingMemory for RingCopy {
    fn words(&self) -> &[AtomicU64] {
        &self.0
    }
}

/// A mapped ring file.
#[derive(Debug)]
pub struct RingFile {
    map: MmapRaw,
    words: usize,
    locked: bool,
    _file: File,
}

impl RingFile {
    /// Maps the file, making it where there is none. All of its memory is there from now on.
    pub fn open(path: &Path, workers: usize, records: u64) -> Result<Arc<Self>, PoolError> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path)
            .map_err(PoolError::io("open delta ring", path))?;
        check_owner(&file, path)?;
        let in_memory = fstatfs(&file).is_ok_and(|fs| fs.filesystem_type() == TMPFS_MAGIC);
        if !in_memory {
            return Err(PoolError::Invalid {
                field: "ring directory",
                value: path.display().to_string(),
                allowed: "on tmpfs: the ring must not outlive the host's memory".to_owned(),
            });
        }
        // A slot for each worker and one for the pool's thread.
        let words = words_needed(workers + 1, records);
        let needed = (words * size_of::<u64>()) as u64;
        let there =
            file.metadata().map_err(PoolError::io("read the metadata of delta ring", path))?.len();
        // A ring of other dimensions is mapped as it is: its content is taken over first.
        let len = if there == 0 { needed } else { there.max(needed) };
        let bytes = i64::try_from(len).unwrap_or(i64::MAX);
        fallocate(file.as_fd(), FallocateFlags::empty(), 0, bytes)
            .map_err(|error| PoolError::io("allocate delta ring", path)(error.into()))?;
        let size = usize::try_from(len).unwrap_or(usize::MAX);
        let map = memmap2::MmapOptions::new()
            .len(size)
            .map_raw(&file)
            .map_err(PoolError::io("map delta ring", path))?;
        let locked = map.lock().is_ok();
        Ok(Arc::new(Self { map, words: size / size_of::<u64>(), locked, _file: file }))
    }

    /// A copy of what the file holds, in the dimensions that [`open`](Self::open) would map. Zeroes
    /// where there is no file: `open` would make one, which holds no ring either.
    pub fn copy(path: &Path, workers: usize, records: u64) -> Result<Arc<RingCopy>, PoolError> {
        let mut bytes = Vec::new();
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path);
        match opened {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(PoolError::io("open delta ring", path)(error)),
            Ok(mut file) => {
                check_owner(&file, path)?;
                file.read_to_end(&mut bytes).map_err(PoolError::io("read delta ring", path))?;
            }
        }
        let needed = words_needed(workers + 1, records) * size_of::<u64>();
        bytes.resize(bytes.len().max(needed), 0);
        let (words, _) = bytes.as_chunks();
        #[expect(clippy::host_endian_bytes, reason = "the words of shared memory, as mapped")]
        let word = |word: &[u8; 8]| AtomicU64::new(u64::from_ne_bytes(*word));
        Ok(Arc::new(RingCopy(words.iter().map(word).collect())))
    }

    /// Whether its pages are locked in memory.
    pub const fn is_locked(&self) -> bool {
        self.locked
    }
}

/// Checks the file's owner. Any user can create files in a shared tmpfs. The content of this file
/// is trusted, so no other user may be able to write it.
fn check_owner(file: &File, path: &Path) -> Result<(), PoolError> {
    let found = file.metadata().map_err(PoolError::io("read the metadata of delta ring", path))?;
    let ours = found.uid() == nix::unistd::geteuid().as_raw() || found.uid() == 0;
    if found.is_file() && ours && found.mode() & 0o022 == 0 {
        return Ok(());
    }
    Err(PoolError::Invalid {
        field: "delta ring",
        value: format!("{} of user {}, mode {:o}", path.display(), found.uid(), found.mode()),
        allowed: "a file that only this user can write".to_owned(),
    })
}

impl RingMemory for RingFile {
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is aligned to a page, has this many words, all allocated, and lives
        // as long as `self`. It is shared with no other process while the pool's owner lock is
        // held, and within this one it is used through atomics only.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast(), self.words) }
    }
}
