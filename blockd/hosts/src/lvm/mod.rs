//! Cells as logical volumes of a shared volume group: lvmlockd and sanlock have the leases, and LVM
//! the directory. Everything goes through LVM's own commands (lvmlockd(8), lvs(8)).

mod adopt;
mod command;
mod lease;
mod report;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::cell::{Cell, CellName, Holder, HostNumber, Owner};
use crate::coordinator::{Coordinator, Device, Published, Seen, Space};
use crate::error::HostsError;
use crate::fence::Key;

use command::{Commands, Refusal};
use report::{Group, Volume};

/// Goes before a cell's name in the name of its logical volume.
const PREFIX: &str = "cell-";
/// A tag of a cell's logical volume whose space may hold what a former one has left there, or what
/// is left of a pool that was being erased.
const NEW_TAG: &str = "blockd.new";
/// A tag of the volume group that names a host's key: `blockd.key.<host>.<key>`.
const KEY_TAG: &str = "blockd.key.";
/// A tag of the volume group with the address of a host's daemon: `blockd.at.<host>.<address>`.
const ADDRESS_TAG: &str = "blockd.at.";
/// A tag of the volume group with the number of a host's node: `blockd.node.<host>.<number>`.
const NODE_TAG: &str = "blockd.node.";
/// Most bytes of an address: a tag has at most 1,024 (lvm(8)), a host's name 253 (RFC 1035).
const MAX_ADDRESS: usize = 512;
/// Sanlock keeps leases in its own logical volume, which LVM makes with the group.
const LOCK_VOLUME: &str = "lvmlock";

/// The fields of a report of logical volumes.
const VOLUME_FIELDS: &str = "lv_name,lv_uuid,lv_size,lv_active_locally,lv_path,lv_lockargs,lv_tags";

/// A shared volume group.
#[derive(Debug)]
pub struct Lvm {
    name: String,
    commands: Commands,
    /// The membership was lost: the locks are not to be started again.
    is_cut_off: AtomicBool,
    /// Held while a lease is taken over, and while one is given back.
    adopting: Mutex<()>,
}

/// A volume group as it was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// This host's number in it.
    pub host: HostNumber,
    /// Its physical volumes, all of which a fence has to cover.
    pub devices: Vec<Device>,
}

