//! The daemon beside another build of it, such as one from before a change, in pairs.

use std::path::Path;

use anyhow::{Context, Result};

use super::claims::{Figure, Stage, Workload};
use super::first_touch::{self, Place};
use super::measure::{Sample, ratio, run, settings};
use super::server::{Kind, Server};
use super::{Bench, Folders};
use crate::before::{Outcome, alternate};

/// One stage's workloads, each with all its pairs. Every pair has processes and files of its own: a
/// server keeps the place in memory that its files and buffers got when it started, and by that
/// alone one of two equal servers can be a tenth faster for as long as it runs. The build that is
/// started first, and measured first, alternates.
pub fn stage(
    bench: &Bench,
    before: &Path,
    stage: &Stage,
    workloads: &[Workload],
    folders: &Folders,
) -> Result<Vec<Outcome>> {
    let ours = bench.blockd.as_deref().context("there is no daemon to compare")?;
    // A daemon's state is in a folder of its name, and remembers the pool that was served.
    let start = |program: &Path, name: &str, round: usize| {
        let name = format!("{}-{name}-{round}", stage.name);
        bench.with(program, Kind::Blockd, stage.medium, &name, folders)
    };
    let mut pairs = vec![Vec::new(); workloads.len()];
    for round in 0..bench.effort.pairs {
        let ours_first = round % 2 == 0;
        let (now, then) =
            alternate(ours_first, || start(ours, "now", round), || start(before, "before", round))?;
        for (workload, pairs) in workloads.iter().zip(&mut pairs) {
            let once = |server: &Server| {
                let settings = settings(workload, server, bench.effort.seconds, round as u64);
                run(&bench.jobs, workload.job, server, settings)
            };
            pairs.push(alternate(ours_first, || once(&now), || once(&then))?);
        }
    }
    let named = workloads.iter().zip(&pairs);
    named.map(|(workload, pairs)| outcome(workload.name(stage), pairs)).collect()
}

/// First writes, and overwrites behind them, each on a fresh volume.
pub fn first_touch(bench: &Bench, before: &Path, place: &Place<'_>) -> Result<Vec<Outcome>> {
    let ours = bench.blockd.as_deref().context("there is no daemon to compare")?;
    let written = first_touch::write_file(&place.file, super::ours::pool_bytes(place.size))?;
    let (mut first, mut again) = (Vec::new(), Vec::new());
    for seed in 0..bench.effort.pairs as u64 {
        let once = |program| first_touch::ours_once(&bench.jobs, place, program, seed);
        let (now, then) = alternate(seed % 2 == 0, || once(ours), || once(before))?;
        first.push((now[0], then[0]));
        again.push((now[1], then[1]));
    }
    drop(written);
    Ok(vec![
        outcome("first-touch".to_owned(), &first)?,
        outcome("first-touch, overwrite".to_owned(), &again)?,
    ])
}

fn outcome(name: String, pairs: &[(Sample, Sample)]) -> Result<Outcome> {
    let iops: Vec<(f64, f64)> = pairs.iter().map(|(now, then)| (now.iops, then.iops)).collect();
    let (iops, cpu) = (Outcome::medians(&iops), ratio(pairs, Figure::Cpu));
    let ratio = ratio(pairs, Figure::Iops).context("no pairs")?;
    Ok(Outcome { name, iops, ratio, cpu, control: None })
}
