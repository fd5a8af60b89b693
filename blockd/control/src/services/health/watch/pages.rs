//! The findings about pools and volumes: from one look, and from the state that is kept between
//! looks.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockd_engine::pool::{PoolHandle, VolumeId};
use blockd_engine::stats::{Counter, VolumeStats};
use blockd_mapper::engine::VolumeSummary;
use blockd_mapper::error::MapperError;
use blockd_mapper::units::DeviceIndex;
use blockd_media::error::shown;
use blockd_media::finding::{Code, Finding, Severity};

use super::suspects::{Present, Sums};
use super::{BAD_BLOCKS_PAUSE, Book, Pages};
use crate::health::{Latencies, Moment, Notice, Subject, Tally};
use crate::services::Known;
use crate::services::health::device::DeviceLook;
use crate::services::health::find::{self, SpaceSeen};
use crate::services::pools::reason;

/// Volumes of which IO errors are remembered beyond those that there are: more were deleted, and
/// their counters are gone.
const MAX_TALLIES: usize = 1 << 16;

impl Present {
    pub(super) fn name(&self) -> &str {
        &self.known.config.name
    }

    /// The pool that serves, or why none does: the event, its kind, and whether it was open before.
    /// `None` when it was closed in order.
    fn served(&self) -> Option<Result<&PoolHandle, (String, &'static str, bool)>> {
        match &self.known.state {
            Err(failure) => Some(Err((failure.clone(), self.known.reason, false))),
            Ok(handle) => match handle.mapper().failure() {
                None => Some(Ok(handle)),
                Some(MapperError::Closed) => None,
                Some(error) => Some(Err((error.to_string(), reason(&error), true))),
            },
        }
    }
}

impl Pages {
    pub(super) fn look(
        &mut self,
        book: &Book,
        now: Moment,
        present: &Present,
        sums: &Sums,
        notices: &mut Vec<Notice>,
    ) {
        let pool = present.name();
        if present.known.is_closed() {
            // On request: nothing is wrong with it, and its volumes are not looked at.
            let absent = present.absent.iter().map(String::as_str);
            for subject in std::iter::once("").chain(absent) {
                self.note(now, pool, subject, Vec::new(), notices);
            }
            return;
        }
        let Some(served) = present.served() else { return };
        let mut found = Vec::new();
        match &served {
            Err((failure, reason, was_open)) => {
                found.push(find::failed(pool, failure, reason, *was_open));
            }
            Ok(handle) => found.extend(self.of_pool(book, now, handle)),
        }
        // After a failure it is the devices that say why.
        if let Ok(handle) = &present.known.state {
            found.extend(self.of_devices(book, now, handle));
        }
        let mine = sums.iter().filter(|((name, _), _)| name == pool).map(|(_, sum)| sum);
        let (writes, ns) = mine.fold((0_u64, 0), |(writes, ns), sum| {
            (writes.saturating_add(sum.blocked), sum.blocked_ns.max(ns))
        });
        if writes > 0 {
            let what = format!("pool {}", shown(pool));
            found.push(find::blocked(&what, writes, ns / 1_000_000_000));
        }
        self.note(now, pool, "", found, notices);
        for volume in &present.volumes {
            let found = self.of_volume(now, present, volume, sums);
            self.note(now, pool, &volume.name, found, notices);
        }
        // Nothing else is known of a pool that is not open.
        let is_open = present.known.state.is_ok();
        for volume in &present.absent {
            let missing = is_open.then(|| find::missing(pool, volume));
            self.note(now, pool, volume, missing.into_iter().collect(), notices);
        }
    }

    fn note(
        &mut self,
        now: Moment,
        pool: &str,
        volume: &str,
        found: Vec<Finding>,
        notices: &mut Vec<Notice>,
    ) {
        for one in &found {
            let (code, severity) = (one.code.name(), one.severity.name());
            tracing::debug!(pool, volume, code, severity, device = one.device, "found");
        }
        let subject = Subject { pool: pool.to_owned(), volume: volume.to_owned() };
        self.ledger.look(now, &subject, found, notices);
    }

    /// The findings about an open pool, without those about its devices.
    fn of_pool(&self, book: &Book, now: Moment, handle: &PoolHandle) -> Vec<Finding> {
        let (pool, mut found) = (handle.name(), Vec::new());
        if handle.is_read_only() {
            found.push(find::read_only(pool));
        }
        if handle.is_claim_late() {
            found.push(find::claim_late(pool));
        }
        let Some(seen) = self.seen.get(pool) else { return found };
        let (late_ns, age) = (book.late_ns(), |then: u64| now.ns.saturating_sub(then));
        for (who, then) in [("pool-thread", seen.heard_ns), ("devices", seen.looked_ns)] {
            if age(then) > late_ns {
                found.push(find::late(pool, who, age(then) / 1_000_000_000));
                // Two of one code are one.
                break;
            }
        }
        if let Some((own, space)) = seen.space {
            let metadata_waiting = handle.stats().waiting_for_space.load(Ordering::Relaxed);
            let seen = SpaceSeen { own, now: space, below: seen.below, metadata_waiting };
            found.extend(find::of_space(pool, &seen));
        }
        found
    }

