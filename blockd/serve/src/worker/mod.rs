//! Worker threads: a ring each, serving the sessions they were given.

mod balance;
mod idle;
mod placement;
mod queues;
mod thread;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use blockd_engine::mailbox::{Mailbox, Undelivered, mailbox};
use blockd_engine::pool::PoolHandle;
use blockd_engine::stats::{Counter, VolumeStats, WorkerStats};
use blockd_mapper::units::VolumeId;
use blockd_media::Doorbell;
use blockd_media::clock::Clock;
use blockd_media::pool::MAX_WORKERS;
use crossbeam_channel::bounded;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::FrontendError;
use super::demands::Demands;
use super::nbd;
use super::ublk::{QueueHost, QueueSpec};
use balance::{Load, Moves, Moving, SATURATED};
use placement::Placement;

/// Messages that may wait for a worker.
const MAX_MAIL: usize = 4096;
/// How often a full mailbox is tried again.
const MAIL_PAUSE: Duration = Duration::from_millis(10);
/// How often it is looked whether a device's queues have ended.
const QUEUE_PAUSE: Duration = Duration::from_millis(2);

/// How workers are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WorkerOptions {
    /// Threads, 1 to [`MAX_WORKERS`].
    pub count: usize,
    /// Bytes of IO memory of each.
    pub buffer_bytes: usize,
    /// Requests of one connection that are carried out at a time.
    pub max_requests: usize,
    /// Thousandths of a processor from which a worker gives connections to another one.
    pub saturated: u64,
    /// How long a client may leave its replies unread.
    pub send_limit: Duration,
    /// How long a client may send nothing in the middle of a request.
    pub receive_limit: Duration,
    /// How long a client may stay connected without a request; `None` for ever.
    pub idle_limit: Option<Duration>,
}

impl Default for WorkerOptions {
    fn default() -> Self {
        Self {
            count: 2,
            buffer_bytes: 16 << 20,
            max_requests: 128,
            saturated: SATURATED,
            send_limit: Duration::from_secs(60),
            receive_limit: Duration::from_secs(30),
            idle_limit: None,
        }
    }
}

/// The volume that a session serves.
#[derive(Clone, Debug)]
pub struct Target {
    /// Its pool.
    pub pool: PoolHandle,
    /// Which of the pool's.
    pub volume: VolumeId,
    /// Its name.
    pub name: String,
}

/// A connection as others see it.
#[derive(Clone, Debug, Default)]
pub struct ConnectionInfo {
    /// Unique among those of its worker.
    pub id: u64,
    /// The client.
    pub peer: String,
    /// The same for limits, and the listener.
    pub origin: nbd::Origin,
    /// The export's name.
    pub export: String,
    /// The pool's identity.
    pub pool: [u8; 16],
    /// Which of the pool's volumes.
    pub volume: VolumeId,
    /// The worker that serves it.
    pub worker: usize,
    /// The result of the negotiation with the client.
    pub agreed: blockd_nbd::Negotiated,
    /// Requests of its that are being worked on.
    pub in_flight: Arc<Counter>,
    /// Whether it can give way to another.
    pub idle: Idle,
}

impl ConnectionInfo {
    /// Its number, unique since the start: workers count their own connections.
    #[must_use]
    pub const fn number(&self) -> u64 {
        ((self.worker as u64) << 48) | self.id
    }
}

/// Whether a connection can give way to another.
#[derive(Clone, Debug, Default)]
pub struct Idle {
    /// When it sent something last, by its worker's clock; [`u64::MAX`] in the middle of a request.
    since: Arc<Counter>,
    /// Set if it is about to be closed, to make room for another.
    chosen: Arc<AtomicBool>,
}

/// A message to a worker.
enum Mail {
    AddPool(PoolHandle, oneshot::Sender<Result<(), FrontendError>>),
    RemovePool([u8; 16], oneshot::Sender<bool>),
    Connect(OwnedFd, Box<nbd::Session<Target>>, Option<Moving>),
    CloseVolume([u8; 16], VolumeId, oneshot::Sender<usize>),
    /// The connection of that id, if it has been idle for this number of nanoseconds.
    CloseIdle(u64, u64, oneshot::Sender<bool>),
    Drain(Duration, oneshot::Sender<()>),
    StartQueue(Box<QueueSpec>, oneshot::Sender<Result<(), FrontendError>>),
    FailWaiting(u32),
    LetWait(u32),
    /// The clients of this pool's volumes are to wait; answered once no request is with it.
    StandBy([u8; 16], oneshot::Sender<()>),
    /// This pool was closed in order while its clients wait.
    AnswerFlushes([u8; 16], oneshot::Sender<()>),
    /// The clients of this pool's volumes are served again.
    Serve([u8; 16], oneshot::Sender<()>),
    StayOn(Vec<usize>),
}

