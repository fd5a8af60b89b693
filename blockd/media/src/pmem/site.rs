//! Where a device lies, as the kernel describes it: region, processors nearby, bad blocks.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Where the kernel describes devices.
pub const SYSFS: &str = "/sys";
/// The unit of lists of bad blocks.
const SECTOR_BYTES: u64 = 512;
/// Runs that are taken from a list: the kernel keeps no more than 512.
const MAX_RUNS: usize = 512;
/// Folders between a device and its region: two at the most, and some to spare.
const MAX_DEPTH: usize = 8;

/// The kernel's facts about a device; all of them unknown for a file that is in no persistent
/// memory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Site {
    /// The set cookie of its region; 0 for one that has none.
    pub region: u64,
    /// The node whose processors are near.
    pub numa_node: Option<u32>,
    /// The part of the platform that keeps data when power fails: `cpu_cache`, `memory_controller`,
    /// or empty where that is not known.
    pub persistence_domain: String,
    /// Its folder in sysfs.
    folder: Option<PathBuf>,
    /// Its region's.
    region_folder: Option<PathBuf>,
}

impl Site {
    /// Looks for the device of an open file: itself if it is one, else the one that its file system
    /// is on.
    pub fn find(sysfs: &Path, file: &File) -> std::io::Result<Self> {
        let metadata = file.metadata()?;
        let (class, number) = match metadata.file_type().is_char_device() {
            true => ("dev/char", metadata.rdev()),
            false => ("dev/block", metadata.dev()),
        };
        let (major, minor) = (nix::sys::stat::major(number), nix::sys::stat::minor(number));
        let here = sysfs.join(class).join(format!("{major}:{minor}"));
        Ok(here.canonicalize().map_or_else(|_| Self::default(), |here| Self::at(&here)))
    }

    fn at(here: &Path) -> Self {
        let ancestors = || here.ancestors().take(MAX_DEPTH);
        // Not by the cookie, which regions have none of that no label describes.
        let region = ancestors().find(|folder| is_region(folder));
        let node = ancestors().find_map(|folder| text(&folder.join("numa_node")));
        let of_region = |name| region.and_then(|region| text(&region.join(name)));
        Self {
            region: of_region("set_cookie").and_then(|text| number(&text)).unwrap_or(0),
            numa_node: region.and(node).and_then(|text| text.parse().ok()),
            persistence_domain: of_region("persistence_domain").unwrap_or_default(),
            folder: Some(here.to_path_buf()),
            region_folder: region.map(Path::to_path_buf),
        }
    }

    /// Bytes of a character device, which its file does not report.
    #[must_use]
    pub fn size(&self) -> Option<u64> {
        self.number("size")
    }

    /// The alignment of a character device's mapping.
    #[must_use]
    pub fn align(&self) -> Option<u64> {
        self.number("align")
    }

    /// Bytes of its region, all of it.
    #[must_use]
    pub fn region_size(&self) -> Option<u64> {
        number(&text(&self.region_folder.as_ref()?.join("size"))?)
    }

    fn number(&self, name: &str) -> Option<u64> {
        number(&text(&self.folder.as_ref()?.join(name))?)
    }

    /// Bad blocks of a character device of `size` bytes, as ranges of it. Those below a file are
    /// found by touching them: where they are in it, only its file system knows.
    #[must_use]
    pub fn bad(&self, size: u64) -> Vec<Range<u64>> {
        let (Some(here), Some(region)) = (&self.folder, &self.region_folder) else {
            return Vec::new();
        };
        let list = text(&region.join("badblocks")).unwrap_or_default();
        let start = |folder: &Path| text(&folder.join("resource")).and_then(|text| number(&text));
        // Both are readable by root only, as is the list.
        let (Some(first), Some(base)) = (start(here), start(region)) else { return Vec::new() };
        let Some(offset) = first.checked_sub(base) else { return Vec::new() };
        let runs = list.lines().take(MAX_RUNS).filter_map(run);
        let inside = runs.filter_map(|run| {
            let (from, to) = (run.start.max(offset), run.end.min(offset.saturating_add(size)));
            (from < to).then(|| from - offset..to - offset)
        });
        inside.collect()
    }

    /// The processors of its node.
    #[must_use]
    pub fn cpus(&self, sysfs: &Path) -> Vec<usize> {
        let Some(node) = self.numa_node else { return Vec::new() };
        let path = sysfs.join(format!("devices/system/node/node{node}/cpulist"));
        text(&path).map(|list| cpu_list(&list)).unwrap_or_default()
    }
}

/// The processors of each node that has any, by the nodes' numbers; empty where the kernel does not
/// report them.
#[must_use]
pub(super) fn nodes(sysfs: &Path) -> Vec<Vec<usize>> {
    let Ok(folder) = fs::read_dir(sysfs.join("devices/system/node")) else { return Vec::new() };
    let node = |entry: fs::DirEntry| {
        let name = entry.file_name();
        let number: u32 = name.to_str()?.strip_prefix("node")?.parse().ok()?;
        let cpus = cpu_list(&text(&entry.path().join("cpulist"))?);
        (!cpus.is_empty()).then_some((number, cpus))
    };
    let found: BTreeMap<_, _> = folder.filter_map(Result::ok).filter_map(node).collect();
    found.into_values().collect()
}

