//! Histories of several hosts that open one pool: the rules of its claim page, over storage that is
//! slow up to its bound and hosts that stall, die and come back. In half of the histories a lock
//! manager has a lease for the pool, which hosts give back, take from a host that is fenced, or get
//! when it has expired, and some hosts open the pool without it.
//!
//! The claimants are those of the daemon. Time is simulated. Two things must never be seen: a write
//! that lands after another open has begun to own the pool, and, where no host stalls and storage
//! is quick, an owner that loses the pool.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use blockd_mapper::claim::{Action, ClaimMutation, ClaimTiming, Claimant, Standing};
use blockd_mapper::format::claim::{Claim, ClaimPage, ClaimState};

const MS: u64 = 1_000_000;
/// Simulated time of a history: several takeovers fit into it.
const LENGTH: u64 = 40_000 * MS;
/// The same with a lease, which lasts for some of it.
const LEASED_LENGTH: u64 = 80_000 * MS;
/// How long a lease counts after it was taken.
const LEASE: u64 = 10_000 * MS;
/// Another host may get the lease of one that has done nothing for so long: the least that C8
/// allows.
const LEASE_LIFE: u64 = LEASE + WAIT + MS;
/// W of every opener.
const WAIT: u64 = ClaimTiming::LEAST_WAIT_NS;
/// Events of a history at the most, so that a mutation that never sleeps ends.
const MAX_EVENTS: u32 = 20_000;
/// The longest time from the read that ends a watch to the landing of the claim that follows, where
/// no host stalls and storage is quick: 20 ms for the read, 4 ms of pauses, 10 ms for the write. An
/// owner at home waits for nothing, so it can begin in this time and lose the pool to that claim.
const TAKEOVER: u64 = 34 * MS;

/// The violation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// A write of one open landed after another had begun to own the pool.
    ForeignWrite,
    /// A punctual owner lost the pool to an open that began to claim it later.
    PunctualLost,
}

/// The situations that histories have covered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Met {
    /// Opens that became owners.
    pub owners: u64,
    /// Opens that were refused.
    pub refused: u64,
    /// Owners that lost the pool.
    pub lost: u64,
    /// Writes of owners that landed.
    pub writes: u64,
    /// Writes that the gate held back.
    pub held_back: u64,
    /// Claims that were not submitted because they were late.
    pub late: u64,
    /// Opens that needed no wait, without a lease.
    pub at_home: u64,
    /// The same under a lease that was free.
    pub leased: u64,
    /// Opens that did not watch the claim of a node that was fenced.
    pub fenced: u64,
    /// Leases that had expired.
    pub expired: u64,
    /// Writes of fenced hosts that did not land.
    pub dropped: u64,
    /// Pools that were given back in order.
    pub released: u64,
}

impl Met {
    /// Adds the situations that another history covered.
    pub const fn add(&mut self, other: &Self) {
        self.owners += other.owners;
        self.refused += other.refused;
        self.lost += other.lost;
        self.writes += other.writes;
        self.held_back += other.held_back;
        self.late += other.late;
        self.at_home += other.at_home;
        self.leased += other.leased;
        self.fenced += other.fenced;
        self.expired += other.expired;
        self.dropped += other.dropped;
        self.released += other.released;
    }

