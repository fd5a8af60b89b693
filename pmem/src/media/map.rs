//! A mapping: a character device of persistent memory, or a file.

use std::fs::{self, File};
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};

use super::engine::{self, LINE, WriteBack};
use super::{Domain, Durability, Media, MediaError, Medium, fault};

/// Where the kernel describes devices.
const SYSFS: &str = "/sys";
/// Folders between a device and its region: two at the most, and some to spare.
const MAX_DEPTH: usize = 8;

/// How something is mapped.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MappingOptions {
    /// The platform keeps what has reached its memory when power fails, whatever the kernel says.
    pub power_safe: bool,
    /// Where the kernel describes devices: `/sys`, unless a test says something else.
    pub sysfs: PathBuf,
}

impl Default for MappingOptions {
    fn default() -> Self {
        Self { power_safe: false, sysfs: PathBuf::from(SYSFS) }
    }
}

/// Mapped memory. Its file is to have all of its space: a store to a hole for which there is no
/// space fails, as one to bad memory does.
#[derive(Debug)]
pub struct Mapping {
    base: *mut u8,
    len: usize,
    /// Keeps the device open, and with it the lock that its owner has.
    file: Arc<File>,
    medium: Medium,
    durability: Durability,
    /// Caches have to be written back: they are lost when power fails.
    writes_back: Option<WriteBack>,
    /// There are bad ranges, so that nobody has to look for them elsewhere.
    has_bad: AtomicBool,
    bad: RwLock<Box<[Range<u64>]>>,
}

// SAFETY: the memory belongs to the mapping until it is dropped, and can be touched by any thread;
// all access goes through routines for which it does not matter who else writes there.
unsafe impl Send for Mapping {}
// SAFETY: the same.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Opens a device or file, and maps it.
    ///
    /// # Errors
    /// It can't be opened, or as [`Mapping::from_file`].
    pub fn open(path: &Path, options: &MappingOptions) -> Result<Self, MediaError> {
        let file = File::options().read(true).write(true).open(path);
        Self::from_file(Arc::new(file.map_err(MediaError::os("open it"))?), options)
    }

    /// Maps all of an open device or file: a character device and a file with DAX in such a way
    /// that a fence makes stores durable, any other file as the kernel can.
    ///
    /// # Errors
    /// It is neither, its sysfs attributes can't be read, or the kernel refuses.
    pub fn from_file(file: Arc<File>, options: &MappingOptions) -> Result<Self, MediaError> {
        let data = file.metadata().map_err(MediaError::os("look at it"))?;
        let kind = data.file_type();
        let description = if kind.is_char_device() {
            description(&options.sysfs, "char", data.rdev())
        } else if kind.is_file() {
            description(&options.sysfs, "block", data.dev())
        } else {
            let allowed = "a character device of persistent memory, or a file";
            return Err(MediaError::Device { what: "it", found: format!("{kind:?}"), allowed });
        };
        let bytes = if kind.is_char_device() { dax_size(&description)? } else { data.len() };
        let len = usize::try_from(bytes).map_err(|_| MediaError::Device {
            what: "its size",
            found: bytes.to_string(),
            allowed: "what an address can hold",
        })?;
        fault::arm();
        let (base, medium) = map(&file, len, kind.is_char_device())?;
        let domain = domain(&description)?;
        let (durability, writes_back) = judge(medium, domain, options.power_safe, &file);
        Ok(Self {
            base,
            len,
            file,
            medium,
            durability,
            writes_back,
            has_bad: AtomicBool::new(false),
            bad: RwLock::default(),
        })
    }

    /// How it is mapped.
    #[must_use]
    pub const fn medium(&self) -> Medium {
        self.medium
    }

    /// What becomes of stores after a fence and, where it is no device and no file with DAX, after
    /// a sync.
    #[must_use]
    pub const fn durability(&self) -> Durability {
        self.durability
    }

    /// Its file.
    #[must_use]
    pub const fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Makes durable what was stored before, where a fence does not. May take long.
    ///
    /// # Errors
    /// What the kernel answered. What was stored may be durable or not.
    pub fn sync(&self) -> Result<(), MediaError> {
        engine::fence();
        if self.medium != Medium::File || self.durability != Durability::PowerSafe {
            return Ok(());
        }
        // SAFETY: the range is that of the mapping.
        let synced = unsafe { msync(self.base.cast(), self.len, MsyncFlags::SYNC) };
        synced.map_err(MediaError::os("sync it"))
    }

    /// These ranges are not touched from now on; those that were not before may be again.
    pub fn set_bad(&self, bad: Vec<Range<u64>>) {
        let has_bad = !bad.is_empty();
        // In this order a reader that is told that there are none has one that is on its way.
        *self.bad.write().unwrap_or_else(PoisonError::into_inner) = bad.into();
        self.has_bad.store(has_bad, Ordering::Release);
    }

    /// The ranges that are not touched.
    #[must_use]
    pub fn bad(&self) -> Vec<Range<u64>> {
        self.bad.read().unwrap_or_else(PoisonError::into_inner).to_vec()
    }

    /// Where a range is in memory, if it is all there and not known to be bad.
    fn place(&self, at: u64, len: usize) -> Result<*mut u8, MediaError> {
        let end = at.saturating_add(len as u64);
        let inside = usize::try_from(at).ok().filter(|_| end <= self.len as u64);
        let Some(offset) = inside else {
            return Err(MediaError::Range { at, end, len: self.len as u64 });
        };
        if self.has_bad.load(Ordering::Acquire) {
            let bad = self.bad.read().unwrap_or_else(PoisonError::into_inner);
            let met = bad.iter().find(|run| run.start < end && at < run.end);
            if let Some(run) = met {
                return Err(MediaError::KnownBad { at: run.start.max(at) });
            }
        }
        Ok(self.base.wrapping_add(offset))
    }

    /// Stores through the caches, and writes the lines back.
    fn store_part(&self, to: *mut u8, from: *const u8, len: usize) -> usize {
        // SAFETY: the caller has checked that the range lies in the mapping, and `from` is a slice.
        let left = unsafe { engine::copy(to, from, len) };
        if left == 0 { self.write_lines_back(to, len) } else { left }
    }

    /// Writes the lines of a range back, where that is needed. Gives all of its bytes as left where
    /// one was found bad.
    fn write_lines_back(&self, at: *mut u8, len: usize) -> usize {
        let Some(how) = self.writes_back else { return 0 };
        let before = at.addr() % LINE;
        let lines = (before + len).next_multiple_of(LINE);
        // SAFETY: the lines of a range of the mapping lie in it, as it begins and ends at pages.
        let left = unsafe { engine::write_back(how, at.wrapping_sub(before), lines) };
        if left == 0 { 0 } else { len }
    }
}

