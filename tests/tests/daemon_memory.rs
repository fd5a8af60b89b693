//! The memory of a daemon that has nothing to do: it takes what it uses, not what it could use.
#![allow(clippy::unwrap_used, reason = "test code")]

use std::fs;

use blockd_testkit::daemon::{Daemon, Settings};

const MIB: u64 = 1 << 20;

/// A field of `/proc/PID/status`, in bytes.
fn field(daemon: &Daemon, name: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{}/status", daemon.pid().unwrap())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_end_matches("kB").trim().parse::<u64>().unwrap() << 10
}

/// Bytes that are in memory, and those of them that are the daemon's own, which stay there: it
/// locks each page when it is used first. Pages of its program are not among these: how many of
/// them come with one that is used depends on how they lie in the kernel's cache. Memory that rings
/// have registered is pinned.
fn resident_and_locked(daemon: &Daemon) -> (u64, u64) {
    let status = |name| field(daemon, name);
    let own = status("RssAnon:") + status("RssShmem:");
    (status("VmRSS:"), own.max(status("VmPin:")))
}

#[test]
fn a_daemon_takes_the_memory_that_it_uses() {
    let settings = |workers: u32| Settings {
        pool_size: 64 * MIB,
        tables: format!("[workers]\ncount = {workers}"),
        ..Settings::default()
    };
    let mut daemon = Daemon::new("memory", &settings(2)).unwrap();
    daemon.start().unwrap();
    let (resident, _) = resident_and_locked(&daemon);
    assert!(resident <= 40 * MIB, "{resident} bytes with an empty pool");
    daemon.stop().unwrap();
    // A pool that is missing takes no memory: the daemon is empty, and serves.
    fs::rename(daemon.pool(), daemon.folder().join("elsewhere")).unwrap();
    daemon.start().unwrap();
    let (resident, locked) = resident_and_locked(&daemon);
    assert!(resident <= 40 * MIB, "{resident} bytes are resident");
    assert!(locked <= 5 * MIB, "{locked} bytes are locked");
    daemon.stop().unwrap();
    // As many workers as there can be: half of what each takes are the queues of its ring.
    daemon.configure(&settings(16)).unwrap();
    daemon.start().unwrap();
    let (resident, locked) = resident_and_locked(&daemon);
    assert!(resident <= 48 * MIB, "{resident} bytes are resident with 16 workers");
    assert!(locked <= 18 * MIB, "{locked} bytes are locked with 16 workers");
    daemon.stop().unwrap();
}
