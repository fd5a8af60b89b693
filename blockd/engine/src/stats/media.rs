//! One thread's statistics of a pool's devices: which IO failed, how long it took, and since when
//! the oldest is in flight.

use std::sync::OnceLock;

use blockd_media::clock::Clock;

use super::{Counter, Histogram};

/// Devices that may be opened for a pool after the pool itself: as many as a pool has places.
pub const LATER_DEVICES: usize = 16;

/// Kinds of IO, as failures are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MediaOp {
    /// Reads.
    Read,
    /// Writes, of zeroes too.
    Write,
    /// Flushes.
    Flush,
}

impl MediaOp {
    /// All of them, in the order of their counters.
    pub const ALL: [Self; 3] = [Self::Read, Self::Write, Self::Flush];

    /// Its name in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
        }
    }
}

/// One thread's statistics of one device.
#[derive(Debug, Default)]
pub struct DeviceStats {
    /// IO that failed, by [`MediaOp`]; lack of space is not counted.
    pub errors: [Counter; 3],
    /// The last errno of the operating system; 0 before the first.
    pub last_errno: Counter,
    /// How long IO took that was about this device alone.
    pub latency: Histogram,
    /// Operations that were sent, by [`MediaOp`].
    pub sent: [Counter; 3],
    /// Bytes that they move; flushes and zeroes move none.
    pub bytes: [Counter; 3],
}

/// Which device an IO is about: the lowest byte of its mark, less one. The rest is since when, so
/// that times are rounded down by 256 ns.
const DEVICE_MASK: u64 = 0xff;

/// One thread's statistics of the devices of one pool. Only its thread writes them, others read.
#[derive(Debug)]
pub struct MediaStats {
    /// Of the thread: times of others mean nothing beside its own.
    clock: Clock,
    devices: Box<[DeviceStats]>,
    /// Of devices that came later.
    later: [OnceLock<Box<DeviceStats>>; LATER_DEVICES],
    /// The IOs in flight, by the thread's place for them; 0 for none.
    marks: Box<[Counter]>,
}

impl MediaStats {
    /// Statistics of `devices` devices, with at most `places` IOs in flight.
    #[must_use]
    pub fn new(devices: usize, places: usize, clock: Clock) -> Self {
        Self {
            clock,
            devices: (0..devices).map(|_| DeviceStats::default()).collect(),
            later: std::array::from_fn(|_| OnceLock::new()),
            marks: (0..places).map(|_| Counter::default()).collect(),
        }
    }

    /// Statistics of one more device, behind the others.
    pub fn add_device(&self) {
        let _ = self.later.iter().find(|one| one.set(Box::default()).is_ok());
    }

    /// An IO begins on a device.
    pub fn begin(&self, place: usize, device: u8, now: u64) {
        if let Some(mark) = self.marks.get(place) {
            let device = u64::from(device).saturating_add(1).min(DEVICE_MASK);
            mark.set((now & !DEVICE_MASK) | device);
        }
    }

    /// The IO of this place has ended, if there was one.
    pub fn end(&self, place: usize, now: u64) {
        let Some(mark) = self.marks.get(place) else { return };
        let (begun, device) = (mark.get() & !DEVICE_MASK, mark.get() & DEVICE_MASK);
        if device == 0 {
            return;
        }
        mark.set(0);
        let device = usize::try_from(device - 1).unwrap_or(usize::MAX);
        if let Some(stats) = self.device(device) {
            stats.latency.record(now.saturating_sub(begun));
        }
    }

    /// An operation is sent to a device.
    #[inline]
    pub fn sent(&self, device: u8, op: MediaOp, bytes: u64) {
        if let Some(stats) = self.device(usize::from(device)) {
            stats.sent[op as usize].add(1);
            stats.bytes[op as usize].add(bytes);
        }
    }

    /// An IO has failed.
    pub fn failed(&self, device: u8, op: MediaOp, errno: i32) {
        if let Some(stats) = self.device(usize::from(device)) {
            stats.errors[op as usize].add(1);
            stats.last_errno.set(u64::try_from(errno).unwrap_or(0));
        }
    }

