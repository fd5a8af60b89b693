//! IO that the engine asks for, from its start to its result.

use std::sync::atomic::Ordering;

use blockd_mapper::io::{IoCommand, IoError, IoOp};
use blockd_media::{Gate, io_error};

use super::super::driver::{Begun, at_once};
use super::{PoolThread, SPACE_PAUSE_NS, count};
use crate::stats::MediaOp;

impl PoolThread {
    pub(super) fn begin(&mut self, mut command: IoCommand) {
        self.count_command(&command);
        let Some(one) = self.served.get(usize::from(command.device.0)) else {
            self.engine.complete(command, Err(IoError::Gone));
            return;
        };
        if matches!(command.op, IoOp::Fence) {
            // Taken when the pool was opened.
            self.engine.complete(command, Ok(()));
            return;
        }
        let writes = matches!(command.op, IoOp::Write { .. } | IoOp::Discard { .. });
        if writes && !one.device.may_write() {
            self.hold_back(command);
            return;
        }
        let begun = at_once(&one.device, &mut command.op);
        if let Begun::Ended(result) = begun {
            if let Err(IoError::Media) = result {
                self.count_failure(&command, &std::io::Error::from_raw_os_error(libc::EIO));
            }
            self.has_result(command, result);
        } else if matches!(command.op, IoOp::Discard { .. }) {
            match self.discarder.begin(command) {
                Ok(()) => self.under_way += 1,
                Err(command) => self.engine.complete(command, Err(IoError::Gone)),
            }
        } else {
            let (id, device) = (command.id, command.device.0);
            let started = match begun {
                Begun::Synced => self.ring.sync_command(one.slot, command),
                _ => self.ring.command(one.slot, command),
            };
            match started {
                Ok(()) => {
                    self.under_way += 1;
                    self.watch(id, device);
                }
                // The gate was closed meanwhile.
                Err(command) if writes && !one.device.may_write() => self.hold_back(command),
                Err(command) => self.engine.complete(command, Err(IoError::Media)),
            }
        }
    }

    /// The pool's claim has lapsed: the command is tried again when it may have been renewed.
    fn hold_back(&mut self, command: IoCommand) {
        self.late.push_back(command);
        self.retry_at = self.clock.ns() + SPACE_PAUSE_NS;
    }

    /// Marks an IO as in flight. A mark is the id plus one, as 0 stands for none.
    fn watch(&mut self, id: u64, device: u8) {
        if let Some(place) = self.watched.iter().position(|&other| other == 0) {
            self.watched[place] = id.wrapping_add(1);
            self.seen.begin(place, device, self.now);
        }
    }

    fn watch_ended(&mut self, id: u64) {
        let id = id.wrapping_add(1);
        if let Some(place) = self.watched.iter().position(|&other| other == id) {
            self.watched[place] = 0;
            self.seen.end(place, self.clock.ns());
        }
    }

    fn count_command(&self, command: &IoCommand) {
        let (stats, device) = (&self.shared.stats, command.device.0);
        match &command.op {
            IoOp::Flush => {
                count(&stats.flushes, 1);
                self.seen.sent(device, MediaOp::Flush, 0);
            }
            IoOp::Write { buffer, .. } => {
                let bytes = buffer.as_bytes().len() as u64;
                count(&stats.writes, 1);
                count(&stats.written_bytes, bytes);
                self.seen.sent(device, MediaOp::Write, bytes);
            }
            IoOp::Discard { .. } => count(&stats.discards, 1),
            IoOp::Read { buffer, .. } => {
                self.seen.sent(device, MediaOp::Read, buffer.as_bytes().len() as u64);
            }
            IoOp::Fence => {}
        }
    }

    pub(super) fn command_ended(&mut self, command: IoCommand, result: std::io::Result<()>) {
        self.under_way -= 1;
        self.watch_ended(command.id);
        if result.as_ref().is_err_and(Gate::refused) {
            self.hold_back(command);
            return;
        }
        let result = result.map_err(|error| {
            let device = self.shared.device(command.device);
            let mapped = device.map_or_else(|| io_error(&error), |one| one.meaning(&error));
            if mapped != IoError::NoSpace {
                self.count_failure(&command, &error);
            }
            mapped
        });
        self.has_result(command, result);
    }

    fn count_failure(&self, command: &IoCommand, error: &std::io::Error) {
        count(&self.shared.stats.io_errors, 1);
        let op = match command.op {
            IoOp::Read { .. } => MediaOp::Read,
            IoOp::Flush => MediaOp::Flush,
            IoOp::Write { .. } | IoOp::Discard { .. } | IoOp::Fence => MediaOp::Write,
        };
        self.seen.failed(command.device.0, op, error.raw_os_error().unwrap_or(libc::EIO));
        let (pool, operation) = (&self.shared.name, command.op.name());
        let device = self.shared.device(command.device);
        let device = device.map(|one| tracing::field::display(one.info().path.display()));
        tracing::error!(%pool, device, operation, %error, "pool IO failed");
    }

    fn has_result(&mut self, command: IoCommand, result: Result<(), IoError>) {
        let write = match command.op {
            // Through a page cache the error may be about an earlier write: see `ends_its_writes`.
            IoOp::Write { fua: true, .. } => {
                let device = self.shared.device(command.device);
                device.is_some_and(|device| device.ends_its_writes())
            }
            IoOp::Write { .. } => true,
            _ => false,
        };
        if result == Err(IoError::NoSpace) && write && !self.has_failed() {
            // Nothing was written, so trying again is not the retry that R8 forbids.
            if self.starved.is_empty() {
                tracing::warn!(pool = %self.shared.name, "no space below the pool: waiting for it");
            }
            self.starved.push_back(command);
            self.retry_at = self.clock.ns() + SPACE_PAUSE_NS;
            let waiting = self.starved.len() as u64;
            self.shared.stats.waiting_for_space.store(waiting, Ordering::Relaxed);
            return;
        }
        self.shared.stats.waiting_for_space.store(self.starved.len() as u64, Ordering::Relaxed);
        self.engine.complete(command, result);
    }

    pub(super) fn take_discarded(&mut self) {
        while let Some((command, result)) = self.discarder.ended() {
            self.under_way -= 1;
            self.engine.complete(command, result);
        }
    }
}
