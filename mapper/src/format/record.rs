//! Changes as the WAL and the delta ring hold them: units of 32 bytes.

use std::sync::Arc;

use crate::entry::{Composite, Entry};
use crate::format::catalogue::{check_volume, name_len};
use crate::format::{FormatError, Limits, Place, Problem, Structure, VolumeName, check_reserved};
use crate::geometry::{LEAF_ENTRIES, MAX_GROUP, MAX_NAME, MAX_VOLUME_SIZE};
use crate::units::{ExtentIndex, PhysicalExtent, SlotIndex, VolumeId, WallTime};

/// Bytes of a unit.
pub const UNIT_SIZE: usize = 32;
/// A unit as four little-endian words.
pub type Unit = [u64; 4];
/// Units of the longest change but a group's: one, and six with a name of 128 bytes.
pub const MAX_SINGLE_UNITS: usize = 1 + MAX_NAME.div_ceil(NAME_BYTES);
/// Units of the longest change: a group of snapshots with names of 128 bytes. It fits into one
/// block of the log, so that a group exists as a whole or not at all.
pub const MAX_UNITS: usize = 1 + MAX_GROUP * MAX_SINGLE_UNITS;
const _: () = assert!(MAX_UNITS <= crate::format::wal::WAL_UNITS, "a record is never split");
/// Each first write passes some on.
const _: () = assert!(size_of::<Change>() <= 48, "a change of an entry has no room to spare");

/// Bytes of a name in each further unit.
const NAME_BYTES: usize = 24;
const MAX_EXTENTS: u64 = MAX_VOLUME_SIZE >> 16;

const MAP: u8 = 1;
const UNMAP: u8 = 2;
const UNMAP_LEAF: u8 = 3;
const CREATE: u8 = 4;
const DELETE: u8 = 5;
const RESIZE: u8 = 6;
const SNAPSHOT: u8 = 7;
const CLONE: u8 = 8;
const ROLLBACK: u8 = 9;
const SNAPSHOT_GROUP: u8 = 10;
const RENAME: u8 = 11;
/// Only in pools with the feature; else as reserved as the others.
const COMPOSITE: u8 = 67;
/// For features to come; 64 to 66 are to be grant, grow and mark.
const RESERVED: std::ops::RangeInclusive<u8> = 12..=127;
const CONTINUED: u8 = 255;

/// One snapshot of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupMember {
    /// The source volume.
    pub source: VolumeId,
    /// The snapshot's name.
    pub name: VolumeName,
}

/// One change of the map or of the set of volumes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The extent's entry becomes exactly this.
    Map {
        /// The volume.
        volume: VolumeId,
        /// Which extent.
        extent: ExtentIndex,
        /// Where its data lies.
        physical: PhysicalExtent,
        /// Its valid sub-blocks.
        valid: u64,
    },
    /// The extent's entry becomes empty.
    Unmap {
        /// The volume.
        volume: VolumeId,
        /// Which extent.
        extent: ExtentIndex,
    },
    /// The extent's entry becomes exactly this overlay above this base.
    Composite {
        /// The volume.
        volume: VolumeId,
        /// Which extent.
        extent: ExtentIndex,
        /// The extent that is read first.
        overlay: PhysicalExtent,
        /// Its valid sub-blocks.
        top: u64,
        /// The extent below it.
        base: PhysicalExtent,
        /// Valid sub-blocks of the base.
        under: u64,
    },
    /// All 256 entries of a slot become empty.
    UnmapLeaf {
        /// The volume.
        volume: VolumeId,
        /// Which slot.
        slot: SlotIndex,
    },
    /// A new, empty volume.
    Create {
        /// Its identity.
        volume: VolumeId,
        /// Its bytes.
        size: u64,
        /// Bytes of its logical block.
        block_size: u32,
        /// When it is made.
        made: WallTime,
        /// Its name. Like the others it lies elsewhere, so that the changes of the data path are
        /// short where they are passed on.
        name: Box<VolumeName>,
    },
    /// The volume or snapshot is gone, with every entry.
    Delete {
        /// Which.
        volume: VolumeId,
    },
    /// The volume has another size; data beyond it is gone.
    Resize {
        /// Which.
        volume: VolumeId,
        /// Its bytes from now on.
        size: u64,
    },
    /// A new snapshot has its source's present content.
    Snapshot {
        /// The snapshot's identity.
        volume: VolumeId,
        /// The source volume.
        source: VolumeId,
        /// When it is made.
        made: WallTime,
        /// The snapshot's name.
        name: Box<VolumeName>,
    },
    /// A new volume has its source's present content.
    Clone {
        /// The clone's identity.
        volume: VolumeId,
        /// The source volume.
        source: VolumeId,
        /// The clone's bytes, no fewer than its source's.
        size: u64,
        /// When it is made.
        made: WallTime,
        /// The clone's name.
        name: Box<VolumeName>,
    },
    /// The volume gets the snapshot's content and size.
    Rollback {
        /// Which volume.
        volume: VolumeId,
        /// The snapshot.
        snapshot: VolumeId,
        /// Bytes, where the volume gets others than the snapshot has; no fewer.
        size: Option<u64>,
    },
    /// New snapshots of several volumes, in one cut: all of them have their sources' present
    /// content.
    SnapshotGroup {
        /// The first snapshot's identity; the others have those that follow.
        volume: VolumeId,
        /// When they are made.
        made: WallTime,
        /// 2 to 16 snapshots.
        members: Arc<[GroupMember]>,
    },
    /// The volume or snapshot has another name.
    Rename {
        /// Which.
        volume: VolumeId,
        /// Its name from now on.
        name: Box<VolumeName>,
    },
}

