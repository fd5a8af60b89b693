//! Memory that volumes share, divided by dynamic thresholds.
//!
//! After Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches"
//! (IEEE/ACM Transactions on Networking, 1998): the limit of each user is what is free, times its
//! weight. Some memory always stays free, without a share being kept for idle users.

use super::DEFAULT_WEIGHT;

/// Bytes of a page, the least that is given out.
pub const PAGE: u64 = 4096;
/// The piece that a flow without any memory may have as long as its volume is below its limit,
/// and a volume without any whatever others hold.
pub const LEAST_PIECE: u64 = 64 << 10;

/// A flow may hold this many times what its volume has left: one greedy connection leaves a ninth
/// of its volume's share for the others, and the share does not depend on how many they are.
const FLOW_TIMES: u64 = 8;

/// How much there is, and how much of it is free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Memory {
    free: u64,
}

impl Memory {
    pub(super) const fn new(total: u64) -> Self {
        Self { free: total }
    }

    #[inline]
    pub(super) const fn free(&self) -> u64 {
        self.free
    }

    pub(super) fn reserve(&mut self, bytes: u64) {
        self.take(bytes);
    }

    pub(super) fn take(&mut self, bytes: u64) {
        self.free = self.free.saturating_sub(bytes);
    }

    pub(super) fn give_back(&mut self, bytes: u64) {
        self.free += bytes;
    }

    /// Whether it takes more than a look to say that a flow of a volume of the default weight may
    /// have so much, as [`Self::allowed`] would.
    #[inline]
    pub(super) const fn is_scarce(&self, wanted: u64, of_tenant: u64, of_flow: u64) -> bool {
        wanted * (1 + 2 * FLOW_TIMES) + of_tenant * FLOW_TIMES + of_flow > self.free * FLOW_TIMES
    }

    /// Whether a volume that holds `tenant` requests may have one more.
    pub(super) const fn allows_one(&self, tenant: u64, weight: u64, divided: bool) -> bool {
        let below = tenant * DEFAULT_WEIGHT < self.free * weight;
        self.free > 0 && (below || tenant == 0 || !divided)
    }

    /// The part of the requested memory that a flow may have; 0 for none yet. `wanted`: the whole
    /// request, and the least useful part. `held`: by its volume, and by itself.
    pub(super) fn allowed(
        &self,
        wanted: (u64, u64),
        held: (u64, u64),
        weight: u64,
        divided: bool,
    ) -> u64 {
        let ((wanted, least), (of_tenant, of_flow)) = (wanted, held);
        if !divided {
            return if self.free >= wanted { wanted } else { 0 };
        }
        // The volume's limit is `free * weight`, after this request; the flow's is a multiple of
        // what the volume then has left. Solved for the request, with weights of 100 for 1.
        let limit = self.free * weight / DEFAULT_WEIGHT;
        let left = limit.saturating_sub(of_tenant) * FLOW_TIMES;
        let left = left.saturating_sub(of_flow) * DEFAULT_WEIGHT;
        let share_of = DEFAULT_WEIGHT + FLOW_TIMES * (DEFAULT_WEIGHT + weight);
        if wanted * share_of <= left {
            return wanted;
        }
        let mut allowed = pages(left / share_of);
        let piece = wanted.min(LEAST_PIECE.max(least)).min(pages(self.free));
        if of_tenant == 0 || (of_flow == 0 && of_tenant + piece <= limit) {
            allowed = allowed.max(piece);
        }
        if allowed >= least { allowed.min(wanted) } else { 0 }
    }

    /// The piece for a flow that gives nothing back without one, regardless of what it holds: an
    /// eighth of the free memory at the most, so that any number of volumes with such a flow leave
    /// some of it.
    pub(super) fn awaited(&self, wanted: u64) -> u64 {
        wanted.min(LEAST_PIECE).min(pages(self.free / FLOW_TIMES))
    }
}

/// The largest piece of the allocator, a power of two of pages, that fits in `bytes`.
fn pages(bytes: u64) -> u64 {
    if bytes < PAGE { 0 } else { 1 << bytes.ilog2() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The share of 16 MiB with which each greedy tenant of these weights ends.
    fn greedy(weights: &[u64]) -> Vec<u64> {
        let mut memory = Memory::new(16 << 20);
        let mut held = vec![0; weights.len()];
        for _ in 0..20_000 {
            for (at, held) in held.iter_mut().enumerate() {
                // One request ends, and as many begin as may, of flows that hold nothing else.
                let ended = PAGE.min(*held);
                memory.give_back(ended);
                *held -= ended;
                for _ in 0..2 {
                    let got = memory.allowed((PAGE, PAGE), (*held, 0), weights[at], true);
                    memory.take(got);
                    *held += got;
                }
            }
        }
        held
    }

    #[test]
    fn greedy_tenants_leave_a_share_free() {
        for count in 1..20 {
            let held = greedy(&vec![DEFAULT_WEIGHT; count]);
            let fair = (16 << 20) / (count as u64 + 1);
            for one in held {
                assert!(one.abs_diff(fair) <= fair / 20 + 2 * PAGE, "{one} of {fair}, {count}");
            }
        }
    }

    #[test]
    fn volumes_whose_answers_wait_leave_memory_for_others() {
        let mut memory = Memory::new(16 << 20);
        for _ in 0..10_000 {
            memory.take(memory.awaited(1 << 20));
        }
        assert_eq!(memory.awaited(PAGE), 0);
        assert_eq!(memory.allowed((1 << 20, PAGE), (0, 0), 100, true), 4 * PAGE);
    }

    #[test]
    fn weights_scale_what_is_held() {
        let held = greedy(&[100, 300]);
        assert!((held[0] * 3).abs_diff(held[1]) <= held[1] / 20, "{held:?}");
    }

    #[test]
    fn a_tenant_without_memory_gets_a_piece_of_whatever_is_free() {
        let mut memory = Memory::new(16 << 20);
        memory.take((16 << 20) - 10 * PAGE);
        let wanted = (1 << 20, PAGE);
        assert_eq!(memory.allowed(wanted, (0, 0), 100, true), 8 * PAGE);
        assert_eq!(memory.allowed(wanted, (1 << 20, 0), 100, true), 0);
        assert_eq!(memory.allowed((1 << 20, 1 << 20), (0, 0), 100, true), 0);
        memory.take(10 * PAGE);
        assert_eq!(memory.allowed(wanted, (0, 0), 100, true), 0);
    }
}
