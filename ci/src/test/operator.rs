//! `cargo ci test operator`: an operator's steps against a real daemon, one after the other. Every
//! verb of `blockd` is used and fails at least once; the expected output of each step stands below
//! it in a file.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::docs::session::{self, Session};
use crate::steps::{Outcome, Steps};
use crate::{command, flags};

/// The steps and their output.
const FILE: &str = "ci/src/test/operator/steps.txt";

/// Fewer steps than this are no operator's day.
const LEAST_STEPS: usize = 80;

/// Precedes the number of a step, and its exit code, in the output of all.
const MARK: &str = "@@step ";

/// Verbs that cannot fail in a session, with the reason.
const NEVER_FAIL: [(&str, &str); 3] = [
    ("blockd man", "prints a constant"),
    ("blockd pmem list", "an empty machine has an empty list"),
    ("blockd version", "is no error without a daemon"),
];

/// A part of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    /// A line for readers.
    Text(String),
    /// A command, which stands behind `$ `, and its output, which is indented.
    Step { line: usize, command: String, output: String, is_run: bool },
}

/// Conditions at the end of a heading, below which steps are run only on such a machine.
fn is_met(heading: &str) -> bool {
    if heading.ends_with("(root)") {
        return std::fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0);
    }
    !heading.ends_with("(no ublk driver)") || !Path::new("/dev/ublk-control").exists()
}

/// Builds the daemon as documents are checked, then runs the steps.
#[must_use]
pub(crate) fn run(root: &Path, write: bool) -> bool {
    let mut steps = Steps::new();
    steps.run("steps of an operator", || {
        let mut cargo = command::cargo(root);
        command::run(cargo.args(["build", "--quiet", "--package", "blockd"]))?;
        check(root, &command::target_dir(root).join("debug"), write)
    });
    steps.finish()
}

/// Runs the steps with the programs in a folder. Compares their output with the file, or writes it.
///
/// # Errors
/// Lists the steps with another output, or the verbs that no step uses.
pub(crate) fn check(root: &Path, programs: &Path, write: bool) -> Result<Outcome> {
    let path = root.join(FILE);
    let text = std::fs::read_to_string(&path).context(FILE)?;
    let parts = read(&text);
    let session = session::run_script(root, programs, &script(&parts))?;
    let now = with_output(&parts, &session)?;
    complete(root, &now)?;
    if write {
        std::fs::write(&path, print(&now)).context(FILE)?;
        return Ok(Outcome::Passed);
    }
    let problems: Vec<String> = parts.iter().zip(&now).filter_map(difference).collect();
    ensure!(
        problems.is_empty(),
        "{}\n{} steps differ; `cargo ci test operator --write` takes what they print now",
        problems.join("\n"),
        problems.len()
    );
    println!("operator: {} steps", now.iter().filter(|part| part.command().is_some()).count());
    Ok(Outcome::Passed)
}

impl Part {
    fn command(&self) -> Option<&str> {
        match self {
            Self::Step { command, .. } => Some(command),
            Self::Text(_) => None,
        }
    }

    fn to_run(&self) -> Option<&str> {
        self.command().filter(|_| matches!(self, Self::Step { is_run: true, .. }))
    }
}

fn read(text: &str) -> Vec<Part> {
    let (mut parts, mut is_run) = (Vec::new(), true);
    for (number, line) in (1..).zip(text.lines()) {
        if let Some(command) = line.strip_prefix("$ ") {
            let (command, output) = (command.to_owned(), String::new());
            parts.push(Part::Step { line: number, command, output, is_run });
            continue;
        }
        match (line.strip_prefix("    "), parts.last_mut()) {
            (Some(printed), Some(Part::Step { output, .. })) => {
                output.push_str(printed);
                output.push('\n');
            }
            _ => {
                if let Some(heading) = line.strip_prefix("# ") {
                    is_run = is_met(heading);
                    if !is_run {
                        println!("not run: {heading}");
                    }
                }
                parts.push(Part::Text(line.to_owned()));
            }
        }
    }
    parts
}

fn print(parts: &[Part]) -> String {
    let mut text = String::new();
    for part in parts {
        match part {
            Part::Text(line) => text.push_str(line),
            Part::Step { command, output, .. } => {
                text.push_str("$ ");
                text.push_str(command);
                for line in output.lines() {
                    text.push_str("\n    ");
                    text.push_str(line);
                }
            }
        }
        text.push('\n');
    }
    text
}

