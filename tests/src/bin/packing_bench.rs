//! Measures how much more space a clone takes than was written to it: `cargo ci bench snapshot
//! --only packing` builds and starts this.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::Result;
use blockd_tests::packing;
use clap::Parser;
use serde_json::{Value, json};

/// A clone that takes more than this much of the bytes that were written to it, with extents of
/// the default size, would need sub-blocks of several entries packed into one extent.
const LIMIT: f64 = 2.5;

/// A clone of an installed Debian boots and installs packages: the bytes that are written and
/// allocated.
#[derive(Parser, Debug)]
struct Arguments {
    /// Print the figures as JSON
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench packing: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let rows = packing::measure()?;
    if arguments.json {
        println!("{:#}", json!({ "limit": LIMIT, "rows": rows }));
        return Ok(());
    }
    println!(
        "| extents | first write | writes | stage | written | distinct | held | allocated | ratio \
         | of it overlays | changed | written to the pool |\n\
         |---|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    );
    for row in &rows {
        let word = |key: &str| row[key].as_str().unwrap_or_default();
        let first = if row["composite"] == true { "redirect" } else { "copy" };
        print!("| {} KiB | {first} | {} ", row["extent_kib"], word("source"));
        print!("| {} ", word("stage"));
        for key in ["written_bytes", "distinct_bytes", "held_bytes", "allocated_bytes"] {
            print!("| {} ", mib(&row[key]));
        }
        print!("| {:.2} ", ratio(row));
        for key in ["overlay_bytes", "changed_bytes", "device_bytes"] {
            print!("| {} ", mib(&row[key]));
        }
        println!("|");
    }
    let default = rows.iter().filter(|row| row["extent_kib"] == 256 && row["stage"] == "installed");
    let met = default.map(ratio).all(|ratio| ratio <= LIMIT);
    println!(
        "\nat most {LIMIT} times what was written, with 256 KiB and the packages installed: {}",
        if met { "met" } else { "NOT MET" }
    );
    Ok(())
}

/// Bytes allocated for each byte that was written and not discarded.
fn ratio(row: &Value) -> f64 {
    let bytes = |key: &str| row[key].as_f64().unwrap_or_default();
    bytes("allocated_bytes") / bytes("held_bytes")
}

fn mib(bytes: &Value) -> String {
    format!("{:.1} MiB", bytes.as_f64().unwrap_or_default() / f64::from(1 << 20))
}
