//! Every metric that the daemon exports: name, kind, labels and help.

use Kind::{Counter, Gauge, Histogram as Times};

/// Kinds of metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Only grows; its name ends with `_total`.
    Counter,
    /// The present value.
    Gauge,
    /// How often something took how many seconds.
    Histogram,
}

/// A metric: its name, which is stable, and what it means.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// Without the `_total` of counters.
    pub name: &'static str,
    /// Kind of its values.
    pub kind: Kind,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// One sentence.
    pub help: &'static str,
}

pub(super) const fn metric(
    name: &'static str,
    kind: Kind,
    labels: &'static [&'static str],
    help: &'static str,
) -> Metric {
    Metric { name, kind, labels, help }
}

const POOL: &[&str] = &["pool"];

const VOLUME: &[&str] = &["pool", "volume"];

const REQUEST: &[&str] = &["pool", "volume", "operation"];

const STAGE: &[&str] = &["pool", "volume", "stage"];

const WORKER: &[&str] = &["worker"];

const LISTENER: &[&str] = &["address"];

const NODE: &[&str] = &["pool", "node"];

const CAUSE: &[&str] = &["pool", "volume", "code", "severity"];

const DEVICE: &[&str] = &["pool", "device"];

const DEVICE_IO: &[&str] = &["pool", "device", "operation"];

const REGION: &[&str] = &["pool", "region"];

const FAULT: &[&str] = &["pool", "volume", "operation"];

const HOLD: &[&str] = &["pool", "volume", "reason"];

