//! Keeps the daemon running when memory is short, which is when the kernel writes dirty pages back
//! through it: none of its memory is paged out, its threads do not wait for writeback, and it is
//! the last to be killed.

use std::fs;
use std::io;
use std::sync::Once;

use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
use nix::unistd::Pid;
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::configure_io_flusher_behavior;

use crate::heap;

/// The protection that the process was granted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Protection {
    /// All memory, present and future, stays in memory once it was touched.
    pub memory_locked: bool,
    /// The kernel adds this to the process's badness when memory is exhausted: -1000 is never
    /// killed.
    pub oom_score_adj: i32,
    /// How many files may be open.
    pub open_files: u64,
    /// The refused requests with their reasons; one line each.
    pub problems: Vec<String>,
}

/// Locks memory, of which no more is kept than is used, takes the process off the list of those to
/// be killed when memory is out, and raises the limit on open files. A request that is refused for
/// lack of privilege is in the answer, and no error: a daemon without privilege is useful for tests
/// and small machines.
pub fn protect_process() -> Protection {
    heap::return_large_pieces();
    let mut problems = Vec::new();
    let memory_locked = match lock_memory() {
        Ok(()) => true,
        Err(error) => {
            problems.push(format!("memory is not locked: {error}"));
            false
        }
    };
    if let Err(error) = fs::write(OOM_SCORE_ADJ, "-1000") {
        problems.push(format!("the OOM score can't be lowered: {error}"));
    }
    let oom_score_adj = fs::read_to_string(OOM_SCORE_ADJ)
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or_default();
    let open_files = match raise(Resource::RLIMIT_NOFILE) {
        Ok(limit) => limit,
        Err(error) => {
            problems.push(format!("the limit on open files can't be raised: {error}"));
            0
        }
    };
    Protection { memory_locked, oom_score_adj, open_files, problems }
}

const OOM_SCORE_ADJ: &str = "/proc/self/oom_score_adj";

/// Makes the calling thread one that writeback may wait for: its allocations do no IO and are not
/// throttled for dirty pages (`PR_SET_IO_FLUSHER`). Names it too, by the first 15 bytes. Every
/// thread of the data path calls this first. Says whether the kernel agreed; a refusal is logged
/// once.
pub fn protect_thread(name: &str) -> bool {
    let cut = (0..=name.len().min(15)).rev().find(|&at| name.is_char_boundary(at)).unwrap_or(0);
    if let Ok(name) = std::ffi::CString::new(&name[..cut])
        && let Err(error) = rustix::thread::set_name(&name)
    {
        tracing::debug!(%error, "a thread can't be named");
    }
    match configure_io_flusher_behavior(true) {
        Ok(()) => true,
        Err(error) => {
            static REFUSED: Once = Once::new();
            REFUSED.call_once(|| {
                tracing::warn!(%error, "threads can't be IO flushers: CAP_SYS_RESOURCE is missing");
            });
            false
        }
    }
}

/// Lets the calling thread run before those that use their whole share of a processor (nice -10).
/// For a thread that works in short bursts while requests wait for it: beside workers that never
/// sleep, the kernel would start it milliseconds late. A process that may not do so (no
/// `CAP_SYS_NICE`, and `RLIMIT_NICE` below 30) goes on as it is.
pub fn run_before_others() -> bool {
    // For this call the thread is the process.
    match rustix::process::setpriority_process(None, -10) {
        Ok(()) => true,
        Err(error) => {
            tracing::debug!(%error, "a thread can't be given priority");
            false
        }
    }
}

/// Keeps the calling thread on some of these processors. Where it may not be on any of them, or
/// none is named, it stays free to go.
pub fn stay_on(cpus: &[usize]) -> bool {
    let mut wanted = CpuSet::new();
    let known = cpus.iter().filter(|&&cpu| wanted.set(cpu).is_ok()).count();
    match known {
        0 => false,
        _ => match sched_setaffinity(Pid::from_raw(0), &wanted) {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!(%error, ?cpus, "a thread can't be kept on these processors");
                false
            }
        },
    }
}

/// Ends the process when the thread that holds it panics. A thread of the data path that is gone
/// leaves clients waiting for ever; a process that is gone is started again, and has lost nothing
/// that it answered.
#[derive(Debug)]
pub struct Vital;

impl Drop for Vital {
    fn drop(&mut self) {
        if std::thread::panicking() {
            give_up(&"it panicked");
        }
    }
}

