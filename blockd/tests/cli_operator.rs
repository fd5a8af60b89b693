//! An operator's day: what is set is shown, mistakes are named as they were made, and nothing is
//! lost by a slip.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::process::Command;

use cli_support::{Daemon, pattern, signal};
use serde_json::json;

const MIB: u64 = 1 << 20;

/// The value of a row of `show`.
fn row<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// A daemon with a volume `data` that holds some MiB.
fn with_data() -> Daemon {
    let daemon = Daemon::start("256M");
    std::fs::write(daemon.dir.join("image"), pattern(4 << 20, 3)).unwrap();
    daemon.ok(&["import", "image", "data"]);
    daemon
}

#[test]
fn what_was_set_is_shown() {
    let daemon = Daemon::start("256M");
    let limits = ["--iops", "500", "--bandwidth", "10M", "--on-full", "timeout=60s"];
    let add = ["add", "--nbd", "--size", "64M", "--thick", "--quota", "100M", "data"];
    daemon.ok(&[&add[..], &limits].concat());
    daemon.ok(&["snapshot", "data=monday"]);
    daemon.ok(&["clone", "monday", "test"]);
    let text = daemon.ok(&["show", "data"]);
    for (name, value) in [
        ("when full", "a write fails after 60 s"),
        ("reserve", "all of it (thick)"),
        ("quota", "100 MiB"),
        ("limits", "500 requests/s, 10 MiB/s"),
        ("snapshots", "monday"),
    ] {
        assert!(text.contains(&format!("{name} ")) && text.contains(value), "{name}: {text}");
    }
    let set_aside = row(&text, "set aside").unwrap();
    assert!(set_aside.ends_with("MiB") && set_aside != "0 B", "{text}");
    let shown = daemon.json(&["show", "monday"]);
    assert_eq!((&shown["snapshots"], &shown["clones"]), (&json!([]), &json!(["test"])));
    assert_eq!(row(&daemon.ok(&["show", "test"]), "made from"), Some("monday"));
    daemon.ok(&["set", "data", "--thin", "--quota", "0", "--iops", "0", "--bandwidth", "0"]);
    let text = daemon.ok(&["show", "data"]);
    assert_eq!((row(&text, "quota"), row(&text, "set aside")), (Some("none"), Some("0 B")));
}

#[test]
fn the_parts_of_a_pool_add_up() {
    let daemon = with_data();
    daemon.ok(&["add", "--nbd", "--size", "64M", "--thick", "kept"]);
    let space = daemon.json(&["space"]);
    let pool = &space["pool"];
    let of = |key: &str| pool[key].as_u64().unwrap();
    let used = of("mapped_bytes") + of("reserved_bytes") + of("metadata_bytes");
    assert_eq!(of("used_bytes"), used);
    let all = used + of("pending_bytes") + of("others_bytes") + of("free_bytes");
    assert_eq!((of("size_bytes"), all), (256 * MIB, 256 * MIB));
    let kept = &space["volumes"][1];
    let unused = kept["reserved_bytes"].as_u64().unwrap();
    let set_aside = kept["set_aside_free_bytes"].as_u64().unwrap();
    assert_eq!((&kept["name"], unused + set_aside), (&json!("kept"), 64 * MIB));
    for text in [daemon.ok(&["space"]), daemon.ok(&["pool", "show"])] {
        let share = |name: &str| -> f64 {
            let value = row(&text, name).unwrap_or_default();
            let share = value.split(", ").nth(1).and_then(|part| part.split(" %").next());
            share.and_then(|share| share.parse().ok()).unwrap_or_default()
        };
        let sum: f64 =
            ["used ", "pending ", "used by others", "free "].into_iter().map(share).sum();
        assert!((sum - 100.0).abs() < 0.01, "{sum}: {text}");
    }
    assert_eq!(daemon.json(&["space", "data"])["pool"], json!(null));
}

