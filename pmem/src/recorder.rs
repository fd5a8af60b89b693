//! A memory that logs all stores and fences, and computes its possible states after a loss of power
//! at any moment. No emulator has a cache that could lose a store, so no virtual machine shows a
//! missing fence. Here a store is under way, word by word, until its thread fences: any of its
//! words may have reached the memory and any may not, with the one exception that of two stores to
//! the same word the later one is not overtaken. This allows more than real processors do, and
//! covers all that they do.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::media::{Media, MediaError};

/// Bytes that are stored as a whole.
const WORD: usize = 8;
/// Stores under way, of which every set is tried where there are no more of them.
const EXHAUSTIVE: usize = 8;

#[derive(Clone, Debug)]
enum Event {
    Store { thread: u32, at: u64, bytes: Vec<u8> },
    Fence { thread: u32 },
}

#[derive(Debug)]
struct Log {
    /// The durable content at the beginning.
    first: Vec<u8>,
    events: Vec<Event>,
    /// The content that threads read.
    present: Vec<u8>,
    threads: u32,
}

/// One thread's view of a memory that keeps a log.
#[derive(Debug)]
pub struct Recorder {
    log: Arc<Mutex<Log>>,
    thread: u32,
}

impl Recorder {
    /// A memory with this content, all of it durable.
    #[must_use]
    pub fn new(content: Vec<u8>) -> Self {
        let log = Log { first: content.clone(), events: Vec::new(), present: content, threads: 1 };
        Self { log: Arc::new(Mutex::new(log)), thread: 0 }
    }

    /// The same memory for another thread, whose fences are its own.
    #[must_use]
    pub fn another_thread(&self) -> Self {
        let mut log = self.locked();
        let thread = log.threads;
        log.threads += 1;
        drop(log);
        Self { log: Arc::clone(&self.log), thread }
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How much has been done so far: a moment, for [`Recorder::images`].
    #[must_use]
    pub fn moment(&self) -> usize {
        self.locked().events.len()
    }

    /// Returns the content that threads read now.
    #[must_use]
    pub fn present(&self) -> Vec<u8> {
        self.locked().present.clone()
    }

    /// Returns possible images after a loss of power at a moment: all of them with few stores in
    /// flight, taken as a whole, and otherwise the requested number, drawn by a seed.
    #[must_use]
    pub fn images(&self, moment: usize, drawn: usize, seed: u64) -> Vec<Vec<u8>> {
        let log = self.locked();
        let (durable, pending) = split(&log, moment);
        drop(log);
        let mut images = vec![durable.clone()];
        let mut add = |chosen: &dyn Fn(usize, usize) -> bool| {
            let mut image = durable.clone();
            for (number, store) in pending.iter().enumerate() {
                for (part, range) in words(store.0, store.1.len()).enumerate() {
                    if chosen(number, part) {
                        let from = at(range.start - store.0)..at(range.end - store.0);
                        image[at(range.start)..at(range.end)].copy_from_slice(&store.1[from]);
                    }
                }
            }
            images.push(image);
        };
        if pending.len() <= EXHAUSTIVE {
            for set in 1_u32..1 << pending.len() {
                add(&|number, _| set & (1 << number) != 0);
            }
        } else {
            for number in 0..pending.len() {
                add(&|other, _| other != number);
                add(&|other, _| other == number);
            }
        }
        if pending.is_empty() {
            return images;
        }
        for draw in 0..drawn as u64 {
            // All fates follow from numbers, so that the same seed draws the same image.
            let drawn = mixed(seed ^ mixed(draw));
            add(&|number, part| {
                let store = mixed(drawn ^ mixed(number as u64));
                let words = pending[number].1.len().div_ceil(WORD).max(1) as u64;
                let cut = mixed(store) % words;
                let fate = mixed(store ^ mixed(part as u64 + 1));
                match store % 8 {
                    0 | 1 => false,
                    2 => true,
                    3 => (part as u64) <= cut,
                    4 => (part as u64) > cut,
                    5 => fate.is_multiple_of(2),
                    6 => fate.is_multiple_of(64),
                    _ => !fate.is_multiple_of(64),
                }
            });
        }
        images
    }
}

/// Returns the durable content at a moment, and the stores in flight, in their order.
fn split(log: &Log, moment: usize) -> (Vec<u8>, Vec<(u64, Vec<u8>)>) {
    let mut durable = log.first.clone();
    let mut pending: Vec<(u32, u64, Vec<u8>)> = Vec::new();
    for event in &log.events[..moment.min(log.events.len())] {
        match event {
            Event::Store { thread, at, bytes } => pending.push((*thread, *at, bytes.clone())),
            Event::Fence { thread } => {
                // Of two stores to one word the later counts, whichever thread fences first: the
                // word cannot go back. What an earlier one of another thread left under way is over
                // with it.
                let mut after = BTreeMap::new();
                for (number, (by, start, bytes)) in pending.iter().enumerate() {
                    if by == thread {
                        for range in words(*start, bytes.len()) {
                            after.insert(range.start / WORD as u64, number);
                        }
                    }
                }
                let mut left = Vec::new();
                for (number, (by, start, bytes)) in pending.into_iter().enumerate() {
                    for range in words(start, bytes.len()) {
                        let last = after.get(&(range.start / WORD as u64)).copied();
                        let part = &bytes[at(range.start - start)..at(range.end - start)];
                        if last.is_some_and(|last| number <= last) {
                            durable[at(range.start)..at(range.end)].copy_from_slice(part);
                        } else {
                            left.push((by, range.start, part.to_vec()));
                        }
                    }
                }
                pending = joined(left);
            }
        }
    }
    (durable, pending.into_iter().map(|(_, at, bytes)| (at, bytes)).collect())
}

/// Words that were taken apart and follow each other become one store again.
fn joined(parts: Vec<(u32, u64, Vec<u8>)>) -> Vec<(u32, u64, Vec<u8>)> {
    let mut all: Vec<(u32, u64, Vec<u8>)> = Vec::new();
    for (by, start, bytes) in parts {
        match all.last_mut() {
            Some((last, from, so_far)) if *last == by && *from + so_far.len() as u64 == start => {
                so_far.extend(bytes);
            }
            _ => all.push((by, start, bytes)),
        }
    }
    all
}

/// A range, cut at the borders of words.
fn words(start: u64, len: usize) -> impl Iterator<Item = Range<u64>> {
    let end = start + len as u64;
    let mut at = start;
    std::iter::from_fn(move || {
        let from = at;
        at = end.min((at / WORD as u64 + 1) * WORD as u64);
        (from < end).then_some(from..at)
    })
}

fn at(byte: u64) -> usize {
    usize::try_from(byte).unwrap_or(usize::MAX)
}

/// A number that looks like any other.
const fn mixed(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (value ^ (value >> 31)).wrapping_add(0x9e37_79b9_7f4a_7c15)
}

impl Media for Recorder {
    fn len(&self) -> u64 {
        self.locked().present.len() as u64
    }

