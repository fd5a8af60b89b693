//! Several hosts on one array.

use std::time::Duration;

use blockd_sim::hosts::directed::{Directed, replay};
use blockd_sim::hosts::exhaustive::{SPACES, enumerate};
use blockd_sim::hosts::generate::{Histories, config_of};
use blockd_sim::hosts::mutation::Mutation;
use blockd_sim::hosts::state::World;
use blockd_sim::hosts::step::KINDS;
use blockd_sim::model::runner::{Counters, Limits, run_random};
use blockd_sim::model::shrink::shrink;
use blockd_sim::model::table::Line;
use serde_json::{Value, json};

use super::{Args, report};

/// Random histories for each mutation: what is rarer than one in some thousands has a script.
const MUTATION_HISTORIES: u64 = 60_000;
/// Violations after which they end.
const MUTATION_VIOLATIONS: u64 = 50;
/// Half a second on an idle machine.
const MUTATION_TIME: Duration = Duration::from_secs(3);

/// Runs what the arguments ask for; nothing if they name no mutation of this model.
pub(crate) fn run(args: &Args) -> Option<bool> {
    let without = find_mutation(args.without.as_deref())?;
    Some(match args.replay {
        Some(seed) => show_history(seed, without),
        None if args.mutate => mutate(args),
        None if args.exhaustive => exhaustive(args, without),
        None => random(args, without),
    })
}

fn find_mutation(name: Option<&str>) -> Option<Mutation> {
    let Some(name) = name else { return Some(Mutation::Nothing) };
    let matches = |m: &&Mutation| m.rule() == name || format!("{m:?}") == name;
    Mutation::ALL.iter().find(matches).copied()
}

fn random(args: &Args, without: Mutation) -> bool {
    let seed = args.seed();
    let found = run_random(&Histories::new(without), seed, args.limits());
    let missing = report::missing::<Histories>(&found);
    if args.json {
        println!("{}", Value::Object(report::json::<Histories>(seed, &found, &missing)));
    } else {
        report::print::<Histories>(seed, &found, &missing);
    }
    if let Some((failed, _)) = found.first {
        args.print_replay(failed);
    }
    found.violations == 0 && missing.is_empty() && found.counters.checks > 0
}

fn mutate(args: &Args) -> bool {
    let seed = args.seed.unwrap_or(1);
    let limits = Limits {
        time: MUTATION_TIME,
        histories: MUTATION_HISTORIES / args.threads,
        violations: MUTATION_VIOLATIONS / args.threads,
        threads: args.threads,
    };
    if !args.json {
        report::print_head();
    }
    let mut lines = Vec::new();
    for mutation in Mutation::ALL.iter().copied() {
        let caught = |d: &Directed| d.run(mutation).fault.is_some();
        let scripts: Vec<bool> = Directed::of(mutation).map(caught).collect();
        let rule = (mutation.rule(), format!("{mutation:?}"), mutation.what());
        let line = Line::of(rule, &Histories::new(mutation), seed, limits, &scripts);
        if !args.json {
            report::print_line(&line);
        }
        lines.push(line);
    }
    let clean = Directed::all().all(|d| {
        let world = d.run(Mutation::Nothing);
        world.fault.is_none() && world.checks > 0
    });
    let caught = lines.iter().filter(|l| l.caught()).count();
    if args.json {
        let rows = report::table(&lines);
        println!("{}", json!({ "seed": seed, "scripts_clean": clean, "mutations": rows }));
    } else {
        println!(
            "{caught} of {} mutations caught; scripts clean with all rules: {clean}",
            lines.len()
        );
    }
    clean && caught == lines.len()
}

fn exhaustive(args: &Args, without: Mutation) -> bool {
    let limit = Duration::from_secs(args.limit);
    report::enumerations(SPACES, args.json, |space| enumerate(space, without, limit))
}

fn show_history(seed: u64, without: Mutation) -> bool {
    let mut steps = Vec::new();
    let mut counters = Counters::new(KINDS.len());
    let fault = Histories::new(without).play(seed, &mut counters, |s| steps.push(s));
    let cfg = config_of(seed);
    println!("seed {seed}, without {without:?}: {cfg:?}");
    let (steps, fault) = match fault {
        Some(_) => shrink(&steps, |steps| replay(cfg, without, steps).fault),
        None => (steps, None),
    };
    let mut world = World::new(cfg, without);
    for step in steps {
        let done = world.apply(step);
        let phases = world.hosts.map(|host| host.cells.map(|cell| cell.phase));
        let state = if done { "" } else { "(no effect) " };
        println!("  {state}{step:?}: reigns {:?}, {phases:?}", world.reigns);
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