/// Stores `len` bytes to `to`: the ragged ends by `part`, the whole lines between by `lines`. Each
/// gives what is left of it, and gets its place from the start. Gives what is left of everything.
fn in_lines(
    to: *mut u8,
    len: usize,
    part: impl Fn(usize, usize) -> usize,
    lines: impl Fn(usize, usize) -> usize,
) -> usize {
    let head = to.addr().wrapping_neg() % LINE;
    let head = head.min(len);
    let whole = (len - head) / LINE * LINE;
    let tail = len - head - whole;
    let left = if head > 0 { part(0, head) } else { 0 };
    if left > 0 {
        return left + whole + tail;
    }
    let left = if whole > 0 { lines(head, whole) } else { 0 };
    if left > 0 {
        return left + tail;
    }
    if tail > 0 { part(head + whole, tail) } else { 0 }
}

fn ended(at: u64, len: usize, left: usize) -> Result<(), MediaError> {
    match left {
        0 => Ok(()),
        left => Err(MediaError::Failed { at: at + (len - left) as u64 }),
    }
}

impl Media for Mapping {
    fn len(&self) -> u64 {
        self.len as u64
    }

    fn read(&self, at: u64, to: &mut [u8]) -> Result<(), MediaError> {
        let from = self.place(at, to.len())?;
        // SAFETY: `place` keeps the range inside the mapping, and `to` is memory of this process
        // outside of it.
        let left = unsafe { engine::copy(to.as_mut_ptr(), from, to.len()) };
        ended(at, to.len(), left)
    }

    fn write(&self, at: u64, from: &[u8]) -> Result<(), MediaError> {
        let to = self.place(at, from.len())?;
        let source = |start: usize| from[start..].as_ptr();
        let left = in_lines(
            to,
            from.len(),
            |start, len| self.store_part(to.wrapping_add(start), source(start), len),
            // SAFETY: `place` keeps the range inside the mapping; `in_lines` gives whole lines.
            |start, len| unsafe { engine::stream(to.wrapping_add(start), source(start), len) },
        );
        ended(at, from.len(), left)
    }

