//! Scripts that show the absence of rules which chance shows too seldom. Each is a history like any
//! other: with all rules in place it has to be clean, and normal runs contain it now and then.

mod cached;
mod moves;
mod sharing;

use blockd_mapper::mutation::Mutation;

use super::core::Class;
use super::disk::Keep;
use super::oracle::Violation;
use super::profile::{Aim, Profile};
use super::up::Kind;
use super::world::script::BLOCK;
use super::world::{Crash, World};

use cached::{filled_late, folded_down, moved_under_write, used_again, written_in_place};
use moves::{a_device_leaves_under_writes, a_device_leaves_with_shared_leaves};
use sharing::{
    exclusive_too_early, family, fold_under_write, group_at_a_block_end, group_under_writes,
    redirects_at_the_switch, rollback_at_a_checkpoint, shared_by_another, snapshot_under_write,
    unshare_after_write, write_beside_a_redirect, write_under_copy,
};

/// One of the scripts.
#[derive(Debug)]
pub struct Script {
    /// The rules whose absence it shows.
    pub shows: &'static [Mutation],
    bend: fn(&mut Profile),
    steps: fn(&mut World) -> Result<(), Violation>,
}

/// One history in this many is a script when no rule is aimed at.
const SHARE: u64 = 16;

/// The script of a seed, if its history is one: of the rule that is aimed at, or any.
#[must_use]
pub fn of(seed: u64, aim: Aim) -> Option<&'static Script> {
    let rule = match aim {
        Aim::Rule(rule) => rule,
        Aim::Snapshots | Aim::Evacuation => return None,
        Aim::Any => {
            let number = usize::try_from(seed / SHARE).unwrap_or(0) % ALL.len();
            return seed.is_multiple_of(SHARE).then(|| &ALL[number]);
        }
    };
    if !seed.is_multiple_of(2) {
        return None;
    }
    let of_the_rule: Vec<_> = ALL.iter().filter(|script| script.shows.contains(&rule)).collect();
    let number = usize::try_from(seed / 2).unwrap_or(0);
    (!of_the_rule.is_empty()).then(|| of_the_rule[number % of_the_rule.len()])
}

impl Script {
    /// The profile of its history.
    #[must_use]
    pub fn profile(&self) -> Profile {
        let mut profile = Profile::still();
        (self.bend)(&mut profile);
        profile
    }

    /// Plays it, and reads everything back at the end.
    pub fn play(&self, world: &mut World) -> Result<(), Violation> {
        (self.steps)(world)?;
        world.wind_up_script()
    }
}