    fn read(&self, start: u64, to: &mut [u8]) -> Result<(), MediaError> {
        let log = self.locked();
        let range = inside(&log, start, to.len() as u64)?;
        to.copy_from_slice(&log.present[range]);
        Ok(())
    }

    fn write(&self, start: u64, from: &[u8]) -> Result<(), MediaError> {
        let mut log = self.locked();
        let range = inside(&log, start, from.len() as u64)?;
        log.present[range].copy_from_slice(from);
        let store = Event::Store { thread: self.thread, at: start, bytes: from.to_vec() };
        log.events.push(store);
        Ok(())
    }

    fn zero(&self, start: u64, len: u64) -> Result<(), MediaError> {
        self.write(start, &vec![0; at(len)])
    }

    fn fence(&self) {
        let fence = Event::Fence { thread: self.thread };
        self.locked().events.push(fence);
    }
}

fn inside(log: &Log, start: u64, len: u64) -> Result<Range<usize>, MediaError> {
    let (end, there) = (start.saturating_add(len), log.present.len() as u64);
    if end > there {
        return Err(MediaError::Range { at: start, end, len: there });
    }
    Ok(at(start)..at(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(value: u8) -> [u8; 8] {
        [value; 8]
    }

    #[test]
    fn fenced_stores_are_in_every_image_and_others_in_some() {
        let recorder = Recorder::new(vec![0; 64]);
        recorder.write(0, &word(1)).unwrap();
        recorder.fence();
        recorder.write(8, &word(2)).unwrap();
        recorder.write(16, &word(3)).unwrap();
        let images = recorder.images(recorder.moment(), 0, 1);
        assert!(images.iter().all(|image| image[..8] == word(1)));
        let mut seen: Vec<(u8, u8)> = images.iter().map(|image| (image[8], image[16])).collect();
        seen.sort_unstable();
        assert_eq!(seen, [(0, 0), (0, 3), (2, 0), (2, 3)]);
        // Before the fence nothing was certain.
        assert!(recorder.images(1, 0, 1).iter().any(|image| image[0] == 0));
    }

    #[test]
    fn a_fence_is_for_its_own_thread() {
        let first = Recorder::new(vec![0; 64]);
        let second = first.another_thread();
        first.write(0, &word(1)).unwrap();
        second.write(8, &word(2)).unwrap();
        second.fence();
        let images = first.images(first.moment(), 0, 1);
        assert!(images.iter().all(|image| image[8] == 2));
        assert!(images.iter().any(|image| image[0] == 0));
    }

    #[test]
    fn a_word_never_goes_back() {
        let first = Recorder::new(vec![0; 8]);
        let second = first.another_thread();
        first.write(0, &word(1)).unwrap();
        second.write(0, &word(2)).unwrap();
        second.fence();
        let images = first.images(first.moment(), 8, 1);
        assert!(images.iter().all(|image| *image == word(2)), "{images:?}");
        first.write(0, &word(3)).unwrap();
        let images = first.images(first.moment(), 8, 1);
        assert!(images.iter().any(|image| *image == word(2)));
        assert!(images.iter().any(|image| *image == word(3)));
    }

    #[test]
    fn a_large_store_is_torn_by_words() {
        let recorder = Recorder::new(vec![0; 4096]);
        recorder.write(4, &[9; 4000]).unwrap();
        let images = recorder.images(recorder.moment(), 40, 7);
        let torn = |image: &&Vec<u8>| {
            let new = image[4..4004].iter().filter(|&&byte| byte == 9).count();
            assert!(image[..4] == [0; 4] && image[4004..].iter().all(|&byte| byte == 0));
            assert!(image[8..4000].chunks(8).all(|word| word == [0; 8] || word == [9; 8]));
            new > 0 && new < 4000
        };
        assert!(images.iter().filter(torn).count() >= 10);
    }
}
