//! How access to mapped memory fails.

/// An error of mapped memory.
#[derive(Debug, thiserror::Error)]
pub enum MediaError {
    /// A range leaves the memory.
    #[error("bytes {at} to {end} of a memory of {len} bytes")]
    Range {
        /// The first byte.
        at: u64,
        /// One past the last.
        end: u64,
        /// Bytes that there are.
        len: u64,
    },
    /// The kernel lists a part of the range as bad. Nothing was touched.
    #[error("byte {at} lies in memory that is known to be bad")]
    KnownBad {
        /// The first byte of the range that is bad.
        at: u64,
    },
    /// The memory was found to be bad, or to be gone. Stores before that byte were done.
    #[error("memory failed at byte {at}, or up to a line behind it")]
    Failed {
        /// The first byte that was not read or written.
        at: u64,
    },
    /// The operating system refused something.
    #[error("cannot {what}: {source}")]
    Os {
        /// The failed operation.
        what: &'static str,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// A device can't be mapped as it is.
    #[error("{what} is {found}, and must be {allowed}")]
    Device {
        /// The attribute.
        what: &'static str,
        /// Its value.
        found: String,
        /// The accepted values.
        allowed: &'static str,
    },
    /// A lane's place is invalid.
    #[error("lanes: {what}")]
    Lanes {
        /// Why.
        what: &'static str,
    },
}

impl MediaError {
    /// For `map_err`: the attempted operation.
    pub(super) fn os<E: Into<std::io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::Os { what, source: error.into() }
    }
}
