//! Sizes and identities as people write them. Whole bytes throughout: no floating point, no
//! rounding on the way in.

use crate::error::Error;

/// The largest size there is: the largest `int64` of the control API.
pub const MAX_SIZE: u64 = i64::MAX.cast_unsigned();

/// Bytes in what older clients of the control API count in.
pub const GIB: u64 = 1 << 30;

/// The accepted forms of a size.
pub const SIZE_FORM: &str =
    "a whole number of bytes up to 8E - 1, or of K, M, G, T, P, E, each 1024 times the one before";

/// Letters of the units, each 1024 times the one before.
const UNITS: &str = "KMGTPE";

/// An identity as people see it: two hexadecimal digits for each byte.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads a size: `512`, `10G`, `10g`, `10GiB` or `10 GiB` for 10 times 2^30 bytes. `10GB` is
/// refused, because it means 10^10 bytes to some. `field` is what the error names.
pub fn parse_size(field: &str, text: &str) -> Result<u64, Error> {
    parse(text).ok_or_else(|| Error::invalid(field, text, SIZE_FORM))
}

fn parse(text: &str) -> Option<u64> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let count: u64 = digits.parse().ok()?;
    let bytes = count.checked_mul(unit_bytes(unit.trim_start())?)?;
    (bytes <= MAX_SIZE).then_some(bytes)
}

fn unit_bytes(unit: &str) -> Option<u64> {
    let unit = unit.to_ascii_uppercase();
    if unit.is_empty() || unit == "B" {
        return Some(1);
    }
    let letter = unit.strip_suffix("IB").unwrap_or(&unit);
    let mut letters = letter.chars();
    let (Some(letter), None) = (letters.next(), letters.next()) else { return None };
    let power = UNITS.chars().position(|unit| unit == letter)?;
    (0..=power).try_fold(1_u64, |bytes, _| bytes.checked_mul(1024))
}

/// A number of things in words: `1 volume`, `2 volumes`, `3 entries`.
#[must_use]
pub fn counted(count: impl std::fmt::Display, what: &str) -> String {
    let count = count.to_string();
    match what.strip_suffix('y') {
        _ if count == "1" => format!("1 {what}"),
        Some(stem) => format!("{count} {stem}ies"),
        None if what.ends_with("sh") => format!("{count} {what}es"),
        None => format!("{count} {what}s"),
    }
}

/// The shortest form that [`parse_size`] reads as exactly this size: `10G`, `38797313`.
#[must_use]
pub fn exact(bytes: u64) -> String {
    let (mut count, mut unit) = (bytes, None);
    for letter in UNITS.chars() {
        if count == 0 || !count.is_multiple_of(1024) {
            break;
        }
        (count, unit) = (count / 1024, Some(letter));
    }
    unit.map_or_else(|| count.to_string(), |letter| format!("{count}{letter}"))
}

/// A size for people, with at most one decimal: `10 GiB`, `37.1 MiB`, `512 B`. Rounded down, so
/// that what is free is never made more.
#[must_use]
pub fn human(bytes: u64) -> String {
    let (mut unit, mut letter) = (1_u64, None);
    for next in UNITS.chars() {
        if bytes / unit < 1024 {
            break;
        }
        (unit, letter) = (unit * 1024, Some(next));
    }
    let Some(letter) = letter else { return format!("{bytes} B") };
    // The remainder is below 2^60: ten times it fits.
    let (whole, tenths) = (bytes / unit, bytes % unit * 10 / unit);
    if tenths == 0 { format!("{whole} {letter}iB") } else { format!("{whole}.{tenths} {letter}iB") }
}

/// A size from the two fields of a message of the control API: `size_gb` counts when `size_bytes`
/// is not there. The name of the field that is wrong goes into the error.
pub fn from_wire(size_bytes: i64, size_gb: u64) -> Result<u64, Error> {
    if size_bytes != 0 || size_gb == 0 {
        let allowed = "from 0 to 2^63 - 1 bytes";
        return u64::try_from(size_bytes)
            .map_err(|_| Error::invalid("size_bytes", size_bytes, allowed));
    }
    let bytes = size_gb.checked_mul(GIB).filter(|bytes| *bytes <= MAX_SIZE);
    bytes.ok_or_else(|| Error::invalid("size_gb", size_gb, "below 2^33, so that bytes fit 63 bits"))
}

