//! Looks at all pools and volumes now and then, and keeps what it finds.
//!
//! The watch reads only data that is there already: counters of threads that do IO, the space as
//! pools' threads report it, and sysfs. No thread waits for it, and it waits for none for long: a
//! pool that does not answer is reported as late.

mod pages;
mod suspects;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockd_engine::pool::{PoolHandle, SpaceNow, VolumeId};
use blockd_mapper::pool::Space;
use blockd_media::clock::{Clock, wall_ms};
use blockd_media::error::{Error, shown};
use parking_lot::Mutex;
use tokio::task::JoinSet;

use super::super::{Control, EventKind, Known};
use super::device::{DeviceLook, SYSFS, look_at};
use crate::config::HealthConfig;
use crate::health::{BadBlocks, Ledger, Moment, Notice, Rules, SlowWatch, Subject, Tally};

use pages::{add_counters, meet};
pub(super) use pages::{touches, wire};
use suspects::{AttachedBook, Present, Sums};

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

/// All that is known of what is wrong.
pub(in super::super) struct Book {
    pub(super) options: HealthConfig,
    clock: Clock,
    pub(super) pages: Mutex<Pages>,
    attached: AttachedBook,
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
        let (clock, attached) = (Clock::start(), AttachedBook::default());
        Self { options: *options, clock, pages: Mutex::new(pages), attached }
    }

    fn now(&self) -> Moment {
        Moment { ns: self.clock.ns(), unix_ms: wall_ms() }
    }

    /// As if a pool's thread had been asked at the start, and had not answered.
    #[cfg(test)]
    pub(super) fn pretend_silence(&self, pool: &str) {
        let mut pages = self.pages.lock();
        let seen = pages.seen.entry(pool.to_owned()).or_default();
        (seen.is_asked, seen.heard_ns) = (true, 0);
    }

    /// Forgets what was seen of a pool that is closed: its next opening may be on another disk, and
    /// its counters begin anew.
    pub(in super::super) fn forget_pool(&self, pool: &str) {
        let mut pages = self.pages.lock();
        pages.seen.remove(pool);
        pages.slow.retain(|(of, _), _| of != pool);
        pages.devices.retain(|(of, _), _| of != pool);
    }

    /// Keeps what was counted and acknowledged of a volume that has another name now.
    pub(in super::super) fn rename(&self, pool: &str, former: &str, name: &str) {
        let mut pages = self.pages.lock();
        if let Some(known) = pages.volumes.remove(&(pool.to_owned(), former.to_owned())) {
            pages.volumes.insert((pool.to_owned(), name.to_owned()), known);
        }
    }

    /// Gives a pool another name, and keeps what was seen, counted and acknowledged of it.
    pub(in super::super) fn rename_pool(&self, pool: &PoolHandle, name: &str) {
        fn moved<K: Ord + Clone, V>(map: &mut BTreeMap<K, V>, renamed: impl Fn(&K) -> Option<K>) {
            let keys: Vec<_> =
                map.keys().filter_map(|key| Some((key.clone(), renamed(key)?))).collect();
            for (key, renamed) in keys {
                if let Some(value) = map.remove(&key) {
                    map.insert(renamed, value);
                }
            }
        }
        let mut pages = self.pages.lock();
        let former = pool.name();
        // Under the lock: looks find their pages by the pool's name.
        pool.rename(name);
        let of_pool = |one: &String| (one == former).then(|| name.to_owned());
        let of_device = |key: &(String, usize)| Some((of_pool(&key.0)?, key.1));
        moved(&mut pages.seen, of_pool);
        moved(&mut pages.slow, of_device);
        moved(&mut pages.devices, of_device);
        moved(&mut pages.volumes, |key| Some((of_pool(&key.0)?, key.1.clone())));
        pages.ledger.rename_pool(former, name);
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
            let devices = pool.open_devices().enumerate().map(|(at, device)| {
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

    /// Returns how many volumes it examined.
    pub(super) fn take_stock(&self) -> usize {
        self.take_stock_at(self.0.health.now())
    }

    /// Derives the findings from all that was seen, and publishes the notices. Returns how many
    /// volumes it examined.
    pub(super) fn take_stock_at(&self, now: Moment) -> usize {
        let (pools, sums) = (self.known_pools(), self.volume_sums());
        self.look_at_attachments(&pools, now.ns);
        let present: Vec<Present> =
            pools.iter().map(|known| self.present(known.clone(), &sums)).collect();
        let mut notices = Vec::new();
        {
            let book = &self.0.health;
            let mut pages = book.pages.lock();
            for one in &present {
                pages.look(book, now, one, &sums, &mut notices);
            }
            let is_there = |pool: &str, volume: &str| self.is_there(&pools, pool, volume);
            pages.forget(is_there, &sums);
        }
        self.publish_health(notices);
        present.iter().map(|one| one.volumes.len() + one.absent.len()).sum()
    }

    /// The counters of volumes that have failed or waiting requests.
    fn volume_sums(&self) -> Sums {
        let mut sums = Sums::new();
        self.data_path().each_volume(&mut |stats| add_counters(&mut sums, stats));
        sums
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
        let is_there = |known: &Known| self.is_there(&pools, &known.config.name, volume);
        if !volume.is_empty() && !pools.iter().any(is_there) {
            return Err(Error::not_found("volume", volume));
        }
        let sums = self.volume_sums();
        let (mut notices, mut changed) = (Vec::new(), false);
        {
            let now = self.0.health.now();
            let mut pages = self.0.health.pages.lock();
            for known in &pools {
                changed |= pages.acknowledge(now, known, volume, &sums, &mut notices);
            }
        }
        self.publish_health(notices);
        Ok(changed)
    }
}
