//! `safety`: mistakes of an operator and odd devices on real kernels: disks that other programs
//! want, file systems that are not mounted, and storage that restarts.

mod disk;

pub use disk::{inside, run};
