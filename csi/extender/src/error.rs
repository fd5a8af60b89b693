//! Why the extender can't start, or can't answer.

use std::fmt::Display;
use std::io;

use blockd_csi_base::error::{Invalid, shown};

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A field that has to be there is not.
    #[error("{field} is missing")]
    Missing {
        /// Its name.
        field: &'static str,
    },
    /// A value of a pod, an option or the API server's is out of range.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The API server has no such object.
    #[error("{what} {name} does not exist")]
    NotFound {
        /// The kind of object.
        what: &'static str,
        /// Its name, as it can stand in a line.
        name: String,
    },
    /// The operating system refused.
    #[error("{what}: {source}")]
    Io {
        /// The failed operation, and its object.
        what: String,
        /// The answer.
        source: io::Error,
    },
    /// The API server or a certificate is not as it has to be.
    #[error("{what}: {problem}")]
    Unexpected {
        /// The failed operation.
        what: String,
        /// The problem.
        problem: String,
    },
}

impl Error {
    /// A value outside of what is allowed.
    pub(crate) fn invalid(field: impl Display, value: impl Display, allowed: impl Display) -> Self {
        Invalid::new(field, value, allowed).into()
    }

    /// The operating system refused `what`.
    pub(crate) fn io(what: impl Display, source: io::Error) -> Self {
        Self::Io { what: shown(what), source }
    }

    /// Not foreseen.
    pub(crate) fn unexpected(what: impl Display, problem: impl Display) -> Self {
        Self::Unexpected { what: shown(what), problem: problem.to_string() }
    }

    /// The pod asks for something that can't be, so that a repeat fails as well.
    pub(crate) fn is_of_request(&self) -> bool {
        matches!(self, Self::Missing { .. } | Self::Invalid(_))
    }
}
