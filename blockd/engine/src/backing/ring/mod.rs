//! An io_uring that owns all memory it gives to the kernel, so that its interface is safe.
//!
//! The ring carries IO between its memory and files, the engine's commands with memory of their
//! own, what is received from and sent to clients, and the requests of ublk's queues. Every
//! operation has a record here from the moment it is pushed until its completion is reaped; memory
//! is not reused before that.

mod clients;
mod fetch;
mod files;
mod media;
mod memory;
mod records;

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use blockd_media::{Device, Doorbell};
use io_uring::squeue::Entry;
use io_uring::{IoUring, opcode, types};

use self::clients::Outgoing;
pub use self::fetch::QueueTag;
use self::files::Files;
use self::media::FileIo;
pub use self::memory::AreaId;
use self::memory::Memory;
use self::records::{Record, Records};
use super::message::Message;
use super::operation::{Ended, FileSlot, RingOptions, Socket};
use super::receive::{Chunk, Chunks};
use crate::block::Buffer;

/// Most entries that are handed to the kernel at a time.
const MAX_ENTRIES: u32 = 4096;
/// How long it is waited for something else than the end of messages, which a full socket delays:
/// about as long as a busy client takes for its next request.
const SEND_MOMENT_US: u32 = 50;

/// One thread's ring.
pub struct Ring {
    // Fields are dropped in this order: the ring ends before the memory that it knows.
    ring: IoUring,
    records: Records,
    memory: Memory,
    /// The file from which buffers that this process cannot reach are filled with zeroes.
    zero_file: Option<FileSlot>,
    /// Operations that are kept for requests of queues, and those of them that are out to wait for
    /// one.
    reserved: usize,
    fetching: usize,
    chunks: Option<Chunks>,
    files: Files,
    #[expect(clippy::vec_box, reason = "the kernel has pointers into them: they must not move")]
    idle_sends: Vec<Box<Outgoing>>,
    #[expect(clippy::vec_box, reason = "they travel in boxes")]
    idle_messages: Vec<Box<Message>>,
    doorbell: Option<Arc<Doorbell>>,
    doorbell_value: Box<u64>,
    in_flight: usize,
    unsubmitted: usize,
    /// How many of those are messages to be sent.
    unsent: usize,
    /// The kernel can wait for several completions, and for fewer when some time is over.
    waits_for_more: bool,
    enters: u64,
    pushed_io: u64,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("in_flight", &self.in_flight).finish_non_exhaustive()
    }
}

/// How often, and how far apart, a ring is tried again for which there was no memory.
const MEMORY_TRIES: u32 = 100;
const MEMORY_PAUSE: std::time::Duration = std::time::Duration::from_millis(20);

impl Ring {
    /// A ring for the calling thread, which alone may use it.
    ///
    /// The kernel gives the memory of rings back a moment after their process has ended, and counts
    /// it against the user's limit until then: a daemon that follows one that was killed waits for
    /// that, up to two seconds.
    pub fn new(options: RingOptions) -> std::io::Result<Self> {
        for _ in 0..MEMORY_TRIES {
            match Self::try_new(options) {
                Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => {
                    std::thread::sleep(MEMORY_PAUSE);
                }
                other => return other,
            }
        }
        Self::try_new(options)
    }

    fn try_new(options: RingOptions) -> std::io::Result<Self> {
        let records = options.operations.next_power_of_two();
        let entries = records.min(MAX_ENTRIES);
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            // So that an enter that waits for nothing still takes what has ended meanwhile.
            .setup_taskrun_flag()
            .setup_cqsize(records.saturating_mul(2))
            .build(entries)
            // Kernels before 6.1 know one or both of these hints not.
            .or_else(|_| IoUring::builder().setup_cqsize(records * 2).build(entries))?;
        let waits_for_more = ring.params().is_feature_min_timeout();
        let files = Files::register(&ring, options.serves)?;
        let memory = Memory::new(&ring, options.arena_bytes, options.serves)?;
        let chunks = options.serves.then(|| Chunks::register(&ring)).transpose()?;
        Ok(Self {
            ring,
            records: Records::new(records as usize),
            memory,
            zero_file: None,
            reserved: 0,
            fetching: 0,
            chunks,
            files,
            idle_sends: Vec::with_capacity(64),
            idle_messages: Vec::with_capacity(64),
            doorbell: None,
            doorbell_value: Box::new(0),
            in_flight: 0,
            unsubmitted: 0,
            unsent: 0,
            waits_for_more,
            enters: 0,
            pushed_io: 0,
        })
    }

