//! The newer access modes, with their capability advertised and without.

use blockd_csi::proto::ValidateVolumeCapabilitiesRequest;

use super::*;

/// The mode that provisioner and kubelet send for a claim, by the capability of the driver.
fn sent_for(claim: &str, driver: &Driver) -> Mode {
    let capability = controller_service_capability::rpc::Type::SingleNodeMultiWriter.into();
    match (claim, driver.offers().controller.contains(&capability)) {
        ("ReadWriteOncePod", true) => Mode::SingleNodeSingleWriter,
        ("ReadWriteOnce", true) => Mode::SingleNodeMultiWriter,
        _ => Mode::SingleNodeWriter,
    }
}

/// Row: W6.
#[test]
fn both_columns_of_access_modes_work_with_the_capability_and_without() {
    let rig = Rig::start("modes", &Settings::default()).unwrap();
    let config = "[access_modes]\nsingle_node_multi_writer = false\n".to_owned();
    let settings = Settings { config, ..Settings::default() };
    let mut without = Plugin::new("older", &rig.daemon.control_socket(), &settings).unwrap();
    without.start().unwrap();
    let drivers = [rig.plugin.driver().unwrap(), without.driver().unwrap()];

    // The capability is all that differs.
    let [newer, older] = drivers.each_ref().map(|driver| {
        let Offers { controller, node, .. } = driver.offers();
        [controller, node].map(|all| all.iter().copied().collect::<BTreeSet<i32>>())
    });
    let capabilities: [i32; 2] = [
        controller_service_capability::rpc::Type::SingleNodeMultiWriter.into(),
        node_service_capability::rpc::Type::SingleNodeMultiWriter.into(),
    ];
    for ((newer, older), capability) in newer.iter().zip(&older).zip(capabilities) {
        assert_eq!(newer.difference(older).copied().collect::<Vec<i32>>(), [capability]);
        assert!(older.is_subset(newer), "{older:?}");
    }

    let claims = ["ReadWriteOncePod", "ReadWriteOnce"];
    let sent = drivers.each_ref().map(|driver| claims.map(|claim| sent_for(claim, driver)));
    let newer = [Mode::SingleNodeSingleWriter, Mode::SingleNodeMultiWriter];
    assert_eq!(sent, [newer, [Mode::SingleNodeWriter; 2]]);
    for (column, (driver, modes)) in drivers.iter().zip(sent).enumerate() {
        for (claim, mode) in claims.iter().zip(modes) {
            let capability = block(mode);
            let wanted = request(&format!("{claim}-{column}"), capability.clone(), 8 * MIB);
            let volume = create(driver, &wanted).unwrap();
            // The mode is no property of the volume: the plugin of the other column takes it too.
            for driver in &drivers {
                let asked = ValidateVolumeCapabilitiesRequest {
                    volume_id: volume.volume_id.clone(),
                    volume_context: volume.volume_context.clone(),
                    volume_capabilities: vec![capability.clone()],
                    ..Default::default()
                };
                let answer = driver.validate_volume_capabilities(asked).unwrap();
                let confirmed = answer.confirmed.map(|confirmed| confirmed.volume_capabilities);
                assert_eq!(confirmed, Some(vec![capability.clone()]), "{claim} {mode:?}");
            }
        }
    }
}
