//! A pool's thread: drives the engine, and nothing else. While it commits it allocates no more than
//! a few bytes for news of space, since what it commits may be what memory is waiting for.

mod asks;
mod commands;

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use blockd_mapper::engine::{ControlId, Engine, Outcome};
use blockd_mapper::error::MapperError;
use blockd_mapper::io::{IoCommand, IoError};
use blockd_mapper::pool::Pool;
use blockd_mapper::space::{SpaceChange, SpaceState};
use blockd_media::clock::Clock;
use blockd_media::pool::ownership::Ownership;
use blockd_media::pool::{PoolError, PoolSpec, storage};
use blockd_media::{Doorbell, Gate};
use futures_channel::{mpsc, oneshot};

use super::below::Below;
use super::discard::Discarder;
use super::driver::Served;
use super::ending::failure_of;
use super::handle::{Ask, MAX_WAITING, PoolHandle, PoolStats, Released, Shared};
use super::join::OpenDevices;
use crate::backing::{Ended, Ring};
use crate::mailbox::{Inbox, mailbox};
use crate::stats::MediaStats;

/// How long the end of a closed pool waits for discards. Beyond it the thread waits alone, and the
/// pool stays locked and claimed until they have ended.
const DISCARD_LIMIT: Duration = Duration::from_secs(2);
/// How often IO that found no space below is tried again.
const SPACE_PAUSE_NS: u64 = 250_000_000;
/// How often a pool that is short of space is looked at.
const LOOK_NS: u64 = 1_000_000_000;
/// The longest sleep, so that a clock that was set wrong does no harm.
const MAX_SLEEP_NS: u64 = 10_000_000_000;
/// IOs of its own that are watched at a time: the engine has fewer under way.
const WATCHED: usize = 64;

/// Changes of the space's state that may wait for the control service.
const MAX_CHANGES: usize = 64;

type Answer = oneshot::Sender<Result<Outcome, PoolError>>;

/// The state of a pool's thread.
pub(super) struct PoolThread {
    shared: Arc<Shared>,
    engine: Engine,
    ring: Ring,
    served: Vec<Served>,
    clock: Clock,
    asks: Inbox<Ask>,
    /// One that was taken out and has to wait for the next turn.
    held: Option<Ask>,
    answers: BTreeMap<ControlId, Answer>,
    /// Metadata that found no space below, and when it is tried again.
    starved: VecDeque<IoCommand>,
    /// Writes that wait until the claim is renewed; tried again at the same time.
    late: VecDeque<IoCommand>,
    retry_at: u64,
    /// The thread that waits for discards.
    discarder: Discarder,
    /// Commands begun that have not ended yet.
    under_way: usize,
    /// The thread's statistics of the devices, and the command of each of its places; 0 for none.
    seen: Arc<MediaStats>,
    watched: [u64; WATCHED],
    /// When it last asked for the time.
    now: u64,
    space_changes: mpsc::Sender<SpaceChange>,
    finished: u64,
    reported_failure: bool,
    closed: bool,
    /// The pool has failed, and the thread is to end when its IO has.
    abandoned: bool,
    ownership: Ownership,
}

impl std::fmt::Debug for PoolThread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PoolThread").field("name", &self.shared.name).finish_non_exhaustive()
    }
}

fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

impl PoolThread {
    /// The thread of a pool that has just been opened, and the handle to it.
    pub(super) fn new(
        spec: &PoolSpec,
        pool: Arc<Pool>,
        engine: Engine,
        ring: Ring,
        (served, members): (Vec<Served>, usize),
        (ring_file, ownership): (Option<PathBuf>, Ownership),
        clock: Clock,
    ) -> Result<(Self, PoolHandle), PoolError> {
        let (space_changes, changes) = mpsc::channel(MAX_CHANGES);
        let doorbell = Arc::new(Doorbell::new().map_err(PoolError::io("wake", "the pool"))?);
        let seen = Arc::new(MediaStats::new(served.len(), WATCHED, clock));
        let shared = Arc::new(Shared {
            name: spec.name.clone().into(),
            extent_size: pool.geometry().extent_size(),
            epoch: engine.epoch().0,
            open_id: engine.open_id(),
            pool,
            devices: OpenDevices::new(served.iter().map(|one| &one.device)),
            members,
            doorbell,
            below: Below::default(),
            workers: std::array::from_fn(|_| std::sync::OnceLock::new()),
            committing: AtomicU64::new(0),
            stats: PoolStats::default(),
            space_changes: parking_lot::Mutex::new(Some(changes)),
            shares: parking_lot::Mutex::default(),
            window: Arc::default(),
            media: parking_lot::Mutex::new(vec![Arc::clone(&seen)]),
            released: Released::default(),
            ring_file,
        });
        let (send, asks) = mailbox(MAX_WAITING);
        let discarder = Discarder::new(Arc::clone(&shared));
        let handle = PoolHandle { shared: Arc::clone(&shared), asks: send };
        let thread = Self {
            shared,
            engine,
            ring,
            served,
            clock,
            asks,
            held: None,
            answers: BTreeMap::new(),
            starved: VecDeque::with_capacity(64),
            late: VecDeque::with_capacity(64),
            retry_at: 0,
            discarder,
            under_way: 0,
            seen,
            watched: [0; WATCHED],
            now: 0,
            space_changes,
            finished: 0,
            reported_failure: false,
            closed: false,
            abandoned: false,
            ownership,
        };
        if let Some(gate) = thread.gate() {
            gate.ring_when_lost(&thread.shared.doorbell);
        }
        Ok((thread, handle))
    }

