//! Calls on volumes. Each call can be repeated, and reports its changes.

use std::sync::Arc;
use std::time::Duration;

use blockd_api::v1;
use blockd_engine::pool::{Control as Command, Outcome, PoolHandle, VolumeId};
use blockd_mapper::engine::VolumeSummary;
use blockd_mapper::format::catalogue::VolumeKind;
use blockd_mapper::geometry::MAX_VOLUME_SIZE;
use blockd_media::error::{Error, shown};
use blockd_media::names::{check_name, check_new_name};
use blockd_media::units::{counted, human, to_wire, to_wire_gb};

use super::attachments::Record;
use super::devices::{AttachWish, FrontEnd, device_error, recorded_spec};
use super::hex;
use super::messages::count;
use super::{Control, EventKind, blocking};

pub(super) use super::errors::of;

/// The volume of that name.
pub(super) fn find(pool: &PoolHandle, name: &str) -> Option<VolumeSummary> {
    pool.mapper().find(name)
}

impl Control {
    /// Makes an empty volume. True if it is new. Without a block size it gets the smallest.
    pub(super) async fn create_volume(
        &self,
        pool: &str,
        name: &str,
        size: u64,
        limit: u64,
        block_size: Option<u32>,
    ) -> Result<(bool, v1::Volume), Error> {
        checked_new_name(name)?;
        let handle = self.pool(pool)?;
        let size = rounded(&handle, size, limit)?;
        let _guard = self.lock(&handle, name).await;
        let changed = self.create_locked(&handle, name, size, block_size).await?;
        Ok((changed, self.describe(&handle, name).await?))
    }

    /// The same for a name that the caller has locked, and a size that is rounded.
    pub(super) async fn create_locked(
        &self,
        handle: &PoolHandle,
        name: &str,
        size: u64,
        block_size: Option<u32>,
    ) -> Result<bool, Error> {
        let existing = find(handle, name);
        let block_size = match (block_size, &existing) {
            (Some(block_size), _) => checked_block_size(block_size, handle)?,
            (None, Some(existing)) => existing.block_size,
            (None, None) => handle.block_size(),
        };
        checked_size(size, block_size)?;
        if existing.is_none() {
            self.check_promise(handle, size)?;
        }
        let command = Command::Create { name: name.to_owned(), size, block_size };
        let outcome = handle.control(command).await.map_err(|error| of(handle, error))?;
        let changed = matches!(outcome, Outcome::Created(_));
        if changed {
            let text = format!("volume {} was created with {}", shown(name), human(size));
            self.events().publish(EventKind::VolumeCreated, handle.name(), name, text);
        }
        Ok(changed)
    }

    /// Removes a volume, if there is one.
    pub(super) async fn delete_volume(
        &self,
        asked: &v1::DeleteVolumeRequest,
    ) -> Result<v1::DeleteVolumeResponse, Error> {
        let (pool, name, force) = (&asked.pool, &asked.name, asked.force);
        checked_name(name)?;
        let handle = self.pool(pool)?;
        let _guard = self.lock(&handle, name).await;
        let Some(volume) = find(&handle, name) else { return Ok(Default::default()) };
        let before = self.describe(&handle, name).await?;
        if before.attached && !force && !asked.detach {
            let problem = "is attached: detach it first, or use force";
            return Err(Error::in_use(format!("volume {}", shown(name)), problem));
        }
        if !force {
            self.check_unused(&handle, &volume)?;
        }
        let attachment = self.0.attachments.get(handle.name(), name);
        let (detached, closed_connections) = self.disconnect(&handle, &volume, force).await?;
        if let Err(error) = self.delete_locked(&handle, &volume, &before).await {
            let Some(attachment) = attachment.filter(|_| detached) else { return Err(error) };
            let attached = self.attach_again(&handle, &volume, &attachment.record).await;
            return Err(match attached {
                Ok(()) => error,
                Err(problem) => {
                    let name = shown(name);
                    error.with_note(&format!("volume {name} stays detached: {problem}"))
                }
            });
        }
        Ok(v1::DeleteVolumeResponse {
            changed: true,
            detached,
            closed_connections: count(closed_connections),
            volume: Some(before),
        })
    }

