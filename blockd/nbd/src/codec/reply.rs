//! Replies: simple, structured or extended, as was negotiated.
//!
//! Every function writes to the start of a buffer of at least `MAX_HEADER_BYTES` and returns
//! how many bytes it wrote.

use super::super::Negotiated;
use super::request::Asked;
use super::{
    EXTENDED_REPLY_MAGIC, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk, errno as wire,
};

/// The most that any function here writes, `block_status` excepted.
pub const MAX_HEADER_BYTES: usize = 128;

/// The longest message in an error; a longer one is cut. This many remain of `MAX_HEADER_BYTES`
/// after an extended header, errno, length and offset.
pub const MAX_MESSAGE_BYTES: usize = MAX_HEADER_BYTES - 32 - 4 - 2 - 8;

/// Success, with nothing more to say: of all commands but a read that has data, and the end of
/// one that was sent in chunks.
#[must_use]
#[inline]
pub fn done(out: &mut [u8], agreed: &Negotiated, asked: Asked) -> usize {
    let mut writer = Writer::new(out);
    writer.header(agreed, asked, Chunk { kind: chunk::NONE, done: true, payload: 0 });
    writer.at
}

/// Failure of the whole request. `errno` is one of `codec::errno` and not 0.
#[must_use]
pub fn error(
    out: &mut [u8],
    agreed: &Negotiated,
    asked: Asked,
    errno: u32,
    message: &str,
) -> usize {
    write_error(out, agreed, asked, Failure { errno, message, at: None })
}

/// Failure at one place of the request; the data sent for earlier places is valid.
#[must_use]
pub fn error_at(
    out: &mut [u8],
    agreed: &Negotiated,
    asked: Asked,
    failure: (u32, &str),
    at: u64,
) -> usize {
    let (errno, message) = failure;
    write_error(out, agreed, asked, Failure { errno, message, at: Some(at) })
}

/// Writes the header of `len` bytes of data from offset `at`. With simple replies these have to be
/// all the data of the read. `len` is not 0: a read of nothing is `done`.
#[must_use]
#[inline]
pub fn read_data(
    out: &mut [u8],
    agreed: &Negotiated,
    asked: Asked,
    range: (u64, u32),
    done: bool,
) -> usize {
    let (at, len) = range;
    let mut writer = Writer::new(out);
    let payload = 8 + u64::from(len);
    writer.header(agreed, asked, Chunk { kind: chunk::OFFSET_DATA, done, payload });
    if agreed.structured {
        writer.put(&at.to_be_bytes());
    }
    writer.at
}

/// A range that reads as zeroes, instead of its data. Only where replies are structured; `len`
/// is not 0.
#[must_use]
pub fn read_hole(
    out: &mut [u8],
    agreed: &Negotiated,
    asked: Asked,
    range: (u64, u32),
    done: bool,
) -> usize {
    debug_assert!(agreed.structured, "a simple reply carries its zeroes");
    let (at, len) = range;
    let mut writer = Writer::new(out);
    writer.header(agreed, asked, Chunk { kind: chunk::OFFSET_HOLE, done, payload: 12 });
    writer.put(&at.to_be_bytes());
    writer.put(&len.to_be_bytes());
    writer.at
}

/// Bytes that `block_status` writes for `ranges` ranges.
#[must_use]
pub fn block_status_bytes(agreed: &Negotiated, ranges: usize) -> usize {
    if agreed.extended { 40 + 16 * ranges } else { 24 + 8 * ranges }
}

