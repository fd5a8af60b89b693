//! Why a piece of metadata can't be used.

use blockd_mapper::format::{FormatError, Place, Structure};
use blockd_mapper::io::IoError;

/// Why a piece of metadata can't be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The structure was read, and is damaged.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The structure could not be read.
    #[error("{structure}{place}: {error}")]
    Io {
        /// The expected structure.
        structure: Structure,
        /// Where.
        place: Place,
        /// The media's answer.
        error: IoError,
    },
}

impl Fault {
    /// Returns the structure that cannot be used.
    #[must_use]
    pub const fn structure(&self) -> Structure {
        match self {
            Self::Format(error) => error.structure,
            Self::Io { structure, .. } => *structure,
        }
    }

    /// Returns where the structure was expected.
    #[must_use]
    pub const fn place(&self) -> Place {
        match self {
            Self::Format(error) => error.place,
            Self::Io { place, .. } => *place,
        }
    }

    /// Whether a later version wrote it, so that it isn't damage.
    #[must_use]
    pub const fn is_unsupported(&self) -> bool {
        use blockd_mapper::format::Problem;

        matches!(self, Self::Format(error)
            if matches!(error.problem,
                Problem::Unsupported { .. } | Problem::UnsupportedKind { .. }))
    }
}
