//! Pools that are not where they were, and paths on which no pool may be made: the daemon and its
//! command line refuse, say what to do, and lose nothing.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "test code")]

#[path = "../cli_support/mod.rs"]
mod cli_support;
mod explicit;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use blockd_media::clock::Clock;
use nix::sys::stat::Mode;

use cli_support::{Daemon, LIMIT, pattern};

/// Exit code of what is in use, or in another state than it has to be.
const IN_USE: i32 = 7;
/// Exit code of a value that is not allowed.
const INVALID: i32 = 3;
/// A call that is refused at once must not wait for this long.
const AT_ONCE: Duration = Duration::from_secs(20);

const BYTES: usize = 1 << 20;

/// Metrics on a port that the kernel chooses.
const METRICS: &str = "[metrics]\naddress = \"127.0.0.1:0\"\n";

/// A daemon with a second pool in a folder of its own, and a volume with data in it.
struct Case {
    daemon: Daemon,
    pool: PathBuf,
}

impl Case {
    fn new() -> Self {
        Self::with("size = \"64M\"")
    }

    /// With these lines in the pool's table.
    fn with(lines: &str) -> Self {
        let mut daemon = Daemon::start("256M");
        let folder = daemon.dir.join("disk");
        fs::create_dir(&folder).unwrap();
        let pool = folder.join("w.pool");
        assert!(daemon.terminate().success());
        let config = fs::read_to_string(daemon.config()).unwrap();
        let table = format!("[[pool]]\nname = \"w\"\npath = {pool:?}\n{lines}\n{METRICS}");
        fs::write(daemon.config(), format!("{config}{table}")).unwrap();
        daemon.start_again();
        let case = Self { daemon, pool };
        let image = case.daemon.dir.join("image");
        fs::write(&image, pattern(BYTES, 1)).unwrap();
        case.daemon.ok(&["import", "--pool", "w", image.to_str().unwrap(), "data"]);
        case.daemon.ok(&["attach", "--nbd", "--pool", "w", "data"]);
        case
    }

    fn moved(&self) -> PathBuf {
        self.pool.with_extension("elsewhere")
    }

    /// Replaces a part of the configuration.
    fn configure(&self, from: &str, to: &str) {
        let config = fs::read_to_string(self.daemon.config()).unwrap();
        assert!(config.contains(from), "{config}");
        fs::write(self.daemon.config(), config.replace(from, to)).unwrap();
    }

    /// Puts another pool with a volume of the same name in the place of the pool.
    fn exchange(&self) {
        let mut other = Daemon::start("64M");
        other.ok(&["add", "--nbd", "--size", "1M", "data"]);
        assert!(other.terminate().success());
        fs::copy(other.dir.join("default.pool"), &self.pool).unwrap();
    }

    /// Exit code and text of a call that must not create the pool.
    fn refused(&self, words: &[&str]) -> String {
        let (code, error) = self.daemon.failure(words);
        assert_eq!(code, IN_USE, "{error}");
        error
    }

    /// Stops the daemon, has `change` happen, and starts it again.
    fn restart(&mut self, change: impl FnOnce(&Self)) {
        assert!(self.daemon.terminate().success());
        change(self);
        self.daemon.start_not_ready();
    }

    /// The pool is served, with its volume, the volume's bytes, and its attachment.
    fn is_whole(&self) {
        let copy = self.daemon.dir.join("copy");
        self.daemon.ok(&["export", "--force", "--pool", "w", "data", copy.to_str().unwrap()]);
        assert!(fs::read(&copy).unwrap() == pattern(BYTES, 1), "the volume has other bytes");
        let shown = self.daemon.json(&["show", "--pool", "w", "data"]);
        assert_eq!(shown["volume"]["attached"], true, "{shown}");
        assert_eq!(self.daemon.json(&["version"])["daemon"]["ready"], true);
    }

