//! Standby: a volume is attached here while its cell is open on another host. Requests wait, and
//! the first one has that host asked for the cell, which closes it in order and becomes the one on
//! standby (H6, H14, H16 of `docs/HOSTS.md`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockd_api::v1;
use blockd_engine::pool::{PoolHandle, VolumeId};
use blockd_hosts::{Cell, CellName, Holder, HostNumber};
use blockd_mapper::format::catalogue::VolumeKind;
use blockd_media::clock::Clock;
use blockd_media::error::{Error, ErrorKind, shown};
use blockd_media::units::{from_wire, to_wire};
use blockd_serve::ublk::control::DeviceSpec;
use parking_lot::Mutex;
use tonic::Status;

use super::attachments::{Attachment, Record, StandbyRecord};
use super::cells::cell_name;
use super::devices::{AttachWish, FrontEnd, device_error};
use super::groups::Group;
use super::peers::{CALL_LIMIT, within};
use super::{Control, EventKind, Known, blocking, hex};
use crate::config::PoolConfig;

/// A cell stays for at least this long with the host that has fetched it, and that host has as long
/// to take it: two hosts whose clients both write would only hand it to and fro.
const LEAST_STAY: Duration = Duration::from_secs(2);
/// How long a cell whose requests did not end is not parked again for another host.
const BUSY_PAUSE: Duration = Duration::from_mins(1);
/// Between two tries to fetch a cell that clients wait for; at most this, after the first ones.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Cells that clients of this host wait for, and when cells came here.
#[derive(Debug)]
pub(super) struct Standbys {
    clock: Clock,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Pools that are being fetched, and whether they were asked for since.
    fetched: BTreeMap<[u8; 16], bool>,
    /// When each pool in a cell was opened.
    opened: BTreeMap<String, Duration>,
    /// When each was handed over.
    handed: BTreeMap<String, Duration>,
    /// When each could not be, as requests did not end.
    busy: BTreeMap<String, Duration>,
}

impl Default for Standbys {
    fn default() -> Self {
        Self { clock: Clock::start(), state: Mutex::default() }
    }
}

/// An error with its causes, in one line.
#[must_use]
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// The identity of a record's pool.
pub(super) fn pool_id(record: &Record) -> Option<[u8; 16]> {
    let byte = |at: usize| u8::from_str_radix(record.pool_id.get(2 * at..2 * at + 2)?, 16).ok();
    let mut id = [0; 16];
    for (at, part) in id.iter_mut().enumerate() {
        *part = byte(at)?;
    }
    (record.pool_id.len() == 32).then_some(id)
}

/// The error of another host's daemon.
pub(super) fn refused(host: HostNumber, status: &Status) -> Error {
    let problem = match std::error::Error::source(status) {
        // The connection has failed, and not the call.
        Some(cause) => format!("does not answer: {}", with_causes(cause)),
        None => format!("refuses: {}", status.message()),
    };
    Error::in_use(format!("host {host}"), problem)
}

impl Control {
    /// Attaches a volume of a cell, on standby where another host has the cell.
    pub(super) async fn stand_by(
        &self,
        asked: v1::StandByRequest,
    ) -> Result<v1::StandByResponse, Error> {
        let (group, name) = (self.group(&asked.group)?, cell_name(&asked.cell)?);
        let wish = AttachWish {
            read_only: asked.read_only,
            front_end: super::messages::front_end(asked.front_end()),
            ..AttachWish::default()
        };
        let _one = self.lock_cell(&group, &name).await;
        self.join_group(&group).await?;
        let found = self.find_cell(&group, &name).await?;
        let found = found.ok_or_else(|| Error::not_found("cell", name.as_str()))?;
        self.refuse_other_pool(&group, &name, Some(&found))?;
        let changed = match &found.holder {
            Holder::This => {
                let (changed, _) = self.attach_volume(name.as_str(), &asked.volume, wish).await?;
                changed
            }
            Holder::Other(owner) => {
                self.attach_on_standby(&group, &name, owner.host, &asked.volume, wish).await?
            }
            Holder::Free => {
                let problem = "is open on no host: `blockd cell take` opens it";
                return Err(Error::in_use(format!("cell {name}"), problem));
            }
            Holder::Unknown(problem) => {
                let (cell, problem) = (name, problem.clone());
                return Err(blockd_hosts::HostsError::NotKnown { cell, problem }.into());
            }
        };
        let attached = self.0.attachments.get(name.as_str(), &asked.volume);
        let record = attached.map(|one| one.record.clone()).unwrap_or_default();
        let device = record.ublk.and_then(|ublk| ublk.device);
        let export = self.export_name(&record.pool, &record.volume);
        let uris = match record.ublk {
            Some(_) => Vec::new(),
            None => self.0.nbd.read().iter().map(|address| address.uri(&export)).collect(),
        };
        let device = device.map(|number| format!("/dev/ublkb{number}")).unwrap_or_default();
        Ok(v1::StandByResponse { changed, uris, device })
    }

