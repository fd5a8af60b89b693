//! Starting the tools of a virtual machine.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use blockd_testkit::clock::Clock;

/// The longest that anything here may take to come about.
const PATIENCE_SECONDS: f64 = 30.0;

/// Runs a program and returns what it prints.
pub(super) fn run(program: impl AsRef<Path>, arguments: &[&str]) -> Result<String> {
    let name = program.as_ref().display().to_string();
    let output = Command::new(program.as_ref())
        .args(arguments)
        // There is no udev in the guest; dmsetup makes its nodes itself.
        .env("DM_DISABLE_UDEV", "1")
        .output()
        .with_context(|| format!("start {name}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{name} {}: {errors}", arguments.join(" "));
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Waits until something is so.
pub(super) fn until(what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let clock = Clock::start();
    while !done()? {
        ensure!(clock.seconds() < PATIENCE_SECONDS, "waited {PATIENCE_SECONDS} s for {what}");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    Ok(())
}
