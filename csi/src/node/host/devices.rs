//! Block devices and the file systems on them.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, OFlag, fallocate};
use nix::sys::statvfs::statvfs;

use super::{Host, tools};
use crate::error::Error;
use crate::node::content::{self, Content, Making, SUPERBLOCKS_BYTES};
use crate::node::mountinfo::{Device, Table};
use crate::node::world::{Devices, Mounts as _, Result, Usage};

/// Loop devices, by the kernel's list of numbers.
const LOOP_MAJOR: u32 = 7;

/// The folder of the kernel's block devices.
const BLOCKS: &str = "/sys/block";

/// How the kernel marks the path of a file that was removed while it was open.
const REMOVED: &[u8] = b" (deleted)";

impl Devices for Host {
    fn device_bytes(&self, device: &Device) -> Result<u64> {
        let size = File::open(&device.path).and_then(|mut file| file.seek(SeekFrom::End(0)));
        size.map_err(|error| Error::io(format!("size of {}", device.path.display()), error))
    }

    fn is_free(&self, device: &Device) -> Result<bool> {
        let mut options = OpenOptions::new();
        match options.read(true).custom_flags(OFlag::O_EXCL.bits()).open(&device.path) {
            Ok(_) => Ok(true),
            Err(error) if error.raw_os_error() == Some(Errno::EBUSY as i32) => Ok(false),
            Err(error) => Err(Error::io(format!("opening {}", device.path.display()), error)),
        }
    }

    fn file_system_bytes(&self, device: &Device, file_system: &str) -> Result<Option<u64>> {
        let mut start = Vec::new();
        let limit = u64::try_from(SUPERBLOCKS_BYTES).unwrap_or(u64::MAX);
        File::open(&device.path)
            .and_then(|file| file.take(limit).read_to_end(&mut start))
            .map_err(|error| Error::io(format!("reading {}", device.path.display()), error))?;
        Ok(content::size_of(file_system, &start))
    }

    fn content(&self, device: &Device) -> Result<Content> {
        let output = tools::run("blkid", &["-p", "-o", "export"], &device.path)?;
        let said = String::from_utf8_lossy(&output.stdout);
        let failed = |problem| {
            let path = device.path.display();
            Error::unexpected(format!("blkid of {path}"), tools::explained(problem, &output))
        };
        Content::parse(output.status.code(), &said).map_err(failed)
    }

    fn wipe(&self, device: &Device) -> Result<()> {
        tracing::debug!(device = %device.path.display(), "wipe");
        let bytes = self.device_bytes(device)?;
        let failed = |error| Error::io(format!("wiping {}", device.path.display()), error);
        let exclusive = OFlag::O_EXCL.bits();
        let mut options = OpenOptions::new();
        let file =
            options.write(true).custom_flags(exclusive).open(&device.path).map_err(failed)?;
        let keep = FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | keep;
        let length = i64::try_from(bytes).unwrap_or(i64::MAX);
        let zeroes = FallocateFlags::FALLOC_FL_ZERO_RANGE | keep;
        // An image keeps its space. Persistent memory gives none back, so that it is written.
        let first = if device.major == LOOP_MAJOR { zeroes } else { hole };
        let result = match fallocate(&file, first, 0, length) {
            Err(Errno::EOPNOTSUPP) => fallocate(&file, zeroes, 0, length),
            other => other,
        };
        result.map_err(|errno| failed(errno.into()))
    }

    fn format(&self, device: &Device, file_system: &str, making: &Making) -> Result<()> {
        let (program, words) = content::maker(file_system, making);
        tools::made(&program, &words, &device.path, self.device_bytes(device)?)
    }

    /// xfs and btrfs do so themselves when they are mounted.
    fn check(&self, device: &Device, file_system: &str) -> Result<()> {
        if file_system != "ext4" {
            return Ok(());
        }
        let output = tools::run("e2fsck", &["-p"], &device.path)?;
        content::checked(output.status.code()).map_err(|problem| {
            let path = device.path.display();
            Error::unexpected(format!("checking {path}"), tools::explained(problem, &output))
        })
    }

    fn grow(&self, device: &Device, file_system: &str, path: &Path) -> Result<()> {
        let bytes = self.device_bytes(device)?;
        match file_system {
            "ext4" => tools::made::<&str>("resize2fs", &[], &device.path, bytes),
            "xfs" => tools::made("xfs_growfs", &["-d"], path, bytes),
            "btrfs" => tools::made("btrfs", &["filesystem", "resize", "max"], path, bytes),
            _ => Err(Error::unexpected(path.display(), format!("{file_system} can't grow here"))),
        }
    }

