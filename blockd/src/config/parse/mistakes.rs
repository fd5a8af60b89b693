//! All mistakes of a file at once. Each one that is found is removed from a copy of the text, whose
//! lines keep their numbers, and the rest is checked again: so one set of rules serves the daemon,
//! which stops at the first mistake, and `blockd config check`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use blockd_media::error::Error;
use blockd_media::place::Places;
use toml::de::{DeTable, DeValue};

use super::super::Config;
use super::{Fault, Source};

/// Mistakes that are reported at once: more help no reader.
const MAX_MISTAKES: usize = 50;

/// Checks of a file. Each removes a part of the text.
const MAX_ATTEMPTS: usize = 4 * MAX_MISTAKES;

/// Checks a file's text. Returns all mistakes, and the configuration without the keys that have
/// them, unless it can't do without.
pub(in super::super) fn mistakes(
    text: &str,
    path: Option<&Path>,
    places: &Places,
) -> (Option<Config>, Vec<Error>) {
    let mut corrected = Corrected { text: text.to_owned(), ..Corrected::default() };
    let mut errors = Vec::new();
    for _ in 0..MAX_ATTEMPTS {
        let text = corrected.text.clone();
        let source = Source::new(&text, path);
        let file = source.read().map(|file| file.completed(places));
        let error = match file.and_then(|file| source.check(&file, places)) {
            Ok(config) => return (Some(config), errors),
            Err(error) => error,
        };
        let fault = source.fault.take();
        if !fault.as_ref().is_some_and(|fault| corrected.explains(fault)) {
            errors.push(error);
        }
        let goes_on = errors.len() < MAX_MISTAKES;
        if !goes_on || !fault.is_some_and(|fault| corrected.remove(&fault)) {
            break;
        }
    }
    (None, errors)
}

/// A text without the mistakes that were found so far.
#[derive(Default)]
struct Corrected {
    text: String,
    /// How often a key was removed: another complaint about it is no other mistake.
    keys: BTreeMap<Vec<String>, u32>,
    /// Pools were renamed or removed.
    has_other_pools: bool,
}

impl Corrected {
    /// Whether a fault may be there only because of another one.
    fn explains(&self, fault: &Fault) -> bool {
        match fault {
            Fault::Key(key) if key == &["default_pool"] => self.has_other_pools,
            Fault::Key(key) => self.keys.contains_key(key),
            Fault::Offset(_) => false,
        }
    }

    /// Removes a fault. False if its place is not known.
    fn remove(&mut self, fault: &Fault) -> bool {
        let next = match fault {
            Fault::Key(key) => self.without_key(key),
            Fault::Offset(at) => without_place(&self.text, *at),
        };
        next.map(|next| self.text = next).is_some()
    }

    fn without_key(&mut self, key: &[String]) -> Option<String> {
        let count = self.keys.entry(key.to_vec()).or_default();
        *count += 1;
        let name = key.last()?.as_str();
        self.has_other_pools |= name == "name";
        if let (Some(range), 1 | 2) = (entry(&self.text, key), *count) {
            // Without these a table has another mistake, which is not in the file.
            let needed = match name {
                "name" => "mistake-",
                "path" | "unix" => "/mistake-",
                _ => "",
            };
            if *count == 1 && !needed.is_empty() {
                let value = format!("{name} = \"{needed}{}\"", self.keys.len());
                let (before, after) = (&self.text[..range.start], &self.text[range.end..]);
                let next = format!("{before}{value}{after}");
                if DeTable::parse(&next).is_ok() {
                    return Some(next);
                }
            }
            return without_range(&self.text, range);
        }
        let (index, tables) = key[..key.len() - 1].split_last()?;
        let (index, tables) = match index.parse() {
            Ok(index) => (index, tables.join(".")),
            Err(_) => (key.get(1)?.parse().ok()?, key.first()?.clone()),
        };
        let range = section(&self.text, &tables, index)?;
        // The places of those behind it are others now.
        self.keys.clear();
        self.has_other_pools = true;
        Some(blanked(&self.text, range))
    }
}

/// The text without the value at a place.
fn without_place(text: &str, at: usize) -> Option<String> {
    if let Ok(table) = DeTable::parse(text) {
        let range = innermost(table.get_ref(), at)?;
        return without_range(text, range);
    }
    // A key that can't be parsed: its line, which is no head of a table.
    let line = whole_lines(text, at..at);
    let is_key = text[line.clone()].contains('=');
    let is_head = text[line.clone()].trim_start().starts_with('[');
    (is_key && !is_head).then(|| blanked(text, line))
}

fn without_range(text: &str, range: Range<usize>) -> Option<String> {
    let lines = whole_lines(text, range.clone());
    if text[lines.clone()].trim_start().starts_with('[') {
        return Some(blanked(text, from_head(text, range.start)));
    }
    // Within an array or a table in braces, a comma would be left over.
    let both = [range, lines].into_iter();
    both.map(|range| blanked(text, range)).find(|next| DeTable::parse(next).is_ok())
}

/// Blanks a range, so that all lines keep their numbers.
fn blanked(text: &str, range: Range<usize>) -> String {
    let blank = |c: char| if c == '\n' { "\n".to_owned() } else { " ".repeat(c.len_utf8()) };
    let blanks: String = text[range.clone()].chars().map(blank).collect();
    format!("{}{blanks}{}", &text[..range.start], &text[range.end..])
}

fn whole_lines(text: &str, range: Range<usize>) -> Range<usize> {
    let start = text[..range.start].rfind('\n').map_or(0, |at| at + 1);
    let end = text[range.end..].find('\n').map_or(text.len(), |at| range.end + at);
    start..end
}

