//! Every decoder on damaged structures and on noise: an error or a sound value, never a panic.
//!
//! `BLOCKD_FUZZ_SEED` and `BLOCKD_FUZZ_ITERATIONS` (decodes for each structure) repeat or lengthen
//! a run; a failing case names its seed.

#![allow(clippy::unwrap_used, reason = "a test ends where an expectation fails")]

mod samples;

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockd_mapper::format::catalogue::{decode_catalogue, encode_catalogue};
use blockd_mapper::format::index_page::{decode_index, encode_index};
use blockd_mapper::format::labels::{decode_labels, encode_labels};
use blockd_mapper::format::leaf_page::{LeafPage, decode_leaf, encode_composite_leaf, encode_leaf};
use blockd_mapper::format::page::{self, PageExpect, PageKind, PageStamp};
use blockd_mapper::format::superblock::Superblock;
use blockd_mapper::format::under_page::{decode_under, encode_under};
use blockd_mapper::format::wal::{WalStop, decode_block};
use blockd_mapper::format::{Place, record};
use blockd_mapper::io::Page;
use blockd_mapper::ring::{DeltaRing, Dropped, RingMemory, VecRingMemory};
use blockd_mapper::units::{Lsn, SlotIndex};
use samples::{POOL, limits};

const ITERATIONS: u64 = 100_000;
const CRC_OF_PAGE: RangeInclusive<usize> = 8..=11;
const CRC_OF_WAL: RangeInclusive<usize> = 4..=7;

#[test]
fn superblock() {
    let mut page = Page::zeroed();
    samples::superblock().encode(&mut page);
    fuzz(&page, &CRC_OF_PAGE, |bytes| {
        let Ok(read) = Superblock::decode(bytes, Place::Memory) else { return false };
        let mut again = Page::zeroed();
        read.encode(&mut again);
        assert_eq!(Superblock::decode(&again.0, Place::Memory).unwrap(), read);
        assert!(read.limits().is_ok() && read.wal_blocks() > 0);
        true
    });
}

/// The expectation of a tool that has no parent page.
fn orphan(kind: PageKind, level: u8) -> PageExpect {
    PageExpect { pool_id: POOL, kind, level, index: 2, tree: None, sum: None }
}

#[test]
fn leaf_page() {
    let mut page = Page::zeroed();
    encode_leaf(&mut page, &samples::stamp(7, 2), samples::mapping);
    let (_, limits) = limits();
    fuzz(&page, &CRC_OF_PAGE, |bytes| {
        let expect = orphan(PageKind::Leaf, 0);
        let Ok(read) = decode_leaf(bytes, &expect, &limits, Place::Memory) else { return false };
        assert!(leaf_again(&read).0 == *bytes);
        true
    });
}

/// Writes a leaf page as it was read.
fn leaf_again(read: &LeafPage<'_>) -> Page {
    let mut page = Page::zeroed();
    let stamp = &read.header().stamp;
    match read.plain() {
        Some(plain) => {
            let plain: Vec<_> = plain.collect();
            encode_leaf(&mut page, stamp, |index| plain[index]);
        }
        None => {
            encode_composite_leaf(&mut page, stamp, read.under(), |index| read.entry(index));
        }
    }
    page
}

#[test]
fn composite_leaf_page() {
    let (_, limits) = limits();
    fuzz(&composite_leaf().0, &CRC_OF_PAGE, |bytes| {
        let expect = orphan(PageKind::Leaf, 0);
        let Ok(read) = decode_leaf(bytes, &expect, &limits, Place::Memory) else { return false };
        assert!(leaf_again(&read).0 == *bytes);
        true
    });
}

#[test]
fn under_page() {
    let (_, limits) = limits();
    fuzz(&under().0, &CRC_OF_PAGE, |bytes| {
        let expect = orphan(PageKind::Under, 0);
        let read = decode_under(bytes, &expect, &limits, Place::Memory, samples::overlay);
        let Ok(read) = read else { return false };
        let mut again = Page::zeroed();
        encode_under(&mut again, &read.header().stamp, |index| read.entry(index));
        assert!(again.0 == *bytes);
        let bases = read.iter().map(|base| base.physical);
        assert!(bases.zip(0..).all(|(base, index)| {
            base.is_some() == samples::overlay(index).is_some()
                && (base.is_none() || base != samples::overlay(index))
        }));
        true
    });
}

