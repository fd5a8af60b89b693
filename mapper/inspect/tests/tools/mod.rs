//! Tools that work on a pool's media, and a pool for them.
#![allow(dead_code, clippy::unwrap_used, reason = "shared by test files; a failure fails the test")]

use blockd_inspect::check::{Report, check};
use blockd_inspect::dump::{DumpReport, dump};
use blockd_inspect::repair::{RepairOptions, RepairReport, repair};
use blockd_inspect::restore::Scan;
use blockd_inspect::{DumpError, Reader};
use blockd_mapper::engine::{Control, Outcome};
use blockd_mapper::io::IoError;
use blockd_mapper::units::{DeviceIndex, VolumeId};

use crate::common::{Media, Rig};

pub(crate) const MIB: usize = 1 << 20;
pub(crate) const PAGE: usize = 4096;

/// Media that can't be written, and count their reads.
pub(crate) struct Image<'a>(pub(crate) &'a Media);

impl blockd_inspect::Media for Image<'_> {
    fn read(&mut self, device: DeviceIndex, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        let at = usize::try_from(offset).unwrap();
        let from = self.0.devices[usize::from(device.0)].get(at..at + bytes.len());
        bytes.copy_from_slice(from.ok_or(IoError::Media)?);
        Ok(())
    }
}

pub(crate) fn checked(media: &Media) -> Report {
    let mut image = Image(media);
    let mut reader = Reader::open(&mut image, &media.open_options().devices).unwrap();
    check(&mut reader, &mut |_| Ok(())).unwrap()
}

/// Media that a tool writes.
pub(crate) struct Target<'a>(pub(crate) &'a mut Media);

impl blockd_inspect::Media for Target<'_> {
    fn read(&mut self, device: DeviceIndex, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        Image(self.0).read(device, offset, bytes)
    }
}

