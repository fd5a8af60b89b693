//! Each verb against a daemon on a pool in a file.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::time::Duration;

use blockd_media::clock::Clock;
use cli_support::{Daemon, LIMIT};
use serde_json::{Value, json};

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
    let (code, error) = daemon.failure(&["add", "--size", "1G", "a/b/c"]);
    assert!(code == 3 && error.starts_with("volume is a/b/c: must"), "{code} {error}");
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
    let client = blockd_nbd::client::Client::connect(&uri, &Default::default()).unwrap();
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
fn events_are_sent_in_order() {
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
    let now = u64::try_from(blockd_media::clock::wall_ms()).unwrap();
    assert!(data <= taken && taken <= now && data + 60_000 > now, "{data} {taken} {now}");
    assert!(daemon.ok(&["show", "taken"]).contains(" UTC"));
    daemon.kill();
    daemon.start_again();
    assert_eq!(made(&daemon), [data, taken], "from the log");
    assert!(daemon.terminate().success());
    daemon.start_again();
    assert_eq!(made(&daemon), [data, taken], "from the catalogue");
}

/// Polls the daemon until the condition holds.
fn until(daemon: &Daemon, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    let clock = Clock::start();
    loop {
        let health = daemon.json(&["health"]);
        if is_so(&health) {
            return health;
        }
        assert!(clock.elapsed() < LIMIT, "not {what}: {health:#}\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Codes of the first of a kind, those of a volume without those of its pool.
fn codes(health: &Value, kind: &str) -> Vec<String> {
    let causes = health[kind][0]["causes"].as_array().unwrap();
    let own = causes.iter().filter(|cause| cause["of_pool"] == false);
    own.map(|cause| cause["code"].as_str().unwrap().to_owned()).collect()
}

/// Rows: H2, H3, H7.
#[test]
fn a_pool_whose_file_is_cut_short_is_reported_and_recovers() {
    let mut daemon = Daemon::start_with("256M", "[health]\ninterval = \"1s\"\nhold = \"1s\"");
    std::fs::write(daemon.dir.join("image"), cli_support::pattern(16 << 20, 5)).unwrap();
    daemon.ok(&["import", "image", "data"]);
    assert_eq!(daemon.ok(&["health"]), "healthy: 1 pool and 1 volume\n");
    daemon.ok(&["health", "default", "default/data", "/data", "--check"]);
    let (code, error) = daemon.failure(&["health", "default/none"]);
    assert!(code == 4 && error.contains("none"), "{code} {error}");
    // A watching client continues after a restart of the daemon.
    let lines = std::fs::File::create(daemon.dir.join("lines")).unwrap();
    let mut watch = daemon.command(&["--json", "health", "--watch"]).stdout(lines).spawn().unwrap();
    let of_watch = daemon.dir.join("lines");
    let watched = || std::fs::read_to_string(&of_watch).unwrap();
    let clock = Clock::start();
    while watched().is_empty() {
        assert!(clock.elapsed() < LIMIT, "it does not watch");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(daemon.terminate().success());
    daemon.start_again();
    // The volume's data is gone as if the disk had lost it.
    let pool = daemon.dir.join("default.pool");
    let file = std::fs::File::options().write(true).open(&pool).unwrap();
    file.set_len(1 << 20).unwrap();
    assert_ne!(daemon.run(&["export", "data", "copy"]).status.code(), Some(0));
    let health = until(&daemon, "reported", |health| {
        let pool = codes(health, "pools");
        let has = |code: &str| pool.iter().any(|one| one == code);
        has("device-gone") && has("device-errors") && codes(health, "volumes") == ["io-errors"]
    });
    let gone = &health["pools"][0]["causes"][0];
    assert_eq!((&gone["reason"], &gone["severity"]), (&json!("truncated"), &json!("failure")));
    assert_eq!(gone["device"], pool.to_str().unwrap());
    let (code, error) = daemon.failure(&["health", "--check"]);
    assert_eq!((code, error.as_str()), (7, "2 of 2 pools and volumes are not healthy"));
    let text = daemon.ok(&["health"]);
    assert!(text.contains("default/data") && text.contains("touches 1 volume"), "{text}");
    // A watching client polls every second, and misses causes that come and go in between.
    let clock = Clock::start();
    while !watched().contains("device-gone") {
        assert!(clock.elapsed() < LIMIT, "{}", watched());
        std::thread::sleep(Duration::from_millis(20));
    }
    // It is as long as it was.
    file.set_len(256 << 20).unwrap();
    until(&daemon, "back", |health| !codes(health, "pools").contains(&"device-gone".to_owned()));
    assert_eq!(daemon.json(&["health"])["healthy"], false, "errors stay");
    // Nothing is held up by that.
    daemon.ok(&["import", "image", "more"]);
    until(&daemon, "healthy", |_| daemon.json(&["health", "--acknowledge"])["healthy"] == true);
    // Both of them.
    let clock = Clock::start();
    while !(watched().contains(r#""change":"ended""#) && watched().contains("io-errors")) {
        assert!(clock.elapsed() < LIMIT, "{}", watched());
        std::thread::sleep(Duration::from_millis(100));
    }
    watch.kill().unwrap();
    watch.wait().unwrap();
    let lines = watched();
    assert!(lines.contains(r#""change":"began""#) && lines.contains("device-gone"), "{lines}");
    let log = daemon.log();
    let logged = |text: &str| log.lines().filter(|line| line.contains(text)).count();
    assert_eq!(logged("failure: device-gone: device"), 1, "{log}");
    assert_eq!(logged("INFO pool default is healthy again after"), 1, "{log}");
    assert_eq!(logged("volume data of pool default is healthy again after"), 1, "{log}");
    daemon.kill();
}
