//! Why a call failed: one line that names the field, its value and what is allowed, and one gRPC
//! code for each kind.

use std::fmt::Display;
use std::io;

use blockd_api::v1::{self, ErrorKind};
use blockd_csi_base::bytes::Bytes;
use blockd_csi_base::error::{Invalid, cut, shown};
use tonic::{Code, Status};

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A field that has to be there is not.
    #[error("{field} is missing")]
    Missing {
        /// Its name in the message.
        field: String,
    },
    /// A value is out of range.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// A size that can't be.
    #[error(transparent)]
    OutOfRange(Invalid),
    /// The object does not exist.
    #[error("{what} {name} does not exist")]
    NotFound {
        /// The kind of object: volume, snapshot, path.
        what: &'static str,
        /// Its id, as it can stand in a line.
        name: String,
    },
    /// The name is taken by something else.
    #[error("{what} {name} exists with {field} {existing}, asked for {asked}")]
    Exists {
        /// The kind of object.
        what: &'static str,
        /// Its name, as it can stand in a line.
        name: String,
        /// The property that differs.
        field: &'static str,
        /// The existing value.
        existing: String,
        /// The requested value.
        asked: String,
    },
    /// The pool has not enough space.
    #[error("pool {pool}: {requested} bytes requested, {free} bytes free{why}")]
    NoSpace {
        /// Which pool.
        pool: String,
        /// Bytes that were asked for.
        requested: Bytes,
        /// Bytes that can still be given.
        free: Bytes,
        /// The meaning of the figure, if it is not the free space; begins with a comma then.
        why: String,
    },
    /// The volume can't be where it is wanted.
    #[error("no volume can be made {place}: this is node {node}")]
    Elsewhere {
        /// Where it is wanted.
        place: String,
        /// Where we are.
        node: String,
    },
    /// The object is in use, or in the wrong state.
    #[error("{what} {problem}")]
    InUse {
        /// The object of the call.
        what: String,
        /// Its state, and a possible remedy.
        problem: String,
    },
    /// Another call works on the object, or the caller has to start again.
    #[error("{what} {problem}")]
    Aborted {
        /// The object of the call.
        what: String,
        /// The operation in progress.
        problem: String,
    },
    /// The daemon does not answer.
    #[error("blockd at {address}: {problem}")]
    Unavailable {
        /// Where it was looked for.
        address: String,
        /// The problem.
        problem: String,
    },
    /// The caller's deadline expired. The operation continues, and a repeat finds its result.
    #[error("not done within {milliseconds} ms; it goes on")]
    Late {
        /// The caller's deadline.
        milliseconds: u128,
    },
    /// A program did not end within its limit, whatever the caller's deadline.
    #[error("{what} {problem}")]
    Hung {
        /// The program and its path.
        what: String,
        /// How long it ran, and its state.
        problem: String,
    },
    /// A stream was cancelled: it is to be begun again where it stopped.
    #[error("{what}: go on from behind the last range that came")]
    GivenUp {
        /// Why.
        what: String,
    },
    /// The caller of a stream disconnected. The error is not delivered.
    #[error("the caller hung up")]
    HungUp,
    /// The limit of concurrent work is reached.
    #[error("there are as many {what} at once as there may be: try again later")]
    Busy {
        /// The kind of object whose limit is reached.
        what: &'static str,
    },
    /// The operating system refused.
    #[error("{what}: {source}")]
    Io {
        /// The failed operation, and its object.
        what: String,
        /// The answer.
        source: io::Error,
    },
    /// Not foreseen: a bug, or a tool that failed.
    #[error("{what}: {problem}")]
    Unexpected {
        /// The failed operation.
        what: String,
        /// The problem.
        problem: String,
    },
    /// The keys of a call open no encryption.
    #[error("{what} is encrypted and {fields} opens none of its key slots; it is left as it is")]
    WrongKey {
        /// The object of the call.
        what: String,
        /// The fields with the keys, which are not shown.
        fields: String,
    },
    /// An error of the daemon.
    #[error("{}", .0.message)]
    Daemon(Box<v1::ErrorDetail>),
}

/// Longest message of a status, which has to fit into a header.
const MAX_MESSAGE: usize = 1024;

impl Error {
    /// A field that has to be there is not.
    #[must_use]
    pub fn missing(field: impl Display) -> Self {
        Self::Missing { field: field.to_string() }
    }

    /// A value outside of what is allowed.
    #[must_use]
    pub fn invalid(field: impl Display, value: impl Display, allowed: impl Display) -> Self {
        Self::Invalid(Invalid::new(field, value, allowed))
    }

    /// A size that can't be.
    #[must_use]
    pub fn out_of_range(field: impl Display, value: impl Display, allowed: impl Display) -> Self {
        Self::OutOfRange(Invalid::new(field, value, allowed))
    }

    /// Returns the error of an object that does not exist.
    #[must_use]
    pub fn not_found(what: &'static str, name: impl Display) -> Self {
        Self::NotFound { what, name: shown(name) }
    }

