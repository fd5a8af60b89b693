//! The latest events, kept for readers.

use std::collections::VecDeque;
use std::sync::Arc;

use blockd_api::v1;
use blockd_media::clock::wall_ms;
use parking_lot::Mutex;
use tokio::sync::watch;

pub use v1::EventKind;

/// Events that are kept. A reader that is further behind gets the number of events that it missed.
const KEPT: usize = 1024;

/// An event that is kept.
#[derive(Debug)]
struct Kept {
    event: v1::Event,
    /// The former name of its pool, where the pool was renamed.
    former: Option<String>,
}

/// Takes events from their sources, and gives each reader all of them.
#[derive(Debug)]
pub struct EventHub {
    kept: Mutex<VecDeque<Arc<Kept>>>,
    /// The sequence number of the newest event.
    newest: watch::Sender<u64>,
    closed: watch::Sender<bool>,
}

impl Default for EventHub {
    fn default() -> Self {
        let kept = Mutex::new(VecDeque::with_capacity(KEPT));
        Self { kept, newest: watch::Sender::new(0), closed: watch::Sender::new(false) }
    }
}

impl EventHub {
    /// Publishes that a pool was renamed. Readers of the pool of the former name follow it.
    pub fn publish_renamed(&self, former: &str, pool: &str, text: String) {
        tracing::info!(pool, "{text}");
        self.keep(EventKind::PoolRenamed, (pool, Some(former)), "", text);
    }

    /// Publishes an event to all readers and the log. Never blocks.
    pub fn publish(&self, kind: EventKind, pool: &str, volume: &str, text: impl Into<String>) {
        let text = text.into();
        let named = |name: &'_ str| (!name.is_empty()).then(|| name.to_owned());
        let (in_pool, of_volume) = (named(pool), named(volume));
        match kind {
            EventKind::PoolFailed
            | EventKind::DeviceFailed
            | EventKind::SpaceVeryLow
            | EventKind::SpaceFull
            | EventKind::WritesBlocked => {
                tracing::error!(pool = in_pool, volume = of_volume, "{text}");
            }
            EventKind::SpaceLow | EventKind::HealthAbnormal => {
                // The level of the line says it.
                let text = text.strip_prefix("warning: ").unwrap_or(&text);
                tracing::warn!(pool = in_pool, volume = of_volume, "{text}");
            }
            _ => tracing::info!(pool = in_pool, volume = of_volume, "{text}"),
        }
        self.keep(kind, (pool, None), volume, text);
    }

    /// Repeats an event for all readers; the log has it already.
    pub fn remind(&self, kind: EventKind, pool: &str, text: String) {
        self.keep(kind, (pool, None), "", text);
    }

    /// Keeps an event of a pool by its name, and its former one.
    fn keep(&self, kind: EventKind, names: (&str, Option<&str>), volume: &str, text: String) {
        let (pool, former) = names;
        let mut kept = self.kept.lock();
        let sequence = *self.newest.borrow() + 1;
        let event = v1::Event {
            sequence,
            time_unix_ms: wall_ms(),
            kind: kind.into(),
            pool: pool.to_owned(),
            volume: volume.to_owned(),
            text,
            missed: 0,
        };
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back(Arc::new(Kept { event, former: former.map(str::to_owned) }));
        // Under the lock, so that numbers rise in the order of the list.
        self.newest.send_replace(sequence);
    }

    /// A reader that sees what comes, and with `replay` first what is kept.
    #[must_use]
    pub fn reader(self: &Arc<Self>, replay: bool, pool: String) -> EventReader {
        let seen = if replay { 0 } else { *self.newest.borrow() };
        let (newest, closed) = (self.newest.subscribe(), self.closed.subscribe());
        let since = if replay { *newest.borrow() } else { seen };
        EventReader { hub: Arc::clone(self), seen, since, newest, closed, replay, pool }
    }

    /// Readers end once they have seen everything.
    pub fn close(&self) {
        self.closed.send_replace(true);
    }
}

/// One that reads events, in order.
#[derive(Debug)]
pub struct EventReader {
    hub: Arc<EventHub>,
    /// The number of the last event it has seen, or was too late for.
    seen: u64,
    /// The number of the last event when it began: the pool is that of this name by then.
    since: u64,
    newest: watch::Receiver<u64>,
    closed: watch::Receiver<bool>,
    /// Whether events before its start are replayed; missing ones of these are not reported.
    replay: bool,
    /// The pool whose events are sent; empty for all.
    pool: String,
}

