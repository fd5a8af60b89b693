//! `blockd pool rebalance`.

use std::time::Duration;

use blockd_api::v1::{
    PoolRebalance, RebalanceAction, RebalancePoolRequest, RebalancePoolResponse, RebalanceState,
};
use blockd_media::clock::Clock;
use blockd_media::error::Error;
use serde::Serialize;

use super::super::duration::duration;
use super::super::output::Output;
use super::super::output::percent;
use super::super::output::table::properties;
use super::super::transfer::progress::Progress;
use super::super::{Context, amount};
use super::device::rate_bytes;
use super::fold::LOOK;

/// Even out the use of a pool's devices
///
/// Data is moved from fuller devices to emptier ones while volumes are used, until the same share
/// of each device is used: within a hundredth of its size, or 4 extents. Metadata and the log stay
/// where they are. To be run after a device was added. It takes no space that is set aside, and
/// waits while the pool is low.
///
/// The rebalance ends when a device begins to leave or to shrink, and with the daemon: run it again
/// then. Data that was moved stays where it is. Ctrl-C or the end of --wait ends this command only:
/// the daemon continues.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool rebalance fast --rate 100M\n  \
                  blockd pool rebalance fast --status\n  blockd pool rebalance fast --abort")]
pub(crate) struct Rebalance {
    /// The pool [default: the daemon's default pool]
    #[arg(default_value = "", hide_default_value = true)]
    pub pool: String,

    /// Show the use of the devices, and how far the rebalance is
    #[arg(long, conflicts_with_all = ["rate", "abort", "wait", "no_wait"])]
    pub status: bool,

    /// Bytes a second that may be moved, like 100M [default: 64M, or the last value since the pool
    /// was opened]
    #[arg(long, value_name = "SIZE")]
    pub rate: Option<String>,

    /// Move no more; what was moved stays where it is
    #[arg(long, conflicts_with_all = ["rate", "wait", "no_wait"])]
    pub abort: bool,

    /// End when the rebalance has begun
    #[arg(long, conflicts_with = "wait")]
    pub no_wait: bool,

    /// The longest time to wait until the devices are even: 30s, 10m [default: without limit]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub wait: Option<Duration>,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Rebalanced {
    changed: bool,
    pool: String,
    rebalance: Option<PoolRebalance>,
}

/// How far a rebalance is that is running.
pub(super) fn moving(one: &PoolRebalance, output: &Output) -> String {
    let [left, moved, rate] =
        [one.left_bytes, one.moved_bytes, one.rate_bytes].map(|bytes| output.size(amount(bytes)));
    let mut text = format!("{left} to be moved, {moved} moved, at most {rate}/s");
    if one.waits_for_space {
        text.push_str("; waits while the pool is low");
    }
    if one.errors > 0 {
        text.push_str(&format!("; {} copies failed and are tried again", one.errors));
    }
    text
}

/// The state in words.
fn state(one: &PoolRebalance, output: &Output) -> String {
    let moved = output.size(amount(one.moved_bytes));
    match one.state() {
        RebalanceState::Unspecified => "none since the pool was opened".to_owned(),
        RebalanceState::Running => moving(one, output),
        RebalanceState::Even => format!("done, {moved} moved"),
        RebalanceState::Rest => format!("done, {moved} moved; the rest can't be moved now"),
        RebalanceState::Aborted => format!("aborted, {moved} moved"),
        RebalanceState::Displaced => {
            format!("ended as a device leaves or shrinks, {moved} moved")
        }
    }
}

/// The rows of the devices: the use of each now, and before the rebalance.
fn devices(one: &PoolRebalance, output: &Output) -> Vec<(&'static str, String)> {
    let row = |device: &blockd_api::v1::DeviceUse| {
        let size = amount(device.total_bytes);
        let share = |bytes: i64| percent(amount(bytes), size);
        let (now, size) = (share(device.used_bytes), output.size(size));
        let before = match one.state() {
            RebalanceState::Unspecified => String::new(),
            _ => format!(", {} before", share(device.before_bytes)),
        };
        ("device", format!("{}: {now} of {size} in use{before}", device.path))
    };
    one.devices.iter().map(row).collect()
}

