//! Kill rounds: the real daemon under verified load dies at a drawn moment, is started anew, and
//! has to have everything that it answered.

pub mod churn;
pub mod content;
pub mod cut;
pub mod family;
pub mod load;
pub mod moves;
pub mod renames;
pub mod volume;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::{Daemon, Ended, Settings};
use blockd_testkit::tools;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use churn::Churn;
use family::Family;
use load::{Control, Load, Shared, compare};
use moves::Moves;
use renames::Renames;
use volume::{Unanswered, Volume};

/// IO of a dead daemon that takes longer than this to end is late: its successor could have been
/// there before it.
const LATE: Duration = Duration::from_millis(20);

/// A lock that is held for longer than this after its owner's process is gone is held by its IO.
const OUTLIVED: Duration = Duration::from_millis(3);

/// The exit code of a daemon that found another one in its place.
const IN_USE: i32 = 7;

/// Giving up on a lock that a dead daemon's IO holds.
const LOCK_LIMIT: Duration = Duration::from_secs(30);

/// The parameters of a run.
#[derive(Clone, Debug)]
pub struct Options {
    pub rounds: u64,
    pub seed: u64,
    /// A block device or a file for the pool; a file of its own without one.
    pub device: Option<PathBuf>,
    /// The pool is in memory: the daemon copies to it, and a kill may cut a copy short.
    pub in_memory: bool,
    /// Bytes of a pool file.
    pub pool_size: u64,
    pub volumes: u32,
    /// Bytes of a volume.
    pub volume_size: u64,
    /// Connections to each volume.
    pub connections: u32,
    /// Longest load before the end, in milliseconds.
    pub longest_ms: u64,
    /// Whether each end is by SIGTERM; one in ten without a word here.
    pub in_order: Option<bool>,
    /// Whether devices come and go, and a pool changes its name.
    pub moves: bool,
}

/// The counts of a run.
#[derive(Clone, Copy, Default, Debug, Serialize, Deserialize)]
pub struct Figures {
    pub rounds: u64,
    /// Ends without a warning, those during a start included.
    pub kills: u64,
    pub kills_during_start: u64,
    /// Starts that were refused since the dead daemon's process was still there.
    pub refused_starts: u64,
    /// Ends by SIGTERM.
    pub stops: u64,
    pub operations: u64,
    pub flushes: u64,
    pub volume_changes: u64,
    /// Commands of a family of snapshots and clones, and those that an end met.
    pub family_changes: u64,
    /// Devices that left the pool, of them in exchange for another one, those that shrank, and
    /// those that stayed as they were after all.
    pub devices_left: u64,
    pub devices_replaced: u64,
    pub devices_shrunk: u64,
    pub devices_kept: u64,
    /// Changes of the names of a pool and of a volume in it.
    pub renames: u64,
    pub met: family::Met,
    pub unanswered: u64,
    /// Sectors of unanswered requests, by what they held afterwards.
    pub unanswered_new: u64,
    pub unanswered_old: u64,
    pub unanswered_torn: u64,
    /// Bytes compared after starts.
    pub compared: u64,
    /// Bytes compared in the closed pool, by a reader of another making.
    pub read_offline: u64,
    pub lost: u64,
    /// Rounds in which IO of the dead daemon ended late.
    pub late_rounds: u64,
    /// Rounds in which the lock was held when the process was gone already, by IO alone.
    pub outlived: u64,
    /// Starts that had to wait for a dead daemon's IO, by their own account.
    pub waits: u64,
    /// The longest that IO of a dead daemon took, and the longest start.
    pub latest_ms: u64,
    pub slowest_start_ms: u64,
}

