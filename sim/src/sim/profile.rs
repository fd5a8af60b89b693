//! Profiles: the kind of history of a seed: every probability is drawn again, so that rare
//! combinations get histories in which they are common (swarm testing).

use blockd_mapper::mutation::Mutation;
use blockd_mapper::space::{Mark, Marks};

/// The events that histories favour.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Aim {
    /// All in turn, and the scripts now and then.
    Any,
    /// Events that show the absence of a rule, and the scripts for it.
    Rule(Mutation),
    /// Snapshots that are taken and deleted at a steady pace. No scripts.
    Snapshots,
    /// Devices that leave the pool or shrink, or stay after all, or are evened out. No scripts.
    Evacuation,
}

/// How a history goes. All probabilities are per decision.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Bytes of an extent.
    pub extent_size: u32,
    /// Extents of each device.
    pub devices: Vec<u64>,
    /// Extents of the log.
    pub wal_extents: u64,
    /// Extents of the metadata reserve.
    pub reserve_extents: u64,
    /// Records of each slot of the delta ring.
    pub ring_capacity: u64,
    /// Workers of the pool.
    pub workers: usize,
    /// Extents granted at a time.
    pub quantum: u64,
    /// Log blocks of a commit.
    pub commit_blocks: usize,
    /// Nanoseconds between timed commits.
    pub commit_interval_ns: u64,
    /// Nanoseconds between timed checkpoints.
    pub checkpoint_interval_ns: u64,
    /// Whether freed extents are discarded on the devices.
    pub passdown: bool,
    /// Writes that are to be durable go through the devices' caches where they can.
    pub write_through: bool,
    /// Volumes and snapshots at the most.
    pub max_volumes: usize,
    /// Extents of a volume at the most.
    pub volume_extents: u64,
    /// Client requests of the history.
    pub operations: u32,
    /// Client requests in flight at the most.
    pub depth: usize,
    /// Longest request in units, as a power of two.
    pub size_bits: u32,
    /// Share of requests that aim at the first extents of a volume.
    pub hot: f64,
    /// Relative weight of reads, writes, discards, write zeroes, flushes.
    pub mix: [u32; 5],
    /// Share of writes with FUA.
    pub fua: f64,
    /// Structure changes per client request.
    pub control: f64,
    /// Relative weight of create, delete, resize, snapshot, clone, rollback, commit, checkpoint,
    /// close, a group of snapshots, composite entries on or off, a change of the devices, rename,
    /// labels.
    pub controls: [u32; 14],
    /// Process deaths and losses of power per client request.
    pub crash: f64,
    /// Share of crashes that are losses of power.
    pub power: f64,
    /// Crashes per step of opening.
    pub recovery_crash: f64,
    /// Share of openings with a wrong ring after a process death.
    pub wrong_ring: f64,
    /// Share of process deaths in the middle of a ring record.
    pub torn_ring: f64,
    /// Chance that an operation is done and answered later.
    pub late: f64,
    /// Relative weight of clients, device IO, engine, retries, dead IO.
    pub pace: [u32; 5],
    /// Media errors on data reads and writes.
    pub data_error: f64,
    /// Media errors on metadata reads.
    pub metadata_read_error: f64,
    /// Media errors on metadata writes.
    pub metadata_write_error: f64,
    /// Media errors on flushes.
    pub flush_error: f64,
    /// Silent faults of metadata: rot, dropped and misdirected writes. A history with these ends
    /// at the first refusal.
    pub silent: f64,
    /// Where the states of the pool's space begin.
    pub marks: Option<Marks>,
    /// Whether first writes of shared extents lay an extent over them.
    pub composite: bool,
    /// Bytes a second that folds may copy.
    pub fold_rate: u64,
    /// Bytes a second that may be copied off a leaving device.
    pub evacuation_rate: u64,
    /// Bytes that the cache of shared blocks may hold; 0: there is none.
    pub read_cache: u64,
    /// Share of devices that shrink, of those that leave or shrink.
    pub shrinks: f64,
    /// Share of rebalances, of changes of the devices.
    pub rebalances: f64,
    /// Snapshots that are taken and deleted at a steady pace, besides those of `controls`.
    pub rhythm: Option<Rhythm>,
}

/// A pace of snapshots, in client requests that were started.
#[derive(Clone, Copy, Debug)]
pub struct Rhythm {
    /// From one snapshot to the next.
    pub every: u32,
    /// From a snapshot to the deletion of those that are there.
    pub delete_after: u32,
}

/// Pools this small are low soon.
const NARROW: Marks = Marks { low: Mark::Percent(50), very_low: Mark::Percent(25) };

