//! The health of pools and volumes, from data that is there already: nothing here does IO on a
//! pool's devices, or changes IO.
//!
//! Pure functions from the findings of a look to notices. The control service looks.

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
