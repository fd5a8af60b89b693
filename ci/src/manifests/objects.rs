//! Rules for objects beyond their schemas.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

/// The containers of an object, if it has pods.
pub(super) fn containers(object: &Value) -> impl Iterator<Item = &Value> {
    let containers = pod(object)["containers"].as_array();
    containers.map(Vec::as_slice).unwrap_or_default().iter()
}

fn pod(object: &Value) -> &Value {
    match text(&object["kind"]) {
        "Pod" => &object["spec"],
        "CronJob" => &object["spec"]["jobTemplate"]["spec"]["template"]["spec"],
        _ => &object["spec"]["template"]["spec"],
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Kind, namespace and name: the identity of an object.
fn identity(object: &Value) -> (String, String, String) {
    let metadata = &object["metadata"];
    let of = |value: &Value| text(value).to_owned();
    (of(&object["kind"]), of(&metadata["namespace"]), of(&metadata["name"]))
}

/// Returns the problems of the objects of one rendering.
pub(super) fn problems(objects: &[Value]) -> Vec<String> {
    let mut problems = Vec::new();
    let mut seen = BTreeSet::new();
    for object in objects.iter().filter(|object| object["metadata"]["name"].is_string()) {
        let identity = identity(object);
        if !seen.insert(identity.clone()) {
            problems.push(format!("{identity:?} twice"));
        }
        let mut complain =
            |what: String| problems.push(format!("{} {}: {what}", identity.0, identity.2));
        let pod = pod(object);
        let names = |list: &Value| -> BTreeSet<String> {
            let list = list.as_array().map(Vec::as_slice).unwrap_or_default();
            list.iter().map(|one| text(&one["name"]).to_owned()).collect()
        };
        let volumes = names(&pod["volumes"]);
        let mut used = BTreeSet::new();
        let first = pod["initContainers"].as_array().map(Vec::as_slice).unwrap_or_default();
        for container in first.iter().chain(containers(object)) {
            let name = text(&container["name"]);
            // Raw block volumes are devices of the container.
            let devices = names(&container["volumeDevices"]);
            for mount in names(&container["volumeMounts"]).into_iter().chain(devices) {
                if !volumes.contains(&mount) {
                    complain(format!("{name} mounts {mount}, which is no volume of its pod"));
                }
                used.insert(mount);
            }
        }
        for container in containers(object) {
            let name = text(&container["name"]);
            let image = text(&container["image"]);
            if !image.rsplit('/').next().unwrap_or_default().contains(':') {
                complain(format!("{name}: image {image} has no version"));
            }
            // The data path is never in the plugin's pod: rolling one must not end the other.
            let serves =
                container["args"].as_array().is_some_and(|args| args.contains(&"serve".into()));
            if serves && containers(object).count() > 1 {
                complain(format!("{name} is the daemon, and not alone in its pod"));
            }
            if serves && object["spec"]["updateStrategy"]["type"] != "OnDelete" {
                complain(format!("{name} is the daemon, and would be replaced by itself"));
            }
        }
        for volume in volumes.difference(&used) {
            complain(format!("volume {volume} is mounted nowhere"));
        }
        let (selector, labels) = match text(&object["kind"]) {
            "DaemonSet" | "Deployment" => (
                &object["spec"]["selector"]["matchLabels"],
                &object["spec"]["template"]["metadata"]["labels"],
            ),
            _ => continue,
        };
        let selected = selector.as_object().is_some_and(|selector| {
            !selector.is_empty() && selector.iter().all(|(key, value)| labels[key] == *value)
        });
        if !selected {
            complain("its selector does not meet its pods".to_owned());
        }
        let is_plain = object["kind"] == "Deployment";
        if is_plain && pod["securityContext"]["runAsNonRoot"] != Value::Bool(true) {
            complain("runs as root for nothing".to_owned());
        }
    }
    problems
}

/// Differences between the chart's rendering and the base.
pub(super) fn differences(chart: &[Value], base: &[Value]) -> Vec<String> {
    let map = |objects: &[Value]| -> BTreeMap<_, Value> {
        // Objects of only one of the two: a chart's namespace is created at its installation.
        let compared = objects
            .iter()
            .filter(|one| !matches!(text(&one["kind"]), "Namespace" | "Kustomization"));
        compared.map(|one| (identity(one), plain(one))).collect()
    };
    let (chart, base) = (map(chart), map(base));
    let mut problems = Vec::new();
    if base.is_empty() {
        problems.push("the base is empty".to_owned());
    }
    for name in chart.keys().chain(base.keys()).collect::<BTreeSet<_>>() {
        let what = format!("{} {}", name.0, name.2);
        match (chart.get(name), base.get(name)) {
            (Some(ours), Some(theirs)) => differ(&what, ours, theirs, &mut problems),
            (Some(_), None) => problems.push(format!("{what}: only the chart has it")),
            (None, _) => problems.push(format!("{what}: only the base has it")),
        }
    }
    problems
}

/// Lists of named items by their names: kustomize puts those of a patch elsewhere than the chart.
fn in_order(value: &mut Value) {
    match value {
        Value::Array(items) => {
            items.iter_mut().for_each(in_order);
            if items.iter().all(|item| item["name"].is_string()) {
                items.sort_by_key(|item| text(&item["name"]).to_owned());
            }
        }
        Value::Object(fields) => fields.values_mut().for_each(in_order),
        _ => {}
    }
}

/// Without the labels that say where an object comes from.
fn plain(object: &Value) -> Value {
    let mut object = object.clone();
    in_order(&mut object);
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.remove("labels");
    }
    // The text of a configuration is compared without its comments and empty lines.
    if let Some(data) = object["data"].as_object_mut() {
        for value in data.values_mut() {
            let lines: Vec<&str> = text(value)
                .lines()
                .map(str::trim)
                .filter(|line| !line.is_empty() && !line.starts_with('#'))
                .collect();
            *value = lines.join("\n").into();
        }
    }
    object
}

/// Reports the paths at which two values differ.
fn differ(at: &str, ours: &Value, theirs: &Value, problems: &mut Vec<String>) {
    match (ours, theirs) {
        (Value::Object(a), Value::Object(b)) => {
            for key in a.keys().chain(b.keys()).collect::<BTreeSet<_>>() {
                let none = Value::Null;
                let (a, b) = (a.get(key).unwrap_or(&none), b.get(key).unwrap_or(&none));
                differ(&format!("{at}.{key}"), a, b, problems);
            }
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            for (index, (a, b)) in a.iter().zip(b).enumerate() {
                differ(&format!("{at}[{index}]"), a, b, problems);
            }
        }
        _ if ours == theirs => {}
        _ => problems.push(format!("{at}: the chart has {ours}, the base {theirs}")),
    }
}

/// Returns the names that two deployments side by side would share.
pub(super) fn shared(one: &[Value], other: &[Value]) -> Vec<String> {
    let ports = |objects: &[Value]| -> BTreeSet<String> {
        let containers = objects.iter().flat_map(containers);
        let ports = containers.flat_map(|one| one["ports"].as_array().cloned().unwrap_or_default());
        ports.filter_map(|port| port.get("hostPort").map(ToString::to_string)).collect()
    };
    let names = |objects: &[Value]| objects.iter().map(identity).collect::<BTreeSet<_>>();
    let mut problems: Vec<String> = names(one)
        .intersection(&names(other))
        .map(|name| format!("two deployments would share {name:?}"))
        .collect();
    let both = ports(one).intersection(&ports(other)).cloned().collect::<Vec<_>>();
    problems.extend(both.iter().map(|port| format!("two deployments would share port {port}")));
    problems
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn daemon_set(containers: Value, volumes: Value) -> Value {
        json!({
            "kind": "DaemonSet",
            "metadata": {"name": "d"},
            "spec": {
                "selector": {"matchLabels": {"a": "b"}},
                "template": {
                    "metadata": {"labels": {"a": "b"}},
                    "spec": {"containers": containers, "volumes": volumes},
                },
            },
        })
    }

    fn only(object: &Value) -> String {
        let found = problems(std::slice::from_ref(object));
        assert_eq!(found.len(), 1, "{found:?}");
        found[0].clone()
    }

    #[test]
    fn mounts_volumes_images_and_selectors_have_to_fit() {
        let mounts = json!([{"name": "v"}]);
        let container = json!({"name": "c", "image": "i:1", "volumeMounts": mounts});
        let good = daemon_set(json!([container]), json!([{"name": "v"}]));
        assert!(problems(std::slice::from_ref(&good)).is_empty());
        assert_eq!(problems(&[good.clone(), good.clone()]).len(), 1);
        let found = only(&daemon_set(json!([container]), json!([])));
        assert!(found.contains("c mounts v, which is no volume"), "{found}");
        let found = only(&daemon_set(json!([container]), json!([{"name": "v"}, {"name": "w"}])));
        assert!(found.contains("volume w is mounted nowhere"), "{found}");
        let device = json!({"name": "c", "image": "i:1", "volumeDevices": [{"name": "w"}]});
        let both = json!([container, device]);
        let good = daemon_set(both, json!([{"name": "v"}, {"name": "w"}]));
        assert!(problems(std::slice::from_ref(&good)).is_empty());
        let found = only(&daemon_set(json!([{"name": "c", "image": "r:5000/i"}]), json!([])));
        assert!(found.contains("has no version"), "{found}");
        let mut other = good;
        other["spec"]["template"]["metadata"]["labels"]["a"] = "c".into();
        assert!(only(&other).contains("selector"));
    }

    #[test]
    fn the_daemon_is_alone_in_its_pod_and_replaced_by_hand() {
        let daemon = json!({"name": "blockd", "image": "blockd:1", "args": ["serve"]});
        let mut alone = daemon_set(json!([daemon]), json!([]));
        assert!(only(&alone).contains("would be replaced by itself"));
        alone["spec"]["updateStrategy"] = json!({"type": "OnDelete"});
        assert!(problems(std::slice::from_ref(&alone)).is_empty());
        let mut beside = daemon_set(json!([daemon, {"name": "c", "image": "i:1"}]), json!([]));
        beside["spec"]["updateStrategy"] = json!({"type": "OnDelete"});
        assert!(only(&beside).contains("not alone in its pod"));
    }

    #[test]
    fn chart_and_base_are_compared_but_for_labels_and_comments() {
        let labels = json!({"helm.sh/chart": "x"});
        let chart = json!({"kind": "A", "metadata": {"name": "a", "labels": labels}, "x": [1, 2],
            "data": {"f": "k = 1\n"}});
        let base = json!({"kind": "A", "metadata": {"name": "a"}, "x": [1, 2],
            "data": {"f": "# why\nk = 1\n"}});
        let namespace = json!({"kind": "Namespace", "metadata": {"name": "n"}});
        let base = [base, namespace];
        assert!(differences(std::slice::from_ref(&chart), &base).is_empty());
        let named = |names: [&str; 2]| {
            let items = names.map(|name| json!({"name": name}));
            json!({"kind": "A", "metadata": {"name": "a"}, "x": items})
        };
        assert!(differences(&[named(["p", "q"])], &[named(["q", "p"])]).is_empty());
        let mut changed = chart;
        changed["x"][1] = 3.into();
        assert_eq!(differences(&[changed], &base), ["A a.x[1]: the chart has 3, the base 2"]);
        assert_eq!(differences(&[], &base), ["A a: only the base has it"]);
    }

    #[test]
    fn two_deployments_share_nothing() {
        let of = |name: &str, port: u16| {
            let ports = json!([{"containerPort": 1, "hostPort": port}]);
            let spec = json!({"containers": [{"ports": ports}]});
            json!({"kind": "Pod", "metadata": {"name": name}, "spec": spec})
        };
        assert!(shared(&[of("a", 1)], &[of("b", 2)]).is_empty());
        assert_eq!(shared(&[of("a", 1)], &[of("a", 1)]).len(), 2);
    }
}
