//! Snapshots that come and go beside a workload all the time, so that its first writes after each
//! are redirected, and the composite entries folded when the snapshot is gone.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::Daemon;
use serde::{Deserialize, Serialize};

use super::load;
use crate::kill::content::SECTOR;
use crate::kill::cut::Cut;
use crate::kill::family::names_in;
use crate::kill::volume::{Volume, Wrong};

/// Begins the names of these snapshots, and of nothing else.
const PREFIX: &str = "round-";
/// Snapshots that are there together at the most, of each volume.
const MOST: u64 = 2;
/// Milliseconds between two commands.
const PAUSES: RangeInclusive<u64> = 20..=200;
/// Bytes compared at a time.
const PIECE: u64 = 1 << 20;
/// After a command has failed, it is soon known that the daemon was to die.
const PATIENCE: Duration = Duration::from_secs(60);
/// Numbers of snapshots of one run: those of the next begin behind them.
const NUMBERS: u64 = 1_000_000;

/// The counts of a run.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Figures {
    pub taken: u64,
    pub deleted: u64,
    /// Pieces of snapshots that were compared.
    pub compared: u64,
    /// Composite entries, as many as were seen at a time.
    pub composite: u64,
    /// Entries that folds made plain.
    pub folded: u64,
}

impl Figures {
    /// Both together.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self {
            taken: self.taken + other.taken,
            deleted: self.deleted + other.deleted,
            compared: self.compared + other.compared,
            composite: self.composite.max(other.composite),
            folded: self.folded + other.folded,
        }
    }

    /// Whether entries became composite, and plain again.
    #[must_use]
    pub const fn is_complete(&self) -> bool {
        self.composite > 0 && self.folded > 0
    }

    /// Fails unless entries became composite, and plain again.
    ///
    /// # Errors
    /// With the figures.
    pub fn expect_folds(&self) -> Result<()> {
        ensure!(self.is_complete(), "no entry became composite, or none was folded: {self}");
        Ok(())
    }
}

impl std::fmt::Display for Figures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { taken, deleted, compared, composite, folded } = self;
        write!(
            f,
            "{taken} snapshots taken beside it and {deleted} deleted, {compared} pieces of them \
             compared, up to {composite} composite entries, {folded} folded"
        )
    }
}

/// The volumes of which snapshots are taken, with the model of those that have one.
#[derive(Debug, Default)]
pub struct Targets(Mutex<BTreeMap<String, Option<Arc<Mutex<Volume>>>>>);

impl Targets {
    /// Snapshots of this volume are taken from now on.
    pub fn add(&self, volume: &str, model: Option<&Arc<Mutex<Volume>>>) {
        self.lock().insert(volume.to_owned(), model.map(Arc::clone));
    }

    /// No more snapshots of this volume are taken; none is being taken when this returns.
    pub fn remove(&self, volume: &str) {
        self.lock().remove(volume);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Option<Arc<Mutex<Volume>>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A step in the life of a snapshot, for a ledger.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Moment {
    /// Before the request for the snapshot.
    Begins,
    /// After the answer.
    Taken,
    /// Before the request to delete the snapshot.
    Goes,
}

/// Notes a moment of the snapshot with this number; false when there is no room for it.
type Note = Box<dyn FnMut(Moment, u64) -> Result<bool> + Send>;

/// A snapshot that is there, or is being taken.
#[derive(Debug)]
struct Taken {
    number: u64,
    /// Its allowed content, and the model of its volume.
    cut: Option<(Cut, Arc<Mutex<Volume>>)>,
    noted: bool,
}

/// A command that was not answered yet.
#[derive(Debug)]
enum Doubt {
    Take(Vec<Taken>),
    Delete(Taken),
}

/// Snapshots that come and go.
pub struct Rounds {
    targets: Arc<Targets>,
    rng: fastrand::Rng,
    /// The volume that a ledger speaks of, and the ledger.
    note: Option<(String, Note)>,
    kept: Vec<Taken>,
    doubt: Option<Doubt>,
    /// Snapshots still to be taken before all are deleted.
    to_take: u64,
    number: u64,
    /// Folds of the daemon that runs, as far as they are counted.
    counted: u64,
    /// Milliseconds between two commands.
    pub pauses: RangeInclusive<u64>,
    pub figures: Figures,
    /// Whether entries were composite, and folded.
    pub complete: Arc<AtomicBool>,
    /// Called with the figures each time they were counted.
    pub report: Option<fn(&Figures)>,
}

impl std::fmt::Debug for Rounds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { kept, doubt, figures, .. } = self;
        f.debug_struct("Rounds")
            .field("figures", figures)
            .field("kept", kept)
            .field("doubt", doubt)
            .finish()
    }
}

