//! blockd, started and set up by its configuration and its command line.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_api::v1::control_client::ControlClient;
use blockd_testkit::daemon::{Daemon as Process, Home, Settings};
use nix::sys::signal::Signal;
use serde_json::Value;
use tonic::transport::Channel;

use super::backing::Disk;
use super::peers::Device;
use super::{Mode, shell};
use crate::control;

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

/// The longest that the daemon may take to come up, or to end.
const LIMIT: Duration = Duration::from_secs(30);

/// A daemon with a folder of its own. It ends in order, and its devices with it.
#[derive(Debug)]
pub struct Daemon(Process);

impl Daemon {
    /// Starts one on empty pools.
    pub fn start(program: &Path, folder: &Path, mode: Mode, pools: &[Pool]) -> Result<Self> {
        Self::start_ready(program, folder, mode, pools, 0)
    }

    /// The same with a number of ready devices.
    pub fn start_ready(
        program: &Path,
        folder: &Path,
        mode: Mode,
        pools: &[Pool],
        ready: usize,
    ) -> Result<Self> {
        for pool in pools {
            pool.disk.forget()?;
        }
        let settings = Settings {
            home: Home::Kept(folder.to_owned()),
            program: Some(program.to_owned()),
            tables: format!("{}ready = {ready}\n", tables(mode)),
            pools: Some(pool_tables(pools)?),
            ..Settings::default()
        };
        let mut daemon = Self(Process::new("ublk", &settings)?);
        daemon.run()?;
        daemon.wait()?;
        Ok(daemon)
    }

    /// Starts the process; it need not have come up yet.
    pub fn run(&mut self) -> Result<()> {
        self.0.spawn()
    }

    /// Waits until it answers.
    pub fn wait(&mut self) -> Result<()> {
        self.0.wait_until_serving(LIMIT)
    }

    /// Ends the process with a signal and waits for its end.
    pub fn end(&mut self, signal: Signal) -> Result<ExitStatus> {
        self.0.signal(signal)?;
        self.0.wait(LIMIT)
    }

    /// Makes a volume and its device. The mode of serving is the one that the daemon reports, not
    /// the configured one.
    pub fn add(&self, pool: &str, volume: &str, bytes: u64) -> Result<(Device, Mode)> {
        let size = bytes.to_string();
        let answer = self.ask(&["add", "--size", &size, "--pool", pool, "--ublk", volume])?;
        let path = answer["where"].as_str().unwrap_or_default();
        ensure!(path.starts_with("/dev/"), "blockd add: no device in {answer}");
        let path = PathBuf::from(path);
        shell::until("the volume's device", || Ok(path.exists()))?;
        let zero_copy = answer["volume"]["zero_copy"].as_bool().context("no zero_copy")?;
        let mode = if zero_copy { Mode::ZeroCopy } else { Mode::Copy };
        let server = self.pid();
        Ok((Device { name: format!("blockd, {}", mode.name()), path, server }, mode))
    }

    /// Makes a volume and its NBD export; the address.
    pub fn export(&self, pool: &str, volume: &str, bytes: u64) -> Result<String> {
        let size = bytes.to_string();
        let answer = self.ask(&["add", "--size", &size, "--pool", pool, "--nbd", volume])?;
        Ok(answer["uri"].as_str().context("blockd add: no uri")?.to_owned())
    }

    /// The process, if it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.0.pid()
    }

    /// A client of its control API.
    pub(super) fn client(&self) -> ControlClient<Channel> {
        control::connect(&self.0)
    }

    /// Detaches a volume.
    pub(super) fn detach(&self, pool: &str, volume: &str) -> Result<()> {
        self.ask(&["detach", "--pool", pool, volume]).map(|_| ())
    }

    /// Takes a snapshot.
    pub fn snapshot(&self, pool: &str, volume: &str, name: &str) -> Result<()> {
        self.ask(&["snapshot", "--pool", pool, &format!("{volume}={name}")]).map(|_| ())
    }

    /// Deletes a volume.
    pub fn delete(&self, pool: &str, volume: &str) -> Result<()> {
        self.ask(&["del", "--pool", pool, volume]).map(|_| ())
    }

    fn ask(&self, words: &[&str]) -> Result<Value> {
        self.0.cli(words).with_context(|| self.0.last_words())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.pid().is_some()
            && let Err(error) = self.end(Signal::SIGTERM)
        {
            eprintln!("note: blockd: {error:#}");
        }
    }
}

fn tables(mode: Mode) -> String {
    let zero_copy = match mode {
        Mode::Copy => "off",
        Mode::ZeroCopy => "auto",
    };
    format!(
        "[log]\nlevel = \"warn\"\n\n[ublk]\nqueues = 1\ndepth = 128\nzero_copy = \
         \"{zero_copy}\"\n"
    )
}

fn pool_tables(pools: &[Pool]) -> Result<String> {
    let mut text = String::new();
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
