//! The server's cost of an operation, counted instead of timed. Runs in a virtual machine with one
//! processor whose clock advances by one nanosecond with each instruction (`qemu -icount shift=0`):
//! there, CPU time is a number of instructions, and nothing else that runs on the host is in it.

pub mod peers;
mod split;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use self::peers::Peer;
use self::split::Split;
use crate::load::{Device, Order, Pattern, exactly};
use crate::nbd::client::Client;
use crate::nbd::process::Tree;
use crate::stats::median;
use crate::ublk::Mode;
use crate::ublk::backing::Disk;
use crate::ublk::daemon::{Daemon, Pool};

/// Bytes of a volume, all of them written before anything is counted.
const VOLUME: u64 = 32 << 20;

/// Operations of a traced run: more of them take longer to read than to run.
const MOST_TRACED: u64 = 4000;

/// A row is counted in this many parts, and the median is shown: periodic work of the daemon takes
/// millions of instructions and falls into one part.
const PARTS: u64 = 8;

/// After this the daemon does not count the volume that was used before as active, and the next one
/// has its worker to itself.
const AT_REST: Duration = Duration::from_secs(3);

/// How a volume is reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target {
    /// NBD over a Unix socket; client and server are in the same machine.
    Nbd,
    /// A ublk device.
    Ublk(Mode),
}

impl Target {
    /// All.
    pub const ALL: [Self; 3] = [Self::Nbd, Self::Ublk(Mode::Copy), Self::Ublk(Mode::ZeroCopy)];

    /// In words.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Nbd => "nbd",
            Self::Ublk(Mode::Copy) => "ublk copy",
            Self::Ublk(Mode::ZeroCopy) => "ublk zero copy",
        }
    }
}

/// One row.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// Its name.
    pub name: &'static str,
    kind: Kind,
    bytes: usize,
    depth: usize,
    /// Operations that are counted. More of them make neither the mean nor the agreement of two
    /// boots better.
    operations: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Read,
    /// Of what was written before.
    Write,
    /// Each into an extent of its own that was never written.
    FirstWrite,
    /// Each into an extent of its own that a snapshot has too.
    AfterSnapshot,
    /// Of a volume where one entry in nine is composite.
    CompositeRead,
}

impl Kind {
    const fn writes(self) -> bool {
        matches!(self, Self::Write | Self::FirstWrite | Self::AfterSnapshot)
    }

    /// Whether each operation takes an extent of its own.
    const fn takes_extents(self) -> bool {
        matches!(self, Self::FirstWrite | Self::AfterSnapshot)
    }

    /// Whether other servers have the row too.
    const fn is_of_any_server(self) -> bool {
        matches!(self, Self::Read | Self::Write)
    }
}

impl Workload {
    const fn new(
        name: &'static str,
        kind: Kind,
        kib: usize,
        depth: usize,
        operations: u64,
    ) -> Self {
        Self { name, kind, bytes: kib << 10, depth, operations }
    }

    /// Operations of the run that is traced.
    const fn traced(&self) -> u64 {
        if self.operations < MOST_TRACED { self.operations } else { MOST_TRACED }
    }

    /// Bytes of the volume.
    const fn volume(&self) -> u64 {
        match self.kind {
            Kind::Read | Kind::Write | Kind::CompositeRead => VOLUME,
            // A quarter to warm up, and those that are traced.
            Kind::FirstWrite | Kind::AfterSnapshot => {
                (self.operations / 4 + self.operations + self.traced()) * EXTENT
            }
        }
    }
}

/// The rows of each target.
pub const WORKLOADS: [Workload; 11] = [
    Workload::new("read 4k, 1", Kind::Read, 4, 1, 8000),
    Workload::new("write 4k, 1", Kind::Write, 4, 1, 8000),
    Workload::new("read 4k, 32", Kind::Read, 4, 32, 16000),
    Workload::new("write 4k, 32", Kind::Write, 4, 32, 16000),
    Workload::new("read 128k, 8", Kind::Read, 128, 8, 1000),
    Workload::new("write 128k, 8", Kind::Write, 128, 8, 1000),
    Workload::new("composite read 4k, 32", Kind::CompositeRead, 4, 32, 16000),
    Workload::new("first write 4k, 1", Kind::FirstWrite, 4, 1, 4000),
    Workload::new("first write 4k, 32", Kind::FirstWrite, 4, 32, 6000),
    Workload::new("first write after a snapshot 4k, 1", Kind::AfterSnapshot, 4, 1, 1000),
    Workload::new("first write after a snapshot 4k, 32", Kind::AfterSnapshot, 4, 32, 3000),
];