    /// Asks the host that has a cell for its volume, and attaches that. False if it is attached so.
    async fn attach_on_standby(
        &self,
        group: &Arc<Group>,
        cell: &CellName,
        host: HostNumber,
        volume: &str,
        wish: AttachWish,
    ) -> Result<bool, Error> {
        let mut peer = self.peer(group, host).await?;
        let request = v1::DescribeCellRequest { group: group.name.clone(), name: cell.to_string() };
        let described = within(CALL_LIMIT, peer.describe_cell(request)).await;
        let described = described.map_err(|status| refused(host, &status))?;
        let found = described.volumes.into_iter().find(|one| one.name == volume);
        let found = found.ok_or_else(|| Error::not_found("volume", volume))?;
        let broken = |what: &str| Error::Unexpected {
            what: format!("the answer of host {host}"),
            problem: format!("has no {what}"),
        };
        let id: [u8; 16] =
            described.pool_id.as_slice().try_into().map_err(|_| broken("pool's identity"))?;
        let ublk = match self.front_end(&wish)? {
            FrontEnd::Ublk => Some(super::attachments::UblkRecord::default()),
            FrontEnd::Nbd => None,
        };
        let record = Record {
            pool: cell.to_string(),
            volume: volume.to_owned(),
            id: found.id,
            pool_id: hex(&id),
            read_only: wish.read_only || found.read_only,
            ublk,
            standby: Some(StandbyRecord {
                group: group.name.clone(),
                size: from_wire(found.volume_bytes, 0)?,
                block_size: found.block_size,
                extent_size: u64::from(described.extent_size),
                write_cache: described.write_cache,
            }),
        };
        if let Some(present) = self.0.attachments.get(cell.as_str(), volume) {
            let present = &present.record;
            if (present.id, &present.pool_id) == (record.id, &record.pool_id) {
                super::volumes::same_attachment(present, &wish)?;
                return Ok(false);
            }
        }
        self.0.attachments.add(record.clone()).await?;
        if ublk.is_some()
            && let Err(error) = self.make_standby_device(record).await
        {
            let place = (cell.to_string(), volume.to_owned());
            self.0.attachments.remove(vec![place]).await?;
            return Err(error);
        }
        let text = format!("volume {} was attached on standby", shown(volume));
        self.events().publish(EventKind::VolumeAttached, cell.as_str(), volume, text);
        Ok(true)
    }

    /// Adds the block device of a volume on standby, and remembers its number.
    async fn make_standby_device(&self, record: Record) -> Result<(), Error> {
        let spec = super::devices::standby_spec(&record);
        let (Some(devices), Some(spec)) = (self.ublk().map(Arc::clone), spec) else {
            return Ok(());
        };
        let view = blocking(move || devices.attach(&spec).map_err(device_error)).await?;
        let ublk = record.ublk.map(|ublk| super::attachments::UblkRecord {
            device: view.number,
            mark: view.ready_mark,
            ..ublk
        });
        self.0.attachments.add(Record { ublk, ..record }).await
    }

