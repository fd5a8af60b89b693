//! A pool's device that an operator makes smaller, with a writer on its volume, and the daemon
//! killed in between.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::fs;
use std::path::PathBuf;

use cli_support::{Daemon, connect, pattern, wait_until, writer};
use serde_json::Value;

const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;
const SIZE: usize = 48 * MIB;

/// A daemon with a full volume `data` and its snapshot, both in the second half of a pool of 256
/// MiB.
struct Case {
    daemon: Daemon,
    pool: PathBuf,
    content: Vec<u8>,
}

impl Case {
    fn new() -> Self {
        // The rate of writing of the last seconds would keep the space of many seconds free.
        let more = "[pool.space]\nlow = \"off\"\nvery_low = \"off\"\n";
        let daemon = Daemon::start_with("256M", more);
        let pool = daemon.dir.join("default.pool");
        let fill = |volume: &str, content: &[u8]| {
            let size = format!("{}M", content.len() / MIB);
            daemon.ok(&["add", volume, "--size", &size]);
            let mut client = connect(&daemon, volume);
            for (at, part) in content.chunks(MIB).enumerate() {
                client.write((at * MIB) as u64, part, false).unwrap();
            }
            client.flush().unwrap();
        };
        let content = pattern(SIZE, 7);
        fill("before", &pattern(120 * MIB, 3));
        fill("data", &content);
        daemon.ok(&["snapshot", "data", "--tag", "1"]);
        daemon.ok(&["del", "--force", "before"]);
        let is_free = || {
            let pool = daemon.json(&["pool", "show"])["pool"].take();
            pool["releasing_count"] == 0 && pool["pending_bytes"] == 0
        };
        wait_until("the space of the volume is free", is_free);
        Self { daemon, pool, content }
    }

    fn holds(&self, volume: &str, expected: &[u8]) {
        writer::holds(&self.daemon, volume, expected);
    }

    /// Runs commands while the volume `data` is written. Returns its content afterwards as well.
    fn beside_a_writer<T>(&self, commands: impl FnOnce(&Daemon) -> T) -> (T, Vec<u8>) {
        writer::beside_a_writer(&self.daemon, &self.content, commands)
    }

    fn length(&self) -> u64 {
        fs::metadata(&self.pool).unwrap().len()
    }

    fn evacuation(&self) -> Value {
        self.daemon.json(&["pool", "show"])["pool"]["evacuation"].take()
    }
}

#[test]
fn a_file_becomes_shorter_while_its_volume_is_written() {
    let mut case = Case::new();
    let (shrunk, written) = case.beside_a_writer(|daemon| {
        daemon.json(&["pool", "shrink", "--size", "160M", "--rate", "200M"])
    });
    assert_eq!((&shrunk["changed"], &shrunk["has_shrunk"]), (&true.into(), &true.into()));
    assert_eq!((&shrunk["size_bytes"], case.length()), (&(160 << 20).into(), 160 << 20));
    assert_eq!(shrunk["path"], case.pool.to_str().unwrap());
    let shown = case.daemon.json(&["pool", "show"]);
    assert_eq!(shown["pool"]["size_bytes"], 160 << 20);
    case.holds("data", &written);
    case.daemon.ok(&["attach", "data@1", "--read-only"]);
    case.holds("data@1", &case.content);
    let again = case.daemon.json(&["pool", "shrink", "--size", "160M"]);
    assert_eq!((&again["changed"], &again["has_shrunk"]), (&false.into(), &true.into()));
    // As if the daemon had been killed before the file was truncated.
    case.daemon.kill();
    fs::File::options().write(true).open(&case.pool).unwrap().set_len(256 << 20).unwrap();
    case.daemon.start_again();
    case.holds("data", &written);
    let cut = case.daemon.ok(&["pool", "shrink", "--size", "160M"]);
    assert_eq!(cut, format!("{}: unchanged, 160 MiB in pool default\n", case.pool.display()));
    assert_eq!(case.length(), 160 << 20);
    // It grows again, and the file with it stays as long.
    case.daemon.ok(&["pool", "grow", "--size", "+40M"]);
    std::thread::sleep(std::time::Duration::from_millis(1500));
    assert_eq!(case.length(), 200 << 20);
    case.daemon.kill();
    case.daemon.start_again();
    case.holds("data", &written);
}

