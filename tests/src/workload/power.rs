//! `power`: the machine is switched off in the middle of everything, and its disk loses the data
//! that was not flushed. Data that was flushed through the daemon is there after the next boot.
//!
//! `moves`: the same while devices are added to the pool and taken out of it.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::daemon::Daemon;
use blockd_testkit::folder::Folder;
use blockd_testkit::nbd::{Kind, Request};

use super::device::Device;
use super::files::Files;
use super::ledger::{self, Judge, Ledger};
use super::load::{self, Counts, Load};
use super::rounds::{self, Figures, Rounds, Targets};
use super::{Run, device_of, guest, sparse};
use crate::kill::content::{Generation, SECTOR};
use crate::kill::family::{Family, Met};
use crate::kill::moves::{self, Moves};
use crate::kill::volume::Volume;
use crate::vm::Drive;
use crate::vm::forgetful::Disk;

/// Bytes of the disk of the pool.
const DISK: u64 = 1 << 30;
/// The other disks of a pool whose devices come and go.
const OTHERS: [&str; 2] = ["/dev/vdc", "/dev/vdd"];
/// Bytes of the volume under the oracle, and of that with a file system.
const VOLUME: u64 = 16 << 20;
const FILES: u64 = 64 << 20;
/// The volume's number in its contents.
const ID: u32 = 1;
/// The guest's messages when it begins, when it has found everything, and when all is over.
const OPENING: &str = "opening";
const VERIFIED: &str = "verified ";
const LOADING: &str = "loading";
/// Precedes the command that the last cut met.
const MET: &str = "met ";
/// Precedes the figures of snapshots that come and go, each time they are counted.
const ROUNDS: &str = "rounds ";
/// The guest's message when entries became composite and were folded.
const FOLDED: &str = "entries were folded";
/// Precedes the figures of devices that come and go, each time they are counted.
const MOVES: &str = "moves ";
/// The guest's message when a device is leaving or shrinking.
const LEAVING: &str = "a device is leaving";

/// The host's half.
///
/// # Errors
/// When anything that was flushed is not there, or a boot does not get on.
pub fn run(run: &Run) -> Result<String> {
    cut_often(run, run.either(3, 100), false)
}

/// The host's half with devices that come and go.
///
/// # Errors
/// As [`run`].
pub fn run_moves(run: &Run) -> Result<String> {
    cut_often(run, run.either(2, 20), true)
}

