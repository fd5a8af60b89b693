//! Pools on storage that several hosts or paths reach: caches, locks and late claims.
#![allow(clippy::unwrap_used, reason = "test code")]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use blockd_testkit::daemon::{Daemon, Ended, Settings};
use blockd_testkit::disk::{Loop, Small};
use blockd_testkit::folder::Folder;
use blockd_testkit::other_host::OtherHost;
use blockd_testkit::tools::{self, wait_until};

const MIB: u64 = 1 << 20;
/// The exit code for a pool in use, by `blockd help`.
const IN_USE: i32 = 7;
/// Longer than storage and a busy machine take.
const LONG: Duration = Duration::from_secs(60);

fn root() {
    assert!(nix::unistd::geteuid().is_root(), "not run: loop devices need root");
}

/// A file for a pool.
fn image(folder: &Path) -> PathBuf {
    let path = folder.join("image");
    File::create(&path).unwrap().set_len(128 * MIB).unwrap();
    path
}

fn daemon(name: &str, pool: &Path, pool_lines: &str) -> Daemon {
    let settings = Settings {
        pool: Some(pool.to_path_buf()),
        pool_size: 128 * MIB,
        pool_lines: format!("lock_wait = \"1s\"\n{pool_lines}"),
        lines: "default_pool = \"default\"\n".to_owned(),
        tables: "[node]\nid = \"00000001-0000-4000-8000-000000000001\"\n".to_owned(),
        ..Settings::default()
    };
    Daemon::new(name, &settings).unwrap()
}

/// Waits until a daemon serves, or has ended; the exit code then.
fn ended(daemon: &mut Daemon) -> Option<i32> {
    let error = daemon.wait_until_serving(LONG).err()?;
    error.downcast::<Ended>().expect("a daemon that neither serves nor ends").status.code()
}

fn volumes(daemon: &Daemon) -> Vec<String> {
    let listed = daemon.cli(&["list"]).unwrap();
    let names = listed["volumes"].as_array().unwrap().iter();
    names.map(|one| one["name"].as_str().unwrap().to_owned()).collect()
}

/// Keeps a disk's page cache, as a program of the host that has it open does.
fn cached(disk: &Loop) -> File {
    let mut file = File::open(disk.path()).unwrap();
    std::io::copy(&mut file, &mut std::io::sink()).unwrap();
    file
}

#[test]
fn a_pool_made_at_once_on_a_file_and_on_a_loop_device_over_it_is_made_once() {
    root();
    for round in 0..3 {
        let folder = Folder::new("both").unwrap();
        let file = image(folder.path());
        let disk = Loop::over(&file).unwrap();
        let mut on_file = daemon("file", &file, "");
        let mut on_loop = daemon("loop", disk.path(), "");
        on_loop.spawn().unwrap();
        // Also in the middle of the time that the other one watches other hosts for.
        std::thread::sleep(Duration::from_millis(round * 700));
        on_file.spawn().unwrap();
        let codes = [ended(&mut on_loop), ended(&mut on_file)];
        let refused: Vec<_> = codes.into_iter().flatten().collect();
        assert_eq!(refused, [IN_USE], "round {round}: {}{}", on_loop.log(), on_file.log());
    }
}

#[test]
fn the_file_below_a_loop_device_is_locked_for_daemons_of_other_containers_too() {
    root();
    let folder = Folder::new("below").unwrap();
    let file = image(folder.path());
    let disk = Loop::over(&file).unwrap();
    let mut on_loop = daemon("loop", disk.path(), "");
    on_loop.start().unwrap();
    // It has another directory of host locks.
    let mut on_file = daemon("file", &file, "");
    on_file.move_to(OtherHost::new().unwrap());
    on_file.spawn().unwrap();
    assert_eq!(ended(&mut on_file), Some(IN_USE), "{}", on_file.log());
    assert_eq!(on_loop.stop().unwrap().code(), Some(0));
    assert!(on_file.start().is_ok(), "the lock is given up with the pool");
    on_loop.spawn().unwrap();
    assert_eq!(ended(&mut on_loop), Some(IN_USE), "{}", on_loop.log());
}

#[test]
fn a_disk_that_was_cached_when_it_was_blank_is_not_taken_for_blank() {
    root();
    let folder = Folder::new("blank").unwrap();
    let file = image(folder.path());
    let disks = [Loop::over(&file).unwrap(), Loop::over(&file).unwrap()];
    let _cached = cached(&disks[1]);
    let mut maker = daemon("maker", disks[0].path(), "");
    maker.start().unwrap();
    maker.add("data", 16 * MIB).unwrap();
    assert_eq!(maker.stop().unwrap().code(), Some(0));
    let mut next = daemon("next", disks[1].path(), "");
    next.start().unwrap();
    assert_eq!(volumes(&next), ["data"]);
}

#[test]
fn a_pool_without_direct_io_is_read_from_the_media_after_its_claim_and_warned_of() {
    root();
    let folder = Folder::new("cached").unwrap();
    let file = image(folder.path());
    let disks = [Loop::over(&file).unwrap(), Loop::over(&file).unwrap()];
    let mut maker = daemon("maker", disks[0].path(), "");
    maker.start().unwrap();
    assert_eq!(maker.stop().unwrap().code(), Some(0));
    let _cached = cached(&disks[1]);
    maker.start().unwrap();
    maker.add("data", 16 * MIB).unwrap();
    assert_eq!(maker.stop().unwrap().code(), Some(0));
    let mut next = daemon("next", disks[1].path(), "direct = false\n");
    next.start().unwrap();
    assert_eq!(volumes(&next), ["data"]);
    assert!(next.log().contains("shared storage without O_DIRECT"), "{}", next.log());
}