impl Rounds {
    /// Snapshots of these volumes. Their numbers differ from those of any other `run`.
    #[must_use]
    pub fn new(targets: &Arc<Targets>, seed: u64, run: u64) -> Self {
        Self {
            targets: Arc::clone(targets),
            rng: fastrand::Rng::with_seed(seed),
            note: None,
            kept: Vec::new(),
            doubt: None,
            to_take: 0,
            number: run * NUMBERS,
            counted: 0,
            pauses: PAUSES,
            figures: Figures::default(),
            complete: Arc::default(),
            report: None,
        }
    }

    /// Snapshots of this volume are noted in a ledger.
    pub fn note_in(&mut self, volume: &str, note: Note) {
        self.note = Some((volume.to_owned(), note));
    }

    /// Snapshots that an earlier run has left are deleted like others.
    ///
    /// # Errors
    /// When the daemon lists nothing.
    pub fn adopt(&mut self, daemon: &Daemon) -> Result<()> {
        self.kept.extend(listed(daemon)?.into_iter().map(Taken::found));
        Ok(())
    }

    /// Goes on until it is stopped.
    ///
    /// # Errors
    /// When a command fails, or a snapshot holds anything else than it has to.
    pub fn run(&mut self, daemon: &Daemon, stop: &AtomicBool) -> Result<()> {
        while !stop.load(Ordering::Relaxed) {
            self.step(daemon)?;
            std::thread::sleep(Duration::from_millis(self.rng.u64(self.pauses.clone())));
        }
        Ok(())
    }

