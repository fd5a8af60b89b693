//! Volumes in persistent memory: usage, sizes, regions and their volume context.

use blockd_api::v1;
use tonic::{Code, Request};

use super::*;
use crate::testing::{MIB, Memory, Rig};

const GIB: i64 = 1024 * MIB;

const CLASSES: &str = "[[class]]\nname = 'direct'\npool = 'direct'\nkind = 'pmem-direct'\n\
                       default = true\nkata_partition = true\n\
                       [[class]]\nname = 'plain'\npool = 'direct'\nkind = 'pmem-direct'\n\
                       [[class]]\nname = 'pooled'\npool = 'pooled'\nkind = 'pmem-pooled'\n";

/// A pool of namespaces and one of extents, 16 GiB each, in two regions.
fn rig() -> Rig {
    let rig = Rig::new(&[("direct", 16 * GIB), ("pooled", 16 * GIB)], CLASSES);
    rig.fake.set_memory("direct", Memory::direct("0xd1", 16 * GIB, GIB));
    rig.fake.set_memory("pooled", Memory::pooled("0xd2", 16 * GIB));
    rig
}

fn of(class: &str, pairs: &[(&str, &str)]) -> HashMap<String, String> {
    let mut parameters = map(pairs);
    parameters.insert("csi.blockd.io/device-class".to_owned(), class.to_owned());
    parameters
}

fn asked(
    name: &str,
    bytes: i64,
    class: &str,
    pairs: &[(&str, &str)],
) -> proto::CreateVolumeRequest {
    proto::CreateVolumeRequest { parameters: of(class, pairs), ..volume_request(name, bytes) }
}

fn mounted(request: proto::CreateVolumeRequest, fs_type: &str) -> proto::CreateVolumeRequest {
    let access = MountVolume { fs_type: fs_type.to_owned(), ..Default::default() };
    let access_type = Some(AccessType::Mount(access));
    let one = proto::VolumeCapability { access_type, ..mount(Mode::SingleNodeWriter) };
    proto::CreateVolumeRequest { volume_capabilities: vec![one], ..request }
}

async fn capacity(service: &Service, class: &str) -> (i64, i64, i64) {
    let request = proto::GetCapacityRequest { parameters: of(class, &[]), ..Default::default() };
    let capacity = service.get_capacity(Request::new(request)).await.unwrap().into_inner();
    (
        capacity.available_capacity,
        capacity.maximum_volume_size.unwrap(),
        capacity.minimum_volume_size.unwrap(),
    )
}

/// A namespace has no labels: its context is in the answer to its creation alone.
#[tokio::test]
async fn lists_return_the_context_of_volumes_of_extents_that_the_node_acts_by() {
    let rig = rig();
    let service = rig.controller();
    let pairs = [("usage", "FileIO"), ("csi.blockd.io/mkfs-options", "-m 1")];
    let request = mounted(asked("a", GIB, "pooled", &pairs), "ext4");
    let made = make(&service, request).await;
    make(&service, mounted(asked("b", GIB, "direct", &pairs), "ext4")).await;
    let list = service.list_volumes(Request::new(proto::ListVolumesRequest::default())).await;
    let entries = list.unwrap().into_inner().entries;
    let context = |name: &str| {
        let volumes = entries.iter().filter_map(|entry| entry.volume.clone());
        let mut named = volumes.filter(|volume| volume.volume_id.ends_with(name));
        named.next().unwrap().volume_context
    };
    let expected =
        map(&[("csi.blockd.io/usage", "FileIO"), ("csi.blockd.io/mkfs-options", "-m 1")]);
    assert_eq!(context("csi.a"), expected);
    for (key, value) in expected {
        assert_eq!(made.volume_context.get(&key), Some(&value), "{key}");
    }
    assert!(context("csi.b").is_empty());
}

/// Row: P19.
#[tokio::test]
async fn a_namespace_is_charged_with_its_overhead_and_has_the_requested_size() {
    let rig = rig();
    let service = rig.controller();
    let made = make(&service, asked("a", 2 * GIB, "direct", &[])).await;
    assert_eq!(made.capacity_bytes, 3 * GIB);
    let volume = rig.fake.volume("direct", "csi.a").unwrap();
    assert!(volume.size_bytes >= 2 * GIB && volume.dax && volume.erase_after);
    let context = &made.volume_context;
    let value = |word: &str| context[&format!("csi.blockd.io/{word}")].as_str();
    assert_eq!(value("usable-bytes"), volume.size_bytes.to_string());
    assert_eq!(value("charged-bytes"), (3 * GIB).to_string());
    assert_eq!((value("usage"), value("durability")), ("AppDirect", "power-safe"));
    assert_eq!((value("region"), value("numa-node"), value("erase-after")), ("0xd1", "1", "true"));
    // A repeat answers the same.
    assert_eq!(make(&service, asked("a", 2 * GIB, "direct", &[])).await, made);
    // As in other drivers: the requested size is the bytes taken.
    let charged = [("sizeSemantics", "charged")];
    let made = make(&service, asked("b", 2 * GIB, "direct", &charged)).await;
    assert_eq!(made.capacity_bytes, 2 * GIB);
    assert!(rig.fake.volume("direct", "csi.b").unwrap().size_bytes < 2 * GIB);
    assert_eq!(make(&service, asked("b", 2 * GIB, "direct", &charged)).await, made);
    // In the other meaning it is too small.
    let answer = service.create_volume(Request::new(asked("b", 2 * GIB, "direct", &[]))).await;
    assert_eq!(refused(answer).0, Code::AlreadyExists);
}

