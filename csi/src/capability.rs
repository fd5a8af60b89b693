//! How a volume is to be used, as it was checked: access type, access mode, file system.
//!
//! Volumes of a pool are of one node, so that modes of several nodes are refused (also the read-
//! only one). Volumes of a volume group can have one of them, as devices.

use std::fmt;

use crate::error::Error;
use crate::limits;
use crate::proto;
use crate::proto::volume_capability::AccessType;
use crate::proto::volume_capability::access_mode::Mode as Wire;

/// The access mode: which nodes and pods may use a volume at the same time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Mode {
    /// The old mode, from before [`Mode::SingleWriter`] and [`Mode::MultiWriter`].
    Writer,
    /// Read-only.
    ReaderOnly,
    /// One workload.
    SingleWriter,
    /// Several workloads of this node.
    MultiWriter,
    /// Nodes of a volume group, one after the other: the device is on standby on the others.
    ManyNodes,
}

/// Which nodes reach a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// One: it is in a pool of that node.
    Node,
    /// All nodes whose daemons have its volume group.
    Group,
}

/// The modes that are supported.
pub const MODES: [Mode; 5] =
    [Mode::Writer, Mode::ReaderOnly, Mode::SingleWriter, Mode::MultiWriter, Mode::ManyNodes];

const SUPPORTED_MODES: &str = "SINGLE_NODE_WRITER, SINGLE_NODE_READER_ONLY, \
                               SINGLE_NODE_SINGLE_WRITER or SINGLE_NODE_MULTI_WRITER: volumes are \
                               of \
                               one node";

const MODES_IN_GROUPS: &str = "SINGLE_NODE_WRITER, SINGLE_NODE_READER_ONLY, \
                               SINGLE_NODE_SINGLE_WRITER, SINGLE_NODE_MULTI_WRITER, or for \
                               devices MULTI_NODE_MULTI_WRITER";

impl Mode {
    /// Returns the name in the specification.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Writer => "SINGLE_NODE_WRITER",
            Self::ReaderOnly => "SINGLE_NODE_READER_ONLY",
            Self::SingleWriter => "SINGLE_NODE_SINGLE_WRITER",
            Self::MultiWriter => "SINGLE_NODE_MULTI_WRITER",
            Self::ManyNodes => "MULTI_NODE_MULTI_WRITER",
        }
    }

    /// The mode of that name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        MODES.into_iter().find(|mode| mode.name() == name)
    }

    /// Returns the value in messages.
    #[must_use]
    pub const fn to_wire(self) -> Wire {
        match self {
            Self::Writer => Wire::SingleNodeWriter,
            Self::ReaderOnly => Wire::SingleNodeReaderOnly,
            Self::SingleWriter => Wire::SingleNodeSingleWriter,
            Self::MultiWriter => Wire::SingleNodeMultiWriter,
            Self::ManyNodes => Wire::MultiNodeMultiWriter,
        }
    }

    const fn from_wire(wire: Wire) -> Option<Self> {
        match wire {
            Wire::SingleNodeWriter => Some(Self::Writer),
            Wire::SingleNodeReaderOnly => Some(Self::ReaderOnly),
            Wire::SingleNodeSingleWriter => Some(Self::SingleWriter),
            Wire::SingleNodeMultiWriter => Some(Self::MultiWriter),
            Wire::MultiNodeMultiWriter => Some(Self::ManyNodes),
            Wire::Unknown | Wire::MultiNodeReaderOnly | Wire::MultiNodeSingleWriter => None,
        }
    }
}

/// A file system that volumes can have.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum FileSystem {
    /// The default.
    Ext4,
    /// Grows only.
    Xfs,
    /// Holds checksums.
    Btrfs,
}

/// The file systems that are supported.
pub const FILE_SYSTEMS: [FileSystem; 3] = [FileSystem::Ext4, FileSystem::Xfs, FileSystem::Btrfs];

impl FileSystem {
    /// Returns the name for `mount` and `blkid`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        }
    }

    /// The file system of that name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        FILE_SYSTEMS.into_iter().find(|one| one.name() == name)
    }
}

/// The mount options of a mounted volume.
#[derive(Clone, PartialEq, Eq)]
pub struct Mount {
    /// `None`: the storage class's file system, or the default.
    pub file_system: Option<FileSystem>,
    /// May hold secrets.
    pub flags: Vec<String>,
}

