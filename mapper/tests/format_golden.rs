//! The bytes of the format. A test that fails here has found a change of the format: then
//! `docs/ON_DISK_FORMAT.md` and the version change with it, or the change is taken back.
//!
//! Each constant shows the 32-byte rows that aren't all zero.

#![allow(clippy::unwrap_used, reason = "a test ends where an expectation fails")]

mod samples;

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockd_mapper::format::Place;
use blockd_mapper::format::catalogue::{decode_catalogue, encode_catalogue};
use blockd_mapper::format::index_page::{decode_index, encode_index};
use blockd_mapper::format::labels::{decode_labels, encode_labels};
use blockd_mapper::format::leaf_page::{decode_leaf, encode_composite_leaf, encode_leaf};
use blockd_mapper::format::page::PageExpect;
use blockd_mapper::format::record;
use blockd_mapper::format::superblock::Superblock;
use blockd_mapper::format::under_page::{decode_under, encode_under};
use blockd_mapper::format::wal::decode_block;
use blockd_mapper::io::Page;
use blockd_mapper::ring::{DeltaRing, Dropped, RingMemory, VecRingMemory};
use blockd_mapper::units::{LeafId, Lsn, SlotIndex};
use samples::{POOL, limits};

const SUPERBLOCK: &str = "
0000: 424c4f43 4b447362 7008d07a 01000000 00000000 00000000 00000000 00000000
0020: 00000000 00000000 73616d70 6c652070 6f6f6c20 69642e2e 0b0a0000 00000100
0040: 21000000 00000000 31000000 00000000 08070605 04030201 01010201 00000000
0060: 48474645 44434241 b0b0b0b0 b0b0b0b0 b0b0b0b0 b0b0b0b0 01000000 00000000
0080: 10000000 20000000 51000000 00000000 68676665 64636261 71000000 00000000
00a0: 23010000 00000000 88878685 84838281 01200000 00000000 40000000 91000000
0200: 01010101 01010101 01010101 01010101 00100010 00000000 00000000 00000000
0220: 00100000 00000000 00020000 01000000 00000000 00000000 00000000 00000000
0240: 02020202 02020202 02020202 02020202 00100008 00000000 00200000 00000000
0260: 00080000 00000000 00020000 02000000 00000000 00000000 00000000 00000000";
const LEAF: &str = "
0000: 42447067 01000100 f40a0e82 07000000 73616d70 6c652070 6f6f6c20 69642e2e
0020: 0b0a0000 03000000 61000000 00000000 78563412 00000000 21000000 00000000
0040: debc0a00 00010180 00000000 00000000 00000000 00000000 00000000 00000000
0060: 00000000 00000000 00000500 00000001 00000000 00000000 00000000 00000000
0e20: 00000000 00000000 00000000 00000000 00000600 00000001 ffff0000 00000000";
const COMPOSITE_LEAF: &str = "
0000: 42447067 01000200 33f7d9f7 07000000 73616d70 6c652070 6f6f6c20 69642e2e
0020: 0b0a0000 04000000 61000000 00000000 78563412 00000000 21000000 00000000
0040: debc0a00 00022184 00000000 00000000 00000000 00000000 00000000 00000000
0060: 00000000 00000000 00000500 00000001 01000000 00000000 07000000 00020000
0e20: 00000000 00000000 00000000 00000000 00000900 00000002 ff7f0000 00000000
0e40: 91785600 00000000 98979695 94939291 00000000 00000000 00000000 00000000";
const UNDER: &str = "
0000: 42447067 04000100 51d2f68f 07000000 73616d70 6c652070 6f6f6c20 69642e2e
0020: 0b0a0000 03000000 61000000 00000000 78563412 00000000 21000000 00000000
0040: 65870900 0001f0ff 00000000 00000000 00000000 00000000 00000000 00000000
0060: 00000000 00000000 00000000 00000000 00000000 00000000 08000000 00010000
0e20: 00000000 00000000 00000000 00000000 00000a00 00000001 ffff0000 00000000";
const INDEX: &str = "
0000: 42447067 02020100 c36514f2 07000000 73616d70 6c652070 6f6f6c20 69642e2e
0020: 0b0a0000 02000000 61000000 00000000 78563412 00000000 21000000 00000000
0040: ddeeff00 00000000 18171615 14131211 00000000 00000000 00000000 00000000
0fe0: 00000000 00000000 00000000 00000000 09000000 00000000 00000000 00000000";
const CATALOGUE: &str = "
0000: 42447067 03000100 b8604c08 00000000 73616d70 6c652070 6f6f6c20 69642e2e
0020: 0b0a0000 02000000 02000000 00000000 78563412 00000000 21000000 00000000
0040: 07000000 03000000 05000000 00100000 00000000 04000000 c1000000 00000000
0060: d1000000 00000000 e1000000 00000000 01020b00 00000000 44335a76 98010000
00c0: 7076632d c3bc6d6c 61757400 00000000 00000000 00000000 00000000 00000000
0e40: 08000000 03000000 05000000 00100000 00000000 04000000 c1000000 00000000
0e60: 00000000 00000000 00000000 00000000 02000b00 00000000 44335a76 98010000
0ec0: 7076632d c3bc6d6c 61757400 00000000 00000000 00000000 00000000 00000000";
const LABELS: &str = "
0000: 42447067 05000100 9741d344 07000000 73616d70 6c652070 6f6f6c20 69642e2e
0020: 0b0a0000 02000000 61000000 00000000 78563412 00000000 21000000 00000000
0040: 6170703d 0a657861 6d706c65 2e6f7267 2f726f6c 653d6462 20c3bc3d 310a0000";
const RECORDS: &str = "
0000: 01012211 04030201 01000000 03000000 debc0a00 00000000 21840000 00000000
0020: 02012211 04030201 01000000 03000000 00000000 00000000 00000000 00000000
0040: 03012211 04030201 01000003 00000000 00000000 00000000 00000000 00000000
0060: 04022211 04030201 00000000 00010000 00020000 00000000 0145335a 76980100
0080: ff012211 04030201 61000000 00000000 00000000 00000000 00000000 00000000
00a0: 05012211 04030201 00000000 00000000 00000000 00000000 00000000 00000000
00c0: 06012211 04030201 00563412 00000000 00000000 00000000 00000000 00000000
00e0: 07022211 04030201 11000000 00000000 00000000 00000000 1845335a 76980100
0100: ff012211 04030201 65786163 746c792d 7477656e 74792d66 6f75722d 62797465
0120: 08072211 04030201 11000000 00000000 00000000 00020000 80ffffff ffffffff
0140: ff012211 04030201 30313233 34353637 38396162 63646566 30313233 34353637
0160: ff022211 04030201 38396162 63646566 30313233 34353637 38396162 63646566
0180: ff032211 04030201 30313233 34353637 38396162 63646566 30313233 34353637
01a0: ff042211 04030201 38396162 63646566 30313233 34353637 38396162 63646566
01c0: ff052211 04030201 30313233 34353637 38396162 63646566 30313233 34353637
01e0: ff062211 04030201 38396162 63646566 00000000 00000000 00000000 00000000
0200: 09012211 04030201 11000000 00000000 00000000 00000000 00000000 00000000
0220: 0a062211 04030201 02000000 00000000 00000000 00000000 0045335a 76980100
0240: ff012211 04030201 11000000 00000000 00000000 00000000 19000000 00000000
0260: ff022211 04030201 7477656e 74792d66 6976652d 62797465 732d6f66 2d6e616d
0280: ff032211 04030201 65000000 00000000 00000000 00000000 00000000 00000000
02a0: ff042211 04030201 12000000 00000000 00000000 00000000 01000000 00000000
02c0: ff052211 04030201 62000000 00000000 00000000 00000000 00000000 00000000
02e0: 0b022211 04030201 00000000 00000000 00000000 00000000 07000000 00000000
0300: ff012211 04030201 72656e61 6d656400 00000000 00000000 00000000 00000000";
const COMPOSITE_RECORD: &str = "
0000: 43022211 04030201 01000000 03000000 debc0a00 00000000 21840000 00000000
0020: ff012211 04030201 65870900 00000000 f0ff0000 00000000 00000000 00000000";
const WAL: &str = "
0000: 4244776c cd6925d7 73616d70 6c652070 6f6f6c20 69642e2e 21000000 00000000
0020: 0b0a0000 19000100 51000000 00000000 00d00200 00000000 68676665 64636261
0040: 01010000 04030201 01000000 03000000 debc0a00 00000000 21840000 00000000
0060: 02010300 04030201 01000000 03000000 00000000 00000000 00000000 00000000
0080: 03010600 04030201 01000003 00000000 00000000 00000000 00000000 00000000
00a0: 04020900 04030201 00000000 00010000 00020000 00000000 0145335a 76980100
00c0: ff010900 04030201 61000000 00000000 00000000 00000000 00000000 00000000
00e0: 05010c00 04030201 00000000 00000000 00000000 00000000 00000000 00000000
0100: 06010f00 04030201 00563412 00000000 00000000 00000000 00000000 00000000
0120: 07021200 04030201 11000000 00000000 00000000 00000000 1845335a 76980100
0140: ff011200 04030201 65786163 746c792d 7477656e 74792d66 6f75722d 62797465
0160: 08071500 04030201 11000000 00000000 00000000 00020000 80ffffff ffffffff
0180: ff011500 04030201 30313233 34353637 38396162 63646566 30313233 34353637
01a0: ff021500 04030201 38396162 63646566 30313233 34353637 38396162 63646566
01c0: ff031500 04030201 30313233 34353637 38396162 63646566 30313233 34353637
01e0: ff041500 04030201 38396162 63646566 30313233 34353637 38396162 63646566
0200: ff051500 04030201 30313233 34353637 38396162 63646566 30313233 34353637
0220: ff061500 04030201 38396162 63646566 00000000 00000000 00000000 00000000
0240: 09011800 04030201 11000000 00000000 00000000 00000000 00000000 00000000
0260: 0a061b00 04030201 02000000 00000000 00000000 00000000 0045335a 76980100
0280: ff011b00 04030201 11000000 00000000 00000000 00000000 19000000 00000000
02a0: ff021b00 04030201 7477656e 74792d66 6976652d 62797465 732d6f66 2d6e616d
02c0: ff031b00 04030201 65000000 00000000 00000000 00000000 00000000 00000000
02e0: ff041b00 04030201 12000000 00000000 00000000 00000000 01000000 00000000
0300: ff051b00 04030201 62000000 00000000 00000000 00000000 00000000 00000000
0320: 0b021e00 04030201 00000000 00000000 00000000 00000000 07000000 00000000
0340: ff011e00 04030201 72656e61 6d656400 00000000 00000000 00000000 00000000";
const RING: &str = "
0000: 0100676e 69724442 73616d70 6c652070 6f6f6c20 69642e2e b0b0b0b0 b0b0b0b0
0020: b0b0b0b0 b0b0b0b0 02000000 00000000 04000000 00000000 08257b6a f37a3f34
0040: 52510000 00000000 00000000 00000000 00000000 00000000 00000000 00000000
0080: 42410000 00000000 00000000 00000000 00000000 00000000 00000000 00000000
1000: 02000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000
1040: 01000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000
1080: 01010000 04030201 01000000 03000000 debc0a00 00000000 21840000 00000000
10a0: 61000000 00000000 00000000 00000000 01000000 00000000 94759773 1eddf333
10c0: 04020000 04030201 00000000 00010000 00020000 00000000 0145335a 76980100
10e0: 63000000 00000000 00000000 00000000 02000000 00000000 23bc143f a91e7cb8
1100: ff010000 04030201 61000000 00000000 00000000 00000000 00000000 00000000
1120: 63000000 00000000 00000000 00000000 03000000 00000000 e83d8353 bcc636e2
1180: 09010000 04030201 11000000 00000000 00000000 00000000 00000000 00000000
11a0: 62000000 00000000 71000000 00000080 01000000 00000000 754ff0e9 4c8c08e7";

