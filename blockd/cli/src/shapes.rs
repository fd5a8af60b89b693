//! Volumes, pools and the like as `--json` prints them. Programs rely on these: keys are added,
//! never renamed.

use blockd_api::v1::{self, Volume};
use blockd_media::error::Error;
use serde::Serialize;

use super::amount;
use super::memory_shapes::{VolumeMemory, is_namespace, pool_kind, volume_state};

/// A volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct VolumeShape {
    pub name: String,
    pub pool: String,
    pub kind: &'static str,
    pub origin: Option<String>,
    pub size_bytes: u64,
    pub block_size: u32,
    pub mapped_bytes: u64,
    pub valid_bytes: u64,
    pub exclusive_bytes: u64,
    pub shared_bytes: u64,
    pub reserved_bytes: u64,
    pub attached: bool,
    pub read_only: bool,
    pub connections: u32,
    pub front_end: Option<&'static str>,
    pub device_path: Option<String>,
    pub device_major: Option<u32>,
    pub device_minor: Option<u32>,
    pub device_problem: Option<String>,
    pub queue_count: u32,
    pub queue_depth: u32,
    pub zero_copy: bool,
    pub nbd_uris: Vec<String>,
    pub made_unix_ms: Option<u64>,
    pub settings: SettingsShape,
    pub out_of_space: bool,
    pub durability: Option<&'static str>,
    pub write_cache: bool,
    /// Null of volumes that are not in persistent memory.
    pub pmem: Option<VolumeMemory>,
}

/// The settings of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct SettingsShape {
    pub on_full: &'static str,
    pub on_full_timeout_ms: u32,
    pub thick: bool,
    pub reservation_bytes: u64,
    pub quota_bytes: u64,
    pub iops: u64,
    pub bandwidth_bytes: u64,
}

impl From<&v1::VolumeSettings> for SettingsShape {
    fn from(settings: &v1::VolumeSettings) -> Self {
        Self {
            on_full: match settings.on_full() {
                v1::OnFull::Block | v1::OnFull::Unspecified => "block",
                v1::OnFull::Timeout => "timeout",
                v1::OnFull::Error => "error",
            },
            on_full_timeout_ms: settings.on_full_timeout_ms,
            thick: settings.thick,
            reservation_bytes: amount(settings.reservation_bytes),
            quota_bytes: amount(settings.quota_bytes),
            iops: settings.iops,
            bandwidth_bytes: amount(settings.bandwidth_bytes),
        }
    }
}

impl From<&Volume> for VolumeShape {
    fn from(volume: &Volume) -> Self {
        Self {
            name: volume.name.clone(),
            pool: volume.pool.clone(),
            kind: match volume.kind() {
                v1::VolumeKind::Snapshot => "snapshot",
                v1::VolumeKind::Volume | v1::VolumeKind::Unspecified => "volume",
            },
            origin: some(&volume.origin),
            size_bytes: amount(volume.size_bytes),
            block_size: volume.block_size,
            mapped_bytes: amount(volume.mapped_bytes),
            valid_bytes: amount(volume.valid_bytes),
            exclusive_bytes: amount(volume.exclusive_bytes),
            shared_bytes: amount(volume.shared_bytes),
            reserved_bytes: amount(volume.reserved_bytes),
            attached: volume.attached,
            read_only: volume.read_only,
            connections: volume.connections,
            front_end: match volume.front_end() {
                v1::FrontEnd::Ublk => Some("ublk"),
                v1::FrontEnd::Nbd => Some("nbd"),
                v1::FrontEnd::Unspecified => None,
            },
            device_path: some(&volume.device_path),
            device_major: (volume.device_major != 0).then_some(volume.device_major),
            device_minor: (volume.device_major != 0).then_some(volume.device_minor),
            device_problem: some(&volume.device_problem),
            queue_count: volume.queue_count,
            queue_depth: volume.queue_depth,
            zero_copy: volume.zero_copy,
            nbd_uris: volume.nbd_uris.clone(),
            made_unix_ms: (volume.made_unix_ms != 0).then(|| amount(volume.made_unix_ms)),
            settings: SettingsShape::from(&volume.settings.unwrap_or_default()),
            out_of_space: volume.out_of_space,
            durability: durability(volume.durability()),
            write_cache: volume.write_cache,
            pmem: VolumeMemory::of(volume),
        }
    }
}

