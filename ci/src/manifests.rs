//! `cargo ci manifests`: all that Kubernetes reads in `deploy/`, rendered as its users do, and by
//! the schemas of the API.
//!
//! The chart goes through Helm's own engine with each file of values in its folder `ci`, the base
//! and every component through kustomize. The rendering of the chart's defaults has to equal the
//! base, every flag has to be one of the binary that is given it, and two deployments must not
//! share a name.

mod flags;
mod kubevirt;
mod monitoring;
mod objects;
mod privileges;
mod sidecars;
mod tools;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::steps::Outcome;

const CHART: &str = "deploy/chart/blockd";
const BASE: &str = "deploy/kubernetes";
const COMPONENTS: &str = "deploy/kustomize/components";
/// Classes, claims, pods and jobs that people begin with.
const EXAMPLES: [&str; 6] = [
    "deploy/examples/encrypted.yaml",
    "deploy/examples/kubevirt.yaml",
    "deploy/examples/move.yaml",
    "deploy/examples/orphans.yaml",
    "deploy/examples/pmem.yaml",
    "deploy/examples/volume-group.yaml",
];
/// Alerts for Prometheus, in the order in which the chart has them.
const ALERTS: [&str; 2] = ["deploy/alerts.yml", "deploy/alerts-kubernetes.yml"];

/// Values that the chart must refuse, with the error.
fn refused() -> [(&'static str, Value, &'static str); 12] {
    let enabled = json!({"enabled": true});
    let both = json!({"access": "pod", "podMonitor": enabled, "serviceMonitor": enabled});
    let monitored =
        |access: &str, monitor: &str| json!({"metrics": {"access": access, monitor: enabled}});
    let classes = |device: &str| json!([{"name": "fast", "deviceClass": device}]);
    [
        ("two monitors of the same pods", json!({"metrics": both}), "scraped twice"),
        (
            "a monitor of metrics that only the pod can read",
            monitored("loopback", "serviceMonitor"),
            "needs metrics.access pod or proxy; it is loopback",
        ),
        (
            "a monitor without a token before a proxy",
            monitored("proxy", "podMonitor"),
            "metrics.podMonitor needs metrics.access pod",
        ),
        (
            "an extender that could read no metrics",
            json!({"extender": {"enabled": true}}),
            "extender.enabled needs metrics.access pod",
        ),
        ("an unknown kubelet", json!({"kubelet": {"variant": "k9s"}}), "variant"),
        ("an unknown key", json!({"kublet": {"variant": "k0s"}}), "kublet"),
        ("an interval without a unit", json!({"healthMonitor": {"interval": "5"}}), "interval"),
        ("a port beyond all", json!({"metrics": {"port": 65536}}), "port"),
        ("an unknown mode", json!({"extender": {"mode": "best"}}), "mode"),
        (
            "a device class that is not configured",
            json!({"storageClasses": classes("nvme")}),
            "deviceClass nvme of fast is not in config.classes, which has thin, thick",
        ),
        (
            "a device class beside the only one of the plugin",
            json!({"storageClasses": classes("thin"), "config": {"classes": []}}),
            "which has default",
        ),
        (
            "metadata without its authority",
            json!({"snapshotMetadata": {"enabled": true}}),
            "caCert",
        ),
    ]
}

/// The values of the chart that do the same as a component.
fn values_of(component: &str) -> Option<Value> {
    Some(match component {
        "base" => json!({}),
        "daemon" => json!({"daemon": {"enabled": true}}),
        "extender" => json!({
            "extender": {"enabled": true, "tlsSecret": "blockd-csi-extender"},
            "metrics": {"access": "pod", "annotations": false},
        }),
        "group-snapshots" => json!({"snapshotter": {"groups": true}}),
        "kubelet-k0s" => json!({"kubelet": {"variant": "k0s"}}),
        "metrics-proxy" => json!({"metrics": {"access": "proxy"}}),
        "no-health-monitor" => json!({"healthMonitor": {"enabled": false}}),
        "open-metrics" => json!({"metrics": {"access": "pod"}}),
        _ => return None,
    })
}

