//! Release builds: daemon and plugin as they are shipped, and, by the same command, the programs
//! that test them. Built one by one, each would have features of its own in the packages that they
//! share, which would be built again and again.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::steps::Outcome;
use crate::{command, setup};

/// Binaries that start as they are shipped, and the variables that pass their paths to tests.
const SHIPPED: [(&str, &str); 2] = [("BLOCKD_BIN", "blockd"), ("BLOCKD_CSI_BIN", "blockd-csi")];
/// The package of programs that start them.
const TESTS: &str = "blockd-tests";
/// One more program of theirs, which runs in a virtual machine, and its package.
const COUNTS: (&str, &str) = ("blockd-bench", "counts");

/// Builds all of it.
pub(crate) fn build(root: &Path) -> Result<Outcome> {
    release(root, true, &[]).map(|()| Outcome::Passed)
}

/// Builds daemon and plugin alone.
pub(crate) fn shipped(root: &Path) -> Result<Outcome> {
    release(root, false, &[]).map(|()| Outcome::Passed)
}

/// Builds daemon and plugin if they are not yet, and says where the daemon is.
///
/// # Errors
/// When something cannot be built.
pub(crate) fn daemon(root: &Path) -> Result<PathBuf> {
    release(root, false, &["--quiet"])?;
    Ok(command::target_dir(root).join("release").join("blockd"))
}

/// Where tests find what [`build`] has built.
pub(crate) fn environment(root: &Path) -> [(&'static str, PathBuf); 2] {
    let release = command::target_dir(root).join("release");
    SHIPPED.map(|(variable, package)| (variable, release.join(package)))
}

/// Builds all of it and runs one of the programs.
///
/// # Errors
/// When something cannot be built, or the program does not exit with 0.
pub(crate) fn run(root: &Path, program: &str, arguments: &[String]) -> Result<()> {
    release(root, true, &["--quiet"])?;
    let program = command::target_dir(root).join("release").join(program);
    let mut command = std::process::Command::new(program);
    command.current_dir(root).stdin(std::process::Stdio::null());
    command::run(command.args(arguments).envs(environment(root)))
}

fn release(root: &Path, with_tests: bool, more: &[&str]) -> Result<()> {
    setup::ensure(&[setup::LIBCLANG])?;
    let mut cargo = command::cargo(root);
    cargo.args(["build", "--release"]).args(more).args(packages(with_tests));
    if with_tests {
        cargo.args(programs(root)?);
    }
    command::run(&mut cargo)
}

fn packages(with_tests: bool) -> Vec<&'static str> {
    let shipped = SHIPPED.iter().map(|(_, package)| *package);
    let tests = with_tests.then_some([TESTS, COUNTS.0]).into_iter().flatten();
    shipped.chain(tests).flat_map(|name| ["--package", name]).collect()
}

/// Names what is built of these packages: of the one with many benches only one program.
fn programs(root: &Path) -> Result<Vec<String>> {
    let mut names: Vec<String> = SHIPPED.iter().map(|(_, name)| (*name).to_owned()).collect();
    names.push(COUNTS.1.to_owned());
    let folder = root.join("tests/src/bin");
    for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
        names.extend(entry?.path().file_stem().map(|name| name.to_string_lossy().into_owned()));
    }
    Ok(names.into_iter().flat_map(|name| ["--bin".to_owned(), name]).collect())
}

/// Checks that tests which are built beside the shipped programs enable no feature in them.
///
/// # Errors
/// When cargo fails, or a binary has features that it is not shipped with.
pub(crate) fn features(root: &Path) -> Result<Outcome> {
    let tree = |with_tests| {
        let mut cargo = command::cargo(root);
        cargo.args(["tree", "--edges", "normal,build", "--no-dedupe", "--prefix", "none"]);
        command::output(cargo.args(["--format", "{p} {f}"]).args(packages(with_tests)))
    };
    let added = switched_on(&tree(false)?, &tree(true)?);
    if !added.is_empty() {
        bail!("tests enable features of shipped programs:\n{}", added.join("\n"));
    }
    Ok(Outcome::Passed)
}

/// Packages of both lists that have other features in the second.
fn switched_on(shipped: &str, with_tests: &str) -> Vec<String> {
    let package = |line: &str| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
    let lines: BTreeSet<&str> = shipped.lines().collect();
    let packages: BTreeSet<String> = lines.iter().map(|line| package(line)).collect();
    let added = with_tests.lines().filter(|line| !lines.contains(line));
    let ours: BTreeSet<&str> = added.filter(|line| packages.contains(&package(line))).collect();
    ours.into_iter().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_feature_that_only_tests_enable_is_noticed() {
        let shipped = "blockd v1 (/w)\nmapper v1 (/w/mapper) \nlog v2 std";
        let beside = format!("{shipped}\ntests v1 (/w/tests) \nproptest v1 std");
        assert!(switched_on(shipped, &beside).is_empty());
        let changed = beside.replace("log v2 std", "log v2 kv,std");
        assert_eq!(switched_on(shipped, &changed), ["log v2 kv,std"]);
        let mutated = beside.replace("(/w/mapper) ", "(/w/mapper) mutations");
        assert_eq!(switched_on(shipped, &mutated), ["mapper v1 (/w/mapper) mutations"]);
    }
}
