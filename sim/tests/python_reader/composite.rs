//! Pools with composite entries. A restore makes most of them, from a dump in which plain entries
//! were changed to composite ones of the same content.

use std::ops::Range;

use blockd_inspect::Reader;
use blockd_inspect::restore::Scan;
use blockd_mapper::entry::{Composite, Entry};
use blockd_mapper::format::Place as Origin;
use blockd_mapper::format::checksum::sum;
use blockd_mapper::format::record::Change;
use blockd_mapper::format::superblock::Superblock;
use blockd_mapper::format::wal::{WalBlockBuilder, WalStamp};
use blockd_mapper::io::{IoError, Page};
use blockd_mapper::units::{DeviceIndex, ExtentIndex, Lsn, PhysicalExtent};

use super::world::{KIB, MIB, PAGE, World};
use super::{Control, Info, Media, Place, pages_with};

const EXTENT: usize = 64 * KIB;
/// Sub-blocks of an extent.
const SUBS: u32 = 16;

struct Disks<'a>(&'a mut Media);

impl Disks<'_> {
    fn range(&mut self, device: DeviceIndex, offset: u64, len: usize) -> &mut [u8] {
        let at = usize::try_from(offset).unwrap();
        &mut self.0.devices[usize::from(device.0)][at..at + len]
    }
}

impl blockd_inspect::Media for Disks<'_> {
    fn read(&mut self, device: DeviceIndex, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        bytes.copy_from_slice(self.range(device, offset, bytes.len()));
        Ok(())
    }
}

impl blockd_inspect::MediaMut for Disks<'_> {
    fn write(&mut self, device: DeviceIndex, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
        self.range(device, offset, bytes.len()).copy_from_slice(bytes);
        Ok(())
    }

    fn flush(&mut self, _: DeviceIndex) -> Result<(), IoError> {
        Ok(())
    }
}

fn dump(media: &mut Media) -> String {
    let devices = media.options().devices;
    let mut disks = Disks(media);
    let mut reader = Reader::open(&mut disks, &devices).unwrap();
    let mut text = String::new();
    let mut put = |piece: &str| {
        text.push_str(piece);
        Ok(())
    };
    blockd_inspect::dump::dump(&mut reader, &mut put, &mut |_| {}).unwrap();
    text
}

fn restore(media: &mut Media, lines: &[String]) {
    let body: String = lines.iter().map(|line| format!("{line}\n")).collect();
    let text = format!("{body}end {} {:016x}", lines.len(), sum(body.as_bytes()));
    let mut scan = Scan::new();
    let _ = text.lines().all(|line| scan.line(line));
    let plan = scan.finish().unwrap();
    let devices = media.options().devices;
    let mut disks = Disks(media);
    let target = plan.target(&mut disks, &devices).unwrap();
    let mut restoring = plan.begin(&mut disks, target).unwrap();
    for line in text.lines() {
        restoring.line(line).unwrap();
    }
    restoring.finish().unwrap();
}

/// The numbers of a line, words apart; the last of a `map` is its bitmap.
fn numbers(line: &str) -> Vec<u64> {
    let words = line.split(' ').skip(1);
    let (map, last) = (line.starts_with("map "), line.rsplit(' ').next().unwrap());
    let mut found: Vec<u64> = words.filter_map(|word| word.parse().ok()).collect();
    if map {
        found.truncate(3);
        found.push(u64::from_str_radix(last, 16).unwrap());
    }
    found
}

/// The bytes of a sub-block on the only device.
fn sub_block(physical: u64, sub: u32) -> Range<usize> {
    let at = usize::try_from(physical).unwrap() * EXTENT + sub as usize * PAGE;
    at..at + PAGE
}

/// Copies the sub-blocks that the overlay is to have, and overwrites those of the base: they are
/// not to be read any more.
fn lay_over(media: &mut Media, overlay: u64, top: u64, base: u64) {
    for sub in (0..SUBS).filter(|sub| top >> sub & 1 == 1) {
        let from = sub_block(base, sub);
        media.devices[0].copy_within(from.clone(), sub_block(overlay, sub).start);
        media.devices[0][from].fill(0x5A);
    }
}

/// Appends a commit to the log of a pool that was closed, which is open from then on.
fn append(media: &mut Media, changes: &[Change]) {
    let read = |bytes: &[u8]| Superblock::decode(bytes, Origin::Memory).unwrap();
    for (device, at) in pages_with(media, b"BLOCKDsb") {
        let copy = &mut media.devices[device][at..at + PAGE];
        let mut page = Page::zeroed();
        Superblock { clean: false, ..read(copy) }.encode(&mut page);
        copy.copy_from_slice(&page.0);
    }
    let superblock = read(&media.devices[0][..PAGE]);
    let mut builder = WalBlockBuilder::new();
    for (change, lsn) in changes.iter().zip(superblock.checkpoint_lsn.0 + 1..) {
        assert!(builder.push(change, Lsn(lsn)));
    }
    let (sequence, previous) = (superblock.wal_tail_sequence, superblock.wal_tail_hash);
    let (pool_id, epoch, node) = (superblock.pool_id, superblock.epoch, superblock.node);
    let mut page = Page::zeroed();
    let stamp = WalStamp { pool_id, epoch, node, sequence, previous, begins_commit: true };
    builder.finish(&mut page, &stamp);
    let block = usize::try_from(sequence % superblock.wal_blocks()).unwrap();
    let at = usize::try_from(superblock.wal_start.0).unwrap() * EXTENT + block * PAGE;
    media.devices[0][at..at + PAGE].copy_from_slice(&page.0);
}

