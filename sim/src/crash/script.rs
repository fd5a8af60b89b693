//! Short traces written by hand: each is about one thing that a crash could tear apart.

/// A place or a length in 512-byte units. An extent has 128, a sub-block 8.
pub type Units = usize;

/// One operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Do {
    /// A new volume of a size.
    Create(&'static str, Units),
    /// A write.
    Write(&'static str, Units, Units),
    /// A write that is durable on answer.
    Fua(&'static str, Units, Units),
    /// A discard.
    Discard(&'static str, Units, Units),
    /// Write zeroes; `true`: give the space back.
    Zeroes(&'static str, Units, Units, bool),
    /// A flush.
    Flush(&'static str),
    /// A snapshot of a volume, and its name.
    Snapshot(&'static str, &'static str),
    /// Snapshots of volumes in one cut, and their names.
    Group(&'static [(&'static str, &'static str)]),
    /// A clone of a snapshot, and its name.
    CloneOf(&'static str, &'static str),
    /// A clone of a snapshot with a larger size, and its name.
    LargeClone(&'static str, &'static str, Units),
    /// A volume is rolled back to a snapshot.
    Rollback(&'static str, &'static str),
    /// The same, with the size that the volume has.
    Reset(&'static str, &'static str),
    /// A new size.
    Resize(&'static str, Units),
    /// Another name for a volume or snapshot.
    Rename(&'static str, &'static str),
    /// A volume or snapshot goes.
    Delete(&'static str),
    /// The map is written out.
    Checkpoint,
    /// Time passes, and some composite entry is folded.
    Fold,
    /// Composite entries are turned on in the open pool.
    Enable,
    /// Composite entries are turned off, and time passes until all are folded.
    Disable,
    /// A device is emptied, and leaves the pool.
    Leave(u8),
    /// A device shrinks to this many extents.
    Shrink(u8, usize),
    /// This many first writes of a sub-block in a row, each with a flush.
    FlushEach(&'static str, usize),
}

/// A trace.
#[derive(Clone, Copy, Debug)]
pub struct Script {
    /// Its name, to repeat it.
    pub name: &'static str,
    /// Extents of each device.
    pub devices: &'static [usize],
    /// The pool has composite entries.
    pub composite: bool,
    /// The steps, which are interrupted anywhere.
    pub steps: &'static [Do],
}

use Do::{
    Checkpoint, CloneOf, Create, Delete, Disable, Discard, Enable, Flush, FlushEach, Fold, Fua,
    Group, LargeClone, Leave, Rename, Reset, Resize, Rollback, Shrink, Snapshot, Write, Zeroes,
};

const ONE: &[usize] = &[30];
const TWO: &[usize] = &[22, 14];
/// The first has room for the log and little more.
const THREE: &[usize] = &[22, 8, 14];
/// Little more than the least a pool can have.
const FULL: &[usize] = &[26];

const fn script(name: &'static str, devices: &'static [usize], steps: &'static [Do]) -> Script {
    Script { name, devices, composite: false, steps }
}

const fn composite(name: &'static str, steps: &'static [Do]) -> Script {
    Script { name, devices: ONE, composite: true, steps }
}

/// All of them.
pub const SCRIPTS: &[Script] = &[
    script("first-write", ONE, &[Create("a", 512), Write("a", 0, 8), Flush("a")]),
    script(
        "partial-sub-block",
        ONE,
        &[Create("a", 512), Write("a", 3, 2), Write("a", 6, 5), Flush("a"), Write("a", 1, 1)],
    ),
    script(
        "overwrite",
        ONE,
        &[Create("a", 512), Write("a", 0, 16), Flush("a"), Write("a", 4, 8), Flush("a")],
    ),
    script(
        "discard",
        ONE,
        &[
            Create("a", 512),
            Write("a", 0, 300),
            Flush("a"),
            Discard("a", 0, 128),
            Discard("a", 130, 40),
            Write("a", 8, 8),
            Flush("a"),
        ],
    ),
    script(
        "write-zeroes",
        ONE,
        &[
            Create("a", 512),
            Write("a", 0, 256),
            Flush("a"),
            Zeroes("a", 5, 30, true),
            Zeroes("a", 130, 20, false),
            Zeroes("a", 300, 20, false),
            Flush("a"),
        ],
    ),
    script(
        "flush-pairs",
        ONE,
        &[
            Create("a", 512),
            Flush("a"),
            Flush("a"),
            Write("a", 0, 8),
            Flush("a"),
            Flush("a"),
            Write("a", 0, 8),
            Flush("a"),
        ],
    ),
    script(
        "fua",
        ONE,
        &[
            Create("a", 512),
            Fua("a", 0, 8),
            Fua("a", 2, 3),
            Write("a", 200, 8),
            Fua("a", 128, 8),
            Fua("a", 0, 8),
        ],
    ),
    script(
        "snapshot",
        ONE,
        &[
            Create("a", 400),
            Write("a", 0, 140),
            Snapshot("a", "s"),
            Write("a", 2, 4),
            Write("a", 130, 8),
            Flush("a"),
            Delete("s"),
        ],
    ),
    script(
        "clone",
        ONE,
        &[
            Create("a", 300),
            Write("a", 0, 24),
            Snapshot("a", "s"),
            CloneOf("s", "c"),
            Write("c", 4, 8),
            Flush("c"),
            Delete("a"),
            Delete("s"),
            Write("c", 0, 8),
        ],
    ),
    script(
        "rollback",
        ONE,
        &[
            Create("a", 300),
            Write("a", 0, 24),
            Snapshot("a", "s"),
            Write("a", 8, 140),
            Flush("a"),
            Rollback("a", "s"),
            Write("a", 130, 8),
            Flush("a"),
        ],
    ),
    script(
        "reset",
        ONE,
        &[
            Create("a", 200),
            Write("a", 0, 24),
            Snapshot("a", "s"),
            LargeClone("s", "c", 500),
            Write("c", 8, 140),
            Write("c", 300, 8),
            Flush("c"),
            Reset("c", "s"),
            Write("c", 300, 8),
            Flush("c"),
        ],
    ),
    script(
        "rename",
        ONE,
        &[
            Create("a", 300),
            Write("a", 0, 24),
            Rename("a", "b"),
            Write("b", 8, 140),
            Snapshot("b", "s"),
            Write("b", 4, 8),
            Rename("s", "a"),
            Checkpoint,
            Rename("b", "s"),
            Rename("a", "b"),
            Create("a", 200),
            Delete("b"),
        ],
    ),
    script(
        "group",
        ONE,
        &[
            Create("a", 300),
            Create("b", 200),
            Write("a", 0, 24),
            Write("b", 0, 140),
            Group(&[("b", "t"), ("a", "s")]),
            Write("a", 4, 8),
            Write("b", 130, 8),
            Flush("a"),
            Checkpoint,
            Group(&[("a", "u"), ("b", "v")]),
            Delete("s"),
        ],
    ),
    script(
        "larger-clone",
        ONE,
        &[
            Create("a", 200),
            Write("a", 100, 100),
            Snapshot("a", "s"),
            LargeClone("s", "c", 600),
            Write("c", 190, 200),
            Flush("c"),
        ],
    ),
    script(
        "delete-from-the-middle",
        FULL,
        &[
            Create("a", 300),
            Write("a", 0, 300),
            Snapshot("a", "s"),
            CloneOf("s", "c"),
            Write("c", 0, 8),
            Snapshot("c", "t"),
            Write("a", 150, 8),
            Delete("s"),
            Delete("c"),
            Write("a", 0, 140),
            Flush("a"),
            Delete("a"),
            Delete("t"),
        ],
    ),
    script(
        "roll-back-and-forth",
        ONE,
        &[
            Create("a", 300),
            Write("a", 0, 24),
            Snapshot("a", "s"),
            Resize("a", 136),
            Write("a", 100, 30),
            Snapshot("a", "t"),
            Checkpoint,
            Rollback("a", "s"),
            Write("a", 140, 8),
            Rollback("a", "t"),
            Delete("s"),
            Write("a", 100, 8),
        ],
    ),
    script(
        "shrink-then-grow",
        ONE,
        &[
            Create("a", 400),
            Write("a", 0, 400),
            Flush("a"),
            Resize("a", 136),
            Resize("a", 500),
            Write("a", 300, 8),
            Flush("a"),
        ],
    ),
    script(
        "checkpoint",
        ONE,
        &[
            Create("a", 512),
            Write("a", 0, 24),
            Checkpoint,
            Write("a", 8, 8),
            Write("a", 200, 8),
            Flush("a"),
            Discard("a", 0, 128),
            Checkpoint,
            Write("a", 0, 8),
        ],
    ),
    script(
        "log-goes-round",
        ONE,
        &[Create("a", 1024), FlushEach("a", 12), Discard("a", 0, 128), FlushEach("a", 14)],
    ),
    script(
        "full-pool",
        FULL,
        &[
            Create("a", 1280),
            Write("a", 0, 1280),
            Flush("a"),
            Discard("a", 128, 512),
            Flush("a"),
            Write("a", 0, 1280),
            Flush("a"),
        ],
    ),
    script(
        "two-devices",
        TWO,
        &[
            Create("a", 2400),
            Write("a", 0, 1500),
            Flush("a"),
            Checkpoint,
            Write("a", 100, 8),
            Write("a", 1600, 200),
            Flush("a"),
        ],
    ),
    script(
        "device-leaves",
        THREE,
        &[
            Create("a", 900),
            Write("a", 0, 900),
            Snapshot("a", "s"),
            Write("a", 60, 16),
            Checkpoint,
            Write("a", 400, 8),
            Leave(1),
            Write("a", 300, 8),
            Flush("a"),
        ],
    ),
    script(
        "device-shrinks",
        TWO,
        &[
            Create("a", 1400),
            Write("a", 0, 1400),
            Flush("a"),
            Discard("a", 0, 700),
            Flush("a"),
            Shrink(1, 6),
            Write("a", 1200, 8),
            Flush("a"),
        ],
    ),
    script(
        "reuse-after-delete",
        FULL,
        &[
            Create("a", 512),
            Write("a", 0, 512),
            Flush("a"),
            Delete("a"),
            Create("b", 640),
            Write("b", 0, 640),
            Flush("b"),
        ],
    ),
    composite(
        "redirect",
        &[
            Create("a", 400),
            Write("a", 0, 300),
            Snapshot("a", "s"),
            Write("a", 3, 8),
            Fua("a", 160, 16),
            Write("a", 162, 4),
            Checkpoint,
            Write("a", 8, 24),
            Snapshot("a", "t"),
            Write("a", 64, 8),
            Discard("a", 0, 20),
            Discard("a", 128, 128),
            Flush("a"),
            Rollback("a", "s"),
        ],
    ),
    // Two extents, down.
    composite(
        "fold-down",
        &[
            Create("a", 256),
            Write("a", 0, 256),
            Snapshot("a", "s"),
            Write("a", 120, 20),
            Delete("s"),
            Fold,
        ],
    ),
    // The overlay has 13 sub-blocks of 16.
    composite(
        "fold-up",
        &[
            Create("a", 128),
            Write("a", 0, 128),
            Snapshot("a", "s"),
            Write("a", 0, 104),
            Flush("a"),
            Fold,
        ],
    ),
    composite(
        "fold-between-checkpoints",
        &[
            Create("a", 128),
            Write("a", 0, 128),
            Snapshot("a", "s"),
            Write("a", 0, 16),
            Snapshot("a", "t"),
            Write("a", 16, 8),
            Checkpoint,
            Discard("a", 0, 8),
            Delete("s"),
            Delete("t"),
            Fold,
            Write("a", 8, 8),
            Checkpoint,
        ],
    ),
    script(
        "composite-on",
        ONE,
        &[
            Create("a", 256),
            Write("a", 0, 256),
            Snapshot("a", "s"),
            Write("a", 0, 8),
            Enable,
            Write("a", 130, 8),
            Flush("a"),
            Snapshot("a", "t"),
            Write("a", 3, 8),
            Fua("a", 160, 8),
        ],
    ),
    // Shared bases, a shared overlay, and leaves that several hold.
    composite(
        "composite-off",
        &[
            Create("a", 256),
            Write("a", 0, 256),
            Snapshot("a", "s"),
            Write("a", 3, 8),
            Write("a", 160, 16),
            Snapshot("a", "t"),
            CloneOf("t", "c"),
            Write("a", 8, 8),
            Discard("c", 128, 40),
            Disable,
            Write("a", 128, 8),
            Flush("a"),
            Enable,
            Write("c", 64, 8),
            Flush("c"),
        ],
    ),
];
