//! The map's structures by themselves, and beside an ordered map and a database.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use blockd_mapper::allocator::Allocator;
use blockd_mapper::arena::Arena;
use blockd_mapper::directory::Directory;
use blockd_mapper::mapping::Mapping;
use blockd_mapper::units::{ExtentIndex, PhysicalExtent, SlotIndex};
use blockd_testkit::clock::Clock;
use blockd_testkit::folder::Folder;
use redb::backends::InMemoryBackend;
use redb::{ReadableDatabase, TableDefinition};

use super::machine::Machine;
use super::rig::{EXTENT, Media, Rig, TIB, mix, shuffled};
use crate::report::{Budget, Row};

/// Extents of 1 TiB.
const EXTENTS: u64 = TIB / EXTENT;

/// Entries of the comparison: 256 GiB mapped.
const ENTRIES: u64 = 1 << 20;

const TABLE: TableDefinition<'_, u64, (u64, u64)> = TableDefinition::new("map");

/// Lookups of 1 TiB mapped in random order.
pub fn rows(machine: &Machine) -> Result<Vec<Row>> {
    let map = Map::fragmented(EXTENTS)?;
    let clock = Clock::start();
    const DEPENDENT: u64 = 2_000_000;
    let from = clock.ns();
    let mut extent = 0;
    for number in 0..DEPENDENT {
        extent = mix(map.lookup(extent) ^ number) % EXTENTS;
    }
    std::hint::black_box(extent);
    let dependent = (clock.ns() - from) as f64 / DEPENDENT as f64;
    let independent = map.independent(clock, EXTENTS);
    Ok(vec![
        Row::new("lookup, 1 TiB fragmented, dependent", dependent, "ns", machine.misses(2.0)),
        Row::new("lookup, 1 TiB fragmented, batched", independent, "ns", machine.misses(0.5)),
        allocation(machine)?,
    ])
}

/// A directory and its leaves, as a volume has them.
#[derive(Debug)]
pub struct Map {
    directory: Directory,
    arena: Arena,
}

impl Map {
    /// Every extent mapped to a random one.
    pub fn fragmented(extents: u64) -> Result<Self> {
        let leaves = u32::try_from(extents / 256)?;
        let arena = Arena::new(leaves);
        arena.refill(leaves)?;
        let directory = Directory::new(leaves).context("no memory for a directory")?;
        for slot in 0..leaves {
            directory.store(SlotIndex(slot), arena.take());
        }
        for (extent, physical) in (0..).map(ExtentIndex).zip(shuffled(extents, 1)) {
            let leaf = directory.load(extent.slot()).context("every slot has a leaf")?;
            let physical = Some(PhysicalExtent(u64::from(physical)));
            arena.leaf(leaf).replace(extent.entry(), Mapping { physical, valid: u64::MAX });
        }
        Ok(Self { directory, arena })
    }

    /// The place and the valid sub-blocks of an extent, mixed into one number.
    #[inline]
    #[must_use]
    pub fn lookup(&self, extent: u64) -> u64 {
        let extent = ExtentIndex(extent);
        let Some(leaf) = self.directory.load(extent.slot()) else { return 0 };
        let mapping = self.arena.leaf(leaf).load(extent.entry());
        mapping.physical.map_or(0, |physical| physical.0) ^ mapping.valid
    }

    fn independent(&self, clock: Clock, extents: u64) -> f64 {
        const LOOKUPS: u64 = 8_000_000;
        let from = clock.ns();
        let mut sum = 0;
        for number in 0..LOOKUPS {
            sum ^= self.lookup(mix(number) % extents);
        }
        std::hint::black_box(sum);
        (clock.ns() - from) as f64 / LOOKUPS as f64
    }
}

