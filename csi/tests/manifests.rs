//! The manifests in `deploy/kubernetes`: they parse, they use one driver name, and the plugin
//! accepts their settings.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where an expectation fails")]

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use blockd_csi::config::Config;
use blockd_csi::ids::Names;
use blockd_csi::options::Options;
use blockd_csi::parameters::Keys;
use blockd_csi_base::options::DEFAULT_DRIVER;
use blockd_csi_base::quantity;
use clap::Parser;
use serde_json::Value;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kubernetes")
}

/// All objects of all files.
fn objects() -> Vec<Value> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        if path.ends_with("kustomization.yaml") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let parsed: Result<Vec<Value>, _> = serde_saphyr::from_multiple(&text);
        all.extend(parsed.unwrap_or_else(|error| panic!("{}: {error}", path.display())));
    }
    all
}

fn of_kind(kind: &str) -> Vec<Value> {
    objects().into_iter().filter(|object| object["kind"] == kind).collect()
}

fn only(kind: &str) -> Value {
    let mut all = of_kind(kind);
    assert_eq!(all.len(), 1, "{kind}");
    all.remove(0)
}

fn container(name: &str) -> Value {
    let daemon_set = only("DaemonSet");
    let all = daemon_set["spec"]["template"]["spec"]["containers"].as_array().unwrap().clone();
    all.into_iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("no {name}"))
}

fn words(container: &Value) -> Vec<String> {
    let args = container["args"].as_array().unwrap();
    args.iter().map(|word| word.as_str().unwrap().to_owned()).collect()
}

fn strings(map: &Value) -> HashMap<String, String> {
    let map = map.as_object().unwrap();
    map.iter().map(|(key, value)| (key.clone(), value.as_str().unwrap().to_owned())).collect()
}

/// The value of a variable of a container.
fn variable(container: &Value, name: &str) -> String {
    let all = container["env"].as_array().unwrap();
    let found = all.iter().find(|one| one["name"] == name);
    found.and_then(|one| one["value"].as_str()).unwrap_or_else(|| panic!("no {name}")).to_owned()
}

#[test]
fn each_object_has_a_kind_a_version_and_a_name_of_its_own() {
    let mut seen = Vec::new();
    for object in objects() {
        let text = |value: &Value| value.as_str().unwrap_or_else(|| panic!("{object}")).to_owned();
        assert!(!text(&object["apiVersion"]).is_empty());
        let name = (text(&object["kind"]), text(&object["metadata"]["name"]));
        assert!(!seen.contains(&name), "{name:?} twice");
        seen.push(name);
    }
    assert!(seen.len() > 10, "{seen:?}");
}

#[test]
fn all_manifests_use_one_driver_name() {
    let driver = only("CSIDriver");
    assert_eq!(driver["metadata"]["name"], DEFAULT_DRIVER);
    let spec = &driver["spec"];
    assert_eq!((&spec["attachRequired"], &spec["storageCapacity"]), (&false.into(), &true.into()));
    assert_eq!(spec["podInfoOnMount"], true);
    assert_eq!(spec["volumeLifecycleModes"], serde_json::json!(["Persistent", "Ephemeral"]));
    for class in of_kind("StorageClass") {
        assert_eq!(class["provisioner"], DEFAULT_DRIVER);
        assert_eq!(class["volumeBindingMode"], "WaitForFirstConsumer");
        assert_eq!(class["allowVolumeExpansion"], true);
    }
    assert_eq!(only("VolumeSnapshotClass")["driver"], DEFAULT_DRIVER);
    assert_eq!(only("VolumeAttributesClass")["driverName"], DEFAULT_DRIVER);
}

