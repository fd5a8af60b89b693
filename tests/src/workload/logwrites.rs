//! `logwrites`: every write below the pool is logged, and the disk made anew as it was at each
//! flush: the pool has to open there, with all that was durable by then. And disks that fail:
//! they refuse writes, drop them, or change them.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::{Daemon, Ended, Settings};
use blockd_testkit::folder::Folder;
use blockd_testkit::nbd::{Kind, Request};
use blockd_testkit::tools;

use super::device::{Buffer, Device};
use super::ledger::{self, Judge, Ledger, Snapshot};
use super::load::{self, Counts, Load};
use super::replay::Log;
use super::rounds::{self, Moment, Rounds, Targets};
use super::{MARK, Run, device_of, figures, guest, sparse};
use crate::kill::content::{self, SECTOR};
use crate::kill::volume::Volume;
use crate::vm::Drive;

/// Bytes of the pool's disk, of the log, and of the volume.
const DISK: u64 = 256 << 20;
const LOG: u64 = 2 << 30;
const VOLUME: u64 = 8 << 20;
const ID: u32 = 1;
/// The mark after the volume was made.
const MADE: &str = "made";
/// Precede the number of a snapshot in marks: it was answered, it is about to be deleted.
const TAKEN: &str = "taken-";
const GOES: &str = "goes-";
/// The longest load. A slow machine folds nothing in the time of the short form.
const LONGEST: Duration = Duration::from_secs(60);
/// Requests of the thread that sets marks, far from those of the load.
const MARKS: u64 = 1 << 40;
/// The fewest marks: a slow machine sets few in the time of the short form, which looks at each
/// tenth flush only.
const LEAST_MARKS: u64 = 40;

/// The host's half.
///
/// # Errors
/// When a pool does not open, or lacks something.
pub fn run(run: &Run) -> Result<String> {
    let folder = Folder::new("logwrites")?;
    let disk = sparse(&folder, "disk", DISK)?;
    let (log, book) = (sparse(&folder, "log", LOG)?, sparse(&folder, "ledger", ledger::SIZE)?);
    let vm = run
        .machine("logwrites")?
        .modules(&["dm-log-writes", "dm-flakey"])
        .programs(&["dmsetup", "blockdev"])
        .drive(Drive::File(disk))
        .drive(Drive::File(log.clone()))
        .drive(Drive::File(book.clone()));
    let script = run.inside(&format!("logwrites --millis {}", run.either(1500, 15_000)));
    let output = vm.run(&script)?;
    println!("{}", output.text);
    let beside = figures(&output.text)?.to_owned();
    let replayed = replay(&log, &book, run.either(10, 1))?;
    // Disks that fail are a matter of moments.
    let output = vm.run(&run.inside("flakey"))?;
    println!("{}", output.text);
    Ok(format!("{beside}; {replayed}; {}", figures(&output.text)?))
}

/// The marks of a log up to a moment.
#[derive(Debug, Default)]
struct Marks {
    /// The volume was made.
    made: bool,
    /// Cookies of flushes that were answered.
    flushed: BTreeSet<u64>,
    /// Numbers of snapshots that were answered, and of those that may be gone.
    taken: BTreeSet<u64>,
    gone: BTreeSet<u64>,
}

impl Marks {
    fn note(&mut self, mark: &str) {
        let number = |prefix| mark.strip_prefix(prefix)?.parse::<u64>().ok();
        self.made |= mark == MADE;
        self.flushed.extend(number(""));
        self.taken.extend(number(TAKEN));
        self.gone.extend(number(GOES));
    }
}

