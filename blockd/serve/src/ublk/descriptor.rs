//! The kernel's descriptors of a queue's requests, in shared memory.

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::{BorrowedFd, RawFd};

use libublk::io::UblkDev;
use memmap2::{MmapOptions, MmapRaw};

/// Most requests that the kernel lets a queue have: its queues' descriptors lie as far apart as
/// this many take (`UBLK_MAX_QUEUE_DEPTH`).
const MAX_DEPTH: usize = 4096;
const PAGE: usize = 4096;

/// `struct ublksrv_io_desc` of the kernel's `linux/ublk_cmd.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Descriptor {
    /// The operation in the low byte, flags above.
    pub(super) operation_and_flags: u32,
    /// Sectors of 512 bytes.
    pub(super) sectors: u32,
    /// The first of them.
    pub(super) start_sector: u64,
    /// Not used.
    address: u64,
}

impl Descriptor {
    #[cfg(test)]
    pub(super) const fn new(operation_and_flags: u32, start_sector: u64, sectors: u32) -> Self {
        Self { operation_and_flags, sectors, start_sector, address: 0 }
    }
}

/// Another descriptor of the `/dev/ublkcN` of a device, which the kernel lets be opened once.
/// libublk has done that, and only the number of its descriptor is known.
pub(super) fn opened(device: &UblkDev) -> io::Result<File> {
    // SAFETY: libublk keeps its descriptor open as long as the device is there, which is borrowed.
    // Safe code can't name it by number but by a call that confined services do not have.
    unsafe { duplicate(device.tgt.fds[0]) }
}

/// A new descriptor of the same open file.
///
/// # Safety
/// `number` must be that of an open descriptor.
unsafe fn duplicate(number: RawFd) -> io::Result<File> {
    // SAFETY: the caller's obligation; it is used only here.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    Ok(File::from(borrowed.try_clone_to_owned()?))
}

/// The descriptors of one queue.
#[derive(Debug)]
pub(super) struct Descriptors {
    memory: MmapRaw,
    count: usize,
}

impl Descriptors {
    /// Maps those of a queue from `/dev/ublkcN`.
    pub(super) fn map(file: &File, queue: u16, depth: u16) -> std::io::Result<Self> {
        let count = usize::from(depth);
        let apart = (MAX_DEPTH * size_of::<Descriptor>()).next_multiple_of(PAGE);
        let offset = u64::from(queue) * apart as u64;
        let len = (count * size_of::<Descriptor>()).next_multiple_of(PAGE);
        let mut options = MmapOptions::new();
        let memory = options.offset(offset).len(len).populate().map_raw_read_only(file)?;
        Ok(Self { memory, count })
    }

    /// Returns the descriptor of a request that has been fetched.
    #[must_use]
    pub(super) fn get(&self, tag: u16) -> Option<Descriptor> {
        let at = usize::from(tag);
        if at >= self.count {
            return None;
        }
        let first: *const Descriptor = self.memory.as_ptr().cast();
        let one = first.wrapping_add(at);
        // SAFETY: the mapping has room for `count` descriptors, is aligned to a page, and any bytes
        // are a descriptor. The kernel writes this one before it hands the request out, and not
        // again until it is answered.
        Some(unsafe { one.read_volatile() })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{Read, Seek, SeekFrom, Write};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_number_gives_the_same_open_file() {
        let path = std::env::temp_dir().join(format!("blockd-same-{}", std::process::id()));
        let mut file =
            File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        // SAFETY: the file is open until the end of the test.
        let mut same = unsafe { duplicate(file.as_raw_fd()) }.unwrap();
        file.write_all(b"abc").unwrap();
        // The position is that of the open file, whichever descriptor moves it.
        assert_eq!(same.stream_position().unwrap(), 3);
        same.seek(SeekFrom::Start(1)).unwrap();
        let mut rest = String::new();
        file.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "bc");
    }
}
