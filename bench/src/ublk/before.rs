//! The daemon beside another build of it, such as one from before a change, in pairs. Each has a
//! ramdisk of its own in the same machine. One ramdisk's memory can be slower than the other's by
//! several per cent: all is measured twice, with the ramdisks changed over, and a round counts with
//! the geometric mean of its two ratios.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::backing::Disk;
use super::daemon::{Daemon, Pool};
use super::first_touch::{self, VOLUME};
use super::mapped::{self, BYTES, Devices, Pair, WORKLOADS};
use super::{Bench, Mode};
use crate::before::{Outcome, alternate};
use crate::block::{Sample, Settings, Turn};
use crate::stats::Ratio;

/// Which ramdisk this build has, and which the other one.
const PLACES: [[Disk; 2]; 2] = [[Disk::First, Disk::Second], [Disk::Second, Disk::First]];

/// Measures all selected workloads. Results are shown as they arrive.
pub fn measure(bench: &Bench, before: &Path, show: impl Fn(&Outcome)) -> Result<Vec<Outcome>> {
    let now = bench.blockd.as_deref().context("there is no daemon to compare")?;
    // Each round is done at both places.
    let bench = &Bench { pairs: bench.pairs.div_ceil(2), ..bench.clone() };
    let mut outcomes = Vec::new();
    for mode in Mode::ALL {
        for outcome in mapped_in(bench, now, before, mode)? {
            show(&outcome);
            outcomes.push(outcome);
        }
    }
    for (chunk, depth) in first_touch::shapes() {
        if bench.includes(&first_touch::name(chunk, depth)) {
            for outcome in first_touches(bench, now, before, chunk, depth)? {
                show(&outcome);
                outcomes.push(outcome);
            }
        }
    }
    Ok(outcomes)
}

/// Operations a second of this build and of the other one, round by round, at each place.
type Rounds = [Vec<(f64, f64)>; 2];

fn mapped_in(bench: &Bench, now: &Path, before: &Path, mode: Mode) -> Result<Vec<Outcome>> {
    let wanted: Vec<_> =
        WORKLOADS.into_iter().filter(|workload| bench.includes(&workload.name())).collect();
    let mut rounds: Vec<Rounds> = vec![Rounds::default(); wanted.len()];
    let mut controls = vec![None; wanted.len()];
    for (place, disks) in PLACES.into_iter().enumerate() {
        if wanted.is_empty() {
            break;
        }
        let Some((_daemons, devices)) = both(bench, [now, before], mode, disks)? else {
            println!("note: {} is not to be had here", mode.name());
            return Ok(Vec::new());
        };
        for (number, workload) in wanted.iter().enumerate() {
            let outcome = mapped::measure(bench, workload, &devices)?;
            let [ours, theirs] = &outcome.lines[..] else { anyhow::bail!("not two lines") };
            let pairs = ours.samples.iter().zip(&theirs.samples);
            rounds[number][place] = pairs.map(|(a, b)| (a.iops, b.iops)).collect();
            let control = outcome.findings.first().map(|finding| finding.control);
            // The wider one shows more of the machine's noise.
            let width = |one: &Ratio| one.high - one.low;
            if control.as_ref().map(width) > controls[number].as_ref().map(width) {
                controls[number] = control;
            }
        }
    }
    let all = wanted.iter().zip(rounds).zip(controls);
    all.map(|((workload, rounds), control)| {
        outcome(format!("{}, {}", workload.name(), mode.name()), &rounds, control)
    })
    .collect()
}

/// Both builds with a volume each, written once; nothing where the kernel has no such mode.
fn both(
    bench: &Bench,
    programs: [&Path; 2],
    mode: Mode,
    disks: [Disk; 2],
) -> Result<Option<([Daemon; 2], Devices)>> {
    let start = |number: usize, name: &str| {
        let disk = disks[number];
        let pool = Pool { name: "mapped", disk, extent: 256 << 10 };
        // A daemon that knows a pool from another disk would miss it on this one.
        let folder = bench.jobs.scratch.join(format!("before-{name}-{mode:?}-{disk:?}"));
        let daemon = Daemon::start(programs[number], &folder, mode, &[pool])?;
        let (mut device, real) = daemon.add("mapped", "data", BYTES)?;
        device.name = name.to_owned();
        anyhow::Ok((daemon, device, real))
    };
    let (now, ours, real) = start(0, "now")?;
    let (before, peer, other) = start(1, "before")?;
    ensure!(real == other, "one build serves by {}, the other by {}", real.name(), other.name());
    if real != mode {
        return Ok(None);
    }
    let pairs = vec![Pair { mode, ours: Some(ours), peer }];
    let devices = Devices { pairs, others: Vec::new() };
    devices.prepare(bench)?;
    Ok(Some(([now, before], devices)))
}

