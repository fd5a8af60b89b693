//! The choice of the next flow among those that are held back.

use super::flow::Tenant;
use super::{DEFAULT_WEIGHT, Owner, QUANTUM, Scheduler, cost};

impl Scheduler {
    /// The owner of the next flow that may retry, in order of service.
    pub fn next_runnable(&mut self) -> Option<Owner> {
        self.end_grant();
        self.open_limits();
        for _ in 0..self.ring.len() {
            let tenant_at = self.ring.pop_front()?;
            let waits = |one: &Tenant| !one.queue.is_empty() && one.limited_until == 0;
            if !self.tenants[tenant_at].as_ref().is_some_and(waits) {
                if let Some(one) = self.tenants[tenant_at].as_mut() {
                    one.is_in_ring = false;
                }
                continue;
            }
            self.ring.push_back(tenant_at);
            if !self.is_runnable(tenant_at, false) {
                continue;
            }
            let Some(tenant) = self.tenants[tenant_at].as_mut() else { continue };
            let Some(at) = tenant.queue.pop_front() else { continue };
            let Some(flow) = self.flows[at].as_mut() else { continue };
            if tenant.end_hold(flow, self.now) {
                self.holds -= 1;
            }
            self.granted = Some((at, 0));
            return Some(flow.owner);
        }
        None
    }

    /// The flow that was named last has gone on.
    pub fn end_grant(&mut self) {
        let Some((at, 0)) = self.granted.take() else { return };
        // It took nothing, though it should have been able to: not again in this turn.
        let Some(flow) = self.flows[at].as_ref().filter(|flow| flow.hold.is_some()) else { return };
        if let Some(tenant) = self.tenants[flow.tenant].as_mut() {
            tenant.stuck_in = self.turn;
        }
    }

    /// Whether [`Self::next_runnable`] will name a flow in the next turn.
    #[must_use]
    pub fn has_runnable(&mut self) -> bool {
        self.open_limits();
        (0..self.ring.len()).any(|at| {
            let tenant = self.ring[at];
            let waits = |one: &Tenant| !one.queue.is_empty() && one.limited_until == 0;
            self.tenants[tenant].as_ref().is_some_and(waits) && self.is_runnable(tenant, true)
        })
    }

    /// Whether the first flow of a tenant may retry, in this turn or with the resources of the next
    /// one.
    fn is_runnable(&mut self, tenant_at: usize, in_next_turn: bool) -> bool {
        let contended = self.active > 1 && self.defences.turns && !in_next_turn;
        if in_next_turn && !self.bring_untried_to_front(tenant_at) {
            return false;
        }
        let Some(tenant) = self.tenants[tenant_at].as_mut() else { return false };
        if tenant.turn != self.turn {
            tenant.begin_turn(self.turn, QUANTUM * tenant.weight / DEFAULT_WEIGHT);
        }
        let Some(&at) = tenant.queue.front() else { return false };
        let Some(flow) = self.flows[at].as_ref() else { return true };
        let demand = flow.demand;
        if tenant.stuck_in == self.turn && !in_next_turn {
            return false;
        }
        if !tenant.is_free {
            if contended && tenant.deficit <= 0 {
                return false;
            }
            let is_within = tenant.is_within_share(&self.medias[tenant.media], cost(demand.bytes));
            if self.defences.media && !is_within && !self.may_borrow(tenant_at, &demand) {
                return false;
            }
        }
        if self.check_memory(at, tenant_at, &demand).is_ok() {
            return true;
        }
        // Another flow of the volume may hold less.
        if let Some(tenant) = self.tenants[tenant_at].as_mut() {
            tenant.queue.rotate_left(1);
        }
        false
    }

    /// Whether the limits of some volume hold back a flow.
    #[must_use]
    pub fn has_limited(&self) -> bool {
        !self.limited.is_empty()
    }

    /// When a limit lets a flow go on at the earliest.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        let until = |&at: &usize| self.tenants[at].as_ref().map(|one| one.share.limiter.open_at());
        self.limited.iter().filter_map(until).min()
    }

    fn open_limits(&mut self) {
        let mut next = 0;
        while let Some(&at) = self.limited.get(next) {
            // Asked of the limiter, as the limits may have been changed meanwhile.
            let until = self.tenants[at].as_ref().map_or(0, |one| one.share.limiter.open_at());
            if until > self.now {
                next += 1;
            } else {
                self.open_limit(at);
            }
        }
    }

    pub(super) fn open_limit(&mut self, tenant: usize) {
        self.limited.retain(|&other| other != tenant);
        if let Some(one) = self.tenants[tenant].as_mut() {
            one.limited_until = 0;
            if !one.queue.is_empty() {
                self.enter_ring(tenant);
            }
        }
    }
}
