//! The cache of blocks that volumes share: clones of an image that are read at the same time, and
//! volumes whose blocks come to be shared and exclusive again under verification.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::sync::Barrier;
use std::thread;

use blockd_nbd::client::Client;
use cli_support::{Daemon, connect, pattern, wait_until};
use fastrand::Rng;
use serde_json::Value;

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;
/// Readers at the same time.
const CLIENTS: usize = 20;
/// Bytes of the image that they read.
const IMAGE: usize = 32 * MIB;
/// Bytes of a request.
const REQUEST: usize = 128 << 10;

fn cache(daemon: &Daemon) -> Value {
    daemon.json(&["pool", "show"])["pool"]["read_cache"].take()
}

fn number(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap_or_else(|| panic!("{value}"))).unwrap()
}

/// Bytes that the process has read from storage.
fn read_from_storage(daemon: &Daemon) -> usize {
    let io = format!("/proc/{}/io", daemon.process.pid().unwrap());
    let io = std::fs::read_to_string(io).unwrap();
    let line = io.lines().find_map(|line| line.strip_prefix("read_bytes: "));
    line.unwrap().parse().unwrap()
}

/// An image of random bytes, its snapshot `golden`, and clones `vm-1` and so on.
fn clones(daemon: &Daemon, count: usize) -> Vec<u8> {
    let size = format!("{IMAGE}");
    daemon.ok(&["add", "--nbd", "--size", &size, "image"]);
    let bytes = pattern(IMAGE, 1);
    let mut client = connect(daemon, "image");
    for (at, part) in bytes.chunks(MIB).enumerate() {
        client.write((at * MIB) as u64, part, false).unwrap();
    }
    client.flush().unwrap();
    daemon.ok(&["snapshot", "image=golden"]);
    let count = count.to_string();
    daemon.ok(&["clone", "golden", "--count", &count, "--name-template", "vm-{}", "--nbd"]);
    bytes
}

/// Reads a volume from start to end, and compares it.
fn check(client: &mut Client, expected: &[u8]) {
    let mut found = vec![0; REQUEST];
    for (at, part) in expected.chunks(REQUEST).enumerate() {
        client.read((at * REQUEST) as u64, &mut found[..part.len()]).unwrap();
        let differs = part.chunks(PAGE).zip(found.chunks(PAGE)).position(|(a, b)| a != b);
        assert_eq!(differs, None, "a page of request {at} differs");
    }
}

/// All clones are read at the same time, each by a client of its own.
fn boot_storm(daemon: &Daemon, image: &[u8]) {
    let begin = Barrier::new(CLIENTS);
    thread::scope(|scope| {
        for number in 1..=CLIENTS {
            let begin = &begin;
            scope.spawn(move || {
                let mut client = connect(daemon, &format!("vm-{number}"));
                begin.wait();
                check(&mut client, image);
            });
        }
    });
}

#[test]
fn twenty_clones_that_are_read_at_the_same_time_read_their_image_once() {
    let daemon = Daemon::start_with("1G", "read_cache = \"128M\"");
    let image = clones(&daemon, CLIENTS);
    let before = read_from_storage(&daemon);
    boot_storm(&daemon, &image);
    let read = read_from_storage(&daemon) - before;
    let status = cache(&daemon);
    let (hits, misses) = (number(&status["hits"]), number(&status["misses"]));
    assert!(misses >= IMAGE / PAGE, "{status}");
    assert!(misses * PAGE * 10 <= IMAGE * 11, "{status}");
    assert_eq!(hits + misses, CLIENTS * IMAGE / PAGE, "{status}");
    assert_eq!(number(&status["held_bytes"]), IMAGE, "{status}");
    // Where storage is memory, as on tmpfs, the process reads nothing from it.
    assert!(read * 10 <= IMAGE * 11, "{read} bytes were read from storage: {status}");
    // One more, when all is there.
    let before = read_from_storage(&daemon);
    check(&mut connect(&daemon, "vm-1"), &image);
    assert_eq!(number(&cache(&daemon)["misses"]), misses);
    assert!((read_from_storage(&daemon) - before) < IMAGE / 10);
}

