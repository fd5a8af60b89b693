//! One valid structure of each kind, with a different value in every field.
#![allow(dead_code, reason = "each test uses some of them")]

use blockd_mapper::entry::{Composite, Entry};
use blockd_mapper::format::catalogue::{VolumeKind, VolumeRecord};
use blockd_mapper::format::page::PageStamp;
use blockd_mapper::format::record::{Change, GroupMember};
use blockd_mapper::format::superblock::{
    DeviceRecord, DeviceState, DeviceTable, LABELS, Superblock,
};
use blockd_mapper::format::wal::{WalBlockBuilder, WalExpect, WalStamp};
use blockd_mapper::format::{Labels, Limits, PageRef, VolumeName};
use blockd_mapper::geometry::Geometry;
use blockd_mapper::io::Page;
use blockd_mapper::mapping::Mapping;
use blockd_mapper::units::{
    DeviceIndex, Epoch, ExtentIndex, Lsn, PageAddress, PhysicalExtent, SlotIndex, VolumeId,
    WallTime,
};

/// Identity of the sample pool.
pub(crate) const POOL: [u8; 16] = *b"sample pool id..";

/// Geometry and limits of the sample pool.
pub(crate) fn limits() -> (Geometry, Limits) {
    let geometry = Geometry::new(64 << 10).unwrap();
    (geometry, Limits::new(geometry, 1 << 20).with_composite(true))
}

/// The limits of the layout, in a pool with composite entries.
pub(crate) fn layout() -> Limits {
    Limits::layout().with_composite(true)
}

pub(crate) fn name(text: &str) -> VolumeName {
    VolumeName::new(text).unwrap()
}

pub(crate) fn stamp(tree: u32, index: u64) -> PageStamp {
    PageStamp {
        pool_id: POOL,
        tree,
        node: 0x0a0b,
        index,
        lsn: Lsn(0x1234_5678),
        epoch: Epoch(0x21),
    }
}

pub(crate) fn superblock() -> Superblock {
    let device = |seed: u8, first: u64, extents: u64| DeviceRecord {
        uuid: [seed; 16],
        size: (extents << 16) + 4096,
        first: PhysicalExtent(first),
        extents,
        block_size: 512,
        class: seed,
        state: DeviceState::InUse,
        keeps: 0,
    };
    Superblock {
        pool_id: POOL,
        generation: 0x31,
        previous_sum: 0x0102_0304_0506_0708,
        major: 1,
        minor: 0,
        compat: 0,
        ro_compat: 0,
        incompat: 0,
        extent_size: 64 << 10,
        node: 0x0a0b,
        epoch: Epoch(0x21),
        clean: true,
        open_id: 0x4142_4344_4546_4748,
        boot_id: [0xb0; 16],
        devices: DeviceTable::new(&[device(1, 0, 0x1000), device(2, 0x2000, 0x800)]).unwrap(),
        this_device: DeviceIndex(1),
        wal_start: PhysicalExtent(1),
        wal_extents: 0x10,
        wal_tail_sequence: 0x51,
        wal_tail_hash: 0x6162_6364_6566_6768,
        checkpoint_lsn: Lsn(0x71),
        catalogue_root: PageRef { address: PageAddress(0x123), sum: 0x8182_8384_8586_8788 },
        catalogue_levels: 1,
        labels_root: PageRef::NONE,
        catalogue_records: 0x20,
        next_volume_id: 0x91,
        reserve_start: PhysicalExtent(0x2001),
        reserve_extents: 0x40,
    }
}

pub(crate) fn mapping(index: usize) -> Mapping {
    match index {
        0 => Mapping { physical: Some(PhysicalExtent(0xabcde)), valid: 0x8001 },
        3 => Mapping { physical: Some(PhysicalExtent(5)), valid: 0 },
        255 => Mapping { physical: Some(PhysicalExtent(6)), valid: 0xffff },
        _ => Mapping::default(),
    }
}

/// An entry of a leaf that has composite ones.
pub(crate) fn entry(index: usize) -> Entry {
    let composite = |overlay, top, base, under| {
        let (overlay, base) = (PhysicalExtent(overlay), PhysicalExtent(base));
        Entry::Composite(Composite { overlay, top, base, under })
    };
    match index {
        0 => Entry::Composite(COMPOSITE),
        3 => Entry::Mapped { physical: PhysicalExtent(5), valid: 1 },
        4 => composite(7, 0, 8, 0),
        255 => composite(9, 0x7fff, 10, 0xffff),
        _ => Entry::Unmapped,
    }
}

/// The overlay of an entry of that leaf, if it is composite.
pub(crate) fn overlay(index: usize) -> Option<PhysicalExtent> {
    match entry(index) {
        Entry::Composite(composite) => Some(composite.overlay),
        Entry::Mapped { .. } | Entry::Unmapped => None,
    }
}

