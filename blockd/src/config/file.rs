//! The file as it is written: keys, and their defaults.

use blockd_media::place::{CONTROL_SOCKET, NBD_SOCKET, Places};
use blockd_media::pool::MAX_WORKERS;
use serde::{Deserialize, Serialize};

/// The whole file. An empty text stands for a value that is not given.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct File {
    pub(super) runtime_dir: String,
    pub(super) state_dir: String,
    pub(super) control_socket: String,
    pub(super) stop_timeout: String,
    pub(super) default_pool: String,
    pub(super) log: Log,
    pub(super) metrics: Metrics,
    pub(super) node: Node,
    pub(super) health: Health,
    pub(super) hosts: Hosts,
    pub(super) workers: Workers,
    pub(super) nbd: Nbd,
    pub(super) ublk: Ublk,
    #[serde(rename = "pool")]
    pub(super) pools: Vec<Pool>,
}

#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Log {
    pub(super) format: String,
    pub(super) level: String,
}

#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Metrics {
    pub(super) address: String,
}

#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Node {
    pub(super) id: String,
    pub(super) hook_timeout: String,
}

#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Health {
    pub(super) enabled: bool,
    pub(super) interval: String,
    pub(super) slow_io: String,
    pub(super) hold: String,
    pub(super) errors_hold: String,
}

#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Hosts {
    pub(super) listen: String,
    pub(super) address: String,
    pub(super) certificate: String,
    pub(super) key: String,
    pub(super) ca: String,
}

#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Workers {
    pub(super) count: i64,
    pub(super) buffer_size: Amount,
}

#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Nbd {
    pub(super) handshake_timeout: String,
    pub(super) max_handshakes: i64,
    pub(super) send_timeout: String,
    pub(super) receive_timeout: String,
    pub(super) idle_timeout: String,
    pub(super) max_connections: i64,
    pub(super) max_connections_per_peer: i64,
    pub(super) max_requests: i64,
    pub(super) tls: Tls,
    #[serde(rename = "listener")]
    pub(super) listeners: Vec<Listener>,
}

#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Ublk {
    pub(super) enabled: String,
    pub(super) queues: i64,
    pub(super) depth: i64,
    pub(super) max_io: Amount,
    pub(super) zero_copy: String,
    pub(super) ready: i64,
    pub(super) mount_namespace: bool,
}

#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Tls {
    pub(super) certificate: String,
    pub(super) key: String,
    pub(super) client_ca: String,
}

#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Listener {
    pub(super) unix: String,
    pub(super) mode: String,
    pub(super) tcp: String,
    pub(super) tls: String,
    pub(super) max_connections: i64,
}

#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Pool {
    pub(super) name: String,
    pub(super) path: String,
    pub(super) devices: Vec<String>,
    pub(super) spare_devices: Vec<String>,
    pub(super) kind: String,
    pub(super) size: Amount,
    pub(super) preallocate: bool,
    pub(super) volatile: bool,
    pub(super) direct: bool,
    pub(super) extent_size: Amount,
    pub(super) composite: bool,
    pub(super) read_cache: Amount,
    pub(super) lock_wait: String,
    pub(super) claim_wait: String,
    pub(super) commit_interval: String,
    pub(super) ring_records: i64,
    pub(super) accept_loss: bool,
    pub(super) persistence: String,
    pub(super) atomicity: String,
    pub(super) erase: bool,
    pub(super) region: String,
    pub(super) namespace: String,
    pub(super) percentage: i64,
    pub(super) create_namespaces: bool,
    pub(super) name_prefix: String,
    pub(super) alignment: String,
    pub(super) size_semantics: String,
    pub(super) page_map: String,
    pub(super) extend: Extend,
    pub(super) space: Space,
}

#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Extend {
    pub(super) socket: String,
}

/// The policy when a pool fills up.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Space {
    pub(super) low: String,
    pub(super) very_low: String,
    pub(super) quantum: Amount,
    pub(super) fold_rate: Amount,
    pub(super) overprovision_ratio: String,
    pub(super) grow_limit: Amount,
    pub(super) grow_step: Amount,
    pub(super) hook: String,
    pub(super) hook_timeout: String,
}

/// A size: bytes as a number, or a text with a unit.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(untagged)]
pub(super) enum Amount {
    Bytes(i64),
    Text(String),
}

impl Amount {
    pub(super) fn text(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl std::fmt::Display for Amount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Bytes(bytes) => bytes.fmt(f),
            Self::Text(text) => text.fmt(f),
        }
    }
}

impl Default for File {
    fn default() -> Self {
        Self {
            runtime_dir: String::new(),
            state_dir: String::new(),
            control_socket: String::new(),
            stop_timeout: "30s".to_owned(),
            default_pool: String::new(),
            log: Log::default(),
            metrics: Metrics::default(),
            node: Node::default(),
            health: Health::default(),
            hosts: Hosts::default(),
            workers: Workers::default(),
            nbd: Nbd::default(),
            ublk: Ublk::default(),
            pools: Vec::new(),
        }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self { format: "text".to_owned(), level: "info".to_owned() }
    }
}

