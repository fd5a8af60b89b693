//! Taking cells: those that no host has, those that another host gives, and those of a host that is
//! fenced before (H3 of `docs/HOSTS.md`).

use std::sync::Arc;
use std::time::Duration;

use blockd_api::v1;
use blockd_hosts::{Cell, CellName, Holder, HostNumber, HostsError, Key, Owner, Published, Seen};
use blockd_mapper::claim::Claimant;
use blockd_mapper::format::superblock::Superblock;
use blockd_media::clock::Clock;
use blockd_media::error::{Error, shown};

use super::begun::unmade;
use super::cells::cell_name;
use super::groups::{Fenced, Group, Membership};
use super::membership::recover;
use super::peers::{CALL_LIMIT, within};
use super::pools::Opener;
use super::{Control, EventKind, blocking};
use crate::config::PoolConfig;

/// How long the lease of a host that was fenced is waited for. Sanlock counts a host as dead after
/// 8 times its limit of IO and 60 s, 140 s by default (`timeouts.c`), and needs some of that again
/// to take the lease.
const LEASE_WAIT: Duration = Duration::from_secs(200);
/// Between two tries.
const LEASE_PAUSE: Duration = Duration::from_secs(1);

/// The takeovers that are remembered with a group.
impl Membership {
    /// Notes that a cell is being taken from a host that was fenced by this key; `None`: not any
    /// more.
    pub(super) fn set_taking(&mut self, cell: &CellName, key: Option<Key>) {
        self.taken_free.remove(cell.as_str());
        match key {
            Some(key) => self.taking.insert(cell.to_string(), key.to_string()),
            None => self.taking.remove(cell.as_str()),
        };
    }

    /// The key by which the host was fenced from which a cell is being taken.
    pub(super) fn taking(&self, cell: &CellName) -> Option<Key> {
        self.taking.get(cell.as_str()).and_then(|key| Key::parse(key))
    }

    /// Notes that no host has the lease of a cell that is being taken.
    fn note_free(&mut self, cell: &CellName) {
        if self.taking.contains_key(cell.as_str()) {
            self.taken_free.insert(cell.to_string());
        }
    }

    /// Whether no host had the lease of a cell that is being taken, when this one took it.
    fn was_free(&self, cell: &CellName) -> bool {
        self.taken_free.contains(cell.as_str())
    }
}

impl Control {
    /// Takes a cell, from a host that is fenced before if that is asked for, and opens its pool.
    pub(super) async fn take_cell(
        &self,
        asked: v1::TakeCellRequest,
    ) -> Result<v1::TakeCellResponse, Error> {
        let (group, name) = (asked.group.clone(), asked.name.clone());
        let taken = self.take_cell_after(asked, None).await?;
        let (group, name) = (self.group(&group)?, cell_name(&name)?);
        if let Some(taken) = taken {
            let cell = name.to_string();
            self.note_in_group(&group, move |member| member.dead_mut().note_taken(&cell)).await?;
            return Ok(taken);
        }
        let found = self.find_cell(&group, &name).await?;
        Err(found
            .map_or_else(|| Error::not_found("cell", name.as_str()), |cell| unmade(&group, &cell)))
    }