impl fmt::Debug for Mount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flags = format_args!("{} not shown", self.flags.len());
        f.debug_struct("Mount")
            .field("file_system", &self.file_system)
            .field("flags", &flags)
            .finish()
    }
}

/// How a volume is seen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Access {
    /// Access as a block device.
    Block,
    /// Access as a mounted folder.
    Mount(Mount),
}

/// How a volume is to be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Capability {
    /// How it is seen.
    pub access: Access,
    /// The access mode.
    pub mode: Mode,
}

/// Why a capability was not taken.
#[derive(Debug)]
pub enum Refusal {
    /// The capability is empty or malformed.
    Malformed(Error),
    /// The capability is valid but not supported here.
    Unsupported(Error),
}

impl From<Refusal> for Error {
    /// INVALID_ARGUMENT for both, as when a volume is made or grown.
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Malformed(error) | Refusal::Unsupported(error) => error,
        }
    }
}

impl Refusal {
    /// FAILED_PRECONDITION for an unsupported capability, as when a volume is staged or published.
    #[must_use]
    pub fn exceeds(self) -> Error {
        match self {
            Self::Malformed(error) => error,
            Self::Unsupported(error) => Error::in_use("capability is not supported:", error),
        }
    }
}

impl Capability {
    /// Reads the capability of a message, for a volume of one node. `field` names it in errors.
    ///
    /// # Errors
    /// A field is missing, unknown, or not supported.
    pub fn parse(field: &str, wire: Option<&proto::VolumeCapability>) -> Result<Self, Refusal> {
        Self::parse_for(Reach::Node, field, wire)
    }

    /// The same for a volume of that reach.
    ///
    /// # Errors
    /// As [`Self::parse`].
    pub fn parse_for(
        reach: Reach,
        field: &str,
        wire: Option<&proto::VolumeCapability>,
    ) -> Result<Self, Refusal> {
        let allowed = match reach {
            Reach::Node => SUPPORTED_MODES,
            Reach::Group => MODES_IN_GROUPS,
        };
        let missing =
            |what: &str| Refusal::Malformed(Error::missing(format_args!("{field}{what}")));
        let wire = wire.ok_or_else(|| missing(""))?;
        let access = wire.access_type.as_ref().ok_or_else(|| missing(".access_type"))?;
        let mode = wire.access_mode.as_ref().ok_or_else(|| missing(".access_mode"))?.mode;
        let field_of_mode = format!("{field}.access_mode.mode");
        let known = Wire::try_from(mode).ok().filter(|mode| *mode != Wire::Unknown);
        let Some(known) = known else {
            let error = Error::invalid(field_of_mode, mode, allowed);
            return Err(Refusal::Malformed(error));
        };
        let access = match access {
            AccessType::Block(_) => Access::Block,
            AccessType::Mount(mount) => Access::Mount(parse_mount(field, mount)?),
        };
        let mode = Mode::from_wire(known)
            .filter(|mode| *mode != Mode::ManyNodes || reach == Reach::Group)
            .ok_or_else(|| {
                let error = Error::invalid(field_of_mode, known.as_str_name(), allowed);
                Refusal::Unsupported(error)
            })?;
        if mode == Mode::ManyNodes && access != Access::Block {
            let allowed = "block with MULTI_NODE_MULTI_WRITER (H14): each node keeps pages of a \
                           mounted file system, and would overwrite or hide what another wrote";
            let error = Error::invalid(format_args!("{field}.access_type"), "mount", allowed);
            return Err(Refusal::Unsupported(error));
        }
        Ok(Self { access, mode })
    }

    /// Reads a list that has to have something. All entries are checked.
    ///
    /// # Errors
    /// The list is empty, or a capability is refused. Malformed capabilities are reported before
    /// unsupported ones.
    pub fn parse_all(field: &str, list: &[proto::VolumeCapability]) -> Result<Vec<Self>, Refusal> {
        Self::parse_all_for(Reach::Node, field, list)
    }

