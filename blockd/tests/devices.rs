//! Devices of pools on a real kernel: claimed against other programs, locked against other owners,
//! and durable where they are new. The daemon and its command line are the release's own.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "test code")]

mod cli_support;

use std::fs::File;
use std::io::BufRead as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use blockd_media::clock::Clock;
use cli_support::{Daemon, LIMIT};

const POOL: u64 = 256 << 20;
/// Exit code of what is in use.
const IN_USE: i32 = 7;

/// A loop device over a sparse file, gone with its owner.
struct Loop {
    device: PathBuf,
    file: PathBuf,
}

impl Loop {
    fn new(name: &str) -> Self {
        assert!(nix::unistd::geteuid().is_root(), "not run: loop devices need root");
        let name = format!("blockd-devices-{name}-{}", std::process::id());
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        File::create(&file).unwrap().set_len(POOL).unwrap();
        let said = ok("losetup", &["--find", "--show", "--direct-io=on", file.to_str().unwrap()]);
        Self { device: said.trim().into(), file }
    }

    fn path(&self) -> &str {
        self.device.to_str().unwrap()
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = output("losetup", &["--detach", self.path()]);
        let _ = std::fs::remove_file(&self.file);
    }
}

/// A file system that is mounted as long as its owner lives.
struct Mounted(PathBuf);