/// Row: P16.
#[tokio::test]
async fn sizes_are_rounded_up_unless_the_limit_forbids() {
    let rig = rig();
    let service = rig.controller();
    let made = make(&service, asked("p", 5 * MIB, "pooled", &[])).await;
    assert_eq!(made.capacity_bytes, 8 * MIB);
    assert_eq!(make(&service, asked("q", 1, "pooled", &[])).await.capacity_bytes, 4 * MIB);
    let limited = |name: &str, class: &str, required, limit| proto::CreateVolumeRequest {
        capacity_range: range(required, limit),
        ..asked(name, 0, class, &[])
    };
    for (class, required, limit) in [
        ("pooled", 5 * MIB, 8 * MIB - 1),
        ("pooled", 1, 4 * MIB - 1),
        // Not even the step, and then the overhead.
        ("direct", MIB, GIB - 1),
        ("direct", GIB, GIB),
        ("direct", GIB, 2 * GIB - 1),
    ] {
        let answer =
            service.create_volume(Request::new(limited("l", class, required, limit))).await;
        let (code, text) = refused(answer);
        assert_eq!(code, Code::OutOfRange, "{class} {required} {limit}: {text}");
    }
    assert_eq!(rig.fake.volumes().len(), 2);
    let made = make(&service, limited("l", "direct", GIB, 2 * GIB)).await;
    assert_eq!(made.capacity_bytes, 2 * GIB);
    assert_eq!(
        make(&service, limited("m", "pooled", 5 * MIB, 8 * MIB)).await.capacity_bytes,
        8 * MIB
    );
}

/// The seed's case of 127 GB, a hundredth of it: 63 and 1 are made, and 63 deleted.
///
/// Row: P3.
#[tokio::test]
async fn fragmented_space_is_distinguished_from_a_lack_of_space() {
    let rig =
        Rig::new(&[("direct", 128 * MIB)], "[[class]]\nname = 'direct'\nkind = 'pmem-direct'\n");
    rig.fake.set_memory("direct", Memory::direct("0xd1", 128 * MIB, MIB));
    let service = rig.controller();
    let charged = [("sizeSemantics", "charged")];
    let volume_request = |name: &str, mib| asked(name, mib * MIB, "direct", &charged);
    for (name, mib) in [("a", 63), ("b", 16)] {
        make(&service, volume_request(name, mib)).await;
    }
    delete(&service, "direct/csi.a").await.unwrap();
    let (available, maximum, minimum) = capacity(&service, "direct").await;
    assert_eq!(available, 112 * MIB);
    assert!(maximum > 55 * MIB && maximum <= 63 * MIB, "{maximum}");
    assert_eq!(minimum, MIB);
    let (code, text) = refused(service.create_volume(Request::new(volume_request("c", 65))).await);
    assert_eq!(code, Code::ResourceExhausted);
    let free = 112 * MIB;
    assert!(text.contains(&format!("{free} bytes free, {maximum} of them in one piece")), "{text}");
    // With sizes that include the overhead a volume may take the whole piece.
    make(&service, volume_request("c", 63)).await;
}

