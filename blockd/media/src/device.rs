//! A device of a pool: how it is opened, and what it can do.

mod files;
mod lock;
mod spec;

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use blockd_mapper::io::{IoBuffer, IoError};
use nix::fcntl::{FallocateFlags, PosixFadviseAdvice, fallocate, posix_fadvise};
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};
use nix::sys::statvfs::fstatvfs;
use parking_lot::Mutex;

use super::Gate;
use super::io_error;
use super::ioctl;
use super::mapped::Mapped;
use super::memory::Memory;
use super::pmem::{self, Pmem, PmemInfo, PmemOptions};
use super::room;

use files::{create_file, direct_block, leads_to, open_file, remove_created, sync_folder};

pub use files::same_device;
pub use lock::{claim_disk, disk_sequence, lock_below, lock_owner};
pub use spec::{DeviceInfo, DeviceKind, DeviceSpec};

/// Bytes at each end of a device that are erased with a pool, and have to be zero before one has
/// the device: superblocks and claims of ours, and marks of file systems, partitions and RAIDs, lie
/// there.
pub const MARKED_BYTES: u64 = 2 << 20;
/// Pages of it that are read at a time.
const PART_PAGES: usize = 256;

/// An open device. All IO goes through this one open file description: its owner lock ends when
/// the last IO has ended, also after the death of the process (rule R11).
#[derive(Debug)]
pub struct Device {
    file: Arc<File>,
    info: DeviceInfo,
    /// Bytes at present: as in `info` when it was opened.
    size: AtomicU64,
    /// Held while it is made longer or shorter. How often it was to be made longer: a shortening
    /// that was decided before that is out of date.
    resizing: Mutex<()>,
    growths: AtomicU64,
    memory: Option<Memory>,
    /// Keeps other programs off a block device, for its owner.
    guard: Mutex<Option<File>>,
    /// The files below a loop device, locked for its owner.
    below: Mutex<Option<Vec<File>>>,
    /// Where other hosts may reach it, and a pool has it open for writing.
    gate: OnceLock<Arc<Gate>>,
    /// The file did not exist before [`Device::create`].
    is_new: bool,
}

impl Device {
    /// Opens a device that is there.
    pub fn open(spec: &DeviceSpec) -> std::io::Result<Self> {
        if spec.kind == DeviceKind::Memory {
            return Self::of_process(spec);
        }
        let is_pmem = matches!(spec.kind, DeviceKind::Pmem(_));
        let path = pmem::namespace::find(&spec.path)?;
        let (file, direct) = open_file(&path, spec.direct && !is_pmem)?;
        Self::of(spec, file, direct)
    }

    /// Makes a file, or opens what a pool is to be made on. A file that is there must be empty
    /// space: the caller has looked.
    pub fn create(spec: &DeviceSpec) -> std::io::Result<Self> {
        let is_pmem = match spec.kind {
            DeviceKind::File => false,
            // A character device is there or not.
            DeviceKind::Pmem(_) => {
                let is_device =
                    spec.path.starts_with("/dev/dax") || pmem::namespace::is_namespace(&spec.path);
                spec.size.is_some() && !is_device
            }
            DeviceKind::Disk | DeviceKind::Memory => return Self::open(spec),
        };
        if matches!(spec.kind, DeviceKind::Pmem(_)) && !is_pmem {
            return Self::open(spec);
        }
        let is_new = create_file(&spec.path)?;
        let (file, direct) = open_file(&spec.path, spec.direct && !is_pmem)?;
        let lock = is_new.then(|| file.try_clone()).transpose()?;
        let made = Self::sized(spec, file, direct, spec.preallocate || is_pmem);
        if let (Err(_), Some(file)) = (&made, lock) {
            remove_created(&file, &spec.path);
        }
        Ok(Self { is_new, ..made? })
    }