    /// The pool is missing, all calls report so, and the other pool is served.
    fn is_missing(&self, why: &str) {
        let daemon = &self.daemon;
        let (code, error) = daemon.failure(&["pool", "open", "w"]);
        assert_eq!(code, IN_USE, "{error}");
        let path = self.pool.to_str().unwrap();
        for part in ["pool w is missing", path, why, "last seen at 20", "--replace-missing"] {
            assert!(error.contains(part), "{part:?} is not in: {error}");
        }
        let health = daemon.run(&["health"]);
        let said = String::from_utf8(health.stdout).unwrap();
        assert!(said.contains("pool w is missing"), "{said}");
        let (_, metrics) = get(daemon, "/metrics");
        assert!(metrics.contains("blockd_pool_missing{pool=\"w\"} 1\n"), "{metrics}");
        assert!(metrics.contains("blockd_pool_missing{pool=\"default\"} 0\n"), "{metrics}");
        let (status, ready) = get(daemon, "/readyz");
        assert!(status == 503 && ready.contains("missing"), "{status} {ready}");
        // Its volumes are not gone, and no answer says that they are.
        let (_, error) = daemon.failure(&["del", "--pool", "w", "--force", "data"]);
        assert!(error.starts_with("pool w is not served: pool w is missing: "), "{error}");
        daemon.ok(&["add", "--nbd", "--size", "8M", "other"]);
        daemon.ok(&["del", "--force", "other"]);
    }
}

