//! The reports on a volume, by each service that is asked, and where it is not known.

use blockd_csi::proto::{
    NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnstageVolumeRequest,
};

use super::*;

/// The kubelet's probes in some minutes.
const PROBES: u32 = 10;

/// The exact size that was asked for: no size of the pool's extents, and no whole GiB.
#[test]
fn plugin_command_line_and_metrics_report_the_size_that_was_asked_for() {
    const BYTES: i64 = (37 << 20) + 4096;
    let tables = "[metrics]\naddress = \"127.0.0.1:0\"\n".to_owned();
    let daemon = daemon::Settings { tables, ..daemon::Settings::default() };
    let rig = Rig::start("size", &Settings { daemon, ..Settings::default() }).unwrap();
    let driver = rig.plugin.driver().unwrap();
    let wanted = request("exact", mounted("ext4"), BYTES);
    let volume = create(&driver, &wanted).unwrap();
    assert_eq!(volume.capacity_bytes, BYTES);
    assert_eq!(create(&driver, &wanted).unwrap().capacity_bytes, BYTES);
    let id = &volume.volume_id;
    let asked = ControllerGetVolumeRequest { volume_id: id.clone() };
    let got = driver.controller_get_volume(asked).unwrap().volume.unwrap();
    assert_eq!(got.capacity_bytes, BYTES);
    let listed: Vec<i64> =
        driver.all_volumes(0).unwrap().into_iter().map(|volume| volume.capacity_bytes).collect();
    assert_eq!(listed, [BYTES]);
    assert_eq!(rig.control().unwrap().volume(id).unwrap().size_bytes, BYTES);
    let (pool, name) = id.split_once('/').unwrap();
    let shown = rig.daemon.cli(&["show", "--pool", pool, name]).unwrap();
    assert_eq!(shown["volume"]["size_bytes"], BYTES, "{shown}");
    let row = format!("blockd_volume_size_bytes{{pool=\"{pool}\",volume=\"{name}\"}} {BYTES}");
    let metrics = rig.daemon.metrics().unwrap();
    assert!(metrics.lines().any(|line| line == row), "{row} is not in {metrics}");
}

/// The kubelet would start a plugin anew that is not alive, and its sidecars with it.
#[test]
fn a_plugin_whose_daemon_is_away_is_alive_and_not_ready() {
    let mut rig = Rig::start("alive", &Settings::default()).unwrap();
    let driver = rig.plugin.driver().unwrap();
    let pid = rig.plugin.pid();
    rig.plugin.alive().unwrap();
    for way in ["stopped", "dead"] {
        match way {
            "stopped" => rig.daemon.freeze().unwrap(),
            _ => rig.daemon.kill().unwrap(),
        }
        for _ in 0..PROBES {
            let asked = blockd_testkit::clock::Clock::start();
            rig.plugin.alive().unwrap_or_else(|error| panic!("{way}: {error:#}"));
            // The kubelet waits for 10 s.
            assert!(asked.elapsed() < Duration::from_secs(10), "{way}: {:?}", asked.elapsed());
        }
        if way == "dead" {
            assert_eq!(driver.probe(ProbeRequest {}).unwrap().ready, Some(false));
        } else {
            rig.daemon.signal(Signal::SIGCONT).unwrap();
        }
    }
    rig.daemon.start().unwrap();
    ready(&driver);
    assert!(pid.is_some() && rig.plugin.pid() == pid);
}

/// Two nodes, each with a daemon and a plugin of its own.
#[test]
fn a_volume_of_another_node_is_not_found_by_the_node_that_is_to_stage_it() {
    let here = rig("here", 1024, "");
    let there = rig("there", 1024, "");
    let volume = create(&here.plugin.driver().unwrap(), &request("one", mounted("ext4"), 64 * MIB));
    let volume_id = volume.unwrap().volume_id;
    let other = there.plugin.driver().unwrap();
    let path = |what: &str| {
        let path = there.plugin.kubelet_dir().join("plugins").join(what);
        path.to_string_lossy().into_owned()
    };
    let stage = NodeStageVolumeRequest {
        volume_id: volume_id.clone(),
        staging_target_path: path("globalmount"),
        volume_capability: Some(mounted("ext4")),
        ..Default::default()
    };
    refused(other.node_stage_volume(stage), Code::NotFound).unwrap();
    let publish = NodePublishVolumeRequest {
        volume_id: volume_id.clone(),
        staging_target_path: path("globalmount"),
        target_path: path("target"),
        volume_capability: Some(mounted("ext4")),
        ..Default::default()
    };
    let code = other.node_publish_volume(publish).unwrap_err().code();
    assert!([Code::NotFound, Code::FailedPrecondition].contains(&code), "{code:?}");
    let stats = NodeGetVolumeStatsRequest {
        volume_id: volume_id.clone(),
        volume_path: path("target"),
        ..Default::default()
    };
    refused(other.node_get_volume_stats(stats), Code::NotFound).unwrap();
    let asked = ControllerGetVolumeRequest { volume_id: volume_id.clone() };
    refused(other.controller_get_volume(asked), Code::NotFound).unwrap();
    // Nothing was made there, and taking away what never was succeeds.
    assert_eq!(there.control().unwrap().names().unwrap(), [""; 0]);
    let unstage = NodeUnstageVolumeRequest { volume_id, staging_target_path: path("globalmount") };
    other.node_unstage_volume(unstage).unwrap();
}
