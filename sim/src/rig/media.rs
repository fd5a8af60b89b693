//! Devices in memory, and a reader of them.

use blockd_inspect::Reader;
use blockd_mapper::create::{CreateOptions, Creating, NewDevice};
use blockd_mapper::error::MapperError;
use blockd_mapper::io::{IoCommand, IoError, IoOp};
use blockd_mapper::open::{OpenMode, OpenOptions, PresentDevice};
use blockd_mapper::pool::Tuning;
use blockd_mapper::units::DeviceIndex;

use super::{Event, Journal, UNWRITTEN, byte, place};

/// Devices that are read only.
struct Image<'a>(&'a [Vec<u8>]);

impl blockd_inspect::Media for Image<'_> {
    fn read(&mut self, device: DeviceIndex, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        let at = place(offset);
        let from = self.0.get(usize::from(device.0)).and_then(|d| d.get(at..at + bytes.len()));
        bytes.copy_from_slice(from.ok_or(IoError::Gone)?);
        Ok(())
    }
}

/// The devices of a pool, as bytes.
#[derive(Clone, Debug, Default)]
pub struct Media {
    /// One entry for each device.
    pub devices: Vec<Vec<u8>>,
    /// The journal of their operations, if it is recorded.
    pub journal: Option<Journal>,
}

impl Media {
    /// Makes a pool on new devices of these sizes, with a log of this many bytes or the default.
    pub fn create(
        extent_size: u32,
        sizes: &[usize],
        wal_size: Option<u64>,
    ) -> Result<Self, MapperError> {
        Self::create_with(extent_size, sizes, wal_size, false)
    }

    /// The same; `composite`: the first write of a shared extent lays an extent over it.
    pub fn create_with(
        extent_size: u32,
        sizes: &[usize],
        wal_size: Option<u64>,
        composite: bool,
    ) -> Result<Self, MapperError> {
        let devices = sizes.iter().map(|&s| vec![UNWRITTEN; s]).collect();
        let mut media = Self { devices, journal: None };
        let mut creating = Creating::new(&CreateOptions {
            pool_id: [7; 16],
            extent_size,
            devices: (0..sizes.len()).map(|index| media.new_device(index)).collect(),
            wal_size,
            reserve_size: None,
            node: 0,
            composite,
        })?;
        while let Some(mut command) = creating.poll() {
            media.run(&mut command);
            creating.complete(command, Ok(()));
        }
        creating.finish()?;
        Ok(media)
    }

    /// A device as it is described to a pool that doesn't know it.
    #[must_use]
    pub fn new_device(&self, index: usize) -> NewDevice {
        NewDevice {
            name: format!("disk{index}"),
            uuid: [byte(index) + 1; 16],
            size: self.devices[index].len() as u64,
            block_size: 512,
            class: 0,
        }
    }

    /// How the pool is opened unless a test has something else in mind: with no ring.
    #[must_use]
    pub fn options(&self) -> OpenOptions {
        let device = |(index, bytes): (usize, &Vec<u8>)| PresentDevice {
            name: format!("disk{index}"),
            size: bytes.len() as u64,
            block_size: 512,
        };
        OpenOptions {
            devices: self.devices.iter().enumerate().map(device).collect(),
            mode: OpenMode::ReadWrite,
            ring: None,
            boot_id: [9; 16],
            open_id: 0x1234,
            accept_loss: true,
            node: 0,
            tuning: Tuning::default(),
        }
    }

    /// Checks the pool as `blockd pool check` does, without opening it.
    pub fn inspect(&self) -> Result<(), String> {
        let devices = self.options().devices;
        let mut image = Image(&self.devices);
        let report = Reader::open(&mut image, &devices)
            .and_then(|mut reader| blockd_inspect::check::check(&mut reader, &mut |_| Ok(())))
            .map_err(|error| format!("not readable by tools: {error}"))?;
        if report.damaged {
            return Err(format!("damaged: {:?}", report.findings));
        }
        Ok(())
    }

    /// Adds unwritten bytes, at the end of a device or as a new one.
    pub fn extend(&mut self, device: usize, bytes: usize) {
        if device == self.devices.len() {
            self.devices.push(Vec::new());
        }
        let len = self.devices[device].len() + bytes;
        self.devices[device].resize(len, UNWRITTEN);
    }

    pub(super) fn run(&mut self, command: &mut IoCommand) {
        let device = usize::from(command.device.0);
        match &mut command.op {
            IoOp::Fence | IoOp::Discard { .. } => {}
            IoOp::Flush => self.flush(device),
            IoOp::Read { offset, buffer } => {
                let (at, bytes) = (place(*offset), buffer.as_bytes_mut());
                bytes.copy_from_slice(&self.devices[device][at..at + bytes.len()]);
            }
            IoOp::Write { offset, buffer, fua } => {
                self.write(device, place(*offset), buffer.as_bytes(), *fua);
            }
        }
    }

    pub(super) fn write(&mut self, device: usize, at: usize, bytes: &[u8], fua: bool) {
        self.devices[device][at..at + bytes.len()].copy_from_slice(bytes);
        if let Some(journal) = &mut self.journal {
            journal.note(Event::Write { device, at, bytes: bytes.to_vec(), fua });
        }
    }

    pub(super) fn flush(&mut self, device: usize) {
        if let Some(journal) = &mut self.journal {
            journal.note(Event::Flush { device });
        }
    }
}
