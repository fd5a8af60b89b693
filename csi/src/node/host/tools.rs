//! Runs the tools of file systems and devices.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::error::Error;
use crate::node::world::Result;

/// Tools of file systems lie there, and not every `PATH` has it.
const TOOLS: &str = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin";

/// Limit of a tool's output in errors: its last lines have the reason of the failure.
const SAID_BYTES: usize = 400;

/// Runs a tool.
///
/// # Errors
/// When it fails, with its output.
pub(super) fn succeeded<S: AsRef<OsStr>>(
    program: &str,
    words: &[S],
    last: Option<&Path>,
) -> Result<()> {
    said(program, words, last).map(drop)
}

/// Runs a tool, and returns its output.
///
/// # Errors
/// When it fails.
pub(super) fn said<S: AsRef<OsStr>>(
    program: &str,
    words: &[S],
    last: Option<&Path>,
) -> Result<String> {
    let output = run(program, words, last)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let path = last.unwrap_or_else(|| Path::new("")).display();
    let problem = explained(output.status.to_string(), &output);
    Err(Error::unexpected(format!("{program} {path}"), problem))
}

/// Runs a tool, and returns its output and status.
pub(super) fn run<S: AsRef<OsStr>>(
    program: &str,
    words: &[S],
    last: Option<&Path>,
) -> Result<Output> {
    tracing::debug!(program, path = ?last, "run");
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new(program);
    command.args(words).args(last).stdin(Stdio::null());
    // The tools' output is compared, and the tools are searched in all the usual directories.
    command.env("LC_ALL", "C").env("PATH", format!("{path}:{TOOLS}"));
    command.output().map_err(|error| Error::io(format!("starting {program}"), error))
}

/// A problem, and the end of the tool's output, in a line.
pub(super) fn explained(problem: String, output: &Output) -> String {
    let said = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    let tail = &said[said.len().saturating_sub(SAID_BYTES)..];
    let words = String::from_utf8_lossy(tail);
    let words: Vec<&str> = words.split_whitespace().collect();
    if words.is_empty() { problem } else { format!("{problem}: {}", words.join(" ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_a_tool_is_part_of_the_error() {
        let said = succeeded("sh", &["-c", "echo no room >&2; exit 3"], None).unwrap_err();
        assert!(said.to_string().contains("no room"), "{said}");
        let said = succeeded::<&str>("no-such-program", &[], None).unwrap_err();
        assert!(said.to_string().contains("starting no-such-program"), "{said}");
    }
}
