//! Scripts about devices that leave.

use super::super::disk::Keep;
use super::super::oracle::Violation;
use super::super::world::World;

/// M7: pages of leaves that a volume and its snapshot share lie on the device that leaves, and the
/// data that these leaves map lies elsewhere.
pub(super) fn a_device_leaves_with_shared_leaves(world: &mut World) -> Result<(), Violation> {
    let (leaf, leaves) = (256, 40);
    // So that pages do not find room on the first device.
    let first = world.volume(6)?;
    for extent in 0..6 {
        world.write(first, extent, 0)?;
    }
    let volume = world.volume(leaf * leaves)?;
    for number in 0..leaves {
        world.write(volume, number * leaf, 0)?;
    }
    world.checkpoint()?;
    world.copy(volume, true)?;
    world.checkpoint()?;
    world.remove_device(1)?;
    // The old pages are used again.
    for number in 0..leaves {
        world.write(volume, number * leaf, 1)?;
    }
    world.checkpoint()?;
    world.lose_power_keeping(&Keep::Everything);
    world.open()
}

/// M6: extents that a volume and its snapshot share are moved, and the volume is written between
/// any two steps of that.
pub(super) fn a_device_leaves_under_writes(world: &mut World) -> Result<(), Violation> {
    let extents = 60;
    let volume = world.volume(extents)?;
    for extent in 0..extents {
        world.write(volume, extent, 0)?;
    }
    world.flush(volume)?;
    world.copy(volume, true)?;
    // From now on each has its own leaf.
    world.write(volume, 0, 0)?;
    world.begin_to_remove(1)?;
    for round in 0..4 * extents {
        // Backwards, towards the moves.
        world.write_beside_the_engine(volume, extents - 1 - round % extents)?;
    }
    world.settle()
}
