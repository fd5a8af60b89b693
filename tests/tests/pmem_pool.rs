//! Pools that are mapped as persistent memory is, on tmpfs: any host has that. Tests that need real
//! persistent memory run in a virtual machine (`cargo ci vm pmem`).

#![allow(clippy::unwrap_used, reason = "a test ends where an expectation fails")]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use blockd_testkit::daemon::{Daemon, Settings};
use blockd_testkit::folder::Folder;
use blockd_testkit::nbd::Connection;

const MIB: u64 = 1 << 20;
const BLOCK: usize = 4096;
/// Blocks of a writer.
const BLOCKS: u64 = 256;

/// A daemon whose pool is a mapped file on tmpfs.
fn daemon(name: &str, lines: &str) -> (Folder, Daemon) {
    let folder = Folder::below(Path::new("/dev/shm"), name).unwrap();
    let settings = settings(&folder, lines);
    (folder, Daemon::new(name, &settings).unwrap())
}

fn settings(folder: &Folder, lines: &str) -> Settings {
    Settings {
        pool: Some(folder.path().join("pool")),
        pool_size: 160 * MIB,
        pool_lines: format!("kind = \"pmem\"\n{lines}"),
        ..Settings::default()
    }
}

/// The content of a block after a write: no two writes leave the same in any word.
fn content(block: u64, number: u64) -> Vec<u8> {
    let word = |at: u64| (block << 48 | number << 16 | at).to_le_bytes();
    (0..BLOCK as u64 / 8).flat_map(word).collect()
}

/// Writes blocks until the daemon is gone. Gives the number of the last answered write of each, and
/// the one that was not answered.
fn write_until_killed(mut connection: Connection, seed: u64) -> (Vec<u64>, (u64, u64)) {
    let mut answered = vec![0; usize::try_from(BLOCKS).unwrap()];
    let mut random = fastrand::Rng::with_seed(seed);
    for number in 1.. {
        let block = random.u64(..BLOCKS);
        let data = content(block, number);
        if connection.write(block * BLOCK as u64, &data).is_err() {
            return (answered, (block, number));
        }
        answered[usize::try_from(block).unwrap()] = number;
    }
    unreachable!("numbers end first")
}

