//! Kill rounds: `kill --rounds 200`. Half of them here, on a pool in a file; half in a virtual
//! machine, on a disk whose writes take 50 to 200 ms, so that IO of a dead daemon lands late.
#![forbid(unsafe_code)]

use std::fmt::Write as _;
use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use blockd_testkit::clock::Clock;
use blockd_testkit::folder::Folder;
use blockd_testkit::tools;
use blockd_tests::kill::{self, Figures, Options};
use blockd_tests::vm::{Drive, Vm};
use clap::Parser;

/// Sectors of the slow disk.
const DISK: u64 = 512 << 11;
/// Each piece of the slow disk has a delay of its own, so that writes overtake each other.
const PIECES: u64 = 64;
/// Milliseconds that a write to the slow disk takes.
const DELAYS: std::ops::RangeInclusive<u64> = 50..=200;
/// Longest load at the least, in milliseconds, for devices to leave in the middle of it.
const MOVES_MS: u64 = 2000;
/// Precedes the guest's figures in its output.
const MARK: &str = "figures: ";

/// The daemon under verified load dies and comes back, again and again.
#[derive(Parser, Debug)]
struct Arguments {
    /// Rounds in all; half of them in the virtual machine.
    #[arg(long, default_value_t = 20)]
    rounds: u64,
    /// Seed of loads, moments and delays.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only the rounds here.
    #[arg(long, conflicts_with = "only_slow")]
    only_here: bool,
    /// Only the rounds in the virtual machine.
    #[arg(long)]
    only_slow: bool,
    /// All rounds with the pool on this block device or new file, here. Its content is lost.
    #[arg(long)]
    device: Option<PathBuf>,
    /// Devices join the pool, leave it, are replaced and shrink meanwhile, and another pool changes
    /// its name. All rounds are here.
    #[arg(long, conflicts_with_all = ["only_slow", "device"])]
    evacuate: bool,
    /// Volumes.
    #[arg(long, default_value_t = 4)]
    volumes: u32,
    /// MiB of a volume.
    #[arg(long, default_value_t = 48)]
    volume_mib: u64,
    /// Connections to each volume.
    #[arg(long, default_value_t = 2)]
    connections: u32,
    /// Longest load, in milliseconds.
    #[arg(long, default_value_t = 900)]
    longest: u64,
    /// Print the figures as JSON.
    #[arg(long)]
    json: bool,
    /// The figures in one marked line, for the run that started this one.
    #[arg(long, hide = true)]
    marked: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let start = Clock::start();
    let (figures, result) = all(&arguments);
    let seconds = start.elapsed().as_secs_f64();
    if arguments.marked {
        println!("{MARK}{}", serde_json::to_string(&figures).unwrap_or_default());
    } else {
        report(&figures, seconds, arguments.json);
    }
    // A run that killed nothing has shown nothing.
    let Figures { devices_left, devices_replaced, devices_shrunk, renames, .. } = figures;
    let rare = [devices_replaced, devices_shrunk, renames].contains(&0);
    let few = (devices_left == 0 && figures.rounds >= 20) || (rare && figures.rounds >= 60);
    let moved = !arguments.evacuate || !few;
    let worked = figures.kills > 0 && figures.operations > 0 && figures.compared > 0 && moved;
    match result {
        Ok(()) if worked || figures.rounds < 3 => ExitCode::SUCCESS,
        Ok(()) => {
            eprintln!("kill: nothing was shown");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("kill: {error:#}");
            let Arguments { rounds, seed, evacuate, .. } = arguments;
            let more = if evacuate { " --evacuate" } else { "" };
            println!("repeat: cargo ci test kill --rounds {rounds} --seed {seed}{more}");
            ExitCode::FAILURE
        }
    }
}

fn all(arguments: &Arguments) -> (Figures, Result<()>) {
    let slow = match arguments {
        Arguments { device: Some(_), .. }
        | Arguments { only_here: true, .. }
        | Arguments { evacuate: true, .. } => 0,
        Arguments { only_slow: true, rounds, .. } => *rounds,
        Arguments { rounds, .. } => rounds / 2,
    };
    let mut figures = Figures::default();
    let here = arguments.rounds - slow;
    if here > 0 {
        let (more, result) = rounds_here(arguments, here);
        figures = figures.with(more);
        if result.is_err() {
            return (figures, result);
        }
    }
    if slow > 0 {
        match rounds_on_a_slow_disk(arguments, slow) {
            Ok(more) => figures = figures.with(more),
            Err(error) => return (figures, Err(error)),
        }
    }
    (figures, Ok(()))
}

/// One round in four with a pool in memory: there the daemon copies to the media itself.
fn rounds_here(arguments: &Arguments, rounds: u64) -> (Figures, Result<()>) {
    let in_files = arguments.device.is_some() || arguments.evacuate;
    let in_memory = if in_files { 0 } else { rounds / 4 };
    let (figures, result) = rounds_on(arguments, rounds - in_memory, arguments.device.clone());
    if result.is_err() || in_memory == 0 {
        return (figures, result);
    }
    let folder = match Folder::below("/dev/shm".as_ref(), "memory") {
        Ok(folder) => folder,
        Err(error) => return (figures, Err(error)),
    };
    let (more, result) = rounds_on(arguments, in_memory, Some(folder.path().join("pool")));
    (figures.with(more), result)
}

