//! `space`: a pool fills up below file systems on block devices. Their writers wait, go on by
//! whatever makes room, and find all their bytes; or they are refused, if that is what was asked
//! for, and their file systems can be used again. The long form puts dm-thin beside it.

mod beside;
mod fill;
mod memory;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::{Daemon, Settings};
use blockd_testkit::folder::Folder;
use blockd_testkit::tools;
use serde_json::Value;

use super::{MARK, Run, device_of, figures, guest, sparse};
use crate::vm::Drive;
use fill::Fill;

pub use beside::inside as inside_beside;

const MIB: u64 = 1 << 20;
/// Bytes of the pool at first.
const POOL: u64 = 128 * MIB;
/// Bytes of a volume with a file system: xfs needs 300 MiB.
const VOLUME: u64 = 512 * MIB;
/// Bytes left to write where that is to be little.
const LITTLE: u64 = 24 * MIB;
/// The guest takes some 20 s; one that gets stuck is not waited for.
const GUEST_LIMIT: Duration = Duration::from_secs(240);
/// No command may wait for a pool that is full: it would wait for the pool to grow. Longer than one
/// takes in a machine that has to share its processors.
const PROMPT: Duration = Duration::from_secs(45);
/// ENOSPC.
const NO_SPACE: i32 = 28;

/// Variables of xfs's own tests, which permit a log of less than 64 MiB. mkfs writes the log.
const SMALL_LOG: &str = "TEST_DEV=1 TEST_DIR=1 QA_CHECK_FS=1 mkfs.xfs -q -l size=16m";

/// File systems: name, how it is made, how it is found to be sound.
const KINDS: [(&str, &str, &str); 2] = [
    ("ext4", "mkfs.ext4 -q -E lazy_itable_init=1", "e2fsck -fn"),
    ("xfs", SMALL_LOG, "xfs_repair -n"),
];

/// The host's half.
///
/// # Errors
/// When a write fails that should wait, or the other way round, or any byte differs.
pub fn run(run: &Run) -> Result<String> {
    let folder = Folder::new("space")?;
    let disk = sparse(&folder, "disk", 2 << 30)?;
    let vm = run
        .machine("space")?
        .limit(GUEST_LIMIT)
        .modules(&["xfs"])
        .programs(&["mkfs.xfs", "xfs_repair", "fstrim", "dd"])
        // Writers wait while commands are tried.
        .expects("blocked for more than")
        .expects("blocked in I/O wait for more than")
        .drive(Drive::File(disk));
    let output = vm.run(&run.inside("space"))?;
    println!("{}", output.text);
    let mut said = figures(&output.text)?.to_owned();
    if !run.is_short() {
        said = format!("{said}; {}", beside::run(run)?);
    }
    Ok(said)
}

/// A daemon whose pool is a file on a file system on this disk.
fn daemon_on(disk: &str, size: u64) -> Result<Daemon> {
    guest::shell(&format!(
        "mkfs.ext4 -q -O ^has_journal {disk}; mkdir -p /pool; mount -t ext4 {disk} /pool"
    ))?;
    let mut daemon = Daemon::new(
        "guest",
        &Settings {
            pool: Some("/pool/file".into()),
            pool_size: size,
            // Slowing down has tests of its own: a pool is full sooner without.
            pool_lines: "[pool.space]\nlow = \"off\"\nvery_low = \"off\"\n".to_owned(),
            ..Settings::default()
        },
    )?;
    daemon.start()?;
    Ok(daemon)
}

struct Steps {
    daemon: Daemon,
    seed: u64,
    done: u64,
}

/// The guest's half.
///
/// # Errors
/// As [`run`].
pub fn inside(seed: u64) -> Result<()> {
    let mut steps = Steps { daemon: daemon_on("/dev/vda", POOL)?, seed, done: 0 };
    let files = steps.step("waiting and going on", Steps::waits)?;
    steps.step("forced", Steps::forced)?;
    let kept = steps.step("refused", Steps::refused)?;
    let done = steps.done;
    ensure!(steps.daemon.stop()?.success(), "the daemon's end: {}", steps.daemon.last_words());
    let memory = memory::steps().context("a pool in memory")?;
    println!(
        "{MARK}{done} parts: {files} files of writers that waited on ext4 and xfs, going on by \
         grow, del and fstrim; {kept} files of writers that were refused; 0 differ; {memory}"
    );
    Ok(())
}

