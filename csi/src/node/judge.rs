//! Derives the causes of a volume from its state on this node: its device, its mounts and its file
//! system. Pure, and limited to faults that the daemon does not know.

use std::path::Path;

use blockd_csi_base::error::shown;

use super::modes::Access;
use super::mountinfo::{Device, Entry};
use super::records::Record;
use super::world::{DeviceLook, Node, Usage, Volume};
use crate::health::Cause;

/// A file system with less left is full: it keeps its last blocks for itself, and df shows 100 %.
const FULL_BYTES: i64 = 1_048_576;

/// For a small file system it is this part instead.
const FULL_PART: i64 = 256;

/// The role of a path for a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Staging,
    Target,
}

impl Role {
    const fn name(self) -> &'static str {
        match self {
            Self::Staging => "staging path",
            Self::Target => "target path",
        }
    }
}

/// The daemon has none of that name, and it was staged or published here.
#[must_use]
pub fn no_volume(pool: &str, name: &str) -> Cause {
    Cause::failure(format!("volume not found: pool {} has no {}", shown(pool), shown(name)))
}

/// The block device of a volume. `look` is the state of its device, if there is one.
#[must_use]
pub fn device(volume: &Volume, look: Option<&DeviceLook>) -> Vec<Cause> {
    let because = if volume.problem.is_empty() {
        String::new()
    } else {
        format!(": {}", shown(&volume.problem))
    };
    if let (Some(why), true) = (volume.locked, volume.problem.is_empty()) {
        let why = if why.is_empty() { String::new() } else { format!(": {why}") };
        return vec![Cause::failure(format!("its encryption is not open{why}"))];
    }
    let (Some(device), Some(look)) = (&volume.device, look) else {
        return vec![Cause::failure(format!("its block device is gone{because}"))];
    };
    let name = name(device);
    let numbers = format!("{}:{}", device.major, device.minor);
    let mut causes = Vec::new();
    // The first of these that holds; the others follow from it.
    let problem = match (look.bytes, look.node) {
        (None, _) => Some(format!("block device {name} is gone{because}")),
        (Some(_), _) if !volume.problem.is_empty() => {
            Some(format!("block device {name} is not served{because}"))
        }
        (Some(0), _) => Some(format!("block device {name} is not served: its size is 0")),
        (Some(_), Node::Missing) => Some(format!("the node of block device {name} is gone")),
        (Some(_), Node::Other) => Some(format!("{name} is another device, not {numbers}")),
        (Some(_), Node::Right) => None,
    };
    causes.extend(problem.map(Cause::failure));
    if look.bad_blocks > 0 {
        let text = format!("block device {name} has {} bad sectors", look.bad_blocks);
        causes.push(Cause::failure(text));
    }
    causes
}

/// The cause of a path at which the volume is no longer mounted.
#[must_use]
pub fn not_there(role: Role, there: Option<&Entry>) -> Cause {
    let path = role.name();
    Cause::failure(match there {
        None => format!("nothing is mounted at its {path}"),
        Some(entry) => {
            let (kind, source) = (shown(&entry.kind), shown(entry.source.display()));
            format!("something else is mounted at its {path}: {kind} of {source}")
        }
    })
}

/// Its file is at the target path, and is the node of another device.
#[must_use]
pub fn wrong_node(device: &Device) -> Cause {
    Cause::failure(format!("the file at its target path is not block device {}", name(device)))
}

/// The volume is at this path, and not where it is staged: the next publication fails until then.
#[must_use]
pub fn not_staged() -> Cause {
    Cause::warning("it was unmounted from its staging path")
}

/// A mount of the volume that is there.
#[must_use]
pub fn mount(entry: &Entry, path: &Path, record: Option<&Record>) -> Option<Cause> {
    let kind = shown(&entry.kind);
    if entry.stopped {
        return Some(Cause::failure(format!("the kernel has stopped its {kind} after an error")));
    }
    let record = record?;
    let target = record.targets.iter().find(|target| target.path == path);
    let staged = record.stage.as_ref().and_then(|stage| stage.read_only);
    // An inline volume is mounted where it is published.
    let whole = if record.ephemeral { target.map(|target| target.read_only) } else { staged };
    if entry.whole_read_only && whole == Some(false) {
        return Some(Cause::failure(format!("its {kind} has become read-only")));
    }
    let here = target.map(|target| target.read_only).or(staged);
    let is_here = entry.read_only && !entry.whole_read_only;
    (is_here && here == Some(false)).then(|| Cause::failure("its mount has become read-only"))
}

/// Errors that the file system has counted.
#[must_use]
pub fn errors(kind: &str, count: u64) -> Option<Cause> {
    let kind = shown(kind);
    (count > 0).then(|| Cause::failure(format!("{kind} has counted {count} errors")))
}

/// The file system returns only errors.
#[must_use]
pub fn shut_down(kind: &str) -> Cause {
    Cause::failure(format!("its {} was shut down: it answers with IO errors", shown(kind)))
}

/// Whether it is full. Inodes only where there are bytes left: where there is no room there are
/// none of them, either.
#[must_use]
pub fn capacity(bytes: &Usage, inodes: &Usage) -> Option<Cause> {
    let is_full = |usage: &Usage, least: i64| usage.total > 0 && usage.available < least.max(1);
    let least = FULL_BYTES.min(bytes.total / FULL_PART);
    let text = |usage: &Usage, of: &str| {
        let used = usage.total.saturating_sub(usage.available);
        format!("out of capacity: {used} of {} {of} are used", usage.total)
    };
    if is_full(bytes, least) {
        return Some(Cause::failure(text(bytes, "bytes")));
    }
    is_full(inodes, 1).then(|| Cause::failure(text(inodes, "inodes")))
}

/// Bytes of a device: the bytes that it takes of its pool, if that is only a part of its size.
#[must_use]
pub fn block_usage(volume: &Volume) -> Usage {
    let total = volume.size_bytes;
    if volume.thick {
        return Usage { total, used: 0, available: 0 };
    }
    // Extents may reach beyond the end of the volume.
    let used = volume.mapped_bytes.clamp(0, total);
    Usage { total, used, available: total.saturating_sub(used) }
}

/// The cause that a check which has not returned reports for a volume.
#[must_use]
pub fn silent(seconds: u64) -> Cause {
    Cause::failure(format!("its file system or device has not answered for {seconds} s"))
}

/// The volume was not checked.
#[must_use]
pub fn crowded() -> Cause {
    Cause::unknown("not looked at, since too many other volumes do not answer")
}

/// Whether a path is one where the volume was staged or published, and which and how.
#[must_use]
pub fn known(record: Option<&Record>, path: &Path) -> Option<(Role, Access)> {
    let record = record?;
    let target =
        super::modes::at(&record.targets, path).map(|target| (Role::Target, target.access));
    let stage = record.stage.as_ref().filter(|stage| stage.path == path);
    target.or_else(|| stage.map(|stage| (Role::Staging, stage.access)))
}

fn name(device: &Device) -> String {
    shown(device.path.file_name().unwrap_or(device.path.as_os_str()).display())
}
