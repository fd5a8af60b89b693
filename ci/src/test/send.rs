//! `cargo ci test send`: random chains of snapshots that are sent between pools of different extent
//! sizes, either end of the stream killed at every message.

use std::path::Path;

use anyhow::Result;

use super::{counted, tests_cargo};
use crate::steps::{Outcome, Steps};

/// Chains of the long form. Every `cargo ci test` runs a few of them with the tests of the
/// workspace.
const CHAINS: &str = "300";

/// Runs all tests of streams, with many chains.
#[must_use]
pub(crate) fn run(root: &Path) -> bool {
    let mut steps = Steps::new();
    steps.run("streams of snapshots, cut at every message", || chains(root));
    steps.finish()
}

fn chains(root: &Path) -> Result<Outcome> {
    let mut cargo = tests_cargo(root);
    cargo.args(["--package", "blockd", "--test", "cli_send", "--", "--nocapture"]);
    counted(cargo.env("BLOCKD_SEND_CHAINS", CHAINS))
}
