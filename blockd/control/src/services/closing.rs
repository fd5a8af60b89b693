//! Closing one pool while others are served, and not serving it again until a call opens it.

use std::sync::Arc;
use std::time::Duration;

use blockd_api::v1;
use blockd_engine::pool::PoolHandle;
use blockd_mapper::engine::VolumeSummary;
use blockd_mapper::error::MapperError;
use blockd_media::error::{Error, shown};
use blockd_media::units::counted;

use super::attachments::Attachment;
use super::devices::recorded_spec;
use super::messages::count;
use super::volumes::find;
use super::{Control, EventKind, Known, blocking, pool_error};
use crate::config::{DeviceKind, PoolConfig};

/// The reason of a pool that was closed on request.
pub(super) const CLOSED: &str = "closed";

/// How long the IO of a pool's clients may take to end, then its workers to release it, and then
/// the thread of a pool that has failed to end.
const WORKER_LIMIT: Duration = Duration::from_secs(10);

/// Names that an error lists.
const MAX_LISTED: usize = 5;

/// How a pool is to be closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum How {
    /// By a shutdown request: with attached volumes, no block device by force, and until the next
    /// start of the daemon.
    Shutdown,
    /// By a call: until it is opened by a call.
    Call {
        /// Detaches its volumes first; otherwise it must have none that is attached.
        force: bool,
    },
    /// To be deleted, with its volumes.
    Delete,
}

impl How {
    const fn forces(self) -> bool {
        matches!(self, Self::Call { force: true } | Self::Delete)
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Shutdown => "a shutdown request",
            Self::Call { .. } => "`blockd pool close`",
            Self::Delete => "`blockd pool delete`",
        }
    }
}

/// The changes that closing a pool has made.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Closed {
    /// The pool was not closed before.
    pub(super) changed: bool,
    /// Volumes that were attached. Their attachments are remembered.
    pub(super) volumes: Vec<String>,
    /// Connections that were ended.
    pub(super) connections: usize,
}

/// How the end of a pool came out.
enum Ended {
    /// Clean, with an empty log.
    InOrder,
    /// As after a crash: it had failed before, or fails with this error now. Its locks are free.
    Abandoned(Option<Error>),
    /// Its IO has not ended yet.
    Late(Error),
}

/// Why a pool was not closed.
#[derive(Debug)]
pub(super) enum NotClosed {
    /// A volume of it is in use. Nothing has changed.
    InUse(Error),
    /// The pool cannot be closed.
    Failed(Error),
}

impl From<NotClosed> for Error {
    fn from(error: NotClosed) -> Self {
        match error {
            NotClosed::InUse(error) | NotClosed::Failed(error) => error,
        }
    }
}

impl Control {
    /// Closes a pool as at the end of the daemon: requests in flight are answered, connections
    /// ended, block devices removed, the log is emptied, and locks and claim are released. Its
    /// socket is removed last. Attachments are remembered. A pool that has failed is left as it is
    /// on the media.
    pub(super) async fn close_pool(&self, name: &str, how: How) -> Result<Closed, NotClosed> {
        let name = self.pool_name(name);
        let _name = self.0.making_pools.lock(name).await;
        self.close_locked(name, how).await
    }

    /// The same for the holder of the name's lock.
    pub(super) async fn close_locked(&self, name: &str, how: How) -> Result<Closed, NotClosed> {
        let known = self.known(name).map_err(NotClosed::Failed)?;
        let Ok(handle) = known.state.clone() else {
            self.stay_closed(name, how).await.map_err(NotClosed::Failed)?;
            let changed = !known.is_closed();
            if changed {
                self.set_closed(&known.config, how.name());
            }
            self.stop_extend(name).await;
            return Ok(Closed { changed, ..Closed::default() });
        };
        if how == How::Shutdown
            && let Some(failure) = known.failure()
        {
            return Err(NotClosed::Failed(super::errors::failed_pool(name, &failure)));
        }
        let all: Vec<_> = handle.mapper().summaries().into_iter().map(|one| one.name).collect();
        // Nothing attaches, detaches or recovers one of them meanwhile. Those of other pools have
        // other locks.
        let guards = self.lock_all(&handle, &all).await;
        let attached = self.0.attachments.of_pool(name);
        let volumes: Vec<_> = attached.iter().map(|one| one.record.volume.clone()).collect();
        refuse_to_close(&known, &attached, how)?;
        if let Err(error) = self.release_volumes(name, &handle, &attached, how).await {
            // Recovery takes the same locks.
            drop(guards);
            self.serve_again(name).await;
            return Err(error);
        }
        // Exports are refused from here on.
        self.set_closed(&known.config, how.name());
        attached.iter().for_each(|one| one.end());
        drop(guards);
        let connections = self.end_connections(&handle).await;
        self.end_pool(&known, &handle).await.map_err(NotClosed::Failed)?;
        self.stop_extend(name).await;
        let (pool, detached) = (shown(name), volumes.len());
        let text = match detached {
            0 => format!("pool {pool} was closed on request"),
            _ => format!("pool {pool} was closed on request, with {detached} attached volumes"),
        };
        self.events().publish(EventKind::PoolClosed, name, "", text);
        Ok(Closed { changed: true, volumes, connections })
    }