    /// Makes a file known. The ring keeps it open.
    pub fn add_file(&mut self, file: &Arc<File>) -> std::io::Result<FileSlot> {
        self.files.add(&self.ring, file.as_raw_fd(), Arc::clone(file) as _)
    }

    /// Makes a device known. The ring keeps it open, and starts no write to it while its gate is
    /// closed.
    pub fn add_device(&mut self, device: &Device) -> std::io::Result<FileSlot> {
        let slot = self.add_file(device.file())?;
        self.files.guard(slot, device.gate().cloned());
        Ok(slot)
    }

    /// Makes a socket known. The ring keeps it open.
    pub fn add_socket(&mut self, socket: &Arc<OwnedFd>) -> std::io::Result<Socket> {
        self.files.add_socket(socket)
    }

    /// Forgets a socket. No operation on it may be out: its number may be another file's at once.
    pub fn remove_socket(&mut self, socket: Socket) {
        self.files.remove_socket(socket);
    }

    /// Forgets a file. Operations that are out keep it open in the kernel.
    pub fn remove(&mut self, slot: FileSlot) {
        self.files.remove(&self.ring, slot);
    }

    /// Allocates memory for up to 1 MiB; `None` while none is free.
    #[inline]
    pub fn allocate(&mut self, bytes: u64) -> Option<Buffer> {
        self.memory.allocate(&self.ring, bytes)
    }

    /// Gives memory back; it is used again when no operation needs it any more.
    #[expect(clippy::needless_pass_by_value, reason = "the right to use it ends")]
    #[inline]
    pub fn free(&mut self, buffer: Buffer) {
        self.memory.free(&buffer);
    }

    /// Bytes of memory that are free.
    #[must_use]
    #[inline]
    pub fn free_bytes(&self) -> u64 {
        self.memory.free_bytes()
    }

    /// Bytes of a buffer.
    #[must_use]
    #[inline]
    pub fn capacity(buffer: &Buffer) -> usize {
        buffer.bytes()
    }

    /// Whether this process can read and write a buffer's bytes. It can't where a queue's requests
    /// are their own memory.
    #[must_use]
    #[inline]
    pub fn is_reachable(&self, buffer: &Buffer) -> bool {
        self.memory.is_reachable(buffer)
    }

    /// A buffer that no operation uses; empty if it can't be reached.
    #[inline]
    pub fn bytes_mut(&mut self, buffer: &Buffer) -> &mut [u8] {
        assert!(!self.memory.is_busy(buffer.place()), "the kernel has this buffer");
        self.memory.slice_mut(buffer)
    }

    /// Zeroes a part of a buffer that no operation uses, whatever uses its other parts. It must be
    /// reachable.
    #[inline]
    pub fn zero(&mut self, buffer: &Buffer, at: usize, len: usize) {
        self.memory.slice_mut(buffer)[at..at + len].fill(0);
    }

    /// Copies bytes into a buffer that no operation uses.
    #[inline]
    pub fn copy_in(&mut self, from: &[u8], to: &Buffer, at: usize) {
        self.bytes_mut(to)[at..at + from.len()].copy_from_slice(from);
    }

    /// Operations that are out, or about to be submitted.
    #[must_use]
    #[inline]
    pub const fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Operations that can still be started.
    #[must_use]
    #[inline]
    pub const fn room(&self) -> usize {
        self.records.room()
    }