    /// Removes a volume that the caller has locked, and that is not attached.
    pub(super) async fn delete_locked(
        &self,
        pool: &PoolHandle,
        volume: &VolumeSummary,
        before: &v1::Volume,
    ) -> Result<(), Error> {
        let command = Command::Delete { volume: volume.id };
        pool.control(command).await.map_err(|error| of(pool, error))?;
        let (name, freed) = (&volume.name, before.exclusive_bytes);
        let freed = human(freed.saturating_add(before.reserved_bytes).unsigned_abs());
        let text = format!("volume {} was deleted, {freed} come free", shown(name));
        self.events().publish(EventKind::VolumeDeleted, pool.name(), name, text);
        self.watch_release(pool, volume.id, name);
        Ok(())
    }

    /// Attaches a volume as it was before a change that failed.
    async fn attach_again(
        &self,
        pool: &PoolHandle,
        volume: &VolumeSummary,
        record: &Record,
    ) -> Result<(), Error> {
        let front_end = if record.ublk.is_some() { FrontEnd::Ublk } else { FrontEnd::Nbd };
        let ublk = record.ublk.unwrap_or_default();
        let wish = AttachWish {
            read_only: record.read_only,
            front_end: Some(front_end),
            queues: u32::from(ublk.queues),
            depth: u32::from(ublk.depth),
        };
        self.attach_locked(pool, volume, wish).await.map(drop)
    }

    /// Changes a volume's size.
    #[expect(deprecated, reason = "older clients read size_gb")]
    pub(super) async fn resize_volume(
        &self,
        pool: &str,
        name: &str,
        size: u64,
        shrink: bool,
    ) -> Result<v1::ResizeVolumeResponse, Error> {
        let handle = self.pool(pool)?;
        let size = rounded(&handle, size, 0)?;
        let _guard = self.lock(&handle, name).await;
        let volume = existing(&handle, name)?;
        checked_size(size, volume.block_size)?;
        if size < volume.size && !shrink {
            let problem = format!(
                "has {} bytes: a size of {size} discards the data beyond; set shrink to allow that",
                volume.size
            );
            return Err(Error::in_use(format!("volume {}", shown(name)), problem));
        }
        if size > volume.size {
            self.check_promise(&handle, size - volume.size)?;
        }
        // The device never shows more than there is: it shrinks first, and grows last.
        let mut is_shown = true;
        if size < volume.size {
            is_shown = self.resize_device(&handle, volume.id, size).await?;
        }
        let command = Command::Resize { volume: volume.id, size };
        let outcome = match handle.control(command).await {
            Ok(outcome) => outcome,
            Err(error) => {
                if size < volume.size {
                    self.resize_device(&handle, volume.id, volume.size).await?;
                }
                return Err(of(&handle, error));
            }
        };
        let (changed, previous) = match outcome {
            Outcome::Resized { from } => (true, from),
            _ => (false, volume.size),
        };
        if changed {
            let (from, to) = (human(previous), human(size));
            let text = format!("volume {} was resized from {from} to {to}", shown(name));
            self.events().publish(EventKind::VolumeResized, handle.name(), name, text);
        }
        if size > volume.size {
            is_shown = self.resize_device(&handle, volume.id, size).await?;
        }
        let volume = self.describe(&handle, name).await?;
        Ok(v1::ResizeVolumeResponse {
            changed,
            previous_size_gb: to_wire_gb(previous),
            previous_size_bytes: to_wire(previous),
            connections_with_old_size: if changed { volume.connections } else { 0 },
            device_has_old_size: !is_shown,
            volume: Some(volume),
        })
    }

