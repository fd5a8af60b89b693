//! The file of an incremental backup: the content of a snapshot, as a whole or since another one.
//!
//! # Why a form of our own
//!
//! A raw image has no place for the base of an increment, qcow2 has a file name there, and the
//! formats that other block stores send between each other have no checksums. A restore years later
//! must detect a changed byte or a missing end, and must not put an increment on the wrong image.
//!
//! # Form
//!
//! Numbers are little-endian, sizes and offsets are bytes. First a header of 512 bytes:
//!
//! | at | bytes | |
//! |---|---|---|
//! | 0 | 8 | `blkdincr` |
//! | 8 | 4 | version: 3, or 2 where nothing of version 3 is used. A reader refuses a higher one |
//! | 12 | 4 | bytes of the header: 512 |
//! | 16 | 16 | id of the pool |
//! | 32 | 8 | id of the snapshot |
//! | 40 | 8 | its size |
//! | 48 | 4 | its block: all offsets and lengths are multiples of it |
//! | 52 | 4 | 1: these are the changes since a base. 0: there is none, and the copy begins as zeroes |
//! | 56 | 8 | id of the base, a snapshot of the same pool; 0 without one |
//! | 64 | 8 | its size |
//! | 72 | 2 + 128 | length of the snapshot's name, the name, zeroes |
//! | 202 | 2 + 128 | the same of the base |
//! | 332 | 8 | when the snapshot was made, in milliseconds since 1970 in UTC; 0 where unknown |
//! | 340 | 8 | the same of the base |
//! | 348 | 8 | where it begins: an earlier part of the same stream has all before this offset |
//! | 356 | 4 | 1: data may be compressed. 0: no record of that kind is in it |
//! | 360 | 148 | zeroes |
//! | 508 | 4 | CRC-32C of all bytes before |
//!
//! Then records, each with 24 bytes of head:
//!
//! | at | bytes | |
//! |---|---|---|
//! | 0 | 4 | 1 data, 2 zeroes, 3 end, 4 compressed data |
//! | 4 | 4 | CRC-32C of the other 20 bytes of the head and, of data, of what follows |
//! | 8 | 8 | offset in the snapshot; of the end: how many records came before |
//! | 16 | 8 | length; of the end: bytes of data in all of them |
//!
//! Data follows its head, at most 1 MiB. Of compressed data the length has two parts of 4 bytes:
//! that of the data, and that of the frame of zstd that follows, which is shorter. Records are in
//! order and don't overlap. After the head of the end come 8 bytes more, XXH3-64 of everything
//! before them, and nothing after those.
//!
//! Version 2 has no compressed data and begins at 0. Version 1 moreover has zeroes in place of the
//! two times.
//!
//! A snapshot is known by the id of its pool, its own id and the time. Without the time, pools that
//! were copied byte by byte and then used side by side would have different snapshots that cannot
//! be distinguished.
//!
//! To apply it: give the copy of the base the snapshot's size, write data, zero zeroes. Without a
//! base a file leaves zeroes out; a stream over TCP has them, which show how far it is.

mod read;
mod write;

pub(crate) use read::{Reader, Record};
pub(crate) use write::{LEVELS, Writer};

use blockd_mapper::geometry::MAX_NAME;

const MAGIC: [u8; 8] = *b"blkdincr";
const VERSION: u32 = 3;
/// The first version with times.
const TIMES_SINCE: u32 = 2;
/// The first version of streams that begin in the middle, and of compressed data.
const PARTS_SINCE: u32 = 3;
pub(crate) const HEADER_BYTES: usize = 512;
const HEAD_BYTES: usize = 24;
/// Most bytes of data in a record. Part of the format: a reader takes no longer ones.
const MAX_DATA_BYTES: usize = 1 << 20;

const DATA: u32 = 1;
const ZEROES: u32 = 2;
const END: u32 = 3;
const COMPRESSED: u32 = 4;

/// Whether a file begins like an incremental backup.
pub(crate) fn begins(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC)
}

