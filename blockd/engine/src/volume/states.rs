//! The states of a request in the executor, and how long each of them lasts.

use blockd_mapper::plan::{OpKind, ParkReason, Plan};

use super::executor::Executor;
use super::slot::{Slot, State};
use crate::block::Operation;
use crate::stats::Stage;

impl Executor {
    /// Changes a request's state, and counts how long the old state has lasted.
    #[inline]
    pub(super) fn enter_state(&mut self, at: usize, state: State) {
        let slot = &mut self.slots[at];
        if slot.state == state {
            return;
        }
        if (slot.state, state) == (State::Ready, State::Idle) {
            // Neither is counted.
            slot.state = state;
            return;
        }
        self.change_state(at, state);
    }

    #[inline(never)]
    fn change_state(&mut self, at: usize, state: State) {
        if self.slots[at].state.is_wait() || state.is_wait() {
            self.note_wait(at, state);
        }
        match self.slots[at].state {
            State::Media => self.count_media(at),
            State::Parked | State::Starved => self.count_wait(at),
            State::Committing => {
                let slot = &self.slots[at];
                if let Some(attached) = &self.volumes[slot.volume] {
                    let ns = self.now.saturating_sub(slot.since);
                    attached.stats.stage(Stage::Commit).record(ns);
                }
            }
            State::Idle | State::Ready => {}
        }
        let slot = &mut self.slots[at];
        if let Some(attached) = self.volumes[slot.volume].as_ref().filter(|_| state.is_wait()) {
            attached.stats.parked.add(1);
        }
        slot.since = self.now;
        slot.state = state;
        if state == State::Media {
            self.mark_media(at);
        }
    }

    /// A planned request goes to the media: [`Self::change_state`] without the cases that cannot
    /// occur.
    pub(super) fn begin_media(&mut self, at: usize) {
        let slot = &mut self.slots[at];
        if slot.state != State::Ready {
            self.change_state(at, State::Media);
            return;
        }
        slot.since = self.now;
        slot.state = State::Media;
        self.mark_media(at);
    }

    /// The media has ended a request's operations: [`Self::change_state`] without the cases that
    /// cannot occur.
    pub(super) fn end_media(&mut self, at: usize) {
        self.count_media(at);
        let slot = &mut self.slots[at];
        slot.since = self.now;
        slot.state = State::Ready;
    }

    /// Shows for how long a request has been on the media. Its operations are not counted with
    /// their device: that takes half a percent of the instructions of a request.
    fn mark_media(&self, at: usize) {
        let slot = &self.slots[at];
        let Some(attached) = &self.volumes[slot.volume] else { return };
        let seen = &self.pools[attached.pool].seen;
        if let Some(device) = only_device(&slot.plan) {
            seen.begin(at, device, self.now);
        }
    }

    fn count_media(&mut self, at: usize) {
        let slot = &self.slots[at];
        let Some(attached) = &self.volumes[slot.volume] else { return };
        let ns = self.now.saturating_sub(slot.since);
        attached.stats.stage(Stage::Media).record(ns);
        self.pools[attached.pool].seen.end(at, self.now);
        if self.scheduler.observes_media()
            && let (Some(flow), Some(write)) = (slot.flow, is_transfer(slot))
        {
            self.scheduler.observe_media(flow, write, ns);
        }
    }

    /// Adds a part of a request's wait, which a try may interrupt.
    fn count_wait(&mut self, at: usize) {
        let slot = &mut self.slots[at];
        let Some(attached) = &self.volumes[slot.volume] else { return };
        let (stats, ns) = (&attached.stats, self.now.saturating_sub(slot.since));
        slot.waited_ns = Some(slot.waited_ns.unwrap_or(0).saturating_add(ns));
        stats.parked.set(stats.parked.get().saturating_sub(1));
        if slot.reason == ParkReason::Slowed {
            stats.slowed_ns.add(ns);
        }
    }
}

/// Whether a request that is read or written in one go is a write; `None` for others.
fn is_transfer(slot: &Slot) -> Option<bool> {
    let is_short = slot.plan.ops().len() == 1;
    match slot.request.as_ref().filter(|_| is_short)?.operation {
        Operation::Read => Some(false),
        Operation::Write { fua: false } => Some(true),
        _ => None,
    }
}

/// The device that a plan is about, if that is one alone.
fn only_device(plan: &Plan) -> Option<u8> {
    let mut found = None;
    for op in plan.ops().iter().filter(|op| op.kind != OpKind::ReadZeroes) {
        match found {
            Some(device) if device != op.device.0 => return None,
            _ => found = Some(op.device.0),
        }
    }
    found
}
