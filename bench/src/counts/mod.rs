//! The server's cost of an operation, counted instead of timed. Runs in a virtual machine with one
//! processor whose clock advances by one nanosecond with each instruction (`qemu -icount shift=0`):
//! there, CPU time is a number of instructions, and nothing else that runs on the host is in it.

mod split;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use self::split::Split;
use crate::load::{Device, Pattern, exactly};
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
    write: bool,
    bytes: usize,
    depth: usize,
    /// Operations that are counted. More of them make neither the mean nor the agreement of two
    /// boots better.
    operations: u64,
}

/// The rows of each target.
pub const WORKLOADS: [Workload; 6] = [
    Workload { name: "read 4k, 1", write: false, bytes: 4 << 10, depth: 1, operations: 8000 },
    Workload { name: "write 4k, 1", write: true, bytes: 4 << 10, depth: 1, operations: 8000 },
    Workload { name: "read 4k, 32", write: false, bytes: 4 << 10, depth: 32, operations: 16000 },
    Workload { name: "write 4k, 32", write: true, bytes: 4 << 10, depth: 32, operations: 16000 },
    Workload { name: "read 128k, 8", write: false, bytes: 128 << 10, depth: 8, operations: 1000 },
    Workload { name: "write 128k, 8", write: true, bytes: 128 << 10, depth: 8, operations: 1000 },
];

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
    /// Returns the figures as JSON, with the row's name.
    #[must_use]
    pub fn to_json(&self, name: &str) -> Value {
        json!({
            "name": name, "instructions": self.instructions, "user": self.user,
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
    /// Counts all rows of a target; `None` where the kernel has no such target.
    ///
    /// # Errors
    /// When the daemon fails, or the kernel can't count.
    pub fn target(&self, target: Target, mut row: impl FnMut(&str, Cost)) -> Result<Option<()>> {
        let name = |workload: &Workload| format!("{} {}", target.name(), workload.name);
        let is_wanted = |workload: &Workload| {
            self.only.as_ref().is_none_or(|only| name(workload).contains(only.as_str()))
        };
        let wanted: Vec<&Workload> = WORKLOADS.iter().filter(|one| is_wanted(one)).collect();
        if wanted.is_empty() {
            return Ok(Some(()));
        }
        let mode = if let Target::Ublk(mode) = target { mode } else { Mode::Copy };
        let pool = Pool { name: "counted", disk: Disk::First, extent: 256 << 10 };
        let folder = self.scratch.join(target.name().replace(' ', "-"));
        let daemon = Daemon::start(&self.blockd, &folder, mode, &[pool])?;
        let pid = daemon.pid().context("blockd does not run")?;
        let mut volume = match target {
            Target::Nbd => {
                let uri = daemon.export(pool.name, "volume", VOLUME)?;
                Volume::Export { client: Client::connect(&uri)?, uri }
            }
            Target::Ublk(_) => {
                let (device, real) = daemon.add(pool.name, "volume", VOLUME)?;
                if real != mode {
                    return Ok(None);
                }
                Volume::Device(device.path)
            }
        };
        let (filling, requests) = Pattern::filling(VOLUME);
        volume.run(&filling, requests).context("fill the volume")?;
        for workload in wanted {
            let cost = self.count(&mut volume, pid, workload).with_context(|| name(workload))?;
            row(&name(workload), cost);
        }
        volume.leave()?;
        Ok(Some(()))
    }

    fn count(&self, volume: &mut Volume, pid: u32, workload: &Workload) -> Result<Cost> {
        volume.begin_anew()?;
        let operations = if self.quick { workload.operations / 8 } else { workload.operations };
        let &Workload { write, bytes, depth, .. } = workload;
        let pattern = Pattern { write, bytes, depth, span: VOLUME, seed: Some(1) };
        volume.run(&pattern, operations / 4).context("warm up")?;
        let part = operations / PARTS;
        let (mut instructions, mut switches) = (Vec::new(), Vec::new());
        for _ in 0..PARTS {
            let from = Reading::take(pid)?;
            volume.run(&pattern, part)?;
            let to = Reading::take(pid)?;
            instructions.push((to.ns - from.ns) as f64 / part as f64);
            switches.push((to.switches - from.switches) as f64 / part as f64);
        }
        // Tracing costs instructions itself, so its run is another one.
        let traced = operations.min(MOST_TRACED);
        let split = Split::start(pid)?;
        volume.run(&pattern, traced)?;
        let split = split.end()?;
        Ok(Cost {
            instructions: median(&instructions).context("nothing was counted")?,
            user: split.user_ns / traced as f64,
            calls: split.calls as f64 / traced as f64,
            switches: median(&switches).context("nothing was counted")?,
        })
    }
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
