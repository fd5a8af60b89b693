//! Groups of cells: storage that several hosts reach, and this host's membership in each (H1, H2,
//! H5 of `docs/HOSTS.md`). The calls about single cells are in `cells`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[cfg(test)]
use blockd_hosts::simulated::Member;
use blockd_hosts::{
    CellName, Coordinator, Fence, HostNumber, HostsError, Key, NoFence, Reservations, folder, lvm,
};
use blockd_media::error::{Error, shown};
use blockd_media::pool::boot_id;
use blockd_media::units::hex;
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};

use super::state_file::StateFile;
use super::{Control, blocking};
use crate::config::PoolConfig;

/// Why cells were dropped.
const FENCED: &str = "this host was fenced";

/// This host's membership in one group, as it is remembered.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Membership {
    name: String,
    /// Of a group that is a folder of this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    folder: Option<PathBuf>,
    host: u16,
    /// The devices that have this host's key.
    devices: Vec<PathBuf>,
    /// This host's key in this incarnation; empty before there is one.
    key: String,
    /// The key of this host's former incarnation, which disks may still have.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    former_key: String,
    /// The boot in which the key was drawn.
    boot: String,
    /// The key was registered with all devices: one that is not there now was removed by a fence.
    joined: bool,
    /// This incarnation may not use the group any more.
    lost: bool,
    /// Keys of other hosts that this host has removed.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    removed_keys: BTreeSet<String>,
    /// Cells that are being made: their devices hold nothing that is kept.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    making: BTreeSet<String>,
    /// Cells whose former host was fenced, and whose pools were not opened since.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    taking: BTreeSet<String>,
}

/// The service that keeps a group's leases.
pub(super) enum Backend {
    Lvm(lvm::Lvm),
    Folder(folder::Folder),
    #[cfg(test)]
    Simulated(Member),
}

/// A group that is known.
pub(super) struct Group {
    pub(super) name: String,
    backend: Backend,
    member: Mutex<Membership>,
    /// One call about its cells at a time.
    pub(super) calls: tokio::sync::Mutex<()>,
}

/// All of them, in a file of the state directory.
pub(super) struct Groups {
    file: StateFile,
    all: RwLock<BTreeMap<String, Arc<Group>>>,
    /// The file is written by one call at a time.
    writing: Mutex<()>,
}

impl Backend {
    fn of(name: &str, folder: Option<&Path>) -> Self {
        match folder {
            Some(path) => Self::Folder(folder::Folder::new(path.to_owned())),
            None => Self::Lvm(lvm::Lvm::new(name)),
        }
    }

    /// This host's number, and the devices that a fence has to cover.
    fn look(&self) -> Result<(HostNumber, Vec<PathBuf>), HostsError> {
        match self {
            Self::Lvm(group) => group.look().map(|found| (found.host, found.devices)),
            Self::Folder(group) => group.space().map(|_| (HostNumber(1), Vec::new())),
            #[cfg(test)]
            Self::Simulated(member) => Ok((member.host(), Vec::new())),
        }
    }

    fn coordinator(&self) -> &dyn Coordinator {
        match self {
            Self::Lvm(group) => group,
            Self::Folder(group) => group,
            #[cfg(test)]
            Self::Simulated(member) => member,
        }
    }

    fn fence(&self, devices: Vec<PathBuf>) -> Box<dyn Fence> {
        match self {
            Self::Lvm(_) => Box::new(Reservations::new(devices)),
            Self::Folder(_) => Box::new(NoFence),
            #[cfg(test)]
            Self::Simulated(member) => Box::new(member.clone()),
        }
    }

    const fn has_keys(&self) -> bool {
        !matches!(self, Self::Folder(_))
    }
}

impl Group {
    fn new(member: Membership, backend: Backend) -> Self {
        let name = member.name.clone();
        Self { name, backend, member: Mutex::new(member), calls: tokio::sync::Mutex::default() }
    }

    /// Leases and directory. Its calls block.
    pub(super) fn coordinator(&self) -> &dyn Coordinator {
        self.backend.coordinator()
    }

    /// The membership as it is now.
    pub(super) fn member(&self) -> Membership {
        self.member.lock().clone()
    }

    pub(super) fn folder(&self) -> Option<PathBuf> {
        self.member.lock().folder.clone()
    }

    pub(super) fn host(&self) -> HostNumber {
        HostNumber(self.member.lock().host)
    }