#[test]
fn label_page() {
    fuzz(&labels().0, &CRC_OF_PAGE, |bytes| {
        let expect = orphan(PageKind::Labels, 0);
        let Ok(read) = decode_labels(bytes, &expect, Place::Memory) else { return false };
        let header = page::open(bytes, &expect, Place::Memory).unwrap();
        let mut again = Page::zeroed();
        encode_labels(&mut again, &header.stamp, &read);
        assert!(again.0 == *bytes);
        true
    });
}

#[test]
fn superblock_with_labels() {
    let mut page = Page::zeroed();
    samples::labelled().encode(&mut page);
    flip(&page, |bytes| Superblock::decode(bytes, Place::Memory).is_err());
    fuzz(&page, &CRC_OF_PAGE, |bytes| {
        let Ok(read) = Superblock::decode(bytes, Place::Memory) else { return false };
        let mut again = Page::zeroed();
        read.encode(&mut again);
        assert_eq!(Superblock::decode(&again.0, Place::Memory).unwrap(), read);
        true
    });
}

/// A label page, and its sum.
fn labels() -> (Page, u64) {
    let mut page = Page::zeroed();
    let sum = encode_labels(&mut page, &samples::stamp(7, 2), &samples::labels());
    (page, sum)
}

/// A leaf page with composite entries, and its sum.
fn composite_leaf() -> (Page, u64) {
    let (mut page, stamp) = (Page::zeroed(), samples::stamp(7, 2));
    let entry = |index| samples::entry(index).into();
    let sum = encode_composite_leaf(&mut page, &stamp, samples::UNDER, entry);
    (page, sum)
}

/// The under page of such a leaf, and its sum.
fn under() -> (Page, u64) {
    let (mut page, stamp) = (Page::zeroed(), samples::stamp(7, 2));
    let sum = encode_under(&mut page, &stamp, |index| samples::entry(index).base());
    (page, sum)
}

#[test]
fn index_page() {
    let mut page = Page::zeroed();
    encode_index(&mut page, 1, &samples::stamp(7, 2), samples::reference);
    let (_, limits) = limits();
    fuzz(&page, &CRC_OF_PAGE, |bytes| {
        let expect = orphan(PageKind::Index, 1);
        let Ok(read) = decode_index(bytes, &expect, &limits, Place::Memory) else { return false };
        let mut again = Page::zeroed();
        encode_index(&mut again, 1, &read.header().stamp, |index| read.entry(index));
        assert!(again.0 == *bytes);
        true
    });
}

#[test]
fn catalogue_page() {
    let mut page = Page::zeroed();
    encode_catalogue(&mut page, &samples::stamp(0, 2), samples::volume);
    let (geometry, limits) = limits();
    fuzz(&page, &CRC_OF_PAGE, |bytes| {
        let expect = orphan(PageKind::Catalogue, 0);
        let read = decode_catalogue(bytes, &expect, geometry, &limits, Place::Memory);
        let Ok(read) = read else { return false };
        let mut again = Page::zeroed();
        encode_catalogue(&mut again, &read.header().stamp, |index| read.records()[index]);
        assert!(again.0 == *bytes);
        true
    });
}

#[test]
fn wal_block() {
    let (_, limits) = limits();
    fuzz(&samples::wal_block(), &CRC_OF_WAL, |bytes| {
        match decode_block(bytes, &samples::wal_expect(), &limits, Place::Memory) {
            Ok(read) => {
                assert_eq!(read.iter().last().unwrap().0, read.last_lsn());
                true
            }
            Err(WalStop::End(_) | WalStop::Corrupt(_)) => false,
        }
    });
}

