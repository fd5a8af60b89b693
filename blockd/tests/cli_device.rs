//! Devices that are taken out of a pool, added and replaced as an operator does it, with writers on
//! its volumes, and the daemon killed in between.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use cli_support::{Daemon, connect, pattern, wait_until, writer};
use serde_json::Value;

const MIB: usize = 1 << 20;
const SIZE: usize = 96 * MIB;
/// More than the first three devices have room for beside `data`.
const MORE: usize = 320 * MIB;

/// A daemon whose pool has taken two spare devices in, and a full volume `data` with a snapshot.
struct Case {
    daemon: Daemon,
    spares: [PathBuf; 2],
    content: Vec<u8>,
}

fn devices(daemon: &Daemon) -> Vec<String> {
    devices_of(daemon, "default")
}

fn devices_of(daemon: &Daemon, pool: &str) -> Vec<String> {
    let shown = daemon.json(&["pool", "device", "list", pool]);
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
        writer::holds(&self.daemon, volume, expected);
    }

    /// Runs commands while the volume `data` is written. Returns its content afterwards as well.
    fn beside_a_writer<T>(&self, commands: impl FnOnce(&Daemon) -> T) -> (T, Vec<u8>) {
        writer::beside_a_writer(&self.daemon, &self.content, commands)
    }

    /// A file of the test that may become a device.
    fn file(&self, name: &str, mib: u64) -> String {
        let path = self.daemon.dir.join(name);
        fs::File::create(&path).unwrap().set_len(mib << 20).unwrap();
        path.display().to_string()
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
    let (removed, written) = case.beside_a_writer(|daemon| {
        daemon.json(&["pool", "device", "remove", &one, "--rate", "200M"])
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

#[test]
fn a_device_is_added_while_volumes_are_written_and_the_pool_is_opened_with_it() {
    let mut case = Case::new("added");
    let three = case.file("three", 192);
    let add = ["pool", "device", "add", &three];
    let (added, written) = case.beside_a_writer(|daemon| {
        let added = daemon.json(&add);
        // It fills up: the others have no room for all of it.
        daemon.ok(&["add", "more", "--size", "320M"]);
        let mut client = connect(daemon, "more");
        for (at, part) in pattern(MORE, 11).chunks(MIB).enumerate() {
            client.write((at * MIB) as u64, part, false).unwrap();
        }
        client.flush().unwrap();
        added
    });
    assert_eq!((&added["changed"], &added["pool"]), (&true.into(), &"default".into()));
    let gained = added["gained_bytes"].as_u64().unwrap();
    assert!((190 << 20..=192 << 20).contains(&gained), "{gained}");
    let again = case.daemon.ok(&add);
    assert_eq!(again, format!("{three}: unchanged, it is in use in pool default\n"));
    let used = fs::metadata(&three).unwrap();
    assert!(used.blocks() * 512 > 16 << 20, "nothing is on it");
    // Neither its configuration nor a list of pools names it.
    case.daemon.kill();
    case.daemon.start_again();
    assert_eq!(devices(&case.daemon).len(), 4);
    case.holds("data", &written);
    case.holds("more", &pattern(MORE, 11));
    case.daemon.ok(&["pool", "close", "--force", "default"]);
    case.daemon.ok(&["pool", "open", "default"]);
    case.holds("more", &pattern(MORE, 11));
    assert_eq!(case.daemon.json(&add)["changed"], false);
    // It leaves as any other, and the pool is opened without it then.
    case.daemon.ok(&["del", "more", "--force"]);
    let remove = ["pool", "device", "remove", &three, "--rate", "1G"];
    // The extents of the deleted volume are let go in the background.
    wait_until("the device leaves", || case.daemon.run(&remove).status.success());
    fs::remove_file(&three).unwrap();
    case.daemon.kill();
    case.daemon.start_again();
    assert_eq!(devices(&case.daemon).len(), 3);
    case.holds("data", &written);
}

#[test]
fn a_pool_that_was_made_by_a_call_is_opened_with_its_added_device_and_deleted_with_it() {
    let mut case = Case::new("made");
    let [own, more] = [case.file("own", 64), case.file("more", 64)];
    case.daemon.ok(&["pool", "create", "side", "--path", &own, "--size", "64M"]);
    case.daemon.ok(&["pool", "device", "add", &more, "--pool", "side"]);
    assert_eq!(devices_of(&case.daemon, "side"), [own.as_str(), more.as_str()]);
    case.daemon.terminate();
    case.daemon.start_again();
    assert_eq!(devices_of(&case.daemon, "side"), [own.as_str(), more.as_str()]);
    assert_eq!(
        case.daemon.json(&["pool", "create", "side", "--path", &own, "--size", "64M"])["changed"],
        false
    );
    case.daemon.ok(&["pool", "delete", "side"]);
    // Neither belongs to anything now.
    case.daemon.ok(&["pool", "create", "side", "--path", &own, "--size", "64M"]);
    assert_eq!(devices_of(&case.daemon, "side"), [own.as_str()]);
    case.daemon.ok(&["pool", "device", "add", &more]);
    assert_eq!(devices(&case.daemon).len(), 4);
}

#[test]
fn a_device_that_was_remembered_when_the_daemon_was_killed_is_a_spare_until_it_joins() {
    let mut case = Case::new("between");
    let three = case.file("three", 64);
    case.daemon.kill();
    // The state of a daemon that was killed before the pool had the device.
    let list = case.daemon.dir.join("served.json");
    let mut served: Value = serde_json::from_slice(&fs::read(&list).unwrap()).unwrap();
    served["entries"][0]["added"] = serde_json::json!([three]);
    fs::write(&list, served.to_string()).unwrap();
    case.daemon.start_again();
    assert_eq!(devices(&case.daemon).len(), 3);
    let add = ["pool", "device", "add", &three];
    assert_eq!(case.daemon.json(&add)["changed"], true);
    assert_eq!(case.daemon.json(&add)["changed"], false);
    case.daemon.terminate();
    case.daemon.start_again();
    assert_eq!(devices(&case.daemon).len(), 4);
    case.holds("data", &case.content);
}

#[test]
fn a_device_that_can_not_be_added_is_refused_by_name_and_stays_as_it_is() {
    let mut case = Case::new("foreign");
    let [ext4, tail, side, lost, small] =
        [("ext4", 64), ("tail", 64), ("side", 64), ("lost", 64), ("small", 0)]
            .map(|(name, mib)| case.file(name, mib));
    let made = std::process::Command::new("mkfs.ext4").args(["-q", "-F", &ext4]).status();
    if !made.is_ok_and(|status| status.success()) {
        eprintln!("mkfs.ext4 is not here: its mark alone is written");
        fs::File::options()
            .write(true)
            .open(&ext4)
            .unwrap()
            .write_all_at(b"\x53\xEF", 1080)
            .unwrap();
    }
    let file = fs::File::options().write(true).open(&tail).unwrap();
    file.write_all_at(b"x", (64 << 20) - 1).unwrap();
    case.daemon.ok(&["pool", "create", "side", "--path", &side, "--size", "64M"]);
    case.daemon.ok(&["pool", "create", "lost", "--path", &lost, "--size", "64M"]);
    case.daemon.ok(&["pool", "export", "lost"]);
    fs::File::options().write(true).open(&small).unwrap().set_len(256 << 10).unwrap();
    let folder = case.daemon.dir.display().to_string();
    let before = [&ext4, &tail, &lost, &small].map(|path| fs::read(path).unwrap());
    for (path, code, words) in [
        (ext4.as_str(), 7, "holds something that is not a pool"),
        (&tail, 7, "holds something that is not a pool"),
        (&side, 7, "belongs to pool side"),
        (&lost, 7, "holds a device of another pool"),
        (&small, 3, "from 3 to 2^36 extents of"),
        (&folder, 3, "a regular file or a block device"),
        ("/nowhere/disk", 4, "/nowhere/disk does not exist"),
    ] {
        let (exit, text) = case.daemon.failure(&["pool", "device", "add", path]);
        assert!(text.contains(words) && text.contains(path), "{path}: {text}");
        assert_eq!(exit, code, "{path}: {text}");
    }
    let same = |path: &String, before: &Vec<u8>| fs::read(path).unwrap() == *before;
    for (path, before) in [&ext4, &tail, &lost, &small].into_iter().zip(&before) {
        assert!(same(path, before), "{path} was written to");
    }
    assert_eq!(devices(&case.daemon).len(), 3);
    // What was refused is free, and is not opened with the pool.
    case.daemon.ok(&["pool", "import", "lost", &lost]);
    fs::File::options().write(true).open(&small).unwrap().set_len(64 << 20).unwrap();
    case.daemon.kill();
    case.daemon.start_again();
    assert_eq!(devices(&case.daemon).len(), 3);
    case.daemon.ok(&["pool", "create", "other", "--path", &small, "--size", "64M"]);
    case.holds("data", &case.content);
}

#[test]
fn a_device_is_replaced_while_volumes_are_written_and_one_that_has_left_may_come_back() {
    let mut case = Case::new("replaced");
    let one = case.spares[0].display().to_string();
    let three = case.file("three", 128);
    let replace = ["pool", "device", "replace", &one, &three];
    let begun = case.daemon.json(&[&replace[..], &["--rate", "1M", "--no-wait"]].concat());
    assert_eq!((&begun["added"], &begun["has_left"]), (&true.into(), &false.into()));
    let (_, text) = case.daemon.failure(&["pool", "device", "add", &one]);
    assert!(text.contains("is leaving the pool"), "{text}");
    case.daemon.kill();
    case.daemon.start_again();
    assert_eq!((&case.leaving()["path"], devices(&case.daemon).len()), (&one.as_str().into(), 4));
    // One may come while another leaves.
    let four = case.file("four", 64);
    case.daemon.ok(&["pool", "device", "add", &four]);
    let fast = [&replace[..], &["--rate", "200M"]].concat();
    let (done, written) = case.beside_a_writer(|daemon| daemon.json(&fast));
    assert_eq!((&done["added"], &done["has_left"]), (&false.into(), &true.into()));
    case.holds("data", &written);
    assert!(!devices(&case.daemon).contains(&one));
    let again = case.daemon.ok(&fast);
    assert_eq!(again, format!("unchanged: {three} had replaced {one} in pool default\n"));
    // What has left has its old superblocks, and comes back when it is empty.
    let (exit, text) = case.daemon.failure(&["pool", "device", "add", &one]);
    assert!(exit == 7 && text.contains("that is not in use in it"), "{exit} {text}");
    fs::remove_file(&one).unwrap();
    fs::File::create(&one).unwrap().set_len(96 << 20).unwrap();
    let added = case.daemon.json(&["pool", "device", "add", &one]);
    assert_eq!(added["changed"], true);
    assert_eq!(case.daemon.json(&["pool", "device", "remove", &one, "--abort"])["changed"], false);
    assert_eq!(devices(&case.daemon).len(), 5);
    case.daemon.kill();
    case.daemon.start_again();
    assert_eq!(devices(&case.daemon).len(), 5);
    case.holds("data", &written);
}

#[test]
fn a_replacement_that_can_not_be_completed_is_refused_before_anything_is_added() {
    let case = Case::new("unreplaced");
    let [one, two] = case.spares.each_ref().map(|path| path.display().to_string());
    let [first, three] = [devices(&case.daemon)[0].clone(), case.file("three", 64)];
    let replace = |old: &str, new: &str| {
        let (exit, text) = case.daemon.failure(&["pool", "device", "replace", old, new]);
        assert!(matches!(exit, 3 | 7), "{exit} {text}");
        assert_eq!(devices(&case.daemon).len(), 3, "{text}");
        text
    };
    assert!(replace(&first, &three).contains("another device than the pool's first"));
    assert!(replace("/nowhere", &three).contains("a device of pool default"));
    assert!(replace(&one, &one).contains("another device than the one that it replaces"));
    case.daemon.ok(&["pool", "device", "remove", &one, "--rate", "1M", "--no-wait"]);
    assert!(replace(&two, &three).contains("is leaving"));
    case.daemon.ok(&["pool", "device", "remove", &one, "--abort"]);
    case.holds("data", &case.content);
}
