//! The plugin beside a real daemon, both as processes: sizes, a daemon that is away or late,
//! drivers side by side, and long lists.

#![expect(clippy::unwrap_used, reason = "a failure fails the test")]

#[path = "csi/capacity.rs"]
mod capacity;
#[path = "csi/cluster.rs"]
mod cluster;
#[path = "csi/ephemeral.rs"]
mod ephemeral;
#[path = "csi/extender.rs"]
mod extender;
#[path = "csi/logged.rs"]
mod logged;
#[path = "csi/modes.rs"]
mod modes;
#[path = "csi/pmem.rs"]
mod pmem;
#[path = "csi/privileges.rs"]
mod privileges;
#[path = "csi/reported.rs"]
mod reported;

use std::collections::{BTreeSet, HashMap};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use blockd_api::v1;
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::volume_capability::{AccessMode, AccessType, MountVolume};
use blockd_csi::proto::volume_content_source::{SnapshotSource, Type, VolumeSource};
use blockd_csi::proto::{
    ControllerGetVolumeRequest, ControllerModifyVolumeRequest, CreateSnapshotRequest,
    CreateVolumeRequest, DeleteVolumeRequest, GetCapacityRequest, ListVolumesRequest,
    NodeGetVolumeStatsRequest, ProbeRequest, Volume, VolumeCapability, VolumeCondition,
    VolumeContentSource, controller_service_capability, node_service_capability,
};
use blockd_testkit::folder::Folder;
use blockd_testkit::{daemon, tools};
use blockd_tests::csi::rig::{Plugin, Rig, Settings};
use blockd_tests::csi::{self, Answer, Driver, Offers, block, range, refused};
use nix::sys::signal::Signal;
use tonic::{Code, Request};

const MIB: i64 = 1 << 20;
const CLASS: &str = "csi.blockd.io/device-class";

/// A plugin whose pool has this size, with these classes.
fn rig(name: &str, pool_mib: u64, config: &str) -> Rig {
    let daemon = daemon::Settings { pool_size: pool_mib << 20, ..daemon::Settings::default() };
    let settings = Settings { daemon, config: config.to_owned(), ..Settings::default() };
    Rig::start(name, &settings).unwrap()
}

fn mounted(fs_type: &str) -> VolumeCapability {
    let mount = MountVolume { fs_type: fs_type.to_owned(), ..Default::default() };
    VolumeCapability {
        access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
        access_type: Some(AccessType::Mount(mount)),
    }
}

fn request(name: &str, capability: VolumeCapability, bytes: i64) -> CreateVolumeRequest {
    CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: range(bytes, 0),
        volume_capabilities: vec![capability],
        ..Default::default()
    }
}

fn of_class(class: &str) -> HashMap<String, String> {
    HashMap::from([(CLASS.to_owned(), class.to_owned())])
}

fn create(driver: &Driver, request: &CreateVolumeRequest) -> Answer<Volume> {
    let answer = driver.create_volume(request.clone())?;
    Ok(answer.volume.expect("an answer has its volume"))
}

fn delete(driver: &Driver, id: &str) -> Answer<()> {
    let request = DeleteVolumeRequest { volume_id: id.to_owned(), ..Default::default() };
    driver.delete_volume(request).map(|_| ())
}

fn free(driver: &Driver, class: &str) -> i64 {
    let request = GetCapacityRequest { parameters: of_class(class), ..Default::default() };
    driver.get_capacity(request).unwrap().available_capacity
}

/// Row: T1.
#[test]
fn a_hundred_volumes_of_8_mib_live_in_a_pool_of_2_gib() {
    let rig = rig("hundred", 2048, "");
    let driver = rig.plugin.driver().unwrap();
    for number in 0..100 {
        let wanted = block(Mode::SingleNodeWriter);
        let volume = create(&driver, &request(&format!("v{number}"), wanted, 8 * MIB)).unwrap();
        assert_eq!(volume.capacity_bytes, 8 * MIB);
    }
    let volumes = driver.all_volumes(0).unwrap();
    assert_eq!(volumes.len(), 100);
    assert!(volumes.iter().all(|volume| volume.capacity_bytes == 8 * MIB));
    for volume in volumes {
        delete(&driver, &volume.volume_id).unwrap();
    }
    assert_eq!(rig.control().unwrap().names().unwrap(), [""; 0]);
}