#[test]
fn superblock() {
    let mut page = Page::zeroed();
    samples::superblock().encode(&mut page);
    check("SUPERBLOCK", &page.0, SUPERBLOCK);
    let read = Superblock::decode(&bytes(SUPERBLOCK, 4096), Place::Memory).unwrap();
    assert_eq!(read, samples::superblock());
}

#[test]
fn superblock_with_labels() {
    let mut page = Page::zeroed();
    samples::labelled().encode(&mut page);
    let mut expected = bytes(SUPERBLOCK, 4096);
    expected[16] = 4;
    expected[192..208].copy_from_slice(&[
        0x24, 1, 0, 0, 0, 0, 0, 0, 0x88, 0x97, 0x86, 0x95, 0x84, 0x93, 0x82, 0x91,
    ]);
    expected[8..12].copy_from_slice(&page.0[8..12]);
    assert!(page.0[..] == expected[..]);
    assert_eq!(Superblock::decode(&page.0, Place::Memory).unwrap(), samples::labelled());
}

#[test]
fn label_page() {
    let mut page = Page::zeroed();
    let sum = encode_labels(&mut page, &samples::stamp(7, 0x61), &samples::labels());
    check("LABELS", &page.0, LABELS);
    let expect = PageExpect::labels(POOL, 0x61, 7, sum);
    let read = decode_labels(&bytes(LABELS, 4096), &expect, Place::Memory);
    assert_eq!(read, Ok(samples::labels()));
    let other = PageExpect::labels(POOL, 0x61, 8, sum);
    assert!(decode_labels(&page.0, &other, Place::Memory).is_err(), "of another volume");
}

