//! Measures the cost of listing many volumes: how long ListVolumes takes, and whether polling the
//! conditions of all of them once a second changes the latency of reads and writes.
//!
//! Latency is compared in pairs of intervals, one with and one without polling, in turns and right
//! after each other, so that other load of the machine affects both alike.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::{
    CreateVolumeRequest, ListVolumesRequest, NodeGetVolumeStatsRequest, Volume,
};
use blockd_testkit::clock::Clock;
use blockd_testkit::tools;
use blockd_tests::csi::rig::{Rig, Settings};
use blockd_tests::csi::{Driver, block, range};
use clap::Parser;
use serde_json::{Value, json};
use tonic::{Code, Request};

/// Limit on the time of a listing with a thousand volumes.
const BUDGET_MS: f64 = 100.0;
/// By how much the 99th part of a hundred of latencies may be later while volumes are polled, as a
/// part of what it is without. Less than this is lost in what a machine does by itself.
const MOVED_BUDGET: f64 = 0.05;
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
    /// Seconds of IO of an interval.
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Pairs of intervals, with and without polling.
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u64).range(2..=31))]
    pairs: u64,
    /// Volumes whose stats are requested each second as well: kubelets do so once a minute for
    /// each.
    #[arg(long, default_value_t = 17)]
    stats: usize,
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
    let start = Clock::start();
    fill(&driver, arguments.volumes)?;
    let created = start.elapsed();
    let whole = times(arguments.lists, || list(&driver, 0, arguments.volumes))?;
    let paged = times(arguments.lists / 10, || list(&driver, 100, arguments.volumes))?;
    rig.daemon.add("busy", 256 << 20)?;
    io(&rig, "write", 2)?;
    let mut idle = Vec::new();
    let mut asked = Vec::new();
    let mut polls = 0;
    let poll = Poll { volumes: &driver.all_volumes(0)?, stats: arguments.stats };
    for pair in 0..arguments.pairs {
        // Which is first changes, so that a trend is in neither.
        for polled in [pair % 2 == 0, pair % 2 != 0] {
            if polled {
                let (result, count) =
                    poll.beside(&rig, || io(&rig, "randrw", arguments.seconds))?;
                asked.push(result);
                polls += count;
            } else {
                idle.push(io(&rig, "randrw", arguments.seconds)?);
            }
        }
    }
    let moved = ["read", "write"].map(|way| compare(way, &idle, &asked));
    let figures = json!({
        "volumes": arguments.volumes,
        "created_s": created.as_secs_f64(),
        "list_ms": whole,
        "list_in_pages_of_100_ms": paged,
        "budget_ms": BUDGET_MS,
        "io_alone": idle,
        "io_while_polled_each_second": asked,
        "polls": polls,
        "stats_in_each": arguments.stats,
        "p99_polled_less_alone": moved,
    });
    if arguments.json {
        println!("{figures:#}");
    } else {
        print(&figures);
    }
    let claims = claims(&figures);
    for (claim, met) in &claims {
        // With JSON on standard output, these are for people.
        let line = format!("{claim}: {}", if *met { "met" } else { "not met" });
        if arguments.json { eprintln!("{line}") } else { println!("{line}") }
    }
    let missed = claims.iter().filter(|(_, met)| !met).count();
    ensure!(missed == 0, "{missed} of {} claims are not met", claims.len());
    Ok(())
}

/// The claims about listing, and whether these figures show them.
fn claims(figures: &Value) -> Vec<(String, bool)> {
    let float = |of: &Value| of.as_f64();
    let (volumes, p99) = (&figures["volumes"], float(&figures["list_ms"]["p99"]));
    let list = format!("ListVolumes of {volumes} volumes in less than {BUDGET_MS} ms (p99)");
    let mut claims = vec![(list, p99.is_some_and(|ms| ms < BUDGET_MS))];
    for of in figures["p99_polled_less_alone"].as_array().into_iter().flatten() {
        let way = of["way"].as_str().unwrap_or_default();
        let claim = format!("polling each second moves the p99 of {way}s by less than 5 %");
        let met = float(&of["low_ms"]).zip(float(&of["alone_ms"]));
        // Later for certain only if all of the interval is.
        claims.push((claim, met.is_some_and(|(low, alone)| low < alone * MOVED_BUDGET)));
    }
    claims
}

