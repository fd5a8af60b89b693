//! The machine that moves, the daemons that have its disk, and the qemu that it runs in.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::Daemon;
use blockd_testkit::folder::Folder;
use blockd_testkit::nbd::Connection;
use blockd_testkit::tools;
use serde_json::{Value, json};

use super::super::super::{INSIDE, Run, sparse};
use super::super::natively;
use super::journal::Journal;
use super::{DISK, Failure, PIECE, check_image};
use crate::vm::{Monitor, Running, Vm};

/// Where the disk is, as clients name it.
const EXPORT: &str = "one/disk";
const CELL: &str = "vg/one";
const NAMES: [&str; 2] = ["a", "b"];
/// A machine that stands still for longer has stopped for good: a hand-over is given 30 s.
const PATIENCE: Duration = Duration::from_secs(90);
/// The copying of memory, on a busy machine.
const COPYING: Duration = Duration::from_secs(300);
/// Records that show that the guest goes on.
const MORE: u64 = 50;
/// Bytes a second, no limit and one that leaves the time to fail.
const FAST: u64 = 1 << 30;
const SLOW: u64 = 1 << 20;
/// Makes a file system and has records written to it until there is a line to read.
const SCRIPT: &str = "
set -e
mkfs.ext4 -q /dev/vda
mount -t ext4 /dev/vda /mnt
port=/dev/$(ls /sys/class/virtio-ports)
/usr/bin/workload inside --seed 0 records /mnt $port /tmp/stop &
writer=$!
read -r line
touch /tmp/stop
wait $writer
umount /mnt
";

/// A migration that was done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moved {
    /// For which the machine stood still, as qemu reports it.
    pub(super) pause: Duration,
    /// The longest time between two records.
    pub(super) gap: Duration,
}

/// A qemu, and its monitor.
#[derive(Debug)]
struct Machine {
    running: Running,
    monitor: Monitor,
    /// Where it waits for the guest, unless it has booted it.
    incoming: PathBuf,
}

#[derive(Debug)]
pub(super) struct Guest {
    machine: Machine,
    /// The host that it runs on.
    host: usize,
    hosts: [Daemon; 2],
    vm: Vm,
    journal: Journal,
    /// Machines so far.
    machines: u32,
    /// Sockets.
    folder: Folder,
    /// Cells and daemons' files, on a disk.
    _cells: Folder,
}

impl Guest {
    /// Boots it on the first host, with its disk on standby on the second one.
    pub(super) fn boot(run: &Run) -> Result<Self> {
        let folder = Folder::new("migrate")?;
        let below = tools::build_folder()?.join("vm/run");
        std::fs::create_dir_all(&below)?;
        let cells = Folder::below(&below, "cells")?;
        let hosts = [natively::daemon(cells.path(), 1)?, natively::daemon(cells.path(), 2)?];
        hosts[0].cli(&["cell", "create", "--size", "2G", CELL])?;
        let size = DISK.to_string();
        hosts[0].cli(&["add", "disk", "--pool", "one", "--size", &size, "--nbd"])?;
        hosts[0].cli(&["attach", "--nbd", EXPORT])?;
        hosts[1].cli(&["cell", "standby", "--nbd", CELL, "disk"])?;
        let journal = Journal::listen(&folder.path().join("records"))?;
        let program = std::env::current_exe().context("where this program lies")?;
        let vm = Vm::new("migrate")
            .kernel(run.kernel)
            .memory(512)
            .cpus(1)
            .limit(run.limit())
            .programs(&["mkfs.ext4"])
            .file("/etc/mke2fs.conf".as_ref(), "/etc/mke2fs.conf", false)
            .file(&program, INSIDE, true);
        let words = words(folder.path(), &hosts[0], 0);
        let running = vm.clone().arguments(&as_words(&words)).start(SCRIPT)?;
        let machine = Machine::new(running, folder.path(), 0)?;
        let (host, machines) = (0, 1);
        let mut guest = Self { machine, host, hosts, vm, journal, machines, folder, _cells: cells };
        guest.goes_on()?;
        Ok(guest)
    }

