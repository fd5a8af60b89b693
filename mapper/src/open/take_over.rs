//! The last steps of opening: the media and the ring become those of this open.

use super::{OpenMode, Opening, Stage};
use crate::engine::Engine;
use crate::error::MapperError;
use crate::format::superblock::{CLAIM_PAGE, Superblock};
use crate::mutation::{Mutation, active};
use crate::units::Epoch;

/// Numbers that only rise. Larger ids are not the result of normal use: a billion of them a second
/// would take three centuries. Counting on would be met by an overflow.
const MAX_NUMBER: u64 = 1 << 63;

pub(super) fn check_numbers(superblock: &Superblock) -> Result<(), MapperError> {
    for (what, number) in [
        ("generation of the superblock", superblock.generation),
        ("epoch", superblock.epoch.0),
        ("sequence of the log", superblock.wal_tail_sequence),
        ("LSN of the checkpoint", superblock.checkpoint_lsn.0),
    ] {
        if number > MAX_NUMBER {
            return Err(MapperError::Limit { what, limit: MAX_NUMBER });
        }
    }
    Ok(())
}

impl Opening {
    /// A crash has left copies behind. They catch up before the next generation is written: else
    /// one crash after the other could leave a device two behind, where it counts as stale.
    pub(super) fn begin_repair(&mut self, mut engine: Engine) {
        engine.repeat_superblock(self.copies.former_end(&engine.superblock, &self.options.devices));
        self.engine = Some(engine);
        self.stage = Stage::Repair;
    }

    pub(super) fn after_repair(&mut self) -> Result<bool, MapperError> {
        let engine = self.engine.as_mut().ok_or(MapperError::Internal("no engine"))?;
        if !engine.superblock_written() {
            return Ok(false);
        }
        if let Some(engine) = self.engine.take() {
            self.begin_super(engine);
        }
        Ok(true)
    }

    /// R14, R15: the ring learns the next id, then the superblock with it and the new epoch is
    /// durable, then the ring's id is that one. No log block of the epoch before.
    pub(super) fn begin_super(&mut self, mut engine: Engine) {
        if self.options.mode == OpenMode::ReadOnly {
            self.engine = Some(engine);
            self.stage = Stage::Done;
            return;
        }
        if active(Mutation::RingEmptiedAtReplay) {
            engine.forget_ring();
        }
        if !active(Mutation::NextNotWritten) {
            engine.pool().ring.set_next(self.options.open_id);
        }
        let present = engine.superblock.clone();
        engine.superblock.epoch = Epoch(present.epoch.0 + 1);
        let claimed = if self.options.tuning.claimed { CLAIM_PAGE } else { 0 };
        let next = Superblock {
            compat: present.compat | claimed,
            epoch: Epoch(present.epoch.0 + 1),
            clean: false,
            open_id: self.options.open_id,
            boot_id: self.options.boot_id,
            node: self.options.node,
            ..present
        };
        engine.write_superblock(next);
        engine.opened = active(Mutation::EpochLate);
        if engine.opened {
            engine.pool().want_commit();
        }
        self.engine = Some(engine);
        self.stage = Stage::Super;
    }

    pub(super) fn after_super(&mut self) -> Result<bool, MapperError> {
        let engine = self.engine.as_mut().ok_or(MapperError::Internal("no engine"))?;
        if !engine.superblock_written() {
            return Ok(false);
        }
        engine.pool().ring.set_current(self.options.open_id);
        engine.opened = true;
        engine.pool().want_commit();
        self.stage = Stage::Commit;
        Ok(true)
    }

    /// R13: the changes from the ring are committed like any others, before the first request.
    pub(super) fn after_commit(&mut self) -> Result<bool, MapperError> {
        let engine = self.engine.as_mut().ok_or(MapperError::Internal("no engine"))?;
        if engine.is_recovered() {
            if self.report.log_changes + self.report.ring_changes > 0 {
                // The log is written into the trees soon, while the pool serves.
                engine.want_checkpoint();
            }
            self.stage = Stage::Done;
        }
        Ok(false)
    }
}
