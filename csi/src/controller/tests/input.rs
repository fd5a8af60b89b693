//! Fields that are missing, malformed, too long or not supported.

use tonic::{Code, Request};

use super::*;
use crate::testing::{MIB, Rig};

/// Calls a method with these texts for its id or name, a string, and a map.
macro_rules! refuse {
    ($service:ident, $case:expr, $($method:ident($request:expr);)*) => {
        $(
            let (code, text) = refused($service.$method(Request::new($request)).await);
            assert_eq!(code, Code::InvalidArgument, "{}: {text}", stringify!($method));
            assert!(text.len() < 1100, "{}", text.len());
        )*
    };
}

#[tokio::test]
async fn missing_or_too_long_fields_are_refused_by_every_method() {
    let rig = Rig::simple();
    let service = rig.controller();
    make(&service, volume_request("a", 8 * MIB)).await;
    rig.fake.take_log();
    let long = "x".repeat(1 << 20);
    for id in [String::new(), long.clone(), "x".repeat(129)] {
        let capability = vec![block(Mode::SingleNodeWriter)];
        refuse! {
            service, id,
            create_volume(volume_request(&id, 8 * MIB));
            delete_volume(
                proto::DeleteVolumeRequest { volume_id: id.clone(), ..Default::default() }
            );
            validate_volume_capabilities(proto::ValidateVolumeCapabilitiesRequest {
                volume_id: id.clone(), volume_capabilities: capability, ..Default::default()
            });
            create_snapshot(proto::CreateSnapshotRequest {
                name: id.clone(), source_volume_id: "default/csi.a".to_owned(), ..Default::default()
            });
            create_snapshot(proto::CreateSnapshotRequest {
                name: "s".to_owned(), source_volume_id: id.clone(), ..Default::default()
            });
            delete_snapshot(
                proto::DeleteSnapshotRequest { snapshot_id: id.clone(), ..Default::default() }
            );
            get_snapshot(
                proto::GetSnapshotRequest { snapshot_id: id.clone(), ..Default::default() }
            );
            controller_expand_volume(proto::ControllerExpandVolumeRequest {
                volume_id: id.clone(), capacity_range: range(1, 0), ..Default::default()
            });
            controller_get_volume(proto::ControllerGetVolumeRequest { volume_id: id.clone() });
            controller_modify_volume(proto::ControllerModifyVolumeRequest {
                volume_id: id.clone(),
                mutable_parameters: map(&[("csi.blockd.io/iops", "1")]),
                ..Default::default()
            });
        }
    }
    assert!(rig.fake.take_log().is_empty(), "the daemon is not asked about nonsense");
}

#[tokio::test]
async fn maps_over_4_kib_long_tokens_and_missing_fields_are_refused() {
    let rig = Rig::simple();
    let service = rig.controller();
    let long = "x".repeat(1 << 20);
    let big = map(&[("csi.storage.k8s.io/a", "y".repeat(4096).as_str())]);
    let id = "default/csi.a".to_owned();
    refuse! {
        service, big,
        list_volumes(
            proto::ListVolumesRequest { starting_token: long.clone(), ..Default::default() }
        );
        list_snapshots(
            proto::ListSnapshotsRequest { snapshot_id: long.clone(), ..Default::default() }
        );
        create_volume(
            proto::CreateVolumeRequest { parameters: big.clone(), ..volume_request("b", 1) }
        );
        create_volume(
            proto::CreateVolumeRequest { secrets: big.clone(), ..volume_request("b", 1) }
        );
        create_volume(
            proto::CreateVolumeRequest { mutable_parameters: big.clone(), ..volume_request("b", 1) }
        );
        create_volume(
            proto::CreateVolumeRequest { volume_capabilities: Vec::new(), ..volume_request("b", 1) }
        );
        delete_volume(proto::DeleteVolumeRequest { volume_id: id.clone(), secrets: big.clone() });
        get_capacity(proto::GetCapacityRequest { parameters: big.clone(), ..Default::default() });
        controller_expand_volume(proto::ControllerExpandVolumeRequest {
            volume_id: id.clone(), ..Default::default()
        });
        validate_volume_capabilities(proto::ValidateVolumeCapabilitiesRequest {
            volume_id: id, ..Default::default()
        });
        create_snapshot(proto::CreateSnapshotRequest {
            name: "s".to_owned(),
            source_volume_id: "default/csi.a".to_owned(),
            parameters: map(&[("speed", "1")]),
            ..Default::default()
        });
    }
    assert!(rig.fake.take_log().is_empty(), "the daemon is not asked about nonsense");
}