impl Mounted {
    fn new(device: &str, folder: &Path) -> Self {
        ok("mount", &[device, folder.to_str().unwrap()]);
        Self(folder.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = output("umount", &["--lazy", self.0.to_str().unwrap()]);
    }
}

fn output(program: &str, arguments: &[&str]) -> Output {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new(program);
    command.env("PATH", format!("{path}:/usr/sbin:/sbin")).args(arguments);
    command.stdin(Stdio::null()).output().unwrap()
}

fn said(output: &Output) -> String {
    [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat()
}

fn ok(program: &str, arguments: &[&str]) -> String {
    let output = output(program, arguments);
    assert!(output.status.success(), "{program} {arguments:?}: {}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// A daemon with its default pool in a file and one more on this device.
fn daemon(disk: &Loop, lines: &str) -> Daemon {
    Daemon::start_with("256M", &table(disk, lines))
}

fn table(disk: &Loop, lines: &str) -> String {
    format!("[[pool]]\nname = \"disk\"\npath = {:?}\n{lines}", disk.path())
}

/// Tries what an operator may do by mistake with a disk. Each is refused.
fn is_claimed(disk: &Loop) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).to_str().unwrap();
    let mistakes: [(&str, &[&str]); 4] = [
        ("mkfs.ext4", &["-q", "-F", disk.path()]),
        ("mount", &["-t", "ext4", disk.path(), folder]),
        ("wipefs", &["--all", disk.path()]),
        ("mkswap", &[disk.path()]),
    ];
    for (program, arguments) in mistakes {
        let output = output(program, arguments);
        let said = said(&output).to_lowercase();
        assert!(!output.status.success(), "{program} was not refused: {said}");
        assert!(said.contains("busy") || said.contains("in use"), "{program}: {said}");
    }
}

#[test]
fn other_programs_cannot_have_a_disk_that_is_served() {
    let disk = Loop::new("claimed");
    let mut daemon = daemon(&disk, "");
    daemon.ok(&["add", "--nbd", "--size", "16M", "--pool", "disk", "data"]);
    is_claimed(&disk);
    // The claim of a process that was killed does not keep its successor out.
    daemon.kill();
    daemon.start_again();
    is_claimed(&disk);
    // A tool that only reads takes no claim and needs none.
    daemon.ok(&["pool", "check", "--online", disk.path()]);
    daemon.ok(&["show", "--pool", "disk", "data"]);
    assert!(daemon.terminate().success());
    ok("mkfs.ext4", &["-q", "-F", disk.path()]);
}

#[test]
fn a_disk_that_others_use_is_refused_with_what_has_it() {
    let disk = Loop::new("mounted");
    let daemon = Daemon::start("256M");
    let folder = daemon.dir.join("mounted");
    std::fs::create_dir(&folder).unwrap();
    ok("mkfs.ext4", &["-q", "-F", disk.path()]);
    let _mounted = Mounted::new(disk.path(), &folder);
    let refused = || {
        let (code, error) = daemon.failure(&["pool", "create", "other", "--path", disk.path()]);
        assert_eq!(code, IN_USE, "{error}");
        assert!(error.contains(disk.path()) && error.contains("mounted on"), "{error}");
        assert!(!error.contains("zero"), "{error}");
    };
    refused();
    // Without the marks of the file system it looks unused, until that writes them again.
    let zeroes = format!("of={}", disk.path());
    ok("dd", &["if=/dev/zero", &zeroes, "bs=1M", "count=2", "conv=notrunc", "oflag=direct"]);
    let tail = format!("seek={}", (POOL >> 20) - 2);
    let more = ["if=/dev/zero", &zeroes, "bs=1M", "count=2", &tail, "conv=notrunc", "oflag=direct"];
    ok("dd", &more);
    refused();
}

#[test]
fn tools_that_write_take_the_claim_too() {
    let disk = Loop::new("tools");
    let mut daemon = daemon(&disk, "");
    daemon.ok(&["add", "--nbd", "--size", "16M", "--pool", "disk", "data"]);
    daemon.kill();
    let other = File::options().read(true).custom_flags(nix::libc::O_EXCL).open(&disk.device);
    let other = other.unwrap();
    let rings = daemon.ring_dir();
    let replay = ["journal", "replay", "--ring-dir", rings.to_str().unwrap(), disk.path()];
    let (code, error) = daemon.failure(&replay);
    assert_eq!(code, IN_USE, "{error}");
    assert!(error.contains(disk.path()) && error.contains("another program"), "{error}");
    // Reading is no danger to anything.
    daemon.ok(&["pool", "check", disk.path()]);
    drop(other);
    daemon.ok(&replay);
}

#[test]
fn a_new_pool_does_not_wait_for_its_own_lock() {
    for round in 0..5 {
        let disk = Loop::new(&format!("first-{round}"));
        let daemon = daemon(&disk, "lock_wait = \"20s\"\n");
        let log = daemon.log();
        // The kernel ends a ring, and lets go of its files, a moment after its last user has.
        let waits = log.lines().filter(|line| line.contains("owner lock"));
        for wait in waits {
            let ms = wait.rsplit_once(" ms=").and_then(|(_, ms)| ms.trim().parse::<u64>().ok());
            assert!(ms.is_some_and(|ms| ms < 1000), "{log}");
        }
    }
}

#[test]
fn a_pool_that_could_not_be_opened_is_unlocked_at_once() {
    let disk = Loop::new("refused");
    let mut daemon = daemon(&disk, "");
    daemon.kill();
    // Without its ring the pool is refused.
    for entry in std::fs::read_dir(daemon.ring_dir()).unwrap().flatten() {
        if entry.file_name().to_string_lossy().starts_with("ring-") {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
    let config = std::fs::read_to_string(daemon.config()).unwrap();
    let lost = config.replace("name = \"default\"", "name = \"default\"\naccept_loss = true");
    std::fs::write(daemon.config(), lost).unwrap();
    daemon.start_not_ready();
    assert!(daemon.log().contains("disk"), "{}", daemon.log());
    let file = File::open(&disk.device).unwrap();
    file.try_lock().unwrap_or_else(|error| panic!("{error}: {}", daemon.log()));
}

#[test]
fn a_lock_that_is_waited_for_is_reported_to_the_log_and_the_service_manager() {
    let disk = Loop::new("waited");
    let mut daemon = daemon(&disk, "lock_wait = \"1m\"\n");
    assert!(daemon.terminate().success());
    let owner = File::open(&disk.device).unwrap();
    // A daemon that was killed may have had a device of this number a moment ago.
    let clock = Clock::start();
    while owner.try_lock().is_err() {
        assert!(clock.elapsed() < LIMIT, "the device stays locked");
        std::thread::sleep(Duration::from_millis(10));
    }
    let socket = daemon.dir.join("notify");
    let messages = UnixDatagram::bind(&socket).unwrap();
    messages.set_read_timeout(Some(LIMIT)).unwrap();
    let mut serve = Command::new(env!("CARGO_BIN_EXE_blockd"));
    serve.arg("serve").arg("--config").arg(daemon.config()).env("NOTIFY_SOCKET", &socket);
    let mut serve = serve.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut message, mut extended) = ([0; 512], false);
    while !extended {
        let length = messages.recv(&mut message).unwrap();
        extended = String::from_utf8_lossy(&message[..length]).contains("EXTEND_TIMEOUT_USEC=");
    }
    let mut log = std::io::BufReader::new(serve.stderr.take().unwrap()).lines();
    let clock = Clock::start();
    let waiting = log.find_map(|line| line.ok().filter(|line| line.contains("waiting for")));
    let waiting = waiting.unwrap();
    assert!(waiting.contains(disk.path()), "{waiting}");
    // The log names the process that has it: this one.
    assert!(waiting.contains(&std::process::id().to_string()), "{waiting}");
    assert!(clock.elapsed() < Duration::from_secs(40));
    drop(owner);
    log.find(|line| line.as_ref().is_ok_and(|line| line.contains("waited for the owner lock")))
        .unwrap()
        .unwrap();
    cli_support::signal(&serve, "KILL");
    serve.wait().unwrap();
}

#[test]
fn the_entry_of_a_new_pool_file_is_durable() {
    let mut daemon = Daemon::start("256M");
    assert!(daemon.terminate().success());
    let trace = daemon.dir.join("trace");
    let folder = daemon.dir.join("pools");
    std::fs::create_dir(&folder).unwrap();
    let config = std::fs::read_to_string(daemon.config()).unwrap();
    let pool = folder.join("new.pool");
    let table = format!("{config}[[pool]]\nname = \"new\"\npath = {pool:?}\nsize = \"64M\"\n");
    std::fs::write(daemon.config(), table).unwrap();
    let mut serve = Command::new("strace");
    serve.args(["--follow-forks", "--trace=fsync", "--decode-fds=path", "--output"]).arg(&trace);
    serve.arg(env!("CARGO_BIN_EXE_blockd")).arg("serve").arg("--config").arg(daemon.config());
    let mut serve = serve.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let clock = Clock::start();
    let ready = || daemon.run(&["list", "--pool", "new"]).status.success();
    while !ready() {
        assert!(clock.elapsed() < LIMIT, "the daemon does not serve");
        std::thread::sleep(Duration::from_millis(50));
    }
    // strace passes no signal on; it ends with the daemon.
    ok("pkill", &["-TERM", "-P", &serve.id().to_string()]);
    serve.wait().unwrap();
    let trace = std::fs::read_to_string(&trace).unwrap();
    let synced = format!("<{}>", folder.display());
    assert!(trace.lines().any(|line| line.contains("fsync(") && line.contains(&synced)), "{trace}");
}

/// Waits until a condition holds; `what` describes it.
fn wait_until(what: &str, daemon: &Daemon, mut holds: impl FnMut() -> bool) {
    let clock = Clock::start();
    while !holds() {
        assert!(clock.elapsed() < LIMIT, "{what}: {}", daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_superblock_that_another_program_overwrote_stops_its_pool_and_no_other() {
    let disk = Loop::new("overwritten");
    let mut daemon = daemon(&disk, "[health]\ninterval = \"1s\"\n");
    daemon.ok(&["add", "--nbd", "--size", "16M", "--pool", "disk", "data"]);
    daemon.ok(&["pool", "check", "--online", disk.path()]);
    let target = format!("of={}", disk.path());
    ok("dd", &["if=/dev/zero", &target, "bs=4096", "count=1", "conv=notrunc,fsync"]);
    let (code, error) = daemon.failure(&["pool", "check", "--online", disk.path()]);
    assert_eq!(code, 10, "{error}");
    wait_until("health does not name the superblock", &daemon, || {
        let health = said(&daemon.run(&["health"]));
        health.contains("overwritten by another program") && health.contains(disk.path())
    });
    assert_ne!(daemon.failure(&["add", "--nbd", "--size", "16M", "--pool", "disk", "more"]).0, 0);
    let health = daemon.ok(&["--json", "health"]);
    assert!(health.contains("\"overwritten\""), "{health}");
    // The other pool goes on.
    daemon.ok(&["add", "--nbd", "--size", "16M", "--pool", "default", "other"]);
    // Nothing that was answered is lost: the copies at the end of the disk are sound.
    daemon.kill();
    daemon.start_again();
    daemon.ok(&["show", "--pool", "disk", "data"]);
}

#[test]
fn one_damaged_copy_of_a_superblock_does_not_stop_its_pool() {
    let disk = Loop::new("rotten");
    let daemon = daemon(&disk, "[health]\ninterval = \"1s\"\n");
    // In the middle of the first copy, whose mark stays as it was.
    let target = format!("of={}", disk.path());
    let words = ["if=/dev/urandom", &target, "bs=1", "seek=2000", "count=16"];
    ok("dd", &[&words[..], &["conv=notrunc,fsync"]].concat());
    // Longer than it takes to notice a copy that another program overwrote.
    std::thread::sleep(Duration::from_secs(8));
    daemon.ok(&["add", "--nbd", "--size", "16M", "--pool", "disk", "data"]);
    let health = daemon.ok(&["--json", "health"]);
    assert!(!health.contains("\"overwritten\""), "{health}");
}

/// Takes a disk away and adds it again under the same name, as a storage server does that restarts.
fn restart(disk: &Loop, daemon: &Daemon) {
    let file = disk.file.to_str().unwrap();
    let is_attached = || output("losetup", &[disk.path()]).status.success();
    ok("losetup", &["--detach", disk.path()]);
    // Rings of the killed daemon may hold the device for a while.
    wait_until("the loop device is still attached", daemon, || !is_attached());
    wait_until("the loop device can't be attached", daemon, || {
        output("losetup", &["--direct-io=on", disk.path(), file]).status.success()
    });
}

#[test]
fn a_ring_is_not_replayed_over_a_disk_that_was_restarted() {
    let disk = Loop::new("restarted");
    let mut daemon = daemon(&disk, "accept_loss = false\n");
    daemon.ok(&["add", "--nbd", "--size", "16M", "--pool", "disk", "data"]);
    // The same disk: its ring is replayed.
    daemon.kill();
    daemon.start_again();
    daemon.kill();
    restart(&disk, &daemon);
    daemon.start_not_ready();
    wait_until("the restart was not noticed", &daemon, || {
        let health = said(&daemon.run(&["--json", "health"]));
        health.contains("disk sequence number") && health.contains("ring-lost")
    });
    daemon.kill();
    let rings = daemon.ring_dir();
    let replay = ["journal", "replay", "--ring-dir", rings.to_str().unwrap(), disk.path()];
    for replay in [replay.to_vec(), [&replay[..], &["--dry-run"]].concat()] {
        let (code, error) = daemon.failure(&replay);
        assert_eq!(code, IN_USE, "{error}");
        assert!(error.contains("disk sequence number"), "{error}");
    }
    // Where the loss is accepted the pool opens, without its ring.
    let config = std::fs::read_to_string(daemon.config()).unwrap();
    let lost = config.replace("accept_loss = false", "accept_loss = true");
    std::fs::write(daemon.config(), lost).unwrap();
    daemon.start_again();
    daemon.ok(&["show", "--pool", "disk", "data"]);
    // From then on the ring counts again.
    daemon.kill();
    std::fs::write(daemon.config(), config).unwrap();
    daemon.start_again();
    assert!(daemon.terminate().success());
    let left = std::fs::read_dir(daemon.ring_dir()).unwrap().flatten();
    let left: Vec<_> = left.map(|entry| entry.file_name()).collect();
    let is_left = |name: &std::ffi::OsString| {
        let name = name.to_string_lossy();
        name.starts_with("ring-") || name.starts_with("disks-")
    };
    assert!(!left.iter().any(is_left), "{left:?}");
}

#[test]
fn a_disk_that_is_absent_at_the_start_is_missing_and_comes_back() {
    let disk = Loop::new("absent");
    let name = format!("blockd-by-id-{}", std::process::id());
    let link = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::os::unix::fs::symlink(&disk.device, &link).unwrap();
    let lines = format!("[[pool]]\nname = \"disk\"\npath = {link:?}\n");
    let mut daemon = Daemon::start_with("256M", &lines);
    daemon.ok(&["add", "--nbd", "--size", "16M", "--pool", "disk", "data"]);
    assert!(daemon.terminate().success());
    // The name goes with the disk, as udev has it; then it leads to a disk that is empty.
    std::fs::remove_file(&link).unwrap();
    daemon.start_not_ready();
    let empty = Loop::new("empty");
    for why in ["does not exist", "holds no pool"] {
        let (code, error) = daemon.failure(&["pool", "open", "disk"]);
        assert!(code == IN_USE && error.contains("pool disk is missing"), "{error}");
        assert!(error.contains(link.to_str().unwrap()) && error.contains(why), "{error}");
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(&empty.device, &link).unwrap();
    }
    let bytes = std::fs::read(&empty.file).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0), "the empty disk was written to");
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink(&disk.device, &link).unwrap();
    daemon.ok(&["pool", "open", "disk"]);
    daemon.ok(&["show", "--pool", "disk", "data"]);
    std::fs::remove_file(&link).unwrap();
}

#[test]
fn a_state_directory_that_is_full_keeps_no_pool_from_being_served() {
    let mut daemon = Daemon::start("256M");
    daemon.ok(&["add", "--nbd", "--size", "16M", "data"]);
    daemon.ok(&["detach", "data"]);
    assert!(daemon.terminate().success());
    let state = daemon.dir.join("state");
    std::fs::create_dir(&state).unwrap();
    let mounted = state.to_str().unwrap();
    ok("mount", &["-t", "tmpfs", "-o", "size=1M", "tmpfs", mounted]);
    let _mounted = Mounted(state.clone());
    let config = std::fs::read_to_string(daemon.config()).unwrap();
    let from = format!("state_dir = {:?}", daemon.dir);
    assert!(config.contains(&from), "{config}");
    let config = config.replace(&from, &format!("state_dir = {state:?}"));
    std::fs::write(daemon.config(), config).unwrap();
    daemon.start_again();
    daemon.kill();
    // As if the pool had been seen long ago: otherwise there is nothing to write.
    let list = state.join("served.json");
    let text = std::fs::read_to_string(&list).unwrap();
    let key = "\"last_seen_unix_seconds\": ";
    let (before, after) = text.split_once(key).unwrap();
    std::fs::write(&list, format!("{before}{key}1{}", "0".repeat(9) + &after[10..])).unwrap();
    let fill = || {
        let mut file = File::create(state.join("fill")).unwrap();
        while std::io::Write::write_all(&mut file, &[1; 4096]).is_ok() {}
    };
    fill();
    for _ in 0..2 {
        daemon.start_again();
        assert!(daemon.log().contains("No space left"), "{}", daemon.log());
        daemon.kill();
    }
    // As a kernel leaves a file system whose disk had an error.
    let remount = |how: &str| ok("mount", &["-o", &format!("remount,{how}"), mounted]);
    remount("ro");
    daemon.start_again();
    daemon.ok(&["show", "data"]);
    daemon.kill();
    remount("rw");
    daemon.start_again();
    daemon.ok(&["del", "--force", "data"]);
    // A pool that is not remembered yet is not served.
    let path = daemon.dir.join("new.pool");
    let create = ["pool", "create", "new", "--path", path.to_str().unwrap(), "--size", "64M"];
    let (_, error) = daemon.failure(&create);
    assert!(error.contains("served.json"), "{error}");
}

/// A mistyped path: what lies there is not written over, not even by a claim.
#[test]
fn a_disk_of_others_is_not_claimed_by_tools_that_write() {
    let disk = Loop::new("foreign");
    let mut daemon = Daemon::start("256M");
    assert!(daemon.terminate().success());
    let pool = daemon.dir.join("default.pool").display().to_string();
    daemon.ok(&["pool", "dump", "--output", "dump", &pool]);
    let start = || std::fs::read(disk.path()).unwrap()[..64 << 10].to_vec();
    let file = std::fs::File::options().write(true).open(disk.path()).unwrap();
    // Also where the place of a claim holds zeroes, as in the middle of a partition table.
    for at in [512, 8192] {
        file.write_all_at(b"a header of others", at).unwrap();
        let before = start();
        for words in [
            &["pool", "repair", disk.path()][..],
            &["pool", "repair", "--force", disk.path()],
            &["pool", "restore", "--from", "dump", disk.path()],
            &["pool", "dump", "--thin-xml", "--fill", disk.path()],
        ] {
            let (code, error) = daemon.failure(words);
            assert!(code == 3 && error.contains("has no readable superblock"), "{code} {error}");
            assert!(start() == before, "{words:?} has written");
        }
    }
}
