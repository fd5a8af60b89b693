//! Groups of cells: storage that several hosts reach, and this host's membership in each (H1, H2,
//! H5 of `docs/HOSTS.md`). The calls about single cells are in `cells`.

mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockd_api::v1;
#[cfg(test)]
use blockd_hosts::simulated::Member;
use blockd_hosts::{
    CellName, Coordinator, Device, Fence, HostNumber, HostsError, Key, Reservations, folder, lvm,
};
use blockd_mapper::claim::Claimant;
use blockd_media::clock::boot_ns;
use blockd_media::error::{Error, shown};
use blockd_media::pool::boot_id;
use blockd_media::units::hex;
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};

use super::dead_record::DeadHosts;
use super::group_checks::{checked_group, checked_host, refuse_other_folder, refuse_other_host};
use super::state_file::StateFile;
use super::{Control, blocking};
use crate::config::PoolConfig;
use crate::node::NodeId;

/// Why cells were dropped.
const FENCED: &str = "this host was fenced";

/// This host's membership in one group, as it is remembered. The fields from `boot` on are of one
/// incarnation: the boot.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Membership {
    name: String,
    /// Of a group that is a folder of this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    folder: Option<PathBuf>,
    /// Keys of former incarnations, which devices may still have; the last ones.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    former_keys: Vec<String>,
    /// Other hosts that were declared dead here.
    #[serde(default, skip_serializing_if = "DeadHosts::is_empty")]
    dead: DeadHosts,
    /// Cells whose former host was fenced, with the key by which it was, and whose pools were not
    /// opened since. A boot in between changes nothing about that.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) taking: BTreeMap<String, String>,
    /// Cells among these whose lease no host had when it was taken: another host may have had the
    /// cell since.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(super) taken_free: BTreeSet<String>,
    boot: String,
    host: u16,
    /// This host's key; empty before there is one.
    key: String,
    /// The devices that have the key: one that has not was used for a fence.
    devices: Vec<MemberDevice>,
    /// Other hosts find the key in the directory.
    is_published: bool,
    /// And the address of this host's daemon; empty where there is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    address: String,
    /// And the number of its node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    node: Option<u32>,
    /// This incarnation may not use the group any more.
    lost: bool,
    /// Keys of other hosts that this host has removed.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    removed_keys: BTreeSet<String>,
}

/// A device by its identity, with the name that it had.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct MemberDevice {
    id: String,
    path: PathBuf,
}

/// Former keys that are kept: a boot that ends before the key is registered adds one.
const MAX_FORMER_KEYS: usize = 8;

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
    /// Whether the daemon has looked since its start if this host is fenced.
    is_checked: AtomicBool,
    /// Whether it is looking: a device may not answer for minutes.
    is_looked_at: AtomicBool,
    /// The host joins or leaves once at a time.
    pub(super) joining: tokio::sync::Mutex<()>,
}

/// All of them, in a file of the state directory.
pub(super) struct Groups {
    file: StateFile,
    all: RwLock<BTreeMap<String, Arc<Group>>>,
    /// The file is written by one call at a time.
    writing: Mutex<()>,
    /// A group is added once at a time.
    adding: tokio::sync::Mutex<()>,
}

impl Backend {
    fn of(name: &str, folder: Option<&Path>, host: u16) -> Self {
        match folder {
            Some(path) => Self::Folder(folder::Folder::new(path.to_owned(), HostNumber(host))),
            None => Self::Lvm(lvm::Lvm::new(name)),
        }
    }

    /// This host's number, and the devices that a fence has to cover. `is_known`: this host has
    /// used the group before.
    fn look(&self, is_known: bool) -> Result<(HostNumber, Vec<Device>), HostsError> {
        match self {
            Self::Lvm(group) => group.look().map(|found| (found.host, found.devices)),
            Self::Folder(group) => {
                group.enter(fastrand::u32(..), is_known)?;
                group.space().map(|_| (group.host(), Vec::new()))
            }
            #[cfg(test)]
            Self::Simulated(member) => Ok((member.host(), member.devices())),
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
            Self::Folder(group) => Box::new(group.clone()),
            #[cfg(test)]
            Self::Simulated(member) => Box::new(member.clone()),
        }
    }

    /// Whether a host has ended, where that can be seen without its daemon.
    fn has_ended(&self, host: HostNumber) -> Result<Option<bool>, HostsError> {
        let Self::Folder(group) = self else { return Ok(None) };
        Ok(group.is_running(host)?.map(|is_running| !is_running))
    }

