//! `cargo ci test csi`: the conformance suite and the tests of the CSI plugin, on a pool in a file.

use std::path::Path;

use anyhow::{Result, bail};

use super::tests_passed;
use crate::steps::{Outcome, Steps};
use crate::{built, command};

/// The plugin's packages.
const PACKAGES: [&str; 5] =
    ["blockd-csi-base", "blockd-extender", "blockd-kata", "blockd-record", "blockd-csi"];

/// Test files of the tests package that start the plugin.
const FILES: [&str; 5] = ["cluster", "csi", "csi_changes", "csi_kill", "csi_move"];

/// Runs all of it; true when nothing failed. With arguments, those go to the suite, and it alone
/// runs: on another driver, say.
#[must_use]
pub(crate) fn run(root: &Path, arguments: &[String]) -> bool {
    let mut steps = Steps::new();
    steps.run("daemon, plugin, programs", || built::build(root));
    steps.run("csi_conformance", || {
        built::run(root, "csi_conformance", arguments).map(|()| Outcome::Passed)
    });
    if arguments.is_empty() {
        steps.run("the plugin's own tests", || {
            let mut cargo = command::cargo(root);
            cargo.arg("test").args(PACKAGES.iter().flat_map(|package| ["--package", package]));
            counted(&mut cargo)
        });
        steps.run("plugin and daemon together", || together(root));
    }
    steps.finish()
}

fn together(root: &Path) -> Result<Outcome> {
    let mut cargo = command::cargo(root);
    cargo.args(["test", "--package", "blockd-tests"]).envs(built::environment(root));
    for file in FILES {
        cargo.args(["--test", file]);
    }
    counted(&mut cargo)
}

pub(super) fn counted(command: &mut std::process::Command) -> Result<Outcome> {
    let passed = tests_passed(&command::run_and_keep(command)?);
    if passed == 0 {
        bail!("no test ran");
    }
    println!("{passed} tests passed");
    Ok(Outcome::Passed)
}
