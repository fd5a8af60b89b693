//! Composite entries and folds as an operator sees them: a snapshot, a write, and the snapshot's
//! deletion, with the daemon killed in between.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use blockd_nbd::client::Client;
use cli_support::{Daemon, connect, pattern, wait_until};
use serde_json::Value;

const MIB: usize = 1 << 20;
const EXTENT: usize = 256 << 10;
const BLOCK: usize = 4096;

fn number(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap_or_else(|| panic!("{value}"))).unwrap()
}

fn pool(daemon: &Daemon, name: &str) -> Value {
    daemon.json(&["pool", "show", name])["pool"].take()
}

fn composite_entries(daemon: &Daemon) -> usize {
    number(&pool(daemon, "default")["folds"]["composite_entries"])
}

/// Bytes that the pool's volumes and snapshots refer to, and those of a volume alone.
fn mapped(daemon: &Daemon, pool_name: &str, volume: &str) -> (usize, usize) {
    let shown = daemon.json(&["show", volume, "--pool", pool_name]);
    let of_pool = number(&pool(daemon, pool_name)["mapped_bytes"]);
    (of_pool, number(&shown["volume"]["mapped_bytes"]))
}

/// A volume of 8 MiB in this pool, full of data, with a snapshot `data@1`. Gives its bytes.
fn shared(daemon: &Daemon, pool_name: &str) -> (Client, Vec<u8>) {
    daemon.ok(&["add", "data", "--pool", pool_name, "--size", "8M"]);
    let bytes = pattern(8 * MIB, 1);
    let mut client = connect(daemon, &format!("{pool_name}/data"));
    for (at, part) in bytes.chunks(MIB).enumerate() {
        client.write((at * MIB) as u64, part, false).unwrap();
    }
    client.flush().unwrap();
    daemon.ok(&["snapshot", "data", "--pool", pool_name, "--tag", "1"]);
    (client, bytes)
}

/// Writes to the volume and to what it is to hold.
fn write(client: &mut Client, bytes: &mut [u8], at: usize, data: &[u8]) {
    client.write(at as u64, data, false).unwrap();
    bytes[at..at + data.len()].copy_from_slice(data);
}

#[track_caller]
fn holds(daemon: &Daemon, volume: &str, expected: &[u8]) {
    let mut client = connect(daemon, volume);
    let mut found = vec![0; expected.len()];
    for (at, part) in found.chunks_mut(MIB).enumerate() {
        client.read((at * MIB) as u64, part).unwrap();
    }
    let differs = expected.chunks(BLOCK).zip(found.chunks(BLOCK)).position(|(a, b)| a != b);
    assert_eq!(differs, None, "a block of {volume} differs");
}

/// Reloads the configuration with another rate, and waits until the pool has it.
fn set_rate(daemon: &Daemon, from: &str, to: &str, bytes: usize) {
    let text = std::fs::read_to_string(daemon.config()).unwrap();
    assert!(text.contains(from), "{text}");
    std::fs::write(daemon.config(), text.replace(from, to)).unwrap();
    daemon.hang_up();
    wait_until("the rate is read again", || {
        number(&pool(daemon, "default")["folds"]["rate_bytes"]) == bytes
    });
}

#[test]
fn the_first_write_after_a_snapshot_lays_an_extent_over_it_until_a_fold_makes_them_one() {
    let mut daemon = Daemon::start_with("1G", "[pool.space]\nfold_rate = 0");
    let (mut client, mut bytes) = shared(&daemon, "default");
    let old = bytes.clone();
    assert_eq!(mapped(&daemon, "default", "data"), (8 * MIB, 8 * MIB));
    write(&mut client, &mut bytes, 5 * EXTENT + BLOCK, &pattern(BLOCK, 2));
    client.flush().unwrap();
    assert_eq!(mapped(&daemon, "default", "data"), (8 * MIB + EXTENT, 8 * MIB + EXTENT));
    assert_eq!(composite_entries(&daemon), 1);
    assert!(daemon.ok(&["pool", "show"]).contains("on, 1 entry"));
    // The same entry takes further writes.
    write(&mut client, &mut bytes, 5 * EXTENT + 9 * BLOCK, &pattern(BLOCK, 3));
    client.flush().unwrap();
    assert_eq!(
        (mapped(&daemon, "default", "data").0, composite_entries(&daemon)),
        (8 * MIB + EXTENT, 1)
    );

    drop(client);
    daemon.kill();
    daemon.start_again();
    assert_eq!(composite_entries(&daemon), 1);
    holds(&daemon, "data", &bytes);
    daemon.ok(&["attach", "data@1"]);
    holds(&daemon, "data@1", &old);
    daemon.ok(&["detach", "data@1"]);

    daemon.ok(&["del", "data@1"]);
    let (code, line) = daemon.failure(&["pool", "fold", "--now"]);
    assert_eq!(code, 7, "{line}");
    assert!(line.contains("fold_rate is 0"), "{line}");
    set_rate(&daemon, "fold_rate = 0", "fold_rate = \"64M\"", 64 << 20);
    let folded = daemon.json(&["pool", "fold", "--now"]);
    let folds = &folded["folds"];
    assert_eq!((number(&folds["composite_entries"]), &folds["settled"]), (0, &true.into()));
    assert_eq!((number(&folds["folded"]), number(&folds["copied_bytes"])), (1, 2 * BLOCK));
    // The extent is free once that is committed.
    wait_until("the space is back", || mapped(&daemon, "default", "data") == (8 * MIB, 8 * MIB));
    holds(&daemon, "data", &bytes);
    let again = daemon.json(&["pool", "fold", "--now"]);
    assert_eq!((&again["changed"], number(&again["folded_entries"])), (&false.into(), 0));
    daemon.kill();
    daemon.start_again();
    holds(&daemon, "data", &bytes);
}

