//! The claim page: which open, on which host, may write to the pool.
//!
//! All fields lie in the first 512 bytes, the rest is zero: a write of the page is never torn.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::format::PoolId;
use crate::format::checksum::{page_crc, sum};
use crate::geometry::PAGE_SIZE;
use crate::io::Page;

/// Byte of the claim page on the pool's first device: behind copies A and B of the superblock.
pub const CLAIM_OFFSET: u64 = 8192;

const MAGIC: [u8; 8] = *b"BLOCKDow";
const CRC_AT: usize = 8;
const VERSION: u16 = 1;

/// The state of the open that wrote a claim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClaimState {
    /// The open has ended in order.
    Free,
    /// The open has written its claim and waits before it touches the pool.
    Pending,
    /// The open may write to the pool.
    Held,
}

/// A claim on a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Claim {
    /// The pool that was claimed.
    pub pool_id: PoolId,
    /// The state of its open.
    pub state: ClaimState,
    /// Random and not 0: identity of the open.
    pub open_id: u64,
    /// Rises with each renewal.
    pub counter: u64,
    /// Number of the node.
    pub node: u32,
    /// The boot of the host.
    pub boot_id: [u8; 16],
    /// The directory of host locks that the open has a lock in; 0 if it has none.
    pub lock_space: u64,
    /// The device as the host knows it: its number, or the inode of a file.
    pub device: u64,
}

impl Claim {
    /// Whether two claims are on one pool and of one node, one host, one boot and one path to the
    /// device, where a lock of the host for this pool shows that the other open has ended.
    #[must_use]
    pub fn is_of_same_host(&self, other: &Self) -> bool {
        self.lock_space != 0
            && self.lock_space == other.lock_space
            && self.pool_id == other.pool_id
            && self.node == other.node
            && self.boot_id == other.boot_id
            && self.device == other.device
    }

    /// Writes the page.
    pub fn encode(&self, page: &mut Page) {
        let raw = RawClaim {
            magic: MAGIC,
            crc: 0.into(),
            version: VERSION.into(),
            state: match self.state {
                ClaimState::Free => 0,
                ClaimState::Pending => 1,
                ClaimState::Held => 2,
            },
            reserved_a: 0,
            pool_id: self.pool_id,
            open_id: self.open_id.into(),
            counter: self.counter.into(),
            node: self.node.into(),
            reserved_b: [0; 4],
            boot_id: self.boot_id,
            lock_space: self.lock_space.into(),
            device: self.device.into(),
            reserved_c: [0; 4008],
        };
        page.0.copy_from_slice(raw.as_bytes());
        let crc = crc32c::crc32c(&page.0);
        page.0[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    }
}

/// The content of the claim page's place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClaimPage {
    /// Zeroes: the pool was never claimed.
    Absent,
    /// A claim.
    Claim(Claim),
    /// Anything else, with its XXH3-64. It may be the claim of a later release.
    Unreadable(u64),
}

impl ClaimPage {
    /// Reads the page.
    #[must_use]
    pub fn decode(page: &[u8; PAGE_SIZE]) -> Self {
        if page.iter().all(|byte| *byte == 0) {
            return Self::Absent;
        }
        decode(page).map_or_else(|| Self::Unreadable(sum(page)), Self::Claim)
    }
}

fn decode(page: &[u8; PAGE_SIZE]) -> Option<Claim> {
    let raw = RawClaim::ref_from_bytes(page).ok()?;
    let is_sound = raw.magic == MAGIC
        && raw.crc.get() == page_crc::<CRC_AT>(page)
        && raw.version.get() == VERSION
        && raw.open_id.get() != 0
        && raw.reserved_a == 0
        && raw.reserved_b == [0; 4]
        && raw.reserved_c.iter().all(|byte| *byte == 0);
    let state = match raw.state {
        0 => ClaimState::Free,
        1 => ClaimState::Pending,
        2 => ClaimState::Held,
        _ => return None,
    };
    is_sound.then(|| Claim {
        pool_id: raw.pool_id,
        state,
        open_id: raw.open_id.get(),
        counter: raw.counter.get(),
        node: raw.node.get(),
        boot_id: raw.boot_id,
        lock_space: raw.lock_space.get(),
        device: raw.device.get(),
    })
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawClaim {
    magic: [u8; 8],
    crc: U32,
    version: U16,
    state: u8,
    reserved_a: u8,
    pool_id: PoolId,
    open_id: U64,
    counter: U64,
    node: U32,
    reserved_b: [u8; 4],
    boot_id: [u8; 16],
    lock_space: U64,
    device: U64,
    reserved_c: [u8; 4008],
}

const _: () = assert!(size_of::<RawClaim>() == PAGE_SIZE);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_on_another_pool_or_of_another_node_is_not_of_the_same_host() {
        let own = Claim {
            pool_id: [1; 16],
            state: ClaimState::Held,
            open_id: 2,
            counter: 3,
            node: 4,
            boot_id: [5; 16],
            lock_space: 6,
            device: 7,
        };
        assert!(own.is_of_same_host(&Claim { open_id: 8, counter: 9, ..own }));
        let others = [
            Claim { pool_id: [2; 16], ..own },
            Claim { node: 5, ..own },
            Claim { boot_id: [6; 16], ..own },
            Claim { lock_space: 7, ..own },
            Claim { device: 8, ..own },
        ];
        assert!(others.iter().all(|other| !own.is_of_same_host(other)));
        let unlocked = Claim { lock_space: 0, ..own };
        assert!(!unlocked.is_of_same_host(&unlocked));
    }
}