impl Default for Node {
    fn default() -> Self {
        Self { id: String::new(), hook_timeout: "60s".to_owned() }
    }
}

impl Default for Health {
    fn default() -> Self {
        Self {
            enabled: true,
            interval: "5s".to_owned(),
            slow_io: "500ms".to_owned(),
            hold: "10s".to_owned(),
            errors_hold: "10m".to_owned(),
        }
    }
}

impl Default for Workers {
    fn default() -> Self {
        Self { count: 0, buffer_size: Amount::text("16M") }
    }
}

impl Default for Nbd {
    fn default() -> Self {
        Self {
            handshake_timeout: "10s".to_owned(),
            max_handshakes: 128,
            send_timeout: "60s".to_owned(),
            receive_timeout: "30s".to_owned(),
            idle_timeout: "0s".to_owned(),
            max_connections: 8192,
            max_connections_per_peer: 1024,
            max_requests: 128,
            tls: Tls::default(),
            listeners: Vec::new(),
        }
    }
}

impl Default for Ublk {
    fn default() -> Self {
        Self {
            enabled: "auto".to_owned(),
            queues: 1,
            depth: 0,
            max_io: Amount::text("128K"),
            zero_copy: "auto".to_owned(),
            ready: 0,
            mount_namespace: true,
        }
    }
}

impl Default for Listener {
    fn default() -> Self {
        Self {
            unix: String::new(),
            mode: "0600".to_owned(),
            tcp: String::new(),
            tls: "off".to_owned(),
            max_connections: 0,
        }
    }
}

impl Default for Pool {
    fn default() -> Self {
        Self {
            name: String::new(),
            path: String::new(),
            devices: Vec::new(),
            spare_devices: Vec::new(),
            kind: "auto".to_owned(),
            size: Amount::Bytes(0),
            preallocate: false,
            volatile: false,
            direct: true,
            extent_size: Amount::text("256K"),
            composite: true,
            read_cache: Amount::Bytes(0),
            lock_wait: "5m".to_owned(),
            claim_wait: "2s".to_owned(),
            commit_interval: "1s".to_owned(),
            ring_records: 1 << 13,
            accept_loss: false,
            persistence: "auto".to_owned(),
            atomicity: "block".to_owned(),
            erase: true,
            region: String::new(),
            namespace: String::new(),
            percentage: 100,
            create_namespaces: false,
            name_prefix: "blockd-".to_owned(),
            alignment: "formula".to_owned(),
            size_semantics: "usable".to_owned(),
            page_map: "device".to_owned(),
            extend: Extend::default(),
            space: Space::default(),
        }
    }
}

impl Default for Space {
    fn default() -> Self {
        Self {
            low: "20s".to_owned(),
            very_low: "5s".to_owned(),
            quantum: Amount::text("16M"),
            fold_rate: Amount::text("64M"),
            overprovision_ratio: String::new(),
            grow_limit: Amount::Bytes(0),
            grow_step: Amount::Bytes(0),
            hook: String::new(),
            hook_timeout: "60s".to_owned(),
        }
    }
}

impl Pool {
    /// The template of pools that are created at run time where no other is configured.
    pub(super) fn template() -> Self {
        let (name, kind) = ("template".to_owned(), "memory".to_owned());
        Self { name, kind, size: Amount::text("1G"), ..Self::default() }
    }
}

/// The name of the pool of a daemon without a configuration.
pub(super) const DEFAULT_POOL: &str = "default";

impl File {
    /// The same with everything filled in that depends on where it runs.
    pub(super) fn completed(mut self, places: &Places) -> Self {
        let fill = |text: &mut String, value: String| {
            if text.is_empty() {
                *text = value;
            }
        };
        fill(&mut self.runtime_dir, places.runtime_dir.display().to_string());
        fill(&mut self.state_dir, places.state_dir.display().to_string());
        let runtime = self.runtime_dir.trim_end_matches('/').to_owned();
        fill(&mut self.control_socket, format!("{runtime}/{CONTROL_SOCKET}"));
        if self.workers.count == 0 {
            self.workers.count = i64::try_from(places.workers.min(MAX_WORKERS)).unwrap_or(1);
        }
        if self.nbd.listeners.is_empty() {
            let unix = format!("{runtime}/{NBD_SOCKET}");
            self.nbd.listeners.push(Listener { unix, ..Listener::default() });
        }
        for listener in &mut self.nbd.listeners {
            if listener.max_connections == 0 {
                listener.max_connections = self.nbd.max_connections;
            }
        }
        if self.pools.is_empty() {
            let path = format!("{}/default.pool", self.state_dir.trim_end_matches('/'));
            let name = DEFAULT_POOL.to_owned();
            let (kind, size) = ("file".to_owned(), Amount::text("90%"));
            self.pools.push(Pool { name, path, kind, size, ..Pool::default() });
        }
        fill(&mut self.default_pool, self.pools[0].name.clone());
        self
    }
}
