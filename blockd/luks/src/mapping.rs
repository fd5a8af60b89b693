//! The mappings of the kernel, as `/sys` has them: nothing is opened, and no IO is done.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The folder of the kernel's block devices.
const BLOCKS: &str = "/sys/block";

/// Begins the identity of mappings that `cryptsetup` opened with a header of LUKS2.
const LUKS2: &str = "CRYPT-LUKS2-";

/// Bytes of a sector, in which the kernel counts.
const SECTOR_BYTES: u64 = 512;

/// An open mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Its device's own node. `/dev/mapper/NAME` is a name for it that not every container has.
    pub path: PathBuf,
    pub major: u32,
    pub minor: u32,
    pub read_only: bool,
    pub size_bytes: u64,
    /// Whether it is one of LUKS2.
    pub is_luks2: bool,
    /// The numbers of the devices below it.
    pub over: Vec<(u32, u32)>,
}

impl Mapping {
    /// Finds the mapping of that name.
    ///
    /// # Errors
    /// The kernel's list can't be read.
    pub fn find(name: &str) -> io::Result<Option<Self>> {
        Self::find_in(Path::new(BLOCKS), name)
    }

    /// Finds the mapping of LUKS2 over that device, whatever its name.
    ///
    /// # Errors
    /// The kernel's list can't be read.
    pub fn over(major: u32, minor: u32) -> io::Result<Option<(String, Self)>> {
        let all = Self::all_in(Path::new(BLOCKS))?;
        Ok(all.into_iter().find(|(_, mapping)| mapping.is_over(major, minor)))
    }

    fn find_in(blocks: &Path, name: &str) -> io::Result<Option<Self>> {
        let all = Self::all_in(blocks)?;
        Ok(all.into_iter().find(|(found, _)| found == name).map(|(_, mapping)| mapping))
    }

    /// All mappings, with their names.
    fn all_in(blocks: &Path) -> io::Result<Vec<(String, Self)>> {
        let entries = match fs::read_dir(blocks) {
            // Without block devices there are no mappings.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut found = Vec::new();
        for entry in entries {
            let folder = entry?.path();
            // It may be closed just now.
            let name = text(&folder.join("dm/name"));
            found.extend(name.and_then(|name| Some((name, Self::read(&folder)?))));
        }
        Ok(found)
    }

    fn read(folder: &Path) -> Option<Self> {
        let (major, minor) = numbers(folder)?;
        let below = fs::read_dir(folder.join("slaves")).into_iter().flatten().flatten();
        let sectors: u64 = text(&folder.join("size"))?.parse().ok()?;
        Some(Self {
            path: Path::new("/dev").join(folder.file_name()?),
            major,
            minor,
            read_only: text(&folder.join("ro")).as_deref() == Some("1"),
            size_bytes: sectors.saturating_mul(SECTOR_BYTES),
            is_luks2: text(&folder.join("dm/uuid")).is_some_and(|uuid| uuid.starts_with(LUKS2)),
            over: below.filter_map(|entry| numbers(&entry.path())).collect(),
        })
    }

    /// Whether it is one of LUKS2 over that device, and no other.
    #[must_use]
    pub fn is_over(&self, major: u32, minor: u32) -> bool {
        self.is_luks2 && self.over == [(major, minor)]
    }
}

/// The numbers of a device, by its folder.
fn numbers(folder: &Path) -> Option<(u32, u32)> {
    let text = text(&folder.join("dev"))?;
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn text(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_found_by_its_name_with_the_device_below() {
        let blocks = std::env::temp_dir().join(format!("luks-sys-{}", std::process::id()));
        let put = |path: &str, text: &str| {
            let path = blocks.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("ublkb3/dev", "259:3\n");
        for (device, name, uuid) in [
            ("dm-0", "other", "LVM-1"),
            ("dm-1", "ours", "CRYPT-LUKS2-2-ours"),
            ("dm-2", "plain", "CRYPT-PLAIN-plain"),
        ] {
            let minor = device.strip_prefix("dm-").unwrap();
            put(&format!("{device}/dm/name"), &format!("{name}\n"));
            put(&format!("{device}/dm/uuid"), &format!("{uuid}\n"));
            put(&format!("{device}/dev"), &format!("252:{minor}\n"));
            put(&format!("{device}/size"), "2048\n");
            put(&format!("{device}/ro"), "0\n");
            put(&format!("{device}/slaves/ublkb3/dev"), "259:3\n");
        }
        let found = Mapping::find_in(&blocks, "ours").unwrap().unwrap();
        let expected = Mapping {
            path: "/dev/dm-1".into(),
            major: 252,
            minor: 1,
            read_only: false,
            size_bytes: 1 << 20,
            is_luks2: true,
            over: vec![(259, 3)],
        };
        assert_eq!(found, expected);
        assert!(found.is_over(259, 3) && !found.is_over(259, 4));
        // A mapping of another kind is none of ours, whatever its name.
        assert!(!Mapping::find_in(&blocks, "plain").unwrap().unwrap().is_over(259, 3));
        assert_eq!(Mapping::find_in(&blocks, "absent").unwrap(), None);
        fs::remove_dir_all(&blocks).unwrap();
        assert_eq!(Mapping::find_in(&blocks, "ours").unwrap(), None);
    }
}
