//! Scripts about the cache of shared blocks.

use super::super::core::Class;
use super::super::oracle::Violation;
use super::super::world::World;

/// A volume whose first two extents a snapshot shares, and that snapshot.
fn shared(world: &mut World) -> Result<Option<(u32, u32)>, Violation> {
    let volume = world.volume(4)?;
    for block in 0..4 {
        world.write(volume, 0, block)?;
    }
    world.write(volume, 1, 0)?;
    let snapshot = world.copy(volume, true)?;
    world.flush(volume)?;
    Ok(snapshot.map(|snapshot| (volume, snapshot)))
}

/// C1: a block comes into the cache while a snapshot shares it, and is written in place when that
/// is gone.
pub(super) fn written_in_place(world: &mut World) -> Result<(), Violation> {
    let Some((volume, snapshot)) = shared(world)? else { return Ok(()) };
    world.read(volume, 0, 0)?;
    world.delete(snapshot)?;
    world.flush(volume)?;
    world.write(volume, 0, 0)?;
    world.read(volume, 0, 0)
}

/// C2: a cached extent becomes free, and another volume, which waits for space, gets it.
pub(super) fn used_again(world: &mut World) -> Result<(), Violation> {
    let Some((first, snapshot)) = shared(world)? else { return Ok(()) };
    for block in 0..4 {
        world.read(first, 0, block)?;
    }
    world.delete(snapshot)?;
    world.flush(first)?;
    let second = world.volume(200)?;
    world.fill(second)?;
    world.discard(first, 0)?;
    world.flush(first)?;
    // Each extent that it has, with the one that its waiting write got.
    for extent in 0..64 {
        world.read(second, extent, 0)?;
    }
    Ok(())
}

/// C3: a block comes into the cache, the volume writes it and so lays an overlay over it, and a
/// fold brings that down into the cached extent.
pub(super) fn folded_down(world: &mut World) -> Result<(), Violation> {
    let Some((volume, snapshot)) = shared(world)? else { return Ok(()) };
    world.read(volume, 0, 0)?;
    world.write(volume, 0, 0)?;
    world.flush(volume)?;
    world.delete(snapshot)?;
    world.flush(volume)?;
    world.read(volume, 0, 0)
}

/// C4: a move begins under a write in place. A read of the extent is done before that write, which
/// is answered before the move is.
pub(super) fn moved_under_write(world: &mut World) -> Result<(), Violation> {
    let extents = 24;
    let volume = world.volume(extents)?;
    for extent in 0..extents {
        world.write(volume, extent, 0)?;
    }
    world.flush(volume)?;
    world.hold(&[Class::Write]);
    for extent in 0..extents {
        world.write(volume, extent, 0)?;
    }
    world.begin_to_remove(1)?;
    world.settle()?;
    for extent in 0..extents {
        world.read(volume, extent, 0)?;
    }
    world.hold(&[Class::Fold]);
    world.release(Class::Write)?;
    for extent in 0..extents {
        world.read(volume, extent, 0)?;
    }
    world.release(Class::Fold)
}

/// C5: a read of a block is under way while the last other holder of its extent goes, and the block
/// is written in place. An older read keeps that holder until then.
pub(super) fn filled_late(world: &mut World) -> Result<(), Violation> {
    let Some((volume, snapshot)) = shared(world)? else { return Ok(()) };
    world.hold(&[Class::Read]);
    world.read(volume, 1, 0)?;
    world.delete(snapshot)?;
    world.flush(volume)?;
    world.read(volume, 0, 0)?;
    world.core.execute_held();
    world.release_held(0)?;
    world.flush(volume)?;
    world.write(volume, 0, 0)?;
    world.release(Class::Read)?;
    world.read(volume, 0, 0)
}