    /// Lets clients reach a volume. True if they could not before.
    pub(super) async fn attach_volume(
        &self,
        pool: &str,
        name: &str,
        wish: AttachWish,
    ) -> Result<(bool, v1::Volume), Error> {
        let handle = self.pool(pool)?;
        let _guard = self.lock(&handle, name).await;
        let volume = existing(&handle, name)?;
        let changed = self.attach_locked(&handle, &volume, wish).await?;
        Ok((changed, self.describe(&handle, name).await?))
    }

    /// The same for a volume that the caller has locked.
    pub(super) async fn attach_locked(
        &self,
        handle: &PoolHandle,
        volume: &VolumeSummary,
        wish: AttachWish,
    ) -> Result<bool, Error> {
        if self.is_attached_so(handle, volume, &wish)? {
            return Ok(false);
        }
        // The pool may have been closed before the lock was taken.
        self.pool(handle.name())?;
        let read_only = wish.read_only || volume.kind == VolumeKind::Snapshot;
        let (pool, id) = (handle.name().to_owned(), volume.id.0);
        let (name, pool_id) = (volume.name.clone(), hex(&handle.id()));
        let record = Record { pool, volume: name, id, pool_id, read_only, ..Record::default() };
        let place = match self.front_end(&wish)? {
            FrontEnd::Nbd => {
                self.0.attachments.add(record).await?;
                String::new()
            }
            FrontEnd::Ublk => {
                let view = self.attach_device(handle, volume, record, &wish).await?;
                view.path.map(|path| format!(" as {}", path.display())).unwrap_or_default()
            }
        };
        let how = if read_only || handle.is_read_only() { ", read-only" } else { "" };
        let text = format!("volume {} was attached{place}{how}", shown(&volume.name));
        self.events().publish(EventKind::VolumeAttached, handle.name(), &volume.name, text);
        Ok(true)
    }

    /// Whether a volume is attached in this way. An error if it is attached in another.
    pub(super) fn is_attached_so(
        &self,
        pool: &PoolHandle,
        volume: &VolumeSummary,
        wish: &AttachWish,
    ) -> Result<bool, Error> {
        let present = self.0.attachments.get(pool.name(), &volume.name);
        let Some(present) = present.filter(|present| present.record.is_of(pool, volume.id)) else {
            return Ok(false);
        };
        let read_only = wish.read_only || volume.kind == VolumeKind::Snapshot;
        same_attachment(&present.record, &AttachWish { read_only, ..*wish })?;
        Ok(true)
    }

    /// Makes a volume unreachable: whether it was reachable, and how many connections were ended.
    pub(super) async fn detach_volume(
        &self,
        pool: &str,
        name: &str,
        force: bool,
    ) -> Result<(bool, usize, Option<v1::Volume>), Error> {
        if self.known(pool).is_err()
            && let Some(closed) = self.detach_standby(pool, name, force).await?
        {
            return Ok((true, closed, None));
        }
        if force
            && self.pool(pool).is_err()
            && let Some(closed) = self.detach_unserved(pool, name).await?
        {
            return Ok((true, closed, None));
        }
        let handle = self.pool(pool)?;
        let _guard = self.lock(&handle, name).await;
        let volume = existing(&handle, name)?;
        if !force {
            self.check_unused(&handle, &volume)?;
        }
        let attached = self.0.attachments.get(handle.name(), name);
        let written = attached.is_some_and(|attached| !attached.record.read_only);
        let (changed, closed) = self.disconnect(&handle, &volume, force).await?;
        if changed && written {
            empty_log(&handle).await;
        }
        Ok((changed, closed, Some(self.describe(&handle, name).await?)))
    }

