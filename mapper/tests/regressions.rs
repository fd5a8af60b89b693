//! Faults that a reader of the mapper found, each with the history that showed it.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use blockd_mapper::engine::{Control, Outcome};
use blockd_mapper::error::MapperError;
use blockd_mapper::io::*;
use blockd_mapper::open::*;
use blockd_mapper::plan::*;
use common::*;
use std::sync::Arc;
const MIB: usize = 1 << 20;
const EXTENT: u64 = 64 << 10;

// lost wake-up: a filler parks behind a whole-sub-block write
#[test]
fn a_write_that_fills_up_is_woken_when_the_one_before_it_fails() {
    let mut rig = Rig::new(&[64 * MIB]);
    let id = rig.create("a", 1 << 30);
    let v = rig.attach(id);
    rig.write(&v, 512 * EXTENT, &[1; 4096]).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    rig.now += 5_000_000_000;
    rig.settle();
    let mut p1 = Plan::with_capacity(64);
    let mut p2 = Plan::with_capacity(64);
    assert!(matches!(rig.worker.write(&v, 0, 4096, false, &mut p1).unwrap(), Step::Issue { .. }));
    let ev = rig.pool.events();
    let s = rig.worker.write(&v, 0, 512, false, &mut p2).unwrap();
    assert_eq!(s, Step::Park(ParkReason::InFlight));
    let _ = rig.worker.complete(&v, &mut p1, Err(IoError::Media));
    rig.settle();
    rig.now += 100_000_000_000;
    rig.settle();
    assert!(
        rig.pool.events() != ev && rig.pool.take_wakeups() != 0,
        "LOST: no wake-up within 100 s"
    );
}

// close and a read in flight
#[test]
fn a_close_goes_on_when_the_last_read_ends() {
    let mut rig = Rig::new(&[64 * MIB]);
    let id = rig.create("a", 1 << 30);
    let v = rig.attach(id);
    rig.write(&v, 0, &[1; 4096]).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    rig.now += 5_000_000_000;
    rig.settle();
    rig.now += 5_000_000_000;
    rig.settle();
    let mut p1 = Plan::with_capacity(64);
    assert!(matches!(rig.worker.read(&v, 0, 4096, &mut p1).unwrap(), Step::Issue { .. }));
    rig.engine.submit(Control::Close);
    rig.settle();
    assert!(rig.engine.take_outcome().is_none());
    let _ = rig.pool.engine_wanted();
    rig.worker.complete(&v, &mut p1, Ok(())).unwrap();
    let wanted = rig.pool.engine_wanted();
    assert!(wanted || rig.engine.next_deadline().is_some(), "LOST: close never goes on");
}

// create then close behind it
#[test]
fn commands_before_a_close_are_answered_before_it() {
    let mut rig = Rig::new(&[64 * MIB]);
    rig.engine.submit(Control::Create { name: "x".into(), size: 1 << 20, block_size: 512 });
    rig.engine.submit(Control::Close);
    rig.settle();
    let mut out = vec![];
    while let Some(o) = rig.engine.take_outcome() {
        out.push(o);
    }
    let media = rig.kill();
    let rig = Rig::open(media).unwrap();
    assert_eq!(rig.engine.volumes().len(), 1);
    assert!(out.iter().all(|o| o.1.is_ok()), "{out:?}");
}

// a command behind close
#[test]
fn no_write_follows_a_close() {
    let mut rig = Rig::new(&[64 * MIB]);
    rig.create("a", 1 << 30);
    rig.engine.submit(Control::Close);
    rig.engine.submit(Control::Create { name: "x".into(), size: 1 << 20, block_size: 512 });
    rig.engine.submit(Control::Checkpoint);
    let mut closed = false;
    let mut after = 0;
    for _ in 0..100 {
        while let Some(mut c) = rig.engine.poll(rig.now) {
            if closed {
                after += 1;
            }
            rig.media.run(&mut c);
            rig.engine.complete(c, Ok(()));
            while let Some(o) = rig.engine.take_outcome() {
                closed |= o.1 == Ok(Outcome::Closed);
            }
        }
        while let Some(o) = rig.engine.take_outcome() {
            closed |= o.1 == Ok(Outcome::Closed);
        }
        rig.now += 1_000_000_000;
    }
    let media = rig.kill();
    let rig = Rig::open(media).unwrap();
    assert!(rig.report.was_clean && rig.engine.volumes().len() == 1);
    assert_eq!(after, 0);
}

