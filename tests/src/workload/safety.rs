//! `safety`: mistakes of an operator and odd devices on real kernels: disks that other programs
//! open, file systems that are not mounted, storage that restarts or fails, and a disk that two
//! hosts open.

mod disk;
mod failed;
mod hosts;

use anyhow::Result;

use super::Run;

pub use disk::inside;
pub use hosts::host;

/// The host's half.
///
/// # Errors
/// When a mistake is not refused, or data is lost.
pub fn run(run: &Run) -> Result<String> {
    let disk = disk::run(run)?;
    let hosts = hosts::run(run)?;
    Ok(format!("{disk}; {hosts}"))
}