    /// The same for a volume of that reach.
    ///
    /// # Errors
    /// As [`Self::parse_all`].
    pub fn parse_all_for(
        reach: Reach,
        field: &str,
        list: &[proto::VolumeCapability],
    ) -> Result<Vec<Self>, Refusal> {
        if list.is_empty() {
            return Err(Refusal::Malformed(Error::missing(field)));
        }
        limits::list(field, list.len(), limits::MAX_CAPABILITIES).map_err(Refusal::Malformed)?;
        let mut capabilities = Vec::with_capacity(list.len());
        let mut unsupported = None;
        for (index, wire) in list.iter().enumerate() {
            match Self::parse_for(reach, &format!("{field}[{index}]"), Some(wire)) {
                Ok(capability) => capabilities.push(capability),
                Err(refusal @ Refusal::Malformed(_)) => return Err(refusal),
                Err(refusal) => unsupported = unsupported.or(Some(refusal)),
            }
        }
        unsupported.map_or(Ok(capabilities), Err)
    }

    /// The file system that it names, if it has one at all.
    #[must_use]
    pub const fn file_system(&self) -> Option<FileSystem> {
        match &self.access {
            Access::Block => None,
            Access::Mount(mount) => mount.file_system,
        }
    }

    /// Whether it is seen as a block device.
    #[must_use]
    pub const fn is_block(&self) -> bool {
        matches!(self.access, Access::Block)
    }
}

