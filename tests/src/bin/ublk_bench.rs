//! Boots a virtual machine in which ublk devices are measured beside others: `cargo ci bench ublk`
//! builds and starts this.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use blockd_testkit::folder::Folder;
use blockd_tests::vm::{Drive, Vm, Which};
use clap::Parser;

/// Measures ublk devices in a virtual machine, beside rublk, the kernel's loop and dm-thin on the
/// same ramdisks. Nothing of this machine's devices is touched, and no root is needed.
#[derive(Parser, Debug)]
struct Arguments {
    /// The daemon's program, built alone
    #[arg(long)]
    blockd: PathBuf,
    /// Another build of the daemon, such as one from before a change: the two are compared in
    /// pairs, and nothing else is measured
    #[arg(long)]
    before: Option<PathBuf>,
    /// The program that measures
    #[arg(long)]
    runner: PathBuf,
    /// rublk's program
    #[arg(long)]
    rublk: PathBuf,
    /// The folder of the job files
    #[arg(long)]
    jobs: PathBuf,
    /// Persistent memory in place of ramdisks, and nothing but blocks that were written before
    #[arg(long)]
    pmem: bool,
    /// The kernel: 7, or 6.12, which has no zero copy
    #[arg(long, default_value = "7")]
    kernel: String,
    /// Two to four minutes: shorter runs, 3 pairs, fewer workloads. Resolves no claim
    #[arg(long)]
    quick: bool,
    /// Only what has this in its name: mapped/randread-1, first-touch/64k, after-snapshot,
    /// counts, restart, clones
    #[arg(long)]
    only: Option<String>,
    /// Only the others, without the daemon
    #[arg(long)]
    peers_only: bool,
    /// fio's engine: libaio or io_uring, which makes dm-thin much slower at depth 1
    #[arg(long)]
    engine: Option<String>,
    /// Seconds of each run
    #[arg(long)]
    seconds: Option<f64>,
    /// Interleaved pairs
    #[arg(long)]
    pairs: Option<usize>,
    /// Disks with the limits of a usual one in place of ramdisks: a twentieth of what a SATA SSD
    /// has, as the emulated processors have of a real one's speed
    #[arg(long)]
    limited: bool,
    /// MiB of the machine: most of it is for ramdisks
    #[arg(long, default_value_t = 8192)]
    memory: u32,
    /// Its processors. With two, the host needs two that are idle, or waking each other takes long
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// Where the figures go as JSON
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Before the line with everything as JSON.
const JSON: &str = "@@json ";
/// The last line, with how the bench ended.
const ENDED: &str = "@@bench ";
/// After this the machine is stopped. `after-snapshot` takes the longest, 45 minutes: it fills
/// volumes on slow disks 80 times.
const LIMIT: Duration = Duration::from_secs(60 * 60);

/// Ramdisks of the size and number that the bench uses, and tracing for its counts.
const BEFORE: &str = "rmmod brd; insmod /modules/*brd.ko* rd_nr=7 rd_size=2097152 || exit 1\n\
                      mount -t tracefs tracefs /sys/kernel/tracing || exit 1\n";

/// The limits of a SATA SSD, and how much slower an emulated processor is than a real one.
const SSD_IOPS: u64 = 90_000;
const SSD_BYTES_PER_SECOND: u64 = 550_000_000;
const SLOWER: u64 = 20;
/// Disks in place of the ramdisks, as many and as large.
const DISKS: usize = 7;
const DISK_BYTES: u64 = 2 << 30;
const BEFORE_LIMITED: &str = "mkdir /dev/bench; number=0; for disk in a b c d e f g; do \
                              ln -s /dev/vd$disk /dev/bench/$number || exit 1; \
                              number=$((number + 1)); done\n";

/// Three pieces of memory that the kernel takes for persistent, two of them character devices. They
/// have no labels, so the one namespace of each is made over.
const BEFORE_PMEM: &str = "for at in 0 2; do ndctl create-namespace -f -e namespace$at.0 \
                           -m devdax -a 2M -n blockd || exit 1; done\n";
const WORDS_PMEM: &str = "memmap=512M!1G memmap=512M!1536M memmap=512M!2G";

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("bench ublk: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether all of it could be measured.
fn run(arguments: &Arguments) -> Result<bool> {
    let which = Which::newer_or_older(&arguments.kernel, "zero copy is not measured")?;
    let mut vm = Vm::new("bench-ublk")
        .kernel(which)
        .memory(arguments.memory)
        .cpus(arguments.cpus)
        .limit(LIMIT)
        .modules(&["brd", "loop", "dm-thin-pool", "ublk_drv"])
        .programs(&["fio", "dmsetup", "losetup"])
        .file(&arguments.blockd, "/usr/bin/blockd", true)
        .file(&arguments.runner, "/usr/bin/bench-ublk", true)
        .file(&arguments.rublk, "/usr/bin/rublk", true);
    if arguments.pmem {
        vm = vm.words(WORDS_PMEM).programs(&["ndctl"]);
        vm = vm.modules(&["nd_e820", "nd_pmem", "nd_btt", "device_dax", "dax_pmem"]);
    }
    let folder = Folder::new("bench-ublk")?;
    if arguments.limited {
        vm = limited_disks(vm, folder.path())?;
    }
    if let Some(before) = &arguments.before {
        vm = vm.file(before, "/usr/bin/blockd-before", true);
    }
    let jobs = std::fs::read_dir(&arguments.jobs);
    for job in jobs.with_context(|| format!("read {}", arguments.jobs.display()))? {
        let job = job?;
        vm = vm.file(&job.path(), &format!("/jobs/{}", job.file_name().to_string_lossy()), false);
    }
    let before = match arguments {
        Arguments { pmem: true, .. } => BEFORE_PMEM,
        Arguments { limited: true, .. } => BEFORE_LIMITED,
        _ => BEFORE,
    };
    let script = format!("{before}/usr/bin/bench-ublk {}; echo '{ENDED}'$?", words(arguments));
    let mut running = vm.start(&script)?;
    let ended = loop {
        // Every line contains nothing.
        let line = running.wait_for("")?;
        if let Some(json) = line.strip_prefix(JSON) {
            if let Some(path) = &arguments.json {
                std::fs::write(path, json).with_context(|| format!("write {}", path.display()))?;
            }
        } else if let Some(status) = line.strip_prefix(ENDED) {
            break status.trim() == "0";
        } else {
            println!("{line}");
        }
    };
    let output = running.finish()?;
    println!("{:.0} s in all", output.seconds);
    Ok(ended)
}

/// Adds the disks with limits, full of zeroes: in a sparse file the first write to each place would
/// take longer than others, for the host's file system.
fn limited_disks(mut vm: Vm, folder: &Path) -> Result<Vm> {
    for number in 0..DISKS {
        let path = folder.join(format!("disk-{number}"));
        let mut file = File::create(&path)?;
        let written = std::io::copy(&mut std::io::repeat(0).take(DISK_BYTES), &mut file);
        written.and_then(|_| file.sync_all()).with_context(|| path.display().to_string())?;
        let (iops, bytes_per_second) = (SSD_IOPS / SLOWER, SSD_BYTES_PER_SECOND / SLOWER);
        vm = vm.drive(Drive::Limited { path, iops, bytes_per_second });
    }
    Ok(vm)
}

/// The arguments of the program in the machine.
fn words(arguments: &Arguments) -> String {
    let mut words = Vec::new();
    if !arguments.peers_only {
        words.push("--blockd /usr/bin/blockd".to_owned());
    }
    if arguments.before.is_some() {
        words.push("--before /usr/bin/blockd-before".to_owned());
    }
    if arguments.pmem {
        words.push("--pmem".to_owned());
    }
    if arguments.quick {
        words.push("--quick".to_owned());
    }
    if arguments.limited {
        let (iops, bytes) = (SSD_IOPS / SLOWER, SSD_BYTES_PER_SECOND / SLOWER);
        words.push(format!("--limits '{iops} requests and {bytes} bytes in a second each'"));
    }
    if let Some(only) = &arguments.only {
        words.push(format!("--only '{only}'"));
    }
    if let Some(engine) = &arguments.engine {
        words.push(format!("--engine '{engine}'"));
    }
    if let Some(seconds) = arguments.seconds {
        words.push(format!("--seconds {seconds}"));
    }
    if let Some(pairs) = arguments.pairs {
        words.push(format!("--pairs {pairs}"));
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_reach_the_machine() {
        let given = "x --blockd a --runner b --rublk c --jobs d --quick --only counts --pairs 4";
        let arguments = Arguments::try_parse_from(given.split(' ')).unwrap();
        assert_eq!(words(&arguments), "--blockd /usr/bin/blockd --quick --only 'counts' --pairs 4");
    }
}
