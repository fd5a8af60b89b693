//! A worker's thread: one loop, one system call in each turn of it.

mod mail;
mod standby;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use blockd_engine::backing::{Ended, Ring, RingOptions};
use blockd_engine::mailbox::Inbox;
use blockd_engine::pool::PoolHandle;
use blockd_engine::schedule::Owner;
use blockd_engine::stats::{VolumeStats, WorkerStats};
use blockd_engine::volume::{Executor, Token};
use blockd_mapper::units::VolumeId;
use blockd_media::Doorbell;
use blockd_media::clock::{Clock, thread_cpu_ns};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::balance::{Load, Moves};
use super::queues::Queues;
use super::{ConnectionInfo, Mail, Target, WorkerOptions};
use crate::Context;
use crate::demands::Demands;
use crate::nbd::session::{Connection, Deadlines, Overdue};

/// Operations of a ring that can be out at once.
const OPERATIONS: u32 = 16384;
/// Volumes whose counters are kept, 7 KiB each: where volumes come and go by the thousand, the
/// counters of volumes without connections are dropped beyond it.
const MAX_STATS: usize = 4096;
/// The longest sleep: how often idle things are looked at, and how often while connections are held
/// back, whose clients may leave unseen.
const MAX_SLEEP: Duration = Duration::from_secs(1);
const WATCH_SLEEP: Duration = Duration::from_millis(250);

/// The parts that a thread starts with.
pub(super) struct Parts {
    pub(super) worker: usize,
    pub(super) options: WorkerOptions,
    pub(super) doorbell: Arc<Doorbell>,
    pub(super) clock: Clock,
    pub(super) inbox: Inbox<Mail>,
    pub(super) stats: Arc<WorkerStats>,
    pub(super) load: Arc<Load>,
    pub(super) moves: Moves,
    pub(super) demands: Arc<Demands>,
}

/// The state of a thread that other threads can see.
pub(super) struct Shown {
    /// Counters of the volumes that it serves or has served.
    pub(super) volumes: Arc<Mutex<Vec<Arc<VolumeStats>>>>,
    pub(super) connections: Arc<Mutex<Vec<(u64, ConnectionInfo)>>>,
    /// The device of each queue.
    pub(super) queues: Arc<Mutex<Vec<u32>>>,
}

/// A caller that waits for connections to a volume to end.
struct Closing {
    pool: [u8; 16],
    volume: VolumeId,
    count: usize,
    answer: oneshot::Sender<usize>,
}

/// The state of a worker's thread.
pub(super) struct WorkerThread {
    parts: Parts,
    ring: Ring,
    executor: Executor,
    clock: Clock,
    connections: Vec<Option<Connection>>,
    /// The target of each connection, for the worker that it may move to.
    targets: Vec<Option<Target>>,
    /// Connections that have something to send.
    touched: Vec<usize>,
    /// Connections that wait for room in the ring.
    stalled: Vec<usize>,
    queues: Queues,
    shown: Shown,
    closing: Vec<Closing>,
    standing: Vec<standby::Standing>,
    draining: Option<(u64, oneshot::Sender<()>)>,
    next_id: u64,
    /// When slow clients were looked for last.
    looked: u64,
    /// The processor time that the thread had used then.
    used_ns: u64,
    /// When clients of connections that are held back were looked for last.
    watched: u64,
    now: u64,
}

impl WorkerThread {
    pub(super) fn new(parts: Parts, shown: Shown) -> std::io::Result<Self> {
        let arena_bytes = parts.options.buffer_bytes;
        let mut ring =
            Ring::new(RingOptions { operations: OPERATIONS, arena_bytes, serves: true })?;
        ring.listen(&parts.doorbell)?;
        let clock = parts.clock;
        let executor = Executor::new(parts.worker, ring.free_bytes(), clock);
        let queues = Queues::new(Arc::clone(&parts.demands));
        Ok(Self {
            parts,
            ring,
            executor,
            clock,
            connections: Vec::new(),
            targets: Vec::new(),
            touched: Vec::with_capacity(64),
            stalled: Vec::with_capacity(64),
            queues,
            shown,
            closing: Vec::new(),
            standing: Vec::new(),
            draining: None,
            next_id: 1,
            looked: 0,
            used_ns: 0,
            watched: 0,
            now: 0,
        })
    }

