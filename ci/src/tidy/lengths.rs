//! How long files and lines may be.

use super::Problem;
use super::source;
use super::tree::Tree;

/// A file beyond this is an error: it holds more than one thing.
const FILE_LIMIT: usize = 800;

/// A file beyond this is listed, so that it is split before it has to be.
const FILE_WARNING: usize = 500;

/// The same as `max_width` of rustfmt, which silently skips lines that it cannot break.
const LINE_LIMIT: usize = 100;

/// Characters of a line in a document, so that it is read without scrolling.
const DOCUMENT_LINE_LIMIT: usize = 160;

/// A generated document with a line for each message.
const MESSAGES: &str = "docs/MESSAGES.md";

/// Files that are too long, and lines that are.
pub(super) fn check(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (path, text) in tree.texts("rs") {
        let count = text.lines().count();
        if count > FILE_LIMIT {
            let text = format!("{count} lines, {FILE_LIMIT} allowed");
            problems.push(Problem::new(path, 0, text));
        }
        let split = source::lines(text);
        for (index, line) in text.lines().enumerate() {
            let width = line.chars().count();
            if width > LINE_LIMIT && !split.get(index).is_some_and(|split| unbreakable(line, split))
            {
                let text = format!("{width} characters, {LINE_LIMIT} allowed");
                problems.push(Problem::new(path, index + 1, text));
            }
        }
    }
    for (path, text) in tree.texts("md").filter(|(path, _)| *path != MESSAGES) {
        for (index, line) in text.lines().enumerate() {
            let width = line.chars().count();
            // A row of a table has to be one line.
            if width > DOCUMENT_LINE_LIMIT && !line.trim_start().starts_with('|') {
                let text = format!("{width} characters, {DOCUMENT_LINE_LIMIT} allowed");
                problems.push(Problem::new(path, index + 1, text));
            }
        }
    }
    problems
}

/// Files that will soon be too long.
pub(super) fn long_files(tree: &Tree) -> Vec<Problem> {
    let long = |(path, text): (&str, &str)| {
        let count = text.lines().count();
        (FILE_WARNING + 1..=FILE_LIMIT)
            .contains(&count)
            .then(|| Problem::new(path, 0, format!("{count} lines, time to split it")))
    };
    tree.texts("rs").filter_map(long).collect()
}

/// Addresses, lines of a table in documentation, and lines that only a string literal makes long.
fn unbreakable(line: &str, split: &source::Line) -> bool {
    let in_table =
        split.is_doc() && split.comment.trim_start_matches(['/', '!', ' ']).starts_with('|');
    let without_text = split.code.chars().count() + split.comment.chars().count();
    line.contains("://") || in_table || without_text <= LINE_LIMIT
}

#[cfg(test)]
mod tests {
    use super::super::tree::testing::tree;
    use super::*;

    fn problems(text: &str) -> Vec<Problem> {
        check(&tree(&[("a/src/lib.rs", text)]))
    }

    #[test]
    fn a_long_file_is_found() {
        assert_eq!(problems(&"//\n".repeat(801))[0].text, "801 lines, 800 allowed");
        assert!(problems(&"//\n".repeat(800)).is_empty());
    }

    #[test]
    fn a_file_that_grows_is_listed() {
        let grown = tree(&[("a/src/lib.rs", "//\n".repeat(501).as_str())]);
        assert_eq!(long_files(&grown).len(), 1);
        assert!(check(&grown).is_empty());
    }

    #[test]
    fn a_long_line_is_found() {
        let line = format!("fn f() {{}} // {}", "x".repeat(100));
        assert_eq!(problems(&format!("\n{line}\n"))[0].line, 2);
    }

    #[test]
    fn a_long_line_of_a_document_is_found() {
        let long = "x".repeat(161);
        let document = |text: &str| check(&tree(&[("docs/A.md", text)]));
        assert_eq!(document(&format!("# A\n\n{long}\n"))[0].line, 3);
        assert!(document(&format!("| {long} |\n")).is_empty());
        assert!(check(&tree(&[("docs/MESSAGES.md", &long)])).is_empty());
    }

    #[test]
    fn unbreakable_lines_may_be_long() {
        let long = "x".repeat(100);
        assert!(problems(&format!("let a = \"{long}\";")).is_empty());
        assert!(problems(&format!("// https://example.org/{long}")).is_empty());
        assert!(problems(&format!("/// | {long} | b |")).is_empty());
    }
}
