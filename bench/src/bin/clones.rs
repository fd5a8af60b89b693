//! Bench of clones of one image, beside overlays of qemu.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_bench::clones::{Bench, Figures, Overlays, Times};
use blockd_bench::report::{Budget, Row};
use blockd_bench::{facts, report};
use blockd_testkit::clock::Clock;
use clap::Parser;
use serde_json::json;

/// Milliseconds of making a clone, and of making and attaching one until it was read.
const MAKE_MS: f64 = 5.0;
const READ_MS: f64 = 10.0;
/// Seconds of a restart with all of them attached.
const RESTART_S: f64 = 2.0;
/// KiB of memory of a clone without writes.
const RSS_KIB: f64 = 20.0;

/// Makes clones of one image, attaches each over NBD and reads it; measures memory, lists and
/// restarts; and does the same with overlays of qemu.
#[derive(Debug, Parser)]
struct Arguments {
    /// The daemon's program
    #[arg(long)]
    blockd: PathBuf,
    /// Half a minute: up to 100 clones of a small image
    #[arg(long)]
    quick: bool,
    /// Ten minutes in which volumes come and go, in place of all else: does anything grow
    #[arg(long)]
    long: bool,
    /// Seconds of that
    #[arg(long, value_name = "SECONDS", requires = "long", default_value_t = 600)]
    seconds: u64,
    /// Where pool and images lie
    #[arg(long, default_value = "/dev/shm")]
    folder: PathBuf,
    /// Numbers of clones, the lowest first
    #[arg(long, value_delimiter = ',')]
    clones: Vec<usize>,
    /// Where the figures go as JSON
    #[arg(long)]
    json: Option<PathBuf>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let clock = Clock::start();
    ensure!(arguments.blockd.exists(), "{} does not exist", arguments.blockd.display());
    let quick = arguments.quick;
    let default: &[usize] = if quick { &[1, 100] } else { &[1, 100, 1000, 5000] };
    let given = arguments.clones.clone();
    let bench = Bench {
        blockd: arguments.blockd,
        folder: arguments.folder.canonicalize().context("the folder")?,
        size: if quick { 128 << 20 } else { 2 << 30 },
        clones: if given.is_empty() { default.to_vec() } else { given },
        overlays: if quick { 5 } else { 50 },
    };
    ensure!(bench.clones.iter().all(|count| *count > 0), "--clones: at least 1");
    facts::print_known();
    if arguments.long {
        let rows = bench.churn(Duration::from_secs(arguments.seconds))?;
        report::print("volumes that come and go", &rows);
        ensure!(rows.iter().all(|row| row.met() != Some(false)), "something grows");
        return Ok(());
    }
    println!("\nan image of {} MiB in {}", bench.size >> 20, bench.folder.display());
    let overlays = bench.overlays()?;
    let figures = bench.measure()?;
    print(&figures, &overlays);
    let rows: Vec<Row> = figures.last().map(rows).unwrap_or_default();
    report::print("with most clones", &rows);
    println!("\n{:.0} s", clock.seconds());
    if let Some(path) = &arguments.json {
        let all: Vec<_> = figures.iter().map(Figures::to_json).collect();
        let rows: Vec<_> = rows.iter().map(Row::to_json).collect();
        let value = json!({
            "machine": facts::to_json(), "size_bytes": bench.size, "figures": all,
            "overlays": overlays.to_json(), "rows": rows,
        });
        let text = serde_json::to_string_pretty(&value)?;
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

fn rows(most: &Figures) -> Vec<Row> {
    let row = |name: &str, figure, unit, most| Row::new(name, figure, unit, Budget::AtMost(most));
    vec![
        row("make a clone, p95", most.make.p95, "ms", MAKE_MS),
        row("make, attach, connect and read one, p95", most.make_and_read.p95, "ms", READ_MS),
        row("restart, all attached", most.restart_s, "s", RESTART_S),
        row("memory of a clone", most.rss_kib, "KiB", RSS_KIB),
    ]
}

fn print(figures: &[Figures], overlays: &Overlays) {
    let times = |times: &Times| format!("{:.2} / {:.2}", times.p50, times.p95);
    println!(
        "\n| clones | make, ms, p50 / p95 | until read, ms, p50 / p95 | RSS, KiB | locked, KiB \
         | list, s | restart, s | delete all, s |"
    );
    println!("|---:|---:|---:|---:|---:|---:|---:|---:|");
    for one in figures {
        println!(
            "| {} | {} | {} | {:.1} | {:.1} | {:.3} | {:.2} | {:.2} |",
            one.clones,
            times(&one.make),
            times(&one.make_and_read),
            one.rss_kib,
            one.locked_kib,
            one.list_s,
            one.restart_s,
            one.delete_s
        );
    }
    let Overlays { make, make_and_read, own_kib } = overlays;
    println!(
        "| overlay of qemu-img, qemu-nbd | {} | {} | {own_kib:.0} | | | | |",
        times(make),
        times(make_and_read)
    );
}
