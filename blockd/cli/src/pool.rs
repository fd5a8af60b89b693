//! `blockd pool`.

use std::path::PathBuf;

use blockd_api::v1::{
    self, CreatePoolRequest, DeviceKind, ExtentKind, GetPoolRequest, ListPoolsRequest,
    OpenPoolRequest, PoolExtentsRequest, PoolExtentsResponse, PoolState,
};
use blockd_media::error::Error;
use serde::Serialize;

use super::grow::Grow;
use super::map::{self, Device, Picture, Run, Use};
use super::output::percent;
use super::output::table::{Cell, Side, Table, properties};
use super::output::terminal::Tone;
use super::{Context, amount, answers, node, pool_tools, size_argument};

/// List, show, draw, make, check and repair pools
///
/// A pool is a file, a disk or memory that volumes take their space from.
#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Example:\n  blockd pool list")]
pub(crate) enum Pool {
    List(List),
    Show(Show),
    Map(Map),
    Create(Create),
    Open(Open),
    Grow(Grow),
    Check(pool_tools::Check),
    Dump(pool_tools::Dump),
    Restore(pool_tools::Restore),
    Repair(pool_tools::Repair),
    Rmap(pool_tools::Rmap),
    Downgrade(pool_tools::Downgrade),
}

/// List pools
///
/// FREE is granted to no volume; PROMISED is the sum of the volumes' sizes, and may exceed SIZE.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool list")]
pub(crate) struct List {}

/// Show one pool: space, devices, state
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool show default")]
pub(crate) struct Show {
    /// The pool [default: the daemon's default pool]
    #[arg(default_value = "", hide_default_value = true)]
    pub pool: String,
}

/// Draw what the extents of a pool are used for
///
/// Each character stands for some extents, of which it shows the most frequent use: '#' is
/// metadata, each volume has a letter, '=' is shared, '-' granted and not written yet, '.' free. A
/// small letter says that some of the extents are free.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool map\n  blockd pool map default --svg pool.svg")]
pub(crate) struct Map {
    /// The pool [default: the daemon's default pool]
    #[arg(default_value = "", hide_default_value = true)]
    pub pool: String,

    /// Write an SVG image to this file instead; "-" is standard output
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// Characters or squares in a line [default: as wide as the terminal, else 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub width: Option<u16>,
}

/// Make a pool and open it
///
/// The daemon remembers it for its next start. A file is sparse unless it is to be preallocated. A
/// pool that is there already, with these properties, is left as it is.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool create fast --path /srv/fast.pool --size 100G\n  \
                  blockd pool create disk --path /dev/sdb --kind disk\n  \
                  blockd pool create near --path /dev/dax0.0 --kind pmem")]
pub(crate) struct Create {
    /// Its name: 1 to 128 bytes without '/'
    pub pool: String,

    /// Absolute path of the file or device
    #[arg(
        long,
        required_unless_present_any = ["memory", "replace_missing"],
        conflicts_with = "memory"
    )]
    pub path: Option<PathBuf>,

    /// Kind of the path [default: a disk if it is a block device, otherwise a file]
    #[arg(long, value_enum, conflicts_with = "memory")]
    pub kind: Option<Kind>,

    /// Keep it in the daemon's memory: it is gone when the daemon ends
    #[arg(long)]
    pub memory: bool,

    /// How big, like 512M, 10G, 1T (powers of 1024); a disk is taken whole without it
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub size: Option<String>,

    /// Size of an extent, the unit of allocation, 64K to 1M [default: 256K]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub extent_size: Option<String>,

    /// Take the file's space from its file system at once
    #[arg(long)]
    pub preallocate: bool,

    /// Go through the host's page cache
    #[arg(long)]
    pub buffered: bool,

    /// Allow a file in memory (tmpfs), which is gone with the host's next boot and made anew then
    #[arg(long, conflicts_with = "memory")]
    pub volatile: bool,

    /// Start anew where the pool was served before and is missing: its volumes are given up
    ///
    /// Options that are left out are as in the configuration, or as when the pool was created.
    /// Another pool in its place is not replaced.
    #[arg(long)]
    pub replace_missing: bool,

    /// The platform keeps persistent memory when power fails, though the kernel does not know that
    #[arg(long)]
    pub power_safe: bool,

    /// Blocks in persistent memory may be torn by a crash, in units of 8 bytes
    #[arg(long)]
    pub torn_blocks: bool,

    /// Leave what is freed in persistent memory as it is, instead of overwriting it
    #[arg(long)]
    pub no_erase: bool,
}

