//! Everything that can go wrong with a volume on its node, one by one, and that it is over when it
//! is over: in a world of memory.

use std::path::Path;

use tonic::Code;

use super::{ID, Node as Rig, SIZE, STAGING, mount, node, target};
use crate::capability::Mode;
use crate::health::{Severity, condition};
use crate::node::look::{self, Stats};
use crate::node::modes::Access;
use crate::node::testing::{Fault, Held, State};
use crate::node::world::{Mounts as _, Node, Usage};

const TARGET: &str = "/t/1";

fn mounted(file_system: &str) -> Rig {
    let rig = node(Held::Nothing);
    rig.stage(Mode::Writer, file_system).unwrap();
    rig.publish(&mount(TARGET)).unwrap();
    rig
}

fn block() -> Rig {
    let rig = node(Held::Nothing);
    rig.stage_at(STAGING, Mode::Writer, None).unwrap();
    rig.publish(&target(TARGET, Mode::Writer, Access::Block)).unwrap();
    rig
}

/// Returns the causes at its target path, each on its own.
fn said(rig: &Rig) -> Vec<String> {
    rig.stats(TARGET).unwrap().causes.into_iter().map(|cause| cause.message).collect()
}

fn healthy(stats: &Stats) {
    assert_eq!(condition(stats.causes.clone()).message, "healthy");
    assert!(stats.usage.is_some(), "{stats:?}");
}

/// Healthy, then not for this one reason, then healthy again: at the target path, and one cause for
/// one fault.
#[track_caller]
fn comes_and_goes(
    rig: &Rig,
    expected: &str,
    usage: bool,
    begin: impl FnOnce(&mut State),
    end: impl FnOnce(&Rig),
) {
    healthy(&rig.stats(TARGET).unwrap());
    begin(&mut rig.world.state());
    let stats = rig.stats(TARGET).unwrap();
    assert_eq!(said(rig), [expected]);
    assert_eq!(stats.usage.is_some(), usage, "{stats:?}");
    let condition = condition(stats.causes);
    assert!(condition.abnormal && condition.message == expected);
    end(rig);
    healthy(&rig.stats(TARGET).unwrap());
}

fn heal(rig: &Rig) {
    let mut state = rig.world.state();
    state.fault = Fault::default();
    state.problem.clear();
}

/// Row: H18.
#[test]
fn every_kind_of_healthy_volume_reports_healthy() {
    for name in ["ext4", "xfs", "btrfs"] {
        let rig = mounted(name);
        healthy(&rig.stats(TARGET).unwrap());
        healthy(&rig.stats(STAGING).unwrap());
    }
    healthy(&block().stats(TARGET).unwrap());
    healthy(&block().stats(STAGING).unwrap());
}

/// Row: H10.
#[test]
fn unmounted_by_hand_is_abnormal_until_it_is_published_again() {
    let expected = "nothing is mounted at its target path";
    let unmount = |state: &mut State| state.mounts.retain(|it| it.path != Path::new(TARGET));
    let again = |rig: &Rig| rig.publish(&mount(TARGET)).unwrap();
    comes_and_goes(&mounted("ext4"), expected, false, unmount, again);
    let again = |rig: &Rig| rig.publish(&target(TARGET, Mode::Writer, Access::Block)).unwrap();
    comes_and_goes(&block(), expected, false, unmount, again);
}

/// Row: H10.
#[test]
fn an_unmounted_stage_is_reported_at_both_paths() {
    let rig = mounted("ext4");
    let unmount = |state: &mut State| state.mounts.retain(|it| it.path != Path::new(STAGING));
    let expected = "it was unmounted from its staging path";
    comes_and_goes(&rig, expected, true, unmount, |rig| {
        let stats = rig.stats(STAGING).unwrap();
        assert_eq!(stats.causes[0].message, "nothing is mounted at its staging path");
        rig.stage(Mode::Writer, "ext4").unwrap();
    });
}

#[test]
fn a_path_that_never_was_one_of_the_volume_is_not_found() {
    let rig = mounted("ext4");
    for path in ["/t/2", "/", "relative", ""] {
        assert_eq!(rig.stats(path).unwrap_err().code(), Code::NotFound, "{path}");
    }
    rig.world.unmount(Path::new(TARGET), false).unwrap();
    assert_eq!(rig.stats("/t/2").unwrap_err().code(), Code::NotFound);
    // A path that was unpublished no longer belongs to the volume.
    rig.publish(&mount("/t/3")).unwrap();
    rig.unpublish("/t/3").unwrap();
    assert_eq!(rig.stats("/t/3").unwrap_err().code(), Code::NotFound);
}