#[test]
fn what_a_snapshot_still_shares_is_left_and_said() {
    let daemon = Daemon::start("1G");
    let (mut client, mut bytes) = shared(&daemon, "default");
    write(&mut client, &mut bytes, 0, &pattern(BLOCK, 2));
    client.flush().unwrap();
    let said = daemon.ok(&["pool", "fold", "default", "--now"]);
    let left = "1 composite entry left: shared with a snapshot or clone, or the disk failed";
    assert_eq!(said, format!("default: unchanged, {left}\n"));
    let status = daemon.json(&["pool", "fold", "--status"]);
    assert_eq!((&status["pool"], composite_entries(&daemon)), (&"default".into(), 1));
    assert_eq!(number(&status["folds"]["folded"]), 0);
    holds(&daemon, "data", &bytes);
}

#[test]
fn a_wait_that_ends_and_a_kill_leave_folds_to_go_on_and_lose_nothing() {
    let mut daemon = Daemon::start_with("1G", "[pool.space]\nfold_rate = \"1M\"");
    let (mut client, mut bytes) = shared(&daemon, "default");
    // Half of each extent: 4 MiB are to be copied, which takes some four seconds.
    for extent in 0..32 {
        write(&mut client, &mut bytes, extent * EXTENT, &pattern(EXTENT / 2, 9));
    }
    client.flush().unwrap();
    drop(client);
    assert_eq!(composite_entries(&daemon), 32);
    daemon.ok(&["del", "data@1"]);
    let (code, line) = daemon.failure(&["pool", "fold", "--now", "--wait", "100ms"]);
    assert_eq!(code, 7, "{line}");
    assert!(line.contains("composite entries left"), "{line}");
    wait_until("folds go on", || composite_entries(&daemon) < 32);
    daemon.kill();
    daemon.start_again();
    let left = composite_entries(&daemon);
    assert!((1..=32).contains(&left), "{left}");
    holds(&daemon, "data", &bytes);
    set_rate(&daemon, "fold_rate = \"1M\"", "fold_rate = \"1G\"", 1 << 30);
    let folded = daemon.json(&["pool", "fold", "--now", "--wait", "1m"]);
    assert_eq!(number(&folded["folds"]["composite_entries"]), 0);
    // The extent is free once that is committed.
    wait_until("the space is back", || mapped(&daemon, "default", "data") == (8 * MIB, 8 * MIB));
    holds(&daemon, "data", &bytes);
}

#[test]
fn a_pool_made_without_composite_entries_copies_the_extent() {
    let daemon = Daemon::start("1G");
    let path = daemon.dir.join("plain.pool").display().to_string();
    let create = ["pool", "create", "plain", "--path", &path, "--size", "256M"];
    let plain = [&create[..], &["--no-composite"]].concat();
    assert_eq!(daemon.json(&plain)["changed"], true);
    assert_eq!(daemon.json(&plain)["changed"], false);
    let (code, line) = daemon.failure(&create);
    assert_eq!(
        (code, line.as_str()),
        (5, "pool plain exists with composite false, asked for true")
    );

    let (mut client, mut bytes) = shared(&daemon, "plain");
    write(&mut client, &mut bytes, 5 * EXTENT, &pattern(BLOCK, 2));
    client.flush().unwrap();
    // One extent is the snapshot's now, and one is the volume's.
    assert_eq!(mapped(&daemon, "plain", "data"), (8 * MIB + EXTENT, 8 * MIB));
    let folds = &pool(&daemon, "plain")["folds"];
    assert_eq!((&folds["enabled"], number(&folds["composite_entries"])), (&false.into(), 0));
    assert_eq!(daemon.json(&["pool", "fold", "plain", "--now"])["changed"], false);
    assert_eq!(pool(&daemon, "default")["folds"]["enabled"], true);
}

