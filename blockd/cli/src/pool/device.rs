//! `blockd pool device`.

mod add;

use std::path::PathBuf;
use std::time::Duration;

use blockd_api::v1::{
    Device, DeviceRemoval, GetPoolRequest, PoolDeviceState, PoolEvacuation,
    RemovePoolDeviceRequest, RemovePoolDeviceResponse,
};
use blockd_media::clock::Clock;
use blockd_media::error::Error;
use serde::Serialize;

use super::super::duration::duration;
use super::super::output::Output;
use super::super::output::table::{Side, Table};
use super::super::transfer::progress::Progress;
use super::super::{Context, amount, answers, size_argument};
use super::create::path_argument;
use super::fold::LOOK;
pub(crate) use add::{Add, Replace};

/// List the devices of a pool, add one, take one out, or replace one
///
/// All of it while volumes are used: the data of a device that is taken out is moved to the others.
#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Example:\n  blockd pool device list")]
pub(crate) enum PoolDevice {
    List(List),
    Add(Add),
    Remove(Remove),
    Replace(Replace),
}

/// List the devices of a pool
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool device list fast")]
pub(crate) struct List {
    /// The pool [default: the daemon's default pool]
    #[arg(default_value = "", hide_default_value = true)]
    pub pool: String,
}

/// Empty a device and take it out of its pool
///
/// The device leaves the pool: nothing new is put on it, and everything on it is moved to the other
/// devices while volumes are used. Then the pool no longer needs it. A restart of the daemon in
/// between delays that, and ends the command. One device leaves at a time. The first device, which
/// holds the log, can't leave, nor can a device whose data has no room on the others. A device with
/// unreadable blocks that are in use leaves when these are deleted or discarded.
///
/// Ctrl-C or the end of --wait ends this command only: the daemon continues. Once the device has
/// left, take it out of the daemon's configuration, if it is named there. The daemon releases its
/// lock, and has it open until the pool is closed or the daemon ends.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool device remove /dev/sdc --rate 100M\n  \
                  blockd pool device remove /dev/sdc --abort")]
pub(crate) struct Remove {
    /// The path of the device, as `blockd pool device list` has it
    pub path: PathBuf,

    /// Its pool [default: the daemon's default pool]
    #[arg(long, value_name = "POOL", default_value = "", hide_default_value = true)]
    pub pool: String,

    /// Bytes a second that may be moved, like 100M [default: 64M, or the last value since the pool
    /// was opened]
    #[arg(long, value_name = "SIZE")]
    pub rate: Option<String>,

    /// Keep the device after all; what was moved stays where it is
    #[arg(long, conflicts_with_all = ["rate", "wait", "no_wait"])]
    pub abort: bool,

    /// End when the device has begun to leave
    #[arg(long, conflicts_with = "wait")]
    pub no_wait: bool,

    /// The longest time to wait until it has left: 30s, 10m [default: without limit]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub wait: Option<Duration>,
}

/// The output of `list --json`.
#[derive(Debug, Serialize)]
struct Listed {
    pool: String,
    devices: Vec<Device>,
    evacuation: Option<PoolEvacuation>,
}

/// The output of `remove --json`.
#[derive(Debug, Serialize)]
struct Removed {
    changed: bool,
    pool: String,
    path: PathBuf,
    /// Whether the pool no longer needs it.
    has_left: bool,
    evacuation: Option<PoolEvacuation>,
}

/// How far a device is on its way out, or to its new size.
pub(super) fn leaving(evacuation: &PoolEvacuation, output: &Output) -> String {
    let [left, moved, rate, size] = [
        evacuation.left_bytes,
        evacuation.moved_bytes,
        evacuation.rate_bytes,
        evacuation.shrinks_to_bytes,
    ]
    .map(|bytes| output.size(amount(bytes)));
    let shrinks = evacuation.shrinks_to_bytes > 0;
    let to = if shrinks { format!("to {size}, ") } else { String::new() };
    let mut text = format!("{}: {to}{left} left, {moved} moved, at most {rate}/s", evacuation.path);
    if evacuation.waits_for_space {
        let place = if shrinks { "before its new end" } else { "on the other devices" };
        text.push_str(&format!("; waits for free space {place}"));
    }
    if evacuation.errors > 0 {
        text.push_str(&format!("; {} copies failed and are tried again", evacuation.errors));
    }
    text
}

/// Bytes a second that may be moved; 0 where that is left as it is.
pub(super) fn rate_bytes(rate: Option<&str>) -> Result<i64, Error> {
    let Some(text) = rate else { return Ok(0) };
    match size_argument("rate", text)? {
        0 => Err(Error::invalid("rate", text, "at least 1 byte a second")),
        rate => Ok(rate),
    }
}

pub(super) const fn action(aborts: bool) -> DeviceRemoval {
    if aborts { DeviceRemoval::Abort } else { DeviceRemoval::Begin }
}

/// A request to empty a device or its end, and how long to wait for that.
pub(super) struct Emptying {
    pub request: RemovePoolDeviceRequest,
    /// Whether the first answer is the last.
    pub ends_at_once: bool,
    pub wait: Option<Duration>,
    /// The word for a device that is emptied: it has left, or shrunk.
    pub done: &'static str,
}

