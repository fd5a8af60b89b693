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

/// Lines of a failed step that are printed once more at the end: logs are often cut in the middle.
const LAST_LINES: usize = 30;
/// Steps whose time is printed once more at the end.
const LONGEST: usize = 10;

/// The tally of one invocation.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    passed: u32,
    took: Vec<(Duration, String)>,
    /// The names of failed steps, and the last lines of each.
    failed: Vec<(String, String)>,
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
        self.count(name, watch.elapsed(), "", result);
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
        self.count(name, took, printed, result);
    }

    fn count(&mut self, name: &str, took: Duration, printed: &str, result: Result<Outcome>) {
        let seconds = took.as_secs_f64();
        self.took.push((took, name.to_owned()));
        match result {
            Ok(Outcome::Passed) => {
                self.passed += 1;
                println!("-- {name}: ok, {seconds:.1} s");
            }
            Ok(Outcome::NotRun(reason)) => println!("-- {name}: not run: {reason}"),
            Err(error) => {
                println!("-- {name}: FAILED, {seconds:.1} s\n{error:#}");
                let text = format!("{}\n{error:#}", printed.trim_end());
                let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
                let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("\n");
                self.failed.push((name.to_owned(), last));
            }
        }
    }

    /// The summary: the names of failed steps, then the line that scripts read.
    #[must_use]
    pub(crate) fn summary(&self) -> String {
        let mut text = String::new();
        for (name, _) in &self.failed {
            text.push_str(&format!("failed: {name}\n"));
        }
        text.push_str(&format!("{} passed, {} failed", self.passed, self.failed.len()));
        text
    }

    /// The steps that took longest, a line each.
    fn longest(&self) -> String {
        let mut took = self.took.clone();
        took.sort_by_key(|(time, _)| std::cmp::Reverse(*time));
        let lines = took.iter().take(LONGEST);
        lines.map(|(time, name)| format!("{:5.0} s {name}\n", time.as_secs_f64())).collect()
    }

    /// Prints the longest steps, the ends of failed ones, and the summary. True when nothing failed
    /// and something ran.
    #[must_use]
    pub(crate) fn finish(&self) -> bool {
        print!("== the longest\n{}", self.longest());
        for (name, last) in &self.failed {
            println!("== the end of {name}\n{last}");
        }
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
    fn the_last_lines_of_a_failed_step_are_kept() {
        let mut steps = Steps::new();
        let printed: String = (0..100).map(|line| format!("line {line}\n")).collect();
        steps.ended("long", Duration::ZERO, &printed, Err(anyhow::anyhow!("broken on purpose")));
        let (_, last) = &steps.failed[0];
        assert_eq!(last.lines().count(), LAST_LINES);
        assert!(last.ends_with("line 99\nbroken on purpose"), "{last}");
    }

    #[test]
    fn the_longest_steps_come_first() {
        let mut steps = Steps::new();
        for (name, seconds) in [("short", 2), ("long", 61), ("middle", 30)] {
            steps.ended(name, Duration::from_secs(seconds), "", Ok(Outcome::Passed));
        }
        assert_eq!(steps.longest(), "   61 s long\n   30 s middle\n    2 s short\n");
    }

    #[test]
    fn a_run_in_which_nothing_ran_is_not_a_success() {
        let mut steps = Steps::new();
        steps.run("only", || Ok(Outcome::NotRun("no such tool")));
        assert_eq!(steps.summary(), "0 passed, 0 failed");
        assert!(!steps.finish());
    }
}
