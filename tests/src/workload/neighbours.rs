//! `neighbours`: block devices of one daemon beside each other: what heavy or stuck IO on one
//! device leaves to clients of another one, of an NBD export, and of the control socket. The same
//! with NBD attackers and without a machine is `blockd_tests::neighbours`.

mod attack;
mod victim;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::{Daemon, Settings};
use blockd_testkit::folder::Folder;
use serde_json::Value;

use super::{MARK, Run, figures, sparse};
use crate::vm::Drive;
use attack::Attack;
use victim::{Figures, Victim};

const MIB: u64 = 1 << 20;
/// Bytes of the disks: that of the victims' pool, and that of the pool that is full.
const DISK: u64 = 16 << 30;
const SMALL_DISK: u64 = 128 * MIB;
/// Bytes of each volume. They are thin.
const VOLUME: u64 = 4 << 40;
/// Bytes at the start of a volume that are written.
const WRITTEN: u64 = 16 * MIB;
/// Bytes that a pool allocates at once.
const EXTENT: u64 = 256 << 10;

/// The volumes, and the pool that is full.
const VICTIM: &str = "victim";
const NEIGHBOUR: &str = "neighbour";
const EXPORT: &str = "export";
const FULL: &str = "full";

/// The least part of a victim's throughput that is left to it. Without a machine it is a half;
/// emulated processors also do the attacker's part of the kernel's work.
const LEAST_SHARE: f64 = 0.25;
/// The most by which the worst latency grows; twice what is allowed without a machine.
const MOST_BEYOND: Duration = Duration::from_secs(2);
/// An attacker's resources are free after this time; a look alone takes a part of it here.
const LEFT: Duration = Duration::from_secs(3);
/// A volume with writes that wait is detached within this time.
const DETACH: Duration = Duration::from_secs(5);
/// A connection of a volume that was detached ends within this time.
const CLOSE: Duration = Duration::from_secs(60);
/// How often a pair is measured until a miss counts.
const ATTEMPTS: u32 = 3;

/// The host's half.
///
/// # Errors
/// When a victim gets too little.
pub fn run(run: &Run) -> Result<String> {
    let folder = Folder::new("neighbours")?;
    let vm = run
        .machine("neighbours")?
        .drive(Drive::File(sparse(&folder, "disk", DISK)?))
        .drive(Drive::File(sparse(&folder, "small", SMALL_DISK)?));
    let short = if run.is_short() { " --short" } else { "" };
    let output = vm.run(&run.inside(&format!("neighbours{short}")))?;
    println!("{}", output.text);
    Ok(figures(&output.text)?.to_owned())
}

/// The guest's half.
///
/// # Errors
/// As [`run`].
pub fn inside(short: bool) -> Result<()> {
    let mut daemon = start()?;
    closed_beside_idle(&daemon)?;
    // The short form runs all victims at the same time, the long one each by itself.
    let groups: Vec<&[Victim]> =
        if short { vec![&Victim::ALL] } else { Victim::ALL.chunks(1).collect() };
    let window = Duration::from_secs(if short { 2 } else { 4 });
    println!(
        "{:<12}{:<13}{:>10}{:>10}{:>10}{:>10}{:>7}",
        "attack", "victim", "good/s", "worst ms", "beside/s", "worst ms", "share"
    );
    let (mut pairs, mut missed) = (0, Vec::new());
    for attack in Attack::ALL {
        for group in &groups {
            pairs += group.len();
            missed.extend(measured(&daemon, attack, group, window)?);
        }
    }
    ensure!(missed.is_empty(), "{} missed:\n{}", missed.len(), missed.join("\n"));
    ensure!(daemon.stop()?.success(), "the daemon's end: {}", daemon.last_words());
    println!("{MARK}{pairs} pairs of a device under attack and another client");
    Ok(())
}

/// A daemon with a pool for victims and a full one.
fn start() -> Result<Daemon> {
    let settings = Settings {
        pool: Some("/dev/vda".into()),
        tables: "[workers]\ncount = 2\n[metrics]\naddress = \"127.0.0.1:0\"\n".to_owned(),
        pool_lines: format!(
            "[[pool]]\nname = {FULL:?}\npath = \"/dev/vdb\"\n\
             [pool.space]\nlow = \"off\"\nvery_low = \"off\"\n"
        ),
        ..Settings::default()
    };
    let mut daemon = Daemon::new("guest", &settings)?;
    daemon.start()?;
    let size = VOLUME.to_string();
    for (volume, kind) in [(VICTIM, "--ublk"), (NEIGHBOUR, "--ublk"), (EXPORT, "--nbd")] {
        daemon.cli(&["add", kind, "--size", &size, volume])?;
    }
    let add = ["add", "--ublk", "--pool", FULL, "--on-full", "error", "--size", &size, FULL];
    daemon.cli(&add)?;
    for volume in [VICTIM, NEIGHBOUR] {
        attack::fill(volume)?;
    }
    let mut export = daemon.connect(EXPORT)?;
    let data = vec![0x5a; usize::try_from(MIB)?];
    for offset in (0..WRITTEN).step_by(data.len()) {
        export.write(offset, &data)?;
    }
    attack::fill_pool()?;
    daemon.cli(&["set", "--pool", FULL, "--on-full", "block", FULL])?;
    Ok(daemon)
}

