//! Helpers that tests of the control service share.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use blockd_api::v1::control_client::ControlClient;
use blockd_engine::pool::{PoolHandle, VolumeId};
use blockd_engine::stats::{VolumeStats, WorkerStats};
use blockd_mapper::error::MapperError;
use blockd_media::error::Error;
use blockd_serve::demands::Demands;
use blockd_serve::worker::ConnectionInfo;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tonic::transport::{Channel, Endpoint};

use super::{Answer, Control, ControlOptions, DataPath, NbdAddress, NbdPlace, bind};
use crate::config::{DeviceConfig, DeviceKind, PoolConfig, SizeWish};
use crate::node::NodeId;

/// This host, in tests.
pub(crate) const NODE: &str = "3f2b8c1d-0e4a-4d5b-9c6f-7a8b9c0d1e2f";

/// A folder that is gone with this value.
#[derive(Debug)]
pub(crate) struct Folder(PathBuf);

/// A new, empty folder on a tmpfs, as delta rings need one.
pub(crate) fn folder() -> Folder {
    folder_in(Path::new("/dev/shm"))
}

/// A new, empty folder that is not in memory, as far as this host's temporary files are not.
pub(crate) fn folder_on_disk() -> Folder {
    folder_in(&std::env::temp_dir())
}

fn folder_in(parent: &Path) -> Folder {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("blockd-test-{}-{number}", std::process::id());
    let path = parent.join(name);
    std::fs::create_dir(&path).unwrap();
    Folder(path)
}

impl Folder {
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Workers without threads: connections are what a test says.
#[derive(Debug, Default)]
pub(crate) struct FakeDataPath {
    pub(crate) connections: Mutex<Vec<ConnectionInfo>>,
    /// A pool that fails when a volume's connections are ended.
    pub(crate) fails_on_close: Mutex<Option<PoolHandle>>,
    /// A pool that fails when its clients are to wait.
    pub(crate) fails_on_stand_by: Mutex<Option<PoolHandle>>,
    /// Why no pool can be added.
    pub(crate) refuses_pools: Mutex<Option<String>>,
    pub(crate) volumes: Mutex<Vec<Arc<VolumeStats>>>,
    /// Pools whose clients wait.
    pub(crate) standing: Mutex<std::collections::BTreeSet<[u8; 16]>>,
    /// The IO of clients does not end.
    pub(crate) is_busy: Mutex<bool>,
    demands: Arc<Demands>,
}

/// Has a pool fail, once.
fn fail(pool: &Mutex<Option<PoolHandle>>) {
    if let Some(pool) = pool.lock().take() {
        let problem = "failed for a test".to_owned();
        pool.halt(MapperError::Device { name: "memory".to_owned(), problem });
    }
}

impl DataPath for FakeDataPath {
    fn add_pool<'a>(&'a self, _: &'a PoolHandle) -> Answer<'a, Result<(), Error>> {
        let refusal = self.refuses_pools.lock().clone();
        let result = refusal.map_or(Ok(()), |problem| Err(Error::in_use("workers", problem)));
        Box::pin(async move { result })
    }

    fn remove_pool(&self, _: [u8; 16]) -> Answer<'_, ()> {
        Box::pin(async {})
    }

    fn close_volume(&self, pool: [u8; 16], volume: VolumeId) -> Answer<'_, usize> {
        fail(&self.fails_on_close);
        let mut connections = self.connections.lock();
        let before = connections.len();
        connections.retain(|one| (one.pool, one.volume) != (pool, volume));
        let closed = before - connections.len();
        Box::pin(async move { closed })
    }

    fn stand_by(&self, pool: [u8; 16]) -> Answer<'_, bool> {
        let is_busy = *self.is_busy.lock();
        fail(&self.fails_on_stand_by);
        if !is_busy {
            self.standing.lock().insert(pool);
        }
        Box::pin(async move { !is_busy })
    }

    fn answer_flushes(&self, _pool: [u8; 16]) -> Answer<'_, ()> {
        Box::pin(async {})
    }

    fn serve(&self, pool: [u8; 16]) -> Answer<'_, ()> {
        self.standing.lock().remove(&pool);
        Box::pin(async {})
    }

    fn demands(&self) -> Arc<Demands> {
        Arc::clone(&self.demands)
    }

    fn connections(&self) -> Vec<ConnectionInfo> {
        self.connections.lock().clone()
    }

    fn connections_of(&self, pool: [u8; 16], volume: VolumeId) -> usize {
        let connections = self.connections.lock();
        connections.iter().filter(|one| (one.pool, one.volume) == (pool, volume)).count()
    }

    fn each_volume(&self, see: &mut dyn FnMut(&VolumeStats)) {
        self.volumes.lock().iter().for_each(|stats| see(stats));
    }

    fn volume_stats(&self) -> Vec<Arc<VolumeStats>> {
        self.volumes.lock().clone()
    }

    fn worker_stats(&self) -> Vec<Arc<WorkerStats>> {
        Vec::new()
    }
}

