//! The control API as a client sees it, over a Unix socket.
#![expect(deprecated, reason = "size_gb is what old clients use")]

use std::sync::Arc;

use blockd_api::v1;
use blockd_engine::stats::{Op, VolumeStats};
use blockd_media::error::{Error, ErrorKind};
use blockd_nbd::ExportError;
use blockd_serve::nbd::Exports;
use tonic::{Code, Status};

use super::attachments::{Record, UblkRecord};
use super::testing::{Rig, folder, memory_pool};
use crate::services::{DataPath as _, EventKind};

pub(super) const MIB: i64 = 1 << 20;

pub(super) fn create(name: &str, size_bytes: i64) -> v1::CreateVolumeRequest {
    v1::CreateVolumeRequest { name: name.to_owned(), size_bytes, ..Default::default() }
}

pub(super) fn attach(name: &str) -> v1::AttachVolumeRequest {
    v1::AttachVolumeRequest { name: name.to_owned(), ..Default::default() }
}

fn detach(name: &str, force: bool) -> v1::DetachVolumeRequest {
    v1::DetachVolumeRequest { name: name.to_owned(), force, ..Default::default() }
}

pub(super) fn delete(name: &str, force: bool) -> v1::DeleteVolumeRequest {
    v1::DeleteVolumeRequest { name: name.to_owned(), force, ..Default::default() }
}

fn resize(name: &str, size_bytes: i64, shrink: bool) -> v1::ResizeVolumeRequest {
    v1::ResizeVolumeRequest { name: name.to_owned(), size_bytes, shrink, ..Default::default() }
}

impl Rig {
    pub(super) async fn volumes(&mut self) -> Vec<v1::Volume> {
        let answer = self.client.list_volumes(v1::ListVolumesRequest::default()).await.unwrap();
        answer.into_inner().volumes
    }
}

/// The one error that a call must end with: code, field, value, and a text of one line.
pub(super) fn refused<T: std::fmt::Debug>(
    answer: Result<tonic::Response<T>, Status>,
    code: Code,
    field: &str,
    value: &str,
) -> Error {
    let status = answer.unwrap_err();
    let error = Error::from_status(&status);
    let detail = error.detail();
    assert_eq!(status.code(), code, "{error}");
    assert_eq!((detail.field.as_str(), detail.value.as_str()), (field, value), "{error}");
    assert!(!detail.message.contains('\n') && detail.message == status.message(), "{error}");
    error
}

#[tokio::test]
async fn a_volume_is_made_once_and_says_so() {
    let mut rig = Rig::new().await;
    let first = rig.client.create_volume(create("a", 37 * MIB)).await.unwrap().into_inner();
    assert!(first.changed);
    let volume = first.volume.unwrap();
    assert_eq!((volume.size_bytes, volume.size_gb), (38_797_312, 1));
    assert_eq!((volume.name.as_str(), volume.pool.as_str()), ("a", "default"));
    assert_eq!((volume.device_major, volume.device_minor), (0, 0));
    assert!(!volume.attached && volume.nbd_uri.is_empty());
    let again = rig.client.create_volume(create("a", 37 * MIB)).await.unwrap().into_inner();
    assert!(!again.changed);
    assert_eq!(again.volume.unwrap(), volume);
    assert_eq!(rig.volumes().await.len(), 1);
}

#[tokio::test]
async fn many_at_once_make_one_volume() {
    let rig = Rig::new().await;
    let calls: Vec<_> = (0..16)
        .map(|_| {
            let mut client = rig.client.clone();
            tokio::spawn(async move { client.create_volume(create("a", MIB)).await })
        })
        .collect();
    let mut made = 0;
    for call in calls {
        made += usize::from(call.await.unwrap().unwrap().into_inner().changed);
    }
    assert_eq!(made, 1);
}

