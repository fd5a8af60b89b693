//! Pools with composite entries. A restore makes them, from a dump in which an entry was changed:
//! so a test chooses both extents and all bits.

use blockd_inspect::check::Report;
use blockd_inspect::dump::Lost;
use blockd_inspect::repair::RepairOptions;
use blockd_inspect::rmap::{Use, rmap};
use blockd_inspect::thin_xml::thin_xml;
use blockd_inspect::{DumpError, Reader};
use blockd_mapper::entry::{Composite, Entry};
use blockd_mapper::format::checksum::sum;
use blockd_mapper::format::record::Change;
use blockd_mapper::format::superblock::Superblock;
use blockd_mapper::format::wal::{WalBlockBuilder, WalStamp, block_position};
use blockd_mapper::format::{Place, VolumeName};
use blockd_mapper::io::Page;
use blockd_mapper::units::{ExtentIndex, Lsn, PhysicalExtent, VolumeId, WallTime};

use crate::common::{Media, Rig};
use crate::tools::{
    Image, MIB, PAGE, checked, closed, dumped, family, found, repaired, restored, scanned,
};

const EXTENT: u64 = 64 << 10;

/// A pool with one composite entry, in a leaf that a volume, its snapshot and its clone share.
struct Sample {
    media: Media,
    text: String,
    /// The line of the entry.
    line: String,
    overlay: u64,
    base: u64,
    /// Another extent that is in use.
    used: u64,
    /// Another one that is free.
    free: u64,
}

fn sample() -> Sample {
    let mut media = closed(family(&[16 * MIB], 100 << 20));
    let (plain, _) = dumped(&media);
    let numbers =
        |line: &str| -> Vec<u64> { line.split(' ').filter_map(|word| word.parse().ok()).collect() };
    let starting = |word: &'static str| plain.lines().filter(move |line| line.starts_with(word));
    let mut taken = vec![0..1, 255..256];
    for line in ["log ", "reserve "].into_iter().flat_map(starting) {
        let [first, count, ..] = numbers(line)[..] else { unreachable!() };
        taken.push(first..first + count);
    }
    let maps: Vec<_> = starting("map ").collect();
    let mapped = maps.iter().map(|line| {
        let words: Vec<_> = line.split(' ').map(|word| word.parse().unwrap_or(0)).collect();
        words[3]..words[3] + words[2]
    });
    taken.extend(mapped);
    let mut free = (1..255).filter(|extent| !taken.iter().any(|range| range.contains(extent)));
    let (overlay, free) = (free.next().unwrap(), free.next().unwrap());
    let shared = plain.lines().skip_while(|line| !line.starts_with("leaf 2 ")).nth(1).unwrap();
    let words: Vec<_> = shared.split(' ').collect();
    let ["map", "0", "1", base, bits] = words[..] else { panic!("{shared}") };
    let used = maps[0].split(' ').nth(3).unwrap().parse().unwrap();
    let line = format!("over 0 {overlay} 3 {base} {bits}");
    let text = plain.replacen(&format!("\n{shared}\n"), &format!("\n{line}\n"), 1);
    let text = summed(&text.replacen("features 0 0 0", "features 0 0 1", 1));
    restored(&mut media, &text);
    Sample { media, text, line, overlay, base: base.parse().unwrap(), used, free }
}

/// A dump with a last line that fits.
fn summed(text: &str) -> String {
    let body = &text[..text.rfind("end ").unwrap()];
    format!("{body}end {} {:016x}\n", body.lines().count(), sum(body.as_bytes()))
}

fn volumes(text: &str) -> &str {
    &text[text.find("\nvolume ").unwrap()..text.rfind("end ").unwrap()]
}

fn superblock(media: &Media) -> Superblock {
    let place = Place::Memory;
    Superblock::decode(&media.devices[0][..PAGE], place).unwrap()
}

