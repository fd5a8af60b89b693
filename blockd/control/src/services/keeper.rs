//! Keeps an eye on the space of each pool: says when it runs short, and finds more.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use blockd_engine::pool::{Policy, PoolHandle, SpaceChange, SpaceState};
use blockd_media::DeviceInfo;
use blockd_media::clock::Clock;
use blockd_media::error::{Error, shown};
use blockd_media::units::human;
use futures_channel::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::config::{PoolConfig, SpaceConfig};
use crate::hook;
use crate::pool::{self, PoolSpace};

use super::{Control, EventKind, pool_error};

/// How often what is below a pool is looked at, and what waits for space.
const LOOK: Duration = Duration::from_secs(1);
/// For how many seconds a write has to wait before that is said, and said again: a guest gives up
/// after 60 to 120.
const BLOCKED_SECONDS: [u64; 3] = [30, 60, 110];
/// How long it takes at the most until a pool's state follows from its space.
const SETTLE: Duration = Duration::from_millis(50);
/// A pool that could not be made larger is tried again after this.
const RETRY: Duration = Duration::from_secs(30);

/// State of one pool that is kept from one look to the next.
struct Keeper {
    finder: Arc<Finder>,
    state: SpaceState,
    /// The last reported free space below the pool.
    below: Option<u64>,
    /// The devices that have left and are noted; `None` before the first look.
    departed: Option<BTreeSet<usize>>,
    /// A device that has shrunk could not be cut off: the next request does it.
    is_uncut: bool,
    /// The number of reported times of waiting.
    notified_blocked: usize,
    /// More space is being looked for. The search may take as long as a hook may, and changes are
    /// reported meanwhile.
    finding: Option<JoinHandle<bool>>,
    /// When the last try to find more space ended without any.
    gave_up: Option<Instant>,
}

/// Makes one pool larger.
struct Finder {
    control: Control,
    handle: PoolHandle,
    space: SpaceConfig,
}

impl Control {
    /// Watches a pool from now on, until it is closed.
    pub(super) fn keep_space(&self, handle: &PoolHandle, config: &PoolConfig) {
        let Some(changes) = handle.take_space_changes() else { return };
        let finder =
            Finder { control: self.clone(), handle: handle.clone(), space: config.space.clone() };
        tokio::spawn(Keeper::new(finder).run(changes));
    }

    /// Makes a pool's device longer. Gives the bytes gained.
    pub(super) async fn grow_pool(
        &self,
        pool: &str,
        device: usize,
        size: Option<u64>,
    ) -> Result<u64, Error> {
        let handle = self.pool(pool)?;
        let _one = self.lock_devices_of(&handle).await;
        let gained = pool::grow(&handle, device, size).await;
        let gained = gained.map_err(|error| pool_error(handle.name(), error))?;
        if gained > 0 {
            let text = format!("pool {} has grown by {}", shown(handle.name()), human(gained));
            self.events().publish(EventKind::PoolGrown, handle.name(), "", text);
        }
        Ok(gained)
    }
}

impl Keeper {
    fn new(finder: Finder) -> Self {
        Self {
            finder: Arc::new(finder),
            state: SpaceState::Normal,
            below: None,
            departed: None,
            is_uncut: false,
            notified_blocked: 0,
            finding: None,
            gave_up: None,
        }
    }

