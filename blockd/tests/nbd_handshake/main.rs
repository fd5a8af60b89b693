//! The NBD listener and client over real sockets, with exports in memory.
#![forbid(unsafe_code)]

#[path = "../nbd_support/mod.rs"]
mod support;

mod client;
mod sockets;
mod strangers;
mod tls;
