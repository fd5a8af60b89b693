//! The peer: fio with the io_uring engine on the same file.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::run::DEPTH;

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

/// fio's results.
#[derive(Clone, Copy, Debug)]
pub struct FioFigures {
    /// Reads or writes per second.
    pub iops: f64,
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
    pub fn run(&self, job: Job, seed: u64) -> Result<FioFigures> {
        let output = Command::new("fio")
            .args(self.arguments(job, seed))
            .output()
            .context("fio: `cargo ci setup` installs it")?;
        ensure!(
            output.status.success(),
            "fio: {}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        // Warnings may stand before the JSON.
        let begin = output.stdout.iter().position(|&byte| byte == b'{').unwrap_or(0);
        let report: Value =
            serde_json::from_slice(&output.stdout[begin..]).context("fio's report")?;
        let job_report = &report["jobs"][0];
        let error = job_report["error"].as_i64().unwrap_or(0);
        ensure!(error == 0, "fio ended with error {error}");
        let side = &job_report[if job.writes { "write" } else { "read" }];
        let iops = side["iops"].as_f64().filter(|iops| *iops > 0.0);
        Ok(FioFigures { iops: iops.context("fio's report has no IOPS")? })
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