#[test]
fn records() {
    let (seed, iterations) = settings();
    let mut random = fastrand::Rng::with_seed(seed);
    let samples: Vec<Vec<u8>> = samples::changes()
        .iter()
        .chain([&samples::composite_change()])
        .map(|change| {
            let mut units = vec![0; change.units() * 32];
            record::encode(change, 5, &mut units).unwrap();
            units
        })
        .collect();
    let mut sound = 0;
    for iteration in 0..iterations * 2 {
        let mut bytes = samples[random.usize(..samples.len())].clone();
        damage(&mut bytes, &mut random);
        let Ok((change, delta, units)) = record::decode(&bytes, &samples::layout(), Place::Memory)
        else {
            continue;
        };
        let mut again = vec![0; units * 32];
        assert_eq!(record::encode(&change, delta, &mut again), Some(units));
        assert_eq!(again, bytes[..units * 32], "seed {seed}, iteration {iteration}");
        sound += 1;
    }
    assert!(sound > iterations / 50, "only {sound} were sound: the damage never reaches deep");
}

#[test]
fn ring() {
    let (seed, iterations) = settings();
    let mut random = fastrand::Rng::with_seed(seed);
    let original = Arc::new(VecRingMemory::new(2, 8));
    let ring = DeltaRing::format(original.clone(), &POOL, &[1; 16], 2, 8).unwrap();
    let mut published = Vec::new();
    let changes = [samples::changes(), vec![samples::composite_change()], samples::changes()];
    for (change, lsn) in changes.iter().flatten().zip(1..) {
        published.push((Lsn(lsn), change.clone()));
        let (slot, units) = (usize::from(lsn % 3 == 0), change.units() as u64);
        while !ring.reserve(slot, units) {
            let first = ring.read(slot, ring.first_needed(slot)).unwrap();
            ring.trim(slot, first.position + first.units);
        }
        ring.publish(slot, Lsn(lsn), change, Dropped::Nothing).unwrap();
    }
    let words = |ring: &dyn RingMemory| -> Vec<u64> {
        ring.words().iter().map(|word| word.load(Ordering::Relaxed)).collect()
    };
    let saved = words(&*original);
    for iteration in 0..iterations / 20 {
        let memory = Arc::new(VecRingMemory::new(2, 8));
        let mut bytes: Vec<u8> = saved.iter().flat_map(|word| word.to_le_bytes()).collect();
        damage_in_place(&mut bytes, &mut random);
        for (word, bytes) in memory.words().iter().zip(bytes.chunks(8)) {
            word.store(u64::from_le_bytes(bytes.try_into().unwrap()), Ordering::Relaxed);
        }
        let Ok(ring) = DeltaRing::adopt(memory, &POOL, &[1; 16]) else { continue };
        let Ok(found) = ring.recover() else { continue };
        // Trim positions aren't sealed: a lower one may show trimmed records, but none that never
        // existed.
        let known =
            found.iter().all(|record| published.contains(&(record.lsn, record.change.clone())));
        assert!(known, "seed {seed}, iteration {iteration}");
    }
}

