//! Profiles that favour the events which show the absence of one rule, so that rare ones are found
//! quickly.

use blockd_mapper::mutation::Mutation;

use super::profile::{Profile, Rhythm};

impl Profile {
    /// Raises the probability of the events that show the absence of a rule.
    pub fn bend(&mut self, mutation: Mutation, random: &mut fastrand::Rng) {
        // Every mutation gets histories as they come, too.
        if random.u8(..4) == 0 {
            return;
        }
        self.without_errors();
        if mutation != Mutation::FlushErrorIgnored && mutation != Mutation::RingAfterFailure {
            self.flush_error = 0.0;
        }
        match mutation {
            Mutation::CommitFlushesFirst => self.bend_to_devices(random),
            Mutation::CheckpointFlushesFirst => {
                self.bend_to_devices(random);
                self.bend_to_checkpoints(random);
            }
            Mutation::ReleaseUndurable => self.bend_to_releases(random),
            Mutation::LogBeforeData
            | Mutation::CaptureLate
            | Mutation::CaptureOneSlot
            | Mutation::AnswerBeforeLog
            | Mutation::ShortFlushDuringCommit
            | Mutation::FlushJoinsRunning
            | Mutation::FuaWithoutCommit
            | Mutation::FuaJoinsCommit
            | Mutation::NoOpeningFlush => self.bend_to_power(random),
            Mutation::ReuseAtOnce
            | Mutation::ReuseAtCapture
            | Mutation::ReuseUndrained
            | Mutation::DrainOneEpoch
            | Mutation::DecrementAtOnce
            | Mutation::RingEmptiedAtReplay
            | Mutation::ReplayedIsDurable => self.bend_to_reuse(random),
            Mutation::FlushErrorIgnored | Mutation::RingAfterFailure => {
                self.flush_error = 0.05;
                self.bend_to_reuse(random);
            }
            Mutation::NoChain | Mutation::EpochLate | Mutation::ReplayOld => {
                self.bend_to_recovery(random);
            }
            Mutation::NoStamp | Mutation::NextNotWritten | Mutation::NoRestamp => {
                self.wrong_ring = if mutation == Mutation::NoRestamp { 0.0 } else { 0.4 };
                self.power = 0.1;
                self.bend_to_recovery(random);
            }
            Mutation::SnapshotUndrained
            | Mutation::StructureUndrained
            | Mutation::StructureEarly
            | Mutation::NoStructureRecord
            | Mutation::ShrinkWholeExtents => {
                self.control = 0.1;
                self.max_volumes = 4;
                self.volume_extents = self.volume_extents.min(4);
            }
            Mutation::GroupOneByOne
            | Mutation::GroupInPieces
            | Mutation::DiffTrustsShared
            | Mutation::AccountByLeaf => self.bend_to_groups(),
            Mutation::NoCancel | Mutation::NoCancelWithoutLeaf | Mutation::FillUndrained => {
                self.bend_to_overlaps()
            }
            Mutation::OverwriteFullRing => self.bend_to_full_rings(),
            Mutation::CompositeBeforeBit | Mutation::BitBeforeLog => self.bend_to_switches(random),
            _ if mutation.id().starts_with("R17") => self.bend_to_checkpoints(random),
            _ => self.bend_by_group(mutation, random),
        }
    }

    /// The same for rules whose letter says what they are about.
    fn bend_by_group(&mut self, mutation: Mutation, random: &mut fastrand::Rng) {
        match mutation.id().chars().next() {
            Some('C') => self.bend_to_cache(mutation, random),
            Some('M') => self.bend_to_moves(mutation, random),
            Some('K') => self.bend_to_folds(random),
            _ => {}
        }
    }

    /// No errors but those of flushes.
    fn without_errors(&mut self) {
        self.silent = 0.0;
        self.data_error = 0.0;
        self.metadata_read_error = 0.0;
        self.metadata_write_error = 0.0;
    }

    /// Discards and writes of the same few blocks, many in flight.
    fn bend_to_overlaps(&mut self) {
        self.volume_extents = 2;
        self.hot = 0.9;
        self.depth = 32;
        self.size_bits = 6;
        self.late = 0.0;
        self.mix = [10, 30, 20, 10, 2];
        self.pace = [60, 10, 10, 10, 10];
    }

    /// Several volumes, written and snapshot together.
    fn bend_to_groups(&mut self) {
        self.control = 0.1;
        self.controls = [30, 10, 0, 0, 0, 0, 5, 5, 0, 60, 0, 0, 0, 0];
        self.max_volumes = 4;
        self.volume_extents = 2;
        self.depth = 16;
        self.mix = [5, 40, 5, 0, 5];
        self.torn_ring = 0.5;
    }

