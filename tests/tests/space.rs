//! Pools that fill up, with real clients over NBD: which requests wait, what is reported, and what
//! lets them go on. No client sees an error unless it was configured, and all bytes are right
//! afterwards.

#![allow(clippy::unwrap_used, reason = "a test ends where an expectation fails")]

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::{Daemon, Settings};
use blockd_testkit::disk::{Loop, Small};
use blockd_testkit::nbd::{Connection, Kind};
use blockd_tests::threads::StoppedThreads;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::signal::Signal;
use serde_json::Value;

const MIB: u64 = 1 << 20;
const EXTENT: u64 = 256 << 10;
/// Slowing down has its own tests: a pool is full sooner without.
const OFF: &str = "low = \"off\"\nvery_low = \"off\"\n";
const METRICS: &str = "[metrics]\naddress = \"127.0.0.1:0\"\n";
const PATIENCE: Duration = Duration::from_secs(60);

fn settings(size: u64, space: &str) -> Settings {
    let pool_lines = format!("[pool.space]\n{space}");
    let tables = METRICS.to_owned();
    Settings { pool_size: size, pool_lines, tables, ..Settings::default() }
}

fn daemon(name: &str, size: u64, space: &str) -> Daemon {
    let mut daemon = Daemon::new(name, &settings(size, space)).unwrap();
    daemon.start().unwrap();
    daemon
}

