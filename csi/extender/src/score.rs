//! Scores of capacities, from 0 to 10. Whole numbers only: equal capacities have equal scores on
//! every machine.

use std::collections::BTreeMap;

use blockd_csi_base::bytes::Bytes;
use blockd_csi_base::error::Invalid;
use blockd_csi_base::quantity;
use clap::ValueEnum;

/// The most that the scheduler takes of an extender.
pub const MAX: i64 = 10;

/// The accepted form of a divisor.
const DIVISOR_FORM: &str = "a decimal number above 0 and of at most 1000000, with at most 9 digits \
                            behind the point";

/// The limit of divisors, as for ratios: beyond it no pool has room for a volume.
const MAX_DIVISOR: u128 = 1_000_000;

/// Digits behind the point, so that products stay far below 2^128.
const MAX_DENOMINATOR: u128 = 1_000_000_000;

/// How nodes are scored.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
pub enum Mode {
    /// By the space left after the pod is placed, relative to the node with the most left
    Bytes,
    /// The logarithm of whole gibibytes; 1 for any room at all
    Legacy,
    /// The same as it was first proposed: 1 below a gibibyte, and 0 from there to two
    LegacyProposal,
}

impl Mode {
    /// Parses the form on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bytes => "bytes",
            Self::Legacy => "legacy",
            Self::LegacyProposal => "legacy-proposal",
        }
    }
}

/// A number above 0, exactly as it was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Divisor {
    numerator: u128,
    denominator: u128,
}

impl Divisor {
    /// Changes nothing.
    pub const ONE: Self = Self { numerator: 1, denominator: 1 };

    /// Reads one. The error names `field`.
    ///
    /// # Errors
    /// The text is not such a number.
    pub fn parse(field: &str, text: &str) -> Result<Self, Invalid> {
        let refused = || Invalid::new(field, text, DIVISOR_FORM);
        let (numerator, denominator) = quantity::decimal(text).ok_or_else(refused)?;
        let is_small = numerator <= MAX_DIVISOR * denominator;
        if numerator == 0 || !is_small || denominator > MAX_DENOMINATOR {
            return Err(refused());
        }
        Ok(Self { numerator, denominator })
    }
}

/// The rule of scoring nodes, and the divisors of the classes' capacities.
#[derive(Clone, Debug)]
pub struct Rule {
    /// The rule.
    pub mode: Mode,
    /// For all other classes.
    pub default: Divisor,
    /// Divisors by class.
    pub divisors: BTreeMap<String, Divisor>,
}

impl Rule {
    /// Returns the divisor of this class.
    #[must_use]
    pub fn divisor(&self, class: &str) -> Divisor {
        self.divisors.get(class).copied().unwrap_or(self.default)
    }
}

/// The older score: 0 for nothing, and for all else the logarithm of whole gibibytes, from 1 to 10.
/// Below 4 GiB everything is alike.
#[must_use]
pub fn legacy(capacity: Bytes, divisor: Divisor) -> i64 {
    if capacity.is_zero() { 0 } else { logarithm(capacity, divisor).max(1) }
}

/// The older score as it was first proposed. It is not monotone: half a gibibyte counts as 1, and a
/// whole one as 0.
#[must_use]
pub fn legacy_proposal(capacity: Bytes, divisor: Divisor) -> i64 {
    if gibibytes(capacity) == 0 {
        return i64::from(!capacity.is_zero());
    }
    logarithm(capacity, divisor)
}

/// By the rest of `capacity` once `wanted` is placed, in tenths of the most that any node has left.
/// The score is 0 exactly where it does not fit.
#[must_use]
pub fn bytes(capacity: Bytes, wanted: u128, most_left: u128) -> i64 {
    /// Steps above the lowest.
    const STEPS: u128 = 9;
    let Some(left) = capacity.wide().checked_sub(wanted) else { return 0 };
    if capacity.is_zero() {
        return 0;
    }
    let part = (left.min(most_left) * STEPS).checked_div(most_left).unwrap_or_default();
    1 + i64::try_from(part).unwrap_or_default()
}

/// Rounds to whole gibibytes, the unit of the older rules. No other code rounds to them.
fn gibibytes(capacity: Bytes) -> u128 {
    const GIBIBYTE: u128 = 1024 * 1024 * 1024;
    capacity.wide() / GIBIBYTE
}

