//! The daemon: start, readiness, signals, drain.
//!
//! Sockets are bound before anything is opened or made, so that a port in use changes nothing.
//! Clients that come early wait in the sockets' queues.

mod collect;
mod figures;
mod http;
mod lock;
mod logging;
mod notify;
mod serving;
mod settle;
mod signals;
mod sockets;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blockd_control::config::PoolConfig;
use blockd_control::services::{
    self, Control, ControlOptions, DataPath, EventKind, NbdAddress, NbdPlace, PeerListener,
};
use blockd_media::error::Error;
use blockd_media::hardening::protect_process;
use blockd_pmem::platform::Platform;
use blockd_serve::nbd::listener::{Address, Bound, Listener};
use blockd_serve::ublk::control::{DeviceOptions, Devices, LibublkDriver, mounts};
use blockd_serve::worker::{WorkerOptions, Workers};
use sd_notify::NotifyState;
use tokio::sync::oneshot;

use crate::config::{Config, ListenerConfig, TlsUse, note_others};

use lock::FolderLock;
use serving::{Serving, frontend_error};
use signals::{SignalAction, Signals};
use sockets::bind;

/// Threads of the control runtime: it waits most of the time.
const CONTROL_THREADS: usize = 2;

/// How long a client of the control API may keep the daemon from ending.
const CONTROL_STOP_TIME: Duration = Duration::from_secs(5);

/// How often it is looked whether this host was fenced. A write meets that sooner.
const MEMBERSHIP_PAUSE: Duration = Duration::from_secs(5);

/// How often devices that are not served are tried again.
const RECOVERY_PAUSE: Duration = Duration::from_secs(30);

/// The state that the service manager shows while no pool has failed.
const SERVING: NotifyState<'_> = NotifyState::Status("serving");

/// How often failed pools are looked for.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

/// Reads the configuration and serves until a signal says to stop. `listen` are sockets for
/// requests for more space, as [`Config::listen`] takes them.
pub fn serve(path: Option<&Path>, listen: &[String]) -> Result<(), Error> {
    let source = Source { path: path.map(Path::to_path_buf), listen: listen.to_vec() };
    let config = source.read()?;
    logging::start(&config.log)?;
    let own_namespace =
        config.ublk.enabled && config.ublk.mount_namespace && enter_namespace(&config);
    let protection = protect_process();
    for problem in &protection.problems {
        tracing::warn!("{problem}");
    }
    let wanted = wanted_descriptors(&config);
    if protection.open_files < wanted {
        tracing::warn!(
            limit = protection.open_files,
            wanted,
            "the limit on open files (ulimit -n, LimitNOFILE=) is too low for nbd.max_connections: \
             connections beyond it are not accepted"
        );
    }
    run_in(&config, own_namespace, Some(&source))
}

/// Descriptors that the daemon has at most: those of connections, and some for all else.
fn wanted_descriptors(config: &Config) -> u64 {
    /// Pools, devices, rings, the control API: a few hundred.
    const OTHERS: usize = 1024;
    let of_listener = |one: &ListenerConfig| match one.tls {
        TlsUse::Off => one.max_connections,
        // The socket, twice, and both ends of the way to the worker.
        TlsUse::Allowed | TlsUse::Required => one.max_connections.saturating_mul(4),
    };
    let connections = config.nbd.listeners.iter().map(of_listener);
    // The driver's control file, and a ring.
    let ready = config.ublk.ready.saturating_mul(2);
    connections.fold(OTHERS.saturating_add(ready), usize::saturating_add) as u64
}

/// Where the configuration is read from, at the start and on SIGHUP.
struct Source {
    path: Option<PathBuf>,
    listen: Vec<String>,
}

impl Source {
    fn read(&self) -> Result<Config, Error> {
        let mut config = Config::load(self.path.as_deref())?;
        self.listen.iter().try_for_each(|text| config.listen(text))?;
        Ok(config)
    }
}

/// Before there are threads: the daemon's own mount namespace, without file systems on its devices.
/// Without privilege there is none, and no device either.
fn enter_namespace(config: &Config) -> bool {
    if let Err(error) = mounts::enter_own_namespace() {
        tracing::warn!(%error, "no mount namespace of our own: needs CAP_SYS_ADMIN");
        return false;
    }
    for point in mounts::detach_own(&services::remembered_devices(&config.state_dir)) {
        tracing::info!(point, "a file system on our device is detached from our namespace");
    }
    true
}

