//! Detects the content of a device with `blkid`, and decides how the device may be used.

/// Exit code of `blkid` when it finds nothing that it knows.
pub const NOTHING: i32 = 2;
/// Exit code when several things claim the device.
pub const AMBIVALENT: i32 = 8;

/// The content of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// No known signature. Only the daemon knows whether the device is empty.
    Nothing,
    /// A file system.
    FileSystem(String),
    /// A partition table, a part of a volume group, something encrypted, or several at once.
    Other(String),
}

/// The steps before a device can be mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Make this file system.
    Format(String),
    /// Mount this one, which is there.
    Mount(String),
    /// The device has this content, and is left alone.
    Refuse(String),
}

impl Content {
    /// Reads what `blkid -p -o export` said, and how it ended.
    ///
    /// # Errors
    /// When it did not end as it does for a device that it could read.
    pub fn parse(code: Option<i32>, said: &str) -> Result<Self, String> {
        let field = |name: &str| {
            let value = |line: &str| line.strip_prefix(name)?.strip_prefix('=').map(str::to_owned);
            said.lines().find_map(value)
        };
        match code {
            Some(NOTHING) => Ok(Self::Nothing),
            Some(AMBIVALENT) => Ok(Self::Other("signatures of several kinds".to_owned())),
            Some(0) => Ok(match (field("TYPE"), field("USAGE"), field("PTTYPE")) {
                (Some(kind), Some(usage), _) if usage == "filesystem" => Self::FileSystem(kind),
                (Some(kind), ..) => Self::Other(kind),
                (None, _, Some(table)) => Self::Other(format!("a partition table ({table})")),
                // Output about sizes alone is no content.
                (None, _, None) => Self::Nothing,
            }),
            Some(code) => Err(format!("blkid ended with {code}")),
            None => Err("blkid was killed".to_owned()),
        }
    }

    /// A description for errors.
    #[must_use]
    pub fn described(&self) -> &str {
        match self {
            Self::Nothing => "data of no kind that is known here",
            Self::FileSystem(there) | Self::Other(there) => there,
        }
    }

    /// Decides how to prepare a device. `wanted` is empty when no file system was requested;
    /// `empty`: nothing was ever written to it; `ours`: its content is the rest of an interrupted
    /// mkfs of this driver.
    #[must_use]
    pub fn plan(&self, wanted: &str, empty: bool, ours: bool) -> Plan {
        let or_default = if wanted.is_empty() { DEFAULT } else { wanted };
        match self {
            _ if ours => Plan::Format(or_default.to_owned()),
            Self::Nothing if empty => Plan::Format(or_default.to_owned()),
            Self::FileSystem(there) if there == wanted => Plan::Mount(there.clone()),
            Self::FileSystem(there) if wanted.is_empty() && KNOWN.contains(&there.as_str()) => {
                Plan::Mount(there.clone())
            }
            other => Plan::Refuse(other.described().to_owned()),
        }
    }
}

/// File systems that are made, grown and mounted.
pub const KNOWN: [&str; 3] = ["ext4", "xfs", "btrfs"];

/// The file system when none is requested.
pub const DEFAULT: &str = "ext4";

/// How a file system is made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Making {
    /// Its files will be mapped: they are laid out so that pages of 2 MiB fit.
    pub mapped: bool,
    /// Further words for the program that makes it.
    pub options: Vec<String>,
}

/// The program and the words that make a file system, the device not among them. The device is
/// empty, so nothing has to be discarded; and it is forced, to overwrite the rest of an earlier
/// attempt.
#[must_use]
pub fn maker(file_system: &str, making: &Making) -> (String, Vec<String>) {
    let ours: &[&str] = match file_system {
        // In blocks of 4 KiB, 512 are a page of 2 MiB. Tables are zeroed now: by the kernel later,
        // that would punch holes into an image.
        "ext4" if making.mapped => &[
            "-q",
            "-F",
            "-m",
            "0",
            "-b",
            "4096",
            "-E",
            "nodiscard,lazy_itable_init=0,lazy_journal_init=1,stride=512,stripe_width=512",
        ],
        // Files use pages of 2 MiB from the start, which they inherit from their directory. Some
        // kernels cannot map extents that files share.
        "xfs" if making.mapped => &[
            "-q",
            "-f",
            "-K",
            "-b",
            "size=4096",
            "-d",
            "su=2m,sw=1,extszinherit=512",
            "-m",
            "reflink=0",
        ],
        // Root's share is of no use to a workload. Tables are zeroed later, where they are not yet.
        "ext4" => {
            &["-q", "-F", "-m", "0", "-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1"]
        }
        "xfs" => &["-q", "-f", "-K"],
        "btrfs" => &["-q", "-f", "-K"],
        _ => &[],
    };
    let ours = ours.iter().map(|&word| word.to_owned()).collect();
    let words = if file_system == "ext4" {
        with_extended(ours, &making.options)
    } else {
        [ours, making.options.clone()].concat()
    };
    (format!("mkfs.{file_system}"), words)
}

