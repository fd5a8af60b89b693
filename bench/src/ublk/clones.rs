//! Clones of one image as block devices: made, attached and read, without and with ready devices,
//! beside clones of a snapshot in dm-thin. Each side is called without a process of its own for it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use blockd_api::v1;
use blockd_api::v1::control_client::ControlClient;
use blockd_testkit::clock::Clock;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tonic::transport::Channel;

use super::backing::Disk;
use super::daemon::{Daemon, Pool};
use super::mapper_control::Control;
use super::peers::{Chunk, Thin};
use super::{Bench, Mode, shell};
use crate::block::{Settings, Turn};
use crate::clones::{IMAGE, SNAPSHOT, Times, attach, delete, make, memory_of};
use crate::nbd::print::Claim;
use crate::report::{Budget, Row};
use crate::stats::{Ratio, median};

/// For `--only`.
const NAME: &str = "clones";
/// Bytes of the image, all of them written.
const IMAGE_BYTES: u64 = 256 << 20;
/// Bytes of an extent, and of dm-thin's chunk.
const CHUNK: u64 = 256 << 10;
/// Devices that are kept ready.
const READY: usize = 4;
/// Clones of each kind that are there in the end.
const CLONES: usize = 50;
const FEW: usize = 10;
/// Devices at the same time, and how many of them are made in a call.
const MANY: usize = 1000;
const OF_A_CALL: usize = 100;
/// Requests of each of them: a worker serves 14,336 in all.
const MANY_DEPTH: u32 = 16;
/// Bytes that are read of each.
const FIRST_READ: usize = 4096;
/// Times as many clones in the same time as dm-thin.
const OF_THIN: f64 = 5.0;
/// The driver's limit on devices, of kernels that have one for all users, and one that is enough.
const SLOTS: &str = "/sys/module/ublk_drv/parameters/ublks_max";
const ENOUGH_SLOTS: &str = "4096";
/// The pool, which calls that name none mean.
const POOL: &str = "default";

/// Seconds of the same steps for each clone.
#[derive(Clone, Debug, Default)]
struct Way {
    make: Vec<f64>,
    /// Made, attached, opened and read.
    until_read: Vec<f64>,
    delete: Vec<f64>,
}

/// The ways by which clones are made, in the order of [`Outcome::ways`].
const WAYS: [&str; 3] = ["blockd", "blockd, ready devices", "dm-thin"];
const THIN: usize = 2;

/// The results.
#[derive(Clone, Debug)]
pub struct Outcome {
    ways: [Way; WAYS.len()],
    /// Seconds of [`OF_A_CALL`] clones that are made and not attached: ours in a call, then
    /// dm-thin's.
    together: Vec<[f64; 2]>,
    /// KiB of the daemon for each clone, in all and locked; without ready devices.
    memory: [f64; 2],
    many: Vec<Row>,
}

impl Outcome {
    /// Prints them.
    pub fn print(&self) {
        println!("\n### {NAME}\n\nclones of an image of {} MiB\n", IMAGE_BYTES >> 20);
        println!("| way | make, ms, p50 / p95 | until read, ms, p50 / p95 | delete, ms |");
        println!("|---|---:|---:|---:|");
        for (name, way) in WAYS.iter().zip(&self.ways) {
            let all = [&way.make, &way.until_read, &way.delete].map(|one| Times::of(one).ok());
            let [Some(make), Some(read), Some(delete)] = all else { continue };
            println!(
                "| {name} | {:.2} / {:.2} | {:.2} / {:.2} | {:.2} |",
                make.p50, make.p95, read.p50, read.p95, delete.p50
            );
        }
        let each = |side: usize| {
            let all: Vec<f64> = self.together.iter().map(|both| both[side]).collect();
            median(&all).unwrap_or(f64::NAN) * 1e3 / OF_A_CALL as f64
        };
        println!(
            "\n{OF_A_CALL} made together, ms each, p50: blockd {:.2}, dm-thin {:.2}",
            each(0),
            each(1)
        );
        println!("\nmemory of each: {:.1} KiB, {:.1} locked", self.memory[0], self.memory[1]);
        if !self.many.is_empty() {
            crate::report::print(&format!("{MANY} devices of one daemon"), &self.many);
        }
    }

