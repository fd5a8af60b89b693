//! Numbers as Kubernetes writes them: sizes like `500Mi` or `1.5Gi`, and ratios like `2.5`. Exact:
//! no floating point.

use std::fmt;

use crate::bytes::Bytes;
use crate::error::Invalid;

/// The accepted form of a size.
pub const SIZE_FORM: &str = "a number of bytes, or of Ki, Mi, Gi, Ti, Pi, Ei (each 1024 times the \
                             one \
                             before) or k, M, G, T, P, E (each 1000 times)";

/// The accepted form of a ratio.
pub const RATIO_FORM: &str = "a decimal number from 1 to 1000000, with at most 9 digits behind the \
                              point";

/// Digits that are read before and behind the point: enough for every size, and for no overflow.
const MAX_DIGITS: usize = 19;

/// The largest ratio that means something.
const MAX_RATIO: u128 = 1_000_000;

/// Digits behind the point of a ratio.
const RATIO_DIGITS: usize = 9;

/// Reads a size: `500Mi`, `1.5Gi`, `38797312`, `10G`. Fractions of a byte are rounded up, as
/// Kubernetes does. The error names `field`.
///
/// # Errors
/// The text is not a size, or more than 2^63 - 1 bytes.
pub fn size(field: &str, text: &str) -> Result<Bytes, Invalid> {
    parse(text).ok_or_else(|| Invalid::new(field, text, SIZE_FORM))
}

/// Reads a size of an object of the Kubernetes API, which may also have the forms that are of
/// little use for sizes: `1e9`, and `1500m` for thousandths (`u` and `n` for those of them).
/// `field` is the subject of the error.
///
/// # Errors
/// The text is not a size, or more than 2^63 - 1 bytes.
pub fn of_object(field: &str, text: &str) -> Result<Bytes, Invalid> {
    let read = parse(text).or_else(|| parse_power(text));
    read.ok_or_else(|| Invalid::new(field, text, SIZE_FORM))
}

/// A number with a power of ten behind it.
fn parse_power(text: &str) -> Option<Bytes> {
    let (number, unit) = split(text);
    let Decimal { numerator, denominator } = Decimal::parse(number)?;
    let power: i32 = match unit {
        "m" => -3,
        "u" => -6,
        "n" => -9,
        _ => unit.strip_prefix(['e', 'E'])?.parse().ok()?,
    };
    let factor = 10_u128.checked_pow(power.unsigned_abs())?;
    let bytes = if power < 0 {
        numerator.div_ceil(denominator.checked_mul(factor)?)
    } else {
        numerator.checked_mul(factor)?.div_ceil(denominator)
    };
    Bytes::from_u128(bytes)
}

/// A number, and the unit behind it.
fn split(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len()))
}

fn parse(text: &str) -> Option<Bytes> {
    let (number, unit) = split(text);
    let decimal = Decimal::parse(number)?;
    let bytes = decimal.numerator.checked_mul(unit_bytes(unit)?)?;
    Bytes::from_u128(bytes.div_ceil(decimal.denominator))
}

/// A decimal number as a fraction, with a power of ten below; `None` if it is none.
#[must_use]
pub fn decimal(text: &str) -> Option<(u128, u128)> {
    Decimal::parse(text).map(|decimal| (decimal.numerator, decimal.denominator))
}

fn unit_bytes(unit: &str) -> Option<u128> {
    const LETTERS: &str = "KMGTPE";
    let (base, letter) = match unit.strip_suffix('i') {
        Some(letter) => (1024_u128, letter),
        None if unit.is_empty() => return Some(1),
        // The decimal kilo is written small.
        None if unit == "k" => return Some(1000),
        None if unit == "K" => return None,
        None => (1000, unit),
    };
    let mut letters = letter.chars();
    let (Some(letter), None) = (letters.next(), letters.next()) else { return None };
    let power = LETTERS.chars().position(|one| one == letter)?;
    base.checked_pow(u32::try_from(power).ok()?.checked_add(1)?)
}

/// A decimal number as a fraction.
struct Decimal {
    numerator: u128,
    denominator: u128,
}

impl Decimal {
    fn parse(text: &str) -> Option<Self> {
        let (whole, part) = match text.split_once('.') {
            Some((whole, part)) if !part.is_empty() => (whole, part),
            Some(_) => return None,
            None => (text, ""),
        };
        let is_number = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit());
        let fits = whole.len() <= MAX_DIGITS && part.len() < MAX_DIGITS;
        if whole.is_empty() || !fits || !is_number(whole) || !is_number(part) {
            return None;
        }
        let numerator = [whole, part].concat().parse().ok()?;
        let denominator = 10_u128.checked_pow(u32::try_from(part.len()).ok()?)?;
        Some(Self { numerator, denominator })
    }
}

/// A ratio of at least 1, exactly as it was written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Ratio {
    numerator: u128,
    denominator: u128,
}

impl Ratio {
    /// One to one.
    pub const ONE: Self = Self { numerator: 1, denominator: 1 };
    /// Two to one.
    pub const TWO: Self = Self { numerator: 2, denominator: 1 };

