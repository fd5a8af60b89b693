//! The pause that clients see while the daemon is ended and started again, with several devices
//! under load.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use super::backing::Disk;
use super::daemon::{Daemon, Pool};
use super::{Bench, Mode};
use crate::block::{Order, Settings, Turn};
use crate::report::{Budget, Row};
use crate::stats::median;

/// Devices under load.
const DEVICES: u32 = 10;
/// Bytes of each.
const BYTES: u64 = 32 << 20;
/// Seconds under load, and after how many of them the daemon ends.
const SECONDS: f64 = 6.0;
const AFTER: Duration = Duration::from_secs(2);
/// Times each.
const TIMES: u64 = 3;
/// The longest gap that is promised, in seconds.
const LONGEST: f64 = 1.0;
const POOL: &str = "restart";

/// Measures, and returns the rows of the report.
pub fn rows(bench: &Bench) -> Result<Vec<Row>> {
    let Some(program) = &bench.blockd else { return Ok(Vec::new()) };
    let folder = bench.jobs.scratch.join("restart");
    let pool = Pool { name: POOL, disk: Disk::Second, extent: 256 << 10 };
    let mut daemon = Daemon::start(program, &folder, Mode::ZeroCopy, &[pool])?;
    let mut turns = Vec::new();
    for number in 0..DEVICES {
        let (device, _) = daemon.add(POOL, &format!("volume-{number}"), BYTES)?;
        turns.push(Turn::device(&device.path, None));
    }
    bench.jobs.run("fill", &Settings::default(), &turns)?;
    let mut rows = Vec::new();
    // The longest request without a restart.
    let quiet = pulse(bench, &turns, 0, || Ok(()))?;
    rows.push(row("nothing happens", quiet, Budget::None));
    for (signal, name) in [(Signal::SIGKILL, "kill -9"), (Signal::SIGTERM, "SIGTERM")] {
        let mut longest = Vec::new();
        for seed in 0..if bench.quick { 1 } else { TIMES } {
            let gap = pulse(bench, &turns, seed, || {
                std::thread::sleep(AFTER);
                daemon.end(signal)?;
                daemon.run()?;
                daemon.wait()
            });
            longest.push(gap.with_context(|| format!("{name} under load"))?);
        }
        let worst = longest.iter().copied().fold(0.0, f64::max);
        let middle = median(&longest).unwrap_or(f64::NAN);
        rows.push(row(&format!("{name}, median of {}", longest.len()), middle, Budget::None));
        rows.push(row(&format!("{name}, worst"), worst, Budget::AtMost(LONGEST)));
    }
    daemon.end(Signal::SIGTERM)?;
    Ok(rows)
}

fn row(what: &str, seconds: f64, budget: Budget) -> Row {
    let name = format!("restart, {DEVICES} devices: longest gap, {what}");
    Row::new(name, seconds, "s", budget)
}

/// The longest time that any write on any device took, while something happens to the daemon.
fn pulse(
    bench: &Bench,
    turns: &[Turn],
    seed: u64,
    event: impl FnOnce() -> Result<()>,
) -> Result<f64> {
    let settings = Settings { depth: 1, seconds: SECONDS, seed, ..Settings::default() };
    let samples = std::thread::scope(|scope| {
        let load =
            scope.spawn(|| bench.jobs.run_ordered("pulse", &settings, turns, Order::Together));
        event()?;
        load.join().map_err(|_| anyhow::anyhow!("the load has panicked"))?
    })?;
    ensure!(samples.len() == turns.len(), "{} of {} ran", samples.len(), turns.len());
    Ok(samples.iter().map(|sample| sample.longest_s).fold(0.0, f64::max))
}