impl EventReader {
    /// The next event; `None` once the hub is closed and all is read. May be cancelled.
    pub async fn next(&mut self) -> Option<v1::Event> {
        let mut missed = 0;
        loop {
            let found = {
                let kept = self.hub.kept.lock();
                let at = kept.partition_point(|one| one.event.sequence <= self.seen);
                kept.get(at).map(Arc::clone)
            };
            let Some(found) = found else {
                if *self.closed.borrow() {
                    return None;
                }
                let seen = self.seen;
                tokio::select! {
                    _ = self.newest.wait_for(|newest| *newest > seen) => {}
                    _ = self.closed.wait_for(|closed| *closed) => {}
                }
                continue;
            };
            let Kept { event, former } = &*found;
            if !std::mem::take(&mut self.replay) {
                missed += event.sequence - self.seen - 1;
            }
            self.seen = event.sequence;
            let is_of_it = former.as_ref().is_some_and(|former| *former == self.pool);
            if is_of_it && event.sequence > self.since {
                self.pool.clone_from(&event.pool);
            }
            if self.pool.is_empty() || self.pool == event.pool {
                return Some(v1::Event { missed, ..event.clone() });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn publish(hub: &EventHub, count: usize) {
        for _ in 0..count {
            hub.publish(EventKind::VolumeCreated, "p", "v", "a volume");
        }
    }

    async fn rest(mut reader: EventReader) -> Vec<(u64, u64)> {
        let mut seen = Vec::new();
        while let Some(event) = reader.next().await {
            seen.push((event.sequence, event.missed));
        }
        seen
    }

    #[tokio::test]
    async fn a_reader_sees_each_event_once_and_in_order() {
        let hub = Arc::new(EventHub::default());
        publish(&hub, 2);
        let (new, all) = (hub.reader(false, String::new()), hub.reader(true, String::new()));
        publish(&hub, 2);
        hub.close();
        assert_eq!(rest(new).await, [(3, 0), (4, 0)]);
        assert_eq!(rest(all).await, [(1, 0), (2, 0), (3, 0), (4, 0)]);
    }

    #[tokio::test]
    async fn a_slow_reader_gets_the_number_of_missed_events() {
        let hub = Arc::new(EventHub::default());
        let slow = hub.reader(false, String::new());
        publish(&hub, KEPT + 10);
        let late = hub.reader(true, String::new());
        hub.close();
        let (slow, late) = (rest(slow).await, rest(late).await);
        assert_eq!((slow.len(), slow[0], slow[1]), (KEPT, (11, 10), (12, 0)));
        assert_eq!((late.len(), late[0]), (KEPT, (11, 0)));
    }

    #[tokio::test]
    async fn a_reader_of_one_pool_sees_no_other() {
        let hub = Arc::new(EventHub::default());
        let mut reader = hub.reader(false, "q".to_owned());
        publish(&hub, 1);
        hub.publish(EventKind::PoolOpened, "q", "", "open");
        assert_eq!(reader.next().await.map(|event| event.sequence), Some(2));
    }

    #[tokio::test]
    async fn a_reader_follows_its_pool_to_another_name() {
        let hub = Arc::new(EventHub::default());
        let reader = hub.reader(false, "q".to_owned());
        hub.publish_renamed("p", "o", "another one".to_owned());
        hub.publish_renamed("q", "r", "q is r now".to_owned());
        hub.publish(EventKind::PoolFailed, "q", "", "a new pool of the former name");
        hub.publish(EventKind::PoolFailed, "r", "", "failed");
        let replaying = hub.reader(true, "q".to_owned());
        hub.close();
        assert_eq!(rest(reader).await, [(2, 0), (4, 0)]);
        // Another pool has the name by now.
        assert_eq!(rest(replaying).await, [(3, 0)]);
    }

    #[tokio::test]
    async fn a_waiting_reader_is_woken() {
        let hub = Arc::new(EventHub::default());
        let mut reader = hub.reader(false, String::new());
        let waiting = tokio::spawn(async move { reader.next().await.map(|event| event.sequence) });
        tokio::task::yield_now().await;
        publish(&hub, 1);
        assert_eq!(waiting.await.unwrap(), Some(1));
    }
}
