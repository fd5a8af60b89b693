//! Persistent memory: what the kernel has of it, and how it is read and written.
//!
//! - [`media`]: mapped memory; stores past the cache, fences, memory that has gone bad.
//! - [`platform`]: regions and namespaces, read and made through sysfs.
//! - [`recorder`]: a memory for tests, which computes its possible states after a loss of power.
#![deny(unsafe_code)]

pub mod media;
pub mod platform;
pub mod recorder;
