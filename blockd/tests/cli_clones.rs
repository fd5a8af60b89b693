//! Clones of one image on the command line.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use blockd_nbd::client::Client;
use cli_support::{Daemon, connect, pattern};
use serde_json::{Value, json};

const BYTES: usize = 1 << 20;

fn content(client: &mut Client) -> Vec<u8> {
    let mut bytes = vec![0; 2 * BYTES];
    client.read(0, &mut bytes).unwrap();
    bytes
}

/// A daemon with a snapshot of an image, and the first bytes of it.
fn with_image() -> (Daemon, Vec<u8>) {
    let daemon = Daemon::start("256M");
    daemon.ok(&["add", "--nbd", "--size", "32M", "image"]);
    let mut image = pattern(BYTES, 1);
    connect(&daemon, "image").write(0, &image, false).unwrap();
    daemon.ok(&["snapshot", "image=golden"]);
    image.resize(2 * BYTES, 0);
    (daemon, image)
}

#[test]
fn a_reset_clone_has_the_image_and_keeps_its_size_and_its_clients() {
    let (mut daemon, image) = with_image();
    daemon.ok(&["clone", "golden", "vm", "--size", "64M"]);
    daemon.ok(&["attach", "--nbd", "vm"]);
    let mut client = connect(&daemon, "vm");
    client.write(BYTES as u64 / 2, &pattern(BYTES, 2), true).unwrap();
    client.write(40 << 20, &pattern(BYTES, 3), true).unwrap();
    let (code, error) = daemon.failure(&["reset", "vm"]);
    assert!(code == 7 && error.contains("has 1 connection"), "{code} {error}");
    assert!(content(&mut client) != image, "a reset that was refused has changed the volume");
    assert_eq!(daemon.ok(&["reset", "vm", "--force"]), "vm: holds what golden holds\n");
    assert!(content(&mut client) == image);
    let mut behind = vec![0xff; BYTES];
    client.read(40 << 20, &mut behind).unwrap();
    assert!(behind.iter().all(|byte| *byte == 0), "beyond the image's end");
    // Again, with nothing to do, and without a client.
    client.write(0, &pattern(BYTES, 4), false).unwrap();
    drop(client);
    let unused = || daemon.run(&["reset", "vm"]).status.success().then_some(());
    blockd_testkit::tools::wait_until("the end of the connection", cli_support::LIMIT, unused)
        .unwrap();
    daemon.ok(&["reset", "vm"]);
    let shown = daemon.json(&["show", "vm"]);
    let volume = &shown["volume"];
    assert_eq!((&volume["size_bytes"], &volume["attached"]), (&(64 << 20).into(), &true.into()));
    assert_eq!(volume["origin"], "golden");
    daemon.kill();
    daemon.start_again();
    assert!(content(&mut connect(&daemon, "vm")) == image);
    let (code, error) = daemon.failure(&["reset", "image"]);
    assert!(code == 7 && error.contains("was not made of a snapshot"), "{code} {error}");
}

#[test]
fn clones_are_made_and_attached_by_one_command() {
    let (mut daemon, image) = with_image();
    let one = daemon.json(&["clone", "golden", "vm", "--size", "64M", "--nbd"]);
    assert_eq!(json!([one["changed"], one["attached"]]), json!([true, true]));
    assert!(content(&mut connect(&daemon, "vm")) == image);
    let count = ["--count", "300", "--name-template", "vm-{}"];
    let several = [&["clone", "golden"], &count[..]].concat();
    let made = daemon.json(&[&several[..], &["--nbd", "--label", "batch=1"]].concat());
    assert_eq!(json!([made["created"], made["attached"]]), json!([300, 300]));
    let volumes = made["volumes"].as_array().unwrap();
    assert_eq!((&volumes[0]["name"], &volumes[299]["name"]), (&"vm-1".into(), &"vm-300".into()));
    assert_eq!(volumes[299]["labels"]["batch"], "1");
    assert!(content(&mut connect(&daemon, "vm-300")) == image);
    let again = daemon.ok(&[&several[..], &["--nbd"]].concat());
    assert!(again.starts_with("0 cloned from golden, 32 MiB each; 300 were there"), "{again}");
    let listed = |daemon: &Daemon| {
        daemon.json(&["list", "--label", "batch=1"])["volumes"].as_array().unwrap().len()
    };
    assert_eq!(listed(&daemon), 300);
    daemon.kill();
    daemon.start_again();
    assert_eq!(listed(&daemon), 300);
    for number in 1..=300 {
        assert!(content(&mut connect(&daemon, &format!("vm-{number}"))) == image, "vm-{number}");
    }
}

/// The names of all volumes, and whether each is attached.
fn state(daemon: &Daemon) -> Vec<(Value, Value)> {
    let list = daemon.json(&["list"]);
    let volumes = list["volumes"].as_array().unwrap();
    volumes.iter().map(|one| (one["name"].clone(), one["attached"].clone())).collect()
}

#[test]
fn clones_of_which_one_is_refused_leave_nothing() {
    let (daemon, _) = with_image();
    daemon.ok(&["add", "--nbd", "--size", "1M", "vm-3"]);
    daemon.ok(&["clone", "golden", "vm-2"]);
    let before = state(&daemon);
    let clone = |words: &[&str]| daemon.failure(&[&["clone", "golden"], words].concat());
    let five = ["--count", "5", "--name-template", "vm-{}"];
    let (code, error) = clone(&five);
    assert!(code == 5 && error.contains("vm-3") && error.contains("nothing"), "{code} {error}");
    assert_eq!(state(&daemon), before);
    // One is attached in another way than is asked for.
    daemon.ok(&["del", "--force", "vm-3"]);
    daemon.ok(&["clone", "golden", "vm-3"]);
    daemon.ok(&["attach", "--nbd", "--read-only", "vm-3"]);
    let before = state(&daemon);
    let (code, error) = clone(&[&five[..], &["--nbd"]].concat());
    assert!(code == 7 && error.contains("vm-3"), "{code} {error}");
    assert_eq!(state(&daemon), before);
    let cases: [(&[&str], &str); 4] = [
        (&["--count", "2", "--name-template", "vm"], "with {} in it"),
        (&["--count", "0", "--name-template", "vm-{}"], "0 is not in 1..=1000"),
        (&["vm-9", "--count", "2"], "cannot be used with"),
        (&["vm-9", "--size", "1M"], "no smaller than the snapshot's size"),
    ];
    for (words, part) in cases {
        let output = daemon.run(&[&["clone", "golden"], words].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(part), "{words:?}: {error}");
        assert_eq!(state(&daemon), before);
    }
}