/// Bytes of an extent of the pools for first writes.
const EXTENT: u64 = 64 << 10;
/// Bytes that are written to each extent before a snapshot is taken: the machine's memory is its
/// disk.
const SHARED: usize = 16 << 10;
/// Bytes of an extent of the other pool.
const LARGE_EXTENT: u64 = 256 << 10;
/// One extent in nine is half written after a snapshot: a little more than a tenth of all.
const OVERLAID: u64 = 9;

/// The server's cost of each operation of a row.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Cost {
    /// Instructions.
    pub instructions: f64,
    /// Instructions outside the kernel.
    pub user: f64,
    /// System calls.
    pub calls: f64,
    /// Times that one of its threads left the processor.
    pub switches: f64,
}

impl Cost {
    /// Returns the figures as JSON, with the server's and the row's name.
    #[must_use]
    pub fn to_json(&self, server: &str, name: &str) -> Value {
        json!({
            "server": server, "name": name, "instructions": self.instructions, "user": self.user,
            "kernel": self.instructions - self.user, "system_calls": self.calls,
            "context_switches": self.switches,
        })
    }
}

/// The operation and the device of a row.
#[derive(Clone, Debug)]
pub struct Bench {
    /// The daemon's program.
    pub blockd: PathBuf,
    /// For its folders.
    pub scratch: PathBuf,
    /// An eighth of the operations: shows that everything works.
    pub quick: bool,
    /// Only rows with this in their name.
    pub only: Option<String>,
}

impl Bench {
    /// Counts all rows of a target; `None` where the kernel has no such target. Those after a
    /// snapshot have a daemon to themselves, as another pool costs each request something.
    ///
    /// # Errors
    /// When the daemon fails, or the kernel can't count.
    pub fn target(&self, target: Target, mut row: impl FnMut(&str, Cost)) -> Result<Option<()>> {
        let wanted = self.wanted(target).into_iter();
        let (after, others): (Vec<_>, Vec<_>) =
            wanted.partition(|(_, one)| one.kind == Kind::AfterSnapshot);
        if !others.is_empty() && self.most(target, &others, &mut row)?.is_none() {
            return Ok(None);
        }
        if after.is_empty() { Ok(Some(())) } else { self.after(target, &after, &mut row) }
    }

    fn most(
        &self,
        target: Target,
        wanted: &[(String, &Workload)],
        row: &mut impl FnMut(&str, Cost),
    ) -> Result<Option<()>> {
        let pool = Pool { name: "counted", disk: Disk::First, extent: LARGE_EXTENT };
        let touched = Pool { name: "touched", disk: Disk::Second, extent: EXTENT };
        let ours = Ours::start(self, target, "", &[pool, touched])?;
        let Some(mut volume) = ours.open(pool, "volume", VOLUME)? else { return Ok(None) };
        self.rows(target, ours.pid, &mut volume, row)?;
        let of = |kind| wanted.iter().filter(move |(_, one)| one.kind == kind);
        for (name, workload) in of(Kind::CompositeRead) {
            ours.daemon.snapshot(pool.name, "volume", "kept")?;
            volume.overlay().context("write to shared extents")?;
            let cost = self.count(&mut volume, ours.pid, workload).with_context(|| name.clone())?;
            row(name, cost);
        }
        volume.leave()?;
        for (name, workload) in of(Kind::FirstWrite) {
            std::thread::sleep(AT_REST);
            let other = format!("depth-{}", workload.depth);
            let volume = ours.open(touched, &other, workload.volume())?;
            let mut volume = volume.context("another mode than before")?;
            let cost = self.count(&mut volume, ours.pid, workload).with_context(|| name.clone())?;
            row(name, cost);
            volume.leave()?;
        }
        Ok(Some(()))
    }

