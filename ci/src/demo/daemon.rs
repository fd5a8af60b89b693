//! A daemon in a folder of its own, and the commands that speak to it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::{tail, text};
use crate::clock::Stopwatch;
use crate::command;

/// How long the daemon may take to start or to stop.
const LIMIT: Duration = Duration::from_secs(60);

/// Between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// A temporary folder, and one in memory for files that need a tmpfs. Both go with this value.
pub(crate) struct Folder {
    path: PathBuf,
    runtime: PathBuf,
}

impl Folder {
    /// Makes both.
    pub(crate) fn make(purpose: &str) -> Result<Self> {
        let name = format!("blockd-{purpose}-{}", std::process::id());
        let path = std::env::temp_dir().join(&name);
        // Delta rings have to be on a tmpfs. Sockets need short paths.
        let shared = Path::new("/dev/shm");
        let runtime = if shared.is_dir() { shared.join(&name) } else { path.join("run") };
        let folder = Self { path, runtime };
        for dir in [&folder.path, &folder.path.join("state"), &folder.runtime] {
            fs::create_dir(dir).with_context(|| format!("making {}", dir.display()))?;
        }
        Ok(folder)
    }

    /// The one on disk.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The one in memory.
    pub(crate) fn runtime(&self) -> &Path {
        &self.runtime
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        for dir in [&self.path, &self.runtime] {
            if let Err(error) = fs::remove_dir_all(dir) {
                eprintln!("{} stays: {error}", dir.display());
            }
        }
    }
}

/// The daemon. It ends with this value.
pub(super) struct Daemon {
    binary: PathBuf,
    config: PathBuf,
    log: PathBuf,
    socket: PathBuf,
    nbd_socket: PathBuf,
    child: Option<Child>,
}

impl Daemon {
    /// Writes a configuration and starts it.
    pub(super) fn start(binary: &Path, folder: &Folder, pool_size: &str) -> Result<Self> {
        let state = folder.path.join("state");
        let config = folder.path.join("blockd.toml");
        let written = format!(
            "runtime_dir = {:?}\nstate_dir = {:?}\n\n[[pool]]\nname = \"demo\"\npath = {:?}\n\
             size = \"{pool_size}\"\nvolatile = true\n",
            text(&folder.runtime)?,
            text(&state)?,
            text(&state.join("demo.pool"))?,
        );
        fs::write(&config, written).with_context(|| format!("writing {}", config.display()))?;
        let mut daemon = Self {
            binary: binary.to_path_buf(),
            config,
            log: folder.path.join("daemon.log"),
            socket: folder.runtime.join("control.sock"),
            nbd_socket: folder.runtime.join("nbd.sock"),
            child: None,
        };
        daemon.start_again()?;
        Ok(daemon)
    }

    /// Starts it, after it has ended.
    pub(super) fn start_again(&mut self) -> Result<()> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(&self.log)
            .with_context(|| format!("opening {}", self.log.display()))?;
        let mut serve = Command::new(&self.binary);
        serve.arg("serve").arg("--config").arg(&self.config);
        serve.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.child = Some(serve.spawn().context("starting the daemon")?);
        self.wait_until_ready()
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let watch = Stopwatch::start();
        while watch.elapsed() < LIMIT {
            if let Some(status) = self.child.as_mut().map(Child::try_wait).transpose()?.flatten() {
                bail!("the daemon ended: {status}\n{}", tail(&self.log));
            }
            let answer: serde_json::Value =
                serde_json::from_str(&self.quiet(&["--json", "version"])?)?;
            if answer["daemon"]["ready"] == true {
                return Ok(());
            }
            std::thread::sleep(LOOK);
        }
        bail!("the daemon is not ready after {LIMIT:?}\n{}", tail(&self.log))
    }

    /// Where it serves NBD.
    pub(super) fn nbd_socket(&self) -> PathBuf {
        self.nbd_socket.clone()
    }

    /// A command that speaks to this daemon.
    pub(super) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.arg("--socket").arg(&self.socket).args(arguments).stdin(Stdio::null());
        command
    }

    /// Runs a command; its output is shown.
    pub(super) fn cli(&self, arguments: &[&str]) -> Result<()> {
        let ran = command::run(&mut self.command(arguments));
        ran.with_context(|| format!("the daemon's log ends:\n{}", tail(&self.log)))
    }

    /// Runs a command and returns its output.
    pub(super) fn quiet(&self, arguments: &[&str]) -> Result<String> {
        command::output(&mut self.command(arguments))
    }

    /// Kills the daemon like a crash: it writes and closes nothing.
    pub(super) fn kill(&mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        child.kill().context("killing the daemon")?;
        child.wait().context("waiting for the killed daemon")?;
        Ok(())
    }

    /// Stops the daemon with SIGTERM.
    pub(super) fn stop(&mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        let process = child.id().to_string();
        let asked = command::run(Command::new("sh").args(["-c", "kill -TERM \"$0\"", &process]));
        let watch = Stopwatch::start();
        while watch.elapsed() < LIMIT {
            if let Some(status) = child.try_wait()? {
                if !status.success() {
                    bail!("the daemon ended with {status}\n{}", tail(&self.log));
                }
                return asked;
            }
            std::thread::sleep(LOOK);
        }
        self.child = Some(child);
        bail!("the daemon does not end\n{}", tail(&self.log))
    }

    /// Stops and starts it.
    pub(super) fn restart(&mut self) -> Result<()> {
        self.stop()?;
        self.start_again()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The demo has failed, and says so itself.
        let _ = self.kill();
    }
}
