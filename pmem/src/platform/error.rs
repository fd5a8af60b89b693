//! What can go wrong with a host's persistent memory.

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
        /// What it holds, the beginning of it.
        text: String,
        /// What it has to hold.
        expected: &'static str,
    },
    /// The kernel refused a value.
    #[error("writing {value:?} to {}", path.display())]
    Write {
        /// Where.
        path: PathBuf,
        /// What.
        value: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The kernel took a value, and it isn't so afterwards.
    #[error("{} is {found:?} after {wanted:?} was written", path.display())]
    NotDone {
        /// Where.
        path: PathBuf,
        /// What was written.
        wanted: String,
        /// What is there.
        found: String,
    },
    /// A device can't be opened, read or written.
    #[error("{what} {}", path.display())]
    Device {
        /// What was done.
        what: &'static str,
        /// Which.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A value is outside of what is allowed.
    #[error("{field} is {value}: must be {allowed}")]
    Invalid {
        /// What it is a value of.
        field: &'static str,
        /// The value.
        value: String,
        /// What would be accepted.
        allowed: String,
    },
    /// No region has room, each for a reason of its own.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// It is in use, or in another state than it has to be.
    #[error("{what} {problem}")]
    InUse {
        /// Which.
        what: String,
        /// In which state it is.
        problem: String,
    },
    /// There is nothing of that name.
    #[error("{what} {name} does not exist")]
    NotFound {
        /// What kind of thing.
        what: &'static str,
        /// How it was called.
        name: String,
    },
    /// This can't be done here, whatever the values.
    #[error("{what}: {problem}")]
    Unsupported {
        /// What.
        what: String,
        /// Why not.
        problem: String,
    },
    /// Something failed, and so did taking back what had been done until then.
    #[error("{error}; and taking it back failed: {after}")]
    NotTakenBack {
        /// What failed first.
        error: Box<PlatformError>,
        /// What failed then.
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

    /// The kernel's number of what went wrong, if it is the kernel that said so.
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