/// The pool as it would be had it stopped behind these changes.
fn with_log(media: &Media, changes: &[Change]) -> Media {
    let mut media = media.clone();
    for (device, at) in found(&media, b"BLOCKDsb") {
        let copy = &mut media.devices[device][at..at + PAGE];
        let read = Superblock::decode(copy, Place::Memory).unwrap();
        let mut page = Page::zeroed();
        Superblock { clean: false, ..read }.encode(&mut page);
        copy.copy_from_slice(&page.0);
    }
    let superblock = superblock(&media);
    let mut builder = WalBlockBuilder::new();
    for (change, lsn) in changes.iter().zip(superblock.checkpoint_lsn.0 + 1..) {
        assert!(builder.push(change, Lsn(lsn)));
    }
    let mut page = Page::zeroed();
    let sequence = superblock.wal_tail_sequence;
    let stamp = WalStamp {
        pool_id: superblock.pool_id,
        epoch: superblock.epoch,
        node: superblock.node,
        sequence,
        previous: superblock.wal_tail_hash,
        begins_commit: true,
    };
    builder.finish(&mut page, &stamp);
    let block = block_position(sequence, superblock.wal_blocks()) * PAGE as u64;
    let at = usize::try_from(superblock.wal_start.0 * EXTENT + block).unwrap();
    media.devices[0][at..at + PAGE].copy_from_slice(&page.0);
    media
}

/// A record of the volume.
fn change(extent: u64, overlay: u64, base: u64) -> Change {
    let (overlay, base) = (PhysicalExtent(overlay), PhysicalExtent(base));
    let entry = Entry::Composite(Composite { overlay, top: 1, base, under: 0x1e });
    Change::entry(VolumeId(1), ExtentIndex(extent), entry)
}

fn texts(report: &Report) -> Vec<String> {
    report.findings.iter().map(|finding| finding.text.clone()).collect()
}

#[test]
fn a_pool_with_composite_entries_is_sound_and_comes_back_from_its_dump() {
    let mut sample = sample();
    let report = checked(&sample.media);
    assert!(report.clean && report.findings.is_empty(), "{report:?}");
    let (text, lost) = dumped(&sample.media);
    assert!(lost.lost.is_empty(), "{lost:?}");
    assert_eq!(volumes(&text), volumes(&sample.text));
    assert!(text.contains(&format!("\n{}\n", sample.line)), "{text}");
    restored(&mut sample.media, &text);
    let again = checked(&sample.media);
    assert!(again.findings.is_empty(), "{again:?}");
    assert_eq!(again.account, report.account);
}

#[test]
fn the_mapper_reads_both_extents_in_all_volumes_that_share_the_entry() {
    let sample = sample();
    let place = |extent: u64| usize::try_from(extent * EXTENT).unwrap();
    let (first, second) = (place(sample.overlay), place(sample.base));
    let end = second + place(1);
    let device = &sample.media.devices[0];
    let expected = [&device[first..first + 2 * PAGE], &device[second + 2 * PAGE..end]].concat();
    let bits = sample.line.rsplit(' ').next().unwrap();
    let valid = u64::from_str_radix(bits, 16).unwrap() | 3;
    let mut rig = Rig::open(sample.media).unwrap();
    for name in ["base", "snap", "copy"] {
        let id = rig.engine.volumes().iter().find(|volume| volume.name == name).unwrap().id;
        let attached = rig.attach(id);
        let data = rig.read(&attached, 32 << 20, place(1));
        for (block, (found, right)) in data.chunks(PAGE).zip(expected.chunks(PAGE)).enumerate() {
            let right = if valid >> block & 1 == 1 { right } else { &[0; PAGE] };
            assert!(found == right, "block {block} of {name}");
        }
        rig.worker.detach(attached);
    }
    rig.check();
}

#[test]
fn both_extents_of_an_entry_have_its_volumes_as_owners() {
    let sample = sample();
    let mut image = Image(&sample.media);
    let mut reader = Reader::open(&mut image, &sample.media.open_options().devices).unwrap();
    for extent in [sample.overlay, sample.base] {
        let report = rmap(&mut reader, 0, &(extent * EXTENT..(extent + 1) * EXTENT)).unwrap();
        let offsets = report.claims.iter().filter_map(|claim| match &claim.usage {
            Use::Data { name, offset, .. } => Some((name.as_str(), *offset)),
            _ => None,
        });
        let at = 2 * 256 * EXTENT;
        let all: Vec<_> = offsets.collect();
        assert_eq!(all, [("base", at), ("snap", at), ("copy", at)]);
    }
}

