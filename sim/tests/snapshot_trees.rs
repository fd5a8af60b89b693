//! Random trees of snapshots and clones against a plain model of them: the content of each, the
//! differences between any two of them, and the space that each deletion frees, in every order.
//!
//! `BLOCKD_TREES=10000 BLOCKD_SEED=7 cargo test --release -p blockd-tests --test snapshot_trees`

#![allow(clippy::unwrap_used, reason = "a test ends where an expectation fails")]

use std::collections::{BTreeMap, BTreeSet};

use blockd_mapper::engine::{Control, DiffRequest, Outcome, RangeState};
use blockd_mapper::error::MapperError;
use blockd_mapper::mutation::{self, Mutation};
use blockd_mapper::pool::Tuning;
use blockd_mapper::units::VolumeId;
use blockd_sim::rig::{BLOCK, Media, Rig};

const EXTENT: u64 = 64 << 10;
const BLOCKS: usize = 16;
/// Where volumes are written: ends of leaves, and leaves of their own.
const PLACES: [u64; 8] = [0, 1, 2, 254, 255, 256, 511, 600];
const EXTENTS: u64 = 620;
/// Trees after which a pool is closed or killed, and opened again.
const TREES_PER_LIFE: u64 = 50;
/// Trees of a run unless the environment says otherwise: some seconds of it.
const TREES: u64 = 2000;

/// An extent of a volume: its id, and the content of its blocks, 0 for none.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Extent {
    id: u64,
    tags: [u64; BLOCKS],
}

#[derive(Clone, Debug)]
struct Plain {
    extents: BTreeMap<u64, Extent>,
    size: u64,
    snapshot: bool,
}

/// One tree: a volume, and its snapshots and clones.
struct Tree<'a> {
    rig: &'a mut Rig,
    random: fastrand::Rng,
    volumes: BTreeMap<VolumeId, Plain>,
    next: u64,
    name: u64,
}

fn environment(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn open(media: Media) -> Rig {
    let tuning = Tuning { quantum: 2, workers: 1, spare_leaves: 64, ..Tuning::default() };
    let options = blockd_mapper::open::OpenOptions { tuning, ..media.options() };
    Rig::open_with(media, options).map_err(|(error, _)| error).unwrap()
}

#[test]
fn trees_of_snapshots_and_clones_match_a_plain_model() {
    let (trees, seed) = (environment("BLOCKD_TREES", TREES), environment("BLOCKD_SEED", 1));
    run(trees, seed);
    // The same process, since switches are the process's: the effect of a mistake.
    std::panic::set_hook(Box::new(|_| ()));
    for mistake in [Mutation::DiffTrustsShared, Mutation::AccountByLeaf] {
        mutation::set(Some(mistake));
        let noticed = std::panic::catch_unwind(|| one_life(seed, TREES_PER_LIFE));
        mutation::set(None);
        assert!(noticed.is_err(), "{mistake:?} is not noticed");
    }
}

#[test]
fn figures_before_durability_are_not_called_exact() {
    let mut rig = open(Media::create(64 << 10, &[32 << 20], Some(EXTENT)).unwrap());
    let create = Control::Create { name: "data".to_owned(), size: 8 * EXTENT, block_size: 4096 };
    let source = rig.make(create).unwrap();
    rig.write(source, 0, &[1; BLOCK]).unwrap();
    let name = "kept".to_owned();
    let snapshot = rig.make(Control::Snapshot { source, name }).unwrap();
    rig.write(source, 0, &[2; BLOCK]).unwrap();
    // The snapshot alone has the extent, which is not known until the change is durable.
    let before = rig.engine().figures(&[snapshot]).unwrap();
    assert!(!before.exact && before.exclusive == 0, "{before:?}");
    rig.control(Control::Commit).unwrap();
    rig.settle();
    let after = rig.engine().figures(&[snapshot]).unwrap();
    assert!(after.exact && after.exclusive == EXTENT, "{after:?}");
}

fn run(trees: u64, seed: u64) {
    let next = std::sync::atomic::AtomicU64::new(0);
    let lives = trees.div_ceil(TREES_PER_LIFE);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let life = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    if life >= lives {
                        return;
                    }
                    let count = TREES_PER_LIFE.min(trees - life * TREES_PER_LIFE);
                    one_life(seed.wrapping_mul(1_000_003).wrapping_add(life), count);
                }
            });
        }
    });
}