/// Opens the pool as it was at each flush, or at every `every`th.
fn replay(log: &Path, book: &Path, every: usize) -> Result<String> {
    let folder = Folder::new("replay")?;
    let image = sparse(&folder, "image", DISK)?;
    let file = File::options().write(true).open(&image)?;
    let (log, book) = (Log::open(log)?, std::fs::read(book)?);
    let sectors = usize::try_from(VOLUME)? / SECTOR;
    let snapshots = Judge::snapshots(&book, sectors)?;
    let mut marks = Marks::default();
    let (mut flushes, mut opened, mut early, mut durable, mut compared) = (0, 0, 0, 0, 0);
    for (number, entry) in log.entries.iter().enumerate() {
        if let Some(mark) = &entry.mark {
            marks.note(mark);
            continue;
        }
        log.apply(entry, &file)?;
        if !entry.is_flush() {
            continue;
        }
        flushes += 1;
        if flushes % every != 0 {
            continue;
        }
        let judge = Judge::at(&book, sectors, |flush| marks.flushed.contains(&flush), false)?;
        let copy = folder.path().join("copy");
        let mut cp = Command::new("cp");
        tools::output(cp.args(["--sparse=always", "--reflink=auto"]).arg(&image).arg(&copy))?;
        let checked = open(&copy, &judge, &snapshots, &marks)
            .with_context(|| format!("as of entry {number} of {}", log.entries.len()))?;
        if let Some(there) = checked {
            opened += 1;
            compared += there;
            durable = durable.max(judge.durable);
        } else {
            early += 1;
        }
    }
    let shown = opened > 0 && durable > 0 && compared > 0;
    ensure!(shown, "{flushes} flushes, {opened} opened, {durable} durable, {compared} snapshots");
    Ok(format!(
        "{} entries with {flushes} flushes, at {opened} of which the pool was opened and compared \
         with {compared} snapshots, {early} before it was made; up to {durable} durable changes, \
         0 lost",
        log.entries.len()
    ))
}

/// Opens a pool and compares the volume and its snapshots, of which it returns the number; `None`
/// when the pool could not be opened and need not.
fn open(pool: &Path, judge: &Judge, snapshots: &[Snapshot], marks: &Marks) -> Result<Option<u64>> {
    let settings =
        Settings { pool: Some(pool.to_path_buf()), pool_size: DISK, ..Settings::default() };
    let mut daemon = Daemon::new("replay", &settings)?;
    if let Err(error) = daemon.start() {
        // A pool that was being made is refused, by name.
        let ended = error.downcast_ref::<Ended>().and_then(|ended| ended.status.code());
        return if !marks.made && ended.is_some() { Ok(None) } else { Err(error) };
    }
    daemon.cli(&["add", "--nbd", "--size", &VOLUME.to_string(), "oracle"])?;
    let mut connection = daemon.connect("oracle")?;
    let data = connection.read(0, usize::try_from(VOLUME)?)?;
    for (sector, bytes) in (0..).zip(data.chunks_exact(SECTOR)) {
        judge.found(ID, sector, bytes)?;
    }
    drop(connection);
    let compared = compare_snapshots(&daemon, snapshots, marks)?;
    ensure!(daemon.stop()?.success(), "the daemon's end: {}", daemon.last_words());
    let reader = tools::workspace_root().join("sim/reader/blockd_reader.py");
    let mut check = Command::new(tools::find("python3")?);
    tools::output(check.arg(reader).arg(pool).arg("check")).context("checking the closed pool")?;
    Ok(Some(compared))
}

/// Finds the snapshots that had been answered and not deleted by then, and compares all that are
/// there.
fn compare_snapshots(daemon: &Daemon, snapshots: &[Snapshot], marks: &Marks) -> Result<u64> {
    let there = rounds::listed(daemon)?;
    for number in marks.taken.difference(&marks.gone) {
        ensure!(there.contains(number), "snapshot {number} is lost; there are {there:?}");
    }
    for number in &there {
        let snapshot = snapshots.iter().find(|snapshot| snapshot.number == *number);
        let content =
            &snapshot.with_context(|| format!("snapshot {number} was not begun"))?.content;
        rounds::read(daemon, *number, &rounds::pieces(VOLUME), |first, data| {
            for (sector, bytes) in (first..).zip(data.chunks_exact(SECTOR)) {
                content.found(ID, sector, bytes)?;
            }
            Ok(())
        })?;
    }
    Ok(there.len() as u64)
}

