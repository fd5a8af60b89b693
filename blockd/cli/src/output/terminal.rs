//! The kind of standard output, and colours for terminals that support them.

use std::io::IsTerminal;

/// Narrower than this nothing is made to fit: it would be unreadable anyway.
const MIN_WIDTH: usize = 40;

/// The output device of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Terminal {
    /// A person reads it.
    pub interactive: bool,
    /// Characters in a line; none when there is no limit.
    pub width: Option<usize>,
    /// Whether colours are enabled.
    pub colour: bool,
}

impl Terminal {
    /// A file or a pipe.
    #[must_use]
    pub(crate) fn none() -> Self {
        Self { interactive: false, width: None, colour: false }
    }

    /// Standard output, with `COLUMNS`, `TERM` and `NO_COLOR` (no-color.org) taken into account.
    #[must_use]
    pub(crate) fn of_stdout() -> Self {
        if !std::io::stdout().is_terminal() {
            return Self::none();
        }
        let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        let columns = std::env::var("COLUMNS").ok().and_then(|text| text.parse().ok());
        let asked = || ratatui::crossterm::terminal::size().ok().map(|size| usize::from(size.0));
        let width = columns.or_else(asked).map(|width: usize| width.max(MIN_WIDTH));
        Self { interactive: true, width, colour: !set("NO_COLOR") && !dumb }
    }

    /// Colours, or none.
    #[must_use]
    pub(crate) fn paint(&self) -> Paint {
        Paint { enabled: self.colour }
    }
}

/// The meaning of a piece of text that its style shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Tone {
    /// Nothing.
    #[default]
    Plain,
    /// A heading.
    Strong,
    /// Of less interest.
    Dim,
    /// As it should be.
    Good,
    /// To be looked at.
    Warning,
    /// Wrong.
    Bad,
    /// One of several colours that distinguish objects.
    Colour(u8),
}

/// The number of colours that distinguish objects.
pub(crate) const PALETTE_COUNT: u8 = 6;

/// Puts colours around text, or leaves it alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Paint {
    enabled: bool,
}

impl Paint {
    /// The text in its tone.
    #[must_use]
    pub(crate) fn text(self, tone: Tone, text: &str) -> String {
        let code = match tone {
            Tone::Plain => return text.to_owned(),
            Tone::Strong => "1".to_owned(),
            Tone::Dim => "2".to_owned(),
            Tone::Good => "32".to_owned(),
            Tone::Warning => "33".to_owned(),
            Tone::Bad => "31".to_owned(),
            // Bright colours: 31 to 33 have a meaning already.
            Tone::Colour(index) => (91 + index % PALETTE_COUNT).to_string(),
        };
        if self.enabled { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_for_terminals_only() {
        assert_eq!(Terminal::none().paint().text(Tone::Bad, "x"), "x");
        assert_eq!(Paint { enabled: true }.text(Tone::Bad, "x"), "\x1b[31mx\x1b[0m");
        assert_eq!(Paint { enabled: true }.text(Tone::Plain, "x"), "x");
    }
}