    /// Whether everything was met that the rules are about.
    #[must_use]
    pub const fn is_complete(&self) -> bool {
        let opens = self.owners > 0 && self.refused > 0 && self.lost > 0 && self.at_home > 0;
        let leases = self.leased > 0 && self.fenced > 0 && self.expired > 0 && self.dropped > 0;
        opens
            && leases
            && self.released > 0
            && self.writes > 0
            && self.held_back > 0
            && self.late > 0
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    Start(usize),
    /// A host does the next step of its claimant.
    Step(usize, u64),
    /// A host submits its pending write.
    Submit(usize, u64),
    /// A read takes the content of the page.
    Sample(usize, u64, u64),
    ReadDone(usize, u64, u64),
    /// A claim lands, by its place in the list.
    Land(usize),
    WriteDone(usize, u64),
    /// A host tries to write to the pool.
    Data(usize, u64),
    DataLand(u64),
    Crash(usize),
    Release(usize),
}

struct Host {
    claimant: Option<Claimant>,
    /// Number of the open; rises over all hosts.
    open: u64,
    stalled_until: u64,
    /// When the last IO that this host has submitted lands: the owner lock of the device is held
    /// until then, also after a crash.
    io_ends: u64,
    to_write: Option<Claim>,
    sampled: Option<ClaimPage>,
    was_owner: bool,
    is_closing: bool,
    /// Whether the open was released.
    is_closed: bool,
    began: u64,
    /// When the first claim of this open landed.
    landed: Option<u64>,
    /// How long after that the claim of another open landed over it.
    held_for: Option<u64>,
    /// Whether it opens the pool under the lease only.
    is_leased: bool,
    /// Until when the lease of the present open counts; 0 without.
    leased_until: u64,
    /// The node that was fenced for it.
    takes_from: Option<u32>,
    /// When it did something last: until then it has renewed its lease.
    active: u64,
    /// A write of the present open was refused, as it was fenced.
    is_excluded: bool,
}

struct World {
    random: fastrand::Rng,
    /// No host stalls or dies, and storage answers within some milliseconds.
    is_quick: bool,
    /// B, the bound on IO; nothing is slower.
    bound: u64,
    now: u64,
    queue: BinaryHeap<Reverse<(u64, u64, Event)>>,
    sequence: u64,
    page: ClaimPage,
    landing: Vec<Claim>,
    hosts: Vec<Host>,
    next_open: u64,
    /// The open that has owned the pool last.
    owner: u64,
    /// Whether a lock manager has a lease of the pool.
    has_lease: bool,
    /// The host that has it.
    lessee: Option<usize>,
    /// Opens that were fenced.
    fenced: Vec<u64>,
    without: Option<ClaimMutation>,
    met: Met,
    fault: Option<Fault>,
}

/// Runs the history of a seed.
#[must_use]
pub fn run(seed: u64, without: Option<ClaimMutation>) -> (Met, Option<Fault>) {
    let mut world = World::new(seed, without);
    let mut events = 0;
    while let Some(Reverse((at, _, event))) = world.queue.pop() {
        events += 1;
        if at > world.length() || world.fault.is_some() || events > MAX_EVENTS {
            break;
        }
        world.now = at;
        world.handle(event);
    }
    (world.met, world.fault)
}

/// Runs histories from a seed on until one fails; gives how many were run.
#[must_use]
pub fn search(seed: u64, histories: u64, without: Option<ClaimMutation>) -> Search {
    let mut found = Search { histories: 0, met: Met::default(), first: None };
    for number in 0..histories {
        let history = seed.wrapping_add(number);
        let (met, fault) = run(history, without);
        found.histories += 1;
        found.met.add(&met);
        if let Some(fault) = fault {
            found.first = Some((history, fault));
            break;
        }
    }
    found
}

/// The result of a search.
#[derive(Clone, Copy, Debug)]
pub struct Search {
    /// Histories that were run.
    pub histories: u64,
    /// The covered situations.
    pub met: Met,
    /// The first seed that failed, and how.
    pub first: Option<(u64, Fault)>,
}

impl World {
    fn new(seed: u64, without: Option<ClaimMutation>) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let is_quick = random.u8(..4) == 0;
        let timing = ClaimTiming::new(WAIT);
        let count = random.usize(2..=3);
        let page = match random.u8(..4) {
            0 => ClaimPage::Absent,
            1 => ClaimPage::Claim(claim(1000, 9, ClaimState::Free)),
            2 => ClaimPage::Claim(claim(1000, 9, ClaimState::Held)),
            _ => ClaimPage::Claim(claim(1000, 1, ClaimState::Held)),
        };
        let has_lease = seed.is_multiple_of(2);
        let host = |is_leased: bool| Host {
            claimant: None,
            open: 0,
            stalled_until: 0,
            io_ends: 0,
            to_write: None,
            sampled: None,
            was_owner: false,
            is_closing: false,
            is_closed: false,
            began: 0,
            landed: None,
            held_for: None,
            is_leased,
            leased_until: 0,
            takes_from: None,
            active: 0,
            is_excluded: false,
        };
        // One of four opens the pool by hand.
        let hosts = (0..count).map(|_| host(has_lease && random.u8(..4) > 0)).collect();
        let mut world = Self {
            is_quick,
            bound: timing.wait_ns - timing.valid_ns - 1,
            now: 0,
            queue: BinaryHeap::new(),
            sequence: 0,
            page,
            landing: Vec::new(),
            hosts,
            next_open: 1,
            owner: 0,
            has_lease,
            lessee: None,
            fenced: Vec::new(),
            without,
            met: Met::default(),
            fault: None,
            random,
        };
        for host in 0..count {
            let at = match world.random.u8(..3) {
                0 => 0,
                1 => world.random.u64(..200 * MS),
                _ => world.random.u64(..8000 * MS),
            };
            world.at(at, Event::Start(host));
        }
        world
    }