impl Change {
    /// The change that makes an extent's entry `entry`.
    #[must_use]
    pub fn entry(volume: VolumeId, extent: ExtentIndex, entry: impl Into<Entry>) -> Self {
        match entry.into() {
            Entry::Unmapped => Self::Unmap { volume, extent },
            Entry::Mapped { physical, valid } => Self::Map { volume, extent, physical, valid },
            Entry::Composite(Composite { overlay, top, base, under }) => {
                Self::Composite { volume, extent, overlay, top, base, under }
            }
        }
    }

    /// The volume that it changes or makes.
    #[must_use]
    pub const fn volume(&self) -> VolumeId {
        match *self {
            Self::Map { volume, .. }
            | Self::Unmap { volume, .. }
            | Self::Composite { volume, .. }
            | Self::UnmapLeaf { volume, .. }
            | Self::Create { volume, .. }
            | Self::Delete { volume }
            | Self::Resize { volume, .. }
            | Self::Snapshot { volume, .. }
            | Self::Clone { volume, .. }
            | Self::Rollback { volume, .. }
            | Self::SnapshotGroup { volume, .. }
            | Self::Rename { volume, .. } => volume,
        }
    }

    /// Whether it changes the set of volumes rather than entries.
    #[must_use]
    pub const fn is_structure(&self) -> bool {
        !matches!(
            self,
            Self::Map { .. } | Self::Unmap { .. } | Self::Composite { .. } | Self::UnmapLeaf { .. }
        )
    }

    /// Units that it takes.
    #[must_use]
    pub fn units(&self) -> usize {
        match self {
            Self::SnapshotGroup { members, .. } => {
                1 + members.iter().map(|member| 1 + name_units(&member.name)).sum::<usize>()
            }
            Self::Composite { .. } => 2,
            other => 1 + other.name().map_or(0, name_units),
        }
    }

    fn name(&self) -> Option<&VolumeName> {
        match self {
            Self::Create { name, .. }
            | Self::Snapshot { name, .. }
            | Self::Clone { name, .. }
            | Self::Rename { name, .. } => Some(name),
            _ => None,
        }
    }

    /// Kind and the three words behind the head.
    fn fields(&self) -> (u8, [u64; 3]) {
        match *self {
            Self::Map { extent, physical, valid, .. } => (MAP, [extent.0, physical.0, valid]),
            Self::Unmap { extent, .. } => (UNMAP, [extent.0, 0, 0]),
            Self::Composite { extent, overlay, top, .. } => (COMPOSITE, [extent.0, overlay.0, top]),
            Self::UnmapLeaf { slot, .. } => (UNMAP_LEAF, [slot.0.into(), 0, 0]),
            Self::Create { size, block_size, made, ref name, .. } => {
                (CREATE, [size, block_size.into(), stamped(name, made)])
            }
            Self::Delete { .. } => (DELETE, [0; 3]),
            Self::Resize { size, .. } => (RESIZE, [size, 0, 0]),
            Self::Snapshot { source, made, ref name, .. } => {
                (SNAPSHOT, [source.0.into(), 0, stamped(name, made)])
            }
            Self::Clone { source, size, made, ref name, .. } => {
                (CLONE, [source.0.into(), size, stamped(name, made)])
            }
            Self::Rollback { snapshot, size, .. } => {
                (ROLLBACK, [snapshot.0.into(), size.unwrap_or(0), 0])
            }
            Self::SnapshotGroup { made, ref members, .. } => {
                (SNAPSHOT_GROUP, [members.len() as u64, 0, made.0 << 8])
            }
            Self::Rename { ref name, .. } => (RENAME, [0, 0, name_len(name).into()]),
        }
    }