    /// The same. `fenced`: the host with this key was fenced, and no other incarnation may be.
    /// `None` where the cell has no pool: then no host has it.
    pub(super) async fn take_cell_after(
        &self,
        asked: v1::TakeCellRequest,
        fenced: Option<Key>,
    ) -> Result<Option<v1::TakeCellResponse>, Error> {
        let (group, name) = (self.group(&asked.group)?, cell_name(&asked.name)?);
        if asked.fence && asked.handover {
            return Err(Error::invalid("handover", "true", "left out with fence"));
        }
        if asked.only_unused && !asked.handover {
            return Err(Error::invalid("only_unused", "true", "left out without handover"));
        }
        let _one = self.lock_cell(&group, &name).await;
        self.join_group(&group).await?;
        let seen = self.look_at_cell(&group, &name).await?;
        let seen = seen.ok_or_else(|| Error::not_found("cell", name.as_str()))?;
        let found = &seen.cell;
        self.refuse_other_pool(&group, &name, Some(found))?;
        if found.holder == Holder::This && self.is_open(found) {
            self.remember_cell(found).await?;
            // The call that has opened it may have ended in between. A note that stays only makes
            // the next opening wait.
            if group.member().taking(&name).is_some()
                && let Err(error) = self.note_taking(&group, &name, None).await
            {
                tracing::warn!(cell = %name, %error, "a takeover that has ended stays noted");
            }
            let cell = Some(self.describe_cell(&group, found));
            return Ok(Some(v1::TakeCellResponse { cell, ..Default::default() }));
        }
        if found.is_new {
            return Err(unmade(&group, found));
        }
        let from = fenced_owner(&group, found, &asked)?;
        let mut former = 0;
        if let (None, Holder::Other(owner)) = (from, &found.holder)
            && owner.host != group.host()
        {
            former = owner.host.0;
            self.ask_for_cell(&group, &name, owner.host, asked.only_unused).await?;
        }
        // A call that was interrupted may have taken the lease.
        let is_noted = from.is_none() && group.member().was_free(&name);
        let was_free = found.holder == Holder::Free || former != 0 || is_noted;
        let cell = match from {
            Some(owner) => self.take_from(&group, &seen, owner, fenced).await?,
            None => self.take_free(&group, found, was_free, fenced).await?,
        };
        let Some(log_changes) = self.open_taken(&group, &cell, was_free).await? else {
            return Ok(None);
        };
        let text = format!("cell {name} of volume group {} was taken", shown(&group.name));
        self.events().publish(EventKind::CellTaken, name.as_str(), "", text);
        Ok(Some(v1::TakeCellResponse {
            changed: true,
            cell: Some(self.describe_cell(&group, &cell)),
            fenced_host: from.map_or(0, |owner| u32::from(owner.host.0)),
            log_changes,
            former_host: u32::from(former),
        }))
    }

    /// Takes the lease of a cell that no other host has. `fenced`: an earlier call has ended the
    /// lease of the host with this key.
    async fn take_free(
        &self,
        group: &Arc<Group>,
        found: &Cell,
        was_free: bool,
        fenced: Option<Key>,
    ) -> Result<Cell, Error> {
        let name = found.name.clone();
        self.note_in_group(group, move |member| {
            if fenced.is_some() {
                member.set_taking(&name, fenced);
            }
            if was_free {
                member.note_free(&name);
            }
        })
        .await?;
        let cell = self.acquire_cell(group, &found.name).await?;
        if let (Some(key), Holder::Free) = (fenced, &found.holder) {
            self.refuse_returned(group, &found.name, key).await?;
        }
        Ok(cell)
    }

    /// Takes a cell whose lease this host had before its last boot, and recovers its pool. `None`
    /// where it has none.
    pub(super) async fn take_back(
        &self,
        group: &Arc<Group>,
        found: &Cell,
    ) -> Result<Option<Cell>, Error> {
        self.join_group(group).await?;
        self.refuse_other_pool(group, &found.name, Some(found))?;
        // This host may have taken a free lease, and not have opened the pool before its boot.
        let was_free = group.member().was_free(&found.name);
        let cell = self.take_free(group, found, was_free, None).await?;
        Ok(self.open_taken(group, &cell, was_free).await?.map(|_| cell))
    }

    /// Opens the pool of a cell that was taken. Gives the changes that were replayed; `None` where
    /// there is no pool: its lease is given back. `was_free`: also if the pool can't be opened. One
    /// that is open and can't be remembered stays.
    async fn open_taken(
        &self,
        group: &Arc<Group>,
        cell: &Cell,
        was_free: bool,
    ) -> Result<Option<u64>, Error> {
        match self.open_cell(group, cell, was_free).await {
            Ok(None) => self.give_back(group, &cell.name).await.map(|()| None),
            // One that is being taken from a dead host stays with this one.
            Err(error) if was_free && !self.is_open(cell) => {
                let name = cell.name.clone();
                let given = self.coordinate(group, move |leases| leases.release(&name)).await;
                if let Err(error) = given {
                    tracing::warn!(cell = %cell.name, %error, "the cell stays with this host");
                }
                Err(error)
            }
            opened => opened,
        }
    }

