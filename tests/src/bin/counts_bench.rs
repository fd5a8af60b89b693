//! Boots a virtual machine whose clock counts instructions, and prints what operations cost a
//! server there: `cargo ci bench counts` builds and starts this.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::tools;
use blockd_tests::vm::{Kernel, Vm, Which};
use clap::Parser;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Counts the server's instructions (user and kernel), system calls and context switches for each
/// operation, over NBD and ublk, in a virtual machine with one processor. Nothing else that runs on
/// this machine changes the counts, and no root is needed.
#[derive(Parser, Debug)]
struct Arguments {
    /// The daemon's program, built alone [default: that of the tests]
    #[arg(long)]
    blockd: Option<PathBuf>,
    /// Another build of the daemon, such as one from before a change: it is counted in a boot of
    /// its own, and the run fails when a row of 4 KiB has more than 2 % more instructions, in the
    /// median of three boots
    #[arg(long)]
    before: Option<PathBuf>,
    /// The program that counts [default: `counts` beside this one]
    #[arg(long)]
    runner: Option<PathBuf>,
    /// Counts other servers too, on the same kind of disk: nbdkit with a file and with memory,
    /// nbd-server, qemu-nbd with O_DIRECT; with this program of rublk, also its loop target
    #[arg(long, conflicts_with = "before")]
    peers: bool,
    /// rublk's program
    #[arg(long, requires = "peers")]
    rublk: Option<PathBuf>,
    /// Fails when a row of 4 KiB has more than 3 % more instructions outside the kernel than this
    /// file says, in the median of three boots; the kernel's own are held to it as well if the file
    /// is of the same kernel
    #[arg(long, conflicts_with = "before")]
    baseline: Option<PathBuf>,
    /// Writes such a file
    #[arg(long, conflicts_with_all = ["before", "baseline"])]
    write_baseline: Option<PathBuf>,
    /// The kernel: 7, or 6.12, which has no zero copy
    #[arg(long, default_value = "7")]
    kernel: String,
    /// An eighth of the operations; two boots agree less well
    #[arg(long)]
    quick: bool,
    /// Only rows with this in their name, as "nbd read 4k, 1" or "ublk copy"
    #[arg(long)]
    only: Option<String>,
    /// Where random numbers begin in each boot. With the same one, two boots of a program agree to
    /// the last instruction; with another one they show how far a row strays by chance
    #[arg(long, default_value_t = 1)]
    seed: u32,
    /// Where the figures go as JSON
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Before a row as JSON.
const ROW: &str = "@@row ";
/// The last line, with how the program in the machine ended.
const ENDED: &str = "@@counts ";
/// After this the machine is stopped: five times what a boot with all rows takes.
const LIMIT: Duration = Duration::from_secs(20 * 60);
/// How many more instructions a row of 4 KiB may have than before.
const MOST: f64 = 1.02;
/// How many more than the baseline: a release's sum of small changes.
const MOST_OF_BASELINE: f64 = 1.03;
/// In the names of rows of first writes.
const FIRST: &str = "first write";
/// In the names of rows of volumes with composite entries: as a row without the word, which they
/// are held to. Builds from before those entries have nothing to compare.
const COMPOSITE: &str = "composite ";
/// How many times as many instructions they may have.
const MOST_OF_PLAIN: f64 = 1.0 / 0.9;
/// The daemon's name among servers.
const OURS: &str = "blockd";
/// How often a row with too many is counted in all, in boots with different seeds: the median
/// counts. The program's own share of two boots differs by a tenth of the margin at most, the
/// kernel's can differ by half of it.
const COUNTS: usize = 3;
/// In the names of rows that are held to [`MOST`].
const HELD: &str = " 4k,";

/// Tracing, and a scheduler that lets everyone run until it waits: otherwise it depends on small
/// things whether the client is woken by each reply or by the last of many.
const SCRIPT: &str = "mount -t tracefs tracefs /sys/kernel/tracing || exit 1\n\
                      mount -t debugfs debugfs /sys/kernel/debug || exit 1\n\
                      echo NO_WAKEUP_PREEMPTION >/sys/kernel/debug/sched/features || exit 1\n\
                      echo 100000000 >/sys/kernel/debug/sched/base_slice_ns || exit 1\n";
/// Of the size that the program in the machine uses.
const RAMDISKS: &str = "brd rd_nr=4 rd_size=2097152";

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("bench counts: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether no row has too many instructions.
fn run(arguments: &Arguments) -> Result<bool> {
    let which = Which::newer_or_older(&arguments.kernel, "zero copy is not counted")?;
    println!("kernel {}, one processor, 1 ns for each instruction", Kernel::get(which)?.release);
    let count =
        |blockd: &Path, only: Option<&str>, seed| boot(arguments, blockd, which, only, seed);
    let only = arguments.only.as_deref();
    let blockd = &arguments.blockd.clone().map_or_else(tools::blockd, Ok)?;
    let rows = count(blockd, only, arguments.seed)?;
    let Some(before) = &arguments.before else {
        print_alone(&rows);
        write_json(arguments, &rows, None)?;
        let composite = check_composite(&rows);
        let release = &Kernel::get(which)?.release;
        if let Some(path) = &arguments.write_baseline {
            Baseline::new(release, &rows).write(path)?;
        }
        let Some(path) = &arguments.baseline else { return Ok(composite) };
        let again = |row: &str, seed| count(blockd, Some(row), seed);
        let held = Baseline::read(path)?.check(release, &rows, arguments.seed, again)?;
        return Ok(held && composite);
    };
    let earlier = count(before, only, arguments.seed)?;
    ensure!(rows.len() == earlier.len(), "{} rows, before {}", rows.len(), earlier.len());
    print_both(&rows, &earlier);
    write_json(arguments, &rows, Some(&earlier))?;
    let mut worse = Vec::new();
    for (row, earlier) in rows.iter().zip(&earlier).filter(|(row, before)| row.is_worse(before)) {
        let mut ratios = vec![row.ratio(earlier, "instructions")];
        for seed in (arguments.seed.wrapping_add(1)..).take(COUNTS - 1) {
            let again = count(blockd, Some(row.name()), seed)?;
            let earlier = count(before, Some(row.name()), seed)?;
            print_both(&again, &earlier);
            let pair = again.first().zip(earlier.first()).context("no row")?;
            ratios.push(pair.0.ratio(pair.1, "instructions"));
        }
        let text = ratios.iter().map(|ratio| format!("{ratio:.4}")).collect::<Vec<_>>().join(", ");
        println!("\n{}: counted {COUNTS} times, {text}", row.name());
        if !is_held(median(ratios)) {
            worse.push(row.name());
        }
    }
    if !worse.is_empty() {
        println!("\nmore than 2 % more instructions than before: {}", worse.join("; "));
    }
    Ok(worse.is_empty())
}

/// The rows of one program with `only` in their names, or all.
fn boot(
    arguments: &Arguments,
    blockd: &Path,
    which: Which,
    only: Option<&str>,
    seed: u32,
) -> Result<Vec<Row>> {
    let runner = match &arguments.runner {
        Some(runner) => runner.clone(),
        None => {
            std::env::current_exe().context("where this program lies")?.with_file_name("counts")
        }
    };
    let vm = Vm::new("bench-counts")
        .kernel(which)
        .counting_instructions(seed)
        .limit(LIMIT)
        .modules(&[RAMDISKS, "ublk_drv"])
        .file(blockd, "/usr/bin/blockd", true)
        .file(&runner, "/usr/bin/counts", true);
    let mut words = "--blockd /usr/bin/blockd".to_owned();
    let vm = if arguments.peers { with_peers(vm, arguments, &mut words)? } else { vm };
    if arguments.quick {
        words += " --quick";
    }
    if let Some(only) = only {
        words += &format!(" --only '{only}'");
    }
    let mut running = vm.start(&format!("{SCRIPT}/usr/bin/counts {words}; echo '{ENDED}'$?"))?;
    let mut rows = Vec::new();
    let status = loop {
        // Every line contains nothing.
        let line = running.wait_for("")?;
        if let Some(row) = line.strip_prefix(ROW) {
            rows.push(Row(serde_json::from_str(row).with_context(|| row.to_owned())?));
        } else if let Some(status) = line.strip_prefix(ENDED) {
            break status.trim().to_owned();
        } else {
            println!("{line}");
        }
    };
    let output = running.finish()?;
    ensure!(status == "0", "{}: the program in the machine ended with {status}", blockd.display());
    println!("{}: {:.0} s", blockd.display(), output.seconds);
    Ok(rows)
}

/// Puts the other servers into the machine.
fn with_peers(vm: Vm, arguments: &Arguments, words: &mut String) -> Result<Vm> {
    *words += " --peers";
    let mut vm = vm.programs(&["qemu-nbd", "nbdkit", "nbd-server"]);
    let shown = tools::output(Command::new("nbdkit").arg("--dump-config"))?;
    let shown = String::from_utf8_lossy(&shown).into_owned();
    let plugins = shown.lines().find_map(|line| line.strip_prefix("plugindir="));
    let plugins = Path::new(plugins.context("nbdkit does not say where its plugins are")?);
    for name in ["file", "memory"] {
        let plugin = plugins.join(format!("nbdkit-{name}-plugin.so"));
        vm = vm.file(&plugin, &plugin.to_string_lossy(), true);
    }
    Ok(match &arguments.rublk {
        Some(rublk) => vm.file(rublk, "/usr/bin/rublk", true),
        None => vm,
    })
}

/// Whether a ratio is within the limit. One that is no number is no agreement either.
fn is_held(ratio: f64) -> bool {
    ratio <= MOST
}

fn median(mut ratios: Vec<f64>) -> f64 {
    ratios.sort_by(f64::total_cmp);
    ratios.get(ratios.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The costs of rows at a release.
#[derive(Debug, Serialize, Deserialize)]
struct Baseline {
    /// The kernel's release.
    kernel: String,
    /// Instructions of each operation by the row's name.
    rows: BTreeMap<String, Expected>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Expected {
    instructions: f64,
    user: f64,
}

impl Baseline {
    fn new(kernel: &str, rows: &[Row]) -> Self {
        let expected = |row: &Row| {
            let round = |name: &str| row.figure(name).round();
            Expected { instructions: round("instructions"), user: round("user") }
        };
        let ours = rows.iter().filter(|row| row.is_ours());
        let rows = ours.map(|row| (row.name().to_owned(), expected(row))).collect();
        Self { kernel: kernel.to_owned(), rows }
    }

    fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
        serde_json::from_slice(&text).with_context(|| path.display().to_string())
    }

    fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
    }

    /// How many times as many instructions a row has; with another kernel only those outside it
    /// are compared. `None` for rows that are not held to it.
    fn ratio(&self, release: &str, row: &Row) -> Option<f64> {
        let expected = self.rows.get(row.name()).filter(|_| row.is_held_to_limits())?;
        let user = row.figure("user") / expected.user;
        let all = row.figure("instructions") / expected.instructions;
        // A figure that is missing must not hide behind the other one.
        let worst = if user.is_nan() || all.is_nan() { f64::NAN } else { user.max(all) };
        // How many commits the kernel writes to the disk while first writes are counted depends on
        // where the counting begins.
        let is_first = row.name().contains(FIRST);
        Some(if self.kernel == release && !is_first { worst } else { user })
    }

    /// Whether no row has too many. One that has is counted again, in boots with other seeds.
    fn check(
        &self,
        release: &str,
        rows: &[Row],
        seed: u32,
        mut again: impl FnMut(&str, u32) -> Result<Vec<Row>>,
    ) -> Result<bool> {
        if self.kernel != release {
            println!("\nthe baseline is of kernel {}: only user instructions count", self.kernel);
        }
        let mut held = true;
        for row in rows {
            let Some(first) = self.ratio(release, row) else { continue };
            println!("{}: {first:.4} of the baseline", row.name());
            if first <= MOST_OF_BASELINE {
                continue;
            }
            let mut ratios = vec![first];
            for seed in (seed.wrapping_add(1)..).take(COUNTS - 1) {
                let rows = again(row.name(), seed)?;
                ratios
                    .push(rows.first().and_then(|row| self.ratio(release, row)).context("no row")?);
            }
            println!("{}: counted {COUNTS} times: {ratios:.4?}", row.name());
            let is_within = median(ratios) <= MOST_OF_BASELINE;
            if !is_within {
                println!("{}: more than 3 % above the baseline", row.name());
                held = false;
            }
        }
        Ok(held)
    }
}

/// The cost of one row's operations.
#[derive(Clone, Debug)]
struct Row(Value);

impl Row {
    fn name(&self) -> &str {
        self.0["name"].as_str().unwrap_or_default()
    }

    fn server(&self) -> &str {
        self.0["server"].as_str().unwrap_or_default()
    }

    fn is_ours(&self) -> bool {
        self.server() == OURS
    }

    fn figure(&self, name: &str) -> f64 {
        self.0[name].as_f64().unwrap_or(f64::NAN)
    }

    fn ratio(&self, before: &Self, name: &str) -> f64 {
        self.figure(name) / before.figure(name)
    }

    fn is_held_to_limits(&self) -> bool {
        self.name().contains(HELD)
    }

    fn is_worse(&self, before: &Self) -> bool {
        let compared = self.is_held_to_limits() && !self.name().contains(COMPOSITE);
        compared && !is_held(self.ratio(before, "instructions"))
    }
}

/// Prints rows with composite entries beside those without; whether all are within the limit.
fn check_composite(rows: &[Row]) -> bool {
    let mut held = true;
    for row in rows.iter().filter(|row| row.name().contains(COMPOSITE)) {
        let plain = row.name().replace(COMPOSITE, "");
        let plain = rows.iter().find(|one| one.is_ours() && one.name() == plain);
        let Some(ratio) = plain.map(|plain| row.ratio(plain, "instructions")) else { continue };
        println!("\n{}: {ratio:.4} of those without (at most {MOST_OF_PLAIN:.3})", row.name());
        held &= ratio <= MOST_OF_PLAIN;
    }
    held
}

/// Every row, those of other servers below ours of the same name.
fn print_alone(rows: &[Row]) {
    println!(
        "\n| each operation | server | instructions | ours / theirs | user | kernel | system \
         calls | switches |"
    );
    println!("|---|---|---:|---:|---:|---:|---:|---:|");
    let mut sorted: Vec<&Row> = rows.iter().collect();
    sorted.sort_by_key(|row| rows.iter().position(|ours| ours.name() == row.name()));
    for row in sorted {
        let ours = rows.iter().find(|one| one.is_ours() && one.name() == row.name());
        let ratio = match ours.filter(|_| !row.is_ours()) {
            Some(ours) => format!("{:.2}", ours.ratio(row, "instructions")),
            None => "-".to_owned(),
        };
        println!(
            "| {} | {} | {:.0} | {ratio} | {:.0} | {:.0} | {:.3} | {:.3} |",
            row.name(),
            row.server(),
            row.figure("instructions"),
            row.figure("user"),
            row.figure("kernel"),
            row.figure("system_calls"),
            row.figure("context_switches"),
        );
    }
}

/// Now and before in each column.
fn print_both(rows: &[Row], earlier: &[Row]) {
    println!(
        "\n| each operation: now, before | instructions | ratio | user | ratio | kernel | ratio \
         | system calls | switches |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|---:|---:|");
    for (row, before) in rows.iter().zip(earlier) {
        let mut line = format!("| {} |", row.name());
        for name in ["instructions", "user", "kernel"] {
            let (now, then) = (row.figure(name), before.figure(name));
            line += &format!(" {now:.0}, {then:.0} | {:.4} |", row.ratio(before, name));
        }
        for name in ["system_calls", "context_switches"] {
            line += &format!(" {:.3}, {:.3} |", row.figure(name), before.figure(name));
        }
        println!("{line}");
    }
}

fn write_json(arguments: &Arguments, rows: &[Row], before: Option<&[Row]>) -> Result<()> {
    let Some(path) = &arguments.json else { return Ok(()) };
    let values = |rows: &[Row]| rows.iter().map(|row| row.0.clone()).collect::<Vec<Value>>();
    let value = serde_json::json!({ "rows": values(rows), "before": before.map(values) });
    let text = serde_json::to_string_pretty(&value)?;
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, instructions: f64) -> Row {
        Row(serde_json::json!({ "server": OURS, "name": name, "instructions": instructions,
            "user": instructions / 2.0 }))
    }

    #[test]
    fn rows_are_held_to_the_baseline_of_the_same_kernel() {
        let baseline = Baseline::new("7.1", &[row("nbd read 4k, 1", 1000.0)]);
        let check = |release: &str, rows: &[f64]| {
            let mut left = rows[1..].iter();
            let again = |name: &str, _| Ok(vec![row(name, *left.next().unwrap())]);
            baseline.check(release, &[row("nbd read 4k, 1", rows[0])], 1, again).unwrap()
        };
        assert!(check("7.1", &[1029.0]));
        assert!(check("7.1", &[1031.0, 1029.0, 1029.0]));
        assert!(!check("7.1", &[1031.0, 1029.0, 1031.0]));
        // Of another kernel, only the program's own: half of these.
        assert!(!check("7.2", &[1031.0, 1029.0, 1031.0]));
        let kernel = |name: &str| {
            let mut row = row(name, 1000.0);
            row.0["instructions"] = 2000.0.into();
            row
        };
        let again = |name: &str, _| Ok(vec![kernel(name)]);
        assert!(baseline.check("7.2", &[kernel("nbd read 4k, 1")], 1, again).unwrap());
        assert!(!baseline.check("7.1", &[kernel("nbd read 4k, 1")], 1, again).unwrap());
        // Rows of which it says nothing, and long ones, are not held to it.
        assert!(baseline.check("7.1", &[row("nbd write 4k, 1", 9e9)], 1, again).unwrap());
    }

    #[test]
    fn only_short_operations_are_held_to_the_limit() {
        let before = row("nbd read 4k, 1", 1000.0);
        assert!(!row("nbd read 4k, 1", 1019.0).is_worse(&before));
        assert!(row("nbd read 4k, 1", 1021.0).is_worse(&before));
        let long = row("nbd read 128k, 8", 1000.0);
        assert!(!row("nbd read 128k, 8", 1500.0).is_worse(&long));
    }

    #[test]
    fn reads_of_composite_entries_are_held_to_those_of_others() {
        let held = |composite| {
            check_composite(&[
                row("nbd read 4k, 32", 900.0),
                row("nbd composite read 4k, 32", composite),
            ])
        };
        assert!(held(999.0));
        assert!(!held(1001.0));
        assert!(!held(f64::NAN));
        // A build from before them copies extents.
        let before = row("nbd composite read 4k, 32", 900.0);
        assert!(!row("nbd composite read 4k, 32", 999.0).is_worse(&before));
    }

    #[test]
    fn one_boot_of_three_that_strays_does_not_count() {
        assert!(is_held(median(vec![1.025, 1.012, 1.013])));
        assert!(!is_held(median(vec![1.025, 1.012, 1.021])));
        assert!(!is_held(median(vec![f64::NAN, 1.025, 1.012])));
    }

    #[test]
    fn a_row_without_a_figure_is_worse() {
        let before = row("nbd read 4k, 1", 1000.0);
        assert!(Row(serde_json::json!({ "name": "nbd read 4k, 1" })).is_worse(&before));
    }
}
