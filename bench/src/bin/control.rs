//! Bench of the control plane: CPU time of the daemon for each call, by the number of volumes.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use blockd_bench::control::{Bench, Figure, Row};
use blockd_bench::facts;
use blockd_testkit::clock::Clock;
use clap::Parser;
use serde_json::json;

/// Starts a daemon with a pool in a file, makes and attaches volumes, and measures the daemon's CPU
/// time for each call. Fails where a call takes too much more with most volumes than with fewest.
#[derive(Debug, Parser)]
struct Arguments {
    /// The daemon's program
    #[arg(long)]
    blockd: PathBuf,
    /// Numbers of volumes, the lowest first
    #[arg(long, value_delimiter = ',', default_value = "10,1000,10000")]
    volumes: Vec<usize>,
    /// Calls of each kind in a round
    #[arg(long, default_value_t = 20)]
    calls: usize,
    /// Rounds, of which the median counts
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// How many times as much a call may take with most volumes
    #[arg(long, default_value_t = 1.5)]
    limit: f64,
    /// Where the figures go as JSON
    #[arg(long)]
    json: Option<PathBuf>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let clock = Clock::start();
    ensure!(arguments.blockd.exists(), "{} does not exist", arguments.blockd.display());
    ensure!(arguments.volumes.is_sorted(), "--volumes must be in order, the lowest first");
    let bench = Bench {
        blockd: arguments.blockd,
        volumes: arguments.volumes,
        calls: arguments.calls.max(1),
        rounds: arguments.rounds.max(1),
    };
    facts::print_known();
    let figures = bench.measure()?;
    print(&bench, &figures);
    println!("\n{:.0} s", clock.seconds());
    if let Some(path) = &arguments.json {
        let rows = figures.iter().map(
            |one| json!({ "row": one.row.name(), "cpu_ms": one.cpu_ms, "ratio": one.ratio() }),
        );
        let rows: Vec<_> = rows.collect();
        let value = json!({
            "machine": facts::to_json(), "volumes": bench.volumes, "calls": bench.calls,
            "rounds": bench.rounds, "figures": rows,
        });
        let text = serde_json::to_string_pretty(&value)?;
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    }
    // The idle time has the comparison of all attachments in it, or not: there is one a minute.
    let is_flat = |one: &&Figure| one.row == Row::Idle || one.ratio() <= arguments.limit;
    let steep: Vec<&str> =
        figures.iter().filter(|one| !is_flat(one)).map(|one| one.row.name()).collect();
    let limit = arguments.limit;
    ensure!(steep.is_empty(), "takes more than {limit} times as much: {}", steep.join("; "));
    Ok(())
}

fn print(bench: &Bench, figures: &[Figure]) {
    println!("\nCPU time of the daemon in ms, median of {} rounds", bench.rounds);
    let heads: Vec<String> = bench.volumes.iter().map(|count| format!(" {count} |")).collect();
    println!("\n| volumes |{} ratio |", heads.concat());
    println!("|---|{}---:|", "---:|".repeat(heads.len()));
    for figure in figures {
        let times: Vec<String> = figure.cpu_ms.iter().map(|time| format!(" {time:.3} |")).collect();
        println!("| {} |{} {:.2} |", figure.row.name(), times.concat(), figure.ratio());
    }
}
