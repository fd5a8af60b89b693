//! Options of mkfs that a storage class may set, by file system. Only these are passed on: others
//! read files of the node (`-d FOLDER` copies it into the volume), write some, or make something
//! that the plugin cannot mount, check or grow.

use crate::capability::FileSystem;
use crate::error::Error;

/// The value of an option.
#[derive(Clone, Copy, Debug)]
enum Value {
    /// None.
    Flag,
    /// Digits, perhaps with a fraction or a unit.
    Number,
    /// A name or an id: of the file system, its usage, or the like.
    Name,
    /// One of these words.
    Word(&'static [&'static str]),
    /// A list of these words with commas between, each perhaps negated with `^`.
    Words(&'static [&'static str]),
    /// A list of these keys with commas between, each with a value or without.
    Keys(&'static [&'static str]),
}

/// An option: its spellings, and its value.
type Rule = (&'static [&'static str], Value);

/// Features that the kernel and `e2fsck` handle without further devices or keys, and with which the
/// kernel grows a mounted file system: it does not with `sparse_super2`.
const EXT4_FEATURES: &[&str] = &[
    "64bit",
    "bigalloc",
    "casefold",
    "dir_index",
    "dir_nlink",
    "ea_inode",
    "encrypt",
    "ext_attr",
    "extent",
    "extents",
    "extra_isize",
    "fast_commit",
    "filetype",
    "flex_bg",
    "has_journal",
    "huge_file",
    "inline_data",
    "large_dir",
    "large_file",
    "meta_bg",
    "metadata_csum",
    "metadata_csum_seed",
    "orphan_file",
    "project",
    "quota",
    "resize_inode",
    "sparse_super",
    "stable_inodes",
    "uninit_bg",
    "verity",
];

/// No journal elsewhere, and no offset; nothing that lets the kernel panic on errors. No UUID but a
/// random one, since all volumes of a class have its options.
const EXT4: &[Rule] = &[
    (&["-b"], Value::Number),
    (&["-C"], Value::Number),
    (
        &["-E"],
        Value::Keys(&[
            "discard",
            "encoding",
            "encoding_flags",
            "hash_seed",
            "lazy_itable_init",
            "lazy_journal_init",
            "nodiscard",
            "packed_meta_blocks",
            "quotatype",
            "resize",
            "root_owner",
            "stride",
            "stripe-width",
            "stripe_width",
        ]),
    ),
    (&["-e"], Value::Word(&["continue", "remount-ro"])),
    (&["-G"], Value::Number),
    (&["-g"], Value::Number),
    (&["-I"], Value::Number),
    (&["-i"], Value::Number),
    (&["-J"], Value::Keys(&["fast_commit_size", "location", "size"])),
    (&["-j"], Value::Flag),
    (&["-L"], Value::Name),
    (&["-m"], Value::Number),
    (&["-N"], Value::Number),
    (&["-O"], Value::Words(EXT4_FEATURES)),
    (&["-T"], Value::Name),
    (&["-U"], Value::Word(&["random"])),
];

/// No log and no realtime part elsewhere, no file of settings, and none of contents.
const XFS: &[Rule] = &[
    (&["-b"], Value::Keys(&["size"])),
    (
        &["-d"],
        Value::Keys(&[
            "agcount",
            "agsize",
            "concurrency",
            "cowextsize",
            "daxinherit",
            "extszinherit",
            "noalign",
            "projinherit",
            "su",
            "sunit",
            "sw",
            "swidth",
        ]),
    ),
    (
        &["-i"],
        Value::Keys(&[
            "align",
            "attr",
            "exchange",
            "maxpct",
            "nrext64",
            "perblock",
            "projid32bit",
            "size",
            "sparse",
        ]),
    ),
    (&["-K"], Value::Flag),
    (&["-L"], Value::Name),
    (&["-l"], Value::Keys(&["concurrency", "lazy-count", "size", "su", "sunit", "version"])),
    (
        &["-m"],
        Value::Keys(&["bigtime", "crc", "finobt", "inobtcount", "reflink", "rmapbt", "uuid"]),
    ),
    (&["-n"], Value::Keys(&["ftype", "parent", "size", "version"])),
    (&["-s"], Value::Keys(&["size"])),
];