    /// Detaches a volume by force whose pool is not served: its disk may be gone for good, and
    /// processes wait for its device. Returns how many connections were ended; `None` where there
    /// is no attachment, or no device can be found by its record.
    async fn detach_unserved(&self, pool: &str, name: &str) -> Result<Option<usize>, Error> {
        self.not_for_direct(pool)?;
        let pool = self.pool_name(pool);
        let Some(attached) = self.0.attachments.get(pool, name) else { return Ok(None) };
        let pool_id = attached.record.pool_id.clone();
        let _guard = self.0.volumes.lock_volumes(&pool_id, [name]).await;
        // Until then it may have been detached, or its pool opened.
        let attached = self.0.attachments.get(pool, name);
        let attached = attached.filter(|one| one.record.pool_id == pool_id);
        let Some(attached) = attached.filter(|_| self.pool(pool).is_err()) else {
            return Ok(None);
        };
        let device = recorded_spec(&attached.record);
        if device.is_none() && attached.record.ublk.is_some() {
            return Ok(None);
        }
        let closed = self.drop_record(&attached.record, device, true).await?;
        let text = format!("volume {} was detached", shown(name));
        self.events().publish(EventKind::VolumeDetached, pool, name, text);
        Ok(Some(closed))
    }

    /// Refuses a volume with connections, or whose block device is in use.
    pub(super) async fn check_idle(
        &self,
        pool: &PoolHandle,
        volume: &VolumeSummary,
    ) -> Result<(), Error> {
        self.check_unused(pool, volume)?;
        let Some(devices) = self.ublk().map(Arc::clone) else { return Ok(()) };
        let (pool, volume) = (pool.id(), volume.id);
        blocking(move || devices.check_unused(&pool, volume).map_err(device_error)).await
    }

    /// Refuses a volume with connections.
    fn check_unused(&self, pool: &PoolHandle, volume: &VolumeSummary) -> Result<(), Error> {
        self.refuse_connected(pool.id(), volume.id, &volume.name)
    }

    /// The same, of a volume whose pool need not be open.
    pub(super) fn refuse_connected(
        &self,
        pool: [u8; 16],
        volume: VolumeId,
        name: &str,
    ) -> Result<(), Error> {
        let clients = self.0.data_path.connections_of(pool, volume);
        if clients == 0 {
            return Ok(());
        }
        let problem = format!(
            "has {}: end {} first, or use force",
            counted(clients, "connection"),
            if clients == 1 { "it" } else { "them" },
        );
        Err(Error::in_use(format!("volume {}", shown(name)), problem))
    }

    /// Ends what serves a volume: whether it was attached, and how many connections were ended.
    pub(super) async fn disconnect(
        &self,
        pool: &PoolHandle,
        volume: &VolumeSummary,
        force: bool,
    ) -> Result<(bool, usize), Error> {
        self.detach_device(pool, volume, force).await?;
        let place = (pool.name().to_owned(), volume.name.clone());
        let detached = self.0.attachments.remove(vec![place]).await? > 0;
        let closed = self.0.data_path.close_volume(pool.id(), volume.id).await;
        if let Err(error) = pool.release_kept(volume.id) {
            tracing::warn!(pool = pool.name(), volume = volume.name, %error, "space stays kept");
        }
        if detached {
            let text = format!("volume {} was detached", shown(&volume.name));
            self.events().publish(EventKind::VolumeDetached, pool.name(), &volume.name, text);
        }
        Ok((detached, closed))
    }

    pub(super) fn connections_of(&self, pool: &PoolHandle, volume: VolumeId) -> usize {
        self.0.data_path.connections_of(pool.id(), volume)
    }

    /// One volume.
    pub(super) async fn get_volume(&self, pool: &str, name: &str) -> Result<v1::Volume, Error> {
        checked_name(name)?;
        // Its cell is on another host, whose LUN may hang: nothing but what is remembered here is
        // asked.
        if self.known(pool).is_err()
            && let Some(attached) = self.0.attachments.get(pool, name)
            && attached.waits()
        {
            return Ok(self.describe_on_standby(&attached.record));
        }
        self.describe(&self.pool(pool)?, name).await
    }

