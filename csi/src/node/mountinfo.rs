//! The mount table, `/proc/self/mountinfo`: the mount table of the kernel.

use std::path::{Path, PathBuf};

/// How the kernel marks the path of something that was removed while it was mounted.
const REMOVED: &[u8] = b"//deleted";

/// The kernel's marks of a stopped file system, after an error or on request.
const STOPPED: [&[u8]; 2] = [b"emergency_ro", b"shutdown"];

/// A block device by its numbers, and the path it was mounted or bound from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    pub path: PathBuf,
    pub major: u32,
    pub minor: u32,
}

/// A line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Numbers of the file system's device. Some file systems have numbers of their own here.
    pub major: u32,
    pub minor: u32,
    /// The mounted path within the file system. For a bound file, that file.
    pub root: PathBuf,
    /// Where.
    pub path: PathBuf,
    /// Whether this mount, or its file system, is read-only.
    pub read_only: bool,
    /// The file system itself can't be written, whichever mount shows it.
    pub whole_read_only: bool,
    /// The kernel has stopped it after an error. Newer kernels say so instead of making it
    /// read-only.
    pub stopped: bool,
    /// Its files are mapped as they are.
    pub dax: bool,
    pub kind: String,
    /// The source of the mount: mostly the path of a device.
    pub source: PathBuf,
}

impl Entry {
    /// Whether the mounted device is this one: a file system on it, or its node bound to a file.
    #[must_use]
    pub fn is_of(&self, device: &Device) -> bool {
        let name = device.path.file_name();
        // btrfs has numbers of its own, and the device as its source. Else numbers decide: a name
        // may have gone to another device since.
        let numbers = (self.major, self.minor) == (device.major, device.minor);
        let source = self.major == 0 && self.kind == "btrfs" && self.source.file_name() == name;
        numbers || source || self.is_node(device)
    }

    /// Whether this is the device's node, bound to a file.
    fn is_node(&self, device: &Device) -> bool {
        self.kind == "devtmpfs" && self.root.file_name() == device.path.file_name()
    }
}

/// The whole table, in the order of the kernel: of several mounts on one path the last is seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    pub entries: Vec<Entry>,
}

impl Table {
    /// Parses the kernel's text. An invalid line is an error, since an unseen mount would be
    /// mounted twice, or left behind.
    ///
    /// # Errors
    /// The first such line.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let lines = text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
        let entries =
            lines.map(|line| entry(line).ok_or_else(|| String::from_utf8_lossy(line).into_owned()));
        Ok(Self { entries: entries.collect::<Result<_, _>>()? })
    }

    /// Returns the uppermost mount at exactly this path, if there is one.
    #[must_use]
    pub fn at(&self, path: &Path) -> Option<&Entry> {
        self.entries.iter().rev().find(|entry| entry.path == path)
    }

    /// Whether this device is the uppermost mount there.
    #[must_use]
    pub fn shows(&self, path: &Path, device: &Device) -> bool {
        self.at(path).is_some_and(|entry| entry.is_of(device))
    }
}

/// `ID PARENT MAJOR:MINOR ROOT PATH OPTIONS [FIELDS...] - KIND SOURCE OPTIONS`.
fn entry(line: &[u8]) -> Option<Entry> {
    let mut words = line.split(|&byte| byte == b' ');
    let numbers = std::str::from_utf8(words.nth(2)?).ok()?;
    let (major, minor) = numbers.split_once(':')?;
    let root = words.next()?;
    let path = words.next()?;
    let options = words.next()?;
    // As many fields as the kernel likes, then a dash.
    words.find(|word| *word == b"-")?;
    let kind = words.next()?;
    let source = words.next()?;
    let of_file_system = words.next().unwrap_or_default();
    Some(Entry {
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
        root: unescaped(root.strip_suffix(REMOVED).unwrap_or(root)),
        path: unescaped(path.strip_suffix(REMOVED).unwrap_or(path)),
        read_only: has_option(options, b"ro") || has_option(of_file_system, b"ro"),
        whole_read_only: has_option(of_file_system, b"ro"),
        stopped: STOPPED.iter().any(|option| has_option(of_file_system, option)),
        dax: has_option(of_file_system, b"dax") || has_option(of_file_system, b"dax=always"),
        kind: String::from_utf8_lossy(kind).into_owned(),
        source: unescaped(source),
    })
}

fn has_option(options: &[u8], wanted: &[u8]) -> bool {
    options.split(|&byte| byte == b',').any(|option| option == wanted)
}