#[test]
fn dm_thin_has_no_composite_entries() {
    let sample = sample();
    let mut image = Image(&sample.media);
    let mut reader = Reader::open(&mut image, &sample.media.open_options().devices).unwrap();
    let error = thin_xml(&mut reader, &mut |_| Ok(())).unwrap_err().to_string();
    assert!(error.contains("composite entries is 1: must be 0 for dm-thin"), "{error}");
}

#[test]
fn damage_of_a_leaf_or_of_its_under_page_is_found_and_repaired() {
    let sample = sample();
    let kinds = [([4, 0, 1, 0], "under page at page "), ([1, 0, 2, 0], "leaf page at page ")];
    for (kind, name) in kinds {
        let mut pages = found(&sample.media, b"BDpg");
        pages.retain(|&(device, at)| sample.media.devices[device][at + 4..at + 8] == kind);
        let [(device, at)] = pages[..] else { panic!("{} pages of kind {kind:?}", pages.len()) };
        let mut bad = sample.media.clone();
        bad.devices[device][at + 70] ^= 1;
        let report = checked(&bad);
        assert!(report.damaged, "{report:?}");
        let named = |text: &String| text.starts_with(name) && text.contains("checksum is");
        assert!(texts(&report).iter().all(named), "{report:?}");
        let ranges = report.findings.iter().map(|f| (f.name.as_deref(), f.range.clone()));
        let ranges: Vec<_> = ranges.collect();
        let range = Some(32 << 20..48 << 20);
        for volume in ["base", "snap", "copy"] {
            assert!(ranges.contains(&(Some(volume), range.clone())), "{ranges:?}");
        }
        let report = repaired(&mut bad, RepairOptions { strict: true, ..RepairOptions::default() });
        assert!(report.changed && report.lost.len() == 3, "{report:?}");
        assert!(!checked(&bad).damaged);
    }
}

#[test]
fn a_leaf_with_a_damaged_under_page_loses_only_the_lower_part_of_its_composite_entries() {
    let Sample { media: mut bad, overlay, .. } = sample();
    let mut pages = found(&bad, b"BDpg");
    pages.retain(|&(device, at)| bad.devices[device][at + 4..at + 8] == [4, 0, 1, 0]);
    let [(device, at)] = pages[..] else { panic!("{} under pages", pages.len()) };
    bad.devices[device][at + 70] ^= 1;
    let report = repaired(&mut bad, RepairOptions::default());
    let named = |lost: &Lost| lost.text.contains("1 extent(s) lie in two parts");
    assert!(report.salvaged.len() == 3 && report.salvaged.iter().any(named), "{report:?}");
    assert!(!checked(&bad).damaged);
    let (text, _) = dumped(&bad);
    let in_leaf = text.lines().skip_while(|line| !line.starts_with("leaf 2 ")).nth(1).unwrap();
    let words: Vec<_> = in_leaf.split(' ').collect();
    assert_eq!(words[..4], ["map", "0", "1", &overlay.to_string()], "{in_leaf}");
}

/// The lines of a volume's, or snapshot's, own leaf at slot 2.
fn in_slot_2<'a>(text: &'a str, head: &str) -> Vec<&'a str> {
    let of_volume = text.lines().skip_while(|line| !line.starts_with(head));
    let in_leaf = of_volume.skip_while(|line| !line.starts_with("leaf 2 ")).skip(1);
    in_leaf.take_while(|line| line.starts_with("map ") || line.starts_with("over ")).collect()
}

