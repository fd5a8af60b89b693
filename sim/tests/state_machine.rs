//! Random sequences of operations on a small pool, beside plain memory that the same was done to.
//! A failure prints the shortest sequence that shows it. `PROPTEST_CASES` and `PROPTEST_RNG_SEED`
//! change how many are tried, and which.

#![allow(clippy::unwrap_used, reason = "test code")]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

use blockd_mapper::engine::{Control, Outcome};
use blockd_mapper::error::MapperError;
use blockd_mapper::format::catalogue::VolumeKind;
use blockd_mapper::open::OpenOptions;
use blockd_mapper::pool::Tuning;
use blockd_mapper::ring::{RingMemory, VecRingMemory};
use blockd_mapper::units::VolumeId;
use blockd_sim::rig::{Media, Request, Rig};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{FileFailurePersistence, RngSeed, TestRunner};

const EXTENT: usize = 64 << 10;
const SUB_BLOCK: usize = 4096;
const BLOCK: usize = 512;
const MAX_VOLUMES: usize = 6;
const MAX_DEVICES: usize = 3;
/// Records per slot of the ring: few enough to fill up.
const RING: u64 = 64;

/// A range of a volume, fitted to it: a place and a length in blocks, rounded to sub-blocks or
/// extents if it is to be.
#[derive(Clone, Copy, Debug)]
struct Range {
    at: usize,
    len: usize,
    unit: usize,
}

impl Range {
    fn fit(self, size: usize) -> (usize, usize) {
        let at = self.at * BLOCK % size / self.unit * self.unit;
        let len = (self.len * BLOCK).next_multiple_of(self.unit);
        (at, len.min(size - at))
    }
}

/// `which` and the like choose among the existing volumes.
#[derive(Clone, Copy, Debug)]
enum Op {
    Create { blocks: usize },
    Write { which: usize, range: Range, fua: bool },
    Discard { which: usize, range: Range },
    Zeroes { which: usize, range: Range, unmap: bool },
    Flush { which: usize },
    Snapshot { which: usize },
    Clone { which: usize, more: usize },
    Delete { which: usize },
    Rollback { which: usize, snapshot: usize },
    Resize { which: usize, blocks: usize },
    Rename { which: usize },
    Checkpoint,
    Rest,
    Grow { device: usize, extents: usize },
    AddDevice { extents: usize },
    Close,
    Kill,
    FlushThenPowerLoss,
    FuaThenPowerLoss { which: usize, range: Range },
}

fn range() -> impl Strategy<Value = Range> {
    let unit = prop_oneof![3 => Just(BLOCK), 3 => Just(SUB_BLOCK), 1 => Just(EXTENT)];
    let len = prop_oneof![4 => 1_usize..24, 2 => 24_usize..200, 1 => 200_usize..900];
    (0_usize..1000, len, unit).prop_map(|(at, len, unit)| Range { at, len, unit })
}

fn op() -> impl Strategy<Value = Op> {
    let which = || 0_usize..64;
    let fua = prop::bool::weighted(0.1);
    prop_oneof![
        4 => (1_usize..900).prop_map(|blocks| Op::Create { blocks }),
        24 => (which(), range(), fua)
            .prop_map(|(which, range, fua)| Op::Write { which, range, fua }),
        8 => (which(), range()).prop_map(|(which, range)| Op::Discard { which, range }),
        8 => (which(), range(), any::<bool>())
            .prop_map(|(which, range, unmap)| Op::Zeroes { which, range, unmap }),
        4 => which().prop_map(|which| Op::Flush { which }),
        4 => which().prop_map(|which| Op::Snapshot { which }),
        3 => (which(), 0_usize..3).prop_map(|(which, more)| Op::Clone { which, more }),
        3 => which().prop_map(|which| Op::Delete { which }),
        3 => (which(), which()).prop_map(|(which, snapshot)| Op::Rollback { which, snapshot }),
        4 => (which(), 1_usize..900).prop_map(|(which, blocks)| Op::Resize { which, blocks }),
        2 => which().prop_map(|which| Op::Rename { which }),
        3 => Just(Op::Checkpoint),
        2 => Just(Op::Rest),
        1 => (0_usize..3, 1_usize..12).prop_map(|(device, extents)| Op::Grow { device, extents }),
        1 => (4_usize..12).prop_map(|extents| Op::AddDevice { extents }),
        2 => Just(Op::Close),
        3 => Just(Op::Kill),
        2 => Just(Op::FlushThenPowerLoss),
        2 => (which(), range()).prop_map(|(which, range)| Op::FuaThenPowerLoss { which, range }),
    ]
}

