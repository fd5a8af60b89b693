//! Structure changes: requests, and the meaning of their outcomes for the oracle.

use blockd_mapper::engine::{Control, Engine, Outcome};
use blockd_mapper::error::MapperError;
use blockd_mapper::format::Labels;
use blockd_mapper::space::{DeviceMark, Placement, VolumeSettings};
use blockd_mapper::units::VolumeId;

use super::super::content::{UNIT, index};
use super::super::core::{bytes, units};
use super::super::marks::Mark;
use super::super::oracle::{Breach, Intent, Listed, Violation};
use super::{Phase, World};

/// The key of the one label that volumes have.
const LABEL: &str = "n";

/// The volumes of a pool as the oracle compares them.
pub(super) fn listed(engine: &Engine) -> Vec<Listed> {
    engine
        .volumes()
        .into_iter()
        .map(|info| Listed {
            id: info.id.0,
            name: info.name.to_string(),
            units: units(info.size),
            snapshot: info.kind == blockd_mapper::format::catalogue::VolumeKind::Snapshot,
            label: info.labels.get(LABEL).map(str::to_owned),
        })
        .collect()
}

impl World {
    /// One structure change of the profile's kinds.
    pub(super) fn control(&mut self) -> Result<(), Violation> {
        if self.core.oracle.pending() >= 3 {
            return Ok(());
        }
        let weights = self.core.profile.controls;
        match self.choose(&weights) {
            Some(0) => self.create_volume(),
            Some(1) => self.delete_volume(),
            Some(2) => self.resize_volume(),
            Some(3) => self.copy_volume(true),
            Some(4) => self.copy_volume(false),
            Some(5) => self.roll_back(),
            Some(6) => self.submit(Control::Commit, None, Mark::CommitAsked),
            Some(7) => {
                if self.up().is_some_and(|up| up.live() > 0) {
                    self.core.marks.hit(Mark::CheckpointDuringIo);
                }
                self.submit(Control::Checkpoint, None, Mark::CheckpointAsked)
            }
            Some(8) => {
                if let Some(up) = self.up() {
                    up.draining = true;
                }
                Ok(())
            }
            Some(9) => self.take_group(),
            Some(10) => {
                let enabled = self.core.random.bool();
                self.set_composite(enabled)
            }
            Some(11) => self.change_devices(),
            Some(12) => self.rename_volume(),
            Some(13) => self.label_volume(),
            _ => Ok(()),
        }
    }

    pub(super) fn submit(
        &mut self,
        control: Control,
        intent: Option<Intent>,
        mark: Mark,
    ) -> Result<(), Violation> {
        self.next_control += 1;
        let number = self.next_control;
        self.core.trace.note(|| format!("control {number}: {control:?}"));
        if let Some(intent) = &intent {
            self.core.oracle.begin_control(number, intent.clone());
        }
        let Phase::Up(up) = &mut self.phase else { return Ok(()) };
        let id = up.engine.submit(control);
        up.controls.insert(id, (number, intent, mark));
        up.engine_due = true;
        Ok(())
    }

    fn fresh_name(&mut self, prefix: &str) -> String {
        self.next_name += 1;
        format!("{prefix}{}", self.next_name)
    }

    /// A size in units: a multiple of the block, now and then of nothing else.
    fn size(&mut self, block: usize) -> usize {
        let extent = index(u64::from(self.core.profile.extent_size) / UNIT);
        let extents = index(self.core.profile.volume_extents);
        let random = &mut self.core.random;
        let whole = random.usize(1..=extents) * extent;
        if random.u8(..3) == 0 {
            (whole - random.usize(..extent)).next_multiple_of(block.max(8))
        } else {
            whole
        }
    }

    pub(super) fn create_volume(&mut self) -> Result<(), Violation> {
        if self.core.oracle.volumes().len() + self.core.oracle.pending()
            >= self.core.profile.max_volumes
        {
            return Ok(());
        }
        let block_units = if self.core.random.u8(..4) == 0 { 8 } else { 1 };
        let units = self.size(8);
        let name = self.fresh_name("v");
        let control = Control::Create {
            name: name.clone(),
            size: bytes(units),
            block_size: u32::try_from(bytes(block_units)).unwrap_or(u32::MAX),
        };
        self.submit(control, Some(Intent::Create { name, units, block_units }), Mark::Create)
    }

