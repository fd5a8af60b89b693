//! A pool's devices for tools, while no daemon has them. A reading tool opens them for reading and
//! shares the owner lock with other readers; a writing tool is their only owner. A tool that reads
//! while a daemon serves takes no lock.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blockd_inspect::{Media, MediaMut, newest_copy};
use blockd_mapper::geometry::MAX_DEVICES;
use blockd_mapper::io::{IoBuffer, IoError};
use blockd_mapper::open::PresentDevice;
use blockd_mapper::units::DeviceIndex;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use super::PoolError;
use super::claim::{self, Held, Opener};
use super::host_lock::{self, HostLock};
use crate::clock::Clock;
use crate::pmem::{self, PmemOptions};
use crate::pool::boot_id;
use crate::{
    Device, DeviceKind, DeviceSpec, Gate, claim_disk, disk_sequence, io_error, lock_below,
    lock_owner,
};

/// The time limit of waiting for a lock that another process holds. A serving daemon keeps it; the
/// IO of one that has ended stays in flight for some milliseconds.
const LOCK_WAIT: Duration = Duration::from_secs(2);
/// The limit where no living process is seen to have the lock: the IO of one that was killed is
/// still in flight, on a busy machine or a slow disk for seconds.
const DEAD_LOCK_WAIT: Duration = Duration::from_secs(10);
/// How often it is tried.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// The access to a pool's devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Reads only, without a lock: another process may be writing.
    Look,
    /// Nothing is written.
    Read,
    /// As the owner.
    Write,
    /// The same, also where one device alone has no superblock, and something else may lie on it.
    Complete,
    /// The same of any devices.
    Replace,
}

impl Access {
    const fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Complete | Self::Replace)
    }
}

/// Pages that are read at once past the cache: as many as the inspection reads at a time.
const DIRECT_PAGES: usize = 16;

/// The devices of a pool.
#[derive(Debug)]
pub struct Offline {
    files: Vec<Opened>,
    present: Vec<PresentDevice>,
    /// Memory of the alignment that reads past the page cache require.
    aligned: IoBuffer,
    /// Of one that writes: the host's locks, and the claims where other hosts may reach the pool.
    locks: Vec<HostLock>,
    claims: Vec<(Arc<Gate>, Held)>,
}

#[derive(Debug)]
struct Opened {
    file: Arc<File>,
    from: Source,
    /// Where the pool's device begins: behind a header in persistent memory.
    base: u64,
    /// Mapped, where it is persistent memory that can't be read, or is to be written.
    mapped: Option<Device>,
    /// For writes past the page cache, where the pool has a claim.
    writer: Option<Writer>,
    /// Keeps other programs off a block device that is to be written; never used, only held.
    guard: Option<File>,
    /// Files below a loop device that is to be written, locked; never used, only held.
    below: Vec<File>,
}

/// Writes that have ended when they return: the kernel submits none of them later, when the claim
/// may be another's.
#[derive(Debug)]
struct Writer {
    file: File,
    /// Past the page cache; else each write is durable when it returns.
    is_direct: bool,
}

impl Writer {
    fn new(file: &File) -> std::io::Result<Self> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let mut options = OpenOptions::new();
        options.write(true);
        match options.clone().custom_flags(libc::O_DIRECT).open(&path) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                let file = options.custom_flags(libc::O_DSYNC).open(&path)?;
                Ok(Self { file, is_direct: false })
            }
            other => Ok(Self { file: other?, is_direct: true }),
        }
    }
}

impl Opened {
    fn new(file: Arc<File>, from: Source, base: u64, mapped: Option<Device>) -> Self {
        Self { file, from, base, mapped, writer: None, guard: None, below: Vec::new() }
    }

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
    /// Reads through the page cache: no other process writes, so that the cache is valid.
    Cache,
    /// Reads from the media, and bypasses the cache, which may hide a later corruption.
    Media,
    /// The same where the file system does not support that: the cache is dropped first.
    Forgotten,
}

impl Offline {
    /// Opens and locks the devices of a pool. One that writes waits for other hosts as long as
    /// [`PoolSpec::claim_wait`](super::PoolSpec::claim_wait).
    pub fn open(
        paths: &[PathBuf],
        access: Access,
        claim_wait: Duration,
    ) -> Result<Self, PoolError> {
        Self::open_as(paths, access, claim_wait, 0)
    }