/// Open a pool that could not be opened before, or was closed
///
/// A pool that was served before is never made anew when its file or disk is missing. Once that is
/// there again, this opens the pool and serves the volumes of it that were attached, at the same
/// places. A pool that is open is left as it is.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool open default")]
pub(crate) struct Open {
    /// The pool [default: the daemon's default pool]
    #[arg(default_value = "", hide_default_value = true)]
    pub pool: String,
}

/// The kind of device on which a pool is created.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Kind {
    /// A regular file
    File,
    /// A block device
    Disk,
    /// Persistent memory: /dev/daxX.Y, a file on a file system with DAX, or on tmpfs
    Pmem,
}

/// The output of `pool list --json`.
#[derive(Debug, Serialize)]
struct Listed {
    pools: Vec<v1::Pool>,
}

/// The output of `pool show --json`.
#[derive(Debug, Serialize)]
struct Shown {
    pool: v1::Pool,
}

/// The output of `pool create --json` and `pool open --json`.
#[derive(Debug, Serialize)]
struct Created {
    changed: bool,
    pool: v1::Pool,
}

/// The output of `pool map --json`.
#[derive(Debug, Serialize)]
struct Mapped {
    pool: String,
    extent_size: u64,
    runs: Vec<RunShape>,
}

#[derive(Debug, Serialize)]
struct RunShape {
    device: usize,
    first: u64,
    count: u64,
    kind: &'static str,
    volume: Option<String>,
}

impl Pool {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        match self {
            Self::List(_) => list(context).await,
            Self::Show(show) => show.run(context).await,
            Self::Map(map) => map.run(context).await,
            Self::Create(create) => create.run(context).await,
            Self::Open(open) => open.run(context).await,
            Self::Grow(grow) => grow.run(context).await,
            Self::Check(check) => check.run(context),
            Self::Dump(dump) => dump.run(context),
            Self::Restore(restore) => restore.run(context),
            Self::Repair(repair) => repair.run(context),
            Self::Rmap(rmap) => rmap.run(context),
            Self::Downgrade(downgrade) => downgrade.run(context),
        }
    }
}

fn state_tone(pool: &v1::Pool) -> Tone {
    match pool.state() {
        PoolState::Open => Tone::Good,
        PoolState::Closed => Tone::Plain,
        PoolState::Failed | PoolState::Unspecified => Tone::Bad,
    }
}

async fn list(context: &Context) -> Result<(), Error> {
    let pools = context.client().await?.list_pools(ListPoolsRequest {}).await?.pools;
    let listed = Listed { pools };
    context.output.either(&listed, || table(&listed.pools, context))
}

fn table(pools: &[v1::Pool], context: &Context) -> String {
    let output = &context.output;
    let mut table = Table::new(&[
        ("name", Side::Left),
        ("state", Side::Left),
        ("size", Side::Right),
        ("mapped", Side::Right),
        ("free", Side::Right),
        ("promised", Side::Right),
        ("volumes", Side::Right),
        ("durability", Side::Left),
        ("where", Side::Left),
    ]);
    for pool in pools {
        let size = |value: i64| output.size(amount(value));
        let paths: Vec<&str> = pool.devices.iter().map(device_name).collect();
        let name =
            if pool.is_default { format!("{} (default)", pool.name) } else { pool.name.clone() };
        table.row([
            if pool.name == "default" { pool.name.as_str().into() } else { name.into() },
            Cell::toned(pool.state().word(), state_tone(pool)),
            size(pool.size_bytes).into(),
            size(pool.mapped_bytes).into(),
            size(pool.free_bytes).into(),
            size(pool.promised_bytes).into(),
            pool.volume_count.to_string().into(),
            pool.durability().word().unwrap_or("-").into(),
            if paths.is_empty() { pool.region.clone() } else { paths.join(" ") }.into(),
        ]);
    }
    table.render(output.terminal())
}

fn device_name(device: &v1::Device) -> &str {
    if device.path.is_empty() { "memory" } else { &device.path }
}

impl Show {
    async fn run(self, context: &Context) -> Result<(), Error> {
        let request = GetPoolRequest { name: self.pool };
        let pool = answers::pool(context.client().await?.get_pool(request).await?.pool)?;
        let shown = Shown { pool };
        context.output.either(&shown, || details(&shown.pool, context))
    }
}

