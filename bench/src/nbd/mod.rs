//! The NBD server beside others, with the same client and the same options on the same medium.

pub mod after_snapshot;
pub mod before;
pub mod claims;
pub(crate) mod client;
pub mod composite_reads;
pub mod counts;
pub mod endurance;
pub mod evacuation;
pub mod fio;
pub mod first_touch;
pub mod flushed_first_touch;
pub mod measure;
pub(crate) mod ours;
pub mod print;
pub mod process;
pub mod server;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use blockd_testkit::folder::Folder;
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use nix::sys::statvfs::statvfs;

use self::claims::{Medium, STAGES, Stage, Workload};
use self::fio::{Jobs, Settings};
use self::measure::{Effort, Outcome};
use self::server::{Image, Kind, Server};
use crate::pump::place::takes_direct;
use crate::report::Row;

/// Bytes that a server must give back as written before it is measured.
const VERIFIED: u64 = 32 << 20;

/// Everything that a run needs to know.
#[derive(Clone, Debug)]
pub struct Bench {
    /// The daemon; without it the first of the others stands in its place.
    pub blockd: Option<PathBuf>,
    /// The job files.
    pub jobs: Jobs,
    /// How much is done.
    pub effort: Effort,
    /// Bytes of a volume on servers that stay up.
    pub size: u64,
    /// Whether only the workloads of a quick run are selected.
    pub quick: bool,
    /// Only workloads with this in their name.
    pub only: Option<String>,
}

/// Folders of a run, removed in the end.
#[derive(Debug)]
pub struct Folders {
    /// On tmpfs.
    pub memory: Folder,
    /// On a disk's file system.
    pub disk: Folder,
}

impl Folders {
    /// Makes them.
    pub fn new() -> Result<Self> {
        let name = format!("blockd-bench-nbd-{}", std::process::id());
        let is_tmpfs =
            |path: &Path| statfs(path).is_ok_and(|fs| fs.filesystem_type() == TMPFS_MAGIC);
        let memory = ["/dev/shm", "/run", "/tmp"].map(PathBuf::from);
        let memory = memory.into_iter().find(|path| is_tmpfs(path)).context("no tmpfs")?;
        let here = std::env::current_dir()?;
        let disks = [std::env::temp_dir(), PathBuf::from("/var/tmp"), here];
        let disk = disks.into_iter().find(|path| takes_direct(path, &name));
        let disk = disk.context("no folder takes O_DIRECT")?;
        Ok(Self { memory: Folder::below(&memory, "nbd")?, disk: Folder::below(&disk, "nbd")? })
    }

    /// The largest power of two up to `wanted` for which the disk has room, some left over.
    pub fn room(&self, wanted: u64) -> Result<u64> {
        let fs = statvfs(self.disk.path())?;
        let free = fs.blocks_available() * fs.fragment_size();
        let mut size = wanted;
        while size > 256 << 20 && ours::pool_bytes(size) + size / 4 > free {
            size /= 2;
        }
        Ok(size)
    }
}

impl Bench {
    /// The stages with selected workloads.
    #[must_use]
    pub fn plan(&self) -> Vec<(Stage, Vec<Workload>)> {
        let wanted = |stage: &Stage, workload: &Workload| {
            let only = self.only.as_ref();
            only.is_none_or(|only| workload.name(stage).contains(only.as_str()))
                && (only.is_some() || !self.quick || workload.quick)
        };
        let all = STAGES.into_iter().map(|stage| {
            let workloads = stage.workloads.iter().filter(|w| wanted(&stage, w));
            (stage, workloads.copied().collect::<Vec<_>>())
        });
        all.filter(|(_, workloads)| !workloads.is_empty()).collect()
    }

    /// Starts the servers of a stage, and has each one written and verified.
    pub fn start(&self, stage: &Stage, folders: &Folders) -> Result<Vec<Server>> {
        let kinds =
            stage.servers.iter().filter(|kind| **kind != Kind::Blockd || self.blockd.is_some());
        let mut servers = Vec::new();
        for (index, kind) in kinds.enumerate() {
            let name = format!("{}-{index}", stage.name);
            servers.push(self.one(*kind, stage.medium, &name, folders)?);
        }
        ensure!(servers.len() > 1, "{}: nothing to compare", stage.name);
        Ok(servers)
    }

    /// One server alone, on tmpfs.
    pub fn alone(&self, kind: Kind, folders: &Folders) -> Result<Server> {
        self.one(kind, Medium::Tmpfs, "alone", folders)
    }

    fn one(&self, kind: Kind, medium: Medium, name: &str, folders: &Folders) -> Result<Server> {
        let blockd = self.blockd.as_deref().unwrap_or_else(|| Path::new(""));
        self.with(blockd, kind, medium, name, folders)
    }

    /// The same with this daemon.
    fn with(
        &self,
        blockd: &Path,
        kind: Kind,
        medium: Medium,
        name: &str,
        folders: &Folders,
    ) -> Result<Server> {
        let disk = medium == Medium::Disk;
        let place = if disk { &folders.disk } else { &folders.memory }.path();
        let image = Image {
            snapshots: 0,
            folder: folders.memory.path().join(name),
            file: place.join(format!("{name}.image")),
            size: self.size,
            medium,
        };
        let server = Server::start(kind, &image, blockd)?.with_image_removed(&image);
        self.prepare(&server).with_context(|| server.words())?;
        Ok(server)
    }

    fn prepare(&self, server: &Server) -> Result<()> {
        let settings =
            Settings { uri: &server.uri, seconds: 0.0, connections: 1, seed: 1, bytes: VERIFIED };
        self.jobs.run("fill", settings)?;
        self.jobs.run("verify", settings).context("read data differs from written data")?;
        Ok(())
    }

    /// One workload.
    pub fn measure(&self, workload: &Workload, servers: &[Server]) -> Result<Outcome> {
        measure::measure(&self.jobs, workload, servers, self.effort)
    }

    /// The counts of the blockd daemon, if it takes part.
    pub fn counts(
        &self,
        stage: &Stage,
        workload: &Workload,
        servers: &[Server],
    ) -> Result<Vec<Row>> {
        match servers.first() {
            Some(server) if server.kind == Kind::Blockd && workload.connections == 1 => {
                let name = workload.name(stage);
                counts::rows(&self.jobs, workload, server, self.effort.seconds, &name)
            }
            _ => Ok(Vec::new()),
        }
    }
}