    /// Serves until it is drained.
    pub(super) fn run(mut self) {
        blockd_media::hardening::protect_thread(&format!("worker-{}", self.parts.worker));
        let _vital = blockd_media::hardening::Vital;
        loop {
            self.take_mail();
            self.executor.poll(&mut self.ring);
            self.deliver();
            self.resume_held();
            self.resume_stalled();
            self.deliver();
            self.send();
            self.parts.stats.free_memory.set(self.ring.free_bytes());
            self.executor.pass_on();
            self.end_closing();
            if !self.standing.is_empty() {
                self.rest();
            }
            if self.is_drained() {
                break;
            }
            if let Err(error) = self.turn() {
                blockd_media::hardening::give_up(&format!("it has lost its ring: {error}"));
            }
        }
        // Answers that were given last are still here.
        while self.ring.unsubmitted() > 0 && self.ring.enter(0).is_ok() {}
        let Some((_, answer)) = self.draining.take() else { return };
        let left = self.connections.iter().flatten().count() + self.queues.busy();
        let serves_devices = self.queues.any();
        self.queues.leave(&mut self.executor);
        self.executor.drop_pools();
        let _ = answer.send(());
        if left > 0 {
            // Their requests have no answer, and their IO may still be on its way: its memory stays
            // allocated until the process ends.
            tracing::warn!(left, "connections were still busy when the time to end was over");
            std::mem::forget(self.executor);
            std::mem::forget(self.ring);
        } else if serves_devices {
            // A ring that is closed by a thread that lives on is torn down by a thread of the
            // kernel. Linux 6.12 then aborts a queue's requests once, while this thread can still
            // take one more in its name, which is neither aborted nor answered: the device hangs.
            // The ring is left to the thread's own end, where both are done by the same thread.
            std::mem::forget(self.ring);
        }
    }

    /// Submits, waits, and takes what has ended.
    fn turn(&mut self) -> std::io::Result<()> {
        if self.executor.has_ready() || self.queues.is_starting() {
            self.ring.enter(0)?;
        } else {
            let deadline = self.executor.next_deadline();
            let longest = if self.executor.has_holds() { WATCH_SLEEP } else { MAX_SLEEP };
            let sleep = deadline.map_or(longest, |at| {
                Duration::from_nanos(at.saturating_sub(self.now).max(1000)).min(longest)
            });
            self.ring.enter_for(1, sleep)?;
        }
        self.now = self.clock.ns();
        self.executor.set_now(self.now);
        while let Some(ended) = self.ring.reap() {
            if let Some(ended) = self.executor.ended(ended, &mut self.ring) {
                self.take_ended(ended);
            }
        }
        let mut context = Context { ring: &mut self.ring, executor: &mut self.executor };
        let (queues, load) = (&self.shown.queues, &self.parts.load);
        self.queues.after_turn((queues, load), &mut context);
        self.count();
        Ok(())
    }

    fn count(&mut self) {
        self.watch_held();
        let stats = &self.parts.stats;
        stats.enters.set(self.ring.enters());
        stats.media_operations.set(self.ring.file_operations());
        if self.now.saturating_sub(self.looked) < 1_000_000_000 {
            return;
        }
        self.balance();
        self.looked = self.now;
        self.executor.sweep();
        let WorkerOptions { send_limit, receive_limit, idle_limit, .. } = self.parts.options;
        let (send, receive) = (duration_ns(send_limit), duration_ns(receive_limit));
        let deadlines = Deadlines { send, receive, idle: idle_limit.map(duration_ns) };
        for at in 0..self.connections.len() {
            let Some(connection) = self.connections[at].as_mut() else { continue };
            let Some(overdue) = connection.enforce(self.now, &deadlines) else { continue };
            let stats = &self.parts.stats;
            match overdue {
                Overdue::Send => stats.send_timeouts.add(1),
                Overdue::Receive => stats.receive_timeouts.add(1),
                Overdue::Idle => stats.idle_timeouts.add(1),
                Overdue::Closing => {}
            }
            let shown = self.shown.connections.lock();
            if let Some((_, info)) = shown.iter().find(|(id, _)| *id == connection.id) {
                let (peer, export, reason) = (&info.peer, &info.export, overdue.reason());
                tracing::warn!(%peer, %export, reason, "connection closed");
            }
            drop(shown);
            // It may have ended.
            self.note(at);
        }
    }

    fn take_ended(&mut self, ended: Ended) {
        let token = match &ended {
            Ended::Received(token, _) | Ended::Sent(token, _, _) | Ended::Fetched(token, _) => {
                *token
            }
            Ended::Rung => {
                self.parts.stats.wakeups.add(1);
                return;
            }
            _ => return,
        };
        let mut context = Context { ring: &mut self.ring, executor: &mut self.executor };
        let at = match (Token::decode(token), &ended) {
            (Token::Queue { at, tag, step }, &Ended::Fetched(_, result)) => {
                self.queues.ended((at, tag, step), result, &mut context);
                return;
            }
            (Token::Connection { at, .. }, _) => at,
            _ => usize::MAX,
        };
        let Some(connection) = self.connections.get_mut(at).and_then(Option::as_mut) else {
            tracing::error!(token, "something has ended that belongs to no connection");
            return;
        };
        match ended {
            Ended::Received(_, result) => connection.received(result, &mut context),
            Ended::Sent(_, result, message) => connection.sent(result, message, &mut context),
            _ => {}
        }
        self.note(at);
    }

