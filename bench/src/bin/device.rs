//! A disk of this machine by itself, and under a pool of ours. Everything on it is lost.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use blockd_bench::block::Jobs;
use blockd_bench::device::disk::Disk;
use blockd_bench::device::{Effort, confirm, measure};
use blockd_bench::{facts, results};
use blockd_testkit::folder::Folder;
use clap::Parser;

/// Runs the job files on a disk by itself, then on a volume of a pool on it, over ublk where the
/// kernel has it, else over NBD. Everything on the disk is lost.
#[derive(Debug, Parser)]
struct Arguments {
    /// The disk
    #[arg(long)]
    device: PathBuf,
    /// Erase it without asking
    #[arg(long)]
    yes: bool,
    /// Runs of 2 s on at most 512 MiB of it, in place of 10 s on 8 GiB
    #[arg(long)]
    quick: bool,
    /// The daemon's program
    #[arg(long)]
    blockd: PathBuf,
    /// The folder of the job files
    #[arg(long, default_value = "bench/fio")]
    jobs: PathBuf,
    /// fio's engine: libaio or io_uring
    #[arg(long, default_value = "io_uring")]
    engine: String,
    /// Where the figures go as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// Where a chart of them goes
    #[arg(long)]
    svg: Option<PathBuf>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let disk = Disk::look(&arguments.device)?;
    disk.print();
    disk.refuse_if_used()?;
    if !arguments.yes {
        confirm::ask(&disk, &mut std::io::stdin().lock(), &mut std::io::stdout())?;
    }
    println!();
    facts::print_known();
    println!("engine   {}\n", arguments.engine);
    let scratch = Folder::new("device")?;
    let folder = arguments.jobs.canonicalize().context("the folder of job files")?;
    let jobs =
        Jobs { folder, engine: arguments.engine.clone(), scratch: scratch.path().to_owned() };
    let effort = if arguments.quick {
        Effort { seconds: 2.0, runs: 1, bytes: 512 << 20 }
    } else {
        Effort { seconds: 10.0, runs: 3, bytes: 8 << 30 }
    };
    let report = measure(&jobs, &disk, &arguments.blockd, effort)?;
    report.print();
    let figures = report.to_json();
    if let Some(path) = &arguments.json {
        write(path, &serde_json::to_string_pretty(&figures)?)?;
    }
    if let Some(path) = &arguments.svg {
        let charts = results::charts(&figures)?;
        write(path, &charts.first().context("no chart")?.svg())?;
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
}
