//! Encrypted volumes: the header is on top of every size, and all that is made of one stays one.

use tonic::{Code, Request};

use super::*;
use crate::testing::{MIB, Rig};

const HEADER: i64 = 16 * MIB;
const LABEL: &str = "csi.blockd.io/encryption";

fn encrypted(name: &str, bytes: i64) -> proto::CreateVolumeRequest {
    let parameters = map(&[("encryption", "luks2")]);
    proto::CreateVolumeRequest { parameters, ..volume_request(name, bytes) }
}

async fn create(
    service: &Service,
    request: proto::CreateVolumeRequest,
) -> Result<Response<proto::CreateVolumeResponse>, Status> {
    service.create_volume(Request::new(request)).await
}

fn device_bytes(rig: &Rig, name: &str) -> i64 {
    rig.fake.volume("default", name).unwrap().size_bytes
}

#[tokio::test]
async fn the_header_is_on_top_of_the_requested_size() {
    let rig = Rig::simple();
    let service = rig.controller();
    let made = make(&service, encrypted("a", 64 * MIB)).await;
    assert_eq!(made.capacity_bytes, 64 * MIB);
    assert_eq!(device_bytes(&rig, "csi.a"), 64 * MIB + HEADER);
    assert_eq!(made.volume_context, map(&[(LABEL, "luks2")]));
    assert_eq!(rig.fake.volume("default", "csi.a").unwrap().labels[LABEL], "luks2");
    // A repeat, also with the driver's name in the key, is the same volume.
    let parameters = map(&[("csi.blockd.io/encryption", "luks2")]);
    let again = proto::CreateVolumeRequest { parameters, ..encrypted("a", 64 * MIB) };
    assert_eq!(make(&service, again).await, made);
    // A limit is one of the claim, not of the device; a sector of 4 KiB is the step.
    let limited = proto::CreateVolumeRequest {
        capacity_range: range(64 * MIB - 512, 64 * MIB),
        ..encrypted("b", 0)
    };
    assert_eq!(make(&service, limited).await.capacity_bytes, 64 * MIB);
    let list = service.list_volumes(Request::new(proto::ListVolumesRequest::default())).await;
    let list = list.unwrap().into_inner().entries;
    let entry = |entry: proto::list_volumes_response::Entry| entry.volume.unwrap();
    let list: Vec<_> = list.into_iter().map(entry).collect();
    assert!(list.iter().all(|one| one.capacity_bytes == 64 * MIB), "{list:?}");
    assert!(list.iter().all(|one| one.volume_context == made.volume_context), "{list:?}");
}

#[tokio::test]
async fn a_volume_of_the_other_kind_has_taken_the_name() {
    let rig = Rig::simple();
    let service = rig.controller();
    make(&service, encrypted("a", 64 * MIB)).await;
    make(&service, volume_request("b", 64 * MIB)).await;
    for request in [volume_request("a", 64 * MIB), encrypted("b", 64 * MIB)] {
        let (code, text) = refused(create(&service, request).await);
        assert_eq!(code, Code::AlreadyExists);
        assert!(text.contains("exists with encryption"), "{text}");
    }
}

#[tokio::test]
async fn what_is_made_of_an_encrypted_volume_stays_encrypted() {
    let rig = Rig::simple();
    let service = rig.controller();
    let source = make(&service, encrypted("a", 64 * MIB)).await;
    let cut = snapshot(&service, &source.volume_id, "s").await;
    assert_eq!(cut.size_bytes, 64 * MIB);
    let plain = make(&service, volume_request("p", 64 * MIB)).await;
    let plain_cut = snapshot(&service, &plain.volume_id, "ps").await;
    for (name, content) in
        [("r", from_snapshot(&cut.snapshot_id)), ("c", from_volume(&source.volume_id))]
    {
        let request = |request| proto::CreateVolumeRequest {
            volume_content_source: content.clone(),
            ..request
        };
        let (code, text) = refused(create(&service, request(volume_request(name, 0))).await);
        assert_eq!(code, Code::InvalidArgument);
        assert!(text.contains("of a class with encryption: luks2"), "{text}");
        let made = make(&service, request(encrypted(name, 64 * MIB))).await;
        assert_eq!(made.capacity_bytes, 64 * MIB);
        assert_eq!(make(&service, request(encrypted(name, 64 * MIB))).await, made);
        let stored = rig.fake.volume("default", &format!("csi.{name}")).unwrap();
        assert_eq!(
            (stored.size_bytes, stored.labels[LABEL].as_str()),
            (64 * MIB + HEADER, "luks2")
        );
        let less = request(encrypted("less", 32 * MIB));
        assert_eq!(refused(create(&service, less).await).0, Code::OutOfRange);
    }
    for content in [from_snapshot(&plain_cut.snapshot_id), from_volume(&plain.volume_id)] {
        let request =
            proto::CreateVolumeRequest { volume_content_source: content, ..encrypted("x", 0) };
        let (code, text) = refused(create(&service, request).await);
        assert_eq!(code, Code::InvalidArgument);
        assert!(text.contains("an existing volume can't be given"), "{text}");
    }
    assert!(rig.fake.volume("default", "csi.x").is_none());
}

