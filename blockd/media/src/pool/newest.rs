//! The newest superblock of a device, before its pool is open.

use blockd_inspect::{Media, newest_copy};
use blockd_mapper::format::superblock::Superblock;
use blockd_mapper::io::{IoBuffer, IoError};
use blockd_mapper::open::PresentDevice;
use blockd_mapper::units::DeviceIndex;

use crate::{Device, io_error};

/// A device by itself, and a page with the alignment that it requires.
struct Alone<'a>(&'a Device, IoBuffer);

impl Media for Alone<'_> {
    fn read(&mut self, _: DeviceIndex, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        let page = self.1.as_bytes_mut().get_mut(..bytes.len()).ok_or(IoError::Media)?;
        self.0.read(offset, page).map_err(|error| io_error(&error))?;
        bytes.copy_from_slice(page);
        Ok(())
    }
}

/// The newest superblock of a device that can be read.
#[must_use]
pub fn superblock(device: &Device) -> Option<Superblock> {
    newest_copy(&mut Alone(device, IoBuffer::new(1)?), DeviceIndex(0), &present(device))
}

/// Returns the newest superblock of the pool that the first device names, as the mapper finds it. A
/// device of another pool is refused there; before that, nothing of its pool's is touched.
#[must_use]
pub fn newest_of_pool(copies: impl Iterator<Item = Superblock>) -> Option<Superblock> {
    copies.reduce(|newest, copy| {
        let is_newer = copy.pool_id == newest.pool_id && copy.generation > newest.generation;
        if is_newer { copy } else { newest }
    })
}

/// A device as it is described to the mapper.
#[must_use]
pub fn present(device: &Device) -> PresentDevice {
    let info = device.info();
    let name = info.path.display().to_string();
    PresentDevice { name, size: info.size, block_size: info.block_size }
}

#[cfg(test)]
mod tests {
    use blockd_mapper::create::{CreateOptions, Creating, NewDevice};
    use blockd_mapper::format::Place;
    use blockd_mapper::io::IoOp;

    use super::*;

    fn superblock(pool_id: u8, generation: u64) -> Superblock {
        let (uuid, size) = ([pool_id; 16], 16 << 20);
        let device = NewDevice { name: "disk".into(), uuid, size, block_size: 512, class: 0 };
        let mut creating = Creating::new(&CreateOptions {
            pool_id: [pool_id; 16],
            extent_size: 64 << 10,
            devices: vec![device],
            wal_size: None,
            reserve_size: None,
            node: 0,
            composite: false,
        })
        .unwrap();
        let mut found = None;
        while let Some(command) = creating.poll() {
            if let IoOp::Write { buffer, .. } = &command.op {
                let page = buffer.as_bytes().get(..4096).unwrap();
                found = found.or_else(|| Superblock::decode(page, Place::Memory).ok());
            }
            creating.complete(command, Ok(()));
        }
        Superblock { generation, ..found.unwrap() }
    }

    #[test]
    fn a_newer_superblock_of_another_pool_does_not_count() {
        let copies = [superblock(1, 4), superblock(2, 9), superblock(1, 5), superblock(1, 4)];
        let newest = newest_of_pool(copies.into_iter()).unwrap();
        assert_eq!((newest.pool_id, newest.generation), ([1; 16], 5));
        assert!(newest_of_pool(std::iter::empty()).is_none());
    }
}
