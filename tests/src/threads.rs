//! Stops some threads of another process while its other threads run on.
//!
//! SIGSTOP stops a whole process. The kernel stops single threads for a tracer only.

use std::collections::BTreeSet;
use std::fs;
use std::marker::PhantomData;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

/// Threads that are stopped until this is dropped. The kernel lets only the thread that stopped
/// them resume them, so this value stays on that thread.
#[derive(Debug)]
pub struct StoppedThreads {
    threads: Vec<(Pid, String)>,
    stays_on_its_thread: PhantomData<*const ()>,
}

impl StoppedThreads {
    /// Stops all threads of a process but those whose names `runs_on` accepts. Threads that start
    /// meanwhile are stopped too.
    ///
    /// # Errors
    /// When the process is gone, or may not be traced.
    pub fn of(process: u32, runs_on: impl Fn(&str) -> bool) -> Result<Self> {
        let mut stopped = Self { threads: Vec::new(), stays_on_its_thread: PhantomData };
        let mut seen = BTreeSet::new();
        loop {
            let mut is_complete = true;
            for entry in fs::read_dir(format!("/proc/{process}/task"))? {
                let path = entry?.path();
                let id: i32 = path
                    .file_name()
                    .and_then(|name| name.to_str()?.parse().ok())
                    .context("a thread whose name is not a number")?;
                // A thread may end at any time.
                let Ok(name) = fs::read_to_string(path.join("comm")) else { continue };
                let name = name.trim_end().to_owned();
                if runs_on(&name) || !seen.insert(id) {
                    continue;
                }
                is_complete = false;
                match stop(Pid::from_raw(id)) {
                    Ok(()) => stopped.threads.push((Pid::from_raw(id), name)),
                    Err(Errno::ESRCH) => {}
                    Err(error) => return Err(error).with_context(|| format!("stopping {name}")),
                }
            }
            if is_complete {
                return Ok(stopped);
            }
        }
    }

    /// The names of the stopped threads.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.threads.iter().map(|(_, name)| name.as_str())
    }
}

fn stop(thread: Pid) -> Result<(), Errno> {
    ptrace::seize(thread, ptrace::Options::empty())?;
    ptrace::interrupt(thread)?;
    waitpid(thread, Some(WaitPidFlag::__WALL)).map(drop)
}

impl Drop for StoppedThreads {
    fn drop(&mut self) {
        for (thread, _) in &self.threads {
            let _ = ptrace::detach(*thread, None);
        }
    }
}
