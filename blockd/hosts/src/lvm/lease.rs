//! The lease of a logical volume as sanlock has it on the disk.

use std::path::Path;

use crate::cell::HostNumber;

use super::report::Volume;

/// The resource of a logical volume as `sanlock direct` takes it; `None` where it has no lease.
pub(super) fn resource(group: &str, volume: &Volume, device: &Path) -> Option<String> {
    // "1.0.0:70254592": a version, and the place of the lease on the device.
    let (_, offset) = volume.lock_args.split_once(':')?;
    let offset: u64 = offset.parse().ok()?;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.+".contains(c);
    if !group.chars().all(is_plain) || !volume.uuid.chars().all(is_plain) {
        return None;
    }
    Some(format!("lvm_{group}:{}:{}:{offset}", volume.uuid, device.display()))
}

/// The host that has the lease, by `sanlock direct read_leader`; `None` where it is free.
pub(super) fn owner(text: &str) -> Option<HostNumber> {
    let field = |name: &str| {
        let mut lines = text.lines().map(str::split_whitespace);
        lines.find_map(|mut words| (words.next() == Some(name)).then(|| words.next()).flatten())
    };
    // A lease that was given back keeps its last owner, and has no time.
    let is_held = field("timestamp").is_some_and(|time| time != "0");
    let owner = field("owner_id")?.parse().ok()?;
    is_held.then_some(HostNumber(owner))
}
