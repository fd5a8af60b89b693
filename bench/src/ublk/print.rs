//! The tables of ublk's bench, in the form of Markdown, and the same as JSON.

use serde_json::{Value, json};

use super::mapped::{self, Line, Workload};
use super::{after_snapshot, counts, first_touch};
use crate::block::Sample;
use crate::nbd::print::Claim;
use crate::stats::{Ratio, median};

/// How much of rublk's IOPS ours have to be, served in the same way.
const OF_RUBLK: f64 = 0.95;

/// One workload's table.
pub fn mapped(workload: &Workload, outcome: &mapped::Outcome) {
    println!("\n### {}\n\n{}\n", workload.name(), workload.title);
    println!("| device | IOPS | mean us | server CPU us/op |\n|---|---:|---:|---:|");
    for line in &outcome.lines {
        println!(
            "| {} | {:.0} | {:.1} | {} |",
            line.name,
            line.median(|sample| sample.iops),
            line.median(|sample| sample.latency_us),
            cpu(&line.samples).map_or_else(|| "-".to_owned(), |cpu| format!("{cpu:.2}")),
        );
    }
    for finding in &outcome.findings {
        println!(
            "\n{}: IOPS, ours/rublk's {}; CPU/op, its/ours {}; A/A control {}",
            finding.mode.name(),
            finding.iops,
            finding.cpu,
            finding.control
        );
    }
}

/// The claims that a workload measures.
pub fn mapped_claims<'a>(
    workload: &'a Workload,
    outcome: &'a mapped::Outcome,
    pairs: usize,
) -> impl Iterator<Item = Claim> + 'a {
    outcome.findings.iter().map(move |finding| Claim {
        workload: workload.name(),
        claim: format!("IOPS, ours/rublk loop; {}", finding.mode.name()),
        ratio: finding.iops,
        target: OF_RUBLK,
        pairs,
    })
}

/// The claims that counting measures.
pub fn enters_claims(outcome: &counts::Outcome, pairs: usize) -> impl Iterator<Item = Claim> + '_ {
    outcome.enters.iter().map(move |(name, ratio)| Claim {
        workload: format!("counts/{name}"),
        claim: "io_uring_enter per operation, rublk loop/ours".to_owned(),
        ratio: *ratio,
        target: 1.0,
        pairs,
    })
}

/// The table of first touch.
pub fn first_touch(outcome: &first_touch::Outcome) {
    println!(
        "\n### {}\n\n{} random writes of 4 KiB at depth {} to a fresh volume of {} GiB; {:.1} % of \
         them find a new chunk of {} KiB\n",
        outcome.name(),
        outcome.operations,
        outcome.depth,
        first_touch::VOLUME >> 30,
        outcome.fresh() * 100.0,
        outcome.chunk >> 10
    );
    println!("| device | IOPS | server CPU us/op |\n|---|---:|---:|");
    for (name, samples) in &outcome.samples {
        let iops: Vec<f64> = samples.iter().map(|sample| sample.iops).collect();
        let iops = median(&iops).unwrap_or(f64::NAN);
        let cpu = cpu(samples).map_or_else(|| "-".to_owned(), |cpu| format!("{cpu:.2}"));
        println!("| {name} | {iops:.0} | {cpu} |");
    }
    for claimed in &outcome.claims {
        println!("\nfirst touch beside {}: {}", claimed.beside, claimed.ratio);
    }
    if let Some(control) = outcome.control {
        println!("\nA/A control, overwrite beside overwrite: {control}");
    }
}

/// Writes before and after snapshots, for readers.
pub fn after_snapshot(outcome: &after_snapshot::Outcome) {
    println!(
        "\n### {}\n\n{} random writes of 4 KiB at depth {}; {:.1} % of those after a snapshot are \
         the first of a chunk of {} KiB\n",
        outcome.name(),
        outcome.operations,
        outcome.depth,
        outcome.firsts() * 100.0,
        outcome.chunk >> 10
    );
    crate::after_snapshot::print(&outcome.iops());
}

/// The same as JSON.
#[must_use]
pub fn after_snapshot_json(outcome: &after_snapshot::Outcome) -> Value {
    let devices = outcome.rounds.iter();
    let devices = devices.map(|(device, rounds)| json!({ "device": device, "iops": rounds }));
    json!({
        "workload": outcome.name(),
        "operations": outcome.operations,
        "firsts": outcome.firsts(),
        "devices": devices.collect::<Vec<_>>(),
    })
}

/// The claims that first touch measures.
pub fn first_touch_claims(
    outcome: &first_touch::Outcome,
    pairs: usize,
) -> impl Iterator<Item = Claim> + '_ {
    outcome.claims.iter().filter_map(move |claimed| {
        Some(Claim {
            workload: outcome.name(),
            claim: format!("IOPS, first touch/{}", claimed.beside),
            ratio: claimed.ratio,
            target: claimed.target?,
            pairs,
        })
    })
}

fn cpu(samples: &[Sample]) -> Option<f64> {
    median(&samples.iter().filter_map(|sample| sample.cpu_us).collect::<Vec<_>>())
}

/// A workload as JSON.
#[must_use]
pub fn mapped_json(workload: &Workload, outcome: &mapped::Outcome) -> Value {
    let findings = outcome.findings.iter().map(|finding| {
        json!({
            "mode": finding.mode.name(),
            "iops_ratio": finding.iops.to_json(),
            "cpu_ratio": finding.cpu.to_json(),
            "control": finding.control.to_json(),
        })
    });
    json!({
        "workload": workload.name(),
        "devices": outcome.lines.iter().map(line_json).collect::<Vec<_>>(),
        "beside_rublk": findings.collect::<Vec<_>>(),
    })
}

/// First touch as JSON.
#[must_use]
pub fn first_touch_json(outcome: &first_touch::Outcome) -> Value {
    let claims = outcome.claims.iter().map(|claimed| {
        json!({
            "beside": claimed.beside, "ratio": claimed.ratio.to_json(), "target": claimed.target,
        })
    });
    let samples = outcome.samples.iter();
    json!({
        "workload": outcome.name(),
        "operations": outcome.operations,
        "new_chunks": outcome.fresh(),
        "beside": claims.collect::<Vec<_>>(),
        "control": outcome.control.map(Ratio::to_json),
        "devices": samples.map(|(name, samples)| json!({
            "device": name, "runs": samples_json(samples),
        })).collect::<Vec<_>>(),
    })
}

fn line_json(line: &Line) -> Value {
    json!({
        "device": line.name,
        "iops": line.median(|sample| sample.iops),
        "latency_us": line.median(|sample| sample.latency_us),
        "cpu_us": cpu(&line.samples),
        "runs": samples_json(&line.samples),
    })
}

fn samples_json(samples: &[Sample]) -> Value {
    samples
        .iter()
        .map(|sample| {
            json!({
                "iops": sample.iops, "latency_us": sample.latency_us, "cpu_us": sample.cpu_us,
            })
        })
        .collect()
}
