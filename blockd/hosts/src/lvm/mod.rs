//! Cells as logical volumes of a shared volume group: lvmlockd and sanlock have the leases, and LVM
//! the directory. Everything goes through LVM's own commands (lvmlockd(8), lvs(8)).

mod command;
mod lease;
mod report;

use std::path::{Path, PathBuf};

use crate::cell::{Cell, CellName, Holder, HostNumber};
use crate::coordinator::{Coordinator, Space};
use crate::error::HostsError;
use crate::fence::Key;

use command::{Commands, Refusal};
use report::{Group, Volume};

/// Goes before a cell's name in the name of its logical volume.
const PREFIX: &str = "cell-";
/// A tag of the volume group that names a host's key: `blockd.key.<host>.<key>`.
const KEY_TAG: &str = "blockd.key.";
/// Sanlock keeps leases in its own logical volume, which LVM makes with the group.
const LOCK_VOLUME: &str = "lvmlock";

/// A shared volume group.
#[derive(Debug)]
pub struct Lvm {
    name: String,
    commands: Commands,
}

/// A volume group as it was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// This host's number in it.
    pub host: HostNumber,
    /// Its physical volumes, all of which a fence has to cover.
    pub devices: Vec<PathBuf>,
}

impl Lvm {
    /// A group by name. Nothing is looked at.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), commands: Commands::default() }
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
        let fields = "vg_name,vg_size,vg_free,vg_extent_size,vg_lock_type,vg_tags,pv_name";
        let words = report::words(fields, &self.name);
        let text = self.commands.run("vgs", &words);
        let text = text.map_err(|refusal| self.group_error(refusal))?;
        report::group(&text).map_err(|problem| self.unreadable("vgs", problem))
    }

    fn volumes(&self) -> Result<Vec<Volume>, HostsError> {
        let fields = "lv_name,lv_uuid,lv_size,lv_active_locally,lv_path,lv_lockargs";
        let words = report::words(fields, &self.name);
        let text = self.commands.run("lvs", &words);
        let text = text.map_err(|refusal| self.group_error(refusal))?;
        report::volumes(&text).map_err(|problem| self.unreadable("lvs", problem))
    }

    fn volume(&self, name: &CellName) -> Result<Volume, HostsError> {
        let wanted = volume_name(name);
        let found = self.volumes()?.into_iter().find(|one| one.name == wanted);
        let (cell, group) = (name.clone(), self.name.clone());
        found.ok_or(HostsError::NotFound { cell, group })
    }

    /// This host's number, as sanlock has it.
    fn host(&self) -> Result<HostNumber, HostsError> {
        let words = ["--typeconfig", "full", "--valuesonly", "local/host_id"];
        let text = self.commands.run("lvmconfig", &words);
        let text = text.map_err(|refusal| self.group_error(refusal))?;
        let number = text.trim().parse().ok().filter(|number| (1..=2000).contains(number));
        let problem = "needs this host's number: set local/host_id in lvmlocal.conf, 1 to 2000";
        number.map(HostNumber).ok_or_else(|| self.unsuitable(problem.to_owned()))
    }

    fn path(&self, name: &CellName) -> String {
        format!("{}/{}", self.name, volume_name(name))
    }

    /// A cell with its holder, who is looked for on the disk where it is not this host.
    fn found(&self, name: CellName, volume: Volume) -> Cell {
        let holder = match volume.is_active {
            true => Holder::This,
            false => self.holder(&volume).map_or(Holder::NotThis, Holder::Other),
        };
        Cell { name, size: volume.size, path: volume.path, holder }
    }

    fn held(&self, volume: &Volume, name: &CellName) -> Cell {
        Cell {
            name: name.clone(),
            size: volume.size,
            path: volume.path.clone(),
            holder: Holder::This,
        }
    }

    /// The lease of a cell, as sanlock's commands take it.
    fn resource(&self, volume: &Volume) -> Option<String> {
        let device = Path::new("/dev/mapper").join(mapper_name(&self.name, LOCK_VOLUME));
        lease::resource(&self.name, volume, &device)
    }

    /// The host that has a cell which is not active here, by its lease on the disk.
    fn holder(&self, volume: &Volume) -> Option<HostNumber> {
        let resource = self.resource(volume)?;
        let text =
            self.commands.run("sanlock", &["direct", "read_leader", "-r", &resource]).ok()?;
        lease::owner(&text)
    }

    fn group_error(&self, refusal: Refusal) -> HostsError {
        refusal.into_error(&self.name, None)
    }

    fn cell_error(&self, refusal: Refusal, cell: &CellName) -> HostsError {
        match refusal.into_error(&self.name, Some(cell)) {
            HostsError::Held { cell, .. } => {
                let by = self.volume(&cell).ok().and_then(|volume| self.holder(&volume));
                HostsError::Held { cell, by }
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
        let group = self.group()?;
        let own = |tag: &&String| tag_key(tag).is_some_and(|one| one.host() == key.host());
        let tag = key_tag(key);
        let mut words = vec!["--yes".to_owned()];
        for former in group.tags.iter().filter(own).filter(|one| **one != tag) {
            words.extend(["--deltag".to_owned(), former.clone()]);
        }
        if !group.tags.contains(&tag) {
            words.extend(["--addtag".to_owned(), tag]);
        }
        if words.len() == 1 {
            return Ok(());
        }
        words.push(self.name.clone());
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        self.commands.run("vgchange", &words).map(drop).map_err(|refusal| self.group_error(refusal))
    }

    fn key_of(&self, host: HostNumber) -> Result<Option<Key>, HostsError> {
        Ok(keys(&self.group()?.tags).into_iter().find(|key| key.host() == host))
    }

    fn cell(&self, name: &CellName) -> Result<Option<Cell>, HostsError> {
        let wanted = volume_name(name);
        let found = self.volumes()?.into_iter().find(|volume| volume.name == wanted);
        Ok(found.map(|volume| self.found(name.clone(), volume)))
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
        let words = ["--yes", "-aey", "-Wy", "-L", &size, "-n", &volume, &self.name];
        self.commands.run("lvcreate", &words).map_err(|refusal| self.cell_error(refusal, name))?;
        Ok(self.held(&self.volume(name)?, name))
    }

    fn acquire(&self, name: &CellName) -> Result<Cell, HostsError> {
        let path = self.path(name);
        let taken = self.commands.run("lvchange", &["-aey", &path]);
        taken.map_err(|refusal| self.cell_error(refusal, name))?;
        Ok(self.held(&self.volume(name)?, name))
    }

    fn free(&self, name: &CellName, of: HostNumber) -> Result<(), HostsError> {
        let volume = self.volume(name)?;
        // The host that was fenced can't write the lease, and only one host has fenced it.
        let Some(resource) = self.resource(&volume).filter(|_| self.holder(&volume) == Some(of))
        else {
            return Ok(());
        };
        let freed = self.commands.run("sanlock", &["direct", "init", "-r", &resource]);
        freed.map(drop).map_err(|refusal| self.cell_error(refusal, name))
    }

    fn release(&self, name: &CellName) -> Result<(), HostsError> {
        let path = self.path(name);
        let released = self.commands.run("lvchange", &["-an", &path]);
        released.map(drop).map_err(|refusal| self.cell_error(refusal, name))
    }

    fn extend(&self, name: &CellName, bytes: u64) -> Result<u64, HostsError> {
        let volume = self.volume(name)?;
        if !volume.is_active {
            return Err(HostsError::NotHeld { cell: name.clone() });
        }
        if volume.size >= bytes {
            return Ok(volume.size);
        }
        let (size, path) = (format!("{bytes}b"), self.path(name));
        let words = ["--yes", "-L", &size, &path];
        self.commands.run("lvextend", &words).map_err(|refusal| self.cell_error(refusal, name))?;
        Ok(self.volume(name)?.size)
    }

    fn remove(&self, name: &CellName) -> Result<(), HostsError> {
        if !self.volume(name)?.is_active {
            return Err(HostsError::NotHeld { cell: name.clone() });
        }
        let path = self.path(name);
        let removed = self.commands.run("lvremove", &["--yes", &path]);
        removed.map(drop).map_err(|refusal| self.cell_error(refusal, name))
    }

    fn cut_off(&self) -> Result<(), HostsError> {
        // LVM takes locks, and there are none. Names of device-mapper are enough.
        let prefix = mapper_name(&self.name, PREFIX);
        let text = self.commands.run("dmsetup", &["ls"]);
        let text = text.map_err(|refusal| self.group_error(refusal))?;
        let names = text.lines().filter_map(|line| line.split_whitespace().next());
        for name in names.filter(|name| name.starts_with(&prefix)) {
            let words = ["wipe_table", "--force", "--noflush", "--nolockfs", name];
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

fn keys(tags: &[String]) -> Vec<Key> {
    tags.iter().filter_map(|tag| tag_key(tag)).collect()
}

/// The name of a logical volume in device-mapper, which doubles hyphens within both names.
fn mapper_name(group: &str, volume: &str) -> String {
    format!("{}-{}", group.replace('-', "--"), volume.replace('-', "--"))
}

#[cfg(test)]
mod tests;