    /// Detaches a volume on standby: how many connections were ended. `None` where there is none.
    pub(super) async fn detach_standby(
        &self,
        pool: &str,
        volume: &str,
        force: bool,
    ) -> Result<Option<usize>, Error> {
        let attached = self.0.attachments.get(pool, volume);
        let Some(attached) = attached.filter(|one| one.waits()) else { return Ok(None) };
        if let (false, Some(id)) = (force, pool_id(&attached.record)) {
            self.refuse_connected(id, VolumeId(attached.record.id), volume)?;
        }
        let closed = self.drop_standby(&attached.record, force).await?;
        let text = format!("volume {} is on standby no more", shown(volume));
        self.events().publish(EventKind::VolumeDetached, pool, volume, text);
        Ok(Some(closed))
    }

    /// The volumes of a cell that this host has open, for another host.
    pub(super) fn describe_open_cell(
        &self,
        asked: &v1::DescribeCellRequest,
    ) -> Result<v1::DescribeCellResponse, Error> {
        let (group, name) = (self.group(&asked.group)?, cell_name(&asked.name)?);
        let handle = self.pool(name.as_str())?;
        if !self.is_cell_of(&handle, &group, &name) {
            return Err(Error::not_found("cell", name.as_str()));
        }
        let volume = |one: blockd_mapper::engine::VolumeSummary| v1::CellVolume {
            read_only: one.kind == VolumeKind::Snapshot,
            volume_bytes: to_wire(one.size),
            block_size: one.block_size,
            id: one.id.0,
            name: one.name,
        };
        Ok(v1::DescribeCellResponse {
            pool_id: handle.id().to_vec(),
            extent_size: u32::try_from(handle.extent_size()).unwrap_or(u32::MAX),
            write_cache: !handle.is_write_through(),
            volumes: handle.mapper().summaries().into_iter().map(volume).collect(),
        })
    }

    fn is_cell_of(&self, handle: &PoolHandle, group: &Group, name: &CellName) -> bool {
        let is_its = |path| group.coordinator().cell_at(path).as_ref() == Some(name);
        handle.devices().iter().any(|device| is_its(&device.path))
    }

    /// Closes a cell in order for another host, while its clients wait (H6). False if this host
    /// does not have it.
    pub(super) async fn hand_over(&self, asked: v1::HandOverCellRequest) -> Result<bool, Error> {
        let (group, name) = (self.group(&asked.group)?, cell_name(&asked.name)?);
        let _one = self.lock_cell(&group, &name).await;
        let found = self.find_cell(&group, &name).await?;
        let mut found = found.ok_or_else(|| Error::not_found("cell", name.as_str()))?;
        let is_former = matches!(&found.holder, Holder::Other(by) if by.host == group.host());
        if found.holder != Holder::This && (!is_former || found.is_new) {
            return Ok(false);
        }
        if self.0.stopping.load(Ordering::SeqCst) {
            return Err(Error::in_use(format!("cell {name}"), "is on a daemon that ends"));
        }
        if is_former {
            // It was not closed at this host's last boot, so that no other host may open it (H6).
            match self.take_back(&group, &found).await? {
                Some(taken) => found = taken,
                None => return Ok(false),
            }
        }
        if asked.only_unused {
            self.refuse_attached(&name)?;
        }
        match self.pool_in(&found) {
            Some(known) if known.is_closed() => {
                self.refuse_unclosed(&found).await?;
                self.leave_waiting(&known.config.name).await?;
                self.forget_but_attachments(&known.config.name).await?;
            }
            Some(known) => {
                self.close_for_another(&group, &found, known, asked.only_unused).await?;
            }
            // It was closed, and is held.
            None => self.refuse_unclosed(&found).await?,
        }
        self.give_back(&group, &name).await?;
        self.note_handed(name.as_str(), true);
        let text = format!(
            "cell {name} of volume group {} was handed over to host {}",
            shown(&group.name),
            asked.host
        );
        self.events().publish(EventKind::CellReleased, name.as_str(), "", text);
        Ok(true)
    }

