//! Each verb against a daemon on a pool in a file.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use cli_support::Daemon;
use serde_json::json;

const GIB: u64 = 1 << 30;

#[test]
fn add_makes_and_attaches_and_can_be_repeated() {
    let daemon = Daemon::start("1G");
    let uri = daemon.ok(&["add", "--size", "10G", "data"]);
    assert!(uri.starts_with("nbd+unix:///data?socket=/") && uri.lines().count() == 1, "{uri}");
    let again = daemon.json(&["add", "--size", "10G", "data"]);
    assert_eq!((&again["changed"], &again["created"]), (&json!(false), &json!(false)));
    assert_eq!(again["uri"], uri.trim_end());
    assert_eq!(again["volume"]["size_bytes"], 10 * GIB);
    let (code, error) = daemon.failure(&["add", "--size", "11G", "data"]);
    assert!(code == 5 && error.contains("data") && error.contains("size"), "{code} {error}");
    let (code, error) = daemon.failure(&["add", "--size", "1G", "--pool", "none", "x"]);
    assert!(code == 4 && error.contains("none"), "{code} {error}");
    let (code, error) = daemon.failure(&["add", "--size", "1G", "a/b"]);
    assert!(code == 3 && error.starts_with("name is a/b: must"), "{code} {error}");
    let (code, _) = daemon.failure(&["add", "--size", "0", "zero"]);
    assert_eq!(code, 3);
    assert_eq!(daemon.json(&["list"])["volumes"].as_array().unwrap().len(), 1);
}

#[test]
fn attached_and_detached_and_deleted() {
    let daemon = Daemon::start("1G");
    daemon.ok(&["add", "--size", "1G", "data"]);
    assert_eq!(daemon.ok(&["detach", "data"]), "data: detached\n");
    assert_eq!(daemon.ok(&["detach", "data"]), "data: was not attached\n");
    assert_eq!(daemon.json(&["show", "data"])["volume"]["attached"], false);
    let attached = daemon.json(&["attach", "data", "--read-only"]);
    assert_eq!(
        (&attached["changed"], &attached["volume"]["read_only"]),
        (&json!(true), &json!(true))
    );
    let (code, _) = daemon.failure(&["attach", "data"]);
    assert_eq!(code, 7);
    assert_eq!(daemon.json(&["del", "data"])["changed"], true);
    assert_eq!(daemon.json(&["del", "data"])["changed"], false);
    assert_eq!(daemon.ok(&["del", "data"]), "data: there was no such volume\n");
    let (code, error) = daemon.failure(&["show", "data"]);
    assert_eq!((code, error.as_str()), (4, "volume data does not exist"));
}

#[test]
fn a_volume_in_use_is_not_deleted_unless_forced() {
    let daemon = Daemon::start("1G");
    let uri = daemon.ok(&["add", "--size", "1G", "data"]);
    let uri = uri.trim_end().parse().unwrap();
    let client = blockd::nbd_client::Client::connect(&uri, &Default::default()).unwrap();
    let shown = daemon.json(&["show", "data"]);
    assert_eq!(shown["connections"].as_array().unwrap().len(), 1);
    assert!(daemon.ok(&["show", "data"]).contains("CLIENT"));
    for arguments in [&["del", "data"][..], &["detach", "data"]] {
        let (code, error) = daemon.failure(arguments);
        assert!(code == 7 && error.contains("data"), "{code} {error}");
    }
    let deleted = daemon.json(&["del", "data", "--force"]);
    assert_eq!((&deleted["changed"], &deleted["closed_connections"]), (&json!(true), &json!(1)));
    drop(client);
}

#[test]
fn sizes_change_and_shrinking_has_to_be_meant() {
    let daemon = Daemon::start("1G");
    daemon.ok(&["add", "--size", "1G", "data"]);
    assert_eq!(daemon.ok(&["resize", "data", "--size", "2G"]), "data: 2 GiB, was 1 GiB\n");
    assert_eq!(daemon.ok(&["resize", "data", "--size", "2G"]), "data: has 2 GiB already\n");
    let (code, _) = daemon.failure(&["resize", "data", "--size", "1G"]);
    assert_eq!(code, 7);
    let resized = daemon.json(&["resize", "data", "--size", "1G", "--shrink"]);
    assert_eq!(resized["previous_size_bytes"], 2 * GIB);
    assert_eq!(daemon.ok(&["--bytes", "list"]).split_whitespace().nth(10), Some("1073741824"));
}

