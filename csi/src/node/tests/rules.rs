//! The rules of the node part, one by one, in a world of memory.

use std::path::Path;

use blockd_csi_base::bytes::Bytes;
use tonic::Code;

use super::{ID, Node, SIZE, STAGING, code, file_system, mount, node, spec, target, wanted};
use crate::capability::Mode;
use crate::node::ephemeral;
use crate::node::look::{self, Shown};
use crate::node::modes::{Access, Target};
use crate::node::publish;
use crate::node::records::Place;
use crate::node::stage;
use crate::node::testing::{Fake, Held, Wrong};
use crate::node::world::{Kind, Result, Usage, Volumes as _};
use crate::sizes::Range;

#[test]
fn a_device_that_holds_anything_is_never_formatted() {
    for held in [
        Held::Raw,
        Held::Partial,
        Held::Other("LVM2_member"),
        Held::Other("a partition table (gpt)"),
        file_system("xfs"),
        file_system("ntfs"),
    ] {
        for mode in [Mode::Writer, Mode::ReaderOnly] {
            let node = node(held.clone());
            assert_eq!(code(node.stage(mode, "ext4")), Code::FailedPrecondition, "{held:?}");
            // Another node can use it: the kubelet does not unstage after this error.
            for _ in 0..2 {
                let state = node.world.state();
                let volume = &state.volumes["csi.a"];
                assert_eq!((&volume.held, volume.minor), (&held, None));
                assert!(state.records.is_empty() && state.paths.is_empty());
                assert!(state.mounts.is_empty());
                drop(state);
                node.unstage().unwrap();
            }
        }
    }
}

#[test]
fn a_stage_that_cannot_be_undone_is_left_to_the_kubelet() {
    let node = node(Held::Raw);
    // A program has the device open.
    node.world.state().holders.insert(1);
    let error = node.stage(Mode::Writer, "ext4").unwrap_err();
    assert_eq!((error.code(), error.is_final()), (Code::Aborted, false));
    let text = error.to_string();
    assert!(text.contains("left as it is; undoing the stage failed: csi.a is in use"), "{text}");
    assert_eq!(node.world.state().volumes["csi.a"].minor, Some(1));
    node.world.state().holders.clear();
    assert_eq!(code(node.stage(Mode::Writer, "ext4")), Code::FailedPrecondition);
    assert_eq!(node.world.state().volumes["csi.a"].minor, None);
}

#[test]
fn a_stage_that_fails_undoes_nothing_that_is_used() {
    for (path, used) in [(STAGING, "/t/1"), ("/t/1", STAGING)] {
        let node = node(Held::Nothing);
        node.stage(Mode::Writer, "ext4").unwrap();
        node.publish(&mount("/t/1")).unwrap();
        let mut state = node.world.state();
        state.mounts.retain(|entry| entry.path != Path::new(path));
        // Its device is damaged meanwhile.
        state.volumes.get_mut("csi.a").unwrap().held = Held::Other("nothing it knows");
        drop(state);
        let other = if path == STAGING { "ext4" } else { "xfs" };
        node.stage(Mode::Writer, other).unwrap_err();
        let state = node.world.state();
        assert!(state.volumes["csi.a"].minor.is_some() && state.records.contains_key(ID));
        assert_eq!(state.mounts.len(), 1);
        assert_eq!(state.mounts[0].path, Path::new(used));
    }
}

#[test]
fn a_volume_on_standby_is_no_empty_one_and_is_staged_as_a_shared_device_alone() {
    let node = node(Held::Nothing);
    node.stage_at(STAGING, Mode::ManyNodes, None).unwrap();
    node.world.state().volumes.get_mut("csi.a").unwrap().standby = true;
    let volume = node.world.get(&node.place).unwrap().unwrap();
    assert!(volume.standby && !volume.empty);
    node.stage_at(STAGING, Mode::ManyNodes, None).unwrap();
    node.unstage().unwrap();
    for mode in [Mode::Writer, Mode::ReaderOnly] {
        assert_eq!(code(node.stage(mode, "ext4")), Code::FailedPrecondition);
        assert_eq!(code(node.stage_at(STAGING, mode, None)), Code::FailedPrecondition);
    }
    let state = node.world.state();
    assert_eq!(state.volumes["csi.a"].held, Held::Nothing);
    assert!(state.records.is_empty() && state.mounts.is_empty());
}

