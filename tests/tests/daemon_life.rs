//! The start and end of daemons beside others: ends in order, is replaced, runs out of space below.
#![allow(clippy::unwrap_used, reason = "test code")]

use std::io::Read as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockd_testkit::daemon::{Daemon, Settings};
use blockd_testkit::disk::Small;
use blockd_testkit::tools::{self, shell, wait_until};
use blockd_tests::kill::load::{Control, Load, Shared, compare};
use blockd_tests::kill::volume::Volume;
use blockd_tests::kill::{self, Options};

const MIB: u64 = 1 << 20;
/// The exit code for a pool in use, by `blockd help`.
const IN_USE: i32 = 7;

#[test]
fn an_orderly_end_under_load_loses_nothing() {
    let options = Options {
        rounds: 4,
        seed: 11,
        device: None,
        in_memory: false,
        pool_size: 512 * MIB,
        volumes: 2,
        volume_size: 24 * MIB,
        connections: 2,
        longest_ms: 300,
        in_order: Some(true),
        moves: false,
    };
    let (figures, result) = kill::run(&options, |_| {});
    result.unwrap();
    assert_eq!((figures.stops, figures.lost), (4, 0), "{figures:?}");
    assert!(figures.operations > 100, "{figures:?}");
}

#[test]
fn a_second_daemon_on_a_pool_is_refused_and_takes_over() {
    let mut first = Daemon::new("first", &Settings::default()).unwrap();
    first.start().unwrap();
    first.add("data", 8 * MIB).unwrap();
    first.connect("data").unwrap().write(0, &[7; 4096]).unwrap();
    let settings = Settings {
        pool: Some(first.pool().to_path_buf()),
        // The kernel lets go of a killed process's files some time after it is gone.
        pool_lines: "lock_wait = \"4s\"\n".to_owned(),
        ..Settings::default()
    };
    let mut second = Daemon::new("second", &settings).unwrap();
    second.spawn().unwrap();
    let status = second.wait(Duration::from_secs(20)).unwrap();
    assert_eq!(status.code(), Some(IN_USE), "{}", second.log());
    let log = second.log();
    let errors: Vec<&str> =
        log.lines().filter(|line| line.starts_with("blockd: error: ")).collect();
    assert!(errors.len() == 1 && errors[0].contains("pool default is locked"), "{log}");
    // The first one is not affected.
    assert_eq!(first.connect("data").unwrap().read(0, 4096).unwrap(), [7; 4096]);

    // The second has no delta ring of the pool: its runtime folder is another one.
    first.connect("data").unwrap().flush().unwrap();
    first.kill().unwrap();
    second.start().unwrap();
    let refused = second.cli(&["pool", "open", "default"]).unwrap_err().to_string();
    assert!(refused.contains("delta ring is missing"), "{refused}");
    second.kill().unwrap();
    std::fs::remove_dir_all(second.runtime()).unwrap();
    std::fs::rename(first.runtime(), second.runtime()).unwrap();
    second.start().unwrap();
    second.cli(&["attach", "data"]).unwrap();
    assert_eq!(second.connect("data").unwrap().read(0, 4096).unwrap(), [7; 4096]);
    assert_eq!(second.stop().unwrap().code(), Some(0));
}

#[test]
fn a_second_daemon_waits_for_the_first_to_be_gone() {
    let mut first = Daemon::new("waited", &Settings::default()).unwrap();
    first.start().unwrap();
    let settings = Settings { pool: Some(first.pool().to_path_buf()), ..Settings::default() };
    let mut second = Daemon::new("waiting", &settings).unwrap();
    second.spawn().unwrap();
    std::thread::sleep(Duration::from_millis(400));
    assert!(second.pid().is_some());
    assert_eq!(first.stop().unwrap().code(), Some(0));
    second.wait_until_serving(Duration::from_secs(20)).unwrap();
    assert_eq!(second.stop().unwrap().code(), Some(0));
}

#[test]
fn a_hundred_small_volumes_live_in_a_small_pool() {
    let settings = Settings { pool_size: 2 << 30, ..Settings::default() };
    let mut daemon = Daemon::new("hundred", &settings).unwrap();
    daemon.start().unwrap();
    let names: Vec<String> = (0..100).map(|number| format!("small-{number}")).collect();
    for name in &names {
        daemon.add(name, 8 * MIB).unwrap();
    }
    let fill = |name: &str| {
        let seed = name.bytes().map(u64::from).sum::<u64>() * 31 + name.len() as u64;
        let mut data = vec![0; 8 << 20];
        fastrand::Rng::with_seed(seed).fill(&mut data);
        data[..name.len()].copy_from_slice(name.as_bytes());
        data
    };
    for name in &names {
        let mut connection = daemon.connect(name).unwrap();
        assert_eq!(connection.size, 8 * MIB);
        connection.write(0, &fill(name)).unwrap();
    }
    daemon.kill().unwrap();
    daemon.start().unwrap();
    for name in &names {
        let data = daemon.connect(name).unwrap().read(0, 8 << 20).unwrap();
        assert!(data == fill(name), "{name} holds something else");
    }
}

