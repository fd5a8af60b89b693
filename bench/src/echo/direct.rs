//! The server on a ring of its own.

use std::os::fd::{AsRawFd, OwnedFd};

use anyhow::{Context, Result, bail};
use io_uring::squeue::Entry;
use io_uring::{IoUring, opcode, types};

use super::{DATA_BYTES, HEADER_BYTES, REPLY_BYTES, REQUEST_BYTES};

/// Requests that one receive can bring, and replies that one send can carry.
const BATCH: usize = 64;
/// Tokens of the two operations.
const RECEIVE: u64 = 0;
const SEND: u64 = 1;

/// Memory that the kernel uses while an operation is in flight.
struct Memory {
    requests: [u8; BATCH * REQUEST_BYTES],
    headers: [[u8; HEADER_BYTES]; BATCH],
    data: [[u8; DATA_BYTES]; BATCH],
    vectors: [libc::iovec; 2 * BATCH],
    message: libc::msghdr,
}

/// Answers requests until the client is gone; how many.
pub(super) fn serve(socket: OwnedFd) -> Result<u64> {
    let mut ring = IoUring::builder()
        .setup_single_issuer()
        .setup_coop_taskrun()
        .build(8)
        .or_else(|_| IoUring::new(8))
        .context("io_uring_setup")?;
    ring.submitter().register_files(&[socket.as_raw_fd()]).context("register the socket")?;
    let memory = Memory::new();
    // Bytes received and not answered yet; requests answered; replies in the send in flight.
    let (mut bytes, mut answered, mut sending) = (0_usize, 0_u64, 0_usize);
    let mut receiving = false;
    loop {
        if sending == 0 && bytes >= REQUEST_BYTES {
            sending = bytes / REQUEST_BYTES;
            bytes -= sending * REQUEST_BYTES;
            push(&mut ring, &memory.send(sending))?;
        }
        if !receiving && bytes < REQUEST_BYTES {
            push(&mut ring, &memory.receive(bytes)?)?;
            receiving = true;
        }
        ring.submit_and_wait(1).context("io_uring_enter")?;
        while let Some(done) = ring.completion().next() {
            let moved = usize::try_from(done.result()).ok().with_context(|| {
                format!("{}", std::io::Error::from_raw_os_error(-done.result()))
            })?;
            match done.user_data() {
                SEND if moved == sending * REPLY_BYTES => {
                    answered += sending as u64;
                    sending = 0;
                }
                SEND => bail!("sent {moved} bytes of {}", sending * REPLY_BYTES),
                _ if moved == 0 => return Ok(answered),
                _ => {
                    receiving = false;
                    bytes += moved;
                }
            }
        }
    }
}

impl Memory {
    /// Creates the server. Its memory is never freed: a process is one server.
    fn new() -> &'static mut Self {
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let memory = Box::leak(Box::new(Self {
            requests: [0; BATCH * REQUEST_BYTES],
            headers: [[0; HEADER_BYTES]; BATCH],
            data: [[0x5a; DATA_BYTES]; BATCH],
            vectors: [nothing; 2 * BATCH],
            // SAFETY: all zeroes are a message with nothing in it.
            message: unsafe { std::mem::zeroed() },
        }));
        for index in 0..BATCH {
            let header = memory.headers[index].as_mut_ptr();
            let data = memory.data[index].as_mut_ptr();
            memory.vectors[2 * index] =
                libc::iovec { iov_base: header.cast(), iov_len: HEADER_BYTES };
            memory.vectors[2 * index + 1] =
                libc::iovec { iov_base: data.cast(), iov_len: DATA_BYTES };
        }
        memory.message.msg_iov = memory.vectors.as_mut_ptr();
        memory
    }

    /// One send of `replies` replies. The kernel completes a short one.
    fn send(&mut self, replies: usize) -> Entry {
        self.message.msg_iovlen = 2 * replies;
        let send = opcode::SendMsg::new(types::Fixed(0), &raw const self.message);
        let flags = u32::try_from(libc::MSG_WAITALL).unwrap_or(0);
        send.flags(flags).build().user_data(SEND)
    }

    /// A receive after the `behind` bytes of a request that arrived in part.
    fn receive(&mut self, behind: usize) -> Result<Entry> {
        let room = &mut self.requests[behind..];
        let len = u32::try_from(room.len())?;
        let receive = opcode::Recv::new(types::Fixed(0), room.as_mut_ptr(), len);
        Ok(receive.build().user_data(RECEIVE))
    }
}

fn push(ring: &mut IoUring, entry: &Entry) -> Result<()> {
    // SAFETY: an entry points into `Memory` only, which is never freed. At most one receive and one
    // send are in flight, and the memory of each is not touched in that time.
    let pushed = unsafe { ring.submission().push(entry) };
    pushed.ok().context("the submission queue is full")
}
