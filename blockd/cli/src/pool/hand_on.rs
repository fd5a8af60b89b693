//! `blockd pool export` and `blockd pool import`.

use std::path::PathBuf;

use blockd_api::v1::{self, ExportPoolRequest, ImportPoolRequest};
use blockd_media::error::{Error, shown};
use serde::Serialize;

use super::super::{Context, amount, answers};
use super::create::path_argument;

/// Close a pool and forget it, so that another host may import it
///
/// Nothing on the media is changed but that the pool is clean and belongs to no host. Refused while
/// volumes are attached, unless forced, and while the configuration names the pool. A pool that
/// does not exist is not an error. (`blockd export` is for volumes.)
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool export fast\n  \
                  blockd pool import fast /srv/fast.pool")]
pub(crate) struct Export {
    /// The pool
    pub pool: String,

    /// Detach its volumes first, also those in use
    #[arg(long)]
    pub force: bool,
}

/// Open a pool that lies on these files or disks, and remember it
///
/// The next start of the daemon opens it too. Its volumes are not attached. The name is free to
/// choose: names are not on the media. Refused when another host has the pool open, or
/// has not closed it. (`blockd import` is for volumes.)
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool import fast /dev/sdb")]
pub(crate) struct Import {
    /// Its name on this host: 1 to 128 bytes without '/'
    pub pool: String,

    /// Files or disks of the pool: all of them, in any order
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,
}

/// The output of `pool export --json`.
#[derive(Debug, Serialize)]
struct Exported {
    changed: bool,
    pool: String,
    pool_id: Option<String>,
    paths: Vec<String>,
    detached_volumes: Vec<String>,
}

/// The output of `pool import --json`.
#[derive(Debug, Serialize)]
struct Imported {
    changed: bool,
    pool: v1::Pool,
}

impl Export {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let request = ExportPoolRequest { name: self.pool.clone(), force: self.force };
        let answer = context.client().await?.export_pool(request).await?;
        let exported = Exported {
            changed: answer.changed,
            pool: self.pool,
            pool_id: (!answer.id.is_empty()).then_some(answer.id),
            paths: answer.paths,
            detached_volumes: answer.detached_volumes,
        };
        context.output.either(&exported, || exported.text())
    }
}

impl Exported {
    fn text(&self) -> String {
        let name = &self.pool;
        if !self.changed {
            return format!("{name}: there was no such pool\n");
        }
        let volumes: Vec<_> = self.detached_volumes.iter().map(shown).collect();
        let detached = match volumes.as_slice() {
            [] => String::new(),
            volumes => format!(", detached {}", volumes.join(", ")),
        };
        format!("{name}: closed and forgotten{detached}; it lies on {}\n", self.paths.join(" "))
    }
}

impl Import {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let paths = self.paths.iter().map(|path| path_argument(path));
        let paths = paths.collect::<Result<_, _>>()?;
        let request = ImportPoolRequest { name: self.pool, paths };
        let answer = context.client().await?.import_pool(request).await?;
        let imported = Imported { changed: answer.changed, pool: answers::pool(answer.pool)? };
        context.output.either(&imported, || {
            let pool = &imported.pool;
            let size = context.output.size(amount(pool.size_bytes));
            match imported.changed {
                true => format!("{}: {size}, {} volume(s), open\n", pool.name, pool.volume_count),
                false => format!("{}: unchanged, it was open\n", pool.name),
            }
        })
    }
}
