//! Requests of one kind and length at random places, a number of them in flight.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::ring::{Ended, Ring, SLOT_BYTES, SlotOp};

/// The kind of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pattern {
    /// Writes, otherwise reads.
    pub write: bool,
    /// Bytes of a request: a multiple of 4 KiB.
    pub bytes: usize,
    /// Requests in flight.
    pub depth: usize,
    /// Bytes from the start of the volume that are used: a multiple of `bytes`.
    pub span: u64,
    /// The order of the places.
    pub order: Order,
}

/// The order in which places of a volume are used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// At random, from this seed on.
    Random(u64),
    /// One after the other, from the start on again behind the last.
    Sequential,
    /// From this place on, each this number of bytes behind the one before.
    Strided(u64, u64),
}

/// An event of a request, which is identified by its slot among those in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// The request is about to be made; the answer says whether it is.
    Start(usize),
    /// Its reply is there.
    End(usize),
}

impl Pattern {
    /// The offsets of the requests, without end.
    pub fn offsets(&self) -> impl Iterator<Item = u64> + use<> {
        let (stride, mut next) = match self.order {
            Order::Random(_) | Order::Sequential => (self.bytes as u64, 0),
            Order::Strided(first, stride) => (stride, first),
        };
        let places = (self.span / stride).max(1);
        let mut random = match self.order {
            Order::Random(seed) => Some(fastrand::Rng::with_seed(seed)),
            _ => None,
        };
        std::iter::from_fn(move || {
            let place = random.as_mut().map_or(next % places, |random| random.u64(..places));
            next += 1;
            Some(place * stride)
        })
    }

    /// The pattern that writes everything once, and how many requests that takes.
    #[must_use]
    pub fn filling(span: u64) -> (Self, u64) {
        const BYTES: usize = 128 << 10;
        let pattern = Self { write: true, bytes: BYTES, depth: 4, span, order: Order::Sequential };
        (pattern, span / BYTES as u64)
    }
}

/// Answers [`Event`]s so that a fixed number of requests is made.
pub fn exactly(requests: u64) -> impl FnMut(Event) -> bool {
    let mut started = 0;
    move |event| {
        if matches!(event, Event::End(_)) {
            return true;
        }
        started += 1;
        started <= requests
    }
}

/// A block device, past the page cache.
#[derive(Debug)]
pub struct Device {
    ring: Ring,
}

impl Device {
    /// Opens it for one pattern's depth and length.
    ///
    /// # Errors
    /// When it can't be opened, or a ring can't be had.
    pub fn open(path: &Path, pattern: &Pattern) -> Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_DIRECT);
        let file = options.open(path).with_context(|| format!("open {}", path.display()))?;
        let ring = Ring::with_slots_of(file, pattern.depth, pattern.bytes / SLOT_BYTES as usize)?;
        Ok(Self { ring })
    }

    /// Keeps `pattern.depth` requests in flight until `event` says that there were enough, and
    /// waits for those that are left.
    ///
    /// # Errors
    /// When a request fails.
    pub fn run(&mut self, pattern: &Pattern, mut event: impl FnMut(Event) -> bool) -> Result<()> {
        let mut offsets = pattern.offsets();
        let mut free: Vec<usize> = (0..pattern.depth).rev().collect();
        let mut going = true;
        loop {
            while going && let Some(slot) = free.pop() {
                going = event(Event::Start(slot));
                if !going {
                    free.push(slot);
                    break;
                }
                let offset = offsets.next().context("the offsets never end")?;
                let op =
                    if pattern.write { SlotOp::Write { offset } } else { SlotOp::Read { offset } };
                self.ring.start(slot, op)?;
            }
            if free.len() == pattern.depth {
                return Ok(());
            }
            self.ring.submit(1)?;
            while let Some(ended) = self.ring.reap() {
                let Ended::Slot(slot, result) = ended else { bail!("no command was given") };
                result.context("a request failed")?;
                free.push(slot);
                event(Event::End(slot));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_stay_in_the_span() {
        let pattern =
            Pattern { write: false, bytes: 8192, depth: 1, span: 65536, order: Order::Random(1) };
        assert!(pattern.offsets().take(1000).all(|at| at % 8192 == 0 && at + 8192 <= 65536));
        let offsets = |order, count| -> Vec<u64> {
            Pattern { order, ..pattern }.offsets().take(count).collect()
        };
        let in_order = offsets(Order::Sequential, 9);
        assert_eq!(in_order, [0, 8192, 16384, 24576, 32768, 40960, 49152, 57344, 0]);
        assert_eq!(offsets(Order::Strided(1, 16384), 4), [16384, 32768, 49152, 0]);
    }

    #[test]
    fn filling_reaches_the_end() {
        let (pattern, requests) = Pattern::filling(1 << 20);
        let last = pattern.offsets().take(usize::try_from(requests).unwrap()).last().unwrap();
        assert_eq!(last + pattern.bytes as u64, 1 << 20);
    }

    #[test]
    fn a_device_gets_exactly_the_requests() {
        let path = std::env::temp_dir().join(format!("blockd-load-{}", std::process::id()));
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let pattern =
            Pattern { write: true, bytes: 8192, depth: 4, span: 1 << 20, order: Order::Random(1) };
        let mut ended = 0;
        let mut enough = exactly(37);
        let done = Device::open(&path, &pattern).and_then(|mut device| {
            device.run(&pattern, |event| {
                ended += u32::from(matches!(event, Event::End(_)));
                enough(event)
            })
        });
        std::fs::remove_file(&path).unwrap();
        done.unwrap();
        assert_eq!(ended, 37);
    }
}