/// All metrics there are.
pub const METRICS: &[Metric] = &[
    metric("blockd_build", Gauge, &["version"], "1, with the daemon's version"),
    metric("build_info", Gauge, &["version"], "The same as blockd_build, under the common name"),
    metric("blockd_ready", Gauge, &[], "1 when everything is served"),
    metric(
        "blockd_start_time_seconds",
        Gauge,
        &[],
        "Start time of the daemon in seconds since 1970",
    ),
    metric("blockd_resident_bytes", Gauge, &[], "Resident memory of the daemon"),
    metric("blockd_ublk_devices", Gauge, &[], "Served block devices"),
    metric(
        "blockd_ublk_ready_devices",
        Gauge,
        &[],
        "Block devices that are added ahead of need and have no volume yet",
    ),
    metric("blockd_ublk_recoveries", Counter, &[], "Block devices served again after a start"),
    metric("blockd_ublk_hangs", Counter, &[], "Commands to the ublk driver that did not return"),
    metric("blockd_pool_up", Gauge, POOL, "1 when the pool serves, 0 when it has failed"),
    metric("blockd_pool_closed", Gauge, POOL, "1 when the pool was closed on request"),
    metric("blockd_pool_missing", Gauge, POOL, "1 when a pool that was served before is missing"),
    metric("blockd_pool_size_bytes", Gauge, POOL, "Bytes of all devices of the pool"),
    metric("blockd_pool_free_bytes", Gauge, POOL, "Free bytes for first writes"),
    metric("blockd_pool_mapped_bytes", Gauge, POOL, "Bytes of extents that volumes refer to"),
    metric("blockd_pool_reserved_bytes", Gauge, POOL, "Bytes granted to volumes and not used yet"),
    metric("blockd_pool_pending_bytes", Gauge, POOL, "Bytes released and not reusable yet"),
    metric("blockd_pool_metadata_bytes", Gauge, POOL, "Bytes of metadata in use"),
    metric("blockd_pool_metadata_free_bytes", Gauge, POOL, "Bytes free for metadata"),
    metric(
        "blockd_pool_backing_free_bytes",
        Gauge,
        POOL,
        "Bytes free below the pool's sparse files, and on its other devices",
    ),
    metric("blockd_pool_promised_bytes", Gauge, POOL, "Sum of the sizes of the pool's volumes"),
    metric("blockd_pool_volumes", Gauge, POOL, "Volumes and snapshots of the pool"),
    metric("blockd_pool_snapshots", Gauge, POOL, "Snapshots of the pool"),
    metric(
        "blockd_pool_releasing_volumes",
        Gauge,
        POOL,
        "Deleted volumes whose space is still being reclaimed",
    ),
    metric(
        "blockd_pool_releasing_bytes",
        Gauge,
        POOL,
        "Bytes of these that are still to be reclaimed",
    ),
    metric(
        "blockd_pool_composite_extents",
        Gauge,
        POOL,
        "Composite entries of volumes and snapshots: places with two extents",
    ),
    metric("blockd_pool_folds_running", Gauge, POOL, "Folds in progress"),
    metric("blockd_pool_folded", Counter, POOL, "Composite entries that folds have made plain"),
    metric("blockd_pool_fold_bytes", Counter, POOL, "Bytes copied by folds"),
    metric("blockd_pool_folds_abandoned", Counter, POOL, "Folds that ended without a change"),
    metric(
        "blockd_pool_read_cache_limit_bytes",
        Gauge,
        POOL,
        "Bytes that the cache of shared blocks may hold; 0: it is off",
    ),
    metric(
        "blockd_pool_read_cache_bytes",
        Gauge,
        POOL,
        "Bytes that the cache of shared blocks holds",
    ),
    metric(
        "blockd_pool_read_cache_hits",
        Counter,
        POOL,
        "Pages of 4 KiB, or parts of one, that reads found in the cache of shared blocks",
    ),
    metric(
        "blockd_pool_read_cache_misses",
        Counter,
        POOL,
        "Pages of shared extents, or parts of one, that were read from the media for the cache",
    ),
    metric(
        "blockd_pool_read_cache_evictions",
        Counter,
        POOL,
        "Pages that made room for others in the cache of shared blocks",
    ),
    metric(
        "blockd_pool_read_cache_dropped",
        Counter,
        POOL,
        "Pages dropped from the cache of shared blocks as their extent was about to change",
    ),
    metric("blockd_pool_leaving_devices", Gauge, POOL, "Devices that are leaving or shrinking"),
    metric(
        "blockd_pool_evacuation_left_bytes",
        Gauge,
        POOL,
        "Bytes in use on the device that is leaving, or behind the new end of one that shrinks",
    ),
    metric(
        "blockd_pool_evacuation_moved_bytes",
        Counter,
        POOL,
        "Bytes copied off the device that is leaving or shrinking; from 0 for each device",
    ),
    metric(
        "blockd_pool_evacuation_errors",
        Counter,
        POOL,
        "Copies off this device that met an IO error, and are tried again",
    ),
    metric(
        "blockd_pool_evacuation_waits",
        Gauge,
        POOL,
        "1 when that device waits for free space elsewhere",
    ),
    metric("blockd_pool_rebalancing", Gauge, POOL, "1 while data is moved to emptier devices"),
    metric(
        "blockd_pool_rebalance_left_bytes",
        Gauge,
        POOL,
        "Bytes that are still to be moved to emptier devices",
    ),
    metric(
        "blockd_pool_rebalance_moved_bytes",
        Counter,
        POOL,
        "Bytes moved to emptier devices; from 0 for each rebalance",
    ),
    metric(
        "blockd_pool_rebalance_errors",
        Counter,
        POOL,
        "Copies of the rebalance that met an IO error, and are tried again",
    ),
    metric(
        "blockd_pool_rebalance_waits",
        Gauge,
        POOL,
        "1 when the rebalance waits while the pool is low",
    ),
    metric(
        "blockd_pool_space_state",
        Gauge,
        POOL,
        "State of the free space: 0 normal, 1 low, 2 very low, 3 full",
    ),
    metric("blockd_pool_low_bytes", Gauge, POOL, "Free bytes below which the pool is low"),
    metric(
        "blockd_pool_very_low_bytes",
        Gauge,
        POOL,
        "Free bytes below which the pool is very low",
    ),
    metric(
        "blockd_pool_write_rate_bytes",
        Gauge,
        POOL,
        "Bytes per second of first writes, averaged over ten seconds",
    ),
    metric(
        "blockd_pool_time_to_full_seconds",
        Gauge,
        POOL,
        "Seconds until the pool is full at that rate; absent while nothing is written",
    ),
    metric(
        "pmem_amount_total",
        Gauge,
        REGION,
        "Bytes of the region of persistent memory that the pool is in",
    ),
    metric("pmem_amount_managed", Gauge, REGION, "Bytes of these that volumes of the pool can use"),
    metric("pmem_amount_available", Gauge, REGION, "Bytes of these that are free"),
    metric(
        "pmem_amount_max_volume_size",
        Gauge,
        REGION,
        "Bytes of the largest volume that can be created",
    ),
    metric(
        "blockd_pmem_largest_piece_bytes",
        Gauge,
        REGION,
        "Bytes of the largest free piece in the pool's region",
    ),
    metric(
        "blockd_pmem_charged_bytes",
        Gauge,
        REGION,
        "Bytes that volumes take, including their overhead",
    ),
    metric(
        "blockd_pmem_scrubbing_bytes",
        Gauge,
        REGION,
        "Bytes of deleted volumes that become free once overwritten",
    ),
    metric("blockd_pmem_bad_bytes", Gauge, REGION, "Bytes of the region that are known to be bad"),
    metric("blockd_pool_set_aside_bytes", Gauge, POOL, "Bytes set aside for single volumes"),
    metric(
        "blockd_reserve_free_extents",
        Gauge,
        NODE,
        "Extents that the node holds for its volumes and has not used",
    ),
    metric(
        "blockd_reserve_refills",
        Counter,
        NODE,
        "Number of times that extents were granted to a volume",
    ),
    metric("blockd_pool_commits", Counter, POOL, "Finished commits"),
    metric("blockd_pool_flushes", Counter, POOL, "Flushes of the pool's devices"),
    metric("blockd_pool_metadata_writes", Counter, POOL, "Writes of metadata"),
    metric("blockd_pool_metadata_written_bytes", Counter, POOL, "Bytes of metadata written"),
    metric("blockd_pool_discards", Counter, POOL, "Discards sent to the pool's devices"),
    metric("blockd_pool_io_errors", Counter, POOL, "Failed IO operations of the pool's thread"),
    metric("blockd_pool_wakeups", Counter, POOL, "Wake-ups of the pool's thread"),
    metric(
        "blockd_pool_metadata_waiting_for_space",
        Gauge,
        POOL,
        "Metadata writes that wait for space below the pool",
    ),
    metric("blockd_volume_size_bytes", Gauge, VOLUME, "Size of the volume"),
    metric(
        "blockd_volume_mapped_bytes",
        Gauge,
        VOLUME,
        "Bytes of extents that the volume refers to",
    ),
    metric("blockd_volume_valid_bytes", Gauge, VOLUME, "Bytes written and not discarded"),
    metric(
        "blockd_volume_exclusive_bytes",
        Gauge,
        VOLUME,
        "Bytes of extents that only this volume refers to, as last counted",
    ),
    metric(
        "blockd_volume_shared_bytes",
        Gauge,
        VOLUME,
        "Bytes of extents that other volumes refer to as well, as last counted",
    ),
    metric(
        "blockd_volume_reserved_bytes",
        Gauge,
        VOLUME,
        "Bytes granted to the volume and not used yet",
    ),
    metric(
        "blockd_volume_refills",
        Counter,
        VOLUME,
        "Number of times that extents were granted to the volume",
    ),
    metric(
        "blockd_volume_refill_waits",
        Counter,
        VOLUME,
        "Number of times that writes waited because no granted extent was left",
    ),
    metric(
        "blockd_volume_passed_reserves",
        Counter,
        VOLUME,
        "Number of these waits although an extent was left: 0",
    ),
    metric("blockd_volume_attached", Gauge, VOLUME, "1 when the volume is attached"),
    metric("blockd_volume_connections", Gauge, VOLUME, "Clients that are connected to the volume"),
    metric(
        "blockd_volume_replicated_timestamp_seconds",
        Gauge,
        VOLUME,
        "When the newest snapshot was taken that `blockd replicate` has sent to any receiver, \
         in Unix time: `time()` less this is the lag of the last run",
    ),
    metric("blockd_requests", Counter, REQUEST, "Requests answered"),
    metric("blockd_request_bytes", Counter, REQUEST, "Bytes of requests answered"),
    metric("blockd_request_errors", Counter, REQUEST, "Requests answered with an error"),
    metric(
        "blockd_request_seconds",
        Times,
        STAGE,
        "Time of requests by stage: map (lookup, one request in 64), limit (held back by limits), \
         wait (parked, all tries of a request together), media, commit, total",
    ),
    metric("blockd_parked_requests", Gauge, VOLUME, "Requests that are parked now"),
    metric("blockd_parks", Counter, VOLUME, "Requests that were parked"),
    metric("blockd_starved_writes", Counter, VOLUME, "Writes that found no space below the pool"),
    metric("blockd_blocked_writes", Gauge, VOLUME, "Writes that wait for space now"),
    metric("blockd_refused_writes", Counter, VOLUME, "Writes that failed for lack of space"),
    metric(
        "blockd_throttled_writes",
        Counter,
        VOLUME,
        "Writes slowed down because the pool is nearly full",
    ),
    metric("blockd_throttle_seconds", Counter, VOLUME, "Time that writes were slowed down for"),
    metric("blockd_limited_requests", Counter, VOLUME, "Requests delayed by limits"),
    metric(
        "blockd_holds",
        Counter,
        HOLD,
        "Number of times that a connection or queue was held back before a request was taken, for: \
         turn (other volumes have their turn on the worker or the media), limit, space (a full \
         pool), memory",
    ),
    metric(
        "blockd_hold_seconds",
        Counter,
        HOLD,
        "Total time that connections and queues were held back",
    ),
    metric("blockd_held_back", Gauge, HOLD, "Connections and queues that are held back now"),
    metric(
        "blockd_pool_health_abnormal",
        Gauge,
        POOL,
        "1 when the pool has a fault of any severity",
    ),
    metric(
        "blockd_volume_health_abnormal",
        Gauge,
        VOLUME,
        "1 when the volume has a fault, or its pool has one that affects the volume",
    ),
    metric(
        "blockd_health_cause",
        Gauge,
        CAUSE,
        "1 for each fault of the volume, or of the pool if the volume is empty",
    ),
    metric(
        "blockd_volume_faults",
        Counter,
        FAULT,
        "Requests that failed because of devices or the pool: read, or write for all others",
    ),
    metric("blockd_device_errors", Counter, DEVICE_IO, "Failed IO operations of the device"),
    metric(
        "blockd_device_operations",
        Counter,
        DEVICE_IO,
        "Operations of the pool itself: log, metadata, folds; not those of clients",
    ),
    metric("blockd_device_bytes", Counter, DEVICE_IO, "Bytes that these read or write"),
    metric("blockd_device_io_seconds", Times, DEVICE, "Duration of IO operations of the device"),
    metric("blockd_worker_enters", Counter, WORKER, "System calls that entered io_uring"),
    metric("blockd_worker_media_operations", Counter, WORKER, "Operations sent to devices"),
    metric("blockd_worker_wakeups", Counter, WORKER, "Wake-ups of the worker by another thread"),
    metric("blockd_worker_connections", Gauge, WORKER, "Connections that the worker serves"),
    metric("blockd_worker_free_memory_bytes", Gauge, WORKER, "Bytes of IO memory that are free"),
    metric(
        "blockd_worker_memory_waits",
        Counter,
        WORKER,
        "Number of times that a connection waited for memory",
    ),
    metric(
        "blockd_worker_send_timeouts",
        Counter,
        WORKER,
        "Connections closed as the client did not read its replies",
    ),
    metric(
        "blockd_worker_receive_timeouts",
        Counter,
        WORKER,
        "Connections closed as the client stopped in the middle of a request",
    ),
    metric(
        "blockd_worker_idle_timeouts",
        Counter,
        WORKER,
        "Connections closed as the client sent no request",
    ),
    metric("blockd_listener_accepted", Counter, LISTENER, "Connections accepted"),
    metric("blockd_listener_negotiated", Counter, LISTENER, "Connections passed to a worker"),
    metric("blockd_listener_timed_out", Counter, LISTENER, "Handshakes that took too long"),
    metric("blockd_listener_displaced", Counter, LISTENER, "Handshakes ended to make room"),
    metric("blockd_listener_failed", Counter, LISTENER, "Handshakes ended for another reason"),
    metric(
        "blockd_listener_peer_refused",
        Counter,
        LISTENER,
        "Connections closed at once, as their host had max_connections_per_peer",
    ),
    metric(
        "blockd_listener_full_refused",
        Counter,
        LISTENER,
        "Connections refused, as there were max_connections and none was idle",
    ),
    metric(
        "blockd_listener_idle_displaced",
        Counter,
        LISTENER,
        "Idle connections closed to make room for new ones",
    ),
    metric("blockd_listener_handshakes", Gauge, LISTENER, "Handshakes under way"),
];