    /// Operations that can still be started without those that are kept for the answers of queues.
    #[must_use]
    #[inline]
    pub fn spare(&self) -> usize {
        self.records.room().saturating_sub(self.reserved.saturating_sub(self.fetching))
    }

    /// Calls of `io_uring_enter` so far.
    #[must_use]
    #[inline]
    pub const fn enters(&self) -> u64 {
        self.enters
    }

    /// Operations on files so far.
    #[must_use]
    #[inline]
    pub const fn file_operations(&self) -> u64 {
        self.pushed_io
    }

    /// Waits for a doorbell from now on.
    #[inline]
    pub fn listen(&mut self, doorbell: &Arc<Doorbell>) -> std::io::Result<()> {
        self.doorbell = Some(Arc::clone(doorbell));
        self.listen_again()
    }

    fn listen_again(&mut self) -> std::io::Result<()> {
        use std::os::fd::AsFd;
        let Some(doorbell) = &self.doorbell else { return Ok(()) };
        let fd = types::Fd(doorbell.as_fd().as_raw_fd());
        let value: *mut u64 = &raw mut *self.doorbell_value;
        let entry = opcode::Read::new(fd, value.cast(), 8).build();
        self.push(entry, Record::Doorbell)
    }

    fn push(&mut self, entry: Entry, record: Record) -> std::io::Result<()> {
        let at = match self.records.take(record) {
            Ok(at) => at,
            Err(record) => {
                self.forget(record);
                return Err(std::io::Error::other("more operations than the ring has records"));
            }
        };
        let entry = entry.user_data(u64::from(at));
        loop {
            // SAFETY: the memory that the entry points at lives in the arena, in a command, a
            // message, the zeroes or a box of this ring. The record keeps or marks it until the
            // completion is reaped: busy buffers are not lent out, commands and messages are in the
            // record, and none of them moves. `Drop` waits for all completions.
            let pushed = unsafe { self.ring.submission().push(&entry) };
            if pushed.is_ok() {
                break;
            }
            self.enter(0)?;
        }
        self.in_flight += 1;
        self.unsubmitted += 1;
        Ok(())
    }

    /// An operation that was never started leaves its memory as it was.
    fn forget(&mut self, record: Record) {
        match record {
            Record::Io { io: FileIo { place: Some(place), .. }, .. }
            | Record::Receive { place, .. }
            | Record::Fetch { place: Some(place), .. } => self.memory.end(place),
            Record::Send { mut outgoing, .. } => {
                if let Some(message) = outgoing.message.take() {
                    self.end_message(&message);
                    self.recycle_message(message);
                }
            }
            _ => {}
        }
    }

    /// Submits everything started to the kernel, and waits until `ended` operations have completed.
    pub fn enter(&mut self, ended: usize) -> std::io::Result<()> {
        let wait = self.awaited(ended);
        self.enters += 1;
        self.unsent = 0;
        let result = self.ring.submit_and_wait(wait);
        self.entered(result)
    }

    /// The same, for no longer than this.
    ///
    /// A message that is sent has ended at once, as a rule, and its end is nothing to wake up for:
    /// where the kernel can, it waits for something else to end as well, for a moment.
    pub fn enter_for(&mut self, ended: usize, limit: Duration) -> std::io::Result<()> {
        let wait = self.awaited(ended);
        if wait == 0 {
            return self.enter(0);
        }
        self.enters += 1;
        let time = types::Timespec::from(limit);
        let arguments = types::SubmitArgs::new().timespec(&time);
        let unsent = std::mem::take(&mut self.unsent);
        let result = if unsent > 0 && self.waits_for_more {
            let wait = (wait + unsent).min(self.in_flight);
            let arguments = arguments.min_wait_usec(SEND_MOMENT_US);
            self.ring.submitter().submit_with_args(wait, &arguments)
        } else {
            self.ring.submitter().submit_with_args(wait, &arguments)
        };
        self.entered(result)
    }

