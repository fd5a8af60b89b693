//! Making, changing and deleting volumes and snapshots.

use tonic::{Code, Request};

use super::*;
use crate::testing::{MIB, Rig};

#[tokio::test]
async fn a_volume_is_made_once_and_answered_again() {
    let rig = Rig::simple();
    let service = rig.controller();
    let made = make(&service, volume_request("pvc-1", 37 * MIB)).await;
    assert_eq!(made.volume_id, "default/csi.pvc-1");
    assert_eq!(made.capacity_bytes, 38_797_312);
    let segments = &made.accessible_topology[0].segments;
    assert_eq!(*segments, map(&[("csi.blockd.io/node", "n1")]));
    assert_eq!(make(&service, volume_request("pvc-1", 37 * MIB)).await, made);
    // After growth it still satisfies the request, as long as there is no limit.
    rig.fake.change("default", "csi.pvc-1", |volume| volume.size_bytes = 40 * MIB);
    assert_eq!(make(&service, volume_request("pvc-1", 37 * MIB)).await.capacity_bytes, 40 * MIB);
}

#[tokio::test]
async fn the_same_name_with_another_size_source_or_pool_is_taken() {
    let configuration = "[[class]]\nname = 'a'\ndefault = true\n[[class]]\nname = 'b'\npool = \
                         'two'\n\
                         [[class]]\nname = 'c'\nkind = 'thick'\n";
    let rig = Rig::new(&[("default", 1024 * MIB), ("two", 1024 * MIB)], configuration);
    let service = rig.controller();
    make(&service, volume_request("source", 8 * MIB)).await;
    snapshot(&service, "default/csi.source", "s").await;
    snapshot(&service, "default/csi.source", "other").await;
    let of_snapshot = proto::CreateVolumeRequest {
        volume_content_source: from_snapshot("default/csi.source@s"),
        ..volume_request("clone", 8 * MIB)
    };
    let of_volume = proto::CreateVolumeRequest {
        volume_content_source: from_volume("default/csi.source"),
        ..volume_request("copy", 8 * MIB)
    };
    make(&service, of_snapshot.clone()).await;
    make(&service, of_volume.clone()).await;
    let class = |name: &str| map(&[("csi.blockd.io/device-class", name)]);
    let another = proto::CreateVolumeRequest {
        volume_content_source: from_snapshot("default/csi.source@other"),
        ..of_snapshot.clone()
    };
    let cases = [
        volume_request("source", 16 * MIB),
        proto::CreateVolumeRequest {
            capacity_range: range(0, 4 * MIB),
            ..volume_request("source", 0)
        },
        proto::CreateVolumeRequest { parameters: class("b"), ..volume_request("source", 8 * MIB) },
        proto::CreateVolumeRequest {
            mutable_parameters: map(&[("csi.blockd.io/iops", "2")]),
            ..volume_request("limited", 8 * MIB)
        },
        volume_request("clone", 8 * MIB),
        volume_request("copy", 8 * MIB),
        another,
        proto::CreateVolumeRequest { name: "copy".to_owned(), ..of_snapshot.clone() },
        proto::CreateVolumeRequest { name: "clone".to_owned(), ..of_volume.clone() },
        proto::CreateVolumeRequest { name: "source".to_owned(), ..of_volume.clone() },
        volume_request("thick", 8 * MIB),
    ];
    let limited = map(&[("csi.blockd.io/iops", "1")]);
    let limited = proto::CreateVolumeRequest {
        mutable_parameters: limited,
        ..volume_request("limited", 8 * MIB)
    };
    make(&service, limited.clone()).await;
    let thick =
        proto::CreateVolumeRequest { parameters: class("c"), ..volume_request("thick", 8 * MIB) };
    make(&service, thick.clone()).await;
    let before = rig.state();
    for case in cases {
        let shown = format!("{case:?}");
        let (code, text) = refused(service.create_volume(Request::new(case)).await);
        assert_eq!(code, Code::AlreadyExists, "{shown}: {text}");
    }
    assert_eq!(rig.state(), before);
    for same in [of_snapshot.clone(), of_volume.clone(), limited, thick] {
        make(&service, same).await;
    }
    // Their sources may be deleted: a repeat still finds the requested volumes.
    delete_snapshot(&service, "default/csi.source@s").await.unwrap();
    delete(&service, "default/csi.source").await.unwrap();
    make(&service, of_snapshot).await;
    make(&service, of_volume).await;
}

