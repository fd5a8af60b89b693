//! `kill`: the daemon dies again and again under everything at once, its devices wait and go on,
//! and the only effect on users is a delay.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::Daemon;
use blockd_testkit::folder::Folder;
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use super::files::Files;
use super::load::{self, Counts, Load};
use super::rounds::{self, Targets};
use super::{MARK, Run, device_of, figures, guest, sparse};
use crate::kill::family::{Family, Met};
use crate::kill::volume::Volume;
use crate::vm::Drive;

/// Sectors of the disk.
const DISK: u64 = 1 << 21;
/// Pieces of the slow disk, each with a delay of its own, so that writes overtake each other.
const PIECES: u64 = 64;
/// Milliseconds that a write to the slow disk takes.
const DELAYS: std::ops::RangeInclusive<u64> = 50..=200;
/// Bytes of the volumes under the oracle.
const VOLUME: u64 = 24 << 20;
/// Time at most for changes of snapshots and clones before a kill.
const CHANGES: Duration = Duration::from_secs(2);
/// Time at most for the first folds before the first kill, on a busy machine.
const FOLDS: Duration = Duration::from_secs(120);
/// Kills after which everything is compared.
const TOGETHER: u64 = 10;

/// The counts of a run.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Figures {
    pub kills: u64,
    pub kills_during_start: u64,
    pub operations: u64,
    pub flushes: u64,
    pub files: u64,
    pub fio_runs: u64,
    pub comparisons: u64,
    pub family_changes: u64,
    pub met: Met,
    pub rounds: rounds::Figures,
    pub slowest_start_ms: u64,
    pub slowest_request_ms: u64,
}

/// The host's half.
///
/// # Errors
/// When anything was lost, failed or got stuck.
pub fn run(run: &Run) -> Result<String> {
    let kills = run.either(3, 100);
    let mut total = Figures::default();
    for slow in [false, true] {
        let folder = Folder::new("kill")?;
        let disk = sparse(&folder, "disk", DISK * 512)?;
        let vm = run.machine("kill")?.modules(&["dm-delay"]).programs(&["dmsetup"]);
        let mut script = String::new();
        let mut pool = "/dev/vda";
        if slow {
            write!(script, "cat >/tmp/table <<'EOF'\n{}EOF\n", table(run.seed))?;
            writeln!(script, "dmsetup create --noudevsync slow </tmp/table || exit 1")?;
            writeln!(script, "dmsetup mknodes")?;
            pool = "/dev/mapper/slow";
        }
        script.push_str(&run.inside(&format!("kill --pool {pool} --kills {kills}")));
        let output = vm.drive(Drive::File(disk)).run(&script)?;
        let more: Figures = serde_json::from_str(figures(&output.text)?)?;
        total = total.with(more);
    }
    // With few kills, a slow disk may have been too slow for a fold.
    total.rounds.expect_folds()?;
    ensure!(total.operations > 0 && total.files > 0 && total.fio_runs > 0, "{total:?}");
    ensure!(run.is_short() || total.met.is_complete(), "not met by a kill: {total:?}");
    let Figures { kills, kills_during_start, operations, flushes, files, fio_runs, .. } = total;
    Ok(format!(
        "{kills} kills, {kills_during_start} of them during a start, half of all on a slow disk; \
         {operations} operations, {flushes} flushes, {files} files, {fio_runs} runs of fio with \
         crc32c, {} comparisons; {} changes of snapshots and clones, kills met {}; {}; slowest \
         start {} ms, slowest request {} ms; 0 errors, 0 lost, 0 remounts",
        total.comparisons,
        total.family_changes,
        total.met,
        total.rounds,
        total.slowest_start_ms,
        total.slowest_request_ms
    ))
}

impl Figures {
    fn with(self, other: Self) -> Self {
        Self {
            kills: self.kills + other.kills,
            kills_during_start: self.kills_during_start + other.kills_during_start,
            operations: self.operations + other.operations,
            flushes: self.flushes + other.flushes,
            files: self.files + other.files,
            fio_runs: self.fio_runs + other.fio_runs,
            comparisons: self.comparisons + other.comparisons,
            family_changes: self.family_changes + other.family_changes,
            met: self.met.with(other.met),
            rounds: self.rounds.with(other.rounds),
            slowest_start_ms: self.slowest_start_ms.max(other.slowest_start_ms),
            slowest_request_ms: self.slowest_request_ms.max(other.slowest_request_ms),
        }
    }
}

