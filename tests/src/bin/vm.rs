//! Boots a virtual machine for a workload, `vm kill --kernel all --short`, or for a script:
//! `vm --program fio --module dm-delay -- 'fio --version'`.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::tools;
use blockd_tests::vm::{Drive, Kernel, Vm, Which};
use blockd_tests::workload::hosts::Part;
use blockd_tests::workload::{self, Form, Run};
use clap::{Parser, Subcommand};

/// A real kernel for a workload, or for a script with the daemon and the programs that it needs.
#[derive(Parser, Debug)]
#[command(args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    workload: Option<Workload>,
    #[command(flatten)]
    script: Script,
}

#[derive(Subcommand, Debug)]
enum Workload {
    /// File systems, partitions, encryption, volume groups, trimming and growing
    Fs(RunArguments),
    /// The daemon dies under everything at once
    Kill(RunArguments),
    /// The machine dies, and its disk forgets what was not flushed
    Power(RunArguments),
    /// The same while devices are added to the pool and taken out of it
    Moves(RunArguments),
    /// The pool as it was at every flush, and disks that fail
    Logwrites(RunArguments),
    /// Many devices, devices in use, a boot storm, little memory
    Stress(RunArguments),
    /// A full pool below file systems; in its long form beside dm-thin
    Space(RunArguments),
    /// The README's demonstration, on a real device
    Demo(RunArguments),
    /// The plugin for Kubernetes, on real devices, through deaths at every step
    Csi(RunArguments),
    /// Calls of a cluster's kubelet and sidecars, replayed against daemon and plugin on devices
    Cluster {
        #[command(flatten)]
        form: RunArguments,
        /// A recording of `blockd-csi record` to replay, in place of the sequences in
        /// `tests/cluster`.
        #[arg(long, value_name = "FILE")]
        recording: Option<PathBuf>,
    },
    /// Disks, pools, mounts and file systems in trouble, as the plugin sees them
    Health(RunArguments),
    /// Persistent memory: regions, pools and volumes in it, and a loss of power
    Pmem(RunArguments),
    /// Disks that others open, pools that are missing, and a disk that two hosts open
    Safety(RunArguments),
    /// Devices of one daemon beside each other: one with a limit, a full pool, or too much IO
    Neighbours(RunArguments),
    /// A pool's metadata becomes that of device-mapper's thin-pool
    Thin(RunArguments),
    /// Several hosts that share a disk: three machines on a network of their own
    Hosts {
        #[command(subcommand)]
        what: Hosts,
    },
    /// The half of a workload that runs in the guest
    #[command(hide = true)]
    Inside {
        #[arg(long)]
        seed: u64,
        #[command(subcommand)]
        what: Inside,
    },
}

#[derive(Subcommand, Debug)]
enum Hosts {
    /// The array refuses the writes of a host whose key was removed, and no others
    Fence(HostsArguments),
    /// Both hosts take one cell at the same moment
    Race(HostsArguments),
    /// A host stands still, is fenced and goes on: its cell is the other host's
    Freeze(HostsArguments),
    /// A host loses its power while it writes, and the other one takes its cell
    Reset(HostsArguments),
    /// A host loses its power, and is declared dead once no script fails
    Hooks(HostsArguments),
    /// A host loses its cable, in half of the rounds with the group's lock, and is fenced
    Link(HostsArguments),
    /// The array loses its power while a host writes and flushes
    TargetReset(HostsArguments),
    /// A cell goes from host to host, with all that was answered
    Handover(HostsArguments),
    /// A volume is a device on both hosts, and its cell goes to the one that asks for a block
    Standby(HostsArguments),
    /// The lock manager of a host dies while one of its cells is written full
    CoordinatorAway(HostsArguments),
    /// A host loses the lease of a cell whose device stays, and its daemon starts
    LostLease(HostsArguments),
    /// A virtual machine with a mounted disk moves between two daemons while it writes
    Migrate(MigrateArguments),
    /// Many cells of one daemon on this machine: memory, threads, files, a start with all of them
    Many {
        /// Cells to make.
        #[arg(long, default_value_t = CELLS)]
        cells: u64,
        /// 50 cells.
        #[arg(long, conflicts_with = "cells")]
        short: bool,
    },
    /// Lines of shell, each with its output, its end and its time
    Script {
        /// The kernel: 6.12 with iSCSI, or 7 with NVMe over TCP.
        #[arg(long, value_name = "KERNEL", default_value = "7")]
        kernel: String,
        /// `a: LINE`, `b: LINE` or `array: LINE` for a machine, `lab: sleep SECONDS`, `lab: cut a`,
        /// `join a`, `freeze a` or `thaw a` for what happens to it, or `@FILE` with such lines.
        #[arg(required = true)]
        lines: Vec<String>,
    },
}

