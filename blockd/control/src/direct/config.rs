//! How a pool of namespaces is configured.

use blockd_pmem::platform::step::Rule;
use blockd_pmem::platform::{PageMap, RegionKey};

/// The bytes that the size of a volume counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SizeRule {
    /// The bytes of its device; it takes more than these.
    #[default]
    Usable,
    /// The bytes that it takes; its device has less.
    Charged,
}

/// A pool of namespaces.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirectConfig {
    /// The pool's name.
    pub name: String,
    /// Where its volumes are.
    pub region: RegionKey,
    /// The prefix of its namespaces' names.
    pub name_prefix: String,
    /// In which steps sizes go.
    pub alignment: Rule,
    /// The bytes that sizes count.
    pub size_rule: SizeRule,
    /// Where the kernel notes pages.
    pub page_map: PageMap,
    /// Whether the platform keeps written data, although it does not report so.
    pub power_safe: bool,
    /// A percentage was given, which means nothing here.
    pub has_percentage: bool,
}
