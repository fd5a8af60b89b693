//! Runs a workload against a server: mostly fio with a job file.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::client;

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

/// fio's results.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    /// Reads and writes per second.
    pub iops: f64,
    /// How many they were.
    pub operations: f64,
}

/// A workload without a job file, which uses the bench's own client. With fio's NBD engine
/// `fsync=16` sends flush after flush until the first is answered, so that a faster server gets
/// fewer; and played from a list, it hangs up with requests in flight.
pub const FLUSHES: &str = "randwrite-flush";

impl Jobs {
    /// Runs one job file. The file is read by fio itself, so it can be run by hand as well.
    pub fn run(&self, job: &str, settings: Settings<'_>) -> Result<Figures> {
        if job == FLUSHES {
            return client::write_and_flush(settings);
        }
        let path = self.folder.join(format!("{job}.fio"));
        let milliseconds = (settings.seconds * 1000.0).round();
        let output = Command::new("fio")
            .arg("--output-format=json")
            .arg(&path)
            .env("URI", settings.uri)
            .env("RUNTIME", format!("{milliseconds}ms"))
            .env("CONNECTIONS", settings.connections.to_string())
            .env("SEED", settings.seed.to_string())
            .env("IO_SIZE", settings.bytes.to_string())
            .env("VERIFY_SIZE", settings.bytes.to_string())
            .current_dir(std::env::temp_dir())
            .output()
            .context("fio: `cargo ci setup` installs it")?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "fio {}: {}\n{errors}", path.display(), output.status);
        // Warnings may stand before the JSON.
        let begin = output.stdout.iter().position(|&byte| byte == b'{').unwrap_or(0);
        let report: Value =
            serde_json::from_slice(&output.stdout[begin..]).context("fio's report")?;
        figures(&report["jobs"][0])
            .with_context(|| format!("fio {} on {}\n{errors}", path.display(), settings.uri))
    }
}

fn figures(job: &Value) -> Result<Figures> {
    let error = job["error"].as_i64().unwrap_or(0);
    ensure!(error == 0, "fio ended with error {error}");
    let sum = |name: &str| -> Option<f64> {
        Some(job["read"][name].as_f64()? + job["write"][name].as_f64()?)
    };
    let iops = sum("iops").filter(|iops| *iops > 0.0).context("no IOPS")?;
    let operations = sum("total_ios").context("no operations")?;
    Ok(Figures { iops, operations })
}
