//! Renamed pools as clients of the control API and of NBD see them.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blockd_api::v1;
use blockd_engine::stats::VolumeStats;
use blockd_nbd::ExportError;
use blockd_serve::nbd::Exports;
use tonic::Code;

use super::testing::{Rig, file_pool, folder, memory_pool};
use super::tests::{MIB, attach, create};
use super::{Control, EventKind};

fn rename(name: &str, new_name: &str) -> v1::RenamePoolRequest {
    v1::RenamePoolRequest { name: name.to_owned(), new_name: new_name.to_owned() }
}

fn in_pool(pool: &str, name: &str) -> [String; 2] {
    [pool, name].map(str::to_owned)
}

/// The pool `p` in a file, made by a call, with the volume `a`, attached, and `b`.
async fn rig() -> Rig {
    let mut rig = Rig::without_pool(folder()).await;
    let config = file_pool("p", &rig.folder.path().join("pool"));
    rig.control.create_pool(config, false).await.unwrap();
    for volume in ["a", "b"] {
        let [pool, name] = in_pool("p", volume);
        rig.client
            .create_volume(v1::CreateVolumeRequest { pool, ..create(&name, MIB) })
            .await
            .unwrap();
    }
    attach_in(&mut rig, "p", "a").await;
    rig
}

async fn attach_in(rig: &mut Rig, pool: &str, volume: &str) {
    let [pool, name] = in_pool(pool, volume);
    rig.client.attach_volume(v1::AttachVolumeRequest { pool, ..attach(&name) }).await.unwrap();
}

/// The names in all that is remembered of pools.
fn remembered(state_dir: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for (file, key) in
        [("served.json", "name"), ("pools.json", "name"), ("attachments.json", "pool")]
    {
        let text = std::fs::read_to_string(state_dir.join(file)).unwrap();
        let key = format!("\"{key}\":");
        let parts: Vec<_> = text.split(&key).skip(1).collect();
        assert!(!parts.is_empty(), "{file}: {text}");
        names.extend(parts.iter().map(|part| part.split('"').nth(1).unwrap().to_owned()));
    }
    names.dedup();
    names
}

fn pools(control: &Control) -> Vec<String> {
    control.known_pools().into_iter().map(|known| known.config.name).collect()
}

#[tokio::test]
async fn a_pool_is_renamed_once_and_all_that_is_kept_by_name_follows() {
    let mut rig = rig().await;
    let mut events = rig.control.events().reader(false, String::new());
    let (pool, volume) = ("p".to_owned().into(), "a".to_owned().into());
    let stats = Arc::new(VolumeStats { pool, volume, ..Default::default() });
    rig.data_path.volumes.lock().push(Arc::clone(&stats));
    let waits = rig.control.open("p/a").await.unwrap().volume;
    rig.control.look_at_health().await;
    let first = rig.client.rename_pool(rename("p", "q")).await.unwrap().into_inner();
    let renamed = first.pool.unwrap();
    assert!(first.changed);
    assert_eq!((renamed.name.as_str(), renamed.volume_count), ("q", 2));
    assert_eq!(rig.control.open("p/a").await.unwrap_err(), ExportError::Unknown);
    assert_eq!(rig.control.open("q/a").await.unwrap().info.name, "q/a");
    waits.if_attached(|_| panic!("a client came in by the former name"));
    assert_eq!(stats.pool.get(), "q");
    let event = events.next().await.unwrap();
    assert_eq!((event.kind(), event.pool.as_str()), (EventKind::PoolRenamed, "q"));
    assert_eq!(event.text, "pool p was renamed to q");
    assert_eq!(remembered(rig.folder.path()), ["q"]);
    assert_eq!(pools(&rig.control), ["q"]);
    rig.control.look_at_health().await;
    let health = rig.client.health(v1::HealthRequest::default()).await.unwrap().into_inner();
    assert!(health.pools.iter().all(|one| one.pool == "q" && one.causes.is_empty()), "{health:?}");
    for (old, new) in [("p", "q"), ("q", "q")] {
        let again = rig.client.rename_pool(rename(old, new)).await.unwrap().into_inner();
        assert!(!again.changed && again.pool.unwrap().id == renamed.id, "{old}");
    }
    // The old name is free, and the pool is served by its new one.
    rig.control.open_pool(&memory_pool("p")).await.unwrap();
    attach_in(&mut rig, "q", "b").await;
    assert_eq!(remembered(rig.folder.path()), ["q"]);
}

