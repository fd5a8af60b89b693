//! Conditions of volumes.

use blockd_api::v1::{self, HealthCode, Severity};
use tonic::{Code, Request};

use super::*;
use crate::proto::controller_service_capability::{Type as Kind, rpc};
use crate::testing::{MIB, Rig};

type Listed = Vec<(String, Option<proto::VolumeCondition>)>;

async fn list(service: &Service, max_entries: i32, starting_token: String) -> (Listed, String) {
    let request = proto::ListVolumesRequest { max_entries, starting_token };
    let answer = service.list_volumes(Request::new(request)).await.unwrap().into_inner();
    let listed = answer.entries.into_iter().map(|entry| {
        let condition = entry.status.and_then(|status| status.volume_condition);
        (entry.volume.unwrap().volume_id, condition)
    });
    (listed.collect(), answer.next_token)
}

async fn all(service: &Service) -> Listed {
    list(service, 0, String::new()).await.0
}

async fn get(service: &Service, id: &str) -> Result<proto::ControllerGetVolumeResponse, Status> {
    let request = proto::ControllerGetVolumeRequest { volume_id: id.to_owned() };
    service.controller_get_volume(Request::new(request)).await.map(Response::into_inner)
}

async fn condition_of(service: &Service, id: &str) -> Option<proto::VolumeCondition> {
    get(service, id).await.unwrap().status.unwrap().volume_condition
}

fn cause(code: HealthCode, severity: Severity, message: &str) -> v1::Cause {
    let message = message.to_owned();
    v1::Cause { code: code.into(), severity: severity.into(), message, ..Default::default() }
}

fn said(abnormal: bool, message: &str) -> Option<proto::VolumeCondition> {
    Some(proto::VolumeCondition { abnormal, message: message.to_owned() })
}

