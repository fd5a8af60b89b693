//! Regions that are gone, changed or unreadable.

use std::os::unix::fs::FileExt;

use blockd_media::error::ErrorKind;
use blockd_pmem::platform::RegionKey;
use blockd_pmem::platform::testing::Shown;

use super::super::*;
use super::{GIB, MIB, Rig, config, until, wish};

#[test]
fn a_region_that_vanishes_fails_the_pool_and_forgets_nothing() {
    let rig = Rig::new(GIB);
    let pool = rig.open();
    pool.create(&wish("a", 64 * MIB)).unwrap();
    assert_eq!(pool.failure(), None);
    rig.host.remove_region(1);
    let expected = "pool direct has failed: its region 0x1 is not there";
    assert_eq!(pool.failure().as_deref(), Some(expected));
    assert_eq!(pool.describe().space, None);
    let view = pool.get("a").unwrap();
    assert_eq!((view.device, view.problem.as_deref()), (None, Some("region 0x1 is not there")));
    for error in [pool.create(&wish("b", MIB)).unwrap_err(), pool.delete("a").unwrap_err()] {
        assert_eq!((error.kind(), error.to_string().as_str()), (ErrorKind::InUse, expected));
    }
    pool.close();
    // Also after a start without it.
    let pool = rig.open();
    assert_eq!(pool.list().len(), 1);
    assert!(pool.failure().is_some());
    pool.close();
}

#[test]
fn a_region_that_is_not_enabled_or_lost_its_labels_forgets_nothing() {
    let cases =
        [(Shown::NotEnabled, "is not enabled"), (Shown::WithoutLabels, "has no labels now")];
    for (shown, why) in cases {
        let rig = Rig::new(GIB);
        let pool = rig.open();
        for name in ["a", "begun", "ended", "erased"] {
            pool.create(&wish(name, 64 * MIB)).unwrap();
        }
        let file = rig.device(&pool, "erased");
        file.write_all_at(b"secret", 32 * MIB).unwrap();
        pool.close();
        pool.change(|content| {
            content.records[1].intent = journal::Intent::Creating;
            content.records[2].intent = journal::Intent::Deleting;
            content.records[3].intent = journal::Intent::Scrubbing;
        })
        .unwrap();
        rig.host.show_region_as(1, shown);
        let pool = rig.open();
        let expected = format!("pool direct has failed: its region 0x1 {why}");
        assert_eq!(pool.failure(), Some(expected.clone()));
        let problem = pool.get("a").unwrap().problem;
        assert_eq!(problem, Some(format!("region 0x1 {why}")));
        let scrubbing = pool.records(&[journal::Intent::Scrubbing]).remove(0);
        let errors = [
            pool.delete("a").unwrap_err(),
            pool.delete("begun").unwrap_err(),
            pool.create(&wish("b", MIB)).unwrap_err(),
            crate::direct::scrub::scrub(&pool, &scrubbing).unwrap_err(),
        ];
        for error in errors {
            assert_eq!((error.kind(), error.to_string()), (ErrorKind::InUse, expected.clone()));
        }
        pool.close();
        assert_eq!(pool.list().len(), 4);
        rig.host.show_region_as(1, Shown::Whole);
        let pool = rig.open();
        until(|| pool.list().len() == 1);
        assert_eq!(pool.get("a").unwrap().state, State::Ready);
        assert_eq!(rig.available(), GIB - 80 * MIB);
        let mut found = [1; 6];
        file.read_exact_at(&mut found, 32 * MIB).unwrap();
        assert_eq!(found, [0; 6]);
        pool.close();
    }
}

#[test]
fn an_unreadable_region_fails_the_start_and_deletes_nothing() {
    let rig = Rig::new(GIB);
    let pool = rig.open();
    pool.create(&wish("a", 64 * MIB)).unwrap();
    pool.close();
    let file = rig.host.places().sys.join("bus/nd/devices/region0/mappings");
    std::fs::remove_file(&file).unwrap();
    let journal = std::fs::read(rig.dir().join("direct-direct.journal")).unwrap();
    let error = rig.open_as(config()).unwrap_err();
    assert!(error.to_string().contains("region0/mappings"), "{error}");
    assert_eq!(std::fs::read(rig.dir().join("direct-direct.journal")).unwrap(), journal);
    std::fs::write(&file, "1\n").unwrap();
    let pool = rig.open();
    assert_eq!(pool.get("a").unwrap().state, State::Ready);
    pool.close();
    // Another region is configured while there are volumes in this one.
    let other = DirectConfig { region: RegionKey::Cookie(2), ..config() };
    let error = rig.open_as(other).unwrap_err();
    assert!(error.to_string().contains("has 1 volumes in region 0x1"), "{error}");
}