// commands handed out after a worker's flush failed
#[test]
fn no_write_follows_a_failed_flush() {
    let mut rig = Rig::new(&[64 * MIB]);
    let id = rig.create("a", 1 << 30);
    let v = rig.attach(id);
    rig.write(&v, 0, &[1; 4096]).unwrap();
    rig.flush(&v).unwrap();
    rig.write(&v, 0, &[2; 4096]).unwrap();
    let mut p = Plan::with_capacity(64);
    assert!(matches!(rig.worker.flush(&v, &mut p).unwrap(), Step::Issue { .. }));
    rig.engine.submit(Control::Checkpoint);
    loop {
        let Some(mut c) = rig.engine.poll(rig.now) else { panic!() };
        rig.media.run(&mut c);
        let sb = matches!(&c.op, IoOp::Write { offset: 0, .. });
        rig.engine.complete(c, Ok(()));
        if sb {
            break;
        }
    }
    let _ = rig.worker.complete(&v, &mut p, Err(IoError::Media));
    assert!(rig.pool.failure().is_some());
    let c = rig.engine.poll(rig.now);
    assert!(c.is_none(), "handed out after failure: {c:?}");
}

// a failed write that has reached the device in part
#[test]
fn a_flush_covers_what_a_failed_write_has_left() {
    let mut rig = Rig::new(&[64 * MIB]);
    let id = rig.create("a", 1 << 30);
    let v = rig.attach(id);
    rig.write(&v, 0, &[1; 4096]).unwrap();
    rig.flush(&v).unwrap();
    let mut plan = Plan::with_capacity(64);
    for error in [IoError::Media, IoError::NoSpace] {
        let step = rig.worker.write(&v, 0, 4096, false, &mut plan).unwrap();
        assert!(matches!(step, Step::Issue { .. }));
        rig.worker.complete(&v, &mut plan, Err(error)).unwrap_err();
        let before = rig.media.flushes;
        rig.flush(&v).unwrap();
        assert!(rig.media.flushes > before, "{error:?}");
    }
}

// growth of a device to a hundred times its size at opening
#[test]
fn a_device_grows_a_hundred_times_and_shares_what_lies_there() {
    let mut rig = Rig::new(&[4 * MIB]);
    let id = rig.create("a", 1 << 30);
    let v = rig.attach(id);
    for f in [8, 64, 65, 100] {
        let big = f * 4 * MIB;
        rig.media.devices[0].resize(big, 0xEE);
        let grown = rig.control(Control::GrowDevice { device: 0, size: big as u64 });
        assert!(matches!(grown, Ok(Outcome::Grown { .. })), "{f} times: {grown:?}");
    }
    let largest = rig.pool.largest_size();
    let refused = rig.control(Control::GrowDevice { device: 0, size: largest + 1 });
    assert!(matches!(refused, Err(MapperError::Invalid { field: "size", .. })), "{refused:?}");
    let written = rig.engine.space().free / EXTENT - 400;
    for n in 0..written {
        rig.write(&v, n * EXTENT, &[1; 512]).unwrap();
    }
    let last = rig.pool.volume_extents().iter().map(|used| used.extent).max();
    assert!(last > Some(4096 + 1500), "{last:?}");
    let snapshot = rig.control(Control::Snapshot { source: id, name: "s".into() });
    let Ok(Outcome::Created(snapshot)) = snapshot else { panic!("{snapshot:?}") };
    let again: Vec<_> = (0..written).rev().step_by(300).collect();
    for n in &again {
        rig.write(&v, n * EXTENT, &[2; 512]).unwrap();
    }
    rig.flush(&v).unwrap();
    rig.check();
    let mut rig = Rig::open(rig.kill()).unwrap();
    for (id, value) in [(id, 2), (snapshot, 1)] {
        let v = rig.attach(id);
        for n in 0..written {
            let expected = if again.contains(&n) { value } else { 1 };
            assert_eq!(rig.read(&v, n * EXTENT, 512), [expected; 512], "extent {n} of {id}");
        }
        rig.worker.detach(v);
    }
    rig.control(Control::Delete { volume: snapshot }).unwrap();
    rig.check();
}