    fn usage(&self, path: &Path) -> Result<(Usage, Usage)> {
        let failed = |errno: Errno| Error::io(format!("usage of {}", path.display()), errno.into());
        let stat = statvfs(path).map_err(failed)?;
        let of = |total: u64, free: u64, available: u64, unit: u64| {
            let bytes = |count: u64| i64::try_from(count.saturating_mul(unit)).unwrap_or(i64::MAX);
            let used = bytes(total.saturating_sub(free));
            Usage { total: bytes(total), used, available: bytes(available) }
        };
        let unit = stat.fragment_size();
        let bytes = of(stat.blocks(), stat.blocks_free(), stat.blocks_available(), unit);
        let inodes = of(stat.files(), stat.files_free(), stat.files_available(), 1);
        Ok((bytes, inodes))
    }
}

/// Whether a device's node is there and is that device. A container with its own `/dev` may see
/// nodes of other devices, or of none.
///
/// # Errors
/// When it is not.
pub fn is_node(device: &Device) -> Result<()> {
    let path = device.path.display();
    let failed = |error| Error::io(format!("device {path}, is /dev that of the host?"), error);
    let data = fs::metadata(&device.path).map_err(failed)?;
    let wanted = nix::sys::stat::makedev(device.major.into(), device.minor.into());
    if data.file_type().is_block_device() && data.rdev() == wanted {
        return Ok(());
    }
    let (major, minor) = (device.major, device.minor);
    let problem =
        format!("is no node of the block device {major}:{minor}: is /dev that of the host?");
    Err(Error::in_use(device.path.display(), problem))
}

/// Whether the kernel lets a device be written.
#[must_use]
pub fn is_read_only(device: &Device) -> bool {
    let file = format!("/sys/dev/block/{}:{}/ro", device.major, device.minor);
    fs::read_to_string(file).is_ok_and(|text| text.trim() == "1")
}

/// Sets or clears the kernel's read-only flag of a device.
///
/// # Errors
/// When the tool fails.
pub fn set_read_only(device: &Device, read_only: bool) -> Result<()> {
    if is_read_only(device) == read_only {
        return Ok(());
    }
    let word = if read_only { "--setro" } else { "--setrw" };
    tools::succeeded("blockdev", &[word], &device.path)
}

/// Returns the loop devices over a device's node, as the kubelet has one over each published block
/// volume. They neither claim the device nor belong to a process, so that other checks miss them.
///
/// # Errors
/// When they can't be listed, or one that may be over the device does not answer.
pub fn loops_over(device: &Device) -> Result<Vec<String>> {
    let failed = |error| Error::io(BLOCKS, error);
    let mut over = Vec::new();
    for entry in fs::read_dir(BLOCKS).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        // Only while the loop device is in use. A stuck one does not delay the read.
        let Ok(text) = fs::read(entry.path().join("loop/backing_file")) else { continue };
        let file = backing_file(&text);
        let name = Path::new("/dev").join(entry.file_name());
        if is_over(&name, &file, device)? {
            over.push(name.display().to_string());
        }
    }
    Ok(over)
}

