//! Why a request failed, in the terms that every front-end can express.

use blockd_mapper::error::MapperError;
use blockd_mapper::io::IoError;

/// The reason for which a request failed, as its client sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BlockError {
    /// Not made of whole blocks, beyond the end, or about volumes that can't be compared (EINVAL).
    #[error("request leaves the volume, is not of whole blocks or asks for what can't be compared")]
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
            MapperError::Invalid { .. }
            | MapperError::OutOfRange { .. }
            | MapperError::OtherFamily { .. } => Self::Invalid,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_request_is_no_fault_of_the_media() {
        let name = || "a".to_owned();
        let (one, other) = (name(), name());
        for wrong in [
            MapperError::Invalid { field: "size", value: 0, allowed: "more" },
            MapperError::OutOfRange { offset: 1, len: 1, size: 1, block_size: 512 },
            MapperError::OtherFamily { one, other },
        ] {
            assert_eq!(BlockError::from(&wrong), BlockError::Invalid, "{wrong}");
        }
        let error = IoError::Media;
        let media = MapperError::Io { operation: "read", device: 0, error };
        assert_eq!(BlockError::from(&media), BlockError::Io);
    }
}
