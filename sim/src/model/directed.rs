//! Scripted histories for rules that random histories hit too seldom.
//!
//! Each one is clean with all rules in place and ends in a violation when the rule is removed, so
//! these rules do not depend on luck. Requests take the lowest free slot; steps that are not
//! possible are passed over, which lets one script end a request under either behaviour.

use super::device::{WAL0, data_cell};
use super::directed_composite::COMPOSITE;
use super::mutation::Mutation;
use super::shrink::replay;
use super::state::{Config, World};
use super::step::Step;

/// A scripted history.
#[derive(Debug)]
pub struct Directed {
    /// The description of the history.
    pub story: &'static str,
    /// The mutations that it catches.
    pub catches: &'static [Mutation],
    pub(super) cfg: Config,
    pub(super) script: fn(&mut Script),
}

impl Directed {
    /// Runs the history, then opens, reads everything and drains.
    pub fn run(&self, mutation: Mutation) -> World {
        let mut script = Script { steps: Vec::new() };
        (self.script)(&mut script);
        script.steps.extend([Step::Recover, Step::Check, Step::Drain]);
        replay(self.cfg, mutation, &script.steps)
    }

    /// The history that catches this mutation.
    pub fn of(mutation: Mutation) -> impl Iterator<Item = &'static Self> {
        Self::all().filter(move |d| d.catches.contains(&mutation))
    }

    /// Every scripted history.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        COPYING.iter().chain(COMPOSITE)
    }
}

/// Steps of a script, and the usual sequences of them.
#[derive(Debug)]
pub(super) struct Script {
    steps: Vec<Step>,
}

impl Script {
    pub(super) fn then(&mut self, steps: &[Step]) -> &mut Self {
        self.steps.extend_from_slice(steps);
        self
    }

    pub(super) fn times(&mut self, n: usize, step: Step) -> &mut Self {
        self.steps.extend(std::iter::repeat_n(step, n));
        self
    }

    /// Takes the request in a slot as far as it goes.
    pub(super) fn finish(&mut self, slot: u8) -> &mut Self {
        self.times(6, Step::Op(slot))
    }

    /// A plain write of volume `v`, from submission to answer, in slot 0.
    pub(super) fn write(&mut self, v: u8, e: u8, mask: u8) -> &mut Self {
        self.then(&[Step::Write(0, v, e, mask, false)]).finish(0)
    }

    /// A discard from submission to answer, in slot 0.
    pub(super) fn discard(&mut self, v: u8, e: u8, mask: u8) -> &mut Self {
        self.then(&[Step::Discard(0, v, e, mask, false)]).finish(0)
    }

    /// The rest of a commit, or a whole one.
    pub(super) fn commit(&mut self) -> &mut Self {
        self.times(4, Step::Commit);
        for block in 0..6 {
            self.then(&[Step::Land(block)]);
        }
        self.times(2, Step::Commit)
    }

    /// A whole checkpoint.
    pub(super) fn checkpoint(&mut self) -> &mut Self {
        self.times(9, Step::Ckpt)
    }

    /// A structure change until it is visible.
    pub(super) fn change(&mut self, step: Step) -> &mut Self {
        self.then(&[step]).times(2, Step::Structure)
    }

    /// Power loss in which the device keeps nothing that was not flushed.
    pub(super) fn power(&mut self) -> &mut Self {
        self.then(&[Step::Power(0), Step::Recover])
    }

    pub(super) fn kill(&mut self) -> &mut Self {
        self.then(&[Step::Kill, Step::Recover])
    }

    /// The device writes the sub-block back on its own.
    pub(super) fn persist(&mut self, p: u8, s: u8) -> &mut Self {
        self.then(&[Step::Persist(data_cell(p, s))])
    }
}

// Two volumes, nothing mapped.
pub(super) const EMPTY: Config = Config {
    extents: 7,
    subs: 2,
    vol_extents: 2,
    volumes: 2,
    fill: 0,
    copy: 0,
    ring: 8,
    wal: 6,
    per_block: 1,
    recovery_commit: false,
    composite: false,
    overlay: 0,
    whole: false,
};

