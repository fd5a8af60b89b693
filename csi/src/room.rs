//! The room in pools: what can still be provisioned of a class, and in which of its pools.

use blockd_api::v1;
use blockd_csi_base::bytes::Bytes;
use blockd_csi_base::quantity::Ratio;

use crate::config::{Class, Kind};
use crate::error::Error;
use crate::plugin::{Plugin, Pools};
use crate::pmem;
use crate::sizes::MAX_VOLUME;

/// The capacity that is left in a pool.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Capacity {
    /// Bytes of all that can be made.
    pub available: Bytes,
    /// Bytes of the largest volume that can.
    pub maximum: Bytes,
}

/// The smallest step of sizes: the logical block of the class's volumes.
#[must_use]
pub fn granule(pool: &v1::Pool, class: &Class) -> Bytes {
    // Without a requested block size the daemon takes the smallest block of the pool's devices.
    let of_devices = pool.devices.iter().map(|device| device.block_size).max();
    let smallest = of_devices.unwrap_or_default().max(512);
    Bytes::constant(i64::from(class.block_size.max(smallest)))
}

/// Returns the bytes that can still be provisioned: ratio times size, rounded down, less the
/// provisioned bytes.
#[must_use]
pub fn promisable(ratio: Ratio, size: Bytes, promised: u128) -> Bytes {
    let left = ratio.times(size).saturating_sub(promised);
    Bytes::from_u128(left).unwrap_or(Bytes::MAX)
}

/// The sum of the virtual sizes of volumes. Snapshots promise nothing: they can't be written.
#[must_use]
pub fn promised(volumes: &[v1::Volume]) -> u128 {
    let is_volume = |volume: &&v1::Volume| volume.kind() == v1::VolumeKind::Volume;
    let sizes = volumes.iter().filter(is_volume).map(|volume| volume.size_bytes);
    sizes.map(|bytes| Bytes::new(bytes).unwrap_or_default().wide()).sum()
}

/// Returns the capacity of a class that is left in a pool.
///
/// # Errors
/// The daemon does not answer.
pub async fn capacity(plugin: &Plugin, pool: &v1::Pool, class: &Class) -> Result<Capacity, Error> {
    let volumes = plugin.daemon.volumes(&pool.name).await?;
    let granule = granule(pool, class);
    if class.kind == Kind::PmemDirect {
        let largest = Bytes::new(pool.largest_volume_bytes).unwrap_or_default();
        let maximum = largest.min(MAX_VOLUME).round_down(granule);
        let available = Bytes::new(pool.free_bytes).unwrap_or_default();
        return Ok(Capacity { available, maximum });
    }
    let left = if class.is_thick {
        thick_room(pool, &volumes)
    } else {
        let size = Bytes::new(pool.size_bytes).unwrap_or_default();
        promisable(class.overprovision_ratio, size, promised(&volumes))
    };
    let step = if class.kind.is_pmem() { granule.max(pmem::step(pool)) } else { granule };
    let maximum = left.min(MAX_VOLUME).round_down(step);
    Ok(Capacity { available: left.round_down(step), maximum })
}

/// Returns the capacity of a class that is left in all of its pools: the sum, and the maximum over
/// the pools, since no volume spans two.
///
/// # Errors
/// The daemon does not answer.
pub async fn capacity_of_all(
    plugin: &Plugin,
    pools: &Pools,
    class: &Class,
) -> Result<Capacity, Error> {
    let mut all = Capacity::default();
    for pool in pools.serving(class) {
        let one = capacity(plugin, pool, class).await?;
        all.available = all.available.saturating_add(one.available);
        all.maximum = all.maximum.max(one.maximum);
    }
    Ok(all)
}

/// The pool that a new volume goes to: the one in which the largest could be made.
///
/// # Errors
/// FAILED_PRECONDITION: the class has none that serves. Or the daemon does not answer.
pub async fn best_pool<'a>(
    plugin: &Plugin,
    pools: &'a Pools,
    class: &Class,
) -> Result<&'a v1::Pool, Error> {
    let mut best: Option<(Bytes, &v1::Pool)> = None;
    let serving: Vec<&v1::Pool> = pools.serving(class).collect();
    if let [pool] = serving.as_slice() {
        return Ok(pool);
    }
    for pool in serving {
        let most = capacity(plugin, pool, class).await?.maximum;
        if best.is_none_or(|(before, _)| most > before) {
            best = Some((most, pool));
        }
    }
    best.map(|(_, pool)| pool).ok_or_else(|| pools.missing(class))
}