#[tokio::test]
async fn volumes_are_made_from_snapshots_and_volumes_also_larger_ones() {
    let rig = Rig::simple();
    let service = rig.controller();
    make(&service, volume_request("source", 8 * MIB)).await;
    let taken = snapshot(&service, "default/csi.source", "s").await;
    assert_eq!(taken.snapshot_id, "default/csi.source@s");
    assert_eq!(taken.source_volume_id, "default/csi.source");
    assert_eq!((taken.size_bytes, taken.ready_to_use), (8 * MIB, true));
    let time = taken.creation_time.unwrap();
    assert_eq!((time.seconds, time.nanos), (1_700_000_000, 123_000_000));
    for (name, source) in
        [("a", from_snapshot("default/csi.source@s")), ("b", from_volume("default/csi.source"))]
    {
        for (suffix, required, size) in
            [("same", 0, 8 * MIB), ("equal", 8 * MIB, 8 * MIB), ("more", 16 * MIB, 16 * MIB)]
        {
            let request = proto::CreateVolumeRequest {
                volume_content_source: source.clone(),
                ..volume_request(&format!("{name}-{suffix}"), required)
            };
            let made = make(&service, request).await;
            assert_eq!(made.capacity_bytes, size);
            assert_eq!(made.content_source, source);
        }
        for (required, limit) in [(8 * MIB - 512, 0), (0, 8 * MIB - 1), (1, 4 * MIB)] {
            let request = proto::CreateVolumeRequest {
                volume_content_source: source.clone(),
                capacity_range: range(required, limit),
                ..volume_request("less", 0)
            };
            let (code, text) = refused(service.create_volume(Request::new(request)).await);
            assert_eq!(code, Code::OutOfRange, "{text}");
        }
    }
    let names: Vec<_> = rig.state().into_keys().map(|(_, name)| name).collect();
    let expected = [
        "csi.a-equal",
        "csi.a-more",
        "csi.a-same",
        "csi.b-equal",
        "csi.b-more",
        "csi.b-same",
        "csi.source",
        "csi.source@s",
    ];
    assert_eq!(names, expected);
}

