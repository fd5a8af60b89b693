//! Runs a workload against a server: mostly fio with a job file.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use super::client;
use crate::fio::{Figures, run};

/// The job files, and where they are.
#[derive(Clone, Debug)]
pub struct Jobs {
    /// The folder.
    pub folder: PathBuf,
}

/// The parameters of the job files.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    /// The URI of the export.
    pub uri: &'a str,
    /// Seconds of a run by time.
    pub seconds: f64,
    /// Connections, each with the depth that the job file says.
    pub connections: u32,
    /// For the addresses.
    pub seed: u64,
    /// Bytes to move, of a run by amount.
    pub bytes: u64,
}

/// A workload without a job file, which uses the bench's own client. With fio's NBD engine
/// `fsync=16` sends flush after flush until the first is answered, so that a faster server gets
/// fewer; and played from a list, it hangs up with requests in flight.
pub const FLUSHES: &str = "randwrite-flush";

/// Another one: each connection writes a block, waits, flushes, and waits, as databases do. Counted
/// are the pairs.
pub const COMMITS: &str = "write-and-flush";

impl Jobs {
    /// Runs one job file. The file is read by fio itself, so it can be run by hand as well.
    pub fn run(&self, job: &str, settings: Settings<'_>) -> Result<Figures> {
        if job == FLUSHES {
            return client::write_and_flush(settings);
        }
        if job == COMMITS {
            return client::commits(settings);
        }
        self.report(job, settings, 0).and_then(|report| Figures::of(&report))
    }

    /// Runs a job file of fio, at no more than `rate` operations a second where it says so, and
    /// returns its report.
    pub(super) fn report(&self, job: &str, settings: Settings<'_>, rate: u64) -> Result<Value> {
        let path = self.folder.join(format!("{job}.fio"));
        let milliseconds = (settings.seconds * 1000.0).round();
        let mut fio = Command::new("fio");
        fio.arg("--output-format=json").arg(&path).current_dir(std::env::temp_dir());
        fio.env("URI", settings.uri).env("RUNTIME", format!("{milliseconds}ms"));
        fio.env("CONNECTIONS", settings.connections.to_string());
        fio.env("SEED", settings.seed.to_string());
        fio.env("IO_SIZE", settings.bytes.to_string());
        fio.env("VERIFY_SIZE", settings.bytes.to_string());
        fio.env("RATE", rate.to_string());
        let first = |jobs: Vec<Value>| jobs.into_iter().next().context("no job has run");
        let report = run(&mut fio).and_then(first);
        report.with_context(|| format!("{} on {}", path.display(), settings.uri))
    }
}
