//! Backups of snapshots: a backup of `export --since` that `import --apply` puts onto a copy makes
//! it equal to the snapshot, and a wrong file or a wrong copy is refused.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::process::{Child, Stdio};

use blockd_media::clock::Clock;
use cli_support::{Daemon, LIMIT, catches_interrupts, connect, pattern, signal, wait_until};

const MIB: u64 = 1 << 20;

/// Sum of all bytes of a volume, by way of an image.
fn sum(daemon: &Daemon, volume: &str) -> (usize, u32) {
    let name = format!("{volume}.img");
    daemon.ok(&["export", volume, &name, "--force"]);
    let bytes = fs::read(daemon.dir.join(&name)).unwrap();
    fs::remove_file(daemon.dir.join(name)).unwrap();
    (bytes.len(), crc32c::crc32c(&bytes))
}

/// A volume `data` of three days: its content on each is in a snapshot and in a backup, `mon.blkd`
/// as a whole, `tue.blkd` and `wed.blkd` since the day before.
fn three_days() -> Daemon {
    let daemon = Daemon::start("1G");
    daemon.ok(&["add", "data", "--size", "24M"]);
    let write = |at: u64, bytes: &[u8]| {
        let mut client = connect(&daemon, "data");
        client.write(at, bytes, false).unwrap();
        client.disconnect().unwrap();
    };
    write(0, &pattern(3 << 20, 1));
    write(20 * MIB, &pattern(1 << 20, 2));
    daemon.ok(&["snapshot", "data", "--tag", "mon"]);
    daemon.ok(&["export", "data@mon", "mon.blkd", "--format", "backup"]);
    daemon.ok(&["resize", "data", "--size", "32M"]);
    write(MIB, &pattern(300 << 10, 3));
    write(31 * MIB, &pattern(1 << 20, 4));
    let mut client = connect(&daemon, "data");
    client.write_zeroes(20 * MIB, MIB / 2, false).unwrap();
    // Zeroes that are data.
    client.write(2 * MIB, &[0; 128 << 10], false).unwrap();
    client.disconnect().unwrap();
    daemon.ok(&["snapshot", "data", "--tag", "tue"]);
    daemon.ok(&["export", "data@tue", "tue.blkd", "--since", "data@mon"]);
    write(10 * MIB, &pattern(64 << 10, 5));
    daemon.ok(&["snapshot", "data", "--tag", "wed"]);
    daemon.ok(&["export", "data@wed", "wed.blkd", "--since", "data@tue"]);
    daemon
}

fn size(daemon: &Daemon, name: &str) -> u64 {
    fs::metadata(daemon.dir.join(name)).unwrap().len()
}

#[test]
fn a_chain_of_backups_makes_the_copy_what_the_volume_was() {
    let daemon = three_days();
    // Unchanged data is not in it, except for the rest of extents that were copied.
    assert!(size(&daemon, "mon.blkd") > 4 * MIB, "{}", size(&daemon, "mon.blkd"));
    assert!(size(&daemon, "tue.blkd") < 2 * MIB, "{}", size(&daemon, "tue.blkd"));
    assert!(size(&daemon, "wed.blkd") < 100 << 10, "{}", size(&daemon, "wed.blkd"));
    // In a pool of another daemon, as backups are.
    let other = Daemon::start("1G");
    for day in ["mon", "tue", "wed"] {
        let file = daemon.dir.join(format!("{day}.blkd"));
        let file = file.to_str().unwrap();
        let done = other.json(&["import", file, "copy", "--apply"]);
        let expected = (true, day == "mon", format!("data@{day}"));
        assert_eq!(
            (done["changed"].clone(), done["created"].clone(), done["snapshot"].clone()),
            (expected.0.into(), expected.1.into(), expected.2.into())
        );
        assert!(sum(&other, "copy") == sum(&daemon, &format!("data@{day}")), "{day}");
        let marker = done["marker"].as_str().unwrap().to_owned();
        assert!(marker.starts_with(&format!("copy@{day}.")), "{marker}");
        assert!(sum(&other, &marker) == sum(&daemon, &format!("data@{day}")), "{day}");
        // Once more does nothing.
        let again = other.json(&["import", file, "copy", "--apply"]);
        assert_eq!((&again["changed"], &again["marker"]), (&false.into(), &marker.into()));
    }
}

