//! Health of pools with writes that wait for space, beside the metric of them.
#![allow(clippy::unwrap_used, reason = "a test ends where an expectation fails")]

use std::time::Duration;

use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::{Daemon, Settings};

const MIB: u64 = 1 << 20;
/// An interval of health, and what a busy machine adds: much less than the time for which other
/// causes are held.
const SOON: Duration = Duration::from_secs(20);
const CODE: &str = "writes-blocked";

fn full_pool() -> Daemon {
    let tables = "[metrics]\naddress = \"127.0.0.1:0\"\n\
                  [health]\ninterval = \"1s\"\nhold = \"60s\"\n";
    let settings = Settings {
        pool_size: 64 * MIB,
        pool_lines: "[pool.space]\nlow = \"off\"\nvery_low = \"off\"\n".to_owned(),
        tables: tables.to_owned(),
        ..Settings::default()
    };
    let mut daemon = Daemon::new("waits", &settings).unwrap();
    daemon.start().unwrap();
    for name in ["fills", "waits"] {
        daemon.add(name, 128 * MIB).unwrap();
    }
    daemon.cli(&["set", "fills", "--on-full", "error"]).unwrap();
    let mut fills = daemon.connect("fills").unwrap();
    let full = (0..128).any(|at| fills.write(at * MIB, &vec![1; 1 << 20]).is_err());
    assert!(full, "the pool is not full");
    daemon
}

/// Whether health reports a waiting write.
fn is_reported(daemon: &Daemon) -> bool {
    daemon.cli(&["health"]).unwrap().to_string().contains(CODE)
}

fn within(limit: Duration, what: &str, daemon: &Daemon, mut holds: impl FnMut() -> bool) {
    let begun = Clock::start();
    while !holds() {
        let health = daemon.cli(&["health"]).unwrap();
        assert!(begun.elapsed() < limit, "{what}: not within {limit:?}: {health}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Writes that wait, by the metric of all volumes.
fn blocked_writes(daemon: &Daemon) -> u64 {
    let metrics = daemon.metrics().unwrap();
    let lines = metrics.lines().filter(|line| line.starts_with("blockd_blocked_writes{"));
    let counts: Vec<u64> =
        lines.map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap()).collect();
    assert!(!counts.is_empty(), "no such metric: {metrics}");
    counts.into_iter().sum()
}

/// A write waits, `end` ends it, and health and metrics agree before and after.
fn waits_and_ends(on_full: &str, end: impl FnOnce(&Daemon)) {
    let daemon = full_pool();
    daemon.cli(&["set", "waits", "--on-full", on_full]).unwrap();
    let mut waits = daemon.connect("waits").unwrap();
    let write = std::thread::spawn(move || waits.write(0, &[2; 4096]));
    within(SOON, "a write that waits is reported", &daemon, || is_reported(&daemon));
    assert_eq!(blocked_writes(&daemon), 1);
    end(&daemon);
    assert!(write.join().unwrap().is_err());
    within(SOON, "no write waits", &daemon, || !is_reported(&daemon));
    assert_eq!(blocked_writes(&daemon), 0);
}

#[test]
fn a_write_that_was_refused_after_its_timeout_is_no_longer_reported_as_waiting() {
    waits_and_ends("timeout=8s", |_| ());
}

#[test]
fn a_write_that_ended_with_its_attachment_is_no_longer_reported_as_waiting() {
    waits_and_ends("block", |daemon| {
        daemon.cli(&["detach", "--force", "waits"]).unwrap();
    });
}
