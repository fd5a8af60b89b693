//! blockd: thin-provisioned block devices from user space.
//!
//! The command line is the package `blockd-cli`, and `program` is what it runs in this process.
//! Imports point one way: `daemon`, then `control`, `frontend`, `volume` and `pool`, `backing`,
//! `block`. `stats`, `mailbox`, `node` and `hook` are used by all of them.
#![deny(unsafe_code)]

pub mod backing;
pub mod block;
pub mod config;
pub mod control;
pub mod daemon;
pub mod direct;
pub mod frontend;
pub mod health;
pub mod hook;
pub mod limit;
pub mod mailbox;
pub mod metrics;
pub mod node;
pub mod pool;
pub mod program;
pub mod schedule;
pub mod stats;
pub mod volume;