/// Row: P6.
#[tokio::test]
async fn a_volume_lies_in_one_region_and_the_best_one_is_the_limit() {
    for (kind, step) in [("pmem-direct", 16 * MIB), ("pmem-pooled", 4 * MIB)] {
        let configuration =
            format!("[[class]]\nname = 'a'\npools = ['r0', 'r1']\nkind = '{kind}'\n");
        let rig = Rig::new(&[("r0", GIB), ("r1", GIB)], &configuration);
        for (pool, region) in [("r0", "0xa0"), ("r1", "0xa1")] {
            let memory = match kind {
                "pmem-direct" => Memory::direct(region, GIB, step),
                _ => Memory::pooled(region, GIB),
            };
            rig.fake.set_memory(pool, memory);
        }
        let service = rig.controller();
        let charged = [("sizeSemantics", "charged")];
        let volume_request = |name: &str, mib| asked(name, mib * MIB, "a", &charged);
        // One goes to each: the emptier one is taken.
        let first = make(&service, volume_request("v0", 512)).await;
        let second = make(&service, volume_request("v1", 512)).await;
        let regions: Vec<&str> = [&first, &second]
            .map(|one| one.volume_context["csi.blockd.io/region"].as_str())
            .to_vec();
        assert_eq!(regions, ["0xa0", "0xa1"], "{kind}");
        // Half of each is left, and no volume gets both halves.
        let (available, maximum, _) = capacity(&service, "a").await;
        assert!(available <= GIB && available > 960 * MIB, "{kind}: {available}");
        assert!(maximum <= 512 * MIB && maximum > 480 * MIB, "{kind}: {maximum}");
        let (code, _) =
            refused(service.create_volume(Request::new(volume_request("v2", 600))).await);
        assert_eq!(code, Code::ResourceExhausted, "{kind}");
        // A repeat finds it where it is, whatever is emptier now.
        delete(&service, &first.volume_id).await.unwrap();
        assert_eq!(make(&service, volume_request("v1", 512)).await, second);
        assert_eq!(rig.fake.volumes().len(), 1);
    }
}

/// Row: P24.
#[tokio::test]
async fn app_direct_needs_the_kernels_own_device() {
    let rig = rig();
    let service = rig.controller();
    let wrong = [
        asked("a", GIB, "pooled", &[("usage", "AppDirect")]),
        asked("a", GIB, "direct", &[("usage", "Volatile")]),
        asked("a", GIB, "direct", &[("eraseAfter", "maybe")]),
        asked("a", GIB, "direct", &[("csi.blockd.io/iops", "5")]),
        asked("a", GIB, "direct", &[("kataContainers", "yes")]),
        // Raw block, as it is asked for without a file system.
        asked("a", GIB, "direct", &[("kataContainers", "True")]),
        mounted(asked("a", GIB, "direct", &[]), "btrfs"),
        mounted(asked("a", GIB, "direct", &[("kataContainers", "1"), ("usage", "FileIO")]), ""),
        proto::CreateVolumeRequest {
            volume_content_source: from_snapshot("direct/csi.a@s"),
            ..asked("a", GIB, "direct", &[])
        },
    ];
    for request in wrong {
        let answer = service.create_volume(Request::new(request.clone())).await;
        let (code, text) = refused(answer);
        assert_eq!(code, Code::InvalidArgument, "{request:?}: {text}");
    }
    assert!(rig.fake.volumes().is_empty());
    make(&service, mounted(asked("a", GIB, "direct", &[("usage", "FileIO")]), "btrfs")).await;
    let made = rig.fake.volume("direct", "csi.a").unwrap();
    assert_eq!((made.usage(), made.dax), (v1::PmemUsage::FileIo, false));
    // The same name for another use.
    let other = mounted(asked("a", GIB, "direct", &[]), "ext4");
    assert_eq!(refused(service.create_volume(Request::new(other)).await).0, Code::AlreadyExists);
    make(&service, asked("b", GIB, "direct", &[("eraseafter", "f")])).await;
    assert!(!rig.fake.volume("direct", "csi.b").unwrap().erase_after);
}

/// Row: P30.
#[tokio::test]
async fn an_image_for_virtual_machines_is_requested_by_name_alone() {
    let rig = rig();
    let service = rig.controller();
    let request =
        |name: &str, class: &str| mounted(asked(name, 1, class, &[("kataContainers", "t")]), "xfs");
    let made = make(&service, request("a", "direct")).await;
    // Around a file system of 576 MiB, for pages of 2 MiB, there is another one.
    let usable = rig.fake.volume("direct", "csi.a").unwrap().size_bytes;
    assert!(usable >= 640 * MIB, "{usable}");
    let context = &made.volume_context;
    assert_eq!(context["csi.blockd.io/kata-containers"], "true");
    assert_eq!(context["csi.blockd.io/kata-partition"], "true");
    let context = make(&service, request("b", "plain")).await.volume_context;
    assert_eq!(context["csi.blockd.io/kata-containers"], "true");
    assert!(!context.contains_key("csi.blockd.io/kata-partition"));
    let without = make(&service, mounted(asked("c", 1, "pooled", &[]), "xfs")).await;
    assert_eq!(without.capacity_bytes, 300 * MIB);
    assert!(!without.volume_context.contains_key("csi.blockd.io/kata-containers"));
}

