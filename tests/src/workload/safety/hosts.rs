//! Two machines share a disk, as two hosts share a LUN. At most one of them opens its pool, and a
//! host that was frozen for longer than its claim holds writes nothing more.

use std::io::BufRead;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blockd_testkit::daemon::{Daemon, Settings};
use blockd_testkit::folder::Folder;
use blockd_testkit::nbd::Connection;

use super::super::{Run, sparse};
use crate::vm::{Drive, Running};

/// Bytes of the shared disk, and of each volume.
const DISK: u64 = 512 << 20;
const VOLUME: u64 = 8 << 20;
/// Bytes of a volume that are written and compared.
const WRITTEN: usize = 1 << 20;
/// The second host starts at most this much later than the first. Beyond it, the first serves.
const OFFSET_MILLIS: u64 = 3000;
/// How long a host stays frozen: several times what its claim holds.
const FROZEN: Duration = Duration::from_secs(15);
/// A daemon that neither serves nor ends in this time is stuck.
const START: Duration = Duration::from_secs(120);
/// A pool detects the loss of its claim within this time, once its host runs again.
const NOTICED: Duration = Duration::from_secs(30);

/// Words that the machines exchange.
const READY: &str = "host: ready";
const REFUSED: &str = "host: refused";
const DONE: &str = "host: done";
const FAILED: &str = "workload: ";

/// The half that boots both machines and lets them race.
pub(super) fn run(run: &Run) -> Result<String> {
    let folder = Folder::new("hosts")?;
    let disk = sparse(&folder, "disk", DISK)?;
    let machine = |name: &str| {
        let vm = run.machine(name)?.drive(Drive::Shared(disk.clone()));
        vm.start(&run.inside("safety-host"))
    };
    let mut pair = [machine("host-a")?, machine("host-b")?];
    let rounds: u64 = run.either(4, 40);
    let (mut rng, mut volumes, mut refused) = (fastrand::Rng::with_seed(run.seed), 0, 0);
    for round in 0..rounds {
        let first = usize::from(rng.bool());
        // Half of all rounds at the same moment.
        let offset = if round % 2 == 0 { 0 } else { rng.u64(..OFFSET_MILLIS) };
        let ready = race(&mut pair, first, offset).with_context(|| format!("round {round}"))?;
        refused += u64::from(ready.contains(&false));
        let Some(winner) = ready.iter().position(|ready| *ready) else { continue };
        ask(&mut pair[winner], &format!("check {volumes}"))?;
        ask(&mut pair[winner], &format!("write {volumes}"))?;
        volumes += 1;
        // A later start finds the pool closed in order, or a claim that is not renewed.
        ask(&mut pair[winner], if rng.bool() { "stop" } else { "kill" })?;
    }
    ensure!(volumes > rounds / 2, "only {volumes} of {rounds} rounds had a winner");
    ensure!(refused > 0, "no round had a loser");
    frozen(&mut pair, volumes)?;
    for machine in &mut pair {
        machine.send("end")?;
    }
    for machine in pair {
        machine.finish()?;
    }
    Ok(format!(
        "two hosts opened one disk {rounds} times at once: never both, {refused} refused, {volumes} \
         volumes found; a host frozen for {} s wrote nothing more",
        FROZEN.as_secs()
    ))
}

/// Starts both, and returns which of them serves.
fn race(pair: &mut [Running; 2], first: usize, offset: u64) -> Result<[bool; 2]> {
    pair[first].send("start")?;
    std::thread::sleep(Duration::from_millis(offset));
    pair[1 - first].send("start")?;
    let mut ready = [false; 2];
    for (machine, ready) in pair.iter_mut().zip(&mut ready) {
        *ready = answer(machine)?.starts_with(READY);
    }
    ensure!(ready != [true; 2], "both hosts serve the pool");
    Ok(ready)
}

/// A host serves and writes, and freezes; the other takes the pool over. Once the first runs again,
/// its pool has failed, and everything of the second is as the second wrote it.
fn frozen(pair: &mut [Running; 2], volumes: u64) -> Result<()> {
    let [a, b] = pair;
    a.send("start")?;
    ensure!(answer(a)?.starts_with(READY), "the first host does not serve");
    ask(a, "load")?;
    a.freeze()?;
    std::thread::sleep(FROZEN);
    b.send("start")?;
    ensure!(answer(b)?.starts_with(READY), "the second host does not take over");
    ask(b, &format!("check {volumes}"))?;
    ask(b, &format!("write {volumes}"))?;
    a.thaw()?;
    ask(a, "lost")?;
    // The second closes and opens again: superblock, log and pages are its own.
    ask(b, &format!("check {}", volumes + 1))?;
    ask(b, "stop")?;
    b.send("start")?;
    ensure!(answer(b)?.starts_with(READY), "the second host does not open its pool again");
    ask(b, &format!("check {}", volumes + 1))?;
    ask(b, "stop")?;
    ask(a, "kill")
}

