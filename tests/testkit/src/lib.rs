//! The shared parts of tests, benches and the demo: a daemon with its folders, connections to its
//! exports, a clock, and the programs of this machine. Of the workspace it depends on the NBD
//! client only, so that it is compiled quickly.
#![forbid(unsafe_code)]

pub mod clock;
pub mod content;
pub mod daemon;
pub mod disk;
pub mod folder;
pub mod http;
pub mod nbd;
pub mod other_host;
pub mod tools;
