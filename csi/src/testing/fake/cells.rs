//! Volume groups of the daemon in memory: cells that are here, or on another host that uses them.

use std::collections::BTreeMap;

use blockd_api::v1::{self, CellState, ErrorKind, VolumeKind};
use tonic::{Code, Status};

use super::state::{absent, refused};
use super::{Fake, State};

/// This daemon's number in its groups.
const HOST: u32 = 1;

/// A group.
#[derive(Clone, Default)]
pub(crate) struct Group {
    pub(crate) free: i64,
    pub(crate) failure: String,
    pub(crate) cells: BTreeMap<String, Cell>,
}

/// A cell, which is in the hands of a host or of none.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Cell {
    pub(crate) bytes: i64,
    /// 0: none.
    pub(crate) holder: u32,
    /// A volume of it is attached on the other host.
    pub(crate) is_used: bool,
    /// The daemon of that host does not answer.
    pub(crate) is_silent: bool,
    /// An interrupted call has begun it, and it has no pool.
    pub(crate) is_begun: bool,
    /// The volume that is attached here on standby.
    pub(crate) standby: Option<String>,
}

/// Another node, which does this with all cells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Rival {
    Deletes,
    /// Takes them and uses their volumes.
    Takes,
}

impl Fake {
    /// Another node works on the cells just before the next call of that name.
    pub(crate) fn before(&self, call: &'static str, rival: Rival) {
        self.0.lock().before = Some((call, rival));
    }

    /// Has a group with this free space, in bytes.
    pub(crate) fn add_group(&self, name: &str, free: i64) {
        let group = Group { free, ..Group::default() };
        self.0.lock().groups.insert(name.to_owned(), group);
    }

    pub(crate) fn cells(&self, group: &str) -> BTreeMap<String, Cell> {
        self.0.lock().groups[group].cells.clone()
    }

    /// Changes a group behind the plugin's back.
    pub(crate) fn change_group(&self, name: &str, change: impl FnOnce(&mut Group)) {
        change(self.0.lock().groups.get_mut(name).unwrap());
    }

    /// Moves a cell to another host, or to none.
    pub(crate) fn move_cell(&self, group: &str, name: &str, holder: u32) {
        let mut state = self.0.lock();
        state.pools.retain(|pool| pool.0 != name);
        let cells = &mut state.groups.get_mut(group).unwrap().cells;
        cells.get_mut(name).unwrap().holder = holder;
    }
}

fn in_use(message: String) -> Status {
    refused(ErrorKind::InUse, Code::FailedPrecondition, message)
}

impl State {
    pub(super) fn act_as(&mut self, rival: Rival) {
        for group in self.groups.values_mut() {
            self.pools.retain(|pool| !group.cells.contains_key(&pool.0));
            match rival {
                Rival::Deletes => {
                    self.volumes.retain(|(pool, _), _| !group.cells.contains_key(pool));
                    group.cells.clear();
                }
                Rival::Takes => group.cells.values_mut().for_each(|cell| {
                    (cell.holder, cell.is_used) = (HOST + 1, true);
                }),
            }
        }
    }

    fn group(&mut self, name: &str) -> Result<&mut Group, Status> {
        let group = self.groups.get_mut(name).ok_or_else(|| absent(name))?;
        match group.failure.is_empty() {
            true => Ok(group),
            false => Err(in_use(group.failure.clone())),
        }
    }

    /// The volume of a cell that is on standby here.
    pub(super) fn on_standby(&self, pool: &str, name: &str) -> Option<v1::Volume> {
        let cell = self.groups.values().find_map(|group| group.cells.get(pool))?;
        let is_it = cell.holder != HOST && cell.standby.as_deref() == Some(name);
        is_it.then(|| v1::Volume {
            name: name.to_owned(),
            pool: pool.to_owned(),
            kind: VolumeKind::Volume.into(),
            attached: true,
            standby: true,
            ..Default::default()
        })
    }