/// A snapshot, as it is known outside of its pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Unique in the pool, and not used again.
    pub(crate) id: u32,
    pub(crate) name: String,
    pub(crate) size_bytes: u64,
    /// Milliseconds since 1970; 0 where it isn't known.
    pub(crate) made_unix_ms: u64,
}

impl Identity {
    /// Whether the times, so far as they are known, are of one snapshot.
    pub(crate) fn fits_time(&self, made_unix_ms: u64) -> bool {
        made_unix_ms == 0 || self.made_unix_ms == 0 || made_unix_ms == self.made_unix_ms
    }
}

/// How far a stream was received: what `blockd send --resume` goes on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    /// All of the snapshot before this offset was received, and is durable.
    pub(crate) offset: u64,
    /// The snapshot and its base, as [`Header::ends`] has them.
    pub(crate) ends: String,
}

impl std::fmt::Display for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.offset, self.ends)
    }
}

impl std::str::FromStr for Position {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once(':').and_then(|(offset, ends)| {
            (!ends.is_empty()).then(|| Some((offset.parse().ok()?, ends.to_owned()))).flatten()
        });
        let (offset, ends) =
            parts.ok_or_else(|| "must be what `blockd receive --position` prints".to_owned())?;
        Ok(Self { offset, ends })
    }
}

/// The header of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) pool_id: [u8; 16],
    pub(crate) block_bytes: u32,
    pub(crate) snapshot: Identity,
    pub(crate) base: Option<Identity>,
    /// Where the stream begins.
    pub(crate) from_bytes: u64,
    /// Data may be compressed.
    pub(crate) is_compressed: bool,
}

impl Header {
    /// The snapshot and its base by all that identifies them.
    pub(crate) fn ends(&self) -> String {
        let pool = blockd_media::units::hex(&self.pool_id);
        let one = |of: &Identity| format!("{}-{:x}", of.id, of.made_unix_ms);
        let base = self.base.as_ref().map_or_else(|| "none".to_owned(), one);
        format!("{pool}:{}:{base}", one(&self.snapshot))
    }

