//! The endpoint: binds it, serves the services on it, and ends in order.

use std::future::Future;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use blockd_csi_base::clock::Clock;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;

use crate::cells::Cells;
use crate::changes;
use crate::config::Config;
use crate::controller;
use crate::daemon::Daemon;
use crate::error::Error;
use crate::group;
use crate::identity;
use crate::ids::Names;
use crate::metrics::{Metrics, serve_health};
use crate::node;
use crate::options::{Options, Service};
use crate::parameters::Keys;
use crate::plugin::{Plugin, Settings};
use crate::proto::controller_server::ControllerServer;
use crate::proto::group_controller_server::GroupControllerServer;
use crate::proto::identity_server::IdentityServer;
use crate::proto::node_server::NodeServer;
use crate::proto::snapshot_metadata_server::SnapshotMetadataServer;
use crate::topology::Place;

/// Calls of one connection at once: more wait. The tests of the specification make two hundred.
const CALLS_AT_ONCE: usize = 1024;

/// Largest request. Valid requests are far smaller; requests above the limits, up to this size, get
/// an error that names the field.
const MAX_REQUEST: usize = 4 * 1024 * 1024;

/// How long calls may continue after SIGTERM: less than the 30 s after which Kubernetes kills.
const ENDING_TIME: Duration = Duration::from_secs(20);

/// Serves until `stop` ends.
///
/// # Errors
/// An option or the configuration is wrong, or a socket can't be had.
pub async fn serve(options: &Options, stop: impl Future<Output = ()>) -> Result<(), Error> {
    options.check()?;
    let plugin = plugin(options)?;
    let metrics = Metrics::bind("metrics", options.metrics_address).await?;
    let health = Metrics::bind("health", options.health_address).await?;
    let has = |service| options.services.contains(&service);
    let controller = has(Service::Controller).then(|| {
        ControllerServer::new(controller::Service::new(Arc::clone(&plugin)))
            .max_decoding_message_size(MAX_REQUEST)
    });
    let group = has(Service::Controller).then(|| {
        GroupControllerServer::new(group::Service::new(Arc::clone(&plugin)))
            .max_decoding_message_size(MAX_REQUEST)
    });
    let changes = has(Service::Controller).then(|| {
        SnapshotMetadataServer::new(changes::Service::new(Arc::clone(&plugin)))
            .max_decoding_message_size(MAX_REQUEST)
    });
    let node = if has(Service::Node) {
        let service = node::Service::open(Arc::clone(&plugin))?;
        Some(NodeServer::new(service).max_decoding_message_size(MAX_REQUEST))
    } else {
        None
    };
    let identity = IdentityServer::new(identity::Service::new(Arc::clone(&plugin)));
    let path = options.socket()?;
    let listener = bind(&path, options.endpoint_group)?;
    if let Some(listener) = metrics {
        let about = Arc::clone(&plugin);
        let refresh = move || controller::refresh_capacity_metrics(Arc::clone(&about));
        tokio::spawn(plugin.metrics.clone().serve(listener, refresh));
    }
    if let Some(listener) = health {
        tokio::spawn(serve_health(listener));
    }
    if controller.is_some() {
        tokio::spawn(controller::sweep_once(Arc::clone(&plugin)));
    }
    let (driver, node_id) = (&options.driver_name, &options.node_id);
    let endpoint = path.display();
    tracing::info!(driver, node_id, %endpoint, version = env!("CARGO_PKG_VERSION"), "serving");
    let router = Server::builder()
        .concurrency_limit_per_connection(CALLS_AT_ONCE)
        .add_service(identity)
        .add_optional_service(controller)
        .add_optional_service(group)
        .add_optional_service(changes)
        .add_optional_service(node);
    // Connections of sidecars stay open for ever: they are not waited for, but calls are.
    let served = router.serve_with_incoming(UnixListenerStream::new(listener));
    let ended = tokio::select! {
        ended = served => ended,
        () = stop => Ok(()),
    };
    let _ = fs::remove_file(&path);
    drain(&plugin).await;
    tracing::info!("ended");
    ended.map_err(|error| Error::unexpected(format_args!("serve {}:", path.display()), error))
}

fn plugin(options: &Options) -> Result<Arc<Plugin>, Error> {
    let names = Names::new(&options.driver_name);
    let config = Config::load(options.config.as_deref(), &names)?;
    let settings = Settings {
        driver: options.driver_name.clone(),
        place: Place::new(&options.driver_name, &options.node_id),
        names,
        keys: Keys::new(&options.driver_name),
        cells: Cells::new(&options.driver_name, &config.cluster),
        config,
        kubelet_dir: options.kubelet_dir.clone(),
        state_dir: options.state_dir(),
        strict_single_node_writer: options.strict_single_node_writer,
        expand_on_node: options.expand_on_node,
    };
    Ok(Plugin::new(settings, Daemon::new(options.blockd_socket.clone())))
}

