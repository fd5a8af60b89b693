//! One pool on storage that several paths or hosts reach: at most one daemon has it open.
#![allow(clippy::unwrap_used, reason = "test code")]

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockd_testkit::daemon::{Daemon, Ended, Settings};
use blockd_testkit::disk::Loop;
use blockd_testkit::folder::Folder;
use blockd_testkit::other_host::OtherHost;
use blockd_testkit::tools::wait_until;
use nix::sys::signal::Signal;

const MIB: u64 = 1 << 20;
/// The exit code for a pool in use, by `blockd help`.
const IN_USE: i32 = 7;
/// Byte of the superblock's `compat` bits.
const COMPAT: usize = 16;
/// Byte of the claim page, and what it begins with.
const CLAIM: u64 = 8192;
const CLAIM_MAGIC: &[u8] = b"BLOCKDow";
/// Messages that a daemon logs when it waits for other hosts.
const WAITS: [&str; 2] = ["watching for other hosts", "waiting for the last writes of other hosts"];
/// Longer than storage and a busy machine take.
const LONG: Duration = Duration::from_secs(60);

fn root() {
    assert!(nix::unistd::geteuid().is_root(), "not run: loop devices need root");
}

/// A file for a pool.
fn image(folder: &Folder) -> PathBuf {
    let path = folder.path().join("image");
    File::create(&path).unwrap().set_len(128 * MIB).unwrap();
    path
}

const NODE: &str = "[node]\nid = \"00000001-0000-4000-8000-000000000001\"\n";

fn daemon(name: &str, pool: &Path) -> Daemon {
    daemon_with(name, pool, "lock_wait = \"1s\"\n", NODE)
}

fn daemon_with(name: &str, pool: &Path, pool_lines: &str, tables: &str) -> Daemon {
    let settings = Settings {
        pool: Some(pool.to_path_buf()),
        pool_size: 128 * MIB,
        pool_lines: pool_lines.to_owned(),
        lines: "default_pool = \"default\"\n".to_owned(),
        tables: tables.to_owned(),
        ..Settings::default()
    };
    Daemon::new(name, &settings).unwrap()
}

/// Waits until a daemon serves or has ended; whether it serves.
fn serves(daemon: &mut Daemon) -> bool {
    match daemon.wait_until_serving(LONG) {
        Ok(()) => true,
        Err(error) => {
            let ended = error.downcast::<Ended>().expect("a daemon that neither serves nor ends");
            assert_eq!(ended.status.code(), Some(IN_USE), "{ended}");
            false
        }
    }
}

/// Reads the volume, which holds one of the values, writes another value to all of it, and stops
/// the daemon.
fn check_and_change(daemon: &mut Daemon, possible: &[u8], after: u8) -> anyhow::Result<()> {
    daemon.cli(&["attach", "data"])?;
    let mut connection = daemon.connect("data")?;
    let bytes = connection.read(0, 65_536)?;
    let is_whole = |value: &u8| bytes == vec![*value; 65_536];
    assert!(possible.iter().any(is_whole), "{possible:?}: {:?}", &bytes[..16]);
    connection.write(0, &vec![after; 65_536])?;
    connection.flush()?;
    drop(connection);
    assert_eq!(daemon.stop()?.code(), Some(0));
    Ok(())
}

/// The same, of a daemon that nothing disturbs.
fn prove(daemon: &mut Daemon, before: u8, after: u8) {
    check_and_change(daemon, &[before], after).unwrap();
}

/// Starts two daemons in each round, the second some milliseconds after the first. Returns how
/// often each of them served. A daemon that loses its claim to the other one afterwards has not.
fn race(daemons: [&mut Daemon; 2], rounds: u8) -> [u32; 2] {
    let mut winners = [0; 2];
    let mut possible = vec![0];
    for round in 0..rounds {
        let first = usize::from(round % 2);
        daemons[first].spawn().unwrap();
        std::thread::sleep(Duration::from_millis(u64::from(round) * 100 / u64::from(rounds)));
        daemons[1 - first].spawn().unwrap();
        let served = [serves(daemons[0]), serves(daemons[1])];
        assert_ne!(served, [true, true], "round {round}: both serve");
        for (at, _) in served.iter().enumerate().filter(|(_, served)| **served) {
            let after = round + 1;
            match check_and_change(daemons[at], &possible, after) {
                Ok(()) => {
                    winners[at] += 1;
                    possible = vec![after];
                }
                Err(error) => {
                    let log = daemons[at].log();
                    assert!(log.contains("claim lost"), "round {round}: {error:#}\n{log}");
                    daemons[at].stop().unwrap();
                    // Its write may have arrived before.
                    possible.push(after);
                }
            }
        }
    }
    winners
}

fn filled(daemon: &mut Daemon) {
    daemon.start().unwrap();
    daemon.add("data", 16 * MIB).unwrap();
    assert_eq!(daemon.stop().unwrap().code(), Some(0));
}