fn parse_mount(
    field: &str,
    mount: &proto::volume_capability::MountVolume,
) -> Result<Mount, Refusal> {
    let flags = format!("{field}.mount.mount_flags");
    let bytes = mount.mount_flags.iter().map(String::len).fold(0, usize::saturating_add);
    if bytes > limits::MAX_FLAGS {
        // The flags themselves may be secret.
        let allowed = format!("at most {} bytes", limits::MAX_FLAGS);
        let error = Error::invalid(flags, format_args!("{bytes} bytes long"), allowed);
        return Err(Refusal::Malformed(error));
    }
    let of_type = format!("{field}.mount.fs_type");
    limits::string(&of_type, &mount.fs_type).map_err(Refusal::Malformed)?;
    let of_group = format!("{field}.mount.volume_mount_group");
    limits::string(&of_group, &mount.volume_mount_group).map_err(Refusal::Malformed)?;
    if !mount.volume_mount_group.is_empty() {
        let error = Error::invalid(of_group, &mount.volume_mount_group, "empty");
        return Err(Refusal::Unsupported(error));
    }
    let file_system = match mount.fs_type.as_str() {
        "" => None,
        name => Some(FileSystem::of_name(name).ok_or_else(|| {
            Refusal::Unsupported(Error::invalid(of_type, name, "ext4, xfs or btrfs"))
        })?),
    };
    Ok(Mount { file_system, flags: mount.mount_flags.clone() })
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;
    use crate::proto::volume_capability::{AccessMode, BlockVolume, MountVolume};

    fn wire(mode: i32, access: Option<AccessType>) -> proto::VolumeCapability {
        proto::VolumeCapability { access_mode: Some(AccessMode { mode }), access_type: access }
    }

    fn mount(fs_type: &str) -> AccessType {
        AccessType::Mount(MountVolume { fs_type: fs_type.to_owned(), ..Default::default() })
    }

    fn accesses() -> [AccessType; 4] {
        [AccessType::Block(BlockVolume {}), mount(""), mount("xfs"), mount("btrfs")]
    }

    #[test]
    fn every_mode_is_supported_malformed_or_refused_for_both_access_types() {
        for access in accesses() {
            for (mode, supported) in [
                (1, Mode::Writer),
                (2, Mode::ReaderOnly),
                (6, Mode::SingleWriter),
                (7, Mode::MultiWriter),
            ] {
                let parsed =
                    Capability::parse("c", Some(&wire(mode, Some(access.clone())))).unwrap();
                assert_eq!(parsed.mode, supported);
                assert_eq!(supported.to_wire() as i32, mode);
                assert_eq!(Mode::of_name(supported.name()), Some(supported));
            }
            for mode in [3, 4, 5] {
                let parsed = Capability::parse("c", Some(&wire(mode, Some(access.clone()))));
                assert!(matches!(parsed, Err(Refusal::Unsupported(_))), "{parsed:?}");
                let refusal = parsed.unwrap_err();
                assert_eq!(Error::from(refusal).code(), Code::InvalidArgument);
            }
            for mode in [0, 8, -1, i32::MAX] {
                let parsed = Capability::parse("c", Some(&wire(mode, Some(access.clone()))));
                assert!(matches!(parsed, Err(Refusal::Malformed(_))), "{parsed:?}");
            }
        }
    }

    #[test]
    fn many_nodes_are_for_devices_of_a_volume_group() {
        let parse = |mode, access| {
            Capability::parse_for(Reach::Group, "c", Some(&wire(mode, Some(access))))
        };
        let block = || AccessType::Block(BlockVolume {});
        assert_eq!(parse(5, block()).unwrap().mode, Mode::ManyNodes);
        assert_eq!(Mode::of_name("MULTI_NODE_MULTI_WRITER"), Some(Mode::ManyNodes));
        let text = Error::from(parse(5, mount("")).unwrap_err()).to_string();
        assert!(
            text.starts_with("c.access_type is mount: must be block with MULTI_NODE"),
            "{text}"
        );
        assert!(text.contains("H14"), "{text}");
        for mode in [3, 4] {
            assert!(matches!(parse(mode, block()), Err(Refusal::Unsupported(_))));
        }
        for mode in [1, 2, 6, 7] {
            parse(mode, mount("xfs")).unwrap();
        }
    }

    #[test]
    fn a_mode_or_type_that_is_missing_never_means_any() {
        let no_mode = proto::VolumeCapability { access_mode: None, access_type: Some(mount("")) };
        for (wire, missing) in [
            (None, "c is missing"),
            (Some(no_mode), "c.access_mode is missing"),
            (Some(wire(1, None)), "c.access_type is missing"),
        ] {
            let error = Error::from(Capability::parse("c", wire.as_ref()).unwrap_err());
            assert_eq!(error.code(), Code::InvalidArgument);
            assert_eq!(error.to_string(), missing);
        }
    }

    #[test]
    fn all_of_a_list_is_looked_at() {
        let good = wire(7, Some(mount("ext4")));
        let wrong = wire(5, Some(mount("ext4")));
        let unknown = wire(0, Some(mount("ext4")));
        assert!(matches!(Capability::parse_all("c", &[]), Err(Refusal::Malformed(_))));
        assert_eq!(Capability::parse_all("c", &[good.clone(), good.clone()]).unwrap().len(), 2);
        let refused = Capability::parse_all("c", &[good.clone(), wrong.clone()]);
        assert!(matches!(&refused, Err(Refusal::Unsupported(_))), "{refused:?}");
        let text = Error::from(refused.unwrap_err()).to_string();
        assert!(text.starts_with("c[1].access_mode.mode is MULTI_NODE_MULTI_WRITER:"), "{text}");
        // Malformed capabilities are reported first, wherever they are in the list.
        let refused = Capability::parse_all("c", &[wrong, good, unknown]);
        assert!(matches!(&refused, Err(Refusal::Malformed(_))), "{refused:?}");
    }

    #[test]
    fn an_unknown_file_system_or_a_mount_group_is_not_supported() {
        let refused = Capability::parse("c", Some(&wire(1, Some(mount("ntfs"))))).unwrap_err();
        let Refusal::Unsupported(error) = refused else { panic!("{refused:?}") };
        assert_eq!(error.to_string(), "c.mount.fs_type is ntfs: must be ext4, xfs or btrfs");
        let group = MountVolume { volume_mount_group: "7".to_owned(), ..Default::default() };
        let refused = Capability::parse("c", Some(&wire(1, Some(AccessType::Mount(group)))));
        assert_eq!(refused.unwrap_err().exceeds().code(), Code::FailedPrecondition);
    }

    #[test]
    fn flags_are_limited_and_not_shown() {
        let flags = |count: usize| MountVolume {
            mount_flags: vec!["secret=7".to_owned(); count],
            ..Default::default()
        };
        let fits = wire(1, Some(AccessType::Mount(flags(512))));
        let parsed = Capability::parse("c", Some(&fits)).unwrap();
        assert!(!format!("{parsed:?}").contains("secret"));
        let too_many = wire(1, Some(AccessType::Mount(flags(513))));
        let error = Error::from(Capability::parse("c", Some(&too_many)).unwrap_err());
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}