/// A pool, and tree after tree in it. After each the pool is as empty as before.
fn one_life(seed: u64, trees: u64) {
    let media = Media::create(64 << 10, &[32 << 20], Some(EXTENT)).unwrap();
    let mut rig = open(media);
    let mut random = fastrand::Rng::with_seed(seed);
    let empty = available(&rig);
    for number in 0..trees {
        let mut tree = Tree {
            rig: &mut rig,
            random: random.fork(),
            volumes: BTreeMap::new(),
            next: 1,
            name: number * 1000,
        };
        tree.grow();
        if number == trees / 2 {
            // The process dies, and its answered and flushed data is read back.
            let volumes = std::mem::take(&mut tree.volumes);
            rig = open(rig.media.clone());
            tree = Tree {
                rig: &mut rig,
                random: random.fork(),
                volumes,
                next: 1 << 40,
                name: number * 1000 + 500,
            };
        }
        tree.compare();
        tree.cut_down();
        assert_eq!(available(&rig), empty, "seed {seed}, tree {number}: space is missing");
    }
    rig.check().unwrap();
}

/// The bytes that are free, or kept for pages.
fn available(rig: &Rig) -> u64 {
    let space = rig.engine().space();
    space.free + space.metadata
}

impl Tree<'_> {
    fn grow(&mut self) {
        let size = EXTENTS * EXTENT;
        let name = self.fresh();
        let id = self.rig.make(Control::Create { name, size, block_size: 512 }).unwrap();
        self.volumes.insert(id, Plain { extents: BTreeMap::new(), size, snapshot: false });
        for _ in 0..self.random.usize(6..24) {
            match self.random.u8(..16) {
                0..=5 => self.write(),
                6 => self.discard(),
                7..=8 => self.snapshot(),
                9 => self.group(),
                10..=11 => self.clone_one(),
                12 => self.roll_back(),
                13 => self.resize(),
                _ => self.delete_one(),
            }
        }
    }

    fn fresh(&mut self) -> String {
        self.name += 1;
        format!("n{}", self.name)
    }

    fn pick(&mut self, wanted: impl Fn(&Plain) -> bool) -> Option<VolumeId> {
        let all: Vec<_> =
            self.volumes.iter().filter(|(_, v)| wanted(v)).map(|(id, _)| *id).collect();
        (!all.is_empty()).then(|| all[self.random.usize(..all.len())])
    }

    /// Makes everything durable and reclaims it, so that the exclusive space is known.
    fn settle(&mut self) {
        self.rig.control(Control::Commit).unwrap();
        for _ in 0..1000 {
            self.rig.settle();
            let engine = self.rig.engine();
            if engine.releasing().is_empty() && engine.space().pending == 0 {
                return;
            }
        }
        panic!("never at rest");
    }

    fn is_shared(&self, owner: VolumeId, at: u64, id: u64) -> bool {
        let has = |volume: &Plain| volume.extents.get(&at).is_some_and(|extent| extent.id == id);
        self.volumes.iter().any(|(other, volume)| *other != owner && has(volume))
    }

    fn place(&mut self, size: u64) -> Option<(u64, std::ops::Range<usize>)> {
        let at = PLACES[self.random.usize(..PLACES.len())];
        let first = self.random.usize(..BLOCKS);
        let last = self.random.usize(first..BLOCKS);
        (at * EXTENT < size).then_some((at, first..last + 1))
    }

    fn write(&mut self) {
        let Some(id) = self.pick(|volume| !volume.snapshot) else { return };
        let Some((at, blocks)) = self.place(self.volumes[&id].size) else { return };
        let shared =
            self.volumes[&id].extents.get(&at).is_some_and(|e| self.is_shared(id, at, e.id));
        self.next += 1;
        let tag = self.next;
        let volume = self.volumes.get_mut(&id).unwrap();
        let extent = volume.extents.entry(at).or_insert(Extent { id: tag, tags: [0; BLOCKS] });
        if shared {
            extent.id = tag;
        }
        extent.tags[blocks.clone()].fill(tag);
        let data = tag.to_le_bytes().repeat(blocks.len() * BLOCK / 8);
        self.rig.write(id, at * EXTENT + (blocks.start * BLOCK) as u64, &data).unwrap();
        self.settle();
    }

    fn discard(&mut self) {
        let Some(id) = self.pick(|volume| !volume.snapshot) else { return };
        let Some((at, blocks)) = self.place(self.volumes[&id].size) else { return };
        let volume = self.volumes.get_mut(&id).unwrap();
        if let Some(extent) = volume.extents.get_mut(&at) {
            extent.tags[blocks.clone()].fill(0);
            if extent.tags == [0; BLOCKS] {
                volume.extents.remove(&at);
            }
        }
        let offset = at * EXTENT + (blocks.start * BLOCK) as u64;
        self.rig.discard(id, offset, blocks.len() * BLOCK).unwrap();
        self.settle();
    }

    fn snapshot(&mut self) {
        let Some(source) = self.pick(|volume| !volume.snapshot) else { return };
        let name = self.fresh();
        let id = self.rig.make(Control::Snapshot { source, name }).unwrap();
        let copy = Plain { snapshot: true, ..self.volumes[&source].clone() };
        self.volumes.insert(id, copy);
    }

    fn group(&mut self) {
        let sources: Vec<_> =
            self.volumes.iter().filter(|(_, v)| !v.snapshot).map(|(id, _)| *id).take(5).collect();
        if sources.is_empty() {
            return;
        }
        let members: Vec<_> = sources.iter().map(|id| (*id, self.fresh())).collect();
        let made = self.rig.control(Control::SnapshotGroup { members }).unwrap();
        let Outcome::CreatedGroup(ids) = made else { panic!("{made:?}") };
        for (id, source) in ids.into_iter().zip(sources) {
            let copy = Plain { snapshot: true, ..self.volumes[&source].clone() };
            self.volumes.insert(id, copy);
        }
    }

    fn clone_one(&mut self) {
        let Some(source) = self.pick(|volume| volume.snapshot) else { return };
        let name = self.fresh();
        let from = self.volumes[&source].clone();
        let size = from.size + self.random.u64(..3) * 300 * EXTENT;
        let control = Control::Clone { source, name, size: Some(size) };
        let id = self.rig.make(control).unwrap();
        self.volumes.insert(id, Plain { size, snapshot: false, ..from });
    }

    fn roll_back(&mut self) {
        let Some(id) = self.pick(|volume| !volume.snapshot) else { return };
        let Some(snapshot) = self.pick(|volume| volume.snapshot) else { return };
        let done = self.rig.control(Control::Rollback { volume: id, snapshot });
        assert_eq!(done, Ok(Outcome::RolledBack));
        let content = Plain { snapshot: false, ..self.volumes[&snapshot].clone() };
        self.volumes.insert(id, content);
        self.settle();
    }

    fn resize(&mut self) {
        let Some(id) = self.pick(|volume| !volume.snapshot) else { return };
        let size = self.random.u64(1..EXTENTS + 300) * EXTENT;
        self.rig.control(Control::Resize { volume: id, size }).unwrap();
        let volume = self.volumes.get_mut(&id).unwrap();
        volume.size = size;
        volume.extents.retain(|at, _| at * EXTENT < size);
        self.settle();
    }

    fn delete_one(&mut self) {
        if self.volumes.len() > 1
            && let Some(id) = self.pick(|_| true)
        {
            self.delete(id);
        }
    }

    /// Deletes one, and checks that the predicted space is freed.
    fn delete(&mut self, id: VolumeId) {
        self.settle();
        let figures = self.rig.engine().figures(&[id]).unwrap();
        assert!(figures.exact, "{figures:?}");
        assert_eq!(figures.exclusive, self.exclusive(&[id]) * EXTENT, "volume {id}");
        assert_eq!(figures.mapped, self.volumes[&id].extents.len() as u64 * EXTENT);
        let before = available(self.rig);
        assert_eq!(self.rig.control(Control::Delete { volume: id }), Ok(Outcome::Deleted));
        self.volumes.remove(&id);
        self.settle();
        let back = available(self.rig) - before;
        assert_eq!(back, figures.gives_back(), "deleting {id}: {figures:?}");
    }

    /// Extents that only these volumes have.
    fn exclusive(&self, ids: &[VolumeId]) -> u64 {
        let held = |wanted: bool| -> BTreeSet<u64> {
            let those = self.volumes.iter().filter(|(id, _)| ids.contains(id) == wanted);
            those.flat_map(|(_, volume)| volume.extents.values().map(|e| e.id)).collect()
        };
        held(true).difference(&held(false)).count() as u64
    }

    fn compare(&mut self) {
        self.settle();
        for (id, volume) in &self.volumes {
            let held = self.rig.blocks(*id, volume.size).unwrap();
            let mut expected = BTreeMap::new();
            for (at, extent) in &volume.extents {
                for (block, tag) in extent.tags.iter().enumerate().filter(|(_, tag)| **tag != 0) {
                    let number = at * BLOCKS as u64 + block as u64;
                    expected.insert(number, tag.to_le_bytes().repeat(BLOCK / 8));
                }
            }
            assert!(held == expected, "volume {id} holds something else");
        }
        let ids: Vec<VolumeId> = self.volumes.keys().copied().collect();
        for _ in 0..4 {
            let one = ids[self.random.usize(..ids.len())];
            let other = ids[self.random.usize(..ids.len())];
            self.compare_two(one, Some(other));
        }
        let one = ids[self.random.usize(..ids.len())];
        self.compare_two(one, None);
        for info in self.rig.engine().volumes() {
            let figures = self.rig.engine().figures(&[info.id]).unwrap();
            let shares = (Some(figures.exclusive), Some(figures.shared));
            assert_eq!((figures.mapped, figures.valid), (info.mapped, info.valid));
            assert_eq!(shares, (info.exclusive, info.shared()));
        }
        let some: Vec<VolumeId> = ids.into_iter().filter(|_| self.random.bool()).collect();
        if !some.is_empty() {
            let figures = self.rig.engine().figures(&some).unwrap();
            assert_eq!(figures.exclusive, self.exclusive(&some) * EXTENT, "of {some:?}");
        }
    }

    /// The difference of two volumes, asked for in parts, against the model's.
    fn compare_two(&mut self, volume: VolumeId, base: Option<VolumeId>) {
        let size = self.volumes[&volume].size;
        let (mut from, mut at) = (0, 0);
        let mut last: Option<(u64, RangeState)> = None;
        loop {
            let max_ranges = self.random.usize(1..6);
            let to = if self.random.bool() { u64::MAX } else { from + self.random.u64(1..size) };
            let request = DiffRequest { volume, base, from, to, max_ranges };
            let part = self.rig.engine().diff(&request).unwrap();
            assert_eq!(part.size, size);
            assert!(part.ranges.len() <= max_ranges);
            for (number, range) in part.ranges.iter().enumerate() {
                assert!(range.offset == at && range.len > 0, "a gap before {range:?}");
                let merges = number > 0 && last.is_some_and(|(_, state)| state == range.state);
                assert!(!merges, "{range:?} should be one with the range before");
                last = Some((range.offset, range.state));
                self.check_range(volume, base, (at, at + range.len), range.state);
                at += range.len;
            }
            from = match part.next {
                Some(next) => next,
                None if to < size => to,
                None => break,
            };
            // An end of one's own choice may lie within a block.
            assert_eq!(from, at, "a part ends at {at} and goes on at {from}");
        }
        assert_eq!(at, size);
        // A worker says the same.
        let request = DiffRequest { volume, base, from: 0, to: size, max_ranges: usize::MAX };
        let whole = self.rig.engine().diff(&request).unwrap().ranges;
        assert_eq!(self.rig.changes(volume, base), Ok(Some(whole)));
    }

    fn check_range(
        &self,
        volume: VolumeId,
        base: Option<VolumeId>,
        (start, end): (u64, u64),
        state: RangeState,
    ) {
        let block = BLOCK as u64;
        let new = &self.volumes[&volume];
        let old = base.map(|base| &self.volumes[&base]);
        let found = |volume: &Plain, number: u64| {
            let (at, block) = (number / BLOCKS as u64, usize::try_from(number % 16).unwrap());
            volume.extents.get(&at).map_or((0, 0), |extent| (extent.id, extent.tags[block]))
        };
        for number in start / block..end.div_ceil(block) {
            let (id, tag) = found(new, number);
            let expected = match old.map(|old| found(old, number)) {
                Some((old_id, old_tag)) if tag != 0 && old_tag != 0 && old_id == id => {
                    assert_eq!(tag, old_tag, "the model shares blocks that differ");
                    RangeState::Same
                }
                _ if tag != 0 => RangeState::Data,
                Some((_, 0)) => RangeState::Same,
                _ => RangeState::Zero,
            };
            assert_eq!(state, expected, "volume {volume} since {base:?}, block {number}");
        }
    }

    /// Deletes all of them in some order.
    fn cut_down(&mut self) {
        while let Some(id) = self.pick(|_| true) {
            self.delete(id);
        }
    }
}

