//! Creates and grows volumes: limits of provisioning, and all settings that a class gives its
//! volumes. Each step can be repeated, and completes an interrupted one.

use blockd_api::v1::{self, ErrorKind};
use blockd_csi_base::bytes::Bytes;
use blockd_csi_base::quantity::Ratio;

use crate::config::{Class, Kind};
use crate::error::Error;
use crate::parameters::Mutable;
use crate::plugin::{Plugin, Pools};
use crate::pmem::{self, Plan};
use crate::sizes::{MAX_VOLUME, Range, Rules};

/// The properties of a volume to create.
#[derive(Clone, Copy, Debug)]
pub struct CreateSpec<'a> {
    /// Its class.
    pub class: &'a Class,
    /// The class's pool, by name.
    pub pool: &'a str,
    /// The daemon's name of it.
    pub name: &'a str,
    /// Bytes.
    pub size: Bytes,
    /// Bytes that it may have at the most, including the overhead; 0: any.
    pub limit: Bytes,
    /// Its mutable parameters.
    pub mutable: &'a Mutable,
    /// How it lies in persistent memory.
    pub pmem: Plan,
}

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
async fn check_room(plugin: &Plugin, class: &Class, pool: &str, more: Bytes) -> Result<(), Error> {
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

/// Makes an empty volume, or finishes one that is there.
///
/// # Errors
/// RESOURCE_EXHAUSTED with the free and the requested bytes; ALREADY_EXISTS when there is something
/// else of that name. Nothing is left then that was not there before.
pub async fn create(plugin: &Plugin, spec: &CreateSpec<'_>) -> Result<v1::Volume, Error> {
    // Only the daemon knows the overhead of a namespace, and other calls need not wait until the
    // space has been overwritten.
    let is_direct = spec.class.kind == Kind::PmemDirect;
    let mut promises = None;
    if !is_direct {
        promises = Some(plugin.promises.lock().await);
    }
    if !is_direct && plugin.daemon.find_volume(spec.pool, spec.name).await?.is_none() {
        check_room(plugin, spec.class, spec.pool, spec.size).await?;
    }
    let asked = v1::CreateVolumeRequest {
        name: spec.name.to_owned(),
        pool: spec.pool.to_owned(),
        block_size: spec.class.block_size,
        size_bytes: spec.size.get(),
        ..spec.pmem.request(spec.limit)
    };
    let answer = match plugin.daemon.create_volume(asked).await {
        Err(error) if is_direct && error.daemon_kind() == Some(ErrorKind::NoSpace) => {
            return Err(no_piece(plugin, spec).await.unwrap_or(error));
        }
        answer => answer.map_err(|error| beyond_limit(error, spec.limit))?,
    };
    drop(promises);
    let volume = answer.volume.unwrap_or_default();
    let takes = Bytes::new(pmem::charged(&volume)).unwrap_or_default();
    if !spec.limit.is_zero() && takes > spec.limit {
        if answer.changed {
            remove(plugin, spec.pool, spec.name).await;
        }
        let allowed = format!("no less than {takes}, which {} bytes take", spec.size);
        return Err(Error::out_of_range("capacity_range.limit_bytes", spec.limit, allowed));
    }
    finish(plugin, spec, volume, answer.changed).await
}

/// Returns the error of a namespace without space: too little in total, or too little in one piece.
async fn no_piece(plugin: &Plugin, spec: &CreateSpec<'_>) -> Option<Error> {
    let asked = v1::GetPoolRequest { name: spec.pool.to_owned() };
    let found = plugin.daemon.get_pool(asked).await.ok()?.pool?;
    let largest = Bytes::new(found.largest_volume_bytes)?;
    let free = Bytes::new(found.free_bytes)?;
    let regions = if spec.class.others.is_empty() { "" } else { ", in the best of its regions" };
    let why = format!(", {largest} of them in one piece{regions}");
    Some(Error::NoSpace { pool: spec.pool.to_owned(), requested: spec.size, free, why })
}

/// A limit that can't be kept is out of range, whatever else a daemon refuses.
fn beyond_limit(error: Error, limit: Bytes) -> Error {
    match error {
        Error::Daemon(detail) if detail.field.ends_with("limit_bytes") => {
            Error::out_of_range("capacity_range.limit_bytes", limit, detail.allowed)
        }
        other => other,
    }
}

/// Makes a volume that begins as a snapshot, or finishes one that is there.
///
/// # Errors
/// As [`create`].
pub async fn clone(
    plugin: &Plugin,
    spec: &CreateSpec<'_>,
    snapshot: &str,
) -> Result<v1::Volume, Error> {
    let promises = plugin.promises.lock().await;
    if plugin.daemon.find_volume(spec.pool, spec.name).await?.is_none() {
        check_room(plugin, spec.class, spec.pool, spec.size).await?;
    }
    let asked = v1::CloneVolumeRequest {
        name: spec.name.to_owned(),
        pool: spec.pool.to_owned(),
        snapshot: snapshot.to_owned(),
        size_bytes: spec.size.get(),
        ..Default::default()
    };
    let answer = plugin.daemon.clone_volume(asked).await?;
    drop(promises);
    let volume = answer.volume.unwrap_or_default();
    finish(plugin, spec, volume, answer.changed).await
}

/// Applies the settings to an existing volume. If that fails, a volume that was created just now,
/// or was never written, is deleted again: its creation was not answered yet.
///
/// # Errors
/// As [`create`].
pub async fn finish(
    plugin: &Plugin,
    spec: &CreateSpec<'_>,
    volume: v1::Volume,
    is_new: bool,
) -> Result<v1::Volume, Error> {
    if volume.state() == v1::VolumeState::Creating {
        let what = format!("volume {}", spec.name);
        return Err(Error::Aborted { what, problem: "is still being made".to_owned() });
    }
    let is_thick = spec.class.is_thick;
    let settings = volume.settings.unwrap_or_default();
    let mut request = spec.mutable.request(spec.pool, spec.name);
    request.thick = is_thick.then_some(true);
    if is_set(&settings, &request) {
        if settings.thick && !is_thick {
            let it = ("volume", spec.name);
            return Err(Error::exists(it, "all its space set aside:", "thick", "thin"));
        }
        return Ok(volume);
    }
    if !is_untouched(&settings) {
        // Another request was finished before: settings are made at once or not at all.
        let it = ("volume", spec.name);
        let (existing, asked) = (describe(&settings), "other parameters");
        return Err(Error::exists(it, "parameters", existing, asked));
    }
    match plugin.daemon.configure_volume(request).await {
        Ok(answer) => Ok(answer.volume.unwrap_or_default()),
        Err(error) => {
            let is_empty = volume.valid_bytes == 0 && volume.origin_id == 0 && !volume.attached;
            // A caller that receives a refusal may not retry; one that receives UNAVAILABLE does,
            // and completes it.
            let is_refused = error.daemon_kind().is_some();
            if is_refused && (is_new || is_empty) {
                remove(plugin, spec.pool, spec.name).await;
            }
            Err(error)
        }
    }
}

/// Removes the results of a failed call. If that fails too, the repeat finds it.
pub async fn remove(plugin: &Plugin, pool: &str, name: &str) {
    let asked =
        v1::DeleteVolumeRequest { name: name.to_owned(), pool: pool.to_owned(), force: false };
    if let Err(error) = plugin.daemon.delete_volume(asked).await {
        tracing::warn!(pool, name, %error, "results of a failed call are still there");
    }
}

/// Whether everything that is asked for is so already.
fn is_set(settings: &v1::VolumeSettings, request: &v1::ConfigureVolumeRequest) -> bool {
    fn same<T: PartialEq>(asked: Option<T>, present: &T) -> bool {
        asked.is_none_or(|asked| asked == *present)
    }
    let on_full = match request.on_full() {
        v1::OnFull::Unspecified => true,
        v1::OnFull::Timeout => {
            settings.on_full() == v1::OnFull::Timeout
                && settings.on_full_timeout_ms == request.on_full_timeout_ms
        }
        other => settings.on_full() == other,
    };
    on_full
        && same(request.thick, &settings.thick)
        && same(request.reservation_bytes, &settings.reservation_bytes)
        && same(request.quota_bytes, &settings.quota_bytes)
        && same(request.iops, &settings.iops)
        && same(request.bandwidth_bytes, &settings.bandwidth_bytes)
}

/// Whether no setting was ever changed. The behaviour on a full pool always has a value.
fn is_untouched(settings: &v1::VolumeSettings) -> bool {
    let v1::VolumeSettings { thick, reservation_bytes, quota_bytes, iops, bandwidth_bytes, .. } =
        settings;
    !thick && [*reservation_bytes, *quota_bytes, *bandwidth_bytes] == [0; 3] && *iops == 0
}

fn describe(settings: &v1::VolumeSettings) -> String {
    let v1::VolumeSettings { thick, reservation_bytes, quota_bytes, iops, bandwidth_bytes, .. } =
        settings;
    format!(
        "thick {thick}, reservation {reservation_bytes}, quota {quota_bytes}, iops {iops}, \
         bandwidth {bandwidth_bytes}"
    )
}

/// Grows a volume to the requested size, if needed, and returns it.
///
/// # Errors
/// The volume cannot have this size, or exceeds its limit.
pub async fn expand(
    plugin: &Plugin,
    volume: v1::Volume,
    range: &Range,
) -> Result<v1::Volume, Error> {
    let present = Bytes::new(pmem::charged(&volume)).unwrap_or_default();
    let pools = plugin.pools().await?;
    let class = class_of(&plugin.settings.config.classes, &pools, &volume);
    let mut granule = Bytes::constant(i64::from(volume.block_size));
    if class.kind == Kind::PmemPooled {
        let pool = pools.serving(&class).find(|pool| pool.name == volume.pool);
        granule = granule.max(pool.map(pmem::step).unwrap_or_default());
    }
    let size = range.choose(&Rules { default: present, minimum: present, granule })?;
    if size <= present {
        return Ok(volume);
    }
    grow(plugin, &class, &volume, size).await
}

/// Returns the class of a volume. It is not stored: it is a class of the volume's pool and kind,
/// and of several the one with the highest ratio.
fn class_of(classes: &[Class], pools: &Pools, volume: &v1::Volume) -> Class {
    let is_thick = volume.settings.is_some_and(|settings| settings.thick);
    let is_here = |class: &&Class| {
        class.is_thick == is_thick && pools.serving(class).any(|pool| pool.name == volume.pool)
    };
    let most = |most: Class, class: &Class| {
        if class.overprovision_ratio.is_above(most.overprovision_ratio) {
            class.clone()
        } else {
            most
        }
    };
    let mut fitting = classes.iter().filter(is_here);
    let first = fitting.next().cloned().unwrap_or_else(|| Class {
        pool: volume.pool.clone(),
        kind: if is_thick { Kind::Thick } else { Kind::Thin },
        is_thick,
        overprovision_ratio: Ratio::ONE,
        ..Class::usual("")
    });
    fitting.fold(first, most)
}

/// Makes a volume larger. One that is large enough stays as it is.
///
/// # Errors
/// RESOURCE_EXHAUSTED with the free and the requested bytes.
pub async fn grow(
    plugin: &Plugin,
    class: &Class,
    volume: &v1::Volume,
    size: Bytes,
) -> Result<v1::Volume, Error> {
    let present = Bytes::new(volume.size_bytes).unwrap_or_default();
    // Whether there is room behind a namespace only the daemon sees, and others need not wait until
    // that has been overwritten.
    let mut promises = None;
    if class.kind != Kind::PmemDirect {
        promises = Some(plugin.promises.lock().await);
        check_room(plugin, class, &volume.pool, size.saturating_sub(present)).await?;
    }
    let asked = v1::ResizeVolumeRequest {
        name: volume.name.clone(),
        pool: volume.pool.clone(),
        size_bytes: size.get(),
        ..Default::default()
    };
    let answer = plugin.daemon.resize_volume(asked).await?;
    drop(promises);
    Ok(answer.volume.unwrap_or_default())
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
