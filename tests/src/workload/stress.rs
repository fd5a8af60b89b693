//! `stress`: many devices, quickly, at once, and with little memory.

mod ready;
mod storm;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::Daemon;
use blockd_testkit::folder::Folder;
use blockd_testkit::tools;

use super::load::{Counts, Load};
use super::{MARK, Run, device_of, figures, guest, sparse};
use crate::kill::volume::Wrong;
use crate::vm::Drive;

/// Devices that are added, or deleted, at the same time.
const TOGETHER: u32 = 4;
/// Devices that the short form fills the driver's slots with: all 64 take it a minute.
const FEW: u32 = 20;
/// Resident memory of the daemon for each idle device.
const RESIDENT: u64 = 8 << 20;
/// Kills while dirty pages are written back.
const DIRTY_KILLS: u32 = 3;
/// The kernel's flags of a thread that writeback waits for: `PF_MEMALLOC_NOIO` and
/// `PF_LOCAL_THROTTLE`, which `PR_SET_IO_FLUSHER` means.
const IO_FLUSHER: u64 = 0x0018_0000;
/// The driver's limit on devices, of kernels that have one for all users.
const SLOTS: &str = "/sys/module/ublk_drv/parameters/ublks_max";

/// The host's half.
///
/// # Errors
/// When anything is not as it should be.
pub fn run(run: &Run) -> Result<String> {
    let (rounds, devices, image) = run.either((1, 16, 32), (20, 64, 256));
    let folder = Folder::new("stress")?;
    let disk = sparse(&folder, "disk", 4 << 30)?;
    let vm = run.machine("stress")?.memory(2048).drive(Drive::File(disk));
    let words = format!("stress --rounds {rounds} --devices {devices} --image {image}");
    let output = vm.run(&run.inside(&words))?;
    let many = figures(&output.text)?.to_owned();
    // Little memory is for a machine of its own, whose disk is not slow.
    let disk = sparse(&folder, "little", 4 << 30)?;
    let vm = run.machine("stress-memory")?.memory(512).drive(Drive::File(disk));
    let output = vm.run(&run.inside(&format!("dirty --mib {}", run.either(256, 1024))))?;
    Ok(format!("{many}; {}", figures(&output.text)?))
}

/// The guest's half.
///
/// # Errors
/// As [`run`].
pub fn inside(rounds: u64, devices: u32, image: u64, seed: u64) -> Result<()> {
    let mut daemon = guest::daemon(Path::new("/dev/vda"), "")?;
    let resident = many(&daemon, rounds, devices).with_context(|| daemon.last_words())?;
    let threads = io_flushers(&daemon)?;
    racing(&daemon)?;
    let slots = slots(&daemon, (devices < FEW).then_some(FEW))?;
    deleted_in_use(&daemon, seed)?;
    guest::shell("sync")?;
    ensure!(daemon.stop()?.success(), "the daemon's end: {}", daemon.last_words());
    let ready = ready::ready()?;
    let storm = storm::storm(image)?;
    println!(
        "{MARK}{rounds} rounds of {devices} devices, {} KiB resident for each, {threads} threads \
         marked as IO flushers, memory locked; {slots}; two adds at once; del under IO; {ready}; \
         {storm}",
        resident >> 10
    );
    Ok(())
}

/// Adds and deletes many devices, again and again; bytes of resident memory for each.
fn many(daemon: &Daemon, rounds: u64, devices: u32) -> Result<u64> {
    let mut each = 0;
    for round in 0..rounds {
        let before = status(daemon, "VmRSS")?;
        several(devices, |number| {
            guest::add_device(daemon, &format!("d{number}"), 64 << 20)
                .with_context(|| format!("device {number} of round {round}"))
        })?;
        let after = status(daemon, "VmRSS")?;
        // Memory that one round left behind is there for the next: the first counts.
        each = each.max(after.saturating_sub(before) / u64::from(devices));
        ensure!(each <= RESIDENT, "{each} bytes resident for each device, {RESIDENT} allowed");
        let locked = status(daemon, "VmLck")?;
        ensure!(locked > 0, "no memory of the daemon is locked");
        several(devices, |number| daemon.cli(&["del", &format!("d{number}")]).map(|_| ()))?;
        let left = guest::shell("ls /dev | grep -c ublkb || true")?;
        ensure!(left.trim() == "0", "{left} devices are left after round {round}");
        println!("round {round}: {each} bytes each, {locked} locked");
    }
    Ok(each)
}

