//! Workloads on real kernels: the daemon with its ublk devices in a virtual machine, under load,
//! through crashes of the process and of the machine.
//!
//! Each has a half on the host, which makes disks, boots and counts, and a half in the guest: this
//! program again, called with `inside`.

pub mod cluster;
pub mod csi;
pub mod demo;
pub mod device;
pub mod files;
pub mod fs;
pub mod guest;
pub mod health;
pub mod hosts;
pub mod kill;
pub mod ledger;
pub mod load;
pub mod logwrites;
pub mod neighbours;
pub mod pmem;
pub mod power;
pub mod replay;
pub mod rounds;
pub mod safety;
pub mod space;
pub mod stress;
pub mod thin;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use blockd_testkit::folder::Folder;
use blockd_testkit::tools;

use crate::vm::{Vm, Which};

/// Precedes the figures that a guest prints.
const MARK: &str = "figures: ";

/// No workload takes longer: the promise made for each.
const LIMIT: Duration = Duration::from_secs(25 * 60);

/// Time that [`Form::Long`] may take in addition: ten minutes of real time, and slack for a slow
/// machine.
const LONG_EXTRA: Duration = Duration::from_secs(15 * 60);

/// How much of a workload is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A minute or so.
    Short,
    /// All of it, with long waits shortened.
    Default,
    /// All of it, with waits in real time.
    Long,
}

impl Form {
    /// The flag of a command line, with a space before it.
    #[must_use]
    pub const fn flag(self) -> &'static str {
        match self {
            Self::Short => " --short",
            Self::Default => "",
            Self::Long => " --long",
        }
    }
}

/// How a workload is to run.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    pub kernel: Which,
    pub form: Form,
    pub seed: u64,
}

impl Run {
    /// Whether it is to take a minute or so.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.form == Form::Short
    }

    /// One of two numbers, by the form.
    #[must_use]
    pub fn either<T>(&self, short: T, long: T) -> T {
        if self.is_short() { short } else { long }
    }

    /// How long it may take.
    #[must_use]
    pub fn limit(&self) -> Duration {
        if self.form == Form::Long { LIMIT + LONG_EXTRA } else { LIMIT }
    }

    /// A machine with the daemon, this program and what file systems need.
    fn machine(&self, name: &str) -> Result<Vm> {
        let program = std::env::current_exe().context("where this program lies")?;
        Ok(Vm::new(name)
            .kernel(self.kernel)
            .memory(1536)
            .limit(self.limit())
            .modules(&["ublk_drv"])
            .programs(&["blkdiscard", "mkfs.ext4", "e2fsck", "fio"])
            .file("/etc/mke2fs.conf".as_ref(), "/etc/mke2fs.conf", false)
            .file(&program, INSIDE, true)
            .program(&tools::blockd()?))
    }

    /// A line of a guest's script that runs this program's other half.
    fn inside(&self, words: &str) -> String {
        let seed = self.seed;
        format!("export BLOCKD_BIN=/usr/bin/blockd\n{INSIDE} inside --seed {seed} {words}\n")
    }
}

/// Where this program lies in a guest.
const INSIDE: &str = "/usr/bin/workload";

/// A sparse file of this length.
fn sparse(folder: &Folder, name: &str, bytes: u64) -> Result<PathBuf> {
    let path = folder.path().join(name);
    File::create(&path)?.set_len(bytes).with_context(|| format!("making {}", path.display()))?;
    Ok(path)
}

/// The figures in what a guest printed.
fn figures(text: &str) -> Result<&str> {
    let line = text.lines().find_map(|line| line.strip_prefix(MARK));
    line.context("the guest printed no figures")
}

/// The path of a volume's device, by the name that stays.
fn device_of(volume: &str) -> PathBuf {
    Path::new("/dev/blockd/default").join(volume)
}