    fn of_devices(&mut self, book: &Book, now: Moment, handle: &PoolHandle) -> Vec<Finding> {
        let (pool, media, mut found) = (handle.name(), handle.media_stats(), Vec::new());
        let threshold = book.options.slow_io;
        let threshold = u64::try_from(threshold.as_nanos()).unwrap_or(u64::MAX);
        for (at, device) in handle.used_devices() {
            let path = device.info().path.display().to_string();
            let look = self.seen.get(pool).and_then(|seen| seen.devices.get(at));
            if let Some((reason, problem)) = look.and_then(|look| look.gone.as_ref()) {
                found.push(find::device_gone(&path, reason, problem));
            }
            let bad = look.map_or(0, |look| look.bad.sectors());
            if bad > 0 {
                found.push(find::device_bad_blocks(&path, bad));
            }
            let (mut errors, mut last) = ([0_u64; 3], 0);
            let (mut latencies, mut oldest) = (Latencies::new(), 0);
            for (seen, stats) in media.iter().filter_map(|one| Some((one, one.device(at)?))) {
                for (sum, counter) in errors.iter_mut().zip(&stats.errors) {
                    *sum = sum.saturating_add(counter.get());
                }
                last = if stats.last_errno.get() != 0 { stats.last_errno.get() } else { last };
                oldest = seen.oldest_ns(at).max(oldest);
                for (upper, count) in stats.latency.buckets().filter(|bucket| bucket.1 > 0) {
                    *latencies.entry(upper).or_default() += count;
                }
            }
            let goes_on = self.holds(pool, "", Code::DeviceErrors, &path);
            let key = (pool.to_owned(), at);
            let tally = self.devices.entry(key.clone()).or_default();
            if let Some(errors) = tally.look(errors, goes_on) {
                found.push(find::device_errors(&path, errors, last));
            }
            let watch = self.slow.entry(key).or_default();
            if threshold > 0
                && let Some((ns, is_stuck)) = watch.look(now.ns, &latencies, oldest, threshold)
            {
                found.push(find::device_slow(&path, ns, is_stuck, threshold));
            }
        }
        found
    }

    /// Whether a cause is there already.
    fn holds(&self, pool: &str, volume: &str, code: Code, device: &str) -> bool {
        let subject = Subject { pool: pool.to_owned(), volume: volume.to_owned() };
        self.ledger.state(&subject).is_some_and(|state| state.has(code, device))
    }

    fn of_volume(
        &mut self,
        now: Moment,
        present: &Present,
        volume: &VolumeSummary,
        sums: &Sums,
    ) -> Vec<Finding> {
        let (pool, name) = (present.name(), &volume.name);
        let mut found = Vec::new();
        if let Some(problem) = present.problems.get(&volume.id) {
            found.push(find::not_served(name, problem));
        }
        let key = (pool.to_owned(), name.clone());
        let sum = sums.get(&key).copied().unwrap_or_default();
        if sum.faults != [0; 2] {
            let goes_on = self.holds(pool, name, Code::IoErrors, "");
            let (id, tally) =
                self.volumes.entry(key).or_insert_with(|| (volume.id.0, Tally::default()));
            if *id != volume.id.0 {
                // The counters are by name: those of another volume that had it are not its own.
                *id = volume.id.0;
                tally.forget();
            }
            if let Some(faults) = tally.look(sum.faults, goes_on) {
                found.push(find::io_errors(name, faults));
            }
        }
        if let Ok(handle) = &present.known.state {
            found.extend(find::quota(volume, handle.extent_size()));
        }
        // The same figure as `blockd_blocked_writes`: the mapper's mark of a volume that ran out of
        // space stays when the write that waited has ended otherwise.
        let writes = sum.blocked;
        if writes > 0 {
            let what = format!("volume {}", shown(name));
            found.push(find::blocked(&what, writes, sum.blocked_ns / 1_000_000_000));
        }
        let met = self.seen.get(pool).map(|seen| seen.met.as_slice()).unwrap_or_default();
        if let Some((_, extents)) = met.iter().find(|(id, _)| *id == volume.id) {
            found.push(find::volume_bad_blocks(name, *extents));
        }
        tracing::trace!(pool, volume = name, id = volume.id.0, at = now.unix_ms, "looked at");
        found
    }

