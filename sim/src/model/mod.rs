//! A model of the commit protocol: each of its rules, and the effect of removing it.
//!
//! The model is not the mapper. It holds a pool of a few extents as one flat value and takes one
//! small step at a time, so that millions of schedules of requests, commits, checkpoints, crashes
//! and recoveries can be tried. An oracle compares the surviving data with the promises.
//!
//! A [`mutation::Mutation`] removes one form of one rule. Rules whose removal shows only under a
//! rare schedule have a scripted history in [`directed`].

pub mod check;
pub mod device;
pub mod directed;
mod directed_composite;
pub mod exhaustive;
pub mod generate;
pub mod list;
pub mod log;
pub mod map;
pub mod mutation;
pub mod oracle;
pub mod parts;
pub mod runner;
pub mod shrink;
pub mod space;
pub mod state;
pub mod step;
mod step_ckpt;
mod step_commit;
mod step_crash;
mod step_entry;
mod step_fold;
mod step_io;
mod step_look;
mod step_open;
mod step_struct;
pub mod table;
