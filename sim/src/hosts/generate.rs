//! Random histories: circumstances, steps and ending all follow from one seed.

use fastrand::Rng;

use super::attachment::{Kind, Phase, Progress};
use super::mutation::Mutation;
use super::oracle::Fault;
use super::parts::{BLOCKS, CELLS, Config, DEVICES, FenceKind, HOSTS, PATHS};
use super::state::{World, number};
use super::step::{KINDS, Step};
use crate::model::generate::{small, spread};
use crate::model::runner::{Counters, Subject};

#[derive(Clone, Copy)]
enum Draw {
    Submit,
    Serve,
    Advance,
    Grow,
    StartGrowth,
    Work,
    Send,
    Land,
    Close,
    Declare,
    Register,
    Freeze,
    Wake,
    Kill,
    Start,
    PowerOff,
    Boot,
    Rejoin,
    Path,
    Tick,
    Drift,
    ArrayPower,
    WriteBack,
    Reset,
    Away,
    Silence,
    Switch,
}

const DRAWS: [Draw; 27] = [
    Draw::Submit,
    Draw::Serve,
    Draw::Advance,
    Draw::Grow,
    Draw::StartGrowth,
    Draw::Work,
    Draw::Send,
    Draw::Land,
    Draw::Close,
    Draw::Declare,
    Draw::Register,
    Draw::Freeze,
    Draw::Wake,
    Draw::Kill,
    Draw::Start,
    Draw::PowerOff,
    Draw::Boot,
    Draw::Rejoin,
    Draw::Path,
    Draw::Tick,
    Draw::Drift,
    Draw::ArrayPower,
    Draw::WriteBack,
    Draw::Reset,
    Draw::Away,
    Draw::Silence,
    Draw::Switch,
];

// Weights in the order of DRAWS. Each history follows one of these, because a mixture of everything
// seldom gets deep into anything.
const PROFILES: [[u8; DRAWS.len()]; 6] = [
    // Of everything a little.
    [34, 16, 24, 6, 2, 40, 10, 10, 2, 2, 6, 4, 4, 2, 4, 2, 4, 3, 4, 10, 3, 2, 2, 1, 1, 1, 1],
    // Hand-overs.
    [40, 20, 40, 4, 1, 40, 10, 10, 8, 0, 2, 1, 3, 1, 3, 0, 2, 1, 1, 3, 1, 2, 3, 1, 2, 2, 0],
    // Hosts that stand still or lose their paths, and takeovers.
    [34, 14, 26, 3, 1, 34, 14, 8, 1, 3, 6, 10, 6, 3, 4, 1, 3, 3, 8, 16, 5, 1, 1, 2, 1, 2, 1],
    // Daemons and machines that die.
    [34, 16, 24, 3, 1, 36, 8, 10, 1, 3, 8, 1, 3, 8, 8, 6, 8, 6, 2, 10, 3, 2, 2, 1, 1, 1, 1],
    // Growth.
    [34, 16, 20, 34, 8, 40, 10, 10, 4, 1, 3, 3, 4, 2, 4, 2, 4, 2, 2, 10, 3, 4, 4, 1, 3, 1, 0],
    // An array that loses power.
    [36, 18, 24, 6, 2, 36, 12, 12, 4, 1, 3, 2, 3, 2, 4, 2, 4, 2, 2, 6, 1, 12, 8, 1, 1, 1, 0],
];

/// Random histories, without one of the rules.
#[derive(Debug)]
pub struct Histories {
    draws: Vec<Vec<Draw>>,
    without: Mutation,
}

impl std::fmt::Debug for Draw {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Draw")
    }
}

impl Histories {
    /// Histories without this rule.
    pub fn new(without: Mutation) -> Self {
        let draws = PROFILES.iter().map(|weights| spread(DRAWS, *weights).to_vec()).collect();
        Self { draws, without }
    }

    /// Runs the history of a seed; `seen` gets every step.
    pub fn play(
        &self,
        seed: u64,
        counters: &mut Counters,
        mut seen: impl FnMut(Step),
    ) -> Option<Fault> {
        let mut rng = Rng::with_seed(seed);
        let mut world = World::new(config(&mut rng), self.without);
        let draws = &self.draws[usize::from(small(&mut rng, number(PROFILES.len())))];
        let length = 30 + small(&mut rng, 90);
        for _ in 0..length {
            let chosen = draws[usize::from(rng.u8(..))];
            let step = draw(&mut rng, chosen, &world);
            world.apply(step);
            seen(step);
            if world.fault.is_some() {
                break;
            }
        }
        for step in ending(&mut rng) {
            if world.fault.is_none() {
                world.apply(step);
                seen(step);
            }
        }
        counters.checks += world.checks;
        for (sum, n) in counters.kinds.iter_mut().zip(world.tally) {
            *sum += u64::from(n);
        }
        world.fault
    }
}

impl Subject for Histories {
    type Fault = Fault;
    const KINDS: &'static [&'static str] = KINDS;

    fn run(&self, seed: u64, counters: &mut Counters) -> Option<Fault> {
        self.play(seed, counters, |_| {})
    }
}

/// The circumstances that belong to a seed.
pub fn config_of(seed: u64) -> Config {
    config(&mut Rng::with_seed(seed))
}

