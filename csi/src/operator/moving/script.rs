//! The PersistentVolume for the other node, and the commands that put it in the place of the old.

use std::fmt::Write as _;

use blockd_api::v1;
use serde_json::{Map, Value, json};

use super::Answer;
use crate::ids::VolumeId;
use crate::operator::{SET, delete_pv, part_of, quoted};
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
    // Fill is what it has anyway, and the device of a pinned one is of this node's pool.
    if settings.placement() == v1::Placement::Spread {
        words.push("--placement spread".to_owned());
    }
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
/// between the deletion of one object and the creation of the other. It changes no object but the
/// one that was given, or the one that it has made.
pub(super) fn script(answer: &Answer) -> String {
    let mut text = format!("{SET}\n");
    let Answer { volume_id, new_volume_id, node, from_node, .. } = answer;
    let state = match (&answer.snapshot, answer.source_deleted) {
        (None, _) => "was deleted here before".to_owned(),
        (Some(snapshot), true) => format!("is deleted here; node {node} has {snapshot}"),
        (Some(snapshot), false) => format!("stays here, unused; node {node} has {snapshot}"),
    };
    let line = |text: &str| text.chars().filter(|c| !c.is_control()).collect::<String>();
    let _ = writeln!(text, "# {}", line(&format!("{volume_id}: {state}, as {new_volume_id}.")));
    let _ = writeln!(
        text,
        "# This is for right after the transfer. Once a pod has used the volume on node \
         {from_node} again,\n# its writes would be lost: run `blockd-csi move` again there, and \
         the script that it prints."
    );
    if let Some(configure) = &answer.configure {
        let _ = writeln!(text, "# First, on node {node}:\n#   {}", line(configure));
    }
    let object = answer.persistent_volume["metadata"]["name"].as_str().unwrap_or_default();
    let name = quoted(object);
    let manifest = serde_json::to_string_pretty(&answer.persistent_volume).unwrap_or_default();
    let nodes = ".spec.nodeAffinity.required.nodeSelectorTerms[*].matchExpressions[*].values[*]";
    let stranger = quoted(&format!("PersistentVolume {object} is not the one that was moved"));
    let (former, pv) = (quoted(&answer.former_uid), format!("pv {name}"));
    let _ = write!(
        text,
        "# Then, while no pod uses the claim, put the new PersistentVolume in the place of the \
         old:\n{}\n\
         if [ \"$uid\" = {former} ]; then\n{}\
         elif [ -n \"$uid\" ]; then\n  {}\n  \
         [ \"$node\" = {} ] || {{ echo {stranger} >&2; exit 1; }}\n\
         fi\n\
         if [ -z \"$uid\" ] || [ \"$uid\" = {former} ]; then\n\
         kubectl create --filename - <<'END_OF_VOLUME'\n{manifest}\nEND_OF_VOLUME\n\
         fi\n\
         kubectl wait {pv} --for=jsonpath='{{.status.phase}}'=Bound --timeout=120s\n",
        part_of("uid", &pv, ".metadata.uid"),
        take_away(answer, &name),
        part_of("node", &pv, nodes),
        quoted(node),
    );
    if let Some(former) = &answer.reclaim_policy {
        let _ = writeln!(text, "{}", set_policy(&name, former));
    }
    text.push_str(&last(answer));
    text
}

/// The steps that are left, in comments.
fn last(answer: &Answer) -> String {
    let Answer { new_volume_id, node, from_node, .. } = answer;
    if answer.snapshot.is_some() && !answer.source_deleted {
        return format!(
            "# Last, before pods use the claim, on node {from_node}: the same `blockd-csi move` \
             with --delete-source.\n"
        );
    }
    // Their names are the receiver's.
    format!(
        "# Last, on node {node}: `blockd list` shows snapshots {new_volume_id}@... of the \
         transfer.\n# They keep space: delete each by `blockd del`.\n"
    )
}

fn set_policy(name: &str, policy: &str) -> String {
    format!(
        "kubectl patch pv {name} --type=merge --patch \
         '{{\"spec\":{{\"persistentVolumeReclaimPolicy\":\"{policy}\"}}}}'"
    )
}

