//! Facts about the kernel's ublk driver that need no query of it.

pub mod features;
