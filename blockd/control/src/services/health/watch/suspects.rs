//! The volumes that a look has to examine. Nothing can be wrong with the others, so that a look
//! takes the same time however many volumes there are.

use std::collections::{BTreeMap, BTreeSet};

use blockd_engine::pool::{PoolHandle, VolumeId};
use blockd_mapper::engine::VolumeSummary;
use parking_lot::Mutex;

use super::super::super::attachments::Record;
use super::super::super::{Control, Known};
use super::{Pages, VolumeSum};

/// Counters of volumes for which one is not 0, by pool and name.
pub(super) type Sums = BTreeMap<(String, String), VolumeSum>;

/// A pool, and the volumes to be examined in it.
pub(super) struct Present {
    pub(super) known: Known,
    pub(super) volumes: Vec<VolumeSummary>,
    /// Names of volumes that are attached or were found abnormal, and that the pool does not have.
    pub(super) absent: Vec<String>,
    /// Why block devices are not served.
    pub(super) problems: BTreeMap<VolumeId, String>,
}

/// How often all attachments are compared with the volumes that there are, where volumes were made
/// or deleted: volumes are detached before they are deleted, so this finds nothing as a rule.
const COMPARE_PAUSE_NS: u64 = 60_000_000_000;

/// The attachments of each open pool at the last look, by the pool's name.
#[derive(Default)]
pub(super) struct AttachedBook(Mutex<BTreeMap<String, Attached>>);

/// The attachments of a pool, as far as a look needs them.
#[derive(Default)]
struct Attached {
    /// The pool and its opening.
    of: ([u8; 16], u64),
    /// When all of them were compared with the volumes, and the version of these.
    compared_ns: u64,
    volumes: u64,
    /// Volumes with a block device.
    devices: BTreeMap<String, VolumeId>,
    /// Attached volumes that the pool does not have.
    missing: BTreeSet<String>,
}

impl Attached {
    fn note(&mut self, handle: &PoolHandle, record: &Record) {
        let (name, id) = (&record.volume, VolumeId(record.id));
        self.forget(name);
        if record.ublk.is_some() {
            self.devices.insert(name.clone(), id);
        }
        if !handle.mapper().has(id, name) {
            self.missing.insert(name.clone());
        }
    }

    fn forget(&mut self, volume: &str) {
        self.devices.remove(volume);
        self.missing.remove(volume);
    }
}

impl Control {
    pub(super) fn present(&self, known: Known, sums: &Sums) -> Present {
        let name = known.config.name.clone();
        let (mut names, mut ids) = self.0.health.pages.lock().suspects(&name);
        names.extend(sums.keys().filter(|(pool, _)| *pool == name).map(|key| key.1.clone()));
        let mut problems = BTreeMap::new();
        let mut found = BTreeMap::new();
        if let Ok(handle) = &known.state {
            let (devices, missing) = {
                let book = self.0.health.attached.0.lock();
                let attached = book.get(&name);
                let devices = attached.map(|one| one.devices.values().copied().collect::<Vec<_>>());
                (devices, attached.map(|one| one.missing.clone()))
            };
            for id in devices.into_iter().flatten() {
                if let Some(problem) = self.described_device(&handle.id(), id).problem {
                    problems.insert(id, problem);
                    ids.push(id);
                }
            }
            names.extend(missing.into_iter().flatten());
            let mapper = handle.mapper();
            let named = names.iter().filter_map(|name| mapper.find(name));
            let all = named.chain(mapper.summaries_of(&ids));
            found.extend(all.map(|volume| (volume.name.clone(), volume)));
        }
        names.sort_unstable();
        names.dedup();
        names.retain(|volume| {
            !found.contains_key(volume) && self.0.attachments.get(&name, volume).is_some()
        });
        Present { known, volumes: found.into_values().collect(), absent: names, problems }
    }

    /// Brings the book of attachments up to date: with those that have changed, and with all of a
    /// pool that was opened since, or whose volumes are others than a while ago.
    pub(super) fn look_at_attachments(&self, pools: &[Known], now_ns: u64) {
        let attachments = &self.0.attachments;
        let mut book = self.0.health.attached.0.lock();
        let changed = attachments.take_changed();
        let open: Vec<&PoolHandle> =
            pools.iter().filter_map(|known| known.state.as_ref().ok()).collect();
        book.retain(|name, _| open.iter().any(|handle| handle.name() == name));
        for handle in open {
            let name = handle.name();
            let of = (handle.id(), handle.epoch());
            // Read first: a change in between is seen the next time.
            let volumes = handle.mapper().volumes_version();
            let last = book.entry(name.to_owned()).or_default();
            let is_due = now_ns.saturating_sub(last.compared_ns) >= COMPARE_PAUSE_NS;
            match &changed {
                Some(changed) if last.of == of && !(is_due && last.volumes != volumes) => {
                    for (_, volume) in changed.iter().filter(|(pool, _)| pool == name) {
                        match attachments.get(name, volume) {
                            Some(attachment) => last.note(handle, &attachment.record),
                            None => last.forget(volume),
                        }
                    }
                }
                _ => {
                    *last = Attached { of, compared_ns: now_ns, volumes, ..Attached::default() };
                    for attachment in attachments.of_pool(name) {
                        last.note(handle, &attachment.record);
                    }
                }
            }
        }
    }

    /// Whether there is a volume of that name, attached or not; without a name, a pool.
    pub(super) fn is_there(&self, pools: &[Known], pool: &str, volume: &str) -> bool {
        let known = pools.iter().find(|known| known.config.name == pool);
        let has = |known: &Known| match &known.state {
            Ok(handle) => handle.mapper().find(volume).is_some(),
            Err(_) => false,
        };
        known.is_some_and(|known| {
            volume.is_empty() || has(known) || self.0.attachments.get(pool, volume).is_some()
        })
    }
}

impl Pages {
    /// Volumes of a pool with which something was wrong lately: names, and those that bad blocks
    /// meet.
    fn suspects(&self, pool: &str) -> (Vec<String>, Vec<VolumeId>) {
        let names = self.ledger.unsettled(pool).filter(|name| !name.is_empty());
        let names = names.map(str::to_owned).collect();
        let met = self.seen.get(pool).map(|seen| seen.met.iter().map(|(id, _)| *id).collect());
        (names, met.unwrap_or_default())
    }
}