impl Steps {
    fn step<T>(&mut self, name: &str, step: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let start = Clock::start();
        let found = step(self).with_context(|| format!("{name}\n{}", self.daemon.last_words()))?;
        println!("{name}: ok, {:.1} s", start.elapsed().as_secs_f64());
        self.done += 1;
        Ok(found)
    }

    fn cli(&self, words: &[&str]) -> Result<Value> {
        let start = Clock::start();
        let said = self.daemon.cli(words)?;
        let took = start.elapsed();
        ensure!(took < PROMPT, "blockd {} took {took:?}", words.join(" "));
        Ok(said)
    }

    fn pool(&self) -> Result<Value> {
        Ok(self.cli(&["pool", "show"])?["pool"].clone())
    }

    fn blocked(&self) -> Result<u64> {
        let pool = self.pool()?;
        pool["blocked_writes"].as_u64().with_context(|| format!("no blocked_writes in {pool}"))
    }

    /// Bytes that a volume takes in the pool.
    fn mapped(&self, name: &str) -> Result<u64> {
        let shown = self.cli(&["show", name])?;
        shown["volume"]["mapped_bytes"].as_u64().with_context(|| format!("no figure in {shown}"))
    }

    /// A volume with a file system, mounted at `/mnt/NAME`.
    fn mount(&self, name: &str, (kind, make, _): (&str, &str, &str)) -> Result<String> {
        guest::add_device(&self.daemon, name, VOLUME)?;
        let device = device_of(name).display().to_string();
        guest::shell(&format!(
            "{make} {device}; mkdir -p /mnt/{name}; mount -t {kind} {device} /mnt/{name}"
        ))?;
        Ok(device)
    }

    /// Waits until all of these writers wait, and have got no further for a while.
    fn full(&self, fills: &[Fill]) -> Result<u64> {
        let total = || fills.iter().map(Fill::done).sum::<u64>();
        let stuck = tools::wait_until("the pool to be full", guest::PATIENCE, || {
            let before = total();
            std::thread::sleep(Duration::from_millis(400));
            let waits = fills.iter().all(|fill| fill.waits() > Duration::from_millis(300));
            // A slow machine stops writers as well.
            let is_stuck = waits && total() == before && matches!(self.blocked(), Ok(1..));
            is_stuck.then_some(before)
        })
        .with_context(|| format!("{:?}", self.pool()))?;
        ensure!(self.pool()?["space_state"] == "full", "{}", self.pool()?);
        none_failed(fills)?;
        Ok(stuck)
    }

    /// Makes room in some way, sees writers go on, and then wait again.
    fn goes_on(
        &self,
        fills: &[Fill],
        how: &str,
        make_room: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let before = self.full(fills)?;
        make_room().with_context(|| how.to_owned())?;
        let total = || fills.iter().map(Fill::done).sum::<u64>();
        tools::wait_until(how, guest::PATIENCE, || (total() > before + 1).then_some(()))
            .with_context(|| format!("writers don't go on by {how}"))?;
        none_failed(fills)?;
        println!("went on by {how}");
        Ok(())
    }

