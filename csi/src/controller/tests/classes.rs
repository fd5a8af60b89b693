//! Sizes, classes, room and topology.

use blockd_api::v1;
use proptest::prelude::{Strategy, prop_oneof};
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use tonic::{Code, Request};

use super::*;
use crate::testing::{MIB, Rig};

const GIB: i64 = 1024 * MIB;

fn class(name: &str) -> HashMap<String, String> {
    map(&[("csi.blockd.io/device-class", name)])
}

#[tokio::test]
async fn provisioning_is_limited_by_the_ratio_and_the_refusal_names_both_numbers() {
    let configuration = "[[class]]\nname = 'a'\noverprovision_ratio = '1.5'\n";
    let rig = Rig::new(&[("default", 1000 * MIB)], configuration);
    let service = rig.controller();
    make(&service, volume_request("a", 1000 * MIB)).await;
    // A foreign volume counts, and a snapshot does not.
    rig.fake.add("default", "data", 100 * MIB);
    snapshot(&service, "default/csi.a", "s").await;
    let (code, text) =
        refused(service.create_volume(Request::new(volume_request("b", 401 * MIB))).await);
    assert_eq!(code, Code::ResourceExhausted);
    let (requested, free) = (401 * MIB, 400 * MIB);
    let said = format!(
        "pool default: {requested} bytes requested, {free} bytes free, of 1.5 times its {}, less \
         the {} that its volumes have together",
        1000 * MIB,
        1100 * MIB
    );
    assert_eq!(text, said);
    make(&service, volume_request("b", 400 * MIB)).await;
    // A clone is a volume that can be written.
    let request = proto::CreateVolumeRequest {
        volume_content_source: from_snapshot("default/csi.a@s"),
        ..volume_request("c", 0)
    };
    let (code, _) = refused(service.create_volume(Request::new(request)).await);
    assert_eq!(code, Code::ResourceExhausted);
    assert_eq!(rig.fake.volumes().len(), 4);
}

#[tokio::test]
async fn a_pool_of_exactly_500_mib_takes_a_claim_of_500_mib() {
    for configuration in [
        "[[class]]\nname = 'a'\noverprovision_ratio = 1\n",
        "[[class]]\nname = 'a'\nkind = 'thick'\n",
    ] {
        let rig = Rig::new(&[("default", 500 * MIB)], configuration);
        let service = rig.controller();
        let request = proto::CreateVolumeRequest {
            volume_capabilities: vec![mount(Mode::SingleNodeWriter)],
            ..volume_request("claim", 500 * MIB)
        };
        assert_eq!(make(&service, request).await.capacity_bytes, 524_288_000);
    }
}

#[tokio::test]
async fn many_small_volumes_fill_a_pool_of_2_gib_to_the_last_byte() {
    let rig = Rig::new(&[("default", 2 * GIB)], "[[class]]\nname = 'a'\noverprovision_ratio = 1\n");
    let service = rig.controller();
    for number in 0..256 {
        let made = make(&service, volume_request(&format!("v{number}"), 8 * MIB)).await;
        assert_eq!(made.capacity_bytes, 8 * MIB);
    }
    let (code, _) =
        refused(service.create_volume(Request::new(volume_request("more", 8 * MIB))).await);
    assert_eq!(code, Code::ResourceExhausted);
    delete(&service, "default/csi.v7").await.unwrap();
    make(&service, volume_request("more", 8 * MIB)).await;
}

#[tokio::test]
async fn thick_volumes_have_their_space_or_are_not_there() {
    let configuration = "[[class]]\nname = 'a'\nkind = 'thick'\n";
    let rig = Rig::new(&[("default", 100 * MIB)], configuration);
    let service = rig.controller();
    make(&service, volume_request("a", 60 * MIB)).await;
    let settings = rig.fake.volume("default", "csi.a").unwrap().settings.unwrap();
    assert!(settings.thick);
    let (code, text) =
        refused(service.create_volume(Request::new(volume_request("b", 41 * MIB))).await);
    assert_eq!(code, Code::ResourceExhausted);
    let answer = service.get_capacity(Request::new(proto::GetCapacityRequest::default())).await;
    let (requested, free) = (41 * MIB, answer.unwrap().into_inner().available_capacity);
    assert!((32 * MIB..40 * MIB).contains(&free), "{free}");
    let said = format!(
        "pool default: {requested} bytes requested, {free} bytes free, less the space set aside \
         for others and its own metadata"
    );
    assert_eq!(text, said);
    // The daemon refuses requests that only it can judge, and leaves nothing behind.
    let thin = Rig::simple();
    let request = proto::CreateVolumeRequest {
        parameters: map(&[("csi.blockd.io/reservation", "2Gi")]),
        ..volume_request("c", 8 * MIB)
    };
    let (code, _) = refused(thin.controller().create_volume(Request::new(request)).await);
    assert_eq!(code, Code::ResourceExhausted);
    assert!(thin.fake.volumes().is_empty());
}

