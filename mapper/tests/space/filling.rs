//! Pools that fill up: who gets what is left, and how writers are slowed down.

use blockd_mapper::engine::{Control, Outcome, VolumeSummary};
use blockd_mapper::error::MapperError;
use blockd_mapper::plan::ParkReason;
use blockd_mapper::space::{Mark, Marks, SpaceChange, SpaceState};
use blockd_mapper::worker::Attachment;

use super::common::{Media, Rig};
use super::{CAP, EXTENT, MIB, SECOND, fill_some, try_write};

/// A writer with one write at a time, each of a new extent.
struct Writer {
    volume: Attachment,
    next: u64,
    since: Option<u64>,
    slept: u64,
    longest: u64,
}

impl Writer {
    /// Writes until it is parked, at most `most` extents.
    fn run(&mut self, rig: &mut Rig, most: u64) -> u64 {
        for written in 0..most {
            let hurry = self.since.is_some_and(|since| rig.now - since >= CAP);
            match try_write(rig, &self.volume, self.next, hurry) {
                None => {
                    self.next += 1;
                    let waited = self.since.take().map_or(0, |since| rig.now - since);
                    self.longest = self.longest.max(waited);
                    self.slept += waited;
                }
                Some(reason) => {
                    if reason == ParkReason::Slowed {
                        self.since.get_or_insert(rig.now);
                    } else {
                        // The wait for more space counts from its own beginning.
                        self.since = None;
                    }
                    return written;
                }
            }
        }
        most
    }
}

fn slow_pool(seed: u64, writers: usize, size: usize) -> (Rig, Vec<Writer>) {
    let mut media = Media::new(&[size]);
    media.create();
    let mut options = media.open_options();
    options.tuning.marks = Some(Marks { low: Mark::Seconds(20), very_low: Mark::Seconds(5) });
    options.tuning.quantum = 8;
    let mut rig = Rig::open_with(media, options).unwrap();
    let writers = (0..writers)
        .map(|n| {
            let id = rig.create(&format!("w{seed}-{n}"), 1 << 40);
            Writer { volume: rig.attach(id), next: 0, since: None, slept: 0, longest: 0 }
        })
        .collect();
    (rig, writers)
}

#[test]
fn sixteen_writers_have_equal_shares_of_the_free_space() {
    let (mut rig, mut writers) = slow_pool(0, 16, 512 * MIB);
    // They differ by a factor of sixteen in their demand.
    let mut slow_from = None;
    for _ in 0..60_000 {
        rig.now += 10_000_000;
        rig.settle();
        for (n, writer) in writers.iter_mut().enumerate() {
            writer.run(&mut rig, if slow_from.is_some() { n as u64 + 1 } else { 1 });
        }
        if slow_from.is_none() && rig.pool.slows_down() {
            slow_from = Some(writers.iter().map(|one| one.next).collect::<Vec<_>>());
        }
        if rig.engine.space().free < 32 * EXTENT {
            break;
        }
    }
    let from = slow_from.expect("it was slowed down");
    let shares: Vec<u64> = writers.iter().zip(&from).map(|(one, from)| one.next - from).collect();
    let mean = shares.iter().sum::<u64>() / 16;
    assert!(mean > 20, "too few writes for a comparison: {shares:?}");
    let fair = |share: &u64| share.abs_diff(mean) * 5 <= mean;
    assert!(shares.iter().all(fair), "{shares:?} beside {mean}");
    rig.check();
}

