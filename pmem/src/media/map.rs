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
    /// The platform keeps data that has reached its memory when power fails, whatever the kernel
    /// reports.
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
    /// A fence makes stores as durable as they get.
    is_write_through: bool,
    _known: fault::Known,
    /// Whether there are bad ranges, so that the common case needs no search.
    has_bad: AtomicBool,
    bad: RwLock<Box<[Range<u64>]>>,
}

// SAFETY: the memory belongs to the mapping until it is dropped, and can be touched by any thread;
// all access goes through routines that allow concurrent writes.
unsafe impl Send for Mapping {}
// SAFETY: the same.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Opens a device or file, and maps it.
    ///
    /// # Errors
    /// The file cannot be opened, or as [`Mapping::from_file`].
    pub fn open(path: &Path, options: &MappingOptions) -> Result<Self, MediaError> {
        let file = File::options().read(true).write(true).open(path);
        Self::from_file(Arc::new(file.map_err(MediaError::os("open it"))?), options)
    }

    /// Maps all of an open device or file: a character device and a file with DAX in such a way
    /// that a fence makes stores durable, any other file as the kernel can.
    ///
    /// # Errors
    /// The file is neither, its sysfs attributes cannot be read, or the kernel refuses. A file with
    /// holes is not refused, but must have none: see [`Mapping`].
    pub fn from_file(file: Arc<File>, options: &MappingOptions) -> Result<Self, MediaError> {
        let data = file.metadata().map_err(MediaError::os("read its metadata"))?;
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
        let domain = domain(&description)?;
        fault::arm().map_err(MediaError::os("catch SIGBUS"))?;
        let (base, medium) = map(&file, len, kind.is_char_device())?;
        let (durability, writes_back) = judge(medium, domain, options.power_safe, &file);
        let is_mapped_through = medium != Medium::File && cfg!(target_arch = "x86_64");
        Ok(Self {
            base,
            len,
            file,
            medium,
            durability,
            writes_back,
            is_write_through: is_mapped_through && durability == Durability::PowerSafe,
            _known: fault::Known::new(&(base.addr()..base.addr() + len)),
            has_bad: AtomicBool::new(false),
            bad: RwLock::default(),
        })
    }

    /// How it is mapped.
    #[must_use]
    pub const fn medium(&self) -> Medium {
        self.medium
    }

    /// Returns the durability of stores after a fence and, without a device or DAX, after a sync.
    #[must_use]
    pub const fn durability(&self) -> Durability {
        self.durability
    }

    /// Whether a fence makes stores durable, so that there is nothing left to sync.
    #[must_use]
    pub const fn is_write_through(&self) -> bool {
        self.is_write_through
    }

    /// Its file.
    #[must_use]
    pub const fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Makes earlier stores as durable as the kernel can, where a fence does not. May take long. A
    /// device has nothing to sync with.
    ///
    /// # Errors
    /// The kernel's error. The stores may be durable or not.
    pub fn sync(&self) -> Result<(), MediaError> {
        engine::fence();
        if self.is_write_through || self.medium == Medium::DevDax {
            return Ok(());
        }
        // SAFETY: the range is that of the mapping.
        let synced = unsafe { msync(self.base.cast(), self.len, MsyncFlags::SYNC) };
        synced.map_err(MediaError::os("sync it"))
    }

    /// Sets the ranges that are not touched from now on; others may be again.
    pub fn set_bad(&self, bad: Vec<Range<u64>>) {
        let has_bad = !bad.is_empty();
        // In this order a reader that sees no bad range has one on its way at most.
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
/// returns its rest, and gets its offset from the start. Returns the rest of everything.
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
        // SAFETY: the range is that of the mapping, and has no user any more.
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
        // SAFETY: a mapping at an address that the kernel chooses overlaps no other memory.
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

/// Returns the durability of stores, and whether cache lines have to be written back for it.
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
            Ok(fs) if fs.filesystem_type() == TMPFS_MAGIC => {
                // Memory without a name ends with the last process that has it open.
                let has_name = file.metadata().is_ok_and(|data| data.nlink() > 0);
                if has_name { Durability::RestartSafe } else { Durability::Volatile }
            }
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

/// Returns the persistence domain of the region that a device is in, at any depth.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Set in the process that is to die.
    const DIES: &str = "BLOCKD_TEST_DIES_ELSEWHERE";

    /// The same memory and the same fault, but not in a routine of ours.
    #[test]
    fn memory_that_fails_elsewhere_still_kills() {
        if std::env::var_os(DIES).is_some() {
            let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
            let file = nix::sys::memfd::memfd_create(c"blockd-test", flags).unwrap();
            let file = Arc::new(File::from(file));
            file.set_len(8192).unwrap();
            let map = Mapping::from_file(Arc::clone(&file), &MappingOptions::default()).unwrap();
            file.set_len(4096).unwrap();
            assert!(map.read(4096, &mut [0; 8]).is_err());
            // SAFETY: the address is mapped; the range after it is unmapped on purpose.
            let byte = unsafe { map.base.wrapping_add(4096).read_volatile() };
            unreachable!("{byte}");
        }
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        let name = "media::map::tests::memory_that_fails_elsewhere_still_kills";
        let output = command.env(DIES, "1").args(["--exact", name]).output().unwrap();
        let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
        assert_eq!(signal, Some(libc::SIGBUS), "{output:?}");
    }

    /// Every processor of this kind has the routine, also where another one is faster.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn moves_end_where_memory_does() {
        let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
        let file = nix::sys::memfd::memfd_create(c"blockd-test", flags).unwrap();
        let file = Arc::new(File::from(file));
        file.set_len(8192).unwrap();
        let map = Mapping::from_file(Arc::clone(&file), &MappingOptions::default()).unwrap();
        map.write(0, &[7; 8192]).unwrap();
        file.set_len(4096).unwrap();
        for at in [0, 1000, 4095] {
            let (mut to, from) = (vec![0; 8192 - at], map.base.wrapping_add(at));
            // SAFETY: the moved range is mapped, and the rest unmapped on purpose.
            let left = unsafe { engine::moved(to.as_mut_ptr(), from, to.len()) };
            assert_eq!(left, 4096);
            assert!(to[..4096 - at].iter().all(|byte| *byte == 7), "from {at}");
            assert!(to[4096 - at..].iter().all(|byte| *byte == 0), "from {at}");
        }
    }

    /// Sends this process the signal of a kernel that finds bad memory before an access.
    fn send_early_signal(address: *mut u8) {
        let mut words = [0_u64; 16];
        // Signal, errno and code, then the address: how the kernel lays it out.
        words[0] = u64::from(libc::SIGBUS.cast_unsigned());
        words[1] = u64::from(libc::BUS_MCEERR_AO.cast_unsigned());
        words[2] = address.addr() as u64;
        let (id, number) = (std::process::id(), libc::SYS_rt_tgsigqueueinfo);
        let thread = rustix::thread::gettid().as_raw_nonzero();
        // SAFETY: the words are as long as the kernel reads, and only this thread gets the signal.
        let sent = unsafe {
            libc::syscall(number, id, thread.get(), libc::SIGBUS, (&raw const words).addr())
        };
        assert_eq!(sent, 0, "{}", std::io::Error::last_os_error());
    }

    #[test]
    fn news_of_bad_memory_in_a_mapping_does_not_kill() {
        const ELSEWHERE: &str = "BLOCKD_TEST_NEWS_ELSEWHERE";
        let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
        let file = File::from(nix::sys::memfd::memfd_create(c"blockd-test", flags).unwrap());
        file.set_len(8192).unwrap();
        let map = Mapping::from_file(Arc::new(file), &MappingOptions::default()).unwrap();
        if std::env::var_os(ELSEWHERE).is_some() {
            let mut other = 0_u8;
            send_early_signal(&raw mut other);
            return;
        }
        send_early_signal(map.base);
        send_early_signal(map.base.wrapping_add(8191));
        map.read(0, &mut [0; 8192]).unwrap();
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        let name = "media::map::tests::news_of_bad_memory_in_a_mapping_does_not_kill";
        let output = command.env(ELSEWHERE, "1").args(["--exact", name]).output().unwrap();
        let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
        assert_eq!(signal, Some(libc::SIGBUS), "{output:?}");
    }

    #[test]
    fn the_attributes_of_a_region_are_found_above_its_devices() {
        let folder = std::env::temp_dir().join(format!("blockd-pmem-{}", std::process::id()));
        let device = folder.join("devices/ndbus0/region0/pfn0.1/block/pmem0/pmem0p1");
        fs::create_dir_all(&device).unwrap();
        let kinds = [
            (None, Domain::Unknown),
            (Some("cpu_cache\n"), Domain::CpuCache),
            (Some("memory_controller\n"), Domain::MemoryController),
            (Some("unknown\n"), Domain::Unknown),
        ];
        for (text, expected) in kinds {
            if let Some(text) = text {
                fs::write(folder.join("devices/ndbus0/region0/persistence_domain"), text).unwrap();
            }
            assert_eq!(domain(&device).unwrap(), expected);
        }
        assert_eq!(domain(&folder.join("no/such/device")).unwrap(), Domain::Unknown);
        fs::write(device.join("size"), "134217728\n").unwrap();
        assert_eq!(dax_size(&device).unwrap(), 128 << 20);
        fs::write(device.join("size"), "many").unwrap();
        assert!(dax_size(&device).is_err());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn only_a_known_domain_is_power_safe() {
        let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
        let file = File::from(nix::sys::memfd::memfd_create(c"blockd-test", flags).unwrap());
        let of = |medium, domain, power_safe| judge(medium, domain, power_safe, &file);
        for medium in [Medium::DevDax, Medium::DaxFile] {
            let best = Some(WriteBack::best());
            let (unknown, known) = (Durability::RestartSafe, Durability::PowerSafe);
            let known = if cfg!(target_arch = "x86_64") { known } else { unknown };
            assert_eq!(of(medium, Domain::Unknown, false), (unknown, best));
            assert_eq!(of(medium, Domain::Unknown, true), (known, best));
            assert_eq!(of(medium, Domain::MemoryController, false), (known, best));
            assert_eq!(of(medium, Domain::CpuCache, false), (known, None));
        }
        // Regardless of the configuration.
        assert_eq!(of(Medium::File, Domain::CpuCache, true).0, Durability::Volatile);
    }
}