#[test]
fn volumes_of_different_families_are_not_compared() {
    let media = Media::create(64 << 10, &[8 << 20], Some(EXTENT)).unwrap();
    let mut rig = open(media);
    let create = |name: &str| Control::Create { name: name.into(), size: EXTENT, block_size: 512 };
    let (one, other) = (rig.make(create("one")).unwrap(), rig.make(create("other")).unwrap());
    let request =
        |volume, base, from| DiffRequest { volume, base, from, to: EXTENT, max_ranges: 9 };
    let refused = rig.engine().diff(&request(one, Some(other), 0)).unwrap_err();
    let text = refused.to_string();
    assert!(text.contains("\"one\"") && text.contains("\"other\""), "{text}");
    let gone = rig.engine().diff(&request(one, Some(VolumeId(9)), 0));
    assert_eq!(gone, Err(MapperError::NoVolume("9".into())));
    assert!(rig.engine().diff(&request(one, None, EXTENT + 1)).is_err());
    assert!(rig.engine().diff(&request(one, None, EXTENT)).unwrap().ranges.is_empty());
    assert!(matches!(rig.changes(one, Some(other)), Err(MapperError::OtherFamily { .. })));
    assert_eq!(rig.changes(one, Some(VolumeId(9))), Ok(None));
    assert!(rig.engine().begin_account(&[]).is_err());
    assert!(rig.engine().begin_account(&[VolumeId(9)]).is_err());
}
