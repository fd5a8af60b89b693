//! `blockd pool close`.

use blockd_api::v1::{self, ClosePoolRequest};
use blockd_media::error::{Error, shown};
use serde::Serialize;

use super::super::{Context, answers};

/// Close a pool, while the daemon serves the others
///
/// Its log is emptied and its file or disk is free for other programs: for the tools that need a
/// closed pool, or to be moved. It stays closed through restarts of the daemon, until `blockd pool
/// open`. A pool that has failed is closed as it is, and read again when it is opened. Refused
/// while volumes are attached, unless forced, and for a pool in memory.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  blockd pool close fast\n  blockd pool check /srv/fast.pool\n  \
                  blockd pool open fast"
)]
pub(crate) struct Close {
    /// The pool [default: the daemon's default pool]
    #[arg(default_value = "", hide_default_value = true)]
    pub pool: String,

    /// Detach its volumes first, also those in use
    ///
    /// Connections are ended, and IO to block devices fails. `blockd pool open` attaches the
    /// volumes again, at the same places.
    #[arg(long)]
    pub force: bool,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Closed {
    changed: bool,
    detached_volumes: Vec<String>,
    closed_connections: u32,
    pool: v1::Pool,
}

impl Close {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let request = ClosePoolRequest { name: self.pool, force: self.force };
        let answer = context.client().await?.close_pool(request).await?;
        let closed = Closed {
            changed: answer.changed,
            detached_volumes: answer.detached_volumes,
            closed_connections: answer.closed_connections,
            pool: answers::pool(answer.pool)?,
        };
        context.output.either(&closed, || closed.text())
    }
}

impl Closed {
    fn text(&self) -> String {
        let name = &self.pool.name;
        let volumes: Vec<_> = self.detached_volumes.iter().map(shown).collect();
        match (self.changed, volumes.as_slice()) {
            (false, _) => format!("{name}: unchanged, it was closed already\n"),
            (true, []) => format!("{name}: closed\n"),
            (true, volumes) => format!("{name}: closed, detached {}\n", volumes.join(", ")),
        }
    }
}
