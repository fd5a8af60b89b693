//! Plain English: words that `docs/STYLE.md` rules out, and doc comments that begin with a bare
//! pronoun.

use super::Problem;
use super::source::{self, Line};
use super::tree::Tree;

/// Words for people, used for programs. Written in pieces, or this file would break its own rule.
const WORDS: [&str; 9] = [
    concat!("no", "body"),
    concat!("no", "bodys"),
    concat!("some", "body"),
    concat!("any", "body"),
    concat!("every", "body"),
    concat!("who", "ever"),
    concat!("to", "ld"),
    concat!("te", "ll"),
    concat!("te", "lls"),
];

/// Two words in a row that name a number without naming it.
const PAIR: [&str; 2] = [concat!("s", "o"), concat!("ma", "ny")];

/// Pronouns that begin no doc comment, whatever follows.
const PRONOUNS: [&str; 10] = [
    "What",
    "Who",
    "Whose",
    concat!("Who", "ever"),
    "That",
    "It",
    "Those",
    "These",
    "They",
    "Them",
];

/// Verbs after which `This` is a bare pronoun, too.
const VERBS: [&str; 16] = [
    "is", "was", "has", "had", "does", "did", "can", "cannot", "may", "must", "will", "would",
    "makes", "takes", "holds", "keeps",
];

/// Kinds of files with prose, beside documents.
const KINDS: [&str; 6] = ["rs", "proto", "py", "toml", "yaml", "yml"];

/// Lines that may have such a word: the text in them, and the reason.
const EXCEPTIONS: [(&str, &str); 1] = [
    // The name of a user, which the extender's image has to define.
    ("ci/src/image.rs", concat!("no", "body:x:65534")),
];

/// Every banned word and bare pronoun.
pub(super) fn check(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (path, text) in texts(tree) {
        for (line, word) in words(path, text) {
            let text = format!("`{word}`: name the subject, and use the field's words");
            problems.push(Problem::new(path, line, text));
        }
        for (line, pronoun) in pronouns(path, text) {
            let text = format!("a doc comment begins with `{pronoun}`: say what the item is");
            problems.push(Problem::new(path, line, text));
        }
    }
    problems
}

fn texts(tree: &Tree) -> impl Iterator<Item = (&str, &str)> {
    KINDS.into_iter().chain(["md"]).flat_map(|kind| tree.texts(kind))
}

/// The lines with banned words, from 1, and the words.
fn words(path: &str, text: &str) -> Vec<(usize, String)> {
    let lines: Vec<(usize, String)> = if path.ends_with(".md") {
        super::bans::prose(text)
    } else {
        text.lines().map(str::to_owned).enumerate().collect()
    };
    let mut found = Vec::new();
    for (index, line) in lines {
        let is_allowed = |(of, part): &(&str, &str)| *of == path && line.contains(part);
        if EXCEPTIONS.iter().any(is_allowed) {
            continue;
        }
        let parts = parts(&line);
        let single = parts.iter().filter(|part| WORDS.contains(&part.as_str()));
        found.extend(single.map(|part| (index + 1, part.clone())));
        let pairs = parts.windows(2).filter(|pair| *pair == PAIR);
        found.extend(pairs.map(|pair| (index + 1, pair.join(" "))));
    }
    found
}

/// The words of a line in lower case. Names in code are split at underscores and capitals.
fn parts(line: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut before = ' ';
    for c in line.chars() {
        if !c.is_alphabetic() || (c.is_uppercase() && before.is_lowercase()) {
            parts.push(String::new());
        }
        if let Some(part) = parts.last_mut().filter(|_| c.is_alphabetic()) {
            part.extend(c.to_lowercase());
        }
        before = c;
    }
    parts.retain(|part| !part.is_empty());
    parts
}

/// The lines, from 1, on which a paragraph of a doc comment begins with a bare pronoun.
fn pronouns(path: &str, text: &str) -> Vec<(usize, &'static str)> {
    if !path.ends_with(".rs") {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut in_paragraph = false;
    for (index, line) in source::lines(text).iter().enumerate() {
        let Some(text) = documentation(line) else {
            in_paragraph = false;
            continue;
        };
        if let Some(pronoun) = bare(text).filter(|_| !in_paragraph) {
            found.push((index + 1, pronoun));
        }
        in_paragraph = !text.is_empty() && !text.starts_with('#');
    }
    found
}

/// The text of a line of documentation, without its slashes.
fn documentation(line: &Line) -> Option<&str> {
    ["///", "//!"].into_iter().find_map(|mark| line.comment.strip_prefix(mark)).map(str::trim)
}

/// The bare pronoun with which a text begins.
fn bare(text: &str) -> Option<&'static str> {
    let mut words = text.split_whitespace();
    let (first, second) = (words.next()?, words.next()?);
    if first == "This" && VERBS.contains(&second) {
        return Some("This");
    }
    PRONOUNS.into_iter().find(|pronoun| *pronoun == first)
}

