//! The demand of a pod: the bytes of its volumes, by class.

use std::collections::BTreeMap;

use blockd_csi_base::bytes::Bytes;
use blockd_csi_base::quantity;

use super::Plugin;
use super::claims::Unbound;
use super::error::Error;
use super::wire::Pod;

/// Bytes by class. A sum of sizes may be more than any node can have.
pub type Demand = BTreeMap<String, u128>;

/// Reads pods.
#[derive(Clone, Debug)]
pub struct Reader {
    driver: String,
    prefix: String,
    default_class: String,
    default_size: Bytes,
}

impl Reader {
    /// For the volumes of this driver.
    #[must_use]
    pub fn new(driver: &str, plugin: &Plugin) -> Self {
        Self {
            driver: driver.to_owned(),
            prefix: annotation(driver, ""),
            default_class: plugin.default_class.clone(),
            default_size: plugin.default_size,
        }
    }

    /// Returns the bytes that a pod needs: those of its inline volumes and of its unbound claims.
    /// Sizes are summed as they are; a volume without a size, or with size 0, has the default size.
    /// An annotation of the pod for a class stands for the claims of that class, and counts where
    /// it is more than their sum.
    ///
    /// # Errors
    /// A size can't be read: names it, and what is allowed.
    pub fn read(&self, pod: &Pod, claims: &[Unbound]) -> Result<Demand, Error> {
        let mut demand = Demand::new();
        for volume in pod.spec.volumes.iter().flatten() {
            let Some(csi) = volume.csi.as_ref().filter(|csi| csi.driver == self.driver) else {
                continue;
            };
            let attribute = |key: &str| csi.volume_attributes.as_ref()?.get(key);
            let size = match attribute("size").filter(|text| !text.is_empty()) {
                Some(text) => quantity::size(&format!("size of volume {}", volume.name), text)?,
                None => Bytes::ZERO,
            };
            *demand.entry(self.class(attribute("class"))).or_default() += self.bytes(size);
        }
        for (class, bytes) in self.claimed(pod, claims)? {
            *demand.entry(class).or_default() += bytes;
        }
        Ok(demand)
    }

    /// The bytes of the claims: by their requests, or by annotations where those are more.
    fn claimed(&self, pod: &Pod, claims: &[Unbound]) -> Result<Demand, Error> {
        let mut claimed = Demand::new();
        for claim in claims {
            let size = match &claim.size {
                Some(text) => quantity::of_object(&format!("size of claim {}", claim.claim), text)?,
                None => Bytes::ZERO,
            };
            *claimed.entry(self.class(claim.class.as_ref())).or_default() += self.bytes(size);
        }
        for (key, text) in pod.metadata.annotations.iter().flatten() {
            let Some(class) = key.strip_prefix(&self.prefix) else { continue };
            let size = match text.as_str() {
                "" => Bytes::ZERO,
                text => quantity::size(&format!("annotation {key}"), text)?,
            };
            let bytes = claimed.entry(class.to_owned()).or_default();
            *bytes = self.bytes(size).max(*bytes);
        }
        Ok(claimed)
    }

    fn class(&self, named: Option<&String>) -> String {
        named.filter(|class| !class.is_empty()).unwrap_or(&self.default_class).clone()
    }

    fn bytes(&self, size: Bytes) -> u128 {
        if size.is_zero() { self.default_size.wide() } else { size.wide() }
    }
}

/// The annotation, of pods and of nodes, that has bytes of a class.
#[must_use]
pub fn annotation(driver: &str, class: &str) -> String {
    format!("capacity.{driver}/{class}")
}

#[cfg(test)]
mod tests {
    use blockd_csi_base::options::DEFAULT_DRIVER;
    use proptest::prelude::{prop_assert_eq, proptest};
    use serde_json::{Value, json};

    use super::*;

    const GIB: u128 = 1 << 30;

    fn reader() -> Reader {
        let plugin = Plugin {
            class_parameter: "csi.blockd.io/device-class".to_owned(),
            default_class: "thin".to_owned(),
            default_size: Bytes::constant(1_073_741_824),
        };
        Reader::new(DEFAULT_DRIVER, &plugin)
    }

    fn inline(attributes: Value) -> Value {
        json!({ "name": "v", "csi": { "driver": DEFAULT_DRIVER, "volumeAttributes": attributes } })
    }

    fn read(pod: Value) -> Result<Demand, Error> {
        reader().read(&serde_json::from_value(pod).unwrap(), &[])
    }

    fn claim(class: Option<&str>, size: Option<&str>) -> Unbound {
        let owned = |text: Option<&str>| text.map(ToOwned::to_owned);
        Unbound { claim: "data".to_owned(), class: owned(class), size: owned(size) }
    }

