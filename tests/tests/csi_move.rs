//! `blockd-csi move` between two daemons with their plugins: refused while the volume is used, cut
//! off in the middle and repeated, and the source deleted once the receiver has confirmed.

#![expect(clippy::unwrap_used, reason = "a failure fails the test")]

use std::fs::Permissions;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::{ControllerGetVolumeRequest, CreateVolumeRequest};
use blockd_testkit::daemon::Daemon;
use blockd_testkit::folder::Folder;
use blockd_testkit::tools;
use blockd_tests::csi::operator::persistent_volume;
use blockd_tests::csi::rig::{Rig, Settings};
use blockd_tests::csi::{block, range};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::Value;

const MIB: u64 = 1 << 20;
/// Bytes of the volume.
const SIZE: i64 = 64 << 20;
const NAME: &str = "csi.pvc-1";
const ID: &str = "default/csi.pvc-1";
/// Bytes that come through before the relay stops: several times what the receiver makes durable.
const FIRST: u64 = 8 * MIB;

/// A receiver, and a relay before it that lets a number of bytes through.
struct Receiver {
    child: Child,
    address: String,
    passes: Arc<AtomicU64>,
}

impl Receiver {
    fn start(daemon: &Daemon) -> Self {
        let words = ["receive", "--listen", "127.0.0.1:0", "--sync-every", "1M"];
        let mut command = daemon.command(&words);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut said = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        let behind = line.trim_end().strip_prefix("blockd: waiting for senders at ").unwrap();
        let behind = behind.to_owned();
        std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::stderr()));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp://{}", listener.local_addr().unwrap());
        let passes = Arc::new(AtomicU64::new(u64::MAX));
        let passing = Arc::clone(&passes);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (client, server) = (client.unwrap(), TcpStream::connect(&behind).unwrap());
                let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
                let passing = Arc::clone(&passing);
                std::thread::spawn(move || relay(client, server, &passing));
                std::thread::spawn(move || relay(back.0, back.1, &AtomicU64::new(u64::MAX)));
            }
        });
        Self { child, address, passes }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Passes bytes on, as many as there may be.
fn relay(mut from: TcpStream, mut to: TcpStream, passes: &AtomicU64) {
    let mut bytes = vec![0; 64 << 10];
    loop {
        match from.read(&mut bytes) {
            Ok(len) if len > 0 => {
                let bytes = &bytes[..len];
                while passes.load(Ordering::Acquire) < bytes.len() as u64 {
                    std::thread::sleep(Duration::from_millis(5));
                }
                passes.fetch_sub(bytes.len() as u64, Ordering::AcqRel);
                if to.write_all(bytes).is_err() {
                    return;
                }
            }
            _ => {
                let _ = to.shutdown(Shutdown::Write);
                return;
            }
        }
    }
}

struct Nodes {
    here: Rig,
    there: Rig,
    receiver: Receiver,
    folder: Folder,
}

impl Nodes {
    /// A volume of the plugin's on the first.
    fn start() -> Self {
        let here = Rig::start("here", &Settings::default()).unwrap();
        let there = Rig::start("there", &Settings::default()).unwrap();
        let mut parameters = std::collections::HashMap::new();
        for (key, value) in [
            ("csi.storage.k8s.io/pvc/name", "data"),
            ("csi.storage.k8s.io/pvc/namespace", "web"),
            ("csi.blockd.io/iops", "5000"),
        ] {
            parameters.insert(key.to_owned(), value.to_owned());
        }
        let made = here.plugin.driver().unwrap().create_volume(CreateVolumeRequest {
            name: "pvc-1".to_owned(),
            capacity_range: range(SIZE, 0),
            volume_capabilities: vec![block(Mode::SingleNodeWriter)],
            parameters,
            ..Default::default()
        });
        assert_eq!(made.unwrap().volume.unwrap().volume_id, ID);
        let receiver = Receiver::start(&there.daemon);
        let folder = Folder::new("move").unwrap();
        Self { here, there, receiver, folder }
    }

    /// Writes MiBs from there on, each with its number, and leaves the volume attached.
    fn write(&self, from: u64, count: u64) {
        self.here.daemon.cli(&["attach", NAME]).unwrap();
        let mut client = self.here.daemon.connect(NAME).unwrap();
        for number in from..from + count {
            let seed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut bytes = vec![0; 1 << 20];
            rng.fill(&mut bytes);
            client.write(number * MIB, &bytes).unwrap();
        }
        client.flush().unwrap();
        drop(client);
    }

    fn detach(&self) {
        self.here.daemon.cli(&["detach", NAME]).unwrap();
    }

    fn pv(&self) -> PathBuf {
        let path = self.folder.path().join("pv.json");
        std::fs::write(&path, persistent_volume("pvc-1", ID, "node-a").to_string()).unwrap();
        path
    }

    fn command(&self, words: &[&str]) -> Command {
        self.command_by(&self.receiver.address, &tools::blockd().unwrap(), words)
    }