/// Serves until a signal says to stop.
pub fn run(config: &Config) -> Result<(), Error> {
    run_in(config, false, None)
}

fn run_in(config: &Config, own_namespace: bool, source: Option<&Source>) -> Result<(), Error> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(CONTROL_THREADS)
        .thread_name("control")
        .enable_all()
        .build()
        .map_err(|error| Error::io("start threads", error))?;
    let result = runtime.block_on(async {
        let mut signals = Signals::new()?;
        let daemon = Daemon::start(config, own_namespace).await?;
        while let SignalAction::ReadAgain = signals.next(daemon.control.stop_requested()).await {
            daemon.read_again(source).await;
        }
        signals.end_at_the_next();
        daemon.stop(config.stop_timeout).await
    });
    // A task that still runs serves a client that does not read.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

/// A daemon that serves.
struct Daemon {
    control: Control,
    workers: Workers,
    listeners: Vec<Listener>,
    stop_control: oneshot::Sender<()>,
    control_server: tokio::task::JoinHandle<Result<(), Error>>,
    /// Given back last.
    _locks: [FolderLock; 2],
}

impl Daemon {
    async fn start(config: &Config, own_namespace: bool) -> Result<Self, Error> {
        let runtime_lock = FolderLock::take(&config.runtime_dir, 0o755)?;
        let state_lock = if config.state_dir == config.runtime_dir {
            runtime_lock.same().map_err(|error| Error::io("lock", error))?
        } else {
            FolderLock::take(&config.state_dir, 0o700)?
        };
        let sockets = bind(config).await?;
        let workers = Workers::start(WorkerOptions {
            count: config.workers.count,
            buffer_bytes: config.workers.buffer_bytes,
            max_requests: config.nbd.max_requests,
            send_limit: config.nbd.send_timeout,
            receive_limit: config.nbd.receive_timeout,
            idle_limit: config.nbd.idle_timeout,
            ..WorkerOptions::default()
        })
        .map_err(frontend_error)?;
        let serving = Arc::new(Serving(workers.clone()));
        let options = ControlOptions {
            state_dir: config.state_dir.clone(),
            runtime_dir: config.runtime_dir.clone(),
            default_pool: config.default_pool.clone(),
            template: config.template.clone(),
            node: config.node.id,
            configured_pools: config.pools.len() + config.direct_pools.len(),
            health: config.health,
            hosts: config.hosts.clone(),
            hooks_dir: config.node.hooks_dir.clone(),
            hook_timeout: config.node.hook_timeout,
        };
        let control = Control::new(options, Arc::clone(&serving) as Arc<dyn DataPath>)?;
        if config.ublk.enabled {
            control.set_ublk(devices(config, &workers, own_namespace)?);
        }
        notify::send(&[NotifyState::Status("waiting for persistent memory")]).await;
        settle::settle(config).await;
        notify::send(&[NotifyState::Status("opening pools")]).await;
        notify::extending(control.start_groups()).await?;
        notify::extending(open_pools(config, &control)).await?;
        if own_namespace {
            for point in mounts::detach_own_of(&control.names_of_direct_devices().await?) {
                tracing::info!(point, "a file system on a namespace of ours was mounted here too");
            }
        }
        control.forget_attachments_of_missing_volumes().await?;
        notify::send(&[NotifyState::Status("recovering devices")]).await;
        control.recover_devices().await?;
        let (listeners, addresses) = serve_nbd(sockets.nbd, &control, &serving);
        control.set_nbd_addresses(addresses);
        sockets.extend.into_iter().for_each(|one| control.serve_extend(one));
        let (stop_control, stopped) = oneshot::channel();
        let stopped = async { drop(stopped.await) };
        let control_server = tokio::spawn(sockets.control.serve(control.clone(), stopped));
        if let Some(metrics) = sockets.metrics {
            if let Some(address) = metrics.address() {
                tracing::info!("metrics are served on http://{address}/metrics");
            }
            let stats = listeners.iter().map(|one| (one.address().to_string(), one.stats()));
            tokio::spawn(metrics.serve(control.clone(), stats.collect()));
        }
        watch(&control, sockets.peers);
        control.look_at_health().await;
        control.set_ready();
        control.watch_health();
        notify::send(&[NotifyState::Ready, SERVING]).await;
        let _locks = [runtime_lock, state_lock];
        Ok(Self { control, workers, listeners, stop_control, control_server, _locks })
    }

