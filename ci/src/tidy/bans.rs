//! Words that must not stand in sources or documents.

use super::Problem;
use super::source::{self, Line, has_word};
use super::tree::Tree;

/// Unfinished or left-over code. Written in pieces, or this file would break its own rule.
const IN_CODE: [(&str, &str); 4] = [
    (concat!("to", "do!("), "finish it"),
    (concat!("unimpl", "emented!("), "finish it"),
    (concat!("db", "g!("), "a left-over of debugging"),
    (concat!("#[ign", "ore"), "a test runs or does not exist"),
];

/// Notes to oneself, in comments and documents.
const IN_PROSE: [(&str, &str); 2] = [
    (concat!("FIX", "ME"), "mend it or say why it is so"),
    (concat!("XX", "X"), "say what is meant"),
];

/// Words that `docs/GLOSSARY.md` replaces, in the mapper's documentation.
const IN_MAPPER_DOCS: [(&str, &str); 6] = [
    ("chunk", "say extent"),
    ("chunks", "say extents"),
    ("cluster", "say extent"),
    ("clusters", "say extents"),
    ("LUN", "say volume"),
    ("LUNs", "say volumes"),
];

/// Where sizes pass through, from a request to a volume: as bytes, never in other units.
const SIZE_PATH: [&str; 5] = [
    "csi/src/",
    "csi/base/src/",
    "csi/extender/src/",
    "csi/kata/src/",
    "blockd/control/src/services/",
];

/// Sizes in gibibytes, and back.
const UNITS: [&str; 2] = [concat!("<", "< 30"), concat!(">", "> 30")];

/// Paths that exist on a single machine only.
const MACHINE_PATHS: [&str; 3] =
    [concat!("/wo", "rk/"), concat!("/ho", "me/"), concat!("/ro", "ot/")];

/// Left by a merge at the beginning of a line where it needs an answer.
const MERGE_MARKS: [&str; 2] = [concat!("<<<", "<<<< "), concat!(">>>", ">>>> ")];

/// Every banned word.
pub(super) fn check(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (path, text) in tree.texts("rs") {
        problems.extend(check_rust(path, text));
    }
    for (path, text) in tree.texts("md") {
        for (index, line) in prose(text) {
            let words = IN_PROSE.into_iter().filter(|(word, _)| has_word(&line, word));
            problems.extend(words.map(|(word, why)| banned(path, index + 1, word, why)));
        }
    }
    for file in &tree.files {
        let text = file.text.as_deref().unwrap_or_default();
        for (index, line) in text.lines().enumerate() {
            for machine_path in MACHINE_PATHS {
                if has_path(line, machine_path) {
                    let why = "a path of one machine";
                    problems.push(banned(&file.path, index + 1, machine_path, why));
                }
            }
            for mark in MERGE_MARKS.into_iter().filter(|mark| line.starts_with(mark)) {
                problems.push(banned(&file.path, index + 1, mark, "a merge left it"));
            }
        }
    }
    problems
}

fn check_rust(path: &str, text: &str) -> Vec<Problem> {
    let mut problems = Vec::new();
    let lines = source::lines(text);
    let tests_start = if is_test_file(path) { 0 } else { source::tests_start(&lines) };
    for (index, line) in lines.iter().enumerate() {
        let mut ban = |word, why| problems.push(banned(path, index + 1, word, why));
        for (word, why) in IN_CODE {
            if line.code.contains(word) {
                ban(word, why);
            }
        }
        for (word, why) in IN_PROSE {
            if has_word(&line.comment, word) {
                ban(word, why);
            }
        }
        if path.starts_with("mapper/src/") && line.is_doc() {
            for (word, why) in IN_MAPPER_DOCS {
                if has_word(&without_code(&line.comment), word) {
                    ban(word, why);
                }
            }
        }
        if index < tests_start && SIZE_PATH.iter().any(|folder| path.starts_with(folder)) {
            for word in UNITS.into_iter().filter(|word| line.code.contains(word)) {
                ban(word, "sizes are bytes from end to end");
            }
        }
        if excepts_without_reason(&lines[index..]) {
            ban("#[allow", "an exception from a lint gives its reason");
        }
        if index < tests_start && line.code.contains("use super::*") {
            ban("use super::*", "outside tests, name what you import");
        }
    }
    problems
}

fn banned(path: &str, line: usize, word: &str, why: &str) -> Problem {
    Problem::new(path, line, format!("`{word}`: {why}"))
}

/// Whether an attribute that begins on the first of these lines silences a lint without saying why.
fn excepts_without_reason(lines: &[Line]) -> bool {
    let first = lines[0].code.trim();
    let starts = ["#[allow(", "#![allow(", "#[expect(", "#![expect("];
    if !starts.iter().any(|start| first.starts_with(start)) {
        return false;
    }
    for line in lines {
        if line.code.contains("reason =") {
            return false;
        }
        if line.code.contains(']') {
            break;
        }
    }
    true
}