fn pool(daemon: &Daemon) -> Value {
    daemon.cli(&["pool", "show"]).unwrap()["pool"].clone()
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Clock::start();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn content(volume: u64, extent: u64) -> Vec<u8> {
    (volume << 32 | extent).to_le_bytes().repeat(usize::try_from(EXTENT).unwrap() / 8)
}

/// Writes extent after extent in another thread.
struct Writer {
    number: u64,
    name: String,
    done: Arc<AtomicU64>,
    error: Arc<Mutex<Option<String>>>,
    thread: JoinHandle<()>,
}

impl Writer {
    fn start(daemon: &Daemon, number: u64, extents: u64) -> Self {
        let connection = daemon.connect(&format!("w{number}")).unwrap();
        Self::over(connection, number, 0..extents)
    }

    /// Over a connection that is open already.
    fn over(mut connection: Connection, number: u64, extents: std::ops::Range<u64>) -> Self {
        let name = format!("w{number}");
        let (done, error) = (Arc::<AtomicU64>::default(), Arc::<Mutex<Option<String>>>::default());
        let (counter, failure) = (Arc::clone(&done), Arc::clone(&error));
        let thread = std::thread::spawn(move || {
            for extent in extents {
                if let Err(error) = connection.write(extent * EXTENT, &content(number, extent)) {
                    *failure.lock().unwrap() = Some(format!("{error:#}"));
                    return;
                }
                counter.fetch_add(1, Ordering::SeqCst);
            }
        });
        Self { number, name, done, error, thread }
    }

    fn done(&self) -> u64 {
        self.done.load(Ordering::SeqCst)
    }

    fn error(&self) -> Option<String> {
        self.error.lock().unwrap().clone()
    }

    /// Waits for the end, and compares all that was answered.
    fn finish(self, daemon: &Daemon) {
        wait_until("the writer ends", || self.thread.is_finished());
        self.thread.join().unwrap();
        compare(daemon, &self.name, self.number, 0..self.done.load(Ordering::SeqCst));
    }
}

fn compare(daemon: &Daemon, name: &str, number: u64, extents: std::ops::Range<u64>) {
    let mut connection = daemon.connect(name).unwrap();
    for extent in extents {
        let read = connection.read(extent * EXTENT, usize::try_from(EXTENT).unwrap()).unwrap();
        assert!(read == content(number, extent), "{name}: extent {extent} differs");
    }
}

/// The number of lines of the daemon's log with this text.
fn said(daemon: &Daemon, what: &str) -> usize {
    daemon.log().lines().filter(|line| line.contains(what)).count()
}

/// A file that is there, as long as this, with something in it or not.
fn spare(name: &str, size: u64, content: &[u8]) -> std::path::PathBuf {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let path = path.join(format!("spare-{name}-{}", std::process::id()));
    std::fs::write(&path, content).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(size).unwrap();
    path
}

#[test]
fn a_pool_that_is_low_takes_its_spare_devices_in() {
    let spares = [spare("one", 192 * MIB, &[]), spare("two", 128 * MIB, &[])];
    let list: Vec<String> = spares.iter().map(|path| format!("\"{}\"", path.display())).collect();
    let settings = Settings {
        pool_size: 256 * MIB,
        pool_lines: format!("spare_devices = [{}]\n[pool.space]\n", list.join(", ")),
        ..Settings::default()
    };
    let mut daemon = Daemon::new("spares", &settings).unwrap();
    daemon.start().unwrap();
    assert_eq!(pool(&daemon)["devices"].as_array().unwrap().len(), 1, "none is needed yet");
    daemon.add("w1", 2 << 30).unwrap();
    let writer = Writer::start(&daemon, 1, 1700);
    wait_until("425 MiB are written", || writer.done() == 1700);
    assert_eq!(writer.error(), None);
    let devices = |daemon: &Daemon| pool(daemon)["devices"].as_array().unwrap().len();
    wait_until("both have joined", || devices(&daemon) == 3);
    assert_eq!(said(&daemon, "has joined it"), 2, "{}", daemon.log());
    assert_eq!(said(&daemon, "is full"), 0, "{}", daemon.log());
    // Killed, it finds them again, and so does one that is stopped in order.
    drop(writer);
    for killed in [true, false] {
        if killed {
            daemon.kill().unwrap();
        } else {
            assert!(daemon.stop().unwrap().success());
        }
        daemon.start().unwrap();
        assert_eq!(devices(&daemon), 3, "{}", daemon.log());
        compare(&daemon, "w1", 1, 0..1700);
    }
    drop(daemon);
    spares.iter().for_each(|path| std::fs::remove_file(path).unwrap());
}

#[test]
fn a_spare_device_that_holds_something_joins_no_pool() {
    refused_spare("front", 2);
    // Partition tables and members of arrays have marks at the end.
    refused_spare("end", 192 * MIB - 1);
}

/// Fills a pool whose first spare device is zero but for one byte. The one behind it joins.
fn refused_spare(name: &str, at: u64) {
    let paths = [spare(name, 192 * MIB, &[]), spare(&format!("{name}-empty"), 192 * MIB, &[])];
    let used = std::fs::OpenOptions::new().write(true).open(&paths[0]).unwrap();
    used.write_all_at(&[7], at).unwrap();
    let list = paths.each_ref().map(|path| format!("\"{}\"", path.display()));
    let settings = Settings {
        pool_size: 128 * MIB,
        pool_lines: format!("spare_devices = [{}]\n[pool.space]\n{OFF}", list.join(", ")),
        ..Settings::default()
    };
    let mut daemon = Daemon::new(&format!("used-{name}"), &settings).unwrap();
    daemon.start().unwrap();
    daemon.add("w1", 1 << 30).unwrap();
    let writer = Writer::start(&daemon, 1, 600);
    wait_until("the second one joins", || pool(&daemon)["devices"].as_array().unwrap().len() == 2);
    wait_until("all is written", || writer.done() == 600);
    let log = daemon.log();
    assert!(log.contains("its spare device can't join it"), "{log}");
    assert!(log.contains("holds something in its first or last 2 MiB"), "{log}");
    assert!(log.contains(&paths[0].display().to_string()), "{log}");
    let devices = pool(&daemon)["devices"].clone();
    assert_eq!(devices[1]["path"].as_str(), paths[1].to_str());
    let content = std::fs::read(&paths[0]).unwrap();
    let bytes = (0..).zip(content).filter(|(_, byte)| *byte != 0);
    assert_eq!(bytes.collect::<Vec<(u64, u8)>>(), [(at, 7)], "something was written to it");
    assert_eq!(writer.error(), None);
    drop(daemon);
    drop(writer);
    paths.iter().for_each(|path| std::fs::remove_file(path).unwrap());
}

#[test]
fn a_writer_at_full_speed_into_a_pool_that_grows_sees_no_error() {
    let daemon = daemon("grows", 256 * MIB, "grow_limit = \"1G\"\ngrow_step = \"64M\"");
    daemon.add("w1", 2 << 30).unwrap();
    let writer = Writer::start(&daemon, 1, 3000);
    wait_until("750 MiB are written", || writer.done() == 3000);
    assert_eq!(writer.error(), None);
    writer.finish(&daemon);
    let pool = pool(&daemon);
    assert!(pool["size_bytes"].as_u64().unwrap() >= 750 * MIB, "{pool}");
    assert!(said(&daemon, "pool default has grown by") > 0, "{}", daemon.log());
    assert_eq!(said(&daemon, "is full"), 0, "{}", daemon.log());
}

#[test]
fn a_full_pool_waits_and_goes_on_by_growing_deleting_and_discarding() {
    let mut daemon = daemon("full", 256 * MIB, OFF);
    for name in ["w1", "w2", "other"] {
        daemon.add(name, 1 << 30).unwrap();
    }
    let (one, two) = (Writer::start(&daemon, 1, 1400), Writer::start(&daemon, 2, 1400));
    let total = || one.done() + two.done();
    let stand_still = || {
        wait_until("the pool is full", || pool(&daemon)["blocked_writes"] == 2);
        let at = total();
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!((total(), one.error(), two.error()), (at, None, None));
        at
    };
    let at = stand_still();
    assert!((700..1024).contains(&at), "{at}");
    assert_eq!(pool(&daemon)["space_state"], "full");
    // Said once, however long it lasts.
    assert_eq!(said(&daemon, "pool default is full"), 1, "{}", daemon.log());
    let top = &daemon.cli(&["top", "--once"]).unwrap()["pools"][0];
    let shown = (&top["space_state"], &top["waiting_volumes"], &top["slowed_volumes"]);
    assert_eq!(shown, (&"full".into(), &2.into(), &0.into()), "{top}");

    // Requests that don't need space go on meanwhile, and so do commands.
    compare(&daemon, "w1", 1, 0..20);
    let mut connection = daemon.connect("w1").unwrap();
    connection.write(0, &content(1, 0)).unwrap();
    connection.flush().unwrap();
    daemon.cli(&["snapshot", "w1=s1"]).unwrap();
    daemon.cli(&["resize", "other", "--size", "2G"]).unwrap();
    daemon.cli(&["del", "--force", "other"]).unwrap();
    daemon.cli(&["del", "s1"]).unwrap();

    daemon.cli(&["pool", "grow", "--size", "+64M"]).unwrap();
    wait_until("it goes on after growing", || total() > at + 200);
    let at = stand_still();
    let len = u32::try_from(50 * EXTENT).unwrap();
    blockd_discard(&daemon, "w2", 0, len);
    wait_until("it goes on after a discard", || total() >= at + 50);
    let at = stand_still();
    daemon.cli(&["pool", "grow", "--size", "700M"]).unwrap();
    wait_until("all is written", || total() == 2800);
    assert!(at < 2800);
    one.finish(&daemon);
    compare(&daemon, "w2", 2, 50..1400);
    drop(two);
    // All of it comes back, once.
    for name in ["w1", "w2"] {
        daemon.cli(&["del", "--force", name]).unwrap();
    }
    wait_until("all is free", || {
        let pool = pool(&daemon);
        assert_eq!(pool["failure"], Value::Null, "{pool}");
        pool["mapped_bytes"] == 0 && pool["pending_bytes"] == 0
    });
    assert_eq!(daemon.stop().unwrap().code(), Some(0));
}

/// Discards a range, over NBD.
fn blockd_discard(daemon: &Daemon, name: &str, offset: u64, len: u32) {
    let status = std::process::Command::new(blockd_testkit::tools::find("qemu-io").unwrap())
        .args(["-f", "raw", "-d", "unmap", "-c", &format!("discard {offset} {len}"), "-c", "flush"])
        .arg(daemon.uri(name))
        .status()
        .unwrap();
    assert!(status.success());
}

#[test]
fn a_full_pool_answers_by_the_policy_that_was_set() {
    let daemon = daemon("answers", 256 * MIB, OFF);
    for name in ["w1", "w2", "w3"] {
        daemon.add(name, 1 << 30).unwrap();
    }
    daemon.cli(&["set", "w2", "--on-full", "error"]).unwrap();
    daemon.cli(&["set", "w3", "--on-full", "timeout=3s"]).unwrap();
    let waits = Writer::start(&daemon, 1, 4000);
    wait_until("the pool is full", || pool(&daemon)["blocked_writes"] == 1);
    let begun = Clock::start();
    let refused = Writer::start(&daemon, 2, 100);
    wait_until("it is refused", || refused.error().is_some());
    let late = Writer::start(&daemon, 3, 100);
    wait_until("it is refused", || late.error().is_some());
    assert!(begun.elapsed() >= Duration::from_secs(3), "{:?}", begun.elapsed());
    for error in [refused.error(), late.error()] {
        let error = error.unwrap();
        assert!(error.contains("28") || error.contains("ENOSPC"), "{error}");
    }
    assert_eq!(waits.error(), None);
    // The policy may change while it waits.
    daemon.cli(&["set", "w1", "--on-full", "error"]).unwrap();
    wait_until("it is refused", || waits.error().is_some());
    // With space, all of them can be written again.
    daemon.cli(&["pool", "grow", "--size", "+64M"]).unwrap();
    for (number, name) in [(2, "w2"), (3, "w3")] {
        let mut connection = daemon.connect(name).unwrap();
        connection.write(0, &content(number, 0)).unwrap();
        compare(&daemon, name, number, 0..1);
    }
    waits.finish(&daemon);
}

/// Writes of the volume were refused, and what its client discards serves the next ones at once.
#[test]
fn a_write_that_follows_a_discard_is_not_refused() {
    let daemon = daemon("follows", 64 * MIB, OFF);
    daemon.add("w1", 1 << 30).unwrap();
    daemon.cli(&["set", "w1", "--on-full", "error"]).unwrap();
    let writer = Writer::start(&daemon, 1, 4000);
    wait_until("it is refused", || writer.error().is_some());
    let written = writer.done();
    let mut client = daemon.connect("w1").unwrap();
    for round in 0..50 {
        let mut range = vec![0; usize::try_from(2 * EXTENT).unwrap()];
        client.ask(Kind::Trim, 2 * round * EXTENT, &mut range, 0).unwrap();
        for extent in [0, 1] {
            let at = written + 2 * round + extent;
            let answer = client.write(at * EXTENT, &content(1, at));
            assert!(answer.is_ok(), "write {extent} of round {round}: {answer:?}");
        }
    }
    compare(&daemon, "w1", 1, written..written + 100);
}

#[test]
fn a_daemon_ends_and_starts_while_writes_wait() {
    let mut daemon = daemon("ends", 256 * MIB, OFF);
    daemon.add("w1", 1 << 30).unwrap();
    daemon.add("w2", 1 << 30).unwrap();
    let writer = Writer::start(&daemon, 1, 4000);
    wait_until("the pool is full", || pool(&daemon)["blocked_writes"] == 1);
    let begun = Clock::start();
    daemon.cli(&["detach", "--force", "w1"]).unwrap();
    wait_until("the connection ends", || writer.error().is_some());
    assert_eq!(pool(&daemon)["blocked_writes"], 0);
    daemon.cli(&["attach", "--nbd", "w1"]).unwrap();
    let again = Writer::start(&daemon, 2, 4000);
    wait_until("another one waits", || pool(&daemon)["blocked_writes"] == 1);
    assert_eq!(daemon.stop().unwrap().code(), Some(0));
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    daemon.start().unwrap();
    assert!(again.error().is_some());
    let done = writer.done();
    compare(&daemon, "w1", 1, 0..done);
    daemon.cli(&["pool", "grow", "--size", "+16M"]).unwrap();
    let mut connection = daemon.connect("w1").unwrap();
    connection.write(done * EXTENT, &content(1, done)).unwrap();
    compare(&daemon, "w1", 1, 0..done + 1);
}

#[test]
fn reservations_promises_and_limits_are_kept() {
    let mut daemon = daemon("aside", 256 * MIB, &format!("{OFF}overprovision_ratio = \"2.0\""));
    let thick = ["add", "--nbd", "--size", "64M", "--thick", "w1"];
    daemon.cli(&thick).unwrap();
    daemon.cli(&["add", "--nbd", "--size", "300M", "--quota", "10M", "w2"]).unwrap();
    let refused = daemon.cli(&["add", "--nbd", "--size", "200M", "w3"]).unwrap_err().to_string();
    assert!(refused.contains("200 %"), "{refused}");
    let refused = daemon.cli(&["set", "w2", "--reserve", "250M", "--quota", "0"]);
    assert!(refused.unwrap_err().to_string().contains("space"), "more than there is");
    daemon.cli(&["add", "--nbd", "--size", "140M", "w4"]).unwrap();
    // Set again, nothing changes; and all of it is there after a start.
    assert_eq!(daemon.cli(&thick).unwrap()["changed"], false);
    assert_eq!(daemon.stop().unwrap().code(), Some(0));
    daemon.start().unwrap();
    let settings = |name: &str| daemon.cli(&["show", name]).unwrap()["volume"]["settings"].clone();
    assert_eq!(
        (&settings("w1")["thick"], &settings("w2")["quota_bytes"]),
        (&true.into(), &(10 * MIB).into())
    );

    let bounded = Writer::start(&daemon, 2, 1000);
    wait_until("the quota is used up", || bounded.done() == 40);
    let fills = Writer::start(&daemon, 4, 560);
    wait_until("the other one goes on", || fills.done() == 560);
    let thick = Writer::start(&daemon, 1, 256);
    wait_until("what was set aside is there", || thick.done() == 256);
    assert_eq!(bounded.done(), 40);
    daemon.cli(&["set", "w2", "--quota", "12M"]).unwrap();
    wait_until("a larger quota is used", || bounded.done() == 48);
    daemon.cli(&["set", "w2", "--on-full", "error"]).unwrap();
    bounded.finish(&daemon);
    fills.finish(&daemon);
    thick.finish(&daemon);
}

#[test]
fn limits_hold_and_can_be_changed_while_requests_wait() {
    let daemon = daemon("limits", 256 * MIB, OFF);
    daemon.add("w1", 128 * MIB).unwrap();
    daemon.add("w2", 128 * MIB).unwrap();
    daemon.cli(&["set", "w1", "--iops", "20"]).unwrap();
    daemon.cli(&["set", "w2", "--bandwidth", "4M"]).unwrap();
    let begun = Clock::start();
    let (one, two) = (Writer::start(&daemon, 1, 300), Writer::start(&daemon, 2, 300));
    std::thread::sleep(Duration::from_secs(3));
    wait_until("some have passed", || one.done() >= 20 && two.done() >= 16);
    // 20 requests, and 16 of 256 KiB, a second: never more, and on a busy machine perhaps fewer.
    let (first, second) = (one.done() as f64, two.done() as f64);
    let passed = begun.elapsed().as_secs_f64();
    let most = |rate: f64| rate * (passed + 0.2) + 2.0;
    assert!(first <= most(20.0) && second <= most(16.0), "{first} and {second} in {passed} s");
    // Flushes are not held back: these would take 100 seconds.
    daemon.add("w3", 128 * MIB).unwrap();
    daemon.cli(&["set", "w3", "--iops", "1"]).unwrap();
    let mut connection = daemon.connect("w3").unwrap();
    let flushed = Clock::start();
    for _ in 0..100 {
        connection.flush().unwrap();
    }
    assert!(flushed.elapsed() < Duration::from_secs(50), "{:?}", flushed.elapsed());
    daemon.cli(&["set", "w1", "--iops", "0"]).unwrap();
    daemon.cli(&["set", "w2", "--bandwidth", "0"]).unwrap();
    wait_until("all is written", || one.done() + two.done() == 600);
    one.finish(&daemon);
    two.finish(&daemon);
}

/// A program for a pool that is low.
fn hook(daemon: &Daemon, name: &str, text: &str, mode: u32) -> String {
    let path = daemon.folder().join(name);
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    format!("hook = {path:?}\nhook_timeout = \"1s\"\n")
}

/// Reloads a running daemon with another policy, and waits for the message `what` in its log.
fn reconfigure(daemon: &Daemon, space: &str, what: &str) {
    let before = said(daemon, what);
    daemon.configure(&settings(256 * MIB, space)).unwrap();
    daemon.signal(Signal::SIGHUP).unwrap();
    wait_until(what, || said(daemon, what) > before);
}

#[test]
fn marks_and_hooks_are_read_again_and_a_hook_that_hangs_or_lies_stops_no_write() {
    const MARKS: &str = "low = \"200M\"\nvery_low = \"1M\"\n";
    let mut daemon = daemon("hooks", 256 * MIB, "low = \"2M\"\nvery_low = \"1M\"");
    let events_file = daemon.folder().join("events");
    let mut events = std::process::Command::new(blockd_testkit::tools::blockd().unwrap())
        .args(["events", "--replay"])
        .env("BLOCKD_SOCKET", daemon.control_socket())
        .stdout(std::fs::File::create(&events_file).unwrap())
        .spawn()
        .unwrap();
    daemon.add("w1", 1 << 30).unwrap();
    let first = Writer::start(&daemon, 1, 300);
    wait_until("75 MiB are written", || first.done() == 300);
    first.finish(&daemon);
    assert_eq!(pool(&daemon)["space_state"], "normal");
    let state_in_metrics = |state: u32| {
        let line = format!("blockd_pool_space_state{{pool=\"default\"}} {state}");
        daemon.metrics().unwrap().lines().any(|found| found == line)
    };
    assert!(state_in_metrics(0));

    // An invalid configuration is refused, and changes nothing.
    let unrunnable = hook(&daemon, "unrunnable", "true", 0o644);
    let refused = "SIGHUP: all stays as it was configured";
    for wrong in [
        format!("{MARKS}{unrunnable}"),
        format!("{MARKS}quantum = \"1G\""),
        "low = \"1M\"\nvery_low = \"1M\"".to_owned(),
        format!("{MARKS}quantum = 0"),
    ] {
        reconfigure(&daemon, &wrong, refused);
    }
    for reason in ["is not executable", "at most the pool's size, 256M", "less than low"] {
        assert_eq!(said(&daemon, reason), 1, "{reason}\n{}", daemon.log());
    }
    assert_eq!((pool(&daemon)["low_bytes"].as_u64(), said(&daemon, "is low")), (Some(2 * MIB), 0));

    // Low from now on. The hooks add no space, and the pool goes on with what it has.
    let hangs = hook(&daemon, "hangs", "sleep 1000", 0o755);
    reconfigure(&daemon, &format!("{MARKS}{hangs}"), "pool default is low");
    daemon.add("w2", 1 << 30).unwrap();
    let second = Writer::start(&daemon, 2, 100);
    wait_until("writes go on", || second.done() == 100);
    second.finish(&daemon);
    wait_until("it is given up", || said(&daemon, "did not end within 1.0 s") == 1);
    let lies = hook(&daemon, "lies", "echo all is well", 0o755);
    reconfigure(&daemon, &format!("{MARKS}{lies}"), "the hook has run, and nothing has grown");
    assert_eq!(said(&daemon, "all is well"), 1, "{}", daemon.log());
    assert_eq!(pool(&daemon)["space_state"], "low");
    wait_until("the metric says that the pool is low", || state_in_metrics(1));

    let helps = format!("test \"$1\" = default && truncate -s 512M {:?}", daemon.pool());
    let helps = hook(&daemon, "helps", &helps, 0o755);
    let enough = "pool default has enough space again";
    reconfigure(&daemon, &format!("{MARKS}{helps}"), enough);
    assert_eq!(pool(&daemon)["size_bytes"].as_u64(), Some(512 * MIB));
    // A watcher receives the same, in order, until the end.
    assert_eq!(daemon.stop().unwrap().code(), Some(0));
    assert!(events.wait().unwrap().success());
    let events = std::fs::read_to_string(events_file).unwrap();
    let at = |what: &str| events.find(what).unwrap_or_else(|| panic!("{what}: {events}"));
    assert!(
        at("pool default is low") < at("has grown") && at("has grown") < at(enough),
        "{events}"
    );
}

/// A sparse pool that claims four times the size of its file system. No write fails when that runs
/// out, and the pool is reported as full.
fn fills_the_file_system_below(small: &Small, space: u64) {
    assert!(nix::unistd::geteuid().is_root(), "not run: mounting needs root");
    let settings = Settings {
        pool: Some(small.path().join("pool")),
        pool_size: 4 * space,
        pool_lines: format!("[pool.space]\n{OFF}"),
        ..Settings::default()
    };
    let mut daemon = Daemon::new("below", &settings).unwrap();
    daemon.start().unwrap();
    daemon.add("w1", 4 * space).unwrap();
    daemon.add("w2", 4 * space).unwrap();
    // Something that can be given back.
    let ballast = small.path().join("ballast");
    std::fs::write(&ballast, vec![1; usize::try_from(space / 2).unwrap()]).unwrap();
    let extents = space / EXTENT * 3 / 10;
    let (one, two) = (Writer::start(&daemon, 1, extents), Writer::start(&daemon, 2, extents));
    let total = || one.done() + two.done();
    wait_until("the pool is full", || {
        let pool = pool(&daemon);
        // A write that is just being retried is not counted.
        pool["space_state"] == "full" && pool["blocked_writes"].as_u64() > Some(0)
    });
    std::thread::sleep(Duration::from_millis(500));
    let at = total();
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!((total(), one.error(), two.error()), (at, None, None));
    assert!(at < 2 * extents, "there was room for all");
    assert_eq!(said(&daemon, "pool default is full"), 1, "{}", daemon.log());
    // Writes with allocated space go on.
    compare(&daemon, "w1", 1, 0..one.done());
    daemon.connect("w1").unwrap().write(0, &content(1, 0)).unwrap();

    std::fs::remove_file(&ballast).unwrap();
    wait_until("all is written", || total() == 2 * extents);
    // Waiting writes are counted once a second.
    wait_until("it is said", || {
        let pool = pool(&daemon);
        pool["space_state"] == "normal" && pool["blocked_writes"] == 0
    });
    for what in ["pool default is full", "pool default has enough space again"] {
        assert_eq!(said(&daemon, what), 1, "{what}: {}", daemon.log());
    }
    one.finish(&daemon);
    two.finish(&daemon);
    // Nor is anything lost by the daemon's death, or by its end.
    daemon.kill().unwrap();
    daemon.start().unwrap();
    compare(&daemon, "w1", 1, 0..extents);
    assert_eq!(daemon.stop().unwrap().code(), Some(0));
    daemon.start().unwrap();
    compare(&daemon, "w2", 2, 0..extents);
    assert_eq!(daemon.stop().unwrap().code(), Some(0));
}

#[test]
fn a_pool_is_full_where_its_tmpfs_is() {
    let small = Small::tmpfs(96 * MIB).unwrap();
    fills_the_file_system_below(&small, 96 * MIB);
}

#[test]
fn a_pool_is_full_where_the_file_system_of_a_small_loop_device_is() {
    let small = Small::ext4(96 * MIB).unwrap();
    fills_the_file_system_below(&small, 96 * MIB);
}

/// The few holes of a file that was allocated in advance are those of deleted volumes: the rest of
/// it needs nothing of a full file system.
#[test]
fn a_file_that_was_allocated_in_advance_lacks_no_more_than_its_holes() {
    assert!(nix::unistd::geteuid().is_root(), "not run: mounting needs root");
    let small = Small::tmpfs(96 * MIB).unwrap();
    let settings = Settings {
        pool: Some(small.path().join("pool")),
        pool_size: 64 * MIB,
        pool_lines: "[pool.space]\nlow = \"16M\"\nvery_low = \"1M\"\n".into(),
        ..Settings::default()
    };
    let mut daemon = Daemon::new("allocated-below", &settings).unwrap();
    daemon.start().unwrap();
    let file = std::fs::File::options().write(true).open(small.path().join("pool")).unwrap();
    fallocate(&file, FallocateFlags::empty(), 0, i64::try_from(64 * MIB).unwrap()).unwrap();
    daemon.add("w1", 8 * MIB).unwrap();
    let mut client = daemon.connect("w1").unwrap();
    for extent in 0..(8 * MIB / EXTENT) {
        client.write(extent * EXTENT, &content(1, extent)).unwrap();
    }
    drop(client);
    daemon.cli(&["del", "--force", "w1"]).unwrap();
    let shown = |key: &str| pool(&daemon)[key].as_u64();
    wait_until("the file has holes", || shown("backing_free_bytes") > Some(0));
    wait_until("all is given back", || pool(&daemon)["releasing_bytes"] == 0);
    let (left, free) = (shown("backing_free_bytes"), shown("free_bytes").unwrap());
    // Others take what was given back.
    let ballast = small.path().join("ballast");
    let _full = std::fs::write(ballast, vec![1; usize::try_from(96 * MIB).unwrap()]).unwrap_err();
    wait_until("it is seen", || shown("backing_free_bytes") < left);
    assert!(shown("free_bytes").unwrap() + 9 * MIB > free, "{free}: {}", pool(&daemon));
    assert_eq!(pool(&daemon)["space_state"], "normal");
}

/// The holes of a file whose file system is full are of no use, also beside a device with room.
#[test]
fn a_pool_with_a_spare_device_has_no_more_than_is_below_it() {
    assert!(nix::unistd::geteuid().is_root(), "not run: mounting needs root");
    let small = Small::tmpfs(64 * MIB).unwrap();
    let path = spare("below", 96 * MIB, &[]);
    let disk = Loop::over(&path).unwrap();
    let settings = Settings {
        pool: Some(small.path().join("pool")),
        pool_size: 512 * MIB,
        pool_lines: format!(
            "spare_devices = [\"{}\"]\n[pool.space]\nlow = \"64M\"\nvery_low = \"1M\"\n",
            disk.path().display()
        ),
        ..Settings::default()
    };
    let mut daemon = Daemon::new("spare-below", &settings).unwrap();
    daemon.start().unwrap();
    wait_until("it joins", || pool(&daemon)["devices"].as_array().unwrap().len() == 2);
    let free = |key: &str| pool(&daemon)[key].as_u64().unwrap();
    // The file has more holes than its file system has room.
    assert!((64 * MIB..160 * MIB).contains(&free("free_bytes")), "{}", pool(&daemon));
    let left = free("backing_free_bytes");
    let ballast = small.path().join("ballast");
    let _full = std::fs::write(ballast, vec![1; usize::try_from(64 * MIB).unwrap()]).unwrap_err();
    wait_until("it is seen", || free("backing_free_bytes") < left);
    assert!((64 * MIB..96 * MIB).contains(&free("free_bytes")), "{}", pool(&daemon));
    assert_eq!(pool(&daemon)["space_state"], "normal");
    drop(daemon);
    std::fs::remove_file(path).unwrap();
}

/// The holes are passed over, also those that volumes have been granted already.
#[test]
fn writes_go_to_another_device_where_the_file_system_below_one_is_full() {
    assert!(nix::unistd::geteuid().is_root(), "not run: mounting needs root");
    let small = Small::tmpfs(64 * MIB).unwrap();
    let path = spare("passed", 96 * MIB, &[]);
    let disk = Loop::over(&path).unwrap();
    let settings = Settings {
        pool: Some(small.path().join("pool")),
        pool_size: 512 * MIB,
        pool_lines: format!(
            "spare_devices = [\"{}\"]\n[pool.space]\nlow = \"64M\"\nvery_low = \"1M\"\n",
            disk.path().display()
        ),
        ..Settings::default()
    };
    let mut daemon = Daemon::new("passed-below", &settings).unwrap();
    daemon.start().unwrap();
    wait_until("it joins", || pool(&daemon)["devices"].as_array().unwrap().len() == 2);
    daemon.add("w1", 256 * MIB).unwrap();
    let mut first = daemon.connect("w1").unwrap();
    for extent in 0..16 {
        first.write(extent * EXTENT, &content(1, extent)).unwrap();
    }
    let ballast = small.path().join("ballast");
    let _full = std::fs::write(ballast, vec![1; usize::try_from(64 * MIB).unwrap()]).unwrap_err();
    let writer = Writer::over(daemon.connect("w1").unwrap(), 1, 16..216);
    wait_until("all is written", || writer.done() == 200);
    assert_eq!(writer.error(), None);
    compare(&daemon, "w1", 1, 0..216);
    drop(daemon);
    std::fs::remove_file(path).unwrap();
}

/// Only its first file grows: another one's full file system is no reason not to.
#[test]
fn a_pool_on_two_file_systems_grows_where_there_is_room() {
    assert!(nix::unistd::geteuid().is_root(), "not run: mounting needs root");
    let (large, small) = (Small::ext4(1 << 30).unwrap(), Small::ext4(64 * MIB).unwrap());
    let settings = Settings {
        pool: Some(large.path().join("pool")),
        pool_size: 64 * MIB,
        pool_lines: "[pool.space]\nlow = \"56M\"\nvery_low = \"1M\"\ngrow_limit = \"512M\"\n"
            .into(),
        ..Settings::default()
    };
    let mut daemon = Daemon::new("two-systems", &settings).unwrap();
    daemon.start().unwrap();
    let path = small.path().join("added");
    std::fs::File::create(&path).unwrap().set_len(48 * MIB).unwrap();
    daemon.cli(&["pool", "device", "add", path.to_str().unwrap()]).unwrap();
    let ballast = small.path().join("ballast");
    let _full = std::fs::write(ballast, vec![1; usize::try_from(64 * MIB).unwrap()]).unwrap_err();
    let first = || pool(&daemon)["devices"][0]["size_bytes"].as_u64().unwrap();
    daemon.add("v", 256 * MIB).unwrap();
    let mut client = daemon.connect("v").unwrap();
    for extent in 0..(16 * MIB / EXTENT) {
        client.write(extent * EXTENT, &content(1, extent)).unwrap();
    }
    wait_until("it grows", || first() > 64 * MIB);
}

/// Commits, grants, the control API, hooks, metrics and health stop: all threads of the daemon
/// except its workers. Answers of a cluster or another host reach only those threads.
#[test]
fn writes_use_up_the_reserve_then_wait_while_all_but_the_workers_stand_still() {
    let settings =
        Settings { tables: format!("{METRICS}[workers]\ncount = 1\n"), ..settings(256 * MIB, OFF) };
    let mut daemon = Daemon::new("outage", &settings).unwrap();
    daemon.start().unwrap();
    daemon.add("w1", 1 << 30).unwrap();
    let mut beside = daemon.connect("w1").unwrap();
    let writing = daemon.connect("w1").unwrap();
    // It has been granted more each time, so that it has a while's worth when the threads stop.
    for extent in 0..64 {
        beside.write(extent * EXTENT, &content(1, extent)).unwrap();
    }
    let reserve = || pool(&daemon)["reserved_bytes"].as_u64().unwrap() / EXTENT;
    let mut before = reserve();
    wait_until("the volume has a reserve that no longer changes", || {
        let is_same = |_| {
            std::thread::sleep(Duration::from_millis(300));
            let earlier = std::mem::replace(&mut before, reserve());
            before >= 32 && before == earlier
        };
        (0..5).all(is_same)
    });

    let is_worker = |name: &str| name.starts_with("worker-") || name.starts_with("iou-");
    let stopped = StoppedThreads::of(daemon.pid().unwrap(), is_worker).unwrap();
    assert!(stopped.names().any(|name| name == "pool-default"), "{stopped:?}");
    let writer = Writer::over(writing, 1, 64..before + 103);
    wait_until("the reserve is used up", || writer.done() >= before);
    // A write that needs more waits. Overwrites and reads do not.
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!((writer.done(), writer.error()), (before, None));
    beside.write(EXTENT, &content(1, 1)).unwrap();
    for extent in [0, 1, 63 + before] {
        let len = usize::try_from(EXTENT).unwrap();
        assert!(beside.read(extent * EXTENT, len).unwrap() == content(1, extent), "{extent}");
    }
    assert_eq!(writer.done(), before);

    drop(stopped);
    wait_until("all is written", || writer.thread.is_finished());
    assert_eq!((writer.done(), writer.error()), (before + 39, None));
    compare(&daemon, "w1", 1, 0..before + 103);
    assert_eq!(daemon.stop().unwrap().code(), Some(0));
}