/// Their snapshots have the same pool and the same ids, and hold different things.
#[test]
fn pools_that_were_copied_and_diverged_are_distinguished() {
    let mut one = Daemon::start("1G");
    one.ok(&["add", "data", "--size", "8M"]);
    let mut other = Daemon::start("1G");
    for daemon in [&mut one, &mut other] {
        assert!(daemon.terminate().success());
    }
    fs::copy(one.dir.join("default.pool"), other.dir.join("default.pool")).unwrap();
    // As on another host: here the pool of this name was another one.
    fs::remove_file(other.dir.join("served.json")).unwrap();
    for (daemon, seed) in [(&mut one, 1), (&mut other, 2)] {
        daemon.start_again();
        daemon.ok(&["attach", "data"]);
        let mut client = connect(daemon, "data");
        client.write(0, &pattern(1 << 20, seed), false).unwrap();
        daemon.ok(&["snapshot", "data", "--tag", "mon"]);
        client.write(4 * MIB, &pattern(1 << 20, seed), false).unwrap();
        client.disconnect().unwrap();
        daemon.ok(&["snapshot", "data", "--tag", "tue"]);
        daemon.ok(&["export", "data@mon", "mon.blkd", "--format", "backup"]);
        daemon.ok(&["export", "data@tue", "tue.blkd", "--since", "data@mon"]);
        // Of pools with one id a host has one open at a time.
        assert!(daemon.terminate().success());
    }
    one.start_again();
    let third = Daemon::start("1G");
    let file = |daemon: &Daemon, day: &str| {
        daemon.dir.join(format!("{day}.blkd")).to_str().unwrap().to_owned()
    };
    third.ok(&["import", &file(&one, "mon"), "copy", "--apply"]);
    let (code, error) = third.failure(&["import", &file(&other, "tue"), "copy", "--apply"]);
    assert!(code == 7 && error.contains("is no copy of what the backup begins with"), "{error}");
    // Nor is a clone of one pool's snapshot a copy of the other's.
    one.ok(&["clone", "data@mon", "try"]);
    let (code, error) = one.failure(&["import", &file(&other, "tue"), "try", "--apply"]);
    assert!(code == 7 && error.contains("is no copy of what the backup begins with"), "{error}");
    third.ok(&["import", &file(&one, "tue"), "copy", "--apply"]);
    assert!(sum(&third, "copy") == sum(&one, "data@tue"));
}

#[test]
fn a_clone_of_the_base_is_a_copy_of_it() {
    let daemon = three_days();
    daemon.ok(&["clone", "data@mon", "try"]);
    daemon.ok(&["import", "tue.blkd", "try", "--apply"]);
    assert!(sum(&daemon, "try") == sum(&daemon, "data@tue"));
    // It was detached, and is again.
    assert_eq!(daemon.json(&["show", "try"])["volume"]["attached"], false);
    daemon.ok(&["import", "wed.blkd", "try", "--apply"]);
    assert!(sum(&daemon, "try") == sum(&daemon, "data@wed"));
}

#[test]
fn a_volume_that_is_no_copy_of_the_base_is_refused_with_both_named() {
    let daemon = three_days();
    daemon.ok(&["import", "mon.blkd", "copy", "--apply"]);
    let before = sum(&daemon, "copy");
    let (code, error) = daemon.failure(&["import", "wed.blkd", "copy", "--apply"]);
    assert_eq!(code, 7, "{error}");
    assert!(error.contains("its newest snapshot is copy@mon."), "{error}");
    assert!(error.contains("the backup begins with data@tue, id "), "{error}");
    daemon.ok(&["add", "other", "--size", "24M"]);
    let (code, error) = daemon.failure(&["import", "tue.blkd", "other", "--apply"]);
    assert!(code == 7 && error.contains("its newest snapshot is none"), "{code} {error}");
    let (code, error) = daemon.failure(&["import", "tue.blkd", "unknown", "--apply"]);
    assert!(code == 4 && error == "volume unknown does not exist", "{code} {error}");
    let (code, error) = daemon.failure(&["import", "mon.blkd", "data", "--apply"]);
    assert!(code == 7 && error.contains("holds data"), "{code} {error}");
    let (code, error) = daemon.failure(&["import", "tue.blkd", "data@mon", "--apply"]);
    assert!(code == 7 && error.contains("is a snapshot"), "{code} {error}");
    assert!(sum(&daemon, "copy") == before);
}