#[test]
fn the_plugin_accepts_its_arguments_and_their_folders_are_mounted() {
    let plugin = container("blockd-csi");
    let words = words(&plugin).into_iter().map(|word| {
        word.replace("$(NODE_NAME)", "node-1")
            .replace("$(METRICS_ADDRESS)", &variable(&plugin, "METRICS_ADDRESS"))
    });
    let options =
        Options::try_parse_from(std::iter::once("blockd-csi".to_owned()).chain(words)).unwrap();
    options.check().unwrap();
    assert_eq!(
        (options.driver_name.as_str(), options.node_id.as_str()),
        (DEFAULT_DRIVER, "node-1")
    );
    // The metrics are for the pod alone, until a component opens them.
    assert!(options.metrics_address.unwrap().ip().is_loopback());
    let name = &plugin["env"][0];
    assert_eq!(name["name"], "NODE_NAME");
    assert_eq!(name["valueFrom"]["fieldRef"]["fieldPath"], "spec.nodeName");
    let mounts: BTreeMap<String, Value> = plugin["volumeMounts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|mount| (mount["mountPath"].as_str().unwrap().to_owned(), mount.clone()))
        .collect();
    let config = options.config.clone().unwrap();
    for path in [&options.socket().unwrap(), &options.blockd_socket, &options.state_dir(), &config]
    {
        assert!(
            mounts.keys().any(|mount| path.starts_with(mount)),
            "{} is not there",
            path.display()
        );
    }
    // The plugin's mounts for pods have to be visible outside of its own pod.
    for below in ["pods", "plugins/kubernetes.io/csi"] {
        let path = options.kubelet_dir.join(below);
        let mount = &mounts[path.to_str().unwrap()];
        assert_eq!(mount["mountPropagation"], "Bidirectional", "{below}");
    }
    assert!(mounts.contains_key("/dev"));
    assert_eq!(plugin["securityContext"]["privileged"], true);
    // The daemon is not in the pod.
    let daemon_set = only("DaemonSet").to_string();
    assert!(!daemon_set.contains("blockd serve"));
}

/// Row: P40.
#[test]
fn sidecars_that_are_not_root_have_the_group_of_the_endpoint() {
    let plugin = words(&container("blockd-csi"));
    let group = plugin.iter().find_map(|word| word.strip_prefix("--endpoint-group=")).unwrap();
    let group: u64 = group.parse().unwrap();
    let mut count = 0;
    for (name, _) in SIDECARS.iter().filter(|(name, _)| *name != "node-driver-registrar") {
        let context = container(name)["securityContext"].clone();
        assert_eq!(context["runAsNonRoot"], true, "{name}");
        assert_eq!(context["runAsGroup"].as_u64(), Some(group), "{name}");
        count += 1;
    }
    assert_eq!(count, 5);
    assert_eq!(container("blockd-csi")["securityContext"]["readOnlyRootFilesystem"], true);
}

#[test]
fn each_mount_of_a_container_is_a_volume_of_the_pod() {
    let daemon_set = only("DaemonSet");
    let pod = &daemon_set["spec"]["template"]["spec"];
    let names: Vec<&Value> =
        pod["volumes"].as_array().unwrap().iter().map(|volume| &volume["name"]).collect();
    for container in pod["containers"].as_array().unwrap() {
        for mount in container["volumeMounts"].as_array().unwrap() {
            assert!(names.contains(&&mount["name"]), "{mount} of {}", container["name"]);
        }
    }
    // The kubelet receives the socket's path on the host, not the one in the pod.
    let plugin = pod["volumes"].as_array().unwrap().iter().find(|one| one["name"] == "plugin");
    let folder = plugin.unwrap()["hostPath"]["path"].as_str().unwrap();
    assert_eq!(folder, format!("/var/lib/kubelet/plugins/{DEFAULT_DRIVER}"));
    let registrar = words(&container("node-driver-registrar"));
    let path = format!("--kubelet-registration-path={folder}/csi.sock");
    assert!(registrar.contains(&path), "{registrar:?}");
}

/// The sidecars, and the flags that node-local volumes need. `cargo ci manifests` checks in every
/// rendering that their flags exist.
const SIDECARS: [(&str, &[&str]); 6] = [
    ("node-driver-registrar", &["kubelet-registration-path"]),
    ("liveness-probe", &[]),
    (
        "csi-provisioner",
        &["node-deployment", "strict-topology", "immediate-topology", "enable-capacity"],
    ),
    ("csi-resizer", &[]),
    ("csi-snapshotter", &["node-deployment"]),
    ("csi-external-health-monitor-controller", &[]),
];

#[test]
fn sidecars_have_the_flags_that_node_local_volumes_need() {
    for (name, needed) in SIDECARS {
        let container = container(name);
        let words = words(&container);
        let has = |flag: &str| {
            let named = |word: &String| word[2..].split('=').next() == Some(flag);
            words.iter().any(named)
        };
        for flag in needed {
            assert!(has(flag), "{name}: {flag}");
        }
        assert!(words.contains(&"--csi-address=/csi/csi.sock".to_owned()), "{name}");
        if has("node-deployment") || has("enable-capacity") {
            let names: Vec<&Value> =
                container["env"].as_array().unwrap().iter().map(|one| &one["name"]).collect();
            assert_eq!(names, ["NODE_NAME", "NAMESPACE", "POD_NAME"], "{name}");
        }
        let image = container["image"].as_str().unwrap();
        assert!(image.rsplit_once(":v").is_some(), "{image} has no version");
    }
}

#[test]
fn classes_and_their_parameters_are_understood() {
    let names = Names::new(DEFAULT_DRIVER);
    let text = only("ConfigMap")["data"]["blockd-csi.toml"].as_str().unwrap().to_owned();
    let config = Config::parse(&text, &names).unwrap();
    let keys = Keys::new(DEFAULT_DRIVER);
    for class in of_kind("StorageClass") {
        let parameters = keys.class("parameters", &strings(&class["parameters"])).unwrap();
        let wanted = parameters.device_class.as_deref();
        config.class("device-class", wanted).unwrap();
        assert!(wanted.is_some() && parameters.file_system.is_some());
    }
    let changes = strings(&only("VolumeAttributesClass")["parameters"]);
    let mutable = keys.mutable("parameters", &changes).unwrap();
    assert_eq!((mutable.iops, mutable.bandwidth.unwrap().get()), (Some(2000), 104_857_600));
    let scratch = of_kind("Pod").into_iter().find(|pod| pod["metadata"]["name"] == "scratch");
    let csi = scratch.unwrap()["spec"]["volumes"][0]["csi"].clone();
    assert_eq!(csi["driver"], DEFAULT_DRIVER);
    config.class("class", csi["volumeAttributes"]["class"].as_str()).unwrap();
    let size = csi["volumeAttributes"]["size"].as_str().unwrap();
    assert_eq!(quantity::size("size", size).unwrap().get(), 67_108_864);
}

/// The example with persistent memory: its classes and parameters are understood, and go together.
#[test]
fn the_example_with_persistent_memory_is_understood() {
    let path = folder().join("../examples/pmem.yaml");
    let text = fs::read_to_string(path).unwrap();
    let objects: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
    let of_kind = |kind: &str| -> Vec<&Value> {
        objects.iter().filter(|object| object["kind"] == kind).collect()
    };
    let text = of_kind("ConfigMap")[0]["data"]["blockd-csi.toml"].as_str().unwrap();
    let config = Config::parse(text, &Names::new(DEFAULT_DRIVER)).unwrap();
    let keys = Keys::new(DEFAULT_DRIVER);
    let mut plans = Vec::new();
    for class in of_kind("StorageClass") {
        assert_eq!(class["provisioner"], DEFAULT_DRIVER);
        let parameters = keys.class("parameters", &strings(&class["parameters"])).unwrap();
        let device_class = config.class("class", parameters.device_class.as_deref()).unwrap();
        let plan = parameters.pmem.of_class("", device_class).unwrap();
        // A namespace and an image do not grow; extents do.
        let grows = !plan.is_direct && !plan.kata;
        assert_eq!(class["allowVolumeExpansion"], grows, "{class}");
        plans.push((plan.usage.unwrap().name(), plan.is_mapped() && !plan.kata, plan.kata));
    }
    let expected =
        [("FileIO", false, false), ("AppDirect", true, false), ("AppDirect", false, true)];
    assert_eq!(plans, expected);
    let attributes = &of_kind("Pod")[0]["spec"]["volumes"][0]["csi"]["volumeAttributes"];
    let class = config.class("class", attributes["class"].as_str()).unwrap();
    let mut parameters = blockd_csi::pmem::Parameters::default();
    assert!(parameters.take("usage", "usage", attributes["usage"].as_str().unwrap()).unwrap());
    assert!(parameters.of_class("", class).is_ok());
}

/// The example with encryption: each class has a secret for staging and for growth.
#[test]
fn the_example_with_encryption_is_understood() {
    let text = fs::read_to_string(folder().join("../examples/encrypted.yaml")).unwrap();
    let objects: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
    let class = objects.iter().find(|object| object["kind"] == "StorageClass").unwrap();
    let parameters = strings(&class["parameters"]);
    assert!(Keys::new(DEFAULT_DRIVER).class("parameters", &parameters).unwrap().encrypted);
    for call in ["node-stage", "node-expand"] {
        for word in ["name", "namespace"] {
            assert!(parameters.contains_key(&format!("csi.storage.k8s.io/{call}-secret-{word}")));
        }
    }
    // No secret that could be taken over as it is.
    assert!(objects.iter().all(|object| object["kind"] != "Secret"));
}

/// The example on shared disks: many nodes have a claim for a device.
#[test]
fn the_example_with_a_volume_group_is_understood() {
    let text = fs::read_to_string(folder().join("../examples/volume-group.yaml")).unwrap();
    let objects: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
    let of_kind = |kind| objects.iter().find(|object| object["kind"] == kind).unwrap();
    let class = of_kind("StorageClass");
    let parameters = Keys::new(DEFAULT_DRIVER).class("p", &strings(&class["parameters"])).unwrap();
    assert_eq!(parameters.volume_group.as_deref(), Some("san"));
    let spec = &of_kind("PersistentVolumeClaim")["spec"];
    assert_eq!(spec["storageClassName"], class["metadata"]["name"]);
    assert_eq!(spec["accessModes"], serde_json::json!(["ReadWriteMany"]));
    assert_eq!(spec["volumeMode"], "Block");
}

/// Row T34.
#[test]
fn a_claim_below_a_gibibyte_is_in_the_example() {
    let claim = only("PersistentVolumeClaim");
    let spec = &claim["spec"];
    let size = spec["resources"]["requests"]["storage"].as_str().unwrap();
    assert_eq!(quantity::size("storage", size).unwrap().get(), 524_288_000);
    assert_eq!(spec["accessModes"], serde_json::json!(["ReadWriteOnce"]));
    assert_eq!(spec["volumeMode"], "Filesystem");
    let classes = of_kind("StorageClass");
    assert!(classes.iter().any(|class| class["metadata"]["name"] == spec["storageClassName"]));
    let name = &claim["metadata"]["name"];
    let used = |pod: &Value| {
        let volumes = pod["spec"]["volumes"].as_array().cloned().unwrap_or_default();
        volumes.iter().any(|one| one["persistentVolumeClaim"]["claimName"] == *name)
    };
    assert!(of_kind("Pod").iter().any(used), "no pod uses it");
}

/// A snapshot of a claim that is not bound yet begins with a warning: it is in a file of its own,
/// which the quick start applies after it has waited for the claim.
#[test]
fn the_snapshot_of_the_example_is_made_once_its_claim_is_bound() {
    let kinds = |file: &str| -> Vec<Value> {
        let text = fs::read_to_string(folder().join(file)).unwrap();
        let objects: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
        objects.iter().map(|object| object["kind"].clone()).collect()
    };
    assert!(!kinds("example.yaml").contains(&"VolumeSnapshot".into()));
    assert_eq!(kinds("example-snapshot.yaml"), ["VolumeSnapshot"]);
    let claim = only("PersistentVolumeClaim")["metadata"]["name"].clone();
    assert_eq!(only("VolumeSnapshot")["spec"]["source"]["persistentVolumeClaimName"], claim);
    let start = fs::read_to_string(folder().join("../../docs/QUICKSTART_KUBERNETES.md")).unwrap();
    let at = |words: &str| start.find(words).unwrap_or_else(|| panic!("no {words:?}"));
    let bound = "kubectl wait persistentvolumeclaim data --for=jsonpath='{.status.phase}'=Bound";
    assert!(at("apply -f deploy/kubernetes/example.yaml") < at(bound));
    assert!(at(bound) < at("apply -f deploy/kubernetes/example-snapshot.yaml"));
}

/// Rows H24 and H29: how often is asked, and whether nodes are watched, is set in the chart.
///
/// Row: H24.
#[test]
fn the_health_monitor_polls_every_five_minutes() {
    let monitor = words(&container("csi-external-health-monitor-controller"));
    for flag in ["--monitor-interval=5m", "--list-volumes-interval=5m"] {
        assert!(monitor.contains(&flag.to_owned()), "{monitor:?}");
    }
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/chart/blockd");
    let values = fs::read_to_string(chart.join("values.yaml")).unwrap();
    let values: Value = serde_saphyr::from_str(&values).unwrap();
    let monitor = &values["healthMonitor"];
    assert_eq!((&monitor["enabled"], &monitor["interval"]), (&true.into(), &"5m".into()));
    assert_eq!(monitor["enableNodeWatcher"], false);
    let template = fs::read_to_string(chart.join("templates/daemonset.yaml")).unwrap();
    for line in [
        "--monitor-interval={{ .Values.healthMonitor.interval }}",
        "--list-volumes-interval={{ .Values.healthMonitor.interval }}",
        "{{- if .Values.healthMonitor.enableNodeWatcher }}",
        "--enable-node-watcher",
    ] {
        assert!(template.contains(line), "{line}");
    }
}

/// Row P32: where claims are bound at once, nodes compete, and wait before they do.
///
/// Row: P32.
#[test]
fn nodes_that_compete_for_a_claim_wait_before() {
    let provisioner = words(&container("csi-provisioner"));
    for flag in ["--node-deployment-base-delay=20s", "--node-deployment-max-delay=60s"] {
        assert!(provisioner.contains(&flag.to_owned()), "{provisioner:?}");
    }
}

/// A liveness probe must not depend on the daemon, since a restart of the plugin would not repair
/// it.
#[test]
fn liveness_is_the_plugins_own_and_readiness_the_daemons() {
    let plugin = container("blockd-csi");
    let port = |probe: &str| plugin[probe]["httpGet"]["port"].as_str().unwrap().to_owned();
    assert_eq!((port("livenessProbe"), port("readinessProbe")), ("alive".into(), "healthz".into()));
    assert_eq!(plugin["livenessProbe"]["httpGet"]["path"], "/healthz");
    let own = words(&plugin).into_iter().find_map(|word| {
        let address = word.strip_prefix("--health-address=")?.to_owned();
        address.rsplit_once(':').and_then(|(_, port)| port.parse::<u64>().ok())
    });
    let ports = plugin["ports"].as_array().unwrap();
    let alive = ports.iter().find(|port| port["name"] == "alive").unwrap();
    assert_eq!(alive["containerPort"].as_u64(), own);
    // The sidecar has to receive its answer before the kubelet's timeout.
    let words = words(&container("liveness-probe"));
    let timeout = words.iter().find_map(|word| word.strip_prefix("--probe-timeout=")).unwrap();
    let timeout: u64 = timeout.strip_suffix('s').unwrap().parse().unwrap();
    assert!(timeout < plugin["readinessProbe"]["timeoutSeconds"].as_u64().unwrap(), "{timeout} s");
}

/// The first versions that the manifests go with, and the reason, by the notes of that release.
/// `cargo ci manifests` holds the objects of each rendering to their sidecars as well.
const MINIMUM: [(&str, [u32; 3], &str); 8] = [
    ("csi-node-driver-registrar", [2, 17, 0], "no feature; of the same libraries as the others"),
    ("livenessprobe", [2, 16, 0], "no feature; reads no objects"),
    (
        "csi-provisioner",
        [6, 3, 0],
        "VolumeAttributesClass v1 on by default (6.0), snapshots protected while a volume is made \
         from them (6.0.1), no duplicates of capacity objects (6.3)",
    ),
    ("csi-resizer", [2, 0, 0], "VolumeAttributesClass v1 on by default (2.0)"),
    ("csi-snapshotter", [8, 6, 0], "VolumeGroupSnapshotClass v1 (8.6)"),
    ("csi-external-health-monitor-controller", [0, 18, 0], "CSI 1.12 (0.18)"),
    ("csi-snapshot-metadata", [1, 0, 0], "SnapshotMetadataService v1beta1, the only one (1.0)"),
    ("kube-rbac-proxy", [0, 21, 2], "no feature"),
];

fn version(text: &str) -> [u32; 3] {
    let parts: Vec<u32> = text.split('.').map(|part| part.parse().unwrap()).collect();
    parts.try_into().unwrap_or_else(|_| panic!("{text} is no version"))
}

#[test]
fn sidecars_have_the_versions_of_the_documentation_and_none_is_too_old() {
    let read = |path: &str| {
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)).unwrap()
    };
    let manifests = read("deploy/kubernetes/daemonset.yaml")
        + &read("deploy/kustomize/components/metrics-proxy/kustomization.yaml");
    let (values, document) = (read("deploy/chart/blockd/values.yaml"), read("docs/KUBERNETES.md"));
    for (name, minimum, reason) in MINIMUM {
        let image = format!("/{name}:v");
        let used = |text: &str| -> Vec<[u32; 3]> {
            let tags = text.split(&image).skip(1).filter_map(|rest| rest.lines().next());
            tags.map(version).collect()
        };
        let chart = used(&values);
        assert_eq!(chart.len(), 1, "{name} in the values of the chart");
        for found in chart.iter().chain(&used(&manifests)) {
            assert!(*found >= minimum && found == &chart[0], "{name}: {found:?}");
        }
        let text = |version: [u32; 3]| version.map(|part| part.to_string()).join(".");
        let row = format!("| `{name}` | {} | {} | {reason} |", text(chart[0]), text(minimum));
        assert!(document.contains(&row), "docs/KUBERNETES.md lacks: {row}");
    }
}

