//! Settings of single volumes: reservations, limits, and the handling of writes when a pool is
//! full.

use blockd_api::v1;
use blockd_engine::pool::{
    Control as Command, Membership, OnFull, Outcome, Placement, PoolHandle, VolumeSettings,
};
use blockd_mapper::engine::VolumeSummary;
use blockd_mapper::format::Labels;
use blockd_media::error::{Error, shown};
use blockd_media::units::{from_wire, human, to_wire};

use super::evacuation::{member, not_of};
use super::volumes::{existing, of};
use super::{Control, EventKind, labels};

/// The requested changes; settings that are not named stay.
pub(super) type Wanted = v1::ConfigureVolumeRequest;

/// The former values of what a call has set.
#[derive(Clone, Debug, Default)]
pub(super) struct Replaced {
    settings: Option<VolumeSettings>,
    labels: Option<Labels>,
}

impl Replaced {
    /// Whether anything is different now.
    pub(super) const fn is_any(&self) -> bool {
        self.settings.is_some() || self.labels.is_some()
    }
}

/// Whether a request sets labels and nothing else.
fn names_labels_only(wanted: &Wanted) -> bool {
    let Wanted { name, pool, set_labels, remove_labels, .. } = wanted.clone();
    let is_any = !set_labels.is_empty() || !remove_labels.is_empty();
    is_any && *wanted == Wanted { name, pool, set_labels, remove_labels, ..Wanted::default() }
}

impl Control {
    /// Sets what is named. True if anything is different now.
    pub(super) async fn configure_volume(
        &self,
        wanted: &Wanted,
    ) -> Result<(bool, v1::Volume), Error> {
        let handle = self.pool(&wanted.pool)?;
        let name = &wanted.name;
        let _guard = self.lock(&handle, name).await;
        let volume = existing(&handle, name)?;
        let placement = placement_of(&handle, wanted).await?;
        let mut replaced = Replaced::default();
        let asked = (wanted, placement);
        if let Err(error) = self.set_locked(&handle, &volume, asked, &mut replaced).await {
            return Err(match self.set_back(&handle, &volume, replaced).await {
                Ok(()) => error,
                Err(problem) => {
                    let name = shown(name);
                    let left = format!("volume {name} keeps a part of it: {problem}");
                    error.with_note(&left)
                }
            });
        }
        Ok((replaced.is_any(), self.describe(&handle, name).await?))
    }

    /// Sets what is named, settings and labels, of a volume that the caller has locked.
    pub(super) async fn set_locked(
        &self,
        pool: &PoolHandle,
        volume: &VolumeSummary,
        (wanted, placement): (&Wanted, Option<Placement>),
        replaced: &mut Replaced,
    ) -> Result<(), Error> {
        let settings = merged(volume.settings, wanted, placement)?;
        let labels = labels::changed(&volume.labels, &wanted.set_labels, &wanted.remove_labels)?;
        // A snapshot has labels, and no settings to be set.
        if !names_labels_only(wanted) && self.configure_locked(pool, volume, settings).await? {
            replaced.settings = Some(volume.settings);
        }
        if labels != volume.labels && self.label_locked(pool, volume, labels).await? {
            replaced.labels = Some(volume.labels.clone());
        }
        Ok(())
    }

    /// Sets what was replaced back.
    pub(super) async fn set_back(
        &self,
        pool: &PoolHandle,
        volume: &VolumeSummary,
        replaced: Replaced,
    ) -> Result<(), Error> {
        if let Some(before) = replaced.settings {
            self.configure_locked(pool, volume, before).await?;
        }
        if let Some(before) = replaced.labels {
            self.label_locked(pool, volume, before).await?;
        }
        Ok(())
    }

    /// Sets all settings of a volume that the caller has locked. True if anything is different.
    pub(super) async fn configure_locked(
        &self,
        pool: &PoolHandle,
        volume: &VolumeSummary,
        settings: VolumeSettings,
    ) -> Result<bool, Error> {
        let command = Command::Configure { volume: volume.id, settings };
        let outcome = pool.control(command).await.map_err(|error| of(pool, error))?;
        let changed = matches!(outcome, Outcome::Configured { .. });
        if changed {
            let name = &volume.name;
            let words = in_words(pool, &settings);
            let text = format!("volume {} is set to {words}", shown(name));
            self.events().publish(EventKind::VolumeConfigured, pool.name(), name, text);
        }
        Ok(changed)
    }

    /// Refuses to promise more than the configuration allows for a pool. Cells have no such limit:
    /// they begin small and grow with their volumes.
    pub(super) fn check_promise(&self, pool: &PoolHandle, more: u64) -> Result<(), Error> {
        let known = self.known(pool.name())?;
        if known.paths().iter().any(|path| self.is_in_cell(path)) {
            return Ok(());
        }
        let total: u64 = pool.devices().iter().map(|device| device.size).sum();
        let promised = pool.mapper().sums().promised;
        let needed = promised.saturating_add(more);
        match known.config.space.overprovision_percent {
            Some(percent) => {
                let most = u128::from(total) * u128::from(percent) / 100;
                if u128::from(needed) > most {
                    let most = u64::try_from(most).unwrap_or(u64::MAX);
                    let what = format!(
                        "pool {}, whose volumes may have {percent} % of its size together",
                        shown(pool.name())
                    );
                    let free = most.saturating_sub(promised);
                    return Err(Error::NoSpace { what, needed: more, free });
                }
            }
            None if needed > total && promised <= total => {
                tracing::warn!(
                    pool = pool.name(),
                    "overcommitted: {} provisioned, {} capacity",
                    human(needed),
                    human(total)
                );
            }
            None => {}
        }
        Ok(())
    }
}

