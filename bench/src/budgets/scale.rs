//! Figures of large pools, each in a process of its own, so that none disturbs another's memory.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use blockd_mapper::worker::Attachment;
use blockd_testkit::clock::Clock;
use blockd_testkit::folder::Folder;
use serde_json::{Value, json};

use super::machine::Machine;
use super::rig::{BLOCK, EXTENT, Media, Rig, TIB, mix, shuffled};
use crate::report::{Budget, Row};

/// Changes in the log that is replayed.
const RECORDS: u64 = 2_000_000;

/// Extents of 4 TiB: opening marks each of them as used, at a random place.
const MAPPED: f64 = (4 * TIB / EXTENT) as f64;

/// Plans that are made in a row before they are completed.
const BATCH: usize = 32;

/// Builds, opens and measures pools of 1 and 4 TiB, and replays a log.
pub fn rows(machine: &Machine, scratch: &Folder) -> Result<Vec<Row>> {
    let small = scratch.path().join("1tib");
    child(&["build", "1"], &small)?;
    let one = child(&["open", "path"], &small)?;
    let large = scratch.path().join("4tib");
    child(&["build", "4"], &large)?;
    let four = child(&["open", "no"], &large)?;
    let log = scratch.path().join("log");
    child(&["log", "0"], &log)?;
    let replay = child(&["open", "no"], &log)?;
    let number = |value: &Value, field: &str| {
        value[field].as_f64().with_context(|| format!("no {field} in {value}"))
    };
    let records = number(&replay, "changes")?;
    ensure!(records >= RECORDS as f64, "{records} changes were replayed, {RECORDS} are needed");
    let slope = (number(&four, "rss_mib")? - number(&one, "rss_mib")?) / 3.0;
    let ns = |name: &str, field: &str, budget| -> Result<Row> {
        Ok(Row::new(name, number(&one, field)?, "ns", budget))
    };
    let none = Budget::None;
    Ok(vec![
        ns("read 4 KiB, plan + complete, dependent, random over 1 TiB", "read_dependent", none)?,
        ns("read 4 KiB, plan + complete, independent", "read", none)?,
        ns("overwrite 4 KiB, warm + plan, random over 1 TiB", "plan_warm", machine.misses(1.5))?,
        ns("overwrite 4 KiB, plan alone, random over 1 TiB", "plan_cold", machine.misses(2.5))?,
        ns("overwrite 4 KiB, complete, random over 1 TiB", "complete_cold", none)?,
        ns("overwrite 4 KiB, plan, random over 1 GiB", "plan_hot", machine.misses(1.5))?,
        ns("overwrite 4 KiB, complete, random over 1 GiB", "complete_hot", none)?,
        Row::new(
            "open 4 TiB mapped, CPU",
            number(&four, "open_s")?,
            "s",
            machine.misses_each(1.0, MAPPED),
        ),
        Row::new("  with the page cache's copying", number(&four, "open_all_s")?, "s", none),
        Row::new("memory, 1 to 4 TiB mapped, per TiB", slope, "MiB", Budget::AtMost(76.0)),
        Row::new(
            format!("replay of {records:.0} changes, CPU"),
            number(&replay, "open_s")?,
            "s",
            machine.misses_each(5.0, records),
        ),
        Row::new("  with the page cache's copying", number(&replay, "open_all_s")?, "s", none),
    ])
}

/// The work of a child process; its result is printed as JSON.
pub fn in_child(arguments: &[String]) -> Result<()> {
    let [what, argument, path] = arguments else {
        anyhow::bail!("a child needs three arguments: {arguments:?}")
    };
    let path = Path::new(path);
    let result = match what.as_str() {
        "build" => build(path, argument.parse()?)?,
        "log" => build_log(path)?,
        "open" => open(path, argument == "path")?,
        other => anyhow::bail!("no work of a child: {other}"),
    };
    println!("{result}");
    Ok(())
}

fn child(arguments: &[&str], path: &Path) -> Result<Value> {
    let program = std::env::current_exe()?;
    let output = Command::new(program).arg("--child").args(arguments).arg(path).output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{arguments:?}: {}\n{errors}", output.status);
    serde_json::from_slice(&output.stdout).context("a child's result")
}

/// Builds a pool with a volume of `tib` TiB, every extent mapped, in random order.
fn build(path: &Path, tib: u64) -> Result<Value> {
    let size = tib * TIB;
    let mut rig = Rig::create(Media::create(path, size + size / 32)?, None)?;
    let volume = rig.volume("a", size)?;
    for extent in shuffled(size / EXTENT, tib) {
        rig.write(&volume, u64::from(extent) * EXTENT)?;
    }
    rig.close(volume)?;
    Ok(json!({}))
}

