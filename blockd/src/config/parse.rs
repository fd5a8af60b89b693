//! From the file's text to checked values. Every error names file, line, key, value and what is
//! allowed.

use std::fmt::Display;
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockd_control::config::{
    DeviceConfig, DeviceKind, HealthConfig, MAX_UBLK_DEPTH, NodeConfig, PoolConfig, SizeWish,
    SpaceConfig,
};
use blockd_control::node::NodeId;
use blockd_mapper::geometry::MAX_DEVICES;
use blockd_mapper::space::{Mark, Marks};
use blockd_media::error::Error;
use blockd_media::names::{check_name, check_socket_path};
use blockd_media::place::Places;
use blockd_media::pool::{MAX_WORKERS, PmemOptions, path_of_namespace};
use blockd_media::units::{MAX_SIZE, exact, parse_size};
use blockd_pmem::platform::RegionKey;
use toml::de::{DeTable, DeValue};

use super::direct::DIRECT;
use super::file::{Amount, Extend, File, Health, Listener, Node, Pool, Space, Ublk, Workers};
use super::{
    Config, ListenAddress, ListenerConfig, LogConfig, NbdConfig, TlsConfig, TlsUse, UblkConfig,
    WorkersConfig,
};

/// Connections of a listener. Each takes a descriptor, three with TLS.
const MAX_CONNECTIONS: i64 = 65_536;

/// Reads and checks a file.
pub(super) fn parse(text: &str, path: Option<&Path>, places: &Places) -> Result<Config, Error> {
    let source = Source { text, path };
    let file = source.read()?.completed(places);
    source.check(&file, places)
}

/// The file with everything filled in that was not given.
pub(super) fn complete(text: &str, path: Option<&Path>, places: &Places) -> Result<File, Error> {
    let source = Source { text, path };
    let file = source.read()?.completed(places);
    source.check(&file, places)?;
    Ok(file)
}

/// The text, to find lines in.
pub(super) struct Source<'a> {
    text: &'a str,
    path: Option<&'a Path>,
}