    /// Refuses a cell with a volume that is attached here, whether or not a client is connected: a
    /// volume is used from its attachment on.
    fn refuse_attached(&self, cell: &CellName) -> Result<(), Error> {
        let attached = self.0.attachments.of_pool(cell.as_str());
        let Some(one) = attached.first() else { return Ok(()) };
        let problem = format!("is in use: its volume {} is attached", shown(&one.record.volume));
        Err(Error::in_use(format!("cell {cell}"), problem))
    }

    /// Has the clients of a pool wait that was closed in order for another host, though that call
    /// failed then. Attachments that `blockd pool close` has ended are removed, as by `blockd cell
    /// release`: they have no clients or devices to wait, and an opening by its cell renews none.
    async fn leave_waiting(&self, pool: &str) -> Result<(), Error> {
        let is_left = |one: &Arc<Attachment>| one.record.standby.is_some() && !one.has_ended();
        let attached = self.0.attachments.of_pool(pool).into_iter();
        let (left, ended): (Vec<_>, Vec<_>) = attached.partition(is_left);
        let places = ended.iter().map(|one| (pool.to_owned(), one.record.volume.clone()));
        self.0.attachments.remove(places.collect()).await?;
        for one in ended {
            let volume = &one.record.volume;
            let text = format!("volume {} was detached", shown(volume));
            self.events().publish(EventKind::VolumeDetached, pool, volume, text);
        }
        left.iter().for_each(|one| one.wait());
        if let Some(id) = left.iter().find_map(|one| pool_id(&one.record)) {
            self.0.data_path.answer_flushes(id).await;
        }
        Ok(())
    }

    async fn close_for_another(
        &self,
        group: &Arc<Group>,
        cell: &Cell,
        known: Known,
        only_unused: bool,
    ) -> Result<(), Error> {
        let pool = known.config.name.clone();
        let _name = self.0.making_pools.lock(&pool).await;
        let handle = self.pool(&pool)?;
        // A pool that serves has ended its takeover, though that may not have been remembered. Once
        // it is closed, the note would keep the cell here, open nowhere.
        self.note_taking(group, &cell.name, None).await?;
        let busy = || {
            let problem = "has requests that do not end, for want of space perhaps: it stays";
            Error::in_use(format!("cell {}", cell.name), problem)
        };
        if self.was_busy(&pool) {
            return Err(busy());
        }
        self.await_stay(&pool).await;
        let all: Vec<_> = handle.mapper().summaries().into_iter().map(|one| one.name).collect();
        let _volumes = self.lock_all(&handle, &all).await;
        // One may have been attached while this waited; none is from here on.
        if only_unused {
            self.refuse_attached(&cell.name)?;
        }
        let attached = self.0.attachments.of_pool(&pool);
        self.refuse_mounted(&handle, &attached).await?;
        for one in &attached {
            let volume = super::volumes::find(&handle, &one.record.volume);
            let volume = volume.filter(|volume| one.record.is_of(&handle, volume.id));
            let Some(volume) = volume else {
                self.drop_standby(&one.record, true).await?;
                continue;
            };
            let standby = StandbyRecord {
                group: group.name.clone(),
                size: volume.size,
                block_size: volume.block_size,
                extent_size: handle.extent_size(),
                write_cache: !handle.is_write_through(),
            };
            // Renamed volumes and older records too: from now on only the record knows them.
            let record =
                Record { pool_id: hex(&handle.id()), standby: Some(standby), ..one.record.clone() };
            self.0.attachments.add(record).await?;
            self.forget_cache(&handle, volume.id).await?;
        }
        let attached = self.0.attachments.of_pool(&pool);
        attached.iter().for_each(|one| one.wait());
        // Before a client that waits from now on asks for it.
        self.note_handed(&pool, true);
        let go_on = || {
            self.note_handed(&pool, false);
            attached.iter().for_each(|one| one.open());
        };
        if !self.0.data_path.stand_by(handle.id()).await {
            go_on();
            self.note_busy(&pool);
            return Err(busy());
        }
        // Since the first look one may have been mounted.
        if let Err(error) = self.refuse_mounted(&handle, &attached).await {
            self.0.data_path.serve(handle.id()).await;
            go_on();
            return Err(error);
        }
        let closed = match self.close_parked(&known, &handle).await {
            // A pool that has failed meanwhile is not closed (H6).
            Ok(()) => self.refuse_unclosed(cell).await,
            Err(error) => Err(error),
        };
        if let Err(error) = closed {
            go_on();
            self.fail_waiting(&handle).await;
            return Err(error);
        }
        self.0.data_path.answer_flushes(handle.id()).await;
        self.forget_but_attachments(&pool).await
    }

