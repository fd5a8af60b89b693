//! All devices of the daemon. Its calls block, none for longer than some limits together.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use blockd_engine::pool::VolumeId;
use blockd_media::ublk::features;
use parking_lot::Mutex;

use super::device::{DeviceSpec, DeviceView, Kit, Serving};
use super::driver::{DeviceState, Driver};
use super::links::Links;
use super::mark::Mark;
use super::ready::Stock;
use super::recovery::Recovered;
use super::seat::{COMMAND_LIMIT, DeviceThread, RECOVERY_LIMIT, Seat, keep};
use super::users::{self, Places};
use super::{DeviceError, QueueHost, called, mounts};

/// Options of all devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceOptions {
    /// The daemon's identity: see [`Mark`].
    pub owner: u32,
    /// Queues of a device that specifies no number.
    pub queues: u16,
    /// Depth of queues that specify none. 0 for the depth that fits, with and without copying.
    pub depth: u16,
    /// Most bytes of a read or write.
    pub max_bytes: u32,
    /// Nothing is copied, where kernel and pool can do that.
    pub zero_copy: bool,
    /// The process has a mount namespace of its own.
    pub own_namespace: bool,
    /// Devices that are added ahead of need.
    pub ready: usize,
}

/// A pool's identity and its volume's.
type Key = ([u8; 16], VolumeId);

/// Counters since the start.
#[derive(Debug, Default)]
pub struct UblkStats {
    /// Devices that were served again after a daemon before had died or ended.
    pub recoveries: AtomicU64,
    /// Commands that did not come back in time.
    pub hangs: AtomicU64,
}

/// An attached volume's device, or what keeps it from being served.
struct Entry {
    thread: DeviceThread,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    serving: Option<Serving>,
    number: Option<u32>,
    problem: Option<String>,
    /// A command has removed it that had ended with an error before.
    is_removed: bool,
    /// The caller of such a command goes on to use it.
    is_kept: bool,
}

impl Seen {
    fn serve(&mut self, serving: Serving) {
        let number = Some(serving.info.number);
        *self = Self { serving: Some(serving), number, ..Self::default() };
    }
}

/// All devices.
pub struct Devices {
    kit: Kit,
    links: Links,
    stock: Stock,
    entries: Mutex<BTreeMap<Key, Arc<Entry>>>,
    stats: UblkStats,
    /// How long a caller waits, but for a recovery.
    limit: Duration,
}

impl std::fmt::Debug for Devices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Devices").field("options", &self.kit.options).finish_non_exhaustive()
    }
}

impl Devices {
    /// None yet.
    pub fn new(driver: Arc<dyn Driver>, host: Arc<dyn QueueHost>, options: DeviceOptions) -> Self {
        Self::at(driver, host, options, Places::default(), Links::default())
    }

    /// With the names of the volumes in this folder in place of `/dev/blockd`.
    #[must_use]
    pub fn with_names_in(self, folder: &Path) -> Self {
        Self { links: Links(folder.to_owned()), ..self }
    }

    pub(super) fn at(
        driver: Arc<dyn Driver>,
        host: Arc<dyn QueueHost>,
        options: DeviceOptions,
        places: Places,
        links: Links,
    ) -> Self {
        let kit = Kit { driver, host, options, places };
        let stock = Stock::new(&kit, options.ready);
        let (entries, stats) = (Mutex::default(), UblkStats::default());
        Self { kit, links, stock, entries, stats, limit: COMMAND_LIMIT }
    }