/// A day and a time of it, in UTC.
pub(crate) fn date(unix_ms: i64) -> String {
    let seconds = unix_ms.div_euclid(1000);
    let (days, time) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Years begin in March here, so that the day that some have more is their last. Counted from
    // March of the year 0, in eras of 400 years.
    let days = days + 719_468;
    let (era, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = year + era * 400 + next;
    let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// A client that is connected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ConnectionShape {
    pub id: u64,
    pub pool: String,
    pub volume: String,
    pub export: String,
    pub peer: String,
    pub tls: bool,
    pub read_only: bool,
    pub(crate) structured_replies: bool,
    pub extended_headers: bool,
    pub worker: u32,
    pub in_flight: u32,
}

impl From<&v1::Connection> for ConnectionShape {
    fn from(connection: &v1::Connection) -> Self {
        Self {
            id: connection.id,
            pool: connection.pool.clone(),
            volume: connection.volume.clone(),
            export: connection.export.clone(),
            peer: connection.peer.clone(),
            tls: connection.tls,
            read_only: connection.read_only,
            structured_replies: connection.structured_replies,
            extended_headers: connection.extended_headers,
            worker: connection.worker,
            in_flight: connection.in_flight,
        }
    }
}

/// A device of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct DeviceShape {
    pub path: Option<String>,
    pub kind: &'static str,
    pub size_bytes: u64,
    pub block_size: u32,
    pub direct: bool,
    pub sparse: bool,
    pub discard: bool,
    pub pmem: Option<PmemShape>,
}

/// The properties of a device in persistent memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PmemShape {
    pub medium: &'static str,
    pub region: Option<String>,
    pub numa_node: Option<u32>,
    pub durability: Option<&'static str>,
    pub atomicity: &'static str,
    pub persistence_domain: Option<String>,
    pub bad_bytes: u64,
    pub erases: bool,
}

impl From<&v1::PmemDevice> for PmemShape {
    fn from(pmem: &v1::PmemDevice) -> Self {
        Self {
            medium: pmem_medium(pmem.medium()),
            region: some(&pmem.region),
            numa_node: u32::try_from(pmem.numa_node).ok(),
            durability: durability(pmem.durability()),
            atomicity: match pmem.atomicity() {
                v1::Atomicity::Block => "block",
                v1::Atomicity::None => "none",
                v1::Atomicity::Unspecified => "unknown",
            },
            persistence_domain: some(&pmem.persistence_domain),
            bad_bytes: amount(pmem.bad_bytes),
            erases: pmem.erases,
        }
    }
}

/// How persistent memory is mapped, in a word.
pub(crate) fn pmem_medium(medium: v1::PmemMedium) -> &'static str {
    match medium {
        v1::PmemMedium::Devdax => "devdax",
        v1::PmemMedium::DaxFile => "dax file",
        v1::PmemMedium::File => "mapped file",
        v1::PmemMedium::Unspecified => "unknown",
    }
}

/// The durability of answered writes, in a word; `None` where that is not known.
pub(crate) fn durability(level: v1::Durability) -> Option<&'static str> {
    match level {
        v1::Durability::Unspecified => None,
        v1::Durability::PowerSafe => Some("power-safe"),
        v1::Durability::RestartSafe => Some("restart-safe"),
        v1::Durability::Volatile => Some("volatile"),
    }
}

impl From<&v1::Device> for DeviceShape {
    fn from(device: &v1::Device) -> Self {
        Self {
            path: some(&device.path),
            kind: device_kind(device),
            size_bytes: amount(device.size_bytes),
            block_size: device.block_size,
            direct: device.direct,
            sparse: device.sparse,
            discard: device.discard,
            pmem: device.pmem.as_ref().map(PmemShape::from),
        }
    }
}

