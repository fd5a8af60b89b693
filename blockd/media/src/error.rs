//! The errors that users see: one line each that names the field, its value and what is allowed, a
//! kind, and for each kind one exit code and one gRPC code.

mod convert;
mod kind;

use std::fmt::Display;
use std::io;
use std::path::Path;

use blockd_api::Message as _;
use blockd_api::v1;
use tonic::{Code, Status};

use crate::names::is_hidden;

pub use kind::{ErrorKind, KINDS, KindRow};

/// Why something that a user asked for was not done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A value is outside of what is allowed.
    #[error("{field} is {value}: must be {allowed}")]
    Invalid {
        /// The argument, field of a request, or key of the configuration.
        field: String,
        /// Its value, as it can stand in a line.
        value: String,
        /// The accepted values.
        allowed: String,
    },
    /// A size that can't be had within its limits.
    #[error("{field} is {value}: must be {allowed}")]
    OutOfRange {
        /// The field of a request.
        field: String,
        /// Its value.
        value: String,
        /// The accepted values.
        allowed: String,
    },
    /// The configuration can't be read.
    #[error("{place}: {problem}")]
    Config {
        /// File and line.
        place: String,
        /// The problem.
        problem: String,
    },
    /// There is nothing of that name.
    #[error("{what} {name} does not exist")]
    NotFound {
        /// The kind of the object: pool, volume, file.
        what: &'static str,
        /// The name, as it can stand in a line.
        name: String,
    },
    /// The name is taken by something else.
    #[error("{what} {name} exists with {field} {existing}, asked for {asked}")]
    Exists {
        /// The kind of the object.
        what: &'static str,
        /// The name, as it can stand in a line.
        name: String,
        /// The property that differs.
        field: String,
        /// The present value.
        existing: String,
        /// The requested value.
        asked: String,
    },
    /// There is no room.
    #[error("{what}: no space: {needed} bytes needed, {free} bytes free")]
    NoSpace {
        /// Where.
        what: String,
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// There is room, and not in one piece.
    #[error(
        "{what}: no space in one piece: {needed} bytes needed, {free} bytes free, the largest \
         piece {largest} bytes"
    )]
    NoPiece {
        /// Where.
        what: String,
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
        /// Bytes of the largest piece.
        largest: u64,
    },
    /// The object is in use, locked, or in a state in which the operation is impossible.
    #[error("{what} {problem}")]
    InUse {
        /// The object.
        what: String,
        /// In which state it is, and what would help.
        problem: String,
    },
    /// The daemon does not answer.
    #[error("{address}: {problem}")]
    Unreachable {
        /// Where it was looked for.
        address: String,
        /// The reason, and the remedy.
        problem: String,
    },
    /// The daemon answers others.
    #[error("{who} may not use the control socket: must be {allowed}")]
    Denied {
        /// The client.
        who: String,
        /// The authorised users.
        allowed: String,
    },
    /// The operating system or the media refused.
    #[error("{what}: {source}")]
    Io {
        /// The operation and its object.
        what: String,
        /// The answer.
        source: io::Error,
    },
    /// Data that was read is invalid.
    #[error("{what}: {problem}")]
    Corrupt {
        /// The data.
        what: String,
        /// The problem.
        problem: String,
    },
    /// A signal ended it.
    #[error("{what}: interrupted")]
    Interrupted {
        /// The operation.
        what: &'static str,
    },
    /// Not foreseen.
    #[error("{what}: {problem}")]
    Unexpected {
        /// The operation.
        what: String,
        /// The problem.
        problem: String,
    },
    /// An error of the daemon, as it reports it.
    #[error("{}", .0.message)]
    Remote(v1::ErrorDetail),
}

/// Longest value that is repeated in an error, in characters: a line of a terminal or two.
const MAX_SHOWN: usize = 160;

/// A text as it can stand in a line: quoted when it would break the line or could not be seen, and
/// cut when it is long.
#[must_use]
pub fn shown(text: impl Display) -> String {
    let text = text.to_string();
    let mut short: String = text.chars().take(MAX_SHOWN).collect();
    let hides = |c: char| is_hidden(c) || c.is_whitespace() || c == '"';
    if short.is_empty() || short.contains(hides) {
        short = format!("{short:?}");
    }
    if text.chars().nth(MAX_SHOWN).is_some() {
        short = format!("{short}... ({} bytes)", text.len());
    }
    short
}

impl Error {
    /// A value outside of what is allowed.
    pub fn invalid(field: impl Into<String>, value: impl Display, allowed: impl Display) -> Self {
        let (field, allowed) = (field.into(), allowed.to_string());
        Self::Invalid { field, value: shown(value), allowed }
    }

    /// A size that can't be had within its limits.
    pub fn out_of_range(
        field: impl Into<String>,
        value: impl Display,
        allowed: impl Display,
    ) -> Self {
        let (value, allowed) = (value.to_string(), allowed.to_string());
        Self::OutOfRange { field: field.into(), value, allowed }
    }

