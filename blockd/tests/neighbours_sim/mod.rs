//! A deterministic simulation of workers that serve clients by the scheduler: no IO, no clock.
//!
//! A worker takes requests turn by turn, and a turn lasts as long as the work that it takes. A
//! device serves what is submitted in order, at a fixed speed. Clients keep a number of requests
//! outstanding, each in its own way.

use std::collections::VecDeque;
use std::sync::Arc;

use blockd_engine::schedule::{
    Capacity, Defences, Demand, FlowId, Owner, Scheduler, TenantId, VolumeShare, Window, cost,
};
use blockd_engine::stats::VolumeStats;

/// The least time of a turn; each byte of cost adds to it.
const TURN_NS: u64 = 2_000;
const WORK_NS_PER_KIB: u64 = 100;
/// The time of a device for each KiB of cost: 1 GiB/s.
const MEDIA_NS_PER_KIB: u64 = 1_000;
/// Memory and requests of a worker.
pub(crate) const MEMORY: u64 = 16 << 20;
const REQUESTS: u64 = 8192;

/// How a client behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Reads, and takes the replies.
    Read,
    /// Reads, and takes a reply only after this number of microseconds.
    SlowRead(u64),
    /// Reads, and never takes a reply.
    UnreadReplies,
    /// Writes.
    Write,
    /// Writes into a pool that is full.
    FullPool,
    /// Sends headers of writes, and no payload.
    HalfWrite,
    /// Requests the block status of long ranges.
    BlockStatus,
    /// Flushes, which no limit holds back.
    Flush,
}

/// A client's connection or queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientSpec {
    pub(crate) kind: Kind,
    pub(crate) depth: usize,
    pub(crate) bytes: u64,
    /// A queue of a block device, whose requests have their own memory.
    pub(crate) is_queue: bool,
}

/// The service that a client has got.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) done: u64,
    pub(crate) bytes: u64,
    /// The longest time, and the most turns of its worker, from a request to its answer and to its
    /// admission.
    pub(crate) worst_ns: u64,
    pub(crate) worst_turns: u64,
}

struct Client {
    worker: usize,
    tenant: usize,
    flow: FlowId,
    spec: ClientSpec,
    /// Requests that are not admitted: since when, and since which turn.
    wanted: VecDeque<(u64, u64)>,
    held: bool,
    gone: bool,
    seen: Seen,
}

struct TenantAt {
    worker: usize,
    id: TenantId,
    device: usize,
}

struct Op {
    client: usize,
    started: u64,
    cost: u64,
    bytes: u64,
    memory: u64,
    /// When it was submitted, and when the device has done it.
    begun: u64,
    ends: u64,
}

struct Device {
    window: Arc<Window>,
    /// `None`: answers at once, as memory does.
    busy_until: Option<u64>,
    queue: VecDeque<Op>,
}

/// Workers, devices and clients.
pub(crate) struct World {
    pub(crate) now: u64,
    turn: u64,
    schedulers: Vec<Scheduler>,
    devices: Vec<Device>,
    tenants: Vec<TenantAt>,
    clients: Vec<Client>,
    /// Replies that are read later: when, whose, and what they hold.
    unread: VecDeque<(u64, usize, u64)>,
    /// Requests that have ended, by worker.
    ended: Vec<Vec<Op>>,
    swept: u64,
    random: fastrand::Rng,
}

impl World {
    pub(crate) fn new(workers: usize, defences: Defences) -> Self {
        let capacity = Capacity { memory: MEMORY, requests: REQUESTS };
        let scheduler = |worker| Scheduler::new(worker, capacity, defences);
        Self {
            now: 1,
            turn: 0,
            schedulers: (0..workers).map(scheduler).collect(),
            devices: Vec::new(),
            tenants: Vec::new(),
            clients: Vec::new(),
            unread: VecDeque::new(),
            ended: (0..workers).map(|_| Vec::new()).collect(),
            swept: 0,
            random: fastrand::Rng::with_seed(7),
        }
    }

    /// A pool on a disk, or in memory.
    pub(crate) fn add_pool(&mut self, on_disk: bool) -> usize {
        let busy_until = on_disk.then_some(0);
        self.devices.push(Device { window: Arc::default(), busy_until, queue: VecDeque::new() });
        self.devices.len() - 1
    }

    /// A volume of a pool, on one worker.
    pub(crate) fn add_volume(&mut self, worker: usize, device: usize, weight: u64) -> usize {
        self.share_volume(worker, device, weight, &Arc::default())
    }