impl Lvm {
    /// A group by name. Nothing is looked at.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self::with(name, Commands::default())
    }

    fn with(name: &str, commands: Commands) -> Self {
        let name = name.to_owned();
        Self { name, commands, is_cut_off: AtomicBool::new(false), adopting: Mutex::new(()) }
    }

    /// Looks at the group: it has to be shared, with its locks started.
    ///
    /// # Errors
    /// If it is not there, not shared, or this host has no number in it.
    pub fn look(&self) -> Result<Found, HostsError> {
        let group = self.group()?;
        if group.lock_type != "sanlock" {
            let found = if group.lock_type.is_empty() { "none" } else { &group.lock_type };
            let problem = format!(
                "has the lock type {found}: make it shared with `vgchange --locktype sanlock {}`",
                self.name
            );
            return Err(self.unsuitable(problem));
        }
        let host = self.host()?;
        Ok(Found { host, devices: group.devices })
    }

    fn group(&self) -> Result<Group, HostsError> {
        let fields = "vg_name,vg_size,vg_free,vg_extent_size,vg_lock_type,vg_tags,pv_name,pv_uuid";
        let words = report::words(fields, &self.name);
        let text = self.commands.run("vgs", &words);
        let text = text.map_err(|refusal| self.group_error(refusal))?;
        report::group(&text).map_err(|problem| self.unreadable("vgs", problem))
    }

    fn volumes(&self) -> Result<Vec<Volume>, HostsError> {
        let text = self.report(&report::words(VOLUME_FIELDS, &self.name));
        let text = text.map_err(|refusal| self.group_error(refusal))?;
        report::volumes(&text).map_err(|problem| self.unreadable("lvs", problem))
    }

    /// A cell's logical volume with the tags of its group: each command takes the group's lock, and
    /// a takeover waits for all of them.
    fn found_volume(&self, name: &CellName) -> Result<Option<Volume>, HostsError> {
        let wanted = volume_name(name);
        let (select, fields) = (format!("lv_name={wanted}"), format!("{VOLUME_FIELDS},vg_tags"));
        let words = [&["--select", &select], &report::words(&fields, &self.name)[..]].concat();
        let text = self.report(&words).map_err(|refusal| self.group_error(refusal))?;
        let volumes = report::volumes(&text).map_err(|problem| self.unreadable("lvs", problem))?;
        Ok(volumes.into_iter().find(|one| one.name == wanted))
    }

    fn volume(&self, name: &CellName) -> Result<Volume, HostsError> {
        let (cell, group) = (name.clone(), self.name.clone());
        self.found_volume(name)?.ok_or(HostsError::NotFound { cell, group })
    }

    fn seen(&self, name: &CellName, volume: Volume) -> Seen {
        Seen { keys: keys(&volume.group_tags), cell: self.found(name.clone(), volume) }
    }

    /// Has the group this tag in place of those that `own` finds.
    fn set_tag(&self, own: impl Fn(&str) -> bool, tag: Option<String>) -> Result<(), HostsError> {
        let group = self.group()?;
        let mut words = vec!["--yes".to_owned()];
        for former in group.tags.iter().filter(|one| own(one) && Some(*one) != tag.as_ref()) {
            words.extend(["--deltag".to_owned(), former.clone()]);
        }
        if let Some(tag) = tag.filter(|tag| !group.tags.contains(tag)) {
            words.extend(["--addtag".to_owned(), tag]);
        }
        if words.len() == 1 {
            return Ok(());
        }
        words.push(self.name.clone());
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        self.run("vgchange", &words).map(drop).map_err(|refusal| self.group_error(refusal))
    }

    /// This host's number: as sanlock has it, or before its locks are started as it will be.
    fn host(&self) -> Result<HostNumber, HostsError> {
        let status = self.commands.run("sanlock", &["client", "status"]).ok();
        if let Some(number) = status.and_then(|text| lease::own_number(&text, &self.name)) {
            return Ok(number);
        }
        let words = ["--typeconfig", "full", "local/host_id"];
        let text = self.commands.run("lvmconfig", &words);
        let text = text.map_err(|refusal| self.group_error(refusal))?;
        // "host_id=1": releases before 2.03.17 can't give the value alone.
        let number = text.rsplit('=').next().and_then(|value| value.trim().parse().ok());
        let number = number.filter(|number| (1..=2000).contains(number));
        let problem = "needs this host's number: set local/host_id in lvmlocal.conf, 1 to 2000";
        number.map(HostNumber).ok_or_else(|| self.unsuitable(problem.to_owned()))
    }

    /// Adds or removes the mark of a new cell, which this host has to have.
    fn change_mark(&self, name: &CellName, change: &str) -> Result<(), HostsError> {
        if !self.volume(name)?.is_active {
            return Err(HostsError::NotHeld { cell: name.clone() });
        }
        let changed = self.run_on(name, "lvchange", &[change, NEW_TAG, &self.path(name)]);
        changed.map(drop).map_err(|refusal| self.cell_error(refusal, name))
    }

    fn path(&self, name: &CellName) -> String {
        format!("{}/{}", self.name, volume_name(name))
    }

    /// A cell with its holder, who is looked for on the disk where it is not this host.
    fn found(&self, name: CellName, volume: Volume) -> Cell {
        let holder = match volume.is_active {
            true => Holder::This,
            false => match self.owner(&volume) {
                Ok(owner) => owner.map_or(Holder::Free, Holder::Other),
                Err(problem) => Holder::Unknown(problem),
            },
        };
        let is_new = volume.tags.iter().any(|tag| tag == NEW_TAG);
        Cell { name, size: volume.size, path: volume.path, holder, is_new }
    }

    /// The lease of a cell, as sanlock's commands take it.
    fn resource(&self, volume: &Volume) -> Result<String, String> {
        let device = Path::new("/dev/mapper").join(mapper_name(&self.name, LOCK_VOLUME));
        let resource = lease::resource(&self.name, volume, &device);
        resource.ok_or_else(|| format!("LVM gives no place of it, but {:?}", volume.lock_args))
    }

    /// The host that has a cell which is not active here, by its lease on the disk.
    fn owner(&self, volume: &Volume) -> Result<Option<Owner>, String> {
        lease::owner(&self.leader(volume)?)
    }

    /// The lease of a cell as it is on the disk.
    fn leader(&self, volume: &Volume) -> Result<String, String> {
        let resource = self.resource(volume)?;
        let text = self.commands.run("sanlock", &["direct", "read_leader", "-r", &resource]);
        text.map_err(|refusal| self.group_error(refusal).to_string())
    }

    /// Device-mapper's names of the group's logical volumes that are active, but that of the locks.
    fn mapped(&self) -> Result<Vec<String>, HostsError> {
        let text = self.commands.run("dmsetup", &["ls"]);
        let text = text.map_err(|refusal| self.group_error(refusal))?;
        let names = text.lines().filter_map(|line| line.split_whitespace().next());
        let prefix = mapper_name(&self.name, "");
        let is_ours = |name: &&str| {
            // Another group's name may go on here, with two hyphens.
            let volume = name.strip_prefix(&prefix).filter(|volume| !volume.starts_with('-'));
            volume.is_some_and(|volume| volume != LOCK_VOLUME)
        };
        Ok(names.filter(is_ours).map(str::to_owned).collect())
    }

    /// Device-mapper's name of a cell's device.
    fn device_name(&self, cell: &CellName) -> String {
        mapper_name(&self.name, &volume_name(cell))
    }

    fn group_error(&self, refusal: Refusal) -> HostsError {
        refusal.into_error(&self.name, None)
    }

    fn cell_error(&self, refusal: Refusal, cell: &CellName) -> HostsError {
        match refusal.into_error(&self.name, Some(cell)) {
            HostsError::Held { cell, .. } => {
                let volume = self.volume(&cell).ok();
                let owner = volume.and_then(|volume| self.owner(&volume).ok().flatten());
                HostsError::Held { cell, by: owner.map(|owner| owner.host) }
            }
            other => other,
        }
    }

    fn unsuitable(&self, problem: String) -> HostsError {
        HostsError::Unsuitable { group: format!("volume group {}", self.name), problem }
    }

    fn unreadable(&self, command: &str, problem: String) -> HostsError {
        HostsError::Command { command: format!("{command} {}", self.name), problem }
    }
}