/// Device-mapper's table: reads at once, writes late, by a delay that differs from piece to piece.
fn table(seed: u64) -> String {
    let mut rng = fastrand::Rng::with_seed(seed);
    let piece = DISK / PIECES;
    let line = |number| {
        let (start, delay) = (number * piece, rng.u64(DELAYS));
        format!("{start} {piece} delay /dev/vda {start} 0 /dev/vda {start} {delay}\n")
    };
    (0..PIECES).map(line).collect()
}

/// The guest's half.
///
/// # Errors
/// At the first thing that is wrong.
pub fn inside(pool: &Path, kills: u64, seed: u64) -> Result<()> {
    let mut daemon = guest::daemon_with_small_extents(pool, "")?;
    let (mut volumes, targets) = (Vec::new(), Arc::new(Targets::default()));
    for (name, id) in [("one", 1), ("two", 2)] {
        let volume = guest::add(&daemon, name, id, VOLUME)?;
        targets.add(name, Some(&volume));
        volumes.push((name, volume));
    }
    guest::add_device(&daemon, "fio", 16 << 20)?;
    guest::add_device(&daemon, "files", 128 << 20)?;
    guest::mount_new("files", Path::new("/mnt/files"))?;
    targets.add("fio", None);
    targets.add("files", None);
    let mounted = mounts()?;
    let mut rounds = Rounds {
        rng: fastrand::Rng::with_seed(seed),
        volumes,
        family: Family::new(seed, None)?,
        beside: rounds::Rounds::new(&targets, seed, 0),
        counts: Arc::default(),
        figures: Figures::default(),
    };
    let (stop, files, runs) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let side = [
            scope.spawn(|| write_files(&stop, &files)),
            scope.spawn(|| run_fio(&stop, &runs, seed)),
        ];
        let mut result = rounds.all(&mut daemon, kills);
        stop.store(true, Ordering::Relaxed);
        for thread in side {
            let ended = thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a thread panicked")));
            result = result.and(ended);
        }
        result
    })
    .with_context(|| daemon.last_words())?;
    rounds.figures.files = files.into_inner();
    rounds.figures.fio_runs = runs.into_inner();
    ensure!(mounts()? == mounted, "mounted now: {}", mounts()?);
    guest::shell("echo 3 >/proc/sys/vm/drop_caches")?;
    Files::new(Path::new("/mnt/files")).check(rounds.figures.files)?;
    guest::shell(&format!("umount /mnt/files; e2fsck -fn {}", device_of("files").display()))?;
    guest::no_errors()?;
    ensure!(daemon.stop()?.success(), "the daemon's end: {}", daemon.last_words());
    let counts = &rounds.counts;
    rounds.figures.family_changes = rounds.family.changes.load(Ordering::Relaxed);
    rounds.figures.met = rounds.family.met;
    rounds.figures.rounds = rounds.beside.figures;
    rounds.figures.operations = counts.operations.load(Ordering::Relaxed);
    rounds.figures.flushes = counts.flushes.load(Ordering::Relaxed);
    rounds.figures.slowest_request_ms = counts.slowest.load(Ordering::Relaxed);
    println!("{MARK}{}", serde_json::to_string(&rounds.figures)?);
    Ok(())
}

struct Rounds {
    rng: fastrand::Rng,
    volumes: Vec<(&'static str, Arc<Mutex<Volume>>)>,
    family: Family,
    beside: rounds::Rounds,
    counts: Arc<Counts>,
    figures: Figures,
}

impl Rounds {
    fn all(&mut self, daemon: &mut Daemon, kills: u64) -> Result<()> {
        while self.figures.kills < kills {
            let mut loads = Vec::new();
            for (name, volume) in &self.volumes {
                let seeds: Vec<u64> = (0..4).map(|_| self.rng.u64(..)).collect();
                let path = device_of(name);
                loads.push(Load::start(&path, volume, None, &self.counts, &seeds)?);
            }
            for _ in 0..TOGETHER.min(kills - self.figures.kills) {
                self.live(daemon)?;
                self.kill(daemon)?;
                self.family.compare(daemon)?;
                self.beside.recover(daemon)?;
                if loads.iter().any(Load::failed) {
                    break;
                }
            }
            for load in loads {
                load.stop()?;
            }
            for (name, volume) in &self.volumes {
                load::compare(&device_of(name), volume)?;
                self.figures.comparisons += 1;
            }
            println!("{} kills", self.figures.kills);
        }
        Ok(())
    }

