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
    fn exact_bytes_are_plain_numbers() {
        let exact = Output::with(false, true, Terminal::none());
        assert_eq!(exact.size(10 << 30), "10737418240");
    }
}
