//! The metadata of VHDX. Source: MS-VHDX. Numbers are little-endian.

use std::fs::File;

use super::{Fault, Outside, field, read_exactly, read_up_to, utf16};

pub(in crate::transfer) const SIGNATURE: [u8; 8] = *b"vhdxfile";

/// The two copies of the region table.
const REGION_TABLES: [u64; 2] = [192 << 10, 256 << 10];
const TABLE_BYTES: usize = 64 << 10;
/// Entries of 32 bytes that fit behind the header of a table.
const MAX_ENTRIES: usize = 2047;
/// Keys of a parent locator; there are five that mean something.
const MAX_KEYS: usize = 64;

const METADATA_REGION: u128 = 0x8b7c_a206_4790_4b9a_b8fe_575f_050f_886e;
const FILE_PARAMETERS: u128 = 0xcaa1_6737_fa36_4d43_b3b6_33f0_aa44_e76b;
const PARENT_LOCATOR: u128 = 0xa8d3_5f2d_b30b_454d_abf7_d3d8_4834_ab0c;

/// In the flags of the file parameters.
const HAS_PARENT: u32 = 1 << 1;

pub(super) fn outside(file: &File) -> Result<Vec<Outside>, Fault> {
    let mut is_vhdx = false;
    for table_at in REGION_TABLES {
        let table = read_up_to(file, table_at, TABLE_BYTES)?;
        if !table.starts_with(b"regi") {
            continue;
        }
        let count = usize::try_from(u32::from_le_bytes(field(&table, 8))).unwrap_or(usize::MAX);
        for at in (0..count.min(MAX_ENTRIES)).map(|entry| 16 + 32 * entry) {
            if guid(&table, at) == METADATA_REGION {
                is_vhdx = true;
                let region = u64::from_le_bytes(field(&table, at + 16));
                if let Some(parent) = parent(file, region)? {
                    return Ok(vec![Outside::Parent(parent)]);
                }
            }
        }
    }
    if is_vhdx { Ok(Vec::new()) } else { Err(Fault::Header("it has no region of metadata")) }
}

/// The parent that the metadata of a region name, or an empty name where they only have one.
fn parent(file: &File, region: u64) -> Result<Option<Vec<u8>>, Fault> {
    let table = read_exactly(file, region, TABLE_BYTES)?;
    if !table.starts_with(b"metadata") {
        return Err(Fault::Header("its metadata have no signature"));
    }
    let count = usize::from(u16::from_le_bytes(field(&table, 10)));
    let (mut has_parent, mut name) = (false, Vec::new());
    for at in (0..count.min(MAX_ENTRIES)).map(|entry| 32 + 32 * entry) {
        let offset = region.checked_add(u32::from_le_bytes(field(&table, at + 16)).into());
        let offset = offset.ok_or(Fault::Header("its metadata are out of range"))?;
        match guid(&table, at) {
            FILE_PARAMETERS => {
                let item = read_exactly(file, offset, 8)?;
                has_parent |= u32::from_le_bytes(field(&item, 4)) & HAS_PARENT != 0;
            }
            PARENT_LOCATOR => {
                has_parent = true;
                name = locator_path(&read_up_to(file, offset, TABLE_BYTES)?);
            }
            _ => {}
        }
    }
    Ok(has_parent.then_some(name))
}

/// A path of the parent out of its locator, whose texts are in UTF-16.
fn locator_path(locator: &[u8]) -> Vec<u8> {
    let count = usize::from(u16::from_le_bytes(field(locator, 18)));
    let text = |offset: [u8; 4], len: [u8; 2]| {
        let offset = usize::try_from(u32::from_le_bytes(offset)).unwrap_or(usize::MAX);
        let bytes = locator.get(offset..).unwrap_or_default();
        let bytes = bytes.get(..usize::from(u16::from_le_bytes(len))).unwrap_or_default();
        utf16(bytes, u16::from_le_bytes)
    };
    let entries = (0..count.min(MAX_KEYS)).map(|entry| 20 + 12 * entry).map(|at| {
        let key = text(field(locator, at), field(locator, at + 8));
        (key, text(field(locator, at + 4), field(locator, at + 10)))
    });
    let paths = entries.filter(|(key, _)| key.ends_with(b"_path"));
    paths.map(|(_, path)| path).next().unwrap_or_default()
}

/// A GUID as it is written in text: its first three groups are little-endian.
fn guid(bytes: &[u8], at: usize) -> u128 {
    let first = u32::from_le_bytes(field(bytes, at));
    let second = u16::from_le_bytes(field(bytes, at + 4));
    let third = u16::from_le_bytes(field(bytes, at + 6));
    let rest = u64::from_be_bytes(field(bytes, at + 8));
    u128::from(first) << 96 | u128::from(second) << 80 | u128::from(third) << 64 | u128::from(rest)
}