    /// Answers the clients of a pool whose close has failed with errors, and not with silence. A
    /// flush that waited for the close would succeed on the pool once that is open again.
    async fn fail_waiting(&self, handle: &PoolHandle) {
        // The pool has failed or is closed: requests of devices fail until it is open again.
        self.0.data_path.serve(handle.id()).await;
        for volume in handle.mapper().summaries() {
            self.0.data_path.close_volume(handle.id(), volume.id).await;
        }
    }

    /// Notes that a cell is being handed over from now on, or stays.
    fn note_handed(&self, pool: &str, is_handed: bool) {
        let standby = &self.0.standby;
        let mut state = standby.state.lock();
        match is_handed {
            true => drop(state.handed.insert(pool.to_owned(), standby.clock.elapsed())),
            false => drop(state.handed.remove(pool)),
        }
    }

    /// Notes that requests to a cell did not end when it was asked for.
    fn note_busy(&self, pool: &str) {
        let standby = &self.0.standby;
        standby.state.lock().busy.insert(pool.to_owned(), standby.clock.elapsed());
    }

    /// Whether that was a moment ago: its clients are not to wait each time that it is asked for.
    fn was_busy(&self, pool: &str) -> bool {
        let standby = &self.0.standby;
        let since = standby.state.lock().busy.get(pool).copied();
        since.is_some_and(|since| standby.clock.elapsed().saturating_sub(since) < BUSY_PAUSE)
    }

    /// Waits until the host that has asked for a cell has had the time to take it.
    async fn await_other(&self, pool: &str) {
        loop {
            let handed = self.0.standby.state.lock().handed.get(pool).copied();
            self.await_turn(handed).await;
            if self.0.standby.state.lock().handed.get(pool).copied() == handed {
                return;
            }
        }
    }

    /// Waits until a cell has been here for long enough.
    async fn await_stay(&self, pool: &str) {
        let opened = self.0.standby.state.lock().opened.get(pool).copied();
        self.await_turn(opened).await;
    }

    async fn await_turn(&self, since: Option<Duration>) {
        let Some(since) = since else { return };
        let passed = self.0.standby.clock.elapsed().saturating_sub(since);
        tokio::time::sleep(LEAST_STAY.saturating_sub(passed)).await;
    }

    /// Refuses devices with a cache of their own above them: what another host writes would not be
    /// seen there (H14).
    async fn refuse_mounted(
        &self,
        handle: &PoolHandle,
        attached: &[Arc<Attachment>],
    ) -> Result<(), Error> {
        let Some(devices) = self.ublk().map(Arc::clone) else { return Ok(()) };
        let (pool, with_device) =
            (handle.id(), attached.iter().filter(|one| one.record.ublk.is_some()));
        let ids: Vec<_> = with_device.map(|one| VolumeId(one.record.id)).collect();
        blocking(move || {
            ids.iter()
                .try_for_each(|id| devices.check_not_mounted(&pool, *id))
                .map_err(device_error)
        })
        .await
    }

