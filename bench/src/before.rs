//! The daemon beside another build of it, such as one from before a change: results and their
//! table. How the two are measured is up to the bench.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::stats::{Ratio, median};

/// This build beside the other one.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The name of the workload.
    pub name: String,
    /// Median operations a second of this build, and of the other one.
    pub iops: (f64, f64),
    /// How many times as many operations a second.
    pub ratio: Ratio,
    /// How many times as much CPU the other build takes for each operation, where it is measured.
    pub cpu: Option<Ratio>,
    /// One of the builds beside itself, where it is measured.
    pub control: Option<Ratio>,
}

impl Outcome {
    /// Medians of operations a second of this build and of the other one.
    #[must_use]
    pub fn medians(pairs: &[(f64, f64)]) -> (f64, f64) {
        let of = |side: fn(&(f64, f64)) -> f64| {
            median(&pairs.iter().map(side).collect::<Vec<_>>()).unwrap_or(f64::NAN)
        };
        (of(|pair| pair.0), of(|pair| pair.1))
    }

    /// Whether it is slower beyond the interval of the pairs, and beyond that of the A/A control.
    #[must_use]
    pub fn is_worse(&self) -> bool {
        let itself = self.control.map_or(1.0, |control| control.low.min(1.0));
        self.ratio.high < itself
    }

    /// Prints the line of the table.
    pub fn print(&self) {
        let shown =
            |ratio: Option<Ratio>| ratio.map_or_else(|| "-".to_owned(), |ratio| ratio.to_string());
        println!(
            "| {} | {:.0} | {:.0} | {} | {} | {} | {} |",
            self.name,
            self.iops.0,
            self.iops.1,
            self.ratio,
            shown(self.control),
            shown(self.cpu),
            if self.is_worse() { "WORSE" } else { "not worse" }
        );
    }

    /// The same as JSON.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({
            "name": self.name, "iops_now": self.iops.0, "iops_before": self.iops.1,
            "ratio": self.ratio.to_json(), "control": self.control.map(Ratio::to_json),
        })
    }
}

/// Prints what stands above the lines.
pub fn print_head() {
    println!(
        "\n| workload | IOPS now | IOPS before | IOPS, now/before | now/now | CPU/op, before/now | |"
    );
    println!("|---|---:|---:|---|---|---|---|");
}

/// Fails with the names of the workloads that are worse.
///
/// # Errors
/// When there is one.
pub fn check(outcomes: &[Outcome]) -> Result<()> {
    let worse = outcomes.iter().filter(|one| one.is_worse());
    let worse: Vec<&str> = worse.map(|one| one.name.as_str()).collect();
    ensure!(worse.is_empty(), "slower than before: {}", worse.join("; "));
    Ok(())
}

/// Both results, of which the first or the second is made first.
pub fn alternate<T>(
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