#[derive(clap::Args, Debug)]
struct HostsArguments {
    /// The kernel: 6.12 with iSCSI, 7 with NVMe over TCP, or all.
    #[arg(long, value_name = "KERNEL", default_value = "all")]
    kernel: String,
    /// Rounds in all. Those of earlier runs with the same kernel and seed are not done again.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    rounds: u64,
    /// Three rounds, whatever was done earlier.
    #[arg(long, conflicts_with = "rounds")]
    short: bool,
    /// Seed of moments.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Rounds of the short form.
const SHORT_ROUNDS: u64 = 3;

#[derive(clap::Args, Debug)]
struct MigrateArguments {
    /// The guest's kernel: 6.12, 7, or all, one after the other.
    #[arg(long, value_name = "KERNEL", default_value = "all")]
    kernel: String,
    /// Migrations, to and fro in turn. Three that fail come between them.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    rounds: u64,
    /// Two migrations, and two that fail.
    #[arg(long, conflicts_with = "rounds")]
    short: bool,
}

/// Cells of one daemon, as many as volumes that a host may well have; and those of the short form.
const CELLS: u64 = 500;
const SHORT_CELLS: u64 = 50;

/// Migrations of the short form, one in each direction.
const SHORT_MIGRATIONS: u64 = 2;

#[derive(clap::Args, Debug)]
struct RunArguments {
    /// The kernel: 6.12, 7, or all, one after the other.
    #[arg(long, value_name = "KERNEL", default_value = "all")]
    kernel: String,
    /// A minute or so, rather than up to 25.
    #[arg(long)]
    short: bool,
    /// All of it without shortened waits, in up to 40 minutes: `csi` keeps the daemon away for 10
    /// minutes, with the probe periods of the shipped manifest.
    #[arg(long, conflicts_with = "short")]
    long: bool,
    /// Seed of loads and moments.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// The form that flags of a command line choose.
fn form(short: bool, long: bool) -> Form {
    match (short, long) {
        (true, _) => Form::Short,
        (false, true) => Form::Long,
        (false, false) => Form::Default,
    }
}

#[derive(Subcommand, Debug)]
enum Inside {
    Fs {
        #[arg(long)]
        seconds: u64,
    },
    Kill {
        #[arg(long)]
        pool: PathBuf,
        #[arg(long)]
        kills: u64,
    },
    Power {
        #[arg(long)]
        last: bool,
        #[arg(long)]
        moves: bool,
    },
    Logwrites {
        #[arg(long)]
        millis: u64,
    },
    Flakey,
    Stress {
        #[arg(long)]
        rounds: u64,
        #[arg(long)]
        devices: u32,
        /// MiB of the image of a boot storm.
        #[arg(long)]
        image: u64,
    },
    Dirty {
        #[arg(long)]
        mib: u64,
    },
    Safety {
        #[arg(long)]
        short: bool,
    },
    SafetyHost,
    Reservation {
        disk: String,
        words: Vec<String>,
    },
    Blocks {
        device: String,
        what: String,
        /// The host that they name.
        owner: u64,
        /// The last write that was flushed.
        last: Option<u64>,
    },
    /// Numbered records on a file system, as the machine that migrates writes them.
    Records {
        folder: PathBuf,
        port: PathBuf,
        stop: PathBuf,
    },
    Neighbours {
        #[arg(long)]
        short: bool,
    },
    Space,
    SpaceBeside,
    Health {
        #[arg(long)]
        short: bool,
    },
    Pmem {
        stage: String,
        /// The last answered write of each writer before the machine's power was cut.
        #[arg(long)]
        answered: Option<String>,
        #[arg(long)]
        short: bool,
    },
    Cluster {
        /// The half after the reboot.
        #[arg(long)]
        again: bool,
    },
    Csi {
        #[arg(long)]
        seconds: u64,
        #[arg(long)]
        short: bool,
        #[arg(long)]
        long: bool,
        /// The part before the machine's power is cut.
        #[arg(long)]
        until_cut: bool,
    },
}

#[derive(clap::Args, Debug)]
struct Script {
    /// The kernel: 6.12, 7, or all, one after the other.
    #[arg(long, value_name = "KERNEL", default_value = "6.12")]
    kernel: String,
    /// Only fetch the kernel, and print its release.
    #[arg(long)]
    fetch: bool,
    /// Leave the daemon out, and so don't build it.
    #[arg(long)]
    no_daemon: bool,
    /// Installed programs to have at hand.
    #[arg(long = "program", value_name = "NAME")]
    programs: Vec<String>,
    /// Modules to load.
    #[arg(long = "module", value_name = "NAME")]
    modules: Vec<String>,
    /// Files to have: the path here, or `HERE:THERE`.
    #[arg(long = "file", value_name = "PATH[:PATH]")]
    files: Vec<String>,
    /// Raw disks, `/dev/vda` and so on.
    #[arg(long = "disk", value_name = "PATH")]
    disks: Vec<PathBuf>,
    /// Raw disks as NVMe, `/dev/nvme0n1` and so on.
    #[arg(long = "nvme", value_name = "PATH")]
    nvme: Vec<PathBuf>,
    /// Files as persistent memory, `/dev/pmem0` and so on: a multiple of 128 MiB.
    #[arg(long = "nvdimm", value_name = "PATH")]
    nvdimm: Vec<PathBuf>,
    /// Memory in MiB.
    #[arg(long, default_value_t = 1024)]
    memory: u32,
    /// Virtual processors.
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// Seconds until it is stopped.
    #[arg(long, default_value_t = 120)]
    seconds: u64,
    /// Further words for qemu.
    #[arg(long = "qemu", value_name = "WORD", allow_hyphen_values = true)]
    qemu: Vec<String>,
    /// The script: lines of shell, or `@FILE`.
    #[arg(default_value = "uname -a")]
    script: Vec<String>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let inside = matches!(arguments.workload, Some(Workload::Inside { .. }));
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error:#}", if inside { "workload" } else { "vm" });
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let Some(workload) = &arguments.workload else { return scripts(&arguments.script) };
    match workload {
        Workload::Fs(form) => each("fs", form, workload::fs::run),
        Workload::Kill(form) => each("kill", form, workload::kill::run),
        Workload::Power(form) => each("power", form, workload::power::run),
        Workload::Moves(form) => each("moves", form, workload::power::run_moves),
        Workload::Logwrites(form) => each("logwrites", form, workload::logwrites::run),
        Workload::Stress(form) => each("stress", form, workload::stress::run),
        Workload::Space(form) => each("space", form, workload::space::run),
        Workload::Demo(form) => each("demo", form, workload::demo::run),
        Workload::Thin(form) => each("thin", form, workload::thin::run),
        Workload::Csi(form) => each("csi", form, workload::csi::run),
        Workload::Cluster { form, recording } => {
            each("cluster", form, |run| workload::cluster::run(run, recording.as_deref()))
        }
        Workload::Safety(form) => each("safety", form, workload::safety::run),
        Workload::Neighbours(form) => each("neighbours", form, workload::neighbours::run),
        Workload::Pmem(form) => each("pmem", form, workload::pmem::run),
        Workload::Health(form) => each("health", form, workload::health::run),
        Workload::Hosts { what } => hosts(what),
        Workload::Inside { seed, what } => match what {
            Inside::Fs { seconds } => workload::fs::inside(*seconds, *seed),
            Inside::Kill { pool, kills } => workload::kill::inside(pool, *kills, *seed),
            Inside::Power { last, moves } => workload::power::inside(*last, *moves, *seed),
            Inside::Logwrites { millis } => workload::logwrites::inside(*millis, *seed),
            Inside::Flakey => workload::logwrites::flakey(),
            Inside::Stress { rounds, devices, image } => {
                workload::stress::inside(*rounds, *devices, *image, *seed)
            }
            Inside::Dirty { mib } => workload::stress::dirty(*mib),
            Inside::Safety { short } => workload::safety::inside(*short),
            Inside::Neighbours { short } => workload::neighbours::inside(*short),
            Inside::Reservation { disk, words } => workload::hosts::reservation(disk, words),
            Inside::Blocks { device, what, owner, last } => {
                workload::hosts::blocks(device, what, *owner, *last)
            }
            Inside::Records { folder, port, stop } => workload::hosts::records(folder, port, stop),
            Inside::SafetyHost => workload::safety::host(),
            Inside::Space => workload::space::inside(*seed),
            Inside::SpaceBeside => workload::space::inside_beside(*seed),
            Inside::Health { short } => workload::health::inside(*short),
            Inside::Pmem { stage, answered, short } => {
                workload::pmem::inside(stage, answered.as_deref(), *short, *seed)
            }
            Inside::Cluster { again } => workload::cluster::inside(*again),
            Inside::Csi { seconds, short, long, until_cut } => {
                workload::csi::inside(*seconds, form(*short, *long), *until_cut, *seed)
            }
        },
    }
}

/// Runs a workload on each of the kernels, and sums each up in one line.
fn each(
    name: &str,
    arguments: &RunArguments,
    workload: impl Fn(&Run) -> Result<String>,
) -> Result<()> {
    for kernel in Which::chosen(&arguments.kernel)? {
        let release = Kernel::get(kernel)?.release;
        let form = form(arguments.short, arguments.long);
        let run = Run { kernel, form, seed: arguments.seed };
        let start = Clock::start();
        let said = workload(&run).with_context(|| {
            let (kernel, seed) = (kernel.name(), arguments.seed);
            let repeat = format!("--kernel {kernel}{} --seed {seed}", form.flag());
            format!("{name} on {release}; repeat with: cargo ci vm {name} {repeat}")
        })?;
        let took = start.elapsed();
        println!("{name}, {release}: {said}; {:.1} s", took.as_secs_f64());
        let limit = run.limit();
        ensure!(took < limit, "{name} took longer than {limit:?}");
    }
    Ok(())
}

fn hosts(what: &Hosts) -> Result<()> {
    match what {
        Hosts::Fence(form) => rounds("fence", form, workload::hosts::fence),
        Hosts::Race(form) => rounds("race", form, workload::hosts::race),
        Hosts::Freeze(form) => rounds("freeze", form, workload::hosts::freeze),
        Hosts::Reset(form) => rounds("reset", form, workload::hosts::reset),
        Hosts::Hooks(form) => rounds("hooks", form, workload::hosts::hooks),
        Hosts::Link(form) => rounds("link", form, workload::hosts::link),
        Hosts::TargetReset(form) => rounds("target-reset", form, workload::hosts::target_reset),
        Hosts::Handover(form) => rounds("handover", form, workload::hosts::handover),
        Hosts::Standby(form) => rounds("standby", form, workload::hosts::standby),
        Hosts::CoordinatorAway(form) => {
            rounds("coordinator-away", form, workload::hosts::coordinator_away)
        }
        Hosts::LostLease(form) => rounds("lost-lease", form, workload::hosts::lost_lease),
        Hosts::Migrate(form) => migrations(form),
        Hosts::Many { cells, short } => {
            let start = Clock::start();
            let said = workload::hosts::many(if *short { SHORT_CELLS } else { *cells })?;
            println!("hosts many: {said}; {:.1} s", start.elapsed().as_secs_f64());
            Ok(())
        }
        Hosts::Script { kernel, lines } => hosts_script(kernel, lines),
    }
}

/// Does the rounds of one part on each of the kernels.
fn rounds(
    name: &'static str,
    arguments: &HostsArguments,
    part: impl Fn(&Part) -> Result<String>,
) -> Result<()> {
    for kernel in Which::chosen(&arguments.kernel)? {
        let HostsArguments { rounds, short, seed, .. } = *arguments;
        let rounds = if short { SHORT_ROUNDS } else { rounds };
        let form = if short { Form::Short } else { Form::Long };
        let run = Run { kernel, form, seed };
        summed_up(&Part { name, run, rounds }, &format!("--seed {seed}"), &part)?;
    }
    Ok(())
}

/// Moves a machine to and fro on each of the kernels.
fn migrations(arguments: &MigrateArguments) -> Result<()> {
    let MigrateArguments { rounds, short, .. } = *arguments;
    let rounds = if short { SHORT_MIGRATIONS } else { rounds };
    let form = if short { Form::Short } else { Form::Default };
    for kernel in Which::chosen(&arguments.kernel)? {
        let part = Part { name: "migrate", run: Run { kernel, form, seed: 1 }, rounds };
        summed_up(&part, &format!("--rounds {rounds}"), workload::hosts::migrate)?;
    }
    Ok(())
}

/// Runs a part of the laboratory on one kernel, and prints a line about it.
fn summed_up(part: &Part, repeat: &str, run: impl Fn(&Part) -> Result<String>) -> Result<()> {
    let release = Kernel::get(part.run.kernel)?.release;
    let (name, start) = (part.name, Clock::start());
    let said = run(part).with_context(|| {
        let kernel = part.run.kernel.name();
        format!("on {release}; repeat with: cargo ci vm hosts {name} --kernel {kernel} {repeat}")
    })?;
    println!("hosts {name}, {release}: {said}; {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

fn hosts_script(kernel: &str, lines: &[String]) -> Result<()> {
    let lines = match lines {
        [one] if one.starts_with('@') => std::fs::read_to_string(&one[1..])
            .with_context(|| format!("reading {one}"))?
            .lines()
            .map(ToOwned::to_owned)
            .collect(),
        lines => lines.to_owned(),
    };
    for kernel in Which::chosen(kernel)? {
        let run = Run { kernel, form: Form::Default, seed: 1 };
        workload::hosts::script(&run, &lines)?;
    }
    Ok(())
}

fn scripts(arguments: &Script) -> Result<()> {
    for which in Which::chosen(&arguments.kernel)? {
        if arguments.fetch {
            println!("kernel {} is here", Kernel::get(which)?.release);
        } else {
            script(arguments, which)?;
        }
    }
    Ok(())
}

fn script(arguments: &Script, which: Which) -> Result<()> {
    fn words(words: &[String]) -> Vec<&str> {
        words.iter().map(String::as_str).collect()
    }
    let mut vm = Vm::new("vm")
        .kernel(which)
        .memory(arguments.memory)
        .cpus(arguments.cpus)
        .limit(Duration::from_secs(arguments.seconds))
        .modules(&words(&arguments.modules))
        .programs(&words(&arguments.programs))
        .arguments(&words(&arguments.qemu));
    if !arguments.no_daemon {
        vm = vm.program(&tools::blockd()?);
    }
    for file in &arguments.files {
        let (here, there) = file.split_once(':').unwrap_or((file, file));
        vm = vm.file(here.as_ref(), there, false);
    }
    let disks = arguments.disks.iter().cloned().map(Drive::File);
    let nvme = arguments.nvme.iter().cloned().map(Drive::Nvme);
    let nvdimm = arguments.nvdimm.iter().cloned().map(Drive::Nvdimm);
    for drive in disks.chain(nvme).chain(nvdimm) {
        vm = vm.drive(drive);
    }
    let script = match arguments.script.as_slice() {
        [one] if one.starts_with('@') => {
            std::fs::read_to_string(&one[1..]).with_context(|| format!("reading {one}"))?
        }
        lines => lines.join("\n"),
    };
    let output = vm.run(&script)?;
    print!("{}", output.text);
    eprintln!("{:.1} s", output.seconds);
    Ok(())
}
