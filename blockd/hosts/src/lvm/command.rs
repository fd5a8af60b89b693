//! LVM's commands, and what their errors mean.

use std::process::Command;
use std::time::Duration;

use blockd_media::program::{self, Ended, Kept};

use crate::cell::CellName;
use crate::error::HostsError;

/// A command waits for the group's lock, which another host may hold for as long as its own command
/// takes, and for sanlock, whose IO has a limit of 10 s by default and is repeated.
const LIMIT: Duration = Duration::from_secs(120);
/// Reports of 2,000 logical volumes, of some 400 bytes each, with room.
const MAX_OUTPUT_BYTES: usize = 4 << 20;

/// Commands that look for physical volumes on all block devices.
const READERS: [&str; 7] =
    ["vgs", "lvs", "vgchange", "lvchange", "lvcreate", "lvextend", "lvremove"];
/// Keeps them off this daemon's own devices: a read of one on standby would wait for the cell that
/// the command is to take.
const NOT_OURS: &str = r#"devices/filter=["r|^/dev/ublkb|","r|^/dev/blockd/|"]"#;

/// Runs a program with these words.
type Run = dyn Fn(&str, &[&str]) -> Result<Ended, program::ProgramError> + Send + Sync;

/// The programs of the operating system, or a test's.
pub(super) struct Commands(Box<Run>);

impl std::fmt::Debug for Commands {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Commands")
    }
}

impl Default for Commands {
    fn default() -> Self {
        Self::new(|name, words| {
            let mut command = Command::new(name);
            // Messages are matched by their words.
            command.args(words);
            if READERS.contains(&name) {
                command.args(["--config", NOT_OURS]);
            }
            command.env("LC_ALL", "C").env("LVM_SUPPRESS_FD_WARNINGS", "1");
            let kept = Kept { bytes: MAX_OUTPUT_BYTES, together: false };
            program::run(command.current_dir("/"), kept, LIMIT)
        })
    }
}

/// A command that did not succeed.
#[derive(Debug)]
pub(super) struct Refusal {
    command: String,
    problem: Problem,
}

#[derive(Debug)]
enum Problem {
    NotRun(program::ProgramError),
    Late,
    Unlocked(String),
    Said(String),
}

/// The words of LVM when the lease of a logical volume is another host's.
const HELD: [&str; 2] = ["locked by other host", "is locked by another host"];
/// Its words when another host has the lock of the whole group.
const HELD_BY_OTHER: &str = "held by other host";
/// Its words when the lock manager is not there, or has no lease to give for now.
const AWAY: [&str; 7] = [
    "lvmlockd",
    "lockspace",
    "sanlock",
    "lock manager",
    "lock failed",
    "lock skipped",
    "due to failed lock",
];
/// Its warnings where a report was read although the lock manager is not there.
const UNLOCKED: [&str; 2] = ["without a lock", "lvmlockd connect failed"];
const MISSING: [&str; 2] = ["Failed to find logical volume", "not found"];
const EXISTING: [&str; 1] = ["already exists"];
const IN_USE: [&str; 3] = ["in use", "is used by another device", "contains a filesystem in use"];

impl Commands {
    pub(super) fn new(
        run: impl Fn(&str, &[&str]) -> Result<Ended, program::ProgramError> + Send + Sync + 'static,
    ) -> Self {
        Self(Box::new(run))
    }

    /// Gives what the command printed.
    pub(super) fn run(&self, name: &str, words: &[&str]) -> Result<String, Refusal> {
        self.run_with(name, words, |_| false)
    }

    /// The same for a report that counts only where it was read under the group's lock.
    pub(super) fn run_locked(&self, name: &str, words: &[&str]) -> Result<String, Refusal> {
        let is_unlocked = |errors: &str| UNLOCKED.iter().any(|warning| errors.contains(warning));
        self.run_with(name, words, is_unlocked)
    }

    fn run_with(
        &self,
        name: &str,
        words: &[&str],
        refuses: impl Fn(&str) -> bool,
    ) -> Result<String, Refusal> {
        let refusal = |problem| {
            let command = std::iter::once(name).chain(words.iter().copied());
            Refusal { command: command.collect::<Vec<_>>().join(" "), problem }
        };
        let ended = (self.0)(name, words);
        if let Ok(ended) = &ended {
            let (words, status) = (words.join(" "), ended.status.and_then(|status| status.code()));
            tracing::debug!(program = name, words, status, took_ms = ended.took.as_millis(), "ran");
        }
        match ended {
            Ok(Ended { status: Some(status), output, errors, .. }) if status.success() => {
                match refuses(&errors) {
                    true => Err(refusal(Problem::Unlocked(errors))),
                    false => Ok(output),
                }
            }
            Ok(Ended { status: Some(_), output, errors, .. }) => {
                Err(refusal(Problem::Said(if errors.is_empty() { output } else { errors })))
            }
            Ok(_) => Err(refusal(Problem::Late)),
            Err(error) => Err(refusal(Problem::NotRun(error))),
        }
    }
}

impl Refusal {
    /// Whether locks could not be had, and not because another host has them.
    pub(super) fn is_of_locks(&self) -> bool {
        let has = |said: &str, parts: &[&str]| parts.iter().any(|part| said.contains(part));
        match &self.problem {
            Problem::Unlocked(said) => !said.contains(HELD_BY_OTHER),
            Problem::Said(said) => {
                has(said, &AWAY) && !has(said, &HELD) && !said.contains(HELD_BY_OTHER)
            }
            Problem::NotRun(_) | Problem::Late => false,
        }
    }

    /// The error of a call about a cell, or about the group.
    pub(super) fn into_error(self, group: &str, cell: Option<&CellName>) -> HostsError {
        let Self { command, problem } = self;
        let group = format!("volume group {group}");
        let said = match problem {
            Problem::NotRun(error) => {
                let source = error.source;
                return HostsError::Io { what: format!("{} {command}", error.what), source };
            }
            Problem::Late => {
                let problem = format!("`{command}` did not end within {} s", LIMIT.as_secs());
                return HostsError::Away { group, problem };
            }
            Problem::Unlocked(said) => {
                let problem = format!(
                    "its locks are not started (`vgchange --lockstart`), or lvmlockd does not run: \
                     {}",
                    last_words(&said)
                );
                return HostsError::Away { group, problem };
            }
            Problem::Said(said) => said,
        };
        let has = |parts: &[&str]| parts.iter().any(|part| said.contains(part));
        let last = last_words(&said);
        match cell.cloned() {
            Some(cell) if has(&HELD) => HostsError::Held { cell, by: None },
            _ if has(&AWAY) => HostsError::Away { group, problem: last },
            Some(cell) if has(&IN_USE) => HostsError::InUse { cell },
            Some(cell) if has(&EXISTING) => HostsError::Exists { cell, group },
            Some(cell) if has(&MISSING) => HostsError::NotFound { cell, group },
            _ => HostsError::Command { command, problem: last },
        }
    }
}

/// The lines of a message as one, without those that only warn.
fn last_words(said: &str) -> String {
    const MAX_CHARS: usize = 300;
    let lines = said.lines().map(str::trim).filter(|line| !line.is_empty());
    let text = lines.filter(|line| !line.starts_with("WARNING")).collect::<Vec<_>>().join("; ");
    let text = if text.is_empty() { said.trim().replace('\n', "; ") } else { text };
    text.chars().filter(|c| !c.is_control()).take(MAX_CHARS).collect()
}