/// A node on which mkfs was interrupted.
fn interrupted(is_moving: bool) -> Node {
    for at in 1.. {
        let node = node(Held::Nothing);
        if is_moving {
            node.world.add_moving("csi.a", SIZE, Held::Nothing);
        }
        node.world.state().wrong = Some((at, Wrong::DiesBefore));
        node.stage(Mode::Writer, "ext4").unwrap_err();
        node.world.reboot();
        if node.world.state().volumes["csi.a"].held == Held::Partial {
            return node;
        }
    }
    unreachable!("no step formats");
}

#[test]
fn a_device_is_staged_itself_without_the_rest_of_an_interrupted_mkfs() {
    for is_moving in [false, true] {
        for mode in [Mode::Writer, Mode::ReaderOnly] {
            let node = interrupted(is_moving);
            for _ in 0..2 {
                node.stage_at(STAGING, mode, None).unwrap();
                let state = node.world.state();
                assert_eq!(state.volumes["csi.a"].held, Held::Nothing);
                assert_eq!(state.volumes["csi.a"].read_only, mode == Mode::ReaderOnly);
            }
            // It is no rest of anything from now on.
            node.world.state().volumes.get_mut("csi.a").unwrap().held = Held::Raw;
            node.unstage().unwrap();
            assert_eq!(code(node.stage(Mode::Writer, "ext4")), Code::FailedPrecondition);
            assert_eq!(node.world.state().volumes["csi.a"].held, Held::Raw);
        }
    }
}

#[test]
fn an_unstage_does_not_touch_a_volume_that_another_node_has() {
    let node = interrupted(true);
    {
        let mut state = node.world.state();
        let volume = state.volumes.get_mut("csi.a").unwrap();
        (volume.standby, volume.held) = (true, Held::Raw);
    }
    node.unstage().unwrap();
    assert_eq!(node.world.state().volumes["csi.a"].held, Held::Raw);
}

#[test]
fn an_empty_device_gets_the_wanted_file_system_and_keeps_it() {
    for name in ["ext4", "xfs", "btrfs", ""] {
        let node = node(Held::Nothing);
        node.stage(Mode::Writer, name).unwrap();
        node.stage(Mode::Writer, name).unwrap();
        let kind = node.world.state().mounts[0].kind.clone();
        assert_eq!(kind, if name.is_empty() { "ext4" } else { name });
        node.unstage().unwrap();
        node.stage(Mode::Writer, name).unwrap();
        assert_eq!(node.world.state().mounts.len(), 1);
    }
}

/// A volume of an older release may have such options in its context: it is mounted all the same
/// where its file system is there.
#[test]
fn options_of_mkfs_that_are_not_allowed_format_nothing_and_mount_what_is_there() {
    let stage = |node: &Node| {
        let mut spec = spec("ext4");
        spec.making.options = ["-d", "etc"].map(str::to_owned).into();
        let path = Path::new(STAGING);
        let (volume, mode, place) = (ID, Mode::Writer, &node.place);
        let request = stage::Request { volume, place, path, mode, spec: Some(&spec) };
        stage::stage(&node.world.as_world(), &request)
    };
    let empty = node(Held::Nothing);
    let error = stage(&empty).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(
        error.to_string().starts_with("mkfs-options is -d: must be one of the options"),
        "{error}"
    );
    assert_eq!(empty.world.state().volumes["csi.a"].held, Held::Nothing);
    let formatted = node(file_system("ext4"));
    stage(&formatted).unwrap();
    assert_eq!(formatted.world.state().mounts.len(), 1);
}

#[test]
fn a_reader_gets_a_device_that_cannot_be_written() {
    for held in [
        Held::Nothing,
        file_system("ext4"),
        Held::FileSystem { kind: "ext4".to_owned(), bytes: SIZE, dirty: true, data: true },
    ] {
        let node = node(held);
        node.stage(Mode::ReaderOnly, "ext4").unwrap();
        let state = node.world.state();
        assert!(state.volumes["csi.a"].read_only && state.mounts[0].read_only);
        drop(state);
        node.publish(&target("/t/1", Mode::ReaderOnly, Access::Mount)).unwrap();
        assert!(node.world.state().mounts[1].read_only);
        assert_eq!(code(node.stage(Mode::Writer, "ext4")), Code::AlreadyExists);
        assert_eq!(code(node.publish(&mount("/t/2"))), Code::FailedPrecondition);
    }
}

