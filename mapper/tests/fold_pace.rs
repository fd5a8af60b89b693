//! How fast folds go: slower than the rate where the media is slow, faster where space is short.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use blockd_mapper::create::CreateOptions;
use blockd_mapper::engine::Control;
use blockd_mapper::open::OpenOptions;
use blockd_mapper::plan::{Plan, Step};
use blockd_mapper::pool::Tuning;
use blockd_mapper::space::{Mark, Marks};
use common::{Media, Rig};

const MIB: usize = 1 << 20;
const EXTENT: usize = 64 << 10;
const BLOCK: usize = 4096;
const MILLISECOND: u64 = 1_000_000;
const SECOND: u64 = 1000 * MILLISECOND;

/// A pool with 200 composite entries that can be folded down, one block each, and no time passed.
fn foldable(fold_rate: u64) -> Rig {
    let mut media = Media::new(&[64 * MIB]);
    media.create_with(&CreateOptions { composite: true, ..media.options() });
    let tuning = Tuning { fold_rate: 0, ..Tuning::default() };
    let options = OpenOptions { tuning, ..media.open_options() };
    let mut rig = Rig::open_with(media, options).unwrap();
    let id = rig.create("a", 1 << 30);
    let volume = rig.attach(id);
    rig.write(&volume, 0, &vec![1; 200 * EXTENT]).unwrap();
    rig.control(Control::Snapshot { source: id, name: "s".to_owned() }).unwrap();
    let snapshot = rig.pool.summaries().into_iter().find(|one| one.name == "s").unwrap().id;
    for extent in 0..200 {
        rig.write(&volume, (extent * EXTENT) as u64, &[2; BLOCK]).unwrap();
    }
    rig.control(Control::Delete { volume: snapshot }).unwrap();
    // All is durable, and extents that were freed can be used.
    for _ in 0..4 {
        rig.now += SECOND;
        rig.settle();
    }
    assert_eq!((rig.engine.fold_status().composite, rig.engine.fold_status().folded), (200, 0));
    rig.engine.set_fold_rate(fold_rate);
    rig
}

/// Steps the engine for a time; each of its commands takes so long.
fn run(rig: &mut Rig, end: u64, takes: u64) -> u64 {
    let before = rig.engine.fold_status().folded;
    while rig.now < end {
        match rig.engine.poll(rig.now) {
            Some(mut command) => {
                rig.media.run(&mut command);
                rig.now += takes;
                rig.engine.complete(command, Ok(()));
            }
            None => rig.now += MILLISECOND,
        }
    }
    rig.engine.fold_status().folded - before
}

#[test]
fn folds_pause_while_the_media_is_slow() {
    let quick = |takes| {
        let mut rig = foldable(1 << 30);
        let end = rig.now + 20 * SECOND;
        (run(&mut rig, end, takes), rig)
    };
    assert_eq!(quick(10 * MILLISECOND).0, 200);
    // Copies of a quarter of a second, four at a time: a pause of several seconds after each four.
    let (folded, mut rig) = quick(125 * MILLISECOND);
    assert!((4..=20).contains(&folded), "{folded}");
    assert!(!rig.engine.fold_status().settled);
    // They go on by themselves when it is quick again.
    let end = rig.now + 30 * SECOND;
    run(&mut rig, end, MILLISECOND);
    let status = rig.engine.fold_status();
    assert_eq!((status.composite, status.folded, status.settled), (0, 200, true));
    rig.check();
}

#[test]
fn folds_hurry_where_space_is_short() {
    // Ten blocks a second.
    let of = |marks: Option<Marks>| {
        let mut rig = foldable(10 * BLOCK as u64);
        rig.engine.set_marks(marks);
        let end = rig.now + SECOND;
        run(&mut rig, end, 0);
        let end = rig.now + 3 * SECOND;
        run(&mut rig, end, 0)
    };
    let normal = of(None);
    let low = of(Some(Marks { low: Mark::Percent(100), very_low: Mark::Percent(1) }));
    assert!((25..=35).contains(&normal), "{normal}");
    assert!((100..=140).contains(&low), "{low}");
}

/// A pool's thread that sleeps until the deadline would spin otherwise.
#[test]
fn a_walk_that_is_held_up_waits_for_what_holds_it_up() {
    let mut rig = foldable(0);
    let id = rig.pool.summaries().into_iter().find(|one| one.name == "a").unwrap().id;
    let volume = rig.attach(id);
    // The first entry is busy when the walk comes to it, so that another walk is to follow.
    let mut busy = Plan::with_capacity(64);
    let step = rig.worker.write(&volume, 2 * BLOCK as u64, BLOCK as u64, false, &mut busy);
    assert!(matches!(step, Ok(Step::Issue { .. })));
    // A block a second.
    rig.engine.set_fold_rate(BLOCK as u64);
    rig.settle();
    rig.worker.complete(&volume, &mut busy, Ok(())).unwrap();
    let (mut steps, end) = (0, rig.now + 10 * SECOND);
    while rig.now < end {
        while let Some(mut command) = rig.engine.poll(rig.now) {
            rig.media.run(&mut command);
            rig.engine.complete(command, Ok(()));
        }
        let deadline = rig.engine.next_deadline().unwrap();
        rig.now = deadline.max(rig.now + 1000);
        steps += 1;
    }
    assert!(rig.engine.fold_status().folded > 5, "{:?}", rig.engine.fold_status());
    assert!(steps < 2000, "{steps} steps in ten seconds");
}