    pub(super) fn groups(
        &mut self,
        asked: v1::ListVolumeGroupsRequest,
    ) -> Result<v1::ListVolumeGroupsResponse, Status> {
        if !asked.name.is_empty() && !self.groups.contains_key(&asked.name) {
            return Err(absent(&asked.name));
        }
        let all = self.groups.iter();
        let wanted = all.filter(|(name, _)| asked.name.is_empty() || **name == asked.name);
        let describe = |(name, group): (&String, &Group)| {
            let listed = group.cells.iter();
            let listed = listed.filter(|(cell, _)| asked.cell.is_empty() || **cell == asked.cell);
            let listed = listed.filter(|_| !asked.brief);
            let cells = listed.map(|(cell, it)| v1::Cell {
                name: cell.clone(),
                group: name.clone(),
                device_bytes: it.bytes,
                holder: it.holder,
                state: match it.holder {
                    0 => CellState::Free,
                    HOST if it.is_begun || self.failed.contains(cell) => CellState::Held,
                    HOST => CellState::Open,
                    _ => CellState::Elsewhere,
                }
                .into(),
                ..Default::default()
            });
            let cells = if group.failure.is_empty() { cells.collect() } else { Vec::new() };
            let (name, failure) = (name.clone(), group.failure.clone());
            let (free_bytes, host) = (group.free, HOST);
            v1::VolumeGroup { name, failure, free_bytes, host, cells, ..Default::default() }
        };
        Ok(v1::ListVolumeGroupsResponse { groups: wanted.map(describe).collect() })
    }

    pub(super) fn create_cell(
        &mut self,
        asked: v1::CreateCellRequest,
    ) -> Result<v1::CreateCellResponse, Status> {
        let group = self.group(&asked.group)?;
        match group.cells.get_mut(&asked.name) {
            Some(cell) if cell.is_begun && cell.holder <= HOST => {
                (cell.is_begun, cell.holder) = (false, HOST);
            }
            Some(cell) if cell.holder == HOST => return Ok(v1::CreateCellResponse::default()),
            Some(_) => return Err(in_use(format!("cell {} exists", asked.name))),
            None if asked.only_begun => return Err(absent(&asked.name)),
            None if asked.device_bytes > group.free => {
                let message = format!("volume group {} is full", asked.group);
                return Err(refused(ErrorKind::NoSpace, Code::ResourceExhausted, message));
            }
            None => {
                group.free -= asked.device_bytes;
                let (bytes, holder) = (asked.device_bytes, HOST);
                group.cells.insert(asked.name.clone(), Cell { bytes, holder, ..Cell::default() });
            }
        }
        self.pools.push((asked.name, asked.device_bytes));
        Ok(v1::CreateCellResponse { changed: true, ..Default::default() })
    }

    pub(super) fn take_cell(
        &mut self,
        asked: v1::TakeCellRequest,
    ) -> Result<v1::TakeCellResponse, Status> {
        assert!(asked.handover && asked.only_unused && !asked.fence, "{asked:?}");
        let group = self.group(&asked.group)?;
        let cell = group.cells.get_mut(&asked.name).ok_or_else(|| absent(&asked.name))?;
        let host = cell.holder;
        match host {
            _ if cell.is_begun => {
                return Err(in_use(format!("cell {} was not made to the end", asked.name)));
            }
            HOST => return Ok(v1::TakeCellResponse::default()),
            0 => {}
            _ if cell.is_silent => {
                let group = &asked.group;
                let text = format!("host {host} of volume group {group} does not answer at x");
                return Err(in_use(text));
            }
            _ if cell.is_used => {
                let name = &asked.name;
                return Err(in_use(format!("host {host} refuses: cell {name} is in use")));
            }
            _ => {}
        }
        cell.holder = HOST;
        let bytes = cell.bytes;
        self.pools.push((asked.name, bytes));
        Ok(v1::TakeCellResponse { changed: true, former_host: host, ..Default::default() })
    }

    pub(super) fn stand_by(
        &mut self,
        asked: v1::StandByRequest,
    ) -> Result<v1::StandByResponse, Status> {
        let group = self.group(&asked.group)?;
        let cell = group.cells.get_mut(&asked.cell).ok_or_else(|| absent(&asked.cell))?;
        assert!(cell.holder > HOST, "a cell of another host is stood by for");
        let changed = cell.standby.replace(asked.volume).is_none();
        Ok(v1::StandByResponse { changed, ..Default::default() })
    }

    pub(super) fn delete_cell(
        &mut self,
        asked: v1::DeleteCellRequest,
    ) -> Result<v1::DeleteCellResponse, Status> {
        let has_volumes = self.volumes.keys().any(|(pool, _)| *pool == asked.name);
        let group = self.group(&asked.group)?;
        let Some(cell) = group.cells.get(&asked.name) else {
            return Ok(v1::DeleteCellResponse::default());
        };
        if cell.holder != HOST || has_volumes && !asked.force {
            return Err(in_use(format!("cell {} is not held, or has volumes", asked.name)));
        }
        group.free += cell.bytes;
        group.cells.remove(&asked.name);
        self.pools.retain(|pool| pool.0 != asked.name);
        Ok(v1::DeleteCellResponse { changed: true, ..Default::default() })
    }
}
