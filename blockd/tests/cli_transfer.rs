//! Import and export against a daemon: an export equals the import, holes included.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Command, Stdio};
use std::time::Duration;

use blockd_media::clock::Clock;
use cli_support::{Daemon, LIMIT, pattern, signal};

const MIB: u64 = 1 << 20;

/// A file of some MiB with data here and there.
fn image(daemon: &Daemon, name: &str, size_bytes: u64) -> Vec<u8> {
    let file = File::create(daemon.dir.join(name)).unwrap();
    file.set_len(size_bytes).unwrap();
    for (index, offset) in [0, 5 * MIB + 300, 17 * MIB - 1].into_iter().enumerate() {
        file.write_all_at(&pattern(1_500_000, index as u64), offset).unwrap();
    }
    // Zeroes that are written and no hole.
    file.write_all_at(&vec![0; 4 << 20], 9 * MIB).unwrap();
    std::fs::read(daemon.dir.join(name)).unwrap()
}

fn same(daemon: &Daemon, name: &str, expected: &[u8]) {
    // Compared here: a failed assertion must not print megabytes.
    assert!(std::fs::read(daemon.dir.join(name)).unwrap() == expected, "{name} differs");
}

#[test]
fn a_raw_image_goes_in_and_out_with_its_holes() {
    let daemon = Daemon::start("1G");
    let bytes = image(&daemon, "in.img", 64 * MIB);
    let done = daemon.json(&["import", "in.img", "data"]);
    assert_eq!((&done["source_bytes"], &done["padded_bytes"]), (&(64 * MIB).into(), &0.into()));
    assert!(done["written_bytes"].as_u64().unwrap() < 5 * MIB, "{done}");
    let volume = &daemon.json(&["show", "data"])["volume"];
    assert_eq!(volume["size_bytes"], 64 * MIB);
    assert!(volume["mapped_bytes"].as_u64().unwrap() < 8 * MIB, "{volume}");
    daemon.ok(&["export", "data", "out.img"]);
    same(&daemon, "out.img", &bytes);
    let taken = std::fs::metadata(daemon.dir.join("out.img")).unwrap().blocks() * 512;
    assert!(taken < 8 * MIB, "{taken}");
}

#[test]
fn nothing_that_is_there_is_overwritten_unasked() {
    let daemon = Daemon::start("1G");
    let bytes = image(&daemon, "in.img", 32 * MIB);
    daemon.ok(&["import", "in.img", "data"]);
    let (code, error) = daemon.failure(&["import", "in.img", "data"]);
    assert!(code == 5 && error.contains("--overwrite"), "{code} {error}");
    let (code, error) = daemon.failure(&["export", "data", "in.img"]);
    assert!(code == 5 && error.contains("--force"), "{code} {error}");
    same(&daemon, "in.img", &bytes);
    let other = pattern(20 << 20, 9);
    std::fs::write(daemon.dir.join("other.img"), &other).unwrap();
    daemon.ok(&["import", "other.img", "data", "--overwrite"]);
    daemon.ok(&["export", "data", "in.img", "--force"]);
    let mut expected = other;
    expected.resize(32 << 20, 0);
    same(&daemon, "in.img", &expected);
}

/// The names of incomplete files in the daemon's folder.
fn parts(daemon: &Daemon) -> Vec<String> {
    let entries = std::fs::read_dir(&daemon.dir).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(".part")).collect()
}

#[test]
fn an_interrupted_export_leaves_the_file_that_it_was_to_replace() {
    let daemon = Daemon::start("1G");
    std::fs::write(daemon.dir.join("in.img"), pattern(256 << 20, 6)).unwrap();
    daemon.ok(&["import", "in.img", "data"]);
    let old = pattern(1 << 20, 3);
    std::fs::write(daemon.dir.join("out.img"), &old).unwrap();
    // One that is quicker than the signal is tried again.
    for _ in 0..20 {
        let mut export = daemon.command(&["export", "data", "out.img", "--force"]);
        let mut export = export.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        while parts(&daemon).is_empty() && export.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(20));
        signal(&export, "INT");
        let output = export.wait_with_output().unwrap();
        assert_eq!(parts(&daemon), [""; 0]);
        if output.status.success() {
            std::fs::write(daemon.dir.join("out.img"), &old).unwrap();
            continue;
        }
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains("interrupted; ") && error.contains("out.img is as it was"));
        same(&daemon, "out.img", &old);
        return;
    }
    panic!("no export was interrupted");
}

#[test]
fn standard_output_that_ends_early_is_no_file_of_that_name() {
    let daemon = Daemon::start("1G");
    std::fs::write(daemon.dir.join("in.img"), pattern(32 << 20, 6)).unwrap();
    daemon.ok(&["import", "in.img", "data"]);
    std::fs::write(daemon.dir.join("-"), "of another owner").unwrap();
    let mut export = daemon.command(&["export", "data", "-"]);
    let mut export = export.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(export.stdout.take());
    let output = export.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("the output is incomplete"), "{error}");
    same(&daemon, "-", b"of another owner");
}