#[cfg(test)]
mod tests {
    use super::super::tree::testing::tree;
    use super::*;

    fn problems(path: &str, text: &str) -> Vec<Problem> {
        check(&tree(&[(path, text)]))
    }

    #[test]
    fn every_word_is_found_in_prose_and_in_names() {
        for word in WORDS {
            assert_eq!(problems("a/src/lib.rs", &format!("// x {word} y")).len(), 1, "{word}");
            assert_eq!(problems("a/src/lib.rs", &format!("fn is_{word}_x()")).len(), 1, "{word}");
            assert_eq!(problems("a/src/lib.rs", &format!("\"{word}\"")).len(), 1, "{word}");
            assert_eq!(problems("a.yml", &format!("# {word}")).len(), 1, "{word}");
            assert_eq!(problems("a.md", &format!("A {word}.")).len(), 1, "{word}");
            assert_eq!(problems("a.md", &format!("A `{word}`.")).len(), 0, "{word}");
            assert_eq!(problems("a/src/lib.rs", &format!("// un{word}ed")).len(), 0, "{word}");
        }
        let [first, second] = PAIR;
        assert_eq!(problems("a/src/lib.rs", &format!("// {first} {second} bytes")).len(), 1);
        assert_eq!(problems("a/src/lib.rs", &format!("fn {first}_{second}()")).len(), 1);
        assert_eq!(problems("a/src/lib.rs", &format!("// {second} {first}")).len(), 0);
    }

    #[test]
    fn capitals_in_names_begin_words() {
        assert_eq!(
            parts("struct OneTwo_three4 { aB: C }"),
            ["struct", "one", "two", "three", "a", "b", "c"]
        );
    }

    #[test]
    fn a_problem_names_its_line() {
        let text = format!("fn f() {{}}\n// {}\n/// It is.\nfn g() {{}}\n", WORDS[0]);
        let found = problems("a/src/lib.rs", &text);
        assert_eq!(found.iter().map(|one| one.line).collect::<Vec<_>>(), [2, 3]);
    }

    #[test]
    fn each_pronoun_is_found_where_a_paragraph_begins() {
        for pronoun in PRONOUNS {
            for mark in ["///", "//!"] {
                let text = format!("{mark} {pronoun} waits.");
                assert_eq!(pronouns("a.rs", &text), [(1, pronoun)], "{text}");
            }
            let paragraph = format!("/// The one.\n///\n/// {pronoun} waits.");
            assert_eq!(pronouns("a.rs", &paragraph), [(3, pronoun)]);
            let section = format!("/// # Errors\n/// {pronoun} waits.");
            assert_eq!(pronouns("a.rs", &section), [(2, pronoun)]);
            let inside = format!("/// The one\n/// {pronoun} waits.");
            assert!(pronouns("a.rs", &inside).is_empty());
            assert!(pronouns("a.rs", &format!("// {pronoun} waits.")).is_empty());
            assert!(pronouns("a.rs", &format!("let a = \"/// {pronoun} waits.\";")).is_empty());
            assert!(pronouns("a.md", &format!("/// {pronoun} waits.")).is_empty());
        }
    }

    #[test]
    fn this_is_bare_before_a_verb_only() {
        for verb in VERBS {
            assert_eq!(pronouns("a.rs", &format!("/// This {verb} one.")), [(1, "This")], "{verb}");
        }
        assert!(pronouns("a.rs", "/// This many writes.").is_empty());
        assert!(pronouns("a.rs", "/// Italic text.\n/// Whatever.").is_empty());
    }

    #[test]
    fn an_exception_is_one_line_of_one_file() {
        let (path, part) = EXCEPTIONS[0];
        assert!(problems(path, &format!("let a = \"{part}\";")).is_empty());
        assert_eq!(problems(path, &format!("// {}", WORDS[0])).len(), 1);
        assert_eq!(problems("ci/src/other.rs", part).len(), 1);
    }
}
