//! Work of about once a second, and figures for others.

use super::flow::Tenant;
use super::{ACTIVE_NS, DEFAULT_WEIGHT, FlowId, LITTLE_COST, QUANTUM, Scheduler, TenantId};

impl Scheduler {
    /// Takes memory out of what is divided, for good.
    pub fn reserve_memory(&mut self, bytes: u64) {
        self.memory.reserve(bytes);
    }

    /// Records a request's time on the media. The time of a volume with little in flight decides
    /// how long the queue of the others may be.
    #[inline(never)]
    pub fn observe_media(&mut self, flow: FlowId, is_write: bool, ns: u64) {
        let Some(flow) = self.flows[flow.at].as_ref() else { return };
        let Some(tenant) = self.tenants[flow.tenant].as_ref() else { return };
        let media = &mut self.medias[tenant.media];
        // One that is held back would have more in flight if it could.
        let has_little = tenant.in_flight <= LITTLE_COST && tenant.queue.is_empty();
        if self.defences.latency && has_little && media.window.is_shared() {
            media.latency.observe(&media.window, self.now, is_write, ns);
        }
    }

    /// Whether [`Self::observe_media`] is worth calling: several volumes of some pool are active.
    #[must_use]
    pub const fn observes_media(&self) -> bool {
        self.observes_media
    }

    fn note_shared(&mut self) {
        self.observes_media = self.medias.iter().any(|media| media.window.is_shared());
    }

    pub(super) fn activate(&mut self, at: usize) {
        let Some(tenant) = self.tenants[at].as_mut() else { return };
        tenant.is_active = true;
        tenant.deficit = i64::try_from(QUANTUM * tenant.weight / DEFAULT_WEIGHT).unwrap_or(0);
        tenant.turn = self.turn;
        tenant.note_plain();
        self.active += 1;
        self.medias[tenant.media].window.join(&tenant.share, tenant.weight);
        self.note_shared();
    }

    pub(super) fn deactivate(&mut self, at: usize) {
        let Some(tenant) = self.tenants[at].as_mut() else { return };
        if std::mem::replace(&mut tenant.is_active, false) {
            tenant.note_plain();
            self.active -= 1;
            self.medias[tenant.media].window.leave(&tenant.share, tenant.weight);
        }
    }

    /// Finds volumes that have not asked for a while: others get their shares. To be called about
    /// once a second.
    pub fn sweep(&mut self) {
        for media in self.medias.iter_mut().filter(|media| media.tenants > 0) {
            media.latency.sweep(&media.window);
        }
        for at in 0..self.tenants.len() {
            let is_idle = |one: &Tenant| {
                let quiet = one.in_flight == 0 && one.queue.is_empty();
                quiet && self.now.saturating_sub(one.asked_at) > ACTIVE_NS
            };
            if self.tenants[at].as_ref().is_some_and(is_idle) {
                self.deactivate(at);
            }
        }
        self.note_shared();
    }

    /// Counts the holds that last, so that they are seen before they end. To be called several
    /// times a second while there are any.
    pub fn count_holds(&mut self) {
        for flow in self.flows.iter_mut().flatten().filter(|flow| flow.hold.is_some()) {
            if let Some(tenant) = &self.tenants[flow.tenant] {
                tenant.count_hold(flow, self.now);
            }
        }
    }

    /// Whether some flow is held back, whatever for, its client sends no more, or it has an awaited
    /// piece.
    #[must_use]
    pub const fn has_holds(&self) -> bool {
        self.holds > 0
    }

    /// Volumes that have asked lately.
    #[must_use]
    pub const fn active(&self) -> usize {
        self.active
    }

    /// Bytes of payload memory that a volume holds.
    #[must_use]
    pub fn memory_of(&self, tenant: TenantId) -> u64 {
        self.tenants[tenant.0].as_ref().map_or(0, |one| one.memory)
    }

    /// Bytes of payload memory that are free.
    #[must_use]
    pub const fn free(&self) -> u64 {
        self.memory.free()
    }
}