/// Writes until the pool has been full for a while. Returns the reported changes of state.
fn until_full(rig: &mut Rig, writers: &mut [Writer], rng: &mut fastrand::Rng) -> Vec<SpaceChange> {
    let (mut changes, mut limit_before, mut full_for) = (Vec::new(), u64::MAX, 0);
    let speed = rng.u64(1..6);
    while full_for < 50 {
        rig.now += rng.u64(5_000_000..50_000_000);
        rig.settle();
        for writer in writers.iter_mut() {
            writer.run(rig, rng.u64(..=speed));
        }
        rig.settle();
        changes.extend(std::iter::from_fn(|| rig.engine.take_space_change()));
        let watch = rig.engine.space_watch();
        // While nothing comes back, it only becomes slower.
        match watch.limit() {
            Some(limit) => {
                assert!(limit <= limit_before, "{limit} after {limit_before}");
                limit_before = limit;
            }
            None => limit_before = u64::MAX,
        }
        full_for = if watch.state() == SpaceState::Full { full_for + 1 } else { 0 };
    }
    changes
}

/// Finds space in one of three ways.
fn find_space(rig: &mut Rig, writers: &mut Vec<Writer>, way: u8, rng: &mut fastrand::Rng) {
    let at = rng.usize(..writers.len());
    match way {
        0 => {
            let writer = &writers[at];
            rig.discard(&writer.volume, 0, usize::try_from(writer.next * EXTENT).unwrap());
            rig.flush(&writer.volume).unwrap();
        }
        1 if writers.len() > 1 => {
            let gone = writers.swap_remove(at);
            let id = gone.volume.id();
            rig.worker.detach(gone.volume);
            rig.control(Control::Delete { volume: id }).unwrap();
        }
        _ => {
            let device = &mut rig.media.devices[0];
            let size = device.len() + 16 * MIB;
            device.resize(size, 0xEE);
            let control = Control::GrowDevice { device: 0, size: size as u64 };
            assert!(matches!(rig.control(control), Ok(Outcome::Grown { .. })));
        }
    }
}

/// Fills a pool with random writers until it is full, and sets it going again in one way after
/// the other.
fn story(seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let (count, size) = (rng.usize(1..6), rng.usize(48..128) * MIB);
    let (mut rig, mut writers) = slow_pool(seed, count, size);
    for round in 0..4 {
        let changes = until_full(&mut rig, &mut writers, &mut rng);
        assert_eq!(changes.last().unwrap().to, SpaceState::Full, "round {round}");
        let longest = writers.iter().map(|one| one.longest).max().unwrap();
        assert!(longest <= CAP + 100_000_000, "delayed by {longest}");
        assert!(writers.iter().any(|one| one.volume.is_out_of_space()));
        find_space(&mut rig, &mut writers, round, &mut rng);
        let before: u64 = writers.iter().map(|one| one.next).sum();
        for _ in 0..200 {
            rig.now += 10_000_000;
            rig.settle();
            for writer in &mut writers {
                writer.run(&mut rig, 1);
            }
        }
        let after: u64 = writers.iter().map(|one| one.next).sum();
        assert!(after > before, "round {round}: no write continued");
    }
    for writer in writers {
        rig.worker.detach(writer.volume);
    }
    rig.check();
    // All of it is there after the power fails, and the pool is unchanged.
    let mapped = |rig: &Rig| rig.engine.volumes().iter().map(|one| one.mapped).collect::<Vec<_>>();
    rig.control(Control::Commit).unwrap();
    let again = Rig::open(rig.media.clone()).unwrap();
    assert_eq!(mapped(&again), mapped(&rig));
}

#[test]
fn pools_fill_slow_down_wait_and_go_on() {
    for seed in 0..40 {
        println!("seed {seed}");
        story(seed);
    }
}

/// Returns the summary of the only volume, or of the first.
pub(super) fn summary(rig: &Rig) -> VolumeSummary {
    rig.pool.summaries().remove(0)
}