/// Does something for each number, several at a time.
fn several(count: u32, each: impl Fn(u32) -> Result<()> + Sync) -> Result<()> {
    std::thread::scope(|scope| {
        let share = |first: u32| {
            let each = &each;
            let step = usize::try_from(TOGETHER).unwrap_or(1);
            scope.spawn(move || (first..count).step_by(step).try_for_each(each))
        };
        let threads: Vec<_> = (0..TOGETHER).map(share).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|_| bail!("a thread panicked")))
    })
}

/// A line of the daemon's status, in bytes.
fn status(daemon: &Daemon, key: &str) -> Result<u64> {
    let pid = daemon.pid().context("the daemon does not run")?;
    let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    Ok(number.with_context(|| format!("no {key} in:\n{text}"))? * 1024)
}

/// Counts the daemon's threads that writeback may wait for: workers and pools have to be marked.
fn io_flushers(daemon: &Daemon) -> Result<u64> {
    let pid = daemon.pid().context("the daemon does not run")?;
    let (mut marked, mut seen) = (0, Vec::new());
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        let path = entry?.path();
        let name = fs::read_to_string(path.join("comm"))?.trim().to_owned();
        let stat = fs::read_to_string(path.join("stat"))?;
        // The name may hold anything; what follows it is numbers. Flags are the seventh.
        let (_, rest) = stat.rsplit_once(") ").context("a line of stat")?;
        let flags: u64 = rest.split(' ').nth(6).context("flags")?.parse()?;
        let is_marked = flags & IO_FLUSHER == IO_FLUSHER;
        marked += u64::from(is_marked);
        seen.push((name, is_marked));
    }
    println!("threads: {seen:?}");
    let data = |name: &str| name.starts_with("worker") || name.starts_with("pool");
    let bare: Vec<_> = seen.iter().filter(|(name, marked)| data(name) && !marked).collect();
    ensure!(marked > 0 && bare.is_empty(), "not marked as IO flushers: {bare:?} of {seen:?}");
    Ok(marked)
}

/// Two adds of the same name at once: one makes it, and the other finds it or is refused by name.
fn racing(daemon: &Daemon) -> Result<()> {
    for number in 0..8 {
        let name = format!("r{number}");
        let add = || daemon.cli_output(&["add", "--ublk", "--size", "64M", &name]);
        let (one, two) = std::thread::scope(|scope| {
            let other = scope.spawn(add);
            (add(), other.join())
        });
        let two = two.map_err(|_| anyhow::anyhow!("a thread panicked"))?;
        for output in [one?, two?] {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            ensure!(output.status.success(), "one of two adds at once failed: {said}");
        }
        let left = guest::shell("ls /dev | grep -c 'ublkb[0-9]*$'")?;
        ensure!(left.trim() == "1", "{left} devices for one volume");
        daemon.cli(&["del", &name])?;
    }
    Ok(())
}

/// A device in use is not deleted; with force it is, its IO fails and nothing hangs.
fn deleted_in_use(daemon: &Daemon, seed: u64) -> Result<()> {
    for round in 0..4 {
        let volume = guest::add(daemon, "used", 7, 64 << 20)?;
        let counts = Arc::new(Counts::default());
        let path = device_of("used");
        let load = Load::start(&path, &volume, None, &counts, &[seed, seed + 1, seed + round])?;
        tools::wait_until("IO", guest::PATIENCE, || {
            (counts.operations.load(Ordering::Relaxed) > 50).then_some(())
        })?;
        let refused = daemon.cli_output(&["del", "used"])?;
        ensure!(!refused.status.success(), "a device in use was deleted without force");
        ensure!(!load.failed(), "a refused del disturbed the IO");
        let start = Clock::start();
        daemon.cli(&["del", "--force", "used"])?;
        ensure!(start.elapsed() < Duration::from_secs(30), "del --force took too long");
        match load.stop() {
            Ok(()) => bail!("IO went on after del --force"),
            Err(error) => {
                ensure!(error.downcast_ref::<Wrong>().is_none(), "{error:#}");
                println!("as it should: {error:#}");
            }
        }
    }
    Ok(())
}

