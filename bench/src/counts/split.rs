//! How much of a process's CPU time is spent outside the kernel, and its system calls. The kernel's
//! own figures for this are estimates by ticks; these come from tracing each entry, each exit and
//! each switch with its time. Interrupts that arrive outside the kernel are in the figure: at one
//! tick for four million instructions they are a few in a thousand.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::nbd::process::Tree;

/// Where tracing is mounted.
const ROOT: &str = "/sys/kernel/tracing";
/// The traced events.
const EVENTS: [&str; 3] =
    ["events/raw_syscalls/sys_enter", "events/raw_syscalls/sys_exit", "events/sched/sched_switch"];
/// KiB for the events of a run: several times as many as the longest one has. Lost events fail the
/// run.
const BUFFER_KIB: &str = "32768";
/// System calls that show the overhead of tracing between two calls.
const CALIBRATION: u64 = 1000;

/// Tracing that is under way.
#[derive(Debug)]
pub(super) struct Split {
    threads: Vec<u32>,
    /// Nanoseconds from the exit of one call to the entry of the next when nothing is between them.
    gap_ns: f64,
}

/// The traced counts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Outcome {
    /// Nanoseconds outside the kernel.
    pub(super) user_ns: f64,
    /// System calls.
    pub(super) calls: u64,
}

impl Split {
    /// Traces the threads of a process from here on.
    pub(super) fn start(pid: u32) -> Result<Self> {
        write("buffer_size_kb", BUFFER_KIB)?;
        // The processor's own counter: in the machine it advances with the instructions.
        write("trace_clock", "x86-tsc")?;
        write("options/event-fork", "1")?;
        let gap_ns = gap()?;
        let threads = Tree::new(pid).threads()?;
        begin(&threads)?;
        Ok(Self { threads, gap_ns })
    }

    /// Ends tracing.
    pub(super) fn end(self) -> Result<Outcome> {
        let events = end()?;
        let (user, calls) = sum(&events, &self.threads);
        Ok(Outcome { user_ns: (user as f64 - calls as f64 * self.gap_ns).max(0.0), calls })
    }
}

/// The overhead that tracing and the kernel's exit and entry add to the time between two calls.
fn gap() -> Result<f64> {
    let own = u32::try_from(nix::unistd::gettid().as_raw())?;
    begin(&[own])?;
    for _ in 0..CALIBRATION {
        std::hint::black_box(nix::unistd::getppid());
    }
    let (user, calls) = sum(&end()?, &[own]);
    ensure!(calls >= CALIBRATION, "{calls} of {CALIBRATION} system calls were traced");
    Ok(user as f64 / calls as f64)
}

fn begin(threads: &[u32]) -> Result<()> {
    write("trace", "")?;
    let threads: Vec<String> = threads.iter().map(u32::to_string).collect();
    write("set_event_pid", &threads.join(" "))?;
    for event in EVENTS {
        write(&format!("{event}/enable"), "1")?;
    }
    Ok(())
}

fn end() -> Result<Vec<Event>> {
    for event in EVENTS {
        write(&format!("{event}/enable"), "0")?;
    }
    write("set_event_pid", "")?;
    let text = fs::read_to_string(Path::new(ROOT).join("trace")).context("read the trace")?;
    parse(&text)
}

fn write(file: &str, text: &str) -> Result<()> {
    let path = Path::new(ROOT).join(file);
    fs::write(&path, text).with_context(|| format!("write {text:?} to {}", path.display()))
}

/// An event with its time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Event {
    ns: u64,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// A thread enters the kernel by a system call.
    Enter(u32),
    /// A thread leaves it.
    Exit(u32),
    /// The first thread leaves the processor, the second one gets it.
    Switch(u32, u32),
}

