//! Flows that wait for payload memory which is free, but not in one piece: how often they are
//! tried, and what an admission that is taken back leaves behind.

use std::sync::Arc;

use super::{
    Capacity, DEFAULT_WEIGHT, Defences, Demand, FlowId, Hold, LEAST_PIECE, MAX_WAITING, Owner,
    QUANTUM, Scheduler, TenantId, VolumeShare, Window, cost,
};

const MS: u64 = 1_000_000;
const CAPACITY: Capacity = Capacity { memory: 16 << 20, requests: 8192 };
const MIB: u64 = 1 << 20;

/// A read of 1 MiB that has to be answered in one piece.
fn whole() -> Demand {
    Demand::new(MIB, true, false).with_memory(MIB, true)
}

/// A volume whose flows are connections, numbered from 0.
struct World {
    scheduler: Scheduler,
    tenant: TenantId,
    flows: Vec<FlowId>,
    share: Arc<VolumeShare>,
    window: Arc<Window>,
    now: u64,
}

impl World {
    fn new(flows: usize) -> Self {
        let mut scheduler = Scheduler::new(0, CAPACITY, Defences::ALL);
        let (window, share) = (Arc::<Window>::default(), Arc::<VolumeShare>::default());
        let its_share = Arc::clone(&share);
        let tenant = scheduler.add_tenant(&window, its_share, DEFAULT_WEIGHT, Arc::default());
        let add = |at| scheduler.add_flow(tenant, Owner::Connection(at));
        let flows = (0..flows).map(add).collect();
        let mut world = Self { scheduler, tenant, flows, share, window, now: 0 };
        world.turn();
        world
    }

    fn turn(&mut self) {
        self.now += MS;
        self.scheduler.begin_turn(self.now);
    }

    /// A connection of another volume of the pool.
    fn add_tenant(&mut self) -> FlowId {
        let share = Arc::<VolumeShare>::default();
        let tenant = self.scheduler.add_tenant(&self.window, share, DEFAULT_WEIGHT, Arc::default());
        self.scheduler.add_flow(tenant, Owner::Connection(99))
    }

    /// Requests memory that is free, but not in one piece.
    fn fail(&mut self, at: usize) {
        let memory = self.scheduler.admit(self.flows[at], &whole()).expect("memory in pieces");
        self.scheduler.revoke(self.flows[at], &whole(), memory);
    }

    /// Does what a worker does in a turn, where memory stays in pieces. Returns how many flows
    /// were tried.
    fn try_all(&mut self) -> usize {
        let mut tried = 0;
        while let Some(owner) = self.scheduler.next_runnable() {
            let Owner::Connection(at) = owner else { panic!("{owner:?}") };
            self.fail(at);
            tried += 1;
            assert!(tried <= self.flows.len(), "a turn does not end");
        }
        self.scheduler.end_grant();
        tried
    }

    /// Turns that the worker takes without sleep.
    fn busy_turns(&mut self) -> usize {
        let mut turns = 0;
        while self.scheduler.has_runnable() {
            turns += 1;
            assert!(turns < 100, "the worker does not sleep");
            self.turn();
            self.try_all();
        }
        turns
    }
}

#[test]
fn a_flow_that_finds_memory_in_pieces_is_tried_once_in_a_turn() {
    for is_free in [false, true] {
        let mut world = World::new(1);
        if is_free {
            world.scheduler.release_tenant(world.tenant);
        }
        world.fail(0);
        assert_eq!(world.try_all(), 0, "it was tried in this turn already");
        world.turn();
        assert_eq!(world.try_all(), 1);
        assert_eq!(world.try_all(), 0);
    }
}

#[test]
fn a_flow_that_waits_for_space_is_queued_once() {
    let mut world = World::new(1);
    let (flow, demand) = (world.flows[0], Demand::new(4096, true, true));
    for _ in 0..MAX_WAITING {
        assert_eq!(world.scheduler.admit(flow, &demand), Ok(0));
        world.scheduler.begin_wait(flow, cost(4096), 0);
    }
    world.scheduler.set_full(world.tenant, true);
    assert_eq!(world.scheduler.admit(flow, &demand), Err(Hold::Space));
    // Two of its requests find space before it has gone on.
    world.scheduler.end_wait(flow, cost(4096), 0);
    world.scheduler.end_wait(flow, cost(4096), 0);
    assert_eq!(world.scheduler.next_runnable(), Some(Owner::Connection(0)));
    assert_eq!(world.scheduler.admit(flow, &demand), Ok(0));
    assert_eq!(world.scheduler.next_runnable(), None);
    assert!(!world.scheduler.has_holds());
}

