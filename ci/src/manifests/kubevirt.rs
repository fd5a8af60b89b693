//! Objects of KubeVirt's importer. The API's schemas do not have them: these are the fields of
//! `cdi.kubevirt.io/v1beta1` that the examples may use, as its definitions name them.

use serde_json::Value;

const VERSION: &str = "cdi.kubevirt.io/v1beta1";

/// Fields below `spec` by kind, with all below those that end with a star.
const FIELDS: [(&str, &[&str]); 3] = [
    (
        "StorageProfile",
        &[
            "claimPropertySets.accessModes",
            "claimPropertySets.volumeMode",
            "cloneStrategy",
            "dataImportCronSourceFormat",
            "snapshotClass",
        ],
    ),
    (
        "DataImportCron",
        &[
            "schedule",
            "managedDataSource",
            "garbageCollect",
            "importsToKeep",
            "retentionPolicy",
            "template.spec.source.registry.url",
            "template.spec.storage.*",
        ],
    ),
    ("DataVolume", &["sourceRef.kind", "sourceRef.name", "sourceRef.namespace", "storage.*"]),
];

/// Fields below `storage`.
const STORAGE: [&str; 5] =
    ["accessModes", "volumeMode", "storageClassName", "resources", "volumeName"];

/// Fields with the values that they may have.
const VALUES: [(&str, &[&str]); 4] = [
    ("cloneStrategy", &["copy", "snapshot", "csi-clone"]),
    ("dataImportCronSourceFormat", &["snapshot", "pvc"]),
    ("garbageCollect", &["Outdated", "Never"]),
    // Volumes of one node.
    ("accessModes", &["ReadWriteOnce", "ReadWriteOncePod"]),
];

/// Fields and values that the importer does not have, or this driver does not serve.
pub(super) fn problems(objects: &[Value]) -> Vec<String> {
    let mut problems = Vec::new();
    for object in objects {
        let kind = object["kind"].as_str().unwrap_or_default();
        let Some((_, fields)) = FIELDS.iter().find(|(known, _)| *known == kind) else { continue };
        if object["apiVersion"] != VERSION {
            problems.push(format!("{kind}: apiVersion is not {VERSION}"));
        }
        let mut found = Vec::new();
        leaves("", &object["spec"], &mut found);
        for (path, value) in found {
            let is_known = |field: &&&str| match field.strip_suffix('*') {
                Some(above) => path.strip_prefix(above).is_some_and(|rest| {
                    STORAGE.contains(&rest.split('.').next().unwrap_or_default())
                }),
                None => **field == path,
            };
            if fields.iter().find(is_known).is_none() {
                problems.push(format!("{kind} has no field spec.{path}"));
            }
            let name = path.rsplit('.').next().unwrap_or_default();
            let allowed = VALUES.iter().find(|(field, _)| *field == name);
            if allowed.is_some_and(|(_, values)| !values.contains(&value.as_str())) {
                problems.push(format!("{kind}: spec.{path} is {value}"));
            }
        }
    }
    problems
}

/// The values of an object and their paths, without the numbers of items.
fn leaves(path: &str, value: &Value, found: &mut Vec<(String, String)>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                leaves(&path, value, found);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| leaves(path, item, found)),
        Value::String(text) => found.push((path.to_owned(), text.clone())),
        other => found.push((path.to_owned(), other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_and_values_that_are_not_there_are_named() {
        let mut object = json!({
            "apiVersion": VERSION,
            "kind": "StorageProfile",
            "spec": {
                "claimPropertySets": [{"accessModes": ["ReadWriteOnce"], "volumeMode": "Block"}],
                "cloneStrategy": "csi-clone",
            },
        });
        assert_eq!(problems(&[object.clone()]), [""; 0]);
        object["apiVersion"] = json!("cdi.kubevirt.io/v1");
        object["spec"]["cloneStrategy"] = json!("fast");
        object["spec"]["claimPropertySets"][0]["accessModes"] = json!(["ReadWriteMany"]);
        object["spec"]["cloneStratgy"] = json!("copy");
        let found = problems(&[object]);
        assert_eq!(found.len(), 4, "{found:?}");
        assert!(found.contains(&"StorageProfile has no field spec.cloneStratgy".to_owned()));
        let volume = json!({
            "apiVersion": VERSION,
            "kind": "DataVolume",
            "spec": {"storage": {"size": "1Gi", "resources": {"requests": {"storage": "1Gi"}}}},
        });
        assert_eq!(problems(&[volume]), ["DataVolume has no field spec.storage.size"]);
    }
}