/// Of one device; no folder to begin with. No UUID: all volumes of a class would have it, and the
/// kernel refuses a second one while one is mounted.
const BTRFS_PROFILES: &[&str] = &["dup", "single"];
const BTRFS_FEATURES: &[&str] = &[
    "block-group-tree",
    "extref",
    "free-space-tree",
    "mixed-bg",
    "no-holes",
    "quota",
    "skinny-metadata",
    "squota",
];
const BTRFS: &[Rule] = &[
    (&["-d", "--data"], Value::Word(BTRFS_PROFILES)),
    (&["-K", "--nodiscard"], Value::Flag),
    (&["-L", "--label"], Value::Name),
    (&["-M", "--mixed"], Value::Flag),
    (&["-m", "--metadata"], Value::Word(BTRFS_PROFILES)),
    (&["-n", "--nodesize"], Value::Number),
    (&["-O", "--features"], Value::Words(BTRFS_FEATURES)),
    (&["-R", "--runtime-features"], Value::Words(BTRFS_FEATURES)),
    (&["-s", "--sectorsize"], Value::Number),
    (&["--csum", "--checksum"], Value::Word(&["blake2", "crc32c", "sha256", "xxhash"])),
];

const fn rules(file_system: FileSystem) -> &'static [Rule] {
    match file_system {
        FileSystem::Ext4 => EXT4,
        FileSystem::Xfs => XFS,
        FileSystem::Btrfs => BTRFS,
    }
}

/// Checks options that are to be passed to mkfs of a file system.
///
/// # Errors
/// One of them is not among those that may be set. The error names `field`, the option, and the
/// options or values that are allowed.
pub fn check(field: &str, file_system: FileSystem, words: &[String]) -> Result<(), Error> {
    let rules = rules(file_system);
    let mut words = words.iter().map(String::as_str);
    while let Some(word) = words.next() {
        let (option, attached) = split(word);
        let rule = rules.iter().find(|(spellings, _)| spellings.contains(&option));
        let Some((_, value)) = rule else {
            let known: Vec<&str> =
                rules.iter().flat_map(|(names, _)| names.iter().copied()).collect();
            let name = file_system.name();
            let allowed =
                format!("one of the options of mkfs.{name} that are allowed: {}", known.join(", "));
            return Err(Error::invalid(field, option, allowed));
        };
        let given = match value {
            Value::Flag => attached,
            _ => attached.or_else(|| words.next()),
        };
        if !value.takes(given) {
            let shown =
                given.map_or_else(|| option.to_owned(), |given| format!("{option} {given}"));
            return Err(Error::invalid(field, shown, format!("{option} {}", value.allowed())));
        }
    }
    Ok(())
}

/// An option, and its value where that is in the same word: `-b4096`, `--csum=xxhash`.
fn split(word: &str) -> (&str, Option<&str>) {
    if word.starts_with("--") {
        return word.split_once('=').map_or((word, None), |(option, value)| (option, Some(value)));
    }
    match word.char_indices().nth(2) {
        Some((at, _)) if word.starts_with('-') => (&word[..at], Some(&word[at..])),
        _ => (word, None),
    }
}

impl Value {
    fn takes(self, given: Option<&str>) -> bool {
        let Some(text) = given else { return matches!(self, Self::Flag) };
        let mut items = text.split(',');
        match self {
            Self::Flag => false,
            Self::Number => {
                text.starts_with(|c: char| c.is_ascii_digit())
                    && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '.')
            }
            Self::Name => is_plain(text),
            Self::Word(words) => words.contains(&text),
            Self::Words(words) => items.all(|item| {
                item == "none" || words.contains(&item.strip_prefix('^').unwrap_or(item))
            }),
            Self::Keys(keys) => items.all(|item| match item.split_once('=') {
                Some((key, value)) => keys.contains(&key) && is_plain(value),
                None => keys.contains(&item),
            }),
        }
    }

    fn allowed(self) -> String {
        match self {
            Self::Flag => "without a value".to_owned(),
            Self::Number => "with a number".to_owned(),
            Self::Name => "with a name that has no \"/\" and begins with no dash".to_owned(),
            Self::Word(words) => format!("with one of {}", words.join(", ")),
            Self::Words(words) | Self::Keys(words) => {
                format!("with some of these, separated by commas: {}", words.join(", "))
            }
        }
    }
}

