//! Errors of a host's persistent memory.

use std::io;
use std::path::PathBuf;

use super::choose::NoRoom;

/// Why something was not read or not done.
#[derive(Debug, thiserror::Error)]
pub enum PlatformError {
    /// A file or folder can't be read.
    #[error("reading {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A file holds something else than it should.
    #[error("{} holds {text:?}: must be {expected}", path.display())]
    Malformed {
        /// Which.
        path: PathBuf,
        /// The beginning of its content.
        text: String,
        /// The expected content.
        expected: &'static str,
    },
    /// The kernel refused a value.
    #[error("writing {value:?} to {}", path.display())]
    Write {
        /// Where.
        path: PathBuf,
        /// The value.
        value: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The kernel took a value, and it isn't so afterwards.
    #[error("{} is {found:?} after {wanted:?} was written", path.display())]
    NotDone {
        /// Where.
        path: PathBuf,
        /// The written value.
        wanted: String,
        /// The present value.
        found: String,
    },
    /// A device can't be opened, read or written.
    #[error("{what} {}", path.display())]
    Device {
        /// The operation.
        what: &'static str,
        /// Which.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A value is out of range.
    #[error("{field} is {value}: must be {allowed}")]
    Invalid {
        /// The field of the value.
        field: &'static str,
        /// The value.
        value: String,
        /// The accepted values.
        allowed: String,
    },
    /// No region has room, each for a reason of its own.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// The object is in use, or in the wrong state.
    #[error("{what} {problem}")]
    InUse {
        /// Which.
        what: String,
        /// In which state it is.
        problem: String,
    },
    /// The object does not exist.
    #[error("{what} {name} does not exist")]
    NotFound {
        /// The kind of object.
        what: &'static str,
        /// How it was called.
        name: String,
    },
    /// The operation is not possible here, independent of its values.
    #[error("{what}: {problem}")]
    Unsupported {
        /// The operation.
        what: String,
        /// Why not.
        problem: String,
    },
    /// An operation failed, and so did undoing its earlier steps.
    #[error("{error}; and taking it back failed: {after}")]
    NotTakenBack {
        /// The first error.
        error: Box<PlatformError>,
        /// The second error.
        after: Box<PlatformError>,
    },
}

impl PlatformError {
    /// The error with its cause, in one line.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text.push_str(&format!(": {error}"));
            cause = error.source();
        }
        text
    }

    /// The kernel's error number, if the error comes from the kernel.
    #[must_use]
    pub fn os_error(&self) -> Option<i32> {
        match self {
            Self::Read { source, .. }
            | Self::Write { source, .. }
            | Self::Device { source, .. } => source.raw_os_error(),
            Self::NotTakenBack { error, .. } => error.os_error(),
            _ => None,
        }
    }
}
