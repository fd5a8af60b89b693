//! The commit rules of the mapper, and the claim page.

use std::time::Duration;

use blockd_mapper::claim::ClaimMutation;
use blockd_sim::claim::{Search, search};
use blockd_sim::model::directed::Directed;
use blockd_sim::model::exhaustive::{SPACES, enumerate};
use blockd_sim::model::generate::{Commits, Tables, config_of, run as run_history};
use blockd_sim::model::mutation::Mutation;
use blockd_sim::model::runner::{Counters, Limits, run_random};
use blockd_sim::model::shrink::{replay, shrink};
use blockd_sim::model::state::World;
use blockd_sim::model::step::KINDS;
use blockd_sim::model::table::{Line, try_mutation};
use serde_json::json;

use super::{Args, report};

/// Histories of hosts that open one pool, with all rules of its claim page: about a second.
const CLAIM_HISTORIES: u64 = 50_000;
/// The same without one of them; the first that fails ends the search.
const CLAIM_MUTATION_HISTORIES: u64 = 200_000;

/// Runs what the arguments ask for; nothing if they name no mutation of this model.
pub(crate) fn run(args: &Args) -> Option<bool> {
    let mutation = find_mutation(args.without.as_deref())?;
    Some(match args.replay {
        Some(seed) => show_history(seed, mutation),
        None if args.mutate => mutate(args),
        None if args.exhaustive => exhaustive(args, mutation),
        None => random(args, mutation),
    })
}

fn find_mutation(name: Option<&str>) -> Option<Mutation> {
    let Some(name) = name else { return Some(Mutation::Nothing) };
    let matches = |m: &&Mutation| m.rule() == name || format!("{m:?}") == name;
    Mutation::ALL.iter().find(matches).copied()
}

fn random(args: &Args, mutation: Mutation) -> bool {
    let seed = args.seed();
    let found = run_random(&Commits::new(mutation), seed, args.limits());
    let missing = report::missing::<Commits>(&found);
    let claims = search(seed, CLAIM_HISTORIES, None);
    let claims_good = claims.first.is_none() && claims.met.is_complete();
    let good = found.violations == 0 && missing.is_empty() && found.counters.checks > 0;
    if args.json {
        let mut json = report::json::<Commits>(seed, &found, &missing);
        json.insert("claim_histories".into(), claims.histories.into());
        json.insert("claim_violation_seed".into(), claims.first.map(|(seed, _)| seed).into());
        println!("{}", serde_json::Value::Object(json));
    } else {
        report::print::<Commits>(seed, &found, &missing);
        println!("{} histories of the claim page: {:?}", claims.histories, claims.met);
        if !claims_good {
            println!("FAILED: claim page: {:?}", claims.first);
        }
    }
    if let Some((failed, _)) = found.first {
        args.print_replay(failed);
    }
    good && claims_good
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
        report::print_head();
    }
    for mutation in Mutation::ALL {
        let line = try_mutation(*mutation, seed, limits);
        if !args.json {
            report::print_line(&line);
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

fn table_json(
    seed: u64,
    lines: &[Line],
    clean: bool,
    claims: &[(ClaimMutation, Search)],
) -> serde_json::Value {
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
    json!({ "seed": seed, "scripts_clean": clean, "mutations": report::table(lines), "claim_mutations": claims })
}

fn exhaustive(args: &Args, mutation: Mutation) -> bool {
    let limit = Duration::from_secs(args.limit);
    report::enumerations(SPACES, args.json, |space| enumerate(space, mutation, limit))
}

fn show_history(seed: u64, mutation: Mutation) -> bool {
    let mut steps = Vec::new();
    let mut counters = Counters::new(KINDS.len());
    let fault = run_history(&Tables::new(), seed, mutation, &mut counters, |s| steps.push(s));
    let cfg = config_of(seed, mutation);
    println!("seed {seed}, without {mutation:?}: {cfg:?}");
    let mut world = World::new(cfg, mutation);
    let (steps, fault) = match fault {
        Some(_) => shrink(&steps, |steps| replay(cfg, mutation, steps).fault),
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
