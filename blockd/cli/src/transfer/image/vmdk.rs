//! The descriptor of VMDK: a file of its own, which names the parts of the disk, or a piece of a
//! sparse file. Source: Virtual Disk Format 5.0 of VMware. Numbers are little-endian.

use std::fs::File;

use super::{Fault, Outside, field, read_up_to};

pub(in crate::transfer) const SPARSE_MAGIC: [u8; 4] = *b"KDMV";
/// The older sparse format of ESX.
pub(in crate::transfer) const COWD_MAGIC: [u8; 4] = *b"COWD";
/// How a descriptor begins.
pub(in crate::transfer) const DESCRIPTOR_MARK: &[u8] = b"# Disk DescriptorFile";

/// Descriptors are some hundred bytes. QEMU reads no more than this either.
const MAX_DESCRIPTOR: usize = 1 << 20;
/// QEMU cuts the name of an extent here.
const MAX_NAME: usize = 511;
/// Where the disk is named that this one is a difference to.
const PARENT: &[u8] = b"parentFileNameHint";
const SECTOR: u64 = 512;

pub(super) fn outside(file: &File) -> Result<Vec<Outside>, Fault> {
    let header = read_up_to(file, 0, 512)?;
    if header.starts_with(&COWD_MAGIC) {
        return Err(Fault::Header("the format COWD of older ESX is not supported"));
    }
    if !header.starts_with(&SPARSE_MAGIC) {
        return descriptor(file, 0, true);
    }
    // Without a capacity of its own the file only carries a descriptor.
    let capacity = u64::from_le_bytes(field(&header, 12));
    let Some(offset) = u64::from_le_bytes(field(&header, 28)).checked_mul(SECTOR) else {
        return Err(Fault::Header("its descriptor is out of range"));
    };
    // Whatever the header says, qemu takes the parent from here.
    let mut found = descriptor(file, SECTOR, false)?;
    if offset != 0 && (offset != SECTOR || capacity == 0) {
        found.extend(descriptor(file, offset, capacity == 0)?);
    }
    Ok(found)
}

/// Reads what a descriptor names. The extents of a sparse file's own are that file.
///
/// qemu reads a descriptor with `sscanf`, which takes control characters for blanks and continues
/// on the next line if a field is missing. Lines that only such a reader understands are refused.
fn descriptor(file: &File, at: u64, extents: bool) -> Result<Vec<Outside>, Fault> {
    let bytes = read_up_to(file, at, MAX_DESCRIPTOR)?;
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let (text, mut found) = (&bytes[..end], Vec::new());
    if let Some(value) = find(text, PARENT) {
        let line = value.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let name = quoted(line).unwrap_or_else(|| line.trim_ascii()).to_vec();
        found.push(Outside::Backing { name, format: Some(b"vmdk".to_vec()) });
    } else if let Some(id) = find(text, b"parentCID=")
        && !id.get(..8).is_some_and(|id| id.eq_ignore_ascii_case(b"ffffffff"))
    {
        found.push(Outside::Parent(Vec::new()));
    }
    if !extents {
        return Ok(found);
    }
    let before = found.len();
    for line in text.split(|byte| *byte == b'\n') {
        let mut words = line.split(|byte| *byte <= b' ').filter(|word| !word.is_empty());
        let access = words.next().unwrap_or_default();
        if access.starts_with(b"\"") {
            return Err(Fault::Header("a line of its descriptor begins with a name"));
        }
        if ![&b"RW"[..], b"RDONLY", b"NOACCESS"].contains(&access) {
            continue;
        }
        match (quoted(line), words.nth(1)) {
            (Some(name), _) if name.len() <= MAX_NAME => {
                found.push(Outside::Extent(name.to_vec()));
            }
            (None, Some(b"ZERO")) => {}
            _ => return Err(Fault::Header("an extent of its descriptor is incomplete")),
        }
    }
    if found.len() == before {
        return Err(Fault::Header("its descriptor names no extent"));
    }
    Ok(found)
}

/// The text behind the first place of a key, in letters of either case.
fn find<'a>(text: &'a [u8], key: &[u8]) -> Option<&'a [u8]> {
    let at = text.windows(key.len()).position(|place| place.eq_ignore_ascii_case(key))?;
    text.get(at + key.len()..)
}

/// The text between the first two quotation marks.
fn quoted(text: &[u8]) -> Option<&[u8]> {
    let from = text.iter().position(|byte| *byte == b'"')? + 1;
    let len = text[from..].iter().position(|byte| *byte == b'"')?;
    Some(&text[from..from + len])
}
