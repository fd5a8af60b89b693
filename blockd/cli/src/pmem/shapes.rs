//! Regions and namespaces as `--json` prints them.

use blockd_pmem::media::Domain;
use blockd_pmem::platform::step::{HUGE_PAGE, Rule, Step};
use blockd_pmem::platform::{DeviceClass, Inventory, Namespace, Region};
use serde::Serialize;

/// A region.
#[derive(Debug, Serialize)]
pub(super) struct RegionShape {
    /// The set cookie, or what stands for it.
    region: String,
    /// As the kernel numbers it now.
    name: String,
    kind: String,
    size_bytes: u64,
    available_bytes: u64,
    largest_available_bytes: u64,
    align_bytes: Option<u64>,
    /// Sizes of namespaces with huge pages are multiples of this.
    step_bytes: Option<u64>,
    step_reason: Option<String>,
    numa_node: Option<u32>,
    persistence_domain: &'static str,
    ways: u64,
    modules: Vec<ModuleShape>,
    bad_bytes: u64,
    read_only: bool,
    labelled: bool,
    /// Whether its driver has it: of one that isn't enabled nothing can be had.
    enabled: bool,
    pub(super) namespaces: Vec<NamespaceShape>,
}

#[derive(Debug, Serialize)]
struct ModuleShape {
    name: String,
    id: Option<String>,
}

/// A namespace.
#[derive(Debug, Serialize)]
pub(super) struct NamespaceShape {
    uuid: Option<String>,
    /// As the kernel numbers it now.
    name: String,
    region: String,
    label: Option<String>,
    /// Others in the region have the same label.
    label_is_shared: bool,
    mode: String,
    map: Option<String>,
    size_bytes: u64,
    usable_bytes: Option<u64>,
    align_bytes: Option<u64>,
    device: Option<String>,
    device_kind: Option<&'static str>,
    bad_bytes: u64,
    pub(super) users: Vec<String>,
}

/// As the kernel says it.
pub(super) fn domain_name(domain: Domain) -> &'static str {
    match domain {
        Domain::CpuCache => "cpu_cache",
        Domain::MemoryController => "memory_controller",
        Domain::Unknown => "unknown",
    }
}

pub(super) fn bad_bytes(ranges: &[std::ops::Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

pub(super) fn step(region: &Region) -> Option<Step> {
    Step::of(region, HUGE_PAGE, Rule::Formula)
}

impl RegionShape {
    pub(super) fn of(region: &Region, inventory: &Inventory) -> Self {
        let namespace = |one| NamespaceShape::of(one, inventory);
        let step = step(region);
        Self {
            region: region.key.to_string(),
            name: region.name.clone(),
            kind: region.kind.to_string(),
            size_bytes: region.size,
            available_bytes: region.available,
            largest_available_bytes: region.max_available_extent,
            align_bytes: region.align,
            step_bytes: step.map(Step::bytes),
            step_reason: step.map(|step| step.to_string()),
            numa_node: region.numa_node,
            persistence_domain: domain_name(region.domain),
            ways: region.ways,
            modules: region
                .dimms
                .iter()
                .map(|one| ModuleShape { name: one.name.clone(), id: one.id.clone() })
                .collect(),
            bad_bytes: bad_bytes(&region.bad_blocks),
            read_only: region.read_only,
            labelled: region.labelled,
            enabled: region.enabled,
            namespaces: region.namespaces.iter().map(namespace).collect(),
        }
    }
}

impl NamespaceShape {
    pub(super) fn of(namespace: &Namespace, inventory: &Inventory) -> Self {
        let shared = inventory
            .duplicate_names()
            .into_iter()
            .any(|(region, name, _)| region == namespace.region && name == namespace.alt_name);
        let device = namespace.device.as_ref();
        Self {
            uuid: namespace.uuid.map(|uuid| uuid.to_string()),
            name: namespace.name.clone(),
            region: namespace.region.to_string(),
            label: Some(namespace.alt_name.clone()).filter(|name| !name.is_empty()),
            label_is_shared: shared,
            mode: namespace.mode.to_string(),
            map: namespace.map.map(|map| map.to_string()),
            size_bytes: namespace.size,
            usable_bytes: namespace.usable,
            align_bytes: namespace.align,
            device: device.map(|device| device.path()),
            device_kind: device.map(|device| match device.class {
                DeviceClass::Block => "block",
                DeviceClass::Character => "character",
            }),
            bad_bytes: bad_bytes(&namespace.bad_blocks),
            users: namespace.users.iter().map(ToString::to_string).collect(),
        }
    }
}
