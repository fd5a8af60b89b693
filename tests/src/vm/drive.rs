//! Disks of a guest, and their arguments for qemu.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// A disk, which the guest sees as `/dev/vda`, `/dev/vdb` and so on unless stated. Names go by
/// kind, in the order in which disks are given.
#[derive(Clone, Debug)]
pub enum Drive {
    /// A raw file or block device of the host.
    File(PathBuf),
    /// The same as an NVMe disk: `/dev/nvme0n1` and so on.
    Nvme(PathBuf),
    /// A raw file of the host as a disk with limits, as real ones have. What was saved up in a
    /// tenth of a second may be used at once.
    Limited {
        /// The file.
        path: PathBuf,
        /// Requests in a second, reads and writes together.
        iops: u64,
        /// Bytes in a second, reads and writes together.
        bytes_per_second: u64,
    },
    /// A raw file that other machines have at the same time, as several hosts have a LUN.
    Shared(PathBuf),
    /// A file as persistent memory, `/dev/pmem0` and so on: a whole number of 128 MiB, and 2 MiB
    /// more if it is to hold labels. Other sizes misalign what comes behind it.
    Nvdimm(PathBuf),
    /// The same near the processors of a node; see [`super::Vm::nodes`].
    NvdimmNear(PathBuf, u32),
    /// A volume that a server on the host exports over a Unix socket.
    Nbd {
        /// Path of the socket.
        socket: PathBuf,
        /// Name of the export.
        export: String,
        /// Seconds for which requests wait when the server is gone, before they fail.
        reconnect_delay: u32,
    },
    /// The same, with each write and discard logged on the host in the form of device-mapper's
    /// `log-writes`.
    LoggedNbd {
        /// Path of the socket.
        socket: PathBuf,
        /// Name of the export.
        export: String,
        /// The log: a file that is there, and as large as the log may become.
        log: PathBuf,
    },
}

/// Persistent memory comes in regions of a multiple of this.
const NVDIMM_UNIT: u64 = 128 << 20;
/// Labels of namespaces, at the end of the file.
const NVDIMM_LABELS: u64 = 2 << 20;
/// Room for persistent memory in the guest's address space.
const NVDIMM_SLOTS: &str = ",slots=8,maxmem=64G";

impl Drive {
    /// Modules that the guest needs for it.
    pub(super) fn modules(&self) -> &'static [&'static str] {
        match self {
            Self::File(_)
            | Self::Limited { .. }
            | Self::Shared(_)
            | Self::Nbd { .. }
            | Self::LoggedNbd { .. } => &[],
            Self::Nvme(_) => &["nvme"],
            Self::Nvdimm(_) | Self::NvdimmNear(..) => &["nfit", "nd_pmem"],
        }
    }

    /// Words for qemu that add it to the machine.
    fn words(&self, number: usize) -> Result<Vec<String>> {
        let words = match self {
            Self::File(path) => [blockdev(number, &raw(path)), virtio(number)].concat(),
            Self::Nbd { socket, export, reconnect_delay } => {
                let server = format!(
                    "driver=nbd,server.type=unix,server.path={},export={export},\
                     reconnect-delay={reconnect_delay}",
                    option(socket)
                );
                [blockdev(number, &server), virtio(number)].concat()
            }
            Self::LoggedNbd { socket, export, log } => {
                // Otherwise the log is complete only up to the guest's last flush.
                let logged = format!(
                    "driver=blklogwrites,log-super-update-interval=1,log.driver=file,\
                     log.filename={},file.driver=nbd,file.server.type=unix,\
                     file.server.path={},file.export={export}",
                    option(log),
                    option(socket)
                );
                [blockdev(number, &logged), virtio(number)].concat()
            }
            Self::Limited { path, iops, bytes_per_second } => {
                let group = format!(
                    "throttle-group,id=limits{number},x-iops-total={iops},\
                     x-bps-total={bytes_per_second}"
                );
                // Without the host's cache, as a disk has none of that size.
                let limited = format!(
                    "driver=throttle,throttle-group=limits{number},file.driver=raw,\
                     file.file.driver=file,file.file.cache.direct=on,file.file.filename={}",
                    option(path)
                );
                let object = vec!["-object".to_owned(), group];
                [object, blockdev(number, &limited), virtio(number)].concat()
            }
            Self::Shared(path) => {
                let unlocked = format!("{},file.locking=off", raw(path));
                let mut words = [blockdev(number, &unlocked), virtio(number)].concat();
                if let Some(device) = words.last_mut() {
                    device.push_str(",share-rw=on");
                }
                words
            }
            Self::Nvme(path) => {
                let device = format!("nvme,drive=drive{number},serial=drive{number}");
                [blockdev(number, &raw(path)), vec!["-device".into(), device]].concat()
            }
            Self::Nvdimm(path) => nvdimm(number, path, None)?,
            Self::NvdimmNear(path, node) => nvdimm(number, path, Some(*node))?,
        };
        Ok(words)
    }
}

