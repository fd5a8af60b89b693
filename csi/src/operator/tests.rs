use blockd_api::v1::{Volume, VolumeKind};
use clap::{CommandFactory as _, Parser as _};
use serde_json::{Value, json};

use super::pv::{List, parse};
use super::{lost_node, orphans};
use crate::error::Error;
use crate::testing::shell::changes;
use crate::testing::{MIB, Rig};

const DRIVER: &str = "csi.blockd.io";
const HOUR_MS: i64 = 3_600_000;
/// When the list was made, and the volumes an hour and a moment before.
const NOW_MS: i64 = 1_800_000_000_000;
const NOW: &str = "2027-01-15T08:00:00Z";
const MADE_MS: i64 = NOW_MS - HOUR_MS - 1;

/// A PersistentVolume as the provisioner makes it.
fn pv(name: &str, handle: &str, node: &str, policy: &str) -> Value {
    let expression = json!({ "key": "csi.blockd.io/node", "operator": "In", "values": [node] });
    let terms = json!([{ "matchExpressions": [expression] }]);
    json!({
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {
            "name": name,
            "uid": format!("uid-{name}"),
            "creationTimestamp": NOW,
            "annotations": { "pv.kubernetes.io/provisioned-by": DRIVER },
            "finalizers": ["kubernetes.io/pv-protection"],
        },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "capacity": { "storage": "500Mi" },
            "claimRef": { "namespace": "web", "name": format!("data-{name}"), "uid": "u" },
            "csi": { "driver": DRIVER, "volumeHandle": handle },
            "nodeAffinity": { "required": { "nodeSelectorTerms": terms } },
            "persistentVolumeReclaimPolicy": policy,
            "storageClassName": "blockd-thin",
        },
        "status": { "phase": "Bound" },
    })
}

fn list(items: &[Value]) -> List {
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
    parse("test", list.to_string().as_bytes(), DRIVER, NOW_MS).unwrap()
}

fn one(id: &str) -> Value {
    pv(id.rsplit('.').next().unwrap(), id, "n1", "Delete")
}

fn change(rig: &Rig, name: &str, change: impl FnOnce(&mut Volume)) {
    rig.fake.change("default", name, change);
}

/// A volume as the plugin makes it.
fn add(rig: &Rig, name: &str) {
    rig.fake.add("default", name, 64 * MIB);
    change(rig, name, |one| {
        one.made_unix_ms = MADE_MS;
        let labels = [
            ("csi.blockd.io/device-class", "thin"),
            ("csi.storage.k8s.io/pvc-name", "data"),
            ("csi.storage.k8s.io/pvc-namespace", "web"),
        ];
        one.labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    });
}

fn options(words: &[&str]) -> orphans::Options {
    let words = [&["blockd-csi orphans", "--pv-list", "-"], words].concat();
    orphans::Options::try_parse_from(words).unwrap()
}

async fn run(rig: &Rig, list: &List, words: &[&str]) -> Result<String, Error> {
    let options = options(words);
    let (answer, ended) = options.answer(&rig.plugin().daemon, list).await?;
    ended?;
    Ok(answer.text(options.delete))
}

fn names(rig: &Rig) -> Vec<String> {
    rig.fake.volumes().into_iter().map(|one| one.name).collect()
}

#[test]
fn the_command_lines_are_consistent() {
    orphans::Options::command().debug_assert();
    lost_node::Options::command().debug_assert();
    for (text, seconds) in [("90s", 90), ("30m", 1800), ("0h", 0), ("7d", 604_800)] {
        assert_eq!(options(&["--older", text]).older.as_secs(), seconds, "{text}");
    }
    for text in ["", "1", "h", "-1h", "1.5h", "1w", "1ms", "99999999999s", "ä"] {
        let words = ["blockd-csi orphans", "--pv-list", "-", "--older", text];
        assert!(orphans::Options::try_parse_from(words).is_err(), "{text}");
    }
}

