//! `blockd list` and `blockd show`.

use blockd_api::v1::{
    Connection, GetVolumeRequest, ListConnectionsRequest, ListVolumesRequest, Releasing, Volume,
    VolumeKind,
};
use blockd_media::error::Error;
use blockd_media::ublk::features;
use blockd_media::units::counted;
use serde::Serialize;

use super::columns::{Column, LABELS, table};
use super::output::percent;
use super::output::table::{Side, Table, properties};
use super::{Context, amount, answers, labels, names, set};

/// List volumes and snapshots
///
/// MAPPED is the space that a volume takes in its pool, shared or not; SIZE is what clients see;
/// FROM is what a snapshot is of, or what a volume was cloned from. What deleted volumes held is
/// let go in the background: a line below the table says how far that is. Another one says what
/// partly received volumes take, which are listed with --all only.
#[derive(Debug, clap::Args)]
#[command(
    visible_alias = "ls",
    after_help = "Example:\n  blockd list\n  blockd list --sort mapped --columns name,mapped,made\n  \
                  blockd list -l --label team=db\n  blockd list --json"
)]
pub(crate) struct List {
    /// Only volumes of this pool
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,

    /// Order: any column. Words from A to Z, numbers from the largest, times from the newest
    /// [default: by pool and name]
    #[arg(long, value_name = "KEY")]
    pub sort: Option<String>,

    /// Columns of the table, in this order: name, pool, size, mapped, state, from, conn, where,
    /// kind, id, made, block-size, valid, exclusive, shared, reserved, set-aside, quota, iops,
    /// bandwidth, labels [default: the first eight]. JSON always has all
    #[arg(long, value_name = "A,B,...")]
    pub columns: Option<String>,

    /// A column of labels more
    #[arg(short = 'l', long)]
    pub labels: bool,

    /// Only volumes with this label; with all of them where it is repeated
    #[arg(long = "label", value_name = "KEY=VALUE")]
    pub filter: Vec<String>,

    /// Also hidden volumes: those that `blockd receive` has not received to their end
    #[arg(long)]
    pub all: bool,
}

/// Show one volume: sizes, space, where it is served, who is connected
///
/// `mapped` is the space of the extents that the volume refers to, `valid` what was written of it,
/// `exclusive` what deleting the volume would free; `reserved` is granted to it and not used
/// yet, `set aside` kept for its first writes. `blockd space` counts several together. The rows
/// from `when full` to `limits` are what `blockd set` has set.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd show data")]
pub(crate) struct Show {
    /// The volume, NAME or POOL/NAME
    pub name: String,

    /// The pool that it is in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,
}

/// The output of `list --json`.
#[derive(Debug, Serialize)]
struct Listed {
    volumes: Vec<Volume>,
    /// Volumes that were deleted or rolled back and whose extents are still being reclaimed.
    releasing: Vec<Releasing>,
}

/// The output of `show --json`.
#[derive(Debug, Serialize)]
pub(crate) struct Shown {
    pub(crate) volume: Volume,
    pub(crate) connections: Vec<Connection>,
    /// Names of the snapshots that were taken of it.
    pub(crate) snapshots: Vec<String>,
    /// Names of the volumes that were cloned from it.
    pub(crate) clones: Vec<String>,
}

impl List {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let mut columns = Column::listed("columns", self.columns.as_deref())?;
        if self.labels && !columns.iter().any(|column| column.name == LABELS) {
            columns.push(Column::named("columns", LABELS)?);
        }
        let filter = labels::pairs(&self.filter)?;
        let sort = self.sort.map(|key| Column::named("sort", &key)).transpose()?;
        let mut client = context.client().await?;
        // Counting what is shared takes time.
        let is_counted =
            context.output.is_json() || columns.iter().chain(&sort).any(Column::is_counted);
        let request = ListVolumesRequest { pool: self.pool, brief: !is_counted };
        let answer = client.list_volumes(request).await?;
        let mut listed = Listed { volumes: answer.volumes, releasing: answer.releasing };
        listed.volumes.retain(|one| labels::has_all(&one.labels, &filter));
        let is_left_out = |one: &mut Volume| !self.all && names::is_hidden(&one.name);
        let left_out: Vec<_> = listed.volumes.extract_if(.., is_left_out).collect();
        if let Some(key) = sort {
            key.sort(&mut listed.volumes);
        }
        context.output.either(&listed, || {
            if listed.volumes.is_empty()
                && left_out.is_empty()
                && filter.is_empty()
                && context.output.terminal().interactive
            {
                return "no volumes; `blockd add --size 10G NAME` makes one\n".to_owned();
            }
            let mut text = table(&listed.volumes, &columns, context);
            for one in &listed.releasing {
                let name = if one.name.is_empty() { "a volume" } else { &one.name };
                let size = |bytes| context.output.size(amount(bytes));
                let (left, total) = (size(one.left_bytes), size(one.total_bytes));
                text.push_str(&format!("{name}: {left} of {total} are still to be let go\n"));
            }
            text.push_str(&note_left_out(&left_out, context));
            text
        })
    }
}

