//! The checkpointer: pages, flush, superblock, and only then truncation (R17).

use super::device::{FLUSH_CKPT, PAGE0, PLACES, SB0};
use super::log::{Image, Superblock};
use super::mutation::Mutation;
use super::parts::{CkptState, CommitState, OpState, Phase, StructState};
use super::state::{World, ix};

impl World {
    /// Takes the checkpoint one step further, or starts one.
    pub fn advance_ckpt(&mut self) -> bool {
        if !matches!(self.phase, Phase::Serve | Phase::Recover) {
            return false;
        }
        match self.ckpt.state {
            CkptState::Idle => return self.start_ckpt(),
            CkptState::Captured => self.send_pages(),
            CkptState::PagesSent => {
                self.dev.put(PAGE0 + self.ckpt.place, self.ckpt.index);
                self.ckpt.state = CkptState::PagesCached;
            }
            CkptState::PagesCached if self.is(Mutation::CheckpointNoFlush) => {
                self.ckpt.state = CkptState::Flushed;
            }
            CkptState::PagesCached => {
                self.dev.flush_sent(FLUSH_CKPT);
                self.ckpt.state = CkptState::FlushSent;
            }
            CkptState::FlushSent => {
                self.dev.flush_done(FLUSH_CKPT);
                self.ckpt.state = CkptState::Flushed;
            }
            CkptState::Flushed => self.send_super(),
            CkptState::SuperSent => {
                self.dev.put(SB0 + (self.meta.copy ^ 1), self.ckpt.super_index);
                self.ckpt.state = CkptState::SuperCached;
            }
            CkptState::SuperCached => self.finish_ckpt(),
        }
        true
    }

    fn start_ckpt(&mut self) -> bool {
        if !self.supers.fits(2) || !self.images.fits(1) {
            self.exhausted = true;
            return false;
        }
        let changing = |s| matches!(s, OpState::HasLsn | OpState::Half);
        let unpublished =
            self.ops.iter().any(|o| changing(o.state)) || self.sop.state == StructState::HasLsn;
        let nothing_new = self.wal_used() == 0 && self.last_lsn == self.ckpt.last;
        let only_if_new = self.is(Mutation::CheckpointOnlyIfNew);
        if unpublished || nothing_new || (only_if_new && self.last_lsn == self.ckpt.last) {
            return false;
        }
        self.ckpt.image = Image { map: self.map, lsn: self.last_lsn };
        self.ckpt.head = (self.meta.next_seq, self.meta.last_hash);
        self.ckpt.state = CkptState::Captured;
        if self.is(Mutation::TruncateEarly) {
            self.meta.head_seq = self.ckpt.head.0;
        }
        true
    }

    // R17a removed: half of the map is as it is now, not as it was at the LSN.
    fn blur(&mut self) {
        let now = self.map;
        for v in [1, 3] {
            self.ckpt.image.map.entries[v] = now.entries[v];
            self.ckpt.image.map.volumes[v] = now.volumes[v];
        }
    }

    fn send_pages(&mut self) {
        if self.is(Mutation::FuzzyCheckpoint) {
            self.blur();
        }
        self.ckpt.index = u16::from(self.images.len().to_le_bytes()[0]);
        self.images.push(self.ckpt.image);
        let [a, b] = self.meta.places;
        let free = (0..PLACES).find(|place| *place != a && *place != b);
        self.ckpt.place = match free {
            Some(place) if !self.is(Mutation::CheckpointInPlace) => place,
            _ => self.meta.sb.place,
        };
        self.ckpt.state = CkptState::PagesSent;
    }

    fn send_super(&mut self) {
        let sb = Superblock {
            seq: self.meta.sb.seq + 1,
            place: self.ckpt.place,
            image: self.ckpt.index,
            head_seq: self.ckpt.head.0,
            head_hash: self.ckpt.head.1,
            ..self.meta.sb
        };
        self.ckpt.super_index = self.add_super(sb);
        self.meta.places[ix(self.meta.copy ^ 1)] = self.ckpt.place;
        self.ckpt.state = CkptState::SuperSent;
        if self.is(Mutation::DurableEarly) {
            self.durable = self.durable.max(self.ckpt.image.lsn);
            self.durable_rose();
        }
    }

    /// Adds a superblock to the arena.
    pub fn add_super(&mut self, sb: Superblock) -> u16 {
        let index = u16::from(self.supers.len().to_le_bytes()[0]);
        self.supers.push(sb);
        index
    }

    fn finish_ckpt(&mut self) {
        let index = self.ckpt.super_index;
        self.meta.copy ^= 1;
        self.dev.persist(SB0 + self.meta.copy);
        self.meta.sb = self.supers.all()[usize::from(index)];
        self.meta.head_seq = self.meta.sb.head_seq;
        self.ckpt.last = self.ckpt.image.lsn;
        self.ckpt.state = CkptState::Idle;
        self.durable = self.durable.max(self.ckpt.image.lsn);
        self.durable_rose();
    }

    /// True if the commit waits for WAL space that only a checkpoint can give.
    pub fn wal_is_full(&self) -> bool {
        let n = self.commit.records.len().div_ceil(self.cfg.per_block);
        matches!(self.commit.state, CommitState::Captured | CommitState::Flushed)
            && ix(self.wal_used()) + n > ix(self.cfg.wal)
    }
}
