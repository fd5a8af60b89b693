//! Rounds of one part of the laboratory's work, counted over several runs.

use std::fs;
use std::path::PathBuf;
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

    /// The rounds that earlier runs have done.
    fn before(&self, counted: &PathBuf) -> Result<u64> {
        let Ok(text) = fs::read_to_string(counted) else { return Ok(0) };
        let before = text.trim().parse().with_context(|| counted.display().to_string())?;
        println!("{}: {before} rounds of earlier runs, in {}", self.name, counted.display());
        Ok(before)
    }

    fn counted(&self) -> Result<PathBuf> {
        let folder = tools::build_folder()?.join("vm/hosts");
        fs::create_dir_all(&folder)?;
        let (kernel, seed) = (self.run.kernel.name(), self.run.seed);
        Ok(folder.join(format!("{}-{kernel}-{seed}", self.name)))
    }
}
