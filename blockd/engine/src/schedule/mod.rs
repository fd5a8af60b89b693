//! Decides when a worker takes a request, so that no volume stops another one.
//!
//! A request is admitted before it takes memory. The scheduler knows volumes ([`TenantId`]) and
//! their connections or queues ([`FlowId`]), and divides what they share:
//!
//! - **The worker's turn**: deficit round robin by cost between volumes, then between the flows of
//!   one volume.
//! - **Payload memory and requests**: dynamic thresholds. A volume may hold as much as is free
//!   (times its weight), and a flow as much as its volume has left. One greedy volume ends with a
//!   half, two with a third each, and a volume that begins always finds memory. One read of each
//!   volume gets a small piece in any case while other answers of its connection wait for its end,
//!   and keep theirs.
//! - **The media queue**: each active volume of a pool has a share of the pool's [`Window`] by
//!   weight, on all workers together, and may use what others leave.
//!
//! Limits of a volume, and a pool that is full, hold back the flows that meet them. A flow that is
//! held back is not received from.
//!
//! The scheduler does no IO and reads no clock, so that a simulation can drive it.

mod awaited;
mod demand;
mod flow;
mod memory;
mod next;
mod refund;
mod sweep;
#[cfg(test)]
mod tests_of_holds;
#[cfg(test)]
mod tests_of_memory;
mod waits;
mod window;

use std::collections::VecDeque;
use std::sync::Arc;

use crate::stats::VolumeStats;

use flow::{Flow, Tenant};
use memory::Memory;
use window::Latency;

pub use demand::{Capacity, Defences, Demand, FlowId, Hold, Owner, TenantId, cost};
pub use memory::{LEAST_PIECE, PAGE};
pub use window::{VolumeShare, WINDOW_COST, Window};

/// The weight of a volume that has no other.
pub const DEFAULT_WEIGHT: u64 = 100;
/// Weights that a volume may have, as for cgroups' `io.weight`.
pub const WEIGHTS: std::ops::RangeInclusive<u64> = 1..=10_000;

/// The cost of a request beside its bytes. A disk and the worker do about as much for a request
/// without data as for 16 KiB of one.
pub const REQUEST_COST: u64 = 16 << 10;
/// Cost that a volume of the default weight may take in a turn of the worker, while several are
/// active: some 200 us of the worker.
const QUANTUM: u64 = 512 << 10;
/// Cost that a flow takes before the next flow of its volume is served.
const FLOW_QUANTUM: u64 = 64 << 10;
/// Requests of one connection that wait for space, and bytes of their payload, before it is
/// received from no longer.
const MAX_WAITING: u32 = 16;
const MAX_WAITING_BYTES: u64 = 64 << 10;
/// Cost that a volume with little in flight has at the most: some requests of 4 KiB.
const LITTLE_COST: u64 = 64 << 10;
/// A volume that has not asked for this long is not active.
const ACTIVE_NS: u64 = 1_000_000_000;

/// The pool of a tenant as one worker uses it.
#[derive(Debug)]
struct Media {
    window: Arc<Window>,
    tenants: usize,
    in_flight: u64,
    latency: Latency,
}

/// Decides which request a worker takes next.
#[derive(Debug)]
pub struct Scheduler {
    worker: usize,
    now: u64,
    turn: u64,
    memory: Memory,
    requests: Memory,
    /// Payload memory that was taken, but for [`Self::admit_alone`], which takes none while flows
    /// wait. Together with what is free it changes only when memory is released.
    taken: u64,
    medias: Vec<Media>,
    tenants: Vec<Option<Tenant>>,
    flows: Vec<Option<Flow>>,
    /// Tenants with flows that are held back for a turn, memory or the media, in order of service.
    ring: VecDeque<usize>,
    /// Tenants whose limits hold them back.
    limited: Vec<usize>,
    /// Tenants that have asked lately.
    active: usize,
    /// Several volumes of some pool are active, as of the last sweep or newcomer.
    observes_media: bool,
    /// Flows that are held back, those whose clients send no more, and those with an awaited piece.
    holds: usize,
    /// The flow that [`Self::next_runnable`] has let go on, and what it has taken since.
    granted: Option<(usize, u64)>,
    defences: Defences,
}