    fn after(
        &self,
        target: Target,
        wanted: &[(String, &Workload)],
        row: &mut impl FnMut(&str, Cost),
    ) -> Result<Option<()>> {
        let shared = Pool { name: "shared", disk: Disk::ThinSmall, extent: EXTENT };
        let ours = Ours::start(self, target, "-shared", &[shared])?;
        for (name, workload) in wanted {
            let of = format!("depth-{}", workload.depth);
            let Some(mut volume) = ours.open(shared, &of, workload.volume())? else {
                return Ok(None);
            };
            volume.share(workload.volume()).context("fill the volume")?;
            ours.daemon.snapshot(shared.name, &of, &format!("{of}-kept"))?;
            std::thread::sleep(AT_REST);
            let cost = self.count(&mut volume, ours.pid, workload).with_context(|| name.clone())?;
            row(name, cost);
            volume.leave()?;
        }
        Ok(Some(()))
    }

    /// Counts all rows of another server.
    ///
    /// # Errors
    /// When it fails, or the kernel can't count.
    pub fn peer(&self, peer: Peer, mut row: impl FnMut(&str, Cost)) -> Result<()> {
        if self.wanted(peer.target()).is_empty() {
            return Ok(());
        }
        let served = peer.start(&self.scratch).with_context(|| peer.name())?;
        let Served { pid, mut volume, server } = served;
        self.rows(peer.target(), pid, &mut volume, &mut row).with_context(|| peer.name())?;
        volume.leave()?;
        drop(server);
        Ok(())
    }

    fn wanted(&self, target: Target) -> Vec<(String, &'static Workload)> {
        let all = WORKLOADS.iter().map(|one| (format!("{} {}", target.name(), one.name), one));
        let is_wanted = |name: &str| self.only.as_ref().is_none_or(|only| name.contains(only));
        all.filter(|(name, _)| is_wanted(name)).collect()
    }

    /// The rows of a volume that is written once before.
    fn rows(
        &self,
        target: Target,
        pid: u32,
        volume: &mut Volume,
        row: &mut impl FnMut(&str, Cost),
    ) -> Result<()> {
        let (filling, requests) = Pattern::filling(VOLUME);
        volume.run(&filling, requests).context("fill the volume")?;
        let wanted = self.wanted(target).into_iter();
        for (name, workload) in wanted.filter(|(_, one)| one.kind.is_of_any_server()) {
            let cost = self.count(volume, pid, workload).with_context(|| name.clone())?;
            row(&name, cost);
        }
        Ok(())
    }

    fn count(&self, volume: &mut Volume, pid: u32, workload: &Workload) -> Result<Cost> {
        volume.begin_anew()?;
        let operations = if self.quick { workload.operations / 8 } else { workload.operations };
        let &Workload { kind, bytes, depth, .. } = workload;
        let (write, span) = (kind.writes(), workload.volume());
        let mut done = 0;
        let mut run = |requests: u64| {
            let order = match kind {
                Kind::Read | Kind::Write | Kind::CompositeRead => Order::Random(1),
                Kind::FirstWrite | Kind::AfterSnapshot => Order::Strided(done, EXTENT),
            };
            done += requests;
            volume.run(&Pattern { write, bytes, depth, span, order }, requests)
        };
        run(operations / 4).context("warm up")?;
        let part = operations / PARTS;
        let (mut instructions, mut switches) = (Vec::new(), Vec::new());
        for _ in 0..PARTS {
            let from = Reading::take(pid)?;
            run(part)?;
            let to = Reading::take(pid)?;
            instructions.push((to.ns - from.ns) as f64 / part as f64);
            switches.push((to.switches - from.switches) as f64 / part as f64);
        }
        // The pool's thread takes many first writes together, which falls into few parts.
        let mean = |all: &[f64]| Some(all.iter().sum::<f64>() / all.len() as f64);
        let middle = |all: &[f64]| if kind.takes_extents() { mean(all) } else { median(all) };
        // Tracing costs instructions itself, so its run is another one.
        let traced = operations.min(MOST_TRACED);
        let split = Split::start(pid)?;
        run(traced)?;
        let split = split.end()?;
        Ok(Cost {
            instructions: middle(&instructions).context("nothing was counted")?,
            user: split.user_ns / traced as f64,
            calls: split.calls as f64 / traced as f64,
            switches: middle(&switches).context("nothing was counted")?,
        })
    }
}

