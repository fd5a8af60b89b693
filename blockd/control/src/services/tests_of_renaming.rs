//! Renamed volumes as clients of the control API and of NBD see them.

use std::sync::Arc;
use std::time::Duration;

use blockd_api::v1;
use blockd_engine::pool::Control as Command;
use blockd_engine::stats::VolumeStats;
use blockd_nbd::ExportError;
use blockd_serve::nbd::Exports;
use tonic::Code;

use super::EventKind;
use super::testing::{Rig, folder, memory_pool};
use super::tests::{MIB, attach, create, delete, refused};
use super::volumes::find;

fn rename(name: &str, new_name: &str) -> v1::RenameVolumeRequest {
    let (name, new_name) = (name.to_owned(), new_name.to_owned());
    v1::RenameVolumeRequest { name, new_name, ..Default::default() }
}

/// A pool with the volumes `a`, attached, and `b`.
async fn rig() -> Rig {
    let mut rig = Rig::new().await;
    for name in ["a", "b"] {
        rig.client.create_volume(create(name, MIB)).await.unwrap();
    }
    rig.client.attach_volume(attach("a")).await.unwrap();
    rig
}

#[tokio::test]
async fn a_volume_is_renamed_once_and_all_that_is_kept_by_name_follows() {
    let mut rig = rig().await;
    let mut events = rig.control.events().reader(false, String::new());
    let (pool, volume) = ("default".to_owned().into(), "a".to_owned().into());
    let stats = Arc::new(VolumeStats { pool, volume, ..Default::default() });
    rig.data_path.volumes.lock().push(Arc::clone(&stats));
    rig.connect(1);
    let waits = rig.control.open("a").await.unwrap().volume;
    let first = rig.client.rename_volume(rename("a", "c")).await.unwrap().into_inner();
    let renamed = first.volume.unwrap();
    assert!(first.changed && renamed.attached);
    assert_eq!((renamed.name.as_str(), renamed.connections), ("c", 1));
    assert!(renamed.nbd_uri.contains(":///c?"), "{}", renamed.nbd_uri);
    assert_eq!(rig.control.open("a").await.unwrap_err(), ExportError::Unknown);
    assert_eq!(rig.control.open("c").await.unwrap().info.name, "c");
    waits.if_attached(|_| panic!("a client came in by the former name"));
    assert_eq!(stats.volume.get(), "c");
    let event = events.next().await.unwrap();
    assert_eq!((event.kind(), event.volume.as_str()), (EventKind::VolumeRenamed, "c"));
    assert_eq!(event.text, "volume a was renamed to c");
    for (old, new) in [("a", "c"), ("c", "c")] {
        let again = rig.client.rename_volume(rename(old, new)).await.unwrap().into_inner();
        assert_eq!((again.changed, again.volume), (false, Some(renamed.clone())), "{old}");
    }
}

#[tokio::test]
async fn a_name_that_cannot_be_given_is_refused_and_changes_nothing() {
    let mut rig = rig().await;
    let answer = rig.client.rename_volume(rename("a", "b")).await;
    let problem = "exists: choose another name, or rename or delete that one first";
    refused(answer, Code::FailedPrecondition, "volume b", problem);
    for name in ["", "x/y", "evil\u{202e}x"] {
        let answer = rig.client.rename_volume(rename("a", name)).await;
        assert_eq!(answer.unwrap_err().code(), Code::InvalidArgument, "{name:?}");
    }
    let answer = rig.client.rename_volume(rename("x", "y")).await;
    assert_eq!(answer.unwrap_err().code(), Code::NotFound);
    let names: Vec<_> = rig.volumes().await.into_iter().map(|one| one.name).collect();
    assert_eq!(names, ["a", "b"]);
    assert!(rig.control.open("a").await.is_ok());
}

#[tokio::test]
async fn a_rename_that_cannot_be_remembered_is_taken_back() {
    let folder = folder();
    let file = folder.path().join("attachments.json");
    let entry = r#"{"pool":"default","volume":"a","id":1,"read_only":false}"#;
    std::fs::write(&file, format!(r#"{{"version":1,"entries":[{entry}]}}"#)).unwrap();
    let mut rig = Rig::without_pool(folder).await;
    rig.control.open_pool(&memory_pool("default")).await.unwrap();
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    // The list cannot be written: a folder has its name.
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    let error = rig.client.rename_volume(rename("a", "c")).await.unwrap_err();
    assert!(error.message().contains("attachments.json"), "{error}");
    assert_eq!(rig.volumes().await[0].name, "a");
    assert!(rig.control.open("a").await.is_ok());
    std::fs::remove_dir(&file).unwrap();
    rig.client.rename_volume(rename("a", "c")).await.unwrap();
    assert!(rig.control.open("c").await.is_ok());
}

#[tokio::test]
#[expect(clippy::await_holding_lock, reason = "it is waited for by a thread that may block")]
async fn a_rename_that_can_not_be_taken_back_says_by_which_name_the_volume_goes() {
    let rig = rig().await;
    let held = rig.control.0.attachments.hold_and_fail();
    let mut client = rig.client.clone();
    let renaming = tokio::spawn(async move { client.rename_volume(rename("a", "c")).await });
    let pool = rig.control.pool("").unwrap();
    while find(&pool, "c").is_none() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // The former name is taken.
    let (name, block_size) = ("a".to_owned(), 512);
    pool.control(Command::Create { name, size: 1 << 20, block_size }).await.unwrap();
    drop(held);
    let error = renaming.await.unwrap().unwrap_err();
    let text = error.message();
    assert!(text.contains("attachments.json"), "{text}");
    assert!(text.contains("; volume c keeps its new name: "), "{text}");
}

#[tokio::test]
async fn an_attachment_finds_a_volume_that_was_renamed_when_the_daemon_died() {
    let mut rig = rig().await;
    let pool = rig.control.pool("").unwrap();
    let id = find(&pool, "a").unwrap().id;
    // All that is durable of a rename that was cut off in its middle.
    pool.control(Command::Rename { volume: id, name: "c".to_owned() }).await.unwrap();
    rig.client.attach_volume(attach("b")).await.unwrap();
    assert_eq!(rig.control.forget_attachments_of_missing_volumes().await.unwrap(), 0);
    assert_eq!(rig.control.open("a").await.unwrap_err(), ExportError::Unknown);
    assert!(rig.control.open("c").await.is_ok() && rig.control.open("b").await.is_ok());
    // Another volume may have the former name, and is not attached by that.
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    assert_eq!(rig.control.forget_attachments_of_missing_volumes().await.unwrap(), 0);
    assert!(!rig.control.is_attached("default", "a"));
    rig.client.delete_volume(delete("c", true)).await.unwrap();
    assert!(!rig.control.is_attached("default", "c"));
}
