//! `blockd pmem list` and `blockd pmem show`.

use blockd_media::error::{Error, shown};
use blockd_pmem::platform::{Inventory, Namespace, Platform, Region};
use serde::Serialize;

use super::Host;
use super::shapes::{NamespaceShape, RegionShape, bad_bytes, domain_name, step};
use crate::Context;
use crate::output::table::{Cell, Side, Table, properties};
use crate::output::terminal::Tone;

/// List regions and namespaces of persistent memory
///
/// FREE is what no namespace has, LARGEST the largest piece of it. KEPT is how far stores have to
/// get to outlive a power cut, as the platform says. Processes of others are seen by root only.
#[derive(Debug, clap::Args)]
#[command(visible_alias = "ls", after_help = "Example:\n  blockd pmem list --json")]
pub(crate) struct List {
    #[command(flatten)]
    pub host: Host,
}

/// Show a region or a namespace
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pmem show 0x3d2b2c1f5a6e7d8c")]
pub(crate) struct Show {
    /// A region's cookie, or a namespace's UUID
    pub which: String,

    #[command(flatten)]
    pub host: Host,
}

/// The output of `pmem list --json`.
#[derive(Debug, Serialize)]
struct Listed {
    /// Whether the kernel knows of persistent memory at all.
    has_bus: bool,
    regions: Vec<RegionShape>,
    /// Processes that could not be looked at.
    unseen_processes: usize,
}

/// The output of `pmem show --json`.
#[derive(Debug, Serialize)]
struct Shown {
    region: Option<RegionShape>,
    namespace: Option<NamespaceShape>,
}

impl List {
    pub(super) fn run(&self, platform: &Platform, context: &Context) -> Result<(), Error> {
        let inventory = platform.read_with_users()?;
        let listed = Listed {
            has_bus: inventory.has_bus,
            regions: inventory.regions.iter().map(|one| RegionShape::of(one, &inventory)).collect(),
            unseen_processes: inventory.unseen_processes,
        };
        context.output.either(&listed, || tables(&inventory, context))
    }
}

impl Show {
    pub(super) fn run(&self, platform: &Platform, context: &Context) -> Result<(), Error> {
        let inventory = platform.read_with_users()?;
        if let Ok(uuid) = self.which.parse() {
            let found = inventory.namespace(uuid);
            let (_, namespace) = found.ok_or_else(|| Error::not_found("namespace", &self.which))?;
            let shape = NamespaceShape::of(namespace, &inventory);
            let shown = Shown { region: None, namespace: Some(shape) };
            return context.output.either(&shown, || of_namespace(namespace, context));
        }
        let region = inventory.region(&super::region_key(&self.which)?);
        let region = region.ok_or_else(|| Error::not_found("region", &self.which))?;
        let shape = RegionShape::of(region, &inventory);
        let shown = Shown { region: Some(shape), namespace: None };
        context.output.either(&shown, || of_region(region, context))
    }
}

fn tables(inventory: &Inventory, context: &Context) -> String {
    let size = |bytes| context.output.size(bytes);
    if !inventory.has_bus {
        return "no persistent memory: the kernel has no module for it (libnvdimm)\n".to_owned();
    }
    let mut table = Table::new(&[
        ("region", Side::Right),
        ("kind", Side::Left),
        ("size", Side::Right),
        ("free", Side::Right),
        ("largest", Side::Right),
        ("ways", Side::Right),
        ("node", Side::Right),
        ("kept", Side::Left),
        ("labels", Side::Left),
    ]);
    for region in &inventory.regions {
        table.row([
            region.key.to_string().into(),
            region.kind.to_string().into(),
            size(region.size).into(),
            size(region.available).into(),
            size(region.max_available_extent).into(),
            region.ways.to_string().into(),
            region.numa_node.map_or_else(|| "-".to_owned(), |node| node.to_string()).into(),
            domain_name(region.domain).into(),
            if region.labelled { "yes" } else { "no" }.into(),
        ]);
    }
    let mut text = table.render(context.output.terminal());
    if inventory.namespaces().next().is_some() {
        text.push('\n');
        text.push_str(&namespaces(inventory.namespaces().map(|(_, one)| one), context));
    }
    text.push_str(&not_enabled(inventory));
    for (region, name, count) in inventory.duplicate_names() {
        let name = shown(&name);
        text.push_str(&format!("{count} namespaces of region {region} are called {name}\n"));
    }
    if inventory.unseen_processes > 0 {
        let count = inventory.unseen_processes;
        text.push_str(&format!("{count} processes can't be looked at: more may be in use\n"));
    }
    text
}