/// A pool of which nothing is checkpointed and all is in the log.
fn build_log(path: &Path) -> Result<Value> {
    let size = TIB;
    // A checkpoint begins when half of the log is used.
    let mut rig = Rig::create(Media::create(path, size + size / 32)?, Some(256 << 20))?;
    let volume = rig.volume("a", size)?;
    for extent in &shuffled(size / EXTENT, 5)[..usize::try_from(RECORDS)?] {
        rig.write(&volume, u64::from(*extent) * EXTENT)?;
    }
    rig.flush(&volume)?;
    // Not closed: the process dies here as far as the pool is concerned.
    Ok(json!({}))
}

fn open(path: &Path, measure_path: bool) -> Result<Value> {
    let media = Media::open(path)?;
    let mut rig = Rig::open(media)?;
    let mut result = json!({
        "open_s": rig.open_cpu[0].as_secs_f64(),
        "open_all_s": rig.open_cpu[1].as_secs_f64(),
        "rss_mib": resident_mib()?,
        "changes": rig.report.log_changes,
    });
    if measure_path {
        let volume = rig.first_volume()?;
        let clock = Clock::start();
        result["read_dependent"] = json!(read_dependent(&mut rig, &volume, clock)?);
        result["read"] = json!(read(&mut rig, &volume, clock)?);
        let [plan, _] = overwrite(&mut rig, &volume, clock, (TIB / EXTENT, true))?;
        result["plan_warm"] = json!(plan);
        let [plan, complete] = overwrite(&mut rig, &volume, clock, (TIB / EXTENT, false))?;
        result["plan_cold"] = json!(plan);
        result["complete_cold"] = json!(complete);
        let [plan, complete] = overwrite(&mut rig, &volume, clock, ((1 << 30) / EXTENT, false))?;
        result["plan_hot"] = json!(plan);
        result["complete_hot"] = json!(complete);
    }
    Ok(result)
}

/// Each read's offset depends on the result of the one before.
fn read_dependent(rig: &mut Rig, volume: &Attachment, clock: Clock) -> Result<f64> {
    const READS: u64 = 1_000_000;
    let mut place = 0;
    let from = clock.ns();
    for number in 0..READS {
        let extent = mix(place ^ number) % (TIB / EXTENT);
        place = rig.read(volume, extent * EXTENT)?;
    }
    Ok((clock.ns() - from) as f64 / READS as f64)
}

fn read(rig: &mut Rig, volume: &Attachment, clock: Clock) -> Result<f64> {
    const READS: u64 = 2_000_000;
    let from = clock.ns();
    for number in 0..READS {
        let extent = mix(number) % (TIB / EXTENT);
        std::hint::black_box(rig.read(volume, extent * EXTENT)?);
    }
    Ok((clock.ns() - from) as f64 / READS as f64)
}

/// Nanoseconds of planning and of completing an overwrite, in batches, so that the clock's own cost
/// disappears. With `warm`, a batch is prefetched before it is planned, as a front-end does with
/// requests from a queue; that time counts.
fn overwrite(
    rig: &mut Rig,
    volume: &Attachment,
    clock: Clock,
    (extents, warm): (u64, bool),
) -> Result<[f64; 2]> {
    const BATCHES: u64 = 40_000;
    let new_plan = |_| blockd_mapper::plan::Plan::with_capacity(0);
    let mut plans: Vec<_> = (0..BATCH).map(new_plan).collect();
    let (mut planning, mut completing, mut number) = (0, 0, 1 << 40);
    for _ in 0..BATCHES {
        let start = clock.ns();
        for ahead in (number + 1..=number + BATCH as u64).filter(|_| warm) {
            rig.worker.warm(volume, mix(ahead) % extents * EXTENT);
        }
        for plan in &mut plans {
            number += 1;
            let offset = mix(number) % extents * EXTENT;
            rig.worker.write(volume, offset, BLOCK, false, plan)?;
        }
        let planned = clock.ns();
        for plan in &mut plans {
            rig.worker.complete(volume, plan, Ok(()))?;
        }
        completing += clock.ns() - planned;
        planning += planned - start;
    }
    let count = (BATCHES * BATCH as u64) as f64;
    Ok([planning as f64 / count, completing as f64 / count])
}

fn resident_mib() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/self/statm")?;
    let pages: f64 = text.split_whitespace().nth(1).context("statm has two fields")?.parse()?;
    Ok(pages * 4096.0 / (1 << 20) as f64)
}
