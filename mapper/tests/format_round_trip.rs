//! Whatever is written comes back.

#![allow(clippy::unwrap_used, reason = "a test ends where an expectation fails")]

mod samples;

use blockd_mapper::entry::{Composite, Entry};
use blockd_mapper::format::catalogue::{
    VolumeKind, VolumeRecord, decode_catalogue, encode_catalogue,
};
use blockd_mapper::format::index_page::{decode_index, encode_index};
use blockd_mapper::format::leaf_page::{decode_leaf, encode_composite_leaf, encode_leaf};
use blockd_mapper::format::page::{PageExpect, PageStamp};
use blockd_mapper::format::record::{self, Change, GroupMember};
use blockd_mapper::format::superblock::{
    DEVICE_STATES, DeviceRecord, DeviceState, DeviceTable, Superblock, newest,
};
use blockd_mapper::format::under_page::{decode_under, encode_under};
use blockd_mapper::format::wal::{WalBlockBuilder, WalExpect, WalStamp, WalStop, decode_block};
use blockd_mapper::format::{Limits, PageRef, Place, Problem, VolumeName, capacity_of, levels_for};
use blockd_mapper::geometry::Geometry;
use blockd_mapper::io::Page;
use blockd_mapper::mapping::Mapping;
use blockd_mapper::space::{DeviceMark, Placement, VolumeSettings};
use blockd_mapper::units::{
    DeviceIndex, Epoch, ExtentIndex, Lsn, PageAddress, PhysicalExtent, SlotIndex, VolumeId,
    WallTime,
};
use proptest::collection::vec;
use proptest::prelude::*;
use samples::POOL;

fn names() -> impl Strategy<Value = VolumeName> {
    "[a-zA-Zäö€ _.][a-zä€0-9-]{1,40}".prop_map(|name| VolumeName::new(&name).unwrap())
}

fn volumes() -> impl Strategy<Value = VolumeId> {
    (1..=u32::MAX).prop_map(VolumeId)
}

fn changes() -> impl Strategy<Value = Change> {
    let extent = || (0..1_u64 << 34).prop_map(ExtentIndex);
    let size = || (1..=1_u64 << 41).prop_map(|blocks| blocks * 512);
    let physical = || (0..1_u64 << 40).prop_map(PhysicalExtent);
    let made = || (0..=WallTime::LAST.0).prop_map(WallTime);
    prop_oneof![
        (volumes(), extent(), physical(), any::<u64>()).prop_map(
            |(volume, extent, physical, valid)| { Change::Map { volume, extent, physical, valid } }
        ),
        (volumes(), extent()).prop_map(|(volume, extent)| Change::Unmap { volume, extent }),
        (volumes(), 0..1_u32 << 26)
            .prop_map(|(volume, slot)| Change::UnmapLeaf { volume, slot: SlotIndex(slot) }),
        (volumes(), size(), made(), names().prop_map(Box::new)).prop_map(
            |(volume, size, made, name)| {
                Change::Create { volume, size, block_size: 512, made, name }
            }
        ),
        volumes().prop_map(|volume| Change::Delete { volume }),
        (volumes(), size()).prop_map(|(volume, size)| Change::Resize { volume, size }),
        (volumes(), volumes(), made(), names().prop_map(Box::new)).prop_map(
            |(volume, source, made, name)| { Change::Snapshot { volume, source, made, name } }
        ),
        (volumes(), volumes(), size(), made(), names().prop_map(Box::new)).prop_map(
            |(volume, source, size, made, name)| Change::Clone { volume, source, size, made, name }
        ),
        (volumes(), volumes(), prop::option::of(1..1_u64 << 38)).prop_map(
            |(volume, snapshot, blocks)| {
                let size = blocks.map(|blocks| blocks * 512);
                Change::Rollback { volume, snapshot, size }
            }
        ),
        (volumes(), names().prop_map(Box::new))
            .prop_map(|(volume, name)| Change::Rename { volume, name }),
        groups(),
        (volumes(), extent(), composites()).prop_map(|(volume, extent, composite)| {
            Change::entry(volume, extent, Entry::Composite(composite))
        }),
    ]
}

