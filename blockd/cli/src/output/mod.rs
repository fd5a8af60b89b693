//! The output of a verb: a table or a few lines for people, one JSON value for programs.

pub(crate) mod table;
pub(crate) mod terminal;

use std::cell::Cell;
use std::io::Write;
use std::rc::Rc;

use blockd_media::error::Error;
use blockd_media::units::human;
use serde::Serialize;

use terminal::{Paint, Terminal};

/// How this run prints.
#[derive(Clone, Debug)]
pub(crate) struct Output {
    json: bool,
    bytes: bool,
    terminal: Terminal,
    has_printed: Rc<Cell<bool>>,
}

impl Output {
    /// Prints as the arguments say, to what standard output is.
    #[must_use]
    pub(crate) fn new(json: bool, bytes: bool) -> Self {
        Self { json, bytes, terminal: Terminal::of_stdout(), has_printed: Rc::default() }
    }

    /// Prints as if to `terminal`.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn with(json: bool, bytes: bool, terminal: Terminal) -> Self {
        Self { json, bytes, terminal, has_printed: Rc::default() }
    }

    /// Whether `--json` was given.
    #[must_use]
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// The kind of standard output.
    #[must_use]
    pub(crate) fn terminal(&self) -> &Terminal {
        &self.terminal
    }

    /// Colours, or nothing where there are none.
    #[must_use]
    pub(crate) fn paint(&self) -> Paint {
        self.terminal.paint()
    }

    /// A size for people: in binary units, or as a plain number with `--bytes`.
    #[must_use]
    pub(crate) fn size(&self, bytes: u64) -> String {
        if self.bytes { bytes.to_string() } else { human(bytes) }
    }

    /// Writes text to standard output.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub(crate) fn text(&self, text: &str) -> Result<(), Error> {
        let mut out = std::io::stdout().lock();
        let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        written.map_err(|source| Error::io(TO_STDOUT, source))
    }

    /// Writes one value, indented, with a line feed at its end.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub(crate) fn json(&self, value: &impl Serialize) -> Result<(), Error> {
        self.text(&pretty(value))
    }

    /// Writes the one value of this run; a later failure is reported by the exit code alone.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub(crate) fn last_json(&self, value: &impl Serialize) -> Result<(), Error> {
        self.has_printed.set(true);
        self.json(value)
    }

    /// The same for a text that holds the one value.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub(crate) fn last_text(&self, text: &str) -> Result<(), Error> {
        self.has_printed.set(true);
        self.text(text)
    }

    /// Whether the one value was written.
    #[must_use]
    pub(crate) fn has_printed(&self) -> bool {
        self.has_printed.get()
    }

    /// Writes one value on one line: a stream of them is read line by line.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub(crate) fn json_line(&self, value: &impl Serialize) -> Result<(), Error> {
        let mut line = serde_json::to_string(value).unwrap_or_default();
        line.push('\n');
        self.text(&line)
    }

    /// The value with `--json`, else the text that `human` makes.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub(crate) fn either(
        &self,
        value: &impl Serialize,
        human: impl FnOnce() -> String,
    ) -> Result<(), Error> {
        if self.json { self.json(value) } else { self.text(&human()) }
    }
}

/// The form in which `--json` prints.
#[must_use]
pub(crate) fn pretty(value: &impl Serialize) -> String {
    let mut text = serde_json::to_string_pretty(value).unwrap_or_default();
    text.push('\n');
    text
}

const TO_STDOUT: &str = "writing to standard output";

/// Whether the reader of standard output has gone away, as `head` does: the end of the work, and
/// nothing to complain about.
#[must_use]
pub(crate) fn reader_is_gone(error: &Error) -> bool {
    matches!(error, Error::Io { what, source }
        if what == TO_STDOUT && source.kind() == std::io::ErrorKind::BrokenPipe)
}

/// `12.3 %` of `whole`; `-` when there is no whole.
#[must_use]
pub(crate) fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".to_owned();
    }
    let tenths = u128::from(part) * 1000 / u128::from(whole);
    format!("{}.{} %", tenths / 10, tenths % 10)
}