impl Scheduler {
    /// The scheduler of a worker.
    #[must_use]
    pub fn new(worker: usize, capacity: Capacity, defences: Defences) -> Self {
        Self {
            worker,
            now: 0,
            turn: 1,
            memory: Memory::new(capacity.memory),
            requests: Memory::new(capacity.requests),
            taken: 0,
            medias: Vec::new(),
            tenants: Vec::new(),
            flows: Vec::new(),
            ring: VecDeque::with_capacity(64),
            limited: Vec::with_capacity(64),
            active: 0,
            observes_media: false,
            holds: 0,
            granted: None,
            defences,
        }
    }

    /// Serves a volume of a pool with this window.
    pub fn add_tenant(
        &mut self,
        window: &Arc<Window>,
        share: Arc<VolumeShare>,
        weight: u64,
        stats: Arc<VolumeStats>,
    ) -> TenantId {
        let same = |media: &Media| Arc::ptr_eq(&media.window, window);
        let media = self.medias.iter().position(same).unwrap_or_else(|| {
            let unused = self.medias.iter().position(|media| media.tenants == 0);
            let window = Arc::clone(window);
            let media = Media { window, tenants: 0, in_flight: 0, latency: Latency::default() };
            match unused {
                Some(at) => {
                    self.medias[at] = media;
                    at
                }
                None => {
                    self.medias.push(media);
                    self.medias.len() - 1
                }
            }
        });
        self.medias[media].tenants += 1;
        TenantId(insert(&mut self.tenants, Tenant::new(media, share, weight, stats)))
    }

    /// Ends the service of a volume that has no flows and nothing in flight.
    pub fn remove_tenant(&mut self, tenant: TenantId) {
        self.deactivate(tenant.0);
        if let Some(removed) = self.tenants[tenant.0].take() {
            self.medias[removed.media].tenants -= 1;
        }
        self.ring.retain(|&other| other != tenant.0);
        self.limited.retain(|&other| other != tenant.0);
    }

    /// Serves a connection or queue of a volume.
    pub fn add_flow(&mut self, tenant: TenantId, owner: Owner) -> FlowId {
        let at = insert(&mut self.flows, Flow::new(tenant.0, owner));
        let is_connection = matches!(owner, Owner::Connection(_));
        FlowId { at, tenant: tenant.0, is_connection }
    }

    /// Ends the service of a flow that has nothing in flight.
    pub fn remove_flow(&mut self, flow: FlowId) {
        self.forget_hold(flow);
        self.end_awaited(flow);
        if self.flows[flow.at].take().is_some_and(|one| one.has_left) {
            self.holds -= 1;
        }
    }

    /// Cancels the request of a flow that is held back.
    pub fn forget_hold(&mut self, flow: FlowId) {
        let Some(one) = self.flows[flow.at].as_mut() else { return };
        if one.hold.is_none() {
            return;
        }
        self.holds -= 1;
        if let Some(tenant) = self.tenants[one.tenant].as_mut() {
            tenant.end_hold(one, self.now);
            tenant.queue.retain(|&other| other != flow.at);
        }
        one.hold = None;
    }

    /// A turn of the worker begins.
    pub fn begin_turn(&mut self, now: u64) {
        self.now = now;
        self.turn += 1;
        self.granted = None;
    }

    /// Whether the limits of a volume hold back its requests from now on. Not those of one that is
    /// going away.
    pub fn set_limited(&mut self, tenant: TenantId, limited: bool) {
        if let Some(one) = self.tenants[tenant.0].as_mut() {
            one.has_limits = limited;
            one.note_plain();
        }
        if !limited {
            self.open_limit(tenant.0);
        }
    }

    /// A volume has, or no longer has, writes that found no space.
    pub fn set_full(&mut self, tenant: TenantId, full: bool) {
        let Some(one) = self.tenants[tenant.0].as_mut() else { return };
        let was_full = std::mem::replace(&mut one.is_full, full);
        one.note_plain();
        if was_full && !full {
            self.resume_waiting(tenant.0);
        }
    }

