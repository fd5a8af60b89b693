//! The PersistentVolume for the other node, and the commands that put it in the place of the old.

use std::fmt::Write as _;

use blockd_api::v1;
use serde_json::{Map, Value, json};

use super::Answer;
use crate::ids::VolumeId;
use crate::operator::{delete_pv, quoted};
use crate::topology::Place;

/// Annotations that describe an object as it was applied, which it is no longer.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// Begins labels that blockd gives itself, as for what was sent where: they are of this copy.
const OF_BLOCKD: &str = "blockd.io/";

/// A PersistentVolume as it is made anew for another node, with this id there. Its claim stays the
/// one that it was bound to, by the claim's UID, so that the claim is bound to it again. It is
/// retained until it is bound: without a claim the policy `Delete` would delete the volume.
pub(super) fn for_node(old: &Value, handle: &str, place: &Place) -> Value {
    let mut metadata = Map::new();
    for key in ["name", "labels", "annotations"] {
        if let Some(value) = old["metadata"].get(key) {
            metadata.insert(key.to_owned(), value.clone());
        }
    }
    if let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
        annotations.remove(LAST_APPLIED);
    }
    let mut spec = old["spec"].clone();
    spec["csi"]["volumeHandle"] = handle.into();
    spec["persistentVolumeReclaimPolicy"] = "Retain".into();
    if let Some(claim) = spec["claimRef"].as_object_mut() {
        claim.remove("resourceVersion");
    }
    let expression = json!({ "key": place.key, "operator": "In", "values": [place.node] });
    let terms = json!([{ "matchExpressions": [expression] }]);
    spec["nodeAffinity"] = json!({ "required": { "nodeSelectorTerms": terms } });
    json!({ "apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata, "spec": spec })
}

/// The command that gives a volume on the other node the labels and settings that it has here,
/// which are not sent with its content.
pub(super) fn configure(volume: &v1::Volume, to: &VolumeId) -> String {
    let mut words = vec!["blockd".to_owned(), "set".to_owned(), quoted(&to.to_string())];
    let labels = volume.labels.iter().filter(|(key, _)| !key.starts_with(OF_BLOCKD));
    for (key, value) in labels {
        words.push(format!("--label {}", quoted(&format!("{key}={value}"))));
    }
    let settings = volume.settings.unwrap_or_default();
    if settings.thick {
        words.push("--thick".to_owned());
    }
    let numbers = [
        ("--reserve", settings.reservation_bytes),
        ("--quota", settings.quota_bytes),
        ("--iops", i64::try_from(settings.iops).unwrap_or(i64::MAX)),
        ("--bandwidth", settings.bandwidth_bytes),
    ];
    let given = numbers.iter().filter(|(_, number)| *number > 0);
    words.extend(given.map(|(option, number)| format!("{option} {number}")));
    match settings.on_full() {
        v1::OnFull::Timeout => {
            words.push(format!("--on-full timeout={}ms", settings.on_full_timeout_ms));
        }
        v1::OnFull::Error => words.push("--on-full error".to_owned()),
        v1::OnFull::Unspecified | v1::OnFull::Block => {}
    }
    words.join(" ")
}

/// The answer as a script for a machine with kubectl. It can be repeated, also after it was cut off
/// between the deletion of one object and the creation of the other.
pub(super) fn script(answer: &Answer) -> String {
    let mut text = String::new();
    let Answer { volume_id, new_volume_id, node, .. } = answer;
    let state = match (&answer.snapshot, answer.source_deleted) {
        (None, _) => "was deleted here before".to_owned(),
        (Some(snapshot), true) => format!("is deleted here; node {node} has {snapshot}"),
        (Some(snapshot), false) => format!("stays here, unused; node {node} has {snapshot}"),
    };
    let line = |text: &str| text.chars().filter(|c| !c.is_control()).collect::<String>();
    let _ = writeln!(text, "# {}", line(&format!("{volume_id}: {state}, as {new_volume_id}.")));
    if let Some(configure) = &answer.configure {
        let _ = writeln!(text, "# First, on node {node}:\n#   {}", line(configure));
    }
    let name = quoted(answer.persistent_volume["metadata"]["name"].as_str().unwrap_or_default());
    let policy = |policy: &str| {
        format!(
            "kubectl patch pv {name} --type=merge --patch \
             '{{\"spec\":{{\"persistentVolumeReclaimPolicy\":\"{policy}\"}}}}'"
        )
    };
    let [delete, release] = delete_pv(&name);
    let manifest = serde_json::to_string_pretty(&answer.persistent_volume).unwrap_or_default();
    let _ = write!(
        text,
        "# Then, while no pod uses the claim, put the new PersistentVolume in the place of the \
         old:\n\
         ! kubectl get pv {name} >/dev/null 2>&1 || {}\n{delete}\n{release}\n\
         kubectl create --filename - <<'END_OF_VOLUME'\n{manifest}\nEND_OF_VOLUME\n\
         kubectl wait pv {name} --for=jsonpath='{{.status.phase}}'=Bound --timeout=120s\n",
        policy("Retain")
    );
    if let Some(former) = &answer.reclaim_policy {
        let _ = writeln!(text, "{}", policy(former));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn old() -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {
                "name": "pvc-1",
                "uid": "u1",
                "resourceVersion": "7",
                "creationTimestamp": "2026-01-02T03:04:05Z",
                "labels": { "team": "db" },
                "annotations": {
                    "pv.kubernetes.io/provisioned-by": "csi.blockd.io",
                    "kubectl.kubernetes.io/last-applied-configuration": "{}",
                },
                "finalizers": ["kubernetes.io/pv-protection"],
            },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "capacity": { "storage": "500Mi" },
                "claimRef": {
                    "kind": "PersistentVolumeClaim", "namespace": "web", "name": "data",
                    "uid": "u2", "resourceVersion": "8",
                },
                "csi": {
                    "driver": "csi.blockd.io",
                    "volumeHandle": "default/csi.pvc-1",
                    "volumeAttributes": { "csi.blockd.io/mkfs-options": "-m 1" },
                },
                "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [
                    { "key": "csi.blockd.io/node", "operator": "In", "values": ["n1"] },
                ] }] } },
                "persistentVolumeReclaimPolicy": "Delete",
                "storageClassName": "blockd-thin",
            },
            "status": { "phase": "Bound" },
        })
    }

    fn place() -> Place {
        Place::new("csi.blockd.io", "n2")
    }

    #[test]
    fn the_new_object_differs_by_node_id_and_policy_and_has_no_state_of_the_old() {
        let mut expected = old();
        expected.as_object_mut().unwrap().remove("status");
        for key in ["uid", "resourceVersion", "creationTimestamp", "finalizers"] {
            expected["metadata"].as_object_mut().unwrap().remove(key);
        }
        let annotations = expected["metadata"]["annotations"].as_object_mut().unwrap();
        annotations.remove(LAST_APPLIED);
        expected["spec"]["claimRef"].as_object_mut().unwrap().remove("resourceVersion");
        expected["spec"]["csi"]["volumeHandle"] = json!("fast/csi.pvc-1");
        expected["spec"]["persistentVolumeReclaimPolicy"] = json!("Retain");
        let terms = &mut expected["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"];
        terms[0]["matchExpressions"][0]["values"] = json!(["n2"]);
        assert_eq!(for_node(&old(), "fast/csi.pvc-1", &place()), expected);
    }

    #[test]
    fn labels_and_settings_are_given_again() {
        let to = VolumeId { pool: "fast".to_owned(), name: "csi.pvc-1".to_owned() };
        let mut volume = v1::Volume::default();
        assert_eq!(configure(&volume, &to), "blockd set fast/csi.pvc-1");
        let labels = [
            ("blockd.io/replicated-unix-ms", "1"),
            ("csi.blockd.io/device-class", "thin"),
            ("m", "-m 1"),
        ];
        volume.labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        volume.settings = Some(v1::VolumeSettings {
            thick: true,
            iops: 500,
            bandwidth_bytes: 1_048_576,
            quota_bytes: 4096,
            reservation_bytes: 8192,
            on_full: v1::OnFull::Timeout.into(),
            on_full_timeout_ms: 60_000,
            ..Default::default()
        });
        let expected = "blockd set fast/csi.pvc-1 --label csi.blockd.io/device-class=thin \
                        --label 'm=-m 1' --thick --reserve 8192 --quota 4096 --iops 500 \
                        --bandwidth 1048576 --on-full timeout=60000ms";
        assert_eq!(configure(&volume, &to), expected);
    }

    #[test]
    fn the_script_swaps_one_object_for_the_other() {
        let mut answer = Answer {
            volume_id: "default/csi.pvc-1".to_owned(),
            new_volume_id: "default/csi.pvc-1".to_owned(),
            node: "n2".to_owned(),
            snapshot: Some("csi.pvc-1@replica-1".to_owned()),
            changed: true,
            source_deleted: false,
            configure: Some("blockd set default/csi.pvc-1 --label a=b".to_owned()),
            persistent_volume: json!({ "metadata": { "name": "pvc-1" } }),
            reclaim_policy: Some("Delete".to_owned()),
        };
        let policy = |policy: &str| {
            format!(
                "kubectl patch pv pvc-1 --type=merge --patch \
                 '{{\"spec\":{{\"persistentVolumeReclaimPolicy\":\"{policy}\"}}}}'\n"
            )
        };
        let expected = format!(
            "# default/csi.pvc-1: stays here, unused; node n2 has csi.pvc-1@replica-1, as \
             default/csi.pvc-1.\n\
             # First, on node n2:\n\
             #   blockd set default/csi.pvc-1 --label a=b\n\
             # Then, while no pod uses the claim, put the new PersistentVolume in the place of the \
             old:\n\
             ! kubectl get pv pvc-1 >/dev/null 2>&1 || {}\
             kubectl delete pv pvc-1 --ignore-not-found --wait=false\n\
             ! kubectl get pv pvc-1 >/dev/null 2>&1 || kubectl patch pv pvc-1 --type=merge --patch \
             '{{\"metadata\":{{\"finalizers\":null}}}}'\n\
             kubectl create --filename - <<'END_OF_VOLUME'\n\
             {{\n  \"metadata\": {{\n    \"name\": \"pvc-1\"\n  }}\n}}\n\
             END_OF_VOLUME\n\
             kubectl wait pv pvc-1 --for=jsonpath='{{.status.phase}}'=Bound --timeout=120s\n",
            policy("Retain")
        );
        assert_eq!(script(&answer), expected.clone() + &policy("Delete"));
        answer.reclaim_policy = None;
        assert_eq!(script(&answer), expected);
        answer.source_deleted = true;
        assert!(script(&answer).starts_with("# default/csi.pvc-1: is deleted here; node n2 has"));
    }
}
