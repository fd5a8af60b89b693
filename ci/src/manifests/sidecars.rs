//! Rules for sidecars beyond the flags that exist: their objects, variables and rights.

use serde_json::Value;

use super::objects;

/// Problems of the sidecars in one rendering.
pub(super) fn problems(all: &[Value]) -> Vec<String> {
    let mut problems = Vec::new();
    for object in all {
        for container in objects::containers(object) {
            let name = container["name"].as_str().unwrap_or_default();
            let found = capacity_owner(object, container, all);
            problems.extend(found.into_iter().map(|problem| format!("{name}: {problem}")));
        }
    }
    problems
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
