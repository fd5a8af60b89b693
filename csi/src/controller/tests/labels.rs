//! Labels that volumes get, and their use afterwards.

use tonic::{Code, Request};

use super::*;
use crate::testing::{MIB, Rig};

const CLASSES: &str = "[[class]]\nname = 'wide'\ndefault = true\noverprovision_ratio = 4\n\
                       [[class]]\nname = 'narrow'\noverprovision_ratio = 1\n";

fn request(name: &str, class: &str) -> proto::CreateVolumeRequest {
    proto::CreateVolumeRequest {
        parameters: map(&[
            ("csi.blockd.io/device-class", class),
            ("csi.blockd.io/mkfs-options", "-m 1"),
            ("csi.storage.k8s.io/pvc/name", "claim"),
            ("csi.storage.k8s.io/pvc/namespace", "team"),
        ]),
        volume_capabilities: vec![mount(Mode::SingleNodeWriter)],
        ..volume_request(name, 600 * MIB)
    }
}

async fn expand(service: &Service, bytes: i64) -> Result<(), Status> {
    let request = proto::ControllerExpandVolumeRequest {
        volume_id: "default/csi.a".to_owned(),
        capacity_range: range(bytes, 0),
        ..Default::default()
    };
    service.controller_expand_volume(Request::new(request)).await.map(drop)
}

#[tokio::test]
async fn a_volume_has_its_class_and_its_claim_as_labels_and_lists_return_its_context() {
    let rig = Rig::new(&[("default", 1000 * MIB)], CLASSES);
    let service = rig.controller();
    let context = make(&service, request("a", "narrow")).await.volume_context;
    assert_eq!(context, map(&[("csi.blockd.io/mkfs-options", "-m 1")]));
    let labels = rig.fake.volume("default", "csi.a").unwrap().labels;
    let expected = map(&[
        ("csi.blockd.io/device-class", "narrow"),
        ("csi.blockd.io/mkfs-options", "-m 1"),
        ("csi.storage.k8s.io/pvc-name", "claim"),
        ("csi.storage.k8s.io/pvc-namespace", "team"),
    ]);
    assert_eq!(labels, expected.into_iter().collect());
    let list = service.list_volumes(Request::new(proto::ListVolumesRequest::default())).await;
    let entry = list.unwrap().into_inner().entries.remove(0).volume.unwrap();
    let get = proto::ControllerGetVolumeRequest { volume_id: "default/csi.a".to_owned() };
    let got = service.controller_get_volume(Request::new(get)).await.unwrap().into_inner();
    assert_eq!(
        (entry.volume_context, got.volume.unwrap().volume_context),
        (context.clone(), context)
    );
}

#[tokio::test]
async fn a_volume_grows_by_the_ratio_of_the_class_that_its_label_names() {
    let rig = Rig::new(&[("default", 1000 * MIB)], CLASSES);
    let service = rig.controller();
    make(&service, request("a", "narrow")).await;
    assert_eq!(expand(&service, 1001 * MIB).await.unwrap_err().code(), Code::ResourceExhausted);
    expand(&service, 1000 * MIB).await.unwrap();
    // One that an older plugin made counts as the class with the highest ratio; a repeated creation
    // gives it its label.
    rig.fake.change("default", "csi.a", |volume| volume.labels.clear());
    expand(&service, 1001 * MIB).await.unwrap();
    make(&service, request("a", "narrow")).await;
    assert_eq!(expand(&service, 1002 * MIB).await.unwrap_err().code(), Code::ResourceExhausted);
}
