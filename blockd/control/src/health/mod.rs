//! What is wrong with pools and volumes, by what is known already: nothing here does IO on a
//! pool's devices, or changes how IO is done.
//!
//! Pure: what a look finds comes in, what there is to tell goes out. The control service looks.

mod bad_blocks;
mod ledger;
mod slow;
mod tally;

pub use bad_blocks::{BadBlocks, MAX_RUNS};
pub use ledger::{
    Cause, Episode, Ledger, MAX_CAUSES, Moment, Notice, Rules, State, Subject, ends_by_time,
};
pub use slow::{Latencies, SlowWatch};
pub use tally::Tally;
