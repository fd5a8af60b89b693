//! The flags of our programs, by the documents that are generated from their help.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};

/// The documents that are generated from the help of our programs; tests hold them equal to it.
const DOCUMENTS: [&str; 2] = ["docs/CLI.md", "docs/CLI_CSI.md"];

/// Flags by program and verb, as in `blockd pool check`, without the dashes.
pub(crate) type Flags = BTreeMap<String, BTreeSet<String>>;

/// Reads the documents.
///
/// # Errors
/// When one is missing.
pub(crate) fn ours(root: &Path) -> Result<Flags> {
    let mut known = Flags::new();
    for document in DOCUMENTS {
        let text = std::fs::read_to_string(root.join(document)).context(document)?;
        known.extend(by_heading(&text));
    }
    Ok(known)
}

/// The flags below each heading that names a program.
pub(crate) fn by_heading(text: &str) -> Flags {
    let mut found = Flags::new();
    let mut program = String::new();
    for line in text.lines() {
        let heading = line.strip_prefix("## ").or_else(|| line.strip_prefix("### "));
        if let Some(heading) = heading {
            program = heading.trim_matches('`').to_owned();
            found.entry(program.clone()).or_default();
            continue;
        }
        let line = line.trim_start();
        // A short form may come first: `-h, --help`.
        let rest = match line.split_once(", ") {
            Some((short, rest)) if short.len() == 2 && short.starts_with('-') => rest,
            _ => line,
        };
        let Some(rest) = rest.strip_prefix("--") else { continue };
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '-');
        let name = &rest[..end.unwrap_or(rest.len())];
        if !name.is_empty() {
            found.entry(program.clone()).or_default().insert(name.to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_a_help_are_found_and_its_words_are_not() {
        let text =
            "## blockd serve\n\n      --config <FILE>\n  -h, --help\n          Print --nothing\n";
        let flags = &by_heading(text)["blockd serve"];
        assert_eq!(flags.iter().map(String::as_str).collect::<Vec<_>>(), ["config", "help"]);
    }

    #[test]
    fn a_verb_of_a_verb_has_flags_of_its_own() {
        let flags = by_heading("## a pool\n  --json\n### a pool map\n  --width <N>\n");
        assert!(flags["a pool"].contains("json") && !flags["a pool"].contains("width"));
        assert!(flags["a pool map"].contains("width"));
    }
}