/// The guest's half: load on a pool whose writes are logged.
///
/// # Errors
/// When the load fails.
pub fn inside(millis: u64, seed: u64) -> Result<()> {
    guest::shell(
        "dmsetup create --noudevsync logged --table \
         \"0 $(blockdev --getsz /dev/vda) log-writes /dev/vda /dev/vdb\"; dmsetup mknodes",
    )?;
    let mut daemon = guest::daemon_with_small_extents(Path::new("/dev/mapper/logged"), "")?;
    let volume = guest::add(&daemon, "oracle", ID, VOLUME)?;
    // The log has a FUA write before older writes that no flush has covered yet: of two to the same
    // place, one after the other, it would have the wrong one last.
    load::lock(&volume).leave_fua_out();
    mark(MADE)?;
    let sectors = usize::try_from(VOLUME)? / SECTOR;
    let book = Device::open(Path::new("/dev/vdc"))?;
    let ledger = Arc::new(Ledger::new(book, 1, &vec![0; sectors])?);
    let counts = Arc::new(Counts::default());
    let path = device_of("oracle");
    let load = load_on(&path, &volume, &ledger, &counts, seed)?;
    let mut rounds = rounds_of(&volume, &ledger, seed);
    let (over, folded) = (AtomicBool::new(false), Arc::clone(&rounds.complete));
    std::thread::scope(|scope| {
        let changing = scope.spawn(|| rounds.run(&daemon, &over));
        let shortest = Duration::from_millis(millis);
        let marked = set_marks(&path, &ledger, |marks, since| {
            let folded = folded.load(Ordering::Relaxed) || since > LONGEST;
            let done = since > shortest && marks >= LEAST_MARKS && folded;
            done || load.failed() || changing.is_finished()
        });
        over.store(true, Ordering::Relaxed);
        let changed = changing.join();
        changed.map_err(|_| anyhow::anyhow!("the thread of snapshots panicked"))??;
        marked
    })
    .with_context(|| daemon.last_words())?;
    load.stop()?;
    load::compare(&path, &volume)?;
    rounds.figures.expect_folds()?;
    daemon.stop()?;
    println!("{MARK}{}", rounds.figures);
    remove("logged")
}

fn mark(text: &str) -> Result<String> {
    guest::shell(&format!("dmsetup message logged 0 mark {text}"))
}

/// Flushes again and again, and sets a mark after each answer, until `stop` returns true, which
/// gets the number of marks and the time that passed.
fn set_marks(path: &Path, ledger: &Ledger, stop: impl Fn(u64, Duration) -> bool) -> Result<()> {
    let device = Device::open(path)?;
    let start = Clock::start();
    let mut cookie = MARKS;
    while !stop(cookie - MARKS, start.elapsed()) {
        cookie += 1;
        let flush = Request { kind: Kind::Flush, flags: 0, cookie, offset: 0, len: 0 };
        ledger.begins(&flush, 0)?;
        device.ask(&flush, &mut Buffer::default())?;
        ledger.done(&flush)?;
        // From here on, what the flush covered is on the disk.
        mark(&cookie.to_string())?;
    }
    Ok(())
}

/// Snapshots that come and go, in the ledger and in marks.
fn rounds_of(volume: &Arc<Mutex<Volume>>, ledger: &Arc<Ledger>, seed: u64) -> Rounds {
    let targets = Arc::new(Targets::default());
    targets.add("oracle", Some(volume));
    let mut rounds = Rounds::new(&targets, seed, 1);
    let ledger = Arc::clone(ledger);
    let note = move |moment, number| {
        match moment {
            Moment::Begins => {}
            Moment::Taken => drop(mark(&format!("{TAKEN}{number}"))?),
            Moment::Goes => drop(mark(&format!("{GOES}{number}"))?),
        }
        ledger.snapshot(moment, number)
    };
    rounds.note_in("oracle", Box::new(note));
    rounds
}

/// Removes a device-mapper device. Retried for up to 5 s: the kernel closes the files of an
/// io_uring instance shortly after its process has exited, and the device is busy until then.
fn remove(device: &str) -> Result<()> {
    guest::shell(&format!("dmsetup remove --noudevsync --retry {device}")).map(|_| ())
}

fn load_on(
    path: &Path,
    volume: &Arc<Mutex<Volume>>,
    ledger: &Arc<Ledger>,
    counts: &Arc<Counts>,
    seed: u64,
) -> Result<Load> {
    Load::start(path, volume, Some(ledger), counts, &[seed, seed + 1, seed + 2])
}

/// The faults of a disk's writes, as arguments of device-mapper's `flakey`.
const FAULTS: [(&str, &str); 3] = [
    ("refuses writes", "1 error_writes"),
    ("drops writes", "1 drop_writes"),
    ("changes writes", "5 corrupt_bio_byte 32 w 1 0"),
];

