//! The kernel's requests and our answers, as numbers. They are those of `linux/ublk_cmd.h`.

use blockd_engine::block::{BlockError, Operation};

use super::descriptor::Descriptor;

/// `UBLK_IO_F_FUA`.
const FUA: u32 = 1 << 13;
/// `UBLK_IO_F_NOUNMAP`.
const NO_UNMAP: u32 = 1 << 15;
/// `UBLK_IO_F_NEED_REG_BUF`.
const NEEDS_PAGES: u32 = 1 << 17;
const SECTOR: u64 = 512;

/// A request of the kernel, validated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) operation: Operation,
    pub(super) offset: u64,
    pub(super) len: u64,
    /// The request's pages could not be put into the table of buffers.
    pub(super) needs_pages: bool,
}

impl Wanted {
    /// Reads a descriptor. An invalid request is an error number for the answer.
    pub(super) fn of(descriptor: Descriptor, max_bytes: u32) -> Result<Self, i32> {
        let flags = descriptor.operation_and_flags;
        let fua = flags & FUA != 0;
        let operation = match flags & 0xff {
            0 => Operation::Read,
            1 => Operation::Write { fua },
            2 => Operation::Flush,
            3 => Operation::Discard { fua },
            5 => Operation::WriteZeroes { unmap: flags & NO_UNMAP == 0, fua },
            _ => return Err(-libc::EOPNOTSUPP),
        };
        let len = match operation {
            Operation::Flush => 0,
            _ => u64::from(descriptor.sectors) * SECTOR,
        };
        let moves = matches!(operation, Operation::Read | Operation::Write { .. });
        if moves && (len == 0 || len > u64::from(max_bytes)) {
            return Err(-libc::EINVAL);
        }
        let offset = match operation {
            // The kernel leaves the largest number there is.
            Operation::Flush => 0,
            _ => descriptor.start_sector.checked_mul(SECTOR).ok_or(-libc::EINVAL)?,
        };
        Ok(Self { operation, offset, len, needs_pages: moves && flags & NEEDS_PAGES != 0 })
    }
}

/// The number that an answer has: bytes, or an error number below 0.
pub(super) fn answer(operation: Operation, len: u64, result: Result<(), BlockError>) -> i32 {
    match result {
        Ok(()) => match operation {
            Operation::Read | Operation::Write { .. } => {
                i32::try_from(len).unwrap_or(-libc::EINVAL)
            }
            _ => 0,
        },
        Err(BlockError::Invalid) => -libc::EINVAL,
        Err(BlockError::ReadOnly) => -libc::EPERM,
        // A request that waits for space when its device is removed by force fails for lack of
        // space.
        Err(BlockError::NoSpace | BlockError::Gone) => -libc::ENOSPC,
        Err(BlockError::Io) => -libc::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: u32 = 128 << 10;

    #[test]
    fn every_operation_is_read_with_its_flags() {
        let whole = |flags| Wanted::of(Descriptor::new(flags, 8, 16), MAX).unwrap();
        let cases = [
            (0, Operation::Read),
            (1, Operation::Write { fua: false }),
            (1 | FUA | 1 << 8, Operation::Write { fua: true }),
            (3, Operation::Discard { fua: false }),
            (5, Operation::WriteZeroes { unmap: true, fua: false }),
            (5 | NO_UNMAP, Operation::WriteZeroes { unmap: false, fua: false }),
            (5 | FUA, Operation::WriteZeroes { unmap: true, fua: true }),
        ];
        for (flags, operation) in cases {
            let wanted = whole(flags);
            assert_eq!((wanted.operation, wanted.offset, wanted.len), (operation, 4096, 8192));
            assert!(!wanted.needs_pages);
        }
        let flush = Wanted::of(Descriptor::new(2, u64::MAX, 0), MAX).unwrap();
        assert_eq!((flush.operation, flush.offset, flush.len), (Operation::Flush, 0, 0));
        assert!(whole(1 | NEEDS_PAGES).needs_pages);
        assert!(!whole(3 | NEEDS_PAGES).needs_pages);
    }

    #[test]
    fn an_invalid_request_is_an_error_number() {
        let of = |flags, start, sectors| Wanted::of(Descriptor::new(flags, start, sectors), MAX);
        assert_eq!(of(4, 0, 1), Err(-libc::EOPNOTSUPP));
        assert_eq!(of(15, 0, 1), Err(-libc::EOPNOTSUPP));
        assert_eq!(of(0, 0, 0), Err(-libc::EINVAL));
        assert_eq!(of(1, 0, 257), Err(-libc::EINVAL));
        assert_eq!(of(1, u64::MAX / 2, 1), Err(-libc::EINVAL));
        // A request without data may be long.
        assert_eq!(of(3, 0, u32::MAX).unwrap().len, u64::from(u32::MAX) * 512);
    }

    #[test]
    fn answers_are_bytes_or_error_numbers() {
        assert_eq!(answer(Operation::Read, 4096, Ok(())), 4096);
        assert_eq!(answer(Operation::Write { fua: true }, 512, Ok(())), 512);
        assert_eq!(answer(Operation::Flush, 0, Ok(())), 0);
        assert_eq!(answer(Operation::Discard { fua: false }, 1 << 30, Ok(())), 0);
        assert_eq!(answer(Operation::Read, 512, Err(BlockError::Io)), -libc::EIO);
        assert_eq!(answer(Operation::Read, 512, Err(BlockError::NoSpace)), -libc::ENOSPC);
    }
}
