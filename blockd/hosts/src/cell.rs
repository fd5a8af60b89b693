//! A cell as the directory has it.

use std::fmt;
use std::path::PathBuf;

/// The name of a cell within its group: 1 to 64 of `a-z`, `0-9`, `.` and `-`, and a letter or digit
/// first. These are names of logical volumes too (lvm(8)), whose reserved parts have an underscore.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CellName(String);

/// Most bytes of a name: volume groups have names too, and LVM allows 127 for both together.
const MAX_BYTES: usize = 64;

impl CellName {
    /// The names that are allowed, for messages.
    pub const ALLOWED: &str = "1 to 64 of a-z, 0-9, '.' and '-', with a letter or digit first";

    /// Reads a name; `None` where it is none.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let is_first = text.bytes().next().is_some_and(is_plain);
        let is_rest = text.bytes().all(|byte| is_plain(byte) || matches!(byte, b'.' | b'-'));
        (is_first && is_rest && text.len() <= MAX_BYTES).then(|| Self(text.to_owned()))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for CellName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The number of a host in its group, from 1. Sanlock calls it the host's id.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct HostNumber(pub u16);

impl fmt::Display for HostNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A host that has a lease, in one of its memberships.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner {
    /// The host. It may be this one, from before its last boot.
    pub host: HostNumber,
    /// Counts the host's memberships.
    pub generation: u64,
}

/// Which host has a cell.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Holder {
    /// This host, and its device is there.
    This,
    /// None.
    Free,
    /// The host that its lease names.
    Other(Owner),
    /// The lease can't be read, for this reason.
    Unknown(String),
}

/// A cell as the directory has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cell {
    /// Unique in its group.
    pub name: CellName,
    /// Bytes of its device.
    pub size: u64,
    /// Its device, which is there while this host has the cell.
    pub path: PathBuf,
    /// The host that has it.
    pub holder: Holder,
    /// No pool is kept in it: its device has what its space held before the cell was made, or what
    /// is left of a pool that was being erased.
    pub is_new: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_logical_volumes() {
        let longest = "a".repeat(MAX_BYTES);
        for name in ["a", "0", "vm-1.disk", &longest] {
            assert_eq!(CellName::parse(name).unwrap().as_str(), name);
        }
        let too_long = "a".repeat(MAX_BYTES + 1);
        for name in ["", "-a", ".", "A", "a/b", "a_tdata", "a b", "ü", &too_long] {
            assert_eq!(CellName::parse(name), None, "{name}");
        }
    }
}