    /// Row: T26.
    #[test]
    fn sizes_of_claims_and_inline_volumes_are_summed_in_bytes_by_class() {
        let pod = json!({
            "metadata": { "annotations": {
                "capacity.csi.blockd.io/thin": "1",
                "capacity.csi.blockd.io/thick": "500Mi",
                "capacity.other.example.com/thin": "9Gi",
                "csi.blockd.io/thin": "9Gi",
            } },
            "spec": { "volumes": [
                inline(json!({ "size": "524288001" })),
                inline(json!({ "size": "1.5Gi", "class": "thick" })),
                inline(json!({ "size": "10", "class": "thin" })),
                { "name": "of-another", "csi": { "driver": "other.example.com" } },
                { "name": "a-claim", "persistentVolumeClaim": { "claimName": "data" } },
                { "name": "scratch", "emptyDir": {} },
            ] },
        });
        let expected = [("thin", 524_288_012), ("thick", 524_288_000 + 3 * GIB / 2)];
        let expected: Demand = expected.map(|(class, sum)| (class.to_owned(), sum)).into();
        assert_eq!(read(pod).unwrap(), expected);
    }

    /// Row: T26.
    #[test]
    fn without_a_size_or_with_zero_it_is_the_default_size() {
        for attributes in [json!(null), json!({}), json!({ "size": "" }), json!({ "size": "0" })] {
            let pod = json!({ "spec": { "volumes": [inline(attributes)] } });
            assert_eq!(read(pod).unwrap(), [("thin".to_owned(), GIB)].into());
        }
        for value in ["", "0", "0Gi"] {
            let pod =
                json!({ "metadata": { "annotations": { "capacity.csi.blockd.io/thick": value } } });
            assert_eq!(read(pod).unwrap(), [("thick".to_owned(), GIB)].into());
        }
    }

    /// Row: T26.
    #[test]
    fn unbound_claims_add_to_inline_volumes_and_an_annotation_counts_where_it_is_more() {
        let claims = [
            claim(None, Some("1")),
            claim(Some("thin"), Some("524288000")),
            claim(Some("thick"), Some("1e9")),
            claim(Some("thick"), None),
            claim(Some(""), Some("0")),
        ];
        let demand = |annotations: Value| {
            let pod = json!({
                "metadata": { "annotations": annotations },
                "spec": { "volumes": [inline(json!({ "size": "7" }))] },
            });
            let demand = reader().read(&serde_json::from_value(pod).unwrap(), &claims).unwrap();
            (demand["thin"], demand["thick"])
        };
        let (thin, thick) = (524_288_001 + GIB, 1_000_000_000 + GIB);
        assert_eq!(demand(json!({})), (7 + thin, thick));
        let less =
            json!({ "capacity.csi.blockd.io/thin": "5", "capacity.csi.blockd.io/thick": "" });
        assert_eq!(demand(less), (7 + thin, thick));
        assert_eq!(demand(json!({ "capacity.csi.blockd.io/thin": "9Gi" })), (7 + 9 * GIB, thick));
    }

    #[test]
    fn a_pod_without_blockd_volumes_has_no_demand() {
        for pod in [json!({}), json!({ "metadata": {}, "spec": { "volumes": null } })] {
            assert_eq!(read(pod).unwrap(), Demand::new());
        }
    }

    #[test]
    fn invalid_sizes_are_refused_by_name() {
        let pod = json!({ "spec": { "volumes": [inline(json!({ "size": "big" }))] } });
        let error = read(pod).unwrap_err().to_string();
        assert!(error.starts_with("size of volume v is big: must be "), "{error}");
        let pod = json!({ "metadata": { "annotations": { "capacity.csi.blockd.io/a": "-1" } } });
        let error = read(pod).unwrap_err().to_string();
        assert!(error.starts_with("annotation capacity.csi.blockd.io/a is -1"), "{error}");
        let claims = [claim(None, Some("-1"))];
        let error = reader().read(&Pod::default(), &claims).unwrap_err().to_string();
        assert!(error.starts_with("size of claim data is -1"), "{error}");
    }

    proptest! {
        /// Row: T26.
        #[test]
        fn no_byte_is_lost_in_a_sum(
            sizes in proptest::collection::vec(1..=i64::MAX, 0..20),
        ) {
            let volumes: Vec<Value> =
                sizes.iter().map(|size| inline(json!({ "size": size.to_string() }))).collect();
            let demand = read(json!({ "spec": { "volumes": volumes } })).unwrap();
            let sum: u128 = sizes.iter().map(|size| u128::from(size.unsigned_abs())).sum();
            prop_assert_eq!(demand.get("thin").copied().unwrap_or_default(), sum);
            let claims: Vec<Unbound> =
                sizes.iter().map(|size| claim(Some("thick"), Some(&size.to_string()))).collect();
            let demand = reader().read(&Pod::default(), &claims).unwrap();
            prop_assert_eq!(demand.get("thick").copied().unwrap_or_default(), sum);
        }
    }
}
