//! A pool's device in persistent memory, or in a file that is served in the same way.
//!
//! The file is mapped once. A header of 2 MiB names its owner and holds the lanes; the range behind
//! the header is the pool's device. A block that must not be torn goes through a lane: it is
//! written there first, then to its place, so that after any interruption and the replay of the
//! lanes it is the old one or the new one.

mod header;
pub mod namespace;
mod site;

use std::fs::File;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use blockd_mapper::io::IoError;
use blockd_pmem::media::{
    Durability, LANE_BYTES, Lanes, Mapping, MappingOptions, Media, MediaError,
};
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};
use parking_lot::Mutex;

pub use blockd_pmem::media::{Durability as Level, Medium};
pub use header::HEADER_BYTES;
pub use header::NoHeader;
use header::{COPIES, COPY_BYTES, Header, LANES};
pub use site::{SYSFS, Site};

/// Lanes of a device: one for each thread that may serve a pool, and one for the pool's own.
pub const LANE_COUNT: usize = 17;
const _: () = assert!(LANE_COUNT as u64 * LANE_BYTES <= LANES.end - LANES.start);
/// Bytes that are looked at before a device is taken for empty, at its front and at its end: marks
/// of file systems, partitions and pools lie there.
const MARKED_BYTES: u64 = 2 << 20;
/// Bytes of zeroes that are written at a time, so that others get their turn with the media.
const ZERO_BYTES: u64 = 1 << 20;
/// Bytes that are looked at, or written as zeroes through a lane, at a time.
const LOOK_BYTES: usize = 64 << 10;
static ZEROES: [u8; LOOK_BYTES] = [0; LOOK_BYTES];

/// How a device in persistent memory is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PmemOptions {
    /// The platform keeps what has reached its memory when power fails, whatever the kernel knows.
    pub power_safe: bool,
    /// Blocks of 4096 bytes are not torn.
    pub whole_blocks: bool,
    /// Whether freed space is overwritten with zeroes.
    pub erase: bool,
}

impl Default for PmemOptions {
    fn default() -> Self {
        Self { power_safe: false, whole_blocks: true, erase: true }
    }
}

/// Facts about a device in persistent memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PmemInfo {
    /// How it is mapped.
    pub medium: Medium,
    /// The durability of data that was written and fenced, or synced where it has a cache.
    pub durability: Durability,
    /// Whether data that was written and fenced needs no sync.
    pub write_through: bool,
    /// How it is used.
    pub options: PmemOptions,
    /// Where it lies.
    pub site: Site,
    /// Bytes that the kernel lists as bad.
    pub bad_bytes: u64,
}

/// The processors of each node of this host that has any.
#[must_use]
pub fn nodes() -> Vec<Vec<usize>> {
    site::nodes(Path::new(SYSFS))
}

/// The error for a device that cannot be used.
fn refused(problem: impl std::fmt::Display) -> std::io::Error {
    std::io::Error::other(problem.to_string())
}

/// Whether a file has our header, whole or damaged.
#[must_use]
pub fn has_header(file: &File) -> bool {
    let read = |at| {
        let mut page = [0; COPY_BYTES];
        file.read_exact_at(&mut page, at).ok().map(|()| page)
    };
    let copies = COPIES.map(read);
    let found = copies.iter().flatten().any(|copy| Header::decode(copy) != Err(NoHeader::Foreign));
    found && copies.iter().all(Option::is_some)
}

/// Refuses what can't be mapped as memory, and says what to name instead.
pub(super) fn check(file: &File) -> std::io::Result<()> {
    let kind = file.metadata()?.file_type();
    if kind.is_block_device() {
        return Err(refused(
            "it is a block device, whose mapping is page cache: name a namespace in devdax mode \
             (/dev/daxX.Y), or a file on a file system that is mounted with -o dax",
        ));
    }
    if !kind.is_char_device() && !kind.is_file() {
        return Err(refused("it is neither a file nor a character device of persistent memory"));
    }
    Ok(())
}

/// A mapped device.
#[derive(Debug)]
pub struct Pmem {
    map: Arc<Mapping>,
    info: PmemInfo,
    bad_bytes: AtomicU64,
    /// Nothing of it is overwritten before the next open: it is no part of the pool yet.
    is_spare: AtomicBool,
    /// The header that its owner has found or created.
    started: OnceLock<Started>,
}

#[derive(Debug)]
struct Started {
    lanes: Option<Lanes<Arc<Mapping>>>,
    header: Mutex<Header>,
    /// Freed extents may have been left as they were by the owner before.
    erase_was_under_way: bool,
}

