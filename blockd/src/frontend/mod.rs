//! What clients talk to, and the threads that serve them.

pub mod nbd;
pub mod ublk;
pub mod worker;