#[tokio::test]
async fn kata_image_is_app_direct_and_needs_a_pmem_direct_class() {
    let rig = rig();
    let service = rig.controller();
    let kata = ("kataContainers", "true");
    for pairs in [&[kata][..], &[kata, ("usage", "AppDirect")], &[kata, ("usage", "FileIO")]] {
        let request = mounted(asked("a", GIB, "pooled", pairs), "ext4");
        let (code, text) = refused(service.create_volume(Request::new(request)).await);
        assert_eq!(code, Code::InvalidArgument, "{pairs:?}");
        assert!(text.starts_with("parameters.kataContainers is true"), "{text}");
        assert!(text.contains("AppDirect") && text.contains("kind pmem-direct"), "{text}");
        let parameters = of("pooled", pairs);
        let request = proto::GetCapacityRequest { parameters, ..Default::default() };
        let answer = service.get_capacity(Request::new(request)).await;
        assert_eq!(refused(answer).0, Code::InvalidArgument, "{pairs:?}");
    }
    assert!(rig.fake.volumes().is_empty());
    let made = make(&service, mounted(asked("a", GIB, "direct", &[kata]), "ext4")).await;
    assert_eq!(made.volume_context["csi.blockd.io/usage"], "AppDirect");
    let volume = rig.fake.volume("direct", "csi.a").unwrap();
    assert!(volume.dax && volume.usage() == v1::PmemUsage::AppDirect, "{volume:?}");
}

#[tokio::test]
async fn classes_get_pools_of_their_own_kind_only() {
    let configuration = "[[class]]\nname = 'd'\nkind = 'pmem-direct'\ndefault = true\n\
                         [[class]]\nname = 'p'\nkind = 'pmem-pooled'\n\
                         [[class]]\nname = 't'\nkind = 'thin'\n";
    let rig = Rig::new(&[("default", GIB)], configuration);
    let service = rig.controller();
    let kinds = [None, Some(Memory::pooled("0x1", GIB)), Some(Memory::direct("0x1", GIB, MIB))];
    for (memory, right) in kinds.into_iter().zip([&["t"][..], &["t", "p"], &["d"]]) {
        if let Some(memory) = memory {
            rig.fake.set_memory("default", memory);
        }
        for class in ["d", "p", "t"] {
            let name = format!("{class}-{}", right.len());
            let answer = service.create_volume(Request::new(asked(&name, MIB, class, &[]))).await;
            let fits = right.contains(&class);
            let (available, ..) = capacity(&service, class).await;
            assert_eq!(available > 0, fits, "{class} of {right:?}");
            match answer {
                Ok(answer) => {
                    assert!(fits, "{class} of {right:?}");
                    delete(&service, &answer.into_inner().volume.unwrap().volume_id).await.unwrap();
                }
                Err(status) => {
                    assert_eq!(status.code(), Code::FailedPrecondition, "{class} of {right:?}");
                    assert!(!fits && status.message().contains("is default, which is"), "{status}");
                }
            }
        }
    }
}

#[tokio::test]
async fn a_volume_that_is_overwritten_is_gone_and_one_that_is_made_is_not_there_yet() {
    let rig = rig();
    let service = rig.controller();
    make(&service, asked("a", GIB, "direct", &[])).await;
    let set = |state: v1::VolumeState| {
        rig.fake.change("direct", "csi.a", |volume| volume.state = state.into());
    };
    set(v1::VolumeState::Creating);
    let answer = service.create_volume(Request::new(asked("a", GIB, "direct", &[]))).await;
    assert_eq!(refused(answer).0, Code::Aborted);
    set(v1::VolumeState::Scrubbing);
    let volume_id = "direct/csi.a".to_owned();
    let get = proto::ControllerGetVolumeRequest { volume_id };
    let answer = service.controller_get_volume(Request::new(get)).await;
    assert_eq!(refused(answer).0, Code::NotFound);
    let all = service.list_volumes(Request::new(proto::ListVolumesRequest::default())).await;
    assert!(all.unwrap().into_inner().entries.is_empty());
    delete(&service, "direct/csi.a").await.unwrap();
}

#[tokio::test]
async fn growing_is_for_the_daemon_to_refuse() {
    let rig = rig();
    let service = rig.controller();
    make(&service, asked("a", GIB, "direct", &[])).await;
    make(&service, asked("b", 8 * MIB, "pooled", &[])).await;
    let expand = |id: &str, bytes| proto::ControllerExpandVolumeRequest {
        volume_id: id.to_owned(),
        capacity_range: range(bytes, 0),
        ..Default::default()
    };
    let answer = service.controller_expand_volume(Request::new(expand("direct/csi.a", 5 * GIB)));
    let (code, text) = refused(answer.await);
    assert_eq!(code, Code::FailedPrecondition);
    assert!(text.contains("is a namespace"), "{text}");
    // The charged size equals the capacity in the claim.
    let answer = service.controller_expand_volume(Request::new(expand("direct/csi.a", 2 * GIB)));
    assert_eq!(answer.await.unwrap().into_inner().capacity_bytes, 2 * GIB);
    let answer = service.controller_expand_volume(Request::new(expand("pooled/csi.b", 9 * MIB)));
    assert_eq!(answer.await.unwrap().into_inner().capacity_bytes, 12 * MIB);
}