impl Pmem {
    /// Maps a device, or a file whose space is allocated. Nothing of it is read yet.
    pub(super) fn map(file: &Arc<File>, options: PmemOptions) -> std::io::Result<Self> {
        let site = Site::find(Path::new(SYSFS), file)?;
        let wish = MappingOptions { power_safe: options.power_safe, ..MappingOptions::default() };
        let map = Mapping::from_file(Arc::clone(file), &wish).map_err(refused)?;
        if map.len() <= 2 * HEADER_BYTES {
            let bytes = map.len();
            return Err(refused(format_args!("it has {bytes} bytes, and 4 MiB are too few")));
        }
        let (medium, durability) = (map.medium(), map.durability());
        let on_tmpfs = fstatfs(&**file).is_ok_and(|fs| fs.filesystem_type() == TMPFS_MAGIC);
        if medium == Medium::File && !on_tmpfs {
            // Its pages are written back at any time and in any order: a lane that a loss of power
            // leaves may hold the line of one write and the data of another.
            return Err(refused(
                "it lies in the page cache of a file system without DAX: kind = \"file\" serves \
                 it, or mount the file system with -o dax",
            ));
        }
        let info = PmemInfo {
            medium,
            durability,
            write_through: medium != Medium::File && durability == Durability::PowerSafe,
            options,
            site,
            bad_bytes: 0,
        };
        let (map, bad_bytes, started) = (Arc::new(map), AtomicU64::new(0), OnceLock::new());
        let pmem = Self { map, info, bad_bytes, is_spare: AtomicBool::new(false), started };
        pmem.note_bad();
        Ok(pmem)
    }

    /// Bytes of the device that the pool sees.
    pub(super) fn len(&self) -> u64 {
        self.map.len() - HEADER_BYTES
    }

    /// Facts about the device.
    #[must_use]
    pub const fn info(&self) -> &PmemInfo {
        &self.info
    }

    /// The processors that are near, where the kernel reports them.
    #[must_use]
    pub fn nearby(&self) -> Vec<usize> {
        self.info.site.cpus(Path::new(SYSFS))
    }

    /// Reads the kernel's list of bad blocks, which are not touched from now on. Returns them, in
    /// bytes of the device that the pool sees; those in front of it are at 0.
    pub fn note_bad(&self) -> Vec<(u64, u64)> {
        let bad = self.info.site.bad(self.map.len());
        let seen = bad.iter().map(|run| {
            let start = run.start.saturating_sub(HEADER_BYTES);
            (start, run.end.saturating_sub(HEADER_BYTES).max(start + 1) - start)
        });
        let seen = seen.collect();
        let bytes = bad.iter().map(|run| run.end - run.start).sum();
        self.bad_bytes.store(bytes, Ordering::Relaxed);
        self.map.set_bad(bad);
        seen
    }

    /// Bytes that the kernel lists as bad.
    pub(super) fn bad_bytes(&self) -> u64 {
        self.bad_bytes.load(Ordering::Relaxed)
    }

    /// Reads the header. For the owner: lanes are not replayed by others.
    fn header(&self) -> Result<Header, NoHeader> {
        let read = |at| {
            let mut page = [0; COPY_BYTES];
            self.map.read(at, &mut page).ok().map(|()| page)
        };
        let copies = COPIES.map(read);
        Header::newest([copies[0].as_ref(), copies[1].as_ref()])
    }

    /// Looks for our mark.
    pub fn find_header(&self) -> Result<(), NoHeader> {
        self.header().map(|_| ())
    }

    /// Formats an empty device. Its owner calls this. A device with content, and without our mark,
    /// is left as it is.
    pub(super) fn format(&self, uuid: [u8; 16]) -> std::io::Result<()> {
        match self.header() {
            Ok(_) => {}
            Err(NoHeader::Foreign) => {
                if self.info.medium == Medium::DevDax {
                    namespace::refuse_foreign(self.map.file())?;
                }
                self.refuse_used()?;
            }
            Err(other) => return Err(refused(other)),
        }
        if self.info.medium != Medium::DevDax {
            // Whatever a file system has to do at the first store to a block, it has done then.
            self.zero_plainly(0, self.map.len()).map_err(refused)?;
        }
        let header = Header {
            uuid,
            region: self.region(),
            size: self.map.len(),
            lanes_at: LANES.start,
            lanes_len: LANE_COUNT as u64 * LANE_BYTES,
            lanes: u32::try_from(LANE_COUNT).unwrap_or(0),
            // What this owner frees is not overwritten yet if it dies.
            erase_under_way: self.info.options.erase,
            generation: 1,
        };
        let area = header.lanes_at..header.lanes_at + header.lanes_len;
        let lanes = Lanes::format(Arc::clone(&self.map), area, LANE_COUNT).map_err(refused)?;
        // The copy that is written last is the one that is looked at first.
        for generation in [1, 2] {
            self.write_header(&Header { generation, ..header }).map_err(refused)?;
        }
        let started = Started {
            lanes: self.info.options.whole_blocks.then_some(lanes),
            // The pool that is now made is opened with this device, without a start. A device may
            // hold what it held before; a file has just been zeroed.
            erase_was_under_way: header.erase_under_way && self.info.medium == Medium::DevDax,
            header: Mutex::new(Header { generation: 2, ..header }),
        };
        let _ = self.started.set(started);
        Ok(())
    }