/// State that a worker's thread and other threads share.
struct Shared {
    doorbell: Arc<Doorbell>,
    clock: Clock,
    mail: Mailbox<Mail>,
    stats: Arc<WorkerStats>,
    /// One for each volume that it serves or has served.
    volumes: Arc<Mutex<Vec<Arc<VolumeStats>>>>,
    connections: Arc<Mutex<Vec<(u64, ConnectionInfo)>>>,
    /// The devices whose queues it serves: one for each queue.
    queues: Arc<Mutex<Vec<u32>>>,
    load: Arc<Load>,
}

/// All worker threads. Clones name the same ones.
#[derive(Clone)]
pub struct Workers {
    threads: Arc<[Shared]>,
    next: Arc<AtomicUsize>,
    placement: Arc<Mutex<Placement>>,
    moves: Moves,
    demands: Arc<Demands>,
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workers").field("count", &self.threads.len()).finish()
    }
}

impl Workers {
    /// Starts the threads.
    pub fn start(options: WorkerOptions) -> Result<Self, FrontendError> {
        let invalid = |field, value, allowed| Err(FrontendError::Invalid { field, value, allowed });
        if !(1..=MAX_WORKERS).contains(&options.count) {
            return invalid("workers", options.count, "1 to 16");
        }
        if !((4 << 20)..=(1 << 30)).contains(&options.buffer_bytes) {
            return invalid("buffer_bytes", options.buffer_bytes, "4 MiB to 1 GiB");
        }
        if !(1..=1024).contains(&options.max_requests) {
            return invalid("max_requests", options.max_requests, "1 to 1024");
        }
        let placement = Placement::new(blockd_media::pool::nodes(), options.count);
        let placement = Arc::new(Mutex::new(placement));
        let moves = Moves::new(&placement);
        let (mut threads, demands) = (Vec::new(), Arc::<Demands>::default());
        // The workers share the limits of a volume, which are points in time.
        let clock = Clock::start();
        for worker in 0..options.count {
            threads.push(start_thread(worker, options, clock, moves.clone(), &demands)?);
        }
        let threads: Arc<[Shared]> = threads.into();
        moves.begin(&threads);
        Ok(Self { threads, next: Arc::new(AtomicUsize::new(0)), placement, moves, demands })
    }

    /// Serves a pool's volumes from now on. The first one whose memory is near to some processors
    /// spreads the workers over nodes.
    pub async fn add_pool(&self, pool: &PoolHandle) -> Result<(), FrontendError> {
        for (worker, cpus) in self.homes(pool) {
            self.threads[worker].post(Mail::StayOn(cpus)).await;
        }
        for thread in self.threads.iter() {
            let (send, receive) = oneshot::channel();
            thread.post(Mail::AddPool(pool.clone(), send)).await;
            receive.await.unwrap_or(Err(FrontendError::Gone))?;
        }
        Ok(())
    }

    /// Forgets a pool, once no volume of it is served. Its devices are closed when the last user of
    /// the handle is gone.
    pub async fn remove_pool(&self, pool: [u8; 16]) {
        for thread in self.threads.iter() {
            loop {
                let (send, receive) = oneshot::channel();
                thread.post(Mail::RemovePool(pool, send)).await;
                // A thread that has ended serves nothing.
                if receive.await.unwrap_or(true) {
                    break;
                }
                tokio::time::sleep(MAIL_PAUSE).await;
            }
        }
    }

    /// Where workers are to stay from now on, if that changes with this pool.
    fn homes(&self, pool: &PoolHandle) -> Vec<(usize, Vec<usize>)> {
        let mut placement = self.placement.lock();
        if !placement.note(pool.id(), &pool.nearby()) {
            return Vec::new();
        }
        tracing::info!(
            pool = pool.name(),
            "workers stay on nodes, one after the other, from now on"
        );
        (0..self.threads.len()).map(|worker| (worker, placement.home(worker).to_vec())).collect()
    }

