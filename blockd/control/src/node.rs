//! A host as a member of pools: its identity, and what it is called by in them.
//!
//! On media a node is a number of 32 bits. It is the first eight hexadecimal digits of the UUID, so
//! that one can be recognised by the other.

use std::fmt;

use xxhash_rust::xxh3::xxh3_128;

/// Where the host's operating system keeps its identity.
const MACHINE_ID: &str = "/etc/machine-id";

/// Goes before the machine's identity, which is not for telling to others (machine-id(5)).
const APPLICATION: &[u8] = b"blockd node 1\0";

/// Begins every name that belongs to a node, and no name of a volume.
const PREFIX: &str = "node-";

/// A node's identity. Its number is never 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(u128);

impl NodeId {
    /// Reads a UUID: 32 hexadecimal digits, in five groups or in one.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let digits: String = match text.len() {
            32 => text.to_owned(),
            36 => {
                let grouped = [8, 13, 18, 23].iter().all(|at| text.as_bytes()[*at] == b'-');
                grouped.then(|| text.replace('-', ""))?
            }
            _ => return None,
        };
        if digits.len() != 32 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        let id = Self(u128::from_str_radix(&digits, 16).ok()?);
        (id.number() != 0).then_some(id)
    }

    /// The node of this host; `None` where it has no identity.
    #[must_use]
    pub fn of_host() -> Option<Self> {
        let text = std::fs::read_to_string(MACHINE_ID).ok()?;
        Self::of_machine(text.trim())
    }

    /// The node of the host with this machine id, as its operating system writes it.
    fn of_machine(machine: &str) -> Option<Self> {
        if machine.len() != 32 || !machine.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        let hash = xxh3_128(&[APPLICATION, machine.to_lowercase().as_bytes()].concat());
        // Version 8 of RFC 9562, whose bits are the application's own.
        let id = hash & !(0xf << 76) & !(0x3 << 62) | 0x8 << 76 | 0x2 << 62;
        let id = Self(id);
        // Only 0 is no number of a node: one in 2^32 machines would have it.
        Some(if id.number() == 0 { Self(id.0 | 1 << 96) } else { id })
    }

    /// The number of the node on media.
    #[must_use]
    pub const fn number(self) -> u32 {
        (self.0 >> 96) as u32
    }

    /// The name of the extents that it holds and has not used.
    #[must_use]
    pub fn free_object(self) -> String {
        format!("{PREFIX}{self}-free")
    }

    /// The name of its log.
    #[must_use]
    pub fn journal_object(self) -> String {
        format!("{PREFIX}{self}-journal")
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&uuid(self.0))
    }
}

/// A UUID as people write it.
#[must_use]
pub fn uuid(id: u128) -> String {
    let hex = format!("{id:032x}");
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    parts.join("-")
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "3f2b8c1d-0e4a-4d5b-9c6f-7a8b9c0d1e2f";

    #[test]
    fn a_uuid_is_read_in_both_forms_and_its_number_is_its_beginning() {
        let id = NodeId::parse(TEXT).unwrap();
        assert_eq!(id.to_string(), TEXT);
        assert_eq!(id.number(), 0x3f2b_8c1d);
        assert_eq!(NodeId::parse(&TEXT.replace('-', "").to_uppercase()), Some(id));
        assert_eq!(id.free_object(), format!("node-{TEXT}-free"));
        assert_eq!(id.journal_object(), format!("node-{TEXT}-journal"));
    }

    #[test]
    fn a_text_that_is_no_uuid_is_refused() {
        let zero = "00000000-0e4a-4d5b-9c6f-7a8b9c0d1e2f";
        let moved = "3f2b8c1d0-e4a-4d5b-9c6f-7a8b9c0d1e2f";
        let signed = "+f2b8c1d0e4a4d5b9c6f7a8b9c0d1e2f";
        let wide = "3f2b8c1d-0e4a-4d5b-9c6f-7a8b9c0d1eé";
        for text in ["", "x", &TEXT[1..], zero, moved, signed, wide] {
            assert_eq!(NodeId::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_machine_has_one_identity_that_does_not_show_its_own() {
        let machine = "3d1219c7c4c5404aaa1f6d2a48adfda4";
        let id = NodeId::of_machine(machine).unwrap();
        assert_eq!(NodeId::of_machine(&machine.to_uppercase()), Some(id));
        assert_ne!(NodeId::of_machine("3d1219c7c4c5404aaa1f6d2a48adfda5"), Some(id));
        let text = id.to_string();
        assert_eq!((text.as_bytes()[14], text.len()), (b'8', 36), "{text}");
        assert!(b"89ab".contains(&text.as_bytes()[19]), "{text}");
        assert!(!text.contains("3d1219c7"), "{text}");
        assert_eq!(NodeId::parse(&text), Some(id));
        // Numbers on media would name another host if this changed.
        assert_eq!(text, "4dfc0174-df77-84d2-8a65-d067bc90b507");
        for text in ["", "uninitialized", "3d1219c7-c4c5-404a-aa1f-6d2a48adfda4"] {
            assert_eq!(NodeId::of_machine(text), None, "{text}");
        }
    }
}