/// A writer of 20 extents a second that begins at `next`, until the pool has this state. Fails if
/// one of its writes can't go on at once, or if it takes longer than `seconds`.
fn write_until(
    rig: &mut Rig,
    volume: &Attachment,
    next: &mut u64,
    seconds: u64,
    until: impl Fn(&Rig) -> bool,
) -> u64 {
    let begun = rig.now;
    loop {
        assert!(rig.now - begun < seconds * SECOND, "{:?}", rig.engine.space_watch());
        rig.now += 100_000_000;
        rig.settle();
        if until(rig) {
            return (rig.now - begun) / SECOND;
        }
        for _ in 0..2 {
            assert_eq!(try_write(rig, volume, *next, false), None, "extent {next}");
            *next += 1;
        }
    }
}

#[test]
fn an_outage_that_the_marks_were_made_for_is_lived_through() {
    // As `blockd tune` proposes them for an outage of ten seconds.
    const OUTAGE: u64 = 10;
    let marks = Marks { low: Mark::Seconds(40), very_low: Mark::Seconds(10) };
    let mut media = Media::new(&[192 * MIB]);
    media.create();
    let mut options = media.open_options();
    options.tuning.marks = Some(marks);
    let mut rig = Rig::open_with(media, options).unwrap();
    let id = rig.create("a", 1 << 40);
    let volume = rig.attach(id);
    let mut next = fill_some(&mut rig, &volume, 1);
    let state = |rig: &Rig| rig.engine.space_watch().state();
    for round in 0..2 {
        write_until(&mut rig, &volume, &mut next, 300, |rig| state(rig) == SpaceState::Low);
        // Now the engine runs again at the very end of the outage.
        let back = rig.now + OUTAGE * SECOND;
        write_until(&mut rig, &volume, &mut next, 2 * OUTAGE, |rig| rig.now >= back);
        assert_eq!(state(&rig), SpaceState::Low, "round {round}");
        let device = &mut rig.media.devices[0];
        let size = device.len() + 96 * MIB;
        device.resize(size, 0xEE);
        rig.control(Control::GrowDevice { device: 0, size: size as u64 }).unwrap();
        write_until(&mut rig, &volume, &mut next, 1, |rig| state(rig) == SpaceState::Normal);
    }
    assert_eq!(summary(&rig).grant_waits, 1);
    // The third time the engine does not run: the reserve covers three more outages.
    write_until(&mut rig, &volume, &mut next, 300, |rig| state(rig) == SpaceState::Low);
    let late = |rig: &Rig| state(rig) == SpaceState::VeryLow;
    let passed = write_until(&mut rig, &volume, &mut next, 300, late);
    assert!((2 * OUTAGE..=4 * OUTAGE).contains(&passed), "{passed} s");
    rig.check();
}

#[test]
fn free_space_below_the_pool_counts_if_it_is_less() {
    let (mut rig, _) = slow_pool(0, 0, 64 * MIB);
    let marks = Marks { low: Mark::Bytes(8 << 20), very_low: Mark::Bytes(2 << 20) };
    rig.engine.set_marks(Some(marks));
    use SpaceState::{Full, Low, Normal, VeryLow};
    let below = [(Some(1 << 40), Normal), (Some(4 << 20), Low), (Some(1 << 20), VeryLow)];
    let rest = [(Some(EXTENT - 1), Full), (None, Normal)];
    for (free, state) in below.into_iter().chain(rest) {
        rig.engine.set_free_below(free);
        rig.now += SECOND;
        rig.settle();
        assert_eq!(rig.engine.space_watch().state(), state, "{free:?}");
    }
    let reported = std::iter::from_fn(|| rig.engine.take_space_change());
    assert_eq!(reported.map(|change| change.to).collect::<Vec<_>>(), [Low, VeryLow, Full, Normal]);
}

