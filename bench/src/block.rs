//! Runs fio's job files on block devices and NBD exports, several in turn in one run of fio: it
//! takes longer to start than most of the runs last.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::fio::{self, Figures};

/// The job files, and how they are run.
#[derive(Clone, Debug)]
pub struct Jobs {
    /// The folder of the job files.
    pub folder: PathBuf,
    /// fio's engine for block devices: `libaio` or `io_uring`.
    pub engine: String,
    /// The folder of composed files and of fio's output; fio runs there.
    pub scratch: PathBuf,
}

/// The device of a run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// A block device.
    Device(PathBuf),
    /// An NBD export, by its URI.
    Nbd(String),
}

/// One turn of a run.
#[derive(Clone, Debug)]
pub struct Turn {
    /// On what.
    pub place: Place,
    /// The process that serves it, whose CPU is measured.
    pub server: Option<u32>,
}

/// The parameters of the job files.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Operations in flight.
    pub depth: u32,
    /// Seconds of a run by time.
    pub seconds: f64,
    /// For the addresses.
    pub seed: u64,
    /// How much of the device is used; `100%` is all.
    pub size: String,
    /// Bytes to move, of a run by amount.
    pub bytes: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self { depth: 32, seconds: 1.0, seed: 1, size: "100%".to_owned(), bytes: 0 }
    }
}

/// fio's results of a turn.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sample {
    /// Reads and writes per second.
    pub iops: f64,
    /// How many they were.
    pub operations: f64,
    /// Mean time of one, in microseconds.
    pub latency_us: f64,
    /// The longest, in seconds.
    pub longest_s: f64,
    /// Microseconds of the server's CPU for each.
    pub cpu_us: Option<f64>,
}

/// How the turns of a run follow each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// One after the other.
    InTurn,
    /// All at once.
    Together,
}

impl Jobs {
    /// Runs one job file on each of the places in turn.
    ///
    /// # Errors
    /// When fio can't be started, or ends with an error on any of them.
    pub fn run(&self, job: &str, settings: &Settings, turns: &[Turn]) -> Result<Vec<Sample>> {
        self.run_ordered(job, settings, turns, Order::InTurn)
    }

    /// Like [`Self::run`], one after the other or together.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_ordered(
        &self,
        job: &str,
        settings: &Settings,
        turns: &[Turn],
        order: Order,
    ) -> Result<Vec<Sample>> {
        let path = self.folder.join(format!("block-{job}.fio"));
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let text = compose(&text, turns, order).with_context(|| path.display().to_string())?;
        let composed = self.scratch.join(format!("{job}.fio"));
        fs::write(&composed, text)?;
        let milliseconds = (settings.seconds * 1000.0).round();
        let mut fio = Command::new("fio");
        fio.arg("--output-format=json").arg(&composed).current_dir(&self.scratch);
        fio.env("ENGINE", &self.engine).env("DEPTH", settings.depth.to_string());
        fio.env("RUNTIME", format!("{milliseconds}ms")).env("SEED", settings.seed.to_string());
        fio.env("SIZE", &settings.size).env("IO_SIZE", settings.bytes.to_string());
        let jobs = fio::run(&mut fio).with_context(|| path.display().to_string())?;
        ensure!(jobs.len() == turns.len(), "fio has run {} of {}", jobs.len(), turns.len());
        let samples = jobs.iter().zip(turns).enumerate();
        samples
            .map(|(number, (job, turn))| {
                self.sample(number, job, turn).with_context(|| format!("{:?}", turn.place))
            })
            .collect()
    }

    fn sample(&self, number: usize, job: &Value, turn: &Turn) -> Result<Sample> {
        let Figures { iops, operations } = Figures::of(job)?;
        let (read, write) = (&job["read"]["lat_ns"], &job["write"]["lat_ns"]);
        let mean = |side: &Value, count: &Value| {
            side["mean"].as_f64().unwrap_or(0.0) * count.as_f64().unwrap_or(0.0)
        };
        let total = mean(read, &job["read"]["total_ios"]) + mean(write, &job["write"]["total_ios"]);
        let longest = |side: &Value| side["max"].as_f64().unwrap_or(0.0);
        let cpu_us = match turn.server {
            Some(_) => Some(self.cpu_ns(number)? / 1000.0 / operations),
            None => None,
        };
        Ok(Sample {
            iops,
            operations,
            latency_us: total / operations / 1000.0,
            longest_s: longest(read).max(longest(write)) / 1e9,
            cpu_us,
        })
    }

    /// CPU time of the server's threads between the two files that fio wrote.
    fn cpu_ns(&self, number: usize) -> Result<f64> {
        let read = |when: &str| -> Result<f64> {
            let path = self.scratch.join(format!("{}.{when}.txt", section(number)));
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            let _ = fs::remove_file(&path);
            schedstat(&text)
        };
        Ok(read("postrun")? - read("prerun")?)
    }
}

