//! A volume is added whole or not at all, and deleted whole or not at all.

use blockd_api::v1;
use tonic::Code;

use super::testing::Rig;
use super::tests::{MIB, attach, create, delete, refused};

fn add(name: &str, configure: v1::ConfigureVolumeRequest) -> v1::AddVolumeRequest {
    v1::AddVolumeRequest {
        create: Some(create(name, 4 * MIB)),
        configure: Some(configure),
        attach: Some(attach("")),
    }
}

fn quota(mib: i64) -> v1::ConfigureVolumeRequest {
    v1::ConfigureVolumeRequest { quota_bytes: Some(mib * MIB), ..Default::default() }
}

#[tokio::test]
async fn a_volume_is_added_once_with_all_its_parts() {
    let mut rig = Rig::new().await;
    let first = rig.client.add_volume(add("a", quota(2))).await.unwrap().into_inner();
    let parts = (first.changed, first.created, first.configured, first.attached);
    assert_eq!(parts, (true, true, true, true));
    let volume = first.volume.unwrap();
    assert!(volume.attached && volume.nbd_uri.ends_with("n.sock"), "{volume:?}");
    assert_eq!(volume.settings.unwrap().quota_bytes, 2 * MIB);
    let again = rig.client.add_volume(add("a", quota(2))).await.unwrap().into_inner();
    assert!(!again.changed && !again.created && !again.configured && !again.attached);
    assert_eq!(again.volume, Some(volume));
    let other = rig.client.add_volume(add("a", quota(3))).await.unwrap().into_inner();
    assert_eq!((other.created, other.configured, other.attached), (false, true, false));
    // Without settings and attachment, it is created alone.
    let alone =
        v1::AddVolumeRequest { create: Some(create("b", MIB)), ..v1::AddVolumeRequest::default() };
    let alone = rig.client.add_volume(alone).await.unwrap().into_inner();
    assert!(alone.created && !alone.volume.unwrap().attached);
}

fn labels(pairs: &[(&str, &str)]) -> std::collections::BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn labelled(name: &str, pairs: &[(&str, &str)], remove: &[&str]) -> v1::ConfigureVolumeRequest {
    v1::ConfigureVolumeRequest {
        name: name.to_owned(),
        set_labels: labels(pairs),
        remove_labels: remove.iter().map(|key| (*key).to_owned()).collect(),
        ..Default::default()
    }
}

#[tokio::test]
async fn labels_are_set_with_a_volume_changed_one_by_one_and_removed() {
    let mut rig = Rig::new().await;
    let first = labelled("", &[("team", "db"), ("x", "1")], &[]);
    let made = rig.client.add_volume(add("a", first.clone())).await.unwrap().into_inner();
    assert!(made.created && made.configured);
    assert_eq!(made.volume.unwrap().labels, labels(&[("team", "db"), ("x", "1")]));
    let again = rig.client.add_volume(add("a", first)).await.unwrap().into_inner();
    assert!(!again.changed);
    let other = add("a", labelled("", &[("x", "2")], &[]));
    let other = rig.client.add_volume(other).await.unwrap().into_inner();
    assert!(other.configured && !other.created);
    let changes = labelled("a", &[("y", "")], &["team", "none"]);
    let set = rig.client.configure_volume(changes.clone()).await.unwrap().into_inner();
    assert!(set.changed);
    assert_eq!(set.volume.unwrap().labels, labels(&[("x", "2"), ("y", "")]));
    let same = rig.client.configure_volume(changes).await.unwrap().into_inner();
    assert!(!same.changed);
    // A snapshot and a clone have their own, and a snapshot no settings.
    let member = v1::SnapshotMember { volume: "a".into(), name: "s".into() };
    let (members, of_s) = (vec![member], labels(&[("kind", "nightly")]));
    let taken = v1::CreateSnapshotsRequest { members, labels: of_s, ..Default::default() };
    let taken = rig.client.create_snapshots(taken).await.unwrap().into_inner().snapshots;
    assert_eq!(taken[0].labels, labels(&[("kind", "nightly")]));
    let clone = v1::CloneVolumeRequest {
        name: "c".into(),
        snapshot: "s".into(),
        labels: labels(&[("of", "s")]),
        ..Default::default()
    };
    let cloned = rig.client.clone_volume(clone).await.unwrap().into_inner().volume.unwrap();
    assert_eq!(cloned.labels, labels(&[("of", "s")]));
    rig.client.configure_volume(labelled("s", &[], &["kind"])).await.unwrap();
    let both = v1::ConfigureVolumeRequest { iops: Some(5), ..labelled("s", &[("k", "v")], &[]) };
    rig.client.configure_volume(both).await.unwrap_err();
    assert!(rig.volumes().await.into_iter().all(|one| one.name != "s" || one.labels.is_empty()));
}

