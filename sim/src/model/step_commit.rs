//! The committer: capture, data flush, WAL, answer (R1-R3).

use super::device::{FLUSH_COMMIT, WAL0};
use super::list::List;
use super::log::Block;
use super::map::{NONE, Record};
use super::mutation::Mutation;
use super::parts::{CommitState, OpState, Phase, StructState};
use super::state::{World, ix};

impl World {
    /// Takes the commit one step further, or starts one.
    pub fn advance_commit(&mut self) -> bool {
        if !matches!(self.phase, Phase::Serve | Phase::Recover) {
            return false;
        }
        let wal_first = self.is(Mutation::WalBeforeFlush);
        match self.commit.state {
            CommitState::Idle => return self.start_commit(),
            CommitState::Captured if wal_first || self.commit.solo => return self.send_wal(),
            CommitState::Captured => self.send_flush(),
            CommitState::FlushSent => {
                self.dev.flush_done(FLUSH_COMMIT);
                self.after_flush();
            }
            CommitState::Flushed => return self.send_wal(),
            CommitState::WalSent => {
                let all = (1_u8 << self.commit.blocks.len()) - 1;
                if self.commit.landed != all {
                    return false;
                }
                for (cell, _) in self.commit.blocks.all() {
                    self.dev.persist(*cell);
                }
                self.commit.state = CommitState::WalDurable;
            }
            CommitState::WalDurable if wal_first => self.send_flush(),
            CommitState::WalDurable => self.finish_commit(),
        }
        true
    }

    fn start_commit(&mut self) -> bool {
        let waiting = self.ops.iter().position(|o| o.state == OpState::AwaitCommit);
        if self.dirty.is_empty() && waiting.is_none() {
            return false;
        }
        self.commit.state = CommitState::Captured;
        self.commit.blocks.clear();
        self.commit.records.clear();
        self.commit.cut = self.durable;
        self.commit.solo = false;
        self.commit.queue = NONE;
        if self.is(Mutation::OwnQueueOnly) {
            self.commit.queue = waiting.map_or(0, |slot| self.ops[slot].q);
        }
        let fua = self.ops.iter().position(|o| o.state == OpState::AwaitCommit && o.fua);
        match fua {
            Some(slot) if self.is(Mutation::FuaPartialCommit) => self.capture_one(slot),
            _ if self.is(Mutation::CaptureLate) => {}
            _ => self.capture(),
        }
        true
    }

    // R7b removed: one entry's record, without the data flush that its other bits need.
    fn capture_one(&mut self, slot: usize) {
        let op = self.ops[slot];
        for r in self.dirty.all() {
            if (r.v, r.e) == (op.v, op.e) && !r.is_structure() {
                self.commit.records.clear();
                self.commit.records.push(*r);
            }
        }
        self.commit.solo = true;
        self.ops[slot].served = true;
    }

    // The cut: all records at or below one LSN, of every queue (R2).
    fn capture(&mut self) {
        let mut cut = self.last_lsn;
        if !self.is(Mutation::CutOverUnpublished) {
            for op in &self.ops {
                if op.state == OpState::HasLsn {
                    cut = cut.min(op.record.lsn - 1);
                }
            }
            if self.sop.state == StructState::HasLsn {
                cut = cut.min(self.sop.record.lsn - 1);
            }
        }
        let queue = self.commit.queue;
        let mut chosen = self.dirty;
        chosen.retain(|r| r.lsn <= cut && (queue == NONE || r.q == queue));
        chosen.all_mut().sort_unstable_by_key(|r| r.lsn);
        let most = ix(self.cfg.wal) * self.cfg.per_block;
        if chosen.len() > most {
            cut = chosen.all()[most].lsn - 1;
            chosen.retain(|r| r.lsn <= cut);
        }
        self.commit.cut = cut;
        self.merge(&chosen);
        for op in &mut self.ops {
            if op.state == OpState::AwaitCommit && op.need <= cut {
                op.served |= queue == NONE || op.q == queue;
            }
        }
        if self.is(Mutation::TrimAtCapture) {
            for ring in &mut self.ring.queues {
                ring.retain(|r| r.lsn > cut);
            }
        }
    }

