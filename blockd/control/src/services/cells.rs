//! Cells: pools on storage that several hosts reach, each open on the one host that has its lease.
//! A cell's pool is an ordinary one of the same name, whose device is the cell's.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blockd_api::v1;
use blockd_hosts::{Cell, CellName, Coordinator, Holder, HostsError, Key, Seen, Space};
use blockd_mapper::error::MapperError;
use blockd_media::error::{Error, shown};
use blockd_media::units::{from_wire, to_wire};

use super::begun::{check_size, is_obtainable};
use super::closing::How;
use super::dead_record::DeadHosts;
use super::groups::{Group, Membership};
use super::making::Lock;
use super::service::wanted_pool;
use super::{Control, EventKind, Known, blocking};

/// How long a group may take to be described. LVM waits for 25 s for a lock that another host has.
const LOOK_LIMIT: Duration = Duration::from_secs(28);
/// A cell grows by at least this much, so that the group's lock is not taken often.
const LEAST_GRANT: u64 = 1024 << 20;
/// And by what is written in this time at the present rate: a coordinator may be away for as long
/// as it takes until a dead host's lease has expired, with one more try.
const OUTAGE_SECONDS: u64 = 160;

/// How much of a group is looked at. LVM lists the leases of cells one by one.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Look {
    All,
    /// The space and one cell.
    Cell(CellName),
    Space,
    /// No disk, which may hang.
    Nothing,
}

impl Control {
    /// Groups, as far as a request asks for them.
    pub(super) async fn list_groups(
        &self,
        asked: &v1::ListVolumeGroupsRequest,
    ) -> Result<Vec<v1::VolumeGroup>, Error> {
        let look = match (asked.cell.as_str(), asked.brief) {
            ("", false) => Look::All,
            ("", true) if asked.name.is_empty() => Look::Nothing,
            ("", true) => Look::Space,
            (name, false) => {
                let allowed = CellName::ALLOWED;
                let cell = CellName::parse(name);
                Look::Cell(cell.ok_or_else(|| Error::invalid("cell", name, allowed))?)
            }
            (_, true) => return Err(Error::invalid("brief", "true", "left out with cell")),
        };
        self.describe_by(&asked.name, &look).await
    }

    /// Groups with their cells; of one name, or all.
    #[cfg(test)]
    pub(super) async fn describe_groups(&self, name: &str) -> Result<Vec<v1::VolumeGroup>, Error> {
        self.describe_by(name, &Look::All).await
    }

    async fn describe_by(&self, name: &str, look: &Look) -> Result<Vec<v1::VolumeGroup>, Error> {
        let groups = match name {
            "" => self.0.groups.all(),
            name => vec![self.group(name)?],
        };
        Ok(self.describe_these(groups, look).await)
    }

    /// Looks at groups with their cells, side by side.
    pub(super) async fn describe_these(
        &self,
        groups: Vec<Arc<Group>>,
        look: &Look,
    ) -> Vec<v1::VolumeGroup> {
        let mut describing = tokio::task::JoinSet::new();
        for group in groups {
            let (control, look) = (self.clone(), look.clone());
            describing.spawn(async move { control.describe_group_by(group, look).await });
        }
        let mut described = Vec::new();
        while let Some(Ok(group)) = describing.join_next().await {
            described.push(group);
        }
        described.sort_by(|one, other| one.name.cmp(&other.name));
        described
    }

    /// A group with its cells. One that does not answer in time is described without them.
    pub(super) async fn describe_group(&self, group: Arc<Group>) -> v1::VolumeGroup {
        self.describe_group_by(group, Look::All).await
    }

