//! Devices that are opened for a pool that is open: looked at, locked, and made known to the rings
//! before the pool may take them in.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use blockd_mapper::error::MapperError;
use blockd_media::pool::storage::Disk;
use blockd_media::pool::{PoolError, holds_pool, storage};
use blockd_media::{Device, DeviceSpec};
use futures_channel::oneshot;

use super::devices::new_device;
use super::handle::{Ask, PoolHandle};
use super::lock::lock;
use crate::stats::LATER_DEVICES;

/// An open device of a pool.
#[derive(Debug)]
pub(super) struct OpenDevice {
    device: Arc<Device>,
    /// Set when it was opened to join the pool, and could not.
    is_refused: AtomicBool,
}

impl OpenDevice {
    fn new(device: &Arc<Device>) -> Self {
        Self { device: Arc::clone(device), is_refused: AtomicBool::new(false) }
    }

    pub(super) const fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn is_refused(&self) -> bool {
        self.is_refused.load(Ordering::Acquire)
    }
}

/// The open devices of a pool, by the numbers that the mapper and the rings know them by: none is
/// ever taken out, so a number stays.
#[derive(Debug)]
pub(super) struct OpenDevices(Box<[OnceLock<OpenDevice>]>);

impl OpenDevices {
    /// The devices that are open with the pool, and places for later ones.
    pub(super) fn new<'a>(devices: impl Iterator<Item = &'a Arc<Device>>) -> Self {
        let open = devices.map(|device| OnceLock::from(OpenDevice::new(device)));
        let later = std::iter::repeat_with(OnceLock::new).take(LATER_DEVICES);
        Self(open.chain(later).collect())
    }

    pub(super) fn get(&self, number: usize) -> Option<&OpenDevice> {
        self.0.get(number)?.get()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &OpenDevice> {
        self.0.iter().map_while(OnceLock::get)
    }

    /// Adds a device behind the others. Returns its number; `None` where no place is left.
    fn add(&self, device: &Arc<Device>) -> Option<u8> {
        let at = self.0.iter().position(|one| one.set(OpenDevice::new(device)).is_ok())?;
        u8::try_from(at).ok()
    }
}

impl PoolHandle {
    /// Opens and locks a device that is to join the pool, after which no other process makes
    /// anything on it that follows the rules. Blocks.
    ///
    /// # Errors
    /// If it can't be opened, another process has it, it holds a pool, or this open of the pool
    /// could not use it.
    pub fn open_later(
        &self,
        spec: &DeviceSpec,
        lock_wait: Duration,
    ) -> Result<Arc<Device>, PoolError> {
        let device = Device::open(spec).map_err(PoolError::io("open", &spec.path))?;
        self.refuse_unfit(&device)?;
        lock(&device, lock_wait)?;
        let checked = match holds_pool(spec) {
            Ok(true) => Err(PoolError::Exists { path: spec.path.clone() }),
            Ok(false) if !device.is_at(&spec.path) => {
                let gone = std::io::Error::from(std::io::ErrorKind::NotFound);
                Err(PoolError::io("open", &spec.path)(gone))
            }
            other => other.map(drop),
        };
        checked.inspect_err(|_| device.unlock())?;
        // Before a ring knows it.
        self.gate().into_iter().for_each(|gate| device.set_gate(gate));
        Ok(Arc::new(device))
    }

    fn gate(&self) -> Option<&Arc<blockd_media::Gate>> {
        self.shared.devices().find_map(|device| device.gate())
    }

    /// Refuses a device unless all that was decided when the pool was opened holds for it, too.
    fn refuse_unfit(&self, device: &Device) -> Result<(), PoolError> {
        let all = |is_so: &dyn Fn(&Arc<Device>) -> bool| self.shared.devices().all(is_so);
        let allowed = if self.shared.devices().any(|one| one.pmem().is_some()) {
            "left out: a pool in persistent memory lies in one region"
        } else if self.gate().is_none() && blockd_media::pool::ownership::is_shared(device) {
            "a file on a local file system, as the pool's devices are: a disk or a file on a \
             network file system needs a claim, which this pool has not"
        } else if device.memory().is_some() && all(&|one| one.memory().is_none()) {
            "a file or disk outside of memory, as the pool's devices are"
        } else if !device.ends_its_writes() && all(&|one| one.ends_its_writes()) {
            "a file or disk that takes IO past the page cache, as the pool's devices do"
        } else {
            // The pool's thread asks again; here a refused device takes no place among the open.
            self.shared.pool.check_new_device(0, &new_device(device))?;
            return Ok(());
        };
        let value = device.info().path.display().to_string();
        Err(PoolError::Invalid { field: "path", value, allowed: allowed.to_owned() })
    }

    /// Gives a device that [`Self::open_later`] has opened the next number, and makes it known to
    /// the pool's thread. Workers have to know it as well before the pool takes it in.
    ///
    /// # Errors
    /// If as many were opened already as there are places, or the pool does not serve. The device
    /// is unlocked then.
    pub async fn take_up(&self, device: &Arc<Device>) -> Result<u8, PoolError> {
        let Some(number) = self.shared.devices.add(device) else {
            device.unlock();
            let what = "devices added since the pool was opened (close and open it to add more)";
            return Err(MapperError::Limit { what, limit: LATER_DEVICES as u64 }.into());
        };
        let (send, receive) = oneshot::channel();
        let asked = self.ask(Ask::TakeUp(send));
        let taken = match asked {
            Ok(()) => receive.await.unwrap_or_else(|_| Err(std::io::ErrorKind::BrokenPipe.into())),
            Err(error) => {
                self.refuse(number);
                return Err(error);
            }
        };
        taken.map_err(|error| {
            self.refuse(number);
            PoolError::io("register", &device.info().path)(error)
        })?;
        Ok(number)
    }

    /// Remembers the disk of a device that is about to join the pool with this identity: after a
    /// crash the delta ring is refused if the disk was restarted meanwhile. Blocks.
    ///
    /// # Errors
    /// If the file beside the ring can't be written. The device must not join then.
    pub fn remember_disk(&self, uuid: [u8; 16], device: &Device) -> Result<(), PoolError> {
        let ring = self.shared.ring_file.as_deref();
        let Some((ring, sequence)) = ring.zip(device.disk_sequence()) else { return Ok(()) };
        let disk = Disk { uuid, sequence, path: device.info().path.clone() };
        storage::remember_later(ring, self.open_id(), &disk)
    }

    /// Gives a device up that has not joined the pool and is not to.
    pub fn refuse(&self, number: u8) {
        if let Some(one) = self.shared.devices.get(usize::from(number)) {
            one.is_refused.store(true, Ordering::Release);
            one.device.unlock();
        }
    }
}
