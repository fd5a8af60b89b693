//! Volumes as block devices of this machine.

use std::sync::Arc;
use std::time::Duration;

use blockd_api::v1;
use blockd_engine::pool::{PoolHandle, VolumeId};
use blockd_mapper::engine::VolumeSummary;
use blockd_media::error::{Error, shown};
use blockd_serve::ublk::control::{
    CONTROL_PATH, DeviceError, DeviceSpec, DeviceView, Devices, Recovered,
};
use tokio::task::JoinSet;

use crate::config::MAX_UBLK_DEPTH;

use super::attachments::{Record, UblkRecord};
use super::state_file::StateFile;
use super::volumes::find;
use super::{Control, EventKind, blocking};

/// How clients are to reach a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FrontEnd {
    Ublk,
    Nbd,
}

/// The request of an attachment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct AttachWish {
    pub(super) read_only: bool,
    /// `None` for the one that fits.
    pub(super) front_end: Option<FrontEnd>,
    /// 0: as configured.
    pub(super) queues: u32,
    /// 0: as configured.
    pub(super) depth: u32,
}

/// Blocks larger than this need buffers that are aligned to more than the kernel promises for the
/// pages of a request, and libublk cannot request that.
const ZERO_COPY_BLOCK: u32 = 512;

/// How long it may take to write out what the kernel's cache holds of a device: some GiB to a slow
/// disk. Writes that wait for space would take for ever.
const CACHE_LIMIT: Duration = Duration::from_secs(25);

/// The error of a device as a user gets it.
pub fn device_error(error: DeviceError) -> Error {
    match error {
        DeviceError::NoDriver => {
            let problem = "is not there: load the kernel's driver with `modprobe ublk_drv`";
            Error::in_use(CONTROL_PATH, problem)
        }
        DeviceError::Refused { command, device, source } => Error::Unexpected {
            what: format!("{command} of {device}"),
            problem: source.to_string(),
        },
        DeviceError::InUse { ref device, ref users } => {
            let users: Vec<String> = users.iter().map(ToString::to_string).collect();
            let problem = format!("is {}: end that first, or use force", users.join(", "));
            Error::in_use(device.clone(), problem)
        }
        DeviceError::Io { what, source } => Error::io(what, source),
        DeviceError::Queue { .. } => {
            Error::Unexpected { what: "ublk".to_owned(), problem: error.to_string() }
        }
        error => {
            let text = error.to_string();
            let (what, problem) = text.split_once(' ').unwrap_or(("ublk", text.as_str()));
            Error::in_use(what, problem)
        }
    }
}

/// The identity of this daemon's state folder, by which it knows its devices in the kernel. Drawn
/// at the first start.
pub fn device_owner(state_dir: &std::path::Path) -> Result<u32, Error> {
    let file = StateFile::new(state_dir, "ublk-owner.json");
    let known: Vec<u32> = file.read()?;
    if let Some(owner) = known.first() {
        return Ok(*owner);
    }
    let owner = fastrand::u32(1..);
    file.write(vec![owner])?;
    Ok(owner)
}

impl Control {
    /// Attaches volumes as block devices from now on.
    pub fn set_ublk(&self, devices: Arc<Devices>) {
        let _ = self.0.ublk.set(devices);
    }

    /// Block devices, where they are on.
    #[must_use]
    pub fn ublk(&self) -> Option<&Arc<Devices>> {
        self.0.ublk.get()
    }

