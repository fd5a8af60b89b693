//! A pool's devices for tools, while no daemon has them. What only reads opens them for reading
//! and shares the owner lock with others that read; what writes is their one owner. What looks on
//! while a daemon serves takes no lock.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blockd_mapper::geometry::MAX_DEVICES;
use blockd_mapper::inspect::{Media, MediaMut, newest_copy};
use blockd_mapper::io::{IoBuffer, IoError};
use blockd_mapper::open::PresentDevice;
use blockd_mapper::units::DeviceIndex;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use super::PoolError;
use super::claim::{self, Held, Opener};
use super::host_lock::{self, HostLock};
use super::open::boot_id;
use crate::backing::pmem::{self, PmemOptions};
use crate::backing::{Device, DeviceKind, DeviceSpec, Gate, claim_disk, disk_sequence, io_error};
use crate::clock::Clock;

/// How long a lock that somebody else has is waited for. A daemon that serves keeps it, one that
/// has ended has IO under way for some milliseconds.
const LOCK_WAIT: Duration = Duration::from_secs(2);
/// How long other hosts are watched and waited for: the daemon's default.
const CLAIM_WAIT: Duration = Duration::from_secs(2);
/// How often it is tried.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// What is to be done with a pool's devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Nothing is written, and nobody is locked out or waited for: another may be writing.
    Look,
    /// Nothing is written.
    Read,
    /// As the owner.
    Write,
}

/// Pages that are read at once past the cache: as many as the inspection asks for at a time.
const DIRECT_PAGES: usize = 16;

/// The devices of a pool.
#[derive(Debug)]
pub struct Offline {
    files: Vec<Opened>,
    present: Vec<PresentDevice>,
    /// Memory of the alignment that reads past the page cache want.
    aligned: IoBuffer,
    /// Of one that writes: the host's lock, and the claim where other hosts may reach the pool.
    lock: Option<HostLock>,
    claim: Option<(Arc<Gate>, Held)>,
}

#[derive(Debug)]
struct Opened {
    file: Arc<File>,
    from: Source,
    /// Where the pool's device begins: behind a header in persistent memory.
    base: u64,
    /// Mapped, where it is persistent memory that can't be read, or is to be written.
    mapped: Option<Device>,
    /// Keeps other programs off a block device that is to be written; never used, only held.
    guard: Option<File>,
}

impl Opened {
    fn size(&self) -> std::io::Result<u64> {
        match &self.mapped {
            Some(device) => Ok(device.size()),
            None => Ok((&*self.file).seek(SeekFrom::End(0))?.saturating_sub(self.base)),
        }
    }
}

/// Where bytes are read from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Source {
    /// The page cache will do: nobody else writes, and what is in it is what was read once.
    Cache,
    /// What lies on the media: the cache, which may have it from before it rotted, is passed by.
    Media,
    /// The same where the file system can't do that: the cache is told to forget it first.
    Forgotten,
}

impl Offline {
    /// Opens and locks the devices of a pool.
    pub fn open(paths: &[PathBuf], access: Access) -> Result<Self, PoolError> {
        if !(1..=MAX_DEVICES).contains(&paths.len()) {
            return Err(PoolError::Invalid {
                field: "PATH",
                value: format!("{} paths", paths.len()),
                allowed: "the 1 to 16 files or disks of one pool".to_owned(),
            });
        }
        let (mut files, mut present) = (Vec::new(), Vec::new());
        for path in paths {
            let mut opened = open(path, access)?;
            lock(&opened.file, path, access)?;
            if access == Access::Write {
                let guard = claim_disk(&opened.file);
                opened.guard = guard.map_err(PoolError::io("claim", path))?;
            }
            if let (Some(device), Access::Write) = (&opened.mapped, access) {
                // What was cut short is finished before anything is changed.
                device.start().map_err(PoolError::io("take up", path))?;
            }
            let size = opened.size().map_err(PoolError::io("measure", path))?;
            let name = path.display().to_string();
            // Whole pages are read and written: no device's blocks are too big for that.
            present.push(PresentDevice { name, size, block_size: 512 });
            files.push(opened);
        }
        let none = || std::io::Error::from(std::io::ErrorKind::OutOfMemory);
        let aligned = IoBuffer::new(DIRECT_PAGES);
        let aligned = aligned.ok_or_else(none).map_err(PoolError::io("read", "the pool"))?;
        let mut offline = Self { files, present, aligned, lock: None, claim: None };
        if access == Access::Write {
            offline.take()?;
        }
        Ok(offline)
    }