    /// A pool was opened: where it is a cell's, clients on standby go on.
    pub(super) async fn serve_waiting(&self, name: &str) {
        let Ok(handle) = self.pool(name) else { return };
        let on_standby = |one: &Arc<Attachment>| one.record.standby.is_some();
        if !self.0.attachments.of_pool(name).iter().any(on_standby) {
            return;
        }
        let standby = &self.0.standby;
        standby.state.lock().opened.insert(name.to_owned(), standby.clock.elapsed());
        self.note_handed(name, false);
        for one in self.0.attachments.of_pool(name).into_iter().filter(on_standby) {
            let followed = match one.record.name_now(&handle) {
                Some(now) => self.follow_renamed(&one.record, now).await,
                // It was deleted on the other host.
                None => self.drop_standby(&one.record, true).await.map(drop),
            };
            if let Err(error) = followed {
                tracing::warn!(volume = one.record.volume, %error, "an attachment is out of date");
            }
        }
        self.0.data_path.serve(handle.id()).await;
        for one in self.0.attachments.of_pool(name).into_iter().filter(on_standby) {
            let record = &one.record;
            one.open();
            let volume = super::volumes::find(&handle, &record.volume);
            let Some((volume, standby)) = volume.zip(record.standby.as_ref()) else { continue };
            if volume.size != standby.size {
                // It was resized on the other host.
                let shown = self.resize_device(&handle, volume.id, volume.size).await;
                if let Err(error) = shown {
                    tracing::warn!(volume = record.volume, %error, "its device has the old size");
                }
            }
        }
    }

    /// Has an attachment follow its volume, which was renamed on the other host.
    async fn follow_renamed(&self, record: &Record, name: String) -> Result<(), Error> {
        if name == record.volume {
            return Ok(());
        }
        let place = (record.pool.clone(), record.volume.clone());
        self.0.attachments.rename(place, VolumeId(record.id), name).await.map(drop)
    }

    /// Fetches cells that clients of this host wait for. To be run for as long as the daemon is.
    pub async fn fetch_wanted_cells(self) {
        let demands = self.0.data_path.demands();
        loop {
            let pool = demands.next().await;
            {
                let mut state = self.0.standby.state.lock();
                if let Some(again) = state.fetched.get_mut(&pool) {
                    *again = true;
                    continue;
                }
                state.fetched.insert(pool, false);
            }
            let control = self.clone();
            tokio::spawn(async move { control.fetch_while_asked(pool).await });
        }
    }

    /// Fetches a cell, and again if it was asked for meanwhile.
    async fn fetch_while_asked(&self, pool: [u8; 16]) {
        loop {
            self.fetch_cell(pool).await;
            let mut state = self.0.standby.state.lock();
            // It may have been asked for since.
            if !state.fetched.get_mut(&pool).is_some_and(std::mem::take) {
                state.fetched.remove(&pool);
                return;
            }
        }
    }

    /// A client asks for a pool that is open, as it did at the last moment before. Not while it is
    /// handed over: then it asks again.
    async fn serve_open(&self, record: &Record, pool: [u8; 16]) {
        let Some(standby) = record.standby.as_ref() else { return };
        let (Ok(group), Ok(name)) = (self.group(&standby.group), cell_name(&record.pool)) else {
            return;
        };
        let _one = self.lock_cell(&group, &name).await;
        if self.pool(&record.pool).is_ok_and(|handle| handle.id() == pool) {
            self.0.data_path.serve(pool).await;
        }
    }

    /// Asks for a cell until it is here (H16).
    async fn fetch_cell(&self, pool: [u8; 16]) {
        let (id, mut pause, mut reported) = (hex(&pool), FIRST_PAUSE, String::new());
        while !self.0.stopping.load(Ordering::SeqCst) {
            let mut all = self.0.attachments.list();
            all.retain(|one| one.record.pool_id == id);
            let Some(waiting) = all.iter().find(|one| one.waits()) else {
                if let Some(one) = all.first() {
                    self.serve_open(&one.record, pool).await;
                }
                return;
            };
            let record = &waiting.record;
            // The host that has asked for it comes first.
            self.await_other(&record.pool).await;
            let Some(standby) = record.standby.clone() else { return };
            let request = v1::TakeCellRequest {
                group: standby.group.clone(),
                name: record.pool.clone(),
                handover: true,
                ..Default::default()
            };
            let problem = match self.take_cell(request).await {
                Ok(_) if !waiting.waits() => continue,
                Ok(_) => "its pool is open, and does not have the volume".to_owned(),
                Err(error) => {
                    // Also of a file of this host or the device of a disk, which may come back.
                    let is_missing = error.kind() == ErrorKind::NotFound;
                    if is_missing && self.is_gone(&standby.group, &record.pool).await {
                        return self.give_up(&all, &error).await;
                    }
                    error.to_string()
                }
            };
            if problem != reported {
                let text = format!("clients wait for cell {}: {problem}", record.pool);
                self.events().publish(EventKind::CellAwaited, &record.pool, "", text);
                reported = problem;
            }
            tokio::time::sleep(pause).await;
            pause = pause.saturating_mul(2).min(LONGEST_PAUSE);
        }
    }