    /// Remembers what a connection needs now.
    fn note(&mut self, at: usize) {
        let Some(connection) = self.connections[at].as_mut() else { return };
        if connection.marks.touch() {
            self.touched.push(at);
        }
        if connection.is_stalled() && connection.marks.stall() {
            self.stalled.push(at);
            self.parts.stats.memory_waits.add(1);
        }
    }

    /// Gives answers to the connections that wait for them.
    fn deliver(&mut self) {
        while let Some(completion) = self.executor.take_done() {
            let mut context = Context { ring: &mut self.ring, executor: &mut self.executor };
            let at = match Token::decode(completion.tag) {
                Token::Queue { at, tag, .. } => {
                    self.queues.answered((at, tag), completion, &mut context);
                    continue;
                }
                Token::Connection { at, .. } => at,
                Token::Slot { .. } | Token::Copy { .. } => usize::MAX,
            };
            let Some(connection) = self.connections.get_mut(at).and_then(Option::as_mut) else {
                completion.buffer.into_iter().for_each(|buffer| self.ring.free(buffer));
                continue;
            };
            connection.answered(completion, &mut context);
            self.note(at);
        }
    }

    /// Goes on with what the scheduler held back, in its order.
    fn resume_held(&mut self) {
        if !self.executor.has_holds() {
            return;
        }
        // Answers that were sent may have been the last that could be, but for those that wait for
        // the end of a long read.
        for &at in &self.touched {
            let Some(connection) = self.connections[at].as_mut() else { continue };
            let mut context = Context { ring: &mut self.ring, executor: &mut self.executor };
            connection.read_on_first(&mut context);
        }
        while let Some(owner) = self.executor.next_runnable() {
            match owner {
                Owner::Queue(at) => {
                    let mut context =
                        Context { ring: &mut self.ring, executor: &mut self.executor };
                    self.queues.resume(at, &mut context);
                }
                Owner::Connection(at) => {
                    let one = self.connections.get_mut(at).and_then(Option::as_mut);
                    let Some(connection) = one else { continue };
                    let mut context =
                        Context { ring: &mut self.ring, executor: &mut self.executor };
                    connection.resume(&mut context);
                    self.note(at);
                }
            }
        }
        self.executor.end_resuming();
    }

    /// Counts what connections and queues that are held back wait for, and looks for clients that
    /// have closed their sockets meanwhile, or send no more.
    fn watch_held(&mut self) {
        let is_due = |since| self.now.saturating_sub(since) >= duration_ns(WATCH_SLEEP);
        if !self.executor.has_holds() || !is_due(self.watched) {
            return;
        }
        self.watched = self.now;
        self.executor.count_holds();
        let watched = |at: usize| {
            let connection = self.connections[at].as_ref()?;
            Some((at, connection.watched()?))
        };
        let ended = ended((0..self.connections.len()).filter_map(watched));
        for (at, is_gone) in ended {
            let Some(connection) = self.connections[at].as_mut() else { continue };
            let mut context = Context { ring: &mut self.ring, executor: &mut self.executor };
            if is_gone {
                connection.client_is_gone(&mut context);
            } else {
                connection.client_sends_no_more(&mut context);
            }
            self.note(at);
        }
    }

    fn resume_stalled(&mut self) {
        for _ in 0..self.stalled.len() {
            let Some(at) = self.stalled.pop() else { break };
            // From the front, so that each gets its turn.
            let Some(connection) = self.connections[at].as_mut() else { continue };
            connection.marks.unstall();
            let mut context = Context { ring: &mut self.ring, executor: &mut self.executor };
            connection.resume(&mut context);
            if connection.is_stalled() && connection.marks.stall() {
                self.stalled.insert(0, at);
            }
            self.note(at);
        }
    }

    /// Sends gathered replies, starts receives, and drops connections that have ended.
    fn send(&mut self) {
        while let Some(at) = self.touched.pop() {
            let Some(connection) = self.connections[at].as_mut() else { continue };
            connection.marks.untouch();
            let mut context = Context { ring: &mut self.ring, executor: &mut self.executor };
            connection.push(self.now, &mut context);
            if connection.has_ended() {
                self.remove(at);
            } else if connection.has_demand() {
                self.demand(at);
            } else if let Some(to) = connection.moves_now() {
                self.hand_over(at, to);
                // It stays if it could not move, and receives again.
                self.note(at);
            } else if connection.is_stalled() && connection.marks.stall() {
                self.stalled.push(at);
            }
        }
    }