    /// Volumes of one pool, or of all that serve.
    pub(super) async fn list_volumes(
        &self,
        pool: &str,
        brief: bool,
    ) -> Result<Vec<v1::Volume>, Error> {
        let mut list = Vec::new();
        for handle in self.serving(pool)? {
            list.extend(self.describe_all(&handle, brief).await?);
        }
        Ok(list)
    }

    /// The pool of that name; without a name, all that serve.
    pub(super) fn serving(&self, pool: &str) -> Result<Vec<PoolHandle>, Error> {
        if !pool.is_empty() {
            return Ok(vec![self.pool(pool)?]);
        }
        let serves = |known: super::Known| match known.failure() {
            None => known.state.ok(),
            Some(_) => None,
        };
        Ok(self.known_pools().into_iter().filter_map(serves).collect())
    }

    pub(super) async fn describe(
        &self,
        pool: &PoolHandle,
        name: &str,
    ) -> Result<v1::Volume, Error> {
        let found = pool.volume(name).await.map_err(|error| of(pool, error))?;
        let found = found.ok_or_else(|| Error::not_found("volume", name))?;
        let described = self.describe_volumes(pool, vec![found]).pop();
        described.ok_or_else(|| Error::not_found("volume", name))
    }

    /// All volumes; with `brief`, nothing is counted of what they share.
    async fn describe_all(&self, pool: &PoolHandle, brief: bool) -> Result<Vec<v1::Volume>, Error> {
        let mut volumes = match brief {
            true => pool.mapper().summaries(),
            false => pool.volumes().await.map_err(|error| of(pool, error))?,
        };
        volumes.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(self.describe_volumes(pool, volumes))
    }

    /// Forgets attachments of volumes that are gone from pools that are open, as after a crash in
    /// the middle of a deletion. Those of volumes and pools that have another name follow it.
    pub async fn forget_attachments_of_missing_volumes(&self) -> Result<usize, Error> {
        // A pool that is being renamed has two names.
        let _renaming = self.0.renaming.lock().await;
        self.follow_renamed_pools().await?;
        let served = Arc::clone(&self.0.served);
        let served = blocking(move || Ok(served.names())).await?;
        // The daemon may have died while it forgot the pool. Records without the pool's identity
        // may be of one that has another name now.
        let is_forgotten = |record: &Record| {
            let is_other = |name: &String| *name != record.pool;
            let is_listed = served.as_ref().is_none_or(|names| !names.iter().all(is_other));
            !is_listed && !record.pool_id.is_empty() && self.known(&record.pool).is_err()
        };
        let (mut gone, mut renamed) = (Vec::new(), Vec::new());
        for attachment in self.0.attachments.list() {
            let record = &attachment.record;
            let Ok(pool) = self.pool(&record.pool) else {
                // Its cell may be on another host.
                if record.standby.is_none() && is_forgotten(record) {
                    let (pool, volume) = (&record.pool, &record.volume);
                    tracing::warn!(pool, volume, "dropped an attachment: the pool was deleted");
                    gone.push((pool.clone(), volume.clone()));
                }
                continue;
            };
            let volume = find(&pool, &record.volume);
            if volume.is_some_and(|volume| record.is_of(&pool, volume.id)) {
                continue;
            }
            let place = (record.pool.clone(), record.volume.clone());
            if let Some(name) = record.name_now(&pool) {
                renamed.push((place, VolumeId(record.id), name));
                continue;
            }
            tracing::warn!(
                pool = record.pool,
                volume = record.volume,
                "dropped an attachment: the volume no longer exists"
            );
            gone.push(place);
        }
        let count = self.0.attachments.remove(gone).await?;
        for (place, id, name) in renamed {
            let (pool, volume) = (place.0.clone(), place.1.clone());
            if self.0.attachments.rename(place, id, name.clone()).await? {
                tracing::info!(pool, volume, name, "an attachment follows its volume to its name");
            }
        }
        Ok(count)
    }
}

/// How long a detach waits for the log to be emptied. A checkpoint takes milliseconds, or seconds
/// after many writes; one that finds no space below waits for that, and the detach does not wait
/// for it.
const LOG_WAIT: Duration = Duration::from_secs(10);

