//! Isolation bench: throughput and latency of tenants that share one daemon.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use blockd_bench::facts;
use blockd_bench::isolation::{Bench, Figure, Spread};
use blockd_bench::nbd::Folders;
use blockd_bench::nbd::claims::Medium;
use blockd_testkit::clock;
use clap::Parser;
use serde_json::{Value, json};

/// Runs tenants beside each other over NBD, on pools in files of tmpfs and of a disk, and prints
/// their shares of the throughput and the latencies of one that needs little. It judges nothing:
/// times of a machine that does other things too are no gate.
#[derive(Debug, Parser)]
struct Arguments {
    /// The daemon's program
    #[arg(long)]
    blockd: PathBuf,
    /// Another build of the daemon, such as one from before a change, measured in turns
    #[arg(long)]
    before: Option<PathBuf>,
    /// Workers of the daemon: with one, all tenants share it
    #[arg(long, default_value_t = 1)]
    workers: u32,
    /// Under a minute: one round of short runs
    #[arg(long)]
    quick: bool,
    /// Only cases with this in their name, as "victim"
    #[arg(long)]
    only: Option<String>,
    /// Seconds of each run
    #[arg(long)]
    seconds: Option<f64>,
    /// Rounds of each case
    #[arg(long)]
    rounds: Option<usize>,
    /// Where the figures go as JSON
    #[arg(long)]
    json: Option<PathBuf>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let watch = clock::Clock::start();
    let quick = arguments.quick;
    for program in [Some(&arguments.blockd), arguments.before.as_ref()].into_iter().flatten() {
        ensure!(program.exists(), "{} does not exist", program.display());
    }
    let bench = Bench {
        blockd: arguments.blockd.clone(),
        before: arguments.before.clone(),
        workers: arguments.workers,
        seconds: arguments.seconds.unwrap_or(if quick { 0.5 } else { 1.0 }),
        rounds: arguments.rounds.unwrap_or(if quick { 1 } else { 5 }).max(1),
        volume: if quick { 16 << 20 } else { 32 << 20 },
        only: arguments.only.clone(),
    };
    facts::print_known();
    println!(
        "\n{} rounds of {} s: median [lowest, highest]; workers: {}",
        bench.rounds, bench.seconds, bench.workers
    );
    let folders = Folders::new()?;
    let mut rows = Vec::new();
    for (medium, name) in [(Medium::Tmpfs, "tmpfs"), (Medium::Disk, "disk")] {
        let figures = bench.measure(medium, &folders).with_context(|| format!("on {name}"))?;
        print(name, &figures);
        rows.extend(figures.iter().map(|figure| to_json(name, figure)));
    }
    println!("\n{:.0} s", watch.seconds());
    if let Some(path) = &arguments.json {
        let value = json!({
            "machine": facts::to_json(), "seconds": bench.seconds, "rounds": bench.rounds,
            "workers": bench.workers, "figures": rows,
        });
        let text = serde_json::to_string_pretty(&value)?;
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

fn print(medium: &str, figures: &[Figure]) {
    let compared = figures.iter().any(|figure| figure.before.is_some());
    if compared {
        println!("\n| {medium} | | now | before | now/before |\n|---|---|---:|---:|---:|");
    } else {
        println!("\n| {medium} | | |\n|---|---|---:|");
    }
    let mut last = "";
    for figure in figures {
        let case = if figure.case == last { "" } else { figure.case };
        last = figure.case;
        let words = |of: &Spread| {
            let Spread { figure: middle, low, high } = of;
            let digits = figure.digits;
            if low >= high {
                return format!("{middle:.digits$}");
            }
            format!("{middle:.digits$} [{low:.digits$}, {high:.digits$}]")
        };
        let (name, now) = (figure.name, words(&figure.now));
        match &figure.before {
            Some(before) => {
                let ratio = figure.now.figure / before.figure;
                println!("| {case} | {name} | {now} | {} | {ratio:.2} |", words(before));
            }
            None => println!("| {case} | {name} | {now} |"),
        }
    }
}

fn to_json(medium: &str, figure: &Figure) -> Value {
    let spread = |of: &Spread| json!({ "figure": of.figure, "low": of.low, "high": of.high });
    json!({
        "medium": medium, "case": figure.case, "name": figure.name,
        "now": spread(&figure.now), "before": figure.before.as_ref().map(spread),
    })
}
