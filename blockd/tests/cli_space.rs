//! The space of volumes and snapshots, alone and together: the predicted bytes are those that
//! deleting them frees.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use blockd_media::clock::Clock;
use blockd_nbd::client::{Client, ConnectOptions};
use cli_support::{Daemon, LIMIT, connect, pattern};
use serde_json::Value;

const MIB: u64 = 1 << 20;

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

/// The figures once nothing is on its way any more.
fn space(daemon: &Daemon, names: &[&str]) -> Value {
    let clock = Clock::start();
    loop {
        let answer = daemon.json(&[&["space"], names].concat());
        let volumes = answer["volumes"].as_array().unwrap();
        let together = std::iter::once(&answer["together"]).filter(|one| !one.is_null());
        if volumes.iter().chain(together).all(|one| one["exact"] == true) {
            return answer;
        }
        assert!(clock.elapsed() < LIMIT, "{answer}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Bytes that volumes of the pool refer to, once what was deleted is let go.
fn mapped(daemon: &Daemon) -> u64 {
    let clock = Clock::start();
    loop {
        let pool = &daemon.json(&["pool", "show"])["pool"];
        if number(&pool["releasing_count"]) + number(&pool["pending_bytes"]) == 0 {
            assert_eq!(number(&pool["releasing_bytes"]), 0);
            return number(&pool["mapped_bytes"]);
        }
        assert!(clock.elapsed() < LIMIT, "{pool}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether a write waits as the pool is full.
fn waits(daemon: &Daemon) -> bool {
    number(&daemon.json(&["pool", "show"])["pool"]["blocked_writes"]) > 0
}

/// A volume `data` with snapshots `data@1` and `data@2`. Its data at 0 was written again after each
/// of them, and its data at 2 MiB only after both.
fn prepared() -> Daemon {
    let daemon = Daemon::start("1G");
    daemon.ok(&["add", "data", "--size", "8M"]);
    let mut client = connect(&daemon, "data");
    client.write(0, &pattern(4 << 20, 1), false).unwrap();
    daemon.ok(&["snapshot", "data", "--tag", "1"]);
    client.write(0, &pattern(1 << 20, 2), false).unwrap();
    daemon.ok(&["snapshot", "data", "--tag", "2"]);
    client.write(0, &pattern(1 << 20, 3), false).unwrap();
    client.write(2 * MIB, &pattern(1 << 20, 4), false).unwrap();
    client.flush().unwrap();
    daemon
}

#[test]
fn several_give_back_what_only_they_share_and_none_of_them_alone() {
    let daemon = prepared();
    let answer = space(&daemon, &["data@1", "data@2"]);
    let volumes = answer["volumes"].as_array().unwrap();
    for (one, name) in volumes.iter().zip(["data@1", "data@2"]) {
        assert_eq!((&one["name"], &one["kind"]), (&name.into(), &"snapshot".into()));
        assert_eq!(one["origin"], "data");
        let figures = ["mapped_bytes", "valid_bytes", "exclusive_bytes", "shared_bytes"];
        let figures = figures.map(|key| number(&one[key]));
        assert_eq!(figures, [4 * MIB, 4 * MIB, MIB, 3 * MIB], "{name}");
        assert_eq!(one["gives_back_bytes"], MIB);
    }
    let together = &answer["together"];
    assert_eq!(together["gives_back_bytes"], 3 * MIB);
    // The two hold 2 MiB each of their own at 0 and 2 MiB in common, and share 2 MiB with `data`.
    assert_eq!(
        (&together["mapped_bytes"], &together["shared_bytes"]),
        (&(5 * MIB).into(), &(2 * MIB).into())
    );
    // All of the pool, each by itself, and the same in other places.
    let all = space(&daemon, &[]);
    assert_eq!((all["volumes"].as_array().unwrap().len(), &all["together"]), (3, &Value::Null));
    for one in all["volumes"].as_array().unwrap() {
        let shown = &daemon.json(&["show", one["name"].as_str().unwrap()])["volume"];
        for key in ["mapped_bytes", "valid_bytes", "exclusive_bytes", "shared_bytes"] {
            assert_eq!(shown[key], one[key], "{key} of {}", one["name"]);
        }
    }
    let said = daemon.ok(&["space", "data@1", "data@2"]);
    let last = said.lines().last().unwrap();
    assert!(last.starts_with("together") && last.ends_with("3 MiB"), "{said}");
}

#[test]
fn deleting_gives_back_what_was_foretold() {
    let daemon = prepared();
    let before = mapped(&daemon);
    let foretold = number(&space(&daemon, &["data@1"])["volumes"][0]["exclusive_bytes"]);
    daemon.ok(&["del", "data@1"]);
    let now = mapped(&daemon);
    assert_eq!(before - now, foretold);
    // The shared space of the two is exclusive to the other now.
    let rest = space(&daemon, &["data@2", "data"]);
    assert_eq!(rest["volumes"][0]["exclusive_bytes"], 2 * MIB);
    let foretold = number(&rest["together"]["exclusive_bytes"]);
    daemon.ok(&["del", "data@2"]);
    daemon.ok(&["del", "data", "--force"]);
    assert_eq!((now - mapped(&daemon), mapped(&daemon)), (foretold, 0));
    assert_eq!(daemon.json(&["list"])["releasing"], Value::Array(Vec::new()));
    // Each was reported when it was done.
    let mut events = daemon.command(&["--json", "events", "--replay"]);
    let mut events = events.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(events.stdout.take().unwrap()).lines();
    let events_of = lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    let released = events_of.filter(|event| event["kind"] == "volume_released").take(3);
    let mut names: Vec<String> =
        released.map(|event| event["volume"].as_str().unwrap().to_owned()).collect();
    events.kill().unwrap();
    events.wait().unwrap();
    names.sort();
    assert_eq!(names, ["data", "data@1", "data@2"]);
}

#[test]
fn volumes_that_cannot_be_counted_are_reported() {
    let daemon = Daemon::start("64M");
    let (code, error) = daemon.failure(&["space", "unknown"]);
    assert!(code == 4 && error == "volume unknown does not exist", "{code} {error}");
    let many = vec!["data"; 65];
    let (code, error) = daemon.failure(&[&["space"], many.as_slice()].concat());
    assert!(code == 3 && error.contains("names is 65: must be at most 64"), "{code} {error}");
}

/// Writes piece after piece until `stop` is set, and counts the answered ones.
fn writer(uri: &str, done: &Arc<AtomicU64>, stop: &Arc<AtomicBool>) -> std::thread::JoinHandle<()> {
    let (uri, done, stop) = (uri.parse().unwrap(), Arc::clone(done), Arc::clone(stop));
    std::thread::spawn(move || {
        let options = ConnectOptions { timeout: LIMIT, ..ConnectOptions::default() };
        let mut client = Client::connect(&uri, &options).unwrap();
        while !stop.load(Ordering::SeqCst) {
            let number = done.load(Ordering::SeqCst);
            client.write(number * PIECE, &piece(number), false).unwrap();
            done.store(number + 1, Ordering::SeqCst);
        }
        client.disconnect().unwrap();
    })
}

const PIECE: u64 = 256 << 10;

fn piece(number: u64) -> Vec<u8> {
    pattern(256 << 10, number)
}

/// A write that waits for space is not in flight: a snapshot does not wait for it.
#[test]
fn a_snapshot_is_taken_of_a_volume_whose_writes_wait_for_space() {
    let daemon = Daemon::start("64M");
    std::fs::write(daemon.dir.join("filler"), pattern(16 << 20, 1)).unwrap();
    daemon.ok(&["import", "filler", "filler"]);
    let uri = daemon.ok(&["add", "--size", "256M", "data"]);
    let (done, stop) = (Arc::default(), Arc::default());
    let writing = writer(uri.trim_end(), &done, &stop);
    let clock = Clock::start();
    let mut seen = (0, clock.elapsed());
    while clock.elapsed() < seen.1 + Duration::from_secs(2) || !waits(&daemon) {
        assert!(clock.elapsed() < LIMIT, "the pool is never full");
        let now = done.load(Ordering::SeqCst);
        if now != seen.0 {
            seen = (now, clock.elapsed());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(seen.0 > 0 && !writing.is_finished());
    let taking = Clock::start();
    daemon.ok(&["snapshot", "data", "--tag", "full"]);
    assert!(taking.elapsed() < LIMIT / 2, "{:?}", taking.elapsed());
    assert_eq!(done.load(Ordering::SeqCst), seen.0, "no space has come meanwhile");
    daemon.ok(&["del", "filler", "--force"]);
    while done.load(Ordering::SeqCst) < seen.0 + 8 {
        assert!(clock.elapsed() < LIMIT + LIMIT, "the writes wait for ever");
        std::thread::sleep(Duration::from_millis(10));
    }
    stop.store(true, Ordering::SeqCst);
    writing.join().unwrap();
    // Writes that were answered before are in the snapshot, and none of the waiting ones.
    for (name, expected) in [("data@full", seen.0), ("data", done.load(Ordering::SeqCst))] {
        daemon.ok(&["export", name, "copy", "--force"]);
        let copy = std::fs::read(daemon.dir.join("copy")).unwrap();
        for (number, bytes) in (0..).zip(copy.chunks(256 << 10)) {
            let right = match number < expected {
                true => bytes == piece(number),
                false => bytes.iter().all(|byte| *byte == 0),
            };
            assert!(right, "piece {number} of {name}");
        }
    }
}

#[test]
fn a_hundred_clones_that_were_written_once_have_little_reserved() {
    // So large that each could have a whole quantum of 16 MiB.
    let daemon = Daemon::start("32G");
    daemon.ok(&["add", "data", "--size", "1G"]);
    daemon.ok(&["snapshot", "data", "--tag", "1"]);
    let names: Vec<String> = (0..100).map(|n| format!("clone{n}")).collect();
    let mut clients: Vec<Client> = Vec::new();
    for name in &names {
        daemon.ok(&["clone", "data@1", name]);
        let uri = daemon.ok(&["attach", "--nbd", name]);
        let uri = uri.trim_end().parse().unwrap();
        let mut client = Client::connect(&uri, &ConnectOptions::default()).unwrap();
        client.write(0, &[1; 4096], true).unwrap();
        clients.push(client);
    }
    // Four extents of 256 KiB each, of which one is written.
    let reserved = |shown: &Value| number(&shown["reserved_bytes"]);
    let pool = &daemon.json(&["pool", "show"])["pool"];
    assert!((1..=100 * MIB).contains(&reserved(pool)), "{pool}");
    let listed = daemon.json(&["list"]);
    let volumes = listed["volumes"].as_array().unwrap();
    for name in &names {
        let volume = volumes.iter().find(|one| one["name"] == **name).unwrap();
        assert!((1..=MIB).contains(&reserved(volume)), "{volume}");
        assert_eq!(volume["mapped_bytes"], MIB / 4);
    }
}

#[test]
fn a_pool_that_is_low_grows_by_four_quanta_up_to_its_limit() {
    // One percent of the pool is less. The reserve that the import holds counts as used.
    let space = "low = \"100M\"\nvery_low = \"1M\"\nquantum = \"4M\"\ngrow_limit = \"152M\"";
    let daemon = Daemon::start_with("128M", &format!("[pool.space]\n{space}"));
    std::fs::write(daemon.dir.join("image"), pattern(80 << 20, 5)).unwrap();
    daemon.ok(&["import", "image", "data"]);
    let clock = Clock::start();
    let mut sizes = vec![128 * MIB];
    while sizes.last() != Some(&(152 * MIB)) {
        let size = number(&daemon.json(&["pool", "show"])["pool"]["size_bytes"]);
        if sizes.last() != Some(&size) {
            sizes.push(size);
        }
        assert!(clock.elapsed() < LIMIT, "{sizes:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    // By 16 MiB once, and then by what the limit leaves.
    assert!(sizes.iter().all(|size| [128, 144, 152].contains(&(size / MIB))), "{sizes:?}");
}

#[test]
fn a_pool_grows_a_hundred_times_while_it_is_open() {
    let mut daemon = Daemon::start("64M");
    daemon.ok(&["pool", "grow", "--size", "+64M"]);
    daemon.ok(&["pool", "grow", "--size", "6400M"]);
    daemon.ok(&["add", "data", "--size", "4G"]);
    // A block in each extent: they reach far beyond eight times the size at first.
    let (extents, extent) = (5000, 256 << 10);
    let block = |at: u64, round: u64| pattern(4096, at + 7 * round);
    let write = |daemon: &Daemon, round, step| {
        let mut client = connect(daemon, "data");
        for at in (0..extents).step_by(step) {
            client.write(at * extent, &block(at, round), false).unwrap();
        }
        client.flush().unwrap();
    };
    write(&daemon, 0, 1);
    daemon.ok(&["snapshot", "data", "--tag", "1"]);
    write(&daemon, 1, 50);
    let holds = |daemon: &Daemon, volume: &str, is_new: fn(u64) -> bool| {
        let mut client = connect(daemon, volume);
        let mut found = [0; 4096];
        for at in 0..extents {
            client.read(at * extent, &mut found).unwrap();
            let expected = block(at, u64::from(is_new(at)));
            assert!(found[..] == expected, "extent {at} of {volume}");
        }
    };
    holds(&daemon, "data", |at| at % 50 == 0);
    daemon.kill();
    daemon.start_again();
    holds(&daemon, "data", |at| at % 50 == 0);
    daemon.ok(&["attach", "data@1", "--read-only"]);
    holds(&daemon, "data@1", |_| false);
    let pool = &daemon.json(&["pool", "show"])["pool"];
    assert_eq!(number(&pool["size_bytes"]), 6400 * MIB);
}
