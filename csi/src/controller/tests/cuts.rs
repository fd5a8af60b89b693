//! Calls that are cut: the daemon dies before or after any call of theirs, and the plugin too. The
//! repeat completes the interrupted call, with the same final state as an uninterrupted one.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use tonic::{Code, Request, Status};

use super::*;
use crate::testing::{MIB, Rig};

type Work<'a> = Pin<Box<dyn Future<Output = Result<(), Status>> + Send + 'a>>;

const CLASSES: &str = "[[class]]\nname = 'thin'\ndefault = true\n\
                       [[class]]\nname = 'thick'\nkind = 'thick'\n";

fn rig() -> Rig {
    Rig::new(&[("default", 1024 * MIB)], CLASSES)
}

/// A volume of 8 MiB with a snapshot.
async fn prepare(rig: &Rig) {
    let service = rig.controller();
    make(&service, volume_request("source", 8 * MIB)).await;
    snapshot(&service, "default/csi.source", "kept").await;
}

/// Does `work` uncut, and cut at each of the daemon's calls. Gives how many cuts there were.
async fn cut_everywhere(work: for<'a> fn(&'a Service) -> Work<'a>) -> u32 {
    let uncut = rig();
    prepare(&uncut).await;
    work(&uncut.controller()).await.unwrap();
    let mut cuts = 0;
    for done in [false, true] {
        for plugin_dies in [false, true] {
            for call in 1.. {
                let rig = rig();
                prepare(&rig).await;
                let service = rig.controller();
                rig.fake.die_at(call, done);
                let answer = work(&service).await;
                if !rig.fake.heal() {
                    // It ended before its last call: there is nothing more to cut.
                    answer.unwrap();
                    break;
                }
                cuts += 1;
                if let Err(status) = answer {
                    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
                }
                let service = if plugin_dies { rig.controller() } else { service };
                work(&service).await.unwrap();
                assert_eq!(rig.state(), uncut.state(), "cut at call {call}, done: {done}");
                assert_eq!(service.plugin.locks.count(), 0);
            }
        }
    }
    cuts
}

fn create(service: &Service, request: proto::CreateVolumeRequest) -> Work<'_> {
    Box::pin(async move { service.create_volume(Request::new(request)).await.map(|_| ()) })
}

#[tokio::test]
async fn a_creation_that_is_cut_anywhere_is_finished_by_its_repeat() {
    let cuts = cut_everywhere(|service| create(service, volume_request("new", 8 * MIB))).await;
    assert!(cuts >= 16, "{cuts}");
    let cuts = cut_everywhere(|service| {
        let parameters = map(&[("csi.blockd.io/device-class", "thick")]);
        let mutable_parameters = map(&[("csi.blockd.io/iops", "100")]);
        create(
            service,
            proto::CreateVolumeRequest {
                parameters,
                mutable_parameters,
                ..volume_request("new", 8 * MIB)
            },
        )
    })
    .await;
    assert!(cuts >= 20, "{cuts}");
}

#[tokio::test]
async fn a_clone_that_is_cut_anywhere_is_finished_and_leaves_no_snapshot() {
    let cuts = cut_everywhere(|service| {
        let volume_content_source = from_snapshot("default/csi.source@kept");
        let request = volume_request("new", 16 * MIB);
        create(service, proto::CreateVolumeRequest { volume_content_source, ..request })
    })
    .await;
    assert!(cuts >= 20, "{cuts}");
    let cuts = cut_everywhere(|service| {
        let volume_content_source = from_volume("default/csi.source");
        let parameters = map(&[("csi.blockd.io/device-class", "thick")]);
        let request = volume_request("new", 16 * MIB);
        create(service, proto::CreateVolumeRequest { volume_content_source, parameters, ..request })
    })
    .await;
    assert!(cuts >= 32, "{cuts}");
}

