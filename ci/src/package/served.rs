//! A daemon of an installed package, on a pool in a file.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Result, ensure};
use blockd_testkit::clock::Clock;

use crate::command;

/// How long the daemon may take to serve, or to end.
const LIMIT: Duration = Duration::from_secs(60);

/// Time between two looks at it.
const PAUSE: Duration = Duration::from_millis(50);

/// A configuration with one pool in a file, and no block devices.
pub(crate) fn configuration(run: &Path, state: &Path, pool: &Path) -> String {
    format!(
        "runtime_dir = {run:?}\nstate_dir = {state:?}\n[ublk]\nenabled = \"off\"\n[[pool]]\nname = \
         \"default\"\npath = {pool:?}\nsize = \"256M\"\nvolatile = true\n"
    )
}

/// A daemon that serves.
pub(super) struct Served {
    program: PathBuf,
    run: PathBuf,
    config: PathBuf,
    log: PathBuf,
    process: Running,
}

impl Served {
    /// Starts the program that is installed below a root, and waits until it answers.
    pub(super) fn start(root: &Path, pool: &Path) -> Result<Self> {
        let (run, state) = (root.join("run"), root.join("var/lib/blockd"));
        fs::create_dir_all(&run)?;
        fs::create_dir_all(&state)?;
        let config = root.join("check.toml");
        fs::write(&config, configuration(&run, &state, pool))?;
        let (program, log) = (root.join("usr/bin/blockd"), root.join("log"));
        let output = fs::File::create(&log)?;
        let mut command = Command::new(&program);
        command.arg("serve").arg("--config").arg(&config).stdin(Stdio::null());
        let process = Running(command.stdout(output.try_clone()?).stderr(output).spawn()?);
        let mut served = Self { program, run, config, log, process };
        let watch = Clock::start();
        while !served.answers() {
            let ended = served.process.0.try_wait()?.is_some() || watch.elapsed() > LIMIT;
            ensure!(!ended, "the daemon does not serve: {}", served.last_words());
            std::thread::sleep(PAUSE);
        }
        Ok(served)
    }

    fn answers(&self) -> bool {
        let version = self.ask(&["--json", "version"]).ok();
        let version = version.and_then(|text| serde_json::from_str(&text).ok());
        version.is_some_and(|version: serde_json::Value| version["daemon"]["ready"] == true)
    }

    /// Runs a verb of the installed program.
    pub(super) fn ask(&self, words: &[&str]) -> Result<String> {
        let socket = self.run.join("control.sock");
        command::output(Command::new(&self.program).arg("--socket").arg(socket).args(words))
    }

    pub(super) fn nbd_socket(&self) -> PathBuf {
        self.run.join("nbd.sock")
    }

    fn last_words(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Ends it in order.
    pub(super) fn stop(mut self) -> Result<()> {
        command::output(Command::new("kill").arg(self.process.0.id().to_string()))?;
        let watch = Clock::start();
        let status = loop {
            if let Some(status) = self.process.0.try_wait()? {
                break status;
            }
            ensure!(watch.elapsed() < LIMIT, "the daemon does not end");
            std::thread::sleep(PAUSE);
        };
        ensure!(status.success(), "the daemon ended with {status}: {}", self.last_words());
        fs::remove_file(&self.config)?;
        Ok(())
    }
}

/// Ends with its parent.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
