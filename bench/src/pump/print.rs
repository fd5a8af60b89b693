//! The pump's results as text and as JSON.

use serde_json::{Value, json};

use super::run::Figures;
use super::{Outcome, Results};

/// Prints the results of the pump on a device.
pub fn print(title: &str, results: &Results) {
    println!("\n{title}");
    println!(
        "  {:<27} {:>8} {:>8}  {:<22} {:<22} {:>6} verdict",
        "workload", "pump", "fio", "pump/fio [90 %]", "fio/fio [90 %]", "target"
    );
    for outcome in &results.outcomes {
        let target = outcome.workload.target;
        println!(
            "  {:<27} {:>8.0} {:>8.0}  {:<22} {:<22} {:>6} {}",
            outcome.workload.name,
            outcome.iops(),
            outcome.fio_iops(),
            outcome.ratio.to_string(),
            outcome.control.to_string(),
            target.map_or_else(|| "-".to_owned(), |target| format!("{target:.2}")),
            target.map_or_else(|| "-".to_owned(), |t| outcome.ratio.verdict(t).to_string()),
        );
    }
    println!(
        "\n  in the mapper, per operation: ns of planning and completing (1 in 16 timed, less \
         {:.0} \
         ns for the clock),",
        results.clock_ns
    );
    println!(
        "  ns of the engine (all its calls), allocations of both; per flush: flushes, log writes"
    );
    println!(
        "  {:<27} {:>6} {:>8} {:>7} {:>8} {:>8} {:>8} {:>8} {:>7} {:>8}",
        "workload",
        "plan",
        "complete",
        "engine",
        "worker",
        "engine",
        "flushes",
        "log wr.",
        "parked",
        "enters"
    );
    for outcome in &results.outcomes {
        print_inside(outcome, results.clock_ns);
    }
    println!(
        "  verified: {} blocks of 4096 bytes, every byte, after closing and opening the pool",
        results.verified
    );
}

fn print_inside(outcome: &Outcome, clock_ns: f64) {
    let inside = Inside::of(&outcome.runs, clock_ns);
    let per_flush =
        |count: Option<f64>| count.map_or_else(|| "-".to_owned(), |c| format!("{c:.3}"));
    println!(
        "  {:<27} {:>6.0} {:>8.0} {:>7.0} {:>8.4} {:>8.4} {:>8} {:>8} {:>7} {:>8.3}",
        outcome.workload.name,
        inside.plan_ns,
        inside.complete_ns,
        inside.engine_ns,
        inside.worker_allocations,
        inside.engine_allocations,
        per_flush(inside.flushes),
        per_flush(inside.log_writes),
        inside.parked,
        inside.enters,
    );
}

/// Events inside the mapper, over all runs of a workload.
#[derive(Clone, Copy, Debug)]
struct Inside {
    plan_ns: f64,
    complete_ns: f64,
    engine_ns: f64,
    worker_allocations: f64,
    engine_allocations: f64,
    /// Device flushes per flush asked for.
    flushes: Option<f64>,
    /// Log writes per flush asked for.
    log_writes: Option<f64>,
    parked: u64,
    enters: f64,
}

impl Inside {
    fn of(runs: &[Figures], clock_ns: f64) -> Self {
        let sum = |field: &dyn Fn(&Figures) -> u64| runs.iter().map(field).sum::<u64>();
        let ops = sum(&|r| r.ops).max(1) as f64;
        let per = |total: u64, count: u64| total as f64 / count.max(1) as f64;
        let asked = sum(&|r| r.flushes);
        let per_flush = |count: u64| (asked > 0).then(|| per(count, asked));
        Self {
            plan_ns: (per(sum(&|r| r.plan_ns), sum(&|r| r.plans)) - clock_ns).max(0.0),
            complete_ns: (per(sum(&|r| r.complete_ns), sum(&|r| r.completions)) - clock_ns)
                .max(0.0),
            engine_ns: sum(&|r| r.engine.ns) as f64 / ops,
            worker_allocations: sum(&|r| r.allocations) as f64 / ops,
            engine_allocations: sum(&|r| r.engine.allocations) as f64 / ops,
            flushes: per_flush(sum(&|r| r.data_flushes + r.engine.flushes)),
            log_writes: per_flush(sum(&|r| r.engine.log_writes)),
            parked: sum(&|r| r.parked),
            enters: sum(&|r| r.enters) as f64 / ops,
        }
    }
}

/// The results as JSON.
#[must_use]
pub fn to_json(results: &Results) -> Value {
    let outcomes = results.outcomes.iter().map(|outcome| {
        let inside = Inside::of(&outcome.runs, results.clock_ns);
        let (ratio, control) = (outcome.ratio, outcome.control);
        let verdict = outcome.workload.target.map(|t| ratio.verdict(t).to_string());
        json!({
            "workload": outcome.workload.name,
            "iops": outcome.iops(), "fio_iops": outcome.fio_iops(),
            "ratio": [ratio.median, ratio.low, ratio.high],
            "control": [control.median, control.low, control.high],
            "target": outcome.workload.target, "verdict": verdict,
            "plan_ns": inside.plan_ns, "complete_ns": inside.complete_ns,
            "engine_ns_per_op": inside.engine_ns,
            "worker_allocations_per_op": inside.worker_allocations,
            "engine_allocations_per_op": inside.engine_allocations,
            "flushes_per_flush": inside.flushes, "log_writes_per_flush": inside.log_writes,
            "parked": inside.parked, "enters_per_op": inside.enters,
        })
    });
    json!({ "outcomes": outcomes.collect::<Vec<_>>(), "verified_blocks": results.verified })
}
