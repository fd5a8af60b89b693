//! `blockd snapshot`.

use blockd_api::v1::{CreateSnapshotsRequest, SnapshotMember, Volume};
use blockd_media::error::Error;
use serde::Serialize;

use super::{Context, amount};

/// Take snapshots of volumes, all at the same moment
///
/// A snapshot is what a volume held at one moment: read-only, listed beside the volumes, and gone
/// with `blockd del`. It takes no space until the volume is written. Writes wait for some
/// milliseconds while snapshots are taken; of several volumes all are taken or none, so that they
/// fit together. A file system that is mounted meanwhile looks like after a power cut: freeze it
/// (`fsfreeze`) for a clean one.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  blockd snapshot data=data-monday\n  blockd snapshot db log --tag monday"
)]
pub(crate) struct Snapshot {
    /// The volumes, each with its snapshot's name, or without where --tag is given
    #[arg(required = true, value_name = "VOLUME[=NAME]")]
    pub volumes: Vec<String>,

    /// Snapshots that were given no name are called VOLUME@TAG
    #[arg(long)]
    pub tag: Option<String>,

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
        let tag = self.tag.as_deref();
        let members: Result<_, Error> = self.volumes.iter().map(|one| member(one, tag)).collect();
        let request = CreateSnapshotsRequest { pool: self.pool, members: members? };
        let answer = context.client().await?.create_snapshots(request).await?;
        let taken = Taken { changed: answer.changed, snapshots: answer.snapshots };
        context.output.either(&taken, || human(&taken, context))
    }
}

/// A volume and its snapshot's name.
fn member(text: &str, tag: Option<&str>) -> Result<SnapshotMember, Error> {
    let (volume, name) = match (text.split_once('='), tag) {
        (Some((volume, name)), _) => (volume, name.to_owned()),
        (None, Some(tag)) => (text, format!("{text}@{tag}")),
        (None, None) => {
            return Err(Error::invalid("volume", text, "VOLUME=NAME, or VOLUME and --tag"));
        }
    };
    Ok(SnapshotMember { volume: volume.to_owned(), name })
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
        let named = |text: &str, tag| member(text, tag).map(|one| (one.volume, one.name));
        let pair = |volume: &str, name: &str| (volume.to_owned(), name.to_owned());
        assert_eq!(named("a=b", None).unwrap(), pair("a", "b"));
        assert_eq!(named("a=b=c", Some("t")).unwrap(), pair("a", "b=c"));
        assert_eq!(named("a", Some("t")).unwrap(), pair("a", "a@t"));
        let error = named("a", None).unwrap_err();
        assert!(error.to_string().contains("--tag"), "{error}");
    }
}
