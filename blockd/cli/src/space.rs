//! `blockd space`.

use blockd_api::v1::{self, GetPoolRequest, SpaceRequest, VolumeSpace};
use blockd_media::error::Error;
use serde::Serialize;

use super::output::table::{Cell, Side, Table, properties};
use super::usage::Usage;
use super::{Context, amount, answers, names};

/// Show what volumes take, and what deleting them would give back
///
/// EXCLUSIVE is space that no other volume refers to, SHARED space that others refer to as well;
/// RESERVED is granted to the volume and not used yet, SET ASIDE is kept for its first writes and
/// counts as free in the pool; FREED is the space that deleting the volume would free. Several
/// named volumes are also counted together: space that only they share is freed when all of them
/// are deleted, and not by deleting one. Without a name, the lines below the table have the whole
/// pool. Figures that were counted during writes are out of date at once, which a note says.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd space\n  blockd space data@monday data@tuesday")]
pub(crate) struct Space {
    /// Volumes and snapshots, NAME or POOL/NAME, at most 64 [default: each of the pool]
    pub names: Vec<String>,

    /// The pool that they are in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct Counted {
    volumes: Vec<Row>,
    /// Null unless several were named.
    together: Option<v1::Space>,
    /// Null when some were named.
    pool: Option<PoolUsage>,
}

#[derive(Debug, Serialize)]
struct PoolUsage {
    name: String,
    #[serde(flatten)]
    usage: Usage,
}

#[derive(Debug, Serialize)]
struct Row {
    name: String,
    kind: &'static str,
    origin: Option<String>,
    #[serde(flatten)]
    space: v1::Space,
}

impl Space {
    pub(super) async fn run(mut self, context: &Context) -> Result<(), Error> {
        names::place(&mut self.pool, &mut self.names)?;
        let mut client = context.client().await?;
        let is_whole = self.names.is_empty();
        let request = SpaceRequest { pool: self.pool.clone(), names: self.names };
        let answer = client.space(request).await?;
        let pool = if is_whole {
            let request = GetPoolRequest { name: self.pool };
            Some(answers::pool(client.get_pool(request).await?.pool)?)
        } else {
            None
        };
        let counted = Counted::of(answer, pool);
        context.output.either(&counted, || table(&counted, context))
    }
}

impl Counted {
    pub(crate) fn of(answer: v1::SpaceResponse, pool: Option<v1::Pool>) -> Self {
        Self {
            volumes: answer.volumes.into_iter().map(row).collect(),
            together: answer.together,
            pool: pool.map(|pool| PoolUsage { usage: Usage::of(&pool), name: pool.name }),
        }
    }
}

fn row(volume: VolumeSpace) -> Row {
    Row {
        kind: volume.kind().word(),
        name: volume.name,
        origin: Some(volume.origin).filter(|origin| !origin.is_empty()),
        space: volume.space.unwrap_or_default(),
    }
}

pub(crate) fn table(counted: &Counted, context: &Context) -> String {
    let mut table = Table::new(&[
        ("name", Side::Left),
        ("kind", Side::Left),
        ("mapped", Side::Right),
        ("valid", Side::Right),
        ("exclusive", Side::Right),
        ("shared", Side::Right),
        ("reserved", Side::Right),
        ("set aside", Side::Right),
        ("freed", Side::Right),
    ]);
    let mut add = |name: &str, kind: &str, space: &v1::Space| {
        let size = |bytes| Cell::from(context.output.size(amount(bytes)));
        table.row([
            name.into(),
            kind.into(),
            size(space.mapped_bytes),
            size(space.valid_bytes),
            size(space.exclusive_bytes),
            size(space.shared_bytes),
            size(space.reserved_bytes),
            size(space.set_aside_free_bytes),
            size(space.gives_back_bytes),
        ]);
    };
    for one in &counted.volumes {
        add(&one.name, one.kind, &one.space);
    }
    if let Some(together) = &counted.together {
        add("together", "-", together);
    }
    let mut text = table.render(context.output.terminal());
    if let Some(pool) = &counted.pool {
        let mut rows = vec![(
            "pool",
            format!("{}, {}", pool.name, context.output.size(pool.usage.size_bytes)),
        )];
        rows.extend(pool.usage.rows(&context.output));
        text.push_str(&format!("\n{}", properties(&rows, context.output.paint())));
    }
    let spaces = counted.volumes.iter().map(|one| &one.space).chain(&counted.together);
    if spaces.into_iter().any(|space| !space.exact) {
        text.push_str("the pool was written meanwhile: these are figures of moments in between\n");
    }
    text
}