fn composites() -> impl Strategy<Value = Composite> {
    (0..1_u64 << 40, 1..1_u64 << 40, any::<u64>(), any::<u64>()).prop_map(
        |(overlay, offset, top, under)| {
            let base = PhysicalExtent((overlay + offset) % (1 << 40));
            Composite { overlay: PhysicalExtent(overlay), top, base, under }
        },
    )
}

fn groups() -> impl Strategy<Value = Change> {
    let member = (volumes(), names()).prop_map(|(source, name)| GroupMember { source, name });
    (1..u32::MAX - 16, 0..=WallTime::LAST.0, vec(member, 2..=16)).prop_map(
        |(volume, made, members)| Change::SnapshotGroup {
            volume: VolumeId(volume),
            made: WallTime(made),
            members: members.into(),
        },
    )
}

fn stamps(tree: u32) -> impl Strategy<Value = PageStamp> {
    (any::<u32>(), any::<u64>(), any::<u64>(), any::<u32>()).prop_map(
        move |(node, lsn, epoch, index)| {
            let (index, lsn, epoch) = (index.into(), Lsn(lsn), Epoch(epoch));
            PageStamp { pool_id: POOL, tree, node, index, lsn, epoch }
        },
    )
}

fn has_leaving(table: &[DeviceRecord]) -> bool {
    table.iter().any(|device| device.state == DeviceState::Leaving)
}

fn superblocks() -> impl Strategy<Value = Superblock> {
    let device = (any::<[u8; 15]>(), 0..9_u64, 60..4000_u64, 0..65536_u64, 9..13_u32, any::<u8>());
    (
        vec(device, 1..=16),
        any::<[u64; 6]>(),
        any::<[u32; 2]>(),
        any::<bool>(),
        any::<u8>(),
        1..50_u32,
    )
        .prop_map(|(devices, numbers, small, clean, this, run)| {
            let mut table = Vec::new();
            let mut end = 0;
            for (id, gap, extents, rest, block_shift, class) in devices {
                let mut uuid = [u8::try_from(table.len()).unwrap(); 16];
                uuid[1..].copy_from_slice(&id);
                let first = if table.is_empty() { 0 } else { end + gap };
                let size = (extents << 16) + rest;
                let first = PhysicalExtent(first);
                let state = match class % 8 {
                    1 if table.len() == 1 => DeviceState::Leaving,
                    3 if table.len() == 2 && !has_leaving(&table) => DeviceState::Shrinking,
                    2 if !table.is_empty() => DeviceState::Removed,
                    _ => DeviceState::InUse,
                };
                let is_gone = state == DeviceState::Removed;
                let (size, extents) = if is_gone { (0, 0) } else { (size, extents) };
                let block_size = 1 << block_shift;
                let keeps = if state == DeviceState::Shrinking { extents - 5 } else { 0 };
                let record =
                    DeviceRecord { uuid, size, first, extents, block_size, class, state, keeps };
                table.push(record);
                end = first.0 + extents;
            }
            let count = u8::try_from(table.len()).unwrap();
            let devices = DeviceTable::new(&table).unwrap();
            let (_, last) = devices.present().last().unwrap();
            Superblock {
                incompat: if devices.has_states() { DEVICE_STATES } else { 0 },
                generation: numbers[0],
                previous_sum: numbers[1],
                open_id: numbers[2],
                wal_tail_sequence: numbers[3],
                wal_tail_hash: numbers[4],
                checkpoint_lsn: Lsn(numbers[5]),
                node: small[0],
                next_volume_id: small[1],
                clean,
                devices,
                this_device: DeviceIndex(this % count),
                wal_extents: run,
                reserve_start: PhysicalExtent(last.first.0 + 1),
                reserve_extents: run,
                ..samples::superblock()
            }
        })
}

fn records() -> impl Strategy<Value = VolumeRecord> {
    let ids = (volumes(), volumes(), any::<u32>());
    let kinds = (any::<bool>(), placements());
    (ids, kinds, 9..17_u32, 1..=1_u64 << 34, any::<u64>(), 0..1_u64 << 24, names()).prop_map(
        |(
            (id, lineage, origin),
            (writable, placement),
            block_shift,
            blocks,
            lsn,
            address,
            name,
        )| {
            let root = PageRef { address: PageAddress(address), sum: lsn * address.min(1) };
            VolumeRecord {
                id,
                lineage,
                origin: VolumeId(origin),
                kind: if writable { VolumeKind::Volume } else { VolumeKind::Snapshot },
                block_size: 1 << block_shift,
                size: blocks << block_shift,
                created_lsn: Lsn(lsn),
                made: WallTime(lsn >> 8),
                root,
                levels: if root.is_none() { 0 } else { 4 },
                name,
                settings: VolumeSettings { placement, ..VolumeSettings::default() },
            }
        },
    )
}