/// Returns the bytes that can still be set aside for another volume: the free space, less the space
/// set aside for others and the metadata of all of them. It never exceeds the daemon's own limit,
/// so that the daemon never refuses a reported capacity.
fn thick_room(pool: &v1::Pool, volumes: &[v1::Volume]) -> Bytes {
    /// In the on-disk format a page of 4 KiB maps 256 extents, and an index 64 of such pages or
    /// more.
    const PAGE: u128 = 4096;
    const EXTENTS_PER_LEAF: u128 = 256;
    const LEAVES_PER_INDEX: u128 = 64;
    /// Pages beside: more than the daemon keeps.
    const BESIDE: u128 = 256;
    let extent = u128::from(pool.extent_size.max(1));
    let free = wide(pool.free_bytes) / extent;
    let (mut set_aside, mut leaves) = (0, 0);
    for volume in volumes {
        let (unmet, extents) = (unmet(volume, extent), wide(volume.size_bytes).div_ceil(extent));
        set_aside += unmet;
        leaves += unmet.min(extents.div_ceil(EXTENTS_PER_LEAF));
    }
    let free = free.saturating_sub(set_aside);
    let leaves = leaves + free.div_ceil(EXTENTS_PER_LEAF);
    let pages = leaves + leaves.div_ceil(LEAVES_PER_INDEX) + BESIDE;
    let most = free.saturating_sub((pages * PAGE).div_ceil(extent)) * extent;
    Bytes::from_u128(most).unwrap_or(Bytes::MAX)
}

/// Extents that are set aside for a volume and that it does not have yet.
fn unmet(volume: &v1::Volume, extent: u128) -> u128 {
    let has = (wide(volume.mapped_bytes) + wide(volume.reserved_bytes)) / extent;
    wanted(volume).div_ceil(extent).saturating_sub(has)
}

/// Bytes that are set aside for a volume, those that it has included.
fn wanted(volume: &v1::Volume) -> u128 {
    let settings = volume.settings.unwrap_or_default();
    let (size, reservation) = (wide(volume.size_bytes), wide(settings.reservation_bytes));
    let bytes = if settings.thick { size } else { reservation.min(size) };
    let quota = wide(settings.quota_bytes);
    if quota == 0 { bytes } else { bytes.min(quota) }
}

/// Returns an upper limit for another thick volume: the space that is free or granted without a
/// reservation, less the space set aside for others. The volume's metadata comes on top, so that
/// the daemon decides finally; impossible requests are refused before.
fn thick_limit(pool: &v1::Pool, volumes: &[v1::Volume]) -> Bytes {
    let extent = u128::from(pool.extent_size.max(1));
    let set_aside: u128 = volumes.iter().map(|volume| unmet(volume, extent) * extent).sum();
    let spare = volumes.iter().map(|volume| {
        let reserved = wide(volume.reserved_bytes);
        let beyond = (wide(volume.mapped_bytes) + reserved).saturating_sub(wanted(volume));
        reserved.min(beyond)
    });
    let most = (wide(pool.free_bytes) + spare.sum::<u128>()).saturating_sub(set_aside);
    Bytes::from_u128(most).unwrap_or(Bytes::MAX)
}

fn wide(bytes: i64) -> u128 {
    Bytes::new(bytes).unwrap_or_default().wide()
}

