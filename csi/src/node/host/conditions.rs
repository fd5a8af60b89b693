//! Conditions of this machine's devices and file systems, as the kernel reports them in `/sys` and
//! from memory: nothing is opened, and no IO is done.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;

use super::Host;
use crate::error::Error;
use crate::node::mountinfo::Device;
use crate::node::world::{Conditions, DeviceLook, Node, Result};

/// Sizes in `/sys` are in these, whatever the device's block is.
const SECTOR_BYTES: u64 = 512;

impl Conditions for Host {
    fn device_look(&self, device: &Device) -> Result<DeviceLook> {
        let folder = of_numbers(device);
        let sectors: Option<u64> = number(&folder.join("size"));
        Ok(DeviceLook {
            node: self.node_at(&device.path, device)?,
            bytes: sectors.map(|sectors| sectors.saturating_mul(SECTOR_BYTES)),
            bad_blocks: text(&folder.join("badblocks")).map_or(0, |text| bad_blocks(&text)),
        })
    }

    fn node_at(&self, path: &Path, device: &Device) -> Result<Node> {
        let data = match fs::metadata(path) {
            Ok(data) => data,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Node::Missing),
            Err(error) => return Err(Error::io(path.display(), error)),
        };
        let wanted = nix::sys::stat::makedev(device.major.into(), device.minor.into());
        let is_it = data.file_type().is_block_device() && data.rdev() == wanted;
        Ok(if is_it { Node::Right } else { Node::Other })
    }

    /// xfs counts none: it stops.
    fn file_system_errors(&self, device: &Device, file_system: &str) -> Result<u64> {
        let name = kernel_name(device);
        Ok(match file_system {
            "ext4" => {
                number(&Path::new("/sys/fs/ext4").join(name).join("errors_count")).unwrap_or(0)
            }
            "btrfs" => btrfs_errors(Path::new("/sys/fs/btrfs"), &name),
            _ => 0,
        })
    }

    /// The root of a mounted file system is in memory, so that this takes no IO; xfs refuses it all
    /// the same once it was shut down.
    fn answers(&self, path: &Path) -> Result<bool> {
        let Err(error) = fs::symlink_metadata(path) else { return Ok(true) };
        let stopped = [Errno::EIO, Errno::ESHUTDOWN, Errno::EUCLEAN];
        if stopped.iter().any(|errno| error.raw_os_error() == Some(*errno as i32)) {
            return Ok(false);
        }
        Err(Error::io(path.display(), error))
    }
}

fn of_numbers(device: &Device) -> PathBuf {
    PathBuf::from(format!("/sys/dev/block/{}:{}", device.major, device.minor))
}

/// Returns the kernel's name of a device, by its numbers. Its node may have another name.
fn kernel_name(device: &Device) -> PathBuf {
    let link = fs::read_link(of_numbers(device)).ok();
    let name = link.as_deref().and_then(Path::file_name).or_else(|| device.path.file_name());
    name.map(PathBuf::from).unwrap_or_default()
}

/// Returns the errors of all devices of the file system that this one belongs to: there is one,
/// since this driver made it.
fn btrfs_errors(all: &Path, name: &Path) -> u64 {
    let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    let ours = entries(all).find(|entry| entry.path().join("devices").join(name).exists());
    let devices = ours.map(|entry| entry.path().join("devinfo"));
    let files = devices.iter().flat_map(|folder| entries(folder));
    let texts = files.filter_map(|entry| text(&entry.path().join("error_stats")));
    texts.map(|text| sum_of_counters(&text)).fold(0, u64::saturating_add)
}

/// Lines of a name and a number.
fn sum_of_counters(text: &str) -> u64 {
    let numbers = text.lines().filter_map(|line| line.split_whitespace().nth(1)?.parse().ok());
    numbers.fold(0, u64::saturating_add)
}

/// Lines of a sector and how many are bad from there.
fn bad_blocks(text: &str) -> u64 {
    sum_of_counters(text)
}

fn number(path: &Path) -> Option<u64> {
    text(path)?.trim().parse().ok()
}

/// Reads a file of the kernel. Without the file nothing is known, which is no fault.
fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_of_its_device_of_another_or_not_there() {
        let device = |path: &str| Device { path: path.into(), major: 7, minor: 0 };
        assert_eq!(
            Host.node_at(Path::new("/dev/null"), &device("/dev/null")).unwrap(),
            Node::Other
        );
        assert_eq!(
            Host.node_at(Path::new("/nowhere"), &device("/nowhere")).unwrap(),
            Node::Missing
        );
    }

    #[test]
    fn a_device_that_the_kernel_does_not_have_has_no_size() {
        let gone = Device { path: "/dev/nowhere".into(), major: 4095, minor: 1_048_575 };
        let look = Host.device_look(&gone).unwrap();
        assert_eq!(look, DeviceLook { node: Node::Missing, bytes: None, bad_blocks: 0 });
        assert_eq!(Host.file_system_errors(&gone, "ext4").unwrap(), 0);
        assert_eq!(Host.file_system_errors(&gone, "btrfs").unwrap(), 0);
    }

    #[test]
    fn every_device_of_this_machine_has_its_size_and_node() {
        for entry in fs::read_dir("/sys/dev/block").into_iter().flatten().flatten() {
            let name = entry.file_name().into_string().unwrap();
            let (major, minor) = name.split_once(':').unwrap();
            let (major, minor) = (major.parse().unwrap(), minor.parse().unwrap());
            let device = Device { path: "/nowhere".into(), major, minor };
            assert!(Host.device_look(&device).unwrap().bytes.is_some(), "{name}");
            assert!(!kernel_name(&device).as_os_str().is_empty());
        }
    }

    #[test]
    fn counters_of_btrfs_are_added_up() {
        let said = "write_errs 1\nread_errs 20\nflush_errs 0\ncorruption_errs 300\n";
        assert_eq!(sum_of_counters(said), 321);
        assert_eq!(sum_of_counters(""), 0);
        let folder = std::env::temp_dir().join(format!("csi-btrfs-{}", std::process::id()));
        for (uuid, device, errors) in [("a", "ublkb1", 5), ("b", "ublkb2", 7)] {
            let info = folder.join(uuid).join("devinfo/1");
            fs::create_dir_all(&info).unwrap();
            fs::create_dir_all(folder.join(uuid).join("devices").join(device)).unwrap();
            fs::write(info.join("error_stats"), format!("write_errs {errors}\n")).unwrap();
        }
        assert_eq!(btrfs_errors(&folder, Path::new("ublkb2")), 7);
        assert_eq!(btrfs_errors(&folder, Path::new("ublkb3")), 0);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn bad_sectors_are_counted() {
        assert_eq!(bad_blocks("128 8\n4096 1\n"), 9);
        assert_eq!(bad_blocks(""), 0);
    }

    #[test]
    fn a_healthy_mount_answers() {
        assert!(Host.answers(Path::new("/")).unwrap());
        assert!(Host.answers(Path::new("/nowhere")).is_err());
    }
}
