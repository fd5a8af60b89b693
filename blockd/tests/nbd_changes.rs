//! The changes since a snapshot, as clients of NBD get them: the same as those of `blockd diff`,
//! with common clients and with our own.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::process::Command;

use blockd_nbd::client::{Client, ClientError, ConnectOptions, Request};
use cli_support::{Daemon, pattern, uri};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 32 * MIB;

/// A range that matters: where, how long, and whether it has data.
type Change = (u64, u64, bool);

fn connect(daemon: &Daemon, volume: &str, contexts: &[&str], extended: bool) -> Client {
    let contexts = contexts.iter().map(|name| (*name).to_owned()).collect();
    let options = ConnectOptions { contexts, extended, ..ConnectOptions::default() };
    Client::connect(&uri(daemon, volume), &options).unwrap()
}

fn since(snapshot: &str) -> String {
    format!("blockd:changed-since:{snapshot}")
}

/// The ranges of `blockd diff`, and the sums on its last line.
fn diff(daemon: &Daemon, arguments: &[&str]) -> (Vec<Change>, u64, u64) {
    let said = daemon.ok(&[&["--json", "diff"], arguments].concat());
    let lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (sums, ranges) = lines.split_last().unwrap();
    let number = |value: &Value| value.as_u64().unwrap();
    let range = |one: &Value| {
        (number(&one["offset_bytes"]), number(&one["length_bytes"]), one["state"] == "data")
    };
    let ranges = ranges.iter().map(range).collect();
    (ranges, number(&sums["data_bytes"]), number(&sums["zero_bytes"]))
}

/// Joins ranges that were cut.
fn joined(ranges: impl IntoIterator<Item = Change>) -> Vec<Change> {
    let mut all: Vec<Change> = Vec::new();
    for (offset, len, data) in ranges {
        match all.last_mut() {
            Some(last) if last.0 + last.1 == offset && last.2 == data => last.1 += len,
            _ => all.push((offset, len, data)),
        }
    }
    all
}

/// All that the context of a connection says, asked for until the end.
fn all_changes(client: &mut Client) -> Vec<Change> {
    let (mut at, mut all) = (0, Vec::new());
    while at < client.size() {
        let ranges = client.changes(at, client.size() - at).unwrap();
        assert!(!ranges.is_empty() && ranges.len() <= 512, "{} ranges", ranges.len());
        for range in ranges {
            assert!(range.changed || !range.zero);
            if range.changed {
                all.push((at, range.len, !range.zero));
            }
            at += range.len;
        }
    }
    joined(all)
}

/// A volume `data` with snapshots `data@one` and `data@two`, and changes between them and after.
fn prepared() -> Daemon {
    let daemon = Daemon::start("1G");
    daemon.ok(&["add", "data", "--size", "32M"]);
    let mut client = connect(&daemon, "data", &[], true);
    let bytes = pattern(1 << 20, 1);
    for at in [0, 5 * MIB + 4096, 20 * MIB] {
        client.write(at, &bytes, false).unwrap();
    }
    daemon.ok(&["snapshot", "data", "--tag", "one"]);
    client.write(MIB / 2, &bytes, false).unwrap();
    client.write_zeroes(20 * MIB, MIB / 2, false).unwrap();
    client.write_zeroes(5 * MIB + 8192, 65536, true).unwrap();
    // Every other sub-block, so that the ranges do not fit in one answer.
    for number in 0..700_u64 {
        client.write(24 * MIB + number * 8192, &bytes[..4096], false).unwrap();
    }
    daemon.ok(&["snapshot", "data", "--tag", "two"]);
    client.trim(24 * MIB, 2 * MIB).unwrap();
    client.write(31 * MIB, &bytes, false).unwrap();
    client.flush().unwrap();
    daemon
}

