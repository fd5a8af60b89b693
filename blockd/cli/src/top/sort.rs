//! The order of rows.

use std::cmp::Reverse;

use super::model::{ClientRow, DeviceRow, PoolRow, VolumeRow};

/// The order of rows: the largest first, equal ones by name, so that idle ones keep their places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Sort {
    #[default]
    Name,
    Operations,
    Bytes,
    Latency,
    Space,
}

impl Sort {
    /// The next one; after the last the first.
    #[must_use]
    pub(crate) fn next(self) -> Self {
        match self {
            Self::Name => Self::Operations,
            Self::Operations => Self::Bytes,
            Self::Bytes => Self::Latency,
            Self::Latency => Self::Space,
            Self::Space => Self::Name,
        }
    }

    /// In words.
    #[must_use]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Operations => "IOPS",
            Self::Bytes => "bytes",
            Self::Latency => "latency",
            Self::Space => "space",
        }
    }
}

/// A row that can be sorted.
pub(super) trait Sorted {
    /// The pool, and the name in it.
    fn names(&self) -> (String, String);
    /// IOPS, bytes, latency and space, in that order.
    fn weights(&self) -> [u64; 4];
}

impl Sorted for PoolRow {
    fn names(&self) -> (String, String) {
        (self.name.clone(), String::new())
    }

    fn weights(&self) -> [u64; 4] {
        [self.operations_per_second, self.bytes_per_second, 0, self.used_bytes]
    }
}

impl Sorted for VolumeRow {
    fn names(&self) -> (String, String) {
        (self.pool.clone(), self.name.clone())
    }

    fn weights(&self) -> [u64; 4] {
        let bytes = self.read_bytes_per_second.saturating_add(self.write_bytes_per_second);
        let latency = self.total().map_or(0, |latency| latency.p99_ns);
        [self.operations_per_second, bytes, latency, self.mapped_bytes]
    }
}

impl Sorted for DeviceRow {
    fn names(&self) -> (String, String) {
        (self.pool.clone(), self.path.clone())
    }

    fn weights(&self) -> [u64; 4] {
        let operations = self.reads_per_second.saturating_add(self.writes_per_second);
        let bytes = self.read_bytes_per_second.saturating_add(self.write_bytes_per_second);
        [operations, bytes, self.p99_ns, self.size_bytes]
    }
}

impl Sorted for ClientRow {
    fn names(&self) -> (String, String) {
        (format!("{}/{}", self.pool, self.volume), self.client.clone())
    }

    fn weights(&self) -> [u64; 4] {
        [u64::from(self.in_flight.unwrap_or(0)); 4]
    }
}

/// Puts rows in order.
pub(super) fn sort_rows<R: Sorted>(rows: &mut [R], sort: Sort) {
    let weight = |row: &R| match (sort, row.weights()) {
        (Sort::Name, _) => 0,
        (Sort::Operations, [weight, ..])
        | (Sort::Bytes, [_, weight, ..])
        | (Sort::Latency, [.., weight, _])
        | (Sort::Space, [.., weight]) => weight,
    };
    rows.sort_by_cached_key(|row| (Reverse(weight(row)), row.names()));
}

#[cfg(test)]
mod tests {
    use super::super::model::Snapshot;
    use super::super::model::tests::answers;
    use super::*;

    #[test]
    fn volumes_are_sorted_by_each_key() {
        let mut snapshot = Snapshot::between(Some(&answers(2)), &answers(4));
        let mut sort = Sort::default();
        let mut first = Vec::new();
        for _ in 0..5 {
            snapshot.sort(sort);
            first.push((sort.name(), snapshot.volumes[0].name.clone()));
            sort = sort.next();
        }
        let expected = ["archive", "data", "data", "data", "archive"];
        assert_eq!(first.iter().map(|(_, name)| name.as_str()).collect::<Vec<_>>(), expected);
        assert_eq!(sort, Sort::Name);
    }
}