    /// A file, which becomes as long as it is to be.
    fn sized(
        spec: &DeviceSpec,
        file: File,
        direct: bool,
        preallocate: bool,
    ) -> std::io::Result<Self> {
        if let Some(size) = spec.size {
            if file.metadata()?.len() < size {
                file.set_len(size)?;
            }
            if preallocate {
                let len = i64::try_from(size).map_err(std::io::Error::other)?;
                fallocate(&file, FallocateFlags::empty(), 0, len)?;
            }
        }
        // A flush of the file makes its content durable, and not the entry that finds it. The entry
        // of an existing file may not be durable either: its maker may have been killed first.
        sync_folder(&spec.path)?;
        Self::of(spec, file, direct)
    }

    /// Removes the file if [`Device::create`] created it, no other process has its owner lock, and
    /// the path still leads to it. The owner of the lock calls this while it has the lock.
    pub fn remove_if_new(&self) {
        if self.is_new {
            remove_created(&self.file, &self.info.path);
        }
    }

    fn of(spec: &DeviceSpec, file: File, direct: bool) -> std::io::Result<Self> {
        if let DeviceKind::Pmem(options) = spec.kind {
            return Self::persistent(spec, file, options);
        }
        let kind = file.metadata()?.file_type();
        let wanted = match spec.kind {
            DeviceKind::Disk => kind.is_block_device(),
            _ => kind.is_file(),
        };
        if !wanted {
            let expected = if spec.kind == DeviceKind::Disk { "block device" } else { "file" };
            return Err(std::io::Error::other(format!("it is no {expected}")));
        }
        let (size, block_size, sparse) = if spec.kind == DeviceKind::Disk {
            (ioctl::device_size(&file)?, ioctl::device_block_size(&file)?, false)
        } else {
            (file.metadata()?.len(), direct_block(&file, direct), !spec.preallocate)
        };
        let memory = fstatfs(&file).is_ok_and(|fs| fs.filesystem_type() == TMPFS_MAGIC);
        let file = Arc::new(file);
        let memory = (memory && spec.kind == DeviceKind::File)
            .then(|| Mapped::new(Arc::clone(&file), size).map(Memory::File))
            .transpose()?;
        let (path, kind, mapped) = (spec.path.clone(), spec.kind, memory.is_some());
        let info = DeviceInfo { path, kind, size, block_size, direct, mapped, sparse, pmem: None };
        Ok(Self::from_parts(file, info, memory))
    }

    /// A device in persistent memory. Its header is not looked at yet.
    fn persistent(spec: &DeviceSpec, file: File, options: PmemOptions) -> std::io::Result<Self> {
        pmem::check(&file)?;
        let file = Arc::new(file);
        let memory = Pmem::map(&file, options)?;
        let info = DeviceInfo {
            path: spec.path.clone(),
            kind: spec.kind,
            size: memory.len(),
            block_size: 512,
            direct: false,
            mapped: true,
            sparse: false,
            pmem: Some(memory.info().clone()),
        };
        let memory = Some(Memory::Pmem(Box::new(memory)));
        Ok(Self::from_parts(file, info, memory))
    }

    fn from_parts(file: Arc<File>, info: DeviceInfo, memory: Option<Memory>) -> Self {
        Self {
            file,
            size: AtomicU64::new(info.size),
            resizing: Mutex::new(()),
            growths: AtomicU64::new(0),
            info,
            memory,
            guard: Mutex::new(None),
            below: Mutex::new(None),
            gate: OnceLock::new(),
            is_new: false,
        }
    }

    fn of_process(spec: &DeviceSpec) -> std::io::Result<Self> {
        let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
        let file = File::from(nix::sys::memfd::memfd_create(c"blockd-pool", flags)?);
        let size = spec.size.unwrap_or(0);
        file.set_len(size)?;
        let file = Arc::new(file);
        let memory = Some(Memory::File(Mapped::new(Arc::clone(&file), size)?));
        let (path, kind, mapped) = (spec.path.clone(), DeviceKind::Memory, true);
        let (block_size, direct, sparse) = (512, false, true);
        let info = DeviceInfo { path, kind, size, block_size, direct, mapped, sparse, pmem: None };
        Ok(Self::from_parts(file, info, memory))
    }

    /// Whether this path leads to it, under whatever name.
    #[must_use]
    pub fn is_at(&self, path: &Path) -> bool {
        leads_to(path, &self.file)
    }

