//! The state that all services share, and the processing of a call.

mod stream;

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use blockd_api::v1;
use blockd_csi_base::bytes::Bytes;
use blockd_csi_base::clock::Clock;
use blockd_csi_base::error::shown;
use blockd_csi_base::grpc::{code_name, parse_timeout};
use tokio::sync::{Mutex, RwLock};
use tonic::{Code, Request, Response, Status};

use crate::cells::{self, CellId, Cells};
use crate::config::{Class, Config, Kind};
use crate::daemon::Daemon;
use crate::error::Error;
use crate::ids::{Names, VolumeId};
use crate::labels;
use crate::locks::Locks;
use crate::metrics::Metrics;
use crate::parameters::Keys;
use crate::pmem;
use crate::topology::Place;

pub(crate) use self::stream::Streams;
pub use self::stream::{Answers, Sink};

/// The settings from the start of the plugin.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The driver's name.
    pub driver: String,
    /// Where we are.
    pub place: Place,
    /// Names and ids.
    pub names: Names,
    /// Keys of parameters.
    pub keys: Keys,
    /// Names of cells.
    pub cells: Cells,
    /// Classes and smallest sizes.
    pub config: Config,
    /// Paths of the kubelet are below it.
    pub kubelet_dir: PathBuf,
    /// The folder of the records of staged volumes.
    pub state_dir: PathBuf,
    /// A volume of mode SINGLE_NODE_WRITER is published at one path only.
    pub strict_single_node_writer: bool,
    /// Volumes are made larger by the node's service, and not by the controller's.
    pub expand_on_node: bool,
}

/// The state that all services share.
#[derive(Debug)]
pub struct Plugin {
    /// The settings from the start.
    pub settings: Settings,
    /// The daemon.
    pub daemon: Daemon,
    /// One call for each volume at a time.
    pub locks: Locks,
    /// The counters.
    pub metrics: Metrics,
    /// Held from reading the free capacity of a pool until a volume uses it.
    pub(crate) promises: Mutex<()>,
    /// Held for reading while a volume is cloned by way of a snapshot, and for writing while
    /// leftovers of such calls are removed.
    pub(crate) clones: RwLock<()>,
    streams: Streams,
    working: Arc<AtomicUsize>,
}

/// A call, for the log and the metrics.
#[derive(Debug)]
pub struct Call {
    method: &'static str,
    subject: String,
    deadline: Option<Duration>,
    is_quiet: bool,
}

/// The caller's time is measured from when it called: the plugin uses a little less, so that the
/// caller receives its answer before its own timeout.
const SLACK: Duration = Duration::from_millis(50);

impl Call {
    /// A call that changes something: its object is its volume, snapshot or name.
    pub fn new<T>(method: &'static str, request: &Request<T>, subject: &str) -> Self {
        let timeout = request.metadata().get("grpc-timeout").and_then(|text| text.to_str().ok());
        let deadline = timeout.and_then(parse_timeout);
        let subject = if subject.is_empty() { String::new() } else { shown(subject) };
        Self { method, subject, deadline, is_quiet: false }
    }

    /// Marks a call that only reads: it is not logged if it succeeds.
    #[must_use]
    pub fn quiet(self) -> Self {
        Self { is_quiet: true, ..self }
    }

    /// How long a part of it may take: no more than this, and half of the caller's deadline.
    #[must_use]
    pub fn time_for_part(&self, most: Duration) -> Duration {
        self.deadline.map_or(most, |limit| most.min(limit / 2))
    }

