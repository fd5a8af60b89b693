//! The journal of a rig's devices, in order.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockd_mapper::ring::RingMemory;

/// An event of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// Bytes were written.
    Write {
        /// The device.
        device: usize,
        /// The first byte.
        at: usize,
        /// The written bytes.
        bytes: Vec<u8>,
        /// Durable as soon as it is there.
        fua: bool,
    },
    /// Everything written to the device is durable.
    Flush {
        /// The device.
        device: usize,
    },
}

/// The operations of the devices, in order.
#[derive(Clone, Debug, Default)]
pub struct Journal {
    /// One after the other.
    pub events: Vec<Event>,
    /// The ring to be watched.
    pub ring: Option<Arc<dyn RingMemory>>,
    /// Its words at the moment of each event, before its end was reported.
    pub images: Vec<Vec<u64>>,
}

impl Journal {
    pub(super) fn note(&mut self, event: Event) {
        self.events.push(event);
        self.images.extend(self.ring.as_ref().map(|ring| image(&**ring)));
    }
}

/// The words of a ring.
#[must_use]
pub fn image(ring: &dyn RingMemory) -> Vec<u64> {
    ring.words().iter().map(|word| word.load(Ordering::SeqCst)).collect()
}