fn placements() -> impl Strategy<Value = Placement> {
    let pin = any::<u32>().prop_map(|mark| Placement::Pin(DeviceMark(mark)));
    prop_oneof![Just(Placement::Fill), Just(Placement::Spread), pin]
}

proptest! {
    #[test]
    fn superblock(written in superblocks()) {
        let mut page = Page::zeroed();
        written.encode(&mut page);
        prop_assert_eq!(Superblock::decode(&page.0, Place::Memory), Ok(written));
    }

    #[test]
    fn leaf_page(entries in vec(any::<Option<(u64, u64)>>(), 256), stamp in stamps(9)) {
        let entry = |index: usize| entries[index].map_or(Mapping::UNMAPPED, |(physical, valid)| {
            Mapping { physical: Some(PhysicalExtent(physical >> 24)), valid }
        });
        let mut page = Page::zeroed();
        let sum = encode_leaf(&mut page, &stamp, entry);
        let expect = PageExpect::leaf(POOL, SlotIndex(u32::try_from(stamp.index).unwrap()), sum);
        let read = decode_leaf(&page.0, &expect, &Limits::layout(), Place::Memory).unwrap();
        prop_assert_eq!(read.header().stamp, stamp);
        prop_assert_eq!(read.mapped() as usize, entries.iter().flatten().count());
        prop_assert!(read.under().is_none());
        prop_assert!(read.plain().unwrap().eq((0..256).map(entry)));
        let lost = PageExpect { sum: Some(sum ^ 1), ..expect };
        prop_assert!(decode_leaf(&page.0, &lost, &Limits::layout(), Place::Memory).is_err());
    }

    #[test]
    fn composite_leaf_page(
        mut entries in vec(proptest::option::of(composites()), 256),
        plain in vec(any::<Option<(u64, u64)>>(), 256),
        stamp in stamps(9),
    ) {
        // At least one is composite.
        entries[255] = entries[255].or(Some(samples::COMPOSITE));
        let entry = |index: usize| match (entries[index], plain[index]) {
            (Some(composite), _) => Entry::Composite(composite),
            (None, Some((physical, valid))) => {
                Entry::Mapped { physical: PhysicalExtent(physical >> 24), valid }
            }
            (None, None) => Entry::Unmapped,
        };
        let slot = SlotIndex(u32::try_from(stamp.index).unwrap());
        let (mut leaf, mut under) = (Page::zeroed(), Page::zeroed());
        let sum = encode_under(&mut under, &stamp, |index| entry(index).base());
        let expect_under = PageExpect::under(POOL, slot, sum);
        let reference = PageRef { address: PageAddress(stamp.index + 1), sum };
        let sum = encode_composite_leaf(&mut leaf, &stamp, reference, |index| entry(index).into());
        let expect = PageExpect::leaf(POOL, slot, sum);
        let limits = samples::layout();
        let leaf = decode_leaf(&leaf.0, &expect, &limits, Place::Memory).unwrap();
        prop_assert_eq!(leaf.header().stamp, stamp);
        prop_assert_eq!(leaf.mapped() as usize, (0..256).filter(|&i| entry(i).is_mapped()).count());
        prop_assert_eq!(leaf.under(), reference);
        let overlay = |index| leaf.overlay(index);
        let under = decode_under(&under.0, &expect_under, &limits, Place::Memory, overlay).unwrap();
        prop_assert_eq!(under.header().stamp, stamp);
        prop_assert!(under.whole(&leaf).eq((0..256).map(entry)));
    }

    #[test]
    fn index_page(entries in vec(any::<Option<(u64, u64)>>(), 252), stamp in stamps(0)) {
        let entry = |index: usize| entries[index].map_or(PageRef::NONE, |(address, sum)| {
            PageRef { address: PageAddress((address >> 16) | 1), sum }
        });
        let mut page = Page::zeroed();
        let sum = encode_index(&mut page, 3, &stamp, entry);
        let expect = PageExpect::catalogue_index(POOL, 3, stamp.index, sum);
        let read = decode_index(&page.0, &expect, &Limits::layout(), Place::Memory).unwrap();
        prop_assert_eq!(read.header().stamp, stamp);
        prop_assert!(read.iter().eq((0..252).map(entry)));
    }

    #[test]
    fn catalogue_page(written in vec(proptest::option::of(records()), 15), stamp in stamps(0)) {
        let mut page = Page::zeroed();
        let sum = encode_catalogue(&mut page, &stamp, |index| written[index]);
        let expect = PageExpect::catalogue(POOL, stamp.index, sum);
        let geometry = Geometry::new(1 << 16).unwrap();
        let limits = Limits::layout().with_placement(true);
        let read = decode_catalogue(&page.0, &expect, geometry, &limits, Place::Memory).unwrap();
        prop_assert_eq!(&read.records()[..], &written[..]);
    }

    #[test]
    fn wal_blocks(written in vec((changes(), 1..3000_u64), 1..400), epoch in 1..9_u64) {
        let mut expect = WalExpect { sequence: 5, previous: 6, ..samples::wal_expect() };
        let (mut builder, mut pages) = (WalBlockBuilder::new(), Vec::new());
        let (mut lsn, mut sequence, mut previous) = (0, 5, 6);
        let mut seal = |builder: &mut WalBlockBuilder| {
            let mut page = Page::zeroed();
            let begins_commit = sequence % 3 == 0;
            let epoch = Epoch(epoch);
            let (pool_id, node) = (POOL, 1);
            let stamp = WalStamp { pool_id, epoch, node, sequence, previous, begins_commit };
            previous = builder.finish(&mut page, &stamp);
            sequence += 1;
            pages.push(page);
        };
        let mut numbered = Vec::new();
        for (change, step) in &written {
            lsn += step;
            if !builder.push(change, Lsn(lsn)) {
                seal(&mut builder);
                prop_assert!(builder.push(change, Lsn(lsn)));
            }
            numbered.push((Lsn(lsn), change.clone()));
        }
        seal(&mut builder);
        let mut read = Vec::new();
        for page in &pages {
            let block = decode_block(&page.0, &expect, &samples::layout(), Place::Memory).unwrap();
            read.extend(&block);
            expect = block.next(&expect);
        }
        prop_assert_eq!(read, numbered);
        let old = decode_block(&pages[0].0, &expect, &Limits::layout(), Place::Memory);
        prop_assert!(matches!(old, Err(WalStop::End(_))));
    }

    #[test]
    fn record_of_any_change(change in changes(), delta: u16) {
        let mut bytes = [0xee; record::MAX_UNITS * 32];
        let units = record::encode(&change, delta, &mut bytes).unwrap();
        let read = record::decode(&bytes, &samples::layout(), Place::Memory);
        prop_assert_eq!(read, Ok((change.clone(), delta, units)));
        prop_assert_eq!(record::encode(&change, delta, &mut bytes[..units * 32 - 1]), None);
    }
}

