//! The commands of the plugin's program for people, run as they run them.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use blockd_testkit::tools;
use serde_json::{Value, json};

/// A PersistentVolume of the default driver as the API server has it, for a volume of this node.
#[must_use]
pub fn persistent_volume(name: &str, handle: &str, node: &str) -> Value {
    let expression = json!({ "key": "csi.blockd.io/node", "operator": "In", "values": [node] });
    json!({
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {
            "name": name,
            "uid": "3c2f0c56-9a55-4b8d-a0d4-0d2f8a2b7f10",
            "resourceVersion": "4711",
            "creationTimestamp": "2026-01-02T03:04:05Z",
            "annotations": { "pv.kubernetes.io/provisioned-by": "csi.blockd.io" },
            "finalizers": ["kubernetes.io/pv-protection"],
        },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "capacity": { "storage": "64Mi" },
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": "web",
                "name": "data",
                "uid": "7f6b8e9e-2f3d-4f43-8a76-6f0a8e6c1b11",
                "resourceVersion": "4700",
            },
            "csi": { "driver": "csi.blockd.io", "volumeHandle": handle },
            "nodeAffinity": { "required": { "nodeSelectorTerms": [
                { "matchExpressions": [expression] },
            ] } },
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": "blockd-thin",
            "volumeMode": "Filesystem",
        },
        "status": { "phase": "Bound" },
    })
}

/// Writes a list as `kubectl get pv -o json` prints it.
///
/// # Errors
/// When the file can't be written.
pub fn write_list(path: &Path, volumes: &[Value]) -> Result<()> {
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": volumes });
    fs::write(path, list.to_string()).with_context(|| path.display().to_string())
}

/// Runs a command of `blockd-csi`.
///
/// # Errors
/// When it can't be started.
pub fn output(words: &[&str]) -> Result<Output> {
    let mut command = Command::new(tools::blockd_csi()?);
    command.args(words).output().with_context(|| words.join(" "))
}

/// The JSON that a command of `blockd-csi` prints.
///
/// # Errors
/// When the command fails, or prints no JSON.
pub fn json_of(words: &[&str]) -> Result<Value> {
    let output = output(&[words, &["--json"]].concat())?;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{}: {error}", words.join(" "));
    Ok(serde_json::from_slice(&output.stdout)?)
}
