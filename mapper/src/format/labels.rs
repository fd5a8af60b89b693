//! Labels of a volume: pairs of key and value that mean something to its users only. Those of one
//! volume have a page of their own.

use std::fmt;
use std::sync::Arc;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::format::page::{
    PAGE_HEADER_SIZE, PageExpect, PageKind, PageStamp, RawHeader, seal, short, try_open,
};
use crate::format::{FormatError, Place, Problem, check_reserved};
use crate::geometry::PAGE_SIZE;
use crate::io::Page;

/// Most labels of a volume: a list of them still fits on a screen.
pub const MAX_LABELS: usize = 32;
/// Most bytes of a key's prefix, which is a DNS name.
pub const MAX_PREFIX: usize = 253;
/// Most bytes of a key behind its prefix, as in Kubernetes.
pub const MAX_KEY: usize = 63;
/// Most bytes of a value.
pub const MAX_VALUE: usize = 256;
/// Bytes of all labels of a volume as [`Labels::text`] has them: they fit on one page.
pub const MAX_TEXT: usize = PAGE_SIZE - PAGE_HEADER_SIZE;

/// A label that breaks a rule, or labels that do so together.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum InvalidLabel {
    /// A key breaks a rule.
    #[error("label {key:?}: its key must be {problem}")]
    Key {
        /// The key as given.
        key: String,
        /// The rule it breaks.
        problem: &'static str,
    },
    /// The value of a label breaks a rule.
    #[error("label {key:?}: its value must be {problem}")]
    Value {
        /// The key.
        key: String,
        /// The value as given.
        value: String,
        /// The rule that the value breaks.
        problem: &'static str,
    },
    /// The same key stands twice.
    #[error("label {key:?}: the key stands twice")]
    Twice {
        /// The key.
        key: String,
    },
    /// A volume would have too many.
    #[error("label {key:?}: would be number {count}, a volume has at most {MAX_LABELS}")]
    TooMany {
        /// The first key that is too much.
        key: String,
        /// How many there would be.
        count: usize,
    },
    /// The labels are too long together.
    #[error(
        "label {key:?}: with it the labels take {bytes} bytes together, a volume has at most \
         {MAX_TEXT}"
    )]
    TooLong {
        /// The first key that does not fit.
        key: String,
        /// The bytes that they would take.
        bytes: usize,
    },
}

/// The labels of a volume, by key. Without any it takes no memory.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Labels(Option<Arc<Text>>);

/// Lines of `key=value`, in the order of the keys. Neither has a line feed, and keys have no `=`.
#[derive(PartialEq, Eq)]
struct Text(Box<str>);

impl Labels {
    /// Checks labels and sorts them.
    ///
    /// # Errors
    /// The first key that breaks a rule, or does so with its value or with those before it.
    pub fn new<K: AsRef<str>, V: AsRef<str>>(
        labels: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, InvalidLabel> {
        let labels: Vec<_> = labels.into_iter().collect();
        let mut pairs: Vec<(&str, &str)> =
            labels.iter().map(|(key, value)| (key.as_ref(), value.as_ref())).collect();
        for &(key, value) in &pairs {
            check_key(key)?;
            check_value(key, value)?;
        }
        pairs.sort_unstable();
        let mut text = String::new();
        let mut before = None;
        for (count, (key, value)) in (1..).zip(pairs) {
            let key_owned = || key.to_owned();
            if before.replace(key) == Some(key) {
                return Err(InvalidLabel::Twice { key: key_owned() });
            }
            if count > MAX_LABELS {
                return Err(InvalidLabel::TooMany { key: key_owned(), count });
            }
            text.extend([key, "=", value, "\n"]);
            if text.len() > MAX_TEXT {
                return Err(InvalidLabel::TooLong { key: key_owned(), bytes: text.len() });
            }
        }
        Ok(Self::of(text))
    }

    fn of(text: String) -> Self {
        Self((!text.is_empty()).then(|| Arc::new(Text(text.into()))))
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Each key with its value, in the order of the keys.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.text().lines().filter_map(|line| line.split_once('='))
    }

    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.iter().find(|(other, _)| *other == key).map(|(_, value)| value)
    }