    const fn length(&self) -> u64 {
        if self.has_lease { LEASED_LENGTH } else { LENGTH }
    }

    fn at(&mut self, at: u64, event: Event) {
        self.sequence += 1;
        self.queue.push(Reverse((at, self.sequence, event)));
    }

    /// How long an IO takes: the extremes show more than values between them.
    fn delay(&mut self) -> u64 {
        if self.is_quick {
            return self.random.u64(..10 * MS);
        }
        match self.random.u8(..6) {
            0 => 0,
            1 | 2 => self.random.u64(..5 * MS),
            3 => self.bound,
            4 => self.bound - self.random.u64(..50 * MS),
            _ => self.random.u64(..self.bound),
        }
    }

    /// How long a host does nothing before its next step.
    fn pause(&mut self) -> u64 {
        match self.random.u8(..40) {
            _ if self.is_quick => self.random.u64(..2 * MS),
            0 if self.has_lease => self.random.u64(..2 * LEASE_LIFE),
            0 => self.random.u64(..8000 * MS),
            1 => self.random.u64(..2500 * MS),
            _ => self.random.u64(..2 * MS),
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Start(host) => self.start(host),
            Event::Step(host, open) if self.is_awake(host, open, event) => self.step(host),
            Event::Submit(host, open) if self.is_awake(host, open, event) => self.submit(host),
            Event::Sample(host, open, begun) if self.hosts[host].open == open => {
                self.hosts[host].sampled = Some(self.page);
                // A read may be answered late: that only makes it older.
                let at = self.now + self.delay();
                self.at(at, Event::ReadDone(host, open, begun));
            }
            Event::ReadDone(host, open, begun) if self.is_awake(host, open, event) => {
                self.read_done(host, begun);
            }
            Event::Land(at) => self.land(self.landing[at]),
            Event::WriteDone(host, open) if self.is_awake(host, open, event) => {
                let now = self.now;
                if self.hosts[host].is_excluded {
                    // A conflict is final.
                    self.restart(host);
                    return;
                }
                self.claimant(host).wrote(now);
                self.note_standing(host);
                self.step_later(host);
            }
            Event::Data(host, open) if self.is_awake(host, open, event) => self.data(host, open),
            Event::DataLand(open) if self.fenced.contains(&open) => self.met.dropped += 1,
            Event::DataLand(open) => {
                self.met.writes += 1;
                if self.owner != open {
                    self.fault = Some(Fault::ForeignWrite);
                }
            }
            Event::Crash(host) => self.crash(host),
            Event::Release(host) => self.hosts[host].is_closing = true,
            _ => {}
        }
    }

    /// Whether the event is of the open that runs; one that meets a stall comes again after it.
    fn is_awake(&mut self, host: usize, open: u64, event: Event) -> bool {
        let one = &self.hosts[host];
        if one.open != open || one.claimant.is_none() {
            return false;
        }
        let until = one.stalled_until;
        if until > self.now {
            self.at(until, event);
            return false;
        }
        self.hosts[host].active = self.now;
        true
    }

    fn claimant(&mut self, host: usize) -> &mut Claimant {
        self.hosts[host].claimant.as_mut().expect("only of hosts that run")
    }