    /// A volume that no structure change is using, of this kind.
    fn idle_volume(&mut self, wanted: impl Fn(bool) -> bool) -> Option<u32> {
        let all: Vec<u32> = self
            .core
            .oracle
            .volumes()
            .iter()
            .filter(|(id, volume)| wanted(volume.snapshot) && !self.core.oracle.is_busy(**id))
            .map(|(id, _)| *id)
            .collect();
        (!all.is_empty()).then(|| all[self.core.random.usize(..all.len())])
    }

    /// Takes a snapshot, or deletes those that are there, if it is time for that.
    pub(super) fn keep_rhythm(&mut self) -> Result<(), Violation> {
        let Some(rhythm) = self.core.profile.rhythm else { return Ok(()) };
        let started = self.core.profile.operations.saturating_sub(self.operations_left);
        if started.is_multiple_of(rhythm.every) {
            self.copy_volume(true)?;
        } else if started % rhythm.every == rhythm.delete_after {
            while let Some(snapshot) = self.idle_volume(|snapshot| snapshot) {
                self.submit_delete(snapshot)?;
            }
        }
        Ok(())
    }

    fn delete_volume(&mut self) -> Result<(), Violation> {
        let Some(id) = self.idle_volume(|_| true) else { return Ok(()) };
        self.submit_delete(id)
    }

    fn submit_delete(&mut self, id: u32) -> Result<(), Violation> {
        let control = Control::Delete { volume: VolumeId(id) };
        self.submit(control, Some(Intent::Delete { volume: id }), Mark::Delete)
    }

    fn resize_volume(&mut self) -> Result<(), Violation> {
        let Some(id) = self.idle_volume(|snapshot| !snapshot) else { return Ok(()) };
        let Some(volume) = self.core.oracle.volumes().get(&id) else { return Ok(()) };
        let (old, block) = (volume.units, volume.block_units);
        let units = self.size(block);
        let mark = if units < old { Mark::Shrink } else { Mark::Grow };
        let control = Control::Resize { volume: VolumeId(id), size: bytes(units) };
        self.submit(control, Some(Intent::Resize { volume: id, units }), mark)
    }

    fn copy_volume(&mut self, snapshot: bool) -> Result<(), Violation> {
        if self.core.oracle.volumes().len() + self.core.oracle.pending()
            >= self.core.profile.max_volumes + 3
        {
            return Ok(());
        }
        // A snapshot is taken of a volume, and a clone made of a snapshot.
        let Some(source) = self.idle_volume(|kind| kind != snapshot) else { return Ok(()) };
        let Some(volume) = self.core.oracle.volumes().get(&source) else { return Ok(()) };
        let units = volume.units;
        let name = self.fresh_name(if snapshot { "s" } else { "c" });
        let id = VolumeId(source);
        let (control, mark) = if snapshot {
            (Control::Snapshot { source: id, name: name.clone() }, Mark::Snapshot)
        } else {
            (Control::Clone { source: id, name: name.clone(), size: None }, Mark::Clone)
        };
        self.submit(control, Some(Intent::Copy { source, name, units, snapshot }), mark)
    }

    /// Snapshots of a few volumes in one cut.
    fn take_group(&mut self) -> Result<(), Violation> {
        let room = self.core.profile.max_volumes + 5;
        let taken = self.core.oracle.volumes().len() + self.core.oracle.pending();
        let mut sources: Vec<u32> = Vec::new();
        for _ in 0..room.saturating_sub(taken).min(4) {
            let Some(source) = self.idle_volume(|snapshot| !snapshot) else { break };
            if !sources.contains(&source) {
                sources.push(source);
            }
        }
        if sources.is_empty() {
            return Ok(());
        }
        let named = |id| (id, self.fresh_name("g"));
        let members = sources.into_iter().map(named).collect();
        self.submit_group(members)
    }

    pub(super) fn submit_group(&mut self, members: Vec<(u32, String)>) -> Result<(), Violation> {
        let asked = members.iter().map(|(id, name)| (VolumeId(*id), name.clone())).collect();
        let control = Control::SnapshotGroup { members: asked };
        self.submit(control, Some(Intent::Group { members }), Mark::Group)
    }

    /// Composite entries on, or off.
    pub(super) fn set_composite(&mut self, enabled: bool) -> Result<(), Violation> {
        let mark = if enabled { Mark::CompositeOn } else { Mark::CompositeOff };
        self.submit(Control::SetComposite { enabled }, None, mark)
    }