    /// The same, where there is no mark of ours yet. A damaged one is an error.
    pub(super) fn format_if_new(&self, uuid: [u8; 16]) -> std::io::Result<()> {
        match self.header() {
            Ok(_) => Ok(()),
            Err(NoHeader::Foreign) => self.format(uuid),
            Err(other) => Err(refused(other)),
        }
    }

    /// Takes a device up: checks that it is ours, and finishes what was cut short. Its owner calls
    /// this, before anything else of it is read.
    pub(super) fn start(&self) -> std::io::Result<()> {
        if self.started.get().is_some() {
            return Ok(());
        }
        let header = self.header().map_err(refused)?;
        if header.size > self.map.len() {
            let (was, is) = (header.size, self.map.len());
            return Err(refused(format_args!("it had {was} bytes, and has {is}")));
        }
        let region = self.region();
        if header.region != 0 && region != 0 && header.region != region {
            let was = header.region;
            return Err(refused(format_args!("it was made in region {was:#x}, not {region:#x}")));
        }
        let area = header.lanes_at..header.lanes_at + header.lanes_len;
        let (lanes, replayed) = Lanes::open(Arc::clone(&self.map), area).map_err(refused)?;
        if replayed.writes > 0 {
            tracing::info!(writes = replayed.writes, "writes were finished that were cut short");
        }
        for range in &replayed.failed {
            let (start, end) = (range.start, range.end);
            tracing::error!(start, end, "bad memory: a write that was cut short may be torn");
        }
        let started = Started {
            lanes: self.info.options.whole_blocks.then_some(lanes),
            erase_was_under_way: header.erase_under_way,
            header: Mutex::new(header),
        };
        let _ = self.started.set(started);
        if self.info.options.erase {
            self.set_erase_under_way(true).map_err(refused)?;
        }
        Ok(())
    }

    fn region(&self) -> u64 {
        // A file may be copied elsewhere, and is still whole then.
        if self.info.medium == Medium::DevDax { self.info.site.region } else { 0 }
    }

    /// Whether what is free is to be overwritten, since a former owner may not have done that.
    #[must_use]
    pub fn is_to_be_erased(&self) -> bool {
        let was_under_way = self.started.get().is_some_and(|started| started.erase_was_under_way);
        self.info.options.erase && was_under_way
    }

    /// Notes that the device may join the pool while that is open: its former content is
    /// overwritten at the next open.
    pub fn note_spare(&self) {
        self.is_spare.store(true, Ordering::Relaxed);
    }

    /// Notes that all that is free has been overwritten, by its owner and for good.
    pub fn erase_ended(&self) -> Result<(), MediaError> {
        match self.info.options.erase && !self.is_spare.load(Ordering::Relaxed) {
            true => self.set_erase_under_way(false),
            false => Ok(()),
        }
    }

    /// Notes whether freed extents may hold what was in them.
    fn set_erase_under_way(&self, under_way: bool) -> Result<(), MediaError> {
        let Some(started) = self.started.get() else { return Ok(()) };
        let mut header = started.header.lock();
        if header.erase_under_way == under_way {
            return Ok(());
        }
        let generation = header.generation + 1;
        let next = Header { erase_under_way: under_way, generation, ..*header };
        self.write_header(&next)?;
        *header = next;
        Ok(())
    }

    fn write_header(&self, header: &Header) -> Result<(), MediaError> {
        self.map.write(header.place(), &header.encode())?;
        self.map.fence();
        self.map.sync()
    }

    /// Refuses a device that has something on it.
    fn refuse_used(&self) -> std::io::Result<()> {
        let mut bytes = vec![0; LOOK_BYTES];
        for start in [0, self.map.len().saturating_sub(MARKED_BYTES)] {
            let mut at = start;
            while at < (start + MARKED_BYTES).min(self.map.len()) {
                let len = (self.map.len() - at).min(LOOK_BYTES as u64);
                let part = &mut bytes[..usize::try_from(len).unwrap_or(0)];
                self.map.read(at, part).map_err(refused)?;
                if part.iter().any(|&byte| byte != 0) {
                    let kind = std::io::ErrorKind::AlreadyExists;
                    return Err(std::io::Error::new(kind, NoHeader::Foreign));
                }
                at += len;
            }
        }
        Ok(())
    }

    /// Where a range of the pool's device is in the mapping.
    fn place(&self, at: u64, len: u64) -> Result<u64, IoError> {
        let end = at.checked_add(len).filter(|&end| end <= self.len());
        end.map(|_| at + HEADER_BYTES).ok_or(IoError::Media)
    }

