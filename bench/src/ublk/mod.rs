//! ublk devices beside other ways from a block device to a disk of the same kind. All of this
//! runs in a virtual machine, which the tests' package boots.

pub mod after_snapshot;
pub mod backing;
pub mod before;
pub mod clones;
pub mod counts;
pub mod daemon;
pub mod first_touch;
pub mod mapped;
#[allow(unsafe_code, reason = "ioctls of the device mapper")]
mod mapper_control;
pub mod peers;
pub mod print;
pub mod restart;
mod shell;
pub mod trace;

use std::path::PathBuf;

use crate::block::Jobs;

/// Everything that a run needs to know.
#[derive(Clone, Debug)]
pub struct Bench {
    /// The daemon's program; without it only the others are measured.
    pub blockd: Option<PathBuf>,
    /// rublk's.
    pub rublk: PathBuf,
    /// The job files.
    pub jobs: Jobs,
    /// Seconds of each run by time.
    pub seconds: f64,
    /// Interleaved pairs.
    pub pairs: usize,
    /// Shorter, with less of it.
    pub quick: bool,
    /// Only workloads with this in their name.
    pub only: Option<String>,
    /// The limits of the disks, in words; `None` for ramdisks.
    pub limits: Option<String>,
}

impl Bench {
    /// Whether something of this name is to be measured.
    #[must_use]
    pub fn includes(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
    }
}

/// Whether requests are served from a copy of their data, or from the kernel's own pages.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Mode {
    /// The data is copied between the request and the server's memory.
    Copy,
    /// The backing's IO uses the request's pages.
    ZeroCopy,
}

impl Mode {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Copy, Self::ZeroCopy];

    /// In words.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::ZeroCopy => "zero copy",
        }
    }
}