#[tokio::test]
async fn volumes_that_no_persistent_volume_names_are_listed_and_nothing_is_deleted() {
    let rig = Rig::simple();
    for name in ["csi.pvc-1", "csi.pvc-2", "csi.pvc-3", "by-hand"] {
        add(&rig, name);
    }
    let list = list(&[one("default/csi.pvc-2"), pv("other", "x", "n1", "Delete")]);
    let text = run(&rig, &list, &[]).await.unwrap();
    let line = |name: &str| {
        format!(
            "default/{name}: 67108864 bytes, 0 of them mapped, class thin, claim web/data: can \
             be deleted\n"
        )
    };
    let count = "2 volumes without a PersistentVolume, 2 can be deleted; the list has 2 of the \
                 driver\n";
    assert_eq!(text, line("csi.pvc-1") + &line("csi.pvc-3") + count);
    assert_eq!(names(&rig).len(), 4);
    // A volume of another driver is none of this one's.
    let other = run(&rig, &list, &["--driver-name", "fast.example.com"]).await.unwrap();
    assert!(other.starts_with("0 volumes without"), "{other}");
}

#[tokio::test]
async fn only_what_cannot_be_in_use_or_younger_than_the_list_is_deleted() {
    let rig = Rig::simple();
    let all = [
        "csi.attached",
        "csi.connected",
        "csi.foreign",
        "csi.free",
        "csi.named",
        "csi.source",
        "csi.undated",
        "csi.young",
    ];
    all.iter().for_each(|name| add(&rig, name));
    change(&rig, "csi.attached", |one| one.attached = true);
    change(&rig, "csi.connected", |one| one.connections = 1);
    change(&rig, "csi.foreign", |one| one.labels.clear());
    change(&rig, "csi.undated", |one| one.made_unix_ms = 0);
    change(&rig, "csi.young", |one| one.made_unix_ms = NOW_MS - HOUR_MS + 1);
    add(&rig, "csi.source@day");
    change(&rig, "csi.source@day", |one| one.kind = VolumeKind::Snapshot.into());
    let list = list(&[one("default/csi.named")]);
    let text = run(&rig, &list, &["--delete", "--yes"]).await.unwrap();
    let kept = [
        ("attached", "it is attached"),
        ("connected", "it is attached"),
        ("foreign", "it has no label of the plugin, which may not have made it"),
        ("source", "it has snapshots: 1"),
        ("undated", "it is not known when it was made"),
        ("young", "it was made less than --older before the list"),
    ];
    for (name, why) in kept {
        let line = text.lines().find(|line| line.starts_with(&format!("default/csi.{name}:")));
        let end = format!(": kept, {why}");
        assert!(line.unwrap().ends_with(&end), "{text}");
        // By its name it is refused, and the other volume that is named stays as well.
        add(&rig, "csi.free");
        let words = ["--delete", "default/csi.free", &format!("default/csi.{name}")];
        let error = run(&rig, &list, &words).await.unwrap_err().to_string();
        assert_eq!(error, format!("volume default/csi.{name} is kept: {why}"));
        assert!(names(&rig).contains(&"csi.free".to_owned()));
    }
    assert!(text.contains("default/csi.free: "), "{text}");
    assert!(text.ends_with(
        "7 volumes without a PersistentVolume, 1 deleted; the list has 1 of \
                            the driver\n"
    ));
    let young = run(&rig, &list, &["--older", "30m", "--delete", "default/csi.young"]).await;
    assert!(young.unwrap().contains("1 deleted"));
}

/// A list that comes by standard input, or in a copy of a file, looks newer than it is.
#[tokio::test]
async fn a_volume_that_is_younger_than_all_of_the_list_is_kept() {
    let rig = Rig::simple();
    ["csi.named", "csi.pvc-1"].iter().for_each(|name| add(&rig, name));
    let mut named = one("default/csi.named");
    named["metadata"]["creationTimestamp"] = json!("2027-01-15T07:29:59Z");
    let list = list(&[named]);
    let text = run(&rig, &list, &["--delete", "--yes", "--older", "30m"]).await.unwrap();
    let kept = ": kept, it was made less than --older before the newest PersistentVolume of the \
                list, or after it: a newer list may name it\n";
    assert!(text.contains(kept), "{text}");
    let words = ["--delete", "--older", "29m", "default/csi.pvc-1"];
    assert!(run(&rig, &list, &words).await.unwrap().contains("1 deleted"));
}

