//! What is known of the kernel's ublk driver without asking it.

pub mod features;
