//! Messages of the interface as JSON, by its description: names of fields as in the specification,
//! integers as numbers, enums by their names, fields with their default left out. Secrets are
//! replaced.

use blockd_csi_base::error::Invalid;
use prost::Message as _;
use prost_reflect::{
    DescriptorPool, DynamicMessage, ExtensionDescriptor, FieldDescriptor, Kind, MapKey,
    MessageDescriptor, MethodDescriptor, ReflectMessage as _, Value,
};
use serde_json::{Map, Value as Json};

/// Stands in place of a secret.
pub const REMOVED: &str = "<removed>";

/// The key of a context under which the kubelet passes tokens of service accounts.
const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

/// Messages that are shown as the value that they wrap.
const WRAPPERS: [&str; 2] = ["google.protobuf.BoolValue", "google.protobuf.Int64Value"];

/// Why a message is none.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The bytes are no such message.
    #[error("no {name}: {source}")]
    Bytes {
        /// The message's name.
        name: String,
        /// The reason.
        source: prost::DecodeError,
    },
    /// The JSON is no such message.
    #[error(transparent)]
    Json(#[from] Invalid),
}

/// The description of the interface.
#[derive(Clone, Debug)]
pub struct Schema {
    pool: DescriptorPool,
    secret: ExtensionDescriptor,
}

impl Default for Schema {
    fn default() -> Self {
        let bytes: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/csi.bin"));
        let pool = DescriptorPool::decode(bytes).expect("the build has compiled it");
        let secret = pool.get_extension_by_name("csi.v1.csi_secret").expect("it is in csi.proto");
        Self { pool, secret }
    }
}

impl Schema {
    /// The method of a path, as in `/csi.v1.Identity/Probe`.
    #[must_use]
    pub fn method(&self, path: &str) -> Option<MethodDescriptor> {
        let (service, method) = path.strip_prefix('/')?.split_once('/')?;
        let service = self.pool.get_service_by_name(service)?;
        service.methods().find(|one| one.name() == method)
    }

    /// Reads a message, without secrets. Fields that the description lacks are left out.
    ///
    /// # Errors
    /// The bytes are no such message.
    pub fn to_json(&self, kind: &MessageDescriptor, bytes: &[u8]) -> Result<Json, Error> {
        let message = DynamicMessage::decode(kind.clone(), bytes)
            .map_err(|source| Error::Bytes { name: kind.full_name().to_owned(), source })?;
        Ok(self.shown(&message))
    }

    fn shown(&self, message: &DynamicMessage) -> Json {
        let kind = message.descriptor();
        if WRAPPERS.contains(&kind.full_name()) {
            return message.get_field_by_name("value").map_or(Json::Null, |one| self.value(&one));
        }
        let present = kind.fields().filter(|field| message.has_field(field));
        let fields = present.map(|field| {
            let value = message.get_field(&field);
            let shown = match (&*value, field.name()) {
                _ if self.is_secret(&field) => removed(&value),
                (Value::List(flags), "mount_flags") => flags.iter().map(flag).collect(),
                (Value::EnumNumber(number), _) => name_of(&field, *number),
                (Value::List(all), _) => all.iter().map(|one| self.value(one)).collect(),
                (one, _) => self.value(one),
            };
            (field.name().to_owned(), shown)
        });
        Json::Object(fields.collect())
    }

    fn value(&self, value: &Value) -> Json {
        match value {
            Value::Bool(it) => (*it).into(),
            Value::I32(it) => (*it).into(),
            Value::I64(it) => (*it).into(),
            Value::U32(it) => (*it).into(),
            Value::U64(it) => (*it).into(),
            Value::EnumNumber(it) => (*it).into(),
            Value::F32(it) => (*it).into(),
            Value::F64(it) => (*it).into(),
            Value::String(it) => it.clone().into(),
            // The interface has no field of bytes: they are shown by their number.
            Value::Bytes(it) => it.len().into(),
            Value::Message(it) => self.shown(it),
            Value::List(all) => all.iter().map(|one| self.value(one)).collect(),
            Value::Map(all) => {
                let pairs = all.iter().map(|(key, value)| {
                    let key = key_text(key);
                    let shown = if key == TOKENS { REMOVED.into() } else { self.value(value) };
                    (key, shown)
                });
                Json::Object(pairs.collect())
            }
        }
    }

    fn is_secret(&self, field: &FieldDescriptor) -> bool {
        field.options().get_extension(&self.secret).as_bool() == Some(true)
    }
}

/// A secret: the keys of a map stay.
fn removed(value: &Value) -> Json {
    let Value::Map(all) = value else { return REMOVED.into() };
    Json::Object(all.keys().map(|key| (key_text(key), REMOVED.into())).collect())
}

/// A flag of mount, whose value may be a secret by the specification.
fn flag(value: &Value) -> Json {
    let text = value.as_str().unwrap_or_default();
    match text.split_once('=') {
        Some((name, _)) => format!("{name}={REMOVED}").into(),
        None => text.into(),
    }
}

fn key_text(key: &MapKey) -> String {
    match key {
        MapKey::String(text) => text.clone(),
        MapKey::Bool(it) => it.to_string(),
        MapKey::I32(it) => it.to_string(),
        MapKey::I64(it) => it.to_string(),
        MapKey::U32(it) => it.to_string(),
        MapKey::U64(it) => it.to_string(),
    }
}

fn name_of(field: &FieldDescriptor, number: i32) -> Json {
    let kind = field.kind();
    let named = kind.as_enum().and_then(|one| one.get_value(number));
    named.map_or_else(|| number.into(), |one| one.name().into())
}

