//! Pools in persistent memory of the daemon for tests: pieces of a region, first fit.

use std::collections::BTreeMap;

use blockd_api::v1::{self, ErrorKind};

/// A region, and how volumes are made of it.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    /// Each volume is a namespace.
    pub(crate) direct: bool,
    pub(crate) step: i64,
    pub(crate) region: &'static str,
    pub(crate) numa_node: i32,
    pub(crate) durability: v1::Durability,
    /// Where namespaces begin, how long they are, and their names.
    pub(crate) pieces: BTreeMap<i64, (i64, String)>,
    /// Bytes of its pool. Known once it was described.
    pub(crate) size: i64,
    pub(crate) erases: bool,
}

const MIB: i64 = 1_048_576;

impl Memory {
    /// A pool of extents in a region.
    pub(crate) fn pooled(region: &'static str, size: i64) -> Self {
        Self {
            direct: false,
            step: 4 * MIB,
            region,
            numa_node: 1,
            durability: v1::Durability::PowerSafe,
            pieces: BTreeMap::new(),
            size,
            erases: true,
        }
    }

    /// A pool of namespaces in a region of sets of this step.
    pub(crate) fn direct(region: &'static str, size: i64, step: i64) -> Self {
        Self { direct: true, step, ..Self::pooled(region, size) }
    }

    /// Returns the visible bytes of `charged`: the kernel keeps 64 bytes for each page, and 2 MiB.
    pub(crate) fn usable(charged: i64) -> i64 {
        let pages = (charged / 64 + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
        (charged - pages - 2 * MIB).max(0)
    }

    fn holes(&self) -> Vec<(i64, i64)> {
        let mut holes = Vec::new();
        let mut from = 0;
        for (&start, &(len, _)) in &self.pieces {
            holes.push((from, start - from));
            from = start + len;
        }
        holes.push((from, self.size - from));
        holes
    }

    pub(super) fn describe(&self, pool: v1::Pool) -> v1::Pool {
        let device =
            v1::Device { block_size: 512, kind: v1::DeviceKind::Pmem.into(), ..Default::default() };
        let of_both = v1::Pool {
            durability: self.durability.into(),
            volume_step_bytes: self.step,
            minimum_volume_bytes: self.step,
            region: self.region.to_owned(),
            numa_node: self.numa_node,
            devices: vec![device],
            ..pool
        };
        if !self.direct {
            return v1::Pool { kind: v1::PoolKind::Mapped.into(), ..of_both };
        }
        let holes = self.holes();
        let largest = holes.iter().map(|hole| hole.1).max().unwrap_or_default();
        v1::Pool {
            kind: v1::PoolKind::PmemDirect.into(),
            devices: Vec::new(),
            free_bytes: holes.iter().map(|hole| hole.1).sum(),
            largest_volume_bytes: Self::usable(largest / self.step * self.step),
            ..of_both
        }
    }

    pub(super) fn create(
        &mut self,
        size: i64,
        asked: &v1::CreateVolumeRequest,
    ) -> Result<v1::Volume, v1::ErrorDetail> {
        self.size = size;
        let refused = |kind: ErrorKind, field: &str, message: String| v1::ErrorDetail {
            kind: kind.into(),
            field: field.to_owned(),
            message,
            allowed: "more".to_owned(),
            ..Default::default()
        };
        let is_mapped = asked.usage() == v1::PmemUsage::AppDirect;
        let volume = v1::Volume {
            usage: asked.usage,
            erase_after: asked.erase_after.unwrap_or(self.erases),
            durability: self.durability.into(),
            state: v1::VolumeState::Ready.into(),
            block_size: 512,
            ..Default::default()
        };
        if !self.direct {
            assert!(!is_mapped, "a device of ublk has no DAX");
            assert_eq!(asked.size_bytes % self.step, 0, "{asked:?}");
            let size_bytes = asked.size_bytes;
            return Ok(v1::Volume { size_bytes, charged_bytes: size_bytes, ..volume });
        }
        let is_usable = asked.size_semantics() != v1::SizeSemantics::Charged;
        let mut charged = (asked.size_bytes + self.step - 1) / self.step * self.step;
        while is_usable && Self::usable(charged) < asked.size_bytes {
            charged += self.step;
        }
        if asked.limit_bytes != 0 && charged > asked.limit_bytes {
            let text = format!("limit_bytes is {}", asked.limit_bytes);
            return Err(refused(ErrorKind::Invalid, "limit_bytes", text));
        }
        let hole = self.holes().into_iter().find(|hole| hole.1 >= charged);
        let Some((start, _)) = hole else {
            let text = format!("no piece of {charged} bytes");
            return Err(refused(ErrorKind::NoSpace, "size_bytes", text));
        };
        self.pieces.insert(start, (charged, asked.name.clone()));
        let minor = u32::try_from(self.pieces.len()).expect("few");
        Ok(v1::Volume {
            size_bytes: Self::usable(charged),
            charged_bytes: charged,
            dax: is_mapped,
            device_path: format!("/dev/pmem{minor}"),
            device_major: 259,
            device_minor: minor,
            ..volume
        })
    }

    pub(super) fn free(&mut self, name: &str) {
        self.pieces.retain(|_, piece| piece.1 != name);
    }
}