    fn log(&self, code: Code, problem: Option<&Error>, time: Duration) {
        let Self { method, subject, is_quiet, .. } = self;
        let (code_text, ms) =
            (code_name(code), u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
        let problem = problem.map(shown);
        match (code, problem) {
            (Code::Ok, _) if *is_quiet => {
                tracing::debug!(method, subject, code = code_text, ms, "done");
            }
            (Code::Internal | Code::DataLoss | Code::Unavailable, Some(problem)) => {
                tracing::error!(method, subject, code = code_text, ms, problem, "failed");
            }
            // Of a stream: its caller had enough.
            (Code::Cancelled, _) => {
                tracing::info!(method, subject, code = code_text, ms, "ended by its caller");
            }
            (_, Some(problem)) => {
                tracing::warn!(method, subject, code = code_text, ms, problem, "refused");
            }
            (_, None) => tracing::info!(method, subject, code = code_text, ms, "done"),
        }
    }
}

/// Counts a task for as long as it lives.
struct Working(Arc<AtomicUsize>, Metrics);

impl Working {
    fn begin(count: &Arc<AtomicUsize>, metrics: &Metrics) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        metrics.in_flight(1);
        Self(Arc::clone(count), metrics.clone())
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        self.1.in_flight(-1);
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Plugin {
    /// For these settings. Has to be called in a tokio runtime.
    #[must_use]
    pub fn new(settings: Settings, daemon: Daemon) -> Arc<Self> {
        Self::with_streams(settings, daemon, Streams::default())
    }

    /// The same with other bounds for streams.
    #[must_use]
    pub(crate) fn with_streams(settings: Settings, daemon: Daemon, streams: Streams) -> Arc<Self> {
        let metrics = Metrics::new(&settings.driver);
        Arc::new(Self {
            settings,
            daemon,
            locks: Locks::default(),
            metrics,
            promises: Mutex::new(()),
            clones: RwLock::new(()),
            streams,
            working: Arc::default(),
        })
    }

    /// Works on a call in a task of its own: it is not torn apart when the caller goes or its time
    /// is over, and the locks that `work` takes are held until it ends. Counts and logs it.
    ///
    /// # Errors
    /// The errors of the work.
    pub async fn run<T: Send + 'static>(
        self: &Arc<Self>,
        call: Call,
        work: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<Response<T>, Status> {
        let metrics = self.metrics.clone();
        let working = Working::begin(&self.working, &metrics);
        let deadline = call.deadline;
        let task = tokio::spawn(async move {
            let clock = Clock::start();
            let result = work.await;
            let time = clock.elapsed();
            let code = result.as_ref().err().map_or(Code::Ok, Error::code);
            metrics.observe(call.method, code, time);
            call.log(code, result.as_ref().err(), time);
            drop(working);
            result
        });
        let ended = match deadline {
            None => task.await,
            Some(limit) => {
                let ours = limit.saturating_sub(SLACK.min(limit / 4));
                let Ok(ended) = tokio::time::timeout(ours, task).await else {
                    return Err(Error::Late { milliseconds: limit.as_millis() }.into());
                };
                ended
            }
        };
        match ended {
            Ok(result) => result.map(Response::new).map_err(Status::from),
            Err(error) => Err(Error::unexpected("a call ended in the middle:", error).into()),
        }
    }

    /// How many calls are worked on.
    #[must_use]
    pub fn working(&self) -> usize {
        self.working.load(Ordering::Acquire)
    }

    /// Returns the volume of a controller's id, and its description by the daemon.
    /// # Errors
    /// NOT_FOUND: it does not exist, or is foreign. Or the daemon does not answer.
    pub async fn volume(&self, id: &str) -> Result<(VolumeId, v1::Volume), Error> {
        let absent = || Error::not_found("volume", id);
        if let Some(id) = self.settings.cells.parse(id) {
            return self.cell_volume(&id).await;
        }
        let volume_id = self.settings.names.parse_volume(id).ok_or_else(absent)?;
        if !self.has_pool(&volume_id.pool).await? {
            return Err(absent());
        }
        let found = self.daemon.find_volume(&volume_id.pool, &volume_id.name).await?;
        let is_volume = |volume: &v1::Volume| volume.kind() == v1::VolumeKind::Volume;
        let volume = found.filter(is_volume).ok_or_else(absent)?;
        Ok((volume_id, volume))
    }

    /// The same of a volume in a cell, which has to be open here.
    async fn cell_volume(&self, id: &CellId) -> Result<(VolumeId, v1::Volume), Error> {
        if let Some(volume) = self.daemon.find_volume(&id.cell, &id.volume).await?
            && !volume.standby
        {
            let id = VolumeId { pool: id.cell.clone(), name: id.volume.clone() };
            return Ok((id, volume));
        }
        match cells::find(&self.daemon, &self.settings.place.node, id).await? {
            Some(cell) if cell.state() != v1::CellState::Open => Err(cells::unopened(id, &cell)),
            _ => Err(Error::not_found("volume", id)),
        }
    }

    /// Bytes of a volume or snapshot before its data.
    #[must_use]
    pub fn header(&self, volume: &v1::Volume) -> Bytes {
        labels::header(&self.settings.keys, &volume.labels)
    }

    /// The capacity of a volume's claim.
    #[must_use]
    pub fn capacity(&self, volume: &v1::Volume) -> Bytes {
        let charged = Bytes::new(pmem::charged(volume)).unwrap_or_default();
        charged.saturating_sub(self.header(volume))
    }

    /// Whether a pool is one of our classes.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub async fn has_pool(&self, pool: &str) -> Result<bool, Error> {
        let classes = &self.settings.config.classes;
        if self.settings.cells.has_pool(pool) || classes.iter().any(|class| class.names_pool(pool))
        {
            return Ok(true);
        }
        if !classes.iter().any(|class| class.pool.is_empty()) {
            return Ok(false);
        }
        // Which one is the default is known to the daemon only, and can change with its start.
        let asked = v1::GetPoolRequest { name: String::new() };
        match self.daemon.get_pool(asked).await {
            Ok(answer) => Ok(answer.pool.is_some_and(|default| default.name == pool)),
            Err(error) if error.is_absent() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The pools of our classes as they are now.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub async fn pools(&self) -> Result<Pools, Error> {
        let answer = self.daemon.list_pools(v1::ListPoolsRequest {}).await?;
        let classes = &self.settings.config.classes;
        let is_ours = |pool: &v1::Pool| classes.iter().any(|class| is_of(pool, class));
        Ok(Pools(answer.pools.into_iter().filter(is_ours).collect()))
    }
}

fn is_of(pool: &v1::Pool, class: &Class) -> bool {
    if class.pool.is_empty() { pool.is_default } else { class.names_pool(&pool.name) }
}

/// The pools of our classes.
#[derive(Clone, Debug)]
pub struct Pools(Vec<v1::Pool>);

impl Pools {
    /// Whether a pool is among them.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|pool| pool.name == name)
    }

    /// Their names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|pool| pool.name.as_str())
    }