impl Figures {
    /// Both together.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self {
            rounds: self.rounds + other.rounds,
            kills: self.kills + other.kills,
            kills_during_start: self.kills_during_start + other.kills_during_start,
            refused_starts: self.refused_starts + other.refused_starts,
            stops: self.stops + other.stops,
            operations: self.operations + other.operations,
            flushes: self.flushes + other.flushes,
            volume_changes: self.volume_changes + other.volume_changes,
            family_changes: self.family_changes + other.family_changes,
            devices_left: self.devices_left + other.devices_left,
            devices_replaced: self.devices_replaced + other.devices_replaced,
            devices_shrunk: self.devices_shrunk + other.devices_shrunk,
            devices_kept: self.devices_kept + other.devices_kept,
            renames: self.renames + other.renames,
            met: self.met.with(other.met),
            unanswered: self.unanswered + other.unanswered,
            unanswered_new: self.unanswered_new + other.unanswered_new,
            unanswered_old: self.unanswered_old + other.unanswered_old,
            unanswered_torn: self.unanswered_torn + other.unanswered_torn,
            compared: self.compared + other.compared,
            read_offline: self.read_offline + other.read_offline,
            lost: self.lost + other.lost,
            late_rounds: self.late_rounds + other.late_rounds,
            outlived: self.outlived + other.outlived,
            waits: self.waits + other.waits,
            latest_ms: self.latest_ms.max(other.latest_ms),
            slowest_start_ms: self.slowest_start_ms.max(other.slowest_start_ms),
        }
    }
}

/// A daemon and what it has to hold.
struct Rounds<'a> {
    options: &'a Options,
    daemon: Daemon,
    volumes: Vec<Arc<Shared>>,
    churn: Churn,
    family: Family,
    moves: Option<Moves>,
    renames: Option<Renames>,
    rng: fastrand::Rng,
    figures: Figures,
}

/// Runs the rounds.
///
/// # Errors
/// At the first thing that is wrong, with the round it happened in. The figures are those until
/// then.
pub fn run(options: &Options, mut each: impl FnMut(&Figures)) -> (Figures, Result<()>) {
    let mut rounds = match Rounds::new(options) {
        Ok(rounds) => rounds,
        Err(error) => return (Figures::default(), Err(error)),
    };
    let mut result = Ok(());
    for round in 0..options.rounds {
        let done = rounds.round().with_context(|| {
            format!("round {round} of seed {}\n{}", options.seed, rounds.daemon.last_words())
        });
        if let Err(error) = done {
            let wrong = error.downcast_ref::<volume::Wrong>().is_some();
            rounds.figures.lost += u64::from(wrong);
            result = Err(error);
            break;
        }
        each(&rounds.figures);
    }
    let log = rounds.daemon.log();
    rounds.figures.waits = log.matches("waited for the owner lock").count() as u64;
    let end = result.and_then(|()| rounds.finish().context("after the last round"));
    (rounds.figures, end)
}

impl<'a> Rounds<'a> {
    fn new(options: &'a Options) -> Result<Self> {
        let settings = Settings {
            pool: options.device.clone(),
            pool_size: options.pool_size,
            ..Settings::default()
        };
        let mut daemon = Daemon::new("kill", &settings)?;
        daemon.start()?;
        let mut rng = fastrand::Rng::with_seed(options.seed);
        let moves = options.moves.then(|| Moves::new(&daemon, None, rng.u64(..))).transpose()?;
        let sub_block = 4096;
        let mut volumes = Vec::new();
        for number in 0..options.volumes {
            let name = format!("v{number}");
            daemon.add(&name, options.volume_size)?;
            let new = Volume::new(&name, churn::next_id(), options.volume_size, sub_block);
            volumes.push(Shared::new(if options.in_memory { new.that_tears() } else { new }));
        }
        let churn = Churn::new(rng.u64(..), sub_block, options.in_memory);
        let family = Family::new(rng.u64(..), None)?;
        let (seed, id) = (rng.u64(..), churn::next_id());
        let renames = options.moves.then(|| Renames::new(&daemon, seed, id, sub_block));
        let renames = renames.transpose()?;
        let figures = Figures::default();
        Ok(Self { options, daemon, volumes, churn, family, moves, renames, rng, figures })
    }