/// Classes that promise no more than there is: by size, and by what is set aside.
const EXACT: &str = r#"
[[class]]
name = "thin"
default = true
overprovision_ratio = "1.0"

[[class]]
name = "thick"
kind = "thick"
"#;

/// Row: T3.
#[test]
fn a_claim_of_500_mib_is_taken_where_500_mib_are_free() {
    for class in ["thin", "thick"] {
        let rig = rig("claim", 2048, EXACT);
        let driver = rig.plugin.driver().unwrap();
        let wanted = |name: &str, bytes: i64| CreateVolumeRequest {
            parameters: of_class(class),
            ..request(name, mounted("ext4"), bytes)
        };
        // The map of thick volumes takes a little too: fill up until it is 500 MiB.
        for number in 0..10 {
            let more = free(&driver, class) - 500 * MIB;
            if more < 8 * MIB {
                break;
            }
            let filler = CreateVolumeRequest {
                parameters: of_class(class),
                ..request(&format!("filler-{number}"), block(Mode::SingleNodeWriter), more)
            };
            create(&driver, &filler).unwrap();
        }
        let left = free(&driver, class) - 500 * MIB;
        assert!((0..8 * MIB).contains(&left) && (class == "thick" || left == 0), "{left} more");
        let volume = create(&driver, &wanted("claim", 500 * MIB)).unwrap();
        assert_eq!(volume.capacity_bytes, 500 * MIB, "{class}");
        let answer = create(&driver, &wanted("one-more", 32 * MIB));
        let status = refused(answer, Code::ResourceExhausted).unwrap();
        let (asked, left) = ((32 * MIB).to_string(), free(&driver, class).to_string());
        assert!(status.message().contains(&asked), "{class}: {status}");
        assert!(status.message().contains(&left), "{class}: {status}");
        assert!(status.message().contains("default"), "the pool's name: {status}");
    }
}

/// A daemon can be reached a moment before it reports that it is ready.
fn ready(driver: &Driver) {
    let is_ready = || driver.probe(ProbeRequest {}).unwrap().ready.unwrap().then_some(());
    tools::wait_until("the plugin to be ready", Duration::from_secs(60), is_ready).unwrap();
}

#[test]
fn a_daemon_that_is_away_is_unavailable_and_all_goes_on_when_it_is_back() {
    let mut rig = Rig::start("away", &Settings::default()).unwrap();
    let driver = rig.plugin.driver().unwrap();
    let wanted = request("before", mounted("ext4"), 64 * MIB);
    let before = create(&driver, &wanted).unwrap();
    rig.daemon.kill().unwrap();
    for _ in 0..3 {
        let volume_id = before.volume_id.clone();
        refused(create(&driver, &request("meanwhile", mounted("ext4"), MIB)), Code::Unavailable)
            .unwrap();
        refused(delete(&driver, &volume_id), Code::Unavailable).unwrap();
        refused(driver.list_volumes(ListVolumesRequest::default()), Code::Unavailable).unwrap();
        let asked = ControllerGetVolumeRequest { volume_id };
        refused(driver.controller_get_volume(asked), Code::Unavailable).unwrap();
        let capacity = driver.get_capacity(GetCapacityRequest::default());
        refused(capacity, Code::Unavailable).unwrap();
        // It works and waits for its daemon: not ready is no error.
        assert_eq!(driver.probe(ProbeRequest {}).unwrap().ready, Some(false));
    }
    rig.daemon.start().unwrap();
    ready(&driver);
    assert_eq!(create(&driver, &wanted).unwrap(), before);
    create(&driver, &request("after", mounted("ext4"), 64 * MIB)).unwrap();
}

