//! The copy engine for persistent memory, on memory of this host.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use anyhow::{Context, Result};
use blockd_bench::facts;
use blockd_bench::pmem::{self, Effort};
use blockd_testkit::clock;
use clap::Parser;
use serde_json::{Value, json};

/// Writes and reads a mapped file in memory by the engine and by bare instructions, in interleaved
/// pairs: the median of the ratios, with an interval of 90 %.
#[derive(Debug, Parser)]
struct Arguments {
    /// Fewer pairs on less memory: figures, and no claim
    #[arg(long)]
    quick: bool,
    /// MiB of memory that is written and read
    #[arg(long, default_value_t = 512)]
    mib: u64,
    /// Pairs of runs for each line
    #[arg(long, default_value_t = 21)]
    pairs: usize,
    /// Where the figures go as JSON
    #[arg(long)]
    json: Option<PathBuf>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let watch = clock::Clock::start();
    let effort = if arguments.quick {
        Effort { bytes: 64 << 20, moved: 8 << 20, pairs: 5 }
    } else {
        let bytes = arguments.mib.checked_mul(1 << 20).context("--mib is too large")?;
        Effort { bytes, moved: 64 << 20, pairs: arguments.pairs }
    };
    facts::print_known();
    let lines = pmem::measure(effort)?;
    pmem::print(&lines);
    println!("\n{:.0} s", watch.seconds());
    if let Some(path) = &arguments.json {
        let rows: Vec<Value> = lines.iter().map(pmem::Line::to_json).collect();
        let value = json!({ "machine": facts::to_json(), "engine": rows });
        std::fs::write(path, serde_json::to_string_pretty(&value)?)
            .with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}
