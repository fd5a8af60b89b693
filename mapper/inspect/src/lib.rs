//! Reading a pool without opening it: nothing is written, nothing is taken over, and damage is
//! something to report instead of a reason to stop.
//!
//! [`Reader`] finds the superblock and reads pages and blocks of the log. [`State`] is the state of
//! the volumes by catalogue and log, [`walk`] goes through their trees, and [`check`] compares all
//! of it with the rules. Memory grows with volumes, pages and the log's changes, not with the data.
#![forbid(unsafe_code)]

pub mod check;
pub mod dump;
mod dump_line;
mod fault;
mod log;
mod owners;
mod reader;
mod rebuild;
pub mod repair;
pub mod restore;
pub mod rmap;
mod state;
pub mod thin_xml;
pub mod walk;

pub use fault::Fault;
pub use log::{LogEnd, LogEntry, read_log};
pub use reader::{CopyState, Media, Reader, SuperCopy, newest_copy};
pub use rebuild::MediaMut;
pub use restore::DumpError;
pub use state::{State, VolumeView};
pub use walk::{Entries, Leaf, Stopped, Visitor};

/// Ids that are skipped when it is unknown which were used: more than are made between two
/// checkpoints, and few of the 4 billion.
const IDS_SKIPPED: u32 = 1 << 16;
