//! PersistentVolumes as `kubectl get pv -o json` prints them: the fields that the commands act by.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;
use std::time::UNIX_EPOCH;

use blockd_csi_base::clock;
use blockd_csi_base::error::shown;
use prost_types::Timestamp;
use serde::Deserialize;
use serde_json::Value;

use crate::error::Error;

/// Longest list: a hundred thousand objects of 5 KiB, twice the size of most.
const MAX_LIST_BYTES: u64 = 512 * 1024 * 1024;

/// The option that names the list.
const OPTION: &str = "--pv-list";

/// A list of PersistentVolumes, and how new it is.
#[derive(Clone, Debug)]
pub struct List {
    /// The volumes of the driver.
    pub volumes: Vec<PersistentVolume>,
    /// When it was made, in milliseconds since 1970: when a file was written, else now. A copy of
    /// an older file looks newer than it is.
    pub made_unix_ms: i64,
    /// When the newest object of the list was made, of any driver: the list is no older than that,
    /// however it came here. None where it is empty.
    pub newest_unix_ms: Option<i64>,
}

/// A PersistentVolume.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PersistentVolume {
    metadata: Metadata,
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Status {
    #[serde(default)]
    phase: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    name: String,
    uid: String,
    creation_timestamp: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    csi: Option<Source>,
    claim_ref: Option<ClaimRef>,
    persistent_volume_reclaim_policy: Option<String>,
    node_affinity: Option<NodeAffinity>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Source {
    driver: String,
    volume_handle: String,
}

#[derive(Clone, Debug, Deserialize)]
struct ClaimRef {
    namespace: String,
    name: String,
    uid: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
struct NodeAffinity {
    required: Option<NodeSelector>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct NodeSelector {
    #[serde(default)]
    node_selector_terms: Vec<NodeSelectorTerm>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct NodeSelectorTerm {
    #[serde(default)]
    match_expressions: Vec<Expression>,
}

#[derive(Clone, Debug, Deserialize)]
struct Expression {
    key: String,
    operator: String,
    #[serde(default)]
    values: Vec<String>,
}

impl PersistentVolume {
    /// Name of the object.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.metadata.name
    }

    /// UID of the object, by which it differs from a later one of its name.
    #[must_use]
    pub fn uid(&self) -> &str {
        &self.metadata.uid
    }

    /// The id of the volume at its driver.
    #[must_use]
    pub fn handle(&self) -> &str {
        self.spec.csi.as_ref().map_or("", |csi| &csi.volume_handle)
    }

    /// Whether its claim is bound to it. Another claim may have the name of the claim that was.
    #[must_use]
    pub fn is_bound(&self) -> bool {
        self.status.phase == "Bound"
    }

    /// When the object was made, in milliseconds since 1970.
    fn made_unix_ms(&self) -> Option<i64> {
        let made: Timestamp = self.metadata.creation_timestamp.parse().ok()?;
        made.seconds.checked_mul(1000)?.checked_add(i64::from(made.nanos / 1_000_000))
    }

    /// Namespace and name of the claim that it is bound to, or was.
    #[must_use]
    pub fn claim(&self) -> Option<(&str, &str)> {
        let claim = self.spec.claim_ref.as_ref()?;
        Some((&claim.namespace, &claim.name))
    }

    /// UID of that claim.
    #[must_use]
    pub fn claim_uid(&self) -> Option<&str> {
        self.spec.claim_ref.as_ref()?.uid.as_deref()
    }

    /// Whether volume and data go when the claim is deleted.
    #[must_use]
    pub fn is_deleted_with_claim(&self) -> bool {
        self.spec.persistent_volume_reclaim_policy.as_deref() == Some("Delete")
    }

    /// Whether it can be used on this node alone, by the driver's topology key.
    #[must_use]
    pub fn is_only_on(&self, key: &str, node: &str) -> bool {
        let terms = self.spec.node_affinity.as_ref().and_then(|it| it.required.as_ref());
        let terms = terms.map(|it| it.node_selector_terms.as_slice()).unwrap_or_default();
        // A node has to satisfy one term, and all expressions of it.
        let is_only = |term: &NodeSelectorTerm| {
            term.match_expressions.iter().any(|one| {
                one.key == key && one.operator == "In" && one.values.iter().all(|it| it == node)
            })
        };
        !terms.is_empty() && terms.iter().all(is_only)
    }
}

impl List {
    /// Reads the list from a file, or from standard input where the path is `-`.
    ///
    /// # Errors
    /// The file can't be read, is too long, is no complete list of PersistentVolumes, or one of the
    /// driver's lacks a field.
    pub fn read(path: &Path, driver: &str) -> Result<Self, Error> {
        let failed = |error| Error::io(format_args!("read {OPTION} {}", path.display()), error);
        let (bytes, made_unix_ms) = if path == Path::new("-") {
            (limited(io::stdin()).map_err(failed)?, now_ms())
        } else {
            let file = File::open(path).map_err(failed)?;
            let written = file.metadata().and_then(|data| data.modified()).map_err(failed)?;
            let since = written.duration_since(UNIX_EPOCH).unwrap_or_default();
            let written = i64::try_from(since.as_millis()).unwrap_or(i64::MAX);
            // A file can be no newer than now, whatever its time says.
            (limited(file).map_err(failed)?, written.min(now_ms()))
        };
        parse(&shown(path.display()), &bytes, driver, made_unix_ms)
    }
}

fn limited(from: impl io::Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(MAX_LIST_BYTES + 1).read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).is_ok_and(|len| len > MAX_LIST_BYTES) {
        let text = format!("more than {MAX_LIST_BYTES} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
    }
    Ok(bytes)
}

/// Reads one PersistentVolume of the driver, as `kubectl get pv NAME -o json` prints it: all of it,
/// and the fields that are known.
///
/// # Errors
/// The file can't be read, is too long, or is no PersistentVolume of the driver.
pub fn read_one(path: &Path, driver: &str) -> Result<(Value, PersistentVolume), Error> {
    let failed = |error| Error::io(format_args!("read --pv {}", path.display()), error);
    let bytes = if path == Path::new("-") {
        limited(io::stdin()).map_err(failed)?
    } else {
        limited(File::open(path).map_err(failed)?).map_err(failed)?
    };
    let refused = |problem: String| {
        let allowed = format!("a PersistentVolume of {driver}, as `kubectl get pv NAME -o json`");
        Error::invalid("--pv", format_args!("{}, {problem}", path.display()), allowed)
    };
    let value: Value =
        serde_json::from_slice(&bytes).map_err(|error| refused(format!("no JSON: {error}")))?;
    if value["kind"] != "PersistentVolume" {
        let kind = shown(value["kind"].as_str().unwrap_or("unknown"));
        return Err(refused(format!("an object of kind {kind}")));
    }
    let volume = PersistentVolume::deserialize(&value)
        .map_err(|error| refused(format!("not understood: {error}")))?;
    match &volume.spec.csi {
        Some(_) if volume.uid().is_empty() => Err(refused("without metadata.uid".to_owned())),
        Some(csi) if csi.driver == driver => Ok((value, volume)),
        other => {
            let other = other.as_ref().map_or("none", |csi| &csi.driver);
            Err(refused(format!("of driver {}", shown(other))))
        }
    }
}

/// Reads a list. `name` is where it comes from, for errors.
///
/// # Errors
/// As [`List::read`].
pub fn parse(name: &str, bytes: &[u8], driver: &str, made_unix_ms: i64) -> Result<List, Error> {
    let refused = |problem: String| {
        let allowed = "what `kubectl get pv -o json` prints";
        Error::invalid(OPTION, format_args!("{name}, {problem}"), allowed)
    };
    let list: Value =
        serde_json::from_slice(bytes).map_err(|error| refused(format!("no JSON: {error}")))?;
    let kind = list["kind"].as_str().unwrap_or("unknown");
    if !matches!(kind, "List" | "PersistentVolumeList") {
        return Err(refused(format!("an object of kind {}", shown(kind))));
    }
    // A part of a list would make the rest of the volumes look like orphans.
    if list["metadata"]["continue"].as_str().is_some_and(|token| !token.is_empty()) {
        return Err(refused("one page of a longer list".to_owned()));
    }
    let Some(items) = list["items"].as_array() else {
        return Err(refused("a list without items".to_owned()));
    };
    let (mut volumes, mut newest_unix_ms) = (Vec::new(), None);
    for (index, item) in items.iter().enumerate() {
        // The API server names the kind once, for the whole list.
        let kind = item["kind"].as_str().unwrap_or("PersistentVolume");
        if kind != "PersistentVolume" {
            return Err(refused(format!("a list with an object of kind {}", shown(kind))));
        }
        let strange = |what: String| refused(format!("items[{index}] not understood: {what}"));
        let volume: PersistentVolume =
            PersistentVolume::deserialize(item).map_err(|error| strange(error.to_string()))?;
        if volume.uid().is_empty() {
            return Err(strange("metadata.uid is empty".to_owned()));
        }
        let made = volume.made_unix_ms();
        let made =
            made.ok_or_else(|| strange("metadata.creationTimestamp is no time".to_owned()))?;
        newest_unix_ms = newest_unix_ms.max(Some(made));
        if volume.spec.csi.as_ref().is_some_and(|csi| csi.driver == driver) {
            volumes.push(volume);
        }
    }
    Ok(List { volumes, made_unix_ms, newest_unix_ms })
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> i64 {
    i64::try_from(clock::unix_time().as_millis()).unwrap_or(i64::MAX)
}
