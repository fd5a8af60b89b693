//! Cells: pools on storage that several hosts reach, each open on the one host that has its lease.
//! A cell's pool is an ordinary one of the same name, whose device is the cell's.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blockd_api::v1;
use blockd_hosts::{Cell, CellName, Coordinator, Holder, HostsError, Space};
use blockd_mapper::error::MapperError;
use blockd_media::MARKED_BYTES;
use blockd_media::clock::Clock;
use blockd_media::error::{Error, shown};
use blockd_media::units::{from_wire, to_wire};

use super::closing::How;
use super::groups::Group;
use super::membership::recover;
use super::service::wanted_pool;
use super::{Control, EventKind, Known, blocking};

/// How long the lease of a host that was fenced is waited for. Sanlock counts a host as dead after
/// 8 times its limit of IO and 60 s, 140 s by default (`timeouts.c`), and needs some of that again
/// to take the lease.
const LEASE_WAIT: Duration = Duration::from_secs(200);
/// Between two tries.
const LEASE_PAUSE: Duration = Duration::from_secs(1);
/// A cell grows by at least this much, so that the group's lock is not taken often.
const LEAST_GRANT: u64 = 1024 << 20;
/// And by what is written in this time at the present rate: a coordinator may be away for as long
/// as it takes until a dead host's lease has expired, with one more try.
const OUTAGE_SECONDS: u64 = 160;

impl Control {
    /// Groups with their cells; of one name, or all.
    pub(super) async fn describe_groups(&self, name: &str) -> Result<Vec<v1::VolumeGroup>, Error> {
        let groups = match name {
            "" => self.0.groups.all(),
            name => vec![self.group(name)?],
        };
        let mut described = Vec::new();
        for group in groups {
            described.push(self.describe_group(group).await?);
        }
        Ok(described)
    }

    pub(super) async fn describe_group(&self, group: Arc<Group>) -> Result<v1::VolumeGroup, Error> {
        let looked_at = Arc::clone(&group);
        let looked: Result<(Space, Vec<Cell>), Error> = blocking(move || {
            let coordinator = looked_at.coordinator();
            Ok((coordinator.space()?, coordinator.cells()?))
        })
        .await;
        let (mut failure, (space, cells)) = match looked {
            Ok(looked) => (String::new(), looked),
            Err(error) => (error.to_string(), (Space::default(), Vec::new())),
        };
        if let Some(refusal) = group.refusal() {
            failure = refusal;
        }
        Ok(v1::VolumeGroup {
            name: group.name.clone(),
            folder: group.folder().map(|path| path.display().to_string()).unwrap_or_default(),
            host: u32::from(group.host().0),
            key: group.member().key().to_owned(),
            total_bytes: to_wire(space.total),
            free_bytes: to_wire(space.free),
            failure,
            cells: cells.iter().map(|cell| self.describe_cell(&group, cell)).collect(),
        })
    }

    fn describe_cell(&self, group: &Group, cell: &Cell) -> v1::Cell {
        let is_open = self.pool_in(cell).is_some_and(|known| known.failure().is_none());
        let (state, holder) = match cell.holder {
            Holder::This if is_open => (v1::CellState::Open, group.host().0),
            Holder::This => (v1::CellState::Held, group.host().0),
            Holder::NotThis => (v1::CellState::Free, 0),
            Holder::Other(host) => (v1::CellState::Elsewhere, host.0),
        };
        v1::Cell {
            name: cell.name.to_string(),
            group: group.name.clone(),
            state: state.into(),
            device_bytes: to_wire(cell.size),
            path: cell.path.display().to_string(),
            holder: u32::from(holder),
        }
    }

    /// The pool in a cell, open or not.
    fn pool_in(&self, cell: &Cell) -> Option<Known> {
        self.known_pools().into_iter().find(|known| known.paths().contains(&cell.path))
    }

    /// A cell as it is now; `None` where there is none.
    async fn find_cell(&self, group: &Arc<Group>, name: &CellName) -> Result<Option<Cell>, Error> {
        let name = name.clone();
        self.coordinate(group, move |leases| leases.cell(&name)).await
    }

