//! Enumerates the crashes of short traces, written by hand and drawn: `crash --traces 20 --seed 1`.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::{Duration, Instant};

use blockd_sim::crash::{enumerate, script::SCRIPTS};
use blockd_sim::sim::enumerate::{Counts, Depth, trace_until};
use blockd_sim::sim::runner::{clock, seed_of};
use clap::Parser;

const REPEAT: &str = "repeat: cargo run --release -p blockd-tests --bin crash --";

/// The share of the time for the traces written by hand.
const SCRIPTS_SHARE: f64 = 0.7;

/// Every crash at every boundary of device IO, recovered and compared.
#[derive(Parser, Debug)]
struct Arguments {
    /// Drawn traces at the most, after those written by hand.
    #[arg(long, default_value_t = 20)]
    traces: u64,
    /// Seed of the traces.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only the drawn trace with this seed.
    #[arg(long)]
    only: Option<u64>,
    /// Only the trace of this name, of those written by hand.
    #[arg(long)]
    script: Option<String>,
    /// Only this boundary of that trace.
    #[arg(long)]
    boundary: Option<usize>,
    /// Random subsets of the volatile writes at each boundary.
    #[arg(long, default_value_t = 16)]
    subsets: usize,
    /// Crash the opening too, once in this many crashes (drawn traces: boundaries); 0: never.
    #[arg(long, default_value_t = 16)]
    nested_every: u64,
    /// Seconds for everything.
    #[arg(long, default_value_t = 40.0)]
    seconds: f64,
    /// Print the figures as JSON.
    #[arg(long)]
    json: bool,
}

/// The result of a run.
#[derive(Default)]
struct Total {
    counts: Counts,
    violations: u64,
    cut_short: u64,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let (start, mut total) = (clock(), Total::default());
    let end = start + Duration::from_secs_f64(arguments.seconds.clamp(0.0, 1e6));
    let depth = Depth { subsets: arguments.subsets, nested_every: arguments.nested_every };
    if arguments.only.is_none() {
        let (share, alone) = (arguments.seconds * SCRIPTS_SHARE, arguments.script.is_some());
        let until = start + Duration::from_secs_f64(share.clamp(0.0, 1e6));
        scripts(&arguments, depth, if alone { end } else { until }, &mut total);
    }
    if arguments.script.is_none() {
        drawn(&arguments, depth, end, &mut total);
    }
    report(&total, start, arguments.json);
    // A run that checked nothing has shown nothing.
    let counts = total.counts;
    let worked = counts.checks > 0
        && counts.crash_points > 0
        && (counts.nested > 0 || depth.nested_every == 0);
    if total.violations == 0 && worked { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn scripts(arguments: &Arguments, depth: Depth, end: Instant, total: &mut Total) {
    let wanted = |name: &str| arguments.script.as_deref().is_none_or(|only| only == name);
    let scripts: Vec<_> = SCRIPTS.iter().filter(|script| wanted(script.name)).collect();
    for (number, script) in scripts.iter().enumerate() {
        // Each may take its share of the remaining time, so that each gets some.
        let left = end.saturating_duration_since(clock());
        let share = u32::try_from(scripts.len() - number).unwrap_or(1);
        let until = clock() + left / share;
        let at = arguments.boundary;
        let seed = arguments.seed;
        match enumerate(script, at, depth, seed, until, &mut total.counts) {
            Ok(whole) => total.cut_short += u64::from(!whole),
            Err(finding) => {
                total.violations += 1;
                println!("{finding}");
                let name = finding.script;
                println!(
                    "{REPEAT} --seed {seed} --script {name} --boundary {} --nested-every 1",
                    finding.boundary
                );
            }
        }
    }
}

fn drawn(arguments: &Arguments, depth: Depth, end: Instant, total: &mut Total) {
    let traces = if arguments.only.is_some() { 1 } else { arguments.traces };
    for number in 0..traces {
        if clock() > end {
            return;
        }
        let seed = arguments.only.unwrap_or_else(|| seed_of(arguments.seed, number));
        match trace_until(seed, depth, end, &mut total.counts) {
            Ok(whole) => total.cut_short += u64::from(!whole),
            Err(found) => {
                total.violations += 1;
                println!("boundary {}, {}: {}", found.boundary, found.crash, found.violation);
                println!("{REPEAT} --only {seed} --nested-every {}", depth.nested_every);
            }
        }
    }
}

fn report(total: &Total, start: Instant, json: bool) {
    let counts = total.counts;
    let figures = [
        ("traces", counts.traces),
        ("traces cut short by the time limit", total.cut_short),
        ("boundaries", counts.boundaries),
        ("crash points", counts.crash_points),
        ("crash points during recovery", counts.nested),
        ("recoveries", counts.recoveries),
        ("units compared", counts.checks),
        ("violations", total.violations),
    ];
    let seconds = start.elapsed().as_secs_f64();
    if json {
        let mut map: serde_json::Map<String, serde_json::Value> =
            figures.iter().map(|(name, value)| (name.replace(' ', "_"), (*value).into())).collect();
        map.insert("seconds".into(), seconds.into());
        println!("{}", serde_json::Value::Object(map));
        return;
    }
    for (name, value) in figures {
        println!("{name:<36}{value:>12}");
    }
    println!("{:<36}{seconds:>12.1}", "seconds");
}
