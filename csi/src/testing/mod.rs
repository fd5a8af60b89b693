//! A daemon for tests: keeps volumes in memory by the rules of `blockd.v1`, and can be killed
//! before or after any call, be slow, or hold a volume as attached.

mod fake;
mod pmem;
pub(crate) mod shell;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use blockd_api::v1;
use blockd_api::v1::control_server::ControlServer;
use blockd_csi_base::options::DEFAULT_DRIVER;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;

use crate::cells::Cells;
use crate::config::Config;
use crate::daemon::Daemon;
use crate::ids::Names;
use crate::parameters::Keys;
use crate::plugin::{Plugin, Settings, Streams};
use crate::topology::Place;

pub(crate) use self::fake::{Cell, Fake, Rival, StreamStep};
pub(crate) use self::pmem::Memory;

/// 2^20.
pub(crate) const MIB: i64 = 1_048_576;

/// A daemon with a socket of its own, which goes with its test.
pub(crate) struct Rig {
    pub(crate) fake: Fake,
    folder: PathBuf,
    configuration: String,
}

impl Rig {
    /// With pools of these sizes, the first of which is the default.
    pub(crate) fn new(pools: &[(&str, i64)], configuration: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("blockd-csi-rig-{}-{count}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        let fake = Fake::new(pools);
        let listener = UnixListener::bind(folder.join("c")).unwrap();
        let service = ControlServer::new(fake.clone());
        let served = tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming(UnixListenerStream::new(listener));
        tokio::spawn(served);
        Self { fake, folder, configuration: configuration.to_owned() }
    }

    /// One thin pool of 1 GiB, with one class.
    pub(crate) fn simple() -> Self {
        Self::new(&[("default", 1024 * MIB)], "")
    }

    /// A plugin that was started just now.
    pub(crate) fn plugin(&self) -> Arc<Plugin> {
        self.plugin_with(Streams::default())
    }

    /// The same with these bounds for streams.
    pub(crate) fn plugin_with(&self, streams: Streams) -> Arc<Plugin> {
        let names = Names::new(DEFAULT_DRIVER);
        let config = Config::parse(&self.configuration, &names).unwrap();
        let settings = Settings {
            driver: DEFAULT_DRIVER.to_owned(),
            place: Place::new(DEFAULT_DRIVER, "n1"),
            cells: Cells::new(DEFAULT_DRIVER, &config.cluster),
            config,
            names,
            keys: Keys::new(DEFAULT_DRIVER),
            kubelet_dir: self.folder.join("kubelet"),
            state_dir: self.folder.join("state"),
            strict_single_node_writer: false,
            expand_on_node: false,
        };
        Plugin::with_streams(settings, Daemon::new(self.folder.join("c")), streams)
    }

    /// The controller of such a plugin.
    pub(crate) fn controller(&self) -> crate::controller::Service {
        crate::controller::Service::new(self.plugin())
    }

    /// Returns all volumes by pool and name, with their size and settings.
    pub(crate) fn state(&self) -> BTreeMap<(String, String), (i64, v1::VolumeSettings)> {
        let entry = |volume: v1::Volume| {
            let settings = volume.settings.unwrap_or_default();
            ((volume.pool, volume.name), (volume.size_bytes, settings))
        };
        self.fake.volumes().into_iter().map(entry).collect()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.folder).unwrap();
    }
}
