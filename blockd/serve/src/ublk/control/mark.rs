//! How a daemon knows its own devices, also those that it added and could not remember: 64 bits
//! that the kernel keeps with each device.

use blockd_engine::pool::VolumeId;

/// In the upper 16 bits, so that what others keep there is not taken for ours: "BD".
const MAGIC: u64 = 0x4244;

/// The mark of a device: its owner and its volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mark {
    /// The daemon's identity, drawn once and kept in its state folder: two daemons in containers
    /// have the same folders by name, and must not take each other's devices.
    pub owner: u32,
    /// A hash of the volume's identity. A second look only: the device's number is remembered.
    pub volume: u16,
}

impl Mark {
    /// Of a volume's device.
    #[must_use]
    pub fn new(owner: u32, pool: &[u8; 16], volume: VolumeId) -> Self {
        let bytes = pool.iter().copied().chain(volume.0.to_le_bytes());
        // FNV-1a, folded: stable from one version to the next, unlike the library's hashes.
        let hash = bytes
            .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        let folded = (hash >> 16) ^ (hash & 0xffff);
        Self { owner, volume: u16::try_from(folded).unwrap_or_default() }
    }

    pub(super) fn to_bits(self) -> u64 {
        MAGIC << 48 | u64::from(self.owner) << 16 | u64::from(self.volume)
    }

    /// A mark of ours or of another daemon like this one.
    #[must_use]
    pub fn from_bits(bits: u64) -> Option<Self> {
        let owner = u32::try_from(bits >> 16 & u64::from(u32::MAX)).ok()?;
        let volume = u16::try_from(bits & u64::from(u16::MAX)).ok()?;
        (bits >> 48 == MAGIC).then_some(Self { owner, volume })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_survives_the_kernel_and_stays_the_same() {
        let mark = Mark::new(0x89ab_cdef, &[7; 16], VolumeId(3));
        assert_eq!(Mark::from_bits(mark.to_bits()), Some(mark));
        assert_eq!(mark.to_bits() >> 16, 0x4244_89ab_cdef);
        // A value that has to stay: devices of the version before are found by it.
        assert_eq!(mark.volume, 0x5ac3);
        assert_ne!(mark.volume, Mark::new(0, &[7; 16], VolumeId(4)).volume);
    }

    #[test]
    fn marks_of_others_are_not_taken_for_ours() {
        for bits in [0, 0xbeef, u64::MAX, 0x4245 << 48] {
            assert_eq!(Mark::from_bits(bits), None);
        }
    }
}
