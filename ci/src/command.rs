//! Starting other programs: cargo above all.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::watchdog::Watchdog;

/// The longest that a program may take, where there is a limit.
static LIMIT: OnceLock<Duration> = OnceLock::new();

/// Prefixes of the variables that cargo sets for the package that it runs.
const OF_A_PACKAGE: [&str; 4] = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_"];

/// From now on a program that takes longer is ended and has failed: a test that hangs must not hide
/// the output of others. The first call counts.
pub(crate) fn limit(limit: Duration) {
    let _ = LIMIT.set(limit);
}

/// A cargo invocation in the workspace root. The cargo that started us is used again, so that one
/// run never mixes toolchains.
#[must_use]
pub(crate) fn cargo(root: &Path) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let mut command = Command::new(program);
    command.current_dir(root).stdin(Stdio::null());
    // Build scripts of dependencies read some of the variables that cargo has set for this package,
    // and would be run again, with all that depends on them.
    for (name, _) in std::env::vars_os() {
        let is_ours = |name: &str| OF_A_PACKAGE.iter().any(|begin| name.starts_with(begin));
        if name.to_str().is_some_and(is_ours) {
            command.env_remove(name);
        }
    }
    if in_ci() {
        // No debugger runs there, and panics name their lines without debug information; leaving it
        // out saves a sixth of the compile time.
        command.env("CARGO_PROFILE_DEV_DEBUG", "0").env("CARGO_PROFILE_RELEASE_DEBUG", "0");
        // Everything is compiled once: what a second compilation could use again is not kept.
        command.env("CARGO_INCREMENTAL", "0");
    }
    command
}

/// Whether this runs in CI, where all of a change is checked.
#[must_use]
pub(crate) fn in_ci() -> bool {
    std::env::var_os("CI").is_some()
}

/// The compiler for packages of the workspace that also lints, as `cargo clippy` calls it, if it is
/// part of the toolchain. Packages that are compiled for tests anyway need no separate compilation
/// for lints.
#[must_use]
pub(crate) fn linting(root: &Path) -> Option<[(&'static str, OsString); 2]> {
    let driver = sysroot(root).ok()?.join("bin").join("clippy-driver");
    let arguments = ["-D", "warnings", ""].join("__CLIPPY_HACKERY__");
    driver.is_file().then(|| {
        [("RUSTC_WORKSPACE_WRAPPER", driver.into_os_string()), ("CLIPPY_ARGS", arguments.into())]
    })
}

/// Where the toolchain is installed.
///
/// # Errors
/// When the compiler cannot be started.
pub(crate) fn sysroot(root: &Path) -> Result<PathBuf> {
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    let sysroot = output(rustc.current_dir(root).args(["--print", "sysroot"]))?;
    Ok(PathBuf::from(sysroot.trim()))
}

/// The workspace root, as cargo sees it from the current directory.
///
/// # Errors
/// When cargo cannot be started, or the current directory is not inside a workspace.
pub(crate) fn workspace_root() -> Result<PathBuf> {
    let mut command = cargo(Path::new("."));
    command.args(["locate-project", "--workspace", "--message-format", "plain"]);
    let manifest = PathBuf::from(output(&mut command)?.trim_end());
    let root = manifest.parent().context("the workspace manifest has no directory")?;
    Ok(root.to_path_buf())
}

/// Where build output goes. Builds with other compiler flags get a folder below it, or each would
/// throw away the other's work.
#[must_use]
pub(crate) fn target_dir(root: &Path) -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root.join(dir),
        None => root.join("target"),
    }
}

/// Runs with our own stdout and stderr.
///
/// # Errors
/// When the program cannot be started or does not exit with 0.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = describe(command);
    let mut child = command.spawn().with_context(|| format!("cannot start: {line}"))?;
    let watchdog = Watchdog::start(child.id(), LIMIT.get().copied());
    let status = child.wait()?;
    watchdog.stop().with_context(|| line.clone())?;
    if !status.success() {
        bail!("{status}: {line}");
    }
    Ok(())
}