#[test]
fn a_plugin_that_is_started_before_its_daemon_waits_for_it() {
    let mut daemon = daemon::Daemon::new("late", &daemon::Settings::default()).unwrap();
    let mut plugin = Plugin::new("early", &daemon.control_socket(), &Settings::default()).unwrap();
    plugin.start().unwrap();
    let driver = plugin.driver().unwrap();
    assert_eq!(driver.offers().name, "csi.blockd.io");
    assert_eq!(driver.probe(ProbeRequest {}).unwrap().ready, Some(false));
    daemon.start().unwrap();
    ready(&driver);
    create(&driver, &request("first", mounted("ext4"), 64 * MIB)).unwrap();
    plugin.stop().unwrap();
}

#[test]
fn a_daemon_that_answers_late_leaves_the_deadline_in_force_and_the_repeat_succeeds() {
    let rig = Rig::start("slow", &Settings::default()).unwrap();
    let driver = rig.plugin.driver().unwrap();
    let wanted = request("late", mounted("ext4"), 64 * MIB);
    rig.daemon.freeze().unwrap();
    let hasty = rig.plugin.client(Duration::from_millis(500)).unwrap();
    let first = create(&hasty, &wanted);
    // The lock goes with the work, not with who asked for it.
    let second = create(&hasty, &wanted);
    rig.daemon.signal(Signal::SIGCONT).unwrap();
    let late = [Code::DeadlineExceeded, Code::Cancelled];
    assert!(late.contains(&first.unwrap_err().code()));
    let code = second.unwrap_err().code();
    assert!(late.contains(&code) || code == Code::Aborted, "{code:?}");
    let mut answer = create(&driver, &wanted);
    while answer.as_ref().is_err_and(|status| status.code() == Code::Aborted) {
        std::thread::sleep(Duration::from_millis(10));
        answer = create(&driver, &wanted);
    }
    let volume = answer.unwrap();
    assert_eq!(driver.all_volumes(0).unwrap().len(), 1);
    delete(&driver, &volume.volume_id).unwrap();
    assert_eq!(rig.control().unwrap().names().unwrap(), [""; 0]);
}

#[test]
fn a_thousand_volumes_are_listed_in_pages() {
    const COUNT: usize = 1000;
    let rig = Rig::start("thousand", &Settings::default()).unwrap();
    let driver = rig.plugin.driver().unwrap();
    let runtime = driver.runtime();
    for first in (0..COUNT).step_by(50) {
        let calls = (first..first + 50).map(|number| {
            let wanted = block(Mode::SingleNodeWriter);
            let request = request(&format!("pvc-{number:04}"), wanted, 8 * MIB);
            let mut controller = driver.controller();
            runtime.spawn(async move { controller.create_volume(Request::new(request)).await })
        });
        let calls: Vec<_> = calls.collect();
        for call in calls {
            runtime.block_on(call).unwrap().unwrap();
        }
    }
    for page in [0, 1, 7, 100, 999, 1000, 1001] {
        let listed = driver.all_volumes(page).unwrap();
        let ids: BTreeSet<String> = listed.into_iter().map(|one| one.volume_id).collect();
        assert_eq!(ids.len(), COUNT, "in pages of {page}");
    }
    polling_them_takes_no_io(&rig, &driver, COUNT);
}

/// Conditions of all of them, as a monitor polls them, without a write or flush of the pool. Some
/// come by themselves after creations: then it is tried again.
///
/// Row: H39.
fn polling_them_takes_no_io(rig: &Rig, driver: &Driver, count: usize) {
    let control = rig.control().unwrap();
    let counted = || {
        let stats = control.stats().unwrap();
        let sum = |of: fn(&v1::PoolStats) -> u64| stats.pools.iter().map(of).sum::<u64>();
        [sum(|it| it.commits), sum(|it| it.flushes), sum(|it| it.writes), sum(|it| it.discards)]
    };
    tools::wait_until("ten lists without IO", Duration::from_secs(60), || {
        let before = counted();
        for _ in 0..10 {
            let answer = driver.list_volumes(ListVolumesRequest::default()).unwrap();
            assert_eq!(answer.entries.len(), count);
            for entry in answer.entries {
                let condition = entry.status.unwrap().volume_condition.unwrap();
                assert!(!condition.abnormal && condition.message == "healthy", "{condition:?}");
            }
        }
        (counted() == before).then_some(())
    })
    .unwrap();
}

