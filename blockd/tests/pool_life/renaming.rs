//! `blockd pool rename`, and pools whose name is changed in the configuration.

use std::collections::BTreeMap;
use std::fs;

use blockd_nbd::client::{Client, ConnectOptions};
use serde_json::{Value, json};

use super::cli_support::{pattern, uri};
use super::{Case, Daemon, Traffic, client, has_data};

/// The files in which a daemon remembers pools by name, in the order that a rename writes them.
const FILES: [&str; 3] = ["served.json", "pools.json", "attachments.json"];

fn remembered(daemon: &Daemon) -> BTreeMap<&'static str, String> {
    let read = |file: &'static str| (file, fs::read_to_string(daemon.dir.join(file)).unwrap());
    FILES.map(read).into()
}

fn names(daemon: &Daemon) -> Vec<Value> {
    let list = daemon.json(&["pool", "list"]);
    list["pools"].as_array().unwrap().iter().map(|one| one["name"].clone()).collect()
}

#[test]
fn a_pool_is_renamed_while_its_clients_write_and_new_ones_find_it_by_its_new_name() {
    let mut case = Case::with_data();
    let traffic = Traffic::start_in(&case.daemon, "w");
    let mut present = client(&case.daemon, "w", "data");
    let former = uri(&case.daemon, "w/data");
    let mut read = vec![0; super::BYTES];
    for (old, new) in [("w", "x"), ("x", "y"), ("y", "w"), ("w", "v")] {
        let renamed = case.daemon.json(&["pool", "rename", old, new]);
        assert_eq!((&renamed["changed"], &renamed["pool"]["name"]), (&json!(true), &json!(new)));
        present.read(0, &mut read).unwrap();
        assert!(read == pattern(super::BYTES, 1));
        traffic.goes_on();
    }
    let again = case.daemon.ok(&["pool", "rename", "w", "v"]);
    assert_eq!(again, "v: unchanged, it has this name\n");
    let refused = Client::connect(&former, &ConnectOptions::default());
    assert!(refused.is_err(), "connected by the former name");
    let (code, error) = case.daemon.failure(&["pool", "show", "w"]);
    assert_eq!(code, 4, "{error}");
    let stats = case.daemon.json(&["top", "--once"]);
    let of_pool = |key: &str| {
        let all = stats[key].as_array().unwrap().iter();
        all.filter(|one| one["name"] != "default").cloned().collect::<Vec<_>>()
    };
    assert!(of_pool("volumes").iter().all(|one| one["pool"] == "v"), "{stats}");
    assert_eq!(names(&case.daemon), ["default", "v"]);
    traffic.end();
    drop(present);
    for is_killed in [true, false] {
        match is_killed {
            true => case.daemon.kill(),
            false => assert!(case.daemon.terminate().success()),
        }
        case.daemon.start_again();
        assert_eq!(names(&case.daemon), ["default", "v"]);
        let mut client = client(&case.daemon, "v", "data");
        client.read(0, &mut read).unwrap();
        assert!(read == pattern(super::BYTES, 1));
        drop(client);
        has_data(&case.daemon, "v");
    }
    // It is one pool, and its former name is free.
    case.daemon.ok(&["pool", "create", "w", "--memory", "--size", "64M"]);
    case.daemon.ok(&["pool", "delete", "--force", "--yes", "v"]);
    assert!(!case.pool.exists());
    for text in remembered(&case.daemon).values() {
        assert!(!text.contains("\"v\"") && !text.contains("\"w\""), "{text}");
    }
}