/// Whether `pool feature enable` or `disable` changed something, and whether the pool has composite
/// entries now.
fn set_feature(daemon: &Daemon, verb: &str) -> (bool, bool) {
    let set = daemon.json(&["pool", "feature", verb, "composite", "default"]);
    assert_eq!((&set["pool"], &set["feature"]), (&"default".into(), &"composite".into()));
    (set["changed"].as_bool().unwrap(), set["folds"]["enabled"].as_bool().unwrap())
}

#[test]
fn composite_entries_are_turned_on_and_off_while_a_volume_is_written() {
    let mut daemon = Daemon::start_with("1G", "composite = false");
    let (mut client, mut bytes) = shared(&daemon, "default");
    let first = bytes.clone();
    assert!(daemon.ok(&["pool", "feature", "list"]).contains("off"));
    assert_eq!(set_feature(&daemon, "enable"), (true, true));
    assert_eq!(set_feature(&daemon, "enable"), (false, true));
    let said = daemon.ok(&["pool", "feature", "enable", "composite"]);
    assert_eq!(said, "default: composite is on, no entry, unchanged\n");
    for extent in 0..16 {
        write(&mut client, &mut bytes, extent * EXTENT + BLOCK, &pattern(BLOCK, 2));
    }
    client.flush().unwrap();
    assert_eq!(mapped(&daemon, "default", "data").1, 8 * MIB + 16 * EXTENT);
    daemon.ok(&["snapshot", "data", "--tag", "2"]);
    let second = bytes.clone();
    write(&mut client, &mut bytes, 20 * EXTENT, &pattern(BLOCK, 3));
    assert_eq!(composite_entries(&daemon), 16 + 17);

    std::thread::scope(|scope| {
        let disabling = scope.spawn(|| set_feature(&daemon, "disable"));
        for round in 0..200 {
            let at = (round * 7 % 32) * EXTENT + round * BLOCK % EXTENT;
            write(&mut client, &mut bytes, at, &pattern(BLOCK, 4));
        }
        assert_eq!(disabling.join().unwrap(), (true, false));
    });
    client.flush().unwrap();
    drop(client);
    assert_eq!(composite_entries(&daemon), 0);
    assert_eq!(set_feature(&daemon, "disable"), (false, false));
    for is_new in [false, true] {
        if is_new {
            daemon.kill();
            daemon.start_again();
        }
        holds(&daemon, "data", &bytes);
        for (snapshot, held) in [("data@1", &first), ("data@2", &second)] {
            daemon.ok(&["attach", snapshot]);
            holds(&daemon, snapshot, held);
            daemon.ok(&["detach", snapshot]);
        }
    }
    assert!(daemon.terminate().success());
    let path = daemon.dir.join("default.pool").display().to_string();
    assert!(daemon.ok(&["pool", "check", &path]).contains("sound"));
    let said = daemon.ok(&["pool", "downgrade", "--to", "1.0", &path]);
    assert_eq!(said, "the pool is of version 1.0 already\n");
}

#[test]
fn a_daemon_that_ends_while_it_turns_them_off_leaves_them_on() {
    let mut daemon = Daemon::start_with("1G", "[pool.space]\nfold_rate = \"1M\"");
    let (mut client, mut bytes) = shared(&daemon, "default");
    // Half of each extent: 4 MiB are to be copied, which takes some four seconds.
    for extent in 0..32 {
        write(&mut client, &mut bytes, extent * EXTENT, &pattern(EXTENT / 2, 9));
    }
    client.flush().unwrap();
    drop(client);
    let disable = ["pool", "feature", "disable", "composite", "--wait", "100ms"];
    let (code, line) = daemon.failure(&disable);
    assert_eq!(code, 7, "{line}");
    assert!(line.contains("composite entries left after 100ms"), "{line}");
    assert!(daemon.ok(&["pool", "feature", "list"]).contains("being turned off"));
    daemon.kill();
    daemon.start_again();
    assert_eq!(pool(&daemon, "default")["folds"]["disabling"], false);
    holds(&daemon, "data", &bytes);
    set_rate(&daemon, "fold_rate = \"1M\"", "fold_rate = 0", 0);
    let (code, line) = daemon.failure(&disable);
    assert_eq!(code, 7, "{line}");
    assert!(line.contains("fold_rate is 0"), "{line}");
    set_rate(&daemon, "fold_rate = 0", "fold_rate = \"1G\"", 1 << 30);
    assert_eq!(set_feature(&daemon, "disable"), (true, false));
    holds(&daemon, "data", &bytes);
}
