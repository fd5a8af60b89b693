//! The delta ring's memory: a file on tmpfs, which outlives this process and not the host. It has
//! holes where nothing was stored to yet, so that a pool takes no memory for workers that there are
//! none of.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use blockd_mapper::ring::{MAX_SLOTS, RingMemory, words_needed};
use memmap2::MmapRaw;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::mman::mlock;
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};
use nix::unistd::{Whence, lseek};

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

impl RingCopy {
    fn of(bytes: &[u8]) -> Self {
        let (words, _) = bytes.as_chunks();
        #[expect(clippy::host_endian_bytes, reason = "the words of shared memory, as mapped")]
        let word = |word: &[u8; 8]| AtomicU64::new(u64::from_ne_bytes(*word));
        Self(words.iter().map(word).collect())
    }
}

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
    is_locked: AtomicBool,
    file: File,
}

/// Bytes of a word.
const WORD: usize = size_of::<u64>();

impl RingFile {
    /// Maps the file, making it where there is none. The memory up to the slots is there from now
    /// on, and that of a slot once it is [prepared](RingMemory::prepare).
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
        let needed = (words * WORD) as u64;
        let there =
            file.metadata().map_err(PoolError::io("read the metadata of delta ring", path))?.len();
        // A ring of other dimensions is mapped as it is: its content is taken over first.
        let len = if there == 0 { needed } else { there.max(needed) };
        file.set_len(len).map_err(PoolError::io("lengthen delta ring", path))?;
        let size = usize::try_from(len).unwrap_or(usize::MAX);
        let map = memmap2::MmapOptions::new()
            .len(size)
            .map_raw(&file)
            .map_err(PoolError::io("map delta ring", path))?;
        let words = size / WORD;
        let ring = Self { map, words, is_locked: AtomicBool::new(true), file };
        // Whatever number of slots a ring that is there has.
        ring.provide(&(0..words_needed(MAX_SLOTS, 0).min(words)))
            .map_err(|error| PoolError::io("allocate delta ring", path)(error.into()))?;
        Ok(Arc::new(ring))
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
        Ok(Arc::new(RingCopy::of(&bytes)))
    }

    /// Whether the file holds the ring of this open, and it is ignored as clients received errors.
    /// A file that can't be read says nothing.
    #[must_use]
    pub fn is_ignored(path: &Path, open_id: u64) -> bool {
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path);
        let Some(file) = opened.ok().filter(|file| check_owner(file, path).is_ok()) else {
            return false;
        };
        let mut bytes = Vec::new();
        let header = (words_needed(1, 0) * WORD) as u64;
        let read = file.take(header).read_to_end(&mut bytes);
        read.is_ok() && blockd_mapper::ring::is_ignored(&RingCopy::of(&bytes), open_id)
    }

    /// Whether the pages that are there are locked in memory.
    pub fn is_locked(&self) -> bool {
        self.is_locked.load(Ordering::Relaxed)
    }

    /// Has pages for these words, so that a store can't fail for want of one, and locks them.
    fn provide(&self, words: &Range<usize>) -> Result<(), Errno> {
        let (first, len) = bytes(words);
        loop {
            match fallocate(self.file.as_fd(), FallocateFlags::empty(), first, len) {
                // A signal came.
                Err(Errno::EINTR) => {}
                done => break done?,
            }
        }
        let first = self.map.as_mut_ptr().wrapping_byte_add(words.start * WORD);
        let Some(first) = NonNull::new(first.cast()) else { return Ok(()) };
        // SAFETY: the range is within the mapping, which lives as long as `self`. Locking changes
        // nothing that it holds.
        if unsafe { mlock(first, words.len() * WORD) }.is_err() {
            self.is_locked.store(false, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Where words lie in the file, and how long they are.
fn bytes(words: &Range<usize>) -> (i64, i64) {
    let of = |words: usize| i64::try_from(words * WORD).unwrap_or(i64::MAX);
    (of(words.start), of(words.len()))
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
        // SAFETY: the mapping is aligned to a page, has this many words, which are loaded as zeroes
        // where the file has a hole, and lives as long as `self`. It is shared with no other
        // process while the pool's owner lock is held, and within this one it is used through
        // atomics only.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast(), self.words) }
    }

    fn clear(&self, words: Range<usize>) {
        let (first, len) = bytes(&words);
        if len == 0 {
            return;
        }
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        if fallocate(self.file.as_fd(), hole, first, len).is_err() {
            self.words()[words].iter().for_each(|word| word.store(0, Ordering::Relaxed));
        }
    }

    fn prepare(&self, words: Range<usize>) -> bool {
        let was_locked = self.is_locked();
        let provided = self.provide(&words).is_ok();
        if was_locked && !self.is_locked() {
            tracing::warn!("a part of the delta ring can't be locked in memory");
        }
        provided
    }

    fn holds(&self, words: Range<usize>) -> bool {
        let (first, len) = bytes(&words);
        match lseek(self.file.as_fd(), first, Whence::SeekData) {
            Ok(at) => at < first.saturating_add(len),
            // There is nothing but a hole from there on.
            Err(Errno::ENXIO) => false,
            Err(_) => true,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]
mod tests {
    use blockd_mapper::format::record::Change;
    use blockd_mapper::ring::{DeltaRing, Dropped};
    use blockd_mapper::units::{Lsn, VolumeId};

    use super::*;

    const POOL: [u8; 16] = [1; 16];
    const BOOT: [u8; 16] = [2; 16];
    const WORKERS: usize = 16;
    const RECORDS: u64 = 1 << 13;
    const KIB: u64 = 1 << 10;

    /// Bytes of memory that the file takes.
    fn taken(path: &Path) -> u64 {
        std::fs::metadata(path).unwrap().blocks() * 512
    }

    fn format(ring: &Arc<RingFile>) -> DeltaRing {
        DeltaRing::format(ring.clone(), &POOL, &BOOT, WORKERS + 1, RECORDS).unwrap()
    }

    #[test]
    fn memory_is_taken_by_slots_that_are_prepared_and_given_back_by_a_new_ring() {
        let path = PathBuf::from(format!("/dev/shm/blockd-ring-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let file = RingFile::open(&path, WORKERS, RECORDS).unwrap();
        let ring = format(&file);
        let empty = taken(&path);
        assert!(empty <= 16 * KIB, "{empty} bytes of an empty ring");
        assert!(ring.prepare(WORKERS) && ring.prepare(3));
        // Pages at both ends may be shared with other slots.
        let each = RECORDS * 64;
        assert!((2 * each..=2 * each + empty + 16 * KIB).contains(&taken(&path)));
        let change = Change::Delete { volume: VolumeId(7) };
        for lsn in 1..=RECORDS {
            assert!(ring.reserve(3, 1));
            ring.publish(3, Lsn(lsn), &change, Dropped::Nothing).unwrap();
        }
        let full = taken(&path);
        drop((ring, file));
        let file = RingFile::open(&path, WORKERS, RECORDS).unwrap();
        let ring = DeltaRing::adopt(file.clone(), &POOL, &BOOT).unwrap();
        assert_eq!(ring.recover().unwrap().len() as u64, RECORDS);
        // Looking at slots that have nothing takes no memory.
        assert_eq!(taken(&path), full);
        drop(ring);
        let ring = format(&file);
        assert_eq!(ring.recover().unwrap(), []);
        let emptied = taken(&path);
        std::fs::remove_file(&path).unwrap();
        assert!(emptied <= 16 * KIB, "{emptied} bytes of an empty ring");
    }

    #[test]
    fn a_full_folder_is_an_error_before_a_slot_is_used() {
        assert!(nix::unistd::geteuid().is_root(), "not run: a mount needs root");
        let mounted = std::env::temp_dir().join(format!("blockd-ring-{}", std::process::id()));
        let _ = std::fs::create_dir(&mounted);
        let (kind, size) = (Some("tmpfs"), Some("size=256K"));
        nix::mount::mount(Some("none"), &mounted, kind, nix::mount::MsFlags::empty(), size)
            .unwrap();
        let file = RingFile::open(&mounted.join("ring"), WORKERS, RECORDS).unwrap();
        let prepared = format(&file).prepare(0);
        drop(file);
        nix::mount::umount2(&mounted, nix::mount::MntFlags::MNT_DETACH).unwrap();
        std::fs::remove_dir(&mounted).unwrap();
        assert!(!prepared);
    }
}