#[tokio::test]
async fn volumes_lie_where_their_class_or_a_parameter_says() {
    let configuration = "[[class]]\nname = 'a'\nplacement = 'spread'\ndefault = true\n\
                         [[class]]\nname = 'b'\n";
    let rig = Rig::new(&[("default", 100 * MIB)], configuration);
    let service = rig.controller();
    let placed = |name: &str| {
        let volume = rig.fake.volume("default", name).unwrap();
        (volume.settings.unwrap().placement(), volume.pinned_to)
    };
    let pin = [("csi.blockd.io/placement", "pin:/dev/sdc")];
    let pinned =
        proto::CreateVolumeRequest { parameters: map(&pin), ..volume_request("c", 8 * MIB) };
    let of_b = [("csi.blockd.io/device-class", "b")];
    let other =
        proto::CreateVolumeRequest { parameters: map(&of_b), ..volume_request("b", 8 * MIB) };
    for _ in 0..2 {
        make(&service, volume_request("a", 8 * MIB)).await;
        make(&service, pinned.clone()).await;
        make(&service, other.clone()).await;
        assert_eq!(placed("csi.a"), (v1::Placement::Spread, String::new()));
        assert_eq!(placed("csi.c"), (v1::Placement::Pin, "/dev/sdc".to_owned()));
        assert_eq!(placed("csi.b").0, v1::Placement::Unspecified);
    }
    let bad = [("csi.blockd.io/placement", "stripe")];
    let bad = proto::CreateVolumeRequest { parameters: map(&bad), ..volume_request("d", 8 * MIB) };
    let (code, text) = refused(service.create_volume(Request::new(bad)).await);
    assert_eq!(code, Code::InvalidArgument);
    assert!(text.contains("csi.blockd.io/placement is stripe: must be fill, spread"), "{text}");
    assert!(rig.fake.volume("default", "csi.d").is_none());
}

#[tokio::test]
async fn one_that_was_never_finished_goes_away_when_there_is_no_space_and_data_never_does() {
    let configuration = "[[class]]\nname = 'a'\nkind = 'thick'\n";
    for has_data in [false, true] {
        let rig = Rig::new(&[("default", 100 * MIB)], configuration);
        rig.fake.add("default", "csi.a", 101 * MIB);
        rig.fake.change("default", "csi.a", |volume| volume.valid_bytes = i64::from(has_data));
        let answer =
            rig.controller().create_volume(Request::new(volume_request("a", 101 * MIB))).await;
        assert_eq!(refused(answer).0, Code::ResourceExhausted);
        assert_eq!(rig.fake.volume("default", "csi.a").is_some(), has_data);
    }
}

#[tokio::test]
async fn a_clone_for_which_there_is_no_room_leaves_no_snapshot() {
    let configuration = "[[class]]\nname = 'a'\ndefault = true\noverprovision_ratio = 1\n\
                         [[class]]\nname = 'b'\nkind = 'thick'\n";
    let rig = Rig::new(&[("default", 100 * MIB)], configuration);
    let service = rig.controller();
    make(&service, volume_request("source", 60 * MIB)).await;
    let before = rig.state();
    for parameters in [class("a"), class("b")] {
        let request = proto::CreateVolumeRequest {
            volume_content_source: from_volume("default/csi.source"),
            parameters,
            ..volume_request("copy", 120 * MIB)
        };
        let (code, _) = refused(service.create_volume(Request::new(request)).await);
        assert_eq!(code, Code::ResourceExhausted);
        assert_eq!(rig.state(), before);
    }
}

#[tokio::test]
async fn smallest_sizes_are_those_of_the_file_system() {
    let rig = Rig::simple();
    let service = rig.controller();
    let fs = |fs_type: &str| {
        let access = MountVolume { fs_type: fs_type.to_owned(), ..Default::default() };
        let access_type = Some(AccessType::Mount(access));
        proto::VolumeCapability { access_type, ..mount(Mode::SingleNodeWriter) }
    };
    let of_class = map(&[("csi.storage.k8s.io/fstype", "xfs")]);
    let cases = [
        ("a", vec![block(Mode::SingleNodeWriter)], map(&[]), 8),
        ("b", vec![fs("")], map(&[]), 32),
        ("c", vec![fs("ext4")], of_class.clone(), 32),
        ("d", vec![fs("xfs")], map(&[]), 300),
        ("e", vec![fs("btrfs")], map(&[]), 200),
        ("f", vec![fs("")], of_class, 300),
        ("g", vec![block(Mode::SingleNodeWriter), fs("btrfs"), fs("ext4")], map(&[]), 200),
    ];
    for (name, volume_capabilities, parameters, mib) in cases {
        let request = proto::CreateVolumeRequest {
            volume_capabilities,
            parameters,
            ..volume_request(name, 1)
        };
        let limited = proto::CreateVolumeRequest {
            capacity_range: range(1, mib * MIB - 1),
            ..request.clone()
        };
        let (code, _) = refused(service.create_volume(Request::new(limited)).await);
        assert_eq!(code, Code::OutOfRange);
        assert_eq!(make(&service, request).await.capacity_bytes, mib * MIB, "{name}");
    }
}

