//! How a pool of namespaces is configured.

use blockd_pmem::platform::step::Rule;
use blockd_pmem::platform::{PageMap, RegionKey};

/// What the size of a volume counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SizeRule {
    /// What its device has; more than that is taken.
    #[default]
    Usable,
    /// What is taken; its device has less.
    Charged,
}

/// A pool of namespaces.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirectConfig {
    /// What people call it.
    pub name: String,
    /// Where its volumes are.
    pub region: RegionKey,
    /// What names of its namespaces begin with.
    pub name_prefix: String,
    /// In which steps sizes go.
    pub alignment: Rule,
    /// What sizes count.
    pub size_rule: SizeRule,
    /// Where the kernel notes pages.
    pub page_map: PageMap,
    /// The platform keeps what was written, although it does not say so.
    pub power_safe: bool,
    /// A percentage was given, which means nothing here.
    pub has_percentage: bool,
}
