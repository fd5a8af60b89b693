//! How much memory is left for pools in memory. The kernel refuses nothing before it ends a process
//! for lack of memory, perhaps this one: so writes are refused while there is some left.

use std::path::{Path, PathBuf};

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

/// A file's view of the memory that is left.
#[derive(Debug)]
pub(super) struct Room {
    left: fn() -> Option<u64>,
    unseen: u64,
}

impl Room {
    pub(super) const fn new(left: fn() -> Option<u64>) -> Self {
        Self { left, unseen: 0 }
    }

    /// Whether this number of bytes may be taken. They count as taken then.
    pub(super) fn take(&mut self, bytes: u64) -> bool {
        if bytes > self.unseen {
            let left = (self.left)().unwrap_or(u64::MAX);
            if bytes > left {
                self.unseen = 0;
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
        let mut room = Room::new(|| Some(LEFT.load(Ordering::Relaxed)));
        assert!(room.take(4096));
        assert!(!room.take(2 << 20));
        LEFT.store(0, Ordering::Relaxed);
        assert!(!room.take(4096));
        LEFT.store(4096, Ordering::Relaxed);
        assert!(room.take(4096) && !room.take(8192));
    }
}
