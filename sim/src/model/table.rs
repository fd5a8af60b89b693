//! The mutation table: every rule's removal, and how it was caught.

use std::time::Duration;

use super::directed::Directed;
use super::mutation::Mutation;
use super::oracle::FaultKind;
use super::runner::{Limits, run_random};

/// One line of the table.
#[derive(Clone, Debug)]
pub struct Line {
    /// The removed rule.
    pub mutation: Mutation,
    /// Random histories run.
    pub histories: u64,
    /// Violations in them.
    pub violations: u64,
    /// Random histories until the first violation; 0 if there was none.
    pub until_first: u64,
    /// The kind of the first violation.
    pub kind: Option<FaultKind>,
    /// Scripted histories for this mutation.
    pub scripts: usize,
    /// Scripted histories that end in a violation.
    pub scripts_caught: usize,
    /// Time of the random histories.
    pub elapsed: Duration,
}

impl Line {
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
    let report = run_random(seed, mutation, limits);
    let scripts = Directed::of(mutation).count();
    let caught = Directed::of(mutation).filter(|d| d.run(mutation).fault.is_some()).count();
    let scripted = Directed::of(mutation).find_map(|d| d.run(mutation).fault);
    Line {
        mutation,
        histories: report.histories,
        violations: report.violations,
        until_first: report.until_first,
        kind: report
            .first
            .map(|(_, fault)| fault.kind)
            .or_else(|| scripted.map(|fault| fault.kind)),
        scripts,
        scripts_caught: caught,
        elapsed: report.elapsed,
    }
}
