//! Namespaces that are deleted are overwritten with zeroes before their space is free: one at a
//! time, in the background, and on from where it was after a restart.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use blockd_media::clock::Clock;
use blockd_media::error::Error;
use blockd_pmem::platform::Mode;
use blockd_pmem::platform::clear::Zeroing;

use super::DirectPool;
use super::journal::{Intent, Record};
use super::pool::uuid_of;

/// Overwritten between two looks at whether the daemon stops: some 50 ms.
pub(super) const PIECE: u64 = 64 << 20;
/// How far it is gets into the journal this often: that much is done twice after a crash.
const NOTE: u64 = 1 << 30;
/// After a failure it is tried again, and so is removing what could not be removed.
const RETRY: Duration = Duration::from_secs(30);

/// The thread that does it.
#[derive(Debug, Default)]
pub(super) struct Scrubber {
    shared: Mutex<Shared>,
    wake: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Shared {
    stops: bool,
    /// One was taken since the last round began.
    asked: bool,
    /// Opened already when they were deleted, so that no user could open them in between.
    held: BTreeMap<String, Zeroing>,
    done: BTreeMap<String, u64>,
    /// Started when failed work was last retried.
    looked: Option<Clock>,
}

impl Scrubber {
    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn start(pool: &DirectPool) -> Result<(), Error> {
        let own = pool.clone();
        let thread = thread::Builder::new().name("scrub".to_owned()).spawn(move || run(&own));
        let thread = thread.map_err(|source| Error::io("starting a thread", source))?;
        *pool.0.scrubber.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(())
    }

    pub(super) fn stop(&self) {
        self.shared().stops = true;
        self.wake.notify_all();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // The panic itself was reported already.
            let _ = thread.join();
        }
    }

    /// Overwrites a namespace that is noted as such.
    pub(super) fn take(&self, uuid: String, held: Option<Zeroing>) {
        let mut shared = self.shared();
        shared.asked = true;
        if let Some(zeroing) = held {
            shared.held.insert(uuid, zeroing);
        }
        drop(shared);
        self.wake.notify_all();
    }

    /// Bytes that are done of one that is being overwritten.
    pub(super) fn done(&self, uuid: &str) -> Option<u64> {
        self.shared().done.get(uuid).copied()
    }

    pub(super) fn stops(&self) -> bool {
        self.shared().stops
    }
}

fn run(pool: &DirectPool) {
    let scrubber = &pool.0.scrubber;
    // In the background: no call has to wait for it.
    if !matches!(pool.finish_growths(), Ok(true)) {
        pool.0.has_unfinished.store(true, Ordering::Relaxed);
    }
    loop {
        look(pool);
        // One that can't be overwritten now does not keep the others from it.
        let mut failed = BTreeSet::new();
        while let Some(record) = next(pool, &failed) {
            if let Err(error) = scrub(pool, &record) {
                let (pool, volume) = (pool.name(), &record.name);
                tracing::warn!(pool, volume, %error, "it is overwritten later");
                failed.insert(record.uuid.clone());
            }
            scrubber.shared().done.remove(&record.uuid);
            if scrubber.stops() {
                return;
            }
            look(pool);
        }
        let mut shared = scrubber.shared();
        let time = RETRY.saturating_sub(shared.looked.get_or_insert_with(Clock::start).elapsed());
        let wait =
            scrubber.wake.wait_timeout_while(shared, time, |shared| !shared.stops && !shared.asked);
        let (mut shared, _) = wait.unwrap_or_else(PoisonError::into_inner);
        if shared.stops {
            return;
        }
        shared.asked = false;
        drop(shared);
    }
}

/// Twice a minute: retries failed work, as the cause may have passed. Also while much is being
/// overwritten.
fn look(pool: &DirectPool) {
    let mut shared = pool.0.scrubber.shared();
    let looked = shared.looked.get_or_insert_with(Clock::start);
    if looked.elapsed() < RETRY {
        return;
    }
    *looked = Clock::start();
    drop(shared);
    if let Err(error) = pool.go_on() {
        tracing::warn!(pool = pool.name(), %error, "what was begun is ended later");
    }
}

fn next(pool: &DirectPool, failed: &BTreeSet<String>) -> Option<Record> {
    let mut records = pool.records(&[Intent::Scrubbing]).into_iter();
    records.find(|one| !failed.contains(&one.uuid))
}

/// Overwrites one, and removes it. Where the daemon stops it stays as far as it is.
pub(super) fn scrub(pool: &DirectPool, record: &Record) -> Result<(), Error> {
    let scrubber = &pool.0.scrubber;
    let held = scrubber.shared().held.remove(&record.uuid);
    let mut zeroing = match held {
        Some(zeroing) => zeroing,
        None => {
            let uuid = uuid_of(record)?;
            let mut inventory = pool.0.platform.read_with_users()?;
            let mut done = record.scrubbed_bytes;
            if inventory.namespace(uuid).is_some_and(|(_, one)| one.device.is_none()) {
                if pool.enable_to_clear(record)? {
                    done = 0;
                }
                inventory = pool.0.platform.read_with_users()?;
            }
            let Some((_, namespace)) = inventory.namespace(uuid) else {
                pool.region(&inventory)?;
                // It was removed by other means, and not overwritten since.
                pool.change(|content| content.has_remains = true)?;
                return pool.scrubbed(record);
            };
            if let Some(user) = namespace.users.first() {
                return Err(Error::in_use(format!("volume {}", record.name), user.to_string()));
            }
            if namespace.mode == Mode::Sector {
                // Each write goes to a block that is free, and what it replaces stays: only all of
                // its bytes hold no old block. The notes about sectors go first, so that nothing
                // has been done of one that still has them.
                let bare = pool.0.platform.make_bare(uuid)?;
                pool.0.platform.zeroing(&bare, 0)?
            } else {
                pool.0.platform.zeroing(namespace, done)?
            }
        }
    };
    let mut noted = zeroing.done();
    loop {
        if scrubber.stops() {
            return pool.note_scrubbed(record, zeroing.done());
        }
        let is_done = zeroing
            .go_on(PIECE)
            .map_err(|source| Error::io(format!("overwriting volume {}", record.name), source))?;
        scrubber.shared().done.insert(record.uuid.clone(), zeroing.done());
        if is_done {
            break;
        }
        if zeroing.done() - noted >= NOTE {
            noted = zeroing.done();
            pool.note_scrubbed(record, noted)?;
            look(pool);
        }
    }
    drop(zeroing);
    pool.scrubbed(record)
}
