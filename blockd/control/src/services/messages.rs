//! Between the crate's types and the messages of the control API.

use std::collections::BTreeMap;

use blockd_api::v1;
use blockd_engine::pool::{PoolHandle, SpaceState, Use, VolumeId};
use blockd_mapper::engine::VolumeSummary;
use blockd_mapper::format::catalogue::VolumeKind;
use blockd_media::error::Error;
use blockd_media::pool::{Medium, PmemInfo};
use blockd_media::units::{GIB, from_wire, hex, to_wire, to_wire_gb};
use blockd_media::{DeviceInfo, DeviceKind, Durability};
use blockd_serve::ublk::control::DeviceView;

use super::attachments::Record;
use super::devices::{AttachWish, FrontEnd};
use super::evacuation::evacuation;
use super::folds::folds;
use super::rebalancing::rebalance;
use super::{Control, Known, labels, pool_error, settings, volumes};
use crate::direct::{PoolView, State, Usage, VolumeView};
use crate::pool;

/// Runs of extents in one message: some 100 KiB.
const RUNS_IN_MESSAGE: usize = 2048;

/// The size that a request gives, which can't be nothing.
pub(super) fn size_of_request(size_bytes: i64, size_gb: u64) -> Result<u64, Error> {
    match from_wire(size_bytes, size_gb)? {
        0 => Err(Error::invalid("size_bytes", 0, "more than 0")),
        bytes => Ok(bytes),
    }
}

pub(super) const fn kind(kind: VolumeKind) -> v1::VolumeKind {
    match kind {
        VolumeKind::Volume => v1::VolumeKind::Volume,
        VolumeKind::Snapshot => v1::VolumeKind::Snapshot,
    }
}

/// The durability of answered writes: that of the least durable device.
fn of_devices(pool: &PoolHandle) -> Durability {
    Durability::worst(pool.devices().iter().map(DeviceInfo::durability))
}

/// The attachment that a request asks for.
pub(super) fn wish(asked: &v1::AttachVolumeRequest) -> AttachWish {
    AttachWish {
        read_only: asked.read_only,
        front_end: front_end(asked.front_end()),
        queues: asked.queue_count,
        depth: asked.queue_depth,
    }
}

pub(super) const fn front_end(asked: v1::FrontEnd) -> Option<FrontEnd> {
    match asked {
        v1::FrontEnd::Unspecified => None,
        v1::FrontEnd::Ublk => Some(FrontEnd::Ublk),
        v1::FrontEnd::Nbd => Some(FrontEnd::Nbd),
    }
}