    async fn run(mut self, mut changes: mpsc::Receiver<SpaceChange>) {
        let mut tick = tokio::time::interval(LOOK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                change = changes.recv() => match change {
                    Ok(change) => self.changed(&change),
                    // The pool's thread has ended.
                    Err(_) => return,
                },
                found = ended(&mut self.finding) => {
                    self.gave_up = (!found).then(Instant::now);
                    // The search has reported the space below itself.
                    self.below = None;
                }
                _ = tick.tick() => {
                    self.look_below().await;
                    self.look_who_waits();
                    self.note_departed().await;
                    self.note_shrunk().await;
                    // It fails with the pool, which is news of its own.
                    let _ = self.finder.control.note_rebalanced(&self.finder.handle).await;
                }
            }
            self.find_more();
        }
    }

    /// A file with holes has no more than the file system below has.
    async fn look_below(&mut self) {
        let below = pool::free_below(&self.finder.handle).await;
        if below != self.below && self.finder.handle.set_policy(Policy::FreeBelow(below)).is_ok() {
            self.below = below;
        }
    }

    /// Says for how long writes have been waiting.
    fn look_who_waits(&mut self) {
        let (mut writes, mut longest) = (0, 0);
        self.finder.control.data_path().each_volume(&mut |one| {
            let blocked = one.blocked.get();
            if blocked > 0 && one.pool.is(self.finder.handle.name()) {
                writes += blocked;
                longest = one.blocked_ns.get().max(longest);
            }
        });
        let seconds = longest / 1_000_000_000;
        let reached = BLOCKED_SECONDS.iter().filter(|&&mark| seconds >= mark).count();
        if reached > self.notified_blocked {
            let text = format!(
                "{writes} writes wait for space in pool {}, the first for {seconds} s: it needs \
                 to grow, or something in it to be deleted or discarded",
                shown(self.finder.handle.name())
            );
            self.publish(EventKind::WritesBlocked, text);
        }
        self.notified_blocked = reached;
    }

    /// Notes devices that have left, also before the pool was opened: the note may have failed.
    async fn note_departed(&mut self) {
        let handle = &self.finder.handle;
        let departed: BTreeSet<usize> = handle.departed().map(|(number, _)| number).collect();
        if self.departed.as_ref() == Some(&departed) {
            return;
        }
        let pool = handle.name();
        match self.finder.control.forget_departed(handle).await {
            Ok(departed) => {
                let noted = self.departed.replace(departed.keys().copied().collect());
                for (number, path) in &departed {
                    let text = format!("device {} has left pool {}", path.display(), shown(pool));
                    match &noted {
                        // It had left when the pool was opened.
                        None => tracing::info!(pool, "{text}"),
                        Some(noted) if noted.contains(number) => {}
                        Some(_) => self.publish(EventKind::DeviceLeft, text),
                    }
                }
            }
            Err(error) => {
                tracing::error!(pool, %error, "a device that has left stays in the list of pools");
            }
        }
    }

    /// Cuts off what lies behind the new end of a device that has shrunk.
    async fn note_shrunk(&mut self) {
        let handle = &self.finder.handle;
        match self.finder.control.finish_shrink(handle).await {
            Ok(()) => self.is_uncut = false,
            Err(error) if !self.is_uncut => {
                self.is_uncut = true;
                tracing::error!(
                    pool = handle.name(), %error,
                    "a device that has shrunk in the pool is as long as before"
                );
            }
            Err(_) => {}
        }
    }

    fn publish(&self, kind: EventKind, text: String) {
        self.finder.control.events().publish(kind, self.finder.handle.name(), "", text);
    }

    fn changed(&mut self, change: &SpaceChange) {
        let kind = match change.to {
            SpaceState::Normal => EventKind::SpaceNormal,
            SpaceState::Low => EventKind::SpaceLow,
            SpaceState::VeryLow => EventKind::SpaceVeryLow,
            SpaceState::Full => EventKind::SpaceFull,
        };
        let text = event_text(self.finder.handle.name(), change);
        if change.from == change.to {
            // Readers of events are reminded; the log has said so already.
            self.finder.control.events().remind(kind, self.finder.handle.name(), text);
        } else {
            self.publish(kind, text);
        }
        self.state = change.to;
    }

    /// Begins to look for more space, if the pool needs it and there are means not known to
    /// be of no use now.
    fn find_more(&mut self) {
        let (control, handle) = (self.finder.control.clone(), self.finder.handle.clone());
        let configured = control.space_of(handle.name());
        if let Some(space) = configured.filter(|space| *space != self.finder.space) {
            // Other means are tried at once.
            self.finder = Arc::new(Finder { control, handle, space });
            self.gave_up = None;
        }
        let space = &self.finder.space;
        let has_means = space.grow_limit > 0
            || space.hook.is_some()
            || self.finder.handle.spare_count() > 0
            || self.finder.cell().is_some();
        if self.state == SpaceState::Normal {
            self.gave_up = None;
        } else if has_means
            && self.finding.is_none()
            && self.gave_up.is_none_or(|at| at.elapsed() >= RETRY)
        {
            let finder = Arc::clone(&self.finder);
            self.finding = Some(tokio::spawn(async move { finder.find().await }));
        }
    }
}

/// Waits for a search to end, and says whether it has found anything; for ever where there is none.
async fn ended(finding: &mut Option<JoinHandle<bool>>) -> bool {
    let Some(task) = finding else { return std::future::pending().await };
    let found = task.await.unwrap_or(false);
    *finding = None;
    found
}

impl Finder {
    /// Does what the configuration has for a pool that is low, one after the other until something
    /// has helped, and again until there is enough. False if nothing has helped any more.
    async fn find(&self) -> bool {
        loop {
            // A reported shortage may be over by now.
            match pool::space(&self.handle).await {
                Ok(space) if space.now.state != SpaceState::Normal => {
                    let clock = Clock::start();
                    if !(self.grow().await
                        || self.grow_cell(&space).await
                        || self.add_spare().await
                        || self.call_hook().await)
                    {
                        return false;
                    }
                    let took = u64::try_from(clock.elapsed().as_nanos()).unwrap_or(u64::MAX);
                    let _ = self.handle.set_policy(Policy::Extended(took));
                    self.look_below().await;
                    // The pool's thread looks at what there is now.
                    tokio::time::sleep(SETTLE).await;
                }
                _ => return true,
            }
        }
    }