    /// Takes the lease, from another host where that has not renewed it or is fenced. False where
    /// it can't be had.
    fn take_lease(&mut self, host: usize) -> bool {
        let now = self.now;
        (self.hosts[host].active, self.hosts[host].takes_from) = (now, None);
        self.hosts[host].leased_until = now + LEASE;
        if let Some(other) = self.lessee.filter(|other| *other != host) {
            let one = &self.hosts[other];
            if now.saturating_sub(one.active) > LEASE_LIFE {
                self.met.expired += 1;
            } else if self.random.u8(..8) == 0 {
                self.fenced.push(one.open);
                self.hosts[host].takes_from = Some(node(other));
                // The fence may end a lease that another host has got in this moment: after a fence
                // a lease spares nothing.
                self.hosts[host].leased_until = Claimant::UNLEASED;
                if self.random.bool() {
                    return true;
                }
            } else {
                return false;
            }
        }
        self.lessee = Some(host);
        true
    }

    fn give_lease_back(&mut self, host: usize) {
        self.lessee = self.lessee.filter(|other| *other != host);
    }

    fn start(&mut self, host: usize) {
        if self.hosts[host].is_leased && !self.take_lease(host) {
            let at = self.now + self.random.u64(..1000 * MS);
            self.at(at, Event::Start(host));
            return;
        }
        let (open, now) = (self.next_open, self.now);
        self.next_open += 1;
        let own = claim(open, node(host), ClaimState::Pending);
        if self.has_lease && !self.hosts[host].is_leased {
            self.hosts[host].leased_until = Claimant::UNLEASED;
        }
        let Host { leased_until, takes_from, .. } = self.hosts[host];
        let claimant = Claimant::new(own, ClaimTiming::new(WAIT)).leased(leased_until);
        let claimant = claimant.after_fence(takes_from).without(self.without);
        let one = &mut self.hosts[host];
        one.claimant = Some(claimant);
        one.open = open;
        one.to_write = None;
        one.was_owner = false;
        (one.is_closing, one.is_closed) = (false, false);
        one.began = now;
        (one.landed, one.held_for) = (None, None);
        one.is_excluded = false;
        // A host that stands still here has lost its lease to another when it goes on.
        if leased_until > Claimant::UNLEASED && !self.is_quick && self.random.u8(..8) == 0 {
            let at = now + LEASE_LIFE + self.random.u64(..2000 * MS);
            self.at(at, Event::Step(host, open));
        } else {
            self.step_later(host);
        }
        if !self.is_quick && self.random.u8(..2) == 0 {
            let at = now + self.random.u64(..12_000 * MS);
            let end = if self.random.bool() { Event::Crash(host) } else { Event::Release(host) };
            self.at(at, end);
        }
    }

    fn step_later(&mut self, host: usize) {
        let (open, at) = (self.hosts[host].open, self.now + self.pause());
        self.at(at, Event::Step(host, open));
    }

    fn step(&mut self, host: usize) {
        let (now, open) = (self.now, self.hosts[host].open);
        // A pool is closed when its IO has ended.
        if self.hosts[host].is_closing && self.hosts[host].io_ends <= now {
            self.hosts[host].is_closing = false;
            self.hosts[host].is_closed = true;
            self.claimant(host).release();
        }
        match self.claimant(host).poll(now) {
            Action::Read => {
                let at = now + self.delay();
                self.at(at, Event::Sample(host, open, now));
            }
            Action::Write(claim) => {
                self.hosts[host].to_write = Some(claim);
                let at = now + self.pause();
                self.at(at, Event::Submit(host, open));
            }
            Action::Wait(until) => {
                let at = until.max(now) + self.pause();
                self.at(at, Event::Step(host, open));
            }
            Action::End => self.ended(host),
        }
    }

    fn submit(&mut self, host: usize) {
        let (now, open) = (self.now, self.hosts[host].open);
        let Some(claim) = self.hosts[host].to_write.take() else { return };
        if now >= self.claimant(host).submit_by() {
            self.met.late += 1;
            self.claimant(host).late();
            self.step_later(host);
            return;
        }
        self.landing.push(claim);
        let (lands, number) = (now + self.delay(), self.landing.len() - 1);
        self.at(lands, Event::Land(number));
        self.hosts[host].io_ends = self.hosts[host].io_ends.max(lands);
        let done = lands + self.delay();
        self.at(done, Event::WriteDone(host, open));
    }

