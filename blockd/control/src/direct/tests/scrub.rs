//! Deleted volumes are overwritten before their space is free.

use std::fs::File;
use std::os::unix::fs::FileExt;

use blockd_media::error::ErrorKind;
use blockd_pmem::platform::{PageMap, RegionKey};

use super::super::*;
use super::{GIB, MIB, Rig, config, until, wish};

/// Row: P45.
#[test]
fn a_deleted_volume_is_overwritten_before_its_space_is_free() {
    let rig = Rig::new(GIB);
    let pool = rig.open();
    for erases in [true, false] {
        let wish = CreateWish { erase_after: erases, ..wish("a", 128 * MIB) };
        pool.create(&wish).unwrap();
        let file = rig.device(&pool, "a");
        file.write_all_at(b"secret", 64 * MIB).unwrap();
        let deleted = pool.delete("a").unwrap().unwrap();
        let expected = if erases { State::Scrubbing } else { State::Deleting };
        assert_eq!(deleted.state, expected);
        until(|| rig.available() == GIB);
        let mut found = [0; 6];
        file.read_exact_at(&mut found, 64 * MIB).unwrap();
        assert_eq!(&found == b"secret", !erases);
    }
    pool.close();
}

#[test]
fn a_disabled_namespace_is_enabled_to_be_overwritten_or_stays() {
    let rig = Rig::new(GIB);
    let pool = rig.open();
    pool.create(&wish("a", 128 * MIB)).unwrap();
    let file = rig.device(&pool, "a");
    file.write_all_at(b"secret", 64 * MIB).unwrap();
    rig.disable("pfn0.0");
    rig.host.refuse("nd_pmem/bind", libc::ENOMEM);
    let journal = std::fs::read(rig.dir().join("direct-direct.journal")).unwrap();
    let error = pool.delete("a").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    let text = error.to_string();
    let expected = "volume a is not enabled, so that it can't be overwritten: ";
    assert!(text.starts_with(expected), "{text}");
    assert_eq!(std::fs::read(rig.dir().join("direct-direct.journal")).unwrap(), journal);
    assert_eq!(rig.available(), GIB - 144 * MIB);
    rig.host.accept();
    pool.delete("a").unwrap().unwrap();
    until(|| rig.available() == GIB);
    let mut found = [1; 6];
    file.read_exact_at(&mut found, 64 * MIB).unwrap();
    assert_eq!(found, [0; 6]);
    pool.close();
}

/// A namespace is removed with other tools: its content was not overwritten.
///
/// Row: P45.
#[test]
fn a_namespace_that_others_removed_counts_as_not_overwritten() {
    let rig = Rig::new(GIB);
    let pool = rig.open();
    pool.create(&CreateWish { erase_after: true, ..wish("a", 62 * MIB) }).unwrap();
    let uuid = pool.records(&[journal::Intent::Ready])[0].uuid.parse().unwrap();
    assert!(!pool.content().has_remains);
    assert!(rig.host.platform().destroy(&RegionKey::Cookie(1), uuid).unwrap());
    pool.delete("a").unwrap();
    assert!(pool.content().has_remains);
    pool.close();
}

/// A sector device keeps old blocks where no read of it comes: the bytes below are looked at. The
/// daemon dies at each write of it, and the host goes on or starts anew.
///
/// Row: P45.
#[test]
fn old_blocks_of_a_file_io_volume_are_overwritten_after_a_crash_at_every_step() {
    for reboots in [false, true] {
        let mut steps = 1;
        loop {
            let rig = Rig::new(GIB);
            let pool = rig.open();
            let wish = CreateWish { usage: Usage::FileIo, ..wish("a", 64 * MIB) };
            pool.create(&wish).unwrap();
            let media = rig.host.root().join("media/1-0");
            let file =
                File::options().create(true).truncate(false).read(true).write(true).open(media);
            let file = file.unwrap();
            file.write_all_at(b"secret", 66 * MIB).unwrap();
            let begin = rig.host.writes();
            rig.host.stop_after(steps);
            pool.delete("a").unwrap();
            until(|| rig.host.writes() >= begin + steps || pool.list().is_empty());
            let was_whole = rig.host.writes() < begin + steps;
            pool.close();
            if reboots {
                rig.host.reboot()
            } else {
                rig.host.restart()
            }
            let pool = rig.open();
            until(|| rig.available() == GIB && pool.list().is_empty());
            let mut found = [1; 6];
            file.read_exact_at(&mut found, 66 * MIB).unwrap();
            assert_eq!(found, [0; 6], "step {steps}");
            pool.close();
            if was_whole {
                break;
            }
            steps += 1;
        }
        assert!(steps >= 8, "{steps} steps");
    }
}