fn rounds_on(arguments: &Arguments, rounds: u64, device: Option<PathBuf>) -> (Figures, Result<()>) {
    let options = Options {
        rounds,
        seed: arguments.seed,
        in_memory: device.as_ref().is_some_and(|path| path.starts_with("/dev/shm")),
        device,
        pool_size: if arguments.evacuate { kill::moves::FIRST } else { 1 << 30 },
        volumes: arguments.volumes,
        volume_size: arguments.volume_mib << 20,
        connections: arguments.connections,
        longest_ms: arguments.longest.max(if arguments.evacuate { MOVES_MS } else { 20 }),
        in_order: None,
        moves: arguments.evacuate,
    };
    kill::run(&options, |figures| {
        if figures.rounds.is_multiple_of(10) {
            eprintln!("{} rounds, {} operations", figures.rounds, figures.operations);
        }
    })
}

/// This program again, in a virtual machine with a slow disk.
fn rounds_on_a_slow_disk(arguments: &Arguments, rounds: u64) -> Result<Figures> {
    let folder = Folder::new("slow")?;
    let disk = folder.path().join("disk");
    File::create(&disk)?.set_len(DISK * 512).context("making the slow disk")?;
    let program = std::env::current_exe().context("where this program lies")?;
    let vm = Vm::new("kill")
        .memory(1024)
        .limit(Duration::from_secs(60 + rounds * 20))
        .modules(&["dm-delay"])
        .programs(&["dmsetup"])
        .program(&program)
        .program(&tools::blockd()?)
        .drive(Drive::File(disk));
    let mut script = format!("cat >/tmp/table <<'EOF'\n{}EOF\n", table(arguments.seed));
    writeln!(script, "dmsetup create --noudevsync slow </tmp/table || exit 1")?;
    // There is no udev to make the name. The shell has a `kill` of its own.
    writeln!(script, "dmsetup mknodes; export BLOCKD_BIN=/usr/bin/blockd")?;
    writeln!(
        script,
        "/usr/bin/kill --marked --device /dev/mapper/slow --rounds {rounds} --seed {} --volumes 3 \
         --volume-mib 8 --longest {}",
        arguments.seed,
        arguments.longest * 2,
    )?;
    let output = vm.run(&script)?;
    let line = output.text.lines().find_map(|line| line.strip_prefix(MARK));
    serde_json::from_str(line.context("the guest printed no figures")?).context("its figures")
}

/// Device-mapper's table: reads at once, writes late, by a delay that differs from piece to piece.
fn table(seed: u64) -> String {
    let mut rng = fastrand::Rng::with_seed(seed);
    let piece = DISK / PIECES;
    let mut table = String::new();
    for start in (0..DISK).step_by(usize::try_from(piece).unwrap_or(1)) {
        let delay = rng.u64(DELAYS);
        let place = format!("/dev/vda {start}");
        table.push_str(&format!("{start} {piece} delay {place} 0 {place} {delay}\n"));
    }
    table
}

fn report(figures: &Figures, seconds: f64, json: bool) {
    let mut value = serde_json::to_value(figures).unwrap_or_default();
    value["seconds"] = seconds.into();
    if json {
        println!("{value}");
        return;
    }
    let rows = [
        ("rounds", figures.rounds),
        ("kills", figures.kills),
        ("of them during a start", figures.kills_during_start),
        ("starts refused, old process there", figures.refused_starts),
        ("ends by SIGTERM", figures.stops),
        ("operations answered", figures.operations),
        ("of them flushes", figures.flushes),
        ("volumes made and deleted", figures.volume_changes),
        ("changes of snapshots and clones", figures.family_changes),
        ("devices that left", figures.devices_left),
        ("of them, replaced by others", figures.devices_replaced),
        ("devices that shrank", figures.devices_shrunk),
        ("devices that stayed after all", figures.devices_kept),
        ("names of a pool and a volume changed", figures.renames),
        ("requests not answered", figures.unanswered),
        ("their sectors, new", figures.unanswered_new),
        ("their sectors, old", figures.unanswered_old),
        ("their sectors, torn, in memory", figures.unanswered_torn),
        ("MiB compared", figures.compared >> 20),
        ("MiB read from the closed pool", figures.read_offline >> 20),
        ("rounds with late IO", figures.late_rounds),
        ("of them, lock outlived the process", figures.outlived),
        ("starts that waited for it", figures.waits),
        ("latest IO, ms after the kill", figures.latest_ms),
        ("slowest start, ms", figures.slowest_start_ms),
        ("lost", figures.lost),
    ];
    for (name, figure) in rows {
        println!("{name:<36}{figure:>12}");
    }
    println!("{:<36}{seconds:>12.1}", "seconds");
    println!("ends met: {}", figures.met);
}
