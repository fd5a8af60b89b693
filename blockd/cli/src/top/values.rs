//! Numbers in several forms, so that one that does not fit is shown in a shorter form.
//!
//! Every form is rounded down, and no form is a part of another number's digits.

use blockd_media::units;

use crate::output::{human_ns, percent};

/// A number's forms, from the longest to the shortest.
pub(super) type Forms = Vec<String>;

/// Letters of the units, each 1024 times the one before.
const UNITS: [char; 7] = ['B', 'K', 'M', 'G', 'T', 'P', 'E'];

/// Below this a duration was shorter than the worker's clock can show: the upper end of the lowest
/// buckets of a histogram.
const RESOLUTION_NS: u64 = 2;

/// A size: `1011.2 MiB`, `1011 MiB`, `1011M`, `0.9G`.
pub(super) fn size(bytes: u64) -> Forms {
    let (mut unit, mut power) = (1_u64, 0);
    while bytes / unit >= 1024 {
        (unit, power) = (unit * 1024, power + 1);
    }
    let (whole, letter) = (bytes / unit, UNITS[power]);
    let name = if power == 0 { "B".to_owned() } else { format!("{letter}iB") };
    let mut forms =
        vec![units::human(bytes), format!("{whole} {name}"), format!("{whole}{letter}")];
    if let Some(next) = UNITS.get(power + 1).filter(|_| whole >= 100) {
        forms.push(format!("0.{}{next}", whole * 10 / 1024));
    }
    shortening(forms)
}

/// A count: `1234567`, `1234k`, `1.2M`.
pub(super) fn count(count: u64) -> Forms {
    let mut forms = vec![count.to_string()];
    for (unit, letter) in [(1_000, 'k'), (1_000_000, 'M'), (1_000_000_000, 'G')] {
        if count >= unit {
            let (whole, tenths) = (count / unit, count % unit * 10 / unit);
            if whole < 10 {
                forms.push(format!("{whole}.{tenths}{letter}"));
            }
            forms.push(format!("{whole}{letter}"));
        }
    }
    shortening(forms)
}

/// A count with thousandths: `12.5`, `12`.
pub(super) fn thousandths(thousandths: u64) -> Forms {
    let (whole, tenths) = (thousandths / 1000, thousandths % 1000 / 100);
    let mut forms = vec![format!("{whole}.{tenths}")];
    forms.extend(count(whole));
    shortening(forms)
}

/// A duration: `7.3 ms`, `7.3ms`, `7ms`. `~0` is one that the worker's clock cannot show; nothing
/// is `-`.
pub(super) fn time(ns: u64) -> Forms {
    if ns <= RESOLUTION_NS {
        return vec![if ns == 0 { "-" } else { "~0" }.to_owned()];
    }
    let long = human_ns(ns);
    let close = long.replace(' ', "");
    let mut forms = vec![long, close.clone()];
    if let Some((whole, rest)) = close.split_once('.') {
        forms.push(format!("{whole}{}", rest.trim_start_matches(|c: char| c.is_ascii_digit())));
    }
    shortening(forms)
}

/// The median and the 99th percentile: `40 us/80 ms`, `40us/80ms`.
pub(super) fn times(p50_ns: u64, p99_ns: u64) -> Forms {
    if p99_ns == 0 {
        return vec!["-".to_owned()];
    }
    let (first, second) = (time(p50_ns), time(p99_ns));
    let pair = |at: usize| {
        let form =
            |forms: &Forms| forms.get(at).or_else(|| forms.last()).cloned().unwrap_or_default();
        format!("{}/{}", form(&first), form(&second))
    };
    shortening((0..first.len().max(second.len())).map(pair).collect())
}

/// A share: `16.6 %`, `16%`; nothing of a whole that is nothing.
pub(super) fn share(part: u64, whole: u64) -> Forms {
    let long = percent(part, whole);
    if whole == 0 {
        return vec![long];
    }
    let short = u128::from(part) * 100 / u128::from(whole);
    shortening(vec![long, format!("{short}%")])
}

/// Words: no form but the one.
pub(super) fn only(text: impl Into<String>) -> Forms {
    vec![text.into()]
}

/// Leaves out forms that are no shorter than the one before.
fn shortening(forms: Forms) -> Forms {
    let mut kept: Forms = Vec::new();
    for form in forms {
        if kept.last().is_none_or(|last| form.chars().count() < last.chars().count()) {
            kept.push(form);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_keep_their_first_digits_in_every_form() {
        let bytes = (1011 << 20) + (200 << 10);
        assert_eq!(size(bytes), ["1011.1 MiB", "1011 MiB", "1011M", "0.9G"]);
        assert_eq!(size(1 << 30), ["1 GiB", "1G"]);
        assert_eq!(size(512), ["512 B", "512B"]);
        assert_eq!(size(0), ["0 B", "0B"]);
        assert_eq!(size(u64::MAX), ["15.9 EiB", "15 EiB", "15E"]);
    }

    #[test]
    fn counts_times_and_shares_are_rounded_down() {
        assert_eq!(count(1_299_999), ["1299999", "1299k", "1.2M", "1M"]);
        assert_eq!(count(999), ["999"]);
        assert_eq!(count(12_345), ["12345", "12k"]);
        assert_eq!(thousandths(12_580), ["12.5", "12"]);
        assert_eq!(time(7_340_000), ["7.3 ms", "7.3ms", "7ms"]);
        assert_eq!([time(0), time(2)], [["-"], ["~0"]]);
        assert_eq!(times(2, 7_340_000), ["~0/7.3 ms", "~0/7.3ms", "~0/7ms"]);
        assert_eq!(times(0, 0), ["-"]);
        assert_eq!(share(999, 1000), ["99.9 %", "99%"]);
        assert_eq!(share(1, 0), ["-"]);
    }
}
