//! Why a request failed, in the terms that every front-end can express.

use blockd_mapper::error::MapperError;
use blockd_mapper::io::IoError;

/// What a client is told of a request that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BlockError {
    /// Not made of whole blocks, or beyond the end (EINVAL).
    #[error("request leaves the volume or is not made of whole blocks")]
    Invalid,
    /// The volume can't be written (EPERM).
    #[error("volume is read-only")]
    ReadOnly,
    /// No room below (ENOSPC).
    #[error("no space left")]
    NoSpace,
    /// The media failed, or the pool has stopped after a failure (EIO).
    #[error("media error")]
    Io,
    /// The volume or the daemon is going away (ESHUTDOWN).
    #[error("volume is going away")]
    Gone,
}

impl From<&MapperError> for BlockError {
    fn from(error: &MapperError) -> Self {
        match error {
            MapperError::Invalid { .. } | MapperError::OutOfRange { .. } => Self::Invalid,
            MapperError::ReadOnly => Self::ReadOnly,
            MapperError::NoSpace { .. } => Self::NoSpace,
            MapperError::NoVolume(_) | MapperError::Closed => Self::Gone,
            // A flush that found no space has stopped the pool: space will not help.
            MapperError::Io { operation: "write", error, .. } => Self::from(*error),
            _ => Self::Io,
        }
    }
}

impl From<IoError> for BlockError {
    fn from(error: IoError) -> Self {
        match error {
            IoError::NoSpace => Self::NoSpace,
            IoError::Media | IoError::Gone => Self::Io,
        }
    }
}