    /// Has the daemon of another host give a cell.
    async fn ask_for_cell(
        &self,
        group: &Arc<Group>,
        name: &CellName,
        host: HostNumber,
        only_unused: bool,
    ) -> Result<(), Error> {
        let mut peer = self.peer(group, host).await?;
        let request = v1::HandOverCellRequest {
            group: group.name.clone(),
            name: name.to_string(),
            host: u32::from(group.host().0),
            only_unused,
        };
        let handed = within(CALL_LIMIT, peer.hand_over_cell(request)).await;
        handed.map(drop).map_err(|status| super::standby::refused(host, &status))
    }

    /// Fences the host that has a cell, as its lease named it when it was looked at, then takes the
    /// lease. `only`: no other incarnation of that host. The takeover is noted before a lease is
    /// changed, so that the next call goes on wherever this one ends.
    pub(super) async fn take_from(
        &self,
        group: &Arc<Group>,
        seen: &Seen,
        owner: Owner,
        only: Option<Key>,
    ) -> Result<Cell, Error> {
        let name = &seen.cell.name;
        let key = match (seen.key_of(owner.host), only) {
            // In the second case it was fenced before, and another host has forgotten it since.
            (Some(key), _) | (None, Some(key)) => key,
            (None, None) => self.key_of(group, owner.host).await?,
        };
        refuse_other_key(only, Some(key))?;
        let fenced = self.fence_host(group, key).await?;
        // The key was read before the lease, which may be that of a host that has come back in
        // between. It publishes its new key first, so that it is found now.
        refuse_other_key(Some(key), self.present_key(group, owner.host).await?)?;
        self.note_taking(group, name, Some(key)).await?;
        if fenced.is_ours {
            // Another host that has fenced it may be taking this cell: then its lease decides.
            let cell = name.clone();
            self.coordinate(group, move |leases| leases.free(&cell, owner)).await?;
        }
        let taken = self.acquire_fenced(group, name, owner, fenced).await?;
        self.settle_fence(group, &taken, key, fenced).await?;
        Ok(taken.cell)
    }

    /// Looks, once the lease of a cell was taken, whether the host which had it has come back with
    /// another key. Where this host has overwritten the lease, the other one may have taken it just
    /// before, and both could have the cell: it is fenced again, whatever was decided of it. Once
    /// is enough: a host publishes its key before it takes a lease, so one that comes back later
    /// finds the lease taken. A lease that has expired, and one of a folder, are never taken by two
    /// hosts: the cell is left to the host that is back. Nothing of the cell was read yet.
    async fn settle_fence(
        &self,
        group: &Arc<Group>,
        taken: &Seen,
        key: Key,
        fenced: Fenced,
    ) -> Result<(), Error> {
        let name = &taken.cell.name;
        match taken.key_of(key.host()) {
            Some(present) if present != key => {
                if !fenced.is_ours || !group.has_keys() {
                    return self.leave_to(group, name, key.host()).await;
                }
                let fenced = self.fence_host(group, present).await?;
                self.note_taking(group, name, Some(fenced.key)).await
            }
            _ => Ok(()),
        }
    }

    /// Refuses to take a cell from a host that has come back since it was fenced by this key,
    /// before anything of the cell was changed: that host may open it itself.
    pub(super) async fn refuse_returned(
        &self,
        group: &Arc<Group>,
        name: &CellName,
        key: Key,
    ) -> Result<(), Error> {
        match self.present_key(group, key.host()).await? {
            Some(present) if present != key => self.leave_to(group, name, key.host()).await,
            _ => Ok(()),
        }
    }