    /// Two writers fill the pool, and go on by each of the ways there are to make room.
    fn waits(&mut self) -> Result<u64> {
        guest::add_device(&self.daemon, "ballast", 64 * MIB)?;
        let ballast = device_of("ballast");
        guest::shell(&format!(
            "dd if=/dev/zero of={} bs=1M count=16 oflag=direct status=none",
            ballast.display()
        ))?;
        guest::add_device(&self.daemon, "other", 64 * MIB)?;
        // Space of deleted files stays allocated in the pool until it is trimmed.
        for kind in KINDS {
            let name = format!("trim-{}", kind.0);
            self.mount(&name, kind)?;
            guest::shell(&format!(
                "dd if=/dev/urandom of=/mnt/{name}/file bs=1M count=12 conv=fsync status=none
                 rm /mnt/{name}/file; sync"
            ))?;
        }
        for kind in KINDS {
            self.mount(&format!("fill-{}", kind.0), kind)?;
        }
        println!("before filling: {}", self.pool()?);
        let mut fills: Vec<Fill> = KINDS
            .iter()
            .zip(self.seed..)
            .map(|(kind, seed)| {
                Fill::start(&Path::new("/mnt").join(format!("fill-{}", kind.0)), seed)
            })
            .collect();
        self.full(&fills)?;
        self.commands()?;
        self.restarts(&fills)?;
        self.goes_on(&fills, "grow", || self.cli(&["pool", "grow", "--size", "+16M"]).map(|_| ()))?;
        self.goes_on(&fills, "del", || self.cli(&["del", "ballast"]).map(|_| ()))?;
        for (kind, _, _) in KINDS {
            self.goes_on(&fills, &format!("fstrim of {kind}"), || {
                let before = self.mapped(&format!("trim-{kind}"))?;
                let said = guest::shell(&format!("fstrim -v /mnt/trim-{kind}"))?;
                let after = self.mapped(&format!("trim-{kind}"))?;
                println!("{} MiB mapped before, {} MiB after {said}", before / MIB, after / MIB);
                ensure!(after < before, "fstrim gave nothing back");
                Ok(())
            })?;
        }
        self.full(&fills)?;
        self.cli(&["pool", "grow", "--size", "+48M"])?;
        tools::wait_until("writers to end", guest::PATIENCE, || {
            // Not `all`: each of them has to be stopped.
            let ended: Vec<bool> = fills.iter_mut().map(Fill::stop).collect();
            ended.iter().all(|ended| *ended).then_some(())
        })?;
        none_failed(&fills)?;
        guest::no_errors()?;
        let mut files = 0;
        for ((kind, _, check), fill) in KINDS.iter().zip(&fills) {
            for name in [format!("trim-{kind}"), format!("fill-{kind}")] {
                let device = device_of(&name).display().to_string();
                guest::shell(&format!("umount /mnt/{name}; {check} {device}"))?;
                guest::shell(&format!("mount -t {kind} {device} /mnt/{name}"))?;
            }
            files += fill.compare()?;
            for name in [format!("trim-{kind}"), format!("fill-{kind}")] {
                guest::shell(&format!("umount /mnt/{name}"))?;
                self.cli(&["del", &name])?;
            }
        }
        Ok(files)
    }

    /// Commands that need no space are done while others wait for it.
    fn commands(&self) -> Result<()> {
        self.cli(&["snapshot", "fill-ext4=s1"])?;
        self.cli(&["del", "s1"])?;
        self.cli(&["resize", "other", "--size", "128M"])?;
        self.cli(&["detach", "other"])?;
        self.cli(&["del", "other"])?;
        let start = Clock::start();
        let device = device_of("trim-ext4").display().to_string();
        guest::shell(&format!("umount /mnt/trim-ext4; mount -t ext4 {device} /mnt/trim-ext4"))?;
        ensure!(start.elapsed() < PROMPT, "umount took {:?}", start.elapsed());
        ensure!(self.blocked()? > 0, "no write waits any longer: {}", self.pool()?);
        println!("snapshot, del, resize, detach, umount while writes wait");
        Ok(())
    }

    /// The daemon ends in order, and dies, while writes wait; they wait on with the next one.
    fn restarts(&mut self, fills: &[Fill]) -> Result<()> {
        let start = Clock::start();
        ensure!(self.daemon.stop()?.success(), "the daemon's end: {}", self.daemon.last_words());
        let took = start.elapsed();
        ensure!(took < PROMPT, "the daemon took {took:?} to end while writes wait");
        self.daemon.start()?;
        self.full(fills)?;
        self.daemon.kill()?;
        self.daemon.start()?;
        self.full(fills)?;
        println!("ended in {:.1} s, died and started while writes wait", took.as_secs_f64());
        Ok(())
    }

