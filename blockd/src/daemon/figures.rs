//! The shared and the exclusive bytes of volumes, for metrics. They are not stored but counted,
//! which takes time in proportion to the mapped blocks: a count that takes long is repeated seldom.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use blockd_engine::pool::{PoolHandle, VolumeId, VolumeSummary};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout};

/// After a count comes a pause of this many times its duration: counting for metrics takes at most
/// 5 % of a pool's thread.
const PAUSES: u32 = 19;

/// How long a scrape waits for a count. Scrapers wait for ten seconds, and pools are asked one
/// after the other.
const WAIT: Duration = Duration::from_secs(1);

/// Bytes of a volume's extents.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counted {
    /// Bytes that no other volume refers to.
    pub(super) exclusive: u64,
    /// Others do as well.
    pub(super) shared: u64,
}

/// The last count of a pool's volumes.
pub(super) type Volumes = Arc<BTreeMap<VolumeId, Counted>>;

/// The last count of one pool.
#[derive(Debug, Default)]
struct Last {
    is_running: bool,
    ended: Option<Instant>,
    took: Duration,
    volumes: Volumes,
}

impl Last {
    fn is_due(&self) -> bool {
        !self.is_running && self.ended.is_none_or(|ended| ended.elapsed() >= self.took * PAUSES)
    }
}

/// The last counts of all pools.
#[derive(Debug, Default)]
pub(super) struct Figures(Mutex<BTreeMap<[u8; 16], Arc<Mutex<Last>>>>);

impl Figures {
    /// The last count of a pool's volumes, repeated first where that is due and quick.
    pub(super) async fn of(&self, pool: &PoolHandle) -> Volumes {
        let last = Arc::clone(self.0.lock().entry(pool.id()).or_default());
        let is_due = {
            let mut last = last.lock();
            let is_due = last.is_due();
            last.is_running |= is_due;
            is_due
        };
        if is_due {
            let counting = tokio::spawn(count(pool.clone(), Arc::clone(&last)));
            // One that takes longer goes on, for a later scrape.
            let _ = timeout(WAIT, counting).await;
        }
        Arc::clone(&last.lock().volumes)
    }
}

async fn count(pool: PoolHandle, last: Arc<Mutex<Last>>) {
    let begun = Instant::now();
    let volumes = pool.volumes().await;
    let mut last = last.lock();
    last.is_running = false;
    last.took = begun.elapsed();
    last.ended = Some(Instant::now());
    if let Ok(volumes) = volumes {
        let counted = |one: &VolumeSummary| {
            Some((one.id, Counted { exclusive: one.exclusive?, shared: one.shared()? }))
        };
        last.volumes = Arc::new(volumes.iter().filter_map(counted).collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_count_runs_seldom_and_one_at_a_time() {
        let now = Instant::now();
        let mut last = Last::default();
        assert!(last.is_due(), "never counted");
        last.ended = Some(now);
        assert!(last.is_due(), "it took no time");
        last.took = Duration::from_secs(10);
        assert!(!last.is_due());
        last.ended = now.checked_sub(Duration::from_secs(191));
        assert!(last.ended.is_none() || last.is_due());
        last.is_running = true;
        assert!(!last.is_due());
    }
}