/// The shares of parts that make up a whole, like [`percent`], rounded so that they add up to
/// 100 %.
#[must_use]
pub(crate) fn shares(parts: &[u64]) -> Vec<String> {
    let whole: u128 = parts.iter().map(|part| u128::from(*part)).sum();
    if whole == 0 {
        return vec!["-".to_owned(); parts.len()];
    }
    let scaled = |part: u64| u128::from(part) * 1000;
    let mut tenths: Vec<u128> = parts.iter().map(|part| scaled(*part) / whole).collect();
    // What the rounding down has lost goes to those that have lost most.
    let lost = usize::try_from(1000 - tenths.iter().sum::<u128>()).unwrap_or(0);
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by_key(|at| std::cmp::Reverse(scaled(parts[*at]) % whole));
    for at in order.into_iter().take(lost) {
        tenths[at] += 1;
    }
    tenths.into_iter().map(|tenths| format!("{}.{} %", tenths / 10, tenths % 10)).collect()
}

/// Seconds for people, who plan by them: `90 s`, `45 min`, `30 h`, `12 days`, `more than a year`.
#[must_use]
pub(crate) fn human_seconds(seconds: u64) -> String {
    const MINUTE: u64 = 60;
    const HOUR: u64 = 60 * MINUTE;
    const DAY: u64 = 24 * HOUR;
    match seconds {
        0..=120 => format!("{seconds} s"),
        121..=7200 => format!("{} min", seconds / MINUTE),
        7201..=172_800 => format!("{} h", seconds / HOUR),
        _ if seconds <= 366 * DAY => format!("{} days", seconds / DAY),
        _ => "more than a year".to_owned(),
    }
}

/// Nanoseconds for people, with three digits or fewer: `870 ns`, `12 us`, `3.4 ms`.
#[must_use]
pub(crate) fn human_ns(ns: u64) -> String {
    let scaled = |unit_ns: u64, unit: &str| {
        let whole = ns / unit_ns;
        let tenths = ns % unit_ns * 10 / unit_ns;
        if whole < 10 && tenths > 0 {
            format!("{whole}.{tenths} {unit}")
        } else {
            format!("{whole} {unit}")
        }
    };
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => scaled(1_000, "us"),
        1_000_000..1_000_000_000 => scaled(1_000_000, "ms"),
        _ => scaled(1_000_000_000, "s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_and_times_read_as_people_say_them() {
        assert_eq!(percent(1, 3), "33.3 %");
        assert_eq!(percent(u64::MAX, u64::MAX), "100.0 %");
        assert_eq!(percent(1, 0), "-");
        assert_eq!(human_ns(999), "999 ns");
        assert_eq!(human_ns(1_500), "1.5 us");
        assert_eq!(human_ns(15_000_000), "15 ms");
        assert_eq!(human_ns(2_000_000_000), "2 s");
    }

    #[test]
    fn shares_add_up() {
        assert_eq!(shares(&[1, 1, 1]), ["33.4 %", "33.3 %", "33.3 %"]);
        assert_eq!(shares(&[2, 0, 1]), ["66.7 %", "0.0 %", "33.3 %"]);
        assert_eq!(shares(&[7]), ["100.0 %"]);
        assert_eq!(shares(&[0, 0]), ["-", "-"]);
        assert_eq!(shares(&[u64::MAX, u64::MAX]), ["50.0 %", "50.0 %"]);
        let many: Vec<u64> = (1..=999).collect();
        let tenths = |text: &String| text.replace(['.', ' ', '%'], "").parse::<u64>().unwrap();
        assert_eq!(shares(&many).iter().map(tenths).sum::<u64>(), 1000);
    }

    #[test]
    fn long_times_are_in_units_that_people_plan_by() {
        let times = [
            (0, "0 s"),
            (120, "120 s"),
            (121, "2 min"),
            (7_201, "2 h"),
            (172_801, "2 days"),
            (366 * 86_400, "366 days"),
            (118_626_963, "more than a year"),
        ];
        for (seconds, text) in times {
            assert_eq!(human_seconds(seconds), text);
        }
    }

    #[test]
    fn exact_bytes_are_plain_numbers() {
        let exact = Output::with(false, true, Terminal::none());
        assert_eq!(exact.size(10 << 30), "10737418240");
    }
}