/// Lines are `name-PID [CPU] flags NS: event: fields`.
fn parse(text: &str) -> Result<Vec<Event>> {
    let mut events = Vec::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# entries-in-buffer/entries-written:") {
            let counts = rest.split_whitespace().next().unwrap_or_default();
            let all = counts.split_once('/').is_some_and(|(kept, written)| kept == written);
            ensure!(all, "events were lost: {counts}");
        }
        if line.starts_with('#') {
            continue;
        }
        let context = || format!("an event: {line}");
        let number = |text: &str| text.trim().parse::<u32>().with_context(context);
        let found =
            [" sys_enter: ", " sys_exit: ", " sched_switch: "].into_iter().find_map(|name| {
                let (head, fields) = line.split_once(name)?;
                Some((name, head, fields))
            });
        let Some((name, head, fields)) = found else { continue };
        let (task, head) = head.rsplit_once(" [").with_context(context)?;
        let ns = head.trim_end_matches(':').split_whitespace().next_back().with_context(context)?;
        let thread = number(task.rsplit_once('-').with_context(context)?.1)?;
        let kind = match name.trim() {
            "sys_enter:" => Kind::Enter(thread),
            "sys_exit:" => Kind::Exit(thread),
            _ => {
                let next = fields.rsplit_once("next_pid=").with_context(context)?.1;
                Kind::Switch(thread, number(next.split(' ').next().unwrap_or_default())?)
            }
        };
        events.push(Event { ns: ns.parse().with_context(context)?, kind });
    }
    Ok(events)
}

/// Time outside the kernel and system calls of these threads. A thread counts from its first entry
/// or exit on: before that it is not known where it is, and the kernel's threads for rings never
/// have one.
fn sum(events: &[Event], threads: &[u32]) -> (u64, u64) {
    // Since when a thread runs outside the kernel; `None` while it was switched away from there.
    let mut outside: BTreeMap<u32, Option<u64>> = BTreeMap::new();
    let (mut user, mut calls) = (0, 0);
    for Event { ns, kind } in events {
        match kind {
            Kind::Exit(thread) if threads.contains(thread) => {
                outside.insert(*thread, Some(*ns));
            }
            Kind::Enter(thread) if threads.contains(thread) => {
                calls += 1;
                if let Some(Some(since)) = outside.remove(thread) {
                    user += ns - since;
                }
            }
            Kind::Switch(from, to) => {
                if let Some(state) = outside.get_mut(from)
                    && let Some(since) = state.take()
                {
                    user += ns - since;
                }
                if let Some(state) = outside.get_mut(to) {
                    *state = Some(*ns);
                }
            }
            Kind::Exit(_) | Kind::Enter(_) => {}
        }
    }
    (user, calls)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "# tracer: nop\n#\n# entries-in-buffer/entries-written: 6/6   #P:1\n#\n\
        \x20  worker-0-12      [000] .....  1000: sys_exit: NR 426 = 1\n\
        \x20  worker-0-12      [000] d..2.  1100: sched_switch: prev_comm=worker-0 prev_pid=12 \
        prev_prio=120 prev_state=R+ ==> next_comm=a b next_pid=7 next_prio=120\n\
        \x20       a b-7       [000] .....  1150: sys_enter: NR 1 (1, 2)\n\
        \x20       a b-7       [000] d..2.  1300: sched_switch: prev_comm=a b prev_pid=7 \
        prev_prio=120 prev_state=S ==> next_comm=worker-0 next_pid=12 next_prio=120\n\
        \x20  worker-0-12      [000] .....  1350: sys_enter: NR 426 (3, 1)\n\
        \x20  worker-0-12      [000] .....  1950: sys_exit: NR 426 = 1\n";

    #[test]
    fn a_trace_is_read() {
        let events = parse(TRACE).unwrap();
        assert_eq!(events.len(), 6);
        assert_eq!(events[1], Event { ns: 1100, kind: Kind::Switch(12, 7) });
        assert_eq!(events[4], Event { ns: 1350, kind: Kind::Enter(12) });
        assert!(parse(&TRACE.replace("6/6", "6/9")).is_err());
    }

    #[test]
    fn time_away_from_the_processor_is_not_counted() {
        let events = parse(TRACE).unwrap();
        assert_eq!(sum(&events, &[12]), (150, 1));
        // The first entry: the time spent outside before it is unknown.
        assert_eq!(sum(&events, &[7]), (0, 1));
    }
}
