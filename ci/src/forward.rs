//! Subcommands that build another package's binary in release form and hand their arguments on.

use std::path::Path;

use anyhow::Result;

use crate::{command, setup};

/// A binary of the tests package: `model`, `sim`, `crash`.
///
/// # Errors
/// When it cannot be built or does not exit with 0.
pub(crate) fn tests(root: &Path, binary: &str, arguments: &[String]) -> Result<()> {
    release(root, "blockd-tests", binary, arguments)
}

/// A virtual machine for a script.
///
/// # Errors
/// As [`tests`], and when a tool is missing.
pub(crate) fn vm(root: &Path, arguments: &[String]) -> Result<()> {
    setup::ensure(&setup::MACHINES)?;
    release(root, "blockd-tests", "vm", arguments)
}

/// Kill rounds, half of them in a virtual machine.
///
/// # Errors
/// As [`vm`].
pub(crate) fn kill(root: &Path, arguments: &[String]) -> Result<()> {
    setup::ensure(&setup::MACHINES)?;
    release(root, "blockd-tests", "kill", arguments)
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

/// The NBD server beside others. The daemon is built alone: together with the tests it would have
/// the mapper's mutations in it.
///
/// # Errors
/// When something cannot be built or does not exit with 0, or a tool is missing.
pub(crate) fn bench_nbd(root: &Path, arguments: &[String]) -> Result<()> {
    setup::ensure(&setup::NBD_BENCH)?;
    let mut build = command::cargo(root);
    command::run(build.args(["build", "--quiet", "--release", "--package", "blockd"]))?;
    let daemon = command::target_dir(root).join("release").join("blockd");
    let jobs = root.join("bench").join("fio");
    let mut all = vec![
        "--blockd".to_owned(),
        daemon.to_string_lossy().into_owned(),
        "--jobs".to_owned(),
        jobs.to_string_lossy().into_owned(),
    ];
    all.extend(arguments.iter().cloned());
    release(root, "blockd-bench", "nbd", &all)
}

/// io-uring directly beside tokio-uring, which only this builds.
///
/// # Errors
/// When it cannot be built or does not exit with 0.
pub(crate) fn bench_echo(root: &Path, arguments: &[String]) -> Result<()> {
    let mut cargo = command::cargo(root);
    cargo.args(["run", "--quiet", "--release", "--package", "blockd-bench"]);
    cargo.args(["--features", "tokio-uring", "--bin", "echo", "--"]);
    command::run(cargo.args(arguments))
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
