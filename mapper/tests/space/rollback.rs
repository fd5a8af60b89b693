//! Rollback and reset of volumes with space set aside.

use blockd_mapper::engine::{Control, Outcome};
use blockd_mapper::error::MapperError;
use blockd_mapper::space::VolumeSettings;
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::Attachment;

use super::common::Rig;
use super::{EXTENT, MIB, configure, fill_some, write_in_the_end};

fn make_thick(rig: &mut Rig, volume: VolumeId) {
    let settings = VolumeSettings { thick: true, ..VolumeSettings::default() };
    configure(rig, volume, settings).unwrap();
}

fn snapshot(rig: &mut Rig, source: VolumeId, name: &str) -> VolumeId {
    match rig.control(Control::Snapshot { source, name: name.to_owned() }) {
        Ok(Outcome::Created(id)) => id,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_thick_volume_is_rolled_back_to_a_larger_size_only_where_that_is_free() {
    let mut rig = Rig::new(&[64 * MIB]);
    let (thick, other) = (rig.create("thick", 32 << 20), rig.create("other", 40 << 20));
    let settings = VolumeSettings { thick: true, ..VolumeSettings::default() };
    configure(&mut rig, thick, settings).unwrap();
    let snapshot = snapshot(&mut rig, thick, "s");
    rig.control(Control::Resize { volume: thick, size: 4 << 20 }).unwrap();
    configure(&mut rig, other, settings).unwrap();
    let reset = |size| Control::Reset { volume: thick, snapshot, size };
    let rollback = || Control::Rollback { volume: thick, snapshot };
    for larger in [rollback(), reset(32 << 20), reset(36 << 20)] {
        let refused = rig.control(larger).unwrap_err();
        assert!(matches!(refused, MapperError::NoSpace { .. }), "{refused}");
        assert_eq!(rig.engine.volumes()[0].size, 4 << 20, "nothing was changed");
    }
    let other = rig.attach(other);
    for extent in 0..640 {
        assert_eq!(write_in_the_end(&mut rig, &other, extent), None, "extent {extent}");
    }
    rig.worker.detach(other);
    configure(&mut rig, thick, VolumeSettings::default()).unwrap();
    rig.control(rollback()).unwrap();
    rig.check();
}

#[test]
fn a_rollback_of_a_thick_volume_needs_the_extents_that_later_snapshots_keep() {
    let mut rig = Rig::new(&[64 * MIB]);
    let (thick, other) = (rig.create("thick", 24 << 20), rig.create("other", 24 << 20));
    let settings = VolumeSettings { thick: true, ..VolumeSettings::default() };
    configure(&mut rig, thick, settings).unwrap();
    let empty = snapshot(&mut rig, thick, "empty");
    let volume = rig.attach(thick);
    assert_eq!(fill_some(&mut rig, &volume, 384), 384);
    configure(&mut rig, other, settings).unwrap();
    let full = snapshot(&mut rig, thick, "full");
    let refused = rig.control(Control::Rollback { volume: thick, snapshot: empty }).unwrap_err();
    assert!(matches!(refused, MapperError::NoSpace { .. }), "{refused}");
    assert_eq!(rig.engine.volumes()[0].mapped, 24 << 20, "nothing was changed");
    rig.control(Control::Delete { volume: full }).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    rig.control(Control::Rollback { volume: thick, snapshot: empty }).unwrap();
    for extent in 0..384 {
        assert_eq!(write_in_the_end(&mut rig, &volume, extent), None, "extent {extent}");
    }
    rig.check();
}

const COPIED: u64 = 40;

/// A thick volume of 24 MiB, full, with a snapshot from before and one from after; then `COPIED`
/// extents were written anew. Returns its first snapshot and the extents of its reserve too.
fn thick_with_reserve(rig: &mut Rig) -> (VolumeId, Attachment, VolumeId, u64) {
    let thick = rig.create("thick", 24 << 20);
    make_thick(rig, thick);
    let empty = snapshot(rig, thick, "empty");
    let volume = rig.attach(thick);
    assert_eq!(fill_some(rig, &volume, 384), 384);
    snapshot(rig, thick, "full");
    rig.engine.set_quantum(128);
    assert_eq!(fill_some(rig, &volume, COPIED), COPIED);
    let reserve = rig.engine.space().reserved / EXTENT;
    assert!(reserve >= 8, "{reserve}");
    (thick, volume, empty, reserve)
}

#[test]
fn the_reserve_of_a_thick_volume_serves_its_rollback_once() {
    let mut rig = Rig::new(&[64 * MIB]);
    let (thick, volume, empty, reserve) = thick_with_reserve(&mut rig);
    // The pool lacks half as many extents as the reserve has; the copied ones become free.
    let needed = 384 - reserve - COPIED;
    let size = rig.engine.available() - (needed - reserve / 2) * EXTENT;
    let other = rig.create("other", size);
    make_thick(&mut rig, other);
    let rollback = || Control::Rollback { volume: thick, snapshot: empty };
    let refused = rig.control(rollback()).unwrap_err();
    assert!(matches!(refused, MapperError::NoSpace { .. }), "{refused}");

    let size = size - reserve * EXTENT;
    rig.control(Control::Resize { volume: other, size }).unwrap();
    rig.control(rollback()).unwrap();
    let other = rig.attach(other);
    for (volume, extents) in [(&volume, 384), (&other, size / EXTENT)] {
        for extent in 0..extents {
            assert_eq!(write_in_the_end(&mut rig, volume, extent), None, "extent {extent}");
        }
    }
    rig.check();
}

#[test]
fn the_reserve_of_a_thick_volume_serves_its_growth_once() {
    let mut rig = Rig::new(&[64 * MIB]);
    let (thick, _, _, reserve) = thick_with_reserve(&mut rig);
    let most = (24 << 20) + rig.engine.available() + reserve * EXTENT;
    let mut resize = |size| rig.control(Control::Resize { volume: thick, size });
    let refused = resize(most + reserve / 2 * EXTENT).unwrap_err();
    assert!(matches!(refused, MapperError::NoSpace { .. }), "{refused}");
    resize(most - reserve / 2 * EXTENT).unwrap();
}
