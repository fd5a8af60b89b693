//! Users of a block device: a device in use is not removed unless forced.

use std::fmt;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Named in one message; the rest is counted.
const MOST_NAMED: usize = 8;

/// One that uses a device.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum User {
    /// A mount, as a process sees it.
    Mount {
        /// Where.
        point: String,
        /// A process that sees it.
        pid: u32,
    },
    /// Another block device is made of it.
    Holder(String),
    /// A swap area.
    Swap,
    /// A process has it open.
    Process {
        /// Its number.
        pid: u32,
        /// Its name.
        name: String,
    },
    /// Something in the kernel that does not say its name.
    Kernel,
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mount { point, pid: 1 } => write!(f, "mounted at {point}"),
            Self::Mount { point, pid } => write!(f, "mounted at {point} (seen by process {pid})"),
            Self::Holder(name) => write!(f, "part of block device {name}"),
            Self::Swap => write!(f, "swapped to"),
            Self::Process { pid, name } => write!(f, "open in process {pid} ({name})"),
            Self::Kernel => write!(f, "claimed by the kernel"),
        }
    }
}

/// Users in one line.
pub(super) fn listed(users: &[User]) -> String {
    let mut names: Vec<String> = users.iter().take(MOST_NAMED).map(User::to_string).collect();
    if users.len() > MOST_NAMED {
        names.push(format!("{} more", users.len() - MOST_NAMED));
    }
    names.join(", ")
}

/// Where to look; tests look elsewhere.
#[derive(Clone, Debug)]
pub(super) struct Places {
    pub(super) proc: PathBuf,
    pub(super) sys_block: PathBuf,
    pub(super) dev: PathBuf,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            proc: PathBuf::from("/proc"),
            sys_block: PathBuf::from("/sys/block"),
            dev: PathBuf::from("/dev"),
        }
    }
}

/// The disk and its partitions: `MAJOR:MINOR` and name.
fn parts(places: &Places, disk: &str) -> Vec<(String, String)> {
    let folder = places.sys_block.join(disk);
    let numbers = |folder: &Path| Some(fs::read_to_string(folder.join("dev")).ok()?.trim().into());
    let mut found: Vec<(String, String)> =
        numbers(&folder).into_iter().map(|numbers| (numbers, disk.to_owned())).collect();
    for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(disk)
            && let Some(numbers) = numbers(&entry.path())
        {
            found.push((numbers, name));
        }
    }
    found
}

