//! Commands for people who run a cluster. They read the PersistentVolumes from a list that kubectl
//! makes, so that neither they nor the plugin need rights of the Kubernetes API.

use std::io::Write as _;

use serde::Serialize;
use serde_json::Value;

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

/// The beginning of a script: an error of the cluster ends it, so that none is taken for an object
/// that is not there.
const SET: &str = "set -e";

/// A command that sets a shell's variable to a part of an object, or to nothing where the object is
/// not there. `object` is in words of a shell.
fn part_of(variable: &str, object: &str, path: &str) -> String {
    let path = quoted(&format!("jsonpath={{{path}}}"));
    format!("{variable}=$(kubectl get {object} --ignore-not-found --output {path})")
}

/// The commands that delete a PersistentVolume, whose name is a word of a shell, also where those
/// that would take away its finalizers are gone. Another object of its name keeps its finalizers.
fn delete_pv(name: &str, uid: &str) -> [String; 3] {
    let patch = format!(r#"{{"metadata":{{"uid":{},"finalizers":null}}}}"#, Value::from(uid));
    [
        format!("kubectl delete pv {name} --ignore-not-found --wait=false"),
        part_of("left", &format!("pv {name}"), ".metadata.uid"),
        format!(
            "[ \"$left\" != {} ] || kubectl patch pv {name} --type=merge --patch {}",
            quoted(uid),
            quoted(&patch)
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