/// Since version 6.3 it protects the snapshot that a volume is made from by a finalizer.
#[test]
fn the_provisioner_may_protect_snapshots() {
    for path in ["deploy/kubernetes/rbac.yaml", "deploy/chart/blockd/templates/rbac.yaml"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
        let text = fs::read_to_string(&path).unwrap();
        let role = text.split("resources: [volumesnapshots]").nth(1).unwrap();
        let verbs = role.lines().nth(1).unwrap();
        assert_eq!(verbs.trim(), "verbs: [get, list, watch, update]", "{}", path.display());
    }
}

/// Row P35: the extender has an account of its own, with the rights that it needs.
///
/// Row: P35.
#[test]
fn the_extender_may_read_claims_and_storage_classes_and_nothing_else() {
    let deploy = folder().join("..");
    let component = deploy.join("kustomize/components/extender/extender.yaml");
    let text = fs::read_to_string(component).unwrap();
    let objects: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
    let of_kind = |kind: &str| {
        let found: Vec<&Value> = objects.iter().filter(|one| one["kind"] == kind).collect();
        assert_eq!(found.len(), 1, "{kind}");
        found[0].clone()
    };
    let rules = serde_json::json!([
        { "apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["get"] },
        { "apiGroups": ["storage.k8s.io"], "resources": ["storageclasses"], "verbs": ["get"] },
    ]);
    assert_eq!(of_kind("ClusterRole")["rules"], rules);
    let account = of_kind("ServiceAccount")["metadata"].clone();
    let binding = of_kind("ClusterRoleBinding");
    assert_eq!(binding["roleRef"]["name"], of_kind("ClusterRole")["metadata"]["name"]);
    let subject = serde_json::json!([{
        "kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"],
    }]);
    assert_eq!(binding["subjects"], subject);
    let pod = of_kind("Deployment")["spec"]["template"]["spec"].clone();
    assert_eq!(pod["serviceAccountName"], account["name"]);
    assert_eq!(pod["automountServiceAccountToken"], true);
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    let words = words(&pod["containers"][0]);
    let (verb, options) = words.split_first().unwrap();
    assert_eq!(verb, "extender");
    let options = std::iter::once(verb).chain(options);
    blockd_extender::Options::try_parse_from(options).unwrap();
    // The chart grants the same.
    let chart = fs::read_to_string(deploy.join("chart/blockd/templates/extender.yaml")).unwrap();
    let rights = |text: &str| -> Vec<String> {
        let begin = text.split("\nrules:\n").nth(1).unwrap();
        begin.lines().take_while(|line| *line != "---").map(ToOwned::to_owned).collect()
    };
    assert_eq!(rights(&chart), rights(&text));
    for line in ["serviceAccountName: {{ $name }}", "automountServiceAccountToken: true"] {
        assert!(chart.contains(line), "{line}");
    }
}

