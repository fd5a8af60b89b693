//! Checks the commit protocol's model: random histories, mutations, complete enumerations.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Duration;

use blockd_mapper::claim::ClaimMutation;
use blockd_sim::claim::{Search, search};
use blockd_sim::model::directed::Directed;
use blockd_sim::model::exhaustive::{SPACES, enumerate};
use blockd_sim::model::generate::{Counters, Tables, config_of, run};
use blockd_sim::model::mutation::Mutation;
use blockd_sim::model::runner::{Limits, Report, run_random};
use blockd_sim::model::shrink::shrink;
use blockd_sim::model::state::World;
use blockd_sim::model::step::KINDS;
use blockd_sim::model::table::{Line, try_mutation};
use clap::Parser;
use serde_json::json;

/// Histories of hosts that open one pool, with all rules of its claim page: about a second.
const CLAIM_HISTORIES: u64 = 50_000;
/// The same without one of them; the first that fails ends the search.
const CLAIM_MUTATION_HISTORIES: u64 = 200_000;

/// Protocol model of the mapper's commit rules.
#[derive(Debug, Parser)]
struct Args {
    /// How long random histories run.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
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

fn main() -> ExitCode {
    let args = Args::parse();
    let Some(mutation) = find_mutation(args.without.as_deref()) else {
        eprintln!("no such mutation; --mutate lists them");
        return ExitCode::from(2);
    };
    let good = match args.replay {
        Some(seed) => show_history(seed, mutation),
        None if args.mutate => mutate(&args),
        None if args.exhaustive => exhaustive(&args, mutation),
        None => random(&args, mutation),
    };
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn find_mutation(name: Option<&str>) -> Option<Mutation> {
    let Some(name) = name else { return Some(Mutation::Nothing) };
    let matches = |m: &&Mutation| m.rule() == name || format!("{m:?}") == name;
    Mutation::ALL.iter().find(matches).copied()
}

fn random(args: &Args, mutation: Mutation) -> bool {
    let seed = args.seed.unwrap_or_else(|| fastrand::u64(..));
    let time = Duration::from_secs(args.seconds);
    let (histories, violations) = (u64::MAX, 100);
    let report =
        run_random(seed, mutation, Limits { time, histories, violations, threads: args.threads });
    let missing: Vec<&str> = missing_kinds(&report);
    let claims = search(seed, CLAIM_HISTORIES, None);
    let claims_good = claims.first.is_none() && claims.met.is_complete();
    let good = report.violations == 0 && missing.is_empty() && report.counters.checks > 0;
    if args.json {
        println!("{}", report_json(seed, &report, &missing, &claims));
    } else {
        print_report(seed, &report, &missing);
        println!("{} histories of the claim page: {:?}", claims.histories, claims.met);
        if !claims_good {
            println!("FAILED: claim page: {:?}", claims.first);
        }
    }
    if let Some((failed, _)) = report.first {
        let without = args.without.as_ref().map_or_else(String::new, |m| format!(" --without {m}"));
        eprintln!(
            "replay: cargo run --release -p blockd-tests --bin model -- --replay {failed}{without}"
        );
    }
    good && claims_good
}

fn missing_kinds(report: &Report) -> Vec<&'static str> {
    let kinds = KINDS.iter().zip(report.counters.kinds);
    kinds.filter(|(_, n)| *n == 0).map(|(name, _)| *name).collect()
}

fn per_second(report: &Report) -> u128 {
    u128::from(report.histories) * 1000 / report.elapsed.as_millis().max(1)
}

fn report_json(seed: u64, report: &Report, missing: &[&str], claims: &Search) -> serde_json::Value {
    let kinds: serde_json::Map<String, serde_json::Value> =
        KINDS.iter().zip(report.counters.kinds).map(|(k, n)| ((*k).into(), n.into())).collect();
    json!({
        "seed": seed,
        "histories": report.histories,
        "per_second": per_second(report).to_string().parse::<u64>().unwrap_or(0),
        "violations": report.violations,
        "checks": report.counters.checks,
        "first_violation_seed": report.first.map(|(s, _)| s),
        "events": kinds,
        "events_missing": missing,
        "claim_histories": claims.histories,
        "claim_violation_seed": claims.first.map(|(seed, _)| seed),
    })
}

fn print_report(seed: u64, report: &Report, missing: &[&str]) {
    println!("seed {seed}");
    for (kind, n) in KINDS.iter().zip(report.counters.kinds) {
        println!("  {n:>12}  {kind}");
    }
    let (rate, checks) = (per_second(report), report.counters.checks);
    let secs = report.elapsed.as_secs_f64();
    println!("{} histories in {secs:.1} s, {rate} per second", report.histories);
    println!("{checks} values compared, {} violations", report.violations);
    if !missing.is_empty() {
        println!("FAILED: never happened: {}", missing.join(", "));
    }
    if let Some((_, fault)) = report.first {
        println!("FAILED: {fault:?}");
    }
}

fn mutate(args: &Args) -> bool {
    let seed = args.seed.unwrap_or(1);
    let limits = Limits {
        time: Duration::from_secs(1),
        histories: 150_000 / args.threads,
        violations: u64::MAX,
        threads: args.threads,
    };
    let mut lines: Vec<Line> = Vec::new();
    if !args.json {
        println!(
            "rule  caught by          violations   of histories  first at  scripts  time     removed"
        );
    }
    for mutation in Mutation::ALL {
        let line = try_mutation(*mutation, seed, limits);
        if !args.json {
            print_line(&line);
        }
        lines.push(line);
    }
    let clean = Directed::all().all(|d| {
        let world = d.run(Mutation::Nothing);
        world.fault.is_none() && !world.exhausted && world.checks > 0
    });
    let caught = lines.iter().filter(|l| l.caught()).count();
    let claims: Vec<(ClaimMutation, Search)> = ClaimMutation::ALL
        .iter()
        .map(|&rule| (rule, search(seed, CLAIM_MUTATION_HISTORIES, Some(rule))))
        .collect();
    let claims_caught = claims.iter().filter(|(_, found)| found.first.is_some()).count();
    if args.json {
        println!("{}", table_json(seed, &lines, clean, &claims));
    } else {
        for (rule, found) in &claims {
            let how = found
                .first
                .map_or_else(|| "NOT CAUGHT".to_owned(), |(_, fault)| format!("{fault:?}"));
            println!("claim {how:17} first at history {:>7}  {rule:?}", found.histories);
        }
        println!("{claims_caught} of {} mutations of the claim page caught", claims.len());
        println!(
            "{caught} of {} mutations caught; scripts clean with all rules: {clean}",
            lines.len()
        );
    }
    clean && caught == lines.len() && claims_caught == claims.len()
}

fn print_line(line: &Line) {
    println!(
        "{:5} {:17} {:>11} {:>14} {:>9} {:>8}  {:>5} ms {}",
        line.mutation.rule(),
        line.how(),
        line.violations,
        line.histories,
        line.until_first,
        format!("{}/{}", line.scripts_caught, line.scripts),
        line.elapsed.as_millis(),
        line.mutation.what(),
    );
}

fn table_json(
    seed: u64,
    lines: &[Line],
    clean: bool,
    claims: &[(ClaimMutation, Search)],
) -> serde_json::Value {
    let rows: Vec<_> = lines
        .iter()
        .map(|l| {
            json!({
                "rule": l.mutation.rule(),
                "removed": l.mutation.what(),
                "name": format!("{:?}", l.mutation),
                "caught_by": l.how(),
                "caught": l.caught(),
                "violations": l.violations,
                "histories": l.histories,
                "scripts": l.scripts,
                "seconds": l.elapsed.as_secs_f64(),
            })
        })
        .collect();
    let claims: Vec<_> = claims
        .iter()
        .map(|(rule, found)| {
            json!({
                "name": format!("{rule:?}"),
                "caught": found.first.is_some(),
                "histories": found.histories,
            })
        })
        .collect();
    json!({ "seed": seed, "scripts_clean": clean, "mutations": rows, "claim_mutations": claims })
}

fn exhaustive(args: &Args, mutation: Mutation) -> bool {
    let mut good = true;
    let mut rows = Vec::new();
    for space in SPACES {
        let found = enumerate(space, mutation, Duration::from_secs(args.limit));
        good &= found.complete && found.violations == 0 && found.checks > 0;
        if !args.json {
            println!(
                "{:>10} histories, {} violations, depth {}, {:.1} s{}: {}",
                found.histories,
                found.violations,
                space.depth,
                found.elapsed.as_secs_f64(),
                if found.complete { "" } else { " (OUT OF TIME)" },
                space.name,
            );
            if let Some(steps) = &found.first {
                println!("  first violation after {steps:?}");
            }
        }
        rows.push(json!({
            "space": space.name, "depth": space.depth, "histories": found.histories,
            "violations": found.violations, "complete": found.complete, "checks": found.checks,
        }));
    }
    if args.json {
        println!("{}", json!({ "enumerations": rows }));
    }
    good
}

fn show_history(seed: u64, mutation: Mutation) -> bool {
    let mut steps = Vec::new();
    let fault = run(&Tables::new(), seed, mutation, &mut Counters::new(), |s| steps.push(s));
    let cfg = config_of(seed, mutation);
    println!("seed {seed}, without {mutation:?}: {cfg:?}");
    let mut world = World::new(cfg, mutation);
    let (steps, fault) = match fault {
        Some(_) => shrink(cfg, mutation, &steps),
        None => (steps, None),
    };
    for step in steps {
        let done = world.apply(step);
        println!(
            "  {:3} {}{step:?}: lsn {}, durable {}, {:?}",
            world.now,
            if done { "" } else { "(no effect) " },
            world.last_lsn,
            world.durable,
            world.phase,
        );
        if world.fault.is_some() {
            break;
        }
    }
    match fault {
        Some(fault) => println!("violation: {fault:?}"),
        None => println!("no violation"),
    }
    fault.is_none()
}
