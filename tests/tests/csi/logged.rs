//! The plugin's log and metrics: which words are in them, and which never.

use blockd_csi::proto::{NodePublishVolumeRequest, NodeStageVolumeRequest};

use super::*;

#[test]
fn neither_a_secret_nor_a_mount_flag_is_logged() {
    for form in ["text", "json"] {
        let words = vec!["--log-format".to_owned(), form.to_owned()];
        let log = "debug".to_owned();
        let rig = Rig::start("secret", &Settings { words, log, ..Settings::default() }).unwrap();
        let driver = rig.plugin.driver().unwrap();
        let secrets = HashMap::from([("secret-key-7f".to_owned(), "secret-value-7f".to_owned())]);
        let mut capability = mounted("ext4");
        capability.access_type = Some(AccessType::Mount(MountVolume {
            fs_type: "ext4".to_owned(),
            mount_flags: vec!["flag-7f=hidden-7f".to_owned()],
            ..Default::default()
        }));
        let wanted = CreateVolumeRequest {
            secrets: secrets.clone(),
            ..request("pvc-seen", capability.clone(), 64 * MIB)
        };
        let volume = create(&driver, &wanted).unwrap();
        // Refused with a reason that contains no secret.
        let bad = CreateVolumeRequest { name: String::new(), ..wanted.clone() };
        refused(create(&driver, &bad), Code::InvalidArgument).unwrap();
        let path = rig.plugin.kubelet_dir().join("plugins/x/globalmount");
        let path = path.to_string_lossy().into_owned();
        let stage = NodeStageVolumeRequest {
            volume_id: volume.volume_id.clone(),
            staging_target_path: path.clone(),
            volume_capability: Some(capability.clone()),
            secrets: secrets.clone(),
            ..Default::default()
        };
        let mut errors = Vec::new();
        errors.extend(driver.node_stage_volume(stage).err());
        let publish = NodePublishVolumeRequest {
            volume_id: volume.volume_id.clone(),
            staging_target_path: path.clone(),
            target_path: format!("{path}-target"),
            volume_capability: Some(capability),
            secrets: secrets.clone(),
            ..Default::default()
        };
        errors.extend(driver.node_publish_volume(publish).err());
        let request = DeleteVolumeRequest { volume_id: volume.volume_id, secrets };
        let _ = driver.delete_volume(request);
        let log = rig.plugin.log();
        assert!(log.contains("CreateVolume") && log.contains("pvc-seen"), "{log}");
        for word in ["secret-value-7f", "secret-key-7f", "hidden-7f", "flag-7f"] {
            assert!(!log.contains(word), "{word} is in the log:\n{log}");
            assert!(errors.iter().all(|one| !one.message().contains(word)), "{errors:?}");
        }
        if form == "json" {
            for line in log.lines() {
                serde_json::from_str::<serde_json::Value>(line).expect(line);
            }
        }
    }
}

#[test]
fn there_is_a_histogram_for_each_method_and_code() {
    let rig = Rig::start("metrics", &Settings::default()).unwrap();
    let driver = rig.plugin.driver().unwrap();
    let wanted = request("measured", mounted("ext4"), 64 * MIB);
    create(&driver, &wanted).unwrap();
    refused(
        create(&driver, &CreateVolumeRequest { name: String::new(), ..wanted }),
        Code::InvalidArgument,
    )
    .unwrap();
    let asked = ControllerGetVolumeRequest { volume_id: "default/csi.nothing".to_owned() };
    refused(driver.controller_get_volume(asked), Code::NotFound).unwrap();
    driver.probe(ProbeRequest {}).unwrap();
    let metrics = rig.plugin.metrics().unwrap();
    for (method, code) in [
        ("CreateVolume", "OK"),
        ("CreateVolume", "INVALID_ARGUMENT"),
        ("ControllerGetVolume", "NOT_FOUND"),
        ("Probe", "OK"),
        ("GetPluginInfo", "OK"),
        ("ControllerGetCapabilities", "OK"),
        ("NodeGetCapabilities", "OK"),
    ] {
        let line = metrics.lines().find(|line| {
            line.starts_with("blockd_csi_operation_seconds_count{")
                && line.contains(&format!("method=\"{method}\""))
                && line.contains(&format!("code=\"{code}\""))
        });
        assert!(line.is_some_and(|line| !line.ends_with(" 0")), "{method} {code}:\n{metrics}");
    }
    assert!(metrics.contains("blockd_csi_operation_seconds_bucket{"), "{metrics}");
}
