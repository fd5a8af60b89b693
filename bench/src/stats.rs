//! How figures of noisy machines are compared: medians of interleaved pairs with an interval.

use serde_json::{Value, json};

/// The median of several ratios, with the interval that holds the true median in 9 of 10 cases.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Ratio {
    /// The middle of the ratios.
    pub median: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
}

/// Whether a ratio reaches its target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The interval reaches the target and is narrow enough to mean something.
    Met,
    /// The whole interval is below the target.
    NotMet,
    /// The machine was too noisy for a verdict.
    NotResolved,
}

/// An interval this wide or wider does not show whether a target is met.
pub const WIDEST: f64 = 0.10;

impl Ratio {
    /// Computes the interval of at least one ratio. The ends are order statistics, so that no
    /// distribution is assumed: the pair of ranks nearest to the middle is taken that encloses the
    /// median with a probability of 0.9. With fewer than five ratios there is none, and the ends
    /// are the lowest and the highest.
    #[must_use]
    pub fn of(ratios: &[f64]) -> Option<Self> {
        let mut sorted = ratios.to_vec();
        sorted.sort_by(f64::total_cmp);
        let rank = interval_rank(sorted.len());
        let low = *sorted.get(rank)?;
        let high = *sorted.get(sorted.len() - 1 - rank)?;
        Some(Self { median: median(&sorted)?, low, high })
    }

    /// Returns the ratio as JSON.
    #[must_use]
    pub fn to_json(self) -> Value {
        json!({ "median": self.median, "low": self.low, "high": self.high })
    }

    /// Compares with a target.
    #[must_use]
    pub fn verdict(&self, target: f64) -> Verdict {
        if self.high < target {
            Verdict::NotMet
        } else if self.high - self.low < WIDEST {
            Verdict::Met
        } else {
            Verdict::NotResolved
        }
    }
}

impl std::fmt::Display for Ratio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.3} [{:.3}, {:.3}]", self.median, self.low, self.high)
    }
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Met => "met",
            Self::NotMet => "NOT MET",
            Self::NotResolved => "not resolved",
        })
    }
}

/// The middle value, or the mean of the two in the middle.
#[must_use]
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    let lower = *sorted.get(sorted.len().checked_sub(1)? / 2)?;
    Some(f64::midpoint(lower, upper))
}

/// The value that this part of all does not exceed; none of none.
#[must_use]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rank from 0 to the number of values"
)]
pub fn quantile(values: &[f64], part: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() as f64 * part.clamp(0.0, 1.0)).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

/// The rank, from 0 and from either end, of the interval's ends.
fn interval_rank(count: usize) -> usize {
    let n = u32::try_from(count).unwrap_or(u32::MAX).min(1000);
    // Probability that at most `rank` of `n` values lie below the median.
    let mut term = 0.5_f64.powi(i32::try_from(n).unwrap_or(i32::MAX));
    let mut below = term;
    let mut rank = 0;
    for next in 1..n / 2 {
        term *= f64::from(n - next + 1) / f64::from(next);
        below += term;
        if below > 0.05 {
            break;
        }
        rank = next as usize;
    }
    rank
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_one_of_the_values() {
        let values = [4.0, 1.0, 3.0, 2.0];
        let found = [0.0, 0.25, 0.5, 0.95, 1.0].map(|part| quantile(&values, part).unwrap());
        assert_eq!(found, [1.0, 1.0, 2.0, 4.0, 4.0]);
        assert_eq!(quantile(&[], 0.5), None);
    }

    #[test]
    fn nine_pairs_leave_out_the_lowest_and_the_highest() {
        assert_eq!([1, 2, 5, 9, 11, 21].map(interval_rank), [0, 0, 0, 1, 2, 6]);
        let ratio = Ratio::of(&[9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]).unwrap();
        assert_eq!((ratio.median, ratio.low, ratio.high), (5.0, 2.0, 8.0));
        assert_eq!(Ratio::of(&[]), None);
    }

    #[test]
    fn verdicts() {
        let ratio = |low, high| Ratio { median: 1.0, low, high };
        assert_eq!(ratio(0.94, 0.96).verdict(0.95), Verdict::Met);
        assert_eq!(ratio(0.80, 0.94).verdict(0.95), Verdict::NotMet);
        assert_eq!(ratio(0.90, 1.01).verdict(0.95), Verdict::NotResolved);
    }

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0]), Some(2.5));
        assert_eq!(median(&[]), None);
    }
}
