//! `blockd features`.

use std::time::Duration;

use blockd_api::v1::{FrontEnd, GetVolumeRequest, Volume};
use blockd_media::error::Error;
use blockd_media::ublk::features;
use serde::Serialize;

use super::answers;
use super::output::table::{Cell, Side, Table};
use super::output::terminal::Tone;
use super::{Context, names};

/// Show what the kernel's ublk driver can do and what of it is used
///
/// Of the kernel this needs no daemon. With a volume's name it shows what its block device asked
/// for and was granted.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd features\n  blockd features data")]
pub(crate) struct Features {
    /// The volume whose block device is meant, NAME or POOL/NAME
    pub name: Option<String>,

    /// The pool that it is in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,
}

/// The driver answers at once, or hangs.
const LIMIT: Duration = Duration::from_secs(5);

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Listed {
    /// The running kernel.
    kernel: String,
    /// Null of the kernel itself.
    volume: Option<String>,
    features: Vec<Shape>,
}

#[derive(Debug, Serialize)]
struct Shape {
    name: String,
    bit: u32,
    /// The first kernel that has it; null for one that is not known here.
    since: Option<&'static str>,
    /// Its use in blockd; null when it is not used.
    used_for: Option<&'static str>,
    /// The driver has it.
    present: Option<bool>,
    /// The device asked for it.
    asked: Option<bool>,
    /// The device was granted it.
    granted: Option<bool>,
}

impl Features {
    pub(super) async fn run(mut self, context: &Context) -> Result<(), Error> {
        names::place(&mut self.pool, &mut self.name)?;
        let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
        let Some(name) = self.name else {
            let driver = context.program.ublk_features(LIMIT)?;
            let shapes = all(|flag| Shape { present: Some(driver & flag != 0), ..shape(flag) });
            let listed = Listed { kernel, volume: None, features: shapes(driver) };
            return context.output.either(&listed, || of_kernel(&listed, context));
        };
        let mut client = context.client().await?;
        let request = GetVolumeRequest { name, pool: self.pool };
        let volume = answers::volume(client.get_volume(request).await?.volume)?;
        let (asked, granted) = served(&volume)?;
        let shapes = all(|flag| Shape {
            asked: Some(asked & flag != 0),
            granted: Some(granted & flag != 0),
            ..shape(flag)
        });
        let features = shapes(asked | granted);
        let listed = Listed { kernel, volume: Some(volume.name.clone()), features };
        context.output.either(&listed, || of_device(&listed, context))
    }
}

/// The requested and the granted features of the volume's device.
fn served(volume: &Volume) -> Result<(u64, u64), Error> {
    let refused = |problem: String| Err(Error::in_use(format!("volume {}", volume.name), problem));
    match volume.front_end() {
        FrontEnd::Ublk if volume.device_problem.is_empty() => {
            Ok((volume.device_features_asked, volume.device_features_granted))
        }
        FrontEnd::Ublk => refused(format!("is not served: {}", volume.device_problem)),
        _ => refused("has no block device: attach it with --ublk first".to_owned()),
    }
}

fn shape(flag: u64) -> Shape {
    let known = features::FEATURES.iter().find(|one| one.flag == flag);
    Shape {
        name: features::names(flag).join(""),
        bit: flag.trailing_zeros(),
        since: known.map(|one| one.since),
        used_for: known.map(|one| one.used_for).filter(|text| !text.is_empty()),
        present: None,
        asked: None,
        granted: None,
    }
}

/// Shapes of the features that are known, and of those that are set all the same.
fn all(shape: impl Fn(u64) -> Shape) -> impl FnOnce(u64) -> Vec<Shape> {
    move |set| {
        let known = features::FEATURES.iter().fold(0, |sum, one| sum | one.flag);
        let flags = (0..u64::BITS).map(|bit| 1_u64 << bit);
        flags.filter(|flag| (known | set) & flag != 0).map(shape).collect()
    }
}

fn yes(is_so: Option<bool>) -> Cell {
    let (text, tone) = if is_so == Some(true) { ("yes", Tone::Good) } else { ("no", Tone::Dim) };
    Cell::toned(text, tone)
}

fn of_kernel(listed: &Listed, context: &Context) -> String {
    let mut table = Table::new(&[
        ("feature", Side::Left),
        ("here", Side::Left),
        ("since", Side::Left),
        ("used for", Side::Left),
    ]);
    for one in &listed.features {
        table.row([
            one.name.as_str().into(),
            yes(one.present),
            one.since.unwrap_or("?").into(),
            one.used_for.unwrap_or("-").into(),
        ]);
    }
    let head = format!("kernel {}\n\n", listed.kernel);
    head + &table.render(context.output.terminal())
}

fn of_device(listed: &Listed, context: &Context) -> String {
    let mut table = Table::new(&[
        ("feature", Side::Left),
        ("asked", Side::Left),
        ("granted", Side::Left),
        ("used for", Side::Left),
    ]);
    for one in &listed.features {
        table.row([
            one.name.as_str().into(),
            yes(one.asked),
            yes(one.granted),
            one.used_for.unwrap_or("-").into(),
        ]);
    }
    table.render(context.output.terminal())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_known_feature_is_listed_and_unknown_ones_that_are_set() {
        let listed = all(shape)(1 << 40);
        assert_eq!(listed.len(), features::FEATURES.len() + 1);
        assert_eq!(listed.last().map(|one| (one.name.as_str(), one.since)), Some(("bit 40", None)));
        let text = serde_json::to_string(&shape(1 << 10)).unwrap();
        let expected = r#"{"name":"UPDATE_SIZE","bit":10,"since":"6.16","used_for":"resize while attached","present":null,"asked":null,"granted":null}"#;
        assert_eq!(text, expected);
    }
}