    /// In the lowest version that can express it, so that older releases read what they can.
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let is_part = self.from_bytes > 0 || self.is_compressed;
        self.encode_as(if is_part { VERSION } else { TIMES_SINCE })
    }

    fn encode_as(&self, version: u32) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        put(0, &MAGIC);
        put(8, &version.to_le_bytes());
        put(12, &512_u32.to_le_bytes());
        put(16, &self.pool_id);
        put(32, &u64::from(self.snapshot.id).to_le_bytes());
        put(40, &self.snapshot.size_bytes.to_le_bytes());
        put(48, &self.block_bytes.to_le_bytes());
        put(72, &named(&self.snapshot.name));
        if version >= TIMES_SINCE {
            let made = |of: &Identity| of.made_unix_ms.to_le_bytes();
            put(332, &made(&self.snapshot));
            put(340, &self.base.as_ref().map_or([0; 8], made));
        }
        if version >= PARTS_SINCE {
            put(348, &self.from_bytes.to_le_bytes());
            put(356, &u32::from(self.is_compressed).to_le_bytes());
        }
        if let Some(base) = &self.base {
            put(52, &1_u32.to_le_bytes());
            put(56, &u64::from(base.id).to_le_bytes());
            put(64, &base.size_bytes.to_le_bytes());
            put(202, &named(&base.name));
        }
        let sum = crc32c::crc32c(&bytes[..508]);
        bytes[508..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// The error is what is wrong, to follow the file's name.
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, String> {
        if bytes[..8] != MAGIC {
            return Err("is no incremental backup of blockd".to_owned());
        }
        let version = u32_at(bytes, 8);
        if version > VERSION {
            let problem = "is of a newer version";
            return Err(format!("{problem}, {version}: this blockd reads up to {VERSION}"));
        }
        if u32_at(bytes, 508) != crc32c::crc32c(&bytes[..508]) {
            return Err("has a header that was changed: its checksum is wrong".to_owned());
        }
        let mut pool_id = [0; 16];
        pool_id.copy_from_slice(&bytes[16..32]);
        let has_base = u32_at(bytes, 52);
        let times = version >= TIMES_SINCE;
        let identity = |id: usize, size: usize, name: usize, made: usize| {
            let len = usize::from(u16::from_le_bytes([bytes[name], bytes[name + 1]]));
            let text = bytes[name + 2..].get(..len.min(MAX_NAME)).and_then(|text| {
                (len <= MAX_NAME).then(|| std::str::from_utf8(text).ok()).flatten()
            });
            Some(Identity {
                id: u32::try_from(u64_at(bytes, id)).ok()?,
                name: text?.to_owned(),
                size_bytes: u64_at(bytes, size),
                made_unix_ms: if times { u64_at(bytes, made) } else { 0 },
            })
        };
        let snapshot = identity(32, 40, 72, 332);
        let base = (has_base == 1).then(|| identity(56, 64, 202, 340));
        let block_bytes = u32_at(bytes, 48);
        let (Some(snapshot), None | Some(Some(_))) = (snapshot, &base) else {
            return Err(IMPOSSIBLE.to_owned());
        };
        let (from_bytes, is_compressed) = match version {
            PARTS_SINCE.. => (u64_at(bytes, 348), u32_at(bytes, 356) == 1),
            _ => (0, false),
        };
        let base = base.flatten();
        let header = Self { pool_id, block_bytes, snapshot, base, from_bytes, is_compressed };
        let fits = block_bytes.is_power_of_two()
            && (512..=4096).contains(&block_bytes)
            && header.snapshot.size_bytes.is_multiple_of(block_bytes.into())
            && from_bytes.is_multiple_of(block_bytes.into())
            && from_bytes <= header.snapshot.size_bytes;
        // Whatever else was set means something to a later version.
        if version == 0 || !fits || header.encode_as(version) != *bytes {
            return Err(IMPOSSIBLE.to_owned());
        }
        Ok(header)
    }
}

const IMPOSSIBLE: &str = "has a header that no version of blockd writes";

/// A name as the header has it.
fn named(name: &str) -> [u8; 2 + MAX_NAME] {
    let mut field = [0; 2 + MAX_NAME];
    let len = name.len().min(MAX_NAME);
    field[..2].copy_from_slice(&u16::try_from(len).unwrap_or(0).to_le_bytes());
    field[2..2 + len].copy_from_slice(&name.as_bytes()[..len]);
    field
}

fn head(kind: u32, first: u64, second: u64, data: &[u8]) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..4].copy_from_slice(&kind.to_le_bytes());
    head[8..16].copy_from_slice(&first.to_le_bytes());
    head[16..].copy_from_slice(&second.to_le_bytes());
    let sum = sum_of(&head, data);
    head[4..8].copy_from_slice(&sum.to_le_bytes());
    head
}

