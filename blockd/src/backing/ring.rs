//! An io_uring that owns all memory it gives to the kernel, so that its interface is safe.
//!
//! What goes through it: IO between buffers of its arena and files, the engine's commands with
//! memory of their own, and what is received from and sent to clients. Every operation has a record
//! here from the moment it is pushed until its completion is reaped; memory is given back to
//! nobody before that.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use blockd_mapper::io::{IoCommand, IoOp};
use io_uring::squeue::{Entry, Flags};
use io_uring::{IoUring, opcode, types};
use memmap2::MmapMut;

use super::arena::Arena;
use super::message::{Message, Part};
use super::operation::{Ended, FileSlot, IoDirection, RingOptions};
use super::receive::{CHUNK, Chunk, Chunks, GROUP};
use super::{Doorbell, PAGE};
use crate::block::Buffer;

/// Most files and sockets of one ring.
const MAX_FILES: u32 = 4096;
/// Bytes of zeroes that are written from.
const ZEROES: u32 = 256 << 10;
/// Most pieces that one system call sends.
const MAX_IOV: usize = 256;

/// IO on a file that may have to go on after a short transfer.
#[derive(Clone, Copy, Debug)]
struct FileIo {
    file: FileSlot,
    direction: IoDirection,
    offset: u64,
    /// Of the arena; the zeroes if none.
    page: Option<u32>,
    /// First byte in the buffer.
    at: u32,
    len: u32,
}

/// What is kept of an operation until it ends.
#[derive(Debug)]
enum Record {
    Free,
    Io { token: u64, io: FileIo },
    Sync { token: u64 },
    Command { file: FileSlot, command: IoCommand, len: u32, moved: u32 },
    Select { token: u64 },
    Receive { token: u64, page: u32 },
    Send { token: u64, file: FileSlot, outgoing: Box<Outgoing> },
    Doorbell,
}

/// A message with what the kernel reads of it.
#[derive(Debug)]
struct Outgoing {
    message: Option<Box<Message>>,
    vectors: Vec<libc::iovec>,
    header: libc::msghdr,
    sent: usize,
}

// SAFETY: the pointers in it point to memory that moves with its ring (heap and mappings), and are
// used by the kernel only.
unsafe impl Send for Outgoing {}

/// One thread's ring.
pub struct Ring {
    // Fields are dropped in this order: the ring ends before the memory that it knows.
    ring: IoUring,
    records: Vec<Record>,
    free: Vec<u32>,
    arena: Arena,
    memory: MmapMut,
    zeroes: MmapMut,
    /// The arena is registered.
    fixed: bool,
    chunks: Option<Chunks>,
    files: Vec<Option<Arc<dyn Send + Sync>>>,
    #[expect(clippy::vec_box, reason = "the kernel has pointers into them: they must not move")]
    idle_sends: Vec<Box<Outgoing>>,
    #[expect(clippy::vec_box, reason = "they travel in boxes")]
    idle_messages: Vec<Box<Message>>,
    doorbell: Option<Arc<Doorbell>>,
    doorbell_value: Box<u64>,
    in_flight: usize,
    unsubmitted: usize,
    enters: u64,
    pushed_io: u64,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("in_flight", &self.in_flight).finish_non_exhaustive()
    }
}