    async fn look_below(&self) {
        let below = pool::free_below(&self.handle).await;
        let _ = self.handle.set_policy(Policy::FreeBelow(below));
    }

    async fn grow(&self) -> bool {
        let devices = self.handle.devices();
        let Some(present) = devices.first().map(|device| device.size) else { return false };
        if self.space.grow_limit == 0 {
            return false;
        }
        // A daemon that was killed while it grew the file has left it longer than the pool is.
        if self.grow_to(None).await {
            return true;
        }
        // A longer file with holes is of no use where it is the file system below that is full.
        if present >= self.space.grow_limit || self.handle.is_first_full_below() {
            return false;
        }
        let least = match self.space.grow_step {
            0 => default_refill(self.space.quantum, present),
            step => step,
        };
        let wanted = present.saturating_add(least).min(self.space.grow_limit);
        self.grow_to(Some(wanted)).await
    }

    /// The device of its cell, if it lies in one.
    fn cell(&self) -> Option<DeviceInfo> {
        let device = self.handle.devices().into_iter().next()?;
        self.control.is_in_cell(&device.path).then_some(device)
    }

    /// Takes more of the group that the pool's cell is in.
    async fn grow_cell(&self, space: &PoolSpace) -> bool {
        let Some(device) = self.cell() else { return false };
        // A crash may have come between the larger device and the pool's growth.
        if self.grow_to(None).await {
            return true;
        }
        let (rate, step) = (space.now.rate, self.space.grow_step);
        match self.control.extend_cell(&device.path, device.size, rate, step).await {
            Ok(true) => self.grow_to(None).await,
            Ok(false) => false,
            Err(error) => {
                let pool = self.handle.name();
                tracing::error!(pool, %error, "the pool is low and its cell can't be made larger");
                false
            }
        }
    }

    async fn grow_to(&self, wanted: Option<u64>) -> bool {
        match self.control.grow_pool(self.handle.name(), 0, wanted).await {
            Ok(gained) => gained > 0,
            Err(error) => {
                let pool = self.handle.name();
                tracing::error!(pool, %error, "the pool is low and can't be made larger");
                false
            }
        }
    }

    async fn add_spare(&self) -> bool {
        if self.handle.spare_count() == 0 {
            return false;
        }
        let _one = self.control.lock_devices_of(&self.handle).await;
        let name = self.handle.name();
        // A device that is refused keeps none out that comes after it.
        let refused = |error| {
            tracing::error!(pool = name, %error, "the pool is low and its spare device can't join it");
        };
        let Some((path, gained)) = pool::add_spare(&self.handle, refused).await else {
            return false;
        };
        let text = format!(
            "pool {} has grown by {}: {} has joined it",
            shown(name),
            human(gained),
            path.display()
        );
        self.control.events().publish(EventKind::PoolGrown, name, "", text);
        gained > 0
    }

    /// Runs the hook, and then takes what the devices have become longer by.
    async fn call_hook(&self) -> bool {
        let Some(hook) = &self.space.hook else { return false };
        let pool = self.handle.name();
        let (program, name, limit) = (hook.clone(), pool.to_owned(), self.space.hook_timeout);
        let run = move || hook::run(&program, &[&name], &[], limit);
        match tokio::task::spawn_blocking(run).await {
            Ok(Ok(ran)) => {
                let (output, ms) = (ran.output, ran.took.as_millis());
                tracing::info!(pool, hook = %hook.display(), ms, output, "the hook has run");
            }
            Ok(Err(error)) => {
                tracing::error!(pool, %error, "the pool is low and its hook has failed");
                return false;
            }
            Err(error) => {
                tracing::error!(pool, %error, "the pool is low and its hook was not run");
                return false;
            }
        }
        let mut gained = 0;
        for device in 0..self.handle.devices().len() {
            match self.control.grow_pool(self.handle.name(), device, None).await {
                Ok(more) => gained += more,
                Err(error) => tracing::warn!(pool, device, %error, "a device can't grow"),
            }
        }
        if gained == 0 {
            tracing::warn!(pool, hook = %hook.display(), "the hook has run, and nothing has grown");
        }
        gained > 0
    }
}

/// Bytes by which a pool grows at least, unless `grow_step` says: four quanta or 1 % of its size.
/// `grow_limit` caps the result.
fn default_refill(quantum: u64, present: u64) -> u64 {
    quantum.saturating_mul(4).max(present / 100)
}

