//! Operations that a ring executes, and their completions.

use std::os::fd::RawFd;

use blockd_mapper::io::IoCommand;

use super::message::Message;
use super::receive::Chunk;

/// How a ring is made.
#[derive(Clone, Copy, Debug)]
pub struct RingOptions {
    /// Operations that can be out at once.
    pub operations: u32,
    /// Bytes of IO memory.
    pub arena_bytes: usize,
    /// Whether it will serve: receive from clients, and have areas for queues.
    pub serves: bool,
}

/// Names a file that a ring knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileSlot(pub(super) u32);

/// Names a socket that a ring keeps open, by its own number: up to Linux 6.12 a file in the ring's
/// table is closed only when every older operation on that table has ended, which a receive of an
/// idle client does not. It would keep sockets and devices open that were removed since.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Socket {
    pub(super) fd: RawFd,
    pub(super) at: usize,
}

/// Which way data goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IoDirection {
    /// From the file.
    Read,
    /// To the file.
    Write {
        /// Durable when it completes.
        dsync: bool,
    },
}

/// An operation that has ended.
#[derive(Debug)]
pub enum Ended {
    /// IO on a file, by its token: all of it, or an error.
    Io(u64, std::io::Result<()>),
    /// A command, to be handed back.
    Command(IoCommand, std::io::Result<()>),
    /// A receive completed: into a chunk, or with this many bytes in the operation's buffer.
    Received(u64, std::io::Result<(usize, Option<Chunk>)>),
    /// A message has been sent, all of it or not at all any more.
    Sent(u64, std::io::Result<()>, Box<Message>),
    /// A command of a queue has ended: the kernel's answer.
    Fetched(u64, i32),
    /// The doorbell was rung.
    Rung,
}