#[test]
fn changes_of_the_log_over_a_damaged_leaf_are_in_all_volumes_that_share_it() {
    let Sample { media, free, .. } = sample();
    let (volume, first) = (VolumeId(1), 2 * 256);
    let mapped = Entry::Mapped { physical: PhysicalExtent(free), valid: 1 };
    let name = Box::new(VolumeName::new("later").unwrap());
    let snapshot = VolumeId(4);
    let mut bad = with_log(
        &media,
        &[
            Change::entry(volume, ExtentIndex(first + 1), mapped),
            Change::Unmap { volume, extent: ExtentIndex(first) },
            Change::Snapshot { volume: snapshot, source: volume, made: WallTime::default(), name },
        ],
    );
    assert_eq!(texts(&checked(&bad)), [""; 0]);
    let mut pages = found(&bad, b"BDpg");
    pages.retain(|&(device, at)| bad.devices[device][at + 4..at + 8] == [4, 0, 1, 0]);
    let [(device, at)] = pages[..] else { panic!("{} under pages", pages.len()) };
    bad.devices[device][at + 70] ^= 1;
    let report = repaired(&mut bad, RepairOptions::default());
    assert!(report.changed && report.salvaged.len() == 4, "{report:?}");
    assert!(!checked(&bad).damaged);
    let (text, _) = dumped(&bad);
    let new = format!("map 1 1 {free} 1");
    assert_eq!(in_slot_2(&text, "volume 1 "), [&new], "{text}");
    assert_eq!(in_slot_2(&text, "snapshot 4 "), [&new], "{text}");
    let [old] = in_slot_2(&text, "snapshot 2 ")[..] else { panic!("{text}") };
    assert!(old.starts_with("map 0 1 "), "{text}");
}

#[test]
fn a_lost_leaf_with_composite_entries_is_found_again_with_its_under_page() {
    let mut sample = sample();
    // Without its parent, the leaf is found by its header alone.
    let index = found(&sample.media, b"BDpg")
        .into_iter()
        .rev()
        .filter(|&(device, at)| sample.media.devices[device][at + 4..at + 6] == [2, 1]);
    for (device, at) in index.collect::<Vec<_>>() {
        sample.media.devices[device][at + 200] ^= 1;
    }
    let report = repaired(&mut sample.media, RepairOptions::default());
    assert!(report.salvaged.iter().any(|lost| lost.range.contains(&(32 << 20))), "{report:?}");
    let report = checked(&sample.media);
    assert!(!report.damaged, "{report:?}");
    let (text, _) = dumped(&sample.media);
    assert!(text.contains(&format!("\n{}\n", sample.line)), "{text}");
}

#[test]
fn the_log_makes_cuts_and_removes_composite_entries() {
    let sample = sample();
    let before = checked(&sample.media).account;
    let made = with_log(&sample.media, &[change(3 * 256 + 9, sample.free, sample.free + 1)]);
    let report = checked(&made);
    assert_eq!((report.log.pending, texts(&report)), (1, Vec::new()));
    assert_eq!(report.account.data, before.data + 2);
    let line = format!("\nover 9 {} 1 {} 1e\n", sample.free, sample.free + 1);
    assert!(dumped(&made).0.contains(&line));
    let volume = VolumeId(1);
    let size = (3 * 256 + 9) * EXTENT + 2 * 4096;
    let grown = Change::Resize { volume, size: 100 << 20 };
    let make = change(3 * 256 + 9, sample.free, sample.free + 1);
    let cut =
        with_log(&sample.media, &[make.clone(), Change::Resize { volume, size }, grown.clone()]);
    assert_eq!(texts(&checked(&cut)), [""; 0]);
    let line = format!("\nover 9 {} 1 {} 2\n", sample.free, sample.free + 1);
    assert!(dumped(&cut).0.contains(&line));
    // A base of which no sub-block is read any more has gone, and may be in use elsewhere.
    let size = (3 * 256 + 9) * EXTENT + 4096;
    let again = change(3 * 256 + 10, sample.free + 2, sample.free + 1);
    let changes = [make, Change::Resize { volume, size }, grown, again];
    let hidden = with_log(&sample.media, &changes);
    assert_eq!(texts(&checked(&hidden)), [""; 0]);
    let extent = ExtentIndex(2 * 256);
    let unmapped = [1, 2, 3].map(|id| Change::Unmap { volume: VolumeId(id), extent });
    let removed = checked(&with_log(&sample.media, &unmapped));
    assert_eq!(removed.account.data, before.data - 2, "{removed:?}");
}

