//! Checks the models of the project: random histories, mutations, complete enumerations.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Duration;

use blockd_sim::model::runner::Limits;
use clap::{Parser, ValueEnum};

mod commits;
mod hosts;
mod report;

/// Models of the mapper's commit rules, and of several hosts on one array.
#[derive(Debug, Parser)]
struct Args {
    /// Rules that are tried: those of commits, with the claim page, or those of several hosts.
    #[arg(value_enum, default_value_t = Subject::Commits)]
    subject: Subject,
    /// How long random histories run.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Random histories, at most.
    #[arg(long, default_value_t = u64::MAX, hide_default_value = true)]
    histories: u64,
    /// First seed; drawn if not given (1 with --mutate).
    #[arg(long)]
    seed: Option<u64>,
    /// Threads for random histories.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=2))]
    threads: u64,
    /// Remove each rule in turn; every removal must be caught.
    #[arg(long)]
    mutate: bool,
    /// Enumerate all short histories.
    #[arg(long)]
    exhaustive: bool,
    /// Seconds that each enumeration may take; one that takes longer fails.
    #[arg(long, default_value_t = 40)]
    limit: u64,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Show the history of one seed, reduced to the steps that matter.
    #[arg(long, value_name = "SEED")]
    replay: Option<u64>,
    /// Run without this rule form (a name or rule of the --mutate table).
    #[arg(long, value_name = "MUTATION")]
    without: Option<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Subject {
    /// The commit rules of the mapper, and the claim page.
    Commits,
    /// Several hosts on one array.
    Hosts,
}

impl Args {
    /// The seed, drawn if none is given.
    fn seed(&self) -> u64 {
        self.seed.unwrap_or_else(|| fastrand::u64(..))
    }

    /// Limits of random histories with all rules in place.
    fn limits(&self) -> Limits {
        Limits {
            time: Duration::from_secs(self.seconds),
            histories: self.histories.div_ceil(self.threads),
            violations: 100,
            threads: self.threads,
        }
    }

    /// Prints the command that repeats a violation.
    fn print_replay(&self, seed: u64) {
        let subject = match self.subject {
            Subject::Commits => "",
            Subject::Hosts => "hosts ",
        };
        let without = self.without.as_ref().map_or_else(String::new, |m| format!(" --without {m}"));
        eprintln!("replay: cargo ci model {subject}--replay {seed}{without}");
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let good = match args.subject {
        Subject::Commits => commits::run(&args),
        Subject::Hosts => hosts::run(&args),
    };
    match good {
        None => {
            eprintln!("no such mutation; --mutate lists them");
            ExitCode::from(2)
        }
        Some(true) => ExitCode::SUCCESS,
        Some(false) => ExitCode::FAILURE,
    }
}
