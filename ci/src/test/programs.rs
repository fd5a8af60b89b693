//! The programs that test. Those that fill the cores run one after the other; those that
//! mostly wait, for a machine to boot or a daemon to die, two at a time.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;

use anyhow::{Context, Result};

use crate::steps::{Outcome, Steps};
use crate::{built, command};

/// A run of a program: its name, the arguments of the short form, and those of the long one.
type Program = (&'static str, &'static [&'static str], &'static [&'static str]);

/// Programs that use all cores.
const BUSY: [Program; 10] = [
    ("model", &["--seconds", "10"], &["--seconds", "60"]),
    ("model", &["--mutate"], &["--mutate"]),
    ("model", &["hosts", "--seconds", "8"], &["hosts", "--seconds", "60"]),
    ("model", &["hosts", "--mutate"], &["hosts", "--mutate"]),
    ("sim", &["--seconds", "20", "--seed", "1"], &["--seconds", "300", "--seed", "1"]),
    ("sim", &["--mutate"], &["--mutate"]),
    ("crash", &[], &[]),
    // These measure, so that nothing else runs beside them, and in memory, so that a disk that
    // others use as well has no part in it.
    ("neighbours", &["--short", "--folder", "/dev/shm"], &[]),
    ("vm", &["neighbours", "--short", "--kernel", "6.12"], &["neighbours"]),
    // Beside others a guest's kernel has panicked at its target, with memory and registers that did
    // not belong together: QEMU's emulation copies memory while the guest writes to it.
    ("vm", &["hosts", "migrate", "--short", "--kernel", "6.12"], &["hosts", "migrate"]),
];

/// Programs that use less than one core. Short forms share the two kernels among them; the longest
/// come first.
const WAITING: [Program; 21] = [
    ("vm", &["fs", "--short", "--kernel", "6.12"], &["fs"]),
    ("vm", &["csi", "--short", "--kernel", "6.12"], &["csi", "--long"]),
    ("vm", &["cluster", "--short", "--kernel", "7"], &["cluster"]),
    ("vm", &["pmem", "--short", "--kernel", "6.12"], &["pmem"]),
    ("vm", &["kill", "--short", "--kernel", "7"], &["kill"]),
    ("vm", &["space", "--short", "--kernel", "6.12"], &["space"]),
    ("vm", &["power", "--short", "--kernel", "7"], &["power"]),
    ("vm", &["moves", "--short", "--kernel", "7"], &["moves"]),
    ("vm", &["stress", "--short", "--kernel", "6.12"], &["stress"]),
    ("vm", &["thin", "--short", "--kernel", "6.12"], &["thin"]),
    ("vm", &["health", "--short", "--kernel", "7"], &["health"]),
    ("vm", &["safety", "--short", "--kernel", "6.12"], &["safety"]),
    ("csi_conformance", &[], &[]),
    ("kill", &["--rounds", "3"], &["--rounds", "200"]),
    ("kill", &["--evacuate", "--rounds", "6"], &["--evacuate", "--rounds", "100"]),
    ("story", &["--short"], &[]),
    (
        "counts_bench",
        &["--baseline", "bench/baseline/0.1.json", "--only", " 4k, 32"],
        &["--baseline", "bench/baseline/0.1.json"],
    ),
    ("vm", &["logwrites", "--short", "--kernel", "6.12"], &["logwrites"]),
    ("vm", &["demo", "--short", "--kernel", "7"], &["demo"]),
    ("vm", &["hosts", "fence", "--short", "--kernel", "7"], &["hosts", "fence"]),
    ("vm", &["hosts", "many", "--short"], &["hosts", "many"]),
];

/// Runs all of them.
pub(super) fn run(steps: &mut Steps, root: &Path, long: bool) {
    let mut is_built = false;
    steps.run("model and simulator", || {
        let mut build = command::cargo(root);
        command::run(build.args(["build", "--release", "--package", "blockd-sim", "--bins"]))?;
        is_built = true;
        Ok(Outcome::Passed)
    });
    if !is_built {
        return;
    }
    for program in &BUSY {
        let (name, mut command) = prepared(root, program, long);
        steps.run(&name, || command::run(&mut command).map(|()| Outcome::Passed));
    }
    // The output of the long forms is of interest as well.
    let at_a_time = if long { 1 } else { 2 };
    let waiting = WAITING.iter().map(|program| prepared(root, program, long)).collect();
    together(steps, root, waiting, at_a_time);
}

/// Returns the name of the program's step, and its command.
fn prepared(root: &Path, program: &Program, long: bool) -> (String, Command) {
    let (binary, short, extended) = *program;
    let arguments = if long { extended } else { short };
    let mut command = Command::new(command::target_dir(root).join("release").join(binary));
    command.current_dir(root).args(arguments).envs(built::environment(root)).stdin(Stdio::null());
    ([&[binary], arguments].concat().join(" "), command)
}

/// Runs some at a time. The output of each is shown when it has ended.
fn together(
    steps: &mut Steps,
    root: &Path,
    commands: VecDeque<(String, Command)>,
    at_a_time: usize,
) {
    let outputs = command::target_dir(root).join("tmp");
    let (waiting, steps) = (Mutex::new(commands), Mutex::new(steps));
    let next = || waiting.lock().ok().and_then(|mut all| all.pop_front());
    let one_after_the_other = |thread: usize| {
        while let Some((name, mut command)) = next() {
            let file = outputs.join(format!("program-{thread}"));
            let watch = blockd_testkit::clock::Clock::start();
            let result = into_file(&mut command, &file).map(|()| Outcome::Passed);
            let text = fs::read(&file).unwrap_or_default();
            let Ok(mut steps) = steps.lock() else { return };
            steps.ended(&name, watch.elapsed(), &String::from_utf8_lossy(&text), result);
        }
    };
    std::thread::scope(|scope| {
        for thread in 0..at_a_time {
            scope.spawn(move || one_after_the_other(thread));
        }
    });
}

fn into_file(command: &mut Command, output: &Path) -> Result<()> {
    if let Some(folder) = output.parent() {
        fs::create_dir_all(folder)?;
    }
    let file = File::create(output).with_context(|| output.display().to_string())?;
    command::run(command.stdout(file.try_clone()?).stderr(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_run_at_a_time_are_counted() {
        let root = std::env::temp_dir().join(format!("ci-programs-{}", std::process::id()));
        let sh = |name: &str, line: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", line]);
            (name.to_owned(), command)
        };
        let commands = [sh("a", "echo 1"), sh("b", "echo 2 >&2; exit 1"), sh("c", "true")];
        let mut steps = Steps::new();
        together(&mut steps, &root, commands.into(), 2);
        assert_eq!(steps.summary(), "failed: b\n2 passed, 1 failed");
        let _ = fs::remove_dir_all(root);
    }
}
