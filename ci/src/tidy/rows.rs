//! Tests name the rows of `docs/REQUIREMENTS.md` that they show in a line of documentation,
//! `/// Row: T21.` or `/// Rows: P3, P52.`, and never in the name of a function.

use super::Problem;
use super::source;
use super::tree::Tree;

const DOCUMENT: &str = "docs/REQUIREMENTS.md";

/// The first letters of the rows' names.
const LETTERS: &str = "twxphu";

/// Checks every Rust file.
pub(super) fn check(tree: &Tree) -> Vec<Problem> {
    let document = tree.texts("md").find(|(path, _)| *path == DOCUMENT);
    let rows: Vec<&str> = document.map(|(_, text)| rows(text)).unwrap_or_default();
    let files = tree.texts("rs");
    files.flat_map(|(path, text)| check_file(path, text, &rows)).collect()
}

/// The names of the document's rows.
fn rows<'a>(text: &'a str) -> Vec<&'a str> {
    let name = |line: &'a str| Some(line.strip_prefix("| ")?.split_once(" |")?.0);
    text.lines().filter_map(name).collect()
}

fn check_file(path: &str, text: &str, rows: &[&str]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (index, line) in source::lines(text).iter().enumerate() {
        let name = line.code.split_once("fn ").map(|(_, rest)| rest);
        if name.is_some_and(begins_with_row) {
            let why = "name the row in a doc comment (`/// Row: T21.`), not in the function's name";
            problems.push(Problem::new(path, index + 1, why));
        }
        let Some(named) = named(&line.comment) else { continue };
        for row in named.split(", ").filter(|row| !rows.contains(row)) {
            problems.push(Problem::new(path, index + 1, format!("no row {row} in {DOCUMENT}")));
        }
    }
    problems
}

/// The rows that a comment names.
fn named(comment: &str) -> Option<&str> {
    let text = comment.strip_prefix("/// Row")?;
    text.strip_prefix(": ").or_else(|| text.strip_prefix("s: "))?.strip_suffix('.')
}

/// Whether a function's name begins like `t21_`.
fn begins_with_row(name: &str) -> bool {
    let Some((first, _)) = name.split_once('_') else { return false };
    let mut letters = first.chars();
    let letter = letters.next().is_some_and(|letter| LETTERS.contains(letter));
    let digits = letters.as_str();
    // `u16_at` reads an integer.
    let is_integer = matches!(first, "u8" | "u16" | "u32" | "u64");
    letter && !is_integer && !digits.is_empty() && digits.chars().all(|one| one.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_in_a_function_name_is_found() {
        let text = "fn t21_pools_have_tags() {}\nfn pools_have_tags() {}\nfn u16_at() {}\n";
        let found = check_file("a.rs", text, &[]);
        assert_eq!(found.iter().map(|one| one.line).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn each_named_row_is_in_the_document() {
        let rows = rows("| row | shown by |\n|---|---|\n| T21 | a |\n| P3 | b |\n");
        assert_eq!(rows, ["row", "T21", "P3"]);
        let text = "/// Row: T21.\nfn a() {}\n/// Rows: P3, P4.\nfn b() {}\n";
        let found = check_file("a.rs", text, &rows);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].line, found[0].text.contains("no row P4")), (3, true));
    }
}
