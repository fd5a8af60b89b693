//! Objects for the Prometheus operator: what a monitor selects is there, and rules are those of the
//! files.

use serde_json::Value;

use super::objects::containers;

/// How published pages begin in the files of alerts.
const BOOK: &str = "https://blockd.io/docs/";

/// Problems of services and of the monitors that select them.
pub(super) fn problems(objects: &[Value]) -> Vec<String> {
    let mut problems = Vec::new();
    for monitor in objects.iter().filter(|one| one["kind"] == "ServiceMonitor") {
        let name = &monitor["metadata"]["name"];
        let is_selected = |one: &&Value| one["kind"] == "Service" && selects(monitor, one);
        let services: Vec<&Value> = objects.iter().filter(is_selected).collect();
        if services.is_empty() {
            problems.push(format!("ServiceMonitor {name} selects no service"));
        }
        let endpoints = items(&monitor["spec"]["endpoints"]);
        let has = |service: &Value, port: &Value| {
            items(&service["spec"]["ports"]).iter().any(|one| one["name"] == *port)
        };
        for port in endpoints.iter().map(|endpoint| &endpoint["port"]) {
            let none = !services.iter().any(|service| has(service, port));
            if none && services.len() > 1 {
                problems.push(format!("ServiceMonitor {name}: no service has a port {port}"));
            }
        }
        for service in services {
            if !endpoints.iter().any(|endpoint| has(service, &endpoint["port"])) {
                let service = &service["metadata"]["name"];
                problems.push(format!("Service {service} has no port of ServiceMonitor {name}"));
            }
        }
    }
    for service in objects.iter().filter(|one| one["kind"] == "Service") {
        let name = &service["metadata"]["name"];
        let selector = &service["spec"]["selector"];
        let template =
            |one: &&Value| contains(&one["spec"]["template"]["metadata"]["labels"], selector);
        let pods: Vec<&Value> = objects.iter().filter(template).collect();
        if pods.is_empty() {
            problems.push(format!("Service {name} selects no pods"));
        }
        for port in items(&service["spec"]["ports"]).iter().map(|one| &one["targetPort"]) {
            let has = |pod: &&&Value| {
                let mut ports = containers(pod).flat_map(|one| items(&one["ports"]));
                ports.any(|one| one["name"] == *port || one["containerPort"] == *port)
            };
            if pods.iter().filter(has).count() < pods.len() {
                problems.push(format!("Service {name}: its pods have no port {port}"));
            }
        }
    }
    problems
}

/// Whether there are alerts among the objects.
pub(super) fn has_rules(objects: &[Value]) -> bool {
    objects.iter().any(|one| one["kind"] == "PrometheusRule")
}

/// Differences of alerts from the groups of the files, apart from the place of the book.
pub(super) fn differences<'a>(
    objects: &'a [Value],
    groups: &'a [Value],
) -> impl Iterator<Item = String> + 'a {
    let rules = objects.iter().filter(|one| one["kind"] == "PrometheusRule");
    rules.filter_map(|rule| {
        let name = &rule["metadata"]["name"];
        let mut ours = rule["spec"]["groups"].clone();
        let mut led = 0;
        for rule in ours.as_array_mut()?.iter_mut().flat_map(|group| {
            group["rules"].as_array_mut().map(Vec::as_mut_slice).unwrap_or_default()
        }) {
            let url = &mut rule["annotations"]["runbook_url"];
            let page = url.as_str().and_then(|url| url.rsplit('/').next());
            *url = page.map(|page| format!("{BOOK}{page}")).into();
            led += 1;
        }
        let same = ours.as_array().map(Vec::as_slice) == Some(groups) && led > 0;
        (!same).then(|| format!("PrometheusRule {name} has other alerts than the files"))
    })
}

fn selects(monitor: &Value, service: &Value) -> bool {
    let (selector, labels) = (&monitor["spec"]["selector"], &service["metadata"]["labels"]);
    let is_in = |one: &Value| {
        let label = one["key"].as_str().map(|key| &labels[key]);
        one["operator"] == "In" && label.is_some_and(|label| items(&one["values"]).contains(label))
    };
    contains(labels, &selector["matchLabels"])
        && items(&selector["matchExpressions"]).iter().all(is_in)
}

/// Whether labels have all of those that are selected, and some are.
fn contains(labels: &Value, selected: &Value) -> bool {
    selected.as_object().is_some_and(|selected| {
        !selected.is_empty() && selected.iter().all(|(key, value)| labels[key] == *value)
    })
}

fn items(list: &Value) -> &[Value] {
    list.as_array().map(Vec::as_slice).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn objects() -> Vec<Value> {
        let labels = json!({"app": "a"});
        let ports = json!([{"name": "metrics", "containerPort": 1}]);
        let containers = json!([{"ports": ports}]);
        let template = json!({"metadata": {"labels": labels}, "spec": {"containers": containers}});
        let chosen = json!([{"key": "app", "operator": "In", "values": ["a"]}]);
        let selector = json!({"matchLabels": {"part": "m"}, "matchExpressions": chosen});
        let ports = json!([{"name": "metrics", "port": 9, "targetPort": "metrics"}]);
        vec![
            json!({"kind": "DaemonSet", "spec": {"template": template}}),
            json!({"kind": "Service",
                "metadata": {"name": "s", "labels": {"app": "a", "part": "m"}},
                "spec": {"selector": labels, "ports": ports}}),
            json!({"kind": "ServiceMonitor", "metadata": {"name": "m"},
                "spec": {"selector": selector, "endpoints": [{"port": "metrics"}]}}),
        ]
    }

    #[test]
    fn a_monitor_selects_services_and_these_select_pods() {
        assert_eq!(problems(&objects()), [""; 0]);
        for (change, expected) in [
            ("/1/metadata/labels/app", "ServiceMonitor \"m\" selects no service"),
            ("/2/spec/endpoints/0/port", "Service \"s\" has no port of ServiceMonitor \"m\""),
            ("/1/spec/selector/app", "Service \"s\" selects no pods"),
            ("/1/spec/ports/0/targetPort", "Service \"s\": its pods have no port \"other\""),
        ] {
            let mut changed = Value::from(objects());
            *changed.pointer_mut(change).unwrap() = "other".into();
            assert_eq!(problems(changed.as_array().unwrap()), [expected], "{change}");
        }
    }

    #[test]
    fn rules_are_those_of_the_files() {
        let group = |url: &str, expr: &str| {
            let rule = json!({"alert": "A", "expr": expr, "annotations": {"runbook_url": url}});
            json!({"name": "g", "rules": [rule]})
        };
        let of = |url: &str, expr: &str| {
            let spec = json!({"groups": [group(url, expr)]});
            [json!({"kind": "PrometheusRule", "metadata": {"name": "r"}, "spec": spec})]
        };
        let files = [group("https://blockd.io/docs/T.html#a", "x")];
        assert_eq!(differences(&of("https://e.com/T.html#a", "x"), &files).count(), 0);
        assert_eq!(differences(&of("https://e.com/T.html#b", "x"), &files).count(), 1);
        assert_eq!(differences(&of("https://e.com/T.html#a", "y"), &files).count(), 1);
        assert!(has_rules(&of("", "")) && !has_rules(&objects()));
    }
}
