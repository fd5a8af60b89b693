//! The configuration: smallest sizes, and device classes, which storage classes name.

mod file;

use std::path::Path;

use blockd_csi_base::bytes::Bytes;
use blockd_csi_base::error::{Invalid, shown};
use blockd_csi_base::quantity::Ratio;

use crate::capability::FileSystem;
use crate::error::Error;
use crate::ids::Names;
use crate::placement::Placement;

/// Bytes of the file: some thousands of classes.
const MAX_FILE: u64 = 1024 * 1024;

/// How a class takes the space of its volumes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Space is allocated on the first write.
    Thin,
    /// All at once.
    Thick,
    /// In a pool in persistent memory: allocated at once, or on the first write if the class has an
    /// overprovision ratio.
    PmemPooled,
    /// A namespace of its own in a region of persistent memory, in one piece.
    PmemDirect,
}

impl Kind {
    const NAMES: [(&str, Self); 4] = [
        ("thin", Self::Thin),
        ("thick", Self::Thick),
        ("pmem-pooled", Self::PmemPooled),
        ("pmem-direct", Self::PmemDirect),
    ];

    /// Returns the name in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES.into_iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }

    fn of_name(name: &str) -> Option<Self> {
        Self::NAMES.into_iter().find(|(known, _)| *known == name).map(|(_, kind)| kind)
    }

    /// Its volumes lie in persistent memory.
    #[must_use]
    pub const fn is_pmem(self) -> bool {
        matches!(self, Self::PmemPooled | Self::PmemDirect)
    }
}

/// A device class.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Class {
    /// The name in storage classes.
    pub name: String,
    /// The pool; empty for the daemon's default pool.
    pub pool: String,
    /// Pools of further regions of persistent memory. A volume lies in one of all of them.
    pub others: Vec<String>,
    /// How space is taken.
    pub kind: Kind,
    /// Each volume has all of its space from the start, set aside by the daemon.
    pub is_thick: bool,
    /// How much may be promised of a pool, beside its size. Of thin classes only.
    pub overprovision_ratio: Ratio,
    /// Whether this is the default for storage classes that name none.
    pub is_default: bool,
    /// Logical block of its volumes; 0: the smallest that the pool can have.
    pub block_size: u32,
    /// In images for virtual machines, a partition table inside of their device.
    pub kata_partition: bool,
    /// The devices of the extents of its volumes, where a volume's parameters name none; `None`:
    /// the daemon's default.
    pub placement: Option<Placement>,
}

impl Class {
    /// Whether it names this pool. The default pool has no name here.
    #[must_use]
    pub fn names_pool(&self, pool: &str) -> bool {
        !pool.is_empty() && (self.pool == pool || self.others.iter().any(|other| other == pool))
    }

    /// Thin, on the daemon's default pool: the default without a configuration.
    #[must_use]
    pub fn usual(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            pool: String::new(),
            others: Vec::new(),
            kind: Kind::Thin,
            is_thick: false,
            overprovision_ratio: Ratio::TWO,
            is_default: true,
            block_size: 0,
            kata_partition: false,
            placement: None,
        }
    }
}

/// Smallest sizes, by the use of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Minimum {
    /// A block device.
    pub block: Bytes,
    /// A file system.
    pub ext4: Bytes,
    /// A file system.
    pub xfs: Bytes,
    /// A file system.
    pub btrfs: Bytes,
}

impl Minimum {
    /// For a volume with this file system, or none.
    #[must_use]
    pub const fn of(&self, file_system: Option<FileSystem>) -> Bytes {
        match file_system {
            None => self.block,
            Some(FileSystem::Ext4) => self.ext4,
            Some(FileSystem::Xfs) => self.xfs,
            Some(FileSystem::Btrfs) => self.btrfs,
        }
    }
}

/// All that is configured.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// The size of a volume whose claim has none.
    pub default_size: Bytes,
    /// Smallest sizes.
    pub minimum: Minimum,
    /// One of them is the default.
    pub classes: Vec<Class>,
    /// The cluster's name, by which its cells differ from those of other clusters; may be empty.
    pub cluster: String,
    /// Whether conditions of volumes are reported.
    pub health: bool,
    /// SINGLE_NODE_MULTI_WRITER is advertised, so that Kubernetes sends the newer access modes.
    pub multi_writer: bool,
}

