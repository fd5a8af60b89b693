//! Volumes that were deleted, or rolled back, and whose former extents are let go of in the
//! background: how far that is, and a word when it is done.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;

use crate::error::shown;
use crate::pool::{PoolHandle, VolumeId};

use super::{Control, EventKind};

/// How often it is looked how far it has come: often enough that what is told at the end is news.
const LOOK: Duration = Duration::from_millis(50);

type Names = BTreeMap<VolumeId, String>;

/// By pool. The mapper knows only ids, and the name of a volume goes with it.
#[derive(Debug, Default)]
pub(super) struct Releases(Mutex<BTreeMap<[u8; 16], Names>>);

/// A volume whose extents are being let go.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Release {
    pub(super) pool: String,
    /// Empty where nobody knows any more.
    pub(super) name: String,
    /// Bytes that it mapped, shared ones as well.
    pub(super) total: u64,
    /// Of these, those that are still to be looked at.
    pub(super) left: u64,
}

impl Control {
    /// Remembers the name, and tells when it is done. One task looks for all of a pool.
    pub(super) fn watch_release(&self, pool: &PoolHandle, volume: VolumeId, name: &str) {
        let mut releases = self.0.releases.0.lock();
        let names = releases.entry(pool.id()).or_default();
        let is_first = names.is_empty();
        names.insert(volume, name.to_owned());
        drop(releases);
        if is_first {
            let (control, pool) = (self.clone(), pool.clone());
            tokio::spawn(async move { while control.look_at_releases(&pool).await {} });
        }
    }

    /// `false`: nothing is left of this pool.
    async fn look_at_releases(&self, pool: &PoolHandle) -> bool {
        tokio::time::sleep(LOOK).await;
        let known: Vec<VolumeId> = {
            let releases = self.0.releases.0.lock();
            releases
                .get(&pool.id())
                .map(|names| names.keys().copied().collect())
                .unwrap_or_default()
        };
        // Only what was known before the look: what comes meanwhile may not be there yet.
        let releasing = pool.releasing().await.unwrap_or_default();
        let mut done = Vec::new();
        let goes_on = {
            let mut releases = self.0.releases.0.lock();
            let Some(names) = releases.get_mut(&pool.id()) else { return false };
            for id in known {
                if releasing.iter().all(|one| one.volume != id) {
                    done.extend(names.remove(&id));
                }
            }
            let is_empty = names.is_empty();
            if is_empty {
                releases.remove(&pool.id());
            }
            !is_empty
        };
        for name in done {
            let text = format!("volume {}: what it no longer holds is let go", shown(&name));
            self.events().publish(EventKind::VolumeReleased, pool.name(), &name, text);
        }
        goes_on
    }

    /// What is being let go in some pools.
    pub(super) async fn releases(&self, pools: &[PoolHandle]) -> Vec<Release> {
        let mut all = Vec::new();
        for pool in pools {
            let Ok(releasing) = pool.releasing().await else { continue };
            let releases = self.0.releases.0.lock();
            let names = releases.get(&pool.id());
            all.extend(releasing.into_iter().map(|one| Release {
                pool: pool.name().to_owned(),
                name: names.and_then(|names| names.get(&one.volume)).cloned().unwrap_or_default(),
                total: one.extents * pool.extent_size(),
                left: one.left * pool.extent_size(),
            }));
        }
        all
    }
}
