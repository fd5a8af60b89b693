//! The services over the data path (pools, volumes, snapshots, attachments, space, health, nodes,
//! namespaces of persistent memory) and the server of the control API, which calls them.
//!
//! [`services`] has the services and their state. [`direct`] has pools whose volumes are
//! namespaces, [`health`] the ledger of what is wrong, [`hook`] and [`node`] scripts and hosts,
//! [`pool`] calls about an open pool.
#![forbid(unsafe_code)]

pub mod config;
pub mod direct;
pub mod health;
pub mod hook;
pub mod node;
pub mod pool;
pub mod services;