    /// Nothing holds back the requests of a volume that is going away.
    pub fn release_tenant(&mut self, tenant: TenantId) {
        if let Some(one) = self.tenants[tenant.0].as_mut() {
            one.is_free = true;
            one.note_plain();
        }
        self.open_limit(tenant.0);
        self.resume_waiting(tenant.0);
    }

    /// Takes a request of a flow, and gives the bytes of payload memory that it may have: as many
    /// as it asked for, or fewer where it can do with a part.
    ///
    /// # Errors
    /// The reason why it is held back. [`Self::next_runnable`] names the flow when it may retry.
    #[inline]
    pub fn admit(&mut self, flow: FlowId, demand: &Demand) -> Result<u64, Hold> {
        match self.admit_alone(flow, demand) {
            Some(memory) => Ok(memory),
            None => self.admit_among_others(flow, demand),
        }
    }

    /// Takes a request where there is nothing to divide: its volume is the only active one, of this
    /// worker and of its pool, nothing holds it back, and there is plenty of memory. It makes the
    /// same decisions as [`Self::check`], with as few instructions as possible.
    #[inline]
    fn admit_alone(&mut self, id: FlowId, demand: &Demand) -> Option<u64> {
        let tenant = self.tenants.get_mut(id.tenant)?.as_mut()?;
        let media = self.medias.get_mut(tenant.media)?;
        let is_plain = tenant.is_plain && tenant.queue.is_empty();
        if !is_plain || self.active > 1 || tenant.knows_others(media) {
            return None;
        }
        let mut memory = 0;
        if id.is_connection {
            let flow = self.flows.get_mut(id.at)?.as_mut()?;
            memory = demand.memory;
            let is_scarce = self.memory.is_scarce(memory, tenant.memory, flow.memory);
            if is_scarce || flow.hold.is_some() || tenant.requests >= self.requests.free() {
                return None;
            }
            tenant.requests += 1;
            self.requests.take(1);
            flow.memory += memory;
            tenant.memory += memory;
            self.memory.take(memory);
        }
        tenant.asked_at = self.now;
        let cost = cost(demand.bytes);
        tenant.in_flight += cost;
        media.in_flight += cost;
        media.window.publish(self.worker, media.in_flight);
        Some(memory)
    }

    #[inline(never)]
    fn admit_among_others(&mut self, flow: FlowId, demand: &Demand) -> Result<u64, Hold> {
        match self.check(flow.at, demand) {
            Ok(memory) => {
                self.take(flow.at, demand, memory);
                Ok(memory)
            }
            Err(hold) => {
                self.hold(flow.at, demand, hold);
                Err(hold)
            }
        }
    }

    fn check(&mut self, at: usize, demand: &Demand) -> Result<u64, Hold> {
        let Some(flow) = self.flows[at].as_ref() else { return Err(Hold::Turn) };
        let tenant_at = flow.tenant;
        let Some(tenant) = self.tenants[tenant_at].as_mut() else { return Err(Hold::Turn) };
        tenant.asked_at = self.now;
        if !tenant.is_active {
            self.activate(tenant_at);
        }
        let Some(flow) = self.flows[at].as_ref() else { return Err(Hold::Turn) };
        let Some(tenant) = self.tenants[tenant_at].as_mut() else { return Err(Hold::Turn) };
        let granted = self.granted.filter(|&(one, _)| one == at);
        let contended = self.active > 1 && self.defences.turns;
        if tenant.turn != self.turn {
            tenant.begin_turn(self.turn, QUANTUM * tenant.weight / DEFAULT_WEIGHT);
        }
        if !tenant.is_free {
            // A flush is not counted, and need not wait behind requests that are.
            let passes = tenant.limited_until > 0 && !demand.counted;
            if let Some((hold, _)) = flow.hold.filter(|_| !passes) {
                return Err(hold);
            }
            if granted.is_none() && !tenant.queue.is_empty() && !passes {
                let is_limited = tenant.limited_until > 0;
                return Err(if is_limited { Hold::Limit } else { Hold::Turn });
            }
            let had_enough = granted.is_some_and(|(_, spent)| spent >= FLOW_QUANTUM);
            if contended && (tenant.deficit <= 0 || (had_enough && !tenant.queue.is_empty())) {
                return Err(Hold::Turn);
            }
            let is_within = tenant.is_within_share(&self.medias[tenant.media], cost(demand.bytes));
            if self.defences.media && !is_within && !self.may_borrow(tenant_at, demand) {
                return Err(Hold::Turn);
            }
            let Some(tenant) = self.tenants[tenant_at].as_ref() else { return Err(Hold::Turn) };
            if demand.allocates && self.defences.space && flow.waits_enough(tenant.is_full) {
                return Err(Hold::Space);
            }
        }
        let memory = self.check_memory(at, tenant_at, demand)?;
        self.check_limit(tenant_at, demand, demand.part(memory))?;
        Ok(memory)
    }