/// A key of the file: tables, and positions in arrays of tables, down to its name.
type Key<'a> = &'a [&'a str];

impl Source<'_> {
    fn read(&self) -> Result<File, Error> {
        toml::from_str(self.text).map_err(|error| {
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
        let mut names = pools.iter().map(|pool| &pool.name);
        let is_direct = direct_pools.iter().any(|pool| pool.name == file.default_pool);
        if !is_direct && !names.any(|name| *name == file.default_pool) {
            let allowed = "the name of a pool in this file";
            return Err(self.refuse(&["default_pool"], &file.default_pool, allowed));
        }
        let template = match pools.first() {
            Some(first) => first.clone(),
            None => self.pool("0", &Pool::template())?,
        };
        let stop_timeout = self.duration(&["stop_timeout"], &file.stop_timeout, 1, 3600)?;
        Ok(Config {
            source: self.path.map(Path::to_path_buf),
            runtime_dir: self.absolute(&["runtime_dir"], &file.runtime_dir)?,
            state_dir: self.absolute(&["state_dir"], &file.state_dir)?,
            control_socket: self.socket(&["control_socket"], &file.control_socket)?,
            stop_timeout,
            pools,
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
        })
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

    fn pool(&self, index: &str, pool: &Pool) -> Result<PoolConfig, Error> {
        let key = |name| ["pool", index, name];
        if let Err(allowed) = check_name(&pool.name) {
            return Err(self.refuse(&key("name"), &pool.name, allowed));
        }
        let kind = self.kind(index, pool)?;
        let size = self.size_wish(&key("size"), &pool.size)?;
        if kind == DeviceKind::Memory && !matches!(size, SizeWish::Bytes(_)) {
            let allowed = "more than 0 bytes for a pool in memory";
            return Err(self.refuse(&key("size"), &pool.size, allowed));
        }
        let extents = (64 << 10, 1 << 20);
        let extent_size = self.size(&key("extent_size"), &pool.extent_size, extents)?;
        if !extent_size.is_power_of_two() {
            let allowed = "a power of two from 64K to 1M";
            return Err(self.refuse(&key("extent_size"), &pool.extent_size, allowed));
        }
        let device = |path| DeviceConfig {
            path,
            kind,
            size,
            preallocate: pool.preallocate,
            direct: pool.direct,
        };
        let region = self.share(index, pool)?;
        let paths = match &region {
            // Which namespaces those are is looked up whenever the pool is opened.
            Some(share) => vec![PathBuf::from(format!("region:{}", share.key))],
            None => self.device_paths(index, pool, kind)?,
        };
        // Spares are there already, and stay as long as they are.
        let spare = |path| DeviceConfig {
            kind: DeviceKind::Auto,
            size: SizeWish::Existing,
            preallocate: false,
            ..device(path)
        };
        let spares = self.spare_paths(index, pool, kind, paths.len())?;
        let interval = &pool.commit_interval;
        let records = pool.ring_records;
        let records = self.count(&key("ring_records"), records, (256, 1 << 24))?;
        Ok(PoolConfig {
            name: pool.name.clone(),
            spares: spares.into_iter().map(spare).collect(),
            devices: paths.into_iter().map(device).collect(),
            region,
            volatile: pool.volatile,
            extent_size: u32::try_from(extent_size).unwrap_or(u32::MAX),
            lock_wait: self.duration(&key("lock_wait"), &pool.lock_wait, 0, 3600)?,
            claim_wait: self.duration(&key("claim_wait"), &pool.claim_wait, 2, 60)?,
            accept_loss: pool.accept_loss,
            commit_interval: self.duration(&key("commit_interval"), interval, 0, 60)?,
            ring_records: records as u64,
            extend_socket: self.extend_socket(index, &pool.extend)?,
            space: self.space(index, &pool.space)?,
        })
    }

    /// The kind of a pool's devices. Rejects keys of persistent memory for other kinds.
    fn kind(&self, index: &str, pool: &Pool) -> Result<DeviceKind, Error> {
        let key = |name| ["pool", index, name];
        let options = PmemOptions {
            power_safe: match pool.persistence.as_str() {
                "auto" => false,
                "power-safe" => true,
                other => return Err(self.refuse(&key("persistence"), other, "auto or power-safe")),
            },
            whole_blocks: match pool.atomicity.as_str() {
                "block" => true,
                "none" => false,
                other => return Err(self.refuse(&key("atomicity"), other, "block or none")),
            },
            erase: pool.erase,
        };
        let kind = match pool.kind.as_str() {
            "auto" => DeviceKind::Auto,
            "file" => DeviceKind::File,
            "disk" => DeviceKind::Disk,
            "memory" => DeviceKind::Memory,
            "pmem" => return Ok(DeviceKind::Pmem(options)),
            other => {
                let allowed = "auto, file, disk, memory, pmem or pmem-direct";
                return Err(self.refuse(&key("kind"), other, allowed));
            }
        };
        let usual = PmemOptions::default();
        for (name, given, differs) in [
            ("persistence", pool.persistence.clone(), options.power_safe != usual.power_safe),
            ("atomicity", pool.atomicity.clone(), options.whole_blocks != usual.whole_blocks),
            ("erase", pool.erase.to_string(), options.erase != usual.erase),
        ] {
            if differs {
                return Err(self.refuse(&key(name), given, "left out unless kind is pmem"));
            }
        }
        Ok(kind)
    }

    fn extend_socket(&self, index: &str, extend: &Extend) -> Result<Option<PathBuf>, Error> {
        let key = ["pool", index, "extend", "socket"];
        let given = !extend.socket.is_empty();
        given.then(|| self.socket(&key, &extend.socket)).transpose()
    }

    fn space(&self, index: &str, space: &Space) -> Result<SpaceConfig, Error> {
        let key = |name| ["pool", index, "space", name];
        let marks = if space.low == "off" && space.very_low == "off" {
            None
        } else {
            let low = self.mark(&key("low"), &space.low)?;
            let very_low = self.mark(&key("very_low"), &space.very_low)?;
            let marks = Marks { low, very_low };
            if marks.check().is_err() {
                let allowed =
                    format!("less than low, which is {}, and in the same unit", space.low);
                return Err(self.refuse(&key("very_low"), &space.very_low, allowed));
            }
            Some(marks)
        };
        let ratio = &space.overprovision_ratio;
        let overprovision_percent = match ratio.as_str() {
            "" => None,
            text => Some(percent_of_ratio(text).ok_or_else(|| {
                let allowed = "a ratio from 1.0 to 1000, like 2.0; or nothing for no limit";
                self.refuse(&key("overprovision_ratio"), text, allowed)
            })?),
        };
        let hook = match space.hook.as_str() {
            "" => None,
            path => Some(self.program(&key("hook"), path)?),
        };
        let timeout = &space.hook_timeout;
        Ok(SpaceConfig {
            marks,
            quantum: self.size(&key("quantum"), &space.quantum, (64 << 10, 64 << 30))?,
            overprovision_percent,
            grow_limit: self.size(&key("grow_limit"), &space.grow_limit, (0, MAX_SIZE))?,
            grow_step: self.size(&key("grow_step"), &space.grow_step, (0, MAX_SIZE))?,
            hook,
            hook_timeout: self.duration(&key("hook_timeout"), timeout, 1, 3600)?,
        })
    }

    /// Seconds of writing, a part of the pool, or bytes.
    fn mark(&self, key: Key<'_>, text: &str) -> Result<Mark, Error> {
        let allowed = "seconds of writing like 20s, a part of the pool like 5%, a size like 10G, \
                       or off for both marks";
        let refused = || self.refuse(key, text, allowed);
        if let Some(digits) = text.strip_suffix('%') {
            let percent = digits.parse().ok().filter(|percent| (1..=100).contains(percent));
            return percent.map(Mark::Percent).ok_or_else(refused);
        }
        if let Some(digits) = text.strip_suffix('s') {
            let seconds = digits.parse().ok().filter(|seconds| (1..=86_400).contains(seconds));
            return seconds.map(Mark::Seconds).ok_or_else(refused);
        }
        parse_size("size", text).map(Mark::Bytes).map_err(|_| refused())
    }

    /// A file that can be run.
    fn program(&self, key: Key<'_>, text: &str) -> Result<PathBuf, Error> {
        let path = self.absolute(key, text)?;
        blockd_control::hook::check(&path).map_err(|error| {
            let allowed = format!("a program that can be run: {error}");
            self.refuse(key, text, allowed)
        })?;
        Ok(path)
    }

    fn device_paths(
        &self,
        index: &str,
        pool: &Pool,
        kind: DeviceKind,
    ) -> Result<Vec<PathBuf>, Error> {
        let key = |name| ["pool", index, name];
        if !pool.namespace.is_empty() {
            return self.namespace(index, pool, kind);
        }
        match (pool.path.as_str(), pool.devices.as_slice()) {
            ("", []) if kind == DeviceKind::Memory => Ok(vec![PathBuf::new()]),
            (path, _) if kind == DeviceKind::Memory => {
                Err(self.refuse(&key("path"), path, "left out for a pool in memory"))
            }
            ("", []) => Err(self.refuse(&key("path"), "", "an absolute path, or else devices")),
            (path, []) => Ok(vec![self.absolute(&key("path"), path)?]),
            ("", paths) if matches!(kind, DeviceKind::Pmem(_)) && paths.len() > 1 => {
                let allowed = "one: a pool in persistent memory lies in one region";
                Err(self.refuse(&key("devices"), paths.len(), allowed))
            }
            ("", paths) => paths.iter().map(|path| self.absolute(&key("devices"), path)).collect(),
            (path, _) => Err(self.refuse(&key("path"), path, "left out beside devices")),
        }
    }

    /// A namespace stands in place of a path.
    fn namespace(&self, index: &str, pool: &Pool, kind: DeviceKind) -> Result<Vec<PathBuf>, Error> {
        let refuse =
            |allowed| Err(self.refuse(&["pool", index, "namespace"], &pool.namespace, allowed));
        if !matches!(kind, DeviceKind::Pmem(_)) {
            return refuse("left out unless kind is pmem");
        }
        if !pool.path.is_empty() || !pool.devices.is_empty() {
            return refuse("left out beside path or devices");
        }
        match pool.namespace.parse() {
            Ok(uuid) => Ok(vec![path_of_namespace(uuid)]),
            Err(allowed) => refuse(allowed),
        }
    }

    fn spare_paths(
        &self,
        index: &str,
        pool: &Pool,
        kind: DeviceKind,
        devices: usize,
    ) -> Result<Vec<PathBuf>, Error> {
        let key = ["pool", index, "spare_devices"];
        let spares = &pool.spare_devices;
        if kind == DeviceKind::Memory && !spares.is_empty() {
            return Err(self.refuse(&key, spares.len(), "left out for a pool in memory"));
        }
        if matches!(kind, DeviceKind::Pmem(_)) && !spares.is_empty() {
            let allowed = "left out for a pool in persistent memory, which lies in one region";
            return Err(self.refuse(&key, spares.len(), allowed));
        }
        if devices + spares.len() > MAX_DEVICES {
            let allowed = "no more than 16 together with the pool's devices";
            return Err(self.refuse(&key, spares.len(), allowed));
        }
        spares.iter().map(|path| self.absolute(&key, path)).collect()
    }

    fn names_differ(&self, file: &File) -> Result<(), Error> {
        let mut names = std::collections::BTreeSet::new();
        for (index, pool) in file.pools.iter().enumerate() {
            if !names.insert(&pool.name) {
                let allowed = "another name: each pool has one of its own";
                let key = ["pool", &index.to_string(), "name"];
                return Err(self.refuse(&key, &pool.name, allowed));
            }
        }
        Ok(())
    }

    /// Checks that no two pools of namespaces use one region: data that one pool leaves behind
    /// would be handed out by the other.
    fn regions_differ(&self, file: &File) -> Result<(), Error> {
        let mut regions = std::collections::BTreeSet::new();
        let direct = file.pools.iter().enumerate().filter(|(_, pool)| pool.kind == DIRECT);
        for (index, pool) in direct {
            if !regions.insert(pool.region.parse::<RegionKey>().ok()) {
                let allowed = "another region: one pool of kind pmem-direct has it already";
                let key = ["pool", &index.to_string(), "region"];
                return Err(self.refuse(&key, &pool.region, allowed));
            }
        }
        Ok(())
    }

    fn pools_differ(&self, pools: &[PoolConfig]) -> Result<(), Error> {
        let mut paths = std::collections::BTreeSet::new();
        let mut sockets = std::collections::BTreeSet::new();
        for (index, pool) in pools.iter().enumerate() {
            let index = index.to_string();
            if let Some(socket) = pool.extend_socket.as_ref().filter(|path| !sockets.insert(*path))
            {
                let allowed = "another path: each pool has a socket of its own";
                let key = ["pool", &index, "extend", "socket"];
                return Err(self.refuse(&key, socket.display(), allowed));
            }
            let all = pool.devices.iter().chain(&pool.spares);
            for device in all.filter(|device| device.kind != DeviceKind::Memory) {
                if !paths.insert(&device.path) {
                    let name = if pool.region.is_some() { "region" } else { "path" };
                    let allowed = format!("another {name}: each device belongs to one pool, once");
                    let value = match &pool.region {
                        Some(share) => share.key.to_string(),
                        None => device.path.display().to_string(),
                    };
                    return Err(self.refuse(&["pool", &index, name], value, allowed));
                }
            }
        }
        Ok(())
    }

    fn log(&self, file: &File) -> Result<LogConfig, Error> {
        let json = match file.log.format.as_str() {
            "text" => false,
            "json" => true,
            other => return Err(self.refuse(&["log", "format"], other, "text or json")),
        };
        let filter = file.log.level.clone();
        if tracing_subscriber::EnvFilter::try_new(&filter).is_err() || filter.is_empty() {
            let allowed = "error, warn, info, debug, trace, or directives like info,blockd=debug";
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

    fn address(&self, key: Key<'_>, text: &str) -> Result<SocketAddr, Error> {
        let allowed = "HOST:PORT with a host that is known here, like 127.0.0.1:10809";
        let mut found = text.to_socket_addrs().map_err(|_| self.refuse(key, text, allowed))?;
        found.next().ok_or_else(|| self.refuse(key, text, allowed))
    }

    fn absolute(&self, key: Key<'_>, text: &str) -> Result<PathBuf, Error> {
        let path = PathBuf::from(text);
        if !path.is_absolute() || text.contains('\0') {
            return Err(self.refuse(key, text, "an absolute path"));
        }
        Ok(path)
    }

    fn socket(&self, key: Key<'_>, text: &str) -> Result<PathBuf, Error> {
        let path = self.absolute(key, text)?;
        check_socket_path(&path).map_err(|allowed| self.refuse(key, text, allowed))?;
        Ok(path)
    }

    fn mode(&self, key: Key<'_>, text: &str) -> Result<u32, Error> {
        let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
        mode.ok_or_else(|| self.refuse(key, text, "permission bits in octal, like 0660"))
    }

    fn count(&self, key: Key<'_>, value: i64, (low, high): (i64, i64)) -> Result<usize, Error> {
        usize::try_from(value)
            .ok()
            .filter(|_| (low..=high).contains(&value))
            .ok_or_else(|| self.refuse(key, value, format!("from {low} to {high}")))
    }

    fn size_wish(&self, key: Key<'_>, amount: &Amount) -> Result<SizeWish, Error> {
        if let Amount::Text(text) = amount
            && let Some(digits) = text.strip_suffix('%')
        {
            let percent = digits.parse().ok().filter(|percent| (1..=99).contains(percent));
            let allowed = "from 1% to 99% of what is free, or a size";
            return percent.map(SizeWish::OfFree).ok_or_else(|| self.refuse(key, text, allowed));
        }
        Ok(match self.size(key, amount, (0, MAX_SIZE))? {
            0 => SizeWish::Existing,
            bytes => SizeWish::Bytes(bytes),
        })
    }

    fn size(&self, key: Key<'_>, amount: &Amount, (low, high): (u64, u64)) -> Result<u64, Error> {
        let bytes = match amount {
            Amount::Bytes(bytes) => u64::try_from(*bytes).ok(),
            Amount::Text(text) => parse_size("size", text).ok(),
        };
        bytes.filter(|bytes| (low..=high).contains(bytes)).ok_or_else(|| {
            let range = match (low, high) {
                (0, MAX_SIZE) => "a size in bytes, or a text like \"10G\"".to_owned(),
                _ => format!("a size from {} to {}, like \"10M\"", exact(low), exact(high)),
            };
            self.refuse(key, amount, range)
        })
    }

    /// A number of `ms`, `s`, `m` or `h`, from `low` to `high` seconds.
    fn duration(&self, key: Key<'_>, text: &str, low: u64, high: u64) -> Result<Duration, Error> {
        let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (digits, unit) = text.split_at(end);
        let factor = match unit {
            "ms" => Some(1),
            "s" => Some(1_000),
            "m" => Some(60_000),
            "h" => Some(3_600_000),
            _ => None,
        };
        let count: Option<u64> = digits.parse().ok();
        count
            .zip(factor)
            .and_then(|(count, factor)| count.checked_mul(factor))
            .map(Duration::from_millis)
            .filter(|found| (low * 1000..=high * 1000).contains(&millis(*found)))
            .ok_or_else(|| {
                let allowed = format!("a time from {low}s to {high}s, like 500ms, 10s or 2m");
                self.refuse(key, text, allowed)
            })
    }
}

/// A namespace that a pool names is no other pool's, whichever region it lies in.
pub fn note_others(pools: &mut [PoolConfig]) {
    let named: Vec<(usize, PathBuf)> = (0..)
        .zip(pools.iter())
        .flat_map(|(at, pool)| pool.devices.iter().map(move |one| (at, one.path.clone())))
        .collect();
    for (at, pool) in pools.iter_mut().enumerate() {
        if let Some(share) = &mut pool.region {
            let others = named.iter().filter(|(of, _)| *of != at);
            share.others = others.map(|(_, path)| path.clone()).collect();
        }
    }
}

/// Hundredths of a ratio like 2, 1.5 or 1.25.
fn percent_of_ratio(text: &str) -> Option<u64> {
    let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !is_number(whole) || !is_number(part) || part.len() > 2 {
        return None;
    }
    let tenths = if part.len() == 1 { 10 } else { 1 };
    let percent = whole.parse::<u64>().ok()?.checked_mul(100)?;
    let percent = percent.checked_add(part.parse::<u64>().ok()? * tenths)?;
    (100..=100_000).contains(&percent).then_some(percent)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
