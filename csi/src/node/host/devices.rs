//! Block devices and the file systems on them.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, OFlag, fallocate};
use nix::sys::statvfs::statvfs;

use super::{Host, tools};
use crate::error::Error;
use crate::node::content::{self, Content, Making, SUPERBLOCKS_BYTES};
use crate::node::mountinfo::Device;
use crate::node::world::{Devices, Result, Usage};

/// Loop devices, by the kernel's list of numbers.
const LOOP_MAJOR: u32 = 7;

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
        let output = tools::run("blkid", &["-p", "-o", "export"], Some(&device.path))?;
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
        tools::succeeded(&program, &words, Some(&device.path))
    }

    /// xfs and btrfs do so themselves when they are mounted.
    fn check(&self, device: &Device, file_system: &str) -> Result<()> {
        if file_system != "ext4" {
            return Ok(());
        }
        let output = tools::run("e2fsck", &["-p"], Some(&device.path))?;
        content::checked(output.status.code()).map_err(|problem| {
            let path = device.path.display();
            Error::unexpected(format!("checking {path}"), tools::explained(problem, &output))
        })
    }

    fn grow(&self, device: &Device, file_system: &str, path: &Path) -> Result<()> {
        match file_system {
            "ext4" => tools::succeeded::<&str>("resize2fs", &[], Some(&device.path)),
            "xfs" => tools::succeeded("xfs_growfs", &["-d"], Some(path)),
            "btrfs" => tools::succeeded("btrfs", &["filesystem", "resize", "max"], Some(path)),
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
    tools::succeeded("blockdev", &[word], Some(&device.path))
}

/// Returns the loop devices over a device's node, as the kubelet has one over each published block
/// volume. They neither claim the device nor belong to a process, so that other checks miss them.
///
/// # Errors
/// When they can't be listed.
pub fn loops_over(device: &Device) -> Result<Vec<String>> {
    let blocks = fs::read_dir("/sys/block").map_err(|error| Error::io("/sys/block", error))?;
    let in_use = |entry: fs::DirEntry| entry.path().join("loop").exists();
    if !blocks.flatten().any(in_use) {
        return Ok(Vec::new());
    }
    let path = device.path.display();
    let data = fs::metadata(&device.path).map_err(|error| Error::io(path, error))?;
    let words = ["--list", "--raw", "--noheadings", "--output", "NAME,BACK-MAJ:MIN,BACK-INO"];
    let output = tools::run("losetup", &words, None)?;
    if !output.status.success() {
        let problem = tools::explained(output.status.to_string(), &output);
        return Err(Error::unexpected("listing loop devices", problem));
    }
    let (major, minor) = (nix::sys::stat::major(data.dev()), nix::sys::stat::minor(data.dev()));
    let node = format!("{major}:{minor} {}", data.ino());
    Ok(over(&String::from_utf8_lossy(&output.stdout), &node))
}

/// The first words of lines that go on with this. Blanks that columns are filled up with are
/// written as `\x20`.
fn over(list: &str, node: &str) -> Vec<String> {
    let list = list.replace("\\x20", " ");
    let lines = list.lines().filter_map(|line| line.split_once(' '));
    let over = lines.filter(|(_, rest)| rest.split_whitespace().eq(node.split_whitespace()));
    over.map(|(name, _)| name.to_owned()).collect()
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

    #[test]
    fn a_path_that_is_no_device_node_is_an_error() {
        let device = |path: &str| Device { path: path.into(), major: 259, minor: 0 };
        assert!(is_node(&device("/dev/null")).is_err());
        assert!(is_node(&device("/nowhere")).unwrap_err().to_string().contains("that of the host"));
    }

    #[test]
    fn loop_devices_are_known_by_the_node_they_are_over() {
        let list = "/dev/loop0 \\x20\\x200:5\\x20 312\n/dev/loop1  0:5   31\n/dev/loop2 8:1 \
                    312\n/dev/loop3\n";
        assert_eq!(over(list, "0:5 312"), ["/dev/loop0"]);
        assert_eq!(over(list, "0:5 31"), ["/dev/loop1"]);
        assert!(over("", "0:5 31").is_empty());
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