    fn check_memory(&self, at: usize, tenant: usize, demand: &Demand) -> Result<u64, Hold> {
        let (Some(flow), Some(tenant)) = (&self.flows[at], &self.tenants[tenant]) else {
            return Err(Hold::Memory);
        };
        if matches!(flow.owner, Owner::Queue(_)) {
            return Ok(0);
        }
        let divided = self.defences.memory;
        if !self.requests.allows_one(tenant.requests, tenant.weight, divided) {
            return Err(Hold::Memory);
        }
        if demand.memory == 0 {
            return Ok(0);
        }
        let held = (tenant.memory, flow.memory);
        let wanted = (demand.memory, demand.least_memory);
        let allowed = match self.memory.allowed(wanted, held, tenant.weight, divided) {
            0 if demand.is_awaited && flow.memory > 0 && tenant.awaited.is_none() => {
                self.memory.awaited(demand.memory)
            }
            allowed => allowed,
        };
        match allowed {
            0 => Err(Hold::Memory),
            memory => Ok(memory),
        }
    }

    fn check_limit(&mut self, tenant: usize, demand: &Demand, bytes: u64) -> Result<(), Hold> {
        let Some(tenant) = self.tenants[tenant].as_mut() else { return Ok(()) };
        if !tenant.has_limits || !demand.counted || tenant.is_free || !self.defences.limits {
            return Ok(());
        }
        tenant.share.limiter.take(self.now, bytes).map_err(|until| {
            tenant.limited_until = until.max(1);
            Hold::Limit
        })
    }

    fn take(&mut self, at: usize, demand: &Demand, memory: u64) {
        let Some(flow) = self.flows[at].as_mut() else { return };
        let Some(tenant) = self.tenants[flow.tenant].as_mut() else { return };
        let cost = cost(demand.part(memory));
        tenant.deficit -= i64::try_from(cost).unwrap_or(i64::MAX);
        tenant.in_flight += cost;
        let media = &mut self.medias[tenant.media];
        media.in_flight += cost;
        media.window.publish(self.worker, media.in_flight);
        if let Some((granted, spent)) = &mut self.granted
            && *granted == at
        {
            *spent += cost;
        }
        if matches!(flow.owner, Owner::Connection(_)) {
            tenant.requests += 1;
            self.requests.take(1);
            flow.memory += memory;
            tenant.memory += memory;
            self.memory.take(memory);
            self.taken = self.taken.wrapping_add(memory);
        }
    }

    fn hold(&mut self, at: usize, demand: &Demand, hold: Hold) {
        let Some(flow) = self.flows[at].as_mut() else { return };
        if flow.hold.is_some() {
            // The others of the flow go on after this one only.
            if demand.is_awaited {
                flow.demand = *demand;
            }
            return;
        }
        flow.hold = Some((hold, self.now));
        flow.hold_counted = self.now;
        self.holds += 1;
        flow.demand = *demand;
        let tenant_at = flow.tenant;
        let Some(tenant) = self.tenants[tenant_at].as_mut() else { return };
        tenant.begin_hold(hold);
        match hold {
            Hold::Space => {}
            Hold::Limit => {
                tenant.queue.push_back(at);
                if !self.limited.contains(&tenant_at) {
                    self.limited.push(tenant_at);
                }
            }
            Hold::Turn | Hold::Memory => {
                tenant.queue.push_back(at);
                self.enter_ring(tenant_at);
            }
        }
    }

