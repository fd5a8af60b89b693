//! Volumes that are made bare to be deleted, as there is no memory for notes about their pages.

use super::*;

/// The noted byte counts in the enabled namespace: bare, it has another offset.
#[test]
fn a_scrub_of_what_is_bare_since_then_begins_anew() {
    let rig = Rig::new(GIB);
    let pool = rig.open_as(memory()).unwrap();
    let wish = CreateWish { erase_after: false, ..wish("a", 126 * MIB) };
    pool.create(&wish).unwrap();
    pool.close();
    pool.change(|content| {
        content.records[0].intent = journal::Intent::Scrubbing;
        content.records[0].scrubbed_bytes = 64 * MIB;
    })
    .unwrap();
    rig.host.set_most(Some(16 * MIB));
    rig.host.reboot();
    let media = rig.host.root().join("media/1-0");
    let media = File::options().read(true).write(true).open(media).unwrap();
    media.write_all_at(b"secret", 65 * MIB).unwrap();
    media.write_all_at(b"secret", 32 * MIB).unwrap();
    let pool = rig.open_as(memory()).unwrap();
    until(|| pool.list().is_empty());
    for at in [32 * MIB, 65 * MIB] {
        let mut found = [1; 6];
        media.read_exact_at(&mut found, at).unwrap();
        assert_eq!(found, [0; 6], "at {at}");
    }
    pool.close();
}

/// A volume was made bare to be deleted, and the deletion failed: it is enabled once that is
/// possible.
#[test]
fn a_volume_that_is_not_deleted_after_all_is_given_back() {
    let rig = Rig::new(GIB);
    let pool = rig.open_as(memory()).unwrap();
    pool.create(&wish("a", 62 * MIB)).unwrap();
    rig.device(&pool, "a").write_all_at(b"its own", 0).unwrap();
    rig.host.set_most(Some(16 * MIB));
    rig.disable("pfn0.0");
    let (dir, away) = (rig.dir().to_owned(), rig.dir().with_extension("away"));
    std::fs::rename(&dir, &away).unwrap();
    pool.delete("a").unwrap_err();
    std::fs::rename(&away, &dir).unwrap();
    let inventory = rig.host.platform().read().unwrap();
    let (_, left) = inventory.namespaces().next().unwrap();
    assert_eq!((left.mode, left.device.is_some()), (Mode::Raw, true));
    let view = pool.get("a").unwrap();
    assert!(view.device.is_none() && view.problem.unwrap().contains("is bare"));
    // A journal of before it grew, and still no memory: it has what it has.
    pool.change(|content| content.records[0].charged_bytes = 32 * MIB).unwrap();
    pool.go_on().unwrap();
    let inventory = rig.host.platform().read().unwrap();
    assert_eq!(inventory.namespaces().next().unwrap().1.size, 64 * MIB);
    rig.host.set_most(None);
    pool.go_on().unwrap();
    let mut found = [0; 7];
    rig.device(&pool, "a").read_exact_at(&mut found, 0).unwrap();
    assert_eq!(&found, b"its own");
    pool.close();
}

/// Whatever looks at each new device has it open for a moment.
#[test]
fn a_reader_of_a_device_keeps_nothing_from_being_deleted() {
    let rig = Rig::new(GIB);
    let pool = rig.open_as(memory()).unwrap();
    pool.create(&wish("a", 62 * MIB)).unwrap();
    rig.host.set_most(Some(16 * MIB));
    rig.disable("pfn0.0");
    rig.host.set_open("pmem0", true);
    std::thread::scope(|scope| {
        let deleting = scope.spawn(|| pool.delete("a"));
        rig.wait_for(|| {
            let inventory = rig.host.platform().read().unwrap();
            inventory.namespaces().any(|(_, one)| one.device.is_some())
        });
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!deleting.is_finished());
        rig.host.set_open("pmem0", false);
        assert!(deleting.join().unwrap().unwrap().is_some());
    });
    until(|| pool.list().is_empty());
    pool.close();
}