    /// How a volume is to be reached that is not attached yet.
    pub(super) fn front_end(&self, wish: &AttachWish) -> Result<FrontEnd, Error> {
        let is_there = self.ublk().is_some_and(|ublk| ublk.driver_is_there());
        let front_end = match wish.front_end {
            Some(FrontEnd::Ublk) if self.ublk().is_none() => {
                let allowed = "nbd, as ublk.enabled is off in the configuration";
                return Err(Error::invalid("front_end", "ublk", allowed));
            }
            Some(FrontEnd::Ublk) if !is_there => return Err(device_error(DeviceError::NoDriver)),
            Some(front_end) => front_end,
            None if is_there => FrontEnd::Ublk,
            None => FrontEnd::Nbd,
        };
        let most = self.ublk().map_or(1, |ublk| ublk.most_queues());
        let most_depth = u32::try_from(MAX_UBLK_DEPTH).unwrap_or(u32::MAX);
        for (field, value, most, of) in [
            ("queue_count", wish.queues, u32::try_from(most).unwrap_or(1), ", the workers"),
            ("queue_depth", wish.depth, most_depth, ""),
        ] {
            if value != 0 && front_end == FrontEnd::Nbd {
                let allowed = "left out for NBD, which has no queues";
                return Err(Error::invalid(field, value, allowed));
            }
            if value > most {
                let allowed = format!("from 1 to {most}{of}, or 0 for what is configured");
                return Err(Error::invalid(field, value, allowed));
            }
        }
        Ok(front_end)
    }

    /// Makes a volume's block device and remembers it.
    pub(super) async fn attach_device(
        &self,
        pool: &PoolHandle,
        volume: &VolumeSummary,
        record: Record,
        wish: &AttachWish,
    ) -> Result<DeviceView, Error> {
        let Some(devices) = self.ublk().map(Arc::clone) else {
            return Err(device_error(DeviceError::NoDriver));
        };
        let small = |value: u32| u16::try_from(value).unwrap_or(u16::MAX);
        let (queues, depth) = (small(wish.queues), small(wish.depth));
        let ublk = UblkRecord { device: None, queues, depth, mark: None };
        let intent = Record { ublk: Some(ublk), ..record };
        let spec = spec(pool, volume, &intent);
        self.0.attachments.add(intent.clone()).await?;
        let made = blocking(move || devices.attach(&spec).map_err(device_error)).await;
        let noted = match &made {
            Ok(view) => {
                let (device, mark) = (view.number, view.ready_mark);
                let ublk = Some(UblkRecord { device, mark, ..ublk });
                self.0.attachments.add(Record { ublk, ..intent }).await
            }
            Err(_) => Ok(()),
        };
        match noted.and(made) {
            Ok(view) => Ok(view),
            Err(error) => Err(self.undo_device(pool, volume, error).await),
        }
    }

    /// Removes the device and the record of an attachment that failed. Returns its error, and what
    /// is left.
    async fn undo_device(&self, pool: &PoolHandle, volume: &VolumeSummary, error: Error) -> Error {
        let place = (pool.name().to_owned(), volume.name.clone());
        let undone = match self.detach_device(pool, volume, true).await {
            Ok(()) => self.0.attachments.remove(vec![place]).await.map(drop),
            failed => failed,
        };
        match undone {
            Ok(()) => error,
            Err(problem) => {
                let name = shown(&volume.name);
                error.with_note(&format!("volume {name} stays attached: {problem}"))
            }
        }
    }

    /// Takes a volume's block device away, if it has one.
    pub(super) async fn detach_device(
        &self,
        pool: &PoolHandle,
        volume: &VolumeSummary,
        force: bool,
    ) -> Result<(), Error> {
        let Some(attachment) = self.0.attachments.get(pool.name(), &volume.name) else {
            return Ok(());
        };
        let (Some(ublk), Some(devices)) = (attachment.record.ublk, self.ublk().map(Arc::clone))
        else {
            return Ok(());
        };
        let spec = spec(pool, volume, &attachment.record);
        blocking(move || devices.detach(&spec, ublk.device, force).map_err(device_error)).await?;
        Ok(())
    }