    /// A volume that several workers serve.
    pub(crate) fn share_volume(
        &mut self,
        worker: usize,
        device: usize,
        weight: u64,
        share: &Arc<VolumeShare>,
    ) -> usize {
        let (window, share) = (&self.devices[device].window, Arc::clone(share));
        let stats = Arc::new(VolumeStats::default());
        let id = self.schedulers[worker].add_tenant(window, share, weight, stats);
        self.tenants.push(TenantAt { worker, id, device });
        self.tenants.len() - 1
    }

    /// Limits the bandwidth of a volume, in bytes per second.
    pub(crate) fn limit(&mut self, tenant: usize, share: &VolumeShare, bandwidth: u64) {
        share.limiter.set(0, bandwidth);
        let TenantAt { worker, id, .. } = self.tenants[tenant];
        self.schedulers[worker].set_limited(id, true);
    }

    pub(crate) fn add_client(&mut self, tenant: usize, spec: ClientSpec) -> usize {
        let TenantAt { worker, id, .. } = self.tenants[tenant];
        let at = self.clients.len();
        let owner = if spec.is_queue { Owner::Queue(at) } else { Owner::Connection(at) };
        let flow = self.schedulers[worker].add_flow(id, owner);
        let wanted = (0..spec.depth).map(|_| (self.now, self.turn)).collect();
        let seen = Seen::default();
        let client = Client { worker, tenant, flow, spec, wanted, held: false, gone: false, seen };
        self.clients.push(client);
        at
    }

    pub(crate) fn seen(&self, client: usize) -> Seen {
        let client = &self.clients[client];
        let mut seen = client.seen;
        // A request that still waits counts too.
        if let Some(&(since, turn)) = client.wanted.front() {
            seen.worst_ns = seen.worst_ns.max(self.now - since);
            seen.worst_turns = seen.worst_turns.max(self.turn - turn);
        }
        seen
    }

    /// Forgets what clients have got so far.
    pub(crate) fn forget(&mut self) {
        for client in &mut self.clients {
            client.seen = Seen::default();
            client.wanted.iter_mut().for_each(|one| *one = (self.now, self.turn));
        }
    }

    /// Memory that a worker has left.
    pub(crate) fn free(&self, worker: usize) -> u64 {
        self.schedulers[worker].free()
    }

    /// A client is gone: its memory is given back.
    pub(crate) fn remove(&mut self, client: usize, memory_held: u64) {
        let Client { worker, flow, .. } = self.clients[client];
        self.clients[client].gone = true;
        self.schedulers[worker].forget_hold(flow);
        self.schedulers[worker].free_memory(flow, memory_held);
    }

    /// Advances the simulation by `us` microseconds.
    pub(crate) fn run(&mut self, us: u64) {
        let end = self.now + us * 1000;
        while self.now < end {
            self.turn += 1;
            let longest = (0..self.schedulers.len()).map(|worker| self.take_turn(worker)).max();
            let longest = longest.unwrap_or(0);
            self.now += if longest > 0 { TURN_NS + longest } else { self.idle_ns() };
            if self.now - self.swept > 500_000_000 {
                self.swept = self.now;
                self.schedulers.iter_mut().for_each(Scheduler::sweep);
            }
        }
    }

    /// Until the next thing happens by itself.
    fn idle_ns(&self) -> u64 {
        let ends = self.devices.iter().filter_map(|device| device.queue.front());
        let read = self.unread.iter().map(|&(at, _, _)| at);
        let limits = self.schedulers.iter().filter_map(Scheduler::next_deadline);
        let next = ends.map(|op| op.ends).chain(read).chain(limits).min();
        next.map_or(TURN_NS, |at| at.saturating_sub(self.now).clamp(TURN_NS, 1_000_000))
    }

    /// One turn of a worker. Gives how long its work takes.
    fn take_turn(&mut self, worker: usize) -> u64 {
        self.schedulers[worker].begin_turn(self.now);
        for op in std::mem::take(&mut self.ended[worker]) {
            self.end(op);
        }
        for device in 0..self.devices.len() {
            self.end_media(worker, device);
        }
        for _ in 0..self.unread.len() {
            let Some((at, client, memory)) = self.unread.pop_front() else { break };
            if at <= self.now && self.clients[client].worker == worker {
                let flow = self.clients[client].flow;
                self.schedulers[worker].free_memory(flow, memory);
            } else {
                self.unread.push_back((at, client, memory));
            }
        }
        let mut work = 0;
        while let Some(owner) = self.schedulers[worker].next_runnable() {
            let (Owner::Connection(at) | Owner::Queue(at)) = owner;
            self.clients[at].held = false;
            work += self.ask(at);
        }
        self.schedulers[worker].end_grant();
        // Completions arrive in any order.
        let asks = |one: &Client| one.worker == worker && !one.held && !one.wanted.is_empty();
        let mut order: Vec<usize> =
            (0..self.clients.len()).filter(|&at| asks(&self.clients[at])).collect();
        self.random.shuffle(&mut order);
        for at in order {
            work += self.ask(at);
        }
        work * WORK_NS_PER_KIB / 1024
    }

