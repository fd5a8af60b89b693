//! An io_uring that owns all memory it gives to the kernel, so that its interface is safe.
//!
//! Two kinds of operations: those of *slots*, each with one registered buffer of 4 KiB or more, and
//! the engine's commands, which bring their own memory and travel through the ring by value.

use std::fs::File;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, ensure};
use blockd_mapper::io::{IoBuffer, IoCommand, IoOp, Page};
use io_uring::squeue::Entry;
use io_uring::{IoUring, opcode, types};

/// Bytes of a page, and of a slot's buffer where no other size is asked for.
pub const SLOT_BYTES: u32 = 4096;

/// The largest buffer is 1 MiB: no bench uses longer operations.
const MAX_SLOT_PAGES: usize = 256;

/// Commands of the engine that can be out at once.
const MAX_COMMANDS: usize = 64;

/// Tokens from here on name commands, lower ones slots.
const FIRST_COMMAND: usize = 1 << 16;

/// Place of the file among the registered ones.
const FILE: types::Fixed = types::Fixed(0);

/// An operation that has ended.
#[derive(Debug)]
pub enum Ended {
    /// The completion of the slot with this number.
    Slot(usize, std::io::Result<()>),
    /// A command, to be handed back.
    Command(IoCommand, std::io::Result<()>),
}

/// The operation of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotOp {
    /// Fill the slot's buffer from this byte of the file on.
    Read {
        /// First byte.
        offset: u64,
    },
    /// Write the slot's buffer to this byte of the file on.
    Write {
        /// First byte.
        offset: u64,
    },
    /// Make every completed write durable.
    Flush,
}

/// One ring over one file.
pub struct Ring {
    ring: IoUring,
    file: File,
    /// The buffers of all slots, registered with the kernel.
    memory: IoBuffer,
    /// Pages of each slot's buffer.
    slot_pages: usize,
    /// Bytes that the operation in flight of each slot must move; `None` when it is idle.
    slots: Vec<Option<u32>>,
    commands: Vec<Option<IoCommand>>,
    in_flight: usize,
    /// The number of these that were not submitted yet.
    unsubmitted: usize,
    /// Calls of `io_uring_enter`.
    enters: u64,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("in_flight", &self.in_flight).finish_non_exhaustive()
    }
}

impl Ring {
    /// Creates a ring for a file, with `slots` slots. File and buffers are registered.
    pub fn new(file: File, slots: usize) -> Result<Self> {
        Self::with_slots_of(file, slots, 1)
    }

