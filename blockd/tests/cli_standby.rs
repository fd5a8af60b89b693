//! Volumes on standby: two daemons of one machine share a folder of cells, and clients of both go
//! on while a cell goes to and fro.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use blockd_nbd::client::{Client, ConnectOptions};
use blockd_testkit::tools::free_port;
use cli_support::{Daemon, LIMIT, pattern, wait_until};
use rcgen::{CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::{Value, json};

const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;

/// How long a cell stays at least where it was fetched.
const LEAST_STAY: Duration = Duration::from_secs(2);

/// The daemon with this number, in the same folder as the others.
fn daemon(folder: &Path, host: u32, more: &str) -> Daemon {
    let port = free_port().unwrap();
    let config = format!(
        "[node]\nid = \"4f2b8c1d-0e4a-4d5b-9c6f-7a8b9c0d1e2{host}\"\n\
         [hosts]\nlisten = \"127.0.0.1:{port}\"\n{more}"
    );
    let daemon = Daemon::start_with("64M", &config);
    let (folder, host) = (folder.display().to_string(), host.to_string());
    daemon.ok(&["vg", "add", "--folder", &folder, "--host", &host, "local"]);
    daemon
}

/// Two daemons, with cell `one` open on the first one and its volume `data` attached there.
fn prepared(folder: &Path, more: &str) -> [Daemon; 2] {
    let hosts = [1, 2].map(|host| daemon(folder, host, more));
    hosts[0].ok(&["cell", "create", "--size", "64M", "local/one"]);
    hosts[0].ok(&["add", "data", "--pool", "one", "--size", "64M", "--nbd"]);
    hosts
}

/// Cells are on disk, as their pools need O_DIRECT.
fn shared() -> blockd_testkit::folder::Folder {
    blockd_testkit::folder::Folder::below(Path::new(env!("CARGO_TARGET_TMPDIR")), "cells").unwrap()
}

fn connect(place: &str) -> Client {
    let options = ConnectOptions { timeout: 10 * LIMIT, ..ConnectOptions::default() };
    Client::connect(&place.parse().unwrap(), &options).unwrap()
}

fn place(attached: &Value) -> String {
    attached["where"].as_str().unwrap().to_owned()
}

fn state(daemon: &Daemon) -> (String, Value) {
    let cell = &daemon.json(&["cell", "list"])["cells"][0];
    (cell["state"].as_str().unwrap().to_owned(), cell["standby"].clone())
}

#[test]
fn a_client_on_standby_fetches_the_cell_and_the_former_one_waits_for_it() {
    let folder = shared();
    let hosts = prepared(folder.path(), "");
    let data = pattern(MIB, 5);
    let first = hosts[0].json(&["attach", "--nbd", "data", "--pool", "one"]);
    let mut here = connect(&place(&first));
    here.write(0, &data, false).unwrap();
    // Not flushed: a hand-over is no loss of power.
    let standby = hosts[1].json(&["cell", "standby", "--nbd", "local/one", "data"]);
    assert_eq!(standby["changed"], true);
    let again = hosts[1].json(&["cell", "standby", "--nbd", "local/one", "data"]);
    assert_eq!((&again["changed"], place(&again)), (&json!(false), place(&standby)));
    assert_eq!(state(&hosts[1]), ("elsewhere".to_owned(), json!(["data"])));
    // The size is known before the cell is here.
    let mut there = connect(&place(&standby));
    assert_eq!(there.size(), 64 << 20);
    assert_eq!(state(&hosts[0]), ("open".to_owned(), json!([])));
    let mut read = vec![0; MIB];
    there.read(0, &mut read).unwrap();
    assert!(read == data, "read something else on the other host");
    assert_eq!(state(&hosts[0]), ("elsewhere".to_owned(), json!(["data"])));
    assert_eq!(state(&hosts[1]), ("open".to_owned(), json!([])));
    let changed = pattern(MIB, 6);
    there.write(0, &changed, false).unwrap();
    // And back, over the connection that was there all the while.
    here.read(0, &mut read).unwrap();
    assert!(read == changed, "read something else on the first host");
    assert_eq!(state(&hosts[0]).0, "open");
    let handed = hosts[1].json(&["cell", "handover", "local/one"]);
    assert_eq!((&handed["changed"], &handed["former_host"]), (&json!(true), &json!(1)));
    there.read(0, &mut read).unwrap();
    assert!(read == changed);
}

#[test]
fn a_writer_loses_nothing_while_its_cell_goes_to_and_fro() {
    let folder = shared();
    let hosts = prepared(folder.path(), "");
    let first = place(&hosts[0].json(&["attach", "--nbd", "data", "--pool", "one"]));
    let second = place(&hosts[1].json(&["cell", "standby", "--nbd", "local/one", "data"]));
    let (stop, written) = (AtomicBool::new(false), AtomicUsize::new(0));
    let blocks = 8 * MIB / BLOCK;
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut client = connect(&first);
            let mut read = vec![0; BLOCK];
            for round in 0usize.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let at = (round * 7919 % blocks * BLOCK) as u64;
                let data = pattern(BLOCK, round as u64);
                client.write(at, &data, false).unwrap();
                client.read(at, &mut read).unwrap();
                assert!(read == data, "round {round}");
                written.fetch_add(1, Ordering::Relaxed);
            }
        });
        // The other host has it for a moment each time; the writer fetches it back.
        for _ in 0..4 {
            let before = written.load(Ordering::Relaxed);
            wait_until("the writer goes on", || written.load(Ordering::Relaxed) > before + 20);
            let handed = hosts[1].run(&["cell", "handover", "local/one"]);
            if !handed.status.success() {
                stop.store(true, Ordering::Relaxed);
                panic!("{handed:?}\n{}", hosts[0].log());
            }
        }
        let before = written.load(Ordering::Relaxed);
        wait_until("the writer goes on", || written.load(Ordering::Relaxed) > before);
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap();
    });
    let rounds = written.load(Ordering::Relaxed);
    let mut client = connect(&second);
    let mut read = vec![0; BLOCK];
    for block in 0..blocks {
        // The last round that wrote this block.
        let Some(round) = (0..rounds).rev().find(|round| round * 7919 % blocks == block) else {
            continue;
        };
        client.read((block * BLOCK) as u64, &mut read).unwrap();
        assert!(read == pattern(BLOCK, round as u64), "block {block} of round {round}");
    }
}