/// Refuses a size that the pool has no space for, by the rules of the class.
///
/// # Errors
/// RESOURCE_EXHAUSTED with the free and the requested bytes. Or the daemon does not answer.
pub async fn check_room(
    plugin: &Plugin,
    class: &Class,
    pool: &str,
    more: Bytes,
) -> Result<(), Error> {
    let asked = v1::GetPoolRequest { name: pool.to_owned() };
    let found = plugin.daemon.get_pool(asked).await?.pool.unwrap_or_default();
    let volumes = plugin.daemon.volumes(pool).await?;
    // The error has the same figure as GetCapacity.
    let (most, free, why) = if class.is_thick {
        let why = ", less the space set aside for others and its own metadata".to_owned();
        (thick_limit(&found, &volumes), thick_room(&found, &volumes), why)
    } else {
        let size = Bytes::new(found.size_bytes).unwrap_or_default();
        let promised = promised(&volumes);
        let ratio = class.overprovision_ratio;
        let why = format!(
            ", of {ratio} times its {size}, less the {promised} that its volumes have together"
        );
        let left = promisable(ratio, size, promised);
        (left, left, why)
    };
    if more > most {
        return Err(Error::NoSpace { pool: pool.to_owned(), requested: more, free, why });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    use super::*;

    fn bytes(bytes: i64) -> Bytes {
        Bytes::new(bytes).unwrap()
    }

    fn ratio(text: &str) -> Ratio {
        Ratio::parse("ratio", text).unwrap()
    }

    #[test]
    fn provisionable_bytes_are_ratio_times_size_rounded_down_less_the_sum() {
        let gib = 1_073_741_824_i64;
        let huge = i64::MAX;
        let table = [
            // (ratio, pool size, provisioned) and the rest.
            (("1", gib, 0), gib),
            (("1", gib, 524_288_000), gib - 524_288_000),
            (("1.0", 524_288_000, 0), 524_288_000),
            (("1.5", 3, 0), 4),
            (("2.5", 7, 10), 7),
            (("2", gib, 2 * gib.unsigned_abs()), 0),
            (("2", gib, 3 * gib.unsigned_abs()), 0),
            (("1.999999999", 1_000_000_000, 0), 1_999_999_999),
            // 2^53 + 1 is no f64.
            (("1", 9_007_199_254_740_993, 0), 9_007_199_254_740_993),
            (("1.000000001", 9_007_199_254_740_993, 0), 9_007_199_263_748_192),
            // A pool of 8 EiB less one, promised a million times.
            (("1000000", huge, 0), huge),
            (("2", huge, huge.unsigned_abs()), huge),
            (("2", huge, huge.unsigned_abs() + 1), huge - 1),
        ];
        for ((times, size, promised), left) in table {
            let found = promisable(ratio(times), bytes(size), u128::from(promised));
            assert_eq!(found.get(), left, "{times} x {size} - {promised}");
        }
    }

    #[test]
    fn snapshots_promise_nothing_and_the_sum_can_be_beyond_int64() {
        let of = |kind: v1::VolumeKind, size_bytes| v1::Volume {
            kind: kind.into(),
            size_bytes,
            ..Default::default()
        };
        let volume = of(v1::VolumeKind::Volume, i64::MAX);
        let snapshot = of(v1::VolumeKind::Snapshot, 1000);
        let sum = promised(&[volume.clone(), snapshot, volume]);
        assert_eq!(sum, 2 * u128::from(i64::MAX.unsigned_abs()));
    }

    #[test]
    fn sizes_step_by_the_largest_block_there_is() {
        let class = |block_size| Class { block_size, ..Class::usual("a") };
        let pool = |sizes: &[u32]| v1::Pool {
            devices: sizes
                .iter()
                .map(|&block_size| v1::Device { block_size, ..Default::default() })
                .collect(),
            ..Default::default()
        };
        assert_eq!(granule(&pool(&[]), &class(0)).get(), 512);
        assert_eq!(granule(&pool(&[512, 4096]), &class(0)).get(), 4096);
        assert_eq!(granule(&pool(&[512]), &class(2048)).get(), 2048);
    }

    proptest! {
        #[test]
        fn the_promise_is_exact_or_capped(
            size in 0..=i64::MAX, promised: u64, part in 0_u32..1_000_000_000, whole in 1_u32..100,
        ) {
            let ratio = ratio(&format!("{whole}.{part:09}"));
            let left = promisable(ratio, bytes(size), u128::from(promised));
            // In parts of 10^9, by hand.
            let parts = u128::from(whole) * 1_000_000_000 + u128::from(part);
            let all = bytes(size).wide() * parts / 1_000_000_000;
            let exact = all.saturating_sub(u128::from(promised));
            prop_assert_eq!(left.wide(), exact.min(Bytes::MAX.wide()));
        }

        #[test]
        fn the_largest_thick_volume_leaves_room_for_its_map(
            free in 0_i64..1 << 50, beside in 0_i64..1 << 45, has in 0_i64..1 << 40,
        ) {
            for extent in [65_536_u32, 262_144, 1_048_576] {
                let settings = v1::VolumeSettings { thick: true, ..Default::default() };
                let other = v1::Volume {
                    size_bytes: beside,
                    mapped_bytes: has / 2,
                    reserved_bytes: has / 2,
                    settings: Some(settings),
                    ..Default::default()
                };
                let pool =
                    v1::Pool { free_bytes: free, extent_size: extent, ..Default::default() };
                let most = thick_room(&pool, std::slice::from_ref(&other)).get();
                let extent = i64::from(extent);
                // As the daemon counts: a leaf for each 256 extents, an index for each 64 leaves.
                let unmet = i64::try_from(unmet(&other, extent.unsigned_abs().into())).unwrap();
                let extents = most / extent;
                let leaves = (extents + 255) / 256 + unmet.min((beside / extent + 256) / 256);
                let pages = leaves + leaves / 64 + 4;
                let needed = (extents + unmet) * extent + pages * 4096;
                prop_assert!(most == 0 || needed <= free, "{most} of {free}");
            }
        }
    }
}
