//! The devices that a volume's extents come from, as it is stored in its record.

/// The identity of a device in the record of a volume that is pinned to it: the CRC-32C of its
/// UUID. Not its place in the device table, which another device may take once it has left.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DeviceMark(pub u32);

impl DeviceMark {
    /// The mark of the device with this UUID.
    #[must_use]
    pub fn of(uuid: &[u8; 16]) -> Self {
        Self(crc32c::crc32c(uuid))
    }
}

/// The devices that a volume's extents come from, in a pool of several.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Placement {
    /// One device after the other, as the other volumes that have this policy.
    #[default]
    Fill,
    /// All devices in turn, a stripe from each, in proportion to the free space that they have.
    Spread,
    /// This device. While it has no free extent, leaves the pool, or is not of it any more:
    /// any, as with [`Self::Fill`].
    Pin(DeviceMark),
}

impl Placement {
    /// The policy's number in a volume record, and the mark of a device.
    #[must_use]
    pub const fn encode(self) -> (u8, u32) {
        match self {
            Self::Fill => (0, 0),
            Self::Spread => (1, 0),
            Self::Pin(mark) => (2, mark.0),
        }
    }

    /// Takes apart what [`Self::encode`] made. `None` where it isn't that.
    #[must_use]
    pub const fn decode(policy: u8, mark: u32) -> Option<Self> {
        match (policy, mark) {
            (0, 0) => Some(Self::Fill),
            (1, 0) => Some(Self::Spread),
            (2, mark) => Some(Self::Pin(DeviceMark(mark))),
            _ => None,
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_read_again_and_nothing_else() {
        let pin = Placement::Pin(DeviceMark::of(&[7; 16]));
        for placement in [Placement::Fill, Placement::Spread, pin] {
            let (policy, mark) = placement.encode();
            assert_eq!(Placement::decode(policy, mark), Some(placement));
        }
        for (policy, mark) in [(0, 1), (1, 1), (3, 0), (255, 0)] {
            assert_eq!(Placement::decode(policy, mark), None, "{policy} {mark}");
        }
        assert_eq!(Placement::default().encode(), (0, 0), "zero is the default");
        assert_ne!(DeviceMark::of(&[7; 16]), DeviceMark::of(&[8; 16]));
    }
}
