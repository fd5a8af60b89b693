//! A daemon in memory, and how it goes wrong.

mod cells;
mod control;
mod state;

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use blockd_api::v1::{self, ErrorKind, VolumeKind};
use parking_lot::Mutex;
use tokio_stream::Stream;
use tonic::{Code, Request, Response, Status};

use super::pmem::Memory;

pub(crate) use self::cells::{Cell, Rival};

/// Keeps volumes in memory.
#[derive(Clone)]
pub(crate) struct Fake(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// Name and size.
    pools: Vec<(String, i64)>,
    volumes: BTreeMap<(String, String), v1::Volume>,
    next_id: u32,
    calls: u32,
    /// The call with which the daemon dies, and whether the call takes effect before.
    dies_at: Option<(u32, bool)>,
    is_dead: bool,
    delay: Duration,
    log: Vec<&'static str>,
    /// The causes by pool and volume; those of a pool have no volume name. Objects without an entry
    /// are healthy.
    causes: BTreeMap<(String, String), Vec<v1::Cause>>,
    /// Pools that failed.
    failed: BTreeSet<String>,
    /// Whether it is an old daemon without health.
    is_old: bool,
    script: Option<Script>,
    streams: Arc<Streams>,
    /// Pools in persistent memory.
    memory: BTreeMap<String, Memory>,
    groups: BTreeMap<String, cells::Group>,
    /// The call that is refused from now on.
    refuses: Option<&'static str>,
    /// Another node that acts just before the next call of that name.
    before: Option<(&'static str, cells::Rival)>,
}

/// The message of that number, to that request.
pub(crate) type Part = dyn Fn(&v1::DiffVolumeRequest, usize) -> StreamStep + Send + Sync;

/// The behaviour of its streams.
#[derive(Clone)]
pub(crate) struct Script {
    /// When one is opened.
    pub(crate) opened: fn(&Fake),
    pub(crate) part: Arc<Part>,
}

/// The next step of a scripted stream: a message, its end, or silence for ever.
pub(crate) enum StreamStep {
    Part(v1::DiffVolumeResponse),
    Failed(Status),
    End,
    Silence,
}

/// Counts over all streams.
#[derive(Default, Debug)]
pub(crate) struct Streams {
    pub(crate) opened: AtomicUsize,
    /// Messages that were taken.
    pub(crate) taken: AtomicUsize,
    /// Streams that ended, or that were dropped by their reader.
    pub(crate) gone: AtomicUsize,
}

/// A stream of ranges, after the script.
struct Ranges {
    script: Script,
    request: v1::DiffVolumeRequest,
    number: usize,
    counts: Arc<Streams>,
    is_over: bool,
}

impl Stream for Ranges {
    type Item = Result<v1::DiffVolumeResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let step = (self.script.part)(&self.request, self.number);
        self.number += 1;
        match step {
            StreamStep::Part(part) => {
                self.counts.taken.fetch_add(1, Ordering::SeqCst);
                Poll::Ready(Some(Ok(part)))
            }
            StreamStep::Failed(status) => {
                self.is_over = true;
                Poll::Ready(Some(Err(status)))
            }
            StreamStep::End => Poll::Ready(None),
            StreamStep::Silence => Poll::Pending,
        }
    }
}

impl Drop for Ranges {
    fn drop(&mut self) {
        self.counts.gone.fetch_add(1, Ordering::SeqCst);
    }
}

impl Fake {
    pub(crate) fn new(pools: &[(&str, i64)]) -> Self {
        let pools = pools.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect();
        Self(Arc::new(Mutex::new(State { pools, next_id: 1, ..State::default() })))
    }

    pub(crate) fn volumes(&self) -> Vec<v1::Volume> {
        self.0.lock().volumes.values().cloned().collect()
    }

    pub(crate) fn volume(&self, pool: &str, name: &str) -> Option<v1::Volume> {
        self.0.lock().volumes.get(&(pool.to_owned(), name.to_owned())).cloned()
    }