/// Row: P24.
#[test]
fn no_block_is_torn_and_none_lost_when_the_daemon_is_killed() {
    let (_folder, mut daemon) = daemon("pmem-kill", "");
    daemon.start().unwrap();
    let volumes = ["a", "b"];
    for volume in volumes {
        daemon.add(volume, 8 * MIB).unwrap();
    }
    let mut first = daemon.connect("a").unwrap();
    let old = content(9, 9).repeat(64);
    first.write(4 * MIB, &old).unwrap();
    daemon.cli(&["snapshot", "a=before"]).unwrap();
    first.write(4 * MIB, &content(8, 8)).unwrap();
    drop(first);
    for round in 0..3 {
        let writers: Vec<_> = volumes
            .iter()
            .zip(1..)
            .map(|(volume, seed)| {
                let connection = daemon.connect(volume).unwrap();
                std::thread::spawn(move || write_until_killed(connection, round * 10 + seed))
            })
            .collect();
        std::thread::sleep(Duration::from_millis(150));
        daemon.kill().unwrap();
        daemon.start().unwrap();
        for (volume, writer) in volumes.iter().zip(writers) {
            let (answered, (in_flight, number)) = writer.join().unwrap();
            assert!(answered.iter().any(|&number| number > 0));
            let mut connection = daemon.connect(volume).unwrap();
            for (block, &last) in (0..).zip(&answered) {
                let found = connection.read(block * BLOCK as u64, BLOCK).unwrap();
                let is_new = block == in_flight && found == content(block, number);
                assert!(is_new || last == 0 || found == content(block, last), "{volume} {block}");
            }
        }
    }
    let mut a = daemon.connect("a").unwrap();
    assert_eq!(a.read(4 * MIB, BLOCK).unwrap(), content(8, 8));
    daemon.cli(&["attach", "--nbd", "before"]).unwrap();
    assert_eq!(daemon.connect("before").unwrap().read(4 * MIB, old.len()).unwrap(), old);
    assert!(daemon.stop().unwrap().success());
    let pool = daemon.pool().display().to_string();
    for words in [["pool", "check", &pool], ["pool", "dump", &pool]] {
        let output = daemon.cli_output(&words).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Row: P45.
#[test]
fn bytes_of_a_deleted_volume_are_overwritten_also_after_a_kill() {
    let (_folder, mut daemon) = daemon("pmem-erase", "");
    daemon.start().unwrap();
    let secret = content(0x5ec2, 0xe7).repeat(1024);
    let pool = File::open(daemon.pool()).unwrap();
    let holds = || {
        let mut bytes = vec![0; usize::try_from(pool.metadata().unwrap().len()).unwrap()];
        pool.read_exact_at(&mut bytes, 0).unwrap();
        bytes.chunks(BLOCK).filter(|&block| block == &secret[..BLOCK]).count()
    };
    for killed in [false, true] {
        daemon.add("gone", 8 * MIB).unwrap();
        daemon.connect("gone").unwrap().write(0, &secret).unwrap();
        assert!(holds() >= 1024);
        if killed {
            // Nothing is overwritten by this one: it is dead before it comes to that.
            daemon.cli(&["del", "--force", "gone"]).unwrap();
            daemon.kill().unwrap();
            daemon.start().unwrap();
        } else {
            daemon.cli(&["del", "--force", "gone"]).unwrap();
        }
        let erased = (0..1500).any(|_| {
            std::thread::sleep(Duration::from_millis(20));
            holds() == 0
        });
        assert!(erased, "killed: {killed}, {} blocks", holds());
    }
    assert!(daemon.stop().unwrap().success());
}

/// Row: P2.
#[test]
fn space_that_is_free_in_pieces_is_one_volume() {
    let (_folder, mut daemon) = daemon("pmem-pieces", "erase = false\n");
    daemon.start().unwrap();
    let thick = |name: &str, size: u64| {
        let size = size.to_string();
        daemon.cli(&["add", "--thick", "--size", &size, name])
    };
    // Nothing is left between them.
    let mut count = 0;
    while thick(&format!("v{count}"), 8 * MIB).is_ok() {
        count += 1;
    }
    assert!(count > 8, "only {count} volumes");
    for number in (0..count).step_by(2) {
        daemon.cli(&["del", &format!("v{number}")]).unwrap();
    }
    let large = count / 2 * 8 * MIB;
    thick("large", large).unwrap();
    let mut connection = daemon.connect("large").unwrap();
    for at in (0..large).step_by(usize::try_from(MIB).unwrap()) {
        connection.write(at, &content(at / MIB, 1)).unwrap();
    }
    for at in (0..large).step_by(usize::try_from(MIB).unwrap()) {
        assert_eq!(connection.read(at, BLOCK).unwrap(), content(at / MIB, 1));
    }
    assert!(daemon.stop().unwrap().success());
}

#[test]
fn memory_that_is_gone_is_an_error_of_the_request_and_the_daemon_goes_on() {
    let (_folder, mut daemon) = daemon("pmem-gone", "");
    daemon.start().unwrap();
    daemon.add("a", 64 * MIB).unwrap();
    let mut connection = daemon.connect("a").unwrap();
    connection.write(0, &content(1, 1).repeat(2048)).unwrap();
    let pool = File::options().write(true).open(daemon.pool()).unwrap();
    pool.set_len(3 * MIB).unwrap();
    assert!(connection.read(4 * MIB, BLOCK).is_err());
    // It answers, and reports the cause.
    let seen = (0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(100));
        daemon.cli(&["health"]).is_ok_and(|health| health.to_string().contains("shrunk"))
    });
    assert!(seen, "{}", daemon.cli(&["health"]).unwrap());
    daemon.kill().unwrap();
}

/// Row: P11.
#[test]
fn foreign_data_is_not_overwritten() {
    let (folder, mut daemon) = daemon("pmem-foreign", "");
    let pool = folder.path().join("pool");
    let file = File::create(&pool).unwrap();
    file.set_len(160 * MIB).unwrap();
    file.write_all_at(b"other data", MIB + 77).unwrap();
    let error = daemon.start().unwrap_err().to_string();
    assert!(error.contains("holds something that is not a pool"), "{error}");
    let mut found = [0; 10];
    File::open(&pool).unwrap().read_exact_at(&mut found, MIB + 77).unwrap();
    assert_eq!(&found, b"other data");
    let mut front = vec![0; 4096];
    File::open(&pool).unwrap().read_exact_at(&mut front, 0).unwrap();
    assert!(front.iter().all(|&byte| byte == 0));
}

/// Row: P14.
#[test]
fn sizes_are_multiples_of_4_mib_and_limits_are_kept() {
    let (_folder, mut daemon) = daemon("pmem-size", "persistence = \"auto\"\nerase = false\n");
    daemon.start().unwrap();
    for (name, asked, made) in [("one", "512", 4 * MIB), ("two", "4194305", 8 * MIB)] {
        daemon.cli(&["add", "--size", asked, name]).unwrap();
        let shown = daemon.cli(&["show", name]).unwrap();
        assert_eq!(shown["volume"]["size_bytes"], made, "{shown}");
        assert_eq!(shown["volume"]["durability"], "restart-safe");
    }
    let pool = daemon.cli(&["pool", "show"]).unwrap();
    let found = ["minimum_volume_bytes", "volume_step_bytes"].map(|name| &pool["pool"][name]);
    assert_eq!(found, [4 * MIB; 2].map(serde_json::Value::from).each_ref());
    let device = &pool["pool"]["devices"][0];
    assert_eq!((&device["kind"], &device["pmem"]["atomicity"]), (&"pmem".into(), &"block".into()));
    assert_eq!(device["pmem"]["erases"], false);
    assert!(daemon.stop().unwrap().success());
}