    /// With another receiver, or another program that sends.
    fn command_by(&self, receiver: &str, program: &Path, words: &[&str]) -> Command {
        let mut command = Command::new(tools::blockd_csi().unwrap());
        command.args(["move", "--json", "--from-node", "node-a", "--to-node", "node-b"]);
        command.arg("--pv").arg(self.pv());
        command.args(["--receiver", receiver]);
        command.arg("--blockd-socket").arg(self.here.daemon.control_socket());
        command.arg("--blockd").arg(program).args(words);
        command
    }

    /// A program that sends, and attaches the volume before it ends.
    fn program_that_attaches(&self) -> PathBuf {
        let path = self.folder.path().join("blockd");
        let (blockd, socket) = (tools::blockd().unwrap(), self.here.daemon.control_socket());
        let (blockd, socket) = (blockd.display(), socket.display());
        let text = format!(
            "#!/bin/sh\nset -e\n{blockd} \"$@\"\n{blockd} --socket {socket} attach {NAME} >&2\n"
        );
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
        path
    }

    fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    fn ok(&self, words: &[&str]) -> Value {
        let output = self.run(words);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn refused(&self, words: &[&str]) -> String {
        refused(&mut self.command(words))
    }

    fn names_here(&self) -> Vec<String> {
        self.here.control().unwrap().names().unwrap()
    }

    /// Names of the volumes there, hidden ones too.
    fn names_there(&self) -> Vec<String> {
        self.there.control().unwrap().names().unwrap()
    }

    fn assert_same(&self) {
        let here = content(&self.here.daemon, self.folder.path());
        assert!(here == content(&self.there.daemon, self.folder.path()), "other bytes");
    }
}

fn refused(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn content(daemon: &Daemon, folder: &Path) -> Vec<u8> {
    let file = folder.join("content");
    daemon.cli(&["export", NAME, file.to_str().unwrap(), "--force"]).unwrap();
    std::fs::read(&file).unwrap()
}

#[test]
fn a_move_that_was_cut_off_goes_on_and_its_source_goes_last() {
    let nodes = Nodes::start();
    nodes.write(0, 32);
    let error = nodes.refused(&[]);
    assert!(error.contains("volume default/csi.pvc-1 is attached: end the pods"), "{error}");
    assert!(nodes.names_there().is_empty());
    nodes.detach();
    assert!(nodes.refused(&["--sent"]).contains("was written since it was sent to tcp://"));
    // The sender dies in the middle, with the program that it runs.
    nodes.receiver.passes.store(FIRST, Ordering::Release);
    let mut command = nodes.command(&[]);
    let mut child = command.process_group(0).stdout(Stdio::null()).spawn().unwrap();
    let begun =
        || nodes.names_there().iter().any(|name| name.starts_with(".receive-")).then_some(());
    tools::wait_until("the receiver to begin", Duration::from_secs(60), begun).unwrap();
    let held = || (nodes.receiver.passes.load(Ordering::Acquire) < 64 << 10).then_some(());
    tools::wait_until("the relay to stop", Duration::from_secs(60), held).unwrap();
    killpg(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGKILL).unwrap();
    child.wait().unwrap();
    nodes.receiver.passes.store(u64::MAX, Ordering::Release);
    assert!(!nodes.names_there().contains(&NAME.to_owned()));
    let answer = nodes.ok(&[]);
    assert_eq!((&answer["changed"], &answer["source_deleted"]), (&true.into(), &false.into()));
    nodes.assert_same();
    // Nothing is left to do, also without the program that sends.
    let again = nodes.ok(&[]);
    assert_eq!((&again["changed"], &again["snapshot"]), (&false.into(), &answer["snapshot"]));
    assert_eq!(nodes.ok(&["--sent"])["persistent_volume"], answer["persistent_volume"]);
    // The object for the other node.
    let spec = &answer["persistent_volume"]["spec"];
    let node = &spec["nodeAffinity"]["required"]["nodeSelectorTerms"][0]["matchExpressions"][0];
    assert_eq!((&spec["csi"]["volumeHandle"], &node["values"][0]), (&ID.into(), &"node-b".into()));
    // Later writes go as well, but not by the command that deletes.
    nodes.write(5, 2);
    nodes.detach();
    let there = nodes.names_there();
    for word in ["--sent", "--delete-source"] {
        assert!(nodes.refused(&[word]).contains("was written since it was sent"), "{word}");
    }
    assert_eq!(nodes.names_there(), there);
    assert_eq!(nodes.ok(&[])["changed"], true);
    nodes.assert_same();
    finish(&nodes, answer["configure"].as_str().unwrap());
}

/// The other plugin finds the volume, and the source is deleted once the receiver has confirmed.
fn finish(nodes: &Nodes, configure: &str) {
    let words: Vec<&str> = configure.split(' ').skip(1).collect();
    nodes.there.daemon.cli(&words).unwrap();
    let labels = |rig: &Rig| {
        let mut volume = rig.control().unwrap().volume(ID).unwrap();
        volume.labels.retain(|key, _| !key.starts_with("blockd.io/"));
        (volume.labels, volume.settings.unwrap_or_default().iops)
    };
    assert_eq!(labels(&nodes.there), labels(&nodes.here));
    assert_eq!(labels(&nodes.there).1, 5000);
    let request = ControllerGetVolumeRequest { volume_id: ID.to_owned() };
    let found = nodes.there.plugin.driver().unwrap().controller_get_volume(request).unwrap();
    assert_eq!(found.volume.unwrap().capacity_bytes, SIZE);
    let before = content(&nodes.here.daemon, nodes.folder.path());
    // A receiver that lost the volume does not confirm, and the source stays.
    for name in nodes.names_there() {
        nodes.there.daemon.cli(&["del", &name]).unwrap();
    }
    let error = nodes.refused(&["--delete-source"]);
    assert!(error.contains("was sent anew, as the receiver did not have it"), "{error}");
    nodes.assert_same();
    let answer = nodes.ok(&["--delete-source"]);
    assert_eq!((&answer["changed"], &answer["source_deleted"]), (&false.into(), &true.into()));
    assert!(nodes.names_here().is_empty());
    assert!(before == content(&nodes.there.daemon, nodes.folder.path()));
    let again = nodes.ok(&["--delete-source"]);
    assert_eq!(again["persistent_volume"], answer["persistent_volume"]);
    assert!(again["snapshot"].is_null());
    assert!(nodes.refused(&[]).contains("volume default/csi.pvc-1 does not exist"));
}

/// Then the receiver can't confirm that it has what was sent, and the source goes by hand.
#[test]
fn a_source_whose_copy_was_used_already_is_kept() {
    let nodes = Nodes::start();
    nodes.write(0, 2);
    nodes.detach();
    nodes.ok(&[]);
    // A pod comes here between the receiver's answer and the deletion.
    let (receiver, program) = (&nodes.receiver.address, nodes.program_that_attaches());
    let error = refused(&mut nodes.command_by(receiver, &program, &["--delete-source"]));
    assert!(error.contains("volume default/csi.pvc-1 is attached"), "{error}");
    nodes.detach();
    let there = &nodes.there.daemon;
    there.cli(&["attach", NAME]).unwrap();
    let unconfirmed = || {
        let error = nodes.refused(&["--delete-source"]);
        assert!(error.contains("is not confirmed by the receiver: "), "{error}");
        assert!(error.contains("delete it here by `blockd del`"), "{error}");
    };
    let mut client = there.connect(NAME).unwrap();
    unconfirmed();
    client.write(0, &[1; 4096]).unwrap();
    client.flush().unwrap();
    drop(client);
    there.cli(&["detach", NAME]).unwrap();
    unconfirmed();
    let mut names = nodes.names_here();
    assert_eq!(names.len(), 2, "{names:?}");
    // The volume first, as in KUBERNETES.md.
    names.sort();
    for name in names {
        nodes.here.daemon.cli(&["del", &format!("default/{name}"), "--yes"]).unwrap();
    }
    assert!(nodes.refused(&[]).contains("volume default/csi.pvc-1 does not exist"));
}

#[test]
fn objects_that_cannot_be_moved_are_refused() {
    let nodes = Nodes::start();
    let named = format!("{}/other", nodes.receiver.address);
    let program = tools::blockd().unwrap();
    let error = refused(&mut nodes.command_by(&named, &program, &[]));
    assert!(error.contains("--receiver is ") && error.contains("without a name"), "{error}");
    let error = nodes.refused(&["--to-pool", "a/b"]);
    let refused_of = |pv: &Value, from: &str, words: &[&str]| {
        let path = nodes.folder.path().join("other.json");
        std::fs::write(&path, pv.to_string()).unwrap();
        let mut command = Command::new(tools::blockd_csi().unwrap());
        command.args(["move", "--to-node", "node-a", "--receiver", "tcp://127.0.0.1:1", "--pv"]);
        refused(command.arg(&path).args(["--from-node", from]).args(words))
    };
    assert!(error.contains("--to-pool is "), "{error}");
    let pv = persistent_volume("pvc-1", ID, "node-a");
    let error = refused_of(&pv, "node-b", &[]);
    assert!(error.contains("pvc-1 is on node node-a already"), "{error}");
    let foreign = persistent_volume("pvc-1", "default/by-hand", "node-b");
    let error = refused_of(&foreign, "node-b", &[]);
    assert!(error.contains("volumeHandle default/by-hand, which is no volume"), "{error}");
    // It was moved before: the copy that stayed here is older.
    let error = refused_of(&foreign, "node-c", &[]);
    assert!(error.contains("pvc-1 is not on node node-c of --from-node"), "{error}");
    let other = refused_of(&pv, "node-a", &["--driver-name", "other.io"]);
    assert!(other.contains("of driver csi.blockd.io"), "{other}");
    let list = serde_json::json!({ "kind": "List", "items": [pv] });
    assert!(refused_of(&list, "node-a", &[]).contains("an object of kind List"));
}