#[test]
fn an_extent_that_is_named_twice_is_damage_in_each_role() {
    let sample = sample();
    let Sample { overlay, base, used, free, .. } = sample;
    for (new_overlay, new_base, twice) in [
        (used, free, used),
        (free, used, used),
        (overlay, free, overlay),
        (free, overlay, overlay),
        (base, free, base),
        (free, base, base),
    ] {
        let media = with_log(&sample.media, &[change(700, new_overlay, new_base)]);
        let report = checked(&media);
        let named = format!("extent {twice} is also that of byte ");
        assert!(report.damaged, "{report:?}");
        assert!(texts(&report).iter().any(|text| text.starts_with(&named)), "{report:?}");
    }
}

/// Writes a page again with a CRC that fits. Returns its sum.
fn seal(media: &mut Media, address: u64) -> u64 {
    let at = usize::try_from(address).unwrap() * PAGE;
    let page = &mut media.devices[0][at..at + PAGE];
    page[8..12].fill(0);
    let crc = crc32c::crc32c(page);
    page[8..12].copy_from_slice(&crc.to_le_bytes());
    sum(page)
}

/// The clone gets a leaf page of its own over the same under page, with sums that fit.
#[test]
fn an_under_page_with_two_parents_is_damage() {
    let mut media = sample().media;
    let mut superblock = superblock(&media);
    let byte = |address: u64| usize::try_from(address).unwrap() * PAGE;
    let word = |media: &Media, at: usize| -> u64 {
        u64::from_le_bytes(media.devices[0][at..at + 8].try_into().unwrap())
    };
    let catalogue = superblock.catalogue_root.address.0;
    // The clone is the third record. Its root is an index page, with slot 2 as its third reference.
    let root_at = byte(catalogue) + 64 + 2 * 256 + 32;
    let root = word(&media, root_at);
    let leaf_at = byte(root) + 64 + 2 * 16;
    let leaf = byte(word(&media, leaf_at));
    // Nothing lies in the last pages of the extent with the catalogue.
    let copy = catalogue / 16 * 16 + 15;
    assert!(!media.devices[0][byte(copy)..].starts_with(b"BDpg"));
    media.devices[0].copy_within(leaf..leaf + PAGE, byte(copy));
    media.devices[0][byte(copy) + 48] ^= 1;
    for (at, address) in [(leaf_at, copy), (root_at, root)] {
        let sum = seal(&mut media, address);
        media.devices[0][at..at + 8].copy_from_slice(&address.to_le_bytes());
        media.devices[0][at + 8..at + 16].copy_from_slice(&sum.to_le_bytes());
    }
    superblock.catalogue_root.sum = seal(&mut media, catalogue);
    let mut page = Page::zeroed();
    superblock.encode(&mut page);
    for (device, at) in found(&media, b"BLOCKDsb") {
        media.devices[device][at..at + PAGE].copy_from_slice(&page.0);
    }
    let report = checked(&media);
    let [text] = &texts(&report)[..] else { panic!("{report:?}") };
    assert!(
        text.starts_with("volume 3: under page ") && text.ends_with("has two parents"),
        "{text}"
    );
    assert!(report.damaged);
}

#[test]
fn a_dump_whose_composite_entry_is_none_is_refused_by_line() {
    let sample = sample();
    let Sample { text, line, overlay, base, used, .. } = &sample;
    let with = |from: &str, to: &str| line.replacen(from, to, 1);
    let [new, old] = [overlay, base].map(u64::to_string);
    for (from, to, message) in [
        (line.as_str(), with(&new, &old).as_str(), "is overlay and base at once"),
        (line, &with(&new, &used.to_string()), "belongs to something else"),
        (line, &with(&old, &used.to_string()), "belongs to something else"),
        (line, &with(&new, "0"), "belongs to something else"),
        (line, &with(" 3 ", " 10000 "), "bits that no sub-block has"),
        (line, &with("over 0", "over 256"), "beyond the leaf"),
        ("features 0 0 1", "features 0 0 0", "composite entries need the feature"),
        ("features 0 0 1", "features 0 0 5", "unknown to this build"),
    ] {
        let error: DumpError = scanned(&summed(&text.replacen(from, to, 1))).unwrap_err();
        let error = error.to_string();
        assert!(error.starts_with("line ") && error.contains(message), "{to}: {error}");
    }
}