async fn offers(service: &Service) -> bool {
    let request = Request::new(proto::ControllerGetCapabilitiesRequest {});
    let answer = service.controller_get_capabilities(request).await.unwrap().into_inner();
    let wanted = i32::from(rpc::Type::VolumeCondition);
    let kinds = answer.capabilities.into_iter().filter_map(|one| one.r#type);
    kinds.map(|Kind::Rpc(rpc)| rpc.r#type).any(|kind| kind == wanted)
}

/// Row: H13.
#[tokio::test]
async fn every_volume_of_a_list_has_its_condition_from_a_single_call() {
    let rig = Rig::simple();
    let service = rig.controller();
    for number in 0..1000 {
        rig.fake.add("default", &format!("csi.v{number:04}"), 8 * MIB);
    }
    let gone = cause(HealthCode::DeviceGone, Severity::Failure, "device sdb is gone");
    rig.fake.set_causes("default", "csi.v0500", &[gone]);
    rig.fake.take_log();
    let listed = all(&service).await;
    let asked = |log: Vec<&str>| log.iter().filter(|name| **name == "health").count();
    assert_eq!(asked(rig.fake.take_log()), 1);
    assert_eq!(listed.len(), 1000);
    for (id, condition) in listed {
        let ill = id.ends_with("0500");
        let expected = said(ill, if ill { "device sdb is gone" } else { "healthy" });
        assert_eq!(condition, expected, "{id}");
    }
    let (page, token) = list(&service, 100, String::new()).await;
    assert_eq!((page.len(), asked(rig.fake.take_log())), (100, 1));
    list(&service, 100, token).await;
    assert_eq!(asked(rig.fake.take_log()), 1);
    rig.fake.set_causes("default", "csi.v0500", &[]);
    assert_eq!(condition_of(&service, "default/csi.v0500").await, said(false, "healthy"));
}

/// Row: H14.
#[tokio::test]
async fn get_volume_has_the_volume_its_status_and_the_same_condition_as_the_list() {
    let rig = Rig::simple();
    let service = rig.controller();
    let id = make(&service, volume_request("a", 8 * MIB)).await.volume_id;
    assert_eq!(condition_of(&service, &id).await, said(false, "healthy"));
    let causes = [
        cause(HealthCode::ProbeLate, Severity::Unknown, "not heard of for 9 s"),
        cause(HealthCode::SpaceLow, Severity::Warning, "3 GiB are left"),
        cause(HealthCode::IoErrors, Severity::Failure, "4 reads failed"),
    ];
    rig.fake.set_causes("default", "csi.a", &causes);
    let expected = said(true, "4 reads failed; 3 GiB are left; unknown: not heard of for 9 s");
    let got = get(&service, &id).await.unwrap();
    assert_eq!(got.volume.unwrap().volume_id, id);
    let status = got.status.unwrap();
    assert_eq!(status.volume_condition, expected);
    // The nodes of a volume are not part of this: nothing is published by a controller.
    assert!(status.published_node_ids.is_empty());
    assert_eq!(all(&service).await, [(id, expected)]);
}

/// Row: H16.
#[tokio::test]
async fn a_volume_deleted_behind_our_back_is_not_found_and_not_listed() {
    let rig = Rig::simple();
    let service = rig.controller();
    make(&service, volume_request("a", 8 * MIB)).await;
    let id = make(&service, volume_request("b", 8 * MIB)).await.volume_id;
    rig.fake.remove("default", "csi.b");
    assert_eq!(get(&service, &id).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(get(&service, "").await.unwrap_err().code(), Code::InvalidArgument);
    let listed: Vec<String> = all(&service).await.into_iter().map(|(id, _)| id).collect();
    assert_eq!(listed, ["default/csi.a"]);
}

/// Row: H22.
#[tokio::test]
async fn the_controller_does_not_report_faults_that_the_node_detects() {
    let rig = Rig::simple();
    let service = rig.controller();
    let id = make(&service, volume_request("a", 8 * MIB)).await.volume_id;
    let node = [HealthCode::DeviceNotServed, HealthCode::VolumeMissing, HealthCode::BadBlocks];
    let causes = node.map(|code| cause(code, Severity::Failure, "seen"));
    rig.fake.set_causes("default", "csi.a", &causes);
    assert_eq!(condition_of(&service, &id).await, said(false, "healthy"));
}

#[tokio::test]
async fn a_volume_has_the_same_condition_attached_and_detached() {
    let rig = Rig::simple();
    let service = rig.controller();
    let id = make(&service, volume_request("a", 8 * MIB)).await.volume_id;
    let slow = cause(HealthCode::DeviceSlow, Severity::Warning, "device sdb: slow");
    for causes in [&[][..], &[slow]] {
        rig.fake.set_causes("default", "csi.a", causes);
        let expected =
            if causes.is_empty() { said(false, "healthy") } else { said(true, "device sdb: slow") };
        for attached in [false, true, false] {
            rig.fake.change("default", "csi.a", |volume| {
                volume.attached = attached;
                volume.connections = u32::from(attached);
                volume.device_path = if attached { "/dev/ublkb0" } else { "" }.to_owned();
            });
            assert_eq!(all(&service).await, [(id.clone(), expected.clone())], "{attached}");
            let status = get(&service, &id).await.unwrap().status.unwrap();
            assert_eq!(status.volume_condition, expected, "{attached}");
            assert!(status.published_node_ids.is_empty(), "{status:?}");
        }
    }
}

/// Row: H4.
#[tokio::test]
async fn volumes_of_a_pool_that_failed_are_abnormal_and_not_gone() {
    let configuration =
        "[[class]]\nname = 'a'\ndefault = true\n[[class]]\nname = 'b'\npool = 'b'\n";
    let pools = [("default", 1024 * MIB), ("b", 1024 * MIB), ("theirs", 1024 * MIB)];
    let rig = Rig::new(&pools, configuration);
    let service = rig.controller();
    let well = make(&service, volume_request("a", 8 * MIB)).await.volume_id;
    rig.fake.add("b", "csi.lost", 8 * MIB);
    rig.fake.add("b", "no-volume-of-ours", 8 * MIB);
    rig.fake.add("theirs", "csi.lost", 8 * MIB);
    for pool in ["b", "theirs"] {
        rig.fake.fail_pool(pool, true);
    }
    let lost = ("b/csi.lost".to_owned(), said(true, "pool b has failed"));
    assert_eq!(all(&service).await, [lost.clone(), (well, said(false, "healthy"))]);
    assert_eq!(condition_of(&service, &lost.0).await, lost.1);
    for id in ["b/csi.none", "theirs/csi.lost"] {
        assert!(get(&service, id).await.is_err(), "{id}");
    }
    rig.fake.fail_pool("b", false);
    assert_eq!(condition_of(&service, &lost.0).await, said(false, "healthy"));
    assert_eq!(all(&service).await.len(), 2);
}

#[tokio::test]
async fn an_older_daemon_leaves_conditions_unknown_and_lists_whole() {
    let rig = Rig::simple();
    let service = rig.controller();
    let id = make(&service, volume_request("a", 8 * MIB)).await.volume_id;
    rig.fake.is_old(true);
    let expected =
        said(false, "unknown: the daemon is older than its plugin and does not report conditions");
    assert_eq!(condition_of(&service, &id).await, expected);
    assert_eq!(all(&service).await, [(id.clone(), expected)]);
    rig.fake.is_old(false);
    assert_eq!(condition_of(&service, &id).await, said(false, "healthy"));
}

/// Row: H38.
#[tokio::test]
async fn a_daemon_that_is_away_is_unavailable_and_no_volume_is_called_healthy() {
    let rig = Rig::simple();
    let service = rig.controller();
    let id = make(&service, volume_request("a", 8 * MIB)).await.volume_id;
    // Each call of the two in turn, and the calls before them.
    for call in 1..=3 {
        rig.fake.die_at(call, false);
        let request = Request::new(proto::ListVolumesRequest::default());
        assert_eq!(service.list_volumes(request).await.unwrap_err().code(), Code::Unavailable);
        assert!(rig.fake.heal());
    }
    rig.fake.die_at(1, false);
    assert_eq!(get(&service, &id).await.unwrap_err().code(), Code::Unavailable);
    rig.fake.heal();
    assert_eq!(condition_of(&service, &id).await, said(false, "healthy"));
}

/// Row: H37.
#[tokio::test]
async fn disabled_conditions_are_not_offered_requested_or_reported() {
    let on = Rig::simple();
    assert!(offers(&on.controller()).await);
    let rig = Rig::new(&[("default", 1024 * MIB)], "[health]\nenabled = false\n");
    let service = rig.controller();
    assert!(!offers(&service).await);
    let id = make(&service, volume_request("a", 8 * MIB)).await.volume_id;
    let failed = cause(HealthCode::IoErrors, Severity::Failure, "x");
    rig.fake.set_causes("default", "csi.a", &[failed]);
    assert_eq!(all(&service).await, [(id.clone(), None)]);
    assert_eq!(condition_of(&service, &id).await, None);
    assert!(!rig.fake.take_log().contains(&"health"));
}
