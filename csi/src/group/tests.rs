//! The group controller on a daemon that keeps volumes in memory.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;

use tonic::Code;

use super::*;
use crate::controller::Service as Volumes;
use crate::ids::MAX_GROUP;
use crate::proto::controller_server::Controller as _;
use crate::proto::volume_capability::access_mode::Mode;
use crate::proto::volume_capability::{AccessMode, AccessType, BlockVolume};
use crate::proto::volume_content_source::{SnapshotSource, Type};
use crate::testing::{MIB, Rig};

type Group = proto::VolumeGroupSnapshot;

const TWO_POOLS: &str = "[[class]]\nname = 'a'\npool = 'one'\ndefault = true\n\
                         [[class]]\nname = 'b'\npool = 'two'\n";

/// Both services of one plugin.
struct Both {
    groups: Service,
    volumes: Volumes,
}

fn both(rig: &Rig) -> Both {
    let plugin = rig.plugin();
    Both { groups: Service::new(Arc::clone(&plugin)), volumes: Volumes::new(plugin) }
}

fn strings(list: &[&str]) -> Vec<String> {
    list.iter().map(|one| (*one).to_owned()).collect()
}

fn group_request(name: &str, sources: &[&str]) -> proto::CreateVolumeGroupSnapshotRequest {
    proto::CreateVolumeGroupSnapshotRequest {
        name: name.to_owned(),
        source_volume_ids: strings(sources),
        ..Default::default()
    }
}

fn ids(group: &Group) -> Vec<String> {
    group.snapshots.iter().map(|one| one.snapshot_id.clone()).collect()
}

impl Both {
    async fn volume(&self, name: &str, class: &str) -> String {
        let mode = AccessMode { mode: Mode::SingleNodeWriter.into() };
        let mut request = proto::CreateVolumeRequest {
            name: name.to_owned(),
            capacity_range: Some(proto::CapacityRange { required_bytes: 8 * MIB, limit_bytes: 0 }),
            volume_capabilities: vec![proto::VolumeCapability {
                access_mode: Some(mode),
                access_type: Some(AccessType::Block(BlockVolume {})),
            }],
            ..Default::default()
        };
        if !class.is_empty() {
            let pair = ("csi.blockd.io/device-class".to_owned(), class.to_owned());
            request.parameters.extend([pair]);
        }
        let answer = self.volumes.create_volume(Request::new(request)).await.unwrap();
        answer.into_inner().volume.unwrap().volume_id
    }

    async fn create(&self, name: &str, sources: &[&str]) -> Result<Group, Status> {
        let request = Request::new(group_request(name, sources));
        let answer = self.groups.create_volume_group_snapshot(request).await?;
        Ok(answer.into_inner().group_snapshot.unwrap())
    }

    async fn get(&self, id: &str, snapshots: &[String]) -> Result<Group, Status> {
        let request = proto::GetVolumeGroupSnapshotRequest {
            group_snapshot_id: id.to_owned(),
            snapshot_ids: snapshots.to_vec(),
            ..Default::default()
        };
        let answer = self.groups.get_volume_group_snapshot(Request::new(request)).await?;
        Ok(answer.into_inner().group_snapshot.unwrap())
    }

    async fn delete(&self, id: &str, snapshots: &[String]) -> Result<(), Status> {
        let request = proto::DeleteVolumeGroupSnapshotRequest {
            group_snapshot_id: id.to_owned(),
            snapshot_ids: snapshots.to_vec(),
            ..Default::default()
        };
        self.groups.delete_volume_group_snapshot(Request::new(request)).await.map(|_| ())
    }

    async fn delete_snapshot(&self, id: &str) -> Result<(), Status> {
        let request =
            proto::DeleteSnapshotRequest { snapshot_id: id.to_owned(), ..Default::default() };
        self.volumes.delete_snapshot(Request::new(request)).await.map(|_| ())
    }

    async fn listed(&self) -> Vec<proto::Snapshot> {
        let request = Request::new(proto::ListSnapshotsRequest::default());
        let answer = self.volumes.list_snapshots(request).await.unwrap().into_inner();
        answer.entries.into_iter().map(|entry| entry.snapshot.unwrap()).collect()
    }
}