impl Coordinator for Lvm {
    fn cells(&self) -> Result<Vec<Cell>, HostsError> {
        let volumes = self.volumes()?.into_iter();
        let mut cells: Vec<_> = volumes
            .filter_map(|volume| Some(self.found(cell_name(&volume.name)?, volume)))
            .collect();
        cells.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(cells)
    }

    fn cell_at(&self, path: &Path) -> Option<CellName> {
        let volume = path.strip_prefix("/dev").ok()?.strip_prefix(&self.name).ok()?;
        cell_name(volume.to_str()?)
    }

    fn publish_key(&self, key: Key) -> Result<(), HostsError> {
        let own = |tag: &str| tag_key(tag).is_some_and(|one| one.host() == key.host());
        self.set_tag(own, Some(key_tag(key)))
    }

    fn keys(&self) -> Result<Vec<Key>, HostsError> {
        Ok(keys(&self.group()?.tags))
    }

    fn publish_address(&self, host: HostNumber, address: &str) -> Result<(), HostsError> {
        let wanted = (!address.is_empty()).then(|| address_tag(host, address)).transpose();
        let wanted = wanted.map_err(|problem| self.unsuitable(problem))?;
        self.set_tag(|tag| tag_address(tag, host).is_some(), wanted)
    }

    fn address_of(&self, host: HostNumber) -> Result<Option<String>, HostsError> {
        Ok(self.group()?.tags.iter().find_map(|tag| tag_address(tag, host)))
    }

    fn publish_node(&self, host: HostNumber, node: u32) -> Result<(), HostsError> {
        let own = |tag: &str| tag_node(tag).is_some_and(|(of, _)| of == host);
        self.set_tag(own, Some(format!("{NODE_TAG}{host}.{node:08x}")))
    }

    fn nodes(&self) -> Result<Vec<(HostNumber, u32)>, HostsError> {
        Ok(self.published()?.nodes)
    }

    fn published(&self) -> Result<Published, HostsError> {
        let tags = self.group()?.tags;
        let nodes = tags.iter().filter_map(|tag| tag_node(tag)).collect();
        Ok(Published { keys: keys(&tags), nodes })
    }