/// The expected state of a volume or snapshot.
#[derive(Clone, Debug)]
struct Volume {
    id: VolumeId,
    kind: VolumeKind,
    lineage: u32,
    data: Vec<u8>,
}

/// The pool, and its expected content.
struct Machine {
    rig: Rig,
    quantum: u64,
    ring: Arc<dyn RingMemory>,
    boot: u8,
    opened: u64,
    volumes: BTreeMap<String, Volume>,
    random: fastrand::Rng,
    names: usize,
    counts: Counts,
}

/// Situations that a run must have met, or it shows nothing.
#[derive(Clone, Copy, Default, Debug)]
struct Counts {
    operations: u64,
    /// Requests that found no room.
    stuck: u64,
    /// Openings that took changes from the ring, and from the log.
    from_ring: u64,
    from_log: u64,
    clean: u64,
    /// Volumes that shared extents at rest.
    shared: u64,
}

impl Counts {
    const fn values(&self) -> [u64; 6] {
        let Self { operations, stuck, from_ring, from_log, clean, shared } = *self;
        [operations, stuck, from_ring, from_log, clean, shared]
    }
}

fn new_ring() -> Arc<dyn RingMemory> {
    Arc::new(VecRingMemory::new(2, RING))
}

fn options(media: &Media, quantum: u64) -> OpenOptions {
    let tuning = Tuning { workers: 1, quantum, ..Tuning::default() };
    OpenOptions { accept_loss: false, tuning, ..media.options() }
}

impl Machine {
    fn new(devices: &[usize], quantum: u64) -> Self {
        let sizes: Vec<usize> = devices.iter().map(|extents| extents * EXTENT).collect();
        let media = Media::create(64 << 10, &sizes, Some(EXTENT as u64)).unwrap();
        let ring = new_ring();
        let how = OpenOptions { ring: Some(Arc::clone(&ring)), ..options(&media, quantum) };
        let rig = Rig::open_with(media, how).unwrap();
        let (volumes, random) = (BTreeMap::new(), fastrand::Rng::with_seed(5));
        let counts = Counts::default();
        Self { rig, quantum, ring, boot: 9, opened: 0, volumes, random, names: 0, counts }
    }

    fn pick(&self, which: usize, wanted: impl Fn(&Volume) -> bool) -> Option<(String, Volume)> {
        let names: Vec<_> = self.volumes.iter().filter(|(_, v)| wanted(v)).collect();
        let (name, volume) = names.get(which % names.len().max(1))?;
        Some(((*name).clone(), (*volume).clone()))
    }

    fn name(&mut self) -> String {
        self.names += 1;
        format!("v{}", self.names)
    }

    /// `None`: there is no room for it, and nothing has changed.
    fn control(&mut self, control: Control) -> Option<Outcome> {
        match self.rig.control(control) {
            Ok(outcome) => Some(outcome),
            Err(MapperError::NoSpace { .. }) => None,
            Err(error) => panic!("{error}"),
        }
    }

    fn made(&mut self, control: Control, name: String, volume: Volume) {
        let Some(outcome) = self.control(control) else { return };
        let Outcome::Created(id) = outcome else { panic!("{outcome:?}") };
        let lineage = if volume.lineage == 0 { id.0 } else { volume.lineage };
        self.volumes.insert(name, Volume { id, lineage, ..volume });
    }