#[tokio::test]
async fn names_have_any_character_that_is_not_banned() {
    let rig = Rig::simple();
    let service = rig.controller();
    let names =
        ["a/b", "a@b", "~a", "ä ö\tü\n", "..", ".", "node-1", "\u{10ffff}", &"n".repeat(128)];
    for name in names {
        let made = make(&service, volume_request(name, 8 * MIB)).await;
        assert!(made.volume_id.len() <= 128);
        let taken = snapshot(&service, &made.volume_id, name).await;
        assert!(taken.snapshot_id.len() <= 128);
        assert_eq!(taken.source_volume_id, made.volume_id);
        assert_eq!(snapshot(&service, &made.volume_id, name).await, taken);
    }
    assert_eq!(rig.fake.volumes().len(), 2 * names.len());
    for name in ["a\0", "\u{7f}", "\u{85}", "\u{1b}[2J"] {
        let (code, _) =
            refused(service.create_volume(Request::new(volume_request(name, 8 * MIB))).await);
        assert_eq!(code, Code::InvalidArgument);
    }
}

#[tokio::test]
async fn sizes_that_are_negative_overflow_or_contradict_each_other_make_nothing() {
    let rig = Rig::simple();
    let service = rig.controller();
    for (required, limit, code) in [
        (-1, 0, Code::InvalidArgument),
        (0, i64::MIN, Code::InvalidArgument),
        (9 * MIB, 8 * MIB, Code::InvalidArgument),
        (i64::MAX, 0, Code::OutOfRange),
        (i64::MAX, i64::MAX, Code::OutOfRange),
        (0, 1, Code::OutOfRange),
        (8 * MIB + 1, 8 * MIB + 1, Code::OutOfRange),
    ] {
        let request = proto::CreateVolumeRequest {
            capacity_range: range(required, limit),
            ..volume_request("a", 0)
        };
        let (refusal, text) = refused(service.create_volume(Request::new(request)).await);
        assert_eq!(refusal, code, "{text}");
        let wrong = if required == 0 { limit } else { required };
        assert!(text.contains(&wrong.to_string()) || text.contains(&limit.to_string()), "{text}");
    }
    assert!(rig.fake.volumes().is_empty());
}

#[tokio::test]
async fn a_mode_that_is_unknown_missing_or_of_several_nodes_is_refused_and_others_are_made() {
    let rig = Rig::simple();
    let service = rig.controller();
    let no_mode = proto::VolumeCapability { access_mode: None, ..mount(Mode::Unknown) };
    let no_type = proto::VolumeCapability { access_type: None, ..mount(Mode::SingleNodeWriter) };
    let good = mount(Mode::SingleNodeSingleWriter);
    let wrong = [
        Mode::Unknown,
        Mode::MultiNodeReaderOnly,
        Mode::MultiNodeSingleWriter,
        Mode::MultiNodeMultiWriter,
    ];
    let wrong = wrong.into_iter().flat_map(|mode| [mount(mode), block(mode)]);
    for wrong in wrong.chain([no_mode, no_type]) {
        // Wherever it is in the list.
        for list in [vec![wrong.clone()], vec![good.clone(), wrong]] {
            let request = proto::CreateVolumeRequest {
                volume_capabilities: list,
                ..volume_request("a", 32 * MIB)
            };
            let (code, text) = refused(service.create_volume(Request::new(request)).await);
            assert_eq!(code, Code::InvalidArgument, "{text}");
        }
    }
    assert!(rig.fake.volumes().is_empty());
    for mode in [
        Mode::SingleNodeWriter,
        Mode::SingleNodeReaderOnly,
        Mode::SingleNodeSingleWriter,
        Mode::SingleNodeMultiWriter,
    ] {
        // The mode is nothing that a volume has: it can be asked for with another.
        for capability in [mount(mode), block(mode)] {
            let volume_capabilities = vec![capability];
            let request =
                proto::CreateVolumeRequest { volume_capabilities, ..volume_request("a", 32 * MIB) };
            make(&service, request).await;
        }
    }
    assert_eq!(rig.fake.volumes().len(), 1);
}