    /// Shows a volume's size in its block device. False if there is a device that can't.
    pub(super) async fn resize_device(
        &self,
        pool: &PoolHandle,
        volume: VolumeId,
        bytes: u64,
    ) -> Result<bool, Error> {
        let Some(devices) = self.ublk().map(Arc::clone) else { return Ok(true) };
        let id = pool.id();
        if devices.view(&id, volume).is_none_or(|view| view.path.is_none()) {
            return Ok(true);
        }
        blocking(move || devices.resize(&id, volume, bytes).map_err(device_error)).await
    }

    /// Writes back the kernel's cache of a volume's block device, and drops it as far as it is not
    /// in use.
    pub(super) async fn forget_cache(
        &self,
        pool: &PoolHandle,
        volume: VolumeId,
    ) -> Result<(), Error> {
        let view = self.ublk().and_then(|devices| devices.view(&pool.id(), volume));
        let Some(path) = view.and_then(|view| view.path) else { return Ok(()) };
        let what = path.display().to_string();
        let forget = blocking(move || {
            let what = || format!("writing out the cache of {}", path.display());
            let file = std::fs::File::open(&path).map_err(|source| Error::io(what(), source))?;
            file.sync_all().map_err(|source| Error::io(what(), source))?;
            let advice = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED;
            nix::fcntl::posix_fadvise(&file, 0, 0, advice)
                .map_err(|error| Error::io(what(), error.into()))
        });
        tokio::time::timeout(CACHE_LIMIT, forget).await.unwrap_or_else(|_| {
            let problem = format!("has not written its cache out within {CACHE_LIMIT:?}");
            Err(Error::in_use(what, problem))
        })
    }

    /// The block device of a volume that is attached so.
    pub(super) fn described_device(&self, pool: &[u8; 16], volume: VolumeId) -> DeviceView {
        let Some(devices) = self.ublk() else {
            let problem = Some("ublk.enabled is off in the configuration".to_owned());
            return DeviceView { problem, ..DeviceView::default() };
        };
        devices.view(pool, volume).unwrap_or_default()
    }

    /// Serves block devices of attached volumes that are not served: of one pool or all, of one
    /// volume or all. How many are served now that were not.
    pub(super) async fn recover(&self, pool: &str, name: &str) -> Result<usize, Error> {
        let is_meant = |record: &Record| {
            (pool.is_empty() || record.pool == pool) && (name.is_empty() || record.volume == name)
        };
        self.recover_these(is_meant).await
    }

    async fn recover_these(&self, is_meant: impl Fn(&Record) -> bool) -> Result<usize, Error> {
        let mut recovering = JoinSet::new();
        for attachment in self.0.attachments.list() {
            let record = attachment.record.clone();
            if is_meant(&record) && record.ublk.is_some() {
                let control = self.clone();
                recovering.spawn(async move { control.recover_one(record).await });
            }
        }
        let done = recovering.join_all().await;
        done.into_iter().try_fold(0, |sum, one| Ok(sum + usize::from(one?)))
    }

    /// True if the volume's device is served now and was not.
    pub(super) async fn recover_one(&self, record: Record) -> Result<bool, Error> {
        let Ok(pool) = self.pool(&record.pool) else { return self.recover_standby(record).await };
        let _guard = self.lock(&pool, &record.volume).await;
        // Since it was looked up, it may have been detached: a device made now would be an orphan.
        let present = self.0.attachments.get(pool.name(), &record.volume);
        let Some(present) = present.filter(|present| present.record.id == record.id) else {
            return Ok(false);
        };
        let record = present.record.clone();
        let Ok(pool) = self.pool(&record.pool) else { return Ok(false) };
        let volume = find(&pool, &record.volume).filter(|volume| record.is_of(&pool, volume.id));
        let (Some(volume), Some(ublk)) = (volume, record.ublk) else { return Ok(false) };
        let failed = |problem: String| {
            let text = format!("the device of volume {} fails: {problem}", shown(&record.volume));
            let (pool, volume) = (&record.pool, &record.volume);
            self.events().publish(EventKind::DeviceFailed, pool, volume, text);
        };
        let Some(devices) = self.ublk().map(Arc::clone) else {
            failed("ublk.enabled is off in the configuration".to_owned());
            return Ok(false);
        };
        let spec = spec(&pool, &volume, &record);
        let work = blocking(move || Ok(devices.recover(&spec, ublk.device))).await?;
        let (view, how) = match work {
            Ok(done) => done,
            Err(error) => {
                failed(error.to_string());
                return Ok(false);
            }
        };
        if let Err(problem) = self.remember_device(&record, &view).await {
            failed(problem);
        }
        if how == Recovered::Served {
            return Ok(false);
        }
        let path = view.path.unwrap_or_default();
        let how = match how {
            Recovered::Continued => "goes on where it was",
            Recovered::Added | Recovered::Served => "was added again",
        };
        let text = format!("{} of volume {} {how}", path.display(), shown(&record.volume));
        let (pool, volume) = (&record.pool, &record.volume);
        self.events().publish(EventKind::DeviceRecovered, pool, volume, text);
        Ok(true)
    }

