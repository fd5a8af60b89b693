//! Requests for more space that wait, in the order that they came.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use crate::clock::wall_ms;

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    /// There is space.
    Granted,
    /// There is no volume of that name.
    NoVolume,
}

/// Who waits for what.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Waiting {
    /// The volume.
    pub(crate) volume: String,
    /// Bytes that it can still come to need, as the client says.
    pub(crate) room: u64,
    /// Who asks.
    pub(crate) peer: String,
    /// Since when, in milliseconds since 1970.
    pub(crate) since_unix_ms: i64,
}

#[derive(Debug)]
struct Waiter {
    id: u64,
    waiting: Waiting,
    /// It was looked at, and there was no space.
    refused: bool,
    answer: oneshot::Sender<Verdict>,
}

#[derive(Debug, Default)]
struct List {
    next: u64,
    waiters: VecDeque<Waiter>,
}

/// The waiting requests of a pool.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    list: Mutex<List>,
    entered: Notify,
}

/// A place in the queue, which is left when this goes.
#[derive(Debug)]
pub(super) struct Place {
    queue: Arc<Queue>,
    id: u64,
    pub(super) verdict: oneshot::Receiver<Verdict>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.queue.list.lock().waiters.retain(|waiter| waiter.id != self.id);
    }
}

impl Queue {
    /// Enters at the end.
    pub(super) fn enter(self: &Arc<Self>, volume: String, room: u64, peer: String) -> Place {
        let (answer, verdict) = oneshot::channel();
        let waiting = Waiting { volume, room, peer, since_unix_ms: wall_ms() };
        let mut list = self.list.lock();
        let id = list.next;
        list.next += 1;
        list.waiters.push_back(Waiter { id, waiting, refused: false, answer });
        drop(list);
        self.entered.notify_one();
        Place { queue: Arc::clone(self), id, verdict }
    }

    /// Waits for somebody to enter.
    pub(super) async fn entered(&self) {
        self.entered.notified().await;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.lock().waiters.is_empty()
    }

    /// Those that wait, the first first.
    pub(crate) fn waiting(&self) -> Vec<Waiting> {
        self.list.lock().waiters.iter().map(|waiter| waiter.waiting.clone()).collect()
    }

    /// Ends the requests for volumes that do not exist, and of the others those for which there is
    /// space, up to the first for which there is none: nobody passes by another. `needed` says what
    /// a request takes; nothing for no such volume. What is told to be there is told once. The
    /// answer is who begins to wait.
    pub(super) fn pass(
        &self,
        mut free: u64,
        needed: impl Fn(&Waiting) -> Option<u64>,
    ) -> Vec<Waiting> {
        let mut list = self.list.lock();
        let (mut blocked, mut left, mut new) = (false, VecDeque::new(), Vec::new());
        while let Some(mut waiter) = list.waiters.pop_front() {
            // Who has gone away is not told; the place goes with the connection.
            match needed(&waiter.waiting) {
                None => drop(waiter.answer.send(Verdict::NoVolume)),
                Some(bytes) if !blocked && bytes <= free => {
                    free -= bytes;
                    let _ = waiter.answer.send(Verdict::Granted);
                }
                Some(_) => {
                    blocked = true;
                    if !waiter.refused {
                        waiter.refused = true;
                        new.push(waiter.waiting.clone());
                    }
                    left.push_back(waiter);
                }
            }
        }
        list.waiters = left;
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enter(queue: &Arc<Queue>, volume: &str, room: u64) -> Place {
        queue.enter(volume.to_owned(), room, "somebody".to_owned())
    }

    fn volumes(queue: &Queue) -> Vec<String> {
        queue.waiting().into_iter().map(|one| one.volume).collect()
    }

    #[expect(clippy::unnecessary_wraps, reason = "as the queue wants it")]
    fn all(waiting: &Waiting) -> Option<u64> {
        Some(waiting.room)
    }

    #[test]
    fn nobody_passes_by_another() {
        let queue = Arc::new(Queue::default());
        let [mut large, mut small] =
            [("large", 10), ("small", 1)].map(|(name, room)| enter(&queue, name, room));
        assert_eq!(queue.pass(9, all).len(), 2);
        assert!(large.verdict.try_recv().is_err() && small.verdict.try_recv().is_err());
        assert_eq!(queue.pass(9, all).len(), 0, "they were told of");
        assert_eq!(queue.pass(10, all).len(), 0);
        assert_eq!(large.verdict.try_recv(), Ok(Verdict::Granted));
        assert!(small.verdict.try_recv().is_err(), "the same space is not told of twice");
        queue.pass(1, all);
        assert_eq!(small.verdict.try_recv(), Ok(Verdict::Granted));
        assert!(queue.is_empty());
    }

    #[test]
    fn who_hangs_up_is_not_waited_for() {
        let queue = Arc::new(Queue::default());
        let places = ["a", "b", "c"].map(|name| enter(&queue, name, 5));
        queue.pass(0, all);
        let [first, mut second, third] = places;
        drop((first, third));
        assert_eq!(volumes(&queue), ["b"]);
        queue.pass(5, all);
        assert_eq!(second.verdict.try_recv(), Ok(Verdict::Granted));
    }

    #[test]
    fn a_volume_that_is_gone_holds_nobody_up() {
        let queue = Arc::new(Queue::default());
        let [mut first, mut gone, mut last] = ["a", "gone", "c"].map(|name| enter(&queue, name, 5));
        queue.pass(0, |one| (one.volume != "gone").then_some(one.room));
        assert_eq!(gone.verdict.try_recv(), Ok(Verdict::NoVolume));
        assert_eq!(volumes(&queue), ["a", "c"]);
        queue.pass(10, all);
        for place in [&mut first, &mut last] {
            assert_eq!(place.verdict.try_recv(), Ok(Verdict::Granted));
        }
    }
}
