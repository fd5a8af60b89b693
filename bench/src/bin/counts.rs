//! Instructions, system calls and context switches of the server for each operation. Runs as root
//! in a virtual machine that the tests' package boots: elsewhere CPU time is no instructions.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use anyhow::Result;
use blockd_bench::counts::peers::Peer;
use blockd_bench::counts::{Bench, Cost, Target, keep_pages_small, scratch};
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
    /// Other servers too
    #[arg(long)]
    peers: bool,
}

/// Before a row as JSON, for the program that has booted the machine.
const ROW: &str = "@@row ";

fn main() -> Result<()> {
    let Arguments { blockd, quick, only, peers } = Arguments::parse();
    keep_pages_small()?;
    let bench = Bench { blockd, scratch: scratch(), quick, only };
    for target in Target::ALL {
        let show = |server, name: &str, cost: Cost| println!("{ROW}{}", cost.to_json(server, name));
        let done = bench.target(target, |name, cost| show("blockd", name, cost))?;
        if done.is_none() {
            println!("note: this kernel has no {}", target.name());
            continue;
        }
        for peer in Peer::ALL.into_iter().filter(|one| peers && one.target() == target) {
            bench.peer(peer, |name, cost| show(peer.name(), name, cost))?;
        }
    }
    Ok(())
}
