//! `power`: the machine is switched off in the middle of everything, and its disk loses the data
//! that was not flushed. Data that was flushed through the daemon is there after the next boot.

use std::path::Path;
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
use super::{Run, device_of, guest, sparse};
use crate::kill::content::{Generation, SECTOR};
use crate::kill::family::{Family, Met};
use crate::kill::volume::Volume;
use crate::vm::Drive;
use crate::vm::forgetful::Disk;

/// Bytes of the disk of the pool.
const DISK: u64 = 1 << 30;
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

/// The host's half.
///
/// # Errors
/// When anything that was flushed is not there, or a boot does not get on.
pub fn run(run: &Run) -> Result<String> {
    let cuts = run.either(3, 100);
    let folder = Folder::new("power")?;
    let (pool, book) = (sparse(&folder, "pool", DISK)?, sparse(&folder, "ledger", ledger::SIZE)?);
    let disk = Disk::new(&pool, &folder.path().join("socket"), run.seed)?;
    let vm = run.machine("power")?.drive(disk.drive()).drive(Drive::File(book));
    let mut rng = fastrand::Rng::with_seed(run.seed);
    let (mut lost, mut early, mut total, mut met) = (0, 0, [0; 3], Met::default());
    for number in 0..cuts {
        let mut running = vm.start(&run.inside("power"))?;
        // One in five dies before it has found everything.
        let moment = rng.u8(..5);
        let wait = if moment == 0 { rng.u64(..2500) } else { rng.u64(100..3000) };
        running.wait_for(if moment == 0 { OPENING } else { LOADING })?;
        early += u64::from(moment == 0);
        std::thread::sleep(Duration::from_millis(wait));
        let output = running.cut().with_context(|| format!("cut {number}"))?;
        let failure = output.text.lines().find(|line| line.contains("workload: "));
        ensure!(failure.is_none(), "before cut {number}:\n{}", output.text);
        met = met.with(add(&mut total, &output.text)?);
        lost += disk.cut()?.lost;
    }
    let output = vm.run(&run.inside("power --last"))?;
    met = met.with(add(&mut total, &output.text)?);
    let [durable, open, files] = total;
    // With few cuts, the disk may have had nothing to forget.
    let forgot = lost > 0 || run.is_short();
    ensure!(durable > 0 && forgot && files > 0, "nothing was shown: {total:?}, {lost}");
    ensure!(run.is_short() || met.is_complete(), "not met by a cut: {met}");
    Ok(format!(
        "{cuts} cuts, {early} of them during the start; the disk forgot {lost} sectors; {durable} \
         flushed changes found, {open} others judged, {files} durable files found; cuts met {met}; \
         0 lost, every file system recovered"
    ))
}

/// Adds what a boot verified. Gives the command that the cut before it met.
fn add(total: &mut [u64; 3], text: &str) -> Result<Met> {
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
pub fn inside(last: bool, seed: u64) -> Result<()> {
    let book = Path::new("/dev/vdb");
    println!("{OPENING}");
    let daemon = guest::daemon(Path::new("/dev/vda"), "")?;
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
    println!("{VERIFIED}{} {} {known}", judge.durable, judge.open);
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
        let changing = scope.spawn(|| family.run(&daemon, &over));
        let written = write_files(&files, written, || load.failed() || changing.is_finished());
        over.store(true, Ordering::Relaxed);
        let changed = changing.join();
        changed.map_err(|_| anyhow::anyhow!("the thread of snapshots panicked"))??;
        written?;
        load.stop()
    })
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
