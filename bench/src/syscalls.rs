//! Counts system calls of other processes, with `perf`.

use std::io::Read;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Every system call.
const ALL: &str = "raw_syscalls:sys_enter";

/// A `perf stat` that is running.
#[derive(Debug)]
pub struct Counter {
    perf: Child,
    events: usize,
}

impl Counter {
    /// Whether `perf` is here and may count this event.
    #[must_use]
    pub fn can(event: &str) -> bool {
        let tried = Command::new("perf").args(["stat", "-x,", "-e", event, "true"]).output();
        tried.is_ok_and(|output| {
            output.status.success() && parse(&String::from_utf8_lossy(&output.stderr)).is_ok()
        })
    }

    /// Counts the system calls of these processes and their threads, present and future, from here
    /// on; `None` where `perf` cannot.
    pub fn start(pids: &[u32]) -> Result<Option<Self>> {
        if !Self::can(ALL) {
            return Ok(None);
        }
        Self::of(pids, &[(ALL, None)]).map(Some)
    }

    /// Counts events, each with a filter or without.
    pub fn of(pids: &[u32], events: &[(&str, Option<&str>)]) -> Result<Self> {
        let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
        let mut command = Command::new("perf");
        command.args(["stat", "-x,"]);
        for (event, filter) in events {
            command.args(["-e", event]);
            if let Some(filter) = filter {
                command.args(["--filter", filter]);
            }
        }
        command.args(["-p", &pids.join(",")]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let perf = command.spawn().context("start perf")?;
        // It says nothing when it has attached; this is several times its usual duration.
        std::thread::sleep(std::time::Duration::from_millis(200));
        Ok(Self { perf, events: events.len() })
    }

    /// Ends the count of system calls, and returns it.
    pub fn end(self) -> Result<u64> {
        self.end_all()?.first().copied().context("perf has lost a count")
    }

    /// Ends the count; the counts in the order of the events.
    pub fn end_all(mut self) -> Result<Vec<u64>> {
        let pid = Pid::from_raw(i32::try_from(self.perf.id())?);
        kill(pid, Signal::SIGINT).context("end perf")?;
        let mut text = String::new();
        self.perf.stderr.take().context("no output")?.read_to_string(&mut text)?;
        self.perf.wait()?;
        let counts = parse(&text)?;
        ensure!(counts.len() == self.events, "perf has counted something else: {text}");
        Ok(counts)
    }
}

/// `perf`'s lines are `count,unit,event,…`. Others are remarks.
fn parse(text: &str) -> Result<Vec<u64>> {
    let lines = text.lines().filter(|line| line.split(',').nth(2).is_some_and(|e| e.contains(':')));
    let counts: Result<Vec<u64>> = lines
        .map(|line| {
            let count = line.split(',').next().unwrap_or_default();
            count.parse().with_context(|| format!("perf: {line}"))
        })
        .collect();
    let counts = counts?;
    ensure!(!counts.is_empty(), "perf has counted nothing: {text}");
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_perf_are_read() {
        let text = "120,,raw_syscalls:sys_enter,9,100.00,,\n7,,syscalls:sys_enter_io_uring_enter,9";
        assert_eq!(parse(text).unwrap(), [120, 7]);
        assert!(parse("<not supported>,,raw_syscalls:sys_enter,0").is_err());
        assert!(parse("").is_err());
    }
}