/// A key with its value.
fn entry(text: &str, key: &[String]) -> Option<Range<usize>> {
    let table = DeTable::parse(text).ok()?;
    let mut value = DeValue::Table(table.into_inner());
    let mut range = None;
    for step in key {
        let next = match &value {
            DeValue::Table(table) => {
                let (key, next) = table.get_key_value(step.as_str())?;
                range = Some(key.span().start.min(next.span().start)..next.span().end);
                next
            }
            DeValue::Array(array) => array.get(step.parse::<usize>().ok()?)?,
            _ => return None,
        };
        let next = next.get_ref().clone();
        value = next;
    }
    range
}

/// The smallest entry at a place.
fn innermost(table: &DeTable<'_>, at: usize) -> Option<Range<usize>> {
    let of_value = |value: &DeValue<'_>| match value {
        DeValue::Table(table) => innermost(table, at),
        DeValue::Array(array) => array.iter().find_map(|one| match one.get_ref() {
            DeValue::Table(table) => innermost(table, at),
            _ => None,
        }),
        _ => None,
    };
    table.iter().find_map(|(key, value)| {
        of_value(value.get_ref()).or_else(|| {
            let whole = key.span().start..value.span().end.max(key.span().end);
            whole.contains(&at).then_some(whole)
        })
    })
}

/// An element of an array of tables: from its head to the next table that is not part of it.
fn section(text: &str, name: &str, index: usize) -> Option<Range<usize>> {
    let head = format!("[[{name}]]");
    let (at, _) = lines(text).filter(|(_, line)| line.trim() == head).nth(index)?;
    Some(from_head(text, at))
}

/// A table from its head on, with those below it.
fn from_head(text: &str, at: usize) -> Range<usize> {
    let start = whole_lines(text, at..at).start;
    let head = text[start..].lines().next().unwrap_or_default();
    let name = head.trim().trim_matches(|c| c == '[' || c == ']').trim();
    let (one, several) = (format!("[{name}."), format!("[[{name}."));
    let is_other = |line: &str| {
        let line = line.trim_start();
        line.starts_with('[') && !line.starts_with(&one) && !line.starts_with(&several)
    };
    let mut after = lines(text).filter(|(at, line)| *at > start && is_other(line));
    start..after.next().map_or(text.len(), |(at, _)| at)
}

/// The lines with their places.
fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut at = 0;
    text.split_inclusive('\n').map(move |line| {
        at += line.len();
        (at - line.len(), line)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<String> {
        let (_, errors) = mistakes(text, Some(Path::new("/b.toml")), &Places::of_root());
        errors.iter().map(ToString::to_string).collect()
    }

    fn places(text: &str) -> Vec<String> {
        let start = |error: &String| error.split(' ').next().unwrap_or_default().to_owned();
        found(text).iter().map(start).collect()
    }

    #[test]
    fn all_mistakes_are_found_with_their_lines() {
        let text = "stop_timeout = \"1 fortnight\"\n\
                    no_such_key = 1\n\
                    [log]\n\
                    format = \"yaml\"\n\
                    level = 7\n\
                    [workers]\n\
                    count = 9999\n\
                    [[pool]]\n\
                    name = \"default\"\n\
                    path = \"relative\"\n\
                    extent_size = \"100K\"\n\
                    [[nbd.listener]]\n\
                    unix = \"/run/x\"\n\
                    mode = \"999\"\n";
        let expected = [
            "/b.toml:2:",
            "/b.toml:5:",
            "/b.toml:11:",
            "/b.toml:10:",
            "/b.toml:1:",
            "/b.toml:14:",
            "/b.toml:7:",
            "/b.toml:4:",
        ];
        let mut found = places(text);
        let mut expected = expected.map(str::to_owned).to_vec();
        found.sort();
        expected.sort();
        assert_eq!(found, expected, "{:#?}", super::mistakes(text, None, &Places::of_root()).1);
    }

    #[test]
    fn a_pool_that_lacks_something_is_named_once_and_others_are_checked() {
        let text = "default_pool = \"b\"\n\
                    [[pool]]\n\
                    name = \"a\"\n\
                    path = \"/a\"\n\
                    [[pool]]\n\
                    name = \"b\"\n\
                    [pool.space]\n\
                    low = \"10%\"\n\
                    [[pool]]\n\
                    name = \"a\"\n\
                    path = \"/c\"\n\
                    [ublk]\n\
                    enabled = \"maybe\"\n";
        let found = found(text);
        let has = |part: &str| found.iter().filter(|error| error.contains(part)).count();
        assert_eq!(found.len(), 3, "{found:#?}");
        assert_eq!((has("path is"), has("each pool has one"), has("ublk.enabled")), (1, 1, 1));
    }

    #[test]
    fn tables_that_are_not_known_and_lines_that_are_no_toml_hide_nothing() {
        let text = "[nonsense]\na = 1\n[nonsense.more]\nb = 2\n[nbd]\nmax_requests = = 3\n\
                    max_handshakes = 0\n[log]\nformat = \"x\"\n";
        let found = found(text);
        assert_eq!(found.len(), 4, "{found:#?}");
        let has = |part: &str| found.iter().any(|error| error.contains(part));
        assert!(has("nonsense") && has(":6") && has("max_handshakes") && has("log.format"));
    }

    #[test]
    fn a_file_that_is_right_has_none_and_one_that_is_no_toml_has_one() {
        assert!(found("").is_empty());
        assert_eq!(found("[[pool\nname = 1\n").len(), 1);
        let many: String = (0..200).map(|n| format!("key_{n} = {n}\n")).collect();
        assert_eq!(found(&many).len(), MAX_MISTAKES);
    }
}