// shrink replayed with no leaf to spare
#[test]
fn a_replayed_shrink_finds_the_leaf_it_needs() {
    let ring: Arc<dyn blockd_mapper::ring::RingMemory> =
        Arc::new(blockd_mapper::ring::VecRingMemory::new(3, 4096));
    let mut media = Media::new(&[128 * MIB]);
    media.create();
    let mut rig = Rig::open_with(
        media,
        OpenOptions { ring: Some(ring.clone()), ..Media::new(&[128 * MIB]).open_options() },
    )
    .unwrap();
    let span = 256 * EXTENT;
    let id = rig.create("a", 512 * span);
    let v = rig.attach(id);
    for s in 0..512u64 {
        rig.write(&v, s * span, &[1; 4096]).unwrap();
    }
    let at = 511 * span + 5 * EXTENT;
    rig.write(&v, at, &[0x55; 4096]).unwrap();
    rig.flush(&v).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    rig.control(Control::Resize { volume: id, size: 511 * span + 2 * EXTENT }).unwrap();
    let media = rig.kill();
    let mut o = media.open_options();
    o.ring = Some(ring);
    o.open_id = 77;
    let mut rig = Rig::open_with(media, o).unwrap();
    rig.control(Control::Resize { volume: id, size: 512 * span }).unwrap();
    let v = rig.attach(id);
    assert!(rig.read(&v, at, 4096) == [0; 4096], "data beyond the smaller size came back");
}

// a worker starves while another worker's slice, and another volume's reserve, hold extents
#[test]
fn no_volume_starves_beside_unused_extents() {
    let mut rig = Rig::new(&[32 * MIB]);
    let a = rig.create("a", 1 << 30);
    let b = rig.create("b", 1 << 30);
    let va = rig.attach(a);
    let vb = rig.attach(b);
    let mut w2 = rig.pool.worker().unwrap();
    let vb2 = w2.attach(b).unwrap();
    rig.write(&va, 0, &[1; 512]).unwrap();
    // b fills the pool with worker 2, then worker 1 takes a slice
    rig.write(&vb, 0, &[1; 512]).unwrap();
    let mut plan = Plan::with_capacity(64);
    let mut n = 1;
    let mut parks = 0;
    while parks < 5 {
        match w2.write(&vb2, n * EXTENT, 512, false, &mut plan).unwrap() {
            Step::Issue { .. } => {
                w2.complete(&vb2, &mut plan, Ok(())).unwrap();
                n += 1;
                parks = 0;
            }
            _ => {
                parks += 1;
                rig.now += 2_000_000_000;
                rig.settle();
            }
        }
    }
    let held: u64 = rig.engine.volumes().iter().map(|v| v.reserved / EXTENT).sum();
    assert_eq!(held, 0, "parked for space while extents are held");
}