    /// With another limit of a caller's wait.
    #[must_use]
    pub fn with_limit(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// Whether the kernel has the driver.
    #[must_use]
    pub fn driver_is_there(&self) -> bool {
        self.kit.driver.is_there()
    }

    /// Most queues that a device can have.
    #[must_use]
    pub fn most_queues(&self) -> usize {
        self.kit.host.workers()
    }

    /// How many devices are added that no volume has yet.
    #[must_use]
    pub fn ready(&self) -> usize {
        self.stock.len()
    }

    /// Adds devices ahead of need, as many as are configured, in the background. Later attachments
    /// do the same.
    pub fn make_ready(&self) {
        self.stock.fill();
    }

    /// Deletes the devices that no volume has, before the daemon ends.
    pub fn end(&self) {
        self.stock.end();
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> &UblkStats {
        &self.stats
    }

    /// How many devices are served.
    #[must_use]
    pub fn served(&self) -> usize {
        let entries: Vec<_> = self.entries.lock().values().cloned().collect();
        entries.iter().filter(|entry| entry.seen.lock().serving.is_some()).count()
    }

    /// A volume's device; `None` if it has none.
    #[must_use]
    pub fn view(&self, pool: &[u8; 16], volume: VolumeId) -> Option<DeviceView> {
        let entry = self.entry(&(*pool, volume))?;
        let seen = entry.seen.lock();
        let unserved = DeviceView { number: seen.number, ..DeviceView::default() };
        let view = seen.serving.as_ref().map_or(unserved, Serving::view);
        Some(DeviceView { problem: seen.problem.clone(), is_removed: seen.is_removed, ..view })
    }

    fn entry(&self, key: &Key) -> Option<Arc<Entry>> {
        self.entries.lock().get(key).map(Arc::clone)
    }

    /// Makes a device for a volume that has none: starts one that is ready, or adds one.
    pub fn attach(&self, spec: &DeviceSpec) -> Result<DeviceView, DeviceError> {
        let started = match self.start_ready(spec) {
            Some(started) => started,
            None => self.add_new(spec),
        };
        self.stock.fill();
        let (thread, serving) = started?;
        let entry = Entry { thread, seen: Mutex::default() };
        self.set_serving(&entry, spec, serving);
        self.entries.lock().insert((spec.pool, spec.volume), Arc::new(entry));
        Ok(serving.view())
    }

    /// Starts a ready device, if there is one that is still there.
    fn start_ready(
        &self,
        spec: &DeviceSpec,
    ) -> Option<Result<(DeviceThread, Serving), DeviceError>> {
        loop {
            let spare = self.stock.take(self.kit.shape(spec))?;
            let (kit, wanted) = (self.kit.clone(), spec.clone());
            let work = move |seat: &mut _| {
                let is_there = Kit::is_still_spare(seat, spare.mark)?;
                is_there.then(|| kit.start(seat, &wanted, spare.asked)).transpose()
            };
            match self.counted(spare.thread.run(self.limit, work, self.undoing())) {
                Ok(Some(serving)) => return Some(Ok((spare.thread, serving))),
                Ok(None) => tracing::warn!(number = spare.number, "a ready device is gone"),
                Err(error) => return Some(Err(error)),
            }
        }
    }

    fn add_new(&self, spec: &DeviceSpec) -> Result<(DeviceThread, Serving), DeviceError> {
        self.with_room(|| {
            let thread = DeviceThread::start()?;
            let (kit, wanted) = (self.kit.clone(), spec.clone());
            let work = move |seat: &mut _| kit.add(seat, &wanted, None).map(Some);
            let added = self.counted(thread.run(self.limit, work, self.undoing()))?;
            Ok((thread, added.ok_or(DeviceError::NotServed)?))
        })
    }

    /// Reverts a start that came back late.
    fn undoing(&self) -> impl FnOnce(&mut Seat, Option<Serving>) + Send + 'static + use<> {
        let kit = self.kit.clone();
        move |seat, started| {
            if started.is_some()
                && let Err(error) = kit.take_down(seat, false)
            {
                tracing::warn!(%error, "cannot remove a stale block device");
            }
        }
    }

    /// Adds a device, and deletes ready ones while the driver's limit is reached.
    fn with_room<T>(&self, add: impl Fn() -> Result<T, DeviceError>) -> Result<T, DeviceError> {
        loop {
            let added = add();
            if !matches!(added, Err(DeviceError::Exhausted { .. })) || !self.stock.give_up_one() {
                return added;
            }
        }
    }

    fn set_serving(&self, entry: &Entry, spec: &DeviceSpec, serving: Serving) {
        let number = serving.info.number;
        self.links.set(&spec.pool_name, &spec.name, Path::new(&called(Some(number))));
        entry.seen.lock().serve(serving);
    }

    /// Serves a volume's device again, or creates it anew. The reason of a failure stays visible.
    pub fn recover(
        &self,
        spec: &DeviceSpec,
        number: Option<u32>,
    ) -> Result<(DeviceView, Recovered), DeviceError> {
        let key = (spec.pool, spec.volume);
        let entry = match self.entry(&key) {
            Some(entry) => entry,
            None => {
                let thread = DeviceThread::start()?;
                let seen = Mutex::new(Seen { number, ..Seen::default() });
                let entry = Arc::new(Entry { thread, seen });
                Arc::clone(self.entries.lock().entry(key).or_insert(entry))
            }
        };
        if let Some(serving) = &entry.seen.lock().serving {
            return Ok((serving.view(), Recovered::Served));
        }
        let recovered = self.with_room(|| {
            let (kit, wanted) = (self.kit.clone(), spec.clone());
            let work = move |seat: &mut _| kit.recover(seat, &wanted, number);
            let late = Arc::clone(&entry);
            let noted = move |_: &mut _, (serving, _): (Serving, Recovered)| {
                late.seen.lock().serve(serving);
            };
            self.counted(entry.thread.run(RECOVERY_LIMIT, work, noted))
        });
        match recovered {
            Ok((serving, how)) => {
                self.set_serving(&entry, spec, serving);
                self.stats.recoveries.fetch_add(1, Ordering::Relaxed);
                Ok((serving.view(), how))
            }
            Err(error) => {
                let mut seen = entry.seen.lock();
                // A command may have come back since, late.
                if seen.serving.is_none() {
                    seen.problem = Some(error.to_string());
                }
                drop(seen);
                Err(error)
            }
        }
    }

    /// Refuses a volume whose device is in use.
    ///
    /// # Errors
    /// The users of the device.
    pub fn check_unused(&self, pool: &[u8; 16], volume: VolumeId) -> Result<(), DeviceError> {
        let Some(entry) = self.entry(&(*pool, volume)) else { return Ok(()) };
        // Also one that is not served yet, or no more: it may be mounted.
        let number = entry.seen.lock().number;
        number.map_or(Ok(()), |number| self.kit.unused(number))
    }

    /// Refuses a volume whose device has a cache of the kernel above it that is not its own: a file
    /// system, another block device, swap. Programs that have it open may stay.
    ///
    /// # Errors
    /// The users of the device that are not programs.
    pub fn check_not_mounted(&self, pool: &[u8; 16], volume: VolumeId) -> Result<(), DeviceError> {
        let Some(entry) = self.entry(&(*pool, volume)) else { return Ok(()) };
        let number = entry.seen.lock().number;
        match number.map_or(Ok(()), |number| self.kit.unused(number)) {
            Err(DeviceError::InUse { device, mut users }) => {
                users.retain(|user| {
                    let is_process = matches!(user, users::User::Process { .. });
                    !is_process && !users::is_idle_loop(&self.kit.places, user)
                });
                match users.is_empty() {
                    true => Ok(()),
                    false => Err(DeviceError::InUse { device, users }),
                }
            }
            other => other,
        }
    }

    /// Removes a volume's device. Refused while it is in use, unless forced. True if there was one.
    pub fn detach(
        &self,
        spec: &DeviceSpec,
        number: Option<u32>,
        force: bool,
    ) -> Result<bool, DeviceError> {
        let key = (spec.pool, spec.volume);
        let (entry, is_served) = match self.entry(&key) {
            Some(entry) => {
                let mut seen = entry.seen.lock();
                seen.is_kept = false;
                let is_served = seen.serving.is_some();
                drop(seen);
                (entry, is_served)
            }
            None => {
                let entry = Entry { thread: DeviceThread::start()?, seen: Mutex::default() };
                (Arc::new(entry), false)
            }
        };
        let number = entry.seen.lock().serving.map(|one| one.info.number).or(number);
        let found = match number {
            Some(number) => self.take_away(&entry, spec, number, is_served, force)?,
            None => false,
        };
        self.links.remove(&spec.pool_name, &spec.name);
        self.entries.lock().remove(&key);
        Ok(found)
    }

    fn take_away(
        &self,
        entry: &Arc<Entry>,
        spec: &DeviceSpec,
        number: u32,
        is_served: bool,
        force: bool,
    ) -> Result<bool, DeviceError> {
        let kit = self.kit.clone();
        let forget = self.forgetting(entry, spec);
        let spec = spec.clone();
        let work = move |seat: &mut super::seat::Seat| {
            if !is_served {
                let Some(info) = kit.find(seat, number)? else { return Ok(false) };
                if !kit.is_of(&spec, &info) {
                    return Ok(false);
                }
                kit.settled(seat, info)?;
            }
            if !force {
                seat.begin("a look at who uses it");
                kit.unused(number)?;
            }
            if force || spec.stands_by {
                kit.host.fail_waiting(number);
            }
            kit.take_down(seat, force)?;
            Ok(true)
        };
        let result = self.counted(entry.thread.run(self.limit, work, forget));
        if let Err(error @ DeviceError::Hangs { .. }) = &result {
            let mut seen = entry.seen.lock();
            // A removal that has come back since has forgotten the device.
            if seen.number.is_some() {
                seen.problem = Some(error.to_string());
            }
        }
        result
    }

    /// Has a device added again, by the next look at those that are not served, if a removal that
    /// timed out comes back late: its caller goes on to use it.
    pub fn keep(&self, pool: &[u8; 16], volume: VolumeId) {
        if let Some(entry) = self.entry(&(*pool, volume)) {
            entry.seen.lock().is_kept = true;
        }
    }

    /// Notes a removal that came back late. The volume stays attached, but its device's number may
    /// be that of another volume's from now on.
    fn forgetting<T>(
        &self,
        entry: &Arc<Entry>,
        spec: &DeviceSpec,
    ) -> impl FnOnce(&mut Seat, T) + Send + 'static + use<T> {
        let (late, links) = (Arc::clone(entry), self.links.clone());
        let (pool, name) = (spec.pool_name.clone(), spec.name.clone());
        move |_, _| {
            links.remove(&pool, &name);
            let problem = "the device was removed after the command for that had timed out: \
                           repeat it, or add the device again with `blockd recover`";
            let problem = Some(problem.to_owned());
            let mut seen = late.seen.lock();
            *seen = Seen { problem, is_removed: !seen.is_kept, ..Seen::default() };
        }
    }

