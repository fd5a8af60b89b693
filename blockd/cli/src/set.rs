//! `blockd set`: limits, what is set aside, what becomes of writes when the pool is full, and
//! labels.

use blockd_api::v1::{
    ConfigureVolumeRequest, OnFull, Placement, Volume, VolumeKind, VolumeSettings,
};
use blockd_media::error::Error;
use blockd_media::units;
use serde::Serialize;

use super::duration::duration;
use super::labels::{self, Pairs};
use super::output::Output;
use super::pool::path_argument;
use super::{Context, amount, answers, names, size_argument};

/// Set limits and labels of a volume, and its behaviour in a full pool
///
/// Settings that are not named stay unchanged; 0 removes a limit. All settings take effect at once,
/// also for requests that wait. A snapshot can have labels, and no settings.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd set data --iops 5000 --bandwidth 100M\n  \
                  blockd set db --thick --on-full timeout=60s\n  blockd set scratch --quota 20G\n  \
                  blockd set big --placement spread --label team=db --label old-")]
pub(crate) struct Set {
    /// The volume, NAME or POOL/NAME
    pub name: String,

    /// The pool that it is in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,

    /// Give it this label, or with KEY- take that one away; may be repeated
    #[arg(long = "label", value_name = "KEY=VALUE|KEY-")]
    pub labels: Vec<String>,

    #[command(flatten)]
    pub settings: SettingArguments,
}

/// Settings of a volume.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Space and limits")]
pub(crate) struct SettingArguments {
    /// Set all of it aside now: its first writes never meet a full pool
    #[arg(long, conflicts_with = "thin")]
    pub thick: bool,

    /// Take space only as it is written
    #[arg(long)]
    pub thin: bool,

    /// Set so much aside for its first writes, what it has already included
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub reserve: Option<String>,

    /// Let it take no more than this from the pool
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub quota: Option<String>,

    /// Effect of a full pool on writes: block (wait), error, or timeout=TIME (wait this long, then
    /// error); timeout=60s suits guests that do not survive longer waits
    #[arg(long, value_name = "WHAT", value_parser = on_full)]
    pub on_full: Option<WhenFull>,

    /// Devices of the pool that its next extents come from: fill (one device after the other),
    /// spread (all in turn, 1 MiB from each), or pin:PATH (this one while it has space)
    #[arg(long, value_name = "WHERE", value_parser = placement)]
    pub placement: Option<Place>,

    /// Requests a second, flushes not counted
    #[arg(long, value_name = "N")]
    pub iops: Option<u64>,

    /// Bytes a second
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub bandwidth: Option<String>,
}

/// The policy of writes without space, and the milliseconds of a timeout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct WhenFull(OnFull, u32);

fn on_full(text: &str) -> Result<WhenFull, String> {
    match text {
        "block" => Ok(WhenFull(OnFull::Block, 0)),
        "error" => Ok(WhenFull(OnFull::Error, 0)),
        other => {
            let allowed = || "must be block, error, or like timeout=60s".to_owned();
            let time = other.strip_prefix("timeout=").ok_or_else(allowed)?;
            let time = duration(time).map_err(|_| allowed())?;
            let ms = u32::try_from(time.as_millis()).map_err(|_| allowed())?;
            Ok(WhenFull(OnFull::Timeout, ms))
        }
    }
}

/// The devices of a volume's extents, and the path of the one that it is pinned to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Place(Placement, String);

fn placement(text: &str) -> Result<Place, String> {
    match text {
        "fill" => Ok(Place(Placement::Fill, String::new())),
        "spread" => Ok(Place(Placement::Spread, String::new())),
        other => {
            let allowed = || "must be fill, spread, or like pin:/dev/sdc".to_owned();
            let path = other.strip_prefix("pin:").filter(|path| !path.is_empty());
            let path = std::path::Path::new(path.ok_or_else(allowed)?);
            let path = path_argument(path).map_err(|error| error.to_string())?;
            Ok(Place(Placement::Pin, path))
        }
    }
}