#[test]
fn changes_over_nbd_are_those_of_diff() {
    let daemon = prepared();
    daemon.ok(&["attach", "data@two"]);
    daemon.ok(&["attach", "data@one"]);
    for (volume, base) in [
        ("data", "data@one"),
        ("data", "data@two"),
        ("data@two", "data@one"),
        ("data@one", "data@two"),
    ] {
        let (expected, data, zero) = diff(&daemon, &[volume, "--since", base]);
        assert!(data + zero > 0, "{volume} since {base}: nothing has changed");
        for extended in [true, false] {
            let mut client = connect(&daemon, volume, &[&since(base)], extended);
            assert_eq!(client.facts().extended, extended);
            let all = all_changes(&mut client);
            let sum = |of| all.iter().filter(|one| one.2 == of).map(|one| one.1).sum::<u64>();
            assert_eq!((sum(true), sum(false)), (data, zero), "{volume} since {base}");
            assert!(all == expected, "{volume} since {base}");
        }
    }
    let (allocated, ..) = diff(&daemon, &["data"]);
    let mut client = connect(&daemon, "data", &["blockd:allocated"], true);
    assert!(all_changes(&mut client) == allocated);
}

#[test]
fn nbdinfo_maps_what_diff_says() {
    let daemon = prepared();
    let address = uri(&daemon, "data").to_string();
    let map = |context: &str| {
        let map = format!("--map={context}");
        let output = Command::new("nbdinfo").args([&map, "--json", &address]).output();
        let output = output.expect("nbdinfo is installed by `cargo ci setup`");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        let ranges: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
        let number = |value: &Value| value.as_u64().unwrap();
        let range = |one: Value| (number(&one["offset"]), number(&one["length"]), one);
        let changed = ranges.into_iter().map(range).filter(|one| number(&one.2["type"]) & 1 == 1);
        joined(changed.map(|(at, len, one)| (at, len, number(&one["type"]) & 2 == 0)))
    };
    assert!(map(&since("data@one")) == diff(&daemon, &["data", "--since", "data@one"]).0);
    assert!(map(&since("data@two")) == diff(&daemon, &["data", "--since", "data@two"]).0);
    assert!(map("blockd:allocated") == diff(&daemon, &["data"]).0);
    let output = Command::new("nbdinfo").arg(&address).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    for context in ["base:allocation", "blockd:allocated", &since("data@two")] {
        assert!(said.contains(context), "{context} is not in {said}");
    }
}

/// The bindings belong to the system's Python, which need not be the first of the `PATH`.
#[test]
fn libnbd_lists_contexts_by_wildcard_and_gets_all_of_them_in_one_answer() {
    let daemon = prepared();
    daemon.ok(&["add", "other", "--size", "1M"]);
    daemon.ok(&["snapshot", "other", "--tag", "one"]);
    let script = format!(
        r#"
import nbd
def listed(*queries):
    h = nbd.NBD()
    h.set_opt_mode(True)
    h.connect_uri("{uri}")
    for query in queries:
        h.add_meta_context(query)
    names = []
    h.opt_list_meta_context(lambda name: names.append(name))
    h.opt_abort()
    return names
every = ["base:allocation", "blockd:allocated", "blockd:changed-since:data@one",
         "blockd:changed-since:data@two"]
assert listed() == every, listed()
assert listed("blockd:") == every[1:]
assert listed("blockd:changed-since:") == every[2:]
assert listed("blockd:changed-since:data@two") == every[3:]
assert listed("blockd:changed-since:other@one", "blockd:changed-since:x") == []
h = nbd.NBD()
for name in reversed(every):
    h.add_meta_context(name)
h.add_meta_context("blockd:changed-since:other@one")
h.connect_uri("{uri}")
assert [h.can_meta_context(name) for name in every] == [True] * 4
assert not h.can_meta_context("blockd:changed-since:other@one")
for flags in (0, nbd.CMD_FLAG_REQ_ONE):
    reported = {{}}
    h.block_status(32 << 20, 0, lambda c, o, e, err: reported.update({{c: list(e)}}) or 0, flags)
    assert sorted(reported) == every, reported
    for name, entries in reported.items():
        lengths, kinds = entries[::2], entries[1::2]
        assert all(lengths) and sum(lengths) <= 32 << 20, (name, entries)
        assert all(a != b for a, b in zip(kinds, kinds[1:])), (name, kinds)
        assert len(lengths) == 1 or not flags, (name, entries)
assert reported["base:allocation"] == [(3 << 19) , 0], reported
assert reported["blockd:changed-since:data@one"] == [1 << 19, 0], reported
"#,
        uri = uri(&daemon, "data"),
    );
    let output = Command::new("/usr/bin/python3").arg("-c").arg(script).output();
    let output = output.expect("python3-libnbd is installed by `cargo ci setup`");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
}

