//! The devices that volumes lie on, as an operator sets them and as the files show them.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::fs;
use std::os::unix::fs::MetadataExt;

use cli_support::{Daemon, connect, pattern};
use serde_json::Value;

const MIB: usize = 1 << 20;

/// A daemon whose pool has this many files of 64 MiB, and their paths.
fn pool(count: usize) -> (Daemon, Vec<String>) {
    let daemon = Daemon::start("64M");
    let mut paths = vec![daemon.dir.join("default.pool").display().to_string()];
    for number in 1..count {
        let path = file(&daemon, &format!("device{number}"));
        daemon.ok(&["pool", "device", "add", &path]);
        paths.push(path);
    }
    (daemon, paths)
}

fn file(daemon: &Daemon, name: &str) -> String {
    let path = daemon.dir.join(name);
    fs::File::create(&path).unwrap().set_len(64 << 20).unwrap();
    path.display().to_string()
}

/// Whole mebibytes that each file has taken on the disk while mebibytes of a volume were written.
fn taken(daemon: &Daemon, paths: &[String], volume: &str, mebibytes: usize) -> Vec<u64> {
    let allocated = || -> Vec<u64> {
        paths.iter().map(|path| fs::metadata(path).unwrap().blocks() * 512).collect()
    };
    let before = allocated();
    let mut client = connect(daemon, volume);
    for (at, part) in pattern(mebibytes * MIB, 7).chunks(MIB).enumerate() {
        client.write((at * MIB) as u64, part, false).unwrap();
    }
    client.flush().unwrap();
    allocated().iter().zip(before).map(|(after, before)| (after - before) >> 20).collect()
}

fn placement(daemon: &Daemon, volume: &str) -> (Value, Value) {
    let shown = daemon.json(&["show", volume]);
    let volume = &shown["volume"];
    (volume["settings"]["placement"].clone(), volume["pinned_to"].clone())
}

#[test]
fn files_are_allocated_where_a_placement_says() {
    let (mut daemon, paths) = pool(3);
    let pin = format!("pin:{}", paths[2]);
    daemon.ok(&["add", "filled", "--size", "12M"]);
    daemon.ok(&["add", "spread", "--size", "36M", "--placement", "spread"]);
    daemon.ok(&["add", "pinned", "--size", "12M", "--placement", &pin]);
    assert_eq!(placement(&daemon, "filled"), ("fill".into(), Value::Null));
    assert_eq!(placement(&daemon, "spread"), ("spread".into(), Value::Null));
    assert_eq!(placement(&daemon, "pinned"), ("pin".into(), paths[2].as_str().into()));
    // Metadata come on top.
    let of_filled = taken(&daemon, &paths, "filled", 12);
    assert_eq!(of_filled.iter().filter(|taken| **taken >= 11).count(), 1, "{of_filled:?}");
    let of_pinned = taken(&daemon, &paths, "pinned", 12);
    assert!(of_pinned[2] >= 12 && of_pinned[0] + of_pinned[1] <= 3, "{of_pinned:?}");
    let of_spread = taken(&daemon, &paths, "spread", 36);
    assert!(of_spread.iter().all(|taken| (8..=17).contains(taken)), "{of_spread:?}");
    daemon.kill();
    daemon.start_again();
    assert_eq!(placement(&daemon, "spread").0, "spread");
    assert_eq!(placement(&daemon, "pinned"), ("pin".into(), paths[2].as_str().into()));
    let shown = daemon.ok(&["show", "pinned"]);
    assert!(shown.contains(&format!("pinned to {}", paths[2])), "{shown}");
    let scanned = daemon.json(&["pool", "show"]);
    assert!(!scanned["pool"]["devices"].as_array().unwrap().is_empty());
}

#[test]
fn a_wrong_placement_is_refused_by_name_and_changes_nothing() {
    let (daemon, paths) = pool(2);
    daemon.ok(&["add", "a", "--size", "8M", "--iops", "5000"]);
    let nowhere = daemon.dir.join("nowhere").display().to_string();
    let pin = format!("pin:{nowhere}");
    let allowed = format!(
        "placement is {nowhere}: must be a device of pool default: {}, {}",
        paths[0], paths[1]
    );
    assert_eq!(daemon.failure(&["set", "a", "--placement", &pin, "--iops", "7"]), (3, allowed));
    let settings = &daemon.json(&["show", "a"])["volume"]["settings"];
    assert_eq!((&settings["placement"], &settings["iops"]), (&"fill".into(), &5000.into()));
    let (code, line) = daemon.failure(&["add", "b", "--size", "8M", "--placement", &pin]);
    assert!(code == 3 && line.contains("nothing was changed"), "{line}");
    assert_eq!(daemon.failure(&["show", "b"]).0, 4);
    let output = daemon.run(&["set", "a", "--placement", "stripe"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text.contains("'stripe' for '--placement <WHERE>'"), "{text}");
    assert!(text.contains("must be fill, spread, or like pin:/dev/sdc"), "{text}");
    // Set, again, and back.
    for (place, changed) in [("spread", true), ("spread", false), ("fill", true)] {
        let set = daemon.json(&["set", "a", "--placement", place]);
        assert_eq!(
            (&set["changed"], &set["volume"]["settings"]["iops"]),
            (&changed.into(), &5000.into())
        );
        assert_eq!(placement(&daemon, "a").0, place);
    }
}

#[test]
fn a_device_that_is_replaced_hands_its_volumes_on_and_one_that_leaves_has_none() {
    let (daemon, mut paths) = pool(2);
    daemon.ok(&["add", "a", "--size", "16M", "--placement", &format!("pin:{}", paths[1])]);
    daemon.ok(&["add", "b", "--size", "8M"]);
    taken(&daemon, &paths, "a", 4);
    paths.push(file(&daemon, "new"));
    daemon.ok(&["pool", "device", "replace", &paths[1], &paths[2]]);
    assert_eq!(placement(&daemon, "a"), ("pin".into(), paths[2].as_str().into()));
    assert_eq!(placement(&daemon, "b"), ("fill".into(), Value::Null));
    let of_a = taken(&daemon, &paths, "a", 16);
    assert!(of_a[2] >= 11 && of_a[0] <= 3, "{of_a:?}");
    daemon.ok(&["pool", "device", "remove", &paths[2]]);
    assert_eq!(placement(&daemon, "a"), ("pin".into(), Value::Null));
    let shown = daemon.ok(&["show", "a"]);
    assert!(shown.contains("pinned to a device that has left the pool"), "{shown}");
    // Writes continue, on other devices.
    taken(&daemon, &paths, "a", 16);
    daemon.ok(&["set", "a", "--placement", "fill"]);
}