/// The pool was renamed, or the volume moved and a copy stayed here.
#[tokio::test]
async fn a_volume_that_a_persistent_volume_may_mean_is_kept() {
    let rig = Rig::simple();
    for name in ["csi.pvc-1", "csi.pvc-2", "csi.pvc-3"] {
        add(&rig, name);
    }
    let label = ("csi.storage.k8s.io/pv-name".to_owned(), "team-a".to_owned());
    change(&rig, "csi.pvc-2", |one| one.labels.extend([label]));
    let team = pv("team-a", "default/csi.other", "n1", "Delete");
    let list = list(&[one("former/csi.pvc-1"), team, one("default/csi.pvc-9")]);
    let words = ["--delete", "--yes", "--allow-unmatched-list"];
    let text = run(&rig, &list, &words).await.unwrap();
    for (name, by) in [("csi.pvc-1", "pvc-1"), ("csi.pvc-2", "team-a")] {
        let line = text.lines().find(|line| line.starts_with(&format!("default/{name}:")));
        let end = format!(": kept, PersistentVolume {by} has its name, or is in its label");
        assert!(line.unwrap().ends_with(&end), "{text}");
    }
    assert_eq!(names(&rig), ["csi.pvc-1", "csi.pvc-2"]);
}

#[tokio::test]
async fn named_volumes_are_deleted_alone_and_a_repeat_finds_nothing() {
    let rig = Rig::simple();
    for name in ["csi.pvc-1", "csi.pvc-2", "csi.pvc-3"] {
        add(&rig, name);
    }
    let list = list(&[one("default/csi.pvc-2")]);
    for (id, problem) in [
        ("default/csi.pvc-2", "volume default/csi.pvc-2 belongs to PersistentVolume pvc-2"),
        ("default/by-hand", "VOLUME is default/by-hand: must be POOL/NAME of a volume of"),
        ("csi.pvc-1", "VOLUME is csi.pvc-1: must be POOL/NAME"),
    ] {
        let words = ["--delete", "default/csi.pvc-1", id];
        let error = run(&rig, &list, &words).await.unwrap_err().to_string();
        assert!(error.starts_with(problem), "{error}");
        assert_eq!(names(&rig).len(), 3);
    }
    let words = ["--delete", "default/csi.pvc-1"];
    let text = run(&rig, &list, &words).await.unwrap();
    assert!(text.contains("default/csi.pvc-1: ") && text.contains(": deleted\n"), "{text}");
    assert_eq!(names(&rig), ["csi.pvc-2", "csi.pvc-3"]);
    let text = run(&rig, &list, &words).await.unwrap();
    assert!(text.starts_with("0 volumes without a PersistentVolume, 0 deleted"), "{text}");
}

#[tokio::test]
async fn deleting_needs_names_or_yes_and_a_list_with_persistent_volumes() {
    let rig = Rig::simple();
    add(&rig, "csi.pvc-1");
    let error = options(&["--delete"]).run().await.unwrap_err().to_string();
    assert!(error.starts_with("--delete is given alone: must be given with"), "{error}");
    for words in [&["--yes"][..], &["--delete", "--yes", "default/csi.pvc-1"]] {
        let words = [&["blockd-csi orphans", "--pv-list", "-"], words].concat();
        assert!(orphans::Options::try_parse_from(&words).is_err(), "{words:?}");
    }
    let empty = list(&[]);
    let of_another_cluster = list(&[one("default/csi.pvc-2"), one("default/csi.pvc-3")]);
    for (list, count) in [(&empty, 0), (&of_another_cluster, 2)] {
        for words in [&["--delete", "--yes"][..], &["--delete", "default/csi.pvc-1"]] {
            let error = run(&rig, list, words).await.unwrap_err().to_string();
            let text = format!("a list of {count} PersistentVolumes of csi.blockd.io, of which");
            assert!(error.contains(&text), "{error}");
        }
    }
    assert_eq!(names(&rig), ["csi.pvc-1"]);
    let text = run(&rig, &empty, &["--delete", "--yes", "--allow-unmatched-list"]).await.unwrap();
    assert!(text.contains("1 deleted"), "{text}");
    assert!(names(&rig).is_empty());
}