#[test]
fn leaf_page() {
    let mut page = Page::zeroed();
    let sum = encode_leaf(&mut page, &samples::stamp(7, 0x61), samples::mapping);
    check("LEAF", &page.0, LEAF);
    let expect = PageExpect::leaf(POOL, SlotIndex(0x61), sum);
    let golden = bytes(LEAF, 4096);
    let read = decode_leaf(&golden, &expect, &limits().1, Place::Memory).unwrap();
    assert!(read.plain().unwrap().eq((0..256).map(samples::mapping)));
}

#[test]
fn composite_leaf_page() {
    let mut page = Page::zeroed();
    let entry = |index| samples::entry(index).into();
    let sum = encode_composite_leaf(&mut page, &samples::stamp(7, 0x61), samples::UNDER, entry);
    check("COMPOSITE_LEAF", &page.0, COMPOSITE_LEAF);
    let expect = PageExpect::leaf(POOL, SlotIndex(0x61), sum);
    let golden = bytes(COMPOSITE_LEAF, 4096);
    let read = decode_leaf(&golden, &expect, &limits().1, Place::Memory).unwrap();
    assert_eq!((read.mapped(), read.under()), (4, samples::UNDER));
    assert!(read.iter().eq((0..256).map(entry)));
    assert!(read.plain().is_none());
}

