//! Labels of alerts and dashboards: each result names the daemon that it is about, and each alert
//! leads to a paragraph on what to do.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::tidy;

/// Aggregations of PromQL. They drop all labels but those that they name.
const AGGREGATIONS: [&str; 12] = [
    "sum",
    "min",
    "max",
    "avg",
    "group",
    "stddev",
    "stdvar",
    "count",
    "count_values",
    "bottomk",
    "topk",
    "quantile",
];

/// The page of the book that alerts lead to, as it is published.
const RUNBOOKS: &str = "https://blockd.io/docs/TROUBLESHOOTING.html#";

/// An alert as its file has it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Alert<'a> {
    pub(super) name: &'a str,
    lines: Vec<&'a str>,
}

impl<'a> Alert<'a> {
    /// The alerts of a file.
    pub(super) fn all(text: &'a str) -> Vec<Self> {
        let mut alerts: Vec<Self> = Vec::new();
        for line in text.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
            if let Some(name) = line.strip_prefix("- alert: ") {
                alerts.push(Self { name, lines: Vec::new() });
            } else if let Some(alert) = alerts.last_mut() {
                alert.lines.push(line);
            }
        }
        alerts
    }

    fn value(&self, key: &str) -> Option<&'a str> {
        self.lines.iter().find_map(|line| line.strip_prefix(key)?.strip_prefix(": "))
    }

    /// The expression, in one line.
    fn expression(&self) -> String {
        let is_next = |line: &&&str| !["for:", "labels:"].iter().any(|key| line.starts_with(key));
        let lines = self.lines.iter().skip_while(|line| !line.starts_with("expr:"));
        lines.take_while(is_next).copied().collect::<Vec<_>>().join(" ")
    }
}

/// Alerts whose expression drops the label of the daemon.
pub(super) fn without_instance<'a>(alerts: &[Alert<'a>]) -> Vec<&'a str> {
    let dropping = alerts.iter().filter(|alert| drops_instance(&alert.expression()));
    dropping.map(|alert| alert.name).collect()
}

/// Alerts that lead to no heading of the page.
pub(super) fn without_runbook<'a>(alerts: &[Alert<'a>], page: &str) -> Vec<&'a str> {
    let leads = |alert: &&Alert<'_>| {
        let url = alert.value("runbook_url").unwrap_or_default().trim_matches('"');
        url.strip_prefix(RUNBOOKS).is_some_and(|anchor| tidy::has_heading(page, anchor))
    };
    alerts.iter().filter(|alert| !leads(alert)).map(|alert| alert.name).collect()
}

/// Tests of alerts with series of fewer than two daemons, by their first alert.
pub(super) fn of_one_instance(tests: &str) -> Vec<&str> {
    let blocks = tests.split("  - interval: ").skip(1);
    let instances = |block: &str| {
        let values = block.split("instance=\"").skip(1);
        values.filter_map(|rest| rest.split('"').next()).collect::<BTreeSet<_>>().len()
    };
    let first = |block: &'_ str| -> Option<usize> { block.find("alertname: ") };
    let name = |block| {
        let at = first(block)? + "alertname: ".len();
        block.get(at..)?.lines().next()
    };
    blocks.filter(|block| instances(block) < 2).map(|block| name(block).unwrap_or("?")).collect()
}

/// The expressions of a dashboard.
pub(super) fn expressions(dashboard: &Value) -> Result<Vec<&str>> {
    let panels = dashboard["panels"].as_array().context("a dashboard has panels")?;
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array()).flatten();
    targets.map(|one| one["expr"].as_str().context("a target has an expression")).collect()
}

/// Problems of a dashboard: it lacks a variable, an expression drops the label of the daemon, or a
/// metric of ours is not selected by that label.
pub(super) fn problems(dashboard: &Value, variables: &[&str]) -> Result<Vec<String>> {
    const SELECTED: &str = "{instance=~\"$instance\"";
    let named = dashboard["templating"]["list"].as_array().map_or(&[][..], Vec::as_slice);
    let has = |name: &&&str| named.iter().any(|one| one["name"] == **name);
    let mut problems: Vec<String> = variables
        .iter()
        .filter(|name| !has(name))
        .map(|name| format!("no variable {name}"))
        .collect();
    for expression in expressions(dashboard)? {
        if drops_instance(expression) {
            problems.push(format!("drops the label instance: {expression}"));
        }
        for (at, _) in expression.match_indices("blockd_") {
            let rest = &expression[at..];
            let end = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
            if !rest[end..].starts_with(SELECTED) {
                problems.push(format!("{} has no {SELECTED}}}: {expression}", &rest[..end]));
            }
        }
    }
    Ok(problems)
}

