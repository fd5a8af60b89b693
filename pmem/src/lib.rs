//! Persistent memory: the kernel's view of it, and access to it.
//!
//! - [`media`]: mapped memory; stores past the cache, fences, memory that has gone bad.
//! - [`platform`]: regions and namespaces, read and made through sysfs.
//! - [`recorder`]: a memory for tests, which computes its possible states after a loss of power.
#![deny(unsafe_code)]

pub mod media;
pub mod platform;
pub mod recorder;