#[test]
fn a_stage_is_repeated_in_its_like_and_refused_otherwise() {
    let node = node(Held::Nothing);
    node.stage(Mode::MultiWriter, "ext4").unwrap();
    node.stage(Mode::Writer, "ext4").unwrap();
    assert_eq!(node.world.record(ID).unwrap().stage.unwrap().mode, Mode::Writer);
    assert_eq!(code(node.stage(Mode::Writer, "xfs")), Code::AlreadyExists);
    assert_eq!(code(node.stage(Mode::ReaderOnly, "ext4")), Code::AlreadyExists);
    assert_eq!(code(node.stage_at(STAGING, Mode::Writer, None)), Code::AlreadyExists);
    let elsewhere = node.stage_at("/elsewhere", Mode::Writer, Some("ext4"));
    assert_eq!(code(elsewhere), Code::FailedPrecondition);
    // Published with the mode of before a downgrade, and after it.
    node.publish(&target("/t/1", Mode::MultiWriter, Access::Mount)).unwrap();
    node.publish(&target("/t/1", Mode::Writer, Access::Mount)).unwrap();
}

#[test]
fn missing_volumes_are_not_found() {
    let node = Node {
        world: Fake::default(),
        place: Place { pool: "default".to_owned(), name: "csi.none".to_owned() },
    };
    assert_eq!(code(node.stage(Mode::Writer, "ext4")), Code::NotFound);
    assert_eq!(code(node.publish(&mount("/t/1"))), Code::NotFound);
    assert_eq!(node.stats("/bogus").unwrap_err().code(), Code::NotFound);
    let range = Range::default();
    let expanded =
        look::expand(&node.world.as_world(), (ID, &node.place), Path::new("/bogus"), &range);
    assert_eq!(expanded.unwrap_err().code(), Code::NotFound);
    // Undoing a missing state succeeds.
    node.unpublish("/t/1").unwrap();
    node.unstage().unwrap();
    assert!(node.world.state().records.is_empty());
}

#[test]
fn publishing_requires_a_stage_of_the_same_kind_at_the_same_path() {
    let node = node(Held::Nothing);
    assert_eq!(code(node.publish(&mount("/t/1"))), Code::FailedPrecondition);
    node.stage(Mode::Writer, "ext4").unwrap();
    let block = target("/t/1", Mode::Writer, Access::Block);
    assert_eq!(code(node.publish(&block)), Code::FailedPrecondition);
    let staging = Path::new("/elsewhere");
    let target = &mount("/t/1");
    let request =
        publish::Request { volume: ID, place: &node.place, staging, target, strict: false };
    assert_eq!(code(publish::publish(&node.world.as_world(), &request)), Code::FailedPrecondition);
    assert!(node.world.record(ID).unwrap().targets.is_empty());
}

#[test]
fn two_publications_are_judged_by_their_modes_for_mounts_and_devices() {
    let modes = [Mode::Writer, Mode::SingleWriter, Mode::MultiWriter];
    for access in [Access::Mount, Access::Block] {
        for first in modes {
            for second in modes {
                for strict in [false, true] {
                    let node = node(Held::Nothing);
                    let wanted = (access == Access::Mount).then_some("ext4");
                    node.stage_at(STAGING, first, wanted).unwrap();
                    node.publish_strictly(&target("/t/1", first, access), strict).unwrap();
                    node.publish_strictly(&target("/t/1", first, access), strict).unwrap();
                    let both_old_or_many = first != Mode::SingleWriter
                        && second != Mode::SingleWriter
                        && (!strict || (first, second) == (Mode::MultiWriter, Mode::MultiWriter));
                    let result = node.publish_strictly(&target("/t/2", second, access), strict);
                    let mounted = node.world.state().mounts.len();
                    let staged = usize::from(access == Access::Mount);
                    if both_old_or_many {
                        result.unwrap();
                        assert_eq!(mounted, staged + 2);
                    } else {
                        assert_eq!(code(result), Code::FailedPrecondition);
                        assert_eq!(node.world.state().conflicts, [second]);
                        assert_eq!(mounted, staged + 1);
                    }
                }
            }
        }
    }
}