    /// Ends the connections of all volumes of a pool, and returns their number. Those whose IO does
    /// not end in time are left.
    async fn end_connections(&self, handle: &PoolHandle) -> usize {
        let mut connections = 0;
        let ending = async {
            for volume in handle.mapper().summaries() {
                connections += self.0.data_path.close_volume(handle.id(), volume.id).await;
            }
        };
        let _ = tokio::time::timeout(WORKER_LIMIT, ending).await;
        connections
    }

    /// Removes the block devices of a pool that is about to be closed, and remembers that it is to
    /// stay closed. After an error some devices may not be served.
    async fn release_volumes(
        &self,
        name: &str,
        handle: &PoolHandle,
        attached: &[Arc<Attachment>],
        how: How,
    ) -> Result<(), NotClosed> {
        let removed = self.remove_devices(handle, attached, how.forces()).await;
        removed.map_err(NotClosed::InUse)?;
        self.stay_closed(name, how).await.map_err(NotClosed::Failed)
    }

    /// Remembers that a pool is not to be opened at the next start, if a call closes it.
    async fn stay_closed(&self, pool: &str, how: How) -> Result<(), Error> {
        match how {
            How::Shutdown | How::Delete => Ok(()),
            How::Call { .. } => self.note_closed(pool, true).await,
        }
    }

    /// Remembers durably whether a pool is to stay closed at the next start.
    pub(super) async fn note_closed(&self, pool: &str, is_closed: bool) -> Result<(), Error> {
        let (closed, pool) = (Arc::clone(&self.0.closed), pool.to_owned());
        blocking(move || closed.set(&pool, is_closed).map(drop)).await
    }

    /// Notes a pool as closed, and by what.
    fn set_closed(&self, config: &PoolConfig, by: &str) {
        let name = shown(&config.name);
        let why = format!("pool {name} was closed by {by}; open it with `blockd pool open {name}`");
        let closed = Known { config: config.clone(), state: Err(why), reason: CLOSED };
        self.0.pools.write().insert(config.name.clone(), closed);
        self.0.health.forget_pool(&config.name);
    }

    /// Opens a pool at the start of the daemon, unless it was closed by a call and is to stay so.
    pub async fn start_pool(&self, config: &PoolConfig) -> Result<(), Error> {
        if !self.0.closed.has(&config.name) {
            return self.open_pool(config).await;
        }
        tracing::info!(pool = config.name, "the pool stays closed until it is opened by a call");
        // No client waits for it, also where its cell was on another host once.
        self.0.attachments.of_pool(&config.name).iter().for_each(|one| one.end());
        self.set_closed(config, How::Call { force: false }.name());
        Ok(())
    }

    /// Removes the block devices of a pool's volumes.
    async fn remove_devices(
        &self,
        handle: &PoolHandle,
        attached: &[Arc<Attachment>],
        force: bool,
    ) -> Result<(), Error> {
        for one in attached.iter().filter(|one| one.record.ublk.is_some()) {
            let volume: Option<VolumeSummary> = find(handle, &one.record.volume);
            if let Some(volume) = volume.filter(|volume| volume.id.0 == one.record.id) {
                self.detach_device(handle, &volume, force).await?;
            }
        }
        Ok(())
    }

    /// Serves the devices again that were removed before one was found to be in use. One that was
    /// not removed in time is served again, too, if it is removed later.
    async fn serve_again(&self, pool: &str) {
        if let Some(devices) = self.ublk() {
            for one in self.0.attachments.of_pool(pool) {
                if let Some(spec) = recorded_spec(&one.record) {
                    devices.keep(&spec.pool, spec.volume);
                }
            }
        }
        if let Err(error) = self.recover(pool, "").await {
            tracing::warn!(pool, %error, "devices were not recovered");
        }
    }