    /// The same with a lease, as of [`PoolSpec`](super::PoolSpec).
    pub(super) fn open_as(
        paths: &[PathBuf],
        access: Access,
        claim_wait: Duration,
        leased_until_ns: u64,
    ) -> Result<Self, PoolError> {
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
            opened.below = lock(&opened.file, path, access)?;
            if access.writes() {
                let guard = claim_disk(&opened.file);
                opened.guard = guard.map_err(PoolError::io("claim", path))?;
            }
            if let Some(device) = opened.mapped.as_ref().filter(|_| access.writes()) {
                // An interrupted change is completed before anything else is changed.
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
        let (locks, claims) = (Vec::new(), Vec::new());
        let mut offline = Self { files, present, aligned, locks, claims };
        if access.writes() {
            offline.take(access, claim_wait, leased_until_ns)?;
        }
        Ok(offline)
    }

    /// Takes the pool as a daemon does, so that no other host and no other path writes to it. Where
    /// no device says which of them is the first, the claim of each that may be it is taken: not
    /// over what others have there, as a mistyped path would lead to.
    fn take(
        &mut self,
        access: Access,
        wait: Duration,
        leased_until_ns: u64,
    ) -> Result<(), PoolError> {
        // The data that is read here decides which claim is taken, and may have been cached before.
        self.files.iter().for_each(|one| forget(&one.file, 0, 0));
        let (mut known, mut unknown, mut copies) = (Vec::new(), Vec::new(), Vec::new());
        for index in 0..self.files.len() {
            let device = DeviceIndex(u8::try_from(index).unwrap_or(u8::MAX));
            let present = self.present[index].clone();
            match newest_copy(self, device, &present) {
                Some(copy) => {
                    known.extend((copy.this_device == DeviceIndex(0)).then_some(index));
                    copies.push((copy.pool_id, copy.node));
                }
                None => unknown.push(index),
            }
        }
        let is_guess = known.is_empty();
        let may_guess = match access {
            Access::Replace => true,
            Access::Complete => unknown.len() == 1 && !copies.is_empty(),
            _ => false,
        };
        let firsts = if is_guess { unknown } else { known };
        let path_of = |this: &Self, index: usize| PathBuf::from(&this.present[index].name);
        let path = path_of(self, firsts.first().copied().unwrap_or(0));
        let ids: BTreeSet<_> = copies.iter().map(|(pool_id, _)| *pool_id).collect();
        for pool_id in &ids {
            self.locks.extend(host_lock::take(pool_id, &path, LOCK_WAIT)?);
        }
        let is_media = |one: &Opened| one.mapped.is_none() && claim::is_shared(&one.file);
        if !self.files.iter().any(is_media) {
            return Ok(());
        }
        if firsts.is_empty() {
            return Err(PoolError::Invalid {
                field: "PATH",
                value: format!("{} and no first device", path.display()),
                allowed: "all devices of the pool: the first one has the claim".to_owned(),
            });
        }
        // A tool of the host that had the pool last is at home, as its daemon is.
        let (pool_id, node) = copies.first().copied().unwrap_or_default();
        let opener = Opener {
            pool_id,
            open_id: fastrand::u64(1..),
            node,
            boot_id: boot_id()?,
            lock_space: self.locks.first().map_or(0, HostLock::space),
            wait,
            leased_until_ns,
            fenced: None,
        };
        if is_guess && !may_guess {
            return Err(PoolError::Invalid {
                field: "PATH",
                value: path.display().to_string(),
                allowed: "a device of a pool: this one has no readable superblock, and may be \
                          another's; where it is the right one, --force of `blockd pool repair` \
                          and `pool restore` writes to it"
                    .to_owned(),
            });
        }
        for index in firsts {
            let (gate, path) = (Arc::default(), path_of(self, index));
            let claim = claim::take(&self.files[index].file, &path, &opener, &gate)?;
            self.claims.push((gate, claim));
        }
        for one in self.files.iter_mut().filter(|one| one.mapped.is_none()) {
            // Another host may have written before the claim, and this host's page cache be older.
            forget(&one.file, 0, 0);
            let writer = Writer::new(&one.file);
            one.writer = Some(writer.map_err(PoolError::io("open", "the pool"))?);
        }
        Ok(())
    }

    /// Whether writes may be submitted: no claim is late or lost.
    fn may_write(&self) -> bool {
        self.claims.iter().all(|(gate, _)| gate.is_open())
    }

    /// Returns the error that an open for writing would be refused with, if another path of this
    /// host or another host has the pool. Writes nothing.
    pub(super) fn check_unused(
        &self,
        pool_id: &[u8; 16],
        first: DeviceIndex,
        claim_wait: Duration,
    ) -> Result<(), PoolError> {
        let Some(one) = self.files.get(usize::from(first.0)) else { return Ok(()) };
        let path = Path::new(&self.present[usize::from(first.0)].name);
        let lock = host_lock::take(pool_id, path, LOCK_WAIT)?;
        let is_media = |one: &Opened| one.mapped.is_none() && claim::is_shared(&one.file);
        if !self.files.iter().any(is_media) {
            return Ok(());
        }
        claim::watch(&one.file, path, pool_id, lock.as_ref().map_or(0, HostLock::space), claim_wait)
    }

    /// The opened devices.
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

/// The kind of the file at a path where a pool is to be. Erasing is left to the daemon.
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
    // Opening a FIFO would wait for a writer.
    let found = std::fs::metadata(path).map_err(failed)?.file_type();
    if !(found.is_file() || found.is_block_device() || found.is_char_device()) {
        return Err(not_a_device(path));
    }
    let kind = kind_of(path).map_err(failed)?;
    let is_pmem = matches!(kind, DeviceKind::Pmem(_));
    let is_file = std::fs::metadata(path).map_err(failed)?.is_file();
    if !is_pmem || (is_file && !access.writes()) {
        let (file, from) = open_file(path, access).map_err(failed)?;
        check_kind(&file, path)?;
        let base = if is_pmem { pmem::HEADER_BYTES } else { 0 };
        return Ok(Opened::new(Arc::new(file), from, base, None));
    }
    let path = path.to_owned();
    let spec = DeviceSpec { path, kind, size: None, preallocate: false, direct: false };
    let device = Device::open(&spec).map_err(failed)?;
    let (file, from) = (Arc::clone(device.file()), Source::Cache);
    Ok(Opened::new(file, from, 0, Some(device)))
}

/// Opens a file or disk. A reader beside a serving daemon gets the content that the daemon would
/// find after a start, and not an older one from the cache.
fn open_file(path: &Path, access: Access) -> std::io::Result<(File, Source)> {
    let mut options = OpenOptions::new();
    options.read(true).write(access.writes());
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
        // Where another has the claim, or what was written may not be durable, the claim stays as
        // it is, and the next opener waits.
        let sound = |one: &Opened| one.mapped.is_some() || one.file.sync_all().is_ok();
        if !self.claims.is_empty() && self.may_write() && self.files.iter().all(sound) {
            self.claims.drain(..).for_each(|(_, claim)| claim.release());
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

/// Drops a range from the page cache, or all from its offset on where the length is 0, except dirty
/// pages. A failure is no error: the cache may hold the only copy, as on tmpfs.
fn forget(file: &File, offset: u64, len: usize) {
    if let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) {
        let _ = posix_fadvise(file, offset, len, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
    }
}

impl MediaMut for Offline {
    fn write(&mut self, device: DeviceIndex, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
        if !self.may_write() {
            return Err(IoError::Gone);
        }
        let one = self.files.get(usize::from(device.0)).ok_or(IoError::Gone)?;
        if let Some(memory) = one.mapped.as_ref().and_then(Device::memory) {
            return memory.write(0, offset, bytes, true);
        }
        let Some(Writer { file, is_direct }) = &one.writer else {
            return one.file.write_all_at(bytes, offset).map_err(|error| io_error(&error));
        };
        let mut offset = offset;
        for part in bytes.chunks(self.aligned.as_bytes().len()) {
            if !self.claims.iter().all(|(gate, _)| gate.is_open()) {
                return Err(IoError::Gone);
            }
            let written = if *is_direct {
                let page = &mut self.aligned.as_bytes_mut()[..part.len()];
                page.copy_from_slice(part);
                file.write_all_at(page, offset)
            } else {
                file.write_all_at(part, offset)
            };
            written.map_err(|error| io_error(&error))?;
            offset += part.len() as u64;
        }
        Ok(())
    }

    fn flush(&mut self, device: DeviceIndex) -> Result<(), IoError> {
        if !self.may_write() {
            return Err(IoError::Gone);
        }
        let one = self.opened(device)?;
        match one.mapped.as_ref().and_then(Device::pmem) {
            Some(pmem) => pmem.sync(),
            None => one.file.sync_all().map_err(|error| io_error(&error)),
        }
    }
}

fn check_kind(file: &File, path: &Path) -> Result<(), PoolError> {
    use std::os::unix::fs::FileTypeExt;
    let kind = file.metadata().map_err(PoolError::io("read the metadata of", path))?.file_type();
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

/// Waits for the lock: the kernel ends the IO of a process that is gone a little after it. Returns
/// the files below a loop device that is to be written, locked as well.
fn lock(file: &File, path: &Path, access: Access) -> Result<Vec<File>, PoolError> {
    let clock = Clock::start();
    loop {
        let tried = match access {
            Access::Look => Ok(()),
            Access::Read => file.try_lock_shared(),
            Access::Write | Access::Complete | Access::Replace => file.try_lock(),
        };
        match tried {
            Ok(()) if !access.writes() => return Ok(Vec::new()),
            Ok(()) => match lock_below(file).map_err(PoolError::io("lock", path))? {
                Some(below) => return Ok(below),
                None => file.unlock().map_err(PoolError::io("unlock", path))?,
            },
            Err(TryLockError::Error(error)) => return Err(PoolError::io("lock", path)(error)),
            Err(TryLockError::WouldBlock) => {}
        }
        let waited = clock.elapsed();
        if waited >= LOCK_WAIT {
            let owner = lock_owner(file);
            if owner.is_some() || waited >= DEAD_LOCK_WAIT {
                return Err(PoolError::Locked { path: path.to_owned(), waited, owner });
            }
        }
        std::thread::sleep(LOCK_PAUSE);
    }
}