    /// The same of a volume whose cell is on another host.
    async fn recover_standby(&self, record: Record) -> Result<bool, Error> {
        let waits = |one: &Arc<super::attachments::Attachment>| one.waits();
        let attached = self.0.attachments.get(&record.pool, &record.volume);
        let spec = attached.filter(waits).and_then(|one| standby_spec(&one.record));
        let (Some(spec), Some(devices)) = (spec, self.ublk().map(Arc::clone)) else {
            return Ok(false);
        };
        let failed = |problem: String| {
            let name = shown(&record.volume);
            let text = format!("the device of volume {name} on standby fails: {problem}");
            let (pool, volume) = (&record.pool, &record.volume);
            self.events().publish(EventKind::DeviceFailed, pool, volume, text);
        };
        let number = record.ublk.and_then(|ublk| ublk.device);
        match blocking(move || Ok(devices.recover(&spec, number))).await? {
            Ok((view, how)) => {
                if let Err(problem) = self.remember_device(&record, &view).await {
                    failed(problem);
                }
                Ok(how != Recovered::Served)
            }
            Err(error) => {
                failed(error.to_string());
                Ok(false)
            }
        }
    }

    /// Remembers the number and the mark of a device that is served, or returns the problem. Where
    /// it can't be remembered, the next daemon finds it as long as its number is the same.
    async fn remember_device(&self, record: &Record, view: &DeviceView) -> Result<(), String> {
        let (device, mark) = (view.number, view.ready_mark);
        let ublk = record.ublk.map(|ublk| UblkRecord { device, mark, ..ublk });
        if ublk == record.ublk {
            return Ok(());
        }
        let added = self.0.attachments.add(Record { ublk, ..record.clone() }).await;
        added
            .map_err(|error| format!("it is served, and can't be remembered as it is now: {error}"))
    }

    /// Serves devices that could not be served before, if there are any. One that was removed by a
    /// command stays removed, also where that had ended with an error before.
    pub async fn recover_again(&self) -> Result<usize, Error> {
        let Some(devices) = self.ublk().map(Arc::clone) else { return Ok(0) };
        let remembered = self.0.attachments.device_count();
        if devices.served() >= remembered || !devices.driver_is_there() {
            return Ok(0);
        }
        let is_removed = |record: &Record| {
            let spec = recorded_spec(record);
            let view = spec.and_then(|spec| devices.view(&spec.pool, spec.volume));
            view.is_some_and(|view| view.is_removed)
        };
        self.recover_these(|record| !is_removed(record)).await
    }

