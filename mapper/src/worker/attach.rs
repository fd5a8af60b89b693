//! A worker's hold on a volume.

use std::cell::{Ref, RefCell};
use std::sync::Arc;

use super::Worker;
use crate::directory::Directory;
use crate::error::MapperError;
use crate::format::catalogue::VolumeKind;
use crate::pool::Pool;
use crate::space::VolumeSettings;
use crate::units::VolumeId;
use crate::volume::{AttachmentShared, Volume};

/// A worker's attachment to a volume: the volume, a counter of its own, a slice of extents.
#[derive(Debug)]
pub struct Attachment {
    pub(crate) volume: Arc<Volume>,
    pub(crate) shared: Arc<AttachmentShared>,
    /// The directory as of a version of the volume's shape: asking the volume for it each time
    /// would cost a locked instruction.
    directory: RefCell<(u64, Arc<Directory>)>,
}

impl Attachment {
    /// Which volume it is.
    #[must_use]
    pub fn id(&self) -> VolumeId {
        self.volume.identity.id
    }

    /// Bytes of the volume at present.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.volume.size.load(crate::sync::Ordering::Acquire)
    }

    /// Logical block of the volume in bytes.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        self.volume.identity.block_size
    }

    /// Whether a write has found no extent, and none is on its way: the pool is full, or the
    /// volume's quota is used up. Requests parked for lack of space wait for an administrator or a
    /// deletion.
    #[must_use]
    pub fn is_out_of_space(&self) -> bool {
        self.volume.out_of_space.load(crate::sync::Ordering::Acquire)
    }

    /// Notes a write that waits for an extent and is not tried again, since one before it waits
    /// still: the next grant has one for it too. `events` are those of the pool.
    pub fn note_miss(&self, events: u64) {
        self.volume.misses.note(events);
    }

    /// Resets the full state after the waiting requests were refused. The next request checks
    /// again.
    pub fn ask_again(&self) {
        self.volume.out_of_space.store(false, crate::sync::Ordering::Release);
    }

    /// Rises after each change of [`Self::settings`].
    #[must_use]
    #[inline]
    pub fn settings_version(&self) -> u64 {
        self.volume.settings_version.load(crate::sync::Ordering::Acquire)
    }

    /// Returns the settings of the volume.
    #[must_use]
    pub fn settings(&self) -> VolumeSettings {
        *self.volume.settings.lock()
    }

    /// The volume's directory. Within a request's IO epoch: a swap waits for the epoch, so the
    /// directory found here stays valid.
    #[inline]
    pub(crate) fn directory(&self) -> Ref<'_, Directory> {
        let version = self.volume.shape.load(crate::sync::Ordering::Acquire);
        if self.directory.borrow().0 != version {
            *self.directory.borrow_mut() = (version, self.volume.directory.load_full());
        }
        Ref::map(self.directory.borrow(), |cached| &*cached.1)
    }

    pub(crate) fn check_writable(&self, pool: &Pool) -> Result<(), MapperError> {
        if pool.read_only || self.volume.identity.kind == VolumeKind::Snapshot {
            return Err(MapperError::ReadOnly);
        }
        Ok(())
    }
}

impl Worker {
    /// Makes a volume servable by this worker.
    pub fn attach(&mut self, volume: VolumeId) -> Result<Attachment, MapperError> {
        self.pool.check_alive()?;
        let volume = self.pool.volume(volume)?;
        let shared = Arc::new(AttachmentShared::default());
        volume.attachments.lock().push(Arc::clone(&shared));
        let shape = volume.shape.load(crate::sync::Ordering::Acquire);
        let directory = RefCell::new((shape, volume.directory.load_full()));
        Ok(Attachment { volume, shared, directory })
    }

    /// Ends [`Self::attach`]. No request of the attachment may be in flight. Extents it still
    /// held go back to the pool, or to the volume's reserve if extents of that are kept.
    pub fn detach(&mut self, attachment: Attachment) {
        let take = || attachment.shared.slice.lock().pop();
        while let Some(extent) = take() {
            if !attachment.volume.put_back(extent) {
                self.pool.free_space.lock().free(extent, 1);
            }
        }
        let mut all = attachment.volume.attachments.lock();
        all.retain(|other| !Arc::ptr_eq(other, &attachment.shared));
    }
}
