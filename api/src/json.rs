//! Messages as `--json` prints them. Programs rely on these objects: keys are added, and never
//! renamed or removed. Empty texts and other values that stand for nothing are null.

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

use crate::v1;

/// The keys of each object, in the order of the output. A key without a value has that of the field
/// of its name.
macro_rules! json {
    (@value $message:ident, $key:ident) => { &$message.$key };
    (@value $message:ident, $key:ident, $value:expr) => { &$value };
    ($($type:ty as $message:ident { $($key:ident $(= $value:expr)?,)+ })+) => {$(
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let $message = self;
                let count = [$(stringify!($key)),+].len();
                let mut object = serializer.serialize_struct(stringify!($type), count)?;
                $(object.serialize_field(
                    stringify!($key),
                    json!(@value $message, $key $(, $value)?),
                )?;)+
                object.end()
            }
        }
    )+};
}

/// The properties of a volume that only persistent memory has.
struct InPmem<'a>(&'a v1::Volume);

json! {
    v1::Volume as volume {
        name,
        pool,
        kind = volume.kind().word(),
        origin = text(&volume.origin),
        size_bytes,
        block_size,
        mapped_bytes,
        valid_bytes,
        exclusive_bytes,
        shared_bytes,
        reserved_bytes,
        attached,
        read_only,
        connections,
        front_end = volume.front_end().word(),
        device_path = text(&volume.device_path),
        device_major = (volume.device_major != 0).then_some(volume.device_major),
        device_minor = (volume.device_major != 0).then_some(volume.device_minor),
        device_problem = text(&volume.device_problem),
        queue_count,
        queue_depth,
        zero_copy,
        nbd_uris,
        made_unix_ms = not_zero(volume.made_unix_ms),
        settings = volume.settings.unwrap_or_default(),
        out_of_space,
        durability = volume.durability().word(),
        write_cache,
        pmem = volume.usage().word().map(|_| InPmem(volume)),
        set_aside_free_bytes,
        pinned_to = text(&volume.pinned_to),
        labels,
    }
    InPmem<'_> as pmem {
        usage = pmem.0.usage().word(),
        state = pmem.0.state().word(),
        charged_bytes = pmem.0.charged_bytes,
        erase_after = pmem.0.erase_after,
        scrubbed_bytes = pmem.0.scrubbed_bytes,
        dax = pmem.0.dax,
    }
    v1::VolumeSettings as settings {
        on_full = settings.on_full().word(),
        on_full_timeout_ms,
        thick,
        reservation_bytes,
        quota_bytes,
        iops,
        bandwidth_bytes,
        placement = settings.placement().word(),
    }
    v1::Releasing as releasing {
        pool,
        name = text(&releasing.name),
        total_bytes,
        left_bytes,
    }
    v1::Space as space {
        mapped_bytes,
        valid_bytes,
        exclusive_bytes,
        shared_bytes,
        reserved_bytes,
        gives_back_bytes,
        exact,
        set_aside_free_bytes,
    }
    v1::Connection as connection {
        id,
        pool,
        volume,
        export,
        peer,
        tls,
        read_only,
        structured_replies,
        extended_headers,
        worker,
        in_flight,
    }
    v1::Pool as pool {
        name,
        is_default,
        id = text(&pool.id),
        state = pool.state().word(),
        failure = text(&pool.failure),
        size_bytes,
        free_bytes,
        mapped_bytes,
        reserved_bytes,
        pending_bytes,
        metadata_bytes,
        metadata_free_bytes,
        backing_free_bytes = not_negative(pool.backing_free_bytes),
        promised_bytes,
        extent_size,
        volume_count,
        devices,
        snapshot_count,
        releasing_count,
        releasing_bytes,
        node_objects,
        space_state = pool.space_state().word(),
        low_bytes,
        very_low_bytes,
        write_rate_bytes,
        seconds_to_full = not_negative(pool.seconds_to_full),
        set_aside_bytes,
        blocked_writes,
        durability = pool.durability().word(),
        write_cache,
        region = text(&pool.region),
        numa_node = not_negative(pool.numa_node.into()),
        largest_volume_bytes,
        volume_step_bytes,
        minimum_volume_bytes,
        scrubbing_bytes,
        pool_kind = pool.kind().word(),
        folds,
        evacuation,
        rebalance,
        read_cache,
    }
    v1::PoolRebalance as rebalance {
        state = rebalance.state().word(),
        left_bytes,
        moved_bytes,
        moved_extents,
        rate_bytes,
        waits_for_space,
        errors,
        devices,
    }
    v1::DeviceUse as used {
        path = text(&used.path),
        total_bytes,
        used_bytes,
        before_bytes,
    }
    v1::PoolEvacuation as evacuation {
        path = text(&evacuation.path),
        left_bytes,
        moved_bytes,
        moved_extents,
        rate_bytes,
        waits_for_space,
        errors,
        shrinks_to_bytes,
    }
    v1::PoolReadCache as cache {
        limit_bytes,
        held_bytes,
        hits,
        misses,
        evictions,
        dropped,
    }
    v1::PoolFolds as folds {
        enabled,
        composite_entries,
        running,
        folded,
        copied_bytes,
        abandoned,
        settled,
        rate_bytes,
        disabling,
    }
    v1::Device as device {
        path = text(&device.path),
        kind = device.kind().word(),
        size_bytes,
        block_size,
        direct,
        sparse,
        discard,
        pmem,
    }
    v1::PmemDevice as device {
        medium = device.medium().word(),
        region = text(&device.region),
        numa_node = not_negative(device.numa_node.into()),
        durability = device.durability().word(),
        atomicity = device.atomicity().word(),
        persistence_domain = text(&device.persistence_domain),
        bad_bytes,
        erases,
    }
    v1::NodeObject as object {
        name,
        kind = object.kind().word(),
        total_bytes,
        used_bytes,
    }
    v1::Node as node {
        id = text(&node.id),
        state = node.state().word(),
        pools,
        dead_unix_ms = not_zero(node.dead_unix_ms),
    }
    v1::NodePool as pool {
        name,
        state = pool.state().word(),
        failure = text(&pool.failure),
        epoch,
        objects,
        free_bytes,
        parked,
        blocked_writes,
        blocked_since_unix_ms = not_zero(pool.blocked_since_unix_ms),
        waiting,
    }
    v1::Cell as cell {
        name,
        group,
        state = cell.state().word(),
        device_bytes,
        path,
        holder = (cell.holder != 0).then_some(cell.holder),
        standby,
    }
    v1::VolumeGroup as group {
        name,
        folder = text(&group.folder),
        host,
        key = text(&group.key),
        total_bytes,
        free_bytes,
        failure = text(&group.failure),
        cells,
        dead,
    }
    v1::DeadHost as dead {
        host,
        dead_unix_ms,
        cells,
        pending_cells,
    }
    v1::HookRun as hook {
        path,
        output,
        took_ms,
    }
    v1::HostCell as cell {
        cell = &cell.name,
        outcome = cell.outcome().word(),
        failure = text(&cell.failure),
        log_changes,
    }
    v1::WaitingRequest as request {
        volume,
        peer,
        since_unix_ms,
        room_bytes,
    }
    v1::Event as event {
        sequence,
        time_unix_ms,
        kind = event.kind().word(),
        pool = text(&event.pool),
        volume = text(&event.volume),
        text,
        missed,
    }
    v1::Cause as cause {
        code = cause.code().word(),
        severity = cause.severity().word().unwrap_or("unknown"),
        reason = text(&cause.reason),
        message,
        device = text(&cause.device),
        count,
        of_pool,
        first_seen_unix_ms,
        last_probe_unix_ms,
        last_transition_unix_ms,
    }
    v1::VersionResponse as version {
        version,
        pid,
        started_unix_seconds,
        ready,
        nbd_addresses,
    }
}