/// Every script.
pub const ALL: &[Script] = &[
    Script {
        shows: &[Mutation::ReuseAtOnce, Mutation::ReuseAtCapture],
        bend: small,
        steps: reuse_before_durable,
    },
    Script {
        shows: &[Mutation::ReuseUndrained, Mutation::DrainOneEpoch],
        bend: small,
        steps: reuse_under_read,
    },
    Script {
        shows: &[Mutation::ReleaseUndurable],
        bend: small,
        steps: reuse_before_delete_is_durable,
    },
    Script {
        shows: &[Mutation::ReleaseUndurable],
        bend: small,
        steps: reuse_before_rollback_is_durable,
    },
    Script {
        shows: &[Mutation::CommitFlushesFirst],
        bend: two_devices,
        steps: commit_of_data_on_the_second_device,
    },
    Script {
        shows: &[Mutation::CheckpointFlushesFirst],
        bend: two_devices,
        steps: checkpoint_of_data_on_the_second_device,
    },
    Script {
        shows: &[Mutation::NoCancelWithoutLeaf],
        bend: as_it_is,
        steps: discard_without_leaf_under_first_write,
    },
    Script { shows: &[Mutation::FillUndrained], bend: as_it_is, steps: fill_under_write_in_place },
    Script { shows: &[Mutation::LsnNotCarried], bend: as_it_is, steps: unshare_after_write },
    Script { shows: &[Mutation::NoRestamp], bend: as_it_is, steps: killed_in_two_recoveries },
    Script { shows: &[Mutation::CaptureLate], bend: small, steps: written_behind_the_flush },
    Script { shows: &[Mutation::RingAfterFailure], bend: small, steps: dropped_by_the_device },
    Script { shows: &[Mutation::NoChain], bend: long_commits, steps: stale_successor },
    Script { shows: &[Mutation::DecrementAtOnce], bend: as_it_is, steps: exclusive_too_early },
    Script { shows: &[Mutation::FastUnderCopy], bend: as_it_is, steps: write_under_copy },
    Script { shows: &[Mutation::NoOpeningFlush], bend: as_it_is, steps: log_in_the_cache },
    Script { shows: &[Mutation::RingEmptiedAtReplay], bend: as_it_is, steps: killed_twice },
    Script { shows: &[Mutation::EpochLate], bend: as_it_is, steps: power_lost_at_the_superblock },
    Script { shows: &[Mutation::SnapshotUndrained], bend: as_it_is, steps: snapshot_under_write },
    Script { shows: &[Mutation::GroupOneByOne], bend: as_it_is, steps: group_under_writes },
    Script { shows: &[Mutation::GroupInPieces], bend: long_commits, steps: group_at_a_block_end },
    Script {
        shows: &[Mutation::DiffTrustsShared, Mutation::AccountByLeaf],
        bend: as_it_is,
        steps: shared_by_another,
    },
    Script { shows: &[Mutation::FuzzyCheckpoint], bend: as_it_is, steps: rollback_at_a_checkpoint },
    Script {
        shows: &[Mutation::PagesOverCut],
        bend: many_leaves,
        steps: freed_for_pages_of_a_checkpoint,
    },
    Script { shows: &[Mutation::TruncateEarly], bend: as_it_is, steps: log_round_a_checkpoint },
    Script { shows: &[Mutation::DurableEarly], bend: as_it_is, steps: flush_under_superblock },
    Script { shows: &[Mutation::RedirectNotHeld], bend: composite, steps: write_beside_a_redirect },
    Script {
        shows: &[Mutation::FoldOutsideEpoch],
        bend: small_composite,
        steps: discard_under_fold,
    },
    Script { shows: &[Mutation::FoldUndrained], bend: composite, steps: fold_under_write },
    Script {
        shows: &[Mutation::CompositeBeforeBit, Mutation::BitBeforeLog],
        bend: as_it_is,
        steps: redirects_at_the_switch,
    },
    Script {
        shows: &[Mutation::PageMovedForOne, Mutation::RemovedEarly],
        bend: three_devices,
        steps: a_device_leaves_with_shared_leaves,
    },
    Script {
        shows: &[Mutation::TargetNotHeld],
        bend: three_devices,
        steps: a_device_leaves_under_writes,
    },
    Script { shows: &[Mutation::CacheKeptAtWrite], bend: caching, steps: written_in_place },
    Script { shows: &[Mutation::CacheKeptAtReuse], bend: small_caching, steps: used_again },
    Script { shows: &[Mutation::CacheKeptAtCopy], bend: composite_caching, steps: folded_down },
    Script {
        shows: &[Mutation::CachedUnderHold],
        bend: three_devices_caching,
        steps: moved_under_write,
    },
    Script { shows: &[Mutation::CacheFilledLate], bend: caching, steps: filled_late },
    Script { shows: &[], bend: small, steps: a_pool_grows },
    Script { shows: &[], bend: as_it_is, steps: requested_twice },
    Script { shows: &[], bend: long_commits, steps: many_changes },
    Script { shows: &[], bend: short_commits, steps: many_changes },
];

fn as_it_is(_: &mut Profile) {}

/// First writes of shared extents lay extents over them.
fn composite(profile: &mut Profile) {
    profile.composite = true;
}

/// The same in a pool with few extents.
fn small_composite(profile: &mut Profile) {
    small(profile);
    composite(profile);
}

/// Few extents, so that a freed one is used again at once.
fn small(profile: &mut Profile) {
    profile.devices = vec![64];
}

/// Checkpoints of many pages, one at a time.
fn many_leaves(profile: &mut Profile) {
    profile.devices = vec![160];
    profile.reserve_extents = 1;
    profile.commit_blocks = 1;
    profile.quantum = 1;
}

/// Reads of what volumes share go by a cache.
fn caching(profile: &mut Profile) {
    profile.read_cache = 1 << 20;
}

fn small_caching(profile: &mut Profile) {
    small(profile);
    caching(profile);
}

fn composite_caching(profile: &mut Profile) {
    composite(profile);
    caching(profile);
}

fn three_devices_caching(profile: &mut Profile) {
    three_devices(profile);
    caching(profile);
}