fn config(rng: &mut Rng) -> Config {
    let fence = match small(rng, 8) {
        0 => FenceKind::PowerSwitch,
        1 => FenceKind::Watchdog,
        _ => FenceKind::Reservations,
    };
    let bits = rng.u8(..);
    Config {
        fence,
        exclusive: bits & 3 == 0,
        recovery: bits & 12 != 0,
        fences_silent: bits & 16 == 0,
        buffered: bits & 96 == 0,
        last_unit: bits & 128 == 0,
        open: small(rng, 4),
        one_path: if rng.bool() { 0 } else { small(rng, 8) },
    }
}

fn ending(rng: &mut Rng) -> [Step; 3] {
    let blocks = rng.u8(..);
    let power = Step::ArrayPower(if rng.bool() { 0 } else { rng.u16(..) });
    match small(rng, 8) {
        0 | 1 => [Step::SettleAway, Step::Settle(blocks), power],
        2 | 3 => [power, Step::Settle(blocks), Step::Tick],
        4 => [Step::Settle(blocks), power, Step::Settle(!blocks)],
        _ => [Step::Tick; 3],
    }
}

fn draw(rng: &mut Rng, draw: Draw, world: &World) -> Step {
    let h = small(rng, number(HOSTS));
    let c = small(rng, number(CELLS));
    match draw {
        Draw::Submit => submit(rng, h, c, world),
        Draw::Serve => {
            let (h, c) = busy(h, c, |h, c| waits(world, h, c));
            Step::Serve(h, c)
        }
        Draw::Advance => {
            let (h, c) = busy(h, c, |h, c| moves(world, h, c));
            Step::Advance(h, c)
        }
        Draw::Grow => Step::Grow(h, c),
        Draw::StartGrowth => Step::StartGrowth(h, c),
        Draw::Work => {
            let (h, c) = busy(h, c, |h, c| waits(world, h, c) || moves(world, h, c));
            Step::Work(h, c)
        }
        Draw::Send => Step::Send(small(rng, number(world.commands.len()).max(1))),
        Draw::Land => Step::Land(small(rng, number(world.commands.len()).max(1))),
        Draw::Close => Step::Close(h, c),
        Draw::Declare => Step::Declare(h, c),
        Draw::Register => Step::Register(h),
        Draw::Freeze => Step::Freeze(h),
        Draw::Wake => Step::Wake(chosen(h, |h| world.hosts[h].is_frozen)),
        Draw::Kill => Step::Kill(h),
        Draw::Start => Step::Start(chosen(h, |h| !world.hosts[h].has_daemon)),
        Draw::PowerOff => Step::PowerOff(h),
        Draw::Boot => Step::Boot(chosen(h, |h| !world.hosts[h].is_on)),
        Draw::Rejoin => Step::Rejoin(chosen(h, |h| world.hosts[h].is_preempted)),
        Draw::Path => Step::Path(h, small(rng, number(PATHS))),
        Draw::Tick => Step::Tick,
        Draw::Drift => Step::Drift(h),
        Draw::ArrayPower => Step::ArrayPower(if rng.bool() { 0 } else { rng.u16(..) }),
        Draw::WriteBack => Step::WriteBack(small(rng, super::array::STRUCTURES)),
        Draw::Reset => Step::Reset(small(rng, number(DEVICES))),
        Draw::Away => Step::Away,
        Draw::Silence => Step::Silence,
        Draw::Switch => Step::Switch,
    }
}

// Blocks that need growth less often than others.
fn submit(rng: &mut Rng, h: u8, c: u8, world: &World) -> Step {
    let kind = match small(rng, 8) {
        0..=3 => Kind::Write,
        4 | 5 => Kind::Flush,
        _ => Kind::Read,
    };
    let block = small(rng, number(BLOCKS)) & small(rng, number(BLOCKS));
    // The owner more often than not.
    let is_open = |h: usize| world.hosts[h].cells[usize::from(c)].phase == Phase::Serve;
    let h = if rng.bool() { h } else { chosen(h, is_open) };
    Step::Submit(h, c, kind, block)
}

fn chosen(first: u8, is_good: impl Fn(usize) -> bool) -> u8 {
    let count = number(HOSTS);
    let mut good = (0..count).map(|n| (first + n) % count).filter(|h| is_good(usize::from(*h)));
    good.next().unwrap_or(first)
}

// The first pair from this one on that has something to do.
fn busy(h: u8, c: u8, is_good: impl Fn(usize, usize) -> bool) -> (u8, u8) {
    let (hosts, cells) = (number(HOSTS), number(CELLS));
    let first = h * cells + c;
    let pairs = (0..hosts * cells).map(|n| (first + n) % (hosts * cells));
    let mut pairs = pairs.map(|at| (at / cells, at % cells));
    pairs.find(|(h, c)| is_good(usize::from(*h), usize::from(*c))).unwrap_or((h, c))
}

fn waits(world: &World, h: usize, c: usize) -> bool {
    world.hosts[h].cells[c].request.progress != Progress::Idle
}

fn moves(world: &World, h: usize, c: usize) -> bool {
    let cell = &world.hosts[h].cells[c];
    match cell.phase {
        Phase::Standby => waits(world, h, c) || cell.is_declared,
        Phase::Serve => cell.is_declared || world.asks[c] & !(1 << h) != 0,
        Phase::Lost => false,
        _ => true,
    }
}