#[tokio::test]
async fn another_size_is_refused_and_names_both() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    let answer = rig.client.create_volume(create("a", 2 * MIB)).await;
    let error = refused(answer, Code::AlreadyExists, "size in bytes", "2097152");
    assert_eq!(error.to_string(), "volume a exists with size in bytes 1048576, asked for 2097152");
    let block = v1::CreateVolumeRequest { block_size: 4096, ..create("a", MIB) };
    let answer = rig.client.create_volume(block).await;
    refused(answer, Code::AlreadyExists, "block size in bytes", "4096");
    assert_eq!(rig.volumes().await[0].size_bytes, MIB);
}

#[tokio::test]
async fn names_that_break_a_rule_are_refused_everywhere() {
    let mut rig = Rig::new().await;
    let long = "x".repeat(129);
    for name in ["", "a/b", "a\0b", ".", "..", "node-1", "a\nb", long.as_str()] {
        let shown = blockd_media::error::shown(name);
        let check = |status: Result<(), Status>| {
            let error =
                refused(status.map(tonic::Response::new), Code::InvalidArgument, "name", &shown);
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.detail().allowed.contains("1 to 128 bytes"), "{error}");
        };
        check(rig.client.create_volume(create(name, MIB)).await.map(|_| ()));
        check(rig.client.attach_volume(attach(name)).await.map(|_| ()));
        check(rig.client.detach_volume(detach(name, false)).await.map(|_| ()));
        check(rig.client.delete_volume(delete(name, false)).await.map(|_| ()));
        check(rig.client.resize_volume(resize(name, MIB, false)).await.map(|_| ()));
    }
    assert!(rig.volumes().await.is_empty());
}

#[tokio::test]
async fn sizes_that_can_not_be_are_refused() {
    let mut rig = Rig::new().await;
    let cases = [
        (0, 0, "size_bytes", "0"),
        (-1, 0, "size_bytes", "-1"),
        (i64::MIN, 7, "size_bytes", "-9223372036854775808"),
        (0, u64::MAX, "size_gb", "18446744073709551615"),
        (0, 1 << 33, "size_gb", "8589934592"),
        (513, 0, "size_bytes", "513"),
        (i64::MAX, 0, "size_bytes", "9223372036854775807"),
        (0, (1 << 20) + 1, "size_bytes", "1125900980584448"),
    ];
    rig.client.create_volume(create("there", MIB)).await.unwrap();
    for (size_bytes, size_gb, field, value) in cases {
        let asked = v1::CreateVolumeRequest { size_gb, ..create("a", size_bytes) };
        refused(rig.client.create_volume(asked).await, Code::InvalidArgument, field, value);
        let asked = v1::ResizeVolumeRequest { size_gb, ..resize("there", size_bytes, true) };
        refused(rig.client.resize_volume(asked).await, Code::InvalidArgument, field, value);
    }
    let asked = v1::CreateVolumeRequest { block_size: 1000, ..create("a", MIB) };
    refused(rig.client.create_volume(asked).await, Code::InvalidArgument, "block_size", "1000");
    let volumes = rig.volumes().await;
    assert_eq!((volumes.len(), volumes[0].size_bytes), (1, MIB));
}

#[tokio::test]
async fn an_old_client_is_understood_and_understands() {
    let mut rig = Rig::new().await;
    let old = v1::CreateVolumeRequest { size_gb: 2, ..create("a", 0) };
    let answer = rig.client.create_volume(old.clone()).await.unwrap().into_inner();
    let volume = answer.volume.unwrap();
    assert_eq!((volume.size_gb, volume.size_bytes), (2, 2 << 30));
    let new = rig.client.create_volume(create("a", 2 << 30)).await.unwrap().into_inner();
    assert!(!new.changed);
    let both = v1::CreateVolumeRequest { size_gb: 7, ..create("a", 2 << 30) };
    assert!(!rig.client.create_volume(both).await.unwrap().into_inner().changed);
    let grown = v1::ResizeVolumeRequest { size_gb: 3, ..resize("a", 0, false) };
    let answer = rig.client.resize_volume(grown).await.unwrap().into_inner();
    assert_eq!((answer.previous_size_gb, answer.previous_size_bytes), (2, 2 << 30));
    assert_eq!(answer.volume.unwrap().size_gb, 3);
    let odd = rig.client.create_volume(create("b", (1 << 30) + 512)).await.unwrap().into_inner();
    assert_eq!(odd.volume.unwrap().size_gb, 2);
    let pools = rig.client.list_pools(v1::ListPoolsRequest {}).await.unwrap().into_inner().pools;
    assert_eq!((pools[0].size_gb, pools[0].free_gb, pools[0].size_bytes), (1, 0, 64 * MIB));
}

