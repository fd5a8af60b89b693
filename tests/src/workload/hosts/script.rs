//! Lines of shell in the laboratory, each with its output, its end and its time.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::super::Run;
use super::lab::Lab;

const MACHINES: [&str; 3] = ["array", "a", "b"];

/// A line that is nothing for a shell.
const LAB: &str = "lab";

/// Runs lines of the form `MACHINE: LINE` or `lab: STEP`, one after the other.
///
/// # Errors
/// When a line names no machine, or a machine is gone. A line that fails is part of the output.
pub fn run(run: &Run, lines: &[String]) -> Result<()> {
    for line in lines {
        if parts(line)?.0 == LAB {
            step(None, line)?;
        }
    }
    let mut lab = Lab::start(run, 0)?;
    for line in lines {
        let (name, words) = parts(line)?;
        println!("{name}$ {words}");
        let Some(machine) = MACHINES.iter().position(|machine| *machine == name) else {
            step(Some(&lab), line)?;
            continue;
        };
        let answer = lab.machine(machine).run(words)?;
        println!("{}\n[{}, {:.1} s]", answer.text, answer.status, answer.seconds);
    }
    lab.end()
}

/// A machine or the laboratory, and the words after its colon.
fn parts(line: &str) -> Result<(&str, &str)> {
    line.split_once(':')
        .map(|(name, words)| (name, words.trim()))
        .filter(|(name, _)| *name == LAB || MACHINES.contains(name))
        .with_context(|| format!("{line:?} does not begin with array:, a:, b: or lab:"))
}

/// Does something to a machine from outside, or checks only that the line can be understood.
fn step(lab: Option<&Lab>, line: &str) -> Result<()> {
    let words: Vec<&str> = parts(line)?.1.split_whitespace().collect();
    let machine = |name: &str| MACHINES.iter().position(|machine| *machine == name);
    match words[..] {
        ["sleep", seconds] => {
            let seconds = seconds.parse().with_context(|| line.to_owned())?;
            if lab.is_some() {
                std::thread::sleep(Duration::from_secs(seconds));
            }
            Ok(())
        }
        [what @ ("cut" | "join" | "freeze" | "thaw"), name] if machine(name).is_some() => {
            let (Some(lab), Some(number)) = (lab, machine(name)) else { return Ok(()) };
            match what {
                "freeze" => lab.running(number).freeze(),
                "thaw" => lab.running(number).thaw(),
                _ => {
                    lab.network.cut(number, what == "cut");
                    Ok(())
                }
            }
        }
        _ => bail!("{line:?}: sleep SECONDS, or cut, join, freeze, thaw of a machine"),
    }
}
