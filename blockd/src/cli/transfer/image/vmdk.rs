//! The descriptor of VMDK: a file of its own, which names the parts of the disk, or a piece of a
//! sparse file. Source: Virtual Disk Format 5.0 of VMware. Numbers are little-endian.

use std::fs::File;

use super::{Fault, Outside, field, read_up_to};

pub(in crate::cli::transfer) const SPARSE_MAGIC: [u8; 4] = *b"KDMV";
/// The older sparse format of ESX.
pub(in crate::cli::transfer) const COWD_MAGIC: [u8; 4] = *b"COWD";
/// How a descriptor begins.
pub(in crate::cli::transfer) const DESCRIPTOR_MARK: &[u8] = b"# Disk DescriptorFile";

/// Descriptors are some hundred bytes. QEMU reads no more than this either.
const MAX_DESCRIPTOR: u64 = 1 << 20;
const SECTOR: u64 = 512;

pub(super) fn outside(file: &File) -> Result<Vec<Outside>, Fault> {
    let header = read_up_to(file, 0, 512)?;
    if header.starts_with(&COWD_MAGIC) {
        return Err(Fault::Header("the format COWD of older ESX is not supported"));
    }
    if !header.starts_with(&SPARSE_MAGIC) {
        return descriptor(file, 0, MAX_DESCRIPTOR, true);
    }
    // Without a capacity of its own the file only carries a descriptor.
    let capacity = u64::from_le_bytes(field(&header, 12));
    let sectors = |at| u64::from_le_bytes(field(&header, at)).checked_mul(SECTOR);
    let (Some(offset), Some(len)) = (sectors(28), sectors(36)) else {
        return Err(Fault::Header("its descriptor is out of range"));
    };
    if offset == 0 {
        return Ok(Vec::new());
    }
    // A reader may go on behind the length that the header has.
    let len = len.clamp(20 * SECTOR, MAX_DESCRIPTOR);
    descriptor(file, offset, len, capacity == 0)
}

/// What a descriptor names. The extents of a sparse file's own are that file.
fn descriptor(file: &File, at: u64, len: u64, extents: bool) -> Result<Vec<Outside>, Fault> {
    let bytes = read_up_to(file, at, usize::try_from(len).unwrap_or(0))?;
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let (text, mut found) = (&bytes[..end], Vec::new());
    for line in text.split(|byte| *byte == b'\n') {
        let line = line.trim_ascii();
        if let Some(value) = after(line, b"parentFileNameHint=") {
            let name = value.trim_ascii().trim_ascii_start();
            let name = quoted(name).unwrap_or(name).to_vec();
            found.push(Outside::Backing { name, format: Some(b"vmdk".to_vec()) });
        }
        let access = line.split(u8::is_ascii_whitespace).next().unwrap_or_default();
        let is_extent = [&b"RW"[..], b"RDONLY", b"NOACCESS"].contains(&access);
        if is_extent
            && extents
            && let Some(name) = quoted(line)
        {
            found.push(Outside::Extent(name.to_vec()));
        }
    }
    let named = |one: &Outside| matches!(one, Outside::Backing { .. });
    let mut lines = text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    if let Some(parent) = lines.find_map(|line| after(line, b"parentCID="))
        && !parent.trim_ascii().eq_ignore_ascii_case(b"ffffffff")
        && !found.iter().any(named)
    {
        found.push(Outside::Parent(Vec::new()));
    }
    if extents && !found.iter().any(|one| matches!(one, Outside::Extent(_))) {
        return Err(Fault::Header("its descriptor names no extent"));
    }
    Ok(found)
}

fn after<'a>(line: &'a [u8], key: &[u8]) -> Option<&'a [u8]> {
    let begin = line.get(..key.len())?;
    begin.eq_ignore_ascii_case(key).then(|| &line[key.len()..])
}

/// What is between the first two quotation marks.
fn quoted(text: &[u8]) -> Option<&[u8]> {
    let from = text.iter().position(|byte| *byte == b'"')? + 1;
    let len = text[from..].iter().position(|byte| *byte == b'"')?;
    Some(&text[from..from + len])
}
