//! Copies of sub-blocks from one extent to another, which the engine makes by itself.

use crate::geometry::{Geometry, PAGE_BYTES};
use crate::io::{IoBuffer, IoError, IoOp};
use crate::mutation::{Mutation, active};
use crate::pool::{Pool, split};
use crate::sync::Ordering;
use crate::units::PhysicalExtent;

use super::queue::{CommandQueue, Purpose};

/// One such copy, a run of sub-blocks after the other.
#[derive(Debug)]
pub(super) struct Copy {
    pub(super) from: PhysicalExtent,
    pub(super) to: PhysicalExtent,
    /// Sub-blocks that are not copied yet.
    pub(super) left: u64,
    /// When the read of the last run was sent.
    pub(super) sent_ns: Option<u64>,
    /// An operation has failed.
    pub(super) failed: bool,
}

impl Copy {
    pub(super) const fn new(from: PhysicalExtent, to: PhysicalExtent, left: u64) -> Self {
        Self { from, to, left, sent_ns: None, failed: false }
    }

    /// Bytes that are not copied yet.
    pub(super) fn bytes(&self, geometry: Geometry) -> i64 {
        let len = u64::from(self.left.count_ones()) * geometry.sub_block_size();
        i64::try_from(len).unwrap_or(i64::MAX)
    }

    /// Reads the next run; `false` for want of memory. With nothing left, nothing is sent.
    pub(super) fn send(
        &mut self,
        pool: &Pool,
        io: &mut CommandQueue,
        now_ns: u64,
        purpose: Purpose,
    ) -> bool {
        if self.left == 0 {
            return true;
        }
        let sub_block = pool.geometry.sub_block_size();
        let first = self.left.trailing_zeros();
        let count = (self.left >> first).trailing_ones();
        let pages = u64::from(count) * sub_block / PAGE_BYTES;
        let Some(buffer) = IoBuffer::new(usize::try_from(pages).unwrap_or(usize::MAX)) else {
            return false;
        };
        self.sent_ns = Some(now_ns);
        let (device, base) = pool.place(self.from);
        let offset = base + u64::from(first) * sub_block;
        io.push(device, IoOp::Read { offset, buffer }, purpose);
        true
    }

    /// An operation has ended: what was read is written. Returns the bytes whose copy has ended,
    /// or `None` while their write is out.
    pub(super) fn done(
        &mut self,
        pool: &Pool,
        io: &mut CommandQueue,
        purpose: Purpose,
        (op, result): (IoOp, Result<(), IoError>),
    ) -> Option<u64> {
        if result.is_err() {
            self.failed = true;
            return Some(0);
        }
        let sub_block = pool.geometry.sub_block_size();
        let first = self.left.trailing_zeros();
        if let IoOp::Read { buffer, .. } = op {
            if !active(Mutation::CacheKeptAtCopy) {
                // C3: before the write is sent.
                pool.drop_cached(self.to);
            }
            let (device, base) = pool.place(self.to);
            let offset = base + u64::from(first) * sub_block;
            io.push(device, IoOp::Write { offset, buffer, fua: false }, purpose);
            return None;
        }
        let run = (self.left >> first).trailing_ones();
        self.left &= u64::MAX.checked_shl(first + run).unwrap_or(0);
        // R1: a commit flushes the devices that were written to.
        let written = &pool.written[pool.tuning.workers].0[split(self.to).0];
        written.store(written.load(Ordering::Relaxed) + 1, Ordering::SeqCst);
        Some(u64::from(run) * sub_block)
    }
}