impl Turn {
    /// On a block device.
    #[must_use]
    pub fn device(path: &Path, server: Option<u32>) -> Self {
        Self { place: Place::Device(path.to_owned()), server }
    }
}

/// Each line is a thread: nanoseconds on a processor, nanoseconds waiting for one, times on one. Of
/// a thread that has just ended `cat` complains.
fn schedstat(text: &str) -> Result<f64> {
    let mut sum = 0.0;
    let lines = text.lines().filter(|line| !line.starts_with("cat: can't open '/proc/"));
    ensure!(lines.clone().count() > 0, "no threads: {text}");
    for line in lines {
        let first = line.split_whitespace().next().unwrap_or_default();
        let ns: f64 = first.parse().with_context(|| format!("schedstat: {line}"))?;
        sum += ns;
    }
    Ok(sum)
}

fn section(number: usize) -> String {
    format!("turn-{number}")
}

/// A job file whose last section stands once for each turn, with its own place.
fn compose(text: &str, turns: &[Turn], order: Order) -> Result<String> {
    let at = text.rfind("\n[").context("no section")?;
    let (global, section_text) = text.split_at(at + 1);
    let options: Vec<&str> =
        section_text.lines().skip(1).filter(|line| !line.starts_with("filename=")).collect();
    let mut composed = global.to_owned();
    for (number, turn) in turns.iter().enumerate() {
        composed += &format!("[{}]\n", section(number));
        match &turn.place {
            Place::Device(path) => composed += &format!("filename={}\n", path.display()),
            Place::Nbd(uri) => composed += &format!("ioengine=nbd\nuri={uri}\n"),
        }
        composed += &options.join("\n");
        composed += "\n";
        if order == Order::InTurn {
            composed += "stonewall\n";
        }
        if let Some(pid) = turn.server {
            for when in ["prerun", "postrun"] {
                composed += &format!("exec_{when}=cat /proc/{pid}/task/*/schedstat\n");
            }
        }
    }
    Ok(composed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_file_is_written_once_for_each_place() {
        let text = "; why\n[global]\ndirect=1\n[a]\nfilename=${DEVICE}\nbs=4k\n";
        let turns = [
            Turn::device(Path::new("/dev/x"), Some(7)),
            Turn { place: Place::Nbd("nbd://y".to_owned()), server: None },
        ];
        let composed = compose(text, &turns, Order::InTurn).unwrap();
        assert_eq!(
            composed,
            "; why\n[global]\ndirect=1\n[turn-0]\nfilename=/dev/x\nbs=4k\nstonewall\n\
             exec_prerun=cat /proc/7/task/*/schedstat\n\
             exec_postrun=cat /proc/7/task/*/schedstat\n\
             [turn-1]\nioengine=nbd\nuri=nbd://y\nbs=4k\nstonewall\n"
        );
        assert!(!compose(text, &turns, Order::Together).unwrap().contains("stonewall"));
        assert!(compose("nothing", &turns, Order::InTurn).is_err());
    }

    #[test]
    fn times_of_threads_are_added() {
        assert_eq!(schedstat("100 5 1\n20 0 3\n").unwrap(), 120.0);
        let ended = "100 5 1\ncat: can't open '/proc/7/task/9/schedstat': No such file\n20 0 3\n";
        assert_eq!(schedstat(ended).unwrap(), 120.0);
        assert!(schedstat("cat: no such file").is_err());
        assert!(schedstat(&ended.replace("100 5 1", "").replace("20 0 3", "")).is_err());
    }

    #[test]
    fn every_job_file_composes() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fio");
        let mut found = 0;
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().unwrap().to_str().unwrap().starts_with("block-") {
                let text = fs::read_to_string(&path).unwrap();
                let turns = [Turn::device(Path::new("/dev/x"), None)];
                let composed = compose(&text, &turns, Order::InTurn).unwrap();
                assert!(composed.contains("filename=/dev/x\nsize=${SIZE}\n"), "{composed}");
                assert!(!composed.contains("${DEVICE}\nsize"), "{composed}");
                found += 1;
            }
        }
        assert_eq!(found, 8);
    }
}
