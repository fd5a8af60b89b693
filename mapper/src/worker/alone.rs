//! Whether a write may go where the data is, as nothing else needs what is there.

use crate::directory::Directory;
use crate::pool::Pool;
use crate::sync::Ordering;
use crate::units::{ExtentIndex, PhysicalExtent};

/// The extent to overwrite, if every touched sub-block is valid and the extent is not shared.
pub(super) fn extent_to_overwrite(
    pool: &Pool,
    directory: &Directory,
    extent: ExtentIndex,
    touched: u64,
) -> Option<PhysicalExtent> {
    let id = directory.load(extent.slot())?;
    let is_shared = |physical| {
        let leaf_is_shared = pool.arena.meta(id).references.load(Ordering::Acquire) != 1;
        leaf_is_shared || pool.extra(physical) != 0
    };
    let physical = pool.arena.leaf(id).alone(extent.entry(), touched, is_shared)?;
    (directory.load(extent.slot()) == Some(id)).then_some(physical)
}