    /// Like [`Self::new`], with buffers of this number of pages.
    pub fn with_slots_of(file: File, slots: usize, slot_pages: usize) -> Result<Self> {
        ensure!(slots > 0 && slots < FIRST_COMMAND, "{slots} slots");
        ensure!((1..=MAX_SLOT_PAGES).contains(&slot_pages), "{slot_pages} pages per slot");
        let entries = u32::try_from((slots + MAX_COMMANDS).next_power_of_two())?;
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_coop_taskrun()
            .build(entries)
            // Kernels before 6.0 know one or both of these hints not.
            .or_else(|_| IoUring::new(entries))
            .context("io_uring_setup: needs Linux 5.6 or newer with io_uring allowed")?;
        let mut memory = IoBuffer::new(slots * slot_pages).context("no memory for buffers")?;
        ring.submitter().register_files(&[file.as_raw_fd()]).context("register the file")?;
        let vectors: Vec<libc::iovec> = memory
            .as_bytes_mut()
            .chunks_exact_mut(slot_pages * SLOT_BYTES as usize)
            .map(|slot| libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: slot.len() })
            .collect();
        // SAFETY: each vector is a part of `memory`, which lives on the heap, is owned by the ring
        // from here on, never grows, and is freed only after the ring (see `Drop`).
        unsafe { ring.submitter().register_buffers(&vectors) }.context("register buffers")?;
        Ok(Self {
            ring,
            file,
            memory,
            slot_pages,
            slots: vec![None; slots],
            commands: (0..MAX_COMMANDS).map(|_| None).collect(),
            in_flight: 0,
            unsubmitted: 0,
            enters: 0,
        })
    }

    /// The file.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Operations that are out or about to be submitted.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Operations that were started since the last [`Self::submit`].
    #[must_use]
    pub fn unsubmitted(&self) -> usize {
        self.unsubmitted
    }

    /// Calls of `io_uring_enter` so far.
    #[must_use]
    pub fn enters(&self) -> u64 {
        self.enters
    }

    /// The first page of an idle slot's buffer.
    pub fn buffer(&mut self, slot: usize) -> Result<&mut Page> {
        ensure!(self.slots[slot].is_none(), "the kernel has the buffer of slot {slot}");
        Ok(&mut self.memory.pages_mut()[slot * self.slot_pages])
    }

    /// Starts an operation of an idle slot, at the next [`Self::submit`].
    pub fn start(&mut self, slot: usize, op: SlotOp) -> Result<()> {
        ensure!(self.slots[slot].is_none(), "slot {slot} is busy");
        let slot_bytes = self.slot_pages * SLOT_BYTES as usize;
        let len = u32::try_from(slot_bytes)?;
        let buffer = self.memory.as_bytes_mut()[slot * slot_bytes..][..slot_bytes].as_mut_ptr();
        let index = u16::try_from(slot)?;
        let (entry, bytes) = match op {
            SlotOp::Read { offset } => {
                let read = opcode::ReadFixed::new(FILE, buffer, len, index).offset(offset);
                (read.build(), len)
            }
            SlotOp::Write { offset } => {
                let write = opcode::WriteFixed::new(FILE, buffer, len, index).offset(offset);
                (write.build(), len)
            }
            SlotOp::Flush => (flush_entry(), 0),
        };
        self.slots[slot] = Some(bytes);
        self.push(&entry.user_data(slot as u64))
    }

    /// Starts a command of the engine, at the next [`Self::submit`]. Fences and discards are the
    /// caller's business.
    pub fn start_command(&mut self, mut command: IoCommand) -> Result<()> {
        let free = self.commands.iter().position(Option::is_none);
        let at = free.context("more commands than the ring has room for")?;
        let entry = match &mut command.op {
            IoOp::Flush => flush_entry(),
            IoOp::Read { offset, buffer } => {
                let bytes = buffer.as_bytes_mut();
                let len = u32::try_from(bytes.len())?;
                opcode::Read::new(FILE, bytes.as_mut_ptr(), len).offset(*offset).build()
            }
            IoOp::Write { offset, buffer, fua } => {
                let bytes = buffer.as_bytes();
                let len = u32::try_from(bytes.len())?;
                let flags = if *fua { libc::RWF_DSYNC } else { 0 };
                let write = opcode::Write::new(FILE, bytes.as_ptr(), len).offset(*offset);
                write.rw_flags(flags).build()
            }
            IoOp::Fence | IoOp::Discard { .. } => {
                anyhow::bail!("no operation of a ring: {}", command.op.name())
            }
        };
        self.commands[at] = Some(command);
        self.push(&entry.user_data((FIRST_COMMAND + at) as u64))
    }

    /// Hands everything started to the kernel and waits for `ended` operations to have ended.
    pub fn submit(&mut self, ended: usize) -> Result<()> {
        self.enters += 1;
        match self.ring.submit_and_wait(ended.min(self.in_flight)) {
            Ok(submitted) => {
                self.unsubmitted -= submitted.min(self.unsubmitted);
                Ok(())
            }
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => Ok(()),
            Err(error) => Err(error).context("io_uring_enter"),
        }
    }

    /// The next operation that has ended.
    pub fn reap(&mut self) -> Option<Ended> {
        let (token, result) = {
            let entry = self.ring.completion().next()?;
            (usize::try_from(entry.user_data()).unwrap_or(usize::MAX), entry.result())
        };
        self.in_flight -= 1;
        if token < FIRST_COMMAND {
            let bytes = self.slots[token].take().unwrap_or(0);
            return Some(Ended::Slot(token, checked(result, bytes)));
        }
        let command = self.commands[token - FIRST_COMMAND].take()?;
        let bytes = match &command.op {
            IoOp::Read { buffer, .. } | IoOp::Write { buffer, .. } => buffer.as_bytes().len(),
            _ => 0,
        };
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        Some(Ended::Command(command, checked(result, bytes)))
    }

    fn push(&mut self, entry: &Entry) -> Result<()> {
        // SAFETY: the entry points at a part of `memory` or the memory of a command in `commands`.
        // Both are on the heap, stay in this object and are neither moved, lent nor freed before
        // the completion is reaped: `buffer` and `start` refuse busy slots, `reap` alone takes
        // commands out, and `Drop` waits. The file is registered.
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.ok().context("the submission queue is full")?;
        self.in_flight += 1;
        self.unsubmitted += 1;
        Ok(())
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel may still write to memory of operations in flight.
        while self.in_flight > 0 {
            if self.submit(1).is_err() {
                // Without a way to wait, the memory must outlive the process's last use of it.
                let memory =
                    IoBuffer::new(0).map(|empty| std::mem::replace(&mut self.memory, empty));
                std::mem::forget(memory);
                std::mem::forget(std::mem::take(&mut self.commands));
                return;
            }
            while self.reap().is_some() {}
        }
    }
}

fn flush_entry() -> Entry {
    opcode::Fsync::new(FILE).flags(types::FsyncFlags::DATASYNC).build()
}

/// A short transfer is an error: nothing here ends before the file does.
fn checked(result: i32, expected: u32) -> std::io::Result<()> {
    match u32::try_from(result) {
        Ok(moved) if moved == expected => Ok(()),
        Ok(moved) => Err(std::io::Error::other(format!("{moved} of {expected} bytes"))),
        Err(_) => Err(std::io::Error::from_raw_os_error(-result)),
    }
}
