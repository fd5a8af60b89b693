//! Histories whose events are written down: for schedules that chance finds too seldom.

use blockd_mapper::create::NewDevice;
use blockd_mapper::engine::Control;
use blockd_mapper::io::IoOp;
use blockd_mapper::open::OpenMode;
use blockd_mapper::units::VolumeId;

use super::super::content::{UNIT, index};
use super::super::core::{Class, Trace, bytes};
use super::super::disk::{Disk, Keep};
use super::super::marks::Mark;
use super::super::oracle::{Breach, Intent, Violation};
use super::super::profile::Profile;
use super::super::up::Kind;
use super::control::listed;
use super::{Crash, Phase, World};

/// Events of one [`World::settle`] at the most.
const MAX_EVENTS: u32 = 1_000_000;

/// Polls of the engine before another event has its turn: while a write waits for space and a
/// structure change for its commit, the engine is always due.
const POLLS_IN_A_ROW: u32 = 64;

/// Units written at a time: one sub-block.
pub const BLOCK: usize = 8;

impl World {
    /// A pool that is open and at rest, where only the events of the script happen.
    pub fn scripted(seed: u64, profile: Profile, trace: Trace) -> Result<Self, Violation> {
        let mut world = Self::create(seed, profile, trace)?;
        world.scripted = true;
        world.core.calm = true;
        world.open()?;
        Ok(world)
    }

    /// Units of an extent.
    #[must_use]
    pub fn extent_units(&self) -> usize {
        index(u64::from(self.core.profile.extent_size) / UNIT)
    }

    /// Opens the pool, and again if it is refused with reason, and reads everything back.
    pub fn open(&mut self) -> Result<(), Violation> {
        // Requests seem to be left, so that the history does not wind up by itself.
        self.operations_left = 1;
        while !self.is_serving() {
            self.step()?;
        }
        self.settle()
    }

    /// Continues an opening until it waits for held back operations.
    pub fn open_until_held(&mut self) -> Result<(), Violation> {
        self.operations_left = 1;
        if matches!(self.phase, Phase::Down) {
            self.start_opening()?;
        }
        while let Phase::Opening(opening) = &mut self.phase {
            while let Some(command) = opening.poll() {
                self.core.submit_command(command);
            }
            if !opening.is_done() && !self.core.has_flights() && self.core.dead() == 0 {
                break;
            }
            self.opening_event()?;
        }
        Ok(())
    }

    /// Opens the pool for reading only, and closes it again.
    pub fn look(&mut self) -> Result<(), Violation> {
        self.start_opening_to(OpenMode::ReadOnly)?;
        while let Phase::Opening(opening) = &mut self.phase {
            if opening.is_done() {
                break;
            }
            while let Some(command) = opening.poll() {
                if matches!(command.op, IoOp::Write { .. } | IoOp::Discard { .. }) {
                    let text = format!("a pool opened to be looked at is changed: {command:?}");
                    return Err(Violation::new(Breach::Error, text));
                }
                self.core.submit_command(command);
            }
            if let Some((origin, answered)) = self.core.device_event() {
                self.deliver(origin, answered)?;
            }
        }
        let Phase::Opening(opening) = std::mem::replace(&mut self.phase, Phase::Down) else {
            return Ok(());
        };
        let refused = |error| Violation::new(Breach::Refused, format!("to be looked at: {error}"));
        let opened = opening.finish().map_err(refused)?;
        self.core.marks.hit(Mark::ReadOnlyOpen);
        if opened.report.labels_lost > 0 {
            self.core.oracle.labels_lost();
        }
        self.core.oracle.opened(&listed(&opened.engine))
    }

    /// A device more, of this many extents.
    pub fn add_device(&mut self, extents: u64) -> Result<(), Violation> {
        let size = extents * u64::from(self.core.profile.extent_size);
        let handle = u8::try_from(self.core.disks.len()).unwrap_or(u8::MAX);
        self.core.disks.push(Disk::new(size / UNIT));
        self.core.extents.push(extents);
        self.core.recorded.push(extents);
        let device = NewDevice {
            name: format!("dev{}", handle + 1),
            uuid: [handle + 1; 16],
            size,
            block_size: 512,
            class: 0,
        };
        self.submit(Control::AddDevice { handle, device }, None, Mark::AddDevice)?;
        self.settle()
    }

    /// A device becomes this many extents large.
    pub fn grow_device(&mut self, device: u8, extents: u64) -> Result<(), Violation> {
        let size = extents * u64::from(self.core.profile.extent_size);
        if let Some(disk) = self.core.disks.get_mut(usize::from(device)) {
            disk.grow(size / UNIT);
            self.core.extents[usize::from(device)] = extents;
        }
        self.submit(Control::GrowDevice { device, size }, None, Mark::GrowDevice)?;
        self.settle()
    }

    /// A device begins to leave the pool.
    pub fn begin_to_remove(&mut self, device: u8) -> Result<(), Violation> {
        self.submit(Control::RemoveDevice { device }, None, Mark::DeviceLeaves)
    }