    /// Takes the pool as a daemon does, so that no other host and no other path writes to it.
    fn take(&mut self) -> Result<(), PoolError> {
        let mut found = None;
        for index in 0..self.files.len() {
            let device = DeviceIndex(u8::try_from(index).unwrap_or(u8::MAX));
            let present = self.present[index].clone();
            let copy = newest_copy(self, device, &present);
            if let Some(copy) = copy.filter(|copy| copy.this_device == DeviceIndex(0)) {
                found = Some((index, copy.pool_id));
                break;
            }
        }
        // Where no pool is yet, one may be made: on the first device that is named.
        let first = &self.files[found.map_or(0, |(index, _)| index)];
        let path = PathBuf::from(&self.present[found.map_or(0, |(index, _)| index)].name);
        if let Some((_, pool_id)) = found {
            self.lock = host_lock::take(&pool_id, &path, LOCK_WAIT)?;
        }
        let is_media = |one: &Opened| one.mapped.is_none() && claim::is_shared(&one.file);
        if !self.files.iter().any(is_media) {
            return Ok(());
        }
        let opener = Opener {
            pool_id: found.map_or([0; 16], |(_, pool_id)| pool_id),
            open_id: fastrand::u64(1..),
            node: 0,
            boot_id: boot_id()?,
            lock_space: self.lock.as_ref().map_or(0, HostLock::space),
            wait: CLAIM_WAIT,
        };
        let gate = Arc::default();
        let claim = claim::take(&first.file, &path, &opener, &gate)?;
        self.claim = Some((gate, claim));
        // Another host may have written before the claim, and this host's page cache be older.
        self.files.iter().for_each(|one| forget(&one.file, 0, 0));
        Ok(())
    }

    /// What they are.
    #[must_use]
    pub fn present(&self) -> &[PresentDevice] {
        &self.present
    }

    /// The kernel's sequence number of a disk, as of [`Device::disk_sequence`].
    #[must_use]
    pub fn disk_sequence(&self, device: DeviceIndex) -> Option<u64> {
        disk_sequence(&self.opened(device).ok()?.file)
    }

    fn opened(&self, device: DeviceIndex) -> Result<&Opened, IoError> {
        self.files.get(usize::from(device.0)).ok_or(IoError::Gone)
    }
}

/// What is at a path where a pool is to be. What a daemon would erase is left to it.
pub fn kind_of(path: &Path) -> std::io::Result<DeviceKind> {
    let kind = std::fs::metadata(path)?.file_type();
    let pmem = DeviceKind::Pmem(PmemOptions { erase: false, ..PmemOptions::default() });
    Ok(match kind {
        _ if kind.is_block_device() => DeviceKind::Disk,
        _ if kind.is_char_device() => pmem,
        _ if kind.is_file() && pmem::has_header(&File::open(path)?) => pmem,
        _ => DeviceKind::File,
    })
}

/// Opens a device, of whatever kind it is.
fn open(path: &Path, access: Access) -> Result<Opened, PoolError> {
    let failed = |error| PoolError::io("open", path)(error);
    let found = pmem::namespace::find(path).map_err(failed)?;
    let path: &Path = &found;
    // A FIFO would keep whoever opens it waiting.
    let found = std::fs::metadata(path).map_err(failed)?.file_type();
    if !(found.is_file() || found.is_block_device() || found.is_char_device()) {
        return Err(not_a_device(path));
    }
    let kind = kind_of(path).map_err(failed)?;
    let is_pmem = matches!(kind, DeviceKind::Pmem(_));
    let is_file = std::fs::metadata(path).map_err(failed)?.is_file();
    if !is_pmem || (is_file && access != Access::Write) {
        let (file, from) = open_file(path, access).map_err(failed)?;
        check_kind(&file, path)?;
        let base = if is_pmem { pmem::HEADER_BYTES } else { 0 };
        return Ok(Opened { file: Arc::new(file), from, base, mapped: None, guard: None });
    }
    let path = path.to_owned();
    let spec = DeviceSpec { path, kind, size: None, preallocate: false, direct: false };
    let device = Device::open(&spec).map_err(failed)?;
    let (file, from) = (Arc::clone(device.file()), Source::Cache);
    Ok(Opened { file, from, base: 0, mapped: Some(device), guard: None })
}

