//! Namespaces that are deleted are overwritten with zeroes before their space is free: one at a
//! time, in the background, and on from where it was after a restart.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use blockd_pmem::platform::clear::Zeroing;

use super::DirectPool;
use super::journal::{Intent, Record};
use super::pool::uuid_of;
use crate::error::Error;

/// Overwritten between two looks at whether the daemon stops: some 50 ms.
const PIECE: u64 = 64 << 20;
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
    /// Opened already when they were deleted, so that nobody could come in between.
    held: BTreeMap<String, Zeroing>,
    done: BTreeMap<String, u64>,
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
            // That it panicked was told where it did.
            let _ = thread.join();
        }
    }

    /// Overwrites a namespace that is noted as such.
    pub(super) fn take(&self, uuid: String, zeroing: Zeroing) {
        self.shared().held.insert(uuid, zeroing);
        self.wake.notify_all();
    }

    /// Bytes that are done of one that is being overwritten.
    pub(super) fn done(&self, uuid: &str) -> Option<u64> {
        self.shared().done.get(uuid).copied()
    }

    fn stops(&self) -> bool {
        self.shared().stops
    }
}

fn run(pool: &DirectPool) {
    let scrubber = &pool.0.scrubber;
    loop {
        let mut has_failed = false;
        while let Some(record) = next(pool) {
            match scrub(pool, &record) {
                Ok(()) => {}
                Err(error) => {
                    let (pool, volume) = (pool.name(), &record.name);
                    tracing::warn!(pool, volume, %error, "it is overwritten later");
                    has_failed = true;
                }
            }
            scrubber.shared().done.remove(&record.uuid);
            if has_failed || scrubber.stops() {
                break;
            }
        }
        let shared = scrubber.shared();
        if shared.stops {
            return;
        }
        let wait = scrubber.wake.wait_timeout(shared, RETRY);
        let (shared, timed_out) = wait.unwrap_or_else(PoisonError::into_inner);
        if shared.stops {
            return;
        }
        drop(shared);
        let has_left = !pool.records(&[Intent::Creating, Intent::Deleting]).is_empty();
        if timed_out.timed_out()
            && has_left
            && let Err(error) = pool.tidy_up()
        {
            tracing::warn!(pool = pool.name(), %error, "what was begun is removed later");
        }
    }
}

fn next(pool: &DirectPool) -> Option<Record> {
    pool.records(&[Intent::Scrubbing]).into_iter().next()
}

/// Overwrites one, and removes it. Where the daemon stops it stays as far as it is.
fn scrub(pool: &DirectPool, record: &Record) -> Result<(), Error> {
    let scrubber = &pool.0.scrubber;
    let held = scrubber.shared().held.remove(&record.uuid);
    let mut zeroing = match held {
        Some(zeroing) => zeroing,
        None => {
            let inventory = pool.0.platform.read_with_users()?;
            let Some((_, namespace)) = inventory.namespace(uuid_of(record)?) else {
                if inventory.region(&pool.0.config.region).is_none() {
                    let problem = "its region is not there";
                    return Err(Error::in_use(format!("volume {}:", record.name), problem));
                }
                return pool.scrubbed(record);
            };
            if let Some(user) = namespace.users.first() {
                return Err(Error::in_use(format!("volume {}", record.name), user.to_string()));
            }
            pool.0.platform.zeroing(namespace, record.scrubbed_bytes)?
        }
    };
    let mut noted = zeroing.done();
    loop {
        if scrubber.stops() {
            return note(pool, record, zeroing.done());
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
            note(pool, record, noted)?;
        }
    }
    drop(zeroing);
    pool.scrubbed(record)
}

fn note(pool: &DirectPool, record: &Record, done: u64) -> Result<(), Error> {
    pool.change(|content| {
        for one in content.records.iter_mut().filter(|one| one.uuid == record.uuid) {
            one.scrubbed_bytes = done;
        }
    })
}
