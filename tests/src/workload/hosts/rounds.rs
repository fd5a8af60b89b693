//! Rounds of one part of the laboratory's work, counted over several runs.

use std::fmt;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use blockd_testkit::clock::Clock;
use blockd_testkit::tools;

use super::super::Run;

/// Between two lines of progress.
const PROGRESS: Duration = Duration::from_secs(20);

/// One part of the work, and how much of it.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Its name on the command line.
    pub name: &'static str,
    /// Kernel, form and seed.
    pub run: Run,
    /// Rounds in all. Those of earlier runs with the same kernel and seed count, unless the form
    /// is the short one.
    pub rounds: u64,
}

impl Part {
    /// Does the rounds that are missing. Each has random numbers of its own, so that a round is the
    /// same whether the ones before it were done in this run or not.
    pub(super) fn each(
        &self,
        mut round: impl FnMut(u64, &mut fastrand::Rng) -> Result<()>,
    ) -> Result<()> {
        let counted = self.counted()?;
        let before = if self.run.is_short() { 0 } else { self.before(&counted)? };
        let mut said = Clock::start();
        for number in before..self.rounds {
            let mut rng = fastrand::Rng::with_seed(self.run.seed.wrapping_mul(1 << 20) + number);
            round(number, &mut rng).with_context(|| format!("{}, round {number}", self.name))?;
            if !self.run.is_short() {
                fs::write(&counted, (number + 1).to_string())?;
            }
            if said.elapsed() >= PROGRESS {
                println!("{}: {} of {} rounds", self.name, number + 1, self.rounds);
                said = Clock::start();
            }
        }
        Ok(())
    }

    /// How long each round waits for what is measured, those of earlier runs among them if their
    /// rounds count.
    pub(super) fn waits(&self) -> Result<Waits> {
        let counted = self.counted()?;
        let mut name = counted.clone().into_os_string();
        name.push(".seconds");
        let file = PathBuf::from(name);
        if self.run.is_short() {
            return Ok(Waits { file: None, seconds: Vec::new() });
        }
        if done(&counted)? == 0 || !file.exists() {
            File::create(&file)?;
        }
        let text = fs::read_to_string(&file)?;
        let seconds = text.lines().map(str::parse).collect::<Result<_, _>>();
        Ok(Waits {
            seconds: seconds.with_context(|| file.display().to_string())?,
            file: Some(file),
        })
    }

    /// The rounds that earlier runs have done.
    fn before(&self, counted: &Path) -> Result<u64> {
        let before = done(counted)?;
        if before > 0 {
            println!("{}: {before} rounds of earlier runs, in {}", self.name, counted.display());
        }
        Ok(before)
    }

    fn counted(&self) -> Result<PathBuf> {
        let folder = tools::build_folder()?.join("vm/hosts");
        fs::create_dir_all(&folder)?;
        let (kernel, seed) = (self.run.kernel.name(), self.run.seed);
        Ok(folder.join(format!("{}-{kernel}-{seed}", self.name)))
    }
}

fn done(counted: &Path) -> Result<u64> {
    let Ok(text) = fs::read_to_string(counted) else { return Ok(0) };
    text.trim().parse().with_context(|| counted.display().to_string())
}

/// Seconds, one number for each wait that was measured, also if its round failed afterwards.
#[derive(Debug)]
pub(super) struct Waits {
    file: Option<PathBuf>,
    seconds: Vec<f64>,
}

impl Waits {
    pub(super) fn push(&mut self, seconds: f64) -> Result<()> {
        self.seconds.push(seconds);
        let Some(file) = &self.file else { return Ok(()) };
        let mut file = File::options().append(true).open(file)?;
        Ok(file.write_all(format!("{seconds:.3}\n").as_bytes())?)
    }
}

impl fmt::Display for Waits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut sorted = self.seconds.clone();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len();
        let at = |percent: usize| sorted.get((count * percent).div_ceil(100).saturating_sub(1));
        let [median, most, slowest] = [50, 99, 100].map(|part| at(part).copied().unwrap_or(0.0));
        write!(f, "median {median:.1} s, 99 % within {most:.1} s, slowest {slowest:.1} s ({count})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_summed_up_by_their_ranks() {
        let mut waits = Waits { file: None, seconds: (1..200).map(f64::from).collect() };
        waits.push(0.5).unwrap();
        let text = "median 99.0 s, 99 % within 197.0 s, slowest 199.0 s (200)";
        assert_eq!(waits.to_string(), text);
        let none = Waits { file: None, seconds: Vec::new() };
        assert_eq!(none.to_string(), "median 0.0 s, 99 % within 0.0 s, slowest 0.0 s (0)");
    }
}
