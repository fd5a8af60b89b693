//! Errors of the mapper and of persistent memory as users see them.

use std::io;

use blockd_mapper::error::MapperError;
use blockd_mapper::format::labels::{MAX_LABELS, MAX_TEXT};
use blockd_mapper::format::{InvalidLabel, InvalidName};
use blockd_pmem::platform::PlatformError;
use blockd_pmem::platform::choose::{NoRoom, Reason, Refusal};

use super::{Error, shown};

impl From<InvalidLabel> for Error {
    /// Names the label and its limit.
    fn from(error: InvalidLabel) -> Self {
        let of = |part: &str, key: &str| format!("{part} {}", shown(key));
        match error {
            InvalidLabel::Key { key, problem } => Self::invalid("key of a label", key, problem),
            InvalidLabel::Value { key, value, problem } => {
                Self::invalid(of("label", &key), value, problem)
            }
            InvalidLabel::Twice { key } => Self::invalid("label", key, "there once"),
            InvalidLabel::TooMany { key, count } => {
                let allowed = format!("at most {MAX_LABELS}");
                Self::invalid(of("number of labels with", &key), count, allowed)
            }
            InvalidLabel::TooLong { key, bytes } => {
                let allowed = format!("at most {MAX_TEXT} bytes together");
                Self::invalid(of("size of all labels with", &key), bytes, allowed)
            }
        }
    }
}

impl From<MapperError> for Error {
    fn from(error: MapperError) -> Self {
        let text = error.to_string();
        match error {
            MapperError::Invalid { field, value, allowed } => Self::invalid(field, value, allowed),
            MapperError::Name(InvalidName { name, problem }) => {
                Self::invalid("name", name, problem.trim_start_matches("must "))
            }
            MapperError::Label(label) => Self::from(label),
            MapperError::DeviceSize { name, size, allowed } => {
                Self::invalid(format!("size of {name}"), size, allowed)
            }
            MapperError::NoVolume(name) => Self::not_found("volume", &name),
            MapperError::Exists { name, field, existing, asked } => Self::Exists {
                what: "volume",
                name: shown(name),
                field: field.to_owned(),
                existing: existing.to_string(),
                asked: asked.to_string(),
            },
            MapperError::GroupPartly { existing, missing } => Self::in_use(
                format!("snapshot {}", shown(existing)),
                format!("exists, and {} does not: a group is one cut", shown(missing)),
            ),
            MapperError::GroupApart { first, other } => Self::in_use(
                format!("snapshot {}", shown(first)),
                format!("exists, and {} was taken at another time", shown(other)),
            ),
            MapperError::OtherFamily { one, other } => Self::in_use(
                format!("volume {}", shown(one)),
                format!("is of another family than {}", shown(other)),
            ),
            MapperError::GroupTwice { what, which } => Self::invalid(what, which, "each once"),
            MapperError::Unsuitable { volume, problem } => {
                Self::in_use(format!("volume {volume}:"), problem)
            }
            MapperError::TooSmall { size, least, why } => {
                Self::out_of_range("size", size, format!("at least {least} bytes {why}"))
            }
            MapperError::NoSpace { needed, free } => {
                Self::NoSpace { what: "pool".to_owned(), needed, free }
            }
            MapperError::ReadOnly => Self::in_use("pool", "is read-only"),
            MapperError::NoRingMemory => Self::io("delta ring", io::ErrorKind::StorageFull.into()),
            MapperError::Limit { what, limit } => {
                Self::in_use(what, format!("are at their limit of {limit}"))
            }
            MapperError::OutOfRange { .. } => {
                Self::Unexpected { what: "request".to_owned(), problem: text }
            }
            MapperError::Format(_)
            | MapperError::Device { .. }
            | MapperError::Unsupported { .. } => {
                Self::Corrupt { what: "pool".to_owned(), problem: text }
            }
            MapperError::RingLost { .. } => Self::InUse { what: "pool:".to_owned(), problem: text },
            MapperError::Io { .. } | MapperError::Failed(_) => {
                Self::io("pool", io::Error::other(text))
            }
            MapperError::ClaimLost { .. } => Self::in_use("pool", error.to_string()),
            MapperError::Closed => Self::in_use("pool", "is closed"),
            _ => Self::Unexpected { what: "pool".to_owned(), problem: text },
        }
    }
}

impl From<PlatformError> for Error {
    fn from(error: PlatformError) -> Self {
        let text = error.to_string();
        match error {
            PlatformError::Read { source, .. }
            | PlatformError::Write { source, .. }
            | PlatformError::Device { source, .. } => Self::io(text, source),
            PlatformError::Malformed { path, .. } => {
                Self::Corrupt { what: path.display().to_string(), problem: text }
            }
            PlatformError::Invalid { field, value, allowed } => {
                Self::invalid(field, value, allowed)
            }
            PlatformError::NoRoom(refused) => of_no_room(&refused),
            PlatformError::InUse { what, problem } => Self::in_use(what, problem),
            PlatformError::NotFound { what, name } => Self::not_found(what, &name),
            PlatformError::Unsupported { what, problem } => {
                Self::in_use(format!("{what}:"), problem)
            }
            PlatformError::NotDone { path, .. } => {
                Self::Unexpected { what: path.display().to_string(), problem: text }
            }
            PlatformError::NotTakenBack { error, after } => {
                let problem = format!("and taking it back failed: {}", after.text());
                Self::Unexpected { what: error.text(), problem }
            }
        }
    }
}

/// An error that names the remedy: more space, or less fragmented space.
fn of_no_room(refused: &NoRoom) -> Error {
    let what = match refused.refusals.as_slice() {
        [one] => format!("region {}", one.region),
        _ => format!("persistent memory ({refused})"),
    };
    let by = |reason: Reason| refused.refusals.iter().filter(move |one| one.reason == reason);
    if let Some(one) = by(Reason::NotContiguous).max_by_key(|one| one.largest) {
        let Refusal { needed, free, largest, .. } = *one;
        return Error::NoPiece { what, needed, free, largest };
    }
    match by(Reason::NotEnough).max_by_key(|one| one.free) {
        Some(one) => Error::NoSpace { what, needed: one.needed, free: one.free },
        None => Error::in_use("persistent memory:", refused.to_string()),
    }
}