#[test]
fn pools_are_made_shown_and_drawn() {
    let daemon = Daemon::start("1G");
    daemon.ok(&["add", "--size", "100M", "data"]);
    let create = ["pool", "create", "fast", "--memory", "--size", "64M"];
    assert_eq!(daemon.json(&create)["changed"], true);
    assert_eq!(daemon.json(&create)["changed"], false);
    let (code, _) = daemon.failure(&["pool", "create", "fast", "--memory", "--size", "65M"]);
    assert_eq!(code, 5);
    let list = daemon.ok(&["pool", "list"]);
    assert!(list.starts_with("NAME ") && list.contains("fast"), "{list}");
    assert!(daemon.ok(&["pool", "show", "fast"]).contains("memory"));
    let map = daemon.ok(&["pool", "map", "fast", "--width", "32"]);
    assert!(map.starts_with("pool fast: ") && map.contains("\n#"), "{map}");
    let runs = daemon.json(&["pool", "map"]);
    let count: u64 =
        runs["runs"].as_array().unwrap().iter().map(|run| run["count"].as_u64().unwrap()).sum();
    assert_eq!(count * runs["extent_size"].as_u64().unwrap(), GIB);
    daemon.ok(&["pool", "map", "--svg", "map.svg"]);
    let svg = std::fs::read_to_string(daemon.dir.join("map.svg")).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    let (code, _) = daemon.failure(&["pool", "map", "none"]);
    assert_eq!(code, 4);
}

#[test]
fn top_shows_what_goes_on() {
    let daemon = Daemon::start("1G");
    daemon.ok(&["add", "--size", "100M", "data"]);
    let plain = daemon.ok(&["top", "--once"]);
    assert!(plain.starts_with("POOL ") && plain.contains("\nLATENCY "), "{plain}");
    let snapshot = daemon.json(&["top", "--once"]);
    assert_eq!(snapshot["pools"][0]["name"], "default");
    assert_eq!(snapshot["volumes"][0]["name"], "data");
    assert!(snapshot["interval_ns"].as_u64().unwrap() > 500_000_000);
}

#[test]
fn events_are_told_in_order() {
    let daemon = Daemon::start("1G");
    daemon.ok(&["add", "--size", "100M", "data"]);
    let lines = daemon.ok(&["--json", "events", "--replay", "--count", "3"]);
    let events: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(events.len(), 3);
    assert!(events.is_sorted_by_key(|event| event["sequence"].as_u64()));
    let (code, error) = daemon.failure(&["events", "--pool", "none", "--count", "1"]);
    assert!(code == 4, "{code} {error}");
}

#[test]
fn the_daemons_version_is_shown() {
    let daemon = Daemon::start("1G");
    let version = daemon.json(&["version"]);
    assert_eq!(version["daemon"]["version"], version["version"]);
    assert!(daemon.ok(&["version"]).contains("daemon "));
}

#[test]
fn when_a_volume_was_made_is_known_after_crashes_and_restarts() {
    let mut daemon = Daemon::start("256M");
    daemon.ok(&["add", "--nbd", "--size", "10M", "data"]);
    daemon.ok(&["snapshot", "data=taken"]);
    let made = |daemon: &Daemon| {
        ["data", "taken"].map(|name| {
            let shown = daemon.json(&["show", name]);
            shown["volume"]["made_unix_ms"].as_u64().unwrap()
        })
    };
    let [data, taken] = made(&daemon);
    let now = u64::try_from(blockd::clock::wall_ms()).unwrap();
    assert!(data <= taken && taken <= now && data + 60_000 > now, "{data} {taken} {now}");
    assert!(daemon.ok(&["show", "taken"]).contains(" UTC"));
    daemon.kill();
    daemon.start_again();
    assert_eq!(made(&daemon), [data, taken], "from the log");
    assert!(daemon.terminate().success());
    daemon.start_again();
    assert_eq!(made(&daemon), [data, taken], "from the catalogue");
}
