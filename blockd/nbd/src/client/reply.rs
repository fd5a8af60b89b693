//! Replies of the transmission phase, in all three forms.

use std::io::{self, Read};

use super::{ClientError, Completion, ContextRanges, RequestError};
use crate::codec::{
    EXTENDED_REPLY_MAGIC, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk, cmd, errno, u16_at,
    u32_at, u64_at,
};

/// The longest message of an error.
const MAX_MESSAGE_BYTES: u64 = 4096;

/// The most ranges of one status reply. The document has servers stop at 2^20.
const MAX_STATUS_BYTES: u64 = 8 + 16 * (1 << 20);

/// A request that waits for its reply.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) completion: Completion,
    /// Bytes of a read that have come.
    pub(super) filled: u64,
}

/// The start of a reply, or of one of its chunks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    pub(super) cookie: u64,
    pub(super) done: bool,
    body: Body,
}

#[derive(Clone, Copy, Debug)]
enum Body {
    Simple { errno: u32 },
    Chunk { kind: u16, len: u64 },
}

/// Reads the header of the next reply.
pub(super) fn head(
    reader: &mut impl Read,
    structured: bool,
    extended: bool,
) -> Result<Head, ClientError> {
    let mut bytes = [0; 32];
    reader.read_exact(&mut bytes[..16])?;
    let magic = u32_at(&bytes, 0).unwrap_or(0);
    let cookie = u64_at(&bytes, 8).unwrap_or(0);
    let chunk = |bytes: &[u8], len: Option<u64>| {
        let flags = u16_at(bytes, 4).unwrap_or(0);
        let body = Body::Chunk { kind: u16_at(bytes, 6).unwrap_or(0), len: len.unwrap_or(0) };
        Head { cookie, done: flags & chunk::FLAG_DONE != 0, body }
    };
    match magic {
        SIMPLE_REPLY_MAGIC if !extended => {
            let errno = u32_at(&bytes, 4).unwrap_or(0);
            Ok(Head { cookie, done: true, body: Body::Simple { errno } })
        }
        STRUCTURED_REPLY_MAGIC if structured && !extended => {
            reader.read_exact(&mut bytes[16..20])?;
            Ok(chunk(&bytes, u32_at(&bytes, 16).map(u64::from)))
        }
        EXTENDED_REPLY_MAGIC if extended => {
            reader.read_exact(&mut bytes[16..])?;
            Ok(chunk(&bytes, u64_at(&bytes, 24)))
        }
        _ => Err(ClientError::Protocol("a reply does not begin like one")),
    }
}

/// Reads what follows a header, and puts it where it belongs.
pub(super) fn body(
    reader: &mut impl Read,
    head: Head,
    structured: bool,
    pending: &mut Pending,
) -> Result<(), ClientError> {
    let is_read = pending.completion.command == cmd::READ;
    match head.body {
        Body::Simple { errno: 0 } => {
            if is_read && structured {
                return Err(ClientError::Protocol("a read has a simple reply"));
            }
            if is_read {
                reader.read_exact(&mut pending.completion.data)?;
                pending.filled = pending.completion.len;
            }
        }
        Body::Simple { errno } => fail(pending, errno, String::new()),
        Body::Chunk { kind, len } if kind & chunk::ERROR_BIT != 0 => {
            let (errno, message) = error_chunk(reader, len)?;
            fail(pending, errno, message);
        }
        Body::Chunk { kind: chunk::NONE, len: 0 } => {}
        Body::Chunk { kind: chunk::OFFSET_DATA, len } if is_read && len > 8 => {
            let into = place(reader, pending, Some(len - 8))?;
            reader.read_exact(into)?;
        }
        Body::Chunk { kind: chunk::OFFSET_HOLE, len: 12 } if is_read => {
            place(reader, pending, None)?.fill(0);
        }
        Body::Chunk { kind: chunk::BLOCK_STATUS, len } => {
            status(reader, pending, len, false)?;
        }
        Body::Chunk { kind: chunk::BLOCK_STATUS_EXT, len } => {
            status(reader, pending, len, true)?;
        }
        Body::Chunk { .. } => return Err(ClientError::Protocol("a reply has an unknown part")),
    }
    if head.done && is_read && pending.completion.result.is_ok() {
        let all = pending.filled == pending.completion.len;
        return if all { Ok(()) } else { Err(ClientError::Protocol("a read is not whole")) };
    }
    Ok(())
}

