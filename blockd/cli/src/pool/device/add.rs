//! `blockd pool device add` and `replace`.

use std::path::PathBuf;
use std::time::Duration;

use blockd_api::v1::{
    AddPoolDeviceRequest, AddPoolDeviceResponse, PoolDeviceState, PoolEvacuation,
};
use blockd_media::error::Error;
use serde::Serialize;

use super::super::super::duration::duration;
use super::super::super::{Context, amount};
use super::super::create::path_argument;
use super::{Remove, leaving, rate_bytes};

/// Take a file or disk into a pool
///
/// The device has to be there and to be empty. It is used at once, and the pool is opened with it
/// from then on: it need not be named in the daemon's configuration. A spare device joins at once,
/// too. Data that is there stays where it is.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool device add /dev/sdd --pool fast")]
pub(crate) struct Add {
    /// The path of the device
    pub path: PathBuf,

    /// The pool [default: the daemon's default pool]
    #[arg(long, value_name = "POOL", default_value = "", hide_default_value = true)]
    pub pool: String,
}

/// Take a device into a pool, and another one out of it
///
/// The same as `add NEW` and then `remove OLD`. A part that is done already is left as it is: after
/// an error, the same command goes on. It is refused before anything is changed where OLD can't be
/// taken out.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool device replace /dev/sdc /dev/sdd --rate 100M\n  \
                  blockd pool device replace /dev/sdc /dev/sdd --no-wait")]
pub(crate) struct Replace {
    /// The device to take out, as `blockd pool device list` has it
    pub old: PathBuf,

    /// The device to take in
    pub new: PathBuf,

    /// Their pool [default: the daemon's default pool]
    #[arg(long, value_name = "POOL", default_value = "", hide_default_value = true)]
    pub pool: String,

    /// Bytes a second that may be moved, like 100M [default: 64M, or the last value since the pool
    /// was opened]
    #[arg(long, value_name = "SIZE")]
    pub rate: Option<String>,

    /// End when the old device has begun to leave
    #[arg(long, conflicts_with = "wait")]
    pub no_wait: bool,

    /// The longest time to wait until it has left: 30s, 10m [default: without limit]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub wait: Option<Duration>,
}

/// The output of `add --json`.
#[derive(Debug, Serialize)]
struct Added {
    changed: bool,
    pool: String,
    path: PathBuf,
    /// By how much the pool has grown.
    gained_bytes: i64,
}

/// The output of `replace --json`.
#[derive(Debug, Serialize)]
struct Replaced {
    changed: bool,
    pool: String,
    old: PathBuf,
    new: PathBuf,
    /// Whether this command has taken the new device in.
    added: bool,
    gained_bytes: i64,
    /// Whether the pool no longer needs the old device.
    has_left: bool,
    evacuation: Option<PoolEvacuation>,
}

async fn add(
    context: &Context,
    pool: &str,
    path: String,
    replaces: String,
) -> Result<AddPoolDeviceResponse, Error> {
    let request = AddPoolDeviceRequest { name: pool.to_owned(), path, replaces };
    context.client().await?.add_pool_device(request).await
}

impl Add {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let path = path_argument(&self.path)?;
        let answer = add(context, &self.pool, path.clone(), String::new()).await?;
        let AddPoolDeviceResponse { changed, name: pool, gained_bytes } = answer;
        let added = Added { changed, pool, path: path.into(), gained_bytes };
        context.output.either(&added, || {
            let (path, pool) = (added.path.display(), &added.pool);
            match added.changed {
                true => {
                    let gained = context.output.size(amount(added.gained_bytes));
                    format!("{path} has joined pool {pool}, which has grown by {gained}\n")
                }
                false => format!("{path}: unchanged, it is in use in pool {pool}\n"),
            }
        })
    }
}

impl Replace {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let Self { old, new, pool, rate, no_wait, wait } = self;
        let remove = Remove { path: old, pool, rate, abort: false, no_wait, wait };
        rate_bytes(remove.rate.as_deref())?;
        let new = path_argument(&new)?;
        let old = path_argument(&remove.path)?;
        let added = add(context, &remove.pool, new.clone(), old).await?;
        let removed = remove.carry_out(context).await;
        let (changed, answer) = removed.map_err(|error| {
            let pool = &added.name;
            error.with_note(&format!("{new} is in use in pool {pool}: repeat the command to go on"))
        })?;
        let has_left = answer.state() == PoolDeviceState::Left;
        let replaced = Replaced {
            changed: changed || added.changed,
            pool: added.name,
            old: remove.path,
            new: new.into(),
            added: added.changed,
            gained_bytes: added.gained_bytes,
            has_left,
            evacuation: answer.evacuation,
        };
        context.output.either(&replaced, || {
            let (old, new) = (replaced.old.display(), replaced.new.display());
            let pool = &replaced.pool;
            match (&replaced.evacuation, replaced.changed) {
                (Some(now), _) if !has_left => {
                    let leaving = leaving(now, &context.output);
                    format!("{new} is in use in pool {pool}\n{leaving}\n")
                }
                (_, true) => format!("{new} has replaced {old} in pool {pool}\n"),
                (_, false) => format!("unchanged: {new} had replaced {old} in pool {pool}\n"),
            }
        })
    }
}
