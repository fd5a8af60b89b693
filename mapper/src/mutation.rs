//! Switches that take one commit rule out of the mapper, so that a test can show the rule's absence
//! is noticed, and counters of situations that a test must have met to have shown anything. Without
//! the feature `mutations` every question is `false` at compile time, and nothing is counted.

/// Defines the switches, each with its rule and the removed behaviour.
macro_rules! mutations {
    ($($name:ident $rule:literal $what:literal;)*) => {
        /// One rule, or one form of it, taken out.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(u8)]
        pub enum Mutation {
            $(#[doc = $what] $name,)*
        }

        impl Mutation {
            /// Every switch there is.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The rule it belongs to.
            #[must_use]
            pub const fn id(self) -> &'static str {
                match self { $(Self::$name => $rule,)* }
            }

            /// Describes the removed rule.
            #[must_use]
            pub const fn what(self) -> &'static str {
                match self { $(Self::$name => $what,)* }
            }
        }
    };
}

mutations! {
    LogBeforeData "R1" "the log is written without flushing the data first";
    CommitFlushesFirst "R1" "a commit flushes the pool's first device only";
    CaptureLate "R2" "changes are captured after the data flush instead of before";
    CaptureOneSlot "R2" "a commit takes the changes of one worker only";
    AnswerBeforeLog "R3" "a flush is answered before its log blocks are durable";
    ShortFlushDuringCommit "R3" "the short flush is taken while a commit is on its way";
    FlushJoinsRunning "R3" "a flush is answered by one that was sent before it came";
    ReuseAtOnce "R4" "a dropped extent is free at once";
    ReuseAtCapture "R4" "a dropped extent is free once its drop is captured";
    ReleaseUndurable "R4" "extents of a deleted or rolled-back volume are free before that is \
                           durable";
    DrainOneEpoch "R4" "a dropped extent is drained after one advance of the epoch";
    ReuseUndrained "R4" "a dropped extent is free while older IO may still use it";
    ClearBitsRead "R5a" "clear bits are read from the media";
    BitsAtSubmission "R5b" "bits are set when the write is sent";
    NoCancel "R5c" "a discard does not cancel the bits of writes in flight";
    NoCancelWithoutLeaf "R5c" "a discard where no leaf exists does not cancel writes in flight";
    StaleCompletion "R5d" "a copy-on-write publishes the state from its planning";
    UnmapUnderWrite "R5e" "a discard unmaps an extent that slow writes are aimed at";
    FillUndrained "R5f" "a sub-block is filled up while an older write in place may land in it";
    ReplayOld "R6" "replay applies records the checkpoint already holds";
    RingsUnmerged "R6" "rings are replayed one after the other, not in LSN order";
    NoChain "R6" "replay does not check that log blocks chain, nor their epoch";
    FuaWithoutCommit "R7" "FUA sets the data's flag and never commits the map";
    FuaJoinsCommit "R7" "FUA is satisfied by a commit already past its capture";
    LsnNotCarried "R7" "a leaf that stops being shared forgets its last LSN";
    FlushErrorIgnored "R8" "a failed flush is taken for a good one";
    RingAfterFailure "R8" "the ring is replayed after a failed flush";
    NoRecord "R9" "writes are answered without a record in the ring";
    TrimAtCapture "R9" "records leave the ring when captured";
    OverwriteFullRing "R9" "a full ring is overwritten";
    NoDiscardRecord "R9" "discards have no record in the ring";
    NoStructureRecord "R9" "structure changes have no record in the ring";
    DecrementAtOnce "R10" "a dropped reference counts at once";
    FastUnderCopy "R10c" "a write goes in place while a copy-on-write of the extent is in flight";
    NoFence "R11" "the pool opens while IO of its dead owner is under way";
    NoOpeningFlush "R12" "nothing is flushed while the pool is opened";
    RingEmptiedAtReplay "R13" "the ring is emptied when it has been replayed";
    ReplayedIsDurable "R13" "replayed records are taken for durable";
    NoStamp "R14" "any ring is accepted, whatever its open id";
    NextNotWritten "R14" "the next open id is not written to the ring before the superblock";
    NoRestamp "R14" "a ring that is accepted by its next open id is not restamped";
    EpochLate "R15" "log blocks of a new epoch are written before its superblock";
    GroupInPieces "R6" "a group of snapshots has a record for each of them";
    SnapshotUndrained "R16" "a snapshot does not wait for writes in flight";
    StructureUndrained "R16" "rollback, resize and delete do not wait for writes in flight";
    GroupOneByOne "R16" "the snapshots of a group are cut one after the other";
    StructureEarly "R16" "structure changes are answered before they are durable";
    FuzzyCheckpoint "R17a" "pages are written as they are by then, and the shape changes meanwhile";
    CheckpointUnflushed "R17b" "the superblock does not wait for the pages to be durable";
    CheckpointFlushesFirst "R17b" "a checkpoint flushes the pool's first device only";
    TruncateEarly "R17b" "the log is truncated before the superblock is durable";
    DurableEarly "R17b" "a checkpoint counts as durable before its superblock is";
    PagesInPlace "R17c" "pages that the present superblock refers to are written over";
    NoIdleCheckpoint "R17d" "no checkpoint is taken when no LSN was assigned since the last";
    PagesOverCut "R17e" "a checkpoint's pages lie in extents that were freed since its cut";
    ShrinkWholeExtents "R18" "a shrink drops whole extents only";
    RedirectStale "K2" "a redirect publishes the entry from its planning";
    RedirectNotHeld "K3" "a redirect does not keep its base shared until it is visible";
    FoldOutsideEpoch "K4" "a fold copies into an extent that may be reused meanwhile";
    FoldUndrained "K6" "a fold does not wait for older IO to end";
    FoldUnderStructure "K6" "structure changes do not wait for folds";
    FoldBeforeData "K7" "a fold is published before its data is written";
    CompositeBeforeBit "K13" "entries are composite before the superblock says that they may be";
    BitBeforeLog "K13" "the superblock says that entries are plain while the log may still take a \
                        record of a composite one";
    MoveNotHeld "M1" "an extent that is being moved may be written in place";
    MoveUndrained "M2" "a move does not wait for older IO to end";
    MoveBeforeData "M3" "entries are switched before the copy is written";
    SwitchUnderRedirect "M5" "entries are switched under a write that comes to lie over the source";
    TargetNotHeld "M6" "a copy may be written in place before all entries are switched to it";
    PageMovedForOne "M7" "a shared leaf's page is moved for one of its holders";
    RemovedEarly "M8" "a device is taken out of the table with extents on it";
    ShrunkEarly "M8" "a device is smaller in the table while extents behind its new end are in use";
    LeavingGivenOut "M9" "an extent that is leaving is given out once all of them are free";
    MovesForgotten "M10" "a rebalance that ends forgets the moves that it has begun";
    CacheKeptAtWrite "C1" "a write in place leaves what is cached of its extent";
    CacheKeptAtReuse "C2" "an extent that becomes free stays in the read cache";
    CacheKeptAtCopy "C3" "a fold leaves what is cached of the extent that it copies into";
    CachedUnderHold "C4" "an extent that is being moved or folded counts as shared for the cache";
    CacheFilledLate "C5" "a read fills the cache although its extent was dropped meanwhile";
    DiffTrustsShared "diff" "a leaf with any sharer is taken for the same in both";
    AccountByLeaf "account" "an extent counts as exclusive if its leaf is";
}