/// Victims beside a good neighbour and beside an attack, again if something was missed; what was
/// missed in the last attempt.
fn measured(
    daemon: &Daemon,
    attack: Attack,
    victims: &[Victim],
    window: Duration,
) -> Result<Vec<String>> {
    let mut missed = Vec::new();
    for attempt in 1..=ATTEMPTS {
        let good = victim::measure(daemon, victims, window, true)?.figures();
        let held = free_memory(daemon)?;
        let running = attack.start(daemon)?;
        let beside = victim::measure(daemon, victims, window, false)?;
        missed.clear();
        for ((victim, good), bad) in victims.iter().zip(&good).zip(beside.figures()) {
            let verdict = judge(good, &bad);
            print_row(attack, *victim, (good, &bad), verdict.as_deref());
            missed.extend(verdict.map(|verdict| format!("{attack:?}, {victim:?}: {verdict}")));
        }
        let took = running.end(daemon)?;
        if took > DETACH {
            missed.push(format!("{attack:?}: detached after {:.1} s", took.as_secs_f64()));
        }
        // Victims whose operation was stuck go on now, or never, which fails the run.
        beside.join();
        if let Err(left) = nothing_left(daemon, &held) {
            missed.push(format!("{attack:?}: {left}"));
        }
        if missed.is_empty() {
            break;
        }
        println!("attempt {attempt}: {}", missed.join("; "));
    }
    Ok(missed)
}

/// Attaches a volume, connects to it beside idle connections that are older, one of each worker,
/// and has it detached by force. Up to Linux 6.12 a file in a ring's table is closed only when the
/// receives of idle connections have ended.
fn closed_beside_idle(daemon: &Daemon) -> Result<()> {
    const NAME: &str = "closed";
    let older = [daemon.connect(EXPORT)?, daemon.connect(EXPORT)?];
    daemon.cli(&["add", "--nbd", "--size", "8M", NAME])?;
    let mut younger = daemon.connect(NAME)?;
    daemon.cli(&["detach", "--force", NAME])?;
    let start = Clock::start();
    ensure!(younger.receive().is_err(), "a detached volume answers");
    let took = start.elapsed();
    // One that waits for idle ones does not end at all.
    ensure!(took < CLOSE, "a closed connection ended after {:.1} s", took.as_secs_f64());
    daemon.cli(&["del", NAME])?;
    drop(older);
    Ok(())
}

fn judge(good: &Figures, bad: &Figures) -> Option<String> {
    let share = bad.per_second / good.per_second.max(f64::MIN_POSITIVE);
    let beyond = bad.worst.saturating_sub(good.worst);
    if let Some(problem) = &bad.problem {
        return Some(problem.clone());
    }
    if beyond > MOST_BEYOND {
        return Some(format!("worst {:.1} s beyond", beyond.as_secs_f64()));
    }
    (share < LEAST_SHARE).then(|| format!("share {share:.2}"))
}

fn print_row(attack: Attack, victim: Victim, figures: (&Figures, &Figures), verdict: Option<&str>) {
    let (good, bad) = figures;
    println!(
        "{:<12}{:<13}{:>10.0}{:>10.1}{:>10.0}{:>10.1}{:>7.2}  {}",
        format!("{attack:?}"),
        format!("{victim:?}"),
        good.per_second,
        good.worst.as_secs_f64() * 1e3,
        bad.per_second,
        bad.worst.as_secs_f64() * 1e3,
        bad.per_second / good.per_second.max(f64::MIN_POSITIVE),
        verdict.unwrap_or("ok"),
    );
}

/// Bytes of IO memory that are free, for each worker.
fn free_memory(daemon: &Daemon) -> Result<Vec<u64>> {
    let metrics = daemon.metrics()?;
    let lines = metrics.lines().filter(|line| line.starts_with("blockd_worker_free_memory_bytes{"));
    let free: Vec<u64> = lines.filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect();
    ensure!(free.len() == 2, "no free memory of two workers in the metrics");
    Ok(free)
}

/// Waits until all memory is free that was free before.
fn nothing_left(daemon: &Daemon, before: &[u64]) -> Result<()> {
    let start = Clock::start();
    loop {
        let now = free_memory(daemon)?;
        if now.iter().zip(before).all(|(now, before)| now >= before) {
            return Ok(());
        }
        let late = start.elapsed() > LEFT;
        ensure!(!late, "free memory {now:?}, before the attack {before:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// How many writes wait for space in the full pool.
fn waiting(daemon: &Daemon) -> Result<u64> {
    let shown: Value = daemon.cli(&["show", "--pool", FULL, FULL])?;
    ensure!(shown["volume"].is_object(), "no volume in {shown}");
    let line = format!("blockd_blocked_writes{{pool={FULL:?},volume={FULL:?}}} ");
    let metrics = daemon.metrics()?;
    let value = metrics.lines().find_map(|found| found.strip_prefix(line.as_str()));
    value.context("no metric of waiting writes")?.parse().context("waiting writes")
}