    /// Closes a pool whose clients wait, in order, for another host.
    pub(super) async fn close_parked(
        &self,
        known: &Known,
        handle: &PoolHandle,
    ) -> Result<(), Error> {
        let name = &known.config.name;
        if let Some(failure) = handle.failure() {
            return Err(super::errors::failed_pool(name, &failure));
        }
        self.set_closed(&known.config, "a hand-over");
        self.end_pool(known, handle).await?;
        self.stop_extend(name).await;
        Ok(())
    }

    /// Ends a pool that no client uses any more. One that is not left clean, though it served, is
    /// known as failed afterwards.
    async fn end_pool(&self, known: &Known, handle: &PoolHandle) -> Result<(), Error> {
        let name = &known.config.name;
        let (error, state) = match self.end_io(name, handle).await {
            Ended::InOrder | Ended::Abandoned(None) => return Ok(()),
            Ended::Abandoned(Some(error)) => {
                let state = Err(error.to_string());
                (error, state)
            }
            // Closing it can be tried again.
            Ended::Late(error) => (error, Ok(handle.clone())),
        };
        tracing::error!(pool = name, %error, "the pool was not closed");
        let failed = Known { config: known.config.clone(), state, reason: "io" };
        self.0.pools.write().insert(name.clone(), failed);
        if let Err(error) = self.note_closed(name, false).await {
            tracing::warn!(pool = name, %error, "the pool stays closed at the next start");
        }
        Err(error)
    }

    async fn end_io(&self, name: &str, handle: &PoolHandle) -> Ended {
        let late = |who: &str| {
            let problem = format!("is still used by {who} after {WORKER_LIMIT:?}: close it again");
            Ended::Late(Error::in_use(format!("pool {}", shown(name)), problem))
        };
        let left = tokio::time::timeout(WORKER_LIMIT, self.0.data_path.remove_pool(handle.id()));
        if left.await.is_err() {
            // Some workers have forgotten it: it must not be served any more.
            let problem = "did not end the IO of its pool when that was closed".to_owned();
            handle.halt(MapperError::Device { name: "a worker".to_owned(), problem });
            return late("a worker");
        }
        let mut failed = None;
        if handle.failure().is_none() {
            if let Err(error) = self.note_served(handle, false).await {
                tracing::warn!(pool = name, %error, "last seen at its start");
            }
            match handle.close().await {
                Ok(()) => return Ended::InOrder,
                Err(error) => failed = Some(pool_error(name, error)),
            }
        }
        match tokio::time::timeout(WORKER_LIMIT, handle.abandon()).await {
            Ok(()) => Ended::Abandoned(failed),
            Err(_) => late("its thread"),
        }
    }

    /// Whether this is the only pool of the configuration, and no other one is open: then the end
    /// of the pool is the end of the daemon.
    pub(super) fn is_only_pool(&self, name: &str) -> bool {
        let others = |known: Known| known.config.name != name && known.state.is_ok();
        self.0.options.configured_pools == 1
            && !self.has_direct_pools()
            && !self.known_pools().into_iter().any(others)
    }

    /// The call: closes a pool until it is opened by a call.
    pub(super) async fn close_by_call(
        &self,
        asked: v1::ClosePoolRequest,
    ) -> Result<v1::ClosePoolResponse, Error> {
        let closed = self.close_pool(&asked.name, How::Call { force: asked.force }).await?;
        let pool = Some(self.describe_pool(&self.known(&asked.name)?).await?);
        Ok(v1::ClosePoolResponse {
            changed: closed.changed,
            detached_volumes: closed.volumes,
            closed_connections: count(closed.connections),
            pool,
        })
    }
}

/// Refuses a call without force that would detach volumes, and one that closes a pool in memory.
fn refuse_to_close(known: &Known, attached: &[Arc<Attachment>], how: How) -> Result<(), NotClosed> {
    let How::Call { force } = how else { return Ok(()) };
    if !force {
        refuse_attached(&known.config.name, attached).map_err(NotClosed::InUse)?;
    }
    refuse_memory(&known.config).map_err(NotClosed::Failed)
}

