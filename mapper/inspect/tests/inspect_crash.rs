//! Tools that write, with power lost at any of their writes, and the result of a dump after one
//! that was repaired.
#![allow(clippy::unwrap_used, reason = "test code")]

#[path = "../../tests/common/mod.rs"]
mod common;
mod tools;

use std::collections::BTreeSet;

use blockd_inspect::MediaMut;
use blockd_inspect::repair::{RepairOptions, repair};
use blockd_mapper::io::IoError;
use blockd_mapper::units::DeviceIndex;
use common::Media;
use tools::{
    Image, MIB, PAGE, Target, checked, closed, contents, dumped, family, found, repaired, restored,
    scanned,
};

/// Media that lose power: after a number of writes nothing is done any more, and a random part of
/// the unflushed data is lost, in units of sectors.
struct Losing<'a> {
    media: &'a mut Media,
    left: u64,
    unflushed: Vec<(usize, usize, Vec<u8>)>,
}

impl<'a> Losing<'a> {
    fn new(media: &'a mut Media, left: u64) -> Self {
        Self { media, left, unflushed: Vec::new() }
    }

    /// Puts the former content of a part back.
    fn lose(mut self, seed: u64) {
        let mut random = fastrand::Rng::with_seed(seed);
        while let Some((device, at, before)) = self.unflushed.pop() {
            for (sector, bytes) in before.chunks(512).enumerate() {
                if random.bool() {
                    let at = at + sector * 512;
                    self.media.devices[device][at..at + 512].copy_from_slice(bytes);
                }
            }
        }
    }
}

impl blockd_inspect::Media for Losing<'_> {
    fn read(&mut self, device: DeviceIndex, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        blockd_inspect::Media::read(&mut Image(self.media), device, offset, bytes)
    }
}

impl MediaMut for Losing<'_> {
    fn write(&mut self, device: DeviceIndex, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
        self.left = self.left.checked_sub(1).ok_or(IoError::Gone)?;
        let mut before = vec![0; bytes.len()];
        blockd_inspect::Media::read(&mut Image(self.media), device, offset, &mut before).unwrap();
        let at = usize::try_from(offset).unwrap();
        self.unflushed.push((usize::from(device.0), at, before));
        Target(self.media).write(device, offset, bytes)
    }

    fn flush(&mut self, device: DeviceIndex) -> Result<(), IoError> {
        self.unflushed.retain(|write| write.0 != usize::from(device.0));
        Target(self.media).flush(device)
    }
}

/// One page of each kind and level that is in use, and one block of the log.
fn one_of_each(media: &Media) -> Vec<(usize, usize)> {
    let (mut kinds, mut spots) = (BTreeSet::new(), Vec::new());
    for magic in [&b"BDpg"[..], b"BDwl"] {
        for spot in found(media, magic) {
            let page = &media.devices[spot.0][spot.1..];
            let kind = (magic[2], if magic == b"BDpg" { (page[4], page[5]) } else { (0, 0) });
            if !kinds.contains(&kind) && checked(&broken(media, spot)).damaged {
                kinds.insert(kind);
                spots.push(spot);
            }
        }
    }
    spots
}

fn broken(media: &Media, spot: (usize, usize)) -> Media {
    let mut bad = media.clone();
    bad.devices[spot.0][spot.1 + 90] ^= 1;
    bad
}

/// A closed pool with trees of one level, and one with trees of two and a log.
fn pools() -> [Media; 2] {
    let sizes = [12 * MIB, 8 * MIB];
    [closed(family(&sizes, 100 << 20)), family(&sizes, 66 << 30).kill()]
}

