//! The scheduler's extender as a process, beside plugins and an imitation of an API server.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use super::capacity::{in_class, of_two_pools};
use super::cluster::{Cluster, Mood};
use super::*;

/// The default class is the thin one.
const CLASSES: &str =
    "[[class]]\nname = 'thin'\ndefault = true\n[[class]]\nname = 'thick'\nkind = 'thick'\n";

const OURS: &str = "csi.blockd.io";
const GIB: i64 = 1 << 30;

/// An extender of the scheduler that runs unprivileged where the test is root, and reads the
/// objects of a cluster.
struct Extender {
    child: Child,
    port: u16,
    folder: Folder,
}

impl Extender {
    fn start(metrics_port: u16, cluster: &Cluster, config: &str) -> Self {
        let folder = Folder::new("extender").unwrap();
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        // A copy of the program, as its user may not enter the directory where it was built.
        let program = folder.path().join("blockd-csi");
        let config_file = folder.path().join("blockd-csi.toml");
        std::fs::write(&config_file, config).unwrap();
        std::fs::copy(blockd_testkit::tools::blockd_csi().unwrap(), &program).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let mut command = Command::new(&program);
        command.args(["extender", "--listen", &format!("127.0.0.1:{port}")]);
        command.args(["--metrics-port", &metrics_port.to_string()]);
        command.arg("--config").arg(&config_file);
        // As in a pod of the cluster.
        command.arg("--service-account").arg(cluster.account());
        command.env("KUBERNETES_SERVICE_HOST", "127.0.0.1");
        command.env("KUBERNETES_SERVICE_PORT", cluster.port().to_string());
        command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        if nix::unistd::geteuid().is_root() {
            command.uid(65_534).gid(65_534);
        }
        let child = command.spawn().unwrap();
        let started = Self { child, port, folder };
        let limit = Duration::from_secs(60);
        let connected = || TcpStream::connect(("127.0.0.1", port)).ok();
        let connected = blockd_testkit::tools::wait_until("the extender", limit, connected);
        connected.unwrap_or_else(|error| panic!("{error}: {}", started.log()));
        started
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Sends a request, and returns the status and the body of the answer.
    fn send(&self, method: &str, path: &str, body: &str) -> (String, String) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: \
             {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap_or_default().to_owned(), body.to_owned())
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        let (status, body) = self.send("POST", path, &body.to_string());
        assert_eq!(status, "200", "{body}");
        serde_json::from_str(&body).unwrap()
    }

    /// Which of two nodes a pod fits on: one with these bytes of each class, and one with a byte
    /// less of class `less`.
    fn fits(&self, pod: &Value, bytes: &[(&str, i64)], less: &str) -> Value {
        let node = |name: &str, classes: &[(String, i64)]| {
            let annotation = |(class, bytes): &(String, i64)| {
                (format!("capacity.csi.blockd.io/{class}"), bytes.to_string().into())
            };
            let annotations: serde_json::Map<String, Value> =
                classes.iter().map(annotation).collect();
            json!({ "metadata": { "name": name, "annotations": annotations } })
        };
        let of = |missing: &str| -> Vec<(String, i64)> {
            let class = |&(class, bytes): &(&str, i64)| {
                (class.to_owned(), bytes - i64::from(class == missing))
            };
            bytes.iter().map(class).collect()
        };
        let nodes = json!([node("exact", &of("")), node("less", &of(less))]);
        let result = self.post("/predicate", &json!({ "Pod": pod, "Nodes": { "items": nodes } }));
        assert_eq!(result["Error"], "", "{}", self.log());
        result
    }
}