#[test]
fn standby_outlives_both_daemons_and_a_host_that_does_not_answer_keeps_its_cell() {
    let folder = shared();
    let mut hosts = prepared(folder.path(), "");
    let data = pattern(MIB, 8);
    let first = place(&hosts[0].json(&["attach", "--nbd", "data", "--pool", "one"]));
    connect(&first).write(0, &data, true).unwrap();
    let second = place(&hosts[1].json(&["cell", "standby", "--nbd", "local/one", "data"]));
    hosts[1].kill();
    hosts[1].start_again();
    hosts[0].kill();
    let mut client = connect(&second);
    let events = |daemon: &Daemon| daemon.log().matches("clients wait for cell one").count();
    let mut read = vec![0; MIB];
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| client.read(0, &mut read).unwrap());
        wait_until("it is said that clients wait", || events(&hosts[1]) > 0);
        let (_, problem) = hosts[1].failure(&["cell", "handover", "local/one"]);
        assert!(problem.contains("host 1 of volume group local does not answer"), "{problem}");
        hosts[0].start_again();
        reader.join().unwrap();
    });
    assert!(read == data);
    let detached = hosts[0].json(&["detach", "data", "--pool", "one"]);
    assert_eq!((&detached["changed"], &detached["volume"]), (&json!(true), &Value::Null));
    assert_eq!(state(&hosts[0]), ("elsewhere".to_owned(), json!([])));
}

#[test]
fn a_volume_on_standby_with_a_connection_is_detached_by_force_alone() {
    let folder = shared();
    let hosts = prepared(folder.path(), "");
    let first = place(&hosts[0].json(&["attach", "--nbd", "data", "--pool", "one"]));
    let client = connect(&first);
    hosts[1].ok(&["cell", "handover", "local/one"]);
    let (_, problem) = hosts[0].failure(&["detach", "data", "--pool", "one"]);
    assert!(problem.contains("has 1 connection"), "{problem}");
    hosts[0].ok(&["detach", "data", "--pool", "one", "--force"]);
    drop(client);
}

