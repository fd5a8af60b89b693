//! Profiles that favour devices which leave the pool or shrink, or are evened out.

use blockd_mapper::mutation::Mutation;

use super::profile::Profile;

impl Profile {
    /// Raises the probability of the events that show the absence of a rule of moves.
    pub(super) fn bend_to_moves(&mut self, mutation: Mutation, random: &mut fastrand::Rng) {
        self.bend_to_evacuation(random);
        match mutation {
            Mutation::MoveUndrained => {
                self.bend_to_moves_under_writes([8, 1, 0, 0, 0, 0, 5, 5, 0, 0, 0, 40, 0, 0]);
            }
            Mutation::TargetNotHeld => {
                self.bend_to_moves_under_writes([5, 8, 0, 40, 20, 0, 5, 5, 0, 0, 0, 30, 0, 0]);
                // Clients come between two steps of the engine.
                self.pace = [60, 30, 2, 10, 10];
                self.composite = false;
                self.controls[10] = 0;
            }
            Mutation::ShrunkEarly | Mutation::LeavingGivenOut => {
                self.shrinks = 0.9;
                self.controls[11] = 30;
            }
            Mutation::MovesForgotten => {
                self.bend_to_moves_under_writes([10, 8, 0, 0, 0, 0, 5, 5, 0, 0, 0, 60, 0, 0]);
                self.rebalances = 0.9;
            }
            _ => {}
        }
        // Rules of all moves show themselves with either.
        let of_all = ["M1", "M2", "M3", "M5", "M6"].contains(&mutation.id());
        if of_all && random.bool() {
            self.rebalances = 1.0;
        }
    }

    /// Devices that leave or shrink, or stay after all, or are evened out, under writes, snapshots
    /// and crashes.
    pub fn bend_to_evacuation(&mut self, random: &mut fastrand::Rng) {
        self.composite = random.u8(..3) > 0;
        // The first has hardly room for data, and little for pages.
        (self.wal_extents, self.reserve_extents) = (1, 1);
        self.devices = vec![random.u64(8..14), random.u64(12..40), random.u64(90..120)];
        if random.bool() {
            self.devices.push(random.u64(8..32));
        }
        self.evacuation_rate = [1 << 26, 1 << 30, 1 << 40][random.usize(..3)];
        self.control = 0.1;
        self.controls = [5, 5, 1, 15, 8, 3, 10, 10, 0, 3, 1, 12, 0, 0];
        self.max_volumes = random.usize(2..=4);
        self.volume_extents = [2, 4, 8, 8, 600][random.usize(..5)];
        self.operations = 900;
        self.depth = [1, 4, 16][random.usize(..3)];
        self.size_bits = random.u32(3..=7);
        self.mix = [20, 40, 5, 1, 5];
        self.crash = [0.004, 0.015][random.usize(..2)];
        self.pace = [30, 30, 30, 10, 10];
        self.shrinks = [0.0, 0.5, 0.8][random.usize(..3)];
        self.rebalances = [0.0, 0.3, 0.7][random.usize(..3)];
    }

    /// A few extents that are written all the time, with IO that is answered late.
    fn bend_to_moves_under_writes(&mut self, controls: [u32; 14]) {
        self.controls = controls;
        self.volume_extents = 2;
        self.max_volumes = 3;
        self.hot = 0.9;
        self.depth = 16;
        self.late = 0.2;
        self.mix = [10, 60, 0, 0, 2];
        self.evacuation_rate = 1 << 40;
        self.shrinks = 0.0;
        self.crash = 0.002;
    }
}