fn condition(driver: &Driver, id: &str) -> Answer<VolumeCondition> {
    let request = ControllerGetVolumeRequest { volume_id: id.to_owned() };
    let answer = driver.controller_get_volume(request)?;
    Ok(answer.status.unwrap().volume_condition.unwrap())
}

fn is_listed(driver: &Driver, id: &str) -> bool {
    driver.all_volumes(0).unwrap().iter().any(|volume| volume.volume_id == id)
}

/// Row: H38.
#[test]
fn a_volume_that_is_deleted_through_the_daemon_is_not_found() {
    let rig = Rig::start("behind", &Settings::default()).unwrap();
    let driver = rig.plugin.driver().unwrap();
    let id = create(&driver, &request("gone", mounted("ext4"), 64 * MIB)).unwrap().volume_id;
    assert_eq!(condition(&driver, &id).unwrap().message, "healthy");
    let name = rig.control().unwrap().volume(&id).unwrap().name;
    rig.daemon.cli(&["del", &name]).unwrap();
    refused(condition(&driver, &id), Code::NotFound).unwrap();
    assert!(!is_listed(&driver, &id));
}

/// Row: H38.
#[test]
fn a_pool_out_of_capacity_is_reported_with_numbers_until_there_is_room() {
    // Marks in bytes: those in seconds go by the speed of the last minutes.
    let daemon = daemon::Settings {
        pool_size: 64 << 20,
        pool_lines: "[pool.space]\nlow = \"4M\"\nvery_low = \"1M\"\n".to_owned(),
        tables: "[health]\ninterval = \"1s\"\nhold = \"1s\"\n".to_owned(),
        ..daemon::Settings::default()
    };
    let config = "[[class]]\nname = 'thin'\noverprovision_ratio = 4\n".to_owned();
    let rig = Rig::start("full", &Settings { daemon, config, ..Settings::default() }).unwrap();
    let driver = rig.plugin.driver().unwrap();
    let wanted = |name: &str| request(name, block(Mode::SingleNodeWriter), 100 * MIB);
    let id = create(&driver, &wanted("writer")).unwrap().volume_id;
    let beside = create(&driver, &wanted("beside")).unwrap().volume_id;
    assert_eq!(condition(&driver, &beside).unwrap().message, "healthy");
    let name = rig.control().unwrap().volume(&id).unwrap().name;
    rig.daemon.cli(&["set", "--on-full", "error", &name]).unwrap();
    rig.daemon.cli(&["attach", "--nbd", &name]).unwrap();
    let mut connection = rig.daemon.connect(&name).unwrap();
    let full = (0..100).find(|at| connection.write(at * (1 << 20), &[1; 1 << 20]).is_err());
    assert!(full.is_some_and(|at| at > 8), "full after {full:?} MiB");
    let reported = |id: &str| condition(&driver, id).unwrap();
    // Every volume that may need space is reported, those that don't write yet among them.
    for id in [&id, &beside] {
        let ill = tools::wait_until("an abnormal condition", Duration::from_secs(60), || {
            std::thread::sleep(Duration::from_millis(50));
            let reported = reported(id);
            reported.abnormal.then_some(reported.message)
        });
        let message = ill.unwrap();
        assert!(message.contains("default") && message.contains("MiB"), "{message}");
        assert!(message.len() <= 128, "{message}");
    }
    drop(connection);
    rig.daemon.cli(&["detach", "--force", &name]).unwrap();
    delete(&driver, &id).unwrap();
    tools::wait_until("a healthy condition", Duration::from_secs(120), || {
        std::thread::sleep(Duration::from_millis(50));
        (reported(&beside).message == "healthy").then_some(())
    })
    .unwrap();
}

