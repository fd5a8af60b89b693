//! The last rates of pools, volumes, devices and clients.

use std::collections::{BTreeMap, VecDeque};

use super::model::Snapshot;

/// Samples that are kept of each: two minutes, and more than the widest drawing has.
const SAMPLES: usize = 120;

/// The object of a series.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    /// By name. Operations a second.
    Pool(String),
    /// By pool and name. Operations a second.
    Volume(String, String),
    /// By pool and path. Operations a second.
    Device(String, String),
    /// By the client's number or its device. Requests in flight.
    Client(String),
}

/// A series for each object of the last snapshot, the newest sample last.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    series: BTreeMap<Key, VecDeque<u64>>,
}

impl History {
    /// Adds the rates of a snapshot; objects that are no longer there are forgotten.
    pub(super) fn note(&mut self, snapshot: &Snapshot) {
        let mut old = std::mem::take(&mut self.series);
        let mut add = |key: Key, value: u64| {
            let mut series = old.remove(&key).unwrap_or_default();
            series.push_back(value);
            while series.len() > SAMPLES {
                series.pop_front();
            }
            self.series.insert(key, series);
        };
        for pool in &snapshot.pools {
            add(Key::Pool(pool.name.clone()), pool.operations_per_second);
        }
        for volume in &snapshot.volumes {
            let key = Key::Volume(volume.pool.clone(), volume.name.clone());
            add(key, volume.operations_per_second);
        }
        for device in &snapshot.devices {
            let rate = device.reads_per_second + device.writes_per_second;
            add(Key::Device(device.pool.clone(), device.path.clone()), rate);
        }
        for client in &snapshot.clients {
            add(Key::Client(client.key()), client.in_flight.unwrap_or(0).into());
        }
    }

    /// The series of an object, the newest sample last.
    pub(super) fn of(&self, key: &Key) -> Vec<u64> {
        self.series.get(key).map(|series| series.iter().copied().collect()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::model::tests::answers;
    use super::*;

    #[test]
    fn a_series_has_the_newest_samples_and_ends_with_its_object() {
        let mut history = History::default();
        let mut snapshot = Snapshot::between(Some(&answers(2)), &answers(4));
        for _ in 0..SAMPLES {
            history.note(&snapshot);
        }
        snapshot.volumes[1].operations_per_second = 7;
        history.note(&snapshot);
        let key = Key::Volume("default".to_owned(), "data".to_owned());
        let series = history.of(&key);
        assert_eq!((series.len(), series[SAMPLES - 2], series[SAMPLES - 1]), (SAMPLES, 3000, 7));
        snapshot.volumes.clear();
        history.note(&snapshot);
        assert!(history.of(&key).is_empty());
    }
}