#[test]
fn a_conflict_is_answered_without_the_daemon_and_survives_a_restart() {
    let node = node(Held::Nothing);
    node.stage(Mode::SingleWriter, "ext4").unwrap();
    node.publish(&target("/t/1", Mode::SingleWriter, Access::Mount)).unwrap();
    let before = node.world.state().steps;
    let second = Target { read_only: true, ..target("/t/2", Mode::SingleWriter, Access::Mount) };
    assert_eq!(code(node.publish(&second)), Code::FailedPrecondition);
    // Only the mount table is checked; it lies in memory.
    assert_eq!(node.world.state().steps, before + 1);
    // After a reboot nothing is mounted, so that nothing conflicts.
    node.world.reboot();
    node.stage(Mode::SingleWriter, "ext4").unwrap();
    node.publish(&second).unwrap();
}

#[test]
fn the_same_path_in_another_way_is_taken() {
    let node = node(Held::Nothing);
    node.stage(Mode::Writer, "ext4").unwrap();
    node.publish(&mount("/t/1")).unwrap();
    let read_only = Target { read_only: true, ..mount("/t/1") };
    assert_eq!(code(node.publish(&read_only)), Code::AlreadyExists);
    let single = target("/t/1", Mode::SingleWriter, Access::Mount);
    assert_eq!(code(node.publish(&single)), Code::AlreadyExists);
    node.publish(&mount("/t/1")).unwrap();
}

#[test]
fn a_publication_for_reading_is_read_only_and_the_others_are_not() {
    let node = node(Held::Nothing);
    node.stage(Mode::MultiWriter, "ext4").unwrap();
    node.publish(&mount("/t/1")).unwrap();
    node.publish(&Target { read_only: true, ..mount("/t/2") }).unwrap();
    let state = node.world.state();
    let read_only: Vec<bool> = state.mounts.iter().map(|entry| entry.read_only).collect();
    assert_eq!(read_only, [false, false, true]);
}

#[test]
fn a_published_or_used_volume_is_not_unstaged() {
    let node = node(Held::Nothing);
    node.stage(Mode::Writer, "ext4").unwrap();
    node.publish(&mount("/t/1")).unwrap();
    assert_eq!(code(node.unstage()), Code::FailedPrecondition);
    node.unpublish("/t/1").unwrap();
    node.world.state().busy.insert(STAGING.into());
    assert_eq!(code(node.unstage()), Code::FailedPrecondition);
    assert_eq!(node.world.state().mounts.len(), 1);
    node.world.state().busy.clear();
    node.unstage().unwrap();
}

#[test]
fn a_holder_of_a_device_delays_its_unstaging_and_loses_nothing() {
    let node = node(Held::Nothing);
    node.stage_at(STAGING, Mode::Writer, None).unwrap();
    node.publish(&target("/t/1", Mode::Writer, Access::Block)).unwrap();
    // A loop device over the published file.
    let minor = node.world.state().volumes["csi.a"].minor.unwrap();
    node.world.state().holders.insert(minor);
    node.world.state().busy.insert("/t/1".into());
    node.unpublish("/t/1").unwrap();
    for _ in 0..3 {
        assert_eq!(code(node.unstage()), Code::FailedPrecondition);
        assert_eq!(node.world.state().volumes["csi.a"].minor, Some(minor));
    }
    node.world.state().holders.clear();
    node.unstage().unwrap();
    assert_eq!(node.world.state().volumes["csi.a"].minor, None);
    assert!(node.world.state().records.is_empty());
}

