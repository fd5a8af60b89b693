//! Which program has which flags: blockd's by the documents generated from their help, those of
//! others by a table of their used flags.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Result, ensure};
use serde_json::Value;

use super::objects;
use crate::flags;

/// The used flags of the sidecars, as their own documents name them.
const SIDECARS: [(&str, &[&str]); 8] = [
    ("csi-node-driver-registrar", &["csi-address", "kubelet-registration-path"]),
    ("livenessprobe", &["csi-address", "health-port", "probe-timeout"]),
    (
        "csi-provisioner",
        &[
            "csi-address",
            "node-deployment",
            "strict-topology",
            "immediate-topology",
            "extra-create-metadata",
            "enable-capacity",
            "capacity-ownerref-level",
            "default-fstype",
            "node-deployment-base-delay",
            "node-deployment-max-delay",
            "timeout",
        ],
    ),
    ("csi-resizer", &["csi-address", "leader-election", "handle-volume-inuse-error", "timeout"]),
    (
        "csi-snapshotter",
        &["csi-address", "node-deployment", "extra-create-metadata", "timeout", "feature-gates"],
    ),
    (
        "csi-external-health-monitor-controller",
        &[
            "csi-address",
            "monitor-interval",
            "list-volumes-interval",
            "timeout",
            "enable-node-watcher",
        ],
    ),
    ("csi-snapshot-metadata", &["csi-address", "port", "tls-cert", "tls-key"]),
    ("kube-rbac-proxy", &["secure-listen-address", "upstream", "allow-paths"]),
];

/// Flags by program, a verb of it included: `blockd serve`.
#[derive(Debug)]
pub(super) struct Known(BTreeMap<String, BTreeSet<String>>);

impl Known {
    /// Reads the documents.
    ///
    /// # Errors
    /// When one is missing, or has no flags.
    pub(super) fn read(root: &Path) -> Result<Self> {
        let mut known = flags::ours(root)?;
        // Every verb of blockd takes its global options.
        let global = known.get("blockd").cloned().unwrap_or_default();
        known.entry("blockd serve".to_owned()).or_default().extend(global);
        for program in ["blockd serve", "blockd-csi", "blockd-csi extender"] {
            let has = known.get(program).is_some_and(|flags| !flags.is_empty());
            ensure!(has, "no document has flags of {program}");
        }
        for (image, flags) in SIDECARS {
            let flags = flags.iter().map(|&flag| flag.to_owned()).collect();
            known.insert(image.to_owned(), flags);
        }
        Ok(Self(known))
    }

    /// Flags that the program of a container does not have.
    pub(super) fn problems(&self, objects: &[Value]) -> Vec<String> {
        let mut problems = Vec::new();
        for container in objects.iter().flat_map(objects::containers) {
            let words = container["args"].as_array().map(Vec::as_slice).unwrap_or_default();
            let words: Vec<&str> = words.iter().filter_map(Value::as_str).collect();
            let image = container["image"].as_str().unwrap_or_default();
            let image = image.rsplit('/').next().unwrap_or_default();
            let mut program = image.split(':').next().unwrap_or_default().to_owned();
            let verb = words.first().filter(|word| !word.starts_with('-'));
            if let Some(verb) = verb {
                program = format!("{program} {verb}");
            }
            let Some(flags) = self.0.get(&program) else {
                // The commands of an example are not checked.
                if program.starts_with("blockd") || image.starts_with("csi-") {
                    problems.push(format!("{program} is no program that is known"));
                }
                continue;
            };
            for word in words.iter().skip(usize::from(verb.is_some())) {
                let name = word.strip_prefix("--").and_then(|rest| rest.split('=').next());
                if !name.is_some_and(|name| flags.contains(name)) {
                    problems.push(format!("{program} has no flag {word}"));
                }
            }
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn known() -> Known {
        let text = "## blockd serve\n\n      --config <FILE>\n";
        let mut known = flags::by_heading(text);
        known.insert("csi-resizer".to_owned(), BTreeSet::from(["timeout".to_owned()]));
        Known(known)
    }

    fn of(image: &str, words: &[&str]) -> Vec<String> {
        let containers = json!([{"image": image, "args": words}]);
        known().problems(&[json!({"spec": {"template": {"spec": {"containers": containers}}}})])
    }

    #[test]
    fn a_flag_that_a_program_does_not_have_is_named() {
        assert!(of("r.example.com/blockd:1", &["serve", "--config=/a"]).is_empty());
        assert_eq!(
            of("blockd:1", &["serve", "--konfig=/a"]),
            ["blockd serve has no flag --konfig=/a"]
        );
        assert_eq!(of("blockd:1", &["serve", "config"]), ["blockd serve has no flag config"]);
        assert_eq!(of("blockd:1", &["sevre"]), ["blockd sevre is no program that is known"]);
        assert!(of("x/csi-resizer:v1", &["--timeout=1s"]).is_empty());
        assert_eq!(of("x/csi-attacher:v1", &[]), ["csi-attacher is no program that is known"]);
        assert!(of("busybox:1", &["-c", "x"]).is_empty());
    }
}
