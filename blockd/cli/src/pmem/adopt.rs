//! `blockd pmem adopt`.

use blockd_media::error::Error;
use blockd_pmem::platform::provision::NamespaceSpec;
use blockd_pmem::platform::step::HUGE_PAGE;
use blockd_pmem::platform::{
    Inventory, Mode, Namespace, PageMap, Platform, Region, RegionKey, Uuid, new_uuid, usable_of,
};
use clap::ValueEnum;
use serde::Serialize;

use super::Host;
use super::shapes::NamespaceShape;
use crate::Context;

/// Make a pool's namespace of the one that a region without labels has
///
/// Such a region has one namespace, as large as itself. Only an unused namespace of mode
/// raw is taken, and only an empty one: without a file system, partitions, a pool, or other data at
/// its front or end. --dry-run prints the steps without taking them. Needs root.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pmem adopt 0x3d2b2c1f5a6e7d8c --dry-run")]
pub(crate) struct Adopt {
    /// The region's cookie, or what stands for it
    pub region: String,

    /// The mode that it is given
    #[arg(long, value_enum, default_value_t = Into::Devdax)]
    pub mode: Into,

    /// Say what would be done, and do nothing
    #[arg(long)]
    pub dry_run: bool,

    #[command(flatten)]
    pub host: Host,
}

/// The target mode of a namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Into {
    /// For a pool
    Devdax,
    /// For a file system with DAX
    Fsdax,
}

/// The output of `pmem adopt --json`.
#[derive(Debug, Serialize)]
struct Adopted {
    changed: bool,
    dry_run: bool,
    region: String,
    size_bytes: u64,
    usable_bytes: u64,
    from: String,
    to: String,
    /// As it is now.
    namespace: NamespaceShape,
}

impl Adopt {
    pub(super) fn run(&self, platform: &Platform, context: &Context) -> Result<(), Error> {
        let key = super::region_key(&self.region)?;
        let inventory = platform.read_with_users()?;
        let region = inventory.region(&key);
        let region = region.ok_or_else(|| Error::not_found("region", &self.region))?;
        let mode = match self.mode {
            Into::Devdax => Mode::Devdax,
            Into::Fsdax => Mode::Fsdax,
        };
        let [namespace] = region.namespaces.as_slice() else {
            let problem = format!("has {} namespaces, not one", region.namespaces.len());
            return Err(refused(&key, problem));
        };
        let done = namespace.mode == mode && !region.labelled;
        if !done {
            check(platform, &inventory, region, namespace)?;
        }
        let wish = wish(mode, namespace, new_uuid()?);
        let usable = usable_of(mode, wish.map, wish.align, namespace.size);
        let now = match done || self.dry_run {
            true => namespace.clone(),
            false => platform.convert(&key, &wish)?,
        };
        let adopted = Adopted {
            changed: !done && !self.dry_run,
            dry_run: self.dry_run,
            region: key.to_string(),
            size_bytes: namespace.size,
            usable_bytes: if done { namespace.usable.unwrap_or(usable) } else { usable },
            from: namespace.mode.to_string(),
            to: mode.to_string(),
            namespace: NamespaceShape::of(&now, &inventory),
        };
        context.output.either(&adopted, || human(&adopted, &now, done, context))
    }
}

/// Notes of pages are kept on the memory itself: there is more of it.
fn wish(mode: Mode, namespace: &Namespace, uuid: Uuid) -> NamespaceSpec {
    NamespaceSpec {
        uuid,
        alt_name: String::new(),
        mode,
        map: PageMap::Device,
        align: HUGE_PAGE,
        size: namespace.size,
    }
}

fn refused(key: &RegionKey, problem: impl std::convert::Into<String>) -> Error {
    Error::in_use(format!("region {key}"), problem)
}

fn check(
    platform: &Platform,
    inventory: &Inventory,
    region: &Region,
    namespace: &Namespace,
) -> Result<(), Error> {
    if region.labelled {
        let problem = "keeps namespaces in labels: `blockd pmem create` makes one there, and those \
                       of others are theirs";
        return Err(refused(&region.key, problem));
    }
    if namespace.mode != Mode::Raw {
        let problem =
            format!("has a namespace of mode {} that blockd did not make", namespace.mode);
        return Err(refused(&region.key, problem));
    }
    if !namespace.users.is_empty() {
        let users: Vec<String> = namespace.users.iter().map(ToString::to_string).collect();
        return Err(refused(&region.key, format!("is in use: {}", users.join(", "))));
    }
    if inventory.unseen_processes > 0 {
        let count = inventory.unseen_processes;
        let problem = format!("may be in use: {count} processes can't be looked at");
        return Err(refused(&region.key, problem));
    }
    if !platform.is_clear(namespace)? {
        let problem = "holds something: clear it first (wipefs -a, and zeroes where that finds \
                       nothing)";
        return Err(refused(&region.key, problem));
    }
    Ok(())
}

fn human(adopted: &Adopted, now: &Namespace, done: bool, context: &Context) -> String {
    let size = |bytes| context.output.size(bytes);
    let Adopted { region, from, to, size_bytes, usable_bytes, dry_run, .. } = adopted;
    let (taken, usable) = (size(*size_bytes), size(*usable_bytes));
    if done {
        return format!("region {region} is {to} already, {usable} of {taken} usable\n");
    }
    let device = now.device.as_ref().map(|device| device.path()).unwrap_or_default();
    if *dry_run {
        return format!(
            "would make {to} of {device}, now {from}: {usable} of {taken} would be usable; nothing \
             was changed\n"
        );
    }
    format!("region {region} is {to} now, {usable} of {taken} usable as {device}\n")
}
