//! Runs the tools of file systems and devices.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read as _, Seek as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use blockd_csi_base::clock::Clock;
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, memfd_create};

use crate::error::Error;
use crate::node::world::Result;

/// Tools of file systems lie there, and not every `PATH` has it.
const TOOLS: &str = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin";

/// Limit of a tool's output in errors: its last lines have the reason of the failure.
const SAID_BYTES: usize = 400;

/// How long tools may run that read a few blocks or ask the kernel: milliseconds where nothing else
/// runs, and seconds on a machine that is short of memory.
const QUICK: Duration = Duration::from_secs(30);

/// How long mkfs and growing may run, beside the time to write their tables.
const MAKING: Duration = Duration::from_secs(15 * 60);

/// Bytes of a volume for each second that mkfs and growing may run longer, 16 s for each GiB: the
/// largest tables, inodes of ext4, are 1/64 of the volume by default (256 bytes for each 16 KiB),
/// and 1 MiB/s is less than any disk writes, and than sensible limits of bandwidth.
const BYTES_PER_SECOND: u64 = 64 << 20;

/// How long a check may run: one of all of a damaged file system reads all of its tables, and is of
/// no use when it is stopped before its end.
const CHECK: Duration = Duration::from_secs(2 * 60 * 60);

/// How long a program that is killed may take to end, unless it hangs in the kernel.
const END: Duration = Duration::from_secs(2);

/// How often a running tool is looked at.
const PAUSE: Duration = Duration::from_millis(5);

/// Programs that hang in the kernel, by the path that they were started for: they end when the
/// kernel lets go of them, and until then no other is started for that path.
static HANGING: Mutex<Vec<(PathBuf, Child)>> = Mutex::new(Vec::new());

fn limit(program: &str) -> Duration {
    if program == "e2fsck" { CHECK } else { QUICK }
}

fn limit_of_making(volume_bytes: u64) -> Duration {
    MAKING + Duration::from_secs(volume_bytes / BYTES_PER_SECOND)
}

/// Runs a tool with this path as its last word. Each has one, since a tool that hangs keeps others
/// away from its path.
///
/// # Errors
/// When it fails, with its output.
pub(super) fn succeeded<S: AsRef<OsStr>>(program: &str, words: &[S], subject: &Path) -> Result<()> {
    said(program, words, subject).map(drop)
}

/// Runs a tool, and returns its output.
///
/// # Errors
/// When it fails.
pub(super) fn said<S: AsRef<OsStr>>(program: &str, words: &[S], subject: &Path) -> Result<String> {
    text_of(program, subject, &run(program, words, subject)?)
}

/// Runs a tool that makes or grows the file system of a volume of this size.
///
/// # Errors
/// When it fails, with its output.
pub(super) fn made<S: AsRef<OsStr>>(
    program: &str,
    words: &[S],
    subject: &Path,
    volume_bytes: u64,
) -> Result<()> {
    let output = run_for(program, words, subject, limit_of_making(volume_bytes))?;
    text_of(program, subject, &output).map(drop)
}

fn text_of(program: &str, subject: &Path, output: &Output) -> Result<String> {
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let problem = explained(output.status.to_string(), output);
    Err(Error::unexpected(format!("{program} {}", subject.display()), problem))
}

/// Runs a tool, and returns its output and status. A tool that takes too long is killed.
///
/// # Errors
/// When it can't be started, takes too long, or an earlier one of that path still hangs.
pub(super) fn run<S: AsRef<OsStr>>(program: &str, words: &[S], subject: &Path) -> Result<Output> {
    run_for(program, words, subject, limit(program))
}

fn run_for<S: AsRef<OsStr>>(
    program: &str,
    words: &[S],
    subject: &Path,
    limit: Duration,
) -> Result<Output> {
    let mut command = Command::new(program);
    command.args(words).arg(subject).stdin(Stdio::null());
    run_command(program, command, subject, limit)
}

/// Runs the command of a program, which has its words and its input already, for this path.
///
/// # Errors
/// As [`run`].
pub(super) fn run_command(
    program: &str,
    mut command: Command,
    subject: &Path,
    limit: Duration,
) -> Result<Output> {
    tracing::debug!(program, path = ?subject, "run");
    refuse_hanging(subject)?;
    let path = std::env::var("PATH").unwrap_or_default();
    // The tools' output is compared, and the tools are searched in all the usual directories.
    command.env("LC_ALL", "C").env("PATH", format!("{path}:{TOOLS}"));
    let failed = |error: io::Error| {
        let hint = match error.kind() {
            io::ErrorKind::NotFound => ", which belongs into the plugin's image",
            _ => "",
        };
        Error::io(format!("starting {program}{hint}"), error)
    };
    // Not pipes: a thread that reads the output of a hanging program would hang with it.
    let (stdout, stderr) = (in_memory().map_err(failed)?, in_memory().map_err(failed)?);
    command.stdout(stdout.try_clone().map_err(failed)?);
    command.stderr(stderr.try_clone().map_err(failed)?);
    let mut child = command.spawn().map_err(failed)?;
    let waiting = |error| Error::io(format!("waiting for {program}"), error);
    if let Some(status) = ended(&mut child, limit).map_err(waiting)? {
        let (stdout, stderr) = (all_of(stdout).map_err(waiting)?, all_of(stderr).map_err(waiting)?);
        return Ok(Output { status, stdout, stderr });
    }
    let (pid, seconds) = (child.id(), limit.as_secs());
    child.kill().map_err(waiting)?;
    let what = format!("{program} {}", subject.display());
    tracing::warn!(program, pid, path = ?subject, seconds, "killed after its time limit");
    if ended(&mut child, END).map_err(waiting)?.is_some() {
        return Err(Error::Hung { what, problem: format!("was killed after {seconds} s") });
    }
    HANGING.lock().push((subject.to_owned(), child));
    let problem = format!("hangs in the kernel after {seconds} s, as process {pid}: see dmesg");
    Err(Error::Hung { what, problem })
}