/// The figures for people.
fn print(figures: &Value) {
    let float = |of: &Value| of.as_f64().unwrap_or_default();
    println!("{} volumes, made in {:.1} s", figures["volumes"], float(&figures["created_s"]));
    let row = |name: &str, of: &Value| {
        println!(
            "{name:<32} p50 {:>8.2} ms   p99 {:>8.2} ms   max {:>8.2} ms",
            float(&of["p50"]),
            float(&of["p99"]),
            float(&of["max"])
        );
    };
    row("ListVolumes, all at once", &figures["list_ms"]);
    row("ListVolumes, in pages of 100", &figures["list_in_pages_of_100_ms"]);
    for (name, runs) in [("alone", "io_alone"), ("polled", "io_while_polled_each_second")] {
        for of in figures[runs].as_array().into_iter().flatten() {
            row(&format!("4 KiB reads, {name}"), &of["read"]);
            row(&format!("4 KiB writes, {name}"), &of["write"]);
        }
    }
    let (polls, stats) = (&figures["polls"], &figures["stats_in_each"]);
    println!("polled {polls} times: the list, and {stats} nodes each time");
    for of in figures["p99_polled_less_alone"].as_array().into_iter().flatten() {
        println!(
            "p99 of {}s, polled less alone: {:+.3} ms, 95 % between {:+.3} and {:+.3} ms, \
             of {} pairs: {}",
            of["way"].as_str().unwrap_or_default(),
            float(&of["mean_ms"]),
            float(&of["low_ms"]),
            float(&of["high_ms"]),
            of["pairs"],
            if of["moved"] == true { "moved" } else { "not moved beyond its interval" }
        );
    }
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
        let start = Clock::start();
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
    // There may be other output before.
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

/// The calls of a volume monitor.
struct Poll<'a> {
    volumes: &'a [Volume],
    stats: usize,
}

impl Poll<'_> {
    /// Polls once a second while `what` runs, and returns how often.
    fn beside<T>(&self, rig: &Rig, what: impl FnOnce() -> Result<T>) -> Result<(T, u64)> {
        let driver = rig.plugin.driver()?;
        let nowhere = rig.plugin.kubelet_dir().join("pods/none").to_string_lossy().into_owned();
        let (done, count) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| -> Result<()> {
                let mut next = self.volumes.iter().cycle();
                let start = Clock::start();
                while !done.load(Ordering::Relaxed) {
                    self.once(&driver, &mut next, &nowhere)?;
                    let polls = count.fetch_add(1, Ordering::Relaxed) + 1;
                    // By the clock, so that a slow answer makes no pause longer.
                    let due = Duration::from_secs(polls);
                    std::thread::sleep(due.saturating_sub(start.elapsed()));
                }
                Ok(())
            });
            let result = what();
            done.store(true, Ordering::Relaxed);
            let asked = asking.join().map_err(|_| anyhow::anyhow!("asking panicked"))?;
            asked.and(result).map(|result| (result, count.load(Ordering::Relaxed)))
        })
    }

    fn once<'a>(
        &self,
        driver: &Driver,
        next: &mut impl Iterator<Item = &'a Volume>,
        path: &str,
    ) -> Result<()> {
        let listed = driver.list_volumes(ListVolumesRequest::default())?.entries;
        let has_condition = |entry: &blockd_csi::proto::list_volumes_response::Entry| {
            entry.status.as_ref().is_some_and(|status| status.volume_condition.is_some())
        };
        ensure!(listed.iter().all(has_condition), "a volume without its condition is listed");
        for volume in next.take(self.stats) {
            let request = NodeGetVolumeStatsRequest {
                volume_id: volume.volume_id.clone(),
                volume_path: path.to_owned(),
                ..Default::default()
            };
            // Nothing is staged here: the daemon is asked as always, and a file system is not.
            let answer = driver.node_get_volume_stats(request);
            let code = answer.err().map(|status| status.code());
            ensure!(code == Some(Code::NotFound), "a path that never was: {code:?}");
        }
        Ok(())
    }
}

