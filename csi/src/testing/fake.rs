//! The daemon's rules, as far as the plugin needs them.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use blockd_api::Message as _;
use blockd_api::v1::control_server::Control;
use blockd_api::v1::{self, ErrorKind, VolumeKind};
use parking_lot::Mutex;
use tokio_stream::Stream;
use tonic::{Code, Request, Response, Status};

use super::pmem::Memory;

/// Extents of the pools.
const EXTENT: u32 = 65_536;

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
        let answer = act(&mut state, request.into_inner());
        if dies.is_some() {
            return Err(Status::unavailable("dies after"));
        }
        answer.map(Response::new)
    }
}

fn refused(kind: ErrorKind, code: Code, message: impl Into<String>) -> Status {
    let message = message.into();
    let detail =
        v1::ErrorDetail { kind: kind.into(), message: message.clone(), ..Default::default() };
    Status::with_details(code, message, detail.encode_to_vec().into())
}

fn absent(name: &str) -> Status {
    refused(ErrorKind::NotFound, Code::NotFound, format!("{name} does not exist"))
}

fn exists(name: &str) -> Status {
    refused(ErrorKind::Exists, Code::AlreadyExists, format!("{name} exists and is another"))
}

fn in_use(name: &str) -> Status {
    refused(ErrorKind::InUse, Code::FailedPrecondition, format!("volume {name} is attached"))
}

impl State {
    fn pool(&self, name: &str) -> Result<String, Status> {
        let mut pools = self.pools.iter();
        let found = if name.is_empty() { pools.next() } else { pools.find(|one| one.0 == name) };
        found.map(|one| one.0.clone()).ok_or_else(|| absent(name))
    }

    fn describe_pool(&self, name: &str) -> v1::Pool {
        let at = self.pools.iter().position(|one| one.0 == name).unwrap();
        let size = self.pools[at].1;
        let pool = v1::Pool {
            name: name.to_owned(),
            is_default: at == 0,
            size_bytes: size,
            // Space set aside counts as free until it is written.
            free_bytes: size,
            state: match self.failed.contains(name) {
                true => v1::PoolState::Failed.into(),
                false => v1::PoolState::Open.into(),
            },
            extent_size: EXTENT,
            devices: vec![v1::Device { block_size: 512, ..Default::default() }],
            largest_volume_bytes: size,
            numa_node: -1,
            ..Default::default()
        };
        match self.memory.get(name) {
            Some(memory) => memory.describe(pool),
            None => pool,
        }
    }

    fn get(&mut self, pool: &str, name: &str) -> Result<&mut v1::Volume, Status> {
        let key = (self.pool(pool)?, name.to_owned());
        if self.failed.contains(&key.0) {
            return Err(in_use(&key.0));
        }
        self.volumes.get_mut(&key).ok_or_else(|| absent(name))
    }

    fn add(&mut self, pool: &str, name: &str, kind: VolumeKind, size: i64) -> &mut v1::Volume {
        let id = self.next_id;
        self.next_id += 1;
        let volume = v1::Volume {
            name: name.to_owned(),
            pool: pool.to_owned(),
            block_size: 512,
            id,
            family_id: id,
            size_bytes: size,
            kind: kind.into(),
            made_unix_ms: 1_700_000_000_123,
            settings: Some(v1::VolumeSettings {
                on_full: v1::OnFull::Block.into(),
                ..Default::default()
            }),
            ..Default::default()
        };
        self.volumes.entry((pool.to_owned(), name.to_owned())).or_insert(volume)
    }

    fn create(
        &mut self,
        asked: v1::CreateVolumeRequest,
    ) -> Result<v1::CreateVolumeResponse, Status> {
        let pool = self.pool(&asked.pool)?;
        assert!(asked.size_bytes > 0 && asked.size_bytes % 512 == 0, "{asked:?}");
        let in_memory = self.memory.contains_key(&pool);
        let changed = match self.get(&pool, &asked.name) {
            Ok(_) if in_memory => false,
            Ok(found) if found.size_bytes == asked.size_bytes => false,
            Ok(_) => return Err(exists(&asked.name)),
            Err(_) if in_memory => self.create_in_memory(&pool, &asked)?,
            Err(_) if asked.erase_after == Some(true) => {
                let message = "erase_after is true: must be left out: the pool can't";
                return Err(refused(ErrorKind::Invalid, Code::InvalidArgument, message));
            }
            Err(_) => {
                self.add(&pool, &asked.name, VolumeKind::Volume, asked.size_bytes);
                true
            }
        };
        let volume = Some(self.get(&pool, &asked.name)?.clone());
        Ok(v1::CreateVolumeResponse { changed, volume })
    }