#[test]
fn a_copy_that_was_written_is_refused_until_it_is_rolled_back_or_forced() {
    let daemon = three_days();
    let done = daemon.json(&["import", "mon.blkd", "copy", "--apply"]);
    let marker = done["marker"].as_str().unwrap();
    let mut client = connect(&daemon, "copy");
    client.write(8 * MIB, &[1; 4096], false).unwrap();
    let (code, error) = daemon.failure(&["import", "tue.blkd", "copy", "--apply"]);
    assert!(code == 7 && error.contains("clients that are connected"), "{code} {error}");
    client.disconnect().unwrap();
    wait_for_no_clients(&daemon, "copy");
    let (code, error) = daemon.failure(&["import", "tue.blkd", "copy", "--apply"]);
    let named = error.contains(&format!("since it held {marker}, in 4096 bytes"));
    assert!(code == 7 && named && error.contains("begins with data@mon"), "{code} {error}");
    // A volume that was shrunk and grown again has lost data, although no range shows it.
    daemon.ok(&["clone", marker, "cut"]);
    daemon.ok(&["resize", "cut", "--size", "16M", "--shrink"]);
    let (code, error) = daemon.failure(&["import", "tue.blkd", "cut", "--apply"]);
    assert!(code == 7 && error.contains("in 8388608 bytes"), "{code} {error}");
    // By force what the file names becomes right, and the rest stays.
    daemon.ok(&["clone", marker, "forced"]);
    daemon.ok(&["attach", "forced"]);
    let mut client = connect(&daemon, "forced");
    client.write(8 * MIB, &[1; 4096], false).unwrap();
    client.disconnect().unwrap();
    wait_for_no_clients(&daemon, "forced");
    let done = daemon.json(&["import", "tue.blkd", "forced", "--apply", "--force"]);
    assert_eq!(done["marker"], serde_json::Value::Null);
    let mut client = connect(&daemon, "forced");
    let mut held = [0; 8192];
    client.read(8 * MIB, &mut held).unwrap();
    assert!(held[..4096] == [1; 4096] && held[4096..] == [0; 4096]);
    client.write_zeroes(8 * MIB, 4096, false).unwrap();
    client.disconnect().unwrap();
    wait_for_no_clients(&daemon, "forced");
    assert!(sum(&daemon, "forced") == sum(&daemon, "data@tue"));
    // And in order.
    daemon.ok(&["rollback", "copy", marker, "--force"]);
    daemon.ok(&["import", "tue.blkd", "copy", "--apply"]);
    assert!(sum(&daemon, "copy") == sum(&daemon, "data@tue"));
}

fn wait_for_no_clients(daemon: &Daemon, volume: &str) {
    let connections = || daemon.json(&["show", volume])["volume"]["connections"].take();
    wait_until("the volume still has clients", || connections() == 0);
}

#[test]
fn a_damaged_backup_is_refused_before_anything_is_written() {
    let daemon = three_days();
    daemon.ok(&["import", "mon.blkd", "copy", "--apply"]);
    let whole = fs::read(daemon.dir.join("tue.blkd")).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    let mut newer = whole.clone();
    newer[8] = 4;
    for (bytes, problem) in [
        (whole[..whole.len() - 1].to_vec(), "ends in the middle: it was cut short"),
        (whole[..whole.len() / 2].to_vec(), "ends in the middle: it was cut short"),
        (whole[..100].to_vec(), "ends in the middle: it was cut short"),
        (flipped, "was changed: the checksum of record"),
        (newer, "is of a newer version, 4: this blockd reads up to 3"),
        ([whole.as_slice(), &[0]].concat(), "goes on after its end"),
        (pattern(4096, 9), "is no incremental backup of blockd"),
    ] {
        fs::write(daemon.dir.join("bad.blkd"), bytes).unwrap();
        let (code, error) = daemon.failure(&["import", "bad.blkd", "copy", "--apply"]);
        assert!(code == 10 && error.contains(problem), "{code} {error}");
        let (code, error) = daemon.failure(&["import", "bad.blkd", "copy", "--apply", "--force"]);
        assert!(code == 10 && error.contains(problem), "{code} {error}");
    }
    assert!(sum(&daemon, "copy") == sum(&daemon, "data@mon"));
    // An intact backup can still be applied: nothing has touched the copy.
    daemon.ok(&["import", "tue.blkd", "copy", "--apply"]);
}

