//! Growth over what others left.

use blockd_pmem::platform::testing::Shown;

use super::*;
use crate::direct::busy::Busy;

/// A namespace was removed without being overwritten, and a volume grows over it. Wherever the
/// daemon dies meanwhile, the old content stays unreadable: the next daemon overwrites it, and
/// until then the volume has no device.
///
/// Row: P45.
#[test]
fn the_new_end_of_a_volume_is_overwritten_also_after_a_crash() {
    for is_behind in [false, true] {
        let (mut was_bare, mut had_more, mut steps) = (0, false, 0);
        loop {
            let rig = Rig::new(GIB);
            let pool = rig.open_as(memory()).unwrap();
            let media = rig.over_remains_behind(&pool, is_behind);
            let (journal, kept) = (rig.journal(), rig.dir().join("kept"));
            rig.host.keep_when_stopped(&journal, &kept);
            rig.host.stop_after(steps);
            let done = pool.resize("a", 100 * MIB).is_ok();
            pool.close();
            rig.host.restart();
            if kept.exists() {
                // A dead daemon notes nothing.
                std::fs::rename(&kept, &journal).unwrap();
            }
            rig.has_its_own(&media);
            let inventory = rig.host.platform().read().unwrap();
            let (_, left) = inventory.namespaces().next().unwrap();
            was_bare += u32::from(left.mode == Mode::Raw && left.device.is_some());
            had_more |= left.size > 112 * MIB;
            let pool = rig.open_as(memory()).unwrap();
            rig.wait_for(|| pool.get("a").unwrap().device.is_some());
            let view = pool.get("a").unwrap();
            assert!(!pool.records(&[journal::Intent::Ready])[0].grows());
            assert!([64 * MIB, 112 * MIB].contains(&view.charged), "step {steps}: {view:?}");
            if view.usable > 62 * MIB {
                assert_eq!(rig.secret(&media), [0; 6], "step {steps}");
            }
            pool.resize("a", 100 * MIB).unwrap();
            assert_eq!(rig.secret(&media), [0; 6], "step {steps}");
            let view = pool.get("a").unwrap();
            assert!(view.usable >= 100 * MIB && view.charged == 112 * MIB, "{view:?}");
            rig.has_its_own(&media);
            pool.close();
            if done {
                break;
            }
            steps += 1;
        }
        assert!(was_bare > 0 && steps > 5, "{was_bare} of {steps}");
        assert_eq!(had_more, is_behind);
    }
}

/// The daemon comes back before the region does.
#[test]
fn a_growth_is_finished_when_its_region_is_there() {
    let rig = Rig::new(GIB);
    let pool = rig.open_as(memory()).unwrap();
    let media = rig.over_remains(&pool);
    rig.host.refuse("nd_pmem/bind", libc::ENOMEM);
    pool.resize("a", 100 * MIB).unwrap_err();
    pool.close();
    rig.host.accept();
    rig.host.show_region_as(1, Shown::NotEnabled);
    let pool = rig.open_as(memory()).unwrap();
    pool.go_on().unwrap();
    pool.resize("a", 100 * MIB).unwrap_err();
    rig.host.show_region_as(1, Shown::Whole);
    assert_eq!(pool.get("a").unwrap().device, None);
    // The thread that begins with this may be at it.
    rig.wait_for(|| pool.go_on().is_ok() && pool.get("a").unwrap().device.is_some());
    assert_eq!(rig.secret(&media), [0; 6]);
    rig.has_its_own(&media);
    pool.close();
}

