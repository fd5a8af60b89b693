//! Requests that wait for the pool, and the flows that are held back because of them.

use super::{FlowId, Hold, Scheduler};

impl Scheduler {
    /// A request begins to wait for the pool: it uses the media no longer.
    pub fn begin_wait(&mut self, flow: FlowId, cost: u64, bytes: u64) {
        self.change_in_flight(flow, cost, false);
        if let Some(one) = self.flows[flow.at].as_mut() {
            one.waiting += 1;
            one.waiting_bytes += bytes;
        }
    }

    /// Ends the flow's wait.
    pub fn end_wait(&mut self, flow: FlowId, cost: u64, bytes: u64) {
        self.change_in_flight(flow, cost, true);
        if let Some(one) = self.flows[flow.at].as_mut() {
            one.waiting = one.waiting.saturating_sub(1);
            one.waiting_bytes = one.waiting_bytes.saturating_sub(bytes);
        }
        self.resume_flow(flow.at);
    }

    /// The client of a flow sends no more. The flow counts among the holds, as its socket has to be
    /// polled to see whether the client has closed it.
    pub fn set_left(&mut self, flow: FlowId) {
        if let Some(one) = self.flows[flow.at].as_mut()
            && !std::mem::replace(&mut one.has_left, true)
        {
            self.holds += 1;
        }
    }

    /// Whether the client of a flow sends no more.
    #[must_use]
    pub fn has_left(&self, flow: FlowId) -> bool {
        self.flows[flow.at].as_ref().is_some_and(|one| one.has_left)
    }

    /// Flows that were held back because their writes wait for space may retry.
    pub(super) fn resume_waiting(&mut self, tenant: usize) {
        for at in 0..self.flows.len() {
            if self.flows[at].as_ref().is_some_and(|flow| flow.tenant == tenant) {
                self.resume_flow(at);
            }
        }
    }

    fn resume_flow(&mut self, at: usize) {
        let Some(flow) = self.flows[at].as_ref() else { return };
        if !matches!(flow.hold, Some((Hold::Space, _))) {
            return;
        }
        let tenant_at = flow.tenant;
        let Some(tenant) = self.tenants[tenant_at].as_mut() else { return };
        if !tenant.is_free && flow.waits_enough(tenant.is_full) {
            return;
        }
        if tenant.queue.contains(&at) {
            return;
        }
        tenant.queue.push_back(at);
        if tenant.limited_until == 0 {
            self.enter_ring(tenant_at);
        }
    }
}