#[tokio::test]
async fn an_unknown_pool_or_volume_is_named() {
    let mut rig = Rig::new().await;
    let asked = v1::CreateVolumeRequest { pool: "p".to_owned(), ..create("a", MIB) };
    refused(rig.client.create_volume(asked).await, Code::NotFound, "pool", "p");
    let asked = v1::GetPoolRequest { name: "p".to_owned() };
    refused(rig.client.get_pool(asked).await, Code::NotFound, "pool", "p");
    let asked = v1::StatsRequest { pool: "p".to_owned(), ..Default::default() };
    refused(rig.client.stats(asked).await, Code::NotFound, "pool", "p");
    let asked = v1::EventsRequest { pool: "p".to_owned(), ..Default::default() };
    refused(rig.client.events(asked).await, Code::NotFound, "pool", "p");
    let asked = v1::DeleteVolumeRequest { pool: "p".to_owned(), ..delete("a", true) };
    refused(rig.client.delete_volume(asked).await, Code::NotFound, "pool", "p");
    refused(rig.client.attach_volume(attach("a")).await, Code::NotFound, "volume", "a");
    refused(rig.client.detach_volume(detach("a", true)).await, Code::NotFound, "volume", "a");
    refused(rig.client.resize_volume(resize("a", MIB, true)).await, Code::NotFound, "volume", "a");
    let asked = v1::GetVolumeRequest { name: "a".to_owned(), ..Default::default() };
    refused(rig.client.get_volume(asked).await, Code::NotFound, "volume", "a");
}

#[tokio::test]
async fn attaching_and_detaching_can_be_repeated() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    let first = rig.client.attach_volume(attach("a")).await.unwrap().into_inner();
    let volume = first.volume.unwrap();
    assert!(first.changed && volume.attached);
    assert_eq!(volume.nbd_uri, "nbd+unix:///a?socket=/run/n.sock");
    let again = rig.client.attach_volume(attach("a")).await.unwrap().into_inner();
    assert!(!again.changed && again.volume == Some(volume));
    let other = v1::AttachVolumeRequest { read_only: true, ..attach("a") };
    let error = Error::from_status(&rig.client.attach_volume(other).await.unwrap_err());
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert_eq!(error.to_string(), "volume a is attached for writing already: detach it first");
    let gone = rig.client.detach_volume(detach("a", false)).await.unwrap().into_inner();
    assert!(gone.changed && !gone.volume.unwrap().attached);
    let again = rig.client.detach_volume(detach("a", false)).await.unwrap().into_inner();
    assert!(!again.changed);
}

#[tokio::test]
async fn connected_clients_keep_a_volume_attached_unless_forced() {
    let mut rig = Rig::new().await;
    let made = rig.client.create_volume(create("a", MIB)).await.unwrap().into_inner();
    rig.client.attach_volume(attach("a")).await.unwrap();
    rig.connect(made.volume.unwrap().id);
    let asked = v1::ListConnectionsRequest::default();
    let list = rig.client.list_connections(asked).await.unwrap().into_inner().connections;
    assert_eq!((list[0].pool.as_str(), list[0].volume.as_str()), ("default", "a"));
    let error =
        Error::from_status(&rig.client.detach_volume(detach("a", false)).await.unwrap_err());
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert_eq!(error.to_string(), "volume a has 1 connection: end it first, or use force");
    let answer = rig.client.detach_volume(detach("a", true)).await.unwrap().into_inner();
    assert_eq!((answer.changed, answer.closed_connections), (true, 1));
    assert!(rig.data_path.connections().is_empty());
}

