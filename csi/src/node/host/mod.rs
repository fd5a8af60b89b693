//! This machine. Each step that changes something is logged before it runs, without options, as
//! those may hold secrets.

pub mod conditions;
pub mod devices;
pub mod encryption;
pub mod images;
pub mod mounts;
mod tools;

/// The machine that the plugin runs on.
#[derive(Clone, Copy, Debug)]
pub struct Host;
