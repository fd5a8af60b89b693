//! Looks at all pools and volumes now and then, and keeps what it finds.
//!
//! The watch reads only data that is there already: counters of threads that do IO, the space as
//! pools' threads report it, and sysfs. No thread waits for it, and it waits for none for long: a
//! pool that does not answer is reported as late.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockd_engine::pool::{PoolHandle, SpaceNow, VolumeId};
use blockd_engine::stats::{Counter, VolumeStats};
use blockd_mapper::engine::VolumeSummary;
use blockd_mapper::error::MapperError;
use blockd_mapper::pool::Space;
use blockd_mapper::units::DeviceIndex;
use blockd_media::clock::{Clock, wall_ms};
use blockd_media::error::{Error, shown};
use blockd_media::finding::{Code, Finding, Severity};
use parking_lot::Mutex;
use tokio::task::JoinSet;

use crate::config::HealthConfig;
use crate::health::{
    BadBlocks, Latencies, Ledger, Moment, Notice, Rules, SlowWatch, Subject, Tally,
};

use super::super::attachments::Record;
use super::super::pools::reason;
use super::super::{Control, EventKind, Known};
use super::device::{DeviceLook, SYSFS, look_at};
use super::find::{self, SpaceSeen};

/// How long a look waits for pools' threads and the operating system. A thread that takes longer is
/// looked at the next time.
const GRACE: Duration = Duration::from_millis(500);
/// A pool that has not answered for this many intervals is late,
const LATE_INTERVALS: u32 = 3;
/// and for at least this long: a busy host makes a thread wait for seconds.
const LEAST_LATE: Duration = Duration::from_secs(15);
/// How often it is found out which volumes bad blocks meet, which takes time with what is mapped.
const BAD_BLOCKS_PAUSE: Duration = Duration::from_secs(60);
/// The beginning of a cause that comes and goes is reported no more often.
const NOTIFY: Duration = Duration::from_secs(60);
/// Volumes of which IO errors are remembered beyond those that there are: more were deleted, and
/// their counters are gone.
const MAX_TALLIES: usize = 1 << 16;

/// All that is known of what is wrong.
pub(in super::super) struct Book {
    pub(super) options: HealthConfig,
    clock: Clock,
    pub(super) pages: Mutex<Pages>,
}

/// State that is kept from one look to the next.
pub(super) struct Pages {
    pub(super) ledger: Ledger,
    seen: BTreeMap<String, Seen>,
    slow: BTreeMap<(String, usize), SlowWatch>,
    devices: BTreeMap<(String, usize), Tally<3>>,
    volumes: BTreeMap<(String, String), (u32, Tally<2>)>,
}

/// The last answers about a pool.
#[derive(Default)]
struct Seen {
    space: Option<(Space, SpaceNow)>,
    heard_ns: u64,
    /// A question is on its way.
    is_asked: bool,
    devices: Vec<DeviceLook>,
    below: Option<u64>,
    /// How many extents of which volumes bad blocks meet, and when that was found out.
    met: Vec<(VolumeId, u64)>,
    met_ns: u64,
    looked_ns: u64,
    is_looked_at: bool,
    /// The superblocks of the devices are being read.
    is_compared: bool,
}

/// The pools and volumes at the moment of a look.
struct Present {
    known: Known,
    summaries: Vec<VolumeSummary>,
    attached: Vec<Record>,
    /// Why block devices are not served.
    problems: BTreeMap<VolumeId, String>,
}

/// Counters of a volume, over all workers.
#[derive(Clone, Copy, Default)]
struct VolumeSum {
    faults: [u64; 2],
    blocked: u64,
    blocked_ns: u64,
}

impl std::fmt::Debug for Book {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Book").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Book {
    pub(in super::super) fn new(options: &HealthConfig) -> Self {
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let rules = Rules {
            hold_ns: ns(options.hold),
            errors_hold_ns: ns(options.errors_hold),
            notify_ns: ns(NOTIFY),
        };
        let pages = Pages {
            ledger: Ledger::new(rules),
            seen: BTreeMap::new(),
            slow: BTreeMap::new(),
            devices: BTreeMap::new(),
            volumes: BTreeMap::new(),
        };
        Self { options: *options, clock: Clock::start(), pages: Mutex::new(pages) }
    }

    pub(super) fn now(&self) -> Moment {
        Moment { ns: self.clock.ns(), unix_ms: wall_ms() }
    }