#[test]
fn a_repair_that_lost_power_is_done_again_with_the_same_end() {
    let (mut kinds, mut cuts) = (0, 0);
    for media in pools() {
        for spot in one_of_each(&media) {
            kinds += 1;
            let bad = broken(&media, spot);
            let mut whole = bad.clone();
            repaired(&mut whole, RepairOptions::default());
            let expected = contents(whole);
            for writes in 0.. {
                let mut cut = bad.clone();
                let devices = cut.open_options().devices;
                let mut target = Losing::new(&mut cut, writes);
                let options = RepairOptions::default();
                let done = repair(&mut target, &devices, options, &mut |_| {}).is_ok();
                target.lose(writes);
                // Damaged as before, or repaired; never a third.
                repaired(&mut cut, RepairOptions::default());
                assert!(checked(&cut).findings.is_empty(), "{spot:?} after {writes} writes");
                assert!(contents(cut) == expected, "{spot:?} after {writes} writes");
                cuts += 1;
                if done {
                    break;
                }
            }
        }
    }
    assert!(kinds >= 8 && cuts > 10 * kinds, "{kinds} kinds of damage, {cuts} cuts");
}

fn restore(text: &str, media: &mut Losing<'_>) -> bool {
    let plan = scanned(text).unwrap();
    let devices = media.media.open_options().devices;
    let Ok(target) = plan.target(media, &devices) else { return false };
    let Ok(mut restoring) = plan.begin(media, target) else { return false };
    text.lines().all(|line| restoring.line(line).is_ok()) && restoring.finish().is_ok()
}

#[test]
fn a_restore_that_lost_power_is_done_again_with_the_same_end() {
    for media in pools() {
        let (text, _) = dumped(&media);
        let expected = contents(media.clone());
        let mut bad = media.clone();
        for (device, at) in found(&bad, b"BDpg") {
            bad.devices[device][at..at + PAGE].fill(0x5A);
        }
        for writes in 0.. {
            let mut cut = bad.clone();
            let mut target = Losing::new(&mut cut, writes);
            let done = restore(&text, &mut target);
            target.lose(writes);
            if done {
                assert!(contents(cut) == expected, "the whole of it");
                assert!(writes > 10, "{writes}");
                break;
            }
            restored(&mut cut, &text);
            assert!(checked(&cut).findings.is_empty(), "after {writes} writes");
            assert!(contents(cut) == expected, "after {writes} writes");
        }
    }
}

/// As where the file is written anew meanwhile, or is a pipe, which has nothing the second time.
#[test]
fn a_dump_that_is_another_the_second_time_is_not_restored() {
    let media = pools().into_iter().next().unwrap();
    let (text, _) = dumped(&media);
    let devices = media.open_options().devices;
    let expected = contents(media.clone());
    let count = text.lines().count();
    for lines in [0, 1, count / 2, count - 2] {
        let mut media = media.clone();
        let mut target = Losing::new(&mut media, u64::MAX);
        let plan = scanned(&text).unwrap();
        let found = plan.target(&mut target, &devices).unwrap();
        let mut restoring = plan.begin(&mut target, found).unwrap();
        text.lines().take(lines).for_each(|line| restoring.line(line).unwrap());
        restoring.finish().unwrap_err();
        assert!(contents(media) == expected, "after {lines} of {count} lines");
    }
}

/// A repair uses all sound pages that it finds, and writes from the end of the pool on: while there
/// is room, a dump from before the damage brings everything back also afterwards.
#[test]
fn an_earlier_dump_restores_ranges_that_a_repair_lost() {
    let mut kinds = 0;
    for media in pools() {
        let (text, _) = dumped(&media);
        let expected = contents(media.clone());
        for spot in one_of_each(&media) {
            for strict in [false, true] {
                let mut bad = broken(&media, spot);
                repaired(&mut bad, RepairOptions { strict, ..RepairOptions::default() });
                let after = dumped(&bad);
                assert!(after.1.lost.is_empty(), "{spot:?}: {:?}", after.1);
                // A repaired pool survives dump and restore unchanged.
                let left = contents(bad.clone());
                let mut again = bad.clone();
                restored(&mut again, &after.0);
                assert!(checked(&again).findings.is_empty() && contents(again) == left);
                restored(&mut bad, &text);
                assert!(checked(&bad).findings.is_empty(), "{spot:?}");
                assert!(contents(bad) == expected, "{spot:?}, strict {strict}");
                kinds += 1;
            }
        }
    }
    assert!(kinds >= 16, "{kinds}");
}
