//! `blockd pmem create`.

use blockd_media::error::Error;
use blockd_media::names::check_name;
use blockd_media::units::parse_size;
use blockd_pmem::platform::choose::{self, Policy};
use blockd_pmem::platform::pooled::{self, PoolSpace, Target};
use blockd_pmem::platform::share::checked_percentage;
use blockd_pmem::platform::{Inventory, Platform, Region, RegionKey, new_uuid};
use serde::Serialize;

use super::Host;
use super::shapes::{NamespaceShape, step};
use crate::Context;

/// Make a namespace for a pool, and say how to configure the pool
///
/// The namespace is of mode devdax, with huge pages, and has blockd's name, by which it is found
/// again. Space of the region that pools already have counts, so that repeating this does nothing;
/// namespaces of others are left unchanged. Prints the configuration that uses it. Needs root.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  blockd pmem create --region 0x3d2b2c1f5a6e7d8c --percentage 50"
)]
pub(crate) struct Create {
    /// The region [default: where most is free]
    #[arg(long, value_name = "COOKIE")]
    pub region: Option<String>,

    /// A region near this node of processors, where there is one with room
    #[arg(long, value_name = "NODE", conflicts_with = "region")]
    pub numa_node: Option<u32>,

    /// How much of the region pools may have, from 1 to 100
    #[arg(long, default_value_t = 100, conflicts_with = "size")]
    pub percentage: u64,

    /// Bytes that pools are to have of it, rounded up to its step
    #[arg(long)]
    pub size: Option<String>,

    /// Name of the pool in the printed lines
    #[arg(long, default_value = "pmem")]
    pub pool: String,

    #[command(flatten)]
    pub host: Host,
}

/// The output of `pmem create --json`.
#[derive(Debug, Serialize)]
struct Created {
    changed: bool,
    region: String,
    /// All that pools have of the region.
    namespaces: Vec<NamespaceShape>,
    allowed_bytes: u64,
    /// Lines for the configuration.
    configuration: String,
}

impl Create {
    pub(super) fn run(&self, platform: &Platform, context: &Context) -> Result<(), Error> {
        check_name(&self.pool).map_err(|allowed| Error::invalid("pool", &self.pool, allowed))?;
        let target = match &self.size {
            Some(text) => match parse_size("size", text)? {
                0 => return Err(Error::invalid("size", text, "more than 0")),
                bytes => Target::Bytes(bytes),
            },
            None => Target::Percentage(checked_percentage(self.percentage)?),
        };
        let key = self.region(&platform.read()?, target)?;
        let space = platform.ensure_pool_space(&key, target, new_uuid()?)?;
        let inventory = platform.read_with_users()?;
        let created = Created {
            changed: space.made.is_some(),
            region: key.to_string(),
            namespaces: space
                .namespaces
                .iter()
                .map(|one| NamespaceShape::of(one, &inventory))
                .collect(),
            allowed_bytes: space.share.allowed,
            configuration: self.lines(&key, &space),
        };
        let why = inventory.region(&key).and_then(step).map(|step| step.to_string());
        context
            .output
            .either(&created, || human(&space, why.as_deref(), context) + &created.configuration)
    }

    /// The region that was named, or else the best of those that are not refused.
    fn region(&self, inventory: &Inventory, target: Target) -> Result<RegionKey, Error> {
        if let Some(text) = &self.region {
            let key = super::region_key(text)?;
            let found = inventory.region(&key);
            return found.map(|_| key).ok_or_else(|| Error::not_found("region", text));
        }
        // A namespace with the requested properties is taken: the call can be repeated.
        let is_done = |region: &&Region| {
            pooled::own(region).next().is_some()
                && pooled::plan(region, target).is_ok_and(|share| share.to_make == 0)
        };
        if let Some(region) = inventory.regions.iter().find(is_done) {
            return Ok(region.key.clone());
        }
        let policy = self.numa_node.map_or(Policy::MostFree, Policy::Near);
        let needed = |region: &Region| match pooled::plan(region, target) {
            Ok(share) => Some(share.to_make),
            Err(_) => step(region).map(|step| step.bytes()),
        };
        let chosen = choose::choose(&inventory.regions, needed, policy);
        Ok(chosen.map_err(blockd_pmem::platform::PlatformError::from)?.key.clone())
    }

    /// A pool for each namespace. Devices are numbered anew at each boot, so that they are not what
    /// is named.
    fn lines(&self, key: &RegionKey, space: &PoolSpace) -> String {
        let mut text = String::new();
        for (at, one) in space.namespaces.iter().enumerate() {
            let Some(device) = &one.device else { continue };
            let name =
                if at == 0 { self.pool.clone() } else { format!("{}-{}", self.pool, at + 1) };
            let place = match one.uuid {
                Some(uuid) => format!("namespace = \"{uuid}\""),
                None => format!("path = {:?}", device.path()),
            };
            text.push_str(&format!(
                "# region {key}\n[[pool]]\nname = {name:?}\nkind = \"pmem\"\n{place}\n"
            ));
        }
        text
    }
}

fn human(space: &PoolSpace, why: Option<&str>, context: &Context) -> String {
    let size = |bytes| context.output.size(bytes);
    let mut text = String::new();
    for one in &space.namespaces {
        let is_new = one.uuid == space.made;
        let word = if is_new { "made" } else { "there already" };
        let device = one.device.as_ref().map(|device| device.path()).unwrap_or_default();
        let uuid = one.uuid.map(|uuid| uuid.to_string()).unwrap_or_default();
        let (taken, usable) = (size(one.size), one.usable.map(size).unwrap_or_default());
        text.push_str(&format!("{word}: {uuid}, {taken}, {usable} of it usable as {device}\n"));
    }
    if let Some(why) = why {
        text.push_str(&format!("sizes go in {why}\n"));
    }
    if space.share.is_beyond() {
        text.push_str("that is more than is asked for now: nothing of it is given back\n");
    }
    text.push_str("\nFor the configuration:\n\n");
    text
}