    fn zero(&self, at: u64, len: u64) -> Result<(), MediaError> {
        let end = at.saturating_add(len);
        let range = || MediaError::Range { at, end, len: self.len as u64 };
        let bytes = usize::try_from(len).map_err(|_| range())?;
        let to = self.place(at, bytes)?;
        let zeroes = [0; LINE];
        let left = in_lines(
            to,
            bytes,
            |start, len| self.store_part(to.wrapping_add(start), zeroes.as_ptr(), len),
            // SAFETY: `place` keeps the range inside the mapping; `in_lines` gives whole lines.
            |start, len| unsafe { engine::zero(to.wrapping_add(start), len) },
        );
        ended(at, bytes, left)
    }

    fn fence(&self) {
        engine::fence();
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is that of the mapping, and nobody has it any more.
        if let Err(error) = unsafe { munmap(self.base.cast(), self.len) } {
            // It only ever fails for ranges that are none: the memory stays until the process ends.
            debug_assert!(false, "unmapping: {error}");
        }
    }
}

/// Maps so that the file system has nothing left to do after a store, where that can be.
fn map(file: &File, len: usize, is_device: bool) -> Result<(*mut u8, Medium), MediaError> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let with = |flags| {
        // SAFETY: a mapping at an address that the kernel chooses takes nobody's memory.
        unsafe { mmap(std::ptr::null_mut(), len, access, flags, file.as_fd(), 0) }
    };
    match with(MapFlags::SHARED_VALIDATE | MapFlags::SYNC) {
        Ok(base) => {
            let medium = if is_device { Medium::DevDax } else { Medium::DaxFile };
            Ok((base.cast(), medium))
        }
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INVAL) if !is_device => {
            let base = with(MapFlags::SHARED).map_err(MediaError::os("map it"))?;
            Ok((base.cast(), Medium::File))
        }
        Err(error) => Err(MediaError::os("map it with MAP_SYNC")(error)),
    }
}

/// What becomes of stores, and whether lines have to be written back for it.
fn judge(
    medium: Medium,
    domain: Domain,
    power_safe: bool,
    file: &File,
) -> (Durability, Option<WriteBack>) {
    let known = domain != Domain::Unknown || power_safe;
    let durability = match medium {
        _ if cfg!(not(target_arch = "x86_64")) && medium != Medium::File => Durability::RestartSafe,
        Medium::DevDax | Medium::DaxFile if known => Durability::PowerSafe,
        Medium::DevDax | Medium::DaxFile => Durability::RestartSafe,
        Medium::File => match fstatfs(file) {
            Ok(fs) if fs.filesystem_type() == TMPFS_MAGIC => Durability::RestartSafe,
            _ => Durability::PowerSafe,
        },
    };
    let caches_last = domain == Domain::CpuCache || medium == Medium::File;
    (durability, (!caches_last).then(WriteBack::best))
}

/// The folder in which the kernel describes a device.
fn description(sysfs: &Path, kind: &str, number: u64) -> PathBuf {
    let (major, minor) = (nix::sys::stat::major(number), nix::sys::stat::minor(number));
    sysfs.join("dev").join(kind).join(format!("{major}:{minor}"))
}

/// Bytes of a character device, whose file says that it has none.
fn dax_size(description: &Path) -> Result<u64, MediaError> {
    let text = fs::read_to_string(description.join("size"))
        .map_err(MediaError::os("read its size in sysfs"))?;
    text.trim().parse().map_err(|_| MediaError::Device {
        what: "its size in sysfs",
        found: format!("{:?}", text.trim()),
        allowed: "a number of bytes",
    })
}

/// What the region says that a device is in, however deep.
fn domain(description: &Path) -> Result<Domain, MediaError> {
    let Ok(mut folder) = fs::canonicalize(description) else { return Ok(Domain::Unknown) };
    for _ in 0..MAX_DEPTH {
        match fs::read_to_string(folder.join("persistence_domain")) {
            Ok(text) => {
                return Ok(match text.trim() {
                    "cpu_cache" => Domain::CpuCache,
                    "memory_controller" => Domain::MemoryController,
                    _ => Domain::Unknown,
                });
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(MediaError::os("read the persistence domain")(error)),
        }
        if !folder.pop() {
            break;
        }
    }
    Ok(Domain::Unknown)
}
