//! The CSI plugin of blockd: makes its volumes usable in Kubernetes, by version 1.12 of the
//! Container Storage Interface. It manages the life cycle of volumes and does no IO: its state
//! comes from the daemon, by `blockd.v1`, and from the mount table. It can be killed and started at
//! any time.
#![forbid(unsafe_code)]

pub mod capability;
pub mod cells;
pub mod changes;
pub mod config;
pub mod controller;
pub mod daemon;
pub mod error;
pub mod group;
pub mod health;
pub mod identity;
pub mod ids;
pub mod labels;
pub mod limits;
pub mod locks;
pub mod logging;
pub mod metrics;
pub mod mkfs;
pub mod node;
pub mod operator;
pub mod options;
pub mod parameters;
pub mod placement;
pub mod plugin;
pub mod pmem;
pub mod privileges;
pub mod proto;
pub mod provision;
pub mod room;
pub mod server;
pub mod sizes;
pub mod topology;

#[cfg(test)]
mod testing;