/// Whether an aggregation drops the label. Its labels have to stand before its operand.
fn drops_instance(expression: &str) -> bool {
    let labels = |after: &str, word: &str| -> Option<bool> {
        let list = after.strip_prefix(word)?.trim_start().strip_prefix('(')?;
        Some(list.split(')').next()?.split(',').any(|label| label.trim() == "instance"))
    };
    let drops = |at: usize, name: &str| {
        let after = &expression[at + name.len()..];
        if expression[..at].ends_with(is_name) || after.starts_with(is_name) {
            return false;
        }
        let after = after.trim_start();
        let keeps = labels(after, "by").or_else(|| labels(after, "without").map(|has| !has));
        !keeps.unwrap_or(false)
    };
    AGGREGATIONS.iter().any(|name| expression.match_indices(name).any(|(at, _)| drops(at, name)))
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_aggregation_keeps_the_instance_or_is_found() {
        for kept in [
            "a_sum / b_count > 0",
            "sum by (pool, instance) (a)",
            "max without (volume) (rate(a[5m]))",
            "histogram_quantile(0.9, sum by (instance, le) (a))",
        ] {
            assert!(!drops_instance(kept), "{kept}");
        }
        for dropped in [
            "sum(a)",
            "sum by (pool) (a)",
            "max without (instance) (a)",
            "a > 0 and count by(x)(a)",
            "sum(a) by (instance)",
        ] {
            assert!(drops_instance(dropped), "{dropped}");
        }
    }

    #[test]
    fn alerts_that_drop_the_instance_or_lead_nowhere_are_named() {
        let text = "- alert: One\n  expr: |\n    sum by (pool) (a)\n    > 1\n  for: 1m\n  \
                    annotations:\n    runbook_url: \"https://blockd.io/docs/TROUBLESHOOTING.html#\
                    one\"\n- alert: Two\n  # sum(x)\n  expr: a > 1\n  labels: {sum: x}\n  \
                    runbook_url: \"https://blockd.io/docs/TROUBLESHOOTING.html#gone\"\n- alert: \
                    Three\n  expr: a\n";
        let alerts = Alert::all(text);
        assert_eq!(without_instance(&alerts), ["One"]);
        assert_eq!(without_runbook(&alerts, "# Page\n\n## One\n\n## Three\n"), ["Two", "Three"]);
    }

    #[test]
    fn shipped_alerts_keep_the_instance_and_lead_to_a_runbook() {
        let page = include_str!("../../../docs/TROUBLESHOOTING.md");
        for text in [
            include_str!("../../../deploy/alerts.yml"),
            include_str!("../../../deploy/alerts-kubernetes.yml"),
        ] {
            let alerts = Alert::all(text);
            assert!(alerts.len() >= 4, "{alerts:?}");
            assert_eq!(without_instance(&alerts), [""; 0]);
            assert_eq!(without_runbook(&alerts, page), [""; 0]);
        }
    }

    #[test]
    fn a_test_of_alerts_has_two_instances() {
        let block = |series: &str, name: &str| {
            format!("  - interval: 10s\n{series}      - eval_time: 1m\n        alertname: {name}\n")
        };
        let (one, two) = ("a{instance=\"x\"} b{instance=\"x\"}\n", "a{instance=\"y\"}\n");
        let text = [block(one, "One"), block(&[one, two].concat(), "Two")].concat();
        assert_eq!(of_one_instance(&text), ["One"]);
    }

    #[test]
    fn a_dashboard_selects_by_instance() {
        let of = |expression: &str| {
            let list = json!([{"name": "instance"}]);
            let panels = json!([{"type": "row"}, {"targets": [{"expr": expression}]}]);
            problems(&json!({"templating": {"list": list}, "panels": panels}), &["instance"])
        };
        let good = "blockd_a{instance=~\"$instance\",x=\"y\"} / up";
        assert!(of(good).unwrap().is_empty());
        assert_eq!(of("blockd_a").unwrap().len(), 1);
        assert_eq!(of(&format!("sum ({good})")).unwrap().len(), 1);
        let without = problems(&json!({"panels": []}), &["instance", "pool"]).unwrap();
        assert_eq!(without, ["no variable instance", "no variable pool"]);
        assert!(problems(&json!({}), &[]).is_err());
    }
}