    /// Why this host may not use the group now, if so.
    pub(super) fn refusal(&self) -> Option<String> {
        let member = self.member.lock();
        if member.lost {
            return Some(format!(
                "this host was fenced from volume group {}, or has lost its membership: restart \
                 it, or remove the group (`blockd vg remove`) and add it again once none of its \
                 devices is left",
                shown(&self.name)
            ));
        }
        let is_known = !self.backend.has_keys() || (member.joined && member.boot == this_boot());
        (!is_known).then(|| {
            let name = shown(&self.name);
            format!("this host has not registered with volume group {name} since it started")
        })
    }

    fn key(&self) -> Option<Key> {
        Key::parse(&self.member.lock().key)
    }

    fn fence_of_all(&self) -> Box<dyn Fence> {
        self.backend.fence(self.member.lock().devices.clone())
    }

    /// Keeps another host off all devices (H3). Gives the key that this host was the one to remove,
    /// now or in an earlier call; `None` where another host was. Blocks.
    pub(super) fn fence(&self, host: HostNumber) -> Result<Option<Key>, Error> {
        let other = self.coordinator().key_of(host)?.ok_or_else(|| {
            let problem = "has published no key, and can't be fenced: switch it off, and wait \
                           until its lease has expired";
            Error::in_use(format!("host {host}"), problem)
        })?;
        let own = self.key().ok_or_else(|| Error::in_use("this host", "has no key"))?;
        let was_first = self.fence_of_all().fence(own, other)?;
        let is_ours = was_first || self.member.lock().removed_keys.contains(&other.to_string());
        Ok(is_ours.then_some(other))
    }

    /// Whether this host's key was removed from a device. Blocks.
    fn was_fenced(&self) -> Result<bool, HostsError> {
        let member = self.member();
        let Some(key) = Key::parse(&member.key).filter(|_| member.joined && !member.lost) else {
            return Ok(false);
        };
        Ok(!self.fence_of_all().is_member(key)?)
    }
}

impl Groups {
    pub(super) fn new(state_dir: &Path) -> Self {
        let advice = "correct it, or remove it and add the volume groups again once this host was \
                      restarted";
        let file = StateFile::new(state_dir, "groups.json").with_advice(advice);
        Self { file, all: RwLock::default(), writing: Mutex::default() }
    }

    fn read(&self) -> Result<(), Error> {
        let list: Vec<Membership> = self.file.read()?;
        let group = |member: Membership| {
            let backend = Backend::of(&member.name, member.folder.as_deref());
            (member.name.clone(), Arc::new(Group::new(member, backend)))
        };
        *self.all.write() = list.into_iter().map(group).collect();
        Ok(())
    }

    pub(super) fn all(&self) -> Vec<Arc<Group>> {
        self.all.read().values().cloned().collect()
    }

    pub(super) fn get(&self, name: &str) -> Option<Arc<Group>> {
        self.all.read().get(name).cloned()
    }

    /// The group and cell whose device this is.
    pub(super) fn cell_at(&self, path: &Path) -> Option<(Arc<Group>, CellName)> {
        let all = self.all.read();
        all.values().find_map(|group| Some((Arc::clone(group), group.coordinator().cell_at(path)?)))
    }

    /// Changes a membership, durably before it counts. Blocks.
    pub(super) fn change(
        &self,
        group: &Group,
        change: impl FnOnce(&mut Membership),
    ) -> Result<(), Error> {
        let _one = self.writing.lock();
        let mut member = group.member();
        change(&mut member);
        if member == group.member() {
            return Ok(());
        }
        let others = self.all().into_iter().filter(|one| one.name != group.name);
        let list: Vec<_> = others.map(|one| one.member()).chain([member.clone()]).collect();
        self.file.write(list)?;
        *group.member.lock() = member;
        Ok(())
    }

    fn forget(&self, name: &str) -> Result<(), Error> {
        let _one = self.writing.lock();
        let others = self.all().into_iter().filter(|one| one.name != name);
        self.file.write(others.map(|one| one.member()).collect::<Vec<_>>())?;
        self.all.write().remove(name);
        Ok(())
    }

    #[cfg(test)]
    pub(super) fn add_simulated(&self, name: &str, member: Member) {
        let record = Membership::new(name, None, member.host());
        let group = Group::new(record, Backend::Simulated(member));
        self.all.write().insert(name.to_owned(), Arc::new(group));
    }
}

impl Membership {
    fn new(name: &str, folder: Option<PathBuf>, host: HostNumber) -> Self {
        Self {
            name: name.to_owned(),
            folder,
            host: host.0,
            devices: Vec::new(),
            key: String::new(),
            former_key: String::new(),
            boot: String::new(),
            joined: false,
            lost: false,
            removed_keys: BTreeSet::new(),
            making: BTreeSet::new(),
            taking: BTreeSet::new(),
        }
    }