    /// Shows a volume's new size. False if the kernel can't, or there is no device.
    pub fn resize(
        &self,
        pool: &[u8; 16],
        volume: VolumeId,
        bytes: u64,
    ) -> Result<bool, DeviceError> {
        let Some(entry) = self.entry(&(*pool, volume)) else { return Ok(false) };
        let serving = entry.seen.lock().serving;
        let Some(serving) = serving else { return Ok(false) };
        // The driver knows the command or not; the device's requested features do not matter to it.
        if serving.info.flags & features::UPDATE_SIZE == 0 {
            return Ok(false);
        }
        let work =
            move |seat: &mut super::seat::Seat| seat.command("UPDATE_SIZE", |it| it.resize(bytes));
        self.counted(entry.thread.run(self.limit, work, keep)).map(|()| true)
    }

    /// Deletes devices of ours that no attachment remembers, as after a crash in the middle of an
    /// attachment. Says which, and which were left and why.
    pub fn clean(&self, remembered: &[u32]) -> Vec<(u32, Result<(), DeviceError>)> {
        let mut done = Vec::new();
        let entries: Vec<_> = self.entries.lock().values().cloned().collect();
        let served =
            |number: &u32| entries.iter().any(|entry| entry.seen.lock().number == Some(*number));
        for number in self.kit.driver.numbers() {
            if remembered.contains(&number) || served(&number) || self.stock.has(number) {
                continue;
            }
            match self.clean_one(number) {
                Ok(false) => {}
                Ok(true) => done.push((number, Ok(()))),
                Err(error) => done.push((number, Err(error))),
            }
        }
        done
    }

