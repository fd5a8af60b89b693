//! Ids and paths of a sequence, and those that they are in a replay.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Fields whose values are other ones in each run.
const VOLATILE: [&str; 8] = [
    "available_capacity",
    "creation_time",
    "manifest",
    "max_volumes_per_node",
    "maximum_volume_size",
    "next_token",
    "usage",
    "vendor_version",
];

/// Fields with ids that the plugin chooses, of which a recording has those of its own cluster.
const IDS: [&str; 7] = [
    "charged-bytes",
    "group_snapshot_id",
    "node_id",
    "snapshot_id",
    "source_snapshot_id",
    "source_volume_id",
    "volume_id",
];

/// The folder of a recording's kubelet.
const KUBELET: &str = "/var/lib/kubelet";

/// Names of placeholders, and ids of a recording, with their values here.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Bindings {
    names: BTreeMap<String, String>,
    ids: BTreeMap<String, String>,
    kubelet_dir: String,
}

impl Bindings {
    /// Nothing but the kubelet's folder.
    #[must_use]
    pub fn new(kubelet_dir: &str) -> Self {
        Self { kubelet_dir: kubelet_dir.to_owned(), ..Self::default() }
    }

    /// A text of a request or step as it is here.
    ///
    /// # Errors
    /// A placeholder in the text has no value.
    pub fn text(&self, text: &str) -> Result<String> {
        if let Some(id) = self.ids.get(text) {
            return Ok(id.clone());
        }
        let mut made = String::new();
        let mut rest = text;
        while let Some((before, behind)) = rest.split_once("${") {
            let (name, after) = behind.split_once('}').context("a placeholder without end")?;
            let value = self.names.get(name);
            made.push_str(before);
            made.push_str(value.with_context(|| format!("${{{name}}} has no value yet"))?);
            rest = after;
        }
        made.push_str(rest);
        match made.strip_prefix(KUBELET) {
            Some(below) => Ok(format!("{}{below}", self.kubelet_dir)),
            None => Ok(made),
        }
    }

    /// A message of a request as it is here.
    ///
    /// # Errors
    /// As [`Self::text`].
    pub fn json(&self, value: &Value) -> Result<Value> {
        Ok(match value {
            Value::String(text) => self.text(text)?.into(),
            Value::Array(all) => all.iter().map(|one| self.json(one)).collect::<Result<_>>()?,
            Value::Object(all) => {
                let pairs = all.iter().map(|(key, one)| Ok((key.clone(), self.json(one)?)));
                Value::Object(pairs.collect::<Result<_>>()?)
            }
            other => other.clone(),
        })
    }

    /// Compares an answer with that of the sequence: each field that this has is in the answer,
    /// and equal. Placeholders without a value get theirs, and so do ids.
    ///
    /// # Errors
    /// When they differ, with the field.
    pub fn compare(&mut self, field: &str, expected: &Value, actual: &Value) -> Result<()> {
        let key = field.rsplit('.').next().unwrap_or_default();
        if VOLATILE.contains(&key) {
            return Ok(());
        }
        match (expected, actual) {
            (Value::Object(all), Value::Object(answer)) => {
                for (key, one) in all {
                    let field = format!("{field}.{key}");
                    let actual = answer.get(key).unwrap_or(&Value::Null);
                    self.compare(&field, one, actual)?;
                }
                Ok(())
            }
            (Value::Array(all), Value::Array(answer)) => {
                let (wanted, got) = (all.len(), answer.len());
                ensure!(wanted == got, "{field} has {got} elements, not {wanted}: {actual}");
                for (one, actual) in all.iter().zip(answer) {
                    self.compare(field, one, actual)?;
                }
                Ok(())
            }
            (Value::String(text), Value::String(answer)) => {
                self.compare_text(field, key, text, answer)
            }
            (Value::Null, _) if VOLATILE.contains(&key) => Ok(()),
            _ if expected == actual => Ok(()),
            _ => bail!("{field} is {actual}, not {expected}"),
        }
    }

    fn compare_text(&mut self, field: &str, key: &str, text: &str, answer: &str) -> Result<()> {
        let name = text.strip_prefix("${").and_then(|rest| rest.strip_suffix('}'));
        if let Some(name) = name.filter(|name| !name.contains("${")) {
            let value = self.names.entry(name.to_owned()).or_insert_with(|| answer.to_owned());
            ensure!(value == answer, "{field} is {answer}, not ${{{name}}}, which is {value}");
            return Ok(());
        }
        if IDS.contains(&key) && text != answer && !text.contains("${") {
            self.ids.entry(text.to_owned()).or_insert_with(|| answer.to_owned());
        }
        let wanted = self.text(text)?;
        ensure!(wanted == answer, "{field} is {answer}, not {wanted}");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn placeholders_are_bound_once_and_compared_later() {
        let mut bindings = Bindings::new("/k");
        let expected = json!({ "volume": { "volume_id": "${v}" } });
        let actual = json!({ "volume": { "volume_id": "default/a", "capacity_bytes": 1 } });
        bindings.compare("answer", &expected, &actual).unwrap();
        assert_eq!(bindings.text("${v}").unwrap(), "default/a");
        let other = json!({ "volume": { "volume_id": "default/b" } });
        let error = bindings.compare("answer", &expected, &other).unwrap_err().to_string();
        assert!(error.contains("answer.volume.volume_id"), "{error}");
        assert!(bindings.text("${w}").is_err());
        let request = json!({ "path": "/var/lib/kubelet/pods/p/${v}" });
        assert_eq!(bindings.json(&request).unwrap(), json!({ "path": "/k/pods/p/default/a" }));
    }

    #[test]
    fn ids_of_a_recorded_cluster_become_those_of_the_replay() {
        let mut bindings = Bindings::new("/k");
        let expected = json!({ "volume_id": "fast/a", "usage": [{ "used": 1 }] });
        bindings.compare("answer", &expected, &json!({ "volume_id": "default/a" })).unwrap();
        assert_eq!(bindings.json(&json!(["fast/a"])).unwrap(), json!(["default/a"]));
        let differs = json!({ "ready": true });
        assert!(bindings.compare("answer", &differs, &json!({ "ready": false })).is_err());
        assert!(bindings.compare("answer", &differs, &json!({})).is_err());
        assert!(bindings.compare("answer", &json!([1]), &json!([1, 2])).is_err());
    }
}
