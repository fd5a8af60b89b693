//! The values of a scrape.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockd_control::node::NodeId;
use blockd_control::pool::{PoolSpace, space as space_of};
use blockd_control::services::Control;
use blockd_engine::pool::{PoolHandle, RebalanceState, VolumeId};
use blockd_engine::schedule::Hold;
use blockd_engine::stats::{MediaOp, Op, Stage, VolumeStats};
use blockd_mapper::format::catalogue::VolumeKind;
use blockd_media::names::REPLICATED_LABEL;
use blockd_serve::nbd::listener::ListenerStats;

use super::figures::Figures;
use crate::metrics::{Snapshot, node_name};

/// A listener's address and counters.
pub(super) type Listening = (String, Arc<ListenerStats>);

/// All present counts. Queries pool threads, and waits for them.
pub(super) async fn collect(
    control: &Control,
    listeners: &[Listening],
    figures: &Figures,
) -> Snapshot {
    let mut snapshot = Snapshot::default();
    let is_ready = u64::from(control.is_ready());
    snapshot.set("blockd_build", &[env!("CARGO_PKG_VERSION")], 1);
    snapshot.set("build_info", &[env!("CARGO_PKG_VERSION")], 1);
    snapshot.set("blockd_ready", &[], is_ready);
    snapshot.set("blockd_start_time_seconds", &[], control.started_unix_seconds());
    let resident = u64::try_from(control.resident_bytes()).unwrap_or(0);
    snapshot.set("blockd_resident_bytes", &[], resident);
    if let Some(devices) = control.ublk() {
        let stats = devices.stats();
        let count = u64::try_from(devices.served()).unwrap_or(u64::MAX);
        snapshot.set("blockd_ublk_devices", &[], count);
        let ready = u64::try_from(devices.ready()).unwrap_or(u64::MAX);
        snapshot.set("blockd_ublk_ready_devices", &[], ready);
        let recoveries = stats.recoveries.load(Ordering::Relaxed);
        snapshot.set("blockd_ublk_recoveries", &[], recoveries);
        snapshot.set("blockd_ublk_hangs", &[], stats.hangs.load(Ordering::Relaxed));
    }
    pools(&mut snapshot, control, figures).await;
    direct(&mut snapshot, control).await;
    requests(&mut snapshot, &control.data_path().volume_stats());
    health(&mut snapshot, control);
    for stats in control.data_path().worker_stats() {
        let worker = stats.worker.to_string();
        let mut set = |name, value| snapshot.set(name, &[worker.as_str()], value);
        set("blockd_worker_enters", stats.enters.get());
        set("blockd_worker_media_operations", stats.media_operations.get());
        set("blockd_worker_wakeups", stats.wakeups.get());
        set("blockd_worker_connections", stats.connections.get());
        set("blockd_worker_free_memory_bytes", stats.free_memory.get());
        set("blockd_worker_memory_waits", stats.memory_waits.get());
        set("blockd_worker_send_timeouts", stats.send_timeouts.get());
        set("blockd_worker_receive_timeouts", stats.receive_timeouts.get());
        set("blockd_worker_idle_timeouts", stats.idle_timeouts.get());
    }
    for (address, stats) in listeners {
        let mut set = |name, value: &std::sync::atomic::AtomicU64| {
            snapshot.set(name, &[address.as_str()], value.load(Ordering::Relaxed));
        };
        set("blockd_listener_accepted", &stats.accepted);
        set("blockd_listener_negotiated", &stats.negotiated);
        set("blockd_listener_timed_out", &stats.timed_out);
        set("blockd_listener_displaced", &stats.displaced);
        set("blockd_listener_failed", &stats.failed);
        set("blockd_listener_peer_refused", &stats.peer_refused);
        set("blockd_listener_full_refused", &stats.full_refused);
        set("blockd_listener_idle_displaced", &stats.idle_displaced);
        set("blockd_listener_handshakes", &stats.handshakes);
    }
    snapshot
}