/// All commands in one shell, each between marks.
fn script(parts: &[Part]) -> String {
    let mut script = "set +eux\nexec 2>&1\nsystemctl start blockd\n".to_owned();
    for (number, command) in parts.iter().filter_map(Part::to_run).enumerate() {
        script.push_str(&format!("printf '\\n{MARK}%s\\n' {number}\n{command}\n"));
        script.push_str(&format!("printf '\\n{MARK}ended %s\\n' $?\n"));
    }
    script.push_str("systemctl stop blockd\n");
    script
}

/// The parts with the output of this session.
fn with_output(parts: &[Part], session: &Session) -> Result<Vec<Part>> {
    let mark = format!("\n{MARK}");
    let mut printed = session.output.split(&mark);
    // Printed before the first step.
    printed.next();
    let mut now = Vec::new();
    for part in parts {
        let Part::Step { line, command, is_run: true, .. } = part else {
            now.push(part.clone());
            continue;
        };
        let (text, code) = printed.next().zip(printed.next()).with_context(|| {
            format!("the session ended before {FILE}:{line}: {command}\n{}", session.output)
        })?;
        let text = text.split_once('\n').map_or("", |(_, text)| text);
        let code = code.trim().trim_start_matches("ended ");
        let mut output = normalised(text, session);
        if code != "0" {
            output.push_str(&format!("[exit {code}]\n"));
        }
        now.push(Part::Step { line: *line, command: command.clone(), output, is_run: true });
    }
    Ok(now)
}

/// Another output than the file has.
fn difference((expected, now): (&Part, &Part)) -> Option<String> {
    let (Part::Step { line, command, output, .. }, Part::Step { output: now, .. }) =
        (expected, now)
    else {
        return None;
    };
    let indented =
        |text: &str| text.lines().map(|line| format!("    {line}\n")).collect::<String>();
    (output != now).then(|| {
        format!(
            "{FILE}:{line}: {command}\n  expected:\n{}  printed:\n{}",
            indented(output),
            indented(now)
        )
    })
}

/// Every verb is used, and its main error seen.
fn complete(root: &Path, parts: &[Part]) -> Result<()> {
    let flags = flags::ours(root)?;
    let verbs: Vec<&str> =
        flags.keys().map(String::as_str).filter(|name| name.starts_with("blockd ")).collect();
    let has_verbs = |name: &str| verbs.iter().any(|verb| verb.starts_with(&format!("{name} ")));
    let (mut unused, mut without_error) = (BTreeSet::new(), BTreeSet::new());
    for verb in verbs.iter().filter(|verb| !has_verbs(verb)) {
        let outputs = parts.iter().filter_map(|part| match part {
            Part::Step { command, output, .. } if is_of(command, verb) => Some(output),
            _ => None,
        });
        let outputs: Vec<&String> = outputs.collect();
        if outputs.is_empty() {
            unused.insert(*verb);
        }
        let fails = outputs.iter().any(|output| output.contains("[exit "));
        if !fails && NEVER_FAIL.iter().all(|(name, _)| name != verb) {
            without_error.insert(*verb);
        }
    }
    let count = parts.iter().filter(|part| part.command().is_some()).count();
    ensure!(count >= LEAST_STEPS, "{FILE} has {count} steps, fewer than {LEAST_STEPS}");
    if !unused.is_empty() || !without_error.is_empty() {
        bail!("{FILE}: no step uses {unused:?}; no step fails of {without_error:?}");
    }
    Ok(())
}

/// Whether a command line has this verb, behind global options.
fn is_of(command: &str, verb: &str) -> bool {
    let words = command.split(' ').filter(|word| !["--json", "--bytes"].contains(word));
    let words: Vec<&str> = words.collect();
    let verb: Vec<&str> = verb.split(' ').collect();
    words.windows(verb.len()).any(|window| window == verb)
}

/// The output without empty lines, and without what differs from one session to the next: places,
/// ids, times, and the width of columns.
fn normalised(text: &str, session: &Session) -> String {
    let places: [(&PathBuf, &str); 2] = [(&session.run, "/RUN"), (&session.place, "/PLACE")];
    let text = places
        .iter()
        .fold(text.to_owned(), |text, (path, name)| text.replace(&*path.to_string_lossy(), name));
    let mut lines = String::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let mut words: Vec<String> = Vec::new();
        let indented = line.starts_with(' ');
        for word in line.split(' ').filter(|word| !word.is_empty()) {
            let number = |text: &str| text.parse::<f64>().is_ok();
            let word = match word {
                "ms" | "us" | "ms," | "us," if words.last().is_some_and(|last| number(last)) => {
                    words.pop();
                    words.push("N".to_owned());
                    word.to_owned()
                }
                word if words.last().is_some_and(|last| last == "process") => {
                    replaced(word, 1, |c| c.is_ascii_digit(), "PID")
                }
                word if words.last().is_some_and(|last| last == "node") => {
                    replaced(word, 8, |c| c.is_ascii_hexdigit() || c == '-', "ID")
                }
                word if word.starts_with("node-") => {
                    format!(
                        "node-{}",
                        replaced(&word[5..], 8, |c| c.is_ascii_hexdigit() || c == '-', "ID")
                    )
                }
                word if word.starts_with("/dev/loop") => {
                    format!("/dev/loop{}", replaced(&word[9..], 1, |c| c.is_ascii_digit(), "N"))
                }
                word => word.split_inclusive(is_end).map(one_word).collect(),
            };
            words.push(word);
        }
        let line = words.join(" ");
        lines.push_str(if indented { "  " } else { "" });
        lines.push_str(line.trim_end());
        lines.push('\n');
    }
    lines
}