    /// A value that is not there, and has to be.
    pub fn missing(field: impl Into<String>, allowed: impl Display) -> Self {
        Self::invalid(field, "missing", allowed)
    }

    /// Nothing of that name.
    #[must_use]
    pub fn not_found(what: &'static str, name: &str) -> Self {
        Self::NotFound { what, name: shown(name) }
    }

    /// In use, locked, or in another state.
    pub fn in_use(what: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::InUse { what: what.into(), problem: problem.into() }
    }

    /// An error for a failed operation of the operating system. Lack of space and lack of
    /// permission have kinds of their own, so that they are distinct from failing media.
    pub fn io(what: impl Into<String>, source: io::Error) -> Self {
        Self::Io { what: what.into(), source }
    }

    /// [`Error::io`] for a file.
    #[must_use]
    pub fn file(verb: &str, path: &Path, source: io::Error) -> Self {
        Self::io(format!("{verb} {}", path.display()), source)
    }

    /// The kind of this error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Invalid { .. } | Self::OutOfRange { .. } | Self::Config { .. } => {
                ErrorKind::Invalid
            }
            Self::NotFound { .. } => ErrorKind::NotFound,
            Self::Exists { .. } => ErrorKind::Exists,
            Self::NoSpace { .. } | Self::NoPiece { .. } => ErrorKind::NoSpace,
            Self::InUse { .. } => ErrorKind::InUse,
            Self::Unreachable { .. } => ErrorKind::Unreachable,
            Self::Denied { .. } => ErrorKind::Denied,
            Self::Io { source, .. } => match source.kind() {
                io::ErrorKind::StorageFull
                | io::ErrorKind::QuotaExceeded
                | io::ErrorKind::FileTooLarge => ErrorKind::NoSpace,
                io::ErrorKind::AddrInUse
                | io::ErrorKind::ResourceBusy
                | io::ErrorKind::PermissionDenied
                | io::ErrorKind::ReadOnlyFilesystem => ErrorKind::InUse,
                io::ErrorKind::NotFound => ErrorKind::NotFound,
                _ => ErrorKind::Io,
            },
            Self::Corrupt { .. } => ErrorKind::Corrupt,
            Self::Interrupted { .. } => ErrorKind::Interrupted,
            Self::Unexpected { .. } => ErrorKind::Unexpected,
            Self::Remote(detail) => {
                ErrorKind::from_wire(detail.kind).unwrap_or(ErrorKind::Unexpected)
            }
        }
    }

    /// The exit code of a command that ends with it.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        self.kind().exit_code()
    }

    /// The same in parts, as the control API and `--json` have it.
    #[must_use]
    pub fn detail(&self) -> v1::ErrorDetail {
        let (field, value, allowed) = match self {
            Self::Remote(detail) => return detail.clone(),
            Self::Invalid { field, value, allowed }
            | Self::OutOfRange { field, value, allowed } => {
                (field.clone(), value.clone(), allowed.clone())
            }
            Self::Config { place, problem } => (place.clone(), problem.clone(), String::new()),
            Self::NotFound { what, name } => {
                ((*what).to_owned(), name.clone(), format!("the name of a {what} that exists"))
            }
            Self::Exists { field, existing, asked, .. } => {
                (field.clone(), asked.clone(), existing.clone())
            }
            Self::NoSpace { what, needed, free } => {
                (what.clone(), needed.to_string(), format!("at most {free} bytes"))
            }
            Self::NoPiece { what, needed, largest, .. } => {
                (what.clone(), needed.to_string(), format!("at most {largest} bytes"))
            }
            Self::InUse { what, problem } => (what.clone(), problem.clone(), String::new()),
            Self::Unreachable { address, .. } => {
                ("socket".to_owned(), address.clone(), "where a daemon listens".to_owned())
            }
            Self::Denied { who, allowed } => ("user".to_owned(), who.clone(), allowed.clone()),
            Self::Interrupted { what } => ((*what).to_owned(), String::new(), String::new()),
            Self::Io { what, .. } | Self::Corrupt { what, .. } | Self::Unexpected { what, .. } => {
                (what.clone(), String::new(), String::new())
            }
        };
        let kind = self.kind().row().wire.into();
        v1::ErrorDetail { kind, field, value, allowed, message: self.to_string() }
    }

    /// The same error with a note on the state that it leaves.
    #[must_use]
    pub fn with_note(&self, note: &str) -> Self {
        let mut detail = self.detail();
        detail.message = format!("{}; {note}", detail.message);
        Self::Remote(detail)
    }

    /// As the answer to a call of the control API.
    #[must_use]
    pub fn to_status(&self) -> Status {
        let detail = self.detail();
        let bytes = detail.encode_to_vec().into();
        let code = match self {
            Self::OutOfRange { .. } => Code::OutOfRange,
            _ => self.kind().code(),
        };
        Status::with_details(code, detail.message, bytes)
    }

    /// From the answer to a call of the control API.
    #[must_use]
    pub fn from_status(status: &Status) -> Self {
        match v1::ErrorDetail::decode(status.details()) {
            Ok(detail) if ErrorKind::from_wire(detail.kind).is_some() => Self::Remote(detail),
            _ => {
                let kind = ErrorKind::from_code(status.code()).row().wire.into();
                let message = format!("control API: {}", status.message());
                Self::Remote(v1::ErrorDetail { kind, message, ..Default::default() })
            }
        }
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        error.to_status()
    }
}

