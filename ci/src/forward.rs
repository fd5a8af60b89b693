//! Subcommands that build another package's binary in release form and hand their arguments on.

use std::path::Path;

use anyhow::Result;

use crate::{command, setup};

/// A binary of the tests package: `model`, `sim` or `crash`.
///
/// # Errors
/// When it cannot be built or does not exit with 0.
pub(crate) fn tests(root: &Path, binary: &str, arguments: &[String]) -> Result<()> {
    release(root, "blockd-tests", binary, arguments)
}

/// The mapper's figures, then the pump with its defaults, as root on a loop device too: together
/// they are the whole table.
///
/// # Errors
/// When either cannot be built or does not exit with 0, or a tool is missing.
pub(crate) fn bench_mapper(root: &Path, arguments: &[String]) -> Result<()> {
    setup::ensure(&[setup::FIO, setup::LOSETUP])?;
    let budgets = release(root, "blockd-bench", "mapper", arguments);
    // A missed budget must not hide the pump's figures.
    let arguments =
        if setup::is_root().unwrap_or(false) { &["--loop".to_owned()][..] } else { &[] };
    let pump = release(root, "blockd-bench", "pump", arguments);
    budgets.and(pump)
}

/// The mapper on a real file.
///
/// # Errors
/// When it cannot be built or does not exit with 0, or a tool is missing.
pub(crate) fn pump(root: &Path, arguments: &[String]) -> Result<()> {
    setup::ensure(&[setup::FIO, setup::LOSETUP])?;
    release(root, "blockd-bench", "pump", arguments)
}

fn release(root: &Path, package: &str, binary: &str, arguments: &[String]) -> Result<()> {
    let mut cargo = command::cargo(root);
    cargo.args(["run", "--quiet", "--release", "--package", package, "--bin", binary, "--"]);
    command::run(cargo.args(arguments))
}