/// The first has room for log, reserve and hardly any data.
fn three_devices(profile: &mut Profile) {
    profile.devices = vec![8, 24, 200];
    profile.reserve_extents = 1;
}

/// Two devices, of which a few writes fill the first.
fn two_devices(profile: &mut Profile) {
    profile.devices = vec![24, 40];
}

/// Commits of several blocks.
fn long_commits(profile: &mut Profile) {
    profile.devices = vec![200];
    profile.commit_blocks = 8;
    profile.ring_capacity = 512;
    profile.quantum = 16;
    profile.workers = 1;
}

/// More changes than one commit takes.
fn short_commits(profile: &mut Profile) {
    long_commits(profile);
    profile.commit_blocks = 1;
}

/// Two volumes: the first holds durable data, the second waits for space with a write.
fn full(world: &mut World) -> Result<(u32, u32), Violation> {
    let (first, second) = (world.volume(4)?, world.volume(200)?);
    for extent in 0..4 {
        world.write(first, extent, 0)?;
    }
    world.flush(first)?;
    world.fill(second)?;
    Ok((first, second))
}

/// R4: an extent is used again while power loss would still bring its old mapping back.
fn reuse_before_durable(world: &mut World) -> Result<(), Violation> {
    let (first, _) = full(world)?;
    world.hold(&[Class::Log]);
    world.discard(first, 0)?;
    world.flush(first)?;
    world.lose_power_keeping_caches();
    world.open()
}

/// R4: a read that found the extent is still on its way when another volume writes there.
fn reuse_under_read(world: &mut World) -> Result<(), Violation> {
    let (first, _) = full(world)?;
    world.hold(&[Class::Read]);
    world.read(first, 0, 0)?;
    world.hold(&[]);
    world.discard(first, 0)?;
    world.flush(first)?;
    world.release(Class::Read)
}

/// R4: another volume writes over the extents of a deleted one, and power loss brings that back.
fn reuse_before_delete_is_durable(world: &mut World) -> Result<(), Violation> {
    let (first, _) = full(world)?;
    world.hold(&[Class::Log]);
    world.delete(first)?;
    world.lose_power_keeping_caches();
    world.open()
}

/// R4: the same with the extents that a volume had before it was rolled back.
fn reuse_before_rollback_is_durable(world: &mut World) -> Result<(), Violation> {
    let (first, second) = (world.volume(4)?, world.volume(200)?);
    world.write(first, 0, 0)?;
    let Some(snapshot) = world.copy(first, true)? else { return Ok(()) };
    world.write(first, 0, 1)?;
    world.write(first, 1, 0)?;
    world.flush(first)?;
    world.fill(second)?;
    world.hold(&[Class::Log]);
    world.roll_back_to(first, snapshot)?;
    world.lose_power_keeping_caches();
    world.open()
}

/// Writes to a volume until one lies on the second device. Returns its extent.
fn reach_second_device(world: &mut World, volume: u32) -> Result<usize, Violation> {
    world.flush(volume)?;
    let mut extent = 0;
    while extent < 40 && world.core.disks[1].cached_writes() == 0 {
        world.write(volume, extent, 0)?;
        extent += 1;
    }
    Ok(extent - 1)
}

/// R1: flushed data lies on the second device, whose cache is lost.
fn commit_of_data_on_the_second_device(world: &mut World) -> Result<(), Violation> {
    let volume = world.volume(40)?;
    reach_second_device(world, volume)?;
    world.flush(volume)?;
    world.lose_power_keeping(&Keep::Nothing);
    world.open()
}

/// R17b: a checkpoint maps an extent of the second device that another volume had before. The
/// superblock reaches the first device, and the second loses its cache.
fn checkpoint_of_data_on_the_second_device(world: &mut World) -> Result<(), Violation> {
    let (first, second) = (world.volume(40)?, world.volume(200)?);
    let extent = reach_second_device(world, first)?;
    world.flush(first)?;
    world.fill(second)?;
    world.discard(first, extent)?;
    world.flush(first)?;
    world.hold(&[Class::Super]);
    world.checkpoint()?;
    world.crash(&Crash::Power(vec![Keep::Everything, Keep::Nothing]));
    world.open()
}

/// R5c: a volume without a leaf is discarded while its first write is in flight. A client may not
/// see which came first (decision 0001), but the discard's space has to come back.
fn discard_without_leaf_under_first_write(world: &mut World) -> Result<(), Violation> {
    let volume = world.volume(4)?;
    world.hold(&[Class::Write]);
    world.write(volume, 0, 0)?;
    world.hold(&[]);
    world.discard(volume, 0)?;
    world.release(Class::Write)?;
    world.expect_unmapped(volume)
}