// growing a volume to a huge size on a small pool
#[test]
fn a_huge_resize_stops_no_writes() {
    let mut rig = Rig::new(&[32 * MIB]);
    let a = rig.create("a", 1 << 30);
    let va = rig.attach(a);
    rig.write(&va, 0, &[1; 512]).unwrap();
    rig.flush(&va).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    let t0 = rig.now;
    rig.control(Control::Resize { volume: a, size: 1 << 50 }).unwrap();
    let mut plan = Plan::with_capacity(64);
    for _ in 0..200 {
        match rig.worker.write(&va, 1 << 29, 512, false, &mut plan).unwrap() {
            Step::Issue { .. } => {
                rig.worker.complete(&va, &mut plan, Ok(())).unwrap();
                assert!(rig.now - t0 < 10_000_000_000, "stalled");
                return;
            }
            _ => {
                rig.now += 1_000_000_000;
                rig.settle();
            }
        }
    }
    panic!("stalled for ever");
}

// slow writes in flight on dirty slots at a cut: pages that were not promised
#[test]
fn writes_in_flight_at_a_cut_get_their_pages() {
    let mut media = Media::new(&[64 * MIB]);
    let mut o = media.options();
    o.reserve_size = Some(EXTENT);
    o.wal_size = Some(2 << 20);
    let mut creating = blockd_mapper::create::Creating::new(&o).unwrap();
    while let Some(mut c) = creating.poll() {
        media.run(&mut c);
        creating.complete(c, Ok(()));
    }
    creating.finish().unwrap();
    let mut rig = Rig::open(media).unwrap();
    let span = 256 * EXTENT;
    let slots = 150u64;
    let id = rig.create("a", slots * span);
    let v = rig.attach(id);
    rig.control(Control::Checkpoint).unwrap();
    for s in 0..slots {
        rig.write(&v, s * span, &[1; 4096]).unwrap();
    }
    rig.flush(&v).unwrap();
    let mut plans = vec![];
    for s in 0..slots {
        let mut p = Plan::with_capacity(64);
        loop {
            match rig.worker.write(&v, s * span + EXTENT, 4096, false, &mut p).unwrap() {
                Step::Issue { .. } => break,
                _ => rig.settle(),
            }
        }
        plans.push(p);
    }
    // fill the pool with extents of other writes, on a slot that is dirty
    let mut p = Plan::with_capacity(64);
    let mut e = 2;
    let mut s = 0;
    let mut parks = 0;
    while parks < 4 {
        match rig.worker.write(&v, s * span + e * EXTENT, 4096, false, &mut p).unwrap() {
            Step::Issue { .. } => {
                rig.worker.complete(&v, &mut p, Ok(())).unwrap();
                e += 1;
                if e == 256 {
                    e = 2;
                    s += 1;
                }
                parks = 0;
            }
            _ => {
                parks += 1;
                rig.settle();
            }
        }
    }
    rig.engine.submit(Control::Checkpoint);
    rig.settle();
    for p in &mut plans {
        rig.worker.complete(&v, p, Ok(())).unwrap();
    }
    rig.settle();
    while let Some((_, outcome)) = rig.engine.take_outcome() {
        outcome.unwrap();
    }
    let r = rig.control(Control::Checkpoint);
    assert!(r.is_ok());
}

// a ring of 4 records per slot and a long name
#[test]
fn a_ring_too_small_for_a_name_is_refused() {
    let ring: Arc<dyn blockd_mapper::ring::RingMemory> =
        Arc::new(blockd_mapper::ring::VecRingMemory::new(3, 4));
    let mut media = Media::new(&[32 * MIB]);
    media.create();
    let said = Rig::with_ring(ring, media).unwrap_err().to_string();
    assert!(said.contains("ring records per slot is 4"), "{said}");
}