    /// Changes a volume behind the plugin's back.
    pub(crate) fn change(&self, pool: &str, name: &str, change: impl FnOnce(&mut v1::Volume)) {
        let key = (pool.to_owned(), name.to_owned());
        change(self.0.lock().volumes.get_mut(&key).unwrap());
    }

    /// Makes a volume that is not the plugin's.
    pub(crate) fn add(&self, pool: &str, name: &str, size: i64) {
        self.0.lock().add(pool, name, VolumeKind::Volume, size);
    }

    /// A pool is in persistent memory from now on.
    pub(crate) fn set_memory(&self, pool: &str, memory: Memory) {
        self.0.lock().memory.insert(pool.to_owned(), memory);
    }

    /// Dies with the call of this number from now, after having done it or before. It stays away
    /// until it is healed.
    pub(crate) fn die_at(&self, call: u32, done: bool) {
        let mut state = self.0.lock();
        state.calls = 0;
        state.dies_at = Some((call, done));
    }

    /// Restarts the daemon. Returns whether it had died.
    pub(crate) fn heal(&self) -> bool {
        let mut state = self.0.lock();
        state.dies_at = None;
        std::mem::take(&mut state.is_dead)
    }

    /// Sets the behaviour of its streams of ranges from now on.
    pub(crate) fn script_streams(
        &self,
        opened: fn(&Self),
        part: impl Fn(&v1::DiffVolumeRequest, usize) -> StreamStep + Send + Sync + 'static,
    ) {
        self.0.lock().script = Some(Script { opened, part: Arc::new(part) });
    }

    pub(crate) fn streams(&self) -> Arc<Streams> {
        Arc::clone(&self.0.lock().streams)
    }

    /// Answers each call so late.
    pub(crate) fn delay(&self, delay: Duration) {
        self.0.lock().delay = delay;
    }

    /// Sets the causes of a volume from now on, or of a pool if `volume` is empty. The worst is the
    /// first. Without causes it is healthy again.
    pub(crate) fn set_causes(&self, pool: &str, volume: &str, causes: &[v1::Cause]) {
        let key = (pool.to_owned(), volume.to_owned());
        self.0.lock().causes.insert(key, causes.to_vec());
    }

    /// Deletes a volume behind the plugin's back.
    pub(crate) fn remove(&self, pool: &str, name: &str) {
        self.0.lock().volumes.remove(&(pool.to_owned(), name.to_owned())).unwrap();
    }

    /// A pool fails, or serves again. Its volumes are still known to be there.
    pub(crate) fn fail_pool(&self, pool: &str, fails: bool) {
        let mut state = self.0.lock();
        if fails {
            state.failed.insert(pool.to_owned())
        } else {
            state.failed.remove(pool)
        };
    }

    /// Refuses calls of that name from now on; `None`: none.
    pub(crate) fn refuse(&self, call: Option<&'static str>) {
        self.0.lock().refuses = call;
    }

    /// Knows nothing of health, as daemons did once.
    pub(crate) fn is_old(&self, is_old: bool) {
        self.0.lock().is_old = is_old;
    }

    /// The calls since the last time.
    pub(crate) fn take_log(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.0.lock().log)
    }

    async fn call<Q, A>(
        &self,
        name: &'static str,
        request: Request<Q>,
        act: fn(&mut State, Q) -> Result<A, Status>,
    ) -> Result<Response<A>, Status> {
        let delay = self.0.lock().delay;
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        let mut state = self.0.lock();
        if state.is_dead {
            return Err(Status::unavailable("dead"));
        }
        state.log.push(name);
        state.calls += 1;
        let dies = state.dies_at.filter(|(call, _)| *call == state.calls);
        state.is_dead = dies.is_some();
        if dies.is_some_and(|(_, done)| !done) {
            return Err(Status::unavailable("dies before"));
        }
        if let Some((_, rival)) = state.before.take_if(|(call, _)| *call == name) {
            state.act_as(rival);
        }
        let answer = match state.refuses == Some(name) {
            true => Err(state::refused(ErrorKind::InUse, Code::FailedPrecondition, name)),
            false => act(&mut state, request.into_inner()),
        };
        if dies.is_some() {
            return Err(Status::unavailable("dies after"));
        }
        answer.map(Response::new)
    }
}