/// The numbers of a disk, `MAJOR:MINOR`, once it is there.
pub(super) fn numbers_of(places: &Places, disk: &str) -> Option<(u32, u32)> {
    let text = fs::read_to_string(places.sys_block.join(disk).join("dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// All users of the disk or of a partition of it, except this process.
pub(super) fn users(places: &Places, disk: &str) -> Vec<User> {
    let parts = parts(places, disk);
    let mut found = Vec::new();
    for (_, name) in &parts {
        let base = places.sys_block.join(disk);
        let folder = if name == disk { base } else { base.join(name) };
        for holder in fs::read_dir(folder.join("holders")).into_iter().flatten().flatten() {
            found.push(User::Holder(holder.file_name().to_string_lossy().into_owned()));
        }
    }
    let paths: Vec<String> = parts.iter().map(|(_, name)| format!("/dev/{name}")).collect();
    loops(places, &parts, &paths, &mut found);
    let swaps = fs::read_to_string(places.proc.join("swaps")).unwrap_or_default();
    if swaps.lines().any(|line| paths.iter().any(|path| line.split(' ').next() == Some(path))) {
        found.push(User::Swap);
    }
    processes(places, &parts, &paths, &mut found);
    if found.is_empty() && is_claimed(&places.dev.join(disk)) {
        found.push(User::Kernel);
    }
    found.sort();
    found.dedup();
    found
}

/// Loop devices over it: a loop is no holder, and no process has its backing device open. The
/// kernel names that device by a path, which may be one that the device's node is bound to, as the
/// kubelet does. The table of mounts resolves it: access to the path itself could wait for a
/// server.
fn loops(places: &Places, parts: &[(String, String)], paths: &[String], found: &mut Vec<User>) {
    let table = fs::read_to_string(places.proc.join("self/mountinfo")).unwrap_or_default();
    let is_bound = |backing: &str| {
        let backing = backing.replace(' ', "\\040");
        table.lines().any(|line| {
            let fields: Vec<&str> = line.split(' ').collect();
            let root = fields.get(3).and_then(|root| root.strip_prefix('/'));
            fields.get(4) == Some(&backing.as_str())
                && line.contains(" - devtmpfs ")
                && parts.iter().any(|(_, name)| root == Some(name.as_str()))
        })
    };
    for entry in fs::read_dir(&places.sys_block).into_iter().flatten().flatten() {
        let Ok(text) = fs::read_to_string(entry.path().join("loop/backing_file")) else { continue };
        let backing = text.trim_end_matches('\n');
        if paths.iter().any(|path| path == backing) || is_bound(backing) {
            found.push(User::Holder(entry.file_name().to_string_lossy().into_owned()));
        }
    }
}

/// Whether a user is a loop device that has no user of its own, as the kubelet keeps one over each
/// raw block volume and reads nothing through it.
pub(super) fn is_idle_loop(places: &Places, user: &User) -> bool {
    let User::Holder(name) = user else { return false };
    let is_loop = places.sys_block.join(name).join("loop").exists();
    is_loop && users(places, name).is_empty()
}

fn processes(places: &Places, parts: &[(String, String)], paths: &[String], found: &mut Vec<User>) {
    let mut namespaces = std::collections::BTreeSet::new();
    let mut pids: Vec<u32> = fs::read_dir(&places.proc)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| *pid != std::process::id())
        .collect();
    pids.sort_unstable();
    for pid in pids {
        let folder = places.proc.join(pid.to_string());
        let namespace = fs::read_link(folder.join("ns/mnt")).unwrap_or_default();
        let is_new = namespace.as_os_str().is_empty() || namespaces.insert(namespace);
        if is_new && let Ok(mounts) = fs::read_to_string(folder.join("mountinfo")) {
            let points = mount_points(&mounts, parts, paths);
            found.extend(points.into_iter().map(|point| User::Mount { point, pid }));
        }
        if has_open(&folder, parts) {
            let name = fs::read_to_string(folder.join("comm")).unwrap_or_default();
            found.push(User::Process { pid, name: name.trim().to_owned() });
        }
    }
}

/// Where a table of mounts has one of these devices. Some file systems show a number of their own,
/// so that the source counts as well.
fn mount_points(table: &str, parts: &[(String, String)], paths: &[String]) -> Vec<String> {
    let mut points = Vec::new();
    for line in table.lines() {
        let mut words = line.split(' ');
        let (Some(numbers), Some(point)) = (words.nth(2), words.nth(1)) else { continue };
        let source = words.skip_while(|word| *word != "-").nth(2).unwrap_or_default();
        let is_it =
            parts.iter().any(|(own, _)| own == numbers) || paths.iter().any(|path| path == source);
        if is_it {
            points.push(point.to_owned());
        }
    }
    points
}

fn has_open(process: &Path, parts: &[(String, String)]) -> bool {
    let entries = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| {
        // A backing file has a path, and access to it could wait for a server.
        let path = entry.path();
        let is_device = fs::read_link(&path).is_ok_and(|target| target.starts_with("/"));
        is_device
            && fs::metadata(&path).is_ok_and(|data| {
                let numbers = numbers_text(data.rdev());
                data.file_type().is_block_device() && parts.iter().any(|(own, _)| *own == numbers)
            })
    })
}

fn numbers_text(device: u64) -> String {
    format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device))
}