    fn awaited(&mut self, ended: usize) -> usize {
        if self.ring.completion().is_empty() { ended.min(self.in_flight) } else { 0 }
    }

    fn entered(&mut self, result: std::io::Result<usize>) -> std::io::Result<()> {
        match result {
            Ok(submitted) => {
                self.unsubmitted -= submitted.min(self.unsubmitted);
                Ok(())
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::ETIME) => {
                    // It submits before it waits.
                    self.unsubmitted = 0;
                    Ok(())
                }
                Some(libc::EINTR | libc::EBUSY | libc::EAGAIN) => Ok(()),
                _ => Err(error),
            },
        }
    }

    /// Operations that were started since the last [`Self::enter`].
    #[must_use]
    #[inline]
    pub const fn unsubmitted(&self) -> usize {
        self.unsubmitted
    }

    /// The next operation that has ended.
    pub fn reap(&mut self) -> Option<Ended> {
        loop {
            let (at, result, flags) = {
                let entry = self.ring.completion().next()?;
                (entry.user_data(), entry.result(), entry.flags())
            };
            let at = u32::try_from(at).ok()?;
            let record = self.records.end(at);
            self.in_flight -= 1;
            if let Some(ended) = self.ended(record, result, flags) {
                return Some(ended);
            }
        }
    }

    fn ended(&mut self, record: Record, result: i32, flags: u32) -> Option<Ended> {
        if let Record::Fetch { token, place } = record {
            self.fetching -= 1;
            place.into_iter().for_each(|place| self.memory.end(place));
            return Some(Ended::Fetched(token, result));
        }
        let result = u32::try_from(result).map_err(|_| std::io::Error::from_raw_os_error(-result));
        match record {
            Record::Free | Record::Fetch { .. } => None,
            Record::Io { token, io } => self.io_ended(token, io, result),
            Record::Sync { token } => Some(Ended::Io(token, result.map(|_| ()))),
            Record::Command { file, command, len, moved } => {
                self.command_ended(file, command, (len, moved), result)
            }
            Record::Select { token } => {
                let id = io_uring::cqueue::buffer_select(flags);
                if let (Err(_), Some(id), Some(chunks)) = (&result, id, &mut self.chunks) {
                    chunks.give(id);
                }
                let chunk = |len: usize| (len, id.map(|id| Chunk { id, len }));
                Some(Ended::Received(token, result.map(|len| chunk(len as usize))))
            }
            Record::Receive { token, place } => {
                self.memory.end(place);
                Some(Ended::Received(token, result.map(|len| (len as usize, None))))
            }
            Record::Send { token, socket, outgoing } => {
                self.send_ended(token, socket, outgoing, result)
            }
            Record::Doorbell => {
                if let Some(doorbell) = &self.doorbell {
                    doorbell.heard();
                }
                let _ = self.listen_again();
                Some(Ended::Rung)
            }
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // Waits for a doorbell or a client may never end, nor may IO of a disk that hangs: their
        // memory is leaked below.
        let mut waits = 0;
        while self.in_flight > 0 && waits < 100 {
            let idle = self.records.iter().all(|record| {
                matches!(
                    record,
                    Record::Free | Record::Doorbell | Record::Select { .. } | Record::Fetch { .. }
                )
            });
            if idle || self.enter_for(1, Duration::from_millis(100)).is_err() {
                break;
            }
            while self.reap().is_some() {}
            waits += 1;
        }
        if self.in_flight > 0 {
            // The kernel cancels what is left when the ring is closed, and may still write until
            // then: that memory is never used for anything else.
            self.memory.leak();
            self.records.leak();
            std::mem::forget(std::mem::replace(&mut self.doorbell_value, Box::new(0)));
            std::mem::forget(self.chunks.take());
        }
    }
}
