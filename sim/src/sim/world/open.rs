//! Making a pool, and opening it after whatever happened.

use std::sync::Arc;

use blockd_mapper::create::{CreateOptions, Creating, NewDevice};
use blockd_mapper::error::MapperError;
use blockd_mapper::open::{OpenMode, OpenOptions, Opened, Opening, PresentDevice};
use blockd_mapper::pool::Tuning;
use blockd_mapper::ring::RingMemory;

use super::super::core::Ring;
use super::super::marks::Mark;
use super::super::oracle::{Breach, Oracle, Violation};
use super::super::up::Up;
use super::control::listed;
use super::{Phase, RingHanded, World, device_size, ring_words};

/// Units read back in one request.
const VERIFY_UNITS: usize = 256;

impl World {
    pub(super) fn format_pool(&mut self) -> Result<(), Violation> {
        let profile = &self.core.profile;
        let extent = u64::from(profile.extent_size);
        let devices = (1_u8..)
            .zip(&self.core.disks)
            .map(|(number, disk)| NewDevice {
                name: format!("dev{number}"),
                uuid: [number; 16],
                size: device_size(disk),
                block_size: 512,
                class: 0,
            })
            .collect();
        let options = CreateOptions {
            pool_id: self.core.pool_id,
            extent_size: profile.extent_size,
            devices,
            wal_size: Some(profile.wal_extents * extent),
            reserve_size: Some(profile.reserve_extents * extent),
            node: 1,
            composite: profile.composite,
        };
        let refuse = |error: MapperError| {
            Violation::new(Breach::Error, format!("a pool could not be made: {error}"))
        };
        let mut creating = Creating::new(&options).map_err(refuse)?;
        let calm = std::mem::replace(&mut self.core.calm, true);
        loop {
            while let Some(command) = creating.poll() {
                self.core.submit_command(command);
            }
            if creating.is_done() {
                break;
            }
            let Some((origin, answered)) = self.core.device_event() else {
                if self.core.has_flights() {
                    continue;
                }
                let text = "creating waits for nothing".into();
                return Err(Violation::new(Breach::NoProgress, text));
            };
            if let super::Origin::Command(mut command) = origin {
                let result = self.core.settle_command(&mut command, &answered);
                creating.complete(command, result);
            }
        }
        self.core.calm = calm;
        creating.finish().map_err(refuse)?;
        self.core.ring = Ring::of(std::iter::repeat_n(0, ring_words(&self.core.profile)));
        Ok(())
    }

    pub(super) fn start_opening(&mut self) -> Result<(), Violation> {
        self.start_opening_to(OpenMode::ReadWrite)
    }

    pub(super) fn start_opening_to(&mut self, mode: OpenMode) -> Result<(), Violation> {
        let profile = &self.core.profile;
        let devices = (1..)
            .zip(&self.core.disks)
            .map(|(number, disk)| PresentDevice {
                name: format!("dev{number}"),
                size: device_size(disk),
                block_size: 512,
            })
            .collect();
        let tuning = Tuning {
            claimed: false,
            workers: profile.workers,
            quantum: profile.quantum,
            commit_interval_ns: profile.commit_interval_ns,
            checkpoint_interval_ns: profile.checkpoint_interval_ns,
            spare_leaves: 32,
            max_leaves: 4096,
            passdown: profile.passdown,
            write_through: profile.write_through,
            synchronous: false,
            whole_blocks: false,
            commit_blocks: profile.commit_blocks,
            sparing: true,
            marks: profile.marks,
            fold_rate: profile.fold_rate,
            evacuation_rate: profile.evacuation_rate,
            read_cache: profile.read_cache,
        };
        let ring: Arc<dyn RingMemory> = Arc::<Ring>::clone(&self.core.ring);
        let options = OpenOptions {
            devices,
            mode,
            ring: Some(ring),
            boot_id: self.core.boot_id(),
            open_id: self.core.random.u64(1..),
            accept_loss: self.accept_loss,
            node: 1,
            tuning,
        };
        self.core
            .trace
            .note(|| format!("OPEN ring {:?} accept_loss {}", self.ring_handed, self.accept_loss));
        match Opening::new(options) {
            Ok(opening) => {
                self.phase = Phase::Opening(Box::new(opening));
                Ok(())
            }
            Err(error) => self.not_opened(&error),
        }
    }

