//! Enumerates the crashes of short traces: `crash --traces 20 --seed 1`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use blockd_tests::sim::enumerate::{Counts, Depth, trace};
use blockd_tests::sim::runner::{clock, seed_of};
use clap::Parser;

/// Every crash at every boundary of device IO, recovered and compared.
#[derive(Parser, Debug)]
struct Arguments {
    /// Traces at the most.
    #[arg(long, default_value_t = 20)]
    traces: u64,
    /// Seed of the traces.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only the trace with this seed.
    #[arg(long)]
    only: Option<u64>,
    /// Random subsets of the volatile writes at each boundary.
    #[arg(long, default_value_t = 16)]
    subsets: usize,
    /// Crash the opening too, at every so many boundaries; 0: never.
    #[arg(long, default_value_t = 16)]
    nested_every: u64,
    /// Seconds after which no new trace is begun.
    #[arg(long, default_value_t = 60.0)]
    seconds: f64,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let depth = Depth { subsets: arguments.subsets, nested_every: arguments.nested_every };
    let start = clock();
    let mut counts = Counts::default();
    let mut failures = 0;
    for number in 0..arguments.traces {
        let seed = arguments.only.unwrap_or_else(|| seed_of(arguments.seed, number));
        if let Err(found) = trace(seed, depth, &mut counts) {
            failures += 1;
            println!("boundary {}, {}: {}", found.boundary, found.crash, found.violation);
            println!(
                "repeat: cargo run --release -p blockd-tests --bin crash -- --only {seed} --traces 1"
            );
        }
        if start.elapsed().as_secs_f64() > arguments.seconds {
            break;
        }
    }
    println!("traces        {:>12}", counts.traces);
    println!("boundaries    {:>12}", counts.boundaries);
    println!("crash points  {:>12}", counts.crash_points);
    println!("  in opening  {:>12}", counts.nested);
    println!("recoveries    {:>12}", counts.recoveries);
    println!("units compared{:>12}", counts.checks);
    println!("seconds       {:>12.1}", start.elapsed().as_secs_f64());
    println!("violations    {:>12}", failures);
    if failures == 0 && counts.checks > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