    /// As if a pool's thread had been asked at the start, and had not answered.
    #[cfg(test)]
    pub(super) fn pretend_silence(&self, pool: &str) {
        let mut pages = self.pages.lock();
        let seen = pages.seen.entry(pool.to_owned()).or_default();
        (seen.is_asked, seen.heard_ns) = (true, 0);
    }

    fn late_ns(&self) -> u64 {
        let late = (self.options.interval * LATE_INTERVALS).max(LEAST_LATE);
        u64::try_from(late.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns which parts of a look to begin: the question to the pool's thread, the look at its
    /// devices, and the comparison of superblocks. A part that is still under way is left out.
    fn begin(&self, pool: &str) -> [bool; 3] {
        let now = self.clock.ns();
        let mut pages = self.pages.lock();
        let seen = pages.seen.entry(pool.to_owned()).or_insert_with(|| Seen {
            heard_ns: now,
            looked_ns: now,
            ..Seen::default()
        });
        [&mut seen.is_asked, &mut seen.is_looked_at, &mut seen.is_compared]
            .map(|is_under_way| !std::mem::replace(is_under_way, true))
    }
}

impl Control {
    /// Looks at all pools and volumes from now on, until the daemon stops.
    pub fn watch_health(&self) {
        let control = self.clone();
        let options = control.0.health.options;
        if !options.enabled {
            return;
        }
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(options.interval).await;
                if !control.0.ready.load(Ordering::Acquire) {
                    // Pools are about to be closed, and that is no failure.
                    return;
                }
                control.look_at_health().await;
            }
        });
    }

    /// Looks once.
    pub async fn look_at_health(&self) {
        if !self.0.health.options.enabled {
            return;
        }
        let mut asking = JoinSet::new();
        for known in self.known_pools() {
            let Ok(handle) = known.state else { continue };
            let [asks, looks, compares] = self.0.health.begin(handle.name());
            if asks {
                asking.spawn(self.clone().ask_thread(handle.clone()));
            }
            if looks {
                asking.spawn(self.clone().look_at_devices(handle.clone()));
            }
            if compares {
                asking.spawn(self.clone().compare_superblocks(handle));
            }
        }
        let all = async { while asking.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(GRACE, all).await;
        asking.detach_all();
        self.take_stock();
    }

    async fn ask_thread(self, handle: PoolHandle) {
        let answer = handle.own_space().await;
        let now = self.0.health.clock.ns();
        let mut pages = self.0.health.pages.lock();
        let Some(seen) = pages.seen.get_mut(handle.name()) else { return };
        seen.is_asked = false;
        if let Ok(space) = answer {
            seen.space = Some(space);
            seen.heard_ns = now;
        }
    }

    async fn look_at_devices(self, handle: PoolHandle) {
        let (sequences, met, met_ns) = {
            let pages = self.0.health.pages.lock();
            let seen = pages.seen.get(handle.name());
            let looks = seen.map(|seen| seen.devices.as_slice()).unwrap_or_default();
            let sequences: Vec<_> = looks.iter().map(|look| look.disk_sequence).collect();
            let met = seen.map(|seen| seen.met.clone()).unwrap_or_default();
            (sequences, met, seen.map_or(0, |seen| seen.met_ns))
        };
        let (pool, clock) = (handle.clone(), self.0.health.clock);
        let look = tokio::task::spawn_blocking(move || {
            let devices = pool.open_devices().iter().enumerate().map(|(at, device)| {
                let sequence = sequences.get(at).copied().flatten();
                let kind = device.info().kind;
                let (sysfs, file, size) = (Path::new(SYSFS), device.file(), device.size());
                let mut look = look_at(sysfs, kind, file, size, sequence);
                if let Some(pmem) = device.pmem() {
                    look.bad = BadBlocks { runs: pmem.note_bad() };
                }
                look
            });
            let devices: Vec<DeviceLook> = devices.collect();
            let (met, met_ns) = meet(&pool, &devices, clock.ns(), met, met_ns);
            (devices, pool.free_below(), met, met_ns)
        });
        let look = look.await;
        let now = clock.ns();
        let mut pages = self.0.health.pages.lock();
        let Some(seen) = pages.seen.get_mut(handle.name()) else { return };
        seen.is_looked_at = false;
        if let Ok((devices, below, met, met_ns)) = look {
            (seen.devices, seen.below, seen.met, seen.met_ns) = (devices, below, met, met_ns);
            seen.looked_ns = now;
        }
    }

    /// Reads the devices, which takes long where one hangs: other looks do not wait for it.
    async fn compare_superblocks(self, handle: PoolHandle) {
        let pool = handle.clone();
        let compared = tokio::task::spawn_blocking(move || pool.check_superblocks()).await;
        if let Err(error) = compared {
            tracing::error!(pool = handle.name(), %error, "comparing superblocks failed");
        }
        if let Some(seen) = self.0.health.pages.lock().seen.get_mut(handle.name()) {
            seen.is_compared = false;
        }
    }

    pub(super) fn take_stock(&self) {
        self.take_stock_at(self.0.health.now());
    }

    /// Derives the findings from all that was seen, and publishes the notices.
    pub(super) fn take_stock_at(&self, now: Moment) {
        let present: Vec<Present> =
            self.known_pools().into_iter().map(|k| self.present(k)).collect();
        let sums = sums(&self.data_path().volume_stats());
        let mut notices = Vec::new();
        {
            let book = &self.0.health;
            let mut pages = book.pages.lock();
            for one in &present {
                pages.look(book, now, one, &sums, &mut notices);
            }
            pages.forget(&present, &sums);
        }
        self.publish_health(notices);
    }

    fn present(&self, known: Known) -> Present {
        let name = known.config.name.as_str();
        let all = self.0.attachments.list();
        let mine = all.iter().map(|one| &one.record).filter(|one| one.pool == name);
        let attached: Vec<Record> = mine.cloned().collect();
        let (mut summaries, mut problems) = (Vec::new(), BTreeMap::new());
        if let Ok(handle) = &known.state {
            summaries = handle.mapper().summaries();
            for record in attached.iter().filter(|record| record.ublk.is_some()) {
                let id = VolumeId(record.id);
                if let Some(problem) = self.described_device(&handle.id(), id).problem {
                    problems.insert(id, problem);
                }
            }
        }
        Present { known, summaries, attached, problems }
    }

    fn publish_health(&self, notices: Vec<Notice>) {
        for notice in notices {
            match notice {
                Notice::Abnormal(Subject { pool, volume }, finding) => {
                    let (severity, code) = (finding.severity.name(), finding.code.name());
                    let text = format!("{severity}: {code}: {}", finding.message);
                    self.events().publish(EventKind::HealthAbnormal, &pool, &volume, text);
                }
                Notice::Recovered(Subject { pool, volume }, episode) => {
                    let who = match volume.as_str() {
                        "" => format!("pool {}", shown(&pool)),
                        _ => format!("volume {} of pool {}", shown(&volume), shown(&pool)),
                    };
                    let seconds = wall_ms().saturating_sub(episode.since).max(0) / 1000;
                    let codes: Vec<&str> = episode.codes.iter().map(|code| code.name()).collect();
                    let codes = codes.join(", ");
                    let text = format!("{who} is healthy again after {seconds} s of {codes}");
                    self.events().publish(EventKind::HealthRecovered, &pool, &volume, text);
                }
            }
        }
    }

    /// Ends causes that only time would end. True if there were any.
    pub(in super::super) fn acknowledge_health(
        &self,
        pool: &str,
        volume: &str,
    ) -> Result<bool, Error> {
        let pools = match pool.is_empty() && volume.is_empty() {
            true => self.known_pools(),
            false => vec![self.known(pool)?],
        };
        let present: Vec<Present> = pools.into_iter().map(|known| self.present(known)).collect();
        let has = |one: &Present| {
            let attached = one.attached.iter().any(|record| record.volume == volume);
            attached || one.summaries.iter().any(|summary| summary.name == volume)
        };
        if !volume.is_empty() && !present.iter().any(has) {
            return Err(Error::not_found("volume", volume));
        }
        let sums = sums(&self.data_path().volume_stats());
        let (mut notices, mut changed) = (Vec::new(), false);
        {
            let now = self.0.health.now();
            let mut pages = self.0.health.pages.lock();
            for one in &present {
                changed |= pages.acknowledge(now, one, volume, &sums, &mut notices);
            }
        }
        self.publish_health(notices);
        Ok(changed)
    }
}

