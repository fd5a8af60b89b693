//! Snapshots, clones and rollback as a client of the control API sees them.

use blockd_api::v1;
use tonic::Code;

use super::testing::Rig;
use super::tests::{MIB, attach, create, delete, refused};

fn snapshot(members: &[(&str, &str)]) -> v1::CreateSnapshotsRequest {
    let member = |&(volume, name): &(&str, &str)| v1::SnapshotMember {
        volume: volume.into(),
        name: name.into(),
    };
    v1::CreateSnapshotsRequest {
        pool: String::new(),
        members: members.iter().map(member).collect(),
        ..Default::default()
    }
}

fn clone(snapshot: &str, name: &str, size_bytes: i64) -> v1::CloneVolumeRequest {
    let (snapshot, name) = (snapshot.to_owned(), name.to_owned());
    v1::CloneVolumeRequest { snapshot, name, size_bytes, ..Default::default() }
}

fn rollback(name: &str, snapshot: &str, force: bool) -> v1::RollbackVolumeRequest {
    let (name, snapshot) = (name.to_owned(), snapshot.to_owned());
    v1::RollbackVolumeRequest { name, snapshot, force, ..Default::default() }
}

fn resize(name: &str, size_bytes: i64) -> v1::ResizeVolumeRequest {
    v1::ResizeVolumeRequest { name: name.to_owned(), size_bytes, ..Default::default() }
}

#[tokio::test]
async fn a_snapshot_is_taken_once_and_says_so() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", 37 * MIB)).await.unwrap();
    let first = rig.client.create_snapshots(snapshot(&[("a", "s")])).await.unwrap().into_inner();
    assert!(first.changed);
    let made = &first.snapshots[0];
    assert_eq!((made.name.as_str(), made.origin.as_str()), ("s", "a"));
    assert_eq!((made.size_bytes, made.kind()), (37 * MIB, v1::VolumeKind::Snapshot));
    assert!(made.read_only && !made.attached);
    let again = rig.client.create_snapshots(snapshot(&[("a", "s")])).await.unwrap().into_inner();
    assert!(!again.changed);
    assert_eq!(again.snapshots, first.snapshots);
    assert_eq!(rig.volumes().await.len(), 2);
}

/// A label may have been taken away since, as that of a snapshot that is to be sent is.
#[tokio::test]
async fn a_snapshot_with_other_labels_is_that_of_another_call() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    let labelled = |pairs: &[(&str, &str)]| {
        let pair = |&(key, value): &(&str, &str)| (key.to_owned(), value.to_owned());
        let labels = pairs.iter().map(pair).collect();
        v1::CreateSnapshotsRequest { labels, ..snapshot(&[("a", "s")]) }
    };
    rig.client.create_snapshots(labelled(&[("x", "1")])).await.unwrap();
    let answer = rig.client.create_snapshots(labelled(&[("x", "2")])).await;
    refused(answer, Code::AlreadyExists, "label x", "2");
    let configure = v1::ConfigureVolumeRequest {
        name: "s".to_owned(),
        set_labels: labelled(&[("y", "1")]).labels,
        remove_labels: vec!["x".to_owned()],
        ..Default::default()
    };
    rig.client.configure_volume(configure.clone()).await.unwrap();
    for pairs in [&[("x", "2")][..], &[("x", "2"), ("y", "1")]] {
        let answer = rig.client.create_snapshots(labelled(pairs)).await;
        refused(answer, Code::AlreadyExists, "labels", "x");
    }
    let again = rig.client.create_snapshots(labelled(&[("y", "1")])).await.unwrap().into_inner();
    assert!(!again.changed && again.snapshots[0].labels == labelled(&[("y", "1")]).labels);
    // A call that was interrupted has set none.
    let without = v1::ConfigureVolumeRequest {
        remove_labels: vec!["y".to_owned()],
        set_labels: Default::default(),
        ..configure
    };
    rig.client.configure_volume(without).await.unwrap();
    let done = rig.client.create_snapshots(labelled(&[("x", "2")])).await.unwrap().into_inner();
    assert!(done.changed && done.snapshots[0].labels["x"] == "2");
}