/// The kind of a device in a word.
pub(crate) fn device_kind(device: &v1::Device) -> &'static str {
    match device.kind() {
        v1::DeviceKind::File => "file",
        v1::DeviceKind::Disk => "disk",
        v1::DeviceKind::Memory => "memory",
        v1::DeviceKind::Pmem => "pmem",
        v1::DeviceKind::Unspecified => "unknown",
    }
}

/// A pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PoolShape {
    pub name: String,
    pub is_default: bool,
    pub id: Option<String>,
    pub state: &'static str,
    pub failure: Option<String>,
    pub size_bytes: u64,
    pub free_bytes: u64,
    pub mapped_bytes: u64,
    pub reserved_bytes: u64,
    pub pending_bytes: u64,
    pub metadata_bytes: u64,
    pub metadata_free_bytes: u64,
    pub backing_free_bytes: Option<u64>,
    pub promised_bytes: u64,
    pub extent_size: u32,
    pub volume_count: u32,
    pub devices: Vec<DeviceShape>,
    pub snapshot_count: u32,
    pub releasing_count: u32,
    pub releasing_bytes: u64,
    pub node_objects: Vec<NodeObjectShape>,
    pub space_state: Option<&'static str>,
    pub low_bytes: u64,
    pub very_low_bytes: u64,
    pub write_rate_bytes: u64,
    pub seconds_to_full: Option<u64>,
    pub set_aside_bytes: u64,
    pub blocked_writes: u64,
    pub durability: Option<&'static str>,
    pub write_cache: bool,
    pub region: Option<String>,
    pub numa_node: Option<u32>,
    pub largest_volume_bytes: u64,
    pub volume_step_bytes: u64,
    pub minimum_volume_bytes: u64,
    pub scrubbing_bytes: u64,
    pub pool_kind: &'static str,
}

/// How full a pool is, in a word.
pub(crate) fn space_state(pool: &v1::Pool) -> Option<&'static str> {
    match pool.space_state() {
        v1::SpaceState::Unspecified => None,
        v1::SpaceState::Normal => Some("normal"),
        v1::SpaceState::Low => Some("low"),
        v1::SpaceState::VeryLow => Some("very low"),
        v1::SpaceState::Full => Some("full"),
    }
}

impl From<&v1::Pool> for PoolShape {
    fn from(pool: &v1::Pool) -> Self {
        Self {
            name: pool.name.clone(),
            is_default: pool.is_default,
            id: some(&pool.id),
            state: pool_state_name(pool.state()),
            failure: some(&pool.failure),
            size_bytes: amount(pool.size_bytes),
            free_bytes: amount(pool.free_bytes),
            mapped_bytes: amount(pool.mapped_bytes),
            reserved_bytes: amount(pool.reserved_bytes),
            pending_bytes: amount(pool.pending_bytes),
            metadata_bytes: amount(pool.metadata_bytes),
            metadata_free_bytes: amount(pool.metadata_free_bytes),
            backing_free_bytes: u64::try_from(pool.backing_free_bytes).ok(),
            promised_bytes: amount(pool.promised_bytes),
            extent_size: pool.extent_size,
            volume_count: pool.volume_count,
            devices: pool.devices.iter().map(DeviceShape::from).collect(),
            snapshot_count: pool.snapshot_count,
            releasing_count: pool.releasing_count,
            releasing_bytes: amount(pool.releasing_bytes),
            node_objects: pool.node_objects.iter().map(NodeObjectShape::from).collect(),
            space_state: space_state(pool),
            low_bytes: amount(pool.low_bytes),
            very_low_bytes: amount(pool.very_low_bytes),
            write_rate_bytes: amount(pool.write_rate_bytes),
            seconds_to_full: u64::try_from(pool.seconds_to_full).ok(),
            set_aside_bytes: amount(pool.set_aside_bytes),
            blocked_writes: pool.blocked_writes,
            durability: durability(pool.durability()),
            write_cache: pool.write_cache,
            region: some(&pool.region),
            numa_node: u32::try_from(pool.numa_node).ok(),
            largest_volume_bytes: amount(pool.largest_volume_bytes),
            volume_step_bytes: amount(pool.volume_step_bytes),
            minimum_volume_bytes: amount(pool.minimum_volume_bytes),
            scrubbing_bytes: amount(pool.scrubbing_bytes),
            pool_kind: pool_kind(pool),
        }
    }
}