    /// Passes the change's units to `unit` in their order. Returns their number.
    #[inline]
    pub fn for_each_unit(&self, lsn_delta: u16, mut unit: impl FnMut(Unit)) -> usize {
        let (kind, [a, b, c]) = self.fields();
        let units = self.units();
        let [count, ..] = units.to_le_bytes();
        unit([head(kind, count, lsn_delta, self.volume()), a, b, c]);
        let further = |number| head(CONTINUED, number, lsn_delta, self.volume());
        if let Some(name) = self.name() {
            put_name(name, 1, further, unit);
        } else if let Self::Composite { base, under, .. } = *self {
            unit([further(1), base.0, under, 0]);
        } else if let Self::SnapshotGroup { members, .. } = self {
            put_members(members, further, unit);
        }
        units
    }
}

/// The bytes of a name in the lowest byte, the time above.
fn stamped(name: &VolumeName, made: WallTime) -> u64 {
    u64::from(name_len(name)) | made.0 << 8
}

/// Takes the two apart again.
fn unstamped(word: u64) -> (u64, WallTime) {
    (word & 0xFF, WallTime(word >> 8))
}

fn name_units(name: &VolumeName) -> usize {
    name.as_bytes().len().div_ceil(NAME_BYTES)
}

/// Passes the units of a name to `unit`, the first with this number. Returns the number after the
/// last.
fn put_name(
    name: &VolumeName,
    first: u8,
    further: impl Fn(u8) -> u64,
    mut unit: impl FnMut(Unit),
) -> u8 {
    let mut number = first;
    for piece in name.as_bytes().chunks(NAME_BYTES) {
        let mut bytes = [0; NAME_BYTES];
        bytes[..piece.len()].copy_from_slice(piece);
        let [a, b, c] = words(&bytes);
        unit([further(number), a, b, c]);
        number += 1;
    }
    number
}

/// Passes the units of a group's members to `unit`: each like a snapshot's, except for kind and
/// identity.
#[cold]
fn put_members(members: &[GroupMember], further: impl Fn(u8) -> u64, mut unit: impl FnMut(Unit)) {
    let mut number = 1;
    for member in members {
        let len = name_len(&member.name).into();
        unit([further(number), member.source.0.into(), 0, len]);
        number = put_name(&member.name, number + 1, &further, &mut unit);
    }
}

/// Writes a change. Returns the units that it took, or `None` when there is no room.
pub fn encode(change: &Change, lsn_delta: u16, out: &mut [u8]) -> Option<usize> {
    let mut out = out.get_mut(..change.units() * UNIT_SIZE)?.chunks_exact_mut(8);
    Some(change.for_each_unit(lsn_delta, |unit| {
        for (word, out) in unit.iter().zip(&mut out) {
            out.copy_from_slice(&word.to_le_bytes());
        }
    }))
}

/// Reads the change at the beginning of some bytes, with its LSN delta and its units.
pub fn decode(
    bytes: &[u8],
    limits: &Limits,
    place: Place,
) -> Result<(Change, u16, usize), FormatError> {
    try_decode(bytes, limits).map_err(|problem| problem.of(Structure::Record, place))
}

pub(crate) fn try_decode(bytes: &[u8], limits: &Limits) -> Result<(Change, u16, usize), Problem> {
    let available = bytes.len() / UNIT_SIZE;
    let short = Problem::Length { found: bytes.len() as u64, expected: UNIT_SIZE as u64 };
    let first = bytes.first_chunk::<UNIT_SIZE>().ok_or(short)?;
    let unit = unit_from_bytes(first);
    let [_, units, d0, d1, ..] = *first;
    let units = usize::from(units);
    if units == 0 || units > MAX_UNITS || units > available {
        let allowed = "at least 1, at most 113, within the bytes there are";
        return Err(Problem::field("units", units as u64, allowed));
    }
    let delta = u16::from_le_bytes([d0, d1]);
    let change = if units == 1 {
        change_from(unit, None, limits)?
    } else {
        change_from(unit, Some(&bytes[UNIT_SIZE..units * UNIT_SIZE]), limits)?
    };
    if change.units() != units {
        let expected = change.units() as u64;
        return Err(Problem::Mismatch { field: "units", found: units as u64, expected });
    }
    Ok((change, delta, units))
}

