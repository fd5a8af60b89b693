//! The lease of a logical volume as sanlock has it on the disk.

use std::path::Path;
use std::time::Duration;

use crate::cell::{HostNumber, Owner};

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

/// A number that `sanlock direct read_leader` gives.
fn field(text: &str, name: &str) -> Result<u64, String> {
    let mut lines = text.lines().map(str::split_whitespace);
    let found = lines.find_map(|mut words| {
        (words.next() == Some(name)).then(|| words.next().and_then(|word| word.parse().ok()))
    });
    found.flatten().ok_or_else(|| format!("sanlock does not give its {name}"))
}

/// Options of `sanlock direct init` with which a lease stays as large as it is. Without them its
/// size is that for the logical sectors of its device. lvmlockd goes by the physical ones, so that
/// a disk of 512e has leases for sectors of 4,096 bytes.
pub(super) fn sizes(text: &str) -> Result<&'static [&'static str], String> {
    // The combinations of sanlock(8).
    let sector = field(text, "sector_size")?;
    if sector == 512 {
        return Ok(&[]);
    }
    match (sector, field(text, "max_hosts")?) {
        (4096, 250) => Ok(&["-Z", "4096", "-A", "1M"]),
        (4096, 500) => Ok(&["-Z", "4096", "-A", "2M"]),
        (4096, 1000) => Ok(&["-Z", "4096", "-A", "4M"]),
        (4096, 2000) => Ok(&["-Z", "4096", "-A", "8M"]),
        (_, hosts) => Err(format!("it has sectors of {sector} bytes for {hosts} hosts")),
    }
}

/// The host that has the lease, by `sanlock direct read_leader`; `None` where it is free.
pub(super) fn owner(text: &str) -> Result<Option<Owner>, String> {
    let field = |name: &str| field(text, name);
    let (host, generation): (u64, u64) = (field("owner_id")?, field("owner_generation")?);
    let host = u16::try_from(host).map_err(|_| format!("{host} is no number of a host"))?;
    // A lease that was given back keeps its last owner, and has no time.
    let is_held = host != 0 && field("timestamp")? != 0;
    Ok(is_held.then_some(Owner { host: HostNumber(host), generation }))
}

/// This host's number in the leases of a group, by `sanlock client status`; `None` where it takes
/// no part in them.
pub(super) fn own_number(text: &str, group: &str) -> Option<HostNumber> {
    let wanted = format!("lvm_{group}:");
    let mut places = text.lines().filter_map(|line| line.trim().strip_prefix("s "));
    let place = places.find_map(|place| place.strip_prefix(&wanted))?;
    place.split(':').next()?.parse().ok().map(HostNumber)
}

/// Whether this host takes part in the leases of a group, by `sanlock client status`. While it
/// joins or leaves, sanlock ends the line with a word, and the answer is no.
pub(super) fn is_joined(text: &str, group: &str) -> bool {
    let wanted = format!("s lvm_{group}:");
    let mut lines = text.lines().map(str::trim).filter(|line| line.starts_with(&wanted));
    lines.any(|line| line.split_whitespace().count() == 2)
}

/// Whether sanlock keeps leases of a group for a lock manager that has died.
pub(super) fn has_orphans(text: &str, group: &str) -> bool {
    orphans(text, group).next().is_some()
}

/// The same of one lease: of a logical volume by its UUID.
pub(super) fn is_orphan(text: &str, group: &str, name: &str) -> bool {
    orphans(text, group).any(|one| one == name)
}

/// Whether this host has the lease of the logical volume with this device, by device-mapper's
/// identifier: `LVM-`, then the UUID of the group and that of the volume, without hyphens.
pub(super) fn is_here(text: &str, group: &str, device: &str) -> bool {
    let mut names = text.lines().map(str::trim).filter_map(|line| name_in(line, group));
    names.any(|name| device.ends_with(&name.replace('-', "")))
}

/// The same of a lease that is not shared, and not being taken or given back: sanlock ends the line
/// with a word then. Gives its resource, as `sanlock direct` takes it.
pub(super) fn alone<'a>(text: &'a str, group: &str, device: &str) -> Option<&'a str> {
    let mut lines = text.lines().map(str::trim).filter(|line| is_here(line, group, device));
    lines.find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (resource, version) = words.get(1)?.rsplit_once(':')?;
        (words.len() == 4 && version != "SH").then_some(resource)
    })
}

/// For how long no other host gets this host's leases of a group, by `sanlock client status -D`:
/// six times sanlock's limit of IO after the membership was renewed, which it is every two. Others
/// count a host as dead after eight times that limit and 60 s (`timeouts.c`). Zero where that is
/// not known.
pub(super) fn time_left(text: &str, group: &str) -> Duration {
    let wanted = format!("s lvm_{group}:");
    let mut lines = text.lines();
    let now = lines.clone().find_map(|line| state(line, "monotime"));
    let is_its = |line: &&str| line.starts_with(&wanted) && line.split_whitespace().count() == 2;
    if lines.find(is_its).is_none() {
        return Duration::ZERO;
    }
    let its: Vec<&str> = lines.take_while(|line| line.starts_with(' ')).collect();
    let field = |name: &str| its.iter().find_map(|line| state(line, name));
    let (Some(limit), Some(renewed)) = (field("io_timeout"), field("renewal_last_success")) else {
        return Duration::ZERO;
    };
    if ["space_dead", "killing_pids"].iter().any(|name| field(name).is_some_and(|is| is != 0)) {
        return Duration::ZERO;
    }
    let until = renewed.saturating_add(limit.saturating_mul(6));
    // It has never been renewed where the time is 0.
    let left = now.filter(|_| renewed > 0).map_or(0, |now| until.saturating_sub(now));
    Duration::from_secs(left)
}

/// A value of sanlock's state, as in "    io_timeout=10".
fn state(line: &str, name: &str) -> Option<u64> {
    line.trim().strip_prefix(name)?.strip_prefix('=')?.parse().ok()
}

fn orphans<'a>(text: &'a str, group: &str) -> impl Iterator<Item = &'a str> {
    let kept = text.lines().map(str::trim).filter(|line| line.ends_with(" ORPHAN"));
    kept.filter_map(move |line| name_in(line, group))
}

/// The name of the lease that a line of the status is about, if it is one of this group.
fn name_in<'a>(line: &'a str, group: &str) -> Option<&'a str> {
    line.strip_prefix("r lvm_")?.strip_prefix(group)?.strip_prefix(':')?.split(':').next()
}
