//! Volumes that come and go while others are written to: made, filled a little and deleted through
//! the command line.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::daemon::Daemon;

use super::load::{Control, Shared, compare, fill_some};
use super::volume::{Volume, Wrong};

/// Names that are used again and again: a new volume must not show what the last one held.
const NAMES: [&str; 3] = ["c0", "c1", "c2"];
const SIZE: u64 = 4 << 20;

/// The known state of one name.
#[derive(Debug)]
enum State {
    Absent,
    Present(Arc<Shared>),
    /// Its making was not answered. It is there and empty, or not there.
    PerhapsMade,
    /// Its deletion was not answered. It is there as it was, or not there.
    PerhapsGone(Arc<Shared>),
}

/// The names and what is known of them.
#[derive(Debug)]
pub struct Churn {
    states: Vec<State>,
    rng: fastrand::Rng,
    sub_block: u64,
    tears: bool,
    /// Answered changes.
    pub changes: u64,
}

impl Churn {
    /// None of the volumes is there.
    #[must_use]
    pub fn new(seed: u64, sub_block: u64, tears: bool) -> Self {
        let states = NAMES.iter().map(|_| State::Absent).collect();
        Self { states, rng: fastrand::Rng::with_seed(seed), sub_block, tears, changes: 0 }
    }

    /// Makes and deletes until it is stopped, or until the daemon is gone.
    ///
    /// # Errors
    /// When something was wrong before the daemon ended.
    pub fn run(&mut self, daemon: &Daemon, control: &Control) -> Result<(), Wrong> {
        while !control.stop.load(Ordering::Relaxed) {
            if let Err(error) = self.step(daemon) {
                if let Some(wrong) = error.downcast_ref::<Wrong>() {
                    return Err(wrong.clone());
                }
                // Whatever failed, the daemon may be gone; the comparison after its start decides.
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(self.rng.u64(1..20)));
        }
        Ok(())
    }

    fn step(&mut self, daemon: &Daemon) -> Result<()> {
        let number = self.rng.usize(..NAMES.len());
        let name = NAMES[number];
        match std::mem::replace(&mut self.states[number], State::PerhapsMade) {
            State::Absent => {
                daemon.add(name, SIZE)?;
                let shared = Shared::new(empty(name, self.sub_block, self.tears));
                self.states[number] = State::Present(Arc::clone(&shared));
                let mut connection = daemon.connect(name)?;
                fill_some(&mut connection, &mut shared.volume(), self.rng.u64(..))?;
            }
            State::Present(shared) => {
                self.states[number] = State::PerhapsGone(shared);
                daemon.cli(&["del", "--force", name])?;
                self.states[number] = State::Absent;
            }
            unknown => {
                self.states[number] = unknown;
                return Ok(());
            }
        }
        self.changes += 1;
        Ok(())
    }

    /// After a start: what was answered is so, and nothing holds what it should not.
    ///
    /// # Errors
    /// When that is not the case.
    pub fn compare(&mut self, daemon: &Daemon) -> Result<()> {
        let listed = daemon.cli(&["list"])?;
        let there = |name: &str| has_name(&listed, name);
        for (state, name) in self.states.iter_mut().zip(NAMES) {
            let known = std::mem::replace(state, State::Absent);
            *state = match (known, there(name)) {
                (State::Absent, true) => {
                    return Err(Wrong(format!("{name} is there, yet was deleted")).into());
                }
                (State::Present(_), false) => {
                    return Err(Wrong(format!("{name} is gone, yet was made")).into());
                }
                (State::Absent | State::PerhapsMade | State::PerhapsGone(_), false) => {
                    State::Absent
                }
                (State::PerhapsMade, true) => {
                    State::Present(Shared::new(empty(name, self.sub_block, self.tears)))
                }
                (State::Present(shared) | State::PerhapsGone(shared), true) => {
                    State::Present(shared)
                }
            };
            if let State::Present(shared) = state {
                // Making a volume and exporting it are two steps, and the daemon died between them.
                daemon.cli(&["attach", name]).with_context(|| format!("attaching {name}"))?;
                compare(daemon.connect(name)?, shared)?;
            }
        }
        Ok(())
    }
}

/// Whether a list of volumes has one of this name.
fn has_name(listed: &serde_json::Value, name: &str) -> bool {
    match listed {
        serde_json::Value::Array(rows) => rows.iter().any(|row| has_name(row, name)),
        serde_json::Value::Object(fields) => {
            fields.get("name").and_then(|found| found.as_str()) == Some(name)
                || fields.values().any(|value| has_name(value, name))
        }
        _ => false,
    }
}

fn empty(name: &str, sub_block: u64, tears: bool) -> Volume {
    let new = Volume::new(name, next_id(), SIZE, sub_block);
    if tears { new.that_tears() } else { new }
}

/// Numbers for volumes, never used twice: contents distinguish volumes by them.
pub fn next_id() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The volumes of the names, for a look from outside.
///
/// # Errors
/// When one that has to be there is not among those listed.
pub fn expect_listed(daemon: &Daemon, names: &[String]) -> Result<()> {
    let listed = daemon.cli(&["list"])?;
    for name in names {
        ensure!(has_name(&listed, name), Wrong(format!("{name} is not listed: {listed}")));
    }
    Ok(())
}