/// After the host was started anew the volume is larger, and may have been used: nothing of it is
/// overwritten any more.
#[test]
fn space_that_may_have_been_used_is_not_overwritten() {
    let rig = Rig::new(GIB);
    let pool = rig.open_as(memory()).unwrap();
    let media = rig.over_remains(&pool);
    rig.has_its_own(&media);
    let charged = pool.get("a").unwrap().charged;
    let uuid = pool.records(&[journal::Intent::Ready])[0].uuid.parse().unwrap();
    // Not while it looks for what there is to finish.
    pool.close();
    pool.change(|content| content.records[0].dirty_from = Some(charged)).unwrap();
    let raw = charged + 48 * MIB;
    rig.host.platform().grow_bare(uuid, raw).unwrap();
    rig.host.reboot();
    let pool = rig.open_as(memory()).unwrap();
    rig.wait_for(|| dirty(&pool).is_none());
    let view = pool.get("a").unwrap();
    assert_eq!((view.charged, view.device.is_some()), (raw, true));
    assert_eq!(rig.secret(&media), *b"secret");
    assert!(!pool.resize("a", view.usable).unwrap().0);
    assert_eq!(rig.secret(&media), *b"secret");
    pool.close();
}

/// There is no room behind it, or the kernel does not make it bare: it is as it was.
#[test]
fn a_volume_that_can_t_grow_over_remains_is_as_it_was() {
    let rig = Rig::new(GIB);
    let pool = rig.open_as(memory()).unwrap();
    let media = rig.over_remains(&pool);
    for (file, error) in [("size", libc::ENOSPC), ("force_raw", libc::EIO)] {
        for has_effect in [false, true] {
            if has_effect {
                rig.host.refuse_after(file, error);
            } else {
                rig.host.refuse(file, error);
            }
            pool.resize("a", 100 * MIB).unwrap_err();
            rig.host.accept();
            let view = pool.get("a").unwrap();
            assert_eq!((view.usable, view.device.is_some()), (62 * MIB, true), "{file}");
            assert_eq!(dirty(&pool), None, "{file}");
            rig.has_its_own(&media);
        }
    }
    pool.resize("a", 62 * MIB).unwrap();
    let name = &pool.get("a").unwrap().device.unwrap().name;
    rig.host.show_at(name, Some("/pods/volume"));
    let error = pool.resize("a", 100 * MIB).unwrap_err();
    assert!(error.to_string().contains("/pods/volume"), "{error}");
    assert_eq!((dirty(&pool), pool.get("a").unwrap().usable), (None, 62 * MIB));
    rig.host.show_at(name, None);
    assert!(pool.resize("a", 100 * MIB).unwrap().0);
    assert_eq!(rig.secret(&media), [0; 6]);
    rig.has_its_own(&media);
    pool.close();
}

/// The volume has its new size, and cannot be enabled: with or without a second call, the old
/// content is overwritten from the same byte on.
#[test]
fn a_volume_that_cannot_be_enabled_is_overwritten_when_it_can_be() {
    for asks_again in [true, false] {
        let rig = Rig::new(GIB);
        let pool = rig.open_as(memory()).unwrap();
        let media = rig.over_remains(&pool);
        let charged = pool.get("a").unwrap().charged;
        rig.host.refuse("nd_pmem/bind", libc::ENOMEM);
        for _ in 0..2 {
            pool.resize("a", 100 * MIB).unwrap_err();
            assert_eq!(dirty(&pool), Some(charged));
            assert_eq!(pool.get("a").unwrap().device, None);
        }
        pool.go_on().unwrap();
        assert_eq!(dirty(&pool), Some(charged));
        rig.host.accept();
        if asks_again {
            pool.resize("a", 100 * MIB).unwrap();
        } else {
            pool.go_on().unwrap();
        }
        let view = pool.get("a").unwrap();
        assert_eq!((dirty(&pool), view.device.is_some()), (None, true));
        assert!(view.usable >= 100 * MIB);
        assert_eq!(rig.secret(&media), [0; 6]);
        rig.has_its_own(&media);
        pool.close();
    }
}

