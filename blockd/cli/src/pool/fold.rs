//! `blockd pool fold`.

use std::time::Duration;

use blockd_api::v1::{FoldPoolRequest, FoldPoolResponse, PoolFolds};
use blockd_media::clock::Clock;
use blockd_media::error::Error;
use blockd_media::units::counted;
use serde::Serialize;

use super::super::duration::duration;
use super::super::output::Output;
use super::super::output::table::properties;
use super::super::transfer::progress::Steps;
use super::super::{Context, amount};

/// How often the daemon is asked how far it is.
pub(super) const LOOK: Duration = Duration::from_millis(100);

/// Show the composite entries of a pool and their folds, or fold them now
///
/// The first write after a snapshot lays an extent over the shared one: a composite entry. Once the
/// snapshot is gone, a fold makes one extent of the two in the background, which frees the other.
/// Ctrl-C or the end of --wait ends this command only: the daemon continues to fold.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool fold default --status\n  \
                  blockd pool fold default --now --wait 10m")]
#[command(group = clap::ArgGroup::new("action").required(true))]
pub(crate) struct Fold {
    /// The pool [default: the daemon's default pool]
    #[arg(default_value = "", hide_default_value = true)]
    pub pool: String,

    /// Show composite entries and folds as they are now
    #[arg(long, group = "action")]
    pub status: bool,

    /// Look for all that can be folded, and wait until it is
    #[arg(long, group = "action")]
    pub now: bool,

    /// With --now, the longest time to wait: 500ms, 30s, 10m [default: without limit]
    #[arg(long, value_name = "TIME", value_parser = duration, requires = "now")]
    pub wait: Option<Duration>,
}

/// The output of `--status --json`.
#[derive(Debug, Serialize)]
struct Status {
    pool: String,
    folds: PoolFolds,
}

/// The output of `--now --json`.
#[derive(Debug, Serialize)]
struct Folded {
    changed: bool,
    pool: String,
    /// Entries that were folded meanwhile, and the bytes that were copied for that.
    folded_entries: u64,
    copied_bytes: u64,
    folds: PoolFolds,
}

/// Whether a pool has composite entries, and how many.
pub(super) fn composite(folds: &PoolFolds) -> String {
    let on = if folds.disabling { "being turned off" } else { "on" };
    match (folds.enabled, folds.composite_entries) {
        (false, _) => "off".to_owned(),
        (true, 0) => format!("{on}, no entry"),
        (true, 1) => format!("{on}, 1 entry"),
        (true, count) => format!("{on}, {count} entries"),
    }
}

/// The folds of a pool since it was opened.
pub(super) fn folds(folds: &PoolFolds, output: &Output) -> String {
    let copied = output.size(amount(folds.copied_bytes));
    let rate = match amount(folds.rate_bytes) {
        0 => "off".to_owned(),
        bytes => format!("at most {}/s", output.size(bytes)),
    };
    let PoolFolds { running, folded, abandoned, .. } = folds;
    format!("{running} running, {folded} done ({copied} copied), {abandoned} abandoned, {rate}")
}

impl Fold {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        if self.now {
            return self.fold_now(context).await;
        }
        let mut client = context.client().await?;
        let answer = client.fold_pool(FoldPoolRequest { name: self.pool, begin: false }).await?;
        let status = Status { folds: figures(&answer), pool: answer.name };
        context.output.either(&status, || {
            let rows = [
                ("pool", status.pool.clone()),
                ("composite", composite(&status.folds)),
                ("folds", folds(&status.folds, &context.output)),
                ("settled", if status.folds.settled { "yes" } else { "no" }.to_owned()),
            ];
            properties(&rows, context.output.paint())
        })
    }

    async fn fold_now(self, context: &Context) -> Result<(), Error> {
        let begun = Clock::start();
        let mut client = context.client().await?;
        let look = FoldPoolRequest { name: self.pool.clone(), begin: false };
        let before = figures(&client.fold_pool(look.clone()).await?);
        let mut answer = client.fold_pool(FoldPoolRequest { begin: true, ..look.clone() }).await?;
        let was_begun = answer.changed;
        let steps = Steps::shown("folding", !context.output.is_json());
        let now = loop {
            let now = figures(&answer);
            if now.settled || !now.enabled || now.rate_bytes == 0 {
                break now;
            }
            if self.wait.is_some_and(|limit| begun.elapsed() >= limit) {
                steps.clear();
                let left = entries(now.composite_entries);
                let limit = self.wait.unwrap_or_default();
                let problem = format!(
                    "has {left} left after {limit:?}. The daemon continues to fold: wait longer, \
                     check with --status, or raise fold_rate"
                );
                return Err(Error::in_use(format!("pool {}", answer.name), problem));
            }
            let folded = now.folded.saturating_sub(before.folded);
            steps.so_far(folded, folded + now.composite_entries);
            tokio::time::sleep(LOOK).await;
            answer = client.fold_pool(look.clone()).await?;
        };
        steps.clear();
        let folded_entries = now.folded.saturating_sub(before.folded);
        let copied_bytes = amount(now.copied_bytes).saturating_sub(amount(before.copied_bytes));
        let changed = was_begun && folded_entries > 0;
        let done = Folded { changed, pool: answer.name, folded_entries, copied_bytes, folds: now };
        context.output.either(&done, || done.text(&context.output))
    }
}

impl Folded {
    fn text(&self, output: &Output) -> String {
        let Self { pool, folded_entries, folds, .. } = self;
        let left = match folds.composite_entries {
            0 => "no composite entry is left".to_owned(),
            count if !folds.enabled || folds.rate_bytes == 0 => {
                format!("{} left, folds are off (fold_rate)", entries(count))
            }
            count => {
                let left = entries(count);
                format!("{left} left: shared with a snapshot or clone, or the disk failed")
            }
        };
        let copied = output.size(self.copied_bytes);
        match *folded_entries {
            0 => format!("{pool}: unchanged, {left}\n"),
            count => format!("{pool}: {count} folded, {copied} copied; {left}\n"),
        }
    }
}

pub(super) fn entries(count: u64) -> String {
    counted(count, "composite entry")
}

/// The figures of an answer; none of a daemon that sends none.
fn figures(answer: &FoldPoolResponse) -> PoolFolds {
    answer.folds.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::terminal::Terminal;

    #[test]
    fn the_answer_says_what_was_done_and_what_is_left() {
        let output = Output::with(false, false, Terminal::none());
        let done = |folded_entries, composite_entries| {
            let on = PoolFolds { enabled: true, rate_bytes: 1, ..PoolFolds::default() };
            let folds = PoolFolds { composite_entries, ..on };
            let copied_bytes = folded_entries * 4096;
            let changed = folded_entries > 0;
            Folded { changed, pool: "p".to_owned(), folded_entries, copied_bytes, folds }
        };
        let texts = [(0, 0), (0, 2), (3, 0)].map(|(a, b)| done(a, b).text(&output));
        assert_eq!(texts[0], "p: unchanged, no composite entry is left\n");
        assert_eq!(
            texts[1],
            "p: unchanged, 2 composite entries left: shared with a snapshot or clone, or the disk failed\n"
        );
        assert_eq!(texts[2], "p: 3 folded, 12 KiB copied; no composite entry is left\n");
    }

    #[test]
    fn a_pool_without_the_feature_says_off() {
        let folds = PoolFolds::default();
        assert_eq!(composite(&folds), "off");
        let one = PoolFolds { enabled: true, composite_entries: 1, ..folds };
        assert_eq!(composite(&one), "on, 1 entry");
    }
}