// Two volumes; extent 0 of volume 0 is on extent 0 of the pool, both sub-blocks valid.
const ONE: Config = Config { fill: 0b11, ..EMPTY };

// One volume on extent 0 of the pool, shared with snapshot (1) or clone (2) number 1.
const SNAPSHOT: Config = Config { volumes: 1, copy: 1, ..ONE };
const CLONE: Config = Config { volumes: 1, copy: 2, ..ONE };

/// The scripted histories whose first writes copy.
static COPYING: &[Directed] = &[
    Directed {
        story: "a write is published between the data flush and a late capture",
        catches: &[Mutation::CaptureLate],
        cfg: EMPTY,
        script: |s| {
            s.write(0, 0, 1).times(2, Step::Commit).write(0, 1, 1);
            s.commit().power();
        },
    },
    Directed {
        story: "an extent is reused while its unmap is captured, then power is lost",
        catches: &[Mutation::ReuseWhenCaptured, Mutation::ReuseAtOnce],
        cfg: ONE,
        script: |s| {
            s.discard(0, 0, 3).then(&[Step::Commit]).write(1, 0, 1);
            s.persist(0, 0).power();
        },
    },
    Directed {
        story: "an extent is reused under a read that began before the discard",
        catches: &[Mutation::ReuseUndrained],
        cfg: ONE,
        script: |s| {
            s.then(&[Step::Read(0, 0, 0), Step::Discard(0, 0, 0, 3, false)]).finish(1);
            s.commit().then(&[Step::Reclaim, Step::Write(0, 1, 0, 1, false)]).finish(1).finish(0);
        },
    },
    Directed {
        story: "a discard falls between two overlapping first writes",
        catches: &[Mutation::NoCancel],
        cfg: EMPTY,
        script: |s| {
            let write = Step::Write(0, 0, 0, 1, false);
            s.then(&[write, write, Step::Op(0)]).finish(1);
            s.then(&[Step::Discard(0, 0, 0, 1, false)]).finish(1).finish(0);
        },
    },
    Directed {
        story: "a discard empties an extent under a landed write, and it is reused",
        catches: &[Mutation::UnmapUnderWrite],
        cfg: Config { fill: 0b01, ..EMPTY },
        script: |s| {
            s.then(&[Step::Write(0, 0, 0, 2, false), Step::Op(0)]);
            s.then(&[Step::Discard(0, 0, 0, 1, false)]).finish(1);
            s.commit().then(&[Step::Reclaim, Step::Write(0, 1, 0, 3, false)]).finish(1).finish(0);
        },
    },
    Directed {
        story: "a snapshot's record is behind a checkpoint that has a later write",
        catches: &[Mutation::LsnIgnored],
        cfg: ONE,
        script: |s| {
            s.change(Step::Copy(0, false)).then(&[Step::Commit]).write(0, 0, 1);
            s.then(&[Step::Ckpt]).commit().checkpoint().power();
        },
    },
    Directed {
        story: "writes of one entry before and after a snapshot are in one commit",
        catches: &[Mutation::MergeOverStructure],
        cfg: ONE,
        script: |s| {
            s.write(0, 1, 1).change(Step::Copy(0, false)).write(0, 1, 1).commit().power();
        },
    },
    Directed {
        story: "a lost block of a commit is written again; its old successor is still there",
        catches: &[Mutation::NoChainNoEpoch, Mutation::ChainNoEpoch],
        cfg: EMPTY,
        script: revive_successor,
    },
    Directed {
        story: "the same, and the open in between lost its superblock",
        catches: &[Mutation::EpochNotAwaited],
        cfg: EMPTY,
        script: |s| {
            s.kill();
            revive_successor(s);
        },
    },
    Directed {
        story: "FUA commits an entry whose other sub-block is not flushed",
        catches: &[Mutation::FuaPartialCommit],
        cfg: EMPTY,
        script: |s| {
            s.write(0, 0, 1).then(&[Step::Write(0, 0, 0, 2, true)]).finish(0).commit().power();
        },
    },
    Directed {
        story: "FUA over a captured entry lands after the data flush was sent",
        catches: &[Mutation::FuaJoinsCommit],
        cfg: EMPTY,
        script: |s| {
            s.write(0, 0, 1).times(2, Step::Commit);
            s.then(&[Step::Write(0, 0, 0, 1, true)]).finish(0).commit().power();
        },
    },
    Directed {
        story: "more records than the ring holds, then a kill",
        catches: &[Mutation::OverwriteFull],
        cfg: Config { ring: 3, ..EMPTY },
        script: |s| {
            s.write(0, 0, 1).write(0, 1, 1).write(1, 0, 1).write(1, 1, 1).kill();
        },
    },
    Directed {
        story: "a resize is seen, then the process is killed",
        catches: &[Mutation::NoStructureRecords],
        cfg: ONE,
        script: |s| {
            s.change(Step::Resize(0, 2)).then(&[Step::Check]).kill();
        },
    },
    Directed {
        story: "a clone alone on an extent overwrites it before the other's leaving is durable",
        catches: &[Mutation::PendingIgnored],
        cfg: CLONE,
        script: |s| {
            s.discard(0, 0, 3).write(1, 0, 1).persist(0, 0).power();
        },
    },
    Directed {
        story: "a clone alone on an extent overwrites it under the other's older read",
        catches: &[Mutation::ExclusiveUndrained],
        cfg: CLONE,
        script: |s| {
            s.then(&[Step::Read(0, 0, 0), Step::Discard(0, 0, 0, 3, false)]).finish(1).commit();
            s.then(&[Step::Reclaim, Step::Write(0, 1, 0, 1, false)]).finish(1).finish(0);
        },
    },
    Directed {
        story: "the source of a copy-on-write becomes exclusive, and is written in place",
        catches: &[Mutation::FastUnderCopy],
        cfg: CLONE,
        script: |s| {
            s.write(0, 0, 1).commit();
            s.then(&[Step::Write(0, 1, 0, 1, false), Step::Op(0), Step::Reclaim]);
            s.then(&[Step::Write(0, 1, 0, 2, false)]).finish(1).finish(0);
        },
    },
    Directed {
        story: "an extent dropped in replay is reused, and the drop is lost with the power",
        catches: &[Mutation::ReplayNoPending],
        cfg: ONE,
        script: |s| {
            s.discard(0, 0, 3).kill().write(1, 0, 1).persist(0, 0).power();
        },
    },
    Directed {
        story: "an extent that replay took and dropped is reused; half a commit maps it again",
        catches: &[Mutation::ReplayDiffOnly, Mutation::ReplayNoPending],
        cfg: EMPTY,
        script: |s| {
            s.write(0, 0, 1).change(Step::Copy(1, false)).discard(0, 0, 1).kill();
            s.then(&[Step::Commit, Step::Write(0, 1, 0, 1, false), Step::Op(0)]).persist(0, 0);
            s.times(3, Step::Commit).then(&[Step::Land(0), Step::Persist(WAL0 + 1)]).power();
        },
    },
    Directed {
        story: "a ring set aside comes back after the pool went on without it",
        catches: &[Mutation::NoStamp],
        cfg: EMPTY,
        script: |s| {
            s.write(0, 0, 1).then(&[Step::Kill, Step::Aside, Step::Recover]).write(1, 0, 1);
            s.then(&[Step::Kill, Step::Back, Step::Recover]);
        },
    },
    Directed {
        story: "killed in recovery once the superblock has the new id",
        catches: &[Mutation::NextLeftOut],
        cfg: EMPTY,
        script: |s| {
            s.write(0, 0, 1).then(&[Step::Kill]).times(8, Step::Open).kill();
        },
    },
    Directed {
        story: "killed in two recoveries, the second before its superblock",
        catches: &[Mutation::NoRestamp],
        cfg: EMPTY,
        script: |s| {
            s.write(0, 0, 1).then(&[Step::Kill]).times(8, Step::Open).then(&[Step::Kill]);
            s.times(5, Step::Open).kill();
        },
    },
    Directed {
        story: "an open that died early and a later one without the ring draw the same id",
        catches: &[Mutation::CounterId],
        cfg: EMPTY,
        script: |s| {
            s.write(0, 0, 1).then(&[Step::Kill]).times(5, Step::Open);
            s.then(&[Step::Kill, Step::Aside, Step::Recover]).write(1, 0, 1);
            s.then(&[Step::Kill, Step::Back, Step::Recover]);
        },
    },
    Directed {
        story: "a rollback under a copy-on-write that restores the copied extent",
        catches: &[Mutation::ChangeUndrained],
        cfg: SNAPSHOT,
        script: |s| {
            s.write(0, 0, 1).change(Step::Copy(0, true)).commit();
            s.then(&[Step::Write(0, 0, 0, 2, false), Step::Op(0), Step::Op(0)]);
            s.change(Step::Rollback(0, 1)).finish(0).times(2, Step::Structure).commit();
        },
    },
    Directed {
        story: "power is lost when the first log block of a group has reached the device",
        catches: &[Mutation::GroupInPieces],
        cfg: Config { fill: 0b011_001, vol_extents: 1, ..EMPTY },
        script: |s| {
            s.change(Step::Group(0, 1)).times(4, Step::Commit);
            s.then(&[Step::Land(0), Step::Persist(WAL0 + 1)]).power();
        },
    },
    Directed {
        story: "the second volume of a group is written after the cut",
        catches: &[Mutation::GroupOneByOne],
        cfg: Config { fill: 0b011_001, vol_extents: 1, ..EMPTY },
        script: |s| {
            s.change(Step::Group(0, 1)).write(1, 0, 1).times(2, Step::Structure).commit();
        },
    },
    Directed {
        story: "a snapshot and a write of its origin fall into the middle of a checkpoint",
        catches: &[Mutation::FuzzyCheckpoint],
        cfg: Config { fill: 0b011_001, vol_extents: 1, ..EMPTY },
        script: |s| {
            s.write(0, 0, 2).then(&[Step::Ckpt]).change(Step::Copy(1, false)).write(1, 0, 1);
            s.checkpoint().commit().power();
        },
    },
    Directed {
        story: "the WAL wraps over blocks that the durable superblock still needs",
        catches: &[Mutation::TruncateEarly],
        cfg: Config { wal: 3, ..EMPTY },
        script: |s| {
            s.write(0, 0, 1).commit().write(0, 1, 1).commit().write(1, 0, 1);
            s.then(&[Step::Flush(0, 1)]).commit().then(&[Step::Ckpt]).write(1, 1, 1);
            s.commit().power();
        },
    },
    Directed {
        story: "a FLUSH is answered over a checkpoint whose superblock is lost",
        catches: &[Mutation::DurableEarly],
        cfg: EMPTY,
        script: |s| {
            s.write(0, 0, 1).times(6, Step::Ckpt).then(&[Step::Flush(0, 0)]).finish(0).power();
        },
    },
    Directed {
        story: "a commit captured before a checkpoint fills the WAL after it",
        catches: &[Mutation::CheckpointOnlyIfNew],
        cfg: Config { wal: 3, ..EMPTY },
        script: |s| {
            s.write(0, 0, 1).write(0, 1, 1).write(1, 0, 1).write(1, 1, 1);
            s.then(&[Step::Commit, Step::Ckpt]).commit().then(&[Step::Flush(0, 0)]).commit();
            s.checkpoint();
        },
    },
    Directed {
        story: "a volume shrinks into an extent and grows again",
        catches: &[Mutation::ShrinkWholeExtents],
        cfg: ONE,
        script: |s| {
            s.change(Step::Resize(0, 1)).commit().change(Step::Resize(0, 4)).commit();
        },
    },
];

// Block 1 of a commit of two is lost and block 2 is durable; then the first record alone is made
// again with the same LSN, and its block must not chain to the old block 2.
fn revive_successor(s: &mut Script) {
    s.write(0, 0, 1).write(0, 1, 1).times(4, Step::Commit);
    s.then(&[Step::Land(1), Step::Persist(WAL0 + 2)]).power();
    s.write(0, 0, 1).commit().power();
}
