//! The header of qcow2. Source: docs/interop/qcow2.txt of QEMU. Numbers are big-endian.

use std::fs::File;

use super::{Fault, Outside, field, read_exactly, read_up_to};

pub(in crate::transfer) const MAGIC: [u8; 4] = *b"QFI\xfb";

/// Incompatible feature: the guest's bytes are in another file.
const EXTERNAL_DATA: u64 = 1 << 2;
/// Header extensions with a text.
const BACKING_FORMAT: u32 = 0xe279_2aca;
const DATA_FILE_NAME: u32 = 0x4441_5441;
/// Longest name of a backing file that the format allows.
const MAX_NAME: u32 = 1023;
/// Clusters are from 512 bytes to 2 MiB; header and extensions are in the first.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;

pub(super) fn outside(file: &File) -> Result<Vec<Outside>, Fault> {
    let header = read_up_to(file, 0, 112)?;
    let number = |at| u32::from_be_bytes(field(&header, at));
    let long = |at| u64::from_be_bytes(field(&header, at));
    if !header.starts_with(&MAGIC) || header.len() < 72 {
        return Err(Fault::Header("it does not begin with a qcow2 header"));
    }
    let version = number(4);
    if !(2..=3).contains(&version) {
        return Err(Fault::Header("only versions 2 and 3 are supported"));
    }
    if !CLUSTER_BITS.contains(&number(20)) {
        return Err(Fault::Header("its cluster size is out of range"));
    }
    let cluster_bytes = 1_u64 << number(20);
    let (features, extensions_at) = if version == 2 { (0, 72) } else { (long(72), number(100)) };
    let mut found = Vec::new();
    match number(32) {
        0 => {}
        1 => found.push(Outside::Key("AES")),
        2 => found.push(Outside::Key("LUKS")),
        _ => found.push(Outside::Key("unknown method")),
    }
    let backing_at = long(8);
    let end = if backing_at == 0 { cluster_bytes } else { backing_at.min(cluster_bytes) };
    let extensions = extensions(file, u64::from(extensions_at), end)?;
    let text = |wanted| extensions.iter().find(|(kind, _)| *kind == wanted).map(|(_, text)| text);
    if backing_at != 0 {
        let len = number(16);
        if len > MAX_NAME {
            return Err(Fault::Header("the name of its backing file is too long"));
        }
        let name = read_exactly(file, backing_at, usize::try_from(len).unwrap_or(0))?;
        found.push(Outside::Backing { name, format: text(BACKING_FORMAT).cloned() });
    }
    if features & EXTERNAL_DATA != 0 {
        found.push(Outside::DataFile(text(DATA_FILE_NAME).cloned().unwrap_or_default()));
    }
    Ok(found)
}

/// Kind and bytes of each header extension between two offsets of the first cluster.
fn extensions(file: &File, from: u64, end: u64) -> Result<Vec<(u32, Vec<u8>)>, Fault> {
    let len = usize::try_from(end.saturating_sub(from)).unwrap_or(0);
    let bytes = read_up_to(file, from, len)?;
    let (mut found, mut at) = (Vec::new(), 0_usize);
    while at + 8 <= bytes.len() {
        let kind = u32::from_be_bytes(field(&bytes, at));
        let len = usize::try_from(u32::from_be_bytes(field(&bytes, at + 4))).unwrap_or(usize::MAX);
        if kind == 0 {
            break;
        }
        let text = bytes[at + 8..].get(..len);
        let text = text.ok_or(Fault::Header("a header extension is longer than its cluster"))?;
        if [BACKING_FORMAT, DATA_FILE_NAME].contains(&kind) {
            found.push((kind, text.to_vec()));
        }
        at = at + 8 + len.next_multiple_of(8);
    }
    Ok(found)
}