/// Row: H1.
#[test]
fn a_volume_that_is_gone_is_abnormal_where_it_was_and_not_found_elsewhere() {
    let rig = mounted("ext4");
    let volume = rig.world.state().volumes.remove("csi.a").unwrap();
    assert_eq!(said(&rig), ["volume not found: pool default has no csi.a"]);
    assert_eq!(rig.stats("/t/2").unwrap_err().code(), Code::NotFound);
    let stranger =
        look::stats(&rig.world.as_world(), "default/other", &rig.place, Path::new(TARGET), None);
    assert_eq!(stranger.unwrap_err().code(), Code::NotFound);
    rig.world.state().volumes.insert("csi.a".to_owned(), volume);
    healthy(&rig.stats(TARGET).unwrap());
}

#[test]
fn another_mount_at_its_path_is_reported_by_name() {
    let expected = "something else is mounted at its target path: ext4 of /dev/sdz";
    let cover = |state: &mut State| {
        let mut other = state.mounts[1].clone();
        (other.minor, other.source) = (99, "/dev/sdz".into());
        state.mounts.push(other);
    };
    let uncover = |rig: &Rig| drop(rig.world.state().mounts.pop());
    comes_and_goes(&mounted("ext4"), expected, false, cover, uncover);
}

#[test]
fn a_missing_or_unserved_device_is_reported_once() {
    type Begin = fn(&mut State);
    let cases: [(&str, Begin); 5] = [
        ("block device ublkb1 is gone", |state| state.fault.bytes = Some(None)),
        ("block device ublkb1 is not served: its size is 0", |state| {
            state.fault.bytes = Some(Some(0));
        }),
        ("the node of block device ublkb1 is gone", |state| state.fault.node = Node::Missing),
        ("ublkb1 is another device, not 259:1", |state| state.fault.node = Node::Other),
        ("block device ublkb1 is not served: no memory", |state| {
            state.problem = "no memory".to_owned();
        }),
    ];
    for rig in [mounted("ext4"), block()] {
        for (expected, begin) in cases {
            comes_and_goes(&rig, expected, true, begin, heal);
        }
        let at_once = |state: &mut State| {
            state.fault.bytes = Some(None);
            state.fault.node = Node::Missing;
        };
        comes_and_goes(&rig, "block device ublkb1 is gone", true, at_once, heal);
    }
}

#[test]
fn a_volume_that_was_detached_under_its_mount_has_no_device() {
    for rig in [mounted("ext4"), block()] {
        let minor = rig.world.state().volumes["csi.a"].minor;
        let detach = |state: &mut State| {
            state.volumes.get_mut("csi.a").unwrap().minor = None;
        };
        comes_and_goes(&rig, "its block device is gone", false, detach, |rig| {
            rig.world.state().volumes.get_mut("csi.a").unwrap().minor = minor;
        });
    }
}

#[test]
fn a_block_volume_path_with_another_device_is_reported() {
    let begin = |state: &mut State| state.fault.bound = Node::Other;
    let expected = "the file at its target path is not block device ublkb1";
    comes_and_goes(&block(), expected, false, begin, heal);
}

/// Row: H11.
#[test]
fn bad_blocks_of_the_device_are_counted() {
    let begin = |state: &mut State| state.fault.bad_blocks = 8;
    let expected = "block device ublkb1 has 8 bad sectors";
    comes_and_goes(&mounted("xfs"), expected, true, begin, heal);
}

/// Row: H8.
#[test]
fn errors_counted_by_a_file_system_are_reported() {
    for name in ["ext4", "btrfs"] {
        let begin = |state: &mut State| state.fault.errors = 3;
        let expected = format!("{name} has counted 3 errors");
        comes_and_goes(&mounted(name), &expected, true, begin, heal);
    }
}

/// Row: H8.
#[test]
fn a_file_system_that_was_shut_down_is_reported_without_further_checks() {
    let begin = |state: &mut State| state.fault.shut_down = true;
    let expected = "its xfs was shut down: it answers with IO errors";
    comes_and_goes(&mounted("xfs"), expected, false, begin, heal);
}