/// The namespace begins elsewhere than the journal notes: none of it is overwritten.
#[test]
fn a_namespace_that_begins_elsewhere_is_not_overwritten() {
    let rig = Rig::new(GIB);
    let pool = rig.open_as(memory()).unwrap();
    let media = rig.over_remains(&pool);
    let charged = pool.get("a").unwrap().charged;
    let uuid = pool.records(&[journal::Intent::Ready])[0].uuid.parse().unwrap();
    pool.close();
    let marks = (Some(charged), Some(16 * MIB));
    pool.change(|content| {
        (content.records[0].dirty_from, content.records[0].grows_at) = marks;
    })
    .unwrap();
    rig.host.platform().grow_bare(uuid, charged + 48 * MIB).unwrap();
    let pool = rig.open_as(memory()).unwrap();
    let error = pool.resize("a", 100 * MIB).unwrap_err();
    assert!(error.to_string().contains("began at"), "{error}");
    assert_eq!((dirty(&pool), pool.get("a").unwrap().device), (Some(charged), None));
    assert_eq!(rig.secret(&media), *b"secret");
    rig.has_its_own(&media);
    pool.close();
}

/// There is no memory for notes about more pages. It has what it had; and one that has none at all
/// since then can be deleted.
#[test]
fn a_volume_that_can_t_be_enabled_larger_is_as_it_was() {
    let rig = Rig::new(GIB);
    let pool = rig.open_as(memory()).unwrap();
    let media = rig.over_remains(&pool);
    rig.host.set_most(Some(64 * MIB));
    pool.resize("a", 100 * MIB).unwrap_err();
    let view = pool.get("a").unwrap();
    assert_eq!((view.usable, view.charged, view.device.is_some()), (62 * MIB, 64 * MIB, true));
    rig.has_its_own(&media);
    rig.host.set_most(None);
    assert!(pool.resize("a", 100 * MIB).unwrap().0);
    rig.has_its_own(&media);
    pool.close();
    rig.host.set_most(Some(64 * MIB));
    rig.host.reboot();
    let pool = rig.open_as(memory()).unwrap();
    assert_eq!(pool.get("a").unwrap().device, None);
    pool.delete("a").unwrap();
    rig.wait_for(|| pool.get("a").is_err());
    let mut found = [1; 7];
    media.read_exact_at(&mut found, OWN[0]).unwrap();
    assert_eq!((found, rig.available()), ([0; 7], GIB));
    pool.close();
}

/// Space is free in front of it and behind.
#[test]
fn a_volume_grows_at_its_end() {
    let rig = Rig::new(GIB);
    let pool = rig.open_as(memory()).unwrap();
    for name in ["first", "a"] {
        pool.create(&CreateWish { erase_after: false, ..wish(name, 62 * MIB) }).unwrap();
    }
    let device = rig.device(&pool, "a");
    for at in OWN {
        device.write_all_at(b"its own", at).unwrap();
    }
    pool.delete("first").unwrap();
    pool.resize("a", 100 * MIB).unwrap();
    rig.has_its_own(&rig.device(&pool, "a"));
    pool.close();
}

/// The background task may finish a growth of a call as well: either is right.
#[test]
fn a_growth_that_another_thread_finishes_is_done() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let rig = Rig::new(GIB);
    let pool = rig.open_as(memory()).unwrap();
    let media = rig.over_remains(&pool);
    let is_over = AtomicBool::new(false);
    let all: Vec<_> = std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    pool.finish_growths().unwrap();
                }
            });
        }
        let grow = |size| pool.resize("a", size * MIB).map(|grown| grown.0);
        let all = [100, 150, 200, 250, 300].map(grow).into();
        is_over.store(true, Ordering::Relaxed);
        all
    });
    assert!(all.iter().all(|one| matches!(one, Ok(true))), "{all:?}");
    assert_eq!(rig.secret(&media), [0; 6]);
    rig.has_its_own(&media);
    pool.close();
}

/// The same where it can't be enabled larger: no caller gets a success.
#[test]
fn a_growth_that_another_thread_undoes_has_failed() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let rig = Rig::new(GIB);
    let pool = rig.open_as(memory()).unwrap();
    let media = rig.over_remains(&pool);
    rig.host.set_most(Some(64 * MIB));
    let is_over = AtomicBool::new(false);
    let all: Vec<_> = std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let _ = pool.finish_growths();
                }
            });
        }
        let all = (0..8).map(|_| pool.resize("a", 100 * MIB).map(|grown| grown.0)).collect();
        is_over.store(true, Ordering::Relaxed);
        all
    });
    let has_failed = |one: &Result<bool, Error>| {
        one.as_ref().is_err_and(|error| error.to_string().contains("memory for the metadata"))
    };
    assert!(all.iter().all(has_failed), "{all:?}");
    rig.host.set_most(None);
    assert!(pool.resize("a", 100 * MIB).unwrap().0);
    rig.has_its_own(&media);
    pool.close();
}

