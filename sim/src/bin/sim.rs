//! Runs the simulator: `sim --seconds 300 --seed 1`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use blockd_mapper::mutation::{self, Mutation, Situation, times_met};
use blockd_sim::sim::marks::{Mark, Marks};
use blockd_sim::sim::runner::{Limits, Total, catch_panics, history, run};
use clap::Parser;

/// Seconds from which on a run has to have met everything.
const LONG: f64 = 120.0;

/// Histories of the real mapper on simulated devices, judged by an oracle.
#[derive(Parser, Debug)]
struct Arguments {
    /// Seconds to go on.
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Seed of all histories.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Histories at the most.
    #[arg(long, default_value_t = u64::MAX)]
    histories: u64,
    /// Threads.
    #[arg(long, default_value_t = 2)]
    workers: usize,
    /// Takes each commit rule out in turn, and fails if one is not missed.
    #[arg(long)]
    mutate: bool,
    /// With --mutate: seconds for each rule at the most.
    #[arg(long, default_value_t = 60.0)]
    limit: f64,
    /// With --mutate or --replay: only this rule, by name.
    #[arg(long)]
    only: Option<String>,
    /// Repeats one history and prints its events.
    #[arg(long)]
    replay: Option<u64>,
    /// Lines of the events to print, from the end.
    #[arg(long, default_value_t = 200)]
    lines: usize,
    /// Prints one JSON object in place of the report.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    catch_panics();
    let ok = match arguments.replay {
        Some(seed) => replay(&arguments, seed),
        None if arguments.mutate => mutate(&arguments),
        None => simulate(&arguments),
    };
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn limits(arguments: &Arguments) -> Limits {
    Limits {
        seconds: arguments.seconds,
        histories: arguments.histories,
        threads: arguments.workers,
        stop_at_first: false,
    }
}

fn named(name: &str) -> Option<Mutation> {
    Mutation::ALL.iter().copied().find(|mutation| format!("{mutation:?}") == name)
}

fn simulate(arguments: &Arguments) -> bool {
    let total = run(arguments.seed, None, limits(arguments));
    let missing = missing(&total.marks);
    let long = arguments.seconds >= LONG;
    let ok = total.violations.is_empty() && total.checks > 0 && (missing.is_empty() || !long);
    if arguments.json {
        println!("{}", json(&total, ok));
        return ok;
    }
    print_marks(&total.marks);
    println!();
    println!("histories             {:>12}", total.histories);
    println!("client operations     {:>12}", total.marks.operations());
    println!("crashes               {:>12}", total.marks.crashes());
    println!("  while opening       {:>12}", total.marks.crashes_in_recovery());
    println!("units compared        {:>12}", total.checks);
    println!("seconds               {:>12.1}", total.seconds);
    println!("operations a second   {:>12.0}", rate(&total));
    println!("violations            {:>12}", total.violations.len());
    if total.checks == 0 {
        println!("FAILED: the oracle compared nothing");
    }
    if !missing.is_empty() {
        let word = if long { "FAILED: never met" } else { "never met" };
        println!("{word}: {}", missing.join(", "));
    }
    for (number, (seed, violation)) in total.violations.iter().take(20) {
        println!("\nhistory {number}: {violation}");
        println!("repeat: cargo run --release -p blockd-tests --bin sim -- --replay {seed}");
    }
    ok
}

/// What was never met, of the histories' marks and of the mapper's own.
fn missing(marks: &Marks) -> Vec<String> {
    let inside = Situation::ALL.iter().filter(|situation| times_met(**situation) == 0);
    let marks = marks.missing().into_iter().map(|mark| format!("{mark:?}"));
    marks.chain(inside.map(|situation| format!("{situation:?}"))).collect()
}

fn rate(total: &Total) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    let operations = total.marks.operations() as f64;
    operations / total.seconds.max(1e-9)
}

fn print_marks(marks: &Marks) {
    for mark in Mark::ALL {
        println!("{:>12}  {}", marks.count(*mark), mark.what());
    }
    for situation in Situation::ALL {
        println!("{:>12}  {}", times_met(*situation), situation.what());
    }
}

fn json(total: &Total, ok: bool) -> String {
    let marks: Vec<String> =
        Mark::ALL.iter().map(|mark| format!("\"{mark:?}\":{}", total.marks.count(*mark))).collect();
    format!(
        "{{\"ok\":{ok},\"histories\":{},\"operations\":{},\"crashes\":{},\
         \"crashes_in_recovery\":{},\"units_compared\":{},\"seconds\":{:.1},\"violations\":{},\
         \"marks\":{{{}}}}}",
        total.histories,
        total.marks.operations(),
        total.marks.crashes(),
        total.marks.crashes_in_recovery(),
        total.checks,
        total.seconds,
        total.violations.len(),
        marks.join(",")
    )
}

fn replay(arguments: &Arguments, seed: u64) -> bool {
    let bias = arguments.only.as_deref().and_then(named);
    if arguments.mutate {
        mutation::set(bias);
    }
    let history = history(seed, bias, true);
    let skip = history.trace.len().saturating_sub(arguments.lines);
    for line in &history.trace[skip..] {
        println!("{line}");
    }
    match &history.violation {
        Some(violation) => println!("\n{violation}"),
        None => println!("\nno violation; {} units compared", history.checks),
    }
    history.violation.is_none()
}

/// Takes each rule out and looks how long it takes until that is noticed.
fn mutate(arguments: &Arguments) -> bool {
    println!("rule  histories  seconds  found         removed");
    let mut all_caught = true;
    for mutation in Mutation::ALL {
        if arguments.only.as_deref().is_some_and(|name| named(name) != Some(*mutation)) {
            continue;
        }
        all_caught &= caught(arguments, *mutation);
    }
    all_caught
}

fn caught(arguments: &Arguments, rule: Mutation) -> bool {
    mutation::set(Some(rule));
    let limits = Limits { stop_at_first: true, seconds: arguments.limit, ..limits(arguments) };
    let total = run(arguments.seed, Some(rule), limits);
    mutation::set(None);
    let (id, what) = (rule.id(), rule.what());
    let Some((seed, violation)) = total.violations.values().next() else {
        println!(
            "{id:<5} {:>9} {:>8.1}  NOT CAUGHT    {rule:?}: {what}",
            total.histories, total.seconds
        );
        return false;
    };
    // The same history with the rule in place has to be clean, or the find says nothing.
    let control = history(*seed, Some(rule), false);
    let clean = control.violation.is_none();
    let note = if clean { "" } else { " (NOT CLEAN WITH THE RULE)" };
    println!(
        "{id:<5} {:>9} {:>8.1}  {:<12}  {rule:?}: {what}{note}",
        total.histories,
        total.seconds,
        format!("{:?}", violation.breach)
    );
    clean
}