/// The placement that a request names; `None` where it names none.
pub(super) async fn placement_of(
    pool: &PoolHandle,
    wanted: &Wanted,
) -> Result<Option<Placement>, Error> {
    let path = wanted.pin_to.as_str();
    let placement = match wanted.placement() {
        v1::Placement::Pin if path.is_empty() => {
            return Err(Error::missing("pin_to", "the path of a device of the pool"));
        }
        v1::Placement::Pin => {
            let pin = match member(pool, "placement", path).await? {
                Membership::At(place) => pool.pin_to(place),
                _ => None,
            };
            return pin.map(Some).ok_or_else(|| not_of(pool, "placement", path));
        }
        v1::Placement::Unspecified => None,
        v1::Placement::Fill => Some(Placement::Fill),
        v1::Placement::Spread => Some(Placement::Spread),
    };
    match path.is_empty() {
        true => Ok(placement),
        false => Err(Error::invalid("pin_to", path, "left out unless placement is pin")),
    }
}

/// The settings that a volume has with those that a request names, and the placement that was
/// found for it.
pub(super) fn merged(
    present: VolumeSettings,
    wanted: &Wanted,
    placement: Option<Placement>,
) -> Result<VolumeSettings, Error> {
    let bytes = |value: Option<i64>, present: u64| match value {
        Some(value) => from_wire(value, 0),
        None => Ok(present),
    };
    let on_full = match wanted.on_full() {
        v1::OnFull::Unspecified => present.on_full,
        v1::OnFull::Block => OnFull::Block,
        v1::OnFull::Error => OnFull::Error,
        v1::OnFull::Timeout => match wanted.on_full_timeout_ms {
            0 => {
                let allowed = "at least 1, with on_full timeout";
                return Err(Error::invalid("on_full_timeout_ms", 0, allowed));
            }
            ms => OnFull::Timeout(ms),
        },
    };
    let settings = VolumeSettings {
        on_full,
        thick: wanted.thick.unwrap_or(present.thick),
        reservation: bytes(wanted.reservation_bytes, present.reservation)?,
        quota: bytes(wanted.quota_bytes, present.quota)?,
        iops: wanted.iops.unwrap_or(present.iops),
        bandwidth: bytes(wanted.bandwidth_bytes, present.bandwidth)?,
        placement: placement.unwrap_or(present.placement),
    };
    Ok(settings)
}

fn in_words(pool: &PoolHandle, settings: &VolumeSettings) -> String {
    let mut words = Vec::new();
    match settings.on_full {
        OnFull::Block => {}
        OnFull::Timeout(ms) => words.push(format!("fail after {ms} ms when full")),
        OnFull::Error => words.push("fail when full".to_owned()),
    }
    if settings.thick {
        words.push("thick".to_owned());
    }
    let amounts = [
        ("reservation", human(settings.reservation), settings.reservation),
        ("quota", human(settings.quota), settings.quota),
        ("iops", settings.iops.to_string(), settings.iops),
        ("bandwidth", human(settings.bandwidth), settings.bandwidth),
    ];
    words.extend(
        amounts.into_iter().filter(|row| row.2 > 0).map(|row| format!("{} {}", row.0, row.1)),
    );
    match settings.placement {
        Placement::Fill => {}
        Placement::Spread => words.push("spread over all devices".to_owned()),
        pin @ Placement::Pin(_) => words.push(match pool.pinned_to(pin) {
            Some(path) => format!("pinned to {}", path.display()),
            None => "pinned to a device that has left the pool".to_owned(),
        }),
    }
    if words.is_empty() { "the defaults".to_owned() } else { words.join(", ") }
}

/// As the control API has them.
pub(super) fn to_message(settings: &VolumeSettings) -> v1::VolumeSettings {
    let (on_full, timeout) = match settings.on_full {
        OnFull::Block => (v1::OnFull::Block, 0),
        OnFull::Timeout(ms) => (v1::OnFull::Timeout, ms),
        OnFull::Error => (v1::OnFull::Error, 0),
    };
    v1::VolumeSettings {
        on_full: on_full.into(),
        on_full_timeout_ms: timeout,
        thick: settings.thick,
        reservation_bytes: to_wire(settings.reservation),
        quota_bytes: to_wire(settings.quota),
        iops: settings.iops,
        bandwidth_bytes: to_wire(settings.bandwidth),
        placement: match settings.placement {
            Placement::Fill => v1::Placement::Fill,
            Placement::Spread => v1::Placement::Spread,
            Placement::Pin(_) => v1::Placement::Pin,
        }
        .into(),
    }
}