/// Whether something has it for itself: file systems, dm, md and swap do.
fn is_claimed(path: &Path) -> bool {
    let opened = fs::File::options().read(true).custom_flags(libc::O_EXCL).open(path);
    opened.is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that looks like /proc and /sys.
    struct Fake(PathBuf);

    impl Fake {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("blockd-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            let fake = Self(path);
            fake.file("sys/ublkb3/dev", "259:4\n");
            fake.file("sys/ublkb3/ublkb3p1/dev", "259:5\n");
            fake.folder("sys/ublkb3/holders");
            fake.folder("sys/ublkb3/ublkb3p1/holders");
            fake.file("proc/swaps", "Filename Type Size\n/dev/sda2 partition 1\n");
            fake
        }

        fn folder(&self, path: &str) {
            fs::create_dir_all(self.0.join(path)).unwrap();
        }

        fn file(&self, path: &str, text: &str) {
            self.folder(Path::new(path).parent().unwrap().to_str().unwrap());
            fs::write(self.0.join(path), text).unwrap();
        }

        fn places(&self) -> Places {
            Places {
                proc: self.0.join("proc"),
                sys_block: self.0.join("sys"),
                dev: self.0.join("dev"),
            }
        }

        fn users(&self) -> Vec<String> {
            users(&self.places(), "ublkb3").iter().map(User::to_string).collect()
        }
    }

    impl Drop for Fake {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn an_idle_device_has_no_users() {
        let fake = Fake::new("users-none");
        fake.file("proc/1/mountinfo", "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n");
        assert!(fake.users().is_empty());
    }

    #[test]
    fn mounts_of_the_disk_and_of_a_partition_are_named() {
        let fake = Fake::new("users-mount");
        let table = "21 1 259:4 / /mnt/a rw - ext4 /dev/ublkb3 rw\n\
                     22 1 0:50 / /mnt/b rw,x shared:3 master:1 - btrfs /dev/ublkb3p1 rw\n\
                     23 1 259:40 / /mnt/c rw - ext4 /dev/ublkb30 rw\n";
        fake.file("proc/1/mountinfo", table);
        fake.file("proc/77/mountinfo", "21 1 259:5 / /elsewhere rw - xfs /dev/root rw\n");
        assert_eq!(
            fake.users(),
            [
                "mounted at /elsewhere (seen by process 77)",
                "mounted at /mnt/a",
                "mounted at /mnt/b"
            ]
        );
    }

    #[test]
    fn holders_and_swap_are_named() {
        let fake = Fake::new("users-holder");
        fake.folder("sys/ublkb3/ublkb3p1/holders/dm-0");
        fake.file("proc/swaps", "Filename Type\n/dev/ublkb3 partition 1\n");
        assert_eq!(fake.users(), ["part of block device dm-0", "swapped to"]);
    }

    #[test]
    fn loop_devices_over_the_disk_or_a_partition_are_named() {
        let fake = Fake::new("users-loop");
        fake.file("sys/loop0/loop/backing_file", "/dev/ublkb3\n");
        fake.file("sys/loop1/loop/backing_file", "/dev/ublkb30\n");
        fake.file("sys/loop2/loop/backing_file", "/dev/ublkb3p1\n");
        fake.file("sys/loop3/loop/backing_file", "/pods/a b/vol\n");
        fake.file("sys/loop4/loop/backing_file", "/pods/other\n");
        fake.file("sys/loop5/loop/backing_file", "/gone (deleted)\n");
        fake.folder("sys/loop6");
        let table = "30 21 0:5 /ublkb3 /pods/a\\040b/vol rw - devtmpfs udev rw\n\
                     31 21 0:5 /ublkb30 /pods/other rw - devtmpfs udev rw\n";
        fake.file("proc/self/mountinfo", table);
        let expected = [0, 2, 3].map(|number| format!("part of block device loop{number}"));
        assert_eq!(fake.users(), expected);
    }

    #[test]
    fn a_loop_device_with_a_mount_is_not_idle() {
        let fake = Fake::new("users-idle");
        fake.file("sys/loop0/loop/backing_file", "/dev/ublkb3\n");
        fake.file("sys/loop0/dev", "7:0\n");
        fake.folder("sys/ublkb3/holders/dm-0");
        let is_idle = |name: &str| is_idle_loop(&fake.places(), &User::Holder(name.to_owned()));
        assert!(is_idle("loop0"));
        assert!(!is_idle("dm-0"));
        assert!(!is_idle_loop(&fake.places(), &User::Swap));
        fake.file("proc/1/mountinfo", "21 1 7:0 / /mnt rw - ext4 /dev/loop0 rw\n");
        assert!(!is_idle("loop0"));
    }

    #[test]
    fn an_open_device_names_the_process() {
        // Any block device of this machine, opened by another process.
        let Some((disk, numbers)) = fs::read_dir("/sys/block").ok().and_then(|folder| {
            folder.flatten().find_map(|entry| {
                let disk = format!("/dev/{}", entry.file_name().to_str()?);
                let numbers = fs::read_to_string(entry.path().join("dev")).ok()?;
                fs::File::open(&disk).ok().map(|_| (disk, numbers))
            })
        }) else {
            println!("not run: no block device here can be opened");
            return;
        };
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .stdin(fs::File::open(disk).unwrap())
            .spawn()
            .unwrap();
        let places = Places::default();
        let parts = [(numbers.trim().to_owned(), "x".to_owned())];
        let mut found = Vec::new();
        processes(&places, &parts, &[], &mut found);
        child.kill().unwrap();
        child.wait().unwrap();
        let expected = User::Process { pid: child.id(), name: "sleep".to_owned() };
        assert!(found.contains(&expected), "{found:?}");
    }

    #[test]
    fn long_lists_are_cut() {
        let users: Vec<User> = (0..10).map(|n| User::Holder(n.to_string())).collect();
        let text = listed(&users);
        assert!(text.ends_with("part of block device 7, 2 more"), "{text}");
    }
}