impl Emptying {
    /// Sends the request, and waits until the device is neither leaving nor shrinking. Returns
    /// whether the request changed anything, and the last answer.
    pub(super) async fn carry_out(
        &self,
        context: &Context,
    ) -> Result<(bool, RemovePoolDeviceResponse), Error> {
        let begun = Clock::start();
        let mut client = context.client().await?;
        let mut answer = client.remove_pool_device(self.request.clone()).await?;
        let changed = answer.changed;
        if self.ends_at_once {
            return Ok((changed, answer));
        }
        let named = answer.device.as_ref().map_or(&self.request.path, |device| &device.path);
        let path = named.clone();
        let look = RemovePoolDeviceRequest {
            name: answer.name.clone(),
            path: path.clone(),
            action: DeviceRemoval::Unspecified.into(),
            rate_bytes: 0,
            keep_bytes: 0,
        };
        let wanted = !context.output.is_json();
        let total = answer.evacuation.as_ref().map_or(0, |one| amount(one.left_bytes));
        let progress = Progress::shown("moving", total, wanted);
        while let (PoolDeviceState::Leaving | PoolDeviceState::Shrinking, Some(now)) =
            (answer.state(), &answer.evacuation)
        {
            if self.wait.is_some_and(|limit| begun.elapsed() >= limit) {
                progress.clear();
                let (limit, done) = (self.wait.unwrap_or_default(), self.done);
                let problem = format!(
                    "has not {done} after {limit:?} ({}). The daemon continues: wait longer, or \
                     see `blockd pool device list`",
                    leaving(now, &context.output)
                );
                return Err(Error::in_use(format!("device {path}"), problem));
            }
            progress.set(total.saturating_sub(amount(now.left_bytes)));
            tokio::time::sleep(LOOK).await;
            answer = client.remove_pool_device(look.clone()).await?;
        }
        progress.clear();
        Ok((changed, answer))
    }
}

impl PoolDevice {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        match self {
            Self::List(list) => list.run(context).await,
            Self::Add(add) => add.run(context).await,
            Self::Remove(remove) => remove.run(context).await,
            Self::Replace(replace) => replace.run(context).await,
        }
    }
}

impl List {
    async fn run(self, context: &Context) -> Result<(), Error> {
        let request = GetPoolRequest { name: self.pool };
        let pool = answers::pool(context.client().await?.get_pool(request).await?.pool)?;
        let (devices, evacuation) = (pool.devices, pool.evacuation);
        let listed = Listed { pool: pool.name, devices, evacuation };
        context.output.either(&listed, || {
            let columns = [("path", Side::Left), ("size", Side::Right), ("state", Side::Left)];
            let mut table = Table::new(&columns);
            for device in &listed.devices {
                let is_leaving = |one: &&PoolEvacuation| one.path == device.path;
                let leaving = listed.evacuation.as_ref().filter(is_leaving);
                let size = |bytes: i64| context.output.size(amount(bytes));
                let left = |one: &PoolEvacuation| match one.shrinks_to_bytes {
                    0 => format!("leaving, {} left", size(one.left_bytes)),
                    to => format!("shrinking to {}, {} left", size(to), size(one.left_bytes)),
                };
                table.row([
                    super::device_name(device).into(),
                    context.output.size(amount(device.size_bytes)).into(),
                    leaving.map_or_else(|| "in use".to_owned(), left).into(),
                ]);
            }
            table.render(context.output.terminal())
        })
    }
}

impl Remove {
    async fn run(self, context: &Context) -> Result<(), Error> {
        let (changed, answer) = self.carry_out(context).await?;
        self.finish(context, changed, answer)
    }

    /// Removes the device, or keeps it. Returns whether that changed anything, and the last answer.
    async fn carry_out(
        &self,
        context: &Context,
    ) -> Result<(bool, RemovePoolDeviceResponse), Error> {
        let request = RemovePoolDeviceRequest {
            name: self.pool.clone(),
            path: path_argument(&self.path)?,
            action: action(self.abort).into(),
            rate_bytes: rate_bytes(self.rate.as_deref())?,
            keep_bytes: 0,
        };
        let ends_at_once = self.abort || self.no_wait;
        let emptying = Emptying { request, ends_at_once, wait: self.wait, done: "left" };
        let (changed, answer) = emptying.carry_out(context).await?;
        if !ends_at_once && answer.state() != PoolDeviceState::Left {
            let problem = "stays in the pool: its removal was aborted";
            return Err(Error::in_use(format!("device {}", emptying.request.path), problem));
        }
        Ok((changed, answer))
    }

    fn finish(
        self,
        context: &Context,
        changed: bool,
        answer: RemovePoolDeviceResponse,
    ) -> Result<(), Error> {
        let state = answer.state();
        let RemovePoolDeviceResponse { name: pool, evacuation, .. } = answer;
        let has_left = state == PoolDeviceState::Left;
        let removed = Removed { changed, pool, path: self.path, has_left, evacuation };
        context.output.either(&removed, || {
            let (path, pool) = (removed.path.display(), &removed.pool);
            match (state, &removed.evacuation, changed) {
                (PoolDeviceState::Leaving, Some(now), _) => {
                    format!("{}\n", leaving(now, &context.output))
                }
                (PoolDeviceState::Left, _, true) => format!("{path} has left pool {pool}\n"),
                (PoolDeviceState::Left, _, false) => {
                    format!("{path}: unchanged, it had left pool {pool}\n")
                }
                (_, _, true) => format!("{path} stays in pool {pool}\n"),
                _ => format!("{path}: unchanged, it is in use in pool {pool}\n"),
            }
        })
    }
}