/// Runs a command that must not wait; one that does is killed, so that the test ends.
fn at_once(daemon: &Daemon, words: &[&str]) -> (Option<i32>, String) {
    let mut command = daemon.command(words);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let (mut child, clock) = (command.spawn().unwrap(), Clock::start());
    while child.try_wait().unwrap().is_none() {
        if clock.elapsed() > AT_ONCE {
            child.kill().unwrap();
            panic!("{words:?} still waits after {:?}", clock.elapsed());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// Has all pools last seen in another boot.
fn change_boot(daemon: &Daemon) {
    let served = daemon.dir.join("served.json");
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let boot: String = id.chars().filter(char::is_ascii_hexdigit).collect();
    let text = fs::read_to_string(&served).unwrap();
    assert!(text.contains(&boot), "{text}");
    fs::write(&served, text.replace(&boot, &"0".repeat(32))).unwrap();
}

/// The answer of the metrics server.
fn get(daemon: &Daemon, path: &str) -> (u16, String) {
    let log = daemon.log();
    let address = log.rsplit("http://").next().unwrap().split('/').next().unwrap();
    blockd_testkit::http::get(std::net::TcpStream::connect(address).unwrap(), path).unwrap()
}

#[test]
fn a_missing_pool_is_not_made_anew_and_comes_back_whole() {
    let mut case = Case::new();
    case.restart(|case| fs::rename(&case.pool, case.moved()).unwrap());
    case.is_missing("does not exist");
    assert!(!case.pool.exists(), "a new pool was made");
    // It stays missing through another start.
    case.restart(|_| ());
    case.is_missing("does not exist");
    fs::rename(case.moved(), &case.pool).unwrap();
    assert!(case.daemon.json(&["pool", "open", "w"])["changed"] == true);
    assert!(case.daemon.json(&["pool", "open", "w"])["changed"] == false);
    case.is_whole();
}

#[test]
fn a_volume_of_a_missing_pool_is_detached_by_force() {
    let mut case = Case::new();
    case.restart(|case| fs::rename(&case.pool, case.moved()).unwrap());
    let (_, error) = case.daemon.failure(&["detach", "--pool", "w", "data"]);
    assert!(error.starts_with("pool w is not served: pool w is missing: "), "{error}");
    let detached = case.daemon.run(&["--json", "detach", "--pool", "w", "--force", "data"]);
    let done: serde_json::Value = serde_json::from_slice(&detached.stdout).unwrap();
    assert!(done["changed"] == true && done["volume"].is_null(), "{done}");
    // Only the pool says whether there is a mapping above the device.
    let warning = String::from_utf8(detached.stderr).unwrap();
    let text = "if volume data was added with --encrypt, its mapping may still be open";
    assert!(warning.starts_with("blockd: warning: pool w is not served: "), "{warning}");
    assert!(warning.contains(text) && warning.lines().count() == 1, "{warning}");
    fs::rename(case.moved(), &case.pool).unwrap();
    assert!(case.daemon.json(&["pool", "open", "w"])["changed"] == true);
    let shown = case.daemon.json(&["show", "--pool", "w", "data"]);
    assert_eq!(shown["volume"]["attached"], false, "{shown}");
}

#[test]
fn a_missing_pool_is_picked_up_when_the_configuration_is_read_again() {
    let mut case = Case::new();
    case.restart(|case| fs::rename(&case.pool, case.moved()).unwrap());
    fs::rename(case.moved(), &case.pool).unwrap();
    case.daemon.hang_up();
    let clock = Clock::start();
    while case.daemon.json(&["version"])["daemon"]["ready"] != true {
        assert!(clock.elapsed() < LIMIT, "{}", case.daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    case.is_whole();
}

#[test]
fn another_pool_in_the_place_of_a_missing_one_is_refused() {
    let mut case = Case::new();
    case.restart(|case| {
        fs::rename(&case.pool, case.moved()).unwrap();
        fs::copy(case.daemon.dir.join("default.pool"), &case.pool).unwrap();
    });
    case.is_missing("holds another pool");
    fs::rename(case.moved(), &case.pool).unwrap();
    case.daemon.ok(&["pool", "open", "w"]);
    case.is_whole();
}

#[test]
fn an_empty_file_in_the_place_of_a_missing_pool_stays_empty() {
    let mut case = Case::new();
    case.restart(|case| {
        fs::rename(&case.pool, case.moved()).unwrap();
        fs::File::create(&case.pool).unwrap().set_len(64 << 20).unwrap();
    });
    case.is_missing("holds no pool");
    assert!(fs::read(&case.pool).unwrap().iter().all(|byte| *byte == 0), "something was written");
}

#[test]
fn no_pool_file_is_made_below_dev_or_in_memory() {
    let daemon = Daemon::start("256M");
    let absent = format!("/dev/blockd-absent-{}", std::process::id());
    let memory = format!("/dev/shm/blockd-memory-{}", std::process::id());
    let create = |path: &str, more: &[&str]| {
        let words = ["pool", "create", "typo", "--path", path, "--size", "256M"];
        daemon.run(&[&words[..], more].concat())
    };
    for (path, more, allowed) in [
        (&absent, &[][..], "below /dev"),
        (&absent, &["--volatile"], "below /dev"),
        (&memory, &[], "--volatile"),
    ] {
        let output = create(path, more);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(INVALID), "{said}");
        assert!(said.contains(path.as_str()) && said.contains(allowed), "{said}");
        assert!(!Path::new(path).exists(), "{path} was made");
    }
    assert!(create(&memory, &["--volatile"]).status.success());
    fs::remove_file(memory).unwrap();
}

#[test]
fn a_device_that_is_no_file_and_no_disk_is_refused_at_once() {
    let daemon = Daemon::start("256M");
    let fifo = daemon.dir.join("fifo");
    nix::unistd::mkfifo(&fifo, Mode::S_IRWXU).unwrap();
    for path in [fifo.to_str().unwrap(), "/dev/null", daemon.dir.to_str().unwrap()] {
        for kind in [&[][..], &["--kind", "disk"], &["--kind", "file"]] {
            let words = ["pool", "create", "odd", "--path", path, "--size", "64M"];
            let (code, error) = at_once(&daemon, &[&words[..], kind].concat());
            assert!(code == Some(INVALID) && error.contains(path), "{error}");
        }
        let (_, error) = at_once(&daemon, &["pool", "check", path]);
        assert!(error.contains(path), "{error}");
    }
    // Other calls are not held up by it either.
    let good = daemon.dir.join("good.pool");
    daemon.ok(&["pool", "create", "good", "--path", good.to_str().unwrap(), "--size", "64M"]);
}

#[test]
fn another_name_of_an_open_pool_is_refused_at_once() {
    let daemon = Daemon::start("256M");
    let pool = daemon.dir.join("default.pool");
    let (hard, soft) = (daemon.dir.join("hard"), daemon.dir.join("soft"));
    fs::hard_link(&pool, &hard).unwrap();
    std::os::unix::fs::symlink(&pool, &soft).unwrap();
    let clock = Clock::start();
    for path in [&hard, &soft, &pool] {
        let path = path.to_str().unwrap();
        let words = ["pool", "create", "alias", "--path", path, "--size", "256M"];
        let (code, error) = daemon.failure(&words);
        assert!(code == IN_USE && error.contains("belongs to pool default"), "{error}");
    }
    assert!(clock.elapsed() < AT_ONCE, "{:?}", clock.elapsed());
}

#[test]
fn a_volatile_pool_is_made_anew_after_a_boot_and_missing_before() {
    let mut daemon = Daemon::start("256M");
    let memory = format!("/dev/shm/blockd-volatile-{}", std::process::id());
    let words = ["pool", "create", "fast", "--path", &memory, "--size", "64M", "--volatile"];
    daemon.ok(&words);
    assert!(daemon.terminate().success());
    fs::remove_file(&memory).unwrap();
    daemon.start_not_ready();
    let (_, error) = daemon.failure(&["pool", "open", "fast"]);
    assert!(error.contains("missing"), "{error}");
    assert!(daemon.terminate().success());
    change_boot(&daemon);
    daemon.start_again();
    assert!(daemon.log().contains("made anew"), "{}", daemon.log());
    daemon.terminate();
    fs::remove_file(&memory).unwrap();
}

#[test]
fn the_loser_of_a_race_to_create_a_pool_leaves_the_file_of_the_winner() {
    let mut daemon = Daemon::start("256M");
    assert!(daemon.terminate().success());
    let folder = daemon.dir.join("disk");
    fs::create_dir(&folder).unwrap();
    let config = fs::read_to_string(daemon.config()).unwrap();
    let names: Vec<String> = (0..6).map(|at| format!("alias{at}")).collect();
    let tables = names.iter().map(|name| {
        let link = daemon.dir.join(name);
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        let path = link.join("one.pool");
        format!("[[pool]]\nname = {name:?}\npath = {path:?}\nsize = \"64M\"\nlock_wait = \"1s\"\n")
    });
    let tables: String = tables.collect();
    fs::write(daemon.config(), format!("{config}{tables}")).unwrap();
    daemon.start_not_ready();
    let is_open = |name: &&String| daemon.run(&["list", "--pool", name]).status.success();
    let open: Vec<_> = names.iter().filter(is_open).collect();
    assert_eq!(open.len(), 1, "{open:?}\n{}", daemon.log());
    assert!(folder.join("one.pool").exists(), "the file of pool {} was removed", open[0]);
}

#[test]
fn an_attachment_belongs_to_its_pool_and_not_to_another_of_the_same_name() {
    let mut case = Case::new();
    case.restart(|case| {
        fs::remove_file(case.daemon.dir.join("served.json")).unwrap();
        fs::rename(&case.pool, case.moved()).unwrap();
        case.exchange();
    });
    let error = case.refused(&["pool", "open", "w"]);
    assert!(error.contains("holds another pool"), "{error}");
    fs::rename(case.moved(), &case.pool).unwrap();
    case.daemon.ok(&["pool", "open", "w"]);
    case.is_whole();
}

#[test]
fn a_pool_that_was_renamed_is_not_made_anew_at_its_old_place() {
    let mut case = Case::new();
    case.restart(|case| {
        fs::rename(&case.pool, case.moved()).unwrap();
        case.configure("name = \"w\"", "name = \"v\"");
    });
    let error = case.refused(&["pool", "open", "v"]);
    assert!(error.contains("pool v is missing") && error.contains("as pool w"), "{error}");
    assert!(!case.pool.exists(), "a new pool was made");
    fs::rename(case.moved(), &case.pool).unwrap();
    case.daemon.ok(&["pool", "open", "v"]);
    case.daemon.ok(&["show", "--pool", "v", "data"]);
}

#[test]
fn a_pool_in_memory_is_served_by_the_name_of_a_former_file() {
    let mut case = Case::new();
    case.restart(|case| {
        case.configure(&format!("path = {:?}", case.pool), "kind = \"memory\"");
    });
    case.daemon.ok(&["pool", "open", "w"]);
    case.daemon.ok(&["add", "--nbd", "--pool", "w", "--size", "1M", "new"]);
}

#[test]
fn a_volatile_pool_on_a_disk_is_missing_after_a_boot_too() {
    let mut case = Case::with("size = \"64M\"\nvolatile = true");
    case.restart(|case| {
        fs::rename(&case.pool, case.moved()).unwrap();
        change_boot(&case.daemon);
    });
    case.is_missing("does not exist");
    assert!(!case.pool.exists(), "a new pool was made");
}

#[test]
fn a_pool_file_that_is_there_is_held_to_the_rules_for_new_ones() {
    let daemon = Daemon::start("256M");
    let memory = PathBuf::from(format!("/dev/shm/blockd-empty-{}", std::process::id()));
    let links = [daemon.dir.join("dangling"), daemon.dir.join("to-memory")];
    std::os::unix::fs::symlink("/dev/blockd-absent-disk", &links[0]).unwrap();
    std::os::unix::fs::symlink(&memory, &links[1]).unwrap();
    fs::File::create(&memory).unwrap().set_len(64 << 20).unwrap();
    for (path, more, allowed) in [
        (&links[0], &[][..], "leads to nothing"),
        (&links[0], &["--volatile"], "leads to nothing"),
        (&links[1], &[], "--volatile"),
        (&memory, &[], "--volatile"),
    ] {
        let path = path.to_str().unwrap();
        let words = ["pool", "create", "odd", "--path", path, "--size", "64M"];
        let (code, error) = daemon.failure(&[&words[..], more].concat());
        assert!(code == INVALID && error.contains(path) && error.contains(allowed), "{error}");
    }
    assert!(!Path::new("/dev/blockd-absent-disk").exists());
    assert!(fs::read(&memory).unwrap().iter().all(|byte| *byte == 0));
    fs::remove_file(&memory).unwrap();
}

#[test]
fn pools_are_made_and_the_daemon_ends_while_another_pool_is_waited_for() {
    let mut case = Case::new();
    case.restart(|case| fs::rename(&case.pool, case.moved()).unwrap());
    fs::rename(case.moved(), &case.pool).unwrap();
    // A process that lives has the pool's lock: that is waited for 30 s.
    let holder = fs::File::open(&case.pool).unwrap();
    holder.lock().unwrap();
    case.daemon.hang_up();
    let clock = Clock::start();
    while !case.daemon.log().contains("waiting for the owner lock") {
        assert!(clock.elapsed() < LIMIT, "{}", case.daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    let other = case.daemon.dir.join("other.pool");
    case.daemon.ok(&[
        "pool",
        "create",
        "other",
        "--path",
        other.to_str().unwrap(),
        "--size",
        "64M",
    ]);
    assert!(case.daemon.terminate().success());
    let log = case.daemon.log();
    assert!(!log.contains("the pool is still not open"), "{log}");
    // The same pool is opened once, by whichever comes first.
    case.daemon.start_not_ready();
    case.daemon.hang_up();
    let mut open = case.daemon.command(&["pool", "open", "w"]);
    let mut open = open.stdout(Stdio::null()).spawn().unwrap();
    drop(holder);
    assert!(open.wait().unwrap().success(), "{}", case.daemon.log());
    case.is_whole();
}

#[test]
fn a_pool_of_a_region_is_missing_without_its_region_and_the_daemon_stays_for_it() {
    let mut daemon = Daemon::start("256M");
    assert!(daemon.terminate().success());
    let config = fs::read_to_string(daemon.config()).unwrap();
    let tables = "[[pool]]\nname = \"default\"\nkind = \"pmem\"\nregion = \"0xb10cd\"\n";
    let before = config.split("[[pool]]").next().unwrap();
    fs::write(daemon.config(), format!("{before}{tables}{METRICS}")).unwrap();
    daemon.start_not_ready();
    let (code, error) = daemon.failure(&["pool", "open", "default"]);
    assert!(code == IN_USE && error.contains("pool default is missing: "), "{error}");
    assert!(error.contains("region 0xb10cd") && error.contains("last seen at 20"), "{error}");
    let (_, metrics) = get(&daemon, "/metrics");
    assert!(metrics.contains("blockd_pool_missing{pool=\"default\"} 1\n"), "{metrics}");
    // A region that is not there can be the place of a pool: nothing is given up.
    let (_, error) = daemon.failure(&["pool", "create", "default", "--replace-missing"]);
    assert!(error.contains("region 0xb10cd"), "{error}");
}
