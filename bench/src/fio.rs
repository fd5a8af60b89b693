//! Runs fio and reads its report.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Runs fio with these arguments and variables, which have it print JSON, and returns the reports
/// of its jobs. A job that failed is an error.
///
/// # Errors
/// When fio can't be started, or fails.
pub fn run(fio: &mut Command) -> Result<Vec<Value>> {
    let output = fio.output().context("fio: `cargo ci setup` installs it")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "fio: {}\n{errors}", output.status);
    // Warnings may stand before the JSON.
    let begin = output.stdout.iter().position(|&byte| byte == b'{').unwrap_or(0);
    let mut report: Value =
        serde_json::from_slice(&output.stdout[begin..]).context("fio's report")?;
    let Value::Array(jobs) = report["jobs"].take() else {
        anyhow::bail!("fio's report has no jobs")
    };
    for job in &jobs {
        let error = job["error"].as_i64().unwrap_or(0);
        ensure!(error == 0, "fio ended with error {error}: {}\n{errors}", job["jobname"]);
    }
    Ok(jobs)
}

/// Reads and writes of a job together.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Figures {
    /// Per second.
    pub iops: f64,
    /// How many they were.
    pub operations: f64,
}

impl Figures {
    /// The figures of a job's report.
    ///
    /// # Errors
    /// When the job did nothing.
    pub fn of(job: &Value) -> Result<Self> {
        let sum = |name: &str| Some(job["read"][name].as_f64()? + job["write"][name].as_f64()?);
        let iops = sum("iops").filter(|iops| *iops > 0.0).context("no IOPS")?;
        let operations = sum("total_ios").context("no operations")?;
        Ok(Self { iops, operations })
    }
}