    /// Notes that this host has removed a key. Older ones of the same host are of no use any more.
    pub(super) fn note_removed(&mut self, key: Key) {
        let is_of_other =
            |one: &String| Key::parse(one).is_some_and(|one| one.host() != key.host());
        self.removed_keys.retain(is_of_other);
        self.removed_keys.insert(key.to_string());
    }

    /// Marks a cell as being made, or not any more.
    pub(super) fn set_making(&mut self, cell: &CellName, is: bool) {
        set(&mut self.making, cell, is);
    }

    pub(super) fn is_making(&self, cell: &CellName) -> bool {
        self.making.contains(cell.as_str())
    }

    /// Marks a cell as being taken from a host that was fenced, or not any more.
    pub(super) fn set_taking(&mut self, cell: &CellName, is: bool) {
        set(&mut self.taking, cell, is);
    }

    pub(super) fn is_taking(&self, cell: &CellName) -> bool {
        self.taking.contains(cell.as_str())
    }

    /// This host's key as it is shown.
    pub(super) fn key(&self) -> &str {
        &self.key
    }

    /// As after a boot of the host.
    #[cfg(test)]
    pub(super) fn forget_boot(&mut self) {
        self.boot = "an earlier one".to_owned();
    }

    /// This incarnation may not use the group any more.
    pub(super) fn lose(&mut self) {
        self.lost = true;
    }

    pub(super) const fn is_lost(&self) -> bool {
        self.lost
    }
}

fn set(names: &mut BTreeSet<String>, cell: &CellName, is: bool) {
    match is {
        true => names.insert(cell.to_string()),
        false => names.remove(cell.as_str()),
    };
}

fn this_boot() -> String {
    boot_id().map(|id| hex(&id)).unwrap_or_default()
}

impl Control {
    /// Reads which groups there are, before a pool is opened, and looks whether this host was
    /// fenced from one while the daemon was down (H5). Pools of cells that this host has not any
    /// more are forgotten.
    ///
    /// # Errors
    /// If the list can't be read: pools in its cells could be opened against the rules.
    pub async fn start_groups(&self) -> Result<(), Error> {
        let control = self.clone();
        blocking(move || control.0.groups.read()).await?;
        for group in self.0.groups.all() {
            self.look_at_membership(&group).await;
        }
        for config in self.remembered_pools()? {
            let device = &config.devices[0].path;
            let Some((group, cell)) = self.0.groups.cell_at(device) else { continue };
            if !device.exists() {
                let group = shown(&group.name);
                tracing::info!(pool = config.name, "cell {cell} of {group} is not held any more");
                self.forget_pool(&config.name).await?;
            }
        }
        Ok(())
    }

    /// A group by name.
    pub(super) fn group(&self, name: &str) -> Result<Arc<Group>, Error> {
        self.0.groups.get(name).ok_or_else(|| Error::not_found("volume group", name))
    }

    /// Refuses to open a pool in a cell of a group that this host may not use.
    pub(super) fn refuse_lost_cell(&self, config: &PoolConfig) -> Result<(), Error> {
        for device in &config.devices {
            let Some((group, cell)) = self.0.groups.cell_at(&device.path) else { continue };
            if let Some(refusal) = group.refusal() {
                return Err(Error::in_use(format!("cell {cell}:"), refusal));
            }
        }
        Ok(())
    }

    /// Registers this host with a group's devices, unless that was done since the host started
    /// (H1). Devices that the group has got since are registered with too.
    pub(super) async fn join_group(&self, group: &Arc<Group>) -> Result<(), Error> {
        if group.member().lost {
            return Err(Error::in_use("volume group:", group.refusal().unwrap_or_default()));
        }
        let (control, joining) = (self.clone(), Arc::clone(group));
        let joined = blocking(move || {
            let (host, devices) = joining.backend.look()?;
            if !joining.backend.has_keys() {
                return control.0.groups.change(&joining, |member| member.joined = true);
            }
            control.join_devices(&joining, host, devices)
        });
        let joined = joined.await;
        if group.member().lost {
            self.drop_cells(group, FENCED).await;
        }
        joined
    }

