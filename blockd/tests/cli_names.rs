//! Names of volumes on the command line: other names, and names with their pools.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use blockd_nbd::client::{Client, ConnectOptions};
use cli_support::{Daemon, connect, pattern};
use serde_json::{Value, json};

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
    assert_eq!(daemon.ok(&["rename", "data", "archive"]), "archive: unchanged, it has this name\n");
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

/// A daemon with the pools `default`, `fast` and `slow`.
fn with_pools() -> Daemon {
    let daemon = Daemon::start("256M");
    for pool in ["fast", "slow"] {
        daemon.ok(&["pool", "create", pool, "--memory", "--size", "64M"]);
    }
    daemon
}

#[test]
fn every_verb_takes_a_volume_with_its_pool() {
    let daemon = with_pools();
    daemon.ok(&["add", "--nbd", "--size", "8M", "fast/data"]);
    daemon.ok(&["add", "--nbd", "--size", "4M", "data"]);
    let size = |name: &str| daemon.json(&["show", name])["volume"]["size_bytes"].clone();
    assert_eq!([size("fast/data"), size("/data"), size("data")], [8 << 20, 4 << 20, 4 << 20]);
    let verbs: [&[&str]; 15] = [
        &["resize", "fast/data", "--size", "16M"],
        &["set", "fast/data", "--iops", "100"],
        &["snapshot", "fast/data=taken"],
        &["snapshot", "fast/data", "--tag", "monday"],
        &["clone", "fast/taken", "copy"],
        &["diff", "fast/data", "--since", "taken"],
        &["diff", "fast/data", "--since", "fast/taken"],
        &["space", "fast/data", "taken"],
        &["export", "fast/taken", "image"],
        &["import", "image", "fast/read"],
        &["detach", "fast/data"],
        &["rollback", "fast/data", "fast/taken"],
        &["attach", "--nbd", "fast/data"],
        &["rename", "fast/taken", "fast/kept"],
        &["del", "fast/read"],
    ];
    for words in verbs {
        daemon.ok(words);
    }
    let list = daemon.json(&["list", "--pool", "fast"]);
    let names: Vec<_> =
        list["volumes"].as_array().unwrap().iter().map(|one| &one["name"]).collect();
    assert_eq!(names, ["copy", "data", "data@monday", "kept"]);
    assert_eq!(size("data"), 4 << 20, "of the default pool");
    for (words, problem) in [
        (["rename", "fast/copy", "slow/copy"], "volume is slow/copy: must be in pool fast"),
        (["diff", "data", "--since=fast/kept"], "volume is fast/kept: must be in the pool of"),
        (["show", "fast/data", "--pool=slow"], "volume is fast/data: must be in pool slow"),
    ] {
        let (code, error) = daemon.failure(&words);
        assert!(code == 3 && error.starts_with(problem), "{words:?}: {code} {error}");
    }
}

#[test]
fn a_volume_that_is_not_there_is_said_to_be_in_other_pools() {
    let daemon = with_pools();
    daemon.ok(&["add", "--nbd", "--size", "4M", "fast/data"]);
    let missing = |name: &str| daemon.failure(&["show", name]);
    let one = "volume data does not exist; pool fast has a volume of this name: use fast/data";
    for name in ["data", "slow/data"] {
        assert_eq!(missing(name), (4, one.to_owned()), "{name}");
    }
    daemon.ok(&["add", "--nbd", "--size", "4M", "slow/data"]);
    let (code, error) = missing("data");
    assert!(
        code == 4 && error.contains("2 pools have a volume of this name (fast, slow)"),
        "{error}"
    );
    assert_eq!(missing("none"), (4, "volume none does not exist".to_owned()));
}

#[test]
fn a_list_has_the_columns_and_the_order_that_are_asked_for() {
    let daemon = with_pools();
    for (name, size) in [("a", "4M"), ("b", "16M"), ("fast/c", "8M")] {
        daemon.ok(&["add", "--nbd", "--size", size, "--quota", size, name]);
    }
    let rows = |words: &[&str]| {
        let text = daemon.ok(&[&["list"], words].concat());
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        text.lines().map(words).collect::<Vec<_>>()
    };
    let found = rows(&["--columns", "name,size,quota", "--sort", "size", "--bytes"]);
    let sizes = [16, 8, 4].map(|mib: u64| mib << 20);
    let expected = ["b", "c", "a"].into_iter().zip(sizes);
    let expected: Vec<_> = expected.map(|(name, size)| format!("{name} {size} {size}")).collect();
    assert_eq!((found[0].as_str(), &found[1..]), ("NAME SIZE QUOTA", &expected[..]));
    assert_eq!(rows(&["--columns", "pool,name"])[1..], ["default a", "default b", "fast c"]);
    assert!(rows(&[])[0].starts_with("NAME POOL SIZE MAPPED STATE FROM CONN WHERE"));
    let json = daemon.json(&["list", "--sort", "size", "--columns", "name"]);
    let json = json["volumes"].as_array().unwrap();
    assert_eq!(json.iter().map(|one| &one["name"]).collect::<Vec<_>>(), ["b", "c", "a"]);
    assert!(json[0]["exclusive_bytes"].is_u64() && json[0]["settings"].is_object(), "{json:?}");
    for (words, problem) in [
        (["--sort", "colour"], "sort is colour: must be one of name, pool, size, "),
        (["--columns", "name,colour"], "columns is colour: must be one of name, pool, size, "),
    ] {
        let (code, error) = daemon.failure(&[&["list"], &words[..]].concat());
        assert!(code == 3 && error.starts_with(problem), "{words:?}: {code} {error}");
    }
}