/// Lets a machine do something that has no result.
fn ask(machine: &mut Running, what: &str) -> Result<()> {
    machine.send(what)?;
    let said = answer(machine).with_context(|| format!("asked to {what}"))?;
    ensure!(said.starts_with(DONE), "asked to {what}: {said}");
    Ok(())
}

fn answer(machine: &mut Running) -> Result<String> {
    let line = machine.wait_for_any(&[READY, REFUSED, DONE, FAILED])?;
    if line.contains(FAILED) {
        bail!("{line}");
    }
    Ok(line)
}

/// The guest's half: does what it reads, line by line.
///
/// # Errors
/// At the first thing that is wrong.
pub fn host() -> Result<()> {
    let settings = Settings { pool: Some("/dev/vda".into()), ..Settings::default() };
    let mut daemon = Daemon::new("host", &settings)?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let mut words = line.split_whitespace();
        let number = |word: Option<&str>| word.unwrap_or_default().parse::<u64>();
        let said = match words.next() {
            Some("start") => start(&mut daemon)?,
            Some("check") => check(&daemon, number(words.next())?)?,
            Some("write") => write(&daemon, number(words.next())?)?,
            Some("load") => load(&daemon)?,
            Some("lost") => lost(&daemon)?,
            Some("stop") => {
                ensure!(daemon.stop()?.success(), "the end: {}", daemon.last_words());
                DONE.to_owned()
            }
            Some("kill") => {
                daemon.kill()?;
                DONE.to_owned()
            }
            Some("end") => return Ok(()),
            _ => continue,
        };
        println!("{said}");
    }
    bail!("the host's half is gone")
}

/// Starts the daemon and returns whether it serves the pool, and why not.
fn start(daemon: &mut Daemon) -> Result<String> {
    daemon.spawn()?;
    if let Err(error) = daemon.wait_until_serving(START) {
        let ended = error.downcast_ref::<blockd_testkit::daemon::Ended>();
        let ended = ended.with_context(|| format!("no daemon: {error:#}"))?;
        return Ok(format!("{REFUSED}: {}", ended.status));
    }
    // A daemon serves its other pools where one is refused.
    let listed = daemon.cli(&["pool", "list"])?;
    let open = listed.to_string().contains("\"default\"") && daemon.cli(&["list"]).is_ok();
    let show = daemon.cli(&["pool", "show", "default"]);
    if !open || show.is_err() {
        daemon.stop()?;
        return Ok(format!("{REFUSED}: {listed}"));
    }
    Ok(READY.to_owned())
}

fn name(number: u64) -> String {
    format!("v{number}")
}

/// The content of a volume: its number in each word, so that a block of another one is noticed.
fn content(number: u64) -> Vec<u8> {
    (number + 1).to_le_bytes().repeat(WRITTEN / 8)
}

/// Makes a volume that clients of this host reach over NBD.
fn add(daemon: &Daemon, name: &str) -> Result<Connection> {
    daemon.cli(&["add", "--nbd", "--size", &VOLUME.to_string(), name])?;
    daemon.connect(name)
}

fn write(daemon: &Daemon, number: u64) -> Result<String> {
    let mut connection = add(daemon, &name(number))?;
    connection.write(0, &content(number))?;
    connection.flush()?;
    Ok(DONE.to_owned())
}

fn check(daemon: &Daemon, volumes: u64) -> Result<String> {
    for number in 0..volumes {
        let name = name(number);
        daemon.cli(&["attach", "--nbd", &name])?;
        let mut connection = daemon.connect(&name)?;
        let read = connection.read(0, WRITTEN)?;
        ensure!(read == content(number), "volume {number} has other bytes");
    }
    Ok(DONE.to_owned())
}

/// Writes that go on while the machine freezes, and after it: in a thread that ends with the first
/// error.
fn load(daemon: &Daemon) -> Result<String> {
    let mut connection = add(daemon, "load")?;
    connection.write(0, &content(u64::MAX - 1))?;
    std::thread::spawn(move || {
        for round in 0_u64.. {
            let offset = round % 7 * WRITTEN as u64;
            let written = connection.write(offset, &content(u64::MAX - 1));
            if written.and_then(|()| connection.flush()).is_err() {
                return;
            }
        }
    });
    Ok(DONE.to_owned())
}

/// The pool has failed, and the reason is that another host has it.
fn lost(daemon: &Daemon) -> Result<String> {
    let said = || daemon.log();
    blockd_testkit::tools::wait_until("the pool to stop", NOTICED, || {
        said().contains("claim").then_some(())
    })
    .with_context(|| daemon.last_words())?;
    Ok(DONE.to_owned())
}