/// A superblock of a pool that has labels.
pub(crate) fn labelled() -> Superblock {
    let labels_root = PageRef { address: PageAddress(0x124), sum: 0x9182_9384_9586_9788 };
    Superblock { compat: LABELS, labels_root, ..superblock() }
}

pub(crate) fn labels() -> Labels {
    Labels::new([("example.org/role", "db \u{fc}=1"), ("app", "")]).unwrap()
}

/// The under page of that leaf.
pub(crate) const UNDER: PageRef =
    PageRef { address: PageAddress(0x0056_7891), sum: 0x9192_9394_9596_9798 };

pub(crate) fn reference(index: usize) -> PageRef {
    match index {
        0 => PageRef { address: PageAddress(0x00ff_eedd), sum: 0x1112_1314_1516_1718 },
        251 => PageRef { address: PageAddress(9), sum: 0 },
        _ => PageRef::NONE,
    }
}

pub(crate) fn volume(index: usize) -> Option<VolumeRecord> {
    let volume = VolumeRecord {
        id: VolumeId(7),
        lineage: VolumeId(3),
        origin: VolumeId(5),
        kind: VolumeKind::Volume,
        block_size: 4096,
        size: 1 << 34,
        created_lsn: Lsn(0xc1),
        made: WallTime(0x0198_765a_3344),
        root: PageRef { address: PageAddress(0xd1), sum: 0xe1 },
        levels: 2,
        name: name("pvc-ümlaut"),
        settings: blockd_mapper::space::VolumeSettings::default(),
    };
    let (kind, root) = (VolumeKind::Snapshot, PageRef::NONE);
    let snapshot = VolumeRecord { id: VolumeId(8), kind, root, levels: 0, ..volume };
    [(0, volume), (14, snapshot)].into_iter().find(|(at, _)| *at == index).map(|(_, record)| record)
}

/// One change of each kind that every pool may have.
pub(crate) fn changes() -> Vec<Change> {
    let (volume, source, extent) =
        (VolumeId(0x0102_0304), VolumeId(0x11), ExtentIndex(0x3_0000_0001));
    let boxed = |text: &str| Box::new(name(text));
    let long = boxed(&"0123456789abcdef".repeat(8));
    let made = WallTime(0x0198_765a_3345);
    vec![
        Change::Map { volume, extent, physical: PhysicalExtent(0xabcde), valid: 0x8421 },
        Change::Unmap { volume, extent },
        Change::UnmapLeaf { volume, slot: SlotIndex(0x0300_0001) },
        Change::Create { volume, size: 1 << 40, block_size: 512, made, name: boxed("a") },
        Change::Delete { volume },
        Change::Resize { volume, size: 0x1234_5600 },
        Change::Snapshot { volume, source, made, name: boxed("exactly-twenty-four-byte") },
        Change::Clone { volume, source, size: 1 << 41, made: WallTime::LAST, name: long },
        Change::Rollback { volume, snapshot: source, size: None },
        Change::SnapshotGroup {
            volume,
            made,
            members: [
                GroupMember { source, name: name("twenty-five-bytes-of-name") },
                GroupMember { source: VolumeId(0x12), name: name("b") },
            ]
            .into(),
        },
        Change::Rename { volume, name: boxed("renamed") },
    ]
}

/// A composite entry.
pub(crate) const COMPOSITE: Composite = Composite {
    overlay: PhysicalExtent(0xabcde),
    top: 0x8421,
    base: PhysicalExtent(0x98765),
    under: 0xfff0,
};

/// The change that makes it.
pub(crate) fn composite_change() -> Change {
    let (volume, extent) = (VolumeId(0x0102_0304), ExtentIndex(0x3_0000_0001));
    Change::entry(volume, extent, Entry::Composite(COMPOSITE))
}

/// A sealed block with one change of each kind.
pub(crate) fn wal_block() -> Page {
    let mut builder = WalBlockBuilder::new();
    for (change, lsn) in changes().iter().zip(0xf000..) {
        assert!(builder.push(change, Lsn(lsn * 3)));
    }
    let mut page = Page::zeroed();
    let (sequence, previous) = (0x51, 0x6162_6364_6566_6768);
    let epoch = Epoch(0x21);
    builder.finish(
        &mut page,
        &WalStamp { pool_id: POOL, epoch, node: 0x0a0b, sequence, previous, begins_commit: false },
    );
    page
}

pub(crate) fn wal_expect() -> WalExpect {
    WalExpect {
        pool_id: POOL,
        sequence: 0x51,
        previous: 0x6162_6364_6566_6768,
        min_epoch: Epoch(0),
        max_epoch: Epoch(0x21),
        after: Lsn(0),
    }
}