/// Runs, shows stdout as it comes and also returns it.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_and_keep(command: &mut Command) -> Result<String> {
    let line = describe(command);
    let mut child =
        command.stdout(Stdio::piped()).spawn().with_context(|| format!("cannot start: {line}"))?;
    let watchdog = Watchdog::start(child.id(), LIMIT.get().copied());
    let pipe = child.stdout.take().context("the child has no stdout")?;
    let mut kept = String::new();
    for text in BufReader::new(pipe).lines() {
        let text = text.with_context(|| format!("reading the output of: {line}"))?;
        println!("{text}");
        kept.push_str(&text);
        kept.push('\n');
    }
    let status = child.wait()?;
    watchdog.stop().with_context(|| line.clone())?;
    if !status.success() {
        bail!("{status}: {line}");
    }
    Ok(kept)
}

/// Runs with our own stderr and returns stdout, which is for programs.
///
/// # Errors
/// As [`run`], and when the output is not UTF-8.
pub(crate) fn built(command: &mut Command) -> Result<String> {
    let line = describe(command);
    command.stdout(Stdio::piped()).stderr(Stdio::inherit());
    let child = command.spawn().with_context(|| format!("cannot start: {line}"))?;
    let watchdog = Watchdog::start(child.id(), LIMIT.get().copied());
    let output = child.wait_with_output()?;
    watchdog.stop().with_context(|| line.clone())?;
    if !output.status.success() {
        bail!("{}: {line}", output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("not UTF-8: output of {line}"))
}

/// Runs silently and returns stdout; stderr is part of the error.
///
/// # Errors
/// As [`run`], and when the output is not UTF-8.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let line = describe(command);
    let output = command.output().with_context(|| format!("cannot start: {line}"))?;
    if !output.status.success() {
        bail!("{}: {line}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    String::from_utf8(output.stdout).with_context(|| format!("not UTF-8: output of {line}"))
}

/// Runs with this input, for at most this long, and returns stdout; both outputs are part of the
/// error. The program has to read the input before it writes.
///
/// # Errors
/// As [`output`], and when it takes longer: it is ended then.
pub(crate) fn answer(command: &mut Command, input: &[u8], limit: Duration) -> Result<String> {
    let line = describe(command);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot start: {line}"))?;
    // Before the input: a program that reads nothing blocks the write.
    let watchdog = Watchdog::start(child.id(), Some(limit));
    let written = child.stdin.take().context("the child has no stdin")?.write_all(input);
    let output = child.wait_with_output()?;
    watchdog.stop().with_context(|| line.clone())?;
    if !output.status.success() {
        let said = [output.stdout, output.stderr].concat();
        bail!("{}: {line}\n{}", output.status, String::from_utf8_lossy(&said));
    }
    written.with_context(|| format!("writing the input of: {line}"))?;
    String::from_utf8(output.stdout).with_context(|| format!("not UTF-8: output of {line}"))
}

/// Whether a program of this name is installed. The sbin folders are searched as well: an ordinary
/// user's `PATH` often lacks them.
#[must_use]
pub(crate) fn installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let extra = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(extra).any(|dir| dir.join(program).is_file())
}

/// The equivalent command line.
fn describe(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let mut line = Vec::new();
    for (index, word) in words.enumerate() {
        let word = word.to_string_lossy();
        // The full path of cargo says nothing to the reader.
        let short = if index == 0 { word.rsplit('/').next().unwrap_or(&word) } else { &word };
        line.push(short.to_owned());
    }
    line.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_program_is_an_error_that_names_the_command() {
        let error = run(Command::new("sh").args(["-c", "exit 3"])).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("exit status: 3") && text.contains("sh -c exit 3"), "{text}");
    }

    #[test]
    fn output_is_kept() {
        let kept = run_and_keep(Command::new("sh").args(["-c", "echo one; echo two"])).unwrap();
        assert_eq!(kept, "one\ntwo\n");
    }

    #[test]
    fn a_program_with_input_is_ended_after_its_limit() {
        let long = Duration::from_secs(50);
        assert_eq!(answer(&mut Command::new("cat"), b"one", long).unwrap(), "one");
        // More than a pipe holds, for a program that reads nothing.
        let input = vec![b'x'; 1 << 20];
        let limit = Duration::from_millis(200);
        let error = answer(Command::new("sleep").arg("50"), &input, limit).unwrap_err();
        assert!(format!("{error:#}").contains("sleep 50: ended after"), "{error:#}");
        let error = answer(Command::new("sh").args(["-c", "echo why; exit 3"]), b"", long);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.ends_with("why\n"), "{error}");
    }

    #[test]
    fn an_unknown_program_is_not_installed() {
        assert!(installed("sh"));
        assert!(!installed("no-such-program-anywhere"));
    }
}