#[cfg(test)]
mod tests {
    use blockd_mapper::error::MapperError;

    use super::*;

    fn samples() -> Vec<Error> {
        let text = |text: &str| text.to_owned();
        vec![
            Error::invalid("size", -1, "more than 0"),
            Error::not_found("volume", "a"),
            Error::Exists {
                what: "volume",
                name: text("a"),
                field: text("size in bytes"),
                existing: text("1"),
                asked: text("2"),
            },
            Error::NoSpace { what: text("pool default"), needed: 2, free: 1 },
            Error::NoPiece { what: text("region 0x1"), needed: 3, free: 4, largest: 2 },
            Error::in_use("volume a", "is attached: detach it first"),
            Error::Unreachable { address: text("/run/x"), problem: text("no daemon listens") },
            Error::Denied { who: text("user 7"), allowed: text("root") },
            Error::file("open", Path::new("/dev/x"), io::Error::other("broken")),
            Error::Corrupt { what: text("pool p"), problem: text("bad magic") },
            Error::Unexpected { what: text("start"), problem: text("no thread") },
            Error::Interrupted { what: "transfer" },
        ]
    }

    #[test]
    fn each_error_comes_through_the_control_api_whole() {
        for error in samples() {
            let status = error.to_status();
            assert_eq!(status.code(), error.kind().code(), "{error}");
            let back = Error::from_status(&status);
            assert_eq!(back.to_string(), error.to_string());
            assert_eq!(back.kind(), error.kind(), "{error}");
            assert_eq!(back.detail(), error.detail(), "{error}");
        }
    }

    #[test]
    fn each_kind_has_an_error_and_a_row_of_its_own() {
        for row in KINDS {
            assert!(samples().iter().any(|error| error.kind() == row.kind), "{row:?}");
            assert_eq!(row.kind.row().name, row.name);
            assert_eq!(KINDS.iter().filter(|other| other.wire == row.wire).count(), 1, "{row:?}");
        }
    }

    #[test]
    fn exit_codes_stay_what_they_are() {
        let codes: Vec<_> = KINDS.iter().map(|row| (row.name, row.exit)).collect();
        let documented = [
            ("unexpected", 1),
            ("invalid", 3),
            ("not_found", 4),
            ("exists", 5),
            ("no_space", 6),
            ("in_use", 7),
            ("unreachable", 8),
            ("denied", 8),
            ("io", 9),
            ("corrupt", 10),
            ("interrupted", 130),
        ];
        assert_eq!(codes, documented);
    }

    #[test]
    fn a_status_without_detail_is_judged_by_its_code() {
        let error = Error::from_status(&Status::unavailable("gone"));
        assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Unreachable, 8));
        let odd = Status::with_details(Code::NotFound, "x", vec![0xff_u8, 1].into());
        assert_eq!(Error::from_status(&odd).kind(), ErrorKind::NotFound);
        assert_eq!(Error::from_status(&Status::unknown("x")).kind(), ErrorKind::Unexpected);
    }

    #[test]
    fn a_full_disk_is_no_space_and_a_taken_port_is_in_use() {
        let by = |errno: i32| Error::io("x", io::Error::from_raw_os_error(errno)).kind();
        assert_eq!(by(libc::ENOSPC), ErrorKind::NoSpace);
        assert_eq!(by(libc::EDQUOT), ErrorKind::NoSpace);
        assert_eq!(by(libc::EADDRINUSE), ErrorKind::InUse);
        assert_eq!(by(libc::EIO), ErrorKind::Io);
    }

    #[test]
    fn errors_stay_on_one_line() {
        let error = Error::invalid("name", "a\nb\0", "1 to 128 bytes");
        assert_eq!(error.to_string(), r#"name is "a\nb\0": must be 1 to 128 bytes"#);
        let error = Error::invalid("name", "a\u{202e}b", "1 to 128 bytes");
        assert_eq!(error.to_string(), r#"name is "a\u{202e}b": must be 1 to 128 bytes"#);
        let error = Error::invalid("name", "x".repeat(1000), "short").to_string();
        assert!(error.len() < 250 && error.contains("(1000 bytes)"), "{error}");
        assert_eq!(Error::invalid("name", "", "there").to_string(), r#"name is "": must be there"#);
    }

    #[test]
    fn errors_of_the_mapper_keep_field_and_value() {
        let name = blockd_mapper::format::VolumeName::new("a/b").unwrap_err();
        let error = Error::from(MapperError::from(name));
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().starts_with("name is a/b: must"), "{error}");
        let error = MapperError::Exists {
            name: "a".to_owned(),
            field: "size in bytes",
            existing: 1,
            asked: 2,
        };
        let text = Error::from(error).to_string();
        assert_eq!(text, "volume a exists with size in bytes 1, asked for 2");
    }
}
