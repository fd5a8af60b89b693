//! Runs the simulator: `sim --seconds 300 --seed 1`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use blockd_mapper::mutation::{self, Mutation, Situation, times_met};
use blockd_sim::sim::marks::{Mark, Marks};
use blockd_sim::sim::profile::Aim;
use blockd_sim::sim::runner::{Limits, Total, catch_panics, history, run};
use clap::Parser;

/// Seconds from which on a run has to have met everything.
const LONG: f64 = 120.0;

/// Seconds from which on a run has to have met [`SHARED`].
const SHORT: f64 = 20.0;

/// The ways of a composite entry, all of which a short run meets, and one with `--profile
/// snapshots` has to meet.
const SHARED: [Situation; 4] =
    [Situation::Redirected, Situation::OverlayCopied, Situation::FoldedDown, Situation::FoldedUp];

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
    /// With --mutate: each rule has to be noticed from this many fixed seeds, from --seed on.
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// With --mutate: and from this many seeds that are drawn now, and printed.
    #[arg(long, default_value_t = 0)]
    fresh: u64,
    /// Only histories of this kind.
    #[arg(long, value_name = "NAME", conflicts_with = "mutate")]
    profile: Option<Profile>,
    /// Histories as they come: no scripts, and with --mutate no profiles bent towards the rule.
    #[arg(long)]
    by_chance: bool,
    /// With --mutate or --replay: only this rule, by name. May be given more than once.
    #[arg(long)]
    only: Vec<String>,
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

#[derive(clap::ValueEnum, Clone, Copy, Debug)]
enum Profile {
    /// A snapshot every 50 requests, deleted 20 requests later, in pools with composite entries
    Snapshots,
    /// Devices that leave the pool, stay after all or are evened out, under writes and crashes
    Evacuation,
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
        by_chance: arguments.by_chance,
    }
}

fn named(name: &str) -> Option<Mutation> {
    Mutation::ALL.iter().copied().find(|mutation| format!("{mutation:?}") == name)
}

/// The aim of a run without `--mutate`.
fn aim(arguments: &Arguments) -> Aim {
    match arguments.profile {
        Some(Profile::Snapshots) => Aim::Snapshots,
        Some(Profile::Evacuation) => Aim::Evacuation,
        None => Aim::Any,
    }
}

fn simulate(arguments: &Arguments) -> bool {
    let aim = aim(arguments);
    let total = run(arguments.seed, aim, limits(arguments));
    let (missing, needed) = missing(&total.marks, aim, arguments.seconds);
    let ok = total.violations.is_empty() && total.checks > 0 && needed.is_empty();
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
    for (word, names) in [("FAILED: never met", needed), ("never met", missing)] {
        if !names.is_empty() {
            println!("{word}: {}", names.join(", "));
        }
    }
    for (number, (seed, violation)) in total.violations.iter().take(20) {
        println!("\nhistory {number}: {violation}");
        let profile = match aim {
            Aim::Snapshots => " --profile snapshots",
            Aim::Evacuation => " --profile evacuation",
            _ => "",
        };
        println!("repeat: cargo ci sim --replay {seed}{profile}");
    }
    ok
}

/// Returns the marks of the histories and of the mapper that no history covered: those that this
/// run may do without, and those that it may not.
fn missing(marks: &Marks, aim: Aim, seconds: f64) -> (Vec<String>, Vec<String>) {
    let all = aim == Aim::Any && seconds >= LONG;
    let shared = |situation| seconds >= SHORT && SHARED.contains(situation);
    let marks = marks.missing().into_iter().map(|mark| (format!("{mark:?}"), all));
    let inside = Situation::ALL.iter().filter(|situation| times_met(**situation) == 0);
    let inside = inside.map(|situation| (format!("{situation:?}"), all || shared(situation)));
    let (needed, missing): (Vec<_>, Vec<_>) = marks.chain(inside).partition(|(_, needed)| *needed);
    let names = |pairs: Vec<(String, bool)>| pairs.into_iter().map(|(name, _)| name).collect();
    (names(missing), names(needed))
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
    let marks = Mark::ALL.iter().map(|mark| (format!("{mark:?}"), total.marks.count(*mark)));
    let inside = Situation::ALL.iter().map(|met| (format!("{met:?}"), times_met(*met)));
    let marks: Vec<String> =
        marks.chain(inside).map(|(name, count)| format!("\"{name}\":{count}")).collect();
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
    let rule = arguments.only.first().and_then(|name| named(name));
    if arguments.mutate {
        mutation::set(rule);
    }
    let history = history(seed, rule.map_or_else(|| aim(arguments), Aim::Rule), true);
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

/// Takes each rule out and measures how long it takes until that is noticed, from every seed.
fn mutate(arguments: &Arguments) -> bool {
    if let Some(unknown) = arguments.only.iter().find(|name| named(name).is_none()) {
        println!("--only {unknown}: no such rule");
        return false;
    }
    let fixed = (0..arguments.seeds).map(|number| arguments.seed.wrapping_add(number));
    let fresh: Vec<u64> = (0..arguments.fresh).map(|_| fastrand::u64(..)).collect();
    if !fresh.is_empty() {
        println!("fresh seeds: {fresh:?}");
    }
    let seeds: Vec<u64> = fixed.chain(fresh).collect();
    println!("rule  histories  seconds  found         removed");
    let mut all_caught = true;
    for mutation in Mutation::ALL {
        let wanted = arguments.only.iter().any(|name| named(name) == Some(*mutation));
        if wanted || arguments.only.is_empty() {
            all_caught &= caught_from_all(arguments, *mutation, &seeds);
        }
    }
    all_caught
}

/// One line for a rule: from the seed that took longest, or the first that did not notice it.
fn caught_from_all(arguments: &Arguments, rule: Mutation, seeds: &[u64]) -> bool {
    let mut worst: Option<Caught> = None;
    for seed in seeds {
        let caught = caught(arguments, rule, *seed);
        let ends = !caught.noticed;
        if ends || worst.as_ref().is_none_or(|worst| worst.seconds < caught.seconds) {
            worst = Some(caught);
        }
        if ends {
            break;
        }
    }
    let Some(worst) = worst else { return false };
    let (id, what) = (rule.id(), rule.what());
    println!(
        "{id:<5} {:>9} {:>8.1}  {:<12}  {rule:?}: {what}{}",
        worst.histories, worst.seconds, worst.found, worst.note
    );
    worst.noticed
}

/// The result for one removed rule.
struct Caught {
    histories: u64,
    seconds: f64,
    found: String,
    note: String,
    noticed: bool,
}

fn caught(arguments: &Arguments, rule: Mutation, seed: u64) -> Caught {
    let aim = if arguments.by_chance { Aim::Any } else { Aim::Rule(rule) };
    mutation::set(Some(rule));
    let limits = Limits { stop_at_first: true, seconds: arguments.limit, ..limits(arguments) };
    let total = run(seed, aim, limits);
    mutation::set(None);
    let (histories, seconds) = (total.histories, total.seconds);
    let Some((found, violation)) = total.violations.values().next() else {
        let (found, note) = ("NOT CAUGHT".to_owned(), format!(" (seed {seed})"));
        return Caught { histories, seconds, found, note, noticed: false };
    };
    // The same history with the rule in place has to be clean, or the find says nothing.
    let clean = history(*found, aim, false).violation.is_none();
    let note = if clean {
        String::new()
    } else {
        format!(" (seed {seed}: NOT CLEAN WITH THE RULE: --replay {found} --only {rule:?})")
    };
    Caught { histories, seconds, found: format!("{:?}", violation.breach), note, noticed: clean }
}