#[test]
fn a_block_refuses_records_too_far_ahead_or_backwards() {
    let mut builder = WalBlockBuilder::new();
    let change = Change::Delete { volume: VolumeId(1) };
    assert!(builder.push(&change, Lsn(10)));
    assert!(!builder.push(&change, Lsn(10)));
    assert!(!builder.push(&change, Lsn(10 + 65536)));
    assert!(builder.push(&change, Lsn(10 + 65535)));
}

#[test]
fn an_epoch_beyond_the_superblock_is_no_end_of_the_log() {
    let page = samples::wal_block();
    let limits = samples::layout();
    let read = |min, max| {
        let (min_epoch, max_epoch) = (Epoch(min), Epoch(max));
        let expect = WalExpect { min_epoch, max_epoch, ..samples::wal_expect() };
        decode_block(&page.0, &expect, &limits, Place::Memory).map(|block| block.epoch())
    };
    assert_eq!(read(0x21, 0x21), Ok(Epoch(0x21)));
    assert!(matches!(read(0x22, 0x30), Err(WalStop::End(_))));
    assert!(matches!(read(1, 0x20), Err(WalStop::Corrupt(_))));
}

#[test]
fn reserved_bytes_of_a_later_feature_are_left_alone_where_its_bit_is_set() {
    let (geometry, limits) = samples::limits();
    let expect = PageExpect { sum: None, ..PageExpect::catalogue(POOL, 2, 0) };
    for at in [51, 52, 64, 127] {
        let mut page = Page::zeroed();
        encode_catalogue(&mut page, &samples::stamp(0, 2), samples::volume);
        page.0[64 + at] = 9;
        reseal(&mut page);
        let read = |limits| decode_catalogue(&page.0, &expect, geometry, &limits, Place::Memory);
        assert!(read(limits).is_err(), "byte {at}");
        let found = read(limits.with_unknown_features(true)).unwrap();
        assert!(found.records().iter().copied().eq((0..15).map(samples::volume)), "byte {at}");
    }
    // Those among the settings, too, where the settings are known.
    let limits = limits.with_volume_settings(true);
    for at in [66, 67, 104, 127] {
        let mut page = Page::zeroed();
        encode_catalogue(&mut page, &samples::stamp(0, 2), samples::volume);
        page.0[64 + at] = 9;
        reseal(&mut page);
        let read = |limits| decode_catalogue(&page.0, &expect, geometry, &limits, Place::Memory);
        assert!(read(limits).is_err(), "byte {at}");
        let found = read(limits.with_unknown_features(true)).unwrap();
        assert!(found.records().iter().copied().eq((0..15).map(samples::volume)), "byte {at}");
    }
}

