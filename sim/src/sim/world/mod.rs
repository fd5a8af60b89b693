//! One history: a host, its devices, a pool on them, clients, and everything that goes wrong.
//!
//! The world is stepped: each step is one event, chosen by the seed among those that are possible.
//! A crash drops the mapper; the state that survives crashes is in the [`Core`].

mod compare;
mod control;
mod crash;
mod open;
pub mod script;
mod serve;

use std::sync::Arc;

use blockd_mapper::open::Opening;

use super::content::index;
use super::core::{Core, Origin, Ring, Trace};
use super::disk::{Answered, Disk};
use super::marks::{Mark, Marks};
use super::oracle::{Breach, Oracle, Violation};
use super::profile::Profile;
use super::up::Up;

pub use crash::Crash;

/// Events of a history at the most; a history that needs more makes no progress.
const MAX_STEPS: u64 = 3_000_000;

#[derive(Debug)]
enum Phase {
    Down,
    Opening(Box<Opening>),
    Up(Box<Up>),
}

/// The treatment of the ring's memory before the present opening.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RingHanded {
    /// The one that the last process left, or an empty one where nothing depends on it.
    Right,
    /// Another one: opening must refuse it, or not need it.
    Wrong,
}

/// A history under way.
#[derive(Debug)]
pub struct World {
    /// The state that survives crashes.
    pub core: Core,
    phase: Phase,
    /// Client requests still to be started.
    operations_left: u32,
    /// Everything found at the next opening is on the media, for nothing was written since power
    /// was lost.
    durable: bool,
    accept_loss: bool,
    ring_handed: RingHanded,
    /// The ring that was set aside while a wrong one is handed over.
    right_ring: Option<Arc<Ring>>,
    /// A process death with the ring needed, and not opened since.
    killed: bool,
    finished: bool,
    /// Left by steps without a new request: the history winds up.
    winding_up: bool,
    steps: u64,
    idle: u32,
    /// Polls of the engine with a leaving device and nothing else to do.
    leaving_polls: u32,
    next_control: u64,
    next_name: u64,
    /// The name that the volume had which was renamed last.
    former_name: Option<String>,
    /// Openings that failed for a media error in a row.
    open_failures: u32,
    crashes_in_row: u32,
    /// Crashes in a row before all was read back. They become rarer: a pool with much in it would
    /// never be else.
    crashes_unread: u32,
    /// Stores to the ring after which the process dies, if it is to die in the middle.
    cut_stores: Option<u64>,
    /// Events that this is waited for: before each of them everything known is copied.
    cut_events: u32,
    /// A script decides the events: every opening is followed by reading everything back.
    scripted: bool,
    /// A volume is being deleted to check the space that it frees.
    prediction: Option<compare::Prediction>,
    /// Whether the comparison was done, or is skipped.
    compared: bool,
}

/// A host that lost its process or its power, to be used more than once.
#[derive(Clone, Debug)]
pub struct Frozen {
    disks: Vec<Disk>,
    extents: Vec<u64>,
    recorded: Vec<u64>,
    oracle: Oracle,
    ring: Vec<u64>,
    profile: Profile,
    boot: u64,
    pool_id: [u8; 16],
    contents: super::content::Contents,
    durable: bool,
    names: (u64, u64),
}

impl Frozen {
    /// Per device, how many writes a loss of power could keep or lose.
    #[must_use]
    pub fn volatile(&self) -> Vec<usize> {
        self.disks.iter().map(Disk::volatile).collect()
    }

    /// Units compared until then.
    #[must_use]
    pub fn checks(&self) -> u64 {
        self.oracle.checks()
    }

    /// A mark for [`Frozen::truncate`].
    #[must_use]
    pub fn mark(&self) -> usize {
        self.contents.mark()
    }

    /// Drops the metadata that a thawed world has written since the mark.
    pub fn truncate(&self, mark: usize) {
        self.contents.truncate(mark);
    }
}

impl World {
    /// A pool is made on empty devices.
    pub fn create(seed: u64, profile: Profile, trace: Trace) -> Result<Self, Violation> {
        let mut core = Core::new(seed, profile);
        core.trace = trace;
        let operations_left = core.profile.operations;
        let mut world = Self::around(core, operations_left);
        world.format_pool()?;
        world.durable = true;
        Ok(world)
    }

    fn around(core: Core, operations_left: u32) -> Self {
        Self {
            core,
            phase: Phase::Down,
            operations_left,
            durable: false,
            accept_loss: false,
            ring_handed: RingHanded::Right,
            right_ring: None,
            killed: false,
            finished: false,
            winding_up: false,
            steps: 0,
            idle: 0,
            leaving_polls: 0,
            next_control: 0,
            next_name: 0,
            former_name: None,
            open_failures: 0,
            crashes_in_row: 0,
            crashes_unread: 0,
            cut_stores: None,
            cut_events: 0,
            scripted: false,
            prediction: None,
            compared: false,
        }
    }

    /// A copy of the state that a crash at this moment would leave, before the crash is carried
    /// out.
    #[must_use]
    pub fn freeze(&self) -> Frozen {
        Frozen {
            disks: self.core.disks.clone(),
            extents: self.core.extents.clone(),
            recorded: self.core.recorded.clone(),
            oracle: self.core.oracle.clone(),
            ring: self.core.ring.image(),
            profile: self.core.profile.clone(),
            boot: self.core.boot,
            pool_id: self.core.pool_id,
            contents: self.core.contents.clone(),
            durable: self.durable,
            names: (self.next_control, self.next_name),
        }
    }