#[tokio::test]
async fn names_that_can_not_be_given_are_refused_and_change_nothing() {
    let mut rig = rig().await;
    rig.control.open_pool(&memory_pool("default")).await.unwrap();
    rig.control.open_pool(&memory_pool("other")).await.unwrap();
    rig.control.set_configured(["other".to_owned(), "later".to_owned()]);
    for (old, new, about, problem) in [
        ("p", "other", "pool other", "exists: choose another name"),
        ("p", "later", "pool later", "restart the daemon to open that pool"),
        ("other", "q", "pool other", "change the name there"),
        ("default", "q", "pool default", "change the name there"),
    ] {
        let error = rig.client.rename_pool(rename(old, new)).await.unwrap_err();
        let text = error.message();
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
        assert!(text.starts_with(about) && text.contains(problem), "{error}");
    }
    for name in ["", "x/y", "evil\u{202e}x"] {
        let answer = rig.client.rename_pool(rename("p", name)).await;
        assert_eq!(answer.unwrap_err().code(), Code::InvalidArgument, "{name:?}");
    }
    let answer = rig.client.rename_pool(rename("x", "y")).await;
    assert_eq!(answer.unwrap_err().code(), Code::NotFound);
    assert_eq!(pools(&rig.control), ["default", "other", "p"]);
    assert_eq!(remembered(rig.folder.path()), ["p"]);
}

#[tokio::test]
async fn a_name_of_a_pool_that_may_come_back_is_refused() {
    let folder = folder();
    let entry = r#"{"name":"lost","id":"000102030405060708090a0b0c0d0e0f","volatile":false,
        "devices":[{"path":"/gone/pool","size":1}],"boot":"","last_seen_unix_seconds":0}"#;
    let text = format!(r#"{{"version":1,"entries":[{entry}]}}"#);
    std::fs::write(folder.path().join("served.json"), text).unwrap();
    let mut rig = Rig::without_pool(folder).await;
    rig.control.open_pool(&memory_pool("p")).await.unwrap();
    let error = rig.client.rename_pool(rename("p", "lost")).await.unwrap_err();
    let problem = "pool lost is the name of another pool that was served here";
    assert!(error.message().starts_with(problem), "{error}");
    assert!(rig.client.rename_pool(rename("p", "q")).await.unwrap().into_inner().changed);
}

#[tokio::test]
async fn a_rename_that_can_not_be_remembered_is_taken_back() {
    let mut rig = rig().await;
    for file in ["served.json", "pools.json", "attachments.json"] {
        let blocked = rig.folder.path().join(format!("{file}.next"));
        std::fs::create_dir(&blocked).unwrap();
        let error = rig.client.rename_pool(rename("p", "q")).await.unwrap_err();
        assert!(error.message().contains(file), "{error}");
        assert_eq!(remembered(rig.folder.path()), ["p"], "{file}");
        assert_eq!(pools(&rig.control), ["p"]);
        assert!(rig.control.open("p/a").await.is_ok());
        std::fs::remove_dir(&blocked).unwrap();
    }
    rig.client.rename_pool(rename("p", "q")).await.unwrap();
    assert!(rig.control.open("q/a").await.is_ok());
}

#[tokio::test]
async fn a_rename_waits_for_calls_on_the_pool_and_they_go_on_by_the_new_name() {
    let rig = rig().await;
    let pool = rig.control.pool("p").unwrap();
    let busy = rig.control.lock(&pool, "a").await;
    let mut client = rig.client.clone();
    let renaming = tokio::spawn(async move { client.rename_pool(rename("p", "q")).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    let [name, of] = in_pool("b", "p");
    let wish = v1::AttachVolumeRequest { pool: of, ..attach(&name) };
    let mut client = rig.client.clone();
    let attaching = tokio::spawn(async move { client.attach_volume(wish).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!renaming.is_finished() && !attaching.is_finished());
    let late = rig.control.locks_to_rename(&pool, Duration::from_millis(20)).await.unwrap_err();
    assert!(late.to_string().ends_with("have not ended within 20ms: repeat the call"), "{late}");
    assert_eq!(remembered(rig.folder.path()), ["p"]);
    drop(busy);
    assert!(renaming.await.unwrap().unwrap().into_inner().changed);
    assert_eq!(attaching.await.unwrap().unwrap().into_inner().volume.unwrap().pool, "q");
    assert_eq!(remembered(rig.folder.path()), ["q"]);
    assert!(rig.control.open("q/b").await.is_ok());
}