/// The guest's half with disks that fail.
///
/// # Errors
/// When a wrong answer comes, or a pool does not open anew.
pub fn flakey() -> Result<()> {
    let table = |features: Option<&str>| {
        let rest = match features {
            Some(features) => format!("flakey /dev/vda 0 0 1000 {features}"),
            None => "linear /dev/vda 0".to_owned(),
        };
        format!("\"0 $(blockdev --getsz /dev/vda) {rest}\"")
    };
    let mut found = Vec::new();
    for (what, features) in FAULTS {
        guest::shell(&format!(
            "blkdiscard -z /dev/vda; dmsetup create --noudevsync flaky --table {}; dmsetup mknodes",
            table(None)
        ))?;
        let swap = |features: Option<&str>| {
            guest::shell(&format!(
                "dmsetup load flaky --table {}; dmsetup suspend --noflush flaky; \
                 dmsetup resume --noudevsync flaky",
                table(features)
            ))
        };
        let said = fault(what, &|| swap(Some(features)).map(|_| ()), &|| swap(None).map(|_| ()));
        found.push(format!("a disk that {what}: {}", said.with_context(|| what.to_owned())?));
        remove("flaky")?;
    }
    println!("{MARK}{}", found.join("; "));
    Ok(())
}

/// A pool on a disk that begins to fail, and is well again.
fn fault(
    what: &str,
    fail: &dyn Fn() -> Result<()>,
    mend: &dyn Fn() -> Result<()>,
) -> Result<String> {
    let pool = PathBuf::from("/dev/mapper/flaky");
    let mut daemon = guest::daemon(&pool, "")?;
    guest::add_device(&daemon, "flaky", VOLUME)?;
    let device = Device::open(&device_of("flaky"))?;
    let half = VOLUME / 2;
    write(&device, 0, half, 1)?;
    flush(&device)?;
    fail()?;
    let refused = write(&device, half, half, 2).and_then(|()| flush(&device));
    let state = daemon.cli(&["pool", "show"])?;
    let mut said = match &refused {
        Ok(()) => "nothing to be noticed at once".to_owned(),
        Err(error) => {
            let errno = error.downcast_ref::<std::io::Error>().and_then(|e| e.raw_os_error());
            ensure!(errno == Some(nix::libc::EIO), "not EIO: {error:#}");
            "EIO".to_owned()
        }
    };
    if what == "refuses writes" {
        ensure!(refused.is_err(), "a disk refused writes and the client got no error");
        let again = write(&device, half, 4096, 3).and_then(|()| flush(&device));
        ensure!(again.is_err(), "a pool that failed takes writes: {state}");
        let text = state.to_string();
        ensure!(text.contains("fail") || text.contains("read-only"), "no failed state: {text}");
        check(&device, half).context("while the disk fails")?;
    }
    drop(device);
    mend()?;
    daemon.kill()?;
    if let Err(error) = daemon.start() {
        let ended = error.downcast_ref::<Ended>().and_then(|ended| ended.status.code());
        ensure!(what != "refuses writes", "not opened anew: {error:#}");
        // The disk lied: what is damaged is refused by name, never taken for right.
        ensure!(ended == Some(10), "neither open nor refused as damaged: {error:#}");
        return Ok(said + ", refused as damaged afterwards");
    }
    let device = Device::open(&device_of("flaky"))?;
    check(&device, half).context("after the disk was mended")?;
    if what == "refuses writes" {
        write(&device, half, half, 4)?;
        flush(&device)?;
    }
    drop(device);
    said.push_str(", opened anew with all that was flushed before");
    if !daemon.stop()?.success() && what == "refuses writes" {
        bail!("the daemon's end: {}", daemon.last_words());
    }
    Ok(said)
}

fn write(device: &Device, offset: u64, len: u64, generation: u32) -> Result<()> {
    let mut buffer = Buffer::default();
    let first = offset / SECTOR as u64;
    for (sector, bytes) in (first..).zip(buffer.of(usize::try_from(len)?).chunks_exact_mut(SECTOR))
    {
        content::fill(bytes, ID, sector, generation);
    }
    let len = u32::try_from(len)?;
    device.ask(&Request { kind: Kind::Write, flags: 0, cookie: 0, offset, len }, &mut buffer)
}

fn flush(device: &Device) -> Result<()> {
    let flush = Request { kind: Kind::Flush, flags: 0, cookie: 0, offset: 0, len: 0 };
    device.ask(&flush, &mut Buffer::default())
}

/// Checks the data that was flushed before the disk began to fail.
fn check(device: &Device, len: u64) -> Result<()> {
    let mut buffer = Buffer::default();
    let read =
        Request { kind: Kind::Read, flags: 0, cookie: 0, offset: 0, len: u32::try_from(len)? };
    device.ask(&read, &mut buffer)?;
    for (sector, bytes) in (0..).zip(buffer.bytes().chunks_exact(SECTOR)) {
        ensure!(
            content::holds(bytes, ID, sector, 1),
            "sector {sector}: {}",
            content::describe(bytes)
        );
    }
    Ok(())
}