#[tokio::test]
async fn unsupported_capabilities_are_not_confirmed_with_the_reason() {
    let rig = Rig::simple();
    let service = rig.controller();
    make(&service, volume_request("a", 8 * MIB)).await;
    let call = |volume_capabilities: Vec<_>, parameters, mutable_parameters| {
        let request = proto::ValidateVolumeCapabilitiesRequest {
            volume_id: "default/csi.a".to_owned(),
            volume_capabilities,
            parameters,
            mutable_parameters,
            volume_context: map(&[("a", "b")]),
            ..Default::default()
        };
        service.validate_volume_capabilities(Request::new(request))
    };
    let good = vec![mount(Mode::SingleNodeWriter), block(Mode::SingleNodeSingleWriter)];
    let class = map(&[("csi.blockd.io/device-class", "default")]);
    let answer = call(good.clone(), class.clone(), map(&[])).await.unwrap().into_inner();
    let confirmed = answer.confirmed.unwrap();
    assert_eq!((confirmed.volume_capabilities, confirmed.parameters), (good.clone(), class));
    assert_eq!(confirmed.volume_context, map(&[("a", "b")]));
    assert!(answer.message.is_empty());
    let none = || map(&[]);
    let bad = vec![good[0].clone(), mount(Mode::MultiNodeReaderOnly)];
    for (list, parameters, mutable, said) in [
        (bad, none(), none(), "volume_capabilities[1].access_mode.mode is MULTI_NODE_READER_ONLY"),
        (good.clone(), map(&[("speed", "1")]), none(), "a key of parameters is speed"),
        (good.clone(), map(&[("csi.blockd.io/device-class", "x")]), none(), "device-class is x"),
        (good.clone(), none(), map(&[("speed", "1")]), "a key of mutable_parameters is speed"),
    ] {
        let answer = call(list, parameters, mutable).await.unwrap().into_inner();
        assert!(answer.confirmed.is_none());
        assert!(answer.message.contains(said), "{}", answer.message);
    }
    for mode in [Mode::Unknown] {
        let answer = call(vec![good[0].clone(), mount(mode)], none(), none()).await;
        assert_eq!(refused(answer).0, Code::InvalidArgument);
    }
}

#[tokio::test]
async fn the_capabilities_are_those_that_are_offered() {
    let service = Rig::simple().controller();
    let request = Request::new(proto::ControllerGetCapabilitiesRequest {});
    let answer = service.controller_get_capabilities(request).await.unwrap().into_inner();
    let mut kinds: Vec<i32> = answer
        .capabilities
        .iter()
        .map(|one| match one.r#type.as_ref().unwrap() {
            proto::controller_service_capability::Type::Rpc(rpc) => rpc.r#type,
        })
        .collect();
    kinds.sort_unstable();
    assert_eq!(kinds, [1, 3, 4, 5, 6, 7, 9, 11, 12, 13, 14, 15]);
    // Calls that are not offered are unimplemented.
    let request = proto::ControllerPublishVolumeRequest::default();
    let answer = service.controller_publish_volume(Request::new(request)).await;
    assert_eq!(refused(answer).0, Code::Unimplemented);
}
