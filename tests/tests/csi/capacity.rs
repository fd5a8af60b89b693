//! GetCapacity: the reported amounts, and how far they hold.

use blockd_csi::proto::{ControllerExpandVolumeRequest, DeleteSnapshotRequest};

use super::*;

/// Thin and thick classes on two pools, the second of which is half as large.
const CLASSES: &str = r#"
[[class]]
name = "thin"
default = true
overprovision_ratio = "1.5"

[[class]]
name = "thick"
kind = "thick"

[[class]]
name = "thin-two"
pool = "two"
overprovision_ratio = "3"

[[class]]
name = "thick-two"
pool = "two"
kind = "thick"
"#;

/// Bytes of the pool file of the second pool.
const TWO: i64 = 512 * MIB;

pub(crate) fn of_two_pools(name: &str) -> (Rig, Folder) {
    let folder = Folder::new(&format!("{name}-two")).unwrap();
    let file = folder.path().join("two.pool");
    let daemon = daemon::Settings {
        pool_size: 1 << 30,
        lines: "default_pool = \"default\"\n".to_owned(),
        tables: format!("[[pool]]\nname = \"two\"\npath = {file:?}\nsize = {TWO}\n"),
        ..daemon::Settings::default()
    };
    let settings = Settings { daemon, config: CLASSES.to_owned(), ..Settings::default() };
    (Rig::start(name, &settings).unwrap(), folder)
}

pub(crate) fn in_class(class: &str, name: &str, bytes: i64) -> CreateVolumeRequest {
    CreateVolumeRequest {
        parameters: of_class(class),
        ..request(name, block(Mode::SingleNodeWriter), bytes)
    }
}

/// Rows: T19, P34.
#[test]
fn capacity_follows_what_is_made_cut_grown_and_deleted_in_each_class_of_two_pools() {
    let (rig, _folder) = of_two_pools("changes");
    let driver = rig.plugin.driver().unwrap();
    let control = rig.control().unwrap();
    let sizes = ["default", "two"].map(|name| control.pool_named(name).unwrap().size_bytes);
    let classes = ["thin", "thick", "thin-two", "thick-two"];
    let reported = || classes.map(|class| free(&driver, class));
    let begin = reported();
    // The formula of thin classes, to the byte but for the last block.
    assert_eq!(begin[0], sizes[0] * 3 / 2 / 512 * 512);
    assert_eq!(begin[2], sizes[1] * 3 / 512 * 512);
    assert!(begin[1] < sizes[0] && begin[3] < sizes[1] && begin[3] > 0, "{begin:?}");
    let thin = create(&driver, &in_class("thin", "a", 100 * MIB)).unwrap();
    let after_thin = reported();
    assert_eq!(after_thin[0], begin[0] - 100 * MIB);
    // Nothing of it is written, and the other pool has nothing to do with it.
    assert_eq!((after_thin[2], after_thin[3]), (begin[2], begin[3]));
    let thick = create(&driver, &in_class("thick-two", "b", 64 * MIB)).unwrap();
    let after_thick = reported();
    assert_eq!(after_thick[..2], after_thin[..2]);
    // Reserved space is promised too: both classes of its pool have less.
    assert_eq!(after_thick[2], begin[2] - 64 * MIB);
    assert!(
        (begin[3] - 72 * MIB..=begin[3] - 64 * MIB).contains(&after_thick[3]),
        "{after_thick:?}"
    );
    // A snapshot promises nothing; a volume made of it does.
    let asked = CreateSnapshotRequest {
        source_volume_id: thin.volume_id.clone(),
        name: "s".to_owned(),
        ..Default::default()
    };
    let snapshot = driver.create_snapshot(asked).unwrap().snapshot.unwrap();
    assert_eq!(free(&driver, "thin"), after_thick[0]);
    let source = SnapshotSource { snapshot_id: snapshot.snapshot_id.clone() };
    let wanted = CreateVolumeRequest {
        volume_content_source: Some(VolumeContentSource { r#type: Some(Type::Snapshot(source)) }),
        ..in_class("thin", "c", 100 * MIB)
    };
    let copy = create(&driver, &wanted).unwrap();
    assert_eq!(free(&driver, "thin"), after_thick[0] - 100 * MIB);
    let range = range(150 * MIB, 0);
    let asked = ControllerExpandVolumeRequest {
        volume_id: copy.volume_id.clone(),
        capacity_range: range,
        ..Default::default()
    };
    driver.controller_expand_volume(asked).unwrap();
    assert_eq!(free(&driver, "thin"), after_thick[0] - 150 * MIB);
    for id in [&copy.volume_id, &thin.volume_id, &thick.volume_id] {
        delete(&driver, id).unwrap();
    }
    let snapshot_id = snapshot.snapshot_id;
    driver.delete_snapshot(DeleteSnapshotRequest { snapshot_id, ..Default::default() }).unwrap();
    let end = || [reported()[0], reported()[2]] == [begin[0], begin[2]];
    assert!(end(), "{:?} {begin:?}", reported());
}

/// Row: T19.
#[test]
fn concurrent_volumes_never_exceed_the_promised_capacity() {
    let (rig, _folder) = of_two_pools("at-once");
    let driver = rig.plugin.driver().unwrap();
    const SIZE: i64 = 24 * MIB;
    for class in ["thin", "thick-two"] {
        let promised = free(&driver, class);
        let makers: Vec<_> = (0..6)
            .map(|maker| {
                let driver = rig.plugin.driver().unwrap();
                std::thread::spawn(move || {
                    let mut made = 0;
                    loop {
                        let name = format!("{class}-{maker}-{made}");
                        match create(&driver, &in_class(class, &name, SIZE)) {
                            Ok(volume) => {
                                assert_eq!(volume.capacity_bytes, SIZE);
                                made += 1;
                            }
                            Err(status) => {
                                assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
                                return made;
                            }
                        }
                    }
                })
            })
            .collect();
        let made: i64 = makers.into_iter().map(|maker| maker.join().unwrap()).sum();
        // And no less, but for what one volume more would take.
        let left = free(&driver, class);
        assert!(left < SIZE, "{class}: {left} left");
        if class == "thin" {
            assert_eq!(made, promised / SIZE);
        } else {
            // The capacity for thick volumes is reported with a margin for maps; the pool's is
            // never passed.
            let pool = rig.control().unwrap().pool_named("two").unwrap();
            assert!(made * SIZE <= pool.size_bytes && made >= promised / SIZE - 1, "{made}");
        }
    }
}
