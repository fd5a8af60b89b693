//! `cargo ci test neighbours`: the effect of attackers and heavy neighbours on other clients.

use std::path::Path;

use anyhow::Result;

use super::{counted, tests_cargo};
use crate::steps::{Outcome, Steps};
use crate::{built, setup};

/// Runs the simulation, then the matrix of a real daemon, which takes the arguments.
#[must_use]
pub(crate) fn run(root: &Path, arguments: &[String]) -> bool {
    let mut steps = Steps::new();
    steps.run("simulation of the scheduler", || simulation(root));
    steps.run("daemon, plugin, programs", || built::build(root));
    steps.run("attackers beside victims of a real daemon", || {
        setup::ensure(&setup::all())?;
        built::run(root, "neighbours", arguments).map(|()| Outcome::Passed)
    });
    steps.finish()
}

/// The deterministic simulation of the scheduler. It counts in bytes and turns, so that a miss
/// there is a fault, while a miss by the wall clock is repeated.
fn simulation(root: &Path) -> Result<Outcome> {
    let mut cargo = tests_cargo(root);
    counted(cargo.args(["--package", "blockd", "--test", "neighbours", "--", "--nocapture"]))
}