/// Opens a file or disk. Who looks on while a daemon serves is to see what that one would find
/// after a start, and not what somebody has read before.
fn open_file(path: &Path, access: Access) -> std::io::Result<(File, Source)> {
    let mut options = OpenOptions::new();
    options.read(true).write(access == Access::Write);
    if access != Access::Look {
        return Ok((options.open(path)?, Source::Cache));
    }
    match options.clone().custom_flags(libc::O_DIRECT).open(path) {
        Ok(file) => Ok((file, Source::Media)),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            Ok((options.open(path)?, Source::Forgotten))
        }
        Err(error) => Err(error),
    }
}

impl Drop for Offline {
    fn drop(&mut self) {
        let Some((_, claim)) = self.claim.take() else { return };
        // Pages that the kernel still has to write must not follow the next owner's. Where that
        // fails, the claim stays, and the next opener waits.
        if self.files.iter().all(|one| one.mapped.is_some() || one.file.sync_all().is_ok()) {
            claim.release();
        }
    }
}

impl Media for Offline {
    fn read(&mut self, device: DeviceIndex, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        let one = self.files.get(usize::from(device.0)).ok_or(IoError::Gone)?;
        if let Some(mapped) = &one.mapped {
            return mapped.read(offset, bytes).map_err(|error| io_error(&error));
        }
        let offset = offset.checked_add(one.base).ok_or(IoError::Media)?;
        if one.from != Source::Media {
            if one.from == Source::Forgotten {
                forget(&one.file, offset, bytes.len());
            }
            return one.file.read_exact_at(bytes, offset).map_err(|error| io_error(&error));
        }
        let mut offset = offset;
        for part in bytes.chunks_mut(self.aligned.as_bytes().len()) {
            let read = &mut self.aligned.as_bytes_mut()[..part.len()];
            one.file.read_exact_at(read, offset).map_err(|error| io_error(&error))?;
            part.copy_from_slice(read);
            offset += part.len() as u64;
        }
        Ok(())
    }
}

/// Has the page cache forget a range, or all from its offset on where the length is 0, but for what
/// is only there. That it doesn't is no error: what it holds may be all there is, as on tmpfs.
fn forget(file: &File, offset: u64, len: usize) {
    if let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) {
        let _ = posix_fadvise(file, offset, len, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
    }
}

impl MediaMut for Offline {
    fn write(&mut self, device: DeviceIndex, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
        if self.claim.as_ref().is_some_and(|(gate, _)| !gate.is_open()) {
            return Err(IoError::Gone);
        }
        let one = self.opened(device)?;
        match one.mapped.as_ref().and_then(Device::memory) {
            Some(memory) => memory.write(0, offset, bytes, true),
            None => one.file.write_all_at(bytes, offset).map_err(|error| io_error(&error)),
        }
    }

    fn flush(&mut self, device: DeviceIndex) -> Result<(), IoError> {
        let one = self.opened(device)?;
        match one.mapped.as_ref().and_then(Device::pmem) {
            Some(pmem) => pmem.sync(),
            None => one.file.sync_all().map_err(|error| io_error(&error)),
        }
    }
}

fn check_kind(file: &File, path: &Path) -> Result<(), PoolError> {
    use std::os::unix::fs::FileTypeExt;
    let kind = file.metadata().map_err(PoolError::io("look at", path))?.file_type();
    if kind.is_file() || kind.is_block_device() {
        return Ok(());
    }
    Err(not_a_device(path))
}

fn not_a_device(path: &Path) -> PoolError {
    PoolError::Invalid {
        field: "PATH",
        value: path.display().to_string(),
        allowed: "a file or a block device".to_owned(),
    }
}

/// Waits for the lock: the kernel ends the IO of a process that is gone a little after it.
fn lock(file: &File, path: &Path, access: Access) -> Result<(), PoolError> {
    let clock = Clock::start();
    loop {
        let tried = match access {
            Access::Look => Ok(()),
            Access::Read => file.try_lock_shared(),
            Access::Write => file.try_lock(),
        };
        match tried {
            Ok(()) => return Ok(()),
            Err(TryLockError::Error(error)) => return Err(PoolError::io("lock", path)(error)),
            Err(TryLockError::WouldBlock) if clock.elapsed() >= LOCK_WAIT => {
                let (path, waited) = (path.to_owned(), clock.elapsed());
                return Err(PoolError::Locked { path, waited, owner: None });
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
        }
    }
}
