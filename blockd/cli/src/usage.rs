//! The use of a pool's space, in parts that add up to its size.

use blockd_api::v1;
use serde::Serialize;

use super::amount;
use super::output::{Output, shares};

/// The space of a pool. `used`, `pending`, `others` and `free` add up to its size, and `mapped`,
/// `reserved` and `metadata` to `used`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Usage {
    pub(crate) size_bytes: u64,
    pub(crate) used_bytes: u64,
    /// Extents that volumes and snapshots refer to.
    pub(crate) mapped_bytes: u64,
    /// Granted to volumes, and not used yet.
    pub(crate) reserved_bytes: u64,
    pub(crate) metadata_bytes: u64,
    /// No longer referred to, and not free yet.
    pub(crate) pending_bytes: u64,
    /// Free in the pool, and missing on the file system below it: others have taken it there.
    pub(crate) others_bytes: u64,
    pub(crate) free_bytes: u64,
}

impl Usage {
    pub(crate) fn of(pool: &v1::Pool) -> Self {
        let (size_bytes, free_bytes) = (amount(pool.size_bytes), amount(pool.free_bytes));
        let (mapped_bytes, reserved_bytes) =
            (amount(pool.mapped_bytes), amount(pool.reserved_bytes));
        let (metadata_bytes, pending_bytes) =
            (amount(pool.metadata_bytes), amount(pool.pending_bytes));
        let used_bytes = mapped_bytes + reserved_bytes + metadata_bytes;
        Self {
            size_bytes,
            used_bytes,
            mapped_bytes,
            reserved_bytes,
            metadata_bytes,
            pending_bytes,
            others_bytes: size_bytes.saturating_sub(used_bytes + pending_bytes + free_bytes),
            free_bytes,
        }
    }

    /// The rows for people: the parts of the size with their shares, and the parts of what is used.
    pub(crate) fn rows(&self, output: &Output) -> Vec<(&'static str, String)> {
        let parts = [
            ("used", self.used_bytes),
            ("pending", self.pending_bytes),
            ("used by others", self.others_bytes),
            ("free", self.free_bytes),
        ];
        let shares = shares(&parts.map(|(_, bytes)| bytes));
        let size = |bytes| output.size(bytes);
        let mut rows = Vec::new();
        for ((name, bytes), share) in parts.into_iter().zip(shares) {
            let text = format!("{}, {share}", size(bytes));
            match name {
                "used" => {
                    let (mapped, reserved) = (size(self.mapped_bytes), size(self.reserved_bytes));
                    let metadata = size(self.metadata_bytes);
                    let of = format!("mapped {mapped}, reserved {reserved}, metadata {metadata}");
                    rows.push((name, format!("{text}: {of}")));
                }
                "used by others" if bytes == 0 => {}
                "used by others" => {
                    rows.push((name, format!("{text}: of the file system below")));
                }
                _ => rows.push((name, text)),
            }
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::super::output::terminal::Terminal;
    use super::*;

    fn pool(free_mib: i64) -> v1::Pool {
        v1::Pool {
            size_bytes: 1000 << 20,
            mapped_bytes: 300 << 20,
            reserved_bytes: 20 << 20,
            metadata_bytes: 10 << 20,
            pending_bytes: 5 << 20,
            free_bytes: free_mib << 20,
            ..v1::Pool::default()
        }
    }

    #[test]
    fn parts_add_up_to_the_size() {
        for (free, others) in [(665, 0), (600, 65)] {
            let usage = Usage::of(&pool(free));
            assert_eq!((usage.used_bytes, usage.others_bytes), (330 << 20, others << 20));
            let parts = usage.used_bytes + usage.pending_bytes + usage.others_bytes;
            assert_eq!(parts + usage.free_bytes, usage.size_bytes);
        }
    }

    #[test]
    fn others_have_a_line_of_their_own() {
        let output = Output::with(false, false, Terminal::none());
        let used = ("used", "330 MiB, 33.0 %: mapped 300 MiB, reserved 20 MiB, metadata 10 MiB");
        let pending = ("pending", "5 MiB, 0.5 %");
        let expected = |more: &[(&'static str, &str)]| {
            let all = [&[used, pending], more].concat();
            all.into_iter().map(|(name, text)| (name, text.to_owned())).collect::<Vec<_>>()
        };
        let rows = Usage::of(&pool(665)).rows(&output);
        assert_eq!(rows, expected(&[("free", "665 MiB, 66.5 %")]));
        let rows = Usage::of(&pool(600)).rows(&output);
        let others = ("used by others", "65 MiB, 6.5 %: of the file system below");
        assert_eq!(rows, expected(&[others, ("free", "600 MiB, 60.0 %")]));
    }
}
