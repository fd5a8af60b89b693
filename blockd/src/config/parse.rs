//! From the file's text to checked values. Every error names file, line, key, value and what is
//! allowed.

mod mistakes;
mod overlaps;
mod pools;
mod values;

use std::cell::RefCell;
use std::fmt::Display;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use blockd_control::config::{
    HealthConfig, HostsConfig, HostsTls, MAX_READY_DEVICES, MAX_UBLK_DEPTH, NodeConfig,
};
use blockd_control::node::NodeId;
use blockd_media::error::Error;
use blockd_media::place::Places;
use blockd_media::pool::MAX_WORKERS;
use toml::de::{DeTable, DeValue};

use super::direct::DIRECT;
use super::file::{File, Health, Hosts, Listener, Node, Pool, Ublk, Workers};
use super::{
    Config, ListenAddress, ListenerConfig, LogConfig, NbdConfig, TlsConfig, TlsUse, UblkConfig,
    WorkersConfig,
};

pub(super) use mistakes::mistakes;
pub use pools::note_others;

/// Connections of a listener. Each takes a descriptor, four with TLS.
const MAX_CONNECTIONS: i64 = 65_536;

/// Reads and checks a file.
pub(super) fn parse(text: &str, path: Option<&Path>, places: &Places) -> Result<Config, Error> {
    let source = Source::new(text, path);
    let file = source.read()?;
    let has_implied_pool = file.pools.is_empty();
    let config = source.check(&file.completed(places), places)?;
    Ok(Config { has_implied_pool, ..config })
}

/// The file with everything filled in that was not given.
pub(super) fn complete(text: &str, path: Option<&Path>, places: &Places) -> Result<File, Error> {
    let source = Source::new(text, path);
    let file = source.read()?.completed(places);
    source.check(&file, places)?;
    Ok(file)
}

/// The text, to find lines in.
pub(super) struct Source<'a> {
    text: &'a str,
    path: Option<&'a Path>,
    /// The place of the last mistake.
    fault: RefCell<Option<Fault>>,
}

/// The place of a mistake.
enum Fault {
    /// A byte of the text.
    Offset(usize),
    /// A key, which may be missing.
    Key(Vec<String>),
}

