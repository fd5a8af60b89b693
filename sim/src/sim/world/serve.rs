//! A pool in service: the next event, the requests of clients, and the end of a history.

use blockd_mapper::engine::{Control, RebalanceState};
use blockd_mapper::error::MapperError;

use super::super::content::UNIT;
use super::super::marks::Mark;
use super::super::oracle::{Breach, Violation};
use super::super::up::{Kind, Up};
use super::{Phase, World};

/// Events without any progress after which a history is stuck.
const IDLE_LIMIT: u32 = 400;
/// Events that the death in the middle of a ring record is waited for. Nearly all come within 100.
const CUT_EVENTS: u32 = 1000;

/// Polls in which a device is to be gone when nothing else is left to do.
const LEAVING_POLLS: u32 = 1000;

/// The next possible events.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    Client,
    Control,
    Device,
    Engine,
    Retry,
    Committed,
    Dead,
    Time,
}

impl World {
    pub(super) fn step_up(&mut self) -> Result<(), Violation> {
        let crash = self.core.profile.crash * 0.15 / f64::from(1 + self.crashes_unread);
        if self.core.chance(crash) {
            self.crashes_unread += 1;
            let torn = self.core.profile.torn_ring;
            if self.cut_stores.is_none() && self.core.chance(torn) {
                self.cut_stores = Some(self.core.random.u64(1..24));
                self.cut_events = CUT_EVENTS;
            } else {
                self.random_crash();
                return Ok(());
            }
        }
        self.up_event()
    }

    fn up_event(&mut self) -> Result<(), Violation> {
        let Phase::Up(up) = &mut self.phase else { return Ok(()) };
        if up.closed {
            return self.finish_close();
        }
        if up.pool.failure().is_some_and(|error| error != MapperError::Closed) {
            return self.pool_failed();
        }
        if up.verifying.is_some() && !self.verify_more()? && self.idle < IDLE_LIMIT {
            // Falls through: its IO has to be served.
        }
        let Some(event) = self.next_event() else { return self.nothing_to_do() };
        if event != Event::Time {
            self.idle = 0;
        }
        // A request that begins in the event that the process dies in would be unknown afterwards.
        let cut = if event == Event::Client { None } else { self.begin_cut() };
        let result = self.carry_out(event);
        self.end_cut(cut);
        result
    }

    fn next_event(&mut self) -> Option<Event> {
        let Phase::Up(up) = &self.phase else { return None };
        let quiet = up.verifying.is_some() || up.draining;
        let room = up.live() < self.core.profile.depth && !quiet;
        let pace = self.core.profile.pace;
        let deadline = up.engine.next_deadline().is_some_and(|at| at <= self.core.now);
        let clients = room && self.operations_left > 0;
        let calm = !quiet && self.operations_left > 0;
        let control = if calm { control_weight(self.core.profile.control, pace[0]) } else { 0 };
        let weights = [
            u32::from(clients) * pace[0] * 10,
            control,
            u32::from(self.core.has_flights()) * pace[1] * 10,
            u32::from(up.engine_due || deadline) * pace[2] * 10,
            u32::from(up.has_retries()) * pace[3] * 10,
            u32::from(up.has_committed()) * pace[3] * 10,
            u32::from(self.core.dead() > 0) * pace[4] * 10,
            u32::from(calm),
        ];
        let events = [
            Event::Client,
            Event::Control,
            Event::Device,
            Event::Engine,
            Event::Retry,
            Event::Committed,
            Event::Dead,
            Event::Time,
        ];
        self.choose(&weights).map(|at| events[at])
    }

    pub(super) fn carry_out(&mut self, event: Event) -> Result<(), Violation> {
        match event {
            Event::Client => self.client(),
            Event::Control => self.control(),
            Event::Device => match self.core.device_event() {
                Some((origin, answered)) => self.deliver(origin, answered),
                None => Ok(()),
            },
            Event::Engine => self.poll_engine(),
            Event::Retry => match &mut self.phase {
                Phase::Up(up) => up.retry(&mut self.core),
                _ => Ok(()),
            },
            Event::Committed => match &mut self.phase {
                Phase::Up(up) => up.committed(&mut self.core),
                _ => Ok(()),
            },
            Event::Dead => {
                self.core.land(false);
                Ok(())
            }
            Event::Time => {
                self.pass_time();
                Ok(())
            }
        }
    }

