//! The errors that users see: one line each that names the field, its value and what is allowed, a
//! kind, and for each kind one exit code and one gRPC code.

use std::fmt::Display;
use std::io;
use std::path::Path;

use blockd_api::Message as _;
use blockd_api::v1;
use blockd_mapper::error::MapperError;
use blockd_mapper::format::InvalidName;
use blockd_pmem::platform::PlatformError;
use blockd_pmem::platform::choose::{NoRoom, Reason, Refusal};
use tonic::{Code, Status};

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

/// The kind of an error; see [`KINDS`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorKind {
    /// Not foreseen.
    Unexpected,
    /// A value outside of what is allowed.
    Invalid,
    /// Nothing of that name.
    NotFound,
    /// Something else of that name.
    Exists,
    /// No room.
    NoSpace,
    /// In use, locked, in another state.
    InUse,
    /// No daemon answers.
    Unreachable,
    /// The daemon answers others.
    Denied,
    /// The media or the operating system failed.
    Io,
    /// Damaged or unsupported.
    Corrupt,
}

/// The external representation of a kind.
#[derive(Clone, Copy, Debug)]
pub struct KindRow {
    /// Which.
    pub kind: ErrorKind,
    /// Its name in JSON.
    pub name: &'static str,
    /// The exit code of the command line.
    pub exit: u8,
    /// The code of a gRPC status.
    pub code: Code,
    /// Its number in the control API.
    pub wire: v1::ErrorKind,
    /// For the list of exit codes.
    pub text: &'static str,
}

const fn row(
    kind: ErrorKind,
    name: &'static str,
    exit: u8,
    (code, wire): (Code, v1::ErrorKind),
    text: &'static str,
) -> KindRow {
    KindRow { kind, name, exit, code, wire, text }
}

/// The one table of kinds. Exit code 0 is success, and 2 is a command line that can't be
/// understood.
pub const KINDS: [KindRow; 10] = [
    row(
        ErrorKind::Unexpected,
        "unexpected",
        1,
        (Code::Internal, v1::ErrorKind::Unexpected),
        "unexpected error",
    ),
    row(
        ErrorKind::Invalid,
        "invalid",
        3,
        (Code::InvalidArgument, v1::ErrorKind::Invalid),
        "invalid argument or value",
    ),
    row(
        ErrorKind::NotFound,
        "not_found",
        4,
        (Code::NotFound, v1::ErrorKind::NotFound),
        "not found",
    ),
    row(
        ErrorKind::Exists,
        "exists",
        5,
        (Code::AlreadyExists, v1::ErrorKind::Exists),
        "exists with other properties",
    ),
    row(
        ErrorKind::NoSpace,
        "no_space",
        6,
        (Code::ResourceExhausted, v1::ErrorKind::NoSpace),
        "no space",
    ),
    row(
        ErrorKind::InUse,
        "in_use",
        7,
        (Code::FailedPrecondition, v1::ErrorKind::InUse),
        "in use, locked, or in the wrong state",
    ),
    row(
        ErrorKind::Unreachable,
        "unreachable",
        8,
        (Code::Unavailable, v1::ErrorKind::Unreachable),
        "the daemon can't be reached",
    ),
    row(
        ErrorKind::Denied,
        "denied",
        8,
        (Code::PermissionDenied, v1::ErrorKind::Denied),
        "the daemon can't be reached",
    ),
    row(
        ErrorKind::Io,
        "io",
        9,
        (Code::DataLoss, v1::ErrorKind::Io),
        "the media or the operating system failed",
    ),
    row(
        ErrorKind::Corrupt,
        "corrupt",
        10,
        (Code::DataLoss, v1::ErrorKind::Corrupt),
        "damaged or unsupported data",
    ),
];

impl ErrorKind {
    /// Its row of the table.
    #[must_use]
    pub fn row(self) -> &'static KindRow {
        KINDS.iter().find(|row| row.kind == self).unwrap_or(&KINDS[0])
    }

    /// The exit code of a command that ends with it.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        self.row().exit
    }

    /// The gRPC code of a call that ends with it.
    #[must_use]
    pub fn code(self) -> Code {
        self.row().code
    }

    fn from_wire(wire: i32) -> Option<Self> {
        KINDS.iter().find(|row| row.wire as i32 == wire).map(|row| row.kind)
    }

    fn from_code(code: Code) -> Self {
        match code {
            // A deadline that passed and a connection that broke look like this.
            Code::DeadlineExceeded | Code::Cancelled => Self::Unreachable,
            Code::OutOfRange => Self::Invalid,
            _ => KINDS.iter().find(|row| row.code == code).map_or(Self::Unexpected, |row| row.kind),
        }
    }
}

/// Longest value that is repeated in an error, in characters: a line of a terminal or two.
const MAX_SHOWN: usize = 160;

/// A text as it can stand in a line: quoted when it would break the line or could not be seen, and
/// cut when it is long.
#[must_use]
pub fn shown(text: impl Display) -> String {
    let text = text.to_string();
    let mut short: String = text.chars().take(MAX_SHOWN).collect();
    let hides = |c: char| c.is_control() || c.is_whitespace() || c == '"';
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
            Self::Io { what, .. } | Self::Corrupt { what, .. } | Self::Unexpected { what, .. } => {
                (what.clone(), String::new(), String::new())
            }
        };
        let kind = self.kind().row().wire.into();
        v1::ErrorDetail { kind, field, value, allowed, message: self.to_string() }
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

impl From<MapperError> for Error {
    fn from(error: MapperError) -> Self {
        let text = error.to_string();
        match error {
            MapperError::Invalid { field, value, allowed } => Self::invalid(field, value, allowed),
            MapperError::Name(InvalidName { name, problem }) => {
                Self::invalid("name", name, problem.trim_start_matches("must "))
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
            MapperError::NoSpace { needed, free } => {
                Self::NoSpace { what: "pool".to_owned(), needed, free }
            }
            MapperError::ReadOnly => Self::in_use("pool", "is read-only"),
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

#[cfg(test)]
mod tests {
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
