//! How a pool is opened, and what comes of it.

use std::sync::Arc;

use crate::engine::Engine;
use crate::pool::{Pool, Tuning};
use crate::ring::RingMemory;

/// A device that the caller has at hand.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PresentDevice {
    /// The caller's name for it, for messages.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// Its logical block in bytes.
    pub block_size: u32,
}

/// The purpose of opening a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpenMode {
    /// To serve: the pool is this process's own from now on.
    ReadWrite,
    /// To read: nothing is written, to the media or to the ring. The changes in the ring are shown
    /// all the same, from a copy of it; they reach the media only when the pool is opened to serve.
    ReadOnly,
}

/// How a pool is opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The pool's devices, in any order: commands name them by their place here.
    pub devices: Vec<PresentDevice>,
    /// To serve or to look.
    pub mode: OpenMode,
    /// Shared memory that outlives this process, if the caller keeps any.
    pub ring: Option<Arc<dyn RingMemory>>,
    /// Identity of the host's boot: shared memory of another one says nothing.
    pub boot_id: [u8; 16],
    /// Random and not 0: identity of this open (R14).
    pub open_id: u64,
    /// Open although answered writes that were not flushed may be lost; to look, although they
    /// are not shown.
    pub accept_loss: bool,
    /// The node that opens it.
    pub node: u32,
    /// Settings.
    pub tuning: Tuning,
}

/// The report of an opening.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OpenReport {
    /// The pool had been closed in order.
    pub was_clean: bool,
    /// Log blocks replayed.
    pub log_blocks: u64,
    /// Changes replayed from the log.
    pub log_changes: u64,
    /// Changes replayed from the delta ring: answered, and not yet durable.
    pub ring_changes: u64,
    /// Pages of labels that could not be read: the volumes are there without these labels.
    pub labels_lost: u64,
    /// Why the ring of a pool that was not closed was not used.
    pub ring_problem: Option<String>,
}

/// A pool that is ready.
#[derive(Debug)]
pub struct Opened {
    /// For workers.
    pub pool: Arc<Pool>,
    /// For the pool thread.
    pub engine: Engine,
    /// The report.
    pub report: OpenReport,
}
