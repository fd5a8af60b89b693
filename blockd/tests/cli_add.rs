//! `blockd add` does all of it or nothing: after an error, volumes and settings are as before.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use cli_support::Daemon;
use serde_json::{Value, json};

/// The volumes without what changes by itself.
fn listed(daemon: &Daemon) -> Vec<Value> {
    daemon.json(&["list"])["volumes"].as_array().unwrap().clone()
}

/// Runs a command that fails, and checks that nothing was changed by it.
fn changes_nothing(daemon: &Daemon, arguments: &[&str]) -> (i32, String) {
    let before = listed(daemon);
    let (code, error) = daemon.failure(arguments);
    assert_eq!(listed(daemon), before, "{arguments:?}: {error}");
    (code, error)
}

#[test]
fn a_new_volume_that_fails_in_part_is_not_left() {
    let daemon = Daemon::start("64M");
    let add = ["add", "--nbd", "--size", "1G", "data"];
    let with = |more: &[&'static str]| [&add[..], more].concat();
    let cases = [
        (with(&["--thick"]), 6, "no space"),
        (with(&["--reserve", "2G"]), 6, "no space"),
        (with(&["--reserve", "20M", "--quota", "10M"]), 3, "no more than the quota"),
        (with(&["--thin", "--quota", "8E"]), 3, "quota"),
        (with(&["--block-size", "3K"]), 3, "block-size"),
    ];
    for (arguments, code, part) in cases {
        let (found, error) = changes_nothing(&daemon, &arguments);
        assert!(found == code && error.contains(part), "{arguments:?}: {found} {error}");
    }
    daemon.ok(&add);
}

#[test]
fn a_volume_that_cannot_be_attached_is_not_left() {
    let daemon = Daemon::start("64M");
    // The list of attachments cannot be written: a folder has its name.
    let file = daemon.dir.join("attachments.json");
    std::fs::create_dir(&file).unwrap();
    let add = ["add", "--nbd", "--size", "1G", "--quota", "10M", "data"];
    let (_, error) = changes_nothing(&daemon, &add);
    assert!(error.contains("attachments.json"), "{error}");
    assert!(error.ends_with("; nothing was changed"), "{error}");
    let image = daemon.dir.join("image");
    std::fs::write(&image, cli_support::pattern(1 << 20, 1)).unwrap();
    let (_, error) = changes_nothing(&daemon, &["import", "image", "copy"]);
    assert!(error.contains("attachments.json"), "{error}");
    std::fs::remove_dir(&file).unwrap();
    daemon.ok(&add);
    daemon.ok(&["import", "image", "copy"]);
}

#[test]
fn a_volume_that_is_there_keeps_its_settings_when_a_part_fails() {
    let daemon = Daemon::start("64M");
    daemon.ok(&["add", "--nbd", "--size", "1G", "--quota", "10M", "data"]);
    let add = ["add", "--nbd", "--size", "1G", "--quota", "20M", "data"];
    let other = ["add", "--nbd", "--size", "2G", "--quota", "20M", "data"];
    let (code, error) = changes_nothing(&daemon, &other);
    assert!(code == 5 && error.contains("size in bytes 1073741824"), "{code} {error}");
    daemon.ok(&["detach", "data"]);
    daemon.ok(&["attach", "--nbd", "--read-only", "data"]);
    let (code, error) = changes_nothing(&daemon, &add);
    assert!(code == 7 && error.contains("is attached read-only already"), "{code} {error}");
    daemon.ok(&["detach", "data"]);
    // With the size and the attachment that it has, the settings are those that are named.
    let again = daemon.json(&add);
    let parts = ["changed", "created", "configured", "attached"].map(|key| &again[key]);
    assert_eq!(parts, [&json!(true), &json!(false), &json!(true), &json!(true)]);
    assert_eq!(again["volume"]["settings"]["quota_bytes"], 20 << 20);
    let again = daemon.json(&add);
    let parts = ["changed", "created", "configured", "attached"].map(|key| &again[key]);
    assert_eq!(parts, [&json!(false); 4]);
}

#[test]
fn a_snapshot_of_that_name_is_refused_and_named() {
    let daemon = Daemon::start("64M");
    daemon.ok(&["add", "--nbd", "--size", "1M", "data"]);
    daemon.ok(&["snapshot", "data=taken"]);
    let (code, error) = changes_nothing(&daemon, &["add", "--nbd", "--size", "1M", "taken"]);
    assert!(code == 5 && error.contains("origin data, asked for none"), "{code} {error}");
    let (code, error) = changes_nothing(&daemon, &["set", "taken", "--quota", "1M"]);
    assert!(code == 7 && error.starts_with("volume taken is a snapshot"), "{code} {error}");
}

/// No kernel driver is needed to refuse: the tests of virtual machines have the rest.
#[test]
fn encryption_that_is_refused_changes_nothing() {
    let daemon = Daemon::start("64M");
    let key = daemon.dir.join("key");
    let key = key.to_str().unwrap();
    let fails = |size, name| {
        let words = ["add", "--encrypt", "--key-file", key, "--size", size, name];
        changes_nothing(&daemon, &words)
    };
    let (_, error) = fails("1M", "sealed");
    assert!(error.contains("key: No such file"), "{error}");
    std::fs::write(key, "").unwrap();
    let (code, error) = fails("1M", "sealed");
    assert!(code == 3 && error.contains("a file of 1 to 4096 bytes"), "{code} {error}");
    std::fs::write(key, "the-secret-of-the-volume").unwrap();
    let (code, error) = fails("1025K", "sealed");
    assert!(code == 3 && error.contains("a multiple of 4 KiB with --encrypt"), "{code} {error}");
    // Its data is neither encrypted nor lost.
    let image = daemon.dir.join("image");
    std::fs::write(&image, cli_support::pattern(1 << 20, 1)).unwrap();
    daemon.ok(&["import", "image", "plain"]);
    let (code, error) = fails("1M", "plain");
    let expected = "holds data, and has no label blockd.io/encryption=luks2";
    assert!(code == 7 && error.contains(expected), "{code} {error}");
    assert!(!error.contains("the-secret"), "{error}");
}