#[test]
fn marks_and_quantum_can_be_changed_while_it_runs() {
    let (mut rig, _) = slow_pool(0, 0, 64 * MIB);
    let look = |rig: &mut Rig| {
        rig.now += SECOND;
        rig.settle();
        rig.engine.space_watch().state()
    };
    assert_eq!(look(&mut rig), SpaceState::Normal);
    let marks = Marks { low: Mark::Percent(100), very_low: Mark::Percent(1) };
    rig.engine.set_marks(Some(marks));
    assert_eq!(look(&mut rig), SpaceState::Low);
    rig.engine.set_marks(None);
    assert_eq!(look(&mut rig), SpaceState::Normal);
    // The second one has had grants of 4, 8 and 16 before.
    for (name, quantum, written) in [("a", 3, 1), ("b", 20, 29)] {
        rig.engine.set_quantum(quantum);
        assert_eq!(rig.pool.quantum_bytes(), quantum * EXTENT);
        let id = rig.create(name, 1 << 30);
        let volume = rig.attach(id);
        assert_eq!(fill_some(&mut rig, &volume, written), written);
        let summary = rig.pool.summaries().into_iter().find(|one| one.name == name).unwrap();
        assert_eq!(summary.reserved, (quantum - 1) * EXTENT, "{name}");
    }
    rig.check();
}

/// Empty volumes and their snapshots take no space, and the catalogue that lists them has to fit.
#[test]
fn a_full_pool_refuses_more_volumes_than_its_pages_hold_and_goes_on() {
    let mut rig = Rig::new(&[5 * MIB]);
    let big = rig.create("big", 8 << 20);
    let volume = rig.attach(big);
    let mut at = 0;
    let fill = |rig: &mut Rig, at: &mut u64, until: u64| {
        while rig.engine.space().free > until || rig.engine.space().reserved > 0 {
            rig.write(&volume, *at * EXTENT, &[1; 4096]).unwrap();
            *at += 1;
        }
    };
    fill(&mut rig, &mut at, 12 * EXTENT);
    // Their catalogue takes extents, and frees pages in them.
    let empty = (0..1000).map(|at| rig.create(&format!("early{at}"), 1 << 20)).min().unwrap();
    rig.control(Control::Checkpoint).unwrap();
    fill(&mut rig, &mut at, 0);
    rig.flush(&volume).unwrap();
    let create =
        |at: u64| Control::Create { name: format!("v{at}"), size: 1 << 20, block_size: 512 };
    let snapshot = |at: u64| Control::Snapshot { source: empty, name: format!("s{at}") };
    let group = |at: u64| {
        let names = [(big, format!("g{at}")), (empty, format!("h{at}"))];
        Control::SnapshotGroup { members: names.into() }
    };
    let until_refused = |rig: &mut Rig, make: &dyn Fn(u64) -> Control| {
        let refused = (0..6000).find(|at| match rig.control(make(*at)) {
            Ok(_) => {
                rig.control(Control::Checkpoint).unwrap();
                false
            }
            Err(MapperError::NoSpace { .. }) => true,
            Err(error) => panic!("number {at}: {error}"),
        });
        refused.expect("none was refused")
    };
    let refused = until_refused(&mut rig, &create);
    // All of the catalogue can be written once more without the reserve of 1 MiB.
    let beside_reserve = rig.engine.space().metadata_free - (1 << 20);
    assert!(beside_reserve >= (1000 + refused) / 15 * 4096, "{beside_reserve}, {refused}");
    assert!(until_refused(&mut rig, &snapshot) < 15, "a page for records was found");
    assert!(until_refused(&mut rig, &group) < 8, "a page for records was found");
    // One that exists is found.
    let again = Control::Create { name: "early0".to_owned(), size: 1 << 20, block_size: 512 };
    assert!(matches!(rig.control(again), Ok(Outcome::Existing(_))));
    // Space can be freed, and then there is room for volumes.
    rig.discard(&volume, 0, usize::try_from(at * EXTENT).unwrap());
    rig.worker.detach(volume);
    rig.control(Control::Checkpoint).unwrap();
    rig.check();
    let mut rig = Rig::open(rig.kill()).unwrap();
    rig.control(create(refused)).unwrap();
    rig.control(Control::Delete { volume: big }).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    rig.check();
}