#[tokio::test]
async fn every_other_change_that_is_cut_anywhere_is_finished_by_its_repeat() {
    let works: [for<'a> fn(&'a Service) -> Work<'a>; 5] = [
        |service| {
            Box::pin(async {
                let request = proto::CreateSnapshotRequest {
                    source_volume_id: "default/csi.source".to_owned(),
                    name: "new".to_owned(),
                    ..Default::default()
                };
                service.create_snapshot(Request::new(request)).await.map(|_| ())
            })
        },
        |service| Box::pin(delete(service, "default/csi.source")),
        |service| Box::pin(delete_snapshot(service, "default/csi.source@kept")),
        |service| {
            Box::pin(async {
                let request = proto::ControllerExpandVolumeRequest {
                    volume_id: "default/csi.source".to_owned(),
                    capacity_range: range(16 * MIB, 0),
                    ..Default::default()
                };
                service.controller_expand_volume(Request::new(request)).await.map(|_| ())
            })
        },
        |service| {
            Box::pin(async {
                let request = proto::ControllerModifyVolumeRequest {
                    volume_id: "default/csi.source".to_owned(),
                    mutable_parameters: map(&[("csi.blockd.io/bandwidth", "1Mi")]),
                    ..Default::default()
                };
                service.controller_modify_volume(Request::new(request)).await.map(|_| ())
            })
        },
    ];
    for work in works {
        let cuts = cut_everywhere(work).await;
        assert!(cuts >= 8, "{cuts}");
    }
}

#[tokio::test]
async fn leftovers_of_a_clone_are_removed_when_the_plugin_starts_or_its_source_is_deleted() {
    let rig = rig();
    prepare(&rig).await;
    for goes_with_source in [false, true] {
        let service = rig.controller();
        let volume_content_source = from_volume("default/csi.source");
        let request =
            proto::CreateVolumeRequest { volume_content_source, ..volume_request("new", 0) };
        rig.fake.take_log();
        for call in 1.. {
            rig.fake.die_at(call, true);
            service.create_volume(Request::new(request.clone())).await.unwrap_err();
            rig.fake.heal();
            if rig.fake.take_log().last() == Some(&"create_snapshots") {
                break;
            }
        }
        let left = |rig: &Rig| {
            rig.fake.volumes().into_iter().filter(|one| one.name.contains("@~clone-")).count()
        };
        assert_eq!(left(&rig), 1);
        if goes_with_source {
            delete(&service, "default/csi.source").await.unwrap();
        } else {
            super::super::sweep_once(rig.plugin()).await;
        }
        assert_eq!(left(&rig), 0);
    }
}

#[tokio::test]
async fn a_daemon_that_is_away_is_unavailable_and_found_when_it_is_back() {
    let rig = rig();
    let service = rig.controller();
    rig.fake.die_at(1, false);
    for _ in 0..3 {
        let answer = service.create_volume(Request::new(volume_request("a", 8 * MIB))).await;
        let (code, text) = refused(answer);
        assert_eq!(code, Code::Unavailable);
        assert!(text.starts_with("blockd at "), "{text}");
    }
    rig.fake.heal();
    make(&service, volume_request("a", 8 * MIB)).await;
}

#[tokio::test]
async fn a_caller_whose_time_is_over_tears_nothing_apart() {
    let rig = rig();
    let service = rig.controller();
    rig.fake.delay(Duration::from_millis(150));
    let mut request = Request::new(volume_request("a", 8 * MIB));
    request.set_timeout(Duration::from_millis(100));
    let (code, text) = refused(service.create_volume(request).await);
    assert_eq!(code, Code::DeadlineExceeded);
    assert_eq!(text, "not done within 100 ms; it goes on");
    // The lock is held for as long as it goes on.
    let (code, _) =
        refused(service.create_volume(Request::new(volume_request("a", 8 * MIB))).await);
    assert_eq!(code, Code::Aborted);
    while service.plugin.working() > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(rig.fake.volume("default", "csi.a").is_some());
    rig.fake.delay(Duration::ZERO);
    make(&service, volume_request("a", 8 * MIB)).await;
    assert_eq!(rig.fake.volumes().len(), 1);
}

#[tokio::test]
async fn two_hundred_calls_for_one_volume_make_one_volume() {
    let rig = rig();
    let service = rig.controller();
    let calls: Vec<_> = (0..200)
        .map(|_| {
            let service = service.clone();
            tokio::spawn(async move {
                service.create_volume(Request::new(volume_request("a", 8 * MIB))).await.map(|_| ())
            })
        })
        .collect();
    let mut done = 0;
    for call in calls {
        match call.await.unwrap() {
            Ok(()) => done += 1,
            Err(status) => assert_eq!(status.code(), Code::Aborted, "{status:?}"),
        }
    }
    assert!(done >= 1);
    assert_eq!(rig.fake.volumes().len(), 1);
    assert_eq!(service.plugin.locks.count(), 0);
}