pub(super) fn count(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[expect(deprecated, reason = "older clients read size_gb")]
pub(super) fn device(info: &DeviceInfo) -> v1::Device {
    v1::Device {
        path: info.path.display().to_string(),
        size_gb: to_wire_gb(info.size),
        kind: match info.kind {
            DeviceKind::File => v1::DeviceKind::File,
            DeviceKind::Disk => v1::DeviceKind::Disk,
            DeviceKind::Memory => v1::DeviceKind::Memory,
            DeviceKind::Pmem(_) => v1::DeviceKind::Pmem,
        }
        .into(),
        block_size: info.block_size,
        direct: info.direct,
        size_bytes: to_wire(info.size),
        sparse: info.sparse,
        discard: info.sparse || info.kind == DeviceKind::Disk,
        pmem: info.pmem.as_ref().map(|pmem| pmem_device(pmem, durability(info.durability()))),
    }
}

fn pmem_device(info: &PmemInfo, level: v1::Durability) -> v1::PmemDevice {
    let atomicity = match info.options.whole_blocks {
        true => v1::Atomicity::Block,
        false => v1::Atomicity::None,
    };
    v1::PmemDevice {
        medium: match info.medium {
            Medium::DevDax => v1::PmemMedium::Devdax,
            Medium::DaxFile => v1::PmemMedium::DaxFile,
            Medium::File => v1::PmemMedium::File,
        }
        .into(),
        region: region(info),
        numa_node: numa_node(info.site.numa_node),
        durability: level.into(),
        atomicity: atomicity.into(),
        persistence_domain: info.site.persistence_domain.clone(),
        bad_bytes: to_wire(info.bad_bytes),
        erases: info.options.erase,
    }
}

fn region(info: &PmemInfo) -> String {
    match info.site.region {
        0 => String::new(),
        cookie => format!("{cookie:#x}"),
    }
}

fn numa_node(node: Option<u32>) -> i32 {
    node.and_then(|node| i32::try_from(node).ok()).unwrap_or(-1)
}

pub(super) fn durability(level: Durability) -> v1::Durability {
    match level {
        Durability::PowerSafe => v1::Durability::PowerSafe,
        Durability::RestartSafe => v1::Durability::RestartSafe,
        Durability::Volatile => v1::Durability::Volatile,
    }
}

const fn state(state: SpaceState) -> v1::SpaceState {
    match state {
        SpaceState::Normal => v1::SpaceState::Normal,
        SpaceState::Low => v1::SpaceState::Low,
        SpaceState::VeryLow => v1::SpaceState::VeryLow,
        SpaceState::Full => v1::SpaceState::Full,
    }
}

impl Known {
    /// The state of a pool that is not open.
    pub(super) fn wire_state(&self) -> v1::PoolState {
        match self.is_closed() {
            true => v1::PoolState::Closed,
            false => v1::PoolState::Failed,
        }
    }
}

impl Control {
    /// Volumes of a pool with what the daemon knows of them: origins by name, attachments, clients.
    pub(super) fn describe_volumes(
        &self,
        pool: &PoolHandle,
        volumes: Vec<VolumeSummary>,
    ) -> Vec<v1::Volume> {
        let mut clients: BTreeMap<VolumeId, u32> = BTreeMap::new();
        if let [one] = volumes.as_slice() {
            clients.insert(one.id, count(self.connections_of(pool, one.id)));
        } else {
            for one in self.0.data_path.connections() {
                if one.pool == pool.id() {
                    *clients.entry(one.volume).or_default() += 1;
                }
            }
        }
        let level = durability(of_devices(pool));
        let describe = |volume: VolumeSummary| v1::Volume {
            durability: level.into(),
            origin: pool.mapper().name_of(volume.origin).unwrap_or_default(),
            connections: clients.get(&volume.id).copied().unwrap_or(0),
            ..self.describe_volume(pool, volume)
        };
        volumes.into_iter().map(describe).collect()
    }

    /// How clients reach an attached volume: its device, or its URIs of NBD.
    fn describe_attachment(
        &self,
        record: &Record,
        pool: &[u8; 16],
    ) -> (v1::FrontEnd, DeviceView, Vec<String>) {
        if record.ublk.is_some() {
            let device = self.described_device(pool, VolumeId(record.id));
            return (v1::FrontEnd::Ublk, device, Vec::new());
        }
        let export = self.export_name(&record.pool, &record.volume);
        let uris = self.0.nbd.read().iter().map(|address| address.uri(&export)).collect();
        (v1::FrontEnd::Nbd, DeviceView::default(), uris)
    }

    /// A volume that is attached here while its cell is on another host: what clients see of it.
    pub(super) fn describe_on_standby(&self, record: &Record) -> v1::Volume {
        let standby = record.standby.as_ref();
        let id = super::standby::pool_id(record).unwrap_or_default();
        let (front_end, device, nbd_uris) = self.describe_attachment(record, &id);
        let (device_major, device_minor) = device.numbers.unwrap_or_default();
        v1::Volume {
            name: record.volume.clone(),
            pool: record.pool.clone(),
            id: record.id,
            kind: v1::VolumeKind::Volume.into(),
            size_bytes: to_wire(standby.map_or(0, |it| it.size)),
            block_size: standby.map_or(0, |it| it.block_size),
            attached: true,
            read_only: record.read_only,
            front_end: front_end.into(),
            device_path: device.path.map(|path| path.display().to_string()).unwrap_or_default(),
            device_major,
            device_minor,
            device_problem: device.problem.unwrap_or_default(),
            nbd_uri: nbd_uris.first().cloned().unwrap_or_default(),
            nbd_uris,
            write_cache: standby.is_some_and(|it| it.write_cache),
            standby: true,
            ..Default::default()
        }
    }

    #[expect(deprecated, reason = "older clients read size_gb")]
    fn describe_volume(&self, pool: &PoolHandle, volume: VolumeSummary) -> v1::Volume {
        let attachment = self.0.attachments.get(pool.name(), &volume.name);
        let attachment = attachment.filter(|present| present.record.is_of(pool, volume.id));
        let (front_end, device, nbd_uris) = attachment
            .as_ref()
            .map(|present| self.describe_attachment(&present.record, &pool.id()))
            .unwrap_or_default();
        let (device_major, device_minor) = device.numbers.unwrap_or_default();
        let is_snapshot = volume.kind == VolumeKind::Snapshot;
        let exclusive = volume.exclusive.unwrap_or(0);
        v1::Volume {
            pool: pool.name().to_owned(),
            id: volume.id.0,
            kind: kind(volume.kind).into(),
            size_gb: to_wire_gb(volume.size),
            size_bytes: to_wire(volume.size),
            block_size: volume.block_size,
            attached: attachment.is_some(),
            read_only: is_snapshot
                || pool.is_read_only()
                || attachment.is_some_and(|present| present.record.read_only),
            front_end: front_end.into(),
            device_path: device.path.map(|path| path.display().to_string()).unwrap_or_default(),
            device_major,
            device_minor,
            device_problem: device.problem.unwrap_or_default(),
            device_features_asked: device.asked,
            device_features_granted: device.granted,
            queue_count: device.queues.into(),
            queue_depth: device.depth.into(),
            zero_copy: device.zero_copy,
            nbd_uri: nbd_uris.first().cloned().unwrap_or_default(),
            nbd_uris,
            mapped_bytes: to_wire(volume.mapped),
            valid_bytes: to_wire(volume.valid),
            exclusive_bytes: to_wire(exclusive),
            shared_bytes: to_wire(volume.mapped.saturating_sub(exclusive)),
            reserved_bytes: to_wire(volume.reserved),
            set_aside_free_bytes: to_wire(volume.unmet),
            made_unix_ms: to_wire(volume.made.0),
            settings: Some(settings::to_message(&volume.settings)),
            pinned_to: pool
                .pinned_to(volume.settings.placement)
                .map_or_else(String::new, |path| path.display().to_string()),
            labels: labels::to_message(&volume.labels),
            out_of_space: volume.out_of_space,
            origin_id: volume.origin.0,
            family_id: volume.lineage.0,
            state: v1::VolumeState::Ready.into(),
            write_cache: !pool.is_write_through(),
            usage: match pool.is_pmem() {
                true => v1::PmemUsage::FileIo,
                false => v1::PmemUsage::Unspecified,
            }
            .into(),
            charged_bytes: if pool.is_pmem() { to_wire(volume.size) } else { 0 },
            erase_after: pool.erases(),
            name: volume.name,
            ..v1::Volume::default()
        }
    }

    /// A pool with its space; one that has failed without.
    pub(super) async fn describe_pool(&self, known: &Known) -> Result<v1::Pool, Error> {
        let name = known.config.name.clone();
        let is_default = name == self.0.options.default_pool;
        let failure = known.failure();
        let (Ok(handle), None) = (&known.state, &failure) else {
            return Ok(v1::Pool {
                name,
                is_default,
                state: known.wire_state().into(),
                failure: failure.unwrap_or_default(),
                extent_size: known.config.extent_size,
                backing_free_bytes: -1,
                seconds_to_full: -1,
                ..v1::Pool::default()
            });
        };
        self.describe_open_pool(name, is_default, handle).await
    }

    #[expect(deprecated, reason = "older clients read size_gb and free_gb")]
    async fn describe_open_pool(
        &self,
        name: String,
        is_default: bool,
        handle: &PoolHandle,
    ) -> Result<v1::Pool, Error> {
        let space = pool::space(handle).await.map_err(|error| pool_error(&name, error))?;
        let now = space.now;
        let folded = handle.folds(false).await.map_err(|error| pool_error(&name, error))?;
        let leaving = handle.evacuation(None).await.map_err(|error| pool_error(&name, error))?;
        let rebalanced = handle.rebalance().await.map_err(|error| pool_error(&name, error))?;
        let mut blocked_writes = 0_u64;
        self.data_path().each_volume(&mut |one| {
            if one.blocked.get() > 0 && one.pool.is(&name) {
                blocked_writes = blocked_writes.saturating_add(one.blocked.get());
            }
        });
        let sums = handle.mapper().sums();
        let devices = handle.devices();
        let pmem: Vec<PmemInfo> = devices.iter().filter_map(|one| one.pmem.clone()).collect();
        let step = volumes::step(handle);
        let id = hex(&handle.id());
        Ok(v1::Pool {
            name,
            size_gb: to_wire_gb(space.pool.total),
            free_gb: space.free() / GIB,
            is_default,
            id,
            size_bytes: to_wire(space.pool.total),
            free_bytes: to_wire(space.free()),
            state: v1::PoolState::Open.into(),
            failure: String::new(),
            extent_size: u32::try_from(handle.extent_size()).unwrap_or(u32::MAX),
            mapped_bytes: to_wire(space.pool.mapped),
            reserved_bytes: to_wire(space.pool.reserved),
            pending_bytes: to_wire(space.pool.pending),
            metadata_bytes: to_wire(space.pool.metadata),
            metadata_free_bytes: to_wire(space.pool.metadata_free),
            backing_free_bytes: space.backing_free.map_or(-1, to_wire),
            promised_bytes: to_wire(sums.promised),
            volume_count: count(sums.count),
            snapshot_count: count(sums.snapshots),
            releasing_count: u32::try_from(space.releasing_volumes).unwrap_or(u32::MAX),
            releasing_bytes: to_wire(space.releasing),
            devices: handle.devices().iter().map(device).collect(),
            node_objects: self.node_objects(&space),
            space_state: state(now.state).into(),
            low_bytes: to_wire(now.low),
            very_low_bytes: to_wire(now.very_low),
            write_rate_bytes: to_wire(now.rate),
            seconds_to_full: now.seconds_to_full.map_or(-1, to_wire),
            set_aside_bytes: to_wire(sums.set_aside),
            blocked_writes,
            kind: v1::PoolKind::Mapped.into(),
            durability: durability(of_devices(handle)).into(),
            write_cache: !handle.is_write_through(),
            largest_volume_bytes: to_wire(space.free() / step * step),
            volume_step_bytes: to_wire(if handle.is_pmem() { step } else { 0 }),
            minimum_volume_bytes: to_wire(if handle.is_pmem() { step } else { 0 }),
            scrubbing_bytes: if handle.erases() { to_wire(space.pool.pending) } else { 0 },
            folds: Some(folds(&folded)),
            read_cache: Some(read_cache(handle)),
            evacuation: evacuation(handle, &leaving),
            rebalance: rebalance(handle, &rebalanced),
            region: pmem.first().map(region).unwrap_or_default(),
            numa_node: numa_node(pmem.first().and_then(|info| info.site.numa_node)),
        })
    }

    /// The uses of a pool's extents, in messages of bounded size.
    pub(super) async fn describe_extents(
        &self,
        handle: &PoolHandle,
    ) -> Result<Vec<v1::PoolExtentsResponse>, Error> {
        let names: BTreeMap<VolumeId, String> =
            handle.mapper().summaries().into_iter().map(|one| (one.id, one.name)).collect();
        let runs = pool::extents(handle).await.map_err(|error| pool_error(handle.name(), error))?;
        let total_count = runs.iter().map(|run| run.count).sum();
        let extent_size = u32::try_from(handle.extent_size()).unwrap_or(u32::MAX);
        let run = |run: &blockd_engine::pool::ExtentRun| {
            let (kind, volume) = match run.usage {
                None => (v1::ExtentKind::Free, None),
                Some(Use::Metadata) => (v1::ExtentKind::Metadata, None),
                Some(Use::Shared) => (v1::ExtentKind::Shared, None),
                Some(Use::Mapped(volume)) => (v1::ExtentKind::Mapped, Some(volume)),
                Some(Use::Reserved(volume)) => (v1::ExtentKind::Reserved, Some(volume)),
            };
            v1::ExtentRun {
                device: run.device.into(),
                first_index: run.first,
                count: run.count,
                kind: kind.into(),
                volume: volume.and_then(|id| names.get(&id).cloned()).unwrap_or_default(),
            }
        };
        let message = |runs: &[blockd_engine::pool::ExtentRun]| v1::PoolExtentsResponse {
            extent_size,
            total_count,
            runs: runs.iter().map(run).collect(),
        };
        if runs.is_empty() {
            return Ok(vec![message(&[])]);
        }
        Ok(runs.chunks(RUNS_IN_MESSAGE).map(message).collect())
    }
}

/// A pool whose volumes are namespaces.
#[expect(deprecated, reason = "older clients read size_gb and free_gb")]
pub(super) fn pool_of_namespaces(view: PoolView, default: &str) -> v1::Pool {
    let is_default = view.name == default;
    let id = hex(&view.id);
    let common = v1::Pool {
        name: view.name,
        is_default,
        kind: v1::PoolKind::PmemDirect.into(),
        region: view.region,
        backing_free_bytes: -1,
        seconds_to_full: -1,
        numa_node: -1,
        promised_bytes: to_wire(view.promised),
        volume_count: count(view.volumes),
        scrubbing_bytes: to_wire(view.scrubbing),
        mapped_bytes: to_wire(view.charged),
        ..v1::Pool::default()
    };
    let (Some(space), None) = (view.space, &view.failure) else {
        let failure = view.failure.unwrap_or_default();
        return v1::Pool { state: v1::PoolState::Failed.into(), failure, ..common };
    };
    v1::Pool {
        id,
        state: v1::PoolState::Open.into(),
        size_gb: to_wire_gb(space.total),
        size_bytes: to_wire(space.total),
        free_gb: space.available / GIB,
        free_bytes: to_wire(space.available),
        durability: durability(view.durability).into(),
        // The kernel's block devices say that they have one.
        write_cache: true,
        largest_volume_bytes: to_wire(space.largest_volume),
        volume_step_bytes: to_wire(space.step),
        minimum_volume_bytes: to_wire(space.smallest_volume),
        numa_node: numa_node(space.numa_node),
        space_state: v1::SpaceState::Normal.into(),
        ..common
    }
}

/// A volume that is a namespace.
#[expect(deprecated, reason = "older clients read size_gb")]
pub(super) fn namespace(pool: &str, view: VolumeView, level: Durability) -> v1::Volume {
    let path = view.device.as_ref().map(|device| device.path()).unwrap_or_default();
    let (device_major, device_minor) = view.device.map(|one| one.numbers).unwrap_or_default();
    let is_mapped = view.usage == Usage::AppDirect;
    v1::Volume {
        name: view.name,
        pool: pool.to_owned(),
        id: view.id,
        kind: v1::VolumeKind::Volume.into(),
        size_gb: to_wire_gb(view.usable),
        size_bytes: to_wire(view.usable),
        block_size: if is_mapped { 512 } else { 4096 },
        mapped_bytes: to_wire(view.charged),
        valid_bytes: to_wire(view.usable),
        // Of one that is overwritten, nothing is given back yet.
        exclusive_bytes: to_wire(if view.state == State::Scrubbing { 0 } else { view.charged }),
        device_path: path,
        device_major,
        device_minor,
        device_problem: view.problem.unwrap_or_default(),
        made_unix_ms: view.made_unix_ms,
        usage: if is_mapped { v1::PmemUsage::AppDirect } else { v1::PmemUsage::FileIo }.into(),
        charged_bytes: to_wire(view.charged),
        erase_after: view.erase_after,
        durability: durability(level).into(),
        state: match view.state {
            State::Ready => v1::VolumeState::Ready,
            State::Creating => v1::VolumeState::Creating,
            State::Scrubbing => v1::VolumeState::Scrubbing,
            State::Deleting => v1::VolumeState::Deleting,
        }
        .into(),
        scrubbed_bytes: to_wire(view.scrubbed),
        dax: is_mapped,
        write_cache: is_mapped,
        settings: Some(v1::VolumeSettings::default()),
        ..v1::Volume::default()
    }
}
/// Figures of a pool's cache of shared blocks as a client gets them.
fn read_cache(handle: &PoolHandle) -> v1::PoolReadCache {
    let status = handle.mapper().read_cache_status();
    v1::PoolReadCache {
        limit_bytes: to_wire(status.limit),
        held_bytes: to_wire(status.bytes),
        hits: status.hits,
        misses: status.misses,
        evictions: status.evictions,
        dropped: status.dropped,
    }
}
