//! `cargo ci test pmem`: all that can be tested of persistent memory without any.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::csi;
use crate::steps::{Outcome, Steps};
use crate::{built, command, setup};

/// Processors on which the memory is only synced, not written past the caches.
const AARCH64: &str = "aarch64-unknown-linux-gnu";
/// Tests that an emulated process cannot run: they receive SIGBUS, or start themselves again.
const NOT_EMULATED: [&str; 2] =
    ["news_of_bad_memory_in_a_mapping_does_not_kill", "memory_that_fails_elsewhere_still_kills"];

/// Packages of daemon and plugin with tests about it.
const PARTS: [&str; 6] =
    ["blockd-media", "blockd-serve", "blockd-control", "blockd-cli", "blockd", "blockd-csi"];

/// Words that names of tests have which are about it, in daemon and plugin.
const OWN: [&str; 6] = ["--", "pmem", "direct::", "regions::", "settle::", "placement::"];

/// Runs all of it; true when nothing failed.
#[must_use]
pub(crate) fn run(root: &Path) -> bool {
    let mut steps = Steps::new();
    steps.run("daemon, plugin, programs", || built::build(root));
    steps.run("mappings, lanes, regions", || {
        csi::counted(command::cargo(root).args(["test", "--package", "blockd-pmem"]))
    });
    steps.run("the same on emulated aarch64", || aarch64(root));
    steps.run("daemon and plugin's own tests", || {
        let mut cargo = command::cargo(root);
        cargo.arg("test").args(PARTS.iter().flat_map(|part| ["--package", part]));
        csi::counted(cargo.arg("--lib").args(OWN))
    });
    steps.run("pools served by a daemon", || {
        let mut cargo = command::cargo(root);
        cargo.args(["test", "--package", "blockd-tests"]).envs(built::environment(root));
        csi::counted(cargo.args(["--test", "pmem*"]))
    });
    steps.finish()
}

/// Runs the package's own tests as they are compiled for [`AARCH64`].
fn aarch64(root: &Path) -> Result<Outcome> {
    if !command::installed("rustup") {
        return Ok(Outcome::NotRun("rustup is not there to get another target with"));
    }
    setup::ensure(&setup::AARCH64)?;
    let mut rustup = Command::new("rustup");
    command::run(rustup.current_dir(root).args(["target", "add", AARCH64]))?;
    let mut cargo = command::cargo(root);
    let [linker, emulator] = setup::AARCH64.map(|tool| tool.program);
    let variable =
        |name: &str| format!("CARGO_TARGET_{}_{name}", AARCH64.to_uppercase().replace('-', "_"));
    cargo.env(variable("LINKER"), linker);
    cargo.env(variable("RUNNER"), format!("{emulator} -L /usr/aarch64-linux-gnu"));
    cargo.args(["test", "--package", "blockd-pmem", "--lib", "--target", AARCH64, "--"]);
    csi::counted(cargo.args(NOT_EMULATED.map(|name| format!("--skip={name}"))))
}