    fn forget_host(&self, host: HostNumber, key: Option<Key>) -> Result<(), HostsError> {
        let group = self.group()?;
        let key_in = |group: &Group| keys(&group.tags).into_iter().find(|key| key.host() == host);
        if key_in(&group) != key {
            return Err(HostsError::CameBack { host });
        }
        let is_its = |tag: &&String| {
            tag_key(tag).is_some_and(|one| Some(one) == key)
                || tag_address(tag, host).is_some()
                || tag_node(tag).is_some_and(|(of, _)| of == host)
        };
        let tags: Vec<&String> = group.tags.iter().filter(is_its).collect();
        if tags.is_empty() {
            return Ok(());
        }
        let mut words = vec!["--yes"];
        tags.iter().for_each(|tag| words.extend(["--deltag", tag.as_str()]));
        words.push(&self.name);
        let removed = self.run("vgchange", &words);
        removed.map_err(|refusal| self.group_error(refusal))?;
        let after = key_in(&self.group()?);
        if after.is_none() || after == key {
            return Ok(());
        }
        // It has written its new key since they were read. The rest may be the same as before.
        for tag in tags.into_iter().filter(|tag| tag_key(tag).is_none()) {
            self.set_tag(|_| false, Some(tag.clone()))?;
        }
        Err(HostsError::CameBack { host })
    }

    fn cell(&self, name: &CellName) -> Result<Option<Cell>, HostsError> {
        Ok(self.look_at(name)?.map(|seen| seen.cell))
    }

    fn look_at(&self, name: &CellName) -> Result<Option<Seen>, HostsError> {
        Ok(self.found_volume(name)?.map(|volume| self.seen(name, volume)))
    }

    fn confirm(&self, name: &CellName) -> Result<Duration, HostsError> {
        self.confirm_lease(name)
    }

    fn space(&self) -> Result<Space, HostsError> {
        let group = self.group()?;
        Ok(Space { total: group.size, free: group.free })
    }

    fn create(&self, name: &CellName, bytes: u64) -> Result<Cell, HostsError> {
        let group = self.group()?;
        let needed = bytes.next_multiple_of(group.extent_size.max(1));
        if needed > group.free {
            return Err(HostsError::NoSpace { group: self.name.clone(), needed, free: group.free });
        }
        let (size, volume) = (format!("{needed}b"), volume_name(name));
        let words =
            ["--yes", "-aey", "-Wy", "--addtag", NEW_TAG, "-L", &size, "-n", &volume, &self.name];
        self.run("lvcreate", &words).map_err(|refusal| self.cell_error(refusal, name))?;
        Ok(self.found(name.clone(), self.volume(name)?))
    }

    fn finish(&self, name: &CellName) -> Result<(), HostsError> {
        self.change_mark(name, "--deltag")
    }

    fn mark_new(&self, name: &CellName) -> Result<(), HostsError> {
        self.change_mark(name, "--addtag")
    }

    fn acquire(&self, name: &CellName) -> Result<Cell, HostsError> {
        Ok(self.acquire_and_look(name)?.cell)
    }

    fn acquire_and_look(&self, name: &CellName) -> Result<Seen, HostsError> {
        // Of a device that is there already, LVM does not read the table anew.
        self.confirm_lease(name)?;
        let path = self.path(name);
        let taken = self.run_on(name, "lvchange", &["-aey", &path]);
        taken.map_err(|refusal| self.cell_error(refusal, name))?;
        Ok(self.seen(name, self.volume(name)?))
    }

    fn free(&self, name: &CellName, of: Owner) -> Result<(), HostsError> {
        let volume = self.volume(name)?;
        let not_known = |problem| HostsError::NotKnown { cell: name.clone(), problem };
        let resource = self.resource(&volume).map_err(not_known)?;
        // The host that was fenced can't write the lease, and only one host has fenced it.
        let leader = self.leader(&volume).map_err(not_known)?;
        if lease::owner(&leader).map_err(not_known)? != Some(of) {
            return Ok(());
        }
        let sizes = lease::sizes(&leader).map_err(not_known)?;
        let words = [&["direct", "init"], sizes, &["-r", &resource]].concat();
        let freed = self.commands.run("sanlock", &words);
        freed.map(drop).map_err(|refusal| self.cell_error(refusal, name))
    }

    fn release(&self, name: &CellName) -> Result<(), HostsError> {
        self.deactivate(name)
    }

