//! `cargo ci tidy`: the rules of `docs/STYLE.md` that a program can check.
//!
//! Each rule is a function from sources to problems, with a test that shows it a bad example.

mod bans;
mod layering;
mod lengths;
mod links;
mod metadata;
mod modules;
mod repository;
mod rows;
mod source;
mod tree;
mod unsafe_code;
mod vocabulary;

use std::path::Path;

use anyhow::{Result, bail};

pub(crate) use links::has_heading;
use metadata::Metadata;
use tree::Tree;

/// A violation of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Problem {
    /// Relative to the workspace root.
    path: String,
    /// From 1; 0 speaks of the whole file.
    line: usize,
    text: String,
}

impl Problem {
    fn new(path: &str, line: usize, text: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, text: text.into() }
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.line {
            0 => write!(out, "{}: {}", self.path, self.text),
            line => write!(out, "{}:{line}: {}", self.path, self.text),
        }
    }
}

/// Checks the whole workspace.
///
/// # Errors
/// Lists every problem found.
pub(crate) fn run(root: &Path) -> Result<()> {
    let tree = Tree::read(root)?;
    let metadata = Metadata::read(root)?;
    for warning in lengths::long_files(&tree) {
        println!("tidy: warning: {warning}");
    }
    let problems = problems(&tree, &metadata);
    if !problems.is_empty() {
        let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
        bail!("{}\n{} problem(s)", lines.join("\n"), lines.len());
    }
    println!("tidy: {} files", tree.files.len());
    Ok(())
}

fn problems(tree: &Tree, metadata: &Metadata) -> Vec<Problem> {
    [
        layering::check(metadata),
        modules::check(tree, metadata),
        lengths::check(tree),
        bans::check(tree),
        unsafe_code::check(tree),
        unsafe_code::check_roots(tree, metadata),
        links::check(tree),
        repository::check(tree),
        rows::check(tree),
        vocabulary::check(tree),
    ]
    .concat()
}
