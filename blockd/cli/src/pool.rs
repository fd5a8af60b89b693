//! `blockd pool`.

mod close;
mod create;
mod delete;
mod device;
mod feature;
mod fold;
mod hand_on;
mod map;
mod rebalance;
mod rename;
mod shrink;

use blockd_api::v1::{self, GetPoolRequest, ListPoolsRequest, PoolState};
use blockd_media::error::Error;
use serde::Serialize;

use super::grow::Grow;
use super::output::table::{Cell, Side, Table, properties};
use super::output::terminal::Tone;
use super::output::{Output, human_seconds, percent};
use super::usage::Usage;
use super::{Context, amount, answers, node, pool_tools};

pub(crate) use close::Close;
pub(crate) use create::{Create, Open, extent_size, path_argument};
pub(crate) use delete::{Delete, confirm};
pub(crate) use device::PoolDevice;
pub(crate) use feature::Feature;
pub(crate) use fold::Fold;
pub(crate) use hand_on::{Export, Import};
pub(crate) use map::Map;
pub(crate) use rebalance::Rebalance;
pub(crate) use rename::Rename;
pub(crate) use shrink::Shrink;

/// List, show, make, open, close, delete, find, check and repair pools
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
    Close(Close),
    Rename(Rename),
    Delete(Delete),
    Export(Export),
    Import(Import),
    Scan(pool_tools::Scan),
    Grow(Grow),
    Shrink(Shrink),
    Rebalance(Rebalance),
    #[command(subcommand)]
    Device(PoolDevice),
    Fold(Fold),
    #[command(subcommand)]
    Feature(Feature),
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

impl Pool {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        match self {
            Self::List(_) => list(context).await,
            Self::Show(show) => show.run(context).await,
            Self::Map(map) => map.run(context).await,
            Self::Create(create) => create.run(context).await,
            Self::Open(open) => open.run(context).await,
            Self::Close(close) => close.run(context).await,
            Self::Rename(rename) => rename.run(context).await,
            Self::Delete(delete) => delete.run(context).await,
            Self::Export(export) => export.run(context).await,
            Self::Import(import) => import.run(context).await,
            Self::Scan(scan) => scan.run(context),
            Self::Grow(grow) => grow.run(context).await,
            Self::Shrink(shrink) => shrink.run(context).await,
            Self::Rebalance(rebalance) => rebalance.run(context).await,
            Self::Device(device) => device.run(context).await,
            Self::Fold(fold) => fold.run(context).await,
            Self::Feature(feature) => feature.run(context).await,
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
    ]);
    rows.extend(Usage::of(pool).rows(output));
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
    if let Some(evacuation) = &pool.evacuation {
        let row = if evacuation.shrinks_to_bytes > 0 { "shrinking" } else { "leaving" };
        rows.push((row, device::leaving(evacuation, output)));
    }
    let rebalance = pool.rebalance.as_ref();
    if let Some(running) = rebalance.filter(|one| one.state() == v1::RebalanceState::Running) {
        rows.push(("rebalance", rebalance::moving(running, output)));
    }
    if let Some(folds) = &pool.folds {
        rows.push(("composite", fold::composite(folds)));
        rows.extend((folds.enabled).then(|| ("folds", fold::folds(folds, &context.output))));
    }
    if let Some(cache) = pool.read_cache.filter(|cache| cache.limit_bytes > 0) {
        rows.push(("read cache", read_cache(&cache, output)));
    }
    rows.extend(pool.node_objects.iter().map(|one| node::object_row(one, context)));
    for device in &pool.devices {
        let mut how = vec![device.kind().word().to_owned(), size(device.size_bytes)];
        how.push(if device.direct { "direct" } else { "buffered" }.to_owned());
        let used = rebalance.and_then(|one| one.devices.iter().find(|u| u.path == device.path));
        how.extend(used.map(|one| {
            format!("{} used", percent(amount(one.used_bytes), amount(one.total_bytes)))
        }));
        how.extend(device.sparse.then(|| "sparse".to_owned()));
        how.extend(device.discard.then(|| "discards".to_owned()));
        how.extend(device.pmem.iter().flat_map(|pmem| pmem_words(pmem, context)));
        rows.push(("device", format!("{} ({})", device_name(device), how.join(", "))));
    }
    properties(&rows, output.paint())
}

/// The cache of blocks that several volumes share, and how much of the reads of those it serves.
fn read_cache(cache: &v1::PoolReadCache, output: &Output) -> String {
    let v1::PoolReadCache { hits, misses, evictions, dropped, .. } = *cache;
    let (held, limit) = (amount(cache.held_bytes), amount(cache.limit_bytes));
    let of = format!("{} of {}", output.size(held), output.size(limit));
    let pages = hits.saturating_add(misses);
    let rate =
        if pages == 0 { "no reads".to_owned() } else { format!("{} hits", percent(hits, pages)) };
    format!("{of}, {rate}, {evictions} evicted, {dropped} dropped")
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
        let (rate, time) = (size(pool.write_rate_bytes), human_seconds(seconds));
        rows.push(("filled with", format!("{rate}/s, full in {time} at that rate")));
    }
    if pool.set_aside_bytes > 0 {
        rows.push(("set aside", size(pool.set_aside_bytes)));
    }
    if pool.blocked_writes > 0 {
        rows.push(("blocked", format!("{} write(s) wait for space", pool.blocked_writes)));
    }
    rows
}