fn details(pool: &v1::Pool, context: &Context) -> String {
    let output = &context.output;
    let size = |value: i64| output.size(amount(value));
    let of_pool = |value: i64| {
        format!("{}, {}", size(value), percent(amount(value), amount(pool.size_bytes)))
    };
    let mut rows = vec![
        ("name", pool.name.clone()),
        ("state", output.paint().text(state_tone(pool), pool.state().word())),
    ];
    if !pool.failure.is_empty() {
        rows.push(("failure", pool.failure.clone()));
    }
    if pool.kind() == v1::PoolKind::PmemDirect {
        rows.extend(namespace_rows(pool, context));
        return properties(&rows, output.paint());
    }
    rows.extend([
        ("id", pool.id.clone()),
        ("size", size(pool.size_bytes)),
        ("extent size", output.size(u64::from(pool.extent_size))),
        ("mapped", of_pool(pool.mapped_bytes)),
        ("reserved", of_pool(pool.reserved_bytes)),
        ("pending", of_pool(pool.pending_bytes)),
        ("metadata", of_pool(pool.metadata_bytes)),
        ("free", of_pool(pool.free_bytes)),
    ]);
    if let Some(level) = pool.durability().word() {
        let cache = if pool.write_cache { "with a write cache" } else { "every answered write" };
        rows.push(("durability", format!("{level}, {cache}")));
    }
    if pool.scrubbing_bytes > 0 {
        rows.push(("to erase", size(pool.scrubbing_bytes)));
    }
    rows.extend(space_rows(pool, context));
    if pool.backing_free_bytes >= 0 {
        rows.push(("free below", size(pool.backing_free_bytes)));
    }
    let volumes = format!("{} in {} volume(s)", of_pool(pool.promised_bytes), pool.volume_count);
    rows.push(("promised", volumes));
    rows.push(("snapshots", pool.snapshot_count.to_string()));
    if pool.releasing_count > 0 {
        let (left, count) = (size(pool.releasing_bytes), pool.releasing_count);
        rows.push(("to let go", format!("{left} of {count} volume(s) that are gone")));
    }
    rows.extend(pool.node_objects.iter().map(|one| node::object_row(one, context)));
    for device in &pool.devices {
        let mut how = vec![device.kind().word().to_owned(), size(device.size_bytes)];
        how.push(if device.direct { "direct" } else { "buffered" }.to_owned());
        how.extend(device.sparse.then(|| "sparse".to_owned()));
        how.extend(device.discard.then(|| "discards".to_owned()));
        how.extend(device.pmem.iter().flat_map(|pmem| pmem_words(pmem, context)));
        rows.push(("device", format!("{} ({})", device_name(device), how.join(", "))));
    }
    properties(&rows, output.paint())
}

/// The properties of a device in persistent memory.
fn pmem_words(pmem: &v1::PmemDevice, context: &Context) -> Vec<String> {
    let mut words = vec![pmem.medium().word().to_owned()];
    if !pmem.region.is_empty() {
        words.push(format!("region {}", pmem.region));
    }
    if pmem.numa_node >= 0 {
        words.push(format!("node {}", pmem.numa_node));
    }
    let whole = pmem.atomicity() == v1::Atomicity::Block;
    words.push(if whole { "whole blocks" } else { "blocks may be torn" }.to_owned());
    words.extend(pmem.erases.then(|| "erases".to_owned()));
    if pmem.bad_bytes > 0 {
        words.push(format!("{} bad", context.output.size(amount(pmem.bad_bytes))));
    }
    words
}

/// The rows of a pool whose volumes are namespaces.
fn namespace_rows(pool: &v1::Pool, context: &Context) -> Vec<(&'static str, String)> {
    let size = |value: i64| context.output.size(amount(value));
    let mut rows = vec![
        ("kind", "pmem-direct: each volume is a namespace".to_owned()),
        ("region", pool.region.clone()),
        ("id", pool.id.clone()),
        ("size", size(pool.size_bytes)),
        ("taken", size(pool.mapped_bytes)),
        ("to erase", size(pool.scrubbing_bytes)),
        ("free", size(pool.free_bytes)),
        ("largest volume", size(pool.largest_volume_bytes)),
        ("smallest volume", size(pool.minimum_volume_bytes)),
        ("step", size(pool.volume_step_bytes)),
        ("volumes", pool.volume_count.to_string()),
    ];
    if pool.numa_node >= 0 {
        rows.push(("node", pool.numa_node.to_string()));
    }
    rows
}