    /// Goes on with a takeover that this host has begun: replays the log of a pool that the dead
    /// host has not closed, and ends the takeover then. Gives the changes that were replayed.
    /// `was_free`: no host had the cell.
    pub(super) async fn recover_taken(
        &self,
        group: &Arc<Group>,
        cell: &Cell,
        was_free: bool,
        config: &PoolConfig,
        newest: &Superblock,
    ) -> Result<u64, Error> {
        let Some(key) = group.member().taking(&cell.name) else { return Ok(0) };
        if newest.clean {
            return Ok(0);
        }
        let (own, from) = (self.node().map_or(0, |node| node.number()), newest.node);
        let mut fenced = None;
        if from != own {
            let published = self.coordinate(group, |leases| leases.published()).await?;
            // The opening refuses it then. The takeover is gone on with once that host is dead.
            if was_free && is_of_another(group, &published, key.host(), from).await? {
                return Ok(0);
            }
            match published.key_of(key.host()) {
                Some(present) if present != key => {
                    return self.leave_to(group, &cell.name, key.host()).await;
                }
                _ => fenced = published.is_only_of(from, key.host()).then_some(from),
            }
        }
        // H7: a loss of power of the host that had it, which may have this one's number where
        // both are daemons of one machine.
        let (taken, dir) = (config.clone(), self.0.options.runtime_dir.clone());
        let opener = opener_of_taken(own, group.has_keys(), fenced);
        let recovered = blocking(move || recover(&taken, &dir, opener, from, true)).await?;
        self.note_taking(group, &cell.name, None).await?;
        Ok(recovered.log_changes)
    }

    /// Gives the lease of a cell back as it is, and says that its host has come back.
    async fn leave_to<T>(
        &self,
        group: &Arc<Group>,
        name: &CellName,
        host: HostNumber,
    ) -> Result<T, Error> {
        self.give_back(group, name).await?;
        Err(HostsError::CameBack { host }.into())
    }

    /// Gives the lease of a cell back, and ends the note that it is being taken.
    pub(super) async fn give_back(&self, group: &Arc<Group>, name: &CellName) -> Result<(), Error> {
        let cell = name.clone();
        self.coordinate(group, move |leases| leases.release(&cell)).await?;
        self.note_taking(group, name, None).await
    }

    /// Notes that a cell is being taken from the host that was fenced by this key; `None`: not any
    /// more.
    pub(super) async fn note_taking(
        &self,
        group: &Arc<Group>,
        name: &CellName,
        key: Option<Key>,
    ) -> Result<(), Error> {
        let name = name.clone();
        self.note_in_group(group, move |member| member.set_taking(&name, key)).await
    }

    /// The key by which a host is known now; `None` for one that was forgotten. Such a host has not
    /// come back: it publishes a key before it takes a lease.
    async fn present_key(
        &self,
        group: &Arc<Group>,
        host: HostNumber,
    ) -> Result<Option<Key>, Error> {
        let keys = self.coordinate(group, |leases| leases.keys()).await?;
        Ok(keys.into_iter().find(|key| key.host() == host))
    }

    /// The key by which a host is known now.
    pub(super) async fn key_of(&self, group: &Arc<Group>, host: HostNumber) -> Result<Key, Error> {
        let group = Arc::clone(group);
        blocking(move || group.key_of(host)).await
    }

    /// Keeps a host from all devices of a group, in the incarnation that has this key.
    pub(super) async fn fence_host(&self, group: &Arc<Group>, key: Key) -> Result<Fenced, Error> {
        let asked = Arc::clone(group);
        let fenced = blocking(move || asked.fence(key)).await?;
        if fenced.was_first {
            let text = format!(
                "host {} was kept from the devices of volume group {}",
                key.host(),
                shown(&group.name)
            );
            self.events().publish(EventKind::HostFenced, "", "", text);
            self.note_in_group(group, move |member| member.note_removed(key)).await?;
        }
        Ok(fenced)
    }

    /// Takes the lease of a cell.
    pub(super) async fn acquire_cell(
        &self,
        group: &Arc<Group>,
        name: &CellName,
    ) -> Result<Cell, Error> {
        let name = name.clone();
        self.coordinate(group, move |leases| leases.acquire(&name)).await
    }

    /// Takes the lease of a cell from a host that was fenced, and waits for it. The keys are read
    /// after that. Where another host was faster, the note that the cell is being taken stays if
    /// this host has ended the former lease: the other one may be without a note, and can't open
    /// the cell then.
    async fn acquire_fenced(
        &self,
        asked: &Arc<Group>,
        name: &CellName,
        owner: Owner,
        fenced: Fenced,
    ) -> Result<Seen, Error> {
        let clock = Clock::start();
        // Another host may have been faster.
        let is_its = |by: Option<HostNumber>| by.is_none_or(|by| by == owner.host);
        loop {
            let cell = name.clone();
            let group = Arc::clone(asked);
            let taken = blocking(move || Ok(group.coordinator().acquire_and_look(&cell))).await?;
            let waits = clock.elapsed() < LEASE_WAIT;
            match taken {
                Err(HostsError::Held { by, .. }) if waits && is_its(by) => {}
                // A dead host may have the lock of the whole group as well.
                Err(HostsError::Away { .. }) if waits => {}
                Err(HostsError::Held { cell, by: Some(by) }) => {
                    if !is_its(Some(by)) && !fenced.is_ours {
                        // The host that was first to fence takes it.
                        self.note_taking(asked, name, None).await?;
                    }
                    return Err(HostsError::Held { cell, by: Some(by) }.into());
                }
                other => return Ok(other?),
            }
            tokio::time::sleep(LEASE_PAUSE).await;
        }
    }
}