fn refuse_attached(pool: &str, attached: &[Arc<Attachment>]) -> Result<(), Error> {
    if attached.is_empty() {
        return Ok(());
    }
    let names: Vec<_> =
        attached.iter().take(MAX_LISTED).map(|one| shown(&one.record.volume)).collect();
    let more = if attached.len() > names.len() { ", ..." } else { "" };
    let problem = format!(
        "has {} attached ({}{more}): detach first, or use force",
        counted(attached.len(), "volume"),
        names.join(", ")
    );
    Err(Error::in_use(format!("pool {}", shown(pool)), problem))
}

/// Refuses to close a pool that would be gone then.
fn refuse_memory(config: &PoolConfig) -> Result<(), Error> {
    if config.devices.iter().any(|device| device.kind != DeviceKind::Memory) {
        return Ok(());
    }
    let problem = "is in the daemon's memory: its volumes would be lost with it";
    Err(Error::in_use(format!("pool {}", shown(&config.name)), problem))
}

#[cfg(test)]
mod tests {
    use blockd_api::v1::{CreateVolumeRequest, DeleteVolumeRequest};

    use super::*;
    use crate::services::testing::{Rig, file_pool, folder, memory_pool};
    use crate::services::tests::{MIB, create, delete};

    #[tokio::test]
    async fn calls_on_another_pool_do_not_wait_for_one_that_is_being_closed() {
        let rig = Rig::new().await;
        rig.control.open_pool(&memory_pool("q")).await.unwrap();
        let mut client = rig.client.clone();
        let names: Vec<_> = (0..200).map(|number| format!("v{number:03}")).collect();
        for name in &names {
            let pool = "q".to_owned();
            client.create_volume(CreateVolumeRequest { pool, ..create(name, MIB) }).await.unwrap();
        }
        // Closing the pool waits for a call on one of its volumes.
        let busy = rig.control.lock(&rig.control.pool("q").unwrap(), "v100").await;
        let control = rig.control.clone();
        let closing = tokio::spawn(async move { control.close_pool("q", How::Shutdown).await });
        let pool = "q".to_owned();
        let deleted = DeleteVolumeRequest { pool, ..delete("v000", false) };
        while tokio::time::timeout(STEP, client.delete_volume(deleted.clone())).await.is_ok() {
            tokio::task::yield_now().await;
        }
        let others = async {
            for name in &names {
                client.create_volume(create(name, MIB)).await.unwrap();
            }
        };
        tokio::time::timeout(LIMIT, others).await.expect("calls on another pool wait");
        drop(busy);
        assert!(closing.await.unwrap().unwrap().changed);
    }

    #[tokio::test]
    async fn a_pool_that_was_closed_in_order_has_not_failed() {
        let rig = Rig::new().await;
        rig.control.open_pool(&memory_pool("bad")).await.unwrap();
        assert!(rig.control.failed_pools().is_empty());
        let problem = "failed for a test".to_owned();
        let error = MapperError::Device { name: "memory".to_owned(), problem };
        rig.control.pool("bad").unwrap().halt(error);
        // As at the end of the daemon, while the pools that fail are still watched.
        rig.control.close_pools().await.unwrap_err();
        assert!(rig.control.known("default").unwrap().failure().is_some());
        assert_eq!(Vec::from_iter(rig.control.failed_pools().into_keys()), ["bad"]);
    }

    const STEP: Duration = Duration::from_millis(50);
    const LIMIT: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn a_closed_pool_that_can_not_be_opened_stays_closed_at_the_next_start() {
        let rig = Rig::without_pool(folder()).await;
        let path = rig.folder.path().join("pool");
        let config = file_pool("p", &path);
        rig.control.open_pool(&config).await.unwrap();
        rig.control.close_pool("p", How::Call { force: false }).await.unwrap();
        let away = rig.folder.path().join("away");
        std::fs::rename(&path, &away).unwrap();
        assert!(rig.control.reopen_pool("p").await.is_err());
        assert!(rig.control.0.closed.has("p"), "the next start opens what a call has closed");
        std::fs::rename(&away, &path).unwrap();
        // It is open, and the note stays: the next call that finds it open removes that.
        let blocked = rig.folder.path().join("closed.json.next");
        std::fs::create_dir(&blocked).unwrap();
        let error = rig.control.reopen_pool("p").await.unwrap_err();
        assert!(error.to_string().contains("repeat the call"), "{error}");
        assert!(rig.control.known("p").unwrap().state.is_ok());
        std::fs::remove_dir(&blocked).unwrap();
        assert!(!rig.control.reopen_pool("p").await.unwrap());
        assert!(!rig.control.0.closed.has("p"), "the next start does not open it");
        rig.control.close_pools().await.unwrap();
    }
}
