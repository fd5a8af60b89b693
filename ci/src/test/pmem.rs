//! `cargo ci test pmem`: all that can be tested of persistent memory without any.

use std::path::Path;

use super::csi;
use crate::steps::Steps;
use crate::{built, command};

/// Runs all of it; true when nothing failed.
#[must_use]
pub(crate) fn run(root: &Path) -> bool {
    let mut steps = Steps::new();
    steps.run("daemon, plugin, programs", || built::build(root));
    steps.run("mappings, lanes, regions", || {
        csi::counted(command::cargo(root).args(["test", "--package", "blockd-pmem"]))
    });
    steps.run("daemon and plugin's own tests", || {
        let packages = ["--package", "blockd", "--package", "blockd-csi"];
        csi::counted(command::cargo(root).arg("test").args(packages).args(["--lib", "pmem"]))
    });
    steps.run("pools served by a daemon", || {
        let mut cargo = command::cargo(root);
        cargo.args(["test", "--package", "blockd-tests"]).envs(built::environment(root));
        csi::counted(cargo.args(["--test", "pmem*"]))
    });
    steps.finish()
}