#[test]
fn a_size_that_is_no_whole_block_is_rounded_up_and_said() {
    let daemon = Daemon::start("1G");
    let bytes = pattern(1_000_001, 4);
    std::fs::write(daemon.dir.join("odd.img"), &bytes).unwrap();
    let said = daemon.ok(&["import", "odd.img", "odd"]);
    assert!(said.contains("447 zero bytes added to make whole blocks"), "{said}");
    daemon.ok(&["export", "odd", "out.img"]);
    let out = std::fs::read(daemon.dir.join("out.img")).unwrap();
    assert!(out[..bytes.len()] == bytes && out[bytes.len()..].iter().all(|byte| *byte == 0));
}

#[test]
fn raw_bytes_go_through_pipes() {
    let daemon = Daemon::start("1G");
    let bytes = pattern(3 << 20, 5);
    let mut import = daemon
        .command(&["import", "-", "data", "--size", "8M"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    import.stdin.take().unwrap().write_all(&bytes).unwrap();
    assert!(import.wait().unwrap().success());
    let output = daemon.run(&["export", "data", "-"]);
    assert!(output.status.success() && output.stdout.len() == 8 << 20);
    assert!(output.stdout[..3 << 20] == bytes);
}

#[test]
fn a_detached_volume_is_exported_and_stays_detached() {
    let daemon = Daemon::start("1G");
    let bytes = image(&daemon, "in.img", 32 * MIB);
    daemon.ok(&["import", "in.img", "data"]);
    daemon.ok(&["detach", "data"]);
    daemon.ok(&["export", "data", "out.img"]);
    same(&daemon, "out.img", &bytes);
    assert_eq!(daemon.json(&["show", "data"])["volume"]["attached"], false);
}

#[test]
fn qcow2_goes_in_and_out_through_qemu_img() {
    let daemon = Daemon::start("1G");
    let bytes = image(&daemon, "in.img", 64 * MIB);
    let qemu_img = |arguments: &[&str]| {
        let status = Command::new("qemu-img").args(arguments).current_dir(&daemon.dir).status();
        assert!(status.expect("qemu-img is installed by `cargo ci setup`").success());
    };
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "in.img", "in.qcow2"]);
    daemon.ok(&["import", "in.qcow2", "data"]);
    daemon.ok(&["export", "data", "out.img"]);
    same(&daemon, "out.img", &bytes);
    daemon.ok(&["export", "data", "out.qcow2", "--format", "qcow2"]);
    qemu_img(&["compare", "-f", "raw", "-F", "qcow2", "in.img", "out.qcow2"]);
    // Without the program the package is named.
    let output = daemon.command(&["import", "in.qcow2", "other"]).env("PATH", "").output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(4) && error.contains("qemu-utils"), "{error}");
}

#[test]
fn an_import_survives_a_daemon_that_is_killed() {
    let mut daemon = Daemon::start("1G");
    let bytes = pattern(256 << 20, 6);
    let mut import = daemon
        .command(&["import", "-", "data", "--size", "256M"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut pipe = import.stdin.take().unwrap();
    pipe.write_all(&bytes[..100 << 20]).unwrap();
    daemon.kill();
    std::thread::sleep(Duration::from_millis(300));
    daemon.start_again();
    pipe.write_all(&bytes[100 << 20..]).unwrap();
    drop(pipe);
    assert!(import.wait().unwrap().success());
    daemon.ok(&["export", "data", "out.img"]);
    same(&daemon, "out.img", &bytes);
}

#[test]
fn an_interrupted_import_leaves_no_volume() {
    let daemon = Daemon::start("1G");
    let mut import = daemon
        .command(&["import", "-", "data", "--size", "256M"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut pipe = import.stdin.take().unwrap();
    pipe.write_all(&pattern(8 << 20, 7)).unwrap();
    signal(&import, "INT");
    let clock = Clock::start();
    while import.try_wait().unwrap().is_none() {
        assert!(clock.elapsed() < LIMIT, "the import goes on");
        std::thread::sleep(Duration::from_millis(10));
    }
    // Only now: it ended although its input did not.
    drop(pipe);
    let output = import.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{error}");
    assert!(error.contains("volume data was incomplete and is deleted"), "{error}");
    assert_eq!(daemon.failure(&["show", "data"]).0, 4);
}

#[test]
fn input_that_is_too_long_is_refused_and_leaves_no_volume() {
    let daemon = Daemon::start("1G");
    std::fs::write(daemon.dir.join("in.img"), pattern(2 << 20, 8)).unwrap();
    let (code, error) = daemon.failure(&["import", "in.img", "data", "--size", "1M"]);
    assert!(code == 3 && error.starts_with("size is 1048576: must be at least"), "{error}");
    let input = File::open(daemon.dir.join("in.img")).unwrap();
    let output =
        daemon.command(&["import", "-", "data", "--size", "1M"]).stdin(input).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(3) && error.contains("deleted"), "{error}");
    assert_eq!(daemon.failure(&["show", "data"]).0, 4);
}