    fn remove(&mut self, at: usize) {
        let Some(connection) = self.connections[at].take() else { return };
        self.stalled.retain(|&other| other != at);
        self.forget(at, connection.id);
        let mut context = Context { ring: &mut self.ring, executor: &mut self.executor };
        connection.release(&mut context);
    }

    /// A connection is not served here any more.
    fn forget(&mut self, at: usize, id: u64) {
        self.targets[at] = None;
        self.shown.connections.lock().retain(|(other, _)| *other != id);
        self.parts.load.end();
        self.parts.stats.connections.set(self.parts.stats.connections.get().saturating_sub(1));
    }

    /// Looks whether the thread is saturated. If it is, the active connection that has the least to
    /// do leaves it, so that it does not share it with the one that has the most.
    fn balance(&mut self) {
        let used = thread_cpu_ns();
        let elapsed = self.now.saturating_sub(self.looked);
        let busy = self.parts.load.set_busy(used.saturating_sub(self.used_ns), elapsed);
        let is_saturated = busy >= self.parts.options.saturated;
        self.used_ns = used;
        let mut least: Option<(u64, usize)> = None;
        for (at, one) in self.connections.iter_mut().enumerate() {
            let Some(connection) = one else { continue };
            let answered = connection.answered_lately();
            let is_less = least.is_none_or(|(most, _)| answered < most);
            if answered > 0 && is_less && connection.can_move() {
                least = Some((answered, at));
            }
        }
        let Some((_, at)) = least.filter(|_| is_saturated && self.executor.active() > 1) else {
            return;
        };
        let pool = self.targets[at].as_ref().map(|target| target.pool.id());
        let to = pool.and_then(|pool| self.parts.moves.relaxed(self.parts.worker, &pool));
        if let (Some(to), Some(connection)) = (to, self.connections[at].as_mut()) {
            connection.move_to(to);
        }
    }
}

/// The places of sockets whose peer sends no more, and whether the connection is closed or broken
/// as a whole.
fn ended<'a>(sockets: impl Iterator<Item = (usize, BorrowedFd<'a>)>) -> Vec<(usize, bool)> {
    // `nix` has no name for this event, and returns `None` for a set of events with one.
    let (no_more, gone) = (PollFlags::from_bits_retain(libc::POLLRDHUP), PollFlags::empty());
    let ended: Vec<_> = polled(sockets, no_more).into_iter().filter(|one| one.2).collect();
    // These events are reported always: both directions are closed, or there is an error.
    let ended = ended.into_iter().map(|(at, socket, _)| (at, socket));
    polled(ended, gone).into_iter().map(|(at, _, is_gone)| (at, is_gone)).collect()
}

/// Polls sockets. Returns each with whether there was an event.
fn polled<'a>(
    sockets: impl Iterator<Item = (usize, BorrowedFd<'a>)>,
    wanted: PollFlags,
) -> Vec<(usize, BorrowedFd<'a>, bool)> {
    let sockets: Vec<_> = sockets.collect();
    let mut polled: Vec<_> = sockets.iter().map(|(_, one)| PollFd::new(*one, wanted)).collect();
    if polled.is_empty() || poll(&mut polled, PollTimeout::ZERO).is_err() {
        return Vec::new();
    }
    let has_event = |one: &PollFd<'_>| one.revents().is_none_or(|events| !events.is_empty());
    let both = sockets.into_iter().zip(&polled);
    both.map(|((at, socket), one)| (at, socket, has_event(one))).collect()
}

fn duration_ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The counters of a volume that this worker has served before, or new ones.
fn stats_of(
    volumes: &Mutex<Vec<Arc<VolumeStats>>>,
    pool: Option<&PoolHandle>,
    volume: &str,
    worker: usize,
) -> Arc<VolumeStats> {
    let mut volumes = volumes.lock();
    // Read under the lock: a pool that is renamed has its name first, then all counters follow.
    let pool = pool.map(PoolHandle::name).unwrap_or_default();
    let is_of = |one: &&Arc<VolumeStats>| one.pool.is(pool) && one.volume.is(volume);
    if let Some(known) = volumes.iter().find(is_of) {
        return Arc::clone(known);
    }
    if volumes.len() >= MAX_STATS {
        volumes.retain(|one| Arc::strong_count(one) > 1);
    }
    let (pool, volume) = (pool.to_owned().into(), volume.to_owned().into());
    let stats = Arc::new(VolumeStats { pool, volume, worker, ..VolumeStats::default() });
    volumes.push(Arc::clone(&stats));
    stats
}