#[test]
fn each_flipped_bit_is_seen() {
    let (geometry, limits) = limits();
    let mut page = Page::zeroed();
    samples::superblock().encode(&mut page);
    flip(&page, |bytes| Superblock::decode(bytes, Place::Memory).is_err());
    let stamp = PageStamp { tree: 0, ..samples::stamp(0, 2) };
    let sum = encode_leaf(&mut page, &stamp, samples::mapping);
    let expect = PageExpect::leaf(POOL, SlotIndex(2), sum);
    flip(&page, |bytes| decode_leaf(bytes, &expect, &limits, Place::Memory).is_err());
    let expect = PageExpect { sum: None, ..expect };
    flip(&page, |bytes| decode_leaf(bytes, &expect, &limits, Place::Memory).is_err());
    let (composite, sum) = composite_leaf();
    for sum in [Some(sum), None] {
        let expect = PageExpect { sum, ..orphan(PageKind::Leaf, 0) };
        flip(&composite, |bytes| decode_leaf(bytes, &expect, &limits, Place::Memory).is_err());
    }
    let (under, sum) = under();
    for sum in [Some(sum), None] {
        let expect = PageExpect { sum, ..orphan(PageKind::Under, 0) };
        flip(&under, |bytes| {
            decode_under(bytes, &expect, &limits, Place::Memory, samples::overlay).is_err()
        });
    }
    let (page_of_labels, sum) = labels();
    for sum in [Some(sum), None] {
        let expect = PageExpect { sum, ..orphan(PageKind::Labels, 0) };
        flip(&page_of_labels, |bytes| decode_labels(bytes, &expect, Place::Memory).is_err());
    }
    encode_index(&mut page, 1, &stamp, samples::reference);
    let expect = orphan(PageKind::Index, 1);
    flip(&page, |bytes| decode_index(bytes, &expect, &limits, Place::Memory).is_err());
    encode_catalogue(&mut page, &stamp, samples::volume);
    let expect = orphan(PageKind::Catalogue, 0);
    flip(&page, |bytes| {
        decode_catalogue(bytes, &expect, geometry, &limits, Place::Memory).is_err()
    });
    let expect = samples::wal_expect();
    flip(&samples::wal_block(), |bytes| {
        matches!(decode_block(bytes, &expect, &limits, Place::Memory), Err(WalStop::End(_)))
    });
}

fn flip(page: &Page, refused: impl Fn(&[u8]) -> bool) {
    assert!(!refused(&page.0));
    for bit in 0..4096 * 8 {
        let mut page = page.clone();
        page.0[bit / 8] ^= 1 << (bit % 8);
        assert!(refused(&page.0), "bit {bit}");
    }
}

/// Damages the page over and over, most often with a fresh CRC so that the damage is decoded.
fn fuzz(page: &Page, crc: &RangeInclusive<usize>, decodes: impl Fn(&[u8]) -> bool) {
    let (seed, iterations) = settings();
    let mut random = fastrand::Rng::with_seed(seed);
    assert!(decodes(&page.0));
    let mut sound = 0;
    for iteration in 0..iterations {
        let mut bytes = page.0.to_vec();
        damage(&mut bytes, &mut random);
        if bytes.len() == 4096 && random.u8(..8) != 0 {
            bytes[crc.clone()].fill(0);
            let sealed = crc32c::crc32c(&bytes);
            bytes[crc.clone()].copy_from_slice(&sealed.to_le_bytes());
        }
        let decode = std::panic::AssertUnwindSafe(|| decodes(&bytes));
        let outcome = std::panic::catch_unwind(decode);
        let outcome = outcome.unwrap_or_else(|_| panic!("seed {seed}, iteration {iteration}"));
        sound += u64::from(outcome);
    }
    assert!(sound > iterations / 1000, "only {sound} were sound: the damage never reaches deep");
}

fn damage(bytes: &mut Vec<u8>, random: &mut fastrand::Rng) {
    match random.u8(..20) {
        0 => bytes.truncate(random.usize(..bytes.len())),
        1 => bytes.resize(random.usize(..9000), random.u8(..)),
        2 => bytes.fill_with(|| random.u8(..)),
        _ => damage_in_place(bytes, random),
    }
}

fn damage_in_place(bytes: &mut [u8], random: &mut fastrand::Rng) {
    for _ in 0..random.u8(1..4) {
        // Half of it near the beginning, where the fields are.
        let end = if random.bool() { bytes.len().min(320) } else { bytes.len() };
        let at = random.usize(..end);
        match random.u8(..4) {
            0 => bytes[at] ^= 1 << random.u8(..8),
            1 => bytes[at] = random.u8(..),
            2 => bytes[at] = [0, 1, 2, 0xff][random.usize(..4)],
            _ => {
                let len = random.usize(1..40).min(bytes.len() - at);
                let from = random.usize(..=bytes.len() - len);
                bytes.copy_within(from..from + len, at);
            }
        }
    }
}

fn settings() -> (u64, u64) {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse().ok());
    let seed = number("BLOCKD_FUZZ_SEED").unwrap_or(0x0b10_c4d0);
    (seed, number("BLOCKD_FUZZ_ITERATIONS").unwrap_or(ITERATIONS))
}