/// Defines the situations that are counted.
macro_rules! situations {
    ($($name:ident $what:literal;)*) => {
        /// A situation inside the mapper that tests have to cover.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(u8)]
        pub enum Situation {
            $(#[doc = $what] $name,)*
        }

        impl Situation {
            /// Every situation there is.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Describes the situation.
            #[must_use]
            pub const fn what(self) -> &'static str {
                match self { $(Self::$name => $what,)* }
            }
        }
    };
}

situations! {
    LeafCopied "a leaf changed before a checkpoint had written it";
    LeafUnshared "a volume got its own copy of a shared leaf";
    LeafEmptied "a leaf without entries was dropped";
    SlotDropped "a whole slot was discarded with one record";
    CommitWrapped "a commit went around the log's end";
    LogFull "a commit could not take all changes for lack of room in the log";
    ReservesTaken "idle reserves of other volumes served one that waited";
    RecoveredFreed "extents that only replay had seen became free";
    PagesForNext "an extent freed since a running checkpoint's cut was taken for pages";
    PagesShrunk "metadata extents were given back to the pool";
    EmptiedUnderWrite "the last write over a discarded extent unmapped it";
    CopyCancelled "all bits of a copy were cancelled";
    Redirected "a first write came to lie over a shared extent";
    OverlayGrew "an overlay took a sub-block more";
    OverlayCopied "a shared overlay was copied";
    BaseDropped "a discard took the last sub-block of a base";
    FoldedDown "an overlay was folded down into its base";
    FoldedUp "a base was folded up into its overlay";
    BasesWritten "a checkpoint wrote a page of bases";
    CompositeEnabled "composite entries were turned on in an open pool";
    CompositeDisabled "the last composite entry was folded, and they were turned off";
    EntryMoved "an extent of one entry was moved off a leaving device";
    SharedMoved "an entry was switched to the copy of an extent that others name too";
    ExtentMoved "a move has ended with every entry switched";
    LeafPageMoved "a leaf's page was written elsewhere, off a leaving device";
    IndexPageMoved "an index page was written elsewhere, off a leaving device";
    GrantsMoved "a volume's unused extents went back to a leaving device";
    PagesLeft "a leaving device's last metadata pages became free";
    DeviceRemoved "a device was taken out of the pool";
    DeviceShrunk "a device of the pool became smaller";
    Rebalanced "the devices of a pool were evened out";
    RebalanceEnded "a rebalance has ended";
    ReadFromCache "a page was read from the cache";
    ReadJoined "a read waited for another one of the same page";
    PageDropped "a page was dropped from the cache";
    FillDropped "a page was dropped that a read was bringing into the cache";
    PageEvicted "a page of the cache made room for another";
    Passdown "freed extents were passed down to the media";
}

