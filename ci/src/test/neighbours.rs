//! `cargo ci test neighbours`: what attackers and heavy neighbours leave to other clients.

use std::path::Path;

use anyhow::Result;

use crate::steps::{Outcome, Steps};
use crate::{built, forward, setup};

/// The deterministic simulation of the scheduler: a binary of the simulator's package. It counts in
/// bytes and turns, so that a miss there is a fault, while a miss by the wall clock is repeated.
const SIMULATION: &str = "neighbours";

/// Runs the simulation, then the matrix of a real daemon, which takes the arguments.
#[must_use]
pub(crate) fn run(root: &Path, arguments: &[String]) -> bool {
    let mut steps = Steps::new();
    steps.run("simulation of the scheduler", || simulation(root));
    steps.run("daemon, plugin, programs", || built::build(root));
    steps.run("attackers beside victims of a real daemon", || {
        setup::ensure(&[setup::LIBCLANG])?;
        built::run(root, "neighbours", arguments).map(|()| Outcome::Passed)
    });
    steps.finish()
}

fn simulation(root: &Path) -> Result<Outcome> {
    let source = root.join("sim").join("src").join("bin").join(format!("{SIMULATION}.rs"));
    if !source.exists() {
        return Ok(Outcome::NotRun("the simulator has no program for it yet"));
    }
    forward::sim(root, SIMULATION, &[]).map(|()| Outcome::Passed)
}
