//! blockd, started and set up by its configuration and its command line.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::backing::Disk;
use super::peers::Device;
use super::{Mode, shell};

/// A pool on a ramdisk.
#[derive(Clone, Copy, Debug)]
pub struct Pool {
    /// Its name.
    pub name: &'static str,
    /// The disk of the pool.
    pub disk: Disk,
    /// Bytes of an extent.
    pub extent: u64,
}

/// A daemon with a folder of its own.
#[derive(Debug)]
pub struct Daemon {
    program: PathBuf,
    folder: PathBuf,
    child: Option<Child>,
}

impl Daemon {
    /// Starts one on empty pools.
    pub fn start(program: &Path, folder: &Path, mode: Mode, pools: &[Pool]) -> Result<Self> {
        fs::create_dir_all(folder)?;
        for pool in pools {
            pool.disk.forget()?;
        }
        fs::write(folder.join("blockd.toml"), configuration(folder, mode, pools)?)?;
        let (program, folder) = (program.to_owned(), folder.to_owned());
        let mut daemon = Self { program, folder, child: None };
        daemon.run()?;
        daemon.wait()?;
        Ok(daemon)
    }

    /// Starts the process; it need not have come up yet.
    pub fn run(&mut self) -> Result<()> {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.log())?;
        let mut command = Command::new(&self.program);
        command.arg("serve").arg("--config").arg(self.folder.join("blockd.toml"));
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.child = Some(command.spawn().context("start blockd")?);
        Ok(())
    }

    /// Waits until it answers.
    pub fn wait(&mut self) -> Result<()> {
        let child = self.child.as_mut().context("blockd does not run")?;
        let control = control(&self.folder);
        let log = self.folder.join(LOG);
        let up = shell::until("blockd", || {
            ensure!(child.try_wait()?.is_none(), "blockd has ended");
            Ok(std::os::unix::net::UnixStream::connect(&control).is_ok())
        });
        up.with_context(|| fs::read_to_string(log).unwrap_or_default())
    }

    /// Ends the process with a signal and waits for its end.
    pub fn end(&mut self, signal: Signal) -> Result<ExitStatus> {
        let mut child = self.child.take().context("blockd does not run")?;
        kill(Pid::from_raw(i32::try_from(child.id())?), signal)?;
        Ok(child.wait()?)
    }

    /// Makes a volume and its device. The mode of serving is the one that the daemon reports, not
    /// the configured one.
    pub fn add(&self, pool: &str, volume: &str, bytes: u64) -> Result<(Device, Mode)> {
        let size = bytes.to_string();
        let words = ["add", "--size", &size, "--pool", pool, "--ublk", volume, "--json"];
        let answer: Value =
            serde_json::from_str(&self.ask(&words)?).context("blockd add --json")?;
        let path = answer["where"].as_str().unwrap_or_default();
        ensure!(path.starts_with("/dev/"), "blockd add: no device in {answer}");
        let path = PathBuf::from(path);
        shell::until("the volume's device", || Ok(path.exists()))?;
        let zero_copy = answer["volume"]["zero_copy"].as_bool().context("no zero_copy")?;
        let mode = if zero_copy { Mode::ZeroCopy } else { Mode::Copy };
        let server = self.child.as_ref().map(Child::id);
        Ok((Device { name: format!("blockd, {}", mode.name()), path, server }, mode))
    }

    /// Makes a volume and its NBD export; the address.
    pub fn export(&self, pool: &str, volume: &str, bytes: u64) -> Result<String> {
        let size = bytes.to_string();
        let words = ["add", "--size", &size, "--pool", pool, "--nbd", volume, "--json"];
        let answer: Value =
            serde_json::from_str(&self.ask(&words)?).context("blockd add --json")?;
        Ok(answer["uri"].as_str().context("blockd add: no uri")?.to_owned())
    }

    /// The process, if it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Takes a snapshot.
    pub fn snapshot(&self, pool: &str, volume: &str, name: &str) -> Result<()> {
        self.ask(&["snapshot", "--pool", pool, &format!("{volume}={name}")]).map(|_| ())
    }

    /// Deletes a volume.
    pub fn delete(&self, pool: &str, volume: &str) -> Result<()> {
        self.ask(&["del", "--pool", pool, volume]).map(|_| ())
    }

    fn ask(&self, arguments: &[&str]) -> Result<String> {
        let control = control(&self.folder);
        let control = control.to_string_lossy();
        let mut all = arguments.to_vec();
        all.extend(["--socket", &control]);
        let log = || fs::read_to_string(self.log()).unwrap_or_default();
        shell::run(&self.program, &all).with_context(log)
    }

    fn log(&self) -> PathBuf {
        self.folder.join(LOG)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.child.is_some()
            && let Err(error) = self.end(Signal::SIGTERM)
        {
            eprintln!("note: blockd: {error:#}");
        }
    }
}

/// The daemon's log.
const LOG: &str = "log";

fn control(folder: &Path) -> PathBuf {
    folder.join("run").join("control.sock")
}

fn configuration(folder: &Path, mode: Mode, pools: &[Pool]) -> Result<String> {
    let folder = folder.display();
    let zero_copy = match mode {
        Mode::Copy => "off",
        Mode::ZeroCopy => "auto",
    };
    let mut text = format!(
        "runtime_dir = \"{folder}/run\"\nstate_dir = \"{folder}/state\"\n\n[log]\nlevel = \
         \"warn\"\n\n[ublk]\nqueues = 1\ndepth = 128\nzero_copy = \"{zero_copy}\"\n"
    );
    for pool in pools {
        let kind = match pool.disk {
            Disk::Dax => "pmem",
            Disk::DaxTorn => "pmem\"\natomicity = \"none",
            _ => "disk",
        };
        write!(
            text,
            "\n[[pool]]\nname = \"{}\"\nkind = \"{kind}\"\npath = \"{}\"\nextent_size = \"{}K\"\n",
            pool.name,
            pool.disk.path().display(),
            pool.extent >> 10
        )?;
    }
    Ok(text)
}
