//! Composite entries in the format: each field, and the refusal of a value that it may not have.

#![allow(clippy::unwrap_used, reason = "a test ends where an expectation fails")]

mod samples;

use blockd_mapper::format::leaf_page::{decode_leaf, encode_composite_leaf, encode_leaf};
use blockd_mapper::format::page::PageExpect;
use blockd_mapper::format::superblock::{COMPOSITE, Superblock};
use blockd_mapper::format::under_page::{decode_under, encode_under};
use blockd_mapper::format::{Limits, Place, record};
use blockd_mapper::io::Page;
use blockd_mapper::units::SlotIndex;
use samples::POOL;

/// A damage, and the problem that a decoder names.
type Refused<'a> = (&'a dyn Fn(&mut [u8]), &'a str);

#[test]
fn a_composite_record_keeps_the_limits_of_its_pool() {
    let (_, limits) = samples::limits();
    let read = |edit: &dyn Fn(&mut [u8]), limits: &Limits| {
        let mut bytes = [0; 96];
        record::encode(&samples::composite_change(), 3, &mut bytes).unwrap();
        edit(&mut bytes);
        let read = record::decode(&bytes, limits, Place::Memory);
        read.map(|(change, ..)| change).map_err(|error| error.problem.to_string())
    };
    assert_eq!(read(&|_| {}, &limits), Ok(samples::composite_change()));
    let refused: [Refused<'_>; 12] = [
        (&|b| b[1] = 1, "units is 1, expected 2"),
        (&|b| b[1] = 4, "units is 4: must be at least 1, at most 113, within the bytes there are"),
        (&|b| b[1] = 3, "units is 3, expected 2"),
        (&|b| b[12] = 4, "extent is 17179869185: must be below 2^34"),
        (&|b| b[18] = 0x10, "overlay is 1096926: must be an extent of the pool"),
        (&|b| b[26] = 1, "bitmap of the overlay is 99361: must be within the sub-blocks"),
        (&|b| b[32] = 0, "further unit is 1: must be one that continues its head"),
        (&|b| b[34] = 4, "further unit is 1: must be one that continues its head"),
        (&|b| b[42] = 0x10, "base is 1083237: must be an extent of the pool"),
        (&|b| b.copy_within(16..24, 40), "base is 703710: must be another extent than the overlay"),
        (&|b| b[50] = 1, "bitmap of the base is 131056: must be within the sub-blocks"),
        (&|b| b[63] = 1, "unused word is 72057594037927936: must be 0"),
    ];
    for (edit, problem) in refused {
        assert_eq!(read(edit, &limits), Err(problem.to_owned()));
    }
    let problem = "record kind 67 is not supported by this build";
    let without = limits.with_composite(false);
    assert_eq!(read(&|_| {}, &without), Err(problem.to_owned()));
}

/// The answer of a reader without a parent to a leaf page that was damaged and sealed again.
fn read_leaf(page: &Page, edit: &dyn Fn(&mut [u8]), limits: &Limits) -> Result<(), String> {
    let page = damaged(page, edit);
    let expect = PageExpect { sum: None, ..PageExpect::leaf(POOL, SlotIndex(2), 0) };
    let read = decode_leaf(&page.0, &expect, limits, Place::Memory);
    read.map(|_| ()).map_err(|error| error.to_string())
}

/// The same of an under page.
fn read_under(page: &Page, edit: &dyn Fn(&mut [u8]), limits: &Limits) -> Result<(), String> {
    let page = damaged(page, edit);
    let expect = PageExpect { sum: None, ..PageExpect::under(POOL, SlotIndex(2), 0) };
    let read = decode_under(&page.0, &expect, limits, Place::Memory, samples::overlay);
    read.map(|_| ()).map_err(|error| error.to_string())
}

fn damaged(page: &Page, edit: &dyn Fn(&mut [u8])) -> Page {
    let mut page = page.clone();
    edit(&mut page.0);
    page.0[8..12].fill(0);
    let crc = crc32c::crc32c(&page.0);
    page.0[8..12].copy_from_slice(&crc.to_le_bytes());
    page
}