    /// A request to a volume; its changes are returned for the model.
    fn request(&mut self, which: usize, range: Range, request: Request<'_>) {
        let Some((name, volume)) = self.pick(which, |_| true) else { return };
        let (at, len) = range.fit(volume.data.len());
        let mut bytes = vec![0; len];
        self.random.fill(&mut bytes);
        let request = match request {
            Request::Write { fua, .. } => Request::Write { data: &bytes, fua },
            Request::Discard { .. } => Request::Discard { len },
            Request::Zeroes { unmap, .. } => Request::Zeroes { len, unmap },
        };
        let result = self.rig.request(volume.id, at as u64, request);
        if volume.kind == VolumeKind::Snapshot {
            assert_eq!(result, Err(MapperError::ReadOnly), "{request:?}");
            return;
        }
        let progress = result.unwrap();
        self.counts.stuck += u64::from(progress.stuck.is_some());
        let end = at + progress.bytes;
        let data = &mut self.volumes.get_mut(&name).unwrap().data;
        match request {
            Request::Write { .. } => data[at..end].copy_from_slice(&bytes[..end - at]),
            Request::Zeroes { .. } => data[at..end].fill(0),
            Request::Discard { .. } => {
                // Whole sub-blocks; the volume's end makes its last one whole.
                let first = at.next_multiple_of(SUB_BLOCK);
                let last = if end == data.len() { end } else { end / SUB_BLOCK * SUB_BLOCK };
                if first < last {
                    data[first..last].fill(0);
                }
            }
        }
    }

    fn share(&mut self, which: usize, more: Option<usize>) {
        let kind = if more.is_some() { VolumeKind::Snapshot } else { VolumeKind::Volume };
        let Some((_, from)) = self.pick(which, |v| v.kind == kind) else { return };
        if self.volumes.len() >= MAX_VOLUMES {
            return;
        }
        let (name, source, mut made) = (self.name(), from.id, from);
        let control = if let Some(more) = more {
            let size = made.data.len() + more * 3 * SUB_BLOCK;
            made.kind = VolumeKind::Volume;
            made.data.resize(size, 0);
            Control::Clone { source, name: name.clone(), size: Some(size as u64) }
        } else {
            made.kind = VolumeKind::Snapshot;
            Control::Snapshot { source, name: name.clone() }
        };
        self.made(control, name, made);
    }

    fn create(&mut self, blocks: usize) {
        if self.volumes.len() < MAX_VOLUMES {
            let (name, size) = (self.name(), blocks * BLOCK);
            let (id, kind, lineage) = (VolumeId(0), VolumeKind::Volume, 0);
            let control =
                Control::Create { name: name.clone(), size: size as u64, block_size: 512 };
            self.made(control, name, Volume { id, kind, lineage, data: vec![0; size] });
        }
    }

    fn resize(&mut self, which: usize, blocks: usize) {
        let volume = self.pick(which, |v| v.kind == VolumeKind::Volume);
        let Some((name, volume)) = volume else { return };
        let mut size = blocks * BLOCK;
        if size < volume.data.len() {
            size = size.next_multiple_of(SUB_BLOCK);
        }
        let control = Control::Resize { volume: volume.id, size: size as u64 };
        if self.control(control).is_some() {
            self.volumes.get_mut(&name).unwrap().data.resize(size, 0);
        }
    }

    fn rename(&mut self, which: usize) {
        let Some((name, volume)) = self.pick(which, |_| true) else { return };
        let to = self.name();
        let control = Control::Rename { volume: volume.id, name: to.clone() };
        assert_eq!(self.control(control), Some(Outcome::Renamed));
        self.volumes.remove(&name);
        self.volumes.insert(to, volume);
    }

