//! Folds of a pool's composite entries: their figures, and the search for more on request.

use blockd_api::v1;
use blockd_engine::pool::FoldStatus;
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
    }
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
        if changed && status.rate == 0 {
            let problem = "folds nothing, as its fold_rate is 0: set it in [pool.space], and \
                           reload the daemon";
            return Err(Error::in_use(format!("pool {}", shown(handle.name())), problem));
        }
        if changed {
            status = handle.folds(true).await.map_err(failed)?;
        }
        let (name, folds) = (handle.name().to_owned(), Some(folds(&status)));
        Ok(v1::FoldPoolResponse { changed, name, folds })
    }
}
