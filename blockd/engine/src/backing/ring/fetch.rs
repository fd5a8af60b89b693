//! Requests of ublk's queues: fetched, and answered with the fetch of the next.
//!
//! The numbers are those of the kernel's `linux/ublk_cmd.h`.

use std::fs::File;
use std::os::fd::RawFd;
use std::sync::Arc;

use io_uring::squeue::Entry;
use io_uring::{opcode, types};

use super::memory::AreaId;
use super::{Record, Ring};
use crate::block::Buffer;

/// `UBLK_U_IO_FETCH_REQ`: `_IOWR('u', 0x20, struct ublksrv_io_cmd)`, and those that follow it.
const FETCH: u32 = command(0x20);
const COMMIT_AND_FETCH: u32 = command(0x21);
const REGISTER_BUFFER: u32 = command(0x23);
const UNREGISTER_BUFFER: u32 = command(0x24);
/// `UBLK_AUTO_BUF_REG_FALLBACK`: a request whose pages could not be put into the table is delivered
/// all the same, with a flag.
const FALLBACK: u64 = 1 << 16;
/// Where an entry's address is. The library sets it for other operations only.
const ADDRESS_AT: usize = 16;

/// Operations that are for everything but requests of queues.
const FOR_OTHERS: usize = 2048;

const fn command(number: u32) -> u32 {
    (3 << 30) | (16 << 16) | ((b'u' as u32) << 8) | number
}

/// Which request of which queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueTag {
    /// The open `/dev/ublkcN`, by its own number: up to Linux 6.12 a file in the ring's table is
    /// closed only when every older operation on that table has ended, which those of idle
    /// clients do not, and the kernel deletes no device whose file is open.
    pub file: RawFd,
    /// The queue's number.
    pub queue: u16,
    /// The request's.
    pub tag: u16,
}

/// `struct ublksrv_io_cmd`.
#[repr(C)]
#[derive(zerocopy::IntoBytes, zerocopy::Immutable)]
struct IoCommand {
    queue: u16,
    tag: u16,
    result: i32,
    address: u64,
}

impl QueueTag {
    fn bytes(self, result: i32, address: u64) -> [u8; 16] {
        let Self { queue, tag, .. } = self;
        zerocopy::transmute!(IoCommand { queue, tag, result, address })
    }
}

impl Ring {
    /// Memory for the requests of a queue: `pieces` pieces of equal size, or with `own_memory`
    /// false the requests' own pages. Keeps operations for them.
    pub fn add_area(
        &mut self,
        pieces: u16,
        piece_bytes: u32,
        own_memory: bool,
    ) -> std::io::Result<AreaId> {
        let most = self.records.most().saturating_sub(FOR_OTHERS);
        if self.reserved + usize::from(pieces) > most {
            let problem = format!(
                "its queues have {} of the {most} requests that a worker can serve: {pieces} more \
                 need devices with fewer queues or less depth, or more workers",
                self.reserved
            );
            return Err(std::io::Error::other(problem));
        }
        if !own_memory && self.zero_file.is_none() {
            let zeroes = Arc::new(File::open("/dev/zero")?);
            self.zero_file = Some(self.add_file(&zeroes)?);
        }
        let area = self.memory.add_area(&self.ring, pieces, piece_bytes, own_memory)?;
        self.reserved += usize::from(pieces);
        Ok(area)
    }

    /// The memory of one request of a queue, which lends it only once at a time.
    #[must_use]
    pub fn piece(&self, area: AreaId, piece: u16) -> Option<Buffer> {
        self.memory.piece(area, piece)
    }

    /// Gives back an area of `pieces` pieces, none of which is in use.
    pub fn remove_area(&mut self, area: AreaId, pieces: u16) {
        self.reserved -= usize::from(pieces).min(self.reserved);
        self.memory.remove_area(&self.ring, area);
    }

    /// Starts to wait for a request, after answering the one before it, if any, with the number of
    /// bytes or an error number below 0. The kernel fills the memory with what is to be written,
    /// and takes from it what was read.
    pub fn fetch(
        &mut self,
        token: u64,
        at: QueueTag,
        answer: Option<i32>,
        buffer: &Buffer,
    ) -> std::io::Result<()> {
        let place = buffer.place();
        let operation = if answer.is_some() { COMMIT_AND_FETCH } else { FETCH };
        let result = answer.unwrap_or(0);
        let entry = match self.memory.entry(place) {
            Some(entry) => {
                let command = at.bytes(result, 0);
                with_address(queue_command(at, operation, command), u64::from(entry) | FALLBACK)
            }
            None => {
                let start = self.memory.address(Some(place), 0).start;
                queue_command(at, operation, at.bytes(result, start.expose_provenance() as u64))
            }
        };
        self.memory.begin(place);
        self.push(entry, Record::Fetch { token, place: Some(place) })?;
        self.fetching += 1;
        Ok(())
    }

    /// Starts to put the pages of a request into the table of buffers, where the kernel could not
    /// do it by itself; or to take them out.
    pub fn register_pages(
        &mut self,
        token: u64,
        at: QueueTag,
        buffer: &Buffer,
        register: bool,
    ) -> std::io::Result<()> {
        let entry = self.memory.entry(buffer.place());
        let entry = entry.ok_or_else(|| std::io::Error::other("memory of our own"))?;
        let operation = if register { REGISTER_BUFFER } else { UNREGISTER_BUFFER };
        let entry = queue_command(at, operation, at.bytes(0, entry.into()));
        self.push(entry, Record::Fetch { token, place: None })?;
        self.fetching += 1;
        Ok(())
    }
}

fn queue_command(at: QueueTag, operation: u32, command: [u8; 16]) -> Entry {
    opcode::UringCmd16::new(types::Fd(at.file), operation).cmd(command).build()
}

/// The entry with `addr` set, which the library has no call for.
fn with_address(mut entry: Entry, address: u64) -> Entry {
    const { assert!(size_of::<Entry>() == 64, "an entry is the kernel's struct io_uring_sqe") };
    let start: *mut u64 = (&raw mut entry).cast();
    let field = start.wrapping_byte_add(ADDRESS_AT);
    // SAFETY: the entry is `repr(C)` and as large as the kernel's struct, whose `addr` is the eight
    // aligned bytes there.
    unsafe { field.write(address) };
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_numbered_as_the_kernel_has_them() {
        // As `UBLK_U_IO_FETCH_REQ` and so on come out of the kernel's header.
        assert_eq!(FETCH, 0xc010_7520);
        assert_eq!(COMMIT_AND_FETCH, 0xc010_7521);
        assert_eq!((REGISTER_BUFFER, UNREGISTER_BUFFER), (0xc010_7523, 0xc010_7524));
    }

    #[test]
    fn a_command_is_laid_out_as_the_kernel_reads_it() {
        let at = QueueTag { file: 7, queue: 2, tag: 0x0301 };
        let expected = [2, 0, 1, 3, 0xfb, 0xff, 0xff, 0xff, 0x08, 7, 6, 5, 4, 3, 2, 1];
        assert_eq!(at.bytes(-5, 0x0102_0304_0506_0708), expected);
        let entry = with_address(queue_command(at, FETCH, expected), 0x1122_3344_5566_7788);
        let text = format!("{entry:?}");
        assert!(text.contains("op_code: 46"), "{text}");
    }
}
