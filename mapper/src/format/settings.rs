//! Settings of one volume, as they are stored beside its record.

use crate::format::Problem;
use crate::format::placement::Placement;

/// Bytes of the settings in a volume record, without the placement.
pub const ENCODED: usize = 64;
/// The bytes of these that no setting has.
const RESERVED: [std::ops::Range<usize>; 2] = [2..4, 40..ENCODED];

/// The behaviour of a write that needs an extent when none is available.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnFull {
    /// The write waits without a limit.
    #[default]
    Block,
    /// The write waits for this many milliseconds, at least one; then it fails for lack of space.
    Timeout(u32),
    /// The write fails at once for lack of space.
    Error,
}

/// The settings of one volume. Zero is "not set" everywhere, so that a version that doesn't know
/// them leaves the defaults.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VolumeSettings {
    /// See [`OnFull`].
    pub on_full: OnFull,
    /// All of it is set aside, whatever its size becomes: no write of it meets a full pool.
    pub thick: bool,
    /// Bytes set aside for its first writes, including those already mapped.
    pub reservation: u64,
    /// Bytes of extents that it may map at the most; 0 for no limit.
    pub quota: u64,
    /// Requests a second; 0 for no limit.
    pub iops: u64,
    /// Bytes a second; 0 for no limit.
    pub bandwidth: u64,
    /// See [`Placement`]. It has its own bytes in a record.
    pub placement: Placement,
}

/// Most requests a second that can be set: beyond the capability of any device.
pub const MAX_IOPS: u64 = 1_000_000_000;
/// Most bytes a second that can be set: 2^50.
pub const MAX_BANDWIDTH: u64 = 1 << 50;
/// Fewest bytes a second: a request of 32 MiB, the longest there is, is still done in a minute.
pub const MIN_BANDWIDTH: u64 = 1 << 20;

impl VolumeSettings {
    /// Whether nothing is set.
    #[must_use]
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Bytes that are set aside for a volume of this size, including those already mapped.
    #[must_use]
    pub const fn set_aside(&self, size: u64) -> u64 {
        if self.thick || self.reservation > size { size } else { self.reservation }
    }

    /// Refuses inconsistent settings.
    ///
    /// # Errors
    /// The field, its value and the allowed values.
    pub fn check(&self) -> Result<(), Problem> {
        let invalid = |field, value, allowed| Err(Problem::field(field, value, allowed));
        if self.on_full == OnFull::Timeout(0) {
            return invalid("on_full timeout", 0, "at least 1 millisecond");
        }
        if self.iops > MAX_IOPS {
            return invalid("iops", self.iops, "0 for no limit, at most 1,000,000,000");
        }
        if self.bandwidth > MAX_BANDWIDTH || (1..MIN_BANDWIDTH).contains(&self.bandwidth) {
            let allowed = "0 for no limit, or from 2^20 to 2^50 bytes a second";
            return invalid("bandwidth", self.bandwidth, allowed);
        }
        if self.quota > 0 && self.reservation > self.quota {
            return invalid("reservation", self.reservation, "no more than the quota");
        }
        Ok(())
    }

    /// Encodes all but the placement as in a volume record; see `docs/ON_DISK_FORMAT.md`.
    #[must_use]
    pub fn encode(&self) -> [u8; ENCODED] {
        let mut bytes = [0; ENCODED];
        let (kind, timeout) = match self.on_full {
            OnFull::Block => (0, 0),
            OnFull::Timeout(ms) => (1, ms),
            OnFull::Error => (2, 0),
        };
        bytes[0] = kind;
        bytes[1] = u8::from(self.thick);
        bytes[4..8].copy_from_slice(&timeout.to_le_bytes());
        let words = [self.reservation, self.quota, self.iops, self.bandwidth];
        for (place, word) in bytes[8..40].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Takes apart what [`Self::encode`] made. `None` where it isn't that.
    #[must_use]
    pub fn decode(bytes: &[u8; ENCODED]) -> Option<Self> {
        let word = |at: usize| {
            bytes.get(at..at + 8).and_then(|w| w.try_into().ok()).map_or(0, u64::from_le_bytes)
        };
        let timeout = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        let on_full = match (bytes[0], timeout) {
            (0, 0) => OnFull::Block,
            (1, 1..) => OnFull::Timeout(timeout),
            (2, 0) => OnFull::Error,
            _ => return None,
        };
        let settings = Self {
            on_full,
            thick: bytes[1] == 1,
            reservation: word(8),
            quota: word(16),
            iops: word(24),
            bandwidth: word(32),
            placement: Placement::default(),
        };
        // The remaining bytes must be zero, and every value must be valid.
        (settings.encode() == *bytes && settings.check().is_ok()).then_some(settings)
    }
}

/// The same bytes without those that belong to a feature that this code does not know.
#[must_use]
pub(crate) fn without_reserved(mut bytes: [u8; ENCODED]) -> [u8; ENCODED] {
    for range in RESERVED {
        bytes[range].fill(0);
    }
    bytes
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn all() -> VolumeSettings {
        VolumeSettings {
            on_full: OnFull::Timeout(60_000),
            thick: true,
            reservation: 1 << 30,
            quota: 1 << 40,
            iops: 5000,
            bandwidth: 100 << 20,
            placement: Placement::default(),
        }
    }

    #[test]
    fn written_data_is_read_again_and_nothing_else() {
        for settings in [VolumeSettings::default(), all()] {
            assert_eq!(VolumeSettings::decode(&settings.encode()), Some(settings));
        }
        assert_eq!(VolumeSettings::default().encode(), [0; ENCODED]);
        let good = all().encode();
        let mut refused = 0;
        for at in 0..ENCODED {
            let mut bad = good;
            bad[at] ^= 0x80;
            let read = VolumeSettings::decode(&bad);
            assert_ne!(read, Some(all()), "byte {at} makes a difference");
            refused += usize::from(read.is_none());
        }
        // Kind, flags, and everything behind the last word.
        assert!(refused >= 2 + 2 + 24, "{refused}");
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        let field = |settings: VolumeSettings| match settings.check() {
            Err(Problem::Field { field, .. }) => field,
            other => panic!("{other:?}"),
        };
        assert_eq!(field(VolumeSettings { quota: 1, ..all() }), "reservation");
        assert_eq!(field(VolumeSettings { bandwidth: 5, ..all() }), "bandwidth");
        assert_eq!(field(VolumeSettings { iops: u64::MAX, ..all() }), "iops");
        let at_once = VolumeSettings { on_full: OnFull::Timeout(0), ..all() };
        assert_eq!(field(at_once), "on_full timeout");
    }

    #[test]
    fn no_more_than_the_size_is_set_aside() {
        let some = VolumeSettings { reservation: 10, ..VolumeSettings::default() };
        assert_eq!((some.set_aside(4), some.set_aside(20)), (4, 10));
        assert_eq!(all().set_aside(1 << 50), 1 << 50);
    }
}
