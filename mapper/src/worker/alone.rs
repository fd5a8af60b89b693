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
    let extra = |physical| match pool.arena.meta(id).references.load(Ordering::Acquire) {
        // A leaf that another thread has just copied has counted its extents before it let go.
        1 => pool.known_extra(physical),
        _ => Some(1),
    };
    let physical = pool.arena.leaf(id).alone(extent.entry(), touched, extra)?;
    // Else the volume has its own copy of the leaf by now, which may map another extent.
    (directory.load(extent.slot()) == Some(id)).then_some(physical)
}