    /// Applies the settings that can be changed without a restart: the space policy and read cache
    /// of pools, and sockets of requests for more space. Pools that are not open are tried again,
    /// but for those that were closed on request. An invalid file changes nothing.
    async fn read_again(&self, source: Option<&Source>) {
        let read = match source.map(Source::read) {
            None => return tracing::info!("SIGHUP is ignored: there is no configuration to read"),
            Some(read) => read,
        };
        let config = match read.and_then(|config| without_replaced(config, &self.control)) {
            Err(error) => {
                return tracing::error!(%error, "SIGHUP: all stays as it was configured");
            }
            Ok(config) => config,
        };
        match self.control.apply_space(&config.pools) {
            Err(error) => return tracing::error!(%error, "SIGHUP: all stays as it was configured"),
            Ok(changed) => {
                for pool in changed {
                    tracing::info!(pool, "SIGHUP: space policy changed");
                }
            }
        }
        self.control.set_configured(names_of(&config));
        match all_pools(&config, &self.control) {
            Err(error) => {
                tracing::error!(%error, "SIGHUP: pools that are not open stay as they were")
            }
            Ok(pools) => {
                for pool in self.control.configure_unopened(&pools) {
                    tracing::info!(pool, "SIGHUP: the next opening uses its new configuration");
                }
            }
        }
        // Beside the signals: a lock may be waited for as long as IO can take.
        let control = self.control.clone();
        tokio::spawn(async move { control.reopen_pools().await });
        self.control.follow_extend_sockets(&config.pools).await;
        tracing::info!(
            "SIGHUP: pool.space, pool.extend and pool.read_cache are as configured, pools that are \
             not open are tried again; the rest takes a restart"
        );
    }

    /// Takes nothing new, answers what is in flight, and leaves pools clean. Attachments stay.
    async fn stop(self, limit: Duration) -> Result<(), Error> {
        notify::send(&[NotifyState::Stopping, NotifyState::Status("draining")]).await;
        self.control.stop();
        for listener in self.listeners {
            listener.stop().await;
        }
        self.control.stop_extends().await;
        let _ = self.stop_control.send(());
        let mut server = self.control_server;
        if tokio::time::timeout(CONTROL_STOP_TIME, &mut server).await.is_err() {
            tracing::warn!("clients of the control API do not hang up");
            server.abort();
        }
        self.workers.drain(limit).await;
        let closed = tokio::time::timeout(limit, self.control.close_pools()).await;
        let closed = closed.unwrap_or_else(|_| {
            let problem = format!("were not closed within {} s", limit.as_secs());
            Err(Error::in_use("pools", problem))
        });
        self.control.end_ready_devices().await;
        closed?;
        tracing::info!("stopped");
        Ok(())
    }
}

/// Block devices, whose queues the workers serve.
fn devices(config: &Config, workers: &Workers, own_namespace: bool) -> Result<Arc<Devices>, Error> {
    let ublk = &config.ublk;
    let options = DeviceOptions {
        owner: services::device_owner(&config.state_dir)?,
        queues: ublk.queues,
        depth: ublk.depth,
        max_bytes: ublk.max_bytes,
        zero_copy: ublk.zero_copy,
        own_namespace,
        ready: ublk.ready,
    };
    Ok(Arc::new(Devices::new(Arc::new(LibublkDriver), Arc::new(workers.clone()), options)))
}

/// The configuration without the pool by default where one of its name lies elsewhere: the table of
/// that was just removed, or it was imported since.
fn without_replaced(mut config: Config, control: &Control) -> Result<Config, Error> {
    if config.has_implied_pool {
        for pool in std::mem::take(&mut config.pools) {
            if !control.has_pool_elsewhere(&pool)? {
                config.pools.push(pool);
            }
        }
    }
    Ok(config)
}

/// Names of the pools of extents that the configuration has.
fn names_of(config: &Config) -> impl Iterator<Item = String> {
    config.pools.iter().map(|pool| pool.name.clone())
}

/// The pools of extents of the configuration, and those that were made at run time.
fn all_pools(config: &Config, control: &Control) -> Result<Vec<PoolConfig>, Error> {
    let mut pools = config.pools.clone();
    for pool in control.remembered_pools()? {
        if pools.iter().all(|other| other.name != pool.name) {
            pools.push(pool);
        }
    }
    let mut pools: Vec<_> = pools.iter().map(|pool| control.with_added_devices(pool)).collect();
    note_others(&mut pools);
    Ok(pools)
}

