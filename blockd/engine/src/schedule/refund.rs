//! Admissions that are taken back, in whole or in part.

use super::{DEFAULT_WEIGHT, Demand, FlowId, Hold, QUANTUM, Scheduler, cost};

impl Scheduler {
    /// Gives back a part of what a read or write was admitted for, as the memory is free but not
    /// in one piece.
    pub fn shrink(&mut self, flow: FlowId, bytes: u64, memory: u64) {
        self.free_memory(flow, memory);
        self.change_in_flight(flow, bytes, false);
        self.refund(flow, bytes, (0, bytes));
    }

    /// Takes an admission back, and holds the flow back for memory.
    pub fn revoke(&mut self, flow: FlowId, demand: &Demand, memory: u64) {
        self.free_memory(flow, memory);
        let bytes = demand.part(memory);
        self.complete(flow, cost(bytes));
        let counted = if demand.counted { (1, bytes) } else { (0, 0) };
        self.refund(flow, cost(bytes), counted);
        self.hold(flow.at, demand, Hold::Memory);
        // Not again in this turn: nothing gives memory back before it ends.
        self.granted = self.granted.filter(|&(at, _)| at != flow.at);
        if let Some(Some(tenant)) = self.tenants.get_mut(flow.tenant) {
            tenant.stuck_in = self.turn;
        }
    }

    /// Gives a tenant back what it was charged: cost of its turn, and what counts for its limits,
    /// requests and bytes.
    fn refund(&mut self, flow: FlowId, cost: u64, (requests, bytes): (u64, u64)) {
        let has_limits = self.defences.limits;
        let Some(Some(tenant)) = self.tenants.get_mut(flow.tenant) else { return };
        let most = i64::try_from(QUANTUM * tenant.weight / DEFAULT_WEIGHT).unwrap_or(i64::MAX);
        let cost = i64::try_from(cost).unwrap_or(i64::MAX);
        // A lone tenant was charged nothing, and does not begin the next turn with more than that.
        tenant.deficit = tenant.deficit.saturating_add(cost).min(most);
        if has_limits && tenant.has_limits && !tenant.is_free {
            tenant.share.limiter.give_back(requests, bytes);
        }
    }
}