    fn clean_one(&self, number: u32) -> Result<bool, DeviceError> {
        let thread = DeviceThread::start()?;
        let kit = self.kit.clone();
        let work = move |seat: &mut super::seat::Seat| {
            let Some(info) = kit.find(seat, number)? else { return Ok(false) };
            let owner = Mark::from_bits(info.mark).map(|mark| mark.owner);
            if owner != Some(kit.options.owner) {
                return Ok(false);
            }
            if kit.settled(seat, info)? != DeviceState::Dead {
                // The list of attachments may have been lost: a file system in use is worth more
                // than a clean table.
                kit.unused(number)?;
            }
            kit.take_down(seat, false)?;
            Ok(true)
        };
        self.counted(thread.run(self.limit, work, keep))
    }

    /// The volume or its pool has another name: its device's stable name follows. Names are those
    /// of the pool and of the volume.
    pub fn rename(
        &self,
        pool: &[u8; 16],
        volume: VolumeId,
        former: (&str, &str),
        name: (&str, &str),
    ) {
        let Some(path) = self.view(pool, volume).and_then(|view| view.path) else { return };
        self.links.set(name.0, name.1, &path);
        self.links.remove(former.0, former.1);
    }

    /// Takes away names that lead nowhere. `own` are the devices that are attached, with their
    /// pools and volumes.
    pub fn clean_links(&self, own: &[(u32, &str, &str)]) {
        self.links.clean(own);
    }

    fn counted<T>(&self, result: Result<T, DeviceError>) -> Result<T, DeviceError> {
        if let Err(DeviceError::Hangs { .. }) = &result {
            self.stats.hangs.fetch_add(1, Ordering::Relaxed);
        }
        result
    }
}

impl Kit {
    /// Returns an error if the device is in use.
    fn unused(&self, number: u32) -> Result<(), DeviceError> {
        if self.options.own_namespace {
            mounts::detach_own(&[number]);
        }
        let users = users::users(&self.places, &format!("ublkb{number}"));
        if users.is_empty() {
            return Ok(());
        }
        Err(DeviceError::InUse { device: called(Some(number)), users })
    }
}
