//! The footer of VHD, which dynamic images repeat at their begin. Source: Virtual Hard Disk Image
//! Format Specification 1.0 of Microsoft. Numbers are big-endian.

use std::fs::File;

use super::{Fault, Outside, field, read_up_to, size_of, utf16};

pub(in crate::transfer) const COOKIE: [u8; 8] = *b"conectix";
pub(in crate::transfer) const FOOTER_BYTES: u64 = 512;

const FIXED: u32 = 2;
const DYNAMIC: u32 = 3;
const DIFFERENCING: u32 = 4;
/// In the dynamic header: 256 units of UTF-16.
const PARENT_NAME_AT: u64 = 64;

pub(super) fn outside(file: &File) -> Result<Vec<Outside>, Fault> {
    let end = size_of(file)?.saturating_sub(FOOTER_BYTES);
    let mut is_vhd = false;
    // A reader may take either: both have to be harmless.
    for offset in [0, end] {
        let footer = read_up_to(file, offset, 512)?;
        if !footer.starts_with(&COOKIE) {
            continue;
        }
        is_vhd = true;
        match u32::from_be_bytes(field(&footer, 60)) {
            FIXED | DYNAMIC => {}
            DIFFERENCING => {
                let header = u64::from_be_bytes(field(&footer, 16));
                let name_at = header.checked_add(PARENT_NAME_AT);
                let name_at = name_at.ok_or(Fault::Header("its header is out of range"))?;
                let name = read_up_to(file, name_at.min(end), 512)?;
                return Ok(vec![Outside::Parent(utf16(&name, u16::from_be_bytes))]);
            }
            _ => return Err(Fault::Header("its disk type is unknown")),
        }
    }
    if is_vhd { Ok(Vec::new()) } else { Err(Fault::Header("it has no footer \"conectix\"")) }
}
