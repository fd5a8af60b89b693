//! Requests for more space that wait, in the order that they came.

use std::collections::VecDeque;
use std::sync::Arc;

use blockd_engine::pool::Keep;
use blockd_media::clock::wall_ms;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

/// How a request ended.
#[derive(Debug)]
pub(super) enum Verdict {
    /// There is space, and it is kept for the volume once the client has its answer.
    Granted(Keep),
    /// There is no volume of that name.
    NoVolume,
}

/// A request that waits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Waiting {
    /// The volume.
    pub(crate) volume: String,
    /// Bytes that it can still come to need, as the client says.
    pub(crate) room: u64,
    /// The client of the request.
    pub(crate) peer: String,
    /// Since when, in milliseconds since 1970.
    pub(crate) since_unix_ms: i64,
}

#[derive(Debug)]
struct Waiter {
    id: u64,
    waiting: Waiting,
    /// Whether it was refused for lack of space.
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

    /// Waits for a request to enter.
    pub(super) async fn entered(&self) {
        self.entered.notified().await;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.lock().waiters.is_empty()
    }

    /// The requests that wait, the oldest first.
    pub(crate) fn waiting(&self) -> Vec<Waiting> {
        self.list.lock().waiters.iter().map(|waiter| waiter.waiting.clone()).collect()
    }

    /// The requests that wait with their numbers, the oldest first.
    pub(super) fn entries(&self) -> Vec<(u64, Waiting)> {
        let list = self.list.lock();
        list.waiters.iter().map(|waiter| (waiter.id, waiter.waiting.clone())).collect()
    }

    /// Ends a request. If its client has gone, the verdict is dropped.
    pub(super) fn end(&self, id: u64, verdict: Verdict) {
        let mut list = self.list.lock();
        let at = list.waiters.iter().position(|waiter| waiter.id == id);
        let waiter = at.and_then(|at| list.waiters.remove(at));
        drop(list);
        if let Some(waiter) = waiter {
            let _ = waiter.answer.send(verdict);
        }
    }

    /// The volume has another name: its requests keep waiting.
    pub(super) fn rename(&self, former: &str, name: &str) {
        for waiter in &mut self.list.lock().waiters {
            if waiter.waiting.volume == former {
                name.clone_into(&mut waiter.waiting.volume);
            }
        }
    }

    /// Notes that there is no space for a request. True the first time.
    pub(super) fn refuse(&self, id: u64) -> bool {
        let mut list = self.list.lock();
        let waiter = list.waiters.iter_mut().find(|waiter| waiter.id == id);
        waiter.is_some_and(|waiter| !std::mem::replace(&mut waiter.refused, true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enter(queue: &Arc<Queue>, volume: &str) -> Place {
        queue.enter(volume.to_owned(), 1, "a client".to_owned())
    }

    #[test]
    fn requests_leave_the_queue_when_they_end_or_their_client_goes() {
        let queue = Arc::new(Queue::default());
        let [mut first, gone, last] = ["a", "b", "c"].map(|name| enter(&queue, name));
        let ids: Vec<u64> = queue.entries().into_iter().map(|(id, _)| id).collect();
        drop(gone);
        assert!(queue.refuse(ids[0]) && !queue.refuse(ids[0]), "it is noted once");
        assert!(!queue.refuse(ids[1]));
        queue.end(ids[1], Verdict::NoVolume);
        queue.end(ids[0], Verdict::NoVolume);
        assert!(matches!(first.verdict.try_recv(), Ok(Verdict::NoVolume)));
        queue.rename("c", "d");
        let left: Vec<String> = queue.waiting().into_iter().map(|one| one.volume).collect();
        assert_eq!(left, ["d"]);
        drop((first, last));
        assert!(queue.is_empty());
    }
}
