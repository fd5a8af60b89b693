//! Ends a program, with all that it started, when it takes too long.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Result, bail};

/// Watches one program. Without a limit it does nothing.
#[derive(Debug)]
pub(crate) struct Watchdog(Option<(Sender<()>, JoinHandle<bool>, Duration)>);

impl Watchdog {
    /// Begins to watch.
    #[must_use]
    pub(crate) fn start(pid: u32, limit: Option<Duration>) -> Self {
        let Some(limit) = limit else { return Self(None) };
        let (stop, stopped) = channel();
        let watch = move || {
            let late = stopped.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
            if late {
                end(pid);
            }
            late
        };
        Self(Some((stop, std::thread::spawn(watch), limit)))
    }

    /// The program has ended.
    ///
    /// # Errors
    /// When that was the watchdog's doing.
    pub(crate) fn stop(self) -> Result<()> {
        let Some((stop, thread, limit)) = self.0 else { return Ok(()) };
        drop(stop);
        if thread.join().unwrap_or(false) {
            bail!("ended after {} s, the longest it may take", limit.as_secs());
        }
        Ok(())
    }
}

/// Kills a process and its descendants, parents first so that none starts another.
fn end(pid: u32) {
    let children = children();
    let mut all = vec![pid];
    let mut next = 0;
    while let Some(parent) = all.get(next) {
        all.extend(children.get(parent).into_iter().flatten().copied());
        next += 1;
    }
    for pid in all {
        let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).output();
    }
}

/// Returns the children of each process, by /proc.
fn children() -> BTreeMap<u32, Vec<u32>> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse() else { continue };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // "PID (name, which may have anything in it) state PARENT ..."
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1));
        if let Some(parent) = parent.and_then(|word| word.parse().ok()) {
            children.entry(parent).or_default().push(pid);
        }
    }
    children
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockd_testkit::clock::Clock;

    #[test]
    fn a_process_over_its_limit_is_ended_with_its_children() {
        let watch = Clock::start();
        let mut child =
            Command::new("sh").args(["-c", "sleep 50 & sleep 50 & wait"]).spawn().unwrap();
        let watchdog = Watchdog::start(child.id(), Some(Duration::from_millis(200)));
        assert!(!child.wait().unwrap().success());
        let text = watchdog.stop().unwrap_err().to_string();
        assert!(text.starts_with("ended after"), "{text}");
        assert!(watch.elapsed() < Duration::from_secs(40));
    }

    #[test]
    fn a_process_that_ends_in_time_is_left_alone() {
        let mut child = Command::new("true").spawn().unwrap();
        let watchdog = Watchdog::start(child.id(), Some(Duration::from_secs(50)));
        assert!(child.wait().unwrap().success());
        watchdog.stop().unwrap();
    }
}
