//! `blockd top`: the present activity, refreshed each second.

mod draw;
#[cfg(test)]
pub(crate) mod example;
mod grid;
mod history;
mod model;
mod plain;
mod rates;
mod screen;
mod sort;
mod values;
mod views;

use std::time::Duration;

use blockd_api::v1::{ListConnectionsRequest, ListPoolsRequest, ListVolumesRequest, StatsRequest};
use blockd_media::error::Error;

#[cfg(test)]
pub(crate) use draw::{Page, View, tests::buffer as example_buffer};
#[cfg(test)]
pub(crate) use sort::Sort;

use super::Context;
use super::client::Client;
use model::{Answers, Snapshot};

/// Show pools, volumes, devices and clients at work, refreshed each second
///
/// The keys 1 to 5 or Tab choose a page: volumes, the stages of requests, pools, devices, clients;
/// h explains the columns, s or n, i, b, l, m sort by name, IOPS, bytes, latency, space; p pauses,
/// q quits. A wider screen shows more columns. Rates are those of the last second, and LATELY has
/// the seconds before.
///
/// Latencies are the median and the 99th percentile from a request's arrival to its answer. HELD is
/// the share of the time that connections and queues of a volume were held back before, 100 % for
/// each that always was: because others have their turn on the worker or the media, for the
/// volume's limits, for space in a full pool, or for IO memory. Stages have mean times of all
/// requests, which add up to the total, and percentiles of the requests that were in them.
///
/// Of devices, OWN columns count the pool's own IO: log, metadata and folds. Latency, queue and
/// errors are those of the clients' IO too. IO of clients is counted by volume.
///
/// With --json, or where the output is no terminal, a snapshot each second. NO_COLOR disables
/// colours.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd top\n  blockd top --once")]
pub(crate) struct Top {
    /// Print one snapshot, of rates over a second, and end
    #[arg(long)]
    pub once: bool,

    /// Only this pool
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,
}

/// Between two rounds of questions.
const INTERVAL: Duration = Duration::from_secs(1);

impl Top {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        // It has the whole screen.
        let mut client = context.client().await?.silent();
        let interactive = context.output.terminal().interactive;
        if self.once || context.output.is_json() || !interactive {
            return self.stream(context, &mut client).await;
        }
        screen::run(&mut client, &self.pool, context.output.terminal().colour).await
    }

    /// Prints snapshots, until the reader goes away or for ever.
    async fn stream(&self, context: &Context, client: &mut Client) -> Result<(), Error> {
        let mut before = ask(client, &self.pool).await?;
        loop {
            tokio::time::sleep(INTERVAL).await;
            let now = ask(client, &self.pool).await?;
            let snapshot = Snapshot::between(Some(&before), &now);
            if context.output.is_json() {
                context.output.json_line(&snapshot)?;
            } else {
                context.output.text(&plain::snapshot(&snapshot, &context.output))?;
            }
            if self.once {
                return Ok(());
            }
            before = now;
        }
    }
}

/// One round of questions.
async fn ask(client: &mut Client, pool: &str) -> Result<Answers, Error> {
    let mut pools = client.list_pools(ListPoolsRequest {}).await?.pools;
    pools.retain(|candidate| pool.is_empty() || candidate.name == pool);
    let request = ListVolumesRequest { pool: pool.to_owned(), brief: true };
    let volumes = client.list_volumes(request).await?.volumes;
    let request = StatsRequest { pool: pool.to_owned(), volume: String::new() };
    let stats = client.stats(request).await?;
    let request = ListConnectionsRequest { pool: pool.to_owned(), volume: String::new() };
    let connections = client.list_connections(request).await?.connections;
    Ok(Answers { pools, volumes, stats, connections })
}