/// First writes, and the same blocks again, each time on a fresh volume. In each round this build
/// does them once more: the A/A control.
fn first_touches(
    bench: &Bench,
    now: &Path,
    before: &Path,
    chunk: u64,
    depth: u32,
) -> Result<Vec<Outcome>> {
    // First writes and overwrites, beside the other build and beside itself.
    let (mut first, mut again) = (<[Rounds; 2]>::default(), <[Rounds; 2]>::default());
    for (place, disks) in PLACES.into_iter().enumerate() {
        let start = |program: &Path, name: &str, disk: Disk| {
            disk.warm(first_touch::taken(bench) / 2 * 3)?;
            let pool = Pool { name: "touched", disk, extent: chunk };
            let folder = bench.jobs.scratch.join(format!("touch-{name}-{chunk}-{depth}-{disk:?}"));
            Daemon::start(program, &folder, Mode::ZeroCopy, &[pool])
        };
        let now = start(now, "now", disks[0])?;
        let before = start(before, "before", disks[1])?;
        let once = |daemon: &Daemon, seed: u64| touched(bench, daemon, chunk, depth, seed);
        // The first run of each device is not counted.
        once(&now, 0)?;
        once(&before, 0)?;
        for round in 1..=bench.pairs as u64 * mapped::ROUNDS_PER_PAIR as u64 {
            let (ours, theirs) =
                alternate(round % 2 == 0, || once(&now, round), || once(&before, round))?;
            let control = once(&now, round)?;
            for (beside, other) in [theirs, control].iter().enumerate() {
                first[beside][place].push((ours[0].iops, other[0].iops));
                again[beside][place].push((ours[1].iops, other[1].iops));
            }
        }
    }
    let name = first_touch::name(chunk, depth);
    let overwrite = format!("{name}, overwrite");
    let all = [(name, first), (overwrite, again)].into_iter();
    all.map(|(name, [before, itself])| outcome(name, &before, Some(combined(&itself)?))).collect()
}

/// A fresh volume's first writes, and the same blocks once more.
fn touched(
    bench: &Bench,
    daemon: &Daemon,
    chunk: u64,
    depth: u32,
    seed: u64,
) -> Result<[Sample; 2]> {
    let (device, _) = daemon.add("touched", "data", VOLUME)?;
    let bytes = first_touch::operations(bench, chunk, depth) * first_touch::OPERATION;
    let settings = Settings { depth, seed, bytes, ..Settings::default() };
    let run = || -> Result<Sample> {
        let turn = Turn::device(&device.path, device.server);
        let samples = bench.jobs.run("first-touch", &settings, &[turn])?;
        samples.first().copied().context("fio has shown nothing")
    };
    let both = [run()?, run()?];
    daemon.delete("touched", "data")?;
    Ok(both)
}

/// The ratio of the first column to the second one, without what one ramdisk is faster.
fn combined([one, two]: &Rounds) -> Result<Ratio> {
    let ratio = |(ours, theirs): &(f64, f64)| ours / theirs;
    let rounds = one.iter().zip(two);
    let ratios: Vec<f64> = rounds.map(|(one, two)| (ratio(one) * ratio(two)).sqrt()).collect();
    Ratio::of(&ratios).context("no pairs")
}

fn outcome(name: String, rounds: &Rounds, control: Option<Ratio>) -> Result<Outcome> {
    let iops = Outcome::medians(&rounds.concat());
    Ok(Outcome { name, iops, ratio: combined(rounds)?, cpu: None, control })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slower_ramdisk_is_in_no_ratio() {
        // The second ramdisk is slower by a tenth for either program.
        let rounds = [vec![(100.0, 90.0); 9], vec![(90.0, 100.0); 9]];
        let same = outcome("same".to_owned(), &rounds, None).unwrap();
        assert!((same.ratio.median - 1.0).abs() < 1e-9 && !same.is_worse(), "{same:?}");
        // And this build by a fifth on top.
        let rounds = [vec![(80.0, 90.0); 9], vec![(72.0, 100.0); 9]];
        let worse = outcome("worse".to_owned(), &rounds, None).unwrap();
        assert!((worse.ratio.median - 0.8).abs() < 1e-9 && worse.is_worse(), "{worse:?}");
    }
}