#[tokio::test]
async fn facts_for_the_node_are_in_the_context() {
    let rig = Rig::simple();
    let service = rig.controller();
    let parameters = map(&[
        ("csi.storage.k8s.io/fstype", "btrfs"),
        ("csi.storage.k8s.io/pvc/name", "claim"),
        ("csi.blockd.io/mkfs-options", "-m single"),
    ]);
    let mounted = proto::CreateVolumeRequest {
        parameters,
        volume_capabilities: vec![mount(Mode::SingleNodeWriter)],
        ..volume_request("a", 0)
    };
    let context = make(&service, mounted.clone()).await.volume_context;
    let expected =
        map(&[("csi.blockd.io/mkfs-options", "-m single"), ("csi.blockd.io/fstype", "btrfs")]);
    assert_eq!(context, expected);
    assert_eq!(make(&service, mounted).await.volume_context, expected);
    assert!(make(&service, volume_request("b", 0)).await.volume_context.is_empty());
}

#[tokio::test]
async fn options_of_mkfs_that_are_not_allowed_for_the_file_system_are_refused_by_name() {
    let rig = Rig::simple();
    let service = rig.controller();
    let request = |file_system: &str, options: &str| proto::CreateVolumeRequest {
        parameters: map(&[
            ("csi.storage.k8s.io/fstype", file_system),
            ("csi.blockd.io/mkfs-options", options),
        ]),
        volume_capabilities: vec![mount(Mode::SingleNodeWriter)],
        ..volume_request("a", 0)
    };
    for (file_system, options, option) in
        [("ext4", "-m 1 -d etc", "-d"), ("xfs", "-c file", "-c"), ("btrfs", "-r etc", "-r")]
    {
        let asked = Request::new(request(file_system, options));
        let (code, said) = refused(service.create_volume(asked).await);
        let begin = format!(
            "csi.blockd.io/mkfs-options is {option}: must be one of the options of mkfs.{file_system}"
        );
        assert!(code == Code::InvalidArgument && said.starts_with(&begin), "{said}");
    }
    assert!(rig.fake.volume("default", "csi.a").is_none());
    make(&service, request("ext4", "-m 1")).await;
}

#[tokio::test]
async fn capacity_depends_on_class_topology_and_capability() {
    let configuration = "[[class]]\nname = 'a'\ndefault = true\noverprovision_ratio = 3\n\
                         [[class]]\nname = 'b'\nkind = 'thick'\npool = 'two'\n\
                         [[class]]\nname = 'gone'\npool = 'none'\n";
    let rig = Rig::new(&[("default", GIB), ("two", GIB)], configuration);
    let service = rig.controller();
    let get = |request: proto::GetCapacityRequest| service.get_capacity(Request::new(request));
    let figures = |answer: Result<Response<proto::GetCapacityResponse>, Status>| {
        let answer = answer.unwrap().into_inner();
        (
            answer.available_capacity,
            answer.maximum_volume_size.unwrap(),
            answer.minimum_volume_size.unwrap(),
        )
    };
    let all = proto::GetCapacityRequest::default();
    assert_eq!(figures(get(all.clone()).await), (3 * GIB, 3 * GIB, 8 * MIB));
    make(&service, volume_request("v", 100 * MIB)).await;
    let left = 3 * GIB - 100 * MIB;
    assert_eq!(figures(get(all.clone()).await), (left, left, 8 * MIB));
    let mounted = proto::GetCapacityRequest {
        volume_capabilities: vec![mount(Mode::SingleNodeWriter)],
        parameters: map(&[("csi.storage.k8s.io/fstype", "xfs")]),
        ..all.clone()
    };
    assert_eq!(figures(get(mounted).await), (left, left, 300 * MIB));
    let thick = proto::GetCapacityRequest { parameters: class("b"), ..all.clone() };
    let (available, maximum, _) = figures(get(thick).await);
    // All of it can't be one volume: it has to be mapped.
    assert_eq!(available, maximum);
    assert!((GIB - 8 * MIB..GIB).contains(&maximum), "{maximum}");
    let topology =
        |key: &str, value: &str| Some(proto::Topology { segments: map(&[(key, value)]) });
    let here = topology("csi.blockd.io/node", "n1");
    let here = proto::GetCapacityRequest { accessible_topology: here, ..all.clone() };
    assert_eq!(figures(get(here).await).0, left);
    for accessible_topology in [topology("csi.blockd.io/node", "n2"), topology("other/node", "n1")]
    {
        let there = proto::GetCapacityRequest { accessible_topology, ..all.clone() };
        let (available, maximum, _) = figures(get(there).await);
        assert_eq!((available, maximum), (0, 0));
    }
    let shared = proto::GetCapacityRequest {
        volume_capabilities: vec![mount(Mode::MultiNodeMultiWriter)],
        ..all.clone()
    };
    assert_eq!(figures(get(shared).await).0, 0);
    let gone = proto::GetCapacityRequest { parameters: class("gone"), ..all.clone() };
    assert_eq!(figures(get(gone).await).0, 0);
    for wrong in [
        proto::GetCapacityRequest { parameters: class("unknown"), ..all.clone() },
        proto::GetCapacityRequest { parameters: map(&[("speed", "1")]), ..all.clone() },
        proto::GetCapacityRequest { volume_capabilities: vec![mount(Mode::Unknown)], ..all },
    ] {
        assert_eq!(refused(get(wrong).await).0, Code::InvalidArgument);
    }
}

