//! A device that leaves a pool, in the events and metrics of the daemon.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::fs;

use cli_support::{Daemon, connect, pattern, wait_until};
use serde_json::Value;

const MIB: usize = 1 << 20;

/// A daemon with metrics, and the path of a file that may join its pool.
fn with_spare() -> (Daemon, String) {
    let mut daemon = Daemon::start("64M");
    let path = daemon.dir.join("spare");
    fs::File::create(&path).unwrap().set_len(256 << 20).unwrap();
    let text = fs::read_to_string(daemon.config()).unwrap();
    let more = format!("spare_devices = [{path:?}]\n[metrics]\naddress = \"127.0.0.1:0\"\n");
    fs::write(daemon.config(), text + &more).unwrap();
    assert!(daemon.terminate().success());
    daemon.start_again();
    (daemon, path.display().to_string())
}

/// The value of a metric of the daemon's pool.
fn metric(daemon: &Daemon, name: &str) -> u64 {
    let text = daemon.process.metrics().unwrap();
    let line = text.lines().find(|line| line.split('{').next() == Some(name));
    line.unwrap_or_else(|| panic!("{name}: {text}")).rsplit(' ').next().unwrap().parse().unwrap()
}

/// Events about devices that leave: kinds and texts.
fn events(daemon: &Daemon) -> Vec<(String, String)> {
    // The last event until now ends the output.
    let last = daemon.json(&["add", "last", "--size", "1M"]);
    assert_eq!(last["changed"], true);
    let lines = |count: &str| daemon.ok(&["--json", "events", "--replay", "--count", count]);
    let mut count = 1;
    let all = loop {
        let all: Vec<Value> = lines(&count.to_string())
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        if all.last().unwrap()["volume"] == "last" {
            break all;
        }
        count += 1;
    };
    daemon.ok(&["del", "last"]);
    let word = |value: &Value| value.as_str().unwrap().to_owned();
    let kinds = all.iter().map(|one| (word(&one["kind"]), word(&one["text"])));
    let is_ours = |kind: &str| ["device_leaves", "device_left", "device_stays"].contains(&kind);
    kinds.filter(|(kind, _)| is_ours(kind)).collect()
}

#[test]
fn a_device_that_leaves_stays_and_leaves_again_is_in_events_and_metrics() {
    let (daemon, path) = with_spare();
    for (volume, size) in [("a", 40), ("b", 32)] {
        daemon.ok(&["add", volume, "--size", &format!("{size}M")]);
        let mut client = connect(&daemon, volume);
        for at in 0..size {
            client.write((at * MIB) as u64, &pattern(MIB, at as u64), false).unwrap();
        }
        client.flush().unwrap();
    }
    let devices = || daemon.json(&["pool", "device", "list"])["devices"].take();
    wait_until("the spare joins", || devices().as_array().unwrap().len() == 2);
    daemon.ok(&["del", "--force", "a"]);
    let remove = ["pool", "device", "remove", &path];
    let slow = [&remove[..], &["--rate", "1M", "--no-wait"]].concat();
    // The space of the volume comes free in the background.
    wait_until("the device begins to leave", || daemon.run(&slow).status.success());
    assert_eq!(metric(&daemon, "blockd_pool_leaving_devices"), 1);
    assert!(metric(&daemon, "blockd_pool_evacuation_left_bytes") > 0);
    let moved = || metric(&daemon, "blockd_pool_evacuation_moved_bytes_total");
    wait_until("bytes are copied", || moved() > 0);
    daemon.ok(&[&remove[..], &["--abort"]].concat());
    assert_eq!(metric(&daemon, "blockd_pool_leaving_devices"), 0);
    daemon.ok(&[&remove[..], &["--rate", "1G"]].concat());
    assert_eq!(metric(&daemon, "blockd_pool_leaving_devices"), 0);
    assert_eq!(metric(&daemon, "blockd_pool_evacuation_left_bytes"), 0);
    let left = format!("device {path} has left pool default");
    wait_until("the device's end is an event", || daemon.log().contains(&left));
    let events = events(&daemon);
    let kinds: Vec<&str> = events.iter().map(|(kind, _)| kind.as_str()).collect();
    assert_eq!(kinds, ["device_leaves", "device_stays", "device_leaves", "device_left"]);
    let begins = format!("device {path} leaves pool default: ");
    assert!(events[0].1.starts_with(&begins), "{events:?}");
    assert_eq!(events[1].1, format!("device {path} stays in pool default"));
    assert_eq!(events[3].1, left);
}

#[test]
fn the_rate_of_a_device_that_leaves_is_kept_over_a_restart() {
    let (mut daemon, path) = with_spare();
    daemon.ok(&["add", "a", "--size", "32M"]);
    let mut client = connect(&daemon, "a");
    for at in 0..32 {
        client.write((at * MIB) as u64, &pattern(MIB, at as u64), false).unwrap();
    }
    client.disconnect().unwrap();
    daemon.ok(&["pool", "device", "add", &path]);
    daemon.ok(&["pool", "rebalance", "--rate", "1G"]);
    let rate = |daemon: &Daemon| {
        daemon.json(&["pool", "show"])["pool"]["evacuation"]["rate_bytes"].clone()
    };
    daemon.ok(&["pool", "device", "remove", &path, "--rate", "64K", "--no-wait"]);
    assert_eq!(rate(&daemon), 64 << 10);
    for is_killed in [false, true] {
        match is_killed {
            false => assert!(daemon.terminate().success()),
            true => daemon.kill(),
        }
        daemon.start_again();
        assert_eq!(rate(&daemon), 64 << 10, "{is_killed}");
    }
    daemon.ok(&["pool", "device", "remove", &path, "--rate", "1G"]);
}