impl Rebalance {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let (changed, has_run, answer) = self.carry_out(context).await?;
        let RebalancePoolResponse { name: pool, rebalance, .. } = answer;
        let done = Rebalanced { changed, pool, rebalance };
        context.output.either(&done, || {
            let one = done.rebalance.clone().unwrap_or_default();
            if self.status {
                return done.status(&one, &context.output);
            }
            let (pool, moved) = (&done.pool, context.output.size(amount(one.moved_bytes)));
            match (one.state(), changed || has_run) {
                (RebalanceState::Running, _) => {
                    format!("{pool}: {}\n", moving(&one, &context.output))
                }
                (_, false) if self.abort => format!("{pool}: unchanged, no rebalance is running\n"),
                (_, false) => format!("{pool}: unchanged, its devices are evenly used\n"),
                (RebalanceState::Even, true) => {
                    format!("{pool}: its devices are evenly used, {moved} moved\n")
                }
                (_, true) => format!("{pool}: {}\n", state(&one, &context.output)),
            }
        })
    }

    /// Sends the request, and waits for the end. Returns whether the request changed anything,
    /// whether a rebalance was waited for, and the last answer.
    async fn carry_out(
        &self,
        context: &Context,
    ) -> Result<(bool, bool, RebalancePoolResponse), Error> {
        let begun = Clock::start();
        let mut client = context.client().await?;
        let action = match (self.status, self.abort) {
            (true, _) => RebalanceAction::Unspecified,
            (_, true) => RebalanceAction::Abort,
            _ => RebalanceAction::Begin,
        };
        let request = RebalancePoolRequest {
            name: self.pool.clone(),
            action: action.into(),
            rate_bytes: rate_bytes(self.rate.as_deref())?,
        };
        let mut answer = client.rebalance_pool(request).await?;
        let changed = answer.changed;
        if self.status || self.abort || self.no_wait || !runs(&answer) {
            return Ok((changed, false, answer));
        }
        let look = RebalancePoolRequest { name: answer.name.clone(), ..Default::default() };
        let progress = Progress::shown("moving", total(&answer), !context.output.is_json());
        while runs(&answer) {
            let now = answer.rebalance.clone().unwrap_or_default();
            if let Some(limit) = self.wait.filter(|limit| begun.elapsed() >= *limit) {
                progress.clear();
                let problem = format!(
                    "is not even after {limit:?} ({}). The daemon continues: wait longer, or see \
                     --status",
                    moving(&now, &context.output)
                );
                return Err(Error::in_use(format!("pool {}", answer.name), problem));
            }
            progress.set(amount(now.moved_bytes).min(total(&answer)));
            tokio::time::sleep(LOOK).await;
            answer = client.rebalance_pool(look.clone()).await?;
        }
        progress.clear();
        let one = answer.rebalance.clone().unwrap_or_default();
        if !matches!(one.state(), RebalanceState::Even | RebalanceState::Rest) {
            let problem = format!("is not evened out: {}", state(&one, &context.output));
            return Err(Error::in_use(format!("pool {}", answer.name), problem));
        }
        Ok((changed, true, answer))
    }
}

fn runs(answer: &RebalancePoolResponse) -> bool {
    answer.rebalance.as_ref().is_some_and(|one| one.state() == RebalanceState::Running)
}

fn total(answer: &RebalancePoolResponse) -> u64 {
    answer.rebalance.as_ref().map_or(0, |one| amount(one.left_bytes) + amount(one.moved_bytes))
}

impl Rebalanced {
    fn status(&self, one: &PoolRebalance, output: &Output) -> String {
        let mut rows = vec![("pool", self.pool.clone())];
        match self.rebalance {
            Some(_) => rows.push(("rebalance", state(one, output))),
            None => rows.push(("rebalance", "none: the pool has one device".to_owned())),
        }
        rows.extend(devices(one, output));
        properties(&rows, output.paint())
    }
}
