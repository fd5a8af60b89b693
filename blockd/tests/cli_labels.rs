//! Labels on the command line, and how long they last.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use cli_support::Daemon;
use serde_json::{Value, json};

fn labels(daemon: &Daemon, volume: &str) -> Value {
    daemon.json(&["show", volume])["volume"]["labels"].clone()
}

fn listed(daemon: &Daemon, filter: &[&str]) -> Vec<String> {
    let mut arguments = vec!["list", "--columns", "name"];
    arguments.extend(filter.iter().flat_map(|one| ["--label", one]));
    daemon.ok(&arguments).lines().skip(1).map(|line| line.trim().to_owned()).collect()
}

#[test]
fn labels_are_set_shown_and_filtered_by_and_outlive_the_daemon() {
    let mut daemon = Daemon::start("256M");
    let of_data = ["--label", "team=db", "--label", "example.org/tier=1"];
    daemon.ok(&[&["add", "--nbd", "--size", "8M", "data"][..], &of_data].concat());
    daemon.ok(&["add", "--nbd", "--size", "8M", "logs", "--label", "team=web"]);
    daemon.ok(&["snapshot", "data=monday", "--label", "team=db"]);
    daemon.ok(&["clone", "monday", "test", "--label", "temporary="]);
    assert_eq!(listed(&daemon, &["team=db"]), ["data", "monday"]);
    assert_eq!(listed(&daemon, &["team=db", "example.org/tier=1"]), ["data"]);
    assert!(listed(&daemon, &["team=none"]).is_empty());
    let table = daemon.ok(&["list", "-l"]);
    assert!(table.lines().any(|line| line.ends_with("example.org/tier=1,team=db")), "{table}");
    let shown = daemon.ok(&["show", "data"]);
    assert!(shown.contains("example.org/tier=1") && shown.contains("team=db"), "{shown}");
    assert_eq!(daemon.ok(&["set", "monday", "--label", "team-"]), "monday: no labels\n");
    assert_eq!(daemon.json(&["set", "monday", "--label", "team-"])["changed"], false);
    daemon.kill();
    daemon.start_again();
    assert_eq!(labels(&daemon, "data"), json!({"example.org/tier": "1", "team": "db"}));
    assert_eq!(labels(&daemon, "monday"), json!({}));
    daemon.terminate();
    daemon.start_again();
    assert_eq!(labels(&daemon, "test"), json!({"temporary": ""}));
}

#[test]
fn a_wrong_label_is_refused_and_nothing_is_made() {
    let daemon = Daemon::start("64M");
    for (label, words) in [
        ("team", "label is team: must be KEY=VALUE"),
        ("=x", "key of a label is"),
        ("a b=x", "must be a name of letters"),
    ] {
        for verb in [&["add", "--nbd", "--size", "8M", "new"][..], &["set", "new"]] {
            let (status, said) = daemon.failure(&[verb, &["--label", label]].concat());
            if verb[0] == "add" {
                let words = words.replace("must ", "");
                assert!(status == 3 && said.replace("must ", "").contains(&words), "{said}");
            }
        }
    }
    assert!(listed(&daemon, &[]).is_empty());
}