/// The lines that delete the former object, unless a pod has its claim: a pod that runs may write
/// to the volume that stays behind.
fn take_away(answer: &Answer, name: &str) -> String {
    let mut lines = Vec::new();
    let claim = &answer.persistent_volume["spec"]["claimRef"];
    if let (Some(namespace), Some(claim)) = (claim["namespace"].as_str(), claim["name"].as_str()) {
        let text = format!("pods of namespace {namespace} use claim {claim}: end them first");
        lines.push(format!(
            "claims=$(kubectl get pods --namespace {} \
             --field-selector 'status.phase!=Succeeded,status.phase!=Failed' \
             --output 'jsonpath={{.items[*].spec.volumes[*].persistentVolumeClaim.claimName}}')",
            quoted(namespace)
        ));
        lines.push(format!(
            "case \" $claims \" in\n    *{}*) echo {} >&2; exit 1 ;;\n  esac",
            quoted(&format!(" {claim} ")),
            quoted(&text)
        ));
    }
    lines.push(set_policy(name, "Retain"));
    lines.extend(delete_pv(name, &answer.former_uid));
    lines.iter().map(|line| format!("  {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::shell::changes;

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
            placement: v1::Placement::Spread.into(),
            iops: 500,
            bandwidth_bytes: 1_048_576,
            quota_bytes: 4096,
            reservation_bytes: 8192,
            on_full: v1::OnFull::Timeout.into(),
            on_full_timeout_ms: 60_000,
        });
        let expected = "blockd set fast/csi.pvc-1 --label csi.blockd.io/device-class=thin \
                        --label 'm=-m 1' --thick --reserve 8192 --quota 4096 --iops 500 \
                        --bandwidth 1048576 --placement spread --on-full timeout=60000ms";
        assert_eq!(configure(&volume, &to), expected);
    }

    fn answer() -> Answer {
        Answer {
            volume_id: "default/csi.pvc-1".to_owned(),
            new_volume_id: "default/csi.pvc-1".to_owned(),
            node: "n2".to_owned(),
            from_node: "n1".to_owned(),
            former_uid: "u1".to_owned(),
            snapshot: Some("csi.pvc-1@replica-1".to_owned()),
            changed: true,
            source_deleted: false,
            configure: Some("blockd set default/csi.pvc-1 --label a=b".to_owned()),
            persistent_volume: json!({
                "metadata": { "name": "pvc-1" },
                "spec": { "claimRef": { "namespace": "web", "name": "data" } },
            }),
            reclaim_policy: Some("Delete".to_owned()),
        }
    }

    /// The script is repeated after it was cut off anywhere, and run when the cluster has changed.
    #[test]
    fn no_object_but_the_former_is_deleted_and_none_that_pods_use() {
        let script = script(&answer());
        let run = |answers: &[(&str, &str)]| changes(&script, answers);
        let first = |words: &str| words.split(' ').next().unwrap_or_default().to_owned();
        let verbs = |answers: &[(&str, &str)]| {
            let changes = run(answers).unwrap();
            changes.iter().map(|line| first(line)).collect::<Vec<_>>().join(" ")
        };
        let former = ("PV", "u1");
        assert_eq!(
            verbs(&[former, ("CLAIMS", "database other")]),
            "patch delete patch create wait patch"
        );
        assert_eq!(verbs(&[]), "create wait patch");
        assert_eq!(verbs(&[("PV", "u9"), ("NODE", "n2")]), "wait patch");
        let refused = |answers: &[(&str, &str)]| run(answers).unwrap_err();
        let used = refused(&[former, ("CLAIMS", "other data")]);
        assert_eq!(used, "pods of namespace web use claim data: end them first\n");
        let other = refused(&[("PV", "u9"), ("NODE", "n3")]);
        assert_eq!(other, "PersistentVolume pvc-1 is not the one that was moved\n");
        assert_eq!(refused(&[("PV", "error")]), "");
    }

    #[test]
    fn the_script_swaps_one_object_for_the_other() {
        let mut answer = answer();
        let policy = |policy: &str| {
            format!(
                "kubectl patch pv pvc-1 --type=merge --patch \
                 '{{\"spec\":{{\"persistentVolumeReclaimPolicy\":\"{policy}\"}}}}'\n"
            )
        };
        let manifest = serde_json::to_string_pretty(&answer.persistent_volume).unwrap();
        let expected = format!(
            "set -e\n\
             # default/csi.pvc-1: stays here, unused; node n2 has csi.pvc-1@replica-1, as \
             default/csi.pvc-1.\n\
             # This is for right after the transfer. Once a pod has used the volume on node n1 \
             again,\n\
             # its writes would be lost: run `blockd-csi move` again there, and the script that it \
             prints.\n\
             # First, on node n2:\n\
             #   blockd set default/csi.pvc-1 --label a=b\n\
             # Then, while no pod uses the claim, put the new PersistentVolume in the place of the \
             old:\n\
             uid=$(kubectl get pv pvc-1 --ignore-not-found --output 'jsonpath={{.metadata.uid}}')\n\
             if [ \"$uid\" = u1 ]; then\n  \
             claims=$(kubectl get pods --namespace web \
             --field-selector 'status.phase!=Succeeded,status.phase!=Failed' \
             --output 'jsonpath={{.items[*].spec.volumes[*].persistentVolumeClaim.claimName}}')\n  \
             case \" $claims \" in\n    \
             *' data '*) echo 'pods of namespace web use claim data: end them first' >&2; exit 1 \
             ;;\n  esac\n  {}  \
             kubectl delete pv pvc-1 --ignore-not-found --wait=false\n  \
             left=$(kubectl get pv pvc-1 --ignore-not-found --output \
             'jsonpath={{.metadata.uid}}')\n  \
             [ \"$left\" != u1 ] || kubectl patch pv pvc-1 --type=merge --patch \
             '{{\"metadata\":{{\"uid\":\"u1\",\"finalizers\":null}}}}'\n\
             elif [ -n \"$uid\" ]; then\n  \
             node=$(kubectl get pv pvc-1 --ignore-not-found --output 'jsonpath={{.spec.nodeAffinity\
             .required.nodeSelectorTerms[*].matchExpressions[*].values[*]}}')\n  \
             [ \"$node\" = n2 ] || {{ echo 'PersistentVolume pvc-1 is not the one that was moved' \
             >&2; exit 1; }}\n\
             fi\n\
             if [ -z \"$uid\" ] || [ \"$uid\" = u1 ]; then\n\
             kubectl create --filename - <<'END_OF_VOLUME'\n{manifest}\nEND_OF_VOLUME\n\
             fi\n\
             kubectl wait pv pvc-1 --for=jsonpath='{{.status.phase}}'=Bound --timeout=120s\n",
            policy("Retain")
        );
        let last = "# Last, before pods use the claim, on node n1: the same `blockd-csi move` with \
                    --delete-source.\n";
        assert_eq!(script(&answer), expected.clone() + &policy("Delete") + last);
        answer.reclaim_policy = None;
        assert_eq!(script(&answer), expected + last);
        answer.source_deleted = true;
        assert!(script(&answer).contains("# default/csi.pvc-1: is deleted here; node n2 has"));
        assert!(script(&answer).contains("`blockd list` shows snapshots default/csi.pvc-1@... "));
    }
}
