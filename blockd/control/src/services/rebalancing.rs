//! Data that is moved to emptier devices of a pool.

use blockd_api::v1::{self, RebalanceAction};
use blockd_engine::pool::{
    Control as Command, Outcome, PoolHandle, RebalanceState, RebalanceStatus,
};
use blockd_media::error::{Error, shown};
use blockd_media::pool::PoolError;
use blockd_media::units::{human, to_wire};

use super::errors::pool_error;
use super::shrinking::ONE_AT_A_TIME;
use super::{Control, EventKind};

/// The use of a pool's devices and its rebalance, as a client gets them. `None` for one device.
pub(super) fn rebalance(
    handle: &PoolHandle,
    status: &RebalanceStatus,
) -> Option<v1::PoolRebalance> {
    let figures = (0..).zip(status.used.iter().zip(&status.before));
    let used = figures.filter_map(|(at, (used, before))| {
        let device = handle.device_at(at)?;
        Some(v1::DeviceUse {
            path: device.info().path.display().to_string(),
            total_bytes: to_wire(device.size()),
            used_bytes: to_wire(*used),
            before_bytes: to_wire(*before),
        })
    });
    let devices: Vec<_> = used.collect();
    let state = match status.state {
        RebalanceState::Never => v1::RebalanceState::Unspecified,
        RebalanceState::Running => v1::RebalanceState::Running,
        RebalanceState::Even => v1::RebalanceState::Even,
        RebalanceState::Rest => v1::RebalanceState::Rest,
        RebalanceState::Stopped => v1::RebalanceState::Aborted,
        RebalanceState::Displaced => v1::RebalanceState::Displaced,
    };
    (devices.len() > 1).then(|| v1::PoolRebalance {
        state: state.into(),
        left_bytes: to_wire(status.left),
        moved_bytes: to_wire(status.moved),
        moved_extents: status.extents,
        rate_bytes: to_wire(status.rate),
        waits_for_space: status.waits_for_space,
        errors: status.errors,
        devices,
    })
}

impl Control {
    /// Begins to move data to emptier devices of a pool, or ends that.
    pub(super) async fn rebalance_pool(
        &self,
        asked: &v1::RebalancePoolRequest,
    ) -> Result<v1::RebalancePoolResponse, Error> {
        let handle = self.pool(&asked.name)?;
        let failed = |error| pool_error(handle.name(), error);
        let rate = u64::try_from(asked.rate_bytes)
            .map_err(|_| Error::invalid("rate_bytes", asked.rate_bytes, "0 or more bytes"))?;
        let _one = self.lock_devices_of(&handle).await;
        let present = handle.evacuation(None).await.map_err(failed)?;
        let changed = match asked.action() {
            RebalanceAction::Unspecified => false,
            action => {
                let enabled = action == RebalanceAction::Begin;
                if let Some(leaving) = present.device.filter(|_| enabled) {
                    let path = handle.path_at(leaving).unwrap_or_default();
                    return Err(Error::in_use(path.display().to_string(), ONE_AT_A_TIME));
                }
                if enabled && handle.devices().len() < 2 {
                    let pool = format!("pool {}", shown(handle.name()));
                    let problem = "has one device: add another with `blockd pool device add`";
                    return Err(Error::in_use(pool, problem));
                }
                // The end of the one before is an event of its own.
                self.note_rebalanced(&handle).await.map_err(failed)?;
                let command = Command::Rebalance { enabled };
                handle.control(command).await.map_err(failed)? != Outcome::Unchanged
            }
        };
        if rate > 0 {
            self.set_rate(&handle, rate).await.map_err(failed)?;
        }
        let status = handle.rebalance().await.map_err(failed)?;
        if changed && asked.action() == RebalanceAction::Begin {
            let (pool, left) = (shown(handle.name()), human(status.left));
            let text = format!("devices of pool {pool} are evened out: {left} are to be moved");
            self.events().publish(EventKind::PoolRebalances, handle.name(), "", text);
        }
        self.note_rebalanced(&handle).await.map_err(failed)?;
        let (name, rebalance) = (handle.name().to_owned(), rebalance(&handle, &status));
        Ok(v1::RebalancePoolResponse { changed, name, rebalance })
    }

    /// Publishes the end of a rebalance, unless that was done.
    pub(super) async fn note_rebalanced(&self, handle: &PoolHandle) -> Result<(), PoolError> {
        if !handle.mapper().take_rebalanced() {
            return Ok(());
        }
        let status = handle.rebalance().await?;
        let (pool, moved) = (shown(handle.name()), human(status.moved));
        let how = match status.state {
            RebalanceState::Even => "evenly used",
            RebalanceState::Rest => "not more evenly used: the rest can't be moved now",
            RebalanceState::Displaced => "not evened out further: one of them leaves or shrinks",
            _ => "not evened out further, on request",
        };
        let text = format!("devices of pool {pool} are {how}; {moved} were moved");
        self.events().publish(EventKind::PoolRebalanced, handle.name(), "", text);
        Ok(())
    }
}
