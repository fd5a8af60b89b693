//! Finds the claims of a pod that have no volume yet, as the API server has them.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::Duration;

use blockd_csi_base::error::shown;

use super::cluster::{Cluster, Session, segment};
use super::error::Error;
use super::wire::{Claim, ClaimSpec, Pod, StorageClass};

/// How long all claims of a pod may take: less than half of the five seconds that the scheduler
/// waits for an extender, so that time remains for its nodes.
const CLAIMS_TIME: Duration = Duration::from_secs(2);

/// The storage class of claims that are older than the field.
const CLASS_ANNOTATION: &str = "volume.beta.kubernetes.io/storage-class";

/// The parameter of classes whose volumes are in a volume group, with or without the driver's name.
const VOLUME_GROUP: &str = "volume-group";

/// A claim of the driver that needs a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unbound {
    /// The name of the claim.
    pub claim: String,
    /// The device class, if the storage class names one.
    pub class: Option<String>,
    /// The size, if the claim requests one.
    pub size: Option<String>,
}

/// Reads claims.
#[derive(Debug)]
pub(super) struct Claims {
    cluster: Cluster,
    driver: String,
    /// The parameter of a storage class that names the device class.
    class_parameter: String,
}

impl Claims {
    /// For claims of this driver.
    pub(super) fn new(driver: &str, class_parameter: &str, cluster: Cluster) -> Self {
        let (driver, class_parameter) = (driver.to_owned(), class_parameter.to_owned());
        Self { cluster, driver, class_parameter }
    }

    /// Returns the unbound claims of a pod whose storage class is of the driver, with early and
    /// with late binding. The API server is asked only if the pod has claims.
    ///
    /// # Errors
    /// A claim does not exist, or the API server does not answer, refuses or is late.
    pub(super) async fn unbound(&self, pod: &Pod) -> Result<Vec<Unbound>, Error> {
        let used = used(pod);
        if used.is_empty() {
            return Ok(Vec::new());
        }
        let namespace = match pod.metadata.namespace.as_deref() {
            None | Some("") => "default",
            Some(namespace) => segment("namespace", namespace)?,
        };
        let read = self.read(namespace, used);
        match tokio::time::timeout(CLAIMS_TIME, read).await {
            Ok(result) => result,
            Err(_) => {
                let seconds = CLAIMS_TIME.as_secs();
                Err(self.cluster.failed(format_args!("no answer within {seconds} s")))
            }
        }
    }

    async fn read(
        &self,
        namespace: &str,
        used: BTreeMap<String, Option<&ClaimSpec>>,
    ) -> Result<Vec<Unbound>, Error> {
        let mut session = self.cluster.connect().await?;
        let mut classes = BTreeMap::new();
        let mut unbound = Vec::new();
        for (name, template) in used {
            let name = segment("claim", &name)?;
            let path = format!("/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}");
            let found: Option<Claim> = session.get(&path).await?;
            if found.as_ref().is_some_and(Claim::is_bound) {
                continue;
            }
            let class_of_old = found.as_ref().and_then(|claim| {
                claim.metadata.annotations.as_ref()?.get(CLASS_ANNOTATION).cloned()
            });
            // A claim that is made from a template may not be there yet.
            let spec = found.as_ref().map(|claim| &claim.spec);
            let made = template.filter(|template| template.storage_class_name.is_some());
            let missing = || Error::NotFound {
                what: "claim",
                name: shown(format_args!("{namespace}/{name}")),
            };
            let spec = spec.or(made).ok_or_else(missing)?;
            // Without a storage class nothing is provisioned.
            let Some(class) = class_of_old.or_else(|| spec.storage_class_name.clone()) else {
                continue;
            };
            if class.is_empty() {
                continue;
            }
            let class = match classes.entry(class) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(unknown) => {
                    let class = storage_class(&mut session, unknown.key()).await?;
                    unknown.insert(class)
                }
            };
            // The space of a volume group is that of all its nodes.
            let is_of_node = |class: &&StorageClass| {
                class.provisioner == self.driver && !has_group(&self.driver, class)
            };
            if let Some(class) = class.as_ref().filter(is_of_node) {
                let parameter =
                    class.parameters.as_ref().and_then(|all| all.get(&self.class_parameter));
                unbound.push(Unbound {
                    claim: name.to_owned(),
                    class: parameter.cloned(),
                    size: spec.storage_request().cloned(),
                });
            }
        }
        Ok(unbound)
    }
}

