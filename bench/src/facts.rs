//! Facts about the machine on which the figures were measured.

use std::process::Command;

use serde_json::{Map, Value, json};

/// The machine's facts, in the order in which they are printed.
#[must_use]
pub fn facts() -> Vec<(&'static str, String)> {
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    vec![
        ("cpu", field("/proc/cpuinfo", "model name")),
        ("cores", cores.to_string()),
        ("memory", field("/proc/meminfo", "MemTotal")),
        ("kernel", file("/proc/sys/kernel/osrelease")),
        ("rustc", output("rustc", "--version")),
        ("fio", output("fio", "--version")),
        ("load", file("/proc/loadavg")),
    ]
}

/// Prints the facts, one a line.
pub fn print() {
    for (name, value) in facts() {
        println!("{name:<8} {value}");
    }
}

/// Like [`print()`], without facts that are unknown here.
pub fn print_known() {
    for (name, value) in facts().iter().filter(|(_, value)| *value != UNKNOWN) {
        println!("{name:<8} {value}");
    }
}

/// The facts as a JSON object.
#[must_use]
pub fn to_json() -> Value {
    let facts = facts().into_iter().map(|(name, value)| (name.to_owned(), json!(value)));
    Value::Object(facts.collect::<Map<_, _>>())
}

const UNKNOWN: &str = "unknown";

fn file(path: &str) -> String {
    std::fs::read_to_string(path).map_or_else(|_| UNKNOWN.to_owned(), |s| s.trim().to_owned())
}

fn field(path: &str, name: &str) -> String {
    let text = file(path);
    let value = text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_owned())
    });
    value.unwrap_or_else(|| UNKNOWN.to_owned())
}

fn output(program: &str, argument: &str) -> String {
    let output = Command::new(program).arg(argument).output();
    output.map_or_else(
        |_| UNKNOWN.to_owned(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    )
}