    /// The pools that a class may make volumes in, now: those that are there, serve, and are of
    /// its kind.
    pub fn serving(&self, class: &Class) -> impl Iterator<Item = &v1::Pool> {
        let is_open = |pool: &&v1::Pool| pool.state() == v1::PoolState::Open;
        let of_class = self.0.iter().filter(move |pool| is_of(pool, class));
        of_class.filter(is_open).filter(move |pool| unfit(pool, class).is_none())
    }

    /// Why a class has no pool.
    #[must_use]
    pub fn missing(&self, class: &Class) -> Error {
        let what = format!("pool of class {}", class.name);
        let Some(pool) = self.0.iter().find(|pool| is_of(pool, class)) else {
            let name = if class.pool.is_empty() { "the default one" } else { &class.pool };
            return Error::in_use(what, format_args!("is not there: {}", shown(name)));
        };
        match unfit(pool, class) {
            Some(why) if pool.state() == v1::PoolState::Open => {
                Error::in_use(what, format_args!("is {}, which {why}", shown(&pool.name)))
            }
            _ => Error::in_use(what, format_args!("is not served: {}", shown(&pool.failure))),
        }
    }
}

/// Returns why a pool does not fit a class, where both are known. A mismatch must be refused here:
/// a volume without real persistent memory would otherwise show only at a crash.
fn unfit(pool: &v1::Pool, class: &Class) -> Option<&'static str> {
    let is_direct = pool.kind() == v1::PoolKind::PmemDirect;
    let in_memory = |device: &v1::Device| device.kind() == v1::DeviceKind::Pmem;
    match class.kind {
        Kind::PmemDirect if !is_direct => Some("is no pool of namespaces, as pmem-direct has it"),
        Kind::PmemDirect => None,
        _ if is_direct => Some("is a pool of namespaces: its classes are pmem-direct"),
        Kind::PmemPooled if !pool.devices.iter().all(in_memory) || pool.devices.is_empty() => {
            Some("is not in persistent memory, as pmem-pooled has it")
        }
        Kind::PmemPooled | Kind::Thin | Kind::Thick => None,
    }
}