    /// The same with a daemon that is killed: then `stop` has to be set soon.
    ///
    /// # Errors
    /// As [`Self::run`], unless the daemon was to die.
    pub fn run_until_killed(&mut self, daemon: &Daemon, stop: &AtomicBool) -> Result<()> {
        let Err(error) = self.run(daemon, stop) else { return Ok(()) };
        let failed = Clock::start();
        while !stop.load(Ordering::Relaxed) {
            if failed.elapsed() > PATIENCE {
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        if error.is::<Wrong>() { Err(error) } else { Ok(()) }
    }

    /// After a start: snapshots that were answered are there, and those that were deleted are not.
    ///
    /// # Errors
    /// When that is not so.
    pub fn recover(&mut self, daemon: &Daemon) -> Result<()> {
        self.counted = 0;
        let there = listed(daemon)?;
        match self.doubt.take() {
            Some(Doubt::Take(mut taken)) => {
                taken.iter_mut().for_each(Taken::end_cut);
                let found = taken.iter().filter(|one| there.contains(&one.number)).count();
                let whole = found == 0 || found == taken.len();
                ensure!(whole, Wrong(format!("{found} snapshots of {taken:?}")));
                self.kept.extend(taken.into_iter().filter(|_| found > 0));
            }
            Some(Doubt::Delete(one)) if there.contains(&one.number) => self.kept.insert(0, one),
            _ => {}
        }
        let mut known: Vec<u64> = self.kept.iter().map(|one| one.number).collect();
        known.sort_unstable();
        ensure!(known == there, Wrong(format!("snapshots {there:?}, not {known:?}")));
        Ok(())
    }

    fn step(&mut self, daemon: &Daemon) -> Result<()> {
        if self.to_take > 0 {
            self.to_take -= 1;
            self.take(daemon)?;
            return if self.to_take == 0 { self.fetch(daemon) } else { Ok(()) };
        }
        if self.kept.is_empty() {
            self.to_take = self.rng.u64(1..=MOST);
            return self.fetch(daemon);
        }
        self.delete(daemon)
    }

    /// Takes snapshots of all volumes together, or of one.
    fn take(&mut self, daemon: &Daemon) -> Result<()> {
        let targets = Arc::clone(&self.targets);
        let targets = targets.lock();
        let mut chosen: Vec<_> = targets.iter().collect();
        if self.rng.bool() {
            chosen = self.rng.choice(chosen).into_iter().collect();
        }
        let (mut words, mut taken) = (vec!["snapshot".to_owned()], Vec::new());
        for (volume, model) in chosen {
            let number = self.number + 1;
            let noted = self.note.as_ref().is_some_and(|(of, _)| of == volume);
            if noted && !self.note(Moment::Begins, number)? {
                continue;
            }
            self.number = number;
            let begin = |model: &Arc<Mutex<Volume>>| {
                (Cut::begin(&mut load::lock(model)), Arc::clone(model))
            };
            taken.push(Taken { number, cut: model.as_ref().map(begin), noted });
            words.push(format!("{volume}={}", named(number)));
        }
        if taken.is_empty() {
            return Ok(());
        }
        let count = taken.len() as u64;
        self.doubt = Some(Doubt::Take(taken));
        daemon.cli(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
        let Some(Doubt::Take(mut taken)) = self.doubt.take() else { return Ok(()) };
        for one in &mut taken {
            one.end_cut();
            if one.noted {
                self.note(Moment::Taken, one.number)?;
            }
        }
        self.kept.append(&mut taken);
        self.figures.taken += count;
        Ok(())
    }

    /// Deletes the oldest snapshot, after a comparison.
    fn delete(&mut self, daemon: &Daemon) -> Result<()> {
        let one = self.kept.remove(0);
        if one.noted && !self.note(Moment::Goes, one.number)? {
            self.kept.insert(0, one);
            return Ok(());
        }
        let name = named(one.number);
        if let Some((cut, _)) = &one.cut {
            // The start is written over and over.
            let pieces = [0, self.rng.u64(..cut.size() / PIECE)];
            let check = |first, data: &[u8]| Ok(cut.check(first, data)?);
            let compared = read(daemon, one.number, &pieces, check);
            if let Err(error) = compared {
                self.kept.insert(0, one);
                return Err(error);
            }
            self.figures.compared += 2;
        }
        self.doubt = Some(Doubt::Delete(one));
        daemon.cli(&["del", "--force", &name])?;
        self.doubt = None;
        self.figures.deleted += 1;
        Ok(())
    }

    /// Counts composite entries and folds.
    fn fetch(&mut self, daemon: &Daemon) -> Result<()> {
        let status = daemon.cli(&["pool", "fold", "--status"])?;
        let number = |name: &str| {
            let found = status["folds"][name].as_u64();
            found.with_context(|| format!("no number {name} in {status}"))
        };
        let folded = number("folded")?;
        self.figures.folded += folded.saturating_sub(self.counted);
        self.counted = folded;
        self.figures.composite = self.figures.composite.max(number("composite_entries")?);
        self.complete.store(self.figures.is_complete(), Ordering::Relaxed);
        if let Some(report) = self.report {
            report(&self.figures);
        }
        Ok(())
    }

    fn note(&mut self, moment: Moment, number: u64) -> Result<bool> {
        self.note.as_mut().map_or(Ok(true), |(_, note)| note(moment, number))
    }
}

impl Taken {
    const fn found(number: u64) -> Self {
        Self { number, cut: None, noted: false }
    }

    fn end_cut(&mut self) {
        if let Some((cut, model)) = &mut self.cut {
            cut.end(&mut load::lock(model));
        }
    }
}

/// Pieces of a snapshot: all that lie in it as a whole.
#[must_use]
pub fn pieces(size: u64) -> Vec<u64> {
    (0..size / PIECE).collect()
}

/// Reads pieces of a snapshot, each with the number of its first sector.
///
/// # Errors
/// When it can't be read, or the caller fails.
pub fn read(
    daemon: &Daemon,
    number: u64,
    pieces: &[u64],
    mut take: impl FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    let name = named(number);
    daemon.cli(&["attach", "--nbd", &name])?;
    let mut connection = daemon.connect(&name)?;
    for piece in pieces {
        let data = connection.read(piece * PIECE, usize::try_from(PIECE)?)?;
        take(piece * PIECE / SECTOR as u64, &data).with_context(|| name.clone())?;
    }
    Ok(())
}

fn named(number: u64) -> String {
    format!("{PREFIX}{number}")
}

/// The numbers of the snapshots that are there.
///
/// # Errors
/// When the daemon does not list them.
pub fn listed(daemon: &Daemon) -> Result<Vec<u64>> {
    let mut names = Vec::new();
    names_in(&daemon.cli(&["list"])?, PREFIX, &mut names);
    let mut numbers = Vec::new();
    for name in names {
        numbers.push(name[PREFIX.len()..].parse().with_context(|| name.clone())?);
    }
    numbers.sort_unstable();
    numbers.dedup();
    Ok(numbers)
}