#[test]
fn under_page() {
    let mut page = Page::zeroed();
    let base = |index| samples::entry(index).base();
    let sum = encode_under(&mut page, &samples::stamp(7, 0x61), base);
    check("UNDER", &page.0, UNDER);
    let expect = PageExpect::under(POOL, SlotIndex(0x61), sum);
    let golden = bytes(UNDER, 4096);
    let read =
        decode_under(&golden, &expect, &limits().1, Place::Memory, samples::overlay).unwrap();
    assert!(read.iter().eq((0..256).map(base)));
}

#[test]
fn index_page() {
    let mut page = Page::zeroed();
    let sum = encode_index(&mut page, 2, &samples::stamp(7, 0x61), samples::reference);
    check("INDEX", &page.0, INDEX);
    let expect = PageExpect::index(POOL, 2, 0x61, sum);
    let golden = bytes(INDEX, 4096);
    let read = decode_index(&golden, &expect, &limits().1, Place::Memory).unwrap();
    assert!(read.iter().eq((0..252).map(samples::reference)));
}

#[test]
fn catalogue_page() {
    let mut page = Page::zeroed();
    let sum = encode_catalogue(&mut page, &samples::stamp(0, 2), samples::volume);
    check("CATALOGUE", &page.0, CATALOGUE);
    let (geometry, limits) = limits();
    let expect = PageExpect::catalogue(POOL, 2, sum);
    let golden = bytes(CATALOGUE, 4096);
    let read = decode_catalogue(&golden, &expect, geometry, &limits, Place::Memory).unwrap();
    assert!(read.records().iter().copied().eq((0..15).map(samples::volume)));
}

#[test]
fn records() {
    let mut out = Vec::new();
    for change in samples::changes() {
        let mut units = [0; record::MAX_UNITS * 32];
        let count = record::encode(&change, 0x1122, &mut units).unwrap();
        out.extend_from_slice(&units[..count * 32]);
    }
    check("RECORDS", &out, RECORDS);
    let golden = bytes(RECORDS, out.len());
    let mut rest = &golden[..];
    for change in samples::changes() {
        let (read, delta, units) = record::decode(rest, &samples::layout(), Place::Memory).unwrap();
        assert_eq!((read, delta), (change, 0x1122));
        rest = &rest[units * 32..];
    }
    assert!(rest.is_empty());
}