fn refused<T: std::fmt::Debug>(answer: Result<T, Status>, code: Code) -> String {
    let status = answer.unwrap_err();
    assert_eq!(status.code(), code, "{status:?}");
    assert!(status.details().is_empty() && !status.message().is_empty());
    status.message().to_owned()
}

#[tokio::test]
async fn a_group_is_one_call_of_the_daemon_and_its_snapshots_say_that_they_are_of_it() {
    let rig = Rig::simple();
    let both = both(&rig);
    let (a, b) = (both.volume("a", "").await, both.volume("b", "").await);
    rig.fake.take_log();
    let group = both.create("nightly", &[&b, &a]).await.unwrap();
    let log = rig.fake.take_log();
    assert_eq!(log.iter().filter(|call| **call == "create_snapshots").count(), 1, "{log:?}");
    assert!(group.ready_to_use && group.creation_time.is_some());
    let sources: Vec<&str> =
        group.snapshots.iter().map(|one| one.source_volume_id.as_str()).collect();
    assert_eq!(sources, [a.as_str(), b.as_str()]);
    let is_member = |one: &proto::Snapshot| one.group_snapshot_id == group.group_snapshot_id;
    assert!(group.snapshots.iter().all(is_member));
    assert_eq!(both.listed().await, group.snapshots);
    assert_eq!(both.get(&group.group_snapshot_id, &ids(&group)).await.unwrap(), group);
    // The same in any order, and also when a source is gone.
    assert_eq!(both.create("nightly", &[&a, &b]).await.unwrap(), group);
    let gone = proto::DeleteVolumeRequest { volume_id: a.clone(), ..Default::default() };
    both.volumes.delete_volume(Request::new(gone)).await.unwrap();
    assert_eq!(both.create("nightly", &[&a, &b]).await.unwrap(), group);
    both.delete(&group.group_snapshot_id, &ids(&group)).await.unwrap();
    both.delete(&group.group_snapshot_id, &ids(&group)).await.unwrap();
    assert_eq!(both.listed().await, []);
    refused(both.get(&group.group_snapshot_id, &ids(&group)).await, Code::NotFound);
}

#[tokio::test]
async fn a_name_is_that_of_one_group() {
    let rig = Rig::new(&[("one", 1024 * MIB), ("two", 1024 * MIB)], TWO_POOLS);
    let both = both(&rig);
    let (a, b) = (both.volume("a", "a").await, both.volume("b", "a").await);
    let c = both.volume("c", "b").await;
    let group = both.create("g", &[&a, &b]).await.unwrap();
    for others in [&[a.as_str()][..], &[&b], &[&a, &c], &[&c], &[&a, "one/csi.none"], &[&a, "x"]] {
        let text = refused(both.create("g", others).await, Code::AlreadyExists);
        assert!(text.contains("source_volume_ids"), "{text}");
    }
    // A user's snapshot of the same name is something else.
    let request = proto::CreateSnapshotRequest {
        source_volume_id: a.clone(),
        name: "g".to_owned(),
        ..Default::default()
    };
    let alone = both.volumes.create_snapshot(Request::new(request)).await.unwrap();
    let alone = alone.into_inner().snapshot.unwrap();
    assert_eq!(alone.group_snapshot_id, "");
    assert_eq!(both.create("g", &[&a, &b]).await.unwrap(), group);
    both.delete_snapshot(&alone.snapshot_id).await.unwrap();
    both.delete(&group.group_snapshot_id, &ids(&group)).await.unwrap();
    both.create("g", &[&c]).await.unwrap();
}