impl Drop for Extender {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Rows: P35, P40.
#[test]
fn the_extender_reads_the_plugins_metrics_and_needs_no_root() {
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
    let extender = Extender::start(port.parse().unwrap(), &Cluster::start(), CLASSES);
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
    let forgotten = blockd_testkit::tools::wait_until("the end of the answer", limit, || {
        let failed = ask(1, 1)["FailedNodes"]["n"].as_str()?.to_owned();
        failed.contains("its blockd does not answer").then_some(())
    });
    forgotten.unwrap_or_else(|error| panic!("{error}: {}", extender.log()));
}

/// A cluster with storage classes of two drivers.
fn cluster() -> Cluster {
    let cluster = Cluster::start();
    let thick =
        || json!({ "csi.blockd.io/device-class": "thick", "csi.storage.k8s.io/fstype": "xfs" });
    cluster.class("late", OURS, "WaitForFirstConsumer", json!({}));
    cluster.class("early", OURS, "Immediate", Value::Null);
    cluster.class("late-thick", OURS, "WaitForFirstConsumer", thick());
    cluster.class("early-thick", OURS, "Immediate", thick());
    cluster.class("other", "other.example.com", "WaitForFirstConsumer", thick());
    cluster
}

fn spec(class: &str, size: Option<&str>) -> Value {
    let requests = size.map_or(Value::Null, |size| json!({ "requests": { "storage": size } }));
    json!({ "storageClassName": class, "resources": requests })
}

/// A pod of the namespace `apps` that uses these claims.
fn pod_with(claims: &[&str]) -> Value {
    let volume = |claim: &&str| json!({ "name": format!("v-{claim}"), "persistentVolumeClaim": { "claimName": claim } });
    let volumes: Vec<Value> = claims.iter().map(volume).collect();
    json!({ "metadata": { "name": "web", "namespace": "apps" }, "spec": { "volumes": volumes } })
}

/// Rows: P35, T26.
#[test]
fn each_unbound_claim_of_our_driver_counts_with_early_and_with_late_binding() {
    let cluster = cluster();
    cluster.claim("late", &spec("late", Some("500Mi")), "Pending");
    cluster.claim("early", &spec("early", Some("1")), "Pending");
    cluster.claim("late-thick", &spec("late-thick", Some("1e9")), "Pending");
    cluster.claim("early-thick", &spec("early-thick", Some("1.5Gi")), "Pending");
    let extender = Extender::start(1, &cluster, CLASSES);
    let sizes = [("thin", 500 * MIB + 1), ("thick", 1_000_000_000 + GIB * 3 / 2)];
    let claims = ["late", "early", "late-thick", "early-thick"];
    for less in ["thin", "thick"] {
        let result = extender.fits(&pod_with(&claims), &sizes, less);
        assert_eq!(result["Nodes"]["items"].as_array().unwrap().len(), 1, "{result}");
        assert_eq!(result["Nodes"]["items"][0]["metadata"]["name"], "exact");
        let why = result["FailedNodes"]["less"].as_str().unwrap();
        assert!(why.starts_with(&format!("class {less}: ")), "{why}");
    }
    // Each of them alone counts, and a claim that two volumes of the pod use counts once.
    for (claim, class, bytes) in [
        ("late", "thin", 500 * MIB),
        ("early", "thin", 1),
        ("late-thick", "thick", 1_000_000_000),
        ("early-thick", "thick", GIB * 3 / 2),
    ] {
        let result = extender.fits(&pod_with(&[claim, claim]), &[(class, bytes)], class);
        let why = format!("class {class}: {bytes} bytes requested, {} bytes free", bytes - 1);
        assert_eq!(result["FailedNodes"], json!({ "less": why }));
    }
    // Inline volumes are added.
    let mut pod = pod_with(&["late"]);
    let inline = json!({ "driver": OURS, "volumeAttributes": { "size": "5" } });
    let volumes = pod["spec"]["volumes"].as_array_mut().unwrap();
    volumes.push(json!({ "name": "inline", "csi": inline }));
    let result = extender.fits(&pod, &[("thin", 500 * MIB + 5)], "thin");
    assert!(result["FailedNodes"]["less"].is_string(), "{result}");
    // Scores are by what remains when the claims have their room.
    let node = |name: &str, bytes: i64| {
        let annotations = json!({ "capacity.csi.blockd.io/thin": bytes.to_string() });
        json!({ "metadata": { "name": name, "annotations": annotations } })
    };
    let nodes = json!([node("small", 500 * MIB - 1), node("exact", 500 * MIB), node("large", GIB)]);
    let arguments = json!({ "Pod": pod_with(&["late"]), "Nodes": { "items": nodes } });
    let scores = extender.post("/prioritize", &arguments);
    let expected = [("small", 0), ("exact", 1), ("large", 10)];
    assert_eq!(
        scores,
        json!(expected.map(|(host, score)| json!({ "Host": host, "Score": score })))
    );
}

/// Rows: P35, T26.
#[test]
fn a_claim_without_a_size_has_the_default_size() {
    let cluster = cluster();
    let config = format!("default_size = \"64Mi\"\n{CLASSES}");
    let extender = Extender::start(1, &cluster, &config);
    for size in [None, Some("0"), Some("0Gi")] {
        cluster.claim("data", &spec("late", size), "Pending");
        let result = extender.fits(&pod_with(&["data"]), &[("thin", 64 * MIB)], "thin");
        assert!(result["FailedNodes"]["less"].is_string(), "{size:?}: {result}");
        assert_eq!(result["Nodes"]["items"][0]["metadata"]["name"], "exact", "{size:?}");
    }
}

/// Row: P35.
#[test]
fn claims_that_are_bound_or_of_other_drivers_do_not_count() {
    let cluster = cluster();
    cluster.claim("bound", &spec("late", Some("9Gi")), "Bound");
    cluster.claim("others", &spec("other", Some("9Gi")), "Pending");
    cluster.claim("of-no-class", &json!({}), "Pending");
    cluster.claim("of-an-empty-class", &spec("", Some("9Gi")), "Pending");
    cluster.claim("of-a-missing-class", &spec("missing", Some("9Gi")), "Pending");
    let reserved = json!({ "storageClassName": "late", "volumeName": "pv-1" });
    cluster.claim("reserved", &reserved, "Pending");
    let extender = Extender::start(1, &cluster, CLASSES);
    let all =
        ["bound", "others", "of-no-class", "of-an-empty-class", "of-a-missing-class", "reserved"];
    let result = extender.fits(&pod_with(&all), &[], "");
    assert_eq!((&result["FailedNodes"], &result["Error"]), (&json!({}), &json!("")));
    assert_eq!(result["Nodes"]["items"].as_array().unwrap().len(), 2);
    // A claim counts until it is bound, whenever that happens: nothing is remembered.
    cluster.claim("data", &spec("late", Some("5")), "Pending");
    let pod = pod_with(&["data"]);
    assert!(extender.fits(&pod, &[("thin", 5)], "thin")["FailedNodes"]["less"].is_string());
    cluster.claim("data", &spec("late", Some("5")), "Bound");
    assert_eq!(extender.fits(&pod, &[("thin", 5)], "thin")["FailedNodes"], json!({}));
}

/// Row: P35.
#[test]
fn a_generic_ephemeral_volume_counts_before_and_after_its_claim_is_made() {
    let cluster = cluster();
    let extender = Extender::start(1, &cluster, CLASSES);
    let pod = |spec: Value| {
        let ephemeral = json!({ "volumeClaimTemplate": { "spec": spec } });
        let volumes = json!([{ "name": "cache", "ephemeral": ephemeral }]);
        let metadata = json!({ "name": "web", "namespace": "apps" });
        json!({ "metadata": metadata, "spec": { "volumes": volumes } })
    };
    let by_template = pod(spec("late", Some("7")));
    let fails = |bytes: i64| {
        let result = extender.fits(&by_template, &[("thin", bytes)], "thin");
        assert_eq!(result["Nodes"]["items"][0]["metadata"]["name"], "exact", "{result}");
        result["FailedNodes"]["less"].is_string()
    };
    assert!(fails(7), "by its template");
    cluster.claim("web-cache", &spec("late", Some("8")), "Pending");
    assert!(fails(8), "by its claim");
    cluster.claim("web-cache", &spec("late", Some("8")), "Bound");
    assert!(!fails(8), "bound");
    let result = extender.fits(&pod(spec("other", Some("7"))), &[("thin", 1)], "thin");
    assert_eq!(result["FailedNodes"], json!({}), "of another driver");
}

/// Row: P35.
#[test]
fn a_claim_that_does_not_exist_is_named_and_nothing_is_decided() {
    let cluster = cluster();
    cluster.claim("data", &spec("late", Some("1")), "Pending");
    let extender = Extender::start(1, &cluster, CLASSES);
    let predicate = |pod: &Value| {
        let arguments = json!({ "Pod": pod, "NodeNames": ["a"] });
        let result = extender.post("/predicate", &arguments);
        assert_eq!((&result["Nodes"], &result["NodeNames"]), (&Value::Null, &Value::Null));
        result["Error"].as_str().unwrap().to_owned()
    };
    let missing = pod_with(&["data", "missing"]);
    assert_eq!(predicate(&missing), "claim apps/missing does not exist");
    let arguments = json!({ "Pod": missing, "NodeNames": ["a"] }).to_string();
    let (status, body) = extender.send("POST", "/prioritize", &arguments);
    assert_eq!((status.as_str(), body.as_str()), ("503", "claim apps/missing does not exist\n"));
    // A claim of the same name in another namespace is another one.
    let elsewhere = json!({
        "metadata": { "name": "web" },
        "spec": { "volumes": [{ "name": "v", "persistentVolumeClaim": { "claimName": "data" } }] },
    });
    assert_eq!(predicate(&elsewhere), "claim default/data does not exist");
    // Without a storage class in its template, the claim decides.
    let ephemeral = json!({ "volumeClaimTemplate": { "spec": {} } });
    let unnamed = json!({
        "metadata": { "name": "web", "namespace": "apps" },
        "spec": { "volumes": [{ "name": "cache", "ephemeral": ephemeral }] },
    });
    assert_eq!(predicate(&unnamed), "claim apps/web-cache does not exist");
    // No name leads to another object.
    for name in ["../../secrets/token", "a?b", ""] {
        let error = predicate(&pod_with(&[name]));
        assert!(error.starts_with("claim is "), "{error}");
    }
    let known = cluster.requests();
    assert!(known.iter().all(|path| !path.contains("secrets") && !path.contains('?')), "{known:?}");
}

/// Row: P35.
#[test]
fn an_api_server_that_does_not_answer_is_an_error_with_its_reason() {
    let cluster = cluster();
    cluster.claim("data", &spec("late", Some("1")), "Pending");
    let extender = Extender::start(1, &cluster, CLASSES);
    let nodes = json!([{ "metadata": { "name": "a" } }]);
    let error = |pod: &Value| {
        let arguments = json!({ "Pod": pod, "Nodes": { "items": nodes } });
        let result = extender.post("/predicate", &arguments);
        result["Error"].as_str().unwrap().to_owned()
    };
    let pod = pod_with(&["data"]);
    let address = format!("API server 127.0.0.1:{}", cluster.port());
    for (mood, said) in [
        (Mood::Fails, "403 Forbidden: /api/v1/namespaces/apps/persistentvolumeclaims/data is forb"),
        (Mood::IsSilent, "no answer within 2 s"),
        (Mood::Garbles, "expected"),
        (Mood::Floods, "length limit exceeded"),
    ] {
        cluster.set_mood(mood);
        let text = error(&pod);
        assert!(text.contains(&address) && text.contains(said), "{mood:?}: {text}");
        let arguments = json!({ "Pod": pod, "Nodes": { "items": nodes } }).to_string();
        let (status, body) = extender.send("POST", "/prioritize", &arguments);
        assert!(status == "503" && body.contains(said), "{mood:?}: {status} {body}");
        // A pod without claims needs no API server.
        assert_eq!(error(&pod_with(&[])), "", "{mood:?}");
    }
    assert!(extender.log().contains("403 Forbidden"), "{}", extender.log());
    cluster.set_mood(Mood::Answers);
    assert_eq!(error(&pod), "");
    // The kubelet replaces the token, and does so after the server has forgotten the old one.
    cluster.set_token("second-token");
    assert_eq!(error(&pod), "");
    cluster.write("token", "first-token");
    assert!(error(&pod).contains("401 Unauthorized"), "{}", error(&pod));
    cluster.write("token", "second-token");
    // A server with another certificate is not the cluster's.
    let authority = std::fs::read_to_string(cluster.account().join("ca.crt")).unwrap();
    let others = std::fs::read_to_string(Cluster::start().account().join("ca.crt")).unwrap();
    for (text, said) in [(others.as_str(), "invalid peer certificate"), ("", "has no certificate")]
    {
        cluster.write("ca.crt", text);
        assert!(error(&pod).contains(said), "{}", error(&pod));
    }
    cluster.write("ca.crt", &authority);
    assert_eq!(error(&pod), "");
    std::fs::remove_file(cluster.account().join("token")).unwrap();
    assert!(error(&pod).contains("/token: No such file"), "{}", error(&pod));
}

/// Row: H36.
#[test]
fn the_plugin_contacts_no_api_server_while_the_extender_of_the_same_program_does() {
    let cluster = cluster();
    cluster.claim("data", &spec("late", Some("1")), "Pending");
    let variables = [
        ("KUBERNETES_SERVICE_HOST".to_owned(), "127.0.0.1".to_owned()),
        ("KUBERNETES_SERVICE_PORT".to_owned(), cluster.port().to_string()),
    ];
    let settings = Settings { variables: variables.into(), ..Settings::default() };
    let rig = Rig::start("no-api-server", &settings).unwrap();
    let driver = rig.plugin.driver().unwrap();
    let volume = create(&driver, &request("a", mounted("ext4"), 64 * MIB)).unwrap();
    condition(&driver, &volume.volume_id).unwrap();
    driver.list_volumes(ListVolumesRequest::default()).unwrap();
    free(&driver, "default");
    rig.plugin.metrics().unwrap();
    delete(&driver, &volume.volume_id).unwrap();
    assert_eq!(cluster.connections(), 0, "{:?}", cluster.requests());
    let extender = Extender::start(1, &cluster, CLASSES);
    extender.fits(&pod_with(&["data"]), &[("thin", 1)], "");
    assert_eq!(cluster.connections(), 1);
    assert_eq!(
        cluster.requests(),
        [
            "/api/v1/namespaces/apps/persistentvolumeclaims/data",
            "/apis/storage.k8s.io/v1/storageclasses/late",
        ]
    );
}

/// Row: P49.
#[test]
fn each_program_exports_the_metrics_that_other_drivers_have_under_the_same_names() {
    let tables = "[metrics]\naddress = \"127.0.0.1:0\"\n".to_owned();
    let daemon = daemon::Settings { tables, ..daemon::Settings::default() };
    let rig = Rig::start("metrics-names", &Settings { daemon, ..Settings::default() }).unwrap();
    let driver = rig.plugin.driver().unwrap();
    let volume = create(&driver, &request("a", mounted("ext4"), 64 * MIB)).unwrap();
    let unnamed = CreateVolumeRequest { name: String::new(), ..Default::default() };
    refused(create(&driver, &unnamed), Code::InvalidArgument).unwrap();
    delete(&driver, &volume.volume_id).unwrap();
    let has =
        |text: &str, line: &str| assert!(text.lines().any(|one| one == line), "{line}\n{text}");
    let build = format!("build_info{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION"));
    let plugin = rig.plugin.metrics().unwrap();
    has(&plugin, &build);
    has(&plugin, "# TYPE csi_plugin_operations_seconds histogram");
    for (method, code) in
        [("CreateVolume", "OK"), ("CreateVolume", "InvalidArgument"), ("DeleteVolume", "OK")]
    {
        let labels = format!(
            "driver_name=\"{OURS}\",method_name=\"/csi.v1.Controller/{method}\",\
             grpc_status_code=\"{code}\""
        );
        has(&plugin, &format!("csi_plugin_operations_seconds_count{{{labels}}} 1"));
        assert!(
            plugin
                .contains(&format!("csi_plugin_operations_seconds_bucket{{le=\"0.1\",{labels}}}"))
        );
    }
    has(&rig.daemon.metrics().unwrap(), &build);
    // The extender: three answers of three kinds.
    let extender = Extender::start(1, &cluster(), CLASSES);
    extender.fits(&pod_with(&[]), &[], "");
    let asked = json!({ "Pod": pod_with(&[]), "NodeNames": ["a"] });
    extender.post("/prioritize", &asked);
    let (status, _) = extender.send("POST", "/predicate", "{");
    assert_eq!(status, "400");
    let (status, body) = extender.send("GET", "/status", "");
    assert_eq!((status.as_str(), body.as_str()), ("200", "ok\n"));
    let (status, metrics) = extender.send("GET", "/metrics", "");
    assert_eq!(status, "200");
    for line in [
        build.as_str(),
        "# TYPE scheduler_request_duration_seconds histogram",
        "# TYPE scheduler_response_size_bytes histogram",
        "scheduler_requests_total{code=\"200\",method=\"post\"} 2",
        "scheduler_requests_total{code=\"400\",method=\"post\"} 1",
        "scheduler_requests_total{code=\"200\",method=\"get\"} 1",
        "scheduler_in_flight_requests 0",
        "scheduler_request_duration_seconds_count{handler=\"filter\",method=\"post\"} 2",
        "scheduler_request_duration_seconds_count{handler=\"prioritize\",method=\"post\"} 1",
        "scheduler_request_duration_seconds_count{handler=\"status\",method=\"get\"} 1",
        "scheduler_response_size_bytes_count 4",
    ] {
        has(&metrics, line);
    }
}

#[test]
fn the_extender_does_not_start_without_an_api_server() {
    let mut command = Command::new(tools::blockd_csi().unwrap());
    command.args(["extender", "--listen", "127.0.0.1:0"]).env_remove("KUBERNETES_SERVICE_HOST");
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("api-server is not set"), "{text}");
}