/// Null for an empty text.
fn text(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

/// Null for a time that is not known.
fn not_zero(unix_ms: i64) -> Option<i64> {
    (unix_ms != 0).then_some(unix_ms)
}

/// Null for the -1 of an amount or a node that there is not.
fn not_negative(value: i64) -> Option<i64> {
    (value >= 0).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_has_this_shape() {
        let volume = v1::Volume {
            name: "data".to_owned(),
            pool: "default".to_owned(),
            block_size: 512,
            size_bytes: 10 << 30,
            attached: true,
            nbd_uris: vec!["nbd+unix:///data?socket=/run/blockd/nbd.sock".to_owned()],
            labels: [("team", ""), ("app.example/role", "db")]
                .map(|(k, v)| (k.into(), v.into()))
                .into(),
            ..Default::default()
        };
        let expected = r#"{"name":"data","pool":"default","kind":"volume","origin":null,"size_bytes":10737418240,"block_size":512,"mapped_bytes":0,"valid_bytes":0,"exclusive_bytes":0,"shared_bytes":0,"reserved_bytes":0,"attached":true,"read_only":false,"connections":0,"front_end":null,"device_path":null,"device_major":null,"device_minor":null,"device_problem":null,"queue_count":0,"queue_depth":0,"zero_copy":false,"nbd_uris":["nbd+unix:///data?socket=/run/blockd/nbd.sock"],"made_unix_ms":null,"settings":{"on_full":"block","on_full_timeout_ms":0,"thick":false,"reservation_bytes":0,"quota_bytes":0,"iops":0,"bandwidth_bytes":0,"placement":"fill"},"out_of_space":false,"durability":null,"write_cache":false,"pmem":null,"set_aside_free_bytes":0,"pinned_to":null,"labels":{"app.example/role":"db","team":""}}"#;
        assert_eq!(serde_json::to_string(&volume).unwrap(), expected);
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
        let expected = r#"{"name":"default","is_default":false,"id":null,"state":"unknown","failure":null,"size_bytes":0,"free_bytes":0,"mapped_bytes":0,"reserved_bytes":0,"pending_bytes":0,"metadata_bytes":0,"metadata_free_bytes":0,"backing_free_bytes":null,"promised_bytes":0,"extent_size":0,"volume_count":0,"devices":[{"path":null,"kind":"memory","size_bytes":0,"block_size":0,"direct":false,"sparse":false,"discard":false,"pmem":null}],"snapshot_count":0,"releasing_count":0,"releasing_bytes":0,"node_objects":[],"space_state":null,"low_bytes":0,"very_low_bytes":0,"write_rate_bytes":0,"seconds_to_full":null,"set_aside_bytes":0,"blocked_writes":0,"durability":null,"write_cache":false,"region":null,"numa_node":0,"largest_volume_bytes":0,"volume_step_bytes":0,"minimum_volume_bytes":0,"scrubbing_bytes":0,"pool_kind":"mapped","folds":null,"evacuation":null,"rebalance":null,"read_cache":null}"#;
        assert_eq!(serde_json::to_string(&pool).unwrap(), expected);
    }

    #[test]
    fn a_connection_has_this_shape() {
        let expected = r#"{"id":0,"pool":"","volume":"","export":"","peer":"","tls":false,"read_only":false,"structured_replies":false,"extended_headers":false,"worker":0,"in_flight":0}"#;
        assert_eq!(serde_json::to_string(&v1::Connection::default()).unwrap(), expected);
    }

    #[test]
    fn an_event_has_this_shape() {
        let event = v1::Event {
            sequence: 7,
            time_unix_ms: 1,
            kind: v1::EventKind::Ready.into(),
            text: "ready".to_owned(),
            ..Default::default()
        };
        let expected = r#"{"sequence":7,"time_unix_ms":1,"kind":"ready","pool":null,"volume":null,"text":"ready","missed":0}"#;
        assert_eq!(serde_json::to_string(&event).unwrap(), expected);
    }
}
