//! Build script of daemon and plugin: their `--version` names the commit.
#![forbid(unsafe_code)]

use std::env;
use std::path::Path;
use std::process::Command;

/// Sets `BLOCKD_VERSION`, as in `0.1.0 (2e6ffa0ab)`, for the package.
///
/// The commit is the variable `BLOCKD_COMMIT`, or that of the checkout in a release build. A
/// development build names none, so that a commit compiles nothing again.
pub(crate) fn main() {
    println!("cargo::rerun-if-env-changed=BLOCKD_COMMIT");
    let commit = match env::var("BLOCKD_COMMIT") {
        Ok(commit) => Some(commit).filter(|commit| !commit.is_empty()),
        Err(_) if env::var("PROFILE").is_ok_and(|profile| profile == "release") => of_checkout(),
        Err(_) => None,
    };
    let version = env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let commit = commit.map(|commit| format!(" ({commit})")).unwrap_or_default();
    println!("cargo::rustc-env=BLOCKD_VERSION={version}{commit}");
}

/// The commit of the checkout that the package lies in. `None` without git, or where the sources
/// were unpacked inside a checkout of something else.
fn of_checkout() -> Option<String> {
    let words = ["rev-parse", "--show-toplevel", "--git-path", "logs/HEAD", "--short=9", "HEAD"];
    let output = Command::new("git").args(words).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let mut lines = text.lines().filter(|_| output.status.success());
    let (top, log, commit) = (lines.next()?, lines.next()?, lines.next()?);
    let package = env::var("CARGO_MANIFEST_DIR").ok()?;
    let root = Path::new(&package).parent()?.canonicalize().ok()?;
    if Path::new(top).canonicalize().ok()? != root {
        return None;
    }
    // A file that is missing would run this script at each build.
    if Path::new(log).is_file() {
        println!("cargo::rerun-if-changed={log}");
    }
    Some(commit.to_owned())
}
