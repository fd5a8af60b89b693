//! The mapper on a real file by io_uring, beside fio on the same file.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use anyhow::{Result, ensure};
use blockd_bench::facts;
use blockd_bench::pump::place::{LoopDevice, Place};
use blockd_bench::pump::{self, Effort, fio};
use clap::Parser;
use serde_json::{Map, Value};

/// Runs 4 KiB random reads and writes at queue depth 32 through the mapper, one thread and one
/// ring, and fio on the other half of the same file, in turns.
#[derive(Debug, Parser)]
struct Arguments {
    /// File to use; made if it isn't there, kept afterwards, its content is lost. By default a
    /// temporary file
    #[arg(long, conflicts_with = "device")]
    file: Option<PathBuf>,
    /// Block device to use; its content is lost
    #[arg(long)]
    device: Option<PathBuf>,
    /// MiB of the pool; twice as many are used, half of them by fio
    #[arg(long, default_value_t = 1024)]
    size: u64,
    /// Seconds of each run
    #[arg(long, default_value_t = 0.5)]
    seconds: f64,
    /// Interleaved pairs of each workload that has a target; the others have at most 9
    #[arg(long, default_value_t = 15)]
    pairs: usize,
    /// Also on a loop device over a temporary file (needs root)
    #[arg(long = "loop")]
    on_loop: bool,
    /// One JSON object on standard output instead of tables
    #[arg(long)]
    json: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    fio::check()?;
    ensure!(arguments.size >= 64, "--size: at least 64 MiB");
    ensure!(arguments.seconds > 0.0, "--seconds: more than 0");
    let effort = Effort {
        size: arguments.size << 20,
        seconds: arguments.seconds,
        pairs: arguments.pairs.max(1),
    };
    if !arguments.json {
        facts::print();
        println!(
            "\n4 KiB random, queue depth 32, registered file and buffers; fio on the half of the \
             same\nfile beside the pool; {} pairs of {} s",
            effort.pairs, effort.seconds
        );
    }
    let mut json = Map::new();
    json.insert("machine".to_owned(), facts::to_json());
    let given = arguments.file.as_ref().or(arguments.device.as_ref());
    let place = match given {
        Some(path) => Place::given(path, 2 * effort.size)?,
        None => Place::temporary(2 * effort.size)?,
    };
    measure(&place, &effort, given.map_or("file", |_| "given"), &arguments, &mut json)?;
    if arguments.on_loop {
        let device = LoopDevice::attach(&place.path)?;
        let place = Place::given(&device.path, 2 * effort.size)?;
        measure(&place, &effort, "loop", &arguments, &mut json)?;
    }
    if arguments.json {
        println!("{}", Value::Object(json));
    }
    Ok(())
}

fn measure(
    place: &Place,
    effort: &Effort,
    kind: &str,
    arguments: &Arguments,
    json: &mut Map<String, Value>,
) -> Result<()> {
    let results = pump::measure(place, effort)?;
    if arguments.json {
        json.insert(kind.to_owned(), pump::to_json(&results));
    } else {
        pump::print(&format!("{kind}: {}", place.path.display()), &results);
    }
    Ok(())
}