/// Row: H38.
#[test]
fn a_node_that_is_down_gives_no_condition_and_reports_the_true_one_afterwards() {
    let mut rig = Rig::start("down", &Settings::default()).unwrap();
    let driver = rig.plugin.driver().unwrap();
    let id = create(&driver, &request("a", mounted("ext4"), 64 * MIB)).unwrap().volume_id;
    // A monitor on another node, as far as it can see: no answer, and none that says it is well.
    let monitor = rig.plugin.client(Duration::from_millis(500)).unwrap();
    assert_eq!(condition(&driver, &id).unwrap().message, "healthy");
    rig.plugin.freeze().unwrap();
    let late = [Code::DeadlineExceeded, Code::Cancelled];
    let stopped = condition(&monitor, &id).unwrap_err().code();
    let list = monitor.list_volumes(ListVolumesRequest::default()).unwrap_err().code();
    rig.plugin.signal(Signal::SIGCONT).unwrap();
    assert!(late.contains(&stopped) && late.contains(&list), "{stopped:?}, {list:?}");
    assert_eq!(condition(&driver, &id).unwrap().message, "healthy");
    rig.plugin.kill().unwrap();
    // The first call uses a connection that breaks, or that is about to.
    let gone = [Code::Unavailable, Code::Unknown, Code::DeadlineExceeded, Code::Cancelled];
    let first = condition(&monitor, &id).unwrap_err().code();
    assert!(gone.contains(&first), "{first:?}");
    let patient = rig.plugin.client(Duration::from_secs(60)).unwrap();
    refused(condition(&patient, &id), Code::Unavailable).unwrap();
    rig.plugin.start().unwrap();
    let driver = rig.plugin.driver().unwrap();
    // Its daemon alone is down: the plugin reports that, and nothing about volumes.
    rig.daemon.kill().unwrap();
    refused(condition(&driver, &id), Code::Unavailable).unwrap();
    refused(driver.list_volumes(ListVolumesRequest::default()), Code::Unavailable).unwrap();
    let stats = NodeGetVolumeStatsRequest {
        volume_id: id.clone(),
        volume_path: rig.plugin.kubelet_dir().join("pods/x").to_string_lossy().into_owned(),
        ..Default::default()
    };
    refused(driver.node_get_volume_stats(stats), Code::Unavailable).unwrap();
    rig.daemon.start().unwrap();
    assert_eq!(condition(&driver, &id).unwrap().message, "healthy");
}

/// Row: H37.
#[test]
fn switching_conditions_off_and_on_leaves_volumes_and_their_data_alone() {
    let rig = Rig::start("switched", &Settings::default()).unwrap();
    let driver = rig.plugin.driver().unwrap();
    let id = create(&driver, &request("a", mounted("ext4"), 64 * MIB)).unwrap().volume_id;
    let name = rig.control().unwrap().volume(&id).unwrap().name;
    rig.daemon.cli(&["attach", "--nbd", &name]).unwrap();
    let mut connection = rig.daemon.connect(&name).unwrap();
    connection.write(0, &[7; 4096]).unwrap();
    let settings = Settings { config: "[health]\nenabled = false\n".into(), ..Settings::default() };
    let mut off = Plugin::new("off", &rig.daemon.control_socket(), &settings).unwrap();
    off.start().unwrap();
    let offers = off.driver().unwrap().offers().clone();
    let has = |offers: &Offers| {
        let controller = controller_service_capability::rpc::Type::VolumeCondition.into();
        let node = node_service_capability::rpc::Type::VolumeCondition.into();
        (offers.controller.contains(&controller), offers.node.contains(&node))
    };
    assert_eq!((has(driver.offers()), has(&offers)), ((true, true), (false, false)));
    for endpoint in [off.endpoint(), rig.plugin.endpoint()] {
        let only = Some("conditions_are_reported_where".to_owned());
        let report = csi::run(&csi::Options { endpoint, only, ..rig.options() }).unwrap();
        assert!(report.is_good() && report.passed() == 1, "{report:?}");
    }
    // Readers and writers are not affected.
    assert_eq!(connection.read(0, 4096).unwrap(), [7; 4096]);
    connection.write(4096, &[8; 4096]).unwrap();
    assert!(is_listed(&off.driver().unwrap(), &id));
}

