//! Bench of the command line's tools beside programs of others.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use blockd_bench::nbd::print::{self, Claim};
use blockd_bench::stats::median;
use blockd_bench::tools::{Bench, Outcome, Tool};
use blockd_bench::{facts, report};
use blockd_testkit::clock::Clock;
use clap::Parser;
use serde_json::{Value, json};

/// Copies an image into a volume and back by `blockd import` and `export`, nbdcopy and qemu-img, in
/// turns, and lists many volumes. Written data is durable when a program ends.
#[derive(Debug, Parser)]
struct Arguments {
    /// The daemon's program
    #[arg(long)]
    blockd: PathBuf,
    /// Half a minute: a small image, 3 rounds, 1,000 volumes. Shows that everything works, and
    /// resolves no claim
    #[arg(long)]
    quick: bool,
    /// Where pool and images lie. In memory no disk is measured, and there no write has to wait
    #[arg(long, default_value = "/dev/shm")]
    folder: PathBuf,
    /// MiB of the image
    #[arg(long)]
    size: Option<u64>,
    /// Rounds
    #[arg(long)]
    pairs: Option<usize>,
    /// Volumes to be listed
    #[arg(long)]
    volumes: Option<usize>,
    /// Where the figures go as JSON
    #[arg(long)]
    json: Option<PathBuf>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let clock = Clock::start();
    ensure!(arguments.blockd.exists(), "{} does not exist", arguments.blockd.display());
    let quick = arguments.quick;
    let size = arguments.size.unwrap_or(if quick { 64 } else { 1024 }).max(16) << 20;
    let bench = Bench {
        blockd: arguments.blockd,
        folder: arguments.folder.canonicalize().context("the folder")?,
        size,
        pairs: arguments.pairs.unwrap_or(if quick { 3 } else { 9 }).max(1),
        volumes: arguments.volumes.unwrap_or(if quick { 1000 } else { 10_000 }),
    };
    facts::print_known();
    println!(
        "\n{} rounds, an image of {} MiB in {}",
        bench.pairs,
        size >> 20,
        bench.folder.display()
    );
    if quick {
        println!("note: a quick run; it resolves no claim");
    }
    let outcomes = bench.copies()?;
    let list = bench.list()?;
    print_outcomes(&outcomes, size);
    let claims: Vec<Claim> = outcomes.iter().filter_map(Outcome::claim).collect();
    print::claims(&claims);
    report::print("list", std::slice::from_ref(&list));
    println!("\n{:.0} s", clock.seconds());
    if let Some(path) = &arguments.json {
        let copies: Vec<Value> = outcomes.iter().map(to_json).collect();
        let value = json!({
            "machine": facts::to_json(), "size_bytes": size, "pairs": bench.pairs,
            "folder": bench.folder, "copies": copies, "claims": print::claims_json(&claims),
            "list": list.to_json(),
        });
        let text = serde_json::to_string_pretty(&value)?;
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

fn print_outcomes(outcomes: &[Outcome], size: u64) {
    let heads = Tool::ALL.map(|tool| format!(" {}, s |", tool.name()));
    println!("\n| copy |{} blockd, MiB/s |", heads.concat());
    println!("|---|{}", "---:|".repeat(Tool::ALL.len() + 1));
    for outcome in outcomes {
        let times = outcome.seconds.each_ref().map(|runs| median(runs).unwrap_or(f64::NAN));
        let shown: Vec<String> = times.iter().map(|time| format!(" {time:.3} |")).collect();
        let rate = (size >> 20) as f64 / times[0];
        println!("| {} |{} {rate:.0} |", outcome.workload, shown.concat());
    }
}

fn to_json(outcome: &Outcome) -> Value {
    let runs = Tool::ALL.iter().zip(&outcome.seconds);
    let runs: Vec<Value> =
        runs.map(|(tool, runs)| json!({ "tool": tool.name(), "seconds": runs })).collect();
    json!({ "workload": outcome.workload, "runs": runs })
}