#[test]
fn a_pool_file_and_a_loop_device_over_it_are_never_both_served() {
    root();
    let folder = Folder::new("pair").unwrap();
    let file = image(&folder);
    let mut on_file = daemon("file", &file);
    filled(&mut on_file);
    let device = Loop::over(&file).unwrap();
    let mut on_loop = daemon("loop", device.path());
    let winners = race([&mut on_file, &mut on_loop], 12);
    assert_eq!(winners.iter().sum::<u32>(), 12, "one of them serves each time");
}

#[test]
fn two_hosts_that_start_at_once_are_never_both_served() {
    root();
    let folder = Folder::new("hosts").unwrap();
    let file = image(&folder);
    let disks = [Loop::over(&file).unwrap(), Loop::over(&file).unwrap()];
    let mut here = daemon("here", disks[0].path());
    filled(&mut here);
    let node = "[node]\nid = \"00000002-0000-4000-8000-000000000002\"\n";
    let mut there = daemon_with("there", disks[1].path(), "lock_wait = \"1s\"\n", node);
    there.move_to(OtherHost::new().unwrap());
    let winners = race([&mut here, &mut there], 6);
    assert!(winners.iter().sum::<u32>() > 0, "neither ever serves");
}

#[test]
fn two_hosts_that_make_a_pool_at_once_make_one() {
    root();
    let folder = Folder::new("make").unwrap();
    let file = image(&folder);
    let disks = [Loop::over(&file).unwrap(), Loop::over(&file).unwrap()];
    let mut here = daemon("makes", disks[0].path());
    let mut there = daemon("made", disks[1].path());
    there.move_to(OtherHost::new().unwrap());
    here.spawn().unwrap();
    there.spawn().unwrap();
    let served = [serves(&mut here), serves(&mut there)];
    assert_ne!(served, [true, true]);
    for (daemon, _) in [here, there].iter_mut().zip(served).filter(|(_, served)| *served) {
        daemon.add("data", 16 * MIB).unwrap();
        prove(daemon, 0, 1);
    }
}

#[test]
fn an_open_pool_is_refused_on_another_host() {
    root();
    let folder = Folder::new("open").unwrap();
    let file = image(&folder);
    let disks = [Loop::over(&file).unwrap(), Loop::over(&file).unwrap()];
    let mut here = daemon("open", disks[0].path());
    here.start().unwrap();
    here.add("data", 16 * MIB).unwrap();
    // The same node: its entry in the superblock would let the pool be opened.
    let mut there = daemon("refused", disks[1].path());
    let host = OtherHost::new().unwrap();
    // An offline tool that writes is refused, too.
    let mut tool = host.command(&blockd_testkit::tools::blockd().unwrap());
    let output = tool.args(["pool", "repair"]).arg(disks[1].path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(IN_USE), "{said}");
    assert!(said.contains("on another host (node 00000001"), "{said}");
    there.move_to(host);
    there.spawn().unwrap();
    assert!(!serves(&mut there));
    assert!(there.log().contains("on another host (node 00000001"), "{}", there.log());
    prove(&mut here, 0, 1);
}

#[test]
fn a_tool_that_writes_sees_what_another_path_wrote_since_its_disk_was_cached() {
    root();
    let folder = Folder::new("cached").unwrap();
    let file = image(&folder);
    let disks = [Loop::over(&file).unwrap(), Loop::over(&file).unwrap()];
    let mut daemon = daemon("cached", disks[0].path());
    daemon.start().unwrap();
    assert_eq!(daemon.stop().unwrap().code(), Some(0));
    // An open descriptor keeps the other disk's page cache.
    let mut cached = File::open(disks[1].path()).unwrap();
    std::io::copy(&mut cached, &mut std::io::sink()).unwrap();
    filled(&mut daemon);
    let mut tool = std::process::Command::new(blockd_testkit::tools::blockd().unwrap());
    let output = tool.args(["--json", "pool", "repair"]).arg(disks[1].path()).output().unwrap();
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["volumes"], 1, "{said}");
}

