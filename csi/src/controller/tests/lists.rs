//! Lists of volumes and snapshots.

use tonic::{Code, Request};

use super::*;
use crate::testing::{MIB, Rig};

async fn volumes(service: &Service, max_entries: i32, token: &str) -> (Vec<String>, String) {
    let starting_token = token.to_owned();
    let request = proto::ListVolumesRequest { max_entries, starting_token };
    let answer = service.list_volumes(Request::new(request)).await.unwrap().into_inner();
    let ids = answer.entries.into_iter().map(|entry| entry.volume.unwrap().volume_id);
    (ids.collect(), answer.next_token)
}

async fn snapshots(service: &Service, request: proto::ListSnapshotsRequest) -> Vec<String> {
    let answer = service.list_snapshots(Request::new(request)).await.unwrap().into_inner();
    assert!(answer.next_token.is_empty());
    answer.entries.into_iter().map(|entry| entry.snapshot.unwrap().snapshot_id).collect()
}

#[tokio::test]
async fn foreign_volumes_are_never_listed() {
    let configuration = "[[class]]\nname = 'a'\npool = 'one'\n";
    let rig = Rig::new(&[("default", 1024 * MIB), ("one", 1024 * MIB)], configuration);
    let service = rig.controller();
    make(&service, volume_request("mine", 8 * MIB)).await;
    snapshot(&service, "one/csi.mine", "s").await;
    rig.fake.add("one", "data", 8 * MIB);
    rig.fake.add("one", "csi-12345678.theirs", 8 * MIB);
    rig.fake.add("one", "csi.~e0123456789abcdef0123456789abcdef", 8 * MIB);
    rig.fake.add("one", "csi.mine@made-by-hand", 8 * MIB);
    rig.fake.add("default", "csi.mine", 8 * MIB);
    assert_eq!(volumes(&service, 0, "").await.0, ["one/csi.mine"]);
    let all = snapshots(&service, proto::ListSnapshotsRequest::default()).await;
    assert_eq!(all, ["one/csi.mine@s"]);
    for id in ["one/data", "one/csi-12345678.theirs", "default/csi.mine", "one/csi.none", "x"] {
        let request = proto::ControllerGetVolumeRequest { volume_id: id.to_owned() };
        let answer = service.controller_get_volume(Request::new(request)).await;
        assert_eq!(refused(answer).0, Code::NotFound, "{id}");
        let request = proto::ValidateVolumeCapabilitiesRequest {
            volume_id: id.to_owned(),
            volume_capabilities: vec![block(Mode::SingleNodeWriter)],
            ..Default::default()
        };
        let answer = service.validate_volume_capabilities(Request::new(request)).await;
        assert_eq!(refused(answer).0, Code::NotFound, "{id}");
    }
}

#[tokio::test]
async fn a_thousand_volumes_are_listed_in_pages() {
    let rig = Rig::simple();
    let service = rig.controller();
    for number in 0..1000 {
        rig.fake.add("default", &format!("csi.v{number:04}"), 8 * MIB);
    }
    let all = volumes(&service, 0, "").await;
    assert_eq!((all.0.len(), all.1.as_str()), (1000, ""));
    let (mut seen, mut token) = (Vec::new(), String::new());
    loop {
        let (page, next) = volumes(&service, 300, &token).await;
        seen.extend(page);
        if next.is_empty() {
            break;
        }
        token = next;
    }
    assert_eq!(seen, all.0);
    for (max_entries, token, code) in [
        (0, "nonsense", Code::Aborted),
        (1, "default/csi.v0001@s", Code::Aborted),
        (-1, "", Code::InvalidArgument),
    ] {
        let starting_token = token.to_owned();
        let request = proto::ListVolumesRequest { max_entries, starting_token };
        assert_eq!(refused(service.list_volumes(Request::new(request)).await).0, code);
        let request = proto::ListSnapshotsRequest {
            max_entries,
            starting_token: token.split('@').next().unwrap().to_owned(),
            ..Default::default()
        };
        assert_eq!(refused(service.list_snapshots(Request::new(request)).await).0, code);
    }
}

#[tokio::test]
async fn snapshots_are_found_by_id_and_source_and_unknown_ones_are_an_empty_list() {
    let rig = Rig::simple();
    let service = rig.controller();
    for name in ["a", "b"] {
        make(&service, volume_request(name, 8 * MIB)).await;
        for number in 0..3 {
            snapshot(&service, &format!("default/csi.{name}"), &format!("{name}{number}")).await;
        }
    }
    let all = proto::ListSnapshotsRequest::default();
    assert_eq!(snapshots(&service, all.clone()).await.len(), 6);
    let of = |source: &str| proto::ListSnapshotsRequest {
        source_volume_id: source.to_owned(),
        ..all.clone()
    };
    let expected = ["default/csi.b@b0", "default/csi.b@b1", "default/csi.b@b2"];
    assert_eq!(snapshots(&service, of("default/csi.b")).await, expected);
    let one = |id: &str| proto::ListSnapshotsRequest { snapshot_id: id.to_owned(), ..all.clone() };
    assert_eq!(snapshots(&service, one("default/csi.a@a1")).await, ["default/csi.a@a1"]);
    for nothing in [of("default/csi.none"), of("x"), one("x"), one("default/csi.a@b1")] {
        assert!(snapshots(&service, nothing).await.is_empty());
    }
    let both = proto::ListSnapshotsRequest {
        source_volume_id: "default/csi.a".to_owned(),
        ..one("default/csi.b@b1")
    };
    assert!(snapshots(&service, both).await.is_empty());
    let (first, token) = {
        let request = proto::ListSnapshotsRequest { max_entries: 4, ..all.clone() };
        let answer = service.list_snapshots(Request::new(request)).await.unwrap().into_inner();
        (answer.entries.len(), answer.next_token)
    };
    assert_eq!(first, 4);
    let rest = proto::ListSnapshotsRequest { starting_token: token, ..all };
    assert_eq!(snapshots(&service, rest).await, expected[1..]);
}