/// The line about hidden volumes, which take space also where no sender goes on with them.
fn note_left_out(left_out: &[Volume], context: &Context) -> String {
    if left_out.is_empty() {
        return String::new();
    }
    let mapped = left_out.iter().map(|one| amount(one.mapped_bytes)).sum();
    let (count, size) = (left_out.len() as u64, context.output.size(mapped));
    format!("{}, {size}: shown with --all\n", counted(count, "partly received volume"))
}

impl Show {
    pub(super) async fn run(mut self, context: &Context) -> Result<(), Error> {
        names::place(&mut self.pool, [&mut self.name])?;
        let mut client = context.client().await?;
        let request = GetVolumeRequest { name: self.name, pool: self.pool };
        let volume = answers::volume(client.get_volume(request).await?.volume)?;
        let request =
            ListConnectionsRequest { pool: volume.pool.clone(), volume: volume.name.clone() };
        let connections = client.list_connections(request).await?.connections;
        let request = ListVolumesRequest { pool: volume.pool.clone(), brief: true };
        let all = client.list_volumes(request).await?.volumes;
        let of_kind = |kind| {
            let mine = all.iter().filter(|one| one.origin_id == volume.id && one.kind() == kind);
            mine.map(|one| one.name.clone()).collect()
        };
        let (snapshots, clones) = (of_kind(VolumeKind::Snapshot), of_kind(VolumeKind::Volume));
        let shown = Shown { connections, snapshots, clones, volume };
        context.output.either(&shown, || details(&shown, context))
    }
}

pub(crate) fn details(shown: &Shown, context: &Context) -> String {
    let Shown { volume, connections, .. } = shown;
    let output = &context.output;
    let size = |value: i64| output.size(amount(value));
    let share = percent(amount(volume.mapped_bytes), amount(volume.size_bytes));
    let mut rows = vec![
        ("name", volume.name.clone()),
        ("pool", volume.pool.clone()),
        ("size", size(volume.size_bytes)),
        ("block size", output.size(u64::from(volume.block_size))),
        ("mapped", format!("{}, {share} of the size", size(volume.mapped_bytes))),
        ("valid", size(volume.valid_bytes)),
        ("exclusive", size(volume.exclusive_bytes)),
        ("shared", size(volume.shared_bytes)),
        ("reserved", size(volume.reserved_bytes)),
        ("set aside", size(volume.set_aside_free_bytes)),
        ("state", answers::state(volume).to_owned()),
    ];
    if answers::is_namespace(volume) {
        rows.extend(volume.usage().word().map(|usage| ("usage", usage.to_owned())));
        rows.push(("taken", size(volume.charged_bytes)));
        let erased = if volume.erase_after { "before its space is free" } else { "never" };
        rows.push(("erased", erased.to_owned()));
        rows.push(("device", volume.device_path.clone()));
        if !volume.device_problem.is_empty() {
            rows.push(("problem", volume.device_problem.clone()));
        }
        return properties(&rows, output.paint());
    }
    if !volume.origin.is_empty() {
        rows.push(("made from", volume.origin.clone()));
    }
    for (name, copies) in [("snapshots", &shown.snapshots), ("clones", &shown.clones)] {
        if !copies.is_empty() {
            rows.push((name, copies.join(", ")));
        }
    }
    if volume.kind() == VolumeKind::Volume {
        rows.extend(set::rows(volume, output));
    }
    rows.extend(volume.labels.iter().map(|label| ("label", labels::shown(label))));
    if volume.made_unix_ms != 0 {
        rows.push(("made", answers::date(volume.made_unix_ms)));
    }
    if !volume.device_path.is_empty() {
        let copying = if volume.zero_copy { "zero copy" } else { "copying" };
        rows.push(("device", volume.device_path.clone()));
        rows.push(("numbers", format!("{}:{}", volume.device_major, volume.device_minor)));
        let (count, depth) = (volume.queue_count, volume.queue_depth);
        rows.push(("queues", format!("{count} of depth {depth}, {copying}")));
        let granted = features::names(volume.device_features_granted).join(", ");
        rows.push(("features", granted));
        let missing = volume.device_features_asked & !volume.device_features_granted;
        if missing != 0 {
            rows.push(("not granted", features::names(missing).join(", ")));
        }
    }
    if !volume.device_problem.is_empty() {
        rows.push(("problem", volume.device_problem.clone()));
    }
    rows.extend(volume.nbd_uris.iter().map(|uri| ("uri", uri.clone())));
    let mut text = properties(&rows, output.paint());
    if !connections.is_empty() {
        text.push('\n');
        text.push_str(&connection_table(connections, context));
    }
    text
}

fn connection_table(connections: &[Connection], context: &Context) -> String {
    let mut table = Table::new(&[
        ("client", Side::Left),
        ("export", Side::Left),
        ("worker", Side::Right),
        ("in flight", Side::Right),
        ("tls", Side::Left),
        ("mode", Side::Left),
    ]);
    for connection in connections {
        table.row([
            connection.peer.as_str().into(),
            connection.export.as_str().into(),
            connection.worker.to_string().into(),
            connection.in_flight.to_string().into(),
            if connection.tls { "yes" } else { "no" }.into(),
            if connection.read_only { "read-only" } else { "read-write" }.into(),
        ]);
    }
    table.render(context.output.terminal())
}
