//! A daemon in folders of its own, and the binary as its client.
#![allow(dead_code, unused_imports, reason = "shared by test files")]
#![allow(clippy::unwrap_used, reason = "a failure fails the test")]

pub(crate) mod writer;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output};
use std::time::Duration;

use blockd_nbd::client::{Client, ConnectOptions, Uri};
use blockd_testkit::clock::Clock;
pub(crate) use blockd_testkit::content::pattern;
use blockd_testkit::daemon::{Daemon as Process, Home, Settings};
use nix::sys::signal::Signal;
use serde_json::Value;

/// How long the daemon may take to start, to stop, or to do what a test waits for.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// A daemon that ends with its test.
pub(crate) struct Daemon {
    pub(crate) process: Process,
    /// On disk; files of the test go here.
    pub(crate) dir: PathBuf,
}

impl Daemon {
    /// With a pool of that size in a sparse file.
    pub(crate) fn start(pool_size: &str) -> Self {
        Self::start_with(pool_size, "")
    }

    /// The same with more lines of the configuration, behind those of the pool.
    pub(crate) fn start_with(pool_size: &str, more: &str) -> Self {
        let settings = Settings {
            home: Home::Below(Path::new(env!("CARGO_TARGET_TMPDIR")).to_owned()),
            program: Some(env!("CARGO_BIN_EXE_blockd").into()),
            ..Settings::default()
        };
        let process = Process::new("cli", &settings).unwrap();
        let dir = process.folder().to_owned();
        let config = format!(
            "runtime_dir = {:?}\nstate_dir = {dir:?}\n[workers]\ncount = 2\n\
             [[pool]]\nname = \"default\"\npath = {:?}\nsize = \"{pool_size}\"\n{more}\n",
            process.runtime(),
            dir.join("default.pool"),
        );
        fs::write(process.config(), config).unwrap();
        let mut daemon = Self { process, dir };
        daemon.start_again();
        daemon
    }

    /// Starts it, after it was killed or stopped.
    pub(crate) fn start_again(&mut self) {
        self.start_until(|version| version["daemon"]["ready"] == true);
    }

    /// The same where some of its pools can't be opened, so that it is never ready.
    pub(crate) fn start_not_ready(&mut self) {
        self.start_until(|version| !version["daemon"].is_null());
    }

    fn start_until(&mut self, is_there: impl Fn(&Value) -> bool) {
        self.process.spawn().unwrap();
        let clock = Clock::start();
        loop {
            assert!(self.process.is_running() && clock.elapsed() < LIMIT, "{}", self.log());
            if is_there(&self.json(&["version"])) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn config(&self) -> PathBuf {
        self.process.config()
    }

    /// Where its delta ring is.
    pub(crate) fn ring_dir(&self) -> PathBuf {
        self.process.runtime().to_owned()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.process.control_socket()
    }

    /// Bytes of memory that the process has.
    pub(crate) fn resident(&self) -> u64 {
        let statm = format!("/proc/{}/statm", self.process.pid().unwrap());
        let statm = fs::read_to_string(statm).unwrap();
        statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    }

    pub(crate) fn log(&self) -> String {
        self.process.log()
    }

    /// As a crash would.
    pub(crate) fn kill(&mut self) {
        if self.process.pid().is_some() {
            self.process.kill().unwrap();
        }
    }

    /// Waits for its own end.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.process.wait(LIMIT).unwrap()
    }

    /// To read its configuration again.
    pub(crate) fn hang_up(&self) {
        self.process.signal(Signal::SIGHUP).unwrap();
    }

    /// In order.
    pub(crate) fn terminate(&mut self) -> ExitStatus {
        self.process.stop().unwrap()
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.process.command(arguments);
        command.current_dir(&self.dir);
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// The output of a successful run.
    pub(crate) fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {complaint}\n{}", self.log());
        String::from_utf8(output.stdout).unwrap()
    }

    /// The same, as JSON.
    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[&["--json"], arguments].concat())).unwrap()
    }

    /// The exit code and the line of a run that fails.
    pub(crate) fn failure(&self, arguments: &[&str]) -> (i32, String) {
        let output = self.run(arguments);
        let line = String::from_utf8(output.stderr).unwrap();
        assert!(line.starts_with("blockd: error: ") && line.lines().count() == 1, "{line}");
        (output.status.code().unwrap(), line.trim_end()["blockd: error: ".len()..].to_owned())
    }
}

/// The address of a volume, NAME or POOL/NAME, as `show` has it.
pub(crate) fn uri(daemon: &Daemon, volume: &str) -> Uri {
    let shown = daemon.json(&["show", volume]);
    shown["volume"]["nbd_uris"][0].as_str().unwrap().parse().unwrap()
}

/// A client of a volume, NAME or POOL/NAME.
pub(crate) fn connect(daemon: &Daemon, volume: &str) -> Client {
    Client::connect(&uri(daemon, volume), &ConnectOptions::default()).unwrap()
}

/// The same with a write that may wait for as long as a test takes.
pub(crate) fn connect_patient(daemon: &Daemon, volume: &str) -> Client {
    let options = ConnectOptions { timeout: 10 * LIMIT, ..ConnectOptions::default() };
    Client::connect(&uri(daemon, volume), &options).unwrap()
}

/// Waits until a condition holds; `what` describes it.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let clock = Clock::start();
    while !holds() {
        assert!(clock.elapsed() < LIMIT, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Sends a signal by the shell's own kill, which every machine has.
pub(crate) fn signal(child: &Child, name: &str) {
    let kill = format!("kill -{name} {}", child.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
}

/// Waits until a program catches interrupts: before that they end it without a word.
pub(crate) fn catches_interrupts(child: &Child) {
    let status = format!("/proc/{}/status", child.id());
    let caught = |text: String| {
        let line = text.lines().find_map(|line| line.strip_prefix("SigCgt:"))?.trim().to_owned();
        u64::from_str_radix(&line, 16).ok()
    };
    let is_caught = || {
        let caught = std::fs::read_to_string(&status).ok().and_then(caught);
        caught.is_some_and(|signals| signals & 1 << (Signal::SIGINT as u64 - 1) != 0)
    };
    let clock = Clock::start();
    while !is_caught() {
        assert!(clock.elapsed() < LIMIT, "it catches no interrupts");
        std::thread::sleep(Duration::from_millis(10));
    }
}
