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

/// A device as it is described to the mapper.
#[must_use]
pub fn present(device: &Device) -> PresentDevice {
    let info = device.info();
    let name = info.path.display().to_string();
    PresentDevice { name, size: info.size, block_size: info.block_size }
}