#[tokio::test]
async fn members_that_are_missing_foreign_twice_or_apart_are_refused_and_nothing_is_made() {
    let rig = Rig::new(&[("one", 1024 * MIB), ("two", 1024 * MIB)], TWO_POOLS);
    let both = both(&rig);
    let (a, b) = (both.volume("a", "a").await, both.volume("b", "b").await);
    rig.fake.add("one", "somebodys", 8 * MIB);
    let before = rig.state();
    refused(both.create("g", &[]).await, Code::InvalidArgument);
    refused(both.create("", &[&a]).await, Code::InvalidArgument);
    refused(both.create("g\u{1}", &[&a]).await, Code::InvalidArgument);
    refused(both.create(&"g".repeat(129), &[&a]).await, Code::InvalidArgument);
    refused(both.create("g", &[&a, ""]).await, Code::InvalidArgument);
    refused(both.create("g", &[&a, &"x".repeat(129)]).await, Code::InvalidArgument);
    let text = refused(both.create("g", &[&a, &a]).await, Code::InvalidArgument);
    assert_eq!(text, "source_volume_ids is one/csi.a: must be in it once");
    for absent in ["one/csi.none", "one/somebodys", "three/csi.a", "one/csi.a@s", "x", "🦀"] {
        let text = refused(both.create("g", &[&a, absent]).await, Code::NotFound);
        assert_eq!(text, format!("volume {absent} does not exist"));
    }
    let text = refused(both.create("g", &[&a, &b]).await, Code::FailedPrecondition);
    assert!(text.contains("pools one and two"), "{text}");
    let many: Vec<String> = (0..=MAX_GROUP).map(|number| format!("one/csi.{number}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let text = refused(both.create("g", &many).await, Code::InvalidArgument);
    assert!(text.contains("17 entries long: must be at most 16"), "{text}");
    let mut unknown = group_request("g", &[&a]);
    unknown.parameters.insert("speed".to_owned(), "high".to_owned());
    let answer = both.groups.create_volume_group_snapshot(Request::new(unknown)).await;
    assert!(refused(answer.map(|_| ()), Code::InvalidArgument).contains("speed"));
    let mut long = group_request("g", &[&a]);
    long.secrets.insert("k".to_owned(), "v".repeat(4096));
    let answer = both.groups.create_volume_group_snapshot(Request::new(long)).await;
    let text = refused(answer.map(|_| ()), Code::InvalidArgument);
    assert!(!text.contains("vvv"), "{text}");
    assert_eq!(rig.state(), before);
}

#[tokio::test]
async fn a_group_of_as_many_as_there_may_be_is_made() {
    let rig = Rig::simple();
    let both = both(&rig);
    let mut volumes = Vec::new();
    for number in 0..MAX_GROUP {
        volumes.push(both.volume(&format!("v{number}"), "").await);
    }
    let volumes: Vec<&str> = volumes.iter().map(String::as_str).collect();
    let group = both.create(&"ä".repeat(128), &volumes).await.unwrap();
    let different: BTreeSet<String> = ids(&group).into_iter().collect();
    assert_eq!(different.len(), MAX_GROUP);
    assert!(group.group_snapshot_id.len() <= 128);
}

#[tokio::test]
async fn a_list_that_is_not_the_groups_is_refused_and_nothing_is_deleted() {
    let rig = Rig::simple();
    let both = both(&rig);
    let (a, b) = (both.volume("a", "").await, both.volume("b", "").await);
    let group = both.create("g", &[&a, &b]).await.unwrap();
    let other = both.create("h", &[&a]).await.unwrap();
    let (id, its) = (&group.group_snapshot_id, ids(&group));
    let before = rig.state();
    let never = its[0].replace("csi.a@", "csi.c@");
    let lists: [&[&str]; 7] = [
        &[],
        &[&its[0]],
        &[&its[0], &its[0]],
        &[&its[0], &its[1], &other.snapshots[0].snapshot_id],
        &[&its[0], "x"],
        &[&its[0], &its[1], &never],
        &[&its[0], &never],
    ];
    for list in lists {
        refused(both.delete(id, &strings(list)).await, Code::InvalidArgument);
        refused(both.get(id, &strings(list)).await, Code::InvalidArgument);
    }
    for unknown in ["default/csi.~g0", "x", "a/b", &id.replace("csi.~g1", "csi.~g2")] {
        both.delete(unknown, &[]).await.unwrap();
        both.delete(unknown, &its).await.unwrap();
        refused(both.get(unknown, &its).await, Code::NotFound);
    }
    for wrong in ["", &"x".repeat(129)] {
        refused(both.delete(wrong, &its).await, Code::InvalidArgument);
        refused(both.get(wrong, &its).await, Code::InvalidArgument);
    }
    let text = refused(both.delete_snapshot(&its[0]).await, Code::InvalidArgument);
    assert!(text.contains(id.as_str()), "{text}");
    assert_eq!(rig.state(), before);
}

#[tokio::test]
async fn a_group_in_use_is_deleted_as_a_whole_or_not_at_all() {
    let rig = Rig::simple();
    let both = both(&rig);
    let (a, b) = (both.volume("a", "").await, both.volume("b", "").await);
    let group = both.create("g", &[&a, &b]).await.unwrap();
    let before = rig.state();
    let name = group.snapshots[1].snapshot_id.strip_prefix("default/").unwrap();
    rig.fake.change("default", name, |one| one.attached = true);
    let id = &group.group_snapshot_id;
    let text = refused(both.delete(id, &ids(&group)).await, Code::FailedPrecondition);
    assert!(text.contains(name), "{text}");
    assert_eq!(rig.state(), before);
    rig.fake.change("default", name, |one| one.attached = false);
    both.delete(id, &ids(&group)).await.unwrap();
}

#[tokio::test]
async fn a_group_that_is_half_deleted_is_none_and_its_deletion_is_finished() {
    let rig = Rig::simple();
    let both = both(&rig);
    let (a, b) = (both.volume("a", "").await, both.volume("b", "").await);
    let group = both.create("g", &[&a, &b]).await.unwrap();
    let (id, its) = (&group.group_snapshot_id, ids(&group));
    // Its calls are two lists and a deletion of each.
    rig.fake.die_at(3, true);
    refused(both.delete(id, &its).await, Code::Unavailable);
    assert!(rig.fake.heal());
    assert_eq!(both.listed().await.len(), 1);
    let text = refused(both.get(id, &its).await, Code::NotFound);
    assert!(text.contains("1 of 2 snapshots are left"), "{text}");
    let text = refused(both.create("g", &[&a, &b]).await, Code::AlreadyExists);
    assert!(text.contains("1 of 2"), "{text}");
    refused(both.delete_snapshot(&its[1]).await, Code::InvalidArgument);
    refused(both.delete(id, &its[1..]).await, Code::InvalidArgument);
    both.delete(id, &its).await.unwrap();
    assert_eq!(both.listed().await, []);
    both.create("g", &[&a, &b]).await.unwrap();
}

#[tokio::test]
async fn a_volume_is_made_from_one_of_a_group() {
    let rig = Rig::simple();
    let both = both(&rig);
    let a = both.volume("a", "").await;
    let group = both.create("g", &[&a]).await.unwrap();
    let snapshot_id = group.snapshots[0].snapshot_id.clone();
    let source = Type::Snapshot(SnapshotSource { snapshot_id: snapshot_id.clone() });
    let content = proto::VolumeContentSource { r#type: Some(source) };
    let request = proto::CreateVolumeRequest {
        name: "restored".to_owned(),
        volume_capabilities: vec![proto::VolumeCapability {
            access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
            access_type: Some(AccessType::Block(BlockVolume {})),
        }],
        volume_content_source: Some(content.clone()),
        ..Default::default()
    };
    let made = both.volumes.create_volume(Request::new(request)).await.unwrap().into_inner();
    let made = made.volume.unwrap();
    assert_eq!(made.content_source, Some(content));
    let restored = rig.fake.volume("default", "csi.restored").unwrap();
    assert_eq!(format!("default/{}", restored.origin), snapshot_id);
}

#[tokio::test]
async fn a_group_of_a_pool_that_failed_is_neither_gone_nor_deleted() {
    let rig = Rig::new(&[("one", 1024 * MIB), ("two", 1024 * MIB)], TWO_POOLS);
    let both = both(&rig);
    let (a, b) = (both.volume("a", "b").await, both.volume("b", "b").await);
    let group = both.create("g", &[&a, &b]).await.unwrap();
    let (id, its) = (&group.group_snapshot_id, ids(&group));
    rig.fake.fail_pool("two", true);
    for answer in [both.get(id, &its).await.map(|_| ()), both.delete(id, &its).await] {
        assert_ne!(answer.unwrap_err().code(), Code::NotFound);
    }
    for name in ["g", "other"] {
        assert_ne!(both.create(name, &[&a, &b]).await.unwrap_err().code(), Code::NotFound);
    }
    rig.fake.fail_pool("two", false);
    assert_eq!(both.get(id, &its).await.unwrap(), group);
    both.delete(id, &its).await.unwrap();
    assert_eq!(both.listed().await, []);
}

type Work<'a> = Pin<Box<dyn Future<Output = Result<(), Status>> + Send + 'a>>;

/// Does `work` uncut, and cut at each of the daemon's calls, before and after it.
async fn cut_everywhere(prepared: bool, work: for<'a> fn(&'a Both) -> Work<'a>) -> u32 {
    let prepare = async || {
        let rig = Rig::simple();
        let both = both(&rig);
        let (a, b) = (both.volume("a", "").await, both.volume("b", "").await);
        if prepared {
            both.create("g", &[&a, &b]).await.unwrap();
        }
        (rig, both)
    };
    let (uncut, service) = prepare().await;
    work(&service).await.unwrap();
    let mut cuts = 0;
    for (done, plugin_dies) in [(false, false), (false, true), (true, false), (true, true)] {
        for call in 1.. {
            let (rig, service) = prepare().await;
            rig.fake.die_at(call, done);
            let answer = work(&service).await;
            if !rig.fake.heal() {
                answer.unwrap();
                break;
            }
            cuts += 1;
            refused(answer, Code::Unavailable);
            let service = if plugin_dies { both(&rig) } else { service };
            work(&service).await.unwrap();
            assert_eq!(rig.state(), uncut.state(), "cut at call {call}, done: {done}");
            assert_eq!(service.groups.plugin.locks.count(), 0);
        }
    }
    cuts
}

#[tokio::test]
async fn an_interrupted_call_is_finished_by_its_repeat() {
    let cuts = cut_everywhere(false, |both| {
        Box::pin(async { both.create("g", &["default/csi.a", "default/csi.b"]).await.map(|_| ()) })
    })
    .await;
    assert!(cuts >= 12, "{cuts}");
    let cuts = cut_everywhere(true, |both| {
        Box::pin(async {
            let group = both.groups.plugin.settings.names.group("default", "g", 2);
            let source = |name| both.groups.plugin.settings.names.volume("default", name);
            let its = ["a", "b"].map(|name| group.member(&source(name)).to_string());
            both.delete(&group.to_string(), &its).await
        })
    })
    .await;
    assert!(cuts >= 16, "{cuts}");
}

#[tokio::test]
async fn calls_for_one_group_at_once_make_one() {
    let rig = Rig::simple();
    let both = Arc::new(both(&rig));
    let (a, b) = (both.volume("a", "").await, both.volume("b", "").await);
    rig.fake.delay(std::time::Duration::from_millis(5));
    let calls: Vec<_> = (0..20)
        .map(|_| {
            let (both, a, b) = (Arc::clone(&both), a.clone(), b.clone());
            tokio::spawn(async move { both.create("g", &[&a, &b]).await })
        })
        .collect();
    let mut made = BTreeSet::new();
    for call in calls {
        match call.await.unwrap() {
            Ok(group) => drop(made.insert(group.group_snapshot_id)),
            Err(status) => assert_eq!(status.code(), Code::Aborted, "{status:?}"),
        }
    }
    assert_eq!(made.len(), 1);
    assert_eq!(both.listed().await.len(), 2);
}

#[tokio::test]
async fn snapshots_of_a_group_know_which_of_their_volumes_are_encrypted() {
    let rig = Rig::simple();
    let both = both(&rig);
    let key = "csi.blockd.io/encryption";
    for name in ["csi.a", "csi.b"] {
        rig.fake.add("default", name, 64 * MIB);
    }
    let encrypt = |one: &mut blockd_api::v1::Volume| {
        one.labels.insert(key.to_owned(), "luks2".to_owned());
    };
    rig.fake.change("default", "csi.a", encrypt);
    let sources = ["default/csi.a", "default/csi.b"];
    let sizes =
        |group: &Group| group.snapshots.iter().map(|one| one.size_bytes).collect::<Vec<_>>();
    let made = both.create("g", &sources).await.unwrap();
    assert_eq!(sizes(&made), [48 * MIB, 64 * MIB]);
    // A call that ended before the label was there is completed by its repeat.
    let snapshots: Vec<_> =
        rig.fake.volumes().into_iter().filter(|one| one.name.contains('@')).collect();
    let labelled = snapshots.iter().filter(|one| one.labels.contains_key(key));
    assert_eq!(labelled.count(), 1);
    for one in &snapshots {
        rig.fake.change("default", &one.name, |one| one.labels.clear());
    }
    assert_eq!(both.create("g", &sources).await.unwrap(), made);
}