    /// Reads a ratio. The error names `field`.
    ///
    /// # Errors
    /// The text is not a ratio, or below 1.
    pub fn parse(field: &str, text: &str) -> Result<Self, Invalid> {
        let refused = || Invalid::new(field, text, RATIO_FORM);
        if text.split_once('.').is_some_and(|(_, part)| part.len() > RATIO_DIGITS) {
            return Err(refused());
        }
        let Decimal { numerator, denominator } = Decimal::parse(text).ok_or_else(refused)?;
        if numerator < denominator || numerator > MAX_RATIO * denominator {
            return Err(refused());
        }
        Ok(Self { numerator, denominator })
    }

    /// Multiplies a size, rounded down. The product may exceed `int64`; callers clamp it.
    #[must_use]
    pub fn times(self, bytes: Bytes) -> u128 {
        // 2^63 times 10^15 is below 2^128.
        bytes.wide() * self.numerator / self.denominator
    }

    /// Whether it is more than another.
    #[must_use]
    pub fn is_above(self, other: Self) -> bool {
        self.numerator * other.denominator > other.numerator * self.denominator
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, rest) = (self.numerator / self.denominator, self.numerator % self.denominator);
        if self.denominator == 1 {
            return write!(f, "{whole}");
        }
        let digits = self.denominator.ilog10() as usize;
        write!(f, "{whole}.{rest:0digits$}")
    }
}

impl fmt::Debug for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert_eq, proptest};

    use super::*;

    #[test]
    fn sizes_are_read_as_kubernetes_writes_them() {
        let read = [
            ("0", 0),
            ("1", 1),
            ("500Mi", 524_288_000),
            ("37Mi", 38_797_312),
            ("1.5Gi", 1_610_612_736),
            ("0.5Ki", 512),
            ("0.1Ki", 103),
            ("4k", 4000),
            ("10G", 10_000_000_000),
            ("16Ti", 17_592_186_044_416),
            ("7Ei", 8_070_450_532_247_928_832),
            ("9223372036854775807", i64::MAX),
        ];
        for (text, bytes) in read {
            assert_eq!(size("size", text).unwrap().get(), bytes, "{text}");
        }
    }

    #[test]
    fn invalid_sizes_are_refused_with_field_and_value() {
        let refused = [
            "",
            "Mi",
            "-1",
            "+1",
            "1.",
            ".5Gi",
            "1..5Gi",
            "1K",
            "1ki",
            "1KB",
            "1GiB",
            "1 Gi",
            "1e3",
            "0x10",
            "8Ei",
            "9223372036854775808",
            "99999999999999999999",
            "1m",
            "१",
            "1Zi",
        ];
        for text in refused {
            let error = size("size", text).unwrap_err().to_string();
            assert!(error.starts_with("size is "), "{text}: {error}");
        }
        let long = "9".repeat(1 << 20);
        assert!(size("size", &long).is_err());
    }

    #[test]
    fn sizes_of_objects_may_have_powers_of_ten_and_parts_of_a_byte() {
        let read = [
            ("1e9", 1_000_000_000),
            ("1.5E3", 1500),
            ("12E", 12_000_000_000_000_000_000_u128),
            ("2000e-3", 2),
            ("1e-30", 1),
            ("0e9", 0),
            ("1500m", 2),
            ("1n", 1),
            ("500Mi", 524_288_000),
            ("7E", 7_000_000_000_000_000_000),
        ];
        for (text, bytes) in read {
            let expected = Bytes::from_u128(bytes);
            assert_eq!(of_object("size", text).ok(), expected, "{text}");
        }
        for text in ["", "e9", "1e", "1e+", "1e40", "1e99999999999", "-1e3", "1e3Gi", "1M3", "1mm"]
        {
            let error = of_object("size", text).unwrap_err().to_string();
            assert!(error.starts_with("size is "), "{text}: {error}");
        }
    }

    #[test]
    fn ratios_are_exact_and_at_least_one() {
        let third = Bytes::new(3).unwrap();
        let read = [
            ("1", 3),
            ("1.0", 3),
            ("1.5", 4),
            ("2", 6),
            ("1.999999999", 5),
            ("1000000", 3_000_000),
        ];
        for (text, times) in read {
            let ratio = Ratio::parse("ratio", text).unwrap();
            assert_eq!(ratio.times(third), times, "{text}");
            assert_eq!(ratio.to_string(), text);
        }
        for text in ["0.999999999", "0", "-2", "1000000.1", "1.0000000001", "", "two", "1e1", "NaN"]
        {
            let error = Ratio::parse("ratio", text).unwrap_err().to_string();
            assert!(error.starts_with("ratio is "), "{error}");
        }
        // A half does not vanish where a floating point number would lose it.
        let ratio = Ratio::parse("ratio", "1.5").unwrap();
        let odd = Bytes::new((1_i64 << 62) + 1).unwrap();
        assert_eq!(ratio.times(odd), (3 * ((1_u128 << 62) + 1)) / 2);
        assert_eq!(
            Ratio::parse("ratio", "1000000").unwrap().times(Bytes::MAX),
            Bytes::MAX.wide() * 1_000_000
        );
    }

    proptest! {
        #[test]
        fn no_text_is_a_panic(text in ".*") {
            let _ = size("size", &text);
            let _ = of_object("size", &text);
            let _ = Ratio::parse("ratio", &text);
        }

        #[test]
        fn whole_sizes_are_read_back(bytes in 0..=i64::MAX) {
            prop_assert_eq!(size("size", &bytes.to_string()).unwrap().get(), bytes);
            let with_point = format!("{bytes}.0");
            prop_assert_eq!(size("size", &with_point).unwrap().get(), bytes);
        }
    }
}
