//! Writes to a volume that snapshots share everything with: the runs of a round, and the claims on
//! them. The same for NBD exports and for block devices.

use anyhow::Result;

use crate::stats::{Ratio, median};

/// The runs of a round, as the tables have them.
pub const RUNS: [&str; 5] =
    ["before", "first after it", "again", "after a second", "after a tenth"];
/// The runs whose writes are the first after a snapshot.
pub const FIRST: [usize; 3] = [1, 3, 4];
/// Snapshots taken in a round.
pub const SNAPSHOTS: u64 = 10;
/// Between the third snapshot and the tenth, this part of the writes of a run comes before each.
pub const BETWEEN: u64 = 4;
/// First writes after a snapshot, beside those before it.
pub const TARGET: f64 = 0.8;

/// IOPS of the runs of a round.
pub type Round = [f64; RUNS.len()];

/// A volume, or several at once, that a round is run on. All of it was written before.
pub trait Subject {
    /// The result of a run.
    type Sample;

    /// Writes random blocks, the same for the same seed.
    ///
    /// # Errors
    /// When a write fails.
    fn write(&mut self, seed: u64) -> Result<Self::Sample>;

    /// Writes other random blocks, fewer by [`BETWEEN`], without measuring it.
    ///
    /// # Errors
    /// When a write fails.
    fn write_between(&mut self, seed: u64) -> Result<()>;

    /// Takes a snapshot with this number.
    ///
    /// # Errors
    /// When it fails.
    fn snapshot(&mut self, number: u64) -> Result<()>;
}

/// Makes the runs of a round. The first three write the same blocks, each later one blocks of its
/// own, so that overlays that a snapshot shares hold other blocks than those that are written.
///
/// # Errors
/// When a write or a snapshot fails.
pub fn round<S: Subject>(subject: &mut S, number: usize) -> Result<[S::Sample; RUNS.len()]> {
    let seed = number as u64 * 2 * SNAPSHOTS;
    let before = subject.write(seed)?;
    subject.snapshot(1)?;
    let (first, again) = (subject.write(seed)?, subject.write(seed)?);
    subject.snapshot(2)?;
    let second = subject.write(seed + 1)?;
    for snapshot in 3..SNAPSHOTS {
        subject.snapshot(snapshot)?;
        subject.write_between(seed + snapshot)?;
    }
    subject.snapshot(SNAPSHOTS)?;
    Ok([before, first, again, second, subject.write(seed + SNAPSHOTS)?])
}

/// Returns the claim that our first writes after a snapshot are not much slower than our writes
/// before, in words and as a ratio, which has to be [`TARGET`]. After more snapshots a write copies
/// what the overlay has, which they share: no claim.
#[must_use]
pub fn claim(ours: &[Round]) -> Option<(String, Ratio)> {
    let run = FIRST[0];
    Some((format!("IOPS, writes {} / before", RUNS[run]), beside_before(ours, run)?))
}

/// Returns the ratio of a run to the writes before the snapshots.
#[must_use]
pub fn beside_before(rounds: &[Round], run: usize) -> Option<Ratio> {
    Ratio::of(&rounds.iter().map(|all| all[run] / all[0]).collect::<Vec<_>>())
}

/// Returns the ratio of ours to another's, in one of the runs.
#[must_use]
pub fn beside(ours: &[Round], other: &[Round], run: usize) -> Option<Ratio> {
    let pairs = ours.iter().zip(other);
    Ratio::of(&pairs.map(|(a, b)| a[run] / b[run]).collect::<Vec<_>>())
}

/// Prints the medians of servers or devices, of which ours is the first, and what they are beside
/// each other.
pub fn print(all: &[(String, Vec<Round>)]) {
    println!("| IOPS | {} |\n|---|{}", RUNS.join(" | "), "---:|".repeat(RUNS.len()));
    for (name, rounds) in all {
        let of = |run: usize| median(&rounds.iter().map(|all| all[run]).collect::<Vec<_>>());
        let medians = (0..RUNS.len()).map(|run| format!("{:.0}", of(run).unwrap_or(f64::NAN)));
        println!("| {name} | {} |", medians.collect::<Vec<_>>().join(" | "));
    }
    let Some(((_, ours), others)) = all.split_first() else { return };
    for (name, other) in others {
        for run in FIRST {
            if let Some(ratio) = beside(ours, other, run) {
                println!("\nIOPS {}, ours / {name}: {ratio}", RUNS[run]);
            }
        }
    }
    for run in FIRST {
        if let Some(ratio) = beside_before(ours, run) {
            println!("\nIOPS {} / {}: {ratio}", RUNS[run], RUNS[0]);
        }
    }
    // Both are overwrites.
    if let Some(control) = beside_before(ours, 2) {
        println!("\nControl, {} / {}: {control}", RUNS[2], RUNS[0]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The order of calls.
    #[derive(Default)]
    struct Log(Vec<String>);

    impl Subject for Log {
        type Sample = u64;

        fn write(&mut self, seed: u64) -> Result<u64> {
            self.0.push(format!("w{seed}"));
            Ok(seed)
        }

        fn write_between(&mut self, seed: u64) -> Result<()> {
            self.0.push(format!("b{seed}"));
            Ok(())
        }

        fn snapshot(&mut self, number: u64) -> Result<()> {
            self.0.push(format!("s{number}"));
            Ok(())
        }
    }

    #[test]
    fn a_round_writes_the_same_blocks_until_the_second_snapshot_and_others_after_each() {
        let mut log = Log::default();
        assert_eq!(round(&mut log, 1).unwrap(), [20, 20, 20, 21, 30]);
        assert_eq!(log.0[..6].join(" "), "w20 s1 w20 w20 s2 w21");
        assert_eq!(log.0[6..10].join(" "), "s3 b23 s4 b24");
        assert_eq!(log.0[log.0.len() - 3..].join(" "), "b29 s10 w30");
        // No seed comes again in the next round.
        assert_eq!(round(&mut log, 2).unwrap()[0], 40);
    }

    #[test]
    fn first_writes_are_claimed_and_the_others_are_not() {
        let rounds = [[100.0, 90.0, 110.0, 80.0, 70.0]; 9];
        let (words, ratio) = claim(&rounds).unwrap();
        assert_eq!((words.as_str(), ratio.median), ("IOPS, writes first after it / before", 0.9));
        assert_eq!(beside_before(&rounds, 4).unwrap().median, 0.7);
        let other = [[50.0, 9.0, 55.0, 8.0, 7.0]; 9];
        assert_eq!(beside(&rounds, &other, 3).unwrap().median, 10.0);
    }
}
