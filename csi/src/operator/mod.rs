//! Commands for people who run a cluster. They read the PersistentVolumes from a list that kubectl
//! makes, so that neither they nor the plugin need rights of the Kubernetes API.

use std::io::Write as _;

use serde::Serialize;

use crate::error::Error;

pub mod lost_node;
pub mod moving;
pub mod orphans;
pub mod pv;

#[cfg(test)]
mod tests;

/// A word of a shell. Names of Kubernetes have no character that is special; other texts may.
fn quoted(word: &str) -> String {
    let is_plain =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'/' | b'=');
    if !word.is_empty() && word.bytes().all(is_plain) && !word.starts_with('-') {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// The commands that delete a PersistentVolume, whose name is a word of a shell, also where those
/// that would take away its finalizers are gone.
fn delete_pv(name: &str) -> [String; 2] {
    [
        format!("kubectl delete pv {name} --ignore-not-found --wait=false"),
        format!(
            "! kubectl get pv {name} >/dev/null 2>&1 || kubectl patch pv {name} --type=merge \
             --patch '{{\"metadata\":{{\"finalizers\":null}}}}'"
        ),
    ]
}

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