/// Reads what follows a header and drops it, but for the data of a simple reply, which stays to be
/// read. Returns the error number, 0 for success.
pub(super) fn skip(reader: &mut impl Read, head: Head) -> Result<u32, ClientError> {
    match head.body {
        Body::Simple { errno } => Ok(errno),
        Body::Chunk { kind, len } if kind & chunk::ERROR_BIT != 0 => {
            error_chunk(reader, len).map(|(errno, _)| errno)
        }
        Body::Chunk { len, .. } => {
            let dropped = io::copy(&mut reader.take(len), &mut io::sink())?;
            if dropped == len { Ok(0) } else { Err(ClientError::HungUp) }
        }
    }
}

fn fail(pending: &mut Pending, errno: u32, message: String) {
    // The first error stays.
    if pending.completion.result.is_ok() {
        let errno = if errno == 0 { errno::EINVAL } else { errno };
        pending.completion.result = Err(RequestError { errno, message });
    }
}

/// Where a part of a read goes; its offset, and for a hole its length, are still to be read.
fn place<'a>(
    reader: &mut impl Read,
    pending: &'a mut Pending,
    len: Option<u64>,
) -> Result<&'a mut [u8], ClientError> {
    let mut bytes = [0; 12];
    let size = if len.is_some() { 8 } else { 12 };
    reader.read_exact(&mut bytes[..size])?;
    let len = len.or_else(|| u32_at(&bytes, 8).map(u64::from)).unwrap_or(0);
    let start = u64_at(&bytes, 0).and_then(|at| at.checked_sub(pending.completion.offset));
    let end = start.and_then(|start| start.checked_add(len));
    pending.filled = pending.filled.saturating_add(len);
    let range = match (start.map(usize::try_from), end.map(usize::try_from)) {
        (Some(Ok(start)), Some(Ok(end))) => pending.completion.data.get_mut(start..end),
        _ => None,
    };
    range.ok_or(ClientError::Protocol("a part of a read lies outside of it"))
}

fn error_chunk(reader: &mut impl Read, len: u64) -> Result<(u32, String), ClientError> {
    let wrong = ClientError::Protocol("an error is not well formed");
    if !(6..=MAX_MESSAGE_BYTES + 64).contains(&len) {
        return Err(wrong);
    }
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
    reader.read_exact(&mut bytes)?;
    let errno = u32_at(&bytes, 0).unwrap_or(0);
    let end = 6 + u16_at(&bytes, 4).map_or(0, usize::from);
    let message = bytes.get(6..end).ok_or(wrong)?;
    Ok((errno, String::from_utf8_lossy(message).into_owned()))
}

fn status(
    reader: &mut impl Read,
    pending: &mut Pending,
    len: u64,
    wide: bool,
) -> Result<(), ClientError> {
    let (head, each): (u64, u64) = if wide { (8, 16) } else { (4, 8) };
    let right = pending.completion.command == cmd::BLOCK_STATUS
        && len > head
        && len <= MAX_STATUS_BYTES
        && (len - head).is_multiple_of(each);
    if !right {
        return Err(ClientError::Protocol("a status reply is not well formed"));
    }
    let mut start = [0; 8];
    reader.read_exact(&mut start[..usize::try_from(head).unwrap_or(0)])?;
    let mut context = ContextRanges { id: u32_at(&start, 0).unwrap_or(0), ranges: Vec::new() };
    let mut limited = reader.take(len - head);
    let mut bytes = [0; 16];
    let used = &mut bytes[..usize::try_from(each).unwrap_or(0)];
    while limited.limit() > 0 {
        limited.read_exact(used)?;
        let (len, flags) = if wide {
            (u64_at(used, 0), u64_at(used, 8))
        } else {
            (u32_at(used, 0).map(u64::from), u32_at(used, 4).map(u64::from))
        };
        let (len, flags) = (len.unwrap_or(0), flags.unwrap_or(0));
        if len == 0 {
            return Err(ClientError::Protocol("a status reply has an empty range"));
        }
        context.ranges.push((len, flags));
    }
    pending.completion.contexts.push(context);
    Ok(())
}

/// All of a request in one call, where the system takes it.
pub(super) fn write_both(
    writer: &mut impl io::Write,
    first: &[u8],
    second: &[u8],
) -> io::Result<()> {
    let slices = [io::IoSlice::new(first), io::IoSlice::new(second)];
    let mut written = writer.write_vectored(&slices)?;
    if written < first.len() {
        writer.write_all(&first[written..])?;
        written = first.len();
    }
    writer.write_all(&second[written - first.len()..])
}