    async fn describe_group_by(&self, group: Arc<Group>, look: Look) -> v1::VolumeGroup {
        // Records that are made while keys are read are newer than these.
        let (looked_at, before) = (Arc::clone(&group), group.member().dead().clone());
        // They are needed for hosts that were declared dead alone.
        let wants_keys = look == Look::All && !before.is_empty();
        let looking = blocking(move || {
            let coordinator = looked_at.coordinator();
            let (space, cells) = match &look {
                Look::All => (coordinator.space()?, coordinator.cells()?),
                Look::Cell(name) => {
                    (coordinator.space()?, coordinator.cell(name)?.into_iter().collect())
                }
                Look::Space => (coordinator.space()?, Vec::new()),
                Look::Nothing => (Space::default(), Vec::new()),
            };
            Ok((space, cells, if wants_keys { coordinator.keys()? } else { Vec::new() }))
        });
        let looked: Result<(Space, Vec<Cell>, Vec<Key>), Error> =
            tokio::time::timeout(LOOK_LIMIT, looking).await.unwrap_or_else(|_| {
                let what = format!("volume group {}", shown(&group.name));
                let seconds = LOOK_LIMIT.as_secs();
                Err(Error::in_use(what, format!("does not answer within {seconds} s")))
            });
        let (mut failure, (space, cells, keys)) = match looked {
            Ok(looked) => (String::new(), looked),
            Err(error) => (error.to_string(), (Space::default(), Vec::new(), Vec::new())),
        };
        self.note_returned(&group, before, &keys).await;
        if let Some(refusal) = group.refusal() {
            failure = refusal;
        }
        v1::VolumeGroup {
            name: group.name.clone(),
            folder: group.folder().map(|path| path.display().to_string()).unwrap_or_default(),
            host: u32::from(group.host().0),
            key: group.member().key().to_owned(),
            total_bytes: to_wire(space.total),
            free_bytes: to_wire(space.free),
            failure,
            cells: cells.iter().map(|cell| self.describe_cell(&group, cell)).collect(),
            dead: group.member().dead().describe(),
        }
    }

    /// Ends the records of hosts that have come back, by the keys that the group has. `before`: the
    /// records before these keys were read; newer ones stay.
    pub(super) async fn note_returned(&self, group: &Arc<Group>, before: DeadHosts, keys: &[Key]) {
        let returned = before.returned(keys);
        if returned.is_empty() {
            return;
        }
        let noted = self.note_in_group(group, move |member| {
            member.dead_mut().remove_returned(&before, &returned);
        });
        if let Err(error) = noted.await {
            tracing::warn!(group = group.name, %error, "a host stays declared dead");
        }
    }

    pub(super) fn describe_cell(&self, group: &Group, cell: &Cell) -> v1::Cell {
        let is_open = self.pool_in(cell).is_some_and(|known| known.failure().is_none());
        let (state, holder) = match &cell.holder {
            Holder::This if is_open => (v1::CellState::Open, group.host().0),
            Holder::This => (v1::CellState::Held, group.host().0),
            // Its lease is from before this host's last boot.
            Holder::Other(owner) if owner.host == group.host() => (v1::CellState::Free, 0),
            Holder::Free => (v1::CellState::Free, 0),
            Holder::Other(owner) => (v1::CellState::Elsewhere, owner.host.0),
            Holder::Unknown(_) => (v1::CellState::Unknown, 0),
        };
        v1::Cell {
            name: cell.name.to_string(),
            group: group.name.clone(),
            state: state.into(),
            device_bytes: to_wire(cell.size),
            path: cell.path.display().to_string(),
            holder: u32::from(holder),
            standby: self.on_standby(&cell.name),
        }
    }

    /// The pool in a cell, open or not.
    pub(super) fn pool_in(&self, cell: &Cell) -> Option<Known> {
        self.known_pools().into_iter().find(|known| known.paths().contains(&cell.path))
    }

    /// A cell as it is now; `None` where there is none.
    pub(super) async fn find_cell(
        &self,
        group: &Arc<Group>,
        name: &CellName,
    ) -> Result<Option<Cell>, Error> {
        let name = name.clone();
        self.coordinate(group, move |leases| leases.cell(&name)).await
    }

    /// The same, with the keys of hosts.
    pub(super) async fn look_at_cell(
        &self,
        group: &Arc<Group>,
        name: &CellName,
    ) -> Result<Option<Seen>, Error> {
        let name = name.clone();
        self.coordinate(group, move |leases| leases.look_at(&name)).await
    }