#[tokio::test]
async fn snapshots_of_several_are_taken_together_or_not_at_all() {
    let mut rig = Rig::new().await;
    for name in ["a", "b", "c"] {
        rig.client.create_volume(create(name, MIB)).await.unwrap();
    }
    let two = snapshot(&[("b", "b@1"), ("a", "a@1")]);
    let first = rig.client.create_snapshots(two.clone()).await.unwrap().into_inner();
    let names: Vec<_> =
        first.snapshots.iter().map(|one| (&one.name[..], &one.origin[..])).collect();
    assert_eq!((first.changed, names), (true, vec![("b@1", "b"), ("a@1", "a")]));
    let again = rig.client.create_snapshots(two).await.unwrap().into_inner();
    assert_eq!((again.changed, again.snapshots), (false, first.snapshots));
    // One is there and one is not: nothing is made.
    let half = rig.client.create_snapshots(snapshot(&[("a", "a@1"), ("c", "c@1")])).await;
    let problem = "exists, and c@1 does not: a group is one cut";
    refused(half, Code::FailedPrecondition, "snapshot a@1", problem);
    assert_eq!(rig.volumes().await.len(), 5);
    let mut events = rig.control.events().reader(true, String::new());
    rig.control.events().close();
    let mut taken = Vec::new();
    while let Some(event) = events.next().await {
        if event.kind() == v1::EventKind::SnapshotCreated {
            taken.push(event.volume);
        }
    }
    assert_eq!(taken, ["b@1", "a@1"]);
}

#[tokio::test]
async fn a_snapshot_of_what_is_not_there_is_refused() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    rig.client.create_volume(create("b", MIB)).await.unwrap();
    let mut ask =
        async |members: &[(&str, &str)]| rig.client.create_snapshots(snapshot(members)).await;
    refused(ask(&[("x", "s")]).await, Code::NotFound, "volume", "x");
    refused(ask(&[]).await, Code::InvalidArgument, "members", "0");
    refused(ask(&[("a", "s"), ("a", "t")]).await, Code::InvalidArgument, "volume", "a");
    refused(ask(&[("a", "s"), ("b", "s")]).await, Code::InvalidArgument, "name", "s");
    refused(ask(&[("a", "s/t")]).await, Code::InvalidArgument, "name", "s/t");
    // A volume has the name.
    refused(ask(&[("a", "b")]).await, Code::AlreadyExists, "origin", "a");
    assert_eq!(rig.volumes().await.len(), 2);
}

#[tokio::test]
async fn a_clone_is_made_of_a_snapshot_and_may_be_larger() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", 8 * MIB)).await.unwrap();
    rig.client.create_snapshots(snapshot(&[("a", "s")])).await.unwrap();
    let answer = rig.client.clone_volume(clone("a", "c", 0)).await;
    let problem = "is no snapshot: take one with `blockd snapshot`";
    refused(answer, Code::FailedPrecondition, "volume a", problem);
    refused(rig.client.clone_volume(clone("x", "c", 0)).await, Code::NotFound, "snapshot", "x");
    let small = rig.client.clone_volume(clone("s", "c", MIB)).await;
    assert_eq!(small.unwrap_err().code(), Code::InvalidArgument);
    for (name, size, expected) in [("c", 0, 8 * MIB), ("d", 16 * MIB, 16 * MIB)] {
        let made = rig.client.clone_volume(clone("s", name, size)).await.unwrap().into_inner();
        let volume = made.volume.unwrap();
        assert!(made.changed && !volume.read_only);
        assert_eq!((volume.size_bytes, volume.origin.as_str()), (expected, "s"));
        let again = rig.client.clone_volume(clone("s", name, size)).await.unwrap().into_inner();
        assert!(!again.changed);
    }
    // The origin of a clone can be deleted.
    assert!(rig.client.delete_volume(delete("s", false)).await.unwrap().into_inner().changed);
    let left = rig.volumes().await;
    let origins: Vec<_> = left.iter().map(|one| (one.name.as_str(), one.origin.as_str())).collect();
    assert_eq!(origins, [("a", ""), ("c", ""), ("d", "")]);
    // Its id is known all the same, and of which family they are.
    let ids: Vec<_> = left.iter().map(|one| (one.origin_id, one.family_id)).collect();
    let (first, gone) = (left[0].id, left[1].origin_id);
    assert_eq!(ids, [(0, first), (gone, first), (gone, first)]);
    assert!(gone != 0 && left.iter().all(|one| one.id != gone), "{ids:?}");
}

#[tokio::test]
async fn a_rollback_gives_the_size_back_and_minds_who_is_attached() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", 8 * MIB)).await.unwrap();
    rig.client.create_volume(create("b", 8 * MIB)).await.unwrap();
    rig.client.create_snapshots(snapshot(&[("a", "s")])).await.unwrap();
    rig.client.create_snapshots(snapshot(&[("b", "t")])).await.unwrap();
    rig.client.resize_volume(resize("a", 24 * MIB)).await.unwrap();
    rig.client.attach_volume(attach("a")).await.unwrap();
    let answer = rig.client.rollback_volume(rollback("a", "s", false)).await;
    let problem = "is attached: detach it first, or use force, and its clients find other data \
                   below them";
    refused(answer, Code::FailedPrecondition, "volume a", problem);
    let answer = rig.client.rollback_volume(rollback("a", "t", true)).await;
    let error = answer.unwrap_err();
    assert!(error.message().contains("another family"), "{error}");
    let answer = rig.client.rollback_volume(rollback("a", "b", true)).await;
    let problem = "is no snapshot: take one with `blockd snapshot`";
    refused(answer, Code::FailedPrecondition, "volume b", problem);
    let done = rig.client.rollback_volume(rollback("a", "s", true)).await.unwrap().into_inner();
    let volume = done.volume.unwrap();
    assert_eq!((done.previous_size_bytes, volume.size_bytes), (24 * MIB, 8 * MIB));
    assert!(volume.attached);
}