    fn extend(&self, name: &CellName, bytes: u64) -> Result<u64, HostsError> {
        let volume = self.volume(name)?;
        if !volume.is_active {
            return Err(HostsError::NotHeld { cell: name.clone() });
        }
        if volume.size >= bytes {
            return Ok(volume.size);
        }
        // LVM refuses a size that is not of whole sectors, and a pool is low at any number of
        // bytes. What is free is of whole extents, so there is room for the rounded size too.
        let wanted = bytes.next_multiple_of(self.group()?.extent_size.max(1));
        let (size, path) = (format!("{wanted}b"), self.path(name));
        let words = ["--yes", "-L", &size, &path];
        self.run_on(name, "lvextend", &words).map_err(|refusal| self.cell_error(refusal, name))?;
        Ok(self.volume(name)?.size)
    }

    fn remove(&self, name: &CellName) -> Result<(), HostsError> {
        if !self.volume(name)?.is_active {
            return Err(HostsError::NotHeld { cell: name.clone() });
        }
        let path = self.path(name);
        let removed = self.run_on(name, "lvremove", &["--yes", &path]);
        removed.map(drop).map_err(|refusal| self.cell_error(refusal, name))
    }

    fn is_in_use(&self) -> Result<bool, HostsError> {
        let status = self.commands.run("sanlock", &["client", "status"]);
        let has_locks = status.is_ok_and(|text| lease::own_number(&text, &self.name).is_some());
        Ok(has_locks || !self.mapped()?.is_empty())
    }

    fn cut_off(&self) -> Result<(), HostsError> {
        self.is_cut_off.store(true, Ordering::Release);
        // LVM takes locks, and there are none. All of the group's devices: the other hosts may take
        // any of its logical volumes afterwards.
        for name in self.mapped()? {
            let words = ["wipe_table", "--force", "--noflush", "--nolockfs", &name];
            self.commands.run("dmsetup", &words).map_err(|refusal| self.group_error(refusal))?;
        }
        let dropped = self.commands.run("lvmlockctl", &["--drop", &self.name]);
        dropped.map(drop).map_err(|refusal| self.group_error(refusal))
    }
}

fn volume_name(cell: &CellName) -> String {
    format!("{PREFIX}{cell}")
}

fn cell_name(volume: &str) -> Option<CellName> {
    CellName::parse(volume.strip_prefix(PREFIX)?)
}

fn key_tag(key: Key) -> String {
    format!("{KEY_TAG}{}.{key}", key.host())
}

fn tag_key(tag: &str) -> Option<Key> {
    let (host, key) = tag.strip_prefix(KEY_TAG)?.split_once('.')?;
    Key::parse(key).filter(|key| key.host().to_string() == host)
}

/// The tag of a host's address. Tags have no brackets (lvm(8)): those of IPv6 become `_`.
fn address_tag(host: HostNumber, address: &str) -> Result<String, String> {
    let text = address.replace(['[', ']'], "_");
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-:".contains(&byte);
    if text.len() > MAX_ADDRESS || !text.bytes().all(is_plain) {
        return Err(format!("has no room for the address {address}: must be HOST:PORT"));
    }
    Ok(format!("{ADDRESS_TAG}{host}.{text}"))
}

fn tag_address(tag: &str, host: HostNumber) -> Option<String> {
    let text = tag.strip_prefix(ADDRESS_TAG)?.strip_prefix(&format!("{host}."))?;
    Some(match text.strip_prefix('_').and_then(|rest| rest.split_once('_')) {
        Some((ip, port)) => format!("[{ip}]{port}"),
        None => text.to_owned(),
    })
}

fn tag_node(tag: &str) -> Option<(HostNumber, u32)> {
    let (host, node) = tag.strip_prefix(NODE_TAG)?.split_once('.')?;
    Some((HostNumber(host.parse().ok()?), u32::from_str_radix(node, 16).ok()?))
}

fn keys(tags: &[String]) -> Vec<Key> {
    tags.iter().filter_map(|tag| tag_key(tag)).collect()
}

/// The name of a logical volume in device-mapper, which doubles hyphens within both names.
fn mapper_name(group: &str, volume: &str) -> String {
    format!("{}-{}", group.replace('-', "--"), volume.replace('-', "--"))
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_of_adopt;