/// Files that hold nothing but tests.
fn is_test_file(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    path.starts_with("tests/")
        || path.starts_with("sim/")
        || path.contains("/tests/")
        || name.ends_with("tests.rs")
        || name.starts_with("loom_")
}

/// Lines of a document that are neither in a fenced block nor, in part, between backticks.
pub(super) fn prose(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut fenced = false;
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            found.push((index, without_code(line)));
        }
    }
    found
}

/// The line without what stands between backticks.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("``")
}

/// Whether a path that begins with `start` stands in the line. A folder of that name further down
/// in a path is another one.
fn has_path(line: &str, start: &str) -> bool {
    line.match_indices(start)
        .any(|(at, _)| !line[..at].ends_with(|c: char| c.is_alphanumeric() || "._-}*".contains(c)))
}

#[cfg(test)]
mod tests {
    use super::super::tree::testing::tree;
    use super::*;

    fn problems(path: &str, text: &str) -> usize {
        check(&tree(&[(path, text)])).len()
    }

    #[test]
    fn every_word_banned_in_code_is_found() {
        for (word, _) in IN_CODE {
            assert_eq!(problems("a/src/lib.rs", &format!("fn f() {{ {word} }}")), 1, "{word}");
            assert_eq!(problems("a/src/lib.rs", &format!("let a = \"{word}\";")), 0, "{word}");
        }
    }

    /// Row T4.
    #[test]
    fn no_size_passes_through_gibibytes() {
        for word in UNITS {
            let text = format!("fn f(x: u64) -> u64 {{ x {word} }}");
            assert_eq!(problems("csi/src/sizes.rs", &text), 1, "{word}");
            assert_eq!(problems("blockd/control/src/services/volumes.rs", &text), 1, "{word}");
            assert_eq!(problems("blockd/cli/src/tune.rs", &text), 0, "{word}");
        }
    }

    #[test]
    fn every_word_banned_in_prose_is_found() {
        for (word, _) in IN_PROSE {
            assert_eq!(problems("a/src/lib.rs", &format!("// {word} later")), 1, "{word}");
            assert_eq!(problems("docs/A.md", &format!("{word}: later")), 1, "{word}");
            assert_eq!(problems("docs/A.md", &format!("the word `{word}`")), 0, "{word}");
        }
    }

    #[test]
    fn words_of_the_glossary_bind_the_mapper() {
        assert_eq!(problems("mapper/src/leaf.rs", "/// One chunk."), 1);
        assert_eq!(problems("mapper/src/leaf.rs", "// by `chunks`\n/// See `chunk`."), 0);
        assert_eq!(problems("bench/src/lib.rs", "/// One chunk."), 0);
    }

    #[test]
    fn machine_paths_are_found_in_every_kind_of_file() {
        for start in MACHINE_PATHS {
            assert_eq!(problems("a.py", &format!("open('{start}x')")), 1, "{start}");
            assert_eq!(problems("docs/A.md", &format!("see `{start}x`")), 1, "{start}");
            assert_eq!(problems("a/src/lib.rs", &format!("let a = \"docs{start}x\";")), 0);
        }
    }

    #[test]
    fn what_a_merge_left_is_found_in_every_kind_of_file() {
        for mark in MERGE_MARKS {
            assert_eq!(problems("docs/A.md", &format!("one\n{mark}main\ntwo")), 1, "{mark}");
            assert_eq!(problems("a.toml", &format!("{mark}main")), 1, "{mark}");
        }
    }

    #[test]
    fn an_exception_gives_its_reason() {
        assert_eq!(problems("a/src/lib.rs", "#[allow(dead_code)]\nfn f() {}"), 1);
        assert_eq!(problems("a/src/lib.rs", "#[expect(x, reason = \"y\")]\nfn f() {}"), 0);
        assert_eq!(problems("a/src/lib.rs", "#![expect(\n  x,\n  reason = \"y\"\n)]"), 0);
        assert_eq!(problems("a/src/lib.rs", "#[expect(\n  x\n)]\nlet reason = 1;"), 1);
    }

    #[test]
    fn a_glob_import_of_the_parent_belongs_in_tests() {
        let tests = "#[cfg(test)]\nmod tests {\n    use super::*;\n}\n";
        assert_eq!(problems("a/src/lib.rs", tests), 0);
        assert_eq!(problems("a/src/b/tests.rs", "use super::*;"), 0);
        assert_eq!(problems("a/src/b.rs", "use super::*;"), 1);
    }
}