#[tokio::test]
async fn a_bad_label_leaves_nothing_behind_and_is_named_with_its_limit() {
    let mut rig = Rig::new().await;
    rig.client.add_volume(add("old", labelled("", &[("k", "v")], &[]))).await.unwrap();
    let before = rig.volumes().await;
    let long = "v".repeat(257);
    for (pairs, words) in [
        (&[("-bad", "")][..], ["key of a label", "-bad", "letter or digit"]),
        (&[("key", long.as_str())], ["label key", "vvv", "at most 256 bytes"]),
        (&[("key", "a\u{202e}b")], ["label key", "a", "marks of writing direction"]),
    ] {
        let text = |status: tonic::Status| status.message().to_owned();
        let add_new = add("new", labelled("", pairs, &[]));
        let add_old = add("old", labelled("", pairs, &[]));
        let errors = [
            text(rig.client.add_volume(add_new).await.unwrap_err()),
            text(rig.client.add_volume(add_old).await.unwrap_err()),
            text(rig.client.configure_volume(labelled("old", pairs, &[])).await.unwrap_err()),
        ];
        for error in errors {
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
        let member = v1::SnapshotMember { volume: "old".into(), name: "s".into() };
        let taken = v1::CreateSnapshotsRequest {
            members: vec![member],
            labels: labels(pairs),
            ..Default::default()
        };
        rig.client.create_snapshots(taken).await.unwrap_err();
    }
    let many: Vec<_> = (0..33).map(|at| (format!("k{at:02}"), String::new())).collect();
    let many: Vec<_> = many.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    let error = rig.client.add_volume(add("new", labelled("", &many, &[]))).await.unwrap_err();
    assert!(error.message().contains("k32 is 33: must be at most 32"), "{error:?}");
    assert_eq!(rig.volumes().await, before);
}

#[tokio::test]
async fn after_a_part_that_fails_nothing_is_changed() {
    let mut rig = Rig::new().await;
    rig.client.add_volume(add("old", quota(2))).await.unwrap();
    let before = rig.volumes().await;
    let thick = v1::ConfigureVolumeRequest { thick: Some(true), ..Default::default() };
    let too_thick =
        v1::AddVolumeRequest { create: Some(create("new", 1024 * MIB)), ..add("new", thick) };
    let contrary = v1::ConfigureVolumeRequest { reservation_bytes: Some(3 * MIB), ..quota(2) };
    let device = v1::AddVolumeRequest {
        attach: Some(v1::AttachVolumeRequest { front_end: 1, ..attach("") }),
        ..add("new", quota(2))
    };
    let larger =
        v1::AddVolumeRequest { create: Some(create("old", 8 * MIB)), ..add("old", quota(3)) };
    let read_only = v1::AddVolumeRequest {
        attach: Some(v1::AttachVolumeRequest { read_only: true, ..attach("") }),
        ..add("old", quota(3))
    };
    for (asked, code) in [
        (too_thick, Code::ResourceExhausted),
        (add("new", contrary.clone()), Code::InvalidArgument),
        (add("old", contrary), Code::InvalidArgument),
        (device, Code::InvalidArgument),
        (larger, Code::AlreadyExists),
        (read_only, Code::FailedPrecondition),
    ] {
        let status = rig.client.add_volume(asked.clone()).await.unwrap_err();
        assert_eq!(status.code(), code, "{asked:?}: {status}");
        assert!(status.message().ends_with("; nothing was changed"), "{}", status.message());
        assert_eq!(rig.volumes().await, before, "{asked:?}");
    }
    let nothing = rig.client.add_volume(v1::AddVolumeRequest::default()).await;
    refused(nothing, Code::InvalidArgument, "create", "missing");
}

#[tokio::test]
async fn settings_come_back_when_a_volume_that_is_there_cannot_be_attached() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("old", 4 * MIB)).await.unwrap();
    let before = rig.volumes().await;
    // The list of attachments can't be written.
    let file = rig.folder.path().join("attachments.json");
    std::fs::create_dir(&file).unwrap();
    for name in ["old", "new"] {
        let status = rig.client.add_volume(add(name, quota(2))).await.unwrap_err();
        assert!(status.message().ends_with("; nothing was changed"), "{}", status.message());
        assert_eq!(rig.volumes().await, before);
    }
    std::fs::remove_dir(&file).unwrap();
    assert!(rig.client.add_volume(add("old", quota(2))).await.unwrap().into_inner().attached);
}

#[tokio::test]
async fn an_attached_volume_is_deleted_in_one_call_unless_it_is_in_use() {
    let mut rig = Rig::new().await;
    let made = rig.client.add_volume(add("a", quota(2))).await.unwrap().into_inner();
    let asked = || v1::DeleteVolumeRequest { detach: true, ..delete("a", false) };
    let problem = "is attached: detach it first, or use force";
    let alone = rig.client.delete_volume(delete("a", false)).await;
    refused(alone, Code::FailedPrecondition, "volume a", problem);
    rig.connect(made.volume.unwrap().id);
    let problem = "has 1 connection: end it first, or use force";
    let used = rig.client.delete_volume(asked()).await;
    refused(used, Code::FailedPrecondition, "volume a", problem);
    assert!(rig.volumes().await[0].attached);
    rig.data_path.connections.lock().clear();
    let gone = rig.client.delete_volume(asked()).await.unwrap().into_inner();
    assert!(gone.changed && gone.detached);
    assert!(rig.volumes().await.is_empty());
}

#[tokio::test]
async fn a_volume_that_is_neither_deleted_nor_attached_again_is_named() {
    let mut rig = Rig::new().await;
    rig.client.add_volume(add("a", quota(2))).await.unwrap();
    // The pool fails between the detachment and the deletion.
    *rig.data_path.fails_on_close.lock() = Some(rig.control.pool("").unwrap());
    let asked = v1::DeleteVolumeRequest { detach: true, ..delete("a", false) };
    let status = rig.client.delete_volume(asked).await.unwrap_err();
    assert!(status.message().contains("; volume a stays detached: pool"), "{}", status.message());
    assert!(!rig.control.is_attached("default", "a"));
}