    /// The statistics of a device.
    #[must_use]
    #[inline]
    pub fn device(&self, device: usize) -> Option<&DeviceStats> {
        self.devices.get(device).or_else(|| self.later(device))
    }

    #[cold]
    fn later(&self, device: usize) -> Option<&DeviceStats> {
        Some(&**self.later.get(device.checked_sub(self.devices.len())?)?.get()?)
    }

    /// IOs of a device that are in flight. Reads every place.
    #[must_use]
    pub fn in_flight(&self, device: usize) -> u64 {
        let wanted = (device as u64).saturating_add(1);
        let mine = self.marks.iter().filter(|mark| mark.get() & DEVICE_MASK == wanted);
        mine.count() as u64
    }

    /// For how many nanoseconds the oldest IO of a device has been under way; 0 without any. Looks
    /// at every place.
    #[must_use]
    pub fn oldest_ns(&self, device: usize) -> u64 {
        let wanted = (device as u64).saturating_add(1);
        let marks = self.marks.iter().map(Counter::get);
        let mine = marks.filter(|mark| mark & DEVICE_MASK == wanted);
        let begun = mine.map(|mark| mark & !DEVICE_MASK).min();
        begun.map_or(0, |begun| self.clock.ns().saturating_sub(begun))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_io_of_each_device_is_known_until_it_ends() {
        let stats = MediaStats::new(2, 4, Clock::start());
        assert_eq!(stats.oldest_ns(1), 0);
        stats.begin(0, 1, 0);
        stats.begin(3, 1, 1 << 40);
        while stats.oldest_ns(1) == 0 {
            std::thread::yield_now();
        }
        assert_eq!(stats.oldest_ns(0), 0);
        assert_eq!([0, 1, 2].map(|device| stats.in_flight(device)), [0, 2, 0]);
        stats.end(0, 5000);
        // An IO that began later than now, by this thread's clock, is not old.
        assert_eq!(stats.oldest_ns(1), 0);
        stats.end(3, (1 << 40) + 300);
        stats.end(3, 1 << 50);
        let latency = &stats.device(1).unwrap().latency;
        assert_eq!((latency.count(), latency.sum_ns()), (2, 5300));
    }

    #[test]
    fn operations_and_their_bytes_are_counted_by_device_and_kind() {
        let stats = MediaStats::new(2, 1, Clock::start());
        stats.sent(1, MediaOp::Read, 4096);
        stats.sent(1, MediaOp::Read, 512);
        stats.sent(1, MediaOp::Flush, 0);
        stats.sent(9, MediaOp::Write, 512);
        let device = stats.device(1).unwrap();
        assert_eq!(device.sent.each_ref().map(Counter::get), [2, 0, 1]);
        assert_eq!(device.bytes.each_ref().map(Counter::get), [4608, 0, 0]);
        assert_eq!(stats.device(0).unwrap().sent[0].get(), 0);
    }

    #[test]
    fn a_device_that_comes_later_is_counted_from_then_on() {
        let stats = MediaStats::new(1, 1, Clock::start());
        stats.sent(1, MediaOp::Read, 512);
        assert!(stats.device(1).is_none());
        stats.add_device();
        stats.sent(1, MediaOp::Read, 4096);
        assert_eq!(stats.device(1).unwrap().bytes.each_ref().map(Counter::get), [4096, 0, 0]);
        assert!(stats.device(2).is_none());
    }

    #[test]
    fn failures_are_counted_by_device_and_kind() {
        let stats = MediaStats::new(1, 1, Clock::start());
        stats.failed(0, MediaOp::Flush, 5);
        stats.failed(9, MediaOp::Read, 5);
        let device = stats.device(0).unwrap();
        assert_eq!(device.errors.each_ref().map(Counter::get), [0, 0, 1]);
        assert_eq!(device.last_errno.get(), 5);
    }
}