/// Row: P48.
#[test]
fn two_drivers_on_one_daemon_do_not_see_each_others_volumes() {
    let rig = Rig::start("first", &Settings::default()).unwrap();
    let settings = Settings { driver_name: "other.example.org".to_owned(), ..Settings::default() };
    let mut other = Plugin::new("second", &rig.daemon.control_socket(), &settings).unwrap();
    other.start().unwrap();
    let (ours, theirs) = (rig.plugin.driver().unwrap(), other.driver().unwrap());
    assert_eq!(theirs.offers().name, "other.example.org");
    // The same name in both.
    let wanted = request("shared-name", mounted("ext4"), 64 * MIB);
    let mine = create(&ours, &wanted).unwrap();
    let its = create(&theirs, &wanted).unwrap();
    assert_ne!(mine.volume_id, its.volume_id);
    let ids = |driver: &Driver| -> Vec<String> {
        let all = driver.all_volumes(0).unwrap();
        all.into_iter().map(|volume| volume.volume_id).collect()
    };
    assert_eq!(ids(&ours), [mine.volume_id.as_str()]);
    assert_eq!(ids(&theirs), [its.volume_id.as_str()]);
    let asked = ControllerGetVolumeRequest { volume_id: its.volume_id.clone() };
    refused(ours.controller_get_volume(asked), Code::NotFound).unwrap();
    // Deleting a volume of the other driver succeeds, and changes nothing.
    delete(&ours, &its.volume_id).unwrap();
    assert_eq!(ids(&theirs), [its.volume_id.as_str()]);
    let keys = |volume: &Volume| -> Vec<String> {
        volume.accessible_topology.iter().flat_map(|one| one.segments.keys().cloned()).collect()
    };
    assert_eq!(keys(&mine), ["csi.blockd.io/node"]);
    assert_eq!(keys(&its), ["other.example.org/node"]);
}

#[test]
fn volumes_that_others_made_in_the_daemon_are_left_alone() {
    let rig = Rig::start("foreign", &Settings::default()).unwrap();
    let driver = rig.plugin.driver().unwrap();
    rig.daemon.add("somebodys", 64 << 20).unwrap();
    assert_eq!(driver.all_volumes(0).unwrap(), []);
    let volume_id = "default/somebodys".to_owned();
    let asked = ControllerGetVolumeRequest { volume_id: volume_id.clone() };
    refused(driver.controller_get_volume(asked), Code::NotFound).unwrap();
    delete(&driver, &volume_id).unwrap();
    assert_eq!(rig.control().unwrap().names().unwrap(), ["somebodys"]);
}

/// Row: P51.
#[test]
fn a_volume_that_is_attached_is_not_deleted() {
    let rig = Rig::start("inuse", &Settings::default()).unwrap();
    let driver = rig.plugin.driver().unwrap();
    let volume = create(&driver, &request("used", mounted("ext4"), 64 * MIB)).unwrap();
    let name = rig.control().unwrap().volume(&volume.volume_id).unwrap().name;
    rig.daemon.cli(&["attach", "--nbd", &name]).unwrap();
    refused(delete(&driver, &volume.volume_id), Code::FailedPrecondition).unwrap();
    assert_eq!(driver.all_volumes(0).unwrap().len(), 1);
    rig.daemon.cli(&["detach", &name]).unwrap();
    delete(&driver, &volume.volume_id).unwrap();
}

/// Writes to, or compares, the start of a volume over NBD.
fn with_bytes(rig: &Rig, id: &str, write: Option<u8>, expected: u8) {
    let name = rig.control().unwrap().volume(id).unwrap().name;
    rig.daemon.cli(&["attach", "--nbd", &name]).unwrap();
    let mut connection = rig.daemon.connect(&name).unwrap();
    assert_eq!(connection.read(4096, 4096).unwrap(), [expected; 4096], "{id}");
    if let Some(byte) = write {
        connection.write(4096, &[byte; 4096]).unwrap();
        connection.flush().unwrap();
    }
    drop(connection);
    rig.daemon.cli(&["detach", "--force", &name]).unwrap();
}