#[test]
fn a_device_goes_on_to_shrink_when_the_daemon_was_killed_and_stays_when_that_is_asked() {
    let mut case = Case::new();
    let shrink = ["pool", "shrink", "--size", "-96M"];
    let begun = case.daemon.ok(&[&shrink[..], &["--rate", "16K", "--no-wait"]].concat());
    assert!(begun.contains("to 160 MiB") && begun.contains("left"), "{begun}");
    let (_, mut written) = case.beside_a_writer(|_| {
        std::thread::sleep(std::time::Duration::from_millis(500));
    });
    // The next daemon goes on at its own rate: without room before the new end it gets nowhere.
    let free = case.daemon.json(&["pool", "show"])["pool"]["free_bytes"].as_u64().unwrap();
    let thick = (free - (1 << 20)).to_string();
    case.daemon.ok(&["add", "thick", "--thick", "--size", &thick]);
    case.daemon.kill();
    case.daemon.start_again();
    assert_eq!(
        (&case.evacuation()["shrinks_to_bytes"], case.length()),
        (&(160 << 20).into(), 256 << 20)
    );
    case.holds("data", &written);
    let (exit, text) = case.daemon.failure(&["pool", "shrink", "--size", "150M"]);
    assert!(exit == 7 && text.contains("is leaving or shrinking"), "{exit} {text}");
    let stays = case.daemon.ok(&["pool", "shrink", "--abort"]);
    assert_eq!(stays, format!("{} stays at 256 MiB in pool default\n", case.pool.display()));
    assert_eq!((case.evacuation(), case.length()), (Value::Null, 256 << 20));
    case.daemon.ok(&["del", "thick"]);
    // Nothing waits for the end: the daemon cuts the file off by itself.
    case.daemon.ok(&[&shrink[..], &["--rate", "20M", "--no-wait"]].concat());
    case.daemon.kill();
    case.daemon.start_again();
    wait_until("the file is truncated", || case.length() == 160 << 20);
    let shrunk = format!("device {} of pool default has shrunk to 160 MiB", case.pool.display());
    wait_until("the end is in the log", || case.daemon.log().contains(&shrunk));
    case.holds("data", &written);
    written[..BLOCK].fill(0x77);
    let mut client = connect(&case.daemon, "data");
    client.write(0, &[0x77; BLOCK], true).unwrap();
    drop(client);
    case.daemon.kill();
    case.daemon.start_again();
    case.holds("data", &written);
}

#[test]
fn what_cannot_shrink_is_refused_by_name_and_nothing_changes() {
    let case = Case::new();
    case.daemon.ok(&["add", "big", "--size", "60M", "--thick"]);
    for (arguments, code, words) in [
        (&["--size", "257M"][..], 3, "blockd pool grow"),
        (&["--size", "1M"], 3, "for superblocks, log and reserve"),
        (&["--size", "100M"], 3, "for what is in use"),
        (&["--size", "-256M"], 3, "less than 256 MiB"),
        (&["--size", "160M", "--device", "/nowhere"], 3, "a device of pool default"),
        (&["--size", "160M", "--rate", "0"], 3, "at least 1 byte a second"),
    ] {
        let (exit, text) = case.daemon.failure(&[&["pool", "shrink"], arguments].concat());
        assert!(text.contains(words), "{arguments:?}: {text}");
        assert_eq!(exit, code, "{arguments:?}: {text}");
    }
    case.daemon.ok(&["pool", "create", "fast", "--memory", "--size", "64M"]);
    let (exit, text) = case.daemon.failure(&["pool", "shrink", "fast", "--size", "32M"]);
    assert_eq!((exit, text.as_str()), (7, "pool fast is in memory, and stays as long as it is"));
    let without = case.daemon.run(&["pool", "shrink"]);
    assert_eq!(without.status.code(), Some(2), "a size is needed");
    assert_eq!((case.evacuation(), case.length()), (Value::Null, 256 << 20));
    case.holds("data", &case.content);
}

#[test]
fn the_part_of_an_extent_at_the_end_goes_before_the_file_is_truncated() {
    let size = (256 << 20) + (128 << 10);
    let mut daemon = Daemon::start_with(&size.to_string(), "");
    let pool = daemon.dir.join("default.pool");
    daemon.ok(&["add", "data", "--size", "1M"]);
    let length = || fs::metadata(&pool).unwrap().len();
    assert_eq!(length(), size);
    daemon.ok(&["pool", "shrink", "--size", "256M"]);
    assert_eq!(length(), 256 << 20);
    let again = daemon.ok(&["pool", "shrink", "--size", "256M"]);
    assert!(again.contains("unchanged"), "{again}");
    // The pool is refused where a device is smaller than its record.
    daemon.kill();
    daemon.start_again();
    daemon.ok(&["show", "data"]);
}