    /// Load, end, start, comparison.
    fn round(&mut self) -> Result<()> {
        let drawn = self.rng.u8(..10) == 0;
        let in_order = self.options.in_order.unwrap_or(drawn);
        let control = Arc::new(Control::default());
        let loads = self.start_loads(&control)?;
        let pause = Duration::from_millis(self.rng.u64(10..=self.options.longest_ms));
        let (daemon, churn, family) = (&self.daemon, &mut self.churn, &mut self.family);
        let (moves, renames) = (self.moves.as_mut(), self.renames.as_mut());
        let over = AtomicBool::new(false);
        let died = std::thread::scope(|scope| {
            let churning = scope.spawn(|| churn.run(daemon, &control));
            let changing = scope.spawn(|| family.run(daemon, &over));
            let moving = moves.map(|moves| scope.spawn(|| moves.run(daemon, &over)));
            let renaming = renames.map(|renames| scope.spawn(|| renames.run(daemon, &over)));
            std::thread::sleep(pause);
            let signal = if in_order { Signal::SIGTERM } else { Signal::SIGKILL };
            control.ending.store(in_order, Ordering::Relaxed);
            let died = Clock::start();
            let signalled = daemon.signal(signal);
            over.store(true, Ordering::Relaxed);
            signalled?;
            // An orderly end has to cope with requests that go on coming. After a kill nothing
            // new is sent, so that the successor can be started; what is under way is still taken.
            control.stop.store(!in_order, Ordering::Relaxed);
            for thread in [churning, changing] {
                match thread.join() {
                    Ok(result) => result?,
                    Err(_) => bail!("a thread of volumes that come and go panicked"),
                }
            }
            for thread in moving.into_iter().chain(renaming) {
                match thread.join() {
                    Ok(result) => result?,
                    Err(_) => bail!("a thread of devices or names that change panicked"),
                }
            }
            Ok(died)
        })?;
        let runs = if in_order { self.ended_in_order() } else { self.bury(died) };
        for load in loads {
            load.join()?;
        }
        self.note(&control);
        if !runs? {
            self.restart()?;
        }
        self.compare()?;
        self.figures.rounds += 1;
        Ok(())
    }

    fn ended_in_order(&mut self) -> Result<bool> {
        let status = self.daemon.wait(LOCK_LIMIT)?;
        ensure!(status.code() == Some(0), "after SIGTERM the daemon ended with {status}");
        self.figures.stops += 1;
        Ok(false)
    }

    fn start_loads(&mut self, control: &Arc<Control>) -> Result<Vec<Load>> {
        let mut loads = Vec::new();
        for (name, shared) in self.loaded()? {
            for _ in 0..self.options.connections {
                let connection = self.daemon.connect(&name)?;
                let depth = self.rng.usize(1..=32);
                let seed = self.rng.u64(..);
                loads.push(Load::start(connection, &shared, control, depth, seed)?);
            }
        }
        Ok(loads)
    }

    /// The volumes under load, with their present names.
    fn loaded(&mut self) -> Result<Vec<(String, Arc<Shared>)>> {
        let named = |shared: &Arc<Shared>| (shared.volume().name.clone(), Arc::clone(shared));
        let mut loaded: Vec<_> = self.volumes.iter().map(named).collect();
        if let Some(renames) = &mut self.renames {
            loaded.push((renames.find(&self.daemon)?, Arc::clone(&renames.shared)));
        }
        Ok(loaded)
    }

    fn note(&mut self, control: &Control) {
        self.figures.operations += control.counts.answered.load(Ordering::Relaxed);
        self.figures.flushes += control.counts.flushes.load(Ordering::Relaxed);
        self.figures.volume_changes = self.churn.changes;
        self.figures.family_changes = self.family.changes.load(Ordering::Relaxed);
        if let Some(moves) = &self.moves {
            let moves::Counts { left, replaced, shrunk, aborted } = moves.counts;
            (self.figures.devices_left, self.figures.devices_replaced) = (left, replaced);
            (self.figures.devices_shrunk, self.figures.devices_kept) = (shrunk, aborted);
        }
        self.figures.renames = self.renames.as_ref().map_or(0, |renames| renames.changes);
    }

    /// A killed daemon: how long does its IO go on? Gives whether its successor runs already.
    fn bury(&mut self, died: Clock) -> Result<bool> {
        // Every other round does not check, and the next daemon has to wait for the lock by itself.
        let look = self.rng.bool();
        let took = if look {
            self.daemon.wait(LOCK_LIMIT)?;
            let gone = died.elapsed();
            wait_for_lock(self.daemon.pool())?;
            let free = died.elapsed();
            self.figures.outlived += u64::from(free - gone > OUTLIVED);
            free
        } else {
            let mut child = self.daemon.let_go().context("the daemon does not run")?;
            let waiting = std::thread::spawn(move || {
                let _ = child.wait();
                died.elapsed()
            });
            self.replace()?;
            waiting.join().unwrap_or_default()
        };
        self.figures.kills += 1;
        self.figures.late_rounds += u64::from(took > LATE);
        self.figures.latest_ms = self.figures.latest_ms.max(millis(took));
        Ok(!look)
    }