    /// A write, one step of the engine, and one operation of a device.
    pub fn write_beside_the_engine(&mut self, volume: u32, extent: usize) -> Result<(), Violation> {
        if self.unanswered() < 4 {
            self.ask(Kind::Write, volume, (extent * self.extent_units(), BLOCK), false)?;
        }
        self.poll_engine()?;
        if self.core.has_flights() {
            self.carry_out(super::serve::Event::Device)?;
        }
        Ok(())
    }

    /// A device leaves the pool, with as much time as that takes.
    pub fn remove_device(&mut self, device: u8) -> Result<(), Violation> {
        self.begin_to_remove(device)?;
        for _ in 0..1000 {
            self.settle()?;
            let Phase::Up(up) = &self.phase else { return Ok(()) };
            if up.controls.is_empty() && up.engine.evacuation_status().device.is_none() {
                return Ok(());
            }
            self.pass_time();
        }
        Err(Violation::new(Breach::NoProgress, format!("device {device} never leaves")))
    }

    /// Runs all work that can proceed, without advancing timers.
    pub fn settle(&mut self) -> Result<(), Violation> {
        let (mut quiet, mut polls) = (0, 0);
        for _ in 0..MAX_EVENTS {
            let Phase::Up(up) = &self.phase else { return Ok(()) };
            let failed = up.pool.failure().is_some();
            if up.engine_due && polls < POLLS_IN_A_ROW {
                polls += 1;
                self.poll_engine()?;
                continue;
            }
            polls = 0;
            if up.has_retries() {
                self.carry_out(super::serve::Event::Retry)?;
            } else if up.has_committed() {
                self.carry_out(super::serve::Event::Committed)?;
            } else if self.core.has_flights() {
                self.carry_out(super::serve::Event::Device)?;
            } else if up.engine_due {
                // It waits for held back operations, and requests to be polled repeatedly.
                return Ok(());
            } else if quiet < 4 && !failed {
                quiet += 1;
                self.poll_engine()?;
                continue;
            } else {
                return Ok(());
            }
            quiet = 0;
        }
        let text = format!("no rest after {MAX_EVENTS} events: {}", self.describe());
        Err(Violation::new(Breach::NoProgress, text))
    }

    /// A client's request, without waiting for anything.
    pub fn ask(
        &mut self,
        kind: Kind,
        volume: u32,
        place: (usize, usize),
        fua: bool,
    ) -> Result<(), Violation> {
        let Phase::Up(up) = &mut self.phase else { return Ok(()) };
        up.request(&mut self.core, kind, volume, place, fua)
    }

    /// Writes a sub-block of an extent, and lets everything happen that can.
    pub fn write(&mut self, volume: u32, extent: usize, block: usize) -> Result<(), Violation> {
        let start = extent * self.extent_units() + block * BLOCK;
        self.ask(Kind::Write, volume, (start, BLOCK), false)?;
        self.settle()
    }

    /// Reads a sub-block of an extent, and lets everything happen that can.
    pub fn read(&mut self, volume: u32, extent: usize, block: usize) -> Result<(), Violation> {
        let start = extent * self.extent_units() + block * BLOCK;
        self.ask(Kind::Read, volume, (start, BLOCK), false)?;
        self.settle()
    }

    /// Discards an extent, and lets everything happen that can.
    pub fn discard(&mut self, volume: u32, extent: usize) -> Result<(), Violation> {
        let units = self.extent_units();
        self.ask(Kind::Discard, volume, (extent * units, units), false)?;
        self.settle()
    }

    /// Flushes, and lets everything happen that can.
    pub fn flush(&mut self, volume: u32) -> Result<(), Violation> {
        self.ask(Kind::Flush, volume, (0, BLOCK), false)?;
        self.settle()
    }

    /// Requests not answered.
    #[must_use]
    pub fn unanswered(&self) -> usize {
        match &self.phase {
            Phase::Up(up) => up.live(),
            _ => 0,
        }
    }

    /// Fails if a volume maps anything.
    pub fn expect_unmapped(&self, volume: u32) -> Result<(), Violation> {
        let Phase::Up(up) = &self.phase else { return Ok(()) };
        let summaries = up.pool.summaries();
        match summaries.iter().find(|one| one.id == VolumeId(volume)) {
            Some(one) if one.mapped > 0 => {
                let text = format!("volume {volume} maps {} bytes after a discard", one.mapped);
                Err(Violation::new(Breach::Invariant, text))
            }
            _ => Ok(()),
        }
    }

    /// Holds back IO of these kinds from here on, and no other; held operations stay held.
    pub fn hold(&mut self, classes: &[Class]) {
        self.core.holding = classes.to_vec();
    }

    /// Releases the held operations of a class, and runs everything that can proceed.
    pub fn release(&mut self, class: Class) -> Result<(), Violation> {
        self.core.holding.retain(|held| *held != class);
        self.core.release(class);
        self.settle()
    }

    /// Releases one of the held operations, counted from the oldest, if there is one, and runs
    /// everything that can proceed. The others stay held.
    pub fn release_held(&mut self, number: usize) -> Result<(), Violation> {
        self.core.release_held(number);
        self.settle()
    }

