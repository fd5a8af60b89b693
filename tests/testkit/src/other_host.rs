//! Another host, from a daemon's point of view: another boot, and no locks in common. The storage
//! that both reach is up to the test: two loop devices over one file have no lock in common either.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::folder::Folder;

/// Where daemons of root have the locks of their host.
const LOCKS: &str = "/run/blockd-locks";
/// The kernel's name for this boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Another host.
#[derive(Debug)]
pub struct OtherHost {
    folder: Folder,
}

impl OtherHost {
    /// One that has just booted. Only root can have one.
    ///
    /// # Errors
    /// When its files can't be made.
    pub fn new() -> Result<Self> {
        let folder = Folder::below(Path::new("/dev/shm"), "host")?;
        for locks in [folder.path().join("locks"), LOCKS.into()] {
            fs::create_dir_all(&locks)?;
            fs::set_permissions(&locks, fs::Permissions::from_mode(0o700))?;
        }
        fs::create_dir(folder.path().join("empty"))?;
        let id = fastrand::u128(..);
        fs::write(folder.path().join("boot_id"), format!("{id:032x}\n"))?;
        Ok(Self { folder })
    }

    /// Where its daemons have their locks.
    #[must_use]
    pub fn locks(&self) -> PathBuf {
        self.folder.path().join("locks")
    }

    /// A program, to be run there. It does not see what is below a loop device.
    #[must_use]
    pub fn command(&self, program: &Path) -> Command {
        let folder = self.folder.path().display();
        let script = format!(
            "mount --bind {folder}/locks {LOCKS} && mount --bind {folder}/boot_id {BOOT_ID} && \
             for loop in /sys/devices/virtual/block/loop*/loop; do \
             mount --bind {folder}/empty \"$loop\" || test ! -d \"$loop\" || exit; done && \
             exec \"$0\" \"$@\""
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c"]).arg(script).arg(program);
        command
    }
}
