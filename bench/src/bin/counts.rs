//! Instructions, system calls and context switches of the server for each operation. Runs as root
//! in a virtual machine that the tests' package boots: elsewhere CPU time is no instructions.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use anyhow::Result;
use blockd_bench::counts::{Bench, Target, keep_pages_small, scratch};
use clap::Parser;

/// Counts the server's cost of operations.
#[derive(Debug, Parser)]
struct Arguments {
    /// The daemon's program
    #[arg(long)]
    blockd: PathBuf,
    /// An eighth of the operations
    #[arg(long)]
    quick: bool,
    /// Only rows with this in their name, as "nbd read 4k, 1"
    #[arg(long)]
    only: Option<String>,
}

/// Before a row as JSON, for the program that has booted the machine.
const ROW: &str = "@@row ";

fn main() -> Result<()> {
    let Arguments { blockd, quick, only } = Arguments::parse();
    keep_pages_small()?;
    let bench = Bench { blockd, scratch: scratch(), quick, only };
    for target in Target::ALL {
        let done = bench.target(target, |name, cost| println!("{ROW}{}", cost.to_json(name)))?;
        if done.is_none() {
            println!("note: this kernel has no {}", target.name());
        }
    }
    Ok(())
}