/// A daemon that goes away in the middle: the answer says what was deleted until then.
#[tokio::test]
async fn what_was_deleted_before_an_error_is_said() {
    let rig = Rig::simple();
    for name in ["csi.pvc-1", "csi.pvc-2", "csi.pvc-9"] {
        add(&rig, name);
    }
    let options = options(&["--delete", "--yes"]);
    let list = list(&[one("default/csi.pvc-9")]);
    let daemon = rig.plugin().daemon.clone();
    // The list, then a look and a deletion for each.
    rig.fake.die_at(5, false);
    let (answer, ended) = options.answer(&daemon, &list).await.unwrap();
    assert_eq!(ended.unwrap_err().code(), tonic::Code::Unavailable);
    let json = serde_json::to_value(&answer).unwrap();
    assert_eq!(json["deleted"], 1);
    assert_eq!(
        (&json["orphans"][0]["deleted"], &json["orphans"][1]["deleted"]),
        (&json!(true), &json!(false))
    );
    assert!(answer.text(true).contains(
        "csi.pvc-2: 67108864 bytes, 0 of them mapped, class thin, \
                                        claim web/data: not deleted\n"
    ));
    rig.fake.heal();
    assert_eq!(names(&rig), ["csi.pvc-2", "csi.pvc-9"]);
}

/// The fields of `--json`.
#[tokio::test]
async fn the_json_of_orphans_is_as_documented() {
    let rig = Rig::simple();
    add(&rig, "csi.pvc-1");
    let list = list(&[one("default/csi.pvc-9")]);
    let (answer, _) = options(&[]).answer(&rig.plugin().daemon, &list).await.unwrap();
    let expected = json!({
        "persistent_volumes": 1,
        "orphans": [{
            "volume_id": "default/csi.pvc-1",
            "size_bytes": 67_108_864,
            "mapped_bytes": 0,
            "class": "thin",
            "claim": "web/data",
            "persistent_volume": null,
            "made_unix_ms": MADE_MS,
            "kept": null,
            "deleted": false,
        }],
        "deleted": 0,
    });
    assert_eq!(serde_json::to_value(&answer).unwrap(), expected);
}

#[test]
fn a_list_that_is_not_whole_or_of_other_objects_is_refused() {
    let refused = |list: Value| {
        let error = parse("-", list.to_string().as_bytes(), DRIVER, 0).unwrap_err().to_string();
        assert!(error.starts_with("--pv-list is -, "), "{error}");
        error
    };
    assert!(refused(json!(null)).contains("kind unknown"));
    assert!(refused(json!({ "kind": "PersistentVolume" })).contains("kind PersistentVolume"));
    assert!(refused(json!({ "kind": "List" })).contains("without items"));
    let claims = json!({ "kind": "List", "items": [{ "kind": "PersistentVolumeClaim" }] });
    assert!(refused(claims).contains("an object of kind PersistentVolumeClaim"));
    let page = json!({ "kind": "List", "metadata": { "continue": "x" }, "items": [] });
    assert!(refused(page).contains("one page of a longer list"));
    let mut broken = one("default/csi.a");
    broken["spec"]["csi"] = json!({ "driver": DRIVER });
    let broken = refused(json!({ "kind": "List", "items": [broken] }));
    assert!(broken.contains("items[0] not understood"), "{broken}");
    for (field, value) in [("uid", ""), ("creationTimestamp", "yesterday")] {
        let mut broken = one("default/csi.a");
        broken["metadata"][field] = value.into();
        let error = refused(json!({ "kind": "List", "items": [broken] }));
        assert!(
            error.contains(&format!("items[0] not understood: metadata.{field} is")),
            "{error}"
        );
    }
    let error = parse("-", b"{", DRIVER, 0).unwrap_err().to_string();
    assert!(error.contains("no JSON"), "{error}");
    // Volumes of others, and objects without a kind as the API server lists them.
    let mut plain = one("default/csi.a");
    plain.as_object_mut().unwrap().remove("kind");
    let metadata = json!({ "name": "n", "uid": "n", "creationTimestamp": "2027-01-15T08:00:01Z" });
    let nfs = json!({ "metadata": metadata, "spec": { "nfs": {} } });
    let list = json!({ "kind": "PersistentVolumeList", "items": [plain, nfs] });
    let list = parse("-", list.to_string().as_bytes(), DRIVER, 0).unwrap();
    assert_eq!((list.volumes.len(), list.newest_unix_ms), (1, Some(NOW_MS + 1000)));
}