/// A sparse pool that may grow to four times what its file system has.
fn fills_up_and_goes_on(small: &Small, space: u64) {
    let settings = Settings {
        pool: Some(small.path().join("pool")),
        pool_size: 4 * space,
        ..Settings::default()
    };
    let mut daemon = Daemon::new("full", &settings).unwrap();
    daemon.start().unwrap();
    for name in ["calm", "greedy"] {
        daemon.add(name, 2 * space).unwrap();
    }
    // The other volume's space is allocated before the pool is full.
    let calm = Shared::new(Volume::new("calm", 1, 2 * space, 4096));
    daemon.connect("calm").unwrap().write(0, &vec![0; 4 << 20]).unwrap();
    // Something that can be given back later.
    let ballast = small.path().join("ballast");
    let most = space / 2;
    shell(&format!("head -c {most} /dev/zero >{}", ballast.display())).unwrap();
    let greedy = Shared::new(Volume::new("greedy", 2, 2 * space, 4096));
    let control = Arc::new(Control::default());
    let load = Load::start(daemon.connect("greedy").unwrap(), &greedy, &control, 16, 1).unwrap();
    let answered = || control.counts.answered.load(Ordering::Relaxed);
    let stuck = wait_until("the file system to be full", Duration::from_secs(180), || {
        let before = answered();
        std::thread::sleep(Duration::from_millis(700));
        (answered() == before && before > 0).then_some(before)
    })
    .unwrap();
    // Others go on: overwrites and reads of what has its space.
    let mut connection = daemon.connect("calm").unwrap();
    for turn in 1..20_u8 {
        connection.write(u64::from(turn) * 4096, &[turn; 4096]).unwrap();
        assert_eq!(connection.read(u64::from(turn) * 4096, 4096).unwrap(), [turn; 4096]);
    }
    drop(connection);
    drop(calm);
    assert!(daemon.cli(&["list"]).is_ok());
    // A death in this state loses nothing either.
    std::fs::remove_file(&ballast).unwrap();
    wait_until("writes to go on", Duration::from_secs(30), || (answered() > stuck).then_some(()))
        .unwrap();
    daemon.kill().unwrap();
    load.join().unwrap();
    daemon.start().unwrap();
    compare(daemon.connect("greedy").unwrap(), &greedy).unwrap();
    for turn in 1..20_u8 {
        let data = daemon.connect("calm").unwrap().read(u64::from(turn) * 4096, 4096).unwrap();
        assert_eq!(data, [turn; 4096]);
    }
    assert_eq!(daemon.stop().unwrap().code(), Some(0));
}

#[test]
fn a_full_file_system_makes_writes_wait_until_there_is_space() {
    needs_root();
    let small = Small::ext4(96 * MIB).unwrap();
    fills_up_and_goes_on(&small, 96 * MIB);
}

#[test]
fn a_full_tmpfs_makes_writes_wait_until_there_is_space() {
    needs_root();
    let small = Small::tmpfs(96 * MIB).unwrap();
    fills_up_and_goes_on(&small, 96 * MIB);
}

/// Mounts are root's.
fn needs_root() {
    assert!(nix::unistd::geteuid().is_root(), "not run: mounting needs root");
}

#[test]
fn clients_that_reconnect_do_not_notice_a_restart() {
    let mut daemon = Daemon::new("again", &Settings::default()).unwrap();
    daemon.start().unwrap();
    daemon.add("data", 64 * MIB).unwrap();
    let socket = daemon.nbd_socket();
    let mut client = Command::new(tools::find("qemu-io").unwrap());
    client.args(["--image-opts", &reconnecting(&socket)]);
    client.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut client = client.spawn().unwrap();
    let mut stdin = client.stdin.take().unwrap();
    let writer = std::thread::spawn(move || {
        use std::io::Write as _;
        for turn in 1..=200_u32 {
            let at = (turn - 1) * 65536;
            let (pattern, zeroed) = (turn % 250 + 1, at + 4096);
            writeln!(stdin, "write -P {pattern} {at} 16k").unwrap();
            writeln!(stdin, "write -z {zeroed} 4k").unwrap();
            writeln!(stdin, "read -P {pattern} {at} 4k").unwrap();
            writeln!(stdin, "read -P 0 {zeroed} 4k").unwrap();
            // Slower than the client, so that every kill comes before the end of the work.
            std::thread::sleep(Duration::from_millis(5));
        }
        writeln!(stdin, "flush\nquit").unwrap();
    });
    // The option is for a connection that was there once: the first kill waits for an answer.
    let mut answers = client.stdout.take().unwrap();
    let (mut said, mut block) = (Vec::new(), [0; 4096]);
    for kill in 1..=4 {
        while said.len() < kill * 8192 {
            let count = answers.read(&mut block).unwrap();
            assert!(count > 0, "ended: {}", String::from_utf8_lossy(&said));
            said.extend_from_slice(&block[..count]);
        }
        daemon.kill().unwrap();
        daemon.start().unwrap();
    }
    answers.read_to_end(&mut said).unwrap();
    writer.join().unwrap();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(client.wait().unwrap().success() && !said.contains("fail"), "{said}");
    assert!(!said.to_lowercase().contains("error"), "{said}");
    let mut connection = daemon.connect("data").unwrap();
    for turn in 1..=200_u32 {
        let pattern = u8::try_from(turn % 250 + 1).unwrap();
        let data = connection.read(u64::from(turn - 1) * 65536, 16 << 10).unwrap();
        assert!(data[..4096].iter().all(|&byte| byte == pattern), "turn {turn}");
        assert!(data[4096..8192].iter().all(|&byte| byte == 0), "turn {turn}");
        assert!(data[8192..].iter().all(|&byte| byte == pattern), "turn {turn}");
    }
}

fn reconnecting(socket: &Path) -> String {
    format!(
        "driver=nbd,server.type=unix,server.path={},export=data,reconnect-delay=60",
        socket.display()
    )
}
