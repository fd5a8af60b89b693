//! A model of several hosts on one array: who may open a cell, and what keeps the others off.
//!
//! Three hosts share an array with a write cache and persistent reservations, and two cells on it.
//! One host at a time has a cell open. It hands it over in order, or is fenced, and another takes
//! it over. The mapper of a cell is reduced to a map of blocks with a tree, a log and a delta ring;
//! the commit protocol itself is the subject of [`crate::model`]. No code of the daemon follows
//! these rules yet: `docs/HOSTS.md` says what they are.
//!
//! An oracle compares what clients find with what was answered, flushed and handed over. A
//! [`mutation::Mutation`] removes one form of one rule, and each removal has to be noticed.

pub mod array;
pub mod attachment;
pub mod directed;
pub mod exhaustive;
pub mod generate;
pub mod mutation;
pub mod oracle;
pub mod parts;
mod settle;
pub mod state;
pub mod step;
mod step_close;
mod step_command;
mod step_fence;
mod step_grow;
mod step_host;
mod step_io;
mod step_open;
mod step_register;
mod step_time;