/// Something of a pool that belongs to a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct NodeObjectShape {
    pub name: String,
    pub kind: &'static str,
    pub total_bytes: u64,
    pub used_bytes: u64,
}

impl From<&v1::NodeObject> for NodeObjectShape {
    fn from(object: &v1::NodeObject) -> Self {
        Self {
            name: object.name.clone(),
            kind: match object.kind() {
                v1::NodeObjectKind::Free => "free",
                v1::NodeObjectKind::Journal => "journal",
                v1::NodeObjectKind::Unspecified => "unknown",
            },
            total_bytes: amount(object.total_bytes),
            used_bytes: amount(object.used_bytes),
        }
    }
}

/// The state of a pool in a word.
pub(crate) fn pool_state_name(state: v1::PoolState) -> &'static str {
    match state {
        v1::PoolState::Open => "open",
        v1::PoolState::Failed => "failed",
        v1::PoolState::Closed => "closed",
        v1::PoolState::Unspecified => "unknown",
    }
}

/// A volume whose extents are being let go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ReleasingShape {
    pub pool: String,
    pub name: Option<String>,
    pub total_bytes: u64,
    pub left_bytes: u64,
}

impl From<&v1::Releasing> for ReleasingShape {
    fn from(one: &v1::Releasing) -> Self {
        Self {
            pool: one.pool.clone(),
            name: some(&one.name),
            total_bytes: amount(one.total_bytes),
            left_bytes: amount(one.left_bytes),
        }
    }
}

/// The space of some volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct SpaceShape {
    pub mapped_bytes: u64,
    pub valid_bytes: u64,
    pub exclusive_bytes: u64,
    pub shared_bytes: u64,
    pub reserved_bytes: u64,
    pub gives_back_bytes: u64,
    pub exact: bool,
}

impl From<&v1::Space> for SpaceShape {
    fn from(space: &v1::Space) -> Self {
        Self {
            mapped_bytes: amount(space.mapped_bytes),
            valid_bytes: amount(space.valid_bytes),
            exclusive_bytes: amount(space.exclusive_bytes),
            shared_bytes: amount(space.shared_bytes),
            reserved_bytes: amount(space.reserved_bytes),
            gives_back_bytes: amount(space.gives_back_bytes),
            exact: space.exact,
        }
    }
}