    /// After the start: serves remembered devices, then deletes those without a record. A failure
    /// is reported as an event and in the list of volumes, and does not keep others from being
    /// served.
    pub async fn recover_devices(&self) -> Result<(), Error> {
        self.recover("", "").await?;
        let Some(devices) = self.ublk().map(Arc::clone) else { return Ok(()) };
        if !devices.driver_is_there() {
            return Ok(());
        }
        let list = self.0.attachments.list();
        let remembered = self.0.attachments.devices();
        let cleaned = blocking(move || {
            let own: Vec<(u32, &str, &str)> = list
                .iter()
                .map(|one| &one.record)
                .filter_map(|one| Some((one.ublk?.device?, one.pool.as_str(), one.volume.as_str())))
                .collect();
            devices.clean_links(&own);
            Ok(devices.clean(&remembered))
        })
        .await?;
        for (number, result) in cleaned {
            let text = match result {
                Ok(()) => format!("/dev/ublkb{number} was ours, of no volume, and is deleted"),
                Err(error) => {
                    format!("/dev/ublkb{number} is ours, of no volume, and stays: {error}")
                }
            };
            self.events().publish(EventKind::DeviceCleaned, "", "", text);
        }
        if let Some(devices) = self.ublk() {
            devices.make_ready();
        }
        Ok(())
    }

    /// Deletes the block devices that no volume has, before the daemon ends.
    pub async fn end_ready_devices(&self) {
        let Some(devices) = self.ublk().map(Arc::clone) else { return };
        let ended = blocking(move || {
            devices.end();
            Ok(())
        });
        if let Err(error) = ended.await {
            tracing::warn!(%error, "block devices that were ready stay");
        }
    }

    /// The volumes that have a block device.
    pub(super) async fn with_device(
        &self,
        pool: &str,
        name: &str,
    ) -> Result<Vec<v1::Volume>, Error> {
        let all = self.list_volumes(pool, false).await?;
        let is_meant = |one: &v1::Volume| {
            one.front_end() == v1::FrontEnd::Ublk && (name.is_empty() || one.name == name)
        };
        Ok(all.into_iter().filter(is_meant).collect())
    }
}

fn spec(pool: &PoolHandle, volume: &VolumeSummary, record: &Record) -> DeviceSpec {
    let ublk = record.ublk.unwrap_or_default();
    let zero_copy = pool
        .devices()
        .iter()
        .all(|device| !device.mapped && device.direct && device.block_size <= ZERO_COPY_BLOCK);
    DeviceSpec {
        pool: pool.id(),
        pool_name: pool.name().to_owned(),
        volume: volume.id,
        name: volume.name.clone(),
        size: volume.size,
        block_size: volume.block_size,
        extent_size: pool.extent_size(),
        read_only: record.read_only || pool.is_read_only(),
        write_cache: !pool.is_write_through(),
        queues: ublk.queues,
        depth: ublk.depth,
        zero_copy,
        ready_mark: ublk.mark,
        stands_by: false,
    }
}

/// The device of a volume on standby, whose pool is not open here; `None` of one over NBD.
pub(super) fn standby_spec(record: &Record) -> Option<DeviceSpec> {
    let standby = record.standby.as_ref()?;
    Some(DeviceSpec {
        size: standby.size,
        block_size: standby.block_size,
        extent_size: standby.extent_size,
        write_cache: standby.write_cache,
        stands_by: true,
        ..recorded_spec(record)?
    })
}

/// The part of a device that its record has: enough to find and remove it. `None` of a volume over
/// NBD, and where the record does not have the pool's identity.
pub(super) fn recorded_spec(record: &Record) -> Option<DeviceSpec> {
    let ublk = record.ublk?;
    Some(DeviceSpec {
        pool: super::standby::pool_id(record)?,
        pool_name: record.pool.clone(),
        volume: VolumeId(record.id),
        name: record.volume.clone(),
        size: 0,
        block_size: 0,
        extent_size: 0,
        read_only: record.read_only,
        write_cache: false,
        queues: ublk.queues,
        depth: ublk.depth,
        // Whether the pool's devices can do without copies is not known yet.
        zero_copy: false,
        ready_mark: ublk.mark,
        stands_by: false,
    })
}
