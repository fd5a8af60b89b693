//! First writes: the other sub-blocks of the extent, and the operations on the media.

use super::Worker;
use super::write::Piece;
use crate::entry::Entry;
use crate::plan::{OpKind, Plan, PlanOp};
use crate::units::PhysicalExtent;

/// How the sub-blocks of a first write come to be whole in its target.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    /// The target comes to lie over the shared extent.
    pub(super) redirects: bool,
    /// The target takes the place of the shared extent.
    pub(super) copies: bool,
    /// Sub-blocks copied from the entry's extent, and from its base.
    pub(super) from_top: u64,
    pub(super) from_base: u64,
    /// Sub-blocks written in part, with zeroes around that part.
    pub(super) filled: u64,
}

impl Way {
    pub(super) fn of(
        may_redirect: bool,
        entry: Entry,
        shared: Option<PhysicalExtent>,
        touched: u64,
        whole: u64,
    ) -> Self {
        let (top, base) = (entry.top(), entry.base());
        let partial = touched & !whole;
        let redirects = may_redirect
            && shared.is_some()
            && !base.is_mapped()
            && is_worth_a_base(top.valid & !touched, top.valid);
        let copies = shared.is_some() && !redirects;
        let from_top = match (redirects, copies) {
            (true, _) => top.valid & partial,
            (_, true) => top.valid & !whole,
            _ => 0,
        };
        let from_base = base.valid & partial & !top.valid;
        let filled = partial & !entry.valid();
        Self { redirects, copies, from_top, from_base, filled }
    }

    /// Operations that it takes at the most: each run of copied sub-blocks is one, and then come
    /// the fills and the write.
    pub(super) const fn operations(&self) -> usize {
        if self.from_top | self.from_base == 0 {
            return 3;
        }
        runs_of(self.from_top) + runs_of(self.from_base) + 3
    }

    /// Sub-blocks that no other write may touch meanwhile.
    pub(super) const fn partial(&self) -> u64 {
        let copied = if self.redirects { self.from_top } else { 0 };
        self.filled | self.from_base | copied
    }
}

/// Whether enough sub-blocks are left: an extent with less than an eighth of them is copied, not
/// put under another.
const fn is_worth_a_base(left: u64, valid: u64) -> bool {
    left != 0 && left.count_ones() * 8 >= valid.count_ones()
}

impl Worker {
    /// Copies what the target needs of other extents, and then writes. `unseen`: no map shows the
    /// target's part.
    pub(super) fn push_first_write(
        &self,
        piece: &Piece,
        entry: Entry,
        way: &Way,
        (target, unseen): (PhysicalExtent, bool),
        plan: &mut Plan,
    ) {
        if way.from_top | way.from_base != 0 {
            let (top, base) = (entry.top().physical, entry.base().physical);
            self.push_copies(top, way.from_top, target, unseen, plan);
            self.push_copies(base, way.from_base, target, unseen, plan);
        }
        self.push_write(piece, way, target, unseen, plan);
    }

    /// Copies of sub-blocks into the target, which come before the write itself.
    fn push_copies(
        &self,
        source: Option<PhysicalExtent>,
        mut bits: u64,
        target: PhysicalExtent,
        unseen: bool,
        plan: &mut Plan,
    ) {
        let Some(source) = source.filter(|_| bits != 0) else { return };
        let sub_block = self.pool.geometry.sub_block_size();
        let (device, base) = self.pool.place(target);
        let (from_device, from_base) = self.pool.place(source);
        while bits != 0 {
            let first = u64::from(bits.trailing_zeros());
            let count = u64::from((bits >> first).trailing_ones());
            let (offset, len) = (first * sub_block, count * sub_block);
            plan.push(PlanOp {
                kind: OpKind::Copy { from_device, from_offset: from_base + offset },
                stage: 0,
                device,
                offset: base + offset,
                len,
                buffer_offset: 0,
                unseen,
            });
            bits &= u64::MAX.checked_shl(low_u32(first + count)).unwrap_or(0);
        }
    }

    /// The client's bytes, with zeroes around them where a sub-block that was clear becomes valid
    /// by a part of it.
    fn push_write(
        &self,
        piece: &Piece,
        way: &Way,
        target: PhysicalExtent,
        unseen: bool,
        plan: &mut Plan,
    ) {
        let sub_block = self.pool.geometry.sub_block_size();
        let (device, base) = self.pool.place(target);
        let stage = u8::from(way.from_top | way.from_base != 0);
        let zeroes = |from: u64, to: u64| PlanOp {
            kind: OpKind::WriteZeroes { fua: false },
            stage,
            device,
            offset: base + from,
            len: to - from,
            buffer_offset: piece.buffer_offset,
            unseen,
        };
        let head = piece.from - piece.from % sub_block;
        if head < piece.from && way.filled >> (head / sub_block) & 1 == 1 {
            plan.push(zeroes(head, piece.from));
        }
        plan.push(PlanOp {
            kind: piece.payload.kind(false),
            stage,
            device,
            offset: base + piece.from,
            len: piece.to - piece.from,
            buffer_offset: piece.buffer_offset,
            unseen,
        });
        let tail = piece.to.next_multiple_of(sub_block);
        if tail > piece.to && way.filled >> (piece.to / sub_block) & 1 == 1 {
            plan.push(zeroes(piece.to, tail));
        }
    }
}

/// Runs of set bits.
const fn runs_of(bits: u64) -> usize {
    (bits & !(bits << 1)).count_ones() as usize
}

#[expect(clippy::cast_possible_truncation, reason = "a bit's position in a word")]
const fn low_u32(bits: u64) -> u32 {
    bits as u32
}

#[cfg(test)]
mod tests {
    use super::runs_of;

    #[test]
    fn runs_are_counted() {
        assert_eq!([0, 1, 0b1011, u64::MAX].map(runs_of), [0, 1, 2, 1]);
        assert_eq!(runs_of(0x5555_5555_5555_5555), 32);
    }
}