/// Words of `mkfs.ext4`, with the values of all `-E` in one, since it takes the last of several. Of
/// a key that is set twice the later value counts, which is that of the class.
fn with_extended(mut ours: Vec<String>, theirs: &[String]) -> Vec<String> {
    let mut theirs = theirs.iter();
    let mut rest = Vec::new();
    while let Some(word) = theirs.next() {
        let keys = match word.strip_prefix("-E") {
            Some("") => theirs.next().map(String::as_str),
            attached => attached,
        };
        match (keys, ours.iter().position(|word| word == "-E")) {
            (Some(keys), Some(at)) => ours[at + 1] = format!("{},{keys}", ours[at + 1]),
            _ => rest.push(word.clone()),
        }
    }
    [ours, rest].concat()
}

/// The smallest size in bytes that a file system can be grown to: the kernel refuses less for
/// btrfs. A volume that is larger than its file system until then is of use all the same.
#[must_use]
pub fn smallest_growth(file_system: &str) -> u64 {
    if file_system == "btrfs" { 268_435_456 } else { 0 }
}

/// The bytes of a device that say how large the file system on it is.
pub const SUPERBLOCKS_BYTES: usize = (64 << 10) + 4096;

/// Returns the size of a file system in bytes, from the beginning of its device; `None` if it
/// cannot be determined.
#[must_use]
pub fn size_of(file_system: &str, start: &[u8]) -> Option<u64> {
    let u32_le = |at: usize| Some(u32::from_le_bytes(start.get(at..at + 4)?.try_into().ok()?));
    let u64_le = |at: usize| Some(u64::from_le_bytes(start.get(at..at + 8)?.try_into().ok()?));
    let u32_be = |at: usize| Some(u32::from_be_bytes(start.get(at..at + 4)?.try_into().ok()?));
    let u64_be = |at: usize| Some(u64::from_be_bytes(start.get(at..at + 8)?.try_into().ok()?));
    match file_system {
        "ext4" => {
            // Behind the boot sector: blocks, the size of one as a power of two, 64 bits or not.
            let base = 1024;
            let magic = start.get(base + 0x38..base + 0x3a)?;
            let low = u64::from(u32_le(base + 4)?);
            let wide = u32_le(base + 0x60)? & 0x80 != 0;
            let high = if wide { u64::from(u32_le(base + 0x150)?) } else { 0 };
            let blocks = high.checked_shl(32)?.checked_add(low)?;
            let size = 1024_u64.checked_shl(u32_le(base + 0x18)?.min(16))?;
            (magic == [0x53, 0xef]).then(|| blocks.checked_mul(size)).flatten()
        }
        "xfs" => {
            let magic = start.get(..4)?;
            let size = u64::from(u32_be(4)?);
            (magic == b"XFSB").then(|| u64_be(8)?.checked_mul(size)).flatten()
        }
        "btrfs" => {
            // The device's own item in the superblock: its bytes that belong to the file system.
            let base = 64 << 10;
            let magic = start.get(base + 0x40..base + 0x48)?;
            (magic == b"_BHRfS_M").then(|| u64_le(base + 0xc9 + 8)).flatten()
        }
        _ => None,
    }
}

