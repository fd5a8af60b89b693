//! Generic ephemeral volumes, as far as they go without devices.

use blockd_csi::proto::{NodePublishVolumeRequest, NodeUnpublishVolumeRequest};

use super::*;

/// The kubelet and the provisioner send the same for a generic ephemeral volume as for any claim.
///
/// Row: P43.
#[test]
fn a_generic_ephemeral_volume_is_made_like_a_claim_and_goes_with_it_alone() {
    let rig = Rig::start("generic", &Settings::default()).unwrap();
    let driver = rig.plugin.driver().unwrap();
    let mut wanted = request("pvc-5f0c4a8e", mounted("ext4"), 64 * MIB);
    for (key, value) in [("pvc/name", "pod-scratch"), ("pvc/namespace", "default")] {
        wanted.parameters.insert(format!("csi.storage.k8s.io/{key}"), value.to_owned());
    }
    let volume = create(&driver, &wanted).unwrap();
    let names = || rig.control().unwrap().names().unwrap();
    let made = names();
    assert_eq!(made.len(), 1);
    let folder = rig.plugin.kubelet_dir().join("pods/p/volumes");
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("mount").to_string_lossy().into_owned();
    let staging = rig.plugin.kubelet_dir().join("plugins/globalmount");
    std::fs::create_dir_all(&staging).unwrap();
    let mut context = volume.volume_context.clone();
    context.insert("csi.storage.k8s.io/ephemeral".to_owned(), "false".to_owned());
    context.insert("csi.storage.k8s.io/pod.name".to_owned(), "pod".to_owned());
    let publish = NodePublishVolumeRequest {
        volume_id: volume.volume_id.clone(),
        staging_target_path: staging.to_string_lossy().into_owned(),
        target_path: path.clone(),
        volume_capability: Some(mounted("ext4")),
        volume_context: context,
        ..Default::default()
    };
    // It has to be staged first, as no inline volume has: without devices it goes no further here.
    let code = Code::FailedPrecondition;
    let status = refused(driver.node_publish_volume(publish), code).unwrap();
    assert!(status.message().contains("is not staged at"), "{status}");
    assert_eq!(names(), made);
    let unpublish =
        NodeUnpublishVolumeRequest { volume_id: volume.volume_id.clone(), target_path: path };
    driver.node_unpublish_volume(unpublish).unwrap();
    assert_eq!(names(), made, "its pod is gone, and its claim is not");
    delete(&driver, &volume.volume_id).unwrap();
    assert_eq!(names(), [""; 0]);
}
