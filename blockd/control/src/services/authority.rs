//! Requests whose `:authority` is the path of the socket.
//!
//! Clients on gRPC's C core, as those in Python, send the path of a Unix socket as the authority,
//! percent-encoded. An authority must not be percent-encoded, so the HTTP/2 library refuses such
//! requests before anything else sees them. The authority means nothing here: its invalid
//! bytes are replaced on the way by others of the same length, so that the header tables of both
//! sides stay equal.

use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::{Connected, UdsConnectInfo};

/// The bytes that HTTP/2 begins with.
const PREFACE_BYTES: usize = 24;
/// The head of a frame.
const HEAD_BYTES: usize = 9;
/// The type of a frame with headers.
const HEADERS: u8 = 1;
const FLAG_PADDED: u8 = 0x08;
const FLAG_PRIORITY: u8 = 0x20;
/// Longest frame that is examined: the most that a client may send unless the server permits more.
const MAX_FRAME_BYTES: usize = 16 << 10;
/// Bytes that are read at once.
const READ_BYTES: usize = 8 << 10;

/// A connection whose requests may have any authority.
#[derive(Debug)]
pub(super) struct AnyAuthority {
    inner: UnixStream,
    frames: Frames,
    /// Bytes that are examined and not passed to the reader yet, and how many of them are.
    examined: Vec<u8>,
    taken: usize,
}

impl AnyAuthority {
    pub(super) fn new(inner: UnixStream) -> Self {
        Self { inner, frames: Frames::default(), examined: Vec::new(), taken: 0 }
    }
}

impl Connected for AnyAuthority {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.inner.connect_info()
    }
}

