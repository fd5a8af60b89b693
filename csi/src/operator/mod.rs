//! Commands for people who run a cluster. They read the PersistentVolumes from a list that kubectl
//! makes, so that neither they nor the plugin need rights of the Kubernetes API.

use std::io::Write as _;

use serde::Serialize;

use crate::error::Error;

pub mod lost_node;
pub mod orphans;
pub mod pv;

#[cfg(test)]
mod tests;

/// Writes the answer of a command: as JSON, or as text.
fn print(json: Option<&impl Serialize>, text: impl FnOnce() -> String) -> Result<(), Error> {
    let mut answer = match json {
        Some(value) => serde_json::to_string_pretty(value)
            .map_err(|error| Error::unexpected("write JSON:", error))?,
        None => text(),
    };
    if !answer.is_empty() && !answer.ends_with('\n') {
        answer.push('\n');
    }
    let written = std::io::stdout().write_all(answer.as_bytes());
    written.map_err(|error| Error::io("write the answer", error))
}