// opening fails by a write error: answered writes are then lost without a word
#[test]
fn a_failed_opening_loses_no_answered_write() {
    let ring: Arc<dyn blockd_mapper::ring::RingMemory> =
        Arc::new(blockd_mapper::ring::VecRingMemory::new(3, 1024));
    let mut media = Media::new(&[32 * MIB]);
    media.create();
    let mut rig = Rig::with_ring(ring.clone(), media).unwrap();
    let a = rig.create("a", 1 << 30);
    let va = rig.attach(a);
    rig.write(&va, 0, &[0x77; 4096]).unwrap();
    let mut media = rig.kill();
    let mut o = media.open_options();
    o.ring = Some(ring.clone());
    o.open_id = 77;
    o.accept_loss = false;
    let mut opening = Opening::new(o.clone()).unwrap();
    while let Some(mut c) = opening.poll() {
        if matches!(c.op, IoOp::Write { .. }) {
            opening.complete(c, Err(IoError::Media));
            continue;
        }
        media.run(&mut c);
        opening.complete(c, Ok(()));
    }
    o.open_id = 78;
    let mut rig = Rig::open_with(media, o).unwrap();
    let va = rig.attach(a);
    assert!(
        rig.read(&va, 0, 4096) == [0x77; 4096],
        "answered write lost, and accept_loss was false"
    );
}

#[test]
fn a_close_and_a_discard_at_once() {
    let mut lost = 0;
    for round in 0..400u64 {
        let mut rig = Rig::new(&[8 * MIB]);
        let a = rig.create("a", 1 << 30);
        let va = rig.attach(a);
        for n in 0..40u64 {
            rig.write(&va, n * EXTENT, &[1; 4096]).unwrap();
        }
        rig.control(Control::Checkpoint).unwrap();
        rig.now += 5_000_000_000;
        rig.settle();
        let mut w = rig.pool.worker().unwrap();
        let started = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let g2 = started.clone();
        let h = std::thread::spawn(move || {
            let v = w.attach(a).unwrap();
            g2.store(true, std::sync::atomic::Ordering::SeqCst);
            for _ in 0..100 {
                std::hint::spin_loop();
            }
            match w.discard(&v, 0, 40 * EXTENT) {
                Ok(Step::Done { covered }) => covered / EXTENT,
                _ => 0,
            }
        });
        while !started.load(std::sync::atomic::Ordering::SeqCst) {}
        for _ in 0..(round * 7 % 300) {
            std::hint::spin_loop();
        }
        let r = rig.control(Control::Close);
        let done = h.join().unwrap();
        r.unwrap();
        let media = rig.kill();
        let mut rig = Rig::open(media).unwrap();
        let va = rig.attach(a);
        let bad = (0..done).filter(|n| rig.read(&va, n * EXTENT, 4096) != [0; 4096]).count();
        if bad > 0 {
            lost += 1;
            if lost < 4 {}
        }
    }
    assert!(lost == 0, "lost in {lost} rounds");
}

#[test]
fn a_nearly_full_pool_finds_pages_for_writes_in_flight() {
    let mut media = Media::new(&[64 * MIB]);
    let mut o = media.options();
    o.reserve_size = Some(EXTENT);
    o.wal_size = Some(2 << 20);
    let mut creating = blockd_mapper::create::Creating::new(&o).unwrap();
    while let Some(mut c) = creating.poll() {
        media.run(&mut c);
        creating.complete(c, Ok(()));
    }
    creating.finish().unwrap();
    let mut oo = media.open_options();
    oo.tuning.quantum = 4000;
    let mut rig = Rig::open_with(media, oo).unwrap();
    let span = 256 * EXTENT;
    let slots = 150u64;
    let id = rig.create("a", slots * span);
    let v = rig.attach(id);
    // After a grant as large as this one it is refilled while it still has half of that.
    rig.engine.keep_reserve(id, 500).unwrap();
    for e in 0..500 {
        rig.write(&v, e * EXTENT, &[1; 4096]).unwrap();
        rig.settle();
    }
    let filler = rig.create("filler", span);
    let filler = rig.attach(filler);
    let mut e = 0;
    while rig.engine.space().free > 0 {
        rig.write(&filler, e * EXTENT, &[1; 4096]).unwrap();
        rig.settle();
        e += 1;
        assert!(e < 256);
    }
    assert!(rig.engine.volumes()[0].reserved >= 210 * EXTENT);
    rig.control(Control::Checkpoint).unwrap();
    let k = 105u64;
    for s in 20..20 + k {
        rig.write(&v, s * span, &[1; 4096]).unwrap();
    }
    let mut plans = vec![];
    for s in 20..20 + k {
        let mut p = Plan::with_capacity(64);
        let st = rig.worker.write(&v, s * span + EXTENT, 4096, false, &mut p).unwrap();
        assert!(matches!(st, Step::Issue { .. }), "{st:?} at {s}");
        plans.push(p);
    }
    rig.engine.submit(Control::Checkpoint);
    rig.settle();
    for p in &mut plans {
        rig.worker.complete(&v, p, Ok(())).unwrap();
    }
    rig.settle();
    while let Some((_, outcome)) = rig.engine.take_outcome() {
        outcome.unwrap();
    }
    let r = rig.control(Control::Checkpoint);
    assert!(r.is_ok());
}