    fn land(&mut self, claim: Claim) {
        let now = self.now;
        if self.fenced.contains(&claim.open_id) {
            self.met.dropped += 1;
            let its = self.hosts.iter_mut().filter(|host| host.open == claim.open_id);
            its.for_each(|host| host.is_excluded = true);
            return;
        }
        self.page = ClaimPage::Claim(claim);
        for host in &mut self.hosts {
            if host.open == claim.open_id {
                host.landed.get_or_insert(now);
            } else if let Some(landed) = host.landed {
                host.held_for.get_or_insert(now - landed);
            }
        }
    }

    fn read_done(&mut self, host: usize, begun: u64) {
        let now = self.now;
        if let Some(page) = self.hosts[host].sampled.take() {
            let takes_from = self.hosts[host].takes_from;
            self.claimant(host).read(begun, now, page);
            let is_its = matches!(page, ClaimPage::Claim(claim) if Some(claim.node) == takes_from);
            let waits = self.claimant(host).is_watching();
            self.met.fenced += u64::from(is_its && !waits && !self.hosts[host].was_owner);
        }
        self.note_standing(host);
        self.step_later(host);
    }

    fn note_standing(&mut self, host: usize) {
        let standing = self.claimant(host).standing();
        let is_fenced = self.fenced.contains(&self.hosts[host].open);
        if standing == Standing::Owner && !self.hosts[host].was_owner {
            self.hosts[host].was_owner = true;
            if !is_fenced {
                self.owner = self.hosts[host].open;
            }
            self.met.owners += 1;
            let no_wait = u64::from(self.now - self.hosts[host].began < WAIT);
            match self.hosts[host].leased_until {
                0 | Claimant::UNLEASED => self.met.at_home += no_wait,
                _ => self.met.leased += no_wait,
            }
            let (open, at) = (self.hosts[host].open, self.now);
            self.at(at, Event::Data(host, open));
        }
        if let Standing::Lost(_) = standing {
            self.met.lost += 1;
            let is_punctual = self.is_quick && !is_fenced;
            if is_punctual && self.hosts[host].held_for.is_none_or(|held| held > TAKEOVER) {
                self.fault = Some(Fault::PunctualLost);
            }
        }
    }

    /// Writes whenever it may, most often just before it may not.
    fn data(&mut self, host: usize, open: u64) {
        let now = self.now;
        let until = self.claimant(host).writes_until();
        if self.hosts[host].is_closing || self.hosts[host].is_closed {
            return;
        }
        if now < until {
            let lands = now + self.delay();
            self.at(lands, Event::DataLand(open));
            self.hosts[host].io_ends = self.hosts[host].io_ends.max(lands);
        } else {
            self.met.held_back += 1;
        }
        let pause = match self.random.u8(..3) {
            0 if until > now && until - now < 2000 * MS => until - now - 1,
            _ => self.random.u64(..400 * MS),
        };
        self.at(now + pause.max(MS), Event::Data(host, open));
        if !self.is_quick && self.random.u8(..30) == 0 {
            self.hosts[host].stalled_until = now + self.random.u64(..9000 * MS);
        }
    }

    fn ended(&mut self, host: usize) {
        let standing = self.claimant(host).standing();
        self.met.refused += u64::from(matches!(standing, Standing::Refused(_)));
        self.met.released += u64::from(standing == Standing::Released);
        self.give_lease_back(host);
        self.restart(host);
    }

    fn crash(&mut self, host: usize) {
        if self.hosts[host].claimant.is_some() {
            self.restart(host);
        }
    }

    /// The host opens the pool again, once IO of its last open has ended.
    fn restart(&mut self, host: usize) {
        let one = &mut self.hosts[host];
        one.claimant = None;
        one.stalled_until = 0;
        let pause = if self.random.bool() { 0 } else { self.random.u64(..5000 * MS) };
        let at = self.hosts[host].io_ends.max(self.now) + pause;
        self.at(at, Event::Start(host));
    }
}

fn node(host: usize) -> u32 {
    u32::try_from(host + 1).unwrap_or(u32::MAX)
}

fn claim(open_id: u64, node: u32, state: ClaimState) -> Claim {
    Claim {
        pool_id: [1; 16],
        state,
        open_id,
        counter: 0,
        node,
        boot_id: [0; 16],
        lock_space: node.into(),
        device: 1,
    }
}