/// Moves the writes of a volume's clients from the log into the trees. This only speeds up the next
/// start: changes in the log are as durable, and are found there.
async fn empty_log(pool: &PoolHandle) {
    if pool.is_read_only() {
        return;
    }
    match tokio::time::timeout(LOG_WAIT, pool.control(Command::Checkpoint)).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::warn!(pool = pool.name(), %error, "the log was not emptied"),
        Err(_) => tracing::warn!(pool = pool.name(), "the log is emptied later: it takes long"),
    }
}

pub(super) fn same_attachment(record: &Record, wish: &AttachWish) -> Result<(), Error> {
    let other = |how: String| {
        let problem = format!("is attached {how} already: detach it first");
        Err(Error::in_use(format!("volume {}", shown(&record.volume)), problem))
    };
    if record.read_only != wish.read_only {
        return other(if record.read_only { "read-only" } else { "for writing" }.to_owned());
    }
    match (record.ublk, wish.front_end) {
        (Some(_), Some(FrontEnd::Nbd)) => other("as a block device".to_owned()),
        (None, Some(FrontEnd::Ublk)) => other("over NBD".to_owned()),
        (Some(ublk), _) if wish.queues != 0 && u32::from(ublk.queues) != wish.queues => {
            other(format!("with queue_count {}", ublk.queues))
        }
        (Some(ublk), _) if wish.depth != 0 && u32::from(ublk.depth) != wish.depth => {
            other(format!("with queue_depth {}", ublk.depth))
        }
        _ => Ok(()),
    }
}

pub(super) fn existing(pool: &PoolHandle, name: &str) -> Result<VolumeSummary, Error> {
    checked_name(name)?;
    find(pool, name).ok_or_else(|| Error::not_found("volume", name))
}

/// Sizes of volumes in persistent memory are multiples of this: users of such volumes expect it,
/// and it is two huge pages.
const PMEM_STEP: u64 = 4 << 20;

/// Sizes of a pool's volumes are rounded up to a multiple of this; 1 where they are not rounded.
pub(super) fn step(pool: &PoolHandle) -> u64 {
    if pool.is_pmem() { PMEM_STEP } else { 1 }
}

/// The rounded size of a new volume. A limit of 0 is none.
pub(super) fn rounded(pool: &PoolHandle, size: u64, limit: u64) -> Result<u64, Error> {
    let step = step(pool);
    let rounded = size.checked_next_multiple_of(step).unwrap_or(u64::MAX);
    if limit > 0 && rounded > limit {
        let allowed = format!("at least {rounded}, as sizes are multiples of {step} bytes here");
        return Err(Error::out_of_range("limit_bytes", limit, allowed));
    }
    Ok(rounded)
}

pub(super) fn checked_name(name: &str) -> Result<(), Error> {
    check_name(name).map_err(|allowed| Error::invalid("name", name, allowed))
}

/// The same for a new name.
pub(super) fn checked_new_name(name: &str) -> Result<(), Error> {
    check_new_name(name).map_err(|allowed| Error::invalid("name", name, allowed))
}

fn checked_block_size(block_size: u32, pool: &PoolHandle) -> Result<u32, Error> {
    let least = pool.block_size();
    if block_size.is_power_of_two() && (least..=4096).contains(&block_size) {
        return Ok(block_size);
    }
    let allowed = format!("a power of two from {least}, the block of the pool's devices, to 4096");
    Err(Error::invalid("block_size", block_size, allowed))
}

pub(super) fn checked_size(size: u64, block_size: u32) -> Result<(), Error> {
    let whole = size.is_multiple_of(u64::from(block_size));
    if whole && (1..=MAX_VOLUME_SIZE).contains(&size) {
        return Ok(());
    }
    let allowed =
        format!("a multiple of the block size {block_size}, more than 0 and at most 2^50 bytes");
    Err(Error::invalid("size_bytes", size, allowed))
}