/// Whether a value can be nothing but that: no path, and no option.
fn is_plain(text: &str) -> bool {
    !text.is_empty() && !text.starts_with('-') && !text.contains('/')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capability::FILE_SYSTEMS;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn refusal(file_system: FileSystem, text: &str) -> String {
        check("k", file_system, &words(text)).unwrap_err().to_string()
    }

    #[test]
    fn options_of_a_file_system_are_taken_in_each_way_of_writing_them() {
        for (file_system, text) in [
            (FileSystem::Ext4, ""),
            (FileSystem::Ext4, "-m 0.5 -b4096 -i 65536 -L my-data -O ^has_journal,quota -j"),
            (FileSystem::Ext4, "-U random"),
            (FileSystem::Ext4, "-E stride=16,stripe_width=64,nodiscard -J size=64 -e remount-ro"),
            (FileSystem::Xfs, "-m bigtime=1,reflink=0 -i size=512 -d su=64k,sw=4 -l size=64m -K"),
            (FileSystem::Btrfs, "-m single --data=dup --csum xxhash -O ^no-holes --nodesize 16k"),
        ] {
            check("k", file_system, &words(text)).unwrap();
        }
    }

    #[test]
    fn options_that_name_files_or_devices_or_more_are_refused_by_name_for_each_file_system() {
        for text in [
            "-d etc",
            "-detc",
            "-r etc",
            "--rootdir etc",
            "--rootdir=etc",
            "-c file",
            "-p file",
            "-z undo",
            "-t ext3",
            "-S",
            "--",
            "sdb",
            "-l badblocks",
            "--uuid c5ee68a0-3d01-4b4c-a7f3-1d1e3a2c0b6d",
            "--reflink",
            "-",
        ] {
            for file_system in FILE_SYSTEMS {
                let said = refusal(file_system, text);
                assert!(said.starts_with("k is -") || said.starts_with("k is sdb"), "{said}");
            }
        }
        let said = refusal(FileSystem::Ext4, "-m 1 -d etc");
        assert!(said.starts_with("k is -d: must be one of the options of mkfs.ext4"), "{said}");
        assert!(said.contains("-b, -C, -E, "), "{said}");
    }

    #[test]
    fn the_documentation_lists_the_options_of_each_file_system() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/KUBERNETES.md");
        let text = std::fs::read_to_string(path).unwrap();
        for file_system in FILE_SYSTEMS {
            let begin = format!("| {} | `-", file_system.name());
            let row = text.lines().find(|line| line.starts_with(&begin)).unwrap();
            for (spellings, _) in rules(file_system) {
                let option = format!("`{}`", spellings[0]);
                assert!(row.contains(&option), "{row} lacks {option}");
            }
        }
    }

    #[test]
    fn values_that_are_not_allowed_are_refused_with_those_that_are() {
        for (file_system, text, option) in [
            (FileSystem::Ext4, "-E offset=4096", "-E offset=4096"),
            (FileSystem::Ext4, "-J device=sdb", "-J device=sdb"),
            (FileSystem::Ext4, "-O journal_dev", "-O journal_dev"),
            (FileSystem::Ext4, "-O sparse_super2", "-O sparse_super2"),
            (FileSystem::Ext4, "-U clear", "-U clear"),
            (FileSystem::Ext4, "-e panic", "-e panic"),
            (FileSystem::Ext4, "-m -5", "-m -5"),
            (FileSystem::Ext4, "-j5", "-j 5"),
            (FileSystem::Ext4, "-L", "-L"),
            (FileSystem::Xfs, "-l logdev=sdb", "-l logdev=sdb"),
            (FileSystem::Xfs, "-d file=1,name=x", "-d file=1,name=x"),
            (FileSystem::Btrfs, "-d raid1", "-d raid1"),
        ] {
            let said = refusal(file_system, text);
            assert!(said.starts_with(&format!("k is {option}: must be -")), "{said}");
        }
        let said = refusal(FileSystem::Ext4, "-m -5");
        assert_eq!(said, "k is -m -5: must be -m with a number");
        let said = refusal(FileSystem::Ext4, "-e panic");
        assert!(said.ends_with("must be -e with one of continue, remount-ro"), "{said}");
    }
}
