//! A value that is refused, and values as they can stand in the line of an error.

use std::fmt::{self, Display};

/// A value outside of what is allowed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{field} is {value}: must be {allowed}")]
pub struct Invalid {
    /// The field of the request, the parameter, the option, or the key of the configuration.
    pub field: String,
    /// Its value, as it can stand in a line.
    pub value: String,
    /// The accepted values.
    pub allowed: String,
}

impl Invalid {
    /// A value outside of what is allowed.
    #[must_use]
    pub fn new(field: impl Display, value: impl Display, allowed: impl Display) -> Self {
        Self { field: shown(field), value: shown(value), allowed: allowed.to_string() }
    }
}

/// Longest value that is shown: longer values are not helpful, and a status has to fit into a
/// header.
const MAX_SHOWN: usize = 160;

/// A value as it can stand in a line: without control characters, and not too long.
#[must_use]
pub fn shown(value: impl Display) -> String {
    struct Line(String);

    impl fmt::Write for Line {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            for c in text.chars() {
                if self.0.len() > MAX_SHOWN {
                    // Ends the formatting: a value can be a megabyte long.
                    return Err(fmt::Error);
                }
                if c.is_control() {
                    self.0.extend(c.escape_default());
                } else {
                    self.0.push(c);
                }
            }
            Ok(())
        }
    }

    let mut line = Line(String::new());
    let _ = fmt::write(&mut line, format_args!("{value}"));
    if line.0.is_empty() { "empty".to_owned() } else { cut(line.0, MAX_SHOWN) }
}

/// Cuts a text off behind `limit` bytes.
#[must_use]
pub fn cut(mut text: String, limit: usize) -> String {
    if text.len() > limit {
        let end = text.floor_char_boundary(limit);
        text.truncate(end);
        text.push_str("...");
    }
    text
}