/// A size as `size_bytes` has it. No size here is above [`MAX_SIZE`]; one that is would be cut to
/// it.
#[must_use]
pub fn to_wire(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// A size as `size_gb` has it: rounded up, so that an older client sees no less than there is.
#[must_use]
pub const fn to_wire_gb(bytes: u64) -> u64 {
    bytes.div_ceil(GIB)
}

/// Date and time in UTC of milliseconds since 1970. The proleptic Gregorian calendar, counted from
/// 1 March of year 0, so that the leap day is a year's last.
#[must_use]
pub fn utc(unix_ms: i64) -> String {
    const DAYS_TO_1970: i64 = 719_468;
    const DAYS_IN_400_YEARS: i64 = 146_097;
    let seconds = unix_ms.div_euclid(1000);
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let days = days + DAYS_TO_1970;
    let day = days.rem_euclid(DAYS_IN_400_YEARS);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + days.div_euclid(DAYS_IN_400_YEARS) * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        let read = [
            ("0", 0),
            ("512", 512),
            ("512B", 512),
            ("4k", 4096),
            ("10G", 10 << 30),
            ("10 GiB", 10 << 30),
            (" 10gib ", 10 << 30),
            ("37MiB", 38_797_312),
            ("2T", 2 << 40),
            ("3P", 3 << 50),
            ("7E", 7 << 60),
            ("9223372036854775807", MAX_SIZE),
        ];
        for (text, bytes) in read {
            assert_eq!(parse_size("size", text).unwrap(), bytes, "{text}");
        }
    }

    #[test]
    fn an_invalid_size_is_refused_with_field_and_value() {
        let refused = [
            "",
            "G",
            "-1",
            "+1",
            "1.5G",
            "10GB",
            "10 X",
            "10GG",
            "10iB",
            "1e3",
            "0x10",
            "8E",
            "9223372036854775808",
            "18446744073709551616",
            "99999999999999999999E",
            "१",
        ];
        for text in refused {
            let error = parse_size("size", text).unwrap_err().to_string();
            assert!(error.starts_with("size is "), "{text}: {error}");
            assert!(error.ends_with(SIZE_FORM), "{text}: {error}");
        }
    }

    #[test]
    fn people_see_one_decimal() {
        let shown = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (38_797_312, "37 MiB"),
            (38_902_170, "37.1 MiB"),
            (10 << 30, "10 GiB"),
            (MAX_SIZE, "7.9 EiB"),
            (u64::MAX, "15.9 EiB"),
        ];
        for (bytes, text) in shown {
            assert_eq!(human(bytes), text);
        }
    }

    #[test]
    fn the_older_field_counts_only_without_the_newer() {
        assert_eq!(from_wire(0, 0).unwrap(), 0);
        assert_eq!(from_wire(38_797_312, 7).unwrap(), 38_797_312);
        assert_eq!(from_wire(0, 2).unwrap(), 2 << 30);
        assert_eq!(from_wire(i64::MAX, u64::MAX).unwrap(), MAX_SIZE);
    }

    #[test]
    fn sizes_on_the_wire_that_overflow_are_errors() {
        for size_gb in [1 << 33, u64::MAX / GIB, u64::MAX / GIB + 1, u64::MAX] {
            let error = from_wire(0, size_gb).unwrap_err().to_string();
            assert!(error.starts_with(&format!("size_gb is {size_gb}:")), "{error}");
        }
        for size_bytes in [-1, i64::MIN] {
            let error = from_wire(size_bytes, 1).unwrap_err().to_string();
            assert!(error.starts_with(&format!("size_bytes is {size_bytes}:")), "{error}");
        }
    }

    proptest! {
        #[test]
        fn the_exact_form_is_read_back(bytes in 0..=MAX_SIZE, zeroes in 0_u32..63) {
            for bytes in [bytes, bytes >> zeroes << zeroes] {
                prop_assert_eq!(parse_size("size", &exact(bytes)).unwrap(), bytes);
            }
        }

        #[test]
        fn no_text_is_a_panic(text in ".*") {
            let _ = parse_size("size", &text);
        }

        #[test]
        fn an_older_client_sees_no_less_and_less_than_a_unit_more(bytes in 0..=MAX_SIZE) {
            let seen = to_wire_gb(bytes);
            let seen = u128::from(seen) * u128::from(GIB);
            let more = seen.checked_sub(u128::from(bytes));
            prop_assert!(more.is_some_and(|more| more < u128::from(GIB)));
        }

        #[test]
        fn whatever_is_on_the_wire_is_a_size_or_an_error(
            size_bytes in any::<i64>(), size_gb in any::<u64>(),
        ) {
            if let Ok(bytes) = from_wire(size_bytes, size_gb) {
                prop_assert!(bytes <= MAX_SIZE);
                if size_bytes != 0 {
                    prop_assert_eq!(to_wire(bytes), size_bytes);
                }
            }
        }
    }
}