#[test]
fn one_that_can_not_be_overwritten_does_not_keep_others_from_it() {
    let rig = Rig::new(GIB);
    let pool = rig.open();
    for name in ["a", "b", "c"] {
        pool.create(&wish(name, 64 * MIB)).unwrap();
    }
    pool.close();
    pool.change(|content| {
        for record in content.records.iter_mut().take(2) {
            record.intent = journal::Intent::Scrubbing;
        }
    })
    .unwrap();
    drop(pool);
    rig.host.mount("pmem0", Some("/mnt/a"));
    let pool = rig.open();
    let names = || pool.list().into_iter().map(|one| one.name).collect::<Vec<_>>();
    until(|| names() == ["a", "c"]);
    pool.delete("c").unwrap();
    until(|| names() == ["a"]);
    assert_eq!(pool.get("a").unwrap().state, State::Scrubbing);
    rig.host.mount("pmem0", None);
    pool.close();
    let pool = rig.open();
    until(|| pool.list().is_empty());
    pool.close();
}

#[test]
fn data_left_without_overwriting_is_not_there_for_the_next_volume() {
    let rig = Rig::new(GIB);
    let config = || DirectConfig { page_map: PageMap::Memory, ..config() };
    let pool = rig.open_as(config()).unwrap();
    let keep = CreateWish { erase_after: false, ..wish("a", 256 * MIB) };
    pool.create(&keep).unwrap();
    let file = rig.device(&pool, "a");
    for at in [32, 200] {
        file.write_all_at(b"secret", at * MIB).unwrap();
    }
    pool.delete("a").unwrap();
    pool.close();
    let pool = rig.open_as(config()).unwrap();
    pool.create(&wish("b", 126 * MIB)).unwrap();
    let media = File::options().write(true).read(true).open(rig.host.root().join("media/1-0"));
    let read = |at: u64| {
        let mut found = [1; 6];
        media.as_ref().unwrap().read_exact_at(&mut found, at * MIB).map(|()| found).unwrap()
    };
    assert_eq!(read(32), [0; 6]);
    // The fake's memory was cut to the smaller device.
    media.as_ref().unwrap().write_all_at(b"secret", 200 * MIB).unwrap();
    pool.resize("b", 254 * MIB).unwrap();
    assert_eq!(read(200), [0; 6]);
    pool.close();
}

#[test]
fn a_scrub_goes_on_where_it_was() {
    let rig = Rig::new(GIB);
    let pool = rig.open();
    pool.create(&wish("a", 128 * MIB)).unwrap();
    // It was begun by a daemon that then ended.
    pool.close();
    pool.change(|content| {
        content.records[0].intent = journal::Intent::Scrubbing;
        content.records[0].scrubbed_bytes = 64 * MIB;
    })
    .unwrap();
    let view = pool.describe();
    assert_eq!((view.scrubbing, view.volumes), (view.charged, 0));
    let deleted = pool.get("a").unwrap();
    assert_eq!(
        (deleted.state, deleted.scrubbed, deleted.device),
        (State::Scrubbing, 64 * MIB, None)
    );
    assert!(pool.delete("a").unwrap().is_none());
    // The name is free.
    pool.create(&wish("a", 64 * MIB)).unwrap();
    assert_eq!(pool.get("a").unwrap().state, State::Ready);
    assert_eq!(pool.list().len(), 2);
    drop(pool);
    let pool = rig.open();
    until(|| pool.list().len() == 1);
    assert_eq!(pool.get("a").unwrap().state, State::Ready);
    pool.close();
}
