//! Clones of one image on the command line.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use blockd_nbd::client::Client;
use cli_support::{Daemon, connect, pattern};

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