    /// Bytes that it has at present.
    #[must_use]
    #[inline]
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Makes a file longer, or looks how long a disk has become. Gives the bytes it has then. May
    /// take long. One that is in memory stays as it is.
    pub fn grow(&self, wanted: Option<u64>) -> std::io::Result<u64> {
        let present = self.size();
        if self.memory.is_some() {
            return Ok(present);
        }
        // A truncation may still be under way that its caller no longer waits for.
        let _one = self.resizing.lock();
        self.growths.fetch_add(1, Ordering::SeqCst);
        let size = match (self.info.kind, wanted) {
            (DeviceKind::Disk, _) => ioctl::device_size(&self.file)?,
            (_, None) => self.file.metadata()?.len(),
            (_, Some(wanted)) => {
                let found = self.file.metadata()?.len();
                if !self.info.sparse && wanted > found {
                    let bytes = i64::try_from(wanted - found).map_err(std::io::Error::other)?;
                    let from = i64::try_from(found).map_err(std::io::Error::other)?;
                    fallocate(&self.file, FallocateFlags::empty(), from, bytes)?;
                } else if wanted > found {
                    self.file.set_len(wanted)?;
                }
                wanted.max(found)
            }
        };
        Ok(size.max(present))
    }

    /// How often it was to be made longer.
    #[must_use]
    pub fn growths(&self) -> u64 {
        self.growths.load(Ordering::SeqCst)
    }

    /// Notes that the pool uses no more than this many bytes from now on, and truncates a file. A
    /// disk stays as long as it is. Blocks; refused where the device was to be made longer since
    /// its [`Self::growths`] were this many, while another call shortens it, and where this host
    /// may no longer write.
    pub fn shrink(&self, size: u64, growths: u64) -> std::io::Result<()> {
        let refuse = |problem: &str| Err(std::io::Error::other(problem));
        let Some(_one) = self.resizing.try_lock() else {
            return refuse("it is being made longer or shorter");
        };
        if self.growths() != growths {
            return refuse("it was made longer meanwhile");
        }
        if !self.may_write() {
            return refuse("another host has the pool");
        }
        // First the size: a file that is shorter than that has lost something.
        let before = self.size.fetch_min(size, Ordering::AcqRel);
        if self.info.kind == DeviceKind::File {
            let cut = self.file.set_len(size);
            return cut.inspect_err(|_| self.note_size(before));
        }
        Ok(())
    }

    /// Notes that the pool uses this many bytes from now on.
    pub fn note_size(&self, size: u64) {
        self.size.fetch_max(size, Ordering::AcqRel);
    }

    /// The same, as it is at present.
    #[must_use]
    pub fn present(&self) -> DeviceInfo {
        let bad_bytes = self.pmem().map_or(0, Pmem::bad_bytes);
        let pmem = self.info.pmem.clone().map(|info| PmemInfo { bad_bytes, ..info });
        DeviceInfo { size: self.size(), pmem, ..self.info.clone() }
    }

    /// Facts about the device.
    #[must_use]
    #[inline]
    pub const fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Its file, to be registered with rings.
    #[must_use]
    #[inline]
    pub const fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Its memory, where it is in memory.
    #[must_use]
    #[inline]
    pub const fn memory(&self) -> Option<&Memory> {
        self.memory.as_ref()
    }

    /// Its persistent memory, where it is in that.
    #[must_use]
    #[inline]
    pub fn pmem(&self) -> Option<&Pmem> {
        match self.memory.as_ref()? {
            Memory::Pmem(pmem) => Some(pmem),
            Memory::File(_) => None,
        }
    }

    /// Whether a pool can be looked for on it as on a file: by reading it.
    pub fn read(&self, at: u64, to: &mut [u8]) -> std::io::Result<()> {
        match &self.memory {
            Some(memory) => memory.read(at, to).map_err(std::io::Error::other),
            None => self.file.read_exact_at(to, at),
        }
    }

    /// Makes an empty device in persistent memory ours; others need nothing. For its owner.
    pub fn format(&self, uuid: [u8; 16]) -> std::io::Result<()> {
        self.pmem().map_or(Ok(()), |pmem| pmem.format(uuid))
    }