/// A pool in memory.
pub(crate) fn memory_pool(name: &str) -> PoolConfig {
    PoolConfig {
        name: name.to_owned(),
        devices: vec![DeviceConfig {
            path: PathBuf::new(),
            kind: DeviceKind::Memory,
            size: SizeWish::Bytes(64 << 20),
            preallocate: false,
            direct: false,
        }],
        spares: Vec::new(),
        region: None,
        volatile: false,
        extent_size: 64 << 10,
        composite: true,
        lock_wait: Duration::from_millis(50),
        claim_wait: Duration::from_secs(2),
        accept_loss: false,
        commit_interval: Duration::from_secs(1),
        ring_records: 1 << 10,
        sparing: false,
        extend_socket: None,
        space: crate::config::SpaceConfig::default(),
    }
}

/// A pool in a file, which is made.
pub(crate) fn file_pool(name: &str, path: &Path) -> PoolConfig {
    let device = DeviceConfig {
        path: path.to_path_buf(),
        kind: DeviceKind::File,
        size: SizeWish::Bytes(64 << 20),
        preallocate: false,
        direct: false,
    };
    // The file of its last owner is closed by the kernel in its own time, on a busy host late.
    let lock_wait = Duration::from_secs(30);
    PoolConfig { devices: vec![device], lock_wait, volatile: true, ..memory_pool(name) }
}

/// A control service on a Unix socket, with the pool `default` in memory.
pub(crate) struct Rig {
    pub(crate) folder: Folder,
    pub(crate) control: Control,
    pub(crate) data_path: Arc<FakeDataPath>,
    pub(crate) client: ControlClient<Channel>,
}

impl Rig {
    pub(crate) async fn new() -> Self {
        let rig = Self::without_pool(folder()).await;
        rig.control.open_pool(&memory_pool("default")).await.unwrap();
        rig
    }

    pub(crate) async fn without_pool(folder: Folder) -> Self {
        Self::of(folder, crate::config::HealthConfig::default()).await
    }

    /// Without a pool, and looked at like that.
    pub(crate) async fn with_health(health: crate::config::HealthConfig) -> Self {
        Self::of(folder(), health).await
    }

    async fn of(folder: Folder, health: crate::config::HealthConfig) -> Self {
        Self::of_node(folder, health, NODE).await
    }

    /// Another host than [`NODE`], without a pool.
    pub(crate) async fn of_other_node(node: &str) -> Self {
        Self::of_node(folder(), crate::config::HealthConfig::default(), node).await
    }

    /// Without a pool; other hosts are given this address.
    pub(crate) async fn at(address: &str) -> Self {
        let listen = Some(address.parse().unwrap());
        let hosts = crate::config::HostsConfig { listen, ..Default::default() };
        Self::with_hosts(folder(), crate::config::HealthConfig::default(), NODE, hosts).await
    }

    async fn of_node(folder: Folder, health: crate::config::HealthConfig, node: &str) -> Self {
        Self::with_hosts(folder, health, node, crate::config::HostsConfig::default()).await
    }

    async fn with_hosts(
        folder: Folder,
        health: crate::config::HealthConfig,
        node: &str,
        hosts: crate::config::HostsConfig,
    ) -> Self {
        let data_path = Arc::new(FakeDataPath::default());
        let options = ControlOptions {
            state_dir: folder.path().to_path_buf(),
            runtime_dir: folder.path().to_path_buf(),
            default_pool: "default".to_owned(),
            template: memory_pool("template"),
            node: NodeId::parse(node),
            configured_pools: 1,
            health,
            hosts,
            hooks_dir: folder.path().join("hooks"),
            hook_timeout: Duration::from_secs(30),
        };
        let control = Control::new(options, Arc::clone(&data_path) as Arc<dyn DataPath>).unwrap();
        let place = NbdPlace::Unix(PathBuf::from("/run/n.sock"));
        control.set_nbd_addresses(vec![NbdAddress { place, tls: false }]);
        let path = folder.path().join("control.sock");
        let listener = bind(&path).unwrap();
        tokio::spawn(listener.serve(control.clone(), std::future::pending()));
        let connector = tower::service_fn(move |_| {
            let path = path.clone();
            async move { tokio::net::UnixStream::connect(path).await.map(TokioIo::new) }
        });
        let endpoint = Endpoint::from_static("http://blockd.invalid");
        let client = ControlClient::new(endpoint.connect_with_connector_lazy(connector));
        Self { folder, control, data_path, client }
    }

    /// A connection to a volume, from now on.
    pub(crate) fn connect(&self, volume: u32) {
        let pool = self.control.pool("").unwrap().id();
        let volume = VolumeId(volume);
        let connection = ConnectionInfo { pool, volume, ..Default::default() };
        self.data_path.connections.lock().push(connection);
    }
}