/// The text about namespaces that cannot be used as they are.
pub(super) fn not_enabled(inventory: &Inventory) -> String {
    let regions = inventory.regions.iter().filter(|region| !region.enabled);
    let regions = regions.map(|region| format!("region {}", region.key));
    let all = inventory.namespaces().map(|(_, namespace)| namespace);
    let namespaces = all.filter(|one| one.device.is_none()).map(ToString::to_string);
    let line = |what: String| format!("{what} is not enabled: `ndctl` enables it\n");
    regions.chain(namespaces).map(line).collect()
}

fn namespaces<'a>(all: impl Iterator<Item = &'a Namespace>, context: &Context) -> String {
    let mut table = Table::new(&[
        ("namespace", Side::Right),
        ("label", Side::Left),
        ("mode", Side::Left),
        ("map", Side::Left),
        ("size", Side::Right),
        ("usable", Side::Right),
        ("device", Side::Right),
        ("used", Side::Left),
    ]);
    for one in all {
        let none = || "-".to_owned();
        let size = |bytes| context.output.size(bytes);
        let used = one.users.first().map_or_else(none, ToString::to_string);
        let tone = if one.users.is_empty() { Tone::Dim } else { Tone::Good };
        table.row([
            one.uuid.map_or_else(|| one.name.clone(), |uuid| uuid.to_string()).into(),
            if one.alt_name.is_empty() { none() } else { shown(&one.alt_name) }.into(),
            one.mode.to_string().into(),
            one.map.map_or_else(none, |map| map.to_string()).into(),
            size(one.size).into(),
            one.usable.map_or_else(none, size).into(),
            one.device.as_ref().map_or_else(none, |device| device.path()).into(),
            Cell::toned(used, tone),
        ]);
    }
    table.render(context.output.terminal())
}

fn of_region(region: &Region, context: &Context) -> String {
    let size = |bytes| context.output.size(bytes);
    let mut rows = vec![
        ("region", region.key.to_string()),
        ("kernel's name", region.name.clone()),
        ("kind", region.kind.to_string()),
        ("size", size(region.size)),
        ("free", size(region.available)),
        ("largest piece", size(region.max_available_extent)),
        ("persistence", domain_name(region.domain).to_owned()),
        ("labels", if region.labelled { "yes" } else { "no" }.to_owned()),
    ];
    if let Some(node) = region.numa_node {
        rows.push(("node", node.to_string()));
    }
    for dimm in &region.dimms {
        let id = dimm.id.as_deref().unwrap_or("-");
        rows.push(("module", format!("{} {id}", dimm.name)));
    }
    if let Some(step) = step(region) {
        rows.push(("sizes", step.to_string()));
    }
    if !region.enabled {
        rows.push(("enabled", "no".to_owned()));
    }
    if region.read_only {
        rows.push(("read-only", "yes".to_owned()));
    }
    if !region.bad_blocks.is_empty() {
        rows.push(("bad", size(bad_bytes(&region.bad_blocks))));
    }
    let mut text = properties(&rows, context.output.paint());
    if !region.namespaces.is_empty() {
        text.push('\n');
        text.push_str(&namespaces(region.namespaces.iter(), context));
    }
    text
}

fn of_namespace(one: &Namespace, context: &Context) -> String {
    let size = |bytes| context.output.size(bytes);
    let mut rows = vec![
        ("namespace", one.uuid.map(|uuid| uuid.to_string()).unwrap_or_default()),
        ("kernel's name", one.name.clone()),
        ("region", one.region.to_string()),
        ("mode", one.mode.to_string()),
        ("size", size(one.size)),
    ];
    if !one.alt_name.is_empty() {
        rows.push(("label", shown(&one.alt_name)));
    }
    if let Some(map) = one.map {
        rows.push(("map", map.to_string()));
    }
    rows.extend(one.usable.map(|usable| ("usable", size(usable))));
    rows.extend(one.align.map(|align| ("alignment", size(align))));
    rows.extend(one.device.as_ref().map(|device| ("device", device.path())));
    if !one.bad_blocks.is_empty() {
        rows.push(("bad", size(bad_bytes(&one.bad_blocks))));
    }
    rows.extend(one.users.iter().map(|user| ("used", user.to_string())));
    properties(&rows, context.output.paint())
}
