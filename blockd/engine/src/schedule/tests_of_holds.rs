//! Counters of the time for which flows are held back, for each reason.

use std::sync::Arc;

use super::{
    Capacity, DEFAULT_WEIGHT, Defences, Demand, FlowId, Hold, MAX_WAITING, Owner, QUANTUM,
    Scheduler, TenantId, VolumeShare, Window, cost,
};
use crate::stats::{Stage, VolumeStats};

const MS: u64 = 1_000_000;
const CAPACITY: Capacity = Capacity { memory: 16 << 20, requests: 8192 };

struct World {
    scheduler: Scheduler,
    tenant: TenantId,
    flow: FlowId,
    stats: Arc<VolumeStats>,
    share: Arc<VolumeShare>,
    window: Arc<Window>,
}

impl World {
    fn new() -> Self {
        let mut scheduler = Scheduler::new(0, CAPACITY, Defences::ALL);
        let (window, share) = (Arc::<Window>::default(), Arc::<VolumeShare>::default());
        let stats = Arc::<VolumeStats>::default();
        let (its_share, its_stats) = (Arc::clone(&share), Arc::clone(&stats));
        let tenant = scheduler.add_tenant(&window, its_share, DEFAULT_WEIGHT, its_stats);
        let flow = scheduler.add_flow(tenant, Owner::Connection(0));
        scheduler.begin_turn(MS);
        Self { scheduler, tenant, flow, stats, share, window }
    }

    /// Count, nanoseconds, and holds at present.
    fn counted(&self, hold: Hold) -> (u64, u64, u64) {
        let at = hold as usize;
        let stats = &self.stats;
        (stats.held[at].get(), stats.held_ns[at].get(), stats.held_now[at].get())
    }

    /// Holds the flow back, checks that the time counts while that lasts, and ends it.
    fn check(&mut self, hold: Hold, demand: &Demand, end: impl FnOnce(&mut Self)) {
        assert_eq!(self.counted(hold), (0, 0, 0), "{hold:?}");
        assert_eq!(self.scheduler.admit(self.flow, demand), Err(hold));
        assert_eq!(self.counted(hold), (1, 0, 1), "{hold:?}");
        // A retry is not another hold.
        assert_eq!(self.scheduler.admit(self.flow, demand), Err(hold));
        self.scheduler.begin_turn(3 * MS);
        self.scheduler.count_holds();
        assert_eq!(self.counted(hold), (1, 2 * MS, 1), "{hold:?}");
        self.scheduler.begin_turn(6 * MS);
        end(self);
        assert_eq!(self.counted(hold), (1, 5 * MS, 0), "{hold:?}");
        self.scheduler.begin_turn(9 * MS);
        self.scheduler.count_holds();
        assert_eq!(self.counted(hold), (1, 5 * MS, 0), "{hold:?}");
        let others = Hold::ALL.into_iter().filter(|&other| other != hold);
        others.for_each(|other| assert_eq!(self.counted(other), (0, 0, 0), "{hold:?} {other:?}"));
    }

    fn resume(&mut self) {
        assert_eq!(self.scheduler.next_runnable(), Some(Owner::Connection(0)));
    }
}

#[test]
fn holds_for_a_turn_are_counted() {
    let mut world = World::new();
    let share = Arc::<VolumeShare>::default();
    let other = world.scheduler.add_tenant(&world.window, share, DEFAULT_WEIGHT, Arc::default());
    let flow = world.scheduler.add_flow(other, Owner::Queue(1));
    let demand = Demand::new(4096, true, false);
    assert_eq!(world.scheduler.admit(flow, &demand), Ok(0));
    let large = Demand::new(QUANTUM, true, false);
    assert_eq!(world.scheduler.admit(world.flow, &large), Ok(0));
    world.check(Hold::Turn, &demand, World::resume);
}

#[test]
fn holds_by_limits_are_counted() {
    let mut world = World::new();
    // One request in 4 ms. The tolerance is used up, so that the next may begin at 5 ms.
    world.share.limiter.set(250, 0);
    world.scheduler.set_limited(world.tenant, true);
    let demand = Demand::new(4096, true, false);
    while world.share.limiter.take(MS, 4096).is_ok() {}
    world.check(Hold::Limit, &demand, World::resume);
    assert_eq!(world.stats.limited.get(), 1);
    assert_eq!(world.stats.stage(Stage::Limit).sum_ns(), 5 * MS);
}

#[test]
fn holds_for_space_are_counted() {
    let mut world = World::new();
    let demand = Demand::new(4096, true, true);
    for _ in 0..MAX_WAITING {
        assert_eq!(world.scheduler.admit(world.flow, &demand), Ok(0));
        world.scheduler.begin_wait(world.flow, cost(4096), 0);
    }
    world.scheduler.set_full(world.tenant, true);
    world.check(Hold::Space, &demand, |world| {
        world.scheduler.set_full(world.tenant, false);
        world.resume();
    });
}

#[test]
fn holds_for_memory_are_counted_until_the_client_leaves() {
    let mut world = World::new();
    world.scheduler.reserve_memory(CAPACITY.memory);
    let demand = Demand::new(4096, true, false).with_memory(4096, true);
    world.check(Hold::Memory, &demand, |world| world.scheduler.remove_flow(world.flow));
}