/// A second call for the same growth waits, and succeeds as well.
#[test]
fn a_second_call_for_a_growth_in_progress_gets_it_too() {
    let rig = Rig::new(GIB);
    let pool = rig.open_as(memory()).unwrap();
    let media = rig.over_remains(&pool);
    for size in [100, 150, 200, 250].map(|mib| mib * MIB) {
        std::thread::scope(|scope| {
            let asking: Vec<_> = (0..3).map(|_| scope.spawn(|| pool.resize("a", size))).collect();
            for one in asking {
                let (_, _, view) = one.join().unwrap().unwrap();
                assert!(view.usable >= size && view.device.is_some(), "{view:?}");
            }
        });
    }
    rig.has_its_own(&media);
    pool.close();
}

/// The volume was given up, and another holder has it already, which has to give it up, too.
#[test]
fn each_holder_of_a_deleted_volume_gives_it_up() {
    let rig = Rig::new(GIB);
    for _ in 0..50 {
        let busy = Busy::default();
        std::thread::scope(|scope| {
            let first = busy.hold("a").unwrap();
            let deleting = scope.spawn(|| busy.give_up("a"));
            rig.wait_for(|| first.gives_up());
            drop(first);
            let second = busy.hold("a").unwrap();
            rig.wait_for(|| second.gives_up() || deleting.is_finished());
        });
    }
}

/// A volume that is overwritten blocks no other, and is given up when it is deleted.
#[test]
fn a_volume_that_is_overwritten_keeps_no_other_waiting() {
    let rig = Rig::new(GIB);
    let pool = rig.open_as(memory()).unwrap();
    pool.create(&wish("a", 62 * MIB)).unwrap();
    let uuid = pool.records(&[journal::Intent::Ready])[0].uuid.clone();
    let held = pool.0.busy.hold(&uuid).unwrap();
    assert!(pool.0.busy.hold(&uuid).is_none());
    pool.create(&wish("b", 62 * MIB)).unwrap();
    pool.resize("b", 100 * MIB).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| pool.resize("a", 100 * MIB));
        let deleting = scope.spawn(|| pool.delete("a"));
        rig.wait_for(|| held.gives_up());
        assert!(!waiting.is_finished() && !deleting.is_finished());
        assert!(pool.get("a").unwrap().device.is_some());
        drop(held);
        assert!(deleting.join().unwrap().unwrap().is_some());
        // Whichever was first.
        let _ = waiting.join().unwrap();
    });
    rig.wait_for(|| pool.get("a").is_err());
    pool.close();
}

/// From where on the first volume may hold what others left.
fn dirty(pool: &DirectPool) -> Option<u64> {
    pool.records(&[journal::Intent::Ready])[0].dirty_from
}

/// The daemon stops between a volume's growth and its note of that: it can be asked for again.
#[test]
fn a_growth_that_was_not_noted_can_be_repeated() {
    let rig = Rig::new(GIB);
    let pool = rig.open_as(memory()).unwrap();
    pool.create(&wish("a", 62 * MIB)).unwrap();
    let before = pool.get("a").unwrap();
    let (_, _, after) = pool.resize("a", 100 * MIB).unwrap();
    let noted = pool.change(|content| {
        let one = &mut content.records[0];
        (one.requested_bytes, one.charged_bytes) = (62 * MIB, before.charged);
        one.usable_bytes = before.usable;
    });
    noted.unwrap();
    assert!(pool.resize("a", 100 * MIB).unwrap().0);
    let again = pool.get("a").unwrap();
    assert_eq!((again.usable, again.charged), (after.usable, after.charged));
    assert_eq!(pool.describe().charged, after.charged);
    pool.close();
}