// a write in place, a discard of its sub-block, and a second write that fills the sub-block up
#[test]
fn a_sub_block_is_not_filled_up_while_an_older_write_may_land_in_it() {
    let mut rig = Rig::new(&[64 * MIB]);
    let id = rig.create("a", 1 << 30);
    let v = rig.attach(id);
    rig.write(&v, 0, &[1; 8192]).unwrap();
    let (mut old, mut new) = (Plan::with_capacity(64), Plan::with_capacity(64));
    assert_eq!(rig.worker.write(&v, 0, 512, false, &mut old), Ok(Step::Issue { covered: 512 }));
    assert_eq!(rig.worker.discard(&v, 0, 4096), Ok(Step::Done { covered: 4096 }));
    let in_flight = Ok(Step::Park(ParkReason::InFlight));
    assert_eq!(rig.worker.write(&v, 3072, 512, false, &mut new), in_flight);
    rig.settle();
    rig.now += 1_000_000_000;
    rig.settle();
    assert_eq!(rig.worker.write(&v, 3072, 512, false, &mut new), in_flight);
    // Others do not wait for it: it writes whole sub-blocks.
    rig.write(&v, 0, &[2; 4096]).unwrap();
    assert_eq!(rig.worker.discard(&v, 0, 4096), Ok(Step::Done { covered: 4096 }));
    rig.worker.complete(&v, &mut old, Ok(())).unwrap();
    assert!(rig.engine.next_deadline().is_some());
    let (events, _) = (rig.pool.events(), rig.pool.take_wakeups());
    rig.now += 20_000_000;
    rig.settle();
    assert!(rig.pool.events() != events && rig.pool.take_wakeups() != 0, "nothing wakes it");
    rig.write(&v, 3072, &[3; 512]).unwrap();
    let mut expected = vec![0; 4096];
    expected[3072..3584].fill(3);
    assert_eq!(rig.read(&v, 0, 4096), expected);
}

// a close with more changes than a small log has room for
#[test]
fn a_close_ends_although_its_changes_fill_the_log() {
    let mut media = Media::new(&[64 * MIB]);
    let options =
        blockd_mapper::create::CreateOptions { wal_size: Some(EXTENT), ..media.options() };
    media.create_with(&options);
    let memory = Arc::new(blockd_mapper::ring::VecRingMemory::new(64, 1 << 13));
    let mut rig = Rig::with_ring(memory, media).unwrap();
    let id = rig.create("a", 1 << 20);
    let v = rig.attach(id);
    rig.write(&v, 4096, &[1; 4096]).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    for round in 0..2_000 {
        rig.write(&v, 0, &[u8::try_from(round % 251).unwrap(); 4096]).unwrap();
        rig.discard(&v, 0, 4096);
    }
    rig.write(&v, 0, &[7; 4096]).unwrap();
    rig.worker.detach(v);
    assert_eq!(rig.control(Control::Close), Ok(Outcome::Closed));
    let mut rig = Rig::open(rig.kill()).unwrap();
    assert!(rig.report.was_clean);
    let v = rig.attach(id);
    assert_eq!(rig.read(&v, 0, 4096), [7; 4096]);
    rig.check();
}
