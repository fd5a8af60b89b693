//! Errors of the operating system as the mapper has them.

use blockd_mapper::io::IoError;

use super::Gate;

/// Converts an error of the operating system to one of the mapper. A closed gate becomes a lack of
/// space: nothing was written, and the write is retried.
#[must_use]
pub fn io_error(error: &std::io::Error) -> IoError {
    match error.raw_os_error() {
        None if Gate::refused(error) => IoError::NoSpace,
        Some(libc::ENOSPC | libc::EDQUOT) => IoError::NoSpace,
        Some(libc::ENODEV | libc::ENXIO) => IoError::Gone,
        _ => IoError::Media,
    }
}
