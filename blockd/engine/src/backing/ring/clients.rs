//! Receives from clients and sends to them.

use std::ptr;

use io_uring::squeue::{Entry, Flags};
use io_uring::{opcode, types};

use super::memory::Memory;
use super::{Record, Ring};
use crate::backing::message::{Message, Part};
use crate::backing::operation::{Ended, Socket};
use crate::backing::receive::{CHUNK, Chunk, GROUP};
use crate::block::Buffer;

/// Most pieces that one system call sends.
const MAX_IOV: usize = 256;

/// A message with what the kernel reads of it.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) message: Option<Box<Message>>,
    vectors: Vec<libc::iovec>,
    header: libc::msghdr,
    sent: usize,
}

// SAFETY: the pointers in it point to memory that moves with its ring (heap and mappings), and are
// used by the kernel only.
unsafe impl Send for Outgoing {}

impl Ring {
    /// The received bytes in a chunk.
    #[must_use]
    #[inline]
    pub fn chunk(&self, chunk: &Chunk) -> &[u8] {
        self.chunks.as_ref().map_or(&[], |chunks| chunks.bytes(chunk))
    }

    /// Copies a part of a chunk into a buffer that no operation uses.
    pub fn copy_chunk(&mut self, chunk: &Chunk, from: usize, len: usize, to: &Buffer, at: usize) {
        assert!(!self.memory.is_busy(to.place()), "the kernel has this buffer");
        let target = &mut self.memory.slice_mut(to)[at..at + len];
        if let Some(chunks) = &self.chunks {
            target.copy_from_slice(&chunks.bytes(chunk)[from..from + len]);
        }
    }

    /// Gives a chunk back to be received into.
    #[expect(clippy::needless_pass_by_value, reason = "the right to use it ends")]
    #[inline]
    pub fn recycle(&mut self, chunk: Chunk) {
        if let Some(chunks) = &mut self.chunks {
            chunks.give(chunk.id);
        }
    }

    /// An empty message.
    #[inline]
    pub fn message(&mut self) -> Box<Message> {
        self.idle_messages.pop().unwrap_or_default()
    }

    /// Takes a message back, and the memory of what is still in it.
    pub fn recycle_message(&mut self, mut message: Box<Message>) {
        for part in message.parts.drain(..) {
            if let Part::Buffer { buffer, .. } = part {
                self.memory.free(&buffer);
            }
        }
        message.headers.clear();
        message.bytes = 0;
        if self.idle_messages.len() < self.idle_messages.capacity() {
            self.idle_messages.push(message);
        }
    }

    /// Starts to receive whatever comes, at most `max` bytes, into a chunk.
    pub fn receive_any(&mut self, token: u64, socket: Socket, max: usize) -> std::io::Result<()> {
        let len = u32::try_from(max.min(CHUNK)).unwrap_or(u32::MAX);
        self.push(select_entry(socket, len), Record::Select { token })
    }

    /// Starts to receive bytes into a buffer, until they are all there.
    pub fn receive_into(
        &mut self,
        token: u64,
        socket: Socket,
        buffer: &Buffer,
        at: usize,
        len: usize,
    ) -> std::io::Result<()> {
        assert!(at + len <= Self::capacity(buffer), "an operation leaves its buffer");
        let place = buffer.place();
        let base = self.memory.slice_mut(buffer)[at..].as_mut_ptr();
        let len = u32::try_from(len).map_err(std::io::Error::other)?;
        let receive = opcode::Recv::new(types::Fd(socket.fd), base, len);
        let entry = receive.flags(libc::MSG_WAITALL).build();
        self.memory.begin(place);
        self.push(entry, Record::Receive { token, place })
    }

    /// Starts to send a message.
    pub fn send(
        &mut self,
        token: u64,
        socket: Socket,
        message: Box<Message>,
    ) -> std::io::Result<()> {
        let mut outgoing = self.idle_sends.pop().unwrap_or_else(Outgoing::new);
        for part in &message.parts {
            if let Part::Buffer { buffer, .. } = part {
                self.memory.begin(buffer.place());
            }
        }
        outgoing.sent = 0;
        outgoing.message = Some(message);
        self.start_send(token, socket, outgoing)
    }

    fn start_send(
        &mut self,
        token: u64,
        socket: Socket,
        mut outgoing: Box<Outgoing>,
    ) -> std::io::Result<()> {
        outgoing.fill(&self.memory);
        let send = opcode::SendMsg::new(types::Fd(socket.fd), &raw const outgoing.header);
        let entry = send.flags((libc::MSG_NOSIGNAL | libc::MSG_WAITALL).cast_unsigned()).build();
        self.push(entry, Record::Send { token, socket, outgoing })?;
        self.unsent += 1;
        Ok(())
    }

    pub(super) fn end_message(&mut self, message: &Message) {
        for part in &message.parts {
            if let Part::Buffer { buffer, .. } = part {
                self.memory.end(buffer.place());
            }
        }
    }

    pub(super) fn send_ended(
        &mut self,
        token: u64,
        socket: Socket,
        mut outgoing: Box<Outgoing>,
        result: std::io::Result<u32>,
    ) -> Option<Ended> {
        let total = outgoing.message.as_ref().map_or(0, |message| message.bytes);
        let result = match result {
            Ok(sent) => {
                outgoing.sent += sent as usize;
                if sent > 0 && outgoing.sent < total {
                    return match self.start_send(token, socket, outgoing) {
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

#[inline]
fn select_entry(socket: Socket, len: u32) -> Entry {
    let receive = opcode::Recv::new(types::Fd(socket.fd), ptr::null_mut(), len);
    receive.buf_group(GROUP).build().flags(Flags::BUFFER_SELECT)
}

impl Outgoing {
    fn new() -> Box<Self> {
        // SAFETY: a msghdr of zeroes is an empty one.
        let header = unsafe { std::mem::zeroed() };
        let vectors = Vec::with_capacity(MAX_IOV);
        Box::new(Self { message: None, vectors, header, sent: 0 })
    }

    /// Points at what of the message is not sent yet.
    fn fill(&mut self, memory: &Memory) {
        self.vectors.clear();
        let Some(message) = &self.message else { return };
        let mut skip = self.sent;
        for part in &message.parts {
            let bytes: &[u8] = match part {
                Part::Headers { from, to } => &message.headers[*from..*to],
                Part::Buffer { buffer, len } => &memory.slice(buffer)[..*len],
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receive_of_an_idle_client_holds_nothing_of_the_rings_table() {
        let entry = format!("{:?}", select_entry(Socket { fd: 7, at: 0 }, 1));
        // `IOSQE_BUFFER_SELECT` alone, without `IOSQE_FIXED_FILE`.
        assert!(entry.contains("flags: 32,"), "{entry}");
    }
}
