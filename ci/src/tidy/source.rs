//! Separates code, comments and string literals of a Rust file, well enough for lints: no macro is
//! expanded and nothing is parsed.

/// One line of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Line {
    /// The code. String literals are left as two quotes with nothing between.
    pub(super) code: String,
    /// The comment with its slashes.
    pub(super) comment: String,
}

impl Line {
    /// Whether the comment is documentation.
    pub(super) fn is_doc(&self) -> bool {
        ["///", "//!", "/**", "/*!"].iter().any(|mark| self.comment.starts_with(mark))
    }
}

/// The state of the reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Inside {
    Code,
    LineComment,
    BlockComment { depth: usize },
    Text,
    RawText { hashes: usize },
}

struct Reader<'a> {
    rest: &'a str,
    inside: Inside,
    lines: Vec<Line>,
    line: Line,
    /// The character before `rest`, to distinguish `r"` from the end of a name.
    before: char,
}

/// Splits a file into lines.
pub(super) fn lines(text: &str) -> Vec<Line> {
    let mut reader = Reader {
        rest: text,
        inside: Inside::Code,
        lines: Vec::new(),
        line: Line::default(),
        before: '\n',
    };
    while !reader.rest.is_empty() {
        reader.step();
    }
    if reader.line != Line::default() {
        reader.lines.push(reader.line);
    }
    reader.lines
}

/// The line, from 0, at which the module of tests at the end of the file begins; the number of
/// lines when there is none.
pub(super) fn tests_start(lines: &[Line]) -> usize {
    for (index, line) in lines.iter().enumerate() {
        let code = line.code.trim();
        if !code.starts_with("#[cfg(") || !(code.contains("test") || code.contains("loom")) {
            continue;
        }
        let next = lines[index + 1..]
            .iter()
            .map(|line| line.code.trim())
            .find(|code| !code.is_empty() && !code.starts_with("#["));
        if next.is_some_and(|code| code.contains("mod ") && code.ends_with('{')) {
            return index;
        }
    }
    lines.len()
}

/// Whether `word` stands in `text` as a word of its own.
pub(super) fn has_word(text: &str, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word)
        .any(|(at, _)| !text[..at].ends_with(part) && !text[at + word.len()..].starts_with(part))
}

