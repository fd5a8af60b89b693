//! Where the pump works: a file made for it, one named by the caller, or a loop device.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use blockd_mapper::io::IoBuffer;
use nix::sys::statfs::{TMPFS_MAGIC, statfs};

/// Pages written at a time while a file is filled: 1 MiB.
const FILL_PAGES: usize = 256;

/// A file or device of known size, filled, so that the file system below has nothing left to
/// allocate while anything is measured.
#[derive(Debug)]
pub struct Place {
    /// Where it is.
    pub path: PathBuf,
    /// Without the page cache.
    pub direct: bool,
    /// Removed in the end.
    ours: bool,
}

impl Place {
    /// A new file of `size` bytes in the system's temporary directory, or beside it where that
    /// is memory. Gone when this is dropped.
    pub fn temporary(size: u64) -> Result<Self> {
        let name = format!("blockd-pump-{}.pool", std::process::id());
        let here = std::env::current_dir()?;
        let candidates = [std::env::temp_dir(), PathBuf::from("/var/tmp"), here];
        let directory = candidates.iter().find(|directory| takes_direct(directory, &name));
        let direct = directory.is_some();
        let directory = directory.unwrap_or(&candidates[0]);
        if *directory != candidates[0] {
            println!("note: {} is no disk, using {}", candidates[0].display(), directory.display());
        } else if !direct {
            println!(
                "note: no directory takes O_DIRECT: measuring the page cache, as fio does too"
            );
        }
        let place = Self { path: directory.join(name), direct, ours: true };
        let mut options = OpenOptions::new();
        let file = place.flags(options.write(true).create_new(true)).open(&place.path);
        let file = file.with_context(|| format!("create {}", place.path.display()))?;
        fill(&file, size).with_context(|| format!("fill {}", place.path.display()))?;
        Ok(place)
    }

    /// A file or device of the caller's, whose content will be lost. A file is made as large as
    /// needed.
    pub fn given(path: &Path, size: u64) -> Result<Self> {
        let place = Self { path: path.to_owned(), direct: true, ours: false };
        let mut options = OpenOptions::new();
        let file = place.flags(options.write(true).create(true).truncate(false)).open(path);
        let file = file.with_context(|| format!("open {} with O_DIRECT", path.display()))?;
        let there = bytes_of(&file)?;
        if file.metadata()?.file_type().is_block_device() {
            ensure!(there >= size, "{}: {there} bytes, {size} are needed", path.display());
        }
        fill(&file, size).with_context(|| format!("fill {}", path.display()))?;
        Ok(place)
    }

    /// A file description of its own for a ring.
    pub fn open(&self) -> Result<File> {
        let mut options = OpenOptions::new();
        let file = self.flags(options.read(true).write(true)).open(&self.path);
        file.with_context(|| format!("open {}", self.path.display()))
    }

    fn flags<'a>(&self, options: &'a mut OpenOptions) -> &'a mut OpenOptions {
        if self.direct { options.custom_flags(libc::O_DIRECT) } else { options }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.ours
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            eprintln!("{} is left behind: {error}", self.path.display());
        }
    }
}

/// A loop device over a file. Detached when dropped.
#[derive(Debug)]
pub struct LoopDevice {
    /// Its node.
    pub path: PathBuf,
}

impl LoopDevice {
    /// Attaches a file, with direct IO to it.
    pub fn attach(file: &Path) -> Result<Self> {
        let output = Command::new("losetup")
            .args(["--find", "--show", "--direct-io=on", "--sector-size=4096"])
            .arg(file)
            .output()
            .context("losetup: `cargo ci setup` installs it (Debian package `mount`)")?;
        if !output.status.success() {
            let reason = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            bail!("no loop device (root is needed): {reason}");
        }
        let path = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        Ok(Self { path: PathBuf::from(path) })
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let status = Command::new("losetup").arg("--detach").arg(&self.path).status();
        if !status.is_ok_and(|status| status.success()) {
            eprintln!("{} is left attached", self.path.display());
        }
    }
}

/// Bytes of a file or block device.
fn bytes_of(mut file: &File) -> Result<u64> {
    use std::io::{Seek, SeekFrom};
    Ok(file.seek(SeekFrom::End(0))?)
}

/// Whether files in a directory are on a disk and can be opened with O_DIRECT.
pub(crate) fn takes_direct(directory: &Path, name: &str) -> bool {
    if !statfs(directory).is_ok_and(|fs| fs.filesystem_type() != TMPFS_MAGIC) {
        return false;
    }
    let path = directory.join(name);
    let mut options = OpenOptions::new();
    let options = options.write(true).create_new(true).custom_flags(libc::O_DIRECT);
    let opened = options.open(&path).is_ok();
    // It may exist even where opening failed.
    let _ = std::fs::remove_file(&path);
    opened
}

/// Allocates a file's space and writes it, so that no extent of it is new to the file system.
pub(crate) fn fill(file: &File, size: u64) -> Result<()> {
    if file.metadata()?.is_file() {
        let len = i64::try_from(size)?;
        nix::fcntl::posix_fallocate(file, 0, len).context("allocate space")?;
    }
    let mut buffer = IoBuffer::new(FILL_PAGES).context("no memory for a buffer")?;
    buffer.as_bytes_mut().fill(0xF1);
    let step = buffer.as_bytes().len() as u64;
    let mut offset = 0;
    while offset < size {
        let len = usize::try_from(step.min(size - offset))?;
        file.write_all_at(&buffer.as_bytes()[..len], offset)?;
        offset += len as u64;
    }
    Ok(file.sync_all()?)
}
