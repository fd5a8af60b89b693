//! Devices that are added ahead of need: to attach a volume, one only has to be started.
//!
//! One that was started is of its volume for good, and is deleted with it: the kernel's page cache
//! of it has that volume's data.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::DeviceError;
use super::device::{Kit, Shape};
use super::mark::Mark;
use super::seat::{COMMAND_LIMIT, DeviceThread, Patience, STACK_BYTES, Seat, keep};

/// How long attachments come first: the kernel adds and starts one device at a time.
const PAUSE: Duration = Duration::from_millis(200);

/// How long the end of the daemon may take for them, and once more for one whose deletion hangs.
/// Each takes milliseconds.
const END_LIMIT: Duration = Duration::from_secs(5);

/// A device that was added and not started.
pub(super) struct Spare {
    pub(super) thread: DeviceThread,
    pub(super) number: u32,
    /// Features that were asked for.
    pub(super) asked: u64,
    pub(super) mark: Mark,
    shape: Shape,
}

/// The stock of ready devices. All have the form of the last attachment that asked for no form of
/// its own: other attachments add their device as they need it.
#[derive(Clone)]
pub(super) struct Stock(Arc<Shared>);

struct Shared {
    kit: Kit,
    /// How many there are to be; 0 for none at all.
    wanted: usize,
    state: Mutex<State>,
    is_filling: AtomicBool,
}

struct State {
    shape: Shape,
    spares: VecDeque<Spare>,
    /// The daemon ends: nothing is added any more.
    has_ended: bool,
}

impl Stock {
    /// An empty one.
    pub(super) fn new(kit: &Kit, wanted: usize) -> Self {
        let shape = Shape { queues: 0, depth: 0, zero_copy: kit.options.zero_copy };
        let state = State { shape, spares: VecDeque::new(), has_ended: false };
        let is_filling = AtomicBool::new(false);
        Self(Arc::new(Shared { kit: kit.clone(), wanted, state: Mutex::new(state), is_filling }))
    }

    /// How many are ready.
    pub(super) fn len(&self) -> usize {
        self.0.state.lock().spares.len()
    }

    /// Whether this is the number of a ready device.
    pub(super) fn has(&self, number: u32) -> bool {
        self.0.state.lock().spares.iter().any(|spare| spare.number == number)
    }

    /// A device of this form, if one is ready.
    pub(super) fn take(&self, shape: Shape) -> Option<Spare> {
        if self.0.wanted == 0 || shape.queues != 0 || shape.depth != 0 {
            return None;
        }
        let mut state = self.0.state.lock();
        state.shape = shape;
        let at = state.spares.iter().position(|spare| spare.shape == shape)?;
        state.spares.remove(at)
    }

    /// Deletes a ready device, to make room where the driver has a limit. True if there was one.
    pub(super) fn give_up_one(&self) -> bool {
        // The caller waits: a driver that hangs is not asked again for each of them.
        let patience = Patience::new(COMMAND_LIMIT);
        while !patience.is_over() {
            let Some(spare) = self.0.state.lock().spares.pop_front() else { return false };
            if self.0.delete(spare, COMMAND_LIMIT) {
                return true;
            }
        }
        false
    }

    /// Adds what is missing, on a thread of its own.
    pub(super) fn fill(&self) {
        if self.0.wanted == 0 || self.0.is_filling.swap(true, Ordering::AcqRel) {
            return;
        }
        let shared = Arc::clone(&self.0);
        let thread = std::thread::Builder::new().name("ublk-ready".to_owned());
        let started = thread.stack_size(STACK_BYTES).spawn(move || shared.fill());
        if let Err(error) = started {
            self.0.is_filling.store(false, Ordering::Release);
            tracing::warn!(%error, "no block devices are added ahead of need");
        }
    }

    /// Deletes all of them for good, within twice [`END_LIMIT`]. The next start of the daemon
    /// deletes those that are left.
    pub(super) fn end(&self) {
        let spares = {
            let mut state = self.0.state.lock();
            state.has_ended = true;
            std::mem::take(&mut state.spares)
        };
        let patience = Patience::new(END_LIMIT);
        for spare in spares {
            if patience.is_over() {
                tracing::warn!("block devices that were ready are left to the next start");
                return;
            }
            self.0.delete(spare, END_LIMIT);
        }
    }
}

impl Shared {
    fn fill(&self) {
        loop {
            std::thread::sleep(PAUSE);
            let filled = self.add_all();
            self.is_filling.store(false, Ordering::Release);
            if let Err(error) = filled {
                // The next attachment has it tried again.
                tracing::warn!(%error, "a block device is not added ahead of need");
                return;
            }
            // One may have been taken after the last look and before that.
            if !self.is_short() || self.is_filling.swap(true, Ordering::AcqRel) {
                return;
            }
        }
    }

    fn is_short(&self) -> bool {
        let state = self.state.lock();
        let of_shape = state.spares.iter().filter(|spare| spare.shape == state.shape).count();
        !state.has_ended && of_shape < self.wanted && self.has_room()
    }

    /// Whether the driver's limit allows one more, and another one that no volume waits for.
    fn has_room(&self) -> bool {
        let driver = &self.kit.driver;
        let count = driver.numbers().len() as u64;
        driver.is_there() && driver.limit().is_none_or(|most| count.saturating_add(1) < most)
    }

    /// Adds what is missing, and deletes devices of a form that is not wanted any more.
    fn add_all(&self) -> Result<(), DeviceError> {
        while let Some(spare) = self.stale() {
            self.delete(spare, COMMAND_LIMIT);
        }
        while self.is_short() {
            let shape = self.state.lock().shape;
            let added = self.add(shape)?;
            let mut state = self.state.lock();
            if state.has_ended {
                drop(state);
                self.delete(added, COMMAND_LIMIT);
                break;
            }
            state.spares.push_back(added);
        }
        Ok(())
    }

    fn stale(&self) -> Option<Spare> {
        let mut state = self.state.lock();
        let shape = state.shape;
        let at = state.spares.iter().position(|spare| spare.shape != shape)?;
        state.spares.remove(at)
    }

    fn add(&self, shape: Shape) -> Result<Spare, DeviceError> {
        let thread = DeviceThread::start()?;
        let (kit, undoing) = (self.kit.clone(), self.kit.clone());
        // Unlike a number, it is not used again: a record of another device of the same number is
        // not taken for one of this.
        let mark = Mark { owner: kit.options.owner, volume: fastrand::u16(..) };
        let work = move |seat: &mut Seat| {
            let asked = kit.add_unstarted(seat, shape, None, mark)?;
            Ok((asked, seat.number().ok_or(DeviceError::NotServed)?))
        };
        let undo = move |seat: &mut Seat, _: (u64, u32)| {
            if let Err(error) = undoing.take_down(seat, false) {
                tracing::warn!(%error, "cannot remove a stale block device");
            }
        };
        let (asked, number) = thread.run(COMMAND_LIMIT, work, undo)?;
        Ok(Spare { thread, number, asked, mark, shape })
    }

    /// True if it is gone.
    fn delete(&self, spare: Spare, limit: Duration) -> bool {
        let kit = self.kit.clone();
        let work = move |seat: &mut Seat| {
            let is_ours = Kit::is_still_spare(seat, spare.mark)?;
            if is_ours {
                kit.take_down(seat, false)?;
            }
            Ok(is_ours)
        };
        spare.thread.run(limit, work, keep).unwrap_or_else(|error| {
            tracing::warn!(%error, "a block device that was ready stays");
            false
        })
    }
}
