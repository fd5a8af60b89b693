//! `cargo ci test`: every test of the project, counted step by step.

mod binaries;
pub(crate) mod csi;
pub(crate) mod neighbours;
pub(crate) mod operator;
pub(crate) mod pmem;
mod programs;
pub(crate) mod safety;
pub(crate) mod send;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::steps::{Outcome, Steps};
use crate::{built, command, docs, rules, rustdoc, setup};

/// Printed without miri, which needs a nightly toolchain; this project does not require one.
const NO_MIRI: &str = "miri is not part of this toolchain";

/// Modules of the mapper that miri checks, by the end of their names: those that threads share. The
/// rest would take hours.
const UNDER_MIRI: [&str; 3] = ["leaf::", "epoch::", "ring::"];

/// Time limit of one step, compilation included: about three times its duration on two slow cores.
const SHORT_LIMIT: Duration = Duration::from_secs(20 * 60);
/// The same for the long forms, the slowest of which are 200 rounds in a virtual machine.
const LONG_LIMIT: Duration = Duration::from_secs(60 * 60);

/// Runs everything; true when nothing failed.
#[must_use]
pub(crate) fn run(root: &Path, long: bool) -> bool {
    command::limit(if long { LONG_LIMIT } else { SHORT_LIMIT });
    let mut steps = Steps::new();
    // Tests of the workspace start daemon and plugin, and would have to build them.
    steps.run("daemon, plugin, programs", || built::build(root));
    steps.run("unit and integration tests", || workspace(root));
    steps.run("examples and documentation", || examples(root));
    let release = command::target_dir(root).join("release");
    steps.run("commands of the documents", || docs::sessions(root, &release));
    steps.run("metrics, by promtool", || rules::metrics::run(root, &release.join("blockd")));
    steps.run("steps of an operator", || operator::check(root, &release, false));
    steps.run("loom", || loom(root));
    steps.run("miri", || miri(root));
    programs::run(&mut steps, root, long);
    steps.finish()
}

/// Versions of sidecars beside those of the documents, probes, rights and flags. `cargo ci test`
/// runs these with all others.
pub(crate) fn manifests(steps: &mut Steps, root: &Path) {
    steps.run("versions, probes and rights", || {
        counted(tests_cargo(root).args(["--package", "blockd-csi", "--test", "manifests"]))
    });
}

fn workspace(root: &Path) -> Result<Outcome> {
    // Tests of the workspace start the same tools as the steps below, and an image of a pool is
    // read by a reader in Python.
    setup::ensure(&setup::all())?;
    let built = built::environment(root);
    let environment: Vec<_> = built.iter().map(|(name, path)| (*name, path.as_path())).collect();
    if tests_passed(&binaries::run(root, &environment)?) == 0 {
        bail!("no test ran");
    }
    Ok(Outcome::Passed)
}

/// The examples of the libraries; in CI their documentation too, with every warning an error.
fn examples(root: &Path) -> Result<Outcome> {
    let mut cargo = tests_cargo(root);
    if command::in_ci() {
        cargo.envs(rustdoc::environment(root)?);
    }
    command::run(cargo.args(["--workspace", "--doc", "--no-fail-fast"]))?;
    Ok(Outcome::Passed)
}

/// `cargo test` as all tests are compiled: in CI with the linter, for which they are not compiled
/// a second time.
fn tests_cargo(root: &Path) -> Command {
    let mut cargo = command::cargo(root);
    cargo.arg("test");
    if command::in_ci() {
        cargo.envs(command::linting(root).into_iter().flatten());
    }
    cargo
}

/// The loom tests are those of the mapper whose path contains `loom_`, and its test files of such a
/// name. They need every crate built with `--cfg loom`, hence the folder of their own.
fn loom(root: &Path) -> Result<Outcome> {
    let cargo = || {
        let mut cargo = command::cargo(root);
        cargo.env("RUSTFLAGS", "--cfg loom");
        cargo.env("CARGO_TARGET_DIR", command::target_dir(root).join("loom"));
        cargo.args(["test", "--release", "--package", "blockd-mapper"]);
        cargo
    };
    let mut passed = tests_passed(&command::run_and_keep(cargo().args(["--lib", "loom_"]))?);
    if has_loom_files(root)? {
        passed += tests_passed(&command::run_and_keep(cargo().args(["--test", "loom_*"]))?);
    }
    if passed == 0 {
        bail!("no loom test ran");
    }
    Ok(Outcome::Passed)
}

fn has_loom_files(root: &Path) -> Result<bool> {
    let dir = root.join("mapper/tests");
    if !dir.is_dir() {
        return Ok(false);
    }
    for entry in std::fs::read_dir(&dir).with_context(|| format!("reading {}", dir.display()))? {
        if entry?.file_name().to_string_lossy().starts_with("loom_") {
            return Ok(true);
        }
    }
    Ok(false)
}

fn miri(root: &Path) -> Result<Outcome> {
    // Only rustup understands `+nightly`, and only under the plain name.
    let cargo = || {
        let mut cargo = Command::new("cargo");
        cargo.current_dir(root).stdin(Stdio::null()).args(["+nightly", "miri"]);
        cargo
    };
    if command::output(cargo().arg("--version")).is_err() {
        return Ok(Outcome::NotRun(NO_MIRI));
    }
    let mut cargo = cargo();
    cargo.env("CARGO_TARGET_DIR", command::target_dir(root).join("miri"));
    cargo.env("MIRIFLAGS", "-Zmiri-disable-isolation");
    cargo.args(["test", "--package", "blockd-mapper", "--lib", "--"]).args(UNDER_MIRI);
    counted(&mut cargo)
}

/// Runs a command that prints like `cargo test`. A run without tests is a failure: a filter that no
/// longer matches must not look like success.
fn counted(command: &mut Command) -> Result<Outcome> {
    let output = command::run_and_keep(command)?;
    if tests_passed(&output) == 0 {
        bail!("no test ran");
    }
    Ok(Outcome::Passed)
}

/// The sum over all `test result: ok. N passed; ...` lines.
fn tests_passed(output: &str) -> u64 {
    output
        .lines()
        .filter_map(|line| line.strip_prefix("test result: ok. "))
        .filter_map(|rest| rest.split_once(" passed")?.0.parse::<u64>().ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passed_tests_of_all_binaries_are_added_up() {
        let output = "running 2 tests\n\
            test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 7 filtered out\n\
            test result: ok. 40 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n";
        assert_eq!(tests_passed(output), 42);
    }

    #[test]
    fn a_run_without_a_test_is_a_failure() {
        let line = "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out";
        let error = counted(Command::new("echo").arg(line)).unwrap_err();
        assert_eq!(error.to_string(), "no test ran");
    }
}