    fn create_in_memory(
        &mut self,
        pool: &str,
        asked: &v1::CreateVolumeRequest,
    ) -> Result<bool, Status> {
        let size = self.pools.iter().find(|one| one.0 == pool).map_or(0, |one| one.1);
        let memory = self.memory.get_mut(pool).expect("a pool in memory");
        let made = memory.create(size, asked).map_err(|detail| {
            let message = detail.message.clone();
            let code = match detail.kind() {
                ErrorKind::NoSpace => Code::ResourceExhausted,
                _ => Code::InvalidArgument,
            };
            Status::with_details(code, message, detail.encode_to_vec().into())
        })?;
        let added = self.add(pool, &asked.name, VolumeKind::Volume, made.size_bytes);
        let (name, id) = (added.name.clone(), added.id);
        let (pool, settings) = (added.pool.clone(), added.settings);
        let kind = VolumeKind::Volume.into();
        *added = v1::Volume { name, pool, id, family_id: id, settings, kind, ..made };
        Ok(true)
    }

    fn delete(
        &mut self,
        asked: v1::DeleteVolumeRequest,
    ) -> Result<v1::DeleteVolumeResponse, Status> {
        let pool = self.pool(&asked.pool)?;
        let Ok(found) = self.get(&pool, &asked.name) else {
            return Ok(v1::DeleteVolumeResponse::default());
        };
        if found.attached && !asked.force {
            return Err(in_use(&asked.name));
        }
        if let Some(memory) = self.memory.get_mut(&pool) {
            memory.free(&asked.name);
        }
        let volume = self.volumes.remove(&(pool, asked.name));
        for one in self.volumes.values_mut() {
            if volume.as_ref().is_some_and(|gone| gone.id == one.origin_id) {
                one.origin.clear();
            }
        }
        Ok(v1::DeleteVolumeResponse { changed: true, volume, ..Default::default() })
    }

    fn resize(
        &mut self,
        asked: v1::ResizeVolumeRequest,
    ) -> Result<v1::ResizeVolumeResponse, Status> {
        let pool = self.pool(&asked.pool)?;
        if self.memory.get(&pool).is_some_and(|memory| memory.direct) {
            let message = format!("volume {} is a namespace, and does not grow", asked.name);
            return Err(refused(ErrorKind::InUse, Code::FailedPrecondition, message));
        }
        let found = self.get(&asked.pool, &asked.name)?;
        assert!(asked.size_bytes >= found.size_bytes && asked.size_bytes % 512 == 0, "{asked:?}");
        let changed = found.size_bytes != asked.size_bytes;
        found.size_bytes = asked.size_bytes;
        let volume = Some(found.clone());
        Ok(v1::ResizeVolumeResponse { changed, volume, ..Default::default() })
    }

