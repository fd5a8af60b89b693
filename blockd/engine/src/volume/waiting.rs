//! Requests that wait for space, or for a pool that is slowed down: in which order they go on, and
//! what ends the waiting.

use blockd_mapper::plan::ParkReason;
use blockd_mapper::space::OnFull;

use super::executor::{Attached, Executor};
use super::slot::State;
use crate::backing::Ring;
use crate::block::BlockError;

/// How often what waits is looked at, to say for how long it has.
const LOOK_NS: u64 = 1_000_000_000;

/// How long a write waits for extents that were dropped since the mapper has looked. The mapper has
/// a limit of its own, and others may drop something all the time.
const DROPS_NS: u64 = 2_000_000_000;

impl Attached {
    /// Takes over what is set for the volume now.
    pub(super) fn read_settings(&mut self) {
        self.settings_version = self.attachment.settings_version();
        self.settings = self.attachment.settings();
        self.share.limiter.set(self.settings.iops, self.settings.bandwidth);
    }

    /// Takes over what was set since. Gives whether something was.
    pub(super) fn follow_settings(&mut self) -> bool {
        let changed = self.settings_version != self.attachment.settings_version();
        if changed {
            self.read_settings();
        }
        changed
    }

    /// Whether the volume has limits.
    pub(super) const fn has_limits(&self) -> bool {
        self.settings.iops != 0 || self.settings.bandwidth != 0
    }
}

impl Executor {
    /// A new request doesn't overtake those of its pool that could go on by now.
    pub(super) fn retry_first(&mut self, at: usize, ring: &mut Ring) {
        let Some(attached) = &self.volumes[self.slots[at].volume] else { return };
        let pool = attached.pool;
        let part = &mut self.pools[pool];
        if part.parked.is_empty() {
            return;
        }
        let events = part.handle.mapper().events();
        if events != part.events {
            part.events = events;
            self.retry_parked(pool, ring);
        }
    }

    /// Retries parked requests, in order. Once a request is refused space, or throttled, later
    /// requests of its volume with the same demand are skipped: they must not overtake it.
    pub(super) fn retry_parked(&mut self, pool: usize, ring: &mut Ring) {
        self.pools[pool].patience = None;
        let wants = |reason| matches!(reason, ParkReason::Space | ParkReason::Slowed);
        // A volume or two at the most lack space at a time on one worker, so a list is enough.
        let mut refused = std::mem::take(&mut self.refused);
        for _ in 0..self.pools[pool].parked.len() {
            let Some(at) = self.pools[pool].parked.pop_front() else { break };
            let (volume, reason) = (self.slots[at].volume, self.slots[at].reason);
            let hurries =
                self.slots[at].hurries_at().is_some_and(|hurries_at| hurries_at <= self.now);
            if wants(reason) && !hurries && refused.contains(&volume) {
                self.pools[pool].parked.push_back(at);
                self.note_patience(at);
                self.note_miss(at);
                continue;
            }
            self.enter_state(at, State::Ready);
            self.advance(at, ring);
            let slot = &self.slots[at];
            if slot.state == State::Parked && wants(slot.reason) && slot.volume == volume {
                refused.push(volume);
            }
        }
        refused.clear();
        self.refused = refused;
    }

    /// The next grant is to have an extent for a request that is not tried.
    fn note_miss(&self, at: usize) {
        let slot = &self.slots[at];
        if slot.reason == ParkReason::Space
            && let Some(attached) = &self.volumes[slot.volume]
        {
            let events = self.pools[attached.pool].handle.mapper().events();
            attached.attachment.note_miss(events);
        }
    }

    fn note_patience(&mut self, at: usize) {
        let Some(until) = self.slots[at].hurries_at() else { return };
        let Some(attached) = &self.volumes[self.slots[at].volume] else { return };
        if until <= self.now {
            // It has been tried.
            return;
        }
        let patience = &mut self.pools[attached.pool].patience;
        *patience = Some(patience.map_or(until, |at| at.min(until)));
    }