    /// A device leaves or shrinks, if enough is left without it; now and then the leaving one
    /// stays. Or the devices are evened out, or that ends.
    fn change_devices(&mut self) -> Result<(), Violation> {
        let Phase::Up(up) = &self.phase else { return Ok(()) };
        let table = *up.engine.devices();
        let leaving = table.leaving().and_then(|one| u8::try_from(one.device).ok());
        if let Some(device) = leaving {
            return match self.core.random.u8(..4) {
                0 => self.submit(Control::KeepDevice { device }, None, Mark::DeviceStays),
                _ => Ok(()),
            };
        }
        let share = self.core.profile.rebalances;
        if self.core.chance(share) {
            let enabled = self.core.random.u8(..4) > 0;
            return self.submit_rebalance(enabled);
        }
        let share = self.core.profile.shrinks;
        if self.core.chance(share) {
            let present: Vec<_> = table.present().collect();
            let (at, record) = present[self.core.random.usize(..present.len())];
            let device = u8::try_from(at).unwrap_or(u8::MAX);
            let extents = self.core.random.u64(record.extents / 2..=record.extents);
            let size = extents * u64::from(self.core.profile.extent_size);
            return self.submit(Control::ShrinkDevice { device, size }, None, Mark::DeviceShrinks);
        }
        let others: Vec<u8> =
            table.present().skip(1).filter_map(|(at, _)| u8::try_from(at).ok()).collect();
        if others.is_empty() {
            return Ok(());
        }
        let device = others[self.core.random.usize(..others.len())];
        self.submit(Control::RemoveDevice { device }, None, Mark::DeviceLeaves)
    }

    pub(super) fn submit_rebalance(&mut self, enabled: bool) -> Result<(), Violation> {
        let mark = if enabled { Mark::RebalanceBegun } else { Mark::RebalanceStopped };
        self.submit(Control::Rebalance { enabled }, None, mark)
    }

    /// Notes devices that are no longer of the pool, or not as a whole. What was on them is lost,
    /// but for superblocks of before: nothing may need it.
    pub(super) fn note_devices(&mut self) {
        let Phase::Up(up) = &self.phase else { return };
        let table = *up.engine.devices();
        for (at, record) in table.as_slice().iter().enumerate() {
            if record.is_present() {
                let before = std::mem::replace(&mut self.core.recorded[at], record.extents);
                if record.extents < before {
                    self.core.marks.hit(Mark::DeviceShrunk);
                    self.core.shrink_device(at, record.extents);
                }
            }
            if record.is_present() || self.core.gone.contains(&at) {
                continue;
            }
            self.core.marks.hit(Mark::DeviceGone);
            self.core.lose_device(at);
        }
    }

    fn roll_back(&mut self) -> Result<(), Violation> {
        let Some(snapshot) = self.idle_volume(|snapshot| snapshot) else { return Ok(()) };
        let Some(volume) = self.idle_volume(|snapshot| !snapshot) else { return Ok(()) };
        let control = Control::Rollback { volume: VolumeId(volume), snapshot: VolumeId(snapshot) };
        self.submit(control, Some(Intent::Rollback { volume, snapshot }), Mark::Rollback)
    }

    /// Another name: a new one, or one that some volume had before.
    fn rename_volume(&mut self) -> Result<(), Violation> {
        let Some(id) = self.idle_volume(|_| true) else { return Ok(()) };
        let volumes = self.core.oracle.volumes();
        let present = volumes.get(&id).map(|volume| volume.name.clone());
        // A rename that was cut off may have left it where it was.
        let is_free = |name: &String| volumes.values().all(|volume| volume.name != *name);
        let former = std::mem::replace(&mut self.former_name, present).filter(is_free);
        let name = match former {
            Some(former) if self.core.random.bool() => former,
            _ => self.fresh_name("r"),
        };
        let control = Control::Rename { volume: VolumeId(id), name: name.clone() };
        self.submit(control, Some(Intent::Rename { volume: id, name }), Mark::Rename)
    }

    /// Another label, or none at all.
    fn label_volume(&mut self) -> Result<(), Violation> {
        let Some(volume) = self.idle_volume(|_| true) else { return Ok(()) };
        let label = (self.core.random.u8(..3) > 0).then(|| self.fresh_name("l"));
        let labels = Labels::new(label.iter().map(|value| (LABEL, value)));
        let invalid = |error| Violation::new(Breach::Error, format!("a sound label: {error}"));
        let labels = labels.map_err(invalid)?;
        let control = Control::Label { volume: VolumeId(volume), labels };
        self.submit(control, Some(Intent::Label { volume, label }), Mark::Label)
    }

    pub(super) fn submit_close(&mut self) -> Result<(), Violation> {
        self.submit(Control::Close, None, Mark::Close)
    }