/// The increase of the 99th percentile of latency under polling: the mean over pairs, and its 95 %
/// confidence interval.
fn compare(way: &str, alone: &[Value], polled: &[Value]) -> Value {
    let p99 = |of: &Value| of[way]["p99"].as_f64().unwrap_or_default();
    let differences: Vec<f64> =
        alone.iter().zip(polled).map(|(alone, polled)| p99(polled) - p99(alone)).collect();
    let (mean, half) = interval(&differences);
    let (alone_mean, _) = interval(&alone.iter().map(p99).collect::<Vec<_>>());
    json!({
        "way": way,
        "pairs": differences.len(),
        "differences_ms": differences,
        "alone_ms": alone_mean,
        "mean_ms": mean,
        "low_ms": mean - half,
        "high_ms": mean + half,
        "moved": mean.abs() > half,
    })
}

/// Mean of a few numbers, and half of its interval of 95 %.
fn interval(of: &[f64]) -> (f64, f64) {
    let count = of.iter().fold(0.0, |sum, _| sum + 1.0);
    let mean = of.iter().sum::<f64>() / count;
    let square: f64 = of.iter().map(|one| (one - mean).powi(2)).sum();
    let freedom = of.len().saturating_sub(1).clamp(1, STUDENT.len());
    let deviation = (square / (count - 1.0)).sqrt();
    (mean, STUDENT[freedom - 1] * deviation / count.sqrt())
}

/// Student's t for two-sided intervals of 95 %, by degrees of freedom from 1 on.
const STUDENT: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_that_of_students_distribution() {
        let (mean, half) = interval(&[1.0, 2.0, 3.0, 4.0, 5.0]);
        // t = 2.776 for 4 degrees, deviation 1.5811.
        assert!((mean - 3.0).abs() < 1e-9 && (half - 1.9629).abs() < 1e-3, "{mean} {half}");
    }

    #[test]
    fn a_slow_list_or_later_io_is_a_claim_that_is_not_met() {
        let of = |p99: f64| json!({ "read": { "p99": p99 } });
        let met = |list_ms: f64, polled: [f64; 4]| {
            let alone: Vec<Value> = [1.0, 1.1, 0.9, 1.0].map(of).into();
            let moved = compare("read", &alone, &polled.map(of));
            let list = json!({ "p99": list_ms });
            let figures =
                json!({ "volumes": 1000, "list_ms": list, "p99_polled_less_alone": [moved] });
            claims(&figures).into_iter().map(|(_, met)| met).collect::<Vec<_>>()
        };
        assert_eq!(met(99.9, [1.0, 1.1, 0.9, 1.0]), [true, true]);
        assert_eq!(met(100.0, [1.0, 1.1, 0.9, 1.0]), [false, true]);
        assert_eq!(met(5.0, [2.0, 2.1, 1.9, 2.0]), [true, false]);
        assert_eq!(met(5.0, [0.5, 0.6, 0.4, 0.5]), [true, true], "earlier is no harm");
        // Figures that are missing show nothing.
        assert!(claims(&json!({})).iter().all(|(_, met)| !met));
    }

    #[test]
    fn a_difference_within_its_interval_has_not_moved() {
        let of = |p99: f64| json!({ "read": { "p99": p99 } });
        let alone: Vec<Value> = [1.0, 2.0, 1.5, 1.2].map(of).into();
        let alike: Vec<Value> = [1.9, 1.1, 1.4, 1.3].map(of).into();
        assert_eq!(compare("read", &alone, &alike)["moved"], false);
        let later: Vec<Value> = [2.0, 3.0, 2.6, 2.2].map(of).into();
        assert_eq!(compare("read", &alone, &later)["moved"], true);
    }
}
