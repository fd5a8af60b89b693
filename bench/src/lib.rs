//! Placeholder while the package is being written.
