//! Why front ends can't serve.

use blockd_mapper::error::MapperError;

/// Why workers could not be started, or a pool not be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrontendError {
    /// A setting is outside what is allowed.
    #[error("{field} is {value}: must be {allowed}")]
    Invalid {
        /// Its name.
        field: &'static str,
        /// The invalid value.
        value: usize,
        /// The allowed values.
        allowed: &'static str,
    },
    /// The operating system refuses.
    #[error("{what}: {source}")]
    Io {
        /// The failed step.
        what: &'static str,
        /// Why not.
        source: std::io::Error,
    },
    /// The mapper refuses.
    #[error(transparent)]
    Mapper(#[from] MapperError),
    /// The workers have ended.
    #[error("the workers have ended")]
    Gone,
}