/// Makes a message of JSON, for a replay.
///
/// # Errors
/// A field is not one of the message, or its value not of its type.
pub fn to_bytes(kind: &MessageDescriptor, json: &Json) -> Result<Vec<u8>, Error> {
    Ok(message(kind, json)?.encode_to_vec())
}

fn message(kind: &MessageDescriptor, json: &Json) -> Result<DynamicMessage, Error> {
    let mut made = DynamicMessage::new(kind.clone());
    let wrapped = WRAPPERS.contains(&kind.full_name());
    let fields: Map<String, Json> = match json {
        Json::Object(fields) => fields.clone(),
        value if wrapped => Map::from_iter([("value".to_owned(), value.clone())]),
        _ => return Err(wrong(kind.full_name(), json, "an object")),
    };
    for (name, value) in &fields {
        let full = format!("{}.{name}", kind.full_name());
        let field = kind.get_field_by_name(name);
        let field = field.ok_or_else(|| wrong(&full, value, "a field of the interface"))?;
        let made_value = if field.is_map() {
            let pairs = value.as_object().ok_or_else(|| wrong(&full, value, "an object"))?;
            let pairs = pairs.iter().map(|(key, value)| {
                let text = value.as_str().ok_or_else(|| wrong(&full, value, "of strings"))?;
                Ok((MapKey::String(key.clone()), Value::String(text.to_owned())))
            });
            Value::Map(pairs.collect::<Result<_, Error>>()?)
        } else if field.is_list() {
            let all = value.as_array().ok_or_else(|| wrong(&full, value, "a list"))?;
            let all = all.iter().map(|one| single(&field, &full, one));
            Value::List(all.collect::<Result<_, Error>>()?)
        } else {
            single(&field, &full, value)?
        };
        made.set_field(&field, made_value);
    }
    Ok(made)
}

fn single(field: &FieldDescriptor, name: &str, json: &Json) -> Result<Value, Error> {
    let made = match field.kind() {
        Kind::Message(kind) => Some(Value::Message(message(&kind, json)?)),
        Kind::Bool => json.as_bool().map(Value::Bool),
        Kind::String => json.as_str().map(|text| Value::String(text.to_owned())),
        Kind::Int64 => json.as_i64().map(Value::I64),
        Kind::Int32 => json.as_i64().and_then(|it| i32::try_from(it).ok()).map(Value::I32),
        Kind::Enum(kind) => {
            let number = json.as_i64().and_then(|it| i32::try_from(it).ok());
            let named = json.as_str().and_then(|text| kind.get_value_by_name(text));
            named.map(|one| one.number()).or(number).map(Value::EnumNumber)
        }
        _ => None,
    };
    made.ok_or_else(|| wrong(name, json, &format!("{:?}", field.kind())))
}

fn wrong(field: &str, value: &Json, allowed: &str) -> Error {
    Invalid::new(field, value, allowed).into()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_message_is_the_same_again_without_its_secrets() {
        let schema = Schema::default();
        let method = schema.method("/csi.v1.Controller/CreateVolume").unwrap();
        let mut request = json!({
            "name": "pvc-1",
            "capacity_range": { "required_bytes": 1_i64 << 40 },
            "volume_capabilities": [{
                "mount": { "fs_type": "xfs", "mount_flags": ["noatime", "key=word"] },
                "access_mode": { "mode": "SINGLE_NODE_WRITER" },
            }],
            "secrets": { "key": "word" },
            "accessibility_requirements": { "requisite": [{ "segments": { "a": "b" } }] },
        });
        let bytes = to_bytes(&method.input(), &request).unwrap();
        request["secrets"]["key"] = REMOVED.into();
        request["volume_capabilities"][0]["mount"]["mount_flags"][1] = "key=<removed>".into();
        assert_eq!(schema.to_json(&method.input(), &bytes).unwrap(), request);
        let answer = json!({ "available_capacity": 5, "maximum_volume_size": 7 });
        let method = schema.method("/csi.v1.Controller/GetCapacity").unwrap();
        let bytes = to_bytes(&method.output(), &answer).unwrap();
        assert_eq!(schema.to_json(&method.output(), &bytes).unwrap(), answer);
    }

    #[test]
    fn all_fields_that_the_interface_marks_are_secrets() {
        let schema = Schema::default();
        let fields = schema.pool.all_messages().flat_map(|one| one.fields().collect::<Vec<_>>());
        let secret: Vec<_> = fields.filter(|field| schema.is_secret(field)).collect();
        // In the specification's 1.12.
        assert_eq!(secret.len(), 19);
        assert!(secret.iter().all(|field| field.name() == "secrets"));
    }

    #[test]
    fn tokens_of_service_accounts_are_removed_from_contexts() {
        let schema = Schema::default();
        let method = schema.method("/csi.v1.Node/NodePublishVolume").unwrap();
        let request = json!({ "volume_context": { TOKENS: "t", "a": "b" } });
        let bytes = to_bytes(&method.input(), &request).unwrap();
        let shown = schema.to_json(&method.input(), &bytes).unwrap();
        assert_eq!(shown, json!({ "volume_context": { TOKENS: REMOVED, "a": "b" } }));
    }

    #[test]
    fn bad_json_names_the_field() {
        let schema = Schema::default();
        let kind = schema.method("/csi.v1.Controller/CreateVolume").unwrap().input();
        for (request, field) in [
            (json!({ "nam": "x" }), "csi.v1.CreateVolumeRequest.nam is "),
            (json!({ "name": 1 }), "csi.v1.CreateVolumeRequest.name is "),
            (json!({ "secrets": { "a": 1 } }), "csi.v1.CreateVolumeRequest.secrets is "),
            (json!([]), "csi.v1.CreateVolumeRequest is "),
        ] {
            let error = to_bytes(&kind, &request).unwrap_err().to_string();
            assert!(error.starts_with(field), "{error}");
        }
    }
}