    pub(super) fn poll_engine(&mut self) -> Result<(), Violation> {
        let Phase::Up(up) = &mut self.phase else { return Ok(()) };
        up.engine_due = false;
        while let Some(command) = up.engine.poll(self.core.now) {
            self.core.submit_of_engine(command);
        }
        up.after_call(&mut self.core);
        self.note_devices();
        self.take_outcomes()?;
        self.end_long_wait()
    }

    /// A device that is leaving stays where the others have no room for what is on it: nothing else
    /// goes on, and no space becomes free. A rebalance of a pool that stays low ends.
    fn end_long_wait(&mut self) -> Result<(), Violation> {
        let Phase::Up(up) = &self.phase else { return Ok(()) };
        let goes_on = up.live() > 0 || self.operations_left > 0 || !up.controls.is_empty();
        let leaving = up.engine.evacuation_status().device;
        let rebalances = up.engine.rebalance_status().state == RebalanceState::Running;
        // Not from 0 after each crash: there are always more of them.
        if goes_on || up.draining || up.closed || (leaving.is_none() && !rebalances) {
            return Ok(());
        }
        self.leaving_polls += 1;
        if self.leaving_polls < LEAVING_POLLS {
            return Ok(());
        }
        self.leaving_polls = 0;
        match leaving {
            Some(device) => self.submit(Control::KeepDevice { device }, None, Mark::DeviceStays),
            None => self.submit_rebalance(false),
        }
    }

    pub(super) fn pass_time(&mut self) {
        let Phase::Up(up) = &mut self.phase else { return };
        if let Some(at) = up.engine.next_deadline() {
            self.core.now = self.core.now.max(at);
            up.engine_due = true;
        }
    }

    /// Every request that could be started has been, and nothing moves by itself.
    fn nothing_to_do(&mut self) -> Result<(), Violation> {
        self.idle += 1;
        let Phase::Up(up) = &mut self.phase else { return Ok(()) };
        let at_rest = up.live() == 0 && up.controls.is_empty() && up.verify.is_empty();
        if at_rest && up.verifying.is_none() && (up.engine.is_idle() || up.draining) {
            if up.draining {
                return self.submit_close();
            }
            if self.operations_left == 0 {
                return self.wind_up();
            }
        }
        if self.idle <= 40 {
            // Only time can help: a timer, or IO that drains.
            self.pass_time();
            return Ok(());
        }
        if self.idle == 41 && up.was_full && !up.draining {
            up.was_full = false;
            return self.free_space();
        }
        let given_up = up.give_up(&mut self.core)?;
        if given_up > 0 {
            self.idle = 0;
            return Ok(());
        }
        if self.idle > IDLE_LIMIT {
            let text = self.describe();
            return Err(Violation::new(Breach::NoProgress, text));
        }
        self.pass_time();
        Ok(())
    }

    /// A full pool: discards the content of a random volume, so that others continue.
    fn free_space(&mut self) -> Result<(), Violation> {
        let Phase::Up(up) = &mut self.phase else { return Ok(()) };
        let writable: Vec<(u32, usize)> = self
            .core
            .oracle
            .volumes()
            .iter()
            .filter(|(id, volume)| !volume.snapshot && !self.core.oracle.is_busy(**id))
            .map(|(id, volume)| (*id, volume.units))
            .collect();
        if writable.is_empty() {
            return Ok(());
        }
        let (id, units) = writable[self.core.random.usize(..writable.len())];
        if units == 0 {
            return Ok(());
        }
        up.request(&mut self.core, Kind::Discard, id, (0, units), false)
    }

    /// All requests are done: checks everything, then starts over from a closed pool or ends.
    fn wind_up(&mut self) -> Result<(), Violation> {
        let Phase::Up(up) = &mut self.phase else { return Ok(()) };
        up.engine
            .check_invariants()
            .map_err(|text| Violation::new(Breach::Invariant, format!("at rest: {text}")))?;
        if self.winding_up {
            self.end();
            return Ok(());
        }
        if let Some(prediction) = self.prediction.take() {
            self.check_prediction(prediction)?;
        }
        self.check_differences()?;
        if !self.compared {
            self.compared = true;
            if self.core.random.bool() && self.delete_with_prediction()? {
                return Ok(());
            }
        }
        self.winding_up = true;
        self.core.calm = true;
        self.core.profile.crash = 0.0;
        self.core.profile.recovery_crash = 0.0;
        self.core.profile.wrong_ring = 0.0;
        self.cut_stores = None;
        if self.core.random.bool()
            && let Phase::Up(up) = &mut self.phase
        {
            up.draining = true;
        } else {
            self.random_crash();
        }
        Ok(())
    }