/// Pools, and their volumes.
async fn pools(snapshot: &mut Snapshot, control: &Control, figures: &Figures) {
    let mut clients: BTreeMap<([u8; 16], VolumeId), u64> = BTreeMap::new();
    for one in control.data_path().connections() {
        *clients.entry((one.pool, one.volume)).or_default() += 1;
    }
    for known in control.known_pools() {
        let name = known.config.name.as_str();
        let serves = known.failure().is_none();
        snapshot.set("blockd_pool_up", &[name], serves.into());
        snapshot.set("blockd_pool_closed", &[name], known.is_closed().into());
        snapshot.set("blockd_pool_missing", &[name], known.is_missing().into());
        let Ok(handle) = &known.state else { continue };
        counters(snapshot, handle);
        devices(snapshot, handle);
        if serves {
            space(snapshot, handle, control.node()).await;
        }
        let counted = figures.of(handle).await;
        for volume in handle.mapper().summaries() {
            let connections = clients.get(&(handle.id(), volume.id)).copied().unwrap_or(0);
            let attached = control.is_attached(name, &volume.name);
            let labels = [name, volume.name.as_str()];
            let mut set = |name, value| snapshot.set(name, &labels, value);
            set("blockd_volume_size_bytes", volume.size);
            set("blockd_volume_mapped_bytes", volume.mapped);
            set("blockd_volume_valid_bytes", volume.valid);
            if let Some(figures) = counted.get(&volume.id) {
                set("blockd_volume_exclusive_bytes", figures.exclusive);
                set("blockd_volume_shared_bytes", figures.shared);
            }
            set("blockd_volume_reserved_bytes", volume.reserved);
            set("blockd_volume_refills", volume.grants);
            set("blockd_volume_refill_waits", volume.grant_waits);
            set("blockd_volume_passed_reserves", volume.passed_reserves);
            set("blockd_volume_attached", attached.into());
            set("blockd_volume_connections", connections);
            let replicated = volume.labels.get(REPLICATED_LABEL);
            if let Some(ms) = replicated.and_then(|ms| ms.parse::<u64>().ok()) {
                set("blockd_volume_replicated_timestamp_seconds", ms / 1000);
            }
        }
    }
}

/// Pools whose volumes are namespaces.
async fn direct(snapshot: &mut Snapshot, control: &Control) {
    let Ok(pools) = control.direct_views(None).await else { return };
    for pool in pools {
        let name = pool.name.as_str();
        snapshot.set("blockd_pool_up", &[name], pool.failure.is_none().into());
        snapshot.set("blockd_pool_volumes", &[name], pool.volumes as u64);
        snapshot.set("blockd_pool_promised_bytes", &[name], pool.promised);
        let labels = [name, pool.region.as_str()];
        let mut set = |metric, value| snapshot.set(metric, &labels, value);
        set("blockd_pmem_charged_bytes", pool.charged);
        set("blockd_pmem_scrubbing_bytes", pool.scrubbing);
        let Some(space) = pool.space else { continue };
        set("pmem_amount_total", space.total);
        // All blocks that no other volume has.
        set("pmem_amount_managed", pool.charged.saturating_add(space.available));
        set("pmem_amount_available", space.available);
        set("pmem_amount_max_volume_size", space.largest_volume);
        set("blockd_pmem_largest_piece_bytes", space.largest_piece);
        set("blockd_pmem_bad_bytes", space.bad_bytes);
        snapshot.set("blockd_pool_size_bytes", &[name], space.total);
        snapshot.set("blockd_pool_free_bytes", &[name], space.available);
    }
}

fn counters(snapshot: &mut Snapshot, pool: &PoolHandle) {
    let stats = pool.stats();
    let mut set = |name, value: &std::sync::atomic::AtomicU64| {
        snapshot.set(name, &[pool.name()], value.load(Ordering::Relaxed));
    };
    set("blockd_pool_commits", &stats.commits);
    set("blockd_pool_flushes", &stats.flushes);
    set("blockd_pool_metadata_writes", &stats.writes);
    set("blockd_pool_metadata_written_bytes", &stats.written_bytes);
    set("blockd_pool_discards", &stats.discards);
    set("blockd_pool_io_errors", &stats.io_errors);
    set("blockd_pool_wakeups", &stats.wakeups);
    set("blockd_pool_metadata_waiting_for_space", &stats.waiting_for_space);
}

/// The share of a pool of extents in its region (P49), where that has a cookie to be named by.
fn region(snapshot: &mut Snapshot, pool: &PoolHandle, space: &PoolSpace) {
    let pmem = pool.devices().into_iter().find_map(|device| device.pmem);
    let Some(site) = pmem.map(|pmem| pmem.site).filter(|site| site.region != 0) else { return };
    let key = format!("{:#x}", site.region);
    let mut set = |name, value| snapshot.set(name, &[pool.name(), &key], value);
    if let Some(total) = site.region_size() {
        set("pmem_amount_total", total);
    }
    set("pmem_amount_managed", space.pool.total);
    set("pmem_amount_available", space.available());
    // Extents need not be next to each other.
    set("pmem_amount_max_volume_size", space.available());
}

