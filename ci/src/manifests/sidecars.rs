//! Rules for sidecars beyond the flags that exist: their objects, variables and rights.

use serde_json::Value;

use super::objects;

/// An object that a sidecar reads: its kind and version, and the first version of the sidecar that
/// reads it without further settings, by the sidecar's notes of that release.
type Need = (&'static str, &'static str, &'static str, [u32; 3]);

const NEEDS: [Need; 4] = [
    // On by default since it is stable.
    ("VolumeAttributesClass", "storage.k8s.io/v1", "csi-provisioner", [6, 0, 0]),
    ("VolumeAttributesClass", "storage.k8s.io/v1", "csi-resizer", [2, 0, 0]),
    // Sidecar and controller went over to v1, and v1beta1 is deprecated since 8.4.
    ("VolumeGroupSnapshotClass", "groupsnapshot.storage.k8s.io/v1", "csi-snapshotter", [8, 6, 0]),
    // Support for v1alpha1 ended with it.
    ("SnapshotMetadataService", "cbt.storage.k8s.io/v1beta1", "csi-snapshot-metadata", [1, 0, 0]),
];

/// Objects of other projects' definitions: versions other than those above are not read.
const DEFINED: [&str; 2] = ["VolumeGroupSnapshotClass", "SnapshotMetadataService"];

/// Problems of the sidecars in one rendering.
pub(super) fn problems(all: &[Value]) -> Vec<String> {
    let mut problems = unread(all);
    for object in all {
        for container in objects::containers(object) {
            let name = container["name"].as_str().unwrap_or_default();
            let found = capacity_owner(object, container, all);
            problems.extend(found.into_iter().map(|problem| format!("{name}: {problem}")));
        }
    }
    problems
}

/// Objects that the sidecars of a rendering do not read.
fn unread(all: &[Value]) -> Vec<String> {
    let images = all.iter().flat_map(objects::containers).filter_map(|one| one["image"].as_str());
    let versions: Vec<(&str, [u32; 3])> = images.filter_map(version).collect();
    let mut problems = Vec::new();
    for object in all {
        let text = |field: &str| object[field].as_str().unwrap_or_default();
        let (kind, api) = (text("kind"), text("apiVersion"));
        let needs = NEEDS.iter().filter(|need| need.0 == kind && need.1 == api);
        if DEFINED.contains(&kind) && needs.clone().next().is_none() {
            problems.push(format!("{kind}: no sidecar reads version {api}"));
        }
        for &(_, _, sidecar, least) in needs {
            let too_old = |one: &&(&str, [u32; 3])| one.0 == sidecar && one.1 < least;
            for (_, found) in versions.iter().filter(too_old) {
                problems
                    .push(format!("{kind} {api} is read by {sidecar} {least:?}, not {found:?}"));
            }
        }
    }
    problems
}

/// The name and the version of an image.
fn version(image: &str) -> Option<(&str, [u32; 3])> {
    let (name, tag) = image.rsplit('/').next()?.split_once(":v")?;
    let parts: Vec<u32> = tag.split('.').map_while(|part| part.parse().ok()).collect();
    Some((name, parts.try_into().ok()?))
}

/// Capacity objects have to outlive the pod that publishes them, and end with the driver: the
/// DaemonSet owns them, one level above the pod. The provisioner finds it by the pod, which it
/// knows from its variables and may read.
fn capacity_owner(object: &Value, container: &Value, all: &[Value]) -> Vec<String> {
    let words = container["args"].as_array().map(Vec::as_slice).unwrap_or_default();
    let has = |word: &str| words.iter().any(|one| one == word);
    if !has("--enable-capacity") {
        return Vec::new();
    }
    let mut problems = Vec::new();
    if object["kind"] != "DaemonSet" || !has("--capacity-ownerref-level=1") {
        problems.push("its capacity objects are not owned by a DaemonSet".to_owned());
    }
    let variables = container["env"].as_array().map(Vec::as_slice).unwrap_or_default();
    for name in ["NAMESPACE", "POD_NAME"] {
        if !variables.iter().any(|one| one["name"] == name) {
            problems.push(format!("it finds no owner of its capacity objects without {name}"));
        }
    }
    // A file with the DaemonSet alone has no roles at all.
    let mut roles = all.iter().filter(|one| one["kind"] == "Role").peekable();
    let may_read_pods = |role: &Value| {
        let rules = role["rules"].as_array().map(Vec::as_slice).unwrap_or_default();
        rules.iter().any(|rule| {
            let lists = |field: &str, value: &str| {
                rule[field].as_array().is_some_and(|list| list.iter().any(|one| one == value))
            };
            lists("resources", "pods") && lists("verbs", "get")
        })
    };
    if roles.peek().is_some() && !roles.any(may_read_pods) {
        problems.push("no role lets it read the pod that names the owner".to_owned());
    }
    problems
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rendering(args: Value, env: Value, verbs: Value) -> Vec<Value> {
        let containers = json!([{"name": "csi-provisioner", "args": args, "env": env}]);
        let pod = json!({"spec": {"containers": containers}});
        let rules = json!([{"apiGroups": [""], "resources": ["pods"], "verbs": verbs}]);
        vec![
            json!({"kind": "DaemonSet", "spec": {"template": pod}}),
            json!({"kind": "Role", "rules": rules}),
        ]
    }

    #[test]
    fn objects_are_of_versions_that_their_sidecars_read() {
        let set = |image: &str| {
            let containers = json!([{"name": "s", "image": format!("r.example.com/x/{image}")}]);
            json!({"kind": "DaemonSet", "spec": {"template": {"spec": {"containers": containers}}}})
        };
        let class = |kind: &str, api: &str| json!({"kind": kind, "apiVersion": api});
        let attributes = class("VolumeAttributesClass", "storage.k8s.io/v1");
        let good = [set("csi-resizer:v2.0.0"), attributes.clone(), set("csi-other:v0.1.0")];
        assert_eq!(problems(&good), [""; 0]);
        let found = problems(&[set("csi-resizer:v1.14.0"), attributes]);
        assert_eq!(
            found,
            ["VolumeAttributesClass storage.k8s.io/v1 is read by csi-resizer [2, 0, 0], \
              not [1, 14, 0]"]
        );
        let group = class("VolumeGroupSnapshotClass", "groupsnapshot.storage.k8s.io/v1beta1");
        let found = problems(&[group]);
        assert!(found[0].contains("no sidecar reads version groupsnapshot"), "{found:?}");
    }

    #[test]
    fn capacity_is_owned_by_the_daemon_set_and_its_owner_can_be_found() {
        let level =
            |level: u8| json!(["--enable-capacity", format!("--capacity-ownerref-level={level}")]);
        let env = json!([{"name": "NAMESPACE"}, {"name": "POD_NAME"}]);
        let good = rendering(level(1), env.clone(), json!(["get"]));
        assert_eq!(problems(&good), Vec::<String>::new());
        // A file has the DaemonSet alone.
        assert_eq!(problems(&good[..1]), Vec::<String>::new());
        let found = problems(&rendering(level(0), env.clone(), json!(["get"])));
        assert_eq!(found, ["csi-provisioner: its capacity objects are not owned by a DaemonSet"]);
        let found = problems(&rendering(level(1), json!([]), json!(["get"])));
        assert_eq!(found.len(), 2, "{found:?}");
        let found = problems(&rendering(level(1), env, json!(["list"])));
        assert!(found[0].contains("no role lets it read the pod"), "{found:?}");
        assert_eq!(found.len(), 1);
        assert!(problems(&rendering(json!([]), json!([]), json!([]))).is_empty());
    }
}