#[test]
fn the_worker_sleeps_while_memory_is_in_pieces_and_wakes_for_each_release() {
    let mut world = World::new(4);
    let (holder, page) = (world.flows[3], Demand::new(4096, true, false).with_memory(4096, true));
    for _ in 0..2 {
        assert_eq!(world.scheduler.admit(holder, &page), Ok(4096));
    }
    world.fail(0);
    for at in 1..3 {
        assert_eq!(world.scheduler.admit(world.flows[at], &whole()), Err(Hold::Turn));
    }
    assert!((1..=3).contains(&world.busy_turns()), "each is tried, and then the worker sleeps");
    // A turn that something else begins tries one of them, and is not followed by others.
    world.turn();
    assert_eq!(world.try_all(), 1);
    assert_eq!(world.busy_turns(), 0);
    // A release wakes it, also if there is less memory than before: another volume takes some.
    let other = world.add_tenant();
    let in_pieces = Demand::new(LEAST_PIECE, true, false).with_memory(LEAST_PIECE, true);
    assert_eq!(world.scheduler.admit(other, &in_pieces), Ok(LEAST_PIECE));
    assert_eq!(world.busy_turns(), 0);
    for _ in 0..2 {
        world.scheduler.free_memory(holder, 4096);
        assert!((1..=3).contains(&world.busy_turns()), "each is tried once more");
        assert_eq!(world.busy_turns(), 0);
    }
    // A read that can do with less is not kept waiting by those that cannot.
    world.scheduler.complete(holder, cost(4096));
    assert_eq!(world.scheduler.admit(holder, &page), Err(Hold::Turn));
    assert!(world.scheduler.has_runnable());
    world.turn();
    assert_eq!(world.scheduler.next_runnable(), Some(Owner::Connection(3)));
    assert_eq!(world.scheduler.admit(holder, &page), Ok(4096));
}

#[test]
fn an_admission_that_is_taken_back_costs_nothing() {
    let mut world = World::new(1);
    world.share.limiter.set(100, 64 << 20);
    world.scheduler.set_limited(world.tenant, true);
    let limits = Arc::new(VolumeShare::default());
    limits.limiter.set(100, 64 << 20);
    world.fail(0);
    let deficit = |world: &World| world.scheduler.tenants[world.tenant.0].as_ref().unwrap().deficit;
    assert_eq!(deficit(&world), i64::try_from(QUANTUM).unwrap());
    for _ in 0..50 {
        world.turn();
        assert_eq!(world.try_all(), 1);
        assert_eq!(deficit(&world), i64::try_from(QUANTUM).unwrap());
    }
    // A part of one that is not used costs nothing either.
    world.turn();
    assert_eq!(world.scheduler.next_runnable(), Some(Owner::Connection(0)));
    assert_eq!(world.scheduler.admit(world.flows[0], &whole()), Ok(MIB));
    world.scheduler.shrink(world.flows[0], MIB - 4096, MIB - 4096);
    assert_eq!(deficit(&world), i64::try_from(QUANTUM - cost(4096)).unwrap());
    assert_eq!(limits.limiter.take(world.now, 4096), Ok(()));
    let both = [&world.share, &limits]
        .map(|share| (0..).take_while(|_| share.limiter.take(world.now, 4096).is_ok()).count());
    assert_eq!(both[0], both[1], "what is left of the limits");
    assert_eq!(world.scheduler.memory_of(world.tenant), 4096);
}

/// A client with simple replies reads 4 MiB eight times at once. The parts of all but the first one
/// are answered after that, and keep their memory. Meanwhile a neighbour takes its share.
#[test]
fn a_read_goes_on_whose_connection_holds_answers_back_until_it_is_done() {
    let mut world = World::new(1);
    // The worker keeps this for copies.
    world.scheduler.reserve_memory(MIB);
    let flow = world.flows[0];
    while world.scheduler.admit(flow, &whole()).is_ok() {
        world.scheduler.complete(flow, cost(MIB));
    }
    assert_eq!(world.scheduler.memory_of(world.tenant), 7 * MIB);
    world.scheduler.free_memory(flow, MIB);
    let neighbour = world.add_tenant();
    let piece = Demand::new(LEAST_PIECE, true, false).with_memory(LEAST_PIECE, true);
    let mut taken = 0;
    world.turn();
    while world.scheduler.admit(neighbour, &piece).is_ok() {
        world.scheduler.complete(neighbour, cost(LEAST_PIECE));
        taken += LEAST_PIECE;
        world.turn();
    }
    assert!((4 * MIB..5 * MIB).contains(&taken), "{taken} bytes");
    // The next part of another read had its turn before that of the first one.
    assert_eq!(world.scheduler.next_runnable(), None);
    let rest = Demand::new(MIB, true, false).with_memory(MIB, false);
    for _ in 0..32 {
        assert!(world.scheduler.admit_awaited(flow, &rest.awaited()).is_err());
        assert!(world.scheduler.has_runnable());
        world.turn();
        assert_eq!(world.scheduler.next_runnable(), Some(Owner::Connection(0)));
        assert_eq!(world.scheduler.admit_awaited(flow, &rest.awaited()), Ok(LEAST_PIECE));
        assert_eq!(world.scheduler.admit(flow, &rest), Err(Hold::Memory));
        world.scheduler.complete(flow, cost(LEAST_PIECE));
        world.scheduler.free_memory(flow, LEAST_PIECE);
        world.scheduler.end_awaited(flow);
    }
    assert_eq!(world.scheduler.next_runnable(), None, "no other read goes on");
}

