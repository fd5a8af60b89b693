//! Names of volumes and snapshots.

use std::fmt;

use crate::geometry::MAX_NAME;

/// A name that breaks a rule.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("volume name {name:?}: {problem}")]
pub struct InvalidName {
    /// The name as given.
    pub name: String,
    /// The rule it breaks.
    pub problem: &'static str,
}

/// A name that keeps the rules: 1 to 128 bytes of UTF-8 without '/' and control characters,
/// neither "." nor "..", and not beginning with "node-".
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct VolumeName {
    /// Unused bytes are zero, so that equal names are equal bytes.
    bytes: [u8; MAX_NAME],
    len: u8,
}

impl VolumeName {
    /// Checks a name.
    pub fn new(name: &str) -> Result<Self, InvalidName> {
        Self::from_bytes(name.as_bytes())
            .map_err(|problem| InvalidName { name: name.to_owned(), problem })
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(self.as_bytes()).unwrap_or_default()
    }

    /// The name's bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// Checks bytes read from media. The error is the rule that they break.
    pub(crate) fn from_bytes(name: &[u8]) -> Result<Self, &'static str> {
        let text = std::str::from_utf8(name).map_err(|_| "must be UTF-8")?;
        let len = match u8::try_from(name.len()) {
            Ok(len) if len > 0 && name.len() <= MAX_NAME => len,
            _ => return Err("must have 1 to 128 bytes"),
        };
        if text == "." || text == ".." {
            return Err("must not be \".\" or \"..\"");
        }
        if text.starts_with("node-") {
            return Err("must not begin with \"node-\", which is reserved");
        }
        if text.contains(|c: char| c == '/' || c.is_control()) {
            return Err("must not contain '/' or control characters");
        }
        let mut bytes = [0; MAX_NAME];
        bytes[..name.len()].copy_from_slice(name);
        Ok(Self { bytes, len })
    }

    /// The bytes as records on media hold them, filled up with zeroes.
    pub(crate) const fn padded(&self) -> &[u8; MAX_NAME] {
        &self.bytes
    }
}

impl fmt::Debug for VolumeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}

impl fmt::Display for VolumeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_break_a_rule_are_refused() {
        let long = "x".repeat(129);
        for name in ["", ".", "..", "a/b", "a\0b", "tab\t", "node-1", "\u{85}", long.as_str()] {
            assert!(VolumeName::new(name).is_err(), "{name:?}");
        }
        assert!(VolumeName::from_bytes(b"\xff").is_err());
    }

    #[test]
    fn names_that_keep_the_rules_come_back() {
        let long = "é".repeat(64);
        for name in ["a", "...", "pvc-1", "node", "with blank", long.as_str()] {
            assert_eq!(VolumeName::new(name).unwrap().as_str(), name);
        }
    }
}