/// Figures of a pool's cache of shared blocks.
fn read_cache(snapshot: &mut Snapshot, pool: &PoolHandle) {
    let mut set = |name, value| snapshot.set(name, &[pool.name()], value);
    let cache = pool.mapper().read_cache_status();
    set("blockd_pool_read_cache_limit_bytes", cache.limit);
    set("blockd_pool_read_cache_bytes", cache.bytes);
    set("blockd_pool_read_cache_hits", cache.hits);
    set("blockd_pool_read_cache_misses", cache.misses);
    set("blockd_pool_read_cache_evictions", cache.evictions);
    set("blockd_pool_read_cache_dropped", cache.dropped);
}

async fn space(snapshot: &mut Snapshot, pool: &PoolHandle, node: Option<NodeId>) {
    let Ok(space) = space_of(pool).await else { return };
    let held = space.pool.reserved / pool.extent_size().max(1);
    let refills = pool.mapper().grants();
    let called = node.map(|node| node.to_string()).unwrap_or_default();
    snapshot.set("blockd_reserve_free_extents", &[pool.name(), &called], held);
    snapshot.set("blockd_reserve_refills", &[pool.name(), &called], refills);
    if let Some(node) = node {
        snapshot.set_named(node_name(pool.id(), node, "free"), held);
        snapshot.set_named(node_name(pool.id(), node, "allocations"), refills);
    }
    read_cache(snapshot, pool);
    let mut set = |name, value| snapshot.set(name, &[pool.name()], value);
    set("blockd_pool_size_bytes", space.pool.total);
    set("blockd_pool_free_bytes", space.free());
    set("blockd_pool_mapped_bytes", space.pool.mapped);
    set("blockd_pool_reserved_bytes", space.pool.reserved);
    set("blockd_pool_pending_bytes", space.pool.pending);
    set("blockd_pool_metadata_bytes", space.pool.metadata);
    set("blockd_pool_metadata_free_bytes", space.pool.metadata_free);
    if let Some(free) = space.backing_free {
        set("blockd_pool_backing_free_bytes", free);
    }
    region(snapshot, pool, &space);
    let mut set = |name, value| snapshot.set(name, &[pool.name()], value);
    let volumes = pool.mapper().summaries();
    set("blockd_pool_promised_bytes", pool.mapper().sums().promised);
    set("blockd_pool_volumes", volumes.len() as u64);
    let snapshots = volumes.iter().filter(|one| one.kind == VolumeKind::Snapshot).count();
    set("blockd_pool_snapshots", snapshots as u64);
    set("blockd_pool_releasing_volumes", space.releasing_volumes);
    set("blockd_pool_releasing_bytes", space.releasing);
    if let Ok(folds) = pool.folds(false).await {
        set("blockd_pool_composite_extents", folds.composite);
        set("blockd_pool_folds_running", folds.running);
        set("blockd_pool_folded", folds.folded);
        set("blockd_pool_fold_bytes", folds.bytes);
        set("blockd_pool_folds_abandoned", folds.abandoned);
    }
    if let Ok(evacuation) = pool.evacuation(None).await {
        set("blockd_pool_leaving_devices", evacuation.device.is_some().into());
        set("blockd_pool_evacuation_left_bytes", evacuation.left);
        set("blockd_pool_evacuation_moved_bytes", evacuation.moved);
        set("blockd_pool_evacuation_errors", evacuation.errors);
        set("blockd_pool_evacuation_waits", evacuation.waits_for_space.into());
    }
    if let Ok(rebalance) = pool.rebalance().await {
        let is_running = rebalance.state == RebalanceState::Running;
        set("blockd_pool_rebalancing", is_running.into());
        set("blockd_pool_rebalance_left_bytes", rebalance.left);
        set("blockd_pool_rebalance_moved_bytes", rebalance.moved);
        set("blockd_pool_rebalance_errors", rebalance.errors);
        set("blockd_pool_rebalance_waits", rebalance.waits_for_space.into());
    }
    let now = &space.now;
    set("blockd_pool_space_state", now.state as u64);
    set("blockd_pool_low_bytes", now.low);
    set("blockd_pool_very_low_bytes", now.very_low);
    set("blockd_pool_write_rate_bytes", now.average);
    // The seconds until the pool is full at the present rate; without a rate the line is left out.
    if let Some(seconds) = now.seconds_to_full {
        set("blockd_pool_time_to_full_seconds", seconds);
    }
    let set_aside = volumes.iter().map(|one| one.settings.set_aside(one.size)).sum();
    set("blockd_pool_set_aside_bytes", set_aside);
}

