//! Steps on this machine: mounts, folders, devices, and the tools of file systems. Each step is
//! logged before it runs, without options, as those may hold secrets.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, OFlag, fallocate};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::statvfs::{FsFlags, statvfs};

use super::content::{self, Content, Making, SUPERBLOCKS_BYTES};
use super::mountinfo::{Device, Table};
use super::world::{Kind, Mount, Mounted, Result, Usage};
use crate::error::Error;

/// Where the kernel shows the mount table.
const TABLE: &str = "/proc/self/mountinfo";

/// Tools of file systems lie there, and not every `PATH` has it.
const TOOLS: &str = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin";

/// Loop devices, by the kernel's list of numbers.
const LOOP_MAJOR: u32 = 7;

/// Limit of a tool's output in errors: its last lines have the reason of the failure.
const SAID_BYTES: usize = 400;

/// The mount table as it is now.
///
/// # Errors
/// When it can't be read or understood.
pub fn mounts() -> Result<Table> {
    let text = fs::read(TABLE).map_err(|error| Error::io(TABLE, error))?;
    Table::parse(&text).map_err(|line| Error::unexpected(TABLE, format!("not understood: {line}")))
}

/// Mounts a file system.
///
/// # Errors
/// The kernel's error.
pub fn mount_device(it: &Mount<'_>) -> Result<Mounted> {
    let Mount { device, file_system, path, options } = it;
    tracing::debug!(device = %device.path.display(), path = %path.display(), file_system, "mount");
    let data = (!options.data.is_empty()).then_some(options.data.as_str());
    match mount(Some(&device.path), *path, Some(*file_system), options.flags, data) {
        Ok(()) => Ok(Mounted::Done),
        Err(Errno::EROFS | Errno::EACCES) => Ok(Mounted::NeedsWriting),
        // The error of btrfs in this case.
        Err(Errno::EIO) if options.read_only() => Ok(Mounted::NeedsWriting),
        Err(Errno::EBUSY) => Err(Error::in_use(device.path.display(), "is in use")),
        // The error of ext4; xfs continues without DAX.
        Err(Errno::EINVAL | Errno::EOPNOTSUPP) if options.has_dax() => {
            let problem = "can't be mounted with DAX, which usage AppDirect needs: see dmesg";
            Err(Error::in_use(device.path.display(), problem))
        }
        Err(errno) => {
            let what = format!("mounting {} at {}", device.path.display(), path.display());
            Err(Error::io(what, errno.into()))
        }
    }
}

/// Binds one path to another.
///
/// # Errors
/// The kernel's error.
pub fn bind(from: &Path, to: &Path) -> Result<()> {
    tracing::debug!(from = %from.display(), to = %to.display(), "bind");
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .map_err(|errno| Error::io(format!("binding {}", to.display()), errno.into()))
}