/// Volumes that were made since a file was written are not in it, however long ago that is.
#[test]
fn a_file_is_as_old_as_its_last_write() {
    let path = std::env::temp_dir().join(format!("blockd-csi-pv-{}", std::process::id()));
    let text = json!({ "kind": "List", "items": [one("default/csi.a")] }).to_string();
    std::fs::write(&path, text).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let since = |seconds| std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
    file.set_modified(since(1_700_000_000)).unwrap();
    let list = List::read(&path, DRIVER).unwrap();
    assert_eq!((list.made_unix_ms, list.volumes.len()), (1_700_000_000_000, 1));
    let now = super::pv::now_ms();
    file.set_modified(since(40_000_000_000)).unwrap();
    let made = List::read(&path, DRIVER).unwrap().made_unix_ms;
    assert!(now <= made && made < 40_000_000_000_000, "{made}");
    std::fs::remove_file(&path).unwrap();
    let error = List::read(&path, DRIVER).unwrap_err().to_string();
    assert!(error.starts_with("read --pv-list "), "{error}");
}

fn lost(words: &[&str], list: &List) -> lost_node::Answer {
    let words = [&["blockd-csi lost-node", "n1", "--pv-list", "-"], words].concat();
    lost_node::Options::try_parse_from(words).unwrap().answer(list)
}

#[test]
fn the_volumes_of_a_lost_node_are_released_where_their_class_deletes_them() {
    let list = list(&[
        pv("a", "default/csi.a", "n1", "Delete"),
        pv("b", "default/csi.b", "n2", "Delete"),
        pv("c", "default/csi.c", "n1", "Retain"),
    ]);
    let release = |name: &str| {
        let uid = |object: &str| {
            format!(
                "$(kubectl get {object} --ignore-not-found --output 'jsonpath={{.metadata.uid}}')"
            )
        };
        let claim = format!("pvc --namespace web data-{name}");
        let pv = uid(&format!("pv {name}"));
        format!(
            "uid={pv}\n\
             if [ \"$uid\" = uid-{name} ]; then\n  \
             claim={}\n  \
             [ \"$claim\" != u ] || kubectl delete {claim} --ignore-not-found --wait=false\n  \
             kubectl delete pv {name} --ignore-not-found --wait=false\n  \
             left={pv}\n  \
             [ \"$left\" != uid-{name} ] || kubectl patch pv {name} --type=merge --patch \
             '{{\"metadata\":{{\"uid\":\"uid-{name}\",\"finalizers\":null}}}}'\n\
             elif [ -n \"$uid\" ]; then\n  \
             echo 'PersistentVolume {name} is not the one of the list: kept' >&2\n\
             fi\n",
            uid(&claim)
        )
    };
    let expected = format!(
        "set -e\n\
         # 2 PersistentVolumes are on node n1 alone; the commands release 1 of them, whose data \
         is given up.\n\
         # a: volume default/csi.a, claim web/data-a, reclaim policy Delete\n\
         # c: volume default/csi.c, claim web/data-c, reclaim policy Retain, kept: --retained \
         releases it too\n\
         ready=$(kubectl get node n1 --ignore-not-found --output \
         'jsonpath={{.status.conditions[?(@.type==\"Ready\")].status}}')\n\
         if [ \"$ready\" = True ]; then\n  \
         echo 'node n1 is Ready: its volumes are in use, and nothing was released' >&2\n  \
         exit 1\n\
         fi\n{}",
        release("a")
    );
    assert_eq!(lost(&[], &list).script(), expected);
    let all = lost(&["--retained"], &list).script();
    assert!(all.ends_with(&(release("a") + &release("c"))), "{all}");
    let json = serde_json::to_value(lost(&[], &list)).unwrap();
    assert_eq!(json["node"], "n1");
    let commands = json["commands"].as_array().unwrap();
    assert_eq!((commands.len(), &commands[0]), (3, &json!("set -e")));
    let expected = json!({
        "persistent_volume": "c",
        "volume_id": "default/csi.c",
        "claim": "web/data-c",
        "reclaim_policy": "Retain",
        "bound": true,
        "released": false,
    });
    assert_eq!(json["volumes"][1], expected);
}