/// A part of a long read for which other answers wait.
fn part() -> Demand {
    Demand::new(MIB, true, false).with_memory(MIB, false).awaited()
}

/// Memory of the answers that each connection of a crowd holds back.
const HELD: u64 = 512 << 10;

/// Connections of one volume, all of which hold answers back until a long read is done. Another
/// volume holds so much that none of them may have more.
fn crowd(count: usize) -> World {
    let mut world = World::new(count);
    let held = Demand::new(HELD, true, false).with_memory(HELD, true);
    for at in 0..count {
        assert_eq!(world.scheduler.admit(world.flows[at], &held), Ok(HELD));
        world.scheduler.complete(world.flows[at], cost(HELD));
    }
    world.scheduler.reserve_memory(world.scheduler.free() - 8 * LEAST_PIECE);
    world.turn();
    world
}

#[test]
fn a_volume_has_one_awaited_piece_at_a_time() {
    let mut world = crowd(12);
    let held = world.scheduler.memory_of(world.tenant);
    assert_eq!(world.scheduler.admit_awaited(world.flows[0], &part()), Ok(LEAST_PIECE));
    for at in 1..12 {
        assert!(world.scheduler.admit_awaited(world.flows[at], &part()).is_err());
    }
    for _ in 0..24 {
        world.turn();
        assert_eq!(world.scheduler.next_runnable(), None);
        assert!(!world.scheduler.has_runnable(), "the worker sleeps meanwhile");
    }
    assert_eq!(world.scheduler.memory_of(world.tenant), held + LEAST_PIECE);
}

#[test]
fn connections_get_their_awaited_pieces_one_after_the_other() {
    let mut world = crowd(5);
    assert_eq!(world.scheduler.admit_awaited(world.flows[0], &part()), Ok(LEAST_PIECE));
    // Between them, others wait that only ordinary memory helps.
    for at in 1..5 {
        let demand = if at % 2 == 0 { part() } else { Demand { is_awaited: false, ..part() } };
        let admitted = if demand.is_awaited {
            world.scheduler.admit_awaited(world.flows[at], &demand)
        } else {
            world.scheduler.admit(world.flows[at], &demand)
        };
        assert!(admitted.is_err());
    }
    let mut last = 0;
    for next in [2, 4, 0, 2, 4, 0] {
        // Its client has read the piece, and its next one waits behind those of the others.
        world.turn();
        let flow = world.flows[last];
        world.scheduler.complete(flow, cost(LEAST_PIECE));
        world.scheduler.free_memory(flow, LEAST_PIECE);
        world.scheduler.end_awaited(flow);
        assert!(world.scheduler.admit_awaited(flow, &part()).is_err());
        assert_eq!(world.scheduler.next_runnable(), Some(Owner::Connection(next)));
        let admitted = world.scheduler.admit_awaited(world.flows[next], &part());
        assert_eq!(admitted, Ok(LEAST_PIECE));
        assert_eq!(world.scheduler.next_runnable(), None);
        last = next;
    }
}

#[test]
fn an_awaited_piece_of_a_connection_that_ends_makes_room_for_the_next_one() {
    let mut world = crowd(3);
    let [first, second, third] = [0, 1, 2].map(|at| world.flows[at]);
    // Free, but in pieces.
    assert_eq!(world.scheduler.admit_awaited(first, &part()), Ok(LEAST_PIECE));
    world.scheduler.revoke(first, &part(), LEAST_PIECE);
    world.scheduler.forget_hold(first);
    assert_eq!(world.scheduler.admit_awaited(second, &part()), Ok(LEAST_PIECE));
    assert!(world.scheduler.admit_awaited(third, &part()).is_err());
    world.scheduler.complete(second, cost(LEAST_PIECE));
    world.scheduler.free_memory(second, HELD + LEAST_PIECE);
    world.scheduler.remove_flow(second);
    world.turn();
    assert_eq!(world.scheduler.next_runnable(), Some(Owner::Connection(2)));
    assert_eq!(world.scheduler.admit_awaited(third, &part()), Ok(LEAST_PIECE));
    assert!(world.scheduler.has_holds(), "its connection is asked in each turn");
    world.scheduler.remove_flow(third);
    world.scheduler.remove_flow(first);
    assert!(!world.scheduler.has_holds());
}

#[test]
fn a_connection_that_holds_nothing_back_gets_no_piece_beyond_the_limit() {
    let mut world = crowd(2);
    world.scheduler.free_memory(world.flows[0], HELD);
    world.scheduler.reserve_memory(HELD);
    assert_eq!(world.scheduler.admit_awaited(world.flows[0], &part()), Err(Hold::Memory));
    // Nor does it keep one from a connection that does.
    assert!(world.scheduler.admit_awaited(world.flows[1], &part()).is_err());
    world.turn();
    assert_eq!(world.scheduler.next_runnable(), Some(Owner::Connection(1)));
    assert_eq!(world.scheduler.admit_awaited(world.flows[1], &part()), Ok(LEAST_PIECE));
}