    /// Forgets volumes that are gone.
    pub(super) fn forget(&mut self, is_there: impl Fn(&str, &str) -> bool, sums: &Sums) {
        self.ledger.retain(|one| is_there(&one.pool, &one.volume));
        let many = self.volumes.len() > MAX_TALLIES;
        self.volumes.retain(|key, _| is_there(&key.0, &key.1) || (sums.contains_key(key) && !many));
    }

    pub(super) fn acknowledge(
        &mut self,
        now: Moment,
        known: &Known,
        volume: &str,
        sums: &Sums,
        notices: &mut Vec<Notice>,
    ) -> bool {
        let pool = &known.config.name;
        let mut changed = false;
        let mut names = BTreeSet::new();
        if !volume.is_empty() {
            names.insert(volume.to_owned());
        } else {
            let counted = sums.keys().filter(|(of, _)| of == pool).map(|(_, name)| name.as_str());
            names.extend(self.ledger.unsettled(pool).chain(counted).map(str::to_owned));
            names.insert(String::new());
            if let Ok(handle) = &known.state {
                for at in 0..handle.open_devices().count() {
                    let tally = self.devices.entry((pool.clone(), at)).or_default();
                    tally.acknowledge(errors_of(handle, at));
                }
            }
        }
        for name in names {
            let found = known.state.as_ref().ok().and_then(|handle| handle.mapper().find(&name));
            if found.is_none() && !name.is_empty() {
                continue;
            }
            let key = (pool.clone(), name.clone());
            if let (Some(volume), Some(sum)) = (found, sums.get(&key)) {
                let tally = self.volumes.entry(key);
                let tally = tally.or_insert_with(|| (volume.id.0, Tally::default()));
                tally.1.acknowledge(sum.faults);
            }
            let subject = Subject { pool: pool.clone(), volume: name };
            changed |= self.ledger.acknowledge(now, &subject, notices);
        }
        changed
    }
}

/// Errors of a device that were counted by all threads.
fn errors_of(handle: &PoolHandle, device: usize) -> [u64; 3] {
    let mut errors = [0_u64; 3];
    for media in handle.media_stats() {
        let Some(stats) = media.device(device) else { continue };
        for (sum, counter) in errors.iter_mut().zip(&stats.errors) {
            *sum = sum.saturating_add(counter.get());
        }
    }
    errors
}

/// How many extents of which volumes the bad blocks of devices meet: found out anew when that was
/// long ago.
pub(super) fn meet(
    pool: &PoolHandle,
    devices: &[DeviceLook],
    now: u64,
    met: Vec<(VolumeId, u64)>,
    met_ns: u64,
) -> (Vec<(VolumeId, u64)>, u64) {
    if devices.iter().all(|look| look.bad.runs.is_empty()) {
        return (Vec::new(), 0);
    }
    if met_ns > 0 && Duration::from_nanos(now.saturating_sub(met_ns)) < BAD_BLOCKS_PAUSE {
        return (met, met_ns);
    }
    let mut places = Vec::new();
    for (at, look) in devices.iter().enumerate() {
        let Ok(at) = u8::try_from(at) else { break };
        let extents = look.bad.extents(pool.extent_size());
        places.extend(extents.into_iter().map(|(first, count)| (DeviceIndex(at), first, count)));
    }
    (pool.mapper().who_maps(&places), now)
}

/// Adds the counters of one worker and volume, if any of them is not 0.
pub(super) fn add_counters(sums: &mut Sums, stats: &VolumeStats) {
    let faults = stats.faults.each_ref().map(Counter::get);
    let (blocked, blocked_ns) = (stats.blocked.get(), stats.blocked_ns.get());
    if faults == [0; 2] && blocked == 0 {
        return;
    }
    let sum = sums.entry((stats.pool.get(), stats.volume.get())).or_default();
    sum.faults = std::array::from_fn(|at| sum.faults[at].saturating_add(faults[at]));
    sum.blocked = sum.blocked.saturating_add(blocked);
    sum.blocked_ns = sum.blocked_ns.max(blocked_ns);
}

/// Whether a pool's cause is one of a volume's as well. A volume that has all of its space, or
/// needs none, is not affected by a lack of it.
pub(in super::super) fn touches(code: Code, volume: &VolumeSummary) -> bool {
    use blockd_mapper::format::catalogue::VolumeKind;
    let is_volume = volume.kind == VolumeKind::Volume;
    match code {
        Code::SpaceLow | Code::SpaceVeryLow | Code::SpaceFull => {
            is_volume && volume.settings.set_aside(volume.size) < volume.size
        }
        Code::PoolReadOnly | Code::MetadataLow => is_volume,
        // These are reported for each volume that they are about.
        Code::WritesBlocked | Code::BadBlocks => false,
        _ => true,
    }
}

/// The severity as it is sent; 0 for healthy.
pub(in super::super) fn wire(severity: Option<Severity>) -> i32 {
    severity.map_or(0, |severity| severity.wire().into())
}