#[test]
fn daemons_in_pods_share_the_locks_of_their_host() {
    let paths = [
        "deploy/chart/blockd/templates/daemon.yaml",
        "deploy/kustomize/components/daemon/daemon.yaml",
    ];
    for path in paths {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
        let text = fs::read_to_string(&path).unwrap();
        for line in ["mountPath: /run/blockd-locks", "path: /run/blockd-locks"] {
            assert!(text.lines().any(|one| one.trim() == line), "{}: {line}", path.display());
        }
    }
}

/// The patch that puts a recorder before the plugin fits the shipped DaemonSet.
#[test]
fn the_patch_for_a_trace_fits_the_manifest() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/KUBERNETES.md");
    let text = fs::read_to_string(path).unwrap();
    let patch = text.split("--type=json --patch '").nth(1).unwrap();
    let patch: Value = serde_json::from_str(patch.split('\'').next().unwrap()).unwrap();
    let daemon_set = only("DaemonSet");
    let was = daemon_set.pointer(patch[0]["path"].as_str().unwrap()).unwrap();
    assert_eq!(was, "--endpoint=unix:///csi/csi.sock");
    let record = &patch[1]["value"];
    let words = words(record);
    let (verb, options) = words.split_first().unwrap();
    assert_eq!(verb, "record");
    let options = std::iter::once(verb).chain(options);
    let options = blockd_record::Options::try_parse_from(options).unwrap();
    options.check().unwrap();
    assert_eq!(options.listen, Path::new("/csi/csi.sock"));
    assert_eq!(patch[0]["value"], format!("--endpoint=unix://{}", options.to.display()));
    let plugin = container("blockd-csi");
    assert_eq!(record["image"], plugin["image"]);
    let group = options.listen_group.unwrap();
    assert!(
        plugin["args"].as_array().unwrap().contains(&format!("--endpoint-group={group}").into())
    );
    let mounts = plugin["volumeMounts"].as_array().unwrap();
    assert!(mounts.contains(&record["volumeMounts"][0]));
}