#[tokio::test]
async fn growth_is_counted_without_the_header_and_the_node_has_a_part_in_it() {
    let rig = Rig::simple();
    let service = rig.controller();
    let volume = make(&service, encrypted("a", 64 * MIB)).await;
    let grow = |bytes, wire| proto::ControllerExpandVolumeRequest {
        volume_id: volume.volume_id.clone(),
        capacity_range: range(bytes, 0),
        volume_capability: Some(wire),
        ..Default::default()
    };
    for (bytes, size) in [(64 * MIB, 64 * MIB), (100 * MIB - 512, 100 * MIB)] {
        let request = grow(bytes, block(Mode::SingleNodeMultiWriter));
        let answer = service.controller_expand_volume(Request::new(request)).await.unwrap();
        let answer = answer.into_inner();
        assert_eq!((answer.capacity_bytes, answer.node_expansion_required), (size, true));
        assert_eq!(device_bytes(&rig, "csi.a"), size + HEADER);
    }
}

#[tokio::test]
async fn capacity_leaves_room_for_a_header() {
    let rig = Rig::simple();
    let service = rig.controller();
    let capacity = |parameters| async {
        let request = proto::GetCapacityRequest { parameters, ..Default::default() };
        let answer = service.get_capacity(Request::new(request)).await.unwrap().into_inner();
        (answer.available_capacity, answer.maximum_volume_size.unwrap())
    };
    let (all, most) = capacity(map(&[])).await;
    let with = capacity(map(&[("encryption", "luks2")])).await;
    assert_eq!(with, (all - HEADER, most - HEADER));
    // The largest that is reported can be made.
    make(&service, encrypted("a", with.1)).await;
    let (code, _) = refused(create(&service, encrypted("b", 4096)).await);
    assert_eq!(code, Code::ResourceExhausted);
}

#[tokio::test]
async fn other_kinds_of_encryption_and_volumes_that_are_mapped_are_refused() {
    let rig = Rig::new(
        &[("default", 1024 * MIB)],
        "[[class]]\nname = 'thin'\ndefault = true\n[[class]]\nname = 'direct'\nkind = 'pmem-direct'\n",
    );
    let service = rig.controller();
    let request = |pairs: &[(&str, &str)]| proto::CreateVolumeRequest {
        parameters: map(pairs),
        ..volume_request("a", 64 * MIB)
    };
    for kind in ["", "luks1", "LUKS2", "true"] {
        let (code, text) = refused(create(&service, request(&[("encryption", kind)])).await);
        assert_eq!(code, Code::InvalidArgument);
        assert!(text.contains("luks2, or left out"), "{text}");
    }
    let direct = request(&[("encryption", "luks2"), ("csi.blockd.io/device-class", "direct")]);
    let (code, text) = refused(create(&service, direct).await);
    assert_eq!(code, Code::InvalidArgument);
    assert!(text.contains("pmem-direct"), "{text}");
}

#[tokio::test]
async fn an_encrypted_volume_without_its_label_is_not_answered() {
    let rig = Rig::simple();
    let service = rig.controller();
    make(&service, encrypted("a", 64 * MIB)).await;
    // As after a plugin that ended between making the volume and labelling it.
    rig.fake.change("default", "csi.a", |volume| volume.labels.clear());
    make(&service, encrypted("a", 64 * MIB)).await;
    assert_eq!(rig.fake.volume("default", "csi.a").unwrap().labels[LABEL], "luks2");
}
