//! Admissions that are taken back, in whole or in part, and flows that wait since then for memory
//! that is free in pieces only.

use super::{DEFAULT_WEIGHT, Demand, FlowId, Hold, QUANTUM, Scheduler, cost};

impl Scheduler {
    /// Gives back a part of what a read or write was admitted for, as the memory is free but not
    /// in one piece.
    pub fn shrink(&mut self, flow: FlowId, bytes: u64, memory: u64) {
        self.return_memory(flow, memory);
        self.change_in_flight(flow, bytes, false);
        self.refund(flow, bytes, (0, bytes));
    }

    /// Takes an admission back, and holds the flow back for memory.
    pub fn revoke(&mut self, flow: FlowId, demand: &Demand, memory: u64) {
        self.return_memory(flow, memory);
        self.end_awaited(flow);
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
        let released = self.released();
        if let Some(Some(one)) = self.flows.get_mut(flow.at) {
            one.in_pieces = Some(released);
        }
    }

    /// Gives back memory that was not used, which is not a release that others wait for.
    fn return_memory(&mut self, flow: FlowId, memory: u64) {
        self.free_memory(flow, memory);
        self.taken = self.taken.wrapping_sub(memory);
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

    /// Changes with each release of payload memory while flows wait, and with nothing else.
    fn released(&self) -> u64 {
        self.memory.free().wrapping_add(self.taken)
    }

    /// Brings the first flow of a tenant's queue to its front that may find the resources that it
    /// needs. A flow that has found memory in pieces finds it so again until some is released, and
    /// the worker that tried it in each turn would never sleep. Returns `false` if there are only
    /// such flows.
    ///
    /// Memory that is released unseen, as its last operation ends after its owner, is found as
    /// well: each turn tries a flow whatever this returns, and that end begins a turn.
    pub(super) fn bring_untried_to_front(&mut self, tenant: usize) -> bool {
        let released = self.released();
        let flows = &self.flows;
        let is_untried = |at: &usize| {
            let flow = flows[*at].as_ref();
            flow.is_none_or(|flow| flow.in_pieces != Some(released))
        };
        let Some(tenant) = self.tenants[tenant].as_mut() else { return false };
        let found = tenant.queue.iter().position(is_untried);
        tenant.queue.rotate_left(found.unwrap_or(0));
        found.is_some()
    }
}