    /// Snapshots that come and go over a few extents which are written all the time.
    pub fn bend_to_folds(&mut self, random: &mut fastrand::Rng) {
        self.composite = true;
        self.fold_rate = 1 << 40;
        self.control = 0.1;
        self.controls = [2, 40, 1, 40, 5, 5, 10, 5, 0, 0, 2, 0, 0, 0];
        self.max_volumes = 4;
        self.volume_extents = 2;
        self.devices = vec![96];
        self.operations = 900;
        self.depth = [2, 8, 16][random.usize(..3)];
        self.size_bits = random.u32(3..=6);
        self.mix = [20, 40, 5, 1, 5];
        self.crash = 0.005;
        self.late = [0.0, 0.2][random.usize(..2)];
        self.pace = [30, 30, 30, 10, 10];
    }

    /// A snapshot every 50 requests, which goes 20 requests later, over a few extents.
    pub fn bend_to_snapshots(&mut self, random: &mut fastrand::Rng) {
        self.composite = true;
        self.fold_rate = [1 << 27, 1 << 40][random.usize(..2)];
        self.rhythm = Some(Rhythm { every: 50, delete_after: 20 });
        self.control = 0.002;
        self.controls = [5, 1, 1, 0, 1, 1, 10, 10, 0, 0, 0, 0, 0, 0];
        self.max_volumes = random.usize(1..=2);
        self.volume_extents = [2, 4, 8][random.usize(..3)];
        self.devices = vec![96];
        self.operations = 900;
        self.depth = [1, 4, 16][random.usize(..3)];
        self.size_bits = random.u32(3..=6);
        self.mix = [20, 40, 5, 1, 5];
        self.crash = 0.004;
    }

    /// Folds with composite entries turned on and off, and crashes.
    fn bend_to_switches(&mut self, random: &mut fastrand::Rng) {
        self.bend_to_folds(random);
        self.controls[10] = 40;
        self.crash = 0.03;
        self.mix[4] = 20;
    }

    /// Few extents that come to be shared and exclusive again, most of them read, with a cache.
    fn bend_to_cache(&mut self, mutation: Mutation, random: &mut fastrand::Rng) {
        match mutation {
            Mutation::CachedUnderHold => self.bend_to_moves(Mutation::MoveUndrained, random),
            Mutation::CacheKeptAtReuse => self.bend_to_reuse(random),
            _ => self.bend_to_folds(random),
        }
        if mutation == Mutation::CacheKeptAtWrite || mutation == Mutation::CacheFilledLate {
            self.composite = false;
        }
        self.controls[1] = self.controls[1].max(20);
        self.controls[3] = self.controls[3].max(20);
        self.mix[0] = 60;
        self.late = 0.2;
        self.crash = 0.002;
        self.read_cache = 1 << 24;
    }

    fn bend_to_full_rings(&mut self) {
        self.ring_capacity = 8;
        self.workers = 1;
        self.commit_interval_ns = 1_000_000_000;
        self.mix = [5, 30, 10, 5, 1];
        self.fua = 0.0;
        self.crash = 0.02;
        self.power = 0.2;
    }

    fn bend_to_power(&mut self, random: &mut fastrand::Rng) {
        self.power = 0.8;
        self.crash = 0.03;
        self.mix[4] = 20;
        self.fua = [0.0, 0.3][random.usize(..2)];
        self.volume_extents = self.volume_extents.min(8);
    }

    /// Small pools that are always nearly full, so that a freed extent is used again at once.
    fn bend_to_reuse(&mut self, random: &mut fastrand::Rng) {
        self.devices = vec![random.u64(44..64)];
        self.wal_extents = 1;
        self.reserve_extents = 2;
        self.quantum = 1;
        self.volume_extents = 8;
        self.max_volumes = 4;
        self.mix = [10, 30, 20, 5, 10];
        self.crash = 0.03;
        self.depth = self.depth.max(4);
        self.control = 0.05;
    }

    /// Volumes of a nearly full pool are deleted and rolled back.
    fn bend_to_releases(&mut self, random: &mut fastrand::Rng) {
        self.bend_to_reuse(random);
        self.power = 0.8;
        self.control = 0.1;
        self.controls = [30, 30, 0, 20, 5, 20, 1, 1, 0, 0, 0, 0, 0, 0];
    }

    /// Several devices that are nearly full.
    fn bend_to_devices(&mut self, random: &mut fastrand::Rng) {
        self.bend_to_power(random);
        self.wal_extents = 1;
        self.reserve_extents = 2;
        self.devices = vec![24, random.u64(24..32)];
        self.volume_extents = 16;
        self.max_volumes = 4;
        self.quantum = 1;
        self.mix = [10, 30, 20, 5, 10];
    }

    fn bend_to_recovery(&mut self, random: &mut fastrand::Rng) {
        self.crash = 0.04;
        self.recovery_crash = [0.02, 0.05, 0.1][random.usize(..3)];
        self.volume_extents = self.volume_extents.min(8);
        self.mix[4] = self.mix[4].max(10);
    }

    fn bend_to_checkpoints(&mut self, random: &mut fastrand::Rng) {
        self.controls[7] = 60;
        self.control = 0.05;
        self.checkpoint_interval_ns = 200_000;
        self.wal_extents = 1;
        self.crash = 0.03;
        self.power = [0.5, 0.9][random.usize(..2)];
        self.volume_extents = self.volume_extents.min(16);
    }
}
