//! Scripts about snapshots and groups.

use super::super::core::Class;
use super::super::disk::Keep;
use super::super::oracle::Violation;
use super::super::world::World;
use super::super::world::script::BLOCK;

/// R7: a leaf with a change that is not durable is shared, and a write gives each side its own.
pub(super) fn unshare_after_write(world: &mut World) -> Result<(), Violation> {
    let (volume, clone) = family(world)?;
    world.write(volume, 2, 0)?;
    world.write(clone, 2, 0)?;
    world.flush(volume)
}

/// A volume with data and a clone of it, both durable.
pub(super) fn family(world: &mut World) -> Result<(u32, u32), Violation> {
    let volume = world.volume(4)?;
    for (extent, block) in [(0, 0), (0, 1), (0, 2), (1, 0)] {
        world.write(volume, extent, block)?;
    }
    world.flush(volume)?;
    let snapshot = world.copy(volume, true)?.unwrap_or(volume);
    let clone = world.copy(snapshot, false)?.unwrap_or(volume);
    world.delete(snapshot)?;
    Ok((volume, clone))
}

/// R10: a clone takes an extent for its own while power loss would bring it back to its source.
pub(super) fn exclusive_too_early(world: &mut World) -> Result<(), Violation> {
    let (volume, clone) = family(world)?;
    world.hold(&[Class::Log]);
    world.write(volume, 0, 0)?;
    world.write(clone, 0, 1)?;
    world.write(clone, 0, 2)?;
    world.lose_power_keeping_caches();
    world.open()
}

/// R10c: an in-place write to a range that a copy in flight has read already.
pub(super) fn write_under_copy(world: &mut World) -> Result<(), Violation> {
    let (volume, clone) = family(world)?;
    // Both have leaves of their own.
    world.write(volume, 2, 0)?;
    // A reader keeps the dropped reference from counting, until the clone has begun its copy.
    world.hold(&[Class::Read]);
    world.read(volume, 1, 0)?;
    world.hold(&[]);
    world.write(volume, 0, 0)?;
    world.flush(volume)?;
    world.hold(&[Class::Write]);
    world.write(clone, 0, 1)?;
    world.hold(&[]);
    world.release(Class::Read)?;
    world.write(clone, 0, 2)?;
    world.release(Class::Write)?;
    world.read(clone, 0, 2)
}

/// R16: a write in place lands after the snapshot was taken and read.
pub(super) fn snapshot_under_write(world: &mut World) -> Result<(), Violation> {
    let volume = world.volume(4)?;
    world.write(volume, 0, 0)?;
    world.flush(volume)?;
    world.hold(&[Class::Write]);
    world.write(volume, 0, 0)?;
    world.hold(&[]);
    if let Some(snapshot) = world.copy(volume, true)? {
        world.read(snapshot, 0, 0)?;
        world.release(Class::Write)?;
        world.read(snapshot, 0, 0)?;
    }
    world.release(Class::Write)
}

/// R16: while a write keeps the second volume of a group from being cut, the first is written and
/// then the second again.
pub(super) fn group_under_writes(world: &mut World) -> Result<(), Violation> {
    let (first, second) = (world.volume(4)?, world.volume(4)?);
    for volume in [first, second] {
        world.write(volume, 0, 0)?;
        world.write(volume, 1, 0)?;
        world.flush(volume)?;
    }
    world.hold(&[Class::Write]);
    world.write(second, 0, 0)?;
    world.hold(&[]);
    world.group(&[first, second])?;
    world.write(first, 1, 0)?;
    world.write(second, 1, 0)?;
    world.release(Class::Write)?;
    world.group(&[first])?;
    world.kill_process();
    world.open()
}

/// R6: a group is recorded where a block of the log ends, and only that block reaches the media.
pub(super) fn group_at_a_block_end(world: &mut World) -> Result<(), Violation> {
    let (first, second) = (world.volume(130)?, world.volume(1)?);
    world.flush(first)?;
    for extent in 0..124 {
        world.write(first, extent, 0)?;
    }
    world.hold(&[Class::Log]);
    world.group(&[first, second])?;
    world.lose_power_keeping(&Keep::Until(BLOCK));
    world.open()?;
    // As a whole, then, and asked for again.
    let name = |source| (source, format!("again-{source}"));
    let members = vec![name(first), name(second)];
    world.ask_group(members.clone())?;
    world.ask_group(members)?;
    world.lose_power_keeping(&Keep::Nothing);
    world.open()
}

