//! Pieces of memory past the limit of a volume, for flows that give nothing back without one.
//!
//! Simple replies carry the data of a read without a break. Once a part of a long read is answered,
//! other answers of its connection wait for its end, and keep their memory, which may be all that
//! the volume may hold. So the next part is admitted whatever the volume holds. A volume has one
//! such part at a time: any number of clients that read no replies hold one piece beyond its limit.

use super::{Demand, FlowId, Hold, Scheduler};

impl Scheduler {
    /// Takes a request for which other answers of its flow wait. [`Self::end_awaited`] has to
    /// follow once its memory is free again.
    ///
    /// # Errors
    /// As [`Self::admit`].
    #[cold]
    pub fn admit_awaited(&mut self, flow: FlowId, demand: &Demand) -> Result<u64, Hold> {
        let plain = Demand { is_awaited: false, ..*demand };
        let is_within = self.check_memory(flow.at, flow.tenant, &plain).is_ok();
        let admitted = self.admit(flow, demand);
        if admitted.is_err() {
            self.bring_awaited_to_front(flow.tenant);
        } else if !is_within && let Some(Some(tenant)) = self.tenants.get_mut(flow.tenant) {
            tenant.awaited = Some(flow.at);
            // So that the owner is asked in each turn whether the memory is free again.
            self.holds += 1;
        }
        admitted
    }

    /// The memory of a flow's awaited request is free again, so that the next flow of its volume
    /// may have some. Has no effect on a flow without such a request.
    #[cold]
    pub fn end_awaited(&mut self, flow: FlowId) {
        let Some(Some(tenant)) = self.tenants.get_mut(flow.tenant) else { return };
        if tenant.awaited == Some(flow.at) {
            tenant.awaited = None;
            self.holds -= 1;
            self.bring_awaited_to_front(flow.tenant);
        }
    }

    /// Brings the flow to the front of a tenant's queue whose awaited request has waited longest,
    /// as the others of the queue may have to wait until it has gone on.
    fn bring_awaited_to_front(&mut self, tenant: usize) {
        let flows = &self.flows;
        let Some(Some(tenant)) = self.tenants.get_mut(tenant) else { return };
        if tenant.awaited.is_some() {
            return;
        }
        let waits_since = |at: usize| {
            let flow =
                flows[at].as_ref().filter(|flow| flow.memory > 0 && flow.demand.is_awaited)?;
            flow.hold.map(|(_, since)| since)
        };
        let waiting = tenant.queue.iter().enumerate();
        let waiting = waiting.filter_map(|(place, &at)| Some((waits_since(at)?, place)));
        if let Some((_, place)) = waiting.min() {
            tenant.queue.rotate_left(place);
        }
    }
}
