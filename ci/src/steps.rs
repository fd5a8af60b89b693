//! Runs named steps one after another, prints how long each took, and counts.

use std::time::Duration;

use anyhow::Result;

use blockd_testkit::clock::Clock;

/// How a step ended when it did not fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The step ran and succeeded.
    Passed,
    /// The step could not run, for a reason that cannot be fixed on this machine. Printed, never
    /// counted as passed.
    NotRun(&'static str),
}

/// The tally of one invocation.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    passed: u32,
    failed: Vec<String>,
}

impl Steps {
    /// An empty tally.
    #[must_use]
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Runs one step. A failure is printed and counted; later steps still run, since one run that
    /// shows every failure is worth more than several that show one each.
    pub(crate) fn run(&mut self, name: &str, step: impl FnOnce() -> Result<Outcome>) {
        println!("== {name}");
        let watch = Clock::start();
        let result = step();
        self.count(name, watch.elapsed(), result);
    }

    /// Counts a step that ran beside others, and shows its output.
    pub(crate) fn ended(
        &mut self,
        name: &str,
        took: Duration,
        printed: &str,
        result: Result<Outcome>,
    ) {
        println!("== {name}\n{}", printed.trim_end());
        self.count(name, took, result);
    }

    fn count(&mut self, name: &str, took: Duration, result: Result<Outcome>) {
        let seconds = took.as_secs_f64();
        match result {
            Ok(Outcome::Passed) => {
                self.passed += 1;
                println!("-- {name}: ok, {seconds:.1} s");
            }
            Ok(Outcome::NotRun(reason)) => println!("-- {name}: not run: {reason}"),
            Err(error) => {
                self.failed.push(name.to_owned());
                println!("-- {name}: FAILED, {seconds:.1} s\n{error:#}");
            }
        }
    }

    /// The summary: the names of failed steps, then the line that scripts read.
    #[must_use]
    pub(crate) fn summary(&self) -> String {
        let mut text = String::new();
        for name in &self.failed {
            text.push_str(&format!("failed: {name}\n"));
        }
        text.push_str(&format!("{} passed, {} failed", self.passed, self.failed.len()));
        text
    }

    /// Prints the summary. True when nothing failed and something ran.
    #[must_use]
    pub(crate) fn finish(&self) -> bool {
        println!("{}", self.summary());
        self.failed.is_empty() && self.passed > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_runs_and_the_summary_counts_them() {
        let mut steps = Steps::new();
        steps.run("first", || Ok(Outcome::Passed));
        steps.run("second", || anyhow::bail!("broken on purpose"));
        steps.run("third", || Ok(Outcome::NotRun("no such tool")));
        steps.run("fourth", || Ok(Outcome::Passed));
        assert_eq!(steps.summary(), "failed: second\n2 passed, 1 failed");
        assert!(!steps.finish());
    }

    #[test]
    fn a_run_in_which_nothing_ran_is_not_a_success() {
        let mut steps = Steps::new();
        steps.run("only", || Ok(Outcome::NotRun("no such tool")));
        assert_eq!(steps.summary(), "0 passed, 0 failed");
        assert!(!steps.finish());
    }
}
