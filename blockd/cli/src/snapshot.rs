//! `blockd snapshot`.

use blockd_api::v1::{CreateSnapshotsRequest, SnapshotMember, Volume};
use blockd_media::error::Error;
use serde::Serialize;

use super::labels::LabelArguments;
use super::{Context, amount, names};

/// Take snapshots of volumes, all at the same moment
///
/// A snapshot is what a volume held at one moment: read-only, listed beside the volumes, and gone
/// with `blockd del`. It takes no space until the volume is written. Writes wait for some
/// milliseconds while snapshots are taken; of several volumes all are taken or none, so that they
/// fit together. A file system that is mounted meanwhile looks like after a power cut: freeze it
/// (`fsfreeze`) for a clean one. Labels are those that are named, for each of them.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  blockd snapshot data=data-monday\n  blockd snapshot db log --tag monday"
)]
pub(crate) struct Snapshot {
    /// The volumes, NAME or POOL/NAME, each with its snapshot's name, or without where --tag is
    /// given
    #[arg(required = true, value_name = "VOLUME[=NAME]")]
    pub volumes: Vec<String>,

    /// Snapshots that were given no name are called VOLUME@TAG
    #[arg(long)]
    pub tag: Option<String>,

    #[command(flatten)]
    pub labels: LabelArguments,

    /// The pool that they are in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Taken {
    changed: bool,
    snapshots: Vec<Volume>,
}

impl Snapshot {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let (pool, members) = members(self.pool, &self.volumes, self.tag.as_deref())?;
        let labels = self.labels.pairs()?;
        let request = CreateSnapshotsRequest { pool, members, labels };
        let answer = context.client().await?.create_snapshots(request).await?;
        let taken = Taken { changed: answer.changed, snapshots: answer.snapshots };
        context.output.either(&taken, || human(&taken, context))
    }
}

/// A volume, and its snapshot's name if that is given.
fn split(text: &str) -> (String, Option<&str>) {
    match text.split_once('=') {
        Some((volume, name)) => (volume.to_owned(), Some(name)),
        None => (text.to_owned(), None),
    }
}

/// The pool, and volumes of it with the names of their snapshots.
fn members(
    mut pool: String,
    volumes: &[String],
    tag: Option<&str>,
) -> Result<(String, Vec<SnapshotMember>), Error> {
    let (mut sources, given): (Vec<String>, Vec<_>) =
        volumes.iter().map(|text| split(text)).unzip();
    names::place(&mut pool, &mut sources)?;
    let member = |(volume, given): (String, Option<&str>)| {
        let name = match (given, tag) {
            (Some(name), _) => name.to_owned(),
            (None, Some(tag)) => format!("{volume}@{tag}"),
            (None, None) => {
                return Err(Error::invalid("volume", volume, "VOLUME=NAME, or VOLUME and --tag"));
            }
        };
        names::check_visible(&name)?;
        Ok(SnapshotMember { volume, name })
    };
    let members: Result<_, Error> = sources.into_iter().zip(given).map(member).collect();
    Ok((pool, members?))
}

fn human(taken: &Taken, context: &Context) -> String {
    let how = if taken.changed { "taken" } else { "was there already" };
    let mut text = String::new();
    for one in &taken.snapshots {
        let of = if one.origin.is_empty() { "a volume that is gone" } else { &one.origin };
        let mapped = context.output.size(amount(one.mapped_bytes));
        text.push_str(&format!("{}: {how}, of {of} with {mapped} mapped\n", one.name));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_given_or_made_with_the_tag() {
        let named = |text: &str, tag| {
            let (pool, members) = members(String::new(), &[text.to_owned()], tag)?;
            let one = members[0].clone();
            Ok::<_, Error>((pool, one.volume, one.name))
        };
        let all = |pool: &str, volume: &str, name: &str| {
            (pool.to_owned(), volume.to_owned(), name.to_owned())
        };
        assert_eq!(named("a=b", None).unwrap(), all("", "a", "b"));
        assert_eq!(named("a=b=c", Some("t")).unwrap(), all("", "a", "b=c"));
        assert_eq!(named("a", Some("t")).unwrap(), all("", "a", "a@t"));
        assert_eq!(named("p/a", Some("t")).unwrap(), all("p", "a", "a@t"));
        assert_eq!(named("p/a=b", None).unwrap(), all("p", "a", "b"));
        let error = named("a", None).unwrap_err();
        assert!(error.to_string().contains("--tag"), "{error}");
    }
}
