//! The messages between scheduler and extender, and the objects that are read from the API server:
//! JSON with Go's names.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A pod, and the nodes that it might go to: whole, or by name where the scheduler says that its
/// extender keeps them.
#[derive(Deserialize, Debug)]
#[serde(rename_all = "PascalCase")]
pub struct Args {
    /// The pod.
    #[serde(default)]
    pub pod: Option<Pod>,
    /// Whole nodes.
    #[serde(default)]
    pub nodes: Option<NodeList>,
    /// Names of nodes.
    #[serde(default)]
    pub node_names: Option<Vec<String>>,
}

/// The parts of a pod that concern volumes.
#[derive(Deserialize, Default, Debug)]
pub struct Pod {
    /// Its name and annotations.
    #[serde(default)]
    pub metadata: Metadata,
    /// Its volumes.
    #[serde(default)]
    pub spec: PodSpec,
}

/// Metadata of an object.
#[derive(Deserialize, Default, Debug)]
pub struct Metadata {
    /// Its name.
    #[serde(default)]
    pub name: Option<String>,
    /// Its namespace, if it is in one.
    #[serde(default)]
    pub namespace: Option<String>,
    /// Annotations, which other programs may write.
    #[serde(default)]
    pub annotations: Option<BTreeMap<String, String>>,
}

/// A pod's.
#[derive(Deserialize, Default, Debug)]
pub struct PodSpec {
    /// All of them.
    #[serde(default)]
    pub volumes: Option<Vec<Volume>>,
}

/// A volume of a pod.
#[derive(Deserialize, Debug)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    /// Its name in the pod.
    #[serde(default)]
    pub name: String,
    /// The source of an inline volume.
    #[serde(default)]
    pub csi: Option<Csi>,
    /// The source of a claim.
    #[serde(default)]
    pub persistent_volume_claim: Option<ClaimSource>,
    /// The source of a generic ephemeral volume.
    #[serde(default)]
    pub ephemeral: Option<EphemeralSource>,
}

/// Names a claim in the namespace of the pod.
#[derive(Deserialize, Debug)]
#[serde(rename_all = "camelCase")]
pub struct ClaimSource {
    /// Its name.
    pub claim_name: String,
}

/// A volume whose claim is made with the pod and named after both.
#[derive(Deserialize, Debug)]
#[serde(rename_all = "camelCase")]
pub struct EphemeralSource {
    /// The claim to make.
    #[serde(default)]
    pub volume_claim_template: Option<ClaimTemplate>,
}

/// A claim that is to be made.
#[derive(Deserialize, Debug)]
pub struct ClaimTemplate {
    /// Its specification.
    #[serde(default)]
    pub spec: ClaimSpec,
}

/// A claim.
#[derive(Deserialize, Default, Debug)]
pub struct Claim {
    /// Its name and annotations.
    #[serde(default)]
    pub metadata: Metadata,
    /// Its specification.
    #[serde(default)]
    pub spec: ClaimSpec,
    /// Its state.
    #[serde(default)]
    pub status: ClaimStatus,
}

impl Claim {
    /// Whether it has a volume, or one is reserved for it.
    #[must_use]
    pub fn is_bound(&self) -> bool {
        let has_volume = self.spec.volume_name.as_ref().is_some_and(|name| !name.is_empty());
        has_volume || self.status.phase.as_deref() == Some("Bound")
    }
}

/// The specification of a claim.
#[derive(Deserialize, Default, Debug)]
#[serde(rename_all = "camelCase")]
pub struct ClaimSpec {
    /// Its storage class.
    #[serde(default)]
    pub storage_class_name: Option<String>,
    /// The volume that it is bound to, or is to be.
    #[serde(default)]
    pub volume_name: Option<String>,
    /// Its size.
    #[serde(default)]
    pub resources: Option<Resources>,
}

impl ClaimSpec {
    /// The size that is requested, if one is.
    #[must_use]
    pub fn storage_request(&self) -> Option<&String> {
        self.resources.as_ref()?.requests.as_ref()?.get("storage")
    }
}

/// The size of a claim.
#[derive(Deserialize, Default, Debug)]
pub struct Resources {
    /// The least of each resource.
    #[serde(default)]
    pub requests: Option<BTreeMap<String, String>>,
}

/// The state of a claim.
#[derive(Deserialize, Default, Debug)]
pub struct ClaimStatus {
    /// `Pending`, `Bound` or `Lost`.
    #[serde(default)]
    pub phase: Option<String>,
}

/// A storage class.
#[derive(Deserialize, Debug)]
pub struct StorageClass {
    /// The name of the driver.
    pub provisioner: String,
    /// Parameters of the driver.
    #[serde(default)]
    pub parameters: Option<BTreeMap<String, String>>,
}

/// An inline volume.
#[derive(Deserialize, Debug)]
#[serde(rename_all = "camelCase")]
pub struct Csi {
    /// The name of its driver.
    pub driver: String,
    /// Size and class, for one.
    #[serde(default)]
    pub volume_attributes: Option<BTreeMap<String, String>>,
}

/// Nodes go back as they came, with whatever they have.
#[derive(Deserialize, Serialize, Default, Debug)]
pub struct NodeList {
    /// Metadata of the list itself.
    #[serde(default)]
    pub metadata: Value,
    /// The nodes.
    #[serde(default)]
    pub items: Option<Vec<Value>>,
}

/// The relevant parts of a node.
#[derive(Deserialize, Default, Debug)]
pub struct Node {
    /// Its name and annotations.
    #[serde(default)]
    pub metadata: Metadata,
    /// Its addresses.
    #[serde(default)]
    pub status: NodeStatus,
}

/// A node's.
#[derive(Deserialize, Default, Debug)]
pub struct NodeStatus {
    /// All of them.
    #[serde(default)]
    pub addresses: Option<Vec<Address>>,
}

/// One of a node's addresses.
#[derive(Deserialize, Debug)]
pub struct Address {
    /// Which kind.
    #[serde(rename = "type")]
    pub kind: String,
    /// The address.
    pub address: String,
}

/// Which nodes remain, in the form that they came in, and why others don't.
#[derive(Serialize, Default, Debug)]
#[serde(rename_all = "PascalCase")]
pub struct FilterResult {
    /// Whole nodes.
    pub nodes: Option<NodeList>,
    /// Names of nodes.
    pub node_names: Option<Vec<String>>,
    /// The reasons for the others, by name.
    pub failed_nodes: BTreeMap<String, String>,
    /// Why nothing could be said; empty if it could.
    pub error: String,
}

/// The score of a node.
#[derive(Serialize, PartialEq, Eq, Debug)]
#[serde(rename_all = "PascalCase")]
pub struct HostPriority {
    /// The node.
    pub host: String,
    /// From 0 to 10.
    pub score: i64,
}
