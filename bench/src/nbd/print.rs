//! The tables, in the form of Markdown, and the same as JSON.

use serde_json::{Value, json};

use super::claims::{Figure, Peer, Stage, Workload};
use super::first_touch;
use super::measure::{Finding, Line, Outcome, Sample};
use crate::stats::{Ratio, Verdict, median};

/// With fewer pairs than this a run shows figures, and no claim is met.
pub const FEWEST_PAIRS: usize = 9;

/// The verdict on a claim.
#[must_use]
pub fn verdict(ratio: Ratio, target: f64, pairs: usize) -> &'static str {
    if pairs < FEWEST_PAIRS || !ratio.median.is_finite() {
        return "not resolved";
    }
    // An interval that is wholly beyond the target leaves nothing to resolve, however wide it is.
    if ratio.low >= target {
        return "met";
    }
    match ratio.verdict(target) {
        Verdict::Met => "met",
        Verdict::NotMet => "SHORT",
        Verdict::NotResolved => "not resolved",
    }
}

/// One workload's table.
pub fn outcome(stage: &Stage, workload: &Workload, outcome: &Outcome) {
    println!("\n### {}\n", workload.name(stage));
    let connections = if workload.connections == 1 { "connection" } else { "connections" };
    println!("{}, {} {connections}\n", workload.title, workload.connections);
    println!("| server | IOPS | CPU us/op | syscalls/op | IOPS, ours/it | CPU/op, it/ours |");
    println!("|---|---:|---:|---:|---|---|");
    for line in &outcome.lines {
        println!(
            "| {} | {:.0} | {:.2} | {} | {} | {} |",
            line.kind.name(),
            line.median(Figure::Iops),
            line.median(Figure::Cpu),
            line.syscalls.map_or_else(|| "-".to_owned(), |count| format!("{count:.2}")),
            or_dash(line.iops),
            or_dash(line.cpu),
        );
    }
    let control: Vec<String> = outcome
        .control
        .iter()
        .map(|(figure, ratio)| format!("{} {ratio}", figure.name()))
        .collect();
    println!("\nA/A control, ours beside ours: {}", control.join(", "));
}

fn or_dash(ratio: Option<Ratio>) -> String {
    ratio.map_or_else(|| "-".to_owned(), |ratio| ratio.to_string())
}

/// One line of the last table.
#[derive(Clone, Debug)]
pub struct Claim {
    /// The name of the workload.
    pub workload: String,
    /// In words.
    pub claim: String,
    /// How much was measured.
    pub ratio: Ratio,
    /// How much it has to be.
    pub target: f64,
    /// The number of pairs.
    pub pairs: usize,
}

impl Claim {
    /// Lines on the results of a workload.
    #[must_use]
    pub fn of(workload: String, finding: &Finding, pairs: usize) -> Self {
        let figure = match finding.target.figure {
            Figure::Iops => "IOPS, ours/it",
            Figure::Cpu => "CPU/op, it/ours",
        };
        let peer = match finding.target.peer {
            Peer::Best => "the best",
            Peer::Among(_) => "the best of its kind",
        };
        let claim = format!("{figure}; {peer}: {}", finding.peer.name());
        Self { workload, claim, ratio: finding.ratio, target: finding.target.ratio, pairs }
    }

    fn to_json(&self) -> Value {
        json!({
            "workload": self.workload, "claim": self.claim, "ratio": self.ratio.to_json(),
            "target": self.target, "pairs": self.pairs,
            "verdict": verdict(self.ratio, self.target, self.pairs),
        })
    }
}

/// The last table: each claim and its result.
pub fn claims(claims: &[Claim]) {
    println!("\n### Claims\n");
    println!("| workload | figure, beside | median [5 %, 95 %] | target | pairs | |");
    println!("|---|---|---|---:|---:|---|");
    for claim in claims {
        println!(
            "| {} | {} | {} | >= {} | {} | {} |",
            claim.workload,
            claim.claim,
            claim.ratio,
            claim.target,
            claim.pairs,
            verdict(claim.ratio, claim.target, claim.pairs)
        );
    }
}

/// The table of first-touch writes.
pub fn first_touch(outcome: &first_touch::Outcome) {
    println!("\n### first-touch\n");
    println!(
        "4 KiB random writes, depth 32, as many as the volume of {} MiB has extents of 256 KiB; \
         the file below is allocated and written beforehand\n",
        outcome.size >> 20
    );
    println!("| server | IOPS | CPU us/op |\n|---|---:|---:|");
    for (name, samples) in &outcome.samples {
        let of = |figure: fn(&Sample) -> f64| {
            let figures: Vec<f64> = samples.iter().map(figure).collect();
            median(&figures).unwrap_or(f64::NAN)
        };
        println!("| {name} | {:.0} | {:.2} |", of(|s| s.iops), of(|s| s.cpu));
    }
    println!("\nA/A control, overwrite beside overwrite: IOPS {}", outcome.control);
}

/// A workload as JSON.
#[must_use]
pub fn outcome_json(workload: &str, outcome: &Outcome) -> Value {
    let control = outcome.control.iter();
    json!({
        "workload": workload,
        "servers": outcome.lines.iter().map(line_json).collect::<Vec<_>>(),
        "control": control.map(|(figure, ratio)| json!({
            "figure": figure.name(), "ratio": ratio.to_json(),
        })).collect::<Vec<_>>(),
    })
}

/// The claims as JSON.
#[must_use]
pub fn claims_json(claims: &[Claim]) -> Value {
    claims.iter().map(Claim::to_json).collect()
}

/// First-touch as JSON.
#[must_use]
pub fn first_touch_json(outcome: &first_touch::Outcome) -> Value {
    let samples = outcome.samples.iter();
    json!({
        "size_bytes": outcome.size,
        "overwrite": outcome.overwrite.to_json(),
        "control": outcome.control.to_json(),
        "samples": samples.map(|(name, samples)| json!({
            "server": name, "runs": samples_json(samples),
        })).collect::<Vec<_>>(),
    })
}

fn line_json(line: &Line) -> Value {
    json!({
        "server": line.kind.name(),
        "iops": line.median(Figure::Iops),
        "cpu_us": line.median(Figure::Cpu),
        "syscalls": line.syscalls,
        "iops_ratio": line.iops.map(Ratio::to_json),
        "cpu_ratio": line.cpu.map(Ratio::to_json),
        "runs": samples_json(&line.samples),
    })
}

fn samples_json(samples: &[Sample]) -> Value {
    samples.iter().map(|sample| json!({ "iops": sample.iops, "cpu_us": sample.cpu })).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts() {
        let of = |low, high, pairs| {
            verdict(Ratio { median: f64::midpoint(low, high), low, high }, 1.0, pairs)
        };
        assert_eq!(of(1.5, 2.5, 9), "met");
        assert_eq!(of(0.98, 1.05, 9), "met");
        assert_eq!(of(0.9, 1.05, 9), "not resolved");
        assert_eq!(of(0.5, 0.9, 9), "SHORT");
        assert_eq!(of(1.5, 2.5, 8), "not resolved");
    }
}
