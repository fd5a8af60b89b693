//! Counts calls of threads with the kernel's own tracing: the same way for every server, and
//! nothing to install in a virtual machine.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Where tracing is mounted.
const ROOT: &str = "/sys/kernel/tracing";
/// Our probes' name.
const GROUP: &str = "blockd_bench";
/// The allocation functions of the C library.
const ALLOCATORS: [&str; 4] = ["malloc", "calloc", "realloc", "posix_memalign"];
/// Requests of io_uring that reach a file: reads and writes, with and without vectors and
/// registered buffers. `io_uring.h` numbers them.
const BACKING: &str = " if opcode==1||opcode==2||opcode==4||opcode==5||opcode==22||opcode==23";

/// The kind of a counter.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum What {
    /// Calls of `io_uring_enter`.
    Enters,
    /// System calls of any kind.
    Calls,
    /// Reads and writes handed to a ring.
    Backing,
    /// Calls of the C library's allocator.
    Allocations,
}

impl What {
    /// All.
    pub const ALL: [Self; 4] = [Self::Enters, Self::Calls, Self::Backing, Self::Allocations];

    /// In words.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Enters => "io_uring_enter",
            Self::Calls => "system calls",
            Self::Backing => "backing operations",
            Self::Allocations => "heap allocations",
        }
    }
}

/// One event whose hits are counted by thread.
#[derive(Debug)]
struct Event {
    what: What,
    folder: PathBuf,
    trigger: String,
}

/// A count that is under way; it ends when it is dropped.
#[derive(Debug)]
pub struct Counter {
    events: Vec<Event>,
    probes: bool,
}

/// Counts by thread.
pub type Counts = BTreeMap<What, BTreeMap<u32, u64>>;

impl Counter {
    /// Counts these from here on.
    ///
    /// # Errors
    /// When the kernel has no such tracing or refuses it.
    pub fn start(wanted: &[What]) -> Result<Self> {
        let mut counter = Self { events: Vec::new(), probes: wanted.contains(&What::Allocations) };
        if counter.probes {
            probe()?;
        }
        for what in wanted {
            match what {
                What::Enters => counter.add(*what, "syscalls/sys_enter_io_uring_enter", "")?,
                What::Calls => counter.add(*what, "raw_syscalls/sys_enter", "")?,
                What::Backing => counter.add(*what, "io_uring/io_uring_submit_req", BACKING)?,
                What::Allocations => {
                    for name in ALLOCATORS {
                        counter.add(*what, &format!("{GROUP}/{name}"), "")?;
                    }
                }
            }
        }
        Ok(counter)
    }

    fn add(&mut self, what: What, event: &str, filter: &str) -> Result<()> {
        let folder = Path::new(ROOT).join("events").join(event);
        let trigger = format!("hist:keys=common_pid{filter}");
        write(&folder.join("trigger"), &trigger)?;
        self.events.push(Event { what, folder, trigger });
        Ok(())
    }

    /// Returns the counts so far.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn read(&self) -> Result<Counts> {
        let mut counts = Counts::new();
        for event in &self.events {
            let path = event.folder.join("hist");
            let text =
                fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            let all = counts.entry(event.what).or_default();
            for (thread, count) in parse(&text) {
                *all.entry(thread).or_default() += count;
            }
        }
        Ok(counts)
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        for event in &self.events {
            let _ = write(&event.folder.join("trigger"), &format!("!{}", event.trigger));
        }
        if self.probes {
            let _ = write(&Path::new(ROOT).join("uprobe_events"), "");
        }
    }
}

/// Sets a probe on each function of the C library's allocator.
fn probe() -> Result<()> {
    let functions: [(&str, usize); 4] = [
        (ALLOCATORS[0], libc::malloc as *const () as usize),
        (ALLOCATORS[1], libc::calloc as *const () as usize),
        (ALLOCATORS[2], libc::realloc as *const () as usize),
        (ALLOCATORS[3], libc::posix_memalign as *const () as usize),
    ];
    let maps = fs::read_to_string("/proc/self/maps")?;
    let mut lines = String::new();
    for (name, address) in functions {
        let (library, offset) = place(&maps, address).with_context(|| format!("no {name}"))?;
        lines += &format!("p:{GROUP}/{name} {library}:{offset:#x}\n");
    }
    write(&Path::new(ROOT).join("uprobe_events"), &lines)
}

/// The file that an address is mapped from, and where in the file.
fn place(maps: &str, address: usize) -> Option<(String, usize)> {
    maps.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (from, to) = fields.first()?.split_once('-')?;
        let number = |text: &str| usize::from_str_radix(text, 16).ok();
        let (from, to) = (number(from)?, number(to)?);
        let offset = number(fields.get(2)?)?;
        let path = fields.get(5)?;
        let inside = (from..to).contains(&address) && path.starts_with('/');
        inside.then(|| ((*path).to_owned(), address - from + offset))
    })
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("write {:?} to {}", text, path.display()))
}

/// Lines are `{ common_pid:        123 } hitcount:          5`.
fn parse(text: &str) -> Vec<(u32, u64)> {
    let lines = text.lines().filter_map(|line| {
        let (key, count) = line.strip_prefix("{ common_pid:")?.split_once("} hitcount:")?;
        Some((key.trim().parse().ok()?, count.trim().parse().ok()?))
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_is_read() {
        let text = "# event histogram\n#\n\n{ common_pid:        123 } hitcount:          5\n\
                    { common_pid:          7 } hitcount:         12\n\nTotals:\n    Hits: 17\n";
        assert_eq!(parse(text), [(123, 5), (7, 12)]);
    }

    #[test]
    fn a_function_is_found_in_its_library() {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let (library, offset) = place(&maps, libc::malloc as *const () as usize).unwrap();
        assert!(library.contains("libc"), "{library}");
        assert!(offset > 0);
        assert_eq!(place(&maps, 1), None);
    }
}