/// Waits for calls that were begun.
async fn drain(plugin: &Plugin) {
    plugin.end_streams();
    let clock = Clock::start();
    while plugin.working() > 0 && clock.elapsed() < ENDING_TIME {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Binds the endpoint for this user, and for a group if there is one. A stale socket of a dead
/// plugin is removed; a socket with a listener, or a file that is no socket, is not.
///
/// # Errors
/// The path is taken, or the operating system refused.
pub fn bind(path: &Path, group: Option<u32>) -> Result<UnixListener, Error> {
    let name = || format!("endpoint {}", path.display());
    if let Some(folder) = path.parent() {
        make_folder(folder, group)?;
    }
    if let Ok(metadata) = fs::symlink_metadata(path) {
        if !metadata.file_type().is_socket() {
            return Err(Error::in_use(name(), "is there already, and is no socket"));
        }
        if UnixStream::connect(path).is_ok() {
            return Err(Error::in_use(name(), "is served by another process"));
        }
        let removed = fs::remove_file(path);
        removed.map_err(|error| Error::io(format_args!("remove {}", path.display()), error))?;
    }
    let failed = |error: io::Error| Error::io(format_args!("bind {}", name()), error);
    // The socket is created under another name, so that no other user can connect before its mode
    // is set.
    let fresh = fresh_name(path);
    let _ = fs::remove_file(&fresh);
    let listener = UnixListener::bind(&fresh).map_err(failed)?;
    let mode = if group.is_some() { 0o660 } else { 0o600 };
    if group.is_some() {
        chown(&fresh, None, group).map_err(failed)?;
    }
    fs::set_permissions(&fresh, fs::Permissions::from_mode(mode)).map_err(failed)?;
    fs::rename(&fresh, path).map_err(failed)?;
    Ok(listener)
}

/// Makes the folders of the endpoint that are missing, for this user and for the group to pass. One
/// that exists is left as it is, since it may be for others too: a warning names it where the group
/// cannot pass.
fn make_folder(folder: &Path, group: Option<u32>) -> Result<(), Error> {
    let failed = |error| Error::io(format_args!("create {}", folder.display()), error);
    let Some(group) = group else {
        return fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed);
    };
    let ancestors: Vec<&Path> = folder.ancestors().collect();
    for &one in ancestors.iter().rev() {
        match fs::DirBuilder::new().mode(0o700).create(one) {
            Ok(()) => {
                chown(one, None, Some(group)).map_err(failed)?;
                fs::set_permissions(one, fs::Permissions::from_mode(0o710)).map_err(failed)?;
            }
            Err(_) if one.is_dir() => {
                let data = fs::metadata(one).map_err(failed)?;
                if !passes(data.mode(), data.gid() == group) {
                    let folder = one.display();
                    tracing::warn!(%folder, group, "the endpoint's group cannot pass a folder");
                }
            }
            Err(error) => return Err(failed(error)),
        }
    }
    Ok(())
}

/// Whether a group may pass a folder of this mode. It has the bits of the folder's group if it is
/// that, and otherwise those of others.
const fn passes(mode: u32, is_of_group: bool) -> bool {
    let bit = if is_of_group { 0o010 } else { 0o001 };
    mode & bit != 0
}

/// In the same folder, and no longer than the other.
fn fresh_name(path: &Path) -> PathBuf {
    let name = path.file_name().map_or(1, |name| name.len());
    path.with_file_name(".".repeat(name.max(3)))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// A folder that goes with its test.
    struct Folder(PathBuf);

    impl Folder {
        fn new() -> Self {
            static COUNT: AtomicU32 = AtomicU32::new(0);
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let name = format!("blockd-csi-{}-{count}", std::process::id());
            let path = std::env::temp_dir().join(name);
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[tokio::test]
    async fn the_endpoint_is_for_its_owner_alone_and_its_folder_is_made() {
        let folder = Folder::new();
        let path = folder.0.join("plugins/driver/csi.sock");
        let _listener = bind(&path, None).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let parent = fs::metadata(path.parent().unwrap()).unwrap();
        assert_eq!(parent.permissions().mode() & 0o777, 0o700);
        assert!(UnixStream::connect(&path).is_ok());
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[tokio::test]
    async fn the_endpoint_is_for_a_group_too_if_one_is_named() {
        let folder = Folder::new();
        let path = folder.0.join("s");
        // The group that this process has: another one is for root to give.
        let group = fs::metadata(&folder.0).unwrap().gid();
        let _listener = bind(&path, Some(group)).unwrap();
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!((metadata.permissions().mode() & 0o777, metadata.gid()), (0o660, group));
    }

    #[tokio::test]
    async fn folders_that_are_made_are_passed_by_the_group_and_others_are_left_alone() {
        let folder = Folder::new();
        let existing = folder.0.join("plugins");
        fs::create_dir(&existing).unwrap();
        fs::set_permissions(&existing, fs::Permissions::from_mode(0o700)).unwrap();
        let group = fs::metadata(&existing).unwrap().gid();
        let path = existing.join("a/b/csi.sock");
        let _listener = bind(&path, Some(group)).unwrap();
        let of = |path: &str| {
            let metadata = fs::metadata(existing.join(path)).unwrap();
            (metadata.permissions().mode() & 0o777, metadata.gid())
        };
        assert_eq!((of("a"), of("a/b")), ((0o710, group), (0o710, group)));
        assert_eq!(of(""), (0o700, group));
    }

    #[test]
    fn a_group_passes_a_folder_by_the_bits_that_count_for_it() {
        for (mode, of_group, of_others) in [
            (0o710, true, false),
            (0o750, true, false),
            (0o700, false, false),
            (0o701, false, true),
        ] {
            assert_eq!(
                (passes(mode, true), passes(mode, false)),
                (of_group, of_others),
                "{mode:o}"
            );
        }
    }

    #[tokio::test]
    async fn the_socket_of_a_dead_plugin_is_replaced_and_that_of_a_living_one_is_not() {
        let folder = Folder::new();
        let path = folder.0.join("s");
        drop(bind(&path, None).unwrap());
        assert!(path.exists());
        let alive = bind(&path, None).unwrap();
        let error = bind(&path, None).unwrap_err();
        assert_eq!(error.code(), tonic::Code::FailedPrecondition);
        drop(alive);
        fs::remove_file(&path).unwrap();
        fs::write(&path, "data").unwrap();
        assert!(bind(&path, None).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"data");
    }
}
