//! Scripted histories of composite entries.

use super::device::data_cell;
use super::directed::{Directed, EMPTY, Script};
use super::mutation::Mutation;
use super::state::Config;
use super::step::Step;

// One volume on extent 0 of the pool, shared with snapshot number 1; first writes redirect.
const SHARED: Config =
    Config { vol_extents: 1, volumes: 1, fill: 0b011, copy: 1, composite: true, ..EMPTY };

// The same, and the volume has sub-block 0 in an overlay, extent 1 of the pool.
const OVERLAID: Config = Config { overlay: 0b01, ..SHARED };

// The same beside another volume, number 1, which maps nothing. The snapshot is number 2, the
// overlay extent 2.
const BESIDE: Config = Config { volumes: 2, ..OVERLAID };

const FOLD_DOWN: Step = Step::Fold(0, 0, true);

impl Script {
    // Deletes the snapshot with this number, durably.
    fn delete(&mut self, v: u8) -> &mut Self {
        self.change(Step::Delete(v)).commit().then(&[Step::Reclaim])
    }
}

/// The scripted histories of composite entries.
pub(super) static COMPOSITE: &[Directed] = &[
    Directed {
        story: "an overlay is taken from extents that a discard freed, then power is lost",
        catches: &[Mutation::RedirectPendingTarget],
        cfg: Config { volumes: 2, fill: 0b011_011, ..SHARED },
        script: |s| {
            s.discard(1, 0, 3).write(0, 0, 1).persist(1, 0).power();
        },
    },
    Directed {
        story: "a discard takes the base of a redirect away, and a first write joins its overlay",
        catches: &[Mutation::RedirectForgetsOthers],
        cfg: Config { subs: 3, fill: 0b001, ..SHARED },
        script: |s| {
            s.then(&[Step::Write(0, 0, 0, 2, false), Step::Discard(0, 0, 0, 1, false)]).finish(1);
            s.then(&[Step::Write(0, 0, 0, 4, false)]).finish(1).finish(0);
        },
    },
    Directed {
        story: "the base of a redirect in flight becomes exclusive, and is written in place",
        catches: &[Mutation::WriteUnderRedirect],
        cfg: Config { subs: 3, fill: 0b001, ..SHARED },
        script: |s| {
            s.change(Step::Delete(1)).commit();
            s.then(&[Step::Write(0, 0, 0, 2, false), Step::Reclaim]);
            s.then(&[Step::Write(0, 0, 0, 4, false)]).finish(0).finish(1);
        },
    },
    Directed {
        story: "the second of two overlapping redirects is torn after the first is durable",
        catches: &[Mutation::OverlapWhole],
        cfg: Config { whole: true, ..SHARED },
        script: |s| {
            let write = Step::Write(0, 0, 0, 1, false);
            s.then(&[write, write]).finish(0).commit();
            s.then(&[Step::Op(1), Step::Tear(data_cell(1, 0))]).power();
        },
    },
    Directed {
        story: "a read of the base is in flight when a fold up lets the base go",
        catches: &[Mutation::BaseReadUncounted],
        cfg: BESIDE,
        script: |s| {
            s.then(&[Step::Read(0, 0, 1), Step::Op(0)]).delete(2);
            s.then(&[Step::Fold(0, 0, false)]).finish(1).commit();
            s.then(&[Step::Reclaim, Step::Write(0, 1, 0, 3, false)]).finish(1).finish(0);
        },
    },
    Directed {
        story: "a read finds no bit in the overlay, and goes on to the base after five writes",
        catches: &[],
        cfg: Config { subs: 3, overlay: 0b100, copy: 0, ..SHARED },
        script: |s| {
            s.then(&[Step::Read(0, 0, 1)]);
            for _ in 0..5 {
                s.then(&[Step::Write(1, 0, 0, 2, true)]).finish(1).commit();
            }
            s.finish(0);
        },
    },
    Directed {
        story: "a fold down before the deletion of the base's snapshot is durable",
        catches: &[Mutation::FoldPendingBase],
        cfg: OVERLAID,
        script: |s| {
            s.change(Step::Delete(1)).then(&[FOLD_DOWN]).finish(0).persist(0, 0).power();
        },
    },
    Directed {
        story: "a fold down under an older read of the deleted snapshot",
        catches: &[Mutation::FoldUndrainedBase],
        cfg: OVERLAID,
        script: |s| {
            s.then(&[Step::Read(1, 0, 0)]).delete(1).then(&[FOLD_DOWN]).finish(1).finish(0);
        },
    },
    Directed {
        story: "a fold down is torn where the durable entry still shows the base",
        catches: &[Mutation::FoldEntryNotDurable],
        cfg: Config { whole: true, ..OVERLAID },
        script: |s| {
            s.delete(1).write(0, 0, 2).then(&[FOLD_DOWN]).finish(0);
            s.then(&[Step::Tear(data_cell(0, 1))]).power();
        },
    },
    Directed {
        story: "the same, and the write ends between the fold's start and its copy",
        catches: &[Mutation::FoldLsnBeforeDrain, Mutation::FoldEntryNotDurable],
        cfg: Config { whole: true, ..OVERLAID },
        script: |s| {
            s.delete(1).then(&[Step::Write(0, 0, 0, 2, false), FOLD_DOWN]).finish(0).finish(1);
            s.then(&[Step::Tear(data_cell(0, 1))]).power();
        },
    },
    Directed {
        story: "an overwrite of the overlay is in flight when a fold down copies",
        catches: &[Mutation::FoldUndrained],
        cfg: OVERLAID,
        script: |s| {
            s.delete(1).then(&[Step::Write(0, 0, 0, 1, false), FOLD_DOWN]).finish(1).finish(0);
            s.finish(1);
        },
    },
    Directed {
        story: "a write into the overlay has landed and is not visible when a fold copies",
        catches: &[Mutation::FoldUnpublished, Mutation::FoldUndrained],
        cfg: OVERLAID,
        script: |s| {
            s.delete(1).then(&[Step::Write(0, 0, 0, 2, false), Step::Op(0), FOLD_DOWN]);
            s.finish(1).finish(0).finish(1);
        },
    },
    Directed {
        story: "an overwrite of the overlay begins after a fold down has read it",
        catches: &[Mutation::FoldUnderWrites],
        cfg: OVERLAID,
        script: |s| {
            s.delete(1).then(&[FOLD_DOWN]).times(2, Step::Op(0));
            s.then(&[Step::Write(0, 0, 0, 1, false)]).finish(1).finish(0);
        },
    },
    Directed {
        story: "a fold up gets its LSN after that of a rollback, and is visible after it",
        catches: &[Mutation::StructureUnderFold],
        cfg: OVERLAID,
        script: |s| {
            s.then(&[Step::Fold(0, 0, false)]).times(3, Step::Op(0));
            s.then(&[Step::Rollback(0, 1), Step::Structure, Step::Op(0), Step::Structure]);
            s.finish(0);
        },
    },
    Directed {
        story: "a fold down is committed, and its data is lost with the power",
        catches: &[Mutation::FoldRecordEarly],
        cfg: OVERLAID,
        script: |s| {
            s.delete(1).then(&[FOLD_DOWN]).times(4, Step::Op(0)).commit().power();
        },
    },
    Directed {
        story: "a composite entry is discarded, its base reused, then power is lost",
        catches: &[Mutation::DropBoth],
        cfg: BESIDE,
        script: |s| {
            s.delete(2).discard(0, 0, 3).finish(0).write(1, 0, 2).persist(0, 1).power();
        },
    },
    Directed {
        story: "an overlay is overwritten before the deletion of its snapshot is durable",
        catches: &[Mutation::OverlayPendingIgnored],
        cfg: OVERLAID,
        script: |s| {
            s.change(Step::Copy(0, false)).commit().change(Step::Delete(2)).write(0, 0, 1);
            s.persist(1, 0).power();
        },
    },
    Directed {
        story: "a clone and its origin put different data into a shared overlay",
        catches: &[Mutation::OverlayGrowsShared],
        cfg: OVERLAID,
        script: |s| {
            s.change(Step::Copy(0, true)).commit().write(0, 0, 2).write(2, 0, 2);
        },
    },
    Directed {
        story: "everything is read between the two halves of a discard",
        catches: &[Mutation::DiscardTopFirst],
        cfg: OVERLAID,
        script: |s| {
            s.then(&[Step::Discard(0, 0, 0, 1, false)]).times(2, Step::Op(0));
            s.then(&[Step::Check]).finish(0);
        },
    },
    Directed {
        story: "a discard falls between the two looks of a read",
        catches: &[Mutation::LookUnderFirst],
        cfg: OVERLAID,
        script: |s| {
            s.then(&[Step::Read(0, 0, 0), Step::Discard(0, 0, 0, 1, false)]).finish(1).finish(0);
        },
    },
    Directed {
        story: "a write and a fold down fall between the two looks of a read",
        catches: &[Mutation::NoSecondLook],
        cfg: OVERLAID,
        script: |s| {
            s.delete(1).then(&[Step::Read(0, 0, 1), Step::Write(0, 0, 0, 2, false)]).finish(1);
            s.commit().then(&[FOLD_DOWN]).finish(1).finish(0);
        },
    },
];