    /// Returns the claims: dm-thin's time over ours, clone by clone.
    #[must_use]
    pub fn claims(&self) -> Vec<Claim> {
        let of = |at: usize| {
            let pairs = self.ways[THIN].until_read.iter().zip(&self.ways[at].until_read);
            let ratios: Vec<f64> = pairs.map(|(thin, ours)| thin / ours).collect();
            let claim = format!("make, attach and read one, dm-thin's time / {}'s", WAYS[at]);
            let (workload, target, pairs) = (NAME.to_owned(), OF_THIN, ratios.len());
            Some(Claim { workload, claim, ratio: Ratio::of(&ratios)?, target, pairs })
        };
        let ratios: Vec<f64> = self.together.iter().map(|[ours, thin]| thin / ours).collect();
        let together = Ratio::of(&ratios).map(|ratio| Claim {
            workload: NAME.to_owned(),
            claim: format!("make {OF_A_CALL} in a call, dm-thin's time / {}'s", WAYS[0]),
            ratio,
            target: OF_THIN,
            pairs: ratios.len(),
        });
        (0..THIN).filter_map(of).chain(together).collect()
    }

    /// Returns them as JSON.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let ways = WAYS.iter().zip(&self.ways).map(|(name, way)| {
            let [make, until_read, delete] = [&way.make, &way.until_read, &way.delete]
                .map(|one| Times::of(one).ok().map(|times| times.to_json()));
            json!({ "name": name, "make": make, "until_read": until_read, "delete": delete })
        });
        json!({
            "ways": ways.collect::<Vec<_>>(), "together_s": self.together, "rss_kib": self.memory[0],
            "locked_kib": self.memory[1],
            "many": self.many.iter().map(Row::to_json).collect::<Vec<_>>(),
        })
    }
}

/// Measures them, when they are asked for.
///
/// # Errors
/// When a call fails, or a clone has another content than the image.
pub fn measure(bench: &Bench) -> Result<Option<Outcome>> {
    let Some(program) = &bench.blockd else { return Ok(None) };
    if bench.only.is_none() || !bench.includes(NAME) {
        return Ok(None);
    }
    if Path::new(SLOTS).exists() {
        fs::write(SLOTS, ENOUGH_SLOTS).context(SLOTS)?;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let folder = |name: &str| bench.jobs.scratch.join(format!("clones-{name}"));
    let pool = |disk| Pool { name: POOL, disk, extent: CHUNK };
    let without = Daemon::start(program, &folder("0"), Mode::ZeroCopy, &[pool(Disk::First)])?;
    let ready =
        Daemon::start_ready(program, &folder("r"), Mode::ZeroCopy, &[pool(Disk::Second)], READY)?;
    let mut thin =
        Thin::start(Chunk { bytes: CHUNK, zeroing: true }, Disk::ThinLarge, Disk::MetaLarge)?;
    let image = thin.renew(IMAGE_BYTES)?.path;
    bench.jobs.run("fill", &Settings::default(), &[Turn::device(&image, None)])?;
    thin.snapshot()?;
    for daemon in [&without, &ready] {
        make_image(bench, daemon)?;
    }
    let expected = first_bytes(&image)?;
    ensure!(expected.iter().any(|byte| *byte != 0), "the image is empty");
    let count = if bench.quick { FEW } else { CLONES };
    let (ways, together, memory) = {
        let clients = [&without, &ready].map(|daemon| runtime.block_on(async { daemon.client() }));
        let control = Control::open()?;
        let mut sides = Sides { runtime: &runtime, clients, thin, control, expected: &expected };
        let (ways, memory) =
            sides.measure(count, without.pid().context("the daemon does not run")?)?;
        (ways, sides.measure_together(bench.pairs)?, memory)
    };
    drop(ready);
    let many = if bench.quick { Vec::new() } else { many_devices(without, &runtime, &expected)? };
    Ok(Some(Outcome { ways, together, memory, many }))
}

/// A volume with the image, and its snapshot.
fn make_image(bench: &Bench, daemon: &Daemon) -> Result<()> {
    let (device, _) = daemon.add(POOL, IMAGE, IMAGE_BYTES)?;
    bench.jobs.run("fill", &Settings::default(), &[Turn::device(&device.path, device.server)])?;
    daemon.detach(POOL, IMAGE)?;
    daemon.snapshot(POOL, IMAGE, SNAPSHOT)
}

/// All that clones are made with.
struct Sides<'a> {
    runtime: &'a Runtime,
    clients: [ControlClient<Channel>; THIN],
    thin: Thin,
    control: Control,
    expected: &'a [u8],
}