    /// A new volume, of this many extents.
    pub fn volume(&mut self, extents: usize) -> Result<u32, Violation> {
        let units = extents * self.extent_units();
        self.next_name += 1;
        let name = format!("v{}", self.next_name);
        let size = bytes(units);
        let control = Control::Create { name: name.clone(), size, block_size: 512 };
        let intent = Intent::Create { name, units, block_units: 1 };
        self.submit(control, Some(intent), Mark::Create)?;
        self.made()
    }

    /// A snapshot or a clone. `None` while it is not there yet.
    pub fn copy(&mut self, source: u32, snapshot: bool) -> Result<Option<u32>, Violation> {
        let units = self.core.oracle.volumes().get(&source).map_or(0, |volume| volume.units);
        self.next_name += 1;
        let name = format!("c{}", self.next_name);
        let (id, mark) = (VolumeId(source), Mark::Snapshot);
        let before = self.newest();
        let intent = Intent::Copy { source, name: name.clone(), units, snapshot };
        if snapshot {
            self.submit(Control::Snapshot { source: id, name }, Some(intent), mark)?;
        } else {
            let control = Control::Clone { source: id, name, size: None };
            self.submit(control, Some(intent), Mark::Clone)?;
        }
        self.settle()?;
        Ok((self.newest() != before).then(|| self.newest()).flatten())
    }

    /// Snapshots of these volumes in one cut, as far as it goes.
    pub fn group(&mut self, sources: &[u32]) -> Result<(), Violation> {
        self.next_name += 1;
        let number = self.next_name;
        let named = |source: &u32| (*source, format!("g{number}-{source}"));
        self.ask_group(sources.iter().map(named).collect())
    }

    /// Snapshots with these names in one cut, as far as it goes.
    pub fn ask_group(&mut self, members: Vec<(u32, String)>) -> Result<(), Violation> {
        self.submit_group(members)?;
        self.settle()
    }

    /// Another size, without waiting until it is durable.
    pub fn resize(&mut self, volume: u32, units: usize) -> Result<(), Violation> {
        let control = Control::Resize { volume: VolumeId(volume), size: bytes(units) };
        self.submit(control, Some(Intent::Resize { volume, units }), Mark::Shrink)?;
        self.settle()
    }

    /// The end of a volume or snapshot.
    pub fn delete(&mut self, volume: u32) -> Result<(), Violation> {
        let control = Control::Delete { volume: VolumeId(volume) };
        self.submit(control, Some(Intent::Delete { volume }), Mark::Delete)?;
        self.settle()
    }

    /// A volume is rolled back to a snapshot, as far as possible.
    pub fn roll_back_to(&mut self, volume: u32, snapshot: u32) -> Result<(), Violation> {
        let control = Control::Rollback { volume: VolumeId(volume), snapshot: VolumeId(snapshot) };
        self.submit(control, Some(Intent::Rollback { volume, snapshot }), Mark::Rollback)?;
        self.settle()
    }

    /// A checkpoint, as far as it goes.
    pub fn checkpoint(&mut self) -> Result<(), Violation> {
        self.submit(Control::Checkpoint, None, Mark::CheckpointAsked)?;
        self.settle()
    }

    /// Composite entries on or off, as far as it goes.
    pub fn turn_composite(&mut self, enabled: bool) -> Result<(), Violation> {
        self.set_composite(enabled)?;
        self.settle()
    }

    fn newest(&self) -> Option<u32> {
        self.core.oracle.volumes().keys().next_back().copied()
    }

    fn made(&mut self) -> Result<u32, Violation> {
        self.settle()?;
        self.newest().ok_or_else(|| Violation::new(Breach::Error, "no volume was made".into()))
    }

    /// Writes to extent after extent of a volume until a write waits for space.
    pub fn fill(&mut self, volume: u32) -> Result<(), Violation> {
        let mut extent = 0;
        while self.unanswered() == 0 {
            self.write(volume, extent, 0)?;
            extent += 1;
        }
        Ok(())
    }

    /// Power is lost: data in the caches survives, operations that had not reached the devices do
    /// not.
    pub fn lose_power_keeping_caches(&mut self) {
        let disks = self.core.disks.iter();
        let keep = disks.map(|disk| Keep::Mask(vec![true; disk.cached_writes()])).collect();
        self.crash(&Crash::Power(keep));
    }

    /// Power is lost, and this survives on every device.
    pub fn lose_power_keeping(&mut self, keep: &Keep) {
        let keep = vec![keep.clone(); self.core.disks.len()];
        self.crash(&Crash::Power(keep));
    }

    /// The process is killed, or has died of a failure of its own.
    pub fn kill_process(&mut self) {
        self.crash(&Crash::Kill);
    }

    /// Ends a script: releases all held operations, and reads everything back once more.
    pub fn wind_up_script(&mut self) -> Result<(), Violation> {
        self.core.release_all();
        self.settle()?;
        self.operations_left = 0;
        self.run()
    }
}
