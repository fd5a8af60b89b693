//! `blockd space`.

use blockd_api::v1::{self, SpaceRequest, VolumeSpace};
use blockd_media::error::Error;
use serde::Serialize;

use super::output::table::{Cell, Side, Table};
use super::{Context, amount};

/// Show what volumes take, and what deleting them would give back
///
/// EXCLUSIVE is space that no other volume refers to, SHARED space that others refer to as well;
/// FREED is the space that deleting the volume would free. Several named volumes are also counted
/// together: space that only they share is freed when all of them are deleted, and not by deleting
/// one. Figures that were counted during writes are out of date at once, which a note says.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd space\n  blockd space data@monday data@tuesday")]
pub(crate) struct Space {
    /// Volumes and snapshots, at most 64 [default: each of the pool]
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
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let request = SpaceRequest { pool: self.pool, names: self.names };
        let answer = context.client().await?.space(request).await?;
        let counted = Counted::of(answer);
        context.output.either(&counted, || table(&counted, context))
    }
}

impl Counted {
    pub(crate) fn of(answer: v1::SpaceResponse) -> Self {
        Self { volumes: answer.volumes.into_iter().map(row).collect(), together: answer.together }
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
    let spaces = counted.volumes.iter().map(|one| &one.space).chain(&counted.together);
    if spaces.into_iter().any(|space| !space.exact) {
        text.push_str("the pool was written meanwhile: these are figures of moments in between\n");
    }
    text
}