    /// Serves until the pool is closed, or has failed and is given up.
    pub(super) fn run(mut self) {
        blockd_media::hardening::protect_thread(&thread_name(self.shared.name.get()));
        blockd_media::hardening::run_before_others();
        blockd_media::hardening::stay_on(&self.shared.nearby());
        let _vital = blockd_media::hardening::Vital;
        let doorbell = Arc::clone(&self.shared.doorbell);
        if let Err(error) = self.ring.listen(&doorbell) {
            blockd_media::hardening::give_up(&format!("it can't be woken: {error}"));
        }
        tracing::debug!(pool = %self.shared.name, "pool's thread runs");
        while !self.closed && !self.is_given_up() {
            if let Err(error) = self.turn() {
                blockd_media::hardening::give_up(&format!("it has lost its ring: {error}"));
            }
        }
        if let (true, Some(path)) = (self.closed, &self.shared.ring_file) {
            // The owner lock is still held. A file that stays does no harm but take memory.
            let _ = std::fs::remove_file(path);
            let _ = std::fs::remove_file(storage::file_of(path));
        }
        self.end_discards();
        // One that is only read is closed while workers may still read.
        if self.under_way == 0 && !self.shared.pool.is_read_only() {
            self.release();
        }
        self.shared.released.set();
    }

    /// Releases locks and claim: no IO is left.
    fn release(&mut self) {
        if self.closed {
            self.end_erasing();
            self.ownership.release();
        } else {
            for device in self.shared.devices() {
                if let Err(error) = device.forget_clean_cache() {
                    let path = device.info().path.display();
                    tracing::warn!(%path, %error, "the page cache of a failed pool stays");
                }
            }
            self.ownership.abandon();
        }
        // Rings hold the files until the kernel has cleared them away, which may take long:
        // the next owner need not wait for that, since no IO is left (rule R11).
        for device in self.shared.devices() {
            device.unlock();
        }
    }

    /// Whether the pool has failed, none of its IO is left, and its thread is to end. The engine
    /// has begun nothing since the failure (R8).
    fn is_given_up(&self) -> bool {
        let waiting = self.starved.len() + self.late.len();
        self.abandoned && self.under_way + waiting == 0
    }

    /// Waits for discards that the closed pool has left under way: the next owner may write where
    /// they take effect. Until then the claim is renewed. A discard that the kernel has is waited
    /// for however long it takes; those behind it are skipped.
    fn end_discards(&mut self) {
        let clock = Clock::start();
        while self.closed && self.under_way > 0 {
            let is_late = self.shared.released.is_set();
            let left = if is_late { Duration::MAX } else { DISCARD_LIMIT };
            match self.discarder.ended_within(left.saturating_sub(clock.elapsed())) {
                Some((command, result)) => {
                    self.under_way -= 1;
                    self.engine.complete(command, result);
                }
                // The thread has ended, which it does not while it has work.
                None if is_late => return,
                None => {
                    let pool = &self.shared.name;
                    tracing::warn!(%pool, "discards have not ended: stays locked until they have");
                    self.discarder.skip();
                    self.shared.released.set();
                }
            }
        }
    }

