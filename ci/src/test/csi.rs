//! `cargo ci test csi`: the conformance suite and the tests of the CSI plugin, on a pool in a file.

use std::path::Path;

use anyhow::{Result, bail};

use super::tests_passed;
use crate::steps::{Outcome, Steps};
use crate::{command, forward, setup};

/// Binaries that start as they are shipped. They are built together, and without anything else that
/// would switch on what they ship without.
const SHIPPED: [(&str, &str); 2] = [("BLOCKD_BIN", "blockd"), ("BLOCKD_CSI_BIN", "blockd-csi")];

/// Test files of the tests package that start the plugin.
const FILES: [&str; 3] = ["csi", "csi_changes", "csi_kill"];

/// Runs all of it; true when nothing failed. With arguments, those go to the suite, and it alone
/// runs: on another driver, say.
#[must_use]
pub(crate) fn run(root: &Path, arguments: &[String]) -> bool {
    let mut steps = Steps::new();
    steps.run("daemon and plugin", || build(root));
    steps.run("csi_conformance", || {
        forward::tests(root, "csi_conformance", arguments).map(|()| Outcome::Passed)
    });
    if arguments.is_empty() {
        steps.run("the plugin's own tests", || {
            counted(command::cargo(root).args(["test", "--package", "blockd-csi"]))
        });
        steps.run("plugin and daemon together", || together(root));
    }
    steps.finish()
}

/// Daemon and plugin in release form.
pub(crate) fn build(root: &Path) -> Result<Outcome> {
    setup::ensure(&[setup::LIBCLANG])?;
    let packages = SHIPPED.iter().flat_map(|(_, package)| ["--package", package]);
    command::run(command::cargo(root).args(["build", "--release"]).args(packages))?;
    Ok(Outcome::Passed)
}

/// Where tests find what [`build`] has built.
pub(super) fn environment(root: &Path) -> [(&'static str, std::path::PathBuf); 2] {
    let release = command::target_dir(root).join("release");
    SHIPPED.map(|(variable, package)| (variable, release.join(package)))
}

fn together(root: &Path) -> Result<Outcome> {
    let mut cargo = command::cargo(root);
    cargo.args(["test", "--package", "blockd-tests"]).envs(environment(root));
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