/// Row: H8.
#[test]
fn a_file_system_that_became_read_only_is_reported() {
    fn all(state: &mut State, read_only: bool) {
        for entry in &mut state.mounts {
            (entry.read_only, entry.whole_read_only) = (read_only, read_only);
        }
    }
    let expected = "its ext4 has become read-only";
    comes_and_goes(
        &mounted("ext4"),
        expected,
        true,
        |state| all(state, true),
        |rig| {
            all(&mut rig.world.state(), false);
        },
    );
    let stop = |state: &mut State| state.mounts.iter_mut().for_each(|it| it.stopped = true);
    let expected = "the kernel has stopped its ext4 after an error";
    comes_and_goes(&mounted("ext4"), expected, true, stop, |rig| {
        rig.world.state().mounts.iter_mut().for_each(|it| it.stopped = false);
    });
    let one = |read_only: bool| move |state: &mut State| state.mounts[1].read_only = read_only;
    comes_and_goes(&mounted("ext4"), "its mount has become read-only", true, one(true), |rig| {
        one(false)(&mut rig.world.state());
    });
}

#[test]
fn a_read_only_mount_is_healthy() {
    let rig = node(Held::Nothing);
    rig.stage(Mode::ReaderOnly, "ext4").unwrap();
    rig.publish(&target(TARGET, Mode::ReaderOnly, Access::Mount)).unwrap();
    healthy(&rig.stats(TARGET).unwrap());
    healthy(&rig.stats(STAGING).unwrap());
    let rig = mounted("ext4");
    let mut reading = mount("/t/2");
    reading.read_only = true;
    rig.publish(&reading).unwrap();
    healthy(&rig.stats("/t/2").unwrap());
    // How an older version has staged it is not known: nothing is said of that.
    let rig = node(Held::Nothing);
    rig.stage(Mode::ReaderOnly, "ext4").unwrap();
    rig.world.state().records.get_mut(ID).unwrap().stage.as_mut().unwrap().read_only = None;
    healthy(&rig.stats(STAGING).unwrap());
}

/// Row: H9.
#[test]
fn a_full_file_system_is_reported_with_its_numbers() {
    let usage = |total: i64, available: i64| Usage { total, used: total - available, available };
    let rig = mounted("ext4");
    let plenty = usage(65_536, 1);
    let full =
        |bytes: Usage, inodes: Usage| move |state: &mut State| state.fault.usage = (bytes, inodes);
    let large = 1 << 40;
    for (bytes, inodes, expected) in [
        (usage(SIZE, 0), plenty, "out of capacity: 1073741824 of 1073741824 bytes are used"),
        // df shows 100 %, too.
        (
            usage(SIZE, 1_048_575),
            plenty,
            "out of capacity: 1072693249 of 1073741824 bytes are used",
        ),
        (usage(8_388_608, 32_767), plenty, "out of capacity: 8355841 of 8388608 bytes are used"),
        (usage(SIZE, SIZE), usage(65_536, 0), "out of capacity: 65536 of 65536 inodes are used"),
        // xfs has no inodes left where it has no bytes: one fault.
        (
            usage(large, 0),
            usage(1024, 0),
            "out of capacity: 1099511627776 of 1099511627776 bytes are used",
        ),
    ] {
        comes_and_goes(&rig, expected, true, full(bytes, inodes), heal);
    }
    for (bytes, inodes) in [
        (usage(SIZE, 1_048_576), plenty),
        (usage(8_388_608, 32_768), plenty),
        // btrfs counts no inodes.
        (usage(SIZE, SIZE), usage(0, 0)),
    ] {
        full(bytes, inodes)(&mut rig.world.state());
        healthy(&rig.stats(TARGET).unwrap());
    }
}

/// Row: H45.
#[test]
fn all_of_several_causes_are_reported_the_worst_first() {
    let rig = mounted("ext4");
    {
        let mut state = rig.world.state();
        state.mounts.retain(|it| it.path != Path::new(STAGING));
        (state.fault.errors, state.fault.bad_blocks) = (2, 1);
    }
    let stats = rig.stats(TARGET).unwrap();
    let severities: Vec<Severity> = stats.causes.iter().map(|cause| cause.severity).collect();
    assert_eq!(severities, [Severity::Failure, Severity::Warning, Severity::Failure]);
    let expected = "block device ublkb1 has 1 bad sectors; ext4 has counted 2 errors; \
                    it was unmounted from its staging path";
    assert_eq!(condition(stats.causes).message, expected);
}
