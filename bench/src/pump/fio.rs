//! The peer: fio with the io_uring engine on the same file.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::run::DEPTH;
use crate::fio::{self, Figures};

/// Where and how fio works.
#[derive(Clone, Debug)]
pub struct Peer {
    /// The file or device.
    pub path: PathBuf,
    /// First byte of its part: beside the pool, which it must not write over.
    pub offset: u64,
    /// Bytes of its part, as many as the volume has.
    pub size: u64,
    /// Without the page cache.
    pub direct: bool,
    /// Seconds of a run.
    pub seconds: f64,
}

/// One workload in fio's terms.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Job {
    /// Writes, not reads.
    pub writes: bool,
    /// Each block once.
    pub once: bool,
    /// Writes between two fdatasync calls.
    pub flush_each: Option<u64>,
}

/// Refuses a machine without fio, with the package that has it.
pub fn check() -> Result<()> {
    let found = Command::new("fio").arg("--version").output();
    if found.is_ok_and(|output| output.status.success()) {
        return Ok(());
    }
    bail!("fio is missing: `cargo ci setup` installs it (Debian package `fio`)")
}

impl Peer {
    /// Runs fio once.
    pub fn run(&self, job: Job, seed: u64) -> Result<Figures> {
        let jobs = fio::run(Command::new("fio").args(self.arguments(job, seed)))?;
        Figures::of(jobs.first().context("no job has run")?)
    }

    fn arguments(&self, job: Job, seed: u64) -> Vec<String> {
        let mut arguments: Vec<String> = vec![
            "--name=peer".into(),
            format!("--filename={}", escaped(&self.path)),
            "--ioengine=io_uring".into(),
            format!("--direct={}", u8::from(self.direct)),
            "--bs=4k".into(),
            format!("--iodepth={DEPTH}"),
            "--fixedbufs=1".into(),
            "--registerfiles=1".into(),
            format!("--rw={}", if job.writes { "randwrite" } else { "randread" }),
            format!("--offset={}", self.offset),
            format!("--size={}", self.size),
            format!("--runtime={}ms", (self.seconds * 1000.0).round()),
            format!("--randseed={seed}"),
            "--allow_file_create=0".into(),
            "--fallocate=none".into(),
            "--output-format=json".into(),
        ];
        if !job.once {
            arguments.extend(["--norandommap".into(), "--time_based".into()]);
        }
        if let Some(each) = job.flush_each {
            arguments.push(format!("--fdatasync={each}"));
        }
        arguments
    }
}

/// A colon separates file names for fio.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace(':', "\\:")
}