#[test]
fn a_cell_that_came_back_is_served_after_a_restart_and_by_its_new_names() {
    let folder = shared();
    let mut hosts = prepared(folder.path(), "");
    let data = pattern(MIB, 9);
    let first = place(&hosts[0].json(&["attach", "--nbd", "data", "--pool", "one"]));
    connect(&first).write(0, &data, true).unwrap();
    hosts[1].ok(&["cell", "standby", "--nbd", "local/one", "data"]);
    hosts[1].ok(&["cell", "handover", "local/one"]);
    hosts[1].ok(&["resize", "one/data", "--size", "96M"]);
    hosts[1].ok(&["rename", "one/data", "other"]);
    hosts[0].ok(&["cell", "handover", "local/one"]);
    let holds = |daemon: &Daemon| {
        let mut client = cli_support::connect(daemon, "one/other");
        let mut read = vec![0; MIB];
        client.read(0, &mut read).unwrap();
        assert!(read == data);
        assert_eq!(client.size(), 96 << 20);
    };
    holds(&hosts[0]);
    hosts[0].kill();
    hosts[0].start_again();
    holds(&hosts[0]);
    hosts[0].ok(&["pool", "close", "--force", "one"]);
    hosts[0].ok(&["pool", "open", "one"]);
    holds(&hosts[0]);
}

#[test]
fn a_client_that_leaves_fetches_no_cell() {
    let folder = shared();
    let hosts = prepared(folder.path(), "");
    let first = place(&hosts[0].json(&["attach", "--nbd", "data", "--pool", "one"]));
    let second = place(&hosts[1].json(&["cell", "standby", "--nbd", "local/one", "data"]));
    // One that waits for its handshake's end only, and one that rests at a worker.
    connect(&second).disconnect().unwrap();
    let mut rests = connect(&first);
    rests.write(0, &pattern(BLOCK, 1), false).unwrap();
    let mut there = connect(&second);
    there.read(0, &mut vec![0; BLOCK]).unwrap();
    rests.disconnect().unwrap();
    // Another request shows that both daemons had the time to see it.
    for _ in 0..50 {
        there.read(0, &mut vec![0; BLOCK]).unwrap();
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(state(&hosts[1]).0, "open");
    assert!(!hosts[1].log().contains("was handed over"), "{}", hosts[1].log());
}

/// The host that has the cell does not answer, so that the cell never comes.
#[test]
fn a_client_that_leaves_while_it_waits_for_its_cell_makes_room_for_another() {
    let folder = shared();
    let mut hosts = prepared(folder.path(), "[nbd]\nmax_connections = 1\n");
    let second = place(&hosts[1].json(&["cell", "standby", "--nbd", "local/one", "data"]));
    hosts[0].kill();
    let uri = second.parse().unwrap();
    let options = ConnectOptions { timeout: Duration::from_secs(3), ..ConnectOptions::default() };
    let mut waits = Client::connect(&uri, &options).unwrap();
    waits.read(0, &mut vec![0; BLOCK]).unwrap_err();
    Client::connect(&uri, &options).unwrap_err();
    drop(waits);
    wait_until("there is room", || Client::connect(&uri, &options).is_ok());
}

#[test]
fn a_flush_on_standby_is_answered_without_the_cell() {
    let folder = shared();
    let hosts = prepared(folder.path(), "");
    let first = place(&hosts[0].json(&["attach", "--nbd", "data", "--pool", "one"]));
    let mut here = connect(&first);
    let data = pattern(MIB, 7);
    here.write(0, &data, false).unwrap();
    hosts[1].ok(&["cell", "standby", "--nbd", "local/one", "data"]);
    // As QEMU does when it ends after a migration, while the cell is handed over and later: all
    // that was answered is durable.
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let flushes = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                here.flush().unwrap();
            }
            here.flush().unwrap();
        });
        hosts[1].ok(&["cell", "handover", "local/one"]);
        is_over.store(true, Ordering::Relaxed);
        flushes.join().unwrap();
    });
    // A flush that had asked for the cell would have it after the time that it stays, here and
    // there.
    std::thread::sleep(2 * LEAST_STAY + Duration::from_secs(1));
    here.flush().unwrap();
    assert_eq!(state(&hosts[1]).0, "open");
    assert!(!hosts[1].log().contains("was handed over"), "{}", hosts[1].log());
    // A request behind a flush waits, and fetches the cell.
    let mut read = vec![0; MIB];
    here.read(0, &mut read).unwrap();
    assert!(read == data);
    here.write(0, &pattern(BLOCK, 1), false).unwrap();
    here.flush().unwrap();
    assert_eq!(state(&hosts[0]).0, "open");
}