/// More devices than the driver has room for, or than its limit: a refusal with the reason,
/// and room again afterwards.
fn slots(daemon: &Daemon, most: Option<u32>) -> Result<String> {
    if let Some(most) = most {
        fs::write(SLOTS, most.to_string()).context(SLOTS)?;
    }
    let limit: u32 = fs::read_to_string(SLOTS)?.trim().parse()?;
    let mut count = 0;
    let said = loop {
        // Kernels since 6.15 only count what users without privilege make.
        if count > limit + 2 {
            break format!("{count} devices beyond a limit that is not for root");
        }
        let name = format!("s{count}");
        let output = daemon.cli_output(&["add", "--ublk", "--size", "64M", &name])?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            ensure!(said.contains("ublks_max"), "the refusal does not name the limit: {said}");
            break format!("{count} devices, then: {}", said.trim().replace('\n', " "));
        }
        count += 1;
    };
    ensure!(count >= limit, "only {count} devices of {limit}: {said}");
    for number in 0..count {
        daemon.cli(&["del", &format!("s{number}")])?;
    }
    // A volume that got no device may be left, and is deleted like any other.
    daemon.cli_output(&["del", &format!("s{count}")])?;
    guest::add_device(daemon, "again", 64 << 20)?;
    daemon.cli(&["del", "again"])?;
    Ok(said)
}

/// The guest's half with little memory: more dirty pages than memory, and the daemon dies while
/// they are written back. The writeback needs the daemon, and the daemon needs memory.
///
/// # Errors
/// When it gets stuck, or anything is lost.
pub fn dirty(mib: u64) -> Result<()> {
    guest::shell(
        "echo 60 >/proc/sys/vm/dirty_ratio; echo 50 >/proc/sys/vm/dirty_background_ratio",
    )?;
    let mut daemon = guest::daemon(Path::new("/dev/vda"), "")?;
    guest::add_device(&daemon, "dirty", 2 << 30)?;
    guest::mount_new("dirty", Path::new("/mnt/dirty"))?;
    let start = Clock::start();
    let mut kills = 0;
    std::thread::scope(|scope| -> Result<()> {
        let writing = scope.spawn(|| {
            let line = "yes 0123456789abcde | head -c $(($1 << 20)) >/mnt/dirty/file; sync";
            guest::shell(&format!("set -- {mib}; {line}"))
        });
        // Writeback has to get on between two kills, or it is the test that holds it up.
        while !writing.is_finished() {
            std::thread::sleep(Duration::from_secs(4));
            if kills < DIRTY_KILLS {
                daemon.kill()?;
                daemon.start()?;
                kills += 1;
            }
        }
        writing.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?.map(|_| ())
    })?;
    let written = start.elapsed().as_secs_f64();
    guest::shell("echo 3 >/proc/sys/vm/drop_caches")?;
    let line = "yes 0123456789abcde | head -c $(($1 << 20)) | cmp - /mnt/dirty/file";
    guest::shell(&format!("set -- {mib}; {line}"))?;
    guest::shell("umount /mnt/dirty")?;
    guest::no_errors()?;
    ensure!(daemon.stop()?.success(), "the daemon's end: {}", daemon.last_words());
    ensure!(kills > 0, "the daemon was not killed");
    println!(
        "{MARK}{mib} MiB written with 512 MiB of memory through {kills} kills in {written:.1} s, \
         all compared"
    );
    Ok(())
}