/// The kernel writes space, tab, line feed, backslash and `#` as `\` and three octal digits.
fn unescaped(text: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, after)) = rest.split_first() {
        match (first, octal(after)) {
            (b'\\', Some(byte)) => {
                bytes.push(byte);
                rest = &after[3..];
            }
            _ => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

fn octal(text: &[u8]) -> Option<u8> {
    let digits = text.get(..3)?;
    let mut value = 0_u8;
    for &digit in digits {
        let digit = digit.checked_sub(b'0').filter(|digit| *digit < 8)?;
        value = value.checked_mul(8)?.checked_add(digit)?;
    }
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:5 / /dev rw,nosuid shared:2 - devtmpfs devtmpfs rw,size=4k
40 22 259:3 / /var/lib/kubelet/plugins/pv\0401 rw,relatime shared:9 master:2 - ext4 /dev/ublkb3 rw
41 22 259:3 / /var/lib/kubelet/pods/a ro,relatime - ext4 /dev/ublkb3 rw
42 22 0:5 /ublkb7 /var/lib/kubelet/pods/b/block rw,nosuid - devtmpfs devtmpfs rw
43 22 0:61 / /var/lib/kubelet/pods/c rw - btrfs /dev/ublkb4 rw,subvolid=5
44 22 0:5 /ublkb9//deleted /var/lib/kubelet/pods/d rw - devtmpfs devtmpfs rw
45 22 0:70 / /mnt/back\134slash\011tab\012 rw shared:3 - tmpfs none rw
46 22 259:5 / /var/lib/kubelet/pods/c rw - xfs /dev/ublkb5 ro
";

    fn device(number: u32, minor: u32) -> Device {
        Device { path: format!("/dev/ublkb{number}").into(), major: 259, minor }
    }

    fn table() -> Table {
        Table::parse(TEXT.as_bytes()).unwrap()
    }

    #[test]
    fn spaces_and_the_like_in_paths_are_read_back() {
        let table = table();
        assert!(table.at(Path::new("/var/lib/kubelet/plugins/pv 1")).is_some());
        assert!(table.at(Path::new("/mnt/back\\slash\ttab\n")).is_some());
        assert!(table.at(Path::new("/var/lib/kubelet/plugins")).is_none());
    }

    #[test]
    fn a_mount_is_known_by_its_device() {
        let table = table();
        let path = Path::new("/var/lib/kubelet/plugins/pv 1");
        assert!(table.shows(path, &device(3, 3)));
        assert!(!table.shows(path, &device(4, 4)));
        assert!(!table.at(path).unwrap().read_only);
        assert!(table.at(Path::new("/var/lib/kubelet/pods/a")).unwrap().read_only);
    }

    #[test]
    fn a_bound_node_is_known_by_its_name_also_when_it_was_removed() {
        let table = table();
        assert!(table.shows(Path::new("/var/lib/kubelet/pods/b/block"), &device(7, 7)));
        assert!(!table.shows(Path::new("/var/lib/kubelet/pods/b/block"), &device(8, 8)));
        assert!(table.shows(Path::new("/var/lib/kubelet/pods/d"), &device(9, 9)));
        // The folder with all nodes is none of them.
        assert!(!table.shows(Path::new("/dev"), &device(7, 7)));
    }

    #[test]
    fn a_file_system_with_own_device_numbers_is_identified_by_its_source() {
        let mut table = table();
        table.entries.pop();
        assert!(table.shows(Path::new("/var/lib/kubelet/pods/c"), &device(4, 4)));
    }

    #[test]
    fn of_several_mounts_on_a_path_the_last_is_seen() {
        let table = table();
        let seen = table.at(Path::new("/var/lib/kubelet/pods/c")).unwrap();
        assert!(seen.is_of(&device(5, 5)) && seen.read_only);
    }

    #[test]
    fn a_read_only_file_system_is_distinguished_from_a_read_only_mount() {
        let line = |of_mount: &str, of_file_system: &str| {
            let text = format!("40 22 259:3 / /a {of_mount} - ext4 /dev/ublkb3 {of_file_system}");
            let entry = Table::parse(text.as_bytes()).unwrap().entries.remove(0);
            (entry.read_only, entry.whole_read_only, entry.stopped)
        };
        assert_eq!(line("rw,relatime", "rw,errors=remount-ro"), (false, false, false));
        assert_eq!(line("ro", "rw"), (true, false, false));
        assert_eq!(line("rw", "ro"), (true, true, false));
        assert_eq!(line("rw", "rw,emergency_ro"), (false, false, true));
        assert_eq!(line("rw", "rw,shutdown"), (false, false, true));
    }

    #[test]
    fn a_line_of_another_form_is_refused() {
        for line in ["22 1 8:1 / / rw - ext4", "22 1 8 / / rw - ext4 /dev/sda1 rw", "x"] {
            assert_eq!(Table::parse(line.as_bytes()), Err(line.to_owned()));
        }
    }

    #[test]
    fn the_table_of_this_machine_is_understood() {
        let text = std::fs::read("/proc/self/mountinfo").unwrap();
        assert!(!Table::parse(&text).unwrap().entries.is_empty());
    }
}