fn cut_often(run: &Run, cuts: u64, moves: bool) -> Result<String> {
    let folder = Folder::new("power")?;
    let book = sparse(&folder, "ledger", ledger::SIZE)?;
    let forgetful = |name: &str, bytes| {
        let file = sparse(&folder, name, bytes)?;
        Disk::new(&file, &folder.path().join(format!("{name}-socket")), run.seed)
    };
    let mut disks = vec![forgetful("pool", if moves { moves::FIRST } else { DISK })?];
    if moves {
        disks.extend([forgetful("one", moves::OTHER)?, forgetful("two", moves::OTHER)?]);
    }
    let mut vm = run.machine("power")?.drive(disks[0].drive()).drive(Drive::File(book));
    for disk in &disks[1..] {
        vm = vm.drive(disk.drive());
    }
    let words = if moves { "power --moves" } else { "power" };
    let mut coming = Coming::default();
    let mut rng = fastrand::Rng::with_seed(run.seed);
    let (mut lost, mut early, mut total, mut met) = (0, 0, [0; 4], Met::default());
    let (mut figures, mut folded) = (Figures::default(), false);
    for number in 0..cuts {
        let mut running = vm.start(&run.inside(words))?;
        // One in five dies before it has found everything.
        let is_early = rng.u8(..5) == 0 && (folded || number + 1 < cuts);
        let wait = if is_early { rng.u64(..2500) } else { rng.u64(100..3000) };
        running.wait_for(if is_early { OPENING } else { LOADING })?;
        early += u64::from(is_early);
        if !is_early && !folded {
            // The first of the others lives long enough for one round, however slow the machine.
            running.wait_for(FOLDED)?;
            folded = true;
        }
        if !is_early && moves {
            running.wait_for(LEAVING)?;
        }
        // Every other cut comes before the device has left: little is on it.
        let wait = match (moves, rng.bool()) {
            (true, true) => wait / 8,
            (true, false) => wait * 3,
            (false, _) => wait,
        };
        std::thread::sleep(Duration::from_millis(wait));
        let output = running.cut().with_context(|| format!("cut {number}"))?;
        let failure = output.text.lines().find(|line| line.contains("workload: "));
        ensure!(failure.is_none(), "before cut {number}:\n{}", output.text);
        met = met.with(add(&mut total, &output.text)?);
        figures = figures.with(counted(&output.text));
        coming.add(&output.text);
        for disk in &disks {
            lost += disk.cut()?.lost;
        }
    }
    let output = vm.run(&run.inside(&format!("{words} --last")))?;
    met = met.with(add(&mut total, &output.text)?);
    figures = figures.with(counted(&output.text));
    let [durable, open, files, snapshots] = total;
    // With few cuts, the disk may have had nothing to forget.
    let forgot = lost > 0 || run.is_short();
    ensure!(durable > 0 && forgot && files > 0, "nothing was shown: {total:?}, {lost}");
    // A hundred cuts meet each kind of command.
    ensure!(run.is_short() || moves || met.is_complete(), "not met by a cut: {met}");
    ensure!(run.is_short() || snapshots > 0, "no snapshot was there after a cut: {figures}");
    figures.expect_folds()?;
    coming.add(&output.text);
    let said = if moves { coming.described(run)? } else { String::new() };
    Ok(format!(
        "{cuts} cuts, {early} of them during the start; the disk forgot {lost} sectors; {durable} \
         flushed changes found, {open} others judged, {files} durable files found; cuts met {met}; \
         {figures}, {snapshots} compared after a cut; 0 lost, every file system recovered{said}"
    ))
}

/// Devices that come and go, over all boots.
#[derive(Clone, Copy, Debug, Default)]
struct Coming {
    left: u64,
    shrunk: u64,
    aborted: u64,
    /// Cuts while a device was leaving or shrinking.
    met: u64,
}

impl Coming {
    /// In words, after the figures of others. Fails if what is looked for was not met.
    fn described(&self, run: &Run) -> Result<String> {
        let Self { left, shrunk, aborted, met } = self;
        let is_seen = (*met > 0 && *left > 0) || run.is_short() && met + left > 0;
        ensure!(is_seen, "no cut met a device that was leaving, or none left: {self:?}");
        Ok(format!(
            "; {left} devices left, {shrunk} shrank and {aborted} stayed after all, {met} cuts met \
             one that was leaving or shrinking"
        ))
    }

    /// Adds the figures that a boot printed last.
    fn add(&mut self, text: &str) {
        let last = text.lines().rev().find(|line| line.starts_with(MOVES) || *line == LEAVING);
        self.met += u64::from(last == Some(LEAVING));
        let mut lines = text.lines().rev().filter_map(|line| line.strip_prefix(MOVES));
        let figures = lines.next().unwrap_or_default().split(' ');
        let sums = [&mut self.left, &mut self.shrunk, &mut self.aborted];
        for (sum, word) in sums.into_iter().zip(figures) {
            *sum += word.parse().unwrap_or(0);
        }
    }
}

/// The figures that a boot printed last, as a whole.
fn counted(text: &str) -> Figures {
    let lines = text.lines().rev().filter_map(|line| line.strip_prefix(ROUNDS));
    lines.filter_map(|line| serde_json::from_str(line).ok()).next().unwrap_or_default()
}

/// Adds what a boot verified. Gives the command that the cut before it met.
fn add(total: &mut [u64; 4], text: &str) -> Result<Met> {
    let lines = text.lines().filter_map(|line| line.strip_prefix(VERIFIED));
    for line in lines {
        for (sum, word) in total.iter_mut().zip(line.split(' ')) {
            *sum += word.parse().unwrap_or(0);
        }
    }
    let met = text.lines().find_map(|line| line.strip_prefix(MET));
    met.map_or(Ok(Met::default()), |met| serde_json::from_str(met).context("what was met"))
}

