//! Conditions of volumes: combines the causes that controller and node report into one short line.
//! Pure. Causes come from the daemon and from the node part's checks of devices, mounts and file
//! systems; each cause belongs to one side only, so that a fault is reported once.

pub mod split;

use std::cmp::Reverse;

use crate::proto::VolumeCondition;

/// Bytes of a message: the general limit of the specification for a string, and what Kubernetes'
/// design of volume health counts with.
pub const MAX_MESSAGE: usize = crate::limits::MAX_STRING;

/// The message of a healthy volume. The specification requires a message then, too.
pub const HEALTHY: &str = "healthy";

/// Stands between causes.
const BETWEEN: &str = "; ";

/// Stands where something was cut off.
const CUT: &str = "...";

/// How bad it is; the worst is the greatest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Severity {
    /// The state is outdated, or could not be determined.
    Unknown,
    /// The volume works, and needs attention.
    Warning,
    /// A function of the volume does not work.
    Failure,
}

/// A fault of a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cause {
    pub severity: Severity,
    /// One line for people. Never holds secrets or mount options.
    pub message: String,
}

impl Cause {
    /// Returns a cause of severity `failure`.
    #[must_use]
    pub fn failure(message: impl Into<String>) -> Self {
        Self { severity: Severity::Failure, message: message.into() }
    }

    /// Returns a cause of severity `warning`.
    #[must_use]
    pub fn warning(message: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, message: message.into() }
    }

    /// Returns a cause of severity `unknown`.
    #[must_use]
    pub fn unknown(message: impl Into<String>) -> Self {
        Self { severity: Severity::Unknown, message: message.into() }
    }
}

/// Causes as a condition: the worst first. Returns the condition of a volume with these causes. By
/// the specification a normal volume is available and operates optimally, so that any cause makes
/// it abnormal: a warning since the volume is not optimal, and `unknown` since the last known state
/// is outdated.
#[must_use]
pub fn condition(mut causes: Vec<Cause>) -> VolumeCondition {
    causes.sort_by_key(|cause| Reverse(cause.severity));
    let mut lines: Vec<String> = Vec::new();
    for cause in &causes {
        let line = line(cause);
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    let message = if lines.is_empty() { HEALTHY.to_owned() } else { joined(&lines) };
    VolumeCondition { abnormal: !causes.is_empty(), message }
}

/// Returns the condition of a volume that was not checked, as with a daemon that is older than this
/// plugin. Without a known fault it is not abnormal, and without a check it is not healthy.
#[must_use]
pub fn unknown(why: &str) -> VolumeCondition {
    let message = joined(&[line(&Cause::unknown(why))]);
    VolumeCondition { abnormal: false, message }
}

/// In one line, and never empty.
fn line(cause: &Cause) -> String {
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    let text: String = cause.message.chars().map(plain).collect();
    let text = text.trim();
    let text = if text.is_empty() { "not said what" } else { text };
    match cause.severity {
        Severity::Unknown => format!("unknown: {text}"),
        Severity::Warning | Severity::Failure => text.to_owned(),
    }
}

/// Joins as many lines as fit, and the number of the others. The first is truncated if needed.
fn joined(lines: &[String]) -> String {
    let more =
        |count: usize| if count == 0 { String::new() } else { format!("{BETWEEN}{count} more") };
    for shown in (1..=lines.len()).rev() {
        let text = lines[..shown].join(BETWEEN) + &more(lines.len() - shown);
        if text.len() <= MAX_MESSAGE {
            return text;
        }
    }
    let end = more(lines.len().saturating_sub(1));
    let first = lines.first().map_or("", String::as_str);
    let room = MAX_MESSAGE.saturating_sub(end.len() + CUT.len());
    let at = (0..=room).rev().find(|at| first.is_char_boundary(*at)).unwrap_or(0);
    format!("{}{CUT}{end}", &first[..at])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Strategy, any, prop_assert, prop_assert_eq, proptest};

    use super::*;

    /// Row: H17.
    #[test]
    fn without_a_cause_the_condition_is_healthy() {
        let said = condition(Vec::new());
        assert_eq!(said, VolumeCondition { abnormal: false, message: "healthy".to_owned() });
    }

    /// Row: H45.
    #[test]
    fn causes_are_joined_with_the_worst_first() {
        let causes = vec![
            Cause::unknown("pool p has not answered for 5 s"),
            Cause::warning("pool p is low"),
            Cause::failure("device sdb is gone"),
            Cause::failure("3 writes wait"),
            Cause::failure("device sdb is gone"),
        ];
        let said = condition(causes);
        assert!(said.abnormal);
        let expected = "device sdb is gone; 3 writes wait; pool p is low; \
                        unknown: pool p has not answered for 5 s";
        assert_eq!(said.message, expected);
    }

    #[test]
    fn causes_that_do_not_fit_are_counted_and_the_worst_stays() {
        let causes = (0..9).map(|at| Cause::warning(format!("something of 30 bytes, number {at}")));
        let causes = causes.chain([Cause::failure("the worst")]).collect();
        let said = condition(causes).message;
        assert!(said.starts_with("the worst; something of 30 bytes, number 0; "), "{said}");
        assert!(said.ends_with("; 6 more"), "{said}");
        let long = vec![Cause::failure("\u{e4}".repeat(500)), Cause::warning("x")];
        let said = condition(long).message;
        assert!(said.ends_with("\u{e4}...; 1 more") && said.len() > 120, "{said}");
    }

    #[test]
    fn an_unchecked_volume_is_neither_abnormal_nor_healthy() {
        let said = unknown("the daemon is older");
        assert_eq!((said.abnormal, said.message.as_str()), (false, "unknown: the daemon is older"));
    }

    fn causes() -> impl Strategy<Value = Vec<Cause>> {
        let severity = (0..3_usize)
            .prop_map(|at| [Severity::Unknown, Severity::Warning, Severity::Failure][at]);
        let cause =
            (severity, any::<String>()).prop_map(|(severity, message)| Cause { severity, message });
        proptest::collection::vec(cause, 0..12)
    }

    proptest! {
        /// Row: H17.
        #[test]
        fn a_message_is_one_line_never_empty_and_never_too_long(causes in causes()) {
            let worst = causes.iter().map(|cause| cause.severity).max();
            let first = causes.iter().find(|cause| Some(cause.severity) == worst).map(line);
            let said = condition(causes.clone());
            prop_assert!(!said.message.is_empty() && said.message.len() <= MAX_MESSAGE);
            prop_assert!(!said.message.chars().any(char::is_control));
            prop_assert_eq!(said.abnormal, !causes.is_empty());
            if let Some(first) = first {
                let shown = said.message.split(BETWEEN).next().unwrap_or_default();
                let begins = shown.strip_suffix(CUT).unwrap_or(shown);
                prop_assert!(first.starts_with(begins) || begins.starts_with(&first));
            }
        }
    }
}
