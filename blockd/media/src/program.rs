//! Programs that are run to their end, or killed with everything that they have started.

use std::io::{self, PipeReader, Read as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use parking_lot::Mutex;

use crate::clock::Clock;

/// How often a running program is looked at.
const PAUSE: Duration = Duration::from_millis(10);

/// How long output is waited for once a program has ended: something it has left behind may hold
/// its end open.
const OUTPUT_GRACE: Duration = Duration::from_millis(500);

/// How long a program that was killed is waited for, so that it leaves no zombie.
const KILL_GRACE: Duration = Duration::from_secs(1);

/// Where what a program prints goes, and how much of it is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kept {
    /// Bytes of each text; what comes after them is read and dropped.
    pub bytes: usize,
    /// Errors go where the output goes.
    pub together: bool,
}

/// The end of a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ended {
    /// `None`: it did not end within the limit, and was killed.
    pub status: Option<ExitStatus>,
    /// Its standard output, as trimmed text.
    pub output: String,
    /// Its standard error; empty where that is part of the output.
    pub errors: String,
    /// How long it ran.
    pub took: Duration,
}

/// Why there is no end of a program.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct ProgramError {
    /// The failed step, to be followed by the program's name.
    pub what: &'static str,
    /// Why not.
    #[source]
    pub source: io::Error,
}

/// Runs a program in a process group of its own, without input. Blocks.
///
/// # Errors
/// If it can't be started or waited for.
pub fn run(command: &mut Command, kept: Kept, limit: Duration) -> Result<Ended, ProgramError> {
    let failed = |what| move |source| ProgramError { what, source };
    let (reader, writer) = io::pipe().map_err(failed("make a pipe for"))?;
    let (errors_reader, errors_writer) = match kept.together {
        true => (None, writer.try_clone().map_err(failed("make a pipe for"))?),
        false => {
            let (reader, writer) = io::pipe().map_err(failed("make a pipe for"))?;
            (Some(reader), writer)
        }
    };
    command.stdin(Stdio::null()).stdout(writer).stderr(errors_writer).process_group(0);
    let clock = Clock::start();
    let spawned = command.spawn().map_err(failed("run"));
    // Our ends for writing go, or reading would never end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = spawned?;
    let reading = || -> io::Result<_> {
        let errors = errors_reader.map(|reader| Text::read(reader, kept.bytes)).transpose()?;
        Ok((Text::read(reader, kept.bytes)?, errors))
    };
    let read = reading();
    let ended = match &read {
        Ok(_) => wait(&mut child, clock, limit).map_err(failed("wait for")),
        Err(_) => Ok(None),
    };
    if !matches!(ended, Ok(Some(_))) {
        end(&mut child);
    }
    let took = clock.elapsed();
    let (output, errors) = read.map_err(failed("read the output of"))?;
    let text = |text: Text| text.end();
    let (output, errors) = (text(output), errors.map(text).unwrap_or_default());
    Ok(Ended { status: ended?, output, errors, took })
}

/// The text that a program prints into one pipe.
struct Text {
    kept: Arc<Mutex<Vec<u8>>>,
    ended: Receiver<()>,
}

impl Text {
    fn read(mut reader: PipeReader, most: usize) -> io::Result<Self> {
        let (send, ended) = bounded(1);
        let kept = Arc::new(Mutex::new(Vec::new()));
        let into = Arc::clone(&kept);
        let read = move || {
            let mut part = [0; 4096];
            // Output beyond the limit is read as well, or the program would block.
            while let Ok(length @ 1..) = reader.read(&mut part) {
                let mut kept = into.lock();
                let room = most.saturating_sub(kept.len());
                kept.extend_from_slice(&part[..length.min(room)]);
            }
            let _ = send.send(());
        };
        std::thread::Builder::new().name("output".to_owned()).spawn(read)?;
        Ok(Self { kept, ended })
    }

    fn end(self) -> String {
        let _ = self.ended.recv_timeout(OUTPUT_GRACE);
        String::from_utf8_lossy(&self.kept.lock()).trim().to_owned()
    }
}

fn wait(child: &mut Child, clock: Clock, limit: Duration) -> io::Result<Option<ExitStatus>> {
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

/// Kills a program and what it has started. It has not been waited for, so its number is its own.
fn end(child: &mut Child) {
    if let Ok(group) = i32::try_from(child.id()) {
        let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
    }
    // A process that sleeps in the kernel, such as on a file system on a volume of a full pool,
    // ends when the kernel lets it. The daemon does not wait for that.
    let _ = wait(child, Clock::start(), KILL_GRACE);
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    fn shell(text: &str, together: bool) -> Ended {
        let mut command = Command::new("/bin/sh");
        run(command.args(["-c", text]), Kept { bytes: 100, together }, LONG).unwrap()
    }

    #[test]
    fn output_and_errors_are_kept_apart_or_together_and_up_to_a_limit() {
        let apart = shell("echo data; echo problem >&2; exit 5", false);
        assert_eq!((apart.output.as_str(), apart.errors.as_str()), ("data", "problem"));
        assert_eq!(apart.status.unwrap().code(), Some(5));
        let together = shell("echo data; echo problem >&2", true);
        assert_eq!((together.output.as_str(), together.errors.as_str()), ("data\nproblem", ""));
        let long = shell("head -c 1000000 /dev/zero | tr '\\0' x >&2", false);
        assert_eq!(long.errors.len(), 100);
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error() {
        let kept = Kept { bytes: 100, together: true };
        let error = run(&mut Command::new("/no/program"), kept, LONG).unwrap_err();
        assert_eq!(error.to_string(), "run: No such file or directory (os error 2)");
    }
}