    /// Fills `to` from this byte on.
    pub fn read(&self, at: u64, to: &mut [u8]) -> Result<(), IoError> {
        let at = self.place(at, to.len() as u64)?;
        self.map.read(at, to).map_err(|error| meaning(&error))
    }

    /// Writes `from` to this byte on: as durable as it gets after a fence. An `unseen` range needs
    /// no protection against torn writes.
    pub fn write(&self, lane: usize, at: u64, from: &[u8], unseen: bool) -> Result<(), IoError> {
        let at = self.place(at, from.len() as u64)?;
        let written = match self.lanes() {
            Some(lanes) if !unseen => lanes.write(lane, at, from),
            _ => self.map.write(at, from),
        };
        written.map_err(|error| meaning(&error))
    }

    /// Writes zeroes, in the same way.
    pub fn zero(&self, lane: usize, at: u64, len: u64, unseen: bool) -> Result<(), IoError> {
        let at = self.place(at, len)?;
        let written = match self.lanes() {
            Some(lanes) if !unseen => zero_by(len, LOOK_BYTES as u64, |done, len| {
                let len = usize::try_from(len).unwrap_or(0);
                lanes.write(lane, at + done, &ZEROES[..len])
            }),
            _ => self.map.zero(at, len),
        };
        written.map_err(|error| meaning(&error))
    }

    fn lanes(&self) -> Option<&Lanes<Arc<Mapping>>> {
        self.started.get()?.lanes.as_ref()
    }

    /// Makes earlier writes as durable as possible without a sync.
    pub fn fence(&self) {
        self.map.fence();
    }

    /// Makes durable what was written, whatever that takes.
    pub fn sync(&self) -> Result<(), IoError> {
        self.map.fence();
        self.map.sync().map_err(|error| meaning(&error))
    }

    /// Overwrites an unallocated range. May take long.
    pub(super) fn erase(&self, at: u64, len: u64) -> Result<(), IoError> {
        let at = self.place(at, len)?;
        self.zero_plainly(at, len).map_err(|error| meaning(&error))
    }

    fn zero_plainly(&self, at: u64, len: u64) -> Result<(), MediaError> {
        let zeroed = zero_by(len, ZERO_BYTES, |done, len| self.map.zero(at + done, len));
        self.map.fence();
        zeroed
    }
}

/// Calls `zero` for pieces of at most `piece` bytes.
fn zero_by(
    len: u64,
    most: u64,
    mut zero: impl FnMut(u64, u64) -> Result<(), MediaError>,
) -> Result<(), MediaError> {
    let mut done = 0;
    while done < len {
        let piece = (len - done).min(most);
        zero(done, piece)?;
        done += piece;
    }
    Ok(())
}

fn meaning(error: &MediaError) -> IoError {
    tracing::debug!(%error, "persistent memory can't be used");
    IoError::Media
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file is zero when it has been formatted; a namespace holds what its former owner wrote.
    #[test]
    fn a_formatted_device_is_to_be_erased_until_its_pool_has_been_closed() {
        let name = format!("/dev/shm/blockd-erase-{}", std::process::id());
        let mut options = std::fs::OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true).open(&name);
        std::fs::remove_file(&name).unwrap();
        let file = Arc::new(file.unwrap());
        file.write_all_at(&vec![0; 8 << 20], 0).unwrap();
        let mapped = |medium, erase| {
            let options = PmemOptions { erase, ..PmemOptions::default() };
            let mut pmem = Pmem::map(&file, options).unwrap();
            pmem.info.medium = medium;
            pmem
        };
        for (medium, erase, expected) in [
            (Medium::File, true, false),
            (Medium::DevDax, true, true),
            (Medium::DevDax, false, false),
        ] {
            let pmem = mapped(medium, erase);
            pmem.format([1; 16]).unwrap();
            assert_eq!(pmem.is_to_be_erased(), expected, "{medium:?} {erase}");
            // A start of what was just formatted, as its owner opens it, changes nothing.
            pmem.start().unwrap();
            assert_eq!(pmem.is_to_be_erased(), expected, "{medium:?} {erase}");
        }
        // Until that has been done, each open finds the note: also one of a file, whose first owner
        // may have died with freed extents that it had not overwritten yet.
        for medium in [Medium::DevDax, Medium::File] {
            let pmem = mapped(medium, true);
            pmem.format([1; 16]).unwrap();
            drop(pmem);
            let pmem = mapped(medium, true);
            pmem.start().unwrap();
            assert!(pmem.is_to_be_erased(), "{medium:?}");
            pmem.erase_ended().unwrap();
            drop(pmem);
            let pmem = mapped(medium, true);
            pmem.start().unwrap();
            assert!(!pmem.is_to_be_erased(), "{medium:?}");
        }
    }
}