    /// Whether disks have keys. The leases of a folder are ended by any host then, and not by the
    /// one that was the first to fence.
    const fn has_keys(&self) -> bool {
        !matches!(self, Self::Folder(_))
    }
}

impl Group {
    fn new(member: Membership, backend: Backend) -> Self {
        Self {
            name: member.name.clone(),
            backend,
            member: Mutex::new(member),
            is_checked: AtomicBool::new(false),
            is_looked_at: AtomicBool::new(false),
            joining: tokio::sync::Mutex::default(),
        }
    }

    /// As before the first look at its devices.
    #[cfg(test)]
    pub(super) fn forget_look(&self) {
        self.is_checked.store(false, Ordering::Release);
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

    /// This incarnation may not use the group any more, which could not be remembered.
    fn lose_for_now(&self) {
        self.member.lock().lose();
    }

    /// Whether disks have keys of hosts, and leases are ended by the host that was first to fence.
    pub(super) const fn has_keys(&self) -> bool {
        self.backend.has_keys()
    }

    /// Whether this incarnation may not use the group any more.
    pub(super) fn is_lost(&self) -> bool {
        let member = self.member.lock();
        member.lost && member.is_of_this_boot()
    }

    /// Why this host may not use the group now, if so.
    pub(super) fn refusal(&self) -> Option<String> {
        let name = shown(&self.name);
        if self.is_lost() {
            return Some(format!(
                "this host was fenced from volume group {name}, or has lost its membership: \
                 restart it, or stop the group's locks, remove it (`blockd vg remove`) and add it \
                 again"
            ));
        }
        if matches!(self.backend, Backend::Folder(_)) {
            return (!self.is_entered()).then(|| {
                format!(
                    "this daemon's number is not taken in volume group {name}: its file system is \
                     not mounted, or another daemon has the number; mount it, or stop that one"
                )
            });
        }
        let member = self.member.lock();
        if !member.is_registered() {
            return Some(format!("this host has not registered with volume group {name}"));
        }
        if !self.is_checked.load(Ordering::Acquire) {
            return Some(format!("the disks of volume group {name} have not answered yet"));
        }
        (!member.is_published).then(|| {
            format!(
                "this host has registered with volume group {name}, and is not known there yet: \
                 start its locks (`vgchange --lockstart {name}`), it is known some seconds later"
            )
        })
    }

    /// Whether this daemon has its number in a group that is a folder: not before the folder's file
    /// system is mounted.
    fn is_entered(&self) -> bool {
        match &self.backend {
            Backend::Folder(folder) => folder.is_entered(),
            _ => true,
        }
    }

    /// Keeps another host off all devices, in the incarnation that has this key (H3). Blocks.
    pub(super) fn fence(&self, key: Key) -> Result<Fenced, Error> {
        let (host, member) = (key.host(), self.member());
        let own = Key::parse(&member.key).filter(|own| own.host() != host);
        let own = own.ok_or_else(|| Error::in_use(format!("host {host}"), "is this one"))?;
        let fence = self.backend.fence(paths_of(&member.devices));
        let was_first = fence.fence(own, key)?;
        let is_ours = was_first || member.has_removed(key) || !self.backend.has_keys();
        Ok(Fenced { key, was_first, is_ours })
    }

    /// Whether a host has ended, where that can be seen without its daemon. Blocks.
    pub(super) fn has_ended(&self, host: HostNumber) -> Result<Option<bool>, Error> {
        Ok(self.backend.has_ended(host)?)
    }

    /// The key by which a host is known.
    pub(super) fn key_of(&self, host: HostNumber) -> Result<Key, Error> {
        let keys = self.coordinator().keys()?;
        keys.into_iter().find(|key| key.host() == host).ok_or_else(|| {
            let problem = "has published no key, and can't be fenced: switch it off, and wait \
                           until its lease has expired";
            Error::in_use(format!("host {host}"), problem)
        })
    }

    /// Whether this host's key was removed from a device that the group still has. Blocks.
    fn was_fenced(&self, present: Option<&[Device]>) -> Result<bool, HostsError> {
        let member = self.member();
        let Some(key) = Key::parse(&member.key).filter(|_| member.is_registered()) else {
            return Ok(false);
        };
        let devices = match present {
            None => paths_of(&member.devices),
            Some(present) => {
                let is_known =
                    |one: &&Device| member.devices.iter().any(|other| other.id == one.id);
                present.iter().filter(is_known).map(|one| one.path.clone()).collect()
            }
        };
        Ok(!self.backend.fence(devices).is_member(key)?)
    }
}

/// How far this host has come in joining a group.
enum Joined {
    Fully,
    /// Registered with all devices. The key is published once the group's locks are started, which
    /// need the registration.
    AwaitsLocks(HostsError),
}

impl Joined {
    fn note(self, group: &str) {
        if let Self::AwaitsLocks(error) = self {
            tracing::info!(group, %error, "registered; the group's locks are awaited");
        }
    }
}

/// The end of a fence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fenced {
    /// The key that no device has any more.
    pub(super) key: Key,
    /// This call has removed it.
    pub(super) was_first: bool,
    /// This host has, now or in an earlier call.
    pub(super) is_ours: bool,
}

