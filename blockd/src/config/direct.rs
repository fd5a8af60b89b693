//! Pools of namespaces in the configuration.

use blockd_control::config::RegionShare;
use blockd_control::direct::{DirectConfig, SizeRule};
use blockd_media::error::Error;
use blockd_media::names::check_new_name;
use blockd_pmem::platform::step::Rule;
use blockd_pmem::platform::{PageMap, RegionKey};

use super::file::Pool;
use super::parse::Source;

/// The kind of a pool whose volumes are namespaces.
pub(super) const DIRECT: &str = "pmem-direct";

/// Longest beginning of a namespace's name: half of what a label has room for.
const MAX_PREFIX: usize = 31;

impl Source<'_> {
    /// A pool of namespaces.
    pub(super) fn direct(&self, index: &str, pool: &Pool) -> Result<DirectConfig, Error> {
        let key = |name| ["pool", index, name];
        if let Err(allowed) = check_new_name(&pool.name) {
            return Err(self.refuse(&key("name"), &pool.name, allowed));
        }
        let usual = Pool::default();
        for (name, is_given) in [
            ("path", pool.path != usual.path),
            ("devices", pool.devices != usual.devices),
            ("namespace", pool.namespace != usual.namespace),
            ("spare_devices", pool.spare_devices != usual.spare_devices),
            ("size", pool.size != usual.size),
            ("preallocate", pool.preallocate != usual.preallocate),
            ("volatile", pool.volatile != usual.volatile),
            ("extent_size", pool.extent_size != usual.extent_size),
            ("composite", pool.composite != usual.composite),
            ("read_cache", pool.read_cache != usual.read_cache),
            ("atomicity", pool.atomicity != usual.atomicity),
            ("space", pool.space != usual.space),
            ("extend", pool.extend != usual.extend),
            ("create_namespaces", pool.create_namespaces),
        ] {
            if is_given {
                let allowed = "left out: the volumes of such a pool are namespaces of its region";
                return Err(self.refuse(&key(name), "given", allowed));
            }
        }
        let region: RegionKey = pool
            .region
            .parse()
            .map_err(|allowed| self.refuse(&key("region"), &pool.region, allowed))?;
        let prefix = &pool.name_prefix;
        if prefix.len() > MAX_PREFIX || prefix.contains(|c: char| c.is_control()) {
            let allowed = format!("at most {MAX_PREFIX} bytes without control characters");
            return Err(self.refuse(&key("name_prefix"), prefix, allowed));
        }
        let alignment = match pool.alignment.as_str() {
            "formula" => Rule::Formula,
            "seed" => Rule::Coarse,
            other => return Err(self.refuse(&key("alignment"), other, "formula or seed")),
        };
        let size_rule = match pool.size_semantics.as_str() {
            "usable" => SizeRule::Usable,
            "charged" => SizeRule::Charged,
            other => return Err(self.refuse(&key("size_semantics"), other, "usable or charged")),
        };
        let page_map = match pool.page_map.as_str() {
            "device" => PageMap::Device,
            "memory" => PageMap::Memory,
            other => return Err(self.refuse(&key("page_map"), other, "device or memory")),
        };
        Ok(DirectConfig {
            name: pool.name.clone(),
            region,
            name_prefix: prefix.clone(),
            alignment,
            size_rule,
            page_map,
            power_safe: match pool.persistence.as_str() {
                "auto" => false,
                "power-safe" => true,
                other => return Err(self.refuse(&key("persistence"), other, "auto or power-safe")),
            },
            has_percentage: pool.percentage != usual.percentage,
        })
    }

    /// The region that a pool of extents has its namespaces in.
    pub(super) fn share(&self, index: &str, pool: &Pool) -> Result<Option<RegionShare>, Error> {
        if pool.region.is_empty() {
            return Ok(None);
        }
        let key = |name| ["pool", index, name];
        let region: Result<RegionKey, _> = pool.region.parse();
        let region =
            region.map_err(|allowed| self.refuse(&key("region"), &pool.region, allowed))?;
        if [&pool.path, &pool.namespace].iter().any(|given| !given.is_empty())
            || !pool.devices.is_empty()
        {
            let allowed = "left out beside path, devices or namespace";
            return Err(self.refuse(&key("region"), &pool.region, allowed));
        }
        let percentage = u8::try_from(pool.percentage).ok().filter(|p| (1..=100).contains(p));
        let percentage = percentage
            .ok_or_else(|| self.refuse(&key("percentage"), pool.percentage, "from 1 to 100"))?;
        let create = pool.create_namespaces;
        Ok(Some(RegionShare { key: region, percentage, create, others: Vec::new() }))
    }

    /// Rejects keys of namespaces in pools of other kinds.
    pub(super) fn not_direct(&self, index: &str, pool: &Pool) -> Result<(), Error> {
        let usual = Pool::default();
        let of_region = pool.kind == "pmem" && !pool.region.is_empty();
        if !of_region && pool.region != usual.region {
            let allowed = "left out unless kind is pmem or pmem-direct";
            return Err(self.refuse(&["pool", index, "region"], &pool.region, allowed));
        }
        if !of_region && pool.create_namespaces {
            let allowed = "false unless kind is pmem and region is given";
            return Err(self.refuse(&["pool", index, "create_namespaces"], true, allowed));
        }
        for (name, value, usual) in [
            ("name_prefix", &pool.name_prefix, &usual.name_prefix),
            ("alignment", &pool.alignment, &usual.alignment),
            ("size_semantics", &pool.size_semantics, &usual.size_semantics),
            ("page_map", &pool.page_map, &usual.page_map),
        ] {
            if value != usual {
                let allowed = "left out unless kind is pmem-direct";
                return Err(self.refuse(&["pool", index, name], value, allowed));
            }
        }
        if pool.percentage != usual.percentage && !pool.create_namespaces {
            let allowed = "left out unless create_namespaces is true: `blockd pmem create \
                           --percentage` makes space for a pool by hand";
            return Err(self.refuse(&["pool", index, "percentage"], pool.percentage, allowed));
        }
        Ok(())
    }
}