/// The guest's half: finds what has to be there, and goes on until the power is cut.
///
/// # Errors
/// When something else is there.
pub fn inside(last: bool, moves: bool, seed: u64) -> Result<()> {
    let book = Path::new("/dev/vdb");
    println!("{OPENING}");
    let (daemon, mut moves) = start(moves)?;
    guest::add_device(&daemon, "oracle", VOLUME)?;
    guest::add_device(&daemon, "files", FILES)?;
    let mut disk = Vec::new();
    load::pieces(book, |_, data| {
        disk.extend_from_slice(data);
        Ok(())
    })?;
    let judge = Judge::read(&disk, usize::try_from(VOLUME)? / SECTOR)?;
    let contents = find(&judge)?;
    let written = ledger::kept(&disk);
    let (files, known) = mount(judge.run == 0, written)?;
    let (number, text) = ledger::kept_text(&disk).unzip();
    let mut family = Family::new(seed ^ judge.run, text.as_deref())?;
    family.compare(&daemon).context("snapshots and clones")?;
    let snapshots = find_snapshots(&daemon, &disk)?;
    println!("{VERIFIED}{} {} {known} {snapshots}", judge.durable, judge.open);
    println!("{MET}{}", serde_json::to_string(&family.met)?);
    // The content that was found need not be durable before this.
    let device = Device::open(&device_of("oracle"))?;
    let flush = Request { kind: Kind::Flush, flags: 0, cookie: 0, offset: 0, len: 0 };
    device.ask(&flush, &mut super::device::Buffer::default())?;
    if last {
        return end(daemon);
    }
    let run = judge.run + 1;
    let book = Device::open(book)?;
    let ledger = Arc::new(Ledger::new(book, run, &contents)?);
    let volume = Volume::new("oracle", ID, VOLUME, 4096).found(contents, judge.last);
    let volume = Arc::new(Mutex::new(volume));
    let mut rng = fastrand::Rng::with_seed(seed ^ run);
    let seeds: Vec<u64> = (0..6).map(|_| rng.u64(..)).collect();
    let counts = Arc::new(Counts::default());
    let load = Load::start(&device_of("oracle"), &volume, Some(&ledger), &counts, &seeds)?;
    let mut rounds = rounds_of(&daemon, &volume, &ledger, seed ^ run, run)?;
    println!("{LOADING}");
    let texts = Device::open(Path::new("/dev/vdb"))?;
    let mut text = number.unwrap_or(0);
    family.keep_in(Box::new(move |known| {
        text += 1;
        ledger::keep_text(&texts, text, known)
    }));
    // Until the power is cut, or something fails.
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut changing = vec![
            scope.spawn(|| family.run(&daemon, &over).map_err(anyhow::Error::from)),
            scope.spawn(|| rounds.run(&daemon, &over)),
        ];
        if let Some(moves) = &mut moves {
            changing.push(scope.spawn(|| moves.run(&daemon, &over)));
        }
        let ended = || changing.iter().any(|thread| thread.is_finished());
        let written = write_files(&files, written, || load.failed() || ended());
        over.store(true, Ordering::Relaxed);
        for thread in changing {
            let changed = thread.join();
            changed.map_err(|_| anyhow::anyhow!("a thread of snapshots panicked"))??;
        }
        written?;
        load.stop()
    })
}

/// A daemon whose pool lies on the first disk, or also on others that come and go.
fn start(moves: bool) -> Result<(Daemon, Option<Moves>)> {
    let pool = Path::new("/dev/vda");
    if !moves {
        return Ok((guest::daemon_with_small_extents(pool, "")?, None));
    }
    // The list of added devices is gone with the machine.
    let [one, two] = OTHERS;
    let lines = format!(
        "spare_devices = [\"{one}\", \"{two}\"]\n\
         [pool.space]\nlow = \"off\"\nvery_low = \"off\"\n"
    );
    let daemon = guest::daemon_with_small_extents(pool, &lines)?;
    let mut moves = Moves::new(&daemon, Some(OTHERS.map(PathBuf::from)), fastrand::u64(..))?;
    let report = |moves: &Moves, leaving| {
        let moves::Counts { left, shrunk, aborted, .. } = moves.counts;
        println!("{MOVES}{left} {shrunk} {aborted}");
        if leaving {
            println!("{LEAVING}");
        }
    };
    report(&moves, false);
    moves.report = Some(report);
    Ok((daemon, Some(moves)))
}