/// Renders and judges the chart, and the manifests as files.
///
/// # Errors
/// Lists everything that does not hold.
pub(crate) fn chart(root: &Path) -> Result<Outcome> {
    let mut cases = serde_json::Map::new();
    let case = |release: &str, values: Value| json!({"release": release, "namespace": "blockd", "values": values});
    cases.insert("default".to_owned(), case("blockd", json!({})));
    for entry in fs::read_dir(root.join(CHART).join("ci")).context(CHART)? {
        let file = entry?.file_name().to_string_lossy().into_owned();
        let case = json!({"release": "blockd", "namespace": "blockd", "file": file});
        cases.insert(file, case);
    }
    ensure!(cases.len() > 5, "{CHART}/ci has lost its values");
    let other = "other-driver-values.yaml";
    let beside = json!({"release": "fast", "namespace": "fast", "file": other});
    cases.insert("beside".to_owned(), beside);
    for (name, values, _) in refused() {
        cases.insert(name.to_owned(), case("blockd", values));
    }
    let mut files = serde_json::Map::new();
    for path in yaml_below(&root.join(BASE))?.into_iter().chain(yaml_below(&root.join(COMPONENTS))?)
    {
        files.insert(path.clone(), path.into());
    }
    for path in EXAMPLES {
        files.insert(path.to_owned(), root.join(path).to_string_lossy().into_owned().into());
    }
    let answer = tools::render(
        root,
        &json!({
            "chart": root.join(CHART), "cases": cases, "files": files,
            "plain": ALERTS.map(|file| (file, root.join(file))).into_iter().collect::<BTreeMap<_, _>>(),
        }),
    )?;
    let mut problems: Vec<String> = serde_json::from_value(answer["problems"].clone())?;
    let refusals: BTreeMap<String, String> = serde_json::from_value(answer["refused"].clone())?;
    for (name, _, said) in refused() {
        match refusals.get(name) {
            Some(text) if text.contains(said) => {}
            Some(text) => {
                problems.push(format!("{name}: refused, yet without a word of {said}: {text}"))
            }
            None => problems.push(format!("{name}: the chart takes it")),
        }
    }
    for (name, text) in &refusals {
        if !refused().iter().any(|(known, _, _)| known == name) {
            problems.push(format!("{name}: {text}"));
        }
    }
    let rendered: BTreeMap<String, Vec<Value>> = serde_json::from_value(answer["objects"].clone())?;
    let known = flags::Known::read(root)?;
    for (name, objects) in &rendered {
        let found = objects::problems(objects).into_iter().chain(known.problems(objects));
        let found = found.chain(monitoring::problems(objects)).chain(sidecars::problems(objects));
        let found = found.chain(privileges::problems(objects)).chain(kubevirt::problems(objects));
        problems.extend(found.map(|problem| format!("{name}: {problem}")));
    }
    problems.extend(other_alerts(&rendered, &answer["plain"])?);
    let of = |name: &str| rendered.get(name).map(Vec::as_slice).unwrap_or_default();
    let base: Vec<Value> = rendered
        .iter()
        .filter(|(name, _)| name.contains(BASE) && !name.contains("/example"))
        .flat_map(|(_, objects)| objects.iter().cloned())
        .collect();
    problems.extend(objects::differences(of("default"), &base));
    problems.extend(objects::shared(of("default"), of("beside")));
    if !problems.is_empty() {
        bail!("{}", problems.join("\n"));
    }
    let count: usize = rendered.values().map(Vec::len).sum();
    println!("manifests: {count} objects of {} renderings and files hold", rendered.len());
    Ok(Outcome::Passed)
}