#[test]
fn backups_go_through_pipes_and_one_that_is_cut_there_is_undone() {
    let daemon = three_days();
    let through = |bytes: &[u8]| {
        let mut import = daemon
            .command(&["import", "-", "copy", "--apply"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // A program that has seen enough reads no further.
        let _ = import.stdin.take().unwrap().write_all(bytes);
        let output = import.wait_with_output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let piped = |arguments: &[&str]| {
        let output = daemon.run(&[&["export"], arguments].concat());
        assert!(output.status.success());
        output.stdout
    };
    let monday = piped(&["data@mon", "-", "--format", "backup"]);
    assert!(monday == fs::read(daemon.dir.join("mon.blkd")).unwrap());
    let (code, error) = through(&monday[..monday.len() / 2]);
    let undone = error.contains("volume copy was incomplete and is deleted");
    assert!(code == 10 && undone, "{code} {error}");
    assert_eq!(daemon.failure(&["show", "copy"]).0, 4);
    assert_eq!(through(&monday), (0, String::new()));
    let tuesday = piped(&["data@tue", "-", "--since", "data@mon"]);
    let (code, error) = through(&tuesday[..tuesday.len() - 9]);
    let undone = error.contains("volume copy is rolled back to copy@mon.");
    assert!(code == 10 && undone, "{code} {error}");
    assert!(sum(&daemon, "copy") == sum(&daemon, "data@mon"));
    assert_eq!(through(&tuesday), (0, String::new()));
    assert!(sum(&daemon, "copy") == sum(&daemon, "data@tue"));
}

/// Waits for a program that was signalled to end.
fn ended(mut child: Child) -> String {
    let clock = Clock::start();
    while child.try_wait().unwrap().is_none() {
        assert!(clock.elapsed() < LIMIT, "it goes on");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn an_import_whose_input_is_silent_can_be_interrupted() {
    let daemon = three_days();
    daemon.ok(&["import", "mon.blkd", "copy", "--apply"]);
    let tuesday = fs::read(daemon.dir.join("tue.blkd")).unwrap();
    // Before anything has come, and in the middle.
    for begin in [&[][..], &tuesday[..tuesday.len() / 2]] {
        let mut import = daemon.command(&["import", "-", "copy", "--apply"]);
        let mut import = import.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut pipe = import.stdin.take().unwrap();
        pipe.write_all(begin).unwrap();
        catches_interrupts(&import);
        // By then it waits.
        std::thread::sleep(std::time::Duration::from_millis(500));
        signal(&import, "INT");
        let error = ended(import);
        drop(pipe);
        assert!(error.contains("interrupted"), "{error}");
        let undone = error.contains("volume copy is rolled back to copy@mon.");
        assert_eq!(undone, !begin.is_empty(), "{error}");
        assert!(sum(&daemon, "copy") == sum(&daemon, "data@mon"));
    }
    // A named pipe without a writer cannot even be opened.
    let pipe = daemon.dir.join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut import = daemon.command(&["import", "pipe", "copy", "--apply"]);
    let import = import.stderr(Stdio::piped()).spawn().unwrap();
    catches_interrupts(&import);
    std::thread::sleep(std::time::Duration::from_millis(500));
    signal(&import, "INT");
    assert!(ended(import).contains("interrupted"));
}

#[test]
fn a_backup_that_is_impossible_is_refused_before_a_file_is_made() {
    let daemon = three_days();
    daemon.ok(&["add", "other", "--size", "1M"]);
    daemon.ok(&["snapshot", "other", "--tag", "mon"]);
    let cases: [(&[&str], i32, &str); 7] = [
        (&["data", "x.blkd", "--since", "data@mon"], 7, "take a snapshot of it"),
        (&["data", "x.blkd", "--format", "backup"], 7, "take a snapshot of it"),
        (&["data@tue", "x.blkd", "--since", "data"], 7, "volume data is not a snapshot"),
        (&["data@tue", "x.blkd", "--since", "unknown"], 4, "unknown does not exist"),
        (&["data@tue", "x.blkd", "--since", "data@tue"], 3, "another snapshot"),
        (&["data@tue", "x.blkd", "--since", "other@mon"], 7, "data@tue is of another family"),
        (
            &["data@tue", "x.blkd", "--since", "data@mon", "--format", "raw"],
            3,
            "format is raw: must be backup with --since",
        ),
    ];
    for (arguments, expected, problem) in cases {
        let (code, error) = daemon.failure(&[&["export"], arguments].concat());
        assert!(code == expected && error.contains(problem), "{code} {error}");
        assert!(!daemon.dir.join("x.blkd").exists());
    }
    // A backup is no image.
    let (code, error) = daemon.failure(&["import", "mon.blkd", "image"]);
    assert!(code == 3 && error.contains("which --apply is for"), "{code} {error}");
    assert_eq!(daemon.failure(&["show", "image"]).0, 4);
    let file = File::create(daemon.dir.join("empty.blkd")).unwrap();
    file.write_all_at(b"", 0).unwrap();
    let (code, error) = daemon.failure(&["import", "empty.blkd", "copy", "--apply"]);
    assert!(code == 10 && error.contains("cut short"), "{code} {error}");
}

/// A pipe as output holds an export up between the look at the snapshots and the copying.
#[test]
fn a_snapshot_that_was_replaced_meanwhile_is_not_exported() {
    let daemon = three_days();
    let pipe = daemon.dir.join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let cases: [(&str, &[&str]); 3] = [
        ("data@tue", &["--format", "raw"]),
        ("data@tue", &["--since", "data@mon"]),
        ("data@mon", &["--since", "data@mon"]),
    ];
    for (replaced, how) in cases {
        // One that had not looked yet finds the new one, and is tried again.
        let refused = (0..6).any(|attempt| {
            let arguments = [&["export", "data@tue", "pipe", "--force"], how].concat();
            let mut export = daemon.command(&arguments);
            let export = export.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
            std::thread::sleep(std::time::Duration::from_millis(100 << attempt));
            daemon.ok(&["del", replaced]);
            daemon.ok(&["snapshot", "data", "--tag", &replaced["data@".len()..]]);
            let mut piped = Vec::new();
            File::open(&pipe).unwrap().read_to_end(&mut piped).unwrap();
            let output = export.wait_with_output().unwrap();
            let error = String::from_utf8(output.stderr).unwrap();
            if output.status.success() {
                return false;
            }
            let named = format!("volume {replaced} was replaced by another one");
            assert!(output.status.code() == Some(7) && error.contains(&named), "{error}");
            if how[0] == "--since" {
                // Without its end it is no backup.
                fs::write(daemon.dir.join("piped.blkd"), piped).unwrap();
                let (code, error) = daemon.failure(&["receive", "copy", "piped.blkd"]);
                assert!(code == 10 && error.contains("it was cut short"), "{code} {error}");
            }
            assert_eq!(daemon.json(&["show", "data@tue"])["volume"]["attached"], false);
            true
        });
        assert!(refused, "{replaced} {how:?}");
    }
}

/// The second finds the snapshot attached, and still reads it when the first ends.
#[test]
fn an_export_that_ends_leaves_another_one_its_connections() {
    const LEN: usize = 32 << 20;
    let daemon = Daemon::start("256M");
    daemon.ok(&["add", "data", "--size", "32M"]);
    let bytes = pattern(LEN, 1);
    let mut client = connect(&daemon, "data");
    for (at, part) in (0..).step_by(1 << 20).zip(bytes.chunks(1 << 20)) {
        client.write(at, part, false).unwrap();
    }
    client.disconnect().unwrap();
    daemon.ok(&["snapshot", "data", "--tag", "mon"]);
    let shown = |field: &str| daemon.json(&["show", "data@mon"])["volume"][field].take();
    // A pipe that is not read holds each of them up, with requests that are still to be sent.
    let begun = |others: u64| {
        let mut export = daemon.command(&["export", "data@mon", "-"]);
        let export = export.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_until("it reads", || shown("connections").as_u64().unwrap() >= others + 4);
        export
    };
    let exports = [begun(0), begun(4)];
    let warned = exports.map(|export| {
        let output = export.wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && output.stdout == bytes, "{said}");
        said
    });
    let expected = "blockd: warning: it stays attached: volume data@mon has ";
    assert!(warned[0].starts_with(expected) && warned[1].is_empty(), "{warned:?}");
    assert_eq!(shown("attached"), true);
    // One that is alone detaches what it has attached.
    wait_for_no_clients(&daemon, "data@mon");
    daemon.ok(&["detach", "data@mon"]);
    assert!(daemon.run(&["export", "data@mon", "-"]).stdout == bytes);
    assert_eq!(shown("attached"), false);
}