impl Reader<'_> {
    /// Consumes at least one character.
    fn step(&mut self) {
        if self.rest.starts_with('\n') {
            self.end_line();
            return;
        }
        match self.inside {
            Inside::Code => self.code(),
            Inside::LineComment => self.keep_comment(1),
            Inside::BlockComment { depth } => self.block_comment(depth),
            Inside::Text => self.string_literal(),
            Inside::RawText { hashes } => self.raw_literal(hashes),
        }
    }

    fn end_line(&mut self) {
        if self.inside == Inside::LineComment {
            self.inside = Inside::Code;
        }
        self.lines.push(std::mem::take(&mut self.line));
        self.skip(1);
    }

    fn code(&mut self) {
        if self.rest.starts_with("//") {
            self.inside = Inside::LineComment;
            self.keep_comment(2);
        } else if self.rest.starts_with("/*") {
            self.inside = Inside::BlockComment { depth: 1 };
            self.keep_comment(2);
        } else if self.rest.starts_with('"') {
            self.inside = Inside::Text;
            self.keep_code(1);
        } else if let Some((skip, hashes)) = self.raw_start() {
            self.skip(skip);
            self.line.code.push('"');
            self.inside = Inside::RawText { hashes };
        } else if let Some(length) = self.char_literal() {
            self.skip(length);
            self.line.code.push_str("' '");
        } else {
            self.keep_code(1);
        }
    }

    /// `r"`, `r#"`, `br"`: how many characters, and how many hashes.
    fn raw_start(&self) -> Option<(usize, usize)> {
        if self.before.is_alphanumeric() || self.before == '_' {
            return None;
        }
        let prefix = ["br", "cr", "r"].into_iter().find(|p| self.rest.starts_with(p))?;
        let after = &self.rest[prefix.len()..];
        let hashes = after.len() - after.trim_start_matches('#').len();
        after[hashes..].starts_with('"').then_some((prefix.len() + hashes + 1, hashes))
    }

    /// The length of a character literal; `None` for a lifetime and anything else.
    fn char_literal(&self) -> Option<usize> {
        let mut chars = self.rest.strip_prefix('\'')?.chars();
        if chars.next()? == '\\' {
            let end = self.rest.char_indices().skip(3).find(|&(_, c)| c == '\'')?.0;
            return Some(self.rest[..=end].chars().count());
        }
        (chars.next()? == '\'').then_some(3)
    }

    fn block_comment(&mut self, depth: usize) {
        if self.rest.starts_with("/*") {
            self.inside = Inside::BlockComment { depth: depth + 1 };
            self.keep_comment(2);
        } else if self.rest.starts_with("*/") {
            self.inside =
                if depth == 1 { Inside::Code } else { Inside::BlockComment { depth: depth - 1 } };
            self.keep_comment(2);
        } else {
            self.keep_comment(1);
        }
    }

    fn string_literal(&mut self) {
        if self.rest.starts_with("\\\n") {
            self.skip(1);
        } else if self.rest.starts_with('\\') {
            self.skip(2);
        } else if self.rest.starts_with('"') {
            self.inside = Inside::Code;
            self.keep_code(1);
        } else {
            self.skip(1);
        }
    }

    fn raw_literal(&mut self, hashes: usize) {
        let end = format!("\"{}", "#".repeat(hashes));
        if self.rest.starts_with(&end) {
            self.inside = Inside::Code;
            self.line.code.push('"');
            self.skip(end.len());
        } else {
            self.skip(1);
        }
    }

    fn keep_code(&mut self, characters: usize) {
        let taken = self.skip(characters);
        self.line.code.push_str(&taken);
    }

    fn keep_comment(&mut self, characters: usize) {
        let taken = self.skip(characters);
        self.line.comment.push_str(&taken);
    }

    fn skip(&mut self, characters: usize) -> String {
        let taken: String = self.rest.chars().take(characters).collect();
        self.rest = &self.rest[taken.len()..];
        self.before = taken.chars().last().unwrap_or(self.before);
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> Vec<String> {
        lines(text).into_iter().map(|line| line.code).collect()
    }

    #[test]
    fn comments_and_strings_are_not_code() {
        let found = lines("let a = \"unsafe // no\"; // why\n/* x /* y */ z */ b\n");
        assert_eq!(found[0].code, "let a = \"\"; ");
        assert_eq!(found[0].comment, "// why");
        assert_eq!(found[1].code, " b");
    }

    #[test]
    fn strings_go_over_lines_and_end_where_they_should() {
        assert_eq!(code("a(\"x\\\n  y\\\"z\") + 1"), ["a(\"", "\") + 1"]);
        assert_eq!(code("r#\"a\"b\nc\"# + d"), ["\"", "\" + d"]);
        assert_eq!(code("var\"\""), ["var\"\""]);
    }

    #[test]
    fn a_lifetime_is_not_a_character() {
        assert_eq!(code("fn f<'a>(x: &'a str) { '\"'; '\\''; 'x' }").len(), 1);
        assert!(code("fn f<'a>(x: &'a str) { '\"' } // c")[0].contains("&'a str"));
        assert_eq!(code("'\\u{1F600}' + b'\\n'"), ["' ' + b' '"]);
    }

    #[test]
    fn documentation_is_distinguished_from_remarks() {
        let found = lines("/// doc\n// remark\n//! doc\n");
        let doc: Vec<bool> = found.iter().map(Line::is_doc).collect();
        assert_eq!(doc, [true, false, true]);
    }

    #[test]
    fn the_module_of_tests_is_found() {
        let text =
            "fn a() {}\n#[cfg(test)]\nmod tests;\n#[cfg(all(test, not(loom)))]\n#[x]\nmod t {\n}\n";
        assert_eq!(tests_start(&lines(text)), 3);
        assert_eq!(tests_start(&lines("fn a() {}\n")), 1);
    }

    #[test]
    fn a_word_is_not_part_of_another() {
        assert!(has_word("an unsafe block", "unsafe"));
        assert!(!has_word("#![forbid(unsafe_code)]", "unsafe"));
    }
}