#[test]
fn a_volume_or_cell_that_is_gone_is_on_standby_no_more() {
    let folder = shared();
    let hosts = prepared(folder.path(), "");
    hosts[0].ok(&["add", "kept", "--pool", "one", "--size", "8M", "--nbd"]);
    let second = place(&hosts[1].json(&["cell", "standby", "--nbd", "local/one", "data"]));
    hosts[1].ok(&["cell", "standby", "--nbd", "local/one", "kept"]);
    hosts[0].ok(&["del", "--force", "--yes", "data", "--pool", "one"]);
    hosts[1].ok(&["cell", "handover", "local/one"]);
    let options = ConnectOptions::default();
    Client::connect(&second.parse().unwrap(), &options).unwrap_err();
    // The rest of the cell can still be handed over.
    hosts[0].ok(&["cell", "handover", "local/one"]);
    assert_eq!(state(&hosts[1]), ("elsewhere".to_owned(), json!(["kept"])));
    let (_, problem) = hosts[0].failure(&["pool", "rename", "one", "other"]);
    assert!(problem.contains("has the same name on all hosts"), "{problem}");
    let mut client = connect(&second.replace("data", "kept"));
    hosts[0].ok(&["cell", "delete", "--force", "--yes", "local/one"]);
    client.read(0, &mut vec![0; BLOCK]).unwrap_err();
    wait_until("the attachment is gone", || hosts[1].log().contains("on standby no more"));
}

#[test]
fn mistakes_change_nothing() {
    let folder = shared();
    let hosts = prepared(folder.path(), "");
    hosts[0].ok(&["cell", "create", "--size", "64M", "local/two"]);
    hosts[0].ok(&["cell", "release", "local/two"]);
    for (arguments, problem) in [
        (["cell", "standby", "local/two", "data"].as_slice(), "cell two is open on no host"),
        (&["cell", "standby", "local/one", "none"], "volume none does not exist"),
        (&["cell", "standby", "local/none", "data"], "cell none does not exist"),
        (&["cell", "handover", "local/none"], "cell none does not exist"),
        (&["vg", "add", "--folder", "/tmp", "--host", "2001", "other"], "from 1 to 2000"),
    ] {
        let (_, found) = hosts[1].failure(arguments);
        assert!(found.contains(problem), "{arguments:?}: {found}");
    }
    assert_eq!(state(&hosts[1]), ("elsewhere".to_owned(), json!([])));
    let (_, problem) = hosts[1].failure(&[
        "vg",
        "add",
        "--folder",
        &folder.path().display().to_string(),
        "--host",
        "3",
        "local",
    ]);
    assert!(problem.contains("exists with host 2"), "{problem}");
}

/// Certificates of two hosts and a stranger, each of its own authority or of the hosts'.
fn certificates(folder: &Path) {
    let authority = |name: &str| {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        fs::write(folder.join(name), issuer.pem()).unwrap();
        issuer
    };
    let (hosts, other) = (authority("ca.pem"), authority("other-ca.pem"));
    for (name, issuer) in [("host", &hosts), ("stranger", &other)] {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, issuer).unwrap();
        fs::write(folder.join(format!("{name}.pem")), certificate.pem()).unwrap();
        fs::write(folder.join(format!("{name}.key")), key.serialize_pem()).unwrap();
    }
}

/// The keys of `[hosts]` for the certificate with this name.
fn tls(folder: &Path, name: &str) -> String {
    let file = |name: String| folder.join(name);
    format!(
        "certificate = {:?}\nkey = {:?}\nca = {:?}\n",
        file(format!("{name}.pem")),
        file(format!("{name}.key")),
        file("ca.pem".to_owned()),
    )
}

#[test]
fn a_host_without_a_certificate_of_the_authority_gets_no_cell() {
    let folder = shared();
    certificates(folder.path());
    let hosts = prepared(folder.path(), &tls(folder.path(), "host"));
    for more in [tls(folder.path(), "stranger"), String::new()] {
        let stranger = daemon(folder.path(), 3, &more);
        let (_, problem) = stranger.failure(&["cell", "handover", "local/one"]);
        assert!(problem.contains("does not answer"), "{problem}");
        assert_eq!(state(&hosts[0]).0, "open");
    }
    let handed = hosts[1].json(&["cell", "handover", "local/one"]);
    assert_eq!(handed["former_host"], 1);
}

