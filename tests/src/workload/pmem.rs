//! `pmem`: two regions of persistent memory near two nodes, pools and volumes in them, and power
//! cuts in the middle of writes.

mod answered;
mod bare;
mod dax_file;
mod direct;
mod kata;
mod plugin;
mod poison;
mod pooled;
mod regions;
mod share;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blockd_testkit::folder::Folder;

use super::{MARK, Run, figures, sparse};
use crate::vm::{Drive, Vm};

const MIB: u64 = 1 << 20;
/// Bytes of the regions: a multiple of 128 MiB each, with labels behind them.
const FIRST: u64 = 512 * MIB;
const SECOND: u64 = 256 * MIB;
const LABELS: u64 = 2 * MIB;
/// Bytes of the disk with the daemon's state.
const DISK: u64 = 64 * MIB;
/// The word that fills regions with data of others.
const FOREIGN: u64 = 0x6272_6f6b_656e_2e21;
/// A stage that takes longer is stuck.
const STAGE_LIMIT: Duration = Duration::from_secs(600);
/// Printed when writes begin that go on until the power is cut.
const WRITING: &str = "writing";

/// The host's half.
///
/// # Errors
/// When something that was answered is not there, or anything else is not as it has to be.
pub fn run(run: &Run) -> Result<String> {
    let folder = Folder::new("pmem")?;
    let first = sparse(&folder, "first", FIRST + LABELS)?;
    let second = sparse(&folder, "second", SECOND + LABELS)?;
    fill(&first)?;
    // The daemon's state about its namespaces is on a disk, as it would be anywhere.
    let disk = sparse(&folder, "disk", DISK)?;
    let vm = || -> Result<Vm> {
        Ok(machine(run)?
            .nodes(2)
            .drive(Drive::File(disk.clone()))
            .drive(Drive::NvdimmNear(first.clone(), 0))
            .drive(Drive::NvdimmNear(second.clone(), 1)))
    };
    let made = stage(run, vm()?, "make")?;
    let (cuts, known, later) = cuts(run, &vm()?)?;
    let foreign = untouched(&first)?;
    let (plugin, image) = plugin::host(run, &folder)?;
    let images = kata::with_images(machine(run)?, &folder, &image)?;
    let images = stage(run, images, "images")?;
    let third = sparse(&folder, "third", SECOND + LABELS)?;
    let share = machine(run)?.drive(Drive::NvdimmNear(third, 0));
    let share = stage(run, share, "share")?;
    let bare = machine(run)?.modules(&["nd_e820", "nd_pmem"]).words(bare::WORDS);
    let bare = stage(run, bare, "bare")?;
    Ok(format!(
        "{}; {cuts} power cuts: {known} answered blocks found, {later} others, 0 lost, 0 torn; \
         {foreign} MiB of others untouched; {plugin}; {}; {}; {}",
        figures(&made)?,
        figures(&images)?,
        figures(&share)?,
        figures(&bare)?
    ))
}

/// Checks that the data of others is unchanged in the half of the region that pools may not have
/// (P10). Gives its size in MiB.
fn untouched(region: &Path) -> Result<u64> {
    let file = File::open(region)?;
    let mut piece = vec![0; usize::try_from(MIB)?];
    // Namespaces are allocated from the front.
    let mut at = FIRST / 2;
    while at < FIRST {
        file.read_exact_at(&mut piece, at)?;
        let same = piece.chunks_exact(8).all(|word| word == FOREIGN.to_le_bytes());
        ensure!(same, "the MiB at {at} of others was written");
        at += MIB;
    }
    Ok(FIRST / 2 / MIB)
}

/// Cuts the power in the middle of writes, again and again, without any flush.
fn cuts(run: &Run, vm: &Vm) -> Result<(u32, u64, u64)> {
    let cuts = run.either(2, 20);
    let mut rng = fastrand::Rng::with_seed(run.seed);
    let (mut known, mut later, mut before) = (0, 0, None::<Vec<u64>>);
    for number in 0..=cuts {
        let seed = run.seed.wrapping_add(u64::from(number));
        let turn = Run { seed, ..*run };
        let mut words = format!("pmem {}", if number == cuts { "last" } else { "write" });
        if let Some(all) = &before {
            let all: Vec<String> = all.iter().map(u64::to_string).collect();
            words.push_str(&format!(" --answered {}", all.join(",")));
        }
        let mut running = vm.start(&turn.inside(&words))?;
        let text = if number == cuts {
            running.finish()?.text
        } else {
            running.wait_for(WRITING)?;
            running.wait_for("answered ")?;
            std::thread::sleep(Duration::from_millis(rng.u64(0..2000)));
            running.cut().with_context(|| format!("cut {number}"))?.text
        };
        let failure = text.lines().find(|line| line.contains("workload: "));
        ensure!(failure.is_none(), "at cut {number}:\n{text}");
        if before.is_some() {
            let (found, beyond) = pooled::found(&text).context("what was found after the cut")?;
            known += found;
            later += beyond;
        }
        before = Some(answered::said(&text));
    }
    Ok((cuts, known, later))
}

/// A machine with what persistent memory needs.
fn machine(run: &Run) -> Result<Vm> {
    Ok(run
        .machine("pmem")?
        .memory(2048)
        .limit(STAGE_LIMIT)
        .modules(&["nd_btt", "device_dax", "dax_pmem", "xfs"])
        .programs(&["ndctl", "mkfs.xfs", "xfs_io", "filefrag", "blkid", "dd"]))
}

/// Boots for one stage, to its end.
fn stage(run: &Run, vm: Vm, name: &str) -> Result<String> {
    let short = if run.is_short() { " --short" } else { "" };
    let output = vm.run(&run.inside(&format!("pmem {name}{short}")))?;
    println!("{}", output.text);
    Ok(output.text)
}

/// Fills a region with data of others.
fn fill(region: &Path) -> Result<()> {
    let file = File::options().write(true).open(region)?;
    let piece: Vec<u8> = FOREIGN.to_le_bytes().repeat(usize::try_from(MIB / 8)?);
    for at in (0..FIRST).step_by(piece.len()) {
        file.write_all_at(&piece, at)?;
    }
    Ok(())
}

/// The guest's half.
///
/// # Errors
/// As [`run`].
pub fn inside(name: &str, before: Option<&str>, short: bool, seed: u64) -> Result<()> {
    match name {
        "make" => {
            regions::labels(2)?;
            let pooled = pooled::make(short, seed)?;
            println!("{MARK}{pooled}");
            Ok(())
        }
        "plugin" => plugin::inside(short),
        "plugin-again" => plugin::again(short),
        "images" => {
            println!("{MARK}{}", kata::inside()?);
            Ok(())
        }
        "share" => {
            regions::labels(1)?;
            println!("{MARK}{}", share::inside(short, seed)?);
            Ok(())
        }
        "bare" => {
            println!("{MARK}{}", bare::inside()?);
            Ok(())
        }
        "write" | "last" => pooled::go_on(before, name == "last", seed),
        _ => bail!("no such stage: {name}"),
    }
}