    fn roll_back(&mut self, which: usize, snapshot: usize) {
        let volume = self.pick(which, |v| v.kind == VolumeKind::Volume);
        let Some((name, volume)) = volume else { return };
        let family = |v: &Volume| v.kind == VolumeKind::Snapshot && v.lineage == volume.lineage;
        let Some((_, from)) = self.pick(snapshot, family) else { return };
        let control = Control::Rollback { volume: volume.id, snapshot: from.id };
        if self.control(control).is_some() {
            self.volumes.get_mut(&name).unwrap().data = from.data;
        }
    }

    fn add_device(&mut self, extents: usize) {
        let index = self.rig.media.devices.len();
        if index < MAX_DEVICES {
            self.rig.media.extend(index, extents * EXTENT);
            let (handle, device) = (u8::try_from(index).unwrap(), self.rig.media.new_device(index));
            self.control(Control::AddDevice { handle, device }).unwrap();
        }
    }

    fn grow(&mut self, device: usize, extents: usize) {
        let device = device % self.rig.media.devices.len();
        self.rig.media.extend(device, extents * EXTENT);
        let size = self.rig.media.devices[device].len() as u64;
        let device = u8::try_from(device).unwrap();
        self.control(Control::GrowDevice { device, size }).unwrap();
    }

    /// Another process takes over, or the same host after a loss of power.
    fn reopen(&mut self, power_lost: bool) {
        if power_lost {
            self.boot += 1;
            self.ring = new_ring();
        }
        self.opened += 1;
        let media = std::mem::take(&mut self.rig.media);
        let how = OpenOptions {
            ring: Some(Arc::clone(&self.ring)),
            boot_id: [self.boot; 16],
            open_id: 1 + self.opened,
            ..options(&media, self.quantum)
        };
        self.rig = Rig::open_with(media, how).unwrap_or_else(|(error, _)| panic!("{error}"));
        self.counts.from_ring += u64::from(self.rig.report.ring_changes > 0);
        self.counts.from_log += u64::from(self.rig.report.log_changes > 0);
        self.counts.clean += u64::from(self.rig.report.was_clean);
        self.compare_all();
    }