fn event_text(pool: &str, change: &SpaceChange) -> String {
    let (pool, free, total) = (shown(pool), human(change.free), human(change.total));
    let rate = human(change.rate);
    match change.to {
        SpaceState::Normal => format!("pool {pool} has enough space again: {free} of {total}"),
        SpaceState::Low => {
            format!("pool {pool} is low: {free} of {total} left, {rate}/s were written lately")
        }
        SpaceState::VeryLow => format!(
            "pool {pool} is very low, and writes that need space are slowed down: {free} of \
             {total} left, {rate}/s were written lately"
        ),
        SpaceState::Full => format!(
            "pool {pool} is full: writes that need space wait until it grows, or something in it \
             is deleted or discarded"
        ),
    }
}

#[cfg(test)]
mod tests {
    use blockd_engine::pool::{Mark, Marks};
    use blockd_engine::stats::VolumeStats;

    use super::super::served::Permit;
    use super::*;
    use crate::services::events::EventReader;
    use crate::services::pools::{Opener, open_or_create};
    use crate::services::testing::{Rig, folder, memory_pool};

    fn keeper(rig: &Rig, handle: &PoolHandle) -> Keeper {
        let finder = Finder {
            control: rig.control.clone(),
            handle: handle.clone(),
            space: SpaceConfig::default(),
        };
        Keeper::new(finder)
    }

    #[test]
    fn default_refill_is_four_quanta_or_one_percent() {
        assert_eq!(default_refill(16 << 20, 1 << 30), 64 << 20);
        assert_eq!(default_refill(16 << 20, 100 << 30), 1 << 30);
        assert_eq!(default_refill(u64::MAX, 1 << 30), u64::MAX);
    }

    #[tokio::test]
    async fn waits_are_reported_after_30_60_and_110_seconds_and_again_when_others_wait() {
        let rig = Rig::without_pool(folder()).await;
        let opened =
            open_or_create(&memory_pool("p"), rig.folder.path(), Opener::default(), Permit::Create)
                .unwrap();
        let mut events = rig.control.events().reader(false, "p".to_owned());
        let mut keeper = keeper(&rig, &opened.handle);
        let of = |pool: &str, seconds: u64| {
            let stats = VolumeStats { pool: pool.to_owned().into(), ..VolumeStats::default() };
            stats.blocked.set(u64::from(seconds > 0) * 3);
            stats.blocked_ns.set(seconds * 1_000_000_000);
            std::sync::Arc::new(stats)
        };
        let times = [1, 29, 30, 31, 59, 60, 61, 109, 110, 111, 5000, 0, 29, 30];
        for seconds in times {
            // Another pool's are another keeper's.
            *rig.data_path.volumes.lock() = vec![of("p", seconds), of("q", 7777)];
            keeper.look_who_waits();
        }
        rig.control.events().close();
        for seconds in [30, 60, 110, 30] {
            let event = events.next().await.unwrap();
            assert_eq!(event.kind(), EventKind::WritesBlocked);
            let expected =
                format!("3 writes wait for space in pool p, the first for {seconds} s: it needs");
            assert!(event.text.starts_with(&expected), "{}", event.text);
        }
        assert_eq!(events.next().await, None);
        opened.handle.close().await.unwrap();
    }

    async fn next_kind(events: &mut EventReader) -> EventKind {
        let event = tokio::time::timeout(Duration::from_secs(60), events.next()).await;
        event.unwrap().unwrap().kind()
    }

    #[tokio::test]
    async fn each_crossing_is_an_event() {
        let rig = Rig::new().await;
        let handle = rig.control.pool("").unwrap();
        let mut events = rig.control.events().reader(false, "default".to_owned());
        let marks = |low, very_low| {
            let marks = Marks { low: Mark::Percent(low), very_low: Mark::Percent(very_low) };
            Policy::Marks(Some(marks))
        };
        for (policy, kind) in [
            (marks(100, 1), EventKind::SpaceLow),
            (Policy::FreeBelow(Some(0)), EventKind::SpaceFull),
            (Policy::FreeBelow(None), EventKind::SpaceLow),
            // Less than an extent is none.
            (Policy::FreeBelow(Some(1)), EventKind::SpaceFull),
            (Policy::FreeBelow(Some(64 << 10)), EventKind::SpaceVeryLow),
            (Policy::FreeBelow(None), EventKind::SpaceLow),
            (Policy::Marks(None), EventKind::SpaceNormal),
        ] {
            handle.set_policy(policy).unwrap();
            assert_eq!(next_kind(&mut events).await, kind, "{policy:?}");
        }
    }
}
