//! Volumes that were deleted, or rolled back, and whose former extents are let go of in the
//! background: how far that is, and a word when it is done.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use blockd_api::v1;
use blockd_engine::pool::{PoolHandle, Releasing, VolumeId};
use blockd_media::error::shown;
use blockd_media::pool::PoolError;
use blockd_media::units::to_wire;
use parking_lot::Mutex;

use super::{Control, EventKind};

/// The interval of looks at the progress: short, so that its end is reported without delay.
const LOOK: Duration = Duration::from_millis(50);

/// The volumes whose extents are being reclaimed in a pool. A volume that is rolled back twice is
/// there twice: each time its former extents are reclaimed, in the order of the requests.
#[derive(Debug, Default)]
struct Names(BTreeMap<VolumeId, VecDeque<String>>);

/// The result of a look at a pool.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    /// The extents of these are reclaimed.
    Done(Vec<String>),
    /// Nothing was seen this time.
    Nothing,
    /// The pool is closed: the next owner knows no names.
    Gone,
}

impl Names {
    fn counts(&self) -> BTreeMap<VolumeId, usize> {
        self.0.iter().map(|(id, names)| (*id, names.len())).collect()
    }

    /// Takes out the finished ones. `known` are those that there were before the pool was asked:
    /// its answer may not have later ones yet.
    fn look(
        &mut self,
        known: &BTreeMap<VolumeId, usize>,
        releasing: Result<Vec<Releasing>, PoolError>,
    ) -> Seen {
        let releasing = match releasing {
            Ok(releasing) => releasing,
            Err(PoolError::Busy { .. }) => return Seen::Nothing,
            Err(_) => return Seen::Gone,
        };
        let mut done = Vec::new();
        for (id, known) in known {
            let left = releasing.iter().filter(|one| one.volume == *id).count();
            let Some(names) = self.0.get_mut(id) else { continue };
            let ended = known.saturating_sub(left).min(names.len());
            done.extend(names.drain(..ended));
        }
        self.0.retain(|_, names| !names.is_empty());
        Seen::Done(done)
    }

    /// The name by which a volume was known when it was last asked for.
    fn name(&self, id: VolumeId) -> Option<&String> {
        self.0.get(&id)?.back()
    }
}

/// By pool. The mapper knows only ids, and the name of a volume goes with it.
#[derive(Debug, Default)]
pub(super) struct Releases(Mutex<BTreeMap<[u8; 16], Names>>);

impl Control {
    /// Stores the name, and reports the end of the reclaim. One task looks for all of a pool.
    pub(super) fn watch_release(&self, pool: &PoolHandle, volume: VolumeId, name: &str) {
        let mut releases = self.0.releases.0.lock();
        let names = releases.entry(pool.id()).or_default();
        let is_first = names.0.is_empty();
        names.0.entry(volume).or_default().push_back(name.to_owned());
        drop(releases);
        if is_first {
            let (control, pool) = (self.clone(), pool.clone());
            tokio::spawn(async move { while control.look_at_releases(&pool).await {} });
        }
    }

    /// `false`: nothing is left of this pool.
    async fn look_at_releases(&self, pool: &PoolHandle) -> bool {
        tokio::time::sleep(LOOK).await;
        let known = self.0.releases.0.lock().get(&pool.id()).map(Names::counts);
        let releasing = pool.releasing().await;
        let (seen, goes_on) = {
            let mut releases = self.0.releases.0.lock();
            let Some(names) = releases.get_mut(&pool.id()) else { return false };
            let seen = names.look(&known.unwrap_or_default(), releasing);
            let goes_on = seen != Seen::Gone && !names.0.is_empty();
            if !goes_on {
                releases.remove(&pool.id());
            }
            (seen, goes_on)
        };
        let Seen::Done(done) = seen else { return goes_on };
        for name in done {
            let text = format!("volume {}: what it no longer holds is let go", shown(&name));
            self.events().publish(EventKind::VolumeReleased, pool.name(), &name, text);
        }
        goes_on
    }

    /// The volumes whose extents are being reclaimed in some pools.
    pub(super) async fn releases(&self, pools: &[PoolHandle]) -> Vec<v1::Releasing> {
        let mut all = Vec::new();
        for pool in pools {
            let Ok(releasing) = pool.releasing().await else { continue };
            let releases = self.0.releases.0.lock();
            let names = releases.get(&pool.id());
            all.extend(releasing.into_iter().map(|one| v1::Releasing {
                pool: pool.name().to_owned(),
                name: names.and_then(|names| names.name(one.volume)).cloned().unwrap_or_default(),
                total_bytes: to_wire(one.extents * pool.extent_size()),
                left_bytes: to_wire(one.left * pool.extent_size()),
            }));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn releasing(volume: u32) -> Releasing {
        Releasing { volume: VolumeId(volume), extents: 2, left: 1 }
    }

    fn names(all: &[(u32, &str)]) -> Names {
        let mut names = Names::default();
        for (id, name) in all {
            names.0.entry(VolumeId(*id)).or_default().push_back((*name).to_owned());
        }
        names
    }

    fn done(names: &[&str]) -> Seen {
        Seen::Done(names.iter().map(|name| (*name).to_owned()).collect())
    }

    #[test]
    fn a_volume_reclaimed_twice_is_reported_twice() {
        let mut names = names(&[(1, "a"), (1, "a"), (2, "b")]);
        let known = names.counts();
        let both = vec![releasing(1), releasing(1), releasing(2)];
        assert_eq!(names.look(&known, Ok(both)), done(&[]));
        assert_eq!(names.look(&known, Ok(vec![releasing(1)])), done(&["a", "b"]));
        let known = names.counts();
        assert_eq!(names.look(&known, Ok(vec![])), done(&["a"]));
        assert!(names.0.is_empty());
    }

    #[test]
    fn an_entry_that_came_during_a_look_is_not_done() {
        let mut names = names(&[(1, "a")]);
        let known = names.counts();
        names.0.entry(VolumeId(1)).or_default().push_back("a".to_owned());
        names.0.entry(VolumeId(2)).or_default().push_back("b".to_owned());
        assert_eq!(names.look(&known, Ok(vec![])), done(&["a"]));
        assert_eq!(names.counts(), BTreeMap::from([(VolumeId(1), 1), (VolumeId(2), 1)]));
    }

    #[test]
    fn a_pool_that_does_not_answer_has_not_let_go() {
        let mut names = names(&[(1, "a")]);
        let known = names.counts();
        let busy = Err(PoolError::Busy { limit: 1 });
        assert_eq!(names.look(&known, busy), Seen::Nothing);
        assert_eq!(names.look(&known, Err(PoolError::Gone)), Seen::Gone);
        assert_eq!(names.look(&known, Ok(vec![])), done(&["a"]));
    }
}
