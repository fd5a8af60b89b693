//! Requests: bytes to a header, and a header to a command or the reason why not.

use super::super::Negotiated;
use super::{EXTENDED_REQUEST_MAGIC, REQUEST_MAGIC, cmd, errno, flag, u16_at, u32_at, u64_at};

/// Bytes of a compact header.
pub const HEADER_BYTES: usize = 28;
/// Bytes of an extended header.
pub const EXTENDED_HEADER_BYTES: usize = 32;

/// How much payload of a refused request is read and thrown away, so that the connection may
/// live. Twice what is allowed: a client that is a little wrong learns it, and one that
/// announces gigabytes is not worth the reading.
pub const MAX_SKIP_BYTES: u64 = 2 * super::super::MAX_PAYLOAD_BYTES as u64;

/// A request as it came, with nothing judged but the magic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    pub flags: u16,
    pub kind: u16,
    pub cookie: u64,
    pub offset: u64,
    pub len: u64,
}

impl Header {
    /// Whether the client leaves.
    #[must_use]
    pub const fn is_disconnect(&self) -> bool {
        self.kind == cmd::DISC
    }

    /// The fields that its reply has to repeat.
    #[must_use]
    #[inline]
    pub fn asked(&self) -> Asked {
        Asked { cookie: self.cookie, offset: self.offset }
    }

    /// Appends the bytes of the header. A length beyond 32 bits needs extended headers.
    pub fn encode(&self, extended: bool, out: &mut Vec<u8>) {
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        out.extend_from_slice(&magic.to_be_bytes());
        out.extend_from_slice(&self.flags.to_be_bytes());
        out.extend_from_slice(&self.kind.to_be_bytes());
        out.extend_from_slice(&self.cookie.to_be_bytes());
        out.extend_from_slice(&self.offset.to_be_bytes());
        if extended {
            out.extend_from_slice(&self.len.to_be_bytes());
        } else {
            let len = u32::try_from(self.len).unwrap_or(u32::MAX);
            out.extend_from_slice(&len.to_be_bytes());
        }
    }
}

/// The fields of a request that its reply repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    pub cookie: u64,
    /// Where the request began; extended replies repeat it.
    pub offset: u64,
}

/// The result of parsing the first bytes of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// This many more bytes are needed.
    Need(usize),
    /// No request. The start of the next one is unknown, so the connection ends.
    BadMagic(u32),
    /// A header, and how many bytes it took. Its payload follows.
    Header(Header, usize),
}

/// Reads a header from the start of `bytes`.
#[must_use]
#[inline]
pub fn parse(bytes: &[u8], extended: bool) -> Parsed {
    let (size, right) = if extended {
        (EXTENDED_HEADER_BYTES, EXTENDED_REQUEST_MAGIC)
    } else {
        (HEADER_BYTES, REQUEST_MAGIC)
    };
    match u32_at(bytes, 0) {
        Some(magic) if magic != right => return Parsed::BadMagic(magic),
        _ => {}
    }
    match fields(bytes, extended) {
        Some(header) => Parsed::Header(header, size),
        None => Parsed::Need(size.saturating_sub(bytes.len())),
    }
}

fn fields(bytes: &[u8], extended: bool) -> Option<Header> {
    Some(Header {
        flags: u16_at(bytes, 4)?,
        kind: u16_at(bytes, 6)?,
        cookie: u64_at(bytes, 8)?,
        offset: u64_at(bytes, 16)?,
        len: if extended { u64_at(bytes, 24)? } else { u32_at(bytes, 24)?.into() },
    })
}

/// A request that may be carried out: its flags are known, it lies within the volume, on
/// block boundaries, and is allowed here. A length may be 0; then there is nothing to do, and
/// it succeeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    Read {
        offset: u64,
        /// At most `block_max`.
        len: u32,
        /// At most one chunk of content may be sent.
        df: bool,
    },
    /// Its payload of `len` bytes follows the header.
    Write {
        offset: u64,
        /// At most `block_max`.
        len: u32,
        fua: bool,
    },
    Flush,
    Trim {
        offset: u64,
        len: u64,
        fua: bool,
    },
    WriteZeroes {
        offset: u64,
        len: u64,
        fua: bool,
        /// Space has to be there afterwards.
        no_hole: bool,
        /// Only if it is faster than writing. It is, without `no_hole`; with it the request
        /// was refused already.
        fast_zero: bool,
    },
    Cache {
        offset: u64,
        len: u64,
    },
    /// `len` is not 0.
    BlockStatus {
        offset: u64,
        len: u64,
        /// One range, and no longer than asked for.
        req_one: bool,
    },
    /// The client goes. It gets no reply, and what is in flight is finished first.
    Disconnect,
}

/// Why a request is not carried out, and how the connection goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// As it goes over the wire.
    pub errno: u32,
    pub message: &'static str,
    /// Bytes of payload that follow the header and are to be thrown away.
    pub skip: u64,
    /// The connection ends after the answer: there is no telling where the next request is,
    /// or too much to skip until then.
    pub hang_up: bool,
}

/// How many bytes of payload follow the header.
#[must_use]
#[inline]
pub fn payload_len(header: &Header, agreed: &Negotiated) -> u64 {
    let has_payload = if agreed.extended {
        header.flags & flag::PAYLOAD_LEN != 0
    } else {
        header.kind == cmd::WRITE
    };
    if has_payload { header.len } else { 0 }
}