    fn configure(
        &mut self,
        asked: v1::ConfigureVolumeRequest,
    ) -> Result<v1::ConfigureVolumeResponse, Status> {
        let pool = self.pool(&asked.pool)?;
        let thick = self.volumes.values().filter(|one| one.pool == pool);
        let thick = thick.filter(|one| one.settings.is_some_and(|settings| settings.thick));
        let taken: i64 = thick.map(|one| one.size_bytes).sum();
        let free = self.describe_pool(&pool).free_bytes - taken;
        let found = self.get(&pool, &asked.name)?;
        let mut settings = found.settings.unwrap_or_default();
        let before = settings;
        let set_aside = if asked.thick == Some(true) && !settings.thick {
            found.size_bytes
        } else {
            asked.reservation_bytes.unwrap_or_default()
        };
        if set_aside > free {
            let message = format!("no space: {set_aside} bytes needed, {free} bytes free");
            return Err(refused(ErrorKind::NoSpace, Code::ResourceExhausted, message));
        }
        settings.thick = asked.thick.unwrap_or(settings.thick);
        settings.iops = asked.iops.unwrap_or(settings.iops);
        settings.bandwidth_bytes = asked.bandwidth_bytes.unwrap_or(settings.bandwidth_bytes);
        settings.quota_bytes = asked.quota_bytes.unwrap_or(settings.quota_bytes);
        settings.reservation_bytes = asked.reservation_bytes.unwrap_or(settings.reservation_bytes);
        if asked.on_full() != v1::OnFull::Unspecified {
            settings.on_full = asked.on_full;
            settings.on_full_timeout_ms = asked.on_full_timeout_ms;
        }
        found.settings = Some(settings);
        let volume = Some(found.clone());
        Ok(v1::ConfigureVolumeResponse { changed: before != settings, volume })
    }

    fn snapshot(
        &mut self,
        asked: v1::CreateSnapshotsRequest,
    ) -> Result<v1::CreateSnapshotsResponse, Status> {
        let pool = self.pool(&asked.pool)?;
        assert!((1..=16).contains(&asked.members.len()), "{asked:?}");
        for member in &asked.members {
            self.get(&pool, &member.volume)?;
        }
        let there = |state: &mut Self, member: &v1::SnapshotMember| {
            state.get(&pool, &member.name).is_ok_and(|found| found.origin == member.volume)
        };
        let count = asked.members.iter().filter(|member| there(self, member)).count();
        let changed = count == 0;
        if !changed && count < asked.members.len() {
            let message = format!("{count} of the snapshots are there");
            return Err(refused(ErrorKind::InUse, Code::FailedPrecondition, message));
        }
        if changed && let Some(one) = asked.members.iter().find(|one| self.has(&pool, &one.name)) {
            return Err(exists(&one.name));
        }
        let mut snapshots = Vec::new();
        for member in &asked.members {
            if changed {
                let source = self.get(&pool, &member.volume)?.clone();
                let size = source.size_bytes;
                let made = self.add(&pool, &member.name, VolumeKind::Snapshot, size);
                made.origin = source.name;
                (made.origin_id, made.family_id) = (source.id, source.family_id);
            }
            snapshots.push(self.get(&pool, &member.name)?.clone());
        }
        Ok(v1::CreateSnapshotsResponse { changed, snapshots })
    }

    fn has(&self, pool: &str, name: &str) -> bool {
        self.volumes.contains_key(&(pool.to_owned(), name.to_owned()))
    }

    fn clone_volume(
        &mut self,
        asked: v1::CloneVolumeRequest,
    ) -> Result<v1::CloneVolumeResponse, Status> {
        let pool = self.pool(&asked.pool)?;
        let source = self.get(&pool, &asked.snapshot)?.clone();
        assert_eq!(source.kind(), VolumeKind::Snapshot);
        assert!(asked.size_bytes >= source.size_bytes, "{asked:?}");
        let changed = match self.get(&pool, &asked.name) {
            Ok(found) if found.origin == source.name && found.size_bytes == asked.size_bytes => {
                false
            }
            Ok(_) => return Err(exists(&asked.name)),
            Err(_) => {
                let made = self.add(&pool, &asked.name, VolumeKind::Volume, asked.size_bytes);
                made.origin = source.name;
                (made.origin_id, made.family_id) = (source.id, source.family_id);
                true
            }
        };
        let volume = Some(self.get(&pool, &asked.name)?.clone());
        Ok(v1::CloneVolumeResponse { changed, volume })
    }