/// The logarithm of whole gibibytes to base 2, cut down to a whole number from 0 to 10.
fn logarithm(capacity: Bytes, divisor: Divisor) -> i64 {
    let quotient = gibibytes(capacity) * divisor.denominator / divisor.numerator;
    quotient.checked_ilog2().map_or(0, i64::from).min(MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    use super::*;

    const MIB: i64 = 1 << 20;
    const GIB: i64 = 1 << 30;

    fn size(bytes: i64) -> Bytes {
        Bytes::new(bytes).unwrap()
    }

    fn divisor(text: &str) -> Divisor {
        Divisor::parse("divisor", text).unwrap()
    }

    /// Row: T28.
    #[test]
    fn the_legacy_score_is_the_logarithm_of_whole_gibibytes() {
        // Capacity, divisor, as it is shipped, as it was proposed.
        let table = [
            (GIB, "1", 1, 0),
            (2 * GIB - 1, "1", 1, 0),
            (2 * GIB, "1", 1, 1),
            (4 * GIB - 1, "1", 1, 1),
            (4 * GIB, "1", 2, 2),
            (1023 * GIB, "1", 9, 9),
            (1024 * GIB, "1", 10, 10),
            (i64::MAX, "1", 10, 10),
            (1024 * GIB, "10", 6, 6),
            (1024 * GIB, "2000", 1, 0),
            (8 * GIB, "0.5", 4, 4),
            (3 * GIB, "1.5", 1, 1),
            (3 * GIB - 1, "1.5", 1, 0),
        ];
        for (capacity, by, shipped, proposed) in table {
            assert_eq!(legacy(size(capacity), divisor(by)), shipped, "{capacity} / {by}");
            assert_eq!(legacy_proposal(size(capacity), divisor(by)), proposed, "{capacity} / {by}");
        }
        let rule = Rule {
            mode: Mode::Legacy,
            default: Divisor::ONE,
            divisors: BTreeMap::from([("a".to_owned(), divisor("10"))]),
        };
        assert_eq!((rule.divisor("a"), rule.divisor("b")), (divisor("10"), Divisor::ONE));
    }

    /// Row: T29.
    #[test]
    fn below_a_gibibyte_the_legacy_score_is_one_and_of_nothing_zero() {
        for score in [legacy, legacy_proposal] {
            assert_eq!(score(Bytes::ZERO, Divisor::ONE), 0);
            for capacity in [1, 512, MIB, 500 * MIB, GIB - 1] {
                assert_eq!(score(size(capacity), Divisor::ONE), 1, "{capacity}");
                assert_eq!(score(size(capacity), divisor("1000")), 1, "{capacity}");
            }
        }
    }

    /// Row: T30.
    #[test]
    fn scores_differ_by_bytes_below_a_gibibyte_too() {
        let most = 1000 * u128::from(MIB.unsigned_abs());
        let wanted = 100 * u128::from(MIB.unsigned_abs());
        let score = |mib: i64| bytes(size(mib * MIB), wanted, most);
        assert_eq!([score(99), score(100), score(600), score(1100)], [0, 1, 5, 10]);
        // All nodes are full to the byte: each has room, and none more than others.
        assert_eq!(bytes(size(MIB), u128::from(MIB.unsigned_abs()), 0), 1);
        assert_eq!(bytes(Bytes::ZERO, 0, 0), 0);
    }

    #[test]
    fn divisors_are_numbers_above_zero() {
        for text in ["", "0", "0.0", "-1", "x", "1e3", "1000000.1", "0.0000000001", "1/2"] {
            let error = Divisor::parse("divisor", text).unwrap_err().to_string();
            assert!(error.starts_with("divisor is "), "{error}");
        }
        assert_eq!(divisor("1.50").numerator * 2, divisor("1.50").denominator * 3);
    }

    proptest! {
        /// Row: T30.
        #[test]
        fn bytes_are_monotone_and_never_zero_where_it_fits(
            (a, b) in (0..=i64::MAX, 0..=i64::MAX),
            (wanted, most) in (0..=i64::MAX, 0..=i64::MAX),
        ) {
            let (low, high) = (size(a.min(b)), size(a.max(b)));
            let (wanted, most) = (size(wanted).wide(), size(most).wide());
            let (less, more) = (bytes(low, wanted, most), bytes(high, wanted, most));
            prop_assert!(less <= more, "{less} {more}");
            prop_assert!((0..=MAX).contains(&more));
            prop_assert_eq!(more == 0, high.wide() < wanted || high.is_zero());
        }

        /// Row: T28.
        #[test]
        fn the_legacy_score_is_a_logarithm(
            gib in 1_u32..=8_388_607,
            tenths in 1_u32..=10_000,
        ) {
            let by = divisor(&format!("{}.{}", tenths / 10, tenths % 10));
            let capacity = size(i64::from(gib) * GIB);
            let score = legacy_proposal(capacity, by);
            // The largest power that the quotient reaches, which floating point would round.
            let reaches = |power: u32| {
                u128::from(gib) * 10 >= (1_u128 << power) * u128::from(tenths)
            };
            let expected = (1..=10).take_while(|power| reaches(*power)).count();
            prop_assert_eq!(usize::try_from(score).unwrap(), expected);
            prop_assert_eq!(legacy(capacity, by), score.max(1));
        }
    }
}