#[test]
fn a_leaf_page_with_composite_entries_names_each_field_that_is_wrong() {
    let (_, limits) = samples::limits();
    let mut page = Page::zeroed();
    let entry = |index| samples::entry(index).into();
    encode_composite_leaf(&mut page, &samples::stamp(7, 2), samples::UNDER, entry);
    let refused: [Refused<'_>; 15] = [
        (&|b| b[6] = 0, "page version 0 is not supported by this build"),
        (&|b| b[6] = 3, "page version 3 is not supported by this build"),
        (&|b| b[6] = 1, "kind of entry 0 is 2: must be 0 or 1"),
        (&|b| b[36] = 5, "entries in use is 5, expected 4"),
        (&|b| b[69] = 3, "kind of entry 0 is 3: must be 0, 1 or 2"),
        (&|b| b[69] = 6, "kind of entry 0 is 6: must be 0, 1 or 2"),
        (&|b| b[66] = 0x10, "extent of entry 0 is 1096926: must be an extent of the pool"),
        (&|b| b[72] = 1, "bitmap of entry 0 is 99361: must be within the sub-blocks"),
        (&|b| b[78] = 1, "extent of entry 1 is 1: must be 0 where nothing is mapped"),
        (&|b| b[84] = 1, "bitmap of entry 1 is 1: must be 0 where nothing is mapped"),
        (
            &|b| b[69..].iter_mut().step_by(14).take(256).for_each(|kind| *kind = (*kind).min(1)),
            "composite entries is 0: must be at least 1 in a page of version 2",
        ),
        (&|b| b[3648..3664].fill(0), "under page is 0: must be a page in a leaf of version 2"),
        (&|b| b[3651] = 1, "page address is 22444177: must be a page of the pool"),
        (&|b| b[3664] = 1, "reserved byte 3664 is 0x1, expected 0"),
        (&|b| b[4095] = 1, "reserved byte 4095 is 0x1, expected 0"),
    ];
    assert_eq!(read_leaf(&page, &|_| {}, &limits), Ok(()));
    for (edit, problem) in refused {
        assert_eq!(read_leaf(&page, edit, &limits), Err(format!("leaf page: {problem}")));
    }
    let without = limits.with_composite(false);
    let problem = "leaf page: page version 2 is not supported by this build";
    assert_eq!(read_leaf(&page, &|_| {}, &without), Err(problem.to_owned()));
}

#[test]
fn a_leaf_page_of_version_1_has_no_composite_entry() {
    let (_, limits) = samples::limits();
    let mut page = Page::zeroed();
    encode_leaf(&mut page, &samples::stamp(7, 2), samples::mapping);
    let composite = |bytes: &mut [u8]| bytes[69] = 2;
    assert_eq!(
        read_leaf(&page, &composite, &limits),
        Err("leaf page: kind of entry 0 is 2: must be 0 or 1".to_owned())
    );
    assert_eq!(
        read_leaf(&page, &composite, &limits.with_composite(false)),
        Err("leaf page: entry kind 2 is not supported by this build".to_owned())
    );
    assert_eq!(
        read_leaf(&page, &|b| b[6] = 2, &limits),
        Err("leaf page: composite entries is 0: must be at least 1 in a page of version 2"
            .to_owned())
    );
    assert_eq!(
        read_leaf(&page, &|b| b[3656] = 1, &limits),
        Err("leaf page: reserved byte 3656 is 0x1, expected 0".to_owned())
    );
}

#[test]
fn an_under_page_names_each_field_that_is_wrong() {
    let (_, limits) = samples::limits();
    let mut page = Page::zeroed();
    encode_under(&mut page, &samples::stamp(7, 2), |index| samples::entry(index).base());
    let refused: [Refused<'_>; 14] = [
        (&|b| b[4] = 1, "page kind is 1, expected 4"),
        (&|b| b[5] = 1, "level is 1, expected 0"),
        (&|b| b[6] = 2, "page version 2 is not supported by this build"),
        (&|b| b[40] = 3, "page index is 3, expected 2"),
        (&|b| b[36] = 2, "entries in use is 2, expected 3"),
        (&|b| b[69] = 2, "kind of entry 0 is 2: must be 0 or 1"),
        (&|b| b[66] = 0x10, "extent of entry 0 is 1083237: must be an extent of the pool"),
        (&|b| b[72] = 1, "bitmap of entry 0 is 131056: must be within the sub-blocks"),
        (&|b| b[84] = 1, "bitmap of entry 1 is 1: must be 0 where nothing is mapped"),
        (
            &|b| b[64..67].copy_from_slice(&[0xde, 0xbc, 0x0a]),
            "base of entry 0 is 703710: must be another extent than the overlay",
        ),
        (
            &|b| {
                b[64..78].fill(0);
                b[36] = 2
            },
            "base of entry 0 is 0: must be mapped under a composite entry",
        ),
        (
            &|b| {
                b[106] = 4;
                b[111] = 1;
                b[36] = 4
            },
            "base of entry 3 is 4: must be unmapped where the leaf's entry is not composite",
        ),
        (&|b| b[3648] = 1, "reserved byte 3648 is 0x1, expected 0"),
        (&|b| b[4095] = 1, "reserved byte 4095 is 0x1, expected 0"),
    ];
    assert_eq!(read_under(&page, &|_| {}, &limits), Ok(()));
    for (edit, problem) in refused {
        assert_eq!(read_under(&page, edit, &limits), Err(format!("under page: {problem}")));
    }
    let without = limits.with_composite(false);
    let problem = "under page: page kind 4 is not supported by this build";
    assert_eq!(read_under(&page, &|_| {}, &without), Err(problem.to_owned()));
}

#[test]
fn a_pool_with_more_features_than_composite_entries_is_refused_by_their_names() {
    let mut page = Page::zeroed();
    Superblock { incompat: COMPOSITE, ..samples::superblock() }.encode(&mut page);
    assert_eq!(Superblock::decode(&page.0, Place::Memory).unwrap().incompat, COMPOSITE);
    Superblock { incompat: COMPOSITE | 4, ..samples::superblock() }.encode(&mut page);
    let error = Superblock::decode(&page.0, Place::Memory).unwrap_err();
    let text = "superblock: format 1.0 with incompatible features 0x5 (composite): this build \
                reads 1.0 with features 0x3 (composite, device-states)";
    assert_eq!(error.to_string(), text);
    assert!(error.is_unsupported());
}