    /// Ends the waiting of those that are not to wait for space, or not any longer.
    pub(super) fn end_waits(&mut self) {
        if self.waits_looked_at == self.looks_wanted() {
            return;
        }
        self.waits_looked_at = self.looks_wanted();
        self.found_waiting = false;
        for attached in self.volumes.iter_mut().flatten() {
            if attached.follow_settings() {
                self.scheduler.set_limited(attached.tenant, attached.has_limits());
            }
            if attached.stats.blocked.get() > 0 {
                attached.stats.blocked.set(0);
                attached.stats.blocked_ns.set(0);
            }
        }
        for pool in 0..self.pools.len() {
            for _ in 0..self.pools[pool].parked.len() {
                let Some(at) = self.pools[pool].parked.pop_front() else { break };
                if self.is_to_fail(at) {
                    self.refuse(at);
                    continue;
                }
                self.pools[pool].parked.push_back(at);
            }
        }
        for _ in 0..self.starved.len() {
            let Some(at) = self.starved.pop_front() else { break };
            if self.is_to_fail(at) {
                self.refuse(at);
                continue;
            }
            self.starved.push_back(at);
        }
        // Only now: all that were to fail by what was known have.
        while let Some(volume) = self.refused.pop() {
            let Some(attached) = &self.volumes[volume] else { continue };
            attached.attachment.ask_again();
            let handle = &self.pools[attached.pool].handle;
            handle.mapper().look_again();
            handle.pass_on();
        }
    }

    /// Changes when what waits should be looked at: with the pools' events, and each second.
    fn looks_wanted(&self) -> (u64, u64) {
        let waits = |part: &crate::volume::pools::PoolPart| !part.parked.is_empty();
        let events = self.pools.iter().filter(|part| waits(part)).map(|part| part.events).sum();
        (events, self.now / LOOK_NS)
    }

    /// When that is looked at next, unless something happens before.
    pub(super) fn next_look(&self) -> u64 {
        (self.waits_looked_at.1 + 1) * LOOK_NS
    }

    fn refuse(&mut self, at: usize) {
        if let Some(attached) = &self.volumes[self.slots[at].volume] {
            attached.stats.refused.add(1);
        }
        let volume = self.slots[at].volume;
        if !self.refused.contains(&volume) {
            self.refused.push(volume);
        }
        self.finish(at, Err(BlockError::NoSpace));
    }

    /// Notes since when a write waits for space that is not on its way. Whether it has waited for
    /// as long as it is to.
    fn is_to_fail(&mut self, at: usize) -> bool {
        let slot = &mut self.slots[at];
        let Some(attached) = &self.volumes[slot.volume] else { return false };
        // One whose pool's claim is late does not wait for space, and is never refused for it.
        let starves = slot.state == State::Starved && !slot.is_late;
        let parked = slot.state == State::Parked && slot.reason == ParkReason::Space;
        // A discard may have come since the mapper has looked: what it has dropped is on its way.
        if parked && slot.lacks_at == 0 {
            slot.lacks_at = self.now;
        }
        let waits_for_drops = self.now.saturating_sub(slot.lacks_at) < DROPS_NS;
        let mapper = self.pools[attached.pool].handle.mapper();
        let parked = parked && !(waits_for_drops && mapper.has_dropped_space());
        if !(starves || parked && attached.attachment.is_out_of_space()) {
            slot.stuck_at = if starves || parked { slot.stuck_at } else { 0 };
            return false;
        }
        if slot.stuck_at == 0 {
            slot.stuck_at = self.now;
        }
        let waited = self.now.saturating_sub(slot.stuck_at);
        let stats = &attached.stats;
        stats.blocked.add(1);
        stats.blocked_ns.set(stats.blocked_ns.get().max(waited));
        self.found_waiting = true;
        match attached.settings.on_full {
            OnFull::Block => false,
            OnFull::Timeout(ms) => waited >= u64::from(ms) * 1_000_000,
            OnFull::Error => true,
        }
    }
}