#[test]
fn composite_record() {
    let change = samples::composite_change();
    let mut units = [0; 64];
    assert_eq!(record::encode(&change, 0x1122, &mut units), Some(2));
    check("COMPOSITE_RECORD", &units, COMPOSITE_RECORD);
    let golden = bytes(COMPOSITE_RECORD, 64);
    let read = record::decode(&golden, &samples::layout(), Place::Memory);
    assert_eq!(read, Ok((change, 0x1122, 2)));
}

#[test]
fn wal_block() {
    check("WAL", &samples::wal_block().0, WAL);
    let golden = bytes(WAL, 4096);
    let read = decode_block(&golden, &samples::wal_expect(), &limits().1, Place::Memory).unwrap();
    let lsns = (0xf000..).map(|lsn| Lsn(lsn * 3));
    assert!(read.iter().eq(lsns.zip(samples::changes())));
}

/// Not on media, but another version of the program may find it.
#[test]
fn ring() {
    let memory = Arc::new(VecRingMemory::new(2, 4));
    let ring = DeltaRing::format(memory.clone(), &POOL, &[0xb0; 16], 2, 4).unwrap();
    ring.set_next(0x4142);
    ring.set_current(0x5152);
    let [map, .., rollback, _, _] = &samples::changes()[..] else { unreachable!() };
    assert!(ring.reserve(0, 1) && ring.reserve(1, 2));
    ring.publish(0, Lsn(0x61), map, Dropped::Nothing).unwrap();
    ring.publish(1, Lsn(0x62), rollback, Dropped::Leaf(LeafId(0x71))).unwrap();
    let create = &samples::changes()[3];
    assert!(ring.reserve(0, 2));
    ring.publish(0, Lsn(0x63), create, Dropped::Nothing).unwrap();
    ring.trim(0, 2);
    let words = memory.words().iter().map(|word| word.load(Ordering::Relaxed));
    check("RING", &words.flat_map(u64::to_le_bytes).collect::<Vec<_>>(), RING);
}

fn check(name: &str, found: &[u8], golden: &str) {
    let found = dump(found);
    assert!(found == golden, "encoding of {name} has changed. Now it is:\n{found}");
}

fn dump(bytes: &[u8]) -> String {
    let mut out = String::new();
    for (row, number) in bytes.chunks(32).zip(0..) {
        if row.iter().any(|&byte| byte != 0) {
            write!(out, "\n{:04x}:", number * 32).unwrap();
            for byte in row.chunks(4) {
                out.push(' ');
                byte.iter().for_each(|byte| write!(out, "{byte:02x}").unwrap());
            }
        }
    }
    out
}

fn bytes(golden: &str, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for line in golden.lines().filter(|line| !line.is_empty()) {
        let (at, row) = line.split_once(':').unwrap();
        let at = usize::from_str_radix(at, 16).unwrap();
        let digits: Vec<u8> = row.bytes().filter(|byte| *byte != b' ').collect();
        for (byte, digits) in bytes[at..].iter_mut().zip(digits.chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap();
        }
    }
    bytes
}

#[test]
fn the_claim_page_has_the_bytes_of_the_document() {
    use blockd_mapper::format::claim::{Claim, ClaimPage, ClaimState};
    let claim = Claim {
        pool_id: POOL,
        state: ClaimState::Held,
        open_id: 0x4142_4344_4546_4748,
        counter: 0x51,
        node: 0x0a0b,
        boot_id: [0xb0; 16],
        lock_space: 0x61,
        device: 0x0701,
    };
    let mut page = Page::zeroed();
    claim.encode(&mut page);
    assert_eq!(&page.0[..8], b"BLOCKDow");
    assert_eq!(page.0[12..16], [1, 0, 2, 0]);
    assert_eq!(page.0[16..32], POOL);
    assert_eq!(page.0[32..40], [0x48, 0x47, 0x46, 0x45, 0x44, 0x43, 0x42, 0x41]);
    assert_eq!(page.0[40..48], [0x51, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(page.0[48..56], [0x0b, 0x0a, 0, 0, 0, 0, 0, 0]);
    assert_eq!(page.0[56..72], [0xb0; 16]);
    assert_eq!(page.0[72..88], [0x61, 0, 0, 0, 0, 0, 0, 0, 1, 7, 0, 0, 0, 0, 0, 0]);
    assert!(page.0[88..].iter().all(|byte| *byte == 0));
    assert_eq!(ClaimPage::decode(&page.0), ClaimPage::Claim(claim));
    page.0[41] ^= 1;
    assert!(matches!(ClaimPage::decode(&page.0), ClaimPage::Unreadable(_)));
}