/// The pool closed, with every entry composite whose extent no other leaf names. Also extents that
/// are free.
fn composite_pool(world: &mut World) -> (Media, Vec<u64>, usize) {
    world.rig.control(Control::Close).unwrap();
    let mut media = world.rig.media.clone();
    let text = dump(&mut media);
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("end ")).collect();
    let extents = (media.devices[0].len() / EXTENT) as u64;
    let mut users = vec![0; usize::try_from(extents).unwrap()];
    for line in &lines {
        let (first, count) = match (line.split(' ').next().unwrap(), &numbers(line)[..]) {
            ("log" | "reserve", &[first, count, ..]) => (first, count),
            ("map", &[_, count, first, _]) => (first, count),
            _ => continue,
        };
        (first..first + count).for_each(|extent| users[usize::try_from(extent).unwrap()] += 1);
    }
    let unused = (1..extents - 1).filter(|extent| users[usize::try_from(*extent).unwrap()] == 0);
    let mut free: Vec<u64> = unused.collect();
    free.reverse();
    let (mut edited, mut made) = (Vec::new(), 0);
    for line in lines {
        match numbers(line)[..] {
            [at, count, first, valid] if line.starts_with("map ") => {
                for (at, base) in (at..at + count).zip(first..) {
                    if users[usize::try_from(base).unwrap()] > 1 {
                        edited.push(format!("map {at} 1 {base} {valid:x}"));
                        continue;
                    }
                    let overlay = free.pop().unwrap();
                    // None, some or all of the bits, and those of the base with or without them.
                    let top = valid & [0, 0x5555, 0xFF, u64::MAX][made % 4];
                    let under = if made % 3 == 0 { valid & !top } else { valid };
                    lay_over(&mut media, overlay, top, base);
                    edited.push(format!("over {at} {overlay} {top:x} {base} {under:x}"));
                    made += 1;
                }
            }
            _ if line.starts_with("features ") => edited.push("features 0 0 1".to_owned()),
            _ => edited.push(line.to_owned()),
        }
    }
    restore(&mut media, &edited);
    (media, free, made)
}

#[test]
fn composite_entries_in_the_trees_and_in_the_log() {
    let place = Place::new("composite", 1);
    let mut world = World::new(EXTENT, &[64 * MIB], None, 4);
    world.first_history();
    world.second_history();
    world.third_history();
    let (mut media, mut free, made) = composite_pool(&mut world);
    assert!(made > 20, "{made} entries are composite");
    place.put(&media);
    place.compare(&world.volumes).unwrap();
    let info = Info::of(&place.run(&["check"]).unwrap());
    assert!(info.clean && info.log_blocks == 0 && info.pages > 4);

    // The log lays new extents over each other at the first extents of a volume.
    let late = &world.volumes["late"];
    let volume = late.id;
    let mut data = late.data.clone();
    let mut changes = Vec::new();
    for extent in 0..4_usize {
        let (overlay, base) = (free.pop().unwrap(), free.pop().unwrap());
        let (top, under) = ([0x0F0F, 0, 0xFFFF, 0x1][extent], [0x00FF, 0xFF00, 0xFFFF, 0][extent]);
        for sub in 0..SUBS {
            media.devices[0][sub_block(overlay, sub)].fill(0xA0 + u8::try_from(sub).unwrap());
            media.devices[0][sub_block(base, sub)].fill(0xB0 + u8::try_from(sub).unwrap());
            let from = match (top >> sub & 1, under >> sub & 1) {
                (1, _) => 0xA0,
                (0, 1) => 0xB0,
                _ => 0,
            };
            let value = if from == 0 { 0 } else { from + u8::try_from(sub).unwrap() };
            let at = extent * EXTENT + sub as usize * PAGE;
            data[at..at + PAGE].fill(value);
        }
        let (overlay, base) = (PhysicalExtent(overlay), PhysicalExtent(base));
        let entry = Entry::Composite(Composite { overlay, top, base, under });
        changes.push(Change::entry(volume, ExtentIndex(extent as u64), entry));
    }
    // A record of each kind that ends a composite entry.
    changes.push(Change::Unmap { volume, extent: ExtentIndex(3) });
    data[3 * EXTENT..4 * EXTENT].fill(0);
    let size = EXTENT + 9 * PAGE;
    changes.push(Change::Resize { volume, size: size as u64 });
    changes.push(Change::Resize { volume, size: data.len() as u64 });
    data[size..].fill(0);
    append(&mut media, &changes);
    world.volumes.get_mut("late").unwrap().data = data;
    place.put(&media);
    place.compare(&world.volumes).unwrap();
    let info = Info::of(&place.run(&["check"]).unwrap());
    assert!(!info.clean && info.log_blocks == 1);
    media.inspect().unwrap();
}

#[test]
fn damage_of_an_under_page_is_refused() {
    let place = Place::new("under", 1);
    let mut world = World::new(EXTENT, &[32 * MIB], None, 5);
    world.create("a", 20 * MIB, 512);
    world.scatter("a", 10);
    let (media, _, made) = composite_pool(&mut world);
    assert!(made > 3);
    place.put(&media);
    place.compare(&world.volumes).unwrap();
    let pages = pages_with(&media, b"BDpg\x04");
    assert!(!pages.is_empty());
    for (device, at) in pages {
        place.flip(device, at + world.random.usize(4..PAGE));
        let error = place.run(&["volumes"]).unwrap_err();
        assert!(error.contains("(kind 4, ") && error.contains("CRC doesn't fit"), "{error}");
        place.put(&media);
    }
}
