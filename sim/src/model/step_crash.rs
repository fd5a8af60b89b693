//! Kill, power loss, flush error, and the late writes of a dead owner.

use super::device::{FLUSH_CKPT, FLUSH_COMMIT, FLUSH_SHORT, PAGE0, SB0, data_cell};
use super::log::Ring;
use super::mutation::Mutation;
use super::oracle::Promise;
use super::parts::{CkptState, CommitState, OpState, Phase};
use super::state::{World, ix};

impl World {
    // Writes in flight outlive their process.
    fn orphan_writes(&mut self) {
        for op in self.ops {
            if op.state != OpState::Write {
                continue;
            }
            for s in 0..self.cfg.subs {
                let torn = self.may_tear(&op);
                if op.mask & (1 << s) != 0 {
                    self.late.push((data_cell(op.p, s), op.value, torn));
                } else if op.copied & (1 << s) != 0 {
                    self.late.push((data_cell(op.p, s), op.copy[ix(s)], torn));
                }
            }
        }
        if self.commit.state == CommitState::WalSent {
            for (i, block) in self.commit.blocks.all().iter().enumerate() {
                if self.commit.landed & (1 << i) == 0 {
                    self.late.push((block.0, block.1, false));
                }
            }
        }
        if self.ckpt.state == CkptState::PagesSent {
            self.late.push((PAGE0 + self.ckpt.place, self.ckpt.index, false));
        }
        if self.ckpt.state == CkptState::SuperSent {
            self.late.push((SB0 + (self.meta.copy ^ 1), self.ckpt.super_index, false));
        }
        if self.phase == Phase::Open(6) && !self.exhausted {
            self.late.push((SB0 + self.meta.copy, self.meta.new_super, false));
        }
    }

    fn die(&mut self) -> bool {
        if !self.late.fits(24) {
            self.exhausted = true;
            return false;
        }
        self.orphan_writes();
        self.forget_process();
        true
    }

    /// The process is killed.
    pub fn kill(&mut self) -> bool {
        if !self.die() {
            return false;
        }
        self.phase = Phase::Open(0);
        true
    }

    /// The machine loses power; `pick(n)` chooses among `n` outcomes wherever there are several.
    pub fn power_loss(&mut self, mut pick: impl FnMut(u8) -> u8) -> bool {
        if !self.die() {
            return false;
        }
        while !self.late.is_empty() {
            if pick(2) == 1 {
                self.land_late(0);
            } else {
                self.late.remove(0);
            }
        }
        self.dev.lose(pick);
        self.ring = Ring::absent();
        self.aside = Ring::absent();
        self.promise = Promise::Flushed;
        self.phase = Phase::Open(0);
        true
    }

    /// A flush in flight fails; the device drops its cache.
    pub fn flush_error(&mut self, sender: usize, pick: impl FnMut(u8) -> u8) -> bool {
        let in_flight = match sender {
            FLUSH_COMMIT => self.commit.state == CommitState::FlushSent,
            FLUSH_CKPT => self.ckpt.state == CkptState::FlushSent,
            FLUSH_SHORT => self.ops.iter().any(|o| o.state == OpState::ShortFlush),
            _ => false,
        };
        let running = matches!(self.phase, Phase::Serve | Phase::Recover);
        if !running || !in_flight || !self.late.fits(24) {
            return false;
        }
        self.dev.lose(pick);
        if self.is(Mutation::FlushErrorRetried) {
            return self.retry_flush(sender);
        }
        self.orphan_writes();
        // In this order: first the ring, so that nothing can replay it any more (R8).
        self.ring.poisoned = !self.is(Mutation::FailedRingReplayed);
        self.promise = Promise::Flushed;
        self.phase = Phase::Failed;
        true
    }

    fn retry_flush(&mut self, sender: usize) -> bool {
        match sender {
            FLUSH_COMMIT => self.advance_commit(),
            FLUSH_CKPT => self.advance_ckpt(),
            _ => {
                let short = self.ops.iter().position(|o| o.state == OpState::ShortFlush);
                short.is_some_and(|slot| self.advance(slot))
            }
        }
    }

    /// After a flush error: give everything up and open again.
    pub fn reopen(&mut self) -> bool {
        if self.phase != Phase::Failed {
            return false;
        }
        self.forget_process();
        self.phase = Phase::Open(0);
        true
    }

    /// A write of a dead owner lands.
    pub fn land_late(&mut self, i: u8) -> bool {
        if ix(i) >= self.late.len() {
            return false;
        }
        let (cell, value, torn) = self.late.remove(ix(i));
        if torn {
            self.dev.put_unseen(cell, value);
        } else {
            self.dev.put(cell, value);
        }
        true
    }

    /// Between two processes: the ring is moved out of the way.
    pub fn set_aside(&mut self) -> bool {
        if self.phase != Phase::Open(0) || !self.ring.present || self.aside.present {
            return false;
        }
        self.aside = self.ring;
        self.ring = Ring::absent();
        self.doubt = true;
        true
    }

    /// Between two processes: the ring set aside comes back in place of the present one.
    pub fn bring_back(&mut self) -> bool {
        if self.phase != Phase::Open(0) || !self.aside.present {
            return false;
        }
        std::mem::swap(&mut self.ring, &mut self.aside);
        self.doubt = true;
        true
    }
}
