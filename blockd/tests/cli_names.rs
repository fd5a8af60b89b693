//! Other names for volumes.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use blockd_nbd::client::{Client, ConnectOptions};
use cli_support::{Daemon, pattern};
use serde_json::{Value, json};

/// A client of a volume, by the address that `show` has.
fn connect(daemon: &Daemon, volume: &str) -> Client {
    let shown = daemon.json(&["show", volume]);
    let uri = shown["volume"]["nbd_uris"][0].as_str().unwrap().parse().unwrap();
    Client::connect(&uri, &ConnectOptions::default()).unwrap()
}

fn names(daemon: &Daemon) -> Vec<Value> {
    let list = daemon.json(&["list"]);
    list["volumes"].as_array().unwrap().iter().map(|one| one["name"].clone()).collect()
}

#[test]
fn a_renamed_volume_keeps_its_clients_and_new_ones_find_it_by_its_new_name() {
    let mut daemon = Daemon::start("256M");
    daemon.ok(&["add", "--nbd", "--size", "64M", "data"]);
    let address = daemon.json(&["show", "data"])["volume"]["nbd_uris"][0].clone();
    let former = address.as_str().unwrap().parse().unwrap();
    let mut present = connect(&daemon, "data");
    let (first, second) = (pattern(1 << 20, 1), pattern(1 << 20, 2));
    present.write(0, &first, false).unwrap();
    daemon.ok(&["snapshot", "data=taken"]);
    assert_eq!(daemon.ok(&["rename", "data", "archive"]), "data: is archive now\n");
    assert_eq!(daemon.ok(&["rename", "data", "archive"]), "archive: has that name already\n");
    assert_eq!(daemon.json(&["rename", "taken", "kept"])["changed"], true);
    present.write(1 << 20, &second, false).unwrap();
    present.flush().unwrap();
    let refused = Client::connect(&former, &ConnectOptions::default());
    assert!(refused.is_err(), "connected by the former name");
    let same = |client: &mut Client| {
        let mut read = vec![0; 2 << 20];
        client.read(0, &mut read).unwrap();
        assert!(read[..1 << 20] == first && read[1 << 20..] == second);
    };
    same(&mut connect(&daemon, "archive"));
    let shown = daemon.json(&["show", "archive"]);
    assert_eq!(
        (&shown["snapshots"], &shown["volume"]["attached"]),
        (&json!(["kept"]), &true.into())
    );
    // Another one has the former name, and a name that is taken is refused.
    daemon.ok(&["add", "--nbd", "--size", "1M", "data"]);
    let (code, error) = daemon.failure(&["rename", "data", "archive"]);
    assert!(code == 7 && error.starts_with("volume archive exists"), "{code} {error}");
    let (code, error) = daemon.failure(&["rename", "none", "other"]);
    assert!(code == 4 && error.contains("none"), "{code} {error}");
    let all = ["archive", "data", "kept"].map(Value::from);
    assert_eq!(names(&daemon), all);
    drop(present);
    for is_killed in [true, false] {
        if is_killed {
            daemon.kill();
        } else {
            assert!(daemon.terminate().success());
        }
        daemon.start_again();
        assert_eq!(names(&daemon), all);
        same(&mut connect(&daemon, "archive"));
    }
}
