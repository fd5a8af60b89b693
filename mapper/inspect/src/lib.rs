//! Reading a pool without opening it: nothing is written, nothing is taken over, and damage is
//! something to report instead of a reason to stop.
//!
//! [`Reader`] finds the superblock and reads pages and blocks of the log. [`State`] is the state of
//! the volumes by catalogue and log, [`walk`] goes through their trees, and [`check`] compares all
//! of it with the rules. Memory grows with volumes, pages and the log's changes, not with the data.
//!
//! ```
//! use blockd_inspect::{Media, Reader};
//! use blockd_mapper::io::IoError;
//! use blockd_mapper::open::PresentDevice;
//! use blockd_mapper::units::DeviceIndex;
//!
//! struct Memory(Vec<u8>);
//!
//! impl Media for Memory {
//!     fn read(&mut self, _: DeviceIndex, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
//!         let at = usize::try_from(offset).map_err(|_| IoError::Gone)?;
//!         bytes.copy_from_slice(self.0.get(at..at + bytes.len()).ok_or(IoError::Gone)?);
//!         Ok(())
//!     }
//! }
//!
//! // Nothing but zeroes is no pool, which is an error and not a panic.
//! let mut disk = Memory(vec![0; 1 << 20]);
//! let present = PresentDevice { name: "disk".to_owned(), size: 1 << 20, block_size: 512 };
//! let error = Reader::open(&mut disk, &[present]).unwrap_err();
//! assert!(error.to_string().contains("superblock"), "{error}");
//! ```
#![forbid(unsafe_code)]

pub mod check;
pub mod dump;
mod dump_line;
mod fault;
mod labels;
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
