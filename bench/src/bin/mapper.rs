//! The mapper's figures beside their budgets, on this machine.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use blockd_bench::budgets::machine::Machine;
use blockd_bench::budgets::{counts, lookup, scale};
use blockd_bench::facts;
use blockd_bench::report::{self, Row};
use blockd_testkit::clock;
use blockd_testkit::folder::Folder;
use clap::Parser;
use serde_json::{Value, json};

/// Measures the mapper without IO: lookups, plans, allocation, opening, memory, counts. Ends with 1
/// if a count (allocations, flushes, writes) is not as it must be; times and memory are only shown.
#[derive(Debug, Parser)]
struct Arguments {
    /// Where the figures go as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// Internal: a step in a process of its own
    #[arg(long, num_args = 3, hide = true)]
    child: Option<Vec<String>>,
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    if let Some(child) = &arguments.child {
        scale::in_child(child)?;
        return Ok(ExitCode::SUCCESS);
    }
    let watch = clock::Clock::start();
    let scratch = Folder::new("mapper")?;
    facts::print();
    let machine = Machine::measure();
    let sections: [(&str, Vec<Row>); 5] = [
        ("memory of this machine", machine.rows()),
        ("counts", counts::rows(&scratch)?),
        ("the map's structures", lookup::rows(&machine)?),
        ("the mapper, data not written", scale::rows(&machine, &scratch)?),
        ("beside others, 1,048,576 mappings", lookup::comparison(&scratch)?),
    ];
    let failed = sections.iter().flat_map(|(_, rows)| rows).any(Row::fails);
    for (title, rows) in &sections {
        report::print(title, rows);
    }
    println!("\n{:.0} s", watch.seconds());
    if let Some(path) = &arguments.json {
        let rows = sections.iter().flat_map(|(_, rows)| rows).map(Row::to_json);
        let rows: Vec<Value> = rows.collect();
        let value = json!({ "machine": facts::to_json(), "rows": rows });
        let text = serde_json::to_string_pretty(&value)?;
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