#[tokio::test]
async fn an_attached_volume_is_deleted_only_by_force() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    rig.client.attach_volume(attach("a")).await.unwrap();
    let answer = rig.client.delete_volume(delete("a", false)).await;
    let error = refused(
        answer,
        Code::FailedPrecondition,
        "volume a",
        "is attached: detach it first, or use force",
    );
    assert_eq!(error.exit_code(), 7);
    assert_eq!(rig.volumes().await.len(), 1);
    let answer = rig.client.delete_volume(delete("a", true)).await.unwrap().into_inner();
    assert!(answer.changed && answer.detached);
    assert_eq!(answer.volume.unwrap().size_bytes, MIB);
    let again = rig.client.delete_volume(delete("a", true)).await.unwrap().into_inner();
    assert!(!again.changed && again.volume.is_none());
    assert!(rig.volumes().await.is_empty());
}

#[tokio::test]
async fn a_smaller_size_has_to_be_meant() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", 2 * MIB)).await.unwrap();
    let answer = rig.client.resize_volume(resize("a", MIB, false)).await;
    let error = Error::from_status(&answer.unwrap_err());
    assert_eq!(error.kind(), ErrorKind::InUse);
    let text = error.to_string();
    assert!(text.starts_with("volume a has 2097152 bytes: a size of 1048576 discards"), "{text}");
    let same = rig.client.resize_volume(resize("a", 2 * MIB, false)).await.unwrap().into_inner();
    assert!(!same.changed && same.previous_size_bytes == 2 * MIB);
    let less = rig.client.resize_volume(resize("a", MIB, true)).await.unwrap().into_inner();
    assert!(less.changed && less.previous_size_bytes == 2 * MIB);
    assert_eq!(less.volume.unwrap().size_bytes, MIB);
}

#[tokio::test]
async fn clients_find_attached_volumes_and_no_others() {
    let mut rig = Rig::new().await;
    rig.control.open_pool(&memory_pool("other")).await.unwrap();
    let control = rig.control.clone();
    assert_eq!(control.open("").await.unwrap_err(), ExportError::Unknown);
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    assert_eq!(control.open("a").await.unwrap_err(), ExportError::Unknown);
    rig.client.attach_volume(attach("a")).await.unwrap();
    for name in ["a", "default/a", ""] {
        let found = control.open(name).await.unwrap();
        assert_eq!((found.info.name.as_str(), found.info.size), ("a", 1 << 20));
        assert_eq!((found.info.block_size, found.info.read_only), (512, false));
    }
    let other = v1::CreateVolumeRequest { pool: "other".to_owned(), ..create("a", 2 * MIB) };
    rig.client.create_volume(other).await.unwrap();
    let other =
        v1::AttachVolumeRequest { pool: "other".to_owned(), read_only: true, ..attach("a") };
    let answer = rig.client.attach_volume(other).await.unwrap().into_inner();
    assert_eq!(answer.volume.unwrap().nbd_uri, "nbd+unix:///other/a?socket=/run/n.sock");
    let found = control.open("other/a").await.unwrap();
    assert_eq!((found.info.size, found.info.read_only), (2 << 20, true));
    assert_eq!(control.open("").await.unwrap_err(), ExportError::Unknown);
    let names: Vec<_> = control.list().await.into_iter().map(|info| info.name).collect();
    assert_eq!(names, ["a", "other/a"]);
    let target = control.open("a").await.unwrap().volume;
    rig.client.detach_volume(detach("a", false)).await.unwrap();
    target.if_attached(|_| panic!("a client came after the volume was detached"));
    assert_eq!(control.open("a").await.unwrap_err(), ExportError::Unknown);
}

#[tokio::test]
async fn attachments_come_back_and_those_of_lost_volumes_do_not() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    rig.client.attach_volume(attach("a")).await.unwrap();
    let text = std::fs::read_to_string(rig.folder.path().join("attachments.json")).unwrap();
    // Older versions did not write which pool it was.
    let (head, rest) = text.split_once(r#""pool_id":""#).unwrap();
    let (_, tail) = rest.split_once("\",").unwrap();
    let old = format!("{head}{tail}");
    for (text, is_same_pool) in [(text, false), (old, true)] {
        let again = folder();
        std::fs::write(again.path().join("attachments.json"), text).unwrap();
        rig = Rig::without_pool(again).await;
        assert_eq!(rig.control.forget_attachments_of_missing_volumes().await.unwrap(), 0);
        assert!(matches!(rig.control.open("a").await, Err(ExportError::Refused(_))));
        rig.control.open_pool(&memory_pool("default")).await.unwrap();
        rig.client.create_volume(create("a", MIB)).await.unwrap();
        assert_eq!(rig.control.open("a").await.is_ok(), is_same_pool);
    }
    rig.client.delete_volume(delete("a", true)).await.unwrap();
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    assert_eq!(rig.control.open("a").await.unwrap_err(), ExportError::Unknown);
}

