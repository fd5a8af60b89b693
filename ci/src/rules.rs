//! `cargo ci rules`: what `deploy/` has for Prometheus and Grafana, judged by Prometheus' own tool.
//!
//! promtool comes from Debian's package of the server, which is unpacked below the build folder and
//! never installed: nothing is to be served here.

mod labels;
pub(crate) mod metrics;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::command;

const PROGRAM: &str = "promtool";
/// The Debian package that has it.
const PACKAGE: &str = "prometheus";
/// The longest that a call of it may take: it needs a few seconds.
const LIMIT: Duration = Duration::from_secs(120);

/// Rules, their tests, and the dashboard beside them with its variables: for the daemon, and for
/// Kubernetes.
const SETS: [([&str; 3], [&str; 2]); 2] = [
    (["alerts.yml", "alerts_test.yml", "grafana.json"], ["instance", "pool"]),
    (
        ["alerts-kubernetes.yml", "alerts-kubernetes_test.yml", "grafana-kubernetes.json"],
        ["instance", "driver"],
    ),
];

/// The page that alerts lead to.
const RUNBOOKS: &str = "docs/TROUBLESHOOTING.md";

/// Checks rules, runs their tests, and reads every expression of the dashboards.
///
/// # Errors
/// When promtool can't be had, or finds something wrong; when an alert has no test, no instance or
/// no runbook.
pub(crate) fn run(root: &Path) -> Result<()> {
    let deploy = root.join("deploy");
    let read = |name: &str| {
        let path = deploy.join(name);
        fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
    };
    let folder = folder(root)?;
    let program = promtool(&folder)?;
    let promtool = |words: &[&str]| {
        let mut command = Command::new(&program);
        command::answer(command.current_dir(&deploy).args(words), b"", LIMIT)
    };
    let known = known_metrics(root)?;
    let page = fs::read_to_string(root.join(RUNBOOKS)).context(RUNBOOKS)?;
    for ([alerts, tests, dashboard], variables) in SETS {
        let missing = untested(&read(alerts)?, &read(tests)?);
        ensure!(missing.is_empty(), "{tests} does not raise, and not raise: {missing:?}");
        let text = read(tests)?;
        let single = labels::of_one_instance(&text);
        ensure!(single.is_empty(), "{tests} has series of one instance only for {single:?}");
        let text = read(alerts)?;
        let all = labels::Alert::all(&text);
        let dropped = labels::without_instance(&all);
        ensure!(dropped.is_empty(), "{alerts}: the label instance is dropped by {dropped:?}");
        let astray = labels::without_runbook(&all, &page);
        ensure!(astray.is_empty(), "{alerts}: runbook_url leads to no heading: {astray:?}");
        let shown = serde_json::from_str(&read(dashboard)?).context(dashboard)?;
        let problems = labels::problems(&shown, &variables)?;
        ensure!(problems.is_empty(), "{dashboard}: {}", problems.join("\n"));
        let unknown = unknown_metrics(&[read(alerts)?, read(dashboard)?].concat(), &known);
        ensure!(unknown.is_empty(), "{alerts}, {dashboard}: no program exports {unknown:?}");
        promtool(&["check", "rules", alerts])?;
        promtool(&["test", "rules", tests])?;
        let shown = rules_of(&shown).context(dashboard)?;
        let file = folder.join("dashboard.yml");
        fs::write(&file, shown)?;
        promtool(&["check", "rules", &file.to_string_lossy()])?;
        println!("rules: {alerts}, {tests} and {dashboard} hold");
    }
    Ok(())
}

/// Alerts whose tests do not have both: a time at which it is raised, and one at which it isn't.
fn untested(alerts: &str, tests: &str) -> Vec<String> {
    let names = alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    let lines: Vec<&str> = tests.lines().map(str::trim).collect();
    let is_tested = |name: &str| {
        let about = |pair: &&[&str]| pair[0].strip_prefix("alertname: ") == Some(name);
        let next: Vec<&str> = lines.windows(2).filter(about).map(|pair| pair[1]).collect();
        next.contains(&"exp_alerts:") && next.contains(&"exp_alerts: []")
    };
    names.filter(|name| !is_tested(name)).map(ToOwned::to_owned).collect()
}

/// Metrics of Kubernetes' own programs that are used: the kubelet's, and the sidecars'.
const FOREIGN: [&str; 2] =
    ["kubelet_volume_stats_health_status_abnormal", "csi_sidecar_operations_seconds"];

/// The documents in which tests hold every metric of our programs.
const DOCUMENTS: [&str; 2] = ["docs/METRICS.md", "docs/KUBERNETES.md"];

/// Names of metrics that exist.
fn known_metrics(root: &Path) -> Result<BTreeSet<String>> {
    let mut known: BTreeSet<String> = FOREIGN.iter().map(|&name| name.to_owned()).collect();
    for document in DOCUMENTS {
        let text = fs::read_to_string(root.join(document)).context(document)?;
        let quoted = text.split('`').skip(1).step_by(2);
        known.extend(quoted.filter(|name| name.starts_with("blockd_")).map(ToOwned::to_owned));
    }
    Ok(known)
}