/// Whether a loop device is over a device's node, by the numbers of its file. The file's path alone
/// does not decide: it may be of another mount namespace, and is `/` once its mount is detached.
fn is_over(name: &Path, file: &Path, device: &Device) -> Result<bool> {
    let path = device.path.display();
    let data = fs::metadata(&device.path).map_err(|error| Error::io(path, error))?;
    let (major, minor) = (nix::sys::stat::major(data.dev()), nix::sys::stat::minor(data.dev()));
    let words = ["--list", "--raw", "--noheadings", "--output", "BACK-MAJ:MIN,BACK-INO"];
    match tools::said("losetup", &words, name) {
        Ok(said) => Ok(is_node_of(&said, &format!("{major}:{minor} {}", data.ino()))),
        // One with another file is of no concern to this device, as stuck as it may be.
        Err(error) if is_elsewhere(file, &Host.mounts()?, device) => {
            let (name, file) = (name.display(), file.display());
            tracing::warn!(%name, %file, %error, "skipped a loop device that cannot be read");
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Whether the path of a loop device's file is certainly not one of the device's node.
fn is_elsewhere(file: &Path, table: &Table, device: &Device) -> bool {
    let is_named = file.file_name().is_none_or(|name| Some(name) == device.path.file_name());
    !is_named && !table.shows(file, device)
}

/// The path in the text of a `backing_file`.
fn backing_file(text: &[u8]) -> PathBuf {
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    PathBuf::from(OsStr::from_bytes(text.strip_suffix(REMOVED).unwrap_or(text)))
}

/// Whether a line of `losetup` has the numbers of this node. Blanks that columns are filled up with
/// are written as `\x20`.
fn is_node_of(said: &str, node: &str) -> bool {
    said.replace("\\x20", " ").split_whitespace().eq(node.split_whitespace())
}

/// Devices that the kernel lets this machine have, where it says so; else 0.
#[must_use]
pub fn most_devices() -> i64 {
    let text = fs::read_to_string("/sys/module/ublk_drv/parameters/ublks_max");
    text.ok().and_then(|text| text.trim().parse().ok()).filter(|count| *count > 0).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::world::Images as _;

    #[test]
    fn a_path_that_is_no_device_node_is_an_error() {
        let device = |path: &str| Device { path: path.into(), major: 259, minor: 0 };
        assert!(is_node(&device("/dev/null")).is_err());
        assert!(is_node(&device("/nowhere")).unwrap_err().to_string().contains("that of the host"));
    }

    #[test]
    fn a_loop_device_is_known_by_the_node_it_is_over() {
        assert!(is_node_of("\\x20\\x200:5\\x20 312\n", "0:5 312"));
        for said in ["0:5 31\n", "8:1 312\n", "  \n", ""] {
            assert!(!is_node_of(said, "0:5 312"), "{said}");
        }
    }

    #[test]
    fn a_loop_device_that_does_not_answer_counts_only_where_its_file_may_be_the_node() {
        let device = Device { path: "/dev/ublkb7".into(), major: 259, minor: 7 };
        let text = "42 22 0:5 /ublkb7 /pods/b/block rw - devtmpfs devtmpfs rw\n\
                    43 22 0:5 /ublkb8 /pods/c/block rw - devtmpfs devtmpfs rw\n";
        let table = Table::parse(text.as_bytes()).unwrap();
        let elsewhere = |text: &str| is_elsewhere(&backing_file(text.as_bytes()), &table, &device);
        for text in ["/pods/b/block\n", "/\n", "/dev/ublkb7\n", "/ublkb7 (deleted)\n"] {
            assert!(!elsewhere(text), "{text}");
        }
        for text in ["/images/disk\n", "/pods/c/block\n", "/images/old (deleted)\n"] {
            assert!(elsewhere(text), "{text}");
        }
    }

    #[test]
    fn a_loop_device_over_a_node_is_found_also_when_its_path_is_gone() {
        assert!(nix::unistd::geteuid().is_root(), "not run: loop devices are made by root");
        let folder = std::env::temp_dir().join(format!("csi-loops-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let (image, bound) = (folder.join("image"), folder.join("bound"));
        File::create(&image).unwrap().set_len(1 << 20).unwrap();
        File::create(&bound).unwrap();
        let made = |path: &Path| {
            let said = tools::said("losetup", &["--find", "--show"], path).unwrap();
            let path = PathBuf::from(said.trim());
            let minor = nix::sys::stat::minor(fs::metadata(&path).unwrap().rdev());
            Device { path, major: LOOP_MAJOR, minor: minor.try_into().unwrap() }
        };
        let device = made(&image);
        Host.bind(&device.path, &bound).unwrap();
        let over = made(&bound);
        let name = over.path.display().to_string();
        assert_eq!(loops_over(&device).unwrap(), [name.as_str()]);
        // As a volume that is unpublished while the kubelet has its loop device.
        Host.unmount(&bound, true).unwrap();
        assert_eq!(loops_over(&device).unwrap(), [name]);
        assert!(loops_over(&over).unwrap().is_empty());
        Host.detach_loop(&over).unwrap();
        assert!(loops_over(&device).unwrap().is_empty());
        Host.detach_loop(&device).unwrap();
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn usage_adds_up() {
        let (bytes, inodes) = Host.usage(Path::new("/")).unwrap();
        for usage in [bytes, inodes] {
            assert!(usage.used >= 0 && usage.available >= 0);
            assert!(usage.used + usage.available <= usage.total, "{usage:?}");
        }
    }
}