fn change_from(unit: Unit, more: Option<&[u8]>, limits: &Limits) -> Result<Change, Problem> {
    let [head, a, b, c] = unit;
    let [kind, _, _, _, v0, v1, v2, v3] = head.to_le_bytes();
    let volume = volume_id("volume", u32::from_le_bytes([v0, v1, v2, v3]).into())?;
    let name = |len| name_from(head, 1, more.unwrap_or_default(), len).map(Box::new);
    match kind {
        MAP => {
            let extent = extent(a)?;
            let physical = physical("physical extent", b, limits)?;
            Ok(Change::Map { volume, extent, physical, valid: bitmap("bitmap", c, limits)? })
        }
        UNMAP => zero(&[b, c]).and(Ok(Change::Unmap { volume, extent: extent(a)? })),
        UNMAP_LEAF => {
            let slot = u32::try_from(a).ok().filter(|_| a < MAX_EXTENTS / LEAF_ENTRIES);
            let slot = slot.ok_or_else(|| Problem::field("slot", a, "below 2^26"))?;
            zero(&[b, c]).and(Ok(Change::UnmapLeaf { volume, slot: SlotIndex(slot) }))
        }
        CREATE => {
            let block_size = u32::try_from(b).unwrap_or(0);
            check_volume(a, block_size)?;
            let (len, made) = unstamped(c);
            Ok(Change::Create { volume, size: a, block_size, made, name: name(len)? })
        }
        DELETE => zero(&[a, b, c]).and(Ok(Change::Delete { volume })),
        RESIZE => zero(&[b, c]).and(Ok(Change::Resize { volume, size: size(a)? })),
        SNAPSHOT => {
            let (source, (len, made)) = (volume_id("source", a)?, unstamped(c));
            zero(&[b]).and(Ok(Change::Snapshot { volume, source, made, name: name(len)? }))
        }
        CLONE => {
            let (source, size) = (volume_id("source", a)?, size(b)?);
            let (len, made) = unstamped(c);
            Ok(Change::Clone { volume, source, size, made, name: name(len)? })
        }
        ROLLBACK => {
            let snapshot = volume_id("snapshot", a)?;
            let size = (b != 0).then(|| size(b)).transpose()?;
            zero(&[c]).and(Ok(Change::Rollback { volume, snapshot, size }))
        }
        SNAPSHOT_GROUP => {
            let (unused, made) = unstamped(c);
            zero(&[b, unused])?;
            let members = members_from(head, volume, a, more.unwrap_or_default())?;
            Ok(Change::SnapshotGroup { volume, made, members })
        }
        RENAME => zero(&[a, b]).and(Ok(Change::Rename { volume, name: name(c)? })),
        COMPOSITE if limits.has_composite() => {
            let extent = extent(a)?;
            let overlay = physical("overlay", b, limits)?;
            let top = bitmap("bitmap of the overlay", c, limits)?;
            let (base, under) = base_from(head, more.unwrap_or_default(), limits)?;
            if overlay == base {
                return Err(Problem::field("base", base.0, "another extent than the overlay"));
            }
            Ok(Change::Composite { volume, extent, overlay, top, base, under })
        }
        kind if RESERVED.contains(&kind) => {
            Err(Problem::UnsupportedKind { what: "record kind", found: kind.into() })
        }
        kind => Err(Problem::field("record kind", kind.into(), "from 1 to 11")),
    }
}

/// Reads the base of a composite entry, and its bitmap, from the unit behind the head.
fn base_from(head: u64, more: &[u8], limits: &Limits) -> Result<(PhysicalExtent, u64), Problem> {
    let Some(unit) = more.first_chunk::<UNIT_SIZE>() else {
        return Err(Problem::Mismatch { field: "units", found: 1, expected: 2 });
    };
    check_further(unit, head, 1)?;
    let [_, base, under, unused] = unit_from_bytes(unit);
    let base = physical("base", base, limits)?;
    let under = bitmap("bitmap of the base", under, limits)?;
    zero(&[unused]).and(Ok((base, under)))
}

