//! `blockd man`: manual pages and `docs/CLI.md`, made from the command line's own description.

use std::path::{Path, PathBuf};

use blockd_media::error::Error;
use clap::Command;
use clap_mangen::Man as Page;

use super::Context;

/// Print the manual page, or write all of them
///
/// Without a directory the page of blockd itself is printed; `blockd man | man -l -` shows it.
/// Needs no daemon.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd man --dir /usr/local/share/man/man1")]
pub(crate) struct Man {
    /// Write a page for each verb into this directory, which is made if need be
    #[arg(long, value_name = "DIRECTORY")]
    pub dir: Option<PathBuf>,

    /// Print docs/CLI.md instead
    #[arg(long, conflicts_with = "dir")]
    pub markdown: bool,
}

impl Man {
    pub(super) fn run(&self, context: &Context, line: Command) -> Result<(), Error> {
        if self.markdown {
            return context.output.text(&markdown(line));
        }
        if let Some(dir) = &self.dir {
            return write_all(line, dir);
        }
        let mut text = Vec::new();
        let rendered = Page::new(line).render(&mut text);
        rendered.map_err(|source| Error::io("making the manual page", source))?;
        context.output.text(&String::from_utf8_lossy(&text))
    }
}

fn write_all(line: Command, dir: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(dir).map_err(|source| Error::file("create", dir, source))?;
    clap_mangen::generate_to(line, dir)
        .map_err(|source| Error::file("write manual pages to", dir, source))
}

const INTRODUCTION: &str = "# Command line

What `blockd --help` and the help of each verb say. This page is made by `blockd man --markdown`; a
test holds it to that. The global options are those of `blockd` itself, and every verb takes them.
";

/// `docs/CLI.md`: the help of everything, as a terminal shows it.
#[must_use]
fn markdown(line: Command) -> String {
    let mut text = INTRODUCTION.to_owned();
    let mut command = line.disable_help_subcommand(true).term_width(96);
    command.build();
    section(&mut command, 0, &mut text);
    text
}

fn section(command: &mut Command, depth: usize, text: &mut String) {
    let name = command.get_bin_name().unwrap_or("blockd").to_owned();
    let heading = if depth < 2 { "##" } else { "###" };
    let help = command.render_long_help().to_string();
    let lines: Vec<&str> = help.lines().map(str::trim_end).collect();
    text.push_str(&format!(
        "\n{heading} {name}\n\n```text\n{}\n```\n",
        lines.join("\n").trim_end()
    ));
    for sub in command.get_subcommands_mut() {
        let quiet = |argument: clap::Arg| {
            let hide = argument.is_global_set() || argument.get_id() == "help";
            argument.hide(hide)
        };
        let mut sub = sub.clone().mut_args(quiet).term_width(96);
        section(&mut sub, depth + 1, text);
    }
}