#[test]
fn clients_wait_while_a_file_is_missing_that_the_fetch_of_their_cell_needs() {
    let folder = shared();
    certificates(folder.path());
    let hosts = prepared(folder.path(), &tls(folder.path(), "host"));
    let data = pattern(MIB, 11);
    let first = place(&hosts[0].json(&["attach", "--nbd", "data", "--pool", "one"]));
    connect(&first).write(0, &data, true).unwrap();
    let second = place(&hosts[1].json(&["cell", "standby", "--nbd", "local/one", "data"]));
    // As while certificates are renewed.
    let (key, away) = (folder.path().join("host.key"), folder.path().join("away"));
    fs::rename(&key, &away).unwrap();
    let mut client = connect(&second);
    let mut read = vec![0; MIB];
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| client.read(0, &mut read));
        let problem = format!("clients wait for cell one: read {}", key.display());
        wait_until("it is said that clients wait", || {
            reader.is_finished() || hosts[1].log().contains(&problem)
        });
        let before = state(&hosts[1]);
        fs::rename(&away, &key).unwrap();
        reader.join().unwrap().unwrap();
        assert_eq!(before, ("elsewhere".to_owned(), json!(["data"])));
    });
    assert!(read == data);
}

/// As after a boot where it is mounted late, or with a lazy `umount` meanwhile.
#[test]
fn clients_wait_while_the_file_system_of_their_group_is_not_mounted() {
    for is_started_before in [false, true] {
        let folder = shared();
        let mut hosts = prepared(folder.path(), "");
        let data = pattern(MIB, 12);
        let first = place(&hosts[0].json(&["attach", "--nbd", "data", "--pool", "one"]));
        connect(&first).write(0, &data, true).unwrap();
        let second = place(&hosts[1].json(&["cell", "standby", "--nbd", "local/one", "data"]));
        hosts[1].terminate();
        if is_started_before {
            hosts[1].start_again();
        }
        let away = folder.path().with_extension("away");
        fs::rename(folder.path(), &away).unwrap();
        fs::create_dir(folder.path()).unwrap();
        if !is_started_before {
            hosts[1].start_again();
        }
        let mut client = connect(&second);
        let mut read = vec![0; MIB];
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| client.read(0, &mut read));
            wait_until("it is said that clients wait", || {
                reader.is_finished() || hosts[1].log().contains("clients wait for cell one: ")
            });
            let is_empty = fs::read_dir(folder.path()).unwrap().next().is_none();
            fs::remove_dir_all(folder.path()).unwrap();
            fs::rename(&away, folder.path()).unwrap();
            reader.join().unwrap().unwrap();
            assert!(is_empty, "a file was made in the place of the file system");
        });
        assert!(read == data);
    }
}

/// As after a boot: neither the pool nor its attachment is forgotten, and both come back by
/// themselves.
#[test]
fn a_cell_is_kept_by_a_daemon_that_starts_before_its_file_system_is_mounted() {
    let folder = shared();
    let mut hosts = prepared(folder.path(), "");
    let data = pattern(MIB, 12);
    let first = place(&hosts[0].json(&["attach", "--nbd", "data", "--pool", "one"]));
    connect(&first).write(0, &data, true).unwrap();
    let away = folder.path().with_extension("away");
    let unmount = || {
        fs::rename(folder.path(), &away).unwrap();
        fs::create_dir(folder.path()).unwrap();
    };
    let mount = || {
        let is_empty = fs::read_dir(folder.path()).unwrap().next().is_none();
        assert!(is_empty, "a file was made in the place of the file system");
        fs::remove_dir(folder.path()).unwrap();
        fs::rename(&away, folder.path()).unwrap();
    };
    // A daemon that runs does not take it for a group without cells either.
    unmount();
    let (_, error) = hosts[0].failure(&["cell", "delete", "local/one"]);
    assert!(error.contains("does not have the group's files"), "{error}");
    let groups = hosts[0].json(&["vg", "list"]);
    assert!(groups.to_string().contains("does not have the group's files"), "{groups}");
    mount();
    hosts[0].terminate();
    unmount();
    hosts[0].start_not_ready();
    let (_, error) = hosts[0].failure(&["cell", "delete", "local/one"]);
    assert!(error.contains("does not have the group's files"), "{error}");
    mount();
    wait_until("the volume can be shown again", || {
        hosts[0].run(&["show", "data", "--pool", "one"]).status.success()
    });
    let mut read = vec![0; MIB];
    connect(&first).read(0, &mut read).unwrap();
    assert!(read == data);
}
