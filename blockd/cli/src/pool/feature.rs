//! `blockd pool feature`.

use std::time::Duration;

use blockd_api::v1::{FoldPoolRequest, PoolFolds, SetPoolFeatureRequest};
use blockd_media::clock::Clock;
use blockd_media::error::Error;
use serde::Serialize;

use super::super::Context;
use super::super::duration::duration;
use super::super::output::table::properties;
use super::super::transfer::progress::Steps;
use super::fold::{self, LOOK, entries};

/// Show the features of a pool, or turn one on or off while it is used
///
/// The one feature is `composite`: the first write after a snapshot lays an extent over the shared
/// one and copies nothing. Releases that do not know it refuse a pool that has it.
#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Example:\n  blockd pool feature list default")]
pub(crate) enum Feature {
    List(List),
    Enable(Enable),
    Disable(Disable),
}

/// A feature that a pool may have.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Name {
    Composite,
}

impl Name {
    const fn word(self) -> &'static str {
        match self {
            Self::Composite => "composite",
        }
    }
}

/// Show the features of a pool
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool feature list default")]
pub(crate) struct List {
    /// The pool [default: the daemon's default pool]
    #[arg(default_value = "", hide_default_value = true)]
    pub pool: String,
}

/// Turn a feature on: older releases refuse the pool from then on
///
/// Repeated, it changes nothing. Refused where the pool has too little space for the pages that the
/// feature takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool feature enable composite default")]
pub(crate) struct Enable {
    /// The feature
    pub feature: Name,

    /// The pool [default: the daemon's default pool]
    #[arg(default_value = "", hide_default_value = true)]
    pub pool: String,
}

/// Turn a feature off, and wait until nothing of it is left in the pool
///
/// All composite entries are folded, those of snapshots too, as fast as `fold_rate` allows. Ctrl-C
/// or the end of --wait ends this command only: the daemon continues. If the daemon ends meanwhile,
/// the pool has the feature as before: repeat the command then.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool feature disable composite default --wait 1h")]
pub(crate) struct Disable {
    /// The feature
    pub feature: Name,

    /// The pool [default: the daemon's default pool]
    #[arg(default_value = "", hide_default_value = true)]
    pub pool: String,

    /// The longest time to wait: 500ms, 30s, 10m [default: without limit]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub wait: Option<Duration>,
}

/// The output of `feature list --json`.
#[derive(Debug, Serialize)]
struct Listed {
    pool: String,
    folds: PoolFolds,
}

/// The output of `feature enable --json` and `feature disable --json`.
#[derive(Debug, Serialize)]
struct Set {
    changed: bool,
    pool: String,
    feature: &'static str,
    folds: PoolFolds,
}

impl Feature {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        match self {
            Self::List(list) => list.run(context).await,
            Self::Enable(enable) => enable.run(context).await,
            Self::Disable(disable) => disable.run(context).await,
        }
    }
}

impl List {
    async fn run(self, context: &Context) -> Result<(), Error> {
        let request = FoldPoolRequest { name: self.pool, begin: false };
        let answer = context.client().await?.fold_pool(request).await?;
        let listed = Listed { pool: answer.name, folds: answer.folds.unwrap_or_default() };
        context.output.either(&listed, || {
            let rows =
                [("pool", listed.pool.clone()), ("composite", fold::composite(&listed.folds))];
            properties(&rows, context.output.paint())
        })
    }
}

impl Enable {
    async fn run(self, context: &Context) -> Result<(), Error> {
        let feature = self.feature.word();
        let asked =
            SetPoolFeatureRequest { name: self.pool, feature: feature.to_owned(), enabled: true };
        let answer = context.client().await?.set_pool_feature(asked).await?;
        let folds = answer.folds.unwrap_or_default();
        let set = Set { changed: answer.changed, pool: answer.name, feature, folds };
        context.output.either(&set, || set.text())
    }
}

impl Disable {
    async fn run(self, context: &Context) -> Result<(), Error> {
        let begun = Clock::start();
        let feature = self.feature.word();
        let mut client = context.client().await?;
        let name = self.pool.clone();
        let asked = SetPoolFeatureRequest { name, feature: feature.to_owned(), enabled: false };
        let answer = client.set_pool_feature(asked).await?;
        let (changed, pool) = (answer.changed, answer.name);
        let mut now = answer.folds.unwrap_or_default();
        let folded_before = now.folded;
        let steps = Steps::shown("folding", !context.output.is_json());
        let refused = |problem| Err(Error::in_use(format!("pool {pool}"), problem));
        while now.enabled {
            let left = entries(now.composite_entries);
            if !now.disabling {
                steps.clear();
                return refused("has the feature again: it was turned on meanwhile, or the pool was closed and opened".to_owned());
            }
            if now.composite_entries > 0 && (now.settled || now.rate_bytes == 0) {
                steps.clear();
                return refused(format!(
                    "has {left} that could not be folded: `blockd pool fold --status` and the \
                     daemon's log say more; repeat the command once the cause is removed"
                ));
            }
            if self.wait.is_some_and(|limit| begun.elapsed() >= limit) {
                steps.clear();
                let limit = self.wait.unwrap_or_default();
                return refused(format!(
                    "has {left} left after {limit:?}. The daemon continues to fold: wait longer, \
                     check with `blockd pool feature list`, or raise fold_rate"
                ));
            }
            let folded = now.folded.saturating_sub(folded_before);
            steps.so_far(folded, folded + now.composite_entries);
            tokio::time::sleep(LOOK).await;
            let look = FoldPoolRequest { name: self.pool.clone(), begin: false };
            now = client.fold_pool(look).await?.folds.unwrap_or_default();
        }
        steps.clear();
        let set = Set { changed, pool, feature, folds: now };
        context.output.either(&set, || set.text())
    }
}

impl Set {
    fn text(&self) -> String {
        let Self { pool, feature, .. } = self;
        let state = fold::composite(&self.folds);
        let how = if self.changed { "" } else { ", unchanged" };
        format!("{pool}: {feature} is {state}{how}\n")
    }
}
