//! Labels that the plugin gives its volumes: facts that it has to know later, and the names of the
//! claim and its volume, for people who look at the node.

use std::collections::{BTreeMap, HashMap};

use blockd_csi_base::bytes::Bytes;

use crate::parameters::Keys;
use crate::pmem;
use crate::sizes::LUKS_HEADER;

/// Labels of a volume.
pub type Labels = BTreeMap<String, String>;

/// The label with the name of a volume's claim.
pub const CLAIM_NAME: &str = "csi.storage.k8s.io/pvc-name";

/// The label with the namespace of a volume's claim.
pub const CLAIM_NAMESPACE: &str = "csi.storage.k8s.io/pvc-namespace";

/// The label with the name of a volume's PersistentVolume.
pub const PV_NAME: &str = "csi.storage.k8s.io/pv-name";

/// Parameters that the provisioner adds with `--extra-create-metadata`, and the labels that have
/// their values: the key of a label has one slash.
const OF_CLAIMS: [(&str, &str); 3] = [
    ("csi.storage.k8s.io/pvc/name", CLAIM_NAME),
    ("csi.storage.k8s.io/pvc/namespace", CLAIM_NAMESPACE),
    ("csi.storage.k8s.io/pv/name", PV_NAME),
];

/// Bytes of a value: a limit of the daemon.
const MAX_VALUE: usize = 256;

/// The labels of a volume of this class, with these parameters of its storage class and this part
/// of its context. What can't be a label is left out: no volume fails for it.
#[must_use]
pub fn of_volume(
    keys: &Keys,
    class: &str,
    parameters: &HashMap<String, String>,
    context: &HashMap<String, String>,
) -> Labels {
    let mut labels = Labels::from([(keys.device_class(), class.to_owned())]);
    let of_claims = OF_CLAIMS.iter().filter_map(|(parameter, key)| {
        parameters.get(*parameter).map(|value| ((*key).to_owned(), value.clone()))
    });
    labels.extend(of_claims);
    labels.extend(context.iter().map(|(key, value)| (key.clone(), value.clone())));
    labels.retain(|key, value| is_allowed(key, value));
    labels
}

/// The part of a volume's context that its labels hold.
#[must_use]
pub fn context(keys: &Keys, labels: &Labels) -> HashMap<String, String> {
    let of_context = [
        keys.mkfs_options(),
        keys.fs_type(),
        keys.encryption(),
        keys.front_end(),
        keys.of_context(pmem::USAGE),
    ];
    let is_of_context = |key: &String| of_context.contains(key);
    let found = labels.iter().filter(|(key, _)| is_of_context(key));
    found.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// The labels of a snapshot: whether it is encrypted, which is all that its clones have to know.
#[must_use]
pub fn of_snapshot(keys: &Keys, source: &Labels) -> Labels {
    let kind = source.get_key_value(&keys.encryption());
    kind.map(|(key, kind)| (key.clone(), kind.clone())).into_iter().collect()
}

/// Bytes of a volume or snapshot with these labels before its data: the header, if it is encrypted.
#[must_use]
pub fn header(keys: &Keys, labels: &Labels) -> Bytes {
    if labels.contains_key(&keys.encryption()) { LUKS_HEADER } else { Bytes::ZERO }
}

/// Whether the daemon takes it as a label. The driver's name may have capital letters, and a prefix
/// none.
fn is_allowed(key: &str, value: &str) -> bool {
    let prefix = key.split('/').next().unwrap_or_default();
    let is_prefix = !prefix.bytes().any(|byte| byte.is_ascii_uppercase());
    let is_value = |byte: u8| byte == b' ' || byte.is_ascii_graphic();
    is_prefix && value.len() <= MAX_VALUE && value.bytes().all(is_value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_a_label_is_left_out() {
        let map = |pairs: &[(&str, &str)]| -> HashMap<String, String> {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let parameters = map(&[
            ("csi.storage.k8s.io/pvc/name", "claim"),
            ("csi.storage.k8s.io/pvc/namespace", "a\nb"),
            ("csi.storage.k8s.io/fstype", "xfs"),
            ("d.io/iops", "5"),
        ]);
        let context = map(&[("d.io/mkfs-options", "-m a=1"), ("d.io/fstype", "xfs")]);
        let keys = Keys::new("d.io");
        let labels = of_volume(&keys, "fast", &parameters, &context);
        let expected = [
            ("csi.storage.k8s.io/pvc-name", "claim"),
            ("d.io/device-class", "fast"),
            ("d.io/fstype", "xfs"),
            ("d.io/mkfs-options", "-m a=1"),
        ];
        let expected = expected.map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(labels, Labels::from(expected));
        assert_eq!(super::context(&keys, &labels), context);
        assert!(of_volume(&Keys::new("D.io"), "fast", &map(&[]), &map(&[])).is_empty());
    }
}
