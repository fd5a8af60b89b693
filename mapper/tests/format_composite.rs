//! Composite entries in the format: each field, and the refusal of a value that it may not have.

#![allow(clippy::unwrap_used, reason = "a test ends where an expectation fails")]

mod samples;

use blockd_mapper::format::superblock::{COMPOSITE, Superblock};
use blockd_mapper::format::{Limits, Place, record};
use blockd_mapper::io::Page;

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

#[test]
fn a_pool_with_the_feature_of_composite_entries_is_refused_by_its_name() {
    let mut page = Page::zeroed();
    Superblock { incompat: COMPOSITE, ..samples::superblock() }.encode(&mut page);
    let error = Superblock::decode(&page.0, Place::Memory).unwrap_err();
    let text = "superblock: format 1.0 with incompatible features 0x1 (composite): this build \
                reads 1.0 with features 0x0";
    assert_eq!(error.to_string(), text);
    assert!(error.is_unsupported());
}