#[test]
fn a_directory_of_host_locks_that_another_user_made_is_refused() {
    root();
    let folder = Folder::new("squat").unwrap();
    let file = image(folder.path());
    let mut daemon = daemon("squat", &file, "");
    let host = OtherHost::new().unwrap();
    std::os::unix::fs::chown(host.locks(), Some(12_345), None).unwrap();
    daemon.move_to(host);
    daemon.spawn().unwrap();
    assert!(ended(&mut daemon).is_some(), "a pool without a host lock is served");
    assert!(daemon.log().contains("belongs to user 12345"), "{}", daemon.log());
}

/// A file system whose writes wait, until it is dropped.
struct Frozen(PathBuf);

impl Frozen {
    fn new(path: PathBuf) -> Self {
        tools::output(Command::new("fsfreeze").arg("--freeze").arg(&path)).unwrap();
        Self(path)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze").arg("--unfreeze").arg(&self.0).status();
    }
}

#[test]
fn a_write_that_waits_for_a_late_claim_is_not_refused_for_want_of_space() {
    root();
    let small = Small::ext4(256 * MIB).unwrap();
    let file = image(&small.path());
    let disk = Loop::over(&file).unwrap();
    let mut daemon = daemon("late", disk.path(), "");
    daemon.start().unwrap();
    daemon.add("data", 16 * MIB).unwrap();
    daemon.cli(&["set", "data", "--on-full", "error"]).unwrap();
    let mut client = daemon.connect("data").unwrap();
    client.write(0, &[1; 65_536]).unwrap();
    client.flush().unwrap();
    let frozen = Frozen::new(small.path());
    // Longer than a claim is valid, and than the time to look at waiting writes.
    std::thread::sleep(Duration::from_secs(3));
    let writer =
        std::thread::spawn(move || client.write(MIB, &[2; 65_536]).and_then(|()| client.flush()));
    let said = || {
        let health = daemon.cli_output(&["health"]).unwrap();
        let said = String::from_utf8_lossy(&health.stdout).into_owned();
        said.contains("not renewed in time").then_some(said)
    };
    let said = wait_until("health to name the claim", LONG, said).unwrap();
    assert!(!said.contains("wait for space"), "{said}");
    std::thread::sleep(Duration::from_secs(2));
    assert!(!writer.is_finished(), "{:?}", writer.join());
    drop(frozen);
    writer.join().unwrap().expect("a write that only had to wait for the claim");
    assert_eq!(daemon.stop().unwrap().code(), Some(0));
}

#[test]
fn a_dry_run_of_journal_replay_is_refused_where_another_host_has_the_pool() {
    root();
    let folder = Folder::new("dry").unwrap();
    let file = image(folder.path());
    let disks = [Loop::over(&file).unwrap(), Loop::over(&file).unwrap()];
    let mut owner = daemon("owner", disks[0].path(), "");
    owner.start().unwrap();
    owner.add("data", 16 * MIB).unwrap();
    let replay = |mut command: Command| {
        let command = command.args(["journal", "replay", "--dry-run"]).arg(disks[1].path());
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let program = tools::blockd().unwrap();
    let (code, said) = replay(OtherHost::new().unwrap().command(&program));
    assert!(code == Some(IN_USE) && said.contains("on another host"), "{code:?} {said}");
    let (code, said) = replay(Command::new(&program));
    assert!(code == Some(IN_USE) && said.contains("open on this host"), "{code:?} {said}");
    owner.kill().unwrap();
    let (code, said) = replay(OtherHost::new().unwrap().command(&program));
    assert_eq!(code, Some(0), "{said}");
    let before = fs::read(&file).unwrap();
    replay(Command::new(&program));
    assert!(before == fs::read(&file).unwrap(), "a dry run wrote to the pool");
}

#[test]
fn a_tool_that_writes_watches_other_hosts_as_long_as_it_is_asked_to() {
    root();
    let folder = Folder::new("watch").unwrap();
    let file = image(folder.path());
    let disk = Loop::over(&file).unwrap();
    let mut owner = daemon("owner", disk.path(), "");
    owner.start().unwrap();
    owner.kill().unwrap();
    let host = OtherHost::new().unwrap();
    let mut tool = host.command(&tools::blockd().unwrap());
    let tool = tool.args(["pool", "repair", "--claim-wait", "4s"]).arg(disk.path());
    // The kernel may take a while to end what the killed process had under way.
    let repair = || {
        let begun = blockd_testkit::clock::Clock::start();
        let output = tool.output().unwrap();
        (output.status.code() != Some(IN_USE)).then(|| (output, begun.elapsed()))
    };
    let (output, took) = wait_until("the owner's lock to be free", LONG, repair).unwrap();
    assert!(output.status.success(), "{output:?}");
    // Once before it writes its own claim, and once after.
    assert!(took > Duration::from_secs(8), "{took:?}");
}
