//! Volumes in cells of a volume group: two daemons of one machine share a folder of cells, each
//! with a plugin. Volumes are staged over NBD, since block devices need a kernel with ublk.

#![expect(clippy::unwrap_used, reason = "a failure fails the test")]

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::{
    ControllerExpandVolumeRequest, ControllerGetVolumeRequest, CreateVolumeRequest,
    DeleteVolumeRequest, GetCapacityRequest, NodeExpandVolumeRequest, NodeGetInfoRequest,
    NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnstageVolumeRequest, Topology, Volume,
};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon;
use blockd_testkit::folder::Folder;
use blockd_testkit::nbd::Connection;
use blockd_testkit::tools::{self, free_port};
use blockd_tests::csi::rig::{Rig, Settings};
use blockd_tests::csi::{Driver, block, range, refused};
use nix::sys::stat::Mode as FileMode;
use nix::unistd::mkfifo;
use tonic::{Code, Status};

const MIB: i64 = 1 << 20;
/// Bytes of a volume.
const SIZE: i64 = 64 * MIB;
/// An unstage asks nothing that may take long: far less than a group's limit, which is 28 s.
const PROMPT: Duration = Duration::from_secs(10);

/// A node: its daemon and its plugin.
struct Node {
    rig: Rig,
    driver: Driver,
}

/// Two nodes of the group `local`.
struct Nodes {
    a: Node,
    b: Node,
    /// Cells are on disk, as their pools need `O_DIRECT`.
    folder: Folder,
}

impl Nodes {
    fn start() -> Self {
        let parent = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let folder = Folder::below(parent, "csi-cells").unwrap();
        let [a, b] = [1, 2].map(|host| Node::start(folder.path(), host));
        Self { a, b, folder }
    }

    /// Files of cells, and notes of them.
    fn files(&self) -> Vec<PathBuf> {
        let all = fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().path());
        let is_cell =
            |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().contains("cell-");
        all.filter(is_cell).collect()
    }
}

impl Node {
    fn start(folder: &Path, host: u32) -> Self {
        Self::start_as(folder, host, "")
    }

    /// The same with a driver of this name.
    fn start_as(folder: &Path, host: u32, driver_name: &str) -> Self {
        let port = free_port().unwrap();
        let tables = format!(
            "[node]\nid = \"4f2b8c1d-0e4a-4d5b-9c6f-7a8b9c0d1e2{host}\"\n\
             [hosts]\nlisten = \"127.0.0.1:{port}\"\n"
        );
        let daemon = daemon::Settings { tables, ..Settings::default().daemon };
        let node = format!("node-{host}");
        let driver_name = driver_name.to_owned();
        let settings = Settings { daemon, node: node.clone(), driver_name, ..Settings::default() };
        let rig = Rig::start(&node, &settings);
        let (rig, host, folder) = (rig.unwrap(), host.to_string(), folder.to_str().unwrap());
        rig.daemon.cli(&["vg", "add", "--folder", folder, "--host", &host, "local"]).unwrap();
        let driver = rig.plugin.driver().unwrap();
        Self { rig, driver }
    }

    fn make(&self, name: &str, mode: Mode) -> Volume {
        let request = CreateVolumeRequest {
            name: name.to_owned(),
            capacity_range: range(SIZE, 0),
            volume_capabilities: vec![block(mode)],
            parameters: parameters(),
            ..Default::default()
        };
        self.driver.create_volume(request).unwrap().volume.unwrap()
    }

    fn staging(&self) -> String {
        let path = self.rig.plugin.kubelet_dir().join("plugins/kubernetes.io/csi/v/globalmount");
        path.to_str().unwrap().to_owned()
    }

    fn stage(&self, volume: &Volume, mode: Mode) -> Result<(), Status> {
        let request = NodeStageVolumeRequest {
            volume_id: volume.volume_id.clone(),
            staging_target_path: self.staging(),
            volume_capability: Some(block(mode)),
            volume_context: volume.volume_context.clone(),
            ..Default::default()
        };
        self.driver.node_stage_volume(request).map(drop)
    }