/// Whether volumes of a class are in a volume group, which several nodes reach.
fn has_group(driver: &str, class: &StorageClass) -> bool {
    let own = format!("{driver}/{VOLUME_GROUP}");
    let has = |key: &str| class.parameters.as_ref().is_some_and(|all| all.contains_key(key));
    has(VOLUME_GROUP) || has(&own)
}

/// Returns a storage class, or `None` if there is none of that name: claims for volumes that an
/// administrator made may name one that does not exist.
async fn storage_class(session: &mut Session, name: &str) -> Result<Option<StorageClass>, Error> {
    let name = segment("storageClassName", name)?;
    session.get(&format!("/apis/storage.k8s.io/v1/storageclasses/{name}")).await
}

/// Names of the claims that a pod uses, each once, and the template of a generic ephemeral volume.
fn used(pod: &Pod) -> BTreeMap<String, Option<&ClaimSpec>> {
    let mut used = BTreeMap::new();
    for volume in pod.spec.volumes.iter().flatten() {
        if let Some(source) = &volume.persistent_volume_claim {
            used.entry(source.claim_name.clone()).or_insert(None);
        }
        if let Some(source) = &volume.ephemeral {
            let pod = pod.metadata.name.as_deref().unwrap_or_default();
            let template = source.volume_claim_template.as_ref().map(|template| &template.spec);
            used.insert(format!("{pod}-{}", volume.name), template);
        }
    }
    used
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_claim_of_a_pod_is_used_once_and_a_template_names_its_claim() {
        let spec =
            json!({ "storageClassName": "s", "resources": { "requests": { "storage": "1Gi" } } });
        let pod = json!({
            "metadata": { "name": "web" },
            "spec": { "volumes": [
                { "name": "a", "persistentVolumeClaim": { "claimName": "data" } },
                { "name": "b", "persistentVolumeClaim": { "claimName": "data", "readOnly": true } },
                { "name": "c", "ephemeral": { "volumeClaimTemplate": { "spec": spec } } },
                { "name": "d", "emptyDir": {} },
            ] },
        });
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let used = used(&pod);
        assert_eq!(used.keys().collect::<Vec<_>>(), ["data", "web-c"]);
        assert_eq!(used["web-c"].unwrap().storage_request().unwrap(), "1Gi");
        assert!(used["data"].is_none());
    }

    #[test]
    fn classes_of_a_volume_group_take_no_space_of_a_node() {
        let class = |key: &str| {
            let class = json!({ "provisioner": "d", "parameters": { key: "san" } });
            serde_json::from_value::<StorageClass>(class).unwrap()
        };
        assert!(has_group("d", &class("volume-group")) && has_group("d", &class("d/volume-group")));
        assert!(!has_group("d", &class("e/volume-group")) && !has_group("d", &class("d/iops")));
    }

    #[test]
    fn a_claim_is_bound_when_it_has_a_volume() {
        let is_bound = |claim| serde_json::from_value::<Claim>(claim).unwrap().is_bound();
        assert!(!is_bound(json!({})));
        assert!(!is_bound(
            json!({ "spec": { "volumeName": "" }, "status": { "phase": "Pending" } })
        ));
        assert!(is_bound(json!({ "status": { "phase": "Bound" } })));
        assert!(is_bound(
            json!({ "spec": { "volumeName": "v" }, "status": { "phase": "Pending" } })
        ));
    }
}