    /// Ends all connections to a volume: requests in flight are answered, requests that wait for
    /// space fail. Returns their number once they are gone.
    pub async fn close_volume(&self, pool: [u8; 16], volume: VolumeId) -> usize {
        let mut closed = 0;
        // None is on its way to a worker that has closed those of its own already.
        let _still = self.moves.hold().await;
        for thread in self.threads.iter() {
            let (send, receive) = oneshot::channel();
            thread.post(Mail::CloseVolume(pool, volume, send)).await;
            closed += receive.await.unwrap_or(0);
        }
        closed
    }

    /// Has the clients of a pool's volumes wait, and comes back once no request is with the pool.
    /// False if that takes longer than the limit, or a worker has ended: then [`Self::serve`]
    /// reverts it. Otherwise the pool can be removed, and they wait until one of this identity is
    /// added and served.
    pub async fn stand_by(&self, pool: [u8; 16], limit: Duration) -> bool {
        // No connection is on its way to a worker whose connections stand by already.
        let _still = self.moves.hold().await;
        let mut waits = Vec::new();
        for thread in self.threads.iter() {
            let (send, receive) = oneshot::channel();
            thread.post(Mail::StandBy(pool, send)).await;
            waits.push(receive);
        }
        let all = async {
            for wait in waits {
                if wait.await.is_err() {
                    return false;
                }
            }
            true
        };
        tokio::time::timeout(limit, all).await.unwrap_or(false)
    }

    /// Serves the clients of a pool's volumes again.
    pub async fn serve(&self, pool: [u8; 16]) {
        self.post_to_all(|answer| Mail::Serve(pool, answer)).await;
    }

    /// Answers flushes of a pool's clients, which stand by, from now on: it was closed in order, so
    /// that all that was answered is durable.
    pub async fn answer_flushes(&self, pool: [u8; 16]) {
        self.post_to_all(|answer| Mail::AnswerFlushes(pool, answer)).await;
    }

    async fn post_to_all(&self, mail: impl Fn(oneshot::Sender<()>) -> Mail) {
        for thread in self.threads.iter() {
            let (send, receive) = oneshot::channel();
            thread.post(mail(send)).await;
            // A thread that has ended serves none.
            let _ = receive.await;
        }
    }

    /// The pools that clients on standby wait for.
    #[must_use]
    pub const fn demands(&self) -> &Arc<Demands> {
        &self.demands
    }

    /// The connections that are served.
    #[must_use]
    pub fn connections(&self) -> Vec<ConnectionInfo> {
        let all = self.threads.iter().flat_map(|thread| {
            thread.connections.lock().iter().map(|(_, info)| info.clone()).collect::<Vec<_>>()
        });
        all.collect()
    }

    /// How many connections a volume has.
    #[must_use]
    pub fn connections_of(&self, pool: [u8; 16], volume: VolumeId) -> usize {
        let of_thread = |thread: &Shared| {
            let connections = thread.connections.lock();
            connections.iter().filter(|(_, one)| (one.pool, one.volume) == (pool, volume)).count()
        };
        self.threads.iter().map(of_thread).sum()
    }

    /// Takes no more requests, answers those in flight, for no longer than the limit, closes all
    /// connections and ends the threads.
    pub async fn drain(&self, limit: Duration) {
        let mut waits = Vec::new();
        for thread in self.threads.iter() {
            let (send, receive) = oneshot::channel();
            thread.post(Mail::Drain(limit, send)).await;
            waits.push(receive);
        }
        for wait in waits {
            let _ = wait.await;
        }
    }

    /// Shows the counters of each worker and volume.
    pub fn each_volume(&self, see: &mut dyn FnMut(&VolumeStats)) {
        for thread in self.threads.iter() {
            thread.volumes.lock().iter().for_each(|stats| see(stats));
        }
    }

    /// The counters of each worker and volume.
    #[must_use]
    pub fn stats(&self) -> Vec<Arc<VolumeStats>> {
        self.threads.iter().flat_map(|thread| thread.volumes.lock().clone()).collect()
    }

    /// The counters of each worker's thread.
    #[must_use]
    pub fn worker_stats(&self) -> Vec<Arc<WorkerStats>> {
        self.threads.iter().map(|thread| Arc::clone(&thread.stats)).collect()
    }
}

impl nbd::Sessions<Target> for Workers {
    fn connect(&self, stream: OwnedFd, session: nbd::Session<Target>) {
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        let near = self.placement.lock().workers(&session.volume.pool.id());
        let thread = &self.threads[balance::place(&self.threads, &near, next)];
        if thread.mail.send(Mail::Connect(stream, Box::new(session), None)).is_err() {
            thread.load.end();
            tracing::warn!("a worker has too much to do: a connection is dropped");
        }
        thread.doorbell.ring();
    }