/// The request that sets what was named, settings and labels; `None` if that is nothing.
pub(super) fn request(
    settings: &SettingArguments,
    name: &str,
    pool: &str,
    (set_labels, remove_labels): (Pairs, Vec<String>),
) -> Result<Option<ConfigureVolumeRequest>, Error> {
    let (name, pool) = (name.to_owned(), pool.to_owned());
    let of_settings = settings.request()?;
    let request = ConfigureVolumeRequest { set_labels, remove_labels, ..of_settings };
    let is_empty = request == ConfigureVolumeRequest::default();
    Ok((!is_empty).then_some(ConfigureVolumeRequest { name, pool, ..request }))
}

impl SettingArguments {
    /// The request that sets what was named, without the volume.
    fn request(&self) -> Result<ConfigureVolumeRequest, Error> {
        let size = |field: &str, text: &Option<String>| {
            text.as_deref().map(|text| size_argument(field, text)).transpose()
        };
        let WhenFull(on_full, on_full_timeout_ms) =
            self.on_full.unwrap_or(WhenFull(OnFull::Unspecified, 0));
        let Place(placement, pin_to) =
            self.placement.clone().unwrap_or(Place(Placement::Unspecified, String::new()));
        let thick = self.thick.then_some(true).or_else(|| self.thin.then_some(false));
        Ok(ConfigureVolumeRequest {
            on_full: on_full.into(),
            on_full_timeout_ms,
            thick,
            reservation_bytes: size("reserve", &self.reserve)?,
            quota_bytes: size("quota", &self.quota)?,
            iops: self.iops,
            bandwidth_bytes: size("bandwidth", &self.bandwidth)?,
            placement: placement.into(),
            pin_to,
            ..Default::default()
        })
    }
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Configured {
    changed: bool,
    volume: Volume,
    warnings: Vec<String>,
}

/// Largest extent of a pool.
const MAX_EXTENT_BYTES: u64 = 1 << 20;

/// Settings of a volume that are allowed and dangerous, one text each.
pub(super) fn warnings(volume: &Volume) -> Vec<String> {
    let settings = volume.settings.unwrap_or_default();
    let (quota, mapped) = (amount(settings.quota_bytes), amount(volume.mapped_bytes));
    let problem = if quota == 0 {
        return Vec::new();
    } else if quota < mapped {
        format!("it has {} already", units::human(mapped))
    } else if quota < MAX_EXTENT_BYTES {
        "that may be less than one extent of the pool".to_owned()
    } else {
        return Vec::new();
    };
    let (name, quota) = (&volume.name, units::human(quota));
    let write = when_full(&settings);
    vec![format!("volume {name}: the quota is {quota}, and {problem}: a first write {write}")]
}

/// Prints them to standard error, where they are in the way of no program.
pub(super) fn warn(warnings: &[String]) {
    warnings.iter().for_each(|warning| eprintln!("blockd: warning: {warning}"));
}

impl Set {
    pub(super) async fn run(mut self, context: &Context) -> Result<(), Error> {
        names::place(&mut self.pool, [&mut self.name])?;
        let changes = labels::changes(&self.labels)?;
        let request = request(&self.settings, &self.name, &self.pool, changes)?;
        let request = request.ok_or_else(|| {
            let allowed = "one of --thick, --thin, --reserve, --quota, --on-full, --placement, \
                           --iops, --bandwidth, --label";
            Error::missing("option", allowed)
        })?;
        let answer = context.client().await?.configure_volume(request).await?;
        let volume = answers::volume(answer.volume)?;
        let warnings = warnings(&volume);
        warn(&warnings);
        let configured = Configured { changed: answer.changed, volume, warnings };
        context.output.either(&configured, || {
            let volume = &configured.volume;
            let mut words = Vec::new();
            if volume.kind() == VolumeKind::Volume {
                words.push(in_words(volume, context));
            }
            words.extend(volume.labels.iter().map(labels::shown));
            let words = match words.is_empty() {
                true => "no labels".to_owned(),
                false => words.join(", "),
            };
            let was = if configured.changed { "" } else { "unchanged: " };
            format!("{}: {was}{words}\n", configured.volume.name)
        })
    }
}

/// The settings as rows of `show`: each of them, also those that limit nothing.
pub(super) fn rows(volume: &Volume, output: &Output) -> Vec<(&'static str, String)> {
    let settings = &volume.settings.unwrap_or_default();
    let limit = |value: i64| match amount(value) {
        0 => "none".to_owned(),
        bytes => output.size(bytes),
    };
    let iops = match settings.iops {
        0 => "no limit of requests".to_owned(),
        iops => format!("{iops} requests/s"),
    };
    let bandwidth = match amount(settings.bandwidth_bytes) {
        0 => "no limit of bytes".to_owned(),
        bytes => format!("{}/s", output.size(bytes)),
    };
    let reserve = match settings.thick {
        true => "all of it (thick)".to_owned(),
        false => limit(settings.reservation_bytes),
    };
    vec![
        ("when full", format!("a write {}", when_full(settings))),
        ("reserve", reserve),
        ("quota", limit(settings.quota_bytes)),
        ("placement", placed(volume)),
        ("limits", format!("{iops}, {bandwidth}")),
    ]
}

/// The behaviour of a write that finds no space.
fn when_full(settings: &VolumeSettings) -> String {
    match (settings.on_full(), settings.on_full_timeout_ms) {
        (OnFull::Timeout, ms) if ms % 1000 == 0 => format!("fails after {} s", ms / 1000),
        (OnFull::Timeout, ms) => format!("fails after {ms} ms"),
        (OnFull::Error, _) => "fails".to_owned(),
        (OnFull::Block | OnFull::Unspecified, _) => "waits".to_owned(),
    }
}

/// The devices of its extents.
fn placed(volume: &Volume) -> String {
    match volume.settings.unwrap_or_default().placement() {
        Placement::Unspecified | Placement::Fill => "fills one device after the other".to_owned(),
        Placement::Spread => "spread over all devices".to_owned(),
        Placement::Pin if volume.pinned_to.is_empty() => {
            "pinned to a device that has left the pool: fills one after the other".to_owned()
        }
        Placement::Pin => format!("pinned to {}", volume.pinned_to),
    }
}

/// The settings in one line.
fn in_words(volume: &Volume, context: &Context) -> String {
    let settings = volume.settings.unwrap_or_default();
    let bytes = |value| (amount(value), context.output.size(amount(value)));
    let (reserve, quota) = (bytes(settings.reservation_bytes), bytes(settings.quota_bytes));
    let bandwidth = bytes(settings.bandwidth_bytes);
    let mut words = vec![format!("{} when full", when_full(&settings))];
    words.extend(settings.thick.then(|| "thick".to_owned()));
    let amounts = [
        ("reserve", reserve),
        ("quota", quota),
        ("iops", (settings.iops, settings.iops.to_string())),
        ("bandwidth", bandwidth),
    ];
    let set = amounts.into_iter().filter(|(_, (value, _))| *value > 0);
    words.extend(set.map(|(name, (_, text))| format!("{name} {text}")));
    if matches!(settings.placement(), Placement::Spread | Placement::Pin) {
        words.push(placed(volume));
    }
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::output::terminal::Terminal;
    use super::*;

    #[test]
    fn the_policy_when_full_is_parsed() {
        assert_eq!(on_full("block"), Ok(WhenFull(OnFull::Block, 0)));
        assert_eq!(on_full("timeout=60s"), Ok(WhenFull(OnFull::Timeout, 60_000)));
        for bad in ["", "timeout", "timeout=", "timeout=0s", "timeout=2000h", "Error", "wait"] {
            assert!(on_full(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_placement_is_parsed_and_shown() {
        let pin = Place(Placement::Pin, "/dev/sdc".to_owned());
        assert_eq!(placement("pin:/dev/sdc"), Ok(pin));
        assert_eq!(placement("spread"), Ok(Place(Placement::Spread, String::new())));
        for bad in ["", "Spread", "pin", "pin:", "pin=/dev/sdc", "stripe"] {
            let text = placement(bad).unwrap_err();
            assert_eq!(text, "must be fill, spread, or like pin:/dev/sdc", "{bad}");
        }
        let shown = |pinned_to: &str| {
            let settings =
                VolumeSettings { placement: Placement::Pin.into(), ..Default::default() };
            let pinned_to = pinned_to.to_owned();
            placed(&Volume { settings: Some(settings), pinned_to, ..Volume::default() })
        };
        assert_eq!(shown("/dev/sdc"), "pinned to /dev/sdc");
        assert!(shown("").contains("has left the pool"));
    }

    #[test]
    fn a_quota_below_what_a_volume_has_is_warned_of() {
        let of = |quota_bytes, mapped_bytes| {
            let settings = Some(VolumeSettings { quota_bytes, ..VolumeSettings::default() });
            let name = "data".to_owned();
            warnings(&Volume { name, settings, mapped_bytes, ..Volume::default() })
        };
        let text = "volume data: the quota is 2 MiB, and it has 3 MiB already: a first write waits";
        assert_eq!(of(2 << 20, 3 << 20), [text]);
        assert!(of(1, 0)[0].contains("less than one extent"));
        assert!(of(3 << 20, 3 << 20).is_empty() && of(0, 3 << 20).is_empty());
    }

    #[test]
    fn each_setting_has_a_row() {
        let output = Output::with(false, false, Terminal::none());
        let text = |settings: VolumeSettings| {
            let volume = Volume { settings: Some(settings), ..Volume::default() };
            rows(&volume, &output).into_iter().map(|row| row.1).collect::<Vec<_>>()
        };
        let limits = "no limit of requests, no limit of bytes";
        let unset = ["a write waits", "none", "none", "fills one device after the other", limits];
        assert_eq!(text(VolumeSettings::default()), unset);
        let all = VolumeSettings {
            on_full: OnFull::Timeout.into(),
            on_full_timeout_ms: 60_000,
            thick: true,
            reservation_bytes: 1 << 20,
            quota_bytes: 2 << 30,
            iops: 500,
            bandwidth_bytes: 10 << 20,
            placement: Placement::Spread.into(),
        };
        let set = [
            "a write fails after 60 s",
            "all of it (thick)",
            "2 GiB",
            "spread over all devices",
            "500 requests/s, 10 MiB/s",
        ];
        assert_eq!(text(all), set);
        assert_eq!(text(VolumeSettings { thick: false, ..all })[1], "1 MiB");
    }

    #[test]
    fn nothing_named_is_no_request() {
        let of = |settings: &SettingArguments, labels: &[&str]| {
            let labels: Vec<_> = labels.iter().map(|label| (*label).to_owned()).collect();
            request(settings, "a", "", labels::changes(&labels).unwrap())
        };
        let none = SettingArguments::default();
        assert_eq!(of(&none, &[]).unwrap(), None);
        let iops = SettingArguments { iops: Some(0), ..SettingArguments::default() };
        assert_eq!(of(&iops, &[]).unwrap().and_then(|request| request.iops), Some(0));
        let removed = of(&none, &["old-"]).unwrap().map(|request| request.remove_labels);
        assert_eq!(removed, Some(vec!["old".to_owned()]));
        let quota = Some("10Q".to_owned());
        let bad = SettingArguments { quota, ..SettingArguments::default() };
        assert!(of(&bad, &[]).unwrap_err().to_string().contains("quota"));
    }
}