/// The help of both programs is a document, by which manifests are checked for flags that exist.
#[test]
fn the_help_is_in_the_documentation() {
    use clap::CommandFactory as _;
    let help = |command: clap::Command| {
        let mut command = command.term_width(100).mut_args(|one| one.hide_env_values(true));
        let text = command.render_long_help().to_string();
        let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
        lines.join("\n").trim_end().to_owned()
    };
    let plugin = help(Options::command());
    let extender = help(blockd_extender::Options::command());
    let image = help(blockd_kata::options::Options::command());
    let record = help(blockd_record::Options::command());
    let orphans = help(blockd_csi::operator::orphans::Options::command());
    let moving = help(blockd_csi::operator::moving::Options::command());
    let lost_node = help(blockd_csi::operator::lost_node::Options::command());
    let expected = format!(
        "# Command line of blockd-csi\n\nWhat `blockd-csi --help` and those of its verbs \
         say. A test holds this page to that, and\nwrites it anew with `BLOCKD_WRITE_HELP=1 cargo \
         test -p blockd-csi --test manifests`.\n\n## blockd-csi\n\n```text\n{plugin}\n```\n\n\
         ## blockd-csi extender\n\n```text\n{extender}\n```\n\n\
         ## blockd-csi record\n\n```text\n{record}\n```\n\n\
         ## blockd-csi orphans\n\n```text\n{orphans}\n```\n\n\
         ## blockd-csi move\n\n```text\n{moving}\n```\n\n\
         ## blockd-csi lost-node\n\n```text\n{lost_node}\n```\n\n\
         ## blockd-csi kata-image\n\n```text\n{image}\n```\n"
    );
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/CLI_CSI.md");
    if std::env::var_os("BLOCKD_WRITE_HELP").is_some() {
        fs::write(&path, &expected).unwrap();
    }
    assert_eq!(fs::read_to_string(&path).unwrap_or_default(), expected, "{}", path.display());
}
