//! Admissions that are taken back, in whole or in part.

use super::{Demand, FlowId, Hold, Scheduler, cost};

impl Scheduler {
    /// Gives back a part of what a request was admitted for, as the memory is free but not in one
    /// piece.
    pub fn shrink(&mut self, flow: FlowId, bytes: u64, memory: u64) {
        self.free_memory(flow, memory);
        self.change_in_flight(flow, bytes, false);
    }

    /// Takes an admission back, and holds the flow back for memory.
    pub fn revoke(&mut self, flow: FlowId, demand: &Demand, memory: u64) {
        self.free_memory(flow, memory);
        self.complete(flow, cost(demand.part(memory)));
        self.hold(flow.at, demand, Hold::Memory);
        // Not again in this turn: nothing gives memory back before it ends.
        self.granted = self.granted.filter(|&(at, _)| at != flow.at);
        if let Some(Some(tenant)) = self.tenants.get_mut(flow.tenant) {
            tenant.stuck_in = self.turn;
        }
    }
}
