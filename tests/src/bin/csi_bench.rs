//! What listing many volumes costs: how long ListVolumes takes, and what asking once a second does
//! to the latency of reads and writes.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::{CreateVolumeRequest, ListVolumesRequest};
use blockd_tests::csi::rig::{Rig, Settings};
use blockd_tests::csi::{Driver, block, range};
use blockd_tests::sim::runner::clock;
use blockd_tests::tools;
use clap::Parser;
use serde_json::{Value, json};
use tonic::Request;

/// What listing may take with a thousand volumes.
const BUDGET_MS: f64 = 100.0;
/// Creations at once.
const AT_ONCE: usize = 50;

/// Listing a thousand volumes, and what that does to their IO.
#[derive(Parser, Debug)]
struct Arguments {
    /// Volumes.
    #[arg(long, default_value_t = 1000)]
    volumes: usize,
    /// Lists that are timed.
    #[arg(long, default_value_t = 100)]
    lists: usize,
    /// Seconds of IO with and without anybody who asks; each is done twice, in turns.
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Print the figures as JSON.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("csi_bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let rig = Rig::start("bench", &Settings { log: "warn".to_owned(), ..Settings::default() })?;
    let driver = rig.plugin.driver()?;
    let start = clock();
    fill(&driver, arguments.volumes)?;
    let created = start.elapsed();
    let whole = times(arguments.lists, || list(&driver, 0, arguments.volumes))?;
    let paged = times(arguments.lists / 10, || list(&driver, 100, arguments.volumes))?;
    rig.daemon.add("busy", 256 << 20)?;
    io(&rig, "write", 2)?;
    let mut idle = Vec::new();
    let mut asked = Vec::new();
    for _ in 0..2 {
        idle.push(io(&rig, "randrw", arguments.seconds)?);
        asked.push(while_listing(&driver, || io(&rig, "randrw", arguments.seconds))?);
    }
    let figures = json!({
        "volumes": arguments.volumes,
        "created_s": created.as_secs_f64(),
        "list_ms": whole,
        "list_in_pages_of_100_ms": paged,
        "budget_ms": BUDGET_MS,
        "io_alone": idle,
        "io_while_listed_each_second": asked,
    });
    if arguments.json {
        println!("{figures:#}");
        return Ok(());
    }
    println!("{} volumes, made in {:.1} s", arguments.volumes, created.as_secs_f64());
    let row = |name: &str, of: &Value| {
        println!(
            "{name:<32} p50 {:>8.2} ms   p99 {:>8.2} ms   max {:>8.2} ms",
            of["p50"].as_f64().unwrap_or_default(),
            of["p99"].as_f64().unwrap_or_default(),
            of["max"].as_f64().unwrap_or_default()
        );
    };
    row("ListVolumes, all at once", &whole);
    row("ListVolumes, in pages of 100", &paged);
    for (name, runs) in [("alone", &idle), ("listed each second", &asked)] {
        for of in runs {
            row(&format!("4 KiB reads, {name}"), &of["read"]);
            row(&format!("4 KiB writes, {name}"), &of["write"]);
        }
    }
    let p99 = whole["p99"].as_f64().unwrap_or_default();
    println!(
        "budget: {BUDGET_MS} ms for the list: {}",
        if p99 < BUDGET_MS { "met" } else { "missed" }
    );
    Ok(())
}

fn fill(driver: &Driver, count: usize) -> Result<()> {
    let runtime = driver.runtime();
    for first in (0..count).step_by(AT_ONCE) {
        let calls = (first..count.min(first + AT_ONCE)).map(|number| {
            let request = CreateVolumeRequest {
                name: format!("pvc-{number:06}"),
                capacity_range: range(8 << 20, 0),
                volume_capabilities: vec![block(Mode::SingleNodeWriter)],
                ..Default::default()
            };
            let mut controller = driver.controller();
            runtime.spawn(async move { controller.create_volume(Request::new(request)).await })
        });
        for call in calls.collect::<Vec<_>>() {
            runtime.block_on(call).context("a call did not end")??;
        }
    }
    Ok(())
}

fn list(driver: &Driver, page: i32, count: usize) -> Result<()> {
    let listed = driver.all_volumes(page)?.len();
    ensure!(listed == count, "{listed} volumes are listed");
    Ok(())
}

/// Milliseconds: the median, the 99th part of a hundred, and the most.
fn times(count: usize, mut what: impl FnMut() -> Result<()>) -> Result<Value> {
    let mut all = Vec::new();
    for _ in 0..count.max(1) {
        let start = clock();
        what()?;
        all.push(start.elapsed().as_secs_f64() * 1e3);
    }
    all.sort_by(f64::total_cmp);
    let at = |hundredths: usize| all[(all.len() - 1) * hundredths / 100];
    Ok(json!({ "p50": at(50), "p99": at(99), "max": at(100) }))
}

/// fio on the busy volume, one request at a time: latencies in milliseconds.
fn io(rig: &Rig, kind: &str, seconds: u64) -> Result<Value> {
    let mut fio = Command::new(tools::find("fio")?);
    fio.args(["--name=busy", "--ioengine=nbd", "--bs=4k", "--iodepth=1", "--time_based"]);
    fio.arg(format!("--uri={}", rig.daemon.uri("busy"))).arg(format!("--rw={kind}"));
    fio.arg(format!("--runtime={seconds}")).arg("--output-format=json");
    fio.current_dir(Path::new("/tmp"));
    let said = tools::text(&mut fio)?;
    // It may say something else before.
    let at = said.find('{').with_context(|| format!("fio says {said:?}"))?;
    let said: Value = serde_json::from_str(&said[at..]).context("what fio says")?;
    let job = &said["jobs"][0];
    let of = |way: &str| {
        let latency = &job[way]["clat_ns"];
        let ms = |value: &Value| value.as_f64().unwrap_or_default() / 1e6;
        json!({
            "p50": ms(&latency["percentile"]["50.000000"]),
            "p99": ms(&latency["percentile"]["99.000000"]),
            "max": ms(&latency["max"]),
            "iops": job[way]["iops"],
        })
    };
    Ok(json!({ "read": of("read"), "write": of("write") }))
}

/// As what monitors volumes does, once a second.
fn while_listing<T>(driver: &Driver, what: impl FnOnce() -> Result<T>) -> Result<T> {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| -> Result<()> {
            while !done.load(Ordering::Relaxed) {
                driver.list_volumes(ListVolumesRequest::default())?;
                std::thread::sleep(Duration::from_secs(1));
            }
            Ok(())
        });
        let result = what();
        done.store(true, Ordering::Relaxed);
        let asked = asking.join().map_err(|_| anyhow::anyhow!("asking panicked"))?;
        asked.and(result)
    })
}