    fn health(&mut self, asked: v1::HealthRequest) -> Result<v1::HealthResponse, Status> {
        if self.is_old {
            return Err(Status::unimplemented(""));
        }
        let one = !asked.volume.is_empty();
        let wanted = match asked.pool.is_empty() && !one {
            true => String::new(),
            false => self.pool(&asked.pool)?,
        };
        let is_wanted = |pool: &str| wanted.is_empty() || pool == wanted;
        let causes = |pool: &str, volume: &str| {
            let key = (pool.to_owned(), volume.to_owned());
            let mut causes = self.causes.get(&key).cloned().unwrap_or_default();
            if self.failed.contains(pool) {
                let (code, severity) = (v1::HealthCode::PoolFailed, v1::Severity::Failure);
                let (code, severity) = (code.into(), severity.into());
                let message = format!("pool {pool} has failed");
                let cause = v1::Cause { code, severity, message, ..Default::default() };
                causes = vec![v1::Cause { of_pool: !volume.is_empty(), ..cause }];
            }
            causes
        };
        let severity = |causes: &[v1::Cause]| causes.first().map_or(0, |worst| worst.severity);
        let is_listed = |severity: i32| !asked.abnormal_only || severity != 0;
        let mut answer = v1::HealthResponse::default();
        for (pool, _) in self.pools.iter().filter(|of| is_wanted(&of.0) && !one) {
            let causes = causes(pool, "");
            let severity = severity(&causes);
            if is_listed(severity) {
                let pool = pool.clone();
                answer.pools.push(v1::PoolHealth { pool, severity, causes, ..Default::default() });
            }
        }
        for (pool, volume) in self.volumes.keys().filter(|key| is_wanted(&key.0)) {
            let causes = causes(pool, volume);
            let severity = severity(&causes);
            if is_listed(severity) && (!one || *volume == asked.volume) {
                answer.volumes.push(v1::VolumeHealth {
                    pool: pool.clone(),
                    volume: volume.clone(),
                    severity,
                    causes,
                    ..Default::default()
                });
            }
        }
        let key = (wanted, asked.volume);
        if one && !self.volumes.contains_key(&key) {
            return Err(absent(&key.1));
        }
        Ok(answer)
    }

    fn differences(&mut self, asked: v1::DiffVolumeRequest) -> Result<Ranges, Status> {
        self.get(&asked.pool, &asked.name)?;
        if !asked.since.is_empty() {
            self.get(&asked.pool, &asked.since)?;
        }
        let script = self.script.clone().expect("a script of the stream");
        self.streams.opened.fetch_add(1, Ordering::SeqCst);
        let counts = Arc::clone(&self.streams);
        Ok(Ranges { script, request: asked, number: 0, counts, is_over: false })
    }

    fn list(&mut self, asked: v1::ListVolumesRequest) -> Result<v1::ListVolumesResponse, Status> {
        assert!(asked.brief, "shared bytes are not requested");
        if self.failed.contains(&asked.pool) {
            return Err(in_use(&asked.pool));
        }
        let volumes = self.volumes.values();
        let volumes = volumes.filter(|one| asked.pool.is_empty() || one.pool == asked.pool);
        let volumes = volumes.filter(|one| !self.failed.contains(&one.pool));
        Ok(v1::ListVolumesResponse { volumes: volumes.cloned().collect(), releasing: Vec::new() })
    }
}

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The calls that are there, and those that the plugin must not make.
macro_rules! control {
    (
        never { $($never:ident: $asked:ident -> $answer:ident;)* }
        $($name:ident: $request:ident -> $response:ident = $act:expr;)*
    ) => {
        #[tonic::async_trait]
        impl Control for Fake {
            type PoolExtentsStream = Events<v1::PoolExtentsResponse>;
            type DiffVolumeStream = Events<v1::DiffVolumeResponse>;
            type EventsStream = Events<v1::Event>;

            $(
                async fn $name(
                    &self,
                    request: Request<v1::$request>,
                ) -> Result<Response<v1::$response>, Status> {
                    self.call(stringify!($name), request, $act).await
                }
            )*

            $(
                async fn $never(
                    &self,
                    _: Request<v1::$asked>,
                ) -> Result<Response<v1::$answer>, Status> {
                    panic!(stringify!($never))
                }
            )*

            async fn pool_extents(
                &self,
                _: Request<v1::PoolExtentsRequest>,
            ) -> Result<Response<Self::PoolExtentsStream>, Status> {
                panic!("pool_extents")
            }

            async fn diff_volume(
                &self,
                request: Request<v1::DiffVolumeRequest>,
            ) -> Result<Response<Self::DiffVolumeStream>, Status> {
                let opened = self.call("diff_volume", request, State::differences).await?;
                let ranges = opened.into_inner();
                (ranges.script.opened)(self);
                Ok(Response::new(Box::pin(ranges)))
            }

            async fn events(
                &self,
                _: Request<v1::EventsRequest>,
            ) -> Result<Response<Self::EventsStream>, Status> {
                panic!("events")
            }
        }
    };
}