#[test]
fn a_placement_is_read_where_its_bit_is_set_and_ignored_by_what_does_not_know_the_bit() {
    let (geometry, limits) = samples::limits();
    let expect = PageExpect { sum: None, ..PageExpect::catalogue(POOL, 2, 0) };
    let placed = |placement| {
        move |index| {
            let record = samples::volume(index)?;
            let settings = VolumeSettings { placement, ..record.settings };
            Some(VolumeRecord { settings, ..record })
        }
    };
    let mut page = Page::zeroed();
    for placement in [Placement::Spread, Placement::Pin(DeviceMark(0x0102_0304))] {
        encode_catalogue(&mut page, &samples::stamp(0, 2), placed(placement));
        let read = |limits| decode_catalogue(&page.0, &expect, geometry, &limits, Place::Memory);
        let found = read(limits.with_placement(true)).unwrap();
        assert!(found.records().iter().copied().eq((0..15).map(placed(placement))));
        assert!(read(limits).is_err(), "bytes that are in use without a bit");
        // As a release before the bit does.
        let found = read(limits.with_unknown_features(true)).unwrap();
        assert!(found.records().iter().copied().eq((0..15).map(samples::volume)));
    }
    assert_eq!(page.0[64 + 51..64 + 56], [2, 4, 3, 2, 1]);
    for (at, bad) in [(51, 3), (51, 1)] {
        page.0[64 + at] = bad;
        reseal(&mut page);
        let limits = limits.with_placement(true);
        let read = decode_catalogue(&page.0, &expect, geometry, &limits, Place::Memory);
        let text = read.map(|_| ()).unwrap_err().to_string();
        assert!(text.contains("placement"), "{text}");
    }
}

#[test]
fn composite_entries_and_later_formats_are_refused_by_name() {
    let mut page = Page::zeroed();
    encode_leaf(&mut page, &samples::stamp(7, 0), samples::mapping);
    page.0[64 + 5] = 2;
    reseal(&mut page);
    let expect = PageExpect { sum: None, ..PageExpect::leaf(POOL, SlotIndex(0), 0) };
    let error = decode_leaf(&page.0, &expect, &Limits::layout(), Place::Page(PageAddress(77)));
    let text = error.map(|_| ()).unwrap_err().to_string();
    assert_eq!(text, "leaf page at page 77: entry kind 2 is not supported by this build");
    Superblock { incompat: 4, ..samples::superblock() }.encode(&mut page);
    let error = Superblock::decode(&page.0, Place::Memory).unwrap_err();
    assert_eq!(error.problem, Problem::Unsupported { major: 1, minor: 0, incompat: 4, known: 3 });
    let place = Place::Device { device: DeviceIndex(0), offset: 4096 };
    page.0[8] ^= 1;
    let text = Superblock::decode(&page.0, place).unwrap_err().to_string();
    assert!(text.starts_with("superblock at byte 4096 of device 0: checksum is 0x"), "{text}");
}