fn some(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

/// The volume of an answer. A daemon that leaves it out breaks the contract.
pub(crate) fn volume(volume: Option<Volume>) -> Result<Volume, Error> {
    volume.ok_or_else(|| lacks("volume"))
}

/// The pool of an answer.
pub(crate) fn pool(pool: Option<v1::Pool>) -> Result<v1::Pool, Error> {
    pool.ok_or_else(|| lacks("pool"))
}

fn lacks(what: &str) -> Error {
    Error::Unexpected {
        what: "the daemon's answer".to_owned(),
        problem: format!("lacks the {what}"),
    }
}

/// Where clients find an attached volume: its block device, or its URI.
pub(crate) fn place(volume: &Volume) -> &str {
    if volume.device_path.is_empty() { &volume.nbd_uri } else { &volume.device_path }
}

/// In words whether clients can use it.
pub(crate) fn state(volume: &Volume) -> &'static str {
    if volume.usage() != v1::PmemUsage::Unspecified
        && let Some(state) = volume_state(volume)
    {
        return state;
    }
    match (volume.attached, volume.read_only) {
        _ if is_namespace(volume) && volume.device_problem.is_empty() => "ready",
        _ if is_namespace(volume) => "not served",
        _ if !volume.device_problem.is_empty() => "attached, not served",
        (false, _) if volume.kind() == v1::VolumeKind::Snapshot => "snapshot",
        (false, _) => "detached",
        (true, false) => "attached",
        (true, true) => "attached, read-only",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_has_this_shape() {
        let volume = Volume {
            name: "data".to_owned(),
            pool: "default".to_owned(),
            block_size: 512,
            size_bytes: 10 << 30,
            attached: true,
            nbd_uris: vec!["nbd+unix:///data?socket=/run/blockd/nbd.sock".to_owned()],
            ..Default::default()
        };
        let expected = r#"{"name":"data","pool":"default","kind":"volume","origin":null,"size_bytes":10737418240,"block_size":512,"mapped_bytes":0,"valid_bytes":0,"exclusive_bytes":0,"shared_bytes":0,"reserved_bytes":0,"attached":true,"read_only":false,"connections":0,"front_end":null,"device_path":null,"device_major":null,"device_minor":null,"device_problem":null,"queue_count":0,"queue_depth":0,"zero_copy":false,"nbd_uris":["nbd+unix:///data?socket=/run/blockd/nbd.sock"],"made_unix_ms":null,"settings":{"on_full":"block","on_full_timeout_ms":0,"thick":false,"reservation_bytes":0,"quota_bytes":0,"iops":0,"bandwidth_bytes":0},"out_of_space":false,"durability":null,"write_cache":false,"pmem":null}"#;
        assert_eq!(serde_json::to_string(&VolumeShape::from(&volume)).unwrap(), expected);
    }

    #[test]
    fn a_date_is_that_of_the_calendar() {
        let dates = [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399_999, "2000-02-28 23:59:59 UTC"),
            (951_782_400_000, "2000-02-29 00:00:00 UTC"),
            (1_700_000_000_000, "2023-11-14 22:13:20 UTC"),
            (4_107_542_400_000, "2100-03-01 00:00:00 UTC"),
        ];
        for (unix_ms, expected) in dates {
            assert_eq!(date(unix_ms), expected);
        }
    }

    #[test]
    fn a_pool_has_this_shape() {
        let device = v1::Device { kind: v1::DeviceKind::Memory.into(), ..Default::default() };
        let pool = v1::Pool {
            name: "default".to_owned(),
            backing_free_bytes: -1,
            seconds_to_full: -1,
            devices: vec![device],
            ..Default::default()
        };
        let expected = r#"{"name":"default","is_default":false,"id":null,"state":"unknown","failure":null,"size_bytes":0,"free_bytes":0,"mapped_bytes":0,"reserved_bytes":0,"pending_bytes":0,"metadata_bytes":0,"metadata_free_bytes":0,"backing_free_bytes":null,"promised_bytes":0,"extent_size":0,"volume_count":0,"devices":[{"path":null,"kind":"memory","size_bytes":0,"block_size":0,"direct":false,"sparse":false,"discard":false,"pmem":null}],"snapshot_count":0,"releasing_count":0,"releasing_bytes":0,"node_objects":[],"space_state":null,"low_bytes":0,"very_low_bytes":0,"write_rate_bytes":0,"seconds_to_full":null,"set_aside_bytes":0,"blocked_writes":0,"durability":null,"write_cache":false,"region":null,"numa_node":0,"largest_volume_bytes":0,"volume_step_bytes":0,"minimum_volume_bytes":0,"scrubbing_bytes":0,"pool_kind":"mapped"}"#;
        assert_eq!(serde_json::to_string(&PoolShape::from(&pool)).unwrap(), expected);
    }

    #[test]
    fn a_connection_has_this_shape() {
        let expected = r#"{"id":0,"pool":"","volume":"","export":"","peer":"","tls":false,"read_only":false,"structured_replies":false,"extended_headers":false,"worker":0,"in_flight":0}"#;
        let shape = ConnectionShape::from(&v1::Connection::default());
        assert_eq!(serde_json::to_string(&shape).unwrap(), expected);
    }
}