control! {
    never {
        create_pool: CreatePoolRequest -> CreatePoolResponse;
        open_pool: OpenPoolRequest -> OpenPoolResponse;
        grow_pool: GrowPoolRequest -> GrowPoolResponse;
        rollback_volume: RollbackVolumeRequest -> RollbackVolumeResponse;
        space: SpaceRequest -> SpaceResponse;
        attach_volume: AttachVolumeRequest -> AttachVolumeResponse;
        detach_volume: DetachVolumeRequest -> DetachVolumeResponse;
        recover_devices: RecoverDevicesRequest -> RecoverDevicesResponse;
        list_connections: ListConnectionsRequest -> ListConnectionsResponse;
        stats: StatsRequest -> StatsResponse;
        list_nodes: ListNodesRequest -> ListNodesResponse;
        node_status: NodeStatusRequest -> NodeStatusResponse;
        acknowledge_health: AcknowledgeHealthRequest -> AcknowledgeHealthResponse;
    }
    version: VersionRequest -> VersionResponse =
        |_, _| Ok(v1::VersionResponse { ready: true, ..Default::default() });
    list_pools: ListPoolsRequest -> ListPoolsResponse = |state, _| {
        let pools = state.pools.iter().map(|one| state.describe_pool(&one.0)).collect();
        Ok(v1::ListPoolsResponse { pools })
    };
    get_pool: GetPoolRequest -> GetPoolResponse = |state, asked| {
        let name = state.pool(&asked.name)?;
        Ok(v1::GetPoolResponse { pool: Some(state.describe_pool(&name)) })
    };
    create_volume: CreateVolumeRequest -> CreateVolumeResponse = State::create;
    delete_volume: DeleteVolumeRequest -> DeleteVolumeResponse = State::delete;
    get_volume: GetVolumeRequest -> GetVolumeResponse = |state, asked| {
        let volume = Some(state.get(&asked.pool, &asked.name)?.clone());
        Ok(v1::GetVolumeResponse { volume })
    };
    list_volumes: ListVolumesRequest -> ListVolumesResponse = State::list;
    health: HealthRequest -> HealthResponse = State::health;
    resize_volume: ResizeVolumeRequest -> ResizeVolumeResponse = State::resize;
    configure_volume: ConfigureVolumeRequest -> ConfigureVolumeResponse = State::configure;
    create_snapshots: CreateSnapshotsRequest -> CreateSnapshotsResponse = State::snapshot;
    clone_volume: CloneVolumeRequest -> CloneVolumeResponse = State::clone_volume;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn causes_that_were_set_are_reported_and_others_are_healthy() {
        let fake = Fake::new(&[("p", 1 << 30)]);
        fake.add("p", "a", 1 << 20);
        fake.add("p", "b", 1 << 20);
        let severity = v1::Severity::Failure.into();
        fake.set_causes("p", "b", &[v1::Cause { severity, ..Default::default() }]);
        let asked = |volume: &str, abnormal_only| v1::HealthRequest {
            volume: volume.to_owned(),
            abnormal_only,
            ..Default::default()
        };
        let all = fake.health(Request::new(asked("", false))).await.unwrap().into_inner();
        let severities: Vec<i32> = all.volumes.iter().map(|one| one.severity).collect();
        assert_eq!((all.pools.len(), severities), (1, vec![0, severity]));
        let one = fake.health(Request::new(asked("b", true))).await.unwrap().into_inner();
        assert_eq!((one.pools.len(), one.volumes.len()), (0, 1));
        assert!(fake.health(Request::new(asked("c", false))).await.is_err());
    }
}
