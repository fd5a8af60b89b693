//! Scripts of the administrator's that are run at certain moments: each within a time limit, with
//! what they print kept for the log.
//!
//! Scripts run as the user of this process, so only files that no other user can write are run.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

use blockd_media::program::{self, Ended, Kept, ProgramError};

/// Bytes of a script's output that are kept: enough for a page of text, and no more memory than
/// that, however much it prints.
const MAX_OUTPUT_BYTES: usize = 64 << 10;

/// Scripts in one directory. More files mean that the directory is not one of hooks.
const MAX_SCRIPTS: usize = 256;

/// The result of a script that succeeded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ran {
    /// The script.
    pub path: PathBuf,
    /// Its output on stdout and stderr, as trimmed text.
    pub output: String,
    /// How long it took.
    pub took: Duration,
}

/// Why a script did not run, or not to a good end.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// The directory or the script can't be used at all.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// The failed step.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The file must not be run.
    #[error("{} {problem}", path.display())]
    Unsuitable {
        /// The script.
        path: PathBuf,
        /// The reason.
        problem: &'static str,
    },
    /// The script failed.
    #[error("{} ended with {how}{}", path.display(), tail(output))]
    Failed {
        /// The script.
        path: PathBuf,
        /// Its exit code or signal.
        how: String,
        /// Its output.
        output: String,
    },
    /// The script did not end in time.
    #[error("{} did not end within {:.1} s{}", path.display(), limit.as_secs_f32(), tail(output))]
    Hangs {
        /// The script.
        path: PathBuf,
        /// How long it was given.
        limit: Duration,
        /// Its output.
        output: String,
    },
}

/// The end of what a script printed, as it can stand in a line.
fn tail(output: &str) -> String {
    const SHOWN: usize = 200;
    let last = output.lines().last().unwrap_or_default().trim();
    let text: String = last.chars().filter(|c| !c.is_control()).take(SHOWN).collect();
    if text.is_empty() { text } else { format!(": {text}") }
}

/// The scripts of a directory, in the order of their names; none where there is no directory. Names
/// that begin with a dot are left out. Anything else that can't be run is refused, before one has
/// run.
pub fn scripts(folder: &Path) -> Result<Vec<PathBuf>, HookError> {
    let failed = |what| {
        let path = folder.to_owned();
        move |source| HookError::Io { what, path, source }
    };
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(failed("read the directory"))?,
    };
    check_folder(folder)?;
    let mut paths = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed("read the directory"))?;
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        if paths.len() == MAX_SCRIPTS {
            return Err(unsuitable(folder, "has more than 256 entries"));
        }
        paths.push(entry.path());
    }
    paths.sort();
    for path in &paths {
        check(path)?;
    }
    Ok(paths)
}

/// Checks that a file may be run on behalf of a user.
pub fn check(path: &Path) -> Result<(), HookError> {
    let found = look_at(path)?;
    let problem = if !found.is_file() {
        Some("is not a file")
    } else if found.permissions().mode() & 0o111 == 0 {
        Some("is not executable")
    } else {
        of_others(&found)
    };
    problem.map_or(Ok(()), |problem| Err(unsuitable(path, problem)))
}

/// Checks the directory: a user who can write it decides which files are run.
fn check_folder(path: &Path) -> Result<(), HookError> {
    of_others(&look_at(path)?).map_or(Ok(()), |problem| Err(unsuitable(path, problem)))
}

fn look_at(path: &Path) -> Result<Metadata, HookError> {
    let failed = |source| HookError::Io { what: "examine", path: path.to_owned(), source };
    std::fs::metadata(path).map_err(failed)
}

/// The reason for which another user can change a file, if one can.
fn of_others(found: &Metadata) -> Option<&'static str> {
    let ours = found.uid() == 0 || found.uid() == nix::unistd::geteuid().as_raw();
    let written = found.permissions().mode() & 0o022 != 0;
    match (ours, written) {
        (false, _) => Some("belongs to another user"),
        (true, true) => Some("can be written by other users"),
        (true, false) => None,
    }
}

fn unsuitable(path: &Path, problem: &'static str) -> HookError {
    HookError::Unsuitable { path: path.to_owned(), problem }
}

/// Runs one script to its end, or kills it with everything it has started. Blocks.
pub fn run(
    path: &Path,
    arguments: &[&str],
    variables: &[(&str, &str)],
    limit: Duration,
) -> Result<Ran, HookError> {
    check(path)?;
    let mut command = Command::new(path);
    command.args(arguments).envs(variables.iter().copied()).current_dir("/");
    let kept = Kept { bytes: MAX_OUTPUT_BYTES, together: true };
    let path = path.to_owned();
    let Ended { status, output, took, .. } = match program::run(&mut command, kept, limit) {
        Ok(ended) => ended,
        Err(ProgramError { what, source }) => return Err(HookError::Io { what, path, source }),
    };
    match status {
        Some(status) if status.success() => Ok(Ran { path, output, took }),
        Some(status) => Err(HookError::Failed { path, how: how(status), output }),
        None => Err(HookError::Hangs { path, limit, output }),
    }
}

/// Runs all scripts of a directory in the order of their names, each like [`run`]. The first one
/// that fails is the last one. `report` gets each script as it has ended well. Blocks.
pub fn run_all(
    folder: &Path,
    arguments: &[&str],
    variables: &[(&str, &str)],
    limit: Duration,
    report: &mut dyn FnMut(&Ran),
) -> Result<(), HookError> {
    for script in scripts(folder)? {
        report(&run(&script, arguments, variables, limit)?);
    }
    Ok(())
}

