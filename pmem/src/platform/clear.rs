//! Overwriting namespaces with zeroes.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use super::Platform;
use super::error::PlatformError;
use super::namespace::{Device, DeviceClass, Namespace};
use crate::media::{Mapping, MappingOptions, Media, MediaError};

/// Where file systems, partition tables, RAIDs and pools have their signatures: at the front (btrfs
/// has it at 64 KiB, a pool of ours within 2 MiB) and at the end.
pub const MARKED_BYTES: u64 = 8 << 20;

/// Zeroes for files that can't be zeroed otherwise.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// A block device that is being overwritten. It cannot be mounted meanwhile.
#[derive(Debug)]
pub struct Zeroing {
    file: File,
    length: u64,
    at: u64,
}

impl Zeroing {
    /// Bytes that are done.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.at
    }

    /// Bytes in all.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Overwrites up to `bytes` more bytes, durably. Returns true when all is done.
    ///
    /// # Errors
    /// When the device can't be written.
    pub fn go_on(&mut self, bytes: u64) -> io::Result<bool> {
        let end = self.length.min(self.at.saturating_add(bytes));
        if end > self.at {
            zero(&self.file, self.at, end - self.at)?;
            self.file.sync_data()?;
            self.at = end;
        }
        Ok(self.at == self.length)
    }
}

/// The kernel writes zeroes past its cache, where it knows how; cached pages are dropped.
fn zero(file: &File, at: u64, length: u64) -> io::Result<()> {
    for how in [FallocateFlags::ZERO_RANGE, FallocateFlags::PUNCH_HOLE] {
        match fallocate(file, how | FallocateFlags::KEEP_SIZE, at, length) {
            Ok(()) => return Ok(()),
            Err(Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let mut done = 0;
    while done < length {
        let part = usize::try_from(length - done).unwrap_or(usize::MAX).min(ZEROES.len());
        file.write_all_at(&ZEROES[..part], at + done)?;
        done += part as u64;
    }
    Ok(())
}

impl Platform {
    /// Begins to overwrite a namespace that is a block device, from `at` on.
    ///
    /// # Errors
    /// When it is in use, or has no block device.
    pub fn zeroing(&self, namespace: &Namespace, at: u64) -> Result<Zeroing, PlatformError> {
        let device = namespace.device.as_ref().filter(|one| one.class == DeviceClass::Block);
        let Some(device) = device else {
            let problem = "has no block device to be overwritten".to_owned();
            return Err(PlatformError::InUse { what: namespace.to_string(), problem });
        };
        let path = self.device_path(device);
        let failed = |what, source: io::Error| match source.kind() {
            io::ErrorKind::ResourceBusy => PlatformError::InUse {
                what: namespace.to_string(),
                problem: "is in use: claimed by the kernel".to_owned(),
            },
            _ => PlatformError::Device { what, path: path.clone(), source },
        };
        let mut file =
            self.kernel.open_exclusive(&path).map_err(|error| failed("opening", error))?;
        self.check_is_still(namespace, device, &file)?;
        let length = file.seek(SeekFrom::End(0)).map_err(|error| failed("measuring", error))?;
        Ok(Zeroing { file, length, at: at.min(length) })
    }

    /// The device that was opened is that of the namespace: names and numbers are assigned again.
    fn check_is_still(
        &self,
        namespace: &Namespace,
        device: &Device,
        file: &File,
    ) -> Result<(), PlatformError> {
        let path = self.device_path(device);
        let data = file.metadata();
        let data = data.map_err(|source| PlatformError::Device {
            what: "reading the metadata of",
            path,
            source,
        })?;
        let numbers = (rustix::fs::major(data.rdev()), rustix::fs::minor(data.rdev()));
        let is_node = !data.file_type().is_block_device() || numbers == device.numbers;
        let inventory = self.read()?;
        let is_it = |one: &Namespace| {
            (one.uuid, one.mode, one.size) == (namespace.uuid, namespace.mode, namespace.size)
                && one.name == namespace.name
                && one.region == namespace.region
        };
        let has_it = |one: &Namespace| {
            one.device
                .as_ref()
                .is_some_and(|own| (&own.name, own.numbers) == (&device.name, device.numbers))
        };
        if is_node && inventory.namespaces().any(|(_, one)| is_it(one) && has_it(one)) {
            return Ok(());
        }
        let problem = format!("has another device than {} now", device.name);
        Err(PlatformError::InUse { what: namespace.to_string(), problem })
    }

    /// Whether a namespace with a block device has nothing where file systems and the like have
    /// their marks.
    ///
    /// # Errors
    /// When it is in use, or can't be read.
    pub fn is_clear(&self, namespace: &Namespace) -> Result<bool, PlatformError> {
        let zeroing = self.zeroing(namespace, 0)?;
        let failed = |source| PlatformError::Device {
            what: "reading",
            path: self.places.dev.clone(),
            source,
        };
        let tail = zeroing.length.saturating_sub(MARKED_BYTES);
        let mut page = vec![0; 64 << 10];
        for start in [0, tail] {
            let end = zeroing.length.min(start + MARKED_BYTES);
            let mut at = start;
            while at < end {
                let part = usize::try_from(end - at).unwrap_or(usize::MAX).min(page.len());
                zeroing.file.read_exact_at(&mut page[..part], at).map_err(failed)?;
                if page[..part].iter().any(|byte| *byte != 0) {
                    return Ok(false);
                }
                at += part as u64;
            }
        }
        Ok(true)
    }

    /// Clears old signatures of a namespace.
    pub(super) fn clear_marks(&self, namespace: &Namespace) -> Result<(), PlatformError> {
        let Some(device) = &namespace.device else { return Ok(()) };
        let path = self.device_path(device);
        let failed =
            |source| PlatformError::Device { what: "clearing", path: path.clone(), source };
        if device.class == DeviceClass::Character {
            return self.clear_mapped(&path).map_err(|error| failed(io::Error::other(error)));
        }
        let mut zeroing = self.zeroing(namespace, 0)?;
        let tail = zeroing.length.saturating_sub(MARKED_BYTES);
        zeroing.go_on(MARKED_BYTES).map_err(failed)?;
        zeroing.at = zeroing.at.max(tail);
        zeroing.go_on(MARKED_BYTES).map_err(failed)?;
        Ok(())
    }

    /// A character device is not written but mapped.
    fn clear_mapped(&self, path: &Path) -> Result<(), MediaError> {
        let options =
            MappingOptions { sysfs: self.places.sys.clone(), ..MappingOptions::default() };
        let mapping = Mapping::open(path, &options)?;
        let length = mapping.len();
        let marked = MARKED_BYTES.min(length);
        mapping.zero(0, marked)?;
        mapping.zero(length - marked, marked)?;
        mapping.fence();
        mapping.sync()
    }
}