#[tokio::test]
async fn a_volume_that_is_wanted_elsewhere_is_refused() {
    let rig = Rig::simple();
    let service = rig.controller();
    let wanted = |nodes: &[&str]| {
        let topology =
            |node: &&str| proto::Topology { segments: map(&[("csi.blockd.io/node", node)]) };
        let requisite = nodes.iter().map(topology).collect();
        proto::CreateVolumeRequest {
            accessibility_requirements: Some(proto::TopologyRequirement {
                requisite,
                preferred: Vec::new(),
            }),
            ..volume_request("a", 8 * MIB)
        }
    };
    let answer = service.create_volume(Request::new(wanted(&["n2", "n3"]))).await;
    assert_eq!(refused(answer).0, Code::ResourceExhausted);
    assert!(rig.fake.volumes().is_empty());
    make(&service, wanted(&["n2", "n1"])).await;
}

#[tokio::test]
async fn a_class_without_its_pool_makes_nothing() {
    let rig = Rig::new(&[("default", GIB)], "[[class]]\nname = 'a'\npool = 'none'\n");
    let answer = rig.controller().create_volume(Request::new(volume_request("a", 8 * MIB))).await;
    let (code, text) = refused(answer);
    assert_eq!(code, Code::FailedPrecondition);
    assert_eq!(text, "pool of class a is not there: none");
}

/// Sizes from 1 B to 16 TiB, among them those around 1 GiB and the granule.
fn sizes() -> impl Strategy<Value = i64> {
    let edges = proptest::sample::select(vec![1, 512, 8 * MIB, GIB, 2 * GIB, 1024 * GIB]);
    let near = (edges, -1_i64..=1).prop_map(|(edge, by)| (edge + by).max(1));
    prop_oneof![near, 1..=16_384 * GIB, (0_u32..44).prop_map(|bits| 1_i64 << bits)]
}

#[tokio::test]
async fn every_size_from_1_b_to_16_tib_is_created_listed_and_reported_to_the_byte() {
    let configuration =
        "[minimum]\nblock = 1\n[[class]]\nname = 'a'\noverprovision_ratio = 1000000\n";
    let rig = Rig::new(&[("default", 16_384 * GIB)], configuration);
    let service = rig.controller();
    let mut runner = TestRunner::deterministic();
    for number in 0..200 {
        let required = sizes().new_tree(&mut runner).unwrap().current();
        let name = format!("v{number}");
        let exact = proto::CreateVolumeRequest {
            capacity_range: range(required, required),
            ..volume_request(&name, 0)
        };
        let rounded = (required + 511) / 512 * 512;
        match service.create_volume(Request::new(exact)).await {
            Ok(made) => {
                let made = made.into_inner().volume.unwrap();
                assert_eq!(made.capacity_bytes, required);
                assert_eq!(required % 512, 0);
            }
            Err(status) => {
                assert_eq!(status.code(), Code::OutOfRange, "{required}: {status:?}");
                assert_ne!(required % 512, 0);
                assert_eq!(
                    make(&service, volume_request(&name, required)).await.capacity_bytes,
                    rounded
                );
            }
        }
        let request =
            proto::ControllerGetVolumeRequest { volume_id: format!("default/csi.{name}") };
        let found = service.controller_get_volume(Request::new(request)).await.unwrap();
        assert_eq!(found.into_inner().volume.unwrap().capacity_bytes, rounded);
    }
}
