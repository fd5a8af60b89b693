//! Folds of a pool's composite entries: their figures, and the search for more on request.

use blockd_api::v1;
use blockd_engine::pool::{Control as Command, FoldStatus, Outcome};
use blockd_media::error::{Error, shown};
use blockd_media::units::to_wire;

use super::Control;
use super::errors::pool_error;

/// Figures of folds as a client gets them.
pub(super) fn folds(status: &FoldStatus) -> v1::PoolFolds {
    v1::PoolFolds {
        enabled: status.is_enabled,
        composite_entries: status.composite,
        running: status.running,
        folded: status.folded,
        copied_bytes: to_wire(status.bytes),
        abandoned: status.abandoned,
        settled: status.settled,
        rate_bytes: to_wire(status.rate),
        disabling: status.is_leaving,
    }
}

/// The name of the one feature that can be turned on and off.
const COMPOSITE: &str = "composite";

/// Refuses to fold what can't be folded.
fn check_rate(pool: &str, status: &FoldStatus) -> Result<(), Error> {
    if status.rate > 0 {
        return Ok(());
    }
    let problem =
        "folds nothing, as its fold_rate is 0: set it in [pool.space], and reload the daemon";
    Err(Error::in_use(format!("pool {}", shown(pool)), problem))
}

impl Control {
    /// Figures of a pool's folds. With `begin`, entries to be folded are looked for now.
    pub(super) async fn fold_pool(
        &self,
        pool: &str,
        begin: bool,
    ) -> Result<v1::FoldPoolResponse, Error> {
        let handle = self.pool(pool)?;
        let failed = |error| pool_error(handle.name(), error);
        let mut status = handle.folds(false).await.map_err(failed)?;
        let changed = begin && status.composite > 0;
        if changed {
            check_rate(handle.name(), &status)?;
            status = handle.folds(true).await.map_err(failed)?;
        }
        let (name, folds) = (handle.name().to_owned(), Some(folds(&status)));
        Ok(v1::FoldPoolResponse { changed, name, folds })
    }

    /// Turns a feature of a pool on, or begins to turn it off.
    pub(super) async fn set_pool_feature(
        &self,
        asked: &v1::SetPoolFeatureRequest,
    ) -> Result<v1::SetPoolFeatureResponse, Error> {
        if asked.feature != COMPOSITE {
            return Err(Error::invalid("feature", &asked.feature, COMPOSITE));
        }
        let handle = self.pool(&asked.name)?;
        let failed = |error| pool_error(handle.name(), error);
        let status = handle.folds(false).await.map_err(failed)?;
        if !asked.enabled && status.composite > 0 {
            check_rate(handle.name(), &status)?;
        }
        let command = Command::SetComposite { enabled: asked.enabled };
        let outcome = handle.control(command).await.map_err(failed)?;
        let changed = outcome != Outcome::Unchanged;
        let status = handle.folds(false).await.map_err(failed)?;
        if changed {
            tracing::info!(
                pool = handle.name(),
                enabled = status.is_enabled,
                disabling = status.is_leaving,
                entries = status.composite,
                "feature composite changed"
            );
        }
        let (name, folds) = (handle.name().to_owned(), Some(folds(&status)));
        Ok(v1::SetPoolFeatureResponse { changed, name, folds })
    }
}