    fn unstage(&self, volume: &Volume) -> Result<(), Status> {
        let volume_id = volume.volume_id.clone();
        let staging_target_path = self.staging();
        let request = NodeUnstageVolumeRequest { volume_id, staging_target_path };
        self.driver.node_unstage_volume(request).map(drop)
    }

    fn delete(&self, volume: &Volume) -> Result<(), Status> {
        let volume_id = volume.volume_id.clone();
        let request = DeleteVolumeRequest { volume_id, ..Default::default() };
        self.driver.delete_volume(request).map(drop)
    }

    /// A client of a staged volume.
    fn connect(&self, volume: &Volume) -> Connection {
        let (_, export) = volume.volume_id.split_once('/').unwrap();
        self.rig.daemon.connect(export).unwrap()
    }

    /// The state of the only cell.
    fn cell(&self) -> String {
        let cells = self.rig.daemon.cli(&["cell", "list"]).unwrap();
        cells["cells"][0]["state"].as_str().unwrap().to_owned()
    }

    fn topology(&self) -> HashMap<String, String> {
        let info = self.driver.node_get_info(NodeGetInfoRequest {}).unwrap();
        info.accessible_topology.unwrap().segments
    }
}

fn parameters() -> HashMap<String, String> {
    let pairs = [("volume-group", "local"), ("front-end", "nbd")];
    pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

fn block_of(number: u8) -> Vec<u8> {
    vec![number; 4096]
}

/// A refusal with this code, whose message has all of these.
fn refused_with(answer: Result<(), Status>, words: &[&str]) {
    let status = refused(answer, Code::FailedPrecondition).unwrap();
    for word in words {
        assert!(status.message().contains(word), "{} does not say {word:?}", status.message());
    }
}

/// The label that says that a volume is encrypted begins with the driver's name.
#[test]
fn an_encrypted_volume_is_refused_where_the_drivers_name_can_begin_no_label() {
    let parent = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = Folder::below(parent, "csi-cells").unwrap();
    let node = Node::start_as(folder.path(), 1, "csi.Example.com");
    let mut parameters = parameters();
    parameters.remove("front-end");
    parameters.insert("encryption".to_owned(), "luks2".to_owned());
    let request = CreateVolumeRequest {
        name: "pvc-1".to_owned(),
        capacity_range: range(SIZE, 0),
        volume_capabilities: vec![block(Mode::SingleNodeWriter)],
        parameters,
        ..Default::default()
    };
    let status = refused(node.driver.create_volume(request), Code::InvalidArgument).unwrap();
    let words = "the driver's name is csi.Example.com: must be without capital letters";
    assert!(status.message().contains(words), "{}", status.message());
    // No cell was made for it.
    let cells = node.rig.daemon.cli(&["cell", "list"]).unwrap();
    assert_eq!(cells["cells"].as_array().unwrap().len(), 0, "{cells}");
}

#[test]
fn a_volume_is_used_by_one_node_at_a_time_and_goes_to_the_next_with_its_bytes() {
    let nodes = Nodes::start();
    let (a, b) = (&nodes.a, &nodes.b);
    let volume = a.make("pvc-1", Mode::SingleNodeWriter);
    assert_eq!(volume.capacity_bytes, SIZE);
    let segments = &volume.accessible_topology[0].segments;
    assert_eq!(segments.len(), 1);
    for node in [a, b] {
        // Each node reports itself, and the group beside.
        let reported = node.topology();
        assert_eq!(reported.len(), 2, "{reported:?}");
        assert_eq!(reported["csi.blockd.io/vg.local"], segments["csi.blockd.io/vg.local"]);
    }
    assert_ne!(a.topology()["csi.blockd.io/node"], b.topology()["csi.blockd.io/node"]);
    // Whichever node the call comes to again.
    for node in [a, b, a] {
        assert_eq!(node.make("pvc-1", Mode::SingleNodeWriter), volume);
    }
    for _ in 0..2 {
        a.stage(&volume, Mode::SingleNodeWriter).unwrap();
    }
    // From its attachment on it is in use, without a client too.
    let in_use = ["host 1 refuses", "is in use: its volume csi.", "is attached"];
    refused_with(b.stage(&volume, Mode::SingleNodeWriter), &in_use);
    let mut client = a.connect(&volume);
    client.write(0, &block_of(7)).unwrap();
    refused_with(b.stage(&volume, Mode::SingleNodeWriter), &in_use);
    refused_with(b.delete(&volume), &in_use);
    refused_with(a.unstage(&volume), &["has 1 connection"]);
    assert_eq!((a.cell().as_str(), b.cell().as_str()), ("open", "elsewhere"));
    drop(client);
    let unstaged = || a.unstage(&volume).ok();
    tools::wait_until("the client to be gone", PROMPT, unstaged).unwrap();
    a.unstage(&volume).unwrap();
    // It stays where it is until it is wanted.
    assert_eq!(a.cell(), "open");
    for _ in 0..2 {
        b.stage(&volume, Mode::SingleNodeWriter).unwrap();
    }
    assert_eq!((a.cell().as_str(), b.cell().as_str()), ("elsewhere", "open"));
    assert_eq!(b.connect(&volume).read(0, 4096).unwrap(), block_of(7));
    refused_with(a.stage(&volume, Mode::SingleNodeWriter), &["host 2 refuses", "is in use"]);
    refused_with(a.delete(&volume), &["host 2 refuses", "is in use"]);
    // Nothing of it is here, and that is no error.
    a.unstage(&volume).unwrap();
    assert_eq!(b.cell(), "open");
    let target = b.rig.plugin.kubelet_dir().join("pods/1/volume");
    let publish = NodePublishVolumeRequest {
        volume_id: volume.volume_id.clone(),
        staging_target_path: b.staging(),
        target_path: target.to_str().unwrap().to_owned(),
        volume_capability: Some(block(Mode::SingleNodeWriter)),
        volume_context: volume.volume_context.clone(),
        ..Default::default()
    };
    let published = b.driver.node_publish_volume(publish).map(drop);
    refused_with(published, &["front-end: nbd", "clients connect to its export"]);
    tools::wait_until("the client to be gone", PROMPT, || b.unstage(&volume).ok()).unwrap();
    for node in [a, a, b] {
        node.delete(&volume).unwrap();
    }
    assert_eq!(nodes.files(), Vec::<PathBuf>::new());
}

#[test]
fn a_volume_is_on_standby_on_the_node_that_it_is_to_move_to() {
    let nodes = Nodes::start();
    let (a, b) = (&nodes.a, &nodes.b);
    let volume = a.make("pvc-1", Mode::MultiNodeMultiWriter);
    for node in [a, b, a, b] {
        node.stage(&volume, Mode::MultiNodeMultiWriter).unwrap();
    }
    // An attachment fetches nothing.
    assert_eq!((a.cell().as_str(), b.cell().as_str()), ("open", "elsewhere"));
    let (mut here, mut there) = (a.connect(&volume), b.connect(&volume));
    here.write(0, &block_of(1)).unwrap();
    assert_eq!(there.read(0, 4096).unwrap(), block_of(1));
    assert_eq!((a.cell().as_str(), b.cell().as_str()), ("elsewhere", "open"));
    there.write(0, &block_of(2)).unwrap();
    // And back, as after a migration that failed.
    assert_eq!(here.read(0, 4096).unwrap(), block_of(2));
    assert_eq!((a.cell().as_str(), b.cell().as_str()), ("open", "elsewhere"));
    drop(there);
    // It is not here, though it is attached: alone it can't be used while the other one has it.
    refused_with(b.stage(&volume, Mode::SingleNodeWriter), &["host 1 refuses", "is in use"]);
    refused_with(b.delete(&volume), &["is attached on standby"]);
    drop(here);
    tools::wait_until("the client to be gone", PROMPT, || a.unstage(&volume).ok()).unwrap();
    b.stage(&volume, Mode::SingleNodeWriter).unwrap();
    assert_eq!(b.cell(), "open");
    assert_eq!(b.connect(&volume).read(0, 4096).unwrap(), block_of(2));
    tools::wait_until("the client to be gone", PROMPT, || b.unstage(&volume).ok()).unwrap();
    a.delete(&volume).unwrap();
    assert_eq!(nodes.files(), Vec::<PathBuf>::new());
}

#[test]
fn a_volume_grows_on_the_node_that_uses_it() {
    let nodes = Nodes::start();
    let (a, b) = (&nodes.a, &nodes.b);
    let volume = a.make("pvc-1", Mode::SingleNodeWriter);
    let expand = |node: &Node, mib: i64| {
        let request = ControllerExpandVolumeRequest {
            volume_id: volume.volume_id.clone(),
            capacity_range: range(mib * MIB, 0),
            volume_capability: Some(block(Mode::SingleNodeWriter)),
            ..Default::default()
        };
        let answer = node.driver.controller_expand_volume(request).unwrap();
        (answer.capacity_bytes / MIB, answer.node_expansion_required)
    };
    // Its cell comes to the node of the call, and has less space than the volume then has bytes.
    assert_eq!(expand(b, 256), (256, false));
    assert_eq!(b.cell(), "open");
    a.stage(&volume, Mode::SingleNodeWriter).unwrap();
    for _ in 0..2 {
        assert_eq!(expand(b, 512), (512, true));
    }
    assert_eq!(a.connect(&volume).size, 256 << 20);
    let on_node = |node: &Node| {
        node.driver.node_expand_volume(NodeExpandVolumeRequest {
            volume_id: volume.volume_id.clone(),
            volume_path: node.staging(),
            staging_target_path: node.staging(),
            capacity_range: range(512 * MIB, 0),
            volume_capability: Some(block(Mode::SingleNodeWriter)),
            ..Default::default()
        })
    };
    for _ in 0..2 {
        assert_eq!(on_node(a).unwrap().capacity_bytes, 512 * MIB);
    }
    assert_eq!(a.connect(&volume).size, 512 << 20);
    assert_eq!(on_node(b).unwrap_err().code(), Code::NotFound);
    let get = |node: &Node| {
        let volume_id = volume.volume_id.clone();
        let request = ControllerGetVolumeRequest { volume_id };
        let found = node.driver.controller_get_volume(request).unwrap();
        let condition = found.status.unwrap().volume_condition.unwrap();
        (found.volume.unwrap().capacity_bytes, condition)
    };
    assert_eq!(get(a).0, 512 * MIB);
    let (unknown, condition) = get(b);
    assert_eq!((unknown, condition.abnormal), (0, false));
    assert!(condition.message.contains("its cell is on host 1"), "{condition:?}");
    for node in [a, b] {
        let listed = node.driver.all_volumes(1).unwrap();
        assert_eq!(listed.len(), 1);
        assert_eq!(listed[0].volume_id, volume.volume_id);
    }
    let capacity = |node: &Node, segments: HashMap<String, String>| {
        let request = GetCapacityRequest {
            parameters: parameters(),
            accessible_topology: Some(Topology { segments }),
            ..Default::default()
        };
        node.driver.get_capacity(request).unwrap().available_capacity
    };
    assert!(capacity(a, a.topology()) > 0 && capacity(b, b.topology()) > 0);
    assert_eq!(capacity(a, HashMap::from([("zone".to_owned(), "z".to_owned())])), 0);
}

#[test]
fn a_shared_volume_that_no_other_node_uses_comes_and_grows() {
    let nodes = Nodes::start();
    let (a, b) = (&nodes.a, &nodes.b);
    let mode = Mode::MultiNodeMultiWriter;
    let volume = a.make("pvc-1", mode);
    b.stage(&volume, mode).unwrap();
    assert_eq!((a.cell().as_str(), b.cell().as_str()), ("elsewhere", "open"));
    a.stage(&volume, mode).unwrap();
    assert_eq!((a.cell().as_str(), b.cell().as_str()), ("elsewhere", "open"));
    let grow = || {
        a.driver.node_expand_volume(NodeExpandVolumeRequest {
            volume_id: volume.volume_id.clone(),
            volume_path: a.staging(),
            staging_target_path: a.staging(),
            capacity_range: range(256 * MIB, 0),
            volume_capability: Some(block(mode)),
            ..Default::default()
        })
    };
    refused_with(grow().map(drop), &["is attached on standby", "grows on the node"]);
    b.unstage(&volume).unwrap();
    assert_eq!(grow().unwrap().capacity_bytes, 256 * MIB);
    assert_eq!((a.cell().as_str(), b.cell().as_str()), ("open", "elsewhere"));
    assert_eq!(a.connect(&volume).size, 256 << 20);
}

#[test]
fn the_volume_of_a_node_that_is_dead_is_refused_with_what_helps() {
    let mut nodes = Nodes::start();
    let volume = nodes.a.make("pvc-1", Mode::MultiNodeMultiWriter);
    nodes.a.stage(&volume, Mode::MultiNodeMultiWriter).unwrap();
    nodes.a.connect(&volume).write(0, &block_of(3)).unwrap();
    let known = nodes.a.topology();
    nodes.a.rig.daemon.kill().unwrap();
    let b = &nodes.b;
    let advice =
        ["host 1", "blockd node declare-dead local/1", "node.kubernetes.io/out-of-service"];
    for mode in [Mode::SingleNodeWriter, Mode::MultiNodeMultiWriter] {
        refused_with(b.stage(&volume, mode), &advice);
    }
    refused_with(b.delete(&volume), &advice);
    // The node is known by its groups while its daemon is away.
    assert!(known.contains_key("csi.blockd.io/vg.local"));
    assert_eq!(nodes.a.topology(), known);
    // It comes back, with its volume: nothing was taken from it.
    nodes.a.rig.daemon.start().unwrap();
    nodes.a.stage(&volume, Mode::MultiNodeMultiWriter).unwrap();
    nodes.b.stage(&volume, Mode::MultiNodeMultiWriter).unwrap();
    assert_eq!(nodes.b.connect(&volume).read(0, 4096).unwrap(), block_of(3));
}

#[test]
fn an_unstage_does_not_wait_for_a_group_that_hangs() {
    let nodes = Nodes::start();
    let (a, b) = (&nodes.a, &nodes.b);
    let volume = a.make("pvc-1", Mode::MultiNodeMultiWriter);
    for node in [a, b] {
        node.stage(&volume, Mode::MultiNodeMultiWriter).unwrap();
    }
    // A read of the lease hangs from now on.
    let notes = nodes.files();
    let lease = notes.iter().find(|path| path.to_str().unwrap().ends_with("_held")).unwrap();
    fs::remove_file(lease).unwrap();
    mkfifo(lease, FileMode::from_bits_truncate(0o600)).unwrap();
    for node in [a, b, a, b] {
        let clock = Clock::start();
        node.unstage(&volume).unwrap();
        assert!(clock.elapsed() < PROMPT, "{:?}", clock.elapsed());
    }
    fs::remove_file(lease).unwrap();
    fs::write(lease, "1").unwrap();
    b.stage(&volume, Mode::SingleNodeWriter).unwrap();
    assert_eq!(b.cell(), "open");
}
