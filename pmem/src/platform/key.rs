//! Keys of regions that stay the same when the kernel's numbers change.

use std::fmt;
use std::str::FromStr;

/// Which region: the same after every boot, and in whatever order its parts are found.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum RegionKey {
    /// The cookie of its interleave set, which is never 0.
    Cookie(u64),
    /// The replacement of a missing cookie: the provider, and its parts.
    Parts(String),
}

impl fmt::Display for RegionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cookie(cookie) => write!(f, "{cookie:#x}"),
            Self::Parts(parts) => f.write_str(parts),
        }
    }
}

impl FromStr for RegionKey {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let allowed = "a set cookie like 0x1f3ab5, or a key as `blockd pmem list` shows it";
        if let Some(digits) = text.strip_prefix("0x") {
            let cookie = u64::from_str_radix(digits, 16).map_err(|_| allowed)?;
            return if cookie == 0 { Err(allowed) } else { Ok(Self::Cookie(cookie)) };
        }
        let is_fine = text.contains(':') && !text.contains(|c: char| c.is_whitespace());
        if is_fine { Ok(Self::Parts(text.to_owned())) } else { Err(allowed) }
    }
}

/// Which namespace.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// A uuid of random bytes.
    #[must_use]
    pub fn of_random(mut bytes: [u8; 16]) -> Self {
        // Version 4, variant 1, as RFC 9562 has it.
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Self(bytes)
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            let hyphen = if matches!(at, 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{hyphen}{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Uuid {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let allowed = "a uuid like 8d9cbb33-7a5c-4b60-9c6f-3a2f1f8f9a10";
        let bytes = text.as_bytes();
        let hyphens = [8, 13, 18, 23];
        let is_formed = bytes.len() == 36 && hyphens.iter().all(|&at| bytes[at] == b'-');
        let digits: Vec<u8> = bytes.iter().copied().filter(|byte| *byte != b'-').collect();
        if !is_formed || digits.len() != 32 {
            return Err(allowed);
        }
        let mut value = [0; 16];
        for (byte, pair) in value.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |at: usize| char::from(pair[at]).to_digit(16);
            let both = digit(0).zip(digit(1)).ok_or(allowed)?;
            *byte = u8::try_from(both.0 * 16 + both.1).map_err(|_| allowed)?;
        }
        Ok(Self(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_and_keys_are_read_as_they_are_written() {
        let uuid = Uuid::of_random([0xff; 16]);
        assert_eq!(uuid.to_string(), "ffffffff-ffff-4fff-bfff-ffffffffffff");
        assert_eq!(uuid.to_string().parse(), Ok(uuid));
        for bad in
            ["", "x", "ffffffff-ffff-4fff-bfff-fffffffffff", "ffffffffffff-4fff-bfff-ffff--fffffff"]
        {
            assert!(bad.parse::<Uuid>().is_err(), "{bad}");
        }
        for text in ["0x1f3ab5", "ACPI.NFIT:8680-57341200"] {
            assert_eq!(text.parse::<RegionKey>().unwrap().to_string(), text);
        }
        for bad in ["", "0x0", "0xg", "region0", "a b:c"] {
            assert!(bad.parse::<RegionKey>().is_err(), "{bad}");
        }
    }
}
