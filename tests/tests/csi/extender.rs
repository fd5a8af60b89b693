//! The scheduler's extender as a process, beside plugins.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use super::capacity::{in_class, of_two_pools};
use super::*;

/// An extender of the scheduler that runs as nobody where the test is root.
struct Extender {
    child: Child,
    port: u16,
    folder: daemon::Folder,
}

impl Extender {
    fn start(metrics_port: u16) -> Self {
        let folder = daemon::Folder::new("extender").unwrap();
        // Nobody has to be able to go there.
        let program = std::env::temp_dir().join(format!("blockd-extender-{}", std::process::id()));
        std::fs::copy(blockd_tests::tools::blockd_csi().unwrap(), &program).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let mut command = Command::new(&program);
        command.args(["extender", "--listen", &format!("127.0.0.1:{port}")]);
        command.args(["--metrics-port", &metrics_port.to_string()]);
        command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        if nix::unistd::geteuid().is_root() {
            command.uid(65_534).gid(65_534);
        }
        let child = command.spawn().unwrap();
        let started = Self { child, port, folder };
        let limit = Duration::from_secs(60);
        let connected = || TcpStream::connect(("127.0.0.1", port)).ok();
        let connected = blockd_tests::tools::wait_until("the extender", limit, connected);
        std::fs::remove_file(&program).unwrap();
        connected.unwrap_or_else(|error| panic!("{error}: {}", started.log()));
        started
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let body = body.to_string();
        let length = body.len();
        write!(
            stream,
            "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\
             \r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
        serde_json::from_str(body).unwrap()
    }
}

impl Drop for Extender {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn p35_p40_the_extender_reads_what_plugins_tell_and_needs_no_root() {
    let (mut rig, _folder) = of_two_pools("extender");
    let driver = rig.plugin.driver().unwrap();
    create(&driver, &in_class("thin", "a", 100 * MIB)).unwrap();
    let (thin, thick) = (free(&driver, "thin"), free(&driver, "thick-two"));
    let metrics = rig.plugin.metrics().unwrap();
    let line = format!(
        "blockd_csi_class_available_bytes{{driver=\"csi.blockd.io\",class=\"thin\"}} {thin}"
    );
    assert!(metrics.lines().any(|one| one == line), "{line}\n{metrics}");
    let address = rig.plugin.metrics_address().to_owned();
    let (host, port) = address.split_once(':').unwrap();
    let extender = Extender::start(port.parse().unwrap());
    let status = std::fs::read_to_string(format!("/proc/{}/status", extender.child.id())).unwrap();
    let uid = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap();
    assert!(uid.split_whitespace().all(|uid| uid != "0"), "{uid}");
    let volume = |class: &str, bytes: i64| {
        let attributes = json!({ "class": class, "size": bytes.to_string() });
        json!({ "name": class, "csi": {
            "driver": "csi.blockd.io", "volumeAttributes": attributes,
        } })
    };
    let addresses = json!([{ "type": "InternalIP", "address": host }]);
    let node = json!({ "metadata": { "name": "n" }, "status": { "addresses": addresses } });
    let ask = |thin: i64, thick: i64| {
        let volumes = json!([volume("thin", thin), volume("thick-two", thick)]);
        let pod = json!({ "spec": { "volumes": volumes } });
        extender.post("/predicate", &json!({ "Pod": pod, "Nodes": { "items": [node] } }))
    };
    assert_eq!(ask(thin, thick)["Nodes"]["items"], json!([node]));
    // Answers count for a moment: what is asked differs, the node is the same.
    let refused = ask(thin + 1, thick);
    let said = format!("class thin: {} bytes requested, {thin} bytes free", thin + 1);
    assert_eq!(refused["FailedNodes"]["n"], said.as_str());
    assert!(ask(thin, thick + 1)["FailedNodes"]["n"].is_string());
    // A daemon that is away has no capacity, whatever it had before.
    rig.daemon.kill().unwrap();
    let limit = Duration::from_secs(60);
    let forgotten = blockd_tests::tools::wait_until("the end of the answer", limit, || {
        let failed = ask(1, 1)["FailedNodes"]["n"].as_str()?.to_owned();
        failed.contains("its blockd does not answer").then_some(())
    });
    forgotten.unwrap_or_else(|error| panic!("{error}: {}", extender.log()));
}