/// Our daemon.
struct Ours {
    daemon: Daemon,
    pid: u32,
    target: Target,
}

impl Ours {
    /// Starts one on empty pools.
    fn start(bench: &Bench, target: Target, part: &str, pools: &[Pool]) -> Result<Self> {
        let mode = if let Target::Ublk(mode) = target { mode } else { Mode::Copy };
        let folder = bench.scratch.join(target.name().replace(' ', "-") + part);
        let daemon = Daemon::start(&bench.blockd, &folder, mode, pools)?;
        let pid = daemon.pid().context("blockd does not run")?;
        Ok(Self { daemon, pid, target })
    }

    /// Makes a volume and reaches it; `None` where the kernel has no such target.
    fn open(&self, pool: Pool, name: &str, bytes: u64) -> Result<Option<Volume>> {
        Ok(match self.target {
            Target::Nbd => {
                let uri = self.daemon.export(pool.name, name, bytes)?;
                Some(Volume::Export { client: Client::connect(&uri)?, uri })
            }
            Target::Ublk(mode) => {
                let (device, real) = self.daemon.add(pool.name, name, bytes)?;
                (real == mode).then_some(Volume::Device(device.path))
            }
        })
    }
}

/// A server that runs, with its volume.
struct Served {
    pid: u32,
    volume: Volume,
    /// Ends when it is dropped.
    server: Box<dyn std::any::Any>,
}

/// A volume as its client has it.
enum Volume {
    Export { uri: String, client: Client },
    Device(PathBuf),
}

impl Volume {
    /// Connects again: the state of a connection after earlier rows does not affect later ones.
    fn begin_anew(&mut self) -> Result<()> {
        if let Self::Export { uri, client } = self {
            let earlier = std::mem::replace(client, Client::connect(uri)?);
            earlier.leave()?;
        }
        Ok(())
    }

    fn run(&mut self, pattern: &Pattern, requests: u64) -> Result<()> {
        match self {
            Self::Export { client, .. } => client.run(pattern, exactly(requests)),
            Self::Device(path) => Device::open(path, pattern)?.run(pattern, exactly(requests)),
        }
    }

    /// Writes half of one extent in [`OVERLAID`].
    fn overlay(&mut self) -> Result<()> {
        let stride = OVERLAID * LARGE_EXTENT;
        let (bytes, order) = (usize::try_from(LARGE_EXTENT / 2)?, Order::Strided(0, stride));
        let pattern = Pattern { write: true, bytes, depth: 1, span: VOLUME, order };
        self.run(&pattern, VOLUME / stride)
    }

    /// Writes to each extent of a volume, which has `span` bytes.
    fn share(&mut self, span: u64) -> Result<()> {
        let order = Order::Strided(0, EXTENT);
        self.run(&Pattern { write: true, bytes: SHARED, depth: 8, span, order }, span / EXTENT)
    }

    fn leave(self) -> Result<()> {
        match self {
            Self::Export { client, .. } => client.leave(),
            Self::Device(_) => Ok(()),
        }
    }
}

/// The resource usage of a process so far.
struct Reading {
    /// CPU time of all its threads, with the kernel's threads for its rings.
    ns: u64,
    switches: u64,
}

impl Reading {
    fn take(pid: u32) -> Result<Self> {
        let tree = Tree::new(pid);
        Ok(Self { ns: tree.scheduled_ns()?, switches: tree.switches()? })
    }
}

/// Keeps all memory in small pages: the use of large ones varies between runs, and changes the
/// number of the kernel's instructions.
///
/// # Errors
/// When the kernel refuses.
pub fn keep_pages_small() -> Result<()> {
    const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
    std::fs::write(SETTING, "never").context(SETTING)
}

/// Where the daemon's folders lie in the machine.
#[must_use]
pub fn scratch() -> PathBuf {
    Path::new("/run/bench").to_owned()
}