fn nvdimm(number: usize, path: &Path, node: Option<u32>) -> Result<Vec<String>> {
    let size = fs::metadata(path).with_context(|| format!("the size of {}", path.display()))?.len();
    let labels = size % NVDIMM_UNIT;
    ensure!(
        labels == 0 || labels == NVDIMM_LABELS,
        "{}: {size} bytes are no multiple of {NVDIMM_UNIT}, with or without {NVDIMM_LABELS} for \
         labels",
        path.display()
    );
    let path = option(path);
    let object =
        format!("memory-backend-file,id=drive{number},share=on,mem-path={path},size={size}");
    let labels = if labels == 0 { String::new() } else { format!(",label-size={labels}") };
    let node = node.map_or_else(String::new, |node| format!(",node={node}"));
    let device = format!("nvdimm,memdev=drive{number}{labels}{node}");
    Ok(["-object".into(), object, "-device".into(), device].into())
}

/// How far a write to persistent memory has to get to outlive a loss of power, by the platform's
/// own statement.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Persistence {
    /// Into the memory controller: caches have to be written back.
    #[default]
    MemoryController,
    /// Into the caches.
    CpuCache,
    /// The platform does not state it.
    Unsaid,
}

/// The parts of a machine other than its disks.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    pub(super) memory_mib: u32,
    /// Nodes, each with as much of memory and processors; 1 is no word about it.
    pub(super) nodes: u32,
    pub(super) cpus: u32,
    pub(super) persistence: Persistence,
}

/// Words for qemu: the machine with its memory, then all disks.
pub(super) fn machine(frame: &Frame, drives: &[Drive]) -> Result<Vec<String>> {
    let persistent =
        drives.iter().any(|drive| matches!(drive, Drive::Nvdimm(_) | Drive::NvdimmNear(..)));
    let (machine, slots) = match (persistent, frame.persistence) {
        (false, _) => ("pc", ""),
        (true, Persistence::MemoryController) => {
            ("pc,nvdimm=on,nvdimm-persistence=mem-ctrl", NVDIMM_SLOTS)
        }
        (true, Persistence::CpuCache) => ("pc,nvdimm=on,nvdimm-persistence=cpu", NVDIMM_SLOTS),
        (true, Persistence::Unsaid) => ("pc,nvdimm=on", NVDIMM_SLOTS),
    };
    let Frame { memory_mib, nodes, cpus, .. } = *frame;
    let memory = format!("{memory_mib}M{slots}");
    let mut words = vec!["-machine".to_owned(), machine.to_owned(), "-m".to_owned(), memory];
    for node in (0..nodes).filter(|_| nodes > 1) {
        let (size, each) = (memory_mib / nodes, cpus / nodes);
        let (first, last) = (node * each, (node + 1) * each - 1);
        words.push("-object".into());
        words.push(format!("memory-backend-ram,id=near{node},size={size}M"));
        words.push("-numa".into());
        words.push(format!("node,nodeid={node},memdev=near{node},cpus={first}-{last}"));
    }
    for (number, drive) in drives.iter().enumerate() {
        words.extend(drive.words(number)?);
    }
    Ok(words)
}

fn blockdev(number: usize, what: &str) -> Vec<String> {
    vec!["-blockdev".to_owned(), format!("{what},node-name=drive{number},discard=unmap")]
}

fn virtio(number: usize) -> Vec<String> {
    vec!["-device".to_owned(), format!("virtio-blk-pci,drive=drive{number}")]
}

fn raw(path: &Path) -> String {
    let driver = if is_device(path) { "host_device" } else { "file" };
    format!("driver=raw,file.driver={driver},file.filename={}", option(path))
}

fn is_device(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    fs::metadata(path).is_ok_and(|data| data.file_type().is_block_device())
}

/// A path in one of qemu's lists, where a comma would end it.
pub(super) fn option(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}
