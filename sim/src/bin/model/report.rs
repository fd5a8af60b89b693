//! The output of both models.

use blockd_sim::model::exhaustive::{Found, Space};
use blockd_sim::model::runner::{Report, Subject};
use blockd_sim::model::table::Line;
use serde_json::{Map, Value, json};

/// Kinds of steps or events that never happened.
pub(crate) fn missing<S: Subject>(report: &Report<S::Fault>) -> Vec<&'static str> {
    let kinds = S::KINDS.iter().zip(&report.counters.kinds);
    kinds.filter(|(_, n)| **n == 0).map(|(name, _)| *name).collect()
}

fn per_second<F>(report: &Report<F>) -> u64 {
    let rate = u128::from(report.histories) * 1000 / report.elapsed.as_millis().max(1);
    u64::try_from(rate).unwrap_or(u64::MAX)
}

/// A run of random histories as JSON.
pub(crate) fn json<S: Subject>(
    seed: u64,
    report: &Report<S::Fault>,
    missing: &[&str],
) -> Map<String, Value> {
    let kinds: Map<String, Value> = S::KINDS
        .iter()
        .zip(&report.counters.kinds)
        .map(|(kind, n)| ((*kind).into(), (*n).into()))
        .collect();
    let value = json!({
        "seed": seed,
        "histories": report.histories,
        "per_second": per_second(report),
        "violations": report.violations,
        "checks": report.counters.checks,
        "first_violation_seed": report.first.map(|(s, _)| s),
        "events": kinds,
        "events_missing": missing,
    });
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// Prints a run of random histories.
pub(crate) fn print<S: Subject>(seed: u64, report: &Report<S::Fault>, missing: &[&str]) {
    println!("seed {seed}");
    for (kind, n) in S::KINDS.iter().zip(&report.counters.kinds) {
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

/// The head of the table of mutations.
pub(crate) fn print_head() {
    println!(
        "rule  caught by          violations   of histories  first at  scripts  time     removed"
    );
}

/// A line of it.
pub(crate) fn print_line(line: &Line) {
    println!(
        "{:5} {:17} {:>11} {:>14} {:>9} {:>8}  {:>5} ms {}",
        line.rule,
        line.how(),
        line.violations,
        line.histories,
        line.until_first,
        format!("{}/{}", line.scripts_caught, line.scripts),
        line.elapsed.as_millis(),
        line.what,
    );
}

/// The table as JSON.
pub(crate) fn table(lines: &[Line]) -> Vec<Value> {
    let row = |l: &Line| {
        json!({
            "rule": l.rule,
            "removed": l.what,
            "name": l.name,
            "caught_by": l.how(),
            "caught": l.caught(),
            "violations": l.violations,
            "histories": l.histories,
            "scripts": l.scripts,
            "seconds": l.elapsed.as_secs_f64(),
        })
    };
    lines.iter().map(row).collect()
}

/// Runs each enumeration and shows it. Whether all are whole and without a violation.
pub(crate) fn enumerations<C, S: std::fmt::Debug>(
    spaces: &[Space<C, S>],
    as_json: bool,
    enumerate: impl Fn(&Space<C, S>) -> Found<S>,
) -> bool {
    let mut good = true;
    let mut rows = Vec::new();
    for space in spaces {
        let found = enumerate(space);
        good &= found.complete && found.violations == 0 && found.checks > 0;
        if !as_json {
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
    if as_json {
        println!("{}", json!({ "enumerations": rows }));
    }
    good
}
