//! How much memory is left for pools in memory. The kernel refuses nothing before it ends a process
//! for lack of memory, perhaps this one: so writes are refused while there is some left.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::clock::boot_ns;

/// The part of the memory that pools leave to everything else, and the most of it.
const RESERVED_PART: u64 = 16;
const MOST_RESERVED: u64 = 1 << 30;

/// Bytes of memory that files in memory may still take: of the machine, or of the control group
/// that leaves less. `None` where the kernel does not say.
#[must_use]
pub(super) fn left() -> Option<u64> {
    let text = |path: &Path| std::fs::read_to_string(path).ok();
    let machine = of_machine(&text(Path::new("/proc/meminfo"))?)?;
    let group = text(Path::new("/proc/self/cgroup")).and_then(|text| own_group(&text));
    let groups = group.iter().flat_map(|group| group.ancestors()).filter_map(|group| {
        let file = |name| text(&group.join(name));
        of_group(&file("memory.max")?, &file("memory.current")?, &file("memory.stat")?)
    });
    groups.chain([machine]).min()
}

/// The rest of `available` bytes when the reserve is kept.
fn beyond_reserve(total: u64, available: u64) -> u64 {
    available.saturating_sub((total / RESERVED_PART).min(MOST_RESERVED))
}

/// From `/proc/meminfo`.
fn of_machine(text: &str) -> Option<u64> {
    let kib = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse().ok()
    };
    Some(beyond_reserve(kib("MemTotal:")? << 10, kib("MemAvailable:")? << 10))
}

/// From the files of a control group. The page cache counts as available: the kernel takes it back
/// before it refuses anything.
fn of_group(max: &str, current: &str, stat: &str) -> Option<u64> {
    let max: u64 = max.trim().parse().ok()?;
    let current: u64 = current.trim().parse().ok()?;
    let of = |name: &str| {
        let line = stat.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|value| value.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    let cache = of("active_file ") + of("inactive_file ");
    Some(beyond_reserve(max, max.saturating_sub(current.saturating_sub(cache))))
}

/// The folder of this process's control group, from `/proc/self/cgroup` of version 2.
fn own_group(text: &str) -> Option<PathBuf> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(Path::new("/sys/fs/cgroup").join(path))
}

/// Bytes that a file may take before it reads again how much memory is left: far less than the
/// reserve, also where dozens of files grow at the same time.
const MOST_UNSEEN: u64 = 16 << 20;

/// How long a refusal holds without another look. A worker reads some files of the kernel at each
/// look; hundreds of writes that wait for memory are each tried again several times a second.
const REFUSED_FOR: Duration = Duration::from_millis(50);

/// Where a file learns how much memory is left, and the time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Memory {
    /// Bytes that may still be taken; `None` where that is not known.
    pub(super) left: fn() -> Option<u64>,
    /// Nanoseconds that only grow.
    pub(super) now_ns: fn() -> u64,
}

impl Memory {
    /// The memory of this machine.
    pub(super) const MACHINE: Self = Self { left, now_ns: boot_ns };
}

/// A file's view of the memory that is left.
#[derive(Debug)]
pub(super) struct Room {
    memory: Memory,
    unseen: u64,
    /// When the last refusal ends, in nanoseconds, and of how many bytes it was. Fewer may be left.
    refused: (u64, u64),
}

impl Room {
    pub(super) const fn new(memory: Memory) -> Self {
        Self { memory, unseen: 0, refused: (0, 0) }
    }

    /// Whether this number of bytes may be taken. They count as taken then.
    pub(super) fn take(&mut self, bytes: u64) -> bool {
        if bytes > self.unseen {
            let now = (self.memory.now_ns)();
            let (until, least) = self.refused;
            if now < until && bytes >= least {
                return false;
            }
            let left = (self.memory.left)().unwrap_or(u64::MAX);
            if bytes > left {
                self.unseen = 0;
                let hold = u64::try_from(REFUSED_FOR.as_nanos()).unwrap_or(u64::MAX);
                self.refused = (now.saturating_add(hold), bytes);
                return false;
            }
            // Others may look at the same moment: each takes a part only.
            self.unseen = bytes.max((left / 4).min(MOST_UNSEEN));
        }
        self.unseen -= bytes;
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn the_machine_keeps_a_part_of_its_memory() {
        let text = "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    4194304 kB\n";
        assert_eq!(of_machine(text), Some(3 << 30));
        let text = "MemTotal: 1024 kB\nMemAvailable: 63 kB\n";
        assert_eq!(of_machine(text), Some(0));
        assert_eq!(of_machine("MemTotal: 1 kB\n"), None);
        assert!(left().is_some());
    }

    #[test]
    fn a_control_group_has_its_limit_less_what_it_uses() {
        let stat = "anon 1\nactive_file 100\ninactive_file 28\nshmem 5\n";
        assert_eq!(of_group("1600\n", "1000\n", stat), Some(1600 - 872 - 100));
        assert_eq!(of_group("max\n", "1000\n", stat), None);
        let group = own_group("0::/system.slice/blockd.service\n").unwrap();
        assert_eq!(group, Path::new("/sys/fs/cgroup/system.slice/blockd.service"));
        assert_eq!(own_group("1:name=systemd:/\n"), None);
    }

    #[test]
    fn nothing_is_taken_when_nothing_is_left() {
        static LEFT: AtomicU64 = AtomicU64::new(1 << 20);
        static LOOKS: AtomicU64 = AtomicU64::new(0);
        static NOW_NS: AtomicU64 = AtomicU64::new(1);
        let left = || {
            LOOKS.fetch_add(1, Ordering::Relaxed);
            Some(LEFT.load(Ordering::Relaxed))
        };
        let later = || NOW_NS.fetch_add(50_000_000, Ordering::Relaxed);
        let mut room = Room::new(Memory { left, now_ns: || NOW_NS.load(Ordering::Relaxed) });
        assert!(room.take(4096));
        assert!(!room.take(2 << 20));
        // A small one, such as a page of the map, still fits then.
        assert!(room.take(512 << 10));
        LEFT.store(0, Ordering::Relaxed);
        assert!(!room.take(4096));
        // Refused writes that are tried again cost no look, whatever there is by now.
        LEFT.store(4096, Ordering::Relaxed);
        let looks = LOOKS.load(Ordering::Relaxed);
        for _ in 0..100 {
            assert!(!room.take(4096));
        }
        assert_eq!(LOOKS.load(Ordering::Relaxed), looks);
        later();
        assert!(room.take(4096) && !room.take(8192));
    }
}