fn reset(name: &str) -> v1::ResetVolumeRequest {
    v1::ResetVolumeRequest { name: name.to_owned(), ..Default::default() }
}

#[tokio::test]
async fn a_reset_needs_the_snapshot_that_the_clone_was_made_of() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", 8 * MIB)).await.unwrap();
    rig.client.create_snapshots(snapshot(&[("a", "s")])).await.unwrap();
    rig.client.clone_volume(clone("s", "c", 16 * MIB)).await.unwrap();
    let none = "was not made of a snapshot: `blockd rollback` takes it back to one of its own";
    let snapshot = "is a snapshot, which never changes";
    for (name, problem) in [("a", none), ("s", snapshot)] {
        let answer = rig.client.reset_volume(reset(name)).await;
        refused(answer, Code::FailedPrecondition, &format!("volume {name}"), problem);
    }
    rig.client.attach_volume(attach("c")).await.unwrap();
    let done = rig.client.reset_volume(reset("c")).await.unwrap().into_inner();
    let volume = done.volume.unwrap();
    assert_eq!((done.snapshot.as_str(), volume.size_bytes), ("s", 16 * MIB));
    assert!(volume.attached && volume.origin == "s");
    rig.client.delete_volume(delete("s", false)).await.unwrap();
    let answer = rig.client.reset_volume(reset("c")).await;
    let gone = "was made of a snapshot that is deleted: `blockd rollback` takes it back to another";
    refused(answer, Code::FailedPrecondition, "volume c", gone);
}

#[tokio::test]
async fn each_of_two_rollbacks_is_reported_when_its_extents_are_reclaimed() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", 8 * MIB)).await.unwrap();
    rig.client.create_snapshots(snapshot(&[("a", "s")])).await.unwrap();
    for _ in 0..2 {
        rig.client.rollback_volume(rollback("a", "s", false)).await.unwrap();
    }
    let mut events = rig.control.events().reader(true, String::new());
    let mut released = 0;
    while released < 2 {
        let next = tokio::time::timeout(std::time::Duration::from_secs(20), events.next());
        let event = next.await.expect("an event for each").unwrap();
        released += u32::from(event.kind() == v1::EventKind::VolumeReleased);
    }
}

/// The sums of the ranges of an answer, by state, in MiB; they have to follow each other.
async fn diff(
    rig: &mut Rig,
    name: &str,
    since: &str,
    from_bytes: i64,
) -> Result<[i64; 3], tonic::Status> {
    let (name, since) = (name.to_owned(), since.to_owned());
    let request = v1::DiffVolumeRequest { name, since, from_bytes, ..Default::default() };
    let mut stream = rig.client.diff_volume(request).await?.into_inner();
    let (mut sums, mut at, mut end) = ([0; 3], from_bytes, None);
    while let Some(part) = stream.message().await? {
        for range in part.ranges {
            assert_eq!((range.offset_bytes, range.length_bytes > 0), (at, true));
            at += range.length_bytes;
            let place = usize::try_from(i32::from(range.state())).unwrap() - 1;
            sums[place] += range.length_bytes / MIB;
        }
        assert_eq!(part.next_bytes, at);
        end = Some(part.volume_bytes);
    }
    assert_eq!(end, Some(at));
    Ok(sums)
}

#[tokio::test]
async fn a_difference_covers_the_volume_and_names_what_cannot_be_compared() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", 8 * MIB)).await.unwrap();
    rig.client.create_volume(create("b", 8 * MIB)).await.unwrap();
    rig.client.create_snapshots(snapshot(&[("a", "s")])).await.unwrap();
    rig.client.resize_volume(resize("a", 24 * MIB)).await.unwrap();
    assert_eq!(diff(&mut rig, "a", "", 0).await.unwrap(), [0, 0, 24]);
    let [same, data, zero] = diff(&mut rig, "a", "s", 4 * MIB).await.unwrap();
    assert_eq!((same + zero, data), (20, 0));
    let error = diff(&mut rig, "a", "b", 0).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.message().contains("a is of another family than b"), "{error}");
    assert_eq!(diff(&mut rig, "a", "x", 0).await.unwrap_err().code(), Code::NotFound);
    for from in [-1, 25 * MIB] {
        let error = diff(&mut rig, "a", "", from).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    }
}