/// The host from which a cell is to be taken by a fence; `None` where there is none, and where the
/// host that has the cell is to give it.
fn fenced_owner(
    group: &Group,
    found: &Cell,
    asked: &v1::TakeCellRequest,
) -> Result<Option<Owner>, Error> {
    let cell = || found.name.clone();
    match &found.holder {
        // From before this host's last boot: it is free.
        Holder::Other(owner) if owner.host == group.host() => Ok(None),
        Holder::Other(owner)
            if asked.only_from != 0 && u32::from(owner.host.0) != asked.only_from =>
        {
            let problem =
                format!("is held by host {}, not by host {}", owner.host, asked.only_from);
            Err(Error::in_use(format!("cell {}", found.name), problem))
        }
        Holder::Other(owner) if asked.fence => Ok(Some(*owner)),
        Holder::Other(_) if asked.handover => Ok(None),
        // Its lease may have expired, which is no fence (H3).
        Holder::Other(Owner { host, .. }) => {
            Err(HostsError::Held { cell: cell(), by: Some(*host) }.into())
        }
        Holder::Unknown(problem) => {
            Err(HostsError::NotKnown { cell: cell(), problem: problem.clone() }.into())
        }
        Holder::This | Holder::Free => Ok(None),
    }
}

/// Whether the last owner of a pool, by its node, is another host than the one that was fenced, and
/// may write still: it has opened the pool since, and may have it open. A host of an older release
/// has published no node, and is taken for the one that was fenced.
async fn is_of_another(
    group: &Arc<Group>,
    published: &Published,
    fenced: HostNumber,
    node: u32,
) -> Result<bool, Error> {
    let owners: Vec<_> = published.hosts_of(node).collect();
    if owners.contains(&fenced) {
        return Ok(false);
    }
    let (group, published) = (Arc::clone(group), published.clone());
    blocking(move || {
        for host in owners {
            if may_write(&group, &published, host)? {
                return Ok(true);
            }
        }
        Ok(false)
    })
    .await
}

/// Whether a host may write to the group's devices, as far as this one knows: it has neither fenced
/// it nor declared it dead, since no disk can be asked for the keys of other hosts. In a folder,
/// whether its process runs. Blocks.
fn may_write(group: &Group, published: &Published, host: HostNumber) -> Result<bool, Error> {
    if let Some(has_ended) = group.has_ended(host)? {
        return Ok(!has_ended);
    }
    let member = group.member();
    let is_dead = |key| member.dead().get(host).is_some_and(|dead| dead.key() == Some(key));
    let is_fenced = |key| member.has_removed(key) || is_dead(key);
    Ok(published.keys.iter().any(|key| key.host() == host && !is_fenced(*key)))
}

/// The opener of a pool in a cell that is being taken, with the node that was fenced: its lease may
/// be a third host's as well, whose lease this host has overwritten. Without keys a fence does not
/// stop what the former host has sent.
pub(super) fn opener_of_taken(node: u32, has_keys: bool, fenced: Option<u32>) -> Opener {
    let leased_until_ns = if has_keys { Claimant::UNLEASED } else { 0 };
    Opener { node, leased_until_ns, fenced: fenced.filter(|_| has_keys) }
}

/// Refuses a host that has come back since it was decided to fence it.
fn refuse_other_key(only: Option<Key>, present: Option<Key>) -> Result<(), Error> {
    match (only, present) {
        (Some(only), Some(present)) if only != present => {
            Err(HostsError::CameBack { host: present.host() }.into())
        }
        _ => Ok(()),
    }
}