    /// Starts a daemon while the dead one's process may still be there, as often as it takes.
    fn replace(&mut self) -> Result<()> {
        let start = Clock::start();
        loop {
            match self.daemon.start() {
                Ok(_) => return Ok(()),
                Err(error) => {
                    let ended = error.downcast_ref::<Ended>();
                    let in_use = ended.is_some_and(|ended| ended.status.code() == Some(IN_USE));
                    if !in_use || start.elapsed() > LOCK_LIMIT {
                        return Err(error);
                    }
                    self.figures.refused_starts += 1;
                }
            }
        }
    }

    /// Starts, now and then several times: dying while a pool is being opened must do no harm.
    fn restart(&mut self) -> Result<()> {
        while self.options.in_order != Some(true) && self.rng.u8(..3) == 0 {
            self.daemon.spawn()?;
            std::thread::sleep(Duration::from_millis(self.rng.u64(..self.options.longest_ms / 4)));
            if self.daemon.kill().is_err() {
                bail!("the daemon ended while it was started");
            }
            self.figures.kills += 1;
            self.figures.kills_during_start += 1;
        }
        let took = self.daemon.start()?;
        self.figures.slowest_start_ms = self.figures.slowest_start_ms.max(millis(took));
        Ok(())
    }

    fn compare(&mut self) -> Result<()> {
        for (name, shared) in self.loaded()? {
            let connection = self.daemon.connect(&name)?;
            ensure!(connection.size == shared.volume().size(), "{name} has another size");
            let unanswered = compare(connection, &shared)?;
            self.figures.unanswered += unanswered.requests;
            self.figures.unanswered_new += unanswered.new;
            self.figures.unanswered_old += unanswered.old;
            self.figures.unanswered_torn += unanswered.torn;
            self.figures.compared += shared.volume().size();
        }
        self.churn.compare(&self.daemon)?;
        self.family.compare(&self.daemon)?;
        if let Some(moves) = &self.moves {
            moves.compare(&self.daemon)?;
        }
        self.figures.met = self.family.met;
        Ok(())
    }

    /// Once more in order, and everything compared again.
    fn finish(&mut self) -> Result<()> {
        let names: Vec<String> = self.volumes.iter().map(|v| v.volume().name.clone()).collect();
        churn::expect_listed(&self.daemon, &names)?;
        let status = self.daemon.stop()?;
        ensure!(status.code() == Some(0), "after SIGTERM the daemon ended with {status}");
        self.daemon.start()?;
        self.compare()?;
        let devices = moves::in_pool(&self.daemon)?;
        let status = self.daemon.stop()?;
        ensure!(status.code() == Some(0), "after SIGTERM the daemon ended with {status}");
        if self.options.device.is_none() { self.read_offline(&devices) } else { Ok(()) }
    }

    /// A reader of the format that shares no code with the daemon checks the closed pool, and
    /// finds the same in it.
    fn read_offline(&mut self, devices: &[PathBuf]) -> Result<()> {
        let reader = tools::workspace_root().join("sim/reader/blockd_reader.py");
        let python = tools::find("python3")?;
        let read = |words: &[&str]| {
            tools::output(Command::new(&python).arg(&reader).args(devices).args(words))
        };
        read(&["check"]).context("checking the closed pool")?;
        for shared in &self.volumes {
            let mut volume = shared.volume();
            let data = read(&["read", &volume.name])?;
            ensure!(data.len() as u64 == volume.size(), "{} has another size", volume.name);
            volume.recovered(0, &data, &mut Unanswered::default())?;
            self.figures.read_offline += volume.size();
        }
        Ok(())
    }
}

/// Waits until the owner lock of a pool is free.
fn wait_for_lock(pool: &Path) -> Result<()> {
    let start = Clock::start();
    loop {
        let file = std::fs::File::open(pool).context("opening the pool for its lock")?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(_) => return Ok(()),
            Err((_, Errno::EWOULDBLOCK)) if start.elapsed() < LOCK_LIMIT => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err((_, error)) => bail!("the owner lock after the owner's death: {error}"),
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