    async fn displace_idle(
        &self,
        listener: u64,
        peer: nbd::Peer,
        has: usize,
        idle: Duration,
    ) -> bool {
        idle::displace(&self.threads, listener, (peer, has), idle).await
    }
}

impl QueueHost for Workers {
    fn workers(&self) -> usize {
        self.threads.len()
    }

    fn start_queue(&self, worker: usize, queue: QueueSpec) -> Result<(), FrontendError> {
        let near = self.placement.lock().workers(&queue.pool);
        let thread = &self.threads[balance::place(&self.threads, &near, worker)];
        let (send, receive) = oneshot::channel();
        thread.post_blocking(Mail::StartQueue(Box::new(queue), send));
        receive.blocking_recv().unwrap_or(Err(FrontendError::Gone))
    }

    fn await_end(&self, device: u32, limit: Duration) -> bool {
        let clock = Clock::start();
        loop {
            let served = self.threads.iter().any(|thread| thread.queues.lock().contains(&device));
            if !served {
                return true;
            }
            if u128::from(clock.ns()) >= limit.as_nanos() {
                return false;
            }
            std::thread::sleep(QUEUE_PAUSE);
        }
    }

    fn let_wait(&self, device: u32) {
        for thread in self.threads.iter() {
            thread.post_blocking(Mail::LetWait(device));
        }
    }

    fn fail_waiting(&self, device: u32) {
        for thread in self.threads.iter() {
            thread.post_blocking(Mail::FailWaiting(device));
        }
    }
}

impl Shared {
    /// The same as [`Self::post`], on a thread that may wait.
    fn post_blocking(&self, mut mail: Mail) {
        while let Err(Undelivered::Full(back)) = self.mail.send(mail) {
            mail = back;
            self.doorbell.ring();
            std::thread::sleep(MAIL_PAUSE);
        }
        self.doorbell.ring();
    }

    /// Delivers a message as soon as there is room: a full mailbox must not look like an answer to
    /// a waiting caller. After the thread's end the message is dropped, which the caller sees.
    async fn post(&self, mut mail: Mail) {
        while let Err(Undelivered::Full(back)) = self.mail.send(mail) {
            mail = back;
            self.doorbell.ring();
            tokio::time::sleep(MAIL_PAUSE).await;
        }
        self.doorbell.ring();
    }
}

fn start_thread(
    worker: usize,
    options: WorkerOptions,
    clock: Clock,
    moves: Moves,
    demands: &Arc<Demands>,
) -> Result<Shared, FrontendError> {
    let io = |what| move |source| FrontendError::Io { what, source };
    let doorbell = Arc::new(Doorbell::new().map_err(io("make an eventfd"))?);
    let (mail, inbox) = mailbox(MAX_MAIL);
    let stats = Arc::new(WorkerStats { worker, ..WorkerStats::default() });
    let shared = Shared {
        doorbell: Arc::clone(&doorbell),
        clock,
        mail,
        stats: Arc::clone(&stats),
        volumes: Arc::default(),
        connections: Arc::default(),
        queues: Arc::default(),
        load: Arc::default(),
    };
    let (load, demands) = (Arc::clone(&shared.load), Arc::clone(demands));
    let shown = thread::Shown {
        volumes: Arc::clone(&shared.volumes),
        connections: Arc::clone(&shared.connections),
        queues: Arc::clone(&shared.queues),
    };
    let (started, answer) = bounded(1);
    let run = move || {
        let parts =
            thread::Parts { worker, options, doorbell, clock, inbox, stats, load, moves, demands };
        match thread::WorkerThread::new(parts, shown) {
            Ok(thread) => {
                let _ = started.send(Ok(()));
                thread.run();
            }
            Err(source) => {
                let _ = started.send(Err(source));
            }
        }
    };
    let thread = std::thread::Builder::new().name(format!("worker-{worker}")).spawn(run);
    thread.map_err(io("start a thread"))?;
    let result = answer.recv().map_err(|_| FrontendError::Gone)?;
    result.map_err(io("set up io_uring (needs Linux 5.19 or newer with io_uring allowed)"))?;
    Ok(shared)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_workers_have_one_clock() {
        let options = WorkerOptions { count: 3, buffer_bytes: 4 << 20, ..WorkerOptions::default() };
        let workers = Workers::start(options).unwrap();
        let clocks: Vec<Clock> = workers.threads.iter().map(|thread| thread.clock).collect();
        assert_eq!(clocks, [clocks[0]; 3]);
    }
}