#[tokio::test]
async fn a_source_that_is_missing_elsewhere_or_no_source_is_refused() {
    let configuration =
        "[[class]]\nname = 'a'\ndefault = true\n[[class]]\nname = 'b'\npool = 'two'\n";
    let rig = Rig::new(&[("default", 1024 * MIB), ("two", 1024 * MIB)], configuration);
    let service = rig.controller();
    make(&service, volume_request("source", 8 * MIB)).await;
    snapshot(&service, "default/csi.source", "s").await;
    let class = map(&[("csi.blockd.io/device-class", "b")]);
    let cases = [
        (from_snapshot("default/csi.source@t"), Code::NotFound),
        (from_snapshot("default/csi.source"), Code::NotFound),
        (from_snapshot("anything"), Code::NotFound),
        (from_snapshot(""), Code::InvalidArgument),
        (from_volume("default/csi.none"), Code::NotFound),
        (from_volume("default/csi.source@s"), Code::NotFound),
        (from_volume(""), Code::InvalidArgument),
        (Some(proto::VolumeContentSource { r#type: None }), Code::InvalidArgument),
    ];
    for (volume_content_source, code) in cases {
        let shown = format!("{volume_content_source:?}");
        let request =
            proto::CreateVolumeRequest { volume_content_source, ..volume_request("new", 0) };
        assert_eq!(refused(service.create_volume(Request::new(request)).await).0, code, "{shown}");
    }
    for source in [from_snapshot("default/csi.source@s"), from_volume("default/csi.source")] {
        let request = proto::CreateVolumeRequest {
            volume_content_source: source,
            parameters: class.clone(),
            ..volume_request("new", 0)
        };
        let (code, text) = refused(service.create_volume(Request::new(request)).await);
        assert_eq!(code, Code::InvalidArgument, "{text}");
    }
    assert_eq!(rig.fake.volumes().len(), 2);
}

#[tokio::test]
async fn a_volume_in_use_is_not_deleted_and_one_that_is_gone_is() {
    let rig = Rig::simple();
    let service = rig.controller();
    make(&service, volume_request("a", 8 * MIB)).await;
    rig.fake.change("default", "csi.a", |volume| volume.attached = true);
    let status = delete(&service, "default/csi.a").await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    rig.fake.change("default", "csi.a", |volume| volume.attached = false);
    for _ in 0..2 {
        delete(&service, "default/csi.a").await.unwrap();
    }
    rig.fake.add("default", "data", 8 * MIB);
    rig.fake.add("default", "csi.e@f", 8 * MIB);
    for id in ["default/data", "other/csi.a", "nonsense", "default/csi.e@f", "default/csi.none"] {
        delete(&service, id).await.unwrap();
        delete_snapshot(&service, id).await.unwrap();
    }
    assert_eq!(rig.fake.volumes().len(), 2);
}

#[tokio::test]
async fn snapshots_live_on_without_their_volume() {
    let rig = Rig::simple();
    let service = rig.controller();
    make(&service, volume_request("a", 8 * MIB)).await;
    let taken = snapshot(&service, "default/csi.a", "s").await;
    delete(&service, "default/csi.a").await.unwrap();
    assert_eq!(snapshot(&service, "default/csi.a", "s").await, taken);
    let request =
        proto::GetSnapshotRequest { snapshot_id: taken.snapshot_id.clone(), ..Default::default() };
    let found = service.get_snapshot(Request::new(request)).await.unwrap().into_inner();
    assert_eq!(found.snapshot.unwrap(), taken);
    let volume_content_source = from_snapshot(&taken.snapshot_id);
    make(&service, proto::CreateVolumeRequest { volume_content_source, ..volume_request("b", 0) })
        .await;
    for _ in 0..2 {
        delete_snapshot(&service, &taken.snapshot_id).await.unwrap();
    }
    let request =
        proto::GetSnapshotRequest { snapshot_id: taken.snapshot_id, ..Default::default() };
    assert_eq!(refused(service.get_snapshot(Request::new(request)).await).0, Code::NotFound);
}

#[tokio::test]
async fn a_snapshots_name_is_that_of_one_source() {
    let rig = Rig::simple();
    let service = rig.controller();
    for name in ["a", "b"] {
        make(&service, volume_request(name, 8 * MIB)).await;
    }
    let long = "ä".repeat(64);
    for name in ["s", &long] {
        let taken = snapshot(&service, "default/csi.a", name).await;
        assert_eq!(snapshot(&service, "default/csi.a", name).await, taken);
        for (source, code) in
            [("default/csi.b", Code::AlreadyExists), ("nonsense", Code::AlreadyExists)]
        {
            let request = proto::CreateSnapshotRequest {
                source_volume_id: source.to_owned(),
                name: name.to_owned(),
                ..Default::default()
            };
            assert_eq!(refused(service.create_snapshot(Request::new(request)).await).0, code);
        }
    }
    for source in ["default/csi.none", "nonsense", "default/csi.a@s"] {
        let request = proto::CreateSnapshotRequest {
            source_volume_id: source.to_owned(),
            name: "new".to_owned(),
            ..Default::default()
        };
        let (code, _) = refused(service.create_snapshot(Request::new(request)).await);
        assert_eq!(code, Code::NotFound, "{source}");
    }
}

#[tokio::test]
async fn volumes_grow_to_exactly_the_requested_size_and_never_shrink() {
    let rig = Rig::simple();
    let service = rig.controller();
    make(&service, volume_request("a", 8 * MIB)).await;
    let expand = |required, limit, capability: Option<proto::VolumeCapability>| {
        let request = proto::ControllerExpandVolumeRequest {
            volume_id: "default/csi.a".to_owned(),
            capacity_range: range(required, limit),
            volume_capability: capability,
            ..Default::default()
        };
        service.controller_expand_volume(Request::new(request))
    };
    for ((required, limit), size) in [
        ((8 * MIB + 512, 8 * MIB + 512), 8 * MIB + 512),
        ((8 * MIB + 513, 0), 8 * MIB + 1024),
        ((16 * MIB, 0), 16 * MIB),
        ((16 * MIB, 0), 16 * MIB),
        ((1, 0), 16 * MIB),
        ((0, 32 * MIB), 16 * MIB),
    ] {
        let answer = expand(required, limit, None).await.unwrap().into_inner();
        assert_eq!((answer.capacity_bytes, answer.node_expansion_required), (size, true));
        assert_eq!(rig.fake.volume("default", "csi.a").unwrap().size_bytes, size);
    }
    for (required, limit) in [(1, 16 * MIB - 1), (16 * MIB + 1, 16 * MIB + 1), (i64::MAX, 0)] {
        assert_eq!(refused(expand(required, limit, None).await).0, Code::OutOfRange);
    }
    for (required, limit) in [(0, 0), (-1, 0), (0, -1), (2, 1)] {
        assert_eq!(refused(expand(required, limit, None).await).0, Code::InvalidArgument);
    }
    // Every mode that is known is taken, and a file system has to grow on the node.
    for mode in [
        Mode::SingleNodeWriter,
        Mode::SingleNodeReaderOnly,
        Mode::SingleNodeSingleWriter,
        Mode::SingleNodeMultiWriter,
    ] {
        let answer = expand(16 * MIB, 0, Some(mount(mode))).await.unwrap().into_inner();
        assert!(answer.node_expansion_required);
        let answer = expand(16 * MIB, 0, Some(block(mode))).await.unwrap().into_inner();
        assert!(!answer.node_expansion_required);
    }
    for mode in [Mode::Unknown, Mode::MultiNodeMultiWriter] {
        let answer = expand(16 * MIB, 0, Some(mount(mode))).await;
        assert_eq!(refused(answer).0, Code::InvalidArgument);
    }
    let request = proto::ControllerExpandVolumeRequest {
        volume_id: "default/csi.none".to_owned(),
        capacity_range: range(16 * MIB, 0),
        ..Default::default()
    };
    let answer = service.controller_expand_volume(Request::new(request)).await;
    assert_eq!(refused(answer).0, Code::NotFound);
    let (code, text) = refused(expand(4096 * MIB, 0, None).await);
    assert_eq!(code, Code::ResourceExhausted);
    // Of twice 1 GiB less the 16 MiB that it has.
    let (more, free) = (4080 * MIB, 2032 * MIB);
    assert!(text.starts_with(&format!("pool default: {more} bytes requested, {free} bytes free")));
}

#[tokio::test]
async fn only_named_parameters_are_modified() {
    let rig = Rig::simple();
    let service = rig.controller();
    let mutable_parameters =
        map(&[("csi.blockd.io/iops", "7"), ("csi.blockd.io/on-full", "error")]);
    make(
        &service,
        proto::CreateVolumeRequest { mutable_parameters, ..volume_request("a", 8 * MIB) },
    )
    .await;
    let modify = |id: &str, parameters: &[(&str, &str)]| {
        let request = proto::ControllerModifyVolumeRequest {
            volume_id: id.to_owned(),
            mutable_parameters: map(parameters),
            ..Default::default()
        };
        service.controller_modify_volume(Request::new(request))
    };
    for _ in 0..2 {
        modify("default/csi.a", &[("csi.blockd.io/bandwidth", "1Mi")]).await.unwrap();
    }
    let settings = rig.fake.volume("default", "csi.a").unwrap().settings.unwrap();
    assert_eq!((settings.iops, settings.bandwidth_bytes), (7, MIB));
    assert_eq!(settings.on_full(), blockd_api::v1::OnFull::Error);
    let before = rig.state();
    for parameters in [
        &[][..],
        &[("iops", "1")],
        &[("csi.blockd.io/device-class", "default")],
        &[("csi.blockd.io/iops", "1"), ("csi.blockd.io/speed", "1")],
        &[("csi.blockd.io/iops", "fast")],
    ] {
        let (code, text) = refused(modify("default/csi.a", parameters).await);
        assert_eq!(code, Code::InvalidArgument, "{text}");
    }
    let (code, _) = refused(modify("default/csi.none", &[("csi.blockd.io/iops", "1")]).await);
    assert_eq!(code, Code::NotFound);
    assert_eq!(rig.state(), before);
}
