//! The volume map and the records that change it.

use super::state::{EXTS, SUBS, VOLS, ix};

/// No extent.
pub const NONE: u8 = u8::MAX;

/// One extent of one volume: unmapped, mapped, or composite. A composite entry reads a sub-block
/// from its overlay `p` if `bits` has it, else from `base` if `under` has it, else as zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Physical extent, or `NONE`; the overlay of a composite entry.
    pub p: u8,
    /// Valid bitmap of `p`.
    pub bits: u8,
    /// Base of a composite entry, else `NONE`.
    pub base: u8,
    /// Valid bitmap of the base.
    pub under: u8,
    /// LSN of the last change.
    pub lsn: u16,
}

/// An entry that maps nothing.
pub const UNMAPPED: Entry = Entry { p: NONE, bits: 0, base: NONE, under: 0, lsn: 0 };

impl Entry {
    /// A mapped entry without a base; its LSN is that of the record that carries it.
    pub fn plain(p: u8, bits: u8) -> Self {
        Self { p, bits, ..UNMAPPED }
    }

    /// True if the entry has a base.
    pub fn is_composite(&self) -> bool {
        self.base != NONE
    }

    /// Sub-blocks that do not read as zeroes.
    pub fn valid(&self) -> u8 {
        self.bits | self.under
    }

    /// The extent that sub-block `s` is read from.
    pub fn place(&self, s: u8) -> u8 {
        if self.bits & (1 << s) != 0 {
            self.p
        } else if self.under & (1 << s) != 0 {
            self.base
        } else {
            NONE
        }
    }

    /// The extents that the entry holds a reference to.
    pub fn extents(&self) -> impl Iterator<Item = u8> + use<> {
        [self.p, self.base].into_iter().filter(|p| *p != NONE)
    }

    /// True if the entry holds a reference to `p`.
    pub fn names(&self, p: u8) -> bool {
        self.extents().any(|q| q == p)
    }
}

/// One line of the catalogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Volume {
    /// False before creation and after deletion.
    pub exists: bool,
    /// Snapshots refuse writes.
    pub read_only: bool,
    /// Size in sub-blocks.
    pub size: u8,
    /// LSN of the last structure change.
    pub lsn: u16,
}

/// A volume that does not exist.
pub const NO_VOLUME: Volume = Volume { exists: false, read_only: false, size: 0, lsn: 0 };

/// The kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RecordKind {
    /// Entry (v, e) becomes (p, bits), or (p, bits, base, under) if there is a base.
    Map,
    /// The same, caused by a discard.
    Unmap,
    /// Volume e becomes a copy of v; bits = 1 if writable.
    Copy,
    /// Volumes e and `bits` become snapshots of v and p.
    Group,
    /// Volume v is gone.
    Delete,
    /// The content of v becomes that of e.
    Rollback,
    /// Volume v has `bits` sub-blocks; `p` = 1 if whole extents only are cleared (a mutation).
    Resize,
}

/// One mapping change.
#[derive(Clone, Copy, Debug)]
pub struct Record {
    /// Its place in the pool's one order.
    pub lsn: u16,
    /// Its kind.
    pub kind: RecordKind,
    /// Volume.
    pub v: u8,
    /// Extent, or the other volume.
    pub e: u8,
    /// Physical extent.
    pub p: u8,
    /// Bitmap, or the size.
    pub bits: u8,
    /// Base, or `NONE`.
    pub base: u8,
    /// Bitmap of the base.
    pub under: u8,
    /// Queue whose ring holds it.
    pub q: u8,
}

/// Fills unused places.
pub const NO_RECORD: Record = Record {
    lsn: 0,
    kind: RecordKind::Map,
    v: 0,
    e: 0,
    p: NONE,
    bits: 0,
    base: NONE,
    under: 0,
    q: 0,
};

impl Record {
    /// True for snapshot, clone, delete, rollback, resize.
    pub fn is_structure(&self) -> bool {
        !matches!(self.kind, RecordKind::Map | RecordKind::Unmap)
    }

    /// The entry that a map record sets.
    pub fn entry(&self) -> Entry {
        Entry { p: self.p, bits: self.bits, base: self.base, under: self.under, lsn: self.lsn }
    }

    /// Units that the record takes in a ring: one more for a base and its bitmap.
    pub fn units(&self) -> usize {
        1 + usize::from(self.base != NONE)
    }
}

/// All volumes.
#[derive(Clone, Copy, Debug)]
pub struct Map {
    /// Entries by volume and extent.
    pub entries: [[Entry; EXTS]; VOLS],
    /// The catalogue.
    pub volumes: [Volume; VOLS],
}

impl Default for Map {
    fn default() -> Self {
        Self::new()
    }
}

impl Map {
    /// No volumes.
    pub fn new() -> Self {
        Self { entries: [[UNMAPPED; EXTS]; VOLS], volumes: [NO_VOLUME; VOLS] }
    }

    /// The entry of extent `e` of volume `v`.
    pub fn entry(&self, v: u8, e: u8) -> Entry {
        self.entries[ix(v)][ix(e)]
    }

    /// Applies a record; `subs` is the number of sub-blocks in an extent.
    pub fn apply(&mut self, r: &Record, subs: u8) {
        let (v, e) = (ix(r.v), ix(r.e));
        match r.kind {
            RecordKind::Map | RecordKind::Unmap => {
                self.entries[v][e] = r.entry();
            }
            RecordKind::Copy => self.copy(v, e, r.bits == 0, r.lsn),
            RecordKind::Group => {
                self.copy(v, e, true, r.lsn);
                self.copy(ix(r.p), ix(r.bits), true, r.lsn);
            }
            RecordKind::Delete => {
                self.entries[v] = [UNMAPPED; EXTS];
                self.volumes[v] = Volume { lsn: r.lsn, ..NO_VOLUME };
            }
            RecordKind::Rollback => {
                self.copy_entries(e, v, r.lsn);
                self.volumes[v].size = self.volumes[e].size;
                self.volumes[v].lsn = r.lsn;
            }
            RecordKind::Resize => self.resize(r, subs),
        }
    }

    fn copy(&mut self, from: usize, to: usize, read_only: bool, lsn: u16) {
        self.copy_entries(from, to, lsn);
        let size = self.volumes[from].size;
        self.volumes[to] = Volume { exists: true, read_only, size, lsn };
    }

    fn copy_entries(&mut self, from: usize, to: usize, lsn: u16) {
        self.entries[to] = self.entries[from];
        for entry in &mut self.entries[to] {
            entry.lsn = lsn;
        }
    }

    fn resize(&mut self, r: &Record, subs: u8) {
        let volume = &mut self.volumes[ix(r.v)];
        volume.size = r.bits;
        volume.lsn = r.lsn;
        let mut first = 0_u8;
        for entry in &mut self.entries[ix(r.v)] {
            let inside = r.bits.saturating_sub(first).min(subs);
            let whole_only = r.p == 1 && inside > 0;
            let mask = if whole_only { u8::MAX } else { (1 << inside) - 1 };
            let kept = (entry.bits & mask, entry.under & mask);
            if inside == 0 || (kept == (0, 0) && entry.valid() != 0) {
                *entry = Entry { lsn: r.lsn, ..UNMAPPED };
            } else if kept != (entry.bits, entry.under) {
                *entry = Entry { bits: kept.0, under: kept.1, lsn: r.lsn, ..*entry };
            }
            first += subs;
        }
        debug_assert!(ix(subs) <= SUBS);
    }
}
