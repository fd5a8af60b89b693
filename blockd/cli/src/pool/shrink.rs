//! `blockd pool shrink`.

use std::path::PathBuf;
use std::time::Duration;

use blockd_api::v1::{
    Device, DeviceKind, GetPoolRequest, PoolDeviceState, PoolEvacuation, RemovePoolDeviceRequest,
    RemovePoolDeviceResponse,
};
use blockd_media::error::Error;
use serde::Serialize;

use super::super::duration::duration;
use super::super::{Context, amount, answers, size_argument};
use super::create::path_argument;
use super::device::{Emptying, action, leaving, rate_bytes};

/// Make a device of a pool smaller
///
/// Everything behind the new end is moved to the rest of the pool while volumes are used; nothing
/// new is put there from the beginning. Then the pool uses no more of the device, and a file is
/// truncated. A disk stays as long as it is: make its partition or logical volume smaller after
/// that. A restart of the daemon in between only delays it. The pool keeps room for what is in use
/// and set aside, for its log, and above its low mark. One device shrinks or leaves at a time. A
/// pool in memory stays as it is.
///
/// The size is rounded down to whole extents. With -SIZE, it is less by so much. Ctrl-C or the end
/// of --wait ends this command only: the daemon continues. A daemon that is killed when the pool
/// is smaller and before the file is truncated leaves the file as it is: the same command truncates
/// it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool shrink --size 200G\n  \
                  blockd pool shrink fast --size -50G --device /dev/sdc --rate 100M\n  \
                  blockd pool shrink fast --device /dev/sdc --abort")]
pub(crate) struct Shrink {
    /// The pool [default: the daemon's default pool]
    #[arg(default_value = "", hide_default_value = true)]
    pub pool: String,

    /// New size of the device, like 200G, or a decrement, like -50G
    #[arg(
        long,
        value_name = "SIZE",
        allow_hyphen_values = true,
        required_unless_present = "abort"
    )]
    pub size: Option<String>,

    /// The path of the device, as `blockd pool device list` has it [default: the only one]
    #[arg(long, value_name = "PATH")]
    pub device: Option<PathBuf>,

    /// Bytes a second that may be moved, like 100M [default: 64M, or the last value since the pool
    /// was opened]
    #[arg(long, value_name = "SIZE")]
    pub rate: Option<String>,

    /// Keep the size after all; what was moved stays where it is
    #[arg(long, conflicts_with_all = ["size", "rate", "wait", "no_wait"])]
    pub abort: bool,

    /// End when the device has begun to shrink
    #[arg(long, conflicts_with = "wait")]
    pub no_wait: bool,

    /// The longest time to wait until it has shrunk: 30s, 10m [default: without limit]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub wait: Option<Duration>,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Shrunk {
    changed: bool,
    pool: String,
    path: String,
    /// Bytes that the device has in the pool now.
    size_bytes: u64,
    /// Whether it has the new size.
    has_shrunk: bool,
    evacuation: Option<PoolEvacuation>,
}

impl Shrink {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let (path, keep_bytes) = self.wanted(context).await?;
        let request = RemovePoolDeviceRequest {
            name: self.pool.clone(),
            path,
            action: action(self.abort).into(),
            rate_bytes: rate_bytes(self.rate.as_deref())?,
            keep_bytes,
        };
        let ends_at_once = self.abort || self.no_wait;
        let emptying = Emptying { request, ends_at_once, wait: self.wait, done: "shrunk" };
        let (changed, answer) = emptying.carry_out(context).await?;
        let state = answer.state();
        let RemovePoolDeviceResponse { name: pool, evacuation, device, .. } = answer;
        let device = answers::device(device)?;
        let is_small = state == PoolDeviceState::InUse && device.size_bytes <= keep_bytes;
        if !ends_at_once && !is_small {
            let problem = "keeps its size: its shrinking was aborted";
            return Err(Error::in_use(format!("device {}", device.path), problem));
        }
        let shrunk = Shrunk {
            changed,
            pool,
            path: device.path.clone(),
            size_bytes: amount(device.size_bytes),
            has_shrunk: is_small,
            evacuation: evacuation.filter(|_| state == PoolDeviceState::Shrinking),
        };
        context.output.either(&shrunk, || {
            let (path, pool) = (&shrunk.path, &shrunk.pool);
            let size = context.output.size(shrunk.size_bytes);
            match (&shrunk.evacuation, shrunk.has_shrunk, changed) {
                (Some(now), ..) => format!("{}\n", leaving(now, &context.output)),
                (None, true, true) => format!("{path}: {size} in pool {pool}{}\n", rest(&device)),
                (None, true, false) => format!("{path}: unchanged, {size} in pool {pool}\n"),
                (None, false, true) => format!("{path} stays at {size} in pool {pool}\n"),
                (None, false, false) => {
                    format!("{path}: unchanged, it has {size} in pool {pool} and does not shrink\n")
                }
            }
        })
    }

    /// The path of the device and the bytes that it is to keep; an empty path for the only one.
    async fn wanted(&self, context: &Context) -> Result<(String, i64), Error> {
        let path = self.device.as_ref().map(|path| path_argument(path)).transpose()?;
        let size = match self.size.as_deref().map(|text| (text, text.strip_prefix('-'))) {
            Some((text, None)) => {
                let size = size_argument("size", text)?;
                return match size {
                    0 => Err(Error::invalid("size", text, "more than 0")),
                    size => Ok((path.unwrap_or_default(), size)),
                };
            }
            Some((_, Some(less))) => size_argument("size", less)?,
            None => 0,
        };
        if let (Some(path), true) = (&path, self.abort) {
            return Ok((path.clone(), 0));
        }
        let request = GetPoolRequest { name: self.pool.clone() };
        let pool = answers::pool(context.client().await?.get_pool(request).await?.pool)?;
        let shrinking = pool.evacuation.filter(|one| self.abort && one.shrinks_to_bytes > 0);
        let path = path.or_else(|| shrinking.map(|one| one.path));
        let is_named = |one: &&Device| path.as_ref().is_none_or(|path| one.path == *path);
        let mut found = pool.devices.iter().filter(is_named);
        let (Some(device), None) = (found.next(), found.next()) else {
            let known: Vec<&str> = pool.devices.iter().map(|one| one.path.as_str()).collect();
            let allowed = format!("the path of one of the pool's devices: {}", known.join(", "));
            return Err(Error::invalid("device", path.unwrap_or_default(), allowed));
        };
        match (self.abort, device.size_bytes - size) {
            (true, _) => Ok((device.path.clone(), 0)),
            (false, keep) if keep > 0 => Ok((device.path.clone(), keep)),
            _ => {
                let allowed =
                    format!("less than {}", context.output.size(amount(device.size_bytes)));
                Err(Error::invalid("size", self.size.as_deref().unwrap_or_default(), allowed))
            }
        }
    }
}

/// A word about a device that stays as long as it is.
fn rest(device: &Device) -> &'static str {
    match device.kind() {
        DeviceKind::File => "",
        _ => "; the disk stays as long as it is, its end is not used any more",
    }
}