/// Ends the process: the calling thread, of the data path, can't go on.
pub fn give_up(reason: &dyn std::fmt::Display) -> ! {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("?");
    tracing::error!(thread = name, %reason, "a thread of the data path has ended: aborting");
    std::process::abort();
}

/// Locks on first touch, so that stacks and sparse mappings are not filled for nothing.
///
/// Only without a limit: under one, this call succeeds and a later allocation fails.
fn lock_memory() -> io::Result<()> {
    let unlimited = raise(Resource::RLIMIT_MEMLOCK).is_ok_and(|limit| limit == RLIM_INFINITY);
    if !unlimited && !has_capability(CAP_IPC_LOCK) {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "needs CAP_IPC_LOCK or no limit on locked memory (LimitMEMLOCK=infinity)",
        ));
    }
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    Ok(mlockall(flags)?)
}

/// From `linux/capability.h`.
const CAP_IPC_LOCK: u32 = 14;

fn has_capability(bit: u32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective
        .and_then(|text| u64::from_str_radix(text.trim(), 16).ok())
        .is_some_and(|mask| mask & (1 << bit) != 0)
}

/// Raises a soft limit to the hard one; gives what is then allowed.
fn raise(resource: Resource) -> io::Result<u64> {
    let (soft, hard) = getrlimit(resource)?;
    if soft < hard {
        setrlimit(resource, hard, hard)?;
    }
    Ok(hard)
}

#[cfg(test)]
mod tests {
    use nix::sched::sched_getaffinity;

    use super::*;

    /// From `linux/capability.h`.
    const CAP_SYS_RESOURCE: u32 = 24;

    /// `PF_MEMALLOC_NOIO` and `PF_LOCAL_THROTTLE` of `linux/sched.h`: the flags that are set.
    const IO_FLUSHER: u64 = 0x0008_0000 | 0x0010_0000;

    fn thread_flags() -> u64 {
        let stat = fs::read_to_string("/proc/thread-self/stat").unwrap();
        // The name is in parentheses and may hold anything; flags are the seventh field after it.
        let after = stat.rsplit(')').next().unwrap();
        after.split_whitespace().nth(6).unwrap().parse().unwrap()
    }

    #[test]
    fn a_protected_thread_is_an_io_flusher_where_that_is_allowed() {
        let (agreed, flags, name) = std::thread::spawn(|| {
            let agreed = protect_thread("a-name-that-is-too-long");
            (agreed, thread_flags(), fs::read_to_string("/proc/thread-self/comm").unwrap())
        })
        .join()
        .unwrap();
        assert_eq!(name, "a-name-that-is-\n");
        assert_eq!(agreed, has_capability(CAP_SYS_RESOURCE));
        assert_eq!(agreed, flags & IO_FLUSHER == IO_FLUSHER, "{flags:#x}");
        if !agreed {
            println!("not run: IO_FLUSHER, because CAP_SYS_RESOURCE is missing");
        }
    }

    /// Row: P5.
    #[test]
    fn a_thread_stays_on_the_processors_that_it_is_given() {
        let pinned = std::thread::spawn(|| {
            let before = sched_getaffinity(Pid::from_raw(0)).unwrap();
            let one = (0..CpuSet::count()).find(|&cpu| before.is_set(cpu).unwrap()).unwrap();
            assert!(!stay_on(&[]) && !stay_on(&[CpuSet::count()]));
            assert_eq!(sched_getaffinity(Pid::from_raw(0)).unwrap(), before);
            assert!(stay_on(&[one, CpuSet::count()]));
            let after = sched_getaffinity(Pid::from_raw(0)).unwrap();
            (0..CpuSet::count()).filter(|&cpu| after.is_set(cpu).unwrap()).eq([one])
        });
        assert!(pinned.join().unwrap());
    }

    #[test]
    fn the_granted_protection_is_what_the_kernel_reports() {
        let got = protect_process();
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
        let locked_kib: u64 = locked.trim().trim_end_matches(" kB").parse().unwrap();
        assert_eq!(got.memory_locked, locked_kib > 0);
        let is_refused =
            got.problems.iter().any(|problem| problem.starts_with("memory is not locked"));
        assert_eq!(got.memory_locked, !is_refused);
        assert_eq!(has_capability(CAP_SYS_RESOURCE), got.oom_score_adj == -1000);
        assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).unwrap().0, got.open_files);
    }
}
