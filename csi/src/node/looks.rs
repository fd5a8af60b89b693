//! Checks of devices and file systems that may never return: one for each volume at a time, each
//! with a timeout. A thread that hangs in the kernel can't be taken out of there; the only remedy
//! is not to start another one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use blockd_csi_base::clock::Clock;
use parking_lot::Mutex;
use tokio::sync::{Mutex as Turns, Semaphore};

use super::world::Result;
use crate::error::Error;

/// Limit of checks in progress, including hanging ones. The runtime has 512 threads for blocking
/// work; the rest of them serves staging and publishing.
const AT_ONCE: usize = 64;

/// The outcome of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen<T> {
    Done(T),
    /// This check, or an earlier one, has been running for this time.
    Silent(Duration),
    /// The check was not started: too many others do not return.
    Crowded,
}

/// The looks of a process.
#[derive(Clone, Debug)]
pub struct Looks {
    volumes: Arc<Mutex<BTreeMap<String, Arc<Look>>>>,
    places: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct Look {
    turn: Arc<Turns<()>>,
    /// Since when one is under way.
    since: Mutex<Option<Clock>>,
}

impl Look {
    fn age(&self) -> Option<Duration> {
        self.since.lock().map(Clock::elapsed)
    }
}

impl Default for Looks {
    fn default() -> Self {
        Self { volumes: Arc::default(), places: Arc::new(Semaphore::new(AT_ONCE)) }
    }
}

impl Looks {
    /// Checks a volume. A check that takes longer than `limit` continues in the background, and
    /// until it ends this volume is not checked again.
    ///
    /// # Errors
    /// The look ended in the middle.
    pub async fn look<T: Send + 'static>(
        &self,
        volume: &str,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Seen<T>> {
        let look = Arc::clone(self.volumes.lock().entry(volume.to_owned()).or_default());
        let seen = self.wait(&look, limit, work).await;
        let mut volumes = self.volumes.lock();
        // Only the map's reference and this one exist: no other caller waits.
        if Arc::strong_count(&look) <= 2 {
            volumes.remove(volume);
        }
        seen
    }

    async fn wait<T: Send + 'static>(
        &self,
        look: &Arc<Look>,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Seen<T>> {
        // A check that was late once is not waited for again.
        if let Some(age) = look.age().filter(|age| *age >= limit) {
            return Ok(Seen::Silent(age));
        }
        let (mine, places) = (Arc::clone(look), Arc::clone(&self.places));
        let done = async move {
            let turn = Arc::clone(&mine.turn).lock_owned().await;
            // Places are never closed.
            let place = places.acquire_owned().await.ok();
            *mine.since.lock() = Some(Clock::start());
            let work = move || {
                let done = work();
                *mine.since.lock() = None;
                // The permit last: its holder is the only one that checks.
                drop((mine, place, turn));
                done
            };
            tokio::task::spawn_blocking(work).await
        };
        match tokio::time::timeout(limit, done).await {
            Ok(Ok(done)) => Ok(Seen::Done(done)),
            Ok(Err(error)) => Err(Error::unexpected("a look ended in the middle:", error)),
            Err(_) => Ok(look.age().map_or(Seen::Crowded, Seen::Silent)),
        }
    }

    /// Volumes with a check in progress or queued.
    #[must_use]
    pub fn count(&self) -> usize {
        self.volumes.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const SOON: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(60);

    /// Row: H43.
    #[tokio::test]
    async fn a_volume_that_does_not_answer_takes_one_thread_and_no_call() {
        let looks = Looks::default();
        let (release, held) = mpsc::channel::<()>();
        let hangs = move || held.recv().is_ok();
        assert!(matches!(looks.look("a", SOON, hangs).await.unwrap(), Seen::Silent(_)));
        for _ in 0..100 {
            let again = looks.look("a", SOON, || panic!("a second look")).await.unwrap();
            let Seen::Silent(age) = again else { panic!("{again:?}") };
            assert!(age >= SOON);
        }
        // Another volume is none of its business.
        assert_eq!(looks.look("b", LONG, || 7).await.unwrap(), Seen::Done(7));
        assert_eq!(looks.count(), 1);
        release.send(()).unwrap();
        // As soon as it answers it is checked again.
        loop {
            match looks.look("a", LONG, || 8).await.unwrap() {
                Seen::Done(done) => break assert_eq!(done, 8),
                _ => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        }
        assert_eq!(looks.count(), 0);
    }

    #[tokio::test]
    async fn two_calls_at_once_are_both_answered() {
        let looks = Looks::default();
        let slow = |number| {
            move || {
                std::thread::sleep(SOON);
                number
            }
        };
        let (one, two) =
            tokio::join!(looks.look("a", LONG, slow(1)), looks.look("a", LONG, slow(2)));
        assert_eq!((one.unwrap(), two.unwrap()), (Seen::Done(1), Seen::Done(2)));
        assert_eq!(looks.count(), 0);
    }

    #[tokio::test]
    async fn many_volumes_that_hang_leave_threads_for_others() {
        let looks = Looks::default();
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        for number in 0..AT_ONCE {
            let held = Arc::clone(&held);
            let hangs = move || held.lock().recv().is_ok();
            let seen = looks.look(&number.to_string(), SOON, hangs).await.unwrap();
            assert!(matches!(seen, Seen::Silent(_)), "{number}");
        }
        assert_eq!(looks.look("one more", SOON, || 1).await.unwrap(), Seen::Crowded);
        let free = tokio::task::spawn_blocking(|| 1).await.unwrap();
        assert_eq!(free, 1);
        drop(release);
        assert_eq!(looks.look("one more", LONG, || 1).await.unwrap(), Seen::Done(1));
    }

    #[tokio::test]
    async fn a_check_that_panics_is_reported_and_the_next_one_runs() {
        let looks = Looks::default();
        assert!(looks.look("a", LONG, || panic!("wanted")).await.is_err());
        assert_eq!(looks.look("a", LONG, || 1).await.unwrap(), Seen::Done(1));
    }
}
