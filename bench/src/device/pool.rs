//! blockd with one pool on the disk, started and controlled by its public interfaces.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::disk::Disk;
use crate::block::Place;
use crate::clock::Clock;

/// The longest that the daemon may take to come up.
const PATIENCE_SECONDS: f64 = 30.0;
/// The volume.
const VOLUME: &str = "bench";

/// A daemon that runs.
#[derive(Debug)]
pub struct Daemon {
    program: PathBuf,
    folder: PathBuf,
    child: Child,
}

impl Daemon {
    /// Starts it with a new pool on all of the disk.
    ///
    /// # Errors
    /// When it does not come up; the message has its output.
    pub fn start(program: &Path, scratch: &Path, disk: &Disk) -> Result<Self> {
        let folder = scratch.join("daemon");
        fs::create_dir_all(&folder)?;
        let shown = folder.display();
        let text = format!(
            "runtime_dir = \"{shown}/run\"\nstate_dir = \"{shown}/state\"\n\n[log]\nlevel = \
             \"warn\"\n\n[[pool]]\nname = \"bench\"\nkind = \"disk\"\npath = \"{}\"\n",
            disk.path.display()
        );
        fs::write(folder.join("blockd.toml"), text)?;
        let log = fs::File::create(folder.join(LOG))?;
        let mut command = Command::new(program);
        command.arg("serve").arg("--config").arg(folder.join("blockd.toml"));
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().with_context(|| format!("start {}", program.display()))?;
        let mut daemon = Self { program: program.to_owned(), folder, child };
        let clock = Clock::start();
        while std::os::unix::net::UnixStream::connect(daemon.control()).is_err() {
            let up = daemon.child.try_wait()?.is_none() && clock.seconds() < PATIENCE_SECONDS;
            ensure!(up, "blockd does not come up: {}", daemon.said());
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        Ok(daemon)
    }

    /// Makes the volume: over ublk where there is one, else over NBD.
    ///
    /// # Errors
    /// When the daemon refuses.
    pub fn add(&self, bytes: u64) -> Result<Place> {
        let output = Command::new(&self.program)
            .args(["add", "--size", &bytes.to_string(), VOLUME, "--socket"])
            .arg(self.control())
            .output()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "blockd add: {errors}\n{}", self.said());
        let place = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        ensure!(!place.is_empty(), "blockd add has printed nothing");
        Ok(if place.starts_with('/') { Place::Device(place.into()) } else { Place::Nbd(place) })
    }

    /// The process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends it in order, so that it lets the disk go.
    ///
    /// # Errors
    /// When it ends otherwise.
    pub fn end(mut self) -> Result<()> {
        let deleted = Command::new(&self.program)
            .args(["del", VOLUME, "--socket"])
            .arg(self.control())
            .output()?;
        let errors = String::from_utf8_lossy(&deleted.stderr);
        ensure!(deleted.status.success(), "blockd del: {errors}\n{}", self.said());
        let status = self.stop()?;
        ensure!(status.success(), "blockd ended with {status}: {}", self.said());
        Ok(())
    }

    fn stop(&mut self) -> Result<std::process::ExitStatus> {
        if let Some(status) = self.child.try_wait()? {
            return Ok(status);
        }
        kill(Pid::from_raw(i32::try_from(self.child.id())?), Signal::SIGTERM)?;
        Ok(self.child.wait()?)
    }

    fn control(&self) -> PathBuf {
        self.folder.join("run").join("control.sock")
    }

    fn said(&self) -> String {
        fs::read_to_string(self.folder.join(LOG)).unwrap_or_default()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.stop();
    }
}

/// The daemon's log.
const LOG: &str = "log";
