//! Devices of a pool that an operator evens out, with a writer on its volume, and the daemon killed
//! in between.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::fs;

use cli_support::{Daemon, connect, pattern, wait_until, writer};
use serde_json::Value;

const MIB: usize = 1 << 20;
const SIZE: usize = 96 * MIB;

/// A daemon with a full volume `data` and its snapshot on the first of two devices.
struct Case {
    daemon: Daemon,
    content: Vec<u8>,
}

impl Case {
    fn new() -> Self {
        // The rate of writing of the last seconds would keep the space of many seconds free.
        let daemon =
            Daemon::start_with("128M", "[pool.space]\nlow = \"off\"\nvery_low = \"off\"\n");
        let content = pattern(SIZE, 7);
        daemon.ok(&["add", "data", "--size", "96M"]);
        let mut client = connect(&daemon, "data");
        for (at, part) in content.chunks(MIB).enumerate() {
            client.write((at * MIB) as u64, part, false).unwrap();
        }
        client.flush().unwrap();
        daemon.ok(&["snapshot", "data", "--tag", "1"]);
        let path = daemon.dir.join("more");
        fs::File::create(&path).unwrap().set_len(256 << 20).unwrap();
        daemon.ok(&["pool", "device", "add", path.to_str().unwrap()]);
        Self { daemon, content }
    }

    fn status(&self) -> Value {
        self.daemon.json(&["pool", "rebalance", "--status"])["rebalance"].take()
    }

    /// Used shares of the devices in thousandths, by this key.
    fn shares(&self, key: &str) -> Vec<u64> {
        let status = self.status();
        let number = |value: &Value| value.as_u64().unwrap();
        let devices = status["devices"].as_array().unwrap().iter();
        devices.map(|one| number(&one[key]) * 1000 / number(&one["total_bytes"])).collect()
    }
}

#[test]
fn devices_are_evened_out_while_the_volume_is_written_and_the_daemon_is_killed() {
    let mut case = Case::new();
    let shares = case.shares("used_bytes");
    assert!(shares[0] > 700 && shares[1] < 20, "{shares:?}");
    let begin = ["pool", "rebalance", "--rate", "8M", "--no-wait"];
    let (begun, mut written) = writer::beside_a_writer(&case.daemon, &case.content, |daemon| {
        let begun = daemon.ok(&begin);
        let moved = || {
            let shown = daemon.json(&["pool", "show"])["pool"]["rebalance"].take();
            shown["state"] == "running" && shown["moved_bytes"].as_u64() > Some(4 << 20)
        };
        wait_until("something is moved", moved);
        begun
    });
    assert!(begun.contains(" to be moved") && begun.contains("8 MiB/s"), "{begun}");
    assert!(case.daemon.ok(&["pool", "show"]).contains(" to be moved"));
    case.daemon.kill();
    case.daemon.start_again();
    assert_eq!(case.status()["state"], Value::Null);
    writer::holds(&case.daemon, "data", &written);
    let (done, again) = writer::beside_a_writer(&case.daemon, &written, |daemon| {
        daemon.json(&["pool", "rebalance", "--rate", "200M"])
    });
    written = again;
    assert_eq!((&done["changed"], &done["rebalance"]["state"]), (&true.into(), &"even".into()));
    assert!(done["rebalance"]["moved_bytes"].as_u64() > Some(8 << 20), "{done}");
    let shares = case.shares("used_bytes");
    assert!(
        shares[0].abs_diff(shares[1]) <= 30,
        "{shares:?}, before {:?}",
        case.shares("before_bytes")
    );
    writer::holds(&case.daemon, "data", &written);
    case.daemon.ok(&["attach", "data@1", "--read-only"]);
    writer::holds(&case.daemon, "data@1", &case.content);
    let log = case.daemon.log();
    assert!(log.contains("devices of pool default are evened out: "), "{log}");
    wait_until("the end is in the log", || {
        case.daemon.log().contains("devices of pool default are evenly used; ")
    });
    case.daemon.kill();
    case.daemon.start_again();
    writer::holds(&case.daemon, "data", &written);
}

#[test]
fn a_rebalance_is_aborted_and_excludes_devices_that_leave() {
    let case = Case::new();
    let begin = ["pool", "rebalance", "--rate", "1M", "--no-wait"];
    case.daemon.ok(&begin);
    let aborted = case.daemon.json(&["pool", "rebalance", "--abort"]);
    assert_eq!(
        (&aborted["changed"], &aborted["rebalance"]["state"]),
        (&true.into(), &"aborted".into())
    );
    let again = case.daemon.ok(&["pool", "rebalance", "--abort"]);
    assert_eq!(again, "default: unchanged, no rebalance is running\n");
    case.daemon.ok(&begin);
    let late = ["pool", "rebalance", "--wait", "300ms"];
    let (exit, text) = case.daemon.failure(&late);
    assert!(exit == 7 && text.contains("is not even after 300ms"), "{exit} {text}");
    let more = case.daemon.dir.join("more");
    let remove = ["pool", "device", "remove", more.to_str().unwrap()];
    case.daemon.ok(&[&remove[..], &["--no-wait"]].concat());
    assert_eq!(case.status()["state"], "displaced");
    let (exit, text) = case.daemon.failure(&begin);
    assert!(exit == 7 && text.contains("is leaving or shrinking: wait, or keep"), "{exit} {text}");
    case.daemon.ok(&[&remove[..], &["--abort"]].concat());
    case.daemon.ok(&begin);
    writer::holds(&case.daemon, "data", &case.content);
}
