//! A device that is taken out of a pool as an operator does it, with writers on its volumes, and
//! the daemon killed in between.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use cli_support::{Daemon, connect, pattern, wait_until};
use serde_json::Value;

const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;
const SIZE: usize = 96 * MIB;

/// A daemon whose pool has taken two spare devices in, and a full volume `data` with a snapshot.
struct Case {
    daemon: Daemon,
    spares: [PathBuf; 2],
    content: Vec<u8>,
}

fn devices(daemon: &Daemon) -> Vec<String> {
    let shown = daemon.json(&["pool", "device", "list"]);
    let devices = shown["devices"].as_array().unwrap();
    devices.iter().map(|one| one["path"].as_str().unwrap().to_owned()).collect()
}

impl Case {
    fn new(test: &str) -> Self {
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let names = ["one", "two"].map(|name| format!("{test}-{name}-{}", std::process::id()));
        let spares = names.map(|name| dir.join(name));
        for (path, size) in spares.iter().zip([64, 256]) {
            fs::File::create(path).unwrap().set_len(size << 20).unwrap();
        }
        let more = format!("spare_devices = [{:?}, {:?}]", spares[0], spares[1]);
        let daemon = Daemon::start_with("64M", &more);
        daemon.ok(&["add", "data", "--size", "96M"]);
        let content = pattern(SIZE, 7);
        let mut client = connect(&daemon, "data");
        for (at, part) in content.chunks(MIB).enumerate() {
            client.write((at * MIB) as u64, part, false).unwrap();
        }
        client.flush().unwrap();
        daemon.ok(&["snapshot", "data", "--tag", "1"]);
        wait_until("both spares join", || devices(&daemon).len() == 3);
        Self { daemon, spares, content }
    }

    fn holds(&self, volume: &str, expected: &[u8]) {
        let mut client = connect(&self.daemon, volume);
        let mut found = vec![0; expected.len()];
        for (at, part) in found.chunks_mut(MIB).enumerate() {
            client.read((at * MIB) as u64, part).unwrap();
        }
        let differs = expected.chunks(BLOCK).zip(found.chunks(BLOCK)).position(|(a, b)| a != b);
        assert_eq!(differs, None, "a block of {volume} differs");
    }

    fn leaving(&self) -> Value {
        self.daemon.json(&["pool", "show"])["pool"]["evacuation"].take()
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        for path in &self.spares {
            let _ = fs::remove_file(path);
        }
    }
}

#[test]
fn a_device_leaves_while_its_volumes_are_written_and_is_needed_no_more() {
    let mut case = Case::new("leaves");
    let one = case.spares[0].display().to_string();
    let (stop, mut written) = (AtomicBool::new(false), case.content.clone());
    let removed = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut client = connect(&case.daemon, "data");
            let mut round = 0;
            while !stop.load(Ordering::Relaxed) {
                let at = round * 7919 % (SIZE / BLOCK) * BLOCK;
                let data = [u8::try_from(round % 251).unwrap(); BLOCK];
                client.write(at as u64, &data, false).unwrap();
                written[at..at + BLOCK].copy_from_slice(&data);
                round += 1;
            }
            client.flush().unwrap();
            round
        });
        let removed = case.daemon.json(&["pool", "device", "remove", &one, "--rate", "200M"]);
        stop.store(true, Ordering::Relaxed);
        assert!(writer.join().unwrap() > 10, "nothing was written meanwhile");
        removed
    });
    assert_eq!((&removed["changed"], &removed["has_left"]), (&true.into(), &true.into()));
    assert_eq!(devices(&case.daemon).len(), 2);
    case.holds("data", &written);
    case.daemon.ok(&["attach", "data@1", "--read-only"]);
    case.holds("data@1", &case.content);
    // Once more, and of something else.
    let again = case.daemon.json(&["pool", "device", "remove", &one]);
    assert_eq!((&again["changed"], &again["has_left"]), (&false.into(), &true.into()));
    // Nothing needs it: neither with its old superblocks nor without the file.
    fs::write(&one, vec![0xD7; 64 * MIB]).unwrap();
    case.holds("data", &written);
    fs::remove_file(&one).unwrap();
    case.daemon.kill();
    case.daemon.start_again();
    case.holds("data", &written);
    assert_eq!(devices(&case.daemon).len(), 2);
}

#[test]
fn a_device_goes_on_to_leave_when_the_daemon_was_killed_and_stays_when_that_is_asked() {
    let mut case = Case::new("killed");
    let one = case.spares[0].display().to_string();
    let remove = ["pool", "device", "remove", &one];
    let begun = case.daemon.ok(&[&remove[..], &["--rate", "1M", "--no-wait"]].concat());
    assert!(begun.contains(&one) && begun.contains("left"), "{begun}");
    case.daemon.kill();
    case.daemon.start_again();
    assert_eq!(case.leaving()["path"], one.as_str());
    let stays = case.daemon.ok(&[&remove[..], &["--abort"]].concat());
    assert_eq!(stays, format!("{one} stays in pool default\n"));
    assert_eq!((case.leaving(), devices(&case.daemon).len()), (Value::Null, 3));
    case.holds("data", &case.content);
    // An abort by another ends the wait with an error.
    std::thread::scope(|scope| {
        let daemon = &case.daemon;
        let slow = [&remove[..], &["--rate", "1M"]].concat();
        let waiting = scope.spawn(move || daemon.failure(&slow));
        wait_until("the device begins to leave", || case.leaving()["path"] == one.as_str());
        case.daemon.ok(&[&remove[..], &["--abort"]].concat());
        let (exit, text) = waiting.join().unwrap();
        assert!(exit == 7 && text.contains("its removal was aborted"), "{exit} {text}");
    });
    let left = case.daemon.ok(&[&remove[..], &["--rate", "1G"]].concat());
    assert_eq!(left, format!("{one} has left pool default\n"));
    case.holds("data", &case.content);
    // The pool is closed and opened without it, and tools see two devices.
    case.daemon.ok(&["pool", "close", "--force", "default"]);
    case.daemon.ok(&["pool", "open", "default"]);
    assert_eq!(devices(&case.daemon).len(), 2);
    case.holds("data", &case.content);
    let [pool, two] = [case.daemon.dir.join("default.pool"), case.spares[1].clone()];
    let scanned =
        case.daemon.json(&["pool", "scan", pool.to_str().unwrap(), &one, two.to_str().unwrap()]);
    let found = scanned["pools"][0]["devices"].as_array().unwrap();
    assert_eq!(found.len(), 2, "{scanned}");
}

#[test]
fn what_cannot_be_taken_out_is_refused_by_name_and_nothing_changes() {
    let case = Case::new("refused");
    let [one, two] = case.spares.each_ref().map(|path| path.display().to_string());
    let first = devices(&case.daemon)[0].clone();
    case.daemon.ok(&["add", "big", "--size", "150M", "--thick"]);
    for (path, code, words) in [
        (first.as_str(), 3, "another device than the pool's first"),
        ("/nowhere", 3, "a device of pool default"),
        (two.as_str(), 6, "no space"),
    ] {
        let (exit, text) = case.daemon.failure(&["pool", "device", "remove", path]);
        assert!(text.contains(words), "{path}: {text}");
        assert_eq!(exit, code, "{path}: {text}");
    }
    let (_, text) = case.daemon.failure(&["pool", "device", "remove", &one, "--rate", "fast"]);
    assert!(text.contains("rate"), "{text}");
    assert_eq!((case.leaving(), devices(&case.daemon).len()), (Value::Null, 3));
    case.holds("data", &case.content);
}