/// A list may be old, and the wrong node may be named.
#[test]
fn only_the_objects_of_the_list_are_released_and_only_while_the_node_is_not_ready() {
    let list = list(&[pv("a", "default/csi.a", "n1", "Delete")]);
    let script = lost(&[], &list).script();
    let run = |answers: &[(&str, &str)]| changes(&script, answers);
    let pv = [
        "delete pv a --ignore-not-found --wait=false",
        "patch pv a --type=merge --patch {\"metadata\":{\"uid\":\"uid-a\",\"finalizers\":null}}",
    ];
    let claim = "delete pvc --namespace web data-a --ignore-not-found --wait=false";
    let all = run(&[("READY", "Unknown"), ("PV", "uid-a"), ("CLAIM", "u")]).unwrap();
    assert_eq!(all, [claim, pv[0], pv[1]]);
    let other_claim = run(&[("PV", "uid-a"), ("CLAIM", "u2")]).unwrap();
    assert_eq!(other_claim, pv);
    // It was moved, and made again with its claim; or it is released already.
    for uid in ["uid-b", ""] {
        assert!(run(&[("PV", uid), ("CLAIM", "u")]).unwrap().is_empty(), "{uid}");
    }
    let refused = run(&[("READY", "True"), ("PV", "uid-a"), ("CLAIM", "u")]).unwrap_err();
    assert_eq!(refused, "node n1 is Ready: its volumes are in use, and nothing was released\n");
    assert!(run(&[("PV", "error"), ("CLAIM", "u")]).is_err());
}

/// A volume that can be used elsewhere too is not lost with the node.
#[test]
fn a_volume_that_is_not_bound_to_the_node_is_not_stuck() {
    let mut several = pv("a", "default/csi.a", "n1", "Delete");
    let terms = &mut several["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"];
    let other = json!({ "matchExpressions": [
        { "key": "csi.blockd.io/node", "operator": "In", "values": ["n2"] },
    ] });
    terms.as_array_mut().unwrap().push(other);
    let mut nowhere = pv("b", "default/csi.b", "n1", "Delete");
    nowhere["spec"].as_object_mut().unwrap().remove("nodeAffinity");
    let answer = lost(&[], &list(&[several, nowhere]));
    assert!(answer.script().contains("# 0 PersistentVolumes"), "{answer:?}");
}

/// The claim was deleted and made again, and has its volume elsewhere: it must not be deleted.
#[test]
fn a_claim_that_is_not_bound_to_the_volume_stays() {
    let mut released = pv("a", "default/csi.a", "n1", "Retain");
    released["status"]["phase"] = json!("Released");
    let mut unknown = pv("b", "default/csi.b", "n1", "Retain");
    unknown.as_object_mut().unwrap().remove("status");
    let script = lost(&["--retained"], &list(&[released, unknown])).script();
    assert!(!script.contains("delete pvc"), "{script}");
    assert!(script.contains("kubectl delete pv a ") && script.contains("kubectl delete pv b "));
    assert!(script.contains("claim web/data-a before, which is gone, reclaim"), "{script}");
}

/// A list by another hand cannot put words into the script.
#[test]
fn names_in_the_commands_are_quoted() {
    let mut strange = pv("a;b", "default/csi.a\nrm", "n1", "Delete");
    strange["spec"]["claimRef"]["name"] = json!("it's\n");
    let script = lost(&[], &list(&[strange])).script();
    assert!(script.contains("web 'it'\\''s\n' --ignore"), "{script}");
    assert!(script.contains("kubectl delete pv 'a;b' "), "{script}");
    assert!(script.contains("volume default/csi.arm,"), "{script}");
}