    pub(super) fn host_name(&self) -> &'static str {
        NAMES[self.host]
    }

    /// Moves it to the other host.
    pub(super) fn migrate(&mut self) -> Result<Moved> {
        let before = self.handovers();
        let target = self.target(&[])?;
        self.journal.longest_gap();
        self.send_to(&target, FAST)?;
        let ended = self.ended()?;
        ensure!(ended["status"] == "completed", "the migration ended with {ended}");
        let pause = ended["downtime"].as_u64().context("no downtime")?;
        let mut source = std::mem::replace(&mut self.machine, target);
        self.host = 1 - self.host;
        self.goes_on()?;
        let asked = source.monitor.ask("quit", json!({})).map(drop);
        let left = source.running.quit(asked).context("the qemu that the machine has left")?;
        if let Some(how) = left {
            // The machine runs on at its target: a matter of qemu's, to be seen all the same.
            println!("migrate: the qemu that the machine has left had ended by itself: {how}");
        }
        // Neither the start of the one nor the end of the other is to fetch the cell: the machine
        // would stand still for seconds each time.
        self.goes_on()?;
        self.has_cell(self.host)?;
        let handovers = self.handovers() - before;
        ensure!(handovers == 1, "the cell has changed hands {handovers} times");
        let pause = Duration::from_millis(pause);
        Ok(Moved { pause, gap: self.journal.longest_gap() })
    }

    /// Has a migration fail after the cell has gone to the other host. It comes back. Returns the
    /// longest time between two records.
    pub(super) fn fail(&mut self, how: Failure) -> Result<Duration> {
        let stopped = matches!(how, Failure::NotStarted);
        let mut target = self.target(if stopped { &["-S"] } else { &[] })?;
        self.journal.longest_gap();
        self.send_to(&target, if stopped { FAST } else { SLOW })?;
        if stopped {
            let ended = self.ended()?;
            ensure!(ended["status"] == "completed", "the migration ended with {ended}");
        } else {
            self.is(&["active"])?;
        }
        self.hosts[1 - self.host].cli(&["cell", "handover", CELL])?;
        match how {
            Failure::Killed => target.running.cut().map(|_| ())?,
            Failure::NotStarted => {
                self.has_cell(1 - self.host)?;
                target.monitor.ask("quit", json!({}))?;
                target.running.left()?;
                self.machine.monitor.ask("cont", json!({}))?;
            }
            Failure::Cancelled => {
                self.machine.monitor.ask("migrate_cancel", json!({}))?;
                target.running.left()?;
            }
        }
        if !stopped {
            let ended = self.ended()?;
            ensure!(ended["status"] != "completed", "the migration was completed");
        }
        self.goes_on()?;
        self.has_cell(self.host)?;
        Ok(self.journal.longest_gap())
    }

    /// Ends it in order, and reads its disk on the host that it was not on last. Returns the number
    /// of its records.
    pub(super) fn finish(mut self) -> Result<u64> {
        self.machine.running.send("stop")?;
        self.machine.running.finish()?;
        let answered = self.journal.count();
        let there = &self.hosts[1 - self.host];
        let mut disk = Connection::open(&there.nbd_socket(), EXPORT)?;
        let image = sparse(&self.folder, "image", DISK as u64)?;
        let file = File::options().write(true).open(&image)?;
        for at in (0..DISK as u64).step_by(PIECE) {
            let piece = disk.read(at, PIECE)?;
            if piece.iter().any(|byte| *byte != 0) {
                file.write_all_at(&piece, at)?;
            }
        }
        check_image(&image, self.folder.path(), answered)?;
        Ok(answered)
    }

    /// A qemu on the other host that waits for the machine.
    fn target(&mut self, more: &[&str]) -> Result<Machine> {
        let number = self.machines;
        self.machines += 1;
        let folder = self.folder.path();
        let words = words(folder, &self.hosts[1 - self.host], number);
        let incoming = format!("unix:{}", incoming(folder, number).display());
        let vm = self.vm.clone().arguments(&as_words(&words));
        let vm = vm.arguments(&["-incoming", &incoming]).arguments(more);
        let running = vm.start_incoming(&self.machine.running)?;
        Machine::new(running, folder, number)
    }

    fn send_to(&mut self, target: &Machine, bandwidth: u64) -> Result<()> {
        let uri = format!("unix:{}", target.incoming.display());
        let monitor = &mut self.machine.monitor;
        monitor.ask("migrate-set-parameters", json!({ "max-bandwidth": bandwidth }))?;
        monitor.ask("migrate", json!({ "uri": uri })).map(|_| ())
    }

    /// Waits until a migration has ended, and returns how.
    fn ended(&mut self) -> Result<Value> {
        self.is(&["completed", "failed", "cancelled"])
    }

    /// Waits until a migration has one of these states.
    fn is(&mut self, states: &[&str]) -> Result<Value> {
        let clock = Clock::start();
        loop {
            let status = self.machine.monitor.ask("query-migrate", json!({}))?;
            if status["status"].as_str().is_some_and(|state| states.contains(&state)) {
                return Ok(status);
            }
            ensure!(clock.elapsed() < COPYING, "the migration is not {states:?}: {status}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits for more records.
    fn goes_on(&mut self) -> Result<()> {
        let wanted = self.journal.count() + MORE;
        let clock = Clock::start();
        while self.journal.count() < wanted {
            if clock.elapsed() > PATIENCE {
                // These errors have what the guest and its kernel printed.
                while self.machine.running.line_within(Duration::from_secs(1))?.is_some() {}
                return Err(self.machine.running.failure("the guest has ended"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// The ends of both daemons' logs.
    pub(super) fn last_words(&self) -> String {
        self.hosts.each_ref().map(Daemon::last_words).join("\n")
    }

    /// How often the cell has changed hands so far.
    fn handovers(&self) -> usize {
        self.hosts.iter().map(|host| host.log().matches("was handed over").count()).sum()
    }

    fn has_cell(&self, host: usize) -> Result<()> {
        let cells = self.hosts[host].cli(&["cell", "list"])?;
        let state = &cells["cells"][0]["state"];
        ensure!(state == "open", "the cell is {state} on host {}", NAMES[host]);
        Ok(())
    }
}

impl Machine {
    fn new(running: Running, folder: &Path, number: u32) -> Result<Self> {
        let monitor = Monitor::connect(&monitor(folder, number))?;
        Ok(Self { running, monitor, incoming: incoming(folder, number) })
    }
}

fn monitor(folder: &Path, number: u32) -> PathBuf {
    folder.join(format!("monitor-{number}"))
}

fn incoming(folder: &Path, number: u32) -> PathBuf {
    folder.join(format!("incoming-{number}"))
}

/// Words for qemu: the disk as a host serves it, a port for the numbers of records, and the
/// monitor. Without a geometry, qemu reads the disk's first sector when it starts, which fetches
/// the cell.
fn words(folder: &Path, host: &Daemon, number: u32) -> Vec<String> {
    let disk = format!(
        "driver=nbd,node-name=disk,server.type=unix,server.path={},export={EXPORT},\
         discard=unmap,cache.direct=on",
        host.nbd_socket().display()
    );
    let records = folder.join("records");
    [
        ["-blockdev", &disk],
        ["-device", "virtio-blk-pci,drive=disk,cyls=16383,heads=16,secs=63"],
        ["-device", "virtio-serial-pci"],
        ["-chardev", &format!("socket,id=records,path={}", records.display())],
        ["-device", "virtserialport,chardev=records,name=records"],
        ["-qmp", &format!("unix:{},server=on,wait=off", monitor(folder, number).display())],
    ]
    .concat()
    .into_iter()
    .map(str::to_owned)
    .collect()
}

fn as_words(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}