#[test]
fn a_daemon_that_was_killed_between_two_writes_has_the_pool_by_either_name() {
    let mut case = Case::with_data();
    case.daemon.ok(&["pool", "close", "--force", "w"]);
    case.daemon.ok(&["pool", "open", "w"]);
    let before = remembered(&case.daemon);
    case.daemon.ok(&["pool", "rename", "w", "v"]);
    let after = remembered(&case.daemon);
    case.daemon.kill();
    for written in 0..=FILES.len() {
        for (at, file) in FILES.iter().enumerate() {
            let text = if at < written { &after[file] } else { &before[file] };
            fs::write(case.daemon.dir.join(file), text).unwrap();
        }
        case.daemon.start_again();
        let name = if written < 2 { "w" } else { "v" };
        assert_eq!(names(&case.daemon), ["default", name], "{written} files written");
        let shown = case.daemon.json(&["show", &format!("{name}/data")]);
        assert_eq!(shown["volume"]["attached"], true, "{written} files written");
        has_data(&case.daemon, name);
        // The call that was cut off can be repeated, and nothing is left under the former name.
        case.daemon.ok(&["pool", "rename", "w", "v"]);
        drop(client(&case.daemon, "v", "data"));
        for (file, text) in remembered(&case.daemon) {
            assert!(!text.contains("\"w\""), "{written} files written: {file}: {text}");
        }
        case.daemon.kill();
    }
    // Lines of both names, as of a daemon that adds them one by one.
    let lines = after["attachments.json"].split_inclusive('\n').skip(1).collect::<String>();
    let both = format!("{}{lines}", before["attachments.json"]);
    fs::write(case.daemon.dir.join("attachments.json"), both).unwrap();
    case.daemon.start_again();
    drop(client(&case.daemon, "v", "data"));
}

#[test]
fn a_pool_that_has_another_name_in_the_configuration_keeps_its_attachments() {
    let mut daemon = Daemon::start("128M");
    daemon.ok(&["add", "--nbd", "--size", "8M", "data"]);
    let bytes = pattern(super::BYTES, 5);
    let mut first = client(&daemon, "default", "data");
    first.write(0, &bytes, true).unwrap();
    drop(first);
    let (code, error) = daemon.failure(&["pool", "rename", "default", "main"]);
    assert_eq!(code, super::IN_USE);
    let problem = "pool default is named by the configuration: change the name there";
    assert!(error.starts_with(problem), "{error}");
    assert!(daemon.terminate().success());
    let config = fs::read_to_string(daemon.config()).unwrap();
    assert!(config.contains("\"default\""), "{config}");
    fs::write(daemon.config(), config.replace("\"default\"", "\"main\"")).unwrap();
    daemon.start_again();
    assert_eq!(names(&daemon), ["main"]);
    let mut read = vec![0; super::BYTES];
    let mut second = client(&daemon, "main", "data");
    second.read(0, &mut read).unwrap();
    assert!(read == bytes);
    let text = fs::read_to_string(daemon.dir.join("attachments.json")).unwrap();
    daemon.ok(&["detach", "--force", "data"]);
    daemon.ok(&["attach", "--nbd", "data"]);
    let again = fs::read_to_string(daemon.dir.join("attachments.json")).unwrap();
    assert!(!text.contains("\"default\"") && !again.contains("\"default\""), "{text}{again}");
}

#[test]
fn a_name_that_can_not_be_given_is_refused_and_the_pool_stays_as_it_is() {
    let case = Case::with_data();
    let before = remembered(&case.daemon);
    for (words, code, problem) in [
        (["w", "default"], 7, "pool default exists: choose another name"),
        (["w", "x/y"], 3, "new_name is x/y"),
        (["none", "other"], 4, "pool none does not exist"),
    ] {
        let found = case.daemon.failure(&["pool", "rename", words[0], words[1]]);
        assert!(found.0 == code && found.1.starts_with(problem), "{found:?}");
    }
    case.daemon.ok(&["pool", "close", "--force", "w"]);
    let (code, error) = case.daemon.failure(&["pool", "rename", "w", "v"]);
    assert!(code == 9 && error.contains("open it with `blockd pool open w`"), "{error}");
    case.daemon.ok(&["pool", "open", "w"]);
    has_data(&case.daemon, "w");
    assert_eq!(remembered(&case.daemon)["pools.json"], before["pools.json"]);
    assert_eq!(names(&case.daemon), ["default", "w"]);
}
