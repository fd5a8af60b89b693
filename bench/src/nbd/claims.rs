//! The claims about the NBD server, and the workloads that measure them.

use super::fio::{COMMITS, FLUSHES};
use super::server::Kind;

/// The compared figure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Figure {
    /// Operations per second, ours by the other's.
    Iops,
    /// CPU of the server per operation, the other's by ours.
    Cpu,
}

/// The other side of a claim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Peer {
    /// Whichever is best at the figure.
    Best,
    /// The best of these.
    Among(&'static [Kind]),
}

/// A ratio that has to be reached.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Target {
    /// The figure of the claim.
    pub figure: Figure,
    /// The compared server.
    pub peer: Peer,
    /// At least so much.
    pub ratio: f64,
}

/// One job file in one setting.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// The job file's name.
    pub job: &'static str,
    /// In words.
    pub title: &'static str,
    /// Connections.
    pub connections: u32,
    /// Whether a quick run has it too.
    pub quick: bool,
    /// The claimed ratios.
    pub targets: &'static [Target],
}

/// Where the bytes are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Medium {
    /// A file on tmpfs, through the page cache.
    Tmpfs,
    /// The server's own memory.
    Memory,
    /// A file on a disk's file system, with O_DIRECT.
    Disk,
    /// Memory that blockd takes for persistent, with blocks that are never torn; the others have
    /// their own.
    Pmem,
    /// The same with blocks that may be torn, as those of the others.
    PmemTorn,
}

/// Servers that are started together, and the workloads that run on them in turns.
#[derive(Clone, Copy, Debug)]
pub struct Stage {
    /// Its name, as `--only` has it.
    pub name: &'static str,
    /// Where the bytes are.
    pub medium: Medium,
    /// The compared servers.
    pub servers: &'static [Kind],
    /// The workloads that measure it.
    pub workloads: &'static [Workload],
}

const fn target(figure: Figure, peer: Peer, ratio: f64) -> Target {
    Target { figure, peer, ratio }
}

const BOTH: &[Target] =
    &[target(Figure::Iops, Peer::Best, 1.0), target(Figure::Cpu, Peer::Best, 1.0)];
const IOPS: &[Target] = &[target(Figure::Iops, Peer::Best, 1.0)];

const fn workload(job: &'static str, title: &'static str, connections: u32) -> Workload {
    Workload { job, title, connections, quick: connections == 1, targets: BOTH }
}

const SMALL: [Workload; 6] = [
    workload("randread", "4 KiB random read, depth 32", 1),
    workload("randwrite", "4 KiB random write, depth 32", 1),
    workload("mixed", "4 KiB random, 70 % reads, depth 32", 1),
    workload("randread", "4 KiB random read, depth 32", 4),
    workload("randwrite", "4 KiB random write, depth 32", 4),
    workload("mixed", "4 KiB random, 70 % reads, depth 32", 4),
];

const LARGE: [Workload; 2] = [
    Workload { targets: IOPS, ..workload("read-seq", "128 KiB sequential read, depth 8", 1) },
    Workload { targets: IOPS, ..workload("write-seq", "128 KiB sequential write, depth 8", 1) },
];

const DEPTH_1: [Workload; 2] = [
    Workload { targets: IOPS, ..workload("randread-qd1", "4 KiB random read, depth 1", 1) },
    Workload { targets: IOPS, ..workload("randwrite-qd1", "4 KiB random write, depth 1", 1) },
];

/// The kinds of qemu-nbd that use O_DIRECT on a raw image.
const QEMU_DIRECT: &[Kind] = &[Kind::QemuDirect, Kind::QemuNative];

/// All stages on servers that stay up. First-touch has its own definition.
pub const STAGES: [Stage; 5] = [
    Stage {
        name: "tmpfs",
        medium: Medium::Tmpfs,
        servers: &[
            Kind::Blockd,
            Kind::QemuRaw,
            Kind::StorageDaemon,
            Kind::NbdkitFile,
            Kind::NbdServer,
        ],
        workloads: &[
            SMALL[0], SMALL[1], SMALL[2], SMALL[3], SMALL[4], SMALL[5], LARGE[0], LARGE[1],
            DEPTH_1[0], DEPTH_1[1],
        ],
    },
    Stage {
        name: "memory",
        medium: Medium::Memory,
        servers: &[Kind::Blockd, Kind::NbdkitMemory, Kind::NbdkitMalloc],
        workloads: &[SMALL[0], SMALL[1], SMALL[2], LARGE[0], LARGE[1], DEPTH_1[0], DEPTH_1[1]],
    },
    Stage {
        name: "pmem",
        medium: Medium::Pmem,
        servers: &[Kind::Blockd, Kind::NbdkitMemory, Kind::NbdkitMalloc],
        workloads: &[SMALL[0], SMALL[1], SMALL[2], LARGE[0], LARGE[1]],
    },
    // The part of the cost that whole blocks account for.
    Stage {
        name: "pmem-torn",
        medium: Medium::PmemTorn,
        servers: &[Kind::Blockd, Kind::NbdkitMemory, Kind::NbdkitMalloc],
        workloads: &[SMALL[1], LARGE[1]],
    },
    Stage {
        name: "disk",
        medium: Medium::Disk,
        servers: &[
            Kind::Blockd,
            Kind::QemuDirect,
            Kind::QemuNative,
            Kind::StorageDaemonDirect,
            Kind::Qcow2,
            Kind::NbdkitFile,
            Kind::NbdServer,
        ],
        workloads: &[
            Workload {
                targets: &[target(Figure::Iops, Peer::Among(QEMU_DIRECT), 2.0)],
                ..workload("randwrite", "4 KiB random write, depth 32", 1)
            },
            Workload {
                targets: &[target(Figure::Iops, Peer::Best, 2.0)],
                ..workload(FLUSHES, "4 KiB random write, depth 32, a flush each 16", 1)
            },
            Workload {
                targets: &[target(Figure::Iops, Peer::Best, 1.3)],
                ..workload(COMMITS, "4 KiB write and flush, one after the other", 8)
            },
            DEPTH_1[0],
            DEPTH_1[1],
        ],
    },
];

impl Workload {
    /// Its name, for `--only` and in the tables.
    #[must_use]
    pub fn name(&self, stage: &Stage) -> String {
        format!("{}/{}-{}", stage.name, self.job, self.connections)
    }
}

impl Peer {
    /// Whether this server may be the other side.
    #[must_use]
    pub fn allows(self, kind: Kind) -> bool {
        match self {
            Self::Best => true,
            Self::Among(kinds) => kinds.contains(&kind),
        }
    }
}

impl Figure {
    /// In words.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Iops => "IOPS",
            Self::Cpu => "CPU/op",
        }
    }
}