    /// A world that goes on from a frozen one; it has to be crashed before anything else.
    #[must_use]
    pub fn thaw(frozen: &Frozen, seed: u64) -> Self {
        let mut core = Core::new(seed, frozen.profile.clone());
        core.disks.clone_from(&frozen.disks);
        core.extents.clone_from(&frozen.extents);
        core.recorded.clone_from(&frozen.recorded);
        core.oracle = frozen.oracle.clone();
        core.ring = Ring::of(frozen.ring.iter().copied());
        core.boot = frozen.boot;
        core.pool_id = frozen.pool_id;
        core.contents = frozen.contents.clone();
        core.calm = true;
        let mut world = Self::around(core, 0);
        world.durable = frozen.durable;
        // A thawed world exists to be opened and read back.
        world.winding_up = true;
        (world.next_control, world.next_name) = frozen.names;
        world
    }

    /// Returns the covered situations.
    #[must_use]
    pub fn marks(&self) -> &Marks {
        &self.core.marks
    }

    /// Runs the history to its end.
    pub fn run(&mut self) -> Result<(), Violation> {
        while !self.finished {
            self.step()?;
        }
        Ok(())
    }

    /// Whether the history has come to its end.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// Whether all requests of the history are done.
    #[must_use]
    pub fn is_winding_up(&self) -> bool {
        self.winding_up
    }

    /// Whether a pool is being opened.
    #[must_use]
    pub fn is_opening(&self) -> bool {
        matches!(self.phase, Phase::Opening(_))
    }

    /// Whether a pool is open and has been read back.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        matches!(&self.phase, Phase::Up(up) if up.verifying.is_none())
    }

    /// One event.
    pub fn step(&mut self) -> Result<(), Violation> {
        self.steps += 1;
        if self.steps > MAX_STEPS {
            let text = format!("no end after {MAX_STEPS} events: {}", self.describe());
            return Err(Violation::new(Breach::NoProgress, text));
        }
        self.core.now += self.core.random.u64(1..20_000);
        match &self.phase {
            Phase::Down => self.start_opening(),
            Phase::Opening(_) => self.step_opening(),
            Phase::Up(_) => self.step_up(),
        }
    }

    fn describe(&self) -> String {
        match &self.phase {
            Phase::Down => "down".into(),
            Phase::Opening(_) => {
                let flights: usize = self.core.disks.iter().map(|d| d.flights().len()).sum();
                format!("opening, {flights} operations in flight, {} dead", self.core.dead())
            }
            Phase::Up(up) => up.describe_stuck(),
        }
    }

    /// Delivers an answer of a device to its requester.
    fn deliver(&mut self, origin: Origin, answered: Answered) -> Result<(), Violation> {
        match (origin, &mut self.phase) {
            (Origin::Command(mut command), Phase::Opening(opening)) => {
                let result = self.core.settle_command(&mut command, &answered);
                opening.complete(command, result);
            }
            (Origin::Command(mut command), Phase::Up(up)) => {
                let result = self.core.settle_command(&mut command, &answered);
                up.engine.complete(command, result);
                up.engine_due = true;
                up.after_call(&mut self.core);
            }
            (Origin::Part(part, op), Phase::Up(up)) => {
                up.answered(&mut self.core, part, op, false, answered)?;
            }
            (Origin::CopyRead(part, op), Phase::Up(up)) => {
                up.answered(&mut self.core, part, op, true, answered)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Chooses one of some weighted events; `None` if all weights are zero.
    fn choose(&mut self, weights: &[u32]) -> Option<usize> {
        let total: u32 = weights.iter().sum();
        if total == 0 {
            return None;
        }
        let mut left = self.core.random.u32(..total);
        for (at, weight) in weights.iter().enumerate() {
            if left < *weight {
                return Some(at);
            }
            left -= weight;
        }
        None
    }

    /// Sums the counts that show that the oracle compared something.
    #[must_use]
    pub fn checks(&self) -> u64 {
        self.core.oracle.checks()
    }

    /// Drops the mapper, like the death of the process.
    pub fn abandon(&mut self) {
        if let Phase::Up(up) = &mut self.phase {
            up.abandon();
        }
        self.phase = Phase::Down;
    }

    fn end(&mut self) {
        self.core.marks.hit(Mark::Drained);
        if self.core.damaged {
            self.core.marks.hit(Mark::DamageHarmless);
        }
        self.finished = true;
        self.abandon();
    }

    fn end_damaged(&mut self, why: &str) {
        self.core.trace.note(|| format!("damage named: {why}"));
        self.core.marks.hit(Mark::DamageNamed);
        self.finished = true;
        self.abandon();
    }
}

impl Drop for World {
    /// A history that ends in a violation leaves requests in flight.
    fn drop(&mut self) {
        self.abandon();
    }
}

/// Words of a ring for this many workers.
fn ring_words(profile: &Profile) -> usize {
    blockd_mapper::ring::words_needed(profile.workers + 1, profile.ring_capacity)
}

/// Bytes of a device.
fn device_size(disk: &Disk) -> u64 {
    index(disk.units()) as u64 * super::content::UNIT
}