#[test]
fn foreign_mounts_are_left_alone() {
    let node = node(Held::Nothing);
    let other = Fake::default();
    let place = other.add("other", SIZE, file_system("ext4"));
    let request = stage::Request {
        volume: "default/other",
        place: &place,
        path: Path::new("/foreign"),
        mode: Mode::Writer,
        spec: Some(&spec("ext4")),
    };
    stage::stage(&other.as_world(), &request).unwrap();
    let mut entry = other.state().mounts[0].clone();
    entry.minor = 99;
    node.world.state().mounts.push(entry);
    node.world.state().paths.insert("/foreign".into(), Kind::Folder);
    let at = |path| node.stage_at(path, Mode::Writer, Some("ext4"));
    assert_eq!(code(at("/foreign")), Code::FailedPrecondition);
    at(STAGING).unwrap();
    assert_eq!(code(node.publish(&mount("/foreign"))), Code::FailedPrecondition);
    assert_eq!(code(node.unpublish("/foreign")), Code::FailedPrecondition);
    assert_eq!(node.world.state().mounts.len(), 2);
}

#[test]
fn without_records_the_mount_table_is_enough_to_undo() {
    let node = node(Held::Nothing);
    node.stage(Mode::Writer, "ext4").unwrap();
    node.publish(&mount("/t/1")).unwrap();
    node.world.state().records.clear();
    assert!(node.stats("/t/1").unwrap().usage.is_some());
    node.unpublish("/t/1").unwrap();
    node.unstage().unwrap();
    let state = node.world.state();
    assert!(state.mounts.is_empty());
    assert_eq!(state.volumes["csi.a"].minor, None);
}

#[test]
fn stats_are_of_the_file_system_or_the_device() {
    let mounted = node(Held::Nothing);
    mounted.stage(Mode::Writer, "ext4").unwrap();
    mounted.publish(&mount("/t/1")).unwrap();
    for path in [STAGING, "/t/1"] {
        let stats = mounted.stats(path).unwrap();
        assert!(matches!(stats.usage, Some(Shown::Mount(..))), "{stats:?}");
    }
    let block = node(Held::Nothing);
    block.stage_at(STAGING, Mode::Writer, None).unwrap();
    block.publish(&target("/t/1", Mode::Writer, Access::Block)).unwrap();
    for path in [STAGING, "/t/1"] {
        // A quarter of it is mapped.
        let usage = Usage { total: SIZE, used: SIZE / 4, available: SIZE / 4 * 3 };
        assert_eq!(block.stats(path).unwrap().usage, Some(Shown::Block(usage)));
    }
}

#[test]
fn a_stage_that_was_unmounted_under_its_publications_is_mounted_again() {
    let node = node(Held::Nothing);
    node.stage(Mode::Writer, "ext4").unwrap();
    node.publish(&mount("/t/1")).unwrap();
    node.world.state().mounts.retain(|entry| entry.path != Path::new(STAGING));
    assert_eq!(code(node.publish(&mount("/t/2"))), Code::FailedPrecondition);
    node.stage(Mode::Writer, "ext4").unwrap();
    node.publish(&mount("/t/2")).unwrap();
    assert_eq!(node.world.state().mounts.len(), 3);
}

fn expand(node: &Node, path: &str, required: i64, limit: i64) -> Result<i64> {
    let bytes = |count| Bytes::new(count).unwrap();
    let range = Range { required: bytes(required), limit: bytes(limit) };
    look::expand(&node.world.as_world(), (ID, &node.place), Path::new(path), &range)
}

#[test]
fn a_file_system_grows_in_use_and_a_repeat_changes_nothing() {
    let node = node(Held::Nothing);
    node.stage(Mode::Writer, "xfs").unwrap();
    node.publish(&Target { read_only: true, ..mount("/t/1") }).unwrap();
    {
        let mut state = node.world.state();
        let volume = state.volumes.get_mut("csi.a").unwrap();
        (volume.size, volume.shown) = (2 * SIZE, 2 * SIZE);
    }
    for _ in 0..2 {
        // Also when it is asked for at a path that can't be written.
        assert_eq!(expand(&node, "/t/1", 2 * SIZE, 0).unwrap(), 2 * SIZE);
        let held = node.world.state().volumes["csi.a"].held.clone();
        assert!(matches!(held, Held::FileSystem { bytes, .. } if bytes == 2 * SIZE), "{held:?}");
    }
    assert_eq!(expand(&node, "/t/1", 0, 0).unwrap(), 2 * SIZE);
    let code = |required, limit| expand(&node, "/t/1", required, limit).unwrap_err().code();
    assert_eq!(code(2 * SIZE + 1, 0), Code::OutOfRange);
    assert_eq!(code(0, SIZE), Code::OutOfRange);
    assert_eq!(expand(&node, "/bogus", 0, 0).unwrap_err().code(), Code::NotFound);
}