/// Alerts of renderings that differ from those of the files.
fn other_alerts(rendered: &BTreeMap<String, Vec<Value>>, files: &Value) -> Result<Vec<String>> {
    let groups = ALERTS.iter().flat_map(|file| files[file]["groups"].as_array().cloned());
    let groups: Vec<Value> = groups.flatten().collect();
    let with_rules = rendered.iter().filter(|(_, objects)| monitoring::has_rules(objects));
    ensure!(with_rules.clone().count() > 1, "{CHART}/ci has lost its values with alerts");
    let differences = with_rules.flat_map(|(name, objects)| {
        let found = monitoring::differences(objects, &groups);
        found.map(move |problem| format!("{name}: {problem}"))
    });
    Ok(differences.collect())
}

/// Builds the base alone and with each component, and the overlay of the documentation, by
/// kustomize. With a component it has to be what the chart makes of the values that do the same.
///
/// # Errors
/// When one can't be built, or does not hold.
pub(crate) fn kustomize(root: &Path) -> Result<Outcome> {
    let Some(kubectl) = tools::kubectl()? else {
        return Ok(Outcome::NotRun("this kubectl is too old for components of kustomize"));
    };
    let mut names = vec![None];
    for entry in fs::read_dir(root.join(COMPONENTS)).context(COMPONENTS)? {
        names.push(Some(entry?.file_name().to_string_lossy().into_owned()));
    }
    let folder = tools::folder(root)?.join("kustomize");
    fs::create_dir_all(&folder)?;
    let mut files = serde_json::Map::new();
    for name in names {
        let built = tools::built(kubectl, root, &folder, name.as_deref())?;
        files.insert(name.unwrap_or_else(|| "base".to_owned()), json!(built));
    }
    let count = files.len();
    let mut cases = serde_json::Map::new();
    let mut problems = Vec::new();
    for name in files.keys() {
        let Some(values) = values_of(name) else {
            problems.push(format!("{name}: no values of the chart do the same"));
            continue;
        };
        let case = json!({"release": "blockd", "namespace": "blockd", "values": values});
        cases.insert(chart_of(name), case);
    }
    let overlay = tools::documented_overlay(kubectl, root, &folder)?;
    files.insert("the overlay of the documentation".to_owned(), json!(overlay));
    let asked = json!({"chart": root.join(CHART), "cases": cases, "files": files});
    let answer = tools::render(root, &asked)?;
    problems.extend(serde_json::from_value::<Vec<String>>(answer["problems"].clone())?);
    let built: BTreeMap<String, Vec<Value>> = serde_json::from_value(answer["objects"].clone())?;
    let known = flags::Known::read(root)?;
    for (name, objects) in built.iter().filter(|(name, _)| files.contains_key(*name)) {
        if cases.contains_key(&chart_of(name)) {
            let chart = built.get(&chart_of(name)).map(Vec::as_slice).unwrap_or_default();
            let found = objects::differences(chart, objects);
            problems.extend(found.into_iter().map(|problem| format!("{name}: {problem}")));
        }
        let found = objects::problems(objects).into_iter().chain(known.problems(objects));
        let found = found.chain(sidecars::problems(objects)).chain(privileges::problems(objects));
        problems.extend(found.map(|problem| format!("{name}: {problem}")));
        if name != "base" && built.get("base") == Some(objects) {
            problems.push(format!("{name}: changes nothing"));
        }
    }
    if !problems.is_empty() {
        bail!("{}", problems.join("\n"));
    }
    println!("manifests: the base, {} components and the documented overlay hold", count - 1);
    Ok(Outcome::Passed)
}

/// The name of the chart's rendering that is to equal that of a component.
fn chart_of(component: &str) -> String {
    format!("chart as {component}")
}

/// All files of YAML, as paths.
fn yaml_below(folder: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(yaml_below(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "yaml") {
            found.push(path.to_string_lossy().into_owned());
        }
    }
    Ok(found)
}