    /// Runs a call of the coordinator.
    pub(super) async fn coordinate<T: Send + 'static>(
        &self,
        group: &Arc<Group>,
        call: impl FnOnce(&dyn Coordinator) -> Result<T, HostsError> + Send + 'static,
    ) -> Result<T, Error> {
        let group = Arc::clone(group);
        blocking(move || Ok(call(group.coordinator())?)).await
    }

    /// Changes what is remembered of a group.
    pub(super) async fn note_in_group(
        &self,
        group: &Arc<Group>,
        change: impl FnOnce(&mut Membership) + Send + 'static,
    ) -> Result<(), Error> {
        let (control, group) = (self.clone(), Arc::clone(group));
        blocking(move || control.0.groups.change(&group, change)).await
    }

    /// Refuses a cell whose name another pool has, or another cell that volumes wait for here.
    pub(super) fn refuse_other_pool(
        &self,
        group: &Group,
        name: &CellName,
        cell: Option<&Cell>,
    ) -> Result<(), Error> {
        self.refuse_awaited_name(name.as_str(), Some(&group.name))?;
        let Some(known) = self.0.pools.read().get(name.as_str()).cloned() else { return Ok(()) };
        if cell.is_some_and(|cell| known.paths().contains(&cell.path)) {
            return Ok(());
        }
        let problem = "is here already and lies elsewhere: rename it first (`blockd pool rename`)";
        Err(Error::in_use(format!("pool {name}"), problem))
    }

    /// Makes a cell with a pool, which is open then. Goes on with one that a crash has interrupted.
    pub(super) async fn create_cell(
        &self,
        asked: v1::CreateCellRequest,
    ) -> Result<v1::CreateCellResponse, Error> {
        let (group, name) = (self.group(&asked.group)?, cell_name(&asked.name)?);
        let bytes = from_wire(asked.device_bytes, 0)?;
        let mut wanted = v1::CreatePoolRequest {
            name: name.to_string(),
            path: "/".to_owned(),
            extent_size: asked.extent_size,
            ..Default::default()
        };
        // Before anything is made.
        let extent_size = wanted_pool(self, &wanted)?.extent_size;
        let _one = self.lock_cell(&group, &name).await;
        self.join_group(&group).await?;
        let found = self.find_cell(&group, &name).await?;
        self.refuse_other_pool(&group, &name, found.as_ref())?;
        let cell = match found {
            Some(cell) if self.is_open(&cell) => {
                self.remember_cell(&cell).await?;
                let cell = Some(self.describe_cell(&group, &cell));
                return Ok(v1::CreateCellResponse { changed: false, cell });
            }
            Some(cell) => {
                let cell = self.begun_cell(&group, cell).await?;
                check_size(&format!("size of cell {name}"), cell.size, extent_size)?;
                cell
            }
            None if asked.only_begun => return Err(Error::not_found("cell", name.as_str())),
            None => {
                check_size("device_bytes", bytes, extent_size)?;
                // Of a former cell, which another host has deleted.
                self.note_taking(&group, &name, None).await?;
                let cell = name.clone();
                self.coordinate(&group, move |leases| leases.create(&cell, bytes)).await?
            }
        };
        self.clear_cell(&cell).await?;
        if cell.is_new {
            // Before there is a pool: a cell without the mark is only cleared where it has none.
            let cell = name.clone();
            self.coordinate(&group, move |leases| leases.finish(&cell)).await?;
        }
        wanted.path = cell.path.display().to_string();
        self.create_pool(wanted_pool(self, &wanted)?, false).await?;
        Ok(v1::CreateCellResponse { changed: true, cell: Some(self.describe_cell(&group, &cell)) })
    }

    /// Keeps others from doing something with this cell meanwhile.
    pub(super) async fn lock_cell(&self, group: &Group, name: &CellName) -> Lock {
        self.0.cells.lock(&format!("{}/{name}", group.name)).await
    }

    pub(super) fn is_open(&self, cell: &Cell) -> bool {
        self.pool_in(cell).is_some_and(|known| known.failure().is_none())
    }

    /// Remembers the pool of a cell that is open: the call that has opened it may have failed to.
    pub(super) async fn remember_cell(&self, cell: &Cell) -> Result<(), Error> {
        match self.pool_in(cell) {
            Some(known) => self.remember_again(&known.config).await,
            None => Ok(()),
        }
    }

    /// Opens the pool of a cell that this host has. Gives the changes that were replayed from the
    /// log of a host that was fenced; `None` where there is no pool. `was_free`: no host had it, so
    /// that another one may have had it since a takeover that this host has begun.
    pub(super) async fn open_cell(
        &self,
        group: &Arc<Group>,
        cell: &Cell,
        was_free: bool,
    ) -> Result<Option<u64>, Error> {
        if let Some(known) = self.pool_in(cell) {
            // It failed, or a call has closed it: it keeps its attachments. Where it serves, a task
            // that opens what could not be opened before was faster.
            let name = &known.config.name;
            if known.state.is_ok() && known.failure().is_some() {
                self.close_pool(name, How::Call { force: true }).await.map_err(Error::from)?;
            }
            self.reopen_pool(name).await?;
            self.note_taking(group, &cell.name, None).await?;
            return Ok(Some(0));
        }
        let device = cell.path.clone();
        // H4: nothing is read before it.
        let flush = move || File::open(&device)?.sync_all();
        let path = cell.path.clone();
        blocking(move || flush().map_err(|error| Error::file("flush", &path, error))).await?;
        if self.is_unmade(cell).await? {
            return Ok(None);
        }
        let (config, newest) = self.found_pool(cell.name.as_str(), &cell.path).await?;
        let changes = self.recover_taken(group, cell, was_free, &config, &newest).await?;
        let _name = self.0.making_pools.lock(cell.name.as_str()).await;
        let opened = self.open_found(config, newest.pool_id).await;
        // There was nothing to recover. No lease counts until the pool is open: that of this host
        // may be another's as well.
        if self.is_open(cell) && group.member().taking(&cell.name).is_some() {
            let noted = self.note_taking(group, &cell.name, None).await;
            return opened.and(noted).map(|()| Some(changes));
        }
        opened.map(|()| Some(changes))
    }

    /// Closes the pool of a cell in order, and gives its lease back (H6).
    pub(super) async fn release_cell(
        &self,
        asked: v1::ReleaseCellRequest,
    ) -> Result<v1::ReleaseCellResponse, Error> {
        let (group, name) = (self.group(&asked.group)?, cell_name(&asked.name)?);
        let _one = self.lock_cell(&group, &name).await;
        let found = self.find_cell(&group, &name).await?;
        let found = found.ok_or_else(|| Error::not_found("cell", name.as_str()))?;
        if found.holder != Holder::This {
            return Ok(v1::ReleaseCellResponse::default());
        }
        let mut detached_volumes = Vec::new();
        if let Some(known) = self.pool_in(&found) {
            let request =
                v1::ExportPoolRequest { name: known.config.name.clone(), force: asked.force };
            detached_volumes = self.export_pool(request).await?.detached_volumes;
        } else if !found.is_new {
            self.refuse_unclosed(&found).await?;
        }
        self.give_back(&group, &name).await?;
        let text = format!("cell {name} of volume group {} was released", shown(&group.name));
        self.events().publish(EventKind::CellReleased, name.as_str(), "", text);
        Ok(v1::ReleaseCellResponse { changed: true, detached_volumes })
    }

    /// Refuses to give a cell back that was not closed in order: the next host would refuse it.
    pub(super) async fn refuse_unclosed(&self, cell: &Cell) -> Result<(), Error> {
        if self.is_unmade(cell).await? {
            return Ok(());
        }
        let (_, newest) = self.found_pool(cell.name.as_str(), &cell.path).await?;
        if newest.clean {
            return Ok(());
        }
        let problem = "was not closed in order: `blockd cell take` opens it";
        Err(Error::in_use(format!("cell {}", cell.name), problem))
    }

    /// Deletes a cell that this host has. Where no host has it, one without a pool, or with force
    /// any.
    pub(super) async fn delete_cell(
        &self,
        asked: v1::DeleteCellRequest,
    ) -> Result<v1::DeleteCellResponse, Error> {
        let (group, name) = (self.group(&asked.group)?, cell_name(&asked.name)?);
        // A folder whose file system is not mounted has no cell, and none of them is deleted.
        self.join_group(&group).await?;
        let _one = self.lock_cell(&group, &name).await;
        let Some(found) = self.find_cell(&group, &name).await? else {
            self.note_taking(&group, &name, None).await?;
            return Ok(v1::DeleteCellResponse::default());
        };
        let found = match found.holder {
            Holder::This => found,
            _ if asked.force && is_obtainable(&group, &found) => {
                self.acquire_cell(&group, &name).await?
            }
            _ => {
                let held = self.acquire_unmade(&group, &found).await?;
                held.ok_or_else(|| HostsError::NotHeld { cell: name.clone() })?
            }
        };
        let mut deleted = v1::DeletePoolResponse::default();
        match self.pool_in(&found) {
            Some(known) => {
                let request =
                    v1::DeletePoolRequest { name: known.config.name.clone(), force: asked.force };
                deleted = self.delete_pool(request).await?;
            }
            None if asked.force => {}
            None => self.refuse_unopened(&found).await?,
        }
        let cell = name.clone();
        self.coordinate(&group, move |leases| leases.remove(&cell)).await?;
        self.note_taking(&group, &name, None).await?;
        let (deleted_volumes, deleted_snapshots) =
            (deleted.deleted_volumes, deleted.deleted_snapshots);
        Ok(v1::DeleteCellResponse { changed: true, deleted_volumes, deleted_snapshots })
    }

    /// Refuses to delete a cell with anything in it that is not known: its volumes are not either.
    async fn refuse_unopened(&self, cell: &Cell) -> Result<(), Error> {
        if cell.is_new || self.is_unmade(cell).await? {
            return Ok(());
        }
        let problem = "has a pool that is not open: `blockd cell take` opens it; or use force";
        Err(Error::in_use(format!("cell {}", cell.name), problem))
    }

    /// Forgets a group of which this host has no cell.
    pub(super) async fn remove_group(&self, name: &str) -> Result<bool, Error> {
        let Some(group) = self.0.groups.get(name) else { return Ok(false) };
        let refused =
            |problem: String| Err(Error::in_use(format!("volume group {}", shown(name)), problem));
        let is_in = |known: &&Known| {
            known.paths().iter().any(|path| group.coordinator().cell_at(path).is_some())
        };
        let known = self.known_pools();
        for one in known.iter().filter(is_in) {
            if !group.is_lost() {
                return refused(format!("has cell {}: release it first", shown(&one.config.name)));
            }
            // It was dropped, and can't be closed in order.
            let how = How::Call { force: true };
            self.close_pool(&one.config.name, how).await.map_err(Error::from)?;
        }
        if self.coordinate(&group, |leases| leases.is_in_use()).await? {
            // Its locks would lose the disks with the key, and the watchdog reset this host.
            return refused(format!(
                "is in use here: stop its locks first (`vgchange --lockstop {}`)",
                shown(name)
            ));
        }
        for one in known.iter().filter(is_in) {
            self.forget_pool(&one.config.name).await?;
        }
        self.leave_group(&group).await?;
        Ok(true)
    }

    /// Drops all cells of a group: this host's membership in it is lost (H2).
    pub(super) async fn lose_group(
        &self,
        name: &str,
    ) -> Result<v1::LoseVolumeGroupResponse, Error> {
        let group = self.group(name)?;
        let changed = !group.is_lost();
        // Before the cells are dropped: none may be opened since.
        let (control, lost) = (self.clone(), Arc::clone(&group));
        let noted = blocking(move || control.0.groups.lose(&lost)).await;
        let cells = self.drop_cells(&group, "this host's membership is lost").await;
        // IO in flight ends before the loss is reported.
        self.coordinate(&group, |leases| leases.cut_off()).await?;
        noted?;
        Ok(v1::LoseVolumeGroupResponse { changed, cells })
    }

    /// Stops the pools in a group's cells without another write. Gives their names.
    pub(super) async fn drop_cells(&self, group: &Arc<Group>, why: &str) -> Vec<String> {
        let mut dropped = Vec::new();
        for known in self.known_pools() {
            let Ok(handle) = &known.state else { continue };
            let cell = known.paths().iter().find_map(|path| group.coordinator().cell_at(path));
            let (Some(cell), None) = (cell, handle.failure()) else { continue };
            let problem = format!("is not this host's any more: {why}");
            handle.halt(MapperError::Device { name: format!("cell {cell}"), problem });
            dropped.push(known.config.name.clone());
        }
        let text = format!("volume group {} was lost: {why}", shown(&group.name));
        self.events().publish(EventKind::GroupLost, "", "", text);
        dropped
    }

    /// Makes the device of a cell larger ahead of need, where this pool is one in a cell. Gives
    /// whether it is larger now. The pool takes that up by growing (H9).
    pub(super) async fn extend_cell(
        &self,
        path: &Path,
        present: u64,
        rate: u64,
        step: u64,
    ) -> Result<bool, Error> {
        let Some((group, name)) = self.0.groups.cell_at(path) else { return Ok(false) };
        let grant = match step {
            0 => LEAST_GRANT.max(rate.saturating_mul(OUTAGE_SECONDS)),
            step => step,
        };
        // The group may have got a disk, which has to have this host's key before a cell is on it.
        self.join_group(&group).await?;
        let free = self.coordinate(&group, |leases| leases.space()).await?.free;
        // All that is left is better than nothing.
        let grant = grant.min(free);
        if grant == 0 {
            let text = format!("volume group {} is full", shown(&group.name));
            return Err(Error::in_use(text, "no cell of it can grow"));
        }
        let wanted = present.saturating_add(grant);
        let size = self.coordinate(&group, move |leases| leases.extend(&name, wanted)).await?;
        Ok(size > present)
    }

    /// Whether a pool lies in a cell.
    pub(super) fn is_in_cell(&self, path: &Path) -> bool {
        self.0.groups.cell_at(path).is_some()
    }
}

pub(super) fn cell_name(text: &str) -> Result<CellName, Error> {
    CellName::parse(text).ok_or_else(|| Error::invalid("name", text, CellName::ALLOWED))
}
