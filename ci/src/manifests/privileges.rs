//! Rules for the privileges of containers: as few as there can be, and exceptions by name.

use serde_json::Value;

use super::objects;

/// Containers that are privileged, with the reason.
const PRIVILEGED: [(&str, &str); 2] = [
    ("blockd-csi", "mounts are propagated to pods from privileged containers only"),
    ("blockd", "it makes block devices and locks memory"),
];

/// Containers that may write to their root file system, with the reason.
const WRITES_ROOT: [(&str, &str); 1] = [("blockd", "no test runs it with a read-only one")];

/// Further containers that run as root, with the reason.
const ROOT: [(&str, &str); 1] =
    [("node-driver-registrar", "it makes a socket in a folder of the kubelet's")];

/// Privileges in one rendering that have no reason.
pub(super) fn problems(all: &[Value]) -> Vec<String> {
    let mut problems = Vec::new();
    // The pods of examples are their users' own.
    let ours = |object: &&Value| object["kind"] == "DaemonSet" || object["kind"] == "Deployment";
    for object in all.iter().filter(ours) {
        let pod = &object["spec"]["template"]["spec"]["securityContext"];
        let containers: Vec<&Value> = objects::containers(object).collect();
        let plain = containers.iter().any(|one| !is_privileged(one));
        if plain && pod["seccompProfile"]["type"] != "RuntimeDefault" {
            let name = &object["metadata"]["name"];
            problems.push(format!("{name}: its pods have no seccomp profile"));
        }
        for container in containers {
            let name = container["name"].as_str().unwrap_or_default();
            let found = of_container(name, &container["securityContext"], pod);
            problems.extend(found.into_iter().map(|problem| format!("{name}: {problem}")));
        }
    }
    problems
}

fn is_privileged(container: &Value) -> bool {
    container["securityContext"]["privileged"] == true
}

fn of_container(name: &str, context: &Value, pod: &Value) -> Vec<&'static str> {
    let is_of = |table: &[(&str, &str)]| table.iter().any(|(known, _)| *known == name);
    let mut problems = Vec::new();
    if context["readOnlyRootFilesystem"] != true && !is_of(&WRITES_ROOT) {
        problems.push("may write to its root file system");
    }
    let profile = &context["seccompProfile"];
    if !profile.is_null() && profile["type"] != "RuntimeDefault" {
        problems.push("has another seccomp profile than its pod");
    }
    if context["privileged"] == true {
        if !is_of(&PRIVILEGED) {
            problems.push("is privileged");
        }
        return problems;
    }
    let of_pod_too =
        |field: &str| if context[field].is_null() { &pod[field] } else { &context[field] };
    if *of_pod_too("runAsNonRoot") != true && !is_of(&ROOT) {
        problems.push("may run as root");
    }
    if context["allowPrivilegeEscalation"] != false {
        problems.push("may gain privileges");
    }
    if context["capabilities"]["drop"] != serde_json::json!(["ALL"]) {
        problems.push("keeps capabilities");
    }
    problems
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn found(name: &str, context: Value, pod: Value) -> Vec<String> {
        let containers = json!([{"name": name, "securityContext": context}]);
        let spec = json!({"securityContext": pod, "containers": containers});
        let metadata = json!({"name": "d"});
        problems(&[json!({
            "kind": "DaemonSet", "metadata": metadata, "spec": {"template": {"spec": spec}},
        })])
    }

    #[test]
    fn containers_have_the_privileges_of_their_exceptions_and_no_more() {
        let profile = json!({"seccompProfile": {"type": "RuntimeDefault"}});
        let least = json!({
            "runAsNonRoot": true, "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]},
        });
        assert_eq!(found("a", least.clone(), profile.clone()), [""; 0]);
        assert_eq!(found("a", least.clone(), json!({})).len(), 1);
        assert_eq!(found("a", json!({}), profile.clone()).len(), 4);
        let mut as_root = least;
        as_root["runAsNonRoot"] = Value::Null;
        assert_eq!(found("a", as_root.clone(), profile.clone()), ["a: may run as root"]);
        assert_eq!(found("node-driver-registrar", as_root, profile.clone()), [""; 0]);
        let privileged = json!({"privileged": true, "readOnlyRootFilesystem": true});
        assert_eq!(found("a", privileged.clone(), profile), ["a: is privileged"]);
        assert_eq!(found("blockd-csi", privileged, json!({})), [""; 0]);
    }

    #[test]
    fn privileged_containers_too_have_a_read_only_root_and_no_profile_of_their_own() {
        let mut context = json!({"privileged": true});
        let writes = ["blockd-csi: may write to its root file system"];
        assert_eq!(found("blockd-csi", context.clone(), json!({})), writes);
        assert_eq!(found("blockd", context.clone(), json!({})), [""; 0]);
        context["seccompProfile"] = json!({"type": "Unconfined"});
        let other = ["blockd: has another seccomp profile than its pod"];
        assert_eq!(found("blockd", context, json!({})), other);
    }
}
