//! Closing one pool while others are served, and not serving it again until that is asked for.

use std::time::Duration;

use blockd_engine::pool::PoolHandle;
use blockd_mapper::engine::VolumeSummary;
use blockd_media::error::{Error, shown};

use super::attachments::Attachment;
use super::volumes::find;
use super::{Control, EventKind, Known, pool_error};

/// Why a pool is not open that was closed on request.
pub(super) const CLOSED: &str = "closed";

/// How long workers may take to let go of a pool that nothing is in flight of.
const WORKER_LIMIT: Duration = Duration::from_secs(10);

/// Why a pool was not closed.
#[derive(Debug)]
pub(super) enum NotClosed {
    /// A block device of one of its volumes is in use. Nothing has changed.
    InUse(Error),
    /// The pool cannot be closed.
    Failed(Error),
}

impl Control {
    /// Closes a pool as at the end of the daemon: requests in flight are answered, connections
    /// ended, block devices removed, the log is emptied, and locks and claim are given up. Its
    /// socket is removed last. Attachments are remembered. False if the pool was not open.
    pub(super) async fn close_pool(&self, name: &str) -> Result<bool, NotClosed> {
        let _name = self.0.making_pools.lock(name).await;
        let known = self.known(name).map_err(NotClosed::Failed)?;
        let handle = match (known.failure(), &known.state) {
            (None, Ok(handle)) => handle.clone(),
            // A pool that has stopped can't be left clean, and is locked until the process ends.
            (Some(failure), Ok(_)) => {
                return Err(NotClosed::Failed(super::errors::failed_pool(name, &failure)));
            }
            (_, Err(_)) => {
                self.set_closed(&known);
                self.stop_extend(name).await;
                return Ok(false);
            }
        };
        let attached: Vec<_> =
            self.0.attachments.list().into_iter().filter(|one| one.record.pool == name).collect();
        let names: Vec<_> = attached.iter().map(|one| one.record.volume.clone()).collect();
        // Nothing attaches, detaches or recovers one of them meanwhile.
        let guards = self.lock_all(name, &names).await;
        if let Err(error) = self.remove_devices(&handle, &attached).await {
            drop(guards);
            self.serve_again(name).await;
            return Err(NotClosed::InUse(error));
        }
        // Exports are refused from here on.
        self.set_closed(&known);
        for one in &attached {
            one.end();
        }
        for volume in handle.mapper().summaries() {
            self.0.data_path.close_volume(handle.id(), volume.id).await;
        }
        drop(guards);
        if let Err(error) = self.end_pool(&known, &handle).await {
            tracing::error!(pool = name, %error, "the pool was not closed");
            let failed = Known { state: Err(error.to_string()), reason: "io", ..known };
            self.0.pools.write().insert(name.to_owned(), failed);
            return Err(NotClosed::Failed(error));
        }
        self.stop_extend(name).await;
        let text = format!("pool {} was closed on request", shown(name));
        self.events().publish(EventKind::PoolClosed, name, "", text);
        Ok(true)
    }

    fn set_closed(&self, known: &Known) {
        let name = &known.config.name;
        let why = format!(
            "pool {0} was closed by a shutdown request; open it with `blockd pool open {0}`",
            shown(name)
        );
        let closed = Known { config: known.config.clone(), state: Err(why), reason: CLOSED };
        self.0.pools.write().insert(name.clone(), closed);
    }

    /// Removes the block devices of a pool's volumes, none by force.
    async fn remove_devices(
        &self,
        handle: &PoolHandle,
        attached: &[std::sync::Arc<Attachment>],
    ) -> Result<(), Error> {
        for one in attached.iter().filter(|one| one.record.ublk.is_some()) {
            let volume: Option<VolumeSummary> = find(handle, &one.record.volume);
            if let Some(volume) = volume.filter(|volume| volume.id.0 == one.record.id) {
                self.detach_device(handle, &volume, false).await?;
            }
        }
        Ok(())
    }

    /// Serves the devices again that were removed before one was found to be in use.
    async fn serve_again(&self, pool: &str) {
        if let Err(error) = self.recover(pool, "").await {
            tracing::warn!(pool, %error, "devices were not recovered");
        }
    }

    async fn end_pool(&self, known: &Known, handle: &PoolHandle) -> Result<(), Error> {
        let left = tokio::time::timeout(WORKER_LIMIT, self.0.data_path.remove_pool(handle.id()));
        if left.await.is_err() {
            let problem = format!("is still served by a worker after {WORKER_LIMIT:?}");
            return Err(Error::in_use(format!("pool {}", known.config.name), problem));
        }
        if let Err(error) = self.note_served(handle, false).await {
            tracing::warn!(pool = known.config.name, %error, "last seen at its start");
        }
        handle.close().await.map_err(|error| pool_error(&known.config.name, error))
    }

    /// Whether this is the only pool of the configuration, and no other one is open: then the end
    /// of the pool is the end of the daemon.
    pub(super) fn is_only_pool(&self, name: &str) -> bool {
        let others = |known: Known| known.config.name != name && known.state.is_ok();
        self.0.options.configured_pools == 1
            && !self.has_direct_pools()
            && !self.known_pools().into_iter().any(others)
    }
}