    fn end_media(&mut self, worker: usize, device: usize) {
        // In order of their ends.
        let queue = &self.devices[device].queue;
        let ended = queue.partition_point(|op| op.ends <= self.now);
        for _ in 0..ended {
            let Some(op) = self.devices[device].queue.pop_front() else { break };
            if self.clients[op.client].worker == worker {
                self.end(op);
            } else {
                // The other worker takes it in its own turn.
                self.ended[self.clients[op.client].worker].push(op);
            }
        }
    }

    /// A request has been carried out.
    fn end(&mut self, op: Op) {
        let client = &mut self.clients[op.client];
        let scheduler = &mut self.schedulers[client.worker];
        let is_write = client.spec.kind == Kind::Write;
        scheduler.observe_media(client.flow, is_write, op.ends.saturating_sub(op.begun));
        scheduler.complete(client.flow, op.cost);
        client.seen.done += 1;
        client.seen.bytes += op.bytes;
        client.seen.worst_ns = client.seen.worst_ns.max(self.now.max(op.ends) - op.started);
        match client.spec.kind {
            Kind::UnreadReplies => {}
            Kind::SlowRead(us) => {
                self.unread.push_back((self.now + us * 1000, op.client, op.memory));
            }
            _ => scheduler.free_memory(client.flow, op.memory),
        }
        client.wanted.push_back((self.now, self.turn));
    }

    /// Requests as much as a client needs. Returns the cost of the admitted requests.
    fn ask(&mut self, at: usize) -> u64 {
        let mut taken = 0;
        // A request that is answered at once is repeated in the next turn.
        for _ in 0..self.clients[at].wanted.len() {
            if self.clients[at].held || self.clients[at].gone {
                break;
            }
            let Some(&(since, turn)) = self.clients[at].wanted.front() else { break };
            let spec = self.clients[at].spec;
            let writes = matches!(spec.kind, Kind::Write | Kind::FullPool | Kind::HalfWrite);
            let counted = !matches!(spec.kind, Kind::Flush | Kind::BlockStatus);
            let mut demand = Demand::new(spec.bytes, counted, writes);
            let has_payload = !matches!(spec.kind, Kind::Flush | Kind::BlockStatus);
            if has_payload && !spec.is_queue {
                demand = demand.with_memory(spec.bytes.next_power_of_two().max(4096), false);
            }
            let (worker, flow) = (self.clients[at].worker, self.clients[at].flow);
            let Ok(memory) = self.schedulers[worker].admit(flow, &demand) else {
                self.clients[at].held = true;
                break;
            };
            let client = &mut self.clients[at];
            client.wanted.pop_front();
            client.seen.worst_turns = client.seen.worst_turns.max(self.turn - turn);
            let bytes = if memory > 0 { spec.bytes.min(memory) } else { spec.bytes };
            taken += cost(bytes);
            let (cost, begun, ends) = (cost(bytes), self.now, self.now);
            self.start(Op { client: at, started: since, cost, bytes, memory, begun, ends });
        }
        taken
    }

    /// Carries a request out that was admitted.
    fn start(&mut self, mut op: Op) {
        let client = &self.clients[op.client];
        let TenantAt { worker, id, device } = self.tenants[client.tenant];
        match client.spec.kind {
            Kind::HalfWrite => {}
            Kind::FullPool => {
                let waiting = if client.spec.is_queue { 0 } else { op.memory };
                self.schedulers[worker].set_full(id, true);
                self.schedulers[worker].begin_wait(client.flow, op.cost, waiting);
            }
            Kind::BlockStatus => self.end(op),
            _ => {
                let device = &mut self.devices[device];
                let Some(busy_until) = &mut device.busy_until else { return self.end(op) };
                let takes = op.cost * MEDIA_NS_PER_KIB / 1024;
                *busy_until = (*busy_until).max(self.now) + takes;
                op.ends = *busy_until;
                device.queue.push_back(op);
            }
        }
    }
}