/// A key of the file: tables, and positions in arrays of tables, down to its name.
type Key<'a> = &'a [&'a str];

impl<'a> Source<'a> {
    fn new(text: &'a str, path: Option<&'a Path>) -> Self {
        Self { text, path, fault: RefCell::default() }
    }
}

impl Source<'_> {
    fn read(&self) -> Result<File, Error> {
        toml::from_str(self.text).map_err(|error: toml::de::Error| {
            self.fault.replace(error.span().map(|span| Fault::Offset(span.start)));
            let line = error.span().map(|span| self.line_of(span.start));
            let key = line.and_then(|line| self.key_in(line));
            let message = error.message().replace('\n', ", ");
            let problem = match key {
                Some(key) if !message.contains(&key) => format!("{key}: {message}"),
                _ => message,
            };
            Error::Config { place: self.place(line), problem }
        })
    }

    fn line_of(&self, at: usize) -> usize {
        self.text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1
    }

    fn key_in(&self, line: usize) -> Option<String> {
        let (key, _) = self.text.lines().nth(line.checked_sub(1)?)?.split_once('=')?;
        Some(key.trim().to_owned())
    }

    fn place(&self, line: Option<usize>) -> String {
        let file = self.path.map_or_else(|| "configuration".into(), |path| path.to_string_lossy());
        line.map_or_else(|| file.to_string(), |line| format!("{file}:{line}"))
    }

    /// The line that a key is on, if the file has it.
    fn line_of_key(&self, key: Key<'_>) -> Option<usize> {
        let table = DeTable::parse(self.text).ok()?;
        let mut value = DeValue::Table(table.into_inner());
        let mut line = None;
        for step in key {
            let next = match &value {
                DeValue::Table(table) => table.get(*step),
                DeValue::Array(array) => array.get(step.parse::<usize>().ok()?),
                _ => None,
            }?;
            line = Some(self.line_of(next.span().start));
            value = next.get_ref().clone();
        }
        line
    }

    pub(super) fn refuse(&self, key: Key<'_>, value: impl Display, allowed: impl Display) -> Error {
        let line = self.line_of_key(key).or_else(|| self.line_of_key(key.split_last()?.1));
        let names = key.iter().filter(|step| step.parse::<usize>().is_err());
        let name = names.copied().collect::<Vec<_>>().join(".");
        let key = key.iter().map(|step| (*step).to_owned()).collect();
        self.fault.replace(Some(Fault::Key(key)));
        Error::invalid(format!("{}: {name}", self.place(line)), value, allowed)
    }

    fn check(&self, file: &File, places: &Places) -> Result<Config, Error> {
        let (mut pools, mut direct_pools) = (Vec::new(), Vec::new());
        for (index, pool) in file.pools.iter().enumerate() {
            let index = index.to_string();
            if pool.kind == DIRECT {
                direct_pools.push(self.direct(&index, pool)?);
            } else {
                self.not_direct(&index, pool)?;
                pools.push(self.pool(&index, pool)?);
            }
        }
        self.names_differ(file)?;
        self.regions_differ(file)?;
        self.pools_differ(&pools)?;
        note_others(&mut pools);
        let template = match pools.first() {
            Some(first) => first.clone(),
            None => self.pool("0", &Pool::template())?,
        };
        let stop_timeout = self.duration(&["stop_timeout"], &file.stop_timeout, 1, 3600)?;
        let config = Config {
            source: self.path.map(Path::to_path_buf),
            runtime_dir: self.absolute(&["runtime_dir"], &file.runtime_dir)?,
            state_dir: self.absolute(&["state_dir"], &file.state_dir)?,
            control_socket: self.socket(&["control_socket"], &file.control_socket)?,
            stop_timeout,
            pools,
            has_implied_pool: false,
            direct_pools,
            template,
            default_pool: file.default_pool.clone(),
            nbd: self.nbd(file)?,
            ublk: self.ublk(&file.ublk)?,
            workers: self.workers(&file.workers)?,
            metrics: self.metrics(&file.metrics.address)?,
            log: self.log(file)?,
            node: self.node(&file.node, places)?,
            health: self.health(&file.health)?,
            hosts: self.hosts(&file.hosts)?,
        };
        self.sockets_differ(&config)?;
        let mut names = config.pools.iter().map(|pool| &pool.name);
        let is_direct = config.direct_pools.iter().any(|pool| pool.name == file.default_pool);
        if !is_direct && !names.any(|name| *name == file.default_pool) {
            let allowed = "the name of a pool in this file";
            return Err(self.refuse(&["default_pool"], &file.default_pool, allowed));
        }
        Ok(config)
    }

    fn health(&self, health: &Health) -> Result<HealthConfig, Error> {
        Ok(HealthConfig {
            enabled: health.enabled,
            interval: self.duration(&["health", "interval"], &health.interval, 1, 300)?,
            slow_io: self.duration(&["health", "slow_io"], &health.slow_io, 0, 60)?,
            hold: self.duration(&["health", "hold"], &health.hold, 0, 3600)?,
            errors_hold: self.duration(
                &["health", "errors_hold"],
                &health.errors_hold,
                0,
                7 * 24 * 3600,
            )?,
        })
    }

    fn hosts(&self, hosts: &Hosts) -> Result<HostsConfig, Error> {
        let key = |name| ["hosts", name];
        let files = [("certificate", &hosts.certificate), ("key", &hosts.key), ("ca", &hosts.ca)];
        let given = files.iter().filter(|(_, path)| !path.is_empty()).count();
        if let Some((name, path)) = files.iter().find(|(_, path)| path.is_empty() && given > 0) {
            let allowed = "given, as hosts.certificate, hosts.key and hosts.ca belong together";
            return Err(self.refuse(&key(name), path, allowed));
        }
        let path = |(name, path): (&str, &String)| self.absolute(&["hosts", name], path);
        let tls = match given {
            0 => None,
            _ => Some(HostsTls {
                certificate: path(files[0])?,
                key: path(files[1])?,
                ca: path(files[2])?,
            }),
        };
        let listen = match hosts.listen.as_str() {
            "" => None,
            text => Some(self.address(&key("listen"), text)?),
        };
        if tls.is_none() && listen.is_some_and(|address| !address.ip().is_loopback()) {
            let allowed = "an address of this machine, as hosts.certificate is not given";
            return Err(self.refuse(&key("listen"), &hosts.listen, allowed));
        }
        let address = hosts.address.clone();
        let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port > 0);
        let is_whole = |(host, port): (&str, &str)| !host.is_empty() && is_port(port);
        if !address.is_empty() && !address.rsplit_once(':').is_some_and(is_whole) {
            return Err(self.refuse(&key("address"), &address, "HOST:PORT"));
        }
        let config = HostsConfig { listen, address, tls };
        let is_anywhere = listen.is_some_and(|at| at.ip().is_unspecified() || at.port() == 0);
        if is_anywhere && config.address.is_empty() {
            let allowed = "given, as hosts.listen does not say where other hosts find this one";
            return Err(self.refuse(&key("address"), "", allowed));
        }
        Ok(config)
    }

    fn node(&self, node: &Node, places: &Places) -> Result<NodeConfig, Error> {
        let id = match node.id.as_str() {
            "" => NodeId::of_host(),
            text => {
                let allowed = "a UUID that is not all zeroes, as `uuidgen` prints it";
                let id = NodeId::parse(text);
                Some(id.ok_or_else(|| self.refuse(&["node", "id"], text, allowed))?)
            }
        };
        let timeout = &node.hook_timeout;
        let folder = self.path.and_then(Path::parent).filter(|path| !path.as_os_str().is_empty());
        Ok(NodeConfig {
            id,
            hook_timeout: self.duration(&["node", "hook_timeout"], timeout, 1, 3600)?,
            hooks_dir: folder.unwrap_or(&places.config_dir).join("hooks"),
        })
    }

    fn workers(&self, workers: &Workers) -> Result<WorkersConfig, Error> {
        let most = i64::try_from(MAX_WORKERS).unwrap_or(1);
        let buffer = &workers.buffer_size;
        let buffer_bytes = self.size(&["workers", "buffer_size"], buffer, (4 << 20, 1 << 30))?;
        Ok(WorkersConfig {
            count: self.count(&["workers", "count"], workers.count, (1, most))?,
            buffer_bytes: usize::try_from(buffer_bytes).unwrap_or(usize::MAX),
        })
    }

    fn ublk(&self, ublk: &Ublk) -> Result<UblkConfig, Error> {
        let is_auto = |name, text: &str| match text {
            "auto" => Ok(true),
            "off" => Ok(false),
            other => Err(self.refuse(&["ublk", name], other, "auto or off")),
        };
        let small = |count: usize| u16::try_from(count).unwrap_or(u16::MAX);
        let most = i64::try_from(MAX_WORKERS).unwrap_or(1);
        let max_io = self.size(&["ublk", "max_io"], &ublk.max_io, (4 << 10, 1 << 20))?;
        if !max_io.is_multiple_of(4096) {
            let allowed = "a multiple of 4K";
            return Err(self.refuse(&["ublk", "max_io"], &ublk.max_io, allowed));
        }
        Ok(UblkConfig {
            enabled: is_auto("enabled", &ublk.enabled)?,
            queues: small(self.count(&["ublk", "queues"], ublk.queues, (1, most))?),
            depth: small(self.count(&["ublk", "depth"], ublk.depth, (0, MAX_UBLK_DEPTH))?),
            max_bytes: u32::try_from(max_io).unwrap_or(128 << 10),
            zero_copy: is_auto("zero_copy", &ublk.zero_copy)?,
            ready: self.count(&["ublk", "ready"], ublk.ready, (0, MAX_READY_DEVICES))?,
            mount_namespace: ublk.mount_namespace,
        })
    }

    fn nbd(&self, file: &File) -> Result<NbdConfig, Error> {
        let tls = &file.nbd.tls;
        let given = |text: &str| !text.is_empty();
        for (name, value, other) in
            [("key", &tls.key, &tls.certificate), ("certificate", &tls.certificate, &tls.key)]
        {
            if given(other) && !given(value) {
                let allowed = "a file, as certificate and key belong together";
                return Err(self.refuse(&["nbd", "tls", name], value, allowed));
            }
        }
        if given(&tls.client_ca) && !given(&tls.certificate) {
            let allowed = "left out, as there is no certificate of the server";
            return Err(self.refuse(&["nbd", "tls", "client_ca"], &tls.client_ca, allowed));
        }
        let path = |name, text: &str| self.absolute(&["nbd", "tls", name], text);
        let tls = if given(&tls.certificate) {
            let ca = given(&tls.client_ca).then(|| path("client_ca", &tls.client_ca));
            Some(TlsConfig {
                certificate: path("certificate", &tls.certificate)?,
                key: path("key", &tls.key)?,
                client_ca: ca.transpose()?,
            })
        } else {
            None
        };
        // Of each listener that says nothing else.
        let most = (1, MAX_CONNECTIONS);
        self.count(&["nbd", "max_connections"], file.nbd.max_connections, most)?;
        let listener = |(index, listener): (usize, &Listener)| {
            self.listener(&index.to_string(), listener, tls.is_some())
        };
        let listeners: Result<Vec<_>, _> =
            file.nbd.listeners.iter().enumerate().map(listener).collect();
        let timeout = &file.nbd.handshake_timeout;
        let nbd = &file.nbd;
        let (max_requests, max_handshakes) = (nbd.max_requests, nbd.max_handshakes);
        let (send, receive, idle) = (&nbd.send_timeout, &nbd.receive_timeout, &nbd.idle_timeout);
        let idle = self.duration(&["nbd", "idle_timeout"], idle, 0, 7 * 24 * 3600)?;
        let per_peer = nbd.max_connections_per_peer;
        Ok(NbdConfig {
            listeners: listeners?,
            handshake_timeout: self.duration(&["nbd", "handshake_timeout"], timeout, 1, 600)?,
            max_handshakes: self.count(&["nbd", "max_handshakes"], max_handshakes, (1, 4096))?,
            send_timeout: self.duration(&["nbd", "send_timeout"], send, 1, 3600)?,
            receive_timeout: self.duration(&["nbd", "receive_timeout"], receive, 1, 3600)?,
            idle_timeout: (!idle.is_zero()).then_some(idle),
            max_connections_per_peer: self.count(
                &["nbd", "max_connections_per_peer"],
                per_peer,
                most,
            )?,
            max_requests: self.count(&["nbd", "max_requests"], max_requests, (1, 1024))?,
            tls,
        })
    }

    fn listener(
        &self,
        index: &str,
        listener: &Listener,
        has_certificate: bool,
    ) -> Result<ListenerConfig, Error> {
        let key = |name| ["nbd", "listener", index, name];
        let address = match (listener.unix.as_str(), listener.tcp.as_str()) {
            (path, "") if !path.is_empty() => ListenAddress::Unix {
                path: self.socket(&key("unix"), path)?,
                mode: self.mode(&key("mode"), &listener.mode)?,
            },
            ("", address) if !address.is_empty() => {
                ListenAddress::Tcp(self.address(&key("tcp"), address)?)
            }
            (path, _) => {
                let allowed = "given, or else tcp, and not both";
                return Err(self.refuse(&key("unix"), path, allowed));
            }
        };
        let tls = match listener.tls.as_str() {
            "off" => TlsUse::Off,
            "allowed" if has_certificate => TlsUse::Allowed,
            "required" if has_certificate => TlsUse::Required,
            "allowed" | "required" => {
                let allowed = "off, as nbd.tls.certificate is not given";
                return Err(self.refuse(&key("tls"), &listener.tls, allowed));
            }
            other => return Err(self.refuse(&key("tls"), other, "off, allowed or required")),
        };
        let max = listener.max_connections;
        let max_connections = self.count(&key("max_connections"), max, (1, MAX_CONNECTIONS))?;
        Ok(ListenerConfig { address, tls, max_connections })
    }

    fn log(&self, file: &File) -> Result<LogConfig, Error> {
        let json = match file.log.format.as_str() {
            "text" => false,
            "json" => true,
            other => return Err(self.refuse(&["log", "format"], other, "text or json")),
        };
        let filter = file.log.level.clone();
        let is_wrong = filter.is_empty() || filter.split(',').any(is_no_directive);
        if is_wrong || tracing_subscriber::EnvFilter::try_new(&filter).is_err() {
            let allowed = "error, warn, info, debug, trace, off, or directives like \
                           info,blockd=debug";
            return Err(self.refuse(&["log", "level"], filter, allowed));
        }
        Ok(LogConfig { json, filter })
    }

    fn metrics(&self, address: &str) -> Result<Option<SocketAddr>, Error> {
        if address.is_empty() {
            return Ok(None);
        }
        // Without a host the address is the loopback; metrics for other hosts need an address.
        if let Ok(port) = address.parse() {
            return Ok(Some(SocketAddr::from((Ipv4Addr::LOCALHOST, port))));
        }
        self.address(&["metrics", "address"], address).map(Some)
    }
}

/// Whether a part of a log filter is a word that is no level. The filter takes such a word for a
/// module of which everything is logged, so that a level with a typing error would log nothing.
fn is_no_directive(part: &str) -> bool {
    let part = part.trim();
    let is_word = !part.contains(['=', '[', ':']) && !part.starts_with("blockd");
    is_word && part.parse::<tracing_subscriber::filter::LevelFilter>().is_err()
}
