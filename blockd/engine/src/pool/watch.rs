//! Looking for another program's writes to the superblocks of a pool that is served.

use std::path::PathBuf;
use std::time::Duration;

use blockd_mapper::error::MapperError;
use blockd_mapper::format::Place;
use blockd_mapper::format::superblock::Superblock;
use blockd_mapper::io::IoBuffer;
use blockd_mapper::units::DeviceIndex;
use blockd_media::{Device, DeviceKind};

use super::handle::PoolHandle;

/// The copies at the front of a device, in bytes.
const FRONT_COPIES: [u64; 2] = [0, 4096];
/// How often a copy that looks foreign is read again: our own write of it may be under way.
const TRIES: u32 = 20;
/// Between two of them. A write of one page by a busy device ends well within all of them.
const PAUSE: Duration = Duration::from_millis(250);

impl PoolHandle {
    /// Compares the superblocks at the front of each device with what this process has written,
    /// and stops the pool if another program overwrote one. Blocks.
    pub fn check_superblocks(&self) {
        if self.failure().is_some() || self.is_read_only() {
            return;
        }
        for device in self.joined() {
            if let Some((name, problem)) = self.foreign(device) {
                let name = name.display().to_string();
                self.halt(MapperError::Device { name, problem });
                return;
            }
        }
    }

    /// The error of a device's superblocks, if it persists.
    fn foreign(&self, device: &Device) -> Option<(PathBuf, String)> {
        if device.info().kind == DeviceKind::Memory {
            return None;
        }
        let mut found = None;
        for tries in 0..TRIES {
            if tries > 0 {
                std::thread::sleep(PAUSE);
            }
            found = self.foreign_copy(device);
            // A pool that is closed meanwhile writes no more, and its owner may be another.
            if found.is_none() || self.failure().is_some() {
                return None;
            }
        }
        found.map(|problem| (device.info().path.clone(), problem))
    }

    fn foreign_copy(&self, device: &Device) -> Option<String> {
        let mut buffer = IoBuffer::new(1)?;
        // An open makes both copies its own, one after the other: one of them may be older.
        let mut own = 0;
        let mut others = None;
        let mut damaged = 0;
        for offset in FRONT_COPIES {
            let page = buffer.as_bytes_mut();
            // Media that can't be read is reported elsewhere.
            device.read(offset, page).ok()?;
            let place = Place::Device { device: DeviceIndex(0), offset };
            match Superblock::decode(page, place) {
                Ok(copy) if copy.pool_id != self.id() => {
                    return Some(overwritten(offset, "is the superblock of another pool"));
                }
                Ok(copy) if copy.open_id == self.open_id() => own = own.max(copy.generation),
                Ok(copy) => others = others.max(Some((copy.generation, offset))),
                // One copy that rots is what the other copies are for; `pool check` reports it.
                Err(_) if Superblock::has_magic(page) && damaged == 0 => damaged += 1,
                Err(_) => return Some(overwritten(offset, "is no superblock")),
            }
        }
        let (_, offset) = others.filter(|(generation, _)| *generation > own)?;
        Some(overwritten(offset, "is the superblock of another open of this pool"))
    }
}

fn overwritten(offset: u64, found: &str) -> String {
    format!(
        "was overwritten by another program: at byte {offset} {found}; stop that program, then \
         check the pool before opening it again"
    )
}
