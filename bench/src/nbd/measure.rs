//! One workload on servers that are up: first rounds over all of them, then pairs with the best.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use super::claims::{Figure, Target, Workload};
use super::fio::{Jobs, Settings};
use super::server::{Kind, Server};
use crate::stats::{Ratio, median};
use crate::syscalls;

/// How much is done.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Effort {
    /// Seconds of a run.
    pub seconds: f64,
    /// Interleaved pairs with a server that a claim names.
    pub pairs: usize,
    /// Rounds over all servers before them.
    pub rounds: usize,
}

/// One run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sample {
    /// Reads and writes per second.
    pub iops: f64,
    /// Microseconds of the server's CPU for each.
    pub cpu: f64,
}

impl Sample {
    fn ratio(&self, other: &Self, figure: Figure) -> f64 {
        match figure {
            Figure::Iops => self.iops / other.iops,
            Figure::Cpu => other.cpu / self.cpu,
        }
    }
}

/// The results of one server under one workload.
#[derive(Clone, Debug)]
pub struct Line {
    /// Which.
    pub kind: Kind,
    /// Its runs, those of the pairs included.
    pub samples: Vec<Sample>,
    /// Ours beside it, per pair.
    pub iops: Option<Ratio>,
    /// Its CPU beside ours, per pair.
    pub cpu: Option<Ratio>,
    /// System calls per operation.
    pub syscalls: Option<f64>,
}

impl Line {
    /// The median of a figure over its runs.
    #[must_use]
    pub fn median(&self, figure: Figure) -> f64 {
        let figures: Vec<f64> = self.samples.iter().map(|sample| sample.of(figure)).collect();
        median(&figures).unwrap_or(f64::NAN)
    }
}

impl Sample {
    fn of(&self, figure: Figure) -> f64 {
        match figure {
            Figure::Iops => self.iops,
            Figure::Cpu => self.cpu,
        }
    }
}

/// A claim and its result.
#[derive(Clone, Debug)]
pub struct Finding {
    /// Which.
    pub target: Target,
    /// The compared server.
    pub peer: Kind,
    /// How much.
    pub ratio: Ratio,
}

/// Everything about one workload.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Ours first.
    pub lines: Vec<Line>,
    /// In the order of the claims.
    pub findings: Vec<Finding>,
    /// Ours beside ours: the precision of a ratio.
    pub control: Vec<(Figure, Ratio)>,
}

/// One run on one server.
pub fn run(jobs: &Jobs, job: &str, server: &Server, settings: Settings<'_>) -> Result<Sample> {
    let before = server.tree.cpu()?;
    let figures = jobs.run(job, settings).with_context(|| server.words())?;
    let cpu = server.tree.cpu()?.saturating_sub(before);
    Ok(Sample { iops: figures.iops, cpu: cpu.as_secs_f64() * 1e6 / figures.operations })
}

/// Runs a workload on all servers. The first is ours.
pub fn measure(
    jobs: &Jobs,
    workload: &Workload,
    servers: &[Server],
    effort: Effort,
) -> Result<Outcome> {
    let mut seed = 0;
    let mut once = |server: &Server| {
        seed += 1;
        run(jobs, workload.job, server, settings(workload, server, effort.seconds, seed))
    };
    let mut samples: BTreeMap<Kind, Vec<Sample>> = BTreeMap::new();
    for _ in 0..effort.rounds {
        for server in servers {
            samples.entry(server.kind).or_default().push(once(server)?);
        }
    }
    let (ours, others) = servers.split_first().context("no servers")?;
    let rivals = rivals(workload, others, &samples);
    let mut control = Vec::new();
    let mut pairs: BTreeMap<Kind, Vec<(Sample, Sample)>> = BTreeMap::new();
    for round in 0..effort.pairs {
        let first = once(ours)?;
        samples.entry(ours.kind).or_default().push(first);
        // Each in turn stands next to ours.
        for index in 0..rivals.len() {
            let rival = rivals[(index + round) % rivals.len()];
            let sample = once(rival)?;
            samples.entry(rival.kind).or_default().push(sample);
            pairs.entry(rival.kind).or_default().push((first, sample));
        }
        control.push((first, once(ours)?));
    }
    let mut lines = Vec::new();
    for server in servers {
        let pairs = pairs.get(&server.kind);
        let ratio = |figure| pairs.and_then(|pairs| ratio(pairs, figure));
        lines.push(Line {
            kind: server.kind,
            samples: samples.remove(&server.kind).unwrap_or_default(),
            iops: ratio(Figure::Iops),
            cpu: ratio(Figure::Cpu),
            syscalls: count(jobs, workload, server, effort.seconds)?,
        });
    }
    let findings = workload.targets.iter().filter_map(|target| find(*target, &lines));
    let findings = findings.collect();
    let control = [Figure::Iops, Figure::Cpu]
        .into_iter()
        .filter_map(|figure| Some((figure, ratio(&control, figure)?)))
        .collect();
    Ok(Outcome { lines, findings, control })
}

pub(super) fn settings<'a>(
    workload: &Workload,
    server: &'a Server,
    seconds: f64,
    seed: u64,
) -> Settings<'a> {
    Settings { uri: &server.uri, seconds, connections: workload.connections, seed, bytes: 0 }
}

/// Returns the servers that the claims name, each once.
fn rivals<'a>(
    workload: &Workload,
    others: &'a [Server],
    samples: &BTreeMap<Kind, Vec<Sample>>,
) -> Vec<&'a Server> {
    let mut rivals: Vec<&Server> = Vec::new();
    for target in workload.targets {
        let allowed = others.iter().filter(|server| target.peer.allows(server.kind));
        let score = |server: &&Server| {
            let samples = samples.get(&server.kind).map_or(&[][..], Vec::as_slice);
            let figures: Vec<f64> = samples.iter().map(|s| s.of(target.figure)).collect();
            let figure = median(&figures).unwrap_or(0.0);
            if target.figure == Figure::Cpu { -figure } else { figure }
        };
        let best = allowed.max_by(|a, b| score(a).total_cmp(&score(b)));
        if let Some(best) = best
            && !rivals.iter().any(|rival| rival.kind == best.kind)
        {
            rivals.push(best);
        }
    }
    rivals
}

pub(super) fn ratio(pairs: &[(Sample, Sample)], figure: Figure) -> Option<Ratio> {
    let ratios: Vec<f64> = pairs.iter().map(|(ours, other)| ours.ratio(other, figure)).collect();
    Ratio::of(&ratios)
}

/// The lowest of our ratios with those that the claim is about.
fn find(target: Target, lines: &[Line]) -> Option<Finding> {
    let beside = |line: &Line| match target.figure {
        Figure::Iops => line.iops,
        Figure::Cpu => line.cpu,
    };
    let others = lines.iter().skip(1).filter(|line| target.peer.allows(line.kind));
    let found = others.filter_map(|line| Some((line.kind, beside(line)?)));
    let (peer, ratio) = found.min_by(|a, b| a.1.median.total_cmp(&b.1.median))?;
    Some(Finding { target, peer, ratio })
}

/// System calls per operation, in a run of its own: counting costs.
fn count(jobs: &Jobs, workload: &Workload, server: &Server, seconds: f64) -> Result<Option<f64>> {
    let Some(counter) = syscalls::Counter::start(&server.tree.pids()?)? else { return Ok(None) };
    let figures = jobs.run(workload.job, settings(workload, server, seconds, 0));
    let calls = counter.end()?;
    Ok(Some(calls as f64 / figures?.operations))
}