    pub(super) fn take_outcomes(&mut self) -> Result<(), Violation> {
        loop {
            let Phase::Up(up) = &mut self.phase else { return Ok(()) };
            let Some((id, result)) = up.engine.take_outcome() else { return Ok(()) };
            let Some((number, intent, mark)) = up.controls.remove(&id) else {
                let text = format!("an outcome without a request: {result:?}");
                return Err(Violation::new(Breach::Error, text));
            };
            self.core.trace.note(|| format!("control {number}: {result:?}"));
            match result {
                Ok(outcome) => {
                    self.control_done(number, intent.as_ref(), mark, &outcome);
                    self.place_new(intent.as_ref(), &outcome)?;
                }
                Err(error) => self.control_failed(number, intent.as_ref(), &error)?,
            }
        }
    }

    fn control_done(
        &mut self,
        number: u64,
        intent: Option<&Intent>,
        mark: Mark,
        outcome: &Outcome,
    ) {
        self.core.marks.hit(mark);
        let repeated = matches!(
            outcome,
            Outcome::Existing(_)
                | Outcome::ExistingGroup(_)
                | Outcome::AlreadyDeleted
                | Outcome::Unchanged
        );
        if repeated {
            self.core.marks.hit(Mark::RepeatedControl);
        }
        let made: Vec<u32> = match outcome {
            Outcome::Created(id) => vec![id.0],
            Outcome::CreatedGroup(ids) => ids.iter().map(|id| id.0).collect(),
            Outcome::Closed => {
                if let Phase::Up(up) = &mut self.phase {
                    up.closed = true;
                }
                Vec::new()
            }
            _ => Vec::new(),
        };
        self.core.oracle.end_control(number, Ok(&made));
        if let Some(Intent::Rollback { volume, .. }) = intent
            && let Phase::Up(up) = &self.phase
        {
            let found = listed(&up.engine).into_iter().find(|found| found.id == *volume);
            if let Some(found) = found {
                self.core.oracle.set_units(*volume, found.units);
            }
        }
        if let Some(Intent::Delete { volume }) = intent
            && let Phase::Up(up) = &mut self.phase
        {
            for worker in 0..up.workers() {
                up.detach(worker, *volume);
            }
        }
    }

    /// Gives a new volume a placement by chance, where there are several devices.
    fn place_new(&mut self, intent: Option<&Intent>, outcome: &Outcome) -> Result<(), Violation> {
        let (Phase::Up(up), Outcome::Created(volume)) = (&self.phase, outcome) else {
            return Ok(());
        };
        let marks: Vec<DeviceMark> =
            up.engine.devices().present().map(|(_, one)| DeviceMark::of(&one.uuid)).collect();
        if self.scripted
            || marks.len() < 2
            || matches!(intent, Some(Intent::Copy { snapshot: true, .. }))
        {
            return Ok(());
        }
        let placement = match self.core.random.u8(..3) {
            0 => return Ok(()),
            1 => Placement::Spread,
            _ => Placement::Pin(marks[self.core.random.usize(..marks.len())]),
        };
        let settings = VolumeSettings { placement, ..VolumeSettings::default() };
        self.submit(Control::Configure { volume: *volume, settings }, None, Mark::Placed)
    }

    fn control_failed(
        &mut self,
        number: u64,
        intent: Option<&Intent>,
        error: &MapperError,
    ) -> Result<(), Violation> {
        let failed = match &self.phase {
            Phase::Up(up) => up.pool.failure().is_some(),
            _ => true,
        };
        let refusal = matches!(
            error,
            MapperError::NoSpace { .. }
                | MapperError::Limit { .. }
                | MapperError::Unsuitable { .. }
                | MapperError::Invalid { .. }
                | MapperError::TooSmall { .. }
        );
        if !failed {
            self.core.oracle.end_control(number, Err(()));
        }
        if failed || refusal {
            return Ok(());
        }
        let text = format!("{intent:?} failed: {error}");
        Err(Violation::new(Breach::Error, text))
    }

    /// The pool is closed: everything that was answered is on the media.
    pub(super) fn finish_close(&mut self) -> Result<(), Violation> {
        self.abandon();
        self.core.oracle.closed();
        for disk in &mut self.core.disks {
            disk.lose_owner();
        }
        self.core.origins.clear();
        self.killed = false;
        self.durable = true;
        if self.core.random.bool() {
            // Nothing depends on the ring any more.
            let words = super::ring_words(&self.core.profile);
            self.core.ring = super::Ring::of(std::iter::repeat_n(0, words));
        }
        Ok(())
    }
}
