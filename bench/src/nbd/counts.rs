//! Counts that no noise touches, of our daemon alone: the cost of one operation in calls, backing
//! IO, allocations and wake-ups of other threads.

use std::collections::BTreeMap;
use std::process::Command;

use anyhow::Result;

use super::claims::Workload;
use super::fio::{Jobs, Settings};
use super::server::Server;
use crate::report::{Budget, Row};
use crate::syscalls::Counter;

/// Requests of io_uring that reach a file: reads and writes, with and without vectors and
/// registered buffers. `io_uring.h` numbers them.
const BACKING: &str = "opcode==1||opcode==2||opcode==4||opcode==5||opcode==22||opcode==23";
/// The filter of operations that make a file durable.
const FLUSH: &str = "opcode==3";
/// The tracepoint of a submitted request, by its newer and its older name.
const SUBMIT: [&str; 2] = ["io_uring:io_uring_submit_req", "io_uring:io_uring_submit_sqe"];
/// The allocation functions of the C library.
const ALLOCATORS: [&str; 4] = ["malloc", "calloc", "realloc", "posix_memalign"];
/// Our probes' name.
const GROUP: &str = "blockd_bench";

/// Runs a workload once and counts the daemon's work for each operation.
pub fn rows(
    jobs: &Jobs,
    workload: &Workload,
    server: &Server,
    seconds: f64,
    name: &str,
) -> Result<Vec<Row>> {
    let settings = Settings {
        uri: &server.uri,
        seconds,
        connections: workload.connections,
        seed: 1,
        bytes: 0,
    };
    let probes = Probes::set();
    let mut wanted = vec![("system calls", "raw_syscalls:sys_enter".to_owned(), None)];
    wanted.push(("io_uring_enter", "syscalls:sys_enter_io_uring_enter".to_owned(), None));
    let submit = SUBMIT.into_iter().find(|event| Counter::can(event));
    if let Some(submit) = submit {
        wanted.push(("reads and writes of the backing", submit.to_owned(), Some(BACKING)));
        wanted.push(("flushes of the backing", submit.to_owned(), Some(FLUSH)));
    }
    wanted.extend(probes.events().map(|event| ("heap allocations", event, None)));
    wanted.retain(|(_, event, _)| Counter::can(event));
    let events: Vec<(&str, Option<&str>)> =
        wanted.iter().map(|(_, event, filter)| (event.as_str(), *filter)).collect();

    let count = |job: &str| -> Result<(Vec<u64>, Sleeps, f64)> {
        let asleep = server.tree.sleeps()?;
        let counter = Counter::of(&server.tree.pids()?, &events)?;
        let figures = jobs.run(job, settings);
        let counts = counter.end_all()?;
        Ok((counts, since(&server.tree.sleeps()?, &asleep), figures?.operations))
    };
    let (alone, asleep_alone, _) = count("connect")?;
    let (counts, asleep, operations) = count(workload.job)?;

    let mut rows: Vec<Row> = Vec::new();
    for (index, (what, _, _)) in wanted.iter().enumerate() {
        let each = counts[index].saturating_sub(alone[index]) as f64 / operations;
        let name = format!("{name}: {what} per operation");
        match rows.iter_mut().find(|row| row.name == name) {
            Some(row) => row.figure += each,
            None => rows.push(Row::new(name, each, "", budget(what, workload.job))),
        }
    }
    rows.extend(wakeups(&asleep, &asleep_alone, operations, name, workload.job));
    Ok(rows)
}

/// How often each thread has slept, by its name.
pub(crate) type Sleeps = BTreeMap<String, u64>;

pub(crate) fn since(
    now: &BTreeMap<u32, (String, u64)>,
    before: &BTreeMap<u32, (String, u64)>,
) -> Sleeps {
    let mut sleeps = Sleeps::new();
    for (id, (name, count)) in now {
        let earlier = before.get(id).map_or(0, |(_, count)| *count);
        // Threads in which the kernel works for a ring are all alike.
        let name = if name.starts_with(KERNELS) { KERNELS } else { name.as_str() };
        *sleeps.entry(name.to_owned()).or_default() += count.saturating_sub(earlier);
    }
    sleeps
}

/// The kernel's name of its own threads in a process with a ring.
pub(crate) const KERNELS: &str = "iou-wrk";

/// The budget of a count. The last thousandths allow for work that runs once a second. Flushes wake
/// another thread, and have no budget.
fn budget(what: &str, job: &str) -> Budget {
    match what {
        "system calls" => Budget::AtMost(1.0),
        "reads and writes of the backing" => Budget::AtMost(1.001),
        "heap allocations" => Budget::AtMost(0.001),
        "wake-ups of other threads" if !job.ends_with("flush") => Budget::AtMost(0.001),
        _ => Budget::None,
    }
}

/// Each thread that went to sleep has been woken. The thread that did so most serves the
/// connection; those of the kernel are counted by themselves.
fn wakeups(asleep: &Sleeps, alone: &Sleeps, operations: f64, name: &str, job: &str) -> Vec<Row> {
    let mut woken: Vec<(&str, u64)> = asleep
        .iter()
        .map(|(thread, count)| {
            (thread.as_str(), count - alone.get(thread).unwrap_or(&0).min(count))
        })
        .collect();
    woken.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let kernels = woken.iter().position(|(thread, _)| *thread == KERNELS);
    let kernels = kernels.map_or(0, |at| woken.remove(at).1);
    let mut rows = Vec::new();
    let mut row = |what: String, count: u64, budget| {
        let name = format!("{name}: {what} per operation");
        rows.push(Row::new(name, count as f64 / operations, "", budget));
    };
    if let Some((thread, count)) = woken.first() {
        row(format!("sleeps of {thread}"), *count, Budget::None);
    }
    let what = "wake-ups of other threads";
    let others = woken.iter().skip(1).map(|(_, count)| count).sum();
    row(what.to_owned(), others, budget(what, job));
    row("sleeps of the kernel's threads for rings".to_owned(), kernels, Budget::None);
    rows
}

/// Probes on the allocator of the system's library, where we may set any.
struct Probes(Vec<&'static str>);

impl Probes {
    fn set() -> Self {
        let library = library();
        let set = |function: &&str| {
            let probe = format!("{GROUP}:{function}={function}");
            let mut perf = Command::new("perf");
            let perf = perf.args(["probe", "--quiet", "--force", "-x", &library, "-a", &probe]);
            perf.output().is_ok_and(|output| output.status.success())
        };
        Self(ALLOCATORS.into_iter().filter(|function| set(function)).collect())
    }

    fn events(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|function| format!("{GROUP}:{function}"))
    }
}

impl Drop for Probes {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            let mut perf = Command::new("perf");
            let _ = perf.args(["probe", "--quiet", "-d", &format!("{GROUP}:*")]).output();
        }
    }
}

/// The C library that we use ourselves, and the daemon with us.
fn library() -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let path = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    path.into_iter().find(|path| path.contains("/libc.so")).unwrap_or("libc.so.6").to_owned()
}
