//! Block devices and file systems that root makes for a test.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::folder::Folder;
use crate::tools;

/// A block device over a file, until it is dropped. Only root can make one.
#[derive(Debug)]
pub struct Loop(PathBuf);

impl Loop {
    /// A device over this file.
    ///
    /// # Errors
    /// When the kernel or our rights do not allow it.
    pub fn over(file: &Path) -> Result<Self> {
        let mut command = Command::new(tools::find("losetup")?);
        let path = tools::text(command.args(["--find", "--show", "--direct-io=on"]).arg(file))?;
        Ok(Self(PathBuf::from(path.trim())))
    }

    /// Its path below `/dev`.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

/// A file system of a few MiB, mounted until it is dropped. Only root can have one.
#[derive(Debug)]
pub struct Small {
    folder: Folder,
    _disk: Option<Loop>,
}

impl Small {
    /// ext4 on a loop device.
    ///
    /// # Errors
    /// When the kernel or our rights do not allow it.
    pub fn ext4(bytes: u64) -> Result<Self> {
        let folder = Folder::new("small")?;
        let image = folder.path().join("image");
        File::create(&image)?.set_len(bytes)?;
        tools::shell(&format!("mkfs.ext4 -q -m 0 {}", image.display()))?;
        let disk = Loop::over(&image)?;
        let path = disk.path().to_string_lossy().into_owned();
        let small = Self { folder, _disk: Some(disk) };
        small.mount(&["-o", "noatime", &path])?;
        Ok(small)
    }

    /// A tmpfs.
    ///
    /// # Errors
    /// As [`Self::ext4`].
    pub fn tmpfs(bytes: u64) -> Result<Self> {
        let small = Self { folder: Folder::new("small")?, _disk: None };
        small.mount(&["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"])?;
        Ok(small)
    }

    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("mounted")
    }

    fn mount(&self, words: &[&str]) -> Result<()> {
        let path = self.path();
        fs::create_dir_all(&path)?;
        tools::output(Command::new("mount").args(words).arg(&path)).map(|_| ())
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // The kernel removes the loop device with its last user.
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).status();
    }
}