fn paths_of(devices: &[MemberDevice]) -> Vec<PathBuf> {
    devices.iter().map(|device| device.path.clone()).collect()
}

fn text(key: Key) -> String {
    key.to_string()
}

impl Groups {
    pub(super) fn new(state_dir: &Path) -> Self {
        let advice = "correct it, or remove it and add the volume groups again once this host was \
                      restarted";
        let file = StateFile::new(state_dir, "groups.json").with_advice(advice);
        let (all, writing) = (RwLock::default(), Mutex::default());
        Self { file, all, writing, adding: tokio::sync::Mutex::default() }
    }

    fn read(&self) -> Result<(), Error> {
        let list: Vec<Membership> = self.file.read()?;
        let group = |member: Membership| {
            let backend = Backend::of(&member.name, member.folder.as_deref(), member.host);
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
        if !self.get(&group.name).is_some_and(|known| std::ptr::eq(&raw const *known, group)) {
            let problem = "was removed meanwhile";
            return Err(Error::in_use(format!("volume group {}", shown(&group.name)), problem));
        }
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

    /// Notes that this incarnation may not use the group any more. That counts at once, also where
    /// it can't be remembered: the next start sees it by the devices. Blocks.
    pub(super) fn lose(&self, group: &Group) -> Result<(), Error> {
        let noted = self.change(group, Membership::lose);
        if noted.is_err() {
            group.lose_for_now();
        }
        noted
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
        let record = Membership::new(name, None);
        self.add(Arc::new(Group::new(record, Backend::Simulated(member))));
    }

    /// Lets go of all groups, as a process does that ends.
    #[cfg(test)]
    pub(super) fn let_go(&self) {
        self.all.write().clear();
    }

    #[cfg(test)]
    pub(super) fn add(&self, group: Arc<Group>) {
        self.all.write().insert(group.name.clone(), group);
    }
}

impl Membership {
    fn new(name: &str, folder: Option<PathBuf>) -> Self {
        Self {
            name: name.to_owned(),
            folder,
            former_keys: Vec::new(),
            dead: DeadHosts::default(),
            taking: BTreeMap::new(),
            taken_free: BTreeSet::new(),
            boot: String::new(),
            host: 0,
            key: String::new(),
            devices: Vec::new(),
            is_published: false,
            address: String::new(),
            node: None,
            lost: false,
            removed_keys: BTreeSet::new(),
        }
    }

    /// Hosts that were declared dead here.
    pub(super) const fn dead(&self) -> &DeadHosts {
        &self.dead
    }

    pub(super) const fn dead_mut(&mut self) -> &mut DeadHosts {
        &mut self.dead
    }

    /// Forgets all that is remembered of another host.
    pub(super) fn forget_host(&mut self, host: HostNumber) {
        self.dead.remove(host);
        self.removed_keys.retain(|one| Key::parse(one).is_some_and(|one| one.host() != host));
    }

    fn is_of_this_boot(&self) -> bool {
        self.boot == this_boot()
    }

    fn is_registered(&self) -> bool {
        self.is_of_this_boot() && !self.devices.is_empty()
    }

    /// Begins another incarnation, with a key of its own.
    fn begin(&mut self, host: HostNumber, key: String, published: Option<Key>) {
        let former = std::mem::replace(&mut self.key, key);
        for one in [former].into_iter().chain(published.map(text)) {
            if !one.is_empty() && !self.former_keys.contains(&one) {
                self.former_keys.push(one);
            }
        }
        let surplus = self.former_keys.len().saturating_sub(MAX_FORMER_KEYS);
        self.former_keys.drain(..surplus);
        (self.boot, self.host) = (this_boot(), host.0);
        (self.is_published, self.lost) = (false, false);
        // Another host may have forgotten this one.
        self.address.clear();
        self.node = None;
        self.devices.clear();
    }

    /// Notes that this host has removed a key. Older ones of the same host are of no use any more.
    pub(super) fn note_removed(&mut self, key: Key) {
        let is_of_other =
            |one: &String| Key::parse(one).is_some_and(|one| one.host() != key.host());
        self.removed_keys.retain(is_of_other);
        self.removed_keys.insert(text(key));
    }

    pub(super) fn has_removed(&self, key: Key) -> bool {
        self.removed_keys.contains(&text(key))
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
    fn lose(&mut self) {
        (self.boot, self.lost) = (this_boot(), true);
    }
}

fn this_boot() -> String {
    boot_id().map(|id| hex(&id)).unwrap_or_default()
}

impl Control {
    /// A group by name.
    pub(super) fn group(&self, name: &str) -> Result<Arc<Group>, Error> {
        self.0.groups.get(name).ok_or_else(|| Error::not_found("volume group", name))
    }

    /// Refuses to open a pool in a cell of a group that this host may not use, or whose lease it
    /// does not have. Gives until when the lease counts that a pool with one device is opened
    /// under: none does in a takeover, whose fence may have ended the lease of a third host, and
    /// none where disks have no keys.
    pub(super) async fn confirm_cell(&self, config: &PoolConfig) -> Result<u64, Error> {
        let mut until_ns = 0;
        for device in &config.devices {
            let Some((group, cell)) = self.0.groups.cell_at(&device.path) else { continue };
            if let Some(refusal) = group.refusal() {
                return Err(Error::in_use(format!("cell {cell}:"), refusal));
            }
            let (has_keys, asked_ns) = (group.has_keys(), boot_ns());
            let (asked, name) = (Arc::clone(&group), cell.clone());
            let left = blocking(move || Ok(asked.coordinator().confirm(&name)?)).await?;
            // Noted before its lease is taken, so looked for after that was seen.
            let counts = group.member().taking(&cell).is_none() && config.devices.len() == 1;
            let left_ns = u64::try_from(left.as_nanos()).unwrap_or(0);
            until_ns = match (has_keys, counts) {
                (false, _) => 0,
                (true, true) if left_ns > 0 => asked_ns.saturating_add(left_ns),
                (true, _) => Claimant::UNLEASED,
            };
        }
        Ok(until_ns)
    }

    /// Registers this host with a group's devices, and says so to the other hosts, unless that was
    /// done since the host started (H1). Devices that the group has got since are registered with
    /// too. Registering needs no locks of the group, whose lock manager needs to be registered.
    pub(super) async fn join_group(&self, group: &Arc<Group>) -> Result<(), Error> {
        match self.register_with(group).await? {
            Joined::Fully => Ok(()),
            Joined::AwaitsLocks(error) => Err(error.into()),
        }
    }

    async fn register_with(&self, group: &Arc<Group>) -> Result<Joined, Error> {
        let _one = group.joining.lock().await;
        if group.is_lost() {
            return Err(Error::in_use("volume group:", group.refusal().unwrap_or_default()));
        }
        let (control, joining) = (self.clone(), Arc::clone(group));
        let joined = blocking(move || {
            let is_known = !joining.member().key().is_empty();
            let (host, devices) = joining.backend.look(is_known)?;
            control.register(&joining, host, &devices)?;
            let is_first = !joining.is_checked.swap(true, Ordering::AcqRel);
            Ok((control.publish(&joining)?, is_first))
        });
        let joined = joined.await;
        if matches!(joined, Ok((Joined::Fully, true))) {
            let (control, group) = (self.clone(), Arc::clone(group));
            tokio::spawn(async move { control.reopen_cells(&group).await });
        }
        if group.is_lost() {
            self.drop_cells(group, FENCED).await;
        }
        joined.map(|(joined, _)| joined)
    }

    fn register(&self, group: &Group, host: HostNumber, devices: &[Device]) -> Result<(), Error> {
        let (groups, member) = (&self.0.groups, group.member());
        let what = || format!("volume group {}", shown(&group.name));
        if member.is_of_this_boot() && !member.key.is_empty() && member.host != host.0 {
            let problem = format!(
                "knows this host as {}, and its number is {host} now: restart the host",
                member.host
            );
            return Err(Error::in_use(what(), problem));
        }
        if !member.is_of_this_boot() || member.key.is_empty() {
            let key = Key::new(host, fastrand::u32(..));
            let keys = group.coordinator().keys()?;
            let published = keys.into_iter().find(|key| key.host() == host);
            groups.change(group, |member| member.begin(host, text(key), published))?;
        }
        // Not the devices that had the key before: it may have been removed by a fence.
        if group.was_fenced(Some(devices))? {
            groups.lose(group)?;
            return Err(HostsError::Fenced { group: what() }.into());
        }
        let member = group.member();
        let is_known = |one: &Device| member.devices.iter().any(|other| other.id == one.id);
        let new: Vec<_> = devices.iter().filter(|one| !is_known(one)).collect();
        if !new.is_empty()
            && let Some(key) = Key::parse(&member.key)
        {
            let former: Vec<_> =
                member.former_keys.iter().filter_map(|one| Key::parse(one)).collect();
            let paths = new.into_iter().map(|one| one.path.clone()).collect();
            let others = group.coordinator().keys()?.iter().any(|key| key.host() != host);
            group.backend.fence(paths).join(key, &former, others)?;
        }
        let device = |one: &Device| MemberDevice { id: one.id.clone(), path: one.path.clone() };
        let devices = devices.iter().map(device).collect();
        groups.change(group, |member| member.devices = devices)
    }

    fn publish(&self, group: &Group) -> Result<Joined, Error> {
        let member = group.member();
        let is_new = !member.is_published;
        if let Some(key) = Key::parse(&member.key).filter(|_| is_new) {
            match group.coordinator().publish_key(key) {
                Err(error @ HostsError::Away { .. }) => return Ok(Joined::AwaitsLocks(error)),
                published => published?,
            }
            self.0.groups.change(group, |member| member.is_published = true)?;
        }
        let node = self.node().map(NodeId::number);
        if let Some(number) = node.filter(|_| member.node != node || !group.has_keys()) {
            group.coordinator().publish_node(HostNumber(member.host), number)?;
            self.0.groups.change(group, |member| member.node = node)?;
        }
        let address = self.0.options.hosts.published();
        // A folder is cheap to look at, and its hosts are forgotten without a boot.
        if member.address == address && !is_new && group.has_keys() {
            return Ok(Joined::Fully);
        }
        group.coordinator().publish_address(HostNumber(member.host), &address)?;
        self.0.groups.change(group, |member| member.address = address)?;
        Ok(Joined::Fully)
    }

    /// Makes a group known. Locks that are not started yet are no error: a host registers first.
    pub(super) async fn add_group(&self, asked: &v1::AddVolumeGroupRequest) -> Result<bool, Error> {
        let (name, folder) = (asked.name.as_str(), checked_group(&asked.name, &asked.folder)?);
        let host = checked_host(asked.host, folder.is_some())?;
        if folder.is_none() && self.node().is_none() {
            let allowed = "given, as this host has no identity: a UUID";
            return Err(Error::invalid("node.id", "", allowed));
        }
        let _one = self.0.groups.adding.lock().await;
        if let Some(known) = self.0.groups.get(name) {
            refuse_other_folder(&known, folder)?;
            refuse_other_host(&known, asked.host)?;
            // As after a boot: it has registered, and its locks are started next.
            self.register_with(&known).await?.note(name);
            return Ok(false);
        }
        let backend = Backend::of(name, folder.as_deref(), host);
        let group = Arc::new(Group::new(Membership::new(name, folder), backend));
        self.0.groups.all.write().insert(name.to_owned(), Arc::clone(&group));
        match self.register_with(&group).await {
            Ok(joined) => joined.note(name),
            Err(error) => {
                // The key may be registered with some devices already: it is removed from them.
                if self.leave_group(&group).await.is_err() {
                    let control = self.clone();
                    blocking(move || control.0.groups.forget(&group.name)).await?;
                }
                return Err(error);
            }
        }
        Ok(true)
    }

    /// Removes this host's key from a group's devices, and forgets the group.
    pub(super) async fn leave_group(&self, group: &Arc<Group>) -> Result<(), Error> {
        let _one = group.joining.lock().await;
        let (control, group) = (self.clone(), Arc::clone(group));
        blocking(move || {
            if let Some(key) = Key::parse(&group.member().key).filter(|_| !group.is_lost()) {
                let devices = group.backend.look(true).map(|(_, devices)| devices);
                let devices = match devices {
                    Ok(devices) => devices.into_iter().map(|one| one.path).collect(),
                    Err(_) => paths_of(&group.member().devices),
                };
                group.backend.fence(devices).leave(key)?;
            }
            control.0.groups.forget(&group.name)
        })
        .await
    }
}
