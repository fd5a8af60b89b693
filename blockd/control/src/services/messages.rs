//! Between the crate's types and the messages of the control API.

use std::collections::BTreeMap;

use blockd_api::v1;
use blockd_engine::pool::{PoolHandle, SpaceState, Use, VolumeId};
use blockd_mapper::format::catalogue::VolumeKind;
use blockd_media::error::Error;
use blockd_media::pool::{Medium, PmemInfo};
use blockd_media::units::{GIB, from_wire, to_wire, to_wire_gb};
use blockd_media::{DeviceInfo, DeviceKind, Durability};

use super::devices::{AttachWish, FrontEnd};
use super::releases::Release;
use super::settings;
use super::volumes::{self, Described};
use super::{Control, Known, pool_error};
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

#[expect(deprecated, reason = "older clients read size_gb")]
pub(super) fn volume(described: Described) -> v1::Volume {
    let (info, device) = (described.info, described.device);
    let (device_major, device_minor) = device.numbers.unwrap_or_default();
    v1::Volume {
        name: info.name,
        size_gb: to_wire_gb(info.size),
        pool: described.pool,
        block_size: info.block_size,
        id: info.id.0,
        size_bytes: to_wire(info.size),
        kind: match info.kind {
            VolumeKind::Volume => v1::VolumeKind::Volume,
            VolumeKind::Snapshot => v1::VolumeKind::Snapshot,
        }
        .into(),
        origin: described.origin,
        attached: described.attached,
        read_only: described.read_only,
        device_path: device.path.map(|path| path.display().to_string()).unwrap_or_default(),
        device_major,
        device_minor,
        nbd_uri: described.uris.first().cloned().unwrap_or_default(),
        connections: count(described.connections),
        mapped_bytes: to_wire(info.mapped),
        valid_bytes: to_wire(info.valid),
        exclusive_bytes: to_wire(info.exclusive),
        shared_bytes: to_wire(info.shared),
        reserved_bytes: to_wire(info.reserved),
        nbd_uris: described.uris,
        front_end: match described.front_end {
            None => v1::FrontEnd::Unspecified,
            Some(FrontEnd::Ublk) => v1::FrontEnd::Ublk,
            Some(FrontEnd::Nbd) => v1::FrontEnd::Nbd,
        }
        .into(),
        queue_count: device.queues.into(),
        queue_depth: device.depth.into(),
        zero_copy: device.zero_copy,
        device_problem: device.problem.unwrap_or_default(),
        device_features_asked: device.asked,
        device_features_granted: device.granted,
        made_unix_ms: to_wire(info.made.0),
        settings: Some(settings::to_message(&info.settings)),
        out_of_space: info.out_of_space,
        origin_id: info.origin.0,
        family_id: info.lineage.0,
        durability: durability(described.durability).into(),
        state: v1::VolumeState::Ready.into(),
        write_cache: described.write_cache,
        usage: match described.is_pmem {
            true => v1::PmemUsage::FileIo,
            false => v1::PmemUsage::Unspecified,
        }
        .into(),
        charged_bytes: if described.is_pmem { to_wire(info.size) } else { 0 },
        erase_after: described.erases,
        ..v1::Volume::default()
    }
}

pub(super) fn releasing(release: Release) -> v1::Releasing {
    v1::Releasing {
        pool: release.pool,
        name: release.name,
        total_bytes: to_wire(release.total),
        left_bytes: to_wire(release.left),
    }
}

/// The attachment that a request asks for.
pub(super) fn wish(asked: &v1::AttachVolumeRequest) -> AttachWish {
    AttachWish {
        read_only: asked.read_only,
        front_end: match asked.front_end() {
            v1::FrontEnd::Unspecified => None,
            v1::FrontEnd::Ublk => Some(FrontEnd::Ublk),
            v1::FrontEnd::Nbd => Some(FrontEnd::Nbd),
        },
        queues: asked.queue_count,
        depth: asked.queue_depth,
    }
}

pub(super) fn count(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[expect(deprecated, reason = "older clients read size_gb")]
fn device(info: &DeviceInfo) -> v1::Device {
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
        numa_node: numa_node(info),
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

fn numa_node(info: &PmemInfo) -> i32 {
    info.site.numa_node.and_then(|node| i32::try_from(node).ok()).unwrap_or(-1)
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
        let stats = self.data_path().volume_stats();
        let here = stats.iter().filter(|one| one.pool == name);
        let blocked_writes = here.map(|one| one.blocked.get()).sum();
        let volumes = handle.mapper().summaries();
        let set_aside = volumes.iter().map(|one| one.settings.set_aside(one.size)).sum();
        let promised = volumes.iter().fold(0_u64, |sum, one| sum.saturating_add(one.size));
        let snapshots = volumes.iter().filter(|one| one.kind == VolumeKind::Snapshot).count();
        let devices = handle.devices();
        let level = Durability::worst(devices.iter().map(DeviceInfo::durability));
        let pmem: Vec<PmemInfo> = devices.iter().filter_map(|one| one.pmem.clone()).collect();
        let step = volumes::step(handle);
        let id = handle.id().iter().map(|byte| format!("{byte:02x}")).collect();
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
            promised_bytes: to_wire(promised),
            volume_count: count(volumes.len()),
            snapshot_count: count(snapshots),
            releasing_count: u32::try_from(space.releasing_volumes).unwrap_or(u32::MAX),
            releasing_bytes: to_wire(space.releasing),
            devices: handle.devices().iter().map(device).collect(),
            node_objects: self.node_objects(&space),
            space_state: state(now.state).into(),
            low_bytes: to_wire(now.low),
            very_low_bytes: to_wire(now.very_low),
            write_rate_bytes: to_wire(now.rate),
            seconds_to_full: now.seconds_to_full.map_or(-1, to_wire),
            set_aside_bytes: to_wire(set_aside),
            blocked_writes,
            kind: v1::PoolKind::Mapped.into(),
            durability: durability(level).into(),
            write_cache: !handle.is_write_through(),
            largest_volume_bytes: to_wire(space.free() / step * step),
            volume_step_bytes: to_wire(if handle.is_pmem() { step } else { 0 }),
            minimum_volume_bytes: to_wire(if handle.is_pmem() { step } else { 0 }),
            scrubbing_bytes: if handle.erases() { to_wire(space.pool.pending) } else { 0 },
            region: pmem.first().map(region).unwrap_or_default(),
            numa_node: pmem.first().map_or(-1, numa_node),
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