/// Slices of eight taken from a device of 1 TiB that is 90 % full, at random places.
fn allocation(machine: &Machine) -> Result<Row> {
    const ROUNDS: usize = 50;
    const PER_ROUND: u64 = EXTENTS / 500;
    let mut allocator = Allocator::new();
    allocator.add_region(PhysicalExtent(0), EXTENTS)?;
    let order = shuffled(EXTENTS, 2);
    let mut used: Vec<u64> = order[..order.len() / 10 * 9].iter().map(|e| u64::from(*e)).collect();
    for extent in &used {
        anyhow::ensure!(allocator.mark_used(PhysicalExtent(*extent)), "each extent once");
    }
    let (clock, mut random) = (Clock::start(), fastrand::Rng::with_seed(4));
    let (mut ns, mut count) = (0, 0);
    let mut taken = Vec::with_capacity(usize::try_from(PER_ROUND)? + 8);
    for _ in 0..ROUNDS {
        let (from, mut round) = (clock.ns(), 0);
        while round < PER_ROUND {
            let run = allocator.allocate_run(8).context("a tenth is free")?;
            round += run.1;
            taken.push(run);
        }
        ns += clock.ns() - from;
        count += round;
        for (first, len) in taken.drain(..) {
            used.extend(first.0..first.0 + len);
        }
        for _ in 0..round {
            let extent = used.swap_remove(random.usize(..used.len()));
            anyhow::ensure!(allocator.free(PhysicalExtent(extent), 1), "it was used");
        }
    }
    let figure = ns as f64 / count as f64;
    Ok(Row::new("allocation at 90 % full, per extent", figure, "ns", machine.misses(0.5)))
}

/// One million mappings made and found by the mapper, by a `BTreeMap` and by redb.
pub fn comparison(scratch: &Folder) -> Result<Vec<Row>> {
    let order = shuffled(ENTRIES, 7);
    let [insert, read] = mapper(scratch, &order)?;
    let lookup = Map::fragmented(ENTRIES)?.independent(Clock::start(), ENTRIES);
    let [tree_insert, tree_lookup] = tree(&order);
    let [database_insert, database_lookup] = database(&order)?;
    let ns = |name: &str, figure| Row::new(name, figure, "ns", Budget::None);
    let times = |name: &str, figure| Row::new(name, figure, "x", Budget::None);
    Ok(vec![
        ns("mapper: lookup", lookup),
        ns("mapper: read, plan + complete", read),
        ns("mapper: first write, plan + complete + engine's commits", insert),
        ns("BTreeMap: get", tree_lookup),
        ns("BTreeMap: insert", tree_insert),
        ns("redb in memory: get in one transaction", database_lookup),
        ns("redb in memory: insert in one transaction", database_insert),
        times("BTreeMap get / mapper lookup", tree_lookup / lookup),
        times("redb get / mapper lookup", database_lookup / lookup),
        times("BTreeMap insert / mapper first write", tree_insert / insert),
        times("redb insert / mapper first write", database_insert / insert),
    ])
}

/// Nanoseconds per insert and per lookup.
fn mapper(scratch: &Folder, order: &[u32]) -> Result<[f64; 2]> {
    let size = ENTRIES * EXTENT;
    let mut rig =
        Rig::create(Media::create(&scratch.path().join("compare"), size + size / 16)?, None)?;
    let volume = rig.volume("a", size)?;
    let clock = Clock::start();
    for extent in order {
        rig.write(&volume, u64::from(*extent) * EXTENT)?;
    }
    rig.flush(&volume)?;
    let inserted = clock.ns();
    for number in 0..ENTRIES {
        std::hint::black_box(rig.read(&volume, mix(number) % ENTRIES * EXTENT)?);
    }
    let found = clock.ns() - inserted;
    rig.close(volume)?;
    Ok([inserted as f64 / ENTRIES as f64, found as f64 / ENTRIES as f64])
}

fn tree(order: &[u32]) -> [f64; 2] {
    let clock = Clock::start();
    let mut map = BTreeMap::new();
    for (extent, physical) in order.iter().zip(0..) {
        map.insert(u64::from(*extent), (physical, u64::MAX));
    }
    let inserted = clock.ns();
    for number in 0..ENTRIES {
        std::hint::black_box(map.get(&(mix(number) % ENTRIES)));
    }
    [inserted as f64 / ENTRIES as f64, (clock.ns() - inserted) as f64 / ENTRIES as f64]
}

fn database(order: &[u32]) -> Result<[f64; 2]> {
    let database = redb::Builder::new().create_with_backend(InMemoryBackend::new())?;
    let clock = Clock::start();
    let write = database.begin_write()?;
    {
        let mut table = write.open_table(TABLE)?;
        for (extent, physical) in order.iter().zip(0..) {
            table.insert(u64::from(*extent), (physical, u64::MAX))?;
        }
    }
    write.commit()?;
    let inserted = clock.ns();
    let table = database.begin_read()?.open_table(TABLE)?;
    for number in 0..ENTRIES {
        std::hint::black_box(table.get(mix(number) % ENTRIES)?);
    }
    Ok([inserted as f64 / ENTRIES as f64, (clock.ns() - inserted) as f64 / ENTRIES as f64])
}