/// Refuses a path for which an earlier program still hangs.
fn refuse_hanging(subject: &Path) -> Result<()> {
    let mut hanging = HANGING.lock();
    hanging.retain_mut(|(_, child)| child.try_wait().is_ok_and(|status| status.is_none()));
    let Some((path, child)) = hanging.iter().find(|(path, _)| path == subject) else {
        return Ok(());
    };
    let problem = format!("still has process {} of an earlier try, which hangs", child.id());
    Err(Error::Hung { what: path.display().to_string(), problem })
}

/// Waits for the end of a program; `None` when it takes too long.
fn ended(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let clock = Clock::start();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if clock.elapsed() >= limit {
            return Ok(None);
        }
        std::thread::sleep(PAUSE);
    }
}

fn in_memory() -> io::Result<File> {
    Ok(File::from(memfd_create(c"output", MemfdFlags::CLOEXEC)?))
}

fn all_of(mut file: File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A problem, and the end of the tool's output, in a line.
pub(super) fn explained(problem: String, output: &Output) -> String {
    let said = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    let tail = &said[said.len().saturating_sub(SAID_BYTES)..];
    let words = String::from_utf8_lossy(tail);
    let words: Vec<&str> = words.split_whitespace().collect();
    if words.is_empty() { problem } else { format!("{problem}: {}", words.join(" ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_a_tool_is_part_of_the_error() {
        let path = Path::new("/dev/ublkb6");
        let said = succeeded("sh", &["-c", "echo no room >&2; exit 3"], path).unwrap_err();
        assert!(said.to_string().contains("no room"), "{said}");
        let said = succeeded::<&str>("no-such-program", &[], path).unwrap_err();
        assert!(said.to_string().contains("starting no-such-program"), "{said}");
        let output = run("sh", &["-c", "echo out; echo err >&2"], path).unwrap();
        assert_eq!((output.stdout, output.stderr), (b"out\n".to_vec(), b"err\n".to_vec()));
    }

    #[test]
    fn a_tool_that_does_not_end_is_killed_and_its_call_fails() {
        let path = Path::new("/dev/ublkb7");
        let hangs = ["-c", "echo $$; exec sleep 1000"];
        let short = Duration::from_millis(20);
        let error = run_for("sh", &hangs, path, short).unwrap_err();
        assert_eq!(error.code(), tonic::Code::DeadlineExceeded);
        assert_eq!(error.to_string(), "sh /dev/ublkb7 was killed after 0 s");
        // It is gone: the next one is started.
        assert!(run("true", &[""; 0], path).is_ok());
    }

    /// A program that sleeps stands for one that hangs in the kernel and is not killed.
    #[test]
    fn while_a_tool_hangs_no_other_is_started_for_its_path() {
        let path = PathBuf::from("/dev/ublkb8");
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id();
        assert!(ended(&mut child, Duration::ZERO).unwrap().is_none());
        HANGING.lock().push((path.clone(), child));
        for _ in 0..3 {
            let error = run("true", &[""; 0], &path).unwrap_err();
            assert_eq!(error.code(), tonic::Code::DeadlineExceeded);
            let said = error.to_string();
            assert_eq!(
                said,
                format!("/dev/ublkb8 still has process {pid} of an earlier try, which hangs")
            );
        }
        assert!(run("true", &[""; 0], Path::new("/dev/ublkb9")).is_ok());
        let pid = nix::unistd::Pid::from_raw(pid.try_into().unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
        while run("true", &[""; 0], &path).is_err() {
            std::thread::sleep(PAUSE);
        }
    }

    #[test]
    fn each_tool_has_a_limit_by_what_it_does() {
        for program in ["blkid", "losetup", "blockdev"] {
            assert_eq!(limit(program), QUICK);
        }
        assert_eq!(limit("e2fsck"), CHECK);
    }

    #[test]
    fn making_and_growing_may_take_longer_the_larger_the_volume_is() {
        let minutes = |gib: u64| limit_of_making(gib << 30).as_secs() / 60;
        assert_eq!([0, 1, 1 << 10, 16 << 10].map(minutes), [15, 15, 288, 4384]);
        // The inode tables of ext4 at 1 MiB/s.
        assert!(minutes(1 << 10) * 60 * (1 << 20) >= (1 << 40) / 16_384 * 256);
        assert!(limit_of_making(u64::MAX) > MAKING);
    }
}