    fn join_devices(
        &self,
        group: &Group,
        host: HostNumber,
        devices: Vec<PathBuf>,
    ) -> Result<(), Error> {
        let (groups, member) = (&self.0.groups, group.member());
        let is_same = member.boot == this_boot() && member.host == host.0 && !member.key.is_empty();
        let key = match Key::parse(&member.key).filter(|_| is_same) {
            Some(key) => key,
            None => {
                let key = Key::new(host, fastrand::u32(..));
                let former = group.coordinator().key_of(host)?;
                groups.change(group, |member| {
                    member.former_key = former.map(|key| key.to_string()).unwrap_or_default();
                    (member.key, member.boot) = (key.to_string(), this_boot());
                    (member.host, member.joined, member.devices) = (host.0, false, Vec::new());
                })?;
                key
            }
        };
        // Not the devices that had the key before: it may have been removed by a fence.
        let member = group.member();
        let known = if member.joined { member.devices } else { Vec::new() };
        if group.was_fenced()? {
            groups.change(group, Membership::lose)?;
            return Err(HostsError::Fenced { group: format!("volume group {}", group.name) }.into());
        }
        let new: Vec<_> = devices.iter().filter(|one| !known.contains(one)).cloned().collect();
        if group.member().joined && new.is_empty() {
            return Ok(());
        }
        group.coordinator().publish_key(key)?;
        group.backend.fence(new).join(key, Key::parse(&group.member().former_key))?;
        groups.change(group, |member| (member.devices, member.joined) = (devices, true))
    }

    /// Makes a group known.
    pub(super) async fn add_group(&self, name: &str, folder: &str) -> Result<bool, Error> {
        let folder = checked_group(name, folder)?;
        if let Some(known) = self.0.groups.get(name) {
            if known.folder() != folder {
                let text = |path: Option<PathBuf>| {
                    path.map_or_else(|| "none".to_owned(), |path| path.display().to_string())
                };
                return Err(Error::Exists {
                    what: "volume group",
                    name: shown(name),
                    field: "folder".to_owned(),
                    existing: text(known.folder()),
                    asked: text(folder),
                });
            }
            self.join_group(&known).await?;
            return Ok(false);
        }
        let backend = Backend::of(name, folder.as_deref());
        let look = move || backend.look().map(|(host, _)| host).map_err(Error::from);
        let host = blocking(look).await?;
        let backend = Backend::of(name, folder.as_deref());
        let group = Arc::new(Group::new(Membership::new(name, folder, host), backend));
        self.0.groups.all.write().insert(name.to_owned(), Arc::clone(&group));
        if let Err(error) = self.join_group(&group).await {
            // The key may be registered with some devices already: it is removed from them.
            if self.leave_group(&group).await.is_err() {
                let control = self.clone();
                blocking(move || control.0.groups.forget(&group.name)).await?;
            }
            return Err(error);
        }
        Ok(true)
    }

    /// Removes this host's key from a group's devices, and forgets the group.
    pub(super) async fn leave_group(&self, group: &Arc<Group>) -> Result<(), Error> {
        let (control, group) = (self.clone(), Arc::clone(group));
        blocking(move || {
            if let Some(key) = group.key().filter(|_| !group.member().lost) {
                let devices = group.backend.look().map(|(_, devices)| devices);
                let devices = devices.unwrap_or_else(|_| group.member().devices);
                group.backend.fence(devices).leave(key)?;
            }
            control.0.groups.forget(&group.name)
        })
        .await
    }

    /// Looks whether this host was fenced from a group. A device that can't be asked is no fence.
    async fn look_at_membership(&self, group: &Arc<Group>) {
        let (control, looked_at) = (self.clone(), Arc::clone(group));
        let looked = blocking(move || {
            let was_fenced = looked_at.member().boot == this_boot() && looked_at.was_fenced()?;
            if was_fenced {
                control.0.groups.change(&looked_at, Membership::lose)?;
            }
            Ok(was_fenced)
        });
        match looked.await {
            Ok(false) => {}
            Ok(true) => {
                self.drop_cells(group, FENCED).await;
            }
            Err(error) => {
                tracing::warn!(group = group.name, %error, "can't see whether this host is fenced");
            }
        }
    }

    /// Looks at all memberships. To be called every few seconds: a host that has no IO does not
    /// meet its fence otherwise.
    pub async fn watch_groups(&self) {
        for group in self.0.groups.all() {
            if !group.member().lost {
                self.look_at_membership(&group).await;
            }
        }
    }
}

/// Checks the name of a group, and gives its folder.
fn checked_group(name: &str, folder: &str) -> Result<Option<PathBuf>, Error> {
    // Names of volume groups by lvm(8).
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"+_.-".contains(&byte);
    let is_name = (1..=63).contains(&name.len()) && name.bytes().all(is_plain);
    if !is_name || name.starts_with(['-', '.']) {
        let allowed = "1 to 63 letters, digits, '+', '_', '.' and '-', none of the last two first";
        return Err(Error::invalid("name", name, allowed));
    }
    if folder.is_empty() {
        return Ok(None);
    }
    let path = PathBuf::from(folder);
    if !path.is_absolute() || folder.contains('\0') {
        return Err(Error::invalid("folder", folder, "an absolute path"));
    }
    if !path.is_dir() {
        return Err(Error::not_found("folder", folder));
    }
    Ok(Some(path))
}
