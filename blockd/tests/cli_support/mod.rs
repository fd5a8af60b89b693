//! A daemon in folders of its own, and the binary as its client.
#![allow(dead_code, clippy::unwrap_used, reason = "shared by test files; a failure fails the test")]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use blockd_media::clock::Clock;
use serde_json::Value;

/// How long the daemon may take to start, to stop, or to do what a test waits for.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// A daemon that ends with its test.
pub(crate) struct Daemon {
    /// On disk; files of the test go here.
    pub(crate) dir: PathBuf,
    runtime: PathBuf,
    child: Option<Child>,
    /// More words for `blockd serve`, from the next start on.
    pub(crate) serve_arguments: Vec<String>,
}

impl Daemon {
    /// With a pool of that size in a sparse file.
    pub(crate) fn start(pool_size: &str) -> Self {
        Self::start_with(pool_size, "")
    }

    /// The same with more lines of the configuration, behind those of the pool.
    pub(crate) fn start_with(pool_size: &str, more: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("blockd-cli-{}-{count}", std::process::id());
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(&name);
        // The delta ring has to be on a tmpfs.
        let runtime = Path::new("/dev/shm").join(&name);
        fs::create_dir_all(&dir).unwrap();
        fs::create_dir_all(&runtime).unwrap();
        let config = format!(
            "runtime_dir = {runtime:?}\nstate_dir = {dir:?}\n[workers]\ncount = 2\n\
             [[pool]]\nname = \"default\"\npath = {:?}\nsize = \"{pool_size}\"\n{more}\n",
            dir.join("default.pool"),
        );
        fs::write(dir.join("blockd.toml"), config).unwrap();
        let mut daemon = Self { dir, runtime, child: None, serve_arguments: Vec::new() };
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
        let log = self.dir.join("log");
        let log = File::options().create(true).append(true).open(log).unwrap();
        let mut serve = Command::new(env!("CARGO_BIN_EXE_blockd"));
        serve.arg("serve").arg("--config").arg(self.config()).stdin(Stdio::null());
        serve.args(&self.serve_arguments);
        self.child = Some(serve.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap());
        let clock = Clock::start();
        loop {
            let ended = self.child.as_mut().unwrap().try_wait().unwrap();
            assert!(ended.is_none() && clock.elapsed() < LIMIT, "{ended:?}\n{}", self.log());
            if is_there(&self.json(&["version"])) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn config(&self) -> PathBuf {
        self.dir.join("blockd.toml")
    }

    /// Where its delta ring is.
    pub(crate) fn ring_dir(&self) -> PathBuf {
        self.runtime.clone()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.runtime.join("control.sock")
    }

    /// Bytes of memory that the process has.
    pub(crate) fn resident(&self) -> u64 {
        let statm = format!("/proc/{}/statm", self.child.as_ref().unwrap().id());
        let statm = fs::read_to_string(statm).unwrap();
        statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    /// As a crash would.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Waits for its own end.
    pub(crate) fn wait(&mut self) -> std::process::ExitStatus {
        self.child.take().unwrap().wait().unwrap()
    }

    /// To read its configuration again.
    pub(crate) fn hang_up(&self) {
        signal(self.child.as_ref().unwrap(), "HUP");
    }

    /// In order.
    pub(crate) fn terminate(&mut self) -> std::process::ExitStatus {
        let mut child = self.child.take().unwrap();
        signal(&child, "TERM");
        child.wait().unwrap()
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_blockd"));
        command.arg("--socket").arg(self.socket()).args(arguments);
        command.stdin(Stdio::null()).current_dir(&self.dir);
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

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
        for dir in [&self.dir, &self.runtime] {
            fs::remove_dir_all(dir).unwrap();
        }
    }
}

/// Sends a signal by the shell's own kill, which every machine has.
pub(crate) fn signal(child: &Child, name: &str) {
    let kill = format!("kill -{name} {}", child.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
}

/// Bytes that differ from place to place, and are not zero.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| random.u8(1..)).collect()
}
