//! The interface to what keeps a host's writes off the devices.

use std::fmt;

use crate::cell::HostNumber;
use crate::error::HostsError;

/// The number by which devices know a host's reservation: `0xb1`, the host's number and 32 bits
/// that are drawn anew for each incarnation (H1). Never 0, which stands for no key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(u64);

/// Says that a key is one of these.
const MARK: u64 = 0xb1;

impl Key {
    /// The key of a host in one incarnation.
    #[must_use]
    pub const fn new(host: HostNumber, incarnation: u32) -> Self {
        Self(MARK << 48 | (host.0 as u64) << 32 | incarnation as u64)
    }

    /// Reads a key as [`fmt::Display`] writes it; `None` where it is none of these.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.strip_prefix("0x").filter(|digits| digits.len() <= 16)?;
        let key = u64::from_str_radix(digits, 16).ok()?;
        (key >> 48 == MARK).then_some(Self(key))
    }

    /// The host that has it.
    #[must_use]
    pub const fn host(self) -> HostNumber {
        HostNumber((self.0 >> 32 & 0xffff) as u16)
    }

    /// As devices have it.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Keeps hosts that were fenced from writing to the devices of one group. Every call covers all
/// devices, blocks, and can be repeated.
pub trait Fence: Send + Sync {
    /// Registers this host's key on each device and makes the reservation, before any lease is
    /// taken (H1). Takes the place of this host's key of an earlier incarnation. Nothing is changed
    /// where that is so. `others`: other hosts have joined, so that the reservation is there.
    ///
    /// # Errors
    /// If a device has no reservations, or another kind of software has reserved it.
    fn join(&self, key: Key, former: &[Key], others: bool) -> Result<(), HostsError>;

    /// Returns whether this host's key is registered on each device; no device can be asked for
    /// another host's. Registers nothing (H5). One device that says no is enough.
    ///
    /// # Errors
    /// If a device can't be asked, and no other one says no.
    fn is_member(&self, key: Key) -> Result<bool, HostsError>;

    /// Removes another host's key from each device; when it returns, none of that host's commands
    /// is left in the target (H3). True for the one host whose call has removed the key from the
    /// first device: a device refuses to remove what is gone.
    ///
    /// # Errors
    /// If one device refuses: the host is not fenced then. [`HostsError::Fenced`] where this host's
    /// own key is gone.
    fn fence(&self, own: Key, other: Key) -> Result<bool, HostsError>;

    /// Removes this host's key. Nothing is changed where it is not registered.
    ///
    /// # Errors
    /// If a device refuses.
    fn leave(&self, key: Key) -> Result<(), HostsError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_names_its_host_and_incarnation() {
        let key = Key::new(HostNumber(0x1234), 0x89ab_cdef);
        assert_eq!(key.to_string(), "0xb1123489abcdef");
        assert_eq!(Key::parse("0xb1123489abcdef"), Some(key));
        assert_eq!(key.host(), HostNumber(0x1234));
        for other in ["", "b1123489abcdef", "0x1", "0x1b1123489abcdef", "0xb1g", "0x0"] {
            assert_eq!(Key::parse(other), None, "{other}");
        }
    }
}