/// Writes one context's answer to a block status; with `done`, as the last: consecutive ranges from
/// the request's offset on, each a length that is not 0 and flags of the context. Writes as many as
/// there is room for, and in 32-bit form none after one that does not fit 32 bits, which is
/// shortened. There has to be room for one, and one to write.
#[must_use]
pub fn block_status(
    out: &mut [u8],
    agreed: &Negotiated,
    asked: Asked,
    (context, done): (u32, bool),
    ranges: impl Iterator<Item = (u64, u32)>,
) -> usize {
    let start = block_status_bytes(agreed, 0);
    let each = block_status_bytes(agreed, 1) - start;
    let room = out.len().saturating_sub(start) / each;
    let mut writer = Writer { out: &mut *out, at: start };
    let mut count: u32 = 0;
    for (len, flags) in ranges.take(room) {
        count += 1;
        if agreed.extended {
            writer.put(&len.to_be_bytes());
            writer.put(&u64::from(flags).to_be_bytes());
            continue;
        }
        let longest = u32::MAX - u32::MAX % agreed.block_min.max(1);
        let short = u32::try_from(len).ok().filter(|short| *short <= longest);
        writer.put(&short.unwrap_or(longest).to_be_bytes());
        writer.put(&flags.to_be_bytes());
        if short.is_none() {
            break;
        }
    }
    let end = writer.at;
    let kind = if agreed.extended { chunk::BLOCK_STATUS_EXT } else { chunk::BLOCK_STATUS };
    let payload = u64::from(count) * as_u64(each) + if agreed.extended { 8 } else { 4 };
    let mut writer = Writer::new(out);
    writer.header(agreed, asked, Chunk { kind, done, payload });
    writer.put(&context.to_be_bytes());
    if agreed.extended {
        writer.put(&count.to_be_bytes());
    }
    end
}

struct Chunk {
    kind: u16,
    done: bool,
    payload: u64,
}

struct Failure<'a> {
    errno: u32,
    message: &'a str,
    at: Option<u64>,
}

fn write_error(out: &mut [u8], agreed: &Negotiated, asked: Asked, failure: Failure<'_>) -> usize {
    let mut writer = Writer::new(out);
    // 0 would be a success to the client.
    let errno = if failure.errno == 0 { wire::EIO } else { failure.errno };
    if !agreed.structured && !agreed.extended {
        writer.put(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        writer.put(&errno.to_be_bytes());
        writer.put(&asked.cookie.to_be_bytes());
        return writer.at;
    }
    let message = cut(failure.message);
    let kind = if failure.at.is_some() { chunk::ERROR_OFFSET } else { chunk::ERROR };
    let payload = 6 + as_u64(message.len()) + if failure.at.is_some() { 8 } else { 0 };
    writer.header(agreed, asked, Chunk { kind, done: true, payload });
    writer.put(&errno.to_be_bytes());
    writer.put(&u16::try_from(message.len()).unwrap_or(0).to_be_bytes());
    writer.put(message.as_bytes());
    if let Some(at) = failure.at {
        writer.put(&at.to_be_bytes());
    }
    writer.at
}

/// The longest start of a message that fits, in whole characters.
fn cut(message: &str) -> &str {
    &message[..message.floor_char_boundary(MAX_MESSAGE_BYTES)]
}

fn as_u64(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl<'a> Writer<'a> {
    fn new(out: &'a mut [u8]) -> Self {
        Self { out, at: 0 }
    }

    fn put(&mut self, bytes: &[u8]) {
        let end = self.at + bytes.len();
        self.out[self.at..end].copy_from_slice(bytes);
        self.at = end;
    }

    fn header(&mut self, agreed: &Negotiated, asked: Asked, chunk: Chunk) {
        if !agreed.structured && !agreed.extended {
            self.put(&SIMPLE_REPLY_MAGIC.to_be_bytes());
            self.put(&0_u32.to_be_bytes());
            self.put(&asked.cookie.to_be_bytes());
            return;
        }
        let magic = if agreed.extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC };
        let flags = if chunk.done { chunk::FLAG_DONE } else { 0 };
        self.put(&magic.to_be_bytes());
        self.put(&flags.to_be_bytes());
        self.put(&chunk.kind.to_be_bytes());
        self.put(&asked.cookie.to_be_bytes());
        if agreed.extended {
            self.put(&asked.offset.to_be_bytes());
            self.put(&chunk.payload.to_be_bytes());
        } else {
            // No payload is longer: reads end at `block_max`, and buffers are shorter still.
            let payload = u32::try_from(chunk.payload).unwrap_or(u32::MAX);
            self.put(&payload.to_be_bytes());
        }
    }
}