#[cfg(feature = "mutations")]
mod met {
    use super::Situation;
    use std::sync::atomic::{AtomicU64, Ordering};

    static MET: [AtomicU64; Situation::ALL.len()] =
        [const { AtomicU64::new(0) }; Situation::ALL.len()];

    /// Counts a situation, over all pools of this process.
    pub fn met(situation: Situation) {
        MET[situation as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// How often it was met in this process.
    pub fn times_met(situation: Situation) -> u64 {
        MET[situation as usize].load(Ordering::Relaxed)
    }
}

#[cfg(feature = "mutations")]
pub use met::{met, times_met};

/// Counts a situation: not without the feature.
#[cfg(not(feature = "mutations"))]
pub const fn met(_situation: Situation) {}

/// Panics if a rule does not hold that no request can see the absence of.
#[cfg(feature = "mutations")]
pub fn must_hold(holds: bool, rule: &'static str) {
    assert!(holds, "{rule}");
}

/// Checks nothing without the feature.
#[cfg(not(feature = "mutations"))]
pub const fn must_hold(_holds: bool, _rule: &'static str) {}

#[cfg(feature = "mutations")]
mod active {
    use super::Mutation;
    use std::sync::atomic::{AtomicU16, Ordering};

    /// 0, or the active switch plus one. Process-wide: every pool of the process is affected.
    static ACTIVE: AtomicU16 = AtomicU16::new(0);

    /// Takes a rule out of every pool of this process, or puts all back.
    pub fn set(mutation: Option<Mutation>) {
        ACTIVE.store(mutation.map_or(0, |m| m as u16 + 1), Ordering::Relaxed);
    }

    /// Whether this rule is taken out.
    pub fn active(mutation: Mutation) -> bool {
        ACTIVE.load(Ordering::Relaxed) == mutation as u16 + 1
    }
}

#[cfg(feature = "mutations")]
pub use active::{active, set};

/// Whether this rule is taken out: never, without the feature.
#[cfg(not(feature = "mutations"))]
#[must_use]
pub const fn active(_mutation: Mutation) -> bool {
    false
}
