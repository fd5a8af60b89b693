//! Why bytes aren't the structure they should be.

use std::fmt;

use crate::format::superblock::{COMPOSITE, DEVICE_STATES};
use crate::format::{FORMAT_MAJOR, FORMAT_MINOR};
use crate::units::{DeviceIndex, PageAddress};

/// A structure that cannot be used, its place, and its problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{structure}{place}: {problem}")]
pub struct FormatError {
    /// The expected structure.
    pub structure: Structure,
    /// Where.
    pub place: Place,
    /// The found and the expected content.
    pub problem: Problem,
}

/// The kinds of structures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Structure {
    /// A copy of the superblock.
    Superblock,
    /// A page with the entries of one leaf.
    LeafPage,
    /// A page with the bases of a leaf's composite entries.
    UnderPage,
    /// A page with references to pages of the level below.
    IndexPage,
    /// A page with volume records.
    CataloguePage,
    /// A page with the labels of a volume.
    LabelPage,
    /// A block of the write-ahead log.
    WalBlock,
    /// A change in the WAL or in the ring.
    Record,
    /// The header of the delta ring.
    RingHeader,
    /// A record of the delta ring.
    RingRecord,
}

impl fmt::Display for Structure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Superblock => "superblock",
            Self::LeafPage => "leaf page",
            Self::UnderPage => "under page",
            Self::IndexPage => "index page",
            Self::CataloguePage => "catalogue page",
            Self::LabelPage => "label page",
            Self::WalBlock => "WAL block",
            Self::Record => "record",
            Self::RingHeader => "delta ring header",
            Self::RingRecord => "delta ring record",
        })
    }
}

/// Where a structure was read. The caller of a decoder knows and says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Bytes in memory, of unknown origin.
    Memory,
    /// A byte of a device.
    Device {
        /// The caller's index of the device.
        device: DeviceIndex,
        /// The structure's first byte.
        offset: u64,
    },
    /// A metadata page of the pool.
    Page(PageAddress),
    /// A record of the delta ring.
    Ring {
        /// The slot of the ring.
        slot: u32,
        /// The record's position, counted from 1 over the life of the ring.
        position: u64,
    },
}

impl fmt::Display for Place {
    /// Begins with a blank, so that the unknown place takes no room.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => Ok(()),
            Self::Device { device, offset } => write!(f, " at byte {offset} of device {device}"),
            Self::Page(address) => write!(f, " at page {address}"),
            Self::Ring { slot, position } => write!(f, " {position} of slot {slot}"),
        }
    }
}

/// The problem of a structure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// Too few bytes, or too many.
    #[error("has {found} bytes, expected {expected}")]
    Length {
        /// Bytes there are.
        found: u64,
        /// Bytes it takes.
        expected: u64,
    },
    /// The structure's magic is wrong.
    #[error("magic is {found:#x}, expected {expected:#x}")]
    Magic {
        /// The found value.
        found: u64,
        /// The expected value.
        expected: u64,
    },
    /// The bytes changed after they were sealed.
    #[error("checksum is {found:#x}, computed {computed:#x}")]
    Checksum {
        /// The stored checksum.
        found: u64,
        /// The computed checksum.
        computed: u64,
    },
    /// The page is sound in itself but differs from its parent's reference: a lost or misdirected
    /// write.
    #[error("sum is {computed:#x}, its parent names {expected:#x}")]
    ParentSum {
        /// The computed checksum.
        computed: u64,
        /// The parent's checksum.
        expected: u64,
    },
    /// Written by a version that this code can't read.
    #[error(
        "format {major}.{minor} with incompatible features {}: this build reads \
         {FORMAT_MAJOR}.{FORMAT_MINOR} with features {}", Incompat(*incompat), Incompat(*known)
    )]
    Unsupported {
        /// Major version found.
        major: u16,
        /// Minor version found.
        minor: u16,
        /// Features found that a reader must know.
        incompat: u64,
        /// The features that this code knows.
        known: u64,
    },
    /// A kind or version inside a structure that is reserved for later formats.
    #[error("{what} {found} is not supported by this build")]
    UnsupportedKind {
        /// Which field.
        what: &'static str,
        /// Its value.
        found: u64,
    },
    /// The structure belongs to another pool.
    #[error("pool is {:#034x}, expected \
             {:#034x}", u128::from_be_bytes(*found), u128::from_be_bytes(*expected))]
    ForeignPool {
        /// The pool it belongs to.
        found: [u8; 16],
        /// The pool asked for.
        expected: [u8; 16],
    },
    /// A field has an invalid value.
    #[error("{field} is {found}: must be {allowed}")]
    Field {
        /// Which.
        field: &'static str,
        /// Its value.
        found: u64,
        /// The accepted values.
        allowed: &'static str,
    },
    /// A field holds another value than its place in the structure demands.
    #[error("{field} is {found}, expected {expected}")]
    Mismatch {
        /// Which.
        field: &'static str,
        /// Its value.
        found: u64,
        /// The expected value.
        expected: u64,
    },
    /// An entry of a table has an invalid value.
    #[error("{field} of entry {entry} is {found}: must be {allowed}")]
    Entry {
        /// Which entry, from 0.
        entry: u16,
        /// Which field of it.
        field: &'static str,
        /// Its value.
        found: u64,
        /// The accepted values.
        allowed: &'static str,
    },
    /// A reserved byte is in use.
    #[error("reserved byte {byte} is {found:#x}, expected 0")]
    Reserved {
        /// Its offset in the structure.
        byte: u64,
        /// Its value.
        found: u8,
    },
    /// A volume name breaks a rule.
    #[error("volume name {0}")]
    Name(&'static str),
    /// Two sound copies of one generation differ, so neither can be trusted.
    #[error("generation {generation} exists in two versions with sums {first:#x} and {second:#x}")]
    Disagree {
        /// The generation.
        generation: u64,
        /// Sum of one copy.
        first: u64,
        /// Sum of the other.
        second: u64,
    },
}

/// A set of `incompat` bits, with the names of those that are defined.
struct Incompat(u64);

impl fmt::Display for Incompat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [(COMPOSITE, "composite"), (DEVICE_STATES, "device-states")];
        let names = names.iter().filter(|(bit, _)| self.0 & bit != 0).map(|(_, name)| *name);
        let names = names.collect::<Vec<_>>().join(", ");
        match names.as_str() {
            "" => write!(f, "{:#x}", self.0),
            names => write!(f, "{:#x} ({names})", self.0),
        }
    }
}

impl Problem {
    /// A field has a value that is not allowed.
    #[must_use]
    pub const fn field(field: &'static str, found: u64, allowed: &'static str) -> Self {
        Self::Field { field, found, allowed }
    }

    pub(crate) const fn entry(
        entry: usize,
        field: &'static str,
        found: u64,
        allowed: &'static str,
    ) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "tables have at most 256 entries")]
        Self::Entry { entry: entry as u16, field, found, allowed }
    }

    /// The error of a structure read at a place.
    #[must_use]
    pub const fn of(self, structure: Structure, place: Place) -> FormatError {
        FormatError { structure, place, problem: self }
    }
}

impl FormatError {
    /// Whether it was written by a version that this build can't read, rather than damaged.
    #[must_use]
    pub const fn is_unsupported(&self) -> bool {
        matches!(self.problem, Problem::Unsupported { .. })
    }
}