/// Validates a request. All rules are here; a `Command` needs no further checks.
#[inline]
pub fn check(header: &Header, agreed: &Negotiated) -> Result<Command, Refusal> {
    judge(header, agreed).map_err(|(errno, message)| {
        let payload = payload_len(header, agreed);
        // The document lets a client of extended headers announce no more than the limit.
        let limit = if agreed.extended { agreed.block_max.into() } else { MAX_SKIP_BYTES };
        let hang_up = payload > limit || writes_without_payload(header, agreed);
        Refusal { errno, message, skip: if hang_up { 0 } else { payload }, hang_up }
    })
}

/// The document has a write with extended headers say that its length is one of payload. One
/// that doesn't may be followed by payload or not.
fn writes_without_payload(header: &Header, agreed: &Negotiated) -> bool {
    agreed.extended && header.kind == cmd::WRITE && header.flags & flag::PAYLOAD_LEN == 0
}

type Reason = (u32, &'static str);

fn judge(header: &Header, agreed: &Negotiated) -> Result<Command, Reason> {
    let Header { flags, offset, len, .. } = *header;
    if header.kind == cmd::DISC {
        return Ok(Command::Disconnect);
    }
    check_flags(header, agreed)?;
    let has = |bit: u16| flags & bit != 0;
    let fua = has(flag::FUA);
    match header.kind {
        cmd::READ => {
            check_range(header, agreed, errno::EINVAL)?;
            let len = at_most_payload(len, agreed)?;
            Ok(Command::Read { offset, len, df: has(flag::DF) })
        }
        cmd::WRITE => {
            check_writable(agreed)?;
            check_range(header, agreed, errno::ENOSPC)?;
            let len = at_most_payload(len, agreed)?;
            Ok(Command::Write { offset, len, fua })
        }
        cmd::FLUSH if offset != 0 || len != 0 => {
            Err((errno::EINVAL, "a flush has offset 0 and length 0"))
        }
        cmd::FLUSH => Ok(Command::Flush),
        cmd::TRIM => {
            check_writable(agreed)?;
            check_range(header, agreed, errno::EINVAL)?;
            Ok(Command::Trim { offset, len, fua })
        }
        cmd::CACHE => {
            check_range(header, agreed, errno::EINVAL)?;
            Ok(Command::Cache { offset, len })
        }
        cmd::WRITE_ZEROES => {
            check_writable(agreed)?;
            check_range(header, agreed, errno::ENOSPC)?;
            let (no_hole, fast_zero) = (has(flag::NO_HOLE), has(flag::FAST_ZERO));
            if no_hole && fast_zero {
                // Keeping the space means to write the zeroes.
                return Err((errno::ENOTSUP, "zeroes without a hole are not fast"));
            }
            Ok(Command::WriteZeroes { offset, len, fua, no_hole, fast_zero })
        }
        cmd::BLOCK_STATUS => {
            if agreed.contexts.is_empty() {
                return Err((errno::EINVAL, "no metadata context was negotiated"));
            }
            check_range(header, agreed, errno::EINVAL)?;
            if len == 0 {
                // There has to be a range in the answer, and a range is not empty.
                return Err((errno::EINVAL, "the status of no bytes"));
            }
            Ok(Command::BlockStatus { offset, len, req_one: has(flag::REQ_ONE) })
        }
        _ => Err((errno::EINVAL, "unknown command")),
    }
}

fn check_flags(header: &Header, agreed: &Negotiated) -> Result<(), Reason> {
    // Clients are known to set FUA on commands that write nothing, and the document has
    // servers accept it.
    let known = flag::FUA
        | match header.kind {
            cmd::READ if agreed.structured => flag::DF,
            cmd::WRITE if agreed.extended => flag::PAYLOAD_LEN,
            cmd::WRITE_ZEROES => flag::NO_HOLE | flag::FAST_ZERO,
            cmd::BLOCK_STATUS => flag::REQ_ONE,
            _ => 0,
        };
    if header.flags & !known != 0 {
        return Err((errno::EINVAL, "a flag that this command does not have"));
    }
    if writes_without_payload(header, agreed) {
        return Err((errno::EINVAL, "a write without the payload flag"));
    }
    Ok(())
}

fn check_writable(agreed: &Negotiated) -> Result<(), Reason> {
    if agreed.read_only { Err((errno::EPERM, "the export is read-only")) } else { Ok(()) }
}

fn check_range(header: &Header, agreed: &Negotiated, past_the_end: u32) -> Result<(), Reason> {
    let end = header.offset.checked_add(header.len);
    if end.is_none_or(|end| end > agreed.size) {
        return Err((past_the_end, "past the end of the export"));
    }
    let block = u64::from(agreed.block_min);
    if !header.offset.is_multiple_of(block) || !header.len.is_multiple_of(block) {
        return Err((errno::EINVAL, "not on a block boundary"));
    }
    Ok(())
}

fn at_most_payload(len: u64, agreed: &Negotiated) -> Result<u32, Reason> {
    match u32::try_from(len) {
        Ok(len) if len <= agreed.block_max => Ok(len),
        _ => Err((errno::EINVAL, "longer than the maximum block size")),
    }
}
