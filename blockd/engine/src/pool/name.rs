//! The name of an open pool, which can change.

use std::fmt;
use std::sync::OnceLock;

/// Changes of the name between two openings: each keeps up to 200 bytes until the pool is closed.
const MAX_CHANGES: usize = 1000;

/// The names that a pool has had since it was opened, its present one last. Former ones are kept:
/// callers may have borrowed them.
#[derive(Debug)]
pub(super) struct Name {
    text: String,
    next: OnceLock<Box<Self>>,
}

impl Name {
    /// The present name.
    pub(super) fn get(&self) -> &str {
        &self.last().0.text
    }

    /// Whether it may change once more.
    pub(super) fn may_change(&self) -> bool {
        self.last().1 < MAX_CHANGES
    }

    /// Changes it. Of two changes at the same time one comes last.
    pub(super) fn set(&self, name: &str) {
        let mut next = Box::new(Self::from(name.to_owned()));
        while let Err(again) = self.last().0.next.set(next) {
            next = again;
        }
    }

    /// The last one, and how many there were before it.
    fn last(&self) -> (&Self, usize) {
        let (mut last, mut before) = (self, 0);
        while let Some(next) = last.next.get() {
            (last, before) = (next, before + 1);
        }
        (last, before)
    }
}

impl From<String> for Name {
    fn from(text: String) -> Self {
        Self { text, next: OnceLock::new() }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_name_counts_and_a_borrowed_one_stays() {
        let name = Name::from("a".to_owned());
        let borrowed = name.get();
        for next in ["b", "c", "b"] {
            name.set(next);
            assert_eq!(name.get(), next);
        }
        assert_eq!((borrowed, name.to_string().as_str()), ("a", "b"));
        (0..MAX_CHANGES - 3).for_each(|_| name.set("d"));
        assert!(!name.may_change());
    }
}