#[test]
fn unknown_features_that_allow_reading_own_the_reserved_bytes() {
    for at in [92, 192, 512 + 46, 4000] {
        let mut page = Page::zeroed();
        Superblock { ro_compat: 2, ..samples::superblock() }.encode(&mut page);
        page.0[at] = 1;
        reseal(&mut page);
        let read = Superblock::decode(&page.0, Place::Memory).unwrap();
        assert_eq!(read.unknown_ro_compat(), 2);
        samples::superblock().encode(&mut page);
        page.0[at] = 1;
        reseal(&mut page);
        let error = Superblock::decode(&page.0, Place::Memory).unwrap_err();
        assert_eq!(error.problem, Problem::Reserved { byte: at as u64, found: 1 });
    }
}

#[test]
fn the_newest_superblock_counts_unless_its_copies_differ() {
    let old = samples::superblock();
    let new = Superblock { generation: old.generation + 1, ..old.clone() };
    let other = Superblock { this_device: DeviceIndex(0), ..new.clone() };
    let differs = Superblock { epoch: Epoch(0x22), ..new.clone() };
    let at = |copies: &[&Superblock]| -> Vec<(Place, Superblock)> {
        copies.iter().map(|&copy| (Place::Memory, copy.clone())).collect()
    };
    assert_eq!(newest(&[]), Ok(None));
    let copies = at(&[&old, &new, &other, &old]);
    assert_eq!(newest(&copies).unwrap().unwrap().generation, new.generation);
    assert!(newest(&at(&[&old, &new, &differs])).is_err());
}

/// Without the bit, and without unknown ones, the root's bytes are reserved.
#[test]
fn a_root_of_labels_without_its_bit_is_refused() {
    let mut page = Page::zeroed();
    samples::labelled().encode(&mut page);
    page.0[16] = 0;
    reseal(&mut page);
    let error = Superblock::decode(&page.0, Place::Memory).unwrap_err();
    assert_eq!(error.problem, Problem::Reserved { byte: 192, found: 0x24 });
    page.0[20] = 1;
    reseal(&mut page);
    let read = Superblock::decode(&page.0, Place::Memory).unwrap();
    assert!(read.labels_root.is_none(), "a feature that is not known may own them");
    // With the bit and no root: a release that does not know labels has written it.
    Superblock { compat: 4, ..samples::superblock() }.encode(&mut page);
    assert!(Superblock::decode(&page.0, Place::Memory).unwrap().labels_root.is_none());
    let nowhere = PageRef { address: PageAddress(u64::MAX >> 8), sum: 1 };
    Superblock { labels_root: nowhere, ..samples::labelled() }.encode(&mut page);
    assert!(Superblock::decode(&page.0, Place::Memory).is_err());
}

/// A release that does not know labels may have been killed while it wrote a superblock anew.
#[test]
fn a_superblock_copy_without_labels_counts_before_one_with_them() {
    let (with, other) = (samples::labelled(), samples::superblock());
    let without = Superblock { compat: with.compat, ..other };
    for copies in [[&with, &without], [&without, &with]] {
        let copies: Vec<_> = copies.map(|copy| (Place::Memory, copy.clone())).into();
        assert_eq!(newest(&copies).unwrap(), Some(&without));
    }
    let mut two = with.clone();
    two.labels_root.sum ^= 1;
    assert!(newest(&[(Place::Memory, with), (Place::Memory, two)]).is_err());
}

#[test]
fn levels_follow_from_the_number_of_leaves() {
    let levels = [1, 2, 252, 253, 63_504, 63_505, 1 << 26].map(levels_for);
    assert_eq!(levels, [0, 1, 1, 2, 2, 3, 4]);
    assert!(capacity_of(4) > 1 << 26);
}

fn reseal(page: &mut Page) {
    page.0[8..12].fill(0);
    let crc = crc32c::crc32c(&page.0);
    page.0[8..12].copy_from_slice(&crc.to_le_bytes());
}
