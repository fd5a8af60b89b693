//! The programs that cargo builds of tests, run four at a time: they mostly wait.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::command;

/// Programs that run at a time: twice the cores of the smallest machine this is for, which two or
/// three do not fill.
const AT_A_TIME: usize = 4;

/// The longest tests, which begin first, or the last of them would run alone in the end.
const LONG: [&str; 9] = [
    "ublk",
    "extend",
    "nodes",
    "python_reader",
    "virtual_machine",
    "state_machine",
    "missing_pools",
    "daemon_life",
    "csi_kill",
];

/// A program with tests.
#[derive(Debug, PartialEq, Eq)]
struct Binary {
    program: PathBuf,
    /// Where cargo would start it.
    folder: PathBuf,
}

/// Builds the tests of the workspace, runs all of them, and prints their output.
///
/// # Errors
/// When something does not build, or a test fails, after all have run.
pub(super) fn run(root: &Path, environment: &[(&str, &Path)]) -> Result<String> {
    let mut cargo = super::tests_cargo(root);
    cargo.args(["--workspace", "--no-run", "--message-format", "json-render-diagnostics"]);
    cargo.stderr(Stdio::inherit());
    let messages = command::built(&mut cargo)?;
    let mut waiting: Vec<Binary> = messages.lines().filter_map(binary).collect();
    if waiting.is_empty() {
        bail!("cargo has built no tests");
    }
    waiting.sort_by_key(Binary::turn);
    let outputs = command::target_dir(root).join("tmp");
    fs::create_dir_all(&outputs)?;
    let waiting = Mutex::new(waiting.into_iter().enumerate().collect::<VecDeque<_>>());
    let printed = Mutex::new((String::new(), Vec::new()));
    let next = || waiting.lock().ok().and_then(|mut all| all.pop_front());
    let one_after_the_other = || {
        while let Some((number, binary)) = next() {
            let file = outputs.join(format!("tests-{number}"));
            let result = binary.run(&file, environment);
            let text = fs::read(&file).unwrap_or_default();
            let _ = fs::remove_file(&file);
            let Ok(mut printed) = printed.lock() else { return };
            println!("     Running {}", binary.program.display());
            print!("{}", String::from_utf8_lossy(&text));
            printed.0.push_str(&String::from_utf8_lossy(&text));
            let failures = failures(&String::from_utf8_lossy(&text));
            printed.1.extend(result.err().map(|error| format!("{error:#}\n{failures}")));
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(one_after_the_other);
        }
    });
    let (text, failed) = printed.into_inner().map_err(|_| anyhow::anyhow!("a thread is gone"))?;
    if !failed.is_empty() {
        bail!("{}", failed.join("\n"));
    }
    Ok(text)
}

impl Binary {
    /// The sooner the longer it takes; the others stay as they came.
    fn turn(&self) -> usize {
        let file = self.program.file_name().unwrap_or_default().to_string_lossy();
        // Cargo puts a hash behind the name.
        let name = file.rsplit_once('-').map_or(&*file, |(name, _)| name);
        LONG.iter().position(|long| *long == name).unwrap_or(LONG.len())
    }

    fn run(&self, output: &Path, environment: &[(&str, &Path)]) -> Result<()> {
        let file = File::create(output).with_context(|| output.display().to_string())?;
        let mut command = Command::new(&self.program);
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        command.envs(environment.iter().copied());
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        command::run(&mut command)
    }
}

/// The first lines of each failed test's output, mostly with its panic: the rest may be cut from a
/// log.
fn failures(output: &str) -> String {
    /// An empty line, where it panicked, and the two sides of a comparison.
    const LINES: usize = 6;

    let lines: Vec<&str> = output.lines().collect();
    let begin = |line: &str| line.starts_with("---- ") && line.ends_with(" stdout ----");
    let begins = lines.iter().enumerate().filter(|(_, line)| begin(line));
    begins
        .map(|(at, _)| {
            lines[at..].iter().take(LINES).fold(String::new(), |text, line| text + line + "\n")
        })
        .collect()
}

/// Parses a line of cargo's output; returns the built program if it has tests.
fn binary(line: &str) -> Option<Binary> {
    let message: Value = serde_json::from_str(line).ok()?;
    if message["profile"]["test"] != Value::Bool(true) {
        return None;
    }
    let program = PathBuf::from(message["executable"].as_str()?);
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_path_buf();
    Some(Binary { program, folder })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_ones_come_first() {
        let binary =
            |name: &str| Binary { program: format!("/t/{name}").into(), folder: "/w".into() };
        let mut all = ["nbd-1a", "extend-2b", "extend_codec-3c", "ublk-4d"].map(binary);
        all.sort_by_key(Binary::turn);
        assert_eq!(all, ["ublk-4d", "extend-2b", "nbd-1a", "extend_codec-3c"].map(binary));
    }

    #[test]
    fn failed_tests_are_named_with_their_panics() {
        let output = "running 2 tests\ntest a ... ok\ntest b ... FAILED\n\nfailures:\n\n\
            ---- b stdout ----\n\nthread 'b' panicked at b.rs:1:1:\nassertion failed\n  left: 1\n \
            right: 2\nnote: run\n\n\nfailures:\n    b\n";
        let expected = "---- b stdout ----\n\nthread 'b' panicked at b.rs:1:1:\nassertion failed\n  \
            left: 1\n right: 2\n";
        assert_eq!(failures(output), expected);
        assert_eq!(failures("running 1 test\ntest a ... ok\n"), "");
    }

    #[test]
    fn programs_with_tests_are_found_in_cargos_output() {
        let line = |test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml",
                    "profile":{{"test":{test}}},"executable":{executable}}}"#
            )
        };
        let found = binary(&line(true, r#""/t/a-1""#));
        let expected = Binary { program: "/t/a-1".into(), folder: "/w/a".into() };
        assert_eq!(found, Some(expected));
        assert_eq!(binary(&line(false, r#""/t/a""#)), None);
        assert_eq!(binary(&line(true, "null")), None);
        assert_eq!(binary("not JSON"), None);
    }
}
