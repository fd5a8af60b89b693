//! Times on the command line.

use std::time::Duration;

/// Reads a time: a whole number and `ms`, `s` or `m`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: u32 = digits.parse().map_err(|_| "must be like 500ms, 30s or 2m".to_owned())?;
    let number = u64::from(number);
    match &text[digits.len()..] {
        _ if number == 0 => Err("must be more than 0".to_owned()),
        "ms" => Ok(Duration::from_millis(number)),
        "s" => Ok(Duration::from_secs(number)),
        "m" => Ok(Duration::from_secs(number * 60)),
        _ => Err("must be like 500ms, 30s or 2m".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("7s"), Ok(Duration::from_secs(7)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        for bad in ["", "0", "7", "s", "1h", "-1s", "1.5s", "99999999999s"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