    /// A write that waits fails with ENOSPC when its volume is deleted, or detached, by force.
    fn forced(&mut self) -> Result<()> {
        self.leave_little()?;
        for how in ["del", "detach"] {
            guest::add_device(&self.daemon, "raw", 4 * VOLUME)?;
            let device = device_of("raw");
            let mut dd = Command::new("dd");
            dd.args(["if=/dev/zero", "bs=1M", "oflag=direct"])
                .arg(format!("of={}", device.display()));
            let dd = dd.stderr(Stdio::piped()).spawn().context("starting dd")?;
            tools::wait_until("a write to wait", guest::PATIENCE, || {
                matches!(self.blocked(), Ok(1..)).then_some(())
            })?;
            self.cli(&[how, "--force", "raw"])?;
            let said = String::from_utf8_lossy(&dd.wait_with_output()?.stderr).into_owned();
            ensure!(said.contains("No space left on device"), "{how}: dd says {said}");
            println!("{how} --force: {}", said.lines().next().unwrap_or_default());
        }
        self.cli(&["del", "raw"])?;
        self.cli(&["del", "thick"]).map(|_| ())
    }

    /// Sets most of what is free aside, so that little has to be written until the pool is full.
    fn leave_little(&self) -> Result<()> {
        let pool = self.pool()?;
        let free = pool["free_bytes"].as_u64().context("no free_bytes")?;
        let size = format!("{}M", free.saturating_sub(LITTLE) / MIB);
        self.cli(&["add", "--nbd", "--thick", "--size", &size, "thick"]).map(|_| ())
    }

    /// With `on_full = error` writers get ENOSPC, and what they had written can be used again.
    fn refused(&mut self) -> Result<u64> {
        for (kind, make, check) in KINDS {
            self.mount(kind, (kind, make, check))?;
            self.cli(&["set", kind, "--on-full", "error"])?;
        }
        guest::add_device(&self.daemon, "raw", 4 * VOLUME)?;
        self.cli(&["set", "raw", "--on-full", "error"])?;
        self.leave_little()?;
        let mut fills: Vec<Fill> = KINDS
            .iter()
            .zip(self.seed..)
            .map(|(kind, seed)| Fill::start(&Path::new("/mnt").join(kind.0), seed))
            .collect();
        tools::wait_until("writers to be refused", guest::PATIENCE, || {
            fills.iter().all(|fill| fill.failure().is_some()).then_some(())
        })?;
        for (kind, fill) in KINDS.iter().zip(&mut fills) {
            let failure = fill.failure().context("no failure")?;
            let took = failure.after.as_secs_f64();
            println!("{}: {} files, then {} in {took:.1} s", kind.0, fill.done(), failure.text);
            ensure!(failure.errno == NO_SPACE, "{}: {failure:?}", kind.0);
            fill.stop();
        }
        let device = device_of("raw").display().to_string();
        let said = guest::shell(&format!(
            "! fio --name=raw --filename={device} --direct=1 --rw=write --bs=256k --size=1g \
             --ioengine=libaio --iodepth=8 2>&1"
        ))?;
        ensure!(said.contains("No space left on device"), "fio says: {said}");
        self.cli(&["pool", "grow", "--size", "+64M"])?;
        let mut files = 0;
        for ((kind, _, check), fill) in KINDS.iter().zip(&fills) {
            let device = device_of(kind).display().to_string();
            // The journal is replayed by mounting; a file system that was in trouble says so.
            guest::shell(&format!("umount /mnt/{kind}; mount -t {kind} {device} /mnt/{kind}"))?;
            files += fill.compare()?;
            guest::shell(&format!("umount /mnt/{kind}"))?;
            if *kind == "ext4" {
                // 1: errors were corrected, those that the journal had noted.
                guest::shell(&format!("e2fsck -fp {device} || test $? = 1"))?;
            }
            guest::shell(&format!("{check} {device}"))?;
            self.cli(&["del", kind])?;
        }
        self.cli(&["del", "raw"])?;
        self.cli(&["del", "thick"])?;
        Ok(files)
    }
}

fn none_failed(fills: &[Fill]) -> Result<()> {
    match fills.iter().find_map(Fill::failure) {
        Some(failure) => anyhow::bail!("a write failed: {}", failure.text),
        None => Ok(()),
    }
}