impl blockd_inspect::MediaMut for Target<'_> {
    fn write(&mut self, device: DeviceIndex, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
        let at = usize::try_from(offset).unwrap();
        self.0.devices[usize::from(device.0)][at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn flush(&mut self, _: DeviceIndex) -> Result<(), IoError> {
        self.0.flushes += 1;
        Ok(())
    }
}

pub(crate) fn dumped(media: &Media) -> (String, DumpReport) {
    let mut image = Image(media);
    let mut reader = Reader::open(&mut image, &media.open_options().devices).unwrap();
    let mut text = String::new();
    let mut put = |piece: &str| {
        text.push_str(piece);
        Ok(())
    };
    let report = dump(&mut reader, &mut put, &mut |_| {});
    (text, report.unwrap())
}

pub(crate) fn scanned(text: &str) -> Result<blockd_inspect::restore::Plan, DumpError> {
    let mut scan = Scan::new();
    let _ = text.lines().all(|line| scan.line(line));
    scan.finish()
}

pub(crate) fn restored(media: &mut Media, text: &str) {
    let plan = scanned(text).unwrap();
    let devices = media.open_options().devices;
    let mut target = Target(media);
    let found = plan.target(&mut target, &devices).unwrap();
    let mut restoring = plan.begin(&mut target, found).unwrap();
    for line in text.lines() {
        restoring.line(line).unwrap();
    }
    restoring.finish().unwrap();
}

/// The span of a leaf, and the part of it that tests write.
pub(crate) const SPAN: u64 = 16 << 20;
pub(crate) const WRITTEN: u64 = 2 << 20;

/// Names, kinds, sizes, and the bytes of all volumes where anything is ever written.
pub(crate) fn contents(media: Media) -> Vec<(String, u64, Vec<u8>)> {
    let mut rig = Rig::open(media).unwrap();
    rig.check();
    let mut all = Vec::new();
    for volume in rig.engine.volumes() {
        let attached = rig.attach(volume.id);
        let mut data = Vec::new();
        for slot in 0..volume.size.div_ceil(SPAN).min(7) {
            let len = (volume.size - slot * SPAN).min(WRITTEN);
            data.extend(rig.read(&attached, slot * SPAN, usize::try_from(len).unwrap()));
        }
        all.push((format!("{} {:?}", volume.name, volume.kind), volume.size, data));
        rig.worker.detach(attached);
    }
    all
}

pub(crate) fn made(rig: &mut Rig, control: Control) -> VolumeId {
    match rig.control(control).unwrap() {
        Outcome::Created(id) => id,
        other => panic!("{other:?}"),
    }
}

/// A volume with leaves at several slots, a snapshot, a clone, and changes of each.
pub(crate) fn family(sizes: &[usize], size: u64) -> Rig {
    let mut rig = Rig::new(sizes);
    let base = rig.create("base", size);
    let span = 16 << 20;
    let attached = rig.attach(base);
    for slot in 0..(size / span).min(6) {
        rig.write(&attached, slot * span + 8192, &[1; 3 * PAGE]).unwrap();
    }
    rig.control(Control::Checkpoint).unwrap();
    let snapshot = made(&mut rig, Control::Snapshot { source: base, name: "snap".to_owned() });
    rig.write(&attached, 4096, &[2; PAGE]).unwrap();
    let source = snapshot;
    let copy = made(&mut rig, Control::Clone { source, name: "copy".to_owned(), size: None });
    let clone = rig.attach(copy);
    rig.write(&clone, span + 65536, &[3; PAGE]).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    rig.write(&attached, 70_000 & !4095, &[4; PAGE]).unwrap();
    rig.write(&clone, 100 * 4096, &[5; PAGE]).unwrap();
    rig.flush(&attached).unwrap();
    for extent in 20..23 {
        rig.write(&attached, extent << 16, &[6; PAGE]).unwrap();
        rig.flush(&attached).unwrap();
    }
    rig.worker.detach(attached);
    rig.worker.detach(clone);
    rig
}

pub(crate) fn closed(mut rig: Rig) -> Media {
    rig.control(Control::Close).unwrap();
    rig.kill()
}

/// Blocks that begin with these bytes.
pub(crate) fn found(media: &Media, magic: &[u8]) -> Vec<(usize, usize)> {
    let mut spots = Vec::new();
    for (device, bytes) in media.devices.iter().enumerate() {
        let starts = (0..bytes.len()).step_by(PAGE);
        spots.extend(starts.filter(|&at| bytes[at..].starts_with(magic)).map(|at| (device, at)));
    }
    spots
}

pub(crate) fn repaired(media: &mut Media, options: RepairOptions) -> RepairReport {
    let devices = media.open_options().devices;
    repair(&mut Target(media), &devices, options, &mut |_| {}).unwrap()
}

/// Media that fail after a number of writes.
pub(crate) struct Cut<'a> {
    pub(crate) media: &'a mut Media,
    pub(crate) left: u64,
}

impl blockd_inspect::Media for Cut<'_> {
    fn read(&mut self, device: DeviceIndex, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        Image(self.media).read(device, offset, bytes)
    }
}

impl blockd_inspect::MediaMut for Cut<'_> {
    fn write(&mut self, device: DeviceIndex, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
        self.left = self.left.checked_sub(1).ok_or(IoError::Gone)?;
        Target(self.media).write(device, offset, bytes)
    }

    fn flush(&mut self, device: DeviceIndex) -> Result<(), IoError> {
        Target(self.media).flush(device)
    }
}

/// Media of which one page can't be read any more once anything was written.
pub(crate) struct Fading<'a> {
    pub(crate) media: &'a mut Media,
    pub(crate) spot: (usize, usize),
    pub(crate) has_faded: bool,
}

impl blockd_inspect::Media for Fading<'_> {
    fn read(&mut self, device: DeviceIndex, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        let at = usize::try_from(offset).unwrap();
        let (faded, page) = self.spot;
        let has_page = usize::from(device.0) == faded && (at..at + bytes.len()).contains(&page);
        if self.has_faded && has_page {
            return Err(IoError::Media);
        }
        Image(self.media).read(device, offset, bytes)
    }
}

impl blockd_inspect::MediaMut for Fading<'_> {
    fn write(&mut self, device: DeviceIndex, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
        self.has_faded = true;
        Target(self.media).write(device, offset, bytes)
    }

    fn flush(&mut self, device: DeviceIndex) -> Result<(), IoError> {
        Target(self.media).flush(device)
    }
}
