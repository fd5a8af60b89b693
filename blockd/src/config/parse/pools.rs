//! The pools of the configuration, and rules among them.

use std::path::PathBuf;

use blockd_control::config::{DeviceConfig, DeviceKind, PoolConfig, SizeWish, SpaceConfig};
use blockd_mapper::geometry::MAX_DEVICES;
use blockd_mapper::space::{Mark, Marks};
use blockd_media::error::Error;
use blockd_media::names::check_new_name;
use blockd_media::pool::{PmemOptions, path_of_namespace};
use blockd_media::units::{MAX_SIZE, parse_size};
use blockd_pmem::platform::RegionKey;

use super::super::direct::DIRECT;
use super::super::file::{Extend, File, Pool, Space};
use super::values::percent_of_ratio;
use super::{Key, Source};

/// The least rate of folds, in bytes a second: with less, folding 100 GiB would take more than a
/// day.
const MIN_FOLD_RATE: u64 = 1 << 20;
/// The largest: more than any storage copies in a second.
const MAX_FOLD_RATE: u64 = 64 << 30;

/// The smallest cache of shared blocks: a part of it has a MiB for the extents that fall on it.
const MIN_READ_CACHE: u64 = 16 << 20;
/// The largest: memory of a large host.
const MAX_READ_CACHE: u64 = 64 << 30;

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

impl Source<'_> {
    pub(super) fn pool(&self, index: &str, pool: &Pool) -> Result<PoolConfig, Error> {
        let key = |name| ["pool", index, name];
        if let Err(allowed) = check_new_name(&pool.name) {
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
            composite: pool.composite,
            lock_wait: self.duration(&key("lock_wait"), &pool.lock_wait, 0, 3600)?,
            claim_wait: self.duration(&key("claim_wait"), &pool.claim_wait, 2, 60)?,
            accept_loss: pool.accept_loss,
            commit_interval: self.duration(&key("commit_interval"), interval, 0, 60)?,
            ring_records: records as u64,
            sparing: false,
            extend_socket: self.extend_socket(index, &pool.extend)?,
            space: SpaceConfig {
                read_cache: self.read_cache(index, pool, kind)?,
                ..self.space(index, &pool.space)?
            },
        })
    }

    /// Bytes of a pool's cache of shared blocks.
    fn read_cache(&self, index: &str, pool: &Pool, kind: DeviceKind) -> Result<u64, Error> {
        let (key, given) = (["pool", index, "read_cache"], &pool.read_cache);
        let bytes = self.size(&key, given, (0, MAX_READ_CACHE))?;
        if (1..MIN_READ_CACHE).contains(&bytes) {
            let allowed = "0 for no cache, or a size from 16M to 64G, like \"256M\"";
            return Err(self.refuse(&key, given, allowed));
        }
        if bytes > 0 && kind.is_memory() {
            let allowed = "0 for a pool in memory: a cache would hold the same bytes twice";
            return Err(self.refuse(&key, given, allowed));
        }
        Ok(bytes)
    }

    /// The kind of a pool's devices. Rejects keys of persistent memory for other kinds.
    pub(super) fn kind(&self, index: &str, pool: &Pool) -> Result<DeviceKind, Error> {
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
        let fold_rate = self.size(&key("fold_rate"), &space.fold_rate, (0, MAX_FOLD_RATE))?;
        if (1..MIN_FOLD_RATE).contains(&fold_rate) {
            let allowed = "0 for no folds, or a size from 1M to 64G, like \"64M\"";
            return Err(self.refuse(&key("fold_rate"), &space.fold_rate, allowed));
        }
        Ok(SpaceConfig {
            read_cache: 0,
            fold_rate,
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

    pub(super) fn names_differ(&self, file: &File) -> Result<(), Error> {
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
    pub(super) fn regions_differ(&self, file: &File) -> Result<(), Error> {
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

    pub(super) fn pools_differ(&self, pools: &[PoolConfig]) -> Result<(), Error> {
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
}