/// A list like `0-3,8`, as the kernel writes it. Any other text has no processors.
#[must_use]
fn cpu_list(list: &str) -> Vec<usize> {
    /// More than any kernel is built for.
    const MAX_CPUS: usize = 8192;
    let mut cpus = Vec::new();
    for part in list.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        match (first.parse::<usize>(), last.parse::<usize>()) {
            (Ok(first), Ok(last)) if last < MAX_CPUS => cpus.extend(first..=last),
            _ => return Vec::new(),
        }
    }
    cpus
}

/// Whether a folder is called as regions are: by the word and a number.
fn is_region(folder: &Path) -> bool {
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let digits = name.strip_prefix("region").unwrap_or_default();
    !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
}

fn run(line: &str) -> Option<Range<u64>> {
    let (start, count) = line.trim().split_once(' ')?;
    let start = start.parse::<u64>().ok()?.checked_mul(SECTOR_BYTES)?;
    let bytes = count.parse::<u64>().ok()?.checked_mul(SECTOR_BYTES)?;
    Some(start..start.checked_add(bytes)?)
}

fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// A number as sysfs has it: decimal, or hexadecimal with 0x.
fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Tree(PathBuf);

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// A region at 4 GiB with a character device that begins 16 MiB into it.
    fn tree(name: &str) -> (Tree, PathBuf) {
        let root = std::env::temp_dir().join(format!("blockd-site-{name}-{}", std::process::id()));
        let region = root.join("devices/ndbus0/region3");
        let device = region.join("dax3.0/dax/dax3.0");
        fs::create_dir_all(&device).unwrap();
        fs::create_dir_all(root.join("devices/system/node/node1")).unwrap();
        for (path, text) in [
            (region.join("set_cookie"), "0x1f0c7a3b5d2e4f60\n"),
            (region.join("numa_node"), "1\n"),
            (region.join("size"), "67108864\n"),
            (region.join("persistence_domain"), "memory_controller\n"),
            (region.join("resource"), "0x100000000\n"),
            (region.join("badblocks"), "0 8\n32768 1\n40960 16\n"),
            (device.join("resource"), "0x101000000\n"),
            (device.join("size"), "4194304\n"),
            (device.join("align"), "2097152\n"),
            (root.join("devices/system/node/node1/cpulist"), "2-3,6\n"),
        ] {
            fs::write(path, text).unwrap();
        }
        (Tree(root), device)
    }

    /// Row: P5.
    #[test]
    fn a_device_has_its_region_and_the_processors_nearby() {
        let (root, device) = tree("near");
        let site = Site::at(&device);
        assert_eq!((site.region, site.numa_node), (0x1f0c_7a3b_5d2e_4f60, Some(1)));
        assert_eq!(site.persistence_domain, "memory_controller");
        assert_eq!((site.size(), site.align()), (Some(4 << 20), Some(2 << 20)));
        assert_eq!(site.region_size(), Some(64 << 20));
        assert_eq!(site.cpus(&root.0), [2, 3, 6]);
        // By their numbers, and without those that only have memory.
        for (node, cpus) in [("node10", "7\n"), ("node2", "\n"), ("node0", "0-1\n")] {
            let folder = root.0.join("devices/system/node").join(node);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("cpulist"), cpus).unwrap();
        }
        assert_eq!(nodes(&root.0), [vec![0, 1], vec![2, 3, 6], vec![7]]);
        assert!(nodes(&device).is_empty());
        // A disk of another kind has a node as well, and no region.
        let disk = root.0.join("devices/sda");
        fs::create_dir_all(&disk).unwrap();
        fs::write(disk.join("numa_node"), "0\n").unwrap();
        assert_eq!(Site::at(&disk).numa_node, None);
        assert_eq!(cpu_list("0-1,x"), [0_usize; 0]);
    }

    /// Row: P45.
    #[test]
    fn bad_blocks_of_the_region_are_those_of_its_device() {
        let (_root, device) = tree("bad");
        // The device is sectors 32768 to 40959 of the region: the one before is not in it.
        let bad = |size| {
            let runs = Site::at(&device).bad(size).into_iter();
            runs.map(|run| (run.start, run.end)).collect::<Vec<_>>()
        };
        assert_eq!(bad(4 << 20), [(0, 512)]);
        assert_eq!(bad(8 << 20), [(0, 512), (4 << 20, (4 << 20) + 8192)]);
    }

    #[test]
    fn a_region_without_a_cookie_has_bad_blocks_as_well() {
        let (root, device) = tree("bare");
        let region = root.0.join("devices/ndbus0/region3");
        fs::remove_file(region.join("set_cookie")).unwrap();
        let site = Site::at(&device);
        assert_eq!((site.region, site.numa_node), (0, Some(1)));
        assert_eq!(site.persistence_domain, "memory_controller");
        assert_eq!((site.region_size(), site.bad(4 << 20).len()), (Some(64 << 20), 1));
    }

    #[test]
    fn a_file_elsewhere_lies_in_no_region() {
        let root = std::env::temp_dir().join(format!("blockd-site-no-{}", std::process::id()));
        let file = File::create(&root).unwrap();
        let site = Site::find(Path::new(SYSFS), &file).unwrap();
        fs::remove_file(&root).unwrap();
        assert_eq!((site.region, site.bad(1 << 30)), (0, Vec::new()));
    }
}