    /// Time for the load, and snapshots and clones that come and go, up to a kill.
    fn live(&mut self, daemon: &Daemon) -> Result<()> {
        let pause = Duration::from_millis(self.rng.u64(20..1000));
        let answered = Arc::clone(&self.family.changes);
        let until = answered.load(Ordering::Relaxed) + self.rng.u64(..4);
        // A round of snapshots takes longer than most lives.
        let (folded, first) = (Arc::clone(&self.beside.complete), self.figures.kills == 0);
        let (family, beside) = (&mut self.family, &mut self.beside);
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let changing = [
                scope.spawn(|| family.run(daemon, &over).map_err(anyhow::Error::from)),
                scope.spawn(|| beside.run_until_killed(daemon, &over)),
            ];
            let start = Clock::start();
            // A command takes long here: a kill is to happen during any of them.
            while answered.load(Ordering::Relaxed) < until && start.elapsed() < CHANGES {
                std::thread::sleep(Duration::from_millis(10));
            }
            while first && !folded.load(Ordering::Relaxed) && start.elapsed() < FOLDS {
                std::thread::sleep(Duration::from_millis(10));
            }
            std::thread::sleep(pause);
            let signalled = daemon.signal(Signal::SIGKILL);
            over.store(true, Ordering::Relaxed);
            signalled?;
            let mut result = Ok(());
            for thread in changing {
                let panicked = |_| Err(anyhow::anyhow!("a thread of snapshots panicked"));
                let ended = thread.join().unwrap_or_else(panicked);
                result = result.and(ended);
            }
            result
        })
    }

    /// Dies, and comes back; one in four times it dies once more on the way.
    fn kill(&mut self, daemon: &mut Daemon) -> Result<()> {
        daemon.kill()?;
        self.figures.kills += 1;
        if self.figures.kills.is_multiple_of(4) {
            daemon.spawn()?;
            std::thread::sleep(Duration::from_millis(self.rng.u64(..400)));
            daemon.kill().context("the daemon ended while it was started")?;
            self.figures.kills_during_start += 1;
        }
        let took = daemon.start()?;
        let millis = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        self.figures.slowest_start_ms = self.figures.slowest_start_ms.max(millis);
        Ok(())
    }
}

fn mounts() -> Result<String> {
    let all = std::fs::read_to_string("/proc/mounts")?;
    Ok(all.lines().filter(|line| line.contains("/mnt/")).collect())
}

/// Writes file after file until it is stopped.
fn write_files(stop: &AtomicBool, written: &AtomicU64) -> Result<()> {
    let files = Files::new(Path::new("/mnt/files"));
    while !stop.load(Ordering::Relaxed) {
        files.write(written.load(Ordering::Relaxed) + 1)?;
        written.fetch_add(1, Ordering::Relaxed);
        // Most of the time belongs to the rest.
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Run after run, each of which reads what it wrote.
fn run_fio(stop: &AtomicBool, runs: &AtomicU64, seed: u64) -> Result<()> {
    while !stop.load(Ordering::Relaxed) {
        let number = runs.fetch_add(1, Ordering::Relaxed);
        let start = Clock::start();
        guest::shell(&format!(
            "fio --name=kill --filename={} --rw=randrw --bs=4k --size=8m --direct=1 \
             --ioengine=libaio --iodepth=8 --verify=crc32c --verify_backlog=128 --verify_fatal=1 \
             --randseed={}",
            device_of("fio").display(),
            seed.wrapping_add(number)
        ))?;
        println!("fio {number}: {:.1} s", start.elapsed().as_secs_f64());
    }
    Ok(())
}
