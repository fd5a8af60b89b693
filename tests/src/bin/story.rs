//! `cargo ci demo space`: the story of a pool that fills up, with a real daemon.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use blockd_testkit::tools;
use blockd_tests::story::{self, Plan};
use clap::Parser;

/// A small pool, a fast writer: the pool is low and grows, is very low and slows the writer down,
/// is full and lets it wait, grows again and goes on. Two minutes; then all bytes are compared.
#[derive(Parser, Debug)]
#[command(name = "cargo ci demo space")]
struct Arguments {
    /// Twenty seconds in place of two minutes.
    #[arg(long)]
    short: bool,
    /// Seed of what is written.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where the picture goes; without it, space.svg in the build folder.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print the figures as JSON, and nothing else.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<bool> {
    let plan = if arguments.short { Plan::short() } else { Plan::long() };
    let outcome = story::run(plan, arguments.seed, arguments.json)?;
    let svg = match &arguments.svg {
        Some(path) => path.clone(),
        None => tools::build_folder()?.join("space.svg"),
    };
    std::fs::write(&svg, &outcome.svg).with_context(|| format!("writing {}", svg.display()))?;
    if arguments.json {
        println!("{}", outcome.figures);
    } else {
        println!("\ndemo: {}", outcome.summary);
        println!("demo: rate, free space and delay over time are in {}", svg.display());
    }
    for failure in &outcome.failures {
        eprintln!("demo: FAILED: {failure}");
    }
    Ok(outcome.failures.is_empty())
}