/// R5f: a write in place is in flight when its sub-block is discarded. Another write fills the
/// sub-block up with zeroes, which land first. The old write is answered and not there, and comes
/// back with the new one.
fn fill_under_write_in_place(world: &mut World) -> Result<(), Violation> {
    let volume = world.volume(4)?;
    world.write(volume, 0, 0)?;
    world.write(volume, 0, 1)?;
    world.hold(&[Class::Write]);
    world.ask(Kind::Write, volume, (0, 1), false)?;
    world.settle()?;
    world.ask(Kind::Discard, volume, (0, BLOCK), false)?;
    world.settle()?;
    world.ask(Kind::Write, volume, (BLOCK - 2, 1), false)?;
    world.settle()?;
    // The zeroes in front of the second write, if it was sent; then the first write.
    world.release_held(1)?;
    world.release_held(0)?;
    world.read(volume, 0, 0)?;
    world.release(Class::Write)?;
    world.read(volume, 0, 0)
}

/// K4: an extent is discarded whole while a fold writes to its base, and another volume, which
/// waits for space, gets the base.
fn discard_under_fold(world: &mut World) -> Result<(), Violation> {
    let (first, second) = (world.volume(4)?, world.volume(200)?);
    for block in 0..4 {
        world.write(first, 0, block)?;
    }
    world.write(first, 1, 0)?;
    let Some(snapshot) = world.copy(first, true)? else { return Ok(()) };
    world.write(first, 0, 0)?;
    world.flush(first)?;
    world.fill(second)?;
    world.hold(&[Class::Fold]);
    world.delete(snapshot)?;
    world.flush(first)?;
    world.discard(first, 0)?;
    world.flush(first)?;
    world.fill(second)?;
    world.release(Class::Fold)?;
    world.read(second, 0, 0)
}

/// R14: the process dies in two recoveries. In the first its superblock is durable already, in the
/// second it is not sent yet.
fn killed_in_two_recoveries(world: &mut World) -> Result<(), Violation> {
    let volume = world.volume(4)?;
    world.write(volume, 0, 0)?;
    world.kill_process();
    world.hold(&[Class::Super]);
    world.open_until_held()?;
    // The first pair of copies; the second pair is held back in turn.
    world.core.release(Class::Super);
    world.open_until_held()?;
    world.core.execute_held();
    world.kill_process();
    world.hold(&[Class::Super]);
    world.open_until_held()?;
    world.core.forget_held();
    world.kill_process();
    world.open()
}

/// R2: a write completes behind the data flush, and its record is captured all the same. Its
/// extent holds another volume's data below.
fn written_behind_the_flush(world: &mut World) -> Result<(), Violation> {
    let (first, _) = full(world)?;
    world.hold(&[Class::Write]);
    world.discard(first, 0)?;
    world.flush(first)?;
    world.hold(&[]);
    world.write(first, 1, 1)?;
    world.hold(&[Class::Flush]);
    world.flush(first)?;
    world.release(Class::Write)?;
    world.hold(&[]);
    world.release(Class::Flush)?;
    world.lose_power_keeping(&Keep::Nothing);
    world.open()
}

/// R8: a flush fails, the device has dropped a write, and its record is replayed.
fn dropped_by_the_device(world: &mut World) -> Result<(), Violation> {
    let (first, _) = full(world)?;
    world.discard(first, 0)?;
    world.flush(first)?;
    world.core.fail_flush = true;
    world.flush(first)?;
    world.core.fail_flush = false;
    world.kill_process();
    world.open()
}

/// R6: of a commit of several blocks all but the first reach the media. The next commit takes the
/// place of the first, and the others seem to follow it.
fn stale_successor(world: &mut World) -> Result<(), Violation> {
    let volume = world.volume(160)?;
    world.flush(volume)?;
    for extent in 0..150 {
        world.write(volume, extent, 0)?;
    }
    world.hold(&[Class::Log]);
    world.flush(volume)?;
    world.lose_power_keeping(&Keep::From(BLOCK));
    world.open()?;
    world.write(volume, 159, 0)?;
    world.flush(volume)?;
    world.lose_power_keeping(&Keep::Nothing);
    world.open()
}