    /// Runs a call of the coordinator.
    async fn coordinate<T: Send + 'static>(
        &self,
        group: &Arc<Group>,
        call: impl FnOnce(&dyn Coordinator) -> Result<T, HostsError> + Send + 'static,
    ) -> Result<T, Error> {
        let group = Arc::clone(group);
        blocking(move || Ok(call(group.coordinator())?)).await
    }

    /// Changes what is remembered of a group.
    async fn note_in_group(
        &self,
        group: &Arc<Group>,
        change: impl FnOnce(&mut super::groups::Membership) + Send + 'static,
    ) -> Result<(), Error> {
        let (control, group) = (self.clone(), Arc::clone(group));
        blocking(move || control.0.groups.change(&group, change)).await
    }

    /// Refuses a cell whose name another pool has.
    fn refuse_other_pool(&self, name: &CellName, cell: Option<&Cell>) -> Result<(), Error> {
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
        wanted_pool(self, &wanted)?;
        let _one = group.calls.lock().await;
        self.join_group(&group).await?;
        let found = self.find_cell(&group, &name).await?;
        self.refuse_other_pool(&name, found.as_ref())?;
        let is_begun = group.member().is_making(&name);
        let cell = match found {
            Some(cell) if cell.holder != Holder::This || !(is_begun || self.is_open(&cell)) => {
                let problem = "exists: `blockd cell take` opens it";
                return Err(Error::in_use(format!("cell {name}"), problem));
            }
            Some(cell) if !is_begun => {
                let cell = Some(self.describe_cell(&group, &cell));
                return Ok(v1::CreateCellResponse { changed: false, cell });
            }
            Some(cell) => cell,
            None => {
                let cell = name.clone();
                self.note_in_group(&group, move |member| member.set_making(&cell, true)).await?;
                let cell = name.clone();
                self.coordinate(&group, move |leases| leases.create(&cell, bytes)).await?
            }
        };
        if !self.is_open(&cell) {
            let path = cell.path.clone();
            blocking(move || clear_ends(&path)).await?;
            wanted.path = cell.path.display().to_string();
            self.create_pool(wanted_pool(self, &wanted)?, false).await?;
        }
        let made = name.clone();
        self.note_in_group(&group, move |member| member.set_making(&made, false)).await?;
        Ok(v1::CreateCellResponse { changed: true, cell: Some(self.describe_cell(&group, &cell)) })
    }

    fn is_open(&self, cell: &Cell) -> bool {
        self.pool_in(cell).is_some_and(|known| known.failure().is_none())
    }

    /// Takes a cell, from a host that is fenced before if that is asked for, and opens its pool.
    pub(super) async fn take_cell(
        &self,
        asked: v1::TakeCellRequest,
    ) -> Result<v1::TakeCellResponse, Error> {
        let (group, name) = (self.group(&asked.group)?, cell_name(&asked.name)?);
        let _one = group.calls.lock().await;
        self.join_group(&group).await?;
        let found = self.find_cell(&group, &name).await?;
        let found = found.ok_or_else(|| Error::not_found("cell", name.as_str()))?;
        self.refuse_other_pool(&name, Some(&found))?;
        if found.holder == Holder::This && self.is_open(&found) {
            let cell = Some(self.describe_cell(&group, &found));
            return Ok(v1::TakeCellResponse { cell, ..Default::default() });
        }
        let fenced = match found.holder {
            Holder::Other(host) if asked.fence => {
                self.fence_host(&group, &name, host).await?;
                Some(host)
            }
            // Its lease may have expired, which is no fence (H3).
            Holder::Other(by) => return Err(HostsError::Held { cell: name, by: Some(by) }.into()),
            Holder::This | Holder::NotThis => None,
        };
        let cell = self.acquire_cell(&group, &name, fenced.is_some()).await?;
        let opened = self.open_cell(&group, &cell).await;
        let log_changes = match opened {
            Ok(changes) => changes,
            Err(error) => {
                // One that is being taken from a dead host stays with this one.
                if found.holder == Holder::NotThis && !group.member().is_taking(&name) {
                    let cell = name.clone();
                    let given = self.coordinate(&group, move |leases| leases.release(&cell)).await;
                    if let Err(error) = given {
                        tracing::warn!(cell = %name, %error, "the cell stays with this host");
                    }
                }
                return Err(error);
            }
        };
        let text = format!("cell {name} of volume group {} was taken", shown(&group.name));
        self.events().publish(EventKind::CellTaken, name.as_str(), "", text);
        Ok(v1::TakeCellResponse {
            changed: true,
            cell: Some(self.describe_cell(&group, &cell)),
            fenced_host: fenced.map_or(0, |host| u32::from(host.0)),
            log_changes,
        })
    }

    /// Fences the host that has a cell, as its lease names it, and remembers that the cell is being
    /// taken from it.
    async fn fence_host(
        &self,
        group: &Arc<Group>,
        cell: &CellName,
        host: blockd_hosts::HostNumber,
    ) -> Result<(), Error> {
        let fenced = Arc::clone(group);
        let removed = blocking(move || fenced.fence(host)).await?;
        let text =
            format!("host {host} was kept from the devices of volume group {}", shown(&group.name));
        self.events().publish(EventKind::HostFenced, "", "", text);
        let taken = cell.clone();
        self.note_in_group(group, move |member| {
            member.set_taking(&taken, true);
            removed.into_iter().for_each(|key| member.note_removed(key));
        })
        .await?;
        if removed.is_none() {
            // Another host has fenced it, and may be taking this cell: its lease decides.
            return Ok(());
        }
        let cell = cell.clone();
        self.coordinate(group, move |leases| leases.free(&cell, host)).await
    }

    async fn acquire_cell(
        &self,
        group: &Arc<Group>,
        name: &CellName,
        waits: bool,
    ) -> Result<Cell, Error> {
        let clock = Clock::start();
        loop {
            let cell = name.clone();
            let group = Arc::clone(group);
            let taken = blocking(move || Ok(group.coordinator().acquire(&cell))).await?;
            match taken {
                Err(HostsError::Held { .. }) if waits && clock.elapsed() < LEASE_WAIT => {
                    tokio::time::sleep(LEASE_PAUSE).await;
                }
                other => return Ok(other?),
            }
        }
    }

    /// Opens the pool of a cell that this host has. Gives the changes that were replayed from the
    /// log of a host that was fenced.
    async fn open_cell(&self, group: &Arc<Group>, cell: &Cell) -> Result<u64, Error> {
        if let Some(known) = self.pool_in(cell) {
            // It failed, or a call has closed it.
            if known.state.is_ok() {
                let how = How::Call { force: true };
                self.close_pool(&known.config.name, how).await.map_err(Error::from)?;
            }
            self.forget_pool(&known.config.name).await?;
        }
        let device = cell.path.clone();
        // H4: nothing is read before it.
        let flush = move || File::open(&device)?.sync_all();
        let path = cell.path.clone();
        blocking(move || flush().map_err(|error| Error::file("flush", &path, error))).await?;
        let (config, newest) = self.found_pool(cell.name.as_str(), &cell.path).await?;
        let own = self.node().map_or(0, |node| node.number());
        let mut changes = 0;
        if group.member().is_taking(&cell.name) {
            if !newest.clean && newest.node != own {
                // H7: a loss of power of the host that had it.
                let (taken, dir) = (config.clone(), self.0.options.runtime_dir.clone());
                let recovered =
                    blocking(move || recover(&taken, &dir, own, newest.node, true)).await?;
                changes = recovered.log_changes;
            }
            let name = cell.name.clone();
            self.note_in_group(group, move |member| member.set_taking(&name, false)).await?;
        }
        let _name = self.0.making_pools.lock(cell.name.as_str()).await;
        self.open_found(config, newest.pool_id).await?;
        Ok(changes)
    }

    /// Closes the pool of a cell in order, and gives its lease back (H6).
    pub(super) async fn release_cell(
        &self,
        asked: v1::ReleaseCellRequest,
    ) -> Result<v1::ReleaseCellResponse, Error> {
        let (group, name) = (self.group(&asked.group)?, cell_name(&asked.name)?);
        let _one = group.calls.lock().await;
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
        }
        let cell = name.clone();
        self.coordinate(&group, move |leases| leases.release(&cell)).await?;
        let text = format!("cell {name} of volume group {} was released", shown(&group.name));
        self.events().publish(EventKind::CellReleased, name.as_str(), "", text);
        Ok(v1::ReleaseCellResponse { changed: true, detached_volumes })
    }

    /// Deletes a cell that this host has.
    pub(super) async fn delete_cell(
        &self,
        asked: v1::DeleteCellRequest,
    ) -> Result<v1::DeleteCellResponse, Error> {
        let (group, name) = (self.group(&asked.group)?, cell_name(&asked.name)?);
        let _one = group.calls.lock().await;
        let Some(found) = self.find_cell(&group, &name).await? else {
            return Ok(v1::DeleteCellResponse::default());
        };
        if found.holder != Holder::This {
            return Err(HostsError::NotHeld { cell: name }.into());
        }
        let mut deleted = v1::DeletePoolResponse::default();
        match self.pool_in(&found) {
            Some(known) => {
                let request =
                    v1::DeletePoolRequest { name: known.config.name.clone(), force: asked.force };
                deleted = self.delete_pool(request).await?;
            }
            None => self.refuse_unopened(&group, &found).await?,
        }
        let cell = name.clone();
        self.coordinate(&group, move |leases| leases.remove(&cell)).await?;
        let made = name.clone();
        self.note_in_group(&group, move |member| member.set_making(&made, false)).await?;
        let (deleted_volumes, deleted_snapshots) =
            (deleted.deleted_volumes, deleted.deleted_snapshots);
        Ok(v1::DeleteCellResponse { changed: true, deleted_volumes, deleted_snapshots })
    }

    /// Refuses to delete a cell with a pool in it that is not open: its volumes are not known.
    async fn refuse_unopened(&self, group: &Arc<Group>, cell: &Cell) -> Result<(), Error> {
        let is_begun = group.member().is_making(&cell.name);
        if is_begun || self.found_pool(cell.name.as_str(), &cell.path).await.is_err() {
            return Ok(());
        }
        let problem = "has a pool that is not open: `blockd cell take` opens it";
        Err(Error::in_use(format!("cell {}", cell.name), problem))
    }

    /// Forgets a group of which this host has no cell.
    pub(super) async fn remove_group(&self, name: &str) -> Result<bool, Error> {
        let Some(group) = self.0.groups.get(name) else { return Ok(false) };
        let _one = group.calls.lock().await;
        let is_in = |known: &Known| {
            known.paths().iter().any(|path| group.coordinator().cell_at(path).is_some())
        };
        if let Some(known) = self.known_pools().into_iter().find(is_in) {
            let problem = format!("has cell {}: release it first", shown(&known.config.name));
            return Err(Error::in_use(format!("volume group {}", shown(name)), problem));
        }
        let is_lost = group.member().is_lost();
        // Without its locks a group that was lost can't be asked, and its devices say enough.
        if !is_lost {
            let cells = self.coordinate(&group, |leases| leases.cells()).await?;
            if let Some(held) = cells.iter().find(|cell| cell.holder == Holder::This) {
                let problem = format!("has cell {}: release it first", held.name);
                return Err(Error::in_use(format!("volume group {}", shown(name)), problem));
            }
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
        let changed = !group.member().is_lost();
        let cells = self.drop_cells(&group, "this host's membership is lost").await;
        let (control, lost) = (self.clone(), Arc::clone(&group));
        blocking(move || {
            // What is in flight ends before the loss is reported.
            lost.coordinator().cut_off()?;
            control.0.groups.change(&lost, super::groups::Membership::lose)
        })
        .await?;
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
        let _one = group.calls.lock().await;
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

fn cell_name(text: &str) -> Result<CellName, Error> {
    CellName::parse(text).ok_or_else(|| Error::invalid("name", text, CellName::ALLOWED))
}

/// Overwrites both ends of a new cell's device: its space may have been another cell's, whose
/// superblocks would be found there. Blocks.
fn clear_ends(path: &Path) -> Result<(), Error> {
    let failed = |error| Error::file("clear the ends of", path, error);
    let clear = || {
        let file = File::options().write(true).read(true).open(path)?;
        let end = std::io::Seek::seek(&mut &file, std::io::SeekFrom::End(0))?;
        let zeroes = vec![0; usize::try_from(MARKED_BYTES).unwrap_or(usize::MAX)];
        for at in [0, end.saturating_sub(MARKED_BYTES)] {
            let length = zeroes.len().min(usize::try_from(end - at).unwrap_or(usize::MAX));
            file.write_all_at(&zeroes[..length], at)?;
        }
        file.sync_all()
    };
    clear().map_err(failed)
}
