//! The daemon beside another build of it, such as one from before a change, in pairs.

use std::path::Path;

use anyhow::{Context, Result};

use super::claims::{Figure, Stage, Workload};
use super::first_touch::{self, Place};
use super::measure::{Sample, ratio, run, settings};
use super::server::{Kind, Server};
use super::{Bench, Folders};
use crate::stats::Ratio;

/// This one beside the other one.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The name of the workload.
    pub name: String,
    /// Median operations a second of this one, and of the other one.
    pub iops: (f64, f64),
    /// How many times as many operations a second.
    pub ratio: Ratio,
    /// How many times as much CPU the other one takes for each.
    pub cpu: Ratio,
}

impl Outcome {
    fn of(name: String, pairs: &[(Sample, Sample)]) -> Result<Self> {
        let all = |side: fn(&(Sample, Sample)) -> f64| {
            crate::stats::median(&pairs.iter().map(side).collect::<Vec<_>>()).unwrap_or(f64::NAN)
        };
        let of = |figure| ratio(pairs, figure).context("no pairs");
        Ok(Self {
            name,
            iops: (all(|pair| pair.0.iops), all(|pair| pair.1.iops)),
            ratio: of(Figure::Iops)?,
            cpu: of(Figure::Cpu)?,
        })
    }

    /// Whether it is slower beyond the interval of the pairs.
    #[must_use]
    pub fn is_worse(&self) -> bool {
        self.ratio.high < 1.0
    }
}

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
    named.map(|(workload, pairs)| Outcome::of(workload.name(stage), pairs)).collect()
}

/// Both results, of which the first or the second is made first.
fn alternate<T>(
    first: bool,
    one: impl FnOnce() -> Result<T>,
    other: impl FnOnce() -> Result<T>,
) -> Result<(T, T)> {
    if first {
        let one = one()?;
        Ok((one, other()?))
    } else {
        let other = other()?;
        Ok((one()?, other))
    }
}

/// First writes, and overwrites behind them, each on a fresh volume.
pub fn first_touch(bench: &Bench, before: &Path, place: &Place<'_>) -> Result<Vec<Outcome>> {
    let ours = bench.blockd.as_deref().context("there is no daemon to compare")?;
    let written = first_touch::write_file(place)?;
    let (mut first, mut again) = (Vec::new(), Vec::new());
    for seed in 0..bench.effort.pairs as u64 {
        let once = |program| first_touch::ours_once(&bench.jobs, place, program, seed);
        let (now, then) = alternate(seed % 2 == 0, || once(ours), || once(before))?;
        first.push((now[0], then[0]));
        again.push((now[1], then[1]));
    }
    drop(written);
    Ok(vec![
        Outcome::of("first-touch".to_owned(), &first)?,
        Outcome::of("first-touch, overwrite".to_owned(), &again)?,
    ])
}