/// R12: replayed changes are in the device's cache, and a flush is answered for them.
fn log_in_the_cache(world: &mut World) -> Result<(), Violation> {
    let volume = world.volume(4)?;
    world.write(volume, 0, 0)?;
    world.hold(&[Class::Log]);
    world.flush(volume)?;
    world.core.execute_held();
    world.kill_process();
    world.open()?;
    world.flush(volume)?;
    world.lose_power_keeping(&Keep::Nothing);
    world.open()
}

/// R13: the process dies again before the changes from the ring are durable.
fn killed_twice(world: &mut World) -> Result<(), Violation> {
    let volume = world.volume(4)?;
    world.write(volume, 0, 0)?;
    for class in [Class::Super, Class::Log] {
        world.kill_process();
        world.hold(&[class]);
        world.open_until_held()?;
    }
    world.kill_process();
    world.open()
}

/// R15: power is lost while the superblock of an epoch is on its way.
fn power_lost_at_the_superblock(world: &mut World) -> Result<(), Violation> {
    let volume = world.volume(4)?;
    world.write(volume, 0, 0)?;
    world.kill_process();
    world.hold(&[Class::Super]);
    world.open_until_held()?;
    world.lose_power_keeping_caches();
    world.open()
}

/// R17b: the log goes round while a checkpoint is under way.
fn log_round_a_checkpoint(world: &mut World) -> Result<(), Violation> {
    let volume = world.volume(8)?;
    world.hold(&[Class::Page]);
    for number in 0..40 {
        world.write(volume, number % 4, number / 4)?;
        world.flush(volume)?;
    }
    world.lose_power_keeping(&Keep::Nothing);
    world.open()
}

/// R17e: in a full pool an extent is freed while a checkpoint is under way, whose map names it.
/// Its room is taken for pages.
fn freed_for_pages_of_a_checkpoint(world: &mut World) -> Result<(), Violation> {
    let (leaf, leaves) = (256, 40);
    let volume = world.volume(leaves * leaf)?;
    for number in 0..leaves {
        world.write(volume, number * leaf, 0)?;
    }
    world.checkpoint()?;
    let second = world.volume(200)?;
    world.fill(second)?;
    // Every leaf changes once more.
    for number in 0..leaves {
        world.write(volume, number * leaf, 1)?;
    }
    world.flush(volume)?;
    world.hold(&[Class::Page]);
    world.checkpoint()?;
    for number in 30..leaves {
        world.discard(volume, number * leaf)?;
    }
    world.flush(volume)?;
    world.release(Class::Page)?;
    world.lose_power_keeping_caches();
    world.open()
}

/// R17b: a flush finds everything durable, while the superblock that says so is on its way.
fn flush_under_superblock(world: &mut World) -> Result<(), Violation> {
    let volume = world.volume(4)?;
    world.write(volume, 0, 0)?;
    world.hold(&[Class::Super, Class::Log]);
    world.checkpoint()?;
    world.flush(volume)?;
    world.lose_power_keeping(&Keep::Nothing);
    world.open()
}

/// A full pool grows twice, and data written there survives a loss of power.
fn a_pool_grows(world: &mut World) -> Result<(), Violation> {
    let (_, second) = full(world)?;
    world.add_device(32)?;
    world.fill(second)?;
    world.grow_device(0, 80)?;
    world.flush(second)?;
    world.lose_power_keeping(&Keep::Nothing);
    world.look()?;
    world.open()
}

/// Commands that were carried out already, and a pool that is opened for reading between two
/// openings.
fn requested_twice(world: &mut World) -> Result<(), Violation> {
    let (volume, clone) = family(world)?;
    world.delete(clone)?;
    world.delete(clone)?;
    world.resize(volume, 4 * world.extent_units())?;
    world.kill_process();
    world.open()
}

/// Commits of more than a block go round the log.
fn many_changes(world: &mut World) -> Result<(), Violation> {
    let volume = world.volume(80)?;
    for round in 0..7 {
        // 160 changes, more than the 126 of a block.
        for block in [2 * round, 2 * round + 1] {
            for extent in 0..80 {
                world.write(volume, extent, block)?;
            }
        }
        world.flush(volume)?;
        if round == 2 {
            // One block alone, so that later pairs straddle the log's end.
            world.write(volume, 0, 15)?;
            world.flush(volume)?;
        }
    }
    world.lose_power_keeping(&Keep::Nothing);
    world.open()
}