#[test]
fn mistakes_have_the_exit_code_and_the_name_of_what_was_typed() {
    let daemon = with_data();
    daemon.ok(&["snapshot", "data=monday"]);
    let cases: [(&[&str], i32, &str); 7] = [
        (&["add", "--size", "1M", "--usage", "file-io", "x"], 3, "usage is file-io"),
        (
            &["pool", "create", "p", "--path", "p.pool", "--size", "1K"],
            3,
            "p.pool is 1024: must be",
        ),
        (&["pool", "create", "p", "--memory", "--size", "1K"], 3, "is 1024: must be"),
        (&["set", "monday", "--quota", "1M"], 7, "volume monday is a snapshot"),
        (&["resize", "monday", "--size", "1G"], 7, "volume monday is a snapshot"),
        (&["add", "--size", "1M", "evil\u{202e}x"], 3, r#"name is "evil\u{202e}x": must be"#),
        (&["snapshot", "data=a\u{200b}"], 3, "name is"),
    ];
    for (arguments, code, part) in cases {
        let (found, error) = daemon.failure(arguments);
        assert!(found == code && error.contains(part), "{arguments:?}: {found} {error}");
    }
    assert!(!daemon.dir.join("p.pool").exists(), "a file is left of a pool that was refused");
    assert_eq!(daemon.json(&["list"])["volumes"].as_array().unwrap().len(), 2);
}

#[test]
fn a_quota_that_is_used_up_already_is_warned_of() {
    let daemon = with_data();
    let output = daemon.run(&["set", "data", "--quota", "1M"]);
    let warning = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{warning}");
    assert!(warning.starts_with("blockd: warning: volume data: the quota is 1 MiB"), "{warning}");
    let set = daemon.json(&["set", "data", "--quota", "100M"]);
    assert_eq!(set["warnings"], json!([]));
}

/// Runs a command on a terminal of its own, with this input.
fn on_terminal(daemon: &Daemon, arguments: &str, input: &str) -> (bool, String) {
    let socket = daemon.process.control_socket();
    let program = env!("CARGO_BIN_EXE_blockd");
    let command = format!("{program} --socket {} {arguments}", socket.display());
    let typed = format!("printf '{input}' | script -qec '{command}' /dev/null");
    let output = Command::new("sh").args(["-c", &typed]).output().unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn a_volume_with_data_is_deleted_from_a_terminal_only_after_a_yes() {
    let daemon = with_data();
    daemon.ok(&["add", "--nbd", "--size", "1M", "empty"]);
    let names = || {
        let list = daemon.json(&["list"]);
        let volumes = list["volumes"].as_array().unwrap().clone();
        volumes.iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let (deleted, text) = on_terminal(&daemon, "del data", "n\\n");
    assert!(!deleted && text.contains("delete volume data of pool default with 4 MiB"), "{text}");
    assert_eq!(names(), ["data", "empty"]);
    let (deleted, text) = on_terminal(&daemon, "del empty", "n\\n");
    assert!(deleted && !text.contains("[y/N]"), "{text}");
    let (deleted, text) = on_terminal(&daemon, "del data", "y\\n");
    assert!(deleted && text.contains("data: deleted"), "{text}");
    daemon.ok(&["import", "image", "data"]);
    let (deleted, text) = on_terminal(&daemon, "del data --yes", "");
    assert!(deleted && !text.contains("[y/N]"), "{text}");
    daemon.ok(&["import", "image", "data"]);
    assert_eq!(daemon.ok(&["del", "data"]), "data: deleted, 4 MiB freed\n");
    assert!(names().is_empty());
}

#[test]
fn a_daemon_that_takes_long_is_said_to_be_waited_for_on_a_terminal() {
    let daemon = with_data();
    daemon.process.freeze().unwrap();
    let text = std::thread::scope(|scope| {
        let listed = scope.spawn(|| on_terminal(&daemon, "list", ""));
        std::thread::sleep(std::time::Duration::from_secs(5));
        daemon.process.signal(nix::sys::signal::Signal::SIGCONT).unwrap();
        listed.join().unwrap().1
    });
    assert!(text.contains("waiting for the daemon") && text.contains("data"), "{text}");
    let (_, text) = on_terminal(&daemon, "list", "");
    assert!(!text.contains("waiting"), "{text}");
}

#[test]
fn a_transfer_is_one_line_of_the_log() {
    let daemon = with_data();
    daemon.ok(&["export", "data", "copy"]);
    let log = daemon.log();
    let connected = log.lines().filter(|line| line.contains(" connected peer=")).count();
    assert_eq!(connected, 2, "an import and an export:\n{log}");
}

#[test]
fn a_transfer_that_is_interrupted_has_the_exit_code_of_that() {
    let daemon = Daemon::start("256M");
    let arguments = ["import", "-", "data", "--size", "64M"];
    let mut import =
        daemon.command(&arguments).stdin(std::process::Stdio::piped()).spawn().unwrap();
    let clock = blockd_media::clock::Clock::start();
    while daemon.json(&["list"])["volumes"][0]["connections"].as_u64().unwrap_or(0) == 0 {
        assert!(clock.elapsed() < cli_support::LIMIT, "{}", daemon.log());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    // Its input goes on: a wait would end it.
    let _input = import.stdin.take();
    signal(&import, "INT");
    assert_eq!(import.wait().unwrap().code(), Some(130));
    assert_eq!(daemon.json(&["list"])["volumes"], json!([]));
}
