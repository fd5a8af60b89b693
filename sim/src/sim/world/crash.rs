//! Process death and loss of power.

use blockd_mapper::format::ring::{W_CURRENT, W_POISONED};

use super::super::core::Ring;
use super::super::disk::Keep;
use super::super::marks::Mark;
use super::{Phase, RingHanded, World, ring_words};

/// How the host stops.
#[derive(Clone, Debug)]
pub enum Crash {
    /// The process dies; its ring stays.
    Kill,
    /// Power is lost; per device, the surviving part of its cache.
    Power(Vec<Keep>),
}

impl World {
    /// A crash of the profile's kind.
    pub(super) fn random_crash(&mut self) {
        let power = self.core.profile.power;
        let crash =
            if self.core.chance(power) { Crash::Power(self.random_keeps()) } else { Crash::Kill };
        self.crash(&crash);
    }

    /// Draws the writes that survive on each device. Caches are lost one by one: in half of the
    /// cases all of one device's is kept and all of the others' lost, or the reverse. Draws that
    /// are alike on every device seldom show a flush that went to one of them only.
    fn random_keeps(&mut self) -> Vec<Keep> {
        let count = self.core.disks.len();
        if count < 2 || self.core.random.bool() {
            return (0..count).map(|_| self.random_keep()).collect();
        }
        let (odd, keeps) = (self.core.random.usize(..count), self.core.random.bool());
        let keep = |kept| if kept { Keep::Everything } else { Keep::Nothing };
        (0..count).map(|device| keep((device == odd) == keeps)).collect()
    }

    fn random_keep(&mut self) -> Keep {
        let random = &mut self.core.random;
        let share = [0.1, 0.5, 0.9][random.usize(..3)];
        match random.u8(..8) {
            0 => Keep::Nothing,
            1 => Keep::Everything,
            2..=4 => Keep::Some(share),
            _ => {
                self.core.marks.hit(Mark::PowerTorn);
                Keep::Torn(share)
            }
        }
    }

    /// Stops the host in this way, whatever it is doing.
    pub fn crash(&mut self, crash: &Crash) {
        self.core.trace.note(|| format!("CRASH {crash:?}"));
        let opening = matches!(self.phase, Phase::Opening(_));
        let mut lost = self.core.flush_failed || self.core.metadata_failed;
        if let Phase::Up(up) = &self.phase {
            lost |= up.pool.failure().is_some();
        }
        self.abandon();
        self.prediction = None;
        self.core.origins.clear();
        self.core.release_all();
        let image = self.core.ring.image();
        self.core.old_rings.push(image);
        if self.core.old_rings.len() > 4 {
            self.core.old_rings.remove(0);
        }
        match crash {
            Crash::Kill => self.kill(opening, lost),
            Crash::Power(keep) => self.lose_power(opening, keep),
        }
        self.core.flush_failed = false;
        self.core.metadata_failed = false;
    }

    fn kill(&mut self, opening: bool, lost: bool) {
        self.core.marks.hit(if opening { Mark::KillRecovery } else { Mark::Kill });
        for disk in &mut self.core.disks {
            disk.lose_owner();
        }
        if lost {
            // A failed flush or metadata write: the state is the same as after a power loss (R8).
            self.core.oracle.power_lost();
            self.durable = true;
        } else {
            self.core.oracle.killed();
        }
        self.killed = true;
        let wrong = self.core.profile.wrong_ring;
        if self.right_ring.is_none() && self.core.chance(wrong) {
            self.hand_wrong_ring();
        }
        if self.core.profile.silent > 0.0 && !self.core.damaged && self.core.chance(0.2) {
            let what = self.core.damage();
            self.core.trace.note(|| format!("{what:?}"));
        }
    }

    fn lose_power(&mut self, opening: bool, keep: &[Keep]) {
        self.core.marks.hit(if opening { Mark::PowerRecovery } else { Mark::Power });
        if self.killed {
            self.core.marks.hit(Mark::PowerAfterKill);
        }
        let random = &mut self.core.random;
        for (disk, keep) in self.core.disks.iter_mut().zip(keep) {
            disk.lose_power(keep, random);
        }
        self.core.oracle.power_lost();
        self.core.boot = self.core.boot.wrapping_add(1);
        self.killed = false;
        self.durable = true;
        self.right_ring = None;
        self.ring_handed = RingHanded::Right;
        self.accept_loss = false;
        let words = ring_words(&self.core.profile);
        self.core.ring = match self.core.old_rings.last() {
            // A ring of another boot means nothing.
            Some(image) if self.core.random.u8(..4) == 0 => Ring::of(image.iter().copied()),
            _ => Ring::of(std::iter::repeat_n(0, words)),
        };
    }

    /// Sets the ring aside and puts another one in its place: none, an older one, or another
    /// pool's.
    fn hand_wrong_ring(&mut self) {
        let words = ring_words(&self.core.profile);
        let right = std::sync::Arc::clone(&self.core.ring);
        let present = right.image();
        // A copy of the same open's ring from before a flush failed, in the place of the poisoned
        // one, is no mistake that a host makes: what names it in memory is the ring itself.
        let is_handed = |image: &&Vec<u64>| {
            let unpoisoned = present[W_POISONED] != 0 && image[W_CURRENT] == present[W_CURRENT];
            **image != present && !unpoisoned
        };
        let older: Vec<Vec<u64>> = self.core.old_rings.iter().filter(is_handed).cloned().collect();
        let choice = self.core.random.usize(..3);
        if choice == 1 && !older.is_empty() {
            let image = older[self.core.random.usize(..older.len())].clone();
            self.core.ring = Ring::of(image);
            self.core.marks.hit(Mark::RingStale);
        } else if choice == 2 {
            let ring = Ring::of(std::iter::repeat_n(0, words));
            let (slots, capacity) =
                (self.core.profile.workers + 1, self.core.profile.ring_capacity);
            let memory = std::sync::Arc::clone(&ring);
            let boot = self.core.boot_id();
            let made =
                blockd_mapper::ring::DeltaRing::format(memory, &[7; 16], &boot, slots, capacity);
            drop(made);
            self.core.ring = ring;
            self.core.marks.hit(Mark::RingForeign);
        } else {
            self.core.ring = Ring::of(std::iter::repeat_n(0, words));
            self.core.marks.hit(Mark::RingMissing);
        }
        self.core.trace.note(|| "the ring is another one".into());
        self.right_ring = Some(right);
        self.ring_handed = RingHanded::Wrong;
    }
}