impl Sides<'_> {
    /// One clone after the other, by each way in turn, with all of them left there.
    fn measure(&mut self, count: usize, pid: u32) -> Result<([Way; WAYS.len()], [f64; 2])> {
        let mut ways: [Way; WAYS.len()] = Default::default();
        // The first of each reads code and tables; it does not count.
        let mut first = None;
        for way in 0..WAYS.len() {
            first = self.one(way, 0, &mut Way::default())?.or(first);
        }
        let before = memory_of(pid)?;
        let mut thins = Vec::new();
        for number in 1..=count {
            for turn in 0..WAYS.len() {
                let way = (number + turn) % WAYS.len();
                thins.extend(self.one(way, number, &mut ways[way])?);
            }
        }
        let after = memory_of(pid)?;
        let each = |at: usize| after[at].saturating_sub(before[at]) as f64 / count as f64;
        for number in 1..=count {
            let name = name(number);
            for (client, way) in self.clients.iter_mut().zip(&mut ways) {
                let clock = Clock::start();
                self.runtime.block_on(delete(client, &name))?;
                way.delete.push(clock.seconds());
            }
            let clock = Clock::start();
            self.thin.delete_clone(&self.control, thins[number - 1])?;
            ways[THIN].delete.push(clock.seconds());
        }
        // The ones that did not count.
        for client in &mut self.clients {
            self.runtime.block_on(delete(client, &name(0)))?;
        }
        first.map_or(Ok(()), |number| self.thin.delete_clone(&self.control, number))?;
        Ok((ways, [each(0), each(1)]))
    }

    /// Makes many clones without attaching them: ours in a call, dm-thin's by a message each, as it
    /// has no other way. The first round does not count.
    fn measure_together(&mut self, rounds: usize) -> Result<Vec<[f64; 2]>> {
        let names: Vec<String> = (1..=OF_A_CALL).map(name).collect();
        let mut all = Vec::new();
        for round in 0..=rounds {
            let mut both = [0.0; 2];
            for turn in 0..both.len() {
                let side = (round + turn) % both.len();
                both[side] =
                    if side == 0 { self.ours_together(&names)? } else { self.thins_together()? };
            }
            all.push(both);
        }
        all.remove(0);
        Ok(all)
    }

    fn ours_together(&mut self, names: &[String]) -> Result<f64> {
        let asked = v1::CloneVolumesRequest {
            snapshot: SNAPSHOT.to_owned(),
            names: names.to_vec(),
            ..Default::default()
        };
        let client = &mut self.clients[0];
        let clock = Clock::start();
        self.runtime.block_on(client.clone_volumes(asked))?;
        let seconds = clock.seconds();
        for name in names {
            self.runtime.block_on(delete(client, name))?;
        }
        Ok(seconds)
    }

    fn thins_together(&mut self) -> Result<f64> {
        let clock = Clock::start();
        let made = (0..OF_A_CALL).map(|_| self.thin.clone_newest(&self.control));
        let made = made.collect::<Result<Vec<u32>>>()?;
        let seconds = clock.seconds();
        made.into_iter().try_for_each(|number| self.thin.delete_unused(&self.control, number))?;
        Ok(seconds)
    }

    /// Makes a clone, attaches it and reads its first bytes. dm-thin's has a number.
    fn one(&mut self, way: usize, number: usize, times: &mut Way) -> Result<Option<u32>> {
        if way == 1 {
            shell::until("ready devices", || Ok(ready_devices()? == READY))?;
        }
        let clock = Clock::start();
        let (made, path, thin) = if way == THIN {
            let number = self.thin.clone_newest(&self.control)?;
            let made = clock.seconds();
            (made, self.thin.activate(&self.control, number, IMAGE_BYTES)?, Some(number))
        } else {
            let (client, name) = (&mut self.clients[way], name(number));
            let (made, path) = self.runtime.block_on(async {
                make(client, &name).await?;
                let made = clock.seconds();
                anyhow::Ok((made, attach(client, &name, v1::FrontEnd::Ublk).await?))
            })?;
            (made, PathBuf::from(path), None)
        };
        let bytes = first_bytes(&path)?;
        times.make.push(made);
        times.until_read.push(clock.seconds());
        ensure!(bytes == self.expected, "{}: other bytes than the image has", path.display());
        Ok(thin)
    }
}