/// Ends of a word within a word: `id=...`, `"...",`.
fn is_end(c: char) -> bool {
    "\"',;=()/[]".contains(c)
}

fn one_word(word: &str) -> String {
    let (text, end) = match word.char_indices().next_back() {
        Some((at, last)) if is_end(last) || ".:".contains(last) => word.split_at(at),
        _ => (word, ""),
    };
    let is_hex = |text: &str| text.chars().all(|c| c.is_ascii_hexdigit());
    let digits = |text: &str| text.chars().all(|c| c.is_ascii_digit());
    let groups: Vec<&str> = text.split('-').collect();
    let lengths: Vec<usize> = groups.iter().map(|group| group.len()).collect();
    let is_uuid = lengths == [8, 4, 4, 4, 12] && groups.iter().all(|group| is_hex(group));
    let is_date = text.len() >= 10 && lengths.starts_with(&[4, 2]) && digits(groups[0]);
    let is_time = text.len() >= 8 && text.split(':').count() == 3 && digits(&text[..2]);
    let name = if is_uuid || (text.len() == 32 && is_hex(text)) {
        "ID"
    } else if is_date {
        "DATE"
    } else if is_time {
        "TIME"
    } else if text == env!("CARGO_PKG_VERSION") {
        "VERSION"
    } else if text.len() == 13 && text.starts_with('1') && digits(text) {
        "UNIX-MS"
    } else {
        text
    };
    format!("{name}{end}")
}

/// A word that begins with at least `least` characters of a kind, with a name in their place.
fn replaced(word: &str, least: usize, is_of: fn(char) -> bool, name: &str) -> String {
    let end = word.find(|c: char| !is_of(c)).unwrap_or(word.len());
    if end < least { word.to_owned() } else { format!("{name}{}", &word[end..]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(output: &str) -> Session {
        let (place, run) = ("/tmp/bd-1".into(), "/dev/shm/bd-2".into());
        Session { output: output.to_owned(), place, run }
    }

    #[test]
    fn a_file_is_printed_as_it_was_read() {
        let text = "# Volumes\n\n$ blockd list\n    NAME\n    a\n$ blockd del a\n    [exit 7]\n";
        assert_eq!(print(&read(text)), text);
    }

    #[test]
    fn outputs_come_to_their_steps_with_exit_codes() {
        let parts = read("first\n$ a\n$ b\n    old\n");
        let output = "x\n@@step 0\none\n\n@@step ended 0\n\n@@step 1\n\n@@step ended 7\n";
        let now = with_output(&parts, &session(output)).unwrap();
        assert_eq!(print(&now), "first\n$ a\n    one\n$ b\n    [exit 7]\n");
        let differing: Vec<_> = parts.iter().zip(&now).filter_map(difference).collect();
        assert_eq!(differing.len(), 2);
        assert!(differing[1].contains("steps.txt:3: b\n"), "{}", differing[1]);
        assert!(with_output(&parts, &session("x\n@@step 0\n")).is_err());
    }

    #[test]
    fn what_differs_between_sessions_is_replaced() {
        let text = "ID   0123456789abcdef0123456789abcdef, 12 ms\n  on /tmp/bd-1/srv at \
                    2026-01-02T03:04:05Z by process 77: 1700000000000, 1073741824\n";
        assert_eq!(
            normalised(text, &session("")),
            "ID ID, N ms\n  on /PLACE/srv at DATE by process PID: UNIX-MS, 1073741824\n"
        );
    }

    #[test]
    fn a_verb_is_found_behind_global_options() {
        assert!(is_of("blockd --json pool show a", "blockd pool show"));
        assert!(!is_of("blockd pool show a", "blockd show"));
    }
}