    fn flush(&mut self, which: usize) {
        match self.pick(which, |v| v.kind == VolumeKind::Volume) {
            Some((_, volume)) => self.rig.flush(volume.id).unwrap(),
            None => assert_eq!(self.control(Control::Commit), Some(Outcome::Committed)),
        }
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Create { blocks } => self.create(blocks),
            Op::Write { which, range, fua } => {
                self.request(which, range, Request::Write { data: &[], fua });
            }
            Op::Discard { which, range } => self.request(which, range, Request::Discard { len: 0 }),
            Op::Zeroes { which, range, unmap } => {
                self.request(which, range, Request::Zeroes { len: 0, unmap });
            }
            Op::Flush { which } => self.flush(which),
            Op::Snapshot { which } => self.share(which, None),
            Op::Clone { which, more } => self.share(which, Some(more)),
            Op::Delete { which } => {
                if let Some((name, volume)) = self.pick(which, |_| true) {
                    self.control(Control::Delete { volume: volume.id }).unwrap();
                    self.volumes.remove(&name);
                }
            }
            Op::Rollback { which, snapshot } => self.roll_back(which, snapshot),
            Op::Resize { which, blocks } => self.resize(which, blocks),
            Op::Rename { which } => self.rename(which),
            Op::Checkpoint => {
                assert_eq!(self.control(Control::Checkpoint), Some(Outcome::Checkpointed));
            }
            Op::Rest => self.rest(),
            Op::Grow { device, extents } => self.grow(device, extents),
            Op::AddDevice { extents } => self.add_device(extents),
            Op::Close => {
                assert_eq!(self.control(Control::Close), Some(Outcome::Closed));
                self.reopen(false);
                assert!(self.rig.report.was_clean);
            }
            Op::Kill => self.reopen(false),
            Op::FlushThenPowerLoss => {
                self.flush(0);
                self.reopen(true);
            }
            Op::FuaThenPowerLoss { which, range } => {
                self.flush(0);
                self.request(which, range, Request::Write { data: &[], fua: true });
                self.reopen(true);
            }
        }
    }

    /// A range of some volume, the list of all, and the space they take.
    fn look(&mut self) {
        self.compare_list();
        let space = self.rig.engine().space();
        let known = space.free + space.reserved + space.mapped + space.pending + space.metadata;
        assert_eq!(known, space.total, "{space:?}");
        let which = self.random.usize(..64);
        let Some((name, volume)) = self.pick(which, |_| true) else { return };
        let (at, len) = (self.random.usize(..1000), self.random.usize(1..200));
        let (at, len) = Range { at, len, unit: BLOCK }.fit(volume.data.len());
        let read = self.rig.read(volume.id, at as u64, len).unwrap();
        assert!(read == volume.data[at..at + len], "{name} from {at}, {len} bytes");
    }

    fn compare_list(&self) {
        let listed = self.rig.engine().volumes();
        assert_eq!(listed.len(), self.volumes.len());
        for info in listed {
            let volume = &self.volumes[&info.name];
            let size = volume.data.len() as u64;
            assert_eq!((info.id, info.size, info.kind), (volume.id, size, volume.kind));
            let held =
                volume.data.chunks(SUB_BLOCK).filter(|c| **c != [0; SUB_BLOCK][..c.len()]).count();
            let least = (held * SUB_BLOCK) as u64;
            assert!(least <= info.valid && info.valid <= info.mapped, "{least} {info:?}");
        }
    }

    fn compare_all(&mut self) {
        self.compare_list();
        for (name, volume) in &self.volumes {
            let read = self.rig.read(volume.id, 0, volume.data.len()).unwrap();
            let differs = || read.iter().zip(&volume.data).position(|(a, b)| a != b);
            assert!(read == volume.data, "first byte of {name} that differs: {:?}", differs());
        }
    }

    fn rest(&mut self) {
        assert_eq!(self.rig.check(), Ok(()));
        let (space, listed) = (self.rig.engine().space(), self.rig.engine().volumes());
        let exclusive: u64 = listed.iter().map(|info| info.exclusive.unwrap()).sum();
        let mapped: u64 = listed.iter().map(|info| info.mapped).sum();
        assert!(exclusive <= space.mapped && space.mapped <= mapped, "{space:?} {listed:?}");
        assert_eq!(space.pending, 0, "at rest");
        self.counts.shared += u64::from(exclusive < mapped);
    }

    fn run(&mut self, ops: &[Op]) {
        for op in ops {
            self.counts.operations += 1;
            self.apply(*op);
            self.look();
        }
        self.compare_all();
        self.rest();
        self.compare_all();
    }
}

fn configuration() -> ProptestConfig {
    let mut configuration = ProptestConfig::default();
    if configuration.rng_seed == RngSeed::Random {
        configuration.rng_seed = RngSeed::Fixed(1);
    }
    let file = FileFailurePersistence::WithSource("regressions");
    ProptestConfig {
        failure_persistence: Some(Box::new(file)),
        source_file: Some(file!()),
        ..configuration
    }
}

#[test]
fn any_sequence_reads_as_plain_memory() {
    let met = Cell::new([0; 6]);
    let case = (vec(20_usize..48, 1..3), 1_u64..9, vec(op(), 40..80));
    let result = TestRunner::new(configuration()).run(&case, |(devices, quantum, ops)| {
        let mut machine = Machine::new(&devices, quantum);
        machine.run(&ops);
        let (mut sum, new) = (met.get(), machine.counts.values());
        sum.iter_mut().zip(new).for_each(|(sum, new)| *sum += new);
        met.set(sum);
        Ok(())
    });
    if let Err(failure) = result {
        panic!("{failure}");
    }
    println!("operations, stuck, from ring, from log, clean, shared: {:?}", met.get());
    assert!(met.get().iter().all(|count| *count > 0), "{:?}", met.get());
}
