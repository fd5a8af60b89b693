//! Creates and grows volumes, with all settings that a class gives its volumes. Each step can be
//! repeated, and completes an interrupted one.

use blockd_api::v1::{self, ErrorKind};
use blockd_csi_base::bytes::Bytes;
use blockd_csi_base::quantity::Ratio;

use crate::config::{Class, Kind};
use crate::error::Error;
use crate::labels::Labels;
use crate::parameters::Mutable;
use crate::plugin::{Plugin, Pools};
use crate::pmem::{self, Plan};
use crate::room::check_room;
use crate::sizes::{self, Range, Rules};

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
    /// Its labels. A namespace has none.
    pub labels: &'a Labels,
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
    if spec.mutable.placement.is_none()
        && let Some(placement) = &spec.class.placement
    {
        placement.apply(&mut request);
    }
    let labels = missing_labels(spec, &volume);
    let is_set = is_set(&settings, &request);
    if is_set {
        if settings.thick && !is_thick {
            let it = ("volume", spec.name);
            return Err(Error::exists(it, "all its space set aside:", "thick", "thin"));
        }
        if labels.is_empty() {
            return Ok(volume);
        }
        request = Mutable::default().request(spec.pool, spec.name);
    } else if !is_untouched(&settings) {
        // Another request was finished before: settings are made at once or not at all.
        let it = ("volume", spec.name);
        let (existing, asked) = (describe(&settings), "other parameters");
        return Err(Error::exists(it, "parameters", existing, asked));
    }
    request.set_labels = labels;
    match plugin.daemon.configure_volume(request).await {
        Ok(answer) => Ok(answer.volume.unwrap_or_default()),
        Err(error) => {
            // One that only lacks labels may be of a plugin that did not know them, which made none
            // that is encrypted.
            let is_empty =
                !is_set && volume.valid_bytes == 0 && volume.origin_id == 0 && !volume.attached;
            // A caller that receives a refusal may not retry; one that receives UNAVAILABLE does,
            // and completes it.
            let is_refused = error.daemon_kind().is_some();
            let is_there = error.daemon_kind() != Some(ErrorKind::NotFound);
            let is_encrypted = spec.labels.contains_key(&plugin.settings.keys.encryption());
            if is_refused && is_set && is_there && !is_new && !is_encrypted {
                tracing::warn!(volume = spec.name, %error, "the volume stays without its labels");
                return Ok(volume);
            }
            if is_refused && (is_new || is_empty) {
                remove(plugin, spec.pool, spec.name).await;
            }
            Err(error)
        }
    }
}

/// The labels that a volume is to have and has not.
fn missing_labels(spec: &CreateSpec<'_>, volume: &v1::Volume) -> Labels {
    if spec.class.kind == Kind::PmemDirect {
        return Labels::new();
    }
    let is_missing = |(key, value): &(&String, &String)| volume.labels.get(*key) != Some(*value);
    let missing = spec.labels.iter().filter(is_missing);
    missing.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// Removes the results of a failed call. If that fails too, the repeat finds it.
pub async fn remove(plugin: &Plugin, pool: &str, name: &str) {
    let asked = v1::DeleteVolumeRequest {
        name: name.to_owned(),
        pool: pool.to_owned(),
        force: false,
        ..Default::default()
    };
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
    // The daemon knows a device by another path, perhaps: the policy is compared.
    let placement = match request.placement() {
        v1::Placement::Unspecified => true,
        other => placement(settings) == other,
    };
    on_full
        && placement
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
    let is_placed = placement(settings) != v1::Placement::Fill;
    !thick
        && [*reservation_bytes, *quota_bytes, *bandwidth_bytes] == [0; 3]
        && *iops == 0
        && !is_placed
}

/// The policy of a volume's extents, which an older daemon does not name.
fn placement(settings: &v1::VolumeSettings) -> v1::Placement {
    match settings.placement() {
        v1::Placement::Unspecified => v1::Placement::Fill,
        named => named,
    }
}

fn describe(settings: &v1::VolumeSettings) -> String {
    let v1::VolumeSettings { thick, reservation_bytes, quota_bytes, iops, bandwidth_bytes, .. } =
        settings;
    format!(
        "thick {thick}, reservation {reservation_bytes}, quota {quota_bytes}, iops {iops}, \
         bandwidth {bandwidth_bytes}, placement {}",
        placement(settings).word()
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
    let (header, present) = (plugin.header(&volume), plugin.capacity(&volume));
    let pools = plugin.pools().await?;
    let class = class_of(plugin, &pools, &volume);
    let mut granule = Bytes::constant(i64::from(volume.block_size));
    if class.kind == Kind::PmemPooled {
        let pool = pools.serving(&class).find(|pool| pool.name == volume.pool);
        granule = granule.max(pool.map(pmem::step).unwrap_or_default());
    }
    if !header.is_zero() {
        granule = granule.max(sizes::LUKS_GRANULE);
    }
    let size = range.choose(&Rules { default: present, minimum: present, granule })?;
    if size <= present {
        return Ok(volume);
    }
    grow(plugin, &class, &volume, sizes::with_header(size, header)?).await
}

/// Returns the class of a volume: the one that its label names, if that still has the volume's
/// pool. Volumes of older plugins have no such label: theirs is a class of the volume's pool and
/// kind, and of several the one with the highest ratio.
fn class_of(plugin: &Plugin, pools: &Pools, volume: &v1::Volume) -> Class {
    let classes = &plugin.settings.config.classes;
    let label = volume.labels.get(&plugin.settings.keys.device_class());
    let is_named = |class: &&Class| {
        label == Some(&class.name) && pools.serving(class).any(|pool| pool.name == volume.pool)
    };
    if let Some(named) = classes.iter().find(is_named) {
        return named.clone();
    }
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
    // A cell grows as its volume is written.
    if class.kind != Kind::PmemDirect && !plugin.settings.cells.has_pool(&volume.pool) {
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