    /// The same where it has no mark of ours yet; one that has is left as it is.
    pub fn format_if_new(&self, uuid: [u8; 16]) -> std::io::Result<()> {
        self.pmem().map_or(Ok(()), |pmem| pmem.format_if_new(uuid))
    }

    /// Takes up what a former owner has left in persistent memory. For its owner, before it reads.
    pub fn start(&self) -> std::io::Result<()> {
        self.pmem().map_or(Ok(()), Pmem::start)
    }

    /// Whether freed extents are worth telling of: never on a file whose space was allocated once
    /// and for all.
    #[must_use]
    #[inline]
    pub fn takes_discards(&self) -> bool {
        let erases = self.info.pmem.as_ref().is_some_and(|pmem| pmem.options.erase);
        self.info.sparse || self.info.kind == DeviceKind::Disk || erases
    }

    /// Whether what a write through it reports is about that write alone: nothing of others is
    /// left above it to fail.
    #[must_use]
    #[inline]
    pub fn ends_its_writes(&self) -> bool {
        self.info.direct || self.memory.as_ref().is_some_and(|memory| !memory.needs_sync())
    }

    /// Whether its first and last bytes, where file systems and others have their marks, are zero.
    /// Blocks.
    pub fn is_empty_at_ends(&self) -> std::io::Result<bool> {
        let mut buffer = IoBuffer::new(PART_PAGES).ok_or(std::io::ErrorKind::OutOfMemory)?;
        // In whole pages, as reading past the cache has to be.
        let end = self.size() / 4096 * 4096;
        for start in [0, end.saturating_sub(MARKED_BYTES)] {
            let parts = (start..end.min(start + MARKED_BYTES)).step_by(PART_PAGES * 4096);
            for at in parts {
                let length = usize::try_from(end - at).unwrap_or(usize::MAX);
                let part = &mut buffer.as_bytes_mut()[..length.min(PART_PAGES * 4096)];
                self.read(at, part)?;
                if part.iter().any(|&byte| byte != 0) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Has the page cache forget what it holds of a device that is served through it: another host
    /// may have written since. Blocks until dirty pages are written.
    pub fn forget_cache(&self) -> std::io::Result<()> {
        if self.info.direct || self.memory.is_some() {
            return Ok(());
        }
        self.file.sync_data()?;
        Ok(posix_fadvise(&self.file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?)
    }

    /// Has the page cache forget what is not dirty of a device that is served through it, without a
    /// write: after a failed flush it may show bytes that the media do not have.
    pub fn forget_clean_cache(&self) -> std::io::Result<()> {
        if self.info.direct || self.memory.is_some() {
            return Ok(());
        }
        Ok(posix_fadvise(&self.file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?)
    }

    /// Writes are submitted from now on only while this gate is open. To be called before rings
    /// know the device.
    pub fn set_gate(&self, gate: &Arc<Gate>) {
        let _ = self.gate.set(Arc::clone(gate));
    }

    /// Its gate, where it has one.
    #[must_use]
    pub fn gate(&self) -> Option<&Arc<Gate>> {
        self.gate.get()
    }

    /// Whether a write may be submitted now.
    #[must_use]
    pub fn may_write(&self) -> bool {
        self.gate.get().is_none_or(|gate| gate.is_open())
    }

    /// Discards a range that is not in use. May take long.
    pub fn discard(&self, offset: u64, len: u64) -> Result<(), IoError> {
        match &self.memory {
            Some(Memory::File(mapped)) => return mapped.punch(offset, len),
            Some(Memory::Pmem(pmem)) => return pmem.erase(offset, len),
            None => {}
        }
        if self.info.kind == DeviceKind::Disk {
            return ioctl::discard(&self.file, offset, len).map_err(|error| self.meaning(&error));
        }
        let (Ok(start), Ok(bytes)) = (i64::try_from(offset), i64::try_from(len)) else {
            return Err(IoError::Media);
        };
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(self.file.as_fd(), flags, start, bytes).map_err(|error| io_error(&error.into()))
    }

    /// Converts an error of this device's IO to one of the mapper. A conflict with a reservation
    /// closes the gate.
    #[must_use]
    #[cold]
    #[inline(never)]
    pub fn meaning(&self, error: &std::io::Error) -> IoError {
        if error.raw_os_error() == Some(libc::EBADE) {
            self.gate().into_iter().for_each(|gate| gate.exclude());
        }
        meaning(self.info.kind, error, || ioctl::device_size(&self.file))
    }

    /// Bytes free below a sparse file: in its file system, and in the memory that it lies in.
    #[must_use]
    pub fn free_below(&self) -> Option<u64> {
        if !self.info.sparse || self.info.kind != DeviceKind::File {
            return None;
        }
        let memory = self.info.mapped.then(room::left).flatten();
        let fs = fstatvfs(self.file.as_fd()).ok()?;
        let free = fs.blocks_available().checked_mul(fs.fragment_size())?;
        Some(free.min(memory.unwrap_or(u64::MAX)))
    }
}

/// Converts an error of the operating system for a device of this kind. A disk that was pulled out
/// has no bytes, and the kernel fails a write for lack of space: writes must not wait for space
/// then.
fn meaning(
    kind: DeviceKind,
    error: &std::io::Error,
    size: impl FnOnce() -> std::io::Result<u64>,
) -> IoError {
    match io_error(error) {
        IoError::NoSpace if Gate::refused(error) => IoError::NoSpace,
        IoError::NoSpace if kind == DeviceKind::Disk => match size() {
            Ok(0) => IoError::Gone,
            Ok(_) => IoError::NoSpace,
            Err(error) => io_error(&error),
        },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_was_pulled_out_is_gone_and_not_full() {
        let full = std::io::Error::from_raw_os_error(libc::ENOSPC);
        let of = |kind, size: Result<u64, i32>| {
            meaning(kind, &full, || size.map_err(std::io::Error::from_raw_os_error))
        };
        assert_eq!(of(DeviceKind::Disk, Ok(0)), IoError::Gone);
        assert_eq!(of(DeviceKind::Disk, Err(libc::ENXIO)), IoError::Gone);
        // A thin volume of another system keeps its size, and may get space.
        assert_eq!(of(DeviceKind::Disk, Ok(1 << 30)), IoError::NoSpace);
        // The size is not asked for where it says nothing.
        assert_eq!(of(DeviceKind::File, Err(libc::EIO)), IoError::NoSpace);
        let error = std::io::Error::from_raw_os_error(libc::EIO);
        let size = || unreachable!("an error that speaks for itself");
        assert_eq!(meaning(DeviceKind::Disk, &error, size), IoError::Media);
    }

    #[test]
    fn the_space_below_is_as_large_as_it_can_become() {
        let path = std::env::temp_dir().join(format!("blockd-device-{}", std::process::id()));
        let spec = |kind, preallocate| DeviceSpec {
            path: path.clone(),
            kind,
            size: Some(1 << 20),
            preallocate,
            direct: false,
        };
        // A file with holes can have what its file system has.
        let sparse = Device::create(&spec(DeviceKind::File, false)).unwrap();
        let fs = nix::sys::statvfs::statvfs(&path).unwrap();
        let free = fs.blocks_available() * fs.fragment_size();
        let found = sparse.free_below().unwrap();
        assert!(found.abs_diff(free) <= free / 2, "{found} beside {free}: others write as well");
        // The present length counts, even if another process has extended the file.
        File::options().write(true).open(&path).unwrap().set_len(3 << 20).unwrap();
        assert_eq!(sparse.size(), 1 << 20);
        assert!(sparse.memory().is_some() || sparse.grow(None).unwrap() == 3 << 20);
        assert_eq!(Device::open(&spec(DeviceKind::File, false)).unwrap().size(), 3 << 20);
        std::fs::remove_file(&path).unwrap();
        // One that has all of its space, and memory, have no more and no less than their size.
        let whole = Device::create(&spec(DeviceKind::File, true)).unwrap();
        std::fs::remove_file(&path).unwrap();
        let memory = Device::open(&spec(DeviceKind::Memory, false)).unwrap();
        for device in [whole, memory] {
            assert_eq!((device.size(), device.free_below()), (1 << 20, None));
        }
    }
}