impl AsyncRead for AnyAuthority {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        while this.taken == this.examined.len() {
            this.examined.clear();
            this.taken = 0;
            let mut bytes = [0; READ_BYTES];
            let mut read = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut this.inner).poll_read(context, &mut read))?;
            if read.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            this.frames.pass(read.filled(), &mut this.examined);
        }
        let rest = &this.examined[this.taken..];
        let count = rest.len().min(into.remaining());
        into.put_slice(&rest[..count]);
        this.taken += count;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for AnyAuthority {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

/// Finds the frames in the bytes of a client.
#[derive(Debug)]
struct Frames {
    /// Bytes to pass on before the next head.
    passed: usize,
    /// The frame that is being collected: its head, and if it has headers all of it.
    frame: Vec<u8>,
}

impl Default for Frames {
    fn default() -> Self {
        Self { passed: PREFACE_BYTES, frame: Vec::new() }
    }
}

impl Frames {
    /// Passes bytes on. Those of a frame with headers follow once all of the frame is there.
    fn pass(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) {
        while !bytes.is_empty() {
            let wanted = match self.frame.get(..HEAD_BYTES) {
                _ if self.passed > 0 => self.passed,
                None => HEAD_BYTES - self.frame.len(),
                Some(head) => HEAD_BYTES + payload_bytes(head) - self.frame.len(),
            };
            let (part, rest) = bytes.split_at(wanted.min(bytes.len()));
            bytes = rest;
            if self.passed > 0 {
                self.passed -= part.len();
                out.extend_from_slice(part);
                continue;
            }
            self.frame.extend_from_slice(part);
            let Some(head) = self.frame.get(..HEAD_BYTES) else { continue };
            let length = payload_bytes(head);
            if head[3] != HEADERS || length > MAX_FRAME_BYTES {
                self.passed = length;
                out.append(&mut self.frame);
            } else if self.frame.len() == HEAD_BYTES + length {
                sanitize_frame(&mut self.frame);
                out.append(&mut self.frame);
            }
        }
    }
}

fn payload_bytes(head: &[u8]) -> usize {
    head[..3].iter().fold(0, |length, byte| (length << 8) | usize::from(*byte))
}

/// Replaces the invalid bytes of authorities in the headers of a frame. Headers that continue in
/// another frame are examined as far as they are here: an authority is among the first.
fn sanitize_frame(frame: &mut [u8]) {
    let flags = frame[4];
    let mut fields = HEAD_BYTES..frame.len();
    if flags & FLAG_PADDED != 0 {
        let padding = frame.get(fields.start).copied().map_or(0, usize::from);
        fields = fields.start + 1..fields.end.saturating_sub(padding);
    }
    if flags & FLAG_PRIORITY != 0 {
        fields.start += 5;
    }
    let Some(fields) = frame.get_mut(fields) else { return };
    let mut at = 0;
    while let Some(next) = sanitize_field(fields, at) {
        at = next;
    }
}

/// The name of the field, as it is and as Huffman code.
const AUTHORITY: &[u8] = b":authority";
const AUTHORITY_CODED: &[u8] = &[0xb8, 0x3b, 0x53, 0x39, 0xec, 0x32, 0x7d, 0x7f];
/// Its position in the table that all clients have.
const AUTHORITY_INDEX: usize = 1;

/// Replaces the invalid bytes of a field that is an authority (RFC 7541, section 6). Returns the
/// position of the next field.
fn sanitize_field(fields: &mut [u8], at: usize) -> Option<usize> {
    let bits = match *fields.get(at)? {
        0x80.. => return Some(number(fields, at, 7)?.1),
        0x40.. => 6,
        0x20.. => return Some(number(fields, at, 5)?.1),
        _ => 4,
    };
    let (index, mut at) = number(fields, at, bits)?;
    let mut is_authority = index == AUTHORITY_INDEX;
    if index == 0 {
        let name = text(fields, at)?;
        let found = &fields[name.bytes.clone()];
        is_authority = found == if name.coded { AUTHORITY_CODED } else { AUTHORITY };
        at = name.bytes.end;
    }
    let value = text(fields, at)?;
    let bytes = &mut fields[value.bytes.clone()];
    match (is_authority, value.coded) {
        (true, true) => sanitize_coded(bytes),
        (true, false) => bytes.iter_mut().filter(|byte| b"%/".contains(byte)).for_each(|byte| {
            *byte = b'-';
        }),
        (false, _) => {}
    }
    Some(value.bytes.end)
}

/// A text in a field.
struct Text {
    /// As Huffman code.
    coded: bool,
    bytes: Range<usize>,
}

fn text(fields: &[u8], at: usize) -> Option<Text> {
    let coded = *fields.get(at)? & 0x80 != 0;
    let (length, start) = number(fields, at, 7)?;
    let bytes = start..start.checked_add(length)?;
    fields.get(bytes.clone())?;
    Some(Text { coded, bytes })
}

/// A number whose first `bits` bits are in the byte at `at`, and the position after it.
fn number(fields: &[u8], at: usize, bits: u32) -> Option<(usize, usize)> {
    let most = (1_usize << bits) - 1;
    let mut value = usize::from(*fields.get(at)?) & most;
    let mut at = at + 1;
    if value < most {
        return Some((value, at));
    }
    // Longer numbers than these are no lengths or positions of a frame.
    for shift in [0, 7, 14] {
        let byte = usize::from(*fields.get(at)?);
        at += 1;
        value += (byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some((value, at));
        }
    }
    None
}

/// The codes of `%`, `/` and `-`, of [`CODE_BITS`] bits each (RFC 7541, appendix B).
const PERCENT_CODE: usize = 0x15;
const SLASH_CODE: usize = 0x18;
const HYPHEN_CODE: usize = 0x16;
const CODE_BITS: usize = 6;

/// The lengths of codes in bits, each with the last code of that length. Longer ones are of
/// characters that no authority has.
const LAST_CODES: [(usize, usize); 4] = [(5, 0x09), (6, 0x2d), (7, 0x7b), (8, 0xfd)];

/// Replaces the invalid characters of an authority in Huffman code.
fn sanitize_coded(bytes: &mut [u8]) {
    let mut at = 0;
    loop {
        let code_at = |bytes: &[u8], count: usize| {
            (at..at + count).try_fold(0, |code, bit| Some((code << 1) | bit_of(bytes, bit)?))
        };
        let found = LAST_CODES.iter().find_map(|&(bits, last)| {
            code_at(bytes, bits).filter(|code| *code <= last).map(|code| (bits, code))
        });
        let Some((bits, code)) = found else { return };
        if bits == CODE_BITS && [PERCENT_CODE, SLASH_CODE].contains(&code) {
            for (bit, place) in (0..CODE_BITS).rev().zip(at..) {
                set_bit(bytes, place, (HYPHEN_CODE >> bit) & 1 == 1);
            }
        }
        at += bits;
    }
}

fn bit_of(bytes: &[u8], at: usize) -> Option<usize> {
    bytes.get(at / 8).map(|byte| usize::from((*byte >> (7 - at % 8)) & 1))
}

fn set_bit(bytes: &mut [u8], at: usize, is_set: bool) {
    let mask = 0x80 >> (at % 8);
    if is_set {
        bytes[at / 8] |= mask;
    } else {
        bytes[at / 8] &= !mask;
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;
    use crate::services::testing::Rig;

    /// Codes of the characters of the tests, with their bits.
    fn coded(text: &str) -> Vec<u8> {
        let code = |c: char| -> (u8, u8) {
            match c {
                'a' => (0x03, 5),
                'c' => (0x04, 5),
                'o' => (0x07, 5),
                's' => (0x08, 5),
                't' => (0x09, 5),
                '2' => (0x02, 5),
                '%' => (0x15, 6),
                '-' => (0x16, 6),
                '.' => (0x17, 6),
                '/' => (0x18, 6),
                'n' => (0x2a, 6),
                'r' => (0x2c, 6),
                'u' => (0x2d, 6),
                'F' => (0x61, 7),
                'k' => (0x75, 7),
                other => panic!("{other}"),
            }
        };
        let mut bits: Vec<u8> = Vec::new();
        for (code, count) in text.chars().map(code) {
            bits.extend((0..count).rev().map(|bit| (code >> bit) & 1));
        }
        bits.resize(bits.len().next_multiple_of(8), 1);
        let byte = |bits: &[u8]| bits.iter().fold(0, |byte, bit| (byte << 1) | bit);
        bits.chunks(8).map(byte).collect()
    }

    /// A field with a literal name.
    fn field(name: &str, value: &str) -> Vec<u8> {
        let length = |text: &str| u8::try_from(text.len()).unwrap();
        let (name_length, value_length) = ([0x40, length(name)], [length(value)]);
        [&name_length[..], name.as_bytes(), &value_length, value.as_bytes()].concat()
    }

    fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let head = [length[1], length[2], length[3], kind, flags, 0, 0, 0, stream];
        [&head[..], payload].concat()
    }

    /// The headers of a call, with the authority as the fields given.
    fn headers(authority: &[u8]) -> Vec<u8> {
        let path = field(":path", "/blockd.v1.Control/Version");
        let rest = [field("content-type", "application/grpc"), field("te", "trailers")].concat();
        [path.as_slice(), authority, &[0x83, 0x86], &rest].concat()
    }

    fn sanitized(mut fields: Vec<u8>) -> Vec<u8> {
        let mut whole = frame(HEADERS, 4, 1, &fields);
        sanitize_frame(&mut whole);
        fields.copy_from_slice(&whole[HEAD_BYTES..]);
        fields
    }

    #[test]
    fn only_an_authority_is_replaced_and_keeps_its_length() {
        let with = |value: &str| headers(&field(":authority", value));
        assert_eq!(sanitized(with("run%2Fc.sock")), with("run-2Fc.sock"));
        assert_eq!(sanitized(with("/run/c.sock")), with("-run-c.sock"));
        assert_eq!(sanitized(with("localhost")), with("localhost"));
        let other = headers(&field("user-agent", "a%2Fb"));
        assert_eq!(sanitized(other.clone()), other);
        let by_code = |value: &str| {
            let value = coded(value);
            let length = 0x80 | u8::try_from(value.len()).unwrap();
            [&[0x41, length][..], value.as_slice()].concat()
        };
        let wrong = headers(&by_code("run%2Fc/no.sock"));
        assert_eq!(sanitized(wrong), headers(&by_code("run-2Fc-no.sock")));
    }

    #[test]
    fn bytes_that_come_one_by_one_or_are_no_headers_come_out_the_same() {
        let data = frame(0, 0, 1, &headers(&field(":authority", "a%2Fb")));
        let whole = [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(),
            &frame(4, 0, 0, &[]),
            &frame(HEADERS, FLAG_PADDED | FLAG_PRIORITY, 1, &[3, 0, 0, 0, 0, 1, 0x82, 0, 0, 0]),
            &data,
        ]
        .concat();
        for step in [1, 7, whole.len()] {
            let (mut frames, mut out) = (Frames::default(), Vec::new());
            whole.chunks(step).for_each(|part| frames.pass(part, &mut out));
            assert_eq!(out, whole, "in steps of {step}");
        }
    }

    #[test]
    fn damaged_headers_are_left_to_the_library() {
        let whole = headers(&field(":authority", "run%2Fc.sock"));
        for at in 0..whole.len() {
            for byte in [0, 0x7f, 0x80, 0xff] {
                let mut fields = whole.clone();
                fields[at] = byte;
                assert_eq!(sanitized(fields[..at].to_vec()).len(), at);
                assert_eq!(sanitized(fields).len(), whole.len());
            }
        }
    }

    /// Makes one call by hand. Returns the types of the frames of its stream that come back.
    fn call(socket: &std::path::Path, authority: &[u8]) -> Vec<u8> {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
        stream.write_all(&frame(4, 0, 0, &[])).unwrap();
        stream.write_all(&frame(HEADERS, 4, 1, &headers(authority))).unwrap();
        stream.write_all(&frame(0, 1, 1, &[0; 5])).unwrap();
        let mut found = Vec::new();
        loop {
            let mut head = [0; HEAD_BYTES];
            stream.read_exact(&mut head).unwrap();
            let mut payload = vec![0; payload_bytes(&head)];
            stream.read_exact(&mut payload).unwrap();
            if head[8] == 1 {
                found.push(head[3]);
                // The end of the stream, or its reset.
                if head[4] & 1 == 1 && head[3] < 2 || head[3] == 3 {
                    return found;
                }
            }
        }
    }

    #[tokio::test]
    async fn a_call_with_the_path_of_the_socket_as_its_authority_is_answered() {
        let rig = Rig::new().await;
        let socket = rig.folder.path().join("control.sock");
        for authority in ["localhost", "run%2Fblockd%2Fcontrol.sock", "/run/blockd/control.sock"] {
            let (socket, field) = (socket.clone(), field(":authority", authority));
            let found = tokio::task::spawn_blocking(move || call(&socket, &field)).await.unwrap();
            assert_eq!(found, [1, 0, 1], "{authority}: headers, data, headers");
        }
    }
}