/// Makes a mount read-only and leaves its other flags.
///
/// # Errors
/// The kernel's error.
pub fn make_read_only(path: &Path) -> Result<()> {
    tracing::debug!(path = %path.display(), "make read-only");
    let failed =
        |errno: Errno| Error::io(format!("making {} read-only", path.display()), errno.into());
    let has = statvfs(path).map_err(failed)?.flags();
    // The call removes attributes that are not listed here.
    let kept = [
        (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
        (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
        (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
        (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
        (FsFlags::ST_NODIRATIME, MsFlags::MS_NODIRATIME),
        (FsFlags::ST_RELATIME, MsFlags::MS_RELATIME),
    ];
    let mut flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    for (there, flag) in kept {
        if has.contains(there) {
            flags |= flag;
        }
    }
    mount(None::<&str>, path, None::<&str>, flags, None::<&str>).map_err(failed)
}

/// Removes the uppermost mount at a path.
///
/// # Errors
/// When it is in use, and not lazily taken away.
pub fn unmount(path: &Path, lazily: bool) -> Result<()> {
    tracing::debug!(path = %path.display(), lazily, "unmount");
    let mut result = umount2(path, MntFlags::UMOUNT_NOFOLLOW);
    if lazily && result == Err(Errno::EBUSY) {
        result = umount2(path, MntFlags::UMOUNT_NOFOLLOW | MntFlags::MNT_DETACH);
    }
    match result {
        // It has gone meanwhile.
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => Ok(()),
        Err(Errno::EBUSY) => Err(Error::in_use(path.display(), "is in use and stays mounted")),
        Err(errno) => Err(Error::io(format!("unmounting {}", path.display()), errno.into())),
    }
}

/// Returns the kind of a path's object; links are not followed.
///
/// # Errors
/// When it can't be found out.
pub fn kind(path: &Path) -> Result<Option<Kind>> {
    match fs::symlink_metadata(path) {
        Ok(data) if data.is_dir() => Ok(Some(Kind::Folder)),
        Ok(data) if data.is_file() => Ok(Some(Kind::File)),
        Ok(_) => Ok(Some(Kind::Other)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io(path.display(), error)),
    }
}

/// Makes a folder.
///
/// # Errors
/// The kernel's error; an existing folder is no error.
pub fn make_folder(path: &Path) -> Result<()> {
    tracing::debug!(path = %path.display(), "make folder");
    made(path, DirBuilder::new().mode(0o750).create(path))
}

/// Makes an empty file.
///
/// # Errors
/// The kernel's error; an existing file is no error.
pub fn make_file(path: &Path) -> Result<()> {
    tracing::debug!(path = %path.display(), "make file");
    let mut options = OpenOptions::new();
    made(path, options.write(true).create_new(true).mode(0o660).open(path).map(drop))
}

fn made(path: &Path, result: io::Result<()>) -> Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(Error::in_use(path.display(), "can't be made: there is no folder above it"))
        }
        Err(error) => Err(Error::io(format!("making {}", path.display()), error)),
        Ok(()) => Ok(()),
    }
}

/// Removes a folder or file that is empty.
///
/// # Errors
/// When it is not.
pub fn remove(path: &Path, kind: Kind) -> Result<()> {
    tracing::debug!(path = %path.display(), "remove");
    let holds = || Error::in_use(path.display(), "holds something, and is left as it is");
    let result = match kind {
        Kind::Folder => fs::remove_dir(path),
        Kind::File if fs::symlink_metadata(path).is_ok_and(|data| data.len() == 0) => {
            fs::remove_file(path)
        }
        Kind::File | Kind::Other => return Err(holds()),
    };
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Err(holds()),
        Err(error) => Err(Error::io(format!("removing {}", path.display()), error)),
        Ok(()) => Ok(()),
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

/// Bytes of a device.
///
/// # Errors
/// When it can't be opened.
pub fn device_bytes(device: &Device) -> Result<u64> {
    let size = File::open(&device.path).and_then(|mut file| file.seek(SeekFrom::End(0)));
    size.map_err(|error| Error::io(format!("size of {}", device.path.display()), error))
}

/// Whether a device can be had for oneself.
///
/// # Errors
/// When it can't be opened for another reason.
pub fn is_free(device: &Device) -> Result<bool> {
    let mut options = OpenOptions::new();
    match options.read(true).custom_flags(OFlag::O_EXCL.bits()).open(&device.path) {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(Errno::EBUSY as i32) => Ok(false),
        Err(error) => Err(Error::io(format!("opening {}", device.path.display()), error)),
    }
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
    let output = run("losetup", &words, None)?;
    if !output.status.success() {
        let problem = explained(output.status.to_string(), &output);
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

/// Bytes of the file system on a device.
///
/// # Errors
/// When the device can't be read.
pub fn file_system_bytes(device: &Device, file_system: &str) -> Result<Option<u64>> {
    let mut start = Vec::new();
    let limit = u64::try_from(SUPERBLOCKS_BYTES).unwrap_or(u64::MAX);
    File::open(&device.path)
        .and_then(|file| file.take(limit).read_to_end(&mut start))
        .map_err(|error| Error::io(format!("reading {}", device.path.display()), error))?;
    Ok(content::size_of(file_system, &start))
}

/// Detects the content of a device.
///
/// # Errors
/// When it can't be found out.
pub fn content(device: &Device) -> Result<Content> {
    let output = run("blkid", &["-p", "-o", "export"], Some(&device.path))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let failed = |problem| {
        let path = device.path.display();
        Error::unexpected(format!("looking at {path}"), explained(problem, &output))
    };
    Content::parse(output.status.code(), &said).map_err(failed)
}

/// Discards all of a device: it reads as zeroes.
///
/// # Errors
/// When it can't be written.
pub fn wipe(device: &Device) -> Result<()> {
    tracing::debug!(device = %device.path.display(), "wipe");
    let bytes = device_bytes(device)?;
    let failed = |error| Error::io(format!("wiping {}", device.path.display()), error);
    let exclusive = OFlag::O_EXCL.bits();
    let mut options = OpenOptions::new();
    let file = options.write(true).custom_flags(exclusive).open(&device.path).map_err(failed)?;
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

/// Makes a file system.
///
/// # Errors
/// When the tool fails, with its output.
pub fn format(device: &Device, file_system: &str, making: &Making) -> Result<()> {
    let (program, words) = content::maker(file_system, making);
    succeeded(&program, &words, Some(&device.path))
}

/// Mends a file system where that needs no person. xfs and btrfs do so themselves when they are
/// mounted.
///
/// # Errors
/// When it cannot be repaired.
pub fn check(device: &Device, file_system: &str) -> Result<()> {
    if file_system != "ext4" {
        return Ok(());
    }
    let output = run("e2fsck", &["-p"], Some(&device.path))?;
    content::checked(output.status.code()).map_err(|problem| {
        let path = device.path.display();
        Error::unexpected(format!("checking {path}"), explained(problem, &output))
    })
}

/// Makes a mounted file system as large as its device.
///
/// # Errors
/// When the tool fails, with its output.
pub fn grow(device: &Device, file_system: &str, path: &Path) -> Result<()> {
    match file_system {
        "ext4" => succeeded::<&str>("resize2fs", &[], Some(&device.path)),
        "xfs" => succeeded("xfs_growfs", &["-d"], Some(path)),
        "btrfs" => succeeded("btrfs", &["filesystem", "resize", "max"], Some(path)),
        _ => Err(Error::unexpected(path.display(), format!("{file_system} can't grow here"))),
    }
}

/// Bytes and inodes of the file system mounted at a path.
///
/// # Errors
/// The kernel's error.
pub fn usage(path: &Path) -> Result<(Usage, Usage)> {
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

/// Devices that the kernel lets this machine have, where it says so; else 0.
#[must_use]
pub fn most_devices() -> i64 {
    let text = fs::read_to_string("/sys/module/ublk_drv/parameters/ublks_max");
    text.ok().and_then(|text| text.trim().parse().ok()).filter(|count| *count > 0).unwrap_or(0)
}

/// Runs a tool.
///
/// # Errors
/// When it fails, with its output.
pub(super) fn succeeded<S: AsRef<OsStr>>(
    program: &str,
    words: &[S],
    last: Option<&Path>,
) -> Result<()> {
    said(program, words, last).map(drop)
}

/// Runs a tool, and returns its output.
///
/// # Errors
/// When it fails.
pub(super) fn said<S: AsRef<OsStr>>(
    program: &str,
    words: &[S],
    last: Option<&Path>,
) -> Result<String> {
    let output = run(program, words, last)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let path = last.unwrap_or_else(|| Path::new("")).display();
    let problem = explained(output.status.to_string(), &output);
    Err(Error::unexpected(format!("{program} {path}"), problem))
}

fn run<S: AsRef<OsStr>>(program: &str, words: &[S], last: Option<&Path>) -> Result<Output> {
    tracing::debug!(program, path = ?last, "run");
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new(program);
    command.args(words).args(last).stdin(Stdio::null());
    // The tools' output is compared, and the tools are searched in all the usual directories.
    command.env("LC_ALL", "C").env("PATH", format!("{path}:{TOOLS}"));
    command.output().map_err(|error| Error::io(format!("starting {program}"), error))
}

/// A problem, and the end of the tool's output, in a line.
fn explained(problem: String, output: &Output) -> String {
    let said = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    let tail = &said[said.len().saturating_sub(SAID_BYTES)..];
    let words = String::from_utf8_lossy(tail);
    let words: Vec<&str> = words.split_whitespace().collect();
    if words.is_empty() { problem } else { format!("{problem}: {}", words.join(" ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_empty_folders_are_removed() {
        let folder = std::env::temp_dir().join(format!("csi-remove-{}", std::process::id()));
        make_folder(&folder).unwrap();
        make_folder(&folder).unwrap();
        let file = folder.join("file");
        make_file(&file).unwrap();
        make_file(&file).unwrap();
        assert!(remove(&folder, Kind::Folder).unwrap_err().to_string().contains("holds something"));
        fs::write(&file, "data").unwrap();
        assert!(remove(&file, Kind::File).unwrap_err().to_string().contains("holds something"));
        fs::write(&file, "").unwrap();
        assert_eq!(kind(&file).unwrap(), Some(Kind::File));
        remove(&file, Kind::File).unwrap();
        remove(&folder, Kind::Folder).unwrap();
        remove(&folder, Kind::Folder).unwrap();
        assert_eq!(kind(&folder).unwrap(), None);
    }

    #[test]
    fn a_folder_without_one_above_it_is_not_made() {
        let said = make_folder(Path::new("/nowhere/at/all")).unwrap_err().to_string();
        assert!(said.contains("no folder above"), "{said}");
    }

    #[test]
    fn a_path_that_is_no_device_node_is_an_error() {
        let device = |path: &str| Device { path: path.into(), major: 259, minor: 0 };
        assert!(is_node(&device("/dev/null")).is_err());
        assert!(is_node(&device("/nowhere")).unwrap_err().to_string().contains("that of the host"));
    }

    #[test]
    fn the_output_of_a_tool_is_part_of_the_error() {
        let said = succeeded("sh", &["-c", "echo no room >&2; exit 3"], None).unwrap_err();
        assert!(said.to_string().contains("no room"), "{said}");
        let said = succeeded::<&str>("no-such-program", &[], None).unwrap_err();
        assert!(said.to_string().contains("starting no-such-program"), "{said}");
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
        let (bytes, inodes) = usage(Path::new("/")).unwrap();
        for usage in [bytes, inodes] {
            assert!(usage.used >= 0 && usage.available >= 0);
            assert!(usage.used + usage.available <= usage.total, "{usage:?}");
        }
    }
}