/// The rows of the space policy.
fn space_rows(pool: &v1::Pool, context: &Context) -> Vec<(&'static str, String)> {
    let size = |value: i64| context.output.size(amount(value));
    let Some(state) = pool.space_state().word() else { return Vec::new() };
    let tone = match pool.space_state() {
        v1::SpaceState::Normal => Tone::Good,
        _ => Tone::Bad,
    };
    let mut rows = vec![("space", context.output.paint().text(tone, state))];
    let marks = (size(pool.low_bytes), size(pool.very_low_bytes));
    rows.push(("low below", format!("{}, very low below {}", marks.0, marks.1)));
    if let Ok(seconds) = u64::try_from(pool.seconds_to_full) {
        let rate = size(pool.write_rate_bytes);
        rows.push(("filled with", format!("{rate}/s, full in {seconds} s at that rate")));
    }
    if pool.set_aside_bytes > 0 {
        rows.push(("set aside", size(pool.set_aside_bytes)));
    }
    if pool.blocked_writes > 0 {
        rows.push(("blocked", format!("{} write(s) wait for space", pool.blocked_writes)));
    }
    rows
}

impl Create {
    async fn run(self, context: &Context) -> Result<(), Error> {
        let size_bytes = self.size.as_deref().map_or(Ok(0), |size| size_argument("size", size))?;
        let request = CreatePoolRequest {
            name: self.pool,
            path: match &self.path {
                Some(path) => path_argument(path)?,
                None => String::new(),
            },
            kind: match self.kind {
                _ if self.memory => DeviceKind::Memory,
                None => DeviceKind::Unspecified,
                Some(Kind::File) => DeviceKind::File,
                Some(Kind::Disk) => DeviceKind::Disk,
                Some(Kind::Pmem) => DeviceKind::Pmem,
            }
            .into(),
            power_safe: self.power_safe,
            atomicity: match self.torn_blocks {
                true => v1::Atomicity::None,
                false => v1::Atomicity::Unspecified,
            }
            .into(),
            erase: self.no_erase.then_some(false),
            preallocate: self.preallocate,
            size_bytes,
            extent_size: extent_size(self.extent_size.as_deref())?,
            buffered: self.buffered,
            volatile: self.volatile,
            replace_missing: self.replace_missing,
            ..Default::default()
        };
        let answer = context.client().await?.create_pool(request).await?;
        let created = Created { changed: answer.changed, pool: answers::pool(answer.pool)? };
        context.output.either(&created, || {
            let pool = &created.pool;
            let size = context.output.size(amount(pool.size_bytes));
            if created.changed {
                format!("{}: {size}, open\n", pool.name)
            } else {
                format!("{}: was there already, {size}\n", pool.name)
            }
        })
    }
}

impl Open {
    async fn run(self, context: &Context) -> Result<(), Error> {
        let request = OpenPoolRequest { name: self.pool };
        let answer = context.client().await?.open_pool(request).await?;
        let opened = Created { changed: answer.changed, pool: answers::pool(answer.pool)? };
        let name = &opened.pool.name;
        context.output.either(&opened, || match opened.changed {
            true => format!("{name}: open\n"),
            false => format!("{name}: unchanged, it was open\n"),
        })
    }
}

/// A path as the daemon takes it: it has another current directory than we have.
fn path_argument(path: &std::path::Path) -> Result<String, Error> {
    let absolute = std::path::absolute(path).map_err(|source| Error::file("find", path, source))?;
    let text = absolute.into_os_string().into_string();
    text.map_err(|path| Error::invalid("path", path.display(), "UTF-8"))
}

fn extent_size(text: Option<&str>) -> Result<u32, Error> {
    let Some(text) = text else {
        return Ok(0);
    };
    let allowed = "a power of two from 64K to 1M";
    let bytes = u32::try_from(size_argument("extent-size", text)?).ok();
    bytes
        .filter(|bytes| bytes.is_power_of_two() && (64 << 10..=1 << 20).contains(bytes))
        .ok_or_else(|| Error::invalid("extent-size", text, allowed))
}

impl Map {
    async fn run(self, context: &Context) -> Result<(), Error> {
        let mut client = context.client().await?;
        let request = GetPoolRequest { name: self.pool };
        let pool = answers::pool(client.get_pool(request).await?.pool)?;
        let request = PoolExtentsRequest { pool: pool.name.clone() };
        let parts = client.pool_extents(request).await?;
        let picture = picture(&pool, &parts);
        if let Some(path) = &self.svg {
            let text = map::svg::draw(&picture, u64::from(self.width.unwrap_or(96)));
            if path.as_os_str() == "-" {
                return context.output.text(&text);
            }
            let written = std::fs::write(path, text);
            return written.map_err(|source| Error::file("write", path, source));
        }
        let shape = runs_shape(&picture);
        let width = self.width.map(usize::from);
        context.output.either(&shape, || map::text::draw(&picture, width, &context.output))
    }
}

