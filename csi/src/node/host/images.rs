//! Persistent memory: the kernel's own devices, DAX, and images for virtual machines with loop
//! devices over them.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use blockd_kata::{FRONT, Image};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, OFlag, fallocate};
use nix::sys::statvfs::statvfs;
use rustix::fs::{AtFlags, StatxAttributes, StatxFlags, statx};

use super::{Host, devices, tools};
use crate::error::Error;
use crate::node::mountinfo::Device;
use crate::node::world::{Images, Loop, Mounts as _, Result};

/// Bytes at each end of a device in which file systems, tables and volume managers leave something.
const ENDS_BYTES: u64 = 1 << 20;

/// Why a file can't be made where that says nothing about DAX.
const NO_FILE: [ErrorKind; 3] =
    [ErrorKind::ReadOnlyFilesystem, ErrorKind::StorageFull, ErrorKind::QuotaExceeded];

/// How often an image is tried that is smaller by [`FRONT`]: a file system says that there is room
/// and then needs some of that to remember where the file lies.
const TRIES: u64 = 64;

impl Images for Host {
    fn is_blank(&self, device: &Device) -> Result<bool> {
        let failed = |error| Error::io(format!("reading {}", device.path.display()), error);
        let mut file = File::open(&device.path).map_err(failed)?;
        let bytes = file.seek(SeekFrom::End(0)).map_err(failed)?;
        let len = ENDS_BYTES.min(bytes);
        let mut buffer = vec![0; usize::try_from(len).unwrap_or_default()];
        for at in [0, bytes - len] {
            file.read_exact_at(&mut buffer, at).map_err(failed)?;
            if buffer.iter().any(|&byte| byte != 0) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A new file says so of itself; where none can be made, the mount's options have to do.
    fn has_dax(&self, path: &Path) -> Result<bool> {
        let failed = |error| Error::io(format!("looking for DAX at {}", path.display()), error);
        let by_options = self.mounts()?.at(path).is_some_and(|entry| entry.dax);
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).custom_flags(OFlag::O_TMPFILE.bits());
        let file = match options.open(path) {
            Ok(file) => file,
            // A full file system is no reason to keep its workload from it.
            Err(error) if NO_FILE.contains(&error.kind()) => return Ok(by_options),
            Err(error) => return Err(failed(error)),
        };
        let found = statx(&file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS);
        let found = found.map_err(|errno| failed(errno.into()))?;
        let wanted = StatxAttributes::DAX;
        // A kernel that does not know the attribute, as those before 5.8, says nothing by it.
        if found.stx_attributes_mask.contains(wanted) {
            return Ok(found.stx_attributes.contains(wanted));
        }
        Ok(by_options)
    }

    /// Allocates all of it: a virtual machine that maps an image cannot handle a lack of space.
    fn make_image(&self, path: &Path, partition: bool) -> Result<()> {
        tracing::debug!(path = %path.display(), partition, "make image");
        let folder = path.parent().unwrap_or(path);
        let failed = |error| Error::io(format!("making {}", path.display()), error);
        let stat = statvfs(folder).map_err(|errno| failed(errno.into()))?;
        let room = stat.blocks_available().saturating_mul(stat.fragment_size());
        let unfinished = path.with_extension("new");
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(true).mode(0o600);
        let file = options.open(&unfinished).map_err(failed)?;
        for less in 0..TRIES {
            let bytes = room.saturating_sub(less * FRONT);
            let Some(image) = Image::within(bytes, partition) else { break };
            let len = i64::try_from(image.size()).unwrap_or(i64::MAX);
            match fallocate(&file, FallocateFlags::empty(), 0, len) {
                Ok(()) => {}
                Err(Errno::ENOSPC) => {
                    file.set_len(0).map_err(failed)?;
                    continue;
                }
                Err(errno) => return Err(failed(errno.into())),
            }
            image.write(&file).map_err(failed)?;
            fs::rename(&unfinished, path).map_err(failed)?;
            return File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed);
        }
        let problem = format!("can't hold an image: {room} bytes are left beside its own");
        Err(Error::in_use(folder.display(), problem))
    }

    fn loop_of(&self, path: &Path) -> Result<Option<Loop>> {
        if self.kind(path)?.is_none() {
            return Ok(None);
        }
        let words = ["--raw", "--noheadings", "--output", "NAME", "--associated"];
        let said = tools::said("losetup", &words, path)?;
        said.lines().next().map(|name| of_name(name.trim())).transpose()
    }

    fn attach_loop(&self, path: &Path, read_only: bool) -> Result<Loop> {
        tracing::debug!(path = %path.display(), read_only, "attach loop");
        let image = File::open(path).and_then(|file| Image::read(&file));
        let image = image.map_err(|error| Error::io(path.display(), error))?;
        let offset = image.file_system().to_string();
        let mut words = vec!["--find", "--show", "--offset", &offset];
        if read_only {
            words.push("--read-only");
        }
        let said = tools::said("losetup", &words, path)?;
        of_name(said.trim())
    }

    fn detach_loop(&self, device: &Device) -> Result<()> {
        tracing::debug!(device = %device.path.display(), "detach loop");
        tools::succeeded("losetup", &["--detach"], &device.path)
    }
}

fn of_name(name: &str) -> Result<Loop> {
    let data = fs::metadata(name).map_err(|error| Error::io(format!("device {name}"), error))?;
    let number = |part: u64| u32::try_from(part).unwrap_or(u32::MAX);
    let device = Device {
        path: name.into(),
        major: number(nix::sys::stat::major(data.rdev())),
        minor: number(nix::sys::stat::minor(data.rdev())),
    };
    let read_only = devices::is_read_only(&device);
    Ok(Loop { device, read_only })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_blank_when_both_of_its_ends_are() {
        let path = std::env::temp_dir().join(format!("csi-blank-{}", std::process::id()));
        let file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
        let device = Device { path: path.clone(), major: 0, minor: 0 };
        for len in [0, 4096, 64 << 20] {
            file.set_len(len).unwrap();
            assert!(Host.is_blank(&device).unwrap(), "{len}");
        }
        for at in [0, ENDS_BYTES - 1, (64 << 20) - 1, (64 << 20) - ENDS_BYTES] {
            file.write_all_at(&[1], at).unwrap();
            assert!(!Host.is_blank(&device).unwrap(), "{at}");
            file.write_all_at(&[0], at).unwrap();
        }
        // No known content has a signature in the middle.
        file.write_all_at(&[1], 32 << 20).unwrap();
        assert!(Host.is_blank(&device).unwrap());
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn an_image_fills_its_file_and_a_damaged_file_has_none() {
        let folder = std::env::temp_dir().join(format!("csi-image-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let path = folder.join("image");
        assert_eq!(Host.loop_of(&path).unwrap(), None);
        fs::write(&path, vec![0; 4096]).unwrap();
        let said = Host.attach_loop(&path, false).unwrap_err().to_string();
        assert!(said.contains("none of an image"), "{said}");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_folder_without_dax_is_detected() {
        let folder = std::env::temp_dir();
        // Not every file system can make a file without a name.
        if let Ok(has) = Host.has_dax(&folder) {
            assert!(!has);
        }
    }
}
