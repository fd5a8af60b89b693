//! The data path between front-ends and media: requests of clients become IO of the pool's devices.
//!
//! A front-end hands each [`block::Request`] to its worker's [`volume::Executor`], which has the
//! mapper plan it, does the IO on a [`backing::Ring`] and completes it. [`pool`] makes and opens
//! pools, and has the thread of each. `schedule` and `limit` decide whose request is next, and
//! `stats` counts. Nothing here knows of configuration, of the control API, or of a protocol of
//! clients.
//!
//! Imports point one way: `volume`, then `pool`, `backing`, `block`; `ci/src/tidy/modules.rs` has
//! the table.
#![deny(unsafe_code)]

pub mod backing;
pub mod block;
pub mod limit;
pub mod mailbox;
pub mod pool;
pub mod schedule;
pub mod stats;
pub mod volume;