fn name(number: usize) -> String {
    format!("clone-{number}")
}

/// Devices that are added and not started.
fn ready_devices() -> Result<usize> {
    let mut of = [BTreeSet::new(), BTreeSet::new()];
    for entry in fs::read_dir("/dev")? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        for (kind, all) in ["ublkc", "ublkb"].iter().zip(&mut of) {
            all.extend(name.strip_prefix(kind).map(str::to_owned));
        }
    }
    Ok(of[0].difference(&of[1]).count())
}

fn first_bytes(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = vec![0; FIRST_READ];
    let device = File::open(path).with_context(|| path.display().to_string())?;
    device.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// Many devices of one daemon at the same time: what they cost, and a kill under them.
fn many_devices(mut daemon: Daemon, runtime: &Runtime, expected: &[u8]) -> Result<Vec<Row>> {
    let pid = |daemon: &Daemon| daemon.pid().context("the daemon does not run");
    let descriptors =
        |pid: u32| Ok::<_, std::io::Error>(fs::read_dir(format!("/proc/{pid}/fd"))?.count());
    let before = (memory_of(pid(&daemon)?)?, descriptors(pid(&daemon)?)?);
    let mut client = runtime.block_on(async { daemon.client() });
    let names: Vec<String> = (1..=MANY).map(name).collect();
    let mut paths = Vec::new();
    let clock = Clock::start();
    for names in names.chunks(OF_A_CALL) {
        let attach = v1::AttachVolumeRequest {
            front_end: v1::FrontEnd::Ublk.into(),
            queue_depth: MANY_DEPTH,
            ..Default::default()
        };
        let asked = v1::CloneVolumesRequest {
            snapshot: SNAPSHOT.to_owned(),
            names: names.to_vec(),
            attach: Some(attach),
            ..Default::default()
        };
        let made = runtime.block_on(client.clone_volumes(asked));
        let made = made.with_context(|| format!("{} devices are there", paths.len()))?;
        paths.extend(made.into_inner().volumes.into_iter().map(|one| one.device_path));
    }
    let made_s = clock.seconds();
    ensure!(paths.len() == MANY, "{} devices", paths.len());
    let read_all = || {
        paths.iter().try_for_each(|path| {
            ensure!(first_bytes(Path::new(path))? == expected, "{path}: other bytes");
            Ok(())
        })
    };
    read_all()?;
    let after = (memory_of(pid(&daemon)?)?, descriptors(pid(&daemon)?)?);
    let each = |after: u64, before: u64| after.saturating_sub(before) as f64 / MANY as f64;
    let clock = Clock::start();
    daemon.end(Signal::SIGKILL)?;
    daemon.run()?;
    daemon.wait()?;
    read_all()?;
    let restart_s = clock.seconds();
    let mut client = runtime.block_on(async { daemon.client() });
    let clock = Clock::start();
    for name in &names {
        runtime.block_on(delete(&mut client, name))?;
    }
    let each_descriptors = each(after.1 as u64, before.1 as u64);
    let row = |name: &str, figure, unit| Row::new(name, figure, unit, Budget::None);
    Ok(vec![
        row("make and attach one", made_s * 1e3 / MANY as f64, "ms"),
        row("memory of each", each(after.0[0], before.0[0]), "KiB"),
        row("locked memory of each", each(after.0[1], before.0[1]), "KiB"),
        row("descriptors of each", each_descriptors, ""),
        row("kill -9, start, until all are read", restart_s, "s"),
        row("delete one", clock.seconds() * 1e3 / MANY as f64, "ms"),
    ])
}
