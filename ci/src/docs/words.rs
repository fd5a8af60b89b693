//! Checks that the programs, verbs and flags that documents name exist.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};
use clap::CommandFactory;

use crate::Arguments;
use crate::flags::{self, Flags};

/// The packages with the programs that `cargo ci` hands arguments on to.
const FORWARDED: [&str; 3] = ["bench/src", "sim/src", "tests/src"];

/// The programs whose commands are checked by verb and flag, as they begin.
const OURS: [&str; 4] = ["blockd", "blockd-csi", "blockd-0.1", "cargo ci"];

/// Programs that no session runs, with the reason.
pub(super) const NOT_RUN: [(&str, &str); 12] = [
    ("cargo", "builds for minutes; verbs and flags are checked"),
    ("ddrescue", "needs a disk with errors"),
    ("dmsetup", "needs device-mapper; `cargo ci vm thin` runs it"),
    ("thin_check", "needs a disk for the metadata; `cargo ci vm thin` runs it"),
    ("thin_restore", "needs a disk for the metadata; `cargo ci vm thin` runs it"),
    ("helm", "needs a cluster; `cargo ci manifests` renders the chart"),
    ("kubectl", "needs a cluster; `cargo ci manifests` checks the objects"),
    ("modprobe", "needs root and a kernel with the module"),
    ("mkfs.ext4", "needs a block device; `cargo ci vm fs` runs it"),
    ("mount", "needs root; `cargo ci vm fs` runs it"),
    ("umount", "needs root; `cargo ci vm fs` runs it"),
    ("bash", "it is the script that runs this check"),
];

/// The known programs, verbs and flags.
#[derive(Debug)]
pub(super) struct Known {
    flags: Flags,
    /// Flags of any program that arguments are handed on to.
    forwarded: BTreeSet<String>,
}

impl Known {
    /// Reads generated documents and, of programs that have none, their sources.
    ///
    /// # Errors
    /// When a file can't be read.
    pub(super) fn read(root: &Path) -> Result<Self> {
        let mut flags = flags::ours(root)?;
        let mut tool = Arguments::command();
        tool.build();
        add(&mut flags, "cargo ci", &tool);
        let mut forwarded = BTreeSet::new();
        for folder in FORWARDED {
            sources(&root.join(folder), &mut forwarded)?;
        }
        Ok(Self { flags, forwarded })
    }

    /// The verb or flag of a command of ours that does not exist.
    pub(super) fn problem(&self, words: &[String]) -> Option<String> {
        let line = words.join(" ");
        let ours =
            OURS.into_iter().find(|ours| line == *ours || line.starts_with(&format!("{ours} ")))?;
        let words = words[ours.split(' ').count()..].iter().map(String::as_str);
        // An older release had the same verbs.
        let mut path = ours.trim_end_matches("-0.1").to_owned();
        let global = self.flags.get(&path)?;
        for word in words {
            if let Some(flag) = word.strip_prefix("--") {
                let flag = flag.split('=').next().unwrap_or_default();
                if flag.is_empty() {
                    // The rest is for a program in a virtual machine.
                    return None;
                }
                let here = self.flags.get(&path)?;
                let handed_on = path.starts_with("cargo ci") && self.forwarded.contains(flag);
                let known = here.contains(flag) || global.contains(flag) || handed_on;
                if !known && !["help", "version"].contains(&flag) {
                    return Some(format!("{path} has no flag --{flag}"));
                }
            } else {
                let longer = format!("{path} {word}");
                let has_verbs = self.flags.keys().any(|key| key.starts_with(&format!("{path} ")));
                if self.flags.contains_key(&longer) {
                    path = longer;
                } else if has_verbs && is_word(word) {
                    return Some(format!("{path} has no verb {word}"));
                }
            }
        }
        None
    }

    /// Whether a command in running text is one of ours.
    pub(super) fn is_ours(words: &[String]) -> bool {
        let program = words.first().map(String::as_str);
        program.is_some_and(|program| OURS.contains(&program))
            || words.starts_with(&["cargo".to_owned(), "ci".to_owned()])
    }
}

/// Whether this could be a verb. Placeholders (`VERB`, `NAME`) and paths can't.
fn is_word(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_lowercase() || c == '-')
}

/// Adds the flags of a command and of its verbs.
fn add(flags: &mut Flags, name: &str, command: &clap::Command) {
    let longs = command.get_arguments().filter_map(clap::Arg::get_long).map(str::to_owned);
    flags.insert(name.to_owned(), longs.collect());
    for verb in command.get_subcommands().filter(|verb| verb.get_name() != "help") {
        add(flags, &format!("{name} {}", verb.get_name()), verb);
    }
}

/// Adds the fields below `#[arg(long)]` of all sources in a folder.
fn sources(folder: &Path, flags: &mut BTreeSet<String>) -> Result<()> {
    let context = || format!("reading {}", folder.display());
    for entry in std::fs::read_dir(folder).with_context(context)? {
        let path = entry?.path();
        if path.is_dir() {
            sources(&path, flags)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).with_context(context)?;
            fields(&text, flags);
        }
    }
    Ok(())
}

fn fields(text: &str, flags: &mut BTreeSet<String>) {
    for argument in text.split("#[arg(long").skip(1) {
        // The attribute may go over several lines; the field is the first line with a type.
        let field = argument.lines().skip(1).find_map(|line| {
            let name = line.trim().trim_start_matches("pub(crate) ").trim_start_matches("pub ");
            name.split_once(": ").map(|(name, _)| name)
        });
        flags.extend(field.map(|name| name.replace('_', "-")));
    }
}

#[cfg(test)]
mod tests {
    use super::super::page::words;
    use super::*;

    fn problem(line: &str) -> Option<String> {
        let mut flags = flags::by_heading(
            "## blockd\n  --json\n## blockd add\n  --size\n## blockd pool\n### blockd pool map\n",
        );
        flags.insert("cargo ci".to_owned(), BTreeSet::new());
        flags.insert("cargo ci vm".to_owned(), BTreeSet::new());
        let known = Known { flags, forwarded: BTreeSet::from(["seed".to_owned()]) };
        known.problem(&words(line)[0])
    }

    #[test]
    fn commands_that_exist_are_fine() {
        for line in [
            "blockd --json add x --size=1G",
            "blockd pool map --json",
            "blockd VERB --help",
            "blockd-0.1 add x",
            "cargo ci vm --seed 3 -- ls --all",
            "ls --size",
        ] {
            assert_eq!(problem(line), None, "{line}");
        }
    }

    #[test]
    fn verbs_and_flags_that_do_not_exist_are_named() {
        for (line, text) in [
            ("blockd delete x", "blockd has no verb delete"),
            ("blockd pool mop", "blockd pool has no verb mop"),
            ("blockd add --siez 1G x", "blockd add has no flag --siez"),
            ("cargo ci vm --speed 1", "cargo ci vm has no flag --speed"),
        ] {
            assert_eq!(problem(line).as_deref(), Some(text));
        }
    }

    #[test]
    fn flags_are_read_from_sources() {
        let mut flags = BTreeSet::new();
        fields(
            "#[arg(long)]\n    pub(crate) peers_only: bool,\n#[arg(long, x = \"y\")]\n a: B,",
            &mut flags,
        );
        assert_eq!(flags.into_iter().collect::<Vec<_>>(), ["a", "peers-only"]);
    }
}
