//! Snapshot bench: costs of snapshots on this machine, compared with targets.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::{Result, ensure};
use blockd_bench::facts;
use blockd_bench::report::{self, Row};
use blockd_bench::snapshot::{PARTS, Places};
use blockd_testkit::clock;
use clap::Parser;
use serde_json::{Map, Value, json};

/// Measures taking, deleting, comparing and having snapshots. Ends with 1 if a count (reads,
/// extents given back) is not as it must be; times are only shown.
#[derive(Debug, Parser)]
struct Arguments {
    /// Parts whose name contains this: memory, diff, reads, file. `cargo ci bench snapshot` knows
    /// after-snapshot (writes beside qcow2 and dm-thin) and packing (space that a clone takes) as
    /// well
    #[arg(long)]
    only: Option<String>,
    /// Smaller pools: shows that everything works, and no figure
    #[arg(long)]
    quick: bool,
    /// One JSON object on standard output instead of tables
    #[arg(long)]
    json: bool,
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let only = arguments.only.as_deref().unwrap_or_default();
    let parts: Vec<_> = PARTS.into_iter().filter(|part| part.name.contains(only)).collect();
    let names: Vec<_> = PARTS.iter().map(|part| part.name).collect();
    ensure!(!parts.is_empty(), "--only is {only:?}: must be a part of one of {names:?}");
    let watch = clock::Clock::start();
    if !arguments.json {
        facts::print();
    }
    let (mut failed, mut json) = (false, Map::new());
    for part in parts {
        let places = Places::new()?;
        let rows = (part.measure)(&places, arguments.quick)?;
        failed |= rows.iter().any(Row::fails);
        if arguments.json {
            let rows: Vec<Value> = rows.iter().map(Row::to_json).collect();
            json.insert(part.name.to_owned(), Value::Array(rows));
        } else {
            report::print(part.title, &rows);
        }
    }
    if arguments.json {
        println!("{}", json!({ "machine": facts::to_json(), "parts": json }));
    } else {
        println!("\n{:.0} s", watch.seconds());
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