impl Ring {
    /// A ring for the calling thread, which alone may use it.
    pub fn new(options: RingOptions) -> std::io::Result<Self> {
        let entries = options.operations.next_power_of_two();
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            // So that an enter that waits for nothing still takes what has ended meanwhile.
            .setup_taskrun_flag()
            .setup_cqsize(entries.saturating_mul(2))
            .build(entries)
            // Kernels before 6.1 know one or both of these hints not.
            .or_else(|_| IoUring::builder().setup_cqsize(entries * 2).build(entries))?;
        ring.submitter().register_files_sparse(MAX_FILES)?;
        let pages = u32::try_from(options.arena_bytes / PAGE).map_err(std::io::Error::other)?;
        let arena = Arena::new(pages);
        let mut memory = MmapMut::map_anon((arena.total_pages() * PAGE).max(PAGE))?;
        let vector = libc::iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: memory.len() };
        // SAFETY: the memory lives until the ring is gone (order of fields), and is never moved.
        // Where too little memory may be locked, its pages are pinned at each operation.
        let fixed = unsafe { ring.submitter().register_buffers(&[vector]) }.is_ok();
        let chunks = options.receives.then(|| Chunks::register(&ring)).transpose()?;
        let records = (0..entries).map(|_| Record::Free).collect();
        Ok(Self {
            ring,
            records,
            free: (0..entries).rev().collect(),
            arena,
            memory,
            zeroes: MmapMut::map_anon(ZEROES as usize)?,
            fixed,
            chunks,
            files: vec![None; MAX_FILES as usize],
            idle_sends: Vec::with_capacity(64),
            idle_messages: Vec::with_capacity(64),
            doorbell: None,
            doorbell_value: Box::new(0),
            in_flight: 0,
            unsubmitted: 0,
            enters: 0,
            pushed_io: 0,
        })
    }

    /// Makes a file known. The ring keeps it open.
    pub fn add_file(&mut self, file: &Arc<File>) -> std::io::Result<FileSlot> {
        self.add(file.as_raw_fd(), Arc::clone(file) as _)
    }

    /// Makes a socket known. The ring keeps it open.
    pub fn add_socket(&mut self, socket: &Arc<OwnedFd>) -> std::io::Result<FileSlot> {
        self.add(socket.as_raw_fd(), Arc::clone(socket) as _)
    }

    fn add(&mut self, fd: i32, keep: Arc<dyn Send + Sync>) -> std::io::Result<FileSlot> {
        let free = self.files.iter().position(Option::is_none);
        let at = free.ok_or_else(|| std::io::Error::other("a ring knows 4096 files at most"))?;
        let slot = u32::try_from(at).map_err(std::io::Error::other)?;
        self.ring.submitter().register_files_update(slot, &[fd])?;
        self.files[at] = Some(keep);
        Ok(FileSlot(slot))
    }

    /// Forgets a file, and closes a socket. Operations that are out keep it open in the kernel.
    pub fn remove(&mut self, slot: FileSlot) {
        // It can't fail for a slot in use; if it did, the slot would stay taken.
        if self.ring.submitter().register_files_update(slot.0, &[-1]).is_ok() {
            self.files[slot.0 as usize] = None;
        }
    }

    /// Memory for so many bytes, of 1 MiB at the most; `None` while there is none.
    pub fn allocate(&mut self, bytes: u64) -> Option<Buffer> {
        self.arena.allocate(bytes)
    }

    /// Gives memory back; it is used again when no operation needs it any more.
    #[expect(clippy::needless_pass_by_value, reason = "the right to use it ends")]
    pub fn free(&mut self, buffer: Buffer) {
        self.arena.free(&buffer);
    }

    /// Bytes of memory that are free.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        u64::from(self.arena.free_pages()) * PAGE as u64
    }

    /// Bytes of a buffer.
    #[must_use]
    pub fn capacity(buffer: &Buffer) -> usize {
        PAGE << buffer.order()
    }

    /// A buffer that no operation uses.
    pub fn bytes_mut(&mut self, buffer: &Buffer) -> &mut [u8] {
        assert!(!self.arena.is_busy(buffer), "the kernel has this buffer");
        let start = buffer.page() as usize * PAGE;
        &mut self.memory[start..start + Self::capacity(buffer)]
    }

    /// Zeroes a part of a buffer that no operation uses, whatever uses its other parts.
    pub fn zero(&mut self, buffer: &Buffer, at: usize, len: usize) {
        let start = buffer.page() as usize * PAGE;
        self.memory[start..start + Self::capacity(buffer)][at..at + len].fill(0);
    }

    /// Copies bytes into a buffer that no operation uses.
    pub fn copy_in(&mut self, from: &[u8], to: &Buffer, at: usize) {
        self.bytes_mut(to)[at..at + from.len()].copy_from_slice(from);
    }

    /// What a chunk holds.
    #[must_use]
    pub fn chunk(&self, chunk: &Chunk) -> &[u8] {
        self.chunks.as_ref().map_or(&[], |chunks| chunks.bytes(chunk))
    }

    /// Copies a part of a chunk into a buffer that no operation uses.
    pub fn copy_chunk(&mut self, chunk: &Chunk, from: usize, len: usize, to: &Buffer, at: usize) {
        assert!(!self.arena.is_busy(to), "the kernel has this buffer");
        let start = to.page() as usize * PAGE;
        let target = &mut self.memory[start..start + Self::capacity(to)][at..at + len];
        if let Some(chunks) = &self.chunks {
            target.copy_from_slice(&chunks.bytes(chunk)[from..from + len]);
        }
    }

    /// Gives a chunk back to be received into.
    #[expect(clippy::needless_pass_by_value, reason = "the right to use it ends")]
    pub fn recycle(&mut self, chunk: Chunk) {
        if let Some(chunks) = &mut self.chunks {
            chunks.give(chunk.id);
        }
    }

    /// An empty message.
    pub fn message(&mut self) -> Box<Message> {
        self.idle_messages.pop().unwrap_or_default()
    }

    /// Takes a message back, and the memory of what is still in it.
    pub fn recycle_message(&mut self, mut message: Box<Message>) {
        for part in message.parts.drain(..) {
            if let Part::Buffer { buffer, .. } = part {
                self.arena.free(&buffer);
            }
        }
        message.headers.clear();
        message.bytes = 0;
        if self.idle_messages.len() < self.idle_messages.capacity() {
            self.idle_messages.push(message);
        }
    }

    /// Operations that are out, or about to be submitted.
    #[must_use]
    pub const fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Operations that can still be started.
    #[must_use]
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Calls of `io_uring_enter` so far.
    #[must_use]
    pub const fn enters(&self) -> u64 {
        self.enters
    }

    /// Operations on files so far.
    #[must_use]
    pub const fn file_operations(&self) -> u64 {
        self.pushed_io
    }

    /// Starts IO between a buffer (`len` bytes from `at` on) and a file. There must be room.
    #[expect(clippy::too_many_arguments, reason = "the parts of one operation")]
    pub fn io(
        &mut self,
        token: u64,
        direction: IoDirection,
        file: FileSlot,
        offset: u64,
        buffer: &Buffer,
        at: u32,
        len: u32,
    ) -> std::io::Result<()> {
        let end = at as usize + len as usize;
        assert!(end <= Self::capacity(buffer), "an operation leaves its buffer");
        let io = FileIo { file, direction, offset, page: Some(buffer.page()), at, len };
        self.arena.begin(buffer.page());
        self.start_io(token, io)
    }

    /// Starts to write zeroes, at most [`Self::MAX_ZEROES`] bytes. There must be room.
    pub fn write_zeroes(
        &mut self,
        token: u64,
        file: FileSlot,
        offset: u64,
        len: u32,
        dsync: bool,
    ) -> std::io::Result<()> {
        assert!(len <= ZEROES, "more zeroes than there are");
        let direction = IoDirection::Write { dsync };
        self.start_io(token, FileIo { file, direction, offset, page: None, at: 0, len })
    }

    /// Most bytes of [`Self::write_zeroes`].
    pub const MAX_ZEROES: u32 = ZEROES;

    fn start_io(&mut self, token: u64, io: FileIo) -> std::io::Result<()> {
        let entry = self.io_entry(io);
        self.pushed_io += 1;
        self.push(entry, Record::Io { token, io })
    }

    fn io_entry(&mut self, io: FileIo) -> Entry {
        let file = types::Fixed(io.file.0);
        let base = match io.page {
            Some(page) => self.memory[page as usize * PAGE..][io.at as usize..].as_mut_ptr(),
            None => self.zeroes[io.at as usize..].as_mut_ptr(),
        };
        let fixed = self.fixed && io.page.is_some();
        match io.direction {
            IoDirection::Read if fixed => {
                opcode::ReadFixed::new(file, base, io.len, 0).offset(io.offset).build()
            }
            IoDirection::Read => opcode::Read::new(file, base, io.len).offset(io.offset).build(),
            IoDirection::Write { dsync } => {
                let flags = if dsync { libc::RWF_DSYNC } else { 0 };
                if fixed {
                    let write = opcode::WriteFixed::new(file, base, io.len, 0);
                    write.offset(io.offset).rw_flags(flags).build()
                } else {
                    let write = opcode::Write::new(file, base, io.len);
                    write.offset(io.offset).rw_flags(flags).build()
                }
            }
        }
    }

    /// Starts to make every completed write of a file durable. There must be room.
    pub fn sync(&mut self, token: u64, file: FileSlot) -> std::io::Result<()> {
        self.pushed_io += 1;
        self.push(sync_entry(file), Record::Sync { token })
    }

    /// Starts a command of the engine. Fences and discards are the caller's business. A command
    /// that can't be started comes back.
    pub fn command(&mut self, file: FileSlot, command: IoCommand) -> Result<(), IoCommand> {
        self.start_command(file, command, 0)
    }

    /// Starts a command, or what is left of it behind the bytes that have been moved.
    fn start_command(
        &mut self,
        file: FileSlot,
        mut command: IoCommand,
        moved: u32,
    ) -> Result<(), IoCommand> {
        let fixed = types::Fixed(file.0);
        let done = moved as usize;
        let (entry, len) = match &mut command.op {
            IoOp::Flush => (sync_entry(file), 0),
            IoOp::Read { offset, buffer } => {
                let bytes = &mut buffer.as_bytes_mut()[done..];
                let Ok(len) = u32::try_from(bytes.len()) else { return Err(command) };
                let read = opcode::Read::new(fixed, bytes.as_mut_ptr(), len);
                (read.offset(*offset + u64::from(moved)).build(), len)
            }
            IoOp::Write { offset, buffer, fua } => {
                let bytes = &buffer.as_bytes()[done..];
                let Ok(len) = u32::try_from(bytes.len()) else { return Err(command) };
                let flags = if *fua { libc::RWF_DSYNC } else { 0 };
                let write = opcode::Write::new(fixed, bytes.as_ptr(), len);
                (write.offset(*offset + u64::from(moved)).rw_flags(flags).build(), len)
            }
            IoOp::Fence | IoOp::Discard { .. } => return Err(command),
        };
        if self.free.is_empty() {
            return Err(command);
        }
        // There is a record, so it can't fail.
        let _ = self.push(entry, Record::Command { file, command, len, moved });
        Ok(())
    }

    /// Starts to receive whatever comes, at most `max` bytes, into a chunk.
    pub fn receive_any(&mut self, token: u64, file: FileSlot, max: usize) -> std::io::Result<()> {
        let len = u32::try_from(max.min(CHUNK)).unwrap_or(u32::MAX);
        let receive = opcode::Recv::new(types::Fixed(file.0), ptr::null_mut(), len);
        let entry = receive.buf_group(GROUP).build().flags(Flags::BUFFER_SELECT);
        self.push(entry, Record::Select { token })
    }

    /// Starts to receive bytes into a buffer, until they are all there.
    pub fn receive_into(
        &mut self,
        token: u64,
        file: FileSlot,
        buffer: &Buffer,
        at: usize,
        len: usize,
    ) -> std::io::Result<()> {
        assert!(at + len <= Self::capacity(buffer), "an operation leaves its buffer");
        let page = buffer.page();
        let base = self.memory[page as usize * PAGE + at..].as_mut_ptr();
        let len = u32::try_from(len).map_err(std::io::Error::other)?;
        let receive = opcode::Recv::new(types::Fixed(file.0), base, len);
        let entry = receive.flags(libc::MSG_WAITALL).build();
        self.arena.begin(page);
        self.push(entry, Record::Receive { token, page })
    }

    /// Starts to send a message.
    pub fn send(
        &mut self,
        token: u64,
        file: FileSlot,
        message: Box<Message>,
    ) -> std::io::Result<()> {
        let mut outgoing = self.idle_sends.pop().unwrap_or_else(Outgoing::new);
        for part in &message.parts {
            if let Part::Buffer { buffer, .. } = part {
                self.arena.begin(buffer.page());
            }
        }
        outgoing.sent = 0;
        outgoing.message = Some(message);
        self.start_send(token, file, outgoing)
    }

    fn start_send(
        &mut self,
        token: u64,
        file: FileSlot,
        mut outgoing: Box<Outgoing>,
    ) -> std::io::Result<()> {
        outgoing.fill(&self.memory);
        let send = opcode::SendMsg::new(types::Fixed(file.0), &raw const outgoing.header);
        let entry = send.flags((libc::MSG_NOSIGNAL | libc::MSG_WAITALL).cast_unsigned()).build();
        self.push(entry, Record::Send { token, file, outgoing })
    }

    /// Waits for a doorbell from now on.
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
        let Some(at) = self.free.pop() else {
            self.forget(record);
            return Err(std::io::Error::other("more operations than the ring has records"));
        };
        let entry = entry.user_data(u64::from(at));
        self.records[at as usize] = record;
        loop {
            // SAFETY: what the entry points at lives in the arena, in a command, a message, the
            // zeroes or a box of this ring. The record keeps or marks it until the completion is
            // reaped: buffers are lent to nobody while busy, commands and messages are in the
            // record, and nothing of it moves. `Drop` waits for all completions.
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
            Record::Io { io: FileIo { page: Some(page), .. }, .. }
            | Record::Receive { page, .. } => self.arena.end(page),
            Record::Send { mut outgoing, .. } => {
                if let Some(message) = outgoing.message.take() {
                    self.end_message(&message);
                    self.recycle_message(message);
                }
            }
            _ => {}
        }
    }

    fn end_message(&mut self, message: &Message) {
        for part in &message.parts {
            if let Part::Buffer { buffer, .. } = part {
                self.arena.end(buffer.page());
            }
        }
    }

    /// Hands everything started to the kernel, and waits until so many operations have ended.
    pub fn enter(&mut self, ended: usize) -> std::io::Result<()> {
        let wait = self.awaited(ended);
        self.enters += 1;
        let result = self.ring.submit_and_wait(wait);
        self.entered(result)
    }

    /// The same, for no longer than this.
    pub fn enter_for(&mut self, ended: usize, limit: Duration) -> std::io::Result<()> {
        let wait = self.awaited(ended);
        if wait == 0 {
            return self.enter(0);
        }
        self.enters += 1;
        let time = types::Timespec::from(limit);
        let arguments = types::SubmitArgs::new().timespec(&time);
        let result = self.ring.submitter().submit_with_args(wait, &arguments);
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
            let record = std::mem::replace(&mut self.records[at as usize], Record::Free);
            self.free.push(at);
            self.in_flight -= 1;
            if let Some(ended) = self.ended(record, result, flags) {
                return Some(ended);
            }
        }
    }

    fn ended(&mut self, record: Record, result: i32, flags: u32) -> Option<Ended> {
        let result = u32::try_from(result).map_err(|_| std::io::Error::from_raw_os_error(-result));
        match record {
            Record::Free => None,
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
            Record::Receive { token, page } => {
                self.arena.end(page);
                Some(Ended::Received(token, result.map(|len| (len as usize, None))))
            }
            Record::Send { token, file, outgoing } => {
                self.send_ended(token, file, outgoing, result)
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

    /// A short transfer goes on where it stopped: where space below ends, the rest says so.
    fn command_ended(
        &mut self,
        file: FileSlot,
        command: IoCommand,
        (len, before): (u32, u32),
        result: std::io::Result<u32>,
    ) -> Option<Ended> {
        let result = match result {
            Ok(moved) if moved == len => Ok(()),
            Ok(moved) if (1..len).contains(&moved) => {
                match self.start_command(file, command, before + moved) {
                    Ok(()) => return None,
                    Err(command) => {
                        let error = std::io::Error::other("no record for the rest of a command");
                        return Some(Ended::Command(command, Err(error)));
                    }
                }
            }
            Ok(moved) => Err(std::io::Error::other(format!("{moved} of {len} bytes"))),
            Err(error) => Err(error),
        };
        Some(Ended::Command(command, result))
    }

    /// A short transfer goes on where it stopped.
    fn io_ended(&mut self, token: u64, io: FileIo, result: std::io::Result<u32>) -> Option<Ended> {
        let result = match result {
            Ok(moved) if moved == io.len => Ok(()),
            Ok(0) => Err(std::io::Error::other("the media ended")),
            Ok(moved) if moved < io.len => {
                let rest = FileIo {
                    offset: io.offset + u64::from(moved),
                    at: io.at + moved,
                    len: io.len - moved,
                    ..io
                };
                match self.start_io(token, rest) {
                    Ok(()) => return None,
                    // `push` has let go of the memory.
                    Err(error) => return Some(Ended::Io(token, Err(error))),
                }
            }
            Ok(_) => Err(std::io::Error::other("the media moved more than was asked for")),
            Err(error) => Err(error),
        };
        if let Some(page) = io.page {
            self.arena.end(page);
        }
        Some(Ended::Io(token, result))
    }

    fn send_ended(
        &mut self,
        token: u64,
        file: FileSlot,
        mut outgoing: Box<Outgoing>,
        result: std::io::Result<u32>,
    ) -> Option<Ended> {
        let total = outgoing.message.as_ref().map_or(0, |message| message.bytes);
        let result = match result {
            Ok(sent) => {
                outgoing.sent += sent as usize;
                if sent > 0 && outgoing.sent < total {
                    return match self.start_send(token, file, outgoing) {
                        Ok(()) => None,
                        Err(error) => Some(Ended::Sent(token, Err(error), Box::default())),
                    };
                }
                if outgoing.sent == total {
                    Ok(())
                } else {
                    Err(std::io::Error::other("the socket takes nothing more"))
                }
            }
            Err(error) => Err(error),
        };
        let message = outgoing.message.take()?;
        self.end_message(&message);
        if self.idle_sends.len() < self.idle_sends.capacity() {
            self.idle_sends.push(outgoing);
        }
        Some(Ended::Sent(token, result, message))
    }
}

impl Outgoing {
    fn new() -> Box<Self> {
        // SAFETY: a msghdr of zeroes is an empty one.
        let header = unsafe { std::mem::zeroed() };
        let vectors = Vec::with_capacity(MAX_IOV);
        Box::new(Self { message: None, vectors, header, sent: 0 })
    }

    /// Points at what of the message is not sent yet.
    fn fill(&mut self, memory: &MmapMut) {
        self.vectors.clear();
        let Some(message) = &self.message else { return };
        let mut skip = self.sent;
        for part in &message.parts {
            let bytes: &[u8] = match part {
                Part::Headers { from, to } => &message.headers[*from..*to],
                Part::Buffer { buffer, len } => {
                    let start = buffer.page() as usize * PAGE;
                    &memory[start..start + len]
                }
            };
            let done = skip.min(bytes.len());
            skip -= done;
            if done < bytes.len() {
                let rest = &bytes[done..];
                let iov_base = rest.as_ptr().cast_mut().cast();
                self.vectors.push(libc::iovec { iov_base, iov_len: rest.len() });
            }
        }
        self.header.msg_iov = self.vectors.as_mut_ptr();
        self.header.msg_iovlen = self.vectors.len() as _;
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // Whoever waits for a doorbell or a client may wait for ever, as may IO of a disk that
        // hangs: that memory is leaked below.
        let mut waits = 0;
        while self.in_flight > 0 && waits < 100 {
            let idle = self.records.iter().all(|record| {
                matches!(record, Record::Free | Record::Doorbell | Record::Select { .. })
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
            let empty = MmapMut::map_anon(PAGE);
            let other = MmapMut::map_anon(PAGE);
            if let (Ok(empty), Ok(other)) = (empty, other) {
                std::mem::forget(std::mem::replace(&mut self.memory, empty));
                std::mem::forget(std::mem::replace(&mut self.zeroes, other));
            }
            std::mem::forget(std::mem::take(&mut self.records));
            std::mem::forget(std::mem::replace(&mut self.doorbell_value, Box::new(0)));
            std::mem::forget(self.chunks.take());
        }
    }
}

fn sync_entry(file: FileSlot) -> Entry {
    opcode::Fsync::new(types::Fixed(file.0)).flags(types::FsyncFlags::DATASYNC).build()
}