    fn pool_failed(&mut self) -> Result<(), Violation> {
        let failure = match &self.phase {
            Phase::Up(up) => up.pool.failure(),
            _ => None,
        };
        let Some(error) = failure else { return Ok(()) };
        let excused = self.core.flush_failed
            || self.core.metadata_failed
            || matches!(error, MapperError::Io { .. })
            || self.core.damaged;
        if !excused {
            let text = format!("the pool stopped by itself: {error}");
            return Err(Violation::new(Breach::Error, text));
        }
        self.core.marks.hit(Mark::PoolFailed);
        self.crash(&super::Crash::Kill);
        Ok(())
    }

    /// One request of a client, of the kinds and sizes of the profile.
    fn client(&mut self) -> Result<(), Violation> {
        self.operations_left -= 1;
        self.keep_rhythm()?;
        let mix = self.core.profile.mix;
        let Some(choice) = self.choose(&mix) else { return Ok(()) };
        let ids: Vec<u32> = self.core.oracle.volumes().keys().copied().collect();
        if ids.is_empty() {
            return self.create_volume();
        }
        let id = ids[self.core.random.usize(..ids.len())];
        let snapshot = self.core.oracle.volumes().get(&id).is_some_and(|volume| volume.snapshot);
        let kind = match choice {
            0 => Kind::Read,
            1 => Kind::Write,
            2 => Kind::Discard,
            3 => Kind::Zeroes { unmap: self.core.random.bool() },
            _ => Kind::Flush,
        };
        // Writing to a snapshot is tried now and then: it must be refused.
        let kind = match kind {
            Kind::Write | Kind::Discard | Kind::Zeroes { .. }
                if snapshot && self.core.random.u8(..8) > 0 =>
            {
                Kind::Read
            }
            other => other,
        };
        let (start, len) = self.place(id);
        if len == 0 {
            return Ok(());
        }
        let changes = !matches!(kind, Kind::Read | Kind::Verify | Kind::Flush);
        let share = self.core.profile.fua;
        let fua = changes && self.core.chance(share);
        let Phase::Up(up) = &mut self.phase else { return Ok(()) };
        let writes = matches!(kind, Kind::Write | Kind::Zeroes { .. });
        if writes && up.overtakes(id, (start, len)) {
            return Ok(());
        }
        up.request(&mut self.core, kind, id, (start, len), fua)
    }

    /// A place in a volume: whole blocks, of all sizes, here and there aligned to an extent.
    fn place(&mut self, id: u32) -> (usize, usize) {
        let Some(volume) = self.core.oracle.volumes().get(&id) else { return (0, 0) };
        let (units, block) = (volume.units, volume.block_units);
        if units == 0 {
            return (0, 0);
        }
        let extent = super::index(u64::from(self.core.profile.extent_size) / UNIT);
        let profile = &self.core.profile;
        let (hot, bits) = (profile.hot, profile.size_bits);
        let random = &mut self.core.random;
        let reach = if random.f64() < hot { units.min(extent * 2) } else { units };
        let longest = 1_usize << random.u32(0..=bits);
        let mut len = (random.usize(1..=longest)).next_multiple_of(block).min(units);
        let mut start = random.usize(..reach) / block * block;
        if random.u8(..8) == 0 {
            start = start / extent * extent;
            len = len.next_multiple_of(extent).min(units);
        } else if random.u8(..3) == 0 {
            start = start / 8 * 8;
            len = len.next_multiple_of(8);
        }
        (start, len.min(units - start))
    }

    /// Returns the state of the clients, for structure changes.
    pub(super) fn up(&mut self) -> Option<&mut Up> {
        match &mut self.phase {
            Phase::Up(up) => Some(up),
            _ => None,
        }
    }
}

/// Structure changes are rare beside requests: the profile says how rare.
fn control_weight(share: f64, pace: u32) -> u32 {
    if share >= 0.05 {
        (pace * 3 / 2).max(1)
    } else if share >= 0.01 {
        (pace / 2).max(1)
    } else {
        u32::from(pace > 20)
    }
}
