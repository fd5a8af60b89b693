//! The options with which every pool of this package is made and opened.

use std::sync::Arc;

use blockd_mapper::create::{CreateOptions, NewDevice};
use blockd_mapper::open::{OpenMode, OpenOptions, PresentDevice};
use blockd_mapper::pool::Tuning;
use blockd_mapper::ring::RingMemory;

/// Logical block of the device, in bytes: what O_DIRECT asks for on any disk.
const BLOCK_SIZE: u32 = 4096;

/// A pool of one device of this many bytes.
#[must_use]
pub fn create(name: &str, size: u64) -> CreateOptions {
    let device =
        NewDevice { name: name.to_owned(), uuid: [1; 16], size, block_size: BLOCK_SIZE, class: 0 };
    CreateOptions::single([0xB1; 16], device)
}

/// Opens that pool to serve one worker. Pools of this package are throw-away, so one that was not
/// closed may be opened without its ring.
#[must_use]
pub fn open(
    name: &str,
    size: u64,
    ring: Option<Arc<dyn RingMemory>>,
    tuning: Tuning,
) -> OpenOptions {
    OpenOptions {
        devices: vec![PresentDevice { name: name.to_owned(), size, block_size: BLOCK_SIZE }],
        mode: OpenMode::ReadWrite,
        ring,
        boot_id: [0xB2; 16],
        open_id: fastrand::u64(1..),
        accept_loss: true,
        node: 0,
        tuning: Tuning { workers: 1, ..tuning },
    }
}