impl Config {
    /// Reads a file; without one, there is one thin class on the daemon's default pool.
    ///
    /// # Errors
    /// The file cannot be read, or has an invalid value.
    pub fn load(path: Option<&Path>, names: &Names) -> Result<Self, Error> {
        let Some(path) = path else { return Self::parse("", names) };
        let failed = |error| Error::io(format_args!("read {}", path.display()), error);
        let len = std::fs::metadata(path).map_err(failed)?.len();
        if len > MAX_FILE {
            let allowed = format!("at most {MAX_FILE} bytes long");
            return Err(Error::invalid(path.display(), format_args!("{len} bytes long"), allowed));
        }
        let text = std::fs::read_to_string(path).map_err(failed)?;
        Self::parse(&text, names).map_err(|error| match error {
            Error::Invalid(invalid) => {
                let field = format!("{}: {}", path.display(), invalid.field);
                Error::Invalid(Invalid { field, ..invalid })
            }
            other => Error::unexpected(path.display(), other),
        })
    }

    /// Reads the text of a configuration.
    ///
    /// # Errors
    /// A value is invalid; the error names the key, the value, and the allowed values.
    pub fn parse(text: &str, names: &Names) -> Result<Self, Error> {
        file::read(text, names)
    }

    /// The class of that name, or the default one.
    ///
    /// # Errors
    /// The class does not exist. The error names `field`.
    pub fn class(&self, field: &str, name: Option<&str>) -> Result<&Class, Error> {
        let found = match name {
            Some(name) => self.classes.iter().find(|class| class.name == name),
            None => self.classes.iter().find(|class| class.is_default),
        };
        found.ok_or_else(|| {
            let known: Vec<&str> = self.classes.iter().map(|class| class.name.as_str()).collect();
            let allowed = format!("one of {}", shown(known.join(", ")));
            Error::invalid(field, name.unwrap_or_default(), allowed)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockd_csi_base::options::DEFAULT_DRIVER;

    fn parse(text: &str) -> Result<Config, Error> {
        Config::parse(text, &Names::new(DEFAULT_DRIVER))
    }

    #[test]
    fn without_a_file_there_is_one_thin_class_on_the_default_pool() {
        let config = parse("").unwrap();
        assert_eq!(config.default_size.get(), 1_073_741_824);
        assert_eq!(config.minimum.of(None).get(), 8_388_608);
        assert_eq!(config.minimum.of(Some(FileSystem::Ext4)).get(), 33_554_432);
        assert_eq!(config.minimum.of(Some(FileSystem::Xfs)).get(), 314_572_800);
        assert_eq!(config.minimum.of(Some(FileSystem::Btrfs)).get(), 209_715_200);
        let class = config.class("class", None).unwrap();
        assert_eq!((class.name.as_str(), class.pool.as_str()), ("default", ""));
        assert_eq!((class.kind, class.overprovision_ratio), (Kind::Thin, Ratio::TWO));
    }

    #[test]
    fn classes_are_found_by_name_and_the_default_one_without() {
        let config = parse(
            "default_size = 38797312\n[minimum]\nblock = '4Mi'\n\
             [[class]]\nname = 'fast'\npool = 'nvme'\nkind = 'thick'\nblock_size = 4096\n\
             placement = 'spread'\n\
             [[class]]\nname = 'big'\ndefault = true\noverprovision_ratio = 2.5\n",
        )
        .unwrap();
        assert_eq!(config.default_size.get(), 38_797_312);
        assert_eq!(config.minimum.block.get(), 4_194_304);
        let fast = config.class("class", Some("fast")).unwrap();
        assert_eq!((fast.pool.as_str(), fast.kind, fast.block_size), ("nvme", Kind::Thick, 4096));
        assert_eq!(fast.placement, Some(Placement::Spread));
        let big = config.class("class", None).unwrap();
        assert_eq!((big.name.as_str(), big.overprovision_ratio.to_string()), ("big", "2.5".into()));
        let error = config.class("d/device-class", Some("slow")).unwrap_err();
        assert_eq!(error.code(), tonic::Code::InvalidArgument);
        assert_eq!(error.to_string(), "d/device-class is slow: must be one of fast, big");
    }

    #[test]
    fn classes_of_persistent_memory_are_thick_unless_they_say_how_much_is_promised() {
        let config = parse(
            "[[class]]\nname = 'pooled'\npool = 'pm'\nkind = 'pmem-pooled'\ndefault = true\n\
             [[class]]\nname = 'thin'\npool = 'pm'\nkind = 'pmem-pooled'\n\
             overprovision_ratio = 3\n\
             [[class]]\nname = 'direct'\npools = ['r0', 'r1']\nkind = 'pmem-direct'\n\
             kata_partition = true\n",
        )
        .unwrap();
        let of = |name| config.class("class", Some(name)).unwrap();
        let (pooled, thin, direct) = (of("pooled"), of("thin"), of("direct"));
        assert_eq!((pooled.kind, pooled.is_thick), (Kind::PmemPooled, true));
        assert_eq!(pooled.overprovision_ratio, Ratio::ONE);
        assert!(!thin.is_thick && thin.overprovision_ratio.to_string() == "3");
        assert_eq!((direct.kind, direct.is_thick), (Kind::PmemDirect, false));
        assert!(direct.names_pool("r0") && direct.names_pool("r1") && !direct.names_pool("r2"));
        assert!(direct.kata_partition && !pooled.kata_partition);
        assert!(!Class::usual("a").names_pool(""));
    }

    /// Row: H37.
    #[test]
    fn health_is_on_unless_it_is_switched_off() {
        assert!(parse("").unwrap().health && parse("[health]").unwrap().health);
        assert!(parse("[health]\nenabled = true").unwrap().health);
        assert!(!parse("[health]\nenabled = false").unwrap().health);
    }

    /// Row: W6.
    #[test]
    fn newer_access_modes_are_advertised_unless_switched_off() {
        assert!(parse("").unwrap().multi_writer && parse("[access_modes]").unwrap().multi_writer);
        let switched = |to| parse(&format!("[access_modes]\nsingle_node_multi_writer = {to}"));
        assert!(switched(true).unwrap().multi_writer);
        assert!(!switched(false).unwrap().multi_writer);
    }

    #[test]
    fn ratios_are_read_exactly_however_they_are_written() {
        for (written, read) in [("2.5", "2.5"), ("'2.50'", "2.50"), ("3", "3"), ("1.1", "1.1")] {
            let text = format!("[[class]]\nname = 'a'\noverprovision_ratio = {written}\n");
            let ratio = parse(&text).unwrap().classes[0].overprovision_ratio;
            assert_eq!(ratio.to_string(), read);
        }
    }

    #[test]
    fn invalid_fields_are_refused_by_name() {
        let class = "[[class]]\nname = 'a'\n";
        let long = format!("{class}pool = '{}'", "p".repeat(33));
        let cases = [
            ("sizes = 1", "unknown field `sizes`"),
            ("[minimum]\nntfs = 1", "unknown field `ntfs`"),
            ("[health]\nenabled = 'no'", "invalid type: string \"no\""),
            ("[health]\ninterval = 1", "unknown field `interval`"),
            ("[access_modes]\nmulti = 1", "unknown field `multi`"),
            ("default_size = '1GB'", "default_size is 1GB"),
            ("default_size = 0", "default_size is 0"),
            ("default_size = -1", "default_size is -1"),
            ("[minimum]\nxfs = 'big'", "minimum.xfs is big"),
            ("[[class]]\npool = 'a'", "missing field `name`"),
            ("[[class]]\nname = ''", "class.name is empty"),
            ("[[class]]\nname = 'a b'", "class.name is a b"),
            (&format!("{class}kind = 'pmem'"), "class a: kind is pmem"),
            (
                &format!("{class}kind = 'pmem-direct'\noverprovision_ratio = 2"),
                "overprovision_ratio is 2: must be left out: a pmem-direct class",
            ),
            (&format!("{class}pools = ['p']"), "class a: pools is p: must be left out"),
            (&format!("{class}kind = 'pmem-direct'\npools = []"), "class a: pools is empty"),
            (&format!("{class}kind = 'pmem-direct'\npools = ['p', 'p']"), "class a: pools is p, p"),
            (
                &format!("{class}kind = 'pmem-direct'\npool = 'q'\npools = ['p']"),
                "class a: pools is p",
            ),
            (&format!("{class}kata_partition = true"), "class a: kata_partition is true"),
            (
                &format!("{class}kind = 'pmem-pooled'\nkata_partition = true"),
                "class a: kata_partition is true",
            ),
            (&format!("{class}kind = 'THIN'"), "class a: kind is THIN"),
            (&format!("{class}overprovision_ratio = 0.5"), "class a: overprovision_ratio is 0.5"),
            (
                &format!("{class}kind = 'thick'\noverprovision_ratio = 2"),
                "overprovision_ratio is 2",
            ),
            (&format!("{class}placement = 'stripe'"), "class a: placement is stripe"),
            (
                &format!("{class}kind = 'pmem-direct'\nplacement = 'spread'"),
                "class a: placement is spread: must be left out",
            ),
            (&format!("{class}block_size = 513"), "class a: block_size is 513"),
            (&format!("{class}pool = 'a/b'"), "class a: pool is a/b"),
            (&long, "class a: pool is ppp"),
            (&format!("{class}{class}"), "class.name is a: must be the name of one class only"),
            (&format!("{class}[[class]]\nname = 'b'"), "class.default is set 0 times"),
            (
                &format!("{class}default = true\n[[class]]\nname = 'b'\ndefault = true"),
                "class.default is set 2 times",
            ),
        ];
        for (text, said) in cases {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }
}
