//! The volumes that a look has to examine. Nothing can be wrong with the others, so that a look
//! takes the same time however many volumes there are.

use std::collections::BTreeMap;

use blockd_engine::pool::{PoolHandle, VolumeId};
use blockd_mapper::engine::VolumeSummary;
use parking_lot::Mutex;

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

/// The attachments of each pool at the last look, by the pool's name.
#[derive(Default)]
pub(super) struct AttachedBook(Mutex<BTreeMap<String, Attached>>);

/// What a look needs to know of a pool's attachments. All of them are gone through again only after
/// one has changed, or a volume was made or deleted.
#[derive(Clone, Default)]
struct Attached {
    as_of: Option<AsOf>,
    /// Volumes with a block device.
    devices: Vec<VolumeId>,
    /// Attached volumes that the pool does not have.
    missing: Vec<String>,
}

/// The version of all that [`Attached`] is made of.
#[derive(Clone, Copy, PartialEq, Eq)]
struct AsOf {
    attachments: u64,
    pool: [u8; 16],
    epoch: u64,
    volumes: u64,
}

impl Control {
    pub(super) fn present(&self, known: Known, sums: &Sums) -> Present {
        let name = known.config.name.clone();
        let (mut names, mut ids) = self.0.health.pages.lock().suspects(&name);
        names.extend(sums.keys().filter(|(pool, _)| *pool == name).map(|key| key.1.clone()));
        let mut problems = BTreeMap::new();
        let mut found = BTreeMap::new();
        if let Ok(handle) = &known.state {
            let Attached { devices, missing, .. } = self.attached_in(&name, handle);
            for id in devices {
                if let Some(problem) = self.described_device(&handle.id(), id).problem {
                    problems.insert(id, problem);
                    ids.push(id);
                }
            }
            names.extend(missing);
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

    fn attached_in(&self, pool: &str, handle: &PoolHandle) -> Attached {
        let mapper = handle.mapper();
        // Versions are read before what they are of: a change in between is seen the next time.
        let as_of = AsOf {
            attachments: self.0.attachments.version(),
            pool: handle.id(),
            epoch: handle.epoch(),
            volumes: mapper.volumes_version(),
        };
        let mut book = self.0.health.attached.0.lock();
        let last = book.entry(pool.to_owned()).or_default();
        if last.as_of != Some(as_of) {
            let (mut devices, mut missing) = (Vec::new(), Vec::new());
            for attachment in self.0.attachments.of_pool(pool) {
                let record = &attachment.record;
                if record.ublk.is_some() {
                    devices.push(VolumeId(record.id));
                }
                if !mapper.has(VolumeId(record.id), &record.volume) {
                    missing.push(record.volume.clone());
                }
            }
            *last = Attached { as_of: Some(as_of), devices, missing };
        }
        last.clone()
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