/// Reads the members of a group from the units behind its head.
fn members_from(
    head: u64,
    volume: VolumeId,
    count: u64,
    more: &[u8],
) -> Result<Arc<[GroupMember]>, Problem> {
    let wrong = Problem::field("members", count, "from 2 to 16, with an id each");
    let many = usize::try_from(count).ok().filter(|many| (2..=MAX_GROUP).contains(many));
    let many = many.filter(|_| u64::from(volume.0) + count <= u64::from(u32::MAX));
    let mut members = Vec::with_capacity(many.ok_or(wrong)?);
    let (mut number, mut left) = (1, more);
    for _ in 0..count {
        let short = Problem::Length { found: left.len() as u64, expected: UNIT_SIZE as u64 };
        let (first, behind) = left.split_first_chunk::<UNIT_SIZE>().ok_or(short)?;
        check_further(first, head, number)?;
        let [_, source, unused, len] = unit_from_bytes(first);
        zero(&[unused])?;
        let source = volume_id("source", source)?;
        let units = usize::try_from(len).unwrap_or(usize::MAX).div_ceil(NAME_BYTES);
        let units = units.min(behind.len() / UNIT_SIZE).min(MAX_SINGLE_UNITS);
        let (name, behind) = behind.split_at(units * UNIT_SIZE);
        members.push(GroupMember { source, name: name_from(head, number + 1, name, len)? });
        let [units, ..] = units.to_le_bytes();
        (number, left) = (number + 1 + units, behind);
    }
    Ok(members.into())
}

fn check_further(unit: &[u8; UNIT_SIZE], head: u64, number: u8) -> Result<(), Problem> {
    let [_, _, d0, d1, v0, v1, v2, v3] = head.to_le_bytes();
    if unit[..8] == [CONTINUED, number, d0, d1, v0, v1, v2, v3] {
        return Ok(());
    }
    let found = u64::from(number);
    Err(Problem::field("further unit", found, "one that continues its head"))
}

/// Reads a name from its units, the first of which has this number.
fn name_from(head: u64, first: u8, more: &[u8], len: u64) -> Result<VolumeName, Problem> {
    let mut bytes = [0; MAX_SINGLE_UNITS * NAME_BYTES];
    let (units, _) = more.as_chunks::<UNIT_SIZE>();
    let units = units.iter().zip(bytes.chunks_exact_mut(NAME_BYTES));
    for ((unit, out), number) in units.zip(first..) {
        check_further(unit, head, number)?;
        out.copy_from_slice(&unit[8..]);
    }
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    let name = bytes.get(..len).ok_or(Problem::Name("must have 1 to 128 bytes"))?;
    let name = VolumeName::from_bytes(name).map_err(Problem::Name)?;
    check_reserved(&bytes[len..], UNIT_SIZE + len)?;
    Ok(name)
}

fn head(kind: u8, units: u8, lsn_delta: u16, volume: VolumeId) -> u64 {
    u64::from(kind) | u64::from(units) << 8 | u64::from(lsn_delta) << 16 | u64::from(volume.0) << 32
}

fn words(bytes: &[u8; NAME_BYTES]) -> [u64; 3] {
    let mut words = [0; 3];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

fn unit_from_bytes(bytes: &[u8; UNIT_SIZE]) -> Unit {
    let mut unit = [0; 4];
    for (word, bytes) in unit.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    unit
}

fn extent(found: u64) -> Result<ExtentIndex, Problem> {
    let allowed = "below 2^34";
    if found < MAX_EXTENTS {
        Ok(ExtentIndex(found))
    } else {
        Err(Problem::field("extent", found, allowed))
    }
}

fn physical(field: &'static str, found: u64, limits: &Limits) -> Result<PhysicalExtent, Problem> {
    let physical = PhysicalExtent(found);
    if limits.allows_physical(physical) {
        Ok(physical)
    } else {
        Err(Problem::field(field, found, "an extent of the pool"))
    }
}

fn bitmap(field: &'static str, found: u64, limits: &Limits) -> Result<u64, Problem> {
    if limits.allows_bits(found) {
        Ok(found)
    } else {
        Err(Problem::field(field, found, "within the sub-blocks"))
    }
}

fn size(found: u64) -> Result<u64, Problem> {
    // The block size isn't in the record; every one is a multiple of the smallest.
    check_volume(found, crate::geometry::MIN_BLOCK_SIZE).map(|()| found)
}

fn volume_id(field: &'static str, found: u64) -> Result<VolumeId, Problem> {
    match u32::try_from(found) {
        Ok(id) if id != 0 => Ok(VolumeId(id)),
        _ => Err(Problem::field(field, found, "from 1 to 2^32 - 1")),
    }
}

fn zero(unused: &[u64]) -> Result<(), Problem> {
    match unused.iter().find(|&&word| word != 0) {
        None => Ok(()),
        Some(&found) => Err(Problem::field("unused word", found, "0")),
    }
}