    // Of several map records of one entry only the last is written, but never across a structure
    // record: that reads the entry as it was at its own LSN (R6).
    fn merge(&mut self, chosen: &List<Record, 24>) {
        let over_structure = self.is(Mutation::MergeOverStructure);
        for (at, r) in chosen.all().iter().enumerate() {
            let later = &chosen.all()[at + 1..];
            let stop = later.iter().position(|n| n.is_structure() && !over_structure);
            let reach = &later[..stop.unwrap_or(later.len())];
            let same = |n: &Record| !n.is_structure() && (n.v, n.e) == (r.v, r.e);
            if r.is_structure() || !reach.iter().any(same) {
                self.commit.records.push(*r);
            }
        }
    }

    fn send_flush(&mut self) {
        self.dev.flush_sent(FLUSH_COMMIT);
        self.commit.state = CommitState::FlushSent;
    }

    /// The data flush of the commit ended.
    pub fn after_flush(&mut self) {
        if self.is(Mutation::WalBeforeFlush) {
            self.finish_commit();
            return;
        }
        self.commit.state = CommitState::Flushed;
        if self.is(Mutation::CaptureLate) {
            self.capture();
        }
        if self.is(Mutation::FlushAnsweredEarly) {
            self.answer_served();
        }
    }

    fn send_wal(&mut self) -> bool {
        let records = self.commit.records;
        let n = records.len().div_ceil(self.cfg.per_block);
        if n == 0 {
            self.commit.state = CommitState::WalDurable;
            return true;
        }
        let used = ix(self.wal_used());
        if used + n > ix(self.cfg.wal) {
            return false;
        }
        if !self.blocks.fits(n) {
            self.exhausted = true;
            return false;
        }
        for part in records.all().chunks(self.cfg.per_block) {
            let (seq, prev) = (self.meta.next_seq, self.meta.last_hash);
            let with_epoch = !self.is(Mutation::ChainNoEpoch);
            let block = Block::new(seq, self.meta.epoch, prev, part, with_epoch);
            let index = self.blocks.len().to_le_bytes()[0];
            self.blocks.push(block);
            self.commit.blocks.push((self.wal_cell(seq), u16::from(index)));
            self.meta.next_seq += 1;
            self.meta.last_hash = block.hash;
        }
        self.commit.landed = 0;
        self.commit.state = CommitState::WalSent;
        true
    }

    /// WAL blocks that may not be overwritten.
    pub fn wal_used(&self) -> u8 {
        (self.meta.next_seq - self.meta.head_seq).to_le_bytes()[0]
    }

    /// The cell of a WAL block.
    pub fn wal_cell(&self, seq: u16) -> u8 {
        WAL0 + (seq % u16::from(self.cfg.wal)).to_le_bytes()[0]
    }

    /// WAL block `i` of the commit reaches the device's cache.
    pub fn land_wal(&mut self, i: u8) -> bool {
        let bit = 1_u8 << i;
        let sent = self.commit.state == CommitState::WalSent;
        if !sent || ix(i) >= self.commit.blocks.len() || self.commit.landed & bit != 0 {
            return false;
        }
        let (cell, index) = self.commit.blocks.all()[ix(i)];
        self.dev.put(cell, index);
        self.commit.landed |= bit;
        true
    }

    fn finish_commit(&mut self) {
        self.commit.state = CommitState::Idle;
        if !self.commit.solo {
            self.durable = self.durable.max(self.commit.cut);
        }
        self.answer_served();
        self.durable_rose();
    }

    fn answer_served(&mut self) {
        for slot in 0..self.ops.len() {
            let op = self.ops[slot];
            if op.state == OpState::AwaitCommit && op.served {
                self.answer_flush(slot);
            }
        }
    }

    /// Handles a rise of the durable LSN: trims the ring, and gives waiting answers.
    pub fn durable_rose(&mut self) {
        let durable = self.durable;
        let queue = self.commit.queue;
        let kept = |r: &Record| r.lsn > durable || (queue != NONE && r.q != queue);
        for ring in &mut self.ring.queues {
            ring.retain(kept);
        }
        self.dirty.retain(kept);
        if self.sop.state == StructState::Visible && self.sop.record.lsn <= durable {
            self.answer_structure();
        }
        self.answer_retries();
    }
}