    pub(super) fn step_opening(&mut self) -> Result<(), Violation> {
        // A host that never comes up shows nothing: each crash in a row makes the next less likely.
        let crash = self.core.profile.recovery_crash / f64::from(1 + self.crashes_in_row);
        if self.crashes_in_row < 12 && self.core.chance(crash) {
            self.crashes_in_row += 1;
            self.random_crash();
            return Ok(());
        }
        let cut = self.begin_cut();
        let result = self.opening_event();
        self.end_cut(cut);
        result
    }

    pub(super) fn opening_event(&mut self) -> Result<(), Violation> {
        let Phase::Opening(opening) = &mut self.phase else { return Ok(()) };
        while let Some(command) = opening.poll() {
            self.core.submit_command(command);
        }
        if opening.labels_lost() > 0 {
            self.core.oracle.labels_lost();
        }
        if opening.is_done() {
            let Phase::Opening(opening) = std::mem::replace(&mut self.phase, Phase::Down) else {
                return Ok(());
            };
            return match opening.finish() {
                Ok(opened) => self.opened(opened),
                Err(error) => self.not_opened(&error),
            };
        }
        let dead = u32::from(self.core.dead() > 0) * self.core.profile.pace[4].min(10);
        let flights = u32::from(self.core.has_flights()) * 30;
        match self.choose(&[dead, flights]) {
            Some(0) => self.core.land(true),
            Some(_) => {
                if let Some((origin, answered)) = self.core.device_event() {
                    return self.deliver(origin, answered);
                }
            }
            None => {
                let text = format!("opening waits for nothing: {}", self.describe());
                return Err(Violation::new(Breach::NoProgress, text));
            }
        }
        Ok(())
    }

    fn opened(&mut self, opened: Opened) -> Result<(), Violation> {
        let Opened { pool, engine, report } = opened;
        self.core.trace.note(|| format!("opened: {report:?}"));
        self.open_failures = 0;
        self.crashes_in_row = 0;
        if self.killed && self.ring_handed == RingHanded::Right && !self.accept_loss {
            self.core.marks.hit(Mark::RingAccepted);
        }
        if self.accept_loss {
            self.core.marks.hit(Mark::LossAccepted);
        }
        self.accept_loss = false;
        self.ring_handed = RingHanded::Right;
        self.right_ring = None;
        self.killed = false;
        self.core.flush_failed = false;
        self.core.metadata_failed = false;
        if engine.is_idle() {
            engine.check_invariants().map_err(|text| {
                Violation::new(Breach::Invariant, format!("after opening: {text}"))
            })?;
        }
        if report.labels_lost > 0 {
            self.core.marks.hit(Mark::LabelsLost);
        }
        let list = listed(&engine);
        self.core.oracle.opened(&list)?;
        let mut up = Up::new(engine, pool, self.core.profile.workers)?;
        if self.durable || self.core.random.u8(..5) < 2 || self.winding_up || self.scripted {
            up.verifying = Some(self.durable);
            for volume in &list {
                let mut start = 0;
                while start < volume.units {
                    let count = VERIFY_UNITS.min(volume.units - start);
                    up.verify.push((volume.id, start, count));
                    start += count;
                }
            }
        }
        self.durable = false;
        self.phase = Phase::Up(Box::new(up));
        Ok(())
    }