#[tokio::test]
async fn a_pool_that_fails_leaves_the_others_alone() {
    let mut rig = Rig::new().await;
    *rig.data_path.refuses_pools.lock() = Some("are tired".to_owned());
    let error = rig.control.open_pool(&memory_pool("bad")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    rig.control.set_ready();
    assert!(!rig.control.is_ready());
    let pools = rig.client.list_pools(v1::ListPoolsRequest {}).await.unwrap().into_inner().pools;
    let states: Vec<_> = pools.iter().map(|pool| (pool.name.as_str(), pool.state())).collect();
    assert_eq!(states, [("default", v1::PoolState::Open), ("bad", v1::PoolState::Failed)]);
    assert!(pools[1].failure.contains("are tired"));
    let asked = v1::CreateVolumeRequest { pool: "bad".to_owned(), ..create("a", MIB) };
    let error = Error::from_status(&rig.client.create_volume(asked).await.unwrap_err());
    assert!(error.to_string().starts_with("pool bad is not served: "), "{error}");
    rig.client.create_volume(create("a", MIB)).await.unwrap();
}

#[tokio::test]
async fn pools_are_made_at_run_time_and_remembered() {
    let mut rig = Rig::new().await;
    let path = rig.folder.path().join("fast.pool");
    let asked = v1::CreatePoolRequest {
        name: "fast".to_owned(),
        path: path.display().to_string(),
        size_bytes: 64 * MIB,
        volatile: true,
        ..Default::default()
    };
    let made = rig.client.create_pool(asked.clone()).await.unwrap().into_inner();
    assert!(made.changed);
    let pool = made.pool.unwrap();
    assert_eq!((pool.size_bytes, pool.devices.len(), pool.is_default), (64 * MIB, 1, false));
    assert_eq!(pool.id.len(), 32);
    assert!(!rig.client.create_pool(asked.clone()).await.unwrap().into_inner().changed);
    let other = v1::CreatePoolRequest { size_bytes: 65 * MIB, ..asked.clone() };
    let answer = rig.client.create_pool(other).await;
    refused(answer, Code::AlreadyExists, "size in bytes", "68157440");
    let plain = v1::CreatePoolRequest { no_composite: true, ..asked.clone() };
    refused(rig.client.create_pool(plain).await, Code::AlreadyExists, "composite", "false");
    let taken = v1::CreatePoolRequest { name: "slow".to_owned(), ..asked.clone() };
    let error = Error::from_status(&rig.client.create_pool(taken).await.unwrap_err());
    assert!(error.to_string().ends_with("belongs to pool fast"), "{error}");
    let remembered = rig.control.remembered_pools().unwrap();
    assert_eq!((remembered.len(), remembered[0].name.as_str()), (1, "fast"));
    assert_eq!(remembered[0].devices[0].path, path);
    for (asked, field) in [
        (v1::CreatePoolRequest { path: "x".to_owned(), ..asked.clone() }, "path"),
        (v1::CreatePoolRequest { name: "a/b".to_owned(), ..asked.clone() }, "name"),
        (v1::CreatePoolRequest { extent_size: 3, ..asked.clone() }, "extent_size"),
        (v1::CreatePoolRequest { size_gb: u64::MAX, size_bytes: 0, ..asked.clone() }, "size_gb"),
    ] {
        let error = Error::from_status(&rig.client.create_pool(asked).await.unwrap_err());
        assert_eq!((error.kind(), error.detail().field.as_str()), (ErrorKind::Invalid, field));
    }
    rig.control.close_pools().await.unwrap();
}

#[tokio::test]
async fn extents_add_up() {
    let mut rig = Rig::new().await;
    let mut stream =
        rig.client.pool_extents(v1::PoolExtentsRequest::default()).await.unwrap().into_inner();
    let (mut counted, mut total) = (0, 0);
    while let Some(message) = stream.message().await.unwrap() {
        assert_eq!(message.extent_size, 64 << 10);
        counted += message.runs.iter().map(|run| run.count).sum::<u64>();
        total = message.total_count;
    }
    assert_eq!((counted, total), (1024, 1024));
}

#[tokio::test]
async fn changes_are_published_as_events() {
    let mut rig = Rig::new().await;
    let asked = v1::EventsRequest::default();
    let mut events = rig.client.events(asked).await.unwrap().into_inner();
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    rig.client.attach_volume(attach("a")).await.unwrap();
    rig.client.resize_volume(resize("a", 2 * MIB, false)).await.unwrap();
    rig.client.delete_volume(delete("a", true)).await.unwrap();
    let mut kinds = Vec::new();
    while let Some(event) = events.message().await.unwrap() {
        assert!(event.time_unix_ms > 0 && event.missed == 0);
        kinds.push(event.kind());
        if event.kind() == EventKind::VolumeReleased {
            rig.control.stop();
        }
    }
    let expected = [
        EventKind::VolumeCreated,
        EventKind::VolumeAttached,
        EventKind::VolumeResized,
        EventKind::VolumeDetached,
        EventKind::VolumeDeleted,
        EventKind::VolumeReleased,
        EventKind::Stopping,
    ];
    assert_eq!(kinds, expected);
}

#[tokio::test]
async fn counters_are_summed_by_volume() {
    let mut rig = Rig::new().await;
    let stats = |worker| {
        let (pool, volume) = ("default".to_owned().into(), "a".to_owned().into());
        let stats = VolumeStats { pool, volume, worker, ..Default::default() };
        stats.op(Op::Read).0.add(2);
        Arc::new(stats)
    };
    *rig.data_path.volumes.lock() = vec![stats(0), stats(1)];
    let answer = rig.client.stats(v1::StatsRequest::default()).await.unwrap().into_inner();
    assert_eq!(answer.volumes.len(), 1);
    assert_eq!(answer.volumes[0].operations[0].count, 4);
    assert_eq!(answer.pools[0].pool, "default");
    assert!(answer.time_ns > 0 && answer.resident_bytes > 0);
}

#[tokio::test]
async fn the_daemon_says_who_it_is() {
    let mut rig = Rig::new().await;
    let answer = rig.client.version(v1::VersionRequest {}).await.unwrap().into_inner();
    assert_eq!(answer.version, env!("CARGO_PKG_VERSION"));
    assert_eq!(answer.pid, std::process::id());
    assert_eq!(answer.nbd_addresses, ["nbd+unix:///?socket=/run/n.sock"]);
    assert!(!answer.ready);
    rig.control.set_ready();
    let answer = rig.client.version(v1::VersionRequest {}).await.unwrap().into_inner();
    assert!(answer.ready);
}

#[tokio::test]
async fn a_volume_detached_meanwhile_is_not_recovered() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    let id = rig.volumes().await[0].id;
    let ublk = Some(UblkRecord { queues: 1, depth: 32, ..UblkRecord::default() });
    let (pool, volume) = ("default".to_owned(), "a".to_owned());
    let record = Record { pool, volume, id, ublk, ..Record::default() };
    // As it was looked up before it was detached.
    assert!(!rig.control.recover_one(record.clone()).await.unwrap());
    rig.control.0.attachments.add(record.clone()).await.unwrap();
    assert!(!rig.control.recover_one(record).await.unwrap());
    let mut events = rig.control.events().reader(true, String::new());
    rig.control.events().close();
    let mut failures = 0;
    while let Some(event) = events.next().await {
        failures += usize::from(event.kind() == EventKind::DeviceFailed);
    }
    // One was tried, where there is no driver: the one that is attached.
    assert_eq!(failures, 1);
}