#[test]
fn a_node_with_expand_on_node_makes_the_volume_larger_itself() {
    let node = node(Held::Nothing);
    node.stage(Mode::Writer, "ext4").unwrap();
    node.publish(&mount("/t/1")).unwrap();
    node.world.state().enlarges = true;
    assert_eq!(expand(&node, "/bogus", 2 * SIZE, 0).unwrap_err().code(), Code::NotFound);
    for _ in 0..2 {
        assert_eq!(expand(&node, "/t/1", 2 * SIZE, 0).unwrap(), 2 * SIZE);
        let held = node.world.state().volumes["csi.a"].held.clone();
        assert!(matches!(held, Held::FileSystem { bytes, .. } if bytes == 2 * SIZE), "{held:?}");
    }
}

#[test]
fn a_device_that_cannot_show_its_new_size_grows_when_it_is_staged_anew() {
    let node = node(Held::Nothing);
    node.stage(Mode::Writer, "ext4").unwrap();
    node.publish(&mount("/t/1")).unwrap();
    node.world.state().volumes.get_mut("csi.a").unwrap().size = 2 * SIZE;
    let refused = expand(&node, "/t/1", 2 * SIZE, 0).unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.to_string().contains("staged the next time"), "{refused}");
    node.unpublish("/t/1").unwrap();
    node.unstage().unwrap();
    node.stage(Mode::Writer, "ext4").unwrap();
    let held = node.world.state().volumes["csi.a"].held.clone();
    assert!(matches!(held, Held::FileSystem { bytes, .. } if bytes == 2 * SIZE), "{held:?}");
}

#[test]
fn an_inline_volume_lives_from_publication_to_its_end() {
    let world = Fake::default();
    let place = Place { pool: "default".to_owned(), name: "csi.~e0".to_owned() };
    let spec = spec("xfs");
    let wanted = wanted(SIZE);
    let publish_at = |path: &str, read_only| {
        let target = &Target { read_only, ..target(path, Mode::Writer, Access::Mount) };
        let request = ephemeral::Request {
            volume: "csi-1",
            place: &place,
            target,
            spec: &spec,
            wanted: &wanted,
        };
        ephemeral::publish(&world.as_world(), &request)
    };
    publish_at("/t/1", false).unwrap();
    publish_at("/t/1", false).unwrap();
    assert_eq!(world.state().mounts.len(), 1);
    assert_eq!(code(publish_at("/t/2", false)), Code::FailedPrecondition);
    assert_eq!(code(publish_at("/t/1", true)), Code::AlreadyExists);
    for _ in 0..2 {
        publish::unpublish(&world.as_world(), "csi-1", &place, Path::new("/t/1")).unwrap();
        let state = world.state();
        assert!(state.volumes.is_empty() && state.records.is_empty() && state.paths.is_empty());
    }
}

#[test]
fn an_inline_volume_in_use_does_not_end() {
    let world = Fake::default();
    let place = Place { pool: "default".to_owned(), name: "csi.~e0".to_owned() };
    let target = &target("/t/1", Mode::Writer, Access::Mount);
    let spec = &spec("ext4");
    let wanted = &wanted(SIZE);
    let request = ephemeral::Request { volume: "csi-1", place: &place, target, spec, wanted };
    ephemeral::publish(&world.as_world(), &request).unwrap();
    world.state().busy.insert("/t/1".into());
    let refused = publish::unpublish(&world.as_world(), "csi-1", &place, Path::new("/t/1"));
    assert_eq!(code(refused), Code::FailedPrecondition);
    assert_eq!(world.state().volumes.len(), 1);
    world.state().busy.clear();
    publish::unpublish(&world.as_world(), "csi-1", &place, Path::new("/t/1")).unwrap();
    assert!(world.state().volumes.is_empty());
}