#[test]
fn a_host_that_froze_writes_nothing_after_another_has_the_pool() {
    root();
    let folder = Folder::new("frozen").unwrap();
    let file = image(&folder);
    let disks = [Loop::over(&file).unwrap(), Loop::over(&file).unwrap()];
    let tables = "[node]\nid = \"00000001-0000-4000-8000-000000000001\"\n\
                  [[pool]]\nname = \"other\"\nkind = \"memory\"\nsize = \"64M\"\n";
    let mut frozen = daemon_with("frozen", disks[0].path(), "", tables);
    frozen.start().unwrap();
    frozen.add("data", 16 * MIB).unwrap();
    frozen.cli(&["add", "--pool", "other", "--size", "8M", "beside"]).unwrap();
    let mut client = frozen.connect("data").unwrap();
    client.write(0, &[1; 65_536]).unwrap();
    client.flush().unwrap();
    // Not flushed: the frozen daemon has a commit to write when it wakes up.
    client.write(MIB, &[2; 4096]).unwrap();
    frozen.freeze().unwrap();
    // A request is on its way to it as well.
    let writer =
        std::thread::spawn(move || client.write(2 * MIB, &[3; 4096]).and_then(|()| client.flush()));

    let mut next = daemon("next", disks[1].path());
    next.move_to(OtherHost::new().unwrap());
    next.start().unwrap();
    prove(&mut next, 1, 4);
    let before = bytes(&file);
    frozen.signal(Signal::SIGCONT).unwrap();
    let stopped = || frozen.log().contains("pool has stopped").then_some(());
    wait_until("the frozen daemon to notice", LONG, stopped).unwrap();
    assert!(frozen.log().contains("was claimed by another open"), "{}", frozen.log());
    assert!(writer.join().unwrap().is_err(), "a write was answered by the pool that was lost");
    // Longer than a commit or a renewal would take.
    std::thread::sleep(Duration::from_secs(3));
    assert!(before == bytes(&file), "the frozen daemon wrote to the pool");
    let health = frozen.cli_output(&["health"]).unwrap();
    let said = String::from_utf8_lossy(&health.stdout).into_owned();
    assert!(said.contains("was claimed by another open"), "{said}");
    // Its other pool goes on.
    let mut beside = frozen.connect("other/beside").unwrap();
    beside.write(0, &[5; 4096]).unwrap();
    beside.flush().unwrap();
}

#[test]
fn a_host_that_froze_goes_on_where_no_other_has_claimed_the_pool() {
    root();
    let folder = Folder::new("thawed").unwrap();
    let file = image(&folder);
    let disk = Loop::over(&file).unwrap();
    let mut daemon = daemon("thawed", disk.path());
    daemon.start().unwrap();
    daemon.add("data", 16 * MIB).unwrap();
    let mut client = daemon.connect("data").unwrap();
    client.write(0, &[1; 65_536]).unwrap();
    daemon.freeze().unwrap();
    std::thread::sleep(Duration::from_millis(2500));
    daemon.signal(Signal::SIGCONT).unwrap();
    client.write(MIB, &[2; 65_536]).unwrap();
    client.flush().unwrap();
    drop(client);
    prove(&mut daemon, 1, 3);
}

#[test]
fn a_daemon_that_was_killed_is_followed_at_once_on_its_host() {
    root();
    let folder = Folder::new("again").unwrap();
    let file = image(&folder);
    let disk = Loop::over(&file).unwrap();
    // The kernel may take a while to end what a killed process had under way.
    let mut daemon = daemon_with("again", disk.path(), "lock_wait = \"20s\"\n", NODE);
    daemon.start().unwrap();
    daemon.add("data", 16 * MIB).unwrap();
    let mut fastest = LONG;
    for _ in 0..3 {
        let before = daemon.log().len();
        daemon.connect("data").unwrap().write(0, &[1; 4096]).unwrap();
        daemon.kill().unwrap();
        fastest = fastest.min(daemon.start().unwrap());
        let log = daemon.log();
        assert!(!WAITS.iter().any(|wait| log[before..].contains(wait)), "{log}");
    }
    // Less than to watch takes, by its default.
    assert!(fastest < Duration::from_secs(7), "{fastest:?}");
}

#[test]
fn an_orderly_end_leaves_a_free_claim_and_a_local_file_has_none() {
    root();
    let folder = Folder::new("page").unwrap();
    let file = image(&folder);
    let mut on_file = daemon("local", &file);
    filled(&mut on_file);
    assert_eq!(page(&file), vec![0; 4096], "a local file needs no claim");
    let has_claim_page = || bytes(&file)[COMPAT] & 2 != 0;
    assert!(!has_claim_page(), "a pool without claim says that it has one");
    let disk = Loop::over(&file).unwrap();
    let mut on_disk = daemon("disk", disk.path());
    on_disk.start().unwrap();
    let held = page(&file);
    assert_eq!((&held[..8], held[14]), (CLAIM_MAGIC, 2));
    let counter = |page: &[u8]| u64::from_le_bytes(page[40..48].try_into().unwrap());
    let renewed = || (counter(&page(&file)) > counter(&held)).then_some(());
    wait_until("the claim to be renewed", LONG, renewed).unwrap();
    assert_eq!(on_disk.stop().unwrap().code(), Some(0));
    let free = page(&file);
    assert_eq!((&free[..8], free[14]), (CLAIM_MAGIC, 0));
    assert!(has_claim_page(), "a pool that was made without claim gets one");
}

/// Of the file below: the page cache of a loop device over it may have an older one.
fn page(path: &Path) -> Vec<u8> {
    let mut page = vec![0; 4096];
    File::open(path).unwrap().read_exact_at(&mut page, CLAIM).unwrap();
    page
}

fn bytes(path: &Path) -> Vec<u8> {
    let mut file = File::open(path).unwrap();
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes.len() as u64, fs::metadata(path).unwrap().len());
    bytes
}