fn how(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "an unknown status".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use blockd_media::clock::Clock;

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir();
            let path = path.join(format!("blockd-hook-{name}-{}", std::process::id()));
            std::fs::create_dir(&path).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            Self(path)
        }

        fn script(&self, name: &str, text: &str, mode: u32) -> PathBuf {
            let path = self.0.join(name);
            std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            path
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).unwrap();
        }
    }

    const LONG: Duration = Duration::from_secs(30);

    /// Runs a new file. Another test's child may still have it open for writing, for the moment
    /// between its fork and its exec: the kernel calls it busy then.
    fn run_new(path: &Path, words: &[&str], limit: Duration) -> Result<Ran, HookError> {
        loop {
            match run(path, words, &[("BLOCKD_NODE", "n")], limit) {
                Err(HookError::Io { source, .. })
                    if source.kind() == io::ErrorKind::ExecutableFileBusy => {}
                other => return other,
            }
        }
    }

    #[test]
    fn a_script_gets_its_words_and_what_it_prints_is_kept() {
        let folder = Folder::new("words");
        let path = folder.script("a", "echo \"$1 $BLOCKD_NODE\"; echo problem >&2", 0o755);
        let ran = run_new(&path, &["word"], LONG).unwrap();
        assert_eq!(ran.output, "word n\nproblem");
        assert_eq!(ran.path, path);
    }

    #[test]
    fn scripts_run_in_the_order_of_their_names_and_hidden_ones_do_not() {
        let folder = Folder::new("order");
        for name in ["20-b", "10-a", "9-c", ".hidden"] {
            folder.script(name, "true", if name == ".hidden" { 0o600 } else { 0o700 });
        }
        let found = scripts(&folder.0).unwrap();
        let names: Vec<_> = found.iter().map(|path| path.file_name().unwrap()).collect();
        assert_eq!(names, ["10-a", "20-b", "9-c"]);
        assert!(scripts(&folder.0.join("none")).unwrap().is_empty());
    }

    #[test]
    fn files_that_cannot_or_must_not_be_run_are_refused_by_name() {
        let folder = Folder::new("refused");
        let cases = [(0o644, "is not executable"), (0o775, "can be written by other users")];
        for (mode, problem) in cases {
            let path = folder.script("script", "true", mode);
            let error = scripts(&folder.0).unwrap_err().to_string();
            assert_eq!(error, format!("{} {problem}", path.display()));
            assert_eq!(run(&path, &[], &[], LONG).unwrap_err().to_string(), error);
        }
        std::fs::remove_file(folder.0.join("script")).unwrap();
        std::fs::create_dir(folder.0.join("folder")).unwrap();
        let error = scripts(&folder.0).unwrap_err().to_string();
        assert!(error.ends_with("/folder is not a file"), "{error}");
        std::fs::set_permissions(&folder.0, std::fs::Permissions::from_mode(0o777)).unwrap();
        let error = scripts(&folder.0).unwrap_err().to_string();
        assert_eq!(error, format!("{} can be written by other users", folder.0.display()));
    }

    #[test]
    fn a_script_that_fails_says_how_and_what_it_last_said() {
        let folder = Folder::new("fails");
        let path = folder.script("a", "echo first; echo no power switch; exit 3", 0o755);
        let error = run_new(&path, &[], LONG).unwrap_err().to_string();
        assert!(error.ends_with("/a ended with exit code 3: no power switch"), "{error}");
        let path = folder.script("b", "kill -9 $$", 0o755);
        let error = run_new(&path, &[], LONG).unwrap_err().to_string();
        assert!(error.ends_with("/b ended with signal 9"), "{error}");
        let path = folder.0.join("c");
        std::fs::write(&path, "no program").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert!(run_new(&path, &[], LONG).is_err());
    }

    #[test]
    fn processes_that_a_script_leaves_behind_block_nothing() {
        let folder = Folder::new("behind");
        let path = folder.script("a", "echo started; sleep 5 & exit 0", 0o755);
        let clock = Clock::start();
        assert_eq!(run_new(&path, &[], LONG).unwrap().output, "started");
        assert!(clock.elapsed() < Duration::from_secs(4), "{:?}", clock.elapsed());
    }

    #[test]
    fn a_script_that_hangs_is_ended_with_what_it_started() {
        let folder = Folder::new("hangs");
        let path = folder.script("a", "sleep 1000 & echo $!; wait", 0o755);
        let clock = Clock::start();
        let error = run_new(&path, &[], Duration::from_millis(300)).unwrap_err();
        assert!(clock.elapsed() < Duration::from_secs(20), "{:?}", clock.elapsed());
        let HookError::Hangs { output, .. } = &error else { panic!("{error}") };
        let state = || std::fs::read_to_string(format!("/proc/{output}/stat"));
        let clock = Clock::start();
        // The process that inherits it may leave it as a zombie.
        while state().is_ok_and(|text| !text.contains(") Z ")) {
            assert!(clock.elapsed() < LONG, "{error}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn more_output_than_is_kept_holds_nothing_up() {
        let folder = Folder::new("output");
        let path = folder.script("a", "head -c 1000000 /dev/zero | tr '\\0' x", 0o755);
        let ran = run_new(&path, &[], LONG).unwrap();
        assert_eq!(ran.output.len(), MAX_OUTPUT_BYTES);
    }
}