fn sum_of(head: &[u8; HEAD_BYTES], data: &[u8]) -> u32 {
    let sum = crc32c::crc32c_append(crc32c::crc32c(&head[..4]), &head[8..]);
    crc32c::crc32c_append(sum, data)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |found| u32::from_le_bytes(*found))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |found| u64::from_le_bytes(*found))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            pool_id: *b"\x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff",
            block_bytes: 4096,
            snapshot: identity(9, "db@tue", 64 << 20, 0x0123_4567_89ab),
            base: Some(identity(7, "db@mon", 32 << 20, 0x0123_4567_0000)),
            from_bytes: 0,
            is_compressed: false,
        }
    }

    fn identity(id: u32, name: &str, size_bytes: u64, made_unix_ms: u64) -> Identity {
        Identity { id, name: name.to_owned(), size_bytes, made_unix_ms }
    }

    /// The same as version 1 has it.
    fn timeless() -> Header {
        let without = |of: Identity| Identity { made_unix_ms: 0, ..of };
        let Header { snapshot, base, .. } = header();
        Header { snapshot: without(snapshot), base: base.map(without), ..header() }
    }

    fn file() -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut writer = Writer::begin(&mut bytes, &header()).unwrap();
        writer.data(4096, &[5; 8192]).unwrap();
        writer.zeroes(16384, 40 << 20).unwrap();
        writer.data(63 << 20, &vec![7; MAX_DATA_BYTES]).unwrap();
        writer.finish().unwrap();
        bytes
    }

    /// All of a file; the error is what is wrong with it.
    fn read(bytes: &[u8]) -> Result<Vec<Record>, String> {
        let mut reader = Reader::begin(bytes, "file").map_err(|error| error.to_string())?;
        let mut records = Vec::new();
        while let Some(record) = reader.next().map_err(|error| error.to_string())? {
            records.push(record);
        }
        Ok(records)
    }

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u32> = text.chars().filter_map(|c| c.to_digit(16)).collect();
        digits.chunks(2).map(|pair| u8::try_from(pair[0] * 16 + pair[1]).unwrap()).collect()
    }

    #[test]
    fn the_header_is_what_the_description_says_byte_for_byte() {
        let mut expected = hex("626c6b64696e6372 01000000 00020000
             00112233445566778899aabbccddeeff 0900000000000000 0000000400000000 00100000 01000000
             0700000000000000 0000000200000000 0600 646240747565");
        expected.resize(202, 0);
        expected.extend(hex("0600 6462406d6f6e"));
        expected.resize(508, 0);
        // The sums, reckoned by another program.
        expected.extend(hex("51e2c4c0"));
        assert_eq!(timeless().encode_as(1)[..], expected);
        assert_eq!(Header::decode(&timeless().encode_as(1)), Ok(timeless()));
        expected[8] = 2;
        expected[332..348].copy_from_slice(&hex("ab89674523010000 0000674523010000"));
        expected[508..].copy_from_slice(&hex("228d8e5a"));
        assert_eq!(header().encode()[..], expected);
        assert_eq!(Header::decode(&header().encode()), Ok(header()));
        let whole = Header { base: None, ..header() };
        assert_eq!(Header::decode(&whole.encode()), Ok(whole));
        let part = Header { from_bytes: 48 << 20, is_compressed: true, ..header() };
        expected[8] = 3;
        expected[348..360].copy_from_slice(&hex("0000000300000000 01000000"));
        let sum = crc32c::crc32c(&expected[..508]);
        expected[508..].copy_from_slice(&sum.to_le_bytes());
        assert_eq!(part.encode()[..], expected);
        assert_eq!(Header::decode(&part.encode()), Ok(part));
    }

    /// A stream of version 3: heads are held by their bytes, the frame of zstd by its magic number.
    #[test]
    fn compressed_data_is_what_the_description_says_and_is_read_back() {
        let part = Header { from_bytes: 48 << 20, is_compressed: true, ..header() };
        let mut bytes = Vec::new();
        let mut writer = Writer::begin(&mut bytes, &part).unwrap().compressing(3).unwrap();
        writer.data(48 << 20, &[7; 8192]).unwrap();
        let noise: Vec<u8> = {
            let mut random = fastrand::Rng::with_seed(1);
            (0..4096).map(|_| random.u8(..)).collect()
        };
        writer.data(50 << 20, &noise).unwrap();
        writer.finish().unwrap();
        let (head, frame) = bytes[512..].split_at(24);
        assert_eq!(head[..4], hex("04000000"));
        assert_eq!(head[8..20], hex("0000000300000000 00200000"));
        let len = usize::try_from(u32_at(head, 20)).unwrap();
        assert!(len < 64, "{len}");
        assert_eq!(frame[..4], hex("28b52ffd"), "a frame of zstd");
        let sum = crc32c::crc32c(&[&head[..4], &head[8..], &frame[..len]].concat());
        assert_eq!(head[4..8], sum.to_le_bytes());
        // Noise would become longer.
        assert_eq!(frame[len..len + 4], hex("01000000"));
        let records = read(&bytes).unwrap();
        assert_eq!(records[0], Record::Data { offset: 48 << 20, data: vec![7; 8192] });
        assert_eq!(records[1], Record::Data { offset: 50 << 20, data: noise });
        let end = &bytes[bytes.len() - 32..];
        assert_eq!(end[8..24], hex("0200000000000000 0030000000000000"));
        for at in 512..512 + 24 + len {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert!(read(&changed).is_err(), "byte {at} can be changed");
        }
    }

    #[test]
    fn a_record_that_is_refused_is_not_behind_the_position() {
        let part = Header { is_compressed: true, ..header() };
        let garbage = [1; 100];
        for (kind, second) in [(COMPRESSED, 100 << 32 | 4096), (5, 4096)] {
            let data = if kind == COMPRESSED { &garbage[..] } else { &[] };
            let mut bytes = part.encode().to_vec();
            bytes.extend(head(DATA, 4096, 4096, &[7; 4096]));
            bytes.extend([7; 4096]);
            bytes.extend(head(kind, 16384, second, data));
            bytes.extend(data);
            let mut reader = Reader::begin(bytes.as_slice(), "file").unwrap();
            reader.next().unwrap();
            let problem = reader.next().unwrap_err().to_string();
            assert!(problem.contains("a record, number 2, that no version"), "{problem}");
            assert_eq!(reader.at(), 8192);
            assert!(reader.is_strange());
        }
    }

    #[test]
    fn one_bit_that_changes_leaves_what_came_before_to_be_believed() {
        let data = [7; 4096];
        let mut bytes = header().encode().to_vec();
        for offset in [0, 4096] {
            bytes.extend(head(DATA, offset, 4096, &data));
            bytes.extend(data);
        }
        let second = HEADER_BYTES + HEAD_BYTES + 4096;
        for bit in 0..8 * HEAD_BYTES {
            let mut changed = bytes.clone();
            changed[second + bit / 8] ^= 1 << (bit % 8);
            let mut reader = Reader::begin(changed.as_slice(), "file").unwrap();
            reader.next().unwrap();
            assert!(reader.next().is_err(), "bit {bit} can be changed");
            assert!(reader.at() == 4096 && !reader.is_strange(), "bit {bit}");
        }
    }

    #[test]
    fn a_position_is_printed_and_parsed() {
        let position = Position { offset: 8 << 20, ends: header().ends() };
        let text = "8388608:00112233445566778899aabbccddeeff:9-123456789ab:7-12345670000";
        assert_eq!(position.to_string(), text);
        assert_eq!(position.to_string().parse(), Ok(position));
        for bad in ["", "1", "1:", ":a", "x:a", "-1:a"] {
            assert!(bad.parse::<Position>().is_err(), "{bad}");
        }
    }

    #[test]
    fn records_are_what_the_description_says_byte_for_byte() {
        let bytes = file();
        let (first, rest) = bytes[512..].split_at(24 + 8192);
        assert_eq!(first[..4], hex("01000000"));
        assert_eq!(first[8..24], hex("0010000000000000 0020000000000000"));
        let sum = crc32c::crc32c(&[&first[..4], &first[8..]].concat());
        assert_eq!(first[4..8], sum.to_le_bytes());
        assert_eq!(rest[..4], hex("02000000"));
        assert_eq!(rest[8..24], hex("0040000000000000 0000800200000000"));
        let end = &bytes[bytes.len() - 32..];
        assert_eq!(end[..4], hex("03000000"));
        assert_eq!(end[8..24], hex("0300000000000000 0020100000000000"));
        let sum = xxhash_rust::xxh3::xxh3_64(&bytes[..bytes.len() - 8]);
        assert_eq!(end[24..], sum.to_le_bytes());
    }

    #[test]
    fn a_written_file_is_read_back() {
        let records = read(&file()).unwrap();
        assert_eq!(records[0], Record::Data { offset: 4096, data: vec![5; 8192] });
        assert_eq!(records[1], Record::Zeroes { offset: 16384, len: 40 << 20 });
        assert!(matches!(records[2], Record::Data { offset, .. } if offset == 63 << 20));
        assert_eq!(records.len(), 3);
    }

    #[test]
    fn a_file_that_is_cut_anywhere_says_so() {
        let whole = file();
        let ends = (0..600).chain(512 + 24 + 8000..512 + 24 + 8300);
        for end in ends.chain(whole.len() - 100..whole.len()) {
            let problem = read(&whole[..end]).unwrap_err();
            let expected = "file: ends in the middle: it was cut short, or is still being written";
            assert_eq!(problem, expected, "cut at {end}");
        }
        let longer = [whole.as_slice(), b"x"].concat();
        assert_eq!(read(&longer).unwrap_err(), "file: goes on after its end");
    }

    #[test]
    fn a_bit_that_was_changed_anywhere_is_noticed() {
        let whole = file();
        let places = (0..560).chain([512 + 24 + 100, 512 + 24 + 8192 + 20, whole.len() - 900_000]);
        for at in places.chain(whole.len() - 32..whole.len()) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x10;
            assert!(read(&bytes).is_err(), "byte {at} can be changed");
        }
    }

    /// The header with other bytes at a place, and a right sum.
    fn forged(at: usize, part: &[u8]) -> Vec<u8> {
        let mut bytes = file();
        bytes[at..at + part.len()].copy_from_slice(part);
        let sum = crc32c::crc32c(&bytes[..508]);
        bytes[508..512].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    #[test]
    fn newer_and_foreign_files_are_refused_with_the_reason() {
        let problem = read(&forged(8, &[4, 0, 0, 0])).unwrap_err();
        assert_eq!(problem, "file: is of a newer version, 4: this blockd reads up to 3");
        let problem = read(&forged(0, b"QFI\xfb")).unwrap_err();
        assert_eq!(problem, "file: is no incremental backup of blockd");
        for (at, part) in
            [(8, [0; 4]), (8, [1, 0, 0, 0]), (12, [9; 4]), (48, [0, 3, 0, 0]), (52, [2, 0, 0, 0])]
        {
            let problem = read(&forged(at, &part)).unwrap_err();
            assert!(problem.contains(IMPOSSIBLE), "{at}: {problem}");
        }
        for at in [36, 41, 73, 81, 211, 400] {
            let problem = read(&forged(at, &[1])).unwrap_err();
            assert!(problem.contains(IMPOSSIBLE), "{at}: {problem}");
        }
    }

    #[test]
    fn records_that_no_writer_makes_are_refused_although_their_sums_are_right() {
        /// Kind, the two numbers, and data.
        type Made<'a> = (u32, u64, u64, &'a [u8]);
        let with = |records: &[Made<'_>]| {
            let mut bytes = header().encode().to_vec();
            for (kind, first, second, data) in records {
                bytes.extend(head(*kind, *first, *second, data));
                bytes.extend_from_slice(data);
            }
            bytes
        };
        let data = [1; 4096];
        let cases: [&[Made<'_>]; 10] = [
            &[(5, 0, 4096, &[])],
            // Only where the header allows it.
            &[(COMPRESSED, 0, 4096 << 32 | 4096, &data)],
            &[(ZEROES, 0, 0, &[])],
            &[(ZEROES, 0, 512, &[])],
            &[(ZEROES, 512, 4096, &[])],
            &[(ZEROES, 4096, 4096, &[]), (DATA, 4096, 4096, &data)],
            &[(ZEROES, 64 << 20, 4096, &[])],
            &[(ZEROES, u64::MAX - 4095, 4096, &[])],
            &[(DATA, 0, 2 << 20, &[])],
            &[(DATA, 0, 4096, &data), (END, 2, 4096, &[])],
        ];
        for case in cases {
            let problem = read(&with(case)).unwrap_err();
            assert!(problem.contains("no version of blockd writes"), "{problem}");
        }
    }
}
