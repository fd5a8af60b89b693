//! Documents as their fenced blocks and the commands in them.

use anyhow::{Result, bail};

/// Hidden commands that a session runs before a block: what a reader of the page has anyway.
const FIRST: &str = "<!-- run first:";
/// The reason why a block is not run.
const NOT_RUN: &str = "<!-- not run:";

/// The kind of content of a fenced block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Language {
    /// Commands, a line each.
    Shell,
    /// Commands after `$ `; other lines are their output.
    Console,
    /// A configuration of the daemon, or a part of one.
    Toml,
    /// Neither commands nor a configuration.
    Other,
}

/// A fenced block of a page.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Block {
    /// Of its first line, from 1.
    pub(super) line: usize,
    pub(super) language: Language,
    pub(super) text: String,
    pub(super) first: String,
    pub(super) not_run: Option<String>,
}

/// A document.
#[derive(Debug)]
pub(super) struct Page {
    /// Relative to the root.
    pub(super) path: String,
    pub(super) blocks: Vec<Block>,
    /// Code in running text, with its line.
    pub(super) spans: Vec<(usize, String)>,
}

impl Page {
    /// Splits a document.
    ///
    /// # Errors
    /// When a block is in an unknown language, or a comment for a block stands before none.
    pub(super) fn read(path: &str, text: &str) -> Result<Self> {
        let mut page = Self { path: path.to_owned(), blocks: Vec::new(), spans: Vec::new() };
        let (mut first, mut not_run) = (String::new(), None);
        let mut lines = text.lines().enumerate();
        while let Some((index, line)) = lines.next() {
            let trimmed = line.trim_start();
            if let Some(name) = trimmed.strip_prefix("```") {
                let indent = line.len() - trimmed.len();
                let language = language(name).ok_or_else(|| {
                    anyhow::anyhow!("{path}:{}: block of unknown language {name}", index + 1)
                })?;
                let inside = lines.by_ref().map(|(_, line)| line);
                let inside = inside.take_while(|line| line.trim_start() != "```");
                let text = inside.map(|line| format!("{}\n", line.get(indent..).unwrap_or("")));
                let (text, line) = (text.collect(), index + 2);
                let (first, not_run) = (std::mem::take(&mut first), not_run.take());
                page.blocks.push(Block { line, language, text, first, not_run });
            } else if let Some(begin) =
                [FIRST, NOT_RUN].into_iter().find(|begin| trimmed.starts_with(begin))
            {
                let mut comment = trimmed[begin.len()..].to_owned();
                while !comment.contains("-->") {
                    let Some((_, line)) = lines.next() else { break };
                    comment.push('\n');
                    comment.push_str(line);
                }
                let comment = comment.split("-->").next().unwrap_or_default().trim().to_owned();
                if begin == FIRST {
                    first = comment;
                } else {
                    not_run = Some(comment);
                }
            } else if !trimmed.is_empty() {
                if !first.is_empty() || not_run.is_some() {
                    bail!("{path}:{}: a comment for a block, and no block behind it", index + 1);
                }
                let spans = line.split('`').skip(1).step_by(2);
                page.spans.extend(spans.map(|span| (index + 1, span.to_owned())));
            }
        }
        Ok(page)
    }
}

fn language(name: &str) -> Option<Language> {
    Some(match name {
        "sh" => Language::Shell,
        "console" => Language::Console,
        "toml" => Language::Toml,
        "" | "text" | "yaml" => Language::Other,
        _ => return None,
    })
}

impl Block {
    /// The commands, each with its line from 1, continued lines joined.
    pub(super) fn commands(&self) -> Vec<(usize, String)> {
        let mut commands: Vec<(usize, String)> = Vec::new();
        let mut continues = false;
        for (index, line) in self.text.lines().enumerate() {
            let command = match self.language {
                Language::Shell => Some(line),
                Language::Console if continues => Some(line),
                Language::Console => line.strip_prefix("$ "),
                Language::Toml | Language::Other => None,
            };
            let Some(command) = command else { continue };
            let part = command.trim_end_matches('\\');
            match commands.last_mut().filter(|_| continues) {
                Some((_, whole)) => whole.push_str(part),
                None => commands.push((self.line + index, part.to_owned())),
            }
            continues = part.len() < command.len();
        }
        commands.retain(|(_, command)| !words(command).is_empty());
        commands
    }
}

/// The words of the simple commands in a line of shell: quotes, comments, pipes and lists are
/// understood, assignments before a command are left out.
pub(super) fn words(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in line.chars() {
        match (quote, c) {
            (Some(end), _) if c == end => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, ' ' | '|' | ';' | '&') => {
                if let (Some(word), Some(command)) = (word.take(), commands.last_mut()) {
                    command.push(word);
                }
                if c != ' ' {
                    commands.push(Vec::new());
                }
            }
            _ => word.get_or_insert_default().push(c),
        }
    }
    if let (Some(word), Some(command)) = (word, commands.last_mut()) {
        command.push(word);
    }
    for command in &mut commands {
        let is_assignment = |word: &String| {
            word.split_once('=')
                .is_some_and(|(name, _)| name.chars().all(|c| c.is_ascii_uppercase()))
        };
        let count = command.iter().take_while(|word| is_assignment(word)).count();
        command.drain(..count);
    }
    commands.retain(|command| !command.is_empty());
    commands
}

#[cfg(test)]
mod tests {
    use super::*;

    fn only(text: &str) -> Block {
        let mut blocks = Page::read("A.md", text).unwrap().blocks;
        assert_eq!(blocks.len(), 1);
        blocks.remove(0)
    }

    #[test]
    fn comments_belong_to_the_next_block() {
        let block = only("<!-- run first:\na\nb -->\n<!-- not run: no disk -->\n\n```sh\nc\n```\n");
        assert_eq!((block.first.as_str(), block.not_run.as_deref()), ("a\nb", Some("no disk")));
        assert_eq!((block.text.as_str(), block.line), ("c\n", 7));
        assert!(Page::read("A.md", "<!-- not run: x -->\ntext\n").is_err());
    }

    #[test]
    fn an_unknown_language_is_an_error() {
        assert!(Page::read("A.md", "```bash\nls\n```\n").is_err());
    }

    #[test]
    fn output_in_a_console_is_no_command() {
        let block = only("```console\n$ one \\\n  two\noutput\n$ three\n```\n");
        let expected = [(2, "one   two".to_owned()), (5, "three".to_owned())];
        assert_eq!(block.commands(), expected);
    }

    #[test]
    fn spans_are_those_outside_of_blocks() {
        let page = Page::read("A.md", "see `a b`, `c`\n```\n`d`\n```\n").unwrap();
        assert_eq!(page.spans, [(1, "a b".to_owned()), (1, "c".to_owned())]);
    }

    #[test]
    fn a_line_is_split_like_a_shell_splits_it() {
        let line = "A=1 blockd export 'a b' - | cmp - \"x\"# && no # comment";
        let expected =
            vec![vec!["blockd", "export", "a b", "-"], vec!["cmp", "-", "x#"], vec!["no"]];
        assert_eq!(words(line), expected);
        assert!(words("  # nothing").is_empty());
    }
}