/// Names that look like metrics, of ours or of Kubernetes', and are none.
fn unknown_metrics(text: &str, known: &BTreeSet<String>) -> BTreeSet<String> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let names = text.split(|c: char| !is_name(c)).filter(|name| {
        ["blockd_", "kubelet_", "csi_"].iter().any(|prefix| name.starts_with(prefix))
    });
    let is_known = |name: &&str| {
        let series = ["_bucket", "_count", "_sum"];
        let base = series.iter().find_map(|suffix| name.strip_suffix(suffix));
        known.contains(*name) || base.is_some_and(|base| known.contains(base))
    };
    names.filter(|name| !is_known(name)).map(ToOwned::to_owned).collect()
}

/// The expressions of a dashboard as rules, which promtool can read.
fn rules_of(dashboard: &Value) -> Result<String> {
    let expressions = labels::expressions(dashboard)?;
    ensure!(!expressions.is_empty(), "it shows nothing");
    // Grafana's own variable.
    let rule = |text: &str| {
        let text = text.replace("$__rate_interval", "5m");
        serde_json::json!({ "record": "shown", "expr": text })
    };
    let rules: Vec<Value> = expressions.into_iter().map(rule).collect();
    // JSON is YAML.
    let number = |(at, rule): (usize, Value)| serde_json::json!({ "name": format!("panel {at}"), "rules": [rule] });
    let groups: Vec<Value> = rules.into_iter().enumerate().map(number).collect();
    Ok(serde_json::json!({ "groups": groups }).to_string())
}

/// Where tools are kept.
fn folder(root: &Path) -> Result<PathBuf> {
    let folder = command::target_dir(root).join("tools");
    fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// promtool's path.
fn tool(root: &Path) -> Result<PathBuf> {
    promtool(&folder(root)?)
}

/// The program, fetched where this machine has none.
fn promtool(folder: &Path) -> Result<PathBuf> {
    if command::installed(PROGRAM) {
        return Ok(PathBuf::from(PROGRAM));
    }
    let root = folder.join(PACKAGE);
    let program = root.join("usr/bin").join(PROGRAM);
    if program.is_file() {
        return Ok(program);
    }
    for tool in ["apt-get", "dpkg-deb"] {
        if !command::installed(tool) {
            bail!("missing: {PROGRAM}, of the package {PACKAGE}, and {tool} to fetch it with");
        }
    }
    let part = folder.join("part");
    let _ = fs::remove_dir_all(&part);
    fs::create_dir_all(&part)?;
    let apt_get = |word: &str| {
        let mut command = Command::new("apt-get");
        command.current_dir(&part).stdin(Stdio::null()).args(["-q", word]);
        command
    };
    if command::output(apt_get("download").arg(PACKAGE)).is_err() {
        // A fresh machine has no list of packages yet.
        command::output(&mut apt_get("update"))?;
        command::output(apt_get("download").arg(PACKAGE))?;
    }
    for entry in fs::read_dir(&part)? {
        let file = entry?.path();
        if file.extension().is_some_and(|extension| extension == "deb") {
            command::output(Command::new("dpkg-deb").arg("--extract").arg(&file).arg(&part))?;
            fs::remove_file(&file)?;
        }
    }
    // Renamed last: an incomplete file is not taken for whole.
    let _ = fs::remove_dir_all(&root);
    fs::rename(&part, &root)?;
    ensure!(program.is_file(), "{PACKAGE} was unpacked, yet there is no {PROGRAM}");
    println!("rules: unpacked {PACKAGE}");
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alert_has_to_be_raised_and_not_raised() {
        let alerts = "- alert: One\n  expr: x\n- alert: Two\n- alert: Three\n";
        let tests = "- alertname: One\nalertname: One\n exp_alerts: []\nalertname: \
                     One\nexp_alerts:\n\
                     alertname: Two\nexp_alerts: []\nalertname: Twofold\nexp_alerts:\n";
        assert_eq!(untested(alerts, tests), ["Two", "Three"]);
    }

    #[test]
    fn a_metric_without_an_exporter_is_named() {
        let known = ["blockd_a_bytes", "blockd_b_seconds"].map(ToOwned::to_owned).into();
        let text = r#"rate(blockd_b_seconds_bucket{x="y"}[5m]) / blockd_a_bytes + kubelet_c > x"#;
        assert_eq!(unknown_metrics(text, &known), ["kubelet_c".to_owned()].into());
        assert_eq!(unknown_metrics("blockd_a_bytes_total", &known).len(), 1);
    }

    #[test]
    fn expressions_of_panels_become_rules() {
        let target = serde_json::json!({"targets": [{"expr": "rate(a[$__rate_interval])"}]});
        let rules = rules_of(&serde_json::json!({"panels": [{"type": "row"}, target]})).unwrap();
        assert!(rules.contains(r#""expr":"rate(a[5m])""#), "{rules}");
        assert!(rules_of(&serde_json::json!({})).is_err());
        assert!(rules_of(&serde_json::json!({"panels": []})).is_err());
    }
}