#[test]
fn a_cache_is_turned_on_and_off_by_a_reload_and_shown() {
    let metrics = "[metrics]\naddress = \"127.0.0.1:0\"";
    let daemon = Daemon::start_with("1G", &format!("read_cache = 0\n{metrics}"));
    let image = clones(&daemon, 2);
    let configure = |from: &str, to: &str, bytes: usize| {
        let text = std::fs::read_to_string(daemon.config()).unwrap();
        std::fs::write(daemon.config(), text.replace(from, to)).unwrap();
        daemon.hang_up();
        wait_until("the limit is read again", || number(&cache(&daemon)["limit_bytes"]) == bytes);
    };
    check(&mut connect(&daemon, "vm-1"), &image);
    assert_eq!(number(&cache(&daemon)["misses"]), 0);
    assert!(!daemon.ok(&["pool", "show"]).contains("read cache"));
    configure("read_cache = 0", "read_cache = \"64M\"", 64 * MIB);
    let mut client = connect(&daemon, "vm-1");
    check(&mut client, &image);
    check(&mut connect(&daemon, "vm-2"), &image);
    let shown = daemon.ok(&["pool", "show"]);
    let row = "read cache    32 MiB of 64 MiB, 50.0 % hits, 0 evicted, 0 dropped";
    assert!(shown.lines().any(|line| line == row), "{shown}");
    let metrics = daemon.process.metrics().unwrap();
    let pages = IMAGE / PAGE;
    for (name, value) in [
        ("limit_bytes", 64 * MIB),
        ("bytes", IMAGE),
        ("hits_total", pages),
        ("misses_total", pages),
        ("evictions_total", 0),
        ("dropped_total", 0),
    ] {
        let line = format!("blockd_pool_read_cache_{name}{{pool=\"default\"}} {value}");
        assert!(metrics.lines().any(|found| found == line), "{line}\n{metrics}");
    }
    // One that is smaller than the image holds as much as it may.
    configure("\"64M\"", "\"16M\"", 16 * MIB);
    check(&mut client, &image);
    let status = cache(&daemon);
    assert_eq!(number(&status["held_bytes"]), 16 * MIB, "{status}");
    assert_eq!(number(&status["evictions"]), (IMAGE - 16 * MIB) / PAGE, "{status}");
    configure("\"16M\"", "0", 0);
    assert_eq!(number(&cache(&daemon)["held_bytes"]), 0);
    check(&mut client, &image);
}

/// A volume and the bytes that it has to have.
struct Model {
    client: Client,
    bytes: Vec<u8>,
}

impl Model {
    /// One random request, or a comparison of everything.
    fn step(&mut self, random: &mut Rng) {
        let len = PAGE * random.usize(1..=64);
        let at = random.usize(..(self.bytes.len() - len) / 512) * 512;
        let range = at..at + len;
        match random.u8(..10) {
            0..=4 => {
                let mut found = vec![0; len];
                self.client.read(at as u64, &mut found).unwrap();
                assert!(found == self.bytes[range], "{len} bytes at {at} differ");
            }
            5..=7 => {
                let seed = random.u64(..);
                let data = pattern(len, seed);
                self.client.write(at as u64, &data, random.u8(..8) == 0).unwrap();
                self.bytes[range].copy_from_slice(&data);
            }
            8 => {
                let at = at / PAGE * PAGE;
                self.client.trim(at as u64, len as u64).unwrap();
                self.bytes[at..at + len].fill(0);
            }
            _ => self.client.flush().unwrap(),
        }
    }
}

#[test]
fn volumes_keep_their_bytes_while_what_they_share_comes_and_goes() {
    const SIZE: usize = 4 * MIB;
    const VOLUMES: usize = 4;
    let daemon = Daemon::start_with("128M", "read_cache = \"16M\"");
    daemon.ok(&["add", "--nbd", "--size", "4M", "v0"]);
    let bytes = pattern(SIZE, 1);
    connect(&daemon, "v0").write(0, &bytes, true).unwrap();
    daemon.ok(&["snapshot", "v0=golden"]);
    for number in 1..VOLUMES {
        daemon.ok(&["clone", "golden", &format!("v{number}"), "--nbd"]);
    }
    let mut models: Vec<Model> = (0..VOLUMES)
        .map(|at| Model { client: connect(&daemon, &format!("v{at}")), bytes: bytes.clone() })
        .collect();
    for round in 0..12 {
        thread::scope(|scope| {
            for (at, model) in models.iter_mut().enumerate() {
                scope.spawn(move || {
                    let mut random = Rng::with_seed((round * VOLUMES + at) as u64);
                    (0..150).for_each(|_| model.step(&mut random));
                    check(&mut model.client, &model.bytes);
                });
            }
            // Snapshots come and go meanwhile, and with them what is shared.
            for at in 0..VOLUMES {
                daemon.ok(&["snapshot", &format!("v{at}=s{at}")]);
            }
            daemon.ok(&["pool", "fold", "--now"]);
            for at in 0..VOLUMES {
                daemon.ok(&["del", &format!("s{at}")]);
            }
            daemon.ok(&["pool", "fold", "--now"]);
        });
    }
    let status = cache(&daemon);
    for key in ["hits", "misses", "dropped"] {
        assert!(number(&status[key]) > 0, "{key}: {status}");
    }
}
