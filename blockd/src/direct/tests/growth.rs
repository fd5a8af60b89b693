//! Growth over what others left.

use super::*;

/// Something was removed without being overwritten, and a volume grows over it. Wherever the daemon
/// dies meanwhile, nobody gets to see what it was: the next one finishes that, and until then the
/// volume has no device.
#[test]
fn p45_the_new_end_of_a_volume_is_overwritten_also_after_a_crash() {
    let (mut was_bare, mut steps) = (0, 0);
    loop {
        let rig = Rig::new(GIB);
        let pool = rig.open_as(memory()).unwrap();
        let media = rig.over_remains(&pool);
        rig.host.stop_after(steps);
        let done = pool.resize("a", 100 * MIB).is_ok();
        pool.close();
        rig.host.restart();
        let is_bare = || {
            let inventory = rig.host.platform().read().unwrap();
            inventory.namespaces().any(|(_, one)| one.mode == Mode::Raw && one.device.is_some())
        };
        if is_bare() {
            was_bare += 1;
            let view = pool.get("a").unwrap();
            let problem = view.problem.unwrap_or_default();
            assert!(view.device.is_none() && problem.contains("grows"), "step {steps}: {problem}");
        }
        let pool = rig.open_as(memory()).unwrap();
        rig.wait_for(|| dirty(&pool).is_none() && pool.get("a").unwrap().device.is_some());
        let view = pool.get("a").unwrap();
        assert!(view.device.is_some(), "step {steps}: {:?}", view.problem);
        if view.usable > 62 * MIB {
            assert_eq!(rig.secret(&media), [0; 6], "step {steps}");
        }
        pool.resize("a", 100 * MIB).unwrap();
        assert_eq!(rig.secret(&media), [0; 6], "step {steps}");
        assert!(pool.get("a").unwrap().usable >= 100 * MIB);
        pool.close();
        if done {
            break;
        }
        steps += 1;
    }
    assert!(was_bare > 0 && steps > 5, "{was_bare} of {steps}");
}

/// After the host was started anew the volume is larger, and may have been used: nothing of it is
/// overwritten any more.
#[test]
fn what_may_have_been_used_is_not_overwritten() {
    let rig = Rig::new(GIB);
    let pool = rig.open_as(memory()).unwrap();
    let media = rig.over_remains(&pool);
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
    rig.over_remains(&pool);
    for (file, error) in [("size", libc::ENOSPC), ("force_raw", libc::EIO)] {
        rig.host.refuse(file, error);
        pool.resize("a", 100 * MIB).unwrap_err();
        rig.host.accept();
        let view = pool.get("a").unwrap();
        assert_eq!((view.usable, view.device.is_some()), (62 * MIB, true), "{file}");
        assert_eq!(dirty(&pool), None, "{file}");
    }
    assert!(pool.resize("a", 100 * MIB).unwrap().0);
    pool.close();
}

/// From where on the first volume may hold what others left.
fn dirty(pool: &DirectPool) -> Option<u64> {
    pool.records(&[journal::Intent::Ready])[0].dirty_from
}

/// The daemon stops between a volume's growth and its note of that: it can be asked for again.
#[test]
fn a_growth_that_nobody_noted_can_be_asked_for_again() {
    let rig = Rig::new(GIB);
    let pool = rig.open_as(memory()).unwrap();
    pool.create(&wish("a", 62 * MIB)).unwrap();
    let uuid = pool.records(&[journal::Intent::Ready])[0].uuid.parse().unwrap();
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
    assert!(rig.host.platform().read().unwrap().namespace(uuid).is_some());
    pool.close();
}