impl Present {
    fn name(&self) -> &str {
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
    fn look(
        &mut self,
        book: &Book,
        now: Moment,
        present: &Present,
        sums: &BTreeMap<(String, String), VolumeSum>,
        notices: &mut Vec<Notice>,
    ) {
        let pool = present.name();
        if present.known.is_closed() {
            // On request: nothing is wrong with it, and its volumes are not looked at.
            let attached = present.attached.iter().map(|record| record.volume.as_str());
            for subject in std::iter::once("").chain(attached) {
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
        for volume in &present.summaries {
            let found = self.of_volume(now, present, volume, sums);
            self.note(now, pool, &volume.name, found, notices);
        }
        let is_there = |record: &Record| {
            let same = |one: &&VolumeSummary| one.name == record.volume;
            present.summaries.iter().find(same).map(|one| one.id.0 == record.id)
        };
        for record in &present.attached {
            let (here, is_open) = (is_there(record), present.known.state.is_ok());
            // Nothing else is known of a pool that is not open.
            if here.is_none() {
                let missing = is_open.then(|| find::missing(pool, &record.volume));
                let found = missing.into_iter().collect();
                self.note(now, pool, &record.volume, found, notices);
            }
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
        for (at, device) in handle.open_devices().iter().enumerate() {
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
        sums: &BTreeMap<(String, String), VolumeSum>,
    ) -> Vec<Finding> {
        let (pool, name) = (present.name(), &volume.name);
        let mut found = Vec::new();
        if let Some(problem) = present.problems.get(&volume.id) {
            found.push(find::not_served(name, problem));
        }
        let key = (pool.to_owned(), name.clone());
        let sum = sums.get(&key).copied().unwrap_or_default();
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
    fn forget(&mut self, present: &[Present], sums: &BTreeMap<(String, String), VolumeSum>) {
        let mut there = std::collections::BTreeSet::new();
        for one in present {
            let pool = one.name();
            there.insert((pool, ""));
            there.extend(one.summaries.iter().map(|summary| (pool, summary.name.as_str())));
            there.extend(one.attached.iter().map(|record| (pool, record.volume.as_str())));
        }
        self.ledger.retain(|one| there.contains(&(one.pool.as_str(), one.volume.as_str())));
        let is_counted = |key: &(String, String)| sums.contains_key(key);
        let many = self.volumes.len() > MAX_TALLIES;
        self.volumes.retain(|key, _| {
            there.contains(&(key.0.as_str(), key.1.as_str())) || (is_counted(key) && !many)
        });
    }

    fn acknowledge(
        &mut self,
        now: Moment,
        present: &Present,
        volume: &str,
        sums: &BTreeMap<(String, String), VolumeSum>,
        notices: &mut Vec<Notice>,
    ) -> bool {
        let pool = present.name();
        let mut changed = false;
        if volume.is_empty()
            && let Ok(handle) = &present.known.state
        {
            for at in 0..handle.open_devices().len() {
                let tally = self.devices.entry((pool.to_owned(), at)).or_default();
                tally.acknowledge(errors_of(handle, at));
            }
        }
        let names = present.summaries.iter().map(|one| (one.name.as_str(), one.id.0));
        let names: Vec<_> = names.filter(|one| volume.is_empty() || one.0 == volume).collect();
        for &(name, id) in &names {
            let key = (pool.to_owned(), name.to_owned());
            let faults = sums.get(&key).map_or([0; 2], |sum| sum.faults);
            let tally = self.volumes.entry(key).or_insert_with(|| (id, Tally::default()));
            tally.1.acknowledge(faults);
        }
        let own = volume.is_empty().then_some("");
        for name in own.into_iter().chain(names.iter().map(|one| one.0)) {
            let subject = Subject { pool: pool.to_owned(), volume: name.to_owned() };
            changed |= self.ledger.acknowledge(now, &subject, notices);
        }
        changed
    }
}

/// Errors of a device that were counted by all threads.
pub(super) fn errors_of(handle: &PoolHandle, device: usize) -> [u64; 3] {
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
fn meet(
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

fn sums(all: &[Arc<VolumeStats>]) -> BTreeMap<(String, String), VolumeSum> {
    let mut sums: BTreeMap<(String, String), VolumeSum> = BTreeMap::new();
    for stats in all {
        let sum = sums.entry((stats.pool.clone(), stats.volume.clone())).or_default();
        let faults = stats.faults.each_ref().map(Counter::get);
        sum.faults = std::array::from_fn(|at| sum.faults[at].saturating_add(faults[at]));
        sum.blocked = sum.blocked.saturating_add(stats.blocked.get());
        sum.blocked_ns = sum.blocked_ns.max(stats.blocked_ns.get());
    }
    sums
}

/// Whether a pool's cause is one of a volume's as well. A volume that has all of its space, or
/// needs none, is not affected by a lack of it.
pub(super) fn touches(code: Code, volume: &VolumeSummary) -> bool {
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
pub(super) fn wire(severity: Option<Severity>) -> i32 {
    severity.map_or(0, |severity| severity.wire().into())
}