    /// Lines of `key=value`, each with a line feed, in the order of the keys.
    #[must_use]
    pub fn text(&self) -> &str {
        self.0.as_deref().map_or("", |text| &text.0)
    }

    /// Checks text read from media.
    fn from_text(text: &str) -> Option<Self> {
        let lines: Option<Vec<_>> = text.lines().map(|line| line.split_once('=')).collect();
        // Another order, a line without its end, or nothing at all is not what a writer makes.
        Self::new(lines?).ok().filter(|labels| !labels.is_empty() && labels.text() == text)
    }
}

impl fmt::Debug for Labels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

/// Refuses a key that breaks a rule: an optional DNS prefix with a slash, then a name.
///
/// # Errors
/// The rule.
pub fn check_key(key: &str) -> Result<(), InvalidLabel> {
    let problem = match key.split_once('/') {
        Some((prefix, name)) => prefix_problem(prefix).or_else(|| name_problem(name)),
        None => name_problem(key),
    };
    let invalid = |problem| Err(InvalidLabel::Key { key: key.to_owned(), problem });
    problem.map_or(Ok(()), invalid)
}

fn name_problem(name: &str) -> Option<&'static str> {
    let is_end = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    if name.is_empty() || name.len() > MAX_KEY {
        return Some("a name of 1 to 63 characters, behind a prefix and slash if it has one");
    }
    if name.contains(|c: char| !c.is_ascii_alphanumeric() && !matches!(c, '.' | '_' | '-')) {
        return Some("a name of letters, digits, '.', '_' and '-'");
    }
    if !is_end(name.chars().next()) || !is_end(name.chars().next_back()) {
        return Some("a name that begins and ends with a letter or digit");
    }
    None
}

fn prefix_problem(prefix: &str) -> Option<&'static str> {
    let is_inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let is_part = |part: &str| {
        (1..=MAX_KEY).contains(&part.len())
            && part.chars().all(is_inner)
            && !part.starts_with('-')
            && !part.ends_with('-')
    };
    let is_name = prefix.len() <= MAX_PREFIX && prefix.split('.').all(is_part);
    (!is_name).then_some("a name, behind a DNS name of at most 253 characters where it has a slash")
}

/// Refuses the value of a key if it breaks a rule: values are shown to people, in one line.
fn check_value(key: &str, value: &str) -> Result<(), InvalidLabel> {
    let problem = if value.len() > MAX_VALUE {
        "at most 256 bytes long"
    } else if value.contains(is_unprintable) {
        "text without control characters, line separators and marks of writing direction"
    } else {
        return Ok(());
    };
    Err(InvalidLabel::Value { key: key.to_owned(), value: value.to_owned(), problem })
}

/// Control characters, and those that make text appear in another order or in several lines.
fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(c, '\u{2066}'..='\u{2069}')
}

/// Writes and seals the page of a volume's labels, of which there are some. Returns the sum for
/// its parent.
pub fn encode_labels(page: &mut Page, stamp: &PageStamp, labels: &Labels) -> u64 {
    let text = labels.text().as_bytes();
    if let Ok(raw) = RawLabels::mut_from_bytes(&mut page.0) {
        raw.text.fill(0);
        raw.text[..text.len()].copy_from_slice(text);
    }
    let used = u16::try_from(labels.iter().count()).unwrap_or(u16::MAX);
    seal(page, PageKind::Labels, 0, used, stamp)
}

/// Checks the page of a volume's labels.
pub fn decode_labels(
    bytes: &[u8],
    expect: &PageExpect,
    place: Place,
) -> Result<Labels, FormatError> {
    try_decode(bytes, expect).map_err(|problem| problem.of(PageKind::Labels.structure(), place))
}