#[test]
fn a_snapshot_that_is_deleted_ends_what_was_asked_of_it_and_nothing_else() {
    let daemon = prepared();
    let mut client = connect(&daemon, "data", &[&since("data@one")], true);
    let mut other = connect(&daemon, "data", &[&since("data@two")], true);
    client.changes(0, SIZE).unwrap();
    daemon.ok(&["del", "data@one"]);
    let error = client.changes(0, SIZE).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("the snapshot of a selected context was deleted"), "{text}");
    assert!(matches!(error, ClientError::Request { .. }), "{text}");
    client.write(0, &[1; 4096], false).unwrap();
    other.changes(0, SIZE).unwrap();
    // One of the same name is another snapshot.
    daemon.ok(&["snapshot", "data", "--tag", "one"]);
    assert!(client.changes(0, SIZE).is_err());
    let mut anew = connect(&daemon, "data", &[&since("data@one")], true);
    assert_eq!(all_changes(&mut anew), []);
}

#[test]
fn a_context_without_a_snapshot_of_the_family_is_not_granted() {
    let daemon = prepared();
    daemon.ok(&["add", "other", "--size", "1M"]);
    daemon.ok(&["snapshot", "other", "--tag", "one"]);
    daemon.ok(&["clone", "data@one", "copy"]);
    for strange in ["other@one", "unknown", "data", "copy"] {
        let mut client = connect(&daemon, "data", &[&since(strange)], true);
        assert_eq!(client.facts().contexts, [(since(strange), None)]);
        assert!(matches!(client.changes(0, SIZE), Err(ClientError::BadRequest { .. })));
        // Granted contexts stay usable.
        assert!(!client.block_status(0, SIZE).unwrap().is_empty());
    }
    // A clone is of the family.
    daemon.ok(&["attach", "copy"]);
    let mut copy = connect(&daemon, "copy", &[&since("data@one")], true);
    assert_eq!(all_changes(&mut copy), []);
}

#[test]
fn every_selected_context_is_in_every_answer() {
    let daemon = prepared();
    for number in 0..14 {
        daemon.ok(&["snapshot", "data", "--tag", &number.to_string()]);
    }
    let names: Vec<String> = (0..14).map(|number| since(&format!("data@{number}"))).collect();
    let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
    names.push("blockd:allocated");
    let mut client = connect(&daemon, "data", &names, true);
    client.send(Request::BlockStatus { offset: 0, len: SIZE }).unwrap();
    let done = client.receive().unwrap();
    let mut ids: Vec<u32> = done.contexts.iter().map(|one| one.id).collect();
    ids.sort_unstable();
    assert_eq!(ids, (1..=16).collect::<Vec<u32>>());
    for one in &done.contexts {
        assert!((1..=32).contains(&one.ranges.len()), "{} ranges", one.ranges.len());
    }
    // One more, and none is granted.
    names.push("blockd:changed-since:data@two");
    let client = connect(&daemon, "data", &names, true);
    assert!(client.facts().contexts.iter().all(|(_, id)| id.is_none()));
    assert_eq!(client.facts().base_allocation, None);
}
