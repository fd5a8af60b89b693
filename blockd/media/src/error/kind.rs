//! The kinds of errors, with the exit code and the gRPC code of each.

use blockd_api::v1;
use tonic::Code;

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
    /// Ended by a signal.
    Interrupted,
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

pub(super) const fn row(
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
pub const KINDS: [KindRow; 11] = [
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
    row(
        ErrorKind::Interrupted,
        "interrupted",
        // As a shell has it of a program that Ctrl-C ends.
        130,
        (Code::Cancelled, v1::ErrorKind::Interrupted),
        "interrupted by Ctrl-C or SIGTERM",
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

    pub(super) fn from_wire(wire: i32) -> Option<Self> {
        KINDS.iter().find(|row| row.wire as i32 == wire).map(|row| row.kind)
    }

    pub(super) fn from_code(code: Code) -> Self {
        match code {
            // A deadline that passed and a connection that broke look like this.
            Code::DeadlineExceeded | Code::Cancelled => Self::Unreachable,
            Code::OutOfRange => Self::Invalid,
            _ => KINDS.iter().find(|row| row.code == code).map_or(Self::Unexpected, |row| row.kind),
        }
    }
}