fn try_decode(bytes: &[u8], expect: &PageExpect) -> Result<Labels, Problem> {
    let header = try_open(bytes, expect)?;
    let raw = RawLabels::ref_from_bytes(bytes).map_err(|_| short(bytes))?;
    let end = raw.text.iter().position(|&byte| byte == 0).unwrap_or(raw.text.len());
    let (text, rest) = raw.text.split_at(end);
    check_reserved(rest, PAGE_HEADER_SIZE + end)?;
    let labels = std::str::from_utf8(text).ok().and_then(Labels::from_text);
    let allowed = "labels that keep the rules, in the order of their keys";
    let labels = labels.ok_or_else(|| Problem::field("bytes of labels", end as u64, allowed))?;
    let (found, expected) = (u64::from(header.entries), labels.iter().count() as u64);
    if found != expected {
        return Err(Problem::Mismatch { field: "entries in use", found, expected });
    }
    Ok(labels)
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawLabels {
    header: RawHeader,
    text: [u8; MAX_TEXT],
}

const _: () = assert!(size_of::<RawLabels>() == PAGE_SIZE);

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn one(key: &str, value: &str) -> Result<Labels, InvalidLabel> {
        Labels::new([(key, value)])
    }

    #[test]
    fn labels_that_keep_the_rules_come_back_by_key() {
        let labels = Labels::new([("b", "2=x"), ("a.example/role", ""), ("a", "é b")]).unwrap();
        assert_eq!(labels.text(), "a=é b\na.example/role=\nb=2=x\n");
        assert_eq!(labels.get("b"), Some("2=x"));
        assert_eq!((labels.get("a.example/role"), labels.get("c")), (Some(""), None));
        assert_eq!(Labels::from_text(labels.text()), Some(labels));
        assert!(Labels::new::<&str, &str>([]).unwrap().is_empty());
        let longest = format!("{}.{}/{}", "a".repeat(63), "b".repeat(63), "c".repeat(63));
        assert!(one(&longest, &"v".repeat(MAX_VALUE)).is_ok());
    }

    #[test]
    fn a_bad_label_is_refused_by_its_key() {
        let long = "x".repeat(MAX_KEY + 1);
        let prefix = format!("{}a/b", "a.".repeat(MAX_PREFIX / 2 + 1));
        let keys = ["", "-a", "a_", "a b", "a=b", "ä", "/a", "a/", "A.b/c", "a..b/c", "a/b/c"];
        for key in keys.into_iter().chain([long.as_str(), prefix.as_str()]) {
            let error = one(key, "v").unwrap_err();
            assert!(matches!(&error, InvalidLabel::Key { key: named, .. } if named == key));
        }
        let long = "x".repeat(MAX_VALUE + 1);
        for value in [long.as_str(), "a\nb", "\0", "\u{85}", "\u{202e}x", "\u{2066}", "\u{2028}"] {
            let error = one("k", value).unwrap_err();
            assert!(matches!(&error, InvalidLabel::Value { key, .. } if key == "k"), "{value:?}");
        }
        let twice = Labels::new([("k", "1"), ("k", "2")]).unwrap_err();
        assert_eq!(twice, InvalidLabel::Twice { key: "k".to_owned() });
    }

    #[test]
    fn too_many_labels_or_bytes_are_refused_by_the_first_that_is_too_much() {
        let many = |count: usize, len: usize| {
            Labels::new((0..count).map(|at| (format!("k{at:02}"), "v".repeat(len))))
        };
        assert!(many(MAX_LABELS, 1).is_ok());
        let key = "k32".to_owned();
        assert_eq!(many(33, 1).unwrap_err(), InvalidLabel::TooMany { key, count: 33 });
        // Each takes five bytes besides the value: of 4032, fifteen and a bit fit.
        let key = "k15".to_owned();
        assert_eq!(many(16, 256).unwrap_err(), InvalidLabel::TooLong { key, bytes: 16 * 261 });
        assert!(many(15, 256).is_ok());
    }
}