    /// The name is taken by something else.
    #[must_use]
    pub fn exists(
        (what, name): (&'static str, &str),
        field: &'static str,
        existing: impl Display,
        asked: impl Display,
    ) -> Self {
        let (existing, asked) = (shown(existing), shown(asked));
        Self::Exists { what, name: shown(name), field, existing, asked }
    }

    /// In use, or in another state than it has to be: `what` is the volume or path, `problem` the
    /// rest of the sentence.
    #[must_use]
    pub fn in_use(what: impl Display, problem: impl Display) -> Self {
        Self::InUse { what: shown(what), problem: problem.to_string() }
    }

    /// The operating system refused `what`.
    #[must_use]
    pub fn io(what: impl Display, source: io::Error) -> Self {
        Self::Io { what: shown(what), source }
    }

    /// Not foreseen.
    #[must_use]
    pub fn unexpected(what: impl Display, problem: impl Display) -> Self {
        Self::Unexpected { what: shown(what), problem: problem.to_string() }
    }

    /// The gRPC code of a call that ends with it.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::Missing { .. } | Self::Invalid(_) => Code::InvalidArgument,
            Self::OutOfRange(_) => Code::OutOfRange,
            Self::NotFound { .. } => Code::NotFound,
            Self::Exists { .. } => Code::AlreadyExists,
            Self::NoSpace { .. } | Self::Elsewhere { .. } | Self::Busy { .. } => {
                Code::ResourceExhausted
            }
            Self::InUse { .. } => Code::FailedPrecondition,
            Self::Aborted { .. } => Code::Aborted,
            Self::Unavailable { .. } => Code::Unavailable,
            Self::Late { .. } | Self::Hung { .. } | Self::GivenUp { .. } => Code::DeadlineExceeded,
            Self::HungUp => Code::Cancelled,
            // The specification: "does not carry secrets that are valid for authentication".
            Self::WrongKey { .. } => Code::Unauthenticated,
            Self::Io { .. } | Self::Unexpected { .. } => Code::Internal,
            Self::Daemon(detail) => code_of(detail.kind()),
        }
    }

    /// Whether the kubelet counts a call with this error as ended: it calls for no undo then.
    #[must_use]
    pub fn is_final(&self) -> bool {
        !matches!(
            self.code(),
            Code::Cancelled
                | Code::DeadlineExceeded
                | Code::Unavailable
                | Code::ResourceExhausted
                | Code::Aborted
        )
    }

    /// The daemon's kind of the error, if it comes from the daemon.
    #[must_use]
    pub fn daemon_kind(&self) -> Option<ErrorKind> {
        match self {
            Self::Daemon(detail) => Some(detail.kind()),
            _ => None,
        }
    }

    /// The daemon's devices or their contents have failed, or a pool was stopped because of that.
    #[must_use]
    pub fn is_of_media(&self) -> bool {
        matches!(self.daemon_kind(), Some(ErrorKind::Io | ErrorKind::Corrupt))
    }

    /// The daemon has nothing of that name.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        self.daemon_kind() == Some(ErrorKind::NotFound)
    }
}

/// The codes of the daemon's errors are kept.
const fn code_of(kind: ErrorKind) -> Code {
    match kind {
        ErrorKind::Unspecified | ErrorKind::Unexpected => Code::Internal,
        ErrorKind::Invalid => Code::InvalidArgument,
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::Exists => Code::AlreadyExists,
        ErrorKind::NoSpace => Code::ResourceExhausted,
        ErrorKind::InUse => Code::FailedPrecondition,
        ErrorKind::Unreachable => Code::Unavailable,
        ErrorKind::Io | ErrorKind::Corrupt => Code::DataLoss,
        ErrorKind::Interrupted => Code::Cancelled,
        ErrorKind::Denied => Code::PermissionDenied,
    }
}

impl From<Error> for Status {
    /// Without details, as the specification requires.
    fn from(error: Error) -> Self {
        Self::new(error.code(), cut(error.to_string(), MAX_MESSAGE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_megabyte_in_a_message_becomes_a_line() {
        for text in ["\u{1b}[2J".repeat(1 << 18), "ä".repeat(1 << 19)] {
            let status = Status::from(Error::invalid(&text, &text, "short"));
            assert_eq!(status.code(), Code::InvalidArgument);
            assert!(status.message().len() < 500, "{}", status.message().len());
            assert!(!status.message().contains('\u{1b}'));
            assert!(status.message().ends_with("must be short"));
        }
    }

    #[test]
    fn errors_of_the_daemon_keep_code_and_text_and_carry_no_details() {
        let detail = v1::ErrorDetail {
            kind: ErrorKind::InUse.into(),
            message: "volume a is attached".to_owned(),
            ..Default::default()
        };
        let status = Status::from(Error::Daemon(Box::new(detail)));
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert_eq!(status.message(), "volume a is attached");
        assert!(status.details().is_empty());
    }
}