    /// Opening failed: with reason, or not.
    fn not_opened(&mut self, error: &MapperError) -> Result<(), Violation> {
        self.core.trace.note(|| format!("not opened: {error}"));
        let opening_failed = matches!(error, MapperError::Io { .. } | MapperError::Failed(_));
        if let MapperError::RingLost { .. } = error {
            return self.ring_refused(error);
        }
        if opening_failed && !self.core.calm {
            self.open_failures += 1;
            if self.open_failures > 20 {
                // The media has become too bad for a history.
                self.core.calm = true;
            }
            self.restart_after_failure();
            return Ok(());
        }
        if self.core.damaged {
            self.end_damaged(&error.to_string());
            return Ok(());
        }
        Err(Violation::new(Breach::Refused, format!("opening failed: {error}")))
    }

    /// The process ends after an error while opening, and another one retries.
    fn restart_after_failure(&mut self) {
        for disk in &mut self.core.disks {
            disk.lose_owner();
        }
        self.core.origins.clear();
        if self.core.flush_failed || self.core.metadata_failed {
            self.core.oracle.power_lost();
            self.durable = true;
        }
        self.core.flush_failed = false;
        self.core.metadata_failed = false;
    }

    fn ring_refused(&mut self, error: &MapperError) -> Result<(), Violation> {
        self.core.marks.hit(Mark::RingRefused);
        for disk in &mut self.core.disks {
            disk.lose_owner();
        }
        self.core.origins.clear();
        if self.ring_handed == RingHanded::Right && !self.durable {
            let text = format!("the right ring was refused: {error}");
            return Err(Violation::new(Breach::Refused, text));
        }
        match self.right_ring.take() {
            Some(right) if self.core.random.u8(..4) > 0 => {
                self.core.ring = right;
                self.ring_handed = RingHanded::Right;
            }
            _ => {
                self.accept_loss = true;
                self.core.oracle.power_lost();
                self.durable = true;
            }
        }
        Ok(())
    }

    /// Reads back the remaining volumes. `true`: nothing is.
    pub(super) fn verify_more(&mut self) -> Result<bool, Violation> {
        let Phase::Up(up) = &mut self.phase else { return Ok(true) };
        while up.live() < 16
            && let Some((volume, start, count)) = up.verify.pop()
        {
            let kind = super::super::up::Kind::Verify;
            up.request(&mut self.core, kind, volume, (start, count), false)?;
        }
        if up.live() == 0 && up.verify.is_empty() {
            up.verifying = None;
            self.crashes_unread = 0;
            self.core.marks.hit(Mark::Verified);
            return Ok(true);
        }
        Ok(false)
    }

    /// Arms the death of the process in the middle of a ring record.
    pub(super) fn begin_cut(&mut self) -> Option<Cut> {
        self.cut_events = self.cut_events.saturating_sub(1);
        if self.cut_events == 0 {
            // Nothing changes any more, as the pool is full or all is done.
            self.cut_stores = None;
        }
        self.cut_stores?;
        blockd_mapper::ring::stores::stop_after(self.cut_stores);
        let token = self.core.next_token();
        Some(Cut { oracle: Box::new(self.core.oracle.clone()), token })
    }

    /// Carries it out, if the event came that far: its answers were never given, and its
    /// submissions never made.
    pub(super) fn end_cut(&mut self, cut: Option<Cut>) {
        let Some(cut) = cut else { return };
        let left = blockd_mapper::ring::stores::stop_after(None);
        if left == self.cut_stores {
            return;
        }
        self.cut_stores = left.filter(|left| *left > 0);
        if left == Some(0) {
            self.core.oracle = *cut.oracle;
            for disk in &mut self.core.disks {
                disk.forget_since(cut.token);
            }
            self.core.marks.hit(Mark::RingTorn);
            self.crash(&super::Crash::Kill);
        }
    }
}

/// State to restore when the process dies in the middle of an event.
#[derive(Debug)]
pub(super) struct Cut {
    oracle: Box<Oracle>,
    token: u64,
}