    /// Notes that all that was freed has been overwritten, if it has: else the next open does that.
    fn end_erasing(&self) {
        if !self.engine.is_scrubbed() || self.discarder.has_left_out() {
            return;
        }
        for pmem in self.shared.devices().filter_map(|device| device.pmem()) {
            if let Err(error) = pmem.erase_ended() {
                tracing::warn!(pool = %self.shared.name, %error, "free space is erased again");
            }
        }
    }

    fn gate(&self) -> Option<&Arc<Gate>> {
        self.served.iter().find_map(|one| one.device.gate())
    }

    /// Stops the pool whose storage is another host's.
    fn look_at_gate(&self) {
        let Some(gate) = self.gate() else { return };
        if let Some(node) = gate.lost_to() {
            self.shared.pool.lose_claim(node);
        }
        if let Some(problem) = gate.problem() {
            let (name, problem) = (format!("pool {}", self.shared.name), problem.to_owned());
            self.shared.pool.halt(MapperError::Device { name, problem });
        }
    }

    fn turn(&mut self) -> std::io::Result<()> {
        if !self.reported_failure {
            self.look_at_gate();
        }
        self.take_asks();
        self.take_discarded();
        self.poll()?;
        self.answer();
        self.wake();
        while let Some(change) = self.engine.take_space_change() {
            // A receiver that is so far behind gets the next one.
            let _ = self.space_changes.try_send(change);
        }
        if self.closed || self.is_given_up() {
            return Ok(());
        }
        // A poll may end with something left to do, and a worker may have asked for it meanwhile.
        let sleep = match self.shared.pool.engine_wanted() || self.held.is_some() {
            true => Duration::ZERO,
            false => self.longest_sleep(),
        };
        self.ring.enter_for(1, sleep)?;
        while let Some(ended) = self.ring.reap() {
            match ended {
                Ended::Command(command, result) => self.command_ended(command, result),
                Ended::Rung => count(&self.shared.stats.wakeups, 1),
                _ => {}
            }
        }
        Ok(())
    }

    /// Takes commands from the engine until it has none.
    fn poll(&mut self) -> std::io::Result<()> {
        let now = self.clock.ns();
        self.now = now;
        let waits = !self.starved.is_empty() || !self.late.is_empty();
        if waits && self.has_failed() {
            // Nothing more is written after a failure (R8).
            while let Some(command) = self.starved.pop_front().or_else(|| self.late.pop_front()) {
                self.engine.complete(command, Err(IoError::NoSpace));
            }
        }
        if waits && now >= self.retry_at {
            for _ in 0..self.starved.len() + self.late.len() {
                if let Some(command) = self.starved.pop_front().or_else(|| self.late.pop_front()) {
                    self.begin(command);
                }
            }
        }
        while let Some(command) = self.engine.poll(now) {
            self.begin(command);
            if self.ring.unsubmitted() >= 16 {
                self.ring.enter(0)?;
            }
        }
        Ok(())
    }

    /// Wakes the workers that can go on.
    fn wake(&mut self) {
        let pool = &self.shared.pool;
        let failed = failure_of(pool);
        if let (Some(error), false) = (&failed, self.reported_failure) {
            self.reported_failure = true;
            tracing::error!(pool = %self.shared.name, %error, "pool has stopped (see DURABILITY.md)");
        }
        let finished = pool.commits_finished();
        let stopped = pool.failure().is_some();
        let mut slots = pool.take_wakeups();
        if finished != self.finished || stopped {
            self.finished = finished;
            self.shared.stats.commits.store(finished, Ordering::Relaxed);
            slots |= self.shared.committing.swap(0, Ordering::SeqCst);
        }
        self.shared.wake_workers(slots);
    }

    fn has_failed(&self) -> bool {
        failure_of(&self.shared.pool).is_some()
    }

    /// How long the engine can be left alone.
    fn longest_sleep(&self) -> Duration {
        let waits = !self.starved.is_empty() || !self.late.is_empty();
        let starved = waits.then_some(self.retry_at);
        let at = [self.engine.next_deadline(), starved].into_iter().flatten().min();
        let longest = match self.engine.space_watch().state() {
            SpaceState::Normal => MAX_SLEEP_NS,
            _ => LOOK_NS,
        };
        let sleep = at.map_or(longest, |at| at.saturating_sub(self.clock.ns()));
        Duration::from_nanos(sleep.clamp(1000, longest))
    }
}

/// The name of a pool's thread.
pub(super) fn thread_name(pool: &str) -> String {
    format!("pool-{}", pool.chars().take(10).collect::<String>())
}