impl Profile {
    /// The profile of a seed.
    #[must_use]
    pub fn draw(random: &mut fastrand::Rng) -> Self {
        let one = |random: &mut fastrand::Rng, all: &[f64]| all[random.usize(..all.len())];
        let weight = |random: &mut fastrand::Rng| [0, 1, 2, 5, 10, 30][random.usize(..6)];
        let extent_size = [64, 64, 64, 64, 128, 256][random.usize(..6)] << 10;
        let count = [1, 1, 2, 2, 3][random.usize(..5)];
        let mut devices: Vec<u64> = (0..count).map(|_| random.u64(24..96)).collect();
        if count > 1 {
            // Beside log and reserve the first has little room, so that data lies on all of them.
            devices[0] = random.u64(24..32);
        }
        let mut mix: [u32; 5] = std::array::from_fn(|_| weight(random));
        mix[1] = mix[1].max(5);
        mix[0] = mix[0].max(1);
        let mut controls = [0; 14];
        controls[..12].fill_with(|| weight(random));
        (controls[0], controls[8]) = (controls[0].max(2), controls[8].min(1));
        let silent = if random.u8(..16) == 0 { 0.3 } else { 0.0 };
        let errors = random.u8(..4) == 0;
        let error = |random: &mut fastrand::Rng, all: &[f64]| {
            if errors { one(random, all) } else { 0.0 }
        };
        let mut profile = Self {
            extent_size,
            devices,
            wal_extents: random.u64(1..=4),
            reserve_extents: random.u64(2..=6),
            ring_capacity: [8, 12, 16, 32, 64][random.usize(..5)],
            workers: random.usize(1..=4),
            quantum: [1, 2, 4, 8, 16][random.usize(..5)],
            commit_blocks: [1, 2, 8][random.usize(..3)],
            commit_interval_ns: [100_000, 1_000_000, 1_000_000_000][random.usize(..3)],
            checkpoint_interval_ns: [1_000_000, 100_000_000, 60_000_000_000][random.usize(..3)],
            passdown: random.bool(),
            write_through: random.u8(..4) > 0,
            max_volumes: random.usize(1..=6),
            volume_extents: [2, 4, 8, 16, 40, 300][random.usize(..6)],
            operations: random.u32(100..=900),
            depth: [1, 2, 4, 8, 16, 32][random.usize(..6)],
            size_bits: random.u32(0..=9),
            hot: one(random, &[0.0, 0.5, 0.9]),
            mix,
            fua: one(random, &[0.0, 0.1, 0.5]),
            control: one(random, &[0.002, 0.02, 0.1]),
            controls,
            crash: one(random, &[0.004, 0.015, 0.04]),
            power: one(random, &[0.0, 0.3, 0.5, 1.0]),
            recovery_crash: one(random, &[0.0, 0.01, 0.05]),
            wrong_ring: one(random, &[0.0, 0.05, 0.3]),
            torn_ring: one(random, &[0.0, 0.3]),
            late: one(random, &[0.0, 0.2, 0.6]),
            pace: std::array::from_fn(|_| [2, 5, 10, 30, 60][random.usize(..5)]),
            data_error: error(random, &[0.0, 0.002, 0.01]),
            metadata_read_error: error(random, &[0.0, 0.001, 0.01]),
            metadata_write_error: error(random, &[0.0, 0.002, 0.01]),
            flush_error: error(random, &[0.0, 0.005, 0.02]),
            silent,
            // Last, so that the rest of a history is unchanged.
            marks: (random.u8(..3) == 0).then_some(NARROW),
            composite: random.bool(),
            fold_rate: [0, 1 << 30, 1 << 40, 1 << 40][random.usize(..4)],
            evacuation_rate: 1 << 40,
            read_cache: 0,
            shrinks: 0.3,
            rebalances: 0.3,
            rhythm: None,
        };
        profile.draw_last(random);
        profile
    }

    /// Draws what came later than the rest of the profile, which stays as it is.
    fn draw_last(&mut self, random: &mut fastrand::Rng) {
        match random.u8(..8) {
            0 => self.bend_to_folds(random),
            1 => self.bend_to_snapshots(random),
            2 => self.bend_to_evacuation(random),
            _ => {}
        }
        self.controls[12..].fill_with(|| if random.u8(..3) == 0 { 10 } else { 0 });
        // A page or four for each part of the cache, or more than there is data.
        self.read_cache = [0, 1 << 16, 1 << 18, 1 << 24][random.usize(..4)];
    }

    /// A profile in which nothing happens by itself: for scripts.
    #[must_use]
    pub fn still() -> Self {
        Self {
            extent_size: 64 << 10,
            devices: vec![128],
            wal_extents: 1,
            reserve_extents: 2,
            ring_capacity: 64,
            workers: 2,
            quantum: 1,
            commit_blocks: 1,
            marks: None,
            commit_interval_ns: 1_000_000_000_000,
            checkpoint_interval_ns: 1_000_000_000_000,
            passdown: false,
            write_through: true,
            max_volumes: 6,
            volume_extents: 64,
            operations: 0,
            depth: 16,
            size_bits: 3,
            hot: 0.0,
            mix: [1; 5],
            fua: 0.0,
            control: 0.0,
            controls: [0; 14],
            crash: 0.0,
            power: 0.5,
            recovery_crash: 0.0,
            wrong_ring: 0.0,
            torn_ring: 0.0,
            late: 0.0,
            pace: [0, 10, 10, 10, 10],
            data_error: 0.0,
            metadata_read_error: 0.0,
            metadata_write_error: 0.0,
            flush_error: 0.0,
            silent: 0.0,
            composite: false,
            fold_rate: 1 << 40,
            evacuation_rate: 1 << 40,
            read_cache: 0,
            shrinks: 0.0,
            rebalances: 0.0,
            rhythm: None,
        }
    }
}