/// A leaf that a volume shares with its last snapshot and not with the one before, over extents of
/// which some are shared by all three.
pub(super) fn shared_by_another(world: &mut World) -> Result<(), Violation> {
    let volume = world.volume(4)?;
    world.write(volume, 0, 0)?;
    world.write(volume, 1, 0)?;
    world.copy(volume, true)?;
    world.write(volume, 0, 1)?;
    world.copy(volume, true)?;
    world.write(volume, 2, 1)?;
    world.copy(volume, true)?;
    world.flush(volume)
}

/// R17a: a volume is rolled back while a checkpoint has still to write leaves that it had before,
/// and power is lost before the rollback is durable.
pub(super) fn rollback_at_a_checkpoint(world: &mut World) -> Result<(), Violation> {
    let (leaf, leaves) = (256, 8);
    let volume = world.volume(leaves * leaf)?;
    for number in 0..leaves {
        world.write(volume, number * leaf, 0)?;
    }
    let Some(snapshot) = world.copy(volume, true)? else { return Ok(()) };
    for number in 0..leaves {
        world.write(volume, number * leaf, 0)?;
    }
    world.flush(volume)?;
    // More than half of the log is used, and a checkpoint begins.
    world.hold(&[Class::Page]);
    for block in 1..10 {
        world.write(volume, 0, block)?;
        world.flush(volume)?;
    }
    world.hold(&[Class::Log]);
    world.roll_back_to(volume, snapshot)?;
    world.release(Class::Page)?;
    world.lose_power_keeping_caches();
    world.open()
}

/// K3: a write is redirected, and meanwhile the last other reference to the shared extent is
/// dropped. A second write of the extent would go into it, and not be found there.
pub(super) fn write_beside_a_redirect(world: &mut World) -> Result<(), Violation> {
    let volume = world.volume(4)?;
    for (extent, block) in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0)] {
        world.write(volume, extent, block)?;
    }
    let Some(snapshot) = world.copy(volume, true)? else { return Ok(()) };
    // It has a leaf of its own.
    world.write(volume, 2, 0)?;
    world.flush(volume)?;
    world.hold(&[Class::Read]);
    world.read(volume, 1, 0)?;
    world.hold(&[]);
    world.delete(snapshot)?;
    world.hold(&[Class::Write]);
    world.write(volume, 0, 1)?;
    world.release(Class::Read)?;
    world.write(volume, 0, 5)?;
    world.release_held(0)?;
    world.release(Class::Write)?;
    world.read(volume, 0, 5)
}

/// K6: a write in place into an overlay is in flight while the overlay is folded down. The base has
/// one holder left before that: a read keeps the dropped reference from counting until the write is
/// sent.
pub(super) fn fold_under_write(world: &mut World) -> Result<(), Violation> {
    let volume = world.volume(4)?;
    for block in 0..4 {
        world.write(volume, 0, block)?;
    }
    world.write(volume, 1, 0)?;
    let Some(snapshot) = world.copy(volume, true)? else { return Ok(()) };
    world.write(volume, 0, 0)?;
    world.flush(volume)?;
    world.hold(&[Class::Read]);
    world.read(volume, 1, 0)?;
    world.hold(&[]);
    world.delete(snapshot)?;
    world.hold(&[Class::Write]);
    world.write(volume, 0, 0)?;
    world.hold(&[]);
    world.release(Class::Read)?;
    world.release(Class::Write)?;
    world.read(volume, 0, 0)
}

/// K13: an entry is composite, and durable, while the superblock that allows it is on its way. At
/// another time one is folded while a commit is under way. The next commit takes its record, behind
/// the cut of the superblock without the bit.
pub(super) fn redirects_at_the_switch(world: &mut World) -> Result<(), Violation> {
    let volume = world.volume(4)?;
    world.write(volume, 0, 0)?;
    world.write(volume, 0, 1)?;
    world.copy(volume, true)?;
    world.hold(&[Class::Super]);
    world.turn_composite(true)?;
    world.write(volume, 0, 0)?;
    world.flush(volume)?;
    world.lose_power_keeping(&Keep::Nothing);
    world.hold(&[]);
    world.open()?;
    world.turn_composite(true)?;
    world.copy(volume, true)?;
    world.hold(&[Class::Write]);
    world.write(volume, 0, 0)?;
    world.turn_composite(false)?;
    world.hold(&[Class::Log, Class::Super]);
    world.write(volume, 1, 0)?;
    world.flush(volume)?;
    world.release(Class::Write)?;
    world.release(Class::Log)?;
    world.flush(volume)?;
    world.release(Class::Super)?;
    world.lose_power_keeping(&Keep::Nothing);
    world.open()
}