    /// Whether a cell was deleted, as its group says, which is there and answers.
    async fn is_gone(&self, group: &str, cell: &str) -> bool {
        let (Ok(group), Ok(name)) = (self.group(group), cell_name(cell)) else { return false };
        // A folder that is not there has no cell either. One whose file system is not mounted is
        // not joined, and no cell is looked for in it.
        let found = self.coordinate(&group, move |leases| {
            leases.space()?;
            leases.cell(&name)
        });
        matches!(found.await, Ok(None))
    }

    /// The cell of these attachments is gone: its clients get errors.
    async fn give_up(&self, attached: &[Arc<Attachment>], error: &Error) {
        for one in attached {
            let (pool, volume) = (&one.record.pool, &one.record.volume);
            let text = format!("volume {} is on standby no more: {error}", shown(volume));
            self.events().publish(EventKind::VolumeDetached, pool, volume, text);
            if let Err(error) = self.drop_standby(&one.record, true).await {
                tracing::warn!(pool, volume, %error, "an attachment stays");
            }
        }
    }

    /// Ends an attachment on standby, with its device. How many connections were ended.
    async fn drop_standby(&self, record: &Record, force: bool) -> Result<usize, Error> {
        self.drop_record(record, super::devices::standby_spec(record), force).await
    }

    /// Ends an attachment whose pool is not open here, with this device. How many connections were
    /// ended.
    pub(super) async fn drop_record(
        &self,
        record: &Record,
        device: Option<DeviceSpec>,
        force: bool,
    ) -> Result<usize, Error> {
        if let (Some(devices), Some(spec)) = (self.ublk().map(Arc::clone), device) {
            let number = record.ublk.and_then(|ublk| ublk.device);
            blocking(move || devices.detach(&spec, number, force).map_err(device_error)).await?;
        }
        let place = (record.pool.clone(), record.volume.clone());
        self.0.attachments.remove(vec![place]).await?;
        match pool_id(record) {
            Some(id) => Ok(self.0.data_path.close_volume(id, VolumeId(record.id)).await),
            None => Ok(0),
        }
    }

    /// Refuses to open a pool that is not in the cell of its name for which volumes wait here.
    pub(super) fn refuse_awaited(&self, config: &PoolConfig) -> Result<(), Error> {
        let cell = self.0.groups.cell_at(&config.devices[0].path);
        let own = cell.as_ref().filter(|(_, cell)| cell.as_str() == config.name);
        self.refuse_awaited_name(&config.name, own.map(|(group, _)| group.name.as_str()))
    }

    /// Refuses a pool by whose name volumes of a cell are on standby here, unless it is that of
    /// this group: they would be taken for volumes that were deleted on the other host.
    pub(super) fn refuse_awaited_name(&self, pool: &str, group: Option<&str>) -> Result<(), Error> {
        let attached = self.0.attachments.of_pool(pool);
        let mut groups = attached.iter().filter_map(|one| one.record.standby.as_ref());
        let Some(other) = groups.find(|one| Some(one.group.as_str()) != group) else {
            return Ok(());
        };
        let cell = shown(format!("{}/{pool}", other.group));
        let problem = format!(
            "is the name of cell {cell}, whose volumes are on standby here: detach them, or use \
             another name"
        );
        Err(Error::in_use(format!("pool {}", shown(pool)), problem))
    }

    /// Volumes of a cell that are attached here and wait for it.
    pub(super) fn on_standby(&self, cell: &CellName) -> Vec<String> {
        let attached = self.0.attachments.of_pool(cell.as_str()).into_iter();
        attached.filter(|one| one.waits()).map(|one| one.record.volume.clone()).collect()
    }
}