/// The health of pools and volumes; waits for no other thread.
fn health(snapshot: &mut Snapshot, control: &Control) {
    for one in control.health_summaries() {
        let (pool, volume) = (one.pool.as_str(), one.volume.as_str());
        let abnormal = u64::from(one.abnormal);
        match volume {
            "" => snapshot.set("blockd_pool_health_abnormal", &[pool], abnormal),
            _ => snapshot.set("blockd_volume_health_abnormal", &[pool, volume], abnormal),
        }
        // Two devices of a pool may have the same.
        let causes: std::collections::BTreeSet<_> = one.causes.iter().collect();
        for (code, severity) in causes {
            snapshot.set("blockd_health_cause", &[pool, volume, code, severity], 1);
        }
    }
}

/// The statistics of a pool's devices.
fn devices(snapshot: &mut Snapshot, pool: &PoolHandle) {
    let media = pool.media_stats();
    for (at, device) in pool.used_devices() {
        let path = device.info().path.display().to_string();
        let seen: Vec<_> = media.iter().filter_map(|one| one.device(at)).collect();
        for op in MediaOp::ALL {
            let errors = seen.iter().map(|one| one.errors[op as usize].get()).sum();
            let labels = [pool.name(), &path, op.name()];
            snapshot.set("blockd_device_errors", &labels, errors);
            let sent = seen.iter().map(|one| one.sent[op as usize].get()).sum();
            snapshot.set("blockd_device_operations", &labels, sent);
            let bytes = seen.iter().map(|one| one.bytes[op as usize].get()).sum();
            snapshot.set("blockd_device_bytes", &labels, bytes);
        }
        let latencies = seen.iter().map(|one| &one.latency);
        snapshot.times("blockd_device_io_seconds", &[pool.name(), &path], latencies);
    }
}

fn requests(snapshot: &mut Snapshot, all: &[Arc<VolumeStats>]) {
    let mut volumes: BTreeMap<(String, String), Vec<&VolumeStats>> = BTreeMap::new();
    for stats in all {
        volumes.entry((stats.pool.get(), stats.volume.get())).or_default().push(stats);
    }
    for ((pool, volume), workers) in &volumes {
        let (pool, volume) = (pool.as_str(), volume.as_str());
        let sum = |of: &dyn Fn(&VolumeStats) -> u64| workers.iter().map(|one| of(one)).sum();
        for op in Op::ALL {
            let labels = [pool, volume, op.name()];
            snapshot.set("blockd_requests", &labels, sum(&|one| one.op(op).0.get()));
            snapshot.set("blockd_request_bytes", &labels, sum(&|one| one.op(op).1.get()));
            snapshot.set("blockd_request_errors", &labels, sum(&|one| one.op(op).2.get()));
        }
        for (at, operation) in ["read", "write"].into_iter().enumerate() {
            let faults = sum(&|one| one.faults[at].get());
            snapshot.set("blockd_volume_faults", &[pool, volume, operation], faults);
        }
        for stage in Stage::ALL {
            let histograms = workers.iter().map(|one| one.stage(stage));
            snapshot.times("blockd_request_seconds", &[pool, volume, stage.name()], histograms);
        }
        let labels = [pool, volume];
        snapshot.set("blockd_parked_requests", &labels, sum(&|one| one.parked.get()));
        snapshot.set("blockd_parks", &labels, sum(&|one| one.parks.get()));
        snapshot.set("blockd_starved_writes", &labels, sum(&|one| one.starved.get()));
        snapshot.set("blockd_blocked_writes", &labels, sum(&|one| one.blocked.get()));
        snapshot.set("blockd_refused_writes", &labels, sum(&|one| one.refused.get()));
        snapshot.set("blockd_throttled_writes", &labels, sum(&|one| one.slowed.get()));
        let slowed = sum(&|one| one.slowed_ns.get());
        snapshot.set_ns("blockd_throttle_seconds", &labels, slowed);
        snapshot.set("blockd_limited_requests", &labels, sum(&|one| one.limited.get()));
        for hold in Hold::ALL {
            let (at, labels) = (hold as usize, [pool, volume, hold.name()]);
            snapshot.set("blockd_holds", &labels, sum(&|one| one.held[at].get()));
            let held_ns = sum(&|one| one.held_ns[at].get());
            snapshot.set_ns("blockd_hold_seconds", &labels, held_ns);
            snapshot.set("blockd_held_back", &labels, sum(&|one| one.held_now[at].get()));
        }
    }
}