/// Opens all pools at the same time. One that fails is no reason not to serve the others; when
/// none is left, the first failure is the daemon's.
async fn open_pools(config: &Config, control: &Control) -> Result<(), Error> {
    let config = without_replaced(config.clone(), control)?;
    control.set_configured(names_of(&config));
    let opening: Vec<_> = all_pools(&config, control)?
        .into_iter()
        .map(|pool| {
            let control = control.clone();
            tokio::spawn(async move { control.start_pool(&pool).await })
        })
        .collect();
    let (mut opened, mut first_error) = (0, None);
    for pool in opening {
        let result = pool.await.unwrap_or_else(|error| {
            Err(Error::Unexpected { what: "open a pool".to_owned(), problem: error.to_string() })
        });
        match result {
            Ok(()) => opened += 1,
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    for pool in &config.direct_pools {
        match control.open_direct(pool, Platform::default()).await {
            Ok(()) => opened += 1,
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    match first_error {
        // The daemon has to be there for the call that opens one of these. Other causes may pass,
        // or are shown best to the user at the terminal: the next start sees.
        Some(error) if opened == 0 && !control.has_pools_for_a_call() => Err(error),
        _ => Ok(()),
    }
}

fn serve_nbd(
    bound: Vec<(Bound, TlsUse)>,
    control: &Control,
    serving: &Arc<Serving>,
) -> (Vec<Listener>, Vec<NbdAddress>) {
    let exports = Arc::new(control.clone());
    let (mut listeners, mut addresses) = (Vec::new(), Vec::new());
    for (bound, tls) in bound {
        let place = match bound.address() {
            Address::Unix { path, .. } => NbdPlace::Unix(path.clone()),
            Address::Tcp(address) => NbdPlace::Tcp(*address),
        };
        addresses.push(NbdAddress { place, tls: tls == TlsUse::Required });
        let listener = bound.serve(Arc::clone(&exports), Arc::clone(serving));
        tracing::info!("NBD is served on {}", listener.address());
        listeners.push(listener);
    }
    (listeners, addresses)
}

/// Begins what goes on beside the calls, for as long as the daemon runs.
fn watch(control: &Control, peers: Option<PeerListener>) {
    if let Some(peers) = peers {
        tokio::spawn(serve_peers(peers, control.clone()));
    }
    tokio::spawn(notify::watchdog(control.clone()));
    tokio::spawn(watch_pools(control.clone()));
    tokio::spawn(watch_devices(control.clone()));
    tokio::spawn(watch_groups(control.clone()));
    tokio::spawn(control.clone().fetch_wanted_cells());
}

/// Answers the daemons of other hosts for as long as this one runs.
async fn serve_peers(peers: PeerListener, control: Control) {
    if let Some(address) = peers.address() {
        tracing::info!("other hosts are answered at {address}");
    }
    if let Err(error) = peers.serve(control, std::future::pending()).await {
        tracing::error!(%error, "other hosts are not answered");
    }
}

/// Retries devices that could not be recovered: the cause may pass.
async fn watch_devices(control: Control) {
    loop {
        tokio::time::sleep(RECOVERY_PAUSE).await;
        if let Err(error) = control.recover_again().await {
            tracing::warn!(%error, "devices were not recovered");
        }
    }
}

/// Looks whether this host was fenced from a group of cells.
async fn watch_groups(control: Control) {
    loop {
        tokio::time::sleep(MEMBERSHIP_PAUSE).await;
        control.watch_groups().await;
    }
}

/// Reports each pool that fails, once.
async fn watch_pools(control: Control) {
    let mut reported = std::collections::BTreeSet::new();
    let failure_of = |name: &str, failure: &str| format!("pool {name} has failed: {failure}");
    loop {
        let failed = control.failed_pools();
        let before = reported.len();
        // One that was opened again may fail again.
        reported.retain(|name| failed.contains_key(name));
        if reported.len() < before {
            // It may have been the one that is shown.
            let left = failed.iter().find(|(name, _)| reported.contains(*name));
            let left = left.map(|(name, failure)| failure_of(name, failure));
            notify::send(&[left.as_deref().map_or(SERVING, NotifyState::Status)]).await;
        }
        for (name, failure) in failed {
            if reported.insert(name.clone()) {
                let text = failure_of(&name, &failure);
                notify::send(&[NotifyState::Status(&text)]).await;
                control.events().publish(EventKind::PoolFailed, &name, "", text);
            }
        }
        tokio::time::sleep(FAILURE_PAUSE).await;
    }
}