/// The daemon's runs in the order of the devices. Volumes get their letters in the order of the
/// places where they begin, so that the picture reads from A on.
fn picture(pool: &v1::Pool, parts: &[PoolExtentsResponse]) -> Picture {
    let extent_bytes = parts.first().map_or(pool.extent_size, |part| part.extent_size);
    let mut devices: Vec<Device> = pool
        .devices
        .iter()
        .map(|device| Device { path: device_name(device).to_owned(), runs: Vec::new() })
        .collect();
    let mut volumes: Vec<String> = Vec::new();
    for run in parts.iter().flat_map(|part| &part.runs) {
        let what = match run.kind() {
            ExtentKind::Metadata => Use::Metadata,
            ExtentKind::Shared => Use::Shared,
            ExtentKind::Reserved => Use::Reserved,
            ExtentKind::Free | ExtentKind::Unspecified => Use::Free,
            ExtentKind::Mapped => {
                let known = volumes.iter().position(|name| *name == run.volume);
                Use::Volume(known.unwrap_or_else(|| {
                    volumes.push(run.volume.clone());
                    volumes.len() - 1
                }))
            }
        };
        let index = usize::try_from(run.device).unwrap_or(usize::MAX);
        if let Some(device) = devices.get_mut(index) {
            device.runs.push(Run { first: run.first_index, count: run.count, what });
        }
    }
    Picture { pool: pool.name.clone(), extent_bytes: u64::from(extent_bytes), devices, volumes }
}

fn runs_shape(picture: &Picture) -> Mapped {
    let mut runs = Vec::new();
    for (index, device) in picture.devices.iter().enumerate() {
        for run in &device.runs {
            let (kind, volume) = match run.what {
                Use::Metadata => ("metadata", None),
                Use::Volume(volume) => ("mapped", picture.volumes.get(volume).cloned()),
                Use::Shared => ("shared", None),
                Use::Reserved => ("reserved", None),
                Use::Free => ("free", None),
            };
            runs.push(RunShape { device: index, first: run.first, count: run.count, kind, volume });
        }
    }
    Mapped { pool: picture.pool.clone(), extent_size: picture.extent_bytes, runs }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(runs: &[(u32, u64, u64, ExtentKind, &str)]) -> PoolExtentsResponse {
        let run =
            |&(device, first_index, count, kind, volume): &(u32, u64, u64, ExtentKind, &str)| {
                v1::ExtentRun {
                    device,
                    first_index,
                    count,
                    kind: kind.into(),
                    volume: volume.to_owned(),
                }
            };
        PoolExtentsResponse {
            extent_size: 1 << 18,
            total_count: 20,
            runs: runs.iter().map(run).collect(),
        }
    }

    #[test]
    fn runs_of_several_messages_become_one_picture() {
        let pool = v1::Pool {
            name: "two".to_owned(),
            devices: vec![v1::Device::default(), v1::Device::default()],
            ..Default::default()
        };
        let parts = [
            part(&[(0, 0, 2, ExtentKind::Metadata, ""), (0, 2, 8, ExtentKind::Mapped, "b")]),
            part(&[(1, 0, 4, ExtentKind::Mapped, "a"), (1, 4, 6, ExtentKind::Free, "")]),
        ];
        let picture = picture(&pool, &parts);
        assert_eq!(picture.volumes, ["b", "a"]);
        assert_eq!(picture.total_count(), 20);
        assert_eq!(picture.devices[1].runs[0].what, Use::Volume(1));
        let text = serde_json::to_string(&runs_shape(&picture)).unwrap();
        let expected = concat!(
            r#"{"pool":"two","extent_size":262144,"runs":["#,
            r#"{"device":0,"first":0,"count":2,"kind":"metadata","volume":null},"#,
            r#"{"device":0,"first":2,"count":8,"kind":"mapped","volume":"b"},"#,
            r#"{"device":1,"first":0,"count":4,"kind":"mapped","volume":"a"},"#,
            r#"{"device":1,"first":4,"count":6,"kind":"free","volume":null}]}"#,
        );
        assert_eq!(text, expected);
    }

    #[test]
    fn extent_sizes_are_checked_before_the_daemon_is_asked() {
        assert_eq!(extent_size(None).unwrap(), 0);
        assert_eq!(extent_size(Some("256K")).unwrap(), 1 << 18);
        for bad in ["32K", "2M", "100K", "x"] {
            assert!(extent_size(Some(bad)).is_err(), "{bad}");
        }
    }
}