/// Snapshots of both volumes that come and go, those of the one under the oracle in the ledger.
fn rounds_of(
    daemon: &Daemon,
    volume: &Arc<Mutex<Volume>>,
    ledger: &Arc<Ledger>,
    seed: u64,
    run: u64,
) -> Result<Rounds> {
    let targets = Arc::new(Targets::default());
    targets.add("oracle", Some(volume));
    targets.add("files", None);
    let mut rounds = Rounds::new(&targets, seed, run);
    // From here on, a cut is judged by the new run, which knows nothing of older snapshots.
    rounds.adopt(daemon)?;
    let ledger = Arc::clone(ledger);
    rounds.note_in("oracle", Box::new(move |moment, number| ledger.snapshot(moment, number)));
    rounds.report = Some(|figures| {
        println!("{ROUNDS}{}", serde_json::to_string(figures).unwrap_or_default());
        if figures.is_complete() {
            println!("{FOLDED}");
        }
    });
    Ok(rounds)
}

/// Finds the snapshots of the volume under the oracle that were answered, and compares all that are
/// there with what they may hold. Returns how many were compared.
fn find_snapshots(daemon: &Daemon, disk: &[u8]) -> Result<u64> {
    let there = rounds::listed(daemon)?;
    let known = Judge::snapshots(disk, usize::try_from(VOLUME)? / SECTOR)?;
    let mut compared = 0;
    for snapshot in &known {
        let number = snapshot.number;
        if there.contains(&number) {
            rounds::read(daemon, number, &rounds::pieces(VOLUME), |first, data| {
                for (sector, bytes) in (first..).zip(data.chunks_exact(SECTOR)) {
                    snapshot.content.found(ID, sector, bytes)?;
                }
                Ok(())
            })?;
            compared += 1;
        } else {
            let gone = snapshot.goes || !snapshot.taken;
            ensure!(gone, "snapshot {number} was answered and is lost; there are {there:?}");
        }
    }
    Ok(compared)
}

/// Writes file after file until `stop` returns true.
fn write_files(files: &Files, written: u64, stop: impl Fn() -> bool) -> Result<()> {
    let mut number = written;
    let book = Device::open(Path::new("/dev/vdb"))?;
    while !stop() {
        number += 1;
        files.write(number)?;
        ledger::keep(&book, number)?;
        // Each fsync flushes the whole disk; without a pause it would have little to forget.
        std::thread::sleep(Duration::from_millis(150));
    }
    Ok(())
}

/// Compares the volume with what it may hold.
fn find(judge: &Judge) -> Result<Vec<Generation>> {
    let mut contents = Vec::new();
    load::pieces(&device_of("oracle"), |offset, data| {
        for (sector, bytes) in (offset / SECTOR as u64..).zip(data.chunks_exact(SECTOR)) {
            contents.push(judge.found(ID, sector, bytes)?);
        }
        Ok(())
    })?;
    Ok(contents)
}

/// Mounts the file system, which has to recover by itself, and finds its files; checks it, and
/// mounts it again.
fn mount(new: bool, written: u64) -> Result<(Files, u64)> {
    let folder = Path::new("/mnt/files");
    let device = device_of("files");
    let device = device.display();
    let files = Files::new(folder);
    if new {
        guest::mount_new("files", folder)?;
        guest::shell("sync")?;
        return Ok((files, 0));
    }
    guest::shell(&format!("mkdir -p /mnt/files; mount -t ext4 {device} /mnt/files"))?;
    let known = files.check(written).context("files after a power cut")?;
    guest::shell(&format!("umount /mnt/files; e2fsck -fn {device}"))?;
    guest::shell(&format!("mount -t ext4 {device} /mnt/files"))?;
    guest::no_errors()?;
    Ok((files, known))
}

fn end(mut daemon: Daemon) -> Result<()> {
    guest::shell("umount /mnt/files")?;
    ensure!(daemon.stop()?.success(), "the daemon's end: {}", daemon.last_words());
    Ok(())
}
