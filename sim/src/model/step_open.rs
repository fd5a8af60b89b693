//! Opening: fence, flush, load, replay, restamp, recovery commit, serve (R11-R15).

use super::device::{PAGE0, SB0};
use super::log::{Block, Ring, Superblock};
use super::map::{NONE, Record};
use super::mutation::Mutation;
use super::oracle::FaultKind;
use super::parts::{Pending, Phase};
use super::state::{World, ix};

impl World {
    /// Takes the open one step further.
    pub fn advance_open(&mut self) -> bool {
        let Phase::Open(step) = self.phase else { return false };
        match step {
            0 => self.fence(),
            1 => {
                if !self.is(Mutation::NoOpenFlush) {
                    self.dev.flush_all();
                }
            }
            2 => self.load(),
            3 => self.take_ring(),
            4 => self.stamp_next(),
            5 => self.send_open_super(),
            6 => self.land_open_super(),
            7 => self.open_super_durable(),
            _ => return self.stamp_current(),
        }
        self.phase = Phase::Open(step + 1);
        true
    }

    // R11: every IO of the previous owner ends before anything is read.
    fn fence(&mut self) {
        if self.is(Mutation::NoFence) {
            return;
        }
        while !self.late.is_empty() {
            self.land_late(0);
        }
    }

    fn load(&mut self) {
        let copy = |c: u8| self.supers.all()[usize::from(self.dev.get(SB0 + c))];
        let (a, b) = (copy(0), copy(1));
        let newest = u8::from(b.seq > a.seq);
        let sb = if newest == 1 { b } else { a };
        let place = |sb: &Superblock| if sb.seq == 0 { NONE } else { sb.place };
        if sb.seq == 0 || self.dev.get(PAGE0 + sb.place) != sb.image {
            self.fail(FaultKind::Unreadable, newest, 0, sb.seq);
            return;
        }
        let image = self.images.all()[usize::from(sb.image)];
        self.meta.copy = newest;
        self.meta.places = [place(&a), place(&b)];
        self.meta.sb = sb;
        self.meta.head_seq = sb.head_seq;
        self.meta.epoch = sb.epoch + 1;
        self.map = image.map;
        self.ckpt.last = image.lsn;
        self.durable = image.lsn;
        self.replay_wal(image.lsn, &sb);
        self.last_lsn = self.durable;
        self.recount();
    }

    fn replay_wal(&mut self, start: u16, sb: &Superblock) {
        let (mut seq, mut prev, mut epoch) = (sb.head_seq, sb.head_hash, 0);
        for _ in 0..self.cfg.wal {
            let block = self.blocks.all()[usize::from(self.dev.get(self.wal_cell(seq)))];
            if block.seq != seq || !self.chains(&block, prev, epoch) {
                break;
            }
            for r in block.records.all() {
                if r.lsn > start || self.is(Mutation::LsnIgnored) {
                    self.map.apply(r, self.cfg.subs);
                    self.durable = self.durable.max(r.lsn);
                }
            }
            (seq, prev, epoch) = (seq + 1, block.hash, block.epoch);
        }
        self.meta.next_seq = seq;
        self.meta.last_hash = prev;
    }

    fn chains(&self, block: &Block, prev: u32, epoch: u16) -> bool {
        match self.mutation {
            Mutation::NoChainNoEpoch => true,
            Mutation::ChainNoEpoch => block.prev == prev,
            _ => block.prev == prev && block.epoch >= epoch,
        }
    }

    // R14: a ring counts only if it carries the superblock's open id.
    fn take_ring(&mut self) {
        let id = self.meta.sb.open_id;
        let known = self.ring.current == id || self.ring.next == id;
        let stamped = known || self.is(Mutation::NoStamp);
        self.meta.ring_used = self.ring.present && !self.ring.poisoned && stamped;
        if !self.meta.ring_used {
            self.lives += 1;
            self.ring = Ring { life: self.lives, ..Ring::fresh() };
            return;
        }
        if !self.is(Mutation::NoRestamp) {
            self.ring.current = id;
        }
        let durable_map = self.map;
        self.replay_ring();
        if self.is(Mutation::ReplayDiffOnly) {
            for entry in durable_map.entries.as_flattened() {
                for p in entry.extents() {
                    let still = |e: &super::map::Entry| e.names(p);
                    if !self.map.entries.as_flattened().iter().any(still) {
                        self.pending.push(Pending { p, lsn: self.last_lsn, time: self.now });
                    }
                }
            }
        }
        if self.is(Mutation::RingEmptied) {
            self.ring.queues.iter_mut().for_each(super::list::List::clear);
        }
        if self.is(Mutation::ReplayIsCommitted) {
            self.durable = self.last_lsn;
            self.commit.queue = NONE;
            self.durable_rose();
        }
    }

    // R6 and R13: all rings in one LSN order, and the replayed changes are not committed.
    fn replay_ring(&mut self) {
        let start = self.durable;
        let mut todo = super::list::List::<Record, 24>::new(super::map::NO_RECORD);
        for queue in &self.ring.queues {
            for r in queue.all() {
                if r.lsn > start || self.is(Mutation::LsnIgnored) {
                    todo.push(*r);
                }
            }
        }
        if !self.is(Mutation::RingPerQueue) {
            todo.all_mut().sort_unstable_by_key(|r| r.lsn);
        }
        let track = !matches!(self.mutation, Mutation::ReplayNoPending | Mutation::ReplayDiffOnly);
        for r in todo.all() {
            self.make_visible(r, track);
            self.dirty.push(*r);
            self.last_lsn = self.last_lsn.max(r.lsn);
        }
        for queue in &mut self.ring.queues {
            queue.retain(|r| r.lsn > start);
        }
    }

    fn stamp_next(&mut self) {
        let counter = self.is(Mutation::CounterId);
        self.meta.new_id = if counter { self.meta.sb.open_id + 1 } else { self.next_id };
        self.next_id += 1;
        if !self.is(Mutation::NextLeftOut) {
            self.ring.next = self.meta.new_id;
        }
    }

    fn send_open_super(&mut self) {
        if !self.supers.fits(2) {
            self.exhausted = true;
        }
        let sb = Superblock {
            seq: self.meta.sb.seq + 1,
            epoch: self.meta.epoch,
            open_id: self.meta.new_id,
            ..self.meta.sb
        };
        if !self.exhausted {
            self.meta.new_super = self.add_super(sb);
        }
        self.meta.places[ix(self.meta.copy ^ 1)] = sb.place;
        self.meta.sb = sb;
        self.meta.copy ^= 1;
    }

    fn land_open_super(&mut self) {
        let write = (SB0 + self.meta.copy, self.meta.new_super);
        if self.is(Mutation::EpochNotAwaited) {
            self.late.push((write.0, write.1, false));
        } else {
            self.dev.put(write.0, write.1);
        }
    }

    fn open_super_durable(&mut self) {
        if !self.is(Mutation::EpochNotAwaited) {
            self.dev.persist(SB0 + self.meta.copy);
        }
    }

    fn stamp_current(&mut self) -> bool {
        self.ring.current = self.meta.new_id;
        self.phase = Phase::Recover;
        self.start_service();
        true
    }

    /// Serves, if nothing has to be committed first.
    pub fn start_service(&mut self) {
        if self.phase != Phase::Recover {
            return;
        }
        let wait = self.cfg.recovery_commit && self.durable < self.last_lsn;
        let busy = self.commit.state != super::parts::CommitState::Idle;
        if !wait && !busy {
            self.phase = Phase::Serve;
            self.recovered();
        }
    }
}
