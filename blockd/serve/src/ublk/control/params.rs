//! A device's limits, as the kernel's block layer takes them.

use libublk::sys;

/// The kernel's sector, whatever a device's blocks are.
const SECTOR: u32 = 512;

/// Most bytes of one discard or write of zeroes: such a request is planned extent by extent, and
/// 1 GiB is a few thousand of them, some milliseconds.
const MAX_CLEAR_BYTES: u32 = 1 << 30;

/// The page that all is aligned to that is not aligned to less.
const PHYSICAL_SHIFT: u8 = 12;

/// The parameters of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Params {
    /// Bytes.
    pub size: u64,
    /// Logical block in bytes, a power of two from 512 to 4096.
    pub block_size: u32,
    /// The pool's extent in bytes, a power of two of at least 64 KiB.
    pub extent_size: u64,
    /// Most bytes of a read or write.
    pub max_bytes: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// Answered writes may have to be flushed. Without, the kernel sends no flush.
    pub write_cache: bool,
}

impl Params {
    /// The pool's unit of validity: the least range that a discard frees.
    fn sub_block(&self) -> u64 {
        (self.extent_size / 64).max(4096)
    }

    pub(super) fn to_kernel(self) -> sys::ublk_params {
        let shift = |bytes: u64| u8::try_from(bytes.trailing_zeros()).unwrap_or(PHYSICAL_SHIFT);
        let sub_block = self.sub_block();
        let mut attrs = 0;
        if self.write_cache {
            attrs |= sys::UBLK_ATTR_VOLATILE_CACHE | sys::UBLK_ATTR_FUA;
        }
        if self.read_only {
            attrs |= sys::UBLK_ATTR_READ_ONLY;
        }
        sys::ublk_params {
            types: sys::UBLK_PARAM_TYPE_BASIC | sys::UBLK_PARAM_TYPE_DISCARD,
            basic: sys::ublk_param_basic {
                attrs,
                logical_bs_shift: shift(u64::from(self.block_size)),
                physical_bs_shift: PHYSICAL_SHIFT,
                io_min_shift: shift(sub_block),
                io_opt_shift: shift(self.extent_size),
                max_sectors: self.max_bytes / SECTOR,
                dev_sectors: self.size / u64::from(SECTOR),
                ..Default::default()
            },
            discard: sys::ublk_param_discard {
                discard_granularity: u32::try_from(sub_block).unwrap_or(4096),
                max_discard_sectors: MAX_CLEAR_BYTES / SECTOR,
                max_write_zeroes_sectors: MAX_CLEAR_BYTES / SECTOR,
                max_discard_segments: 1,
                ..Default::default()
            },
            ..Default::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMS: Params = Params {
        size: 10 << 30,
        block_size: 512,
        extent_size: 1 << 20,
        max_bytes: 128 << 10,
        read_only: false,
        write_cache: true,
    };

    #[test]
    fn limits_are_those_of_the_volume() {
        let kernel = PARAMS.to_kernel();
        assert_eq!(kernel.types, 3);
        let basic = kernel.basic;
        assert_eq!((basic.logical_bs_shift, basic.physical_bs_shift), (9, 12));
        assert_eq!((basic.io_min_shift, basic.io_opt_shift), (14, 20));
        assert_eq!((basic.max_sectors, basic.dev_sectors), (256, 20 << 20));
        assert_eq!((basic.attrs, basic.chunk_sectors, basic.virt_boundary_mask), (12, 0, 0));
        let discard = kernel.discard;
        assert_eq!((discard.discard_granularity, discard.discard_alignment), (16 << 10, 0));
        assert_eq!((discard.max_discard_sectors, discard.max_discard_segments), (2 << 20, 1));
        assert_eq!(discard.max_write_zeroes_sectors, 2 << 20);
    }

    #[test]
    fn small_extents_are_discarded_by_pages_and_snapshots_are_read_only() {
        let params = Params { extent_size: 64 << 10, block_size: 4096, read_only: true, ..PARAMS };
        let kernel = params.to_kernel();
        assert_eq!(kernel.discard.discard_granularity, 4096);
        assert_eq!((kernel.basic.io_min_shift, kernel.basic.logical_bs_shift), (12, 12));
        assert_eq!(kernel.basic.attrs & sys::UBLK_ATTR_READ_ONLY, 1);
    }
}