    fn enter_ring(&mut self, tenant: usize) {
        if let Some(one) = self.tenants[tenant].as_mut()
            && !std::mem::replace(&mut one.is_in_ring, true)
        {
            self.ring.push_back(tenant);
        }
    }

    /// Whether a tenant may use more of the media queue than its share: others leave it, and none
    /// of them waits.
    fn may_borrow(&self, tenant: usize, demand: &Demand) -> bool {
        let Some(media) = self.tenants[tenant].as_ref().map(|one| one.media) else { return false };
        let waits = |one: &Tenant| one.media == media && !one.queue.is_empty();
        let others = self.ring.iter().filter(|&&at| at != tenant);
        self.medias[media].window.has_room(cost(demand.bytes))
            && !others.into_iter().any(|&at| self.tenants[at].as_ref().is_some_and(waits))
    }

    /// An admitted request has ended.
    #[inline]
    pub fn complete(&mut self, flow: FlowId, cost: u64) {
        let Some(Some(tenant)) = self.tenants.get_mut(flow.tenant) else { return };
        if flow.is_connection {
            tenant.requests = tenant.requests.saturating_sub(1);
            self.requests.give_back(1);
        }
        tenant.in_flight = tenant.in_flight.saturating_sub(cost);
        let media = &mut self.medias[tenant.media];
        media.in_flight = media.in_flight.saturating_sub(cost);
        media.window.publish(self.worker, media.in_flight);
    }

    /// Work that a request turns out to need beyond what it was admitted for. Given back with
    /// [`Self::end_extra`].
    pub fn begin_extra(&mut self, flow: FlowId, cost: u64) {
        self.change_in_flight(flow, cost, true);
        let tenant = self.flows[flow.at].as_ref().map(|one| one.tenant);
        if let Some(tenant) = tenant.and_then(|at| self.tenants[at].as_mut()) {
            tenant.deficit -= i64::try_from(cost).unwrap_or(i64::MAX);
        }
    }

    /// Ends such work.
    pub fn end_extra(&mut self, flow: FlowId, cost: u64) {
        self.change_in_flight(flow, cost, false);
    }

    fn change_in_flight(&mut self, flow: FlowId, cost: u64, begins: bool) {
        let tenant = self.flows[flow.at].as_ref().map(|one| one.tenant);
        let Some(tenant) = tenant.and_then(|at| self.tenants[at].as_mut()) else { return };
        let media = &mut self.medias[tenant.media];
        for value in [&mut tenant.in_flight, &mut media.in_flight] {
            *value = if begins { *value + cost } else { value.saturating_sub(cost) };
        }
        media.window.publish(self.worker, media.in_flight);
    }

    /// Copies that a volume may have under way at a time, each of this cost, besides one.
    #[must_use]
    pub fn copies(&self, tenant: TenantId, cost: u64) -> u64 {
        let Some(tenant) = self.tenants[tenant.0].as_ref() else { return 0 };
        let window = &self.medias[tenant.media].window;
        window.share(&tenant.share, tenant.weight).map_or(u64::MAX, |share| share / cost)
    }

    /// Payload memory of a flow is free again.
    pub fn free_memory(&mut self, flow: FlowId, bytes: u64) {
        let Some(one) = self.flows[flow.at].as_mut() else { return };
        one.memory = one.memory.saturating_sub(bytes);
        if let Some(tenant) = self.tenants[one.tenant].as_mut() {
            tenant.memory = tenant.memory.saturating_sub(bytes);
        }
        self.memory.give_back(bytes);
    }
}

fn insert<T>(all: &mut Vec<Option<T>>, one: T) -> usize {
    match all.iter().position(Option::is_none) {
        Some(at) => {
            all[at] = Some(one);
            at
        }
        None => {
            all.push(Some(one));
            all.len() - 1
        }
    }
}
