//! The mutation table: every rule's removal, and how it was caught.

use std::time::Duration;

use super::directed::Directed;
use super::generate::Commits;
use super::mutation::Mutation;
use super::runner::{Limits, Subject, run_random};

/// One line of the table.
#[derive(Clone, Debug)]
pub struct Line {
    /// The removed rule.
    pub rule: &'static str,
    /// The name of the mutation.
    pub name: String,
    /// Describes an implementation with this mistake.
    pub what: &'static str,
    /// Random histories run.
    pub histories: u64,
    /// Violations in them.
    pub violations: u64,
    /// Random histories until the first violation; 0 if there was none.
    pub until_first: u64,
    /// Scripted histories for this mutation.
    pub scripts: usize,
    /// Scripted histories that end in a violation.
    pub scripts_caught: usize,
    /// Time of the random histories.
    pub elapsed: Duration,
}

impl Line {
    /// Runs random histories without a rule; `scripts` says for each scripted history made for it
    /// whether it ended in a violation.
    pub fn of<S: Subject>(
        (rule, name, what): (&'static str, String, &'static str),
        subject: &S,
        seed: u64,
        limits: Limits,
        scripts: &[bool],
    ) -> Self {
        let report = run_random(subject, seed, limits);
        Self {
            rule,
            name,
            what,
            histories: report.histories,
            violations: report.violations,
            until_first: report.until_first,
            scripts: scripts.len(),
            scripts_caught: scripts.iter().filter(|caught| **caught).count(),
            elapsed: report.elapsed,
        }
    }

    /// True if the removal did not go unnoticed.
    pub fn caught(&self) -> bool {
        let scripted = self.scripts > 0 && self.scripts_caught == self.scripts;
        scripted || (self.scripts == 0 && self.violations > 0)
    }

    /// How it was caught.
    pub fn how(&self) -> &'static str {
        match (self.violations > 0, self.scripts_caught > 0) {
            (true, true) => "random, directed",
            (true, false) => "random",
            (false, true) => "directed",
            (false, false) => "NOT CAUGHT",
        }
    }
}

/// Tries one mutation: random histories, then the scripted ones made for it.
pub fn try_mutation(mutation: Mutation, seed: u64, limits: Limits) -> Line {
    let caught = |d: &Directed| d.run(mutation).fault.is_some();
    let scripts: Vec<bool> = Directed::of(mutation).map(caught).collect();
    let rule = (mutation.rule(), format!("{mutation:?}"), mutation.what());
    Line::of(rule, &Commits::new(mutation), seed, limits, &scripts)
}
