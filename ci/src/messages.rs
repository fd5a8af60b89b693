//! `cargo ci messages`: every text that an operator can read, in one document.
//!
//! The texts are string literals of the shipped programs: errors, log messages, and what commands
//! print. Help is in `docs/CLI.md`. Literals of one word are left out, as they are names and keys;
//! so are literals of tests and of assertions.

mod literals;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use literals::{Kind, Message};

/// The document.
const DOCUMENT: &str = "docs/MESSAGES.md";

/// Folders with the sources of what is shipped.
const SHIPPED: [&str; 5] = ["blockd", "csi", "mapper", "pmem", "api"];

const HEAD: &str = "# Messages

Every text that the programs can print, apart from help (see [CLI.md](CLI.md)), sorted within its
kind. `{…}` stands for a value. The document is generated: `cargo ci messages --write`.
";

/// Compares the document with the sources, or writes it.
///
/// # Errors
/// The document is out of date, or a source can't be read.
pub(crate) fn run(root: &Path, write: bool) -> Result<()> {
    let text = document(&collect(root)?);
    let path = root.join(DOCUMENT);
    if write {
        return std::fs::write(&path, text).with_context(|| path.display().to_string());
    }
    let present = std::fs::read_to_string(&path).unwrap_or_default();
    ensure!(present == text, "{DOCUMENT} is out of date: run `cargo ci messages --write`");
    Ok(())
}

fn collect(root: &Path) -> Result<Vec<Message>> {
    let mut files = Vec::new();
    for folder in SHIPPED {
        sources(&root.join(folder), &mut files)?;
    }
    let mut messages = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file)?;
        let found = literals::of_file(&text).with_context(|| file.display().to_string())?;
        messages.extend(found);
    }
    Ok(messages)
}

/// Rust files in `src` folders, but for those of tests.
fn sources(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() {
            if !matches!(&*name, "target" | "tests" | "testing" | "benches") {
                sources(&path, files)?;
            }
        } else if name.ends_with(".rs") && !name.starts_with("tests") && name != "build.rs" {
            files.push(path);
        }
    }
    Ok(())
}

fn document(messages: &[Message]) -> String {
    let mut kinds: BTreeMap<Kind, BTreeSet<&str>> = BTreeMap::new();
    for message in messages {
        kinds.entry(message.kind).or_default().insert(&message.text);
    }
    let mut text = HEAD.to_owned();
    for (kind, texts) in kinds {
        let _ = writeln!(text, "\n## {}\n", kind.heading());
        for one in texts {
            let _ = writeln!(text, "- `{}`", one.replace('`', "'"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_has_each_text_once_under_its_kind() {
        let message = |kind, text: &str| Message { kind, text: text.to_owned() };
        let messages = [
            message(Kind::Log, "pool opened"),
            message(Kind::Error, "volume `a` not found"),
            message(Kind::Log, "pool opened"),
        ];
        let text = document(&messages);
        let lists = text.strip_prefix(HEAD).unwrap();
        assert_eq!(
            lists,
            "\n## Errors\n\n- `volume 'a' not found`\n\n## Log messages\n\n- `pool opened`\n"
        );
    }
}
