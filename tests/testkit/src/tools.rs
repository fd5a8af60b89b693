//! Programs that system tests start, and places they write to.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::clock::Clock;

/// How the names begin of what cargo sets for the package that it runs.
const OF_A_PACKAGE: [&str; 4] = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_"];
/// How long the threads of a process may take to stop: each waits for a processor.
const FREEZE_LIMIT: Duration = Duration::from_secs(60);
/// The packages of a release.
const SHIPPED: [&str; 4] = ["--package", "blockd", "--package", "blockd-csi"];

/// The full path of an installed program. Folders of the administrator's tools are looked at as
/// well: an ordinary user's `PATH` often lacks them.
///
/// # Errors
/// When it is not installed. A test passes the error on and so fails: it could not run, and must
/// not look as if it had passed.
pub fn find(program: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let extra = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(extra)
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
        .with_context(|| format!("not run: there is no {program}; `cargo ci setup` installs it"))
}

/// Runs without input and returns stdout.
///
/// # Errors
/// When it cannot be started or does not exit with 0; stderr is part of the error.
pub fn output(command: &mut Command) -> Result<Vec<u8>> {
    let line = describe(command);
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("cannot start: {line}"))?;
    if !output.status.success() {
        let (out, err) = (&output.stdout, &output.stderr);
        let said = [String::from_utf8_lossy(out), String::from_utf8_lossy(err)].concat();
        bail!("{}: {line}\n{}", output.status, said.trim_end());
    }
    Ok(output.stdout)
}

/// As [`output`], as text.
///
/// # Errors
/// As [`output`], and when it is not UTF-8.
pub fn text(command: &mut Command) -> Result<String> {
    let line = describe(command);
    String::from_utf8(output(command)?).with_context(|| format!("not UTF-8: output of {line}"))
}

/// Runs a line of shell and returns stdout.
///
/// # Errors
/// As [`text`].
pub fn shell(line: &str) -> Result<String> {
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{path}:/usr/local/sbin:/usr/sbin:/sbin");
    text(Command::new("sh").env("PATH", path).args(["-euc", line]))
}

/// The command line that does the same in a shell.
#[must_use]
pub fn describe(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

/// Polls every few milliseconds until there is a result.
///
/// # Errors
/// When there is none within the limit, naming what was waited for.
pub fn wait_until<T>(what: &str, limit: Duration, mut ask: impl FnMut() -> Option<T>) -> Result<T> {
    let start = Clock::start();
    loop {
        if let Some(answer) = ask() {
            return Ok(answer);
        }
        if start.elapsed() > limit {
            bail!("waited {limit:?} for {what}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Stops all threads of a process, until it is sent SIGCONT. After the signal alone threads run on
/// until one of them, which may have to wait for a processor, stops the others.
///
/// # Errors
/// When there is no such process, or its threads do not stop in time.
pub fn freeze(pid: u32) -> Result<()> {
    kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGSTOP).context("stopping a process")?;
    let is_stopped = |status: String| status.contains("\nState:\tT");
    let all_stopped = || -> Option<()> {
        let mut threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
        let status = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("status"));
        threads.all(|thread| thread.and_then(status).is_ok_and(is_stopped)).then_some(())
    };
    wait_until("all threads of a process to stop", FREEZE_LIMIT, all_stopped)
}

/// A TCP port of this host that was free a moment ago.
///
/// # Errors
/// When none is.
pub fn free_port() -> Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// The folder of builds. Files that tests fetch or leave behind go there too, never into the
/// sources.
///
/// # Errors
/// When this program lies in no such folder and the environment names none.
pub fn build_folder() -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("BLOCKD_TEST_FOLDER") {
        return Ok(PathBuf::from(folder));
    }
    let program = std::env::current_exe().context("where this program lies")?;
    // cargo marks the folder, wherever it is configured to be.
    let marked = |folder: &&Path| folder.join("CACHEDIR.TAG").exists();
    let found = program.ancestors().find(marked).map(Path::to_path_buf);
    found.with_context(|| format!("{} lies in no build folder", program.display()))
}

/// Root of the workspace's sources.
#[must_use]
pub fn workspace_root() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.ancestors().nth(2).unwrap_or(package).to_path_buf()
}

/// The daemon's binary: that of `BLOCKD_BIN`, or a release build without this package, which would
/// bring the mapper's switches for mutations with it.
///
/// # Errors
/// When it cannot be built.
pub fn blockd() -> Result<PathBuf> {
    static BUILT: OnceLock<Built> = OnceLock::new();
    program("BLOCKD_BIN", "blockd", &BUILT)
}

/// The CSI plugin's binary: that of `BLOCKD_CSI_BIN`, or a release build of its package.
///
/// # Errors
/// When it cannot be built.
pub fn blockd_csi() -> Result<PathBuf> {
    static BUILT: OnceLock<Built> = OnceLock::new();
    program("BLOCKD_CSI_BIN", "blockd-csi", &BUILT)
}

/// A program that was built, or why it could not be.
type Built = std::result::Result<PathBuf, String>;

fn program(variable: &str, package: &str, built: &OnceLock<Built>) -> Result<PathBuf> {
    if let Some(program) = std::env::var_os(variable) {
        return Ok(PathBuf::from(program));
    }
    let built = built.get_or_init(|| build(package).map_err(|error| format!("{error:#}")));
    built.clone().map_err(|error| anyhow::anyhow!(error))
}

fn build(package: &str) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let target = build_folder()?;
    let mut command = Command::new(cargo);
    command.current_dir(workspace_root()).env("CARGO_TARGET_DIR", &target);
    // Set by the cargo that started the test; they would count as a changed environment, and all
    // that looks at them be built anew.
    command.env_remove("RUSTFLAGS");
    for (name, _) in std::env::vars_os() {
        let begins = |with: &&str| name.to_str().is_some_and(|name| name.starts_with(*with));
        if OF_A_PACKAGE.iter().any(begins) {
            command.env_remove(name);
        }
    }
    // Always both: built alone, each would have features of its own in the packages that they
    // share, which would be built twice.
    output(command.args(["build", "--quiet", "--release"]).args(SHIPPED))?;
    Ok(target.join("release").join(package))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_not_installed_is_named() {
        let said = find("no-such-program").unwrap_err().to_string();
        assert!(said.starts_with("not run: there is no no-such-program"), "{said}");
    }

    #[test]
    fn a_failing_line_shows_what_it_said() {
        let said = shell("echo out; echo err >&2; exit 3").unwrap_err().to_string();
        assert!(said.contains("out") && said.contains("err"), "{said}");
    }
}