#[test]
fn snapshots_and_clones_hold_what_their_source_held() {
    let rig = Rig::start("copies", &Settings::default()).unwrap();
    let driver = rig.plugin.driver().unwrap();
    let source = create(&driver, &request("source", mounted("ext4"), 64 * MIB)).unwrap().volume_id;
    with_bytes(&rig, &source, Some(1), 0);
    let wanted = CreateSnapshotRequest {
        source_volume_id: source.clone(),
        name: "snap".to_owned(),
        ..Default::default()
    };
    let snapshot_id = driver.create_snapshot(wanted).unwrap().snapshot.unwrap().snapshot_id;
    with_bytes(&rig, &source, Some(2), 1);
    let made_of = |name: &str, source: Type, size: i64| {
        let volume_content_source = Some(VolumeContentSource { r#type: Some(source) });
        let request = request(name, mounted("ext4"), size);
        let request = CreateVolumeRequest { volume_content_source, ..request };
        create(&driver, &request).unwrap().volume_id
    };
    let restored = made_of("restored", Type::Snapshot(SnapshotSource { snapshot_id }), 96 * MIB);
    let volume_id = source.clone();
    let cloned = made_of("cloned", Type::Volume(VolumeSource { volume_id }), 96 * MIB);
    with_bytes(&rig, &restored, Some(3), 1);
    with_bytes(&rig, &cloned, Some(4), 2);
    with_bytes(&rig, &source, None, 2);
    delete(&driver, &source).unwrap();
    with_bytes(&rig, &restored, None, 3);
    with_bytes(&rig, &cloned, None, 4);
    // The snapshot that a clone is made from is gone.
    let kinds = rig.control().unwrap().volumes().unwrap();
    let snapshots = kinds.iter().filter(|one| one.kind() == v1::VolumeKind::Snapshot).count();
    assert_eq!(snapshots, 1, "{kinds:?}");
}

#[test]
fn modified_parameters_are_in_force_in_the_daemon_and_bad_ones_change_none() {
    let rig = Rig::start("modify", &Settings::default()).unwrap();
    let driver = rig.plugin.driver().unwrap();
    let id = create(&driver, &request("modified", mounted("ext4"), 64 * MIB)).unwrap().volume_id;
    let modify = |pairs: &[(&str, &str)]| {
        let pairs = pairs.iter();
        driver.controller_modify_volume(ControllerModifyVolumeRequest {
            volume_id: id.clone(),
            mutable_parameters: pairs
                .map(|&(key, value)| (format!("csi.blockd.io/{key}"), value.to_owned()))
                .collect(),
            ..Default::default()
        })
    };
    let settings = || rig.control().unwrap().volume(&id).unwrap().settings.unwrap();
    modify(&[("iops", "500"), ("bandwidth", "10Mi"), ("on-full", "error"), ("quota", "48Mi")])
        .unwrap();
    let set = settings();
    assert_eq!((set.iops, set.bandwidth_bytes), (500, 10 * MIB));
    assert_eq!((set.on_full(), set.quota_bytes), (v1::OnFull::Error, 48 * MIB));
    // Parameters that are not named stay.
    modify(&[("iops", "700")]).unwrap();
    assert_eq!(settings(), v1::VolumeSettings { iops: 700, ..set });
    let before = settings();
    refused(modify(&[("iops", "1"), ("no-such-key", "1")]), Code::InvalidArgument).unwrap();
    refused(modify(&[("iops", "1"), ("bandwidth", "x")]), Code::InvalidArgument).unwrap();
    assert_eq!(settings(), before);
    let made = CreateVolumeRequest {
        mutable_parameters: HashMap::from([("csi.blockd.io/iops".to_owned(), "900".to_owned())]),
        ..request("made-so", mounted("ext4"), 64 * MIB)
    };
    let made = create(&driver, &made).unwrap().volume_id;
    assert_eq!(rig.control().unwrap().volume(&made).unwrap().settings.unwrap().iops, 900);
}

#[test]
fn the_socket_is_for_its_owner_alone_and_a_stale_one_is_replaced() {
    let mut rig = Rig::start("socket", &Settings::default()).unwrap();
    let mode = || rig.plugin.socket().metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(), 0o600);
    rig.plugin.kill().unwrap();
    assert!(rig.plugin.socket().exists(), "a killed plugin leaves its socket");
    rig.plugin.start().unwrap();
    rig.plugin.driver().unwrap();
    rig.plugin.stop().unwrap();
}