/// Interprets the exit code of `e2fsck -p`.
///
/// # Errors
/// When it left errors, or could not be run.
pub fn checked(code: Option<i32>) -> Result<(), String> {
    match code {
        // Clean, or made so.
        Some(0..=3) => Ok(()),
        Some(code) if code & 4 != 0 => {
            Err("the file system has errors that only a person may mend: run e2fsck".to_owned())
        }
        Some(code) => Err(format!("e2fsck ended with {code}")),
        None => Err("e2fsck was killed".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(said: &str) -> Content {
        Content::parse(Some(0), said).unwrap()
    }

    #[test]
    fn the_output_of_blkid_is_parsed() {
        let ext4 = "DEVNAME=/dev/ublkb0\nUUID=1\nVERSION=1.0\nTYPE=ext4\nUSAGE=filesystem\n";
        assert_eq!(parse(ext4), Content::FileSystem("ext4".to_owned()));
        assert_eq!(
            parse("PTUUID=1\nPTTYPE=gpt\n"),
            Content::Other("a partition table (gpt)".into())
        );
        let lvm = "DEVNAME=/dev/ublkb0\nTYPE=LVM2_member\nUSAGE=raid\n";
        assert_eq!(parse(lvm), Content::Other("LVM2_member".to_owned()));
        assert_eq!(parse("DEVNAME=/dev/ublkb0\nMINIMUM_IO_SIZE=4096\n"), Content::Nothing);
        assert_eq!(Content::parse(Some(2), ""), Ok(Content::Nothing));
        assert!(matches!(Content::parse(Some(8), ""), Ok(Content::Other(_))));
        assert!(Content::parse(Some(4), "").is_err() && Content::parse(None, "").is_err());
    }

    #[test]
    fn only_an_unwritten_device_is_formatted() {
        let xfs = Content::FileSystem("xfs".to_owned());
        let other = Content::Other("LVM2_member".to_owned());
        let format = |name: &str| Plan::Format(name.to_owned());
        assert_eq!(Content::Nothing.plan("xfs", true, false), format("xfs"));
        assert_eq!(Content::Nothing.plan("", true, false), format("ext4"));
        assert!(matches!(Content::Nothing.plan("ext4", false, false), Plan::Refuse(_)));
        assert_eq!(xfs.plan("xfs", false, false), Plan::Mount("xfs".to_owned()));
        assert_eq!(xfs.plan("", false, false), Plan::Mount("xfs".to_owned()));
        assert_eq!(xfs.plan("ext4", false, false), Plan::Refuse("xfs".to_owned()));
        for empty in [false, true] {
            assert_eq!(other.plan("ext4", empty, false), Plan::Refuse("LVM2_member".to_owned()));
        }
        let foreign = Content::FileSystem("ntfs".to_owned());
        assert_eq!(foreign.plan("", false, false), Plan::Refuse("ntfs".to_owned()));
    }

    #[test]
    fn a_file_system_that_was_not_finished_is_made_again() {
        for content in [Content::Nothing, Content::FileSystem("ext4".to_owned())] {
            assert_eq!(content.plan("ext4", false, true), Plan::Format("ext4".to_owned()));
        }
    }

    #[test]
    fn options_of_the_class_come_after_ours() {
        let options = vec!["-b".to_owned(), "size=1024".to_owned()];
        let (program, words) = maker("xfs", &Making { options, mapped: false });
        assert_eq!(program, "mkfs.xfs");
        assert_eq!(words, ["-q", "-f", "-K", "-b", "size=1024"]);
        for name in KNOWN {
            assert!(!maker(name, &Making::default()).1.is_empty(), "{name}");
        }
    }

    #[test]
    fn extended_options_of_the_class_are_added_to_ours() {
        let words = |text: &str| {
            let options = text.split(' ').map(str::to_owned).collect();
            maker("ext4", &Making { options, mapped: false }).1[4..].join(" ")
        };
        let ours = "-E nodiscard,lazy_itable_init=1,lazy_journal_init=1";
        assert_eq!(words("-E stride=16 -b 1024"), format!("{ours},stride=16 -b 1024"));
        assert_eq!(words("-j -Ediscard -E stride=8"), format!("{ours},discard,stride=8 -j"));
        assert_eq!(words("-e continue"), format!("{ours} -e continue"));
    }

    #[test]
    fn sizes_are_read_from_superblocks() {
        let mut ext4 = vec![0; SUPERBLOCKS_BYTES];
        ext4[1024 + 4..1024 + 8].copy_from_slice(&7_u32.to_le_bytes());
        ext4[1024 + 0x18] = 2;
        ext4[1024 + 0x38..1024 + 0x3a].copy_from_slice(&[0x53, 0xef]);
        assert_eq!(size_of("ext4", &ext4), Some(7 * 4096));
        // The upper half counts when the file system says so.
        ext4[1024 + 0x150] = 1;
        assert_eq!(size_of("ext4", &ext4), Some(7 * 4096));
        ext4[1024 + 0x60] = 0x80;
        assert_eq!(size_of("ext4", &ext4), Some(((1 << 32) + 7) * 4096));
        let mut xfs = vec![0; SUPERBLOCKS_BYTES];
        xfs[..4].copy_from_slice(b"XFSB");
        xfs[4..8].copy_from_slice(&4096_u32.to_be_bytes());
        xfs[8..16].copy_from_slice(&9_u64.to_be_bytes());
        assert_eq!(size_of("xfs", &xfs), Some(9 * 4096));
        for name in KNOWN {
            assert_eq!(size_of(name, &[]), None);
            assert_eq!(size_of(name, &vec![0; SUPERBLOCKS_BYTES]), None);
        }
    }

    fn make(name: &str, making: &Making, path: &std::path::Path) {
        let (program, words) = maker(name, making);
        tool(&program, &words, path);
    }

    fn tool(program: &str, words: &[String], path: &std::path::Path) -> String {
        let mut command = std::process::Command::new(program);
        let path_of_all = std::env::var("PATH").unwrap() + ":/usr/sbin:/sbin";
        let output = command.env("PATH", path_of_all).args(words).arg(path).output().unwrap();
        assert!(output.status.success(), "{program}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Row P18, as far as it can be seen without a kernel that maps: the result of the tools.
    ///
    /// Row: P18.
    #[test]
    fn file_systems_that_are_mapped_are_laid_out_in_pages_of_2_mib() {
        let folder = std::env::temp_dir().join(format!("csi-mapped-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        for (name, size) in [("ext4", 64_u64 << 20), ("xfs", 576 << 20)] {
            let path = folder.join(name);
            std::fs::File::create(&path).unwrap().set_len(size).unwrap();
            // An -E of the class leaves ours in force.
            let options = if name == "ext4" { words("-E root_owner=5:6") } else { Vec::new() };
            make(name, &Making { mapped: true, options }, &path);
        }
        let said = tool("dumpe2fs", &words("-h"), &folder.join("ext4"));
        let has = |name: &str, value: &str| {
            let line = said.lines().find(|line| line.starts_with(name));
            assert_eq!(line.and_then(|line| line.split_whitespace().last()), Some(value), "{said}");
        };
        has("Block size", "4096");
        has("RAID stride", "512");
        has("RAID stripe width", "512");
        let arguments = ["-r", "-c", "sb 0", "-c", "p blocksize unit width features_ro_compat"];
        let arguments: Vec<String> = arguments
            .iter()
            .chain(&["-c", "addr rootino", "-c", "p core.extsize"])
            .chain(&["-c", "p core.extszinherit"])
            .map(|&word| word.to_owned())
            .collect();
        let said = tool("xfs_db", &arguments, &folder.join("xfs"));
        for line in ["blocksize = 4096", "unit = 512", "width = 512", "core.extsize = 512"] {
            assert!(said.lines().any(|there| there == line), "{line}: {said}");
        }
        assert!(said.contains("core.extszinherit = 1"), "{said}");
        let features = said.lines().find_map(|line| line.strip_prefix("features_ro_compat = "));
        let features = features.unwrap().trim_start_matches("0x");
        // The bit of reflink.
        assert_eq!(u32::from_str_radix(features, 16).unwrap() & 4, 0, "{said}");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn sizes_agree_with_the_tools() {
        let folder = std::env::temp_dir().join(format!("csi-sizes-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for (name, size) in [("ext4", 64_u64 << 20), ("xfs", 320 << 20), ("btrfs", 256 << 20)] {
            let path = folder.join(name);
            std::fs::File::create(&path).unwrap().set_len(size).unwrap();
            make(name, &Making::default(), &path);
            let start = std::fs::read(&path).unwrap()[..SUPERBLOCKS_BYTES].to_vec();
            assert_eq!(size_of(name, &start), Some(size), "{name}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn errors_that_a_check_leaves_are_refused() {
        for (code, fine) in [(0, true), (1, true), (2, true), (4, false), (5, false), (8, false)] {
            assert_eq!(checked(Some(code)).is_ok(), fine, "{code}");
        }
        assert!(checked(None).is_err());
    }
}
