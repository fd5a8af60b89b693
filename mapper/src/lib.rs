//! The thin extent mapper of blockd: maps volumes onto a pool's extents, allocates on first write,
//! survives power loss and the death of its process. The mapper does no IO, reads no clock, spawns
//! no thread and draws no random number. Requests, IO results and time come in; IO commands and
//! answers go out. One implementation thus serves every front-end, the simulator and the fuzzers.
//!
//! (Under loom only the parts are built whose interleavings it explores.)
//!
//! - [`create::Creating`] makes a pool, [`open::Opening`] opens one.
//! - [`worker::Worker`]: one per thread, plans reads, writes, discards and flushes.
//! - [`engine::Engine`]: one per pool, commits, checkpoints, grants space, changes volumes.
//!
//! The caller does the IO: it takes commands, and returns them with their results. A pool in memory
//! is made so:
//!
//! ```
//! use blockd_mapper::create::{CreateOptions, Creating, NewDevice};
//! use blockd_mapper::io::IoOp;
//!
//! let mut disk = vec![0; 256 << 20];
//! let device = NewDevice {
//!     name: "disk".to_owned(),
//!     uuid: [1; 16],
//!     size: disk.len() as u64,
//!     block_size: 512,
//!     class: 0,
//! };
//! let mut creating = Creating::new(&CreateOptions::single([7; 16], device))?;
//! while let Some(command) = creating.poll() {
//!     if let IoOp::Write { offset, buffer, .. } = &command.op {
//!         let (at, bytes) = (usize::try_from(*offset)?, buffer.as_bytes());
//!         disk[at..at + bytes.len()].copy_from_slice(bytes);
//!     }
//!     creating.complete(command, Ok(()));
//! }
//! creating.finish()?;
//! assert!(disk.iter().any(|byte| *byte != 0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The package `blockd-inspect` reads a pool without opening it, for tools.
#![forbid(unsafe_code)]

#[doc(hidden)]
pub mod allocator;
#[doc(hidden)]
pub mod arena;
#[cfg(not(loom))]
mod change;
pub mod claim;
#[cfg(not(loom))]
pub mod create;
#[cfg(not(loom))]
mod diff;
#[doc(hidden)]
pub mod directory;
#[cfg(not(loom))]
pub mod engine;
pub mod entry;
pub mod error;
pub mod format;
pub mod geometry;
pub mod io;
#[doc(hidden)]
pub mod io_epoch;
#[doc(hidden)]
pub mod leaf;
pub mod mapping;
pub mod mutation;
#[doc(hidden)]
pub mod mutation_gate;
#[cfg(not(loom))]
pub mod open;
pub mod plan;
#[cfg(not(loom))]
pub mod pool;
pub mod read_cache;
pub mod ring;
#[doc(hidden)]
pub mod shared_counts;
#[cfg(not(loom))]
pub mod space;
#[cfg(not(loom))]
mod stripe;
pub(crate) mod sync;
pub mod units;
#[cfg(not(loom))]
mod volume;
#[cfg(not(loom))]
mod volumes;
#[cfg(not(loom))]
pub mod worker;
