//! Options that mean the same in each program.

use clap::ValueEnum;

use crate::error::Invalid;

/// The driver of which there is usually one; its names have the short prefix.
pub const DEFAULT_DRIVER: &str = "csi.blockd.io";

/// Bytes of a driver's name, by the specification.
const MAX_DRIVER: usize = 63;

/// The form of the log.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// A JSON object in each line.
    Json,
}

/// Checks the name of a driver.
///
/// # Errors
/// The name is not a domain name, or too long.
pub fn check_driver(name: &str) -> Result<(), Invalid> {
    let inner = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    let outer = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let fits = name.len() <= MAX_DRIVER && name.chars().all(inner);
    if fits && outer(name.chars().next()) && outer(name.chars().last()) && !name.contains("..") {
        return Ok(());
    }
    let allowed = format!(
        "a domain name of 1 to {MAX_DRIVER} letters, digits, dashes and dots, which begins and \
         ends with a letter or digit"
    );
    Err(Invalid::new("driver-name", name, allowed))
}
