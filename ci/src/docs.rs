//! `cargo ci docs`: the documents as a reader uses them. Each command in a fenced block is run
//! against a real daemon, or a comment in the document (`<!-- not run: REASON -->`) or a table here
//! says why it is not. The verbs and flags of all commands exist, in running text as well, and the
//! documents are the pages of a book.

mod drawing;
mod page;
pub(crate) mod session;
mod words;

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::steps::Outcome;
use crate::{command, setup};
use blockd_testkit::clock::Clock;
use page::Page;
use words::Known;

/// Documents in the root with commands; all of `docs` is read beside them.
const IN_ROOT: [&str; 2] = ["README.md", "CONTRIBUTING.md"];

/// Pages made of the output of programs; tests hold them to it, and their examples are checked.
const GENERATED: [&str; 3] = ["docs/CLI.md", "docs/CLI_CSI.md", "docs/MESSAGES.md"];

/// The table of contents of the book.
const CONTENTS: &str = "docs/SUMMARY.md";

/// Checks the documents, builds daemon and plugin, and runs all commands that can be run.
///
/// # Errors
/// When something in the documents is wrong, or a command fails.
pub(crate) fn run(root: &Path) -> Result<()> {
    check(root)?;
    setup::ensure(&setup::DOCUMENTS)?;
    let mut cargo = command::cargo(root);
    cargo.args(["build", "--quiet", "--package", "blockd", "--package", "blockd-csi"]);
    command::run(&mut cargo)?;
    sessions(root, &command::target_dir(root).join("debug")).map(|_| ())
}

/// Writes the documents that are made of other files.
///
/// # Errors
/// When one can't be made or written.
pub(crate) fn write(root: &Path) -> Result<()> {
    for (path, text) in generated(root)? {
        std::fs::write(root.join(path), text).with_context(|| format!("writing {path}"))?;
    }
    Ok(())
}

/// Builds the book below the build folder, if mdBook is installed.
///
/// # Errors
/// When mdBook refuses it.
pub(crate) fn book(root: &Path) -> Result<Outcome> {
    if !command::installed("mdbook") {
        return Ok(Outcome::NotRun("mdbook is not installed: cargo install mdbook"));
    }
    let folder = command::target_dir(root).join("book");
    let mut mdbook = Command::new("mdbook");
    command::run(mdbook.current_dir(root).arg("build").arg("--dest-dir").arg(folder))?;
    Ok(Outcome::Passed)
}

/// Checks everything about the documents for which no program has to run.
///
/// # Errors
/// Lists all problems.
pub(crate) fn check(root: &Path) -> Result<()> {
    let known = Known::read(root)?;
    let pages = pages(root)?;
    let mut problems = Vec::new();
    for (path, text) in generated(root)? {
        if std::fs::read_to_string(root.join(path)).ok().as_deref() != Some(&*text) {
            problems.push(format!("{path} is out of date: `cargo ci docs --write` makes it"));
        }
    }
    let contents = std::fs::read_to_string(root.join(CONTENTS)).context(CONTENTS)?;
    for page in pages.iter().filter(|page| page.path != CONTENTS) {
        let in_book = page.path.strip_prefix("docs/").map(|path| format!("]({path})"));
        if in_book.is_some_and(|link| !contents.contains(&link)) {
            problems.push(format!("{} is not in {CONTENTS}", page.path));
        }
    }
    let mut count = 0;
    for page in &pages {
        for (line, text) in commands(page) {
            for words in page::words(&text) {
                count += 1;
                let problem = known.problem(&words);
                problems.extend(problem.map(|text| format!("{}:{line}: {text}", page.path)));
            }
        }
    }
    if !problems.is_empty() {
        bail!("{}", problems.join("\n"));
    }
    println!("docs: {} pages, {count} commands", pages.len());
    Ok(())
}

/// Runs the commands of all pages with the programs in a folder.
///
/// # Errors
/// Lists every page on which a command failed.
pub(crate) fn sessions(root: &Path, programs: &Path) -> Result<Outcome> {
    let programs = programs.canonicalize().context("no programs")?;
    let mut failed = Vec::new();
    for page in pages(root)? {
        let watch = Clock::start();
        match session::run(root, &programs, &page) {
            Ok(0) => {}
            Ok(count) => {
                let seconds = watch.elapsed().as_secs_f64();
                println!("docs: {}: {count} commands run, {seconds:.1} s", page.path);
            }
            Err(error) => failed.push(format!("{error:#}")),
        }
    }
    if !failed.is_empty() {
        bail!("{}", failed.join("\n"));
    }
    Ok(Outcome::Passed)
}

/// The commands of a page: those of its blocks, those of ours in running text, and examples of
/// generated pages.
fn commands(page: &Page) -> Vec<(usize, String)> {
    let mut commands: Vec<_> = page.blocks.iter().flat_map(page::Block::commands).collect();
    if GENERATED.contains(&page.path.as_str()) {
        for block in &page.blocks {
            let examples = block.text.lines().enumerate();
            let examples = examples.filter(|(_, line)| line.starts_with("  blockd "));
            commands.extend(examples.map(|(index, line)| (block.line + index, line.to_owned())));
        }
    } else {
        let plain = |span: &str| span.replace(['[', ']', '\\'], "");
        let spans = page.spans.iter().map(|(line, span)| (*line, plain(span)));
        let ours =
            |span: &str| page::words(span).first().is_some_and(|words| Known::is_ours(words));
        commands.extend(spans.filter(|(_, span)| ours(span)));
    }
    commands
}

/// Documents that are made of other files, and their text.
fn generated(root: &Path) -> Result<[(&'static str, String); 2]> {
    let read =
        |path: &str| std::fs::read_to_string(root.join(path)).with_context(|| path.to_owned());
    let drawing = drawing::draw(&read("docs/overview.txt")?).context("docs/overview.txt")?;
    let configuration = read("deploy/blockd.toml")?;
    let page = format!(
        "# Configuration\n\nThe file `deploy/blockd.toml`, which has every key with its default and a \
         comment; `cargo ci docs --write` makes this\npage of it. [KUBERNETES.md](KUBERNETES.md#classes) \
         has the configuration of the CSI plugin.\n\n```toml\n{configuration}```\n"
    );
    Ok([("docs/overview.svg", drawing), ("docs/CONFIG.md", page)])
}

/// All documents, in the order of their paths.
fn pages(root: &Path) -> Result<Vec<Page>> {
    let mut paths: Vec<String> = IN_ROOT.map(str::to_owned).to_vec();
    for folder in ["docs", "docs/decisions"] {
        for entry in std::fs::read_dir(root.join(folder)).with_context(|| folder.to_owned())? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            paths.extend(name.ends_with(".md").then(|| format!("{folder}/{name}")));
        }
    }
    paths.sort();
    let read = |path: &String| {
        let text = std::fs::read_to_string(root.join(path)).with_context(|| path.clone())?;
        Page::read(path, &text)
    };
    paths.iter().map(read).collect()
}
